/* Tiles of numbers that are read as float64, LANES_F64 at a time, and their sums, for the float64 path
 * (row_float64.inl.h). Included once per storage type.
 *
 * Sums have the order of sweep.inl.h: a lane adds BLOCK terms from zero and that sum to its total, a halving tree
 * adds up the lanes every FOLD elements. */

/* Numbers that are read in lanes: row r is [LANES_F64] at x + r x_stride, of which lanes below n - r step are used.
 * A run of n elements is a tile with step = LANES_F64. A tile of n <= LANES_F64 columns has step 0, and its sums
 * stay in lanes. */
typedef struct {
    const X *dy, *x; /* dy: backward only */
    ptrdiff_t dy_stride, x_stride;
    ptrdiff_t rows, n, step;
    const T *gain, *bias;      /* [n], or NULL; bias: forward only */
    double all_gain, all_bias; /* of all elements, where they are NULL */
    T *dgain, *dbias;          /* [n] of a run, or NULL: its terms are added with its sums */
    X *out;
    ptrdiff_t out_stride;
} FN(tile);

INLINE FN(tile) FN(run_tile)(const X *dy, const X *x, ptrdiff_t n, X *out) /* gain 1 and bias -0: neutral */
{
    return (FN(tile)){.dy = dy,
                      .x = x,
                      .dy_stride = LANES_F64,
                      .x_stride = LANES_F64,
                      .rows = (n + LANES_F64 - 1) / LANES_F64,
                      .n = n,
                      .step = LANES_F64,
                      .all_gain = 1,
                      .all_bias = -0.0,
                      .out = out,
                      .out_stride = LANES_F64};
}

/* how many of the first `count` of LANES_F64 numbers lie in the vector of VL numbers that begins with the i-th */
INLINE ptrdiff_t FN(in_vector)(ptrdiff_t count, ptrdiff_t i) { return count < i ? 0 : count - i < VL ? count - i : VL; }

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

/* x scale - origin */
INLINE wide_f64 FN(from_origin)(const wide_stats *e, wide_f64 x)
{
    EACH_VECTOR(i) x.v[i] = (sizeof(T) == 8 ? x.v[i] * e->scale.v[i] : x.v[i]) - e->origin.v[i];
    return x;
}

/* d = x scale - origin of row r of a tile; lanes that are not used are zero */
INLINE wide_f64 FN(f64_deviations)(const FN(tile) *t, ptrdiff_t r, const wide_stats *e)
{
    const ptrdiff_t count = t->n - r * t->step;
    return first_lanes(FN(from_origin)(e, FN(widened)(t->x + r * t->x_stride, count)), count);
}

/* param [count] += terms, in float64 and rounded */
INLINE void FN(f64_add)(T *param, ptrdiff_t count, wide_f64 terms)
{
    const wide_f64 before = TN(widened)(param, count);
    EACH_VECTOR(i) terms.v[i] += before.v[i];
    for (int i = 0; i < LANES_F64; i += VL) {
        const V sum = TN(from_f64)(terms.v + i / VL_F64);
        FN(put_T)(param + i, 0, FN(in_vector)(count, i), sum);
    }
}

/* g = dy gain and xhat of row r of a tile; lanes that are not used are zero. Adds to dgain and dbias with `adding`. */
INLINE void FN(f64_terms)(const FN(tile) *t, ptrdiff_t r, const wide_stats *e, f64_scales scales, const int adding,
                          wide_f64 *g, wide_f64 *xhat)
{
    const ptrdiff_t j = r * t->step, count = t->n - j;
    const wide_f64 gain = t->gain ? TN(widened)(t->gain + j, count) : wide_of(t->all_gain);
    wide_f64 v = FN(from_origin)(e, FN(widened)(t->x + r * t->x_stride, count));
    EACH_VECTOR(i) v.v[i] = (v.v[i] - e->delta.v[i]) * e->rstd.v[i];
    *g = FN(widened)(t->dy + r * t->dy_stride, count);
    *xhat = first_lanes(v, count);
    if (adding && t->dgain) {
        wide_f64 terms;
        EACH_VECTOR(i) terms.v[i] = g->v[i] * xhat->v[i];
        FN(f64_add)(t->dgain + j, count, terms);
        FN(f64_add)(t->dbias + j, count, *g);
    }
    EACH_VECTOR(i)
    {
        if (sizeof(T) == 8) g->v[i] *= splat_f64(scales.dy);
        g->v[i] *= sizeof(T) == 8 ? gain.v[i] * splat_f64(scales.gain) : gain.v[i];
    }
}

/* The two sums in each lane over rows begin to end of a tile: of d and d^2, d = x scale - origin, or backward of g
 * and g xhat */
INLINE void FN(f64_lane_terms)(const FN(tile) *tile, ptrdiff_t begin, ptrdiff_t end, const wide_stats *stats,
                               const f64_scales *scales, const int backward, wide_f64 sums[2])
{
    const FN(tile) t = *tile;
    const wide_stats e = *stats;
    wide_f64 A = wide_of(0), B = A;
    for (ptrdiff_t r = begin; r < end;) {
        const ptrdiff_t stop = end - r < BLOCK ? end : r + BLOCK;
        wide_f64 a = wide_of(0), b = a;
        for (; r < stop; ++r) {
            wide_f64 v, with;
            if (backward) FN(f64_terms)(&t, r, &e, *scales, 1, &v, &with);
            else with = v = FN(f64_deviations)(&t, r, &e);
            EACH_VECTOR(i) a.v[i] += v.v[i], b.v[i] += v.v[i] * with.v[i];
        }
        EACH_VECTOR(i) A.v[i] += a.v[i], B.v[i] += b.v[i];
    }
    sums[0] = A, sums[1] = B;
}
static NOINLINE void FN(f64_lane_sums)(const FN(tile) *tile, ptrdiff_t begin, ptrdiff_t end, const wide_stats *stats,
                                       const f64_scales *scales, wide_f64 sums[2])
{
    if (scales) FN(f64_lane_terms)(tile, begin, end, stats, scales, 1, sums);
    else FN(f64_lane_terms)(tile, begin, end, stats, NULL, 0, sums);
}

/* the same over a run, added to sums; scales: backward, or NULL */
static NOINLINE void FN(f64_run_sums)(const FN(tile) *t, const f64_stats *stats, const f64_scales *scales,
                                      double sums[2])
{
    enum { ROWS = FOLD / LANES_F64 };
    const wide_stats e = wide_stats_of(stats);
    for (ptrdiff_t r = 0; r < t->rows; r += ROWS) {
        wide_f64 lanes[2];
        FN(f64_lane_sums)(t, r, t->rows - r < ROWS ? t->rows : r + ROWS, &e, scales, lanes);
        sums[0] += tree_f64(lanes[0].v);
        sums[1] += tree_f64(lanes[1].v);
    }
}
