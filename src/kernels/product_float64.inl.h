/* The float64 path of a cell's products, for rows whose squares in float32 overflow or underflow. */
#ifndef CNORM_PRODUCT_FLOAT64_INL_H
#define CNORM_PRODUCT_FLOAT64_INL_H

#include "matvec.inl.h"

/* W x + inside */
typedef struct product_term {
    const cnorm_matrix *w;
    const float *x, *inside;
} product_term;

/* sum + row r of W x, in float64. int8 weights: the same integer sum as in float32, times scale[r] g in float64. */
INLINE double f64_sum(const product_term *term, int8_scale scale, ptrdiff_t r, double sum)
{
    const cnorm_matrix *w = term->w;
    const ptrdiff_t panel = r / PANEL * w->cols * PANEL, lane = r % PANEL;
    if (w->type == CNORM_WEIGHT_I8) {
        const uint8_t *at = int8_weights(w) + r / PANEL * ((w->cols + 3) / 4 * 4) * PANEL + lane * 4;
        double zi = 0;
        for (ptrdiff_t k = 0; k < w->cols && scale.to_levels > 0; ++k)
            zi += (at[k / 4 * 4 * PANEL + k % 4] - CNORM_INT8_BIAS) * rounded_to_int(term->x[k] * scale.to_levels);
        sum += zi * ((double)((const float *)w->panels)[r] * (double)scale.from_levels);
    } else if (w->type == CNORM_WEIGHT_F16) {
        const uint16_t *at = (const uint16_t *)w->panels + panel + lane;
        for (ptrdiff_t k = 0; k < w->cols; ++k) sum += (double)value_f16(at[k * PANEL]) * (double)term->x[k];
    } else {
        const float *at = (const float *)w->panels + panel + lane;
        for (ptrdiff_t k = 0; k < w->cols; ++k) sum += (double)at[k * PANEL] * (double)term->x[k];
    }
    return sum;
}

/* (2) and (3) where squares in float32 overflow or underflow: z becomes z r, computed in float64 and rounded once.
 * Returns r. */
RARE double f64_product(const product_term *terms, int count, ptrdiff_t start, ptrdiff_t rows, double n, double eps,
                      float *z)
{
    double squares = 0, rstd = 0;
    int8_scale scales[2] = {{0, 0}};
    for (int i = 0; i < count; ++i) {
        for (ptrdiff_t k = 0; k < terms[i].w->cols; ++k)
            if (!(fabsf(terms[i].x[k]) <= 0x1.fffffep127f)) rstd = (double)NAN;
        if (terms[i].w->type == CNORM_WEIGHT_I8) scales[i] = int8_scale_of(terms[i].w->cols, terms[i].x, terms[i].w->levels);
    }
    for (int sweep = rstd == 0 ? 0 : 1; sweep < 2; ++sweep) {
        for (ptrdiff_t r = start; r < start + rows; ++r) {
            double sum = 0;
            for (int i = 0; i < count && rstd == rstd; ++i)
                sum += f64_sum(&terms[i], scales[i], r, terms[i].inside ? (double)terms[i].inside[r] : 0);
            if (sweep == 0) squares += sum * sum;
            else z[r] = (float)(sum * rstd);
        }
        const double var_eps = squares / n + eps;
        if (sweep == 0) rstd = var_eps == 0 ? 0 : 1.0 / sqrt(var_eps);
    }
    return rstd;
}

#endif
