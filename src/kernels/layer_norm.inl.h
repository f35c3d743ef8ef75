/* Layer and RMS normalisation of rows, forward and backward.
 *     layer norm   Ba, Kiros, Hinton 2016, arXiv:1607.06450, Eq. 3
 *     RMS norm     Zhang, Sennrich 2019, arXiv:1910.07467, Eq. 4: the same with the mean taken as 0
 *
 * Included once per storage type X, with its compute type T (float for float16 and bfloat16), the vocabulary FN(name)
 * of X and TN(name), V, VL, LANES of T, and the limits of T, all defined by isa.inl.h. `centred` is a constant where
 * these functions are called: 1 layer norm, 0 RMS norm. A row is x [n], or with a residual the sum x + residual
 * rounded to X, which is stored while its sums are taken, and read from there ever after.
 *
 * Forward
 *   (1) one sweep: S = sum d, Q = sum d^2 of d = x - K; delta = S/n. K = 0, or, where the first LANES elements have one
 *       sign, their mean rounded. Accepted if S delta <= Q - S delta, that is (mean - K)^2 <= var, and Q can neither
 *       have overflowed nor drowned in subnormals.
 *   (2) else the same with K = K + delta rounded, the mean.
 *   (3) else the row is done in float64, scaled by a power of two and shifted by its first element.
 *   var = (Q - S delta)/n,  rstd = 1/sqrt(var + eps), or 0 where var + eps = 0
 *   (4) y = (d - delta) rstd gain + bias
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

enum {
    FN(PIECE) = 256,                          /* elements that a rare float64 path widens at a time: little stack */
    FN(NEAR) = NEAR_BYTES / (int)sizeof(T),   /* elements of the longest row that stays in the first cache */
    FN(ROOM) = FN(NEAR) + 2 * VL,             /* for a row, wherever in a vector it begins */
    FN(BESIDE) = PAGE_BYTES / (int)sizeof(T) + 2 * FN(ROOM), /* for two rows, wherever in a page they begin */
};

/* A row to read, and where its sum with the residual goes */
typedef struct FN(joint) FN(joint);
typedef struct {
    const X *x, *residual; /* residual may be NULL, and is with sum */
    X *sum;
    FN(joint) *sum_joint; /* NULL unless the sum is streamed */
} FN(row);

INLINE V FN(row_load)(const FN(row) *row, ptrdiff_t j)
{
    V v = FN(load)(row->x + j);
    return row->residual ? FN(rounded)(v + FN(load)(row->residual + j)) : TN(keep)(v);
}

/* lanes from <= i < to of the vector at j, the others zero */
INLINE V FN(row_load_range)(const FN(row) *row, ptrdiff_t j, ptrdiff_t from, ptrdiff_t to)
{
    const V zero = TN(splat)(0), v = FN(load_range)(row->x + j, from, to, zero);
    return row->residual ? FN(rounded)(v + FN(load_range)(row->residual + j, from, to, zero)) : v;
}

/* Output is streamed in whole aligned vectors. The one that a row ends in and the next begins in is kept here until it is
 * complete: a partial line would cost more than streaming saves. */
struct FN(joint) { V v; X *at; ptrdiff_t from, to; }; /* lanes from <= i < to of v wait for the vector at `at` */

RARE void FN(flush)(FN(joint) *joint)
{
    if (joint->to) FN(store_range)(joint->at, joint->from, joint->to, joint->v);
    joint->from = joint->to = 0;
}

/* lanes from <= i < to of the aligned vector at y, not all of them */
EDGE void FN(join)(X *y, ptrdiff_t from, ptrdiff_t to, V v, FN(joint) *joint)
{
    if (joint->at == y && joint->to == from) {
        joint->v = TN(fill)(TN(keep)(joint->v), joint->from, joint->to, v);
    } else {
        FN(flush)(joint);
        *joint = (FN(joint)){v, y, from, from};
    }
    joint->to = to;
    if (to < VL) return;
    if (joint->from) {
        FN(flush)(joint);
    } else {
        FN(stream)(y, joint->v);
        joint->to = 0;
    }
}

/* the same where output may not be streamed: joint is then NULL */
INLINE void FN(put_range)(X *y, ptrdiff_t from, ptrdiff_t to, V v, FN(joint) *joint)
{
    if (joint) FN(join)(y, from, to, v, joint);
    else FN(store_range)(y, from, to, v);
}

/* where to read a row again */
INLINE const X *FN(stored_row)(const FN(row) *row)
{
    if (row->sum_joint) FN(flush)(row->sum_joint);
    return row->residual ? row->sum : row->x;
}

/* A row being written: (4) for elements `at` to n; whole vectors up to `end`. What its d comes from is a constant where
 * these functions are called. */
enum FN(origin) {
    FN(KEPT),    /* d */
    FN(PLAIN),   /* x, K being 0 */
    FN(SHIFTED), /* x - K */
};
typedef struct {
    const T *d;
    const X *x;
    ptrdiff_t n, at, end;
    V shift, delta, rstd;
    const T *gain, *bias; /* may be NULL; RMS norm has no bias */
    X *y;
    FN(joint) *joint; /* NULL unless y is streamed */
    const X *residual; /* NULL unless the sum is streamed too; rows ahead of it and x are then fetched */
    ptrdiff_t x_ahead, residual_ahead;
} FN(writer);

/* bytes to the row to fetch while this one is streamed: else memory would be read between the streams only */
INLINE ptrdiff_t FN(ahead)(ptrdiff_t n, ptrdiff_t stride)
{
    const ptrdiff_t item = sizeof(X), rows = AHEAD_BYTES / (n * item);
    return rows * stride * item;
}

INLINE void FN(fetch_ahead)(const FN(writer) *w, ptrdiff_t j)
{
    if (!w->residual) return;
    fetch(w->x + j, w->x_ahead, VL * sizeof(X));
    fetch(w->residual + j, w->residual_ahead, VL * sizeof(X));
}

INLINE V FN(normalised)(const FN(writer) *w, V d, V gain, V bias, const int centred)
{
    const V xhat = (centred ? d - w->delta : d) * w->rstd;
    return centred ? xhat * gain + bias : xhat * gain;
}

/* (4) for one whole vector at j; affine, a constant, says that neither gain nor bias is NULL, nor has a NaN that would not do
 * for store_two */
INLINE V FN(whole)(const FN(writer) *w, ptrdiff_t j, const int centred, const enum FN(origin) origin, const int affine)
{
    V d = origin == FN(KEPT) ? TN(load)(w->d + j) : FN(load)(w->x + j);
    if (origin == FN(SHIFTED)) d -= w->shift;
    const V gain = affine || w->gain ? TN(load)(w->gain + j) : TN(splat)(1);
    const V bias = !centred ? gain : affine || w->bias ? TN(load)(w->bias + j) : TN(splat)(-(T)0);
    return FN(normalised)(w, d, gain, bias, centred);
}

/* what there is of the vector at `at`, where the row begins or ends in it */
INLINE void FN(write_edge)(FN(writer) *w, const int centred, const enum FN(origin) origin)
{
    const V zero = TN(splat)(0), one = TN(splat)(1), minus = TN(splat)(-(T)0);
    const ptrdiff_t at = w->at, from = at < 0 ? -at : 0, to = w->n - at < VL ? w->n - at : VL;
    V d = origin == FN(KEPT) ? TN(load_range)(w->d + at, from, to, zero) : FN(load_range)(w->x + at, from, to, zero);
    if (origin == FN(SHIFTED)) d -= w->shift;
    const V gain = w->gain ? TN(load_range)(w->gain + at, from, to, one) : one;
    const V bias = !centred ? gain : w->bias ? TN(load_range)(w->bias + at, from, to, minus) : minus;
    FN(put_range)(w->y + at, from, to, FN(normalised)(w, d, gain, bias, centred), w->joint);
    FN(fetch_ahead)(w, at);
    w->at += VL;
}

/* lanes of an aligned vector that lie before p */
INLINE ptrdiff_t FN(lanes_before)(const X *p) { return (ptrdiff_t)((uintptr_t)p / sizeof(X) % VL); }

/* what comes before the first whole vector, where vectors begin `turn` lanes before the row */
INLINE void FN(write_head)(FN(writer) *w, const T stats[3], ptrdiff_t turn, const int centred, const enum FN(origin) origin)
{
    w->shift = TN(splat)(stats[0]);
    w->delta = TN(splat)(stats[1]);
    w->rstd = TN(splat)(stats[2]);
    w->at = -turn;
    w->end = (w->n + turn) / VL * VL - turn;
    if (turn) FN(write_edge)(w, centred, origin);
}

/* (4) for GROUP whole vectors from `at` on. All are read before one is written: a load that overlaps in part, in the last 12
 * bits of its address, a store just made would wait for it. */
INLINE void FN(group)(const FN(writer) *w, const int centred, const enum FN(origin) origin, const int affine, V v[GROUP])
{
#pragma GCC unroll 4
    for (int i = 0; i < GROUP; ++i) v[i] = TN(keep)(FN(whole)(w, w->at + i * VL, centred, origin, affine));
}

INLINE void FN(put_group)(FN(writer) *w, const V v[GROUP], const int affine, const int stream)
{
#pragma GCC unroll 4
    for (int i = 0; stream && i < GROUP; ++i) FN(fetch_ahead)(w, w->at + i * VL);
#pragma GCC unroll 4
    for (int i = 0; i < GROUP; i += 2) {
        X *const y = w->y + w->at + i * VL;
        if (affine && stream) FN(stream_two)(y, v[i], v[i + 1]);
        else if (affine) FN(store_two)(y, v[i], v[i + 1]);
        else if (stream) FN(stream)(y, v[i]), FN(stream)(y + VL, v[i + 1]);
        else FN(store)(y, v[i]), FN(store)(y + VL, v[i + 1]);
    }
    w->at += GROUP * VL;
}

INLINE void FN(write_group)(FN(writer) *w, const int centred, const enum FN(origin) origin, const int affine, const int stream)
{
    V v[GROUP];
    FN(group)(w, centred, origin, affine, v);
    FN(put_group)(w, v, affine, stream);
}

/* the whole vector at `at` */
INLINE void FN(write_vector)(FN(writer) *w, const int centred, const enum FN(origin) origin, const int affine, const int stream)
{
    const V v = FN(whole)(w, w->at, centred, origin, affine);
    if (stream) FN(stream)(w->y + w->at, v), FN(fetch_ahead)(w, w->at);
    else FN(store)(w->y + w->at, v);
    w->at += VL;
}

/* whole vectors from `at` up to `end` */
INLINE void FN(write_whole)(FN(writer) *w, const int centred, const enum FN(origin) origin, const int affine)
{
    if (w->joint) {
        while (w->at + GROUP * VL <= w->end) FN(write_group)(w, centred, origin, affine, 1);
        while (w->at < w->end) FN(write_vector)(w, centred, origin, affine, 1);
    } else {
        while (w->at + GROUP * VL <= w->end) FN(write_group)(w, centred, origin, affine, 0);
        while (w->at < w->end) FN(write_vector)(w, centred, origin, affine, 0);
    }
}

/* the rest of the row */
INLINE void FN(write_rest)(FN(writer) *w, const int centred, const enum FN(origin) origin, const int affine)
{
    FN(write_whole)(w, centred, origin, affine);
    if (w->at < w->n) FN(write_edge)(w, centred, origin);
}

/* d = x - K of the whole vector at j; kept, if there is where */
INLINE V FN(shifted)(const FN(row) *row, ptrdiff_t j, V shift, T *kept)
{
    const V v = FN(row_load)(row, j), d = v - shift;
    if (row->residual && row->sum_joint) FN(stream)(row->sum + j, v);
    else if (row->residual) FN(store)(row->sum + j, v);
    if (kept) TN(store)(kept + j, d);
    return d;
}

/* the same of a vector that the row begins or ends in; d = 0 where there is no row */
EDGE V FN(shifted_some)(FN(row) row, ptrdiff_t n, ptrdiff_t j, V shift, T *kept)
{
    const ptrdiff_t from = j < 0 ? -j : 0, to = n - j < VL ? n - j : VL;
    const V v = FN(row_load_range)(&row, j, from, to), d = TN(only)(v - shift, from, to);
    if (row.residual) FN(put_range)(row.sum + j, from, to, v, row.sum_joint);
    if (kept) TN(store)(kept + j, d);
    return d;
}

/* s += d and q += d^2 for one vector */
INLINE void FN(count)(V d, const int centred, V *s, V *q)
{
    if (centred) *s += d;
    *q += d * d;
}

/* count for GROUP whole vectors at j, and as many of the row before written */
INLINE void FN(sum_and_write)(const FN(row) *row, ptrdiff_t j, V shift, T *kept, const int centred, V s[PASS], V q[PASS],
                              FN(writer) *w, const enum FN(origin) of)
{
    const int loads_first = LOADS_FIRST && !row->residual; /* of a sum it is 2 % slower */
    V d[GROUP], v[GROUP];
    if (loads_first) {
#pragma GCC unroll 4
        for (int i = 0; i < GROUP; ++i) d[i] = TN(keep)(FN(shifted)(row, j + i * VL, shift, kept));
        FN(group)(w, centred, of, 1, v);
    }
#pragma GCC unroll 4
    for (int i = 0; i < GROUP; ++i) {
        if (!loads_first) d[i] = FN(shifted)(row, j + i * VL, shift, kept);
        FN(count)(d[i], centred, &s[i % PASS], &q[i % PASS]);
    }
    if (!loads_first) FN(group)(w, centred, of, 1, v);
    if (of == FN(KEPT) && w->joint) FN(put_group)(w, v, 1, 1);
    else FN(put_group)(w, v, 1, 0);
}

/* The lanes of S = sum d and Q = sum d^2 over start <= j < stop of the row, of which start is a multiple of FOLD. A writer,
 * if there is one, is moved on in the same loop: the row before leaves while this one is summed. `of` is what it writes: a
 * PLAIN or SHIFTED row, not streamed, or a KEPT one. Sums are LEAD vectors ahead: what they then leave of the row before is
 * written while the tree is waited for.
 *
 * Vectors begin `turn` lanes before the row, so that those kept lie where those written will. A lane's sum is then found
 * `turn` lanes further on, and is turned back before the tree: the same additions in the same order. */
INLINE void FN(lane_sums)(const FN(row) *row, ptrdiff_t n, ptrdiff_t start, ptrdiff_t stop, T K, const int centred, T *kept,
                          ptrdiff_t turn, FN(writer) *w, const enum FN(origin) of, V s[LANE_VECTORS], V q[LANE_VECTORS])
{
    const V shift = TN(splat)(K), zero = TN(splat)(0);
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
            for (int edge = turn ? 0 : 1; edge < 2; ++edge) {
                /* the first vectors of the block, one of which may have begun in the block before, and the last */
                if (edge == 1) {
                    if (w && PASS == LANE_VECTORS) {
                        if (!block && n >= LONG_ROW) {
                            for (; j + PASS * VL <= LEAD * VL; j += LANES) {
#pragma GCC unroll 4
                                for (int i = 0; i < PASS; ++i)
                                    FN(count)(FN(shifted)(row, j + i * VL, shift, kept), centred, &sp[i], &qp[i]);
                            }
                        }
                        for (; j + GROUP * VL <= end && w->at + GROUP * VL <= w->end; j += GROUP * VL) {
                            FN(sum_and_write)(row, j, shift, kept, centred, sp, qp, w, of);
                        }
                    }
                    for (; j + PASS * VL <= end; j += LANES) {
#pragma GCC unroll 4
                        for (int i = 0; i < PASS; ++i)
                            FN(count)(FN(shifted)(row, j + i * VL, shift, kept), centred, &sp[i], &qp[i]);
                    }
                }
#pragma GCC unroll 4
                for (int i = 0; i < PASS; ++i) {
                    const ptrdiff_t at = j + i * VL, from = at < block ? turn : 0, to = end - at < VL ? end - at : VL;
                    if (from >= to) continue;
                    V d = from && block && kept ? TN(load)(kept + at)
                          : at < 0 || at + VL > n ? FN(shifted_some)(*row, n, at, shift, kept)
                                                  : FN(shifted)(row, at, shift, kept);
                    if (from || to < VL) d = TN(only)(d, from, to);
                    FN(count)(d, centred, &sp[i], &qp[i]);
                }
                j += LANES;
            }
#pragma GCC unroll 4
            for (int i = 0; i < PASS; ++i) {
                s[first + i] = block == start ? sp[i] : s[first + i] + sp[i];
                q[first + i] = block == start ? qp[i] : q[first + i] + qp[i];
            }
        }
    }
    if (turn) {
        TN(turn)(s, turn);
        TN(turn)(q, turn);
    }
}

/* S = sum d and Q = sum d^2 over the row; the rest see lane_sums */
INLINE void FN(sums)(const FN(row) *row, ptrdiff_t n, T K, const int centred, T *kept, ptrdiff_t turn, FN(writer) *w,
                     const enum FN(origin) of, double *S, double *Q)
{
    *S = *Q = 0;
    for (ptrdiff_t start = 0; start < n; start += FOLD) {
        V s[LANE_VECTORS], q[LANE_VECTORS];
        FN(lane_sums)(row, n, start, n - start < FOLD ? n : start + FOLD, K, centred, kept, turn, w, of, s, q);
        if (centred) *S += (double)TN(tree)(s);
        *Q += (double)TN(tree)(q);
    }
}

/* The guard of (1) and (2), written so that NaN fails it */
INLINE int FN(accepted)(double n, double mean_square, double spread, double Q, double eps)
{
    return (mean_square <= spread) & (Q <= Q_MAX) & ((Q >= n * Q_MIN) | (eps >= Q_MIN));
}

/* from var + eps */
INLINE T FN(rstd_of)(double square) { return (T)(1.0 / sqrt(square)); }

/* (1) or (2) with this K: stats = K, delta; *square = var + eps, whose root and quotient the caller may put off until there
 * is other work to wait behind. False, with the mean in *mean, where it is not accepted. */
INLINE int FN(stats_with)(const FN(row) *row, ptrdiff_t n, double eps, T K, const int centred, T *kept, ptrdiff_t turn,
                          FN(writer) *w, const enum FN(origin) of, T stats[3], double *square, double *mean)
{
    const double count = (double)n, per = 1.0 / count;
    double S, Q;
    FN(sums)(row, n, K, centred, kept, turn, w, of, &S, &Q);
    const double delta = S * per, spread = Q - S * delta;
    *mean = (double)K + delta;
    if (!FN(accepted)(count, S * delta, spread, Q, eps)) return 0;
    stats[0] = K;
    stats[1] = (T)delta;
    *square = spread * per + eps;
    return 1;
}

/* (2) */
static __attribute__((noinline)) int FN(shifted_stats)(const X *x, ptrdiff_t n, double eps, double mean, T *kept,
                                                       ptrdiff_t turn, T stats[3], double *square)
{
    const FN(row) row = {.x = x};
    return FN(stats_with)(&row, n, eps, (T)mean, 1, kept, turn, NULL, FN(PLAIN), stats, square, &mean);
}

/* (1): is there a K to begin with? */
INLINE int FN(guessed)(const FN(row) *row, ptrdiff_t n, const int centred, T *K)
{
    if (!centred || n < LANES) return 0;
    V lanes[LANE_VECTORS];
    for (int i = 0; i < LANE_VECTORS; ++i) lanes[i] = FN(row_load)(row, i * VL);
    if (!TN(one_sign)(lanes)) return 0;
    *K = TN(tree)(lanes) * ((T)1 / LANES) + 0; /* never -0: x - K is to be x where K = 0 */
    return 1;
}

/* (1) and (2): see stats_with; false where the row needs (3). kept, turn, w and of: see lane_sums */
INLINE int FN(row_stats)(const FN(row) *row, ptrdiff_t n, double eps, const int centred, T *kept, ptrdiff_t turn,
                         FN(writer) *w, const enum FN(origin) of, T stats[3], double *square)
{
    double mean, again_square;
    T K, again[3]; /* apart: what a function that is not in line may write to cannot stay in registers */
    if (FN(guessed)(row, n, centred, &K)) {
        if (FN(stats_with)(row, n, eps, K, 1, kept, turn, of == FN(PLAIN) ? NULL : w, of, stats, square, &mean)) return 1;
    } else {
        if (FN(stats_with)(row, n, eps, 0, centred, kept, turn, w, of, stats, square, &mean)) return 1;
        if (!centred) return 0;
    }
    const int accepted = FN(shifted_stats)(FN(stored_row)(row), n, eps, mean, kept, turn, again, &again_square);
    stats[0] = again[0], stats[1] = again[1];
    *square = again_square;
    return accepted;
}

/* What (3) finds: x scale = origin + delta + xhat / rstd; inv_std_dev is what rstd is in units of x */
typedef struct { double scale, origin, delta, rstd, inv_std_dev; } FN(exact);

/* (3): the statistics of any row, by a shifted sweep and a centred one */
RARE FN(exact) FN(exact_stats)(const X *x, ptrdiff_t n, double eps, int centred)
{
    FN(exact) e = {.scale = 1};
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
            sums_f64(&(row_f64){.x = piece}, len, 0, 1, NULL, 0, NULL, PLAIN_f64, &S, &Q);
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
RARE FN(exact) FN(exact_stats_with)(const X *x, ptrdiff_t n, const T st[3], int centred)
{
    FN(exact) e = FN(exact_stats)(x, n, 0, centred);
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
INLINE double FN(times_inv_std_dev)(const FN(exact) *e, double v, int power)
{
    return e->rstd == 0 ? ldexp(v * e->inv_std_dev, power) : ldexp(v * e->rstd, ilogb(e->scale) + power);
}

INLINE void FN(stats_of)(const FN(exact) *e, T stats[3])
{
    stats[0] = (T)((e->origin + e->delta) / e->scale);
    stats[1] = (T)(((e->origin - (double)stats[0] * e->scale) + e->delta) / e->scale);
    stats[2] = (T)e->inv_std_dev;
}

INLINE double FN(exact_xhat)(const FN(exact) *e, double x) { return ((x * e->scale - e->origin) - e->delta) * e->rstd; }

/* (3) and (4) in float64, rounded once to T */
RARE void FN(exact_row)(const X *x, ptrdiff_t n, const T *gain, const T *bias, double eps, int centred, X *y, T stats[3])
{
    const FN(exact) e = FN(exact_stats)(x, n, eps, centred);
    for (ptrdiff_t j = 0; j < n; ++j) {
        double v = FN(exact_xhat)(&e, (double)FN(value)(x[j]));
        if (gain) v *= (double)gain[j];
        if (bias) v += (double)bias[j];
        y[j] = FN(stored)((T)v);
    }
    FN(stats_of)(&e, stats);
}

INLINE FN(row) FN(row_of)(const cnorm_norm *call, ptrdiff_t r, const int with_residual, FN(joint) *sum_joint)
{
    FN(row) row = {.x = (const X *)call->x + r * call->x_stride};
    if (with_residual) {
        row.residual = (const X *)call->residual + r * call->residual_stride;
        row.sum = (X *)call->sum + r * call->sum_stride;
        row.sum_joint = sum_joint;
    }
    return row;
}

/* Gain or bias for rows of at most NEAR elements: where there is none, what changes nothing. For a few rows a copy is not
 * worth making, but for half types, of which a NaN must be arithmetic's own. */
INLINE const T *FN(copied)(ptrdiff_t rows, ptrdiff_t n, const T *from, T nothing, T *room)
{
    const int half = sizeof(X) < sizeof(T);
    if (from && !half && rows < 8) return from;
    if (from && !half) memcpy(room, from, (size_t)n * sizeof(T));
    else if (from) for (ptrdiff_t j = 0; j < n; ++j) room[j] = from[j] == from[j] ? from[j] : (T)NAN;
    else for (ptrdiff_t j = 0; j < n; ++j) room[j] = nothing;
    return room;
}

/* Both of them, beginning `turn` lanes into a vector, as the rows do, and level with y. RMS norm gets no bias. */
INLINE void FN(beside)(ptrdiff_t rows, ptrdiff_t n, const void *y, ptrdiff_t turn, const int centred, T room[FN(BESIDE)],
                       const T **gain, const T **bias)
{
    T *const level = room + level_in_page(room, y) / (ptrdiff_t)sizeof(T) + turn;
    *gain = FN(copied)(rows, n, *gain, 1, level);
    if (centred) *bias = FN(copied)(rows, n, *bias, -(T)0, level + FN(ROOM));
}

/* Rows short enough to stay in the first cache, with gain and bias, between being summed and being written. The next row
 * is summed before a row is written, or, where that pays, while. The tree of its sums, and after the writing square root and
 * division, thus wait beside other work, each no longer than a processor looks ahead. Of a sum, and of what had to be
 * widened, d is kept. */
INLINE void FN(near_rows)(const cnorm_norm *call, const int centred, const int with_residual, const int streaming)
{
    const int half = sizeof(X) < sizeof(T), keep = with_residual || half;
    _Alignas(VECTOR_BYTES) T for_rows[FN(BESIDE)], for_affine[FN(BESIDE)];
    const ptrdiff_t rows = call->rows, n = call->n;
    const int overlap = streaming || n >= LONG_ROW;
    const int aligned = streaming || (ALIGN_LOADS && !half && n > SHORT_ROW);
    const ptrdiff_t turn_of_first = aligned ? FN(lanes_before)(streaming ? call->y : call->x) : 0;
    T *stats = call->stats, last[3] = {0}, its[3] = {0}; /* K, delta and rstd of the row to write, and of the next */
    int plain = 0, next_plain = 0;
    double square = 1;
    FN(joint) y_joint = {.to = 0}, sum_joint = {.to = 0};
    FN(writer) w = {.n = n, .gain = call->gain, .bias = call->bias, .joint = streaming ? &y_joint : NULL};
    FN(beside)(rows, n, call->y, turn_of_first, centred, for_affine, &w.gain, &w.bias);
    /* a row is stored as gain and bias are loaded, vector after vector: loads from the same place in a page would wait */
    T *const room = for_rows + apart_in_page(for_rows, w.gain, w.bias) / (ptrdiff_t)sizeof(T);
    FN(joint) *to_sum = with_residual && streaming ? &sum_joint : NULL;
    w.x_ahead = FN(ahead)(n, call->x_stride), w.residual_ahead = FN(ahead)(n, call->residual_stride);
    ptrdiff_t turn_of_y = 0;
    for (ptrdiff_t next = 0; next <= rows; ++next) {
        const ptrdiff_t r = next - 1; /* the row to write */
        const int writing = next && plain, shifted = !keep && writing && last[0] != 0;
        if (writing && shifted) FN(write_head)(&w, last, turn_of_y, centred, FN(SHIFTED));
        else if (writing) FN(write_head)(&w, last, turn_of_y, centred, keep ? FN(KEPT) : FN(PLAIN));
        X *const y = (X *)call->y + next * call->y_stride;
        const FN(row) row = FN(row_of)(call, next, with_residual, to_sum);
        /* what is streamed must be aligned; else the loads are */
        turn_of_y = aligned ? FN(lanes_before)(streaming ? y : row.x) : 0;
        const ptrdiff_t turn = to_sum ? FN(lanes_before)(row.sum) : half ? 0 : turn_of_y;
        T *const kept = keep ? room + (next & 1) * FN(ROOM) + turn : NULL;
        if (next < rows) {
            if (keep && writing && overlap)
                next_plain = FN(row_stats)(&row, n, call->eps, centred, kept, turn, &w, FN(KEPT), its, &square);
            else if (shifted && overlap)
                next_plain = FN(row_stats)(&row, n, call->eps, centred, kept, turn, &w, FN(SHIFTED), its, &square);
            else if (!keep && writing && overlap)
                next_plain = FN(row_stats)(&row, n, call->eps, centred, kept, turn, &w, FN(PLAIN), its, &square);
            else
                next_plain = FN(row_stats)(&row, n, call->eps, centred, kept, turn, NULL, FN(PLAIN), its, &square);
        }
        if (writing && shifted) {
            FN(write_rest)(&w, centred, FN(SHIFTED), 1);
        } else if (writing) {
            FN(write_rest)(&w, centred, keep ? FN(KEPT) : FN(PLAIN), 1);
        } else if (next) {
            const FN(row) again = FN(row_of)(call, r, with_residual, to_sum);
            T exact[3];
            FN(exact_row)(FN(stored_row)(&again), n, call->gain, call->bias, call->eps, centred, w.y, exact);
            for (int i = 0; i < 3; ++i) last[i] = exact[i];
        }
        its[2] = FN(rstd_of)(square); /* not yet that of a row left to exact_row */
        for (int i = 0; i < 3; ++i) {
            if (stats && next) stats[3 * r + i] = last[i];
            last[i] = its[i];
        }
        plain = next_plain;
        w.d = kept;
        w.x = row.x;
        w.residual = to_sum ? row.residual : NULL;
        w.y = y;
    }
    if (streaming) {
        FN(flush)(&y_joint);
        FN(flush)(&sum_joint);
        stream_fence();
    }
}

/* Rows that are read twice: long ones, and those whose output is streamed and for which look-ahead would not pay */
INLINE void FN(far_rows)(const cnorm_norm *call, const int centred, const int with_residual)
{
    FN(joint) joint = {.to = 0};
    FN(writer) w = {.n = call->n, .gain = call->gain, .bias = call->bias, .joint = call->streaming ? &joint : NULL};
    _Alignas(VECTOR_BYTES) T for_affine[FN(BESIDE)];
    if (call->n <= FN(NEAR))
        FN(beside)(call->rows, call->n, call->y, FN(lanes_before)(call->y), centred, for_affine, &w.gain, &w.bias);
    for (ptrdiff_t r = 0; r < call->rows; ++r) {
        T stats[3];
        double square;
        const FN(row) row = FN(row_of)(call, r, with_residual, NULL);
        w.x = with_residual ? row.sum : row.x;
        w.y = (X *)call->y + r * call->y_stride;
        const ptrdiff_t turn = ALIGN_LOADS && !with_residual ? FN(lanes_before)(w.x) : 0;
        if (FN(row_stats)(&row, call->n, call->eps, centred, NULL, turn, NULL, FN(PLAIN), stats, &square)) {
            stats[2] = FN(rstd_of)(square);
            FN(write_head)(&w, stats, w.joint ? FN(lanes_before)(w.y) : turn, centred, FN(SHIFTED));
            FN(write_rest)(&w, centred, FN(SHIFTED), 0);
        } else {
            FN(exact_row)(w.x, call->n, call->gain, call->bias, call->eps, centred, w.y, stats);
        }
        if (call->stats) memcpy((T *)call->stats + 3 * r, stats, sizeof stats);
    }
    if (w.joint) {
        FN(flush)(&joint);
        stream_fence();
    }
}

INLINE void FN(norm_rows)(const cnorm_norm *call, const int centred, const int with_residual)
{
    const int kept = with_residual || sizeof(X) < sizeof(T);
    if (call->n <= FN(NEAR) && !call->streaming) FN(near_rows)(call, centred, with_residual, 0);
    else if (call->n <= FN(NEAR) && kept) FN(near_rows)(call, centred, with_residual, 1);
    else FN(far_rows)(call, centred, with_residual);
}

static void FN(layer_norm)(const cnorm_norm *call) { FN(norm_rows)(call, 1, 0); }
static void FN(add_layer_norm)(const cnorm_norm *call) { FN(norm_rows)(call, 1, 1); }
static void FN(rms_norm)(const cnorm_norm *call) { FN(norm_rows)(call, 0, 0); }

/* A row of the backward pass */
typedef struct {
    const X *dy, *x;
    X *dx;
    V shift, delta, rstd;
    ptrdiff_t dy_ahead, x_ahead; /* see ahead */
} FN(gradient);

/* plain, a constant where these functions are called: K is 0 */
INLINE V FN(xhat)(const FN(gradient) *row, V x, const int centred, const int plain)
{
    if (centred && !plain) x -= row->shift;
    return (centred ? x - row->delta : x) * row->rstd;
}

/* What a block of rows adds up, and gain, which may be NULL: in whole vectors on the stack where rows are short, padded
 * with zeros, so that vectors may begin `turn` lanes before the row; else where the caller has them, and turn is 0.
 * They are added to in (5), but where dx is streamed in (6): a store waits until those before it are done, and streamed
 * ones take as long as memory takes. */
typedef struct {
    const T *gain;
    T *dgain, *dbias;
    int padded;
} FN(shares);
typedef struct { V dgain, dbias; } FN(share); /* one vector of them */

/* lanes from <= i < to of the vector at j, with those of a row */
INLINE FN(share) FN(with_share)(const FN(shares) *to_add, ptrdiff_t j, ptrdiff_t from, ptrdiff_t to, V dy, V xhat,
                                const int centred)
{
    const V zero = TN(splat)(0);
    const int all = to - from == VL || to_add->padded;
    const T *dgain = to_add->dgain + j, *dbias = to_add->dbias + j;
    FN(share) share = {(all ? TN(load)(dgain) : TN(load_range)(dgain, from, to, zero)) + dy * xhat, zero};
    if (centred) share.dbias = (all ? TN(load)(dbias) : TN(load_range)(dbias, from, to, zero)) + dy;
    return share;
}

INLINE void FN(put_share)(const FN(shares) *to_add, ptrdiff_t j, ptrdiff_t from, ptrdiff_t to, FN(share) share,
                          const int centred)
{
    const int all = to - from == VL || to_add->padded;
    if (all) TN(store)(to_add->dgain + j, share.dgain);
    else TN(store_range)(to_add->dgain + j, from, to, share.dgain);
    if (!centred) return;
    if (all) TN(store)(to_add->dbias + j, share.dbias);
    else TN(store_range)(to_add->dbias + j, from, to, share.dbias);
}

/* A vector of a row: lanes from <= i < to of dy, g and xhat at j. Missing dy are zero, and with them every term. */
typedef struct { V dy, g, xhat; } FN(terms);
INLINE FN(terms) FN(terms_at)(const FN(gradient) *row, ptrdiff_t j, ptrdiff_t from, ptrdiff_t to, const FN(shares) *to_add,
                              const int centred, const int plain)
{
    const V zero = TN(splat)(0);
    const int whole = to - from == VL;
    const V dy = whole ? FN(load)(row->dy + j) : FN(load_range)(row->dy + j, from, to, zero);
    const V x = whole ? FN(load)(row->x + j) : FN(load_range)(row->x + j, from, to, row->shift);
    const T *gain = to_add->gain;
    if (!gain) return (FN(terms)){dy, dy, FN(xhat)(row, x, centred, plain)};
    const V at_j = whole || to_add->padded ? TN(load)(gain + j) : TN(load_range)(gain + j, from, to, zero);
    return (FN(terms)){dy, dy * at_j, FN(xhat)(row, x, centred, plain)};
}

/* (5) for lanes from <= i < to of the vector at j: the terms of G n and H n */
INLINE void FN(backward_terms)(const FN(gradient) *row, ptrdiff_t j, ptrdiff_t from, ptrdiff_t to, const FN(shares) *to_add,
                               const int centred, const int plain, const int streaming, V *g, V *gx)
{
    const FN(terms) t = FN(terms_at)(row, j, from, to, to_add, centred, plain);
    *g = t.g;
    *gx = t.g * t.xhat;
    if (!streaming)
        FN(put_share)(to_add, j, from, to, FN(with_share)(to_add, j, from, to, t.dy, t.xhat, centred), centred);
}

/* the same of a vector at an edge of the row */
EDGE void FN(backward_edge)(FN(gradient) row, ptrdiff_t n, ptrdiff_t j, FN(shares) to_add, int centred, int streaming,
                            V terms[2])
{
    const ptrdiff_t from = j < 0 ? -j : 0, to = n - j < VL ? n - j : VL;
    FN(backward_terms)(&row, j, from, to, &to_add, centred, 0, streaming, &terms[0], &terms[1]);
}

/* (5) for one row: sums = G n, H n. For `turn` see lane_sums. */
INLINE void FN(backward_sums)(ptrdiff_t n, const FN(gradient) *row, const FN(shares) *to_add, ptrdiff_t turn, const int centred,
                              const int plain, const int streaming, double sums[2])
{
    const V zero = TN(splat)(0);
    sums[0] = sums[1] = 0;
    for (ptrdiff_t start = 0; start < n; start += FOLD) {
        const ptrdiff_t stop = n - start < FOLD ? n : start + FOLD;
        V g[LANE_VECTORS], gx[LANE_VECTORS], tg, tgx;
#pragma GCC unroll 2
        for (int first = 0; first < LANE_VECTORS; first += PASS) {
            V carried_g = zero, carried_gx = zero; /* of the vector in which one block ends and the next begins */
#pragma GCC unroll 4
            for (int i = 0; i < PASS; ++i) g[first + i] = gx[first + i] = zero;
            for (ptrdiff_t block = start; block < stop; block += BLOCK * LANES) {
                const ptrdiff_t end = stop - block < BLOCK * LANES ? stop : block + BLOCK * LANES;
                ptrdiff_t j = block - turn + first * VL;
                V gp[PASS], gxp[PASS];
#pragma GCC unroll 4
                for (int i = 0; i < PASS; ++i) gp[i] = gxp[i] = zero;
                for (int edge = turn ? 0 : 1; edge < 2; ++edge) { /* see lane_sums */
                    if (edge == 1) {
                        for (; j + PASS * VL <= end; j += LANES) {
#pragma GCC unroll 4
                            for (int i = 0; i < PASS; ++i) {
                                FN(backward_terms)(row, j + i * VL, 0, VL, to_add, centred, plain, streaming, &tg, &tgx);
                                if (centred) gp[i] += tg;
                                gxp[i] += tgx;
                            }
                        }
                    }
#pragma GCC unroll 4
                    for (int i = 0; i < PASS; ++i, j += VL) {
                        if (j < block && block) {
                            gp[i] += TN(only)(carried_g, turn, VL);
                            gxp[i] += TN(only)(carried_gx, turn, VL);
                        } else if (j < end) {
                            if (j >= 0 && n - j >= VL) {
                                FN(backward_terms)(row, j, 0, VL, to_add, centred, plain, streaming, &tg, &tgx);
                            } else {
                                V terms[2];
                                FN(backward_edge)(*row, n, j, *to_add, centred, streaming, terms);
                                tg = terms[0];
                                tgx = terms[1];
                            }
                            if (end - j < VL && end < n) {
                                carried_g = tg;
                                carried_gx = tgx;
                                tg = TN(only)(tg, 0, end - j);
                                tgx = TN(only)(tgx, 0, end - j);
                            }
                            if (centred) gp[i] += tg;
                            gxp[i] += tgx;
                        }
                    }
                    j += (LANE_VECTORS - PASS) * VL;
                }
#pragma GCC unroll 4
                for (int i = 0; i < PASS; ++i) {
                    g[first + i] += gp[i];
                    gx[first + i] += gxp[i];
                }
            }
        }
        if (turn) {
            TN(turn)(g, turn);
            TN(turn)(gx, turn);
        }
        if (centred) sums[0] += (double)TN(tree)(g);
        sums[1] += (double)TN(tree)(gx);
    }
}

/* (6) for lanes from <= i < to of the vector at j. For dx that is streamed, share is not NULL: it gets what dgain and dbias
 * become there, and rows ahead are fetched. */
INLINE V FN(dx)(const FN(gradient) *row, ptrdiff_t j, ptrdiff_t from, ptrdiff_t to, const FN(shares) *to_add, V G, V H,
                const int centred, const int plain, FN(share) *share)
{
    const FN(terms) t = FN(terms_at)(row, j, from, to, to_add, centred, plain);
    if (share) {
        *share = FN(with_share)(to_add, j, from, to, t.dy, t.xhat, centred);
        fetch(row->dy + j, row->dy_ahead, VL * sizeof(X));
        fetch(row->x + j, row->x_ahead, VL * sizeof(X));
    }
    return row->rstd * ((centred ? t.g - G : t.g) - t.xhat * H);
}

/* the same, written where it goes; joint is NULL unless dx is streamed */
INLINE void FN(put_dx)(const FN(gradient) *row, ptrdiff_t j, ptrdiff_t from, ptrdiff_t to, const FN(shares) *to_add, V G, V H,
                       const int centred, const int plain, FN(joint) *joint)
{
    FN(share) share;
    const V v = FN(dx)(row, j, from, to, to_add, G, H, centred, plain, joint ? &share : NULL);
    if (joint) FN(put_share)(to_add, j, from, to, share, centred);
    if (to - from < VL) FN(put_range)(row->dx + j, from, to, v, joint);
    else if (joint) FN(stream)(row->dx + j, v);
    else FN(store)(row->dx + j, v);
}

/* (6) for one row; vectors begin `turn` lanes before it */
INLINE void FN(backward_dx)(ptrdiff_t n, const FN(gradient) *row, const FN(shares) *to_add, ptrdiff_t turn, const int centred,
                            const int plain, const double sums[2], FN(joint) *joint)
{
    const V G = TN(splat)((T)(sums[0] / (double)n)), H = TN(splat)((T)(sums[1] / (double)n));
    ptrdiff_t j = -turn;
    if (turn) {
        FN(put_dx)(row, j, turn, n + turn < VL ? n + turn : VL, to_add, G, H, centred, plain, joint);
        j += VL;
    }
    for (; j + GROUP * VL <= n; j += GROUP * VL) { /* in groups: see write_group */
        V v[GROUP];
        FN(share) share[GROUP];
#pragma GCC unroll 4
        for (int i = 0; i < GROUP; ++i) {
            const ptrdiff_t at = j + i * VL;
            v[i] = TN(keep)(FN(dx)(row, at, 0, VL, to_add, G, H, centred, plain, joint ? &share[i] : NULL));
        }
#pragma GCC unroll 4
        for (int i = 0; i < GROUP; ++i) {
            const ptrdiff_t at = j + i * VL;
            if (joint) FN(put_share)(to_add, at, 0, VL, share[i], centred);
            if (joint) FN(stream)(row->dx + at, v[i]);
            else FN(store)(row->dx + at, v[i]);
        }
    }
    for (; j + VL <= n; j += VL) FN(put_dx)(row, j, 0, VL, to_add, G, H, centred, plain, joint);
    if (j < n) FN(put_dx)(row, j, 0, n - j, to_add, G, H, centred, plain, joint);
}

/* (5) and (6) in float64, for rows whose xhat, dx or sums arithmetic in T cannot reach; dgain NULL: only (6) */
RARE void FN(exact_backward_row)(ptrdiff_t n, const X *dy, const X *x, const T *gain, const T st[3], int centred, X *dx,
                                 T *dgain, T *dbias)
{
    const FN(exact) e = FN(exact_stats_with)(x, n, st, centred);
    double dy_scale = 1, gain_scale = 1;
    if (sizeof(T) == 8) {
        double largest = 0, largest_gain = 0;
        for (ptrdiff_t j = 0; j < n; ++j) {
            largest = larger_finite(largest, (double)FN(value)(dy[j]));
            if (gain) largest_gain = larger_finite(largest_gain, (double)gain[j]);
        }
        dy_scale = scale_for(largest, 0);
        if (gain) gain_scale = scale_for(largest_gain, 0);
    }
    double sum_g = 0, sum_gx = 0;
    for (ptrdiff_t j = 0; j < n; ++j) {
        const double d = (double)FN(value)(dy[j]), xhat = FN(exact_xhat)(&e, (double)FN(value)(x[j]));
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
        const double xhat = FN(exact_xhat)(&e, (double)FN(value)(x[j]));
        const double g = (double)FN(value)(dy[j]) * dy_scale * (gain ? (double)gain[j] * gain_scale : 1.0);
        dx[j] = FN(stored)((T)FN(times_inv_std_dev)(&e, (g - G) - xhat * H, power));
    }
}

/* can the row do without the float64 path? written so that NaN can't */
INLINE int FN(in_range)(const T st[3]) { return st[2] >= RSTD_MIN && st[2] <= RSTD_MAX; }

/* the share of a row whose dx is left to exact_backward_row */
RARE void FN(add_shares)(ptrdiff_t n, FN(gradient) row, FN(shares) to_add, int centred)
{
    for (ptrdiff_t j = 0; j < n; j += VL) {
        const ptrdiff_t to = n - j < VL ? n - j : VL;
        const FN(terms) t = FN(terms_at)(&row, j, 0, to, &to_add, centred, 0);
        FN(put_share)(&to_add, j, 0, to, FN(with_share)(&to_add, j, 0, to, t.dy, t.xhat, centred), centred);
    }
}

/* (5) and (6) for a row that does without the float64 path, unless its sums overflow */
INLINE void FN(backward_row)(ptrdiff_t n, const FN(gradient) *row, const FN(shares) *to_add, ptrdiff_t turn, const int centred,
                             const int plain, const T st[3], FN(joint) *joint)
{
    double sums[2];
    FN(backward_sums)(n, row, to_add, turn, centred, plain, joint != NULL, sums);
    if (!(fabs(sums[0]) <= SUM_MAX && fabs(sums[1]) <= SUM_MAX)) {
        if (joint) FN(add_shares)(n, *row, *to_add, centred);
        FN(exact_backward_row)(n, row->dy, row->x, to_add->gain, st, centred, row->dx, NULL, NULL);
    } else if (joint) {
        FN(backward_dx)(n, row, to_add, FN(lanes_before)(row->dx), centred, plain, sums, joint);
    } else {
        FN(backward_dx)(n, row, to_add, turn, centred, plain, sums, NULL);
    }
}

/* One block of rows: partial [2, n] becomes this block's dgain and dbias */
INLINE void FN(backward_rows)(const cnorm_norm_backward *call, const int centred)
{
    const ptrdiff_t n = call->n;
    const int padded = n <= FN(NEAR) && call->rows > 1;
    _Alignas(VECTOR_BYTES) T space[PAGE_BYTES / sizeof(T) + 3 * FN(ROOM)];
    T *const room = space + apart_in_page(space, call->x, call->dy) / (ptrdiff_t)sizeof(T);
    const int aligned = ALIGN_LOADS && sizeof(X) == sizeof(T) && padded && n > SHORT_ROW && call->x_stride % VL == 0;
    const ptrdiff_t turn = aligned ? FN(lanes_before)(call->x) : 0;
    FN(shares) shares = {.gain = call->gain, .dgain = call->partial, .dbias = (T *)call->partial + n, .padded = padded};
    if (padded) {
        for (int i = 0; i < 3; ++i) memset(room + i * FN(ROOM), 0, (size_t)(n + 2 * VL) * sizeof(T));
        /* as the vectors begin that are added to them, or, where that differs from row to row, behind room for a whole one */
        T *const at = room + (!call->streaming ? turn : n % VL ? VL : FN(lanes_before)(call->dx));
        shares.dgain = at;
        shares.dbias = at + FN(ROOM);
        if (call->gain) shares.gain = memcpy(at + 2 * FN(ROOM), call->gain, (size_t)n * sizeof(T));
    } else {
        memset(call->partial, 0, 2 * (size_t)n * sizeof(T));
    }
    FN(joint) kept = {.to = 0}, *joint = call->streaming ? &kept : NULL;
    for (ptrdiff_t r = 0; r < call->rows; ++r) {
        const T *st = (const T *)call->stats + 3 * r;
        const FN(gradient) row = {.dy = (const X *)call->dy + r * call->dy_stride,
                                  .x = (const X *)call->x + r * call->x_stride,
                                  .dx = (X *)call->dx + r * call->dx_stride,
                                  .shift = TN(splat)(st[0]), .delta = TN(splat)(st[1]), .rstd = TN(splat)(st[2]),
                                  .dy_ahead = FN(ahead)(n, call->dy_stride), .x_ahead = FN(ahead)(n, call->x_stride)};
        if (!FN(in_range)(st))
            FN(exact_backward_row)(n, row.dy, row.x, shares.gain, st, centred, row.dx, shares.dgain, shares.dbias);
        else if (st[0] == 0) FN(backward_row)(n, &row, &shares, turn, centred, 1, st, joint);
        else FN(backward_row)(n, &row, &shares, turn, centred, 0, st, joint);
    }
    if (padded) {
        memcpy(call->partial, shares.dgain, (size_t)n * sizeof(T));
        memcpy((T *)call->partial + n, shares.dbias, (size_t)n * sizeof(T));
    }
    if (joint) {
        FN(flush)(joint);
        stream_fence();
    }
}

static void FN(layer_norm_backward)(const cnorm_norm_backward *call) { FN(backward_rows)(call, 1); }
static void FN(rms_norm_backward)(const cnorm_norm_backward *call) { FN(backward_rows)(call, 0); }
