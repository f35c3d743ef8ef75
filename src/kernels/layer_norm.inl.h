/* Layer and RMS normalisation of rows, forward and backward.
 *     layer norm   Ba, Kiros, Hinton 2016, arXiv:1607.06450, Eq. 3
 *     RMS norm     Zhang, Sennrich 2019, arXiv:1910.07467, Eq. 4: the same with the mean taken as 0
 *
 * Included once per storage type X, with its compute type T (float for float16 and bfloat16), the vocabulary FN(name)
 * of X and TN(name), V, VL, LANES of T, and the limits of T, all defined by isa.inl.h. `centred` is a constant where
 * these functions are called: 1 layer norm, 0 RMS norm. A row is x [n], or with a residual the sum x + residual
 * rounded to X, recomputed wherever it is needed.
 *
 * Forward
 *   (1) one sweep: S = sum x, Q = sum x^2; m = S/n.  Accepted with K = 0, delta = m if S m <= Q - S m, that is
 *       mean^2 <= var, and Q can neither have overflowed nor drowned in subnormals.
 *   (2) else one sweep of d = x - K with K = m rounded: S = sum d, Q = sum d^2, delta = S/n, the same test.
 *   (3) else the row is done in float64, scaled by a power of two and shifted by its first element.
 *   var = (Q - S delta)/n,  rstd = 1/sqrt(var + eps), or 0 where var + eps = 0
 *   (4) y = ((x - K) - delta) rstd gain + bias
 * The mean stays the unevaluated pair K + delta: rounding it to one T is the largest error of a careful kernel.
 * RMS norm takes K = delta = 0 and var = Q/n; only the range of Q can send it to (3).
 *
 * Backward, with xhat = ((x - K) - delta) rstd and g = dy gain
 *   (5) one sweep: G = mean g, H = mean g xhat, and this row's share of dgain = sum dy xhat, dbias = sum dy
 *   (6) dx = rstd ((g - G) - xhat H)        RMS norm: G = 0
 * dgain and dbias are summed row after row within blocks of 64 rows, and over the blocks by a fixed tree.
 *
 * Sums run in LANES virtual lanes: blocks of BLOCK additions from zero, block sums added in order, folded by the halving
 * tree and added to a float64 every FOLD elements. One long chain would round the same way hundreds of times.
 */

enum { FN(PIECE) = 256 }; /* elements that a rare float64 path widens at a time: little stack */

typedef struct { const X *x, *residual; } FN(row); /* residual may be NULL */

INLINE V FN(row_load)(FN(row) row, ptrdiff_t j)
{
    V v = FN(load)(row.x + j);
    return row.residual ? FN(rounded)(v + FN(load)(row.residual + j)) : v;
}

/* the first k < VL elements from j on; the other lanes hold `fill` */
INLINE V FN(row_load_some)(FN(row) row, ptrdiff_t j, ptrdiff_t k, V fill)
{
    if (!row.residual) return FN(load_some)(row.x + j, k, fill);
    const V zero = TN(splat)(0);
    T sum[VL]; /* rounded to storage; fill is not */
    TN(store)(sum, FN(rounded)(FN(load_some)(row.x + j, k, zero) + FN(load_some)(row.residual + j, k, zero)));
    return TN(load_some)(sum, k, fill);
}

INLINE double FN(row_value)(FN(row) row, ptrdiff_t j)
{
    T v = FN(value)(row.x[j]);
    return (double)(row.residual ? FN(value)(FN(stored)(v + FN(value)(row.residual[j]))) : v);
}

/* S = sum d and Q = sum d^2 over the row, d = x - K */
INLINE void FN(sums)(FN(row) row, ptrdiff_t n, T K, const int centred, double *S, double *Q)
{
    const V shift = TN(splat)(K), zero = TN(splat)(0);
    *S = *Q = 0;
    for (ptrdiff_t start = 0; start < n; start += FOLD) {
        const ptrdiff_t end = n - start < FOLD ? n : start + FOLD;
        V s[LANE_VECTORS], q[LANE_VECTORS];
#pragma GCC unroll 2
        for (int first = 0; first < LANE_VECTORS; first += PASS) {
#pragma GCC unroll 4
            for (int i = 0; i < PASS; ++i) s[first + i] = q[first + i] = zero;
            for (ptrdiff_t block = start; block < end; block += BLOCK * LANES) {
                const ptrdiff_t len = end - block < BLOCK * LANES ? end - block : BLOCK * LANES;
                const ptrdiff_t whole = len / LANES * LANES, base = block + first * VL;
                V sp[PASS], qp[PASS];
#pragma GCC unroll 4
                for (int i = 0; i < PASS; ++i) sp[i] = qp[i] = zero;
                for (ptrdiff_t j = base; j < base + whole; j += LANES) {
#pragma GCC unroll 4
                    for (int i = 0; i < PASS; ++i) {
                        const V d = TN(keep)(FN(row_load)(row, j + i * VL)) - shift;
                        if (centred) sp[i] += d;
                        qp[i] += d * d;
                    }
                }
                if (whole < len) {
#pragma GCC unroll 4
                    for (int i = 0; i < PASS; ++i) {
                        const ptrdiff_t j = base + whole + i * VL, left = end - j;
                        if (left > 0) { /* missing elements read as K, so that their d is zero */
                            const V d = (left >= VL ? FN(row_load)(row, j) : FN(row_load_some)(row, j, left, shift)) - shift;
                            if (centred) sp[i] += d;
                            qp[i] += d * d;
                        }
                    }
                }
#pragma GCC unroll 4
                for (int i = 0; i < PASS; ++i) {
                    s[first + i] += sp[i];
                    q[first + i] += qp[i];
                }
            }
        }
        if (centred) *S += (double)TN(tree)(s);
        *Q += (double)TN(tree)(q);
    }
}

/* The guard of (1) and (2), written so that NaN fails it */
INLINE int FN(accepted)(double n, double mean_square, double spread, double Q, double eps)
{
    return mean_square <= spread && Q <= Q_MAX && (Q >= n * Q_MIN || eps >= Q_MIN);
}

INLINE void FN(keep_stats)(double K, double delta, double var, double eps, T stats[3])
{
    stats[0] = (T)K;
    stats[1] = (T)delta;
    stats[2] = (T)(1.0 / sqrt(var + eps));
}

/* (2), for rows with a large mean: false where the row needs (3) */
static __attribute__((noinline)) int FN(shifted_stats)(FN(row) row, ptrdiff_t n, double mean, double eps, T stats[3])
{
    const double count = (double)n, per = 1.0 / count;
    double S, Q;
    FN(sums)(row, n, (T)mean, 1, &S, &Q);
    const double delta = S * per, spread = Q - S * delta;
    if (!FN(accepted)(count, S * delta, spread, Q, eps)) return 0;
    FN(keep_stats)((double)(T)mean, delta, spread * per, eps, stats);
    return 1;
}

/* (1) and (2): stats = K, delta, rstd; false where the row needs (3) */
INLINE int FN(row_stats)(FN(row) row, ptrdiff_t n, double eps, const int centred, T stats[3])
{
    const double count = (double)n, per = 1.0 / count;
    double S, Q;
    FN(sums)(row, n, 0, centred, &S, &Q);
    const double mean = S * per, spread = Q - S * mean;
    if (!FN(accepted)(count, S * mean, spread, Q, eps)) return centred && FN(shifted_stats)(row, n, mean, eps, stats);
    FN(keep_stats)(0, mean, spread * per, eps, stats);
    return 1;
}

/* What (3) finds: x scale = origin + delta + xhat / rstd; inv_std_dev is what rstd is in units of x */
typedef struct { double scale, origin, delta, rstd, inv_std_dev; } FN(exact);

/* (3): the statistics of any row, by a shifted sweep and a centred one */
RARE FN(exact) FN(exact_stats)(FN(row) row, ptrdiff_t n, double eps, int centred)
{
    FN(exact) e = {.scale = 1};
    if (sizeof(T) == 8) { /* float64 needs no scale for float data */
        double largest = 0;
        for (ptrdiff_t j = 0; j < n; ++j) largest = larger_finite(largest, FN(row_value)(row, j));
        e.scale = scale_for(largest, eps);
    }
    double piece[FN(PIECE)], S, Q, var = 0;
    e.origin = centred ? FN(row_value)(row, 0) * e.scale : 0;
    for (int sweep = 0; sweep < 2; ++sweep) {
        double sum = 0, squares = 0;
        for (ptrdiff_t j = 0; j < n; j += FN(PIECE)) {
            const ptrdiff_t len = n - j < FN(PIECE) ? n - j : FN(PIECE);
            for (ptrdiff_t i = 0; i < len; ++i) piece[i] = (FN(row_value)(row, j + i) * e.scale - e.origin) - e.delta;
            sums_f64((row_f64){piece, NULL}, len, 0, 1, &S, &Q);
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

INLINE double FN(exact_xhat)(const FN(exact) *e, double x) { return ((x * e->scale - e->origin) - e->delta) * e->rstd; }

/* (3) and (4) in float64, rounded once to T */
RARE void FN(exact_row)(FN(row) row, ptrdiff_t n, const T *gain, const T *bias, double eps,
                                                    int centred, X *y, X *sum, T stats[3])
{
    const FN(exact) e = FN(exact_stats)(row, n, eps, centred);
    for (ptrdiff_t j = 0; j < n; ++j) {
        const double x = FN(row_value)(row, j);
        double v = FN(exact_xhat)(&e, x);
        if (gain) v *= (double)gain[j];
        if (bias) v += (double)bias[j];
        if (sum) sum[j] = FN(stored)((T)x);
        y[j] = FN(stored)((T)v);
    }
    stats[0] = (T)((e.origin + e.delta) / e.scale);
    stats[1] = (T)(((e.origin - (double)stats[0] * e.scale) + e.delta) / e.scale);
    stats[2] = (T)e.inv_std_dev;
}

/* Output is written in whole aligned vectors. When streaming, the vector that one row ends in and the next begins in
 * is kept here until it is complete: a partial line would cost more than streaming saves. */
typedef struct { X lanes[VL], *at; ptrdiff_t filled; } FN(joint);

INLINE void FN(flush)(FN(joint) *joint)
{
    for (ptrdiff_t i = 0; i < joint->filled; ++i) joint->at[i] = joint->lanes[i];
    joint->filled = 0;
}

/* k < VL elements, which end a vector or begin one */
INLINE void FN(out_some)(X *y, ptrdiff_t k, V v, FN(joint) *joint)
{
    if (!joint) {
        FN(store_some)(y, k, v);
        return;
    }
    if (joint->filled && joint->at + joint->filled != y) FN(flush)(joint);
    if (!joint->filled) joint->at = y;
    FN(store_some)(joint->lanes + joint->filled, k, v);
    joint->filled += k;
    if (joint->filled == VL) {
        FN(stream)(joint->at, FN(load)(joint->lanes));
        joint->filled = 0;
    } else if ((uintptr_t)(y + k) % sizeof joint->lanes == 0) {
        FN(flush)(joint);
    }
}

/* (4) for a vector x of elements j and on; gain and bias may be NULL */
INLINE V FN(normalised)(V x, const V stats[3], const T *gain, const T *bias, ptrdiff_t j, const int centred)
{
    V v = centred ? ((x - stats[0]) - stats[1]) * stats[2] : x * stats[2];
    if (gain) v *= TN(load)(gain + j);
    if (bias) v += TN(load)(bias + j);
    return v;
}

/* (4) for elements begin to end, whole vectors */
INLINE void FN(normalise_whole)(FN(row) row, ptrdiff_t begin, ptrdiff_t end, const V stats[3], const T *gain,
                                const T *bias, const int centred, X *y, X *sum, const int stream_y, const int stream_sum)
{
    for (ptrdiff_t j = begin; j < end; j += VL) {
        const V x = FN(row_load)(row, j), v = FN(normalised)(x, stats, gain, bias, j, centred);
        if (sum && stream_sum) FN(stream)(sum + j, x);
        else if (sum) FN(store)(sum + j, x);
        if (stream_y) FN(stream)(y + j, v);
        else FN(store)(y + j, v);
    }
}

/* (4) for the k < VL elements from j on */
INLINE void FN(normalise_some)(FN(row) row, ptrdiff_t j, ptrdiff_t k, const V stats[3], const T *gain, const T *bias,
                               const int centred, X *y, X *sum, FN(joint) *joint, FN(joint) *sum_joint)
{
    const V zero = TN(splat)(0), x = FN(row_load_some)(row, j, k, zero);
    V v = FN(normalised)(x, stats, NULL, NULL, j, centred);
    if (gain) v *= TN(load_some)(gain + j, k, zero);
    if (bias) v += TN(load_some)(bias + j, k, zero);
    if (sum) FN(out_some)(sum + j, k, x, sum_joint);
    FN(out_some)(y + j, k, v, joint);
}

/* (4): y [n], and sum [n] where there is a residual. joint and sum_joint are NULL unless streaming. */
INLINE void FN(normalise)(FN(row) row, ptrdiff_t n, const T st[3], const T *gain, const T *bias, const int centred, X *y,
                          X *sum, FN(joint) *joint, FN(joint) *sum_joint)
{
    const V stats[3] = {TN(splat)(st[0]), TN(splat)(st[1]), TN(splat)(st[2])};
    const ptrdiff_t misaligned = (ptrdiff_t)((uintptr_t)y / sizeof(X) % VL);
    ptrdiff_t begin = misaligned ? VL - misaligned : 0; /* up to here y is short of a whole vector's address */
    if (begin > n) begin = n;
    const ptrdiff_t end = begin + (n - begin) / VL * VL;
    if (begin) FN(normalise_some)(row, 0, begin, stats, gain, bias, centred, y, sum, joint, sum_joint);
    if (joint) FN(normalise_whole)(row, begin, end, stats, gain, bias, centred, y, sum, 1, sum_joint != NULL);
    else if (gain && bias) FN(normalise_whole)(row, begin, end, stats, gain, bias, centred, y, sum, 0, 0);
    else FN(normalise_whole)(row, begin, end, stats, gain, bias, centred, y, sum, 0, 0);
    if (end < n) FN(normalise_some)(row, end, n - end, stats, gain, bias, centred, y, sum, joint, sum_joint);
}

/* Statistics of a row are taken before the row before it is written: the one's division and square root hide behind
 * the other's stores. Not for long rows, two of which would not fit the first cache. */
INLINE void FN(norm_rows)(const cnorm_norm *call, const int centred, const int with_residual)
{
    const ptrdiff_t rows = call->rows, n = call->n, ahead = n <= LOOK_AHEAD ? 1 : 0;
    const T *gain = call->gain, *bias = call->bias;
    T *stats = call->stats, recent[2][3];
    int plain[2];
    FN(row) row[2];
    FN(joint) y_joint = {.filled = 0}, sum_joint = {.filled = 0};
    FN(joint) *yj = call->streaming ? &y_joint : NULL, *sj = call->streaming && with_residual ? &sum_joint : NULL;
    if (sj && ((uintptr_t)call->sum - (uintptr_t)call->y) % sizeof sj->lanes) sj = NULL; /* y's alignment decides */
    for (ptrdiff_t next = 0; next < rows + ahead; ++next) {
        if (next < rows) {
            FN(row) *to = &row[next % 2];
            to->x = (const X *)call->x + next * call->x_stride;
            to->residual = with_residual ? (const X *)call->residual + next * call->residual_stride : NULL;
            plain[next % 2] = FN(row_stats)(*to, n, call->eps, centred, recent[next % 2]);
        }
        const ptrdiff_t r = next - ahead;
        if (r < 0) continue;
        const FN(row) from = {row[r % 2].x, with_residual ? row[r % 2].residual : NULL};
        X *y = (X *)call->y + r * call->y_stride, *sum = with_residual ? (X *)call->sum + r * call->sum_stride : NULL;
        T *st = recent[r % 2];
        if (plain[r % 2]) FN(normalise)(from, n, st, gain, bias, centred, y, sum, yj, sj);
        else FN(exact_row)(from, n, gain, bias, call->eps, centred, y, sum, st);
        if (stats) memcpy(stats + 3 * r, st, sizeof recent[0]);
    }
    if (yj) FN(flush)(yj);
    if (sj) FN(flush)(sj);
    if (yj) stream_fence();
}

static void FN(layer_norm)(const cnorm_norm *call) { FN(norm_rows)(call, 1, 0); }
static void FN(add_layer_norm)(const cnorm_norm *call) { FN(norm_rows)(call, 1, 1); }
static void FN(rms_norm)(const cnorm_norm *call) { FN(norm_rows)(call, 0, 0); }

/* (5) for one vector; dgain and dbias are this block's running sums */
INLINE void FN(backward_terms)(V x, V dy, V gain, const V stats[3], const int centred, V *g, V *gx, V *dgain, V *dbias)
{
    const V xhat = centred ? ((x - stats[0]) - stats[1]) * stats[2] : x * stats[2];
    const V scaled = dy * gain;
    if (centred) *g += scaled, *dbias += dy;
    *gx += scaled * xhat;
    *dgain += dy * xhat;
}

/* (5) and (6) for one row; dgain [n], dbias [n] as in backward_terms; false, without (6), if a sum overflowed */
INLINE int FN(backward_row)(ptrdiff_t n, const X *dy, const X *x, const T *gain, const T st[3], const int centred, X *dx,
                            T *dgain, T *dbias)
{
    const V stats[3] = {TN(splat)(st[0]), TN(splat)(st[1]), TN(splat)(st[2])};
    const V zero = TN(splat)(0), one = TN(splat)(1);
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
                    V share_gain = TN(load)(dgain + at), share_bias = TN(load)(dbias + at);
                    FN(backward_terms)(FN(load)(x + at), FN(load)(dy + at), gain ? TN(load)(gain + at) : one, stats,
                                       centred, &gp[i], &gxp[i], &share_gain, &share_bias);
                    TN(store)(dgain + at, share_gain);
                    if (centred) TN(store)(dbias + at, share_bias);
                }
            }
#pragma GCC unroll 4
            for (int i = 0; i < PASS; ++i) {
                const ptrdiff_t at = base + whole + i * VL;
                const ptrdiff_t left = start + len - at < VL ? start + len - at : VL;
                if (left > 0) { /* missing dy are zero, and with them every term */
                    V share_gain = TN(load_some)(dgain + at, left, zero), share_bias = TN(load_some)(dbias + at, left, zero);
                    FN(backward_terms)(FN(load_some)(x + at, left, stats[0]), FN(load_some)(dy + at, left, zero),
                                       gain ? TN(load_some)(gain + at, left, zero) : one, stats, centred, &gp[i], &gxp[i],
                                       &share_gain, &share_bias);
                    TN(store_some)(dgain + at, left, share_gain);
                    if (centred) TN(store_some)(dbias + at, left, share_bias);
                }
                g[first + i] = gp[i];
                gx[first + i] = gxp[i];
            }
        }
        if (centred) sum_g += (double)TN(tree)(g);
        sum_gx += (double)TN(tree)(gx);
    }
    if (!(fabs(sum_g) <= SUM_MAX && fabs(sum_gx) <= SUM_MAX)) return 0;
    const V G = TN(splat)((T)(sum_g / (double)n)), H = TN(splat)((T)(sum_gx / (double)n));
    for (ptrdiff_t j = 0; j < n; j += VL) {
        const ptrdiff_t k = n - j < VL ? n - j : VL;
        const V xv = k == VL ? FN(load)(x + j) : FN(load_some)(x + j, k, zero);
        V g = k == VL ? FN(load)(dy + j) : FN(load_some)(dy + j, k, zero);
        if (gain) g *= k == VL ? TN(load)(gain + j) : TN(load_some)(gain + j, k, zero);
        const V xhat = centred ? ((xv - stats[0]) - stats[1]) * stats[2] : xv * stats[2];
        const V v = stats[2] * (centred ? (g - G) - xhat * H : g - xhat * H); /* (6) */
        if (k == VL) FN(store)(dx + j, v);
        else FN(store_some)(dx + j, k, v);
    }
    return 1;
}

/* (5) and (6) in float64, for rows whose xhat, dx or sums arithmetic in T cannot reach; dgain NULL: only (6) */
RARE void FN(exact_backward_row)(ptrdiff_t n, const X *dy, const X *x, const T *gain, const T st[3], int centred, X *dx,
                                 T *dgain, T *dbias)
{
    FN(exact) e = FN(exact_stats)((FN(row)){x, NULL}, n, 0, centred);
    /* a rstd in range carries the eps of the forward call; one out of range says that eps was negligible */
    if (st[2] == 0) e.rstd = e.inv_std_dev = 0;
    else if (st[2] >= RSTD_TINY && st[2] <= RSTD_HUGE) {
        e.inv_std_dev = (double)st[2];
        e.rstd = e.inv_std_dev / e.scale;
    }
    double g_scale = 1;
    if (sizeof(T) == 8) {
        double largest = 0;
        for (ptrdiff_t j = 0; j < n; ++j) largest = larger_finite(largest, (double)FN(value)(dy[j]));
        g_scale = scale_for(largest, 0);
    }
    double sum_g = 0, sum_gx = 0;
    for (ptrdiff_t j = 0; j < n; ++j) {
        const double d = (double)FN(value)(dy[j]), xhat = FN(exact_xhat)(&e, (double)FN(value)(x[j]));
        const double g = d * g_scale * (gain ? (double)gain[j] : 1.0);
        sum_g += g;
        sum_gx += g * xhat;
        if (dgain) {
            dgain[j] = (T)((double)dgain[j] + d * xhat);
            dbias[j] = (T)((double)dbias[j] + d);
        }
    }
    const double G = centred ? sum_g / (double)n : 0, H = sum_gx / (double)n;
    for (ptrdiff_t j = 0; j < n; ++j) {
        const double xhat = FN(exact_xhat)(&e, (double)FN(value)(x[j]));
        const double g = (double)FN(value)(dy[j]) * g_scale * (gain ? (double)gain[j] : 1.0);
        dx[j] = FN(stored)((T)(e.inv_std_dev * ((g - G) - xhat * H) / g_scale));
    }
}

/* One block of rows: partial [2, n] becomes this block's dgain and dbias */
INLINE void FN(backward_rows)(const cnorm_norm_backward *call, const int centred)
{
    const ptrdiff_t n = call->n;
    const X *dy = call->dy, *x = call->x;
    const T *gain = call->gain, *st = call->stats;
    X *dx = call->dx;
    T *dgain = call->partial, *dbias = dgain + n;
    memset(dgain, 0, 2 * (size_t)n * sizeof(T));
    for (ptrdiff_t row = 0; row < call->rows; ++row) {
        /* written so that NaN goes the slow way too */
        if (!(st[2] >= RSTD_MIN && st[2] <= RSTD_MAX))
            FN(exact_backward_row)(n, dy, x, gain, st, centred, dx, dgain, dbias);
        else if (!FN(backward_row)(n, dy, x, gain, st, centred, dx, dgain, dbias))
            FN(exact_backward_row)(n, dy, x, gain, st, centred, dx, NULL, NULL);
        dy += call->dy_stride;
        x += call->x_stride;
        dx += call->dx_stride;
        st += 3;
    }
}

static void FN(layer_norm_backward)(const cnorm_norm_backward *call) { FN(backward_rows)(call, 1); }
static void FN(rms_norm_backward)(const cnorm_norm_backward *call) { FN(backward_rows)(call, 0); }
