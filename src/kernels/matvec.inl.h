/* Packed matrix-vector product of float32, and the sum of its squares.
 *
 * A matrix W [rows, cols] is packed as column panels: PANEL outputs lie in lanes, panels [rows/PANEL][cols][PANEL],
 * padded with zero rows, one layout for every instruction set. For each output
 *   (1) inputs in blocks of 16: block = sum over the block of W[r, k] x[k], from zero, in order of k
 *   (2) z[r] = sum of the blocks, in order
 *   (3) squares = sum of z[r]^2 over PANEL lanes, panel after panel, then the halving tree
 * so the order of every sum is fixed by the shape alone. Blocks keep the error of K = 1024 inputs at 8e-7 instead of
 * 3.4e-6 and cost nothing. (3) is what a layer norm of a centred product needs: its mean is zero by construction.
 */
#ifndef CNORM_MATVEC_INL_H
#define CNORM_MATVEC_INL_H

#include "../simd/vector.h"
#include "kernels.h"

enum { PANELS_PER_FOLD = FOLD / PANEL };

/* z [rows padded to PANEL] = W x, returns the sum of its squares */
INLINE double matvec_squares(const cnorm_matrix *w, const float *x, float *z)
{
    const float *panel = w->panels;
    const ptrdiff_t panels = packed_rows(w) / PANEL, cols = w->cols;
    double total = 0;
    f32v squares[LANE_VECTORS];
    for (int i = 0; i < LANE_VECTORS; ++i) squares[i] = splat_f32(0);
    for (ptrdiff_t p = 0; p < panels; ++p, panel += cols * PANEL, z += PANEL) {
#pragma GCC unroll 2
        for (int first = 0; first < LANE_VECTORS; first += PASS) {
            const float *at = panel + first * VL_F32;
            f32v sum[PASS];
#pragma GCC unroll 4
            for (int i = 0; i < PASS; ++i) sum[i] = splat_f32(0);
            ptrdiff_t k = 0;
            for (; k + BLOCK <= cols; k += BLOCK) {
                f32v block[PASS];
#pragma GCC unroll 4
                for (int i = 0; i < PASS; ++i) block[i] = splat_f32(0);
#pragma GCC unroll 16
                for (int j = 0; j < BLOCK; ++j, at += PANEL) {
                    const f32v xk = splat_f32(x[k + j]);
#pragma GCC unroll 4
                    for (int i = 0; i < PASS; ++i) block[i] += load_f32(at + i * VL_F32) * xk;
                }
#pragma GCC unroll 4
                for (int i = 0; i < PASS; ++i) sum[i] += block[i];
            }
            if (k < cols) {
                f32v block[PASS];
#pragma GCC unroll 4
                for (int i = 0; i < PASS; ++i) block[i] = splat_f32(0);
                for (; k < cols; ++k, at += PANEL) {
                    const f32v xk = splat_f32(x[k]);
#pragma GCC unroll 4
                    for (int i = 0; i < PASS; ++i) block[i] += load_f32(at + i * VL_F32) * xk;
                }
#pragma GCC unroll 4
                for (int i = 0; i < PASS; ++i) sum[i] += block[i];
            }
#pragma GCC unroll 4
            for (int i = 0; i < PASS; ++i) {
                store_f32(z + (first + i) * VL_F32, sum[i]);
                squares[first + i] += sum[i] * sum[i];
            }
        }
        if ((p + 1) % PANELS_PER_FOLD == 0 || p + 1 == panels) {
            total += (double)tree_f32(squares);
            for (int i = 0; i < LANE_VECTORS; ++i) squares[i] = splat_f32(0);
        }
    }
    return total;
}

#endif
