/* The forward pass that records on the tape: layer after layer, each over all steps, with the arithmetic of
 * cnorm_run. */
#include "tape.h"

#include <stdint.h>
#include <string.h>

#include "../dispatch.h"
#include "../float_mode.h"
#include "rows.h"

ptrdiff_t cnorm_tape_floats(const cnorm_tape *tape)
{
    const ptrdiff_t limit = PTRDIFF_MAX / 64; /* keeps every product and the size in bytes below PTRDIFF_MAX */
    if (tape->count <= 0 || tape->steps <= 0 || tape->batch <= 0 || tape->steps > limit / tape->batch) return 0;
    const ptrdiff_t rows = tape->steps * tape->batch;
    ptrdiff_t floats = 0;
    for (int i = 0; i < tape->count; ++i) {
        const ptrdiff_t row = tape_row_of(&tape->layers[i]).floats;
        if (row > limit / rows) return 0;
        floats += rows * row + tape_stats_floats(&tape->layers[i], rows);
        if (floats > limit) return 0;
    }
    return floats;
}

static void copy_rows(ptrdiff_t n, ptrdiff_t floats, const float *from, ptrdiff_t from_stride, float *to,
                      ptrdiff_t stride)
{
    for (ptrdiff_t s = 0; s < n; ++s) memcpy(to + s * stride, from + s * from_stride, (size_t)floats * sizeof *to);
}

typedef struct recording {
    const cnorm_kernels *kernels;
    const cnorm_cell *cell;
    tape_layer tape;
    ptrdiff_t steps, batch;
    float *state; /* of this cell; the next row's is `state_floats` further on */
    ptrdiff_t state_floats;
    float *scratch;
    float_rows y;
} recording;

/* One step of n rows that begin at `at` on the tape, where their zx are. Records their state before the step, the
 * products and an LSTM's gates. */
static void record_step(const recording *call, ptrdiff_t n, float *at, float *const *state, float *scratch)
{
    const cnorm_cell *cell = call->cell;
    const tape_row row = call->tape.row;
    const ptrdiff_t width = padded_units(cell->weight_x.units), second_row = row.in2 - row.z2;
    cnorm_cell_scratch to = cell_scratch(cell, n, scratch);
    to.zx = at + row.zx, to.zh = at + row.zh, to.gates = at + row.gates;
    to.zx_stride = to.zh_stride = to.gates_stride = row.floats;
    for (ptrdiff_t s = 0; s < n; ++s) copy_rows(1, row.zx - row.state, state[s], 0, at + s * row.floats + row.state, 0);
    call->kernels->cell_step(cell, n, at + row.x, row.floats, state, &to);
    if (second_row == 0) return;
    copy_rows(n, second_row, to.z2, second_row, at + row.z2, row.floats);
    copy_rows(n, width, to.in2, width, at + row.in2, row.floats);
}

/* The products of x are computed CNORM_ROWS rows at a time, of several steps if the batch is small. */
static void record_cell(const recording *call)
{
    const cnorm_cell *cell = call->cell;
    const ptrdiff_t row = call->tape.row.floats, batch = call->batch;
    const ptrdiff_t together = batch < CNORM_ROWS ? CNORM_ROWS / batch : 1;
    float *states[CNORM_ROWS];
    for (ptrdiff_t t = 0; t < call->steps; t += together) {
        const ptrdiff_t g = call->steps - t < together ? call->steps - t : together;
        for (ptrdiff_t b = 0; b < batch; b += CNORM_ROWS) {
            const ptrdiff_t n = batch - b < CNORM_ROWS ? batch - b : CNORM_ROWS;
            float *at = call->tape.at + (t * batch + b) * row;
            call->kernels->cell_inputs(cell, g * n, at + call->tape.row.x, row, at + call->tape.row.zx, row,
                                       call->scratch);
            for (ptrdiff_t s = 0; s < n; ++s) states[s] = call->state + (b + s) * call->state_floats;
            for (ptrdiff_t i = 0; i < g; ++i) {
                record_step(call, n, at + i * n * row, states, call->scratch);
                for (ptrdiff_t s = 0; s < n; ++s)
                    copy_rows(1, cell->weight_h.cols, states[s], 0,
                              call->y.at + ((t + i) * batch + b + s) * call->y.stride, 0);
            }
        }
    }
}

static void record_layer(const cnorm_kernels *kernels, const cnorm_tape *tape, int index, ptrdiff_t first,
                         ptrdiff_t steps, float *scratch, float_rows y)
{
    const cnorm_layer *layer = &tape->layers[index];
    const tape_layer here = tape_layer_of(tape, index, first);
    const ptrdiff_t rows = steps * tape->batch, stride = here.row.floats, n = cnorm_layer_inputs(layer);
    if (layer->kind == CNORM_LAYER_LINEAR) {
        for (ptrdiff_t s = 0; s < rows; s += CNORM_ROWS)
            kernels->linear_step(&layer->as.linear, rows - s < CNORM_ROWS ? rows - s : CNORM_ROWS, here.at + s * stride,
                                 stride, y.at + s * y.stride, y.stride, scratch);
    } else if (layer->kind == CNORM_LAYER_NORM) {
        const cnorm_row_norm *norm = &layer->as.norm;
        kernels->layer_norm[CNORM_F32](&(cnorm_norm){.rows = rows,
                                                     .n = n,
                                                     .x = here.at,
                                                     .x_stride = stride,
                                                     .gain = norm->gain,
                                                     .bias = norm->bias,
                                                     .eps = (double)norm->eps,
                                                     .y = y.at,
                                                     .y_stride = y.stride,
                                                     .stats = here.stats});
    } else if (layer->kind == CNORM_LAYER_ACTIVATION) {
        for (ptrdiff_t s = 0; s < rows; ++s)
            kernels->activation_f32(layer->as.activation.f, n, here.at + s * stride, y.at + s * y.stride);
    } else if (layer->kind == CNORM_LAYER_RESIDUAL) {
        const tape_layer from = tape_layer_of(tape, index - layer->as.residual.back, first);
        for (ptrdiff_t s = 0; s < rows; ++s)
            for (ptrdiff_t j = 0; j < n; ++j)
                y.at[s * y.stride + j] = from.at[s * from.row.floats + j] + here.at[s * stride + j];
    }
}

cnorm_status cnorm_run_tape(const cnorm_tape *tape, ptrdiff_t first, ptrdiff_t steps, const float *x, float *state,
                            float *scratch, float *y)
{
    const cnorm_kernels *kernels = cnorm_active();
    if (!kernels) return CNORM_ERROR_ISA;
    const cnorm_status status = tape_check(tape, first, steps);
    if (status != CNORM_OK) return status;
    const ptrdiff_t state_floats = cnorm_state_floats(tape->layers, tape->count),
                    inputs = cnorm_layer_inputs(&tape->layers[0]);
    if (!x || !scratch || !y || (state_floats > 0 && !state)) return CNORM_ERROR_NULL;
    const float_mode mode = float_mode_enter();
    const tape_layer start = tape_layer_of(tape, 0, first);
    copy_rows(steps * tape->batch, inputs, x, inputs, start.at, start.row.floats);
    ptrdiff_t offset = 0;
    for (int i = 0; i < tape->count; ++i) {
        float_rows to = {y, cnorm_layer_outputs(&tape->layers[i])};
        if (i + 1 < tape->count) {
            const tape_layer next = tape_layer_of(tape, i + 1, first);
            to = (float_rows){next.at, next.row.floats};
        }
        if (tape->layers[i].kind == CNORM_LAYER_CELL) {
            record_cell(&(recording){kernels, &tape->layers[i].as.cell, tape_layer_of(tape, i, first), steps,
                                     tape->batch, state + offset, state_floats, scratch, to});
        } else {
            record_layer(kernels, tape, i, first, steps, scratch, to);
        }
        offset += cnorm_layer_state_floats(&tape->layers[i]);
    }
    float_mode_leave(mode);
    return CNORM_OK;
}

cnorm_status cnorm_tape_drop(const cnorm_tape *tape, ptrdiff_t first, ptrdiff_t end)
{
    const cnorm_status status = tape_check(tape, first, end - first);
    if (status != CNORM_OK) return status;
    for (int i = 0; i < tape->count; ++i) {
        const tape_layer from = tape_layer_of(tape, i, first), to = tape_layer_of(tape, i, 0);
        const ptrdiff_t rows = (end - first) * tape->batch;
        memmove(to.at, from.at, (size_t)(rows * to.row.floats) * sizeof(float));
        if (tape->layers[i].kind == CNORM_LAYER_NORM) memmove(to.stats, from.stats, (size_t)(3 * rows) * sizeof(float));
    }
    return CNORM_OK;
}
