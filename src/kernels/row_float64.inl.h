/* (3) of layer_norm.inl.h: rows whose sums or gradients leave the range of T are computed in float64 and rounded once.
 * Included once per storage type.
 *
 * float64 rows are scaled by a power of two, so that neither their squares nor eps leave the range. A row is widened PIECE
 * elements at a time into a buffer, in whole vectors. Pieces are summed as in sweep.inl.h. */

enum { FN(PIECE) = BLOCK * LANES_F64 }; /* elements that are widened at a time, which bounds the stack used */
typedef struct { _Alignas(VECTOR_BYTES) double at[FN(PIECE)]; } FN(piece);

/* x scale = origin + delta + xhat / rstd. rstd is in units of 1/(x scale), inv_std_dev = rstd scale in units of 1/x. */
typedef struct { double scale, origin, delta, rstd, inv_std_dev; } FN(f64_stats);

/* to [n] = (x scale - origin - delta) factor */
static NOINLINE void FN(f64_deviations)(const FN(f64_stats) *e, const X *x, ptrdiff_t n, double factor, FN(piece) *to)
{
    const f64v scale = splat_f64(e->scale), origin = splat_f64(e->origin), delta = splat_f64(e->delta), by = splat_f64(factor);
    for (ptrdiff_t j = 0; j < n; j += VL) {
        double lanes[VL];
        TN(to_f64)(FN(take)(x + j, 0, n - j < VL ? n - j : VL), lanes);
        for (int i = 0; i < VL; i += VL_F64)
            store_f64(to->at + j + i, ((load_f64(lanes + i) * scale - origin) - delta) * by);
    }
}

/* to [n] = x [n] scale */
INLINE void FN(widened)(const X *x, ptrdiff_t n, double scale, FN(piece) *to)
{
    FN(f64_deviations)(&(FN(f64_stats)){.scale = scale}, x, n, 1, to);
}

/* the power of two that brings the largest finite |x|, and sqrt(eps), near 1; 1 where T is not float64 */
static NOINLINE double FN(scale_of)(const X *x, ptrdiff_t n, double eps)
{
    if (sizeof(T) < 8) return 1;
    const f64v none = splat_f64(0), most = splat_f64(0x1.fffffffffffffp1023);
    f64v largest = none;
    FN(piece) piece;
    for (ptrdiff_t j = 0; j < n; j += FN(PIECE)) {
        const ptrdiff_t len = n - j < FN(PIECE) ? n - j : FN(PIECE);
        FN(widened)(x + j, len, 1, &piece);
        for (ptrdiff_t i = 0; i < len; i += VL_F64) {
            const f64v at = load_f64(piece.at + i), size = (f64v)((i64v)at & INT64_MAX);
            const i64v larger = (i64v)(size > largest) & (i64v)(size <= most);
            largest = (f64v)(((i64v)size & larger) | ((i64v)largest & ~larger));
        }
    }
    double lanes[VL_F64], result = 0;
    store_f64(lanes, largest);
    for (int i = 0; i < VL_F64; ++i) result = larger_finite(result, lanes[i]);
    return scale_for(result, eps);
}

/* sums = S, Q of the row's d */
static void FN(f64_sums)(const FN(f64_stats) *e, const X *x, ptrdiff_t n, double sums[2])
{
    FN(piece) d;
    sums[0] = sums[1] = 0;
    for (ptrdiff_t start = 0; start < n; start += FOLD) {
        double fold[2] = {0};
        for (ptrdiff_t j = start; j < n && j < start + FOLD; j += FN(PIECE)) {
            const ptrdiff_t len = n - j < FN(PIECE) ? n - j : FN(PIECE);
            FN(f64_deviations)(e, x + j, len, 1, &d);
            const two_sums piece = run_sums_f64(d.at, len, 0);
            fold[0] += piece.a, fold[1] += piece.b;
        }
        sums[0] += fold[0], sums[1] += fold[1];
    }
}

/* (3): the statistics of any row, by a sweep about its first element and one about the mean rounded, which is origin:
 * deviations from a first element far from the mean would lose bits. The mean is the pair origin + delta. */
RARE FN(f64_stats) FN(f64_row_stats)(const X *x, ptrdiff_t n, double eps, int centred)
{
    FN(f64_stats) e = {.scale = FN(scale_of)(x, n, eps)};
    double sums[2], var = 0;
    e.origin = centred ? (double)FN(value)(x[0]) * e.scale : 0;
    for (int sweep = 0; sweep < 2; ++sweep) {
        FN(f64_sums)(&e, x, n, sums);
        const double correction = centred ? sums[0] / (double)n : 0, first = e.origin;
        var = (sums[1] - sums[0] * correction) / (double)n;
        if (sweep) {
            e.delta += correction;
        } else {
            e.origin = first + correction;
            e.delta = (first - e.origin) + correction;
        }
    }
    if (var <= 0) { /* a constant row; eps scale^2 could underflow, so it is not used */
        e.inv_std_dev = eps > 0 ? 1.0 / sqrt(eps) : 0;
    } else {
        e.rstd = 1.0 / sqrt(var + eps * e.scale * e.scale);
        e.inv_std_dev = e.rstd * e.scale;
    }
    return e;
}

/* The same for the backward pass, which knows stats but not eps. A normal rstd includes eps and is used as it is, 0 and
 * NaN are kept. One beyond that range means that eps was negligible: it is computed again with eps = 0. */
RARE FN(f64_stats) FN(f64_given_stats)(const X *x, ptrdiff_t n, const T st[3], int centred)
{
    FN(f64_stats) e = FN(f64_row_stats)(x, n, 0, centred);
    const T mean = st[0] + st[1], rstd = mean == mean ? st[2] : mean;
    if (rstd == 0 || rstd != rstd) {
        e.rstd = e.inv_std_dev = (double)rstd;
    } else if (rstd >= RSTD_TINY && rstd <= RSTD_HUGE) {
        e.inv_std_dev = (double)rstd;
        if (e.rstd != 0) e.rstd = e.inv_std_dev / e.scale; /* 0: a constant row; the quotient could overflow */
    }
    return e;
}

/* v 2^power inv_std_dev, where 2^power and inv_std_dev may each exceed the range of float64 */
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

/* y [n] = v [n], rounded to T and then to X */
static NOINLINE void FN(put_piece)(const FN(piece) *v, ptrdiff_t n, X *y)
{
    for (ptrdiff_t j = 0; j < n; j += VL) FN(put)(y + j, 0, n - j < VL ? n - j : VL, TN(from_f64)(v->at + j), NULL);
}

/* v [n] *= by [n] */
static NOINLINE void FN(multiply)(FN(piece) *v, const FN(piece) *by, ptrdiff_t n)
{
    for (ptrdiff_t j = 0; j < n; j += VL_F64) store_f64(v->at + j, load_f64(v->at + j) * load_f64(by->at + j));
}

/* to [n] = x [n] scale for a parameter, which is of type T */
static NOINLINE void FN(widened_params)(const T *x, ptrdiff_t n, double scale, FN(piece) *to)
{
    for (ptrdiff_t j = 0; j < n; j += VL) {
        TN(to_f64)(FN(take_T)(x + j, 0, n - j < VL ? n - j : VL), to->at + j);
        for (int i = 0; i < VL; i += VL_F64) store_f64(to->at + j + i, load_f64(to->at + j + i) * splat_f64(scale));
    }
}

/* (3) and (4) in float64, rounded once to T */
RARE void FN(f64_norm_row)(const X *x, const cnorm_norm *call, int centred, X *y, T stats[3])
{
    const T *const gain = call->gain, *const bias = centred ? call->bias : NULL;
    const FN(f64_stats) e = FN(f64_row_stats)(x, call->n, call->eps, centred);
    FN(piece) v, param;
    for (ptrdiff_t j = 0; j < call->n; j += FN(PIECE)) {
        const ptrdiff_t len = call->n - j < FN(PIECE) ? call->n - j : FN(PIECE);
        FN(f64_deviations)(&e, x + j, len, e.rstd, &v);
        if (gain) {
            FN(widened_params)(gain + j, len, 1, &param);
            FN(multiply)(&v, &param, len);
        }
        if (bias) {
            FN(widened_params)(bias + j, len, 1, &param);
            for (ptrdiff_t i = 0; i < len; i += VL_F64) store_f64(v.at + i, load_f64(v.at + i) + load_f64(param.at + i));
        }
        FN(put_piece)(&v, len, y + j);
    }
    FN(f64_store_stats)(&e, stats);
}

/* A row's backward pass in float64. g = dy gain is in units of 2^-power; G and H are the means of g and g xhat. */
typedef struct {
    FN(f64_stats) stats;
    double dy_scale, gain_scale, G, H;
    int power;
} FN(f64_means);

/* g [n] and xhat [n] of the elements from j on */
static NOINLINE void FN(f64_piece)(const FN(f64_means) *m, const FN(row) *row, ptrdiff_t j, ptrdiff_t n, FN(piece) *g,
                                   FN(piece) *xhat)
{
    FN(piece) gain;
    FN(widened)(row->dy + j, n, m->dy_scale, g);
    FN(f64_deviations)(&m->stats, row->x + j, n, m->stats.rstd, xhat);
    if (!row->gain) return;
    FN(widened_params)(row->gain + j, n, m->gain_scale, &gain);
    FN(multiply)(g, &gain, n);
}

/* (5) */
static FN(f64_means) FN(f64_gradient_means)(const FN(row) *row, const T st[3], int centred)
{
    const ptrdiff_t n = row->n;
    FN(f64_means) m = {.stats = FN(f64_given_stats)(row->x, n, st, centred), .dy_scale = FN(scale_of)(row->dy, n, 0), .gain_scale = 1};
    FN(piece) g, xhat;
    if (row->gain && sizeof(T) == 8) m.gain_scale = FN(scale_of)((const X *)(const void *)row->gain, n, 0);
    m.power = -ilogb(m.dy_scale) - ilogb(m.gain_scale);
    for (ptrdiff_t start = 0; start < n; start += FOLD) {
        double fold[2] = {0};
        for (ptrdiff_t j = start; j < n && j < start + FOLD; j += FN(PIECE)) {
            const ptrdiff_t len = n - j < FN(PIECE) ? n - j : FN(PIECE);
            FN(f64_piece)(&m, row, j, len, &g, &xhat);
            FN(multiply)(&xhat, &g, len);
            fold[0] += run_sums_f64(g.at, len, 0).a;
            fold[1] += run_sums_f64(xhat.at, len, 0).a;
        }
        m.G += fold[0], m.H += fold[1];
    }
    m.G = centred ? m.G / (double)n : 0;
    m.H /= (double)n;
    return m;
}

/* param [n] += terms [n], in float64 and rounded */
static NOINLINE void FN(f64_add)(T *param, const FN(piece) *terms, ptrdiff_t n)
{
    FN(piece) sum;
    FN(widened_params)(param, n, 1, &sum);
    for (ptrdiff_t j = 0; j < n; j += VL_F64) store_f64(sum.at + j, load_f64(sum.at + j) + load_f64(terms->at + j));
    for (ptrdiff_t j = 0; j < n; j += VL) FN(put_T)(param + j, 0, n - j < VL ? n - j : VL, TN(from_f64)(sum.at + j));
}

/* (5) and (6) in float64, for rows whose xhat, dx or sums leave the range of T; dgain NULL: only (6) */
RARE void FN(f64_backward_row)(const FN(row) *row, const T st[3], int centred, X *dx, T *dgain, T *dbias)
{
    const FN(f64_means) m = FN(f64_gradient_means)(row, st, centred);
    const FN(f64_stats) *const e = &m.stats;
    /* dx may be in range where the product of two of its factors is not: the power of two in three parts */
    const int power = m.power + (e->rstd == 0 ? 0 : ilogb(e->scale)), third = power / 3;
    const f64v G = splat_f64(m.G), H = splat_f64(m.H), rstd = splat_f64(e->rstd == 0 ? e->inv_std_dev : e->rstd);
    const f64v unit = splat_f64(ldexp(1, third)), last_unit = splat_f64(ldexp(1, power - 2 * third));
    FN(piece) g, xhat, dy;
    for (ptrdiff_t j = 0; j < row->n; j += FN(PIECE)) {
        const ptrdiff_t len = row->n - j < FN(PIECE) ? row->n - j : FN(PIECE);
        FN(f64_piece)(&m, row, j, len, &g, &xhat);
        if (dgain) FN(widened)(row->dy + j, len, 1, &dy);
        for (ptrdiff_t i = 0; i < len; i += VL_F64) {
            const f64v v = (load_f64(g.at + i) - G) - load_f64(xhat.at + i) * H;
            store_f64(g.at + i, v * rstd * unit * unit * last_unit);
        }
        FN(put_piece)(&g, len, dx + j);
        if (!dgain) continue;
        FN(f64_add)(dbias + j, &dy, len);
        FN(multiply)(&dy, &xhat, len);
        FN(f64_add)(dgain + j, &dy, len);
    }
}
