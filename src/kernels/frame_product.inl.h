/* Products of a packed matrix with all positions of a frame [channels, positions], which lie in lanes while a weight is
 * broadcast: the sums of matvec.inl.h, in the same order, without a transpose. */

enum { FRAME_ROWS = 4, FRAME_VECTORS = 3 }; /* of a tile: rows of the matrix, vectors of positions */

/* the channels [from, to) that rows [r, r + FRAME_ROWS) of a grouped product read; a period of rows has all groups */
INLINE void channels_of(const cnorm_frame_view *x, ptrdiff_t r, ptrdiff_t *from, ptrdiff_t *to)
{
    *from = 0, *to = x->channels;
    if (x->groups <= 1) return;
    const ptrdiff_t rows = x->period / x->groups, channels = x->channels / x->groups;
    const ptrdiff_t first = r % x->period, last = first + FRAME_ROWS - 1;
    if (last >= x->period) return;
    *from = first / rows * channels, *to = (last / rows + 1) * channels;
}

/* sum [FRAME_ROWS, count] of the rows from r on and `count` vectors of positions from p on; count is a constant */
INLINE void frame_sums(const cnorm_frame_view *x, const cnorm_matrix *w, int count, ptrdiff_t r, ptrdiff_t p,
                       f32v sum[FRAME_ROWS * FRAME_VECTORS])
{
    const float *panel = (const float *)w->panels + r / PANEL * PANEL * w->cols + r % PANEL;
    const int sums = FRAME_ROWS * count;
    f32v block[FRAME_ROWS * FRAME_VECTORS] = {{0}};
    ptrdiff_t from, to, end = BLOCK; /* of the block */
    channels_of(x, r, &from, &to);
    EACH(i, sums) sum[i] = splat_f32(0);
    for (ptrdiff_t t = 0; t < x->taps; ++t) {
        const float *at = x->at + x->offset[t] + from * x->row + p;
        for (ptrdiff_t k = t * x->channels + from, stop = t * x->channels + to; k < stop;) {
            if (k >= end) {
                EACH(j, sums) sum[j] += block[j], block[j] = splat_f32(0);
                end = k / BLOCK * BLOCK + BLOCK;
            }
            for (const ptrdiff_t until = stop < end ? stop : end; k < until; ++k, at += x->row) {
                const float *weights = panel + k * PANEL;
                f32v v[FRAME_VECTORS];
                EACH(j, count) v[j] = load_f32(at + j * VL_F32);
                EACH(j, sums) block[j] = fma_f32(splat_f32(weights[j / count]), v[j % count], block[j]);
            }
        }
    }
    EACH(j, sums) sum[j] += block[j];
}

/* whether a position of x [channels, positions] is_tiny */
static void frame_is_tiny(ptrdiff_t channels, ptrdiff_t positions, const float *x, int *tiny)
{
    i32v found = {0}; /* in its signs */
    for (ptrdiff_t p = 0; p < positions; p += VL_F32) {
        i32v small = (i32v){0} - 1, any = {0};
        for (ptrdiff_t c = 0; c < channels; ++c) {
            const i32v magnitude = (i32v)load_first_f32(x + c * positions + p, positions - p) & 0x7fffffff;
            found |= (magnitude - LEAST_NORMAL) & -magnitude;
            small &= magnitude - LEAST_LARGE;
            any |= magnitude;
        }
        found |= small & -any;
    }
    *tiny = any_i32((i32v)(found < 0));
}
