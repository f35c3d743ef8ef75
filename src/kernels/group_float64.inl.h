/* Rows and groups in float64: (3) to (6) of layer_norm.inl.h, layer_norm_backward.inl.h and group_norm.inl.h, for those
 * whose xhat, dx or sums leave the range of T. Included once, for all storage types. */

/* One group of one sample, all pointers at its first element; a row of layer norm is a group with space = 1 */
typedef struct {
    cnorm_dtype type;
    ptrdiff_t channels, space;
    const void *dy, *x;      /* [channels, space]; dy: backward only */
    const void *gain, *bias; /* [channels] of the compute type, or NULL; bias: forward only */
    void *out;               /* [channels, space]: y or dx */
    void *dgain, *dbias;     /* [channels]: backward only; of a row NULL where only (6) is wanted */
} channel_group;

/* channel c, or all channels where space = 1 */
static f64_view channel_view(const channel_group *g, ptrdiff_t c)
{
    const ptrdiff_t at = c * g->space, n = g->space > 1 ? g->space : g->channels;
    f64_view view = run_view(g->type, g->dy ? at_element(g->type, g->dy, at) : NULL, at_element(g->type, g->x, at), n,
                             (void *)at_element(g->type, g->out, at));
    if (g->space == 1) {
        view.gain = g->gain, view.bias = g->bias, view.dgain = g->dgain, view.dbias = g->dbias;
    } else {
        view.all_gain = param_or(g->type, g->gain, c, 1);
        view.all_bias = param_or(g->type, g->bias, c, -0.0);
    }
    return view;
}

/* (3) and (4); st [3] of the compute type */
static NOINLINE void f64_group_norm(channel_group g, double eps, int centred, void *st)
{
    const f64_stats e = f64_row_stats(g.type, g.x, g.channels * g.space, eps, centred);
    const wide_stats lanes = wide_stats_of(&e, 1);
    for (ptrdiff_t c = 0; c < (g.space > 1 ? g.channels : 1); ++c) {
        const f64_view view = channel_view(&g, c);
        f64_write(&view, &lanes, NULL);
    }
    f64_store_stats(g.type, &e, st);
}

/* (5) alone, of a run whose sums or statistics leave the range of T */
RARE row_sums f64_gradient_sums(cnorm_dtype type, const void *dy, const void *x, ptrdiff_t n, const void *gain,
                                const f64_stats *e)
{
    f64_view view = run_view(type, dy, x, n, NULL);
    view.gain = gain;
    return f64_run_sums(&view, e);
}

/* (5) and (6) for space = 1; st: the statistics */
static NOINLINE void f64_row_backward(channel_group row, const void *st, int centred)
{
    const double n = (double)row.channels;
    const f64_stats e = f64_given_stats(row.type, row.x, row.channels, st, centred);
    const wide_stats lanes = wide_stats_of(&e, 1);
    f64_view view = channel_view(&row, 0);
    view.dy_scale = f64_scale_of(view.type, view.dy, view.n);
    if (view.gain) view.gain_scale = f64_scale_of(view.type, view.gain, view.n);
    const row_sums sums = f64_run_sums(&view, &e);
    const f64_gradient of_row = f64_gradient_of(&e, centred ? sums.a / n : 0, sums.b / n,
                                                -exponent_of(view.dy_scale) - exponent_of(view.gain_scale));
    const wide_gradient d = wide_gradient_of(&of_row, 1);
    view.dgain = NULL;
    f64_write(&view, &lanes, &d);
}

/* (5) and (6) for space > 1; `added`: dgain and dbias have their terms already */
static NOINLINE void f64_group_backward(channel_group g, const void *st, int added)
{
    const ptrdiff_t n = g.channels * g.space;
    const f64_stats e = f64_given_stats(g.type, g.x, n, st, 1);
    const wide_stats lanes = wide_stats_of(&e, 1);
    double G = 0, H = 0;
    for (ptrdiff_t c = 0; c < g.channels; ++c) {
        f64_view view = channel_view(&g, c);
        view.all_gain = 1;
        const row_sums sums = f64_run_sums(&view, &e);
        G += sums.a * param_or(g.type, g.gain, c, 1);
        H += sums.b * param_or(g.type, g.gain, c, 1);
        if (added) continue;
        set_element(g.type, g.dgain, c, element(g.type, g.dgain, c) + sums.b);
        set_element(g.type, g.dbias, c, element(g.type, g.dbias, c) + sums.a);
    }
    const f64_gradient of_group = f64_gradient_of(&e, G / (double)n, H / (double)n, 0);
    const wide_gradient d = wide_gradient_of(&of_group, 1);
    for (ptrdiff_t c = 0; c < g.channels; ++c) {
        const f64_view view = channel_view(&g, c);
        f64_write(&view, &lanes, &d);
    }
}
