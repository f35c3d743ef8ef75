/* Layer normalisation of rows, forward and backward (Ba, Kiros, Hinton 2016, arXiv:1607.06450, Eq. 3).
 *
 * Included once per element type, with T, V, VL, LANES, FN(name), the element's vocabulary and the limits below
 * defined by isa.inl.h. For a row x [n]:
 *
 * Forward
 *   (1) one sweep: S = sum x, Q = sum x^2; m = S/n.  Accepted with K = 0, delta = m if n m^2 <= Q - S m, that is
 *       mean^2 <= var, and Q can neither have overflowed nor drowned in subnormals.
 *   (2) else one sweep of d = x - K with K = m rounded: S = sum d, Q = sum d^2, delta = S/n, the same test.
 *   (3) else the row is done in float64, scaled by a power of two and shifted by its first element.
 *   var = (Q - S delta)/n,  rstd = 1/sqrt(var + eps), or 0 where var + eps = 0
 *   (4) y = ((x - K) - delta) rstd gain + bias
 * The mean stays the unevaluated pair K + delta: rounding it to one T is the largest error of a careful kernel.
 *
 * Backward, with xhat = ((x - K) - delta) rstd and g = dy gain
 *   (5) one sweep: G = mean g, H = mean g xhat, and this row's share of dgain = sum dy xhat, dbias = sum dy
 *   (6) dx = rstd ((g - G) - xhat H)
 * dgain and dbias are summed row after row within blocks of 64 rows, and over the blocks by a fixed tree.
 *
 * Sums run in LANES virtual lanes, folded by the halving tree and added to a float64 every FOLD elements.
 */

enum { FN(PIECE) = 256 }; /* elements that a rare float64 path widens at a time: little stack */

/* What (3) finds: x scale = origin + delta + xhat / rstd; inv_std_dev is what rstd is in units of x */
typedef struct { double scale, origin, delta, rstd, inv_std_dev; } FN(exact);

/* S = sum d and Q = sum d^2 over x [n], d = x - K */
INLINE void FN(sums)(const T *x, ptrdiff_t n, T K, double *S, double *Q)
{
    const V shift = FN(splat)(K);
    *S = *Q = 0;
    for (ptrdiff_t start = 0; start < n; start += FOLD) {
        const ptrdiff_t len = n - start < FOLD ? n - start : FOLD;
        const ptrdiff_t whole = len / LANES * LANES;
        V s[LANE_VECTORS], q[LANE_VECTORS];
#pragma GCC unroll 2
        for (int first = 0; first < LANE_VECTORS; first += PASS) {
            const T *p = x + start + first * VL;
            V sp[PASS], qp[PASS];
#pragma GCC unroll 4
            for (int i = 0; i < PASS; ++i) sp[i] = qp[i] = FN(splat)(0);
            for (ptrdiff_t j = 0; j < whole; j += LANES) {
#pragma GCC unroll 4
                for (int i = 0; i < PASS; ++i) {
                    V d = FN(load)(p + j + i * VL) - shift;
                    sp[i] += d;
                    qp[i] += d * d;
                }
            }
#pragma GCC unroll 4
            for (int i = 0; i < PASS; ++i) {
                const ptrdiff_t j = whole + i * VL, left = len - first * VL - j;
                if (left > 0) { /* missing elements read as K, so that their d is zero */
                    V d = (left >= VL ? FN(load)(p + j) : FN(load_some)(p + j, left, shift)) - shift;
                    sp[i] += d;
                    qp[i] += d * d;
                }
                s[first + i] = sp[i];
                q[first + i] = qp[i];
            }
        }
        *S += (double)FN(tree)(s);
        *Q += (double)FN(tree)(q);
    }
}

/* The guard of (1) and (2), written so that NaN fails it */
INLINE int FN(accepted)(double n, double S, double Q, double eps)
{
    const double m = S / n;
    return n * m * m <= Q - S * m && Q <= Q_MAX && (Q >= n * Q_MIN || eps >= Q_MIN);
}

/* (1) and (2); false where the row needs (3) */
INLINE int FN(row_stats)(const T *x, ptrdiff_t n, double eps, T stats[3])
{
    double S, Q;
    T K = 0;
    FN(sums)(x, n, K, &S, &Q);
    if (!FN(accepted)((double)n, S, Q, eps)) {
        K = (T)(S / (double)n);
        FN(sums)(x, n, K, &S, &Q);
        if (!FN(accepted)((double)n, S, Q, eps)) return 0;
    }
    const double delta = S / (double)n, var = (Q - S * delta) / (double)n;
    stats[0] = K;
    stats[1] = (T)delta;
    stats[2] = (T)(1.0 / sqrt(var + eps));
    return 1;
}

/* (3): the statistics of any row, by a shifted sweep and a centred one */
static FN(exact) FN(exact_stats)(const T *x, ptrdiff_t n, double eps)
{
    FN(exact) e = {.scale = RESCUE_SCALE(x, n, eps)};
    double piece[FN(PIECE)], S, Q, var = 0;
    e.origin = (double)x[0] * e.scale;
    for (int sweep = 0; sweep < 2; ++sweep) {
        double sum = 0, squares = 0;
        for (ptrdiff_t j = 0; j < n; j += FN(PIECE)) {
            const ptrdiff_t len = n - j < FN(PIECE) ? n - j : FN(PIECE);
            for (ptrdiff_t i = 0; i < len; ++i) piece[i] = ((double)x[j + i] * e.scale - e.origin) - e.delta;
            sums_f64(piece, len, 0, &S, &Q);
            sum += S;
            squares += Q;
        }
        const double correction = sum / (double)n;
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

INLINE double FN(exact_xhat)(const FN(exact) *e, T x)
{
    return (((double)x * e->scale - e->origin) - e->delta) * e->rstd;
}

/* (3) and (4) in float64, rounded once */
static __attribute__((noinline)) void FN(exact_row)(const T *x, ptrdiff_t n, const T *gain, const T *bias, double eps,
                                                    T *y, T stats[3])
{
    const FN(exact) e = FN(exact_stats)(x, n, eps);
    for (ptrdiff_t j = 0; j < n; ++j) {
        double v = FN(exact_xhat)(&e, x[j]);
        if (gain) v *= (double)gain[j];
        if (bias) v += (double)bias[j];
        y[j] = (T)v;
    }
    stats[0] = (T)((e.origin + e.delta) / e.scale);
    stats[1] = (T)(((e.origin - (double)stats[0] * e.scale) + e.delta) / e.scale);
    stats[2] = (T)e.inv_std_dev;
}

/* (4) for y [n]; gain and bias may be NULL */
INLINE void FN(normalise)(const T *x, ptrdiff_t n, const T stats[3], const T *gain, const T *bias, T *y)
{
    const V K = FN(splat)(stats[0]), delta = FN(splat)(stats[1]), rstd = FN(splat)(stats[2]), zero = FN(splat)(0);
    ptrdiff_t j = 0;
    for (; j + VL <= n; j += VL) {
        V v = ((FN(load)(x + j) - K) - delta) * rstd;
        if (gain) v *= FN(load)(gain + j);
        if (bias) v += FN(load)(bias + j);
        FN(store)(y + j, v);
    }
    if (j < n) {
        V v = ((FN(load_some)(x + j, n - j, zero) - K) - delta) * rstd;
        if (gain) v *= FN(load_some)(gain + j, n - j, zero);
        if (bias) v += FN(load_some)(bias + j, n - j, zero);
        FN(store_some)(y + j, n - j, v);
    }
}

static void FN(layer_norm)(ptrdiff_t rows, ptrdiff_t n, const void *px, ptrdiff_t x_stride, const void *pgain,
                           const void *pbias, double eps, void *py, ptrdiff_t y_stride, void *pstats)
{
    const T *x = px, *gain = pgain, *bias = pbias;
    T *y = py, *stats = pstats, discarded[3];
    for (ptrdiff_t row = 0; row < rows; ++row, x += x_stride, y += y_stride) {
        T *st = stats ? stats + 3 * row : discarded;
        if (!FN(row_stats)(x, n, eps, st)) FN(exact_row)(x, n, gain, bias, eps, y, st);
        else if (gain && bias) FN(normalise)(x, n, st, gain, bias, y);
        else if (gain) FN(normalise)(x, n, st, gain, NULL, y);
        else if (bias) FN(normalise)(x, n, st, NULL, bias, y);
        else FN(normalise)(x, n, st, NULL, NULL, y);
    }
}

/* (5) for one vector; dgain and dbias are this block's running sums */
INLINE void FN(backward_terms)(V x, V dy, V gain, const V stats[3], V *g, V *gx, V *dgain, V *dbias)
{
    const V xhat = ((x - stats[0]) - stats[1]) * stats[2];
    const V scaled = dy * gain;
    *g += scaled;
    *gx += scaled * xhat;
    *dgain += dy * xhat;
    *dbias += dy;
}

INLINE void FN(backward_row)(ptrdiff_t n, const T *dy, const T *x, const T *gain, const T st[3], T *dx, T *dgain, T *dbias)
{
    const V stats[3] = {FN(splat)(st[0]), FN(splat)(st[1]), FN(splat)(st[2])};
    const V zero = FN(splat)(0), one = FN(splat)(1);
    double sum_g = 0, sum_gx = 0;
    for (ptrdiff_t start = 0; start < n; start += FOLD) {
        const ptrdiff_t len = n - start < FOLD ? n - start : FOLD;
        const ptrdiff_t whole = len / LANES * LANES;
        V g[LANE_VECTORS], gx[LANE_VECTORS];
#pragma GCC unroll 2
        for (int first = 0; first < LANE_VECTORS; first += PASS) {
            const ptrdiff_t base = start + first * VL;
            V gp[PASS], gxp[PASS];
#pragma GCC unroll 4
            for (int i = 0; i < PASS; ++i) gp[i] = gxp[i] = zero;
            for (ptrdiff_t j = base; j < base + whole; j += LANES) {
#pragma GCC unroll 4
                for (int i = 0; i < PASS; ++i) {
                    const ptrdiff_t at = j + i * VL;
                    V share_gain = FN(load)(dgain + at), share_bias = FN(load)(dbias + at);
                    FN(backward_terms)(FN(load)(x + at), FN(load)(dy + at), gain ? FN(load)(gain + at) : one, stats,
                                       &gp[i], &gxp[i], &share_gain, &share_bias);
                    FN(store)(dgain + at, share_gain);
                    FN(store)(dbias + at, share_bias);
                }
            }
#pragma GCC unroll 4
            for (int i = 0; i < PASS; ++i) {
                const ptrdiff_t at = base + whole + i * VL;
                const ptrdiff_t left = start + len - at < VL ? start + len - at : VL;
                if (left > 0) { /* missing dy are zero, and with them every term */
                    V share_gain = FN(load_some)(dgain + at, left, zero), share_bias = FN(load_some)(dbias + at, left, zero);
                    FN(backward_terms)(FN(load_some)(x + at, left, stats[0]), FN(load_some)(dy + at, left, zero),
                                       gain ? FN(load_some)(gain + at, left, zero) : one, stats, &gp[i], &gxp[i],
                                       &share_gain, &share_bias);
                    FN(store_some)(dgain + at, left, share_gain);
                    FN(store_some)(dbias + at, left, share_bias);
                }
                g[first + i] = gp[i];
                gx[first + i] = gxp[i];
            }
        }
        sum_g += (double)FN(tree)(g);
        sum_gx += (double)FN(tree)(gx);
    }
    const V G = FN(splat)((T)(sum_g / (double)n)), H = FN(splat)((T)(sum_gx / (double)n));
    for (ptrdiff_t j = 0; j < n; j += VL) {
        const ptrdiff_t left = n - j;
        V xv, gv; /* (6) */
        if (left >= VL) {
            xv = FN(load)(x + j);
            gv = FN(load)(dy + j) * (gain ? FN(load)(gain + j) : one);
        } else {
            xv = FN(load_some)(x + j, left, zero);
            gv = FN(load_some)(dy + j, left, zero) * (gain ? FN(load_some)(gain + j, left, zero) : one);
        }
        const V xhat = ((xv - stats[0]) - stats[1]) * stats[2];
        const V v = stats[2] * ((gv - G) - xhat * H);
        if (left >= VL) FN(store)(dx + j, v);
        else FN(store_some)(dx + j, left, v);
    }
}

/* (5) and (6) in float64, for rows whose xhat or dx float arithmetic of type T cannot reach */
static __attribute__((noinline)) void FN(exact_backward_row)(ptrdiff_t n, const T *dy, const T *x, const T *gain,
                                                             const T st[3], T *dx, T *dgain, T *dbias)
{
    FN(exact) e = FN(exact_stats)(x, n, 0);
    /* a rstd in range carries the eps of the forward call; one out of range says that eps was negligible */
    if (st[2] == 0) e.rstd = e.inv_std_dev = 0;
    else if (st[2] >= RSTD_TINY && st[2] <= RSTD_HUGE) {
        e.inv_std_dev = (double)st[2];
        e.rstd = e.inv_std_dev / e.scale;
    }
    double sum_g = 0, sum_gx = 0;
    for (ptrdiff_t j = 0; j < n; ++j) {
        const double xhat = FN(exact_xhat)(&e, x[j]), g = (double)dy[j] * (gain ? (double)gain[j] : 1.0);
        sum_g += g;
        sum_gx += g * xhat;
        dgain[j] = (T)((double)dgain[j] + (double)dy[j] * xhat);
        dbias[j] = (T)((double)dbias[j] + (double)dy[j]);
    }
    const double G = sum_g / (double)n, H = sum_gx / (double)n;
    for (ptrdiff_t j = 0; j < n; ++j) {
        const double xhat = FN(exact_xhat)(&e, x[j]), g = (double)dy[j] * (gain ? (double)gain[j] : 1.0);
        dx[j] = (T)(e.inv_std_dev * ((g - G) - xhat * H));
    }
}

/* One block of rows: partial [2, n] becomes this block's dgain and dbias */
static void FN(layer_norm_backward_block)(ptrdiff_t rows, ptrdiff_t n, const void *pdy, ptrdiff_t dy_stride,
                                          const void *px, ptrdiff_t x_stride, const void *pgain, const void *pstats,
                                          void *pdx, ptrdiff_t dx_stride, void *partial)
{
    const T *dy = pdy, *x = px, *gain = pgain, *st = pstats;
    T *dx = pdx, *dgain = partial, *dbias = dgain + n;
    memset(partial, 0, 2 * (size_t)n * sizeof(T));
    for (ptrdiff_t row = 0; row < rows; ++row, dy += dy_stride, x += x_stride, dx += dx_stride, st += 3) {
        /* written so that NaN goes the slow way too */
        if (!(st[2] >= RSTD_MIN && st[2] <= RSTD_MAX)) FN(exact_backward_row)(n, dy, x, gain, st, dx, dgain, dbias);
        else if (gain) FN(backward_row)(n, dy, x, gain, st, dx, dgain, dbias);
        else FN(backward_row)(n, dy, x, NULL, st, dx, dgain, dbias);
    }
}

/* into [n] += from [n] */
static void FN(add)(ptrdiff_t n, void *into, const void *from)
{
    T *a = into;
    const T *b = from;
    for (ptrdiff_t j = 0; j < n; ++j) a[j] += b[j];
}
