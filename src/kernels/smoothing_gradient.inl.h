/* The gradient of layer normalisation for its smoothing term s, where eps = s^2: -s times the sum over rows of
 * rstd^2 sum g xhat, g = dy gain. The kernel computes that sum. */

static void FN(smoothing_gradient)(const cnorm_norm_backward *call)
{
    const ptrdiff_t n = call->n;
    const T *dy = call->dy, *x = call->x, *gain = call->gain, *st = call->stats;
    double total = 0;
    for (ptrdiff_t row = 0; row < call->rows; ++row, dy += call->dy_stride, x += call->x_stride, st += 3) {
        double sum, sum_x, rstd = (double)st[2];
        if (FN(rstd_in_range)(st)) {
            const FN(run) run = {n, dy, x, NULL, st};
            FN(run_gradient_sums)(&run, gain, &sum, &sum_x);
        } else {
            const f64_stats e = f64_given_stats(DTYPE, x, n, st, 1);
            sum_x = f64_gradient_sums(DTYPE, dy, x, n, gain, &e).b;
            rstd = e.inv_std_dev;
        }
        total += sum_x * rstd * rstd;
    }
    *(double *)call->partials = total;
}
