/* Functions of vector.h and storage.h for 16-byte vectors in plain C. Included by sse2.h and generic.h. */
#include "vector.h"

#ifndef CNORM_SIMD_VECTOR_16_H
#define CNORM_SIMD_VECTOR_16_H

#include "loops.h"

LOAD_RANGE(f32, float, f32v)
LOAD_RANGE(f64, double, f64v)
INLINE f32v fill_f32(f32v v, ptrdiff_t from, ptrdiff_t to, f32v fill)
{
    const i32v lane = {0, 1, 2, 3}, in = (lane >= (int32_t)from) & (lane < (int32_t)to);
    return select_f32(in, v, fill);
}

INLINE f32v lanes_f32(f32v v, i32v from) { return (f32v){v[from[0]], v[from[1]], v[from[2]], v[from[3]]}; }
INLINE float vector_tree_f32(f32v v) { return tree_f32x4(v); }
INLINE double vector_tree_f64(f64v v) { return tree_f64x2(v); }

/* s = a b + c to the 53 bits of double, round to odd: the sum if it is exact, else, of the two numbers beside it, the
 * one whose last bit is 1. Rounded to float it is a b + c rounded once, since 53 >= 24 + 2. */
INLINE f64v odd_sum(f64v p, f64v c)
{
    const f64v s = p + c, t = s - p;
    const f64v error = (p - (s - t)) + (c - t); /* p + c - s, exactly; NaN if s is not finite */
    const f64v away = error * s;                /* > 0: s is too small in magnitude, < 0: too large */
    const i64v too_large = away < 0, inexact = too_large | (away > 0);
    return (f64v)(((i64v)s + too_large) | (inexact & 1));
}

/* called, not inlined: it is rare */
static NOINLINE f32v odd_sums(f64v p_lo, f64v p_hi, f64v c_lo, f64v c_hi)
{
    return narrow(odd_sum(p_lo, c_lo), odd_sum(p_hi, c_hi));
}

/* lanes that two roundings may get wrong, in one half of a double's 64 bits: a result below the normal floats but not
 * zero, or whose 29 bits beyond a float's are those of a tie */
INLINE i32v doubtful(f64v s)
{
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    enum { HIGH, LOW };
#else
    enum { LOW, HIGH };
#endif
    static const uint32_t mask[2] = {[LOW] = 0x1fffffff, [HIGH] = 0x7fffffff},
                          add[2] = {[LOW] = 0x70000000, [HIGH] = 0x7fffffff},
                          least[2] = {[LOW] = 0x80000001, [HIGH] = 0xb80fffff};
    const u32v bits = ((u32v)s & (u32v){mask[0], mask[1], mask[0], mask[1]}) + (u32v){add[0], add[1], add[0], add[1]};
    return (i32v)bits < (i32v)(u32v){least[0], least[1], least[0], least[1]};
}

/* Products of floats are exact in double: 24 + 24 <= 53 bits. */
INLINE f32v emulated_fma_f32(f32v a, f32v b, f32v c)
{
    const f64v lo = widen_lo(a) * widen_lo(b), hi = widen_hi(a) * widen_hi(b), c_lo = widen_lo(c), c_hi = widen_hi(c);
    const f64v s_lo = lo + c_lo, s_hi = hi + c_hi;
    if (__builtin_expect(any_i32(doubtful(s_lo) | doubtful(s_hi)), 0)) return odd_sums(lo, hi, c_lo, c_hi);
    return narrow(s_lo, s_hi);
}

INLINE void nt_store_u16(uint16_t *p, u16h v) { store_u16(p, v); }

INLINE i32v select_i32(i32v mask, i32v a, i32v b) { return (a & mask) | (b & ~mask); }
INLINE f32v widen_f16(u16h v)
{
    const i32v bits = extend_u16(v), exponent = bits & 0x7c00;
    /* Shifted by 13 bits, the exponent is too small by 112. Multiplying by 2^112 is exact, also for subnormals. */
    const i32v finite = (i32v)((f32v)((bits & 0x7fff) << 13) * 0x1p112f);
    const i32v special = ((bits & 0x7fff) << 13) | 0x7f800000;
    return (f32v)(select_i32(exponent == 0x7c00, special, finite) | (bits & 0x8000) << 16);
}
static NOINLINE u16h narrow_f16(f32v v)
{
    const i32v bits = (i32v)v, magnitude = bits & 0x7fffffff;
    const i32v nan = magnitude > 0x7f800000;
    /* 2^16; smaller numbers that round to infinity carry into the exponent by themselves */
    const i32v too_large = magnitude >= 0x47800000;
    /* 2^-14; adding 0.5 rounds to multiples of 2^-24, the spacing of subnormals */
    const i32v subnormal = magnitude < 0x38800000;
    const i32v small = (i32v)((f32v)magnitude + 0.5f) - 0x3f000000;
    const u32v m = (u32v)magnitude; /* unsigned: for NaN the sum can exceed 2^31 */
    const i32v normal = (i32v)((m - 0x38000000 + 0xfff + ((m >> 13) & 1)) >> 13);
    i32v half = select_i32(subnormal, small, normal);
    half = select_i32(too_large, (i32v){0} + 0x7c00, half);
    half = select_i32(nan, (i32v){0} + 0x7e00, half);
    return truncate_u16(half | ((bits >> 16) & 0x8000));
}
INLINE u16v upper_halves(u16v a, u16v b)
{
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    return __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14);
#else
    return __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15);
#endif
}

#endif
