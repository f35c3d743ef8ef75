/* Shared by the C library's tests: a check that counts failures, exact random numbers, elements of any dtype, the loop
 * over instruction sets. A test's main ends with `return check_result();`. */
#ifndef CHECK_H
#define CHECK_H

#include "cnorm_rnn.h"

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int check_failures;

/* CHECK(condition, "the case under test, %d", ...) */
#define CHECK(condition, ...)                                                      \
    do {                                                                           \
        if (!(condition) && ++check_failures <= 20) {                              \
            fprintf(stderr, "%s:%d: not so: %s: ", __FILE__, __LINE__, #condition); \
            fprintf(stderr, __VA_ARGS__);                                          \
            fputc('\n', stderr);                                                   \
        }                                                                          \
    } while (0)

static inline int check_result(void)
{
    if (check_failures) fprintf(stderr, "%d checks failed\n", check_failures);
    return check_failures != 0;
}

/* for every instruction set of this machine, baseline first, with that one selected */
#define FOR_EACH_ISA(isa)                                                                                   \
    for (int isa = 0; isa < cnorm_isa_count() && cnorm_isa_use(cnorm_isa_name(isa)) == CNORM_OK; ++isa)

/* ---- memory: zeroed, aligned to CNORM_ALIGN, freed by release; a test that gets no memory stops. Not aligned_alloc,
 * which Windows lacks: the pointer that malloc returned is stored before the aligned one. */

static inline void *allocate(ptrdiff_t bytes)
{
    char *const raw = malloc((size_t)bytes + 2 * CNORM_ALIGN);
    if (!raw) abort();
    char *const p = raw + 2 * CNORM_ALIGN - (uintptr_t)raw % CNORM_ALIGN;
    memcpy(p - sizeof raw, &raw, sizeof raw);
    return memset(p, 0, (size_t)bytes);
}

static inline void release(void *p)
{
    void *raw;
    memcpy(&raw, (char *)p - sizeof raw, sizeof raw);
    free(raw);
}

/* ---- random numbers from integer arithmetic: the same on every machine */

/* splitmix64 */
static inline uint64_t random_bits(uint64_t *state)
{
    uint64_t z = *state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

/* in [-1, 1), exact in float */
static inline double uniform(uint64_t *state) { return (double)((int64_t)(random_bits(state) >> 40) - (1 << 23)) * 0x1p-23; }

/* bell-shaped, mean 0 and standard deviation 1: the sum of twelve uniform numbers, exact in float */
static inline double bell(uint64_t *state)
{
    int64_t sum = -6 * (1 << 20);
    for (int i = 0; i < 4; ++i) {
        const uint64_t bits = random_bits(state);
        sum += (int64_t)((bits >> 44) + (bits >> 24 & 0xfffff) + (bits >> 4 & 0xfffff));
    }
    return (double)sum * 0x1p-20;
}

/* ---- hashes */

/* FNV-1a, 64 bits, over values of `size` bytes (a power of two), least significant byte first on every machine */
static const uint64_t HASH_START = 0xcbf29ce484222325u;
static inline uint64_t hash_values(uint64_t hash, const void *values, ptrdiff_t count, ptrdiff_t size)
{
    const unsigned char *const p = values;
    const ptrdiff_t reversed = __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__ ? size - 1 : 0;
    for (ptrdiff_t i = 0; i < count * size; ++i) hash = (hash ^ p[i ^ reversed]) * 0x100000001b3u;
    return hash;
}

/* ---- elements of any dtype */

static const cnorm_dtype dtypes[] = {CNORM_F32, CNORM_F64, CNORM_F16, CNORM_BF16};
static const char *const dtype_names[] = {
    [CNORM_F32] = "float32", [CNORM_F64] = "float64", [CNORM_F16] = "float16", [CNORM_BF16] = "bfloat16"};
enum { DTYPES = sizeof dtypes / sizeof *dtypes };
_Static_assert(DTYPES == (int)CNORM_DTYPES, "a new dtype belongs here");

/* Whether the list of kernels has this kernel for this storage type. */
static inline int kernel_takes(const char *kernel, cnorm_dtype dtype)
{
    enum { WHOLE = 1 << CNORM_F32 | 1 << CNORM_F64, HALF = 1 << CNORM_F16 | 1 << CNORM_BF16, ALL = WHOLE | HALF };
    static const struct { const char *name; int dtypes; } kernels[] = {
#define KERNEL(name, call, dtypes) {#name, dtypes},
#define FUNCTION(name, arguments)
#include "kernels/kernels.inc"
    };
    for (size_t i = 0; i < sizeof kernels / sizeof *kernels; ++i)
        if (strcmp(kernels[i].name, kernel) == 0) return kernels[i].dtypes >> dtype & 1;
    return 0;
}

/* float16 and bfloat16 are storage; gain, bias, stats and sums are of the compute type */
static inline cnorm_dtype compute_type(cnorm_dtype dtype) { return dtype == CNORM_F64 ? CNORM_F64 : CNORM_F32; }
static inline ptrdiff_t size_of(cnorm_dtype dtype) { return dtype == CNORM_F64 ? 8 : dtype == CNORM_F32 ? 4 : 2; }

static inline int fraction_bits(cnorm_dtype dtype)
{
    return dtype == CNORM_F64 ? 52 : dtype == CNORM_F32 ? 23 : dtype == CNORM_F16 ? 10 : 7;
}
static inline int exponent_bias(cnorm_dtype dtype) { return dtype == CNORM_F64 ? 1023 : dtype == CNORM_F16 ? 15 : 127; }

/* the unit roundoff, and the spacing of subnormal numbers */
static inline double roundoff(cnorm_dtype dtype) { return ldexp(1, -1 - fraction_bits(dtype)); }
static inline double smallest(cnorm_dtype dtype) { return ldexp(1, 1 - exponent_bias(dtype) - fraction_bits(dtype)); }

/* the 16-bit pattern, round to nearest even: the magnitude as an integer, so that a carry reaches the exponent */
static inline uint16_t half_of(cnorm_dtype dtype, double value)
{
    const int fraction = fraction_bits(dtype), bias = exponent_bias(dtype), infinity = (2 * bias + 1) << fraction;
    const int sign = signbit(value) ? 0x8000 : 0;
    if (isnan(value)) return (uint16_t)(infinity | 1 << (fraction - 1));
    int exponent = value == 0 || isinf(value) ? 1 - bias : ilogb(value);
    if (exponent > bias || isinf(value)) return (uint16_t)(sign | infinity);
    if (exponent < 1 - bias) exponent = 1 - bias;
    const int steps = (int)nearbyint(ldexp(fabs(value), fraction - exponent));
    return (uint16_t)(sign | (((exponent + bias - 1) << fraction) + steps));
}

static inline double half_value(cnorm_dtype dtype, uint16_t bits)
{
    const int fraction = fraction_bits(dtype), bias = exponent_bias(dtype), exponent = (bits & 0x7fff) >> fraction;
    const int steps = bits & ((1 << fraction) - 1), implicit = exponent ? 1 << fraction : 0;
    double value = ldexp(implicit + steps, (exponent ? exponent : 1) - bias - fraction);
    if (exponent == 2 * bias + 1) value = steps ? (double)NAN : (double)INFINITY;
    return bits & 0x8000 ? -value : value;
}

static inline double get(cnorm_dtype dtype, const void *buffer, ptrdiff_t i)
{
    if (dtype == CNORM_F64) return ((const double *)buffer)[i];
    if (dtype == CNORM_F32) return (double)((const float *)buffer)[i];
    return half_value(dtype, ((const uint16_t *)buffer)[i]);
}

static inline void put(cnorm_dtype dtype, void *buffer, ptrdiff_t i, double value)
{
    if (dtype == CNORM_F64) ((double *)buffer)[i] = value;
    else if (dtype == CNORM_F32) ((float *)buffer)[i] = (float)value;
    else ((uint16_t *)buffer)[i] = half_of(dtype, value);
}

/* the lowest bits as an element */
static inline void put_bits(cnorm_dtype dtype, void *buffer, ptrdiff_t i, uint64_t bits)
{
    const uint32_t low = (uint32_t)bits;
    if (dtype == CNORM_F64) memcpy((double *)buffer + i, &bits, sizeof bits);
    else if (dtype == CNORM_F32) memcpy((float *)buffer + i, &low, sizeof low);
    else ((uint16_t *)buffer)[i] = (uint16_t)bits;
}

/* payload and sign of NaN are not promised: replace every NaN by the same one */
static inline void canonicalise(cnorm_dtype dtype, void *buffer, ptrdiff_t count)
{
    if (dtype == CNORM_F64) {
        for (double *p = buffer, *end = p + count; p < end; ++p)
            if (isnan(*p)) memcpy(p, &(uint64_t){0x7ff8000000000000u}, sizeof *p);
    } else if (dtype == CNORM_F32) {
        for (float *p = buffer, *end = p + count; p < end; ++p)
            if (isnan(*p)) memcpy(p, &(uint32_t){0x7fc00000u}, sizeof *p);
    } else {
        const int infinity = (2 * exponent_bias(dtype) + 1) << fraction_bits(dtype);
        for (uint16_t *p = buffer, *end = p + count; p < end; ++p)
            if ((*p & 0x7fff) > infinity) *p = half_of(dtype, (double)NAN);
    }
}

#endif
