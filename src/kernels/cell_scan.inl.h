/* Plain_cells of at most SCAN_UNITS units scanned over the positions of a frame from 0, up to SCANS side by side: (1),
 * (2) and (4) of cell.inl.h without leaving this function, with the units of all cells in lanes. A step waits for the
 * one before, so what counts is the chain from h to h: a product, then a sigmoid and a tanh.
 *
 * Each cell has `room` lanes, a power of two. Lanes without a unit have weights and biases of 0: their state is 0. */

enum { SCAN_HALVES = 4, SCAN_VECTORS = SCAN_HALVES / 2 }; /* the most vectors of float64, and of float, of all lanes */

typedef struct scan_lanes {
    const cnorm_frame_scan *scans;
    int count;
    ptrdiff_t positions, room, units, width; /* units: of the larger cell; width: lanes of whole vectors */
    const float *weights_x, *weights_h;      /* [inputs, gates, width], [units, gates, width] */
    const float *bias, *bias_n;              /* [gates, width], [width] */
    float *state;                            /* [2, width]: h, and c of an LSTM */
    i32v cell[SCAN_VECTORS];                 /* of each lane, by number */
    i32v used[SCAN_VECTORS];                 /* lanes with a unit */
    i32v first;                              /* of each lane of a vector: the first lane of its cell there */
} scan_lanes;

/* z [gates, vectors] += W x of one column of weights and the x of each lane; the counts are constants */
INLINE void scan_column(int gates, int vectors, const float *weights, const f32v *x, f32v *z)
{
    const int sums = gates * vectors;
    EACH(i, sums) z[i] = fma_f32(load_f32(weights + i * VL_F32), x[i % vectors], z[i]);
}

/* the position of a step */
INLINE ptrdiff_t scan_position(const scan_lanes *is, const cnorm_frame_scan *scan, ptrdiff_t t)
{
    return scan->backwards ? is->positions - 1 - t : t;
}

/* (1): zx of step t; 0 in lanes without a unit, where W x is NaN if x is not finite */
INLINE void scan_inputs(const scan_lanes *is, int gates, int vectors, ptrdiff_t t, f32v *zx)
{
    const ptrdiff_t inputs = is->scans->cell->weight_x.cols, row = gates * is->width;
    const float *weights = is->weights_x, *at[SCANS];
    const int sums = gates * vectors;
    EACH(s, SCANS) {
        const cnorm_frame_scan *scan = is->scans + (s < is->count ? s : 0);
        at[s] = scan->x + scan_position(is, scan, t);
    }
    EACH(i, sums) zx[i] = splat_f32(0);
    for (ptrdiff_t k = 0; k < inputs;) {
        const ptrdiff_t end = inputs - k < BLOCK ? inputs : k + BLOCK;
        f32v block[LSTM_GATES * SCAN_VECTORS] = {{0}}, x[SCAN_VECTORS];
        for (; k < end; ++k, weights += row) {
            const ptrdiff_t next = k * is->positions;
            const f32v each = {at[0][next], at[1][next], at[2][next], at[3][next]};
            EACH(v, vectors) x[v] = lanes_f32(each, is->cell[v]);
            scan_column(gates, vectors, weights, x, block);
        }
        EACH(i, sums) zx[i] += block[i];
    }
    EACH(i, sums) zx[i] = (f32v)((i32v)zx[i] & is->used[i % vectors]);
}

/* (2): zh, which is one block */
INLINE void scan_states(const scan_lanes *is, int gates, int vectors, const f32v *h, f32v *zh)
{
    const ptrdiff_t per = is->room > VL_F32 ? is->room / VL_F32 : 1, row = gates * is->width;
    const float *weights = is->weights_h;
    const int sums = gates * vectors;
    f32v block[LSTM_GATES * SCAN_VECTORS] = {{0}}, of_k[SCAN_VECTORS];
    for (ptrdiff_t k = 0; k < is->units; ++k, weights += row) {
        const i32v lane = is->first + (int32_t)(k % VL_F32);
        EACH(v, vectors) {
            const float *at = is->state + (v - v % per + k / VL_F32) * VL_F32;
            of_k[v] = lanes_f32(vectors == 1 ? h[0] : load_f32(at), lane);
        }
        scan_column(gates, vectors, weights, of_k, block);
    }
    EACH(i, sums) zh[i] = splat_f32(0) + block[i];
}

/* (4): the new h, and c; as in gru_row and lstm_row. halves: of float64, of a vector that has lanes with units */
INLINE void scan_gru(const scan_lanes *is, int vectors, int halves, const f32v *zx, const f32v *zh, f32v *h)
{
    const cnorm_activation sigmoid = CNORM_ACTIVATION_SIGMOID, tanh = CNORM_ACTIVATION_TANH;
    const cnorm_activation of_r[] = {sigmoid, sigmoid}, of_n[] = {tanh, vectors > 1 ? tanh : sigmoid, sigmoid, sigmoid};
    f32v r[SCAN_VECTORS], n[2 * SCAN_VECTORS], *z = n + vectors; /* n waits for r, h for both */
    EACH(v, vectors) {
        const int at_z = GRU_Z * vectors + v, at_r = GRU_R * vectors + v;
        r[v] = zh[at_r] + zx[at_r] + load_f32(is->bias + at_r * VL_F32);
        z[v] = zh[at_z] + zx[at_z] + load_f32(is->bias + at_z * VL_F32);
    }
    activate_halves(vectors, halves, of_r, r);
    EACH(v, vectors) {
        const int at = GRU_N * vectors + v;
        const f32v inner = zh[at] + load_f32(is->bias_n + v * VL_F32);
        n[v] = zx[at] + load_f32(is->bias + at * VL_F32) + r[v] * inner;
    }
    activate_halves(2 * vectors, halves, of_n, n);
    EACH(v, vectors) h[v] = gru_mix(is->scans->cell, z[v], n[v], h[v]);
}
INLINE void scan_lstm(const scan_lanes *is, int vectors, int halves, const f32v *zx, const f32v *zh, f32v *h)
{
    const cnorm_activation sigmoid = CNORM_ACTIVATION_SIGMOID, tanh = CNORM_ACTIVATION_TANH;
    const cnorm_activation f[LSTM_GATES] = {sigmoid, sigmoid, sigmoid, tanh}, last[] = {tanh, tanh};
    f32v o[SCAN_VECTORS];
    EACH(v, vectors) {
        float *c = is->state + is->width + v * VL_F32;
        f32v gate[LSTM_GATES];
        EACH(g, LSTM_GATES) {
            const int at = g * vectors + v;
            gate[g] = zh[at] + zx[at] + load_f32(is->bias + at * VL_F32);
        }
        activate_halves(LSTM_GATES, halves, f, gate);
        h[v] = without_tiny(gate[LSTM_F] * load_f32(c) + gate[LSTM_I] * gate[LSTM_G]);
        store_f32(c, h[v]);
        o[v] = gate[LSTM_O];
    }
    activate_halves(vectors, halves, last, h);
    EACH(v, vectors) h[v] = without_tiny(o[v] * h[v]);
}

/* the h of step t to y of all cells */
INLINE void scan_outputs(const scan_lanes *is, ptrdiff_t t)
{
    for (int s = 0; s < is->count; ++s) {
        const cnorm_frame_scan *scan = is->scans + s;
        float *to = scan->y + scan_position(is, scan, t);
        for (ptrdiff_t j = 0; j < scan->cell->weight_x.units; ++j) to[j * is->positions] = is->state[s * is->room + j];
    }
}

/* Steps until all positions are done, or h has a number so small that its vector may be tiny; lstm, vectors and halves
 * are constants. What needs no new h comes behind the product of h: there a processor has time for it. */
INLINE ptrdiff_t scan_steps(const scan_lanes *is, int lstm, int vectors, int halves)
{
    const int gates = lstm ? LSTM_GATES : GRU_GATES, sums = gates * vectors;
    const ptrdiff_t positions = is->positions;
    f32v h[SCAN_VECTORS] = {{0}}, zx[LSTM_GATES * SCAN_VECTORS], zh[LSTM_GATES * SCAN_VECTORS];
    i32v small = {0}; /* in its signs */
    ptrdiff_t t = 0;
    scan_inputs(is, gates, vectors, 0, zx);
    while (t < positions && !any_i32((i32v)(small < 0))) {
        f32v next[LSTM_GATES * SCAN_VECTORS];
        scan_states(is, gates, vectors, h, zh);
        if (t > 0) scan_outputs(is, t - 1);
        scan_inputs(is, gates, vectors, t + 1 < positions ? t + 1 : t, next);
        if (lstm) scan_lstm(is, vectors, halves, zx, zh, h);
        else scan_gru(is, vectors, halves, zx, zh, h);
        EACH(v, vectors) {
            const i32v magnitude = (i32v)h[v] & 0x7fffffff;
            small |= (magnitude - LEAST_LARGE) & -magnitude;
            store_f32(is->state + v * VL_F32, h[v]);
        }
        EACH(i, sums) zx[i] = next[i];
        ++t;
    }
    scan_outputs(is, t - 1);
    return t;
}

/* the weights, biases and states of the cells in lanes, in scratch that is 0 */
static void scan_weights(const scan_lanes *is, float *weights_x, float *weights_h, float *bias, float *bias_n)
{
    for (int s = 0; s < is->count; ++s) {
        const cnorm_cell *cell = is->scans[s].cell;
        const ptrdiff_t inputs = cell->weight_x.cols, units = cell->weight_x.units, lane = s * is->room;
        const size_t item = sizeof(f32x4);
        for (ptrdiff_t g = 0; g < cell->weight_x.gates; ++g) {
            const ptrdiff_t at = g / 2 * PANEL, r = g * CNORM_GATE_PAD, to = g * is->width + lane;
            const float *of_x = (const float *)cell->weight_x.panels + at * inputs + r % PANEL;
            const float *of_h = (const float *)cell->weight_h.panels + at * units + r % PANEL;
            for (ptrdiff_t j = 0; j < is->room; j += 4) {
                const ptrdiff_t row = cell->weight_x.gates * is->width;
                for (ptrdiff_t k = 0; k < inputs; ++k) memcpy(weights_x + k * row + to + j, of_x + k * PANEL + j, item);
                for (ptrdiff_t k = 0; k < units; ++k) memcpy(weights_h + k * row + to + j, of_h + k * PANEL + j, item);
                memcpy(bias + to + j, cell->bias + r + j, item);
                if (g == 0 && cell->bias_n) memcpy(bias_n + lane + j, cell->bias_n + j, item);
            }
        }
    }
}

/* `count` scans of cells with at most `units` units and `room` lanes each, SCAN_HALVES vectors of float64 at most */
static void scan_together(ptrdiff_t positions, int count, cnorm_frame_scan *scans, ptrdiff_t units, ptrdiff_t room,
                          float *scratch)
{
    const cnorm_cell *cell = scans->cell;
    const ptrdiff_t lanes = room * (count > 2 ? SCANS : count), width = lanes < VL_F32 ? VL_F32 : lanes;
    const ptrdiff_t gates = cell->weight_x.gates, inputs = cell->weight_x.cols;
    float *weights_h = scratch + inputs * gates * width, *bias = weights_h + units * gates * width;
    float *bias_n = bias + gates * width, *state = bias_n + width;
    memset(scratch, 0, (size_t)(state + 2 * width - scratch) * sizeof *scratch);
    scan_lanes is = {scans,     count, positions, room,  units, width, scratch,
                     weights_h, bias,  bias_n,    state, {{0}}, {{0}}, {0}};
    static const int32_t lane[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    i32v lanes_of;
    memcpy(&lanes_of, lane, sizeof lanes_of);
    is.first = room < VL_F32 ? lanes_of & (int32_t)-room : (i32v){0};
    EACH(v, SCAN_VECTORS)
        for (int32_t s = 0; s < SCANS; ++s) {
            const i32v unit = lanes_of + v * VL_F32 - s * (int32_t)room;
            if (s > 0) is.cell[v] -= (i32v)(unit >= 0);
            if (s < count) is.used[v] |= (i32v)(unit >= 0) & (i32v)(unit < (int32_t)scans[s].cell->weight_x.units);
        }
    scan_weights(&is, scratch, weights_h, bias, bias_n);
    const int lstm = cell->kind == CNORM_CELL_LSTM;
    ptrdiff_t done;
    if (lanes <= VL_F64) done = lstm ? scan_steps(&is, 1, 1, 1) : scan_steps(&is, 0, 1, 1);
    else if (lanes <= VL_F32) done = lstm ? scan_steps(&is, 1, 1, 2) : scan_steps(&is, 0, 1, 2);
    else done = lstm ? scan_steps(&is, 1, 2, 2) : scan_steps(&is, 0, 2, 2);
    for (int s = 0; s < count; ++s) {
        scans[s].done = done;
        for (int k = 0; k <= lstm && done < positions; ++k)
            for (ptrdiff_t j = 0; j < CNORM_GATE_PAD; ++j)
                scans[s].state[k * CNORM_GATE_PAD + j] = j < room ? state[k * width + s * room + j] : 0;
    }
}

#ifdef EMULATED_FMA
enum { LANES_SCANNED = 0 }; /* processors so old get the smaller kernels: 37 kB of text */
#else
enum { LANES_SCANNED = SCAN_HALVES * VL_F64 };
#endif

/* as many cells together as there are lanes for; none where they are too few for one */
static void cell_scan(ptrdiff_t positions, int count, cnorm_frame_scan *scans, float *scratch)
{
    ptrdiff_t units = 0;
    for (int s = 0; s < count; ++s) {
        scans[s].done = 0;
        if (scans[s].cell->weight_x.units > units) units = scans[s].cell->weight_x.units;
    }
    const ptrdiff_t room = units <= 4 ? 4 : units <= 8 ? 8 : SCAN_UNITS;
    const int most = (int)(LANES_SCANNED / room);
    for (int s = 0, n; most > 0 && s < count; s += n) {
        n = count - s < most ? count - s : most;
        scan_together(positions, n, scans + s, units, room, scratch);
    }
}
