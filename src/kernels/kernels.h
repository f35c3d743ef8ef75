/* The table of functions that each instruction set fills, and what the functions may assume.
 *
 * api.c and rnn/ have checked everything a caller can get wrong: no kernel checks, allocates, locks or prints.
 * dtype-generic kernels take void pointers and are listed by cnorm_dtype.
 */
#ifndef CNORM_KERNELS_H
#define CNORM_KERNELS_H

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
} cnorm_norm_backward;

typedef struct cnorm_kernels {
    const char *name;
    void (*layer_norm[CNORM_DTYPES])(const cnorm_norm *call);
    void (*add_layer_norm[CNORM_DTYPES])(const cnorm_norm *call);
    void (*rms_norm[CNORM_DTYPES])(const cnorm_norm *call);
    void (*layer_norm_backward[CNORM_DTYPES])(const cnorm_norm_backward *call);
    void (*rms_norm_backward[CNORM_DTYPES])(const cnorm_norm_backward *call);
    /* into [n] += from [n], of the compute type */
    void (*add[CNORM_DTYPES])(ptrdiff_t n, void *into, const void *from);
    void (*sigmoid_f32)(ptrdiff_t n, const float *x, float *y);
    void (*tanh_f32)(ptrdiff_t n, const float *x, float *y);
    /* state, scratch and panels aligned to CNORM_ALIGN */
    void (*linear_step)(const cnorm_linear *layer, const float *x, float *y, float *scratch);
    void (*lstm_step)(const cnorm_lstm *cell, const float *x, float *state, float *scratch);
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
