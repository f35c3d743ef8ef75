/* Batch normalisation of x [samples, channels, space] (Ioffe, Szegedy 2015, arXiv:1502.03167): each channel over all
 * samples and space, N = samples * space numbers.
 *
 * Forward
 *   (1) K = a channel's first number plus the mean difference of the next few from it, rounded; one sweep of
 *       d = x - K: S = sum d, Q = sum d^2, delta = S/N; accepted as in layer_norm.inl.h (1).
 *   (2) If a channel fails, one more sweep whose K is K + delta, rounded; its result is used for failed channels only.
 *   (3) A channel that fails again, or whose Q is out of range, is done in float64: batch_float64.inl.h.
 *   (4) y = ((x - K) - delta) scale + bias, scale = gain/sqrt(var + eps) rounded once
 * Inference, batch_norm_inference.inl.h, is (4) with K = the given mean and no delta.
 * Backward, with xhat = ((x - K) - delta) rstd: batch_norm_backward.inl.h
 *   (5) one sweep: A = sum dy, B = sum dy xhat;  dbias = A, dgain = B
 *   (6) dx = rstd ((dy gain - gain A/N) - xhat gain B/N)
 *
 * With space = 1 the sums run down the columns, each in a lane of its own, and every 64 rows are added to a float64;
 * otherwise they run over `space` elements as over a row, and every run is added to a float64.
 * Each element of y or dx depends only on the inputs at its own place and on its channel's
 * statistics and parameters.
 */

/* elements that K is computed from: enough for |mean - K| to be small against the deviation */
enum { FN(BATCH_FIRST) = 32 };

/* A volume that is read and written; dy: backward only */
typedef struct {
    ptrdiff_t samples, channels, space;
    const X *dy, *x;
    ptrdiff_t dy_stride, x_stride;
    X *out;
    ptrdiff_t out_stride;
} FN(volume);

/* The scratch: arrays [channels]. A channel that is out of T's range is done in float64: its f64.scale is
 * not DONE_IN_T. */
typedef struct {
    double *sum, *sum2; /* S and Q, or A and B */
    f64_stats *f64;
    T *K, *delta, *rstd, *gain, *bias, *scale, *G, *H;
    T *block, *block2; /* the sums of 64 rows */
    int any_f64;
    int given; /* inference: delta is 0 */
} FN(batch);

static FN(batch) FN(batch_of)(void *memory, const FN(volume) *v, const T *gain, const T *bias)
{
    const cnorm_batch_arrays a = batch_arrays(memory, sizeof(T), v->channels, v->out);
    T *const *array = (T *const *)a.of_channels;
    const FN(batch) b = {.sum = a.sum,
                         .sum2 = a.sum2,
                         .f64 = a.in_f64,
                         .K = array[0],
                         .delta = array[1],
                         .rstd = array[2],
                         .gain = array[3],
                         .bias = array[4],
                         .scale = array[5],
                         .G = array[6],
                         .H = array[7],
                         .block = array[8],
                         .block2 = array[9]};
    (void)TN(param)(gain, 1, v->channels, 0, b.gain);
    (void)TN(param)(bias, -(T)0, v->channels, 0, b.bias);
    for (ptrdiff_t c = 0; c < v->channels; ++c) b.f64[c].scale = DONE_IN_T;
    return b;
}

/* volume and scratch as batch_float64.inl.h takes them */
static f64_batch FN(in_f64)(const FN(volume) *v, const FN(batch) *b)
{
    return (f64_batch){DTYPE,        v->samples,  v->channels, v->space,      v->dy,   v->x,
                       v->dy_stride, v->x_stride, v->out,      v->out_stride, b->gain, b->bias,
                       b->K,         b->delta,    b->rstd,     b->f64,        b->sum,  b->sum2};
}

#include "batch_columns.inl.h"

/* sum, sum2 = the two sums of every channel: forward those of (1) about K, else those of (5); over the first `length`
 * elements of each run */
static NOINLINE void FN(channel_sums)(const FN(volume) *v, ptrdiff_t length, int backward, const T *K,
                                      const FN(batch) *b)
{
    memset(b->sum, 0, 2 * (size_t)v->channels * sizeof(double));
    if (v->space == 1) {
        if (backward) FN(sum_all_columns)(v, 1, K, b);
        else FN(sum_all_columns)(v, 0, K, b);
        return;
    }
    for (ptrdiff_t sample = 0; sample < v->samples; ++sample)
        for (ptrdiff_t c = 0; c < v->channels; ++c) {
            const X *x = v->x + sample * v->x_stride + c * v->space;
            row_sums sums;
            if (backward) {
                const T st[3] = {K[c], b->delta[c], b->rstd[c]};
                const FN(run) run = {length, v->dy + sample * v->dy_stride + c * v->space, x, NULL, st};
                FN(run_gradient_sums)(&run, NULL, &sums.a, &sums.b);
            } else {
                sums = FN(run_sums)(x, length, K[c], 0);
            }
            b->sum[c] += sums.a;
            b->sum2[c] += sums.b;
        }
}

/* Whether (4) can be computed in T with scale, the rounded product gain rstd: |x - K| and its
 * product with scale then leave the range of T only where y does, or would without the bias. False
 * for NaN, and where scale underflowed to 0. */
INLINE int FN(representable)(T K, T scale, double gain, double rstd)
{
    const T size = scale < 0 ? -scale : scale, centre = K < 0 ? -K : K;
    return centre <= RSTD_MAX * RSTD_MAX && (gain == 0 || rstd == 0 || (size >= RSTD_MIN && size <= RSTD_MAX));
}

/* (4) */
static void FN(batch_output)(const FN(volume) *v, const FN(batch) *b, int streaming)
{
    FN(carry) carried = {.to = 0}, *carry = streaming ? &carried : NULL;
    const f64_batch in_f64 = FN(in_f64)(v, b);
    if (v->space == 1 && b->any_f64) FN(write_f64_columns)(v, 0, b);
    else if (v->space == 1) FN(write_matrix)(v, 0, b, carry);
    for (ptrdiff_t i = 0; v->space > 1 && i < v->samples * v->channels; ++i) {
        const ptrdiff_t sample = i / v->channels, c = i % v->channels, at = c * v->space;
        const T st[3] = {b->K[c], b->delta[c], b->scale[c]};
        const FN(run) run = {v->space, NULL, v->x + sample * v->x_stride + at, v->out + sample * v->out_stride + at,
                             st};
        if (b->f64[c].scale == DONE_IN_T) FN(normalise_run)(&run, 1, b->bias[c], carry);
        else f64_write_run(&in_f64, sample, c, 0);
    }
    if (carry) {
        FN(flush)(carry);
        nt_fence();
    }
}

/* (1) or (2) for channel c with the sums about K; false where it is not accepted; moments [2, channels] or NULL */
static NOINLINE int FN(channel_stats)(const FN(volume) *v, ptrdiff_t c, T K, double eps, const FN(batch) *b,
                                      double *moments)
{
    const double N = (double)(v->samples * v->space), S = b->sum[c], Q = b->sum2[c], delta = S / N,
                 var = (Q - S * delta) / N;
    if (!FN(accepted)(N, S * delta, Q - S * delta, Q, eps)) return 0;
    const double rstd = var + eps > 0 ? 1.0 / sqrt(var + eps) : 0;
    b->K[c] = K;
    b->delta[c] = (T)delta;
    b->rstd[c] = (T)rstd;
    b->scale[c] = (T)((double)b->gain[c] * rstd);
    b->f64[c] = (f64_stats){.scale = FN(representable)(K, b->scale[c], (double)b->gain[c], rstd) ? DONE_IN_T : 1,
                            .origin = (double)K,
                            .delta = delta,
                            .rstd = rstd,
                            .inv_std_dev = rstd};
    if (moments) {
        moments[c] = (double)K + delta;
        moments[v->channels + c] = var;
    }
    return 1;
}

/* (1): K of every channel, from its first numbers; b->G is overwritten */
static void FN(batch_initial_shift)(const FN(volume) *v, const FN(batch) *b)
{
    const ptrdiff_t length = v->space < FN(BATCH_FIRST) ? v->space : FN(BATCH_FIRST);
    const ptrdiff_t enough = (FN(BATCH_FIRST) + length - 1) / length;
    FN(volume) first = *v;
    if (first.samples > enough) first.samples = enough;
    if (v->space == 1) memcpy(b->G, v->x, (size_t)v->channels * sizeof(T));
    for (ptrdiff_t c = 0; c < v->channels && v->space > 1; ++c) b->G[c] = v->x[c * v->space];
    FN(channel_sums)(&first, length, 0, b->G, b);
    const double count = (double)(first.samples * length);
    for (ptrdiff_t c = 0; c < v->channels; c += VL_F64)
        store_first_f64(b->sum + c, v->channels - c, load_first_f64(b->sum + c, v->channels - c) / count);
    TN(add_wide)(v->channels, b->sum, b->G);
    TN(narrow_array)(v->channels, b->sum, b->K);
}

static void FN(batch_norm)(const cnorm_volume_norm *call)
{
    const ptrdiff_t channels = call->channels;
    const FN(volume) v = {call->samples,
                          channels,
                          call->space,
                          .x = call->x,
                          .x_stride = call->x_stride,
                          .out = call->y,
                          .out_stride = call->y_stride};
    FN(batch) b = FN(batch_of)(call->scratch, &v, call->gain, call->bias);
    FN(batch_initial_shift)(&v, &b);

    int again = 0; /* whether any channel is to SUM_AGAIN, (2), about the K in G; STATS_IN_F64 are for (3) */
    FN(channel_sums)(&v, v.space, 0, b.K, &b);
    memcpy(b.G, b.K, (size_t)channels * sizeof(T));
    for (ptrdiff_t c = 0; c < channels; ++c) {
        if (FN(channel_stats)(&v, c, b.K[c], call->eps, &b, call->moments)) continue;
        b.G[c] = (T)((double)b.K[c] + b.sum[c] / (double)(v.samples * v.space));
        const int in_range = FN(square_in_range)((double)(v.samples * v.space), b.sum2[c], call->eps);
        b.f64[c].scale = in_range ? SUM_AGAIN : STATS_IN_F64;
        again |= in_range;
    }
    if (again) {
        FN(channel_sums)(&v, v.space, 0, b.G, &b);
        for (ptrdiff_t c = 0; c < channels; ++c)
            if (b.f64[c].scale == SUM_AGAIN && !FN(channel_stats)(&v, c, b.G[c], call->eps, &b, call->moments))
                b.f64[c].scale = STATS_IN_F64;
    }
    const f64_batch in_f64 = FN(in_f64)(&v, &b);
    f64_channels(&in_f64, call->eps, call->moments, 0);
    T *stats = call->stats;
    for (ptrdiff_t c = 0; c < channels; ++c) {
        b.any_f64 |= b.f64[c].scale != DONE_IN_T;
        if (stats) stats[3 * c] = b.K[c], stats[3 * c + 1] = b.delta[c], stats[3 * c + 2] = b.rstd[c];
    }
    FN(batch_output)(&v, &b, call->hints & STREAMING);
}
