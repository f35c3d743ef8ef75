/* Groups of group_norm.inl.h in float64. Included once, for all storage types. */
#ifndef CNORM_GROUP_FLOAT64_INL_H
#define CNORM_GROUP_FLOAT64_INL_H

#include "row_float64_backward.inl.h"

/* One group of one sample, all pointers at its first element */
typedef struct {
    cnorm_dtype type;
    ptrdiff_t channels, space;
    const void *dy, *x;      /* [channels, space]; dy: backward only */
    const void *gain, *bias; /* [channels] of the compute type, or NULL; bias: forward only */
    void *out;               /* [channels, space]: y or dx */
    void *dgain, *dbias;     /* [channels]: backward only */
} f64_group;

static f64_tile channel_tile(const f64_group *g, ptrdiff_t c)
{
    const ptrdiff_t at = c * g->space * stored_bytes(g->type);
    f64_tile t = run_tile(g->type, g->dy ? (const char *)g->dy + at : NULL, (const char *)g->x + at, g->space,
                          (char *)g->out + at);
    t.all_gain = param_or(g->type, g->gain, c, 1);
    t.all_bias = param_or(g->type, g->bias, c, -0.0);
    return t;
}

/* (3) and (4); st [3] of the compute type */
static NOINLINE void f64_group_norm(f64_group g, double eps, void *st)
{
    const f64_stats e = f64_row_stats(g.type, g.x, g.channels * g.space, eps, 1);
    const wide_stats lanes = wide_stats_of(&e);
    if (g.space == 1) {
        f64_tile t = run_tile(g.type, NULL, g.x, g.channels, g.out);
        t.gain = g.gain, t.bias = g.bias;
        f64_write(&t, &lanes);
    }
    for (ptrdiff_t c = 0; c < g.channels && g.space > 1; ++c) {
        const f64_tile t = channel_tile(&g, c);
        f64_write(&t, &lanes);
    }
    f64_store_stats(g.type, &e, st);
}

/* (5) and (6) for space > 1; `added`: dgain and dbias have their terms already */
static NOINLINE void f64_group_backward(f64_group g, const void *st, int added)
{
    const ptrdiff_t n = g.channels * g.space;
    const f64_stats e = f64_given_stats(g.type, g.x, n, st, 1);
    const wide_stats lanes = wide_stats_of(&e);
    double G = 0, H = 0;
    for (ptrdiff_t c = 0; c < g.channels; ++c) {
        double sums[2] = {0};
        f64_tile t = channel_tile(&g, c);
        t.all_gain = 1;
        f64_run_sums(&t, &e, &UNSCALED, sums);
        G += sums[0] * param_or(g.type, g.gain, c, 1);
        H += sums[1] * param_or(g.type, g.gain, c, 1);
        if (added) continue;
        set_element(g.type, g.dgain, c, element(g.type, g.dgain, c) + sums[1]);
        set_element(g.type, g.dbias, c, element(g.type, g.dbias, c) + sums[0]);
    }
    const f64_gradient of_group = f64_gradient_of(&e, G / (double)n, H / (double)n, 0);
    const wide_gradient d = wide_gradient_of(&of_group, UNSCALED);
    for (ptrdiff_t c = 0; c < g.channels; ++c) {
        const f64_tile t = channel_tile(&g, c);
        f64_write_gradient(&t, &lanes, &d);
    }
}

#endif
