/* What the tests of the C library share: a check that counts, exact random numbers, elements of any dtype, the loop
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

/* CHECK(condition, "what was being done, %d", ...) */
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

/* for every instruction set this machine has, plainest first, with that one in use */
#define FOR_EACH_ISA(isa)                                                                                   \
    for (int isa = 0; isa < cnorm_isa_count() && cnorm_isa_use(cnorm_isa_name(isa)) == CNORM_OK; ++isa)

/* ---- memory: zeroed, aligned to CNORM_ALIGN; a test that has no memory stops */

static inline void *allocate(ptrdiff_t bytes)
{
    const size_t room = ((size_t)bytes / CNORM_ALIGN + 1) * CNORM_ALIGN;
    void *p = aligned_alloc(CNORM_ALIGN, room);
    if (!p) abort();
    return memset(p, 0, room);
}

/* ---- random numbers from integers alone: the same on every machine */

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

/* ---- elements of any dtype */

static const cnorm_dtype dtypes[] = {CNORM_F32, CNORM_F64};
static const char *const dtype_names[] = {[CNORM_F32] = "float32", [CNORM_F64] = "float64"};
enum { DTYPES = sizeof dtypes / sizeof *dtypes };

static inline ptrdiff_t size_of(cnorm_dtype dtype) { return dtype == CNORM_F64 ? 8 : 4; }

static inline double get(cnorm_dtype dtype, const void *buffer, ptrdiff_t i)
{
    return dtype == CNORM_F64 ? ((const double *)buffer)[i] : (double)((const float *)buffer)[i];
}

static inline void put(cnorm_dtype dtype, void *buffer, ptrdiff_t i, double value)
{
    if (dtype == CNORM_F64) ((double *)buffer)[i] = value;
    else ((float *)buffer)[i] = (float)value;
}

/* the unit roundoff, and the distance of subnormal numbers */
static inline double roundoff(cnorm_dtype dtype) { return dtype == CNORM_F64 ? 0x1p-53 : 0x1p-24; }
static inline double smallest(cnorm_dtype dtype) { return dtype == CNORM_F64 ? 0x1p-1074 : 0x1p-149; }

/* payload and sign of NaN are not promised: write every one the same way */
static inline void canonicalise(cnorm_dtype dtype, void *buffer, ptrdiff_t count)
{
    const uint64_t nan64 = 0x7ff8000000000000u;
    const uint32_t nan32 = 0x7fc00000u;
    const void *nan = dtype == CNORM_F64 ? (const void *)&nan64 : &nan32;
    for (ptrdiff_t i = 0; i < count; ++i)
        if (isnan(get(dtype, buffer, i))) memcpy((char *)buffer + i * size_of(dtype), nan, (size_t)size_of(dtype));
}

#endif
