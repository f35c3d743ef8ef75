/* CNORM_LAYER_CONV: a convolution inside a frame [channels, positions], which is transposed to [positions, channels].
 * The windows of all places of the kernel are the rows of one product, whose results [places, outputs] are transposed
 * to [outputs, places]. */
#include "frames.h"
#include "windows.h"

#include <string.h>

#include "../../simd/vector.h"

static vector_shape conv_kernel(const cnorm_layer *layer) { return cnorm_windows_kernel(&layer->as.conv); }
static vector_shape conv_bias(const cnorm_layer *layer)
{
    return (vector_shape){0, layer->as.conv.outputs, layer->as.conv.outputs};
}

static const layer_option conv_options[] = {
    LAYER_OPTION(conv, channels, OPTION_SIZE),  LAYER_OPTION(conv, outputs, OPTION_SIZE),
    LAYER_OPTION(conv, taps, OPTION_SIZE),      LAYER_OPTION(conv, dilation, OPTION_SIZE),
    LAYER_OPTION(conv, depthwise, OPTION_INT),  LAYER_OPTION(conv, reflect, OPTION_INT),
    LAYER_OPTION(conv, positions, OPTION_SIZE), LAYER_OPTION(conv, stride, OPTION_SIZE),
    LAYER_OPTION(conv, before, OPTION_SIZE),    LAYER_OPTION(conv, after, OPTION_SIZE),
    LAYER_OPTION(conv, inputs, OPTION_SIZE),    LAYER_OPTION(conv, results, OPTION_SIZE),
    LAYER_OPTION(conv, groups, OPTION_SIZE),    {0},
};
static const layer_field conv_fields[] = {
    LAYER_FIELD(conv, weight, NULL),
    LAYER_FIELD(conv, kernel, conv_kernel),
    LAYER_FIELD(conv, bias, conv_bias),
    {0},
};

static ptrdiff_t padded_positions(const cnorm_conv *conv) { return conv->before + conv->positions + conv->after; }

/* the places of the kernel */
static ptrdiff_t places(const cnorm_conv *conv)
{
    const ptrdiff_t reach = (conv->taps - 1) * conv->dilation + 1, all = padded_positions(conv);
    return all < reach ? 0 : strides_in(conv, all - reach) + 1;
}

static const char *conv_check(const cnorm_layer *layer)
{
    const cnorm_conv *conv = &layer->as.conv;
    const ptrdiff_t most = WIDEST;
    const char *found = cnorm_windows_check(conv);
    if (found) return found;
    if (!between(conv->reflect, 1)) return "reflect";
    if (conv->positions < 1 || conv->positions > most / conv->channels) return "positions";
    if (conv->stride < 1 || conv->stride > most) return "stride";
    const ptrdiff_t widest = conv->reflect ? conv->positions - 1 : most / conv->channels;
    if (conv->before < 0 || conv->before > widest) return "before";
    if (conv->after < 0 || conv->after > widest || padded_positions(conv) > most / conv->channels) return "after";
    if (conv->inputs != conv->channels * conv->positions) return "inputs";
    if (!usable_groups(conv)) return "groups";
    const ptrdiff_t count = places(conv);
    if (count < 1 || count > most / conv->outputs) return "taps";
    return conv->results == conv->outputs * count ? NULL : "results";
}

/* The position under tap t at place p, also before and behind the frame */
static ptrdiff_t position(const cnorm_conv *conv, ptrdiff_t p, ptrdiff_t t)
{
    return p * conv->stride + t * conv->dilation - conv->before;
}

/* the position in the frame that is read at `at`; -1 for a zero */
static ptrdiff_t read_at(const cnorm_conv *conv, ptrdiff_t at)
{
    const ptrdiff_t last = conv->positions - 1;
    if (at >= 0 && at <= last) return at;
    if (!conv->reflect) return -1;
    return at < 0 ? -at : 2 * last - at;
}

/* the padding [from, to) of a frame [positions, channels] */
static void pad(const cnorm_conv *conv, ptrdiff_t from, ptrdiff_t to, float *frame)
{
    const ptrdiff_t channels = conv->channels, reflected = from < 0 ? 0 : 2 * (conv->positions - 1);
    if (!conv->reflect) memset(frame + from * channels, 0, (size_t)((to - from) * channels) * sizeof *frame);
    for (ptrdiff_t c = 0; conv->reflect && c < channels; ++c)
        for (ptrdiff_t at = from; at < to; ++at) frame[at * channels + c] = frame[(reflected - at) * channels + c];
}

/* The frame as [padded positions, channels], in `memory` or x itself: windows without dilation are parts of it */
static const float *padded_frame(const cnorm_conv *conv, const float *x, float *memory)
{
    const ptrdiff_t channels = conv->channels, positions = conv->positions;
    float *frame = memory + conv->before * channels;
    if (channels == 1 && conv->before + conv->after == 0) return x;
    if (channels == 1) memcpy(frame, x, (size_t)positions * sizeof *frame);
    else cnorm_transpose(channels, positions, (const_rows){x, positions}, (float_rows){frame, channels});
    pad(conv, -conv->before, 0, frame);
    pad(conv, positions, positions + conv->after, frame);
    return memory;
}

/* the window [taps, channels] of place p of a padded frame */
static void gather(const cnorm_conv *conv, const float *frame, ptrdiff_t p, float *window)
{
    const ptrdiff_t channels = conv->channels;
    for (ptrdiff_t t = 0; t < conv->taps; ++t)
        for (ptrdiff_t c = 0; c < channels; ++c)
            window[t * channels + c] = frame[(p * conv->stride + t * conv->dilation) * channels + c];
}

/* The scratch of a run. With memory NULL only its size. */
typedef struct conv_scratch {
    float *frame;              /* [padded positions, channels] */
    float *windows, *y, *rest; /* [together, window_floats], [places, padded outputs], of the product */
    ptrdiff_t together, floats;
} conv_scratch;

static conv_scratch conv_scratch_of(const cnorm_conv *conv, float *memory)
{
    const ptrdiff_t item = (ptrdiff_t)sizeof(float), count = places(conv);
    layout l = {(char *)memory, 0};
    conv_scratch s = {.together = count < CNORM_ROWS ? count : CNORM_ROWS};
    s.frame = layout_take(&l, padded_units(padded_positions(conv) * conv->channels) * item);
    s.windows = layout_take(&l, conv->dilation == 1 ? 0 : padded_units(s.together * window_floats(conv)) * item);
    s.y = layout_take(&l, count * padded_units(conv->outputs) * item);
    s.rest = layout_take(&l, cnorm_windows_scratch(conv, s.together) * item);
    s.floats = l.used / item;
    return s;
}

/* The frame with the positions in lanes: with a stride of s the positions 0, s, 2 s and so on of a channel, then those
 * from 1 on, and so on. With memory NULL only its size. */
typedef struct lanes_scratch {
    float *frame;           /* [channels, row], CNORM_GATE_PAD floats behind it */
    ptrdiff_t *offset;      /* [taps] */
    ptrdiff_t part, floats; /* of a row: positions of one remainder */
} lanes_scratch;

static lanes_scratch lanes_scratch_of(const cnorm_conv *conv, float *memory)
{
    const ptrdiff_t item = (ptrdiff_t)sizeof(float);
    layout l = {(char *)memory, 0};
    lanes_scratch s = {.part = strides_in(conv, padded_positions(conv) + conv->stride - 1)};
    s.frame = layout_take(&l, (padded_units(conv->channels * conv->stride * s.part) + CNORM_GATE_PAD) * item);
    s.offset = layout_take(&l, padded_units(conv->taps) * (ptrdiff_t)sizeof *s.offset);
    s.floats = l.used / item;
    return s;
}

static ptrdiff_t conv_scratch_floats(const cnorm_layer *layer, ptrdiff_t rows)
{
    (void)rows;
    const cnorm_conv *conv = &layer->as.conv;
    if (conv_check(layer)) return 0;
    const ptrdiff_t floats = conv_scratch_of(conv, NULL).floats;
    return positions_in_lanes(conv) ? larger(floats, lanes_scratch_of(conv, NULL).floats) : floats;
}

/* one channel of the frame: the padded positions in their order by remainders; 0 behind the last */
static void channel_in_lanes(const cnorm_conv *conv, ptrdiff_t part, const float *x, float *row)
{
    const ptrdiff_t stride = conv->stride, all = padded_positions(conv);
    for (ptrdiff_t first = 0; first < stride; ++first, row += part) {
        const ptrdiff_t shift =
            conv->before - first; /* padded position m stride + first is position m stride - shift */
        ptrdiff_t from = shift <= 0 ? 0 : strides_in(conv, shift + stride - 1);
        ptrdiff_t to = conv->positions + shift <= 0 ? 0 : strides_in(conv, conv->positions + shift + stride - 1);
        if (to > part) to = part;
        if (from > to) from = to;
        if (stride == 1) memcpy(row + from, x + from - shift, (size_t)(to - from) * sizeof *row);
        else if (stride == 2)
            for (ptrdiff_t m = from; m < to; ++m) row[m] = x[2 * m - shift];
        else
            for (ptrdiff_t m = from; m < to; ++m) row[m] = x[m * stride - shift];
        for (int end = 0; end < 2; ++end)
            for (ptrdiff_t m = end ? to : 0; m < (end ? part : from); ++m) {
                const ptrdiff_t at = m * stride + first < all ? read_at(conv, m * stride - shift) : -1;
                row[m] = at < 0 ? 0 : x[at];
            }
    }
}

/* a frame by the kernels with the positions in lanes; false if they do not take it */
static int conv_in_lanes(const cnorm_kernels *kernels, const cnorm_conv *conv, const float *x, float *y, float *memory)
{
    int tiny = 0;
    if (!positions_in_lanes(conv)) return 0;
    if (!conv->depthwise) kernels->frame_is_tiny(conv->channels, conv->positions, x, &tiny);
    if (tiny) return 0;
    const lanes_scratch scratch = lanes_scratch_of(conv, memory);
    const ptrdiff_t row = conv->stride * scratch.part;
    if (row == conv->positions && conv->stride == 1)
        memcpy(scratch.frame, x, (size_t)(conv->channels * row) * sizeof *y);
    else if (conv->stride == 1 && !conv->reflect)
        kernels->pad_frame(conv->channels, conv->positions, x, conv->before, row, scratch.frame);
    else
        for (ptrdiff_t c = 0; c < conv->channels; ++c)
            channel_in_lanes(conv, scratch.part, x + c * conv->positions, scratch.frame + c * row);
    memset(scratch.frame + conv->channels * row, 0, CNORM_GATE_PAD * sizeof *y);
    for (ptrdiff_t t = 0; t < conv->taps; ++t) {
        const ptrdiff_t at = t * conv->dilation, turns = strides_in(conv, at);
        scratch.offset[t] = (at - turns * conv->stride) * scratch.part + turns;
    }
    const cnorm_frame_view view = {.at = scratch.frame,
                                   .row = row,
                                   .channels = conv->channels,
                                   .taps = conv->taps,
                                   .places = places(conv),
                                   .groups = conv->groups,
                                   .period = conv->outputs,
                                   .offset = scratch.offset};
    if (conv->depthwise) kernels->frame_depthwise(&view, conv, y);
    else kernels->frame_product(&view, &(cnorm_linear){conv->weight, conv->bias}, y);
    return 1;
}

static void conv_frame(const cnorm_kernels *kernels, const cnorm_conv *conv, const float *x, float *y, float *memory)
{
    if (conv_in_lanes(kernels, conv, x, y, memory)) return;
    const conv_scratch scratch = conv_scratch_of(conv, memory);
    const ptrdiff_t count = places(conv), floats = window_floats(conv), width = padded_units(conv->outputs);
    const ptrdiff_t stride = conv->stride * conv->channels;
    const float *frame = padded_frame(conv, x, scratch.frame);
    for (ptrdiff_t p = 0, n; p < count; p += n) {
        n = count - p < scratch.together ? count - p : scratch.together;
        for (ptrdiff_t i = 0; conv->dilation > 1 && i < n; ++i)
            gather(conv, frame, p + i, scratch.windows + i * floats);
        cnorm_windows_run(kernels, conv, n,
                          conv->dilation > 1 ? (const_rows){scratch.windows, floats}
                                             : (const_rows){frame + p * stride, stride},
                          (float_rows){scratch.y + p * width, width}, scratch.rest);
    }
    cnorm_transpose(count, conv->outputs, (const_rows){scratch.y, width}, (float_rows){y, count}); /* y may be x */
}

static void conv_run(const layer_run *call)
{
    for (ptrdiff_t s = 0; s < call->n; ++s)
        conv_frame(call->kernels, &call->layer->as.conv, call->x.at + s * call->x.stride,
                   call->y.at + s * call->y.stride, call->scratch);
}

/* ---- backward ------------------------------------------------------------------------------------------------- */

static int conv_trains(const cnorm_layer *layer)
{
    const cnorm_conv *conv = &layer->as.conv;
    return conv->depthwise || conv->weight.type == CNORM_WEIGHT_F32;
}

/* With memory NULL only its size. Rows are the places of all frames, in order. */
typedef struct conv_backward_scratch {
    float *dz, *windows, *dwindows; /* [OUTER_ROWS, padded outputs], [OUTER_ROWS, window_floats], the same */
    float *frame, *dx;              /* of one frame: [padded positions, channels], [inputs] */
    float *gradient, *inputs;       /* of windows.c */
    ptrdiff_t floats;
} conv_backward_scratch;

static conv_backward_scratch conv_backward_scratch_of(const cnorm_conv *conv, float *memory)
{
    const ptrdiff_t item = (ptrdiff_t)sizeof(float), windows = padded_units(OUTER_ROWS * window_floats(conv)) * item;
    layout l = {(char *)memory, 0};
    conv_backward_scratch s;
    s.dz = layout_take(&l, OUTER_ROWS * padded_units(conv->outputs) * item);
    s.windows = layout_take(&l, windows);
    s.dwindows = layout_take(&l, windows);
    s.frame = layout_take(&l, padded_units(padded_positions(conv) * conv->channels) * item);
    s.dx = layout_take(&l, padded_units(conv->inputs) * item);
    s.gradient = layout_take(&l, cnorm_window_gradient_floats(conv) * item);
    s.inputs = layout_take(&l, cnorm_windows_inputs_floats(conv) * item);
    s.floats = l.used / item;
    return s;
}

static ptrdiff_t conv_backward_floats(const cnorm_layer *layer, ptrdiff_t rows)
{
    (void)rows;
    return conv_check(layer) ? 0 : conv_backward_scratch_of(&layer->as.conv, NULL).floats;
}

/* the weights' gradients: rows [first, first + n) */
static void rows_backward(const layer_backward *call, ptrdiff_t first, ptrdiff_t n, window_gradient *gradient,
                          conv_backward_scratch scratch)
{
    const cnorm_conv *conv = &call->layer->as.conv;
    const ptrdiff_t count = places(conv), floats = window_floats(conv), width = padded_units(conv->outputs);
    const float *dz[OUTER_ROWS], *windows[OUTER_ROWS], *frame = NULL;
    for (ptrdiff_t i = 0; i < n; ++i) {
        const ptrdiff_t s = (first + i) / count, p = (first + i) % count;
        if (i == 0 || p == 0) frame = padded_frame(conv, call->tape.at + s * call->tape.row, scratch.frame);
        dz[i] = scratch.dz + i * width, windows[i] = scratch.windows + i * floats;
        for (ptrdiff_t o = 0; o < conv->outputs; ++o)
            scratch.dz[i * width + o] = call->dy.at[s * call->dy.stride + o * count + p];
        gather(conv, frame, p, scratch.windows + i * floats);
    }
    cnorm_window_gradient_add(gradient, n, dz, windows);
}

/* the gradient of frame s, place after place */
static void frame_backward(const layer_backward *call, ptrdiff_t s, conv_backward_scratch scratch)
{
    const cnorm_conv *conv = &call->layer->as.conv;
    const ptrdiff_t count = places(conv), floats = window_floats(conv), width = padded_units(conv->outputs);
    memset(scratch.dx, 0, (size_t)conv->inputs * sizeof *scratch.dx);
    for (ptrdiff_t p = 0, n; p < count; p += n) {
        n = count - p < CNORM_ROWS ? count - p : CNORM_ROWS;
        for (ptrdiff_t i = 0; i < n; ++i)
            for (ptrdiff_t o = 0; o < conv->outputs; ++o)
                scratch.dz[i * width + o] = call->dy.at[s * call->dy.stride + o * count + p + i];
        cnorm_windows_inputs_backward(call->kernels, conv, n, (const_rows){scratch.dz, width}, scratch.dwindows,
                                      scratch.inputs);
        for (ptrdiff_t i = 0; i < n; ++i)
            for (ptrdiff_t t = 0; t < conv->taps; ++t) {
                const ptrdiff_t at = read_at(conv, position(conv, p + i, t));
                const float *from = scratch.dwindows + i * floats + t * conv->channels;
                for (ptrdiff_t c = 0; at >= 0 && c < conv->channels; ++c)
                    scratch.dx[c * conv->positions + at] += from[c];
            }
    }
    memcpy(call->dx.at + s * call->dx.stride, scratch.dx, (size_t)conv->inputs * sizeof *scratch.dx);
}

static void conv_backward(const layer_backward *call)
{
    const cnorm_conv *conv = &call->layer->as.conv;
    const ptrdiff_t frames = call->steps * call->batch, rows = frames * places(conv);
    const conv_backward_scratch scratch = conv_backward_scratch_of(conv, call->scratch);
    window_gradient gradient =
        cnorm_window_gradient_start(call->kernels, conv, &call->gradient->conv, scratch.gradient);
    for (ptrdiff_t first = 0; first < rows; first += OUTER_ROWS)
        rows_backward(call, first, rows - first < OUTER_ROWS ? rows - first : OUTER_ROWS, &gradient, scratch);
    cnorm_window_gradient_end(&gradient);
    for (ptrdiff_t s = 0; call->dx.at && s < frames; ++s) frame_backward(call, s, scratch);
}

const layer_ops cnorm_conv_ops = {
    .name = "conv",
    .options = conv_options,
    .fields = conv_fields,
    .inputs = LAYER_SIZE(conv, inputs),
    .outputs = LAYER_SIZE(conv, results),
    .check = conv_check,
    .scratch = conv_scratch_floats,
    .run = conv_run,
    .trains = conv_trains,
    .backward_floats = conv_backward_floats,
    .backward = conv_backward,
};
