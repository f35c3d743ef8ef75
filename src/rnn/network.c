/* Scratch, and the loop over steps and layers; what a layer does is in layers/. */
#include <stdint.h>

#include "../checks.h"
#include "../dispatch.h"
#include "../float_mode.h"
#include "layers.h"

/* floats of the outputs of `count` layers, [rows, padded outputs] each. All are kept, since a layer may read an earlier
 * one. */
static ptrdiff_t output_floats(const cnorm_layer *layers, int count, ptrdiff_t rows)
{
    ptrdiff_t total = 0;
    for (int i = 0; i < count; ++i) total += rows * padded_units(cnorm_layer_outputs(&layers[i]));
    return total;
}

/* floats of the places of `count` layers' outputs */
static ptrdiff_t place_floats(int count)
{
    return padded_units(count * (ptrdiff_t)(sizeof(const_rows) / sizeof(float)));
}

static ptrdiff_t scratch_floats(const cnorm_layer *layers, int count, ptrdiff_t rows)
{
    ptrdiff_t largest = 0;
    for (int i = 0; i < count; ++i) largest = larger(largest, cnorm_layer_scratch(&layers[i], rows));
    return place_floats(count - 1) + output_floats(layers, count - 1, rows) + (largest + 15) / 16 * 16;
}

/* The rows that are computed together, of a caller's `rows`: at most CNORM_ROWS, and fewer where layers are so wide
 * that scratch for several rows would take more memory than CNORM_MODEL_FLOATS. */
static ptrdiff_t rows_together(const cnorm_layer *layers, int count, ptrdiff_t rows)
{
    if (rows > CNORM_ROWS) rows = CNORM_ROWS;
    while (rows > 1 && scratch_floats(layers, count, rows) > CNORM_MODEL_FLOATS) rows /= 2;
    return rows;
}

ptrdiff_t cnorm_scratch_floats(const cnorm_layer *layers, int count, ptrdiff_t rows)
{
    if (count < 1 || rows < 1) return 0;
    return scratch_floats(layers, count, rows_together(layers, count, rows));
}

/* A call of `count` layers: with `steps` the rows are steps of one stream in turn, else one row for each of several
 * streams; at most `rows` together. */
typedef struct {
    const cnorm_kernels *kernels;
    const cnorm_layer *layers;
    int count, steps;
    ptrdiff_t rows;
    float *const *states; /* [1] with steps, else one for each row */
    /* cnorm_scratch_floats: where the output of each layer but the last is, the outputs, then what a layer needs */
    const_rows *places;
    float *scratch, *layer_scratch;
} network_call;

/* The input of the layer `back` places before layer `index`: x, or the output of the layer before it. */
static const_rows earlier_input(const network_call *call, ptrdiff_t index, ptrdiff_t back, const_rows x)
{
    return back == index ? x : call->places[index - back - 1];
}

/* Whether the output of layer `index` is a part of an earlier output, which is then not copied but read there. */
static int is_view(const network_call *call, int index, const_rows *y)
{
    const cnorm_layer *layer = &call->layers[index];
    const layer_ops *ops = cnorm_layer_ops_of(layer->kind);
    if (!ops->part || index + 1 == call->count) return 0;
    const layer_read from = ops->part(layer);
    if (from.count == 0 || from.back == index) return 0; /* y of the call may be x of the call */
    *y = call->places[index - from.back - 1];
    y->at += from.start;
    return 1;
}

enum { AHEAD = 12 }; /* layers that are looked at for those that a run does, too */

/* The layers behind the one of `run`, at `index`, which it also does: of its kind, with inputs that are there before it
 * is run, because they are parts of earlier outputs. Returns a bit for each, 1 << 1 for layer index + 1, besides those
 * of layers that are `done`. */
static unsigned take_beside(const network_call *call, int index, unsigned done, const_rows x, layer_run *run)
{
    const layer_ops *ops = cnorm_layer_ops_of(run->layer->kind);
    const_rows place[AHEAD] = {{0}}; /* of the outputs from layer `index` on; NULL if it is not there */
    float *out = run->y.at;
    for (int k = 1; k < AHEAD && index + k + 1 < call->count && run->others < LAYERS_BESIDE; ++k) {
        const cnorm_layer *layer = &call->layers[index + k];
        const layer_ops *of = cnorm_layer_ops_of(layer->kind);
        out += call->rows * padded_units(cnorm_layer_outputs(layer - 1));
        const float_rows y = {out, padded_units(cnorm_layer_outputs(layer))};
        if (done >> k & 1) {
            place[k] = (const_rows){y.at, y.stride};
            continue;
        }
        if (layer->kind == run->layer->kind && place[k - 1].at && ops->beside(run->layer, layer)) {
            run->beside[run->others++] = (layer_beside){layer, place[k - 1], y};
            done |= 1u << k;
        }
        const layer_read from = of->part ? of->part(layer) : (layer_read){0};
        if (from.count == 0) continue;
        place[k] = from.back < k ? place[k - from.back - 1] : earlier_input(call, index + k, from.back, x);
        if (place[k].at) place[k].at += from.start;
    }
    return done;
}

/* n <= rows rows through all layers */
static void run_rows(const network_call *call, ptrdiff_t n, const_rows x, float_rows y)
{
    float *out = call->scratch;
    layer_beside beside[LAYERS_BESIDE];
    layer_run one = {.kernels = call->kernels,
                     .n = n,
                     .x = x,
                     .states = call->states,
                     .steps = call->steps,
                     .beside = beside,
                     .scratch = call->layer_scratch};
    unsigned done = 0; /* by layers before: bit k is that of layer i + k */
    for (int i = 0; i < call->count; ++i) {
        const cnorm_layer *layer = &call->layers[i];
        const layer_ops *ops = cnorm_layer_ops_of(layer->kind);
        const ptrdiff_t width = padded_units(layer_size(layer, ops->outputs));
        one.layer = layer;
        const int last = i + 1 == call->count;
        one.y = last ? y : (float_rows){out, width};
        for (int k = 0; k < ops->reads; ++k) {
            const ptrdiff_t back = ops->read(layer, k).back;
            if (back == 0) break;
            one.read[k] = earlier_input(call, i, back, x);
        }
        one.others = 0;
        if (ops->beside && !(done & 1) && !last) done = take_beside(call, i, done, x, &one);
        const_rows place = {one.y.at, one.y.stride};
        if (!(done & 1) && !is_view(call, i, &place)) ops->run(&one);
        done >>= 1;
        if (ops->state) one.offset += cnorm_layer_state_floats(layer);
        if (!last) call->places[i] = place;
        one.x = place;
        out += call->rows * width;
    }
}

static int has_state(const cnorm_layer *layers, int count)
{
    for (int i = 0; i < count; ++i)
        if (cnorm_layer_state_floats(&layers[i]) > 0) return 1;
    return 0;
}

/* `steps`: whether the frames are steps of one sequence */
static cnorm_status run_frames(const cnorm_frames *frames, int steps)
{
    network_call call = {.kernels = cnorm_active(), .steps = steps};
    if (!call.kernels) return CNORM_ERROR_ISA;
    if (!frames) return CNORM_ERROR_NULL;
    const ptrdiff_t total = frames->frames;
    if (frames->count <= 0 || total < 0 || frames->rows < 0) return CNORM_ERROR_SIZE;
    if (total == 0) return CNORM_OK;
    if (!frames->layers || !frames->x || !frames->scratch || !frames->y) return CNORM_ERROR_NULL;
    const cnorm_status fits = frames->checked ? CNORM_OK : cnorm_layers_check(frames->layers, frames->count, NULL);
    if (fits != CNORM_OK) return fits;
    float *const *states = steps ? &frames->state : frames->states;
    const int stateful = has_state(frames->layers, frames->count);
    if (stateful && !states) return CNORM_ERROR_NULL;
    for (ptrdiff_t s = 0; stateful && s < (steps ? 1 : total); ++s)
        if (!states[s]) return CNORM_ERROR_NULL;
    const ptrdiff_t inputs = cnorm_layer_inputs(frames->layers), x_stride = stride_of(frames->x_stride, inputs);
    const ptrdiff_t outputs = cnorm_layer_outputs(&frames->layers[frames->count - 1]);
    const ptrdiff_t y_stride = stride_of(frames->y_stride, outputs);
    if (cnorm_refused_token(frames->layers, frames->count, total, frames->x, x_stride, NULL) < total)
        return CNORM_ERROR_TOKEN;
    const ptrdiff_t rows = rows_together(frames->layers, frames->count, frames->rows > 1 ? frames->rows : 1);
    call.layers = frames->layers, call.count = frames->count, call.rows = rows;
    call.places = (const_rows *)(void *)frames->scratch;
    call.scratch = frames->scratch + place_floats(call.count - 1);
    call.layer_scratch = call.scratch + output_floats(call.layers, call.count - 1, rows);
    const float_mode mode = float_mode_enter();
    for (ptrdiff_t t = 0; t < total; t += rows) {
        call.states = steps ? states : states + t;
        run_rows(&call, total - t < rows ? total - t : rows, (const_rows){frames->x + t * x_stride, x_stride},
                 (float_rows){frames->y + t * y_stride, y_stride});
    }
    float_mode_leave(mode);
    return CNORM_OK;
}

cnorm_status cnorm_run(const cnorm_frames *call) { return run_frames(call, 1); }
cnorm_status cnorm_run_many(const cnorm_frames *call) { return run_frames(call, 0); }
