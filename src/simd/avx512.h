/* Functions of vector.h and storage.h for AVX-512 F, VL, BW, DQ: 64 bytes. Included by vector.h. */
#include "vector.h"

#ifndef CNORM_SIMD_AVX512_H
#define CNORM_SIMD_AVX512_H

/* lanes from <= i < to */
INLINE __mmask16 mask_32(ptrdiff_t from, ptrdiff_t to) { return (__mmask16)((1u << to) - (1u << from)); }

INLINE f32v load_range_f32(const float *p, ptrdiff_t from, ptrdiff_t to)
{
    return (f32v)_mm512_maskz_loadu_ps(mask_32(from, to), p);
}
INLINE f64v load_range_f64(const double *p, ptrdiff_t from, ptrdiff_t to)
{
    return (f64v)_mm512_maskz_loadu_ps(mask_32(2 * from, 2 * to), p);
}
INLINE void store_range_f32(float *p, ptrdiff_t from, ptrdiff_t to, f32v v)
{
    _mm512_mask_storeu_ps(p, mask_32(from, to), (__m512)v);
}
INLINE void store_range_f64(double *p, ptrdiff_t from, ptrdiff_t to, f64v v)
{
    _mm512_mask_storeu_ps(p, mask_32(2 * from, 2 * to), (__m512)v);
}
INLINE f32v fill_f32(f32v v, ptrdiff_t from, ptrdiff_t to, f32v fill)
{
    return (f32v)_mm512_mask_mov_ps((__m512)fill, mask_32(from, to), (__m512)v);
}

INLINE f32v sqrt_f32(f32v v) { return (f32v)_mm512_sqrt_ps((__m512)v); }
INLINE f64v sqrt_f64(f64v v) { return (f64v)_mm512_sqrt_pd((__m512d)v); }
INLINE f32v fma_f32(f32v a, f32v b, f32v c) { return (f32v)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
INLINE f32v smaller_f32(f32v a, f32v b) { return (f32v)_mm512_min_ps((__m512)a, (__m512)b); }
INLINE f32v larger_f32(f32v a, f32v b) { return (f32v)_mm512_max_ps((__m512)a, (__m512)b); }

INLINE void nt_store_f32(float *p, f32v v) { _mm512_stream_ps(p, (__m512)v); }
INLINE void nt_fence(void) { _mm_sfence(); }

typedef float f32x8 __attribute__((vector_size(32)));
typedef double f64x4 __attribute__((vector_size(32)));

INLINE float vector_tree_f32(f32v v)
{
    const f32x8 w = __builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7) +
                    __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15);
    return tree_f32x4(__builtin_shufflevector(w, w, 0, 1, 2, 3) + __builtin_shufflevector(w, w, 4, 5, 6, 7));
}
INLINE double vector_tree_f64(f64v v)
{
    const f64x4 w = __builtin_shufflevector(v, v, 0, 1, 2, 3) + __builtin_shufflevector(v, v, 4, 5, 6, 7);
    return tree_f64x2(__builtin_shufflevector(w, w, 0, 1) + __builtin_shufflevector(w, w, 2, 3));
}

INLINE void rotate_lanes_f32(f32v lanes[LANE_VECTORS], ptrdiff_t lane_offset)
{
    const __m512i from = _mm512_add_epi32(_mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0),
                                          _mm512_set1_epi32((int)lane_offset));
    const __m512 a = (__m512)lanes[0], b = (__m512)lanes[1];
    lanes[0] = (f32v)_mm512_permutex2var_ps(a, from, b);
    lanes[1] = (f32v)_mm512_permutex2var_ps(b, from, a);
}
INLINE f32v lanes_f32(f32v v, i32v from) { return (f32v)_mm512_permutexvar_ps((__m512i)from, (__m512)v); }
INLINE int any_i32(i32v mask) { return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask) != 0; }

/* GCC 12 makes __builtin_convertvector of these sizes two instructions of half the width, and a permutation. */
INLINE f64v widen_lo(f32v v) { return (f64v)_mm512_cvtps_pd(_mm512_castps512_ps256((__m512)v)); }
INLINE f64v widen_hi(f32v v) { return (f64v)_mm512_cvtps_pd(_mm512_extractf32x8_ps((__m512)v, 1)); }
INLINE f64v load_widened(const float *p) { return (f64v)_mm512_cvtps_pd(_mm256_loadu_ps(p)); }
INLINE f32v narrow(f64v lo, f64v hi)
{
    const __m512 low = _mm512_castps256_ps512(_mm512_cvtpd_ps((__m512d)lo));
    return (f32v)_mm512_insertf32x8(low, _mm512_cvtpd_ps((__m512d)hi), 1);
}

INLINE u16h load_range_u16(const uint16_t *p, ptrdiff_t from, ptrdiff_t to)
{
    return (u16h)_mm256_maskz_loadu_epi16(mask_32(from, to), p);
}
INLINE void store_range_u16(uint16_t *p, ptrdiff_t from, ptrdiff_t to, u16h v)
{
    _mm256_mask_storeu_epi16(p, mask_32(from, to), (__m256i)v);
}
INLINE void nt_store_u16(uint16_t *p, u16h v) { _mm256_stream_si256((__m256i *)p, (__m256i)v); }

INLINE f32v widen_f16(u16h v) { return (f32v)_mm512_cvtph_ps((__m256i)v); }
INLINE u16h narrow_f16(f32v v) { return (u16h)_mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT); }

INLINE f32v widen_bf16(u16h v)
{
    const __m512i low = _mm512_castsi256_si512((__m256i)v);
    const __m512i from = _mm512_cvtepu16_epi32(_mm256_set_epi16(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0));
    return (f32v)_mm512_maskz_permutexvar_epi16(0xaaaaaaaa, _mm512_slli_epi32(from, 16), low);
}
INLINE u32v round_bf16(u32v bits)
{
    const __mmask16 odd = _mm512_test_epi32_mask((__m512i)bits, _mm512_set1_epi32(0x10000));
    const __m512i half = (__m512i)(bits + 0x7fff);
    return (u32v)_mm512_mask_add_epi32(half, odd, half, _mm512_set1_epi32(1));
}
INLINE u16h narrow_bf16(f32v v)
{
    const __m512i default_nan = _mm512_set1_epi32(0x33); /* fixup table: 3, the default NaN, for both kinds of NaN */
    const u32v bits = (u32v)_mm512_fixupimm_ps((__m512)v, (__m512)v, default_nan, 0);
    const __m512i high =
        _mm512_castsi256_si512(_mm256_set_epi16(31, 29, 27, 25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1));
    return (u16h)_mm512_castsi512_si256(_mm512_permutexvar_epi16(high, (__m512i)round_bf16(bits)));
}
INLINE u16v upper_halves(u16v a, u16v b)
{
    return __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31, 33, 35, 37, 39, 41,
                                   43, 45, 47, 49, 51, 53, 55, 57, 59, 61, 63);
}

#endif
