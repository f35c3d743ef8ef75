/* A step of a plain_cell at each position of a frame [channels, positions], with a state each: (1), (2) and (4) of
 * cell.inl.h with the positions in lanes. Every array is [units, positions] without padding between rows: whole vectors
 * are stored, and what they overwrite behind a row's end is stored later. */

/* The pre-activations of FRAME_ROWS units of one gate, and where they go */
typedef struct gate_rows {
    const cnorm_cell *cell;
    ptrdiff_t positions, gate, unit;
    cnorm_frame_view x, h;
    float *to, *inner; /* `inner` is NULL, or what r multiplies in the candidate of a GRU, which `to` then lacks */
} gate_rows;

/* of `count` vectors of positions from p on; count is a constant */
INLINE void gate_tile(const gate_rows *is, int count, ptrdiff_t p)
{
    const cnorm_cell *cell = is->cell;
    const ptrdiff_t units = cell->weight_x.units, r = is->gate * padded_units(units) + is->unit;
    const int sums = FRAME_ROWS * count;
    f32v x[FRAME_ROWS * FRAME_VECTORS], h[FRAME_ROWS * FRAME_VECTORS];
    frame_sums(&is->x, &cell->weight_x, count, r, p, x);
    frame_sums(&is->h, &cell->weight_h, count, r, p, h);
    EACH(k, sums) {
        const int i = k % FRAME_ROWS, at = i * count + count - 1 - k / FRAME_ROWS; /* the last vectors first */
        if (is->unit + i >= units) continue;
        const ptrdiff_t to = (is->unit + i) * is->positions + p + at % count * VL_F32;
        f32v sum = x[at];
        if (!is->inner) sum = h[at] + sum;
        else store_f32(is->inner + to, cell->bias_n ? h[at] + splat_f32(cell->bias_n[is->unit + i]) : h[at]);
        store_f32(is->to + to, sum + splat_f32(cell->bias[r + i]));
    }
}

/* all of x [inputs, positions] and h [units, positions], a vector's width of memory behind each */
static void gate_products(gate_rows is, const positions_arrays *at)
{
    static const ptrdiff_t none[1] = {0};
    const ptrdiff_t units = is.cell->weight_x.units, n = units * is.positions;
    const cnorm_frame_view view = {.row = is.positions, .taps = 1, .places = is.positions, .offset = none};
    is.x = is.h = view;
    is.x.at = at->x, is.x.channels = is.cell->weight_x.cols;
    is.h.at = at->h, is.h.channels = units;
    for (is.gate = 0; is.gate < is.cell->weight_x.gates; ++is.gate) {
        is.to = at->gates + is.gate * n;
        is.inner = is.cell->kind == CNORM_CELL_GRU && is.gate == GRU_N ? at->inner : NULL;
        for (is.unit = 0; is.unit < units; is.unit += FRAME_ROWS)
            for (ptrdiff_t v = (is.positions + VL_F32 - 1) / VL_F32, count; v > 0; v -= count) {
                count = v % FRAME_VECTORS ? v % FRAME_VECTORS : FRAME_VECTORS;
                const ptrdiff_t p = (v - count) * VL_F32;
                if (count == 3) gate_tile(&is, 3, p);
                else if (count == 2) gate_tile(&is, 2, p);
                else gate_tile(&is, 1, p);
            }
    }
}

/* (4), of n numbers of each gate */
static void grus(const cnorm_cell *cell, ptrdiff_t n, float *gates, const float *inner, float *h)
{
    float *z = gates + GRU_Z * n, *r = gates + GRU_R * n, *c = gates + GRU_N * n;
    sigmoid_f32(2 * n, z, z);
    for (ptrdiff_t i = 0; i < n; i += VL_F32) store_f32(c + i, load_f32(c + i) + load_f32(r + i) * load_f32(inner + i));
    tanh_f32(n, c, c);
    for (ptrdiff_t i = 0; i < n; i += VL_F32) {
        const f32v old = load_first_f32(h + i, n - i);
        store_first_f32(h + i, n - i, gru_mix(cell, load_f32(z + i), load_f32(c + i), old));
    }
}
static void lstms(ptrdiff_t n, float *gates, float *h, float *c)
{
    float *f = gates + LSTM_F * n, *in = gates + LSTM_I * n, *o = gates + LSTM_O * n, *g = gates + LSTM_G * n;
    sigmoid_f32(3 * n, gates, gates);
    tanh_f32(n, g, g);
    for (ptrdiff_t i = 0; i < n; i += VL_F32) {
        const f32v old = load_first_f32(c + i, n - i);
        const f32v v = without_tiny(load_f32(f + i) * old + load_f32(in + i) * load_f32(g + i));
        store_first_f32(c + i, n - i, v);
    }
    tanh_f32(n, c, g);
    for (ptrdiff_t i = 0; i < n; i += VL_F32)
        store_first_f32(h + i, n - i, without_tiny(load_f32(o + i) * load_f32(g + i)));
}

/* x [inputs, positions] -> y, h and c [units, positions]; no position of x and h is tiny; y may be x */
static void positions_step(const cnorm_cell *cell, ptrdiff_t positions, const float *x, float *h, float *c, float *y,
                           const positions_arrays *at)
{
    const ptrdiff_t inputs = cell->weight_x.cols * positions, n = cell->weight_x.units * positions;
    memcpy(at->x, x, (size_t)inputs * sizeof *x);
    memcpy(at->h, h, (size_t)n * sizeof *h);
    EACH(i, CNORM_GATE_PAD / VL_F32) {
        store_f32(at->x + inputs + i * VL_F32, splat_f32(0));
        store_f32(at->h + n + i * VL_F32, splat_f32(0));
    }
    gate_products((gate_rows){.cell = cell, .positions = positions}, at);
    if (cell->kind == CNORM_CELL_GRU) grus(cell, n, at->gates, at->inner, h);
    else lstms(n, at->gates, h, c);
    memcpy(y, h, (size_t)n * sizeof *y);
}
