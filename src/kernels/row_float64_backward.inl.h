/* (5) and (6) of layer_norm_backward.inl.h in float64, for rows whose xhat, dx or sums leave the range of T.
 * Included once per storage type. */

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
    FN(f64_run_sums)(&t, &e, &scales, sums);
    const f64_gradient d = f64_gradient_of(&e, centred ? sums[0] / (double)n : 0, sums[1] / (double)n,
                                           -exponent_of(scales.dy) - exponent_of(scales.gain));
    const wide_gradient of_lanes = wide_gradient_of(&d, scales);
    FN(f64_write_gradient)(&t, &lanes, &of_lanes);
}
