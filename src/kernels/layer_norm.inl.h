/* Layer and RMS normalisation of rows.
 *     layer norm   Ba, Kiros, Hinton 2016, arXiv:1607.06450, Eq. 3
 *     RMS norm     Zhang, Sennrich 2019, arXiv:1910.07467, Eq. 4: the same with the mean taken as 0
 *
 * A row is x [n], or with a residual the sum x + residual rounded to the storage type X, which is an output too.
 *   (1) one sweep (sweep.inl.h): S = sum d, Q = sum d^2 of d = x - K; delta = S/n. K = 0, or, where the first LANES
 *       elements have one sign, their mean rounded. Accepted if S delta <= Q - S delta = m2, that is
 *       (mean - K)^2 <= var, and Q can neither have overflowed nor lost bits to subnormals (row_stats.inl.h).
 *   (2) if the mean test fails, a second sweep whose K is K + delta, rounded. A row whose Q is out of range goes to (3)
 *       at once.
 *   (3) if still not accepted, the row in float64, scaled by a power of two (row_float64.inl.h).
 *   var = m2/n,  rstd = 1/sqrt(var + eps), or 0 where var + eps = 0
 *   (4) y = (d - delta) rstd gain + bias (sink.inl.h)
 * The mean stays the unevaluated pair K + delta: rounding it to one T would be the largest error of this computation.
 * RMS norm takes K = delta = 0 and var = Q/n; only the range of Q can send it to (3). */

/* Places gain and bias for rows of at most CACHED elements: copies at the page offset of y and at the lane offset of
 * the first row, so that loads from them don't alias the stores to y (4K aliasing) and are aligned for all rows of that
 * lane offset. Fewer than 8 rows use the caller's arrays, except half types. RMS norm has no bias. */
INLINE void FN(place_params)(const cnorm_norm *call, ptrdiff_t lane_offset, const int mode, T space[FN(TWO_ROWS)],
                             FN(writer) *w)
{
    T *const at = space + offset_matching(space, call->y) / (ptrdiff_t)sizeof(T) + lane_offset;
    const int half = sizeof(X) < sizeof(T), few = call->rows < 8 && !half;
    w->gain = call->gain && few ? call->gain : TN(param)(call->gain, 1, call->n, half, at);
    if (mode & CENTRED)
        w->bias = call->bias && few ? call->bias : TN(param)(call->bias, -(T)0, call->n, half, at + FN(ROW_SPACE));
}

INLINE FN(row) FN(row_of)(const cnorm_norm *call, ptrdiff_t r, const int mode)
{
    FN(row) row = {.n = call->n, .x = (const X *)call->x + r * call->x_stride};
    if (mode & SUM) {
        row.residual = (const X *)call->residual + r * call->residual_stride;
        row.sum = (X *)call->sum + r * call->sum_stride;
    }
    return row;
}

INLINE void FN(save_stats)(const cnorm_norm *call, ptrdiff_t r, const T st[3])
{
    for (int i = 0; i < 3 && call->stats; ++i) ((T *)call->stats)[3 * r + i] = st[i];
}

/* (3) and (4) for row r, whose statistics the guard refused. First stores the end of its sum, which may still be
 * in sum_carry. */
RARE void FN(rescue_row)(const cnorm_norm *call, ptrdiff_t r, int centred, FN(carry) *sum_carry)
{
    if (sum_carry) FN(flush)(sum_carry);
    const X *const x =
        call->sum ? (const X *)call->sum + r * call->sum_stride : (const X *)call->x + r * call->x_stride;
    T st[3];
    channel_group row = {DTYPE, call->n, 1, .x = x, .gain = call->gain, .out = (X *)call->y + r * call->y_stride};
    if (centred) row.bias = call->bias;
    f64_group_norm(row, call->eps, centred, st);
    FN(save_stats)(call, r, st);
}

/* Whether the sweep over a row writes the row before between its additions. Not with 16-byte vectors, which sum a block
 * in two passes; nor sums with a residual, unless they are kept: 1.3 to 2 times as long on Emerald Rapids, 1.0 times on
 * Zen 3. A float32 layer norm with the 16 registers of AVX2 where IN_SWEEP: 1.1 to 1.4 times as long on Emerald
 * Rapids, 0.95 times on Zen 3 (2026-11-25). */
INLINE int FN(in_sweep)(const cnorm_norm *call, const int mode)
{
    const int few_registers = VECTOR_BYTES == 32 && mode & CENTRED && sizeof(T) == sizeof(float);
    if (PASS < LANE_VECTORS || (mode & SUM && !(mode & KEPT))) return 0;
    return mode & KEPT || (call->n >= LONG_ROW && (!few_registers || call->hints & IN_SWEEP));
}

/* Software pipelining of rows of at most CACHED elements, which stay in L1 from their sums to their output: iteration r
 * sums row r and writes row r - 1, of which `previous` has the statistics and w the pointers. docs/kernels.md goes
 * through it. The last iteration forms pointers to a row beyond the end, which it does not use: to limit r costs 2 to
 * 4 % (Zen 4, 2026-11-23). */
INLINE void FN(cached_rows)(const cnorm_norm *call, const int mode)
{
    enum { HALF = sizeof(X) < sizeof(T) };
    _Alignas(VECTOR_BYTES) T row_space[FN(TWO_ROWS)], param_space[FN(TWO_ROWS)];
    const int nt_stores = mode & NT_STORES, aligned = ALIGN_LOADS && !HALF && !(mode & SUM) && call->n > SHORT_ROW;
    const int in_sweep = FN(in_sweep)(call, mode);
    FN(carry) carry = {.to = 0}, sum_carry = {.to = 0};
    FN(writer) w = FN(writer_of)(call, nt_stores ? &carry : NULL);
    FN(place_params)(call, FN(offset_of_vectors)(call->x, call->y, aligned, mode), mode, param_space, &w);
    /* against 4K aliasing with gain and bias, which are loaded while the kept row is stored */
    T *const space = row_space + offset_away_from(row_space, w.gain, w.bias) / (ptrdiff_t)sizeof(T);
    /* of rows r - 1 and r; not accepted: refused, or where r = 0 no row yet, which is neither written nor rescued */
    FN(stats) previous = {.accepted = 0}, current = previous;
    for (ptrdiff_t r = 0; r <= call->rows; ++r) {
        X *const y = (X *)call->y + r * call->y_stride;
        FN(row) row = FN(row_of)(call, r, mode);
        if (row.n > FN(CACHED)) __builtin_unreachable(); /* so sweep's outer loop runs once */
        const ptrdiff_t offset = FN(offset_of_vectors)(row.x, y, aligned, mode);
        row.lane_offset = !nt_stores ? offset : mode & SUM ? FN(lane_offset_of)(row.sum) : 0;
        row.carry = nt_stores ? &sum_carry : NULL;
        row.kept = space + (r & 1) * FN(ROW_SPACE) + row.lane_offset;
        const int writing = previous.accepted;
        if (writing) FN(begin_row)(&w, previous.st, mode);
        w.stop = writing ? w.end : w.at;
        if (r < call->rows && in_sweep) current = FN(stats_of)(&row, call->eps, mode, &w);
        else if (r < call->rows) current = FN(stats_of)(&row, call->eps, mode, NULL);
        if (writing) FN(write_rest)(&w, mode), FN(save_stats)(call, r - 1, previous.st);
        else if (r) FN(rescue_row)(call, r - 1, mode & CENTRED, row.carry);
        current.st[2] = FN(rstd_of)(current.var_eps);
        previous = current;
        w.d = row.kept, w.x = mode & SUM && !(mode & KEPT) ? row.sum : row.x, w.y = y, w.lane_offset = offset;
        w.residual = nt_stores ? row.residual : NULL;
    }
    FN(flush)(&sum_carry);
    if (nt_stores) FN(finish)(&carry);
}

/* (4) for row x with statistics st; n, gain, bias and carry are those of `call`. RMS norm has K = delta = 0 and no
 * bias, which changes no bit. The arguments that differ from row to row are passed in registers: see run_sums. */
static NOINLINE void FN(write_whole_row)(const FN(writer) *call, const X *x, X *y, ptrdiff_t lane_offset, const T st[3])
{
    FN(writer) w = *call;
    w.x = x, w.y = y, w.lane_offset = lane_offset;
    FN(begin_row)(&w, st, CENTRED);
    FN(write_rest)(&w, CENTRED);
}

/* Rows longer than CACHED, and rows of float32 and float64 without a residual where y takes non-temporal stores: a row
 * is read once for its statistics and once more for its output. */
INLINE void FN(rows_read_twice)(const cnorm_norm *call, const int mode)
{
    _Alignas(VECTOR_BYTES) T param_space[FN(TWO_ROWS)];
    FN(carry) carry = {.to = 0};
    FN(writer) w = FN(writer_of)(call, call->hints & NT_STORES ? &carry : NULL);
    if (call->n <= FN(CACHED)) FN(place_params)(call, FN(lane_offset_of)(call->y), CENTRED, param_space, &w);
    V ones[UNROLL], zeros[UNROLL]; /* in place of a NULL gain or bias: see gain_mask */
    for (int i = 0; i < UNROLL; ++i) ones[i] = TN(splat)(1), zeros[i] = TN(splat)(-(T)0);
    w.gain_mask = w.gain ? -1 : 0, w.bias_mask = w.bias ? -1 : 0;
    if (!w.gain) w.gain = (const T *)ones;
    if (!w.bias) w.bias = (const T *)zeros;
    for (ptrdiff_t r = 0; r < call->rows; ++r) {
        FN(row) row = FN(row_of)(call, r, mode);
        row.lane_offset = ALIGN_LOADS && !(mode & SUM) ? FN(lane_offset_of)(row.x) : 0;
        const FN(stats) stats = FN(stats_of)(&row, call->eps, mode, NULL);
        const T st[3] = {stats.st[0], stats.st[1], FN(rstd_of)(stats.var_eps)};
        X *const y = (X *)call->y + r * call->y_stride;
        const ptrdiff_t offset = w.carry ? FN(lane_offset_of)(y) : row.lane_offset;
        if (!stats.accepted) {
            FN(rescue_row)(call, r, mode & CENTRED, NULL);
            continue;
        }
        FN(write_whole_row)(&w, mode & SUM ? row.sum : row.x, y, offset, st);
        FN(save_stats)(call, r, st);
    }
    if (w.carry) FN(finish)(&carry);
}

/* The loop for a call. Rows are kept where that saves a second reading: half types, which are widened once, and sums
 * that are written by non-temporal stores. */
INLINE void FN(norm_rows)(const cnorm_norm *call, const int mode)
{
    const int half = sizeof(X) < sizeof(T);
    if (call->n > FN(CACHED) || (call->hints & NT_STORES && !half && !(mode & SUM))) FN(rows_read_twice)(call, mode);
    else if (call->hints & NT_STORES) FN(cached_rows)(call, mode | KEPT | PARAMS | NT_STORES);
    else FN(cached_rows)(call, mode | PARAMS | (half ? KEPT : 0));
}

static void FN(layer_norm)(const cnorm_norm *call) { FN(norm_rows)(call, CENTRED); }
static void FN(add_layer_norm)(const cnorm_norm *call) { FN(norm_rows)(call, CENTRED | SUM); }
static void FN(rms_norm)(const cnorm_norm *call) { FN(norm_rows)(call, 0); }
