/* cnorm: layer normalisation on CPUs. This header is the manual of level 1: layer and RMS norm, sigmoid and tanh, and
 * the choice of instruction set. cnorm_norms.h has the other norms, cnorm_rnn.h recurrent cells one step at a time
 * (level 2), cnorm_train.h their training (level 3), cnorm_model.h packed models.
 *
 * Conventions
 *   Sizes and strides are ptrdiff_t and count elements. A row stride may be negative, or zero for an input.
 *   [rows, n] stands for a matrix of `rows` rows of n contiguous elements, with a row every `stride` elements.
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

#ifdef __cplusplus
extern "C" {
#endif

#define CNORM_ABI_VERSION 1

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
 * x, y [rows, n] of dtype; gain, bias [n] of the compute type, or NULL (1 and 0).
 * stats [rows, 3] of the compute type, or NULL: shift, delta, rstd. The mean is the unevaluated sum shift + delta.
 * Where var + eps = 0 the normalised row is 0 and rstd is 0. NaN or infinity in a row makes that row NaN, no other row.
 * eps >= 0 is rounded to the compute type.
 */
cnorm_status cnorm_layer_norm(cnorm_dtype dtype, ptrdiff_t rows, ptrdiff_t n, const void *x, ptrdiff_t x_stride,
                              const void *gain, const void *bias, double eps, void *y, ptrdiff_t y_stride, void *stats);

/* The same for sum = x + residual, which is rounded to dtype and is a second output [rows, n]; y has the bits of
 * cnorm_layer_norm of sum. y and sum may each be in place of x or residual. */
cnorm_status cnorm_add_layer_norm(cnorm_dtype dtype, ptrdiff_t rows, ptrdiff_t n, const void *x, ptrdiff_t x_stride,
                                  const void *residual, ptrdiff_t residual_stride, const void *gain, const void *bias,
                                  double eps, void *y, ptrdiff_t y_stride, void *sum, ptrdiff_t sum_stride,
                                  void *stats);

/* ---- RMS normalisation: y = x / sqrt(mean x^2 + eps) * gain; shift and delta are 0, else as above ----------- */
cnorm_status cnorm_rms_norm(cnorm_dtype dtype, ptrdiff_t rows, ptrdiff_t n, const void *x, ptrdiff_t x_stride,
                            const void *gain, double eps, void *y, ptrdiff_t y_stride, void *stats);

/* ---- backward -------------------------------------------------------------------------------------------------
 *
 * dy, x, dx [rows, n] of dtype; gain [n] or NULL, stats [rows, 3] of the forward call, dgain, dbias [n]: compute type.
 * partials: scratch of cnorm_backward_partials(dtype, rows, n) bytes, aligned like the compute type.
 */
ptrdiff_t cnorm_backward_partials(cnorm_dtype dtype, ptrdiff_t rows, ptrdiff_t n);
cnorm_status cnorm_layer_norm_backward(cnorm_dtype dtype, ptrdiff_t rows, ptrdiff_t n, const void *dy,
                                       ptrdiff_t dy_stride, const void *x, ptrdiff_t x_stride, const void *gain,
                                       const void *stats, void *dx, ptrdiff_t dx_stride, void *dgain, void *dbias,
                                       void *partials);
cnorm_status cnorm_rms_norm_backward(cnorm_dtype dtype, ptrdiff_t rows, ptrdiff_t n, const void *dy,
                                     ptrdiff_t dy_stride, const void *x, ptrdiff_t x_stride, const void *gain,
                                     const void *stats, void *dx, ptrdiff_t dx_stride, void *dgain, void *partials);

/* The same in two steps, so that threads can share the rows, with the same bits. Each thread calls *_blocks for row
 * ranges [begin, end), where begin is a multiple of CNORM_BLOCK_ROWS and end is another or `rows`; pointers are always
 * those of row 0. When all rows are done, one thread calls cnorm_backward_reduce, which overwrites partials. dbias is
 * NULL for RMS norm. */
enum { CNORM_BLOCK_ROWS = 64 };
cnorm_status cnorm_layer_norm_backward_blocks(cnorm_dtype dtype, ptrdiff_t rows, ptrdiff_t n, ptrdiff_t begin,
                                              ptrdiff_t end, const void *dy, ptrdiff_t dy_stride, const void *x,
                                              ptrdiff_t x_stride, const void *gain, const void *stats, void *dx,
                                              ptrdiff_t dx_stride, void *partials);
cnorm_status cnorm_rms_norm_backward_blocks(cnorm_dtype dtype, ptrdiff_t rows, ptrdiff_t n, ptrdiff_t begin,
                                            ptrdiff_t end, const void *dy, ptrdiff_t dy_stride, const void *x,
                                            ptrdiff_t x_stride, const void *gain, const void *stats, void *dx,
                                            ptrdiff_t dx_stride, void *partials);
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
