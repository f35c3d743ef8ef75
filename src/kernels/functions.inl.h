/* Functions of one element and their derivatives, the same bits on every instruction set. All is computed in float64
 * and rounded once, with reduced_each of activation.inl.h for exp:
 *   (1) exp(t) = 2^k p + 2^k,  expm1(t) = 2^k p + (2^k - 1)
 *   (2) log(v) = k ln 2 + 2 atanh(s)   with v = 2^k m, sqrt(1/2) <= m < sqrt(2), s = (m - 1) / (m + 1)
 *   (3) log(1 + e) = 2 atanh(s)        with s = e / (2 + e), 0 <= e <= 1
 *   (4) atanh(s) = s + s^3 P(s^2)      for |s| <= 1/3; relative error below 2^-36
 *   (5) Phi(-a) = exp(-a^2 / 2) G((a - 4) / (a + 4))   for 0 <= a <= 14.5; relative error of G below 2^-36
 *   (6) x = n pi/2 + r, |r| <= pi/4: of x 2/pi, the product of x's 24 bits and the 96 bits of 2/pi that count modulo 4
 *   (7) sin(r) = r (1 - r^2/3! + ... - r^10/11!),  cos(r) = 1 - r^2/2! + ... + r^12/12!   relative error below 2^-36
 * Phi is the normal distribution. P and G interpolate at Chebyshev nodes. Beyond the clamps a result in float32 is its
 * limit. Where a function has a kink, the derivative is that of the left, as PyTorch has it. */

typedef struct dual {
    f64v y, slope; /* f(x), f'(x) */
} dual;

INLINE f64v at_least(f64v x, double low) { return select_f64((i64v)(x < splat_f64(low)), splat_f64(low), x); }
INLINE f64v at_most(f64v x, double high) { return select_f64((i64v)(x > splat_f64(high)), splat_f64(high), x); }
INLINE f64v within(f64v x, double low, double high) { return at_most(at_least(x, low), high); }

INLINE f64v exp_v(f64v t) /* (1), |t| <= 150 */
{
    f64v scale;
    reduced_each(1, &t, &scale);
    return scale * t + scale;
}

INLINE f64v twice_atanh(f64v s) /* (4) */
{
    const f64v t = s * s;
    f64v q = t * 0.10393808427873376 + 0.08732351232720387;
    q = q * t + 0.11132355604500663;
    q = q * t + 0.1428515286094183;
    q = q * t + 0.2000000538497483;
    q = q * t + 0.33333333325011805;
    return 2.0 * (s + s * t * q);
}

INLINE f64v log_v(f64v v) /* (2); no subnormal of float64 */
{
    const double round = 6755399441055744.0; /* 1.5 * 2^52 */
    const i64v half = (i64v)splat_f64(0.7071067811865476);
    const i64v bits =
        (i64v)select_f64((i64v)(v > splat_f64(0)), v, splat_f64(1)); /* else the difference may overflow */
    const i64v k = (bits - half) >> 52;
    const f64v m = (f64v)(bits - (k << 52)), exponent = (f64v)(k + (i64v)splat_f64(round)) - round;
    const f64v y = exponent * 0.6931471805599453 + twice_atanh((m - 1.0) / (m + 1.0));
    const f64v edge = select_f64((i64v)(v == splat_f64(0)), splat_f64(-__builtin_inf()), splat_f64(__builtin_nan("")));
    return select_f64((i64v)(v > splat_f64(0)), select_f64((i64v)(v < splat_f64(__builtin_inf())), y, v), edge);
}

INLINE dual elu_of(f64v x, double alpha, double scale)
{
    const f64v one = splat_f64(scale);
    f64v p = within(x, -150, 0), power;
    reduced_each(1, &p, &power);
    return (dual){select_f64((i64v)(x < splat_f64(0)), alpha * scale * (power * p + (power - 1.0)), scale * x),
                  select_f64((i64v)(x > splat_f64(0)), one, alpha * scale * (power * p + power))};
}
INLINE dual elu(const cnorm_elementwise *is, f64v x) { return elu_of(x, (double)is->alpha, 1); }
INLINE dual selu(f64v x) { return elu_of(x, (double)1.67326319217681884765625f, (double)1.05070102214813232421875f); }

/* x s(u), with u = x r, r > 0, |u| <= 150 and its derivative; beyond the clamp of u x is `left` or s(u) 1 */
INLINE dual gated(f64v x, f64v clamped, double left, f64v u, f64v u_slope)
{
    const f64v e = exp_v(-u), s = 1.0 / (1.0 + e);
    return (dual){at_least(x, left) / (1.0 + e), s + clamped * (e * s) * s * u_slope};
}
INLINE dual silu(f64v x)
{
    const f64v u = within(x, -150, 150);
    return gated(x, u, -150, u, splat_f64(1));
}
INLINE dual gelu_tanh(f64v x)
{
    const double twice_root = 1.5957691216057308; /* 2 sqrt(2 / pi) */
    const f64v c = within(x, -12, 12), square = c * c;
    return gated(x, c, -12, twice_root * (c + 0.044715 * square * c), twice_root * (1.0 + 3 * 0.044715 * square));
}

INLINE dual gelu(f64v x) /* (5) */
{
    static const double coefficients[] = {-1.1737112476848352e-06, -3.8321367281680526e-06, 5.096493317694845e-06,
                                          2.8548507465056936e-05,  -4.575201272444812e-05,  -0.00018718556350606262,
                                          0.0006388529992849131,   0.0005075643403050371,   -0.008492099285750307,
                                          0.03086480396711258,     -0.07170740717962479,    0.12437925533705065,
                                          -0.1703977215501773,     0.09441064130203511};
    const f64v c = within(x, -14.5, 14.5), a = select_f64((i64v)(c < splat_f64(0)), -c, c);
    const f64v q = (a - 4.0) / (a + 4.0), e = exp_v(c * c * -0.5);
    f64v g = splat_f64(coefficients[0]);
    for (int i = 1; i < 14; ++i) g = g * q + coefficients[i];
    const f64v phi = select_f64((i64v)(x < splat_f64(0)), e * g, 1.0 - e * g);
    return (dual){at_least(x, -14.5) * phi, phi + c * (e * 0.3989422804014327)}; /* 1 / sqrt(2 pi) */
}

INLINE dual leaky_relu(const cnorm_elementwise *is, f64v x)
{
    const f64v alpha = splat_f64((double)is->alpha);
    return (dual){select_f64((i64v)(x < splat_f64(0)), alpha * x, x),
                  select_f64((i64v)(x > splat_f64(0)), splat_f64(1), alpha)};
}

INLINE dual softplus(f64v x) /* (3): max(x, 0) + log(1 + exp(-|x|)) */
{
    const i64v negative = (i64v)(x < splat_f64(0));
    const f64v e = exp_v(at_least(select_f64(negative, x, -x), -150)), s = 1.0 / (1.0 + e);
    return (dual){at_least(x, 0) + twice_atanh(e / (2.0 + e)), select_f64(negative, e * s, s)};
}

INLINE dual hard_sigmoid(const cnorm_elementwise *is, f64v x)
{
    const f64v v = x * (double)is->alpha + (double)is->beta;
    const i64v inside = (i64v)(v > splat_f64(0)) & (i64v)(v < splat_f64(1));
    return (dual){within(v, 0, 1), select_f64(inside, splat_f64((double)is->alpha), splat_f64(0))};
}

INLINE dual hard_swish(f64v x)
{
    const f64v v = (x + 3.0) / 6.0, gate = within(v, 0, 1);
    const i64v inside = (i64v)(v > splat_f64(0)) & (i64v)(v < splat_f64(1));
    return (dual){x * gate, gate + select_f64(inside, x / 6.0, splat_f64(0))};
}

INLINE dual logarithm(const cnorm_elementwise *is, f64v x)
{
    const f64v v = x + (double)is->alpha;
    return (dual){log_v(v), 1.0 / v};
}
INLINE dual exponential(f64v x)
{
    const f64v y = exp_v(within(x, -150, 150));
    return (dual){y, y};
}
INLINE dual square_root(f64v x)
{
    const f64v y = sqrt_f64(x);
    return (dual){y, 0.5 / y};
}
INLINE dual square(f64v x) { return (dual){x * x, 2.0 * x}; }
INLINE dual magnitude(f64v x)
{
    const i64v sign = (i64v)splat_f64(-0.0);
    const f64v one = (f64v)((i64v)splat_f64(1) | ((i64v)x & sign));
    return (dual){(f64v)((i64v)x & ~sign), select_f64((i64v)(x == splat_f64(0)), splat_f64(0), one)};
}
INLINE dual clipping(const cnorm_elementwise *is, f64v x)
{
    const double low = (double)is->alpha, high = (double)is->beta;
    const i64v inside = (i64v)(x > splat_f64(low)) & (i64v)(x < splat_f64(high));
    return (dual){within(x, low, high), select_f64(inside, splat_f64(1), splat_f64(0))};
}

/* (6) of one element in integers: r has an error of 2^-61 and is at least 2^-29.3, as of 16367173 2^72. x below 1/2 is
 * its own r. */
INLINE double quarter_turns(double x, int64_t *n)
{
    static const uint32_t bits[] = {0,          0xa2f9836e, 0x4e441529, 0xfc2757d1, /* 32 bits of 0, then 2 / pi */
                                    0xf534ddc0, 0xdb629599, 0x3c439041, 0xfe5163ab};
    uint64_t of_x;
    memcpy(&of_x, &x, sizeof of_x);
    const int power = (int)(of_x >> 52 & 0x7ff) - 1023; /* x = +-m 2^(power - 23) */
    const int from = power < -1 ? 6 : power > 128 ? 135 : power + 7;
    const uint64_t m = (of_x >> 29 & 0x7fffff) | 0x800000;
    const uint32_t *const word = bits + from / 32;
    uint64_t part[3];
    EACH(i, 3) part[i] = (((uint64_t)word[i] << 32 | word[i + 1]) << from % 32) >> 32;
    uint64_t turns = (m * part[0] << 32) + m * part[1] + (m * part[2] >> 32); /* modulo 4, 62 bits behind the point */
    turns = of_x >> 63 ? 0 - turns : turns;
    const uint64_t whole = (turns + ((uint64_t)1 << 61)) >> 62;
    *n = power < -1 ? 0 : (int64_t)whole;
    const double r = (double)(int64_t)(turns - (whole << 62)) * (1.5707963267948966 * 0x1p-62);
    return power < -1 ? x : r + (x - x); /* NaN and infinity give NaN */
}

INLINE dual sine(f64v x, int64_t quarter) /* (7): sin(x + quarter pi/2) */
{
    static const double sines[] = {-1.0 / 39916800, 1.0 / 362880, -1.0 / 5040, 1.0 / 120, -1.0 / 6, 1};
    static const double cosines[] = {1.0 / 479001600, -1.0 / 3628800, 1.0 / 40320, -1.0 / 720, 1.0 / 24, -1.0 / 2, 1};
    double of[VL_F64];
    int64_t turns[VL_F64];
    memcpy(of, &x, sizeof of);
    EACH(i, VL_F64) of[i] = quarter_turns(of[i], turns + i);
    f64v r, s = splat_f64(sines[0]), c = splat_f64(cosines[0]);
    i64v n;
    memcpy(&r, of, sizeof r), memcpy(&n, turns, sizeof n);
    const f64v square = r * r;
    EACH(i, 5) s = s * square + sines[i + 1];
    EACH(i, 6) c = c * square + cosines[i + 1];
    s *= r, n += quarter;
    const i64v odd = -(n & 1), sign = (n & 2) << 62; /* two quarters turn the sign */
    const f64v y = select_f64(odd, c, s), slope = select_f64(odd, -s, c);
    return (dual){(f64v)((i64v)y ^ sign), (f64v)((i64v)slope ^ sign)};
}
