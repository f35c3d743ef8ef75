/* Weight normalisation of the rows w [n] of a weight matrix (Salimans, Kingma 2016, arXiv:1602.07868):
 * v = g w/|w|, |w|^2 = Q as in layer_norm.inl.h (1) about zero; a row of zeros gives zeros.
 * Backward, with u = w/|w|: dg = sum dv u, dw = g/|w| (dv - u dg).
 * A row whose Q or g/|w| leaves the range of T is done in float64, scaled by a power of two.
 */

/* 1/|w 2^power|, or 0 for a row of zeros */
RARE double FN(f64_inverse_norm)(const T *w, ptrdiff_t n, int *power)
{
    double piece[FN(PIECE)], squares = 0, largest = 0, scale = 1;
    if (sizeof(T) == 8) { /* squares of floats need no scale in float64 */
        for (ptrdiff_t j = 0; j < n; ++j) largest = larger_finite(largest, (double)w[j]);
        scale = scale_for(largest, 0);
    }
    *power = ilogb(scale);
    for (ptrdiff_t j = 0; j < n; j += FN(PIECE)) {
        const ptrdiff_t len = n - j < FN(PIECE) ? n - j : FN(PIECE);
        for (ptrdiff_t i = 0; i < len; ++i) piece[i] = (double)w[j + i] * scale;
        squares += run_sums_f64(piece, len, 0).b;
    }
    return squares == 0 ? 0 : 1.0 / sqrt(squares);
}

/* a b c 2^power. For float64 each partial product could leave the range, so exponents are kept
 * apart; for float32 none can, and power is 0. For float64 the factors are multiplied in the order
 * of rows in range, so that scaling w by a power of two changes no bit of v. */
INLINE double FN(product)(double a, double b, double c, int power)
{
    if (sizeof(T) == 4) return c * b * a;
    int of_a = 0, of_b = 0, of_c = 0;
    a = frexp(a, &of_a), b = frexp(b, &of_b), c = frexp(c, &of_c);
    return ldexp(a * b * c, of_a + of_b + of_c + power);
}

/* 1/|w|, or 0 where the row needs the float64 path */
INLINE T FN(inverse_norm)(const T *w, ptrdiff_t n, double g, T *scale)
{
    const double Q = FN(run_sums)(w, n, 0).b;
    if (!(Q >= (double)n * Q_MIN && Q <= Q_MAX)) return 0; /* NaN takes the float64 path, too */
    const double inverse = 1.0 / sqrt(Q);
    *scale = (T)(g * inverse);
    return FN(representable)(0, *scale, g, inverse) && FN(representable)(0, (T)inverse, 1, inverse)
               ? (T)inverse
               : 0;
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
            int power;
            const double inverse = FN(f64_inverse_norm)(w, call->n, &power);
            for (ptrdiff_t j = 0; j < call->n; ++j)
                v[j] = (T)FN(product)(g, inverse, (double)w[j], power);
        }
    }
}

RARE void FN(f64_weight_backward)(const FN(run) *run, double g, T *dgain)
{
    int power;
    double dg = 0;
    const double inverse = FN(f64_inverse_norm)(run->x, run->n, &power);
    for (ptrdiff_t j = 0; j < run->n; ++j)
        dg += FN(product)((double)run->dy[j], inverse, (double)run->x[j], power);
    for (ptrdiff_t j = 0; j < run->n; ++j) {
        const double off_axis =
            (double)run->dy[j] - FN(product)(dg, inverse, (double)run->x[j], power);
        run->out[j] = (T)FN(product)(g, inverse, off_axis, power);
    }
    *dgain = (T)dg;
}

static void FN(weight_norm_backward)(const cnorm_weight *call)
{
    const T *gain = call->gain;
    T *dgain = call->dgain;
    for (ptrdiff_t row = 0; row < call->rows; ++row) {
        const double g = gain ? (double)gain[row] : 1.0;
        T st[3] = {0}, scale;
        const FN(run) run = {call->n, (const T *)call->dv + row * call->dv_stride,
                             (const T *)call->w + row * call->w_stride,
                             (T *)call->out + row * call->out_stride, st};
        st[2] = FN(inverse_norm)(run.x, call->n, g, &scale);
        if (st[2] != 0) {
            double sum, dg;
            FN(run_gradient_sums)(&run, NULL, &sum, &dg);
            /* gradient_run multiplies the bracket by 1/|w|, so g goes inside it */
            FN(gradient_run)(&run, (T)g, 0, (T)(g * dg), NULL);
            dgain[row] = (T)dg;
        } else {
            FN(f64_weight_backward)(&run, g, &dgain[row]);
        }
    }
}
