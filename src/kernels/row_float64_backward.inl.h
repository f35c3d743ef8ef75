/* (5) and (6) of layer_norm_backward.inl.h in float64, for rows whose xhat, dx or sums leave the range of T. Included once
 * per storage type. */

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

/* sums = sum g, sum g xhat in each lane over rows begin to end of a tile */
static NOINLINE void FN(f64_lane_gradients)(const FN(tile) *tile, ptrdiff_t begin, ptrdiff_t end, const wide_stats *stats,
                                            f64_scales scales, wide_f64 sums[2])
{
    const FN(tile) t = *tile;
    const wide_stats e = *stats;
    wide_f64 A = wide_of(0), B = A;
    for (ptrdiff_t r = begin; r < end;) {
        const ptrdiff_t stop = end - r < BLOCK ? end : r + BLOCK;
        wide_f64 a = wide_of(0), b = a;
        for (; r < stop; ++r) {
            wide_f64 g, xhat;
            FN(f64_terms)(&t, r, &e, scales, 1, &g, &xhat);
            EACH_VECTOR(i) a.v[i] += g.v[i], b.v[i] += g.v[i] * xhat.v[i];
        }
        EACH_VECTOR(i) A.v[i] += a.v[i], B.v[i] += b.v[i];
    }
    sums[0] = A, sums[1] = B;
}

/* sum g, sum g xhat of a run, added to sums */
static NOINLINE void FN(f64_run_gradients)(const FN(tile) *t, const f64_stats *stats, f64_scales scales, double sums[2])
{
    enum { ROWS = FOLD / LANES_F64 };
    const wide_stats e = wide_stats_of(stats);
    for (ptrdiff_t r = 0; r < t->rows; r += ROWS) {
        wide_f64 lanes[2];
        FN(f64_lane_gradients)(t, r, t->rows - r < ROWS ? t->rows : r + ROWS, &e, scales, lanes);
        sums[0] += tree_f64(lanes[0].v);
        sums[1] += tree_f64(lanes[1].v);
    }
}

/* (6) in float64, rounded once to T */
RARE void FN(f64_write_gradient)(const FN(tile) *tile, const wide_stats *stats, const wide_gradient *gradient)
{
    const FN(tile) t = *tile;
    const wide_stats e = *stats;
    wide_gradient d = *gradient;
    EACH_VECTOR(i) if (sizeof(T) < 8) d.rstd.v[i] *= d.unit.v[i] * d.unit.v[i] * d.last_unit.v[i];
    for (ptrdiff_t r = 0; r < t.rows; ++r) {
        wide_f64 g, xhat;
        FN(f64_terms)(&t, r, &e, d.scales, 0, &g, &xhat);
        EACH_VECTOR(i)
        {
            g.v[i] = ((g.v[i] - d.G.v[i]) - xhat.v[i] * d.H.v[i]) * d.rstd.v[i];
            if (sizeof(T) == 8) g.v[i] = g.v[i] * d.unit.v[i] * d.unit.v[i] * d.last_unit.v[i];
        }
        FN(put_wide)(t.out + r * t.out_stride, t.n - r * t.step, g);
    }
}

/* (5) and (6) for a row; dgain NULL: only (6) */
RARE void FN(f64_backward_row)(const FN(row) *row, const T st[3], int centred, X *dx, T *dgain, T *dbias)
{
    const ptrdiff_t n = row->n;
    const f64_stats e = FN(f64_given_stats)(row->x, n, st, centred);
    const wide_stats lanes = wide_stats_of(&e);
    f64_scales scales = {FN(scale_of)(row->dy, n), 1};
    if (row->gain && sizeof(T) == 8) scales.gain = FN(scale_of)((const X *)(const void *)row->gain, n);
    double sums[2] = {0};
    FN(tile) t = FN(run_tile)(row->dy, row->x, n, dx);
    t.gain = row->gain, t.dgain = dgain, t.dbias = dbias;
    FN(f64_run_gradients)(&t, &e, scales, sums);
    const f64_gradient d = f64_gradient_of(&e, centred ? sums[0] / (double)n : 0, sums[1] / (double)n,
                                           -exponent_of(scales.dy) - exponent_of(scales.gain));
    const wide_gradient of_lanes = wide_gradient_of(&d, scales);
    FN(f64_write_gradient)(&t, &lanes, &of_lanes);
}
