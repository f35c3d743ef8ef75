/* The backward pass of batch_norm.inl.h: (5) and (6). */

/* (5): sums in sum and sum2, dgain and dbias [channels] written. Channels whose sums overflow are done in float64. */
static void FN(batch_gradient_sums)(FN(batch) *b, T *dgain, T *dbias)
{
    const volume *v = &b->v;
    FN(channel_sums)(b, v->space, 1, b->K);
    for (ptrdiff_t c = 0; c < v->channels; ++c) {
        if (v->state[c] != IN_T || (fabs(v->sum[c]) <= SUM_MAX && fabs(v->sum2[c]) <= SUM_MAX)) continue;
        const double rstd = (double)b->rstd[c];
        b->any_f64 = 1;
        v->state[c] = IN_F64;
        v->stats[c] = (f64_stats){1, (double)b->K[c], (double)b->delta[c], rstd, rstd};
    }
    if (b->any_f64) f64_channel_gradients(v);
    TN(narrow_array)(v->channels, v->sum, dbias);
    TN(narrow_array)(v->channels, v->sum2, dgain);
}

static void FN(batch_norm_backward)(const cnorm_volume_norm_backward *call)
{
    FN(batch) b = FN(batch_of)(volume_backward(DTYPE, call), call->scratch, call->gain, NULL);
    const volume *v = &b.v;
    const ptrdiff_t channels = v->channels, N = v->samples * v->space;
    for (ptrdiff_t c = 0; c < channels; ++c) {
        const T *st = (const T *)call->stats + 3 * c;
        b.K[c] = st[0], b.delta[c] = st[1], b.rstd[c] = st[2];
        if (FN(rstd_in_range)(st)) continue; /* false for NaN */
        b.any_f64 = 1;
        v->state[c] = f64_stats_from(DTYPE, st, &v->stats[c]) ? IN_F64 : STATS_IN_F64;
    }
    if (b.any_f64) f64_channels(v, 0, NULL, 1);
    FN(batch_gradient_sums)(&b, call->dgain, call->dbias);
    for (ptrdiff_t c = 0; c < channels; c += VL_F64) {
        const ptrdiff_t count = channels - c;
        const f64v share = TN(elements)(b.gain + c, count) / (double)N;
        store_first_f64(v->sum + c, count, load_first_f64(v->sum + c, count) * share);
        store_first_f64(v->sum2 + c, count, load_first_f64(v->sum2 + c, count) * share);
    }
    TN(narrow_array)(channels, v->sum, b.G);
    TN(narrow_array)(channels, v->sum2, b.H);
    FN(batch_output)(&b, 1, call->hints & NT_STORES);
}
