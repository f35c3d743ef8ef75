/* The gradient of a matrix W [gates * units, cols], row by row.
 *
 *   (1) dW = sum over the rows of a batch of dz x^T: in order, in blocks of 16 rows from zero
 * The order of every sum is fixed by the number of rows alone. A tile of TILE_ROWS rows of dW and at most TILE_COLS
 * columns stays in registers over a block; a strip of x, TILE_COLS columns, stays in L1 while all tiles of TILE_UNITS
 * rows pass. The next tile of dW and the next units of dz, whose rows are further apart than a page, are prefetched. */

enum {
    TILE_ROWS = VECTOR_BYTES == 64 ? 8 : 4,   /* of dW, a divisor of TILE_UNITS */
    COL_VECTORS = VECTOR_BYTES == 32 ? 3 : 2, /* 4 x 2 sums just hide the latency of a multiply-add */
    TILE_COLS = COL_VECTORS * VL_F32,
    TILE_UNITS = CNORM_GATE_PAD, /* a cache line of each row of dz */
};

/* (1) for `count` <= TILE_ROWS rows of dW from dw on, of unit `u` of those in scratch, and its columns from `k` on, at
 * most `vectors`, of which only the last may be partial; `vectors` and `apart` are constants. Each block is added to dw
 * in memory: see product_tile. With AVX-512 a broadcast that multiply-adds share is an instruction of its own: 14 %
 * less time on Zen 5, 1 to 3 % on Cascade Lake, but it takes the place of a multiply-add on Zen 4 (2026-11-29).
 * `apart`: none is shared, by another address, which the compiler can't know to be equal. */
INLINE void outer_tile(const cnorm_outer *call, int vectors, int apart, ptrdiff_t u, ptrdiff_t k, ptrdiff_t count,
                       float *dw)
{
    const float *dz = call->scratch + u * OUTER_ROWS, *x = call->scratch + (TILE_UNITS + k) * OUTER_ROWS;
    const ptrdiff_t n = call->n, last = call->w->cols - k - (vectors - 1) * VL_F32;
    for (ptrdiff_t i = TILE_ROWS; i < TILE_ROWS + count; ++i)
        prefetch(dw + i * call->w->cols, 0, vectors * VECTOR_BYTES);
    for (ptrdiff_t row = 0; row < n; row += BLOCK) {
        const ptrdiff_t end = n - row < BLOCK ? n : row + BLOCK;
        f32v block[COL_VECTORS * TILE_ROWS] = {{0}};
        for (ptrdiff_t t = row; t < end; ++t) {
            const float *from = dz + t * TILE_ROWS, *again = from;
            f32v at[COL_VECTORS];
            if (apart) __asm__("" : "+r"(again));
            EACH(v, vectors) at[v] = load_f32(x + t * TILE_COLS + v * VL_F32);
            EACH(i, vectors * TILE_ROWS)
                block[i] = fma_f32(at[i % vectors], splat_f32((i % vectors ? again : from)[i / vectors]), block[i]);
        }
        EACH(i, vectors * TILE_ROWS) {
            if (i / vectors >= count) break;
            float *to = dw + i / vectors * call->w->cols + i % vectors * VL_F32;
            const ptrdiff_t lanes = i % vectors < vectors - 1 ? VL_F32 : last;
            store_first_f32(to, lanes, (row || call->onto ? load_first_f32(to, lanes) : splat_f32(0)) + block[i]);
        }
    }
}

/* to [size] = from [count], then zeros; size a constant */
INLINE void copy_padded(float *to, const float *from, ptrdiff_t count, size_t size)
{
    if (count >= (ptrdiff_t)size) {
        memcpy(to, from, size * sizeof *to);
    } else {
        memset(to, 0, size * sizeof *to);
        memcpy(to, from, (size_t)count * sizeof *to);
    }
}

static void outer_products(const cnorm_outer *call)
{
    const ptrdiff_t n = call->n, cols = call->w->cols, units = call->w->units, width = padded_units(units);
    const int apart = VECTOR_BYTES == 64 && cnorm_cpu_broadcasts_in_fma();
    float *dz = call->scratch;               /* for each TILE_ROWS of TILE_UNITS units [OUTER_ROWS, TILE_ROWS] */
    float *x = dz + OUTER_ROWS * TILE_UNITS; /* for each TILE_COLS columns [OUTER_ROWS, TILE_COLS] */
    for (ptrdiff_t t = 0; t < n; ++t)
        for (ptrdiff_t k = 0; k < cols; k += TILE_COLS)
            copy_padded(x + k * OUTER_ROWS + t * TILE_COLS, call->x[t] + k, cols - k, TILE_COLS);
    for (ptrdiff_t row = 0; row < call->w->gates * width; row += TILE_UNITS) {
        const ptrdiff_t there = units - row % width < TILE_UNITS ? units - row % width : TILE_UNITS;
        float *dw = call->dw + (row / width * units + row % width) * cols;
        for (ptrdiff_t t = 0; t < n; ++t) {
            const float *from = call->dz[t] + row;
            prefetch(from, TILE_UNITS * sizeof *from, TILE_UNITS * sizeof *from);
            for (ptrdiff_t u = 0; u < there; u += TILE_ROWS)
                copy_padded(dz + u * OUTER_ROWS + t * TILE_ROWS, from + u, there - u, TILE_ROWS);
        }
        for (ptrdiff_t k = 0; k < cols; k += TILE_COLS)
            for (ptrdiff_t u = 0; u < there; u += TILE_ROWS) {
                const ptrdiff_t count = there - u < TILE_ROWS ? there - u : TILE_ROWS, left = cols - k;
                float *to = dw + u * cols + k;
                if (left <= VL_F32) outer_tile(call, 1, 0, u, k, count, to);
                else if (apart) outer_tile(call, 2, 1, u, k, count, to);
                else if (left <= 2 * VL_F32) outer_tile(call, 2, 0, u, k, count, to);
                else outer_tile(call, COL_VECTORS, 0, u, k, count, to);
            }
    }
}
