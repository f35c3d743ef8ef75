/* (5) and (6) of layer_norm_backward.inl.h in float64, for rows whose xhat, dx or sums leave the range of T.
 * Included once, for all storage types. */
#ifndef CNORM_ROW_FLOAT64_BACKWARD_INL_H
#define CNORM_ROW_FLOAT64_BACKWARD_INL_H

#include "row_float64.inl.h"

/* (6) in float64, rounded once to T */
static NOINLINE void f64_write_gradient(const f64_tile *t, const wide_stats *e, const wide_gradient *d)
{
    for (ptrdiff_t first = 0; first < t->rows; first += BLOCK) {
        const f64_block b = block_from(t, first, t->rows);
        wide_f64 g[BLOCK], xhat[BLOCK];
        f64_terms(b, e, d->scales, 0, g, xhat);
        for (ptrdiff_t r = 0; r < b.count; ++r) EACH_VECTOR(i)
            {
                const f64v bracket = (g[r].v[i] - d->G.v[i]) - xhat[r].v[i] * d->H.v[i];
                g[r].v[i] = bracket * d->rstd.v[i] * d->factor.v[i] * d->factor.v[i] * d->last_factor.v[i];
            }
        store_out(b, g);
    }
}

/* (5) alone, of a run whose sums overflowed, about the statistics st of T's path */
static NOINLINE void f64_gradient_sums(const f64_tile *run, const void *st, double *A, double *B)
{
    const double rstd = element(run->type, st, 2);
    const f64_stats e = {1, element(run->type, st, 0), element(run->type, st, 1), rstd, rstd};
    double sums[2] = {0};
    f64_run_sums(run, &e, &UNSCALED, sums);
    *A = sums[0];
    *B = sums[1];
}

/* (5) and (6) for a row of a call, whose dgain and dbias are NULL where only (6) is wanted; st: its statistics */
static NOINLINE void f64_backward_row(f64_tile t, const void *st, int centred)
{
    const double n = (double)t.n;
    const f64_stats e = f64_given_stats(t.type, t.x, t.n, st, centred);
    const wide_stats lanes = wide_stats_of(&e);
    f64_scales scales = {f64_scale_of(t.type, t.dy, t.n), 1};
    if (t.gain) scales.gain = f64_scale_of(t.type, t.gain, t.n);
    double sums[2] = {0};
    f64_run_sums(&t, &e, &scales, sums);
    const f64_gradient d =
        f64_gradient_of(&e, centred ? sums[0] / n : 0, sums[1] / n, -exponent_of(scales.dy) - exponent_of(scales.gain));
    const wide_gradient of_lanes = wide_gradient_of(&d, scales);
    f64_write_gradient(&t, &lanes, &of_lanes);
}

#endif
