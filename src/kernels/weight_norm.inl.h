/* Weight normalisation of the rows w [n] of a weight matrix (Salimans, Kingma 2016, arXiv:1602.07868):
 * v = g w/|w|, |w|^2 = Q as in layer_norm.inl.h (1) about zero; a row of zeros gives zeros.
 * Backward, with u = w/|w|: dg = sum dv u, dw = g/|w| (dv - u dg).
 * A row whose Q or g/|w| T can't carry is done in float64, scaled by a power of two.
 */

/* w scale = u |w| scale; 1/|w scale|, or 0 for a row of zeros */
RARE double FN(f64_norm)(const T *w, ptrdiff_t n, double *scale)
{
    double piece[FN(PIECE)], squares = 0, S, Q, largest = 0;
    if (sizeof(T) == 8) /* float64 needs no scale for float data */
        for (ptrdiff_t j = 0; j < n; ++j) largest = larger_finite(largest, (double)w[j]);
    *scale = sizeof(T) == 8 ? scale_for(largest, 0) : 1;
    for (ptrdiff_t j = 0; j < n; j += FN(PIECE)) {
        const ptrdiff_t len = n - j < FN(PIECE) ? n - j : FN(PIECE);
        for (ptrdiff_t i = 0; i < len; ++i) piece[i] = (double)w[j + i] * *scale;
        run_sums_f64(piece, len, 0, &S, &Q);
        squares += Q;
    }
    return squares == 0 ? 0 : 1.0 / sqrt(squares);
}

/* 1/|w|, or 0 where T can't carry the row */
INLINE T FN(inverse_norm)(const T *w, ptrdiff_t n, double g, T *scale)
{
    double S, Q;
    FN(run_sums)(w, n, 0, &S, &Q);
    if (!(Q >= (double)n * Q_MIN && Q <= Q_MAX)) return 0; /* NaN goes the slow way too */
    const double inverse = 1.0 / sqrt(Q);
    *scale = (T)(g * inverse);
    return FN(carried)(0, *scale, g, inverse) && FN(carried)(0, (T)inverse, 1, inverse) ? (T)inverse : 0;
}

static void FN(weight_norm)(ptrdiff_t rows, ptrdiff_t n, const void *pw, ptrdiff_t w_stride, const void *pgain,
                            void *pv, ptrdiff_t v_stride)
{
    const T *w = pw, *gain = pgain;
    T *v = pv;
    for (ptrdiff_t row = 0; row < rows; ++row, w += w_stride, v += v_stride) {
        const double g = gain ? (double)gain[row] : 1.0;
        T st[3] = {0};
        if (FN(inverse_norm)(w, n, g, &st[2]) != 0) {
            FN(normalise_run)(w, n, st, 1, -(T)0, v, NULL);
        } else {
            double scale;
            const double inverse = FN(f64_norm)(w, n, &scale);
            for (ptrdiff_t j = 0; j < n; ++j) v[j] = (T)((double)w[j] * scale * inverse * g);
        }
    }
}

static void FN(weight_norm_backward)(ptrdiff_t rows, ptrdiff_t n, const void *pdv, ptrdiff_t dv_stride, const void *pw,
                                     ptrdiff_t w_stride, const void *pgain, void *pdw, ptrdiff_t dw_stride, void *pdgain)
{
    const T *dv = pdv, *w = pw, *gain = pgain;
    T *dw = pdw, *dgain = pdgain;
    for (ptrdiff_t row = 0; row < rows; ++row, dv += dv_stride, w += w_stride, dw += dw_stride) {
        const double g = gain ? (double)gain[row] : 1.0;
        T st[3] = {0}, scale;
        st[2] = FN(inverse_norm)(w, n, g, &scale);
        if (st[2] != 0) {
            double sum, dg;
            FN(gradient_sums)(n, dv, w, NULL, st, &sum, &dg);
            /* gradient_run has 1/|w| before the bracket: g goes inside */
            FN(gradient_run)(n, dv, w, (T)g, st, 0, (T)(g * dg), dw, NULL);
            dgain[row] = (T)dg;
        } else {
            double power, dg = 0;
            const double inverse = FN(f64_norm)(w, n, &power), g_scale = scale_for(larger_finite(0, g), 0);
            for (ptrdiff_t j = 0; j < n; ++j) dg += (double)dv[j] * ((double)w[j] * power * inverse);
            for (ptrdiff_t j = 0; j < n; ++j) { /* powers of two last, and at once: each by itself may be too much */
                const double off_axis = (double)dv[j] - (double)w[j] * power * inverse * dg;
                dw[j] = (T)ldexp(g * g_scale * (off_axis * inverse), ilogb(power) - ilogb(g_scale));
            }
            dgain[row] = (T)dg;
        }
    }
}
