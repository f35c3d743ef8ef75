/* Batch norm with a given mean and variance, forward and backward: (4) of batch_norm.inl.h with K = mean and no
 * delta. */

/* K, rstd and scale of each channel from the given mean and variance */
static NOINLINE void FN(given_stats)(const T *mean, const T *var, double eps, ptrdiff_t channels, FN(batch) *b)
{
    b->given = 1;
    for (ptrdiff_t c = 0; c < channels; ++c) {
        const double sum = (double)var[c] + eps, rstd = sum == 0 ? 0 : 1.0 / sqrt(sum), gain = (double)b->gain[c];
        b->K[c] = mean[c];
        b->delta[c] = 0;
        b->rstd[c] = (T)rstd;
        b->scale[c] = (T)(gain * rstd);
        if (FN(representable)(mean[c], b->scale[c], gain, rstd) && FN(representable)(mean[c], b->rstd[c], 1, rstd))
            continue;
        const double scale = sizeof(T) == 8 ? 0.25 : 1; /* x - mean stays finite in float64 */
        b->any_f64 = 1;
        b->f64[c] = (f64_stats){scale, (double)mean[c] * scale, 0, rstd / scale, rstd};
    }
}

static void FN(batch_norm_inference)(const cnorm_volume_norm *call)
{
    const FN(volume) v = {call->samples,
                          call->channels,
                          call->space,
                          .x = call->x,
                          .x_stride = call->x_stride,
                          .out = call->y,
                          .out_stride = call->y_stride};
    FN(batch) b = FN(batch_of)(call->scratch, &v, call->gain, call->bias);
    FN(given_stats)(call->mean, call->var, call->eps, call->channels, &b);
    FN(batch_output)(&v, &b, call->hints & STREAMING);
}

static void FN(batch_norm_inference_backward)(const cnorm_volume_norm_backward *call)
{
    const FN(volume) v = {call->samples,   call->channels, call->space, call->dy,       call->x,
                          call->dy_stride, call->x_stride, call->dx,    call->dx_stride};
    FN(batch) b = FN(batch_of)(call->scratch, &v, call->gain, NULL);
    FN(given_stats)(call->mean, call->var, call->eps, v.channels, &b);
    FN(batch_gradient_sums)(&v, call->dgain, call->dbias, &b);
    b.any_f64 = 0;
    /* dx = scale dy is (4) about zero, whether or not its sums overflowed */
    for (ptrdiff_t c = 0; c < v.channels; ++c) {
        f64_stats *e = &b.f64[c];
        b.K[c] = 0;
        e->origin = 0;
        if (e->scale != DONE_IN_T && FN(representable)(0, b.scale[c], (double)b.gain[c], e->inv_std_dev))
            e->scale = DONE_IN_T;
        b.any_f64 |= e->scale != DONE_IN_T;
    }
    FN(volume) of_dy = v;
    of_dy.x = v.dy;
    of_dy.x_stride = v.dy_stride;
    FN(batch_output)(&of_dy, &b, call->hints & STREAMING);
}
