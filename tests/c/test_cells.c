/* GRU and RNN against plain float64 loops, step by step from the float64 trajectory's state rounded to float32; and
 * cnorm_run_many: each stream has the bits of cnorm_run for any batch of streams, scratch size and instruction set. */
#include "network.h"

enum { STEPS = 30, STREAMS = 19, OUTPUTS = 5, LAYERS = 2 };

typedef struct cell_case {
    const char *name;
    cnorm_cell_kind kind;
    cnorm_scope scope;
    ptrdiff_t group;
    cnorm_reset reset;
    int keep;
    cnorm_activation f;
} cell_case;

static const cell_case cases[] = {
    {"GRU, split, reset after", CNORM_CELL_GRU, CNORM_SCOPE_SPLIT, 2, CNORM_RESET_AFTER, 0, CNORM_ACTIVATION_TANH},
    {"GRU, split jointly, reset on the candidate", CNORM_CELL_GRU, CNORM_SCOPE_SPLIT, 3, CNORM_RESET_CANDIDATE, 1, CNORM_ACTIVATION_TANH},
    {"GRU, sum, reset on the candidate", CNORM_CELL_GRU, CNORM_SCOPE_SUM, 3, CNORM_RESET_CANDIDATE, 0, CNORM_ACTIVATION_TANH},
    {"GRU, plain, reset after", CNORM_CELL_GRU, CNORM_SCOPE_NONE, 0, CNORM_RESET_AFTER, 1, CNORM_ACTIVATION_TANH},
    {"GRU, plain, reset before", CNORM_CELL_GRU, CNORM_SCOPE_NONE, 0, CNORM_RESET_BEFORE, 1, CNORM_ACTIVATION_TANH},
    {"RNN, sum", CNORM_CELL_RNN, CNORM_SCOPE_SUM, 1, CNORM_RESET_AFTER, 0, CNORM_ACTIVATION_TANH},
    {"RNN, split, relu", CNORM_CELL_RNN, CNORM_SCOPE_SPLIT, 1, CNORM_RESET_AFTER, 0, CNORM_ACTIVATION_RELU},
    {"RNN, plain, sigmoid", CNORM_CELL_RNN, CNORM_SCOPE_NONE, 0, CNORM_RESET_AFTER, 0, CNORM_ACTIVATION_SIGMOID},
};

/* unpacked: weights [gates, units, .], vectors [gates, units], bias_n [units], weight_n [units, units] */
typedef struct subject {
    const cell_case *is;
    ptrdiff_t inputs, units, gates;
    float *weight_x, *weight_h, *weight_n, *inside_x, *inside_h, *gain_x, *gain_h, *bias, *bias_n;
    network memory; /* owns everything */
    cnorm_layer layers[LAYERS];
} subject;

/* [gates, units] -> [gates, padded] and CNORM_GATE_PAD more; `centred`: less the mean of each group */
static const float *padded(subject *s, const float *v, ptrdiff_t gates, int centred)
{
    const ptrdiff_t width = cnorm_padded_units(s->units), span = (s->is->group ? s->is->group : gates) * s->units;
    float *out = network_floats(&s->memory, allocate, gates * width + CNORM_GATE_PAD);
    for (ptrdiff_t first = 0; first < gates * s->units; first += span) {
        const ptrdiff_t end = first + span < gates * s->units ? first + span : gates * s->units;
        double mean = 0;
        for (ptrdiff_t i = first; i < end; ++i) mean += (double)v[i] / (double)(end - first);
        for (ptrdiff_t i = first; i < end; ++i)
            out[i / s->units * width + i % s->units] = centred ? (float)((double)v[i] - mean) : v[i];
    }
    return out;
}

static void make(subject *s, const cell_case *is, ptrdiff_t inputs, ptrdiff_t units)
{
    *s = (subject){.is = is, .inputs = inputs, .units = units, .gates = is->kind == CNORM_CELL_GRU ? 3 : 1};
    network *const m = &s->memory;
    uint64_t seed = (uint64_t)(inputs * 1009 + units);
    const ptrdiff_t rows = s->gates * units, of_h = is->reset == CNORM_RESET_BEFORE ? 2 : s->gates;
    const double scale = 1 / sqrt((double)(inputs + units));
    s->weight_x = network_random(m, allocate, rows * inputs, 0.1 * scale, scale, &seed);
    s->weight_h = network_random(m, allocate, rows * units, -0.1 * scale, scale, &seed);
    s->weight_n = network_random(m, allocate, units * units, 0, scale, &seed);
    s->inside_x = network_random(m, allocate, rows, 0.5, 0.5, &seed);
    s->inside_h = network_random(m, allocate, rows, 0.5, 0.5, &seed);
    s->gain_x = network_random(m, allocate, rows, 1, 0.25, &seed);
    s->gain_h = network_random(m, allocate, rows, 1, 0.25, &seed);
    s->bias = network_random(m, allocate, rows, 0, 0.5, &seed);
    s->bias_n = network_random(m, allocate, units, 0, 0.5, &seed);
    cnorm_cell cell = {
        .kind = is->kind, .scope = is->scope, .reset = is->reset, .keep = is->keep, .activation = is->f, .eps = 1e-5f,
        .cell_clip = INFINITY, .projection_clip = INFINITY,
        .weight_x = network_pack(m, allocate, s->gates, units, inputs, is->group, s->weight_x),
        .weight_h = network_pack(m, allocate, of_h, units, units, is->group, s->weight_h),
        .bias = padded(s, s->bias, s->gates, 0),
    };
    if (is->reset == CNORM_RESET_BEFORE) cell.weight_n = network_pack(m, allocate, 1, units, units, 0, s->weight_n);
    if (is->kind == CNORM_CELL_GRU && is->reset == CNORM_RESET_AFTER) cell.bias_n = padded(s, s->bias_n, 1, 0);
    if (is->scope != CNORM_SCOPE_NONE) cell.inside_x = padded(s, s->inside_x, s->gates, 1), cell.gain_h = padded(s, s->gain_h, s->gates, 0);
    if (is->scope == CNORM_SCOPE_SPLIT) cell.inside_h = padded(s, s->inside_h, s->gates, 1), cell.gain_x = padded(s, s->gain_x, s->gates, 0);
    s->layers[0] = (cnorm_layer){.kind = CNORM_LAYER_CELL, .as = {.cell = cell}};
    const float *weight_y = network_random(m, allocate, OUTPUTS * units, 0, 0.25, &seed);
    s->layers[1] = (cnorm_layer){.kind = CNORM_LAYER_LINEAR, .as = {.linear = {.weight = network_pack(m, allocate, 1, OUTPUTS, units, 0, weight_y)}}};
}

/* a [gates * units] = W x + inside */
static void product(const subject *s, ptrdiff_t cols, const float *w, const double *x, const float *inside, double *a)
{
    for (ptrdiff_t r = 0; r < s->gates * s->units; ++r) {
        a[r] = inside ? (double)inside[r] : 0;
        for (ptrdiff_t k = 0; k < cols; ++k) a[r] += (double)w[r * cols + k] * x[k];
    }
}

/* a = LN(a) gain, group by group */
static void normalise(const subject *s, const float *gain, double *a)
{
    const ptrdiff_t rows = s->gates * s->units, span = s->is->group * s->units;
    for (ptrdiff_t first = 0; first < rows; first += span) {
        const ptrdiff_t n = rows - first < span ? rows - first : span;
        double mean = 0, var = 0;
        for (ptrdiff_t i = first; i < first + n; ++i) mean += a[i] / (double)n;
        for (ptrdiff_t i = first; i < first + n; ++i) var += (a[i] - mean) * (a[i] - mean) / (double)n;
        for (ptrdiff_t i = first; i < first + n; ++i) a[i] = (a[i] - mean) / sqrt(var + (double)1e-5f) * (double)gain[i];
    }
}

static double sigmoid(double a) { return 1 / (1 + exp(-a)); }

/* h [units] -> next [units], as cnorm_rnn.h defines it */
static void reference_step(const subject *s, const float *x, const double *h, double *next)
{
    const cell_case *is = s->is;
    const ptrdiff_t units = s->units, rows = s->gates * units;
    double *input = calloc((size_t)s->inputs, sizeof *input), *ax = calloc((size_t)rows, sizeof *ax), *ah = calloc((size_t)rows, sizeof *ah);
    for (ptrdiff_t k = 0; k < s->inputs; ++k) input[k] = (double)x[k];
    product(s, s->inputs, s->weight_x, input, is->scope == CNORM_SCOPE_NONE ? NULL : s->inside_x, ax);
    product(s, units, s->weight_h, h, is->scope == CNORM_SCOPE_SPLIT ? s->inside_h : NULL, ah);
    if (is->scope == CNORM_SCOPE_SUM)
        for (ptrdiff_t i = 0; i < rows; ++i) ah[i] += ax[i], ax[i] = 0;
    if (is->scope == CNORM_SCOPE_SPLIT) normalise(s, s->gain_x, ax);
    if (is->scope != CNORM_SCOPE_NONE) normalise(s, s->gain_h, ah);
    for (ptrdiff_t i = 0; i < rows; ++i) ax[i] += (double)s->bias[i];
    for (ptrdiff_t j = 0; j < units && is->kind == CNORM_CELL_RNN; ++j) {
        const double a = ax[j] + ah[j];
        next[j] = is->f == CNORM_ACTIVATION_TANH ? tanh(a) : is->f == CNORM_ACTIVATION_RELU ? fmax(a, 0) : sigmoid(a);
    }
    for (ptrdiff_t j = 0; j < units && is->kind == CNORM_CELL_GRU; ++j) {
        const double z = sigmoid(ax[j] + ah[j]), r = sigmoid(ax[units + j] + ah[units + j]);
        const double of_x = ax[2 * units + j], of_h = ah[2 * units + j];
        double n = r * (of_x + of_h);
        if (is->reset == CNORM_RESET_AFTER) n = of_x + r * (of_h + (double)s->bias_n[j]);
        if (is->reset == CNORM_RESET_BEFORE) {
            n = of_x;
            for (ptrdiff_t k = 0; k < units; ++k)
                n += (double)s->weight_n[j * units + k] * sigmoid(ax[units + k] + ah[units + k]) * h[k];
        }
        next[j] = is->keep ? z * h[j] + (1 - z) * tanh(n) : (1 - z) * h[j] + z * tanh(n);
    }
    free(input), free(ax), free(ah);
}

/* A sum over k inputs in blocks of 16 has a chain of 16 + k / 16 roundings, taken as independent; 2e-6 for 64 inputs.
 * A norm over few values may divide by a small deviation: narrow cells are allowed eight times as much. */
static void steps_are_right(const subject *s, const float *x, float *state, float *scratch)
{
    const ptrdiff_t width = cnorm_padded_units(s->units), most = s->inputs > s->units ? s->inputs : s->units;
    const double bound = 2e-6 * sqrt((16 + (double)most / 16) / 20) * (s->is->scope != CNORM_SCOPE_NONE && s->units < 32 ? 8 : 1);
    double *h = calloc((size_t)s->units, sizeof *h), *next = calloc((size_t)s->units, sizeof *next);
    for (ptrdiff_t t = 0; t < STEPS; ++t, x += s->inputs) {
        float y[OUTPUTS];
        for (ptrdiff_t j = 0; j < width; ++j) state[j] = j < s->units ? (float)h[j] : 0;
        for (ptrdiff_t j = 0; j < s->units; ++j) h[j] = (double)state[j];
        reference_step(s, x, h, next);
        CHECK(cnorm_run(&(cnorm_frames){.layers = s->layers, .count = LAYERS, .frames = 1, .x = x, .state = state,
            .scratch = scratch, .y = y}) == CNORM_OK, "%s", s->is->name);
        for (ptrdiff_t j = 0; j < width; ++j) {
            const double wanted = j < s->units ? next[j] : 0, error = fabs((double)state[j] - wanted);
            CHECK(error <= (j < s->units ? bound * fmax(1, fabs(wanted)) : 0), "%s on %s, %td -> %td, step %td: h[%td] = %.9g, wanted %.9g",
                  s->is->name, cnorm_isa_active(), s->inputs, s->units, t, j, (double)state[j], wanted);
        }
        memcpy(h, next, (size_t)s->units * sizeof *h);
    }
    free(h), free(next);
}

/* x [STEPS, STREAMS, inputs]: stream i reads x[t][i]; alone [STEPS, STREAMS, OUTPUTS] and states [STREAMS] are what each gives alone */
static void many_are_as_each_alone(const subject *s, const float *x, const float *alone, float *const *states)
{
    const ptrdiff_t floats = cnorm_state_floats(s->layers, LAYERS), gap = s->inputs * STREAMS, wide = OUTPUTS + 3;
    float *own[STREAMS], *y = allocate(STREAMS * wide * 4);
    for (int i = 0; i < STREAMS; ++i) own[i] = allocate(floats * 4);
    for (ptrdiff_t rows = 1; rows <= STREAMS; rows += rows < 8 ? 1 : 11) { /* to 8, and 19: all together */
        float *scratch = allocate(cnorm_scratch_floats(s->layers, LAYERS, rows) * 4);
        for (int i = 0; i < STREAMS; ++i) memset(own[i], 0, (size_t)floats * 4);
        for (ptrdiff_t t = 0; t < STEPS; ++t) {
            /* some streams in one call, the others in a second: any number of streams, each once per step */
            const ptrdiff_t first = (t * 7) % (STREAMS + 1);
            const ptrdiff_t starts[] = {0, first}, counts[] = {first, STREAMS - first};
            for (int part = 0; part < 2; ++part) {
                const ptrdiff_t i = starts[part], n = counts[part];
                memset(y, 0x7f, (size_t)(STREAMS * wide) * 4);
                CHECK(cnorm_run_many(&(cnorm_frames){.layers = s->layers, .count = LAYERS, .frames = n,
                    .x = x + t * gap + i * s->inputs, .states = own + i, .scratch = scratch, .rows = rows, .y = y,
                    .y_stride = wide}) == CNORM_OK, "%s, %td streams", s->is->name, n);
                for (ptrdiff_t k = 0; k < n; ++k)
                    CHECK(memcmp(y + k * wide, alone + (t * STREAMS + i + k) * OUTPUTS, OUTPUTS * 4) == 0,
                          "%s on %s, %td units: stream %td of %td, room for %td, step %td", s->is->name, cnorm_isa_active(),
                          s->units, k, n, rows, t);
                for (ptrdiff_t k = 0; k < STREAMS; ++k)
                    for (ptrdiff_t j = k < n ? OUTPUTS : 0; j < wide; ++j) {
                        uint32_t bits;
                        memcpy(&bits, y + k * wide + j, 4);
                        CHECK(bits == 0x7f7f7f7f, "%s: written beyond a row", s->is->name);
                    }
            }
        }
        for (int i = 0; i < STREAMS; ++i)
            CHECK(memcmp(own[i], states[i], (size_t)floats * 4) == 0, "%s on %s: state %d", s->is->name, cnorm_isa_active(), i);
        release(scratch);
    }
    for (int i = 0; i < STREAMS; ++i) release(own[i]);
    release(y);
}

int main(void)
{
    static const int sizes[][2] = {{1, 1}, {3, 15}, {12, 64}, {33, 50}};
    for (size_t c = 0; c < sizeof cases / sizeof *cases; ++c) {
        for (size_t i = 0; i < sizeof sizes / sizeof *sizes; ++i) {
            subject s;
            make(&s, &cases[c], sizes[i][0], sizes[i][1]);
            const ptrdiff_t floats = cnorm_state_floats(s.layers, LAYERS), count = STEPS * STREAMS;
            CHECK(floats == cnorm_padded_units(s.units), "%s has h alone", s.is->name);
            uint64_t seed = i;
            float *x = allocate(count * s.inputs * 4), *y = allocate(count * OUTPUTS * 4), *first = allocate(count * OUTPUTS * 4);
            float *scratch = allocate(cnorm_scratch_floats(s.layers, LAYERS, MANY_ROWS) * 4), *states[STREAMS];
            for (ptrdiff_t j = 0; j < count * s.inputs; ++j) x[j] = (float)bell(&seed);
            for (int k = 0; k < STREAMS; ++k) states[k] = allocate(floats * 4);
            FOR_EACH_ISA(isa) {
                steps_are_right(&s, x, states[0], scratch);
                for (int k = 0; k < STREAMS; ++k) {
                    memset(states[k], 0, (size_t)floats * 4);
                    CHECK(cnorm_run(&(cnorm_frames){.layers = s.layers, .count = LAYERS, .frames = STEPS, .x = x + k * s.inputs,
                        .x_stride = STREAMS * s.inputs, .state = states[k], .scratch = scratch, .rows = MANY_ROWS,
                        .y = y + k * OUTPUTS, .y_stride = STREAMS * OUTPUTS}) == CNORM_OK, "%s", s.is->name);
                }
                if (isa == 0) memcpy(first, y, (size_t)(count * OUTPUTS) * 4);
                CHECK(memcmp(first, y, (size_t)(count * OUTPUTS) * 4) == 0, "%s, %td units: %s and %s differ", s.is->name, s.units,
                      cnorm_isa_name(isa), cnorm_isa_name(0));
                many_are_as_each_alone(&s, x, y, states);
            }
            for (int k = 0; k < STREAMS; ++k) release(states[k]);
            release(x), release(y), release(first), release(scratch);
            network_free(&s.memory);
        }
    }
    return check_result();
}
