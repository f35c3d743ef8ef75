/* Optimisers: one pass over flat arrays. Elements don't depend on each other, so the bits are the same for any vector
 * width. */
#include <math.h>

#include "../float_mode.h"
#include "../simd/vector.h" /* turns off contraction to FMA */
#include "cnorm_train.h"

cnorm_status cnorm_adam_update(const cnorm_adam *adam, ptrdiff_t n, const float *gradient, double scale, float *weight,
                               float *m, float *v)
{
    if (n < 0) return CNORM_ERROR_SIZE;
    if (!adam || !gradient || !weight || !m || !v) return CNORM_ERROR_NULL;
    const float_mode mode = float_mode_enter();
    const float beta1 = (float)adam->beta1, beta2 = (float)adam->beta2, eps = (float)adam->eps, factor = (float)scale;
    const float rest1 = (float)(1.0 - adam->beta1), rest2 = (float)(1.0 - adam->beta2);
    const float rate = (float)(adam->rate / adam->correction1), root = (float)sqrt(adam->correction2);
    float *restrict w = weight, *restrict first = m, *restrict second = v;
    const float *restrict from = gradient;
    for (ptrdiff_t i = 0; i < n; ++i) {
        const float g = from[i] * factor;
        first[i] = beta1 * first[i] + rest1 * g;
        second[i] = beta2 * second[i] + rest2 * (g * g);
        w[i] -= rate * first[i] / (sqrtf(second[i]) / root + eps);
    }
    float_mode_leave(mode);
    return CNORM_OK;
}

cnorm_status cnorm_sgd_update(double rate, double momentum, ptrdiff_t n, const float *gradient, double scale,
                              float *weight, float *velocity)
{
    if (n < 0) return CNORM_ERROR_SIZE;
    if (!gradient || !weight || (!velocity && momentum != 0)) return CNORM_ERROR_NULL;
    const float_mode mode = float_mode_enter();
    const float factor = (float)scale, step = (float)rate, keep = (float)momentum;
    for (ptrdiff_t i = 0; i < n; ++i) {
        float g = gradient[i] * factor;
        if (velocity) velocity[i] = g = keep * velocity[i] + g;
        weight[i] -= step * g;
    }
    float_mode_leave(mode);
    return CNORM_OK;
}

double cnorm_square_sum(ptrdiff_t n, const float *g)
{
    enum { SUMS = 8, BLOCK_ELEMENTS = 4096 };
    const float_mode mode = float_mode_enter();
    double total = 0;
    for (ptrdiff_t start = 0; start < n; start += BLOCK_ELEMENTS) {
        const ptrdiff_t end = n - start < BLOCK_ELEMENTS ? n : start + BLOCK_ELEMENTS;
        double sums[SUMS] = {0};
        for (ptrdiff_t i = start; i < end; ++i) sums[(i - start) % SUMS] += (double)g[i] * (double)g[i];
        total += ((sums[0] + sums[4]) + (sums[2] + sums[6])) + ((sums[1] + sums[5]) + (sums[3] + sums[7]));
    }
    float_mode_leave(mode);
    return total;
}
