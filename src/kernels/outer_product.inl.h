/* The gradient of a matrix W [gates * units, cols], row by row.
 *
 *   (1) dW = sum over the rows of a batch of dz x^T: in order, in blocks of 16 rows from zero
 * The order of every sum is fixed by the number of rows alone. A tile of TILE_ROWS rows of dW and one or two vectors of
 * columns stays in registers over a block: each multiply-add takes one broadcast of dz from memory and no other load.
 * The next tile of dW and the next units of dz, whose rows are further apart than a page, are prefetched. */

enum { TILE_ROWS = VECTOR_BYTES == 64 ? 8 : 4 }; /* of dW, a divisor of PANEL */

/* sums [TILE_ROWS, vectors] += sum over n rows of dz [n, TILE_ROWS] times x [n, LANES_F32]; `vectors` is a constant */
INLINE void outer_tile(ptrdiff_t n, int vectors, const float *dz, const float *x, f32v *sums)
{
    for (ptrdiff_t row = 0; row < n; row += BLOCK) {
        const ptrdiff_t end = n - row < BLOCK ? n : row + BLOCK;
        f32v block[2 * TILE_ROWS] = {{0}};
        for (ptrdiff_t t = row; t < end; ++t) {
            const float *from = dz + t * TILE_ROWS, *again = from;
            ANOTHER(again);
            f32v at[2] = {load_f32(x + t * LANES_F32)};
            if (vectors == 2) at[1] = load_f32(x + t * LANES_F32 + VL_F32);
            EACH(i, TILE_ROWS) {
                block[vectors * i] = fma_f32(at[0], splat_f32(from[i]), block[vectors * i]);
                if (vectors == 2) block[2 * i + 1] = fma_f32(at[1], splat_f32(again[i]), block[2 * i + 1]);
            }
        }
        add_block_f32(vectors * TILE_ROWS, sums, block);
    }
}

/* (1) for `count` <= TILE_ROWS rows of dW from dw on and `cols` columns */
INLINE void outer_columns(const cnorm_outer *call, int vectors, const float *dz, const float *x, ptrdiff_t count,
                          ptrdiff_t cols, float *dw)
{
    f32v sums[2 * TILE_ROWS];
    for (int i = 0; i < vectors * TILE_ROWS; ++i) {
        const ptrdiff_t row = i / vectors, at = i % vectors * VL_F32;
        const int there = call->onto && row < count;
        sums[i] = there ? load_first_f32(dw + row * call->w->cols + at, cols - at) : splat_f32(0);
    }
    for (ptrdiff_t i = 0; i < count; ++i) prefetch(dw + i * call->w->cols, 2 * VECTOR_BYTES, 2 * VECTOR_BYTES);
    outer_tile(call->n, vectors, dz, x, sums);
    for (int i = 0; i < vectors * count; ++i) {
        const ptrdiff_t at = i % vectors * VL_F32;
        float *to = dw + i / vectors * call->w->cols + at;
        store_first_f32(to, cols - at, sums[i]);
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
    const ptrdiff_t n = call->n, cols = call->w->cols, units = call->w->units;
    float *copied = call->scratch;          /* dz of PANEL units: for each TILE_ROWS of them [OUTER_ROWS, TILE_ROWS] */
    float *x = copied + OUTER_ROWS * PANEL; /* for each 32 columns [OUTER_ROWS, 32] */
    for (ptrdiff_t t = 0; t < n; ++t)
        for (ptrdiff_t k = 0; k < cols; k += LANES_F32)
            copy_padded(x + k * OUTER_ROWS + t * LANES_F32, call->x[t] + k, cols - k, LANES_F32);
    for (ptrdiff_t gate = 0; gate < call->w->gates; ++gate)
        for (ptrdiff_t unit = 0; unit < units; unit += TILE_ROWS) {
            const ptrdiff_t count = units - unit < TILE_ROWS ? units - unit : TILE_ROWS;
            const ptrdiff_t from = gate * padded_units(units) + unit;
            float *dw = call->dw + (gate * units + unit) * cols;
            if (unit % PANEL == 0) /* whole cache lines of a row at a time */
                for (ptrdiff_t t = 0; t < n; ++t) {
                    prefetch(call->dz[t] + from, PANEL * sizeof(float), PANEL * sizeof(float));
                    for (ptrdiff_t u = 0; u < PANEL && unit + u < units; u += TILE_ROWS)
                        copy_padded(copied + u * OUTER_ROWS + t * TILE_ROWS, call->dz[t] + from + u, units - unit - u,
                                    TILE_ROWS);
                }
            const float *dz = copied + unit % PANEL * OUTER_ROWS;
            for (ptrdiff_t k = 0; k < cols; k += 2 * VL_F32) {
                const float *columns = x + k / LANES_F32 * LANES_F32 * OUTER_ROWS + k % LANES_F32;
                if (cols - k > VL_F32) outer_columns(call, 2, dz, columns, count, cols - k, dw + k);
                else outer_columns(call, 1, dz, columns, count, cols - k, dw + k);
            }
        }
}
