/* Rows of weight_norm.inl.h in float64, scaled by a power of two. Included once, for both types. */

/* Statistics about 0 whose rstd is 1/|w scale|, or 0 for a row of zeros */
static NOINLINE f64_stats f64_norm_of(cnorm_dtype type, const void *w, ptrdiff_t n)
{
    const f64_view view = run_view(type, NULL, w, n, NULL);
    f64_stats e = {.scale = f64_scale_of(type, w, n)};
    const double squares = f64_run_sums(&view, &e).b;
    if (squares != 0) e.rstd = 1.0 / sqrt(squares);
    e.inv_std_dev = e.rstd * e.scale;
    return e;
}

/* v = g w/|w| of a row [n]. For float64 each product of two factors could leave the range: w is multiplied by up, then
 * by the rounded product of the others, which is near 1, then by down. The order is that of rows in range, so that
 * scaling w by a power of two changes no bit of v. */
static NOINLINE void f64_weight_norm(cnorm_dtype type, const void *w, ptrdiff_t n, double g, void *v)
{
    const f64_view view = run_view(type, NULL, w, n, v);
    const f64_stats e = f64_norm_of(type, w, n);
    int power = 0;
    const double of_g = frexp(g, &power), factor = type == CNORM_F64 ? of_g * e.rstd : e.rstd;
    power += exponent_of(e.scale);
    const double third = power_of_two(power / 3), rest = power_of_two(power - power / 3 * 2);
    const double up[4] = {third, third, rest, factor}, down[4] = {factor, third, third, rest},
                 in_order[4] = {factor, g, 1, 1};
    const double *by = type != CNORM_F64 ? in_order : power > 0 ? up : down;
    for (ptrdiff_t first = 0; first < view.rows; first += BLOCK) {
        const f64_block b = block_from(&view, first, view.rows);
        wide_f64 to[BLOCK];
        load_x(b, to);
        for (ptrdiff_t r = 0; r < b.count; ++r)
            for (int k = 0; k < 4; ++k)
                EACH(i, LANE_VECTORS) to[r].v[i] *= splat_f64(by[k]);
        store_out(b, to);
    }
}

/* layer norm's (5) and (6) about 0, with a sum in place of the mean, for a row's view; returns dg */
static NOINLINE double f64_weight_backward(f64_view view, double g)
{
    const f64_stats e = f64_norm_of(view.type, view.x, view.n);
    const wide_stats lanes = wide_stats_of(&e, 1);
    view.dy_scale = f64_scale_of(view.type, view.dy, view.n);
    const double sum = f64_run_sums(&view, &e).b;
    view.all_gain = g, view.gain_scale = f64_scale_of(view.type, &g, 1);
    const f64_gradient of_row =
        f64_gradient_of(&e, 0, sum * (g * view.gain_scale), -exponent_of(view.dy_scale) - exponent_of(view.gain_scale));
    const wide_gradient d = wide_gradient_of(&of_row, 1);
    f64_write(&view, &lanes, &d);
    return sum / view.dy_scale;
}
