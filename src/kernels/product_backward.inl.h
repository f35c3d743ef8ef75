/* The product of a backward pass with W [rows, cols], packed in panels as in matvec.inl.h.
 *
 *   (1) dx = W^T dz, or dx += W^T dz: lane j < 16 of a sum adds rows j and 16 + j of every panel, in order, in blocks
 *       of 8 panels; the halving tree adds up the lanes
 * The order of every sum is fixed by the shape alone.
 */
#ifndef CNORM_PRODUCT_BACKWARD_INL_H
#define CNORM_PRODUCT_BACKWARD_INL_H

#include "backward.h"
#include "matvec.inl.h"

enum {
    HALF_PANEL = PANEL / 2,
    PANELS_IN_BLOCK = BLOCK / 2,
    TILE_COLS = 32, /* columns whose sums [TILE_ROWS, TILE_COLS, HALF_PANEL] are kept in half of L1 over all panels */
    TILE_ALONE = 8, /* columns at a time for one vector: enough independent sums to hide the latency of addition */
    TILE_ROWS = 8,  /* vectors at most that share one reading of W */
};

/* rows of d [packed rows], zero beyond W's, and of dx [cols] */
typedef struct transposed_rows {
    const float *d;
    ptrdiff_t d_stride;
    float *dx;
    ptrdiff_t dx_stride;
    int onto;
} transposed_rows;

/* lanes [count, TILE_COLS, HALF_PANEL] += the block of (1) that begins with panel p, for `cols` columns from `column` on */
INLINE void transposed_tile(const cnorm_matrix *w, ptrdiff_t p, ptrdiff_t column, int count, int cols,
                            const transposed_rows *rows, float *lanes)
{
    const ptrdiff_t panels = packed_rows(w) / PANEL, panel_floats = w->cols * PANEL;
    const ptrdiff_t end = panels - p < PANELS_IN_BLOCK ? panels : p + PANELS_IN_BLOCK;
    for (int first = 0; first < HALF_PANEL; first += VL_F32) {
        f32v block[16];
#pragma GCC unroll 16
        for (int i = 0; i < count * cols; ++i) block[i] = splat_f32(0);
        for (ptrdiff_t q = p; q < end; ++q)
#pragma GCC unroll 2
            for (int half = 0; half < 2; ++half) {
                const float *at =
                    (const float *)w->panels + q * panel_floats + column * PANEL + half * HALF_PANEL + first;
                const float *from = rows->d + q * PANEL + half * HALF_PANEL + first;
#pragma GCC unroll 8
                for (int s = 0; s < count; ++s) {
                    const f32v v = load_f32(from + s * rows->d_stride);
#pragma GCC unroll 8
                    for (int k = 0; k < cols; ++k) block[s * cols + k] += load_f32(at + k * PANEL) * v;
                }
            }
#pragma GCC unroll 16
        for (int i = 0; i < count * cols; ++i) {
            float *sum = lanes + (i / cols * TILE_COLS + i % cols) * HALF_PANEL + first;
            store_f32(sum, load_f32(sum) + block[i]);
        }
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

/* dx [count] = the trees of lanes [count, HALF_PANEL], or `onto`, added to it */
INLINE void trees_of_lanes(const float *lanes, ptrdiff_t count, int onto, float *dx)
{
    for (ptrdiff_t k = 0; k < count; k += VL_F32) {
        f32v v[VL_F32];
        for (int i = 0; i < VL_F32; ++i) {
            const float *at = lanes + (k + i) * HALF_PANEL;
            f32v part[HALF_PANEL / VL_F32];
            for (int j = 0; j < HALF_PANEL / VL_F32; ++j) part[j] = load_f32(at + j * VL_F32);
            for (int half = HALF_PANEL / VL_F32 / 2; half; half /= 2)
                for (int j = 0; j < half; ++j) part[j] += part[j + half];
            v[i] = part[0];
        }
        f32v sum = trees_f32(v);
        const ptrdiff_t there = count - k < VL_F32 ? count - k : VL_F32;
        if (onto) sum += load_range_f32(dx + k, 0, there, splat_f32(0));
        store_range_f32(dx + k, 0, there, sum);
    }
}

/* (1) of `count` vectors, a constant; tile: columns at a time */
INLINE void transposed(const cnorm_matrix *w, int count, int tile, const transposed_rows *rows)
{
    float lanes[TILE_ROWS * TILE_COLS * HALF_PANEL];
    for (ptrdiff_t k = 0; k < w->cols; k += TILE_COLS) {
        const ptrdiff_t cols = w->cols - k < TILE_COLS ? w->cols - k : TILE_COLS;
        memset(lanes, 0, (size_t)(count * TILE_COLS * HALF_PANEL) * sizeof *lanes);
        for (ptrdiff_t p = 0; p < packed_rows(w) / PANEL; p += PANELS_IN_BLOCK) {
            ptrdiff_t j = 0;
            for (; j + tile <= cols; j += tile) transposed_tile(w, p, k + j, count, tile, rows, lanes + j * HALF_PANEL);
            for (; j < cols; ++j) transposed_tile(w, p, k + j, count, 1, rows, lanes + j * HALF_PANEL);
        }
        for (int s = 0; s < count; ++s)
            trees_of_lanes(lanes + s * TILE_COLS * HALF_PANEL, cols, rows->onto, rows->dx + s * rows->dx_stride + k);
    }
}

/* (1): d [n, packed rows], zero beyond W's -> dx [n, cols]. Tiles are as large as registers allow. */
static void products_backward(const cnorm_matrix *w, ptrdiff_t n, const float *d, ptrdiff_t d_stride, float *dx,
                              ptrdiff_t dx_stride, int onto)
{
    for (ptrdiff_t count; n > 0; n -= count, d += count * d_stride, dx += count * dx_stride) {
        const transposed_rows rows = {d, d_stride, dx, dx_stride, onto};
        count = n >= TILE_ROWS && VECTOR_BYTES == 64 ? TILE_ROWS : n >= 4 ? 4 : n >= 2 ? 2 : 1;
        if (count == 1) transposed(w, 1, TILE_ALONE, &rows);
        else if (count == 2) transposed(w, 2, VECTOR_BYTES == 64 ? 8 : 4, &rows);
        else if (count == 4) transposed(w, 4, VECTOR_BYTES == 64 ? 4 : 2, &rows);
        else transposed(w, TILE_ROWS, 2, &rows);
    }
}

#endif
