/* The layer-normalised LSTM (Ba, Kiros, Hinton 2016, Eq. 20-22) and the read-out against plain float64 loops.
 *
 * A unit-gain LN-LSTM is chaotic: rounding errors of free runs grow with time. So each step starts from the float64
 * trajectory's state rounded to float32, and the variance of each number's error is propagated with it, roundings
 * taken as independent; four standard deviations are allowed. Worst-case bounds would allow a hundred times as much.
 * Free runs must agree bit for bit between instruction sets, and however the steps are divided into calls.
 */
#include "frames.h"
#include "stack.h"

#define U 0x1p-24 /* the unit roundoff */

enum { MOST = 4 * 130, STEPS = 40, BLOCK = 16 };

/* numbers, and the variances of their errors */
typedef struct uncertain { double v[MOST], s[MOST]; } uncertain;

static double square(double a) { return a * a; }

/* z [rows] = W [rows, cols] x, summed in blocks; `centred`: each column of W less its mean, rounded */
static void product(ptrdiff_t rows, ptrdiff_t cols, const float *w, const double *x, const double *x_variance, int centred,
                    uncertain *z)
{
    memset(z, 0, sizeof *z);
    static double block[MOST];
    memset(block, 0, sizeof block);
    for (ptrdiff_t k = 0; k < cols; ++k) {
        double mean = 0;
        for (ptrdiff_t r = 0; centred && r < rows; ++r) mean += (double)w[r * cols + k] / (double)rows;
        for (ptrdiff_t r = 0; r < rows; ++r) {
            const double weight = (double)w[r * cols + k] - mean, term = weight * x[k];
            block[r] += term;
            z->s[r] += square(U) * ((1 + centred) * square(term) + square(block[r]));
            if (x_variance) z->s[r] += square(weight) * x_variance[k];
            if ((k + 1) % BLOCK == 0 || k + 1 == cols) {
                z->v[r] += block[r];
                z->s[r] += square(U * z->v[r]);
                block[r] = 0;
            }
        }
    }
}

/* z [n] becomes LN(z) gain: the error of z_i moves xhat_i, the mean and the deviation; seven roundings at most follow */
static void normalise(ptrdiff_t n, double eps, const float *gain, uncertain *z)
{
    double mean = 0, var = 0, s_mean = 0, s_deviation = 0;
    for (ptrdiff_t i = 0; i < n; ++i) mean += z->v[i] / (double)n, s_mean += z->s[i] / square((double)n);
    for (ptrdiff_t i = 0; i < n; ++i) var += square(z->v[i] - mean) / (double)n;
    const double rstd = 1 / sqrt(var + eps);
    for (ptrdiff_t i = 0; i < n; ++i) s_deviation += z->s[i] * square((z->v[i] - mean) * rstd / (double)n);
    for (ptrdiff_t i = 0; i < n; ++i) {
        const double xhat = (z->v[i] - mean) * rstd, g = (double)gain[i];
        const double inherited = square(rstd) * (z->s[i] * (1 - 2 / (double)n) + s_mean + square(xhat) * s_deviation);
        z->s[i] = square(g) * (inherited + 7 * square(U) * fmax(1, square(xhat)));
        z->v[i] = xhat * g;
    }
}

static double sigmoid(double a) { return 1 / (1 + exp(-a)); }

/* advances h, c [units] by one step; y [outputs] */
static void reference_step(const network *net, const float *x, double *h, double *c, uncertain *h_out, uncertain *c_out, uncertain *y)
{
    static uncertain zx, zh, ln;
    double input[MOST];
    const ptrdiff_t units = net->units;
    for (ptrdiff_t k = 0; k < net->inputs; ++k) input[k] = (double)x[k];
    product(4 * units, net->inputs, net->weight_x, input, NULL, 1, &zx);
    product(4 * units, units, net->weight_h, h, NULL, 1, &zh);
    normalise(4 * units, (double)1e-5f, net->gain_x, &zx);
    normalise(4 * units, (double)1e-5f, net->gain_h, &zh);
    for (ptrdiff_t j = 0; j < 4 * units; ++j) { /* (3): two sums, each rounded */
        const double a = zx.v[j] + zh.v[j] + (double)net->bias[j];
        zx.s[j] += zh.s[j] + square(U) * (square(zx.v[j] + zh.v[j]) + square(a));
        zx.v[j] = a;
    }
    for (ptrdiff_t j = 0; j < units; ++j) { /* (4): the slope of sigmoid is at most 1/4, of tanh 1; each is rounded */
        const double f = sigmoid(zx.v[j]), i = sigmoid(zx.v[units + j]), g = tanh(zx.v[3 * units + j]);
        const double carried = f * c[j], added = i * g;
        ln.v[j] = c_out->v[j] = carried + added;
        ln.s[j] = c_out->s[j] = (zx.s[j] / 16 + square(U * f)) * square(c[j]) + (zx.s[units + j] / 16 + square(U * i)) * square(g) +
                                (zx.s[3 * units + j] + square(U * g)) * square(i) +
                                square(U) * (square(carried) + square(added) + square(carried + added));
    }
    normalise(units, (double)1e-5f, net->gain_c, &ln);
    for (ptrdiff_t j = 0; j < units; ++j) { /* (5) */
        const double a = ln.v[j] + (double)net->bias_c[j], o = sigmoid(zx.v[2 * units + j]), t = tanh(a);
        h_out->v[j] = o * t;
        h_out->s[j] = (zx.s[2 * units + j] / 16 + square(U * o)) * square(t) + (ln.s[j] + square(U * a) + square(U * t)) * square(o) +
                      square(U * o * t);
    }
    product(net->outputs, units, net->weight_y, h_out->v, h_out->s, 0, y);
    for (ptrdiff_t j = 0; j < net->outputs; ++j) {
        y->v[j] += (double)net->bias_y[j];
        y->s[j] += square(U * y->v[j]);
    }
}

/* a state below 2^-100 becomes 0 */
static void compare(const network *net, const char *what, ptrdiff_t n, const float *got, const uncertain *want)
{
    for (ptrdiff_t j = 0; j < n; ++j) {
        const double error = fabs((double)got[j] - want->v[j]), allowed = 4 * sqrt(want->s[j]) + 0x1p-100;
        CHECK(error <= allowed, "%td units on %s: %s[%td] = %.9g, wanted %.9g, off by %.2g, allowed %.2g", net->units,
              cnorm_isa_active(), what, j, (double)got[j], want->v[j], error, allowed);
    }
}

static void steps_are_right(network *net, const float *x)
{
    static double h[MOST], c[MOST];
    static uncertain h_out, c_out, y_out;
    float y[MOST];
    const ptrdiff_t padded = cnorm_padded_units(net->units);
    memset(h, 0, sizeof h), memset(c, 0, sizeof c);
    network_reset(net);
    for (ptrdiff_t t = 0; t < STEPS; ++t, x += net->inputs) {
        for (ptrdiff_t j = 0; j < net->units; ++j) {
            net->state[j] = (float)h[j], net->state[padded + j] = (float)c[j];
            h[j] = (double)net->state[j], c[j] = (double)net->state[padded + j];
        }
        network_run(net, 1, x, y);
        reference_step(net, x, h, c, &h_out, &c_out, &y_out);
        compare(net, "h", net->units, net->state, &h_out);
        compare(net, "c", net->units, net->state + padded, &c_out);
        compare(net, "y", net->outputs, y, &y_out);
        for (ptrdiff_t j = net->units; j < padded; ++j)
            CHECK(net->state[j] == 0 && net->state[padded + j] == 0, "padding %td of %td units", j, net->units);
        memcpy(h, h_out.v, sizeof h), memcpy(c, c_out.v, sizeof c);
    }
}

static void tokens_are_checked(void)
{
    static const float bad[] = {NAN, INFINITY, -1, 0.5f, 4, 0x1p24f, -0x1p-149f};
    network pool = {.type = CNORM_WEIGHT_F32};
    cnorm_layer net[3];
    cnorm_fault fault;
    stack_embedding(&pool, 4, 5, allocate, net);
    float *const scratch = network_floats(&pool, allocate, cnorm_scratch_floats(net, 2, 9));
    float x[9 * 3] = {0}, y[9 * 5], before[9 * 5];
    for (size_t i = 0; i < sizeof bad / sizeof *bad; ++i) {
        memset(y, 7, sizeof y), memset(before, 7, sizeof before);
        x[8 * 3 + 1] = bad[i];
        x[0] = bad[i]; /* no id */
        ptrdiff_t element = 0;
        CHECK(cnorm_run(&(cnorm_frames){.layers = net, .count = 2, .frames = 9, .x = x, .scratch = scratch, .rows = 9,
            .y = y}) == CNORM_ERROR_TOKEN, "%g", (double)bad[i]);
        CHECK(cnorm_run_many(&(cnorm_frames){.layers = net, .count = 2, .frames = 9, .x = x, .scratch = scratch, .rows = 9,
            .y = y}) == CNORM_ERROR_TOKEN, "%g", (double)bad[i]);
        CHECK(memcmp(y, before, sizeof y) == 0, "%g: something was stepped", (double)bad[i]);
        CHECK(cnorm_refused_token(net, 2, 9, x, 3, &element) == 8 && element == 1, "element %td", element);
        CHECK(cnorm_run(&(cnorm_frames){.layers = net, .count = 2, .frames = 8, .x = x, .scratch = scratch, .rows = 9,
            .y = y}) == CNORM_OK, "frames before it");
    }
    net[2] = net[1], net[1] = (cnorm_layer){.kind = CNORM_LAYER_ACTIVATION, .as = {.activation = {.n = 1}}};
    CHECK(cnorm_layers_check(net, 3, &fault) == CNORM_ERROR_LAYER && fault.layer == 2, "an id that is computed");
    network_free(&pool);
}

/* in a struct alone: sums of such sizes would overflow */
static void sizes_have_a_limit(void)
{
    static const ptrdiff_t wide[] = {((ptrdiff_t)1 << 28) + 1, PTRDIFF_MAX - 8, PTRDIFF_MAX};
    const float weight = 1;
    for (size_t i = 0; i < sizeof wide / sizeof *wide; ++i) {
        const ptrdiff_t n = wide[i];
        const cnorm_layer scale = {.kind = CNORM_LAYER_SCALE, .as = {.scale = {n, &weight}}};
        const cnorm_layer last[] = {
            {.kind = CNORM_LAYER_MULTIPLY, .as = {.multiply = {n, 1}}},
            {.kind = CNORM_LAYER_RESIDUAL, .as = {.residual = {n, 1}}},
            {.kind = CNORM_LAYER_CONCAT, .as = {.concat = {n, 1, {{1, n, n - 1, 1}}}}},
            {.kind = CNORM_LAYER_NORM, .as = {.norm = {n, NULL, NULL, 0}}},
            {.kind = CNORM_LAYER_ACTIVATION, .as = {.activation = {.n = n}}},
        };
        for (size_t k = 0; k < sizeof last / sizeof *last; ++k) {
            const cnorm_layer layers[] = {scale, last[k]};
            cnorm_fault fault;
            CHECK(cnorm_layers_check(layers, 2, &fault) == CNORM_ERROR_LAYER && fault.layer == 0, "n %td", n);
            CHECK(cnorm_layers_check(&last[k], 1, &fault) == CNORM_ERROR_LAYER && !strcmp(fault.field, "n"), "n %td", n);
        }
    }
}

/* that divide both the 4 channels and the 6 outputs: 0, 1 and 2 */
static void groups_are_checked(void)
{
    static const ptrdiff_t bad[] = {-1, -2, 3, 4, 6, 12, PTRDIFF_MIN, PTRDIFF_MAX};
    frame_stack s = scans_random(CNORM_WEIGHT_F32, 5, allocate);
    cnorm_layer one = s.layers[0];
    cnorm_fault fault;
    for (one.as.conv.groups = 0; one.as.conv.groups <= 2; ++one.as.conv.groups)
        CHECK(cnorm_layers_check(&one, 1, &fault) == CNORM_OK, "%td groups", one.as.conv.groups);
    for (size_t i = 0; i < sizeof bad / sizeof *bad; ++i) {
        one.as.conv.groups = bad[i];
        for (int k = 0; k < 2; ++k) {
            one.kind = k ? CNORM_LAYER_CONV_TRANSPOSE : CNORM_LAYER_CONV;
            CHECK(cnorm_layers_check(&one, 1, &fault) == CNORM_ERROR_LAYER, "%td groups", bad[i]);
            CHECK(!strcmp(fault.field, "groups"), "%td groups: %s", bad[i], fault.field);
        }
    }
    network_free(&s.pool);
}

/* one tap of a convolution, or one frame of a delay, keeps nothing */
static void state_may_be_missing_where_there_is_none(void)
{
    const float kernel[16] = {2}, x[3] = {1, 2, 3};
    float scratch[64], y[3];
    const cnorm_layer layers[] = {
        {.kind = CNORM_LAYER_DELAY, .as = {.delay = {.n = 1, .frames = 1, .dilation = 1, .outputs = 1}}},
        {.kind = CNORM_LAYER_CAUSAL_CONV,
         .as = {.causal_conv = {.kernel = kernel, .channels = 1, .outputs = 1, .taps = 1, .dilation = 1, .depthwise = 1}}},
    };
    CHECK(cnorm_state_floats(layers, 2) == 0 && cnorm_scratch_floats(layers, 2, 1) <= 64, "sizes");
    const cnorm_frames call = {.layers = layers, .count = 2, .frames = 3, .x = x, .scratch = scratch, .y = y};
    CHECK(cnorm_run(&call) == CNORM_OK && y[2] == 6, "steps");
    CHECK(cnorm_run_many(&call) == CNORM_OK && y[1] == 4, "streams");
}

int main(void)
{
    tokens_are_checked();
    sizes_have_a_limit();
    groups_are_checked();
    state_may_be_missing_where_there_is_none();
    static const int sizes[][3] = {{1, 1, 1}, {3, 2, 2}, {5, 15, 3}, {7, 16, 1}, {16, 17, 33}, {12, 64, 9}, {33, 100, 40}, {100, 130, 70}};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; ++i) {
        network net = network_random_of(sizes[i][0], sizes[i][1], sizes[i][2], allocate);
        const ptrdiff_t outputs = STEPS * net.outputs;
        uint64_t seed = i;
        float *x = allocate(STEPS * net.inputs * 4), *y = allocate(outputs * 4), *first = allocate(outputs * 4);
        for (ptrdiff_t j = 0; j < STEPS * net.inputs; ++j) x[j] = (float)bell(&seed);
        FOR_EACH_ISA(isa) {
            steps_are_right(&net, x);
            network_reset(&net);
            network_run(&net, STEPS, x, isa == 0 ? first : y);
            CHECK(isa == 0 || memcmp(y, first, (size_t)outputs * 4) == 0, "%td units: %s and %s differ", net.units,
                  cnorm_isa_name(isa), cnorm_isa_name(0));
            network_reset(&net);
            for (ptrdiff_t t = 0, cut = 1; t < STEPS; t += cut, cut = cut % 7 + 1) {
                if (cut > STEPS - t) cut = STEPS - t;
                network_run(&net, cut, x + t * net.inputs, y + t * net.outputs);
            }
            CHECK(memcmp(y, first, (size_t)outputs * 4) == 0, "%td units, %s: cut otherwise", net.units, cnorm_isa_name(isa));
        }
        release(x), release(y), release(first);
        network_free(&net);
    }
    return check_result();
}
