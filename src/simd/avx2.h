/* Functions of vector.h and storage.h for AVX2, F16C and FMA: 32 bytes. Included by vector.h. */
#include "vector.h"

#ifndef CNORM_SIMD_AVX2_H
#define CNORM_SIMD_AVX2_H

#include "loops.h"

/* -1 in the lanes from <= i < to */
INLINE __m256i mask_32(ptrdiff_t from, ptrdiff_t to)
{
    static const int32_t step[24] = {0, 0, 0, 0, 0, 0, 0, 0, -1, -1, -1, -1, -1, -1, -1, -1, 0, 0, 0, 0, 0, 0, 0, 0};
    return _mm256_and_si256(_mm256_loadu_si256((const __m256i *)(step + 8 - from)),
                            _mm256_loadu_si256((const __m256i *)(step + 16 - to)));
}
INLINE f32v load_range_f32(const float *p, ptrdiff_t from, ptrdiff_t to)
{
    return (f32v)_mm256_maskload_ps(p, mask_32(from, to));
}
INLINE f64v load_range_f64(const double *p, ptrdiff_t from, ptrdiff_t to)
{
    return (f64v)_mm256_maskload_pd(p, mask_32(2 * from, 2 * to));
}
INLINE f32v fill_f32(f32v v, ptrdiff_t from, ptrdiff_t to, f32v fill)
{
    return (f32v)_mm256_blendv_ps((__m256)fill, (__m256)v, (__m256)mask_32(from, to));
}

INLINE f32v lanes_f32(f32v v, i32v from) { return (f32v)_mm256_permutevar8x32_ps((__m256)v, (__m256i)from); }
INLINE int any_i32(i32v mask) { return _mm256_movemask_ps((__m256)mask) != 0; }
INLINE f32v sqrt_f32(f32v v) { return (f32v)_mm256_sqrt_ps((__m256)v); }
INLINE f64v sqrt_f64(f64v v) { return (f64v)_mm256_sqrt_pd((__m256d)v); }
INLINE f32v fma_f32(f32v a, f32v b, f32v c) { return (f32v)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }
INLINE f32v smaller_f32(f32v a, f32v b) { return (f32v)_mm256_min_ps((__m256)a, (__m256)b); }
INLINE f32v larger_f32(f32v a, f32v b) { return (f32v)_mm256_max_ps((__m256)a, (__m256)b); }

INLINE void nt_store_f32(float *p, f32v v) { _mm256_stream_ps(p, (__m256)v); }
INLINE void nt_fence(void) { _mm_sfence(); }

INLINE float vector_tree_f32(f32v v)
{
    return tree_f32x4(__builtin_shufflevector(v, v, 0, 1, 2, 3) + __builtin_shufflevector(v, v, 4, 5, 6, 7));
}
INLINE double vector_tree_f64(f64v v)
{
    return tree_f64x2(__builtin_shufflevector(v, v, 0, 1) + __builtin_shufflevector(v, v, 2, 3));
}

INLINE f64v widen_lo(f32v v) { return (f64v)_mm256_cvtps_pd(_mm256_castps256_ps128((__m256)v)); }
INLINE f64v widen_hi(f32v v) { return (f64v)_mm256_cvtps_pd(_mm256_extractf128_ps((__m256)v, 1)); }
INLINE f64v load_widened(const float *p) { return (f64v)_mm256_cvtps_pd(_mm_loadu_ps(p)); }
INLINE f32v narrow(f64v lo, f64v hi)
{
    return (f32v)_mm256_set_m128(_mm256_cvtpd_ps((__m256d)hi), _mm256_cvtpd_ps((__m256d)lo));
}

INLINE void nt_store_u16(uint16_t *p, u16h v) { _mm_stream_si128((__m128i *)p, (__m128i)v); }
INLINE i32v extend_u16(u16h v) { return (i32v)_mm256_cvtepu16_epi32((__m128i)v); }
INLINE u16h truncate_u16(i32v v) /* of values below 2^16 */
{
    const __m256i pairs = _mm256_packus_epi32((__m256i)v, (__m256i)v); /* 0 1 2 3 0 1 2 3 | 4 5 6 7 4 5 6 7 */
    return (u16h)_mm256_castsi256_si128(_mm256_permute4x64_epi64(pairs, 0x08));
}

INLINE f32v widen_f16(u16h v) { return (f32v)_mm256_cvtph_ps((__m128i)v); }
INLINE u16h narrow_f16(f32v v) { return (u16h)_mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT); }
INLINE u16v upper_halves(u16v a, u16v b)
{
    return __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
}

#endif
