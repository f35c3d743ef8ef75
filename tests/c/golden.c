/* The golden hashes: one file per operation and dtype, the same for every instruction set, compiler and machine.
 *
 *     golden DIRECTORY [NAME...] check that every instruction set gives the hashes of the files, of these operations only,
 *                                and print a hash of all hashes
 *     golden --write DIRECTORY   rewrite the files: an intended change of results, which the changelog must mention
 *
 * A file has a hash per kind of input, which shows where a change is. Hashes are FNV-1a, 64 bits, over the results
 * with every NaN canonicalised.
 */
#include "cnorm_norms.h"
#include "presets.h"
#include "rows.h"
#include "frames.h"
#include "stack.h"

static uint64_t hash_of(uint64_t hash, cnorm_dtype dtype, void *buffer, ptrdiff_t count)
{
    canonicalise(dtype, buffer, count);
    return hash_values(hash, buffer, count, size_of(dtype));
}

/* a JSON object under construction */
typedef struct text {
    char bytes[16384];
    size_t length;
} text;

static void begin(text *t) { t->length = (size_t)snprintf(t->bytes, sizeof t->bytes, "{"); }
static void add(text *t, const char *name, uint64_t hash)
{
    t->length += (size_t)snprintf(t->bytes + t->length, sizeof t->bytes - t->length, "%s\n  \"%s\": \"%016llx\"",
                                  t->length == 1 ? "" : ",", name, (unsigned long long)hash);
    if (t->length >= sizeof t->bytes) abort();
}
static void end(text *t) { t->length += (size_t)snprintf(t->bytes + t->length, sizeof t->bytes - t->length, "\n}\n"); }

/* every remainder of every vector width, and the folds at 8192 elements */
static ptrdiff_t length_number(int i)
{
    static const ptrdiff_t long_ones[] = {96, 97, 127, 128, 129, 255, 256, 257, 1000, 1024, 8193};
    if (i < 70) return i + 1;
    return i - 70 < (int)(sizeof long_ones / sizeof *long_ones) ? long_ones[i - 70] : 0;
}
enum { ROWS = 3, LONGEST = 8193 };

typedef struct buffers {
    char x[ROWS * LONGEST * 8], y[ROWS * LONGEST * 8], dy[ROWS * LONGEST * 8], sum[ROWS * LONGEST * 8];
    char gain[LONGEST * 8], bias[LONGEST * 8], var[LONGEST * 8], stats[3 * ROWS * LONGEST * 8], dgain[LONGEST * 8], dbias[LONGEST * 8];
    char partials[2 * LONGEST * 8], scratch[24 * LONGEST * 8], channel[ROWS * LONGEST * 8];
    double moments[2 * LONGEST];
} buffers;
static _Alignas(CNORM_ALIGN) buffers b;

static void fill_rows(row_kind kind, cnorm_dtype dtype, ptrdiff_t n, uint64_t *state)
{
    for (ptrdiff_t row = 0; row < ROWS; ++row) {
        const int spares_this_row = (kind == ONE_NAN || kind == ONE_INFINITY) && row != 1;
        fill_row(spares_this_row ? MEAN_0 : kind, dtype, n, b.x + row * n * size_of(dtype), state);
    }
    fill_row(MEAN_0, dtype, ROWS * n, b.dy, state);
    fill_affine(dtype, n, b.gain, b.bias, state);
}

typedef enum operation { LAYER_NORM, RMS_NORM, ADD_LAYER_NORM } operation;

static void hash_norm(operation op, cnorm_dtype dtype, ptrdiff_t rows, ptrdiff_t n, double eps, int gain, int bias, uint64_t *hash)
{
    const void *const g = gain ? b.gain : NULL, *const c = bias ? b.bias : NULL;
    const cnorm_status status =
        op == LAYER_NORM ? cnorm_layer_norm(dtype, &(cnorm_norm){.rows = rows, .n = n, .x = b.x, .gain = g, .bias = c,
            .eps = eps, .y = b.y, .stats = b.stats})
        : op == RMS_NORM ? cnorm_rms_norm(dtype, &(cnorm_norm){.rows = rows, .n = n, .x = b.x, .gain = g, .eps = eps, .y = b.y,
            .stats = b.stats})
                         : cnorm_add_layer_norm(dtype, &(cnorm_norm){.rows = rows, .n = n, .x = b.x, .residual = b.dy,
                             .gain = g, .bias = c, .eps = eps, .y = b.y, .sum = b.sum, .stats = b.stats});
    CHECK(status == CNORM_OK, "n = %td", n);
    *hash = hash_of(*hash, dtype, b.y, rows * n);
    if (op == ADD_LAYER_NORM) *hash = hash_of(*hash, dtype, b.sum, rows * n);
    *hash = hash_of(*hash, compute_type(dtype), b.stats, 3 * rows);
}

/* call after hash_norm, whose statistics it uses */
static void hash_backward(operation op, cnorm_dtype dtype, ptrdiff_t rows, ptrdiff_t n, int gain, uint64_t *hash)
{
    const void *const g = gain ? b.gain : NULL;
    const cnorm_status status =
        op == LAYER_NORM
            ? cnorm_layer_norm_backward(dtype, &(cnorm_norm_backward){.rows = rows, .n = n, .dy = b.dy, .x = b.x, .gain = g,
                .stats = b.stats, .dx = b.y, .dgain = b.dgain, .dbias = b.dbias, .partials = b.partials})
            : cnorm_rms_norm_backward(dtype, &(cnorm_norm_backward){.rows = rows, .n = n, .dy = b.dy, .x = b.x, .gain = g,
                .stats = b.stats, .dx = b.y, .dgain = b.dgain, .partials = b.partials});
    CHECK(status == CNORM_OK, "n = %td", n);
    *hash = hash_of(*hash, dtype, b.y, rows * n);
    *hash = hash_of(*hash, compute_type(dtype), b.dgain, n);
    if (op == LAYER_NORM) *hash = hash_of(*hash, compute_type(dtype), b.dbias, n);
}

static void forward(operation op, cnorm_dtype dtype, text *out)
{
    for (row_kind kind = 0; kind < ROW_KINDS; ++kind) {
        uint64_t hash = HASH_START, state = kind;
        for (int i = 0, n; (n = (int)length_number(i)) != 0; ++i) {
            fill_rows(kind, dtype, n, &state);
            hash_norm(op, dtype, ROWS, n, i % 2 ? 1e-5 : 0, 1, op != RMS_NORM, &hash);
            hash_norm(op, dtype, ROWS, n, i % 2 ? 0 : 1e-5, i & 1, op != RMS_NORM && i & 2, &hash);
        }
        add(out, row_names[kind], hash);
    }
}

static void backward(operation op, cnorm_dtype dtype, text *out)
{
    uint64_t ignored = 0;
    for (row_kind kind = 0; kind < ROW_KINDS; ++kind) {
        uint64_t hash = HASH_START, state = kind;
        for (int i = 0, n; (n = (int)length_number(i)) != 0; ++i) {
            fill_rows(kind, dtype, n, &state);
            hash_norm(op, dtype, ROWS, n, i % 2 ? 1e-5 : 0, 0, 0, &ignored);
            hash_backward(op, dtype, ROWS, n, i % 3 != 0, &hash);
        }
        add(out, row_names[kind], hash);
    }
    static const int numbers_of_rows[] = {1, 63, 64, 65, 129, 449}; /* the tree over the blocks */
    for (size_t i = 0; i < sizeof numbers_of_rows / sizeof *numbers_of_rows; ++i) {
        const ptrdiff_t rows = numbers_of_rows[i], n = 37;
        uint64_t hash = HASH_START, state = i;
        fill_row(MEAN_1, dtype, rows * n, b.x, &state);
        fill_row(MEAN_0, dtype, rows * n, b.dy, &state);
        hash_norm(op, dtype, rows, n, 1e-5, 0, 0, &ignored);
        hash_backward(op, dtype, rows, n, 0, &hash);
        char name[32];
        snprintf(name, sizeof name, "%td rows", rows);
        add(out, name, hash);
    }
}

static void layer_norm(cnorm_dtype dtype, text *out) { forward(LAYER_NORM, dtype, out); }
static void rms_norm(cnorm_dtype dtype, text *out) { forward(RMS_NORM, dtype, out); }
static void add_layer_norm(cnorm_dtype dtype, text *out) { forward(ADD_LAYER_NORM, dtype, out); }
static void layer_norm_backward(cnorm_dtype dtype, text *out) { backward(LAYER_NORM, dtype, out); }
static void rms_norm_backward(cnorm_dtype dtype, text *out) { backward(RMS_NORM, dtype, out); }

/* ---- other norms: volumes [samples, channels, space] whose channels are of one kind, but every third one ordinary */

typedef struct volume { ptrdiff_t samples, channels, space, n; int number; } volume;

/* every remainder over a matrix's channels and over space, blocks of 64 samples, the folds at 8192 elements */
static volume volume_number(int i)
{
    static const ptrdiff_t others[][3] = {{65, 37, 1}, {129, 16, 1}, {130, 3, 3}, {9, 6, 4}, {3, 5, 257}, {1, 4, 1025}, {2, 1, 8193}};
    volume v = {0, 0, 0, 0, i};
    if (i < 70) v.samples = 2 + i % 4, v.channels = i + 1, v.space = 1;
    else if (i < 110) v.samples = 2, v.channels = 1 + i % 5, v.space = i - 68;
    else if (i - 110 < (int)(sizeof others / sizeof *others))
        v.samples = others[i - 110][0], v.channels = others[i - 110][1], v.space = others[i - 110][2];
    v.n = v.channels * v.space;
    return v;
}

static void fill_volume(row_kind kind, cnorm_dtype dtype, volume v, uint64_t *state)
{
    const ptrdiff_t item = size_of(dtype), run = v.space * item;
    for (ptrdiff_t c = 0; c < v.channels; ++c) {
        fill_row(c % 3 == 1 ? MEAN_0 : kind, dtype, v.samples * v.space, b.channel, state);
        for (ptrdiff_t i = 0; i < v.samples; ++i) memcpy(b.x + (i * v.channels + c) * run, b.channel + i * run, (size_t)run);
    }
    fill_row(MEAN_0, dtype, v.samples * v.n, b.dy, state);
    fill_affine(dtype, v.n, b.gain, b.bias, state);
    const cnorm_dtype computed = compute_type(dtype);
    for (ptrdiff_t c = 0; c < v.channels; ++c) put(computed, b.var, c, get(computed, b.gain, c) * get(computed, b.gain, c));
}

static double eps_of(volume v) { return v.number % 2 ? 1e-5 : 0; }
static const void *gain_of(volume v) { return v.number % 3 ? b.gain : NULL; }
#define VOLUME .samples = v.samples, .channels = v.channels, .space = v.space
#define ENOUGH_SCRATCH CHECK((size_t)cnorm_batch_norm_scratch(dtype, v.samples, v.channels, v.space) <= sizeof b.scratch, "[%td, %td, %td]", v.samples, v.channels, v.space)
#define MATRIX .rows = v.samples, .n = v.n
#define HASHED(call) CHECK((call) == CNORM_OK, "[%td, %td, %td]", v.samples, v.channels, v.space)

static void hash_batch_norm(cnorm_dtype dtype, volume v, uint64_t *hash)
{
    ENOUGH_SCRATCH;
    HASHED(cnorm_batch_norm(dtype, &(cnorm_volume_norm){VOLUME, .x = b.x, .gain = gain_of(v), .bias = b.bias, .eps = eps_of(v),
        .y = b.y, .stats = b.stats, .moments = b.moments, .scratch = b.scratch}));
    *hash = hash_of(*hash, dtype, b.y, v.samples * v.n);
    *hash = hash_of(*hash, compute_type(dtype), b.stats, 3 * v.channels);
    *hash = hash_of(*hash, CNORM_F64, b.moments, 2 * v.channels);
}

static void hash_gradients(cnorm_dtype dtype, volume v, ptrdiff_t parameters, uint64_t *hash)
{
    *hash = hash_of(*hash, dtype, b.y, v.samples * v.n);
    *hash = hash_of(*hash, compute_type(dtype), b.dgain, parameters);
    *hash = hash_of(*hash, compute_type(dtype), b.dbias, parameters);
}

static void hash_batch_norm_backward(cnorm_dtype dtype, volume v, uint64_t *hash)
{
    ENOUGH_SCRATCH;
    HASHED(cnorm_batch_norm(dtype, &(cnorm_volume_norm){VOLUME, .x = b.x, .eps = eps_of(v), .y = b.y, .stats = b.stats,
        .scratch = b.scratch}));
    HASHED(cnorm_batch_norm_backward(dtype, &(cnorm_volume_norm_backward){VOLUME, .dy = b.dy, .x = b.x, .gain = gain_of(v),
        .stats = b.stats, .dx = b.y, .dgain = b.dgain, .dbias = b.dbias, .scratch = b.scratch}));
    hash_gradients(dtype, v, v.channels, hash);
}

static void hash_inference(cnorm_dtype dtype, volume v, uint64_t *hash)
{
    ENOUGH_SCRATCH;
    HASHED(cnorm_batch_norm_inference(dtype, &(cnorm_volume_norm){VOLUME, .x = b.x, .mean = b.bias, .var = b.var,
        .gain = gain_of(v), .bias = b.bias, .eps = eps_of(v), .y = b.y, .scratch = b.scratch}));
    *hash = hash_of(*hash, dtype, b.y, v.samples * v.n);
}

static void hash_inference_backward(cnorm_dtype dtype, volume v, uint64_t *hash)
{
    ENOUGH_SCRATCH;
    HASHED(cnorm_batch_norm_inference_backward(dtype, &(cnorm_volume_norm_backward){VOLUME, .dy = b.dy, .x = b.x,
        .mean = b.bias, .var = b.var, .gain = gain_of(v), .eps = eps_of(v), .dx = b.y, .dgain = b.dgain, .dbias = b.dbias,
        .scratch = b.scratch}));
    hash_gradients(dtype, v, v.channels, hash);
}

/* one group, one group per channel (instance norm), and groups of two channels where that divides */
static void hash_group_norm_or_backward(int backward, cnorm_dtype dtype, volume v, uint64_t *hash)
{
    for (ptrdiff_t per_group = 1; per_group <= v.channels; ++per_group) {
        if (v.channels % per_group || (per_group > 2 && per_group < v.channels)) continue;
        const ptrdiff_t groups = v.channels / per_group;
        HASHED(cnorm_group_norm(dtype, &(cnorm_volume_norm){VOLUME, .groups = groups, .x = b.x, .gain = gain_of(v),
            .bias = b.bias, .eps = eps_of(v), .y = b.y, .stats = b.stats}));
        if (backward) {
            HASHED(cnorm_group_norm_backward(dtype, &(cnorm_volume_norm_backward){VOLUME, .groups = groups, .dy = b.dy,
                .x = b.x, .gain = gain_of(v), .stats = b.stats, .dx = b.y, .dgain = b.dgain, .dbias = b.dbias,
                .scratch = b.partials}));
            hash_gradients(dtype, v, v.channels, hash);
        } else {
            *hash = hash_of(*hash, dtype, b.y, v.samples * v.n);
            *hash = hash_of(*hash, compute_type(dtype), b.stats, 3 * v.samples * groups);
        }
    }
}
static void hash_group_norm(cnorm_dtype dtype, volume v, uint64_t *hash) { hash_group_norm_or_backward(0, dtype, v, hash); }
static void hash_group_norm_backward(cnorm_dtype dtype, volume v, uint64_t *hash) { hash_group_norm_or_backward(1, dtype, v, hash); }

/* the gains of the rows are the first numbers of dy, which has at least as many */
static void hash_weight_norm(cnorm_dtype dtype, volume v, uint64_t *hash)
{
    HASHED(cnorm_weight_norm(dtype, &(cnorm_weight){MATRIX, .w = b.x, .gain = v.number % 3 ? b.dy : NULL, .out = b.y}));
    *hash = hash_of(*hash, dtype, b.y, v.samples * v.n);
}

static void hash_weight_norm_backward(cnorm_dtype dtype, volume v, uint64_t *hash)
{
    HASHED(cnorm_weight_norm_backward(dtype, &(cnorm_weight){MATRIX, .dv = b.dy, .w = b.x, .gain = v.number % 3 ? b.dy : NULL,
        .out = b.y, .dgain = b.dgain}));
    *hash = hash_of(*hash, dtype, b.y, v.samples * v.n);
    *hash = hash_of(*hash, dtype, b.dgain, v.samples);
}

/* fields of one element, of a few, of the whole row */
static ptrdiff_t radius_of(volume v) { return v.number % 4 == 3 ? v.n : v.number % 4 * 2; }

static void hash_divisive_norm(cnorm_dtype dtype, volume v, uint64_t *hash)
{
    HASHED(cnorm_divisive_norm(dtype, &(cnorm_divisive){MATRIX, .mean_radius = radius_of(v), .radius = v.number % 5, .x = b.x,
        .gain = gain_of(v), .bias = b.bias, .sigma = eps_of(v), .out = b.y, .scratch = b.scratch}));
    *hash = hash_of(*hash, dtype, b.y, v.samples * v.n);
}

static void hash_divisive_norm_backward(cnorm_dtype dtype, volume v, uint64_t *hash)
{
    double dsigma;
    HASHED(cnorm_divisive_norm_backward(dtype, &(cnorm_divisive){MATRIX, .mean_radius = radius_of(v), .radius = v.number % 5,
        .dy = b.dy, .x = b.x, .gain = gain_of(v), .sigma = eps_of(v), .out = b.y, .dgain = b.dgain, .dbias = b.dbias,
        .dsigma = &dsigma, .scratch = b.scratch}));
    hash_gradients(dtype, v, v.n, hash);
    *hash = hash_of(*hash, CNORM_F64, &dsigma, 1);
}

static void hash_smoothing_gradient(cnorm_dtype dtype, volume v, uint64_t *hash)
{
    double ds;
    HASHED(cnorm_layer_norm(dtype, &(cnorm_norm){MATRIX, .x = b.x, .eps = 0.01, .y = b.y, .stats = b.stats}));
    HASHED(cnorm_smoothing_gradient(dtype, &(cnorm_norm_backward){MATRIX, .dy = b.dy, .x = b.x, .gain = gain_of(v),
        .stats = b.stats}, 0.1, &ds));
    *hash = hash_of(*hash, CNORM_F64, &ds, 1);
}

static void over_volumes(void (*hash_one)(cnorm_dtype dtype, volume v, uint64_t *hash), cnorm_dtype dtype, text *out)
{
    for (row_kind kind = 0; kind < ROW_KINDS; ++kind) {
        uint64_t hash = HASH_START, state = kind;
        volume v;
        for (int i = 0; v = volume_number(i), v.n != 0; ++i) {
            fill_volume(kind, dtype, v, &state);
            hash_one(dtype, v, &hash);
        }
        add(out, row_names[kind], hash);
    }
}

static void batch_norm(cnorm_dtype dtype, text *out) { over_volumes(hash_batch_norm, dtype, out); }
static void batch_norm_backward(cnorm_dtype dtype, text *out) { over_volumes(hash_batch_norm_backward, dtype, out); }
static void batch_norm_inference(cnorm_dtype dtype, text *out) { over_volumes(hash_inference, dtype, out); }
static void batch_norm_inference_backward(cnorm_dtype dtype, text *out) { over_volumes(hash_inference_backward, dtype, out); }
static void group_norm(cnorm_dtype dtype, text *out) { over_volumes(hash_group_norm, dtype, out); }
static void group_norm_backward(cnorm_dtype dtype, text *out) { over_volumes(hash_group_norm_backward, dtype, out); }
static void weight_norm(cnorm_dtype dtype, text *out) { over_volumes(hash_weight_norm, dtype, out); }
static void weight_norm_backward(cnorm_dtype dtype, text *out) { over_volumes(hash_weight_norm_backward, dtype, out); }
static void divisive_norm(cnorm_dtype dtype, text *out) { over_volumes(hash_divisive_norm, dtype, out); }
static void divisive_norm_backward(cnorm_dtype dtype, text *out) { over_volumes(hash_divisive_norm_backward, dtype, out); }
static void smoothing_gradient(cnorm_dtype dtype, text *out) { over_volumes(hash_smoothing_gradient, dtype, out); }

/* ---- the recurrent runtime */

typedef cnorm_status (*array_function)(ptrdiff_t, const float *, float *);

static void elementwise(array_function f, const char *of, text *out)
{
    static float x[520], y[520];
    for (uint32_t exponent = 0; exponent < 512; exponent += 64) {
        uint64_t hash = HASH_START;
        for (uint32_t e = exponent; e < exponent + 64; ++e) {
            uint32_t count = 0;
            for (uint32_t m = 0; m < 1u << 23; m += 16381, ++count) { /* a prime: no round mantissas */
                const uint32_t bits = e << 23 | m;
                memcpy(&x[count], &bits, 4);
            }
            CHECK(f((ptrdiff_t)count, x, y) == CNORM_OK, "exponent %u", e);
            hash = hash_of(hash, CNORM_F32, y, (ptrdiff_t)count);
        }
        char name[48];
        snprintf(name, sizeof name, "%sbits from %08x", of, (unsigned)(exponent << 23));
        add(out, name, hash);
    }
}
static void sigmoid(cnorm_dtype dtype, text *out) { (void)dtype, elementwise(cnorm_sigmoid_f32, "", out); }
static void hyperbolic_tangent(cnorm_dtype dtype, text *out) { (void)dtype, elementwise(cnorm_tanh_f32, "", out); }

/* the layer, whose function f is */
static cnorm_elementwise activation = {.alpha = 0.25f, .beta = 0.5f};
static cnorm_status run_activation(ptrdiff_t n, const float *x, float *y)
{
    static float slope[520];
    static _Alignas(64) float scratch[16];
    for (ptrdiff_t i = 0; i < n; ++i) slope[i] = (float)i / 260 - 1;
    activation.n = n, activation.slope = slope;
    const cnorm_layer layer = {.kind = CNORM_LAYER_ACTIVATION, .as = {.activation = activation}};
    return cnorm_run(&(cnorm_frames){.layers = &layer, .count = 1, .frames = 1, .x = x, .scratch = scratch, .y = y});
}
static void activations(cnorm_dtype dtype, text *out)
{
    static const char *const names[] = {"tanh", "relu", "sigmoid", "elu", "selu", "silu", "gelu", "gelu_tanh", "leaky_relu", "prelu",
                                        "softplus", "hard_sigmoid", "hard_swish", "softmax", "log", "exp", "sqrt", "square", "abs", "clip",
                                        "sin", "cos"};
    (void)dtype;
    for (int f = CNORM_ACTIVATION_ELU; f < CNORM_ACTIVATIONS; ++f) {
        char of[24];
        snprintf(of, sizeof of, "%s, ", names[f]);
        activation.f = (cnorm_activation)f;
        elementwise(run_activation, of, out);
    }
}

/* hash over some steps of a free run */
static void lstm_and_linear(cnorm_weight_type type, text *out)
{
    static const int sizes[][3] = {{1, 1, 1}, {3, 2, 2}, {5, 15, 3}, {7, 16, 1}, {16, 17, 9}, {12, 64, 9}, {33, 100, 40}, {100, 130, 70}};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; ++i) {
        network net = network_random_with(type, sizes[i][0], sizes[i][1], sizes[i][2], allocate);
        uint64_t state = i, hash = HASH_START;
        static float x[20 * 100], y[20 * 70];
        for (size_t j = 0; j < sizeof x / sizeof *x; ++j) x[j] = (float)bell(&state);
        network_run(&net, 20, x, y);
        hash = hash_of(hash, CNORM_F32, y, 20 * net.outputs);
        hash = hash_of(hash, CNORM_F32, net.state, cnorm_state_floats(net.layers, NETWORK_LAYERS));
        char name[64];
        snprintf(name, sizeof name, "%td inputs, %td units, %td outputs", net.inputs, net.units, net.outputs);
        add(out, name, hash);
        network_free(&net);
    }
}

static void lstm(cnorm_dtype dtype, text *out) { (void)dtype; lstm_and_linear(CNORM_WEIGHT_F32, out); }
static void lstm_float16_weights(cnorm_dtype dtype, text *out) { (void)dtype; lstm_and_linear(CNORM_WEIGHT_F16, out); }
static void lstm_int8_weights(cnorm_dtype dtype, text *out) { (void)dtype; lstm_and_linear(CNORM_WEIGHT_I8, out); }

/* the same of the layers that are no cells */
static void every_layer(cnorm_weight_type type, text *out)
{
    static const int sizes[][2] = {{1, 1}, {2, 7}, {5, 8}, {16, 9}, {33, 50}, {70, 130}};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; ++i) {
        stack s = stack_random(type, sizes[i][0], sizes[i][1], allocate);
        uint64_t state = i, hash = HASH_START;
        static float x[40 * 70], y[40 * 240];
        for (size_t j = 0; j < sizeof x / sizeof *x; ++j) x[j] = (float)bell(&state);
        CHECK((size_t)(40 * s.outputs) <= sizeof y / sizeof *y, "%td outputs", s.outputs);
        stack_run(&s, 40, x, y);
        hash = hash_of(hash, CNORM_F32, y, 40 * s.outputs);
        hash = hash_of(hash, CNORM_F32, s.state, cnorm_state_floats(s.layers, STACK_LAYERS));
        char name[64];
        snprintf(name, sizeof name, "%td inputs, %td outputs", s.inputs, s.outputs);
        add(out, name, hash);
        network_free(&s.pool);
    }
}
/* layers of frames [channels, positions] */
static void frames(cnorm_dtype dtype, text *out)
{
    static const ptrdiff_t sizes[] = {1, 2, 7, 33, 130};
    static const char *const types[] = {"float32", "float16", "int8"};
    (void)dtype;
    for (int type = CNORM_WEIGHT_F32; type <= CNORM_WEIGHT_I8; ++type)
        for (size_t i = 0; i < sizeof sizes / sizeof *sizes; ++i) {
            frame_stack s = frames_random((cnorm_weight_type)type, sizes[i], allocate);
            uint64_t state = i, hash = HASH_START;
            static float x[9 * 2 * 130], y[9 * FRAME_OUTPUTS * 131];
            for (size_t j = 0; j < sizeof x / sizeof *x; ++j) x[j] = (float)bell(&state);
            frames_run(&s, 9, x, y);
            hash = hash_of(hash, CNORM_F32, y, 9 * s.outputs);
            hash = hash_of(hash, CNORM_F32, s.state, cnorm_state_floats(s.layers, FRAME_LAYERS));
            char name[64];
            snprintf(name, sizeof name, "%s, %td positions", types[type], sizes[i]);
            add(out, name, hash);
            network_free(&s.pool);
        }
}

/* rows of tables by token id */
static void embedding(cnorm_dtype dtype, text *out)
{
    static const int sizes[][2] = {{1, 1}, {3, 31}, {8, 33}, {300, 70}};
    static const char *const types[] = {"float32", "float16", "int8"};
    (void)dtype;
    for (int type = CNORM_WEIGHT_F32; type <= CNORM_WEIGHT_I8; ++type)
        for (size_t i = 0; i < sizeof sizes / sizeof *sizes; ++i) {
            const ptrdiff_t tokens = sizes[i][0], units = sizes[i][1];
            network pool = {.type = (cnorm_weight_type)type};
            cnorm_layer net[2];
            static float x[90 * 3], y[90 * 70];
            stack_embedding(&pool, tokens, units, allocate, net);
            float *const scratch = network_floats(&pool, allocate, cnorm_scratch_floats(net, 2, 90));
            for (ptrdiff_t j = 0; j < 90 * 3; ++j) x[j] = (float)(j * 7 % tokens);
            CHECK(cnorm_run(&(cnorm_frames){.layers = net, .count = 2, .frames = 90, .x = x, .scratch = scratch, .rows = 90,
                .y = y}) == CNORM_OK, "%td tokens", tokens);
            char name[64];
            snprintf(name, sizeof name, "%s, %td tokens, %td outputs", types[type], tokens, units);
            add(out, name, hash_of(HASH_START, CNORM_F32, y, 90 * units));
            network_free(&pool);
        }
}

static void layers(cnorm_dtype dtype, text *out) { (void)dtype; every_layer(CNORM_WEIGHT_F32, out); }
static void layers_float16_weights(cnorm_dtype dtype, text *out) { (void)dtype; every_layer(CNORM_WEIGHT_F16, out); }
static void layers_int8_weights(cnorm_dtype dtype, text *out) { (void)dtype; every_layer(CNORM_WEIGHT_I8, out); }

/* hash over some steps of every preset, with matrices of one type */
static void every_preset(cnorm_weight_type type, text *out)
{
    float x[PRESET_STEPS * PRESET_INPUTS], y[PRESET_STEPS * PRESET_UNITS];
    uint64_t state = 7;
    for (size_t j = 0; j < sizeof x / sizeof *x; ++j) x[j] = (float)bell(&state);
    for (int i = 0; i < PRESETS; ++i) {
        const ptrdiff_t outputs = preset_run(&presets[i], type, x, y);
        add(out, presets[i].name, hash_of(HASH_START, CNORM_F32, y, PRESET_STEPS * outputs));
    }
}
static void all_presets(cnorm_dtype dtype, text *out) { (void)dtype; every_preset(CNORM_WEIGHT_F32, out); }
static void all_presets_float16_weights(cnorm_dtype dtype, text *out) { (void)dtype; every_preset(CNORM_WEIGHT_F16, out); }
static void all_presets_int8_weights(cnorm_dtype dtype, text *out) { (void)dtype; every_preset(CNORM_WEIGHT_I8, out); }

/* every 16-bit pattern */
static void to_float(cnorm_dtype dtype, text *out)
{
    static uint16_t x[1 << 16];
    static float y[1 << 16];
    for (int i = 0; i < 1 << 16; ++i) x[i] = (uint16_t)i;
    CHECK(cnorm_widen(dtype, 1 << 16, x, y) == CNORM_OK, "%s", dtype_names[dtype]);
    add(out, "all bits", hash_of(HASH_START, CNORM_F32, y, 1 << 16));
}

/* a function for each kernel of the list, and for the operations that have no storage type */
static const struct {
    const char *name;
    void (*run)(cnorm_dtype dtype, text *out);
} operations[] = {
#define KERNEL(name, call, dtypes) {#name, name},
#define FUNCTION(name, arguments)
#include "kernels/kernels.inc"
    {"sigmoid", sigmoid},
    {"tanh", hyperbolic_tangent},
    {"activations", activations},
    {"lstm", lstm},
    {"lstm_float16_weights", lstm_float16_weights},
    {"lstm_int8_weights", lstm_int8_weights},
    {"layers", layers},
    {"embedding", embedding},
    {"frames", frames},
    {"layers_float16_weights", layers_float16_weights},
    {"layers_int8_weights", layers_int8_weights},
    {"presets", all_presets},
    {"presets_float16_weights", all_presets_float16_weights},
    {"presets_int8_weights", all_presets_int8_weights},
};
enum { OPERATIONS = sizeof operations / sizeof *operations, FLOAT32_ONLY = 13 };

static uint64_t all_hashes = HASH_START;

/* compares one operation's hashes with its file on every instruction set, or writes the file */
static int check_file(int write, const char *folder, size_t index, cnorm_dtype dtype)
{
    char path[1024];
    static text got, wanted;
    snprintf(path, sizeof path, "%s/%s.%s.json", folder, operations[index].name, dtype_names[dtype]);
    FOR_EACH_ISA(isa) {
        begin(&got);
        operations[index].run(dtype, &got);
        end(&got);
        if (isa == 0) all_hashes = hash_values(all_hashes, got.bytes, (ptrdiff_t)got.length, 1);
        FILE *file = fopen(path, write && isa == 0 ? "wb" : "rb");
        if (!file) {
            perror(path);
            return 0;
        }
        if (write && isa == 0) {
            fwrite(got.bytes, 1, got.length, file);
        } else {
            wanted.length = fread(wanted.bytes, 1, sizeof wanted.bytes - 1, file);
            wanted.bytes[wanted.length] = 0;
            CHECK(strcmp(got.bytes, wanted.bytes) == 0, "%s says\n%s\nand %s gives\n%s", path, wanted.bytes, cnorm_isa_name(isa),
                  got.bytes);
        }
        fclose(file);
    }
    return 1;
}

/* whether an operation is to be checked: no names stand for all */
static int named(const char *wanted, int names, char **name)
{
    int found = names == 0;
    for (int i = 0; i < names; ++i) found |= strcmp(wanted, name[i]) == 0;
    return found;
}

int main(int argc, char **argv)
{
    const int write = argc == 3 && strcmp(argv[1], "--write") == 0;
    if (argc < 2) {
        fprintf(stderr, "usage: golden DIRECTORY [NAME...] | golden --write DIRECTORY\n");
        return 2;
    }
    int files = 0;
    for (size_t i = 0; i < OPERATIONS; ++i)
        for (int dtype = 0; dtype < DTYPES; ++dtype) {
            const int taken = i < OPERATIONS - FLOAT32_ONLY ? kernel_takes(operations[i].name, (cnorm_dtype)dtype) : dtype == CNORM_F32;
            if (!taken || !named(operations[i].name, argc - 2 - write, argv + 2)) continue;
            if (!check_file(write, argv[1 + write], i, (cnorm_dtype)dtype)) return 1;
            ++files;
        }
    printf("%d golden files, %016llx\n", files, (unsigned long long)all_hashes);
    return check_result();
}
