/* CNORM_LAYER_POSITIONS: a cell at each position of a frame [channels, positions]. Its operations are those of the
 * cell: on the positions of a frame as rows of several streams, whose states are the layer's, or steps of a sequence.
 * The cell's tape is in `stats`: a row for each position, in the order in which they are computed. */
#include <string.h>

#include "../../kernels/backward.h"
#include "cell.h"
#include "frames.h"

static const layer_option positions_options[] = {
    CELL_OPTIONS,
    LAYER_OPTION(positions, positions, OPTION_SIZE),
    LAYER_OPTION(positions, scan, OPTION_INT),
    LAYER_OPTION(positions, inputs, OPTION_SIZE),
    LAYER_OPTION(positions, outputs, OPTION_SIZE),
    {0},
};
_Static_assert(offsetof(cnorm_positions, cell) == 0, "the cell's options and fields are those of cnorm_cell");

static cnorm_layer cell_of(const cnorm_layer *layer)
{
    return (cnorm_layer){.kind = CNORM_LAYER_CELL, .as = {.cell = layer->as.positions.cell}};
}

static int scans(const cnorm_positions *is) { return is->scan != CNORM_SCAN_EACH; }

static const char *positions_check(const cnorm_layer *layer)
{
    const cnorm_positions *is = &layer->as.positions;
    const cnorm_layer cell = cell_of(layer);
    const char *found = cnorm_cell_ops.check(&cell);
    if (found) return found;
    const ptrdiff_t most = 1 << 24, inputs = cnorm_layer_inputs(&cell), outputs = cnorm_layer_outputs(&cell);
    if (inputs > most || cnorm_layer_state_floats(&cell) > most) return "weight_x";
    if (is->positions < 1 || is->positions > most / larger(inputs, cnorm_layer_state_floats(&cell))) return "positions";
    if (!between((int)is->scan, CNORM_SCAN_BACKWARD)) return "scan";
    if (is->inputs != inputs * is->positions) return "inputs";
    return is->outputs == outputs * is->positions ? NULL : "outputs";
}

/* [outputs, positions] and, for an LSTM, [units, positions]; none if the cell scans */
static ptrdiff_t positions_state(const cnorm_layer *layer, int k)
{
    const cnorm_layer cell = cell_of(layer);
    return scans(&layer->as.positions) ? 0 : cnorm_cell_ops.state(&cell, k) * layer->as.positions.positions;
}

/* ---- the positions of a frame as rows ------------------------------------------------------------------------- */

/* `rows` of positions, in the order in which they are computed */
static float_rows ordered(const cnorm_positions *is, float_rows rows)
{
    if (is->scan != CNORM_SCAN_BACKWARD) return rows;
    return (float_rows){rows.at + (is->positions - 1) * rows.stride, -rows.stride};
}

/* to rows [positions, channels] from a frame [channels, positions], or the other way */
static void to_rows(const cnorm_positions *is, ptrdiff_t channels, const float *frame, float_rows rows)
{
    cnorm_transpose(channels, is->positions, (const_rows){frame, is->positions}, ordered(is, rows));
}
static void to_frame(const cnorm_positions *is, ptrdiff_t channels, float_rows rows, float *frame)
{
    const float_rows from = ordered(is, rows);
    cnorm_transpose(is->positions, channels, (const_rows){from.at, from.stride}, (float_rows){frame, is->positions});
}

/* The states of the cells [positions, state floats of one] from the layer's, or back to it. Those of a scan begin at 0
 * and are not kept. */
static void load_states(const cnorm_layer *layer, const cnorm_layer *cell, const float *state, float *to)
{
    const cnorm_positions *is = &layer->as.positions;
    const ptrdiff_t floats = cnorm_layer_state_floats(cell);
    memset(to, 0, (size_t)((scans(is) ? 1 : is->positions) * floats) * sizeof *to);
    for (int k = 0; !scans(is) && k < LAYER_STATES; ++k) {
        const ptrdiff_t units = cnorm_cell_ops.state(cell, k);
        to_rows(is, units, state, (float_rows){to, floats});
        state += padded_units(positions_state(layer, k)), to += padded_units(units);
    }
}
static void store_states(const cnorm_layer *layer, const cnorm_layer *cell, float *from, float *state)
{
    const cnorm_positions *is = &layer->as.positions;
    for (int k = 0; !scans(is) && k < LAYER_STATES; ++k) {
        const ptrdiff_t units = cnorm_cell_ops.state(cell, k);
        to_frame(is, units, (float_rows){from, cnorm_layer_state_floats(cell)}, state);
        state += padded_units(positions_state(layer, k)), from += padded_units(units);
    }
}

/* With memory NULL only its size. */
typedef struct positions_scratch {
    float *x, *y;  /* [positions, channels], [positions, outputs] */
    float *states; /* [positions, state floats of the cell] */
    float *rest;   /* of the cell */
    ptrdiff_t floats;
} positions_scratch;

static positions_scratch positions_scratch_of(const cnorm_layer *layer, ptrdiff_t rest, float *memory)
{
    const ptrdiff_t item = (ptrdiff_t)sizeof(float), positions = layer->as.positions.positions;
    const cnorm_layer cell = cell_of(layer);
    layout l = {(char *)memory, 0};
    positions_scratch s;
    s.x = layout_take(&l, padded_units(positions * cnorm_layer_inputs(&cell)) * item);
    s.y = layout_take(&l, padded_units(positions * cnorm_layer_outputs(&cell)) * item);
    s.states = layout_take(&l, positions * cnorm_layer_state_floats(&cell) * item);
    s.rest = layout_take(&l, padded_units(rest) * item);
    s.floats = l.used / item;
    return s;
}

/* whether the kernel positions_step takes the frames that are not tiny */
static int steps_in_lanes(const cnorm_positions *is) { return !scans(is) && plain_cell(&is->cell); }

/* and whether cell_scan does */
static int scans_in_lanes(const cnorm_positions *is)
{
    return scans(is) && plain_cell(&is->cell) && is->cell.weight_x.units <= SCAN_UNITS;
}

/* whether cell_scan takes the layers side by side */
static int positions_beside(const cnorm_layer *layer, const cnorm_layer *other)
{
    const cnorm_positions *a = &layer->as.positions, *b = &other->as.positions;
    if (!scans_in_lanes(a) || !scans_in_lanes(b)) return 0;
    if (a->positions != b->positions || a->cell.weight_x.cols != b->cell.weight_x.cols) return 0;
    return a->cell.kind == b->cell.kind && !a->cell.keep == !b->cell.keep;
}

/* the positions that the cell computes together */
static ptrdiff_t together(const cnorm_positions *is) { return is->positions < CNORM_ROWS ? is->positions : CNORM_ROWS; }

static ptrdiff_t positions_scratch_floats(const cnorm_layer *layer, ptrdiff_t rows)
{
    (void)rows;
    if (positions_check(layer)) return 0;
    const cnorm_positions *is = &layer->as.positions;
    const cnorm_layer cell = cell_of(layer);
    ptrdiff_t rest = cnorm_layer_scratch(&cell, together(is)), lanes = 0;
    if (steps_in_lanes(is)) lanes = positions_arrays_of(&is->cell, is->positions, NULL).floats;
    if (scans_in_lanes(is)) rest = larger(rest, cell_scan_floats(&is->cell));
    return larger(positions_scratch_of(layer, rest, NULL).floats, lanes);
}

/* ---- forward -------------------------------------------------------------------------------------------------- */

/* the rows x of one frame from position `from` on through the cell, whose states are in scratch, to y */
static void run_cell(const layer_run *call, const cnorm_layer *cell, ptrdiff_t from, positions_scratch scratch)
{
    const cnorm_positions *is = &call->layer->as.positions;
    const ptrdiff_t inputs = cnorm_layer_inputs(cell), outputs = cnorm_layer_outputs(cell);
    float *states[CNORM_ROWS] = {scratch.states};
    for (ptrdiff_t p = from, n; p < is->positions; p += n) {
        n = is->positions - p < together(is) ? is->positions - p : together(is);
        for (ptrdiff_t i = 0; !scans(is) && i < n; ++i)
            states[i] = scratch.states + (p + i) * cnorm_layer_state_floats(cell);
        cnorm_cell_ops.run(&(layer_run){.kernels = call->kernels,
                                        .layer = cell,
                                        .n = n,
                                        .x = {scratch.x + p * inputs, inputs},
                                        .y = {scratch.y + p * outputs, outputs},
                                        .states = states,
                                        .steps = scans(is),
                                        .scratch = scratch.rest});
    }
}

/* What is left of a frame of a layer, as rows of positions. The state of a cell that does not scan is the layer's. */
static void run_rows(const layer_run *call, const cnorm_layer *layer, const cnorm_frame_scan *left)
{
    const cnorm_positions *is = &layer->as.positions;
    const cnorm_layer cell = cell_of(layer);
    const positions_scratch scratch = positions_scratch_of(layer, 0, call->scratch);
    const ptrdiff_t inputs = cnorm_layer_inputs(&cell), outputs = cnorm_layer_outputs(&cell);
    layer_run one = *call;
    one.layer = layer;
    to_rows(is, inputs, left->x, (float_rows){scratch.x, inputs});
    if (left->done > 0) {
        to_rows(is, outputs, left->y, (float_rows){scratch.y, outputs});
        memcpy(scratch.states, left->state, (size_t)cnorm_layer_state_floats(&cell) * sizeof *left->state);
    } else load_states(layer, &cell, left->state, scratch.states);
    run_cell(&one, &cell, left->done, scratch);
    store_states(layer, &cell, scratch.states, left->state);
    to_frame(is, outputs, (float_rows){scratch.y, outputs}, left->y);
}

/* a frame by the kernel for cells with a state each; false if it does not take it */
static int step_in_lanes(const layer_run *call, const cnorm_frame_scan *frame)
{
    const cnorm_positions *is = &call->layer->as.positions;
    const ptrdiff_t units = is->cell.weight_x.units;
    int tiny_x, tiny_h;
    if (!steps_in_lanes(is)) return 0;
    call->kernels->frame_is_tiny(is->cell.weight_x.cols, is->positions, frame->x, &tiny_x);
    call->kernels->frame_is_tiny(units, is->positions, frame->state, &tiny_h);
    if (tiny_x || tiny_h) return 0;
    const positions_arrays at = positions_arrays_of(&is->cell, is->positions, call->scratch);
    call->kernels->positions_step(&is->cell, is->positions, frame->x, frame->state,
                                  frame->state + padded_units(units * is->positions), frame->y, &at);
    return 1;
}

/* frames by the kernel for scans, as far as it takes them */
static void scan_in_lanes(const layer_run *call, int count, cnorm_frame_scan *scans)
{
    const cnorm_positions *is = &call->layer->as.positions;
    int tiny = !scans_in_lanes(is);
    for (int k = 0; k < count && !tiny; ++k)
        if (k == 0 || scans[k].x != scans[k - 1].x)
            call->kernels->frame_is_tiny(is->cell.weight_x.cols, is->positions, scans[k].x, &tiny);
    if (tiny) return;
    call->kernels->cell_scan(is->positions, count, scans, positions_scratch_of(call->layer, 0, call->scratch).rest);
}

static cnorm_frame_scan scan_of(const layer_beside *is, ptrdiff_t s, float *state)
{
    const cnorm_positions *layer = &is->layer->as.positions;
    return (cnorm_frame_scan){&layer->cell,
                              layer->scan == CNORM_SCAN_BACKWARD,
                              is->x.at + s * is->x.stride,
                              is->y.at + s * is->y.stride,
                              state,
                              0};
}

static void positions_run(const layer_run *call)
{
    const cnorm_positions *is = &call->layer->as.positions;
    const layer_beside first = {call->layer, call->x, call->y};
    const int count = 1 + call->others;
    for (ptrdiff_t s = 0; s < call->n; ++s) {
        _Alignas(CNORM_ALIGN) float states[SCANS][2 * SCAN_UNITS];
        cnorm_frame_scan frames[SCANS];
        frames[0] = scan_of(&first, s, scans(is) ? states[0] : call->states[call->steps ? 0 : s] + call->offset);
        for (int k = 1; k < count; ++k) frames[k] = scan_of(&call->beside[k - 1], s, states[k]);
        if (step_in_lanes(call, frames)) continue;
        scan_in_lanes(call, count, frames);
        for (int k = 0; k < count; ++k)
            if (frames[k].done < is->positions) run_rows(call, k ? call->beside[k - 1].layer : call->layer, frames + k);
    }
}

/* ---- the tape ------------------------------------------------------------------------------------------------- */

static ptrdiff_t positions_stats(const cnorm_layer *layer)
{
    const cnorm_layer cell = cell_of(layer);
    return layer->as.positions.positions * cnorm_layer_tape_row(&cell);
}

/* the cell's tape of row s of this layer's */
static tape_layer tape_of(const cnorm_layer *layer, const cnorm_layer *cell, tape_layer tape, ptrdiff_t s)
{
    return (tape_layer){cnorm_layer_tape_row(cell), tape.stats + s * positions_stats(layer), NULL};
}

static void positions_record(const layer_record *call)
{
    const cnorm_positions *is = &call->layer->as.positions;
    const cnorm_layer cell = cell_of(call->layer);
    const positions_scratch scratch = positions_scratch_of(call->layer, 0, call->scratch);
    const ptrdiff_t outputs = cnorm_layer_outputs(&cell), floats = cnorm_layer_state_floats(&cell);
    for (ptrdiff_t s = 0; s < call->steps * call->batch; ++s) {
        float *state = scans(is) ? NULL : call->state + s % call->batch * call->state_stride;
        const tape_layer tape = tape_of(call->layer, &cell, call->tape, s);
        to_rows(is, cnorm_layer_inputs(&cell), call->tape.at + s * call->tape.row, (float_rows){tape.at, tape.row});
        load_states(call->layer, &cell, state, scratch.states);
        cnorm_cell_ops.record(&(layer_record){.kernels = call->kernels,
                                              .layer = &cell,
                                              .tape = tape,
                                              .steps = scans(is) ? is->positions : 1,
                                              .batch = scans(is) ? 1 : is->positions,
                                              .state = scratch.states,
                                              .state_stride = floats,
                                              .scratch = scratch.rest,
                                              .y = {scratch.y, outputs}});
        store_states(call->layer, &cell, scratch.states, state);
        to_frame(is, outputs, (float_rows){scratch.y, outputs}, call->y.at + s * call->y.stride);
    }
}

/* ---- backward ------------------------------------------------------------------------------------------------- */

static int positions_trains(const cnorm_layer *layer)
{
    const cnorm_layer cell = cell_of(layer);
    return cnorm_cell_ops.trains(&cell);
}

/* scratch.x is dx, scratch.y dy, of one frame; behind them the sums of the cell, then what it needs */
static ptrdiff_t positions_backward_floats(const cnorm_layer *layer, ptrdiff_t rows)
{
    const cnorm_layer cell = cell_of(layer);
    const ptrdiff_t sums = padded_units(cnorm_cell_ops.sums_floats(&cell));
    return positions_scratch_of(layer, sums + cnorm_cell_ops.backward_floats(&cell, rows), NULL).floats;
}

/* the cell's backward pass over the positions of row s */
static void frame_backward(const layer_backward *call, const cnorm_layer *cell, ptrdiff_t s, positions_scratch scratch,
                           cnorm_sums *sums)
{
    const cnorm_positions *is = &call->layer->as.positions;
    const ptrdiff_t inputs = cnorm_layer_inputs(cell), outputs = cnorm_layer_outputs(cell);
    float *dstate = scans(is) ? NULL : call->dstate + s % call->batch * call->dstate_stride;
    to_rows(is, outputs, call->dy.at + s * call->dy.stride, (float_rows){scratch.y, outputs});
    load_states(call->layer, cell, dstate, scratch.states);
    cnorm_cell_ops.backward(&(layer_backward){.kernels = call->kernels,
                                              .layer = cell,
                                              .tape = tape_of(call->layer, cell, call->tape, s),
                                              .steps = scans(is) ? is->positions : 1,
                                              .batch = scans(is) ? 1 : is->positions,
                                              .dy = {scratch.y, outputs},
                                              .dx = {call->dx.at ? scratch.x : NULL, inputs},
                                              .sums = sums,
                                              .dstate = scratch.states,
                                              .dstate_stride = cnorm_layer_state_floats(cell),
                                              .scratch = scratch.rest});
    store_states(call->layer, cell, scratch.states, dstate);
    if (call->dx.at) to_frame(is, inputs, (float_rows){scratch.x, inputs}, call->dx.at + s * call->dx.stride);
}

static void positions_backward(const layer_backward *call)
{
    const cnorm_layer cell = cell_of(call->layer);
    const ptrdiff_t sums_floats = cnorm_cell_ops.sums_floats(&cell), rows = call->steps * call->batch;
    positions_scratch scratch = positions_scratch_of(call->layer, 0, call->scratch);
    cnorm_sums sums = {scratch.rest, 0};
    scratch.rest += padded_units(sums_floats);
    memset(sums.memory, 0, (size_t)sums_floats * sizeof(float));
    for (ptrdiff_t t = call->steps - 1; t >= 0; --t)
        for (ptrdiff_t b = 0; b < call->batch; ++b) frame_backward(call, &cell, t * call->batch + b, scratch, &sums);
    const tape_rows all = {call->tape.stats, cnorm_layer_tape_row(&cell), rows * call->layer->as.positions.positions, 0,
                           NULL};
    cnorm_cell_ops.sum(call->kernels, &cell, all, &sums, call->gradient, scratch.rest);
}

const layer_ops cnorm_positions_ops = {
    .name = "positions",
    .options = positions_options,
    .fields = cnorm_cell_fields,
    .inputs = LAYER_SIZE(positions, inputs),
    .outputs = LAYER_SIZE(positions, outputs),
    .check = positions_check,
    .state = positions_state,
    .state_names = {"h", "c"},
    .scratch = positions_scratch_floats,
    .run = positions_run,
    .beside = positions_beside,
    .stats = positions_stats,
    .trains = positions_trains,
    .record = positions_record,
    .backward_floats = positions_backward_floats,
    .backward = positions_backward,
};
