/* The backward pass of one step of a recurrent cell: equations (1) to (8) of cnorm_train.h, in their notation; (9)
 * is in scope_backward.inl.h, (10) and (11) are in rnn/layers/cell.c. The gates of an LSTM are on the tape, those of
 * other cells are recomputed from the products on the tape with the functions of cell_gates.inl.h. Padding stays
 * zero in every gradient. */

/* dy f'(a) of gate g, whose value is y; a is recomputed unless the slope follows from y */
INLINE f32v gate_backward(const row_backward *row, ptrdiff_t gate, ptrdiff_t j, f32v y, f32v dy)
{
    if (usual_functions(row->cell)) return dy * (gate == LSTM_G ? tanh_slope(y) : sigmoid_slope(y));
    return cell_function_backward(row->cell, gate != LSTM_G, preactivation(&row->in, gate, j), dy);
}
/* the same of the candidate or output y, with the argument a */
INLINE f32v candidate_backward(const cnorm_cell *cell, f32v a, f32v y, f32v dy)
{
    return usual_functions(cell) ? dy * tanh_slope(y) : cell_function_backward(cell, OF_STATE, a, dy);
}

/* (3): from dm and dc to the gradient of the clipped c, in dc, and da_o */
static void lstm_output_backward(const row_backward *row, float *c, float *dn, float *normed)
{
    const cnorm_cell *cell = row->cell;
    const ptrdiff_t units = cell->weight_x.units, width = row->width;
    float stats[3], *partial = normed + width;
    const float *o = row->gates + 2 * width, *tanh_c = row->gates + 4 * width;
    const int norms = cell->cell_norm != CNORM_CELL_NORM_NONE;
    if (norms) norm_of_cell(cell, c, normed, stats);
    for (ptrdiff_t j = 0; j < width; j += VL_F32) {
        const f32v t = load_f32(tanh_c + j), s = load_f32(o + j), dm = load_f32(row->dm + j);
        f32v d = candidate_backward(cell, load_f32((norms ? normed : c) + j), t, dm * s);
        if (cell->cell_norm != CNORM_CELL_NORM_OUTPUT) d += load_f32(row->dc + j);
        store_f32(row->da + LSTM_O * width + j, gate_backward(row, LSTM_O, j, s, dm * t));
        store_f32((norms ? dn : row->dc) + j, d);
    }
    if (!norms) return;
    layer_norm_backward_f32(&(cnorm_norm_backward){
        .rows = 1, .n = units, .dy = dn, .x = c, .gain = cell->gain_c, .stats = stats, .dx = dn, .partials = partial});
    add_f32(units, row->sums + row->at.gain_c, partial);
    add_f32(units, row->sums + row->at.bias_c, partial + units);
    if (cell->cell_norm == CNORM_CELL_NORM_OUTPUT) add_f32(units, row->dc, dn);
    else memcpy(row->dc, dn, (size_t)units * sizeof *dn);
}

static void lstm_backward(const row_backward *row)
{
    const cnorm_cell *cell = row->cell;
    const ptrdiff_t width = row->width;
    float *raw = row->scratch, *c = raw + width, *dn = c + width, *normed = dn + width, *da = row->da;
    const float *gates = row->gates;
    for (ptrdiff_t j = 0; j < width; j += VL_F32) {
        const f32v f = load_f32(gates + j), i = load_f32(gates + LSTM_I * width + j),
                   g = load_f32(gates + LSTM_G * width + j);
        const f32v v = without_tiny(f * load_f32(row->c + j) + i * g);
        store_f32(raw + j, v);
        store_f32(c + j, clipped(v, cell->cell_clip));
    }
    lstm_output_backward(row, c, dn, normed);
    for (ptrdiff_t j = 0; j < width; j += VL_F32) {
        const f32v f = load_f32(gates + j), i = load_f32(gates + LSTM_I * width + j),
                   g = load_f32(gates + LSTM_G * width + j);
        const f32v dc = clipped_backward(load_f32(raw + j), cell->cell_clip, load_f32(row->dc + j)); /* (4) */
        store_f32(row->dc + j, dc * f);
        store_f32(da + j, gate_backward(row, LSTM_F, j, f, dc * load_f32(row->c + j))); /* (5) */
        store_f32(da + LSTM_I * width + j, gate_backward(row, LSTM_I, j, i, dc * g));
        store_f32(da + LSTM_G * width + j, gate_backward(row, LSTM_G, j, g, dc * i));
    }
    scope_backward(row, NULL);
}

/* (6) and (7): computes da and, in scratch, z and after it r = s(r). CNORM_RESET_BEFORE: stores s(r) in the place of
 * da_r, and dn in z2, too; gru_reset_before_backward does the rest. */
INLINE void gru_gates_backward(const row_backward *row)
{
    const cnorm_cell *cell = row->cell;
    const cnorm_reset reset_form = cell->reset;
    const ptrdiff_t width = row->width;
    float *z = row->scratch, *r = z + width, *n = r + width, *argument = n + width, *inner = argument + width;
    for (ptrdiff_t j = 0; j < width; j += VL_F32)
        EACH(g, 2) store_f32(z + g * width + j, preactivation(&row->in, g, j));
    cell_functions(cell, OF_GATE, 2 * width, z);
    for (ptrdiff_t j = 0; j < width; j += VL_F32) {
        const ptrdiff_t at = GRU_N * width + j;
        f32v a, of_r = splat_f32(0);
        if (reset_form != CNORM_RESET_BEFORE) a = gru_argument(&row->in, j, load_f32(r + j), &of_r);
        else a = load_f32(row->z2 + j) + load_f32(row->zx + at) + load_f32(cell->bias + at);
        store_f32(n + j, a);
        store_f32(argument + j, a);
        store_f32(inner + j, of_r);
    }
    cell_functions(cell, OF_STATE, width, n);
    for (ptrdiff_t j = 0; j < width; j += VL_F32) {
        const f32v of_z = load_f32(z + j), of_r = load_f32(r + j), of_n = load_f32(n + j), rest = 1.0f - of_z;
        const f32v dh = load_f32(row->dm + j), h = load_f32(row->h + j);
        const f32v dn = candidate_backward(cell, load_f32(argument + j), of_n, dh * (cell->keep ? rest : of_z));
        add_to(row->dh + j, dh * (cell->keep ? of_z : rest));
        store_f32(row->da + j, gate_backward(row, GRU_Z, j, of_z, dh * (cell->keep ? h - of_n : of_n - h)));
        store_f32(row->da + GRU_R * width + j, reset_form == CNORM_RESET_BEFORE
                                                   ? of_r
                                                   : gate_backward(row, GRU_R, j, of_r, dn * load_f32(inner + j)));
        store_f32(row->da + GRU_N * width + j, reset_form == CNORM_RESET_CANDIDATE ? dn * of_r : dn);
        if (reset_form == CNORM_RESET_BEFORE) store_f32(row->z2 + j, dn);
    }
}

static void gru_backward(const row_backward *row)
{
    const cnorm_reset reset = row->cell->reset;
    gru_gates_backward(row);
    if (reset != CNORM_RESET_BEFORE) scope_backward(row, reset == CNORM_RESET_AFTER ? row->scratch + row->width : NULL);
}

/* (7) for CNORM_RESET_BEFORE, with u in dm and s(r) in the place of da_r */
static void gru_reset_before_backward(const row_backward *row)
{
    float *da_r = row->da + GRU_R * row->width;
    for (ptrdiff_t j = 0; j < row->width; j += VL_F32) {
        const f32v u = load_f32(row->dm + j), r = load_f32(da_r + j);
        add_to(row->dh + j, u * r);
        store_f32(da_r + j, gate_backward(row, GRU_R, j, r, u * load_f32(row->h + j)));
    }
    scope_backward(row, NULL);
}

/* (8) */
static void rnn_backward(const row_backward *row)
{
    for (ptrdiff_t j = 0; j < row->width; j += VL_F32) store_f32(row->scratch + j, preactivation(&row->in, 0, j));
    cell_functions_backward(row->cell, OF_STATE, row->width, row->scratch, row->dm, row->da);
    scope_backward(row, NULL);
}

/* (1) and (2) up to the product with W_p: from dh to dh', and to dp in z2 or, without a projection, dm */
static void output_backward(const row_backward *row)
{
    const cnorm_cell *cell = row->cell;
    const f32v keep = splat_f32(cell->zoneout), take = splat_f32(1 - cell->zoneout);
    const ptrdiff_t outputs = padded_units(cell->weight_h.cols);
    for (ptrdiff_t j = 0; j < outputs; j += VL_F32) {
        f32v d = load_f32(row->dh + j);
        store_f32(row->dh + j, cell->zoneout > 0 ? keep * d : splat_f32(0));
        if (cell->zoneout > 0) d = take * d;
        if (cell->weight_p.panels) {
            const f32v z = load_f32(row->z2 + j), p = cell->bias_p ? z + load_f32(cell->bias_p + j) : z;
            d = clipped_backward(p, cell->projection_clip, d);
            add_to(row->sums + row->at.bias_p + j, d);
        }
        store_f32((cell->weight_p.panels ? row->z2 : row->dm) + j, d);
    }
}

static void cell_backward(const cnorm_cell_backward *call)
{
    const cnorm_cell *cell = call->cell;
    const ptrdiff_t width = padded_units(cell->weight_x.units), gates = cell->weight_x.gates * width, n = call->n;
    const cell_backward_scratch scratch = cell_backward_scratch_of(cell, call->scratch);
    const int in_place = cell->scope == CNORM_SCOPE_NONE && usual_functions(cell);
    row_backward rows[SUM_ROWS];
    memset(scratch.dm, 0, (size_t)(n * width) * sizeof *scratch.dm);
    for (ptrdiff_t s = 0; s < n; ++s) {
        float *tape = call->tape + s * call->stride;
        const ptrdiff_t after = s * call->dstate_stride;
        rows[s] = (row_backward){.cell = cell,
                                 .zx = tape + call->row.zx,
                                 .zh = tape + call->row.zh,
                                 .z2 = tape + call->row.z2,
                                 .in = gate_inputs_of(cell, tape + call->row.zx, tape + call->row.zh),
                                 .gates = tape + call->row.gates,
                                 .h = tape + call->row.state,
                                 .c = tape + call->row.state + padded_units(cell->weight_h.cols),
                                 .dh = call->dh + after,
                                 .dc = call->dc + after,
                                 .da = in_place ? tape + call->row.zx : scratch.da + s * gates,
                                 .dm = scratch.dm + s * width,
                                 .scratch = scratch.row,
                                 .sums = call->sums,
                                 .at = vector_sums_of(cell),
                                 .width = width};
        output_backward(&rows[s]);
    }
    float *z2 = call->tape + call->row.z2;
    if (cell->weight_p.panels) products_backward(&cell->weight_p, n, z2, call->stride, scratch.dm, width, 0);
    for (ptrdiff_t s = 0; s < n; ++s) {
        prefetch(rows[s + 1 < n ? s + 1 : s].h, 0, (call->row.floats - call->row.state) * (ptrdiff_t)sizeof(float));
        if (cell->kind == CNORM_CELL_LSTM) lstm_backward(&rows[s]);
        else if (cell->kind == CNORM_CELL_GRU) gru_backward(&rows[s]);
        else rnn_backward(&rows[s]);
    }
    if (cell->weight_n.panels) {
        products_backward(&cell->weight_n, n, z2, call->stride, scratch.dm, width, 0);
        for (ptrdiff_t s = 0; s < n; ++s) gru_reset_before_backward(&rows[s]);
    }
}
