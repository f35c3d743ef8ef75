/* Tuning constants, the bits of `mode`, and the placement of scratch in a page. */
#ifndef CNORM_TUNING_H
#define CNORM_TUNING_H

#include "../simd/lane_sum.h"
#include "kernels.h"

/* RARE: a path that few rows take. Not __attribute__((cold)): GCC 12 would treat the loops that call it as cold,
 * too. */
#define RARE static NOINLINE
/* EDGE: functions for the partial vector that a row begins or ends in. Called, they keep the members of their
 * arguments out of registers in the loops beside them: with AVX2 32x256 float32 took 1.9 instead of 1.4 us (Zen 4,
 * 2026-11-23). The baseline calls them, for its size. */
#if VECTOR_BYTES >= 32
#define EDGE INLINE
#else
#define EDGE static NOINLINE
#endif

enum {
    CACHED_BYTES = 8192, /* of T: longest row that is expected to stay in L1 from its sums to its output */
    SHORT_ROW = 512,     /* elements of the longest row for which aligned loads cost more than they save */
    UNROLL = VECTOR_BYTES == 64 ? 2 : 4, /* vectors normalised and stored at a time; even */
    ROWS_AT_ONCE = 16,                   /* groups whose statistics are computed together at most */
    LONG_ROW = 768,      /* elements of the shortest row of float32 that is written while the next row is summed */
    LEAD = 16,           /* vectors of a row that are summed before the writer begins: see sum_block */
    AHEAD_BYTES = 24576, /* prefetch distance where output is written by non-temporal stores */
    ALIGN_LOADS = VECTOR_BYTES == 64, /* every unaligned 64-byte load crosses a cache line */
};

/* Products of 64 vectors (matmul.inl.h), 64->256 to 512->2048, in parts of the peak of FMA, with AVX2 and AVX-512: on
 * Cascade Lake 77 to 83 and 71 to 80 % (2026-11-28), on Zen 5 92 to 97 and 87 to 91 % (2026-11-29). NEON was not
 * measured. Where a multiply-add is emulated, wider tiles are only larger: 9 kB of the wheel.
 * From WIDENED_FROM vectors on, a strip of float16 is widened once for all: 0.80 to 0.96 of the time of 64 to 8 vectors
 * with AVX2, but 1.0 to 1.5 of fewer; with AVX-512 1.0 to 1.7; without F16C 0.78 to 0.94 (Zen 5, 2026-11-30). */
#if VECTOR_BYTES == 64 || defined(__aarch64__)
enum { REGISTERS = 32, TILE_VECTORS = 4, TILE_STREAMS = 4, WIDENED_FROM = CNORM_ROWS + 1, BLOCKS_AT_ONCE = 2 };
#elif VECTOR_BYTES == 32
enum { REGISTERS = 16, TILE_VECTORS = 4, TILE_STREAMS = 3, WIDENED_FROM = 8, BLOCKS_AT_ONCE = 2 };
#elif defined(EMULATED_FMA)
enum { REGISTERS = 16, TILE_VECTORS = 1, TILE_STREAMS = 4, WIDENED_FROM = 2, BLOCKS_AT_ONCE = 1 };
#else
enum { REGISTERS = 16, TILE_VECTORS = 2, TILE_STREAMS = 4, WIDENED_FROM = 8, BLOCKS_AT_ONCE = 2 };
#endif
enum {
    TILE_INPUTS = 16384 / (TILE_VECTORS * VECTOR_BYTES), /* weights of half an L1 */
    INPUTS_AT_ONCE = BLOCKS_AT_ONCE == 1 ? 1 : 4,        /* of add_products */
};

/* Bits of `mode`, a compile-time constant at every call, for which the compiler specialises the body. NT_STORES, 8, is
 * one, too. */
enum {
    CENTRED = 1,   /* layer norm; otherwise RMS norm: no mean, no bias */
    SUM = 2,       /* x + residual is normalised */
    KEPT = 4,      /* d = x - K is stored while it is summed, and normalised from there */
    PARAMS = 16,   /* gain and bias are arrays [n]; otherwise either may be UNROLL neutral vectors (gain_mask). NaNs of
                      half types are the default NaN, which store_two needs */
    BACKWARD = 32, /* the sweep sums gradients; otherwise deviations */
    SHIFTED = 64,  /* backward: K is subtracted from x; otherwise it is 0 */
    LATE_GRADS = 128 /* backward: dgain and dbias are added to while dx is written, not while sums are taken */
};

/* A sum of squares in [n Q_MIN, Q_MAX] has neither overflowed nor lost bits to subnormals. */
#define Q_MAX_F32 0x1p120
#define Q_MIN_F32 0x1p-90

/* the two sums of sweep.inl.h; returned in registers */
typedef struct {
    double a, b;
} row_sums;

/* Avoids 4K aliasing between stores to buffer and loads from a and b: the offset in bytes, in whole vectors, at which
 * buffer is half a page above a modulo PAGE_BYTES, or three quarters where half would be less than a quarter page above
 * b. */
INLINE ptrdiff_t offset_away_from(const void *buffer, const void *a, const void *b)
{
    const uintptr_t far = (uintptr_t)a + PAGE_BYTES / 2, ahead_of_b = (far - (uintptr_t)b) % PAGE_BYTES;
    const uintptr_t to = ahead_of_b < PAGE_BYTES / 4 ? far + PAGE_BYTES / 4 : far;
    return (ptrdiff_t)((to - (uintptr_t)buffer) % PAGE_BYTES / VECTOR_BYTES * VECTOR_BYTES);
}

/* The offset in bytes, in whole vectors, at which buffer has p's page offset. Avoids 4K aliasing where a loop loads
 * from there and stores to p: a load precedes the store with the same low 12 bits, and follows the previous such
 * store by a page. */
INLINE ptrdiff_t offset_matching(const void *buffer, const void *p)
{
    return (ptrdiff_t)(((uintptr_t)p - (uintptr_t)buffer) % PAGE_BYTES / VECTOR_BYTES * VECTOR_BYTES);
}

/* Whether p and q lie within an eighth page of each other modulo PAGE_BYTES */
INLINE int near_in_page(const void *p, const void *q)
{
    return ((uintptr_t)p - (uintptr_t)q + PAGE_BYTES / 8) % PAGE_BYTES < PAGE_BYTES / 4;
}

#endif
