/* The entries of cnorm.h: each checks its arguments, then makes one call through the table of kernels. */
#include "checks.h"
#include "cpu.h"
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
    case CNORM_ERROR_SIZE:
        return "a size is negative or out of range, a row is empty, groups or rows do not come out even, the memory is "
               "too small, the bytes do not fit ptrdiff_t, or a packed model's layers take far more "
               "memory than its file";
    case CNORM_ERROR_EPS: return "eps must be a number of the dtype, finite and not negative";
    case CNORM_ERROR_STRIDE: return "rows of an output overlap one another";
    case CNORM_ERROR_DTYPE: return "not a dtype that this function takes";
    case CNORM_ERROR_ISA:
        return "the instruction set is unknown, this machine lacks it, or its code was compiled to fuse or reorder "
               "operations";
    case CNORM_ERROR_LAYER:
        return "a layer has an unknown kind or option, sizes that do not fit, a clip that is not positive, or lacks a "
               "vector";
    case CNORM_ERROR_VALUE:
        return "a weight or state is beyond its storage type or not finite, or a scale is not positive";
    case CNORM_ERROR_FORMAT: return "not a packed model or saved stream, or one of another version or byte order";
    case CNORM_ERROR_DAMAGED: return "damaged: bytes were changed, lost or added";
    case CNORM_ERROR_IDENTITY:
        return "the saved stream of another model: the hash of configuration and weights differs";
    case CNORM_ERROR_ALIGN: return "memory or the bytes of a packed model are not aligned to 64 bytes (CNORM_ALIGN)";
    case CNORM_ERROR_ARITHMETIC: return "the saved stream of a version whose arithmetic gives other bits";
    case CNORM_ERROR_TOKEN: return "a token id in x is not an integer from 0 to the number of tokens less 1";
    }
    return "unknown status";
}

int cnorm_abi_version(void) { return CNORM_ABI_VERSION; }

/* whether rows * n elements, or n where rows = 0, fit ptrdiff_t in bytes; 16 is two elements of float64 */
static int countable(ptrdiff_t rows, ptrdiff_t n)
{
    return rows >= 0 && n > 0 && n <= PTRDIFF_MAX / 16 / (rows > 0 ? rows : 1);
}

cnorm_status cnorm_widen(cnorm_dtype dtype, ptrdiff_t n, const void *x, float *y)
{
    const cnorm_kernels *kernels = cnorm_active();
    if (!kernels) return CNORM_ERROR_ISA;
    if (dtype != CNORM_F16 && dtype != CNORM_BF16) return CNORM_ERROR_DTYPE;
    if (n < 0) return CNORM_ERROR_SIZE;
    if (n == 0) return CNORM_OK;
    if (!x || !y) return CNORM_ERROR_NULL;
    const float_mode mode = float_mode_enter();
    kernels->to_float[dtype](&(cnorm_conversion){n, x, y});
    float_mode_leave(mode);
    return CNORM_OK;
}

/* ---- forward ---------------------------------------------------------------------------------------------------- */

/* Non-temporal stores are faster once the output exceeds `part`, the bytes of the caches that could keep it for its
 * reader. */
static int beyond_caches(ptrdiff_t rows, ptrdiff_t n, cnorm_dtype dtype, ptrdiff_t part)
{
    return n >= 64 && rows * n * stored_bytes(dtype) >= part;
}

static int nt_stores(const cnorm_norm *call, cnorm_dtype dtype)
{
    /* half types are limited by arithmetic, and the alignment that non-temporal stores need adds to it */
    const ptrdiff_t caches = cnorm_cpu_cache_bytes(),
                    part = stored_bytes(dtype) == 2 && !call->sum ? caches / 2 : caches / 4;
    return beyond_caches(call->rows, call->n, dtype, part) && call->y_stride == call->n && call->y != call->x &&
           call->y != call->residual &&
           (!call->sum || (call->sum_stride == call->n && call->sum != call->x && call->sum != call->residual));
}

/* `call` is the entry's own copy, in which members that the function does not take are NULL */
static cnorm_status forward(void (*kernel)(const cnorm_norm *), cnorm_dtype dtype, cnorm_norm *call)
{
    const ptrdiff_t n = call->n;
    if (!countable(call->rows, n)) return CNORM_ERROR_SIZE;
    if (call->rows == 0) return CNORM_OK;
    if (!call->x || !call->y) return CNORM_ERROR_NULL;
    if (!(call->eps >= 0 && call->eps <= (dtype == CNORM_F64 ? DBL_MAX : (double)FLT_MAX))) return CNORM_ERROR_EPS;
    call->x_stride = stride_of(call->x_stride, n), call->y_stride = stride_of(call->y_stride, n);
    if (rows_overlap(call->rows, n, call->y_stride)) return CNORM_ERROR_STRIDE;
    if (call->sum) {
        call->residual_stride = stride_of(call->residual_stride, n), call->sum_stride = stride_of(call->sum_stride, n);
        if (rows_overlap(call->rows, n, call->sum_stride)) return CNORM_ERROR_STRIDE;
    }
    const float_mode mode = float_mode_enter();
    if (dtype != CNORM_F64) call->eps = (double)(float)call->eps;
    call->hints = (nt_stores(call, dtype) ? NT_STORES : 0) | (cnorm_cpu_is_amd() ? IN_SWEEP : 0);
    kernel(call);
    float_mode_leave(mode);
    return CNORM_OK;
}

cnorm_status cnorm_layer_norm(cnorm_dtype dtype, const cnorm_norm *call)
{
    const cnorm_kernels *kernels = cnorm_active();
    if (!kernels) return CNORM_ERROR_ISA;
    if (!known_dtype(dtype)) return CNORM_ERROR_DTYPE;
    if (!call) return CNORM_ERROR_NULL;
    cnorm_norm own = *call;
    own.residual = own.sum = NULL;
    return forward(kernels->layer_norm[dtype], dtype, &own);
}

cnorm_status cnorm_add_layer_norm(cnorm_dtype dtype, const cnorm_norm *call)
{
    const cnorm_kernels *kernels = cnorm_active();
    if (!kernels) return CNORM_ERROR_ISA;
    if (!known_dtype(dtype)) return CNORM_ERROR_DTYPE;
    if (!call || (call->rows > 0 && (!call->residual || !call->sum))) return CNORM_ERROR_NULL;
    cnorm_norm own = *call;
    return forward(kernels->add_layer_norm[dtype], dtype, &own);
}

cnorm_status cnorm_rms_norm(cnorm_dtype dtype, const cnorm_norm *call)
{
    const cnorm_kernels *kernels = cnorm_active();
    if (!kernels) return CNORM_ERROR_ISA;
    if (!known_dtype(dtype)) return CNORM_ERROR_DTYPE;
    if (!call) return CNORM_ERROR_NULL;
    cnorm_norm own = *call;
    own.residual = own.sum = NULL;
    own.bias = NULL;
    return forward(kernels->rms_norm[dtype], dtype, &own);
}

/* ---- backward --------------------------------------------------------------------------------------------------- */

static ptrdiff_t blocks(ptrdiff_t rows) { return (rows + CNORM_BLOCK_ROWS - 1) / CNORM_BLOCK_ROWS; }

ptrdiff_t cnorm_backward_partials(cnorm_dtype dtype, ptrdiff_t rows, ptrdiff_t n)
{
    return known_dtype(dtype) && countable(rows, n) ? blocks(rows) * 2 * n * computed_bytes(dtype) : 0;
}

static cnorm_status backward_blocks(void (*const *kernel)(const cnorm_norm_backward *), cnorm_dtype dtype,
                                    ptrdiff_t begin, ptrdiff_t end, const cnorm_norm_backward *call)
{
    if (!known_dtype(dtype)) return CNORM_ERROR_DTYPE;
    if (!call) return CNORM_ERROR_NULL;
    const ptrdiff_t rows = call->rows, n = call->n;
    if (!countable(rows, n) || begin < 0 || end > rows || begin > end) return CNORM_ERROR_SIZE;
    if (begin % CNORM_BLOCK_ROWS || (end % CNORM_BLOCK_ROWS && end != rows)) return CNORM_ERROR_SIZE;
    if (begin == end) return CNORM_OK;
    if (!call->dy || !call->x || !call->stats || !call->dx || !call->partials) return CNORM_ERROR_NULL;
    cnorm_norm_backward block = *call;
    block.dy_stride = stride_of(call->dy_stride, n), block.x_stride = stride_of(call->x_stride, n);
    block.dx_stride = stride_of(call->dx_stride, n);
    if (rows_overlap(rows, n, block.dx_stride)) return CNORM_ERROR_STRIDE;
    const ptrdiff_t stored = stored_bytes(dtype), computed = computed_bytes(dtype);
    const int nt_stores = beyond_caches(rows, n, dtype, cnorm_cpu_cache_bytes() / 4) && block.dx_stride == n &&
                          call->dx != call->x && call->dx != call->dy;
    block.hints = nt_stores ? NT_STORES : 0;
    const float_mode mode = float_mode_enter();
    for (ptrdiff_t row = begin; row < end; row += CNORM_BLOCK_ROWS) {
        block.rows = end - row < CNORM_BLOCK_ROWS ? end - row : CNORM_BLOCK_ROWS;
        block.dy = (const char *)call->dy + row * block.dy_stride * stored;
        block.x = (const char *)call->x + row * block.x_stride * stored;
        block.dx = (char *)call->dx + row * block.dx_stride * stored;
        block.stats = (const char *)call->stats + row * 3 * computed;
        block.partials = (char *)call->partials + row / CNORM_BLOCK_ROWS * 2 * n * computed;
        kernel[dtype](&block);
    }
    float_mode_leave(mode);
    return CNORM_OK;
}

cnorm_status cnorm_layer_norm_backward_blocks(cnorm_dtype dtype, const cnorm_norm_backward *call, ptrdiff_t begin,
                                              ptrdiff_t end)
{
    const cnorm_kernels *kernels = cnorm_active();
    return kernels ? backward_blocks(kernels->layer_norm_backward, dtype, begin, end, call) : CNORM_ERROR_ISA;
}

cnorm_status cnorm_rms_norm_backward_blocks(cnorm_dtype dtype, const cnorm_norm_backward *call, ptrdiff_t begin,
                                            ptrdiff_t end)
{
    const cnorm_kernels *kernels = cnorm_active();
    return kernels ? backward_blocks(kernels->rms_norm_backward, dtype, begin, end, call) : CNORM_ERROR_ISA;
}

cnorm_status cnorm_backward_reduce(cnorm_dtype dtype, ptrdiff_t rows, ptrdiff_t n, void *partials, void *dgain,
                                   void *dbias)
{
    const cnorm_kernels *kernels = cnorm_active();
    if (!kernels) return CNORM_ERROR_ISA;
    if (!known_dtype(dtype)) return CNORM_ERROR_DTYPE;
    if (!countable(rows, n)) return CNORM_ERROR_SIZE;
    if (!dgain || (rows && !partials)) return CNORM_ERROR_NULL;
    const ptrdiff_t count = blocks(rows), bytes = n * computed_bytes(dtype);
    const float_mode mode = float_mode_enter();
    /* the fixed tree: 0+1, 2+3, ...; then 0+2, 4+6, ...; and so on */
    for (ptrdiff_t step = 1; step < count; step *= 2)
        for (ptrdiff_t b = 0; b + step < count; b += 2 * step) {
            char *into = (char *)partials + b * 2 * bytes, *from = into + step * 2 * bytes;
            if (dtype == CNORM_F64) kernels->add_f64(2 * n, (double *)into, (const double *)from);
            else kernels->add_f32(2 * n, (float *)into, (const float *)from);
        }
    float_mode_leave(mode);
    if (count) memcpy(dgain, partials, (size_t)bytes);
    else memset(dgain, 0, (size_t)bytes);
    if (dbias && count) memcpy(dbias, (char *)partials + bytes, (size_t)bytes);
    else if (dbias) memset(dbias, 0, (size_t)bytes);
    return CNORM_OK;
}

cnorm_status cnorm_layer_norm_backward(cnorm_dtype dtype, const cnorm_norm_backward *call)
{
    if (!call || !call->dgain || !call->dbias) return CNORM_ERROR_NULL;
    const cnorm_status status = cnorm_layer_norm_backward_blocks(dtype, call, 0, call->rows);
    if (status != CNORM_OK) return status;
    return cnorm_backward_reduce(dtype, call->rows, call->n, call->partials, call->dgain, call->dbias);
}

cnorm_status cnorm_rms_norm_backward(cnorm_dtype dtype, const cnorm_norm_backward *call)
{
    if (!call || !call->dgain) return CNORM_ERROR_NULL;
    const cnorm_status status = cnorm_rms_norm_backward_blocks(dtype, call, 0, call->rows);
    if (status != CNORM_OK) return status;
    return cnorm_backward_reduce(dtype, call->rows, call->n, call->partials, call->dgain, NULL);
}

/* ---- activations ------------------------------------------------------------------------------------------------ */

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
