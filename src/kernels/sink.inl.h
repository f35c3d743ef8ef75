/* Vectors of T from and to rows of the storage type X, by ordinary or by non-temporal stores; and (4) of
 * layer_norm.inl.h.
 *
 * Non-temporal stores bypass the caches: a line that is written whole is not read first. They work on whole aligned
 * vectors. The partial vector that one row ends in and the next begins in is carried in a register until it is
 * complete, because a partial store makes the processor read the line (16384x1024 float32 with unaligned rows: 4467 ->
 * 3204 us, Zen 3, 2026-11-22). */

/* lanes from <= i < to of the vector at p, the others zero */
INLINE V FN(take)(const X *p, ptrdiff_t from, ptrdiff_t to)
{
    return to - from == VL ? FN(load)(p) : FN(load_range)(p, from, to);
}
INLINE V FN(take_T)(const T *p, ptrdiff_t from, ptrdiff_t to)
{
    return to - from == VL ? TN(load)(p) : TN(load_range)(p, from, to);
}
INLINE void FN(put_T)(T *p, ptrdiff_t from, ptrdiff_t to, V v)
{
    if (to - from == VL) TN(store)(p, v);
    else TN(store_range)(p, from, to, v);
}

/* The carried vector: lanes from <= i < to of v are still to be stored at `at`; none where to = 0. */
typedef struct {
    V v;
    X *at;
    ptrdiff_t from, to;
} FN(carry);

RARE void FN(flush)(FN(carry) *carry)
{
    if (carry->to) FN(store_range)(carry->at, carry->from, carry->to, carry->v);
    carry->from = carry->to = 0;
}

/* Writes lanes from <= i < to, not all, of the aligned vector at y: adds them to the carried vector, which is stored
 * once it is complete. Called, which saves 22 kB of text; of its arguments only the carry is in memory. */
static NOINLINE void FN(append)(X *y, ptrdiff_t from, ptrdiff_t to, V v, FN(carry) *carry)
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
        FN(nt_store)(y, carry->v);
        carry->to = 0;
    }
}

/* writes lanes from <= i < to of the vector at y; carry is NULL for ordinary stores */
INLINE void FN(put)(X *y, ptrdiff_t from, ptrdiff_t to, V v, FN(carry) *carry)
{
    if (to - from < VL && carry) FN(append)(y, from, to, v, carry);
    else if (to - from < VL) FN(store_range)(y, from, to, v);
    else if (carry) FN(nt_store)(y, v);
    else FN(store)(y, v);
}

/* elements between p and the vector boundary before it */
INLINE ptrdiff_t FN(lane_offset_of)(const X *p) { return (ptrdiff_t)((uintptr_t)p / sizeof(X) % VL); }

/* how many elements before a row its vectors begin, so that non-temporal stores to y, or else loads from x, are
 * aligned */
INLINE ptrdiff_t FN(offset_of_vectors)(const X *x, const X *y, int aligned, const int mode)
{
    return mode & NT_STORES ? FN(lane_offset_of)(y) : aligned ? FN(lane_offset_of)(x) : 0;
}

/* at the end of a call: stores the carried vector and orders the non-temporal stores before what follows */
INLINE void FN(finish)(FN(carry) *carry)
{
    FN(flush)(carry);
    nt_fence();
}

/* prefetch distance in bytes: as many whole rows as fit in AHEAD_BYTES; AHEAD_BYTES where none fits */
INLINE ptrdiff_t FN(ahead)(ptrdiff_t n, ptrdiff_t stride)
{
    const ptrdiff_t item = sizeof(X), rows = AHEAD_BYTES / (n * item);
    return rows ? rows * stride * item : AHEAD_BYTES;
}

/* A row that is being written: (4) is to be done for elements `at` to n. Vectors are whole up to `end`; those up to
 * `stop` may be written while the next row is summed. KEPT rows are read from d, others from x. */
typedef struct {
    ptrdiff_t n, at, stop, end;
    const T *d;
    const X *x, *residual; /* residual: only where it is to be prefetched, with x; else NULL */
    V K, delta, rstd;
    const T *gain, *bias;           /* [n]; RMS norm has no bias */
    ptrdiff_t gain_mask, bias_mask; /* without PARAMS: 0 if gain or bias is UNROLL neutral vectors, else -1 */
    X *y;
    ptrdiff_t lane_offset; /* vectors begin so many elements before the row */
    FN(carry) *carry;      /* NULL unless y is written by non-temporal stores */
    ptrdiff_t x_ahead, residual_ahead;
} FN(writer);

INLINE FN(writer) FN(writer_of)(const cnorm_norm *call, FN(carry) *carry)
{
    return (FN(writer)){.n = call->n,
                        .gain = call->gain,
                        .bias = call->bias,
                        .carry = carry,
                        .x_ahead = FN(ahead)(call->n, call->x_stride),
                        .residual_ahead = FN(ahead)(call->n, call->residual_stride)};
}

INLINE void FN(prefetch)(const FN(writer) *w, ptrdiff_t j)
{
    if (!w->residual) return;
    prefetch(w->x + j, w->x_ahead, VL * sizeof(X));
    prefetch(w->residual + j, w->residual_ahead, VL * sizeof(X));
}

/* gain and bias from element `at` on; neutral ones are the same for every `at`, so UNROLL vectors need one mask */
INLINE const T *FN(gain_at)(const FN(writer) *w, ptrdiff_t at, const int mode)
{
    return w->gain + (mode & PARAMS ? at : at & w->gain_mask);
}
INLINE const T *FN(bias_at)(const FN(writer) *w, ptrdiff_t at, const int mode)
{
    return mode & CENTRED ? w->bias + (mode & PARAMS ? at : at & w->bias_mask) : NULL;
}

/* (4) for lanes from <= i < to of the vector `on` elements after w->at; gain and bias point to those of w->at */
INLINE V FN(normalise)(const FN(writer) *w, ptrdiff_t on, ptrdiff_t from, ptrdiff_t to, const T *gain, const T *bias,
                       const int mode)
{
    V d = mode & KEPT ? FN(take_T)(w->d + w->at + on, from, to) : FN(take)(w->x + w->at + on, from, to);
    if (mode & CENTRED && !(mode & KEPT)) d -= w->K;
    const V xhat = (mode & CENTRED ? d - w->delta : d) * w->rstd, scaled = xhat * FN(take_T)(gain + on, from, to);
    return mode & CENTRED ? scaled + FN(take_T)(bias + on, from, to) : scaled;
}

/* (4) for the partial vector at `at`, which the row begins or ends in */
EDGE void FN(write_edge)(FN(writer) w, int mode)
{
    const ptrdiff_t at = w.at, from = at < 0 ? -at : 0, to = w.n - at < VL ? w.n - at : VL;
    if (to - from == VL) __builtin_unreachable();
    const V v = FN(normalise)(&w, 0, from, to, FN(gain_at)(&w, at, mode), FN(bias_at)(&w, at, mode), mode);
    FN(put)(w.y + at, from, to, v, w.carry);
    FN(prefetch)(&w, at);
}

/* begins a row of statistics st, and writes the partial vector before its first whole one */
INLINE void FN(begin_row)(FN(writer) *w, const T st[3], const int mode)
{
    w->K = TN(splat)(st[0]);
    w->delta = TN(splat)(st[1]);
    w->rstd = TN(splat)(st[2]);
    w->at = -w->lane_offset;
    w->end = (w->n + w->lane_offset) / VL * VL - w->lane_offset;
    if (!w->lane_offset) return;
    FN(write_edge)(*w, mode);
    w->at += VL;
}

/* (4) for UNROLL whole vectors from `at` on. All are loaded before any is stored, against 4K aliasing: a load waits for
 * an earlier store whose address has the same low 12 bits. */
INLINE void FN(normalise_vectors)(const FN(writer) *w, const int mode, V v[UNROLL])
{
    const T *const gain = FN(gain_at)(w, w->at, mode), *const bias = FN(bias_at)(w, w->at, mode);
    EACH(i, UNROLL) v[i] = TN(keep)(FN(normalise)(w, i * VL, 0, VL, gain, bias, mode));
}

INLINE void FN(put_vectors)(FN(writer) *w, const int mode, const V v[UNROLL])
{
#pragma GCC unroll 4
    for (int i = 0; i < UNROLL; i += 2) {
        X *const y = w->y + w->at + i * VL;
        if (w->carry) {
            FN(prefetch)(w, w->at + i * VL);
            FN(prefetch)(w, w->at + i * VL + VL);
            if (mode & PARAMS) FN(nt_store_two)(y, v[i], v[i + 1]);
            else FN(nt_store)(y, v[i]), FN(nt_store)(y + VL, v[i + 1]);
        } else {
            if (mode & PARAMS) FN(store_two)(y, v[i], v[i + 1]);
            else FN(store)(y, v[i]), FN(store)(y + VL, v[i + 1]);
        }
    }
    w->at += UNROLL * VL;
}

/* (4) for the rest of the row */
INLINE void FN(write_rest)(FN(writer) *w, const int mode)
{
    while (w->at + UNROLL * VL <= w->end) {
        V v[UNROLL];
        FN(normalise_vectors)(w, mode, v);
        FN(put_vectors)(w, mode, v);
    }
    for (; w->at < w->end; w->at += VL) {
        const V v = FN(normalise)(w, 0, 0, VL, FN(gain_at)(w, w->at, mode), FN(bias_at)(w, w->at, mode), mode);
        if (w->carry) FN(nt_store)(w->y + w->at, v), FN(prefetch)(w, w->at);
        else FN(store)(w->y + w->at, v);
    }
    if (w->at < w->n) FN(write_edge)(*w, mode);
}
