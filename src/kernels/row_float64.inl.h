/* (3) of layer_norm.inl.h: rows whose sums or gradients leave the range of T are computed in float64 and rounded once.
 * The backward pass is in row_float64_backward.inl.h. Included once per storage type.
 *
 * float64 rows are scaled by a power of two, so that neither their squares nor eps leave the range. Numbers are widened
 * LANES_F64 at a time. Sums have the order of sweep.inl.h: a lane adds BLOCK terms from zero and that sum to its total, a
 * halving tree adds up the lanes every FOLD elements. */

/* Numbers that are read in lanes: row r is [LANES_F64] at x + r x_stride, of which lanes below n - r step are used. A run of
 * n elements is a tile with step = LANES_F64. A tile of n <= LANES_F64 columns has step 0, and its sums stay in lanes. */
typedef struct {
    const X *dy, *x; /* dy: backward only */
    ptrdiff_t dy_stride, x_stride;
    ptrdiff_t rows, n, step;
    const T *gain, *bias;        /* [n], or NULL; bias: forward only */
    double all_gain, all_bias;   /* of all elements, where they are NULL */
    T *dgain, *dbias;            /* [n] of a run, or NULL: its terms are added with its sums */
    X *out;
    ptrdiff_t out_stride;
} FN(tile);

INLINE FN(tile) FN(run_tile)(const X *dy, const X *x, ptrdiff_t n, X *out) /* gain 1 and bias -0: neutral */
{
    return (FN(tile)){.dy = dy, .x = x, .dy_stride = LANES_F64, .x_stride = LANES_F64, .rows = (n + LANES_F64 - 1) / LANES_F64,
                      .n = n, .step = LANES_F64, .all_gain = 1, .all_bias = -0.0, .out = out, .out_stride = LANES_F64};
}

/* how many of the first `count` of LANES_F64 numbers lie in the vector of VL numbers that begins with the i-th */
INLINE ptrdiff_t FN(in_vector)(ptrdiff_t count, ptrdiff_t i)
{
    return count < i ? 0 : count - i < VL ? count - i : VL;
}

/* `count` numbers, the other lanes zero */
static NOINLINE wide_f64 FN(widened_end)(const X *p, ptrdiff_t count)
{
    wide_f64 w;
    for (int i = 0; i < LANES_F64; i += VL)
        TN(to_f64)(FN(load_range)(p + i, 0, FN(in_vector)(count, i), TN(splat)(0)), w.v + i / VL_F64);
    return w;
}
INLINE wide_f64 FN(widened)(const X *p, ptrdiff_t count)
{
    return count < LANES_F64 ? FN(widened_end)(p, count) : FN(wide_at)(p);
}
/* the first `count` numbers, rounded to T and then to X */
INLINE void FN(put_all)(X *to, const wide_f64 *w)
{
    EACH_VECTOR(i) if (i % (VL / VL_F64) == 0) FN(store)(to + i * VL_F64, TN(from_f64)(w->v + i));
}
static NOINLINE void FN(put_end)(X *to, ptrdiff_t count, const wide_f64 *w)
{
    for (int i = 0; i < LANES_F64; i += VL)
        FN(store_range)(to + i, 0, FN(in_vector)(count, i), TN(from_f64)(w->v + i / VL_F64));
}
INLINE void FN(put_wide)(X *to, ptrdiff_t count, wide_f64 w)
{
    if (count < LANES_F64) {
        const wide_f64 end = w; /* so that w stays in registers */
        FN(put_end)(to, count, &end);
    } else {
        FN(put_all)(to, &w);
    }
}

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

/* x scale - origin */
INLINE wide_f64 FN(from_origin)(const wide_stats *e, wide_f64 x)
{
    EACH_VECTOR(i) x.v[i] = (sizeof(T) == 8 ? x.v[i] * e->scale.v[i] : x.v[i]) - e->origin.v[i];
    return x;
}

/* sums = S, Q of d = x scale - origin in each lane over rows begin to end of a tile */
static NOINLINE void FN(f64_lane_sums)(const FN(tile) *tile, ptrdiff_t begin, ptrdiff_t end, const wide_stats *stats, wide_f64 sums[2])
{
    const FN(tile) t = *tile;
    const wide_stats e = *stats;
    wide_f64 S = wide_of(0), Q = S;
    for (ptrdiff_t r = begin; r < end;) {
        const ptrdiff_t stop = end - r < BLOCK ? end : r + BLOCK;
        wide_f64 s = wide_of(0), q = s;
        for (; r < stop; ++r) {
            const ptrdiff_t count = t.n - r * t.step;
            const wide_f64 d = first_lanes(FN(from_origin)(&e, FN(widened)(t.x + r * t.x_stride, count)), count);
            EACH_VECTOR(i) s.v[i] += d.v[i], q.v[i] += d.v[i] * d.v[i];
        }
        EACH_VECTOR(i) S.v[i] += s.v[i], Q.v[i] += q.v[i];
    }
    sums[0] = S, sums[1] = Q;
}

/* S, Q of d of a run, added to sums */
static NOINLINE void FN(f64_run_sums)(const f64_stats *stats, const X *x, ptrdiff_t n, double sums[2])
{
    enum { ROWS = FOLD / LANES_F64 };
    const wide_stats e = wide_stats_of(stats);
    const FN(tile) t = FN(run_tile)(NULL, x, n, NULL);
    for (ptrdiff_t r = 0; r < t.rows; r += ROWS) {
        wide_f64 lanes[2];
        FN(f64_lane_sums)(&t, r, t.rows - r < ROWS ? t.rows : r + ROWS, &e, lanes);
        sums[0] += tree_f64(lanes[0].v);
        sums[1] += tree_f64(lanes[1].v);
    }
}

/* The mean and rstd from the sums of n deviations from the origin. True where a sweep about this mean is needed: the last one
 * was about an element K, and (mean - K)^2 > var costs bits. Where T is float, float64 has bits to spare. */
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

/* (3): the statistics of any row, from a sweep about its first element and, if needed, one about the mean, origin + delta */
RARE f64_stats FN(f64_row_stats)(const X *x, ptrdiff_t n, double eps, int centred)
{
    f64_stats e = {.scale = FN(scale_of)(x, n)};
    if (centred) e.origin = (double)FN(value)(x[0]) * e.scale;
    for (int sweep = 0; sweep < 2; ++sweep) {
        double sums[2] = {0};
        FN(f64_run_sums)(&e, x, n, sums);
        if (!FN(f64_mean_and_rstd)(&e, sums, (double)n, eps, centred)) break;
    }
    return e;
}

/* The backward pass knows stats but not eps. A normal rstd includes eps and is used as it is, 0 and NaN are kept. One beyond
 * that range means that eps was negligible: it is computed again with eps = 0. The mean is computed again where its pair may
 * have lost bits to subnormals. False where a row's statistics must be computed again, and then given to f64_keep_rstd. */
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
