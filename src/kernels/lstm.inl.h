/* One step of the layer-normalised LSTM of Ba, Kiros, Hinton 2016, Eq. 20-22, gates f, i, o, g of H units each:
 *
 *   (1) zx = W_x x,  zh = W_h h           each with the sum of its squares, W centred when it was packed
 *   (2) rx = 1/sqrt(mean zx^2 + eps)      so that LN(W_x x) = zx rx gain_x + bias_x; the same for h
 *   (3) (f, i, o, g) = zh rh gain_h + zx rx gain_x + bias      bias holds bias + bias_x + bias_h
 *   (4) c = sigmoid(f) c + sigmoid(i) tanh(g)
 *   (5) h = sigmoid(o) tanh(LN(c))
 * The next step sees the c of (4). A stored |c| or |h| below 2^-100 becomes 0: 0.9 c would stick at a subnormal.
 * Gates are padded to GATE_PAD units; padding is zero in weights, gains and biases, and so stays zero in the state.
 */
#ifndef CNORM_LSTM_INL_H
#define CNORM_LSTM_INL_H

#include "activation.inl.h"
#include "matvec.inl.h"

INLINE f32v without_tiny(f32v v)
{
    const f32v tiny = splat_f32(0x1p-100f);
    return (f32v)((i32v)v & ~((i32v)(v < tiny) & (i32v)(v > -tiny)));
}

/* (1) and (2) where float32 squares overflow or drown: z becomes z rstd, in float64 and rounded once */
RARE void normalised_product(const cnorm_matrix *w, const float *x, double n, double eps, float *z)
{
    const ptrdiff_t rows = packed_rows(w);
    double squares = 0, rstd = 0;
    for (int sweep = 0; sweep < 2; ++sweep) {
        for (ptrdiff_t r = 0; r < rows; ++r) {
            const float *at = w->panels + r / PANEL * w->cols * PANEL + r % PANEL;
            double sum = 0;
            for (ptrdiff_t k = 0; k < w->cols; ++k) sum += (double)at[k * PANEL] * (double)x[k];
            if (sweep == 0) squares += sum * sum;
            else z[r] = (float)(sum * rstd);
        }
        const double spread = squares / n + eps;
        rstd = spread == 0 ? 0 : 1.0 / sqrt(spread);
    }
}

/* (1) and (2): z = W x, returns its rstd */
INLINE float product_for_norm(const cnorm_matrix *w, const float *x, double eps, float *z)
{
    const double n = (double)(w->gates * w->units), squares = matvec_squares(w, x, z);
    if (squares <= Q_MAX_F32 && (squares >= n * Q_MIN_F32 || eps >= Q_MIN_F32))
        return (float)(1.0 / sqrt(squares / n + eps));
    normalised_product(w, x, n, eps, z);
    return 1;
}

/* x [inputs]; state h [padded H], c [padded H]; scratch of lstm_scratch floats */
static void lstm_step(const cnorm_lstm *cell, const float *x, float *state, float *scratch)
{
    const ptrdiff_t units = cell->weight_h.units, width = padded_units(units);
    const double eps = (double)cell->eps;
    float *h = state, *c = state + width;
    float *zx = scratch, *zh = zx + packed_rows(&cell->weight_x), *normed = zh + packed_rows(&cell->weight_h);
    const f32v rx = splat_f32(product_for_norm(&cell->weight_x, x, eps, zx));
    const f32v rh = splat_f32(product_for_norm(&cell->weight_h, h, eps, zh));
    for (ptrdiff_t j = 0; j < width; j += VL_F32) {
        f32v gate[4];
#pragma GCC unroll 4
        for (int g = 0; g < 4; ++g) { /* (3) */
            const ptrdiff_t at = g * width + j;
            gate[g] = (load_f32(zh + at) * rh) * load_f32(cell->gain_h + at) +
                      (load_f32(zx + at) * rx) * load_f32(cell->gain_x + at) + load_f32(cell->bias + at);
        }
        const f32v carry = sigmoid_v(gate[0]) * load_f32(c + j) + sigmoid_v(gate[1]) * tanh_v(gate[3]);
        store_f32(c + j, without_tiny(carry)); /* (4) */
        store_f32(zx + j, sigmoid_v(gate[2]));
        store_f32(normed + j, splat_f32(0));
    }
    layer_norm_f32(&(cnorm_norm){.rows = 1, .n = units, .x = c, .gain = cell->gain_c, .bias = cell->bias_c,
                                 .eps = eps, .y = normed});
    for (ptrdiff_t j = 0; j < width; j += VL_F32) /* (5) */
        store_f32(h + j, without_tiny(load_f32(zx + j) * tanh_v(load_f32(normed + j))));
}

/* y [outputs] = W x + bias */
static void linear_step(const cnorm_linear *layer, const float *x, float *y, float *scratch)
{
    (void)matvec_squares(&layer->weight, x, scratch);
    for (ptrdiff_t j = 0; j < layer->weight.units; ++j) y[j] = scratch[j] + (layer->bias ? layer->bias[j] : 0.0f);
}

#endif
