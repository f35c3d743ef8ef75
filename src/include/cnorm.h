/* cnorm: layer normalisation on CPUs. This header is the manual of level 1: layer and RMS norm, sigmoid and tanh, and
 * the choice of instruction set. cnorm_norms.h has the other norms, cnorm_rnn.h recurrent cells one step at a time
 * (level 2), cnorm_train.h their training (level 3), cnorm_model.h packed models.
 *
 * Conventions
 *   Sizes and strides are ptrdiff_t and count elements.
 *   [rows, n] stands for a matrix of `rows` rows of n contiguous elements, with a row every `stride` elements. A stride
 *   of 0 is n, that of a contiguous matrix; it may be negative, or CNORM_ONE_ROW for an input.
 *   A norm takes its arguments as a struct of which every member may be left out, in C as in
 *       cnorm_layer_norm(CNORM_F32, &(cnorm_norm){.rows = 8, .n = 32, .x = x, .y = y, .eps = 1e-5});
 *   What a function needs it checks; members that it does not name are not read.
 *   No function allocates, locks, prints or keeps a pointer, and each may be called from any thread.
 *   Arguments are checked first: unless a function returns CNORM_OK it has written nothing
 *   (cnorm_model_open may have written into its `memory`).
 *   In place: an output may be the same array as an input (same pointer and stride). Any other overlap of an output
 *   with another array is not allowed.
 *   Results are bit-identical on every instruction set, for every batch size, alignment and split over threads,
 *   whatever rounding mode, trap mask or flush-to-zero mode the caller's thread is in.
 */
#ifndef CNORM_H
#define CNORM_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define CNORM_ABI_VERSION 2

/* the stride of an input of which every row is the same one */
#define CNORM_ONE_ROW PTRDIFF_MIN

typedef enum cnorm_status {
    CNORM_OK = 0,
    CNORM_ERROR_NULL,     /* a required pointer is NULL */
    CNORM_ERROR_SIZE,     /* a size is negative or out of range, a row is empty, groups do not divide the channels, a
                          range of rows is invalid, memory is too small, or the bytes do not fit ptrdiff_t */
    CNORM_ERROR_EPS,      /* eps is negative, NaN, infinite, or beyond the range of the compute type */
    CNORM_ERROR_STRIDE,   /* rows of an output overlap one another */
    CNORM_ERROR_DTYPE,    /* not a cnorm_dtype that this function supports */
    CNORM_ERROR_ISA,      /* an instruction set is unknown, this machine can't run it, or its code was compiled to
                          fuse or reorder operations, as clang's -ffp-contract=fast does */
    CNORM_ERROR_LAYER,    /* a cnorm_layer has an unknown kind or option, sizes that do not fit, or lacks a vector */
    CNORM_ERROR_VALUE,    /* a weight or state is beyond its storage type, or not finite, or a scale is not positive */
    CNORM_ERROR_FORMAT,   /* not a packed model or saved stream, or one of another version or byte order */
    CNORM_ERROR_DAMAGED,  /* a packed model or saved stream of which bytes were changed, lost or added */
    CNORM_ERROR_IDENTITY, /* a saved stream of another model */
    CNORM_ERROR_ALIGN,    /* memory, or the bytes of a packed model, is not aligned as its manual says */
    CNORM_ERROR_ARITHMETIC, /* a saved stream of a version whose arithmetic gives other bits */
    CNORM_ERROR_TOKEN,      /* a token id in x is not an integer from 0 to the number of tokens less 1 */
} cnorm_status;

/* One English sentence, never NULL */
const char *cnorm_strerror(cnorm_status status);

/* CNORM_ABI_VERSION of the library that is linked */
int cnorm_abi_version(void);

/* float16 (IEEE binary16) and bfloat16 are storage types: elements are widened exactly, computed in float32 and rounded
 * once to nearest even. "Compute type" means float32 for these two and the dtype itself for the others. */
typedef enum cnorm_dtype { CNORM_F32 = 0, CNORM_F64 = 1, CNORM_F16 = 2, CNORM_BF16 = 3, CNORM_DTYPES } cnorm_dtype;

/* Widens x [n], float16 or bfloat16, to y [n], exactly: for parameters, which the functions below take in the compute
 * type. */
cnorm_status cnorm_widen(cnorm_dtype dtype, ptrdiff_t n, const void *x, float *y);

/* ---- layer normalisation: y = (x - mean) / sqrt(var + eps) * gain + bias, row by row -------------------------
 *
 * The statistics of a row are shift, delta, rstd; its mean is the unevaluated sum shift + delta. Where var + eps = 0,
 * the normalised row is 0 and rstd is 0. NaN or infinity in a row makes that row NaN, no other row.
 */
typedef struct cnorm_norm {
    ptrdiff_t rows, n;         /* of x, y, residual and sum; n is at least 1 */
    const void *x;             /* [rows, n] */
    const void *residual;      /* [rows, n]; cnorm_add_layer_norm only */
    ptrdiff_t x_stride;        /* of the rows of x; 0 is n */
    ptrdiff_t residual_stride; /* of the rows of residual; 0 is n */
    const void *gain;          /* [n] of the compute type, or NULL: 1 */
    const void *bias;          /* [n] of the compute type, or NULL: 0; not of cnorm_rms_norm */
    double eps;                /* at least 0, rounded to the compute type */
    void *y;                   /* [rows, n]; may be x or residual */
    void *sum;                 /* [rows, n]; may be x or residual; cnorm_add_layer_norm only */
    ptrdiff_t y_stride;        /* of the rows of y; 0 is n */
    ptrdiff_t sum_stride;      /* of the rows of sum; 0 is n */
    void *stats;               /* [rows, 3] of the compute type, or NULL */
    int hints;                 /* the library's own: not read, whatever a caller sets */
} cnorm_norm;

cnorm_status cnorm_layer_norm(cnorm_dtype dtype, const cnorm_norm *call);

/* The same for sum = x + residual, which is rounded to dtype and is a second output; y has the bits of cnorm_layer_norm
 * of sum. */
cnorm_status cnorm_add_layer_norm(cnorm_dtype dtype, const cnorm_norm *call);

/* ---- RMS normalisation: y = x / sqrt(mean x^2 + eps) * gain; shift and delta are 0, else as above ----------- */
cnorm_status cnorm_rms_norm(cnorm_dtype dtype, const cnorm_norm *call);

/* ---- backward ------------------------------------------------------------------------------------------------- */
typedef struct cnorm_norm_backward {
    ptrdiff_t rows, n;   /* of dy, x and dx */
    const void *dy;      /* [rows, n]: the gradient of y */
    const void *x;       /* [rows, n]: the input of the forward call */
    ptrdiff_t dy_stride; /* of the rows of dy; 0 is n */
    ptrdiff_t x_stride;  /* of the rows of x; 0 is n */
    const void *gain;    /* [n] of the compute type, or NULL: 1 */
    const void *stats;   /* [rows, 3]: of the forward call */
    void *dx;            /* [rows, n]; may be dy or x */
    ptrdiff_t dx_stride; /* of the rows of dx; 0 is n */
    void *dgain;         /* [n] of the compute type */
    void *dbias;         /* [n] of the compute type; not of cnorm_rms_norm_backward */
    void *partials;      /* scratch of cnorm_backward_partials(dtype, rows, n) bytes, aligned like the compute type */
    int hints;           /* the library's own, as in cnorm_norm */
} cnorm_norm_backward;

ptrdiff_t cnorm_backward_partials(cnorm_dtype dtype, ptrdiff_t rows, ptrdiff_t n);
cnorm_status cnorm_layer_norm_backward(cnorm_dtype dtype, const cnorm_norm_backward *call);
cnorm_status cnorm_rms_norm_backward(cnorm_dtype dtype, const cnorm_norm_backward *call);

/* The same in two steps, so that threads can share the rows, with the same bits. Each thread calls *_blocks for rows
 * [begin, end), where begin is a multiple of CNORM_BLOCK_ROWS and end is another or `rows`, with the same struct of all
 * rows, of which dgain and dbias are not read. When all rows are done, one thread calls cnorm_backward_reduce, which
 * overwrites partials. dbias is NULL for RMS norm. */
enum { CNORM_BLOCK_ROWS = 64 };
cnorm_status cnorm_layer_norm_backward_blocks(cnorm_dtype dtype, const cnorm_norm_backward *call, ptrdiff_t begin,
                                              ptrdiff_t end);
cnorm_status cnorm_rms_norm_backward_blocks(cnorm_dtype dtype, const cnorm_norm_backward *call, ptrdiff_t begin,
                                            ptrdiff_t end);
cnorm_status cnorm_backward_reduce(cnorm_dtype dtype, ptrdiff_t rows, ptrdiff_t n, void *partials, void *dgain,
                                   void *dbias);

/* ---- sigmoid and tanh of float32, at most 1 ULP; y may be x -------------------------------------------------- */
cnorm_status cnorm_sigmoid_f32(ptrdiff_t n, const float *x, float *y);
cnorm_status cnorm_tanh_f32(ptrdiff_t n, const float *x, float *y);

/* ---- the choice of instruction set -----------------------------------------------------------------------------
 *
 * On first use the library chooses the widest one that processor and operating system support, or the one that the
 * environment variable CNORM_ISA names. If that is unknown, or the machine can't run it, every call returns
 * CNORM_ERROR_ISA.
 */
int cnorm_isa_count(void);             /* how many this machine can run */
const char *cnorm_isa_name(int index); /* from the baseline, 0, up; NULL if out of range */
const char *cnorm_isa_active(void);    /* NULL if CNORM_ISA names one that can't run */
cnorm_status cnorm_isa_use(const char *name);

#ifdef __cplusplus
}
#endif
#endif
