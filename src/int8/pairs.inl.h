/* SSE2 and AVX2: even and odd bytes of the weights are widened to 16 bits, and vpmaddwd multiplies pairs of these and
 * adds each pair in int32. (vpmaddubsw would take the bytes themselves, but saturates.) The file that includes this
 * defines INTS, the vector of int32, and SPLAT, EVEN, ODD, MADD for it. All accumulators of one vector are summed in
 * one pass over the weights: two passes would load every cache line twice. */
#include <string.h>

#include "backends.h"

#define INLINE static inline __attribute__((always_inline))

typedef unsigned UNSIGNED __attribute__((vector_size(sizeof(INTS)))); /* sums wrap modulo 2^32 */

enum { INTS_OF = sizeof(INTS) / 4, VECTORS = CNORM_INT8_PANEL / INTS_OF };

/* (q0, q2) in the lower half, (q1, q3) in the upper */
static void arrange(ptrdiff_t quads, const int16_t *q, ptrdiff_t n, int32_t (*x)[2])
{
    for (ptrdiff_t k = 0; k < quads; ++k) {
        const int16_t pairs[4] = {q[4 * k], q[4 * k + 2], q[4 * k + 1], q[4 * k + 3]};
        memcpy(x[k * n], pairs, sizeof pairs);
    }
}

/* `vectors` of outputs at w, for `count` vectors of x, over all quads; `sum` [vectors, count] */
INLINE void outputs(const uint8_t *w, ptrdiff_t quads, int vectors, int count, const int32_t (*x)[2], ptrdiff_t n,
                    INTS *sum)
{
#pragma GCC unroll 2
    for (ptrdiff_t k = 0; k < quads; ++k, w += 4 * CNORM_INT8_PANEL) {
#pragma GCC unroll 8
        for (int v = 0; v < vectors; ++v) {
            INTS bytes;
            memcpy(&bytes, w + v * (int)sizeof bytes, sizeof bytes);
#pragma GCC unroll 4
            for (int s = 0; s < count; ++s) {
                const int32_t *q = x[k * n + s];
                const UNSIGNED both =
                    (UNSIGNED)MADD(EVEN(bytes), SPLAT(q[0])) + (UNSIGNED)MADD(ODD(bytes), SPLAT(q[1]));
                sum[v * count + s] = (INTS)((UNSIGNED)sum[v * count + s] + both);
            }
        }
    }
}

INLINE void panel_sums(const uint8_t *panel, ptrdiff_t quads, int count, const int32_t (*x)[2], ptrdiff_t n,
                       int32_t *sums, ptrdiff_t stride)
{
    const int vectors = VECTORS * count > 8 ? 8 / count : VECTORS;
    for (int first = 0; first < VECTORS; first += vectors) {
        const INTS zero = {0};
        INTS sum[8];
        for (int i = 0; i < vectors * count; ++i) sum[i] = zero;
        outputs(panel + first * (int)sizeof(INTS), quads, vectors, count, x, n, sum);
        for (int i = 0; i < vectors * count; ++i)
            memcpy(sums + i % count * stride + (first + i / count) * INTS_OF, &sum[i], sizeof sum[i]);
    }
}

#include "multiply.inl.h"
