/* (1) and (2) of layer_norm.inl.h: the statistics of a row from one or two sweeps, and the guard that accepts them.
 * Included once per storage type X. */

/* The guard: (mean - K)^2 <= var, and Q has neither overflowed nor lost bits to subnormals. Comparisons with NaN are
 * false, so NaN fails it. */
INLINE int FN(accepted)(double n, double mean_square, double m2, double Q, double eps)
{
    return (mean_square <= m2) & (Q <= Q_MAX) & ((Q >= n * Q_MIN) | (eps >= Q_MIN));
}

INLINE T FN(rstd_of)(double var_eps) { return (T)(1.0 / sqrt(var_eps)); }

/* whether the backward pass can do without float64; false for NaN */
INLINE int FN(rstd_in_range)(const T st[3]) { return st[2] >= RSTD_MIN && st[2] <= RSTD_MAX; }

/* The statistics of a row: st = K, delta, rstd. The caller fills in rstd = rstd_of(var_eps), var_eps = var + eps, at a
 * place where other work hides the latency of square root and division. mean is the K of a second sweep, should the
 * guard refuse. */
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

/* A copy member by member. A copy in one piece, after the members were stored one by one, fails store forwarding and
 * waits until those stores have reached the cache. */
INLINE FN(stats) FN(in_registers)(FN(stats) s)
{
    return (FN(stats)){.st = {s.st[0], s.st[1], s.st[2]}, .accepted = s.accepted, .var_eps = s.var_eps, .mean = s.mean};
}

/* (2): the sweep about the mean. Arguments are passed by value: with a pointer to the caller's row, its members could
 * not stay in registers there. */
static NOINLINE FN(stats) FN(shifted_stats)(const X *x, ptrdiff_t n, double eps, double mean, T *kept, ptrdiff_t lane_offset)
{
    double sums[2];
    const FN(row) row = {.n = n, .lane_offset = lane_offset, .x = x, .kept = kept, .K = TN(splat)((T)mean)};
    if (kept) FN(sweep)(&row, CENTRED | KEPT, NULL, sums);
    else FN(sweep)(&row, CENTRED, NULL, sums);
    return FN(stats_from)(sums, (T)mean, n, eps);
}

/* The initial shift K: the mean of the first LANES elements if all have the same sign, else 0; 0 for shorter rows */
INLINE T FN(initial_shift)(const FN(row) *row, const int mode)
{
    V lanes[LANE_VECTORS];
    if (!(mode & CENTRED) || row->n < LANES) return 0;
    for (int i = 0; i < LANE_VECTORS; ++i) {
        lanes[i] = TN(keep)(FN(load)(row->x + i * VL));
        if (mode & SUM) lanes[i] = FN(rounded)(lanes[i] + FN(load)(row->residual + i * VL));
    }
    if (!TN(one_sign)(lanes)) return 0;
    return TN(tree)(lanes) * ((T)1 / LANES) + 0; /* + 0 turns -0 into 0, so that x - K is x where K = 0 */
}

/* (1) and, if the guard refuses and the mode is CENTRED, (2). A row that is still not accepted needs (3). w: see
 * sweep. */
INLINE FN(stats) FN(stats_of)(FN(row) *row, double eps, const int mode, FN(writer) *w)
{
    double sums[2];
    const T K = FN(initial_shift)(row, mode);
    if (!(mode & CENTRED) || (!(mode & SUM) && K == 0)) { /* no subtraction: saves 10 % of the time of a bfloat16 row */
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

/* the same for a row that is not kept, with rstd, and not inlined; false where the row needs (3) */
static NOINLINE int FN(row_stats)(const X *x, ptrdiff_t n, double eps, ptrdiff_t lane_offset, T st[3])
{
    FN(row) row = {.n = n, .lane_offset = lane_offset, .x = x};
    const FN(stats) stats = FN(stats_of)(&row, eps, CENTRED, NULL);
    for (int i = 0; i < 2; ++i) st[i] = stats.st[i];
    st[2] = FN(rstd_of)(stats.var_eps);
    return stats.accepted;
}
