/* The product of a backward pass with W [rows, cols], packed in panels as in matvec.inl.h.
 *
 *   (1) dx = W^T dz, or dx += W^T dz: lane j < 16 of a sum adds rows j and 16 + j of every panel, in order, in blocks
 *       of 8 panels; the halving tree adds up the lanes
 * The order of every sum is fixed by the shape alone. */

enum {
    HALF_PANEL = PANEL / 2,
    PANELS_IN_BLOCK = BLOCK / 2,
    TILE = VECTOR_BYTES == 64 ? 16 : 8, /* sums [rows, cols] in registers at a time */
    COLS_TOGETHER = 32,                 /* columns whose weights stay in L1 or L2 while ROWS_TOGETHER rows use them */
    ROWS_TOGETHER = 32,
};

/* rows of d [packed rows], zero beyond W's, and of dx [cols] */
typedef struct transposed_rows {
    const float *d;
    ptrdiff_t d_stride;
    float *dx;
    ptrdiff_t dx_stride;
    int onto;
} transposed_rows;

/* lanes [count, cols]: the lanes of (1) of `count` rows, for `cols` columns from `column` on */
INLINE void transposed_lanes(const cnorm_matrix *w, ptrdiff_t column, int count, int cols, const transposed_rows *rows,
                             f32v lanes[TILE][HALF_PANEL / VL_F32])
{
    const ptrdiff_t panels = packed_rows(w) / PANEL, panel_floats = w->cols * PANEL;
    for (int first = 0; first < HALF_PANEL; first += VL_F32) {
        f32v sum[TILE] = {{0}};
        for (ptrdiff_t p = 0; p < panels; p += PANELS_IN_BLOCK) {
            const ptrdiff_t end = panels - p < PANELS_IN_BLOCK ? panels : p + PANELS_IN_BLOCK;
            f32v block[TILE] = {{0}};
            for (ptrdiff_t q = p; q < end; ++q)
                for (int half = 0; half < 2; ++half) {
                    const float *at =
                        (const float *)w->panels + q * panel_floats + column * PANEL + half * HALF_PANEL + first;
                    const float *from = rows->d + q * PANEL + half * HALF_PANEL + first;
                    f32v weights[8];
                    EACH(k, cols) weights[k] = keep_f32(load_f32(at + k * PANEL));
                    EACH(s, count) {
                        const f32v v = load_f32(from + s * rows->d_stride);
                        EACH(k, cols) block[s * cols + k] = fma_f32(weights[k], v, block[s * cols + k]);
                    }
                }
            add_block_f32(count * cols, sum, block);
        }
        EACH(i, count * cols) lanes[i][first / VL_F32] = sum[i];
    }
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
INLINE f32v trees_of_lanes(f32v lanes[VL_F32][HALF_PANEL / VL_F32])
{
    f32v v[VL_F32];
    EACH(i, VL_F32) {
#pragma GCC unroll 2
        for (int half = HALF_PANEL / VL_F32 / 2; half; half /= 2)
            for (int j = 0; j < half; ++j) lanes[i][j] += lanes[i][j + half];
        v[i] = lanes[i][0];
    }
    return trees_f32(v);
}

/* (1) of `count` rows for `cols` columns from `column` on */
INLINE void transposed_tile(const cnorm_matrix *w, ptrdiff_t column, int count, int cols, const transposed_rows *rows)
{
    f32v lanes[TILE][HALF_PANEL / VL_F32];
    float sums[TILE];
#pragma GCC unroll 16
    for (int i = count * cols; i < TILE; ++i)
        for (int j = 0; j < HALF_PANEL / VL_F32; ++j) lanes[i][j] = splat_f32(0);
    transposed_lanes(w, column, count, cols, rows, lanes);
#pragma GCC unroll 2
    for (int i = 0; i < TILE; i += VL_F32) store_f32(sums + i, trees_of_lanes(lanes + i));
    EACH(s, count) {
        float *dx = rows->dx + s * rows->dx_stride + column;
        for (int k = 0; k < cols; ++k) dx[k] = rows->onto ? sums[s * cols + k] + dx[k] : sums[s * cols + k];
    }
}

/* (1) of `count` rows for the columns from `column` to `end`, `cols` at a time */
INLINE void transposed_columns(const cnorm_matrix *w, ptrdiff_t column, ptrdiff_t end, int count, int cols,
                               const transposed_rows *rows)
{
    for (; column + cols <= end; column += cols) transposed_tile(w, column, count, cols, rows);
    for (; column < end; ++column) transposed_tile(w, column, count, 1, rows);
}

/* (1): d [n, packed rows], zero beyond W's -> dx [n, cols] */
static void products_backward(const cnorm_matrix *w, ptrdiff_t n, const float *d, ptrdiff_t d_stride, float *dx,
                              ptrdiff_t dx_stride, int onto)
{
    for (ptrdiff_t first = 0; first < n; first += ROWS_TOGETHER)
        for (ptrdiff_t k = 0; k < w->cols; k += COLS_TOGETHER) {
            const ptrdiff_t end = w->cols - k < COLS_TOGETHER ? w->cols : k + COLS_TOGETHER;
            const ptrdiff_t last = n - first < ROWS_TOGETHER ? n : first + ROWS_TOGETHER;
            for (ptrdiff_t s = first, count; s < last; s += count) {
                const transposed_rows rows = {d + s * d_stride, d_stride, dx + s * dx_stride, dx_stride, onto};
                count = last - s >= 4 ? 4 : last - s >= 2 ? 2 : 1;
                if (count == 4) transposed_columns(w, k, end, 4, TILE / 4, &rows);
                else if (count == 2) transposed_columns(w, k, end, 2, TILE / 2, &rows);
                else transposed_columns(w, k, end, 1, 8, &rows);
            }
        }
}
