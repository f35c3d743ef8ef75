/* Frames of [channels, positions], whose product with a matrix is that of their positions. */
#ifndef CNORM_FRAMES_H
#define CNORM_FRAMES_H

#include "../layers.h"

#pragma GCC visibility push(hidden)

void cnorm_transpose(ptrdiff_t rows, ptrdiff_t cols, const_rows from, float_rows to);

#pragma GCC visibility pop

/* Whether frame_product or frame_depthwise take the frames that are not tiny. A larger stride would be mostly padding;
 * wider products without groups are faster with the outputs in lanes: 64 -> 64, 3 taps, at 33 positions took 1.3 times
 * as long (Cascade Lake, AVX2 and AVX-512, 2026-11-28), unless windows are short and there are many places: 1 -> 64, 8
 * taps, at 160 places took 0.3 of the time, at 10 places longer (Zen 5, AVX-512, 2026-11-29). */
static inline int positions_in_lanes(const cnorm_conv *conv)
{
    const int is_short = conv->channels * conv->taps <= CNORM_GATE_PAD;
    if (conv->stride > 8) return 0;
    if (conv->depthwise) return 1;
    if (conv->weight.type != CNORM_WEIGHT_F32) return 0;
    return conv->weight.units <= CNORM_GATE_PAD || conv->groups > 1 ||
           (is_short && conv->results >= CNORM_GATE_PAD * conv->outputs);
}
static inline int usable_groups(const cnorm_conv *conv)
{
    if (conv->groups <= 1) return conv->groups >= 0;
    return conv->channels % conv->groups == 0 && conv->outputs % conv->groups == 0;
}

/* n / stride, n >= 0: a division takes as long as tens of sums */
static inline ptrdiff_t strides_in(const cnorm_conv *conv, ptrdiff_t n)
{
    return conv->stride == 1 ? n : conv->stride == 2 ? n / 2 : n / conv->stride;
}

#endif
