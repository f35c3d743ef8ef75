/* CNORM_LAYER_DELAY: y = the frames of several steps, concatenated from the oldest on. */
#include <string.h>

#include "history.h"

enum { MOST_STATE = 1 << 24 /* floats */ };

static const layer_option delay_options[] = {
    LAYER_OPTION(delay, n, OPTION_SIZE),
    LAYER_OPTION(delay, frames, OPTION_SIZE),
    LAYER_OPTION(delay, dilation, OPTION_SIZE),
    LAYER_OPTION(delay, outputs, OPTION_SIZE),
    {0},
};
static const layer_field delay_fields[] = {{0}};

static history history_of(const cnorm_layer *layer)
{
    const cnorm_delay *delay = &layer->as.delay;
    return (history){delay->n, delay->frames, delay->dilation};
}

static const char *delay_check(const cnorm_layer *layer)
{
    const cnorm_delay *delay = &layer->as.delay;
    const ptrdiff_t most = MOST_STATE;
    if (delay->n < 1 || delay->n > most) return "n";
    if (delay->frames < 1 || delay->frames > most / delay->n) return "frames";
    const ptrdiff_t before = (delay->frames - 1) * delay->n;
    if (delay->dilation < 1 || delay->dilation > most / larger(before, 1)) return "dilation";
    return delay->outputs == delay->frames * delay->n ? NULL : "outputs";
}

static ptrdiff_t delay_state(const cnorm_layer *layer, int k)
{
    return k == 0 ? kept_frames(history_of(layer)) * layer->as.delay.n : 0;
}

static ptrdiff_t delay_scratch(const cnorm_layer *layer, ptrdiff_t rows)
{
    (void)rows;
    return padded_units(layer->as.delay.outputs);
}

/* A window is collected in scratch if y overlaps x. */
static void delay_run(const layer_run *call)
{
    const history of = history_of(call->layer);
    const ptrdiff_t outputs = call->layer->as.delay.outputs;
    for (ptrdiff_t s = 0; s < call->n; ++s) {
        float *state = kept_frames(of) > 0 ? call->states[call->steps ? 0 : s] + call->offset : NULL;
        const const_rows x = {call->x.at + s * call->x.stride, 0};
        float *y = call->y.at + s * call->y.stride;
        const int direct = apart(y, outputs, x.at, of.floats);
        float *to = direct ? y : call->scratch;
        cnorm_history_windows(of, state, 1, x, (float_rows){to, 0});
        cnorm_history_append(of, state, 1, x);
        if (!direct) memcpy(y, to, (size_t)outputs * sizeof *state);
    }
}

static void delay_record(const layer_record *call)
{
    const history of = history_of(call->layer);
    for (ptrdiff_t s = 0; s < call->steps * call->batch; ++s) {
        float *state = kept_frames(of) > 0 ? call->state + s % call->batch * call->state_stride : NULL;
        const const_rows x = {call->tape.at + s * call->tape.row, 0};
        cnorm_history_windows(of, state, 1, x, (float_rows){call->y.at + s * call->y.stride, 0});
        cnorm_history_append(of, state, 1, x);
    }
}

/* the gradients of the frames of one stream */
static ptrdiff_t delay_backward_floats(const cnorm_layer *layer, ptrdiff_t rows)
{
    return padded_units((kept_frames(history_of(layer)) + rows) * layer->as.delay.n);
}

static void delay_backward(const layer_backward *call)
{
    const history of = history_of(call->layer);
    float *frames = call->scratch;
    for (ptrdiff_t b = 0; b < call->batch; ++b) {
        float *dstate = kept_frames(of) > 0 ? call->dstate + b * call->dstate_stride : NULL;
        cnorm_history_backward_start(of, call->steps, dstate, frames);
        for (ptrdiff_t s = call->steps - 1; s >= 0; --s)
            cnorm_history_backward_add(call->kernels, of, s, call->dy.at + (s * call->batch + b) * call->dy.stride,
                                       frames);
        const float_rows dx = {call->dx.at ? call->dx.at + b * call->dx.stride : NULL, call->batch * call->dx.stride};
        cnorm_history_backward_end(of, call->steps, frames, dstate, dx);
    }
}

const layer_ops cnorm_delay_ops = {
    .name = "delay",
    .options = delay_options,
    .fields = delay_fields,
    .inputs = LAYER_SIZE(delay, n),
    .outputs = LAYER_SIZE(delay, outputs),
    .check = delay_check,
    .state = delay_state,
    .state_names = {"f"},
    .scratch = delay_scratch,
    .run = delay_run,
    .record = delay_record,
    .backward_floats = delay_backward_floats,
    .backward = delay_backward,
};
