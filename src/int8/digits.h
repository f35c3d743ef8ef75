/* q = lo + 128 hi with 0 <= lo < 128 and -64 <= hi < 64: two digits, each a signed byte. Of the eight bytes of a quad,
 * the lower four are lo of its four inputs, the upper four hi. */
#ifndef CNORM_INT8_DIGITS_H
#define CNORM_INT8_DIGITS_H

#include "units.h"

static inline uint64_t digits_of(const int16_t q[4])
{
    uint64_t quad = 0;
    for (int i = 0; i < 4; ++i) {
        const uint16_t bits = (uint16_t)q[i];
        quad |= (uint64_t)(bits & 127) << 8 * i | (uint64_t)(bits >> 7 & 127) << (32 + 8 * i);
    }
    return quad | (quad & 0x4040404000000000u) << 1; /* the sign of hi */
}

/* column 0 of x [quads, n] */
static inline void arrange_digits(ptrdiff_t quads, const int16_t *q, ptrdiff_t n, int32_t (*x)[2])
{
    for (ptrdiff_t k = 0; k < quads; ++k) {
        const uint64_t quad = digits_of(q + 4 * k);
        x[k * n][0] = (int32_t)(uint32_t)quad;
        x[k * n][1] = (int32_t)(uint32_t)(quad >> 32);
    }
}

#endif
