/* Functions of vector.h and storage.h as loops over the lanes, for instruction sets without masked stores and
 * permutations of two vectors. Included by avx2.h and vector_16.h. Called, not inlined: GCC makes 200 bytes of each
 * loop, and they are for the ends of rows. */
#include "vector.h"

#ifndef CNORM_SIMD_LOOPS_H
#define CNORM_SIMD_LOOPS_H

#define STORE_RANGE(type, T, V)                                                                                        \
    static NOINLINE void store_range_##type(T *p, ptrdiff_t from, ptrdiff_t to, V v)                                   \
    {                                                                                                                  \
        for (ptrdiff_t i = from; i < to; ++i) p[i] = v[i];                                                             \
    }
STORE_RANGE(f32, float, f32v)
STORE_RANGE(f64, double, f64v)
STORE_RANGE(u16, uint16_t, u16h)
#undef STORE_RANGE
static NOINLINE u16h load_range_u16(const uint16_t *p, ptrdiff_t from, ptrdiff_t to)
{
    uint16_t lanes[VL_F32] = {0};
    for (ptrdiff_t i = from; i < to; ++i) lanes[i] = p[i];
    return load_u16(lanes);
}

#define ROTATE(type, T, V)                                                                                             \
    static NOINLINE void rotate_lanes_##type(V lanes[LANE_VECTORS], ptrdiff_t lane_offset)                             \
    {                                                                                                                  \
        T twice[2][128 / sizeof(T)];                                                                                   \
        memcpy(twice[0], lanes, 128);                                                                                  \
        memcpy(twice[1], lanes, 128);                                                                                  \
        memcpy(lanes, twice[0] + lane_offset, 128);                                                                    \
    }
ROTATE(f32, float, f32v)
ROTATE(f64, double, f64v)
#undef ROTATE

#define ONE_SIGN(type, V, I)                                                                                           \
    INLINE int one_sign_##type(const V lanes[LANE_VECTORS])                                                            \
    {                                                                                                                  \
        I any = (I)lanes[0], every = any;                                                                              \
        for (int i = 1; i < LANE_VECTORS; ++i) any |= (I)lanes[i], every &= (I)lanes[i];                               \
        int64_t any_lane = 0, every_lane = -1;                                                                         \
        for (size_t i = 0; i < sizeof any / sizeof any[0]; ++i) any_lane |= any[i], every_lane &= every[i];            \
        return any_lane >= 0 || every_lane < 0;                                                                        \
    }
ONE_SIGN(f64, f64v, i64v)

#endif
