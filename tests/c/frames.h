/* Random lists of the layers of frames [channels, positions]: frames of earlier steps, axes in another order, transposed
 * convolutions with a matrix and depthwise, a pool, and cells at each position and scanned over them. */
#ifndef FRAMES_H
#define FRAMES_H

#include "network.h"

enum { FRAME_LAYERS = 7, FRAME_ROWS = 5, FRAME_UNITS = 5, FRAME_OUTPUTS = 3 };

typedef struct frame_stack {
    ptrdiff_t inputs, outputs;
    int count; /* of the layers */
    network pool; /* owns the memory, and has the type of the matrices */
    cnorm_layer layers[FRAME_LAYERS];
    float *state, *scratch;
} frame_stack;

/* a cell without norms, [channels] -> [units], at `positions` */
static inline cnorm_layer frame_cell(network *p, allocator *memory, cnorm_positions is, ptrdiff_t channels,
                                     ptrdiff_t units, uint64_t *seed)
{
    const ptrdiff_t gates = is.cell.kind == CNORM_CELL_LSTM ? 4 : 3, width = cnorm_padded_units(units);
    float *const bias = network_floats(p, memory, gates * width);
    for (ptrdiff_t i = 0; i < gates * units; ++i) bias[i / units * width + i % units] = (float)(0.5 * bell(seed));
    const float *const of_x = network_random(p, memory, gates * units * channels, 0, 0.25, seed);
    const float *const of_h = network_random(p, memory, gates * units * units, 0, 0.25, seed);
    is.cell.weight_x = network_pack(p, memory, gates, units, channels, 0, of_x);
    is.cell.weight_h = network_pack(p, memory, gates, units, units, 0, of_h);
    is.cell.cell_clip = is.cell.projection_clip = INFINITY;
    is.cell.bias = bias;
    is.inputs = channels * is.positions, is.outputs = units * is.positions;
    return (cnorm_layer){.kind = CNORM_LAYER_POSITIONS, .as = {.positions = is}};
}

/* [2, m] -> [FRAME_OUTPUTS, m + 1] */
static inline frame_stack frames_random(cnorm_weight_type type, ptrdiff_t m, allocator *memory)
{
    uint64_t state = (uint64_t)(m * 10007), *seed = &state;
    frame_stack s = {.inputs = 2 * m, .outputs = FRAME_OUTPUTS * (m + 1), .count = FRAME_LAYERS, .pool = {.type = type}};
    network *const p = &s.pool;
    cnorm_layer *const to = s.layers;
    const cnorm_delay delay = {.n = 2 * m, .frames = 3, .dilation = 2, .outputs = 6 * m};
    to[0] = (cnorm_layer){.kind = CNORM_LAYER_DELAY, .as = {.delay = delay}};
    const cnorm_permute order = {6 * m, {1, 1, 1, 3, 2, m}, {0, 1, 2, 4, 3, 5}};
    to[1] = (cnorm_layer){.kind = CNORM_LAYER_PERMUTE, .as = {.permute = order}};
    const float *const w = network_random(p, memory, 3 * 4 * 6, 0, 0.5, seed);
    const cnorm_conv wide = {.weight = network_pack(p, memory, 1, 3 * 4, 6, 0, w), .bias = network_random(p, memory, 4, 0, 1, seed),
                             .channels = 6, .outputs = 4, .taps = 3, .dilation = 1, .positions = m, .stride = 2, .before = 1,
                             .inputs = 6 * m, .results = 4 * 2 * m};
    to[2] = (cnorm_layer){.kind = CNORM_LAYER_CONV_TRANSPOSE, .as = {.conv_transpose = wide}};
    const cnorm_conv deep = {.kernel = network_random(p, memory, 2 * cnorm_padded_units(4), 0, 0.5, seed), .channels = 4, .outputs = 4,
                             .taps = 2, .dilation = 1, .depthwise = 1, .positions = 2 * m, .stride = 1, .inputs = 8 * m,
                             .results = 4 * (2 * m + 1)};
    to[3] = (cnorm_layer){.kind = CNORM_LAYER_CONV_TRANSPOSE, .as = {.conv_transpose = deep}};
    const cnorm_pool pool = {.channels = 4, .positions = 2 * m + 1, .taps = 3, .stride = 2, .dilation = 1, .before = 1,
                             .inputs = 4 * (2 * m + 1), .results = 4 * (m + 1)};
    to[4] = (cnorm_layer){.kind = CNORM_LAYER_MAX_POOL, .as = {.max_pool = pool}};
    const cnorm_positions each = {.cell = {.kind = CNORM_CELL_LSTM}, .positions = m + 1, .scan = CNORM_SCAN_EACH};
    to[5] = frame_cell(p, memory, each, 4, FRAME_UNITS, seed);
    const cnorm_positions scan = {.cell = {.kind = CNORM_CELL_GRU}, .positions = m + 1, .scan = CNORM_SCAN_BACKWARD};
    to[6] = frame_cell(p, memory, scan, FRAME_UNITS, FRAME_OUTPUTS, seed);
    s.state = network_floats(p, memory, cnorm_state_floats(s.layers, FRAME_LAYERS));
    s.scratch = network_floats(p, memory, cnorm_scratch_floats(s.layers, FRAME_LAYERS, FRAME_ROWS));
    return s;
}

/* [4, m] -> [FRAME_OUTPUTS, m]: a convolution in two groups, and cells of few and of more units, each and scanned on */
static inline frame_stack scans_random(cnorm_weight_type type, ptrdiff_t m, allocator *memory)
{
    enum { GROUPED = 6, WIDE = 18 };
    uint64_t state = (uint64_t)(m * 10009), *seed = &state;
    frame_stack s = {.inputs = 4 * m, .outputs = FRAME_OUTPUTS * m, .count = 5, .pool = {.type = type}};
    network *const p = &s.pool;
    float *const w = network_random(p, memory, GROUPED * 3 * 4, 0, 0.5, seed);
    for (ptrdiff_t i = 0; i < GROUPED * 3 * 4; ++i)
        if (i / 12 * 2 / GROUPED != i % 4 / 2) w[i] = 0;
    const cnorm_conv conv = {.weight = network_pack(p, memory, 1, GROUPED, 12, 0, w), .channels = 4, .outputs = GROUPED, .taps = 3,
                             .dilation = 1, .groups = 2, .positions = m, .stride = 1, .before = 1, .after = 1,
                             .inputs = 4 * m, .results = GROUPED * m};
    s.layers[0] = (cnorm_layer){.kind = CNORM_LAYER_CONV, .as = {.conv = conv}};
    const cnorm_positions each = {.cell = {.kind = CNORM_CELL_GRU}, .positions = m, .scan = CNORM_SCAN_EACH};
    const cnorm_positions on = {.cell = {.kind = CNORM_CELL_GRU}, .positions = m, .scan = CNORM_SCAN_FORWARD};
    const cnorm_positions lstm = {.cell = {.kind = CNORM_CELL_LSTM}, .positions = m, .scan = CNORM_SCAN_FORWARD};
    const cnorm_positions back = {.cell = {.kind = CNORM_CELL_LSTM}, .positions = m, .scan = CNORM_SCAN_BACKWARD};
    s.layers[1] = frame_cell(p, memory, each, GROUPED, WIDE, seed);
    s.layers[2] = frame_cell(p, memory, on, WIDE, FRAME_UNITS, seed);
    s.layers[3] = frame_cell(p, memory, lstm, FRAME_UNITS, WIDE, seed);
    s.layers[4] = frame_cell(p, memory, back, WIDE, FRAME_OUTPUTS, seed);
    s.state = network_floats(p, memory, cnorm_state_floats(s.layers, s.count));
    s.scratch = network_floats(p, memory, cnorm_scratch_floats(s.layers, s.count, FRAME_ROWS));
    return s;
}

/* x [steps, inputs] -> y [steps, outputs] */
static inline void frames_run(frame_stack *s, ptrdiff_t steps, const float *x, float *y)
{
    CHECK(cnorm_run(&(cnorm_frames){.layers = s->layers, .count = s->count, .frames = steps, .x = x, .state = s->state,
        .scratch = s->scratch, .rows = FRAME_ROWS, .y = y}) == CNORM_OK,
          "%td inputs", s->inputs);
}

#endif
