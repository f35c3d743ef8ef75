/* Packing, sizes and the loop over steps and layers; the arithmetic of a step is in kernels/. */
#include "cnorm_rnn.h"

#include <stdint.h>
#include <string.h>

#include "../dispatch.h"
#include "../float_mode.h"

ptrdiff_t cnorm_padded_units(ptrdiff_t units) { return padded_units(units); }

ptrdiff_t cnorm_matrix_floats(ptrdiff_t gates, ptrdiff_t units, ptrdiff_t cols)
{
    const ptrdiff_t limit = (ptrdiff_t)1 << 28; /* keeps every product below far from PTRDIFF_MAX */
    if (gates <= 0 || units <= 0 || cols <= 0 || gates > 64 || units > limit || cols > limit) return 0;
    const cnorm_matrix shape = {gates, units, cols, NULL};
    return packed_rows(&shape) * cols;
}

cnorm_status cnorm_matrix_pack(ptrdiff_t gates, ptrdiff_t units, ptrdiff_t cols, const float *w, int centred,
                               float *panels)
{
    const ptrdiff_t floats = cnorm_matrix_floats(gates, units, cols);
    if (floats == 0) return CNORM_ERROR_SIZE;
    if (!w || !panels) return CNORM_ERROR_NULL;
    const ptrdiff_t rows = gates * units;
    const float_mode mode = float_mode_enter();
    memset(panels, 0, (size_t)floats * sizeof *panels);
    for (ptrdiff_t k = 0; k < cols; ++k) {
        double mean = 0;
        if (centred) {
            for (ptrdiff_t r = 0; r < rows; ++r) mean += (double)w[r * cols + k];
            mean /= (double)rows;
        }
        for (ptrdiff_t r = 0; r < rows; ++r) {
            const ptrdiff_t at = r / units * padded_units(units) + r % units; /* the row of the packed matrix */
            panels[at / PANEL * PANEL * cols + k * PANEL + at % PANEL] = (float)((double)w[r * cols + k] - mean);
        }
    }
    float_mode_leave(mode);
    return CNORM_OK;
}

static const cnorm_matrix *input_matrix(const cnorm_layer *layer)
{
    return layer->kind == CNORM_LSTM ? &layer->as.lstm.weight_x : &layer->as.linear.weight;
}

ptrdiff_t cnorm_layer_inputs(const cnorm_layer *layer) { return input_matrix(layer)->cols; }
ptrdiff_t cnorm_layer_outputs(const cnorm_layer *layer) { return input_matrix(layer)->units; }

ptrdiff_t cnorm_layer_state_floats(const cnorm_layer *layer)
{
    return layer->kind == CNORM_LSTM ? 2 * padded_units(layer->as.lstm.weight_h.units) : 0;
}

/* what one step of this layer needs beside its output */
static ptrdiff_t layer_scratch_floats(const cnorm_layer *layer)
{
    if (layer->kind == CNORM_LINEAR) return packed_rows(&layer->as.linear.weight);
    const cnorm_lstm *cell = &layer->as.lstm;
    return packed_rows(&cell->weight_x) + packed_rows(&cell->weight_h) + padded_units(cell->weight_h.units);
}

ptrdiff_t cnorm_state_floats(const cnorm_layer *layers, int count)
{
    ptrdiff_t total = 0;
    for (int i = 0; i < count; ++i) total += cnorm_layer_state_floats(&layers[i]);
    return total;
}

/* the widest output between two layers, twice: a layer reads one half and writes the other */
static ptrdiff_t passed_on_floats(const cnorm_layer *layers, int count)
{
    ptrdiff_t widest = 0;
    for (int i = 0; i < count; ++i) {
        const ptrdiff_t width = padded_units(cnorm_layer_outputs(&layers[i]));
        if (width > widest) widest = width;
    }
    return widest;
}

ptrdiff_t cnorm_scratch_floats(const cnorm_layer *layers, int count)
{
    ptrdiff_t largest = 0;
    for (int i = 0; i < count; ++i) {
        const ptrdiff_t floats = layer_scratch_floats(&layers[i]);
        if (floats > largest) largest = floats;
    }
    return largest + 2 * passed_on_floats(layers, count);
}

cnorm_status cnorm_run(const cnorm_layer *layers, int count, ptrdiff_t steps, const float *x, ptrdiff_t x_stride,
                       float *state, float *scratch, float *y, ptrdiff_t y_stride)
{
    const cnorm_kernels *kernels = cnorm_active();
    if (!kernels) return CNORM_ERROR_ISA;
    if (count <= 0 || steps < 0) return CNORM_ERROR_SIZE;
    if (steps == 0) return CNORM_OK;
    if (!layers || !x || !scratch || !y || (!state && cnorm_state_floats(layers, count))) return CNORM_ERROR_NULL;
    const ptrdiff_t width = passed_on_floats(layers, count);
    float *own = scratch + 2 * width;
    const float_mode mode = float_mode_enter();
    for (ptrdiff_t t = 0; t < steps; ++t, x += x_stride, y += y_stride) {
        const float *in = x;
        float *layer_state = state;
        for (int i = 0; i < count; ++i) {
            const cnorm_layer *layer = &layers[i];
            float *out = i + 1 == count ? y : scratch + (i % 2) * width;
            if (layer->kind == CNORM_LSTM) {
                kernels->lstm_step(&layer->as.lstm, in, layer_state, own);
                if (i + 1 == count) memcpy(y, layer_state, (size_t)cnorm_layer_outputs(layer) * sizeof *y);
                else out = layer_state; /* h is read where it lies */
                layer_state += cnorm_layer_state_floats(layer);
            } else {
                kernels->linear_step(&layer->as.linear, in, out, own);
            }
            in = out;
        }
    }
    float_mode_leave(mode);
    return CNORM_OK;
}
