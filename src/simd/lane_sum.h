/* The order of every sum in the contract, which fixes its bits. A vector of sums holds one sum in each lane:
 *
 *     block of zeros      clear_*(count, block)               `count` vectors
 *     block += term       at most BLOCK times
 *     sum += block        add_block_*(count, sum, block)
 *
 * so that rounding errors do not grow with the length of one chain. A sum over an array runs in the LANES virtual lanes
 * of a lane_sum. Every FOLD elements fold_* adds them up by the halving tree, and the result to `total`. */
#ifndef CNORM_LANE_SUM_H
#define CNORM_LANE_SUM_H

#include "vector.h"

enum { BLOCK = 16, FOLD = 8192 };

#define LANE_SUM(type, V)                                                                                              \
    typedef struct {                                                                                                   \
        V lanes[LANE_VECTORS];                                                                                         \
        double total;                                                                                                  \
    } lane_sum_##type;                                                                                                 \
    INLINE void clear_##type(int count, V *sums)                                                                       \
    {                                                                                                                  \
        _Pragma("GCC unroll 32") for (int i = 0; i < count; ++i) sums[i] = splat_##type(0);                            \
    }                                                                                                                  \
    INLINE void add_block_##type(int count, V *sums, const V *block)                                                   \
    {                                                                                                                  \
        _Pragma("GCC unroll 32") for (int i = 0; i < count; ++i) sums[i] += block[i];                                  \
    }                                                                                                                  \
    INLINE void fold_##type(lane_sum_##type *sum)                                                                      \
    {                                                                                                                  \
        sum->total += (double)tree_##type(sum->lanes);                                                                 \
        clear_##type(LANE_VECTORS, sum->lanes);                                                                        \
    }
LANE_SUM(f32, f32v)
LANE_SUM(f64, f64v)
#undef LANE_SUM

#endif
