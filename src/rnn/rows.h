/* Rows of floats, and the larger of two sizes. */
#ifndef CNORM_ROWS_H
#define CNORM_ROWS_H

#include <stddef.h>
#include <stdint.h>

/* the first row, and the floats from one to the next */
typedef struct float_rows {
    float *at;
    ptrdiff_t stride;
} float_rows;
typedef struct const_rows {
    const float *at;
    ptrdiff_t stride;
} const_rows;

/* whether no float of a [n] is one of b [m] */
static inline int apart(const float *a, ptrdiff_t n, const float *b, ptrdiff_t m)
{
    return (uintptr_t)(a + n) <= (uintptr_t)b || (uintptr_t)(b + m) <= (uintptr_t)a;
}

static inline ptrdiff_t larger(ptrdiff_t a, ptrdiff_t b) { return a > b ? a : b; }

#endif
