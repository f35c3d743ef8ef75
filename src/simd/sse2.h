/* Functions of vector.h for SSE2, the x86-64 baseline: 16 bytes. Included by vector.h. */
#include "vector.h"

#ifndef CNORM_SIMD_SSE2_H
#define CNORM_SIMD_SSE2_H

INLINE i32v extend_u16(u16h v)
{
    int64_t bits;
    memcpy(&bits, &v, sizeof bits);
    return (i32v)_mm_unpacklo_epi16(_mm_cvtsi64_si128(bits), _mm_setzero_si128());
}
INLINE u16h truncate_u16(i32v v) /* of values below 2^16; packs saturates signed numbers */
{
    const i32v extended = v << 16 >> 16;
    const int64_t bits = _mm_cvtsi128_si64(_mm_packs_epi32((__m128i)extended, (__m128i)extended));
    u16h h;
    memcpy(&h, &bits, sizeof h);
    return h;
}

/* GCC 12 compiles vectors of 8 bytes badly, so half a vector is the low half of a whole one */
INLINE f64v widen_lo(f32v v) { return (f64v)_mm_cvtps_pd((__m128)v); }
INLINE f64v widen_hi(f32v v) { return (f64v)_mm_cvtps_pd(_mm_movehl_ps((__m128)v, (__m128)v)); }
INLINE f64v load_widened(const float *p) { return (f64v){(double)p[0], (double)p[1]}; }
INLINE f32v narrow(f64v lo, f64v hi)
{
    return (f32v)_mm_movelh_ps(_mm_cvtpd_ps((__m128d)lo), _mm_cvtpd_ps((__m128d)hi));
}

INLINE int any_i32(i32v mask) { return _mm_movemask_ps((__m128)mask) != 0; }

#include "vector_16.h"

INLINE f32v sqrt_f32(f32v v) { return (f32v)_mm_sqrt_ps((__m128)v); }
INLINE f64v sqrt_f64(f64v v) { return (f64v)_mm_sqrt_pd((__m128d)v); }
#define EMULATED_FMA
INLINE f32v fma_f32(f32v a, f32v b, f32v c) { return emulated_fma_f32(a, b, c); }
INLINE f32v smaller_f32(f32v a, f32v b) { return (f32v)_mm_min_ps((__m128)a, (__m128)b); }
INLINE f32v larger_f32(f32v a, f32v b) { return (f32v)_mm_max_ps((__m128)a, (__m128)b); }

INLINE void nt_store_f32(float *p, f32v v) { _mm_stream_ps(p, (__m128)v); }
INLINE void nt_fence(void) { _mm_sfence(); }

#endif
