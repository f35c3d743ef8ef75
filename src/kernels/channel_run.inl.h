/* A channel's run: the `space` elements of one channel in one sample, which share one gain and one bias. This file
 * has the operations on it that group, batch and weight norm share. Equations are those of layer_norm.inl.h. */

typedef struct {
    ptrdiff_t n;
    const X *dy, *x; /* [n]; dy: backward only */
    X *out;          /* [n]: y or dx */
    const T *st;     /* K, delta, rstd */
} FN(run);

/* (4): y = ((x - K) - delta) rstd gain + bias. With carry (non-temporal stores) vectors of y are
 * aligned, and the first may begin before the run. */
static NOINLINE void FN(normalise_run)(const FN(run) *run, T gain, T bias, FN(carry) *carry)
{
    const V K = TN(splat)(run->st[0]), delta = TN(splat)(run->st[1]), rstd = TN(splat)(run->st[2]);
    const V g = TN(splat)(gain), b = TN(splat)(bias);
    /* Copies: the compiler must assume that a store may change *run. */
    const X *x = run->x;
    X *y = run->out;
    const ptrdiff_t n = run->n;
    const ptrdiff_t lane_offset = carry ? FN(lane_offset_of)(y) : 0;
    ptrdiff_t from = lane_offset, j = -lane_offset;
    if (!carry)
        for (; j + VL <= n; j += VL) FN(store)(y + j, ((FN(load)(x + j) - K) - delta) * rstd * g + b);
    for (; j < n; j += VL, from = 0) {
        const ptrdiff_t to = n - j < VL ? n - j : VL;
        FN(put)(y + j, from, to, ((FN(take)(x + j, from, to) - K) - delta) * rstd * g + b, carry);
    }
}

/* (5): A = sum g and B = sum g xhat over the run, g = dy gain; gain [n] or NULL. Summed again in
 * float64 if a sum overflows. */
static NOINLINE void FN(run_gradient_sums)(const FN(run) *run, const T *gain, double *A, double *B)
{
    row_sums sums = FN(gradient_sums)(run->x, run->dy, gain, run->n, run->st);
    *A = sums.a; /* as a struct, GCC would copy them in one piece: see in_registers */
    *B = sums.b;
    if (fabs(*A) <= SUM_MAX && fabs(*B) <= SUM_MAX) return;
    const double rstd = (double)run->st[2];
    const f64_stats e = {1, (double)run->st[0], (double)run->st[1], rstd, rstd};
    sums = f64_gradient_sums(DTYPE, run->dy, run->x, run->n, gain, &e);
    *A = sums.a;
    *B = sums.b;
}

/* (6) for a vector of dy and of x */
INLINE V FN(run_gradient)(const T st[3], V gain, V G, V H, V dy, V x)
{
    const V rstd = TN(splat)(st[2]), xhat = ((x - TN(splat)(st[0])) - TN(splat)(st[1])) * rstd;
    return rstd * ((dy * gain - G) - xhat * H);
}

/* (6): dx = rstd ((dy gain - G) - xhat H) */
static NOINLINE void FN(gradient_run)(const FN(run) *run, T gain, T mean_g, T mean_gx, FN(carry) *carry)
{
    const V g = TN(splat)(gain), G = TN(splat)(mean_g), H = TN(splat)(mean_gx);
    const T st[3] = {run->st[0], run->st[1], run->st[2]}; /* copies, as above */
    const X *x = run->x, *dy = run->dy;
    X *dx = run->out;
    const ptrdiff_t n = run->n;
    ptrdiff_t j = carry ? -FN(lane_offset_of)(dx) : 0;
    if (!carry)
        for (; j + VL <= n; j += VL)
            FN(store)(dx + j, FN(run_gradient)(st, g, G, H, FN(load)(dy + j), FN(load)(x + j)));
    for (; j < n; j += VL) {
        const ptrdiff_t from = j < 0 ? -j : 0, to = n - j < VL ? n - j : VL;
        const V v = FN(run_gradient)(st, g, G, H, FN(take)(dy + j, from, to), FN(take)(x + j, from, to));
        FN(put)(dx + j, from, to, v, carry);
    }
}
