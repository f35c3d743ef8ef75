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
 * RMS norm takes K = delta = 0 and var = Q/n; only the range of Q can send it to (3).
 *
 * Included once per storage type X with its compute type T. `centred`: 1 layer norm, 0 RMS norm.
 */

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
    if (mode & SUM && call->sum) {
        row.residual = (const X *)call->residual + r * call->residual_stride;
        row.sum = (X *)call->sum + r * call->sum_stride;
    }
    return row;
}

/* (3) and (4) for row r, whose statistics the guard refused. First stores the end of its sum, which may still be
 * in sum_carry. */
RARE void FN(rescue_row)(const cnorm_norm *call, ptrdiff_t r, int centred, FN(carry) *sum_carry, T st[3])
{
    if (sum_carry) FN(flush)(sum_carry);
    const X *const x =
        call->sum ? (const X *)call->sum + r * call->sum_stride : (const X *)call->x + r * call->x_stride;
    f64_norm_row(DTYPE, x, call, centred, (X *)call->y + r * call->y_stride, st);
}

/* the same; statistics are returned by value, so that the caller's stay in registers. With rescue_row returning them
 * float16 takes 3 % longer (AVX2, Zen 4, 2026-11-24). */
INLINE FN(stats) FN(rescued)(const cnorm_norm *call, ptrdiff_t r, int centred, FN(carry) *sum_carry)
{
    T st[3] = {0};
    FN(rescue_row)(call, r, centred, sum_carry, st);
    return (FN(stats)){.st = {st[0], st[1], st[2]}};
}

/* (4) for row x with statistics st; n, gain, bias and carry are those of `call`. RMS norm has K = delta = 0 and no
 * bias, which changes no bit. The arguments that differ from row to row are passed in registers: see run_sums. */
static NOINLINE void FN(write_whole_row)(const FN(writer) *call, const X *x, X *y, ptrdiff_t lane_offset, const T st[3])
{
    FN(writer) w = *call;
    w.x = x, w.y = y, w.lane_offset = lane_offset;
    FN(begin_row)(&w, st, CENTRED | SHIFTED);
    FN(write_rest)(&w, CENTRED | SHIFTED);
}

/* Rows of at most CACHED elements stay in L1 from their sums to their output. Software pipelining: iteration r sums row
 * r and writes row r - 1, of which `previous` has the statistics, w the pointers, and the other half of row_space d.
 * The sweep over row r writes whole vectors of row r - 1, if that has at least LONG_ROW elements or y takes
 * non-temporal stores. write_rest writes the rest: it follows stats_of in program order and does not depend on row r,
 * so out-of-order execution overlaps it with the halving tree of row r. The square root and division of row r overlap
 * with the sums of row r + 1 in the same way.
 *
 * Rows of float32 and float64 of fewer than LONG_ROW elements, with ordinary stores, have a sweep without the writer:
 * float32 32x256 takes 9 % less time (Zen 4, AVX-512, 2026-11-24). SHIFTED in the mode of stats_of tells the writer to
 * subtract K from row r - 1: never for kept rows, always in float64, else where K != 0. The last iteration forms
 * pointers to a row beyond the end, which it does not use: to limit r costs 2 to 4 % (Zen 4, 2026-11-23). */
INLINE void FN(cached_rows)(const cnorm_norm *call, int centred, const int nontemporal, const int mode)
{
    enum { HALF = sizeof(X) < sizeof(T) };
    _Alignas(VECTOR_BYTES) T row_space[FN(TWO_ROWS)], param_space[FN(TWO_ROWS)];
    const int aligned = nontemporal || (ALIGN_LOADS && !HALF && call->n > SHORT_ROW);
    FN(carry) carry = {.to = 0}, sum_carry = {.to = 0};
    FN(writer) w = {.n = call->n,
                    .carry = nontemporal ? &carry : NULL,
                    .x_ahead = FN(ahead)(call->n, call->x_stride),
                    .residual_ahead = FN(ahead)(call->n, call->residual_stride)};
    FN(place_params)(call, aligned ? FN(lane_offset_of)(nontemporal ? call->y : call->x) : 0, mode, param_space, &w);
    /* against 4K aliasing with gain and bias, which are loaded while the kept row is stored */
    T *const space = row_space + offset_away_from(row_space, w.gain, w.bias) / (ptrdiff_t)sizeof(T);
    /* of rows r - 1 and r; not accepted: refused, or where r = 0 no row yet, which is neither written nor rescued */
    FN(stats) previous = {.accepted = 0}, current = previous;
    for (ptrdiff_t r = 0; r <= call->rows; ++r) {
        const int writing = previous.accepted;
        const int previous_shifted = !(mode & KEPT) && (TN(ALL_SHIFTED) || previous.st[0] != 0);
        if (writing && previous_shifted) FN(begin_row)(&w, previous.st, mode | SHIFTED);
        else if (writing) FN(begin_row)(&w, previous.st, mode);
        w.stop = writing && (nontemporal || call->n >= LONG_ROW) ? w.end : w.at;
        X *const y = (X *)call->y + r * call->y_stride;
        FN(row) row = FN(row_of)(call, r, mode);
        if (row.n > FN(CACHED)) __builtin_unreachable(); /* so sweep's outer loop runs once */
        const ptrdiff_t write_offset = aligned ? FN(lane_offset_of)(nontemporal ? y : row.x) : 0;
        row.carry = nontemporal ? &sum_carry : NULL;
        row.lane_offset = nontemporal && row.sum ? FN(lane_offset_of)(row.sum) : HALF ? 0 : write_offset;
        row.kept = space + (r & 1) * FN(ROW_SPACE) + row.lane_offset;
        if (r < call->rows && !HALF && !nontemporal && call->n < LONG_ROW)
            current = FN(stats_of)(&row, call->eps, centred, mode, NULL);
        else if (r < call->rows && previous_shifted)
            current = FN(stats_of)(&row, call->eps, centred, mode | SHIFTED, &w);
        else if (r < call->rows && HALF && !row.sum) current = FN(stats_of)(&row, call->eps, centred, mode & ~SUM, &w);
        else if (r < call->rows) current = FN(stats_of)(&row, call->eps, centred, mode, &w);
        if (writing && previous_shifted) FN(write_rest)(&w, mode | SHIFTED);
        else if (writing) FN(write_rest)(&w, mode);
        else if (r) previous = FN(rescued)(call, r - 1, centred, row.carry);
        current.st[2] = FN(rstd_of)(current.var_eps);
        for (int i = 0; i < 3 && call->stats && r; ++i) ((T *)call->stats)[3 * r - 3 + i] = previous.st[i];
        previous = current;
        w.d = row.kept, w.x = row.x, w.residual = nontemporal ? row.residual : NULL, w.y = y,
        w.lane_offset = write_offset;
    }
    if (!nontemporal) return;
    FN(flush)(&sum_carry);
    FN(finish)(&carry);
}

/* The rows that cached_rows does not take (in_two_passes): longer ones, all with 16-byte vectors, those of float64 with
 * a residual, and those of float32 and float64 without one whose y takes non-temporal stores. A row is read once for
 * its statistics and once more for its output. */
static NOINLINE void FN(two_pass_rows)(const cnorm_norm *call, int centred)
{
    enum { HALF = sizeof(X) < sizeof(T) };
    _Alignas(VECTOR_BYTES) T param_space[FN(TWO_ROWS)];
    FN(carry) carry = {.to = 0};
    FN(writer) w = {.n = call->n, .gain = call->gain, .bias = call->bias, .carry = call->streaming ? &carry : NULL};
    if (call->n <= FN(CACHED)) FN(place_params)(call, FN(lane_offset_of)(call->y), CENTRED, param_space, &w);
    V ones[GROUP], zeros[GROUP]; /* in place of a NULL gain or bias: see gain_mask */
    for (int i = 0; i < GROUP; ++i) ones[i] = TN(splat)(1), zeros[i] = TN(splat)(-(T)0);
    w.gain_mask = w.gain ? -1 : 0, w.bias_mask = w.bias ? -1 : 0;
    if (!w.gain) w.gain = (const T *)ones;
    if (!w.bias) w.bias = (const T *)zeros;
    for (ptrdiff_t r = 0; r < call->rows; ++r) {
        FN(row) row = FN(row_of)(call, r, SUM);
        row.lane_offset = ALIGN_LOADS && !row.sum ? FN(lane_offset_of)(row.x) : 0;
        FN(stats) stats;
        if (row.sum) stats = FN(stats_of)(&row, call->eps, 1, CENTRED | SUM, NULL);
        else stats = FN(stats_of)(&row, call->eps, centred, CENTRED, NULL);
        T st[3] = {stats.st[0], stats.st[1], FN(rstd_of)(stats.var_eps)};
        X *const y = (X *)call->y + r * call->y_stride;
        if (stats.accepted)
            FN(write_whole_row)(&w, row.sum ? row.sum : row.x, y, w.carry ? FN(lane_offset_of)(y) : row.lane_offset,
                                st);
        else FN(rescue_row)(call, r, centred, NULL, st);
        for (int i = 0; i < 3 && call->stats; ++i) ((T *)call->stats)[3 * r + i] = st[i];
    }
    if (w.carry) FN(finish)(&carry);
}

/* layer norm of at most CACHED elements: of sums with a residual, and of half types */
static NOINLINE void FN(kept_rows)(const cnorm_norm *call)
{
    if (call->streaming) FN(cached_rows)(call, 1, 1, CENTRED | KEPT | SUM | PARAMS);
    else FN(cached_rows)(call, 1, 0, CENTRED | KEPT | SUM | PARAMS);
}

/* Whether two_pass_rows, which is half the code (CACHED_ROWS), takes the call. Non-temporal stores of kept rows go to
 * cached_rows, which reads each row once. */
INLINE int FN(in_two_passes)(const cnorm_norm *call, int kept)
{
    return !CACHED_ROWS || call->n > FN(CACHED) || (kept ? !TN(KEPT_ROWS) : call->streaming);
}

static void FN(layer_norm)(const cnorm_norm *call)
{
    const int half = sizeof(X) < sizeof(T);
    if (FN(in_two_passes)(call, half)) FN(two_pass_rows)(call, 1);
    else if (half) FN(kept_rows)(call);
    else FN(cached_rows)(call, 1, 0, CENTRED | PARAMS);
}

static void FN(add_layer_norm)(const cnorm_norm *call)
{
    if (FN(in_two_passes)(call, 1)) FN(two_pass_rows)(call, 1);
    else FN(kept_rows)(call);
}

static void FN(rms_norm)(const cnorm_norm *call)
{
    const int half = sizeof(X) < sizeof(T);
    if (FN(in_two_passes)(call, half)) FN(two_pass_rows)(call, 0);
    else if (half && call->streaming) FN(cached_rows)(call, 0, 1, KEPT | PARAMS);
    else if (half) FN(cached_rows)(call, 0, 0, KEPT | PARAMS);
    else FN(cached_rows)(call, 0, 0, PARAMS);
}
