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
 * otherwise they run over `space` elements as over a row, and every run is added to a float64. Each element of y or dx
 * depends only on the inputs at its own place and on its channel's statistics and parameters. */

/* elements that K is computed from: enough for |mean - K| to be small against the deviation */
enum { FN(BATCH_FIRST) = 32 };

/* A volume, and the scratch: arrays [channels], some of them those of the volume, as T */
typedef struct {
    volume v;
    T *K, *delta, *rstd, *gain, *bias, *scale, *G, *H;
    T *block, *block2; /* the sums of 64 rows */
    int any_f64;
    int given; /* inference: delta is 0 */
} FN(batch);

static FN(batch) FN(batch_of)(volume v, void *memory, const T *gain, const T *bias)
{
    const cnorm_batch_arrays a = batch_arrays(memory, sizeof(T), v.channels, v.out);
    void *const *array = a.of_channels;
    FN(batch) b = {v,        array[0], array[1], array[2], array[3], array[4], array[5],
                   array[6], array[7], array[8], array[9], 0,        0};
    b.v.K = b.K, b.v.delta = b.delta, b.v.rstd = b.rstd;
    b.v.gain = TN(param)(gain, 1, v.channels, 0, b.gain);
    b.v.bias = TN(param)(bias, -(T)0, v.channels, 0, b.bias);
    b.v.sum = a.sum, b.v.sum2 = a.sum2;
    b.v.state = memset(a.state, 0, (size_t)v.channels * sizeof *a.state); /* IN_T */
    b.v.stats = memset(a.in_f64, 0, (size_t)v.channels * sizeof *b.v.stats);
    return b;
}

INLINE FN(run) FN(run_of)(const volume *v, ptrdiff_t sample, ptrdiff_t c, const T st[3])
{
    const ptrdiff_t at = c * v->space;
    return (FN(run)){v->space, v->dy ? (const X *)v->dy + sample * v->dy_stride + at : NULL,
                     (const X *)v->x + sample * v->x_stride + at, (X *)v->out + sample * v->out_stride + at, st};
}

#include "batch_columns.inl.h"

/* sum, sum2 = the two sums of every channel: forward those of (1) about K, else those of (5); over the first `length`
 * elements of each run */
static NOINLINE void FN(channel_sums)(const FN(batch) *b, ptrdiff_t length, int backward, const T *K)
{
    const volume *v = &b->v;
    memset(v->sum, 0, 2 * (size_t)v->channels * sizeof *v->sum);
    if (v->space == 1) {
        if (backward) FN(sum_all_columns)(b, 1, K);
        else FN(sum_all_columns)(b, 0, K);
        return;
    }
    for (ptrdiff_t sample = 0; sample < v->samples; ++sample)
        for (ptrdiff_t c = 0; c < v->channels; ++c) {
            const T st[3] = {K[c], backward ? b->delta[c] : 0, backward ? b->rstd[c] : 0};
            FN(run) run = FN(run_of)(v, sample, c, st);
            run.n = length;
            row_sums sums;
            if (backward) FN(run_gradient_sums)(&run, NULL, &sums.a, &sums.b);
            else sums = FN(run_sums)(run.x, length, K[c], 0);
            v->sum[c] += sums.a;
            v->sum2[c] += sums.b;
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

/* (4), or backward (6) */
static void FN(batch_output)(const FN(batch) *b, int backward, int nt_stores)
{
    FN(carry) carried = {.to = 0}, *carry = nt_stores ? &carried : NULL;
    const volume *v = &b->v;
    if (v->space == 1 && b->any_f64) FN(write_f64_columns)(b, backward);
    else if (v->space == 1) FN(write_matrix)(b, backward, carry);
    for (ptrdiff_t i = 0; v->space > 1 && i < v->samples * v->channels; ++i) {
        const ptrdiff_t sample = i / v->channels, c = i % v->channels;
        const T st[3] = {b->K[c], b->delta[c], backward ? b->rstd[c] : b->scale[c]};
        const FN(run) run = FN(run_of)(v, sample, c, st);
        if (v->state[c] != IN_T) {
            const f64_view view = volume_view(v, sample, c);
            f64_write_view(v, &view, c, backward);
        } else if (backward) FN(gradient_run)(&run, b->gain[c], b->G[c], b->H[c], carry);
        else FN(normalise_run)(&run, 1, b->bias[c], carry);
    }
    if (carry) FN(finish)(carry);
}

/* (1) or (2) for channel c with the sums about K; false where it is not accepted; moments [2, channels] or NULL */
static NOINLINE int FN(channel_stats)(const FN(batch) *b, ptrdiff_t c, T K, double eps, double *moments)
{
    const volume *v = &b->v;
    const double N = (double)(v->samples * v->space), S = v->sum[c], Q = v->sum2[c], delta = S / N,
                 var = (Q - S * delta) / N;
    if (!FN(accepted)(N, S * delta, Q - S * delta, Q, eps)) return 0;
    const double rstd = var + eps > 0 ? 1.0 / sqrt(var + eps) : 0;
    b->K[c] = K;
    b->delta[c] = (T)delta;
    b->rstd[c] = (T)rstd;
    b->scale[c] = (T)((double)b->gain[c] * rstd);
    v->state[c] = FN(representable)(K, b->scale[c], (double)b->gain[c], rstd) ? IN_T : IN_F64;
    if (v->state[c] == IN_F64) v->stats[c] = (f64_stats){1, (double)K, delta, rstd, rstd};
    if (moments) {
        moments[c] = (double)K + delta;
        moments[v->channels + c] = var;
    }
    return 1;
}

/* (1): K of every channel, from its first numbers; G is overwritten */
static void FN(batch_initial_shift)(const FN(batch) *b)
{
    const ptrdiff_t channels = b->v.channels, space = b->v.space;
    const ptrdiff_t length = space < FN(BATCH_FIRST) ? space : FN(BATCH_FIRST);
    const ptrdiff_t enough = (FN(BATCH_FIRST) + length - 1) / length;
    FN(batch) first = *b;
    double *const sum = b->v.sum;
    if (first.v.samples > enough) first.v.samples = enough;
    if (space == 1) memcpy(b->G, b->v.x, (size_t)channels * sizeof(T));
    for (ptrdiff_t c = 0; c < channels && space > 1; ++c) b->G[c] = ((const X *)b->v.x)[c * space];
    FN(channel_sums)(&first, length, 0, b->G);
    const double count = (double)(first.v.samples * length);
    for (ptrdiff_t c = 0; c < channels; c += VL_F64)
        store_first_f64(sum + c, channels - c, load_first_f64(sum + c, channels - c) / count);
    TN(add_wide)(channels, sum, b->G);
    TN(narrow_array)(channels, sum, b->K);
}

static void FN(batch_norm)(const cnorm_volume_norm *call)
{
    FN(batch) b = FN(batch_of)(volume_of(DTYPE, call), call->scratch, call->gain, call->bias);
    const volume *v = &b.v;
    const double N = (double)(v->samples * v->space);
    FN(batch_initial_shift)(&b);
    FN(channel_sums)(&b, v->space, 0, b.K);
    memcpy(b.G, b.K, (size_t)v->channels * sizeof(T));
    int again = 0; /* whether any channel is to SUM_AGAIN, (2), about the K in G; STATS_IN_F64 are for (3) */
    for (ptrdiff_t c = 0; c < v->channels; ++c) {
        if (FN(channel_stats)(&b, c, b.K[c], call->eps, call->moments)) continue;
        b.G[c] = (T)((double)b.K[c] + v->sum[c] / N);
        v->state[c] = FN(square_in_range)(N, v->sum2[c], call->eps) ? SUM_AGAIN : STATS_IN_F64;
        again |= v->state[c] == SUM_AGAIN;
    }
    if (again) FN(channel_sums)(&b, v->space, 0, b.G);
    for (ptrdiff_t c = 0; c < v->channels; ++c)
        if (v->state[c] == SUM_AGAIN && !FN(channel_stats)(&b, c, b.G[c], call->eps, call->moments))
            v->state[c] = STATS_IN_F64;
    f64_channels(v, call->eps, call->moments, 0);
    T *stats = call->stats;
    for (ptrdiff_t c = 0; c < v->channels; ++c) {
        b.any_f64 |= v->state[c] != IN_T;
        if (stats) stats[3 * c] = b.K[c], stats[3 * c + 1] = b.delta[c], stats[3 * c + 2] = b.rstd[c];
    }
    FN(batch_output)(&b, 0, call->hints & NT_STORES);
}
