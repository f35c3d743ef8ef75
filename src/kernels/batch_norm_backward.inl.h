/* The backward pass of batch_norm.inl.h: (5) and (6). */

/* (5): sums in sum and sum2, dgain and dbias [channels] written. Channels whose sums overflow are done in float64. */
static void FN(batch_gradient_sums)(const FN(volume) *v, T *dgain, T *dbias, FN(batch) *b)
{
    FN(channel_sums)(v, v->space, 1, b->K, b);
    for (ptrdiff_t c = 0; c < v->channels; ++c) {
        f64_stats *e = &b->f64[c];
        if (e->scale != DONE_IN_T || (fabs(b->sum[c]) <= SUM_MAX && fabs(b->sum2[c]) <= SUM_MAX)) continue;
        b->any_f64 = 1;
        *e = (f64_stats){1, (double)b->K[c], (double)b->delta[c], (double)b->rstd[c], (double)b->rstd[c]};
    }
    const f64_batch in_f64 = FN(in_f64)(v, b);
    if (b->any_f64) f64_channel_gradients(&in_f64);
    TN(narrow_array)(v->channels, b->sum, dbias);
    TN(narrow_array)(v->channels, b->sum2, dgain);
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
        if (!f64_stats_from(DTYPE, st, &b.f64[c])) b.f64[c].scale = STATS_IN_F64;
    }
    const f64_batch in_f64 = FN(in_f64)(&v, &b);
    if (b.any_f64) f64_channels(&in_f64, 0, NULL, 1);
    FN(batch_gradient_sums)(&v, call->dgain, call->dbias, &b);
    for (ptrdiff_t c = 0; c < channels; c += VL_F64) {
        const ptrdiff_t count = channels - c;
        const f64v share = TN(elements)(b.gain + c, count) / (double)N;
        store_first_f64(b.sum + c, count, load_first_f64(b.sum + c, count) * share);
        store_first_f64(b.sum2 + c, count, load_first_f64(b.sum2 + c, count) * share);
    }
    TN(narrow_array)(channels, b.sum, b.G);
    TN(narrow_array)(channels, b.sum2, b.H);
    FN(carry) carried = {.to = 0}, *carry = call->hints & STREAMING ? &carried : NULL;
    if (v.space == 1 && b.any_f64) FN(write_f64_columns)(&v, 1, &b);
    else if (v.space == 1) FN(write_matrix)(&v, 1, &b, carry);
    for (ptrdiff_t i = 0; v.space > 1 && i < v.samples * channels; ++i) {
        const ptrdiff_t sample = i / channels, c = i % channels, at = c * v.space;
        const T st[3] = {b.K[c], b.delta[c], b.rstd[c]};
        const FN(run) run = {v.space, v.dy + sample * v.dy_stride + at, v.x + sample * v.x_stride + at,
                             v.out + sample * v.out_stride + at, st};
        if (b.f64[c].scale == DONE_IN_T) FN(gradient_run)(&run, b.gain[c], b.G[c], b.H[c], carry);
        else f64_write_run(&in_f64, sample, c, 1);
    }
    if (carry) {
        FN(flush)(carry);
        nt_fence();
    }
}
