/* Level 1 entries: check what a C caller can get wrong, then one call through the table. */
#include "dispatch.h"
#include "float_mode.h"

#include <float.h>
#include <stdint.h>
#include <string.h>

const char *cnorm_strerror(cnorm_status status)
{
    switch (status) {
    case CNORM_OK: return "no error";
    case CNORM_ERROR_NULL: return "a pointer that must not be NULL is NULL";
    case CNORM_ERROR_SIZE: return "a size is negative, a row is empty, or the bytes do not fit ptrdiff_t";
    case CNORM_ERROR_EPS: return "eps must be a number of the dtype, finite and not negative";
    case CNORM_ERROR_STRIDE: return "rows of an output overlap one another";
    case CNORM_ERROR_DTYPE: return "not a dtype that this function takes";
    case CNORM_ERROR_ISA: return "the instruction set is unknown or this machine lacks it";
    }
    return "unknown status";
}

int cnorm_abi_version(void) { return CNORM_ABI_VERSION; }

static ptrdiff_t itemsize(cnorm_dtype dtype) { return dtype == CNORM_F64 ? 8 : 4; }
static int known(cnorm_dtype dtype) { return dtype == CNORM_F32 || dtype == CNORM_F64; }

/* can rows * n items be counted in bytes? 16 covers the widest item, and leaves room for two of them side by side */
static int countable(ptrdiff_t rows, ptrdiff_t n) { return rows >= 0 && n > 0 && (rows == 0 || n <= PTRDIFF_MAX / 16 / rows); }

static int rows_overlap(ptrdiff_t rows, ptrdiff_t n, ptrdiff_t stride)
{
    return rows > 1 && stride < n && stride > -n;
}

cnorm_status cnorm_layer_norm(cnorm_dtype dtype, ptrdiff_t rows, ptrdiff_t n, const void *x, ptrdiff_t x_stride,
                              const void *gain, const void *bias, double eps, void *y, ptrdiff_t y_stride, void *stats)
{
    const cnorm_kernels *kernels = cnorm_active();
    if (!kernels) return CNORM_ERROR_ISA;
    if (!known(dtype)) return CNORM_ERROR_DTYPE;
    if (!countable(rows, n)) return CNORM_ERROR_SIZE;
    if (rows == 0) return CNORM_OK;
    if (!x || !y) return CNORM_ERROR_NULL;
    if (!(eps >= 0 && eps <= (dtype == CNORM_F32 ? (double)FLT_MAX : DBL_MAX))) return CNORM_ERROR_EPS;
    if (rows_overlap(rows, n, y_stride)) return CNORM_ERROR_STRIDE;
    const float_mode mode = float_mode_enter();
    if (dtype == CNORM_F32) eps = (double)(float)eps;
    kernels->layer_norm[dtype](rows, n, x, x_stride, gain, bias, eps, y, y_stride, stats);
    float_mode_leave(mode);
    return CNORM_OK;
}

static ptrdiff_t blocks(ptrdiff_t rows) { return (rows + CNORM_BLOCK_ROWS - 1) / CNORM_BLOCK_ROWS; }

ptrdiff_t cnorm_layer_norm_backward_partials(cnorm_dtype dtype, ptrdiff_t rows, ptrdiff_t n)
{
    return known(dtype) && countable(rows, n) ? blocks(rows) * 2 * n * itemsize(dtype) : 0;
}

cnorm_status cnorm_layer_norm_backward_blocks(cnorm_dtype dtype, ptrdiff_t rows, ptrdiff_t n, ptrdiff_t begin,
                                              ptrdiff_t end, const void *dy, ptrdiff_t dy_stride, const void *x,
                                              ptrdiff_t x_stride, const void *gain, const void *stats, void *dx,
                                              ptrdiff_t dx_stride, void *partials)
{
    const cnorm_kernels *kernels = cnorm_active();
    if (!kernels) return CNORM_ERROR_ISA;
    if (!known(dtype)) return CNORM_ERROR_DTYPE;
    if (!countable(rows, n) || begin < 0 || end > rows || begin > end) return CNORM_ERROR_SIZE;
    if (begin % CNORM_BLOCK_ROWS || (end % CNORM_BLOCK_ROWS && end != rows)) return CNORM_ERROR_SIZE;
    if (begin == end) return CNORM_OK;
    if (!dy || !x || !stats || !dx || !partials) return CNORM_ERROR_NULL;
    if (rows_overlap(rows, n, dx_stride)) return CNORM_ERROR_STRIDE;
    const ptrdiff_t item = itemsize(dtype);
    const float_mode mode = float_mode_enter();
    for (ptrdiff_t row = begin; row < end; row += CNORM_BLOCK_ROWS) {
        const ptrdiff_t count = end - row < CNORM_BLOCK_ROWS ? end - row : CNORM_BLOCK_ROWS;
        kernels->layer_norm_backward_block[dtype](
            count, n, (const char *)dy + row * dy_stride * item, dy_stride, (const char *)x + row * x_stride * item,
            x_stride, gain, (const char *)stats + row * 3 * item, (char *)dx + row * dx_stride * item, dx_stride,
            (char *)partials + row / CNORM_BLOCK_ROWS * 2 * n * item);
    }
    float_mode_leave(mode);
    return CNORM_OK;
}

cnorm_status cnorm_layer_norm_backward_reduce(cnorm_dtype dtype, ptrdiff_t rows, ptrdiff_t n, void *partials,
                                              void *dgain, void *dbias)
{
    const cnorm_kernels *kernels = cnorm_active();
    if (!kernels) return CNORM_ERROR_ISA;
    if (!known(dtype)) return CNORM_ERROR_DTYPE;
    if (!countable(rows, n)) return CNORM_ERROR_SIZE;
    if (!dgain || !dbias || (rows && !partials)) return CNORM_ERROR_NULL;
    const ptrdiff_t count = blocks(rows), row_bytes = n * itemsize(dtype);
    const float_mode mode = float_mode_enter();
    /* the fixed tree: 0+1, 2+3, ...; then 0+2, 4+6, ...; and so on */
    for (ptrdiff_t step = 1; step < count; step *= 2)
        for (ptrdiff_t b = 0; b + step < count; b += 2 * step)
            kernels->add[dtype](2 * n, (char *)partials + b * 2 * row_bytes,
                                (char *)partials + (b + step) * 2 * row_bytes);
    float_mode_leave(mode);
    if (count == 0) {
        memset(dgain, 0, (size_t)row_bytes);
        memset(dbias, 0, (size_t)row_bytes);
    } else {
        memcpy(dgain, partials, (size_t)row_bytes);
        memcpy(dbias, (char *)partials + row_bytes, (size_t)row_bytes);
    }
    return CNORM_OK;
}

cnorm_status cnorm_layer_norm_backward(cnorm_dtype dtype, ptrdiff_t rows, ptrdiff_t n, const void *dy,
                                       ptrdiff_t dy_stride, const void *x, ptrdiff_t x_stride, const void *gain,
                                       const void *stats, void *dx, ptrdiff_t dx_stride, void *dgain, void *dbias,
                                       void *partials)
{
    if (!dgain || !dbias) return CNORM_ERROR_NULL;
    const cnorm_status status = cnorm_layer_norm_backward_blocks(dtype, rows, n, 0, rows, dy, dy_stride, x, x_stride,
                                                                 gain, stats, dx, dx_stride, partials);
    if (status != CNORM_OK) return status;
    return cnorm_layer_norm_backward_reduce(dtype, rows, n, partials, dgain, dbias);
}

static cnorm_status elementwise(void (*f)(ptrdiff_t, const float *, float *), ptrdiff_t n, const float *x, float *y)
{
    if (n < 0) return CNORM_ERROR_SIZE;
    if (n == 0) return CNORM_OK;
    if (!x || !y) return CNORM_ERROR_NULL;
    const float_mode mode = float_mode_enter();
    f(n, x, y);
    float_mode_leave(mode);
    return CNORM_OK;
}

cnorm_status cnorm_sigmoid_f32(ptrdiff_t n, const float *x, float *y)
{
    const cnorm_kernels *kernels = cnorm_active();
    return kernels ? elementwise(kernels->sigmoid_f32, n, x, y) : CNORM_ERROR_ISA;
}

cnorm_status cnorm_tanh_f32(ptrdiff_t n, const float *x, float *y)
{
    const cnorm_kernels *kernels = cnorm_active();
    return kernels ? elementwise(kernels->tanh_f32, n, x, y) : CNORM_ERROR_ISA;
}
