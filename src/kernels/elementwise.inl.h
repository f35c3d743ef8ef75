/* The layer `activation`, forward and backward: loops over the functions of activation.inl.h and functions.inl.h, and
 * softmax over a frame: y = exp(x - m) / sum exp(x - m), m = max x, in float64, summed in virtual lanes and rounded
 * once; dx = y (dy - sum dy y). */

#define FUNCTIONS(X)                                                                                                   \
    X(ELU, elu(is, v))                                                                                                 \
    X(SELU, selu(v))                                                                                                   \
    X(SILU, silu(v))                                                                                                   \
    X(GELU, gelu(v))                                                                                                   \
    X(GELU_TANH, gelu_tanh(v))                                                                                         \
    X(LEAKY_RELU, leaky_relu(is, v))                                                                                   \
    X(SOFTPLUS, softplus(v))                                                                                           \
    X(HARD_SIGMOID, hard_sigmoid(is, v))                                                                               \
    X(HARD_SWISH, hard_swish(v))                                                                                       \
    X(LOG, logarithm(is, v))                                                                                           \
    X(EXP, exponential(v))                                                                                             \
    X(SQRT, square_root(v))                                                                                            \
    X(SQUARE, square(v))                                                                                               \
    X(ABS, magnitude(v))                                                                                               \
    X(CLIP, clipping(is, v))                                                                                           \
    X(SIN, sine(v, 0))                                                                                                 \
    X(COS, sine(v, 1))

/* exp(x - m) of the elements from i on, those beyond n are 0: the lower or upper half of a vector */
INLINE void exponentials(ptrdiff_t i, ptrdiff_t n, const float *x, double m, f64v e[2])
{
    const f32v v = load_first_f32(x + i, n - i);
    e[0] = only_f64(exp_v(within(widen_lo(v) - m, -150, 0)), 0, n - i < VL_F64 ? n - i : VL_F64);
    const ptrdiff_t rest = n - i - VL_F64 > 0 ? n - i - VL_F64 : 0;
    e[1] = only_f64(exp_v(within(widen_hi(v) - m, -150, 0)), 0, rest < VL_F64 ? rest : VL_F64);
}

/* the largest of x [n]; NaN if one is NaN */
INLINE double largest(ptrdiff_t n, const float *x)
{
    float m = x[0];
    for (ptrdiff_t i = 1; i < n; ++i) m = x[i] > m || x[i] != x[i] ? x[i] : m;
    return (double)m;
}

/* sums[0]: exp(x - m); sums[1], with dy: dy exp(x - m) */
static void softmax_sums(ptrdiff_t n, const float *x, const float *dy, double m, double sums[2])
{
    f64v lanes[2][LANE_VECTORS] = {{{0}}};
    for (ptrdiff_t i = 0; i < n; i += LANES_F64)
        for (int k = 0; k < LANE_VECTORS && i + k * VL_F64 < n; k += 2) {
            const ptrdiff_t at = i + k * VL_F64;
            f64v e[2];
            exponentials(at, n, x, m, e);
            lanes[0][k] += e[0], lanes[0][k + 1] += e[1];
            if (!dy) continue;
            const f32v d = load_first_f32(dy + at, n - at);
            lanes[1][k] += e[0] * widen_lo(d), lanes[1][k + 1] += e[1] * widen_hi(d);
        }
    sums[0] = tree_f64(lanes[0]), sums[1] = tree_f64(lanes[1]);
}

/* y, or with dy dx */
static void softmax(ptrdiff_t n, const float *x, const float *dy, float *to)
{
    const double m = largest(n, x);
    double sums[2];
    softmax_sums(n, x, dy, m, sums);
    const double mean = sums[1] / sums[0];
    for (ptrdiff_t i = 0; i < n; i += VL_F32) {
        f64v e[2];
        exponentials(i, n, x, m, e);
        f64v lo = e[0] / sums[0], hi = e[1] / sums[0];
        if (dy) {
            const f32v d = load_first_f32(dy + i, n - i);
            lo *= widen_lo(d) - mean, hi *= widen_hi(d) - mean;
        }
        store_first_f32(to + i, n - i, narrow(lo, hi));
    }
}

/* to [n] = f(x), or with dy f'(x) dy; `backward`, a constant, says which */
INLINE void each_element(const cnorm_elementwise *is, const float *x, const float *dy, float *to, int backward)
{
    const ptrdiff_t n = is->n;
    switch (is->f) {
    case CNORM_ACTIVATION_SOFTMAX: softmax(n, x, dy, to); return;
#define CASE(NAME, function)                                                                                           \
    case CNORM_ACTIVATION_##NAME:                                                                                      \
        for (ptrdiff_t i = 0; i < n; i += VL_F32) {                                                                    \
            const f32v of_x = load_first_f32(x + i, n - i), d = backward ? load_first_f32(dy + i, n - i) : of_x;       \
            f64v half[2] = {widen_lo(of_x), widen_hi(of_x)};                                                           \
            EACH(k, 2) {                                                                                               \
                const f64v v = half[k];                                                                                \
                half[k] = backward ? (function).slope * (k ? widen_hi(d) : widen_lo(d)) : (function).y;                \
            }                                                                                                          \
            store_first_f32(to + i, n - i, narrow(half[0], half[1]));                                                  \
        }                                                                                                              \
        return;
        FUNCTIONS(CASE)
#undef CASE
    default: break;
    }
    for (ptrdiff_t i = 0; i < n; i += VL_F32) {
        const f32v v = load_first_f32(x + i, n - i);
        const f32v y = backward ? activation_backward(is->f, v, load_first_f32(dy + i, n - i)) : activated(is->f, v);
        store_first_f32(to + i, n - i, y);
    }
}

/* sqrt(x) and x^2 need no float64 to be rounded once */
static void root_or_square(const cnorm_elementwise *is, const float *x, float *y)
{
    for (ptrdiff_t i = 0; i < is->n; i += VL_F32) {
        const f32v v = load_first_f32(x + i, is->n - i);
        store_first_f32(y + i, is->n - i, is->f == CNORM_ACTIVATION_SQRT ? sqrt_f32(v) : v * v);
    }
}

static void activation_f32(const cnorm_elementwise *is, const float *x, float *y)
{
    if (is->f == CNORM_ACTIVATION_TANH) tanh_f32(is->n, x, y);
    else if (is->f == CNORM_ACTIVATION_SIGMOID) sigmoid_f32(is->n, x, y);
    else if (is->f == CNORM_ACTIVATION_SQRT || is->f == CNORM_ACTIVATION_SQUARE) root_or_square(is, x, y);
    else each_element(is, x, NULL, y, 0);
}
static void activation_backward_f32(const cnorm_elementwise *is, const float *x, const float *dy, float *dx)
{
    each_element(is, x, dy, dx, 1);
}

#undef FUNCTIONS
