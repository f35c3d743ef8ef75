/* Functions of vector.h for any machine, including NEON: 16 bytes. Included by vector.h. */
#include "vector.h"

#ifndef CNORM_SIMD_GENERIC_H
#define CNORM_SIMD_GENERIC_H

#include <math.h>
#if defined(__aarch64__)
#include <arm_neon.h>
#endif

INLINE i32v extend_u16(u16h v) { return (i32v){v[0], v[1], v[2], v[3]}; }
INLINE u16h truncate_u16(i32v v) { return (u16h){(uint16_t)v[0], (uint16_t)v[1], (uint16_t)v[2], (uint16_t)v[3]}; }

INLINE f64v widen_lo(f32v v) { return (f64v){(double)v[0], (double)v[1]}; }
INLINE f64v widen_hi(f32v v) { return (f64v){(double)v[2], (double)v[3]}; }
INLINE f64v load_widened(const float *p) { return (f64v){(double)p[0], (double)p[1]}; }
INLINE f32v narrow(f64v lo, f64v hi) { return (f32v){(float)lo[0], (float)lo[1], (float)hi[0], (float)hi[1]}; }

INLINE int any_i32(i32v mask) { return (((i64v)mask)[0] | ((i64v)mask)[1]) != 0; }

#include "vector_16.h"

INLINE f32v sqrt_f32(f32v v) { return (f32v){sqrtf(v[0]), sqrtf(v[1]), sqrtf(v[2]), sqrtf(v[3])}; }
INLINE f64v sqrt_f64(f64v v) { return (f64v){sqrt(v[0]), sqrt(v[1])}; }
/* Instructions only: libm's fmaf may be wrong, and is slow where the processor lacks it. */
#if defined(__aarch64__)
INLINE f32v fma_f32(f32v a, f32v b, f32v c) { return (f32v)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b); }
#elif defined(__FP_FAST_FMAF) || defined(__powerpc64__) || defined(__s390x__) || defined(__riscv_flen)
INLINE f32v fma_f32(f32v a, f32v b, f32v c)
{
    f32v v;
    for (int i = 0; i < VL_F32; ++i) v[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return v;
}
#else
#define EMULATED_FMA
INLINE f32v fma_f32(f32v a, f32v b, f32v c) { return emulated_fma_f32(a, b, c); }
#endif
INLINE f32v smaller_f32(f32v a, f32v b) { return select_f32((i32v)(a < b), a, b); }
INLINE f32v larger_f32(f32v a, f32v b) { return select_f32((i32v)(a > b), a, b); }

/* Ordinary stores: AArch64 cores detect lines that are written whole, and do not read them first. */
INLINE void nt_store_f32(float *p, f32v v) { store_f32(p, v); }
INLINE void nt_fence(void) {}

#endif
