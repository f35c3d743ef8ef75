/* NEON with the dot products of ARMv8.2: sdot adds four products of signed bytes in int32. (usdot would take the
 * unsigned weights w + 128, but fewer processors have it.) Weights are converted to signed w, and 128 sum of q is added
 * at the end. */
#include <arm_neon.h>
#include <string.h>

#include "digits.h"

#define INLINE static inline __attribute__((always_inline))

static void arrange(ptrdiff_t quads, const int16_t *q, ptrdiff_t n, int32_t (*x)[2]) { arrange_digits(quads, q, n, x); }

/* 8 / count vectors of four outputs at w for `count` vectors of x, of one quad; lo and hi [8 / count, count] */
INLINE void quad_sums(const uint8_t *w, int count, const int32_t (*x)[2], int32x4_t lo[8], int32x4_t hi[8])
{
    const uint8x16_t bias = vdupq_n_u8(CNORM_INT8_BIAS);
#pragma GCC unroll 8
    for (int v = 0; v < 8 / count; ++v) {
        const int8x16_t weights = vreinterpretq_s8_u8(veorq_u8(vld1q_u8(w + 16 * v), bias));
#pragma GCC unroll 4
        for (int s = 0; s < count; ++s) {
            const int8x8_t digits = vreinterpret_s8_s32(vld1_s32(x[s]));
            lo[v * count + s] = vdotq_lane_s32(lo[v * count + s], weights, digits, 0);
            hi[v * count + s] = vdotq_lane_s32(hi[v * count + s], weights, digits, 1);
        }
    }
}

/* 128 times the sum of q, modulo 2^32 */
INLINE int32_t bias_sum(ptrdiff_t quads, const int32_t (*x)[2], ptrdiff_t n)
{
    int32x2_t sum = vdup_n_s32(0);
    for (ptrdiff_t k = 0; k < quads; ++k) sum = vdot_s32(sum, vdup_n_s8(1), vreinterpret_s8_s32(vld1_s32(x[k * n])));
    return (int32_t)((uint32_t)vget_lane_s32(sum, 0) * 128 + (uint32_t)vget_lane_s32(sum, 1) * 16384);
}

INLINE void panel_sums(const uint8_t *panel, ptrdiff_t quads, int count, const int32_t (*x)[2], ptrdiff_t n,
                       int32_t *sums, ptrdiff_t stride)
{
    int32_t bias[4];
    for (int s = 0; s < count; ++s) bias[s] = bias_sum(quads, x + s, n);
    for (int first = 0; first < 8; first += 8 / count) {
        int32x4_t lo[8], hi[8];
        for (int i = 0; i < 8; ++i) lo[i] = hi[i] = vdupq_n_s32(0);
        for (ptrdiff_t k = 0; k < quads; ++k)
            quad_sums(panel + k * 4 * CNORM_INT8_PANEL + 16 * first, count, x + k * n, lo, hi);
        for (int i = 0; i < 8; ++i) {
            const int32x4_t sum = vaddq_s32(lo[i], vshlq_n_s32(hi[i], 7));
            vst1q_s32(sums + i % count * stride + 4 * (first + i / count),
                      vaddq_s32(sum, vdupq_n_s32(bias[i % count])));
        }
    }
}

#include "multiply.inl.h"
BACKEND_OF(dotprod);
