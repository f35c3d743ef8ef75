/* Packed matrix-vector products of float32, for one vector or for several in one pass over the weights.
 * Weights are float32, or float16 that is widened when loaded; matvec_int8.inl.h has those of int8.
 *
 * A matrix W [rows, cols] is packed in panels of PANEL outputs, one in each lane: [rows/PANEL][cols][PANEL], padded
 * with zero rows, one layout for every instruction set. For each output
 *   (1) inputs in blocks of 16: block = sum over the block of W[r, k] x[k], from zero, in order of k
 *   (2) z[r] = sum of the blocks, in order, + add[r]
 * so the order of every sum is fixed by the shape alone, however many vectors there are. Blocks keep the largest
 * error of 2,000 sums of 1024 normal products at 8.6e-7 of the sums' root mean square, instead of 3.9e-6.
 */
#ifndef CNORM_MATVEC_INL_H
#define CNORM_MATVEC_INL_H

#include "../simd/storage.h"
#include "kernels.h"
#include "matvec_int8.inl.h"
#include "tuning.h"

enum { MANY = VECTOR_BYTES == 64 ? 8 : 4 }; /* vectors at a time: two accumulators of each must fit in registers */

/* AVX-512 multiplies by a float that it broadcasts from memory as fast as by a register. If two products share the
 * broadcast, it becomes an instruction of its own (10.7 instead of 16 multiply-adds a cycle, Zen 4, 2026-11-21). A
 * second pointer, which the compiler can't know to be equal, prevents the sharing. */
#if VECTOR_BYTES == 64
#define ANOTHER(pointer) __asm__("" : "+r"(pointer))
#else
#define ANOTHER(pointer) ((void)(pointer))
#endif

/* Keeps `values` in memory, so that all accumulators stay in registers: otherwise GCC spills one of them, at half the
 * speed (Zen 4, 2026-11-21). */
#define IN_MEMORY(values) __asm__("" : "+m"(values))

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
    f32v block[PASS];
#pragma GCC unroll 4
    for (int i = 0; i < PASS; ++i) block[i] = splat_f32(0);
#pragma GCC unroll 4
    for (int j = 0; j < count; ++j, *at += PANEL)
#pragma GCC unroll 4
        for (int i = 0; i < PASS; ++i) block[i] += load_weights(w->panels, *at + i * VL_F32, half) * splat_f32(x[j]);
#pragma GCC unroll 4
    for (int i = 0; i < PASS; ++i) sum[i] += block[i];
}

/* z [packed rows] = W x + add; add may be NULL. Returns sum_of_squares(z, rows), whose cost is hidden by the loads of
 * weights. */
INLINE double product_of(const cnorm_matrix *w, int half, const float *x, const float *add, float *z)
{
    ptrdiff_t panel = 0;
    const ptrdiff_t rows = packed_rows(w), cols = w->cols;
    double total = 0;
    f32v squares[LANE_VECTORS];
    for (int i = 0; i < LANE_VECTORS; ++i) squares[i] = splat_f32(0);
    for (ptrdiff_t r = 0; r < rows; r += PANEL, panel += cols * PANEL) {
#pragma GCC unroll 2
        for (int first = 0; first < LANE_VECTORS; first += PASS) {
            IN_MEMORY(squares);
            ptrdiff_t at = panel + first * VL_F32, k = 0;
            f32v sum[PASS];
#pragma GCC unroll 4
            for (int i = 0; i < PASS; ++i) sum[i] = splat_f32(0);
            for (; k + BLOCK <= cols; k += BLOCK) add_products(w, half, &at, x + k, BLOCK, sum);
            if (k < cols) add_products(w, half, &at, x + k, (int)(cols - k), sum);
#pragma GCC unroll 4
            for (int i = 0; i < PASS; ++i) {
                const ptrdiff_t to = r + (first + i) * VL_F32;
                if (add) sum[i] += load_f32(add + to);
                store_f32(z + to, sum[i]);
                squares[first + i] += sum[i] * sum[i];
            }
        }
        if ((r + PANEL) % FOLD == 0 || r + PANEL == rows) {
            total += (double)tree_f32(squares);
            for (int i = 0; i < LANE_VECTORS; ++i) squares[i] = splat_f32(0);
        }
    }
    return total;
}

/* sum of squares of z [n], n a multiple of CNORM_GATE_PAD: lanes, the halving tree, float64 every FOLD elements */
INLINE double sum_of_squares(const float *z, ptrdiff_t n)
{
    double total = 0;
    for (ptrdiff_t start = 0; start < n; start += FOLD) {
        const ptrdiff_t end = n - start < FOLD ? n : start + FOLD;
        f32v squares[LANE_VECTORS];
        for (int i = 0; i < LANE_VECTORS; ++i) squares[i] = splat_f32(0);
        ptrdiff_t j = start;
        for (; j + LANES_F32 <= end; j += LANES_F32)
#pragma GCC unroll 8
            for (int i = 0; i < LANE_VECTORS; ++i) {
                const f32v v = load_f32(z + j + i * VL_F32);
                squares[i] += v * v;
            }
        if (j < end)
#pragma GCC unroll 4
            for (int i = 0; i < CNORM_GATE_PAD / VL_F32; ++i) {
                const f32v v = load_f32(z + j + i * VL_F32);
                squares[i] += v * v;
            }
        total += (double)tree_f32(squares);
    }
    return total;
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
#pragma GCC unroll 4
                for (int i = 0; i < HALVES; ++i) block[i] += load_f16h(at + i * VL_F32 / 2) * splat_f32h(x[k]);
#pragma GCC unroll 4
            for (int i = 0; i < HALVES; ++i) sum[i] += block[i];
        }
#pragma GCC unroll 4
        for (int i = 0; i < HALVES; ++i) {
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

/* to [cols, count] = x [count][cols] transposed; count a constant: 1, 2 or a multiple of 4 */
INLINE void interleave(ptrdiff_t cols, int count, const float *const *x, float *to)
{
    ptrdiff_t k = 0;
    for (; count % 4 == 0 && k + 4 <= cols; k += 4)
        for (int s = 0; s < count; s += 4) {
            f32x4 r[4], pair[4];
#pragma GCC unroll 4
            for (int i = 0; i < 4; ++i) memcpy(r + i, x[s + i] + k, sizeof *r);
#pragma GCC unroll 2
            for (int i = 0; i < 2; ++i) {
                pair[i] = __builtin_shufflevector(r[2 * i], r[2 * i + 1], 0, 4, 1, 5);
                pair[i + 2] = __builtin_shufflevector(r[2 * i], r[2 * i + 1], 2, 6, 3, 7);
            }
#pragma GCC unroll 2
            for (int i = 0; i < 4; i += 2) {
                r[i] = __builtin_shufflevector(pair[i], pair[i + 1], 0, 1, 4, 5);
                r[i + 1] = __builtin_shufflevector(pair[i], pair[i + 1], 2, 3, 6, 7);
            }
#pragma GCC unroll 4
            for (int i = 0; i < 4; ++i) memcpy(to + (k + i) * count + s, r + i, sizeof *r);
        }
    for (; count == 2 && k + 4 <= cols; k += 4) {
        f32x4 r[2];
        memcpy(r, x[0] + k, sizeof *r), memcpy(r + 1, x[1] + k, sizeof *r);
        const f32x4 pair[2] = {__builtin_shufflevector(r[0], r[1], 0, 4, 1, 5),
                               __builtin_shufflevector(r[0], r[1], 2, 6, 3, 7)};
        memcpy(to + 2 * k, pair, sizeof pair);
    }
    for (; k < cols; ++k)
        for (int s = 0; s < count; ++s) to[k * count + s] = x[s][k];
}

/* z [count, packed rows] = W x + add for `count` vectors, a constant; xt [cols, count] is scratch */
INLINE void product_together(const cnorm_matrix *w, int count, const float *const *vectors, addends add, float *z,
                             ptrdiff_t z_stride, float *xt)
{
    const int half = w->type == CNORM_WEIGHT_F16;
    const ptrdiff_t rows = packed_rows(w), cols = w->cols;
    ptrdiff_t panel = 0;
    interleave(cols, count, vectors, xt);
    for (ptrdiff_t r = 0; r < rows; r += PANEL, panel += cols * PANEL) {
        for (int first = 0; first < LANE_VECTORS; first += 2) {
            ptrdiff_t at = panel + first * VL_F32;
            const float *x = xt, *x2 = xt;
            if (count > 2) ANOTHER(x2); /* two vectors are limited by loads, which sharing saves */
            f32v sum[2 * MANY];
#pragma GCC unroll 16
            for (int i = 0; i < 2 * count; ++i) sum[i] = splat_f32(0);
            for (ptrdiff_t k = 0; k < cols; k += BLOCK) {
                const float *end = x + (cols - k < BLOCK ? cols - k : BLOCK) * count;
                f32v block[2 * MANY];
#pragma GCC unroll 16
                for (int i = 0; i < 2 * count; ++i) block[i] = splat_f32(0);
                for (; x < end; x += count, x2 += count, at += PANEL) {
                    const f32v lo = load_weights(w->panels, at, half), hi = load_weights(w->panels, at + VL_F32, half);
#pragma GCC unroll 8
                    for (int s = 0; s < count; ++s) {
                        block[2 * s] += lo * splat_f32(x[s]);
                        block[2 * s + 1] += hi * splat_f32(x2[s]);
                    }
                }
#pragma GCC unroll 16
                for (int i = 0; i < 2 * count; ++i) sum[i] += block[i];
            }
#pragma GCC unroll 16
            for (int i = 0; i < 2 * count; ++i) {
                const ptrdiff_t s = i / 2, to = r + (first + i % 2) * VL_F32;
                store_f32(z + s * z_stride + to, add.rows ? sum[i] + load_f32(add.rows + s * add.stride + to) : sum[i]);
            }
        }
    }
}

/* z [n, packed rows] = W x + add for n <= CNORM_ROWS vectors; scratch [product_scratch_floats]. Returns the sum of
 * squares of z if n = 1, else -1. */
static double products(const cnorm_matrix *w, ptrdiff_t n, const float *const *x, addends add, float *z,
                       ptrdiff_t z_stride, float *scratch)
{
    if (w->type == CNORM_WEIGHT_I8) return products_int8(w, n, x, add, z, z_stride, scratch);
    if (n == 1) return product(w, x[0], add.rows, z);
    while (n > 0) {
        const int count = n >= MANY ? MANY : n >= 4 ? 4 : n >= 2 ? 2 : 1;
        if (count == 1) (void)product(w, x[0], add.rows, z);
        else if (count == 2) product_together(w, 2, x, add, z, z_stride, scratch);
        else if (count == 4) product_together(w, 4, x, add, z, z_stride, scratch);
        else product_together(w, MANY, x, add, z, z_stride, scratch);
        n -= count;
        x += count;
        z += count * z_stride;
        if (add.rows) add.rows += count * add.stride;
    }
    return -1;
}

#endif
