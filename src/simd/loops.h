/* Functions of vector.h and storage.h as loops over the lanes, for instruction sets without masked stores and
 * permutations of two vectors. Included by avx2.h and vector_16.h. Called, not inlined: GCC makes 200 bytes of each
 * loop, and they are for the ends of rows. */
#include "vector.h"

#ifndef CNORM_SIMD_LOOPS_H
#define CNORM_SIMD_LOOPS_H

static NOINLINE void store_range_f32(float *p, ptrdiff_t from, ptrdiff_t to, f32v v)
{
    for (ptrdiff_t i = from; i < to; ++i) p[i] = v[i];
}
static NOINLINE void store_range_f64(double *p, ptrdiff_t from, ptrdiff_t to, f64v v)
{
    for (ptrdiff_t i = from; i < to; ++i) p[i] = v[i];
}
static NOINLINE void store_range_u16(uint16_t *p, ptrdiff_t from, ptrdiff_t to, u16h v)
{
    for (ptrdiff_t i = from; i < to; ++i) p[i] = v[i];
}
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

/* the bits that are set in any vector, and those set in every vector */
INLINE void combine_bits_f32(const f32v lanes[LANE_VECTORS], i32v *any, i32v *every)
{
    *any = *every = (i32v)lanes[0];
    for (int i = 1; i < LANE_VECTORS; ++i) *any |= (i32v)lanes[i], *every &= (i32v)lanes[i];
}
INLINE int one_sign_f64(const f64v lanes[LANE_VECTORS])
{
    i64v any = (i64v)lanes[0], every = any;
    for (int i = 1; i < LANE_VECTORS; ++i) any |= (i64v)lanes[i], every &= (i64v)lanes[i];
    int64_t any_lane = 0, every_lane = -1;
    for (int i = 0; i < VL_F64; ++i) any_lane |= any[i], every_lane &= every[i];
    return any_lane >= 0 || every_lane < 0;
}

#endif
