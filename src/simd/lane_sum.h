/* The order of every sum in the contract, which fixes its bits. A vector of sums holds one sum in each lane:
 *
 *     block += term       from zero, at most BLOCK times
 *     sum += block        add_block_f32(count, sum, block)
 *
 * so that rounding errors do not grow with the length of one chain. A sum over an array runs in the LANES virtual lanes
 * of a lane_sum. Every FOLD elements `fold` adds them up by the halving tree, and the result to `total`. */
#ifndef CNORM_LANE_SUM_H
#define CNORM_LANE_SUM_H

#include "vector.h"

enum { BLOCK = 16, FOLD = 8192 };

INLINE void add_block_f32(int count, f32v *sums, const f32v *block)
{
    EACH(i, count) sums[i] += block[i];
}

typedef struct {
    f32v lanes[LANE_VECTORS];
    double total;
} lane_sum;
INLINE void fold(lane_sum *sum)
{
    sum->total += (double)tree_f32(sum->lanes);
    EACH(i, LANE_VECTORS) sum->lanes[i] = splat_f32(0);
}

#endif
