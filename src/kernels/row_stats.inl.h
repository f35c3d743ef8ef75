/* (1) and (2) of layer_norm.inl.h: the statistics of a row from one or two sweeps, and the guard that accepts them. */

/* The guard: (mean - K)^2 <= var, both times n (squared_mean, m2), and Q has neither overflowed nor lost bits to
 * subnormals that matter beside eps. Comparisons with NaN are false, so NaN fails it. */
INLINE int FN(square_in_range)(double n, double Q, double eps)
{
    return (Q <= Q_MAX) & ((Q >= n * Q_MIN) | (eps >= Q_MIN));
}
INLINE int FN(accepted)(double n, double squared_mean, double m2, double Q, double eps)
{
    return (squared_mean <= m2) & FN(square_in_range)(n, Q, eps);
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

INLINE FN(stats) FN(stats_from)(double S, double Q, T K, ptrdiff_t n, double eps)
{
    const double count = (double)n, per = 1.0 / count;
    const double delta = S * per, m2 = Q - S * delta;
    return (FN(stats)){.st = {K, (T)delta},
                       .accepted = FN(accepted)(count, S * delta, m2, Q, eps),
                       .var_eps = m2 * per + eps,
                       .mean = (double)K + delta};
}

/* A copy member by member. A copy in one piece, after the members were stored one by one, fails store forwarding and
 * waits until those stores have reached the cache. */
INLINE FN(stats) FN(in_registers)(FN(stats) s)
{
    return (FN(stats)){.st = {s.st[0], s.st[1], s.st[2]}, .accepted = s.accepted, .var_eps = s.var_eps, .mean = s.mean};
}

/* (2): the sweep about the mean; the deviations [n] are stored in kept, if not NULL. Arguments are passed by value:
 * with a pointer to the caller's row, its members could not stay in registers there. */
static NOINLINE FN(stats) FN(shifted_stats)(const X *x, ptrdiff_t n, double eps, double mean, T *kept)
{
    const row_sums sums = FN(run_sums)(x, n, (T)mean, 0);
    for (ptrdiff_t j = 0; kept && j < n; j += VL) {
        const ptrdiff_t to = n - j < VL ? n - j : VL;
        FN(put_T)(kept + j, 0, to, FN(take)(x + j, 0, to) - TN(splat)((T)mean));
    }
    return FN(stats_from)(sums.a, sums.b, (T)mean, n, eps);
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

/* (1), and (2) if a row of layer norm fails the mean test. A row that is not accepted needs (3). w: see sweep. */
INLINE FN(stats) FN(stats_of)(FN(row) *row, double eps, const int mode, FN(writer) *w)
{
    double sums[2];
    const T K = FN(initial_shift)(row, mode);
    if (sizeof(X) < sizeof(T) && !(mode & (SUM | KEPT))) {
        const row_sums both = FN(run_sums)(row->x, row->n, K, row->lane_offset);
        sums[0] = both.a, sums[1] = both.b;
    } else if (K == 0 && !(mode & SUM)) {
        row->K = TN(splat)(0); /* without the subtraction a bfloat16 row takes 10 % less time (Zen 4, 2026-11-22) */
        FN(sweep)(row, mode, w, sums);
    } else {
        row->K = TN(splat)(K);
        FN(sweep)(row, mode, w, sums);
    }
    if (!(mode & CENTRED)) sums[0] = 0;
    FN(stats) stats = FN(stats_from)(sums[0], sums[1], K, row->n, eps);
    if (stats.accepted || !(mode & CENTRED) || !FN(square_in_range)((double)row->n, sums[1], eps)) return stats;
    if (mode & SUM && row->carry) FN(flush)(row->carry);
    const X *const x = mode & SUM ? row->sum : row->x;
    return FN(in_registers)(FN(shifted_stats)(x, row->n, eps, stats.mean, mode & KEPT ? row->kept : NULL));
}

/* The statistics st of layer norm of count <= ROWS_AT_ONCE contiguous rows x [count, n]; the result has a bit for
 * each row that needs (3). All rows are summed before any square root and division, so that the latencies of
 * different rows overlap; numbers go through memory one by one: see in_registers. */
static NOINLINE unsigned FN(rows_stats)(const X *x, ptrdiff_t n, ptrdiff_t count, double eps, T st[ROWS_AT_ONCE][3])
{
    double S[ROWS_AT_ONCE], Q[ROWS_AT_ONCE], var_eps[ROWS_AT_ONCE] = {0};
    unsigned refused = 0;
    for (ptrdiff_t i = 0; i < count; ++i) {
        FN(row) row = {.n = n, .x = x + i * n};
        double sums[2];
        st[i][0] = FN(initial_shift)(&row, CENTRED);
        row.K = TN(splat)(st[i][0]);
        FN(sweep)(&row, CENTRED, NULL, sums);
        S[i] = sums[0];
        Q[i] = sums[1];
    }
    for (ptrdiff_t i = 0; i < count; ++i) {
        FN(stats) stats = FN(stats_from)(S[i], Q[i], st[i][0], n, eps);
        if (!stats.accepted && FN(square_in_range)((double)n, Q[i], eps))
            stats = FN(shifted_stats)(x + i * n, n, eps, stats.mean, NULL);
        refused |= (unsigned)!stats.accepted << i;
        st[i][0] = stats.st[0];
        st[i][1] = stats.st[1];
        var_eps[i] = stats.var_eps;
    }
    for (ptrdiff_t i = 0; i < count; i += VL_F64) store_f64(var_eps + i, 1.0 / sqrt_f64(load_f64(var_eps + i)));
    for (ptrdiff_t i = 0; i < count; ++i) st[i][2] = (T)var_eps[i];
    return refused;
}
