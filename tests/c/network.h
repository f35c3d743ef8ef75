/* A random network of an LSTM and its read-out, [inputs] -> [units] -> [outputs], for the tests of cnorm_rnn.h. */
#ifndef NETWORK_H
#define NETWORK_H

#include "check.h"

enum { MANY_ROWS = 70 }; /* more than the library computes together */

enum { NETWORK_LAYERS = 2 };

typedef struct network {
    ptrdiff_t inputs, units, outputs;
    cnorm_weight_type type; /* of all matrices */
    /* unpacked: [4, units, inputs], [4, units, units], [4, units] three times, [outputs, units] */
    float *weight_x, *weight_h, *gain_x, *gain_h, *bias, *weight_y;
    float *gain_c, *bias_c, *bias_y; /* [units], [units], [outputs]: used without packing */
    cnorm_layer layers[NETWORK_LAYERS];
    float *state, *scratch;
    ptrdiff_t rows; /* the largest number of steps or streams of a call that fits the scratch buffer */
    void *owned[64];
    int owns;
} network;

typedef void *allocator(ptrdiff_t bytes); /* zeroed memory, aligned to CNORM_ALIGN where bytes is a multiple of it */

static inline float *network_floats(network *net, allocator *memory, ptrdiff_t count)
{
    return net->owned[net->owns++] = memory(count * (ptrdiff_t)sizeof(float));
}

static inline float *network_random(network *net, allocator *memory, ptrdiff_t count, double mean, double scale, uint64_t *state)
{
    float *v = network_floats(net, memory, count);
    for (ptrdiff_t i = 0; i < count; ++i) v[i] = (float)(mean + scale * bell(state));
    return v;
}

static inline cnorm_matrix network_pack(network *net, allocator *memory, ptrdiff_t gates, ptrdiff_t units, ptrdiff_t cols,
                                        ptrdiff_t group, const float *w)
{
    cnorm_matrix matrix = {.gates = gates, .units = units, .cols = cols, .group = group, .type = net->type};
    void *const panels = net->owned[net->owns++] = memory(cnorm_matrix_bytes(&matrix));
    if (net->type == CNORM_WEIGHT_F32) {
        CHECK(cnorm_matrix_pack(gates, units, cols, group, w, panels) == CNORM_OK, "%td gates, %td units", gates, units);
        matrix.panels = panels;
    } else {
        void *const rows = net->owned[net->owns++] = memory(gates * units * cols * (ptrdiff_t)sizeof(float));
        float *const scales = network_floats(net, memory, gates * units);
        CHECK(cnorm_matrix_round(&matrix, w, rows, scales) == CNORM_OK, "%td gates, %td units", gates, units);
        CHECK(cnorm_matrix_pack_rows(&matrix, rows, scales, panels) == CNORM_OK, "%td gates, %td units", gates, units);
    }
    return matrix;
}

/* [4, units] -> [4, padded] */
static inline float *network_pad(network *net, allocator *memory, const float *v)
{
    const ptrdiff_t padded = cnorm_padded_units(net->units);
    float *out = network_floats(net, memory, 4 * padded);
    for (ptrdiff_t i = 0; i < 4 * net->units; ++i) out[i / net->units * padded + i % net->units] = v[i];
    return out;
}

static inline network network_random_with(cnorm_weight_type type, ptrdiff_t inputs, ptrdiff_t units, ptrdiff_t outputs,
                                          allocator *memory)
{
    uint64_t seed = (uint64_t)(inputs * 10007 + units * 101 + outputs), *s = &seed;
    network net = {.inputs = inputs, .units = units, .outputs = outputs, .type = type, .rows = 1 + units % MANY_ROWS}, *p = &net;
    net.weight_x = network_random(p, memory, 4 * units * inputs, 0.1, 0.25, s);
    net.weight_h = network_random(p, memory, 4 * units * units, -0.1, 0.25, s);
    net.gain_x = network_random(p, memory, 4 * units, 1, 0.25, s);
    net.gain_h = network_random(p, memory, 4 * units, 1, 0.25, s);
    net.bias = network_random(p, memory, 4 * units, 0, 0.5, s);
    net.gain_c = network_random(p, memory, units, 1, 0.25, s);
    net.bias_c = network_random(p, memory, units, 0, 0.25, s);
    net.weight_y = network_random(p, memory, outputs * units, 0, 0.25, s);
    net.bias_y = network_random(p, memory, outputs, 0, 1, s);
    net.layers[0] = (cnorm_layer){.kind = CNORM_LAYER_CELL, .as = {.cell = {
        .kind = CNORM_CELL_LSTM,
        .scope = CNORM_SCOPE_SPLIT,
        .cell_norm = CNORM_CELL_NORM_OUTPUT,
        .eps = 1e-5f,
        .cell_clip = INFINITY,
        .projection_clip = INFINITY,
        .weight_x = network_pack(p, memory, 4, units, inputs, 4, net.weight_x),
        .weight_h = network_pack(p, memory, 4, units, units, 4, net.weight_h),
        .gain_x = network_pad(p, memory, net.gain_x),
        .gain_h = network_pad(p, memory, net.gain_h),
        .bias = network_pad(p, memory, net.bias),
        .gain_c = net.gain_c,
        .bias_c = net.bias_c,
    }}};
    net.layers[1] = (cnorm_layer){.kind = CNORM_LAYER_LINEAR, .as = {.linear = {
        .weight = network_pack(p, memory, 1, outputs, units, 0, net.weight_y),
        .bias = net.bias_y,
    }}};
    net.state = network_floats(p, memory, cnorm_state_floats(net.layers, NETWORK_LAYERS));
    net.scratch = network_floats(p, memory, cnorm_scratch_floats(net.layers, NETWORK_LAYERS, net.rows));
    return net;
}

static inline network network_random_of(ptrdiff_t inputs, ptrdiff_t units, ptrdiff_t outputs, allocator *memory)
{
    return network_random_with(CNORM_WEIGHT_F32, inputs, units, outputs, memory);
}

static inline void network_reset(network *net)
{
    memset(net->state, 0, (size_t)cnorm_state_floats(net->layers, NETWORK_LAYERS) * sizeof(float));
}

/* x [steps, inputs] -> y [steps, outputs] */
static inline void network_run(network *net, ptrdiff_t steps, const float *x, float *y)
{
    CHECK(cnorm_run(&(cnorm_frames){.layers = net->layers, .count = NETWORK_LAYERS, .frames = steps, .x = x,
        .state = net->state, .scratch = net->scratch, .rows = net->rows, .y = y}) == CNORM_OK,
          "%td units", net->units);
}

static inline void network_free(network *net)
{
    while (net->owns > 0) release(net->owned[--net->owns]);
}

#endif
