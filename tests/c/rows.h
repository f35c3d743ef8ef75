/* Kinds of row that together take every path of the kernels, made without libm: the same on every machine. */
#ifndef ROWS_H
#define ROWS_H

#include "check.h"

typedef enum row_kind {
    MEAN_0, MEAN_1, MEAN_4, MEAN_1E4, MEAN_1E6, OUTLIER_FIRST, OUTLIER_LAST, LARGE, SMALL, LARGE_RAMP, SMALL_RAMP,
    NEAR_OVERFLOW, SUBNORMAL, CONSTANT, ZERO, ONE_NAN, ONE_INFINITY, ANY_BITS, ROW_KINDS,
    FINITE_KINDS = ONE_NAN,
} row_kind;

static const char *const row_names[ROW_KINDS] = {
    "mean 0", "mean 1", "mean 4", "mean 1e4", "mean 1e6", "outlier first", "outlier last", "large", "small",
    "large ramp", "small ramp", "near overflow", "subnormal", "constant", "zero", "one NaN", "one infinity", "any bits",
};

/* fills x [n] with a row of that kind */
static inline void fill_row(row_kind kind, cnorm_dtype dtype, ptrdiff_t n, void *x, uint64_t *state)
{
    static const double larges[] = {0x1p66, 0x1p700, 0x1p10, 0x1p66}, smalls[] = {0x1p-100, 0x1p-830, 0x1p-12, 0x1p-100};
    static const double mosts[] = {0x1.cp127, 0x1.cp1023, 0x1.cp15, 0x1.cp127};
    const double large = larges[dtype], small = smalls[dtype], most = mosts[dtype]; /* the largest float16 is 65504 */
    for (ptrdiff_t i = 0; i < n; ++i) {
        const double z = bell(state) + uniform(state) * 0x1p-20; /* more digits than a float */
        double value = z;
        switch (kind) {
        case MEAN_1: value += 1; break;
        case MEAN_4: value += 4; break;
        case MEAN_1E4: value -= 1e4; break;
        case MEAN_1E6: value += dtype == CNORM_F16 ? 1e3 : 1e6; break;
        case OUTLIER_FIRST: value = i == 0 ? 1e3 : z; break;
        case OUTLIER_LAST: value = i == n - 1 ? -5e4 : z; break;
        case LARGE: value *= large; break;
        case SMALL: value *= small; break;
        case LARGE_RAMP: value = large * (double)(i % 8 + 1); break;
        case SMALL_RAMP: value = small * (double)(i % 8 + 1); break;
        case NEAR_OVERFLOW: value = z < 0 ? -most : most; break;
        case SUBNORMAL: value = (double)(random_bits(state) % 2000) * smallest(dtype); break;
        case CONSTANT: value = 3.3; break;
        case ZERO: value = 0; break;
        case ONE_NAN: value = i == n / 2 ? (double)NAN : z; break;
        case ONE_INFINITY: value = i == n / 3 ? (double)-INFINITY : z; break;
        default: break;
        }
        put(dtype, x, i, value);
        if (kind == ANY_BITS) put_bits(dtype, x, i, random_bits(state));
    }
}

/* gain [n] and bias [n] as training leaves them, of the compute type */
static inline void fill_affine(cnorm_dtype dtype, ptrdiff_t n, void *gain, void *bias, uint64_t *state)
{
    dtype = compute_type(dtype);
    for (ptrdiff_t i = 0; i < n; ++i) {
        put(dtype, gain, i, 1 + 0.25 * bell(state));
        put(dtype, bias, i, 0.5 * bell(state));
    }
}

#endif
