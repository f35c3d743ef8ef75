/* The vector types and functions that kernel bodies use besides plain C.
 *
 * A vector has the native width of the instruction set that the file is compiled for, so that accumulators stay in
 * registers (a 64-byte type on a 32-byte machine makes GCC 12 spill all of them: 3 to 5 times slower, Zen 4,
 * 2026-11-21). A kernel sums over a fixed number of *virtual lanes*, LANES_* of them, made of LANE_VECTORS native
 * vectors. The virtual lanes and the one halving tree make the bits independent of the native width.
 *
 * Arithmetic is the operators + - * / of the vector extensions of GCC (>= 12) and clang. For f32 and f64 there are
 *     splat_*        one value in every lane
 *     load_*         VL elements from any address              store_*   to any address
 *     load_range_*   lanes from <= i < to of the vector at any address, the others 0; reads nothing else
 *     store_range_*  lanes from <= i < to to the vector at any address; writes nothing else
 *     load_first_*   the first `count` lanes, which may be more than a vector has; the others 0; store_first_* alike
 *     nt_store_*       non-temporal store to an aligned address (ordinary where there is none); end with nt_fence
 *     prefetch       prefetches `size` bytes at p + `ahead` bytes into L2; the address need not be valid
 *     select_*       lanes of one vector where a mask is -1, of another where it is 0
 *     fill_*         lanes from <= i < to of one vector, the others of another
 *     only_*         lanes from <= i < to, the others zero
 *     rotate_lanes_* lane i of all virtual lanes becomes lane i + lane_offset, modulo LANES; 0 < lane_offset < VL
 *     one_sign_*     whether the sign bits of all virtual lanes are equal
 *     sqrt_*         the square root of each lane
 *     fma_f32        a b + c in each lane, rounded once: by an instruction, or the same bits without
 *     smaller_f32    a < b ? a : b in each lane, larger_f32 a > b ? a : b: b where either is NaN
 *     default_nan_*  the default quiet NaN where a lane is NaN
 *     splat_of_4     x[i] in all lanes, 0 <= i < 4 a constant; with AVX2 the four are loaded together
 *     keep_*         forces the value into a register, so that the compiler does not load it a second time
 *     tree_*         the sum of all virtual lanes by halving: lane i + lane i + LANES/2, and so on
 *     lanes_f32      lane i is lane from[i] of v; 0 <= from[i] < VL
 *     any_i32        whether a lane of a mask is not 0; each is 0, -1 or the sign bit
 *     transpose_4    four vectors of four floats: lane j of vector i and lane i of vector j change places
 *     widen_lo, widen_hi   the lower or upper half of a vector of float as one of double, exactly
 *     load_widened   VL_F64 floats from any address as a vector of double
 *     narrow         two vectors of double as one of float, rounded to nearest even
 * One header per instruction set, avx512.h, avx2.h, sse2.h or generic.h, has the functions that differ between them:
 * of those above load_range, store_range, nt_store of float, nt_fence, fill_f32, rotate_lanes_f32, lanes_f32, any,
 * sqrt, fma, smaller, larger, widen_lo, widen_hi, load_widened and narrow, and for this file and storage.h
 *     vector_tree_*  tree_* of one vector
 *     load_range_u16, store_range_u16, nt_store_u16   as above, for half a vector of uint16
 *     extend_u16, truncate_u16   half a vector of uint16 to a vector of int32, and back
 *     upper_halves   the upper 16 bits of every 32 bits of two vectors
 *     widen_f16, narrow_f16   half a vector of float16 to a vector of float, exactly, and back, to nearest even
 * 64-byte vectors also have
 *     widen_bf16, narrow_bf16, round_bf16   which storage.h has for the others
 * storage.h adds f16 and bf16, which are storage of float. */
#ifndef CNORM_SIMD_VECTOR_H
#define CNORM_SIMD_VECTOR_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

/* a * b + c is rounded twice, fma_f32(a, b, c) once: contraction to FMA, which GCC (-std=gnu*) and clang enable by
 * default, is turned off. GCC ignores the pragma of the C standard, clang that of GCC. clang's -ffp-contract=fast
 * overrides it: see arithmetic_is_exact. */
#if defined(__clang__)
#pragma STDC FP_CONTRACT OFF
#elif defined(__GNUC__)
#pragma GCC optimize("fp-contract=off")
#endif

#if defined(__FAST_MATH__) || defined(__ASSOCIATIVE_MATH__) || defined(__RECIPROCAL_MATH__) ||                         \
    (defined(__FINITE_MATH_ONLY__) && __FINITE_MATH_ONLY__)
#error "cnorm's results are a contract, which -ffast-math breaks: compile cnorm.c with -fno-fast-math after it"
#endif
/* 16, with AVX512-FP16: only _Float16 is computed in its own precision */
#if defined(__FLT_EVAL_METHOD__) && __FLT_EVAL_METHOD__ != 0 && __FLT_EVAL_METHOD__ != 16
#error "cnorm needs float and double arithmetic without excess precision (on x86: SSE2)"
#endif

#if defined(__AVX512F__)
#define VECTOR_BYTES 64
#elif defined(__AVX2__)
#define VECTOR_BYTES 32
#else
#define VECTOR_BYTES 16
#endif

/* A loop over vectors whose number is a constant, unrolled. clang takes a number for partial unrolling, which is too
 * late for arrays to become registers: products took 7 times as long (clang 14, AVX2, 2026-11-28). */
#if defined(__clang__)
#define EACH(i, count) _Pragma("clang loop unroll(full)") for (int i = 0; i < (count); ++i)
#else
#define EACH(i, count) _Pragma("GCC unroll 32") for (int i = 0; i < (count); ++i)
#endif
#define INLINE static inline __attribute__((always_inline, unused))
#if defined(__clang__)
#define NOINLINE __attribute__((noinline, unused))
#else /* without noclone GCC adds a copy for each constant argument */
#define NOINLINE __attribute__((noinline, noclone, unused))
#endif

enum {
    VL_F32 = VECTOR_BYTES / 4, /* lanes of a native vector */
    VL_F64 = VECTOR_BYTES / 8,
    LANES_F32 = 32, /* virtual lanes: the same on every instruction set */
    LANES_F64 = 16,
    LANE_VECTORS = 128 / VECTOR_BYTES,
    /* accumulators of one kind that a loop keeps in registers */
    PASS = LANE_VECTORS < 4 ? LANE_VECTORS : 4,
};

typedef float f32v __attribute__((vector_size(VECTOR_BYTES)));
typedef double f64v __attribute__((vector_size(VECTOR_BYTES)));
typedef int32_t i32v __attribute__((vector_size(VECTOR_BYTES)));
typedef uint32_t u32v __attribute__((vector_size(VECTOR_BYTES)));
typedef int64_t i64v __attribute__((vector_size(VECTOR_BYTES)));
typedef uint16_t u16v __attribute__((vector_size(VECTOR_BYTES)));
typedef uint16_t u16h __attribute__((vector_size(VECTOR_BYTES / 2))); /* half a vector: VL_F32 half floats */
typedef float f32x4 __attribute__((vector_size(16)));
typedef double f64x2 __attribute__((vector_size(16)));

INLINE f32v splat_f32(float a) { return a - (f32v){0}; }
INLINE f64v splat_f64(double a) { return a - (f64v){0}; }
INLINE f32v splat_of_4(const float *x, int i)
{
#if VECTOR_BYTES == 32
    const __m256 all = _mm256_broadcast_ps((const __m128 *)x);
    return (f32v)(i == 0   ? _mm256_permute_ps(all, 0x00)
                  : i == 1 ? _mm256_permute_ps(all, 0x55)
                  : i == 2 ? _mm256_permute_ps(all, 0xaa)
                           : _mm256_permute_ps(all, 0xff));
#else
    return splat_f32(x[i]);
#endif
}

#define MOVES(type, T, V)                                                                                              \
    INLINE V load_##type(const T *p)                                                                                   \
    {                                                                                                                  \
        V v;                                                                                                           \
        memcpy(&v, p, sizeof v);                                                                                       \
        return v;                                                                                                      \
    }                                                                                                                  \
    INLINE void store_##type(T *p, V v) { memcpy(p, &v, sizeof v); }
MOVES(f32, float, f32v)
MOVES(f64, double, f64v)
MOVES(u16, uint16_t, u16h)
#undef MOVES

INLINE f32v select_f32(i32v mask, f32v a, f32v b) { return (f32v)(((i32v)a & mask) | ((i32v)b & ~mask)); }
INLINE f64v select_f64(i64v mask, f64v a, f64v b) { return (f64v)(((i64v)a & mask) | ((i64v)b & ~mask)); }

INLINE float tree_f32x4(f32x4 v)
{
    v += __builtin_shufflevector(v, v, 2, 3, 2, 3);
    return v[0] + v[1];
}
INLINE double tree_f64x2(f64x2 v) { return v[0] + v[1]; }
INLINE void transpose_4(f32x4 r[4])
{
    f32x4 pair[4];
    EACH(i, 2) {
        pair[i] = __builtin_shufflevector(r[2 * i], r[2 * i + 1], 0, 4, 1, 5);
        pair[i + 2] = __builtin_shufflevector(r[2 * i], r[2 * i + 1], 2, 6, 3, 7);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 4; i += 2) {
        r[i] = __builtin_shufflevector(pair[i], pair[i + 1], 0, 1, 4, 5);
        r[i + 1] = __builtin_shufflevector(pair[i], pair[i + 1], 2, 3, 6, 7);
    }
}

#if defined(__AVX512F__)
#include "avx512.h"
#elif defined(__AVX2__)
#include "avx2.h"
#elif defined(__SSE2__)
#include "sse2.h"
#else
#include "generic.h"
#endif

/* Each line is prefetched twice: a busy processor drops single prefetches now and then. */
INLINE void prefetch(const void *p, ptrdiff_t ahead, ptrdiff_t size)
{
    for (ptrdiff_t i = 0; i < size; i += 32)
        __builtin_prefetch((const void *)((uintptr_t)p + (uintptr_t)(ahead + i)), 0, 2);
}

#define FIRST(type, T, V, VL)                                                                                          \
    INLINE V load_first_##type(const T *p, ptrdiff_t count)                                                            \
    {                                                                                                                  \
        return count >= VL ? load_##type(p) : load_range_##type(p, 0, count);                                          \
    }                                                                                                                  \
    INLINE void store_first_##type(T *p, ptrdiff_t count, V v)                                                         \
    {                                                                                                                  \
        if (count >= VL) store_##type(p, v);                                                                           \
        else store_range_##type(p, 0, count, v);                                                                       \
    }
FIRST(f32, float, f32v, VL_F32)
FIRST(f64, double, f64v, VL_F64)
#undef FIRST

INLINE f32v default_nan_f32(f32v v) { return select_f32((i32v)(v == v), v, splat_f32(__builtin_nanf(""))); }
INLINE f64v default_nan_f64(f64v v) { return select_f64((i64v)(v == v), v, splat_f64(__builtin_nan(""))); }

INLINE f32v keep_f32(f32v v)
{
#if defined(__SSE2__)
    __asm__("" : "+v"(v));
#elif defined(__aarch64__)
    __asm__("" : "+w"(v));
#endif
    return v;
}
INLINE f64v keep_f64(f64v v) { return (f64v)keep_f32((f32v)v); }

#define TREE(type, T, V)                                                                                               \
    INLINE T tree_##type(const V lanes[LANE_VECTORS])                                                                  \
    {                                                                                                                  \
        V v[LANE_VECTORS];                                                                                             \
        for (int i = 0; i < LANE_VECTORS; ++i) v[i] = lanes[i];                                                        \
        for (int half = LANE_VECTORS / 2; half; half /= 2)                                                             \
            for (int i = 0; i < half; ++i) v[i] += v[i + half];                                                        \
        return vector_tree_##type(v[0]);                                                                               \
    }
TREE(f32, float, f32v)
TREE(f64, double, f64v)
#undef TREE

#define ONE_SIGN(type, T, V, I)                                                                                        \
    INLINE int one_sign_##type(const V lanes[LANE_VECTORS])                                                            \
    {                                                                                                                  \
        const I sign = (I)splat_##type((T)-0.0);                                                                       \
        I any = (I)lanes[0], every = any;                                                                              \
        for (int i = 1; i < LANE_VECTORS; ++i) any |= (I)lanes[i], every &= (I)lanes[i];                               \
        return !any_i32((i32v)(any & sign)) || !any_i32((i32v)(~every & sign));                                        \
    }
ONE_SIGN(f32, float, f32v, i32v)
ONE_SIGN(f64, double, f64v, i64v)
#undef ONE_SIGN

INLINE void rotate_lanes_f64(f64v lanes[LANE_VECTORS], ptrdiff_t lane_offset)
{
    f32v halves[LANE_VECTORS];
    memcpy(halves, lanes, sizeof halves);
    rotate_lanes_f32(halves, 2 * lane_offset);
    memcpy(lanes, halves, sizeof halves);
}
INLINE void nt_store_f64(double *p, f64v v) { nt_store_f32((void *)p, (f32v)v); }

INLINE f64v fill_f64(f64v v, ptrdiff_t from, ptrdiff_t to, f64v fill)
{
    return (f64v)fill_f32((f32v)v, 2 * from, 2 * to, (f32v)fill);
}
INLINE f32v only_f32(f32v v, ptrdiff_t from, ptrdiff_t to) { return fill_f32(v, from, to, (f32v){0}); }
INLINE f64v only_f64(f64v v, ptrdiff_t from, ptrdiff_t to) { return fill_f64(v, from, to, (f64v){0}); }

#endif
