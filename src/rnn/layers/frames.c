/* A frame of [channels, positions] and its positions as rows, which is a transpose either way. */
#include "frames.h"

#include <string.h>

#include "../../simd/vector.h"

/* to [cols, rows] = from [rows, cols] transposed; strides may be negative */
void cnorm_transpose(ptrdiff_t rows, ptrdiff_t cols, const_rows from, float_rows to)
{
    ptrdiff_t r = 0;
    for (; r + 4 <= rows; r += 4) {
        ptrdiff_t c = 0;
        for (; c + 4 <= cols; c += 4) {
            f32x4 block[4];
            for (int i = 0; i < 4; ++i) memcpy(block + i, from.at + (r + i) * from.stride + c, sizeof *block);
            transpose_4(block);
            for (int i = 0; i < 4; ++i) memcpy(to.at + (c + i) * to.stride + r, block + i, sizeof *block);
        }
        for (; c < cols; ++c)
            for (int i = 0; i < 4; ++i) to.at[c * to.stride + r + i] = from.at[(r + i) * from.stride + c];
    }
    for (; r < rows; ++r)
        for (ptrdiff_t c = 0; c < cols; ++c) to.at[c * to.stride + r] = from.at[r * from.stride + c];
}
