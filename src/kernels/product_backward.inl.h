/* The product of a backward pass with W [rows, cols], packed in panels as in matvec.inl.h.
 *
 *   (1) dx = W^T dz, or dx += W^T dz: lane j < 16 of a sum adds rows j and 16 + j of every panel, in order, in blocks
 *       of 8 panels; the halving tree adds up the lanes
 * The order of every sum is fixed by the shape alone. */

enum {
    HALF_PANEL = PANEL / 2,
    PANELS_IN_BLOCK = BLOCK / 2,
    COLS_TOGETHER = 16, /* columns of a block of W, 16 KB that stay in L1 while ROWS_TOGETHER rows use them */
    ROWS_TOGETHER = 32,
    TRANSPOSED_TILE = TILE_VECTORS * TILE_STREAMS, /* sums in registers */
};

/* rows of d [packed rows], zero beyond W's, and their lanes of (1) for COLS_TOGETHER columns */
typedef struct transposed_rows {
    const float *d;
    ptrdiff_t d_stride;
    float (*lanes)[COLS_TOGETHER][HALF_PANEL];
} transposed_rows;

/* adds the block of W that begins at panel p to the lanes of `count` rows, for `cols` columns, k and those after it, of
 * the COLS_TOGETHER from `column` on; count and cols are constants */
INLINE void transposed_tile(const cnorm_matrix *w, ptrdiff_t p, ptrdiff_t column, ptrdiff_t k, int count, int cols,
                            const transposed_rows *rows)
{
    const ptrdiff_t panels = packed_rows(w) / PANEL - p, panel_floats = w->cols * PANEL;
#pragma GCC unroll 4
    for (int first = 0; first < HALF_PANEL; first += VL_F32) {
        const float *at = (const float *)w->panels + p * panel_floats + (column + k) * PANEL + first;
        const float *from = rows->d + p * PANEL + first;
        f32v block[TRANSPOSED_TILE] = {{0}};
        for (ptrdiff_t q = 0; q < PANELS_IN_BLOCK && q < panels; ++q, at += panel_floats, from += PANEL)
            EACH(half, 2) {
                f32v d[TILE_STREAMS];
                EACH(s, count) d[s] = keep_f32(load_f32(from + s * rows->d_stride + half * HALF_PANEL));
                EACH(c, cols) {
                    const f32v weights = load_f32(at + c * PANEL + half * HALF_PANEL);
                    EACH(s, count) block[c * count + s] = fma_f32(weights, d[s], block[c * count + s]);
                }
            }
        EACH(i, cols * count) {
            float *to = rows->lanes[i % count][k + i / count] + first;
            store_f32(to, (p ? load_f32(to) : splat_f32(0)) + block[i]);
        }
    }
}

/* the same for `count` rows and all `cols` <= COLS_TOGETHER columns, `together` at a time */
INLINE void transposed_columns(const cnorm_matrix *w, ptrdiff_t p, ptrdiff_t column, ptrdiff_t cols, int count,
                               int together, const transposed_rows *rows)
{
    ptrdiff_t k = 0;
    for (; k + together <= cols; k += together) transposed_tile(w, p, column, k, count, together, rows);
    for (; k < cols; ++k) transposed_tile(w, p, column, k, count, 1, rows);
}

/* Of two vectors of blocks of 2 h lanes: the first half of each block + its second half */
#define FROM(i, h) ((i) / (h)*2 * (h) + (i) % (h))
#define FROM_4(k, h) k + FROM(0, h), k + FROM(1, h), k + FROM(2, h), k + FROM(3, h)
#define FROM_8(k, h) FROM_4(k, h), k + FROM(4, h), k + FROM(5, h), k + FROM(6, h), k + FROM(7, h)
#define FROM_16(k, h)                                                                                                  \
    FROM_8(k, h), k + FROM(8, h), k + FROM(9, h), k + FROM(10, h), k + FROM(11, h), k + FROM(12, h), k + FROM(13, h),  \
        k + FROM(14, h), k + FROM(15, h)
#define HALVE(vl, h)                                                                                                   \
    for (int i = 0; i < (h); ++i)                                                                                      \
    v[i] = __builtin_shufflevector(v[2 * i], v[2 * i + 1], FROM_##vl(0, h)) +                                          \
           __builtin_shufflevector(v[2 * i], v[2 * i + 1], FROM_##vl(h, h))

/* lane i of the result is the halving tree over the lanes of v[i] */
INLINE f32v trees_f32(f32v v[VL_F32])
{
#if VECTOR_BYTES == 64
    HALVE(16, 8);
    HALVE(16, 4);
    HALVE(16, 2);
    HALVE(16, 1);
#elif VECTOR_BYTES == 32
    HALVE(8, 4);
    HALVE(8, 2);
    HALVE(8, 1);
#else
    HALVE(4, 2);
    HALVE(4, 1);
#endif
    return v[0];
}
#undef FROM
#undef FROM_4
#undef FROM_8
#undef FROM_16
#undef HALVE

/* the trees of VL_F32 sums of HALF_PANEL lanes */
INLINE f32v trees_of_lanes(const float (*lanes)[HALF_PANEL])
{
    f32v v[VL_F32];
    EACH(i, VL_F32) {
        f32v parts[HALF_PANEL / VL_F32];
        EACH(j, HALF_PANEL / VL_F32) parts[j] = load_f32(lanes[i] + j * VL_F32);
#pragma GCC unroll 2
        for (int half = HALF_PANEL / VL_F32 / 2; half; half /= 2)
            for (int j = 0; j < half; ++j) parts[j] += parts[j + half];
        v[i] = parts[0];
    }
    return trees_f32(v);
}

/* (1): d [n, packed rows], zero beyond W's -> dx [n, cols] */
static void products_backward(const cnorm_matrix *w, ptrdiff_t n, const float *d, ptrdiff_t d_stride, float *dx,
                              ptrdiff_t dx_stride, int onto)
{
    _Alignas(CNORM_ALIGN) float lanes[ROWS_TOGETHER][COLS_TOGETHER][HALF_PANEL];
    const ptrdiff_t most = n < ROWS_TOGETHER ? n : ROWS_TOGETHER;
    memset(lanes, 0, (size_t)most * sizeof lanes[0]); /* the trees read columns beyond W's, too */
    for (ptrdiff_t first = 0; first < n; first += ROWS_TOGETHER)
        for (ptrdiff_t k = 0; k < w->cols; k += COLS_TOGETHER) {
            const ptrdiff_t cols = w->cols - k < COLS_TOGETHER ? w->cols - k : COLS_TOGETHER;
            const ptrdiff_t last = n - first < most ? n : first + most;
            for (ptrdiff_t p = 0; p < packed_rows(w) / PANEL; p += PANELS_IN_BLOCK)
                for (ptrdiff_t s = first, count; s < last; s += count) {
                    const transposed_rows rows = {d + s * d_stride, d_stride, lanes + s - first};
                    count = tile_streams(last - s);
                    if (count == 1) transposed_columns(w, p, k, cols, 1, 2 * TILE_VECTORS, &rows);
                    else if (count == 2) transposed_columns(w, p, k, cols, 2, TILE_VECTORS, &rows);
                    else if (count == 3) transposed_columns(w, p, k, cols, 3, TILE_VECTORS, &rows);
                    else transposed_columns(w, p, k, cols, TILE_STREAMS, TILE_VECTORS, &rows);
                }
            for (ptrdiff_t s = first; s < last; ++s)
                for (ptrdiff_t c = 0; c < cols; c += VL_F32) {
                    float *to = dx + s * dx_stride + k + c;
                    const f32v sums = trees_of_lanes(lanes[s - first] + c);
                    store_first_f32(to, cols - c, onto ? sums + load_first_f32(to, cols - c) : sums);
                }
        }
}
