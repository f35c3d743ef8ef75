/* Divisive normalisation of rows x [n] (Ren, Liao, Urtasun, Sinz, Zemel 2016, arXiv:1611.04520), and the gradient for
 * its smoothing term sigma, which layer normalisation has too. The fields of a place are its neighbours within a
 * radius, A for the mean and B for the deviation, cut off at the ends of the row:
 *
 *   v_i = x_i - mean of x over A_i      s_i = sqrt(sigma^2 + mean of v^2 over B_i)
 *   z_i = v_i / s_i, or 0 where s_i = 0      y_i = z_i gain_i + bias_i
 *
 * Backward, with g = dy gain (j is in B_i just when i is in B_j):
 *   dv_i = g_i/s_i - v_i sum over B_i of g z / (s^2 |B|)      dx_i = dv_i - sum over A_i of dv / |A|
 *   dsigma = -sigma sum g z / s^2      dgain = sum over rows of dy z      dbias = sum over rows of dy
 *
 * All in float64 and rounded once. A sum over a field is the end of one block of a field's length and the beginning of
 * the next: two running sums added and none subtracted, so that no number leaves a trace outside its fields. Sums
 * carry their rounding errors along, so that a mean far above the deviation costs nothing.
 */

/* sum + error = a + b exactly (Knuth 1969) */
INLINE double FN(two_sum)(double a, double b, double *error)
{
    const double sum = a + b, part = sum - a;
    *error += (a - (sum - part)) + (b - part);
    return sum;
}

INLINE ptrdiff_t FN(field_begin)(ptrdiff_t i, ptrdiff_t radius) { return i > radius ? i - radius : 0; }
INLINE ptrdiff_t FN(field_end)(ptrdiff_t n, ptrdiff_t i, ptrdiff_t radius) { return n - i > radius ? i + radius : n - 1; }
INLINE double FN(field_size)(ptrdiff_t n, ptrdiff_t i, ptrdiff_t radius)
{
    return (double)(FN(field_end)(n, i, radius) - FN(field_begin)(i, radius) + 1);
}

/* sum + error [n] = the sums of a [n] over the fields of each place; work [4, n] */
static void FN(field_sums)(ptrdiff_t n, ptrdiff_t radius, const double *a, double *sum, double *error, double *work)
{
    const ptrdiff_t length = 2 * radius + 1;
    double *begin = work, *begin_error = work + n, *end = work + 2 * n, *end_error = work + 3 * n;
    for (ptrdiff_t first = 0; first < n; first += length) {
        const ptrdiff_t last = n - first < length ? n - 1 : first + length - 1;
        double s = 0, e = 0;
        for (ptrdiff_t i = first; i <= last; ++i) {
            s = FN(two_sum)(s, a[i], &e);
            begin[i] = s;
            begin_error[i] = e;
        }
        s = e = 0;
        for (ptrdiff_t i = last; i >= first; --i) {
            s = FN(two_sum)(s, a[i], &e);
            end[i] = s;
            end_error[i] = e;
        }
    }
    for (ptrdiff_t i = 0; i < n; ++i) {
        const ptrdiff_t from = FN(field_begin)(i, radius), to = FN(field_end)(n, i, radius);
        if (from % length == 0) { /* a whole block, or what the front of the row leaves of it */
            sum[i] = begin[to];
            error[i] = begin_error[to];
        } else if (from / length == to / length) { /* cut off by the end of the row */
            sum[i] = end[from];
            error[i] = end_error[from];
        } else {
            error[i] = end_error[from] + begin_error[to];
            sum[i] = FN(two_sum)(end[from], begin[to], &error[i]);
        }
    }
}

/* v and 1/s [n] in units of 1/scale, which is returned; work [6, n] */
static double FN(divisive_parts)(ptrdiff_t n, ptrdiff_t mean_radius, ptrdiff_t radius, const T *x, double sigma,
                                 double *v, double *inverse, double *work)
{
    double *sum = work, *error = work + n, scale = RESCUE_SCALE(x, n, 0.0);
    if (sigma > 0 && scale * sigma > 2) scale = ldexp(1.0, -ilogb(sigma));
    for (ptrdiff_t i = 0; i < n; ++i) v[i] = (double)x[i] * scale;
    FN(field_sums)(n, mean_radius, v, sum, error, work + 2 * n);
    for (ptrdiff_t i = 0; i < n; ++i) {
        const double size = FN(field_size)(n, i, mean_radius), mean = (sum[i] + error[i]) / size;
        /* the upper half of the mean's bits, whose product with the size is exact */
        const double up = mean * 0x1.0000002p27, upper = up - (up - mean);
        v[i] = (v[i] - upper) - ((sum[i] - upper * size) + error[i]) / size;
    }
    for (ptrdiff_t i = 0; i < n; ++i) inverse[i] = v[i] * v[i];
    FN(field_sums)(n, radius, inverse, sum, error, work + 2 * n);
    for (ptrdiff_t i = 0; i < n; ++i) {
        const double var = (sigma * scale) * (sigma * scale) + (sum[i] + error[i]) / FN(field_size)(n, i, radius);
        inverse[i] = var == 0 ? 0 : 1.0 / sqrt(var);
    }
    return scale;
}

/* scratch [8, n] doubles */
static void FN(divisive_norm)(ptrdiff_t rows, ptrdiff_t n, ptrdiff_t mean_radius, ptrdiff_t radius, const void *px,
                              ptrdiff_t x_stride, const void *pgain, const void *pbias, double sigma, void *py,
                              ptrdiff_t y_stride, double *scratch)
{
    const T *x = px, *gain = pgain, *bias = pbias;
    T *y = py;
    double *v = scratch, *inverse = scratch + n;
    for (ptrdiff_t row = 0; row < rows; ++row, x += x_stride, y += y_stride) {
        FN(divisive_parts)(n, mean_radius, radius, x, sigma, v, inverse, scratch + 2 * n);
        for (ptrdiff_t i = 0; i < n; ++i) {
            double z = v[i] * inverse[i];
            if (gain) z *= (double)gain[i];
            if (bias) z += (double)bias[i];
            y[i] = (T)z;
        }
    }
}

/* scratch [11, n] doubles */
static void FN(divisive_norm_backward)(ptrdiff_t rows, ptrdiff_t n, ptrdiff_t mean_radius, ptrdiff_t radius,
                                       const void *pdy, ptrdiff_t dy_stride, const void *px, ptrdiff_t x_stride,
                                       const void *pgain, double sigma, void *pdx, ptrdiff_t dx_stride, void *pdgain,
                                       void *pdbias, double *dsigma, double *scratch)
{
    const T *dy = pdy, *x = px, *gain = pgain;
    T *dx = pdx;
    double *v = scratch, *inverse = scratch + n, *terms = scratch + 2 * n, *dgain = scratch + 3 * n,
           *dbias = scratch + 4 * n, *sum = scratch + 5 * n, *error = scratch + 6 * n, *work = scratch + 7 * n;
    memset(dgain, 0, 2 * (size_t)n * sizeof(double));
    *dsigma = 0;
    for (ptrdiff_t row = 0; row < rows; ++row, dy += dy_stride, x += x_stride, dx += dx_stride) {
        const double scale = FN(divisive_parts)(n, mean_radius, radius, x, sigma, v, inverse, sum);
        double of_sigma = 0;
        for (ptrdiff_t i = 0; i < n; ++i) {
            const double z = v[i] * inverse[i], g = (double)dy[i] * (gain ? (double)gain[i] : 1.0);
            dgain[i] += (double)dy[i] * z;
            dbias[i] += (double)dy[i];
            terms[i] = g * z * inverse[i] * inverse[i];
            of_sigma += terms[i];
            terms[i] /= FN(field_size)(n, i, radius);
        }
        *dsigma -= sigma * scale * of_sigma * scale;
        FN(field_sums)(n, radius, terms, sum, error, work);
        for (ptrdiff_t i = 0; i < n; ++i) {
            const double g = (double)dy[i] * (gain ? (double)gain[i] : 1.0);
            v[i] = g * inverse[i] - v[i] * (sum[i] + error[i]);
            terms[i] = v[i] / FN(field_size)(n, i, mean_radius);
        }
        FN(field_sums)(n, mean_radius, terms, sum, error, work);
        for (ptrdiff_t i = 0; i < n; ++i) dx[i] = (T)(((v[i] - sum[i]) - error[i]) * scale);
    }
    for (ptrdiff_t i = 0; i < n; ++i) {
        ((T *)pdgain)[i] = (T)dgain[i];
        ((T *)pdbias)[i] = (T)dbias[i];
    }
}

/* sum over rows of rstd^2 sum g xhat: times -s it is dl/ds of layer normalisation with eps = s^2 */
static double FN(smoothing_sum)(ptrdiff_t rows, ptrdiff_t n, const void *pdy, ptrdiff_t dy_stride, const void *px,
                                ptrdiff_t x_stride, const void *pgain, const void *pstats)
{
    const T *dy = pdy, *x = px, *gain = pgain, *st = pstats;
    double total = 0;
    for (ptrdiff_t row = 0; row < rows; ++row, dy += dy_stride, x += x_stride, st += 3) {
        double sum, sum_x = 0, rstd = (double)st[2];
        if (st[2] >= RSTD_MIN && st[2] <= RSTD_MAX) {
            if (gain) FN(gradient_sums)(n, dy, x, gain, st, &sum, &sum_x);
            else FN(gradient_sums)(n, dy, x, NULL, st, &sum, &sum_x);
        } else {
            const FN(exact) e = FN(exact_stats_with)(x, n, st[2]);
            for (ptrdiff_t j = 0; j < n; ++j)
                sum_x += (double)dy[j] * (gain ? (double)gain[j] : 1.0) * FN(exact_xhat)(&e, x[j]);
            rstd = e.inv_std_dev;
        }
        total += sum_x * rstd * rstd;
    }
    return total;
}
