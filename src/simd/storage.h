/* Storage types: the types of elements in memory. Arithmetic is in float or double.
 *
 * f16 and bf16 are storage of float: widened exactly, rounded to nearest even, NaN stays NaN, the same bits on machines
 * with and without conversion instructions. They have the load, load_range, store, store_range and nt_store of
 * vector.h. All four types have
 *     rounded_*   a vector rounded to the storage type and widened again
 *     store_two_*, nt_store_two_*   two adjacent vectors, in which a NaN is the default NaN of arithmetic */
#ifndef CNORM_SIMD_STORAGE_H
#define CNORM_SIMD_STORAGE_H

#include "vector.h"

/* bfloat16 is the upper half of a float. round_bf16 adds 0x7fff, just under half a unit in the last place kept, and the
 * last bit kept, so that ties go to even. A NaN is not rounded, since the carry could make it 0 or infinity; its quiet
 * bit is set instead. The default quiet NaN can be rounded. avx512.h has its own versions. */
#if VECTOR_BYTES < 64
INLINE f32v widen_bf16(u16h v) { return (f32v)(extend_u16(v) << 16); }
INLINE u32v round_bf16(u32v bits) { return bits + ((bits >> 16 & 1) + 0x7fff); }
INLINE u16h narrow_bf16(f32v v)
{
    const u32v bits = (u32v)v, nan = (u32v)(v != v);
    return truncate_u16((i32v)(((round_bf16(bits) & ~nan) | ((bits | 0x400000) & nan)) >> 16));
}
#endif
INLINE u16v narrow_two_bf16(f32v a, f32v b)
{
    return upper_halves((u16v)round_bf16((u32v)a), (u16v)round_bf16((u32v)b));
}

#define HALF_STORAGE(type)                                                                                             \
    INLINE f32v load_##type(const uint16_t *p) { return widen_##type(load_u16(p)); }                                   \
    INLINE void store_##type(uint16_t *p, f32v v) { store_u16(p, narrow_##type(v)); }                                  \
    INLINE void store_range_##type(uint16_t *p, ptrdiff_t from, ptrdiff_t to, f32v v)                                  \
    {                                                                                                                  \
        store_range_u16(p, from, to, narrow_##type(v));                                                                \
    }                                                                                                                  \
    INLINE void nt_store_##type(uint16_t *p, f32v v) { nt_store_u16(p, narrow_##type(v)); }                            \
    INLINE f32v load_range_##type(const uint16_t *p, ptrdiff_t from, ptrdiff_t to)                                     \
    {                                                                                                                  \
        return widen_##type(load_range_u16(p, from, to));                                                              \
    }                                                                                                                  \
    INLINE f32v rounded_##type(f32v v) { return widen_##type(narrow_##type(v)); }
HALF_STORAGE(f16)
HALF_STORAGE(bf16)

/* two adjacent vectors */
#define TWO(type, storage, vector)                                                                                     \
    INLINE void store_two_##type(storage *p, vector a, vector b)                                                       \
    {                                                                                                                  \
        store_##type(p, a);                                                                                            \
        store_##type(p + sizeof(vector) / sizeof(a[0]), b);                                                            \
    }                                                                                                                  \
    INLINE void nt_store_two_##type(storage *p, vector a, vector b)                                                    \
    {                                                                                                                  \
        nt_store_##type(p, a);                                                                                         \
        nt_store_##type(p + sizeof(vector) / sizeof(a[0]), b);                                                         \
    }
TWO(f32, float, f32v)
TWO(f64, double, f64v)
TWO(f16, uint16_t, f32v)
INLINE void store_two_bf16(uint16_t *p, f32v a, f32v b)
{
    const u16v two = narrow_two_bf16(a, b);
    memcpy(p, &two, sizeof two);
}
INLINE void nt_store_two_bf16(uint16_t *p, f32v a, f32v b)
{
    const u16v two = narrow_two_bf16(a, b);
    u16h half[2];
    memcpy(half, &two, sizeof two);
    nt_store_u16(p, half[0]);
    nt_store_u16(p + VL_F32, half[1]);
}

INLINE f32v rounded_f32(f32v v) { return v; }
INLINE f64v rounded_f64(f64v v) { return v; }

#endif
