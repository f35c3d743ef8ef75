/* (4) of cell.inl.h: gates and state of one stream from its products, for each kind of cell. */

/* |v| < 2^-100 becomes 0: a decaying state such as 0.9 c would otherwise stay at a subnormal for ever */
INLINE f32v without_tiny(f32v v)
{
    const f32v tiny = splat_f32(0x1p-100f);
    return (f32v)((i32v)v & ~((i32v)(v < tiny) & (i32v)(v > -tiny)));
}

/* The products of one stream, zx and zh [gates, padded units], and the rstd of each of their gates. */
typedef struct gate_inputs {
    const cnorm_cell *cell;
    const float *zx, *zh, *rstd_x, *rstd_h;
} gate_inputs;

INLINE gate_inputs gate_inputs_of(const cnorm_cell *cell, const float *zx, const float *zh)
{
    return (gate_inputs){cell, zx, zh, zx + input_row_floats(cell) - CNORM_GATE_PAD,
                         zh + state_row_floats(cell) - CNORM_GATE_PAD};
}

/* The two parts of the pre-activation of gate g, whose units j are at offset `at`, without bias; with CNORM_SCOPE_SUM
 * part_h is the whole. */
INLINE f32v part_x(const gate_inputs *in, ptrdiff_t g, ptrdiff_t at)
{
    const f32v z = load_f32(in->zx + at);
    return in->cell->scope == CNORM_SCOPE_SPLIT ? (z * splat_f32(in->rstd_x[g])) * load_f32(in->cell->gain_x + at) : z;
}
INLINE f32v part_h(const gate_inputs *in, ptrdiff_t g, ptrdiff_t at)
{
    const f32v z = load_f32(in->zh + at);
    return in->cell->scope == CNORM_SCOPE_NONE ? z : (z * splat_f32(in->rstd_h[g])) * load_f32(in->cell->gain_h + at);
}
INLINE f32v preactivation(const gate_inputs *in, ptrdiff_t g, ptrdiff_t j)
{
    const ptrdiff_t at = g * padded_units(in->cell->weight_x.units) + j;
    const f32v h = part_h(in, g, at);
    return (in->cell->scope == CNORM_SCOPE_SUM ? h : h + part_x(in, g, at)) + load_f32(in->cell->bias + at);
}

/* Updates c and computes the gates, each [padded units]: s(f), s(i), s(o), tanh(g) */
INLINE void lstm_gates(const gate_inputs *in, float *c, float *gates)
{
    const cnorm_activation sigmoid = CNORM_ACTIVATION_SIGMOID;
    const cnorm_activation f[LSTM_GATES] = {sigmoid, sigmoid, sigmoid, CNORM_ACTIVATION_TANH};
    const ptrdiff_t width = padded_units(in->cell->weight_x.units);
    for (ptrdiff_t j = 0; j < width; j += VL_F32) {
        f32v gate[LSTM_GATES];
        EACH(g, LSTM_GATES) gate[g] = preactivation(in, g, j);
        activate(LSTM_GATES, f, gate);
        store_f32(c + j, without_tiny(gate[LSTM_F] * load_f32(c + j) + gate[LSTM_I] * gate[LSTM_G]));
        EACH(g, LSTM_GATES) store_f32(gates + g * width + j, gate[g]);
    }
}
/* the same with other functions */
static NOINLINE void other_lstm_gates(const gate_inputs *in, float *c, float *gates)
{
    const ptrdiff_t width = padded_units(in->cell->weight_x.units);
    float *i = gates + LSTM_I * width, *g = gates + LSTM_G * width;
    for (ptrdiff_t j = 0; j < width; j += VL_F32)
        EACH(k, LSTM_GATES) store_f32(gates + k * width + j, preactivation(in, k, j));
    cell_functions(in->cell, OF_GATE, LSTM_G * width, gates);
    cell_functions(in->cell, OF_STATE, width, g);
    for (ptrdiff_t j = 0; j < width; j += VL_F32)
        store_f32(c + j, without_tiny(load_f32(gates + j) * load_f32(c + j) + load_f32(i + j) * load_f32(g + j)));
    clear_padding(in->cell, c);
}

/* h = zoneout previous_h + (1 - zoneout) h */
INLINE void zone_out(const cnorm_cell *cell, ptrdiff_t width, const float *previous_h, float *h)
{
    const f32v keep = splat_f32(cell->zoneout), take = splat_f32(1 - cell->zoneout);
    for (ptrdiff_t j = 0; j < width; j += VL_F32)
        store_f32(h + j, without_tiny(keep * load_f32(previous_h + j) + take * load_f32(h + j)));
}

/* normed [padded units] = layer norm of c; stats [3] or NULL */
static void norm_of_cell(const cnorm_cell *cell, const float *c, float *normed, float *stats)
{
    const ptrdiff_t units = cell->weight_x.units;
    for (ptrdiff_t j = units; j < padded_units(units); ++j) normed[j] = 0;
    layer_norm_f32(&(cnorm_norm){.rows = 1,
                                 .n = units,
                                 .x = c,
                                 .gain = cell->gain_c,
                                 .bias = cell->bias_c,
                                 .eps = (double)cell->eps,
                                 .y = normed,
                                 .stats = stats});
}

/* (4); m [padded units] is h, or the input of the projection; gates [lstm_gates_floats] */
static void lstm_row(const gate_inputs *in, float *c, float *m, float *gates)
{
    const cnorm_cell *cell = in->cell;
    const ptrdiff_t width = padded_units(cell->weight_x.units);
    float *o = gates + LSTM_O * width, *normed = gates + LSTM_GATES * width; /* and then its tanh */
    if (usual_functions(cell)) lstm_gates(in, c, gates);
    else other_lstm_gates(in, c, gates);
    if (cell->cell_clip < INFINITY)
        for (ptrdiff_t j = 0; j < width; j += VL_F32) store_f32(c + j, clipped(load_f32(c + j), cell->cell_clip));
    if (cell->cell_norm == CNORM_CELL_NORM_NONE) memcpy(normed, c, (size_t)width * sizeof *c);
    else norm_of_cell(cell, c, normed, NULL);
    if (cell->cell_norm == CNORM_CELL_NORM_CARRY)
        for (ptrdiff_t j = 0; j < width; j += VL_F32) store_f32(c + j, without_tiny(load_f32(normed + j)));
    cell_functions(cell, OF_STATE, width, normed);
    for (ptrdiff_t j = 0; j < width; j += VL_F32)
        store_f32(m + j, without_tiny(load_f32(o + j) * load_f32(normed + j)));
    clear_padding(cell, m);
}

/* The GRU. From here on z, r and n are its gates after sigmoid and tanh; z is no longer a product. */
INLINE f32v gru_mix(const cnorm_cell *cell, f32v z, f32v n, f32v h)
{
    const f32v rest = 1.0f - z;
    return without_tiny(cell->keep ? z * h + rest * n : rest * h + z * n);
}

/* The argument of n of a GRU with one product of h, and what r multiplies in it, `inner` */
INLINE f32v gru_argument(const gate_inputs *in, ptrdiff_t j, f32v r, f32v *inner)
{
    const cnorm_cell *cell = in->cell;
    const ptrdiff_t at = GRU_N * padded_units(cell->weight_x.units) + j;
    if (cell->reset == CNORM_RESET_CANDIDATE) {
        *inner = preactivation(in, GRU_N, j);
        return r * *inner;
    }
    *inner = part_h(in, GRU_N, at);
    if (cell->bias_n) *inner += load_f32(cell->bias_n + j);
    return part_x(in, GRU_N, at) + load_f32(cell->bias + at) + r * *inner;
}

/* z [2, padded units]: z, then r and after it n; a function takes several vectors at a time, since its steps wait for
 * each other: 0.75 to 0.85 of the time of `process` of 12->64 (Zen 5, 2026-11-29) */
static void gru_row(const gate_inputs *in, float *z, float *h)
{
    const cnorm_cell *cell = in->cell;
    const ptrdiff_t width = padded_units(cell->weight_x.units);
    float *n = z + width;
    for (ptrdiff_t j = 0; j < width; j += VL_F32)
        EACH(g, 2) store_f32(z + g * width + j, preactivation(in, g, j));
    cell_functions(cell, OF_GATE, 2 * width, z);
    for (ptrdiff_t j = 0; j < width; j += VL_F32) {
        f32v inner;
        store_f32(n + j, gru_argument(in, j, load_f32(n + j), &inner));
    }
    cell_functions(cell, OF_STATE, width, n);
    for (ptrdiff_t j = 0; j < width; j += VL_F32)
        store_f32(h + j, gru_mix(cell, load_f32(z + j), load_f32(n + j), load_f32(h + j)));
    clear_padding(cell, h);
}

/* CNORM_RESET_BEFORE, before and after the product W_n (r h). First part: z and r h are stored in z and rh [padded
 * units]. */
static void gru_reset_before_gates(const gate_inputs *in, const float *h, float *z, float *rh)
{
    const ptrdiff_t width = padded_units(in->cell->weight_x.units);
    for (ptrdiff_t j = 0; j < width; j += VL_F32) {
        store_f32(z + j, preactivation(in, GRU_Z, j));
        store_f32(rh + j, preactivation(in, GRU_R, j));
    }
    cell_functions(in->cell, OF_GATE, width, z);
    cell_functions(in->cell, OF_GATE, width, rh);
    for (ptrdiff_t j = 0; j < width; j += VL_F32) store_f32(rh + j, load_f32(rh + j) * load_f32(h + j));
}
static void gru_reset_before_state(const cnorm_cell *cell, const float *zx, const float *zn, const float *z,
                                   const float *previous_h, float *h)
{
    const ptrdiff_t width = padded_units(cell->weight_x.units), at = GRU_N * width;
    for (ptrdiff_t j = 0; j < width; j += VL_F32)
        store_f32(h + j, load_f32(zn + j) + load_f32(zx + at + j) + load_f32(cell->bias + at + j));
    cell_functions(cell, OF_STATE, width, h);
    for (ptrdiff_t j = 0; j < width; j += VL_F32)
        store_f32(h + j, gru_mix(cell, load_f32(z + j), load_f32(h + j), load_f32(previous_h + j)));
    clear_padding(cell, h);
}

static void rnn_row(const gate_inputs *in, float *h)
{
    const cnorm_cell *cell = in->cell;
    const ptrdiff_t width = padded_units(cell->weight_x.units);
    const int relu = cell->activation == CNORM_ACTIVATION_RELU && cell->clip == 0; /* a pass over h takes longer */
    for (ptrdiff_t j = 0; j < width; j += VL_F32) {
        const f32v a = preactivation(in, 0, j);
        store_f32(h + j, relu ? without_tiny(activated(CNORM_ACTIVATION_RELU, a)) : a);
    }
    if (!relu) cell_functions(cell, OF_STATE, width, h);
    for (ptrdiff_t j = 0; !relu && j < width; j += VL_F32) store_f32(h + j, without_tiny(load_f32(h + j)));
    clear_padding(cell, h);
}
