/* The vector vocabulary: all that a kernel body may use besides plain C.
 *
 * A vector is the native width of the instruction set this file is compiled for, so that accumulators stay in
 * registers (a 64-byte type on a 32-byte machine spills every one of them: measured 3-5 times slower with GCC 12).
 * A kernel sums over a fixed number of *virtual lanes*, LANES_* of them, made of LANE_VECTORS native vectors: that,
 * and the one halving tree below, is why the bits do not depend on the width.
 *
 * Arithmetic is the operators + - * / of the vector extensions of GCC (>= 12) and clang. This header adds
 *     splat_*      one value in every lane
 *     load_*       VL elements from any address              store_*     to any address
 *     load_range_* lanes from <= i < to of the vector at any address, the others filled; reads nothing else
 *     store_range_* lanes from <= i < to to the vector at any address; writes nothing else
 *     stream_*     to an address aligned to the vector, past the caches where the machine can; end with stream_fence
 *     fetch        begins to bring `size` bytes at `ahead` bytes from p into the second cache; any address will do
 *     tree_*       the sum of LANE_VECTORS vectors by halving: lane i + lane i + LANES/2, and so on down to one
 *     fold_*       the same down to one vector, and
 *     trees_*      from there for VL sums at once, which is cheaper: sum i goes to lane i
 *     fill_*       lanes from <= i < to of one vector, the others of another
 *     only_*       the others zero
 *     turn_*       all virtual lanes moved round
 *     one_sign_*   have all virtual lanes one sign?
 *     keep_*       the value, in a register: stops the compiler from loading it a second time
 *     widen_lo, widen_hi  the lower or upper half of a vector of float as one of double, exactly
 *     narrow       two vectors of double as one of float, rounded to nearest even
 * for f32 and f64; storage.h adds f16 and bf16, which are storage of float.
 */
#ifndef CNORM_SIMD_VECTOR_H
#define CNORM_SIMD_VECTOR_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#if defined(__FAST_MATH__)
#error "cnorm's results are a contract: -ffast-math breaks it"
#endif
#if defined(__FLT_EVAL_METHOD__) && __FLT_EVAL_METHOD__ != 0
#error "cnorm needs float and double arithmetic without excess precision (on x86: SSE2)"
#endif

#if defined(__AVX512F__)
#define VECTOR_BYTES 64
#elif defined(__AVX2__)
#define VECTOR_BYTES 32
#else
#define VECTOR_BYTES 16
#endif

#define INLINE static inline __attribute__((always_inline, unused))

enum {
    VL_F32 = VECTOR_BYTES / 4,  /* lanes of a native vector */
    VL_F64 = VECTOR_BYTES / 8,
    LANES_F32 = 32,             /* virtual lanes: the same on every instruction set */
    LANES_F64 = 16,
    LANE_VECTORS = 128 / VECTOR_BYTES,
    PASS = LANE_VECTORS < 4 ? LANE_VECTORS : 4, /* accumulators of one kind that a loop keeps in registers */
};

typedef float f32v __attribute__((vector_size(VECTOR_BYTES)));
typedef double f64v __attribute__((vector_size(VECTOR_BYTES)));
typedef int32_t i32v __attribute__((vector_size(VECTOR_BYTES)));
typedef int64_t i64v __attribute__((vector_size(VECTOR_BYTES)));
typedef float f32h __attribute__((vector_size(VECTOR_BYTES / 2))); /* half a vector: VL_F64 floats */

INLINE f32v splat_f32(float a) { return a - (f32v){0}; }
INLINE f64v splat_f64(double a) { return a - (f64v){0}; }

INLINE f32v load_f32(const float *p) { f32v v; memcpy(&v, p, sizeof v); return v; }
INLINE f64v load_f64(const double *p) { f64v v; memcpy(&v, p, sizeof v); return v; }
INLINE void store_f32(float *p, f32v v) { memcpy(p, &v, sizeof v); }
INLINE void store_f64(double *p, f64v v) { memcpy(p, &v, sizeof v); }

#if VECTOR_BYTES == 64

INLINE f32v load_range_f32(const float *p, ptrdiff_t from, ptrdiff_t to, f32v fill)
{
    return (f32v)_mm512_mask_loadu_ps((__m512)fill, (__mmask16)((1u << to) - (1u << from)), p);
}
INLINE f64v load_range_f64(const double *p, ptrdiff_t from, ptrdiff_t to, f64v fill)
{
    return (f64v)_mm512_mask_loadu_pd((__m512d)fill, (__mmask8)((1u << to) - (1u << from)), p);
}
INLINE void store_range_f32(float *p, ptrdiff_t from, ptrdiff_t to, f32v v)
{
    _mm512_mask_storeu_ps(p, (__mmask16)((1u << to) - (1u << from)), (__m512)v);
}
INLINE void store_range_f64(double *p, ptrdiff_t from, ptrdiff_t to, f64v v)
{
    _mm512_mask_storeu_pd(p, (__mmask8)((1u << to) - (1u << from)), (__m512d)v);
}
INLINE f32v fill_f32(f32v v, ptrdiff_t from, ptrdiff_t to, f32v fill)
{
    return (f32v)_mm512_mask_mov_ps((__m512)fill, (__mmask16)((1u << to) - (1u << from)), (__m512)v);
}
INLINE f64v fill_f64(f64v v, ptrdiff_t from, ptrdiff_t to, f64v fill)
{
    return (f64v)_mm512_mask_mov_pd((__m512d)fill, (__mmask8)((1u << to) - (1u << from)), (__m512d)v);
}

#else

#if VECTOR_BYTES == 32
/* -1 in the lanes from <= i < to */
INLINE __m256i mask_32(ptrdiff_t from, ptrdiff_t to)
{
    static const int32_t step[24] = {0, 0, 0, 0, 0, 0, 0, 0, -1, -1, -1, -1, -1, -1, -1, -1, 0, 0, 0, 0, 0, 0, 0, 0};
    return _mm256_and_si256(_mm256_loadu_si256((const __m256i *)(step + 8 - from)),
                            _mm256_loadu_si256((const __m256i *)(step + 16 - to)));
}
INLINE f32v load_range_f32(const float *p, ptrdiff_t from, ptrdiff_t to, f32v fill)
{
    const __m256i mask = mask_32(from, to);
    return (f32v)_mm256_blendv_ps((__m256)fill, _mm256_maskload_ps(p, mask), (__m256)mask);
}
INLINE f32v fill_f32(f32v v, ptrdiff_t from, ptrdiff_t to, f32v fill)
{
    return (f32v)_mm256_blendv_ps((__m256)fill, (__m256)v, (__m256)mask_32(from, to));
}
INLINE f64v fill_f64(f64v v, ptrdiff_t from, ptrdiff_t to, f64v fill)
{
    return (f64v)_mm256_blendv_pd((__m256d)fill, (__m256d)v, (__m256d)mask_32(2 * from, 2 * to));
}
INLINE f64v load_range_f64(const double *p, ptrdiff_t from, ptrdiff_t to, f64v fill)
{
    const __m256i mask = mask_32(2 * from, 2 * to);
    return (f64v)_mm256_blendv_pd((__m256d)fill, _mm256_maskload_pd(p, mask), (__m256d)mask);
}
#else
INLINE f32v load_range_f32(const float *p, ptrdiff_t from, ptrdiff_t to, f32v fill)
{
    float lanes[VL_F32];
    memcpy(lanes, &fill, sizeof lanes);
    for (ptrdiff_t i = from; i < to; ++i) lanes[i] = p[i];
    return load_f32(lanes);
}
INLINE f64v load_range_f64(const double *p, ptrdiff_t from, ptrdiff_t to, f64v fill)
{
    double lanes[VL_F64];
    memcpy(lanes, &fill, sizeof lanes);
    for (ptrdiff_t i = from; i < to; ++i) lanes[i] = p[i];
    return load_f64(lanes);
}
INLINE f32v fill_f32(f32v v, ptrdiff_t from, ptrdiff_t to, f32v fill)
{
    const i32v lane = {0, 1, 2, 3}, in = (lane >= (int32_t)from) & (lane < (int32_t)to);
    return (f32v)(((i32v)v & in) | ((i32v)fill & ~in));
}
INLINE f64v fill_f64(f64v v, ptrdiff_t from, ptrdiff_t to, f64v fill)
{
    const i64v lane = {0, 1}, in = (lane >= (int64_t)from) & (lane < (int64_t)to);
    return (f64v)(((i64v)v & in) | ((i64v)fill & ~in));
}
#endif
INLINE void store_range_f32(float *p, ptrdiff_t from, ptrdiff_t to, f32v v)
{
    for (ptrdiff_t i = from; i < to; ++i) p[i] = v[i];
}
INLINE void store_range_f64(double *p, ptrdiff_t from, ptrdiff_t to, f64v v)
{
    for (ptrdiff_t i = from; i < to; ++i) p[i] = v[i];
}

#endif

/* ---- a line brought in ahead, and one aligned store that does not pull its line into the caches ------------------ */

/* A line is asked for twice: a processor that is busy drops what it is asked for now and then. */
INLINE void fetch(const void *p, ptrdiff_t ahead, ptrdiff_t size)
{
    for (ptrdiff_t i = 0; i < size; i += 32) __builtin_prefetch((const void *)((uintptr_t)p + (uintptr_t)(ahead + i)), 0, 2);
}

#if defined(__SSE2__)
INLINE void stream_f32(float *p, f32v v)
{
#if VECTOR_BYTES == 64
    _mm512_stream_ps(p, (__m512)v);
#elif VECTOR_BYTES == 32
    _mm256_stream_ps(p, (__m256)v);
#else
    _mm_stream_ps(p, (__m128)v);
#endif
}
INLINE void stream_f64(double *p, f64v v) { stream_f32((float *)p, (f32v)v); }
INLINE void stream_fence(void) { _mm_sfence(); }
#else
INLINE void stream_f32(float *p, f32v v) { store_f32(p, v); } /* AArch64 cores skip the read of a full line by themselves */
INLINE void stream_f64(double *p, f64v v) { store_f64(p, v); }
INLINE void stream_fence(void) {}
#endif

#if VECTOR_BYTES == 64
#define REGISTER_CONSTRAINT "+v"
#elif defined(__SSE2__)
#define REGISTER_CONSTRAINT "+x"
#elif defined(__aarch64__)
#define REGISTER_CONSTRAINT "+w"
#endif
INLINE f32v keep_f32(f32v v)
{
#ifdef REGISTER_CONSTRAINT
    __asm__("" : REGISTER_CONSTRAINT(v));
#endif
    return v;
}
INLINE f64v keep_f64(f64v v)
{
#ifdef REGISTER_CONSTRAINT
    __asm__("" : REGISTER_CONSTRAINT(v));
#endif
    return v;
}

/* ---- the halving tree ------------------------------------------------------------------------------------- */

typedef float f32x4 __attribute__((vector_size(16)));
typedef double f64x2 __attribute__((vector_size(16)));

INLINE float tree_f32x4(f32x4 v)
{
    v += __builtin_shufflevector(v, v, 2, 3, 2, 3);
    return v[0] + v[1];
}
INLINE double tree_f64x2(f64x2 v) { return v[0] + v[1]; }

#if VECTOR_BYTES == 64
typedef float f32x8 __attribute__((vector_size(32)));
typedef double f64x4 __attribute__((vector_size(32)));
#endif

/* of all virtual lanes down to one vector */
#define FOLD_LANES(type, V)                                                                                          \
    INLINE V fold_##type(const V lanes[LANE_VECTORS])                                                                \
    {                                                                                                                \
        V v[LANE_VECTORS];                                                                                           \
        for (int i = 0; i < LANE_VECTORS; ++i) v[i] = lanes[i];                                                      \
        for (int half = LANE_VECTORS / 2; half; half /= 2)                                                           \
            for (int i = 0; i < half; ++i) v[i] += v[i + half];                                                      \
        return v[0];                                                                                                 \
    }
FOLD_LANES(f32, f32v)
FOLD_LANES(f64, f64v)
#undef FOLD_LANES

INLINE float tree_f32(const f32v lanes[LANE_VECTORS])
{
    const f32v v = fold_f32(lanes);
#if VECTOR_BYTES == 64
    f32x8 w = __builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7) +
              __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15);
    return tree_f32x4(__builtin_shufflevector(w, w, 0, 1, 2, 3) + __builtin_shufflevector(w, w, 4, 5, 6, 7));
#elif VECTOR_BYTES == 32
    return tree_f32x4(__builtin_shufflevector(v, v, 0, 1, 2, 3) + __builtin_shufflevector(v, v, 4, 5, 6, 7));
#else
    return tree_f32x4(v);
#endif
}

INLINE double tree_f64(const f64v lanes[LANE_VECTORS])
{
    const f64v v = fold_f64(lanes);
#if VECTOR_BYTES == 64
    f64x4 w = __builtin_shufflevector(v, v, 0, 1, 2, 3) + __builtin_shufflevector(v, v, 4, 5, 6, 7);
    return tree_f64x2(__builtin_shufflevector(w, w, 0, 1) + __builtin_shufflevector(w, w, 2, 3));
#elif VECTOR_BYTES == 32
    return tree_f64x2(__builtin_shufflevector(v, v, 0, 1) + __builtin_shufflevector(v, v, 2, 3));
#else
    return tree_f64x2(v);
#endif
}

/* Of two vectors of blocks of 2 h lanes: the first half of each block + its second half */
#define FROM(i, h) ((i) / (h) * 2 * (h) + (i) % (h))
#define FROM_2(k, h) k + FROM(0, h), k + FROM(1, h)
#define FROM_4(k, h) FROM_2(k, h), k + FROM(2, h), k + FROM(3, h)
#define FROM_8(k, h) FROM_4(k, h), k + FROM(4, h), k + FROM(5, h), k + FROM(6, h), k + FROM(7, h)
#define FROM_16(k, h)                                                                                                \
    FROM_8(k, h), k + FROM(8, h), k + FROM(9, h), k + FROM(10, h), k + FROM(11, h), k + FROM(12, h), k + FROM(13, h), \
        k + FROM(14, h), k + FROM(15, h)
#define HALVE(vl, h)                                                                                                 \
    for (int i = 0; i < (h); ++i)                                                                                    \
        v[i] = __builtin_shufflevector(v[2 * i], v[2 * i + 1], FROM_##vl(0, h)) +                                     \
               __builtin_shufflevector(v[2 * i], v[2 * i + 1], FROM_##vl(h, h))

INLINE f32v trees_f32(f32v v[VL_F32])
{
#if VECTOR_BYTES == 64
    HALVE(16, 8);
    HALVE(16, 4);
    HALVE(16, 2);
    HALVE(16, 1);
#elif VECTOR_BYTES == 32
    HALVE(8, 4);
    HALVE(8, 2);
    HALVE(8, 1);
#else
    HALVE(4, 2);
    HALVE(4, 1);
#endif
    return v[0];
}

INLINE f64v trees_f64(f64v v[VL_F64])
{
#if VECTOR_BYTES == 64
    HALVE(8, 4);
    HALVE(8, 2);
    HALVE(8, 1);
#elif VECTOR_BYTES == 32
    HALVE(4, 2);
    HALVE(4, 1);
#else
    HALVE(2, 1);
#endif
    return v[0];
}
#undef FROM
#undef FROM_2
#undef FROM_4
#undef FROM_8
#undef FROM_16
#undef HALVE

/* ---- lanes ---------------------------------------------------------------------------------------------------- */

INLINE f32v only_f32(f32v v, ptrdiff_t from, ptrdiff_t to) { return fill_f32(v, from, to, (f32v){0}); }
INLINE f64v only_f64(f64v v, ptrdiff_t from, ptrdiff_t to) { return fill_f64(v, from, to, (f64v){0}); }

/* lane i of the result is lane i + turn, round and round, of all virtual lanes; 0 < turn < VL */
#if VECTOR_BYTES == 64
INLINE void turn_f32(f32v lanes[LANE_VECTORS], ptrdiff_t turn)
{
    const __m512i from = _mm512_add_epi32(_mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0),
                                          _mm512_set1_epi32((int)turn));
    const __m512 a = (__m512)lanes[0], b = (__m512)lanes[1];
    lanes[0] = (f32v)_mm512_permutex2var_ps(a, from, b);
    lanes[1] = (f32v)_mm512_permutex2var_ps(b, from, a);
}
INLINE void turn_f64(f64v lanes[LANE_VECTORS], ptrdiff_t turn)
{
    const __m512i from = _mm512_add_epi64(_mm512_set_epi64(7, 6, 5, 4, 3, 2, 1, 0), _mm512_set1_epi64(turn));
    const __m512d a = (__m512d)lanes[0], b = (__m512d)lanes[1];
    lanes[0] = (f64v)_mm512_permutex2var_pd(a, from, b);
    lanes[1] = (f64v)_mm512_permutex2var_pd(b, from, a);
}
#else
#define LANES_MOVED(type, T, V)                                                                                      \
    INLINE void turn_##type(V lanes[LANE_VECTORS], ptrdiff_t turn)                                                   \
    {                                                                                                                \
        T twice[2][128 / sizeof(T)];                                                                                 \
        memcpy(twice[0], lanes, 128);                                                                                \
        memcpy(twice[1], lanes, 128);                                                                                \
        memcpy(lanes, twice[0] + turn, 128);                                                                         \
    }
LANES_MOVED(f32, float, f32v)
LANES_MOVED(f64, double, f64v)
#undef LANES_MOVED
#endif

/* have all virtual lanes one sign bit? */
#if VECTOR_BYTES == 64
INLINE int one_sign_f32(const f32v lanes[LANE_VECTORS])
{
    const unsigned a = _mm512_movepi32_mask((__m512i)lanes[0]), b = _mm512_movepi32_mask((__m512i)lanes[1]);
    return (a | b) == 0 || (a & b) == 0xffff;
}
INLINE int one_sign_f64(const f64v lanes[LANE_VECTORS])
{
    const unsigned a = _mm512_movepi64_mask((__m512i)lanes[0]), b = _mm512_movepi64_mask((__m512i)lanes[1]);
    return (a | b) == 0 || (a & b) == 0xff;
}
#else
INLINE int one_sign_i32(i32v either, i32v both)
{
    int32_t any = 0, all = -1;
    for (size_t i = 0; i < sizeof(i32v) / 4; ++i) any |= either[i], all &= both[i];
    return any >= 0 || all < 0;
}
INLINE int one_sign_i64(i64v either, i64v both)
{
    int64_t any = 0, all = -1;
    for (size_t i = 0; i < sizeof(i64v) / 8; ++i) any |= either[i], all &= both[i];
    return any >= 0 || all < 0;
}
INLINE int one_sign_f32(const f32v lanes[LANE_VECTORS])
{
    i32v either = (i32v)lanes[0], both = either;
    for (int i = 1; i < LANE_VECTORS; ++i) either |= (i32v)lanes[i], both &= (i32v)lanes[i];
#if VECTOR_BYTES == 32
    return _mm256_movemask_ps((__m256)either) == 0 || _mm256_movemask_ps((__m256)both) == 0xff;
#else
    return one_sign_i32(either, both);
#endif
}
INLINE int one_sign_f64(const f64v lanes[LANE_VECTORS])
{
    i64v either = (i64v)lanes[0], both = either;
    for (int i = 1; i < LANE_VECTORS; ++i) either |= (i64v)lanes[i], both &= (i64v)lanes[i];
    return one_sign_i64(either, both);
}
#endif

/* ---- float <-> double --------------------------------------------------------------------------------------- */

#if defined(__SSE2__) && VECTOR_BYTES == 16
/* GCC 12 has no good code for vectors of 8 bytes: half a vector travels in the low half of a whole one */
INLINE f64v widen_lo(f32v v) { return (f64v)_mm_cvtps_pd((__m128)v); }
INLINE f64v widen_hi(f32v v) { return (f64v)_mm_cvtps_pd(_mm_movehl_ps((__m128)v, (__m128)v)); }
INLINE f32v narrow(f64v lo, f64v hi)
{
    return (f32v)_mm_movelh_ps(_mm_cvtpd_ps((__m128d)lo), _mm_cvtpd_ps((__m128d)hi));
}
#elif VECTOR_BYTES == 64
INLINE f64v widen_lo(f32v v)
{
    return __builtin_convertvector(__builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7), f64v);
}
INLINE f64v widen_hi(f32v v)
{
    return __builtin_convertvector(__builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15), f64v);
}
INLINE f32v narrow(f64v lo, f64v hi)
{
    return __builtin_shufflevector(__builtin_convertvector(lo, f32h), __builtin_convertvector(hi, f32h),
                                   0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
}
#elif VECTOR_BYTES == 32
INLINE f64v widen_lo(f32v v) { return __builtin_convertvector(__builtin_shufflevector(v, v, 0, 1, 2, 3), f64v); }
INLINE f64v widen_hi(f32v v) { return __builtin_convertvector(__builtin_shufflevector(v, v, 4, 5, 6, 7), f64v); }
INLINE f32v narrow(f64v lo, f64v hi)
{
    return __builtin_shufflevector(__builtin_convertvector(lo, f32h), __builtin_convertvector(hi, f32h),
                                   0, 1, 2, 3, 4, 5, 6, 7);
}
#else
INLINE f64v widen_lo(f32v v) { return (f64v){v[0], v[1]}; }
INLINE f64v widen_hi(f32v v) { return (f64v){v[2], v[3]}; }
INLINE f32v narrow(f64v lo, f64v hi) { return (f32v){(float)lo[0], (float)lo[1], (float)hi[0], (float)hi[1]}; }
#endif

#endif
