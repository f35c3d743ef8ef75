/* Packed matrix-vector products of float32; matmul.inl.h has those of several vectors.
 * Weights are float32, or float16 that is widened when loaded; matvec_int8.inl.h has those of int8.
 *
 * A matrix W [rows, cols] is packed in panels of PANEL outputs, one in each lane: [rows/PANEL][cols][PANEL], padded
 * with zero rows, one layout for every instruction set. For each output
 *   (1) inputs in blocks of 16: block = fma(W[r, k], x[k], block), from zero, in order of k
 *   (2) z[r] = sum of the blocks, in order, + add[r]
 * so the order of every sum is fixed by the shape alone, however many vectors there are. Blocks keep the largest
 * error of 2,000 sums of 1024 normal products at 8.6e-7 of the sums' root mean square, instead of 3.9e-6. */

/* a vector of weights, `at` elements into the panels; `half`, a constant: the weights are float16 */
INLINE f32v load_weights(const void *panels, ptrdiff_t at, int half)
{
    return half ? load_f16((const uint16_t *)panels + at) : load_f32((const float *)panels + at);
}

/* sum [PASS] += a block: the products of `count` inputs x, whose weights begin at *at. Unrolled further than 4
 * inputs, GCC reads every other line of the block first and the others after them: a third slower from memory (Zen
 * 4, 2026-11-21). */
INLINE void add_products(const cnorm_matrix *w, int half, ptrdiff_t *at, const float *x, int count, f32v sum[PASS])
{
    f32v block[PASS] = {{0}};
#pragma GCC unroll 4
    for (int j = 0; j < count; ++j, *at += PANEL)
        EACH(i, PASS) block[i] = fma_f32(load_weights(w->panels, *at + i * VL_F32, half), splat_f32(x[j]), block[i]);
    add_block_f32(PASS, sum, block);
}

/* z [packed rows] = W x + add; add may be NULL. Returns sum_of_squares(z, rows), whose cost is hidden by the loads of
 * weights. */
INLINE double product_of(const cnorm_matrix *w, int half, const float *x, const float *add, float *z)
{
    ptrdiff_t panel = 0;
    const ptrdiff_t rows = packed_rows(w), cols = w->cols;
    lane_sum squares = {.total = 0};
    for (ptrdiff_t r = 0; r < rows; r += PANEL, panel += cols * PANEL) {
#pragma GCC unroll 2
        for (int first = 0; first < LANE_VECTORS; first += PASS) {
            /* in memory, so that all accumulators stay in registers: otherwise GCC spills one, at half speed (Zen 4,
             * 2026-11-21) */
            __asm__("" : "+m"(squares.lanes));
            ptrdiff_t at = panel + first * VL_F32, k = 0;
            f32v sum[PASS] = {{0}};
            for (; k + BLOCK <= cols; k += BLOCK) add_products(w, half, &at, x + k, BLOCK, sum);
            if (k < cols) add_products(w, half, &at, x + k, (int)(cols - k), sum);
            EACH(i, PASS) {
                const ptrdiff_t to = r + (first + i) * VL_F32;
                if (add) sum[i] += load_f32(add + to);
                store_f32(z + to, sum[i]);
                squares.lanes[first + i] += sum[i] * sum[i];
            }
        }
        if ((r + PANEL) % FOLD == 0 || r + PANEL == rows) fold(&squares);
    }
    return squares.total;
}

#if VECTOR_BYTES == 64
enum { HALVES = PANEL / (VL_F32 / 2) };

/* product_of for float16 in vectors of 32 bytes: 26 % faster (Zen 4, 2026-11-23) */
static double product_f16(const cnorm_matrix *w, const float *x, const float *add, float *z)
{
    const uint16_t *at = w->panels;
    const ptrdiff_t rows = packed_rows(w), cols = w->cols;
    for (ptrdiff_t r = 0; r < rows; r += PANEL) {
        f32h sum[HALVES] = {{0}};
        for (ptrdiff_t k = 0; k < cols;) {
            const ptrdiff_t end = cols - k < BLOCK ? cols : k + BLOCK;
            f32h block[HALVES] = {{0}};
            for (; k < end; ++k, at += PANEL)
                EACH(i, HALVES) block[i] = fma_f32h(load_f16h(at + i * VL_F32 / 2), splat_f32h(x[k]), block[i]);
            EACH(i, HALVES) sum[i] += block[i];
        }
        EACH(i, HALVES) {
            const ptrdiff_t to = r + i * VL_F32 / 2;
            f32h more = {0};
            if (add) memcpy(&more, add + to, sizeof more), sum[i] += more;
            memcpy(z + to, &sum[i], sizeof sum[i]);
        }
    }
    return sum_of_squares(z, rows);
}
#else
#define product_f16(w, x, add, z) product_of(w, 1, x, add, z)
#endif

static double product(const cnorm_matrix *w, const float *x, const float *add, float *z)
{
    return w->type == CNORM_WEIGHT_F16 ? product_f16(w, x, add, z) : product_of(w, 0, x, add, z);
}
