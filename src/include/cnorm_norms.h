/* cnorm: norms other than layer and RMS norm. This header is the manual of batch, group, instance, weight and divisive
 * normalisation; the conventions are those of cnorm.h.
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

/* ---- group and batch normalisation of volumes x [samples, channels, space] ------------------------------------
 *
 * A sample begins every x_stride elements, and within a sample all elements are contiguous.
 */
typedef struct cnorm_volume_norm {
    ptrdiff_t samples, channels; /* channels is at least 1 */
    ptrdiff_t space;             /* the product of the spatial dimensions, 1 for a matrix */
    ptrdiff_t groups;            /* divides channels; group norm only */
    const void *x;               /* [samples, channels, space] */
    ptrdiff_t x_stride;          /* of the samples of x; 0 is channels * space */
    const void *gain;            /* [channels] or NULL: 1 */
    const void *bias;            /* [channels] or NULL: 0 */
    const void *mean, *var;      /* [channels]; cnorm_batch_norm_inference only */
    double eps;                  /* at least 0, rounded to the compute type */
    void *y;                     /* [samples, channels, space]; may be x */
    ptrdiff_t y_stride;          /* of the samples of y; 0 is channels * space */
    void *stats;                 /* group norm [samples, groups, 3], batch norm [channels, 3], or NULL */
    double *moments;             /* [2, channels] or NULL: mean and biased variance; cnorm_batch_norm only */
    void *scratch;               /* cnorm_batch_norm_scratch(...) bytes, aligned to 8; not of group norm */
    int hints;                   /* the library's own, as in cnorm_norm */
} cnorm_volume_norm;

typedef struct cnorm_volume_norm_backward {
    ptrdiff_t samples, channels; /* as above */
    ptrdiff_t space;             /* as above */
    ptrdiff_t groups;            /* as above */
    const void *dy, *x;          /* [samples, channels, space] */
    ptrdiff_t dy_stride;         /* of the samples of dy; 0 is channels * space */
    ptrdiff_t x_stride;          /* of the samples of x; 0 is channels * space */
    const void *gain;            /* [channels] or NULL: 1 */
    const void *stats;           /* of the forward call; not of cnorm_batch_norm_inference_backward */
    const void *mean, *var;      /* [channels]; cnorm_batch_norm_inference_backward only */
    double eps;                  /* as above; cnorm_batch_norm_inference_backward only */
    void *dx;                    /* [samples, channels, space]; may be dy or x */
    ptrdiff_t dx_stride;         /* of the samples of dx; 0 is channels * space */
    void *dgain, *dbias;         /* [channels] */
    void *scratch;               /* as above; of group norm cnorm_backward_partials(dtype, samples, channels) bytes */
    int hints;                   /* the library's own, as in cnorm_norm */
} cnorm_volume_norm_backward;

/* Mean and variance over the channels of a group and their space, sample by sample. Instance normalisation is group
 * normalisation with as many groups as channels. */
cnorm_status cnorm_group_norm(cnorm_dtype dtype, const cnorm_volume_norm *call);
cnorm_status cnorm_group_norm_backward(cnorm_dtype dtype, const cnorm_volume_norm_backward *call);

/* Mean and variance of each channel over all samples and space, samples * space > 1 */
ptrdiff_t cnorm_batch_norm_scratch(cnorm_dtype dtype, ptrdiff_t samples, ptrdiff_t channels, ptrdiff_t space);
cnorm_status cnorm_batch_norm(cnorm_dtype dtype, const cnorm_volume_norm *call);
cnorm_status cnorm_batch_norm_backward(cnorm_dtype dtype, const cnorm_volume_norm_backward *call);

/* With a given mean and variance, as at inference */
cnorm_status cnorm_batch_norm_inference(cnorm_dtype dtype, const cnorm_volume_norm *call);
cnorm_status cnorm_batch_norm_inference_backward(cnorm_dtype dtype, const cnorm_volume_norm_backward *call);

/* ---- weight normalisation: v = g w / |w|, row by row ----------------------------------------------------------
 *
 * A row of zeros stays zeros and gets no gradient.
 */
typedef struct cnorm_weight {
    ptrdiff_t rows, n;    /* of dv, w and out; n is at least 1 */
    const void *dv;       /* [rows, n]: the gradient of v; backward only */
    const void *w;        /* [rows, n] */
    ptrdiff_t dv_stride;  /* of the rows of dv; 0 is n */
    ptrdiff_t w_stride;   /* of the rows of w; 0 is n */
    const void *gain;     /* [rows] or NULL: 1 */
    void *out;            /* [rows, n]: v, which may be w, or backward dw, which may be dv or w */
    ptrdiff_t out_stride; /* of the rows of out; 0 is n */
    void *dgain;          /* [rows]; backward only */
} cnorm_weight;

cnorm_status cnorm_weight_norm(cnorm_dtype dtype, const cnorm_weight *call);
cnorm_status cnorm_weight_norm_backward(cnorm_dtype dtype, const cnorm_weight *call);

/* ---- divisive normalisation -----------------------------------------------------------------------------------
 *
 * v = x - mean over a field, y = v / sqrt(sigma^2 + mean of v^2 over a field) * gain + bias. The field of element i is
 * the elements i - radius to i + radius of its row, cut off at its ends.
 */
typedef struct cnorm_divisive {
    ptrdiff_t rows, n;     /* of dy, x and out; n is at least 1 */
    ptrdiff_t mean_radius; /* of the field of the first mean */
    ptrdiff_t radius;      /* of the field of the second */
    const void *dy;        /* [rows, n]; backward only */
    const void *x;         /* [rows, n] */
    ptrdiff_t dy_stride;   /* of the rows of dy; 0 is n */
    ptrdiff_t x_stride;    /* of the rows of x; 0 is n */
    const void *gain;      /* [n] or NULL: 1 */
    const void *bias;      /* [n] or NULL: 0; forward only */
    double sigma;          /* at least 0, rounded to the dtype */
    void *out;             /* [rows, n]: y, which may be x, or backward dx, which may be dy or x */
    ptrdiff_t out_stride;  /* of the rows of out; 0 is n */
    void *dgain, *dbias;   /* [n]; backward only */
    double *dsigma;        /* one number; backward only */
    void *scratch;         /* cnorm_divisive_norm_scratch(n) bytes, aligned to 8 */
} cnorm_divisive;

ptrdiff_t cnorm_divisive_norm_scratch(ptrdiff_t n);
cnorm_status cnorm_divisive_norm(cnorm_dtype dtype, const cnorm_divisive *call);
cnorm_status cnorm_divisive_norm_backward(cnorm_dtype dtype, const cnorm_divisive *call);

/* ---- the smoothing term of layer normalisation ----------------------------------------------------------------
 *
 * With eps = s^2, *ds = the gradient with respect to s: -s times the sum over rows of rstd^2 sum dy gain xhat;
 * 0 if s = 0. Of the call dy, x, gain and stats are read.
 */
cnorm_status cnorm_smoothing_gradient(cnorm_dtype dtype, const cnorm_norm_backward *call, double s, double *ds);

#ifdef __cplusplus
}
#endif
#endif
