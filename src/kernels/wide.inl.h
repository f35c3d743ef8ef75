/* float64 numbers in the virtual lanes: LANES_F64 of them, in LANE_VECTORS vectors. The float64 paths are written with
 * them, so that a lane's sum has one order on every instruction set. Included once. */

INLINE double larger_finite(double a, double b)
{
    b = fabs(b);
    return b > a && b <= 0x1.fffffffffffffp1023 ? b : a;
}

/* The exponent of a normal number, and 2^exponent, limited to normal numbers: for sums of exponents, faster than
 * libm. */
INLINE int exponent_of(double a)
{
    int64_t bits;
    memcpy(&bits, &a, sizeof bits);
    return (int)(bits >> 52 & 0x7ff) - 1023;
}
INLINE double power_of_two(int exponent)
{
    const int64_t limited = exponent < -1022 ? -1022 : exponent > 1023 ? 1023 : exponent, bits = (limited + 1023) << 52;
    double power;
    memcpy(&power, &bits, sizeof power);
    return power;
}

/* the power of two that brings `largest` near 1 */
INLINE double scale_for(double largest)
{
    const int exponent = largest > 0 ? exponent_of(largest) : -1000;
    return power_of_two(exponent < -1000 ? 1000 : -exponent);
}

typedef struct {
    f64v v[LANE_VECTORS];
} wide_f64;

INLINE wide_f64 wide_of(double a)
{
    wide_f64 w;
    EACH(i, LANE_VECTORS) w.v[i] = splat_f64(a);
    return w;
}

/* the first `count` lanes, the others zero */
INLINE wide_f64 first_lanes(wide_f64 w, ptrdiff_t count)
{
    if (count >= LANES_F64) return w;
    EACH(i, LANE_VECTORS) {
        const ptrdiff_t to = count - i * VL_F64;
        w.v[i] = only_f64(w.v[i], 0, to < 0 ? 0 : to < VL_F64 ? to : VL_F64);
    }
    return w;
}

/* LANES_F64 numbers of a storage type, from p on */
INLINE wide_f64 wide_at_f64(const double *p)
{
    wide_f64 w;
    EACH(i, LANE_VECTORS) w.v[i] = load_f64(p + i * VL_F64);
    return w;
}
INLINE wide_f64 wide_at_f32(const float *p)
{
    wide_f64 w;
    EACH(i, LANE_VECTORS) w.v[i] = load_widened(p + i * VL_F64);
    return w;
}
#define WIDE_AT(type)                                                                                                  \
    INLINE wide_f64 wide_at_##type(const uint16_t *p)                                                                  \
    {                                                                                                                  \
        wide_f64 w;                                                                                                    \
        EACH(i, LANE_VECTORS)                                                                                          \
            if (i % 2 == 0) {                                                                                          \
                const f32v two = load_##type(p + i * VL_F64);                                                          \
                w.v[i] = widen_lo(two);                                                                                \
                w.v[i + 1] = widen_hi(two);                                                                            \
            }                                                                                                          \
        return w;                                                                                                      \
    }
WIDE_AT(f16)
WIDE_AT(bf16)
#undef WIDE_AT

/* the same stored: rounded to the compute type, and then to the storage type */
INLINE void put_wide_f64(double *to, wide_f64 w)
{
    EACH(i, LANE_VECTORS) store_f64(to + i * VL_F64, w.v[i]);
}
#define PUT_WIDE(type, storage)                                                                                        \
    INLINE void put_wide_##type(storage *to, wide_f64 w)                                                               \
    {                                                                                                                  \
        EACH(i, LANE_VECTORS)                                                                                          \
            if (i % 2 == 0) store_##type(to + i * VL_F64, narrow(w.v[i], w.v[i + 1]));                                 \
    }
PUT_WIDE(f32, float)
PUT_WIDE(f16, uint16_t)
PUT_WIDE(bf16, uint16_t)
#undef PUT_WIDE

/* element i of p, float32 or float64 */
INLINE double element(cnorm_dtype dtype, const void *p, ptrdiff_t i)
{
    return dtype == CNORM_F64 ? ((const double *)p)[i] : (double)((const float *)p)[i];
}
INLINE double param_or(cnorm_dtype dtype, const void *p, ptrdiff_t i, double neutral)
{
    return p ? element(dtype, p, i) : neutral;
}
INLINE void set_element(cnorm_dtype dtype, void *p, ptrdiff_t i, double to)
{
    if (dtype == CNORM_F64) ((double *)p)[i] = to;
    else ((float *)p)[i] = (float)to;
}

/* Statistics of one row or channel: x scale = origin + delta + xhat / rstd, with a power of two as scale. rstd is in
 * units of 1/(x scale), inv_std_dev = rstd scale in units of 1/x. scale is 1 where x is not float64. */
typedef struct {
    double scale, origin, delta, rstd, inv_std_dev;
} f64_stats;
_Static_assert(sizeof(f64_stats) == F64_STATS_BYTES, "batch_scratch.h sizes arrays of it");

/* (6) of one row or channel: dx = ((g - G) - xhat H) rstd factor^2 last_factor. g = dy gain, G, H and rstd are scaled
 * by powers of two. Three factors undo that, because one power of two, or a partial product, could overflow although dx
 * does not. */
typedef struct {
    double G, H, rstd, factor, last_factor;
} f64_gradient;

/* the same of a row or channel in each lane */
typedef struct {
    wide_f64 scale, origin, delta, rstd;
} wide_stats;
typedef struct {
    wide_f64 G, H, rstd, factor, last_factor;
} wide_gradient;

/* Lane i of to[k] = number k of the i-th of `count` structs of five numbers; lanes from `count` on are as the last */
INLINE void each_in_lanes(const double *from, ptrdiff_t count, int numbers, wide_f64 *to)
{
    for (int k = 0; k < numbers; ++k) {
        double lanes[LANES_F64];
        to[k] = wide_of(from[k]);
        if (count == 1) continue;
        for (ptrdiff_t i = 0; i < LANES_F64; ++i) lanes[i] = from[5 * (i < count ? i : count - 1) + k];
        memcpy(&to[k], lanes, sizeof lanes);
    }
}
INLINE wide_stats wide_stats_of(const f64_stats *e, ptrdiff_t count)
{
    wide_stats w;
    each_in_lanes(&e->scale, count, 4, &w.scale);
    return w;
}
INLINE wide_gradient wide_gradient_of(const f64_gradient *d, ptrdiff_t count)
{
    wide_gradient w;
    each_in_lanes(&d->G, count, 5, &w.G);
    return w;
}

/* f64_gradient of a row or channel whose g is in units of 2^-power */
INLINE f64_gradient f64_gradient_of(const f64_stats *e, double G, double H, int power)
{
    const double inverse = e->rstd == 0 ? e->inv_std_dev : e->rstd;
    const int of_rstd = inverse > 0 && inverse < (double)INFINITY ? exponent_of(inverse) : 0;
    power += of_rstd + (e->rstd == 0 ? 0 : exponent_of(e->scale));
    return (f64_gradient){G, H, inverse * power_of_two(-of_rstd), power_of_two(power / 3),
                          power_of_two(power - power / 3 * 2)};
}
