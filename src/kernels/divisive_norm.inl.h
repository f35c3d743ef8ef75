/* Divisive normalisation of rows x [n] (Ren, Liao, Urtasun, Sinz, Zemel 2016, arXiv:1611.04520), and the gradient for
 * its smoothing term sigma, which layer normalisation has too. An element i has two fields: the
 * elements within a radius of it, A_i for the mean and B_i for the deviation, cut off at the ends
 * of the row:
 *
 *   v_i = x_i - mean of x over A_i      s_i = sqrt(sigma^2 + mean of v^2 over B_i)
 *   z_i = v_i / s_i, or 0 where s_i = 0      y_i = z_i gain_i + bias_i
 *
 * Backward, with g = dy gain (j is in B_i just when i is in B_j):
 *   dv_i = g_i/s_i - v_i sum over B_i of g z / (s^2 |B|)      dx_i = dv_i - sum over A_i of dv / |A|
 *   dsigma = -sigma sum g z / s^2      dgain = sum over rows of dy z      dbias = sum over rows of dy
 *
 * All in float64 and rounded once. The row is cut into blocks of a field's length, and each block has running sums
 * from its start and to its end. A field is the end of one block and the beginning of the next: two running sums are
 * added and none is subtracted, so that rounding errors of large elements stay within their fields. Sums are
 * compensated (two_sum), so that a mean far above the deviation costs no accuracy.
 */

/* sum + error = a + b exactly (Knuth 1969) */
INLINE double FN(two_sum)(double a, double b, double *error)
{
    const double sum = a + b, part = sum - a;
    *error += (a - (sum - part)) + (b - part);
    return sum;
}

INLINE ptrdiff_t FN(field_begin)(ptrdiff_t i, ptrdiff_t radius)
{
    return i > radius ? i - radius : 0;
}
INLINE ptrdiff_t FN(field_end)(ptrdiff_t n, ptrdiff_t i, ptrdiff_t radius)
{
    return n - i > radius ? i + radius : n - 1;
}
INLINE double FN(field_size)(ptrdiff_t n, ptrdiff_t i, ptrdiff_t radius)
{
    return (double)(FN(field_end)(n, i, radius) - FN(field_begin)(i, radius) + 1);
}

/* sum + error [n] = the sum of a [n] over the field of each element; work [4, n] */
static void FN(field_sums)(ptrdiff_t n, ptrdiff_t radius, const double *a, double *sum,
                           double *error, double *work)
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
        if (from % length == 0) { /* a whole block, or one cut off by the start of the row */
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

/* v and 1/s [n] of one row x, in units of 1/scale, which is returned; work [6, n] */
static double FN(divisive_parts)(const cnorm_divisive *call, const T *x, double *v, double *inverse,
                                 double *work)
{
    const ptrdiff_t n = call->n, mean_radius = call->mean_radius, radius = call->radius;
    const double sigma = call->sigma;
    double *sum = work, *error = work + n, scale = 1;
    if (sizeof(T) == 8) { /* squares of float32 need no scale */
        double largest = sigma;
        for (ptrdiff_t i = 0; i < n; ++i) largest = larger_finite(largest, (double)x[i]);
        scale = scale_for(largest, 0);
    }
    for (ptrdiff_t i = 0; i < n; ++i) v[i] = (double)x[i] * scale;
    FN(field_sums)(n, mean_radius, v, sum, error, work + 2 * n);
    for (ptrdiff_t i = 0; i < n; ++i) {
        const double size = FN(field_size)(n, i, mean_radius), mean = (sum[i] + error[i]) / size;
        /* the upper half of the mean's bits (Dekker's split): its product with the size is exact */
        const double up = mean * 0x1.0000002p27, upper = up - (up - mean);
        v[i] = (v[i] - upper) - ((sum[i] - upper * size) + error[i]) / size;
    }
    for (ptrdiff_t i = 0; i < n; ++i) inverse[i] = v[i] * v[i];
    FN(field_sums)(n, radius, inverse, sum, error, work + 2 * n);
    for (ptrdiff_t i = 0; i < n; ++i) {
        const double var =
            (sigma * scale) * (sigma * scale) + (sum[i] + error[i]) / FN(field_size)(n, i, radius);
        inverse[i] = var == 0 ? 0 : 1.0 / sqrt(var);
    }
    return scale;
}

static void FN(divisive_norm)(const cnorm_divisive *call)
{
    const ptrdiff_t n = call->n;
    const T *x = call->x, *gain = call->gain, *bias = call->bias;
    T *y = call->out;
    double *v = call->scratch, *inverse = v + n;
    for (ptrdiff_t row = 0; row < call->rows; ++row, x += call->x_stride, y += call->out_stride) {
        FN(divisive_parts)(call, x, v, inverse, v + 2 * n);
        for (ptrdiff_t i = 0; i < n; ++i) {
            double z = v[i] * inverse[i];
            if (gain) z *= (double)gain[i];
            if (bias) z += (double)bias[i];
            y[i] = (T)z;
        }
    }
}

static void FN(divisive_norm_backward)(const cnorm_divisive *call)
{
    const ptrdiff_t n = call->n, mean_radius = call->mean_radius, radius = call->radius;
    const T *dy = call->dy, *x = call->x, *gain = call->gain;
    const double sigma = call->sigma;
    T *dx = call->out;
    double *v = call->scratch, *inverse = v + n, *terms = v + 2 * n, *dgain = v + 3 * n,
           *dbias = v + 4 * n, *sum = v + 5 * n, *error = v + 6 * n, *work = v + 7 * n, dsigma = 0;
    memset(dgain, 0, 2 * (size_t)n * sizeof(double));
    for (ptrdiff_t row = 0; row < call->rows; ++row) {
        const double scale = FN(divisive_parts)(call, x, v, inverse, sum);
        double of_sigma = 0;
        for (ptrdiff_t i = 0; i < n; ++i) {
            const double z = v[i] * inverse[i], g = (double)dy[i] * (gain ? (double)gain[i] : 1.0);
            dgain[i] += (double)dy[i] * z;
            dbias[i] += (double)dy[i];
            terms[i] = g * z * inverse[i] * inverse[i];
            of_sigma += terms[i];
            terms[i] /= FN(field_size)(n, i, radius);
        }
        dsigma -= sigma * scale * of_sigma * scale;
        FN(field_sums)(n, radius, terms, sum, error, work);
        for (ptrdiff_t i = 0; i < n; ++i) {
            const double g = (double)dy[i] * (gain ? (double)gain[i] : 1.0);
            v[i] = g * inverse[i] - v[i] * (sum[i] + error[i]);
            terms[i] = v[i] / FN(field_size)(n, i, mean_radius);
        }
        FN(field_sums)(n, mean_radius, terms, sum, error, work);
        for (ptrdiff_t i = 0; i < n; ++i) dx[i] = (T)(((v[i] - sum[i]) - error[i]) * scale);
        dy += call->dy_stride;
        x += call->x_stride;
        dx += call->out_stride;
    }
    for (ptrdiff_t i = 0; i < n; ++i) {
        ((T *)call->dgain)[i] = (T)dgain[i];
        ((T *)call->dbias)[i] = (T)dbias[i];
    }
    *call->dsigma = dsigma;
}

/* sum over rows of rstd^2 sum g xhat; times -s, the gradient of layer normalisation for s, where
 * eps = s^2 */
static void FN(smoothing_gradient)(const cnorm_norm_backward *call)
{
    const ptrdiff_t n = call->n;
    const T *dy = call->dy, *x = call->x, *gain = call->gain, *st = call->stats;
    double total = 0;
    for (ptrdiff_t row = 0; row < call->rows;
         ++row, dy += call->dy_stride, x += call->x_stride, st += 3) {
        double sum, sum_x = 0, rstd = (double)st[2];
        if (FN(rstd_in_range)(st)) {
            const FN(run) run = {n, dy, x, NULL, st};
            FN(gradient_sums)(&run, gain, &sum, &sum_x);
        } else {
            const FN(f64_stats) e = FN(f64_given_stats)(x, n, st, 1);
            for (ptrdiff_t j = 0; j < n; ++j)
                sum_x +=
                    (double)dy[j] * (gain ? (double)gain[j] : 1.0) * FN(f64_xhat)(&e, (double)x[j]);
            rstd = e.inv_std_dev;
        }
        total += sum_x * rstd * rstd;
    }
    *(double *)call->partial = total;
}
