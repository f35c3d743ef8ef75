/* libFuzzer target for the C entries: any sizes, strides, dtypes, options and bits, in buffers of exactly the size that the
 * headers ask for, so that AddressSanitizer detects an access outside. `make fuzz` builds it with clang.
 *
 * The first bytes of an input choose the call, the rest fill the arrays. An entry may fail; it must not access any
 * memory outside its buffers, and every instruction set must give the same status and the same bits.
 */
#include "cnorm_norms.h"
#include "cnorm_rnn.h"

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef struct reader {
    const uint8_t *data;
    size_t size;
} reader;

static unsigned byte(reader *in)
{
    if (in->size == 0) return 0;
    --in->size;
    return *in->data++;
}

static ptrdiff_t at_most(reader *in, ptrdiff_t limit) { return (ptrdiff_t)(byte(in) | byte(in) << 8) % (limit + 1); }

/* memory of exactly that size, filled from the input, which is repeated where it is too short */
static void *array(reader *in, ptrdiff_t bytes)
{
    uint8_t *p = malloc(bytes > 0 ? (size_t)bytes : 1);
    if (!p) abort();
    for (ptrdiff_t i = 0; i < bytes; ++i) p[i] = in->size ? in->data[(size_t)i % in->size] : 0;
    return p;
}

static ptrdiff_t item_of(cnorm_dtype dtype) { return dtype == CNORM_F64 ? 8 : dtype == CNORM_F32 ? 4 : 2; }
static ptrdiff_t computed_of(cnorm_dtype dtype) { return dtype == CNORM_F64 ? 8 : 4; }

static const double smoothing[] = {0, 1e-5, 1e-300, 1e300, -1, 1};

/* layer, RMS and residual layer norm, forward and backward; y and the gradients are left in *results */
static cnorm_status rows_call(reader in, cnorm_dtype dtype, uint8_t **results, ptrdiff_t *bytes)
{
    const unsigned operation = byte(&in), options = byte(&in);
    const ptrdiff_t rows = at_most(&in, 5) * (options & 64 ? 30 : 1), n = at_most(&in, 600) + 1, gap = at_most(&in, 3);
    const double eps = smoothing[byte(&in) % 6];
    const ptrdiff_t item = item_of(dtype), wide = computed_of(dtype), stride = n + gap, size = rows * stride * item;
    void *x = array(&in, size), *dy = array(&in, size), *y = array(&in, size), *sum = array(&in, size);
    void *gain = array(&in, n * wide), *bias = array(&in, n * wide), *stats = array(&in, 3 * rows * wide);
    void *dgain = array(&in, n * wide), *dbias = array(&in, n * wide);
    void *partials = array(&in, cnorm_backward_partials(dtype, rows, n));
    const void *g = options & 1 ? gain : NULL, *b = options & 2 ? bias : NULL;
    void *const out = options & 4 ? x : y, *const st = options & 8 ? stats : NULL;
    cnorm_status status = CNORM_OK;
    switch (operation % 5) {
    case 0: status = cnorm_layer_norm(dtype, &(cnorm_norm){.rows = rows, .n = n, .x = x, .x_stride = stride, .gain = g,
        .bias = b, .eps = eps, .y = out, .y_stride = stride, .stats = st}); break;
    case 1: status = cnorm_rms_norm(dtype, &(cnorm_norm){.rows = rows, .n = n, .x = x, .x_stride = stride, .gain = g,
        .eps = eps, .y = out, .y_stride = stride, .stats = st}); break;
    case 2: status = cnorm_add_layer_norm(dtype, &(cnorm_norm){.rows = rows, .n = n, .x = x, .x_stride = stride, .residual = dy,
        .residual_stride = stride, .gain = g, .bias = b, .eps = eps, .y = out, .y_stride = stride, .sum = sum,
        .sum_stride = stride, .stats = st}); break;
    case 3: status = cnorm_layer_norm_backward(dtype, &(cnorm_norm_backward){.rows = rows, .n = n, .dy = dy,
        .dy_stride = stride, .x = x, .x_stride = stride, .gain = g, .stats = stats, .dx = out, .dx_stride = stride,
        .dgain = dgain, .dbias = dbias, .partials = partials}); break;
    default: status = cnorm_rms_norm_backward(dtype, &(cnorm_norm_backward){.rows = rows, .n = n, .dy = dy, .dy_stride = stride,
        .x = x, .x_stride = stride, .gain = g, .stats = stats, .dx = out, .dx_stride = stride, .dgain = dgain,
        .partials = partials});
    }
    *results = out, *bytes = size;
    void *const all[] = {x, dy, y, sum, gain, bias, stats, dgain, dbias, partials};
    for (int i = 0; i < 10; ++i)
        if (all[i] != out) free(all[i]);
    return status;
}

/* group and batch norm of a volume, weight and divisive norm of its matrix */
static cnorm_status volume_call(reader in, cnorm_dtype dtype, uint8_t **results, ptrdiff_t *bytes)
{
    const unsigned operation = byte(&in), options = byte(&in);
    const ptrdiff_t samples = at_most(&in, 4) * (options & 64 ? 20 : 1), channels = at_most(&in, 40) + 1;
    const ptrdiff_t space = options & 32 ? at_most(&in, 70) + 1 : 1, groups = at_most(&in, 8), n = channels * space;
    const ptrdiff_t mean_radius = at_most(&in, 50) - 1, radius = at_most(&in, 50);
    const double eps = smoothing[byte(&in) % 6];
    const ptrdiff_t item = item_of(dtype), wide = computed_of(dtype), size = samples * n * item, parameters = (n > samples ? n : samples) * wide;
    const ptrdiff_t batch = cnorm_batch_norm_scratch(dtype, samples, channels, space), fields = cnorm_divisive_norm_scratch(n);
    void *x = array(&in, size), *dy = array(&in, size), *y = array(&in, size);
    void *gain = array(&in, parameters), *bias = array(&in, parameters), *mean = array(&in, parameters), *var = array(&in, parameters);
    void *stats = array(&in, 3 * wide * (samples * channels + channels)), *dgain = array(&in, parameters), *dbias = array(&in, parameters);
    double *moments = array(&in, 2 * channels * 8), dsigma = 0;
    void *scratch = array(&in, batch > fields ? batch : fields), *partials = array(&in, cnorm_backward_partials(dtype, samples, channels));
    const void *g = options & 1 ? gain : NULL, *b = options & 2 ? bias : NULL;
    void *const out = options & 4 ? x : y, *const st = options & 8 ? stats : NULL;
    cnorm_status status = CNORM_OK;
    switch (operation % 10) {
    case 0: status = cnorm_group_norm(dtype, &(cnorm_volume_norm){.samples = samples, .channels = channels, .space = space,
        .groups = groups, .x = x, .gain = g, .bias = b, .eps = eps, .y = out, .stats = st}); break;
    case 1: status = cnorm_group_norm_backward(dtype, &(cnorm_volume_norm_backward){.samples = samples, .channels = channels,
        .space = space, .groups = groups, .dy = dy, .x = x, .gain = g, .stats = stats, .dx = out, .dgain = dgain,
        .dbias = dbias, .scratch = partials}); break;
    case 2: status = cnorm_batch_norm(dtype, &(cnorm_volume_norm){.samples = samples, .channels = channels, .space = space,
        .x = x, .gain = g, .bias = b, .eps = eps, .y = out, .stats = st, .moments = moments, .scratch = scratch}); break;
    case 3: status = cnorm_batch_norm_backward(dtype, &(cnorm_volume_norm_backward){.samples = samples, .channels = channels,
        .space = space, .dy = dy, .x = x, .gain = g, .stats = stats, .dx = out, .dgain = dgain, .dbias = dbias,
        .scratch = scratch}); break;
    case 4: status = cnorm_batch_norm_inference(dtype, &(cnorm_volume_norm){.samples = samples, .channels = channels,
        .space = space, .x = x, .mean = mean, .var = var, .gain = g, .bias = b, .eps = eps, .y = out,
        .scratch = scratch}); break;
    case 5: status = cnorm_batch_norm_inference_backward(dtype, &(cnorm_volume_norm_backward){.samples = samples,
        .channels = channels, .space = space, .dy = dy, .x = x, .mean = mean, .var = var, .gain = g, .eps = eps, .dx = out,
        .dgain = dgain, .dbias = dbias, .scratch = scratch}); break;
    case 6: status = cnorm_weight_norm(dtype, &(cnorm_weight){.rows = samples, .n = n, .w = x, .gain = g, .out = out}); break;
    case 7: status = cnorm_weight_norm_backward(dtype, &(cnorm_weight){.rows = samples, .n = n, .dv = dy, .w = x, .gain = g,
        .out = out, .dgain = dgain}); break;
    case 8: status = cnorm_divisive_norm(dtype, &(cnorm_divisive){.rows = samples, .n = n, .mean_radius = mean_radius,
        .radius = radius, .x = x, .gain = g, .bias = b, .sigma = eps, .out = out, .scratch = scratch}); break;
    default: status = cnorm_divisive_norm_backward(dtype, &(cnorm_divisive){.rows = samples, .n = n, .mean_radius = mean_radius,
        .radius = radius, .dy = dy, .x = x, .gain = g, .sigma = eps, .out = out, .dgain = dgain, .dbias = dbias,
        .dsigma = &dsigma, .scratch = scratch});
    }
    *results = out, *bytes = size;
    void *const all[] = {x, dy, y, gain, bias, mean, var, stats, dgain, dbias, moments, scratch, partials};
    for (int i = 0; i < 13; ++i)
        if (all[i] != out) free(all[i]);
    return status;
}

/* NaN may differ in sign and payload */
static int same(cnorm_dtype dtype, const uint8_t *a, const uint8_t *b, ptrdiff_t bytes)
{
    const ptrdiff_t item = item_of(dtype);
    const uint64_t infinity = dtype == CNORM_F64 ? 0x7ff0000000000000u : dtype == CNORM_F32 ? 0x7f800000u : dtype == CNORM_F16 ? 0x7c00u : 0x7f80u;
    for (ptrdiff_t i = 0; i < bytes; i += item) {
        uint64_t u = 0, v = 0;
        memcpy(&u, a + i, (size_t)item);
        memcpy(&v, b + i, (size_t)item);
        const uint64_t magnitude = ((uint64_t)1 << (8 * item - 1)) - 1;
        if (u != v && !((u & magnitude) > infinity && (v & magnitude) > infinity)) return 0;
    }
    return 1;
}

/* a layer of arbitrary bits: run only if the check accepts it */
static void layer_call(reader in)
{
    _Alignas(CNORM_ALIGN) static float panels[1 << 16], vectors[1 << 12];
    cnorm_layer layers[2];
    memset(layers, 0, sizeof layers);
    for (int i = 0; i < 2; ++i) {
        uint8_t *const at = (uint8_t *)&layers[i].as;
        layers[i].kind = (cnorm_layer_kind)byte(&in);
        cnorm_cell *const cell = &layers[i].as.cell;
        if (layers[i].kind != CNORM_LAYER_CELL) {
            for (size_t k = 0; k < 48; ++k) at[k] = (uint8_t)(byte(&in) % 4);
            layers[i].as.linear.weight.panels = byte(&in) & 1 ? panels : NULL;
            continue;
        }
        cell->kind = (cnorm_cell_kind)(byte(&in) % 4);
        cell->scope = (cnorm_scope)(byte(&in) % 4);
        cell->cell_norm = (cnorm_cell_norm)(byte(&in) % 4);
        cell->reset = (cnorm_reset)(byte(&in) % 4);
        cell->activation = (cnorm_activation)(byte(&in) % 4);
        cell->eps = (float)smoothing[byte(&in) % 6];
        cell->cell_clip = byte(&in) & 1 ? INFINITY : 0;
        cell->projection_clip = byte(&in) & 1 ? 1 : 0;
        cell->zoneout = (float)(byte(&in) % 3);
        cnorm_matrix *const matrices[] = {&cell->weight_x, &cell->weight_h, &cell->weight_n, &cell->weight_p};
        for (int k = 0; k < 4; ++k)
            *matrices[k] = (cnorm_matrix){at_most(&in, 5), at_most(&in, 20), at_most(&in, 20), at_most(&in, 5),
                                          byte(&in) & 1 ? panels : NULL};
        const float **const used[] = {&cell->inside_x, &cell->inside_h, &cell->gain_x, &cell->gain_h, &cell->bias};
        for (int k = 0; k < 5; ++k) *used[k] = byte(&in) & 1 ? vectors : NULL;
    }
    const int count = 1 + (byte(&in) & 1);
    if (cnorm_layers_check(layers, count, NULL) != CNORM_OK) return;
    const ptrdiff_t rows = 1 + byte(&in) % 16, inputs = cnorm_layer_inputs(&layers[0]);
    const ptrdiff_t outputs = cnorm_layer_outputs(&layers[count - 1]);
    if (inputs > 64 || outputs > 64) return; /* the panels have room for no more */
    static _Alignas(CNORM_ALIGN) float state[4096], scratch[1 << 16], x[64 * 8], y[64 * 8];
    if (cnorm_state_floats(layers, count) > 4096 || cnorm_scratch_floats(layers, count, rows) > 1 << 16) abort();
    memset(state, 0, sizeof state);
    if (cnorm_run(&(cnorm_frames){.layers = layers, .count = count, .frames = 5, .x = x, .state = state, .scratch = scratch,
        .rows = rows, .y = y}) != CNORM_OK) abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    reader in = {data, size};
    const unsigned kind = byte(&in) % 3;
    if (kind == 2) {
        layer_call(in);
        return 0;
    }
    const cnorm_dtype dtype = (cnorm_dtype)(byte(&in) % CNORM_DTYPES);
    uint8_t *first = NULL, *results = NULL;
    ptrdiff_t bytes = 0;
    cnorm_status wanted = CNORM_OK;
    for (int isa = 0; isa < cnorm_isa_count(); ++isa) {
        if (cnorm_isa_use(cnorm_isa_name(isa)) != CNORM_OK) abort();
        const cnorm_status status = kind ? volume_call(in, dtype, &results, &bytes) : rows_call(in, dtype, &results, &bytes);
        if (isa == 0) {
            first = results;
            wanted = status;
            continue;
        }
        if (status != wanted || !same(dtype, first, results, bytes)) abort();
        free(results);
    }
    free(first);
    return 0;
}
