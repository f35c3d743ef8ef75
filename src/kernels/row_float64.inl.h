/* (3) of layer_norm.inl.h: rows whose sums or gradients leave the range of T are computed in float64 and rounded once.
 * Rows, groups, channels and weights are put together from these functions. Included once, for all storage types.
 *
 * float64 rows are scaled by a power of two, so that neither their squares nor eps leave the range. Sums are those of
 * view_float64.inl.h. */

/* The smallest and largest normal numbers of the compute type, and the largest rstd at which the mean K + delta has
 * lost no bits that matter to subnormals */
INLINE double rstd_tiny(cnorm_dtype type) { return type == CNORM_F64 ? 0x1p-1022 : 0x1p-126; }
INLINE double rstd_huge(cnorm_dtype type) { return type == CNORM_F64 ? 0x1.fffffffffffffp1023 : 0x1.fffffep127; }
INLINE double rstd_exact_mean(cnorm_dtype type) { return type == CNORM_F64 ? 0x1p1000 : 0x1p100; }

/* the largest finite |x| of each lane of a view of float64 */
static NOINLINE void f64_lane_largest(const f64_view *view, double to[LANES_F64])
{
    const f64v most = splat_f64(0x1.fffffffffffffp1023);
    wide_f64 largest = wide_of(0), x[BLOCK];
    for (ptrdiff_t first = 0; first < view->rows; first += BLOCK) {
        const f64_block b = block_from(view, first, view->rows);
        load_x(b, x);
        for (ptrdiff_t r = 0; r < b.count; ++r)
            EACH(i, LANE_VECTORS) {
                const f64v size = (f64v)((i64v)x[r].v[i] & INT64_MAX);
                const i64v larger = (i64v)(size > largest.v[i]) & (i64v)(size <= most);
                largest.v[i] = (f64v)(((i64v)size & larger) | ((i64v)largest.v[i] & ~larger));
            }
    }
    memcpy(to, largest.v, sizeof largest);
}

/* the largest finite |x| of a run of float64 */
static NOINLINE double f64_largest(const void *x, ptrdiff_t n)
{
    const f64_view view = run_view(CNORM_F64, NULL, x, n, NULL);
    double lanes[LANES_F64], largest = 0;
    f64_lane_largest(&view, lanes);
    for (int i = 0; i < LANES_F64; ++i) largest = larger_finite(largest, lanes[i]);
    return largest;
}

/* the power of two that brings it near 1; 1 where x is not float64 */
INLINE double f64_scale_of(cnorm_dtype type, const void *x, ptrdiff_t n)
{
    return type == CNORM_F64 ? scale_for(f64_largest(x, n)) : 1;
}

/* The mean and rstd from the sums of n deviations from the origin, S in a, and of their squares, Q in b. Returns true
 * if a second sweep, about the mean, is needed: S^2/n is then so much larger than m2 = Q - S^2/n that the difference
 * loses digits (larger than m2 for float64, than 2^20 m2 for narrower types, for which it has 29 bits to spare). */
static NOINLINE int f64_mean_and_rstd(cnorm_dtype type, f64_stats *e, row_sums sums, double n, double eps, int centred)
{
    const double correction = centred ? sums.a / n : 0, first = e->origin, lost = sums.a * correction;
    const double m2 = sums.b - lost, var = m2 / n;
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
    return centred && lost > (type == CNORM_F64 ? 1 : 0x1p20) * m2;
}

/* (3): the statistics of any row, from a sweep about its first element and, if needed, one about the mean, origin +
 * delta */
static NOINLINE f64_stats f64_row_stats(cnorm_dtype type, const void *x, ptrdiff_t n, double eps, int centred)
{
    const f64_view view = run_view(type, NULL, x, n, NULL);
    wide_f64 first[BLOCK];
    f64_stats e = {.scale = f64_scale_of(type, x, n)};
    load_x((f64_block){&view, 0, 1}, first);
    if (centred) e.origin = first[0].v[0][0] * e.scale;
    if (f64_mean_and_rstd(type, &e, f64_run_sums(&view, &e), (double)n, eps, centred))
        (void)f64_mean_and_rstd(type, &e, f64_run_sums(&view, &e), (double)n, eps, centred);
    return e;
}

/* The backward pass knows stats but not eps. A normal rstd includes eps and is used as it is, 0 and NaN are kept.
 * One beyond that range means that eps was negligible: it is computed again with eps = 0. The mean is computed again
 * where its pair may have lost bits to subnormals. False where a row's statistics must be computed again, and then
 * given to f64_keep_rstd. st: [3] of the compute type. */
static NOINLINE int f64_stats_from(cnorm_dtype type, const void *st, f64_stats *e)
{
    const double K = element(type, st, 0), delta = element(type, st, 1), mean = K + delta;
    const double rstd = mean == mean ? element(type, st, 2) : mean;
    const double scale = type == CNORM_F64 && rstd < 1 ? 0.25 : 1; /* x - K stays finite in float64 */
    *e = (f64_stats){scale, K * scale, delta * scale, rstd / scale, rstd};
    return rstd != rstd || rstd == 0 || (rstd >= rstd_tiny(type) && rstd <= rstd_exact_mean(type));
}
INLINE void f64_keep_rstd(cnorm_dtype type, double rstd, f64_stats *e)
{
    if (!(rstd >= rstd_tiny(type) && rstd <= rstd_huge(type))) return;
    e->inv_std_dev = rstd;
    if (e->rstd != 0) e->rstd = e->inv_std_dev / e->scale; /* 0: a constant row; the quotient could overflow */
}

static NOINLINE f64_stats f64_given_stats(cnorm_dtype type, const void *x, ptrdiff_t n, const void *st, int centred)
{
    f64_stats e;
    if (f64_stats_from(type, st, &e)) return e;
    e = f64_row_stats(type, x, n, 0, centred);
    f64_keep_rstd(type, element(type, st, 2), &e);
    return e;
}

/* st [3] of the compute type: K, delta and rstd */
static NOINLINE void f64_store_stats(cnorm_dtype type, const f64_stats *e, void *st)
{
    const double unit = 1 / e->scale;
    set_element(type, st, 0, (e->origin + e->delta) * unit);
    set_element(type, st, 1, ((e->origin - element(type, st, 0) * e->scale) + e->delta) * unit);
    set_element(type, st, 2, e->inv_std_dev);
}

/* (4), or with d (6), in float64, rounded once to T */
static NOINLINE void f64_write(const f64_view *view, const wide_stats *e, const wide_gradient *d)
{
    for (ptrdiff_t first = 0; first < view->rows; first += BLOCK) {
        const f64_block b = block_from(view, first, view->rows);
        wide_f64 out[BLOCK], xhat[BLOCK], bias[BLOCK];
        if (d) {
            f64_terms(b, e, out, xhat);
        } else {
            load_x(b, xhat);
            load_params(b, view->gain, view->all_gain, out);
            load_params(b, view->bias, view->all_bias, bias);
        }
        for (ptrdiff_t r = 0; r < b.count && !d; ++r) {
            xhat[r] = f64_xhat(e, xhat[r]);
            EACH(i, LANE_VECTORS) out[r].v[i] = xhat[r].v[i] * out[r].v[i] + bias[r].v[i];
        }
        for (ptrdiff_t r = 0; r < b.count && d; ++r)
            EACH(i, LANE_VECTORS) {
                const f64v bracket = (out[r].v[i] - d->G.v[i]) - xhat[r].v[i] * d->H.v[i];
                out[r].v[i] = bracket * d->rstd.v[i] * d->factor.v[i] * d->factor.v[i] * d->last_factor.v[i];
            }
        store_out(b, out);
    }
}
