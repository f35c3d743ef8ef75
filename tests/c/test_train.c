/* cnorm_train.h: the tape's y has the bits of cnorm_run, gradients have the same hash everywhere; refused arguments. */
#include "cnorm_train.h"
#include "network.h"

enum { STEPS = 19, BATCH = 5 };

/* the gradients of a network, each in a buffer of its own */
typedef struct gradients {
    cnorm_gradient of[NETWORK_LAYERS];
    float *arrays[9];
    ptrdiff_t floats[9];
    int count;
} gradients;

static float *gradient(gradients *all, ptrdiff_t floats)
{
    all->floats[all->count] = floats;
    return all->arrays[all->count++] = allocate(floats * 4);
}

static gradients gradients_of(const network *net)
{
    gradients all = {.count = 0};
    const ptrdiff_t gates = 4 * cnorm_padded_units(net->units), width = cnorm_padded_units(net->units);
    struct cnorm_cell_gradient *cell = &all.of[0].cell;
    struct cnorm_linear_gradient *linear = &all.of[1].linear;
    cell->weight_x = gradient(&all, 4 * net->units * net->inputs);
    cell->weight_h = gradient(&all, 4 * net->units * net->units);
    cell->gain_x = gradient(&all, gates);
    cell->gain_h = gradient(&all, gates);
    cell->bias = gradient(&all, gates);
    cell->gain_c = gradient(&all, width);
    cell->bias_c = gradient(&all, width);
    linear->weight = gradient(&all, net->outputs * net->units);
    linear->bias = gradient(&all, net->outputs);
    return all;
}

static uint64_t train(network *net, const cnorm_tape *tape, const float *x, const float *dy)
{
    const ptrdiff_t state_floats = cnorm_state_floats(net->layers, NETWORK_LAYERS);
    gradients all = gradients_of(net);
    float *state = allocate(BATCH * state_floats * 4), *dstate = allocate(BATCH * state_floats * 4);
    float *scratch = allocate(cnorm_run_tape_floats(tape) * 4);
    float *own = allocate(cnorm_backward_floats(tape) * 4);
    float *y = allocate(STEPS * BATCH * net->outputs * 4), *dx = allocate(STEPS * BATCH * net->inputs * 4);
    CHECK(cnorm_run_tape(tape, 0, STEPS, x, state, scratch, y) == CNORM_OK, "%td units", net->units);
    for (ptrdiff_t b = 0; b < BATCH; ++b) {
        network_reset(net);
        for (ptrdiff_t t = 0; t < STEPS; ++t) {
            float once[256];
            network_run(net, 1, x + (t * BATCH + b) * net->inputs, once);
            CHECK(memcmp(once, y + (t * BATCH + b) * net->outputs, (size_t)net->outputs * 4) == 0,
                  "%td units on %s: row %td of step %td is not cnorm_run's", net->units, cnorm_isa_active(), b, t);
        }
        CHECK(memcmp(state + b * state_floats, net->state, (size_t)state_floats * 4) == 0, "%td units: state", net->units);
    }
    const cnorm_backward call = {0, STEPS, dy, dx, dstate, all.of, own, NULL};
    CHECK(cnorm_run_backward(tape, &call) == CNORM_OK, "%td units", net->units);
    uint64_t hash = hash_values(HASH_START, dx, STEPS * BATCH * net->inputs, 4);
    hash = hash_values(hash, dstate, BATCH * state_floats, 4);
    for (int i = 0; i < all.count; ++i) {
        hash = hash_values(hash, all.arrays[i], all.floats[i], 4);
        release(all.arrays[i]);
    }
    release(state), release(dstate), release(scratch), release(own), release(y), release(dx);
    return hash;
}

/* The hash of the gradients of the LSTM alone, one row; tests/train/test_golden_gradients.py wants the same of
 * cnorm.Learner and cnorm.torch. */
static const uint64_t cell_hash = 0x2e8e21dd97a80447u;

static void one_cell(void)
{
    network net = network_random_of(12, 64, 9, allocate);
    cnorm_tape tape = {net.layers, 1, STEPS, 1, NULL};
    gradients all = gradients_of(&net);
    uint64_t seed = 1607, hash = HASH_START;
    tape.memory = allocate(cnorm_tape_floats(&tape) * 4);
    float *x = allocate(STEPS * net.inputs * 4), *dy = allocate(STEPS * net.units * 4), *y = allocate(STEPS * net.units * 4);
    for (ptrdiff_t j = 0; j < STEPS * net.inputs; ++j) x[j] = (float)bell(&seed);
    for (ptrdiff_t j = 0; j < STEPS * net.units; ++j) dy[j] = (float)bell(&seed);
    const ptrdiff_t state_floats = cnorm_state_floats(net.layers, 1);
    float *state = allocate(state_floats * 4), *dstate = allocate(state_floats * 4), *own = allocate(cnorm_backward_floats(&tape) * 4);
    float *scratch = allocate(cnorm_run_tape_floats(&tape) * 4);
    CHECK(cnorm_run_tape(&tape, 0, STEPS, x, state, scratch, y) == CNORM_OK, "forward");
    const cnorm_backward call = {0, STEPS, dy, NULL, dstate, all.of, own, NULL};
    CHECK(cnorm_run_backward(&tape, &call) == CNORM_OK, "backward");
    for (int i = 0; i < all.count; ++i) {
        if (i < 7) hash = hash_values(hash, all.arrays[i], all.floats[i], 4);
        release(all.arrays[i]);
    }
    CHECK(hash == cell_hash, "one cell on %s: the hash is 0x%016llx", cnorm_isa_active(), (unsigned long long)hash);
    release(state), release(dstate), release(own), release(scratch), release(x), release(dy), release(y), release(tape.memory);
    network_free(&net);
}

/* The same with a tape for each step, as far apart as they happen to be: cnorm_sum_gradients. */
static void one_cell_step_by_step(void)
{
    network net = network_random_of(12, 64, 9, allocate);
    gradients all = gradients_of(&net);
    uint64_t seed = 1607, hash = HASH_START;
    cnorm_tape tapes[STEPS];
    const cnorm_tape *order[STEPS];
    float *x = allocate(STEPS * net.inputs * 4), *dy = allocate(STEPS * net.units * 4), *y = allocate(net.units * 4);
    for (ptrdiff_t j = 0; j < STEPS * net.inputs; ++j) x[j] = (float)bell(&seed);
    for (ptrdiff_t j = 0; j < STEPS * net.units; ++j) dy[j] = (float)bell(&seed);
    const ptrdiff_t state_floats = cnorm_state_floats(net.layers, 1);
    float *state = allocate(state_floats * 4), *dstate = allocate(state_floats * 4);
    float *scratch = allocate(cnorm_scratch_floats(net.layers, 1, MANY_ROWS) * 4);
    for (int t = 0; t < STEPS; ++t) {
        tapes[t] = (cnorm_tape){net.layers, 1, 1, 1, NULL};
        tapes[t].memory = allocate(cnorm_tape_floats(&tapes[t]) * 4);
        order[t] = &tapes[t];
        CHECK(cnorm_run_tape(&tapes[t], 0, 1, x + t * net.inputs, state, scratch, y) == CNORM_OK, "step %d", t);
    }
    float *own = allocate(cnorm_backward_floats(tapes) * 4);
    cnorm_sums sums = {allocate(cnorm_sums_floats(net.layers, 1) * 4), 0};
    for (int t = STEPS - 1; t >= 0; --t) {
        const cnorm_backward call = {0, 1, dy + t * net.units, NULL, dstate, NULL, own, &sums};
        CHECK(cnorm_run_backward(&tapes[t], &call) == CNORM_OK, "backward of step %d", t);
    }
    CHECK(cnorm_sum_gradients(order, 0, &sums, all.of, own) == CNORM_ERROR_SIZE, "no tapes");
    CHECK(cnorm_sum_gradients(order, STEPS, NULL, all.of, own) == CNORM_ERROR_NULL, "no sums");
    CHECK(cnorm_sums_floats(net.layers, NETWORK_LAYERS) == 0, "sums of more than one cell");
    CHECK(cnorm_sum_gradients(order, STEPS, &sums, all.of, own) == CNORM_OK, "gradients");
    for (int i = 0; i < all.count; ++i) {
        if (i < 7) hash = hash_values(hash, all.arrays[i], all.floats[i], 4);
        release(all.arrays[i]);
    }
    CHECK(hash == cell_hash, "step by step on %s: the hash is 0x%016llx", cnorm_isa_active(), (unsigned long long)hash);
    for (int t = 0; t < STEPS; ++t) release(tapes[t].memory);
    release(state), release(dstate), release(own), release(scratch), release(x), release(dy), release(y), release(sums.memory);
    network_free(&net);
}

static void refused(const network *net, const cnorm_tape *tape, float *memory)
{
    cnorm_tape other = *tape;
    other.memory = NULL;
    CHECK(cnorm_run_tape(&other, 0, 1, memory, memory, memory, memory) == CNORM_ERROR_NULL, "no memory");
    CHECK(cnorm_run_tape(tape, 0, 1, NULL, memory, memory, memory) == CNORM_ERROR_NULL, "no x");
    CHECK(cnorm_run_tape(tape, 0, 1, memory, NULL, memory, memory) == CNORM_ERROR_NULL, "no state");
    const ptrdiff_t ranges[][2] = {{0, 0}, {0, STEPS + 1}, {1, STEPS}, {-1, 1}, {STEPS, 1}, {0, -1}, {PTRDIFF_MAX, 1}};
    for (size_t i = 0; i < sizeof ranges / sizeof *ranges; ++i) {
        CHECK(cnorm_run_tape(tape, ranges[i][0], ranges[i][1], memory, memory, memory, memory) == CNORM_ERROR_SIZE, "range %zu", i);
        const cnorm_gradient none[NETWORK_LAYERS] = {{.cell = {.weight_x = NULL}}};
        const cnorm_backward call = {ranges[i][0], ranges[i][1], memory, NULL, memory, none, memory, NULL};
        CHECK(cnorm_run_backward(tape, &call) == CNORM_ERROR_SIZE, "range %zu", i);
    }
    const ptrdiff_t sizes[][2] = {{0, 1}, {1, 0}, {-1, -1}, {PTRDIFF_MAX, 1}, {1, PTRDIFF_MAX}, {PTRDIFF_MAX / 2, PTRDIFF_MAX / 2}};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; ++i) {
        const cnorm_tape sized = {net->layers, NETWORK_LAYERS, sizes[i][0], sizes[i][1], NULL};
        CHECK(cnorm_tape_floats(&sized) == 0, "sizes %zu", i);
    }
}

int main(void)
{
    static const struct { int inputs, units, outputs; uint64_t hash; } cases[] = {
        {1, 1, 1, 0x3d5bbdf7ae039cd1u}, {5, 15, 3, 0x52aa19f689f55e9du}, {16, 17, 33, 0x0f61760a6c76339fu},
        {12, 64, 9, 0x7dacf6f2bc84d812u}, {33, 100, 40, 0x325409380776ab6eu}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; ++i) {
        network net = network_random_of(cases[i].inputs, cases[i].units, cases[i].outputs, allocate);
        cnorm_tape tape = {net.layers, NETWORK_LAYERS, STEPS, BATCH, NULL};
        tape.memory = allocate(cnorm_tape_floats(&tape) * 4);
        uint64_t seed = i + 1;
        float *x = allocate(STEPS * BATCH * net.inputs * 4), *dy = allocate(STEPS * BATCH * net.outputs * 4);
        for (ptrdiff_t j = 0; j < STEPS * BATCH * net.inputs; ++j) x[j] = (float)bell(&seed);
        for (ptrdiff_t j = 0; j < STEPS * BATCH * net.outputs; ++j) dy[j] = (float)bell(&seed);
        FOR_EACH_ISA(isa) {
            const uint64_t hash = train(&net, &tape, x, dy);
            CHECK(hash == cases[i].hash, "%td units on %s: the hash is 0x%016llx", net.units, cnorm_isa_name(isa),
                  (unsigned long long)hash);
        }
        refused(&net, &tape, x);
        release(x), release(dy), release(tape.memory);
        network_free(&net);
    }
    FOR_EACH_ISA(isa) {
        one_cell();
        one_cell_step_by_step();
    }
    return check_result();
}
