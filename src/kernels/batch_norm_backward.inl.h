/* The backward pass of batch_norm.inl.h: (5) and (6). */

/* (5): sums in sum and sum2, dgain and dbias [channels] written. Channels whose sums overflow are done in float64. */
static void FN(batch_gradient_sums)(const FN(volume) *v, T *dgain, T *dbias, FN(batch) *b)
{
    FN(channel_sums)(v, v->space, 1, b->K, b);
    for (ptrdiff_t c = 0; c < v->channels; ++c) {
        FN(f64_stats) *e = &b->f64[c];
        if (e->scale == 0 && !(fabs(b->sum[c]) <= SUM_MAX && fabs(b->sum2[c]) <= SUM_MAX)) {
            b->any_f64 = 1;
            *e = (FN(f64_stats)){.scale = 1,
                                 .origin = (double)b->K[c],
                                 .delta = (double)b->delta[c],
                                 .rstd = (double)b->rstd[c],
                                 .inv_std_dev = (double)b->rstd[c]};
        }
        if (e->scale != 0) {
            b->sum[c] = b->sum2[c] = 0;
            for (ptrdiff_t sample = 0; sample < v->samples; ++sample)
                for (ptrdiff_t j = c * v->space; j < (c + 1) * v->space; ++j) {
                    const double dy = (double)FN(value)(v->dy[sample * v->dy_stride + j]);
                    b->sum[c] += dy;
                    b->sum2[c] +=
                        dy * FN(f64_xhat)(e, (double)FN(value)(v->x[sample * v->x_stride + j]));
                }
        }
        dbias[c] = (T)b->sum[c];
        dgain[c] = (T)b->sum2[c];
    }
}

/* (6) in float64 for one channel's run */
RARE void FN(f64_gradient_run)(const FN(run) *run, const FN(f64_stats) *e, double gain, double G,
                               double H)
{
    for (ptrdiff_t j = 0; j < run->n; ++j) {
        const double g = (double)FN(value)(run->dy[j]) * gain,
                     xhat = FN(f64_xhat)(e, (double)FN(value)(run->x[j]));
        run->out[j] = FN(stored)((T)FN(times_inv_std_dev)(e, (g - G) - xhat * H, 0));
    }
}

static void FN(batch_norm_backward)(const cnorm_volume_norm_backward *call)
{
    const FN(volume) v = {call->samples,   call->channels, call->space, call->dy,       call->x,
                          call->dy_stride, call->x_stride, call->dx,    call->dx_stride};
    const ptrdiff_t channels = v.channels, N = v.samples * v.space;
    FN(batch) b = FN(batch_of)(call->scratch, &v, call->gain, NULL);
    for (ptrdiff_t c = 0; c < channels; ++c) {
        const T *st = (const T *)call->stats + 3 * c;
        b.K[c] = st[0], b.delta[c] = st[1], b.rstd[c] = st[2];
        if (FN(rstd_in_range)(st)) continue; /* false for NaN */
        b.any_f64 = 1;
        b.f64[c] = FN(f64_given_stats)(FN(copy_channel)(&v, c, &b), N, st, 1);
    }
    FN(batch_gradient_sums)(&v, call->dgain, call->dbias, &b);
    for (ptrdiff_t c = 0; c < channels; ++c) {
        b.sum[c] *= (double)b.gain[c] / (double)N;
        b.sum2[c] *= (double)b.gain[c] / (double)N;
        b.G[c] = (T)b.sum[c];
        b.H[c] = (T)b.sum2[c];
    }
    FN(carry) kept = {.to = 0}, *carry = call->streaming ? &kept : NULL;
    const int by_columns = v.space == 1 && !b.any_f64;
    if (by_columns) FN(write_all_columns)(&v, 1, &b, 0, carry);
    for (ptrdiff_t i = 0; !by_columns && i < v.samples * channels; ++i) {
        const ptrdiff_t sample = i / channels, c = i % channels, at = c * v.space;
        const T st[3] = {b.K[c], b.delta[c], b.rstd[c]};
        const FN(run) run = {v.space, v.dy + sample * v.dy_stride + at,
                             v.x + sample * v.x_stride + at, v.out + sample * v.out_stride + at,
                             st};
        if (b.f64[c].scale == 0) FN(gradient_run)(&run, b.gain[c], b.G[c], b.H[c], carry);
        else FN(f64_gradient_run)(&run, &b.f64[c], (double)b.gain[c], b.sum[c], b.sum2[c]);
    }
    if (carry) {
        FN(flush)(carry);
        stream_fence();
    }
}
