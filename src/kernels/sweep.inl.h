/* The sums of a row: lanes, blocks, the halving tree, float64 every FOLD elements. */

/* d = x - K of the whole vector at j; kept, if there is where */
INLINE V FN(shifted)(const FN(row) *row, ptrdiff_t j, V shift, T *kept)
{
    const V v = FN(row_load)(row, j), d = v - shift;
    if (row->residual && row->sum_carry) FN(stream)(row->sum + j, v);
    else if (row->residual) FN(store)(row->sum + j, v);
    if (kept) TN(store)(kept + j, d);
    return d;
}

/* the same of a vector that the row begins or ends in; d = 0 where there is no row */
EDGE V FN(shifted_some)(FN(row) row, ptrdiff_t n, ptrdiff_t j, V shift, T *kept)
{
    const ptrdiff_t from = j < 0 ? -j : 0, to = n - j < VL ? n - j : VL;
    const V v = FN(row_load_range)(&row, j, from, to), d = TN(only)(v - shift, from, to);
    if (row.residual) FN(put_range)(row.sum + j, from, to, v, row.sum_carry);
    if (kept) TN(store)(kept + j, d);
    return d;
}

/* s += d and q += d^2 for one vector */
INLINE void FN(accumulate)(V d, const int centred, V *s, V *q)
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
        FN(accumulate)(d[i], centred, &s[i % PASS], &q[i % PASS]);
    }
    if (!loads_first) FN(group)(w, centred, of, 1, v);
    if (of == FN(KEPT) && w->carry) FN(put_group)(w, v, 1, 1);
    else FN(put_group)(w, v, 1, 0);
}

/* The lanes of S = sum d and Q = sum d^2 over start <= j < stop of the row, of which start is a multiple of FOLD. A writer,
 * if there is one, is moved on in the same loop: the row before leaves while this one is summed. `of` is what it writes: a
 * PLAIN or SHIFTED row, not streamed, or a KEPT one. Sums are LEAD vectors ahead: what they then leave of the row before is
 * written while the tree is waited for.
 *
 * Vectors begin `lane_offset` lanes before the row, so that those kept lie where those written will. A lane's sum is then found
 * `lane_offset` lanes further on, and is turned back before the tree: the same additions in the same order. */
INLINE void FN(lane_sums)(const FN(row) *row, ptrdiff_t n, ptrdiff_t start, ptrdiff_t stop, T K, const int centred, T *kept,
                          ptrdiff_t lane_offset, FN(writer) *w, const enum FN(origin) of, V s[LANE_VECTORS], V q[LANE_VECTORS])
{
    const V shift = TN(splat)(K), zero = TN(splat)(0);
#pragma GCC unroll 2
    for (int first = 0; first < LANE_VECTORS; first += PASS) {
#pragma GCC unroll 4
        for (int i = 0; i < PASS; ++i) s[first + i] = q[first + i] = zero;
        for (ptrdiff_t block = start; block < stop; block += BLOCK * LANES) {
            const ptrdiff_t end = stop - block < BLOCK * LANES ? stop : block + BLOCK * LANES;
            ptrdiff_t j = block - lane_offset + first * VL;
            V sp[PASS], qp[PASS];
#pragma GCC unroll 4
            for (int i = 0; i < PASS; ++i) sp[i] = qp[i] = zero;
            for (int edge = lane_offset ? 0 : 1; edge < 2; ++edge) {
                /* the first vectors of the block, one of which may have begun in the block before, and the last */
                if (edge == 1) {
                    if (w && PASS == LANE_VECTORS) {
                        if (!block && n >= LONG_ROW) {
                            for (; j + PASS * VL <= LEAD * VL; j += LANES) {
#pragma GCC unroll 4
                                for (int i = 0; i < PASS; ++i)
                                    FN(accumulate)(FN(shifted)(row, j + i * VL, shift, kept), centred, &sp[i], &qp[i]);
                            }
                        }
                        for (; j + GROUP * VL <= end && w->at + GROUP * VL <= w->end; j += GROUP * VL) {
                            FN(sum_and_write)(row, j, shift, kept, centred, sp, qp, w, of);
                        }
                    }
                    for (; j + PASS * VL <= end; j += LANES) {
#pragma GCC unroll 4
                        for (int i = 0; i < PASS; ++i)
                            FN(accumulate)(FN(shifted)(row, j + i * VL, shift, kept), centred, &sp[i], &qp[i]);
                    }
                }
#pragma GCC unroll 4
                for (int i = 0; i < PASS; ++i) {
                    const ptrdiff_t at = j + i * VL, from = at < block ? lane_offset : 0, to = end - at < VL ? end - at : VL;
                    if (from >= to) continue;
                    V d = from && block && kept ? TN(load)(kept + at)
                          : at < 0 || at + VL > n ? FN(shifted_some)(*row, n, at, shift, kept)
                                                  : FN(shifted)(row, at, shift, kept);
                    if (from || to < VL) d = TN(only)(d, from, to);
                    FN(accumulate)(d, centred, &sp[i], &qp[i]);
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
    if (lane_offset) {
        TN(turn)(s, lane_offset);
        TN(turn)(q, lane_offset);
    }
}

/* S = sum d and Q = sum d^2 over the row; the rest see lane_sums */
INLINE void FN(sums)(const FN(row) *row, ptrdiff_t n, T K, const int centred, T *kept, ptrdiff_t lane_offset, FN(writer) *w,
                     const enum FN(origin) of, double *S, double *Q)
{
    *S = *Q = 0;
    for (ptrdiff_t start = 0; start < n; start += FOLD) {
        V s[LANE_VECTORS], q[LANE_VECTORS];
        FN(lane_sums)(row, n, start, n - start < FOLD ? n : start + FOLD, K, centred, kept, lane_offset, w, of, s, q);
        if (centred) *S += (double)TN(tree)(s);
        *Q += (double)TN(tree)(q);
    }
}
