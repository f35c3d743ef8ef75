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

/* sum [PASS] += `blocks` blocks, one after another, of `count` inputs each, from x and `at` on. Unrolled further than 4
 * inputs, GCC reads every other line of the block first and the others after them: a third slower from memory (Zen 4,
 * 2026-11-21). Four x by one load: loads are what weights in L1 wait for, 0.90 to 0.93 of the time with AVX2 (Zen 5,
 * 2026-11-30). */
INLINE void add_products(const cnorm_matrix *w, int half, int blocks, ptrdiff_t at, const float *x, int count,
                         f32v sum[PASS])
{
    f32v block[2 * PASS] = {{0}};
    int j = 0;
#pragma GCC unroll 1
    for (; INPUTS_AT_ONCE == 4 && j + 4 <= count; j += 4, at += 4 * PANEL) {
        EACH(k, 4)
            EACH(i, blocks * PASS) {
                const ptrdiff_t input = i / PASS * BLOCK, to = at + (input + k) * PANEL + i % PASS * VL_F32;
                block[i] = fma_f32(load_weights(w->panels, to, half), splat_of_4(x + input + j, k), block[i]);
            }
    }
#pragma GCC unroll 1
    for (; j < count; ++j, at += PANEL)
        EACH(i, PASS) block[i] = fma_f32(load_weights(w->panels, at + i * VL_F32, half), splat_f32(x[j]), block[i]);
    EACH(b, blocks) add_block_f32(PASS, sum, block + b * PASS);
}

/* z [packed rows] = W x + options.add. Elsewhere than on AMD's processors two blocks at a time, since the sums of one
 * wait for each other: 4 to 24 % less time from L1 and L2 (Cascade Lake, AVX2 and AVX-512, 2026-11-28). Those sum ahead
 * themselves, and prefetch by the stride of each load, which must then be one throughout: two blocks would take 20 to
 * 40 % more from L2 (Zen 5, 2026-11-29). */
INLINE void product_of(const cnorm_matrix *w, int half, const float *x, product_options options, float *z)
{
    const ptrdiff_t rows = packed_rows(w), cols = w->cols;
    const ptrdiff_t paired = BLOCKS_AT_ONCE == 2 && !cnorm_cpu_is_amd() ? cols / (2 * BLOCK) * (2 * BLOCK) : 0;
    for (ptrdiff_t done = 0; done < rows; done += PANEL) {
        const ptrdiff_t r = options.backwards ? rows - PANEL - done : done;
#pragma GCC unroll 2
        for (int first = 0; first < LANE_VECTORS; first += PASS) {
            ptrdiff_t at = r * cols + first * VL_F32, k = 0;
            f32v sum[PASS] = {{0}};
            for (; k < paired; k += 2 * BLOCK) add_products(w, half, 2, at + k * PANEL, x + k, BLOCK, sum);
            for (; k + BLOCK <= cols; k += BLOCK) add_products(w, half, 1, at + k * PANEL, x + k, BLOCK, sum);
            if (k < cols) add_products(w, half, 1, at + k * PANEL, x + k, (int)(cols - k), sum);
            EACH(i, PASS) {
                const ptrdiff_t to = r + (first + i) * VL_F32;
                store_f32(z + to, options.add ? sum[i] + load_f32(options.add + to) : sum[i]);
            }
        }
    }
}

/* product_of for float32 of at most CNORM_GATE_PAD rows, which reads half of a panel: 264 -> 8 in 0.6 of the time
 * (Zen 5, AVX-512, 2026-11-30). In product_of itself this cost other shapes 2 to 8 %. */
static void narrow_product(const cnorm_matrix *w, const float *x, product_options options, float *z)
{
    enum { WIDTH = LANE_VECTORS / 2 };
    const float *at = w->panels;
    f32v sum[WIDTH] = {{0}};
    for (ptrdiff_t k = 0; k < w->cols;) {
        const ptrdiff_t end = w->cols - k < BLOCK ? w->cols : k + BLOCK;
        f32v block[WIDTH] = {{0}};
        for (; k < end; ++k, at += PANEL)
            EACH(i, WIDTH) block[i] = fma_f32(load_f32(at + i * VL_F32), splat_f32(x[k]), block[i]);
        add_block_f32(WIDTH, sum, block);
    }
    EACH(i, WIDTH) {
        store_f32(z + i * VL_F32, options.add ? sum[i] + load_f32(options.add + i * VL_F32) : sum[i]);
        store_f32(z + CNORM_GATE_PAD + i * VL_F32, splat_f32(0));
    }
}
