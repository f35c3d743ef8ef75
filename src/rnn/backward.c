/* The backward pass: layers from the last to the first, and for a cell steps from the last to the first. The gradient
 * of a layer's input overwrites that input on the tape; it is the dy of the layer before. */
#include <string.h>

#include "../dispatch.h"
#include "../float_mode.h"
#include "rows.h"
#include "tape.h"

/* The scratch of one layer, for `rows` rows. With memory NULL only its size. */
typedef struct backward_scratch {
    float *total; /* the gradients of its vectors; of a norm dgain */
    float *block; /* directly behind it, those of SUM_ROWS rows; of a norm dbias */
    float *rest;  /* of the kernels, which are called in turn */
    ptrdiff_t floats;
} backward_scratch;

static backward_scratch backward_scratch_of(const cnorm_layer *layer, ptrdiff_t rows, float *memory)
{
    ptrdiff_t vectors = 0, rest = 0;
    if (layer->kind == CNORM_LAYER_LINEAR) {
        const cnorm_matrix *w = &layer->as.linear.weight;
        vectors = padded_units(w->units);
        rest = larger(outer_floats(w), CNORM_ROWS * packed_rows(w));
    } else if (layer->kind == CNORM_LAYER_NORM) {
        vectors = padded_units(layer->as.norm.n);
        rest = cnorm_backward_partials(CNORM_F32, rows, layer->as.norm.n) / (ptrdiff_t)sizeof(float);
    } else if (layer->kind == CNORM_LAYER_CELL) {
        const cnorm_cell *cell = &layer->as.cell;
        vectors = vector_sums_of(cell).floats;
        rest = larger(cell_backward_scratch_of(cell, NULL).floats, outer_floats(&cell->weight_x));
        rest = larger(rest, outer_floats(&cell->weight_h));
        rest = larger(rest, larger(outer_floats(&cell->weight_n), outer_floats(&cell->weight_p)));
    }
    layout l = {(char *)memory, 0};
    backward_scratch s;
    s.total = layout_take(&l, vectors * (ptrdiff_t)sizeof(float));
    s.block = layout_take(&l, vectors * (ptrdiff_t)sizeof(float));
    s.rest = layout_take(&l, rest * (ptrdiff_t)sizeof(float));
    s.floats = l.used / (ptrdiff_t)sizeof(float);
    return s;
}

ptrdiff_t cnorm_backward_floats(const cnorm_tape *tape)
{
    ptrdiff_t largest = 0;
    for (int i = 0; i < tape->count; ++i)
        largest = larger(largest, backward_scratch_of(&tape->layers[i], tape->steps * tape->batch, NULL).floats);
    return largest;
}

typedef struct layer_backward {
    const cnorm_kernels *kernels;
    const cnorm_layer *layer;
    tape_layer tape;
    ptrdiff_t steps, batch;
    const float *dy;
    ptrdiff_t dy_stride;
    float_rows dx; /* at is NULL if the caller does not want it */
    const cnorm_gradient *gradient;
    float *dstate; /* of this layer */
    ptrdiff_t dstate_stride;
    cnorm_sums *sums;
    float *scratch;
} layer_backward;

/* Rows of a layer, `left` of them from `at` on, then those of `tapes` [count], which have this layer alone. */
typedef struct tape_rows {
    const float *at;
    ptrdiff_t stride, left, count;
    const cnorm_tape *const *tapes;
} tape_rows;

/* the addresses of the next rows, at most OUTER_ROWS; returns their number */
static ptrdiff_t next_rows(tape_rows *rows, const float **to)
{
    ptrdiff_t n = 0;
    while (n < OUTER_ROWS && (rows->left > 0 || rows->count > 0)) {
        if (rows->left == 0) {
            const cnorm_tape *tape = *rows->tapes++;
            rows->at = tape->memory;
            rows->left = tape->steps * tape->batch;
            --rows->count;
        }
        to[n++] = rows->at;
        rows->at += rows->stride;
        --rows->left;
    }
    return n;
}

/* dw [gates * units, cols] = sum over the rows of dz x^T, which lie at these offsets; scratch [outer_floats] */
static void weight_backward(const cnorm_kernels *kernels, const cnorm_matrix *w, tape_rows rows, ptrdiff_t dz,
                            ptrdiff_t x, float *scratch, float *dw)
{
    const float *dzs[OUTER_ROWS], *xs[OUTER_ROWS];
    if (!dw || !w->panels) return;
    int onto = 0;
    for (ptrdiff_t n; (n = next_rows(&rows, xs)) > 0; onto = 1) {
        for (ptrdiff_t i = 0; i < n; ++i) dzs[i] = xs[i] + dz, xs[i] += x;
        kernels->outer_products(
            &(cnorm_outer){.w = w, .n = n, .dz = dzs, .x = xs, .dw = dw, .onto = onto, .scratch = scratch});
    }
}

/* to [n] += from [n]; then from [n] = 0 */
static void add_block(const cnorm_kernels *kernels, ptrdiff_t n, float *to, float *from)
{
    kernels->add_f32(n, to, from);
    memset(from, 0, (size_t)n * sizeof *from);
}

static void linear_weight_backward(const layer_backward *call, float *scratch)
{
    const float *dz[OUTER_ROWS], *x[OUTER_ROWS];
    const ptrdiff_t rows = call->steps * call->batch;
    if (!call->gradient->weight_x) return;
    for (ptrdiff_t s = 0, n; s < rows; s += n) {
        n = rows - s < OUTER_ROWS ? rows - s : OUTER_ROWS;
        for (ptrdiff_t i = 0; i < n; ++i) {
            dz[i] = call->dy + (s + i) * call->dy_stride;
            x[i] = call->tape.at + (s + i) * call->tape.row.floats;
        }
        call->kernels->outer_products(&(cnorm_outer){.w = &call->layer->as.linear.weight,
                                                     .n = n,
                                                     .dz = dz,
                                                     .x = x,
                                                     .dw = call->gradient->weight_x,
                                                     .onto = s > 0,
                                                     .scratch = scratch});
    }
}

static void linear_backward(const layer_backward *call)
{
    const cnorm_linear *linear = &call->layer->as.linear;
    const cnorm_matrix *w = &linear->weight;
    const ptrdiff_t rows = call->steps * call->batch, units = w->units, length = packed_rows(w);
    const backward_scratch scratch = backward_scratch_of(call->layer, rows, call->scratch);
    memset(scratch.total, 0, (size_t)units * sizeof *scratch.total);
    memset(scratch.block, 0, (size_t)units * sizeof *scratch.block);
    for (ptrdiff_t s = 0; s < rows; ++s) {
        call->kernels->add_f32(units, scratch.block, call->dy + s * call->dy_stride);
        if ((s + 1) % SUM_ROWS == 0 || s + 1 == rows) add_block(call->kernels, units, scratch.total, scratch.block);
    }
    if (call->gradient->bias) memcpy(call->gradient->bias, scratch.total, (size_t)units * sizeof *scratch.total);
    linear_weight_backward(call, scratch.rest);
    if (!call->dx.at) return;
    memset(scratch.rest, 0, (size_t)(CNORM_ROWS * length) * sizeof *scratch.rest);
    for (ptrdiff_t s = 0; s < rows; s += CNORM_ROWS) {
        const ptrdiff_t n = rows - s < CNORM_ROWS ? rows - s : CNORM_ROWS;
        for (ptrdiff_t i = 0; i < n; ++i)
            memcpy(scratch.rest + i * length, call->dy + (s + i) * call->dy_stride,
                   (size_t)units * sizeof *scratch.rest);
        call->kernels->products_backward(w, n, scratch.rest, length, call->dx.at + s * call->dx.stride, call->dx.stride,
                                         0);
    }
}

static void row_norm_backward(const layer_backward *call)
{
    const cnorm_row_norm *norm = &call->layer->as.norm;
    const ptrdiff_t n = norm->n, rows = call->steps * call->batch;
    const backward_scratch scratch = backward_scratch_of(call->layer, rows, call->scratch);
    float *dgain = scratch.total, *dbias = scratch.block;
    const float_rows dx = call->dx.at ? call->dx : (float_rows){call->tape.at, call->tape.row.floats};
    (void)cnorm_layer_norm_backward(CNORM_F32, rows, n, call->dy, call->dy_stride, call->tape.at, call->tape.row.floats,
                                    norm->gain, call->tape.stats, dx.at, dx.stride, dgain, dbias, scratch.rest);
    if (call->gradient->gain_h) memcpy(call->gradient->gain_h, dgain, (size_t)n * sizeof *dgain);
    if (call->gradient->bias) memcpy(call->gradient->bias, dbias, (size_t)n * sizeof *dbias);
}

/* All steps of a cell, without dx and the gradients of matrices, which are computed afterwards for all steps at once.
 * The gradients of its vectors are added to sums. */
static void cell_steps_backward(const layer_backward *call, cnorm_sums *sums, float *scratch)
{
    const cnorm_cell *cell = &call->layer->as.cell;
    const ptrdiff_t outputs = cell->weight_h.cols, batch = call->batch, floats = vector_sums_of(cell).floats,
                    row = call->tape.row.floats;
    float *total = sums->memory, *block = total + floats;
    for (ptrdiff_t t = call->steps - 1; t >= 0; --t) {
        float *tape = call->tape.at + t * batch * row;
        for (ptrdiff_t b = 0, n; b < batch; b += n) {
            n = batch - b < SUM_ROWS - sums->rows ? batch - b : SUM_ROWS - sums->rows;
            float *dh = call->dstate + b * call->dstate_stride;
            for (ptrdiff_t s = 0; s < n; ++s)
                call->kernels->add_f32(outputs, dh + s * call->dstate_stride,
                                       call->dy + (t * batch + b + s) * call->dy_stride);
            call->kernels->cell_backward(&(struct cnorm_cell_backward){.cell = cell,
                                                                       .n = n,
                                                                       .tape = tape + b * row,
                                                                       .stride = row,
                                                                       .row = call->tape.row,
                                                                       .dh = dh,
                                                                       .dc = dh + padded_units(outputs),
                                                                       .dstate_stride = call->dstate_stride,
                                                                       .sums = block,
                                                                       .scratch = scratch});
            sums->rows += n;
            if (sums->rows == SUM_ROWS) {
                add_block(call->kernels, floats, total, block);
                sums->rows = 0;
            }
        }
        /* all rows at once, so that the weights are read once */
        call->kernels->products_backward(&cell->weight_h, batch, tape + call->tape.row.zh, row, call->dstate,
                                         call->dstate_stride, 1);
    }
}

/* copies a gradient [n] to the caller's array, if there is one */
static void copy_gradient(float *to, const float *from, ptrdiff_t n)
{
    if (to) memcpy(to, from, (size_t)n * sizeof *to);
}

/* The gradients of a cell's weights from `sums` and from the rows that the backward pass of the steps left. */
static void cell_gradients(const cnorm_kernels *kernels, const cnorm_layer *layer, tape_rows rows, cnorm_sums *sums,
                           const cnorm_gradient *to, float *scratch)
{
    const cnorm_cell *cell = &layer->as.cell;
    const vector_sums at = vector_sums_of(cell);
    const tape_row row = tape_row_of(layer);
    const ptrdiff_t width = padded_units(cell->weight_x.units), gates = cell->weight_x.gates * width;
    float *total = sums->memory;
    if (sums->rows > 0) add_block(kernels, at.floats, total, total + at.floats);
    sums->rows = 0;
    weight_backward(kernels, &cell->weight_x, rows, row.zx, row.x, scratch, to->weight_x);
    weight_backward(kernels, &cell->weight_h, rows, row.zh, row.state, scratch, to->weight_h);
    weight_backward(kernels, &cell->weight_n, rows, row.z2, row.in2, scratch, to->weight_n);
    weight_backward(kernels, &cell->weight_p, rows, row.z2, row.in2, scratch, to->weight_p);
    copy_gradient(to->bias, total + at.bias, gates);
    copy_gradient(to->gain_x, total + at.gain_x, gates);
    copy_gradient(to->gain_h, total + at.gain_h, gates);
    copy_gradient(to->inside_x, total + at.inside_x, gates);
    copy_gradient(to->inside_h, total + at.inside_h, gates);
    copy_gradient(to->bias_n, total + at.bias_n, width);
    copy_gradient(to->gain_c, total + at.gain_c, width);
    copy_gradient(to->bias_c, total + at.bias_c, width);
    copy_gradient(to->bias_p, total + at.bias_p, padded_units(cell->weight_h.cols));
}

static void run_cell_backward(const layer_backward *call)
{
    const cnorm_cell *cell = &call->layer->as.cell;
    const tape_row row = call->tape.row;
    const ptrdiff_t rows = call->steps * call->batch;
    const backward_scratch scratch = backward_scratch_of(call->layer, rows, call->scratch);
    cnorm_sums own = {scratch.total, 0}, *sums = call->sums ? call->sums : &own;
    if (!call->sums) memset(own.memory, 0, 2 * (size_t)vector_sums_of(cell).floats * sizeof(float));
    cell_steps_backward(call, sums, scratch.rest);
    if (!call->sums)
        cell_gradients(call->kernels, call->layer, (tape_rows){call->tape.at, row.floats, rows, 0, NULL}, sums,
                       call->gradient, scratch.rest);
    if (call->dx.at)
        call->kernels->products_backward(&cell->weight_x, rows, call->tape.at + row.zx, row.floats, call->dx.at,
                                         call->dx.stride, 0);
}

static void layer_backward_pass(const layer_backward *call)
{
    const ptrdiff_t rows = call->steps * call->batch, n = cnorm_layer_inputs(call->layer);
    switch (call->layer->kind) {
    case CNORM_LAYER_LINEAR: linear_backward(call); return;
    case CNORM_LAYER_CELL: run_cell_backward(call); return;
    case CNORM_LAYER_NORM: row_norm_backward(call); return;
    case CNORM_LAYER_ACTIVATION:
        for (ptrdiff_t s = 0; call->dx.at && s < rows; ++s)
            call->kernels->activation_backward_f32(call->layer->as.activation.f, n,
                                                   call->tape.at + s * call->tape.row.floats,
                                                   call->dy + s * call->dy_stride, call->dx.at + s * call->dx.stride);
        return;
    case CNORM_LAYER_RESIDUAL:
        for (ptrdiff_t s = 0; s < rows; ++s)
            memmove(call->dx.at + s * call->dx.stride, call->dy + s * call->dy_stride, (size_t)n * sizeof(float));
    }
}

/* dx += the gradients that residual layers pass to the input of layer `index`, which are still on the tape */
static void add_residuals(const layer_backward *call, const cnorm_tape *tape, int index, ptrdiff_t first)
{
    for (int i = index + 1; i < tape->count; ++i) {
        const cnorm_layer *layer = &tape->layers[i];
        if (layer->kind != CNORM_LAYER_RESIDUAL || i - layer->as.residual.back != index) continue;
        const tape_layer from = tape_layer_of(tape, i, first);
        for (ptrdiff_t s = 0; call->dx.at && s < call->steps * call->batch; ++s)
            call->kernels->add_f32(layer->as.residual.n, call->dx.at + s * call->dx.stride,
                                   from.at + s * from.row.floats);
    }
}

cnorm_status cnorm_run_backward(const cnorm_tape *tape, const cnorm_backward *call)
{
    const cnorm_kernels *kernels = cnorm_active();
    if (!kernels) return CNORM_ERROR_ISA;
    if (!call || !call->dy || (!call->gradients && !call->sums) || !call->scratch) return CNORM_ERROR_NULL;
    const cnorm_status status = tape_check(tape, call->first, call->steps);
    if (status != CNORM_OK) return status;
    const ptrdiff_t state_floats = cnorm_state_floats(tape->layers, tape->count);
    if (state_floats > 0 && !call->dstate) return CNORM_ERROR_NULL;
    if (call->sums && cnorm_sums_floats(tape->layers, tape->count) == 0) return CNORM_ERROR_LAYER;
    const float_mode mode = float_mode_enter();
    ptrdiff_t offset = state_floats;
    const float *dy = call->dy;
    ptrdiff_t dy_stride = cnorm_layer_outputs(&tape->layers[tape->count - 1]);
    for (int i = tape->count - 1; i >= 0; --i) {
        const cnorm_layer *layer = &tape->layers[i];
        const tape_layer here = tape_layer_of(tape, i, call->first);
        offset -= cnorm_layer_state_floats(layer);
        const float_rows dx =
            i > 0 ? (float_rows){here.at, here.row.floats} : (float_rows){call->dx, cnorm_layer_inputs(layer)};
        const layer_backward one = {.kernels = kernels,
                                    .layer = layer,
                                    .tape = here,
                                    .steps = call->steps,
                                    .batch = tape->batch,
                                    .dy = dy,
                                    .dy_stride = dy_stride,
                                    .dx = dx,
                                    .gradient = call->sums ? NULL : &call->gradients[i],
                                    .dstate = call->dstate ? call->dstate + offset : NULL,
                                    .dstate_stride = state_floats,
                                    .sums = call->sums,
                                    .scratch = call->scratch};
        layer_backward_pass(&one);
        add_residuals(&one, tape, i, call->first);
        dy = here.at;
        dy_stride = here.row.floats;
    }
    float_mode_leave(mode);
    return CNORM_OK;
}

ptrdiff_t cnorm_sums_floats(const cnorm_layer *layers, int count)
{
    return count == 1 && layers[0].kind == CNORM_LAYER_CELL ? 2 * vector_sums_of(&layers[0].as.cell).floats : 0;
}

cnorm_status cnorm_sum_gradients(const cnorm_tape *const *tapes, ptrdiff_t count, cnorm_sums *sums,
                                 const cnorm_gradient *gradient, float *scratch)
{
    const cnorm_kernels *kernels = cnorm_active();
    if (!kernels) return CNORM_ERROR_ISA;
    if (!tapes || !sums || !sums->memory || !gradient || !scratch) return CNORM_ERROR_NULL;
    if (count < 1) return CNORM_ERROR_SIZE;
    for (ptrdiff_t i = 0; i < count; ++i) {
        const cnorm_status status = tape_check(tapes[i], 0, 1);
        if (status != CNORM_OK) return status;
        if (tapes[i]->layers != tapes[0]->layers || cnorm_sums_floats(tapes[i]->layers, tapes[i]->count) == 0)
            return CNORM_ERROR_LAYER;
    }
    const cnorm_layer *layer = tapes[0]->layers;
    const float_mode mode = float_mode_enter();
    cell_gradients(kernels, layer, (tape_rows){NULL, tape_row_of(layer).floats, 0, count, tapes}, sums, gradient,
                   backward_scratch_of(layer, 1, scratch).rest);
    float_mode_leave(mode);
    return CNORM_OK;
}
