/* The entries of cnorm_norms.h: each checks its arguments, then makes one call through the table of kernels. */
#include "checks.h"
#include "cpu.h"
#include "dispatch.h"
#include "float_mode.h"

#include <math.h>
#include <stdint.h>

/* whether all sizes in bytes fit ptrdiff_t: no function needs 160 bytes per element; batch norm needs 18 float64, and a
 * page */
static int countable(ptrdiff_t a, ptrdiff_t b, ptrdiff_t c)
{
    return a >= 0 && b > 0 && c > 0 && b <= PTRDIFF_MAX / 160 / c && (a == 0 || b * c <= PTRDIFF_MAX / 160 / a);
}

static double rounded(cnorm_dtype dtype, double a) { return dtype == CNORM_F64 ? a : (double)(float)a; }
static int usable(cnorm_dtype dtype, double a) { return a >= 0 && !isinf(rounded(dtype, a)); }

/* The first lines of every entry: `table` becomes the active table, which has this kernel for this dtype. */
#define ENTER(kernel, ok)                                                                                              \
    const cnorm_kernels *table = cnorm_active();                                                                       \
    if (!table) return CNORM_ERROR_ISA;                                                                                \
    if (!known_dtype(dtype) || !table->kernel[dtype]) return CNORM_ERROR_DTYPE;                                        \
    if (!(ok)) return CNORM_ERROR_SIZE
/* The last lines of every entry: runs the statement in the default floating-point mode. */
#define RUN(statement)                                                                                                 \
    const float_mode mode = float_mode_enter();                                                                        \
    statement;                                                                                                         \
    float_mode_leave(mode);                                                                                            \
    return CNORM_OK

/* ---- group and batch normalisation ------------------------------------------------------------------------------- */

/* Non-temporal stores are faster once the output [samples, n] exceeds the part of the caches that could keep it for its
 * reader, a quarter, if runs are whole cache lines, or so long that the partial lines at their ends cost little. */
static int streaming(cnorm_dtype dtype, ptrdiff_t samples, ptrdiff_t n, ptrdiff_t run, const void *out,
                     ptrdiff_t out_stride)
{
    const ptrdiff_t item = stored_bytes(dtype);
    const int whole_lines = (uintptr_t)out % LINE_BYTES == 0 && run * item % LINE_BYTES == 0;
    return samples * n * item >= cnorm_cpu_cache_bytes() / 4 && out_stride == n &&
           (whole_lines || run * item >= 16 * LINE_BYTES);
}

static cnorm_status forward(void (*kernel)(const cnorm_volume_norm *), cnorm_dtype dtype, cnorm_volume_norm *call)
{
    if (call->samples == 0) return CNORM_OK;
    if (!call->x || !call->y) return CNORM_ERROR_NULL;
    if (!usable(dtype, call->eps)) return CNORM_ERROR_EPS;
    if (rows_overlap(call->samples, call->channels * call->space, call->y_stride)) return CNORM_ERROR_STRIDE;
    const ptrdiff_t run = call->space > 1 ? call->space : call->groups ? call->channels / call->groups : call->channels;
    call->streaming = call->y != call->x &&
                      streaming(dtype, call->samples, call->channels * call->space, run, call->y, call->y_stride);
    RUN(call->eps = rounded(dtype, call->eps); kernel(call));
}

static cnorm_status backward(void (*kernel)(const cnorm_volume_norm_backward *), cnorm_dtype dtype,
                             cnorm_volume_norm_backward *call)
{
    if (!call->dgain || !call->dbias || !call->scratch) return CNORM_ERROR_NULL;
    if (call->samples && (!call->dy || !call->x || !call->dx)) return CNORM_ERROR_NULL;
    if (!usable(dtype, call->eps)) return CNORM_ERROR_EPS;
    if (rows_overlap(call->samples, call->channels * call->space, call->dx_stride)) return CNORM_ERROR_STRIDE;
    RUN(call->eps = rounded(dtype, call->eps); kernel(call));
}

cnorm_status cnorm_group_norm(cnorm_dtype dtype, ptrdiff_t samples, ptrdiff_t channels, ptrdiff_t space,
                              ptrdiff_t groups, const void *x, ptrdiff_t x_stride, const void *gain, const void *bias,
                              double eps, void *y, ptrdiff_t y_stride, void *stats)
{
    ENTER(group_norm, countable(samples, channels, space) && groups > 0 && channels % groups == 0);
    return forward(table->group_norm[dtype], dtype,
                   &(cnorm_volume_norm){samples, channels, space, groups, .x = x, .x_stride = x_stride, .gain = gain,
                                        .bias = bias, .eps = eps, .y = y, .y_stride = y_stride, .stats = stats});
}

cnorm_status cnorm_group_norm_backward(cnorm_dtype dtype, ptrdiff_t samples, ptrdiff_t channels, ptrdiff_t space,
                                       ptrdiff_t groups, const void *dy, ptrdiff_t dy_stride, const void *x,
                                       ptrdiff_t x_stride, const void *gain, const void *stats, void *dx,
                                       ptrdiff_t dx_stride, void *dgain, void *dbias, void *partials)
{
    ENTER(group_norm_backward, countable(samples, channels, space) && groups > 0 && channels % groups == 0);
    if (!dgain || !dbias || (samples && (!stats || !partials))) return CNORM_ERROR_NULL;
    const ptrdiff_t stored = stored_bytes(dtype), item = computed_bytes(dtype);
    const ptrdiff_t run = space > 1 ? space : channels / groups;
    const int stream = dx != dy && dx != x && streaming(dtype, samples, channels * space, run, dx, dx_stride);
    for (ptrdiff_t i = 0; i < samples; i += CNORM_BLOCK_ROWS) {
        char *partial = (char *)partials + i / CNORM_BLOCK_ROWS * 2 * channels * item;
        const cnorm_status status =
            backward(table->group_norm_backward[dtype], dtype,
                     &(cnorm_volume_norm_backward){
                         samples - i < CNORM_BLOCK_ROWS ? samples - i : CNORM_BLOCK_ROWS, channels, space, groups,
                         .dy = (const char *)dy + i * dy_stride * stored, .x = (const char *)x + i * x_stride * stored,
                         .dy_stride = dy_stride, .x_stride = x_stride, .gain = gain,
                         .stats = (const char *)stats + i * groups * 3 * item,
                         .dx = (char *)dx + i * dx_stride * stored, .dx_stride = dx_stride, .dgain = partial,
                         .dbias = partial + channels * item, .scratch = partial, .streaming = stream});
        if (status != CNORM_OK) return status;
    }
    return cnorm_backward_reduce(dtype, samples, channels, partials, dgain, dbias);
}

ptrdiff_t cnorm_batch_norm_scratch(cnorm_dtype dtype, ptrdiff_t samples, ptrdiff_t channels, ptrdiff_t space)
{
    if (!known_dtype(dtype) || !countable(samples, channels, space)) return 0;
    if (stored_bytes(dtype) < computed_bytes(dtype)) return batch_strip(NULL, samples, channels, space).bytes;
    return batch_arrays(NULL, computed_bytes(dtype), channels, NULL).bytes;
}

cnorm_status cnorm_batch_norm(cnorm_dtype dtype, ptrdiff_t samples, ptrdiff_t channels, ptrdiff_t space, const void *x,
                              ptrdiff_t x_stride, const void *gain, const void *bias, double eps, void *y,
                              ptrdiff_t y_stride, void *stats, double *moments, void *scratch)
{
    ENTER(batch_norm, countable(samples, channels, space) && samples * space > 1);
    if (!scratch) return CNORM_ERROR_NULL;
    return forward(table->batch_norm[dtype], dtype,
                   &(cnorm_volume_norm){samples, channels, space, .x = x, .x_stride = x_stride, .gain = gain,
                                        .bias = bias, .eps = eps, .y = y, .y_stride = y_stride, .stats = stats,
                                        .moments = moments, .scratch = scratch});
}

cnorm_status cnorm_batch_norm_backward(cnorm_dtype dtype, ptrdiff_t samples, ptrdiff_t channels, ptrdiff_t space,
                                       const void *dy, ptrdiff_t dy_stride, const void *x, ptrdiff_t x_stride,
                                       const void *gain, const void *stats, void *dx, ptrdiff_t dx_stride, void *dgain,
                                       void *dbias, void *scratch)
{
    ENTER(batch_norm_backward, countable(samples, channels, space) && samples * space > 1);
    if (!stats) return CNORM_ERROR_NULL;
    const ptrdiff_t run = space > 1 ? space : channels;
    const int stream = dx != dy && dx != x && streaming(dtype, samples, channels * space, run, dx, dx_stride);
    return backward(table->batch_norm_backward[dtype], dtype,
                    &(cnorm_volume_norm_backward){samples, channels, space, .dy = dy, .x = x, .dy_stride = dy_stride,
                                                  .x_stride = x_stride, .gain = gain, .stats = stats, .dx = dx,
                                                  .dx_stride = dx_stride, .dgain = dgain, .dbias = dbias,
                                                  .scratch = scratch, .streaming = stream});
}

cnorm_status cnorm_batch_norm_inference(cnorm_dtype dtype, ptrdiff_t samples, ptrdiff_t channels, ptrdiff_t space,
                                        const void *x, ptrdiff_t x_stride, const void *mean, const void *var,
                                        const void *gain, const void *bias, double eps, void *y, ptrdiff_t y_stride,
                                        void *scratch)
{
    ENTER(batch_norm_inference, countable(samples, channels, space));
    if (!mean || !var || !scratch) return CNORM_ERROR_NULL;
    return forward(table->batch_norm_inference[dtype], dtype,
                   &(cnorm_volume_norm){samples, channels, space, .x = x, .x_stride = x_stride, .gain = gain,
                                        .bias = bias, .mean = mean, .var = var, .eps = eps, .y = y,
                                        .y_stride = y_stride, .scratch = scratch});
}

cnorm_status cnorm_batch_norm_inference_backward(cnorm_dtype dtype, ptrdiff_t samples, ptrdiff_t channels,
                                                 ptrdiff_t space, const void *dy, ptrdiff_t dy_stride, const void *x,
                                                 ptrdiff_t x_stride, const void *mean, const void *var,
                                                 const void *gain, double eps, void *dx, ptrdiff_t dx_stride,
                                                 void *dgain, void *dbias, void *scratch)
{
    ENTER(batch_norm_inference_backward, countable(samples, channels, space));
    if (!mean || !var) return CNORM_ERROR_NULL;
    const ptrdiff_t run = space > 1 ? space : channels;
    const int stream = dx != dy && dx != x && streaming(dtype, samples, channels * space, run, dx, dx_stride);
    return backward(table->batch_norm_inference_backward[dtype], dtype,
                    &(cnorm_volume_norm_backward){samples, channels, space, .dy = dy, .x = x, .dy_stride = dy_stride,
                                                  .x_stride = x_stride, .gain = gain, .mean = mean, .var = var,
                                                  .eps = eps, .dx = dx, .dx_stride = dx_stride, .dgain = dgain,
                                                  .dbias = dbias, .scratch = scratch, .streaming = stream});
}

/* ---- weight and divisive normalisation ------------------------------------------------------------------------ */

cnorm_status cnorm_weight_norm(cnorm_dtype dtype, ptrdiff_t rows, ptrdiff_t n, const void *w, ptrdiff_t w_stride,
                               const void *gain, void *v, ptrdiff_t v_stride)
{
    ENTER(weight_norm, countable(rows, n, 1));
    if (rows == 0) return CNORM_OK;
    if (!w || !v) return CNORM_ERROR_NULL;
    if (rows_overlap(rows, n, v_stride)) return CNORM_ERROR_STRIDE;
    RUN(table->weight_norm[dtype](
        &(cnorm_weight){rows, n, .w = w, .w_stride = w_stride, .gain = gain, .out = v, .out_stride = v_stride}));
}

cnorm_status cnorm_weight_norm_backward(cnorm_dtype dtype, ptrdiff_t rows, ptrdiff_t n, const void *dv,
                                        ptrdiff_t dv_stride, const void *w, ptrdiff_t w_stride, const void *gain,
                                        void *dw, ptrdiff_t dw_stride, void *dgain)
{
    ENTER(weight_norm_backward, countable(rows, n, 1));
    if (rows == 0) return CNORM_OK;
    if (!dv || !w || !dw || !dgain) return CNORM_ERROR_NULL;
    if (rows_overlap(rows, n, dw_stride)) return CNORM_ERROR_STRIDE;
    RUN(table->weight_norm_backward[dtype](
        &(cnorm_weight){rows, n, dv, w, dv_stride, w_stride, gain, dw, dw_stride, dgain}));
}

ptrdiff_t cnorm_divisive_norm_scratch(ptrdiff_t n) { return countable(0, n, 1) ? 11 * 8 * n : 0; }

/* a radius of n - 1 covers the row from every element; twice that still fits ptrdiff_t */
static ptrdiff_t within(ptrdiff_t radius, ptrdiff_t n) { return radius < n ? radius : n - 1; }

cnorm_status cnorm_divisive_norm(cnorm_dtype dtype, ptrdiff_t rows, ptrdiff_t n, ptrdiff_t mean_radius,
                                 ptrdiff_t radius, const void *x, ptrdiff_t x_stride, const void *gain,
                                 const void *bias, double sigma, void *y, ptrdiff_t y_stride, void *scratch)
{
    ENTER(divisive_norm, countable(rows, n, 1) && mean_radius >= 0 && radius >= 0);
    if (rows == 0) return CNORM_OK;
    if (!x || !y || !scratch) return CNORM_ERROR_NULL;
    if (!usable(dtype, sigma)) return CNORM_ERROR_EPS;
    if (rows_overlap(rows, n, y_stride)) return CNORM_ERROR_STRIDE;
    RUN(table->divisive_norm[dtype](&(cnorm_divisive){
        rows, n, within(mean_radius, n), within(radius, n), .x = x, .x_stride = x_stride, .gain = gain, .bias = bias,
        .sigma = rounded(dtype, sigma), .out = y, .out_stride = y_stride, .scratch = scratch}));
}

cnorm_status cnorm_divisive_norm_backward(cnorm_dtype dtype, ptrdiff_t rows, ptrdiff_t n, ptrdiff_t mean_radius,
                                          ptrdiff_t radius, const void *dy, ptrdiff_t dy_stride, const void *x,
                                          ptrdiff_t x_stride, const void *gain, double sigma, void *dx,
                                          ptrdiff_t dx_stride, void *dgain, void *dbias, double *dsigma, void *scratch)
{
    ENTER(divisive_norm_backward, countable(rows, n, 1) && mean_radius >= 0 && radius >= 0);
    if (!dgain || !dbias || !dsigma || !scratch || (rows && (!dy || !x || !dx))) return CNORM_ERROR_NULL;
    if (!usable(dtype, sigma)) return CNORM_ERROR_EPS;
    if (rows_overlap(rows, n, dx_stride)) return CNORM_ERROR_STRIDE;
    RUN(table->divisive_norm_backward[dtype](&(cnorm_divisive){
        rows, n, within(mean_radius, n), within(radius, n), .dy = dy, .x = x, .dy_stride = dy_stride,
        .x_stride = x_stride, .gain = gain, .sigma = rounded(dtype, sigma), .out = dx, .out_stride = dx_stride,
        .dgain = dgain, .dbias = dbias, .dsigma = dsigma, .scratch = scratch}));
}

cnorm_status cnorm_smoothing_gradient(cnorm_dtype dtype, ptrdiff_t rows, ptrdiff_t n, const void *dy,
                                      ptrdiff_t dy_stride, const void *x, ptrdiff_t x_stride, const void *gain,
                                      const void *stats, double s, double *ds)
{
    ENTER(smoothing_gradient, countable(rows, n, 1));
    if (!ds || (rows && (!dy || !x || !stats))) return CNORM_ERROR_NULL;
    if (!usable(dtype, s)) return CNORM_ERROR_EPS;
    if (s == 0) { /* ds = 0; computed, it could be 0 times infinity */
        *ds = 0;
        return CNORM_OK;
    }
    double sum;
    RUN(table->smoothing_gradient[dtype](&(cnorm_norm_backward){rows, n, .dy = dy, .x = x, .dy_stride = dy_stride,
                                                                .x_stride = x_stride, .gain = gain, .stats = stats,
                                                                .partial = &sum});
        *ds = -s * sum);
}
