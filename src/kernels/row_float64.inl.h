/* (3) of layer_norm.inl.h: rows whose sums or gradients leave the range of T are computed in float64 and rounded once.
 * The backward pass is in row_float64_backward.inl.h. Included once per storage type.
 *
 * float64 rows are scaled by a power of two, so that neither their squares nor eps leave the range. Sums are those of
 * tile_float64.inl.h. */

/* the largest finite |x| of each lane of a tile, where T is float64 */
static NOINLINE void FN(f64_lane_largest)(const FN(tile) *t, double to[LANES_F64])
{
    const f64v most = splat_f64(0x1.fffffffffffffp1023);
    wide_f64 largest = wide_of(0);
    for (ptrdiff_t r = 0; r < t->rows && sizeof(T) == 8; ++r) {
        const wide_f64 at = FN(widened)(t->x + r * t->x_stride, t->n - r * t->step);
        EACH_VECTOR(i)
        {
            const f64v size = (f64v)((i64v)at.v[i] & INT64_MAX);
            const i64v larger = (i64v)(size > largest.v[i]) & (i64v)(size <= most);
            largest.v[i] = (f64v)(((i64v)size & larger) | ((i64v)largest.v[i] & ~larger));
        }
    }
    memcpy(to, largest.v, sizeof largest);
}

/* the power of two that brings the largest finite |x| near 1; 1 where T is not float64 */
static double FN(scale_of)(const X *x, ptrdiff_t n)
{
    if (sizeof(T) < 8) return 1;
    const FN(tile) t = FN(run_tile)(NULL, x, n, NULL);
    double lanes[LANES_F64], largest = 0;
    FN(f64_lane_largest)(&t, lanes);
    for (int i = 0; i < LANES_F64; ++i) largest = larger_finite(largest, lanes[i]);
    return scale_for(largest);
}

/* The mean and rstd from the sums of n deviations from the origin. True where a sweep about this mean is needed: the
 * last one was about an element K, and (mean - K)^2 > var costs bits. Where T is float, float64 has bits to spare. */
static NOINLINE int FN(f64_mean_and_rstd)(f64_stats *e, const double sums[2], double n, double eps, int centred)
{
    const double correction = centred ? sums[0] / n : 0, first = e->origin, lost = sums[0] * correction;
    const double m2 = sums[1] - lost, var = m2 / n;
    e->origin = first + correction;
    e->delta = (first - e->origin) + correction;
    const double var_eps = var + eps * e->scale * e->scale;
    if (var <= 0 || var_eps > 0x1p1000) { /* only eps counts, and eps scale^2 could leave the range */
        e->inv_std_dev = eps > 0 ? 1.0 / sqrt(eps) : 0;
        e->rstd = var <= 0 ? 0 : e->inv_std_dev / e->scale;
    } else {
        e->rstd = 1.0 / sqrt(var_eps);
        e->inv_std_dev = e->rstd * e->scale;
    }
    return centred && lost > (sizeof(T) == 8 ? 1 : 0x1p20) * m2;
}

/* (3): the statistics of any row, from a sweep about its first element and, if needed, one about the mean, origin +
 * delta */
RARE f64_stats FN(f64_row_stats)(const X *x, ptrdiff_t n, double eps, int centred)
{
    f64_stats e = {.scale = FN(scale_of)(x, n)};
    if (centred) e.origin = (double)FN(value)(x[0]) * e.scale;
    for (int sweep = 0; sweep < 2; ++sweep) {
        const FN(tile) t = FN(run_tile)(NULL, x, n, NULL);
        double sums[2] = {0};
        FN(f64_run_sums)(&t, &e, NULL, sums);
        if (!FN(f64_mean_and_rstd)(&e, sums, (double)n, eps, centred)) break;
    }
    return e;
}

/* The backward pass knows stats but not eps. A normal rstd includes eps and is used as it is, 0 and NaN are kept.
 * One beyond that range means that eps was negligible: it is computed again with eps = 0. The mean is computed again
 * where its pair may have lost bits to subnormals. False where a row's statistics must be computed again, and then
 * given to f64_keep_rstd. */
INLINE int FN(f64_stats_from)(const T st[3], f64_stats *e)
{
    const T mean = st[0] + st[1], rstd = mean == mean ? st[2] : mean;
    const double scale = sizeof(T) == 8 && rstd < 1 ? 0.25 : 1; /* x - K stays finite in float64 */
    *e = (f64_stats){scale, (double)st[0] * scale, (double)st[1] * scale, (double)rstd / scale, (double)rstd};
    return rstd != rstd || rstd == 0 || (rstd >= RSTD_TINY && rstd <= RSTD_EXACT_MEAN);
}
INLINE void FN(f64_keep_rstd)(T rstd, f64_stats *e)
{
    if (!(rstd >= RSTD_TINY && rstd <= RSTD_HUGE)) return;
    e->inv_std_dev = (double)rstd;
    if (e->rstd != 0) e->rstd = e->inv_std_dev / e->scale; /* 0: a constant row; the quotient could overflow */
}

RARE f64_stats FN(f64_given_stats)(const X *x, ptrdiff_t n, const T st[3], int centred)
{
    f64_stats e;
    if (FN(f64_stats_from)(st, &e)) return e;
    e = FN(f64_row_stats)(x, n, 0, centred);
    FN(f64_keep_rstd)(st[2], &e);
    return e;
}

INLINE void FN(f64_store_stats)(const f64_stats *e, T stats[3])
{
    const double unit = sizeof(T) == 8 ? 1 / e->scale : 1;
    stats[0] = (T)((e->origin + e->delta) * unit);
    stats[1] = (T)(((e->origin - (double)stats[0] * e->scale) + e->delta) * unit);
    stats[2] = (T)e->inv_std_dev;
}

/* (4) in float64, rounded once to T */
RARE void FN(f64_write)(const FN(tile) *tile, const wide_stats *stats)
{
    const FN(tile) t = *tile;
    const wide_stats e = *stats;
    for (ptrdiff_t r = 0; r < t.rows; ++r) {
        const ptrdiff_t j = r * t.step, count = t.n - j;
        wide_f64 v = FN(from_origin)(&e, FN(widened)(t.x + r * t.x_stride, count));
        const wide_f64 gain = t.gain ? TN(widened)(t.gain + j, count) : wide_of(t.all_gain);
        const wide_f64 bias = t.bias ? TN(widened)(t.bias + j, count) : wide_of(t.all_bias);
        EACH_VECTOR(i) v.v[i] = (v.v[i] - e.delta.v[i]) * e.rstd.v[i] * gain.v[i] + bias.v[i];
        FN(put_wide)(t.out + r * t.out_stride, count, v);
    }
}

/* (3) and (4) in float64, rounded once to T */
RARE void FN(f64_norm_row)(const X *x, const cnorm_norm *call, int centred, X *y, T stats[3])
{
    const f64_stats e = FN(f64_row_stats)(x, call->n, call->eps, centred);
    const wide_stats lanes = wide_stats_of(&e);
    FN(tile) t = FN(run_tile)(NULL, x, call->n, y);
    t.gain = call->gain;
    if (centred) t.bias = call->bias;
    FN(f64_write)(&t, &lanes);
    FN(f64_store_stats)(&e, stats);
}
