/* Batch norm with a given mean and variance, forward and backward: (4) of batch_norm.inl.h with K = mean and no
 * delta. */

/* K, rstd and scale of each channel from the given mean and variance */
static NOINLINE void FN(given_stats)(FN(batch) *b, const T *mean, const T *var, double eps)
{
    b->given = 1;
    for (ptrdiff_t c = 0; c < b->v.channels; ++c) {
        const double sum = (double)var[c] + eps, rstd = sum == 0 ? 0 : 1.0 / sqrt(sum), gain = (double)b->gain[c];
        b->K[c] = mean[c];
        b->delta[c] = 0;
        b->rstd[c] = (T)rstd;
        b->scale[c] = (T)(gain * rstd);
        if (FN(representable)(mean[c], b->scale[c], gain, rstd) && FN(representable)(mean[c], b->rstd[c], 1, rstd))
            continue;
        const double scale = sizeof(T) == 8 ? 0.25 : 1; /* x - mean stays finite in float64 */
        b->any_f64 = 1;
        b->v.state[c] = IN_F64;
        b->v.stats[c] = (f64_stats){scale, (double)mean[c] * scale, 0, rstd / scale, rstd};
    }
}

static void FN(batch_norm_inference)(const cnorm_volume_norm *call)
{
    FN(batch) b = FN(batch_of)(volume_of(DTYPE, call), call->scratch, call->gain, call->bias);
    FN(given_stats)(&b, call->mean, call->var, call->eps);
    FN(batch_output)(&b, 0, call->hints & NT_STORES);
}

static void FN(batch_norm_inference_backward)(const cnorm_volume_norm_backward *call)
{
    FN(batch) b = FN(batch_of)(volume_backward(DTYPE, call), call->scratch, call->gain, NULL);
    const volume *v = &b.v;
    FN(given_stats)(&b, call->mean, call->var, call->eps);
    FN(batch_gradient_sums)(&b, call->dgain, call->dbias);
    b.any_f64 = 0;
    /* dx = scale dy is (4) about zero, whether or not its sums overflowed */
    for (ptrdiff_t c = 0; c < v->channels; ++c) {
        b.K[c] = 0;
        v->stats[c].origin = 0;
        if (FN(representable)(0, b.scale[c], (double)b.gain[c], v->stats[c].inv_std_dev)) v->state[c] = IN_T;
        b.any_f64 |= v->state[c] != IN_T;
    }
    b.v.x = v->dy;
    b.v.x_stride = v->dy_stride;
    FN(batch_output)(&b, 0, call->hints & NT_STORES);
}
