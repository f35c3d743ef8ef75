/* Group normalisation of x [samples, channels, space] (Wu, He 2018, arXiv:1803.08494): a row of layer_norm.inl.h is a
 * group of channels of one sample with all their space; gain and bias are one number per channel. Instance
 * normalisation has as many groups as channels. The statistics are those of layer_norm.inl.h.
 *
 * Backward: the sums of dy and dy xhat over each channel's run of `space` elements are folded in float64; they are
 * the sample's share of dbias and dgain, and weighted with the gain, the two means of (6). With space = 1 it is (5).
 */

/* sums of layer_norm.inl.h about K, compiled once */
static __attribute__((noinline)) void FN(run_sums)(const T *x, ptrdiff_t n, T K, double *S, double *Q)
{
    FN(sums)(&(FN(row)){.x = x}, n, K, 1, NULL, 0, NULL, FN(PLAIN), S, Q);
}

/* (4) for a channel's run x [n], with one gain and one bias; carry is NULL unless streaming */
INLINE void FN(normalise_run)(const T *x, ptrdiff_t n, const T st[3], T gain, T bias, T *y, FN(carry) *carry)
{
    const V K = FN(splat)(st[0]), delta = FN(splat)(st[1]), rstd = FN(splat)(st[2]), zero = FN(splat)(0);
    const V g = FN(splat)(gain), b = FN(splat)(bias);
    const ptrdiff_t lane_offset = carry ? FN(lane_offset_of)(y) : 0;
    ptrdiff_t j = -lane_offset;
    if (lane_offset) {
        const ptrdiff_t to = n + lane_offset < VL ? n + lane_offset : VL;
        FN(put_range)(y + j, lane_offset, to, ((FN(load_range)(x + j, lane_offset, to, zero) - K) - delta) * rstd * g + b, carry);
        j += VL;
    }
    for (; j + VL <= n; j += VL) {
        const V v = ((FN(load)(x + j) - K) - delta) * rstd * g + b;
        if (carry) FN(stream)(y + j, v);
        else FN(store)(y + j, v);
    }
    if (j < n)
        FN(put_range)(y + j, 0, n - j, ((FN(load_range)(x + j, 0, n - j, zero) - K) - delta) * rstd * g + b, carry);
}

RARE void FN(wide_gradient_sums)(ptrdiff_t n, const T *dy, const T *x, const T *gain, const T st[3], double *A, double *B)
{
    *A = *B = 0;
    for (ptrdiff_t j = 0; j < n; ++j) {
        const double g = (double)dy[j] * (gain ? (double)gain[j] : 1.0);
        *A += g;
        *B += g * ((((double)x[j] - (double)st[0]) - (double)st[1]) * (double)st[2]);
    }
}

/* A = sum g and B = sum g xhat over x [n], with xhat of these stats and g = dy gain; gain may be NULL */
static __attribute__((noinline)) void FN(gradient_sums)(ptrdiff_t n, const T *dy, const T *x, const T *gain, const T st[3],
                                                        double *A, double *B)
{
    const V K = FN(splat)(st[0]), delta = FN(splat)(st[1]), rstd = FN(splat)(st[2]), zero = FN(splat)(0);
    *A = *B = 0;
    for (ptrdiff_t start = 0; start < n; start += FOLD) {
        const ptrdiff_t len = n - start < FOLD ? n - start : FOLD;
        const ptrdiff_t whole = len / LANES * LANES;
        V a[LANE_VECTORS], b[LANE_VECTORS];
#pragma GCC unroll 2
        for (int first = 0; first < LANE_VECTORS; first += PASS) {
            const ptrdiff_t base = start + first * VL;
            V ap[PASS], bp[PASS];
#pragma GCC unroll 4
            for (int i = 0; i < PASS; ++i) ap[i] = bp[i] = zero;
            for (ptrdiff_t j = base; j < base + whole; j += LANES) {
#pragma GCC unroll 4
                for (int i = 0; i < PASS; ++i) {
                    V g = FN(load)(dy + j + i * VL);
                    if (gain) g *= FN(load)(gain + j + i * VL);
                    ap[i] += g;
                    bp[i] += g * (((FN(load)(x + j + i * VL) - K) - delta) * rstd);
                }
            }
#pragma GCC unroll 4
            for (int i = 0; i < PASS; ++i) {
                const ptrdiff_t at = base + whole + i * VL;
                const ptrdiff_t left = start + len - at < VL ? start + len - at : VL;
                if (left > 0) { /* missing dy are zero, and with them both terms */
                    V g = FN(load_range)(dy + at, 0, left, zero);
                    if (gain) g *= FN(load_range)(gain + at, 0, left, zero);
                    ap[i] += g;
                    bp[i] += g * (((FN(load_range)(x + at, 0, left, K) - K) - delta) * rstd);
                }
                a[first + i] = ap[i];
                b[first + i] = bp[i];
            }
        }
        *A += (double)FN(tree)(a);
        *B += (double)FN(tree)(b);
    }
    if (!(fabs(*A) <= SUM_MAX && fabs(*B) <= SUM_MAX)) FN(wide_gradient_sums)(n, dy, x, gain, st, A, B);
}

/* (6) over a channel's run, with one gain; carry is NULL unless streaming */
INLINE void FN(gradient_run)(ptrdiff_t n, const T *dy, const T *x, T gain, const T st[3], T mean_g, T mean_gx, T *dx,
                             FN(carry) *carry)
{
    const V K = FN(splat)(st[0]), delta = FN(splat)(st[1]), rstd = FN(splat)(st[2]), zero = FN(splat)(0);
    const V scale = FN(splat)(gain), G = FN(splat)(mean_g), H = FN(splat)(mean_gx);
    for (ptrdiff_t j = carry ? -FN(lane_offset_of)(dx) : 0; j < n; j += VL) {
        const ptrdiff_t from = j < 0 ? -j : 0, to = n - j < VL ? n - j : VL;
        const int whole = to - from == VL;
        const V xv = whole ? FN(load)(x + j) : FN(load_range)(x + j, from, to, zero);
        const V g = (whole ? FN(load)(dy + j) : FN(load_range)(dy + j, from, to, zero)) * scale;
        const V v = rstd * ((g - G) - ((xv - K) - delta) * rstd * H);
        if (!whole) FN(put_range)(dx + j, from, to, v, carry);
        else if (carry) FN(stream)(dx + j, v);
        else FN(store)(dx + j, v);
    }
}

RARE void FN(f64_group)(ptrdiff_t channels, ptrdiff_t space, const T *x, const T *gain, const T *bias, double eps, T *y,
                          T stats[3])
{
    const FN(f64_stats) e = FN(f64_row_stats)(x, channels * space, eps, 1);
    for (ptrdiff_t c = 0; c < channels; ++c)
        for (ptrdiff_t j = c * space; j < (c + 1) * space; ++j) {
            double v = FN(f64_xhat)(&e, (double)x[j]);
            if (gain) v *= (double)gain[c];
            if (bias) v += (double)bias[c];
            y[j] = (T)v;
        }
    FN(f64_store_stats)(&e, stats);
}

/* A few groups of one sample, one behind the other: as many as have their trees, square roots and divisions, which are most
 * of the work for short groups, done at once. plain: accepted, see (1) to (3) of layer_norm.inl.h. */
typedef struct {
    ptrdiff_t count;
    T K[VL], delta[VL], rstd[VL];
    int plain[VL], all_plain, all_about_0;
} FN(groups);

/* (1) for one group, n <= FOLD, about K: the lanes of its sums down to a vector each */
INLINE void FN(group_sums)(const T *x, ptrdiff_t n, T K, const int shifted, V *s, V *q)
{
    const V shift = FN(splat)(K);
    V sum[LANE_VECTORS], sum2[LANE_VECTORS];
    if (n % LANES == 0 && n <= BLOCK * LANES) {
        /* the zeros that lane_sums begins with are a fifth of the time of a short group, and only give a zero its sign */
        for (int i = 0; i < LANE_VECTORS; ++i) {
            sum[i] = FN(load)(x + i * VL);
            if (shifted) sum[i] -= shift;
            sum2[i] = sum[i] * sum[i];
        }
        for (ptrdiff_t j = LANES; j < n; j += LANES) {
            for (int i = 0; i < LANE_VECTORS; ++i) {
                V d = FN(load)(x + j + i * VL);
                if (shifted) d -= shift;
                FN(accumulate)(d, 1, &sum[i], &sum2[i]);
            }
        }
    } else {
        FN(lane_sums)(&(FN(row)){.x = x}, n, 0, n, K, 1, NULL, 0, NULL, FN(PLAIN), sum, sum2);
    }
    *s = FN(fold)(sum);
    *q = FN(fold)(sum2);
}

INLINE void FN(groups_stats)(const T *x, ptrdiff_t n, double eps, FN(groups) *g)
{
    const double size = (double)n, per = 1.0 / size;
    const V zero = FN(splat)(0);
    T S[VL], Q[VL];
    V s[VL], q[VL];
    g->all_plain = g->all_about_0 = 1;
    for (ptrdiff_t i = 0; i < VL; ++i) {
        s[i] = q[i] = zero;
        if (i >= g->count) continue;
        const T *group = x + i * n;
        if (FN(initial_shift)(&(FN(row)){.x = group}, n, 1, &g->K[i])) {
            FN(group_sums)(group, n, g->K[i], 1, &s[i], &q[i]);
            g->all_about_0 = 0;
        } else {
            FN(group_sums)(group, n, g->K[i] = 0, 0, &s[i], &q[i]);
        }
    }
    FN(store)(S, FN(trees)(s) + zero); /* -0 + 0 = 0 */
    FN(store)(Q, FN(trees)(q));
    for (ptrdiff_t i = 0; i < g->count; ++i) {
        const double sum = (double)S[i], sum2 = (double)Q[i], delta = sum * per, m2 = sum2 - sum * delta;
        g->delta[i] = (T)delta;
        g->rstd[i] = (T)(1.0 / sqrt(m2 * per + eps));
        g->plain[i] = FN(accepted)(size, sum * delta, m2, sum2, eps);
    }
    for (ptrdiff_t i = 0; i < g->count; ++i) g->all_plain &= g->plain[i];
    if (g->all_plain) return;
    g->all_plain = 1;
    for (ptrdiff_t i = 0; i < g->count; ++i) {
        if (g->plain[i]) continue;
        T stats[3];
        double square = 1;
        g->plain[i] = FN(shifted_stats)(x + i * n, n, eps, (double)g->K[i] + (double)S[i] * per, NULL, 0, stats, &square);
        g->K[i] = stats[0], g->delta[i] = stats[1], g->rstd[i] = FN(rstd_of)(square);
        g->all_plain &= g->plain[i];
        g->all_about_0 = 0;
    }
}

/* (4) for groups with space = 1 and n >= VL that are all plain, in the vectors of y: one that a group ends in has lanes of
 * the next, too */
INLINE void FN(write_groups)(const FN(groups) *g, ptrdiff_t n, const T *x, const T *gain, const T *bias, T *y,
                             FN(carry) *carry, const enum FN(origin) origin, const int affine)
{
    FN(writer) w = {.x = x, .n = g->count * n, .gain = gain, .bias = bias, .y = y, .carry = carry};
    w.at = carry ? -FN(lane_offset_of)(y) : 0;
    for (ptrdiff_t i = 0; i < g->count; ++i) {
        w.shift = FN(splat)(g->K[i]);
        w.delta = FN(splat)(g->delta[i]);
        w.rstd = FN(splat)(g->rstd[i]);
        if (w.at < 0) FN(write_edge)(&w, 1, origin);
        const ptrdiff_t end = (i + 1) * n;
        while (w.at + VL <= end) FN(write_vector)(&w, 1, origin, affine, carry != NULL);
        const ptrdiff_t left = end - w.at;
        if (left && i + 1 < g->count) {
            w.shift = FN(fill)(w.shift, 0, left, FN(splat)(g->K[i + 1]));
            w.delta = FN(fill)(w.delta, 0, left, FN(splat)(g->delta[i + 1]));
            w.rstd = FN(fill)(w.rstd, 0, left, FN(splat)(g->rstd[i + 1]));
            FN(write_vector)(&w, 1, origin, affine, carry != NULL);
        }
    }
    if (w.at < w.n) FN(write_edge)(&w, 1, origin);
}

/* (4) for one group, plain or not */
INLINE void FN(write_channels)(ptrdiff_t channels, ptrdiff_t space, const T *x, int plain, const T *gain, const T *bias,
                               double eps, T *y, FN(carry) *carry, T stats[3])
{
    if (!plain) {
        FN(f64_group)(channels, space, x, gain, bias, eps, y, stats);
    } else if (space == 1) {
        FN(writer) w = {.x = x, .n = channels, .gain = gain, .bias = bias, .y = y, .carry = carry};
        FN(write_head)(&w, stats, carry ? FN(lane_offset_of)(y) : 0, 1, FN(SHIFTED));
        FN(write_rest)(&w, 1, FN(SHIFTED), 0);
    } else {
        for (ptrdiff_t c = 0; c < channels; ++c) /* 1 and -0 are what changes nothing */
            FN(normalise_run)(x + c * space, space, stats, gain ? gain[c] : 1, bias ? bias[c] : -(T)0, y + c * space, carry);
    }
}

/* Groups short enough for several of them to be in the first cache, from their sums to their output */
static void FN(short_groups)(const cnorm_volume_norm *call, FN(carry) *carry)
{
    const ptrdiff_t channels = call->channels / call->groups, space = call->space, n = channels * space;
    const ptrdiff_t together = FN(CACHED) / n < VL ? FN(CACHED) / n : VL;
    const T *all_gain = call->gain, *all_bias = call->bias;
    _Alignas(VECTOR_BYTES) T for_affine[FN(PARAM_SPACE)];
    if (space == 1 && call->channels <= FN(CACHED))
        FN(place_params)(call->samples, call->channels, call->y, carry ? FN(lane_offset_of)(call->y) : 0, 1, for_affine, &all_gain,
                   &all_bias);
    FN(groups) g;
    for (ptrdiff_t sample = 0; sample < call->samples; ++sample) {
        for (ptrdiff_t first = 0; first < call->groups; first += together) {
            const T *x = (const T *)call->x + sample * call->x_stride + first * n;
            const T *gain = all_gain ? all_gain + first * channels : NULL;
            const T *bias = all_bias ? all_bias + first * channels : NULL;
            T *y = (T *)call->y + sample * call->y_stride + first * n;
            g.count = call->groups - first < together ? call->groups - first : together;
            FN(groups_stats)(x, n, call->eps, &g);
            const int as_one = space == 1 && n >= VL && g.all_plain, simple = g.all_about_0 && gain && bias;
            if (as_one && carry && simple) FN(write_groups)(&g, n, x, gain, bias, y, carry, FN(PLAIN), 1);
            else if (as_one && carry) FN(write_groups)(&g, n, x, gain, bias, y, carry, FN(SHIFTED), 0);
            else if (as_one && simple) FN(write_groups)(&g, n, x, gain, bias, y, NULL, FN(PLAIN), 1);
            else if (as_one) FN(write_groups)(&g, n, x, gain, bias, y, NULL, FN(SHIFTED), 0);
            for (ptrdiff_t i = 0; i < g.count && !(as_one && !call->stats); ++i) {
                T stats[3] = {g.K[i], g.delta[i], g.rstd[i]};
                if (!as_one)
                    FN(write_channels)(channels, space, x + i * n, g.plain[i], gain ? gain + i * channels : NULL,
                                       bias ? bias + i * channels : NULL, call->eps, y + i * n, carry, stats);
                if (call->stats) memcpy((T *)call->stats + 3 * (sample * call->groups + first + i), stats, sizeof stats);
            }
        }
    }
}

static void FN(group_norm)(const cnorm_volume_norm *call)
{
    if (call->groups == 1 && call->space == 1) {
        FN(layer_norm)(&(cnorm_norm){.rows = call->samples, .n = call->channels, .x = call->x, .x_stride = call->x_stride,
                                     .gain = call->gain, .bias = call->bias, .eps = call->eps, .y = call->y,
                                     .y_stride = call->y_stride, .stats = call->stats, .streaming = call->streaming});
        return;
    }
    const ptrdiff_t channels = call->channels / call->groups, space = call->space, n = channels * space;
    FN(carry) kept = {.to = 0}, *carry = call->streaming ? &kept : NULL;
    if (2 * n <= FN(CACHED)) {
        FN(short_groups)(call, carry);
    } else {
        for (ptrdiff_t i = 0; i < call->samples * call->groups; ++i) {
            const ptrdiff_t sample = i / call->groups, group = i % call->groups;
            const T *x = (const T *)call->x + sample * call->x_stride + group * n;
            T stats[3];
            double square = 1;
            const int plain = FN(row_stats)(&(FN(row)){.x = x}, n, call->eps, 1, NULL, 0, NULL, FN(PLAIN), stats, &square);
            stats[2] = FN(rstd_of)(square);
            FN(write_channels)(channels, space, x, plain, call->gain ? (const T *)call->gain + group * channels : NULL,
                               call->bias ? (const T *)call->bias + group * channels : NULL, call->eps,
                               (T *)call->y + sample * call->y_stride + group * n, carry, stats);
            if (call->stats) memcpy((T *)call->stats + 3 * i, stats, sizeof stats);
        }
    }
    if (carry) {
        FN(flush)(carry);
        stream_fence();
    }
}

/* all sums in float64; dgain NULL: only dx */
RARE void FN(f64_group_backward)(ptrdiff_t channels, ptrdiff_t space, const T *dy, const T *x, const T *gain, const T st[3],
                                   T *dx, T *dgain, T *dbias)
{
    const ptrdiff_t n = channels * space;
    const FN(f64_stats) e = FN(f64_given_stats)(x, n, st, 1);
    double G = 0, H = 0;
    for (ptrdiff_t c = 0; c < channels; ++c) {
        double sum = 0, sum_x = 0;
        for (ptrdiff_t j = c * space; j < (c + 1) * space; ++j) {
            sum += (double)dy[j];
            sum_x += (double)dy[j] * FN(f64_xhat)(&e, (double)x[j]);
        }
        G += sum * (gain ? (double)gain[c] : 1.0);
        H += sum_x * (gain ? (double)gain[c] : 1.0);
        if (dgain) {
            dgain[c] = (T)((double)dgain[c] + sum_x);
            dbias[c] = (T)((double)dbias[c] + sum);
        }
    }
    G /= (double)n;
    H /= (double)n;
    for (ptrdiff_t c = 0; c < channels; ++c)
        for (ptrdiff_t j = c * space; j < (c + 1) * space; ++j) {
            const double g = (double)dy[j] * (gain ? (double)gain[c] : 1.0);
            dx[j] = (T)FN(times_inv_std_dev)(&e, (g - G) - FN(f64_xhat)(&e, (double)x[j]) * H, 0);
        }
}

/* space = 1: the row of a group; false, without (6), if a sum overflowed */
INLINE int FN(backward_channels)(ptrdiff_t n, const T *dy, const T *x, const T *gain, const T st[3], T *dx, T *dgain, T *dbias,
                              FN(carry) *carry)
{
    const FN(gradient) row = {dy, x, dx, FN(splat)(st[0]), FN(splat)(st[1]), FN(splat)(st[2]), AHEAD_BYTES, AHEAD_BYTES};
    const FN(param_grads) param_grads = {.gain = gain, .dgain = dgain, .dbias = dbias};
    double sums[2];
    FN(backward_sums)(n, &row, &param_grads, 0, 1, 0, carry != NULL, sums);
    if (!(fabs(sums[0]) <= SUM_MAX && fabs(sums[1]) <= SUM_MAX)) {
        if (carry) FN(add_param_grads)(n, row, param_grads, 1);
        return 0;
    }
    if (carry) FN(backward_dx)(n, &row, &param_grads, FN(lane_offset_of)(dx), 1, 0, sums, carry);
    else FN(backward_dx)(n, &row, &param_grads, 0, 1, 0, sums, NULL);
    return 1;
}

/* space > 1, likewise */
INLINE int FN(backward_group)(ptrdiff_t channels, ptrdiff_t space, const T *dy, const T *x, const T *gain, const T st[3],
                              T *dx, T *dgain, T *dbias, FN(carry) *carry)
{
    double G = 0, H = 0;
    for (ptrdiff_t c = 0; c < channels; ++c) {
        double sum, sum_x;
        FN(gradient_sums)(space, dy + c * space, x + c * space, NULL, st, &sum, &sum_x);
        G += sum * (gain ? (double)gain[c] : 1.0);
        H += sum_x * (gain ? (double)gain[c] : 1.0);
        dgain[c] += (T)sum_x;
        dbias[c] += (T)sum;
    }
    if (!(fabs(G) <= SUM_MAX && fabs(H) <= SUM_MAX)) return 0;
    G /= (double)(channels * space);
    H /= (double)(channels * space);
    for (ptrdiff_t c = 0; c < channels; ++c)
        FN(gradient_run)(space, dy + c * space, x + c * space, gain ? gain[c] : 1, st, (T)G, (T)H, dx + c * space, carry);
    return 1;
}

/* One block of samples: dgain and dbias become this block's */
static void FN(group_norm_backward)(const cnorm_volume_norm_backward *call)
{
    const ptrdiff_t groups = call->groups, channels = call->channels / groups, space = call->space, n = channels * space;
    memset(call->dgain, 0, (size_t)call->channels * sizeof(T));
    memset(call->dbias, 0, (size_t)call->channels * sizeof(T));
    FN(carry) kept = {.to = 0}, *carry = call->streaming ? &kept : NULL;
    for (ptrdiff_t sample = 0; sample < call->samples; ++sample)
        for (ptrdiff_t group = 0; group < groups; ++group) {
            const T *dy = (const T *)call->dy + sample * call->dy_stride + group * n;
            const T *x = (const T *)call->x + sample * call->x_stride + group * n;
            const T *gain = call->gain ? (const T *)call->gain + group * channels : NULL;
            const T *st = (const T *)call->stats + 3 * (sample * groups + group);
            T *dx = (T *)call->dx + sample * call->dx_stride + group * n;
            T *dgain = (T *)call->dgain + group * channels, *dbias = (T *)call->dbias + group * channels;
            /* written so that NaN goes the slow way too */
            if (!FN(rstd_in_range)(st))
                FN(f64_group_backward)(channels, space, dy, x, gain, st, dx, dgain, dbias);
            else if (!(space == 1 ? FN(backward_channels)(n, dy, x, gain, st, dx, dgain, dbias, carry)
                                  : FN(backward_group)(channels, space, dy, x, gain, st, dx, dgain, dbias, carry)))
                FN(f64_group_backward)(channels, space, dy, x, gain, st, dx, NULL, NULL);
        }
    if (carry) {
        FN(flush)(carry);
        stream_fence();
    }
}
