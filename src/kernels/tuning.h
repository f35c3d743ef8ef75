/* Constants that machines demand, and the place of memory in its page. */
#ifndef CNORM_TUNING_H
#define CNORM_TUNING_H

#include "../simd/vector.h"
#include "kernels.h"

/* A path that few rows take. Not marked cold: GCC 12 would take the loops that lead to it for cold, too. */
#define NOINLINE __attribute__((noinline))
#define RARE static __attribute__((noinline))
/* What rows do only where they begin or end in a vector: with masks, in line; else it would make many times the code. */
#if VECTOR_BYTES == 64
#define EDGE INLINE
#else
#define EDGE static NOINLINE
#endif

enum {
    BLOCK = 16,        /* additions into a lane before its sum is added to the lane's total */
    FOLD = 8192,       /* elements after which lane sums are added to a float64 */
    CACHED_BYTES = 8192, /* of the longest row that is kept in the first cache from its sums to its output */
    SHORT_ROW = 512,   /* elements of the longest row for which aligned addresses cost more than they save */
    GROUP = VECTOR_BYTES == 64 ? 2 : 4, /* vectors written at a time, an even number */
    LOADS_FIRST = VECTOR_BYTES == 64, /* of a group summed and one written: 3 % faster, with registers for all of it */
    LONG_ROW = 768,    /* elements of the shortest row that is written while the next is summed */
    LEAD = 16,         /* vectors by which the sums are then ahead: see sweep.inl.h */
    AHEAD_BYTES = 24576, /* of rows, between the one that is streamed and the one fetched meanwhile */
    ALIGN_LOADS = VECTOR_BYTES == 64, /* every unaligned vector crosses a line */
};

/* Bits of `mode`, a constant where functions that take it are called: one body, compiled for each case that pays */
enum {
    CENTRED = 1,     /* layer norm; else RMS norm: no mean, no bias */
    SHIFTED = 2,     /* of what is written or differentiated K is subtracted; else K is 0 there */
    KEPT = 4,        /* a row's d is stored with its sums, and written from there: of sums and of half types */
    BACKWARD = 8,    /* sums of gradients */
    SUM = 16,         /* there may be a residual */
    NONTEMPORAL = 64, /* output is written by non-temporal stores */
    PARAMS = 32,      /* neither gain nor bias is NULL, nor has a NaN but arithmetic's own: vectors are narrowed two at a time */
};

/* A sum of squares in [n Q_MIN, Q_MAX] has neither overflowed nor lost bits to subnormals. */
#define Q_MAX_F32 0x1p120
#define Q_MIN_F32 0x1p-90

/* How far into room what is stored there does not hold up loads from a and b: half a page on from a, unless that is just
 * ahead of b */
INLINE ptrdiff_t offset_away_from(const void *room, const void *a, const void *b)
{
    const uintptr_t far = (uintptr_t)a + PAGE_BYTES / 2, ahead_of_b = (far - (uintptr_t)b) % PAGE_BYTES;
    const uintptr_t to = ahead_of_b < PAGE_BYTES / 4 ? far + PAGE_BYTES / 4 : far;
    return (ptrdiff_t)((to - (uintptr_t)room) % PAGE_BYTES / VECTOR_BYTES * VECTOR_BYTES);
}

/* How far into room, in whole vectors, something begins where p does in its page: a load from it then comes before the store
 * to p that has the same low bits, and all of a page after the one before */
INLINE ptrdiff_t offset_matching(const void *room, const void *p)
{
    return (ptrdiff_t)(((uintptr_t)p - (uintptr_t)room) % PAGE_BYTES / VECTOR_BYTES * VECTOR_BYTES);
}

#endif
