/* CNORM_LAYER_CELL: recurrent cells as cnorm_rnn.h defines them; the arithmetic of a step is in kernels/cell.inl.h. */
#include <math.h>
#include <string.h>

#include "../../kernels/backward.h"
#include "cell.h"

static ptrdiff_t cell_state(const cnorm_layer *layer, int k)
{
    const cnorm_cell *cell = &layer->as.cell;
    if (k == 0) return cell->weight_h.cols;
    return cell->kind == CNORM_CELL_LSTM ? cell->weight_x.units : 0;
}

/* ---- options and fields --------------------------------------------------------------------------------------- */

static vector_shape of_gates(const cnorm_layer *layer)
{
    const cnorm_matrix *w = &layer->as.cell.weight_x;
    return (vector_shape){w->gates, w->units, w->gates * padded_units(w->units)};
}
static vector_shape inside_gates(const cnorm_layer *layer)
{
    vector_shape shape = of_gates(layer);
    shape.floats += CNORM_GATE_PAD; /* as long as the rows of products that it is added to */
    return shape;
}
static vector_shape of_units(const cnorm_layer *layer)
{
    const ptrdiff_t units = layer->as.cell.weight_x.units;
    return (vector_shape){0, units, padded_units(units)};
}
static vector_shape exact_units(const cnorm_layer *layer)
{
    const ptrdiff_t units = layer->as.cell.weight_x.units;
    return (vector_shape){0, units, units};
}
static vector_shape of_outputs(const cnorm_layer *layer)
{
    const ptrdiff_t outputs = layer->as.cell.weight_h.cols;
    return (vector_shape){0, outputs, padded_units(outputs)};
}
static vector_shape gains_of_x(const cnorm_layer *layer)
{
    return layer->as.cell.scope == CNORM_SCOPE_SPLIT ? of_gates(layer) : (vector_shape){0, 0, 0};
}
static vector_shape gains_of_h(const cnorm_layer *layer)
{
    return layer->as.cell.scope != CNORM_SCOPE_NONE ? of_gates(layer) : (vector_shape){0, 0, 0};
}

static const layer_option cell_options[] = {CELL_OPTIONS, {0}};
const layer_field cnorm_cell_fields[] = {
    LAYER_FIELD(cell, weight_x, NULL),         LAYER_FIELD(cell, weight_h, NULL),
    LAYER_FIELD(cell, weight_n, NULL),         LAYER_FIELD(cell, weight_p, NULL),
    LAYER_FIELD(cell, inside_x, inside_gates), LAYER_FIELD(cell, inside_h, inside_gates),
    LAYER_FIELD(cell, gain_x, gains_of_x),     LAYER_FIELD(cell, gain_h, gains_of_h),
    LAYER_FIELD(cell, bias, of_gates),         LAYER_FIELD(cell, bias_n, of_units),
    LAYER_FIELD(cell, gain_c, exact_units),    LAYER_FIELD(cell, bias_c, exact_units),
    LAYER_FIELD(cell, bias_p, of_outputs),     {0},
};

/* the vectors, eps and groups that the scope needs, and no groups if there is no norm */
static const char *scope_check(const cnorm_cell *cell)
{
    const int normalised = cell->scope != CNORM_SCOPE_NONE;
    if (cell->scope == CNORM_SCOPE_SPLIT && !cell->gain_x) return "gain_x";
    if (normalised && !cell->gain_h) return "gain_h";
    if (normalised && !cnorm_usable_eps(cell->eps)) return "eps";
    if (normalised != (cell->weight_h.group > 0)) return "weight_h";
    if (normalised != (cell->weight_x.group > 0)) return "weight_x";
    if (cell->scope != CNORM_SCOPE_SUM) return NULL;
    if (cell->inside_h) return "inside_h";
    return cell->weight_x.group == cell->weight_h.group ? NULL : "weight_h";
}

/* whether a cell can have this function: its derivative at 0, the value of the padding, is finite */
static int usable_function(cnorm_activation f)
{
    if (f == CNORM_ACTIVATION_PRELU || f == CNORM_ACTIVATION_SOFTMAX) return 0;
    if (f == CNORM_ACTIVATION_LOG || f == CNORM_ACTIVATION_SQRT) return 0;
    return between((int)f, CNORM_ACTIVATIONS - 1);
}

static const char *functions_check(const cnorm_cell *cell)
{
    if (!usable_function(cell->activation)) return "activation";
    if (!usable_function(cell->recurrent_activation)) return "recurrent_activation";
    if (!isfinite(cell->alpha)) return "alpha";
    if (!isfinite(cell->beta)) return "beta";
    if (!isfinite(cell->recurrent_alpha)) return "recurrent_alpha";
    if (!isfinite(cell->recurrent_beta)) return "recurrent_beta";
    return cell->clip >= 0 ? NULL : "clip"; /* NaN is none */
}

static const char *lstm_check(const cnorm_cell *cell)
{
    const ptrdiff_t units = cell->weight_x.units, outputs = cell->weight_h.cols;
    if (!between((int)cell->cell_norm, CNORM_CELL_NORM_CARRY)) return "cell_norm";
    if (!(cell->cell_clip > 0)) return "cell_clip";
    if (cell->cell_norm != CNORM_CELL_NORM_NONE && !cnorm_usable_eps(cell->eps)) return "eps";
    if (!cell->weight_p.panels) return outputs == units ? NULL : "weight_p";
    if (!cnorm_usable_matrix(&cell->weight_p, 1, outputs, units) || cell->weight_p.group != 0) return "weight_p";
    return cell->projection_clip > 0 ? NULL : "projection_clip";
}

static const char *gru_check(const cnorm_cell *cell)
{
    const ptrdiff_t units = cell->weight_x.units;
    if (!between((int)cell->reset, CNORM_RESET_BEFORE)) return "reset";
    if (cell->weight_p.panels) return "weight_p";
    if (cell->reset == CNORM_RESET_AFTER && cell->scope == CNORM_SCOPE_SUM) return "scope";
    if (cell->reset != CNORM_RESET_BEFORE) return cell->weight_n.panels ? "weight_n" : NULL;
    if (cell->scope != CNORM_SCOPE_NONE) return "scope";
    return cnorm_usable_matrix(&cell->weight_n, 1, units, units) && cell->weight_n.group == 0 ? NULL : "weight_n";
}

static const char *cell_check(const cnorm_layer *layer)
{
    const cnorm_cell *cell = &layer->as.cell;
    if (!between((int)cell->kind, CNORM_CELL_RNN)) return "kind";
    if (!between((int)cell->scope, CNORM_SCOPE_SUM)) return "scope";
    const ptrdiff_t units = cell->weight_x.units, inputs = cell->weight_x.cols;
    const int lstm = cell->kind == CNORM_CELL_LSTM, gru = cell->kind == CNORM_CELL_GRU;
    const ptrdiff_t gates = lstm ? LSTM_GATES : gru ? GRU_GATES : 1;
    const ptrdiff_t of_h = gru && cell->reset == CNORM_RESET_BEFORE ? gates - 1 : gates;
    if (!cnorm_usable_matrix(&cell->weight_x, gates, units, inputs)) return "weight_x";
    if (!cnorm_usable_matrix(&cell->weight_h, of_h, units, lstm ? cell->weight_h.cols : units)) return "weight_h";
    if (!cell->bias) return "bias";
    if (!(cell->zoneout >= 0 && cell->zoneout <= 1)) return "zoneout";
    const char *found = scope_check(cell);
    if (!found) found = functions_check(cell);
    if (found) return found;
    if (gru) return gru_check(cell);
    if (cell->weight_n.panels) return "weight_n";
    if (lstm) return lstm_check(cell);
    return cell->weight_p.panels ? "weight_p" : NULL;
}

/* ---- forward -------------------------------------------------------------------------------------------------- */

/* the products of x, then the scratch of cell_step or of the products */
static ptrdiff_t cell_scratch_floats(const cnorm_layer *layer, ptrdiff_t rows)
{
    const cnorm_cell *cell = &layer->as.cell;
    return rows * input_row_floats(cell) +
           larger(cell_scratch(cell, rows, NULL).floats, product_scratch_floats(&cell->weight_x, rows));
}

static void cell_run(const layer_run *call)
{
    const cnorm_kernels *kernels = call->kernels;
    const cnorm_cell *cell = &call->layer->as.cell;
    const ptrdiff_t n = call->n, row = input_row_floats(cell), outputs = cell->weight_h.cols;
    const const_rows x = call->x;
    const float_rows y = call->y;
    float *zx = call->scratch, *step_scratch = zx + n * row;
    kernels->cell_inputs(cell, n, x.at, x.stride, zx, row, step_scratch);
    cnorm_cell_scratch at = cell_scratch(cell, call->steps ? 1 : n, step_scratch);
    at.zx = zx;
    /* Every other step begins with the weights that the one before has read last: 4 to 27 % less time of a sequence,
     * but 11 % more where they come from memory (1024 -> 1024, Zen 4). */
    const int turns = cnorm_matrix_bytes(&cell->weight_h) <= (4 << 20);
    float *state[CNORM_ROWS];
    for (ptrdiff_t s = 0; s < n; ++s) state[s] = call->states[call->steps ? 0 : s] + call->offset;
    if (!call->steps) kernels->cell_step(cell, n, x.at, x.stride, state, &at);
    for (ptrdiff_t s = 0; s < n; ++s, at.zx += row) {
        at.backwards = turns && s & 1;
        if (call->steps) kernels->cell_step(cell, 1, x.at + s * x.stride, x.stride, state, &at);
        memcpy(y.at + s * y.stride, state[s], (size_t)outputs * sizeof(float));
    }
}

static ptrdiff_t cell_tape_row(const cnorm_layer *layer) { return tape_row_of(&layer->as.cell).floats; }

static int cell_trains(const cnorm_layer *layer)
{
    const cnorm_cell *cell = &layer->as.cell;
    return cell->weight_x.type == CNORM_WEIGHT_F32 && cell->weight_h.type == CNORM_WEIGHT_F32 &&
           cell->weight_n.type == CNORM_WEIGHT_F32 && cell->weight_p.type == CNORM_WEIGHT_F32;
}

static void copy_rows(ptrdiff_t n, ptrdiff_t floats, const float *from, ptrdiff_t from_stride, float *to,
                      ptrdiff_t stride)
{
    for (ptrdiff_t s = 0; s < n; ++s) memcpy(to + s * stride, from + s * from_stride, (size_t)floats * sizeof *to);
}

/* One step of n rows that begin at `at` on the tape, where their zx are. Records their state before the step, the
 * products and an LSTM's gates. */
static void record_step(const layer_record *call, ptrdiff_t n, float *at, float *const *state, float *scratch)
{
    const cnorm_cell *cell = &call->layer->as.cell;
    const tape_row row = tape_row_of(cell);
    const ptrdiff_t width = padded_units(cell->weight_x.units), second_row = row.in2 - row.z2;
    cnorm_cell_scratch to = cell_scratch(cell, n, scratch);
    to.zx = at + row.zx, to.gates = at + row.gates;
    to.zx_stride = to.gates_stride = row.floats;
    if (row.zh != row.zx) to.zh = at + row.zh, to.zh_stride = row.floats;
    for (ptrdiff_t s = 0; s < n; ++s) copy_rows(1, row.zx - row.state, state[s], 0, at + s * row.floats + row.state, 0);
    call->kernels->cell_step(cell, n, at + row.x, row.floats, state, &to);
    if (second_row == 0) return;
    copy_rows(n, second_row, to.z2, second_row, at + row.z2, row.floats);
    copy_rows(n, width, to.in2, width, at + row.in2, row.floats);
}

/* The products of x are computed CNORM_ROWS rows at a time, of several steps if the batch is small. */
static void cell_record(const layer_record *call)
{
    const cnorm_cell *cell = &call->layer->as.cell;
    const tape_row at_row = tape_row_of(cell);
    const ptrdiff_t row = at_row.floats, batch = call->batch;
    const ptrdiff_t together = batch < CNORM_ROWS ? CNORM_ROWS / batch : 1;
    float *states[CNORM_ROWS];
    for (ptrdiff_t t = 0; t < call->steps; t += together) {
        const ptrdiff_t g = call->steps - t < together ? call->steps - t : together;
        for (ptrdiff_t b = 0; b < batch; b += CNORM_ROWS) {
            const ptrdiff_t n = batch - b < CNORM_ROWS ? batch - b : CNORM_ROWS;
            float *at = call->tape.at + (t * batch + b) * row;
            call->kernels->cell_inputs(cell, g * n, at + at_row.x, row, at + at_row.zx, row, call->scratch);
            for (ptrdiff_t s = 0; s < n; ++s) states[s] = call->state + (b + s) * call->state_stride;
            for (ptrdiff_t i = 0; i < g; ++i) {
                record_step(call, n, at + i * n * row, states, call->scratch);
                for (ptrdiff_t s = 0; s < n; ++s)
                    copy_rows(1, cell->weight_h.cols, states[s], 0,
                              call->y.at + ((t + i) * batch + b + s) * call->y.stride, 0);
            }
        }
    }
}

/* ---- backward ------------------------------------------------------------------------------------------------- */

/* With memory NULL only its size. */
typedef struct backward_scratch {
    float *sums; /* [cell_sums_floats] */
    float *rest; /* of the kernels, which are called in turn */
    ptrdiff_t floats;
} backward_scratch;

static backward_scratch backward_scratch_of(const cnorm_cell *cell, float *memory)
{
    const ptrdiff_t item = (ptrdiff_t)sizeof(float), vectors = vector_sums_of(cell).floats * item;
    ptrdiff_t rest = larger(cell_backward_scratch_of(cell, NULL).floats, outer_floats(&cell->weight_x));
    rest = larger(rest, outer_floats(&cell->weight_h));
    rest = larger(rest, larger(outer_floats(&cell->weight_n), outer_floats(&cell->weight_p)));
    layout l = {(char *)memory, 0};
    backward_scratch s;
    s.sums = layout_take(&l, 2 * vectors);
    s.rest = layout_take(&l, rest * item);
    s.floats = l.used / item;
    return s;
}

static ptrdiff_t cell_backward_floats(const cnorm_layer *layer, ptrdiff_t rows)
{
    (void)rows;
    return backward_scratch_of(&layer->as.cell, NULL).floats;
}

/* sums->memory: the gradients of the vectors, then those of the SUM_ROWS rows that are not added yet: vector_sums */
static ptrdiff_t cell_sums_floats(const cnorm_layer *layer) { return 2 * vector_sums_of(&layer->as.cell).floats; }

/* All steps, without dx and the gradients of matrices, which are computed afterwards for all steps at once. */
static void cell_steps_backward(const layer_backward *call, cnorm_sums *sums, float *scratch)
{
    const cnorm_cell *cell = &call->layer->as.cell;
    const tape_row at = tape_row_of(cell);
    const ptrdiff_t outputs = cell->weight_h.cols, batch = call->batch, floats = vector_sums_of(cell).floats,
                    row = at.floats;
    float *total = sums->memory, *block = total + floats;
    for (ptrdiff_t t = call->steps - 1; t >= 0; --t) {
        float *tape = call->tape.at + t * batch * row;
        for (ptrdiff_t b = 0, n; b < batch; b += n) {
            n = batch - b < SUM_ROWS - sums->rows ? batch - b : SUM_ROWS - sums->rows;
            float *dh = call->dstate + b * call->dstate_stride;
            for (ptrdiff_t s = 0; s < n; ++s)
                call->kernels->add_f32(outputs, dh + s * call->dstate_stride,
                                       call->dy.at + (t * batch + b + s) * call->dy.stride);
            call->kernels->cell_backward(&(struct cnorm_cell_backward){.cell = cell,
                                                                       .n = n,
                                                                       .tape = tape + b * row,
                                                                       .stride = row,
                                                                       .row = at,
                                                                       .dh = dh,
                                                                       .dc = dh + padded_units(outputs),
                                                                       .dstate_stride = call->dstate_stride,
                                                                       .sums = block,
                                                                       .scratch = scratch});
            sums->rows += n;
            if (sums->rows == SUM_ROWS) {
                cnorm_add_block(call->kernels, floats, total, block);
                sums->rows = 0;
            }
        }
        /* all rows at once, so that the weights are read once */
        call->kernels->products_backward(&cell->weight_h, batch, tape + at.zh, row, call->dstate, call->dstate_stride,
                                         1);
    }
}

static void vector_gradients(const cnorm_cell *cell, const float *total, const struct cnorm_cell_gradient *to)
{
    const vector_sums at = vector_sums_of(cell);
    const ptrdiff_t width = padded_units(cell->weight_x.units), gates = cell->weight_x.gates * width;
    cnorm_copy_gradient(to->bias, total + at.bias, gates);
    cnorm_copy_gradient(to->gain_x, total + at.gain_x, gates);
    cnorm_copy_gradient(to->gain_h, total + at.gain_h, gates);
    cnorm_copy_gradient(to->inside_x, total + at.inside_x, gates);
    cnorm_copy_gradient(to->inside_h, total + at.inside_h, gates);
    cnorm_copy_gradient(to->bias_n, total + at.bias_n, width);
    cnorm_copy_gradient(to->gain_c, total + at.gain_c, width);
    cnorm_copy_gradient(to->bias_c, total + at.bias_c, width);
    cnorm_copy_gradient(to->bias_p, total + at.bias_p, padded_units(cell->weight_h.cols));
}

/* The gradients of the weights from `sums` and from the rows that the backward pass of the steps left. */
static void cell_sum(const cnorm_kernels *kernels, const cnorm_layer *layer, tape_rows rows, cnorm_sums *sums,
                     const cnorm_gradient *gradient, float *scratch)
{
    const cnorm_cell *cell = &layer->as.cell;
    const struct cnorm_cell_gradient *to = &gradient->cell;
    const tape_row row = tape_row_of(cell);
    const ptrdiff_t floats = vector_sums_of(cell).floats;
    float *rest = backward_scratch_of(cell, scratch).rest;
    if (sums->rows > 0) cnorm_add_block(kernels, floats, sums->memory, sums->memory + floats);
    sums->rows = 0;
    cnorm_weight_backward(kernels, &cell->weight_x, rows, row.zx, row.x, rest, to->weight_x);
    cnorm_weight_backward(kernels, &cell->weight_h, rows, row.zh, row.state, rest, to->weight_h);
    cnorm_weight_backward(kernels, &cell->weight_n, rows, row.z2, row.in2, rest, to->weight_n);
    cnorm_weight_backward(kernels, &cell->weight_p, rows, row.z2, row.in2, rest, to->weight_p);
    vector_gradients(cell, sums->memory, to);
}

static void cell_backward_steps(const layer_backward *call)
{
    const cnorm_cell *cell = &call->layer->as.cell;
    const backward_scratch scratch = backward_scratch_of(cell, call->scratch);
    const tape_row row = tape_row_of(cell);
    const ptrdiff_t rows = call->steps * call->batch;
    cnorm_sums own = {scratch.sums, 0}, *sums = call->sums ? call->sums : &own;
    if (!call->sums) memset(own.memory, 0, (size_t)cell_sums_floats(call->layer) * sizeof(float));
    cell_steps_backward(call, sums, scratch.rest);
    if (!call->sums)
        cell_sum(call->kernels, call->layer, (tape_rows){call->tape.at, row.floats, rows, 0, NULL}, sums,
                 call->gradient, call->scratch);
    if (call->dx.at)
        call->kernels->products_backward(&cell->weight_x, rows, call->tape.at + row.zx, row.floats, call->dx.at,
                                         call->dx.stride, 0);
}

const layer_ops cnorm_cell_ops = {
    .name = "cell",
    .options = cell_options,
    .fields = cnorm_cell_fields,
    .inputs = LAYER_SIZE(cell, weight_x.cols),
    .outputs = LAYER_SIZE(cell, weight_h.cols),
    .check = cell_check,
    .state = cell_state,
    .state_names = {"h", "c"},
    .scratch = cell_scratch_floats,
    .run = cell_run,
    .tape_row = cell_tape_row,
    .trains = cell_trains,
    .record = cell_record,
    .backward_floats = cell_backward_floats,
    .backward = cell_backward_steps,
    .sums_floats = cell_sums_floats,
    .sum = cell_sum,
};
