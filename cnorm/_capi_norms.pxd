# Mirror of src/include/cnorm_norms.h; no logic.
from cnorm._capi cimport cnorm_dtype, cnorm_status

cdef extern from "cnorm_norms.h" nogil:
    cnorm_status cnorm_group_norm(cnorm_dtype dtype, ptrdiff_t samples, ptrdiff_t channels, ptrdiff_t space,
                                  ptrdiff_t groups, const void *x, ptrdiff_t x_stride, const void *gain,
                                  const void *bias, double eps, void *y, ptrdiff_t y_stride, void *stats)
    cnorm_status cnorm_group_norm_backward(cnorm_dtype dtype, ptrdiff_t samples, ptrdiff_t channels,
                                           ptrdiff_t space, ptrdiff_t groups, const void *dy, ptrdiff_t dy_stride,
                                           const void *x, ptrdiff_t x_stride, const void *gain, const void *stats,
                                           void *dx, ptrdiff_t dx_stride, void *dgain, void *dbias, void *partials)
    ptrdiff_t cnorm_batch_norm_scratch(cnorm_dtype dtype, ptrdiff_t samples, ptrdiff_t channels, ptrdiff_t space)
    cnorm_status cnorm_batch_norm(cnorm_dtype dtype, ptrdiff_t samples, ptrdiff_t channels, ptrdiff_t space,
                                  const void *x, ptrdiff_t x_stride, const void *gain, const void *bias,
                                  double eps, void *y, ptrdiff_t y_stride, void *stats, double *moments,
                                  void *scratch)
    cnorm_status cnorm_batch_norm_backward(cnorm_dtype dtype, ptrdiff_t samples, ptrdiff_t channels,
                                           ptrdiff_t space, const void *dy, ptrdiff_t dy_stride, const void *x,
                                           ptrdiff_t x_stride, const void *gain, const void *stats, void *dx,
                                           ptrdiff_t dx_stride, void *dgain, void *dbias, void *scratch)
    cnorm_status cnorm_batch_norm_inference(cnorm_dtype dtype, ptrdiff_t samples, ptrdiff_t channels,
                                            ptrdiff_t space, const void *x, ptrdiff_t x_stride, const void *mean,
                                            const void *var, const void *gain, const void *bias, double eps,
                                            void *y, ptrdiff_t y_stride, void *scratch)
    cnorm_status cnorm_batch_norm_inference_backward(cnorm_dtype dtype, ptrdiff_t samples, ptrdiff_t channels,
                                                     ptrdiff_t space, const void *dy, ptrdiff_t dy_stride,
                                                     const void *x, ptrdiff_t x_stride, const void *mean,
                                                     const void *var, const void *gain, double eps, void *dx,
                                                     ptrdiff_t dx_stride, void *dgain, void *dbias, void *scratch)
    cnorm_status cnorm_weight_norm(cnorm_dtype dtype, ptrdiff_t rows, ptrdiff_t n, const void *w,
                                   ptrdiff_t w_stride, const void *gain, void *v, ptrdiff_t v_stride)
    cnorm_status cnorm_weight_norm_backward(cnorm_dtype dtype, ptrdiff_t rows, ptrdiff_t n, const void *dv,
                                            ptrdiff_t dv_stride, const void *w, ptrdiff_t w_stride,
                                            const void *gain, void *dw, ptrdiff_t dw_stride, void *dgain)
    ptrdiff_t cnorm_divisive_norm_scratch(ptrdiff_t n)
    cnorm_status cnorm_divisive_norm(cnorm_dtype dtype, ptrdiff_t rows, ptrdiff_t n, ptrdiff_t mean_radius,
                                     ptrdiff_t radius, const void *x, ptrdiff_t x_stride, const void *gain,
                                     const void *bias, double sigma, void *y, ptrdiff_t y_stride, void *scratch)
    cnorm_status cnorm_divisive_norm_backward(cnorm_dtype dtype, ptrdiff_t rows, ptrdiff_t n,
                                              ptrdiff_t mean_radius, ptrdiff_t radius, const void *dy,
                                              ptrdiff_t dy_stride, const void *x, ptrdiff_t x_stride,
                                              const void *gain, double sigma, void *dx, ptrdiff_t dx_stride,
                                              void *dgain, void *dbias, double *dsigma, void *scratch)
    cnorm_status cnorm_smoothing_gradient(cnorm_dtype dtype, ptrdiff_t rows, ptrdiff_t n, const void *dy,
                                          ptrdiff_t dy_stride, const void *x, ptrdiff_t x_stride, const void *gain,
                                          const void *stats, double s, double *ds)
