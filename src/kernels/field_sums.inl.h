/* Sums over the fields of a row's elements, the elements within a radius, for divisive norm.
 * The row is cut into blocks of a field's length, and each has running sums from its start and to its end. A field
 * is the end of one block and the beginning of the next: two running sums are added and none is subtracted, so that
 * rounding errors of large elements stay within their fields. Sums are compensated (two_sum), so that a mean far above
 * the deviation costs no accuracy. */

/* sum + error = a + b exactly (Knuth 1969) */
INLINE double two_sum(double a, double b, double *error)
{
    const double sum = a + b, part = sum - a;
    *error += (a - (sum - part)) + (b - part);
    return sum;
}

/* the sizes of the fields of elements i to i + VL_F64 - 1 */
INLINE f64v field_sizes(ptrdiff_t n, ptrdiff_t i, ptrdiff_t radius)
{
    static const double lanes[8] = {0, 1, 2, 3, 4, 5, 6, 7};
    const f64v at = load_f64(lanes) + (double)i, first = at - (double)radius, last = at + (double)radius;
    const f64v most = splat_f64((double)(n - 1)), least = splat_f64(0);
    return select_f64((i64v)(last > most), most, last) - select_f64((i64v)(first > least), first, least) + 1.0;
}

/* running sums of `count` elements of a, from element `at` on in steps of `step`: sum + error of each */
INLINE void running_sums(const double *a, ptrdiff_t at, ptrdiff_t count, ptrdiff_t step, double *sum, double *error)
{
    double s = 0, e = 0;
    for (; count; --count, at += step) {
        s = two_sum(s, a[at], &e);
        sum[at] = s;
        error[at] = e;
    }
}

/* sum + error [n] = the sum of a [n] over the field of each element; work [4, n] */
static void field_sums(ptrdiff_t n, ptrdiff_t radius, const double *a, double *sum, double *error, double *work)
{
    const ptrdiff_t length = 2 * radius + 1;
    double *begin = work, *begin_error = work + n, *end = work + 2 * n, *end_error = work + 3 * n;
    for (ptrdiff_t first = 0; first < n; first += length) {
        const ptrdiff_t count = n - first < length ? n - first : length;
        running_sums(a, first, count, 1, begin, begin_error);
        running_sums(a, first + count - 1, count, -1, end, end_error);
    }
    for (ptrdiff_t i = 0; i < n; ++i) {
        const ptrdiff_t from = i > radius ? i - radius : 0, to = n - i > radius ? i + radius : n - 1;
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
