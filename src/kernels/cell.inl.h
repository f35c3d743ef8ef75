/* One step of a recurrent cell, as cnorm_rnn.h defines it, for up to CNORM_ROWS streams that share the weights.
 *
 *   (1) zx = W_x x + inside_x      for all streams, or for several steps of one stream, since it needs no state
 *   (2) zh = W_h h + inside_h, or with CNORM_SCOPE_SUM zh = W_h h + zx
 *   (3) rstd = 1/sqrt(mean z^2 + eps) of each group of gates (cnorm_matrix.group), with CNORM_SCOPE_SPLIT of zx and zh,
 *       with CNORM_SCOPE_SUM of zh: the weights and `inside` are centred, so LN(z) = z rstd gain + bias
 *   (4) the gates and the state, one pass
 * A row of zx or zh is the products, then the rstd of its gates (input_row_floats, state_row_floats in kernels.h).
 * Gates are padded to CNORM_GATE_PAD units; padding is zero in weights, gains and biases, and stays zero in the state.
 */

/* (3): the rstd of each gate of z, which is the sum of the terms. On the float64 path z becomes z rstd and the stored
 * rstd is 1. The rstd in float64, which the backward pass needs, is stored from rstds + WIDE_RSTD on. */
INLINE void group_rstds(const product_term *terms, int count, double eps, float *z, float rstds[CNORM_GATE_PAD])
{
    const cnorm_matrix *w = terms[0].w;
    const ptrdiff_t width = padded_units(w->units);
    for (ptrdiff_t first = 0; first < w->gates; first += w->group) {
        const ptrdiff_t gates = w->gates - first < w->group ? w->gates - first : w->group;
        const double n = (double)(gates * w->units);
        const double squares = sum_of_squares(z + first * width, gates * width);
        float rstd = 1;
        double wide = 1.0 / sqrt(squares / n + eps);
        if (squares <= Q_MAX_F32 && (squares >= n * Q_MIN_F32 || eps >= Q_MIN_F32)) rstd = (float)wide;
        else wide = f64_product(terms, count, first * width, gates * width, n, eps, z + first * width);
        for (ptrdiff_t g = first; g < first + gates; ++g) {
            rstds[g] = rstd;
            memcpy(rstds + WIDE_RSTD + 2 * g, &wide, sizeof wide);
        }
    }
}

/* (1), and with CNORM_SCOPE_SPLIT (3) of zx: x [n, inputs] -> zx [n, input_row_floats] */
static void cell_inputs(const cnorm_cell *cell, ptrdiff_t n, const float *x, ptrdiff_t x_stride, float *zx,
                        ptrdiff_t zx_stride, float *scratch)
{
    const float *rows[CNORM_ROWS] = {NULL};
    for (ptrdiff_t s = 0; s < n; ++s) rows[s] = x + s * x_stride;
    products(&cell->weight_x, n, rows, (product_options){.add = cell->inside_x}, zx, zx_stride, scratch);
    if (cell->scope != CNORM_SCOPE_SPLIT) return;
    for (ptrdiff_t s = 0; s < n; ++s) {
        const product_term term = {&cell->weight_x, rows[s], cell->inside_x};
        float *z = zx + s * zx_stride;
        group_rstds(&term, 1, (double)cell->eps, z, z + input_row_floats(cell) - CNORM_GATE_PAD);
    }
}

/* The rest of a step with a second product of m [n, padded units]: W_n (r h) of a GRU, or the projection of an LSTM. */
static void finish_second(const cnorm_cell *cell, ptrdiff_t n, const float *const *m, float *const *state,
                          const cnorm_cell_scratch *at)
{
    const cnorm_matrix *second = second_product(cell);
    const ptrdiff_t width = padded_units(cell->weight_x.units), outputs = padded_units(cell->weight_h.cols);
    products(second, n, m, (product_options){0}, at->z2, packed_rows(second), at->products);
    for (ptrdiff_t s = 0; s < n; ++s) {
        float *h = state[s];
        const float *z = at->z2 + s * packed_rows(second);
        memcpy(at->previous_h, h, (size_t)outputs * sizeof *h);
        if (cell->kind == CNORM_CELL_GRU) {
            gru_reset_before_state(cell, at->zx + s * at->zx_stride, z, at->in2 + (n + s) * width, at->previous_h, h);
        } else {
            for (ptrdiff_t j = 0; j < outputs; j += VL_F32) {
                const f32v v = cell->bias_p ? load_f32(z + j) + load_f32(cell->bias_p + j) : load_f32(z + j);
                store_f32(h + j, without_tiny(clipped(v, cell->projection_clip)));
            }
        }
        if (cell->zoneout > 0) zone_out(cell, outputs, at->previous_h, h);
    }
}

/* (2) to (4) for n streams: x [n, inputs] and its zx in `at` -> state[s] = h [padded outputs], c [padded units] */
static void cell_step(const cnorm_cell *cell, ptrdiff_t n, const float *x, ptrdiff_t x_stride, float *const *state,
                      const cnorm_cell_scratch *at)
{
    const ptrdiff_t width = padded_units(cell->weight_x.units), outputs = padded_units(cell->weight_h.cols);
    const cnorm_matrix *second = second_product(cell);
    const float *rows[CNORM_ROWS] = {NULL};
    for (ptrdiff_t s = 0; s < n; ++s) rows[s] = state[s];
    const int sum = cell->scope == CNORM_SCOPE_SUM, zoning = cell->zoneout > 0 && !second;
    const product_options options = {sum ? at->zx : cell->inside_h, sum ? at->zx_stride : 0, at->backwards};
    products(&cell->weight_h, n, rows, options, at->zh, at->zh_stride, at->products);
    for (ptrdiff_t s = 0; s < n; ++s) {
        float *h = state[s], *m = second ? at->in2 + s * width : h, *zh = at->zh + s * at->zh_stride;
        const gate_inputs in = gate_inputs_of(cell, at->zx + s * at->zx_stride, zh);
        if (cell->scope != CNORM_SCOPE_NONE) {
            const product_term terms[2] = {{&cell->weight_h, h, cell->inside_h},
                                           {&cell->weight_x, x + s * x_stride, cell->inside_x}};
            group_rstds(terms, sum ? 2 : 1, (double)cell->eps, zh, zh + state_row_floats(cell) - CNORM_GATE_PAD);
        }
        if (zoning) memcpy(at->previous_h, h, (size_t)outputs * sizeof *h);
        if (cell->kind == CNORM_CELL_LSTM) lstm_row(&in, h + outputs, m, at->gates + s * at->gates_stride);
        else if (cell->kind == CNORM_CELL_RNN) rnn_row(&in, h);
        else if (second) gru_reset_before_gates(&in, h, at->in2 + (n + s) * width, m);
        else gru_row(&in, at->in2, h);
        if (zoning) zone_out(cell, outputs, at->previous_h, h);
        rows[s] = m;
    }
    if (second) finish_second(cell, n, rows, state, at);
}

/* y [n, outputs] = W x + bias */
static void linear_step(const cnorm_linear *layer, ptrdiff_t n, const float *x, ptrdiff_t x_stride, float *y,
                        ptrdiff_t y_stride, float *scratch)
{
    const ptrdiff_t row = packed_rows(&layer->weight), units = layer->weight.units;
    const float *rows[CNORM_ROWS] = {NULL};
    for (ptrdiff_t s = 0; s < n; ++s) rows[s] = x + s * x_stride;
    products(&layer->weight, n, rows, (product_options){0}, scratch, row, scratch + n * row);
    for (ptrdiff_t s = 0; s < n; ++s)
        for (ptrdiff_t j = 0; j < units; j += VL_F32) {
            const f32v bias = layer->bias ? load_first_f32(layer->bias + j, units - j) : splat_f32(0);
            store_first_f32(y + s * y_stride + j, units - j, load_f32(scratch + s * row + j) + bias);
        }
}
