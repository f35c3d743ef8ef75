/* sigmoid and tanh of float32, at most 1 ULP, monotone, the same bits on every instruction set.
 *
 * All steps are in float64, and the result is rounded once:
 *   (1) k = round(t / ln 2),  r = t - k ln 2            |r| <= ln 2 / 2
 *   (2) p = expm1(r) = r (1 + r/2! + ... + r^8/9!)      relative error below 2^-33
 *   (3) expm1(t) = 2^k p + (2^k - 1)
 *   (4) tanh(x)  = -e / (2 + e)       with e = expm1(-2|x|), and the sign of x
 *   (5) sigmoid(x) = 1 / (2 + e)      with e = expm1(-x)
 * Adding and subtracting 1.5 * 2^52 rounds k to an integer, which the low mantissa bits of the sum
 * then hold: no conversion instruction, branch or table is needed. Beyond the clamps the result in
 * float32 equals its limit.
 */
#ifndef CNORM_ACTIVATION_INL_H
#define CNORM_ACTIVATION_INL_H

#include "../simd/vector.h"

INLINE f64v select_f64(i64v mask, f64v a, f64v b)
{
    return (f64v)(((i64v)a & mask) | ((i64v)b & ~mask));
}

/* expm1(t) for |t| <= 150; NaN stays NaN */
INLINE f64v expm1_f64(f64v t)
{
    const double round = 6755399441055744.0; /* 1.5 * 2^52 */
    f64v shifted = t * 1.4426950408889634 + round;
    f64v r = t - (shifted - round) * 0.6931471805599453; /* (1) */
    f64v q = r * (1.0 / 362880) + 1.0 / 40320;           /* (2) */
    q = q * r + 1.0 / 5040;
    q = q * r + 1.0 / 720;
    q = q * r + 1.0 / 120;
    q = q * r + 1.0 / 24;
    q = q * r + 1.0 / 6;
    q = q * r + 0.5;
    f64v p = (q * r) * r + r;
    /* k in the bits of the exponent; the bits of 1.5 * 2^52 are shifted out */
    i64v k = (i64v)shifted << 52;
    f64v scale = (f64v)(k + (i64v)splat_f64(1.0));
    return scale * p + (scale - 1.0); /* (3) */
}

INLINE f64v sigmoid_f64(f64v x)
{
    const f64v limit = splat_f64(104.0);
    x = select_f64(x > limit, limit, x); /* a comparison with NaN is false: it passes through */
    x = select_f64(x < -limit, -limit, x);
    return 1.0 / (2.0 + expm1_f64(-x));
}

INLINE f64v tanh_f64(f64v x)
{
    const i64v sign = (i64v)x & (i64v)splat_f64(-0.0);
    f64v magnitude = (f64v)((i64v)x ^ sign);
    const f64v limit = splat_f64(10.0);
    magnitude = select_f64(magnitude > limit, limit, magnitude);
    f64v e = expm1_f64(magnitude * -2.0);
    const f64v y = -e / (2.0 + e);
    return (f64v)(((i64v)y & ~(i64v)splat_f64(-0.0)) | sign);
}

INLINE f32v sigmoid_v(f32v x) { return narrow(sigmoid_f64(widen_lo(x)), sigmoid_f64(widen_hi(x))); }
INLINE f32v tanh_v(f32v x) { return narrow(tanh_f64(widen_lo(x)), tanh_f64(widen_hi(x))); }

/* y [n] = f(x [n]); y may be x */
static void sigmoid_f32(ptrdiff_t n, const float *x, float *y)
{
    ptrdiff_t i = 0;
    for (; i + VL_F32 <= n; i += VL_F32) store_f32(y + i, sigmoid_v(load_f32(x + i)));
    if (i < n)
        store_range_f32(y + i, 0, n - i, sigmoid_v(load_range_f32(x + i, 0, n - i, splat_f32(0))));
}

static void tanh_f32(ptrdiff_t n, const float *x, float *y)
{
    ptrdiff_t i = 0;
    for (; i + VL_F32 <= n; i += VL_F32) store_f32(y + i, tanh_v(load_f32(x + i)));
    if (i < n)
        store_range_f32(y + i, 0, n - i, tanh_v(load_range_f32(x + i, 0, n - i, splat_f32(0))));
}

#endif
