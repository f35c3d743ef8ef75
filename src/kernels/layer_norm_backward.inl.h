/* The backward pass of layer_norm.inl.h: (5) and (6). */

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
 * with zeros, so that vectors may begin `lane_offset` lanes before the row; else where the caller has them, and lane_offset is 0.
 * They are added to in (5), but where dx is streamed in (6): a store waits until those before it are done, and streamed
 * ones take as long as memory takes. */
typedef struct {
    const T *gain;
    T *dgain, *dbias;
    int padded;
} FN(param_grads);
typedef struct { V dgain, dbias; } FN(param_grad); /* one vector of them */

/* lanes from <= i < to of the vector at j, with those of a row */
INLINE FN(param_grad) FN(with_param_grad)(const FN(param_grads) *to_add, ptrdiff_t j, ptrdiff_t from, ptrdiff_t to, V dy, V xhat,
                                const int centred)
{
    const V zero = TN(splat)(0);
    const int all = to - from == VL || to_add->padded;
    const T *dgain = to_add->dgain + j, *dbias = to_add->dbias + j;
    FN(param_grad) share = {(all ? TN(load)(dgain) : TN(load_range)(dgain, from, to, zero)) + dy * xhat, zero};
    if (centred) share.dbias = (all ? TN(load)(dbias) : TN(load_range)(dbias, from, to, zero)) + dy;
    return share;
}

INLINE void FN(put_param_grad)(const FN(param_grads) *to_add, ptrdiff_t j, ptrdiff_t from, ptrdiff_t to, FN(param_grad) share,
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
INLINE FN(terms) FN(terms_at)(const FN(gradient) *row, ptrdiff_t j, ptrdiff_t from, ptrdiff_t to, const FN(param_grads) *to_add,
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
INLINE void FN(backward_terms)(const FN(gradient) *row, ptrdiff_t j, ptrdiff_t from, ptrdiff_t to, const FN(param_grads) *to_add,
                               const int centred, const int plain, const int streaming, V *g, V *gx)
{
    const FN(terms) t = FN(terms_at)(row, j, from, to, to_add, centred, plain);
    *g = t.g;
    *gx = t.g * t.xhat;
    if (!streaming)
        FN(put_param_grad)(to_add, j, from, to, FN(with_param_grad)(to_add, j, from, to, t.dy, t.xhat, centred), centred);
}

/* the same of a vector at an edge of the row */
EDGE void FN(backward_edge)(FN(gradient) row, ptrdiff_t n, ptrdiff_t j, FN(param_grads) to_add, int centred, int streaming,
                            V terms[2])
{
    const ptrdiff_t from = j < 0 ? -j : 0, to = n - j < VL ? n - j : VL;
    FN(backward_terms)(&row, j, from, to, &to_add, centred, 0, streaming, &terms[0], &terms[1]);
}

/* (5) for one row: sums = G n, H n. For `lane_offset` see lane_sums. */
INLINE void FN(backward_sums)(ptrdiff_t n, const FN(gradient) *row, const FN(param_grads) *to_add, ptrdiff_t lane_offset, const int centred,
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
                ptrdiff_t j = block - lane_offset + first * VL;
                V gp[PASS], gxp[PASS];
#pragma GCC unroll 4
                for (int i = 0; i < PASS; ++i) gp[i] = gxp[i] = zero;
                for (int edge = lane_offset ? 0 : 1; edge < 2; ++edge) { /* see lane_sums */
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
                            gp[i] += TN(only)(carried_g, lane_offset, VL);
                            gxp[i] += TN(only)(carried_gx, lane_offset, VL);
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
        if (lane_offset) {
            TN(turn)(g, lane_offset);
            TN(turn)(gx, lane_offset);
        }
        if (centred) sums[0] += (double)TN(tree)(g);
        sums[1] += (double)TN(tree)(gx);
    }
}

/* (6) for lanes from <= i < to of the vector at j. For dx that is streamed, share is not NULL: it gets what dgain and dbias
 * become there, and rows ahead are fetched. */
INLINE V FN(dx)(const FN(gradient) *row, ptrdiff_t j, ptrdiff_t from, ptrdiff_t to, const FN(param_grads) *to_add, V G, V H,
                const int centred, const int plain, FN(param_grad) *share)
{
    const FN(terms) t = FN(terms_at)(row, j, from, to, to_add, centred, plain);
    if (share) {
        *share = FN(with_param_grad)(to_add, j, from, to, t.dy, t.xhat, centred);
        fetch(row->dy + j, row->dy_ahead, VL * sizeof(X));
        fetch(row->x + j, row->x_ahead, VL * sizeof(X));
    }
    return row->rstd * ((centred ? t.g - G : t.g) - t.xhat * H);
}

/* the same, written where it goes; carry is NULL unless dx is streamed */
INLINE void FN(put_dx)(const FN(gradient) *row, ptrdiff_t j, ptrdiff_t from, ptrdiff_t to, const FN(param_grads) *to_add, V G, V H,
                       const int centred, const int plain, FN(carry) *carry)
{
    FN(param_grad) share;
    const V v = FN(dx)(row, j, from, to, to_add, G, H, centred, plain, carry ? &share : NULL);
    if (carry) FN(put_param_grad)(to_add, j, from, to, share, centred);
    if (to - from < VL) FN(put_range)(row->dx + j, from, to, v, carry);
    else if (carry) FN(stream)(row->dx + j, v);
    else FN(store)(row->dx + j, v);
}

/* (6) for one row; vectors begin `lane_offset` lanes before it */
INLINE void FN(backward_dx)(ptrdiff_t n, const FN(gradient) *row, const FN(param_grads) *to_add, ptrdiff_t lane_offset, const int centred,
                            const int plain, const double sums[2], FN(carry) *carry)
{
    const V G = TN(splat)((T)(sums[0] / (double)n)), H = TN(splat)((T)(sums[1] / (double)n));
    ptrdiff_t j = -lane_offset;
    if (lane_offset) {
        FN(put_dx)(row, j, lane_offset, n + lane_offset < VL ? n + lane_offset : VL, to_add, G, H, centred, plain, carry);
        j += VL;
    }
    for (; j + GROUP * VL <= n; j += GROUP * VL) { /* in groups: see write_group */
        V v[GROUP];
        FN(param_grad) share[GROUP];
#pragma GCC unroll 4
        for (int i = 0; i < GROUP; ++i) {
            const ptrdiff_t at = j + i * VL;
            v[i] = TN(keep)(FN(dx)(row, at, 0, VL, to_add, G, H, centred, plain, carry ? &share[i] : NULL));
        }
#pragma GCC unroll 4
        for (int i = 0; i < GROUP; ++i) {
            const ptrdiff_t at = j + i * VL;
            if (carry) FN(put_param_grad)(to_add, at, 0, VL, share[i], centred);
            if (carry) FN(stream)(row->dx + at, v[i]);
            else FN(store)(row->dx + at, v[i]);
        }
    }
    for (; j + VL <= n; j += VL) FN(put_dx)(row, j, 0, VL, to_add, G, H, centred, plain, carry);
    if (j < n) FN(put_dx)(row, j, 0, n - j, to_add, G, H, centred, plain, carry);
}

/* the share of a row whose dx is left to f64_backward_row */
RARE void FN(add_param_grads)(ptrdiff_t n, FN(gradient) row, FN(param_grads) to_add, int centred)
{
    for (ptrdiff_t j = 0; j < n; j += VL) {
        const ptrdiff_t to = n - j < VL ? n - j : VL;
        const FN(terms) t = FN(terms_at)(&row, j, 0, to, &to_add, centred, 0);
        FN(put_param_grad)(&to_add, j, 0, to, FN(with_param_grad)(&to_add, j, 0, to, t.dy, t.xhat, centred), centred);
    }
}

/* (5) and (6) for a row that does without the float64 path, unless its sums overflow */
INLINE void FN(backward_row)(ptrdiff_t n, const FN(gradient) *row, const FN(param_grads) *to_add, ptrdiff_t lane_offset, const int centred,
                             const int plain, const T st[3], FN(carry) *carry)
{
    double sums[2];
    FN(backward_sums)(n, row, to_add, lane_offset, centred, plain, carry != NULL, sums);
    if (!(fabs(sums[0]) <= SUM_MAX && fabs(sums[1]) <= SUM_MAX)) {
        if (carry) FN(add_param_grads)(n, *row, *to_add, centred);
        FN(f64_backward_row)(n, row->dy, row->x, to_add->gain, st, centred, row->dx, NULL, NULL);
    } else if (carry) {
        FN(backward_dx)(n, row, to_add, FN(lane_offset_of)(row->dx), centred, plain, sums, carry);
    } else {
        FN(backward_dx)(n, row, to_add, lane_offset, centred, plain, sums, NULL);
    }
}

/* One block of rows: partial [2, n] becomes this block's dgain and dbias */
INLINE void FN(backward_rows)(const cnorm_norm_backward *call, const int centred)
{
    const ptrdiff_t n = call->n;
    const int padded = n <= FN(CACHED) && call->rows > 1;
    _Alignas(VECTOR_BYTES) T space[PAGE_BYTES / sizeof(T) + 3 * FN(ROW_SPACE)];
    T *const room = space + offset_away_from(space, call->x, call->dy) / (ptrdiff_t)sizeof(T);
    const int aligned = ALIGN_LOADS && sizeof(X) == sizeof(T) && padded && n > SHORT_ROW && call->x_stride % VL == 0;
    const ptrdiff_t lane_offset = aligned ? FN(lane_offset_of)(call->x) : 0;
    FN(param_grads) param_grads = {.gain = call->gain, .dgain = call->partial, .dbias = (T *)call->partial + n, .padded = padded};
    if (padded) {
        for (int i = 0; i < 3; ++i) memset(room + i * FN(ROW_SPACE), 0, (size_t)(n + 2 * VL) * sizeof(T));
        /* as the vectors begin that are added to them, or, where that differs from row to row, behind room for a whole one */
        T *const at = room + (!call->streaming ? lane_offset : n % VL ? VL : FN(lane_offset_of)(call->dx));
        param_grads.dgain = at;
        param_grads.dbias = at + FN(ROW_SPACE);
        if (call->gain) param_grads.gain = memcpy(at + 2 * FN(ROW_SPACE), call->gain, (size_t)n * sizeof(T));
    } else {
        memset(call->partial, 0, 2 * (size_t)n * sizeof(T));
    }
    FN(carry) kept = {.to = 0}, *carry = call->streaming ? &kept : NULL;
    for (ptrdiff_t r = 0; r < call->rows; ++r) {
        const T *st = (const T *)call->stats + 3 * r;
        const FN(gradient) row = {.dy = (const X *)call->dy + r * call->dy_stride,
                                  .x = (const X *)call->x + r * call->x_stride,
                                  .dx = (X *)call->dx + r * call->dx_stride,
                                  .shift = TN(splat)(st[0]), .delta = TN(splat)(st[1]), .rstd = TN(splat)(st[2]),
                                  .dy_ahead = FN(ahead)(n, call->dy_stride), .x_ahead = FN(ahead)(n, call->x_stride)};
        if (!FN(rstd_in_range)(st))
            FN(f64_backward_row)(n, row.dy, row.x, param_grads.gain, st, centred, row.dx, param_grads.dgain, param_grads.dbias);
        else if (st[0] == 0) FN(backward_row)(n, &row, &param_grads, lane_offset, centred, 1, st, carry);
        else FN(backward_row)(n, &row, &param_grads, lane_offset, centred, 0, st, carry);
    }
    if (padded) {
        memcpy(call->partial, param_grads.dgain, (size_t)n * sizeof(T));
        memcpy((T *)call->partial + n, param_grads.dbias, (size_t)n * sizeof(T));
    }
    if (carry) {
        FN(flush)(carry);
        stream_fence();
    }
}

static void FN(layer_norm_backward)(const cnorm_norm_backward *call) { FN(backward_rows)(call, 1); }
static void FN(rms_norm_backward)(const cnorm_norm_backward *call) { FN(backward_rows)(call, 0); }
