/* cnorm, level 2: recurrent networks one step at a time, batch size 1, float32. Read cnorm.h first.
 *
 * The caller allocates all memory. A network is an array of layers, which refer to packed weights. Nothing writes these
 * after packing, so any number of streams and threads can share one network. A stream is one array of state; each
 * thread that steps streams needs scratch of its own. A step does not allocate, lock or make system calls.
 *
 *     for each matrix: cnorm_matrix_pack into cnorm_matrix_floats() floats, aligned to CNORM_ALIGN bytes
 *     state:   cnorm_state_floats() floats, zero, or the initial state that a cell has learned
 *     scratch: cnorm_scratch_floats(layers, count, 1) floats
 *     cnorm_run(&(cnorm_frames){.layers = layers, .count = count, .frames = 1, .x = x, .state = state,
 *                               .scratch = scratch, .y = y})
 */
#ifndef CNORM_RNN_H
#define CNORM_RNN_H

#include "cnorm.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
    CNORM_ALIGN = 64,    /* bytes; of panels, state and scratch */
    CNORM_GATE_PAD = 16, /* the units of a gate are padded to a multiple of this, with zeros */
};

/* units padded to CNORM_GATE_PAD: the length of h, of c, and the stride from gate to gate of the vectors below */
ptrdiff_t cnorm_padded_units(ptrdiff_t units);

/* How weights are stored. float16 is widened to float32. int8: W[r, k] = scales[r] rows[r, k]; each input vector is
 * quantised, with a scale of its own, to integers of at most 14 bits, and the sums of products are exact. */
typedef enum cnorm_weight_type { CNORM_WEIGHT_F32, CNORM_WEIGHT_F16, CNORM_WEIGHT_I8 } cnorm_weight_type;

/* the most inputs of a matrix of int8 weights: sums of inputs quantised to +-129 then still fit int32, see `levels` */
enum { CNORM_INT8_COLS = 1 << 17 };

/* W [gates * units, cols], packed. The gates are normalised in groups of `group` (the last one may be smaller; 0: not
 * normalised). Within a group W is centred: each column has had its mean over the group's rows subtracted, in float64.
 * W x then has mean 0 over the group, and its layer norm is W x / sqrt(mean (W x)^2 + eps). */
typedef struct cnorm_matrix {
    ptrdiff_t gates, units, cols, group;
    const void *panels;
    cnorm_weight_type type;
    int levels; /* CNORM_WEIGHT_I8: inputs are quantised to integers within +-levels, at most 8191 */
} cnorm_matrix;

/* float32 weights: pack W [gates * units, cols] into cnorm_matrix_floats() floats */
ptrdiff_t cnorm_matrix_floats(ptrdiff_t gates, ptrdiff_t units, ptrdiff_t cols);
cnorm_status cnorm_matrix_pack(ptrdiff_t gates, ptrdiff_t units, ptrdiff_t cols, ptrdiff_t group, const float *w,
                               float *panels);

/* Weights of any type, in two steps: cnorm_matrix_round centres W [gates * units, cols] and rounds it to `rows` of the
 * type, the form to keep in a file; cnorm_matrix_pack_rows packs rows. `scales` [gates * units] is for CNORM_WEIGHT_I8
 * only, else NULL. cnorm_matrix_pack_rows reads type and shape from *matrix and sets its panels and levels;
 * `panels` has cnorm_matrix_bytes() bytes, aligned to CNORM_ALIGN. CNORM_ERROR_SIZE for int8 rows of more than
 * CNORM_INT8_COLS inputs, CNORM_ERROR_VALUE for a weight out of range (float16 beyond 65504, int8 -128) or a
 * scale that is not positive. */
ptrdiff_t cnorm_matrix_bytes(const cnorm_matrix *matrix);
cnorm_status cnorm_matrix_round(const cnorm_matrix *matrix, const float *w, void *rows, float *scales);
cnorm_status cnorm_matrix_pack_rows(cnorm_matrix *matrix, const void *rows, const float *scales, void *panels);

/* y [units] = W x + bias; bias [units] or NULL; gates = 1, group = 0 */
typedef struct cnorm_linear {
    cnorm_matrix weight;
    const float *bias;
} cnorm_linear;

/* y [n] = LN(x) gain + bias; gain and bias [n] or NULL */
typedef struct cnorm_row_norm {
    ptrdiff_t n;
    const float *gain, *bias;
    float eps;
} cnorm_row_norm;

/* y [n] = x weight, element by element */
typedef struct cnorm_scale {
    ptrdiff_t n;
    const float *weight;
} cnorm_scale;

enum { CNORM_TOKENS = 1 << 24 }; /* the most tokens: all integers up to it are float32 numbers */

/* y [units] = column x of `weight` [units, tokens], gates = 1, group = 0. x [1], the token id, is an integer from 0 to
 * tokens - 1, and an element of the frame: the layer is the first one, or reads the frame through CNORM_LAYER_CONCAT
 * only. */
typedef struct cnorm_embedding {
    cnorm_matrix weight;
    ptrdiff_t inputs; /* 1 */
} cnorm_embedding;

/* A convolution. The window of an output is [taps, channels], the oldest or leftmost tap first; the output is the
 * product of `weight` [outputs, taps * channels] with it plus bias, or, if depthwise, the sum over the taps of `kernel`
 * times the window, for each channel by itself (outputs = channels).
 *   CNORM_LAYER_CAUSAL_CONV: over time, the taps `dilation` frames apart, the last is the frame [channels] itself. Its
 *       state is the last (taps - 1) * dilation frames, the oldest first. Members from `positions` on are not read.
 *   CNORM_LAYER_CONV: in a frame [channels, positions], with `before` and `after` positions of zeros, or of the frame
 *       mirrored at its ends, around it, every `stride` positions: [outputs, results / outputs].
 *   CNORM_LAYER_CONV_TRANSPOSE: the transpose of that. Position p of a frame [channels, positions] adds to the places
 *       p * stride + t * dilation - before, of those that there are, the product of `weight` [taps * outputs, channels]
 *       with its channels, or, if depthwise, `kernel` times them; then bias is added: [outputs, results / outputs].
 *       `reflect` and `after` are not read. */
typedef struct cnorm_conv {
    cnorm_matrix weight;                         /* gates = 1, group = 0; panels NULL if depthwise */
    const float *kernel, *bias;                  /* [taps, padded channels], depthwise only; [outputs] or NULL */
    ptrdiff_t channels, outputs, taps, dilation; /* at least 1 */
    int depthwise, reflect;
    ptrdiff_t positions, stride, before, after;
    ptrdiff_t inputs, results; /* channels * positions; outputs times the number of places of the kernel */
    ptrdiff_t groups;          /* inside a frame: 0, or as many groups, between which the weights are 0 and not read */
} cnorm_conv;

/* A function of each element, s = sigmoid; alpha and beta of cnorm_elementwise, or of a cell. Cells take all but PRELU,
 * SOFTMAX, LOG and SQRT. Packed files store the numbers. */
typedef enum cnorm_activation {
    CNORM_ACTIVATION_TANH,
    CNORM_ACTIVATION_RELU,
    CNORM_ACTIVATION_SIGMOID,
    CNORM_ACTIVATION_ELU,          /* x, or alpha (exp(x) - 1) where x < 0 */
    CNORM_ACTIVATION_SELU,         /* 1.0507010 times elu with alpha 1.6732632, both in float32, as ONNX has them */
    CNORM_ACTIVATION_SILU,         /* x s(x) */
    CNORM_ACTIVATION_GELU,         /* x (1 + erf(x / sqrt(2))) / 2 */
    CNORM_ACTIVATION_GELU_TANH,    /* x s(2 u), u = sqrt(2 / pi) (x + 0.044715 x^3) */
    CNORM_ACTIVATION_LEAKY_RELU,   /* x, or alpha x where x < 0 */
    CNORM_ACTIVATION_PRELU,        /* x, or slope x where x < 0 */
    CNORM_ACTIVATION_SOFTPLUS,     /* log(1 + exp(x)) */
    CNORM_ACTIVATION_HARD_SIGMOID, /* alpha x + beta within 0 and 1 */
    CNORM_ACTIVATION_HARD_SWISH,   /* x times (x + 3) / 6 within 0 and 1 */
    CNORM_ACTIVATION_SOFTMAX,      /* exp(x) / sum exp(x) over the frame */
    CNORM_ACTIVATION_LOG,          /* log(x + alpha) */
    CNORM_ACTIVATION_EXP,
    CNORM_ACTIVATION_SQRT,
    CNORM_ACTIVATION_SQUARE,
    CNORM_ACTIVATION_ABS,
    CNORM_ACTIVATION_CLIP, /* x within alpha and beta */
    CNORM_ACTIVATION_SIN,  /* x in radians; every finite x is reduced exactly */
    CNORM_ACTIVATION_COS,
} cnorm_activation;
enum { CNORM_ACTIVATIONS = CNORM_ACTIVATION_COS + 1 };

typedef enum cnorm_cell_kind { CNORM_CELL_LSTM, CNORM_CELL_GRU, CNORM_CELL_RNN } cnorm_cell_kind;

typedef enum cnorm_scope {
    CNORM_SCOPE_NONE,  /* a = W_x x + W_h h + bias */
    CNORM_SCOPE_SPLIT, /* a = LN(W_x x + inside_x) gain_x + LN(W_h h + inside_h) gain_h + bias */
    CNORM_SCOPE_SUM,   /* a = LN(W_x x + inside_x + W_h h) gain_h + bias */
} cnorm_scope;

typedef enum cnorm_cell_norm {
    CNORM_CELL_NORM_NONE,
    CNORM_CELL_NORM_OUTPUT, /* h = o tanh(LN(c)); the next step starts from c */
    CNORM_CELL_NORM_CARRY,  /* c = LN(c), h = o tanh(c) */
} cnorm_cell_norm;

typedef enum cnorm_reset {
    CNORM_RESET_AFTER,     /* n = tanh(a_n of x + r (a_n of h + bias_n)); not with CNORM_SCOPE_SUM */
    CNORM_RESET_CANDIDATE, /* n = tanh(r a_n) */
    CNORM_RESET_BEFORE,    /* n = tanh(a_n of x + W_n (r h)); weight_h has the gates z and r only, CNORM_SCOPE_NONE */
} cnorm_reset;

/* A recurrent cell. Its gates have pre-activations a by `scope`; with s = sigmoid,
 *   CNORM_CELL_LSTM, gates f, i, o, g:  c = s(f) c + s(i) tanh(g), within +-cell_clip;  m = s(o) tanh(c), by cell_norm
 *                                  h = m, or W_p m + bias_p within +-projection_clip
 *   CNORM_CELL_GRU, gates z, r, n:      h = (1 - s(z)) h + s(z) n; `keep`: h = s(z) h + (1 - s(z)) n; n by `reset`
 *   CNORM_CELL_RNN, one gate:           h = activation(a)
 * Another `recurrent_activation` takes the place of s, another `activation` that of tanh in candidate and output; their
 * arguments are clipped to +-clip first.
 * And finally h = zoneout h_before + (1 - zoneout) h. State: h [padded outputs], for the LSTM then c [padded units].
 * A stored |h| or |c| below 2^-100 becomes 0. Vectors that the options don't use are NULL. */
typedef struct cnorm_cell {
    cnorm_cell_kind kind;
    cnorm_scope scope;
    cnorm_cell_norm cell_norm;
    cnorm_reset reset;
    cnorm_activation activation;
    int keep;
    float eps, cell_clip, projection_clip, zoneout;           /* clips: infinity for none */
    cnorm_activation recurrent_activation;                    /* 0 is sigmoid: no cell has gates of tanh */
    float alpha, beta, recurrent_alpha, recurrent_beta, clip; /* of the two functions; clip: 0 for none */
    cnorm_matrix weight_x, weight_h;                          /* [gates * units, inputs], [gates * units, outputs] */
    cnorm_matrix weight_n, weight_p;  /* [units, units] if CNORM_RESET_BEFORE; [outputs, units] or panels NULL */
    const float *inside_x, *inside_h; /* [gates, padded] and CNORM_GATE_PAD more, centred like the weights; or NULL */
    const float *gain_x, *gain_h, *bias; /* [gates, padded] */
    const float *bias_n;                 /* [padded] or NULL */
    const float *gain_c, *bias_c;        /* [units] or NULL */
    const float *bias_p;                 /* [padded outputs] or NULL */
} cnorm_cell;

/* y = f(x), n elements */
typedef struct cnorm_elementwise {
    ptrdiff_t n;
    cnorm_activation f;
    float alpha, beta;  /* what f says; not read by other functions */
    const float *slope; /* [n], CNORM_ACTIVATION_PRELU only */
} cnorm_elementwise;

/* CNORM_LAYER_RESIDUAL: y = x + the input of the layer `back` >= 1 places before this one, n elements.
 * CNORM_LAYER_MULTIPLY: y = x times it. */
typedef struct cnorm_addition {
    ptrdiff_t n;
    int back;
} cnorm_addition;

enum { CNORM_PARTS = 8 };

/* y [outputs] = parts, concatenated: elements [start, start + count) of the input, [n], of the layer `back` >= 0
 * places before, 0 being this one's own x. The parts end before the first whose count is 0. */
typedef struct cnorm_concat {
    ptrdiff_t n, outputs;
    struct cnorm_part {
        int back;
        ptrdiff_t n, start, count;
    } parts[CNORM_PARTS];
} cnorm_concat;

/* y [frames, n] = the x [n] of (frames - 1) * dilation, ..., dilation and 0 steps before. The state is the last
 * (frames - 1) * dilation x, the oldest first. */
typedef struct cnorm_delay {
    ptrdiff_t n, frames, dilation; /* at least 1 */
    ptrdiff_t outputs;             /* frames * n */
} cnorm_delay;

/* y [channels, results / channels] = the largest under taps `dilation` apart, every `stride` positions of a frame
 * [channels, positions] with `before` positions in front, which like those behind it are smaller than any number. Each
 * place has a tap in the frame: before <= (taps - 1) * dilation and, if it is not 0, dilation <= positions. */
typedef struct cnorm_pool {
    ptrdiff_t channels, positions, taps, stride, dilation; /* at least 1 */
    ptrdiff_t before;
    ptrdiff_t inputs, results; /* channels * positions; channels times the number of places */
} cnorm_pool;

enum { CNORM_AXES = 6 };

/* y [n] = x with its axes in another order: that of y number i is x's number axes[i], each once. The first lengths are
 * 1 where there are fewer axes. */
typedef struct cnorm_permute {
    ptrdiff_t n, lengths[CNORM_AXES]; /* of x */
    int axes[CNORM_AXES];
} cnorm_permute;

typedef enum cnorm_scan {
    CNORM_SCAN_EACH,     /* a state for each position: h [outputs of the cell, positions], then c [units, positions] */
    CNORM_SCAN_FORWARD,  /* the positions of a frame are the steps of a sequence from 0; no state is kept */
    CNORM_SCAN_BACKWARD, /* from the last position to the first */
} cnorm_scan;

/* A cell at each position of a frame [channels, positions]: x of a position is its channels, y [outputs of the cell,
 * positions]. Its fields in cnorm_gradient are those of the cell. */
typedef struct cnorm_positions {
    cnorm_cell cell;
    ptrdiff_t positions;
    cnorm_scan scan;
    ptrdiff_t inputs, outputs; /* those of the cell times positions */
} cnorm_positions;

/* The kinds of layers: CNORM_LAYER_ and the name, the layer's struct, its member of `as`. Packed files store the number
 * of a kind, so a new one is the last. */
#define CNORM_LAYERS(LAYER)                                                                                            \
    LAYER(LINEAR, cnorm_linear, linear)                                                                                \
    LAYER(CELL, cnorm_cell, cell)                                                                                      \
    LAYER(NORM, cnorm_row_norm, norm)                                                                                  \
    LAYER(ACTIVATION, cnorm_elementwise, activation)                                                                   \
    LAYER(RESIDUAL, cnorm_addition, residual)                                                                          \
    LAYER(SCALE, cnorm_scale, scale)                                                                                   \
    LAYER(MULTIPLY, cnorm_addition, multiply)                                                                          \
    LAYER(CONCAT, cnorm_concat, concat)                                                                                \
    LAYER(CAUSAL_CONV, cnorm_conv, causal_conv)                                                                        \
    LAYER(CONV, cnorm_conv, conv)                                                                                      \
    LAYER(EMBEDDING, cnorm_embedding, embedding)                                                                       \
    LAYER(DELAY, cnorm_delay, delay)                                                                                   \
    LAYER(CONV_TRANSPOSE, cnorm_conv, conv_transpose)                                                                  \
    LAYER(MAX_POOL, cnorm_pool, max_pool)                                                                              \
    LAYER(PERMUTE, cnorm_permute, permute)                                                                             \
    LAYER(POSITIONS, cnorm_positions, positions)

#define CNORM_LAYER_NUMBER(name, type, member) CNORM_LAYER_##name,
typedef enum cnorm_layer_kind { CNORM_LAYERS(CNORM_LAYER_NUMBER) } cnorm_layer_kind;
#undef CNORM_LAYER_NUMBER

#define CNORM_LAYER_MEMBER(name, type, member) type member;
typedef struct cnorm_layer {
    cnorm_layer_kind kind;
    union {
        CNORM_LAYERS(CNORM_LAYER_MEMBER)
    } as;
} cnorm_layer;
#undef CNORM_LAYER_MEMBER

/* Where cnorm_layers_check, cnorm_model_open or cnorm_model_write found an error. */
typedef struct cnorm_fault {
    int network, layer; /* -1: no network or layer in particular */
    const char *field;  /* a member of the layer's struct, such as "weight_x" or "eps"; "kind"; "inputs": the layer does
                         * not fit the one before; NULL: none in particular. A constant string */
} cnorm_fault;

/* sizes of a layer: 0 for one of an unknown kind */
ptrdiff_t cnorm_layer_inputs(const cnorm_layer *layer);
ptrdiff_t cnorm_layer_outputs(const cnorm_layer *layer);
ptrdiff_t cnorm_layer_state_floats(const cnorm_layer *layer); /* 0 for a layer without state */
ptrdiff_t cnorm_state_floats(const cnorm_layer *layers, int count);

/* Returns CNORM_ERROR_LAYER unless every layer has a known kind and options, the matrices and vectors that these need,
 * sizes that fit each other and the layer before, and clips above 0; *fault, which may be NULL, then says where.
 * Every run makes the same checks, unless it is told that the layers have passed them. */
cnorm_status cnorm_layers_check(const cnorm_layer *layers, int count, cnorm_fault *fault);

/* The first of `rows` frames x that has a token id which a CNORM_LAYER_EMBEDDING of these layers, which have been
 * checked, does not have: cnorm_run, cnorm_run_many and cnorm_run_tape return CNORM_ERROR_TOKEN for it before anything
 * is stepped. `rows` if there is none, else *element, which may be NULL, is the id's place in the frame. */
ptrdiff_t cnorm_refused_token(const cnorm_layer *layers, int count, ptrdiff_t rows, const float *x, ptrdiff_t x_stride,
                              ptrdiff_t *element);

/* Scratch of a run with the same `rows`, at least 1: the most steps or streams that it may compute together, in one
 * pass over the weights. The library computes as many together as is fast, so a larger number than a call has is no
 * error; with 1 the scratch is the smallest. The bits do not depend on `rows`. 0 if count or rows is not positive. */
ptrdiff_t cnorm_scratch_floats(const cnorm_layer *layers, int count, ptrdiff_t rows);

/* A run of layers over frames: steps of one sequence, or one step of each of several streams */
typedef struct cnorm_frames {
    const cnorm_layer *layers;
    int count;            /* of the layers, at least 1 */
    ptrdiff_t frames;     /* steps of cnorm_run, streams of cnorm_run_many */
    const float *x;       /* [frames, inputs of the first layer] */
    ptrdiff_t x_stride;   /* of the rows of x; 0 is the inputs */
    float *state;         /* [cnorm_state_floats], aligned to CNORM_ALIGN; cnorm_run only; NULL if there is none */
    float *const *states; /* [frames]: the state of each stream; cnorm_run_many only; NULL if there is none */
    float *scratch;       /* [cnorm_scratch_floats], aligned to CNORM_ALIGN */
    ptrdiff_t rows;       /* of the scratch; 0 is 1 */
    float *y;             /* [frames, outputs of the last layer]; is x, with the same stride, or does not overlap it */
    ptrdiff_t y_stride;   /* of the rows of y; 0 is the outputs */
    int checked;          /* not 0: cnorm_layers_check has accepted the layers, which have not changed since */
} cnorm_frames;

/* The bits do not depend on how many steps one call takes. */
cnorm_status cnorm_run(const cnorm_frames *call);

/* One step of each stream, with the bits of cnorm_run on each */
cnorm_status cnorm_run_many(const cnorm_frames *call);

#ifdef __cplusplus
}
#endif
#endif
