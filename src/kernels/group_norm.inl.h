/* Group normalisation of x [samples, channels, space] (Wu, He 2018, arXiv:1803.08494): a row of layer_norm.inl.h is a
 * group of channels of one sample with all their space; gain and bias are one number per channel. Instance
 * normalisation has as many groups as channels. The statistics are those of layer_norm.inl.h, (1) to (3).
 *
 * Forward  (4) y = ((x - K) - delta) rstd gain + bias
 * Backward, with xhat = ((x - K) - delta) rstd
 *   (5) A = sum dy and B = sum dy xhat over each channel's run of `space` elements (sweep.inl.h): the sample's
 *       share of dbias and dgain. G and H are the means over the group of A gain and B gain. With space = 1 a group is
 *       a row of layer_norm_backward.inl.h.
 *   (6) dx = rstd ((dy gain - G) - xhat H) */

INLINE FN(run) FN(channel_of)(const channel_group *group, ptrdiff_t c, const T st[3])
{
    const ptrdiff_t at = c * group->space;
    return (FN(run)){group->space, group->dy ? (const X *)group->dy + at : NULL, (const X *)group->x + at,
                     (X *)group->out + at, st};
}

/* (4) for space = 1. A NULL gain or bias is a vector of neutral numbers at index j & 0. */
INLINE void FN(normalise_channels)(const channel_group *group, const T st[3], FN(carry) *carry)
{
    const V K = TN(splat)(st[0]), delta = TN(splat)(st[1]), rstd = TN(splat)(st[2]);
    const V ones = TN(splat)(1), zeros = TN(splat)(-(T)0);
    const T *const gain = group->gain ? group->gain : (const void *)&ones;
    const T *const bias = group->bias ? group->bias : (const void *)&zeros;
    const ptrdiff_t gain_mask = group->gain ? -1 : 0, bias_mask = group->bias ? -1 : 0, n = group->channels;
    const X *const x = group->x;
    X *const y = group->out;
    for (ptrdiff_t j = carry ? -FN(lane_offset_of)(y) : 0; j < n; j += VL) {
        const ptrdiff_t from = j < 0 ? -j : 0, to = n - j < VL ? n - j : VL;
        const V g = FN(take_T)(gain + (j & gain_mask), from, to), b = FN(take_T)(bias + (j & bias_mask), from, to);
        FN(put)(y + j, from, to, ((FN(take)(x + j, from, to) - K) - delta) * rstd * g + b, carry);
    }
}

/* carry is NULL unless y is written by non-temporal stores */
INLINE void FN(write_group)(const channel_group *group, FN(carry) *carry, const T stats[3])
{
    if (group->space == 1) {
        FN(normalise_channels)(group, stats, carry);
        return;
    }
    const T *const gain = group->gain, *const bias = group->bias;
    for (ptrdiff_t c = 0; c < group->channels; ++c) { /* gain 1 and bias -0: neutral */
        const FN(run) run = FN(channel_of)(group, c, stats);
        FN(normalise_run)(&run, gain ? gain[c] : 1, bias ? bias[c] : -(T)0, carry);
    }
}

/* groups first to first + count of one sample */
INLINE void FN(norm_groups)(const cnorm_volume_norm *call, ptrdiff_t sample, ptrdiff_t first, ptrdiff_t count,
                            FN(carry) *carry)
{
    const ptrdiff_t channels = call->channels / call->groups, n = channels * call->space;
    const X *const x = (const X *)call->x + sample * call->x_stride;
    T st[ROWS_AT_ONCE][3];
    const unsigned refused = FN(rows_stats)(x + first * n, n, count, call->eps, st);
    for (ptrdiff_t i = 0; i < count; ++i) {
        const ptrdiff_t g = first + i;
        const channel_group group = {
            DTYPE,
            channels,
            call->space,
            .x = x + g * n,
            .gain = call->gain ? (const T *)call->gain + g * channels : NULL,
            .bias = call->bias ? (const T *)call->bias + g * channels : NULL,
            .out = (X *)call->y + sample * call->y_stride + g * n,
        };
        if (refused >> i & 1) f64_group_norm(group, call->eps, 1, st[i]);
        else FN(write_group)(&group, carry, st[i]);
    }
    if (call->stats) memcpy((T *)call->stats + 3 * (sample * call->groups + first), st, (size_t)count * sizeof *st);
}

static void FN(group_norm)(const cnorm_volume_norm *call)
{
    const ptrdiff_t groups = call->groups, n = call->channels / groups * call->space;
    if (groups == 1 && call->space == 1) {
        FN(layer_norm)(&(cnorm_norm){.rows = call->samples,
                                     .n = call->channels,
                                     .x = call->x,
                                     .x_stride = call->x_stride,
                                     .gain = call->gain,
                                     .bias = call->bias,
                                     .eps = call->eps,
                                     .y = call->y,
                                     .y_stride = call->y_stride,
                                     .stats = call->stats,
                                     .hints = call->hints});
        return;
    }
    /* as many groups at once as stay in L1 until they are written */
    const ptrdiff_t fit = FN(CACHED) / n, most = fit < 1 ? 1 : fit < ROWS_AT_ONCE ? fit : ROWS_AT_ONCE;
    FN(carry) carried = {.to = 0}, *carry = call->hints & NT_STORES ? &carried : NULL;
    for (ptrdiff_t sample = 0; sample < call->samples; ++sample)
        for (ptrdiff_t g = 0; g < groups; g += most)
            FN(norm_groups)(call, sample, g, groups - g < most ? groups - g : most, carry);
    if (carry) FN(finish)(carry);
}

/* (5) and (6) for space = 1: the group is row 0 of a call of layer norm, with gain, dgain and dbias in `to`. The
 * strides only give the prefetch distances: the next group is adjacent. */
INLINE void FN(backward_channels)(const channel_group *group, const T st[3], FN(carry) *carry)
{
    const cnorm_norm_backward call = {.rows = 1,
                                      .n = group->channels,
                                      .dy = group->dy,
                                      .dy_stride = group->channels,
                                      .x = group->x,
                                      .x_stride = group->channels,
                                      .stats = st,
                                      .dx = group->out};
    const FN(param_grads) to = {group->gain, group->dgain, group->dbias};
    if (FN(rstd_in_range)(st) && FN(late_row)(&call, &to, 0, 1, carry)) return;
    FN(rescue_gradient)(&call, to, 0, 1, 0);
}

/* the same for space > 1; false if a sum overflowed, and (6) was not done */
INLINE int FN(backward_group)(const channel_group *group, const T st[3], FN(carry) *carry)
{
    const ptrdiff_t channels = group->channels;
    const T one = 1, *const gain = group->gain ? group->gain : &one;
    const ptrdiff_t step = group->gain ? 1 : 0; /* of conditions in its loops GCC would make copies of them */
    double G = 0, H = 0;
    for (ptrdiff_t c = 0; c < channels; ++c) {
        const FN(run) run = FN(channel_of)(group, c, st);
        double A, B;
        FN(run_gradient_sums)(&run, NULL, &A, &B);
        G += A * (double)gain[c * step];
        H += B * (double)gain[c * step];
        ((T *)group->dgain)[c] += (T)B;
        ((T *)group->dbias)[c] += (T)A;
    }
    if (!(fabs(G) <= SUM_MAX && fabs(H) <= SUM_MAX)) return 0;
    G /= (double)(channels * group->space);
    H /= (double)(channels * group->space);
    for (ptrdiff_t c = 0; c < channels; ++c) {
        const FN(run) run = FN(channel_of)(group, c, st);
        FN(gradient_run)(&run, gain[c * step], (T)G, (T)H, carry);
    }
    return 1;
}

/* One block of samples: dgain and dbias are overwritten by this block's sums */
static void FN(group_norm_backward)(const cnorm_volume_norm_backward *call)
{
    const ptrdiff_t groups = call->groups, channels = call->channels / groups, n = channels * call->space;
    memset(call->dgain, 0, (size_t)call->channels * sizeof(T));
    memset(call->dbias, 0, (size_t)call->channels * sizeof(T));
    FN(carry) carried = {.to = 0}, *carry = call->hints & NT_STORES ? &carried : NULL;
    for (ptrdiff_t i = 0; i < call->samples * groups; ++i) {
        const ptrdiff_t sample = i / groups, g = i % groups;
        channel_group group = {DTYPE, channels, call->space, .out = (X *)call->dx + sample * call->dx_stride + g * n};
        group.dy = (const X *)call->dy + sample * call->dy_stride + g * n;
        group.x = (const X *)call->x + sample * call->x_stride + g * n;
        group.dgain = (T *)call->dgain + g * channels;
        group.dbias = (T *)call->dbias + g * channels;
        if (call->gain) group.gain = (const T *)call->gain + g * channels;
        const T *st = (const T *)call->stats + 3 * i;
        if (call->space == 1) FN(backward_channels)(&group, st, carry);
        else if (!FN(rstd_in_range)(st)) /* or NaN */ f64_group_backward(group, st, 0);
        else if (!FN(backward_group)(&group, st, carry)) f64_group_backward(group, st, 1);
    }
    if (carry) FN(finish)(carry);
}
