/* (3) of layer_norm.inl.h: rows that arithmetic in T cannot reach, in float64. */

enum { FN(PIECE) = 256 }; /* elements that are widened at a time: little stack */

/* What (3) finds: x scale = origin + delta + xhat / rstd; inv_std_dev is what rstd is in units of x */
typedef struct { double scale, origin, delta, rstd, inv_std_dev; } FN(f64_stats);

/* (3): the statistics of any row, by a shifted sweep and a centred one */
RARE FN(f64_stats) FN(f64_row_stats)(const X *x, ptrdiff_t n, double eps, int centred)
{
    FN(f64_stats) e = {.scale = 1};
    if (sizeof(T) == 8) { /* float64 needs no scale for float data */
        double largest = 0;
        for (ptrdiff_t j = 0; j < n; ++j) largest = larger_finite(largest, (double)FN(value)(x[j]));
        e.scale = scale_for(largest, eps);
    }
    double piece[FN(PIECE)], S, Q, var = 0;
    e.origin = centred ? (double)FN(value)(x[0]) * e.scale : 0;
    for (int sweep = 0; sweep < 2; ++sweep) {
        double sum = 0, squares = 0;
        for (ptrdiff_t j = 0; j < n; j += FN(PIECE)) {
            const ptrdiff_t len = n - j < FN(PIECE) ? n - j : FN(PIECE);
            for (ptrdiff_t i = 0; i < len; ++i) piece[i] = ((double)FN(value)(x[j + i]) * e.scale - e.origin) - e.delta;
            run_sums_f64(piece, len, 0, &S, &Q);
            sum += S;
            squares += Q;
        }
        const double correction = centred ? sum / (double)n : 0;
        var = (squares - sum * correction) / (double)n;
        e.delta += correction;
    }
    if (var <= 0) { /* a constant row; eps in units of 1/scale^2 could have drowned */
        e.inv_std_dev = eps > 0 ? 1.0 / sqrt(eps) : 0;
    } else {
        e.rstd = 1.0 / sqrt(var + eps * e.scale * e.scale);
        e.inv_std_dev = e.rstd * e.scale;
    }
    return e;
}

/* The same for a row of known stats: a rstd in range carries the eps of the forward call, one out of range says that eps
 * was negligible; 0 is kept, and so is any NaN. */
RARE FN(f64_stats) FN(f64_given_stats)(const X *x, ptrdiff_t n, const T st[3], int centred)
{
    FN(f64_stats) e = FN(f64_row_stats)(x, n, 0, centred);
    const T mean = st[0] + st[1], rstd = mean == mean ? st[2] : mean;
    if (rstd == 0 || rstd != rstd) {
        e.rstd = e.inv_std_dev = (double)rstd;
    } else if (rstd >= RSTD_TINY && rstd <= RSTD_HUGE) {
        e.inv_std_dev = (double)rstd;
        if (e.rstd != 0) e.rstd = e.inv_std_dev / e.scale; /* 0: a constant row, whose quotient could overflow */
    }
    return e;
}

/* v 2^power inv_std_dev, each of which may by itself be beyond float64 */
INLINE double FN(times_inv_std_dev)(const FN(f64_stats) *e, double v, int power)
{
    return e->rstd == 0 ? ldexp(v * e->inv_std_dev, power) : ldexp(v * e->rstd, ilogb(e->scale) + power);
}

INLINE void FN(f64_store_stats)(const FN(f64_stats) *e, T stats[3])
{
    stats[0] = (T)((e->origin + e->delta) / e->scale);
    stats[1] = (T)(((e->origin - (double)stats[0] * e->scale) + e->delta) / e->scale);
    stats[2] = (T)e->inv_std_dev;
}

INLINE double FN(f64_xhat)(const FN(f64_stats) *e, double x) { return ((x * e->scale - e->origin) - e->delta) * e->rstd; }

/* (3) and (4) in float64, rounded once to T */
RARE void FN(f64_norm_row)(const X *x, const cnorm_norm *call, int centred, X *y, T stats[3])
{
    const T *const gain = call->gain, *const bias = centred ? call->bias : NULL;
    const FN(f64_stats) e = FN(f64_row_stats)(x, call->n, call->eps, centred);
    for (ptrdiff_t j = 0; j < call->n; ++j) {
        double v = FN(f64_xhat)(&e, (double)FN(value)(x[j]));
        if (gain) v *= (double)gain[j];
        if (bias) v += (double)bias[j];
        y[j] = FN(stored)((T)v);
    }
    FN(f64_store_stats)(&e, stats);
}

/* (5) and (6) in float64, for rows whose xhat, dx or sums arithmetic in T cannot reach; dgain NULL: only (6) */
RARE void FN(f64_backward_row)(const FN(row) *row, const T st[3], int centred, X *dx, T *dgain, T *dbias)
{
    const ptrdiff_t n = row->n;
    const T *const gain = row->gain;
    const FN(f64_stats) e = FN(f64_given_stats)(row->x, n, st, centred);
    double dy_scale = 1, gain_scale = 1;
    if (sizeof(T) == 8) {
        double largest = 0, largest_gain = 0;
        for (ptrdiff_t j = 0; j < n; ++j) {
            largest = larger_finite(largest, (double)FN(value)(row->dy[j]));
            if (gain) largest_gain = larger_finite(largest_gain, (double)gain[j]);
        }
        dy_scale = scale_for(largest, 0);
        if (gain) gain_scale = scale_for(largest_gain, 0);
    }
    double sum_g = 0, sum_gx = 0;
    for (ptrdiff_t j = 0; j < n; ++j) {
        const double d = (double)FN(value)(row->dy[j]), xhat = FN(f64_xhat)(&e, (double)FN(value)(row->x[j]));
        const double g = d * dy_scale * (gain ? (double)gain[j] * gain_scale : 1.0);
        sum_g += g;
        sum_gx += g * xhat;
        if (dgain) {
            dgain[j] = (T)((double)dgain[j] + d * xhat);
            dbias[j] = (T)((double)dbias[j] + d);
        }
    }
    const double G = centred ? sum_g / (double)n : 0, H = sum_gx / (double)n;
    const int power = -ilogb(dy_scale) - ilogb(gain_scale);
    for (ptrdiff_t j = 0; j < n; ++j) {
        const double xhat = FN(f64_xhat)(&e, (double)FN(value)(row->x[j]));
        const double g = (double)FN(value)(row->dy[j]) * dy_scale * (gain ? (double)gain[j] * gain_scale : 1.0);
        dx[j] = FN(stored)((T)FN(times_inv_std_dev)(&e, (g - G) - xhat * H, power));
    }
}
