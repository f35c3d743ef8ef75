/* Channels of batch_norm.inl.h that are done in float64: those whose f64.scale is not 0. In a matrix (space = 1)
 * LANES_F64 channels are read at a time, one in each lane; otherwise each run of `space` elements is one of
 * row_float64.inl.h. */

/* channels c to c + LANES_F64 of a matrix */
static FN(tile) FN(column_tile)(const FN(volume) *v, ptrdiff_t c, const FN(batch) *b)
{
    const ptrdiff_t count = v->channels - c < LANES_F64 ? v->channels - c : LANES_F64;
    return (FN(tile)){.dy = v->dy ? v->dy + c : NULL,
                      .x = v->x + c,
                      .dy_stride = v->dy_stride,
                      .x_stride = v->x_stride,
                      .rows = v->samples,
                      .n = count,
                      .gain = b->gain + c,
                      .bias = b->bias + c,
                      .out = v->out + c,
                      .out_stride = v->out_stride};
}

static FN(tile) FN(channel_tile)(const FN(volume) *v, ptrdiff_t sample, ptrdiff_t c)
{
    const ptrdiff_t at = c * v->space;
    return FN(run_tile)(v->dy ? v->dy + sample * v->dy_stride + at : NULL, v->x + sample * v->x_stride + at, v->space,
                        NULL);
}

/* S and Q, or backward A and B, of channel c, or in a matrix of each channel from c on */
static void FN(f64_channel_sums)(const FN(volume) *v, ptrdiff_t c, int backward, const FN(batch) *b,
                                 double sums[2][LANES_F64])
{
    memset(sums, 0, 2 * sizeof *sums);
    for (ptrdiff_t sample = 0; v->space > 1 && sample < v->samples; ++sample) {
        const FN(tile) t = FN(channel_tile)(v, sample, c);
        double of_run[2] = {0};
        FN(f64_run_sums)(&t, &b->f64[c], backward ? &UNSCALED : NULL, of_run);
        sums[0][0] += of_run[0];
        sums[1][0] += of_run[1];
    }
    if (v->space > 1) return;
    FN(tile) t = FN(column_tile)(v, c, b);
    const wide_stats e = wide_stats_of_each(b->f64 + c, t.n);
    t.gain = NULL, t.all_gain = 1;
    for (ptrdiff_t r = 0; r < t.rows; r += FOLD) {
        const ptrdiff_t end = t.rows - r < FOLD ? t.rows : r + FOLD;
        wide_f64 lanes[2];
        FN(f64_lane_sums)(&t, r, end, &e, backward ? &UNSCALED : NULL, lanes);
        for (int k = 0; k < 2; ++k)
            for (int i = 0; i < LANES_F64; ++i) sums[k][i] += lanes[k].v[i / VL_F64][i % VL_F64];
    }
}

/* the largest finite |x| of the same channels, where T is float64 */
static void FN(f64_channel_largest)(const FN(volume) *v, ptrdiff_t c, const FN(batch) *b, double largest[LANES_F64])
{
    memset(largest, 0, LANES_F64 * sizeof *largest);
    for (ptrdiff_t sample = 0; v->space > 1 && sample < v->samples; ++sample) {
        const FN(tile) t = FN(channel_tile)(v, sample, c);
        double lanes[LANES_F64];
        FN(f64_lane_largest)(&t, lanes);
        for (int i = 0; i < LANES_F64; ++i) largest[0] = larger_finite(largest[0], lanes[i]);
    }
    const FN(tile) t = FN(column_tile)(v, c, b);
    if (v->space == 1) FN(f64_lane_largest)(&t, largest);
}

/* (3) for those of `count` channels from c on whose f64.scale is -2. With rstd [count], the given ones, backward. */
static void FN(f64_channel_stats)(const FN(volume) *v, ptrdiff_t c, ptrdiff_t count, double eps, const FN(batch) *b,
                                  double *moments, const T *rstd)
{
    const double N = (double)(v->samples * v->space);
    double sums[2][LANES_F64], largest[LANES_F64];
    f64_stats *e = b->f64 + c;
    int again[LANES_F64] = {0}, any = 1;
    if (sizeof(T) == 8) FN(f64_channel_largest)(v, c, b, largest);
    for (ptrdiff_t i = 0; i < count; ++i) {
        again[i] = e[i].scale == -2;
        if (!again[i]) continue;
        e[i] = (f64_stats){.scale = sizeof(T) == 8 ? scale_for(largest[i]) : 1};
        e[i].origin = (double)FN(value)(v->x[(c + i) * v->space]) * e[i].scale;
    }
    for (int sweep = 0; sweep < 2 && any; ++sweep) {
        any = 0;
        FN(f64_channel_sums)(v, c, 0, b, sums);
        for (ptrdiff_t i = 0; i < count; ++i) {
            if (!again[i]) continue;
            f64_stats without_eps = e[i];
            const double of_channel[2] = {sums[0][i], sums[1][i]};
            FN(f64_mean_and_rstd)(&without_eps, of_channel, N, 0, 1);
            any |= again[i] = FN(f64_mean_and_rstd)(&e[i], of_channel, N, eps, 1);
            if (moments) {
                const double inverse = without_eps.inv_std_dev;
                moments[c + i] = (e[i].origin + e[i].delta) / e[i].scale;
                moments[v->channels + c + i] = inverse == 0 ? 0 : 1.0 / inverse / inverse;
            }
            if (rstd) {
                if (!again[i]) FN(f64_keep_rstd)(rstd[i], &e[i]);
                continue;
            }
            T st[3];
            FN(f64_store_stats)(&e[i], st);
            b->K[c + i] = st[0], b->delta[c + i] = st[1], b->rstd[c + i] = st[2];
        }
    }
    for (ptrdiff_t i = 0; i < count && rstd; ++i)
        if (again[i]) FN(f64_keep_rstd)(rstd[i], &e[i]);
}

/* the same for all channels */
static NOINLINE void FN(f64_channels)(const FN(volume) *v, double eps, const FN(batch) *b, double *moments,
                                      const T *rstd)
{
    const ptrdiff_t step = v->space == 1 ? LANES_F64 : 1;
    for (ptrdiff_t c = 0; c < v->channels; c += step) {
        const ptrdiff_t count = v->channels - c < step ? v->channels - c : step;
        int any = 0;
        for (ptrdiff_t i = c; i < c + count; ++i) any |= b->f64[i].scale == -2;
        if (any) FN(f64_channel_stats)(v, c, count, eps, b, moments, rstd ? rstd + c : NULL);
    }
}

/* (5): sum, sum2 of the channels that are done in float64 */
static NOINLINE void FN(f64_channel_gradients)(const FN(volume) *v, const FN(batch) *b)
{
    const ptrdiff_t step = v->space == 1 ? LANES_F64 : 1;
    for (ptrdiff_t c = 0; c < v->channels; c += step) {
        const ptrdiff_t end = v->channels - c < step ? v->channels : c + step;
        int any = 0;
        for (ptrdiff_t i = c; i < end; ++i) any |= b->f64[i].scale != 0;
        if (!any) continue;
        double sums[2][LANES_F64];
        FN(f64_channel_sums)(v, c, 1, b, sums);
        for (ptrdiff_t i = c; i < end; ++i)
            if (b->f64[i].scale != 0) b->sum[i] = sums[0][i - c], b->sum2[i] = sums[1][i - c];
    }
}

/* (4), or backward (6), for one run of channel c */
static NOINLINE void FN(f64_write_run)(const FN(run) *run, ptrdiff_t c, int backward, const FN(batch) *b)
{
    FN(tile) t = FN(run_tile)(run->dy, run->x, run->n, run->out);
    const wide_stats e = wide_stats_of(&b->f64[c]);
    t.all_gain = (double)b->gain[c];
    t.all_bias = (double)b->bias[c];
    if (!backward) {
        FN(f64_write)(&t, &e);
        return;
    }
    const f64_gradient of_channel = f64_gradient_of(&b->f64[c], b->sum[c], b->sum2[c], 0);
    const wide_gradient d = wide_gradient_of(&of_channel, UNSCALED);
    FN(f64_write_gradient)(&t, &e, &d);
}

/* the same for a tile of channels from c on */
static NOINLINE void FN(f64_write_tile)(const FN(tile) *t, ptrdiff_t c, int backward, const FN(batch) *b)
{
    const wide_stats e = wide_stats_of_each(b->f64 + c, t->n);
    if (!backward) {
        FN(f64_write)(t, &e);
        return;
    }
    double lanes[5][LANES_F64] = {{0}};
    for (ptrdiff_t i = 0; i < t->n; ++i) {
        if (b->f64[c + i].scale == 0) continue;
        const f64_gradient d = f64_gradient_of(&b->f64[c + i], b->sum[c + i], b->sum2[c + i], 0);
        lanes[0][i] = d.G, lanes[1][i] = d.H, lanes[2][i] = d.rstd, lanes[3][i] = d.unit, lanes[4][i] = d.last_unit;
    }
    wide_gradient d = {.scales = {1, 1}};
    memcpy(&d.G, lanes[0], sizeof d.G), memcpy(&d.H, lanes[1], sizeof d.H), memcpy(&d.rstd, lanes[2], sizeof d.rstd);
    memcpy(&d.unit, lanes[3], sizeof d.unit), memcpy(&d.last_unit, lanes[4], sizeof d.last_unit);
    FN(f64_write_gradient)(t, &e, &d);
}

/* (4) or (6) for the columns of `t`, of which some are done in float64 and some in T: both, 64 rows at a time */
static NOINLINE void FN(write_mixed_tile)(const FN(tile) *t, FN(volume) v, ptrdiff_t c, int backward,
                                          const FN(batch) *of_tile, const FN(batch) *b)
{
    enum { ROWS = CNORM_BLOCK_ROWS };
    X both[2][ROWS][LANES_F64];
    FN(tile) rows = *t;
    for (ptrdiff_t r = 0; r < t->rows; r += ROWS) {
        v.samples = rows.rows = t->rows - r < ROWS ? t->rows - r : ROWS;
        v.x = rows.x = t->x + r * t->x_stride;
        if (t->dy) v.dy = rows.dy = t->dy + r * t->dy_stride;
        v.out = both[0][0], rows.out = both[1][0];
        v.out_stride = rows.out_stride = LANES_F64;
        FN(write_matrix)(&v, backward, of_tile, NULL);
        FN(f64_write_tile)(&rows, c, backward, b);
        for (ptrdiff_t k = 0; k < v.samples; ++k)
            for (ptrdiff_t i = 0; i < t->n; ++i)
                t->out[(r + k) * t->out_stride + i] = both[b->f64[c + i].scale != 0][k][i];
    }
}

/* (4) or (6) for a matrix with channels that are done in float64 */
static NOINLINE void FN(write_f64_columns)(const FN(volume) *v, int backward, const FN(batch) *b)
{
    for (ptrdiff_t c = 0; c < v->channels; c += LANES_F64) {
        const FN(tile) t = FN(column_tile)(v, c, b);
        FN(volume) part = *v;
        FN(batch) of_part = *b;
        ptrdiff_t of_f64 = 0;
        for (ptrdiff_t i = 0; i < t.n; ++i) of_f64 += b->f64[c + i].scale != 0;
        part.channels = t.n, part.x = t.x, part.dy = t.dy, part.out = t.out;
        of_part.K += c, of_part.delta += c, of_part.rstd += c, of_part.scale += c;
        of_part.gain += c, of_part.bias += c, of_part.G += c, of_part.H += c;
        if (of_f64 == 0) FN(write_matrix)(&part, backward, &of_part, NULL);
        else if (of_f64 == t.n) FN(f64_write_tile)(&t, c, backward, b);
        else FN(write_mixed_tile)(&t, part, c, backward, &of_part, b);
    }
}
