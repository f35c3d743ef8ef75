/* A random stack of every layer that is no cell and no product alone: convolutions over time and in a frame, with a
 * matrix and depthwise, layers that read earlier ones, a norm, and activations of a frame and with a slope per unit. */
#ifndef STACK_H
#define STACK_H

#include "network.h"

enum { STACK_LAYERS = 11, STACK_ROWS = 7 };

typedef struct stack {
    ptrdiff_t inputs, outputs;
    network pool; /* owns the memory, and has the type of the matrices */
    cnorm_layer layers[STACK_LAYERS];
    float *state, *scratch;
} stack;

static inline void stack_causal(stack *s, allocator *memory, cnorm_layer *to, cnorm_conv conv, uint64_t *seed)
{
    network *const p = &s->pool;
    const ptrdiff_t window = conv.taps * conv.channels, padded = cnorm_padded_units(conv.channels);
    if (conv.depthwise) conv.kernel = network_random(p, memory, conv.taps * padded, 0, 0.5, seed);
    else {
        const float *const w = network_random(p, memory, conv.outputs * window, 0, 0.5, seed);
        conv.weight = network_pack(p, memory, 1, conv.outputs, window, 0, w);
    }
    conv.bias = network_random(p, memory, conv.outputs, 0, 1, seed);
    *to = (cnorm_layer){.kind = CNORM_LAYER_CAUSAL_CONV, .as = {.causal_conv = conv}};
}

static inline void stack_conv(stack *s, allocator *memory, cnorm_layer *to, cnorm_conv conv, uint64_t *seed)
{
    stack_causal(s, memory, to, conv, seed);
    cnorm_conv *const is = &to->as.conv;
    const ptrdiff_t reach = (is->taps - 1) * is->dilation + 1;
    to->kind = CNORM_LAYER_CONV;
    is->inputs = is->channels * is->positions;
    is->results = is->outputs * ((is->before + is->positions + is->after - reach) / is->stride + 1);
}

/* [inputs] -> [3 (m / 2 + 1) + inputs - inputs / 2], through frames [2, m] and [3, m + 1] */
static inline stack stack_random(cnorm_weight_type type, ptrdiff_t inputs, ptrdiff_t m, allocator *memory)
{
    uint64_t state = (uint64_t)(inputs * 10007 + m * 101), *seed = &state;
    stack s = {.inputs = inputs, .pool = {.type = type}};
    network *const p = &s.pool;
    cnorm_layer *const to = s.layers;
    const ptrdiff_t units = 2 * m, joined = 3 * (m / 2 + 1);
    stack_causal(&s, memory, to, (cnorm_conv){.channels = inputs, .outputs = units, .taps = 3, .dilation = 2}, seed);
    stack_causal(&s, memory, to + 1,
                 (cnorm_conv){.channels = units, .outputs = units, .taps = 17, .dilation = 1, .depthwise = 1}, seed);
    const cnorm_elementwise softmax = {.n = units, .f = CNORM_ACTIVATION_SOFTMAX};
    to[2] = (cnorm_layer){.kind = CNORM_LAYER_ACTIVATION, .as = {.activation = softmax}};
    const cnorm_scale scale = {units, network_random(p, memory, units, 1, 0.5, seed)};
    to[3] = (cnorm_layer){.kind = CNORM_LAYER_SCALE, .as = {.scale = scale}};
    to[4] = (cnorm_layer){.kind = CNORM_LAYER_MULTIPLY, .as = {.multiply = {units, 2}}};
    stack_conv(&s, memory, to + 5, (cnorm_conv){.channels = 2, .outputs = 3, .taps = 2, .dilation = 1, .positions = m,
               .stride = 1, .before = 1, .after = 1}, seed);
    stack_conv(&s, memory, to + 6, (cnorm_conv){.channels = 3, .outputs = 3, .taps = 3, .dilation = 1, .depthwise = 1,
               .reflect = 1, .positions = m + 1, .stride = 2, .before = 1, .after = 1}, seed);
    const cnorm_elementwise prelu = {.n = joined, .f = CNORM_ACTIVATION_PRELU, .slope = network_random(p, memory, joined, 0.25, 0.5, seed)};
    to[7] = (cnorm_layer){.kind = CNORM_LAYER_ACTIVATION, .as = {.activation = prelu}};
    const cnorm_concat concat = {joined, joined + inputs - inputs / 2,
                                 {{0, joined, 0, joined}, {8, inputs, inputs / 2, inputs - inputs / 2}}};
    to[8] = (cnorm_layer){.kind = CNORM_LAYER_CONCAT, .as = {.concat = concat}};
    s.outputs = concat.outputs;
    const cnorm_row_norm norm = {s.outputs, network_random(p, memory, s.outputs, 1, 0.25, seed),
                                 network_random(p, memory, s.outputs, 0, 0.5, seed), 1e-5f};
    to[9] = (cnorm_layer){.kind = CNORM_LAYER_NORM, .as = {.norm = norm}};
    to[10] = (cnorm_layer){.kind = CNORM_LAYER_RESIDUAL, .as = {.residual = {s.outputs, 1}}};
    s.state = network_floats(p, memory, cnorm_state_floats(s.layers, STACK_LAYERS));
    s.scratch = network_floats(p, memory, cnorm_scratch_floats(s.layers, STACK_LAYERS, STACK_ROWS));
    return s;
}

/* an embedding of `tokens`, behind a part of a frame of 3 numbers, the second of which is the id */
static inline void stack_embedding(network *p, ptrdiff_t tokens, ptrdiff_t units, allocator *memory, cnorm_layer to[2])
{
    uint64_t seed = (uint64_t)(tokens * 10007 + units);
    const float *const w = network_random(p, memory, units * tokens, 0, 1, &seed);
    to[0] = (cnorm_layer){.kind = CNORM_LAYER_CONCAT, .as = {.concat = {3, 1, {{0, 3, 1, 1}}}}};
    to[1] = (cnorm_layer){.kind = CNORM_LAYER_EMBEDDING,
                          .as = {.embedding = {network_pack(p, memory, 1, units, tokens, 0, w), 1}}};
}

/* x [steps, inputs] -> y [steps, outputs] */
static inline void stack_run(stack *s, ptrdiff_t steps, const float *x, float *y)
{
    CHECK(cnorm_run(&(cnorm_frames){.layers = s->layers, .count = STACK_LAYERS, .frames = steps, .x = x, .state = s->state,
        .scratch = s->scratch, .rows = STACK_ROWS, .y = y}) == CNORM_OK,
          "%td inputs", s->inputs);
}

#endif
