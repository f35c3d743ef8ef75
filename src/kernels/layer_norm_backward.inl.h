/* The backward pass of layer_norm.inl.h, with xhat = ((x - K) - delta) rstd and g = dy gain
 *   (5) one sweep (sweep.inl.h): G = mean g, H = mean g xhat, and dgain += dy xhat, dbias += dy
 *   (6) dx = rstd ((g - G) - xhat H)        RMS norm: K = delta = G = 0
 * dgain and dbias are summed row after row within blocks of 64 rows, and over the blocks by a fixed tree (api.c). With
 * LATE_GRADS they are added to in (6) instead: where dx is written by non-temporal stores, because an ordinary store of
 * (5) would wait until those before it have reached memory.
 * Rows whose rstd or sums leave the range of T are done in float64 (row_float64.inl.h). */

/* The destination of dx, and the inputs of (6) that are not in the row */
typedef struct {
    X *dx;
    V G, H;
    ptrdiff_t lane_offset;
    FN(carry) *carry;            /* NULL unless dx is written by non-temporal stores */
    ptrdiff_t dy_ahead, x_ahead; /* prefetch distances in bytes, used with carry */
} FN(dx_row);

/* a vector of dx and, if LATE_GRADS, the new values of dgain and dbias */
typedef struct {
    V dx, dgain, dbias;
} FN(dx_vector);

/* (6): lanes from <= i < to of the vector at j. dgain and dbias are loaded here, so that loads precede stores in
 * UNROLL vectors: beyond the caches a row takes 8 % less time (AVX2, Zen 4, 2026-11-24). */
INLINE FN(dx_vector) FN(dx_vector_at)(const FN(row) *row, const FN(dx_row) *to_dx, ptrdiff_t j, ptrdiff_t from,
                                      ptrdiff_t to, const int mode)
{
    const V dy = FN(take)(row->dy + j, from, to), xhat = FN(xhat)(row, FN(take)(row->x + j, from, to), mode);
    const V g = row->gain ? dy * FN(take_T)(row->gain + j, from, to) : dy;
    FN(dx_vector) v = {.dx = TN(keep)(row->rstd * ((g - to_dx->G) - xhat * to_dx->H))};
    if (!(mode & LATE_GRADS)) return v;
    v.dgain = FN(take_T)(row->dgain + j, from, to) + dy * xhat;
    v.dbias = FN(take_T)(row->dbias + j, from, to) + dy;
    if (!to_dx->carry) return v;
    prefetch(row->dy + j, to_dx->dy_ahead, VL * sizeof(X));
    prefetch(row->x + j, to_dx->x_ahead, VL * sizeof(X));
    return v;
}

/* stores what dx_vector_at computed */
INLINE void FN(put_dx_vector)(const FN(row) *row, const FN(dx_row) *to_dx, ptrdiff_t j, ptrdiff_t from, ptrdiff_t to,
                              const FN(dx_vector) *v, const int mode)
{
    if (mode & LATE_GRADS) {
        FN(put_T)(row->dgain + j, from, to, v->dgain);
        FN(put_T)(row->dbias + j, from, to, v->dbias);
    }
    FN(put)(to_dx->dx + j, from, to, v->dx, mode & LATE_GRADS ? to_dx->carry : NULL);
}

/* (6) for one row: UNROLL vectors at a time as in normalise_vectors, single vectors at its ends */
INLINE void FN(write_dx)(const FN(row) *row, const FN(dx_row) *to_dx, const int mode)
{
    for (ptrdiff_t j = -to_dx->lane_offset; j < row->n; j += VL) {
        for (; j >= 0 && j + UNROLL * VL <= row->n; j += UNROLL * VL) {
            FN(dx_vector) v[UNROLL];
            EACH(i, UNROLL) v[i] = FN(dx_vector_at)(row, to_dx, j + i * VL, 0, VL, mode);
            EACH(i, UNROLL) FN(put_dx_vector)(row, to_dx, j + i * VL, 0, VL, &v[i], mode);
        }
        if (j >= row->n) return;
        const ptrdiff_t from = j < 0 ? -j : 0, to = row->n - j < VL ? row->n - j : VL;
        const FN(dx_vector) v = FN(dx_vector_at)(row, to_dx, j, from, to, mode);
        FN(put_dx_vector)(row, to_dx, j, from, to, &v, mode);
    }
}

/* (5) and (6) for a row whose rstd is in range. False where a sum overflows: (6) is then not done, and the float64
 * path is needed. RMS norm is computed as layer norm with K = delta = G = 0, which changes no bit of dx and dgain. */
INLINE int FN(backward_row)(const FN(row) *row, const T st[3], FN(dx_row) *to_dx, int centred, const int mode)
{
    double sums[2];
    if (mode & LATE_GRADS) {
        const row_sums both = FN(gradient_sums)(row->x, row->dy, row->gain, row->n, st);
        sums[0] = both.a, sums[1] = both.b;
    } else {
        FN(sweep)(row, mode | BACKWARD, NULL, sums);
    }
    if (!centred) sums[0] = 0;
    if (!(fabs(sums[0]) <= SUM_MAX && fabs(sums[1]) <= SUM_MAX)) return 0;
    to_dx->G = TN(splat)((T)(sums[0] / (double)row->n));
    to_dx->H = TN(splat)((T)(sums[1] / (double)row->n));
    FN(write_dx)(row, to_dx, mode);
    return 1;
}

/* dgain and dbias in T, of a row whose dx alone needs the float64 path */
RARE void FN(add_param_grads_alone)(const FN(row) *row)
{
    for (ptrdiff_t j = 0; j < row->n; j += VL) {
        const ptrdiff_t to = row->n - j < VL ? row->n - j : VL;
        const V dy = FN(take)(row->dy + j, 0, to), xhat = FN(xhat)(row, FN(take)(row->x + j, 0, to), SHIFTED);
        FN(add_param_grads)(row, j, 0, to, dy, xhat);
    }
}

/* gain, dgain and dbias [n] of a call */
typedef struct {
    const T *gain;
    T *dgain, *dbias;
} FN(param_grads);

/* For cached rows they lie in `space`, at a page offset away from x and dy (4K aliasing) and at the lane offset of the
 * vectors that are added to them. */
INLINE FN(param_grads) FN(place_param_grads)(const cnorm_norm_backward *call, ptrdiff_t lane_offset, T *space)
{
    const size_t bytes = (size_t)call->n * sizeof(T);
    FN(param_grads) to = {.gain = call->gain, .dgain = call->partials, .dbias = (T *)call->partials + call->n};
    if (call->n <= FN(CACHED) &&call->rows > 1) {
        to.dgain = space + offset_away_from(space, call->x, call->dy) / (ptrdiff_t)sizeof(T) + lane_offset;
        to.dbias = to.dgain + FN(ROW_SPACE);
        if (call->gain) to.gain = memcpy(to.dbias + FN(ROW_SPACE), call->gain, bytes);
        memset(to.dgain, 0, bytes);
        memset(to.dbias, 0, bytes);
    } else {
        memset(to.dgain, 0, 2 * bytes);
    }
    return to;
}

/* Row r of a call. backward_rows and late_row pass its address to inlined functions only, so that its members stay in
 * registers: 1x256 takes 14 % less time (Sapphire Rapids, 2026-11-24). */
INLINE FN(row) FN(row_of_call)(const cnorm_norm_backward *call, FN(param_grads) to, ptrdiff_t r)
{
    FN(row) row = FN(gradient_row)((const X *)call->x + r * call->x_stride, (const X *)call->dy + r * call->dy_stride,
                                   to.gain, call->n, (const T *)call->stats + 3 * r);
    row.dgain = to.dgain, row.dbias = to.dbias;
    return row;
}

/* Row r of a call, by the float64 path. `added`: (5) has added its terms to dgain and dbias if rstd is in range. */
RARE void FN(rescue_gradient)(const cnorm_norm_backward *call, FN(param_grads) to, ptrdiff_t r, int centred, int added)
{
    const FN(row) row = FN(row_of_call)(call, to, r);
    const T *const st = (const T *)call->stats + 3 * r;
    const int in_range = FN(rstd_in_range)(st);
    if (in_range && !added) FN(add_param_grads_alone)(&row);
    channel_group in_f64 = {DTYPE, row.n, 1, row.dy, row.x, row.gain, .out = (X *)call->dx + r * call->dx_stride};
    if (!in_range) in_f64.dgain = row.dgain, in_f64.dbias = row.dbias;
    f64_row_backward(in_f64, st, centred);
}

/* backward_row with LATE_GRADS, for row r of a call; carry is NULL unless dx is written by non-temporal stores. It
 * builds row and to_dx itself: a copy of the caller's, whose members were just stored one by one, would fail store
 * forwarding and wait for all non-temporal stores before it. */
static NOINLINE int FN(late_row)(const cnorm_norm_backward *call, const FN(param_grads) *to, ptrdiff_t r, int centred,
                                 FN(carry) *carry)
{
    const FN(row) row = FN(row_of_call)(call, *to, r);
    FN(dx_row) to_dx = {.dx = (X *)call->dx + r * call->dx_stride, .carry = carry};
    if (carry) {
        to_dx.lane_offset = FN(lane_offset_of)(to_dx.dx);
        to_dx.dy_ahead = FN(ahead)(call->n, call->dy_stride), to_dx.x_ahead = FN(ahead)(call->n, call->x_stride);
    }
    const T *const st = (const T *)call->stats + 3 * r;
    if (st[0] != 0) return FN(backward_row)(&row, st, &to_dx, centred, SHIFTED | LATE_GRADS);
    return FN(backward_row)(&row, st, &to_dx, centred, LATE_GRADS);
}

/* One block of rows: partials [2, n] becomes this block's dgain and dbias. `late`, a constant: LATE_GRADS or 0 */
INLINE void FN(backward_rows)(const cnorm_norm_backward *call, int centred, const int late)
{
    _Alignas(VECTOR_BYTES) T space[PAGE_BYTES / sizeof(T) + 3 * FN(ROW_SPACE)];
    const ptrdiff_t n = call->n;
    const int aligned = ALIGN_LOADS && sizeof(X) == sizeof(T) && n > SHORT_ROW && call->x_stride % VL == 0;
    const ptrdiff_t lane_offset = aligned ? FN(lane_offset_of)(call->x) : 0;
    const ptrdiff_t placed = !late ? lane_offset : call->hints & NT_STORES ? FN(lane_offset_of)(call->dx) : 0;
    const FN(param_grads) to = FN(place_param_grads)(call, placed, space);
    FN(carry) carry = {.to = 0};
    for (ptrdiff_t r = 0; r < call->rows; ++r) {
        const T *const st = (const T *)call->stats + 3 * r;
        int done = FN(rstd_in_range)(st);
        if (done && late) {
            done = FN(late_row)(call, &to, r, centred, call->hints & NT_STORES ? &carry : NULL);
        } else if (done) {
            FN(row) row = FN(row_of_call)(call, to, r);
            row.lane_offset = lane_offset;
            FN(dx_row) to_dx = {.dx = (X *)call->dx + r * call->dx_stride, .lane_offset = lane_offset};
            if (st[0] != 0) done = FN(backward_row)(&row, st, &to_dx, centred, SHIFTED);
            else done = FN(backward_row)(&row, st, &to_dx, centred, 0);
        }
        if (!done) FN(rescue_gradient)(call, to, r, centred, !late);
    }
    if (to.dgain != call->partials) {
        memcpy(call->partials, to.dgain, (size_t)n * sizeof(T));
        memcpy((T *)call->partials + n, to.dbias, (size_t)n * sizeof(T));
    }
    if (call->hints & NT_STORES) FN(finish)(&carry);
}

static NOINLINE void FN(backward_any)(const cnorm_norm_backward *call, int centred)
{
    if (!(call->hints & NT_STORES)) FN(backward_rows)(call, centred, 0);
    else FN(backward_rows)(call, centred, LATE_GRADS);
}

static void FN(layer_norm_backward)(const cnorm_norm_backward *call) { FN(backward_any)(call, 1); }

static void FN(rms_norm_backward)(const cnorm_norm_backward *call) { FN(backward_any)(call, 0); }
