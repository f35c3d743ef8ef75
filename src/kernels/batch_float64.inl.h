/* Channels of batch_norm.inl.h that are done in float64: those whose scale is not DONE_IN_T. In a matrix (space = 1)
 * LANES_F64 channels are read at a time, one in each lane; otherwise each run of `space` elements is one of
 * row_float64.inl.h. Included once, for float32 and float64. */
#ifndef CNORM_BATCH_FLOAT64_INL_H
#define CNORM_BATCH_FLOAT64_INL_H

#include "row_float64_backward.inl.h"

/* Samples that are read and written, dy: backward only, and numbers of each channel, float64 or of `type` */
typedef struct {
    cnorm_dtype type;
    ptrdiff_t samples, channels, space;
    const void *dy, *x; /* [samples, channels, space] */
    ptrdiff_t dy_stride, x_stride;
    void *out;
    ptrdiff_t out_stride;
    const void *gain, *bias; /* [channels] */
    void *K, *delta, *rstd;  /* [channels]: statistics of `type` */
    f64_stats *stats;        /* [channels] */
    double *sum, *sum2;      /* [channels]: A and B, then G and H of (6) */
} f64_batch;

/* channels c to c + LANES_F64 of a matrix */
static f64_tile column_tile(const f64_batch *b, ptrdiff_t c)
{
    return (f64_tile){.type = b->type,
                      .dy = b->dy ? at_element(b->type, b->dy, c) : NULL,
                      .x = at_element(b->type, b->x, c),
                      .dy_stride = b->dy_stride,
                      .x_stride = b->x_stride,
                      .rows = b->samples,
                      .n = b->channels - c < LANES_F64 ? b->channels - c : LANES_F64,
                      .gain = at_element(b->type, b->gain, c),
                      .bias = at_element(b->type, b->bias, c),
                      .out = (void *)at_element(b->type, b->out, c),
                      .out_stride = b->out_stride};
}

static f64_tile sample_tile(const f64_batch *b, ptrdiff_t sample, ptrdiff_t c)
{
    const ptrdiff_t at = c * b->space;
    const void *dy = b->dy ? at_element(b->type, b->dy, sample * b->dy_stride + at) : NULL;
    return run_tile(b->type, dy, at_element(b->type, b->x, sample * b->x_stride + at), b->space, NULL);
}

/* S and Q, or backward A and B, of channel c, or in a matrix of each channel from c on */
static void f64_channel_sums(const f64_batch *b, ptrdiff_t c, int backward, double sums[2][LANES_F64])
{
    memset(sums, 0, 2 * sizeof *sums);
    for (ptrdiff_t sample = 0; b->space > 1 && sample < b->samples; ++sample) {
        const f64_tile t = sample_tile(b, sample, c);
        double of_run[2] = {0};
        f64_run_sums(&t, &b->stats[c], backward ? &UNSCALED : NULL, of_run);
        sums[0][0] += of_run[0];
        sums[1][0] += of_run[1];
    }
    if (b->space > 1) return;
    f64_tile t = column_tile(b, c);
    const wide_stats e = wide_stats_of_each(b->stats + c, t.n);
    t.gain = NULL, t.all_gain = 1;
    for (ptrdiff_t r = 0; r < t.rows; r += FOLD) {
        const ptrdiff_t end = t.rows - r < FOLD ? t.rows : r + FOLD;
        wide_f64 lanes[2];
        f64_lane_sums(&t, r, end, &e, backward ? &UNSCALED : NULL, lanes);
        for (int k = 0; k < 2; ++k)
            for (int i = 0; i < LANES_F64; ++i) sums[k][i] += lanes[k].v[i / VL_F64][i % VL_F64];
    }
}

/* the largest finite |x| of channel c, or in a matrix of each channel from c on; float64 only */
static void f64_channel_largest(const f64_batch *b, ptrdiff_t c, double largest[LANES_F64])
{
    memset(largest, 0, LANES_F64 * sizeof *largest);
    for (ptrdiff_t sample = 0; b->space > 1 && sample < b->samples; ++sample) {
        const f64_tile t = sample_tile(b, sample, c);
        double lanes[LANES_F64];
        f64_lane_largest(&t, lanes);
        for (int i = 0; i < LANES_F64; ++i) largest[0] = larger_finite(largest[0], lanes[i]);
    }
    const f64_tile t = column_tile(b, c);
    if (b->space == 1) f64_lane_largest(&t, largest);
}

/* The statistics of channel c from its sums, and moments [2, channels] unless NULL; backward, where the sweep was the
 * last, with the given rstd. True where another sweep is needed. */
static int f64_channel_from(const f64_batch *b, ptrdiff_t c, const double sums[2], double eps, double *moments,
                            int backward)
{
    const double N = (double)(b->samples * b->space);
    f64_stats *e = &b->stats[c], without_eps = *e;
    (void)f64_mean_and_rstd(b->type, &without_eps, sums, N, 0, 1);
    const int again = f64_mean_and_rstd(b->type, e, sums, N, eps, 1);
    if (moments) {
        const double inverse = without_eps.inv_std_dev;
        moments[c] = (e->origin + e->delta) / e->scale;
        moments[b->channels + c] = inverse == 0 ? 0 : 1.0 / inverse / inverse;
    }
    if (backward) return again;
    double st[3]; /* of b->type */
    f64_store_stats(b->type, e, st);
    set_element(b->type, b->K, c, element(b->type, st, 0));
    set_element(b->type, b->delta, c, element(b->type, st, 1));
    set_element(b->type, b->rstd, c, element(b->type, st, 2));
    return again;
}

/* (3) for those of `count` channels from c on whose scale is STATS_IN_F64; backward, rstd is given and kept */
static void f64_channel_stats(const f64_batch *b, ptrdiff_t c, ptrdiff_t count, double eps, double *moments,
                              int backward)
{
    double sums[2][LANES_F64], largest[LANES_F64];
    f64_stats *e = b->stats + c;
    int redone[LANES_F64] = {0}, again[LANES_F64] = {0}, any = 1;
    if (b->type == CNORM_F64) f64_channel_largest(b, c, largest);
    for (ptrdiff_t i = 0; i < count; ++i) {
        redone[i] = again[i] = e[i].scale == STATS_IN_F64;
        if (!again[i]) continue;
        e[i] = (f64_stats){.scale = b->type == CNORM_F64 ? scale_for(largest[i]) : 1};
        e[i].origin = element(b->type, b->x, (c + i) * b->space) * e[i].scale;
    }
    for (int sweep = 0; sweep < 2 && any; ++sweep) {
        any = 0;
        f64_channel_sums(b, c, 0, sums);
        for (ptrdiff_t i = 0; i < count; ++i) {
            if (!again[i]) continue;
            const double of_channel[2] = {sums[0][i], sums[1][i]};
            any |= again[i] = f64_channel_from(b, c + i, of_channel, eps, moments, backward);
        }
    }
    for (ptrdiff_t i = 0; i < count && backward; ++i)
        if (redone[i]) f64_keep_rstd(b->type, element(b->type, b->rstd, c + i), &e[i]);
}

/* channels from c on that are handled together */
INLINE ptrdiff_t channels_at(const f64_batch *b, ptrdiff_t c)
{
    return b->space > 1 ? 1 : b->channels - c < LANES_F64 ? b->channels - c : LANES_F64;
}

/* (3) for all channels that are STATS_IN_F64 */
static NOINLINE void f64_channels(const f64_batch *b, double eps, double *moments, int backward)
{
    for (ptrdiff_t c = 0, count; c < b->channels; c += count) {
        int any = 0;
        count = channels_at(b, c);
        for (ptrdiff_t i = c; i < c + count; ++i) any |= b->stats[i].scale == STATS_IN_F64;
        if (any) f64_channel_stats(b, c, count, eps, moments, backward);
    }
}

/* (5): sum, sum2 of the channels that are done in float64 */
static NOINLINE void f64_channel_gradients(const f64_batch *b)
{
    for (ptrdiff_t c = 0, count; c < b->channels; c += count) {
        int any = 0;
        count = channels_at(b, c);
        for (ptrdiff_t i = c; i < c + count; ++i) any |= b->stats[i].scale != DONE_IN_T;
        if (!any) continue;
        double sums[2][LANES_F64];
        f64_channel_sums(b, c, 1, sums);
        for (ptrdiff_t i = c; i < c + count; ++i)
            if (b->stats[i].scale != DONE_IN_T) b->sum[i] = sums[0][i - c], b->sum2[i] = sums[1][i - c];
    }
}

/* (4), or backward (6), for a run of channel c in one sample */
static NOINLINE void f64_write_run(const f64_batch *b, ptrdiff_t sample, ptrdiff_t c, int backward)
{
    f64_tile t = sample_tile(b, sample, c);
    const wide_stats e = wide_stats_of(&b->stats[c]);
    t.out = (void *)at_element(b->type, b->out, sample * b->out_stride + c * b->space);
    t.all_gain = element(b->type, b->gain, c);
    t.all_bias = element(b->type, b->bias, c);
    if (!backward) {
        f64_write(&t, &e);
        return;
    }
    const f64_gradient of_channel = f64_gradient_of(&b->stats[c], b->sum[c], b->sum2[c], 0);
    const wide_gradient d = wide_gradient_of(&of_channel, UNSCALED);
    f64_write_gradient(&t, &e, &d);
}

/* (4), or backward (6), for a tile of a matrix: channels from c on */
static NOINLINE void f64_write_tile(const f64_batch *b, const f64_tile *t, ptrdiff_t c, int backward)
{
    const wide_stats e = wide_stats_of_each(b->stats + c, t->n);
    if (!backward) {
        f64_write(t, &e);
        return;
    }
    double lanes[5][LANES_F64] = {{0}};
    for (ptrdiff_t i = 0; i < t->n; ++i) {
        if (b->stats[c + i].scale == DONE_IN_T) continue;
        const f64_gradient d = f64_gradient_of(&b->stats[c + i], b->sum[c + i], b->sum2[c + i], 0);
        lanes[0][i] = d.G, lanes[1][i] = d.H, lanes[2][i] = d.rstd, lanes[3][i] = d.factor, lanes[4][i] = d.last_factor;
    }
    wide_gradient d = {.scales = {1, 1}};
    memcpy(&d.G, lanes[0], sizeof d.G), memcpy(&d.H, lanes[1], sizeof d.H), memcpy(&d.rstd, lanes[2], sizeof d.rstd);
    memcpy(&d.factor, lanes[3], sizeof d.factor), memcpy(&d.last_factor, lanes[4], sizeof d.last_factor);
    f64_write_gradient(t, &e, &d);
}

#endif
