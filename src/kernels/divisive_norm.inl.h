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
 * All in float64 and rounded once: float32 and float64, for which this file is included, differ in loads and stores.
 * Sums over fields are those of field_sums.inl.h. */

/* the loop over vectors at i of a row [n], and the loads and stores of its arrays */
#define EACH_OF_ROW(i) for (ptrdiff_t i = 0; i < n; i += VL_F64)
#define AT(array) load_first_f64((array) + i, n - i)
#define PUT(array, v) store_first_f64((array) + i, n - i, v)
/* of arrays of T; a NULL parameter is neutral */
#define OF_T(array) TN(elements)((array) + i, n - i)
#define PARAM(array, neutral) ((array) ? OF_T(array) : splat_f64(neutral))

/* v and 1/s [n] of the row x, in units of 1/scale, which is returned; work [6, n] */
static double TN(divisive_parts)(const cnorm_divisive *call, const T *x, double *v, double *inverse, double *work)
{
    const ptrdiff_t n = call->n, mean_radius = call->mean_radius, radius = call->radius;
    double *sum = work, *error = work + n;
    EACH_OF_ROW(i) PUT(v, OF_T(x));
    /* squares of float32 need no scale */
    const double scale = sizeof(T) == sizeof(double) ? scale_for(larger_finite(f64_largest(v, n), call->sigma)) : 1;
    const double sigma = call->sigma * scale;
    EACH_OF_ROW(i) PUT(v, AT(v) * scale);
    field_sums(n, mean_radius, v, sum, error, work + 2 * n);
    EACH_OF_ROW(i) {
        const f64v size = field_sizes(n, i, mean_radius), mean = (AT(sum) + AT(error)) / size;
        /* the upper half of the mean's bits (Dekker's split): its product with the size is exact */
        const f64v up = mean * 0x1.0000002p27, upper = up - (up - mean);
        const f64v deviation = (AT(v) - upper) - ((AT(sum) - upper * size) + AT(error)) / size;
        PUT(v, deviation);
        PUT(inverse, deviation * deviation);
    }
    field_sums(n, radius, inverse, sum, error, work + 2 * n);
    EACH_OF_ROW(i) {
        const f64v var = sigma * sigma + (AT(sum) + AT(error)) / field_sizes(n, i, radius);
        PUT(inverse, (f64v)((i64v)(1.0 / sqrt_f64(var)) & (i64v)(var != splat_f64(0))));
    }
    return scale;
}

static void TN(divisive_norm)(const cnorm_divisive *call)
{
    const ptrdiff_t n = call->n;
    const T *gain = call->gain, *bias = call->bias;
    double *v = call->scratch, *inverse = v + n;
    for (ptrdiff_t row = 0; row < call->rows; ++row) {
        TN(divisive_parts)(call, (const T *)call->x + row * call->x_stride, v, inverse, v + 2 * n);
        EACH_OF_ROW(i) PUT(v, AT(v) * AT(inverse) * PARAM(gain, 1) + PARAM(bias, -0.0));
        TN(narrow_array)(n, v, (T *)call->out + row * call->out_stride);
    }
}

static void TN(divisive_norm_backward)(const cnorm_divisive *call)
{
    const ptrdiff_t n = call->n, mean_radius = call->mean_radius, radius = call->radius;
    const T *gain = call->gain;
    const double sigma = call->sigma;
    double *v = call->scratch, *inverse = v + n, *terms = v + 2 * n, *dgain = v + 3 * n, *dbias = v + 4 * n,
           *sum = v + 5 * n, *error = v + 6 * n, *work = v + 7 * n, dsigma = 0;
    memset(dgain, 0, 2 * (size_t)n * sizeof(double));
    for (ptrdiff_t row = 0; row < call->rows; ++row) {
        const T *of_row = (const T *)call->dy + row * call->dy_stride;
        const double scale = TN(divisive_parts)(call, (const T *)call->x + row * call->x_stride, v, inverse, sum);
        double of_sigma = 0;
        EACH_OF_ROW(i) {
            const f64v dy = OF_T(of_row), z = AT(v) * AT(inverse), g = dy * PARAM(gain, 1);
            PUT(dgain, AT(dgain) + dy * z);
            PUT(dbias, AT(dbias) + dy);
            PUT(terms, g * z * AT(inverse) * AT(inverse));
        }
        for (ptrdiff_t i = 0; i < n; ++i) of_sigma += terms[i];
        dsigma -= sigma * scale * of_sigma * scale;
        EACH_OF_ROW(i) PUT(terms, AT(terms) / field_sizes(n, i, radius));
        field_sums(n, radius, terms, sum, error, work);
        EACH_OF_ROW(i) {
            const f64v g = OF_T(of_row) * PARAM(gain, 1);
            PUT(v, g * AT(inverse) - AT(v) * (AT(sum) + AT(error)));
            PUT(terms, AT(v) / field_sizes(n, i, mean_radius));
        }
        field_sums(n, mean_radius, terms, sum, error, work);
        EACH_OF_ROW(i) PUT(v, ((AT(v) - AT(sum)) - AT(error)) * scale);
        TN(narrow_array)(n, v, (T *)call->out + row * call->out_stride);
    }
    TN(narrow_array)(n, dgain, call->dgain);
    TN(narrow_array)(n, dbias, call->dbias);
    *call->dsigma = dsigma;
}
