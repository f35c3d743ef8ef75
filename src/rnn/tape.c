/* The forward pass that records on the tape: layer after layer, each over all steps, with the arithmetic of
 * cnorm_run. */
#include "tape.h"

#include <stdint.h>
#include <string.h>

#include "../dispatch.h"
#include "../float_mode.h"

ptrdiff_t cnorm_tape_floats(const cnorm_tape *tape)
{
    const ptrdiff_t limit = PTRDIFF_MAX / 64; /* keeps every product and the size in bytes below PTRDIFF_MAX */
    if (tape->count <= 0 || tape->steps <= 0 || tape->batch <= 0 || tape->steps > limit / tape->batch) return 0;
    const ptrdiff_t rows = tape->steps * tape->batch;
    ptrdiff_t floats = 0;
    for (int i = 0; i < tape->count; ++i) {
        const ptrdiff_t row = cnorm_layer_tape_row(&tape->layers[i]);
        if (row > limit / rows || tape_stats(&tape->layers[i]) > limit / rows) return 0;
        floats += rows * row + tape_stats_floats(&tape->layers[i], rows);
        if (floats > limit) return 0;
    }
    return floats;
}

ptrdiff_t cnorm_run_tape_floats(const cnorm_tape *tape)
{
    ptrdiff_t largest = 0;
    for (int i = 0; i < tape->count; ++i) largest = larger(largest, cnorm_layer_scratch(&tape->layers[i], CNORM_ROWS));
    return tape->count > 0 ? larger(largest, CNORM_GATE_PAD) : 0;
}

/* A layer without state over all rows; its `record` does the others. */
static void run_layer(const cnorm_kernels *kernels, const cnorm_tape *tape, int index, ptrdiff_t first, ptrdiff_t steps,
                      float *scratch, float_rows y)
{
    const cnorm_layer *layer = &tape->layers[index];
    const tape_layer here = tape_layer_of(tape, index, first);
    layer_run call = {.kernels = kernels,
                      .layer = layer,
                      .n = steps * tape->batch,
                      .x = {here.at, here.row},
                      .y = y,
                      .scratch = scratch,
                      .stats = here.stats};
    tape_reads(tape, index, first, call.read);
    cnorm_layer_ops_of(layer->kind)->run(&call);
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
    const ptrdiff_t rows = steps * tape->batch;
    if (cnorm_refused_token(tape->layers, tape->count, rows, x, inputs, NULL) < rows) return CNORM_ERROR_TOKEN;
    const float_mode mode = float_mode_enter();
    const tape_layer start = tape_layer_of(tape, 0, first);
    for (ptrdiff_t s = 0; s < rows; ++s) memcpy(start.at + s * start.row, x + s * inputs, (size_t)inputs * sizeof *x);
    ptrdiff_t offset = 0;
    for (int i = 0; i < tape->count; ++i) {
        const cnorm_layer *layer = &tape->layers[i];
        const layer_ops *ops = cnorm_layer_ops_of(layer->kind);
        float_rows to = {y, cnorm_layer_outputs(layer)};
        if (i + 1 < tape->count) {
            const tape_layer next = tape_layer_of(tape, i + 1, first);
            to = (float_rows){next.at, next.row};
        }
        if (ops->record)
            ops->record(&(layer_record){kernels, layer, tape_layer_of(tape, i, first), steps, tape->batch,
                                        state + offset, state_floats, scratch, to});
        else run_layer(kernels, tape, i, first, steps, scratch, to);
        offset += cnorm_layer_state_floats(layer);
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
        const ptrdiff_t rows = (end - first) * tape->batch, stats = tape_stats(&tape->layers[i]);
        memmove(to.at, from.at, (size_t)(rows * to.row) * sizeof(float));
        memmove(to.stats, from.stats, (size_t)(stats * rows) * sizeof(float));
    }
    return CNORM_OK;
}
