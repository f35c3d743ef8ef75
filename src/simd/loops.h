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

#define LOAD_RANGE(type, T, V)                                                                                         \
    static NOINLINE V load_range_##type(const T *p, ptrdiff_t from, ptrdiff_t to)                                      \
    {                                                                                                                  \
        T lanes[sizeof(V) / sizeof(T)] = {0};                                                                          \
        for (ptrdiff_t i = from; i < to; ++i) lanes[i] = p[i];                                                         \
        return load_##type(lanes);                                                                                     \
    }
LOAD_RANGE(u16, uint16_t, u16h)

static NOINLINE void rotate_lanes_f32(f32v lanes[LANE_VECTORS], ptrdiff_t lane_offset)
{
    float twice[2][LANES_F32];
    memcpy(twice[0], lanes, sizeof twice[0]);
    memcpy(twice[1], lanes, sizeof twice[1]);
    memcpy(lanes, twice[0] + lane_offset, sizeof twice[0]);
}

#endif
