/* Output: in whole aligned vectors past the caches, or as ordinary stores; from T to X. */

/* Output is streamed in whole aligned vectors. The one that a row ends in and the next begins in is kept here until it is
 * complete: a partial line would cost more than streaming saves. */
struct FN(carry) { V v; X *at; ptrdiff_t from, to; }; /* lanes from <= i < to of v wait for the vector at `at` */

RARE void FN(flush)(FN(carry) *carry)
{
    if (carry->to) FN(store_range)(carry->at, carry->from, carry->to, carry->v);
    carry->from = carry->to = 0;
}

/* lanes from <= i < to of the aligned vector at y, not all of them */
EDGE void FN(append)(X *y, ptrdiff_t from, ptrdiff_t to, V v, FN(carry) *carry)
{
    if (carry->at == y && carry->to == from) {
        carry->v = TN(fill)(TN(keep)(carry->v), carry->from, carry->to, v);
    } else {
        FN(flush)(carry);
        *carry = (FN(carry)){v, y, from, from};
    }
    carry->to = to;
    if (to < VL) return;
    if (carry->from) {
        FN(flush)(carry);
    } else {
        FN(stream)(y, carry->v);
        carry->to = 0;
    }
}

/* the same where output may not be streamed: carry is then NULL */
INLINE void FN(put_range)(X *y, ptrdiff_t from, ptrdiff_t to, V v, FN(carry) *carry)
{
    if (carry) FN(append)(y, from, to, v, carry);
    else FN(store_range)(y, from, to, v);
}

/* where to read a row again */
INLINE const X *FN(stored_row)(const FN(row) *row)
{
    if (row->sum_carry) FN(flush)(row->sum_carry);
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
    FN(carry) *carry; /* NULL unless y is streamed */
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
    FN(put_range)(w->y + at, from, to, FN(normalised)(w, d, gain, bias, centred), w->carry);
    FN(fetch_ahead)(w, at);
    w->at += VL;
}

/* lanes of an aligned vector that lie before p */
INLINE ptrdiff_t FN(lane_offset_of)(const X *p) { return (ptrdiff_t)((uintptr_t)p / sizeof(X) % VL); }

/* what comes before the first whole vector, where vectors begin `lane_offset` lanes before the row */
INLINE void FN(write_head)(FN(writer) *w, const T stats[3], ptrdiff_t lane_offset, const int centred, const enum FN(origin) origin)
{
    w->shift = TN(splat)(stats[0]);
    w->delta = TN(splat)(stats[1]);
    w->rstd = TN(splat)(stats[2]);
    w->at = -lane_offset;
    w->end = (w->n + lane_offset) / VL * VL - lane_offset;
    if (lane_offset) FN(write_edge)(w, centred, origin);
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
    if (w->carry) {
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
