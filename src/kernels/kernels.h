/* The table of functions that each instruction set fills, and what the functions may assume.
 *
 * api.c and rnn/ have checked everything a caller can get wrong: no kernel checks, allocates, locks or prints.
 * dtype-generic kernels take void pointers and are listed by cnorm_dtype.
 */
#ifndef CNORM_KERNELS_H
#define CNORM_KERNELS_H

#include "cnorm_family.h"
#include "cnorm_rnn.h"

enum { PANEL = 32 }; /* outputs that lie in lanes in a packed matrix */

static inline ptrdiff_t padded_units(ptrdiff_t units)
{
    return (units + CNORM_GATE_PAD - 1) / CNORM_GATE_PAD * CNORM_GATE_PAD;
}

/* rows of the packed matrix: gates of padded units, padded to whole panels */
static inline ptrdiff_t packed_rows(const cnorm_matrix *w)
{
    return (w->gates * padded_units(w->units) + PANEL - 1) / PANEL * PANEL;
}

/* floats from row to row of a cell's input products: the products, then the rstd of each gate */
static inline ptrdiff_t input_row_floats(const cnorm_cell *cell) { return packed_rows(&cell->weight_x) + CNORM_GATE_PAD; }

/* what `products` needs to lay `rows` vectors side by side */
static inline ptrdiff_t interleaved_floats(const cnorm_matrix *w, ptrdiff_t rows) { return rows > 1 ? CNORM_ROWS * w->cols : 0; }

/* scratch of cell_step, in the order in which it lays it out */
static inline ptrdiff_t cell_step_floats(const cnorm_cell *cell, ptrdiff_t rows)
{
    const cnorm_matrix *second = cell->weight_n.panels ? &cell->weight_n : cell->weight_p.panels ? &cell->weight_p : NULL;
    const ptrdiff_t width = padded_units(cell->weight_x.units), outputs = padded_units(cell->weight_h.cols);
    ptrdiff_t interleaved = interleaved_floats(&cell->weight_h, rows);
    ptrdiff_t floats = rows * packed_rows(&cell->weight_h) + 2 * width + outputs;
    if (second) {
        floats += rows * (packed_rows(second) + 2 * width);
        if (interleaved_floats(second, rows) > interleaved) interleaved = interleaved_floats(second, rows);
    }
    return floats + interleaved;
}

/* A forward call. x, y, residual, sum of the storage type; gain, bias, stats of the compute type. */
typedef struct cnorm_norm {
    ptrdiff_t rows, n;
    const void *x, *residual; /* [rows, n]; residual and sum only for add_layer_norm, both */
    ptrdiff_t x_stride, residual_stride;
    const void *gain, *bias; /* [n] or NULL */
    double eps;
    void *y, *sum; /* [rows, n]; each may be exactly x or residual */
    ptrdiff_t y_stride, sum_stride;
    void *stats;   /* [rows, 3] or NULL */
    int streaming; /* outputs are larger than the caches, without gaps between rows, and apart from the inputs */
} cnorm_norm;

/* A backward call over one block of at most CNORM_BLOCK_ROWS rows. */
typedef struct cnorm_norm_backward {
    ptrdiff_t rows, n;
    const void *dy, *x; /* [rows, n] */
    ptrdiff_t dy_stride, x_stride;
    const void *gain, *stats; /* [n] or NULL; [rows, 3] */
    void *dx;                 /* [rows, n], may be exactly dy or x */
    ptrdiff_t dx_stride;
    void *partial; /* [2, n] of the compute type: the block's dgain and dbias */
    int streaming; /* dx: as in cnorm_norm */
} cnorm_norm_backward;

/* Group and batch norm of volumes [samples, channels, space]. */
typedef struct cnorm_volume_norm {
    ptrdiff_t samples, channels, space, groups; /* groups divides channels; group norm only */
    const void *x;
    ptrdiff_t x_stride;
    const void *gain, *bias; /* [channels] or NULL */
    const void *mean, *var;  /* [channels]; inference only */
    double eps;
    void *y; /* may be exactly x */
    ptrdiff_t y_stride;
    void *stats;     /* group norm [samples, groups, 3], batch norm [channels, 3], or NULL */
    double *moments; /* [2, channels] or NULL; batch norm only */
    void *scratch;   /* batch norm only */
    int streaming;   /* as in cnorm_norm */
} cnorm_volume_norm;

typedef struct cnorm_volume_norm_backward {
    ptrdiff_t samples, channels, space, groups; /* group norm: at most CNORM_BLOCK_ROWS samples */
    const void *dy, *x;
    ptrdiff_t dy_stride, x_stride;
    const void *gain, *stats, *mean, *var; /* as above */
    double eps;
    void *dx; /* may be exactly dy or x */
    ptrdiff_t dx_stride;
    void *dgain, *dbias; /* [channels] */
    void *scratch;
    int streaming; /* as in cnorm_norm, of dx */
} cnorm_volume_norm_backward;

enum { LINE_BYTES = 64, PAGE_BYTES = 4096 }; /* of the cache, and of memory */

/* the scratch of batch norm, per channel, besides one channel's numbers, a line for each array, and a page */
enum { BATCH_DOUBLES = 7, BATCH_ITEMS = 10 };

/* Divisive norm, forward or backward. */
typedef struct cnorm_divisive {
    ptrdiff_t rows, n, mean_radius, radius; /* radii below n */
    const void *dy, *x;                     /* [rows, n] */
    ptrdiff_t dy_stride, x_stride;
    const void *gain, *bias; /* [n] or NULL */
    double sigma;
    void *out; /* [rows, n]: y, may be exactly x, or dx, may be exactly dy or x */
    ptrdiff_t out_stride;
    void *dgain, *dbias; /* [n] */
    double *dsigma;
    double *scratch; /* [11, n] */
} cnorm_divisive;

typedef struct cnorm_kernels {
    const char *name;
    void (*layer_norm[CNORM_DTYPES])(const cnorm_norm *call);
    void (*add_layer_norm[CNORM_DTYPES])(const cnorm_norm *call);
    void (*rms_norm[CNORM_DTYPES])(const cnorm_norm *call);
    void (*layer_norm_backward[CNORM_DTYPES])(const cnorm_norm_backward *call);
    void (*rms_norm_backward[CNORM_DTYPES])(const cnorm_norm_backward *call);
    /* x [n] -> y [n]: float16 and bfloat16 only */
    void (*widen[CNORM_DTYPES])(ptrdiff_t n, const void *x, float *y);
    /* into [n] += from [n], of the compute type */
    void (*add[CNORM_DTYPES])(ptrdiff_t n, void *into, const void *from);
    /* the family: float32 and float64 only */
    void (*group_norm[CNORM_DTYPES])(const cnorm_volume_norm *call);
    void (*group_norm_backward[CNORM_DTYPES])(const cnorm_volume_norm_backward *call);
    void (*batch_norm[CNORM_DTYPES])(const cnorm_volume_norm *call);
    void (*batch_norm_backward[CNORM_DTYPES])(const cnorm_volume_norm_backward *call);
    void (*batch_norm_inference[CNORM_DTYPES])(const cnorm_volume_norm *call);
    void (*batch_norm_inference_backward[CNORM_DTYPES])(const cnorm_volume_norm_backward *call);
    void (*weight_norm[CNORM_DTYPES])(ptrdiff_t rows, ptrdiff_t n, const void *w, ptrdiff_t w_stride, const void *gain,
                                      void *v, ptrdiff_t v_stride);
    void (*weight_norm_backward[CNORM_DTYPES])(ptrdiff_t rows, ptrdiff_t n, const void *dv, ptrdiff_t dv_stride,
                                               const void *w, ptrdiff_t w_stride, const void *gain, void *dw,
                                               ptrdiff_t dw_stride, void *dgain);
    void (*divisive_norm[CNORM_DTYPES])(const cnorm_divisive *call);
    void (*divisive_norm_backward[CNORM_DTYPES])(const cnorm_divisive *call);
    /* sum over rows of rstd^2 sum dy gain xhat; arguments as those of cnorm_norm_backward */
    double (*smoothing_sum[CNORM_DTYPES])(const cnorm_norm_backward *call);
    void (*sigmoid_f32)(ptrdiff_t n, const float *x, float *y);
    void (*tanh_f32)(ptrdiff_t n, const float *x, float *y);
    void (*activation_f32)(cnorm_activation f, ptrdiff_t n, const float *x, float *y);
    /* n <= CNORM_ROWS rows of x and y; state, scratch and panels aligned to CNORM_ALIGN; scratch by the functions above */
    void (*linear_step)(const cnorm_linear *layer, ptrdiff_t n, const float *x, ptrdiff_t x_stride, float *y,
                        ptrdiff_t y_stride, float *scratch);
    void (*cell_inputs)(const cnorm_cell *cell, ptrdiff_t n, const float *x, ptrdiff_t x_stride, float *zx, float *room);
    void (*cell_step)(const cnorm_cell *cell, ptrdiff_t n, const float *x, ptrdiff_t x_stride, const float *zx,
                      float *const *state, float *scratch);
} cnorm_kernels;

/* One exported symbol per instruction set, plainest first; dispatch.c lists them from here.
 * X(name, the condition under which this machine can run it) */
#if defined(__x86_64__)
#define CNORM_ISAS(X) X(baseline, 1) X(avx2, cnorm_cpu_has_avx2()) X(avx512, cnorm_cpu_has_avx512())
#elif defined(__aarch64__)
#define CNORM_ISAS(X) X(baseline, 1) X(neon, 1)
#else
#define CNORM_ISAS(X) X(baseline, 1)
#endif

#define CNORM_DECLARE(name, condition) extern const cnorm_kernels cnorm_kernels_##name;
CNORM_ISAS(CNORM_DECLARE)
#undef CNORM_DECLARE

#endif
