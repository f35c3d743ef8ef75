/* cnorm, level 3: training a network by truncated backpropagation through time, float32. Read cnorm_rnn.h first.
 *
 * A forward pass over x [steps, batch, inputs] records the values that the backward pass needs: the tape, in the
 * caller's memory. Its y has the bits of cnorm_run. The backward pass returns the gradients of the weights, of x and of
 * the first state. It overwrites the tape, so it can run only once. Neither pass allocates, locks or makes system
 * calls.
 *
 *    cnorm_tape tape = {layers, count, steps, batch, memory};  memory: cnorm_tape_floats(&tape)
 *    cnorm_run_tape(&tape, 0, steps, x, state, scratch, y);    its scratch: cnorm_run_tape_floats(&tape)
 *    cnorm_run_backward(&tape, &(cnorm_backward){...});        its scratch: cnorm_backward_floats(&tape)
 *
 * Gradients have the same bits on every instruction set and at every alignment. A sum over rows is cut into blocks of
 * 16 rows, whose sums are added in order. Rows are in the order of x for matrices and for layers that are not cells.
 * For the vectors of a cell, which are summed during the backward pass, steps go from the last to the first. The
 * gradients of a CNORM_LAYER_NORM are those of cnorm_layer_norm_backward.
 *
 * The maths, for one row. dv is the gradient of the loss with respect to v, ' marks the state before the step, products
 * of vectors are elementwise, and s, a, c, m are those of cnorm_cell. From dh, the gradient of the
 * step's output h, and dc, that of the c it carries on:
 *   (1) dh' = zoneout dh, then dh = (1 - zoneout) dh
 *   (2) projection p = W_p m + bias_p: dp = dh where |p| <= projection_clip, else 0; dm = W_p^T dp. Without one dm = dh
 *   LSTM, with t = tanh(n), n = c or LN(c):
 *   (3) do = dm t, dn = dm s(o) (1 - t^2); then
 *       CNORM_CELL_NORM_OUTPUT: dc += LN'(dn); CNORM_CELL_NORM_CARRY: dc = LN'(dn + dc); CNORM_CELL_NORM_NONE: dc += dn
 *   (4) dc = 0 where |c| before the clip > cell_clip; dc' = dc s(f)
 *   (5) da_f = dc c' s'(f), da_i = dc tanh(g) s'(i), da_o = do s'(o), da_g = dc s(i) (1 - tanh(g)^2), s' = s (1 - s)
 *   GRU, with n the tanh of cnorm_cell:
 *   (6) `keep`: da_z = dh (h' - n) s'(z), dh' += dh s(z), dn = dh (1 - s(z)) (1 - n^2)
 *       else:   da_z = dh (n - h') s'(z), dh' += dh (1 - s(z)), dn = dh s(z) (1 - n^2)
 *   (7) CNORM_RESET_AFTER: da_n of x = dn, da_n of h = dn s(r); da_r = dn (a_n of h + bias_n) s'(r)
 *       CNORM_RESET_CANDIDATE: da_n = dn s(r), da_r = dn a_n s'(r)
 *       CNORM_RESET_BEFORE: da_n = dn, u = W_n^T dn, da_r = u h' s'(r), dh' += u s(r)
 *   Other functions than s and tanh have their own derivatives in (3) to (8), 0 where |argument| > clip.
 *   RNN:
 *   (8) da = dh f'(a); relu'(0) = 0
 *   Scope, with q = z rstd of one of the two products, z = W x + inside, rstd = 1/sqrt(mean z^2 + eps), z centred:
 *   (9) dbias = da, dgain = da q, dq = da gain, dz = rstd (dq - mean dq - q mean(dq q)), dinside = dz
 *       with CNORM_SCOPE_NONE: dz = da
 *  (10) dh' += W_h^T dz_h, dx = W_x^T dz_x
 *  (11) dW = sum over rows of dz x^T. Since (9) subtracts the mean from dz, this is the gradient of W before centring
 * LN' is cnorm_layer_norm_backward. A statistic that leaves the range of float32 is computed again in float64, as
 * in the forward pass. Setting a value below 2^-100 to 0 counts as the identity: its gradient is passed on.
 */
#ifndef CNORM_TRAIN_H
#define CNORM_TRAIN_H

#include "cnorm_rnn.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct cnorm_tape {
    const cnorm_layer *layers;
    int count;
    ptrdiff_t steps, batch; /* capacity of the memory */
    float *memory;          /* [cnorm_tape_floats], aligned to CNORM_ALIGN */
} cnorm_tape;

/* 0 if a size is not positive or too large. `memory` is not read. */
ptrdiff_t cnorm_tape_floats(const cnorm_tape *tape);

/* Scratch of cnorm_run_tape, 0 if there is no layer; only the layers are read. */
ptrdiff_t cnorm_run_tape_floats(const cnorm_tape *tape);

/* x [steps, batch, inputs] -> y [steps, batch, outputs], recorded from step `first` of the tape on. state [batch, state
 * floats] is advanced; it is aligned to CNORM_ALIGN, and so is each of its rows. y must not overlap x. */
cnorm_status cnorm_run_tape(const cnorm_tape *tape, ptrdiff_t first, ptrdiff_t steps, const float *x, float *state,
                            float *scratch, float *y);

/* Drops the steps before `first`: moves steps [first, end) to the start of the tape. */
cnorm_status cnorm_tape_drop(const cnorm_tape *tape, ptrdiff_t first, ptrdiff_t end);

/* Outputs for the gradients of one layer, which are overwritten: in the layouts that cnorm_matrix_pack and
 * cnorm_cell take, row by row. Only the struct of the layer's kind is read; NULL for arrays that the layer lacks or the
 * caller does not want. */
typedef struct cnorm_gradient {
    struct cnorm_linear_gradient {
        float *weight, *bias; /* [units, cols], [units] */
    } linear;
    struct cnorm_cell_gradient {
        float *weight_x, *weight_h, *weight_n, *weight_p;    /* [gates * units, cols] of the matrix */
        float *inside_x, *inside_h, *gain_x, *gain_h, *bias; /* [gates, padded] */
        float *bias_n, *gain_c, *bias_c, *bias_p;            /* [padded] */
    } cell;                                                  /* of CNORM_LAYER_POSITIONS, too */
    struct cnorm_norm_gradient {
        float *gain, *bias; /* [n] */
    } norm;
    struct cnorm_scale_gradient {
        float *weight; /* [n] */
    } scale;
    struct cnorm_activation_gradient {
        float *slope; /* [n], CNORM_ACTIVATION_PRELU only */
    } activation;
    struct cnorm_conv_gradient {
        float *weight;        /* [outputs, taps * channels]; transposed [taps * outputs, channels] */
        float *kernel, *bias; /* [taps, padded channels], [outputs] */
    } causal_conv, conv, conv_transpose;
    struct cnorm_embedding_gradient {
        float *weight; /* [units, tokens] */
    } embedding;
} cnorm_gradient;

/* The gradients of one cell over several tapes, for steps that are computed in separate calls: each backward pass gets
 * the same `sums` and adds to them, then cnorm_sum_gradients computes the gradients. The bits are those of one tape of
 * all their steps, if `tapes` is in the order of the steps and the backward passes ran from the last to the first. */
typedef struct cnorm_sums {
    float *memory;  /* [cnorm_sums_floats], aligned to CNORM_ALIGN; zero before the first backward pass */
    ptrdiff_t rows; /* of the block that is not full; 0 before the first */
} cnorm_sums;

typedef struct cnorm_backward {
    ptrdiff_t first, steps;          /* of the tape */
    const float *dy;                 /* [steps, batch, outputs] */
    float *dx;                       /* [steps, batch, inputs] or NULL; does not overlap dy */
    float *dstate;                   /* [batch, state floats]: in, the gradient of the state after the last step; out,
                                        that of the state before the first; padding is 0. NULL if there is no state */
    const cnorm_gradient *gradients; /* [count]; NULL with sums */
    float *scratch;                  /* [cnorm_backward_floats], aligned to CNORM_ALIGN */
    cnorm_sums *sums;                /* NULL, or those of a network that is one cell */
} cnorm_backward;

ptrdiff_t cnorm_backward_floats(const cnorm_tape *tape);
cnorm_status cnorm_run_backward(const cnorm_tape *tape, const cnorm_backward *call);

/* 0 if the network is not one cell */
ptrdiff_t cnorm_sums_floats(const cnorm_layer *layers, int count);
/* Tapes of the same layer, whose backward passes ran over all their steps; scratch as for cnorm_run_backward. */
cnorm_status cnorm_sum_gradients(const cnorm_tape *const *tapes, ptrdiff_t count, cnorm_sums *sums,
                                 const cnorm_gradient *gradient, float *scratch);

/* Adam, Kingma and Ba, arXiv:1412.6980, Algorithm 1, in the order of its equations; `rate` is the learning rate, the
 * two corrections are 1 - beta^t in float64, for step t. m and v [n] start at zero. weight -= rate mhat /
 * (sqrt(vhat) + eps) */
typedef struct cnorm_adam {
    double rate, beta1, beta2, eps;
    double correction1, correction2;
} cnorm_adam;
cnorm_status cnorm_adam_update(const cnorm_adam *adam, ptrdiff_t n, const float *gradient, double scale, float *weight,
                               float *m, float *v);
/* velocity = momentum velocity + gradient, weight -= rate velocity; velocity [n] may be NULL if momentum is 0.
 * Both optimisers multiply the gradient by `scale` first. */
cnorm_status cnorm_sgd_update(double rate, double momentum, ptrdiff_t n, const float *gradient, double scale,
                              float *weight, float *velocity);
/* sum of squares of g [n] in float64, blocks of 4096 added in order */
double cnorm_square_sum(ptrdiff_t n, const float *g);

#ifdef __cplusplus
}
#endif
#endif
