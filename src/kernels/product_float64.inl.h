/* The float64 path of a cell's products, for groups whose squares leave the range of float32. */

/* W x + inside */
typedef struct product_term {
    const cnorm_matrix *w;
    const float *x, *inside;
} product_term;

/* integer sums of int8 weights for the LANES_F64 rows from r on, modulo 2^32 as those of the float32 path */
INLINE wide_f64 f64_int8_sums(const cnorm_matrix *w, const float *x, float to_levels, ptrdiff_t r)
{
    const uint8_t *at = int8_weights(w) + r / PANEL * ((w->cols + 3) / 4 * 4) * PANEL + r % PANEL * 4;
    uint32_t sums[LANES_F64] = {0};
    for (ptrdiff_t k = 0; k < w->cols && to_levels > 0; ++k) {
        const int32_t q = rounded_to_int(x[k] * to_levels);
        for (int i = 0; i < LANES_F64; ++i)
            sums[i] += (uint32_t)((at[k / 4 * 4 * PANEL + k % 4 + 4 * i] - CNORM_INT8_BIAS) * q);
    }
    wide_f64 wide;
    for (int i = 0; i < LANES_F64; ++i) wide.v[i / VL_F64][i % VL_F64] = (double)(int32_t)sums[i];
    return wide;
}

/* W x + inside for the LANES_F64 rows from r on; the sum of a row has the order of k. int8 weights: the integer sum,
 * times scale[r] g in float64. */
INLINE wide_f64 f64_rows(const product_term *term, int8_scale scale, ptrdiff_t r)
{
    const cnorm_matrix *w = term->w;
    const ptrdiff_t at = r / PANEL * w->cols * PANEL + r % PANEL;
    wide_f64 sum = term->inside ? wide_at_f32(term->inside + r) : wide_of(0);
    if (w->type == CNORM_WEIGHT_I8) {
        const wide_f64 zi = f64_int8_sums(w, term->x, scale.to_levels, r),
                       of_row = wide_at_f32((const float *)w->panels + r);
        EACH(i, LANE_VECTORS) sum.v[i] += zi.v[i] * (of_row.v[i] * splat_f64((double)scale.from_levels));
    } else {
        const int half = w->type == CNORM_WEIGHT_F16;
        for (ptrdiff_t k = 0; k < w->cols; ++k) {
            if (term->x[k] == 0) continue; /* a first state of zeros */
            const wide_f64 column = half ? wide_at_f16((const uint16_t *)w->panels + at + k * PANEL)
                                         : wide_at_f32((const float *)w->panels + at + k * PANEL);
            EACH(i, LANE_VECTORS) sum.v[i] += column.v[i] * splat_f64((double)term->x[k]);
        }
    }
    return sum;
}

/* sum of v^2 in the order of the lanes' tree; the largest |v| */
INLINE double f64_squares(const wide_f64 *v, double *largest)
{
    wide_f64 squares;
    EACH(i, LANE_VECTORS) squares.v[i] = v->v[i] * v->v[i];
    for (int i = 0; i < LANES_F64; ++i) *largest = larger_finite(*largest, v->v[i / VL_F64][i % VL_F64]);
    return tree_f64(squares.v);
}

INLINE void f64_multiply(float *z, ptrdiff_t rows, double by)
{
    for (ptrdiff_t r = 0; r < rows; ++r) z[r] = (float)((double)z[r] * by);
}

/* (3) in float64, from z [rows] in float32: z becomes z rstd, rounded once. Returns rstd, or a negative number, and
 * leaves z as it is, where products of float32 have overflowed, or may have lost bits to subnormals. */
RARE double f64_scaled(float *z, ptrdiff_t rows, double n, double eps)
{
    double squares = 0, largest = 0;
    for (ptrdiff_t r = 0; r < rows; r += LANES_F64) {
        const wide_f64 v = wide_at_f32(z + r);
        squares += f64_squares(&v, &largest);
    }
    if (largest_bits(rows, z) >= INFINITE || squares < n * 0x1p-160) return -1;
    const double rstd = 1.0 / sqrt(squares / n + eps);
    f64_multiply(z, rows, rstd);
    return rstd;
}

/* (2) and (3) in float64, for `rows` rows from z's first on: z becomes z rstd, and rstd is returned. The sums are kept
 * in z in units of 2^exponent, which grows with the largest: then the earlier ones are divided by the growth. */
RARE double f64_product(const product_term *terms, int count, ptrdiff_t start, ptrdiff_t rows, double n, double eps,
                        float *z)
{
    enum { NONE = -2000, ROOM = 100 };
    const double scaled = f64_scaled(z, rows, n, eps);
    if (scaled >= 0) return scaled;
    double squares = 0;
    int exponent = NONE, finite = 1;
    int8_scale scales[2] = {{0, 0}};
    for (int i = 0; i < count; ++i) {
        finite &= largest_bits(terms[i].w->cols, terms[i].x) < INFINITE;
        if (terms[i].w->type == CNORM_WEIGHT_I8)
            scales[i] = int8_scale_of(terms[i].w->cols, terms[i].x, terms[i].w->levels);
    }
    for (ptrdiff_t r = 0; r < rows && finite; r += LANES_F64) {
        double largest = 0;
        wide_f64 sum = wide_of(-0.0); /* neutral */
        for (int k = 0; k < count; ++k) {
            const wide_f64 term = f64_rows(&terms[k], scales[k], start + r);
            EACH(i, LANE_VECTORS) sum.v[i] += term.v[i];
        }
        squares += f64_squares(&sum, &largest);
        const int grown = largest > 0 ? exponent_of(largest) : NONE;
        if (grown > exponent + ROOM) {
            if (exponent != NONE) f64_multiply(z, r, power_of_two(exponent - grown));
            exponent = grown;
        }
        EACH(i, LANE_VECTORS) sum.v[i] *= splat_f64(power_of_two(-exponent));
        put_wide_f32(z + r, sum);
    }
    const double var_eps = squares / n + eps, rstd = !finite ? (double)NAN : var_eps == 0 ? 0 : 1.0 / sqrt(var_eps);
    f64_multiply(z, rows, finite ? rstd * power_of_two(exponent) : rstd);
    return rstd;
}
