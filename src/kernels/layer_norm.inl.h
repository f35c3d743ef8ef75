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

/* lanes from <= i < to < VL + from of the vector at j; the others hold `fill` */
INLINE V FN(row_load_range)(FN(row) row, ptrdiff_t j, ptrdiff_t from, ptrdiff_t to, V fill)
{
    if (!row.residual) return FN(load_range)(row.x + j, from, to, fill);
    const V zero = TN(splat)(0);
    T sum[VL]; /* rounded to storage; fill is not */
    TN(store)(sum, FN(rounded)(FN(load_range)(row.x + j, from, to, zero) +
                               FN(load_range)(row.residual + j, from, to, zero)));
    return TN(load_range)(sum, from, to, fill);
}

INLINE double FN(row_value)(FN(row) row, ptrdiff_t j)
{
    T v = FN(value)(row.x[j]);
    return (double)(row.residual ? FN(value)(FN(stored)(v + FN(value)(row.residual[j]))) : v);
}

/* Output is written in whole aligned vectors. When streaming, the vector that one row ends in and the next begins in
 * is kept here until it is complete: a partial line would cost more than streaming saves. */
typedef struct { X lanes[VL], *at; ptrdiff_t filled; } FN(joint);

RARE void FN(flush)(FN(joint) *joint)
{
    for (ptrdiff_t i = 0; i < joint->filled; ++i) joint->at[i] = joint->lanes[i];
    joint->filled = 0;
}

/* k < VL elements, which end a vector or begin one */
static __attribute__((noinline)) void FN(join)(X *y, ptrdiff_t k, V v, FN(joint) *joint)
{
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

/* A row being written: (4) for elements `at` to n; whole vectors up to `end`, at aligned addresses of y */
typedef struct {
    FN(row) row;
    ptrdiff_t n, at, end;
    V shift, delta, rstd;
    const T *gain, *bias; /* may be NULL */
    X *y, *sum;           /* sum may be NULL */
    FN(joint) *joint, *sum_joint; /* NULL unless streaming */
} FN(writer);

/* (4) for one whole vector at j; what is not `common` may have a K, and no gain or bias */
INLINE V FN(normalised)(const FN(writer) *w, V x, ptrdiff_t j, const int centred, const int common)
{
    if (centred && !common) x -= w->shift;
    V v = (centred ? x - w->delta : x) * w->rstd;
    if (common || w->gain) v *= TN(load)(w->gain + j);
    if (centred && (common || w->bias)) v += TN(load)(w->bias + j);
    return v;
}

/* the k < VL elements from `at` on */
INLINE void FN(write_some)(FN(writer) *w, ptrdiff_t k, const int centred)
{
    const V zero = TN(splat)(0), x = FN(row_load_range)(w->row, w->at, 0, k, zero);
    V v = (centred ? (x - w->shift) - w->delta : x) * w->rstd;
    if (w->gain) v *= TN(load_range)(w->gain + w->at, 0, k, zero);
    if (w->bias) v += TN(load_range)(w->bias + w->at, 0, k, zero);
    if (w->sum && w->sum_joint) FN(join)(w->sum + w->at, k, x, w->sum_joint);
    else if (w->sum) FN(store_some)(w->sum + w->at, k, x);
    if (w->joint) FN(join)(w->y + w->at, k, v, w->joint);
    else FN(store_some)(w->y + w->at, k, v);
    w->at += k;
}

INLINE void FN(write_whole)(FN(writer) *w, const int centred, const int common, const int stream_y, const int stream_sum)
{
    for (; w->at < w->end; w->at += VL) {
        const ptrdiff_t j = w->at;
        const V x = FN(row_load)(w->row, j), v = FN(normalised)(w, x, j, centred, common);
        if (w->sum && stream_sum) FN(stream)(w->sum + j, x);
        else if (w->sum) FN(store)(w->sum + j, x);
        if (stream_y) FN(stream)(w->y + j, v);
        else FN(store)(w->y + j, v);
    }
}

/* has its gain and bias and no K: worth loops without those branches */
INLINE int FN(is_common)(const FN(writer) *w, const T stats[3], const int centred)
{
    return w->gain && (!centred || (w->bias && stats[0] == 0));
}

/* as far as the first whole vector */
INLINE void FN(write_head)(FN(writer) *w, const T stats[3], const int centred)
{
    const ptrdiff_t misaligned = (ptrdiff_t)((uintptr_t)w->y / sizeof(X) % VL);
    const ptrdiff_t head = misaligned == 0 || (!w->joint && w->n <= SHORT_ROW) ? 0 : VL - misaligned < w->n ? VL - misaligned : w->n;
    w->shift = TN(splat)(stats[0]);
    w->delta = TN(splat)(stats[1]);
    w->rstd = TN(splat)(stats[2]);
    w->at = 0;
    w->end = head + (w->n - head) / VL * VL;
    if (head) FN(write_some)(w, head, centred);
}

/* the rest of the row */
INLINE void FN(write_rest)(FN(writer) *w, const T stats[3], const int centred)
{
    const int common = FN(is_common)(w, stats, centred);
    if (w->joint && common) FN(write_whole)(w, centred, 1, 1, w->sum_joint != NULL);
    else if (w->joint) FN(write_whole)(w, centred, 0, 1, w->sum_joint != NULL);
    else if (common) FN(write_whole)(w, centred, 1, 0, 0);
    else FN(write_whole)(w, centred, 0, 0, 0);
    if (w->at < w->n) FN(write_some)(w, w->n - w->at, centred);
}

/* s += d and q += d^2 for one vector */
INLINE void FN(count)(V d, const int centred, V *s, V *q)
{
    if (centred) *s += d;
    *q += d * d;
}

/* S = sum d and Q = sum d^2 over the row, d = x - K. A writer, if there is one, is moved on in the same loop: the row
 * before leaves for the caches while this one is summed.
 *
 * Where crossing cache lines costs most, loads are at aligned addresses. A lane's sum is then found `turn` lanes further
 * on, and is turned back before the tree: the same additions in the same order. */
INLINE void FN(sums)(FN(row) row, ptrdiff_t n, T K, const int centred, FN(writer) *w, double *S, double *Q)
{
    const V shift = TN(splat)(K), zero = TN(splat)(0);
    const ptrdiff_t turn = ALIGN_LOADS && n > SHORT_ROW ? (ptrdiff_t)((uintptr_t)row.x / sizeof(X) % VL) : 0;
    *S = *Q = 0;
    for (ptrdiff_t start = 0; start < n; start += FOLD) {
        const ptrdiff_t stop = n - start < FOLD ? n : start + FOLD;
        V s[LANE_VECTORS], q[LANE_VECTORS];
#pragma GCC unroll 2
        for (int first = 0; first < LANE_VECTORS; first += PASS) {
#pragma GCC unroll 4
            for (int i = 0; i < PASS; ++i) s[first + i] = q[first + i] = zero;
            for (ptrdiff_t block = start; block < stop; block += BLOCK * LANES) {
                const ptrdiff_t end = stop - block < BLOCK * LANES ? stop : block + BLOCK * LANES;
                ptrdiff_t j = block - turn + first * VL;
                V sp[PASS], qp[PASS];
#pragma GCC unroll 4
                for (int i = 0; i < PASS; ++i) sp[i] = qp[i] = zero;
                if (turn) { /* the first vectors, without what lies before the block; what is missing reads as K */
#pragma GCC unroll 4
                    for (int i = 0; i < PASS; ++i, j += VL) {
                        const ptrdiff_t from = i == 0 ? turn : 0, to = end - j < VL ? end - j : VL;
                        if (from < to) FN(count)(FN(row_load_range)(row, j, from, to, shift) - shift, centred, &sp[i], &qp[i]);
                    }
                }
                const ptrdiff_t whole = end - (first + PASS) * VL + first * VL;
                if (w) {
                    for (; j <= whole && w->at + PASS * VL <= w->end; j += LANES, w->at += PASS * VL) {
#pragma GCC unroll 4
                        for (int i = 0; i < PASS; ++i) {
                            const ptrdiff_t at = w->at + i * VL;
                            FN(count)(TN(keep)(FN(row_load)(row, j + i * VL)) - shift, centred, &sp[i], &qp[i]);
                            FN(store)(w->y + at, FN(normalised)(w, FN(row_load)(w->row, at), at, centred, 1));
                        }
                    }
                }
                for (; j <= whole; j += LANES) {
#pragma GCC unroll 4
                    for (int i = 0; i < PASS; ++i)
                        FN(count)(TN(keep)(FN(row_load)(row, j + i * VL)) - shift, centred, &sp[i], &qp[i]);
                }
#pragma GCC unroll 4
                for (int i = 0; i < PASS; ++i, j += VL) {
                    if (end - j >= VL) FN(count)(FN(row_load)(row, j) - shift, centred, &sp[i], &qp[i]);
                    else if (end > j) FN(count)(FN(row_load_range)(row, j, 0, end - j, shift) - shift, centred, &sp[i], &qp[i]);
                }
#pragma GCC unroll 4
                for (int i = 0; i < PASS; ++i) {
                    s[first + i] += sp[i];
                    q[first + i] += qp[i];
                }
            }
        }
        if (turn) {
            TN(turn)(s, turn);
            TN(turn)(q, turn);
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
    FN(sums)(row, n, (T)mean, 1, NULL, &S, &Q);
    const double delta = S * per, spread = Q - S * delta;
    if (!FN(accepted)(count, S * delta, spread, Q, eps)) return 0;
    FN(keep_stats)((double)(T)mean, delta, spread * per, eps, stats);
    return 1;
}

/* (1) and (2): stats = K, delta, rstd; false where the row needs (3). w: see sums */
INLINE int FN(row_stats)(FN(row) row, ptrdiff_t n, double eps, const int centred, FN(writer) *w, T stats[3])
{
    const double count = (double)n, per = 1.0 / count;
    double S, Q;
    FN(sums)(row, n, 0, centred, w, &S, &Q);
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
            sums_f64((row_f64){piece, NULL}, len, 0, 1, NULL, &S, &Q);
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

/* Statistics of a row are taken before the row before it is written, or while: the one's division and square root hide
 * behind the other's stores. Not for long rows, two of which would not fit the first cache, nor when streaming, where
 * memory is waited for anyway. */
INLINE void FN(norm_rows)(const cnorm_norm *call, const int centred, const int with_residual)
{
    const ptrdiff_t rows = call->rows, n = call->n, ahead = n <= LOOK_AHEAD && !call->streaming ? 1 : 0;
    T *stats = call->stats, recent[2][3];
    int plain[2] = {0, 0};
    FN(joint) y_joint = {.filled = 0}, sum_joint = {.filled = 0};
    FN(writer) w = {.n = n, .gain = call->gain, .bias = call->bias};
    if (call->streaming) w.joint = &y_joint;
    if (with_residual && w.joint && ((uintptr_t)call->sum - (uintptr_t)call->y) % sizeof y_joint.lanes == 0)
        w.sum_joint = &sum_joint; /* y decides what is aligned */
    for (ptrdiff_t next = 0; next < rows + ahead; ++next) {
        const ptrdiff_t r = next - ahead; /* the row to write */
        T *st = recent[r & 1], *next_st = recent[next & 1];
        if (r >= 0) {
            w.row.x = (const X *)call->x + r * call->x_stride;
            w.row.residual = with_residual ? (const X *)call->residual + r * call->residual_stride : NULL;
            w.y = (X *)call->y + r * call->y_stride;
            w.sum = with_residual ? (X *)call->sum + r * call->sum_stride : NULL;
        }
        const int begun = ahead && r >= 0 && plain[r & 1] && !with_residual;
        if (begun) FN(write_head)(&w, st, centred);
        if (next < rows) {
            const FN(row) row = {(const X *)call->x + next * call->x_stride,
                                 with_residual ? (const X *)call->residual + next * call->residual_stride : NULL};
            if (begun && !w.joint && FN(is_common)(&w, st, centred))
                plain[next & 1] = FN(row_stats)(row, n, call->eps, centred, &w, next_st);
            else plain[next & 1] = FN(row_stats)(row, n, call->eps, centred, NULL, next_st);
        }
        if (r < 0) continue;
        if (plain[r & 1]) {
            if (!begun) FN(write_head)(&w, st, centred);
            FN(write_rest)(&w, st, centred);
        } else {
            FN(exact_row)(w.row, n, w.gain, w.bias, call->eps, centred, w.y, w.sum, st);
        }
        if (stats) memcpy(stats + 3 * r, st, sizeof recent[0]);
    }
    if (w.joint) {
        FN(flush)(&y_joint);
        FN(flush)(&sum_joint);
        stream_fence();
    }
}

static void FN(layer_norm)(const cnorm_norm *call) { FN(norm_rows)(call, 1, 0); }
static void FN(add_layer_norm)(const cnorm_norm *call) { FN(norm_rows)(call, 1, 1); }
static void FN(rms_norm)(const cnorm_norm *call) { FN(norm_rows)(call, 0, 0); }

/* A row of the backward pass */
typedef struct {
    const X *dy, *x;
    X *dx;
    V shift, delta, rstd;
} FN(gradient);

INLINE V FN(xhat)(const FN(gradient) *row, V x, const int centred)
{
    return (centred ? (x - row->shift) - row->delta : x) * row->rstd;
}

/* (5) for one vector of one row; dgain and dbias are this block's running sums */
INLINE void FN(backward_terms)(V xhat, V dy, V gain, const int centred, V *g, V *gx, V *dgain, V *dbias)
{
    const V scaled = dy * gain;
    if (centred) *g += scaled, *dbias += dy;
    *gx += scaled * xhat;
    *dgain += dy * xhat;
}

/* (5) for `count` rows, which share the traffic of dgain [n] and dbias [n]: sums = G n, H n of each */
INLINE void FN(backward_sums)(ptrdiff_t n, const FN(gradient) *row, const int count, const T *gain, const int centred,
                              T *dgain, T *dbias, double sums[][2])
{
    const V zero = TN(splat)(0), one = TN(splat)(1);
    for (int r = 0; r < count; ++r) sums[r][0] = sums[r][1] = 0;
    for (ptrdiff_t start = 0; start < n; start += FOLD) {
        const ptrdiff_t stop = n - start < FOLD ? n : start + FOLD;
        V g[BACKWARD_ROWS][LANE_VECTORS], gx[BACKWARD_ROWS][LANE_VECTORS];
#pragma GCC unroll 2
        for (int first = 0; first < LANE_VECTORS; first += PASS) {
#pragma GCC unroll 2
            for (int r = 0; r < count; ++r)
#pragma GCC unroll 4
                for (int i = 0; i < PASS; ++i) g[r][first + i] = gx[r][first + i] = zero;
            for (ptrdiff_t block = start; block < stop; block += BLOCK * LANES) {
                const ptrdiff_t end = stop - block < BLOCK * LANES ? stop : block + BLOCK * LANES;
                ptrdiff_t j = block + first * VL;
                V gp[BACKWARD_ROWS][PASS], gxp[BACKWARD_ROWS][PASS];
#pragma GCC unroll 2
                for (int r = 0; r < count; ++r)
#pragma GCC unroll 4
                    for (int i = 0; i < PASS; ++i) gp[r][i] = gxp[r][i] = zero;
                for (; j + PASS * VL <= end; j += LANES) {
#pragma GCC unroll 4
                    for (int i = 0; i < PASS; ++i) {
                        const ptrdiff_t at = j + i * VL;
                        const V scale = gain ? TN(load)(gain + at) : one;
                        V share_gain = TN(load)(dgain + at), share_bias = TN(load)(dbias + at);
#pragma GCC unroll 2
                        for (int r = 0; r < count; ++r)
                            FN(backward_terms)(FN(xhat)(&row[r], FN(load)(row[r].x + at), centred),
                                               FN(load)(row[r].dy + at), scale, centred, &gp[r][i], &gxp[r][i],
                                               &share_gain, &share_bias);
                        TN(store)(dgain + at, share_gain);
                        if (centred) TN(store)(dbias + at, share_bias);
                    }
                }
                for (int i = 0; i < PASS && j < end; ++i, j += VL) { /* missing dy are zero, and with them every term */
                    const ptrdiff_t k = end - j < VL ? end - j : VL;
                    const V scale = gain ? TN(load_range)(gain + j, 0, k, zero) : one;
                    V share_gain = TN(load_range)(dgain + j, 0, k, zero), share_bias = TN(load_range)(dbias + j, 0, k, zero);
                    for (int r = 0; r < count; ++r)
                        FN(backward_terms)(FN(xhat)(&row[r], FN(load_range)(row[r].x + j, 0, k, row[r].shift), centred),
                                           FN(load_range)(row[r].dy + j, 0, k, zero), scale, centred, &gp[r][i],
                                           &gxp[r][i], &share_gain, &share_bias);
                    TN(store_some)(dgain + j, k, share_gain);
                    if (centred) TN(store_some)(dbias + j, k, share_bias);
                }
#pragma GCC unroll 2
                for (int r = 0; r < count; ++r) {
#pragma GCC unroll 4
                    for (int i = 0; i < PASS; ++i) {
                        g[r][first + i] += gp[r][i];
                        gx[r][first + i] += gxp[r][i];
                    }
                }
            }
        }
#pragma GCC unroll 2
        for (int r = 0; r < count; ++r) {
            if (centred) sums[r][0] += (double)TN(tree)(g[r]);
            sums[r][1] += (double)TN(tree)(gx[r]);
        }
    }
}

/* (6) for one row */
INLINE void FN(backward_dx)(ptrdiff_t n, const FN(gradient) *row, const T *gain, const int centred, const double sums[2])
{
    const V G = TN(splat)((T)(sums[0] / (double)n)), H = TN(splat)((T)(sums[1] / (double)n)), zero = TN(splat)(0);
    ptrdiff_t j = 0;
    for (; j + VL <= n; j += VL) {
        V g = FN(load)(row->dy + j);
        if (gain) g *= TN(load)(gain + j);
        const V xhat = FN(xhat)(row, FN(load)(row->x + j), centred);
        FN(store)(row->dx + j, row->rstd * ((centred ? g - G : g) - xhat * H));
    }
    if (j < n) {
        V g = FN(load_range)(row->dy + j, 0, n - j, zero);
        if (gain) g *= TN(load_range)(gain + j, 0, n - j, zero);
        const V xhat = FN(xhat)(row, FN(load_range)(row->x + j, 0, n - j, zero), centred);
        FN(store_some)(row->dx + j, n - j, row->rstd * ((centred ? g - G : g) - xhat * H));
    }
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

/* can the row do without the float64 path? written so that NaN can't */
INLINE int FN(in_range)(const T st[3]) { return st[2] >= RSTD_MIN && st[2] <= RSTD_MAX; }

/* One block of rows: partial [2, n] becomes this block's dgain and dbias */
INLINE void FN(backward_rows)(const cnorm_norm_backward *call, const int centred)
{
    const ptrdiff_t n = call->n;
    const T *gain = call->gain, *stats = call->stats;
    T *dgain = call->partial, *dbias = dgain + n;
    memset(dgain, 0, 2 * (size_t)n * sizeof(T));
    for (ptrdiff_t done = 0, count; done < call->rows; done += count) {
        FN(gradient) row[BACKWARD_ROWS];
        double sums[BACKWARD_ROWS][2];
        for (count = 0; count < BACKWARD_ROWS && done + count < call->rows; ++count) {
            const ptrdiff_t r = done + count;
            const T *st = stats + 3 * r;
            if (count && !FN(in_range)(st)) break;
            row[count] = (FN(gradient)){.dy = (const X *)call->dy + r * call->dy_stride,
                                        .x = (const X *)call->x + r * call->x_stride,
                                        .dx = (X *)call->dx + r * call->dx_stride,
                                        .shift = TN(splat)(st[0]), .delta = TN(splat)(st[1]), .rstd = TN(splat)(st[2])};
            if (!FN(in_range)(st)) {
                FN(exact_backward_row)(n, row[0].dy, row[0].x, gain, st, centred, row[0].dx, dgain, dbias);
                count = 1;
                goto next;
            }
        }
        if (count == BACKWARD_ROWS) FN(backward_sums)(n, row, BACKWARD_ROWS, gain, centred, dgain, dbias, sums);
        else for (int r = 0; r < count; ++r) FN(backward_sums)(n, row + r, 1, gain, centred, dgain, dbias, sums + r);
        for (int r = 0; r < count; ++r) {
            if (fabs(sums[r][0]) <= SUM_MAX && fabs(sums[r][1]) <= SUM_MAX) FN(backward_dx)(n, &row[r], gain, centred, sums[r]);
            else FN(exact_backward_row)(n, row[r].dy, row[r].x, gain, stats + 3 * (done + r), centred, row[r].dx, NULL, NULL);
        }
    next:;
    }
}

static void FN(layer_norm_backward)(const cnorm_norm_backward *call) { FN(backward_rows)(call, 1); }
static void FN(rms_norm_backward)(const cnorm_norm_backward *call) { FN(backward_rows)(call, 0); }
