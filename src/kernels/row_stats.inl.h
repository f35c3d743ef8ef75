/* (1) and (2) of layer_norm.inl.h: the statistics of a row and their guard. */

/* The guard of (1) and (2), written so that NaN fails it */
INLINE int FN(accepted)(double n, double mean_square, double m2, double Q, double eps)
{
    return (mean_square <= m2) & (Q <= Q_MAX) & ((Q >= n * Q_MIN) | (eps >= Q_MIN));
}

/* from var + eps */
INLINE T FN(rstd_of)(double square) { return (T)(1.0 / sqrt(square)); }

/* (1) or (2) with this K: stats = K, delta; *square = var + eps, whose root and quotient the caller may put off until there
 * is other work to wait behind. False, with the mean in *mean, where it is not accepted. */
INLINE int FN(stats_with)(const FN(row) *row, ptrdiff_t n, double eps, T K, const int centred, T *kept, ptrdiff_t lane_offset,
                          FN(writer) *w, const enum FN(origin) of, T stats[3], double *square, double *mean)
{
    const double count = (double)n, per = 1.0 / count;
    double S, Q;
    FN(sums)(row, n, K, centred, kept, lane_offset, w, of, &S, &Q);
    const double delta = S * per, m2 = Q - S * delta;
    *mean = (double)K + delta;
    if (!FN(accepted)(count, S * delta, m2, Q, eps)) return 0;
    stats[0] = K;
    stats[1] = (T)delta;
    *square = m2 * per + eps;
    return 1;
}

/* (2) */
static __attribute__((noinline)) int FN(shifted_stats)(const X *x, ptrdiff_t n, double eps, double mean, T *kept,
                                                       ptrdiff_t lane_offset, T stats[3], double *square)
{
    const FN(row) row = {.x = x};
    return FN(stats_with)(&row, n, eps, (T)mean, 1, kept, lane_offset, NULL, FN(PLAIN), stats, square, &mean);
}

/* (1): is there a K to begin with? */
INLINE int FN(initial_shift)(const FN(row) *row, ptrdiff_t n, const int centred, T *K)
{
    if (!centred || n < LANES) return 0;
    V lanes[LANE_VECTORS];
    for (int i = 0; i < LANE_VECTORS; ++i) lanes[i] = FN(row_load)(row, i * VL);
    if (!TN(one_sign)(lanes)) return 0;
    *K = TN(tree)(lanes) * ((T)1 / LANES) + 0; /* never -0: x - K is to be x where K = 0 */
    return 1;
}

/* (1) and (2): see stats_with; false where the row needs (3). kept, lane_offset, w and of: see lane_sums */
INLINE int FN(row_stats)(const FN(row) *row, ptrdiff_t n, double eps, const int centred, T *kept, ptrdiff_t lane_offset,
                         FN(writer) *w, const enum FN(origin) of, T stats[3], double *square)
{
    double mean, again_square;
    T K, again[3]; /* apart: what a function that is not in line may write to cannot stay in registers */
    if (FN(initial_shift)(row, n, centred, &K)) {
        if (FN(stats_with)(row, n, eps, K, 1, kept, lane_offset, of == FN(PLAIN) ? NULL : w, of, stats, square, &mean)) return 1;
    } else {
        if (FN(stats_with)(row, n, eps, 0, centred, kept, lane_offset, w, of, stats, square, &mean)) return 1;
        if (!centred) return 0;
    }
    const int accepted = FN(shifted_stats)(FN(stored_row)(row), n, eps, mean, kept, lane_offset, again, &again_square);
    stats[0] = again[0], stats[1] = again[1];
    *square = again_square;
    return accepted;
}

/* can the row do without the float64 path? written so that NaN can't */
INLINE int FN(rstd_in_range)(const T st[3]) { return st[2] >= RSTD_MIN && st[2] <= RSTD_MAX; }
