/* Frames of [channels, positions], whose product with a matrix is that of their positions. */
#ifndef CNORM_FRAMES_H
#define CNORM_FRAMES_H

#include "../layers.h"

#pragma GCC visibility push(hidden)

void cnorm_transpose(ptrdiff_t rows, ptrdiff_t cols, const_rows from, float_rows to);

#pragma GCC visibility pop

#endif
