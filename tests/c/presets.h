/* Every preset of cnorm.PRESETS as a random cell, for the golden hashes. presets.inc, which tests/rnn/test_rounded.py
 * compares with the Python package, has a row for each preset, and one more with a projection where there can be one. */
#ifndef PRESETS_H
#define PRESETS_H

#include "network.h"

enum { INSIDE_X = 1, INSIDE_H = 2, BIAS_N = 4, GAIN_C = 8, BIAS_C = 16, PROJECTION = 32, BIAS_P = 64 };

typedef struct preset {
    const char *name;
    cnorm_cell_kind kind;
    cnorm_scope scope;
    cnorm_cell_norm cell_norm;
    cnorm_reset reset;
    cnorm_activation activation;
    int keep;
    float eps, cell_clip, projection_clip, zoneout;
    ptrdiff_t group;
    int arrays; /* those that are not NULL, but for gains and the bias after the norms, which all have */
} preset;

static const preset presets[] = {
#include "presets.inc"
};
enum { PRESETS = sizeof presets / sizeof *presets, PRESET_INPUTS = 37, PRESET_UNITS = 35, PRESET_OUTPUTS = 19, PRESET_STEPS = 6 };

/* random [gates, padded units] and CNORM_GATE_PAD zeros; centred over each `group` gates unless that is 0 */
static inline float *preset_vector(network *net, ptrdiff_t gates, ptrdiff_t units, ptrdiff_t group, double mean, uint64_t *state)
{
    const ptrdiff_t width = cnorm_padded_units(units);
    float *v = network_floats(net, allocate, gates * width + CNORM_GATE_PAD);
    for (ptrdiff_t g = 0; g < gates; ++g)
        for (ptrdiff_t j = 0; j < units; ++j) v[g * width + j] = (float)(mean + 0.3 * bell(state));
    for (ptrdiff_t first = 0; group > 0 && first < gates; first += group) {
        const ptrdiff_t end = first + group < gates ? first + group : gates;
        double sum = 0;
        for (ptrdiff_t g = first; g < end; ++g)
            for (ptrdiff_t j = 0; j < units; ++j) sum += (double)v[g * width + j];
        for (ptrdiff_t g = first; g < end; ++g)
            for (ptrdiff_t j = 0; j < units; ++j)
                v[g * width + j] = (float)((double)v[g * width + j] - sum / (double)((end - first) * units));
    }
    return v;
}

static inline cnorm_matrix preset_matrix(network *net, ptrdiff_t gates, ptrdiff_t units, ptrdiff_t cols, ptrdiff_t group, uint64_t *state)
{
    const float *w = network_random(net, allocate, gates * units * cols, 0.01, 0.5 / sqrt((double)cols), state);
    return network_pack(net, allocate, gates, units, cols, group, w);
}

/* one layer, its memory owned by *net, whose `type` is that of the matrices */
static inline cnorm_layer preset_layer(network *net, const preset *is, uint64_t *state)
{
    const ptrdiff_t gates = is->kind == CNORM_CELL_LSTM ? 4 : is->kind == CNORM_CELL_GRU ? 3 : 1, units = PRESET_UNITS;
    const int before = is->kind == CNORM_CELL_GRU && is->reset == CNORM_RESET_BEFORE;
    const ptrdiff_t outputs = is->arrays & PROJECTION ? PRESET_OUTPUTS : units;
    cnorm_cell cell = {
        .kind = is->kind, .scope = is->scope, .cell_norm = is->cell_norm, .reset = is->reset, .activation = is->activation,
        .keep = is->keep, .eps = is->eps, .cell_clip = is->cell_clip, .projection_clip = is->projection_clip, .zoneout = is->zoneout,
        .weight_x = preset_matrix(net, gates, units, PRESET_INPUTS, is->group, state),
        .weight_h = preset_matrix(net, gates - before, units, outputs, is->group, state),
        .gain_x = preset_vector(net, gates, units, 0, 1, state),
        .gain_h = preset_vector(net, gates, units, 0, 1, state),
        .bias = preset_vector(net, gates, units, 0, 0, state),
    };
    if (before) cell.weight_n = preset_matrix(net, 1, units, units, 0, state);
    if (is->arrays & PROJECTION) cell.weight_p = preset_matrix(net, 1, outputs, units, 0, state);
    if (is->arrays & INSIDE_X) cell.inside_x = preset_vector(net, gates, units, is->group, 0, state);
    if (is->arrays & INSIDE_H) cell.inside_h = preset_vector(net, gates, units, is->group, 0, state);
    if (is->arrays & BIAS_N) cell.bias_n = preset_vector(net, 1, units, 0, 0, state);
    if (is->arrays & GAIN_C) cell.gain_c = preset_vector(net, 1, units, 0, 1, state);
    if (is->arrays & BIAS_C) cell.bias_c = preset_vector(net, 1, units, 0, 0, state);
    if (is->arrays & BIAS_P) cell.bias_p = preset_vector(net, 1, outputs, 0, 0, state);
    return (cnorm_layer){.kind = CNORM_LAYER_CELL, .as = {.cell = cell}};
}

/* a free run: x [PRESET_STEPS, PRESET_INPUTS] -> y [PRESET_STEPS, outputs]; returns the number of outputs */
static inline ptrdiff_t preset_run(const preset *is, cnorm_weight_type type, const float *x, float *y)
{
    network net = {.type = type};
    uint64_t state = 1;
    const cnorm_layer layer = preset_layer(&net, is, &state);
    float *h = network_floats(&net, allocate, cnorm_state_floats(&layer, 1));
    float *scratch = network_floats(&net, allocate, cnorm_scratch_floats(&layer, 1, PRESET_STEPS));
    const ptrdiff_t outputs = cnorm_layer_outputs(&layer);
    CHECK(cnorm_run(&(cnorm_frames){.layers = &layer, .count = 1, .frames = PRESET_STEPS, .x = x, .state = h,
        .scratch = scratch, .rows = PRESET_STEPS, .y = y}) == CNORM_OK, "%s", is->name);
    network_free(&net);
    return outputs;
}

#endif
