/* A frame of [channels, positions] and its positions as rows, which is a transpose either way. */
#include "frames.h"

#include <string.h>

#include "../../simd/vector.h"

/* n floats, 1 to 4, and zeros */
INLINE f32x4 load_part(const float *p, int n)
{
    f32x4 v = {p[0]};
    double pair;
    if (n > 1) memcpy(&pair, p, sizeof pair), v = (f32x4)(f64x2){pair};
    if (n == 3) v = __builtin_shufflevector(v, (f32x4){p[2]}, 0, 1, 4, 5);
    if (n == 4) memcpy(&v, p, sizeof v);
    return v;
}
INLINE void store_part(float *p, int n, f32x4 v)
{
    const double pair = ((f64x2)v)[0];
    if (n == 1) p[0] = v[0];
    else if (n == 4) memcpy(p, &v, sizeof v);
    else memcpy(p, &pair, sizeof pair);
    if (n == 3) p[2] = v[2];
}

/* Blocks of [m, k], constants. The second of a row or column may overlap the first, so that all are whole. */
INLINE void blocks(ptrdiff_t rows, ptrdiff_t cols, const_rows from, float_rows to, int m, int k)
{
    for (ptrdiff_t r = 0, down = (rows - 1) % m + 1; r < rows; r += down, down = m) {
        const float *x = from.at + r * from.stride;
        float *y = to.at + r;
        for (ptrdiff_t c = 0, right = (cols - 1) % k + 1; c < cols; c += right, right = k) {
            f32x4 block[4] = {{0}};
            EACH(i, m) block[i] = load_part(x + i * from.stride, k);
            transpose_4(block);
            EACH(i, k) store_part(y + i * to.stride, m, block[i]);
            x += right;
            y += right * to.stride;
        }
    }
}

/* to [cols, rows] = from [rows, cols] transposed; strides may be negative */
void cnorm_transpose(ptrdiff_t rows, ptrdiff_t cols, const_rows from, float_rows to)
{
    if (rows >= 4 && cols >= 4) blocks(rows, cols, from, to, 4, 4);
    else if (rows >= 4 && cols == 3) blocks(rows, cols, from, to, 4, 3);
    else if (rows >= 4 && cols == 2) blocks(rows, cols, from, to, 4, 2);
    else if (rows >= 4) blocks(rows, cols, from, to, 4, 1);
    else if (cols >= 4 && rows == 3) blocks(rows, cols, from, to, 3, 4);
    else if (cols >= 4 && rows == 2) blocks(rows, cols, from, to, 2, 4);
    else if (cols >= 4) blocks(rows, cols, from, to, 1, 4);
    else blocks(rows, cols, from, to, 1, 1);
}
