/* Sizes of state and scratch, and the loop over steps and layers; the arithmetic of a step is in kernels/. */
#include "cnorm_rnn.h"

#include <stdint.h>
#include <string.h>

#include "../dispatch.h"
#include "../float_mode.h"
#include "rows.h"

ptrdiff_t cnorm_layer_inputs(const cnorm_layer *layer)
{
    switch (layer->kind) {
    case CNORM_LAYER_LINEAR: return layer->as.linear.weight.cols;
    case CNORM_LAYER_CELL: return layer->as.cell.weight_x.cols;
    case CNORM_LAYER_NORM: return layer->as.norm.n;
    case CNORM_LAYER_ACTIVATION: return layer->as.activation.n;
    case CNORM_LAYER_RESIDUAL: return layer->as.residual.n;
    }
    return 0;
}

ptrdiff_t cnorm_layer_outputs(const cnorm_layer *layer)
{
    if (layer->kind == CNORM_LAYER_LINEAR) return layer->as.linear.weight.units;
    if (layer->kind == CNORM_LAYER_CELL) return layer->as.cell.weight_h.cols;
    return cnorm_layer_inputs(layer);
}

ptrdiff_t cnorm_layer_state_floats(const cnorm_layer *layer)
{
    if (layer->kind != CNORM_LAYER_CELL) return 0;
    const cnorm_cell *cell = &layer->as.cell;
    return padded_units(cell->weight_h.cols) + (cell->kind == CNORM_CELL_LSTM ? padded_units(cell->weight_x.units) : 0);
}

ptrdiff_t cnorm_state_floats(const cnorm_layer *layers, int count)
{
    ptrdiff_t total = 0;
    for (int i = 0; i < count; ++i) total += cnorm_layer_state_floats(&layers[i]);
    return total;
}

/* scratch for `rows` rows of this layer, without its output */
static ptrdiff_t layer_scratch_floats(const cnorm_layer *layer, ptrdiff_t rows)
{
    if (layer->kind == CNORM_LAYER_LINEAR) {
        const cnorm_matrix *w = &layer->as.linear.weight;
        return rows * packed_rows(w) + product_scratch_floats(w, rows);
    }
    if (layer->kind != CNORM_LAYER_CELL) return 0;
    const cnorm_cell *cell = &layer->as.cell;
    return rows * input_row_floats(cell) +
           larger(cell_scratch(cell, rows, NULL).floats, product_scratch_floats(&cell->weight_x, rows));
}

/* floats of the outputs of `count` layers, [rows, padded outputs] each. All are kept, since a residual layer reads an
 * earlier one. */
static ptrdiff_t output_floats(const cnorm_layer *layers, int count, ptrdiff_t rows)
{
    ptrdiff_t total = 0;
    for (int i = 0; i < count; ++i) total += rows * padded_units(cnorm_layer_outputs(&layers[i]));
    return total;
}

ptrdiff_t cnorm_scratch_floats(const cnorm_layer *layers, int count, ptrdiff_t rows)
{
    ptrdiff_t largest = 0;
    for (int i = 0; i < count; ++i) largest = larger(largest, layer_scratch_floats(&layers[i], rows));
    return output_floats(layers, count - 1, rows) + (largest + 15) / 16 * 16;
}

/* A call of `count` layers: with `steps` the rows are steps of one stream in turn, else one row for each of several
 * streams; at most `rows` together. */
typedef struct {
    const cnorm_kernels *kernels;
    const cnorm_layer *layers;
    int count, steps;
    ptrdiff_t rows;
    float *const *states; /* [1] with steps, else one for each row */
    float *scratch;       /* cnorm_scratch_floats */
} network_call;

/* n rows of one cell, whose state begins `offset` floats into a stream's: one step of each of n states, or n steps of
 * the first one */
static void run_cell(const network_call *call, const cnorm_cell *cell, ptrdiff_t n, const_rows x, ptrdiff_t offset,
                     float *scratch, float_rows y)
{
    const cnorm_kernels *kernels = call->kernels;
    const ptrdiff_t row = input_row_floats(cell), outputs = cell->weight_h.cols;
    float *zx = scratch, *step_scratch = scratch + n * row;
    kernels->cell_inputs(cell, n, x.at, x.stride, zx, row, step_scratch);
    cnorm_cell_scratch at = cell_scratch(cell, call->steps ? 1 : n, step_scratch);
    at.zx = zx;
    float *state[CNORM_ROWS];
    for (ptrdiff_t s = 0; s < n; ++s) state[s] = call->states[call->steps ? 0 : s] + offset;
    if (!call->steps) kernels->cell_step(cell, n, x.at, x.stride, state, &at);
    for (ptrdiff_t s = 0; s < n; ++s, at.zx += row) {
        if (call->steps) kernels->cell_step(cell, 1, x.at + s * x.stride, x.stride, state, &at);
        memcpy(y.at + s * y.stride, state[s], (size_t)outputs * sizeof(float));
    }
}

/* a layer without weights or state */
static void run_plain(const cnorm_kernels *kernels, const cnorm_layer *layer, ptrdiff_t n, const_rows x,
                      const_rows residual, float_rows y)
{
    if (layer->kind == CNORM_LAYER_NORM) {
        const cnorm_row_norm *norm = &layer->as.norm;
        kernels->layer_norm[CNORM_F32](&(cnorm_norm){.rows = n,
                                                     .n = norm->n,
                                                     .x = x.at,
                                                     .x_stride = x.stride,
                                                     .gain = norm->gain,
                                                     .bias = norm->bias,
                                                     .eps = (double)norm->eps,
                                                     .y = y.at,
                                                     .y_stride = y.stride});
    } else if (layer->kind == CNORM_LAYER_ACTIVATION) {
        for (ptrdiff_t s = 0; s < n; ++s)
            kernels->activation_f32(layer->as.activation.f, layer->as.activation.n, x.at + s * x.stride,
                                    y.at + s * y.stride);
    } else {
        for (ptrdiff_t s = 0; s < n; ++s)
            for (ptrdiff_t j = 0; j < layer->as.residual.n; ++j)
                y.at[s * y.stride + j] = residual.at[s * residual.stride + j] + x.at[s * x.stride + j];
    }
}

/* the input of layer `index`: x, or the output that the layer before it keeps in scratch [rows, padded outputs] */
static const_rows input_of(const network_call *call, int index, const_rows x)
{
    if (index == 0) return x;
    return (const_rows){call->scratch + output_floats(call->layers, index - 1, call->rows),
                        padded_units(cnorm_layer_inputs(&call->layers[index]))};
}

/* n <= rows rows through all layers */
static void run_rows(const network_call *call, ptrdiff_t n, const_rows x, float_rows y)
{
    const cnorm_layer *layers = call->layers;
    float *layer_scratch = call->scratch + output_floats(layers, call->count - 1, call->rows), *out = call->scratch;
    ptrdiff_t offset = 0;
    const_rows in = x;
    for (int i = 0; i < call->count; ++i) {
        const cnorm_layer *layer = &layers[i];
        const ptrdiff_t width = padded_units(cnorm_layer_outputs(layer));
        const float_rows to = i + 1 == call->count ? y : (float_rows){out, width};
        if (layer->kind == CNORM_LAYER_LINEAR) {
            call->kernels->linear_step(&layer->as.linear, n, in.at, in.stride, to.at, to.stride, layer_scratch);
        } else if (layer->kind == CNORM_LAYER_CELL) {
            run_cell(call, &layer->as.cell, n, in, offset, layer_scratch, to);
            offset += cnorm_layer_state_floats(layer);
        } else {
            const int back = layer->kind == CNORM_LAYER_RESIDUAL ? layer->as.residual.back : 0;
            run_plain(call->kernels, layer, n, in, input_of(call, i - back, x), to);
        }
        in = (const_rows){to.at, to.stride};
        out += call->rows * width;
    }
}

static cnorm_status run(network_call call, ptrdiff_t total, const_rows x, float_rows y)
{
    float *const *states = call.states;
    const ptrdiff_t rows = call.rows;
    call.kernels = cnorm_active();
    if (!call.kernels) return CNORM_ERROR_ISA;
    if (call.count <= 0 || total < 0 || rows < 1 || rows > CNORM_ROWS) return CNORM_ERROR_SIZE;
    if (total == 0) return CNORM_OK;
    if (!call.layers || !x.at || !call.scratch || !y.at) return CNORM_ERROR_NULL;
    const int stateful = cnorm_state_floats(call.layers, call.count) > 0;
    if (stateful && !states) return CNORM_ERROR_NULL;
    for (ptrdiff_t s = 0; stateful && s < (call.steps ? 1 : total); ++s)
        if (!states[s]) return CNORM_ERROR_NULL;
    const cnorm_status fits = cnorm_layers_check(call.layers, call.count);
    if (fits != CNORM_OK) return fits;
    const float_mode mode = float_mode_enter();
    for (ptrdiff_t t = 0; t < total; t += rows) {
        if (!call.steps) call.states = states + t;
        run_rows(&call, total - t < rows ? total - t : rows, (const_rows){x.at + t * x.stride, x.stride},
                 (float_rows){y.at + t * y.stride, y.stride});
    }
    float_mode_leave(mode);
    return CNORM_OK;
}

cnorm_status cnorm_run(const cnorm_layer *layers, int count, ptrdiff_t steps, const float *x, ptrdiff_t x_stride,
                       float *state, float *scratch, ptrdiff_t rows, float *y, ptrdiff_t y_stride)
{
    const network_call call = {
        .layers = layers, .count = count, .steps = 1, .rows = rows, .states = &state, .scratch = scratch};
    return run(call, steps, (const_rows){x, x_stride}, (float_rows){y, y_stride});
}

cnorm_status cnorm_run_many(const cnorm_layer *layers, int count, ptrdiff_t streams, const float *x, ptrdiff_t x_stride,
                            float *const *states, float *scratch, ptrdiff_t rows, float *y, ptrdiff_t y_stride)
{
    const network_call call = {.layers = layers, .count = count, .rows = rows, .states = states, .scratch = scratch};
    return run(call, streams, (const_rows){x, x_stride}, (float_rows){y, y_stride});
}
