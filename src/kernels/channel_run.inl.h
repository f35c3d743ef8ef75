/* A channel's run: the `space` elements of one channel in one sample, which share one gain and one bias. What group,
 * batch and weight norm do with it; the numbers of equations are those of layer_norm.inl.h. */

typedef struct {
    ptrdiff_t n;
    const X *dy, *x; /* [n]; dy: backward only */
    X *out;          /* [n]: y or dx */
    const T *st;     /* K, delta, rstd */
} FN(run);

/* lanes from <= i < to of the vector at p, which may be all of them */
INLINE V FN(load_some)(const X *p, ptrdiff_t from, ptrdiff_t to)
{
    return to - from == VL ? FN(load)(p) : FN(load_range)(p, from, to, TN(splat)(0));
}

/* the same of output; carry is NULL unless it is streamed */
INLINE void FN(put_some)(X *p, ptrdiff_t from, ptrdiff_t to, V v, FN(carry) *carry)
{
    if (to - from < VL) FN(put_range)(p, from, to, v, carry);
    else if (carry) FN(stream)(p, v);
    else FN(store)(p, v);
}

/* (4): y = ((x - K) - delta) rstd gain + bias. Streamed vectors are aligned and begin before the run. */
INLINE void FN(normalise_run)(const FN(run) *run, T gain, T bias, FN(carry) *carry)
{
    const V K = TN(splat)(run->st[0]), delta = TN(splat)(run->st[1]), rstd = TN(splat)(run->st[2]);
    const V g = TN(splat)(gain), b = TN(splat)(bias);
    for (ptrdiff_t j = carry ? -FN(lane_offset_of)(run->out) : 0; j < run->n; j += VL) {
        const ptrdiff_t from = j < 0 ? -j : 0, to = run->n - j < VL ? run->n - j : VL;
        const V x = FN(load_some)(run->x + j, from, to);
        FN(put_some)(run->out + j, from, to, ((x - K) - delta) * rstd * g + b, carry);
    }
}

RARE void FN(f64_gradient_sums)(const FN(run) *run, const T *gain, double *A, double *B)
{
    const T *st = run->st;
    *A = *B = 0;
    for (ptrdiff_t j = 0; j < run->n; ++j) {
        const double g = (double)FN(value)(run->dy[j]) * (gain ? (double)gain[j] : 1.0);
        *A += g;
        *B += g * ((((double)FN(value)(run->x[j]) - (double)st[0]) - (double)st[1]) * (double)st[2]);
    }
}

/* one vector's terms of A and B: lanes from 0 to `left` at j, of which missing dy are zero, and with them both terms */
INLINE void FN(add_gradient_terms)(const FN(run) *run, const T *gain, ptrdiff_t j, ptrdiff_t left, V *a, V *b)
{
    const T *st = run->st;
    const V zero = TN(splat)(0), K = TN(splat)(st[0]), delta = TN(splat)(st[1]), rstd = TN(splat)(st[2]);
    V g = FN(load_some)(run->dy + j, 0, left);
    if (gain) g *= left == VL ? TN(load)(gain + j) : TN(load_range)(gain + j, 0, left, zero);
    const V x = left == VL ? FN(load)(run->x + j) : FN(load_range)(run->x + j, 0, left, K);
    *a += g;
    *b += g * (((x - K) - delta) * rstd);
}

/* A = sum g and B = sum g xhat over a run of at most FOLD elements from `start`, g = dy gain, in virtual lanes */
INLINE void FN(fold_gradient_sums)(const FN(run) *run, const T *gain, ptrdiff_t start, V a[LANE_VECTORS], V b[LANE_VECTORS])
{
    const ptrdiff_t len = run->n - start < FOLD ? run->n - start : FOLD, whole = len / LANES * LANES;
#pragma GCC unroll 2
    for (int first = 0; first < LANE_VECTORS; first += PASS) {
        const ptrdiff_t base = start + first * VL;
        V ap[PASS], bp[PASS];
#pragma GCC unroll 4
        for (int i = 0; i < PASS; ++i) ap[i] = bp[i] = TN(splat)(0);
        for (ptrdiff_t j = base; j < base + whole; j += LANES) {
#pragma GCC unroll 4
            for (int i = 0; i < PASS; ++i) FN(add_gradient_terms)(run, gain, j + i * VL, VL, &ap[i], &bp[i]);
        }
#pragma GCC unroll 4
        for (int i = 0; i < PASS; ++i) {
            const ptrdiff_t at = base + whole + i * VL, left = start + len - at < VL ? start + len - at : VL;
            if (left > 0) FN(add_gradient_terms)(run, gain, at, left, &ap[i], &bp[i]);
            a[first + i] = ap[i];
            b[first + i] = bp[i];
        }
    }
}

/* (5): A = sum g and B = sum g xhat over the run, g = dy gain; gain [n] or NULL. In float64 if a sum overflows. */
static __attribute__((noinline)) void FN(gradient_sums)(const FN(run) *run, const T *gain, double *A, double *B)
{
    *A = *B = 0;
    for (ptrdiff_t start = 0; start < run->n; start += FOLD) {
        V a[LANE_VECTORS], b[LANE_VECTORS];
        FN(fold_gradient_sums)(run, gain, start, a, b);
        *A += (double)TN(tree)(a);
        *B += (double)TN(tree)(b);
    }
    if (!(fabs(*A) <= SUM_MAX && fabs(*B) <= SUM_MAX)) FN(f64_gradient_sums)(run, gain, A, B);
}

/* (6): dx = rstd ((dy gain - G) - xhat H) */
INLINE void FN(gradient_run)(const FN(run) *run, T gain, T mean_g, T mean_gx, FN(carry) *carry)
{
    const V K = TN(splat)(run->st[0]), delta = TN(splat)(run->st[1]), rstd = TN(splat)(run->st[2]);
    const V g = TN(splat)(gain), G = TN(splat)(mean_g), H = TN(splat)(mean_gx);
    for (ptrdiff_t j = carry ? -FN(lane_offset_of)(run->out) : 0; j < run->n; j += VL) {
        const ptrdiff_t from = j < 0 ? -j : 0, to = run->n - j < VL ? run->n - j : VL;
        const V x = FN(load_some)(run->x + j, from, to), dy = FN(load_some)(run->dy + j, from, to);
        FN(put_some)(run->out + j, from, to, rstd * ((dy * g - G) - ((x - K) - delta) * rstd * H), carry);
    }
}
