/* One step of a recurrent cell, as cnorm_rnn.h defines it, for up to CNORM_ROWS streams that share the weights.
 *
 *   (1) zx = W_x x + inside_x      for all streams, or for several steps of one stream, since it needs no state
 *   (2) zh = W_h h + inside_h, and with CNORM_SCOPE_SUM + zx
 *   (3) r = 1/sqrt(mean z^2 + eps) of each LN group: the weights are centred, so LN(W x) = z r gain + bias
 *   (4) the gates and the state, one pass
 * Gates are padded to CNORM_GATE_PAD units; padding is zero in weights, gains and biases, and stays zero in the state.
 */
#ifndef CNORM_CELL_INL_H
#define CNORM_CELL_INL_H

#include "activation.inl.h"
#include "matvec.inl.h"

/* |v| < 2^-100 becomes 0: a decaying state such as 0.9 c would otherwise stay at a subnormal for ever */
INLINE f32v without_tiny(f32v v)
{
    const f32v tiny = splat_f32(0x1p-100f);
    return (f32v)((i32v)v & ~((i32v)(v < tiny) & (i32v)(v > -tiny)));
}

/* v clipped to +-limit; NaN stays NaN */
INLINE f32v clipped(f32v v, float limit)
{
    const f32v top = splat_f32(limit);
    const i32v over = (i32v)(v > top), under = (i32v)(v < -top);
    return (f32v)(((i32v)v & ~over & ~under) | ((i32v)top & over) | ((i32v)-top & under));
}

/* W x + inside */
typedef struct product_term {
    const cnorm_matrix *w;
    const float *x, *inside;
} product_term;

/* sum + row r of W x, in float64. int8 weights: the same integer sum as in float32, times scale[r] g in float64. */
INLINE double f64_sum(const product_term *term, int8_scale scale, ptrdiff_t r, double sum)
{
    const cnorm_matrix *w = term->w;
    const ptrdiff_t panel = r / PANEL * w->cols * PANEL, lane = r % PANEL;
    if (w->type == CNORM_WEIGHT_I8) {
        const uint8_t *at = int8_weights(w) + r / PANEL * ((w->cols + 3) / 4 * 4) * PANEL + lane * 4;
        double zi = 0;
        for (ptrdiff_t k = 0; k < w->cols && scale.to_levels > 0; ++k)
            zi += (at[k / 4 * 4 * PANEL + k % 4] - CNORM_INT8_BIAS) * rounded_to_int(term->x[k] * scale.to_levels);
        sum += zi * ((double)((const float *)w->panels)[r] * (double)scale.from_levels);
    } else if (w->type == CNORM_WEIGHT_F16) {
        const uint16_t *at = (const uint16_t *)w->panels + panel + lane;
        for (ptrdiff_t k = 0; k < w->cols; ++k) sum += (double)value_f16(at[k * PANEL]) * (double)term->x[k];
    } else {
        const float *at = (const float *)w->panels + panel + lane;
        for (ptrdiff_t k = 0; k < w->cols; ++k) sum += (double)at[k * PANEL] * (double)term->x[k];
    }
    return sum;
}

/* (2) and (3) where squares in float32 overflow or underflow: z becomes z r, computed in float64 and rounded once.
 * Returns r. */
RARE double f64_product(const product_term *terms, int count, ptrdiff_t start, ptrdiff_t rows, double n, double eps,
                      float *z)
{
    double squares = 0, rstd = 0;
    int8_scale scales[2] = {{0, 0}};
    for (int i = 0; i < count; ++i) {
        for (ptrdiff_t k = 0; k < terms[i].w->cols; ++k)
            if (!(fabsf(terms[i].x[k]) <= 0x1.fffffep127f)) rstd = (double)NAN;
        if (terms[i].w->type == CNORM_WEIGHT_I8) scales[i] = int8_scale_of(terms[i].w->cols, terms[i].x, terms[i].w->levels);
    }
    for (int sweep = rstd == 0 ? 0 : 1; sweep < 2; ++sweep) {
        for (ptrdiff_t r = start; r < start + rows; ++r) {
            double sum = 0;
            for (int i = 0; i < count && rstd == rstd; ++i)
                sum += f64_sum(&terms[i], scales[i], r, terms[i].inside ? (double)terms[i].inside[r] : 0);
            if (sweep == 0) squares += sum * sum;
            else z[r] = (float)(sum * rstd);
        }
        const double var_eps = squares / n + eps;
        if (sweep == 0) rstd = var_eps == 0 ? 0 : 1.0 / sqrt(var_eps);
    }
    return rstd;
}

/* (3): the r of each gate of z, which is the sum of the terms; `known` is its sum of squares, or -1. On the float64
 * path z becomes z r and the stored r is 1. The r in float64, which the backward pass needs, is stored from r +
 * WIDE_RSTD on. */
INLINE void group_rstds(const product_term *terms, int count, double eps, double known, float *z, float r[CNORM_GATE_PAD])
{
    const cnorm_matrix *w = terms[0].w;
    const ptrdiff_t width = padded_units(w->units);
    for (ptrdiff_t first = 0; first < w->gates; first += w->group) {
        const ptrdiff_t gates = w->gates - first < w->group ? w->gates - first : w->group;
        const double n = (double)(gates * w->units);
        const double squares = gates == w->gates && known >= 0 ? known : sum_of_squares(z + first * width, gates * width);
        float rstd = 1;
        double wide = 1.0 / sqrt(squares / n + eps);
        if (squares <= Q_MAX_F32 && (squares >= n * Q_MIN_F32 || eps >= Q_MIN_F32)) rstd = (float)wide;
        else wide = f64_product(terms, count, first * width, gates * width, n, eps, z);
        for (ptrdiff_t g = first; g < first + gates; ++g) {
            r[g] = rstd;
            memcpy(r + WIDE_RSTD + 2 * g, &wide, sizeof wide);
        }
    }
}

/* (1): x [n, inputs] -> zx [n, input_row_floats]: the products, then their r */
static void cell_inputs(const cnorm_cell *cell, ptrdiff_t n, const float *x, ptrdiff_t x_stride, float *zx, float *room)
{
    const ptrdiff_t stride = input_row_floats(cell);
    const float *rows[CNORM_ROWS] = {NULL};
    for (ptrdiff_t s = 0; s < n; ++s) rows[s] = x + s * x_stride;
    const double squares = products(&cell->weight_x, n, rows, cell->inside_x, 0, zx, stride, room);
    if (cell->scope != CNORM_SCOPE_SPLIT) return;
    for (ptrdiff_t s = 0; s < n; ++s) {
        const product_term term = {&cell->weight_x, rows[s], cell->inside_x};
        group_rstds(&term, 1, (double)cell->eps, squares, zx + s * stride, zx + (s + 1) * stride - CNORM_GATE_PAD);
    }
}

/* the two parts of a pre-activation, without bias; with CNORM_SCOPE_SUM part_h is the whole */
INLINE f32v part_x(const cnorm_cell *cell, cnorm_scope scope, const float *zx, const float *rx, ptrdiff_t g, ptrdiff_t at)
{
    return scope == CNORM_SCOPE_SPLIT ? (load_f32(zx + at) * splat_f32(rx[g])) * load_f32(cell->gain_x + at) : load_f32(zx + at);
}
INLINE f32v part_h(const cnorm_cell *cell, cnorm_scope scope, const float *zh, const float *rh, ptrdiff_t g, ptrdiff_t at)
{
    return scope == CNORM_SCOPE_NONE ? load_f32(zh + at) : (load_f32(zh + at) * splat_f32(rh[g])) * load_f32(cell->gain_h + at);
}
INLINE f32v preactivation(const cnorm_cell *cell, cnorm_scope scope, const float *zx, const float *zh, const float *rx,
                          const float *rh, ptrdiff_t g, ptrdiff_t at)
{
    const f32v h = part_h(cell, scope, zh, rh, g, at);
    return (scope == CNORM_SCOPE_SUM ? h : h + part_x(cell, scope, zx, rx, g, at)) + load_f32(cell->bias + at);
}

/* updates c and computes the output gate o [padded units] */
INLINE void lstm_gates(const cnorm_cell *cell, cnorm_scope scope, const float *zx, const float *zh, const float *rx,
                       const float *rh, float *c, float *o)
{
    const ptrdiff_t width = padded_units(cell->weight_x.units);
    for (ptrdiff_t j = 0; j < width; j += VL_F32) {
        f32v gate[4];
#pragma GCC unroll 4
        for (int g = 0; g < 4; ++g) gate[g] = preactivation(cell, scope, zx, zh, rx, rh, g, g * width + j);
        const f32v carry = sigmoid_v(gate[0]) * load_f32(c + j) + sigmoid_v(gate[1]) * tanh_v(gate[3]);
        store_f32(c + j, without_tiny(carry));
        store_f32(o + j, sigmoid_v(gate[2]));
    }
}

/* h = zoneout before + (1 - zoneout) h */
INLINE void zone_out(const cnorm_cell *cell, ptrdiff_t width, const float *before, float *h)
{
    const f32v keep = splat_f32(cell->zoneout), take = splat_f32(1 - cell->zoneout);
    for (ptrdiff_t j = 0; j < width; j += VL_F32)
        store_f32(h + j, without_tiny(keep * load_f32(before + j) + take * load_f32(h + j)));
}

/* (4); m [padded units] is h, or the input of the projection; room [2 * padded units] */
static void lstm_row(const cnorm_cell *cell, const float *zx, const float *zh, const float *rh, float *c, float *m,
                     float *room)
{
    const ptrdiff_t units = cell->weight_x.units, width = padded_units(units);
    const float *rx = zx + input_row_floats(cell) - CNORM_GATE_PAD;
    float *o = room, *normed = room + width;
    if (cell->scope == CNORM_SCOPE_SPLIT) lstm_gates(cell, CNORM_SCOPE_SPLIT, zx, zh, rx, rh, c, o);
    else if (cell->scope == CNORM_SCOPE_SUM) lstm_gates(cell, CNORM_SCOPE_SUM, zx, zh, rx, rh, c, o);
    else lstm_gates(cell, CNORM_SCOPE_NONE, zx, zh, rx, rh, c, o);
    if (cell->cell_clip < INFINITY)
        for (ptrdiff_t j = 0; j < width; j += VL_F32) store_f32(c + j, clipped(load_f32(c + j), cell->cell_clip));
    const float *out = c;
    if (cell->cell_norm != CNORM_CELL_NORM_NONE) {
        for (ptrdiff_t j = units; j < width; ++j) normed[j] = 0;
        layer_norm_f32(&(cnorm_norm){.rows = 1, .n = units, .x = c, .gain = cell->gain_c, .bias = cell->bias_c,
                                     .eps = (double)cell->eps, .y = normed});
        out = normed;
    }
    if (cell->cell_norm == CNORM_CELL_NORM_CARRY)
        for (ptrdiff_t j = 0; j < width; j += VL_F32) store_f32(c + j, without_tiny(load_f32(normed + j)));
    for (ptrdiff_t j = 0; j < width; j += VL_F32)
        store_f32(m + j, without_tiny(load_f32(o + j) * tanh_v(load_f32(out + j))));
}

INLINE f32v gru_mix(const cnorm_cell *cell, f32v z, f32v n, f32v h)
{
    const f32v rest = 1.0f - z;
    return without_tiny(cell->keep ? z * h + rest * n : rest * h + z * n);
}

INLINE void gru_gates(const cnorm_cell *cell, cnorm_scope scope, cnorm_reset reset, const float *zx, const float *zh,
                      const float *rx, const float *rh, float *h)
{
    const ptrdiff_t width = padded_units(cell->weight_x.units);
    for (ptrdiff_t j = 0; j < width; j += VL_F32) {
        const ptrdiff_t at = 2 * width + j;
        const f32v z = sigmoid_v(preactivation(cell, scope, zx, zh, rx, rh, 0, j));
        const f32v r = sigmoid_v(preactivation(cell, scope, zx, zh, rx, rh, 1, width + j));
        f32v n;
        if (reset == CNORM_RESET_CANDIDATE) {
            n = r * preactivation(cell, scope, zx, zh, rx, rh, 2, at);
        } else {
            f32v of_h = part_h(cell, scope, zh, rh, 2, at);
            if (cell->bias_n) of_h += load_f32(cell->bias_n + j);
            n = part_x(cell, scope, zx, rx, 2, at) + load_f32(cell->bias + at) + r * of_h;
        }
        store_f32(h + j, gru_mix(cell, z, tanh_v(n), load_f32(h + j)));
    }
}

static void gru_row(const cnorm_cell *cell, const float *zx, const float *zh, const float *rh, float *h)
{
    const float *rx = zx + input_row_floats(cell) - CNORM_GATE_PAD;
    if (cell->scope == CNORM_SCOPE_SPLIT && cell->reset == CNORM_RESET_AFTER) gru_gates(cell, CNORM_SCOPE_SPLIT, CNORM_RESET_AFTER, zx, zh, rx, rh, h);
    else if (cell->scope == CNORM_SCOPE_SPLIT) gru_gates(cell, CNORM_SCOPE_SPLIT, CNORM_RESET_CANDIDATE, zx, zh, rx, rh, h);
    else if (cell->scope == CNORM_SCOPE_SUM) gru_gates(cell, CNORM_SCOPE_SUM, CNORM_RESET_CANDIDATE, zx, zh, rx, rh, h);
    else if (cell->reset == CNORM_RESET_AFTER) gru_gates(cell, CNORM_SCOPE_NONE, CNORM_RESET_AFTER, zx, zh, rx, rh, h);
    else gru_gates(cell, CNORM_SCOPE_NONE, CNORM_RESET_CANDIDATE, zx, zh, rx, rh, h);
}

/* CNORM_RESET_BEFORE, before and after the product W_n (r h). First part: z and r h are stored in z and rh [padded
 * units]. */
static void gru_before_row(const cnorm_cell *cell, const float *zx, const float *zh, const float *h, float *z, float *rh)
{
    const ptrdiff_t width = padded_units(cell->weight_x.units);
    for (ptrdiff_t j = 0; j < width; j += VL_F32) {
        store_f32(z + j, sigmoid_v(preactivation(cell, CNORM_SCOPE_NONE, zx, zh, NULL, NULL, 0, j)));
        store_f32(rh + j, sigmoid_v(preactivation(cell, CNORM_SCOPE_NONE, zx, zh, NULL, NULL, 1, width + j)) * load_f32(h + j));
    }
}
static void gru_before_end(const cnorm_cell *cell, const float *zx, const float *zn, const float *z, float *h)
{
    const ptrdiff_t width = padded_units(cell->weight_x.units);
    for (ptrdiff_t j = 0; j < width; j += VL_F32) {
        const f32v n = load_f32(zn + j) + load_f32(zx + 2 * width + j) + load_f32(cell->bias + 2 * width + j);
        store_f32(h + j, gru_mix(cell, load_f32(z + j), tanh_v(n), load_f32(h + j)));
    }
}

INLINE f32v activated(cnorm_activation f, f32v a)
{
    if (f == CNORM_ACTIVATION_TANH) return tanh_v(a);
    if (f == CNORM_ACTIVATION_SIGMOID) return sigmoid_v(a);
    return (f32v)((i32v)a & ~(i32v)(a < splat_f32(0))); /* NaN stays NaN */
}

static void activation_f32(cnorm_activation f, ptrdiff_t n, const float *x, float *y)
{
    if (f == CNORM_ACTIVATION_TANH) tanh_f32(n, x, y);
    else if (f == CNORM_ACTIVATION_SIGMOID) sigmoid_f32(n, x, y);
    else
        for (ptrdiff_t i = 0; i < n; ++i) y[i] = x[i] < 0 ? 0 : x[i];
}

static void rnn_row(const cnorm_cell *cell, const float *zx, const float *zh, const float *rh, float *h)
{
    const ptrdiff_t width = padded_units(cell->weight_x.units);
    const float *rx = zx + input_row_floats(cell) - CNORM_GATE_PAD;
    for (ptrdiff_t j = 0; j < width; j += VL_F32) {
        f32v a;
        if (cell->scope == CNORM_SCOPE_SPLIT) a = preactivation(cell, CNORM_SCOPE_SPLIT, zx, zh, rx, rh, 0, j);
        else if (cell->scope == CNORM_SCOPE_SUM) a = preactivation(cell, CNORM_SCOPE_SUM, zx, zh, rx, rh, 0, j);
        else a = preactivation(cell, CNORM_SCOPE_NONE, zx, zh, rx, rh, 0, j);
        store_f32(h + j, without_tiny(activated(cell->activation, a)));
    }
    for (ptrdiff_t j = cell->weight_x.units; j < width; ++j) h[j] = 0; /* padding: sigmoid(0) is not 0 */
}

/* (2) to (4) for n streams: x [n, inputs] and its zx -> state[s] = h [padded outputs], c [padded units] */
static void cell_step(const cnorm_cell *cell, ptrdiff_t n, const float *x, ptrdiff_t x_stride, const float *zx,
                      float *const *state, float *scratch)
{
    const ptrdiff_t width = padded_units(cell->weight_x.units), out_width = padded_units(cell->weight_h.cols);
    const ptrdiff_t x_row = input_row_floats(cell), h_row = state_row_floats(cell);
    const cnorm_matrix *second = second_product(cell);
    const ptrdiff_t second_row = second ? packed_rows(second) : 0;
    const cnorm_cell_scratch at = cell_scratch(cell, n, scratch);
    float *zh = at.zh, *before = at.before, *z2 = at.z2, *in2 = at.in2, *interleaved = at.interleaved;
    const float *rows[CNORM_ROWS] = {NULL};
    for (ptrdiff_t s = 0; s < n; ++s) rows[s] = state[s];
    const int sum = cell->scope == CNORM_SCOPE_SUM;
    const double squares = products(&cell->weight_h, n, rows, sum ? zx : cell->inside_h, sum ? x_row : 0, zh, h_row, interleaved);
    for (ptrdiff_t s = 0; s < n; ++s) {
        float *h = state[s], *a = zh + s * h_row, *m = second ? in2 + s * width : h, *rh = a + h_row - CNORM_GATE_PAD;
        const float *ax = zx + s * x_row;
        if (cell->scope != CNORM_SCOPE_NONE) {
            const product_term terms[2] = {{&cell->weight_h, h, cell->inside_h},
                                           {&cell->weight_x, x + s * x_stride, cell->inside_x}};
            group_rstds(terms, sum ? 2 : 1, (double)cell->eps, squares, a, rh);
        }
        const int zoning = cell->zoneout > 0 && !second;
        if (zoning) memcpy(before, h, (size_t)out_width * sizeof *h);
        if (cell->kind == CNORM_CELL_LSTM) lstm_row(cell, ax, a, rh, h + out_width, m, at.gates);
        else if (cell->kind == CNORM_CELL_RNN) rnn_row(cell, ax, a, rh, h);
        else if (second) gru_before_row(cell, ax, a, h, in2 + (n + s) * width, m);
        else gru_row(cell, ax, a, rh, h);
        if (zoning) zone_out(cell, out_width, before, h);
        rows[s] = m;
    }
    if (!second) return;
    (void)products(second, n, rows, NULL, 0, z2, second_row, interleaved);
    for (ptrdiff_t s = 0; s < n; ++s) {
        float *h = state[s];
        const float *z = z2 + s * second_row;
        if (cell->zoneout > 0) memcpy(before, h, (size_t)out_width * sizeof *h);
        if (cell->kind == CNORM_CELL_GRU) {
            gru_before_end(cell, zx + s * x_row, z, in2 + (n + s) * width, h);
        } else {
            for (ptrdiff_t j = 0; j < out_width; j += VL_F32) {
                const f32v v = cell->bias_p ? load_f32(z + j) + load_f32(cell->bias_p + j) : load_f32(z + j);
                store_f32(h + j, without_tiny(clipped(v, cell->projection_clip)));
            }
        }
        if (cell->zoneout > 0) zone_out(cell, out_width, before, h);
    }
}

/* y [n, outputs] = W x + bias */
static void linear_step(const cnorm_linear *layer, ptrdiff_t n, const float *x, ptrdiff_t x_stride, float *y,
                        ptrdiff_t y_stride, float *scratch)
{
    const ptrdiff_t row = packed_rows(&layer->weight);
    const float *rows[CNORM_ROWS] = {NULL};
    for (ptrdiff_t s = 0; s < n; ++s) rows[s] = x + s * x_stride;
    (void)products(&layer->weight, n, rows, NULL, 0, scratch, row, scratch + n * row);
    for (ptrdiff_t s = 0; s < n; ++s)
        for (ptrdiff_t j = 0; j < layer->weight.units; ++j)
            y[s * y_stride + j] = scratch[s * row + j] + (layer->bias ? layer->bias[j] : 0.0f);
}

#endif
