/* The gradient of a matrix W [gates * units, cols], row by row.
 *
 *   (1) dW = sum over the rows of a batch of dz x^T: in order, in blocks of 16 rows from zero
 * The order of every sum is fixed by the number of rows alone. A tile of TILE_ROWS rows of dW and at most TILE_COLS
 * columns stays in registers over a block; a strip of x with the columns of a tile stays in L1 while all tiles of
 * TILE_UNITS rows pass. The next tile, strip and units are prefetched: rows are further apart than a page. */

enum {
    TILE_ROWS = VECTOR_BYTES == 64 ? 8 : 4,   /* of dW, a divisor of TILE_UNITS */
    COL_VECTORS = VECTOR_BYTES == 32 ? 3 : 2, /* 4 x 2 sums just hide the latency of a multiply-add */
    TILE_COLS = COL_VECTORS * VL_F32,
    TILE_UNITS = CNORM_GATE_PAD, /* a cache line of each row of dz */
};

/* A tile of (1): dw [TILE_ROWS, vectors], rows `stride` apart, from dz [n, TILE_ROWS] and x [n, vectors]; `vectors` and
 * `apart` are constants. Each block is added to dw in memory: see product_tile. To begin with its first product, not 0,
 * takes 0.96 of the time (Zen 3, 2026-12-01): the same bits, since no -0 is added to. With AVX-512 a broadcast that
 * multiply-adds share is an instruction: 14 % less time on Zen 5, 1 to 3 % on Cascade Lake, but on Zen 4 it takes the
 * place of a multiply-add (2026-11-29). `apart`: none is shared, by another address, whose equality GCC can't know. */
INLINE void outer_tile(const cnorm_outer *call, int vectors, int apart, const float *dz, const float *x, float *dw,
                       ptrdiff_t stride)
{
    for (ptrdiff_t row = 0; row < call->n; row += BLOCK) {
        const ptrdiff_t end = call->n - row < BLOCK ? call->n : row + BLOCK;
        f32v block[COL_VECTORS * TILE_ROWS];
        EACH(later, 2) /* the first row, and the others */
            for (ptrdiff_t t = row + later; t < (later ? end : row + 1); ++t) {
                const float *from = dz + t * TILE_ROWS, *again = from;
                f32v at[COL_VECTORS];
                if (apart) __asm__("" : "+r"(again));
                EACH(v, vectors) at[v] = load_f32(x + (t * vectors + v) * VL_F32);
                EACH(i, vectors * TILE_ROWS) {
                    const f32v factor = splat_f32((i % vectors ? again : from)[i / vectors]);
                    block[i] = later ? fma_f32(at[i % vectors], factor, block[i]) : at[i % vectors] * factor;
                }
            }
        EACH(i, vectors * TILE_ROWS) {
            float *to = dw + i / vectors * stride + i % vectors * VL_F32;
            store_f32(to, (row || call->onto ? load_f32(to) : splat_f32(0)) + block[i]);
        }
    }
}

/* the tile of dw [cols] whose units begin at `u` of those in scratch; at the edges of dW, in a copy */
INLINE void outer_part(const cnorm_outer *call, int vectors, int apart, ptrdiff_t u, ptrdiff_t count, ptrdiff_t k,
                       float *dw)
{
    const ptrdiff_t cols = call->w->cols, left = cols - k < vectors * VL_F32 ? cols - k : vectors * VL_F32;
    const float *dz = call->scratch + u * OUTER_ROWS, *x = call->scratch + (TILE_UNITS + k) * OUTER_ROWS;
    if (count >= TILE_ROWS && left == vectors * VL_F32) {
        for (ptrdiff_t i = TILE_ROWS; i < 2 * TILE_ROWS; ++i) prefetch(dw + i * cols, 0, vectors * VECTOR_BYTES);
        outer_tile(call, vectors, apart, dz, x, dw, cols);
        return;
    }
    float edge[TILE_ROWS * TILE_COLS] = {0};
    const ptrdiff_t rows = count < TILE_ROWS ? count : TILE_ROWS;
    for (ptrdiff_t i = 0; call->onto && i < rows; ++i)
        EACH(v, vectors)
            store_f32(edge + i * TILE_COLS + v * VL_F32, load_first_f32(dw + i * cols + v * VL_F32, left - v * VL_F32));
    outer_tile(call, vectors, apart, dz, x, edge, TILE_COLS);
    for (ptrdiff_t i = 0; i < rows; ++i)
        EACH(v, vectors)
            store_first_f32(dw + i * cols + v * VL_F32, left - v * VL_F32, load_f32(edge + i * TILE_COLS + v * VL_F32));
}

static void outer_products(const cnorm_outer *call)
{
    const ptrdiff_t n = call->n, cols = call->w->cols, units = call->w->units, padded = padded_units(units);
    const int apart = VECTOR_BYTES == 64 && cnorm_cpu_broadcasts_in_fma();
    float *dz = call->scratch;               /* for each TILE_ROWS of TILE_UNITS units [OUTER_ROWS, TILE_ROWS] */
    float *x = dz + OUTER_ROWS * TILE_UNITS; /* strips of columns, each [n, vectors] */
    for (ptrdiff_t row = 0; row < call->w->gates * padded; row += TILE_UNITS) {
        const ptrdiff_t there = units - row % padded < TILE_UNITS ? units - row % padded : TILE_UNITS;
        float *dw = call->dw + (row / padded * units + row % padded) * cols;
        for (ptrdiff_t t = 0; t < n; ++t) {
            const float *from = call->dz[t] + row;
            prefetch(from, TILE_UNITS * sizeof *from, TILE_UNITS * sizeof *from);
            float last[TILE_UNITS] = {0}, *to = dz + t * TILE_ROWS;
            if (there < TILE_UNITS) from = memcpy(last, from, (size_t)there * sizeof *from);
            EACH(u, TILE_UNITS / TILE_ROWS)
                memcpy(to + u * TILE_ROWS * OUTER_ROWS, from + u * TILE_ROWS, TILE_ROWS * sizeof *to);
        }
        for (ptrdiff_t k = 0, vectors; k < cols; k += vectors * VL_F32) {
            vectors = (cols - k + VL_F32 - 1) / VL_F32; /* of four two, since a tile of one waits for its sums */
            vectors = vectors == 4 ? 2 : vectors < COL_VECTORS ? vectors : COL_VECTORS;
            float *strip = x + k * OUTER_ROWS;
            for (ptrdiff_t t = 0; row == 0 && t < n; ++t) {
                prefetch(call->x[t] + k, vectors * VECTOR_BYTES, vectors * VECTOR_BYTES);
                for (ptrdiff_t c = k; c < k + vectors * VL_F32; c += VL_F32, strip += VL_F32)
                    store_f32(strip, load_first_f32(call->x[t] + c, cols - c));
            }
            for (ptrdiff_t u = 0; u < there; u += TILE_ROWS) {
                float *to = dw + u * cols + k;
                if (vectors == 1) outer_part(call, 1, 0, u, there - u, k, to);
                else if (apart) outer_part(call, 2, 1, u, there - u, k, to);
                else if (vectors == 2) outer_part(call, 2, 0, u, there - u, k, to);
                else outer_part(call, COL_VECTORS, 0, u, there - u, k, to);
            }
        }
    }
}
