/* Divisive normalisation of rows x [n] (Ren, Liao, Urtasun, Sinz, Zemel 2016, arXiv:1611.04520). An element i has two
 * fields: the elements within a radius of it, A_i for the mean and B_i for the deviation, cut off at the ends of the
 * row:
 *
 *   v_i = x_i - mean of x over A_i      s_i = sqrt(sigma^2 + mean of v^2 over B_i)
 *   z_i = v_i / s_i, or 0 where s_i = 0      y_i = z_i gain_i + bias_i
 *
 * Backward, with g = dy gain (j is in B_i just when i is in B_j):
 *   dv_i = g_i/s_i - v_i sum over B_i of g z / (s^2 |B|)      dx_i = dv_i - sum over A_i of dv / |A|
 *   dsigma = -sigma sum g z / s^2      dgain = sum over rows of dy z      dbias = sum over rows of dy
 *
 * All in float64 and rounded once, so that float32 and float64 share the code and differ in loads and stores. The row
 * is cut into blocks of a field's length, and each block has running sums from its start and to its end. A field is the
 * end of one block and the beginning of the next: two running sums are added and none is subtracted, so that rounding
 * errors of large elements stay within their fields. Sums are compensated (two_sum), so that a mean far above the
 * deviation costs no accuracy.
 */

/* sum + error = a + b exactly (Knuth 1969) */
INLINE double two_sum(double a, double b, double *error)
{
    const double sum = a + b, part = sum - a;
    *error += (a - (sum - part)) + (b - part);
    return sum;
}

INLINE ptrdiff_t field_begin(ptrdiff_t i, ptrdiff_t radius) { return i > radius ? i - radius : 0; }
INLINE ptrdiff_t field_end(ptrdiff_t n, ptrdiff_t i, ptrdiff_t radius) { return n - i > radius ? i + radius : n - 1; }
INLINE double field_size(ptrdiff_t n, ptrdiff_t i, ptrdiff_t radius)
{
    return (double)(field_end(n, i, radius) - field_begin(i, radius) + 1);
}

/* sum + error [n] = the sum of a [n] over the field of each element; work [4, n] */
static void field_sums(ptrdiff_t n, ptrdiff_t radius, const double *a, double *sum, double *error, double *work)
{
    const ptrdiff_t length = 2 * radius + 1;
    double *begin = work, *begin_error = work + n, *end = work + 2 * n, *end_error = work + 3 * n;
    for (ptrdiff_t first = 0; first < n; first += length) {
        const ptrdiff_t last = n - first < length ? n - 1 : first + length - 1;
        double s = 0, e = 0;
        for (ptrdiff_t i = first; i <= last; ++i) {
            s = two_sum(s, a[i], &e);
            begin[i] = s;
            begin_error[i] = e;
        }
        s = e = 0;
        for (ptrdiff_t i = last; i >= first; --i) {
            s = two_sum(s, a[i], &e);
            end[i] = s;
            end_error[i] = e;
        }
    }
    for (ptrdiff_t i = 0; i < n; ++i) {
        const ptrdiff_t from = field_begin(i, radius), to = field_end(n, i, radius);
        if (from % length == 0) { /* a whole block, or one cut off by the start of the row */
            sum[i] = begin[to];
            error[i] = begin_error[to];
        } else if (from / length == to / length) { /* cut off by the end of the row */
            sum[i] = end[from];
            error[i] = end_error[from];
        } else {
            error[i] = end_error[from] + begin_error[to];
            sum[i] = two_sum(end[from], begin[to], &error[i]);
        }
    }
}

/* element i of p [n], float32 or float64 */
INLINE double element(cnorm_dtype dtype, const void *p, ptrdiff_t i)
{
    return dtype == CNORM_F32 ? (double)((const float *)p)[i] : ((const double *)p)[i];
}
INLINE double param_or(cnorm_dtype dtype, const void *p, ptrdiff_t i, double neutral)
{
    return p ? element(dtype, p, i) : neutral;
}

static NOINLINE void put_row(cnorm_dtype dtype, const double *from, ptrdiff_t n, void *to)
{
    for (ptrdiff_t i = 0; i < n; ++i)
        if (dtype == CNORM_F32) ((float *)to)[i] = (float)from[i];
        else ((double *)to)[i] = from[i];
}

/* v and 1/s [n] of the row x from element `at` on, in units of 1/scale, which is returned; work [6, n] */
static double divisive_parts(cnorm_dtype dtype, const cnorm_divisive *call, ptrdiff_t at, double *v, double *inverse,
                             double *work)
{
    const ptrdiff_t n = call->n, mean_radius = call->mean_radius, radius = call->radius;
    const double sigma = call->sigma;
    double *sum = work, *error = work + n, scale = 1;
    for (ptrdiff_t i = 0; i < n; ++i) v[i] = element(dtype, call->x, at + i);
    if (dtype == CNORM_F64) { /* squares of float32 need no scale */
        double largest = sigma;
        for (ptrdiff_t i = 0; i < n; ++i) largest = larger_finite(largest, v[i]);
        scale = scale_for(largest);
    }
    for (ptrdiff_t i = 0; i < n; ++i) v[i] *= scale;
    field_sums(n, mean_radius, v, sum, error, work + 2 * n);
    for (ptrdiff_t i = 0; i < n; ++i) {
        const double size = field_size(n, i, mean_radius), mean = (sum[i] + error[i]) / size;
        /* the upper half of the mean's bits (Dekker's split): its product with the size is exact */
        const double up = mean * 0x1.0000002p27, upper = up - (up - mean);
        v[i] = (v[i] - upper) - ((sum[i] - upper * size) + error[i]) / size;
    }
    for (ptrdiff_t i = 0; i < n; ++i) inverse[i] = v[i] * v[i];
    field_sums(n, radius, inverse, sum, error, work + 2 * n);
    for (ptrdiff_t i = 0; i < n; ++i) {
        const double var = (sigma * scale) * (sigma * scale) + (sum[i] + error[i]) / field_size(n, i, radius);
        inverse[i] = var == 0 ? 0 : 1.0 / sqrt(var);
    }
    return scale;
}

static NOINLINE void divisive_norm(cnorm_dtype dtype, const cnorm_divisive *call)
{
    const ptrdiff_t n = call->n, item = dtype == CNORM_F32 ? 4 : 8;
    double *v = call->scratch, *inverse = v + n;
    for (ptrdiff_t row = 0; row < call->rows; ++row) {
        divisive_parts(dtype, call, row * call->x_stride, v, inverse, v + 2 * n);
        for (ptrdiff_t i = 0; i < n; ++i) {
            const double z = v[i] * inverse[i] * param_or(dtype, call->gain, i, 1);
            v[i] = z + param_or(dtype, call->bias, i, -0.0);
        }
        put_row(dtype, v, n, (char *)call->out + row * call->out_stride * item);
    }
}

static NOINLINE void divisive_norm_backward(cnorm_dtype dtype, const cnorm_divisive *call)
{
    const ptrdiff_t n = call->n, mean_radius = call->mean_radius, radius = call->radius,
                    item = dtype == CNORM_F32 ? 4 : 8;
    const double sigma = call->sigma;
    double *v = call->scratch, *inverse = v + n, *terms = v + 2 * n, *dgain = v + 3 * n, *dbias = v + 4 * n,
           *sum = v + 5 * n, *error = v + 6 * n, *work = v + 7 * n, dsigma = 0;
    memset(dgain, 0, 2 * (size_t)n * sizeof(double));
    for (ptrdiff_t row = 0; row < call->rows; ++row) {
        const ptrdiff_t dy_at = row * call->dy_stride;
        const double scale = divisive_parts(dtype, call, row * call->x_stride, v, inverse, sum);
        double of_sigma = 0;
        for (ptrdiff_t i = 0; i < n; ++i) {
            const double dy = element(dtype, call->dy, dy_at + i), z = v[i] * inverse[i],
                         g = dy * param_or(dtype, call->gain, i, 1);
            dgain[i] += dy * z;
            dbias[i] += dy;
            terms[i] = g * z * inverse[i] * inverse[i];
            of_sigma += terms[i];
            terms[i] /= field_size(n, i, radius);
        }
        dsigma -= sigma * scale * of_sigma * scale;
        field_sums(n, radius, terms, sum, error, work);
        for (ptrdiff_t i = 0; i < n; ++i) {
            const double g = element(dtype, call->dy, dy_at + i) * param_or(dtype, call->gain, i, 1);
            v[i] = g * inverse[i] - v[i] * (sum[i] + error[i]);
            terms[i] = v[i] / field_size(n, i, mean_radius);
        }
        field_sums(n, mean_radius, terms, sum, error, work);
        for (ptrdiff_t i = 0; i < n; ++i) v[i] = ((v[i] - sum[i]) - error[i]) * scale;
        put_row(dtype, v, n, (char *)call->out + row * call->out_stride * item);
    }
    put_row(dtype, dgain, n, call->dgain);
    put_row(dtype, dbias, n, call->dbias);
    *call->dsigma = dsigma;
}

static void divisive_norm_f32(const cnorm_divisive *call) { divisive_norm(CNORM_F32, call); }
static void divisive_norm_f64(const cnorm_divisive *call) { divisive_norm(CNORM_F64, call); }
static void divisive_norm_backward_f32(const cnorm_divisive *call) { divisive_norm_backward(CNORM_F32, call); }
static void divisive_norm_backward_f64(const cnorm_divisive *call) { divisive_norm_backward(CNORM_F64, call); }
