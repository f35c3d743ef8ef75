/* sigmoid and tanh of float32, at most 1 ULP, monotone, the same bits on every instruction set.
 *
 * All steps are in float64, and the result is rounded once:
 *   (1) k = round(t / ln 2),  r = t - k ln 2            |r| <= ln 2 / 2
 *   (2) p = expm1(r) = r (1 + r/2! + ... + r^8/9!)      relative error below 2^-33
 *   (3) expm1(t) = 2^k p + (2^k - 1)
 *   (4) tanh(x)  = -e / (2 + e)       with e = expm1(-2|x|), and the sign of x
 *   (5) sigmoid(x) = 1 / (2 + e)      with e = expm1(-x)
 * Adding and subtracting 1.5 * 2^52 rounds k to an integer, which the low mantissa bits of the sum then hold: no
 * conversion instruction, branch or table is needed. Beyond the clamps the result in float32 equals its limit. */

enum { TOGETHER = 4 }; /* vectors of float whose steps alternate in `activate` */

/* v clipped to +-limit; NaN stays NaN */
INLINE f32v clipped(f32v v, float limit)
{
    const f32v top = splat_f32(limit);
    return larger_f32(-top, smaller_f32(top, v));
}

/* dy, 0 where v is clipped */
INLINE f32v clipped_backward(f32v v, float limit, f32v dy)
{
    const i32v clips = (i32v)(v > splat_f32(limit)) | (i32v)(v < splat_f32(-limit));
    return (f32v)((i32v)dy & ~clips);
}

/* (1), (2) for n <= 2 TOGETHER vectors, |t| <= 150: t becomes p, and scale 2^k; NaN stays NaN. keep_f64: GCC would take
 * one vector after another (12 to 18 % more time on Zen 5, 2026-11-29). */
INLINE void reduced_each(int n, f64v *t, f64v *scale)
{
    const double round = 6755399441055744.0; /* 1.5 * 2^52 */
    static const double factors[] = {1.0 / 40320, 1.0 / 5040, 1.0 / 720, 1.0 / 120, 1.0 / 24, 1.0 / 6, 0.5};
    f64v shifted[2 * TOGETHER], q[2 * TOGETHER];
    EACH(i, n) shifted[i] = t[i] * 1.4426950408889634 + round;
    EACH(i, n) t[i] = t[i] - (shifted[i] - round) * 0.6931471805599453; /* (1): t is r from here */
    EACH(i, n) q[i] = splat_f64(1.0 / 362880);
    EACH(k, 7)
        EACH(i, n) q[i] = keep_f64(q[i] * t[i] + factors[k]); /* (2) */
    EACH(i, n) t[i] = keep_f64((q[i] * t[i]) * t[i] + t[i]);  /* p */
    /* k in the bits of the exponent; the bits of 1.5 * 2^52 are shifted out */
    EACH(i, n) scale[i] = (f64v)(((i64v)shifted[i] << 52) + (i64v)splat_f64(1.0));
}

/* t = expm1(t) for n <= 2 TOGETHER vectors, |t| <= 150; NaN stays NaN */
INLINE void expm1_each(int n, f64v *t)
{
    f64v scale[2 * TOGETHER];
    reduced_each(n, t, scale);
    EACH(i, n) t[i] = scale[i] * t[i] + (scale[i] - 1.0); /* (3) */
}

/* x[i] = f[i](x[i]), sigmoid or tanh, for `count` <= TOGETHER vectors, or with `halves` 1 for the lower half of each;
 * all three are constants. Each step is done for all vectors before the next one: a single vector's operations wait for
 * each other, and the scheduler of the processor holds too few of them to reach the next vector (Zen 4, 2026-11-23:
 * 0.87 instead of 1.16 ns a number). */
INLINE void activate_halves(int count, int halves, const cnorm_activation *f, f32v *x)
{
    const i32v sign = (i32v)splat_f32(-0.0f);
    const int all = count * halves, last = halves - 1;
    f64v t[2 * TOGETHER];
    EACH(i, count) {
        const int tanh = f[i] == CNORM_ACTIVATION_TANH;
        const f32v magnitude = (f32v)((i32v)x[i] & ~sign);
        const f32v a = tanh ? smaller_f32(splat_f32(10), magnitude) * -2.0f : -clipped(x[i], 104);
        t[halves * i] = widen_lo(a);
        if (halves == 2) t[2 * i + 1] = widen_hi(a);
    }
    expm1_each(all, t);
    EACH(i, all) {
        const f64v numerator = f[i / halves] == CNORM_ACTIVATION_TANH ? -t[i] : splat_f64(1);
        t[i] = numerator / (2.0 + t[i]); /* (4), (5) */
    }
    EACH(i, count) {
        const f32v y = narrow(t[halves * i], t[halves * i + last]);
        x[i] = f[i] == CNORM_ACTIVATION_TANH ? (f32v)(((i32v)y & ~sign) | ((i32v)x[i] & sign)) : y;
    }
}
INLINE void activate(int count, const cnorm_activation *f, f32v *x) { activate_halves(count, 2, f, x); }

/* Called, since the cells have many calls, at 700 bytes each where inlined. */
static NOINLINE f32v sigmoid_v(f32v x)
{
    activate(1, (const cnorm_activation[]){CNORM_ACTIVATION_SIGMOID}, &x);
    return x;
}
static NOINLINE f32v tanh_v(f32v x)
{
    activate(1, (const cnorm_activation[]){CNORM_ACTIVATION_TANH}, &x);
    return x;
}

/* their derivatives, from their results */
INLINE f32v sigmoid_slope(f32v s) { return s * (1.0f - s); }
INLINE f32v tanh_slope(f32v t) { return (1.0f - t) * (1.0f + t); }

/* sigmoid, tanh or ReLU, and dy times its derivative */
INLINE f32v activated(cnorm_activation f, f32v a)
{
    if (f == CNORM_ACTIVATION_TANH) return tanh_v(a);
    if (f == CNORM_ACTIVATION_SIGMOID) return sigmoid_v(a);
    return (f32v)((i32v)a & ~(i32v)(a < splat_f32(0))); /* NaN stays NaN */
}
INLINE f32v activation_backward(cnorm_activation f, f32v a, f32v dy)
{
    if (f == CNORM_ACTIVATION_RELU) return (f32v)((i32v)dy & (i32v)(a > splat_f32(0)));
    return f == CNORM_ACTIVATION_TANH ? dy * tanh_slope(tanh_v(a)) : dy * sigmoid_slope(sigmoid_v(a));
}

/* y [n] = f(x [n]); y may be x */
INLINE void activate_array(cnorm_activation f, ptrdiff_t n, const float *x, float *y)
{
    const cnorm_activation each[TOGETHER] = {f, f, f, f};
    ptrdiff_t i = 0;
    for (; i + TOGETHER * VL_F32 <= n; i += TOGETHER * VL_F32) {
        f32v v[TOGETHER];
        EACH(k, TOGETHER) v[k] = load_f32(x + i + k * VL_F32);
        activate(TOGETHER, each, v);
        EACH(k, TOGETHER) store_f32(y + i + k * VL_F32, v[k]);
    }
    for (; i < n; i += VL_F32) {
        f32v v = load_first_f32(x + i, n - i);
        activate(1, each, &v);
        store_first_f32(y + i, n - i, v);
    }
}

static void sigmoid_f32(ptrdiff_t n, const float *x, float *y) { activate_array(CNORM_ACTIVATION_SIGMOID, n, x, y); }
static void tanh_f32(ptrdiff_t n, const float *x, float *y) { activate_array(CNORM_ACTIVATION_TANH, n, x, y); }
