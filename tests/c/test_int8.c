/* int8 weights: every backend's sums against int64 sums, the packed product against the formula of cnorm_rnn.h in float64,
 * and the input that packing refuses. All backends are compared with the same integers, so they agree with each other. */
#include "cpu.h"
#include "int8/backends.h"
#include "kernels/kernels.h"
#include "network.h"


#if defined(__x86_64__)
extern const cnorm_int8_backend cnorm_int8_avxvnni_as_avx512; /* the same body, in the encoding of AVX-512 VNNI */
#define ALL_UNITS(X) CNORM_INT8_BACKENDS(X) X(avxvnni_as_avx512, cnorm_cpu_has_avx512vnni())
#else
#define ALL_UNITS(X) CNORM_INT8_BACKENDS(X)
#endif

typedef int filler(uint64_t *state, int limit);
static int anything(uint64_t *state, int limit) { return (int)(random_bits(state) % (uint64_t)(2 * limit + 1)) - limit; }
static int largest(uint64_t *state, int limit) { (void)state; return limit; }
static int smallest_one(uint64_t *state, int limit) { (void)state; return -limit; }
static int extremes(uint64_t *state, int limit) { return random_bits(state) & 1 ? limit : -limit; }

/* w [rows, K] and q [n, K] of these fillers: the backend's sums, less their bias, are the int64 sums modulo 2^32 */
static void check_backend(const cnorm_int8_backend *backend, ptrdiff_t rows, ptrdiff_t quads, ptrdiff_t n, filler *weight, filler *input)
{
    const ptrdiff_t cols = 4 * quads, stride = rows + 7;
    uint64_t state = (uint64_t)(rows + 3 * quads + 1000 * n);
    uint8_t *w = allocate(rows * cols);
    int16_t *q = allocate(n * cols * 2);
    int32_t (*x)[2] = allocate(n * quads * 8), *sums = allocate(n * stride * 4);
    for (ptrdiff_t i = 0; i < rows * cols; ++i) w[i] = (uint8_t)(weight(&state, 127) + CNORM_INT8_BIAS);
    for (ptrdiff_t i = 0; i < n * cols; ++i) q[i] = (int16_t)input(&state, CNORM_INT8_LEVELS);
    for (ptrdiff_t s = 0; s < n; ++s) backend->arrange(quads, q + s * cols, n, x + s);
    for (ptrdiff_t i = 0; i < n * stride; ++i) sums[i] = 12345;
    backend->multiply(rows, quads, w, n, (const int32_t (*)[2])x, sums, stride);
    for (ptrdiff_t s = 0; s < n; ++s) {
        int64_t q_sum = 0;
        for (ptrdiff_t k = 0; k < cols; ++k) q_sum += q[s * cols + k];
        for (ptrdiff_t r = 0; r < rows; ++r) {
            int64_t want = 0;
            for (ptrdiff_t k = 0; k < cols; ++k)
                want += (w[r / PANEL * PANEL * cols + k / 4 * 4 * PANEL + r % PANEL * 4 + k % 4] - CNORM_INT8_BIAS) * (int64_t)q[s * cols + k];
            const int32_t got = (int32_t)((uint32_t)sums[s * stride + r] - (uint32_t)(q_sum * CNORM_INT8_BIAS));
            CHECK(got == want, "%s, %td quads, %td vectors: zi[%td, %td] = %d, wanted %lld", backend->name, quads, n, s, r, got, (long long)want);
        }
        for (ptrdiff_t r = rows; r < stride && s + 1 < n; ++r) CHECK(sums[s * stride + r] == 12345, "%s wrote beyond its rows", backend->name);
    }
    release(w), release(q), release(x), release(sums);
}

static void test_backends(const cnorm_int8_backend *backend)
{
    static filler *const fillers[] = {anything, largest, smallest_one, extremes};
    for (ptrdiff_t quads = 1; quads < 12; ++quads)
        for (ptrdiff_t n = 1; n <= CNORM_ROWS; ++n) check_backend(backend, PANEL * (1 + quads % 3), quads, n, anything, anything);
    for (size_t i = 0; i < 16; ++i) /* 516 quads: the longest rows whose sums fit into int32 for any weights */
        check_backend(backend, PANEL, 516, 1 + (ptrdiff_t)i % 3, fillers[i / 4], fillers[i % 4]);
}

/* ---- packed matrices, through a Linear layer ------------------------------------------------------------------ */

typedef struct packed {
    cnorm_matrix matrix;
    int8_t *rows;
    float *scales;
    void *panels;
} packed;

static packed pack_rows_of(ptrdiff_t units, ptrdiff_t cols, const float *w)
{
    packed p = {.matrix = {.gates = 1, .units = units, .cols = cols, .type = CNORM_WEIGHT_I8}};
    p.rows = allocate(units * cols), p.scales = allocate(units * 4), p.panels = allocate(cnorm_matrix_bytes(&p.matrix));
    CHECK(cnorm_matrix_round(&p.matrix, w, p.rows, p.scales) == CNORM_OK, "%td columns", cols);
    CHECK(cnorm_matrix_pack_rows(&p.matrix, p.rows, p.scales, p.panels) == CNORM_OK, "%td columns", cols);
    return p;
}

static void free_packed(packed *p) { release(p->rows), release(p->scales), release(p->panels); }

/* y [n, units] = W x on the instruction set in use */
static void multiply(const packed *p, ptrdiff_t n, const float *x, float *y)
{
    const cnorm_layer layer = {.kind = CNORM_LAYER_LINEAR, .as = {.linear = {.weight = p->matrix}}};
    float *scratch = allocate(cnorm_scratch_floats(&layer, 1, CNORM_ROWS) * 4);
    CHECK(cnorm_run(&(cnorm_frames){.layers = &layer, .count = 1, .frames = n, .x = x, .scratch = scratch, .rows = CNORM_ROWS,
        .y = y}) == CNORM_OK, "run");
    release(scratch);
}

/* the formula of matvec_int8.inl.h, term by term, each operation rounded to float32 where it says float */
static float expected(const packed *p, ptrdiff_t r, const float *x)
{
    const ptrdiff_t cols = p->matrix.cols;
    float m = 0;
    for (ptrdiff_t k = 0; k < cols; ++k) {
        if (!(fabsf(x[k]) <= 0x1.fffffep127f)) return (float)NAN;
        if (fabsf(x[k]) > m) m = fabsf(x[k]);
    }
    if (m < 0x1p-100f) return 0;
    const float to = (float)p->matrix.levels / m, from = m / (float)p->matrix.levels;
    int64_t zi = 0;
    for (ptrdiff_t k = 0; k < cols; ++k) {
        const long q = lrintf(x[k] * to);
        CHECK(labs(q) <= p->matrix.levels, "q = %ld of %d levels", q, p->matrix.levels);
        zi += p->rows[r * cols + k] * (int64_t)q;
    }
    CHECK(zi <= INT32_MAX && zi >= INT32_MIN, "zi = %lld", (long long)zi);
    const float scale = p->scales[r] * from;
    return (float)zi * scale;
}

typedef enum input_kind { USUAL, OUTLIER, ZEROS, TINY, SMALL, HUGE_ONES, WITH_INF, WITH_NAN, LEVELS, INPUTS } input_kind;

static void fill_input(input_kind kind, ptrdiff_t n, float *x, uint64_t *state)
{
    for (ptrdiff_t k = 0; k < n; ++k) {
        x[k] = (float)bell(state);
        if (kind == ZEROS) x[k] = 0;
        if (kind == TINY) x[k] *= 1e-38f;
        if (kind == SMALL) x[k] *= 0x1p-98f;
        if (kind == HUGE_ONES) x[k] *= 0x1p125f;
        if (kind == LEVELS) x[k] = random_bits(state) & 1 ? 1.0f : -1.0f;
    }
    if (kind == OUTLIER) x[n / 2] = 1e6f;
    if (kind == WITH_INF) x[n - 1] = -INFINITY;
    if (kind == WITH_NAN) x[0] = NAN;
}

static int same(float a, float b) { return (isnan(a) && isnan(b)) || a == b; }

static void test_products(ptrdiff_t units, ptrdiff_t cols)
{
    enum { VECTORS = 11 };
    uint64_t state = (uint64_t)(units * 31 + cols);
    float *w = allocate(units * cols * 4), *x = allocate(VECTORS * cols * 4), *y = allocate(VECTORS * units * 4);
    for (ptrdiff_t i = 0; i < units * cols; ++i) w[i] = (float)bell(&state) * (float)(1 + i / cols % 5) * (i / cols % 7 == 3 ? 0 : 1);
    packed p = pack_rows_of(units, cols, w);
    for (ptrdiff_t r = 0; r < units; ++r)
        for (ptrdiff_t k = 0; k < cols; ++k) {
            const double error = fabs((double)p.rows[r * cols + k] * (double)p.scales[r] - (double)w[r * cols + k]);
            CHECK(error <= (double)p.scales[r] * (0.5 + 127 * 0x1p-23), "weight [%td, %td] is off by %g steps", r, k, error / (double)p.scales[r]);
        }
    for (input_kind first = 0; first < INPUTS; ++first) { /* inputs of different kinds in one batch */
        for (ptrdiff_t s = 0; s < VECTORS; ++s) fill_input((input_kind)((first + s) % INPUTS), cols, x + s * cols, &state);
        FOR_EACH_ISA(isa) {
            multiply(&p, VECTORS, x, y);
            for (ptrdiff_t s = 0; s < VECTORS; ++s)
                for (ptrdiff_t r = 0; r < units; ++r) {
                    const float want = expected(&p, r, x + s * cols) + 0.0f;
                    CHECK(same(y[s * units + r], want), "[%td, %td], input %td of kind %d on %s: %.9g, wanted %.9g", units, cols, s,
                          (int)((first + s) % INPUTS), cnorm_isa_active(), (double)y[s * units + r], (double)want);
                }
        }
    }
    free_packed(&p), release(w), release(x), release(y);
}

/* rows of extreme weights: sums at the limit of int32, so that the input has fewer quantisation levels */
static void test_limit(ptrdiff_t cols)
{
    float *w = allocate(4 * cols * 4), *x = allocate(cols * 4), y[4];
    for (ptrdiff_t i = 0; i < 4 * cols; ++i) w[i] = i / cols == 1 ? -1 : i / cols == 2 && i % 2 ? -1 : 1;
    for (ptrdiff_t k = 0; k < cols; ++k) x[k] = k % 3 == 1 ? -1 : 1;
    packed p = pack_rows_of(4, cols, w);
    const int64_t worst = 127 * (int64_t)cols;
    CHECK(p.matrix.levels * worst <= INT32_MAX, "%td columns have %d levels", cols, p.matrix.levels);
    CHECK(p.matrix.levels == CNORM_INT8_LEVELS || (p.matrix.levels + 1) * worst > INT32_MAX, "%td columns have %d levels", cols, p.matrix.levels);
    for (int ones = 0; ones < 2; ++ones) {
        for (ptrdiff_t k = 0; ones && k < cols; ++k) x[k] = 1;
        FOR_EACH_ISA(isa) {
            multiply(&p, 1, x, y);
            for (ptrdiff_t r = 0; r < 4; ++r)
                CHECK(same(y[r], expected(&p, r, x)), "%td columns on %s: %.9g, wanted %.9g", cols, cnorm_isa_active(), (double)y[r],
                      (double)expected(&p, r, x));
        }
    }
    free_packed(&p), release(w), release(x);
}

/* More levels than the weights allow, as in a packed file whose data are damaged: integer sums wrap modulo 2^32 in
 * the float64 path, too, which takes this norm because the products in float32 are infinite. */
static void test_sums_that_wrap(void)
{
    enum { UNITS = 16, COLS = 4096 };
    uint64_t seed = 5;
    network net = {.type = CNORM_WEIGHT_F32, .units = UNITS}, *p = &net;
    int8_t *rows = allocate(UNITS * COLS);
    float scales[UNITS], *x = network_floats(p, allocate, COLS), y[UNITS], first[UNITS];
    for (ptrdiff_t i = 0; i < UNITS * COLS; ++i) rows[i] = i / COLS % 2 ? -127 : 127;
    for (ptrdiff_t r = 0; r < UNITS; ++r) scales[r] = 0x1p10f;
    for (ptrdiff_t k = 0; k < COLS; ++k) x[k] = 0x1p120f;
    cnorm_matrix of_x = {.gates = 1, .units = UNITS, .cols = COLS, .group = 1, .type = CNORM_WEIGHT_I8};
    void *const panels = net.owned[net.owns++] = allocate(cnorm_matrix_bytes(&of_x));
    CHECK(cnorm_matrix_pack_rows(&of_x, rows, scales, panels) == CNORM_OK, "rows");
    of_x.levels = CNORM_INT8_LEVELS;
    const float *gain = network_random(p, allocate, UNITS, 1, 0.25, &seed), *w = network_floats(p, allocate, UNITS * UNITS);
    const cnorm_layer layer = {.kind = CNORM_LAYER_CELL, .as = {.cell = {
        .kind = CNORM_CELL_RNN, .scope = CNORM_SCOPE_SPLIT, .eps = 1e-5f, .gain_x = gain, .gain_h = gain, .bias = gain,
        .weight_x = of_x, .weight_h = network_pack(p, allocate, 1, UNITS, UNITS, 1, w)}}};
    float *state = network_floats(p, allocate, cnorm_state_floats(&layer, 1));
    float *scratch = network_floats(p, allocate, cnorm_scratch_floats(&layer, 1, 1));
    FOR_EACH_ISA(isa) {
        memset(state, 0, UNITS * sizeof *state);
        CHECK(cnorm_run(&(cnorm_frames){.layers = &layer, .count = 1, .frames = 1, .x = x, .state = state, .scratch = scratch,
            .y = y}) == CNORM_OK, "run");
        if (isa == 0) memcpy(first, y, sizeof y);
        CHECK(memcmp(first, y, sizeof y) == 0 && !isnan(y[0]) && y[0] != y[1], "%s: %g, %g", cnorm_isa_active(), (double)y[0], (double)y[1]);
    }
    network_free(&net), release(rows);
}

static void test_refusals(void)
{
    float w[8] = {1, 2, 3, 4, 5, 6, 7, 70000}, scales[2];
    int8_t rows[8];
    uint16_t halves[8];
    void *panels = allocate(4096);
    cnorm_matrix m = {.gates = 1, .units = 2, .cols = 4, .type = CNORM_WEIGHT_F16};
    CHECK(cnorm_matrix_round(&m, w, halves, NULL) == CNORM_ERROR_VALUE, "70000 is no float16");
    m.type = CNORM_WEIGHT_I8;
    CHECK(cnorm_matrix_round(&m, w, rows, NULL) == CNORM_ERROR_NULL, "no scales");
    CHECK(cnorm_matrix_round(&m, w, rows, scales) == CNORM_OK, "a matrix");
    CHECK(cnorm_matrix_pack_rows(&m, rows, NULL, panels) == CNORM_ERROR_NULL, "no scales");
    scales[1] = NAN;
    CHECK(cnorm_matrix_pack_rows(&m, rows, scales, panels) == CNORM_ERROR_VALUE, "a scale of NaN");
    scales[1] = 0;
    CHECK(cnorm_matrix_pack_rows(&m, rows, scales, panels) == CNORM_ERROR_VALUE, "a scale of 0");
    scales[1] = 1, rows[3] = -128;
    CHECK(cnorm_matrix_pack_rows(&m, rows, scales, panels) == CNORM_ERROR_VALUE, "-128");
    w[0] = INFINITY;
    CHECK(cnorm_matrix_round(&m, w, rows, scales) == CNORM_ERROR_VALUE, "an infinite weight");
    m.cols = CNORM_INT8_COLS + 1;
    CHECK(cnorm_matrix_bytes(&m) == 0 && cnorm_matrix_pack_rows(&m, rows, scales, panels) == CNORM_ERROR_SIZE, "too many columns");
    m.type = (cnorm_weight_type)7;
    CHECK(cnorm_matrix_bytes(&m) == 0, "an unknown type");
    release(panels);
}

/* float16 rows are the centred weights rounded to nearest, and widen to the numbers that the float32 path multiplies */
static void test_float16(void)
{
    enum { UNITS = 5, COLS = 21 };
    uint64_t state = 3;
    float w[UNITS * COLS], x[COLS], y[UNITS], y_wide[UNITS], widened[UNITS * COLS];
    uint16_t rows[UNITS * COLS];
    for (int i = 0; i < UNITS * COLS; ++i) w[i] = (float)ldexp(bell(&state), i % 30 - 20);
    for (int k = 0; k < COLS; ++k) x[k] = (float)bell(&state);
    cnorm_matrix half = {.gates = 1, .units = UNITS, .cols = COLS, .type = CNORM_WEIGHT_F16}, wide = half;
    wide.type = CNORM_WEIGHT_F32;
    CHECK(cnorm_matrix_round(&half, w, rows, NULL) == CNORM_OK, "float16");
    for (int i = 0; i < UNITS * COLS; ++i) {
        CHECK(rows[i] == half_of(CNORM_F16, (double)w[i]), "%a is %x, wanted %x", (double)w[i], rows[i], half_of(CNORM_F16, (double)w[i]));
        widened[i] = (float)half_value(CNORM_F16, rows[i]);
    }
    packed h = {.matrix = half}, f = {.matrix = wide};
    h.panels = allocate(cnorm_matrix_bytes(&half)), f.panels = allocate(cnorm_matrix_bytes(&wide));
    CHECK(cnorm_matrix_pack_rows(&h.matrix, rows, NULL, h.panels) == CNORM_OK, "float16");
    CHECK(cnorm_matrix_pack_rows(&f.matrix, widened, NULL, f.panels) == CNORM_OK, "float32");
    FOR_EACH_ISA(isa) {
        multiply(&h, 1, x, y), multiply(&f, 1, x, y_wide);
        CHECK(memcmp(y, y_wide, sizeof y) == 0, "float16 weights are not widened exactly on %s", cnorm_isa_active());
    }
    release(h.panels), release(f.panels);
}

int main(void)
{
#define TEST_UNIT(name, condition) if (condition) test_backends(&cnorm_int8_##name);
    ALL_UNITS(TEST_UNIT)
    static const ptrdiff_t shapes[][2] = {{1, 1}, {3, 2}, {16, 3}, {31, 4}, {33, 5}, {64, 63}, {70, 130}};
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; ++i) test_products(shapes[i][0], shapes[i][1]);
    static const ptrdiff_t limits[] = {2063, 2064, 2065, 4096, 20011};
    for (size_t i = 0; i < sizeof limits / sizeof *limits; ++i) test_limit(limits[i]);
    test_sums_that_wrap();
    test_refusals();
    test_float16();
    return check_result();
}
