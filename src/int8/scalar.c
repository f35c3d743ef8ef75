/* Plain C for every machine: the reference of the other backends' tests. */
#include <string.h>

#include "backends.h"

static void arrange(ptrdiff_t quads, const int16_t *q, ptrdiff_t n, int32_t (*x)[2])
{
    for (ptrdiff_t k = 0; k < quads; ++k) memcpy(x[k * n], q + 4 * k, sizeof *x);
}

static void panel_sums(const uint8_t *panel, ptrdiff_t quads, int count, const int32_t (*x)[2], ptrdiff_t n,
                       int32_t *sums, ptrdiff_t stride)
{
    for (int s = 0; s < count; ++s) {
        uint32_t sum[CNORM_INT8_PANEL] = {0};
        for (ptrdiff_t k = 0; k < quads; ++k) {
            const uint8_t *w = panel + k * 4 * CNORM_INT8_PANEL;
            int16_t q[4];
            memcpy(q, x[k * n + s], sizeof q);
            for (int r = 0; r < CNORM_INT8_PANEL; ++r)
                for (int i = 0; i < 4; ++i) sum[r] += (uint32_t)(w[4 * r + i] * q[i]);
        }
        memcpy(sums + s * stride, sum, sizeof sum);
    }
}

#include "multiply.inl.h"
BACKEND_OF(scalar);
