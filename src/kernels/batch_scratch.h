/* Size and layout of the scratch of batch norm. */
#ifndef CNORM_BATCH_SCRATCH_H
#define CNORM_BATCH_SCRATCH_H

#include <stddef.h>
#include <stdint.h>

#include "layout.h"

enum {
    LINE_BYTES = 64,      /* of the cache */
    PAGE_BYTES = 4096,    /* of memory */
    F64_STATS_BYTES = 40, /* of f64_stats, wide.inl.h */
    APART_BYTES = 256,    /* between arrays of a number for each channel */
};

/* The scratch of batch norm, T of `item` bytes; with memory NULL only its size. Against 4K aliasing, arrays of T
 * begin at the page offset of `out`, to a multiple of `item`: a store with the same low 12 bits as a load is then a
 * page behind it. They lie APART_BYTES apart, as ten of 1024 float32 would compete for the same sets of L1. */
typedef struct cnorm_batch_arrays {
    double *sum, *sum2;    /* [channels] */
    void *in_f64;          /* [channels] of f64_stats */
    void *of_channels[10]; /* each [channels] of T, beginning at cache lines of their own */
    int *state;            /* [channels] */
    ptrdiff_t bytes;
} cnorm_batch_arrays;

static inline cnorm_batch_arrays batch_arrays(void *memory, ptrdiff_t item, ptrdiff_t channels, const void *out)
{
    layout s = {memory, 0};
    cnorm_batch_arrays a;
    a.sum = layout_take(&s, channels * 8);
    a.sum2 = layout_take(&s, channels * 8);
    a.in_f64 = layout_take(&s, channels * F64_STATS_BYTES);
    const uintptr_t ahead = (uintptr_t)out - (uintptr_t)s.memory - (uintptr_t)s.used;
    s.used += memory ? (ptrdiff_t)(ahead % PAGE_BYTES) / item * item : PAGE_BYTES;
    for (int i = 0; i < 10; ++i)
        a.of_channels[i] = layout_take(&s, (channels * item + LINE_BYTES - 1) / LINE_BYTES * LINE_BYTES + APART_BYTES);
    a.state = layout_take(&s, channels * (ptrdiff_t)sizeof(int));
    a.bytes = (s.used + 7) / 8 * 8; /* whole float64, so that the next array is aligned */
    return a;
}

/* The scratch of batch norm of half types: a strip of channels in float32, then the float32 kernel's scratch */
enum { CNORM_STRIP = 64 }; /* channels of a matrix's strip: two cache lines of a row of half type */
typedef struct cnorm_batch_strip {
    ptrdiff_t channels; /* in a strip; of a volume, space > 1, one */
    float *x, *dy;      /* [samples, channels, space]; y and dx are written in their places */
    void *scratch;
    ptrdiff_t bytes;
} cnorm_batch_strip;

static inline cnorm_batch_strip batch_strip(void *memory, ptrdiff_t samples, ptrdiff_t channels, ptrdiff_t space)
{
    layout s = {memory, 0};
    cnorm_batch_strip strip = {.channels = space > 1 ? 1 : channels < CNORM_STRIP ? channels : CNORM_STRIP};
    const ptrdiff_t N = samples * space, item = (ptrdiff_t)sizeof(float);
    strip.x = layout_take(&s, N * strip.channels * item);
    strip.dy = layout_take(&s, N * strip.channels * item);
    strip.scratch = layout_take(&s, batch_arrays(NULL, item, strip.channels, NULL).bytes);
    strip.bytes = s.used;
    return strip;
}

#endif
