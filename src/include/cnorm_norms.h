/* cnorm: norms other than layer and RMS norm. This header is the manual of batch, group, instance, weight and divisive
 * normalisation; the conventions are those of cnorm.h.
 *
 * A volume x [samples, channels, space] has one sample every x_stride elements, and within a sample all elements are
 * contiguous. `space` is the product of the spatial dimensions, 1 for a matrix. gain and bias are [channels] or NULL (1
 * and 0).
 * Instance normalisation is group normalisation with as many groups as channels.
 *
 * Group and batch normalisation take every dtype: x, y, dy and dx are of the dtype; gain, bias, mean, var, stats, dgain
 * and dbias of the compute type. Weight norm, divisive norm and the smoothing gradient take float32 and float64.
 */
#ifndef CNORM_NORMS_H
#define CNORM_NORMS_H

#include "cnorm.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- group normalisation: mean and variance over the channels of a group and their space, sample by sample ----------
 *
 * x, y [samples, channels, space]; stats [samples, groups, 3] or NULL, as in cnorm.h; groups divides channels.
 */
cnorm_status cnorm_group_norm(cnorm_dtype dtype, ptrdiff_t samples, ptrdiff_t channels, ptrdiff_t space,
                              ptrdiff_t groups, const void *x, ptrdiff_t x_stride, const void *gain, const void *bias,
                              double eps, void *y, ptrdiff_t y_stride, void *stats);

/* dy, x, dx [samples, channels, space]; dgain, dbias [channels];
 * partials: scratch of cnorm_backward_partials(dtype, samples, channels) bytes */
cnorm_status cnorm_group_norm_backward(cnorm_dtype dtype, ptrdiff_t samples, ptrdiff_t channels, ptrdiff_t space,
                                       ptrdiff_t groups, const void *dy, ptrdiff_t dy_stride, const void *x,
                                       ptrdiff_t x_stride, const void *gain, const void *stats, void *dx,
                                       ptrdiff_t dx_stride, void *dgain, void *dbias, void *partials);

/* ---- batch normalisation: mean and variance of each channel over all samples and space
 * -------------------------------
 *
 * x, y [samples, channels, space] with samples * space > 1; stats [channels, 3] or NULL, as in cnorm.h;
 * moments: NULL or float64 [2, channels], each channel's mean and (biased) variance, for running averages;
 * scratch: cnorm_batch_norm_scratch(...) bytes, aligned to 8.
 */
ptrdiff_t cnorm_batch_norm_scratch(cnorm_dtype dtype, ptrdiff_t samples, ptrdiff_t channels, ptrdiff_t space);
cnorm_status cnorm_batch_norm(cnorm_dtype dtype, ptrdiff_t samples, ptrdiff_t channels, ptrdiff_t space, const void *x,
                              ptrdiff_t x_stride, const void *gain, const void *bias, double eps, void *y,
                              ptrdiff_t y_stride, void *stats, double *moments, void *scratch);
cnorm_status cnorm_batch_norm_backward(cnorm_dtype dtype, ptrdiff_t samples, ptrdiff_t channels, ptrdiff_t space,
                                       const void *dy, ptrdiff_t dy_stride, const void *x, ptrdiff_t x_stride,
                                       const void *gain, const void *stats, void *dx, ptrdiff_t dx_stride, void *dgain,
                                       void *dbias, void *scratch);

/* with a given mean and variance [channels], as at inference; scratch as above */
cnorm_status cnorm_batch_norm_inference(cnorm_dtype dtype, ptrdiff_t samples, ptrdiff_t channels, ptrdiff_t space,
                                        const void *x, ptrdiff_t x_stride, const void *mean, const void *var,
                                        const void *gain, const void *bias, double eps, void *y, ptrdiff_t y_stride,
                                        void *scratch);
cnorm_status cnorm_batch_norm_inference_backward(cnorm_dtype dtype, ptrdiff_t samples, ptrdiff_t channels,
                                                 ptrdiff_t space, const void *dy, ptrdiff_t dy_stride, const void *x,
                                                 ptrdiff_t x_stride, const void *mean, const void *var,
                                                 const void *gain, double eps, void *dx, ptrdiff_t dx_stride,
                                                 void *dgain, void *dbias, void *scratch);

/* ---- weight normalisation: v = g w / |w|, row by row
 * -----------------------------------------------------------------
 *
 * w, v, dv, dw [rows, n]; gain, dgain [rows]. A row of zeros stays zeros and gets no gradient.
 */
cnorm_status cnorm_weight_norm(cnorm_dtype dtype, ptrdiff_t rows, ptrdiff_t n, const void *w, ptrdiff_t w_stride,
                               const void *gain, void *v, ptrdiff_t v_stride);
cnorm_status cnorm_weight_norm_backward(cnorm_dtype dtype, ptrdiff_t rows, ptrdiff_t n, const void *dv,
                                        ptrdiff_t dv_stride, const void *w, ptrdiff_t w_stride, const void *gain,
                                        void *dw, ptrdiff_t dw_stride, void *dgain);

/* ---- divisive normalisation: v = x - mean over a field, y = v / sqrt(sigma^2 + mean of v^2 over a field) * gain +
 * bias
 *
 * x, y, dy, dx [rows, n]; gain, bias, dgain, dbias [n]; the field of element i is the elements
 * i - radius to i + radius of its row, cut off at its ends: with mean_radius for the first mean, radius for the second.
 * sigma >= 0 is rounded to the dtype; dsigma is one number.
 * scratch: cnorm_divisive_norm_scratch(n) bytes, aligned to 8.
 */
ptrdiff_t cnorm_divisive_norm_scratch(ptrdiff_t n);
cnorm_status cnorm_divisive_norm(cnorm_dtype dtype, ptrdiff_t rows, ptrdiff_t n, ptrdiff_t mean_radius,
                                 ptrdiff_t radius, const void *x, ptrdiff_t x_stride, const void *gain,
                                 const void *bias, double sigma, void *y, ptrdiff_t y_stride, void *scratch);
cnorm_status cnorm_divisive_norm_backward(cnorm_dtype dtype, ptrdiff_t rows, ptrdiff_t n, ptrdiff_t mean_radius,
                                          ptrdiff_t radius, const void *dy, ptrdiff_t dy_stride, const void *x,
                                          ptrdiff_t x_stride, const void *gain, double sigma, void *dx,
                                          ptrdiff_t dx_stride, void *dgain, void *dbias, double *dsigma, void *scratch);

/* ---- the smoothing term of layer normalisation
 * ------------------------------------------------------------------------
 *
 * With eps = s^2, *ds = the gradient with respect to s: -s times the sum over rows of rstd^2 sum dy gain xhat;
 * 0 if s = 0.
 * dy, x [rows, n]; gain [n] or NULL; stats [rows, 3] of the forward call.
 */
cnorm_status cnorm_smoothing_gradient(cnorm_dtype dtype, ptrdiff_t rows, ptrdiff_t n, const void *dy,
                                      ptrdiff_t dy_stride, const void *x, ptrdiff_t x_stride, const void *gain,
                                      const void *stats, double s, double *ds);

#ifdef __cplusplus
}
#endif
#endif
