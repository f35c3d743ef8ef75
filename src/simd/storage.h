/* Storage types: what lies in memory, where the arithmetic is in float or double.
 *
 * f16 and bf16 are storage of float: widened exactly, rounded to nearest even, NaN kept, the same bits on machines
 * with and without instructions for it. They have the load, load_range, store, store_range and stream of vector.h;
 * and for all four types
 *     rounded_*   a vector as it would come back from storage
 *     value_*     one stored element          stored_*   one element to store
 *     store_two_*, stream_two_*   two vectors, one behind the other, in which a NaN is arithmetic's own
 */
#ifndef CNORM_SIMD_STORAGE_H
#define CNORM_SIMD_STORAGE_H

#include "vector.h"

typedef uint16_t u16h __attribute__((vector_size(VECTOR_BYTES / 2))); /* as many as a vector has floats */
typedef uint32_t u32v __attribute__((vector_size(VECTOR_BYTES)));

#if VECTOR_BYTES == 64

INLINE u16h load_u16(const uint16_t *p) { u16h v; memcpy(&v, p, sizeof v); return v; }
INLINE u16h load_range_u16(const uint16_t *p, ptrdiff_t from, ptrdiff_t to)
{
    return (u16h)_mm256_maskz_loadu_epi16((__mmask16)((1u << to) - (1u << from)), p);
}
INLINE void store_range_u16(uint16_t *p, ptrdiff_t from, ptrdiff_t to, u16h v)
{
    _mm256_mask_storeu_epi16(p, (__mmask16)((1u << to) - (1u << from)), (__m256i)v);
}
INLINE void stream_u16(uint16_t *p, u16h v) { _mm256_stream_si256((__m256i *)p, (__m256i)v); }
INLINE i32v extend_u16(u16h v) { return (i32v)_mm512_cvtepu16_epi32((__m256i)v); }
INLINE u16h truncate_u16(i32v v) { return (u16h)_mm512_cvtepi32_epi16((__m512i)v); }
INLINE f32v widen_f16(u16h v) { return (f32v)_mm512_cvtph_ps((__m256i)v); }
INLINE u16h narrow_f16(f32v v) { return (u16h)_mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT); }

#else

INLINE u16h load_u16(const uint16_t *p) { u16h v; memcpy(&v, p, sizeof v); return v; }
INLINE u16h load_range_u16(const uint16_t *p, ptrdiff_t from, ptrdiff_t to)
{
    uint16_t lanes[VL_F32] = {0};
    for (ptrdiff_t i = from; i < to; ++i) lanes[i] = p[i];
    return load_u16(lanes);
}
INLINE void store_range_u16(uint16_t *p, ptrdiff_t from, ptrdiff_t to, u16h v)
{
    for (ptrdiff_t i = from; i < to; ++i) p[i] = v[i];
}

#if VECTOR_BYTES == 32
INLINE void stream_u16(uint16_t *p, u16h v) { _mm_stream_si128((__m128i *)p, (__m128i)v); }
INLINE i32v extend_u16(u16h v) { return (i32v)_mm256_cvtepu16_epi32((__m128i)v); }
INLINE u16h truncate_u16(i32v v) /* of values below 2^16 */
{
    __m256i pairs = _mm256_packus_epi32((__m256i)v, (__m256i)v); /* 0 1 2 3 0 1 2 3 | 4 5 6 7 4 5 6 7 */
    return (u16h)_mm256_castsi256_si128(_mm256_permute4x64_epi64(pairs, 0x08));
}
INLINE f32v widen_f16(u16h v) { return (f32v)_mm256_cvtph_ps((__m128i)v); }
INLINE u16h narrow_f16(f32v v) { return (u16h)_mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT); }
#else
INLINE void stream_u16(uint16_t *p, u16h v) { memcpy(p, &v, sizeof v); }
INLINE i32v extend_u16(u16h v) { return (i32v){v[0], v[1], v[2], v[3]}; }
INLINE u16h truncate_u16(i32v v) { return (u16h){(uint16_t)v[0], (uint16_t)v[1], (uint16_t)v[2], (uint16_t)v[3]}; }

INLINE i32v select_i32(i32v mask, i32v a, i32v b) { return (a & mask) | (b & ~mask); }
INLINE f32v widen_f16(u16h v)
{
    const i32v bits = extend_u16(v), exponent = bits & 0x7c00;
    /* the exponent field moved up is 112 too small; multiplying is exact and does subnormals too */
    const i32v finite = (i32v)((f32v)((bits & 0x7fff) << 13) * 0x1p112f);
    const i32v special = ((bits & 0x7fff) << 13) | 0x7f800000;
    return (f32v)(select_i32(exponent == 0x7c00, special, finite) | (bits & 0x8000) << 16);
}
INLINE u16h narrow_f16(f32v v)
{
    const i32v bits = (i32v)v, magnitude = bits & 0x7fffffff;
    const i32v nan = magnitude > 0x7f800000;
    const i32v too_large = magnitude >= 0x47800000; /* 2^16; what rounds up to it from below carries by itself */
    const i32v subnormal = magnitude < 0x38800000;  /* 2^-14: adding 0.5 rounds at 2^-24, the step of subnormals */
    const i32v small = (i32v)((f32v)magnitude + 0.5f) - 0x3f000000;
    const u32v m = (u32v)magnitude; /* of a NaN the sum may pass 2^31 */
    const i32v normal = (i32v)((m - 0x38000000 + 0xfff + ((m >> 13) & 1)) >> 13);
    i32v half = select_i32(subnormal, small, normal);
    half = select_i32(too_large, (i32v){0} + 0x7c00, half);
    half = select_i32(nan, (i32v){0} + 0x7e00, half);
    return truncate_u16(half | ((bits >> 16) & 0x8000));
}
#endif
#endif

/* bfloat16 is the high half of a float. Narrowing adds just under half of the last place kept, and its last bit: ties go to
 * even. A NaN apart, unless it is arithmetic's own, with one bit set: it could carry to 0. */
typedef uint16_t u16v __attribute__((vector_size(VECTOR_BYTES)));
#if VECTOR_BYTES == 64
#define HIGH 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31, \
             33, 35, 37, 39, 41, 43, 45, 47, 49, 51, 53, 55, 57, 59, 61, 63
INLINE f32v widen_bf16(u16h v)
{
    const __m512i low = _mm512_castsi256_si512((__m256i)v);
    const __m512i from = _mm512_cvtepu16_epi32(_mm256_set_epi16(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0));
    return (f32v)_mm512_maskz_permutexvar_epi16(0xaaaaaaaa, _mm512_slli_epi32(from, 16), low);
}
INLINE u32v carried_bf16(u32v bits)
{
    const __mmask16 odd = _mm512_test_epi32_mask((__m512i)bits, _mm512_set1_epi32(0x10000));
    const __m512i half = (__m512i)(bits + 0x7fff);
    return (u32v)_mm512_mask_add_epi32(half, odd, half, _mm512_set1_epi32(1));
}
INLINE u16h narrow_bf16(f32v v)
{
    const __m512i default_nan = _mm512_set1_epi32(0x33); /* 3 for either kind of NaN, 0 for what stays as it is */
    const u32v bits = (u32v)_mm512_fixupimm_ps((__m512)v, (__m512)v, default_nan, 0);
    const __m512i high = _mm512_castsi256_si512(_mm256_set_epi16(31, 29, 27, 25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1));
    return (u16h)_mm512_castsi512_si256(_mm512_permutexvar_epi16(high, (__m512i)carried_bf16(bits)));
}
#else
#if VECTOR_BYTES == 32
#define HIGH 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31
#else
#define HIGH 1, 3, 5, 7, 9, 11, 13, 15
#endif
INLINE f32v widen_bf16(u16h v) { return (f32v)(extend_u16(v) << 16); }
INLINE u32v carried_bf16(u32v bits) { return bits + ((bits >> 16 & 1) + 0x7fff); }
INLINE u16h narrow_bf16(f32v v)
{
    const u32v bits = (u32v)v, nan = (u32v)(v != v);
    return truncate_u16((i32v)(((carried_bf16(bits) & ~nan) | ((bits | 0x400000) & nan)) >> 16));
}
#endif
INLINE u16v narrow_two_bf16(f32v a, f32v b)
{
    return __builtin_shufflevector((u16v)carried_bf16((u32v)a), (u16v)carried_bf16((u32v)b), HIGH);
}
#undef HIGH

#define HALF_STORAGE(type)                                                                                           \
    INLINE f32v load_##type(const uint16_t *p) { return widen_##type(load_u16(p)); }                                 \
    INLINE void store_##type(uint16_t *p, f32v v) { u16h h = narrow_##type(v); memcpy(p, &h, sizeof h); }            \
    INLINE void store_range_##type(uint16_t *p, ptrdiff_t from, ptrdiff_t to, f32v v)                                \
    {                                                                                                                \
        store_range_u16(p, from, to, narrow_##type(v));                                                              \
    }                                                                                                                \
    INLINE void stream_##type(uint16_t *p, f32v v) { stream_u16(p, narrow_##type(v)); }                              \
    INLINE f32v load_range_##type(const uint16_t *p, ptrdiff_t from, ptrdiff_t to, f32v fill)                        \
    {                                                                                                                \
        return fill_f32(widen_##type(load_range_u16(p, from, to)), from, to, fill);                                  \
    }
HALF_STORAGE(f16)
HALF_STORAGE(bf16)

#define TWO(type, storage, vector)                                                                                   \
    INLINE void store_two_##type(storage *p, vector a, vector b)                                                     \
    {                                                                                                                \
        store_##type(p, a);                                                                                          \
        store_##type(p + sizeof(vector) / sizeof(a[0]), b);                                                          \
    }                                                                                                                \
    INLINE void stream_two_##type(storage *p, vector a, vector b)                                                    \
    {                                                                                                                \
        stream_##type(p, a);                                                                                         \
        stream_##type(p + sizeof(vector) / sizeof(a[0]), b);                                                         \
    }
TWO(f32, float, f32v)
TWO(f64, double, f64v)
TWO(f16, uint16_t, f32v)
INLINE void store_two_bf16(uint16_t *p, f32v a, f32v b)
{
    const u16v two = narrow_two_bf16(a, b);
    memcpy(p, &two, sizeof two);
}
INLINE void stream_two_bf16(uint16_t *p, f32v a, f32v b)
{
    const u16v two = narrow_two_bf16(a, b);
    u16h half[2];
    memcpy(half, &two, sizeof two);
    stream_u16(p, half[0]);
    stream_u16(p + VL_F32, half[1]);
}

/* one value, and a value rounded to what storage holds */
#define STORED(type, storage, real, vector)                                                                          \
    INLINE real value_##type(storage a) { return load_range_##type(&a, 0, 1, (vector){0})[0]; }                          \
    INLINE storage stored_##type(real a) { storage s; store_range_##type(&s, 0, 1, a - (vector){0}); return s; }
STORED(f16, uint16_t, float, f32v)
STORED(bf16, uint16_t, float, f32v)
INLINE float value_f32(float a) { return a; }
INLINE double value_f64(double a) { return a; }
INLINE float stored_f32(float a) { return a; }
INLINE double stored_f64(double a) { return a; }
INLINE f32v rounded_f32(f32v v) { return v; }
INLINE f64v rounded_f64(f64v v) { return v; }
INLINE f32v rounded_f16(f32v v) { return widen_f16(narrow_f16(v)); }
INLINE f32v rounded_bf16(f32v v) { return widen_bf16(narrow_bf16(v)); }

#endif
