/* The two sums over a row in one sweep, with the same bits for every vector width.
 *
 *   forward    a = sum d,  b = sum d^2       of d = x - K
 *   backward   a = sum g,  b = sum g xhat    of g = dy gain, xhat = ((x - K) - delta) rstd
 *
 * The order of additions is that of lane_sum.h and depends on n alone. Element j belongs to virtual lane j mod LANES;
 * LANES lanes are LANE_VECTORS native vectors.
 *
 * To be aligned in memory, vectors may begin lane_offset elements before the row, 0 <= lane_offset < VL. Element j is
 * then added in lane (j + lane_offset) mod LANES, and the lanes are rotated back before the tree: the same additions in
 * the same order.
 *
 * Software pipelining: in the forward pass a long enough previous row is written in the same loop (`w`), where the loop
 * has accumulators for all lanes (PASS = LANE_VECTORS: AVX2 and AVX-512). Each lane's additions are one dependency
 * chain; (4) of layer_norm.inl.h for the previous row is independent of it and runs during its latency. docs/kernels.md
 * has the time without it, in "Tried and rejected". */

enum {
    FN(CACHED) = CACHED_BYTES / (int)sizeof(T), /* elements of the longest cached row */
    FN(ROW_SPACE) = FN(CACHED) + 2 * VL,        /* for such a row at any lane offset */
    FN(TWO_ROWS) =
        PAGE_BYTES / (int)sizeof(T) + 2 * FN(ROW_SPACE), /* two kept rows, or gain and bias, at any page offset */
};

/* A row of n elements as a sweep reads it. Forward: x, or if SUM x + residual rounded to X, which is stored in sum; if
 * KEPT, d is stored in kept, which has space for whole vectors. Backward: x and dy; gain [n] or NULL; unless LATE_GRADS
 * the row's terms are added to dgain and dbias [n]. */
typedef struct {
    ptrdiff_t n, lane_offset;
    const X *x, *residual;
    X *sum;
    FN(carry) *carry; /* NULL unless sum is written by non-temporal stores */
    T *kept;
    const X *dy;
    const T *gain;
    T *dgain, *dbias;
    V K, delta, rstd;
} FN(row);

typedef struct {
    V a, b;
} FN(terms);

/* d and d^2 */
INLINE FN(terms) FN(deviations)(const FN(row) *row, ptrdiff_t j, ptrdiff_t from, ptrdiff_t to, const int mode)
{
    V x = FN(take)(row->x + j, from, to);
    if (mode & SUM) {
        x = FN(rounded)(x + FN(take)(row->residual + j, from, to));
        FN(put)(row->sum + j, from, to, x, row->carry);
    } else {
        x = TN(keep)(x);
    }
    V d = x - row->K;
    if (to - from < VL) d = TN(only)(d, from, to);
    if (mode & KEPT) FN(put_T)(row->kept + j, from, to, d);
    return (FN(terms)){d, d * d};
}

/* xhat of a vector of x */
INLINE V FN(xhat)(const FN(row) *row, V x, const int mode)
{
    if (mode & SHIFTED) x -= row->K;
    return (x - row->delta) * row->rstd;
}

/* dgain += dy xhat, dbias += dy */
INLINE void FN(add_param_grads)(const FN(row) *row, ptrdiff_t j, ptrdiff_t from, ptrdiff_t to, V dy, V xhat)
{
    FN(put_T)(row->dgain + j, from, to, FN(take_T)(row->dgain + j, from, to) + dy * xhat);
    FN(put_T)(row->dbias + j, from, to, FN(take_T)(row->dbias + j, from, to) + dy);
}

/* g and g xhat. In lanes outside the row dy = 0 and x = K, so that xhat is finite and both terms are 0. */
INLINE FN(terms) FN(gradient_terms)(const FN(row) *row, ptrdiff_t j, ptrdiff_t from, ptrdiff_t to, const int mode)
{
    const V dy = FN(take)(row->dy + j, from, to);
    V x = FN(take)(row->x + j, from, to);
    if (to - from < VL) x = TN(fill)(x, from, to, row->K);
    const V xhat = FN(xhat)(row, x, mode);
    const V g = row->gain ? dy * FN(take_T)(row->gain + j, from, to) : dy;
    if (!(mode & LATE_GRADS)) FN(add_param_grads)(row, j, from, to, dy, xhat);
    return (FN(terms)){g, g * xhat};
}

INLINE FN(terms) FN(terms_at)(const FN(row) *row, ptrdiff_t j, ptrdiff_t from, ptrdiff_t to, const int mode)
{
    return mode & BACKWARD ? FN(gradient_terms)(row, j, from, to, mode) : FN(deviations)(row, j, from, to, mode);
}

INLINE void FN(accumulate)(FN(terms) terms, const int mode, V *a, V *b)
{
    if (mode & (CENTRED | BACKWARD)) *a += terms.a;
    *b += terms.b;
}

/* the two sums of each of PASS vectors */
typedef struct {
    V a[PASS], b[PASS];
} FN(block);

/* adds the terms of those lanes of the PASS vectors at j that lie in elements begin to end */
EDGE FN(block) FN(add_edge)(FN(row) row, ptrdiff_t j, ptrdiff_t begin, ptrdiff_t end, int mode, FN(block) sums)
{
#pragma GCC unroll 2
    for (int i = 0; i < PASS; ++i, j += VL) {
        const ptrdiff_t from = j < begin ? begin - j : 0, to = end - j < VL ? end - j : VL;
        if (from < to) FN(accumulate)(FN(terms_at)(&row, j, from, to, mode), mode, &sums.a[i], &sums.b[i]);
    }
    return sums;
}

/* adds the terms of PASS whole vectors in every LANES elements from *j on, while they end by `stop` */
INLINE void FN(add_vectors)(const FN(row) *row, ptrdiff_t *j, ptrdiff_t stop, const int mode, FN(block) *sums)
{
    for (; *j + PASS * VL <= stop; *j += LANES)
        EACH(i, PASS) FN(accumulate)(FN(terms_at)(row, *j + i * VL, 0, VL, mode), mode, &sums->a[i], &sums->b[i]);
}

/* Sums UNROLL whole vectors at j, and writes as many of the previous row. All are loaded before any is stored: see
 * normalise_vectors. */
INLINE void FN(add_and_write)(const FN(row) *row, ptrdiff_t j, const int mode, FN(writer) *w, FN(block) *sums)
{
    V v[UNROLL];
    EACH(i, UNROLL)
        FN(accumulate)(FN(deviations)(row, j + i * VL, 0, VL, mode), mode, &sums->a[i % PASS], &sums->b[i % PASS]);
    FN(normalise_vectors)(w, mode, v);
    FN(put_vectors)(w, mode, v);
}

/* The terms of a block, elements begin to end, summed in PASS of the lane vectors, from `first` on. With a writer the
 * row's first LEAD vectors are summed alone, so that as much of the previous row is left to write_rest; then UNROLL
 * vectors are summed and as many written, until one of the two is done. */
INLINE FN(block)
    FN(sum_block)(const FN(row) *row, ptrdiff_t begin, ptrdiff_t end, const int first, const int mode, FN(writer) *w)
{
    ptrdiff_t j = begin - row->lane_offset + first * VL;
    FN(block) sums;
    EACH(i, PASS) sums.a[i] = sums.b[i] = TN(splat)(0);
    if (row->lane_offset) {
        sums = FN(add_edge)(*row, j, begin, end, mode, sums);
        j += LANES;
    }
    if (w) {
        FN(add_vectors)(row, &j, LEAD * VL < end ? LEAD * VL : end, mode, &sums);
        for (; j + UNROLL * VL <= end && w->at + UNROLL * VL <= w->stop; j += UNROLL * VL)
            FN(add_and_write)(row, j, mode, w, &sums);
    }
    FN(add_vectors)(row, &j, end, mode, &sums);
    return j < end ? FN(add_edge)(*row, j, begin, end, mode, sums) : sums;
}

/* The two sums of a row; the first is 0 for RMS norm. w: the previous row, to be written meanwhile, or NULL. */
INLINE void FN(sweep)(const FN(row) *row, const int mode, FN(writer) *w, double sums[2])
{
    sums[0] = sums[1] = 0;
    for (ptrdiff_t start = 0; start < row->n; start += FOLD) {
        const ptrdiff_t stop = row->n - start < FOLD ? row->n : start + FOLD;
        V lanes[2][LANE_VECTORS];
        EACH(i, LANE_VECTORS) lanes[0][i] = lanes[1][i] = TN(splat)(0);
        for (int first = 0; first < LANE_VECTORS; first += PASS) /* one pass sums as many lanes as fit in registers */
            for (ptrdiff_t begin = start; begin < stop; begin += BLOCK * LANES) {
                const ptrdiff_t end = stop - begin < BLOCK * LANES ? stop : begin + BLOCK * LANES;
                const FN(block) block = FN(sum_block)(row, begin, end, first, mode, w);
                EACH(i, PASS) {
                    lanes[0][first + i] = begin == start ? block.a[i] : lanes[0][first + i] + block.a[i];
                    lanes[1][first + i] = begin == start ? block.b[i] : lanes[1][first + i] + block.b[i];
                }
            }
        const int both = mode & (CENTRED | BACKWARD);
        if (row->lane_offset && both) TN(rotate_lanes)(lanes[0], row->lane_offset);
        if (row->lane_offset) TN(rotate_lanes)(lanes[1], row->lane_offset);
        if (both) sums[0] += (double)TN(tree)(lanes[0]);
        sums[1] += (double)TN(tree)(lanes[1]);
    }
}

/* S and Q of d = x - K over x [n]. The result is returned in registers: where the caller reads both numbers in one
 * load, two stores would fail store forwarding and wait for all stores before them, behind non-temporal ones 35 ns a
 * row (Zen 4, 2026-11-23). */
static NOINLINE row_sums FN(run_sums)(const X *x, ptrdiff_t n, T K, ptrdiff_t lane_offset)
{
    double sums[2];
    FN(sweep)(&(FN(row)){.n = n, .lane_offset = lane_offset, .x = x, .K = TN(splat)(K)}, CENTRED, NULL, sums);
    return (row_sums){sums[0], sums[1]};
}

/* a row of the backward pass */
INLINE FN(row) FN(gradient_row)(const X *x, const X *dy, const T *gain, ptrdiff_t n, const T st[3])
{
    return (FN(row)){.n = n,
                     .x = x,
                     .dy = dy,
                     .gain = gain,
                     .K = TN(splat)(st[0]),
                     .delta = TN(splat)(st[1]),
                     .rstd = TN(splat)(st[2])};
}

/* its sums alone */
static NOINLINE row_sums FN(gradient_sums)(const X *x, const X *dy, const T *gain, ptrdiff_t n, const T st[3])
{
    double sums[2];
    FN(row) row = FN(gradient_row)(x, dy, gain, n, st);
    if (ALIGN_LOADS && sizeof(X) == sizeof(T) && n > SHORT_ROW) row.lane_offset = FN(lane_offset_of)(x);
    if (st[0] != 0) FN(sweep)(&row, BACKWARD | SHIFTED | LATE_GRADS, NULL, sums);
    else FN(sweep)(&row, BACKWARD | LATE_GRADS, NULL, sums);
    return (row_sums){sums[0], sums[1]};
}
