/* VNNI: vpdpbusd multiplies unsigned weights by signed digits and adds four products in int32, without saturation.
 * The file that includes this defines INTS, the vector of int32, and SPLAT and DPBUSD for it. */
#include <string.h>

#include "digits.h"

#define INLINE static inline __attribute__((always_inline))

typedef unsigned UNSIGNED __attribute__((vector_size(sizeof(INTS)))); /* sums wrap modulo 2^32 */

/* CHAINS: sums of each digit at a time. Twice 8, weights and digits would not fit in 16 registers, and take 1.5 times
 * as long (Zen 5, 2026-11-29). */
enum { INTS_OF = sizeof(INTS) / 4, VECTORS = CNORM_INT8_PANEL / INTS_OF, CHAINS = sizeof(INTS) == 64 ? 8 : 4 };

static void arrange(ptrdiff_t quads, const int16_t *q, ptrdiff_t n, int32_t (*x)[2]) { arrange_digits(quads, q, n, x); }

/* `vectors` of outputs at w, for `count` vectors of x, of one quad; lo and hi [vectors, count] */
INLINE void quad_sums(const uint8_t *w, int vectors, int count, const int32_t (*x)[2], INTS *lo, INTS *hi)
{
#pragma GCC unroll 4
    for (int v = 0; v < vectors; ++v) {
        INTS weights;
        memcpy(&weights, w + v * (int)sizeof weights, sizeof weights);
#pragma GCC unroll 4
        for (int s = 0; s < count; ++s) {
            lo[v * count + s] = DPBUSD(lo[v * count + s], weights, SPLAT(x[s][0]));
            hi[v * count + s] = DPBUSD(hi[v * count + s], weights, SPLAT(x[s][1]));
        }
    }
}

/* With only two accumulators for lo and two for hi, two quads at a time get accumulators of their own: DPBUSD has a
 * latency of 4 or 5 cycles, and one can start in each cycle. */
INLINE void panel_sums(const uint8_t *panel, ptrdiff_t quads, int count, const int32_t (*x)[2], ptrdiff_t n,
                       int32_t *sums, ptrdiff_t stride)
{
    const int vectors = VECTORS * count > CHAINS ? CHAINS / count : VECTORS, step = 4 * CNORM_INT8_PANEL;
    for (int first = 0; first < VECTORS; first += vectors) {
        const uint8_t *w = panel + first * (int)sizeof(INTS);
        INTS lo[2][CHAINS] = {{{0}}}, hi[2][CHAINS] = {{{0}}};
        ptrdiff_t k = 0;
        if (vectors * count == 2)
            for (; k + 2 <= quads; k += 2, w += 2 * step) {
                quad_sums(w, vectors, count, x + k * n, lo[0], hi[0]);
                quad_sums(w + step, vectors, count, x + (k + 1) * n, lo[1], hi[1]);
            }
        for (; k < quads; ++k, w += step) quad_sums(w, vectors, count, x + k * n, lo[0], hi[0]);
        for (int i = 0; i < vectors * count; ++i) {
            const UNSIGNED low = (UNSIGNED)lo[0][i] + (UNSIGNED)lo[1][i],
                           high = (UNSIGNED)hi[0][i] + (UNSIGNED)hi[1][i];
            const UNSIGNED sum = low + (high << 7);
            memcpy(sums + i % count * stride + (first + i / count) * INTS_OF, &sum, sizeof sum);
        }
    }
}

#include "multiply.inl.h"
