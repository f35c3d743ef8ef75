/* CNORM_LAYER_CONV_TRANSPOSE: the transpose of a convolution inside a frame [channels, positions]. What a position adds
 * to the places under its taps, its window [taps, outputs], is a row of one product; the windows are added in the order
 * of the positions. */
#include <string.h>

#include "../../kernels/backward.h"
#include "../../simd/vector.h" /* turns off contraction to FMA */
#include "frames.h"

static vector_shape transpose_kernel(const cnorm_layer *layer)
{
    const cnorm_conv *conv = &layer->as.conv_transpose;
    return (vector_shape){conv->taps, conv->channels, conv->depthwise ? conv->taps * padded_units(conv->channels) : 0};
}
static vector_shape transpose_bias(const cnorm_layer *layer)
{
    const ptrdiff_t units = layer->as.conv_transpose.outputs;
    return (vector_shape){0, units, units};
}

static const layer_option transpose_options[] = {
    LAYER_OPTION(conv_transpose, channels, OPTION_SIZE),
    LAYER_OPTION(conv_transpose, outputs, OPTION_SIZE),
    LAYER_OPTION(conv_transpose, taps, OPTION_SIZE),
    LAYER_OPTION(conv_transpose, dilation, OPTION_SIZE),
    LAYER_OPTION(conv_transpose, depthwise, OPTION_INT),
    LAYER_OPTION(conv_transpose, positions, OPTION_SIZE),
    LAYER_OPTION(conv_transpose, stride, OPTION_SIZE),
    LAYER_OPTION(conv_transpose, before, OPTION_SIZE),
    LAYER_OPTION(conv_transpose, inputs, OPTION_SIZE),
    LAYER_OPTION(conv_transpose, results, OPTION_SIZE),
    {0},
};
static const layer_field transpose_fields[] = {
    LAYER_FIELD(conv_transpose, weight, NULL),
    LAYER_FIELD(conv_transpose, kernel, transpose_kernel),
    LAYER_FIELD(conv_transpose, bias, transpose_bias),
    {0},
};

static ptrdiff_t window_floats(const cnorm_conv *conv) { return conv->taps * conv->outputs; }
static ptrdiff_t places(const cnorm_conv *conv) { return conv->results / conv->outputs; }

static const char *transpose_check(const cnorm_layer *layer)
{
    const cnorm_conv *conv = &layer->as.conv_transpose;
    const ptrdiff_t most = WIDEST;
    if (conv->channels < 1 || conv->channels > most) return "channels";
    if (conv->outputs < 1 || conv->outputs > most) return "outputs";
    if (conv->taps < 1 || conv->taps > most / conv->outputs || conv->taps > most / conv->channels) return "taps";
    if (conv->dilation < 1 || conv->dilation > most / conv->taps) return "dilation";
    if (!between(conv->depthwise, 1)) return "depthwise";
    if (conv->positions < 1 || conv->positions > most / conv->channels) return "positions";
    if (conv->stride < 1 || conv->stride > most / conv->positions) return "stride";
    if (conv->before < 0 || conv->before > most) return "before";
    if (conv->inputs != conv->channels * conv->positions) return "inputs";
    if (conv->results < 1 || conv->results > most || conv->results % conv->outputs) return "results";
    if (conv->depthwise) return conv->outputs == conv->channels && conv->kernel ? NULL : "kernel";
    const cnorm_matrix *w = &conv->weight;
    return cnorm_usable_matrix(w, 1, window_floats(conv), conv->channels) && w->group == 0 ? NULL : "weight";
}

/* the place under tap t of position p; -1 for one that is cut off */
static ptrdiff_t place_of(const cnorm_conv *conv, ptrdiff_t p, ptrdiff_t t)
{
    const ptrdiff_t q = p * conv->stride + t * conv->dilation - conv->before;
    return q >= 0 && q < places(conv) ? q : -1;
}

/* ---- forward -------------------------------------------------------------------------------------------------- */

/* The scratch of a run. With memory NULL only its size. */
typedef struct transpose_scratch {
    float *x, *y;          /* [positions, channels], [places, outputs] */
    float *windows, *rest; /* [together, padded window], of the product */
    ptrdiff_t together, floats;
} transpose_scratch;

static transpose_scratch transpose_scratch_of(const cnorm_conv *conv, float *memory)
{
    const ptrdiff_t item = (ptrdiff_t)sizeof(float);
    layout l = {(char *)memory, 0};
    transpose_scratch s = {.together = conv->positions < CNORM_ROWS ? conv->positions : CNORM_ROWS};
    s.x = layout_take(&l, padded_units(conv->inputs) * item);
    s.y = layout_take(&l, padded_units(conv->results) * item);
    s.windows = layout_take(&l, s.together * padded_units(window_floats(conv)) * item);
    const cnorm_matrix *w = &conv->weight;
    s.rest = layout_take(
        &l,
        conv->depthwise ? 0 : padded_units(s.together * packed_rows(w) + product_scratch_floats(w, s.together)) * item);
    s.floats = l.used / item;
    return s;
}

static ptrdiff_t transpose_scratch_floats(const cnorm_layer *layer, ptrdiff_t rows)
{
    (void)rows;
    return transpose_check(layer) ? 0 : transpose_scratch_of(&layer->as.conv_transpose, NULL).floats;
}

/* the windows of n <= CNORM_ROWS positions x [n, channels] */
static void windows_of(const cnorm_kernels *kernels, const cnorm_conv *conv, ptrdiff_t n, const float *x,
                       float_rows windows, float *scratch)
{
    const ptrdiff_t channels = conv->channels;
    if (!conv->depthwise) {
        const cnorm_linear linear = {conv->weight, NULL};
        kernels->linear_step(&linear, n, x, channels, windows.at, windows.stride, scratch);
        return;
    }
    for (ptrdiff_t p = 0; p < n; ++p)
        for (ptrdiff_t t = 0; t < conv->taps; ++t) {
            const float *kernel = conv->kernel + t * padded_units(channels);
            float *to = windows.at + p * windows.stride + t * channels;
            for (ptrdiff_t c = 0; c < channels; ++c) to[c] = x[p * channels + c] * kernel[c];
        }
}

/* y [places, outputs] += the window of position p */
static void add_window(const cnorm_conv *conv, ptrdiff_t p, const float *window, float *y)
{
    const ptrdiff_t outputs = conv->outputs;
    for (ptrdiff_t t = 0; t < conv->taps; ++t) {
        const ptrdiff_t q = place_of(conv, p, t);
        for (ptrdiff_t o = 0; q >= 0 && o < outputs; ++o) y[q * outputs + o] += window[t * outputs + o];
    }
}

static void transpose_frame(const cnorm_kernels *kernels, const cnorm_conv *conv, const float *x, float *y,
                            float *memory)
{
    const transpose_scratch scratch = transpose_scratch_of(conv, memory);
    const ptrdiff_t positions = conv->positions, channels = conv->channels, count = places(conv);
    const float_rows windows = {scratch.windows, padded_units(window_floats(conv))};
    cnorm_transpose(channels, positions, (const_rows){x, positions}, (float_rows){scratch.x, channels});
    memset(scratch.y, 0, (size_t)conv->results * sizeof *y);
    for (ptrdiff_t p = 0, n; p < positions; p += n) {
        n = positions - p < scratch.together ? positions - p : scratch.together;
        windows_of(kernels, conv, n, scratch.x + p * channels, windows, scratch.rest);
        for (ptrdiff_t i = 0; i < n; ++i) add_window(conv, p + i, windows.at + i * windows.stride, scratch.y);
    }
    cnorm_transpose(count, conv->outputs, (const_rows){scratch.y, conv->outputs}, (float_rows){y, count});
    for (ptrdiff_t o = 0; conv->bias && o < conv->outputs; ++o)
        for (ptrdiff_t q = 0; q < count; ++q) y[o * count + q] += conv->bias[o];
}

static void transpose_run(const layer_run *call)
{
    for (ptrdiff_t s = 0; s < call->n; ++s)
        transpose_frame(call->kernels, &call->layer->as.conv_transpose, call->x.at + s * call->x.stride,
                        call->y.at + s * call->y.stride, call->scratch);
}

/* ---- backward ------------------------------------------------------------------------------------------------- */

static int transpose_trains(const cnorm_layer *layer)
{
    const cnorm_conv *conv = &layer->as.conv_transpose;
    return conv->depthwise || conv->weight.type == CNORM_WEIGHT_F32;
}

/* bias [padded outputs], then kernel [taps, padded channels] */
static ptrdiff_t sum_floats(const cnorm_layer *layer)
{
    return padded_units(layer->as.conv_transpose.outputs) + transpose_kernel(layer).floats;
}

/* With memory NULL only its size. Rows are the positions of all frames, in order. */
typedef struct transpose_backward_scratch {
    float *x, *dy;         /* of one frame: [positions, channels], [places, outputs] */
    float *rows, *windows; /* [OUTER_ROWS, channels]: x or dx; [OUTER_ROWS, packed window]: the gradients of windows */
    float *total, *block;  /* sums of bias and kernel; those of SUM_ROWS rows */
    float *outer;
    ptrdiff_t window, floats; /* from one window to the next */
} transpose_backward_scratch;

static transpose_backward_scratch transpose_backward_scratch_of(const cnorm_layer *layer, float *memory)
{
    const cnorm_conv *conv = &layer->as.conv_transpose;
    const ptrdiff_t item = (ptrdiff_t)sizeof(float);
    layout l = {(char *)memory, 0};
    transpose_backward_scratch s;
    s.window = conv->depthwise ? padded_units(window_floats(conv)) : packed_rows(&conv->weight);
    s.x = layout_take(&l, padded_units(conv->inputs) * item);
    s.dy = layout_take(&l, padded_units(conv->results) * item);
    s.rows = layout_take(&l, OUTER_ROWS * padded_units(conv->channels) * item);
    s.windows = layout_take(&l, OUTER_ROWS * padded_units(s.window) * item);
    s.total = layout_take(&l, 2 * sum_floats(layer) * item);
    s.block = memory ? s.total + sum_floats(layer) : NULL;
    s.outer = layout_take(&l, conv->depthwise ? 0 : padded_units(outer_floats(&conv->weight)) * item);
    s.floats = l.used / item;
    return s;
}

static ptrdiff_t transpose_backward_floats(const cnorm_layer *layer, ptrdiff_t rows)
{
    (void)rows;
    return transpose_check(layer) ? 0 : transpose_backward_scratch_of(layer, NULL).floats;
}

/* the gradients of the window [taps, outputs] of position p, for dy [places, outputs] */
static void gather(const cnorm_conv *conv, ptrdiff_t p, const float *dy, float *window)
{
    const ptrdiff_t outputs = conv->outputs;
    for (ptrdiff_t t = 0; t < conv->taps; ++t) {
        const ptrdiff_t q = place_of(conv, p, t);
        for (ptrdiff_t o = 0; o < outputs; ++o) window[t * outputs + o] = q < 0 ? 0 : dy[q * outputs + o];
    }
}

static void turned_dy(const layer_backward *call, ptrdiff_t s, float *to)
{
    const cnorm_conv *conv = &call->layer->as.conv_transpose;
    const const_rows dy = {call->dy.at + s * call->dy.stride, places(conv)};
    cnorm_transpose(conv->outputs, places(conv), dy, (float_rows){to, conv->outputs});
}

static void bias_backward(const layer_backward *call, transpose_backward_scratch scratch)
{
    const cnorm_conv *conv = &call->layer->as.conv_transpose;
    const ptrdiff_t count = places(conv), rows = call->steps * call->batch * count;
    for (ptrdiff_t i = 0; i < rows; ++i) {
        if (i % count == 0) turned_dy(call, i / count, scratch.dy);
        call->kernels->add_f32(conv->outputs, scratch.block, scratch.dy + i % count * conv->outputs);
        if ((i + 1) % SUM_ROWS == 0 || i + 1 == rows)
            cnorm_add_block(call->kernels, conv->outputs, scratch.total, scratch.block);
    }
    cnorm_copy_gradient(call->gradient->conv_transpose.bias, scratch.total, conv->outputs);
}

/* kernel [taps, padded channels] += x times its window */
static void add_kernel(const cnorm_conv *conv, const float *x, const float *window, float *to)
{
    for (ptrdiff_t t = 0; t < conv->taps; ++t)
        for (ptrdiff_t c = 0; c < conv->channels; ++c)
            to[t * padded_units(conv->channels) + c] += x[c] * window[t * conv->channels + c];
}

static void weights_backward(const layer_backward *call, transpose_backward_scratch scratch)
{
    const cnorm_conv *conv = &call->layer->as.conv_transpose;
    const ptrdiff_t positions = conv->positions, channels = conv->channels,
                    kernel = transpose_kernel(call->layer).floats;
    const ptrdiff_t rows = call->steps * call->batch * positions, bias = padded_units(conv->outputs);
    const float *dz[OUTER_ROWS], *x[OUTER_ROWS];
    for (ptrdiff_t i = 0, n = 0; i < rows; ++i) {
        const ptrdiff_t s = i / positions, p = i % positions;
        if (p == 0) {
            const const_rows frame = {call->tape.at + s * call->tape.row, positions};
            cnorm_transpose(channels, positions, frame, (float_rows){scratch.x, channels});
            turned_dy(call, s, scratch.dy);
        }
        float *row = scratch.rows + n * channels, *window = scratch.windows + n * scratch.window;
        memcpy(row, scratch.x + p * channels, (size_t)channels * sizeof *row);
        gather(conv, p, scratch.dy, window);
        x[n] = row, dz[n++] = window;
        if (conv->depthwise) add_kernel(conv, row, window, scratch.block + bias);
        if (conv->depthwise && ((i + 1) % SUM_ROWS == 0 || i + 1 == rows))
            cnorm_add_block(call->kernels, kernel, scratch.total + bias, scratch.block + bias);
        if (n < OUTER_ROWS && i + 1 < rows) continue;
        if (!conv->depthwise && call->gradient->conv_transpose.weight)
            call->kernels->outer_products(&(cnorm_outer){.w = &conv->weight,
                                                         .n = n,
                                                         .dz = dz,
                                                         .x = x,
                                                         .dw = call->gradient->conv_transpose.weight,
                                                         .onto = i >= OUTER_ROWS,
                                                         .scratch = scratch.outer});
        n = 0;
    }
    cnorm_copy_gradient(call->gradient->conv_transpose.kernel, scratch.total + bias, kernel);
}

/* dx of frame s */
static void frame_backward(const layer_backward *call, ptrdiff_t s, transpose_backward_scratch scratch)
{
    const cnorm_conv *conv = &call->layer->as.conv_transpose;
    const ptrdiff_t positions = conv->positions, channels = conv->channels;
    turned_dy(call, s, scratch.dy);
    for (ptrdiff_t p = 0, n; p < positions; p += n) {
        n = positions - p < CNORM_ROWS ? positions - p : CNORM_ROWS;
        float *dx = scratch.x + p * channels;
        memset(scratch.windows, 0, (size_t)(n * scratch.window) * sizeof *dx);
        for (ptrdiff_t i = 0; i < n; ++i) gather(conv, p + i, scratch.dy, scratch.windows + i * scratch.window);
        if (!conv->depthwise)
            call->kernels->products_backward(&conv->weight, n, scratch.windows, scratch.window, dx, channels, 0);
        for (ptrdiff_t i = 0; conv->depthwise && i < n * channels; ++i) {
            const float *window = scratch.windows + i / channels * scratch.window + i % channels;
            dx[i] = 0;
            for (ptrdiff_t t = 0; t < conv->taps; ++t)
                dx[i] += window[t * channels] * conv->kernel[t * padded_units(channels) + i % channels];
        }
    }
    cnorm_transpose(positions, channels, (const_rows){scratch.x, channels},
                    (float_rows){call->dx.at + s * call->dx.stride, positions});
}

static void transpose_backward(const layer_backward *call)
{
    const transpose_backward_scratch scratch = transpose_backward_scratch_of(call->layer, call->scratch);
    memset(scratch.total, 0, (size_t)(2 * sum_floats(call->layer)) * sizeof(float));
    bias_backward(call, scratch);
    weights_backward(call, scratch);
    for (ptrdiff_t s = 0; call->dx.at && s < call->steps * call->batch; ++s) frame_backward(call, s, scratch);
}

const layer_ops cnorm_conv_transpose_ops = {
    .name = "conv_transpose",
    .options = transpose_options,
    .fields = transpose_fields,
    .inputs = LAYER_SIZE(conv_transpose, inputs),
    .outputs = LAYER_SIZE(conv_transpose, results),
    .check = transpose_check,
    .scratch = transpose_scratch_floats,
    .run = transpose_run,
    .trains = transpose_trains,
    .backward_floats = transpose_backward_floats,
    .backward = transpose_backward,
};
