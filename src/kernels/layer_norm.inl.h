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
    FN(CACHED) = CACHED_BYTES / (int)sizeof(T),   /* elements of the longest row that stays in the first cache */
    FN(ROW_SPACE) = FN(CACHED) + 2 * VL,             /* for a row, wherever in a vector it begins */
    FN(PARAM_SPACE) = PAGE_BYTES / (int)sizeof(T) + 2 * FN(ROW_SPACE), /* for two rows, wherever in a page they begin */
};

#include "stage.inl.h"
#include "sink.inl.h"
#include "sweep.inl.h"
#include "row_stats.inl.h"
#include "row_float64.inl.h"

INLINE FN(row) FN(row_of)(const cnorm_norm *call, ptrdiff_t r, const int with_residual, FN(carry) *sum_carry)
{
    FN(row) row = {.x = (const X *)call->x + r * call->x_stride};
    if (with_residual) {
        row.residual = (const X *)call->residual + r * call->residual_stride;
        row.sum = (X *)call->sum + r * call->sum_stride;
        row.sum_carry = sum_carry;
    }
    return row;
}

/* Gain or bias for rows of at most CACHED elements: where there is none, what changes nothing. For a few rows a copy is not
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

/* Both of them, beginning `lane_offset` lanes into a vector, as the rows do, and level with y. RMS norm gets no bias. */
INLINE void FN(place_params)(ptrdiff_t rows, ptrdiff_t n, const void *y, ptrdiff_t lane_offset, const int centred, T room[FN(PARAM_SPACE)],
                       const T **gain, const T **bias)
{
    T *const level = room + offset_matching(room, y) / (ptrdiff_t)sizeof(T) + lane_offset;
    *gain = FN(copied)(rows, n, *gain, 1, level);
    if (centred) *bias = FN(copied)(rows, n, *bias, -(T)0, level + FN(ROW_SPACE));
}

/* Rows short enough to stay in the first cache, with gain and bias, between being summed and being written. The next row
 * is summed before a row is written, or, where that pays, while. The tree of its sums, and after the writing square root and
 * division, thus wait beside other work, each no longer than a processor looks ahead. Of a sum, and of what had to be
 * widened, d is kept. */
INLINE void FN(cached_rows)(const cnorm_norm *call, const int centred, const int with_residual, const int streaming)
{
    const int half = sizeof(X) < sizeof(T), keep = with_residual || half;
    _Alignas(VECTOR_BYTES) T for_rows[FN(PARAM_SPACE)], for_affine[FN(PARAM_SPACE)];
    const ptrdiff_t rows = call->rows, n = call->n;
    const int overlap = streaming || n >= LONG_ROW;
    const int aligned = streaming || (ALIGN_LOADS && !half && n > SHORT_ROW);
    const ptrdiff_t first_lane_offset = aligned ? FN(lane_offset_of)(streaming ? call->y : call->x) : 0;
    T *stats = call->stats, last[3] = {0}, its[3] = {0}; /* K, delta and rstd of the row to write, and of the next */
    int plain = 0, next_plain = 0;
    double square = 1;
    FN(carry) y_carry = {.to = 0}, sum_carry = {.to = 0};
    FN(writer) w = {.n = n, .gain = call->gain, .bias = call->bias, .carry = streaming ? &y_carry : NULL};
    FN(place_params)(rows, n, call->y, first_lane_offset, centred, for_affine, &w.gain, &w.bias);
    /* a row is stored as gain and bias are loaded, vector after vector: loads from the same place in a page would wait */
    T *const room = for_rows + offset_away_from(for_rows, w.gain, w.bias) / (ptrdiff_t)sizeof(T);
    FN(carry) *to_sum = with_residual && streaming ? &sum_carry : NULL;
    w.x_ahead = FN(ahead)(n, call->x_stride), w.residual_ahead = FN(ahead)(n, call->residual_stride);
    ptrdiff_t lane_offset_of_y = 0;
    for (ptrdiff_t next = 0; next <= rows; ++next) {
        const ptrdiff_t r = next - 1; /* the row to write */
        const int writing = next && plain, shifted = !keep && writing && last[0] != 0;
        if (writing && shifted) FN(write_head)(&w, last, lane_offset_of_y, centred, FN(SHIFTED));
        else if (writing) FN(write_head)(&w, last, lane_offset_of_y, centred, keep ? FN(KEPT) : FN(PLAIN));
        X *const y = (X *)call->y + next * call->y_stride;
        const FN(row) row = FN(row_of)(call, next, with_residual, to_sum);
        /* what is streamed must be aligned; else the loads are */
        lane_offset_of_y = aligned ? FN(lane_offset_of)(streaming ? y : row.x) : 0;
        const ptrdiff_t lane_offset = to_sum ? FN(lane_offset_of)(row.sum) : half ? 0 : lane_offset_of_y;
        T *const kept = keep ? room + (next & 1) * FN(ROW_SPACE) + lane_offset : NULL;
        if (next < rows) {
            if (keep && writing && overlap)
                next_plain = FN(row_stats)(&row, n, call->eps, centred, kept, lane_offset, &w, FN(KEPT), its, &square);
            else if (shifted && overlap)
                next_plain = FN(row_stats)(&row, n, call->eps, centred, kept, lane_offset, &w, FN(SHIFTED), its, &square);
            else if (!keep && writing && overlap)
                next_plain = FN(row_stats)(&row, n, call->eps, centred, kept, lane_offset, &w, FN(PLAIN), its, &square);
            else
                next_plain = FN(row_stats)(&row, n, call->eps, centred, kept, lane_offset, NULL, FN(PLAIN), its, &square);
        }
        if (writing && shifted) {
            FN(write_rest)(&w, centred, FN(SHIFTED), 1);
        } else if (writing) {
            FN(write_rest)(&w, centred, keep ? FN(KEPT) : FN(PLAIN), 1);
        } else if (next) {
            const FN(row) again = FN(row_of)(call, r, with_residual, to_sum);
            T wide[3];
            FN(f64_norm_row)(FN(stored_row)(&again), n, call->gain, call->bias, call->eps, centred, w.y, wide);
            for (int i = 0; i < 3; ++i) last[i] = wide[i];
        }
        its[2] = FN(rstd_of)(square); /* not yet that of a row left to f64_norm_row */
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
        FN(flush)(&y_carry);
        FN(flush)(&sum_carry);
        stream_fence();
    }
}

/* Rows that are read twice: long ones, and those whose output is streamed and for which look-ahead would not pay */
INLINE void FN(two_pass_rows)(const cnorm_norm *call, const int centred, const int with_residual)
{
    FN(carry) carry = {.to = 0};
    FN(writer) w = {.n = call->n, .gain = call->gain, .bias = call->bias, .carry = call->streaming ? &carry : NULL};
    _Alignas(VECTOR_BYTES) T for_affine[FN(PARAM_SPACE)];
    if (call->n <= FN(CACHED))
        FN(place_params)(call->rows, call->n, call->y, FN(lane_offset_of)(call->y), centred, for_affine, &w.gain, &w.bias);
    for (ptrdiff_t r = 0; r < call->rows; ++r) {
        T stats[3];
        double square;
        const FN(row) row = FN(row_of)(call, r, with_residual, NULL);
        w.x = with_residual ? row.sum : row.x;
        w.y = (X *)call->y + r * call->y_stride;
        const ptrdiff_t lane_offset = ALIGN_LOADS && !with_residual ? FN(lane_offset_of)(w.x) : 0;
        if (FN(row_stats)(&row, call->n, call->eps, centred, NULL, lane_offset, NULL, FN(PLAIN), stats, &square)) {
            stats[2] = FN(rstd_of)(square);
            FN(write_head)(&w, stats, w.carry ? FN(lane_offset_of)(w.y) : lane_offset, centred, FN(SHIFTED));
            FN(write_rest)(&w, centred, FN(SHIFTED), 0);
        } else {
            FN(f64_norm_row)(w.x, call->n, call->gain, call->bias, call->eps, centred, w.y, stats);
        }
        if (call->stats) memcpy((T *)call->stats + 3 * r, stats, sizeof stats);
    }
    if (w.carry) {
        FN(flush)(&carry);
        stream_fence();
    }
}

INLINE void FN(norm_rows)(const cnorm_norm *call, const int centred, const int with_residual)
{
    const int kept = with_residual || sizeof(X) < sizeof(T);
    if (call->n <= FN(CACHED) && !call->streaming) FN(cached_rows)(call, centred, with_residual, 0);
    else if (call->n <= FN(CACHED) && kept) FN(cached_rows)(call, centred, with_residual, 1);
    else FN(two_pass_rows)(call, centred, with_residual);
}

static void FN(layer_norm)(const cnorm_norm *call) { FN(norm_rows)(call, 1, 0); }
static void FN(add_layer_norm)(const cnorm_norm *call) { FN(norm_rows)(call, 1, 1); }
static void FN(rms_norm)(const cnorm_norm *call) { FN(norm_rows)(call, 0, 0); }
