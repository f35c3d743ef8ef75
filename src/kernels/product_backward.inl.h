/* The product of a backward pass with W [rows, cols], packed in panels as in matvec.inl.h.
 *
 *   (1) dx = W^T dz, or dx += W^T dz: lane j < 16 of a sum adds rows j and 16 + j of every panel, in order, in blocks
 *       of 8 panels; the halving tree adds up the lanes
 * The order of every sum is fixed by the shape alone. */

enum {
    HALF_PANEL = PANEL / 2,
    PANELS_IN_BLOCK = BLOCK / 2,
    COLS_TOGETHER = VECTOR_BYTES == 64 ? 16 : 8,   /* of a block of W, which stays in L1 while all rows use it */
    ROWS_TOGETHER = 32,                            /* at most */
    TRANSPOSED_TILE = TILE_VECTORS * TILE_STREAMS, /* sums in registers */
    COPIED_FROM = 16,                              /* rows that pay for a copy of the block */
};

/* a block of W, rows of d [packed rows], zero beyond W's, from the block's first on, and their lanes of (1) */
typedef struct transposed_block {
    const float *w, *d;                       /* w [panels][columns, PANEL] */
    ptrdiff_t first, panels, apart, d_stride; /* of W's panels; floats from one to the next */
    float (*lanes)[COLS_TOGETHER][HALF_PANEL];
    uintptr_t ahead; /* a panel of the next block; each pass prefetches its part */
} transposed_block;

/* adds a block to the lanes of `count` rows, for `cols` columns from k on; count and cols are constants */
INLINE void transposed_tile(const transposed_block *of, ptrdiff_t k, int count, int cols)
{
#pragma GCC unroll 4
    for (int first = 0; first < HALF_PANEL; first += VL_F32) {
        const float *at = of->w + k * PANEL + first, *from = of->d + first;
        f32v block[TRANSPOSED_TILE] = {{0}};
        if (cols > 1) prefetch((const void *)of->ahead, 4 * (k * PANEL + 2 * cols * first), 2 * cols * VECTOR_BYTES);
        for (ptrdiff_t q = 0; q < of->panels; ++q, at += of->apart, from += PANEL)
            EACH(half, 2) {
                f32v d[TILE_STREAMS];
                EACH(s, count) d[s] = keep_f32(load_f32(from + s * of->d_stride + half * HALF_PANEL));
                EACH(c, cols) {
                    const f32v weights = load_f32(at + c * PANEL + half * HALF_PANEL);
                    EACH(s, count) block[c * count + s] = fma_f32(weights, d[s], block[c * count + s]);
                }
            }
        EACH(i, cols * count) {
            float *to = of->lanes[i % count][k + i / count] + first;
            store_f32(to, (of->first ? load_f32(to) : splat_f32(0)) + block[i]);
        }
    }
}

/* the same for `count` rows and all `cols` <= COLS_TOGETHER columns, `together` at a time */
INLINE void transposed_columns(const transposed_block *of, ptrdiff_t cols, int count, int together)
{
    ptrdiff_t k = 0;
    for (; k + together <= cols; k += together) transposed_tile(of, k, count, together);
    for (; k < cols; ++k) transposed_tile(of, k, count, 1);
}

#if VECTOR_BYTES == 64
#define EACH_LANE(X, h)                                                                                                \
    X(0, h), X(1, h), X(2, h), X(3, h), X(4, h), X(5, h), X(6, h), X(7, h), X(8, h), X(9, h), X(10, h), X(11, h),      \
        X(12, h), X(13, h), X(14, h), X(15, h)
#elif VECTOR_BYTES == 32
#define EACH_LANE(X, h) X(0, h), X(1, h), X(2, h), X(3, h), X(4, h), X(5, h), X(6, h), X(7, h)
#else
#define EACH_LANE(X, h) X(0, h), X(1, h), X(2, h), X(3, h)
#endif
#define LOW(i, h) ((i) / (h)*2 * (h) + (i) % (h))
#define HIGH(i, h) (LOW(i, h) + (h))
/* of each two vectors of blocks of 2 h lanes: the first half of each block + its second half */
#define HALVE(h)                                                                                                       \
    for (int i = 0; i < (h); ++i)                                                                                      \
    v[i] = __builtin_shufflevector(v[2 * i], v[2 * i + 1], EACH_LANE(LOW, h)) +                                        \
           __builtin_shufflevector(v[2 * i], v[2 * i + 1], EACH_LANE(HIGH, h))

/* lane i of the result is the halving tree over the lanes of v[i] */
INLINE f32v trees_f32(f32v v[VL_F32])
{
    HALVE(VL_F32 / 2);
    if (VL_F32 > 8) HALVE(4);
    if (VL_F32 > 4) HALVE(2);
    HALVE(1);
    return v[0];
}
#undef EACH_LANE
#undef LOW
#undef HIGH
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

/* (1): d [n, packed rows], zero beyond W's -> dx [n, cols]. Panels that are pages apart, those of a multiple of 32
 * columns, share few sets of L1 with d and the lanes: copied, 0.85 of the time (AVX2 on Zen 3, 2026-11-30). */
static void products_backward(const cnorm_matrix *w, ptrdiff_t n, const float *d, ptrdiff_t d_stride, float *dx,
                              ptrdiff_t dx_stride, int onto)
{
    enum { FLOATS = COLS_TOGETHER * PANEL };
    _Alignas(CNORM_ALIGN) float lanes[ROWS_TOGETHER][COLS_TOGETHER][HALF_PANEL], copy[PANELS_IN_BLOCK * FLOATS];
    const ptrdiff_t most = n < ROWS_TOGETHER ? n : ROWS_TOGETHER, panels = packed_rows(w) / PANEL;
    const ptrdiff_t apart = w->cols * PANEL;
    memset(lanes, 0, (size_t)most * sizeof lanes[0]); /* the trees read columns beyond W's, too */
    for (ptrdiff_t first = 0; first < n; first += ROWS_TOGETHER)
        for (ptrdiff_t k = 0; k < w->cols; k += COLS_TOGETHER) {
            const ptrdiff_t cols = w->cols - k < COLS_TOGETHER ? w->cols - k : COLS_TOGETHER;
            const ptrdiff_t last = n - first < most ? n : first + most;
            const int copied = last - first >= COPIED_FROM && apart * (ptrdiff_t)sizeof(float) % PAGE_BYTES == 0;
            for (ptrdiff_t p = 0; p < panels; p += PANELS_IN_BLOCK) {
                const ptrdiff_t left = panels - p, here = left < PANELS_IN_BLOCK ? left : PANELS_IN_BLOCK;
                const float *all = w->panels, *at = all + p * apart + k * PANEL;
                const uintptr_t ahead = (uintptr_t)(left > here ? at + here * apart : all + (k + cols) * PANEL);
                for (ptrdiff_t i = 0; copied && i < here * FLOATS; i += 4 * VL_F32)
                    EACH(v, 4)
                        store_f32(copy + i + v * VL_F32, load_f32(at + i / FLOATS * apart + i % FLOATS + v * VL_F32));
                transposed_block of = {copied ? copy : at,      NULL,     p,    here,
                                       copied ? FLOATS : apart, d_stride, NULL, ahead};
                for (ptrdiff_t s = first, count; s < last; s += count, of.ahead += (uintptr_t)apart * sizeof *at) {
                    count = tile_streams(last - s);
                    of.d = d + s * d_stride + p * PANEL;
                    of.lanes = lanes + s - first;
                    if (count == 1) transposed_columns(&of, cols, 1, 2 * TILE_VECTORS);
                    else if (count == 2) transposed_columns(&of, cols, 2, TILE_VECTORS);
                    else if (count == 3) transposed_columns(&of, cols, 3, TILE_VECTORS);
                    else transposed_columns(&of, cols, TILE_STREAMS, TILE_VECTORS);
                }
            }
            for (ptrdiff_t s = first; s < last; ++s)
                for (ptrdiff_t c = 0; c < cols; c += VL_F32) {
                    float *to = dx + s * dx_stride + k + c;
                    const f32v sums = trees_of_lanes(lanes[s - first] + c);
                    store_first_f32(to, cols - c, onto ? sums + load_first_f32(to, cols - c) : sums);
                }
        }
}
