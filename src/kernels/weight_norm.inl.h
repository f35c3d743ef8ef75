/* Weight normalisation of the rows w [n] of a weight matrix (Salimans, Kingma 2016, arXiv:1602.07868):
 * v = g w/|w|, |w|^2 = Q as in layer_norm.inl.h (1) about zero; a row of zeros gives zeros.
 * Backward, with u = w/|w|: dg = sum dv u, dw = g/|w| (dv - u dg).
 * A row whose Q or g/|w| leaves the range of T is done in float64: weight_float64.inl.h. */

/* 1/|w|, or 0 where the row needs the float64 path */
INLINE T FN(inverse_norm)(const T *w, ptrdiff_t n, double g, T *scale)
{
    const double Q = FN(run_sums)(w, n, 0, 0).b;
    if (!(Q >= (double)n * Q_MIN && Q <= Q_MAX)) return 0; /* NaN takes the float64 path, too */
    const double inverse = 1.0 / sqrt(Q);
    *scale = (T)(g * inverse);
    return FN(representable)(0, *scale, g, inverse) && FN(representable)(0, (T)inverse, 1, inverse) ? (T)inverse : 0;
}

static void FN(weight_norm)(const cnorm_weight *call)
{
    const T *w = call->w, *gain = call->gain;
    T *v = call->out;
    for (ptrdiff_t row = 0; row < call->rows; ++row, w += call->w_stride, v += call->out_stride) {
        const double g = gain ? (double)gain[row] : 1.0;
        T st[3] = {0};
        if (FN(inverse_norm)(w, call->n, g, &st[2]) != 0) {
            const FN(run) run = {call->n, NULL, w, v, st};
            FN(normalise_run)(&run, 1, -(T)0, NULL);
        } else {
            f64_weight_norm(DTYPE, w, call->n, g, v);
        }
    }
}

static void FN(weight_norm_backward)(const cnorm_weight *call)
{
    const T *gain = call->gain;
    T *dgain = call->dgain;
    for (ptrdiff_t row = 0; row < call->rows; ++row) {
        const double g = gain ? (double)gain[row] : 1.0;
        T st[3] = {0}, scale;
        const FN(run) run = {call->n, (const T *)call->dv + row * call->dv_stride,
                             (const T *)call->w + row * call->w_stride, (T *)call->out + row * call->out_stride, st};
        st[2] = FN(inverse_norm)(run.x, call->n, g, &scale);
        if (st[2] != 0) {
            double sum, dg;
            FN(run_gradient_sums)(&run, NULL, &sum, &dg);
            /* gradient_run multiplies the bracket by 1/|w|, so g goes inside it */
            FN(gradient_run)(&run, (T)g, 0, (T)(g * dg), NULL);
            dgain[row] = (T)dg;
        } else {
            dgain[row] = (T)f64_weight_backward(run_view(DTYPE, run.dy, run.x, run.n, run.out), g);
        }
    }
}
