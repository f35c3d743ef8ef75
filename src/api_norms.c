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

/* The first lines of every entry: `table` becomes the active table, which has this kernel for this dtype, and `own` a
 * copy of the call. */
#define ENTER(kernel, struct, ok)                                                                                      \
    const cnorm_kernels *table = cnorm_active();                                                                       \
    if (!table) return CNORM_ERROR_ISA;                                                                                \
    if (!known_dtype(dtype) || !table->kernel[dtype]) return CNORM_ERROR_DTYPE;                                        \
    if (!call) return CNORM_ERROR_NULL;                                                                                \
    if (!(ok)) return CNORM_ERROR_SIZE;                                                                                \
    struct own = *call
/* The last lines of every entry: runs the statement in the default floating-point mode. */
#define RUN(statement)                                                                                                 \
    const float_mode mode = float_mode_enter();                                                                        \
    statement;                                                                                                         \
    float_mode_leave(mode);                                                                                            \
    return CNORM_OK

/* ---- group and batch normalisation ------------------------------------------------------------------------------- */

/* Non-temporal stores are faster once the output [samples, n] exceeds the part of the caches that could keep it for its
 * reader, a quarter, if runs are whole cache lines, or so long that the partial lines at their ends cost little. */
static int nt_stores(cnorm_dtype dtype, ptrdiff_t samples, ptrdiff_t n, ptrdiff_t run, const void *out,
                     ptrdiff_t out_stride)
{
    const ptrdiff_t item = stored_bytes(dtype);
    const int whole_lines = (uintptr_t)out % LINE_BYTES == 0 && run * item % LINE_BYTES == 0;
    return samples * n * item >= cnorm_cpu_cache_bytes() / 4 && out_stride == n &&
           (whole_lines || run * item >= 16 * LINE_BYTES);
}

static cnorm_status forward(void (*kernel)(const cnorm_volume_norm *), cnorm_dtype dtype, cnorm_volume_norm *call)
{
    const ptrdiff_t n = call->channels * call->space;
    if (call->samples == 0) return CNORM_OK;
    if (!call->x || !call->y) return CNORM_ERROR_NULL;
    if (!usable(dtype, call->eps)) return CNORM_ERROR_EPS;
    call->x_stride = stride_of(call->x_stride, n), call->y_stride = stride_of(call->y_stride, n);
    if (rows_overlap(call->samples, n, call->y_stride)) return CNORM_ERROR_STRIDE;
    const ptrdiff_t run = call->space > 1 ? call->space : call->groups ? call->channels / call->groups : call->channels;
    call->hints =
        call->y != call->x && nt_stores(dtype, call->samples, n, run, call->y, call->y_stride) ? NT_STORES : 0;
    RUN(call->eps = rounded(dtype, call->eps); kernel(call));
}

/* sets the strides and hints of a backward call */
static void prepare(cnorm_dtype dtype, cnorm_volume_norm_backward *call)
{
    const ptrdiff_t n = call->channels * call->space;
    call->dy_stride = stride_of(call->dy_stride, n), call->x_stride = stride_of(call->x_stride, n);
    call->dx_stride = stride_of(call->dx_stride, n);
    const ptrdiff_t run = call->space > 1 ? call->space : call->groups ? call->channels / call->groups : call->channels;
    const int apart = call->dx != call->dy && call->dx != call->x;
    call->hints = apart && nt_stores(dtype, call->samples, n, run, call->dx, call->dx_stride) ? NT_STORES : 0;
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

static int grouped(ptrdiff_t groups, ptrdiff_t channels) { return groups > 0 && channels % groups == 0; }

cnorm_status cnorm_group_norm(cnorm_dtype dtype, const cnorm_volume_norm *call)
{
    ENTER(group_norm, cnorm_volume_norm,
          countable(call->samples, call->channels, call->space) && grouped(call->groups, call->channels));
    return forward(table->group_norm[dtype], dtype, &own);
}

cnorm_status cnorm_group_norm_backward(cnorm_dtype dtype, const cnorm_volume_norm_backward *call)
{
    ENTER(group_norm_backward, cnorm_volume_norm_backward,
          countable(call->samples, call->channels, call->space) && grouped(call->groups, call->channels));
    if (!own.dgain || !own.dbias || (own.samples && (!own.stats || !own.scratch))) return CNORM_ERROR_NULL;
    prepare(dtype, &own);
    own.eps = 0; /* it has the statistics */
    const ptrdiff_t stored = stored_bytes(dtype), item = computed_bytes(dtype);
    for (ptrdiff_t i = 0; i < call->samples; i += CNORM_BLOCK_ROWS) {
        char *partial = (char *)call->scratch + i / CNORM_BLOCK_ROWS * 2 * own.channels * item;
        cnorm_volume_norm_backward block = own;
        block.samples = own.samples - i < CNORM_BLOCK_ROWS ? own.samples - i : CNORM_BLOCK_ROWS;
        if (own.dy) block.dy = (const char *)own.dy + i * own.dy_stride * stored;
        if (own.x) block.x = (const char *)own.x + i * own.x_stride * stored;
        if (own.dx) block.dx = (char *)own.dx + i * own.dx_stride * stored;
        block.stats = (const char *)own.stats + i * own.groups * 3 * item;
        block.dgain = block.scratch = partial;
        block.dbias = partial + own.channels * item;
        const cnorm_status status = backward(table->group_norm_backward[dtype], dtype, &block);
        if (status != CNORM_OK) return status;
    }
    return cnorm_backward_reduce(dtype, own.samples, own.channels, own.scratch, own.dgain, own.dbias);
}

ptrdiff_t cnorm_batch_norm_scratch(cnorm_dtype dtype, ptrdiff_t samples, ptrdiff_t channels, ptrdiff_t space)
{
    if (!known_dtype(dtype) || !countable(samples, channels, space)) return 0;
    if (stored_bytes(dtype) < computed_bytes(dtype)) return batch_strip(NULL, samples, channels, space).bytes;
    return batch_arrays(NULL, computed_bytes(dtype), channels, NULL).bytes;
}

cnorm_status cnorm_batch_norm(cnorm_dtype dtype, const cnorm_volume_norm *call)
{
    ENTER(batch_norm, cnorm_volume_norm,
          countable(call->samples, call->channels, call->space) && call->samples * call->space > 1);
    if (!own.scratch) return CNORM_ERROR_NULL;
    own.groups = 0;
    return forward(table->batch_norm[dtype], dtype, &own);
}

cnorm_status cnorm_batch_norm_backward(cnorm_dtype dtype, const cnorm_volume_norm_backward *call)
{
    ENTER(batch_norm_backward, cnorm_volume_norm_backward,
          countable(call->samples, call->channels, call->space) && call->samples * call->space > 1);
    if (!own.stats) return CNORM_ERROR_NULL;
    own.groups = 0;
    own.eps = 0;
    prepare(dtype, &own);
    return backward(table->batch_norm_backward[dtype], dtype, &own);
}

cnorm_status cnorm_batch_norm_inference(cnorm_dtype dtype, const cnorm_volume_norm *call)
{
    ENTER(batch_norm_inference, cnorm_volume_norm, countable(call->samples, call->channels, call->space));
    if (!own.mean || !own.var || !own.scratch) return CNORM_ERROR_NULL;
    own.groups = 0;
    own.stats = NULL;
    own.moments = NULL;
    return forward(table->batch_norm_inference[dtype], dtype, &own);
}

cnorm_status cnorm_batch_norm_inference_backward(cnorm_dtype dtype, const cnorm_volume_norm_backward *call)
{
    ENTER(batch_norm_inference_backward, cnorm_volume_norm_backward,
          countable(call->samples, call->channels, call->space));
    if (!own.mean || !own.var) return CNORM_ERROR_NULL;
    own.groups = 0;
    own.stats = NULL;
    prepare(dtype, &own);
    return backward(table->batch_norm_inference_backward[dtype], dtype, &own);
}

/* ---- weight and divisive normalisation ------------------------------------------------------------------------ */

cnorm_status cnorm_weight_norm(cnorm_dtype dtype, const cnorm_weight *call)
{
    ENTER(weight_norm, cnorm_weight, countable(call->rows, call->n, 1));
    if (own.rows == 0) return CNORM_OK;
    if (!own.w || !own.out) return CNORM_ERROR_NULL;
    own.w_stride = stride_of(own.w_stride, own.n), own.out_stride = stride_of(own.out_stride, own.n);
    if (rows_overlap(own.rows, own.n, own.out_stride)) return CNORM_ERROR_STRIDE;
    RUN(table->weight_norm[dtype](&own));
}

cnorm_status cnorm_weight_norm_backward(cnorm_dtype dtype, const cnorm_weight *call)
{
    ENTER(weight_norm_backward, cnorm_weight, countable(call->rows, call->n, 1));
    if (own.rows == 0) return CNORM_OK;
    if (!own.dv || !own.w || !own.out || !own.dgain) return CNORM_ERROR_NULL;
    own.dv_stride = stride_of(own.dv_stride, own.n), own.w_stride = stride_of(own.w_stride, own.n);
    own.out_stride = stride_of(own.out_stride, own.n);
    if (rows_overlap(own.rows, own.n, own.out_stride)) return CNORM_ERROR_STRIDE;
    RUN(table->weight_norm_backward[dtype](&own));
}

ptrdiff_t cnorm_divisive_norm_scratch(ptrdiff_t n) { return countable(0, n, 1) ? 11 * 8 * n : 0; }

/* a radius of n - 1 covers the row from every element; twice that still fits ptrdiff_t */
static ptrdiff_t within(ptrdiff_t radius, ptrdiff_t n) { return radius < n ? radius : n - 1; }

/* Checks a call but for its pointers, sets its strides, and its radii and sigma as the kernels take them. */
static cnorm_status settle(cnorm_dtype dtype, cnorm_divisive *call)
{
    const ptrdiff_t n = call->n;
    if (!usable(dtype, call->sigma)) return CNORM_ERROR_EPS;
    call->dy_stride = stride_of(call->dy_stride, n), call->x_stride = stride_of(call->x_stride, n);
    call->out_stride = stride_of(call->out_stride, n);
    if (rows_overlap(call->rows, n, call->out_stride)) return CNORM_ERROR_STRIDE;
    call->mean_radius = within(call->mean_radius, n), call->radius = within(call->radius, n);
    call->sigma = rounded(dtype, call->sigma);
    return CNORM_OK;
}

cnorm_status cnorm_divisive_norm(cnorm_dtype dtype, const cnorm_divisive *call)
{
    ENTER(divisive_norm, cnorm_divisive,
          countable(call->rows, call->n, 1) && call->mean_radius >= 0 && call->radius >= 0);
    if (own.rows == 0) return CNORM_OK;
    if (!own.x || !own.out || !own.scratch) return CNORM_ERROR_NULL;
    const cnorm_status status = settle(dtype, &own);
    if (status != CNORM_OK) return status;
    RUN(table->divisive_norm[dtype](&own));
}

cnorm_status cnorm_divisive_norm_backward(cnorm_dtype dtype, const cnorm_divisive *call)
{
    ENTER(divisive_norm_backward, cnorm_divisive,
          countable(call->rows, call->n, 1) && call->mean_radius >= 0 && call->radius >= 0);
    if (!own.dgain || !own.dbias || !own.dsigma || !own.scratch) return CNORM_ERROR_NULL;
    if (own.rows && (!own.dy || !own.x || !own.out)) return CNORM_ERROR_NULL;
    const cnorm_status status = settle(dtype, &own);
    if (status != CNORM_OK) return status;
    RUN(table->divisive_norm_backward[dtype](&own));
}

cnorm_status cnorm_smoothing_gradient(cnorm_dtype dtype, const cnorm_norm_backward *call, double s, double *ds)
{
    ENTER(smoothing_gradient, cnorm_norm_backward, countable(call->rows, call->n, 1));
    if (!ds || (own.rows && (!own.dy || !own.x || !own.stats))) return CNORM_ERROR_NULL;
    if (!usable(dtype, s)) return CNORM_ERROR_EPS;
    if (s == 0) { /* ds = 0; computed, it could be 0 times infinity */
        *ds = 0;
        return CNORM_OK;
    }
    double sum;
    own.dy_stride = stride_of(own.dy_stride, own.n), own.x_stride = stride_of(own.x_stride, own.n);
    own.partials = &sum;
    RUN(table->smoothing_gradient[dtype](&own); *ds = -s * sum);
}
