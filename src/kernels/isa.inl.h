/* Every kernel body, compiled for the instruction set of the file that includes this one.
 * That file has defined CNORM_ISA, its name, and checked that the compiler was asked for it. */
#include <math.h>

#include "../simd/vector.h"
#include "kernels.h"

enum { FOLD = 8192 }; /* elements after which lane sums are added to a float64 */

/* A sum of squares in [n Q_MIN, Q_MAX] has neither overflowed nor lost bits to subnormals. */
#define Q_MAX_F32 0x1p120
#define Q_MIN_F32 0x1p-90

/* the scale of a rescued row: float64 needs none for float32 data */
#define RESCUE_SCALE_F32(x, n, eps) ((void)(x), (void)(n), (void)(eps), 1.0)

/* and for float64 data the power of two that brings the larger of max|x| and sqrt(eps) near 1 */
INLINE double rescue_scale_f64(const double *x, ptrdiff_t n, double eps)
{
    double largest = 0;
    for (ptrdiff_t j = 0; j < n; ++j) {
        const double magnitude = fabs(x[j]);
        if (magnitude > largest) largest = magnitude;
    }
    int exponent = -1000, of_eps = -1000;
    if (largest > 0 && largest <= 0x1.fffffffffffffp1023) exponent = ilogb(largest);
    if (eps > 0) of_eps = ilogb(eps) / 2;
    if (of_eps > exponent) exponent = of_eps;
    return ldexp(1.0, exponent < -1000 ? 1000 : -exponent);
}

/* float64 first: the rescue of float32 rows sums in float64 */
#define T double
#define V f64v
#define VL VL_F64
#define LANES LANES_F64
#define FN(name) name##_f64
#define Q_MAX 0x1p1000
#define Q_MIN 0x1p-900
#define RSTD_MIN 0x1p-480 /* between these xhat and dx can be had without the float64 path */
#define RSTD_MAX 0x1p400
#define RSTD_TINY 0x1p-1022 /* the normal numbers */
#define RSTD_HUGE 0x1.fffffffffffffp1023
#define RESCUE_SCALE rescue_scale_f64
#include "layer_norm.inl.h"
#include "undefine_type.h"

#define T float
#define V f32v
#define VL VL_F32
#define LANES LANES_F32
#define FN(name) name##_f32
#define Q_MAX Q_MAX_F32
#define Q_MIN Q_MIN_F32
#define RSTD_MIN 0x1p-60f
#define RSTD_MAX 0x1p45f
#define RSTD_TINY 0x1p-126f
#define RSTD_HUGE 0x1.fffffep127f
#define RESCUE_SCALE RESCUE_SCALE_F32
#include "layer_norm.inl.h"
#include "undefine_type.h"

#include "activation.inl.h"
#include "cell.inl.h"

#define TABLE_OF(isa) cnorm_kernels_##isa
#define TABLE(isa) TABLE_OF(isa)
#define NAME_OF(isa) #isa
#define NAME(isa) NAME_OF(isa)

const cnorm_kernels TABLE(CNORM_ISA) = {
    .name = NAME(CNORM_ISA),
    .layer_norm = {[CNORM_F32] = layer_norm_f32, [CNORM_F64] = layer_norm_f64},
    .layer_norm_backward_block = {[CNORM_F32] = layer_norm_backward_block_f32,
                                  [CNORM_F64] = layer_norm_backward_block_f64},
    .add = {[CNORM_F32] = add_f32, [CNORM_F64] = add_f64},
    .sigmoid_f32 = sigmoid_f32,
    .tanh_f32 = tanh_f32,
    .activation_f32 = activation_f32,
    .linear_step = linear_step,
    .cell_inputs = cell_inputs,
    .cell_step = cell_step,
};
