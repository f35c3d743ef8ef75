/* Checks of arguments that api.c and api_norms.c share. */
#ifndef CNORM_CHECKS_H
#define CNORM_CHECKS_H

#include "cnorm.h"

static inline int known_dtype(cnorm_dtype dtype) { return dtype >= CNORM_F32 && dtype < CNORM_DTYPES; }

/* bytes of an element of the storage type, and of the compute type. Without `default`, so that -Werror=switch names a
 * new dtype. */
static inline ptrdiff_t stored_bytes(cnorm_dtype dtype)
{
    switch (dtype) {
    case CNORM_F64: return 8;
    case CNORM_F32: return 4;
    case CNORM_F16:
    case CNORM_BF16: return 2;
    case CNORM_DTYPES: break;
    }
    return 0;
}
static inline ptrdiff_t computed_bytes(cnorm_dtype dtype) { return dtype == CNORM_F64 ? 8 : 4; }

/* the stride that a caller gave for rows of n elements, in elements */
static inline ptrdiff_t stride_of(ptrdiff_t given, ptrdiff_t n)
{
    return given == 0 ? n : given == CNORM_ONE_ROW ? 0 : given;
}

static inline int rows_overlap(ptrdiff_t rows, ptrdiff_t n, ptrdiff_t stride)
{
    return rows > 1 && stride < n && stride > -n;
}

#endif
