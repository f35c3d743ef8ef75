/* Products of a packed matrix with all positions of a frame [channels, positions], which lie in lanes while a weight is
 * broadcast: the sums of matvec.inl.h, in the same order, without a transpose. */

enum { FRAME_ROWS = 4, FRAME_VECTORS = 3 }; /* of a tile: rows of the matrix, vectors of positions */

/* The vectors that are multiplied: element t channels + c of that of position p is at[offset[t] + c row + p]. A whole
 * vector may be read from the last position on. */
typedef struct frame_view {
    const float *at;
    ptrdiff_t row, channels, taps;
    const ptrdiff_t *offset; /* [taps] */
} frame_view;

/* sum [FRAME_ROWS, count] of the rows from r on and `count` vectors of positions from p on; count is a constant */
INLINE void frame_sums(const frame_view *x, const cnorm_matrix *w, int count, ptrdiff_t r, ptrdiff_t p,
                       f32v sum[FRAME_ROWS * FRAME_VECTORS])
{
    const float *weights = (const float *)w->panels + r / PANEL * PANEL * w->cols + r % PANEL;
    f32v block[FRAME_ROWS * FRAME_VECTORS] = {{0}};
    const int sums = FRAME_ROWS * count;
    ptrdiff_t free = BLOCK; /* inputs that the block still takes */
    EACH(i, sums) sum[i] = splat_f32(0);
    for (ptrdiff_t t = 0; t < x->taps; ++t) {
        const float *at = x->at + x->offset[t] + p;
        for (ptrdiff_t left = x->channels; left > 0;) {
            const ptrdiff_t n = left < free ? left : free;
            left -= n, free -= n;
            for (ptrdiff_t i = 0; i < n; ++i, at += x->row, weights += PANEL) {
                f32v v[FRAME_VECTORS];
                EACH(j, count) v[j] = load_f32(at + j * VL_F32);
                EACH(j, sums) block[j] = fma_f32(splat_f32(weights[j / count]), v[j % count], block[j]);
            }
            if (free > 0) continue;
            EACH(j, sums) sum[j] += block[j], block[j] = splat_f32(0);
            free = BLOCK;
        }
    }
    if (free == BLOCK) return;
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
