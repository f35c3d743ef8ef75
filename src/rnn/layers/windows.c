/* The product of windows with the weights of a convolution: a matrix, as that of a linear layer, or for each channel by
 * itself a sum over the taps (depthwise.inl.h). */
#include "windows.h"

#include <string.h>

#include "../../simd/vector.h" /* turns off contraction to FMA */

const char *cnorm_windows_check(const cnorm_conv *conv)
{
    const ptrdiff_t most = WIDEST;
    if (conv->channels < 1 || conv->channels > most) return "channels";
    if (conv->outputs < 1 || conv->outputs > most) return "outputs";
    if (conv->taps < 1 || conv->taps > most / conv->channels) return "taps";
    if (conv->dilation < 1 || conv->dilation > most) return "dilation";
    if (!between(conv->depthwise, 1)) return "depthwise";
    if (conv->depthwise) return conv->outputs == conv->channels && conv->kernel ? NULL : "kernel";
    const cnorm_matrix *w = &conv->weight;
    return cnorm_usable_matrix(w, 1, conv->outputs, window_floats(conv)) && w->group == 0 ? NULL : "weight";
}

vector_shape cnorm_windows_kernel(const cnorm_conv *conv)
{
    const ptrdiff_t width = padded_units(conv->channels);
    return (vector_shape){conv->taps, conv->channels, conv->depthwise ? conv->taps * width : 0};
}

ptrdiff_t cnorm_windows_scratch(const cnorm_conv *conv, ptrdiff_t rows)
{
    if (conv->depthwise) return 0;
    return rows * packed_rows(&conv->weight) + padded_units(product_scratch_floats(&conv->weight, rows));
}

/* to [n] = a b, or += with `onto` */
static void multiply(ptrdiff_t n, const float *a, const float *b, int onto, float *to)
{
    if (onto)
        for (ptrdiff_t c = 0; c < n; ++c) to[c] += a[c] * b[c];
    else
        for (ptrdiff_t c = 0; c < n; ++c) to[c] = a[c] * b[c];
}

/* y [n, outputs] of n <= CNORM_ROWS windows */
void cnorm_windows_run(const cnorm_kernels *kernels, const cnorm_conv *conv, ptrdiff_t n, const_rows windows,
                       float_rows y, float *scratch)
{
    for (ptrdiff_t s = 0; conv->depthwise && s < n; ++s) {
        const cnorm_tap_rows x = {.x = windows.at + s * windows.stride, .x_stride = conv->channels};
        kernels->depthwise(conv, &x, y.at + s * y.stride);
    }
    if (conv->depthwise) return;
    const cnorm_linear linear = {conv->weight, conv->bias};
    kernels->linear_step(&linear, n, windows.at, windows.stride, y.at, y.stride, scratch);
}

/* ---- backward ------------------------------------------------------------------------------------------------- */

ptrdiff_t cnorm_windows_inputs_floats(const cnorm_conv *conv)
{
    return conv->depthwise ? 0 : CNORM_ROWS * packed_rows(&conv->weight);
}

/* the gradients of n <= CNORM_ROWS windows [n, taps, channels] */
void cnorm_windows_inputs_backward(const cnorm_kernels *kernels, const cnorm_conv *conv, ptrdiff_t n, const_rows dz,
                                   float *windows, float *scratch)
{
    const ptrdiff_t channels = conv->channels, floats = window_floats(conv);
    if (conv->depthwise) {
        for (ptrdiff_t s = 0; s < n; ++s)
            for (ptrdiff_t t = 0; t < conv->taps; ++t)
                multiply(channels, conv->kernel + t * padded_units(channels), dz.at + s * dz.stride, 0,
                         windows + s * floats + t * channels);
        return;
    }
    const ptrdiff_t length = packed_rows(&conv->weight);
    memset(scratch, 0, (size_t)(n * length) * sizeof *scratch);
    for (ptrdiff_t s = 0; s < n; ++s)
        memcpy(scratch + s * length, dz.at + s * dz.stride, (size_t)conv->outputs * sizeof *scratch);
    kernels->products_backward(&conv->weight, n, scratch, length, windows, floats, 0);
}

/* bias [padded outputs], then kernel [taps, padded channels] */
static ptrdiff_t sum_floats(const cnorm_conv *conv)
{
    return padded_units(conv->outputs) + cnorm_windows_kernel(conv).floats;
}

ptrdiff_t cnorm_window_gradient_floats(const cnorm_conv *conv)
{
    return 2 * sum_floats(conv) + (conv->depthwise ? 0 : outer_floats(&conv->weight));
}

window_gradient cnorm_window_gradient_start(const cnorm_kernels *kernels, const cnorm_conv *conv,
                                            const struct cnorm_conv_gradient *to, float *memory)
{
    const ptrdiff_t sums = sum_floats(conv);
    memset(memory, 0, (size_t)(2 * sums) * sizeof *memory);
    return (window_gradient){kernels, conv, to, memory, memory + sums, memory + 2 * sums, 0};
}

/* the next n <= OUTER_ROWS rows, a multiple of SUM_ROWS but for the last ones */
void cnorm_window_gradient_add(window_gradient *gradient, ptrdiff_t n, const float *const *dz, const float *const *x)
{
    const cnorm_conv *conv = gradient->conv;
    const ptrdiff_t channels = conv->channels, bias = padded_units(conv->outputs);
    for (ptrdiff_t s = 0; s < n; ++s) {
        gradient->kernels->add_f32(conv->outputs, gradient->block, dz[s]);
        for (ptrdiff_t t = 0; conv->depthwise && t < conv->taps; ++t)
            multiply(channels, dz[s], x[s] + t * channels, 1, gradient->block + bias + t * padded_units(channels));
        if ((s + 1) % SUM_ROWS == 0 || s + 1 == n)
            cnorm_add_block(gradient->kernels, sum_floats(conv), gradient->total, gradient->block);
    }
    if (!conv->depthwise && gradient->to->weight)
        gradient->kernels->outer_products(&(cnorm_outer){.w = &conv->weight,
                                                         .n = n,
                                                         .dz = dz,
                                                         .x = x,
                                                         .dw = gradient->to->weight,
                                                         .onto = gradient->rows > 0,
                                                         .scratch = gradient->outer});
    gradient->rows += n;
}

void cnorm_window_gradient_end(window_gradient *gradient)
{
    const cnorm_conv *conv = gradient->conv;
    cnorm_copy_gradient(gradient->to->bias, gradient->total, conv->outputs);
    cnorm_copy_gradient(gradient->to->kernel, gradient->total + padded_units(conv->outputs),
                        cnorm_windows_kernel(conv).floats);
}
