/* Every kernel body, compiled for the instruction set of the file that includes this one.
 * That file defines CNORM_ISA, its name, and checks that the compiler flags enable it. Bodies include nothing: they are
 * included here, in the order in which they call one another. */
#include <math.h>

#include "../checks.h"
#include "../cpu.h"
#include "../int8/backends.h"
#include "../simd/storage.h"
#include "backward.h"
#include "tuning.h"

#include "wide.inl.h"
#include "view_float64.inl.h"
#include "row_float64.inl.h"
#include "group_float64.inl.h"
#include "batch_float64.inl.h"
#include "weight_float64.inl.h"
#include "field_sums.inl.h"

/* lanes of a vector of T, and its virtual lanes */
#define VL (VECTOR_BYTES / (int)sizeof(T))
#define LANES (VL * LANE_VECTORS)

/* For rstd in [RSTD_MIN, RSTD_MAX] xhat and dx are computed without the float64 path. */
#define T double
#define V f64v
#define TN(name) name##_f64
#define Q_MAX 0x1p1000
#define Q_MIN 0x1p-900
#define RSTD_MIN 0x1p-480
#define RSTD_MAX 0x1p400
#define SUM_MAX 0x1p960 /* larger sums go to the float64 path; x + SUM_MAX == x for the largest x of T */
#include "arrays.inl.h"
#define X double
#define DTYPE CNORM_F64
#define FN(name) name##_f64
#include "norms.inl.h"
#undef T
#undef V
#undef TN
#undef Q_MAX
#undef Q_MIN
#undef RSTD_MIN
#undef RSTD_MAX
#undef SUM_MAX

#define T float
#define V f32v
#define TN(name) name##_f32
#define Q_MAX Q_MAX_F32
#define Q_MIN Q_MIN_F32
#define RSTD_MIN 0x1p-60f
#define RSTD_MAX 0x1p45f
#define SUM_MAX 0x1p100
#include "arrays.inl.h"
#define X float
#define DTYPE CNORM_F32
#define FN(name) name##_f32
#include "norms.inl.h"
#define HALF_TYPE
#define X uint16_t
#define DTYPE CNORM_F16
#define FN(name) name##_f16
#include "norms.inl.h"
#define X uint16_t
#define DTYPE CNORM_BF16
#define FN(name) name##_bf16
#include "norms.inl.h"

#include "activation.inl.h"
#include "functions.inl.h"
#include "elementwise.inl.h"
#include "matvec_int8.inl.h"
#include "matvec.inl.h"
#include "matmul.inl.h"
#include "product_float64.inl.h"
#include "product_backward.inl.h"
#include "outer_product.inl.h"
#include "cell_functions.inl.h"
#include "cell_gates.inl.h"
#include "cell.inl.h"
#include "frame_product.inl.h"
#include "positions.inl.h"
#include "cell_scan.inl.h"
#include "frame_layers.inl.h"
#include "scope_backward.inl.h"
#include "cell_backward.inl.h"
#include "depthwise.inl.h"

/* Whether fma_f32 rounds once, and this code was compiled without contraction to FMA and without reassociation: false
 * where an embedder's flags, such as clang's -ffp-contract=fast, override the pragmas of vector.h. dispatch.c then does
 * not use it. */
static int arithmetic_is_exact(void)
{
    volatile float given[3] = {1 + 0x1p-12f, 0x1p30f, 1}; /* volatile: not computed by the compiler */
    const f32v a = splat_f32(given[0]), x = splat_f32(given[1]), y = splat_f32(given[2]);
    const f32v fused = a * a - (1 + 0x1p-11f), reassociated = (x + y) - x; /* 0 if every operation is rounded */
    const f32v once = fma_f32(a, a, splat_f32(-(1 + 0x1p-11f)));
    const double b = (double)given[0] + 0x1p-30 * (double)given[2], w = 0x1p60 * (double)given[2];
    const double fused64 = b * b - (1 + 0x1p-11 + 0x1p-24 + 0x1p-29 + 0x1p-41), reassociated64 = (w + b) - w;
    return once[0] == 0x1p-24f && fused[0] == 0 && reassociated[0] == 0 && fused64 == 0 && reassociated64 == 0;
}

#define TABLE_OF(isa) cnorm_kernels_##isa
#define TABLE(isa) TABLE_OF(isa)
#define NAME_OF(isa) #isa
#define NAME(isa) NAME_OF(isa)

#define WHOLE(name) [CNORM_F32] = name##_f32, [CNORM_F64] = name##_f64
#define HALF(name) [CNORM_F16] = name##_f16, [CNORM_BF16] = name##_bf16
#define ALL(name) WHOLE(name), HALF(name)
/* without designators: amalgamate.py renames the functions, and would rename the members */
#define KERNEL(name, call, dtypes) {dtypes(name)},
#define FUNCTION(name, arguments) name,

const cnorm_kernels TABLE(CNORM_ISA) = {
    NAME(CNORM_ISA),
    arithmetic_is_exact,
#include "kernels.inc"
};
