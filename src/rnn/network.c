/* Sizes of state and scratch, and the loop over steps and layers; the arithmetic of a step is in kernels/. */
#include "cnorm_rnn.h"

#include <stdint.h>
#include <string.h>

#include "../dispatch.h"
#include "../float_mode.h"

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

static ptrdiff_t larger(ptrdiff_t a, ptrdiff_t b) { return a > b ? a : b; }

/* scratch for `rows` rows of this layer, without its output */
static ptrdiff_t layer_scratch_floats(const cnorm_layer *layer, ptrdiff_t rows)
{
    if (layer->kind == CNORM_LAYER_LINEAR) {
        const cnorm_matrix *w = &layer->as.linear.weight;
        return rows * packed_rows(w) + product_scratch_floats(w, rows);
    }
    if (layer->kind != CNORM_LAYER_CELL) return 0;
    const cnorm_cell *cell = &layer->as.cell;
    return rows * input_row_floats(cell) + larger(cell_scratch(cell, rows, NULL).floats, product_scratch_floats(&cell->weight_x, rows));
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

typedef struct {
    float *at;
    ptrdiff_t stride;
} output_rows;

/* n rows of one cell: one step of each of n states, or n steps of the first one */
static void run_cell(const cnorm_kernels *kernels, const cnorm_cell *cell, ptrdiff_t n, int steps, const float *x,
                     ptrdiff_t x_stride, float *const *states, ptrdiff_t offset, float *scratch, output_rows y)
{
    const ptrdiff_t row = input_row_floats(cell), outputs = cell->weight_h.cols;
    float *zx = scratch, *own = scratch + n * row;
    kernels->cell_inputs(cell, n, x, x_stride, zx, own);
    float *state[CNORM_ROWS];
    for (ptrdiff_t s = 0; s < n; ++s) state[s] = states[steps ? 0 : s] + offset;
    if (!steps) kernels->cell_step(cell, n, x, x_stride, zx, state, own);
    for (ptrdiff_t s = 0; s < n; ++s) {
        if (steps) kernels->cell_step(cell, 1, x + s * x_stride, x_stride, zx + s * row, state, own);
        memcpy(y.at + s * y.stride, state[s], (size_t)outputs * sizeof(float));
    }
}

/* n <= rows rows through all layers */
static void run_rows(const cnorm_kernels *kernels, const cnorm_layer *layers, int count, ptrdiff_t rows, ptrdiff_t n,
                     int steps, const float *x, ptrdiff_t x_stride, float *const *states, float *scratch, float *y,
                     ptrdiff_t y_stride)
{
    float *own = scratch + output_floats(layers, count - 1, rows), *out = scratch;
    ptrdiff_t offset = 0;
    const float *in = x;
    ptrdiff_t in_stride = x_stride;
    for (int i = 0; i < count; ++i) {
        const cnorm_layer *layer = &layers[i];
        const ptrdiff_t width = padded_units(cnorm_layer_outputs(layer));
        const output_rows to = i + 1 == count ? (output_rows){y, y_stride} : (output_rows){out, width};
        switch (layer->kind) {
        case CNORM_LAYER_LINEAR: kernels->linear_step(&layer->as.linear, n, in, in_stride, to.at, to.stride, own); break;
        case CNORM_LAYER_CELL:
            run_cell(kernels, &layer->as.cell, n, steps, in, in_stride, states, offset, own, to);
            offset += cnorm_layer_state_floats(layer);
            break;
        case CNORM_LAYER_NORM: {
            const cnorm_row_norm *norm = &layer->as.norm;
            kernels->layer_norm[CNORM_F32](&(cnorm_norm){
                .rows = n, .n = norm->n, .x = in, .x_stride = in_stride, .gain = norm->gain, .bias = norm->bias,
                .eps = (double)norm->eps, .y = to.at, .y_stride = to.stride});
            break;
        }
        case CNORM_LAYER_ACTIVATION:
            for (ptrdiff_t s = 0; s < n; ++s)
                kernels->activation_f32(layer->as.activation.f, layer->as.activation.n, in + s * in_stride,
                                        to.at + s * to.stride);
            break;
        case CNORM_LAYER_RESIDUAL: {
            const int from = i - layer->as.residual.back; /* the layer whose input is added */
            const float *kept = from == 0 ? x : out - output_floats(layers + from - 1, i - from + 1, rows);
            const ptrdiff_t stride = from == 0 ? x_stride : padded_units(layer->as.residual.n);
            for (ptrdiff_t s = 0; s < n; ++s)
                for (ptrdiff_t j = 0; j < layer->as.residual.n; ++j)
                    to.at[s * to.stride + j] = kept[s * stride + j] + in[s * in_stride + j];
            break;
        }
        }
        in = to.at;
        in_stride = to.stride;
        out += rows * width;
    }
}

static cnorm_status run(const cnorm_layer *layers, int count, ptrdiff_t total, int steps, const float *x,
                        ptrdiff_t x_stride, float *const *states, float *scratch, ptrdiff_t rows, float *y,
                        ptrdiff_t y_stride)
{
    const cnorm_kernels *kernels = cnorm_active();
    if (!kernels) return CNORM_ERROR_ISA;
    if (count <= 0 || total < 0 || rows < 1 || rows > CNORM_ROWS) return CNORM_ERROR_SIZE;
    if (total == 0) return CNORM_OK;
    if (!layers || !x || !scratch || !y) return CNORM_ERROR_NULL;
    const int stateful = cnorm_state_floats(layers, count) > 0;
    if (stateful && !states) return CNORM_ERROR_NULL;
    for (ptrdiff_t s = 0; stateful && s < (steps ? 1 : total); ++s)
        if (!states[s]) return CNORM_ERROR_NULL;
    const cnorm_status fits = cnorm_layers_check(layers, count);
    if (fits != CNORM_OK) return fits;
    const float_mode mode = float_mode_enter();
    for (ptrdiff_t t = 0; t < total; t += rows)
        run_rows(kernels, layers, count, rows, total - t < rows ? total - t : rows, steps, x + t * x_stride, x_stride,
                 steps ? states : states + t, scratch, y + t * y_stride, y_stride);
    float_mode_leave(mode);
    return CNORM_OK;
}

cnorm_status cnorm_run(const cnorm_layer *layers, int count, ptrdiff_t steps, const float *x, ptrdiff_t x_stride,
                       float *state, float *scratch, ptrdiff_t rows, float *y, ptrdiff_t y_stride)
{
    return run(layers, count, steps, 1, x, x_stride, &state, scratch, rows, y, y_stride);
}

cnorm_status cnorm_run_many(const cnorm_layer *layers, int count, ptrdiff_t streams, const float *x,
                            ptrdiff_t x_stride, float *const *states, float *scratch, ptrdiff_t rows, float *y,
                            ptrdiff_t y_stride)
{
    return run(layers, count, streams, 0, x, x_stride, states, scratch, rows, y, y_stride);
}
