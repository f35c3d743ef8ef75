/* fma_f32 of src/simd/, compiled for the baseline, on random triples: against exact integers, and on x86-64, where the
 * baseline emulates it, against the processor's instruction. Argument: the number of vectors of each kind of triple. */
#include "check.h"

#include "simd/vector.h"

typedef struct triple { float a, b, c; } triple;

static float of_bits(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static uint32_t bits_of(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

/* ---- exact: (-1)^negative magnitude 2^exponent; `magnitude` has at most 48 bits */

typedef struct number { int negative, exponent; uint64_t magnitude; } number;
typedef struct wide { uint64_t high, low; } wide;

static number number_of(float value)
{
    const uint32_t bits = bits_of(value), exponent = bits >> 23 & 0xff, fraction = bits & 0x7fffff;
    return (number){(int)(bits >> 31), (int)(exponent ? exponent : 1) - 150, exponent ? fraction | 0x800000 : fraction};
}

/* magnitude 2^(exponent - unit), what is shifted out in the last bit */
static wide aligned(number x, int unit)
{
    const int shift = x.magnitude ? x.exponent - unit : 0; /* at most 64 + 15 */
    if (shift >= 64) return (wide){x.magnitude << (shift - 64), 0};
    if (shift > 0) return (wide){x.magnitude >> (64 - shift), x.magnitude << shift};
    if (shift > -64) return (wide){0, x.magnitude >> -shift | (x.magnitude << 1 << (63 + shift) != 0)};
    return (wide){0, x.magnitude != 0};
}

static float rounded(int negative, int exponent, wide v)
{
    int lost = 0; /* 1: less than half, 2: half, 3: more than half of the last bit */
    if (!v.high && !v.low) return negative ? -0.0f : 0.0f;
    while (v.high || v.low >> 24 || exponent < -149) {
        lost = (v.low & 1) * 2 | (lost != 0);
        v.low = v.low >> 1 | v.high << 63;
        v.high >>= 1;
        ++exponent;
    }
    while (v.low < 1 << 23 && exponent > -149) v.low <<= 1, --exponent; /* then nothing is lost */
    v.low += lost == 3 || (lost == 2 && v.low & 1);
    if (v.low == 1 << 24) v.low >>= 1, ++exponent;
    const uint32_t magnitude = exponent > 104           ? 0x7f800000
                               : v.low < 1 << 23 ? (uint32_t)v.low
                                                 : ((uint32_t)(exponent + 150) << 23) + ((uint32_t)v.low & 0x7fffff);
    return of_bits((uint32_t)negative << 31 | magnitude);
}

static float exact_fma(triple t)
{
    if (!isfinite(t.a) || !isfinite(t.b) || !isfinite(t.c)) {
        const volatile double wide_a = (double)t.a; /* else one instruction on s390x (MDEBR), which qemu 7.2 gets wrong */
        return (float)(wide_a * (double)t.b + (double)t.c);
    }
    const number a = number_of(t.a), b = number_of(t.b), c = number_of(t.c);
    const number p = {a.negative ^ b.negative, a.exponent + b.exponent, a.magnitude * b.magnitude};
    if (!p.magnitude && !c.magnitude) return p.negative && c.negative ? -0.0f : 0.0f;
    /* the larger begins near the top of 128 bits: what the other loses is far below the result's last bit */
    const int above = p.exponent + 24 > c.exponent && p.magnitude ? p.exponent : !c.magnitude ? p.exponent : c.exponent;
    const int unit = above - (above == p.exponent ? 76 : 79);
    const wide x = aligned(p, unit), y = aligned(c, unit);
    if (p.negative == c.negative) {
        const uint64_t low = x.low + y.low;
        return rounded(p.negative, unit, (wide){x.high + y.high + (low < x.low), low});
    }
    const int swap = x.high < y.high || (x.high == y.high && x.low < y.low);
    const wide large = swap ? y : x, small = swap ? x : y;
    const wide d = {large.high - small.high - (large.low < small.low), large.low - small.low};
    return rounded(d.high || d.low ? (swap ? c.negative : p.negative) : 0, unit, d);
}

/* ---- triples */

static float random_float(uint64_t *state, int least, int most) /* with an exponent in this range */
{
    const uint64_t bits = random_bits(state);
    const uint32_t exponent = (uint32_t)(127 + least + (int)((bits >> 32) % (uint64_t)(most - least + 1)));
    return of_bits(((uint32_t)bits & 0x807fffff) | exponent << 23);
}

/* with few bits, so that sums are exact, ties, or a unit beside one */
static float few_bits(uint64_t *state, int least, int most)
{
    const uint32_t kept = 0xffffffffu << (random_bits(state) % 24);
    return of_bits(bits_of(random_float(state, least, most)) & kept);
}

static const uint32_t special[] = {0, 1, 2, 0x7fffff, 0x800000, 0x800001, 0x3f800000, 0x3f800001, 0x3f7fffff, 0x7f7fffff,
                                   0x7f800000, 0x7fc00000, 0x7f000000, 0x34000000, 0x33800000};
enum { SPECIALS = sizeof special / sizeof *special };
static float random_special(uint64_t *state)
{
    const uint64_t bits = random_bits(state);
    return of_bits(special[bits % SPECIALS] | (uint32_t)(bits >> 32 & 0x80000000));
}

static triple any_bits(uint64_t *s)
{
    const uint64_t two = random_bits(s);
    return (triple){of_bits((uint32_t)two), of_bits((uint32_t)(two >> 32)), of_bits((uint32_t)random_bits(s))};
}
static triple ordinary(uint64_t *s)
{
    return (triple){random_float(s, -8, 8), random_float(s, -8, 8), random_float(s, -30, 30)};
}
static triple cancelling(uint64_t *s)
{
    const float a = random_float(s, -70, 60), b = random_float(s, -70, 60);
    return (triple){a, b, of_bits(bits_of(-a * b) + (uint32_t)(random_bits(s) % 5) - 2)};
}
static triple exact_or_tie(uint64_t *s)
{
    return (triple){few_bits(s, -20, 0), few_bits(s, -20, 0), few_bits(s, -30, 20)};
}
/* a b is half of c's last bit, up to 2^-46 of it: what is left of a tie once the sum is rounded to double */
static triple near_ties(uint64_t *s)
{
    const uint64_t bits = random_bits(s);
    const int exponent = (int)(bits % 254) - 150, least = exponent + 22, most = exponent + 26;
    const float c = random_float(s, least < -127 ? -127 : least > 127 ? 127 : least, most > 127 ? 127 : most);
    const float a = 1 + (float)(bits >> 32 & 3) * 0x1p-23f, b = 1 - (float)(bits >> 40 & 3) * 0x1p-23f;
    return (triple){ldexpf(a, exponent / 2) * (bits >> 50 & 1 ? 1 : -1), ldexpf(b, exponent - exponent / 2), c};
}
static triple near_subnormal(uint64_t *s)
{
    return (triple){few_bits(s, -80, -60), few_bits(s, -80, -60), few_bits(s, -127, -100)};
}
static triple near_overflow(uint64_t *s)
{
    return (triple){few_bits(s, 60, 67), few_bits(s, 57, 63), few_bits(s, 120, 127)};
}
static triple specials(uint64_t *s) { return (triple){random_special(s), random_special(s), random_special(s)}; }

static const struct { const char *name; triple (*make)(uint64_t *); } kinds[] = {
    {"any bits", any_bits}, {"ordinary", ordinary}, {"cancelling", cancelling}, {"exact or tie", exact_or_tie},
    {"near ties", near_ties},
    {"near subnormal", near_subnormal}, {"near overflow", near_overflow}, {"special", specials}};

/* ---- */

#if defined(__x86_64__)
__attribute__((target("fma"))) static float by_instruction(triple t) { return __builtin_fmaf(t.a, t.b, t.c); }
static int has_instruction(void) { return __builtin_cpu_supports("fma"); }
#else
static float by_instruction(triple t) { return exact_fma(t); }
static int has_instruction(void) { return 0; }
#endif

static int same(float a, float b) { return bits_of(a) == bits_of(b) || (isnan(a) && isnan(b)); }

int main(int argc, char **argv)
{
    const long vectors = argc > 1 ? atol(argv[1]) : 50000;
    uint64_t state = 2026;
    for (size_t kind = 0; kind < sizeof kinds / sizeof *kinds; ++kind)
        for (long i = 0; i < vectors; ++i) {
            triple t[VL_F32];
            f32v a, b, c;
            for (int k = 0; k < VL_F32; ++k) t[k] = kinds[kind].make(&state), a[k] = t[k].a, b[k] = t[k].b, c[k] = t[k].c;
            const f32v got = fma_f32(a, b, c);
            for (int k = 0; k < VL_F32; ++k) {
                const float wanted = exact_fma(t[k]);
                CHECK(same(got[k], wanted), "%s: fma(%a, %a, %a) is %a, not %a", kinds[kind].name, (double)t[k].a,
                      (double)t[k].b, (double)t[k].c, (double)got[k], (double)wanted);
                if (has_instruction())
                    CHECK(same(got[k], by_instruction(t[k])), "%s: fma(%a, %a, %a) is %a, the processor's is another",
                          kinds[kind].name, (double)t[k].a, (double)t[k].b, (double)t[k].c, (double)got[k]);
            }
        }
    return check_result();
}
