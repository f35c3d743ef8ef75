/* Batch normalisation of x [samples, channels, space] (Ioffe, Szegedy 2015, arXiv:1502.03167): each channel over all
 * samples and space, N = samples * space numbers.
 *
 * Forward
 *   (1) K = a channel's first number plus the mean difference of the next few from it, rounded; one sweep of
 *       d = x - K: S = sum d, Q = sum d^2, delta = S/N; accepted as in layer_norm.inl.h (2).
 *   (2) If a channel fails, one more sweep with K + delta rounded for K, which counts for the failed channels only.
 *   (3) A channel that fails again is copied together and done in float64, as in layer_norm.inl.h (3).
 *   (4) y = ((x - K) - delta) scale + bias, scale = gain/sqrt(var + eps) rounded once
 * Inference is (4) with K = the given mean and no delta.
 * Backward, with xhat = ((x - K) - delta) rstd
 *   (5) one sweep: A = sum dy, B = sum dy xhat;  dbias = A, dgain = B
 *   (6) dx = rstd ((dy gain - gain A/N) - xhat gain B/N)
 *
 * With space = 1 the sums run down the columns, each in a lane of its own, and every 64 rows are added to a float64;
 * otherwise they run over `space` elements as over a row, and every run is added to a float64.
 * An element of y or dx is computed from itself and its channel's numbers alone, by one formula or the other.
 */

enum { FN(BATCH_FIRST) = 32 }; /* numbers that K comes from: mean - K is then small beside the deviation */

/* The scratch: arrays [channels]. A channel with exact.scale != 0 is done in float64, because T can't carry it. */
typedef struct {
    double *sum, *sum2; /* S and Q, or A and B */
    FN(f64_stats) *f64;
    T *K, *delta, *rstd, *gain, *bias, *scale, *G, *H;
    T *block, *block2; /* the sums of 64 rows */
    T *together;       /* [N]: one channel */
    int any_f64;
    int given;         /* inference: delta is 0 */
} FN(batch);

/* Arrays of T begin where out does in its page, and in whole vectors of it: so the store that a load may have to wait for
 * is always a page back. */
static FN(batch) FN(batch_arrays)(void *scratch, ptrdiff_t channels, const T *gain, const T *bias, const T *out)
{
    const ptrdiff_t line = LINE_BYTES / (ptrdiff_t)sizeof(T), n = (channels + line - 1) / line * line;
    double *p = scratch;
    T *q = (T *)(p + channels * BATCH_DOUBLES);
    q += ((uintptr_t)out - (uintptr_t)q) % PAGE_BYTES / sizeof(T);
    FN(batch) b = {.sum = p, .sum2 = p + channels, .f64 = (FN(f64_stats) *)(p + 2 * channels), .K = q, .delta = q + n,
                   .rstd = q + 2 * n, .gain = q + 3 * n, .bias = q + 4 * n, .scale = q + 5 * n, .G = q + 6 * n,
                   .H = q + 7 * n, .block = q + 8 * n, .block2 = q + 9 * n, .together = q + n * BATCH_ITEMS};
    for (ptrdiff_t c = 0; c < channels; ++c) { /* 1 and -0 are what changes nothing */
        b.gain[c] = gain ? gain[c] : 1;
        b.bias[c] = bias ? bias[c] : -(T)0;
        b.f64[c].scale = 0;
    }
    return b;
}

/* lanes from <= i < to of the vector at p, which may be all */
INLINE V FN(take)(const T *p, ptrdiff_t from, ptrdiff_t to)
{
    return to - from == VL ? FN(load)(p) : FN(load_range)(p, from, to, FN(splat)(0));
}
INLINE void FN(put)(T *p, ptrdiff_t from, ptrdiff_t to, V v)
{
    if (to - from == VL) FN(store)(p, v);
    else FN(store_range)(p, from, to, v);
}

/* block += d, block2 += d^2, or with dy: block += dy, block2 += dy xhat; over a few rows of columns. Vectors begin `lane_offset`
 * lanes before the row. */
INLINE void FN(column_rows)(const ptrdiff_t rows, ptrdiff_t channels, const T *dy, ptrdiff_t dy_stride, const T *x,
                            ptrdiff_t x_stride, const T *centre, ptrdiff_t lane_offset, const FN(batch) *b)
{
    for (ptrdiff_t j = -lane_offset; j < channels; j += VL) {
        const ptrdiff_t from = j < 0 ? -j : 0, to = channels - j < VL ? channels - j : VL;
        const V K = FN(take)(centre + j, from, to);
        V s = FN(take)(b->block + j, from, to), q = FN(take)(b->block2 + j, from, to);
        for (ptrdiff_t r = 0; r < rows; ++r) {
            const V d = FN(take)(x + r * x_stride + j, from, to) - K;
            if (dy) {
                const V g = FN(take)(dy + r * dy_stride + j, from, to);
                s += g;
                q += g * ((d - FN(take)(b->delta + j, from, to)) * FN(take)(b->rstd + j, from, to));
            } else {
                s += d;
                q += d * d;
            }
        }
        FN(put)(b->block + j, from, to, s);
        FN(put)(b->block2 + j, from, to, q);
    }
}

/* sum, sum2 = the two sums of every channel: with dy NULL those of (1) about K, else those of (5) */
INLINE void FN(channel_sums)(ptrdiff_t samples, ptrdiff_t channels, ptrdiff_t space, ptrdiff_t run, const T *dy,
                             ptrdiff_t dy_stride, const T *x, ptrdiff_t x_stride, const T *K, const FN(batch) *b)
{
    memset(b->sum, 0, 2 * (size_t)channels * sizeof(double));
    if (space == 1) {
        const ptrdiff_t lane_offset = ALIGN_LOADS && x_stride % VL == 0 ? FN(lane_offset_of)(x) : 0;
        for (ptrdiff_t begin = 0; begin < samples; begin += CNORM_BLOCK_ROWS) {
            const ptrdiff_t end = samples - begin < CNORM_BLOCK_ROWS ? samples : begin + CNORM_BLOCK_ROWS;
            memset(b->block, 0, (size_t)channels * sizeof(T));
            memset(b->block2, 0, (size_t)channels * sizeof(T));
            ptrdiff_t row = begin;
            /* Rows together: the running sums are read and written as much less often. More than eight lines a whole page
             * apart do not stay in the first cache, and an unaligned dy needs each of its lines twice. */
            for (; !dy && row + 8 <= end; row += 8)
                FN(column_rows)(8, channels, NULL, 0, x + row * x_stride, x_stride, K, lane_offset, b);
            for (; dy && row + 4 <= end; row += 4)
                FN(column_rows)(4, channels, dy + row * dy_stride, dy_stride, x + row * x_stride, x_stride, K, lane_offset, b);
            for (; row < end; ++row)
                FN(column_rows)(1, channels, dy ? dy + row * dy_stride : NULL, 0, x + row * x_stride, 0, K, lane_offset, b);
            for (ptrdiff_t c = 0; c < channels; ++c) {
                b->sum[c] += (double)b->block[c];
                b->sum2[c] += (double)b->block2[c];
            }
        }
    } else {
        for (ptrdiff_t sample = 0; sample < samples; ++sample)
            for (ptrdiff_t c = 0; c < channels; ++c) {
                const T *px = x + sample * x_stride + c * space;
                double s, q;
                if (dy) {
                    const T st[3] = {K[c], b->delta[c], b->rstd[c]};
                    FN(gradient_sums)(run, dy + sample * dy_stride + c * space, px, NULL, st, &s, &q);
                } else {
                    FN(run_sums)(px, run, K[c], &s, &q);
                }
                b->sum[c] += s;
                b->sum2[c] += q;
            }
    }
}

/* Can T carry (4) with scale, gain times rstd rounded? |x - K| and the product then leave its range only where y does, or
 * would but for the bias. NaN can't be carried, nor can a 0 that neither gain nor rstd is. */
INLINE int FN(carried)(T K, T scale, double gain, double rstd)
{
    const T size = scale < 0 ? -scale : scale, centre = K < 0 ? -K : K;
    return centre <= RSTD_MAX * RSTD_MAX && (gain == 0 || rstd == 0 || (size >= RSTD_MIN && size <= RSTD_MAX));
}

/* What (4), or backward (6), needs to know of the columns in a vector. `given`, a constant where these functions are called,
 * says that delta is 0 and is not read: an array less of five is a sixth of the time. */
typedef struct { V K, delta, scale, bias, rstd, gain, G, H; } FN(columns);

INLINE FN(columns) FN(columns_at)(const FN(batch) *b, ptrdiff_t j, ptrdiff_t from, ptrdiff_t to, const int backward,
                                const int given)
{
    FN(columns) c = {.K = FN(take)(b->K + j, from, to)};
    if (!given) c.delta = FN(take)(b->delta + j, from, to);
    if (backward) {
        c.rstd = FN(take)(b->rstd + j, from, to);
        c.gain = FN(take)(b->gain + j, from, to);
        c.G = FN(take)(b->G + j, from, to);
        c.H = FN(take)(b->H + j, from, to);
    } else {
        c.scale = FN(take)(b->scale + j, from, to);
        c.bias = FN(take)(b->bias + j, from, to);
    }
    return c;
}

INLINE V FN(applied)(const FN(columns) *c, const T *dy, const T *x, ptrdiff_t from, ptrdiff_t to, const int given)
{
    V d = FN(take)(x, from, to) - c->K;
    if (!given) d -= c->delta;
    return dy ? c->rstd * ((FN(take)(dy, from, to) * c->gain - c->G) - d * c->rstd * c->H) : d * c->scale + c->bias;
}

/* (4), or with dy (6), for a few rows of columns, whose numbers are loaded once for all of them. carry is NULL unless out is
 * streamed; then its rows, if they are more than one, begin equally far into a vector. */
INLINE void FN(apply_columns)(const ptrdiff_t rows, ptrdiff_t n, const T *dy, ptrdiff_t dy_stride, const T *x,
                              ptrdiff_t x_stride, T *out, ptrdiff_t out_stride, const FN(batch) *b, const int given,
                              FN(carry) *carry)
{
    const ptrdiff_t lane_offset = carry ? FN(lane_offset_of)(out) : 0, end = (n + lane_offset) / VL * VL - lane_offset;
    for (ptrdiff_t j = lane_offset ? VL - lane_offset : 0; j < end; j += VL) {
        const FN(columns) c = FN(columns_at)(b, j, 0, VL, dy != NULL, given);
        for (ptrdiff_t r = 0; r < rows; ++r) {
            const V v = FN(applied)(&c, dy ? dy + r * dy_stride + j : NULL, x + r * x_stride + j, 0, VL, given);
            if (carry) FN(stream)(out + r * out_stride + j, v);
            else FN(store)(out + r * out_stride + j, v);
        }
    }
    for (ptrdiff_t r = 0; r < rows; ++r, dy = dy ? dy + dy_stride : NULL, x += x_stride, out += out_stride) {
        /* the vectors that the row begins and ends in */
        for (ptrdiff_t j = lane_offset ? -lane_offset : end; j < n; j = j < end ? end : n) {
            const ptrdiff_t from = j < 0 ? -j : 0, to = n - j < VL ? n - j : VL;
            const FN(columns) c = FN(columns_at)(b, j, from, to, dy != NULL, given);
            FN(put_range)(out + j, from, to, FN(applied)(&c, dy ? dy + j : NULL, x + j, from, to, given), carry);
        }
    }
}

/* the same for all rows. Forward, streamed rows go one by one: what four share is less than what reading one page after the
 * other saves. */
INLINE void FN(apply_all_columns)(ptrdiff_t rows, ptrdiff_t n, const T *dy, ptrdiff_t dy_stride, const T *x,
                                  ptrdiff_t x_stride, T *out, ptrdiff_t out_stride, const FN(batch) *b, const int given,
                                  FN(carry) *carry)
{
    ptrdiff_t r = 0;
    for (; r + 4 <= rows && !(carry && (!dy || n % VL)); r += 4) {
        const T *px = x + r * x_stride, *pdy = dy ? dy + r * dy_stride : NULL;
        if (carry) FN(apply_columns)(4, n, pdy, dy_stride, px, x_stride, out + r * out_stride, out_stride, b, given, carry);
        else FN(apply_columns)(4, n, pdy, dy_stride, px, x_stride, out + r * out_stride, out_stride, b, given, NULL);
    }
    for (; r < rows; ++r)
        FN(apply_columns)(1, n, dy ? dy + r * dy_stride : NULL, 0, x + r * x_stride, 0, out + r * out_stride, 0, b, given, carry);
}

/* (4) */
static void FN(batch_apply)(const cnorm_volume_norm *call, const FN(batch) *b)
{
    const ptrdiff_t channels = call->channels, space = call->space;
    const T *x = call->x;
    T *y = call->y;
    FN(carry) kept = {.to = 0}, *carry = call->streaming ? &kept : NULL;
    const int by_columns = space == 1 && !b->any_f64;
    if (by_columns && b->given)
        FN(apply_all_columns)(call->samples, channels, NULL, 0, x, call->x_stride, y, call->y_stride, b, 1, carry);
    else if (by_columns)
        FN(apply_all_columns)(call->samples, channels, NULL, 0, x, call->x_stride, y, call->y_stride, b, 0, carry);
    for (ptrdiff_t sample = 0; !by_columns && sample < call->samples; ++sample, x += call->x_stride, y += call->y_stride) {
        for (ptrdiff_t c = 0; c < channels; ++c) {
            const T st[3] = {b->K[c], b->delta[c], b->scale[c]};
            const T *px = x + c * space;
            T *py = y + c * space;
            if (b->f64[c].scale != 0)
                for (ptrdiff_t j = 0; j < space; ++j)
                    py[j] = (T)(FN(f64_xhat)(&b->f64[c], (double)px[j]) * (double)b->gain[c] + (double)b->bias[c]);
            else FN(normalise_run)(px, space, st, 1, b->bias[c], py, carry);
        }
    }
    if (carry) {
        FN(flush)(carry);
        stream_fence();
    }
}

static const T *FN(channel_together)(ptrdiff_t samples, ptrdiff_t space, const T *x, ptrdiff_t x_stride, ptrdiff_t c,
                                     const FN(batch) *b)
{
    for (ptrdiff_t sample = 0; sample < samples; ++sample)
        memcpy(b->together + sample * space, x + sample * x_stride + c * space, (size_t)space * sizeof(T));
    return b->together;
}

/* Accepts channel c with the sums about K, or not; moments [2, channels] or NULL */
INLINE int FN(channel_stats)(ptrdiff_t N, ptrdiff_t channels, ptrdiff_t c, T K, double eps, const FN(batch) *b,
                             double *moments)
{
    const double S = b->sum[c], Q = b->sum2[c], delta = S / (double)N, var = (Q - S * delta) / (double)N;
    if (!FN(accepted)((double)N, S * delta, Q - S * delta, Q, eps)) return 0;
    const double rstd = var + eps > 0 ? 1.0 / sqrt(var + eps) : 0;
    b->K[c] = K;
    b->delta[c] = (T)delta;
    b->rstd[c] = (T)rstd;
    b->scale[c] = (T)((double)b->gain[c] * rstd);
    b->f64[c] = (FN(f64_stats)){.scale = FN(carried)(K, b->scale[c], (double)b->gain[c], rstd) ? 0 : 1, .origin = (double)K,
                              .delta = delta, .rstd = rstd, .inv_std_dev = rstd};
    if (moments) {
        moments[c] = (double)K + delta;
        moments[channels + c] = var;
    }
    return 1;
}

static void FN(batch_norm)(const cnorm_volume_norm *call)
{
    const ptrdiff_t samples = call->samples, channels = call->channels, space = call->space, N = samples * space;
    const ptrdiff_t x_stride = call->x_stride;
    const T *x = call->x;
    const double eps = call->eps;
    double *moments = call->moments;
    FN(batch) b = FN(batch_arrays)(call->scratch, channels, call->gain, call->bias, call->y);

    const ptrdiff_t run = space < FN(BATCH_FIRST) ? space : FN(BATCH_FIRST);
    const ptrdiff_t enough = (FN(BATCH_FIRST) + run - 1) / run, first = samples < enough ? samples : enough;
    for (ptrdiff_t c = 0; c < channels; ++c) b.G[c] = x[c * space];
    FN(channel_sums)(first, channels, space, run, NULL, 0, x, x_stride, b.G, &b);
    for (ptrdiff_t c = 0; c < channels; ++c) b.K[c] = (T)((double)b.G[c] + b.sum[c] / (double)(first * run));

    int failed = 0; /* is there any? They hold their next K in G and have a scale of -1 */
    FN(channel_sums)(samples, channels, space, space, NULL, 0, x, x_stride, b.K, &b);
    for (ptrdiff_t c = 0; c < channels; ++c) {
        if (FN(channel_stats)(N, channels, c, b.K[c], eps, &b, moments)) b.G[c] = b.K[c];
        else {
            b.G[c] = (T)((double)b.K[c] + b.sum[c] / (double)N);
            b.f64[c].scale = -1;
            failed = 1;
        }
    }
    if (failed) {
        FN(channel_sums)(samples, channels, space, space, NULL, 0, x, x_stride, b.G, &b);
        for (ptrdiff_t c = 0; c < channels; ++c) {
            if (b.f64[c].scale != -1 || FN(channel_stats)(N, channels, c, b.G[c], eps, &b, moments)) continue;
            const T *together = FN(channel_together)(samples, space, x, x_stride, c, &b);
            const FN(f64_stats) e = b.f64[c] = FN(f64_row_stats)(together, N, eps, 1);
            T st[3];
            FN(f64_store_stats)(&e, st);
            b.K[c] = st[0], b.delta[c] = st[1], b.rstd[c] = st[2];
            if (moments) {
                const double inv = FN(f64_row_stats)(together, N, 0, 1).inv_std_dev;
                moments[c] = (e.origin + e.delta) / e.scale;
                moments[channels + c] = inv == 0 ? 0 : 1.0 / inv / inv;
            }
        }
    }
    T *stats = call->stats;
    for (ptrdiff_t c = 0; c < channels; ++c) {
        b.any_f64 |= b.f64[c].scale != 0;
        if (stats) stats[3 * c] = b.K[c], stats[3 * c + 1] = b.delta[c], stats[3 * c + 2] = b.rstd[c];
    }
    FN(batch_apply)(call, &b);
}

/* The channels of a given mean and variance */
INLINE void FN(given_stats)(ptrdiff_t channels, const T *mean, const T *var, double eps, FN(batch) *b)
{
    b->given = 1;
    for (ptrdiff_t c = 0; c < channels; ++c) {
        const double sum = (double)var[c] + eps, rstd = sum == 0 ? 0 : 1.0 / sqrt(sum);
        b->K[c] = mean[c];
        b->delta[c] = 0;
        b->rstd[c] = (T)rstd;
        b->scale[c] = (T)((double)b->gain[c] * rstd);
        if (!FN(carried)(mean[c], b->scale[c], (double)b->gain[c], rstd) || !FN(carried)(mean[c], b->rstd[c], 1, rstd)) {
            b->any_f64 = 1; /* a quarter, so that x - mean stays finite in float64 too */
            b->f64[c] = (FN(f64_stats)){.scale = 0.25, .origin = 0.25 * (double)mean[c], .rstd = 4 * rstd,
                                      .inv_std_dev = rstd};
        }
    }
}

static void FN(batch_norm_inference)(const cnorm_volume_norm *call)
{
    FN(batch) b = FN(batch_arrays)(call->scratch, call->channels, call->gain, call->bias, call->y);
    FN(given_stats)(call->channels, call->mean, call->var, call->eps, &b);
    FN(batch_apply)(call, &b);
}

/* (5): sums in sum and sum2, dgain and dbias written. Channels whose sums overflowed become exact ones. */
static void FN(batch_gradient_sums)(const cnorm_volume_norm_backward *call, FN(batch) *b)
{
    const ptrdiff_t samples = call->samples, channels = call->channels, space = call->space;
    const T *dy = call->dy, *x = call->x;
    FN(channel_sums)(samples, channels, space, space, dy, call->dy_stride, x, call->x_stride, b->K, b);
    for (ptrdiff_t c = 0; c < channels; ++c) {
        FN(f64_stats) *e = &b->f64[c];
        if (e->scale == 0 && !(fabs(b->sum[c]) <= SUM_MAX && fabs(b->sum2[c]) <= SUM_MAX)) {
            b->any_f64 = 1;
            *e = (FN(f64_stats)){.scale = 1, .origin = (double)b->K[c], .delta = (double)b->delta[c],
                             .rstd = (double)b->rstd[c], .inv_std_dev = (double)b->rstd[c]};
        }
        if (e->scale != 0) {
            b->sum[c] = b->sum2[c] = 0;
            for (ptrdiff_t sample = 0; sample < samples; ++sample)
                for (ptrdiff_t j = c * space; j < (c + 1) * space; ++j) {
                    const double g = (double)dy[sample * call->dy_stride + j];
                    b->sum[c] += g;
                    b->sum2[c] += g * FN(f64_xhat)(e, (double)x[sample * call->x_stride + j]);
                }
        }
        ((T *)call->dbias)[c] = (T)b->sum[c];
        ((T *)call->dgain)[c] = (T)b->sum2[c];
    }
}

static void FN(batch_norm_backward)(const cnorm_volume_norm_backward *call)
{
    const ptrdiff_t samples = call->samples, channels = call->channels, space = call->space, N = samples * space;
    const T *dy = call->dy, *x = call->x, *st = call->stats;
    T *dx = call->dx;
    FN(batch) b = FN(batch_arrays)(call->scratch, channels, call->gain, NULL, call->dx);
    for (ptrdiff_t c = 0; c < channels; ++c, st += 3) {
        b.K[c] = st[0], b.delta[c] = st[1], b.rstd[c] = st[2];
        if (FN(rstd_in_range)(st)) continue; /* NaN goes the slow way too */
        b.any_f64 = 1;
        b.f64[c] = FN(f64_given_stats)(FN(channel_together)(samples, space, x, call->x_stride, c, &b), N, st, 1);
    }
    FN(batch_gradient_sums)(call, &b);
    for (ptrdiff_t c = 0; c < channels; ++c) {
        b.sum[c] *= (double)b.gain[c] / (double)N;
        b.sum2[c] *= (double)b.gain[c] / (double)N;
        b.G[c] = (T)b.sum[c];
        b.H[c] = (T)b.sum2[c];
    }
    FN(carry) kept = {.to = 0}, *carry = call->streaming ? &kept : NULL;
    const int by_columns = space == 1 && !b.any_f64;
    if (by_columns)
        FN(apply_all_columns)(samples, channels, dy, call->dy_stride, x, call->x_stride, dx, call->dx_stride, &b, 0,
                              carry);
    for (ptrdiff_t sample = 0; !by_columns && sample < samples;
         ++sample, dy += call->dy_stride, x += call->x_stride, dx += call->dx_stride)
        for (ptrdiff_t c = 0; c < channels; ++c) {
            const FN(f64_stats) *e = &b.f64[c];
            const T stats[3] = {b.K[c], b.delta[c], b.rstd[c]};
            if (e->scale == 0)
                FN(gradient_run)(space, dy + c * space, x + c * space, b.gain[c], stats, b.G[c], b.H[c], dx + c * space,
                                 carry);
            else
                for (ptrdiff_t j = c * space; j < (c + 1) * space; ++j)
                    dx[j] = (T)FN(times_inv_std_dev)(e, ((double)dy[j] * (double)b.gain[c] - b.sum[c]) -
                                                            FN(f64_xhat)(e, (double)x[j]) * b.sum2[c], 0);
        }
    if (carry) {
        FN(flush)(carry);
        stream_fence();
    }
}

static void FN(batch_norm_inference_backward)(const cnorm_volume_norm_backward *call)
{
    FN(batch) b = FN(batch_arrays)(call->scratch, call->channels, call->gain, NULL, call->dx);
    FN(given_stats)(call->channels, call->mean, call->var, call->eps, &b);
    FN(batch_gradient_sums)(call, &b);
    b.any_f64 = 0;
    for (ptrdiff_t c = 0; c < call->channels; ++c) { /* dx = scale dy is (4) about zero, whatever its sums were */
        b.K[c] = 0;
        b.f64[c].origin = 0;
        if (b.f64[c].scale != 0 && FN(carried)(0, b.scale[c], (double)b.gain[c], b.f64[c].inv_std_dev)) b.f64[c].scale = 0;
        b.any_f64 |= b.f64[c].scale != 0;
    }
    const cnorm_volume_norm of_dy = {.samples = call->samples, .channels = call->channels, .space = call->space,
                                     .x = call->dy, .x_stride = call->dy_stride, .y = call->dx,
                                     .y_stride = call->dx_stride, .streaming = call->streaming};
    FN(batch_apply)(&of_dy, &b);
}
