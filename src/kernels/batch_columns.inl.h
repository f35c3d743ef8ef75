/* Batch norm of a matrix, space = 1: sums and output of a few rows at a time, so that the sums and parameters of a
 * column are loaded once for all of these rows. Each column is summed in a lane of its own. */

/* (1), or backward (5): block += d and block2 += d^2, or block += dy and block2 += dy xhat, over `rows` rows from row
 * `first` on. Vectors begin `lane_offset` lanes before the row. */
INLINE void FN(sum_columns)(const ptrdiff_t rows, const int backward, const FN(batch) *batch, ptrdiff_t first,
                            const T *centre, ptrdiff_t lane_offset)
{
    const FN(batch) b = *batch; /* a copy: the compiler must assume that a store may change the original */
    const ptrdiff_t channels = b.v.channels, x_stride = b.v.x_stride, dy_stride = b.v.dy_stride;
    const X *const x = b.v.x, *const dy = b.v.dy;
    for (ptrdiff_t j = -lane_offset; j < channels; j += VL) {
        const ptrdiff_t from = j < 0 ? -j : 0, to = channels - j < VL ? channels - j : VL;
        const V K = FN(take_T)(centre + j, from, to);
        V s = FN(take_T)(b.block + j, from, to), q = FN(take_T)(b.block2 + j, from, to);
        for (ptrdiff_t r = first; r < first + rows; ++r) {
            const V d = FN(take)(x + r * x_stride + j, from, to) - K;
            if (backward) {
                const V g = FN(take)(dy + r * dy_stride + j, from, to);
                s += g;
                q += g * ((d - FN(take_T)(b.delta + j, from, to)) * FN(take_T)(b.rstd + j, from, to));
            } else {
                s += d;
                q += d * d;
            }
        }
        FN(put_T)(b.block + j, from, to, s);
        FN(put_T)(b.block2 + j, from, to, q);
    }
}

/* (1), or backward (5), of all rows: sum and sum2, in blocks of CNORM_BLOCK_ROWS, each added to float64 */
INLINE void FN(sum_all_columns)(const FN(batch) *b, const int backward, const T *K)
{
    const volume *v = &b->v;
    const size_t bytes = (size_t)v->channels * sizeof(T);
    const ptrdiff_t lane_offset = ALIGN_LOADS && v->x_stride % VL == 0 ? FN(lane_offset_of)(v->x) : 0;
    for (ptrdiff_t begin = 0; begin < v->samples; begin += CNORM_BLOCK_ROWS) {
        const ptrdiff_t end = v->samples - begin < CNORM_BLOCK_ROWS ? v->samples : begin + CNORM_BLOCK_ROWS;
        memset(b->block, 0, bytes);
        memset(b->block2, 0, bytes);
        ptrdiff_t row = begin;
        /* Several rows at a time: the running sums are loaded and stored that much less often. Eight at
         * most, since L1 has eight ways: of more lines a multiple of 4096 bytes apart, some are
         * evicted. Backward four, because an unaligned vector of dy covers two lines. */
        for (; !backward && row + 8 <= end; row += 8) FN(sum_columns)(8, 0, b, row, K, lane_offset);
        for (; backward && row + 4 <= end; row += 4) FN(sum_columns)(4, 1, b, row, K, lane_offset);
        if (row < end) FN(sum_columns)(end - row, backward, b, row, K, lane_offset);
        TN(add_wide)(v->channels, v->sum, b->block);
        TN(add_wide)(v->channels, v->sum2, b->block2);
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
INLINE V FN(column_output)(const FN(columns) *c, const FN(batch) *b, ptrdiff_t r, ptrdiff_t j, ptrdiff_t to,
                           const int backward, const int given)
{
    const ptrdiff_t from = j < 0 ? -j : 0;
    V d = FN(take)((const X *)b->v.x + r * b->v.x_stride + j, from, to) - c->K;
    if (!given) d -= c->delta;
    if (!backward) return d * c->scale + c->bias;
    const V dy = FN(take)((const X *)b->v.dy + r * b->v.dy_stride + j, from, to);
    return c->rstd * ((dy * c->gain - c->G) - d * c->rstd * c->H);
}

/* the partial vectors that rows begin and end in, for write_columns */
static NOINLINE void FN(write_column_edges)(const FN(batch) *b, ptrdiff_t first, ptrdiff_t rows, int backward,
                                            ptrdiff_t lane_offset, FN(carry) *carry)
{
    const ptrdiff_t n = b->v.channels, end = (n + lane_offset) / VL * VL - lane_offset;
    for (ptrdiff_t r = first; r < first + rows; ++r)
        for (ptrdiff_t j = lane_offset ? -lane_offset : end; j < n; j = j < end ? end : n) {
            const ptrdiff_t from = j < 0 ? -j : 0, to = n - j < VL ? n - j : VL;
            const FN(columns) c = FN(columns_at)(b, j, from, to, backward, 0);
            const V y = FN(column_output)(&c, b, r, j, to, backward, 0);
            FN(put)((X *)b->v.out + r * b->v.out_stride + j, from, to, y, carry);
        }
}

/* (4) or (6) for `rows` <= 4 rows from row `first` on. carry is NULL unless out is written by non-temporal stores; then
 * the rows, if more than one, have the same lane offset. */
INLINE void FN(write_columns)(ptrdiff_t rows, const int backward, const FN(batch) *batch, ptrdiff_t first,
                              const int given, FN(carry) *carry)
{
    const FN(batch) b = *batch; /* as above */
    const ptrdiff_t n = b.v.channels, out_stride = b.v.out_stride;
    X *const out = b.v.out;
    const ptrdiff_t lane_offset = carry ? FN(lane_offset_of)(out + first * out_stride) : 0;
    const ptrdiff_t end = (n + lane_offset) / VL * VL - lane_offset;
    for (ptrdiff_t j = lane_offset ? VL - lane_offset : 0; j < end; j += VL) {
        const FN(columns) c = FN(columns_at)(&b, j, 0, VL, backward, given);
        V y[4]; /* all before the first store: a load of the next row at its page offset would wait for it */
        EACH(i, rows) y[i] = FN(column_output)(&c, &b, first + i, j, VL, backward, given);
        EACH(i, rows) {
            if (carry) FN(nt_store)(out + (first + i) * out_stride + j, y[i]);
            else FN(store)(out + (first + i) * out_stride + j, y[i]);
        }
    }
    if (lane_offset || end < n) FN(write_column_edges)(batch, first, rows, backward, lane_offset, carry);
}

/* Whether rows of x, dy and out compete for the eight ways of the same sets of L1, as large arrays of one allocator do:
 * the rows lie a multiple of PAGE_BYTES apart */
INLINE int FN(rows_share_sets)(const volume *v)
{
    if (!v->dy || v->x_stride * (ptrdiff_t)sizeof(X) % PAGE_BYTES) return 0;
    return near_in_page(v->out, v->x) && near_in_page(v->out, v->dy);
}

/* (4) or (6) for all rows, four at a time, or two where twelve lines would be evicted; forward with non-temporal stores
 * one at a time, which writes memory in order: that saves more than loading the parameters once for four rows. */
INLINE void FN(write_all_columns)(const FN(batch) *b, const int backward, const int given, FN(carry) *carry)
{
    const ptrdiff_t cached = FN(rows_share_sets)(&b->v) ? 2 : 4;
    const ptrdiff_t most = !carry ? cached : !backward || b->v.channels % VL ? 1 : 4;
    ptrdiff_t r = 0;
    for (; most == 4 && r + 4 <= b->v.samples; r += 4) FN(write_columns)(4, backward, b, r, given, carry);
    for (; most > 1 && r + 2 <= b->v.samples; r += 2) FN(write_columns)(2, backward, b, r, given, carry);
    for (; r < b->v.samples; ++r) FN(write_columns)(1, backward, b, r, given, carry);
}

/* (4) or (6) for a matrix whose channels are all done in T */
static NOINLINE void FN(write_matrix)(const FN(batch) *b, int backward, FN(carry) *carry)
{
    if (backward) FN(write_all_columns)(b, 1, 0, carry);
    else if (b->given) FN(write_all_columns)(b, 0, 1, carry);
    else FN(write_all_columns)(b, 0, 0, carry);
}

/* (4) or (6) for the channels of `view`, from c on, of which some are done in float64 and some in T: both, 64 rows at a
 * time. `in_T`: these channels */
static NOINLINE void FN(write_mixed_view)(f64_view view, const volume *v, ptrdiff_t c, int backward, FN(batch) in_T)
{
    enum { ROWS = CNORM_BLOCK_ROWS };
    X both[2][ROWS][LANES_F64], *const out = in_T.v.out;
    const X *const x = view.x, *const dy = view.dy;
    in_T.v.out = both[0][0], view.out = both[1][0];
    in_T.v.out_stride = view.out_stride = LANES_F64;
    for (ptrdiff_t r = 0; r < v->samples; r += ROWS) {
        in_T.v.samples = view.rows = v->samples - r < ROWS ? v->samples - r : ROWS;
        in_T.v.x = view.x = x + r * v->x_stride;
        if (dy) in_T.v.dy = view.dy = dy + r * v->dy_stride;
        FN(write_matrix)(&in_T, backward, NULL);
        f64_write_view(v, &view, c, backward);
        for (ptrdiff_t k = 0; k < view.rows; ++k)
            for (ptrdiff_t i = 0; i < view.n; ++i)
                out[(r + k) * v->out_stride + i] = both[v->state[c + i] != IN_T][k][i];
    }
}

/* (4) or (6) for a matrix with channels that are done in float64 */
static NOINLINE void FN(write_f64_columns)(const FN(batch) *b, int backward)
{
    for (ptrdiff_t c = 0; c < b->v.channels; c += LANES_F64) {
        const f64_view view = volume_view(&b->v, 0, c);
        FN(batch) part = *b;
        part.v.channels = view.n, part.v.x = view.x, part.v.dy = view.dy, part.v.out = view.out;
        part.K += c, part.delta += c, part.rstd += c, part.scale += c;
        part.gain += c, part.bias += c, part.G += c, part.H += c;
        if (!any_in_state(&b->v, c, IN_F64)) FN(write_matrix)(&part, backward, NULL);
        else if (!any_in_state(&b->v, c, IN_T)) f64_write_view(&b->v, &view, c, backward);
        else FN(write_mixed_view)(view, &b->v, c, backward, part);
    }
}
