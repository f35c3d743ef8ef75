/* NEON: weights are widened to 16 bits and multiplied into int32; the four lanes of an output are summed at the end. */
#include <arm_neon.h>
#include <string.h>

#include "backends.h"

#define INLINE static inline __attribute__((always_inline))

static void arrange(ptrdiff_t quads, const int16_t *q, ptrdiff_t n, int32_t (*x)[2])
{
    for (ptrdiff_t k = 0; k < quads; ++k) memcpy(x[k * n], q + 4 * k, sizeof *x);
}

/* 16 / count outputs at w for `count` vectors of x, over all quads; sum [16 / count, count] */
INLINE void outputs(const uint8_t *w, ptrdiff_t quads, int count, const int32_t (*x)[2], ptrdiff_t n, int32x4_t sum[16])
{
    for (ptrdiff_t k = 0; k < quads; ++k, w += 4 * CNORM_INT8_PANEL) {
#pragma GCC unroll 8
        for (int pair = 0; pair < 8 / count; ++pair) {
            const int16x8_t words = vreinterpretq_s16_u16(vmovl_u8(vld1_u8(w + 8 * pair)));
#pragma GCC unroll 4
            for (int s = 0; s < count; ++s) {
                const int16x4_t quad = vreinterpret_s16_s32(vld1_s32(x[k * n + s]));
                int32x4_t *to = &sum[2 * pair * count + s];
                to[0] = vmlal_s16(to[0], vget_low_s16(words), quad);
                to[count] = vmlal_s16(to[count], vget_high_s16(words), quad);
            }
        }
    }
}

INLINE void panel_sums(const uint8_t *panel, ptrdiff_t quads, int count, const int32_t (*x)[2], ptrdiff_t n,
                       int32_t *sums, ptrdiff_t stride)
{
    for (int first = 0; first < CNORM_INT8_PANEL; first += 16 / count) {
        int32x4_t sum[16];
        for (int i = 0; i < 16; ++i) sum[i] = vdupq_n_s32(0);
        outputs(panel + 4 * first, quads, count, x, n, sum);
        for (int i = 0; i < 16; ++i) sums[i % count * stride + first + i / count] = vaddvq_s32(sum[i]);
    }
}

#include "multiply.inl.h"
BACKEND_OF(neon);
