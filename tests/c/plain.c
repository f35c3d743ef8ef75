/* cnorm's arithmetic in plain scalar C: layer norm, its backward pass and a step of an LSTM, in float32. Every number
 * has the bits of the kernels on every instruction set, which main checks. Left out are the float64 path, for rows whose
 * squares leave the range of float32, and the units of frames with tiny numbers. Compile it without contraction: every
 * rounding is one of the contract's. */
#include "check.h"

enum { LANES = 32, BLOCK = 16, FOLD = 8192 };

/* ---- sums: 32 lanes, blocks of 16 additions, a halving tree, float64 every 8192 elements ------------------------- */

typedef struct lane_sum {
    float block[LANES], lane[LANES];
    ptrdiff_t count;
    double total;
} lane_sum;

static void end_block(lane_sum *s)
{
    for (int i = 0; i < LANES; ++i) s->lane[i] += s->block[i], s->block[i] = 0;
}

static float tree(const float lanes[LANES])
{
    float v[LANES];
    memcpy(v, lanes, sizeof v);
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; ++i) v[i] += v[i + half];
    return v[0];
}

static void end_fold(lane_sum *s)
{
    end_block(s);
    s->total += (double)tree(s->lane);
    memset(s->lane, 0, sizeof s->lane);
}

static void add(lane_sum *s, float term)
{
    s->block[s->count++ % LANES] += term;
    if (s->count % (BLOCK * LANES) == 0) end_block(s);
    if (s->count % FOLD == 0) end_fold(s);
}

static double sum_of(lane_sum *s)
{
    if (s->count % FOLD) end_fold(s);
    return s->total;
}

/* ---- layer norm -------------------------------------------------------------------------------------------------- */

typedef struct statistics {
    float K, delta, rstd; /* the mean is the pair K + delta */
} statistics;

/* the mean of the first 32 elements if they have one sign, else 0 */
static float initial_shift(const float *x, ptrdiff_t n)
{
    int negative = 0;
    for (int i = 0; i < LANES && n >= LANES; ++i) negative += signbit(x[i]) != 0;
    return n >= LANES && (negative == 0 || negative == LANES) ? tree(x) * (1.0f / LANES) + 0 : 0;
}

/* Statistics about K. False where (mean - K)^2 exceeds the variance: `mean` is then the K of a second sweep. */
static int statistics_about(float K, const float *x, ptrdiff_t n, double eps, statistics *st, double *mean)
{
    lane_sum sum = {.count = 0}, squares = {.count = 0};
    for (ptrdiff_t j = 0; j < n; ++j) {
        const float d = x[j] - K, square = d * d;
        add(&sum, d);
        add(&squares, square);
    }
    const double S = sum_of(&sum), Q = sum_of(&squares), per = 1.0 / (double)n, delta = S * per, m2 = Q - S * delta;
    *st = (statistics){K, (float)delta, (float)(1.0 / sqrt(m2 * per + eps))};
    *mean = (double)K + delta;
    return S * delta <= m2;
}

static float normalised(statistics st, float x) { return ((x - st.K) - st.delta) * st.rstd; }

static statistics layer_norm(const float *x, ptrdiff_t n, const float *gain, const float *bias, double eps, float *y)
{
    statistics st;
    double mean;
    if (!statistics_about(initial_shift(x, n), x, n, eps, &st, &mean))
        (void)statistics_about((float)mean, x, n, eps, &st, &mean);
    for (ptrdiff_t j = 0; j < n; ++j) y[j] = normalised(st, x[j]) * gain[j] + bias[j];
    return st;
}

/* dx of a row; its terms are added to dparams [2, n], dgain and dbias. Rows are added in order, 64 at most. */
static void layer_norm_backward(const float *dy, const float *x, statistics st, ptrdiff_t n, const float *gain,
                                float *dx, float *dparams)
{
    lane_sum of_g = {.count = 0}, of_g_xhat = {.count = 0};
    for (ptrdiff_t j = 0; j < n; ++j) {
        const float xhat = normalised(st, x[j]), g = dy[j] * gain[j];
        add(&of_g, g);
        add(&of_g_xhat, g * xhat);
        dparams[j] += dy[j] * xhat;
        dparams[n + j] += dy[j];
    }
    const float G = (float)(sum_of(&of_g) / (double)n), H = (float)(sum_of(&of_g_xhat) / (double)n);
    for (ptrdiff_t j = 0; j < n; ++j)
        dx[j] = st.rstd * ((dy[j] * gain[j] - G) - normalised(st, x[j]) * H);
}

/* ---- one step of an LSTM ----------------------------------------------------------------------------------------- */

/* a row of W times x: fma in blocks of 16 inputs, the blocks added in order */
static float product(const float *w, const float *x, ptrdiff_t cols)
{
    float sum = 0;
    for (ptrdiff_t k = 0; k < cols; k += BLOCK) {
        float block = 0;
        for (ptrdiff_t j = k; j < cols && j < k + BLOCK; ++j) block = fmaf(w[j], x[j], block);
        sum += block;
    }
    return sum;
}

/* exp(t) - 1 = 2^k p + (2^k - 1), p = exp(r) - 1 of r = t - k ln 2 by its series */
static double expm1_of(double t)
{
    const double round = 6755399441055744.0, shifted = t * 1.4426950408889634 + round; /* k in its lowest bits */
    const double r = t - (shifted - round) * 0.6931471805599453;
    static const double c[] = {1.0 / 40320, 1.0 / 5040, 1.0 / 720, 1.0 / 120, 1.0 / 24, 1.0 / 6, 0.5};
    double q = 1.0 / 362880, scale = 1;
    for (int i = 0; i < 7; ++i) q = q * r + c[i];
    uint64_t k, bits;
    memcpy(&k, &shifted, sizeof k);
    memcpy(&bits, &scale, sizeof bits);
    bits += k << 52;
    memcpy(&scale, &bits, sizeof scale);
    return scale * ((q * r) * r + r) + (scale - 1.0);
}

static float sigmoid(float x)
{
    return (float)(1.0 / (2.0 + expm1_of((double)-fmaxf(-104, fminf(104, x)))));
}
static float tanh_of(float x)
{
    const double e = expm1_of((double)(fminf(10, fabsf(x)) * -2.0f));
    return copysignf((float)(-e / (2.0 + e)), x);
}

static float without_tiny(float v) { return v < 0x1p-100f && v > -0x1p-100f ? 0 : v; }

/* The state h, c [units] after an input x; gates f, i, o, g: weights [4, units, inputs] and [4, units, units] */
static void lstm_step(ptrdiff_t inputs, ptrdiff_t units, const float *w_x, const float *w_h, const float *bias,
                      const float *x, float *state)
{
    float *h = state, *c = state + units, z[4][64];
    for (ptrdiff_t r = 0; r < 4 * units; ++r)
        z[r / units][r % units] = (product(w_h + r * units, h, units) + product(w_x + r * inputs, x, inputs)) + bias[r];
    for (ptrdiff_t j = 0; j < units; ++j) {
        const float keep = sigmoid(z[0][j]) * c[j], new = sigmoid(z[1][j]) * tanh_of(z[3][j]);
        c[j] = without_tiny(keep + new);
        h[j] = without_tiny(sigmoid(z[2][j]) * tanh_of(c[j]));
    }
}

/* ---- the kernels have the same bits ------------------------------------------------------------------------------ */

enum { ROWS = 3, MOST = 20000 };

static float x[ROWS * MOST], dy[ROWS * MOST], gain[MOST], bias[MOST];

static void compare_rows(const char *isa, ptrdiff_t n)
{
    static float y[2][ROWS * MOST], dx[2][ROWS * MOST], dparams[2][2 * MOST], st[3 * ROWS], partials[4 * MOST];
    memset(dparams, 0, sizeof dparams);
    for (int r = 0; r < ROWS; ++r) {
        const statistics of_row = layer_norm(x + r * n, n, gain, bias, (double)1e-5f, y[0] + r * n);
        layer_norm_backward(dy + r * n, x + r * n, of_row, n, gain, dx[0] + r * n, dparams[0]);
    }
    CHECK(cnorm_layer_norm(CNORM_F32, &(cnorm_norm){.rows = ROWS, .n = n, .x = x, .gain = gain, .bias = bias, .eps = 1e-5,
        .y = y[1], .stats = st}) == CNORM_OK, "%s %td", isa, n);
    CHECK(cnorm_layer_norm_backward(CNORM_F32, &(cnorm_norm_backward){.rows = ROWS, .n = n, .dy = dy, .x = x, .gain = gain,
        .stats = st, .dx = dx[1], .dgain = dparams[1], .dbias = dparams[1] + n,
        .partials = partials}) == CNORM_OK, "%s %td", isa, n);
    const size_t row = (size_t)n * sizeof(float);
    CHECK(memcmp(y[0], y[1], ROWS * row) == 0, "%s %td", isa, n);
    CHECK(memcmp(dx[0], dx[1], ROWS * row) == 0, "%s %td", isa, n);
    CHECK(memcmp(dparams[0], dparams[1], 2 * row) == 0, "%s %td", isa, n);
}

static void compare_steps(const char *isa, ptrdiff_t inputs, ptrdiff_t units, uint64_t *seed)
{
    const ptrdiff_t padded = cnorm_padded_units(units);
    float *w_x = allocate(4 * units * inputs * 4), *w_h = allocate(4 * units * units * 4), *b = allocate(4 * units * 4);
    float *panels_x = allocate(cnorm_matrix_floats(4, units, inputs) * 4), *padded_bias = allocate(4 * padded * 4);
    float *panels_h = allocate(cnorm_matrix_floats(4, units, units) * 4), *plain = allocate(2 * units * 4);
    for (ptrdiff_t i = 0; i < 4 * units * inputs; ++i) w_x[i] = (float)(0.3 * bell(seed));
    for (ptrdiff_t i = 0; i < 4 * units * units; ++i) w_h[i] = (float)(0.3 * bell(seed));
    for (ptrdiff_t i = 0; i < 4 * units; ++i)
        padded_bias[i / units * padded + i % units] = b[i] = (float)(0.3 * bell(seed));
    CHECK(cnorm_matrix_pack(4, units, inputs, 0, w_x, panels_x) == CNORM_OK, "%td", units);
    CHECK(cnorm_matrix_pack(4, units, units, 0, w_h, panels_h) == CNORM_OK, "%td", units);
    const cnorm_layer layer = {.kind = CNORM_LAYER_CELL, .as = {.cell = {
        .kind = CNORM_CELL_LSTM, .scope = CNORM_SCOPE_NONE, .cell_norm = CNORM_CELL_NORM_NONE, .eps = 1e-5f,
        .cell_clip = INFINITY, .projection_clip = INFINITY, .bias = padded_bias,
        .weight_x = {.panels = panels_x, .gates = 4, .units = units, .cols = inputs, .type = CNORM_WEIGHT_F32},
        .weight_h = {.panels = panels_h, .gates = 4, .units = units, .cols = units, .type = CNORM_WEIGHT_F32}}}};
    float *state = allocate(cnorm_state_floats(&layer, 1) * 4);
    float *scratch = allocate(cnorm_scratch_floats(&layer, 1, 1) * 4);
    for (int step = 0; step < 20; ++step) {
        float h[64];
        CHECK(cnorm_run(&(cnorm_frames){.layers = &layer, .count = 1, .frames = 1, .x = x + step * inputs, .state = state,
            .scratch = scratch, .y = h}) == CNORM_OK, "%s %td", isa, units);
        lstm_step(inputs, units, w_x, w_h, b, x + step * inputs, plain);
        CHECK(memcmp(h, plain, (size_t)units * sizeof *h) == 0, "%s, %td units, step %d", isa, units, step);
    }
    float *const owned[] = {w_x, w_h, b, panels_x, padded_bias, panels_h, plain, state, scratch};
    for (size_t i = 0; i < sizeof owned / sizeof *owned; ++i) release(owned[i]);
}

int main(void)
{
    static const ptrdiff_t sizes[] = {1, 31, 32, 100, 512, 513, 767, 1000, 2048, 2049, 8192, 8193, 20000};
    uint64_t seed = 1;
    for (ptrdiff_t i = 0; i < ROWS * MOST; ++i) x[i] = (float)bell(&seed), dy[i] = (float)bell(&seed);
    for (ptrdiff_t j = 0; j < MOST; ++j) gain[j] = (float)(1 + 0.25 * bell(&seed)), bias[j] = (float)bell(&seed);
    FOR_EACH_ISA(isa) {
        for (size_t s = 0; s < sizeof sizes / sizeof *sizes; ++s) compare_rows(cnorm_isa_name(isa), sizes[s]);
        compare_steps(cnorm_isa_name(isa), 12, 64, &seed);
        compare_steps(cnorm_isa_name(isa), 37, 23, &seed);
    }
    for (ptrdiff_t i = 0; i < ROWS * MOST; ++i) x[i] = x[i] * 0.125f + 3; /* a mean far from 0: K, and a second sweep */
    x[0] = 1000;
    FOR_EACH_ISA(isa)
        for (size_t s = 0; s < sizeof sizes / sizeof *sizes; ++s) compare_rows(cnorm_isa_name(isa), sizes[s]);
    return check_result();
}
