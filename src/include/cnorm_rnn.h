/* cnorm, level 2: recurrent networks one step at a time, batch size 1, float32. Read cnorm.h first.
 *
 * Memory is the caller's. A network is an array of layers; a layer refers to packed weights that are never written
 * after packing, so one network serves any number of streams and threads. A stream is one block of state; whoever
 * steps it brings scratch. A step does not allocate, lock or call the system.
 *
 *     for each matrix: cnorm_matrix_pack into cnorm_matrix_floats() floats, aligned to CNORM_ALIGN bytes
 *     state:   cnorm_state_floats() floats, zero at the start       scratch: cnorm_scratch_floats() floats
 *     cnorm_run(layers, count, 1, x, 0, state, scratch, y, 0)
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

/* W [gates * units, cols] packed for one product. With `centred`, the mean over all rows has been taken from each
 * column, in float64: the layer norm of W x is then W x / sqrt(mean (W x)^2 + eps). */
typedef struct cnorm_matrix {
    ptrdiff_t gates, units, cols;
    const float *panels;
} cnorm_matrix;

ptrdiff_t cnorm_matrix_floats(ptrdiff_t gates, ptrdiff_t units, ptrdiff_t cols);
cnorm_status cnorm_matrix_pack(ptrdiff_t gates, ptrdiff_t units, ptrdiff_t cols, const float *w, int centred,
                               float *panels);

/* y [units] = W x + bias; bias [units] or NULL; gates = 1, not centred */
typedef struct cnorm_linear {
    cnorm_matrix weight;
    const float *bias;
} cnorm_linear;

/* Layer-normalised LSTM, Ba, Kiros, Hinton 2016, Eq. 20-22; gates f, i, o, g; both matrices centred.
 * State: h [padded], c [padded]. Output: h [units]. */
typedef struct cnorm_lstm {
    cnorm_matrix weight_x, weight_h; /* [4 * units, inputs], [4 * units, units] */
    const float *gain_x, *gain_h;    /* [4, padded] */
    const float *bias;               /* [4, padded]: bias + bias_x + bias_h */
    const float *gain_c, *bias_c;    /* [units] */
    float eps;
} cnorm_lstm;

typedef enum cnorm_layer_kind { CNORM_LINEAR, CNORM_LSTM } cnorm_layer_kind;

typedef struct cnorm_layer {
    cnorm_layer_kind kind;
    union {
        cnorm_linear linear;
        cnorm_lstm lstm;
    } as;
} cnorm_layer;

ptrdiff_t cnorm_layer_inputs(const cnorm_layer *layer);
ptrdiff_t cnorm_layer_outputs(const cnorm_layer *layer);
ptrdiff_t cnorm_layer_state_floats(const cnorm_layer *layer); /* 0 for a layer without state */
ptrdiff_t cnorm_state_floats(const cnorm_layer *layers, int count);
ptrdiff_t cnorm_scratch_floats(const cnorm_layer *layers, int count);

/* x [steps, inputs of the first layer] -> y [steps, outputs of the last]; the same bits however the steps are cut */
cnorm_status cnorm_run(const cnorm_layer *layers, int count, ptrdiff_t steps, const float *x, ptrdiff_t x_stride,
                       float *state, float *scratch, float *y, ptrdiff_t y_stride);

#ifdef __cplusplus
}
#endif
#endif
