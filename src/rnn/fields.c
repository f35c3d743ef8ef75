/* What several kinds of layers share: checks of their fields, and the gradients of these. */
#include <math.h>
#include <string.h>

#include "../int8/backends.h"
#include "../kernels/backward.h"
#include "layers.h"

int cnorm_usable_matrix(const cnorm_matrix *w, ptrdiff_t gates, ptrdiff_t units, ptrdiff_t cols)
{
    return w->panels && w->gates == gates && w->units == units && w->cols == cols && w->group >= 0 &&
           w->group <= gates && cnorm_matrix_bytes(w) > 0 &&
           (w->type != CNORM_WEIGHT_I8 || (w->levels > 0 && w->levels <= CNORM_INT8_LEVELS));
}

int cnorm_usable_eps(float eps) { return eps >= 0 && eps < INFINITY; }

/* the addresses of the next rows, at most OUTER_ROWS; returns their number */
static ptrdiff_t next_rows(tape_rows *rows, const float **to)
{
    ptrdiff_t n = 0;
    while (n < OUTER_ROWS && (rows->left > 0 || rows->count > 0)) {
        if (rows->left == 0) {
            const cnorm_tape *tape = *rows->tapes++;
            rows->at = tape->memory;
            rows->left = tape->steps * tape->batch;
            --rows->count;
        }
        to[n++] = rows->at;
        rows->at += rows->stride;
        --rows->left;
    }
    return n;
}

/* dw [gates * units, cols] = sum over the rows of dz x^T, which lie at these offsets; scratch [outer_floats] */
void cnorm_weight_backward(const cnorm_kernels *kernels, const cnorm_matrix *w, tape_rows rows, ptrdiff_t dz,
                           ptrdiff_t x, float *scratch, float *dw)
{
    const float *dzs[OUTER_ROWS], *xs[OUTER_ROWS];
    if (!dw || !w->panels) return;
    int onto = 0;
    for (ptrdiff_t n; (n = next_rows(&rows, xs)) > 0; onto = 1) {
        for (ptrdiff_t i = 0; i < n; ++i) dzs[i] = xs[i] + dz, xs[i] += x;
        kernels->outer_products(
            &(cnorm_outer){.w = w, .n = n, .dz = dzs, .x = xs, .dw = dw, .onto = onto, .scratch = scratch});
    }
}

/* to [n] += from [n]; then from [n] = 0 */
void cnorm_add_block(const cnorm_kernels *kernels, ptrdiff_t n, float *to, float *from)
{
    kernels->add_f32(n, to, from);
    memset(from, 0, (size_t)n * sizeof *from);
}

/* copies a gradient [n] to the caller's array, if there is one */
void cnorm_copy_gradient(float *to, const float *from, ptrdiff_t n)
{
    if (to) memcpy(to, from, (size_t)n * sizeof *to);
}
