/* CNORM_LAYER_CAUSAL_CONV: a convolution over time, y_t = bias + sum of W_k x_(t - (taps - 1 - k) dilation).
 * Windows are gathered from the state and the frames, and multiplied as the rows of a linear layer, so that a step,
 * many steps and many streams have the same bits; a depthwise one reads the state and the frames where they lie. On the
 * tape a row is x, then its window. */
#include <string.h>

#include "history.h"
#include "windows.h"

enum { MOST_STATE = 1 << 24 /* floats */ };

static vector_shape causal_kernel(const cnorm_layer *layer) { return cnorm_windows_kernel(&layer->as.causal_conv); }
static vector_shape causal_bias(const cnorm_layer *layer)
{
    const ptrdiff_t units = layer->as.causal_conv.outputs;
    return (vector_shape){0, units, units};
}

static const layer_option causal_options[] = {
    LAYER_OPTION(causal_conv, channels, OPTION_SIZE), LAYER_OPTION(causal_conv, outputs, OPTION_SIZE),
    LAYER_OPTION(causal_conv, taps, OPTION_SIZE),     LAYER_OPTION(causal_conv, dilation, OPTION_SIZE),
    LAYER_OPTION(causal_conv, depthwise, OPTION_INT), {0},
};
static const layer_field causal_fields[] = {
    LAYER_FIELD(causal_conv, weight, NULL),
    LAYER_FIELD(causal_conv, kernel, causal_kernel),
    LAYER_FIELD(causal_conv, bias, causal_bias),
    {0},
};

static const char *causal_check(const cnorm_layer *layer)
{
    const cnorm_conv *conv = &layer->as.causal_conv;
    const char *found = cnorm_windows_check(conv);
    if (found) return found;
    const ptrdiff_t before = conv->taps - 1; /* conv->taps * conv->channels is in range */
    return before > 0 && conv->dilation > MOST_STATE / (before * conv->channels) ? "dilation" : NULL;
}

static history history_of(const cnorm_conv *conv) { return (history){conv->channels, conv->taps, conv->dilation}; }
static ptrdiff_t kept(const cnorm_conv *conv) { return kept_frames(history_of(conv)); }

static ptrdiff_t causal_state(const cnorm_layer *layer, int k)
{
    return k == 0 ? kept(&layer->as.causal_conv) * layer->as.causal_conv.channels : 0;
}

enum { TOGETHER = 8 }; /* rows of a depthwise convolution whose y wait until their frames are in the state */

static ptrdiff_t rows_of(const cnorm_conv *conv, ptrdiff_t rows)
{
    const ptrdiff_t most = conv->depthwise ? TOGETHER : CNORM_ROWS;
    return rows < most ? rows : most;
}

static ptrdiff_t padded_window(const cnorm_conv *conv) { return padded_units(window_floats(conv)); }

static ptrdiff_t causal_scratch(const cnorm_layer *layer, ptrdiff_t rows)
{
    const cnorm_conv *conv = &layer->as.causal_conv;
    const ptrdiff_t together = rows_of(conv, rows);
    if (conv->depthwise) return together * padded_units(conv->outputs);
    return together * padded_window(conv) + cnorm_windows_scratch(conv, together);
}

/* The frames under the taps of step s of x [steps, channels, apart by its stride] */
static cnorm_tap_rows tap_rows(const cnorm_conv *conv, const float *state, const_rows x, ptrdiff_t s)
{
    const ptrdiff_t left = kept(conv) - s; /* frames of the state from that of the first tap on */
    const ptrdiff_t of_state = left <= 0 ? 0 : (left + conv->dilation - 1) / conv->dilation;
    const ptrdiff_t first = s + of_state * conv->dilation - kept(conv); /* of x */
    return (cnorm_tap_rows){.state = of_state > 0 ? state + s * conv->channels : NULL,
                            .state_stride = conv->dilation * conv->channels,
                            .kept = of_state,
                            .x = x.at + first * x.stride,
                            .x_stride = conv->dilation * x.stride};
}

/* y [n, padded outputs] of n frames x of one stream */
static void depthwise_rows(const cnorm_kernels *kernels, const cnorm_conv *conv, const float *state, ptrdiff_t n,
                           const_rows x, float *y)
{
    for (ptrdiff_t s = 0; s < n; ++s) {
        const cnorm_tap_rows taps = tap_rows(conv, state, x, s);
        kernels->depthwise(conv, &taps, y + s * padded_units(conv->outputs));
    }
}

/* Rows of scratch are windows, which are multiplied together, or, depthwise, y: x must not change before it is in the
 * state, and y may be x. */
static void causal_run(const layer_run *call)
{
    const cnorm_conv *conv = &call->layer->as.causal_conv;
    const ptrdiff_t most = rows_of(conv, call->n), outputs = conv->outputs;
    const ptrdiff_t floats = conv->depthwise ? padded_units(outputs) : padded_window(conv);
    float *rows = call->scratch;
    for (ptrdiff_t s = 0, n; s < call->n; s += n) {
        n = call->n - s < most ? call->n - s : most;
        const const_rows x = {call->x.at + s * call->x.stride, call->x.stride};
        const float_rows y = {call->y.at + s * call->y.stride, call->y.stride};
        const ptrdiff_t of_stream = call->steps ? n : 1;
        for (ptrdiff_t i = 0; i < n; i += of_stream) {
            float *state = kept(conv) > 0 ? call->states[call->steps ? 0 : s + i] + call->offset : NULL;
            const const_rows own = {x.at + i * x.stride, x.stride};
            if (conv->depthwise) depthwise_rows(call->kernels, conv, state, of_stream, own, rows + i * floats);
            else
                cnorm_history_windows(history_of(conv), state, of_stream, own, (float_rows){rows + i * floats, floats});
            cnorm_history_append(history_of(conv), state, of_stream, own);
        }
        if (!conv->depthwise)
            cnorm_windows_run(call->kernels, conv, n, (const_rows){rows, floats}, y, rows + most * floats);
        else
            for (ptrdiff_t i = 0; i < n; ++i)
                memcpy(y.at + i * y.stride, rows + i * floats, (size_t)outputs * sizeof *rows);
    }
}

/* ---- the tape ------------------------------------------------------------------------------------------------- */

static ptrdiff_t causal_tape_row(const cnorm_layer *layer)
{
    const cnorm_conv *conv = &layer->as.causal_conv;
    return padded_units(conv->channels) + padded_window(conv);
}

static void causal_record(const layer_record *call)
{
    const cnorm_conv *conv = &call->layer->as.causal_conv;
    const ptrdiff_t row = call->tape.row, rows = call->steps * call->batch, x = padded_units(conv->channels);
    for (ptrdiff_t s = 0; s < rows; ++s) {
        float *at = call->tape.at + s * row, *state = call->state + s % call->batch * call->state_stride;
        cnorm_history_windows(history_of(conv), state, 1, (const_rows){at, row}, (float_rows){at + x, 0});
        cnorm_history_append(history_of(conv), state, 1, (const_rows){at, row});
    }
    const ptrdiff_t most = rows_of(conv, rows);
    for (ptrdiff_t s = 0; s < rows; s += most)
        cnorm_windows_run(call->kernels, conv, rows - s < most ? rows - s : most,
                          (const_rows){call->tape.at + s * row + x, row},
                          (float_rows){call->y.at + s * call->y.stride, call->y.stride}, call->scratch);
}

static int causal_trains(const cnorm_layer *layer)
{
    const cnorm_conv *conv = &layer->as.causal_conv;
    return conv->depthwise || conv->weight.type == CNORM_WEIGHT_F32;
}

/* The scratch of the backward pass. With memory NULL only its size. */
typedef struct causal_backward_scratch {
    float *frames;  /* [kept frames + steps, channels]: the gradients of the frames of one stream */
    float *windows; /* [CNORM_ROWS, window_floats]: those of windows */
    float *rest;    /* of windows.c, whose functions are called in turn */
    ptrdiff_t floats;
} causal_backward_scratch;

static causal_backward_scratch causal_backward_scratch_of(const cnorm_conv *conv, ptrdiff_t steps, float *memory)
{
    const ptrdiff_t item = (ptrdiff_t)sizeof(float);
    layout l = {(char *)memory, 0};
    causal_backward_scratch s;
    s.frames = layout_take(&l, padded_units((kept(conv) + steps) * conv->channels) * item);
    s.windows = layout_take(&l, padded_units(CNORM_ROWS * window_floats(conv)) * item);
    s.rest = layout_take(&l, larger(cnorm_window_gradient_floats(conv), cnorm_windows_inputs_floats(conv)) * item);
    s.floats = l.used / item;
    return s;
}

static ptrdiff_t causal_backward_floats(const cnorm_layer *layer, ptrdiff_t rows)
{
    return causal_backward_scratch_of(&layer->as.causal_conv, rows, NULL).floats;
}

static void weights_backward(const layer_backward *call, float *scratch)
{
    const cnorm_conv *conv = &call->layer->as.causal_conv;
    const ptrdiff_t rows = call->steps * call->batch, x = padded_units(conv->channels);
    const float *dz[OUTER_ROWS], *windows[OUTER_ROWS];
    window_gradient gradient = cnorm_window_gradient_start(call->kernels, conv, &call->gradient->causal_conv, scratch);
    for (ptrdiff_t s = 0, n; s < rows; s += n) {
        n = rows - s < OUTER_ROWS ? rows - s : OUTER_ROWS;
        for (ptrdiff_t i = 0; i < n; ++i) {
            dz[i] = call->dy.at + (s + i) * call->dy.stride;
            windows[i] = call->tape.at + (s + i) * call->tape.row + x;
        }
        cnorm_window_gradient_add(&gradient, n, dz, windows);
    }
    cnorm_window_gradient_end(&gradient);
}

/* The gradients of the frames of stream b, from its last step to the first: those of its state after the steps, plus
 * those of each window that has the frame. */
static void frames_backward(const layer_backward *call, ptrdiff_t b, causal_backward_scratch scratch)
{
    const cnorm_conv *conv = &call->layer->as.causal_conv;
    const ptrdiff_t floats = window_floats(conv);
    const history of = history_of(conv);
    float *dstate = kept(conv) > 0 ? call->dstate + b * call->dstate_stride : NULL;
    cnorm_history_backward_start(of, call->steps, dstate, scratch.frames);
    for (ptrdiff_t end = call->steps, n; end > 0; end -= n) {
        n = end < CNORM_ROWS ? end : CNORM_ROWS;
        const const_rows dz = {call->dy.at + ((end - n) * call->batch + b) * call->dy.stride,
                               call->batch * call->dy.stride};
        cnorm_windows_inputs_backward(call->kernels, conv, n, dz, scratch.windows, scratch.rest);
        for (ptrdiff_t s = n - 1; s >= 0; --s)
            cnorm_history_backward_add(call->kernels, of, end - n + s, scratch.windows + s * floats, scratch.frames);
    }
    const float_rows dx = {call->dx.at ? call->dx.at + b * call->dx.stride : NULL, call->batch * call->dx.stride};
    cnorm_history_backward_end(of, call->steps, scratch.frames, dstate, dx);
}

static void causal_backward(const layer_backward *call)
{
    const cnorm_conv *conv = &call->layer->as.causal_conv;
    const causal_backward_scratch scratch = causal_backward_scratch_of(conv, call->steps, call->scratch);
    weights_backward(call, scratch.rest);
    for (ptrdiff_t b = 0; b < call->batch; ++b) frames_backward(call, b, scratch);
}

const layer_ops cnorm_causal_conv_ops = {
    .name = "causal_conv",
    .options = causal_options,
    .fields = causal_fields,
    .inputs = LAYER_SIZE(causal_conv, channels),
    .outputs = LAYER_SIZE(causal_conv, outputs),
    .check = causal_check,
    .state = causal_state,
    .state_names = {"f"},
    .scratch = causal_scratch,
    .run = causal_run,
    .tape_row = causal_tape_row,
    .trains = causal_trains,
    .record = causal_record,
    .backward_floats = causal_backward_floats,
    .backward = causal_backward,
};
