/* Batch norm of a matrix, space = 1: sums and output of a few rows at a time, so that the sums and
 * parameters of a column are loaded once for all of these rows. Each column is summed in a lane of
 * its own. */

/* (1), or backward (5): block += d and block2 += d^2, or block += dy and block2 += dy xhat, over `rows` rows from row
 * `first` on. Vectors begin `lane_offset` lanes before the row. */
INLINE void FN(sum_columns)(const ptrdiff_t rows, const int backward, const FN(volume) *volume, ptrdiff_t first,
                            const T *centre, ptrdiff_t lane_offset, const FN(batch) *batch)
{
    /* Copies: the compiler must assume that a store may change the originals. */
    const FN(volume) of_volume = *volume;
    const FN(volume) *v = &of_volume;
    const FN(batch) of_batch = *batch;
    const FN(batch) *b = &of_batch;
    const ptrdiff_t channels = v->channels;
    for (ptrdiff_t j = -lane_offset; j < channels; j += VL) {
        const ptrdiff_t from = j < 0 ? -j : 0, to = channels - j < VL ? channels - j : VL;
        const V K = FN(take_T)(centre + j, from, to);
        V s = FN(take_T)(b->block + j, from, to), q = FN(take_T)(b->block2 + j, from, to);
        for (ptrdiff_t r = first; r < first + rows; ++r) {
            const V d = FN(take)(v->x + r * v->x_stride + j, from, to) - K;
            if (backward) {
                const V g = FN(take)(v->dy + r * v->dy_stride + j, from, to);
                s += g;
                q += g * ((d - FN(take_T)(b->delta + j, from, to)) * FN(take_T)(b->rstd + j, from, to));
            } else {
                s += d;
                q += d * d;
            }
        }
        FN(put_T)(b->block + j, from, to, s);
        FN(put_T)(b->block2 + j, from, to, q);
    }
}

/* (1), or backward (5), of all rows: sum and sum2, in blocks of CNORM_BLOCK_ROWS, each added to float64 */
INLINE void FN(sum_all_columns)(const FN(volume) *v, const int backward, const T *K, const FN(batch) *b)
{
    const ptrdiff_t channels = v->channels;
    const ptrdiff_t lane_offset = ALIGN_LOADS && v->x_stride % VL == 0 ? FN(lane_offset_of)(v->x) : 0;
    for (ptrdiff_t begin = 0; begin < v->samples; begin += CNORM_BLOCK_ROWS) {
        const ptrdiff_t end = v->samples - begin < CNORM_BLOCK_ROWS ? v->samples : begin + CNORM_BLOCK_ROWS;
        memset(b->block, 0, (size_t)channels * sizeof(T));
        memset(b->block2, 0, (size_t)channels * sizeof(T));
        ptrdiff_t row = begin;
        /* Several rows at a time: the running sums are loaded and stored that much less often. Eight at
         * most, since L1 has eight ways: of more lines a multiple of 4096 bytes apart, some are
         * evicted. Backward four, because an unaligned vector of dy covers two lines. */
        for (; !backward && row + 8 <= end; row += 8) FN(sum_columns)(8, 0, v, row, K, lane_offset, b);
        for (; backward && row + 4 <= end; row += 4) FN(sum_columns)(4, 1, v, row, K, lane_offset, b);
        if (row < end) FN(sum_columns)(end - row, backward, v, row, K, lane_offset, b);
        TN(add_wide)(channels, b->sum, b->block);
        TN(add_wide)(channels, b->sum2, b->block2);
    }
}

/* Parameters of (4), or backward of (6), for the columns of one vector. `given`, a constant at every call: delta is 0
 * and not loaded, which saves one of five arrays. */
typedef struct {
    V K, delta, scale, bias, rstd, gain, G, H;
} FN(columns);

INLINE FN(columns)
    FN(columns_at)(const FN(batch) *b, ptrdiff_t j, ptrdiff_t from, ptrdiff_t to, const int backward, const int given)
{
    FN(columns) c = {.K = FN(take_T)(b->K + j, from, to)};
    if (!given) c.delta = FN(take_T)(b->delta + j, from, to);
    if (backward) {
        c.rstd = FN(take_T)(b->rstd + j, from, to);
        c.gain = FN(take_T)(b->gain + j, from, to);
        c.G = FN(take_T)(b->G + j, from, to);
        c.H = FN(take_T)(b->H + j, from, to);
    } else {
        c.scale = FN(take_T)(b->scale + j, from, to);
        c.bias = FN(take_T)(b->bias + j, from, to);
    }
    return c;
}

/* (4) or (6) for lanes from <= i < to of the vector at column j of row r */
INLINE V FN(column_output)(const FN(columns) *c, const FN(volume) *v, ptrdiff_t r, ptrdiff_t j, ptrdiff_t to,
                           const int backward, const int given)
{
    const ptrdiff_t from = j < 0 ? -j : 0;
    V d = FN(take)(v->x + r * v->x_stride + j, from, to) - c->K;
    if (!given) d -= c->delta;
    if (!backward) return d * c->scale + c->bias;
    const V dy = FN(take)(v->dy + r * v->dy_stride + j, from, to);
    return c->rstd * ((dy * c->gain - c->G) - d * c->rstd * c->H);
}

/* the partial vectors that rows begin and end in, for write_columns */
static NOINLINE void FN(write_column_edges)(const FN(volume) *v, const FN(batch) *b, ptrdiff_t first, ptrdiff_t rows,
                                            int backward, ptrdiff_t lane_offset, FN(carry) *carry)
{
    const ptrdiff_t n = v->channels, end = (n + lane_offset) / VL * VL - lane_offset;
    for (ptrdiff_t r = first; r < first + rows; ++r)
        for (ptrdiff_t j = lane_offset ? -lane_offset : end; j < n; j = j < end ? end : n) {
            const ptrdiff_t from = j < 0 ? -j : 0, to = n - j < VL ? n - j : VL;
            const FN(columns) c = FN(columns_at)(b, j, from, to, backward, 0);
            const V y = FN(column_output)(&c, v, r, j, to, backward, 0);
            FN(put_range)(v->out + r * v->out_stride + j, from, to, y, carry);
        }
}

/* (4) or (6) for `rows` rows from row `first` on. carry is NULL unless out is written by non-temporal stores; then the
 * rows, if more than one, have the same lane offset. */
INLINE void FN(write_columns)(ptrdiff_t rows, const int backward, const FN(volume) *volume, ptrdiff_t first,
                              const FN(batch) *batch, const int given, FN(carry) *carry)
{
    const FN(volume) of_volume = *volume; /* as above */
    const FN(volume) *v = &of_volume;
    const FN(batch) of_batch = *batch;
    const FN(batch) *b = &of_batch;
    const ptrdiff_t n = v->channels, lane_offset = carry ? FN(lane_offset_of)(v->out + first * v->out_stride) : 0;
    const ptrdiff_t end = (n + lane_offset) / VL * VL - lane_offset;
    for (ptrdiff_t j = lane_offset ? VL - lane_offset : 0; j < end; j += VL) {
        const FN(columns) c = FN(columns_at)(b, j, 0, VL, backward, given);
        for (ptrdiff_t r = first; r < first + rows; ++r) {
            const V y = FN(column_output)(&c, v, r, j, VL, backward, given);
            if (carry) FN(nt_store)(v->out + r * v->out_stride + j, y);
            else FN(store)(v->out + r * v->out_stride + j, y);
        }
    }
    if (lane_offset || end < n) FN(write_column_edges)(volume, batch, first, rows, backward, lane_offset, carry);
}

/* (4) or (6) for all rows, four at a time; forward with non-temporal stores one at a time, which writes memory in
 * order: that saves more than loading the parameters once for four rows. */
INLINE void FN(write_all_columns)(const FN(volume) *v, const int backward, const FN(batch) *b, const int given,
                                  FN(carry) *carry)
{
    const ptrdiff_t most = carry && (!backward || v->channels % VL) ? 1 : 4;
    for (ptrdiff_t r = 0, rows; r < v->samples; r += rows) {
        rows = v->samples - r < most ? v->samples - r : most;
        FN(write_columns)(rows, backward, v, r, b, given, carry);
    }
}

/* (4) or (6) for a matrix whose channels are all done in T */
static NOINLINE void FN(write_matrix)(const FN(volume) *v, int backward, const FN(batch) *b, FN(carry) *carry)
{
    if (backward) FN(write_all_columns)(v, 1, b, 0, carry);
    else if (b->given) FN(write_all_columns)(v, 0, b, 1, carry);
    else FN(write_all_columns)(v, 0, b, 0, carry);
}

/* (4) or (6) for the columns of `t`, of which some are done in float64 and some in T: both, 64 rows at a time */
static NOINLINE void FN(write_mixed_tile)(const f64_tile *t, FN(volume) v, ptrdiff_t c, int backward,
                                          const FN(batch) *of_tile, const f64_batch *in_f64)
{
    enum { ROWS = CNORM_BLOCK_ROWS };
    X both[2][ROWS][LANES_F64], *const out = v.out;
    const X *const x = v.x, *const dy = v.dy;
    const ptrdiff_t samples = v.samples, out_stride = v.out_stride;
    f64_tile rows = *t;
    for (ptrdiff_t r = 0; r < samples; r += ROWS) {
        v.samples = rows.rows = samples - r < ROWS ? samples - r : ROWS;
        rows.x = v.x = x + r * v.x_stride;
        if (dy) rows.dy = v.dy = dy + r * v.dy_stride;
        v.out = both[0][0], rows.out = both[1][0];
        v.out_stride = rows.out_stride = LANES_F64;
        FN(write_matrix)(&v, backward, of_tile, NULL);
        f64_write_tile(in_f64, &rows, c, backward);
        for (ptrdiff_t k = 0; k < v.samples; ++k)
            for (ptrdiff_t i = 0; i < t->n; ++i)
                out[(r + k) * out_stride + i] = both[in_f64->stats[c + i].scale != DONE_IN_T][k][i];
    }
}

/* (4) or (6) for a matrix with channels that are done in float64 */
static NOINLINE void FN(write_f64_columns)(const FN(volume) *v, int backward, const FN(batch) *b)
{
    const f64_batch in_f64 = FN(in_f64)(v, b);
    for (ptrdiff_t c = 0; c < v->channels; c += LANES_F64) {
        const f64_tile t = column_tile(&in_f64, c);
        FN(volume) part = *v;
        FN(batch) of_part = *b;
        ptrdiff_t of_f64 = 0;
        for (ptrdiff_t i = 0; i < t.n; ++i) of_f64 += b->f64[c + i].scale != DONE_IN_T;
        part.channels = t.n, part.x = t.x, part.dy = t.dy, part.out = t.out;
        of_part.K += c, of_part.delta += c, of_part.rstd += c, of_part.scale += c;
        of_part.gain += c, of_part.bias += c, of_part.G += c, of_part.H += c;
        if (of_f64 == 0) FN(write_matrix)(&part, backward, &of_part, NULL);
        else if (of_f64 == t.n) f64_write_tile(&in_f64, &t, c, backward);
        else FN(write_mixed_tile)(&t, part, c, backward, &of_part, &in_f64);
    }
}
