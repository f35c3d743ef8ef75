/* Channels of batch_norm.inl.h that are done in float64. In a matrix (space = 1) LANES_F64 channels are read at a time,
 * one in each lane; otherwise each run of `space` elements is one of row_float64.inl.h. Included once, for float32 and
 * float64. */

/* How a channel is computed: in T; in float64; while statistics are computed also: its sums in T are to be taken again,
 * about its mean; its statistics are still to be computed in float64 */
enum { IN_T, IN_F64, SUM_AGAIN, STATS_IN_F64 };

/* Samples that are read and written, dy: backward only, and arrays [channels] */
typedef struct {
    cnorm_dtype type;
    ptrdiff_t samples, channels, space;
    const void *dy, *x; /* [samples, channels, space] */
    ptrdiff_t dy_stride, x_stride;
    void *out;
    ptrdiff_t out_stride;
    const void *gain, *bias;
    void *K, *delta, *rstd; /* statistics of `type` */
    int *state;
    f64_stats *stats;
    double *sum, *sum2; /* S and Q, or A and B; then G and H of (6) */
} volume;

static volume volume_of(cnorm_dtype type, const cnorm_volume_norm *call)
{
    return (volume){.type = type,
                    .samples = call->samples,
                    .channels = call->channels,
                    .space = call->space,
                    .x = call->x,
                    .x_stride = call->x_stride,
                    .out = call->y,
                    .out_stride = call->y_stride};
}
static volume volume_backward(cnorm_dtype type, const cnorm_volume_norm_backward *call)
{
    return (volume){.type = type,
                    .samples = call->samples,
                    .channels = call->channels,
                    .space = call->space,
                    .dy = call->dy,
                    .dy_stride = call->dy_stride,
                    .x = call->x,
                    .x_stride = call->x_stride,
                    .out = call->dx,
                    .out_stride = call->dx_stride};
}

/* channels from c on that are handled together, and whether any is in this state */
INLINE ptrdiff_t channels_at(const volume *v, ptrdiff_t c)
{
    return v->space > 1 ? 1 : v->channels - c < LANES_F64 ? v->channels - c : LANES_F64;
}
INLINE int any_in_state(const volume *v, ptrdiff_t c, int state)
{
    int any = 0;
    for (ptrdiff_t i = c; i < c + channels_at(v, c); ++i) any |= v->state[i] == state;
    return any;
}

/* them in all samples of a matrix, otherwise channel c in one sample */
static f64_view volume_view(const volume *v, ptrdiff_t sample, ptrdiff_t c)
{
    const ptrdiff_t at = c * v->space, n = v->space > 1 ? v->space : channels_at(v, c);
    const void *dy = v->dy ? at_element(v->type, v->dy, sample * v->dy_stride + at) : NULL;
    f64_view view = run_view(v->type, dy, at_element(v->type, v->x, sample * v->x_stride + at), n,
                             (void *)at_element(v->type, v->out, sample * v->out_stride + at));
    if (v->space > 1) {
        view.all_gain = element(v->type, v->gain, c), view.all_bias = element(v->type, v->bias, c);
    } else {
        view.rows = v->samples, view.step = 0;
        view.dy_stride = v->dy_stride, view.x_stride = v->x_stride, view.out_stride = v->out_stride;
        view.gain = at_element(v->type, v->gain, c), view.bias = at_element(v->type, v->bias, c);
    }
    return view;
}

/* S and Q, or backward A and B, of channel c, or in a matrix of each channel from c on */
static void f64_channel_sums(const volume *v, ptrdiff_t c, int backward, double sums[2][LANES_F64])
{
    memset(sums, 0, 2 * sizeof *sums);
    for (ptrdiff_t sample = 0; sample < (v->space > 1 ? v->samples : 1); ++sample) {
        f64_view view = volume_view(v, sample, c);
        view.gain = NULL, view.all_gain = 1;
        if (!backward) view.dy = NULL;
        if (v->space > 1) {
            const row_sums of_run = f64_run_sums(&view, &v->stats[c]);
            sums[0][0] += of_run.a, sums[1][0] += of_run.b;
            continue;
        }
        const wide_stats e = wide_stats_of(v->stats + c, view.n);
        for (ptrdiff_t r = 0; r < view.rows; r += FOLD) {
            wide_f64 lanes[2];
            f64_lane_sums(&view, r, view.rows - r < FOLD ? view.rows : r + FOLD, &e, lanes);
            for (int k = 0; k < 2; ++k)
                for (int i = 0; i < LANES_F64; ++i) sums[k][i] += lanes[k].v[i / VL_F64][i % VL_F64];
        }
    }
}

/* the largest finite |x| of channel c, or in a matrix of each channel from c on; float64 only */
static void f64_channel_largest(const volume *v, ptrdiff_t c, double largest[LANES_F64])
{
    const f64_view view = volume_view(v, 0, c);
    if (v->space == 1) f64_lane_largest(&view, largest);
    else largest[0] = 0;
    for (ptrdiff_t sample = 0; v->space > 1 && sample < v->samples; ++sample)
        largest[0] = larger_finite(largest[0], f64_largest((const double *)view.x + sample * v->x_stride, v->space));
}

/* The statistics of channel c from its sums, and moments [2, channels] unless NULL; backward, where the sweep was the
 * last, with the given rstd. True where another sweep is needed. */
static int f64_channel_from(const volume *v, ptrdiff_t c, row_sums sums, double eps, double *moments, int backward)
{
    const double N = (double)(v->samples * v->space);
    f64_stats *e = &v->stats[c], without_eps = *e;
    (void)f64_mean_and_rstd(v->type, &without_eps, sums, N, 0, 1);
    const int again = f64_mean_and_rstd(v->type, e, sums, N, eps, 1);
    if (moments) {
        const double inverse = without_eps.inv_std_dev;
        moments[c] = (e->origin + e->delta) / e->scale;
        moments[v->channels + c] = inverse == 0 ? 0 : 1.0 / inverse / inverse;
    }
    if (backward) return again;
    double st[3]; /* of v->type */
    f64_store_stats(v->type, e, st);
    set_element(v->type, v->K, c, element(v->type, st, 0));
    set_element(v->type, v->delta, c, element(v->type, st, 1));
    set_element(v->type, v->rstd, c, element(v->type, st, 2));
    return again;
}

/* (3) for all channels that are STATS_IN_F64; backward, rstd is given and kept */
static NOINLINE void f64_channels(const volume *v, double eps, double *moments, int backward)
{
    for (ptrdiff_t c = 0, count; c < v->channels; c += count) {
        double sums[2][LANES_F64], largest[LANES_F64];
        int again[LANES_F64], any = any_in_state(v, c, STATS_IN_F64);
        count = channels_at(v, c);
        if (any && v->type == CNORM_F64) f64_channel_largest(v, c, largest);
        for (ptrdiff_t i = 0; i < count && any; ++i) {
            again[i] = v->state[c + i] == STATS_IN_F64;
            if (!again[i]) continue;
            const double scale = v->type == CNORM_F64 ? scale_for(largest[i]) : 1;
            v->stats[c + i] = (f64_stats){scale, element(v->type, v->x, (c + i) * v->space) * scale, 0, 0, 0};
        }
        for (int sweep = 0; sweep < 2 && any; ++sweep) {
            any = 0;
            f64_channel_sums(v, c, 0, sums);
            for (ptrdiff_t i = 0; i < count; ++i)
                if (again[i])
                    any |= again[i] =
                        f64_channel_from(v, c + i, (row_sums){sums[0][i], sums[1][i]}, eps, moments, backward);
        }
        for (ptrdiff_t i = c; i < c + count; ++i) {
            if (v->state[i] != STATS_IN_F64) continue;
            if (backward) f64_keep_rstd(v->type, element(v->type, v->rstd, i), &v->stats[i]);
            v->state[i] = IN_F64;
        }
    }
}

/* (5): sum, sum2 of the channels that are done in float64 */
static NOINLINE void f64_channel_gradients(const volume *v)
{
    for (ptrdiff_t c = 0, count; c < v->channels; c += count) {
        double sums[2][LANES_F64];
        count = channels_at(v, c);
        if (any_in_state(v, c, IN_F64)) f64_channel_sums(v, c, 1, sums);
        for (ptrdiff_t i = c; i < c + count; ++i)
            if (v->state[i] == IN_F64) v->sum[i] = sums[0][i - c], v->sum2[i] = sums[1][i - c];
    }
}

/* (4), or backward (6), for the channels of a view, from c on */
static NOINLINE void f64_write_view(const volume *v, const f64_view *view, ptrdiff_t c, int backward)
{
    f64_gradient d[LANES_F64];
    wide_gradient of_lanes;
    const ptrdiff_t count = channels_at(v, c);
    const wide_stats e = wide_stats_of(v->stats + c, count);
    for (ptrdiff_t i = 0; i < count && backward; ++i)
        d[i] = f64_gradient_of(&v->stats[c + i], v->sum[c + i], v->sum2[c + i], 0);
    if (backward) of_lanes = wide_gradient_of(d, count);
    f64_write(view, &e, backward ? &of_lanes : NULL);
}
