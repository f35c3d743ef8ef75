/* Weight normalisation of the rows w [n] of a weight matrix (Salimans, Kingma 2016, arXiv:1602.07868):
 * v = g w/|w|, |w|^2 = Q as in layer_norm.inl.h (1) about zero; a row of zeros gives zeros.
 * Backward, with u = w/|w|: dg = sum dv u, dw = g/|w| (dv - u dg).
 * A row whose Q or g/|w| leaves the range of T is done in float64, scaled by a power of two.
 */

/* Statistics about 0 whose rstd is 1/|w scale|, or 0 for a row of zeros */
RARE f64_stats FN(f64_norm_of)(const T *w, ptrdiff_t n)
{
    f64_stats e = {.scale = FN(scale_of)((const X *)w, n)};
    const FN(tile) t = FN(run_tile)(NULL, w, n, NULL);
    double sums[2] = {0};
    FN(f64_run_sums)(&t, &e, NULL, sums);
    if (sums[1] != 0) e.rstd = 1.0 / sqrt(sums[1]);
    e.inv_std_dev = e.rstd * e.scale;
    return e;
}

/* v = g w/|w| in float64. Where T is float64 each product of two factors could leave the range: w is multiplied by
 * up, then by the rounded product of the others, which is near 1, then by down. The order is that of rows in range,
 * so that scaling w by a power of two changes no bit of v. */
RARE void FN(f64_weight_norm)(const T *w, ptrdiff_t n, double g, T *v)
{
    const f64_stats e = FN(f64_norm_of)(w, n);
    int power = 0;
    const double of_g = frexp(g, &power), factor = sizeof(T) == 8 ? of_g * e.rstd : e.rstd;
    power += exponent_of(e.scale);
    const double third = power_of_two(power / 3), rest = power_of_two(power - power / 3 * 2);
    for (ptrdiff_t j = 0; j < n; j += LANES_F64) {
        wide_f64 to = FN(widened)(w + j, n - j);
        EACH_VECTOR(i)
        {
            f64v at = to.v[i];
            if (sizeof(T) < 8) at = at * splat_f64(factor) * splat_f64(g);
            else if (power > 0) at = at * splat_f64(third) * splat_f64(third) * splat_f64(rest) * splat_f64(factor);
            else at = at * splat_f64(factor) * splat_f64(third) * splat_f64(third) * splat_f64(rest);
            to.v[i] = at;
        }
        FN(put_wide)(v + j, n - j, to);
    }
}

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
            FN(f64_weight_norm)(w, call->n, g, v);
        }
    }
}

/* layer norm's (5) and (6) about 0, with a sum in place of the mean */
RARE void FN(f64_weight_backward)(const FN(run) *run, double g, T *dgain)
{
    const ptrdiff_t n = run->n;
    const f64_stats e = FN(f64_norm_of)(run->x, n);
    const wide_stats lanes = wide_stats_of(&e);
    const f64_scales scales = {FN(scale_of)(run->dy, n), FN(scale_of)((const X *)&(T){(T)g}, 1)};
    FN(tile) t = FN(run_tile)(run->dy, run->x, n, run->out);
    double sums[2] = {0};
    FN(f64_run_sums)(&t, &e, &(f64_scales){scales.dy, 1}, sums);
    const f64_gradient of_row =
        f64_gradient_of(&e, 0, sums[1] * (g * scales.gain), -exponent_of(scales.dy) - exponent_of(scales.gain));
    const wide_gradient d = wide_gradient_of(&of_row, scales);
    t.all_gain = g;
    FN(f64_write_gradient)(&t, &lanes, &d);
    *dgain = (T)(sums[1] / scales.dy);
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
            FN(f64_weight_backward)(&run, g, &dgain[row]);
        }
    }
}
