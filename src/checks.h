/* What the entries of api.c and api_norms.c check alike. */
#ifndef CNORM_CHECKS_H
#define CNORM_CHECKS_H

#include "cnorm.h"

/* bytes of an element of the compute type */
static inline ptrdiff_t computed_bytes(cnorm_dtype dtype) { return dtype == CNORM_F64 ? 8 : 4; }

static inline int rows_overlap(ptrdiff_t rows, ptrdiff_t n, ptrdiff_t stride)
{
    return rows > 1 && stride < n && stride > -n;
}

#endif
