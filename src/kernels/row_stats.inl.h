/* (1) and (2) of layer_norm.inl.h: the statistics of a row from one sweep, or two, and the guard that accepts them. Included
 * once per storage type X. */

/* The guard, written so that NaN fails it: (mean - K)^2 <= var, and Q has neither overflowed nor drowned in subnormals. */
INLINE int FN(accepted)(double n, double mean_square, double m2, double Q, double eps)
{
    return (mean_square <= m2) & (Q <= Q_MAX) & ((Q >= n * Q_MIN) | (eps >= Q_MIN));
}

INLINE T FN(rstd_of)(double var_eps) { return (T)(1.0 / sqrt(var_eps)); }

/* can the backward pass do without float64? written so that NaN can't */
INLINE int FN(rstd_in_range)(const T st[3]) { return st[2] >= RSTD_MIN && st[2] <= RSTD_MAX; }

/* What is known of a row: st = K, delta and, when the caller gets to it, rstd of var_eps = var + eps, whose root and quotient
 * wait until there is other work beside them. Where the guard refuses, mean is K for another sweep. */
typedef struct {
    T st[3];
    int accepted;
    double var_eps, mean;
} FN(stats);

INLINE FN(stats) FN(stats_from)(const double sums[2], T K, ptrdiff_t n, double eps)
{
    const double count = (double)n, per = 1.0 / count, S = sums[0], Q = sums[1];
    const double delta = S * per, m2 = Q - S * delta;
    return (FN(stats)){.st = {K, (T)delta}, .accepted = FN(accepted)(count, S * delta, m2, Q, eps), .var_eps = m2 * per + eps,
                       .mean = (double)K + delta};
}

/* A copy, one by one: one as a whole would wait until each of these is in the cache. */
INLINE FN(stats) FN(in_registers)(FN(stats) s)
{
    return (FN(stats)){.st = {s.st[0], s.st[1], s.st[2]}, .accepted = s.accepted, .var_eps = s.var_eps, .mean = s.mean};
}

/* (2): the sweep about the mean. Arguments are values: what a function that is not in line may write to cannot stay in
 * registers. */
static NOINLINE FN(stats) FN(shifted_stats)(const X *x, ptrdiff_t n, double eps, double mean, T *kept, ptrdiff_t lane_offset)
{
    double sums[2];
    const FN(row) row = {.n = n, .lane_offset = lane_offset, .x = x, .kept = kept, .K = TN(splat)((T)mean)};
    if (kept) FN(sweep)(&row, CENTRED | KEPT, NULL, sums);
    else FN(sweep)(&row, CENTRED, NULL, sums);
    return FN(stats_from)(sums, (T)mean, n, eps);
}

/* The initial shift K: the mean of the first LANES elements, if they have one sign, else 0 */
INLINE T FN(initial_shift)(const FN(row) *row, const int mode)
{
    V lanes[LANE_VECTORS];
    if (!(mode & CENTRED) || row->n < LANES) return 0;
    for (int i = 0; i < LANE_VECTORS; ++i) {
        lanes[i] = TN(keep)(FN(load)(row->x + i * VL));
        if (mode & SUM) lanes[i] = FN(rounded)(lanes[i] + FN(load)(row->residual + i * VL));
    }
    if (!TN(one_sign)(lanes)) return 0;
    return TN(tree)(lanes) * ((T)1 / LANES) + 0; /* + 0: never -0, x - K is to be x where K = 0 */
}

/* (1) and (2); a row that is not accepted needs (3). w: see sweep */
INLINE FN(stats) FN(stats_of)(FN(row) *row, double eps, const int mode, FN(writer) *w)
{
    double sums[2];
    const T K = FN(initial_shift)(row, mode);
    if (!(mode & CENTRED) || (!(mode & SUM) && K == 0)) { /* a subtraction less: 10 % of a bfloat16 row */
        row->K = TN(splat)(0);
        FN(sweep)(row, mode, w, sums);
    } else {
        row->K = TN(splat)(K);
        FN(sweep)(row, mode, w, sums);
    }
    FN(stats) stats = FN(stats_from)(sums, K, row->n, eps);
    if (stats.accepted || !(mode & CENTRED)) return stats;
    if (mode & SUM && row->carry) FN(flush)(row->carry);
    const X *const x = mode & SUM ? row->sum : row->x;
    return FN(in_registers)(FN(shifted_stats)(x, row->n, eps, stats.mean, mode & KEPT ? row->kept : NULL, row->lane_offset));
}

/* the same for a row that is not kept, compiled once; false where it needs (3) */
static NOINLINE int FN(row_stats)(const X *x, ptrdiff_t n, double eps, ptrdiff_t lane_offset, T st[3])
{
    FN(row) row = {.n = n, .lane_offset = lane_offset, .x = x};
    const FN(stats) stats = FN(stats_of)(&row, eps, CENTRED, NULL);
    for (int i = 0; i < 2; ++i) st[i] = stats.st[i];
    st[2] = FN(rstd_of)(stats.var_eps);
    return stats.accepted;
}
