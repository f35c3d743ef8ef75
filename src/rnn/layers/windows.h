/* What the two convolutions share: the product of windows [taps, channels] with the weights, and its gradients. */
#ifndef CNORM_WINDOWS_H
#define CNORM_WINDOWS_H

#include "../../kernels/backward.h"
#include "../layers.h"

/* The gradients of weight or kernel, and of bias, over rows in order. Memory: window_gradient_floats. */
typedef struct window_gradient {
    const cnorm_kernels *kernels;
    const cnorm_conv *conv;
    const struct cnorm_conv_gradient *to;
    float *total, *block, *outer; /* sums of bias and kernel; those of SUM_ROWS rows */
    ptrdiff_t rows;               /* so far */
} window_gradient;

#pragma GCC visibility push(hidden)

const char *cnorm_windows_check(const cnorm_conv *conv);
vector_shape cnorm_windows_kernel(const cnorm_conv *conv);
ptrdiff_t cnorm_windows_scratch(const cnorm_conv *conv, ptrdiff_t rows);
void cnorm_windows_run(const cnorm_kernels *kernels, const cnorm_conv *conv, ptrdiff_t n, const_rows windows,
                       float_rows y, float *scratch);
ptrdiff_t cnorm_windows_inputs_floats(const cnorm_conv *conv);
void cnorm_windows_inputs_backward(const cnorm_kernels *kernels, const cnorm_conv *conv, ptrdiff_t n, const_rows dz,
                                   float *windows, float *scratch);
ptrdiff_t cnorm_window_gradient_floats(const cnorm_conv *conv);
window_gradient cnorm_window_gradient_start(const cnorm_kernels *kernels, const cnorm_conv *conv,
                                            const struct cnorm_conv_gradient *to, float *memory);
void cnorm_window_gradient_add(window_gradient *gradient, ptrdiff_t n, const float *const *dz, const float *const *x);
void cnorm_window_gradient_end(window_gradient *gradient);

#pragma GCC visibility pop

static inline ptrdiff_t window_floats(const cnorm_conv *conv) { return conv->taps * conv->channels; }

#endif
