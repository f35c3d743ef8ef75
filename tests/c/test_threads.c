/* Threads that share the rows of a backward pass give the bits of a single call, and streams in threads that share one
 * network have the bits that each has alone. The same for a forward pass; all threads have small stacks. */
#include "network.h"

#include <limits.h>
#include <pthread.h>

/* 64 KiB, as in embedded systems, or the system's minimum; sanitizers have larger stack frames */
static pthread_t start(void *(*work)(void *argument), void *argument)
{
    pthread_t thread;
    pthread_attr_t attributes;
    if (pthread_attr_init(&attributes) != 0) abort();
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
    const size_t least = (size_t)PTHREAD_STACK_MIN, small = 1 << 16;
    if (pthread_attr_setstacksize(&attributes, small < least ? least : small) != 0) abort();
#endif
    if (pthread_create(&thread, &attributes, work, argument) != 0) abort();
    pthread_attr_destroy(&attributes);
    return thread;
}

enum { ROWS = 64 * 9 + 17, N = 77, MOST_THREADS = 7 };

static _Alignas(CNORM_ALIGN) char x[ROWS * N * 8], dy[ROWS * N * 8], dx[ROWS * N * 8], wanted_dx[ROWS * N * 8], stats[3 * ROWS * 8];
static char gain[N * 8], dgain[N * 8], dbias[N * 8], wanted_dgain[N * 8], wanted_dbias[N * 8], partials[10 * 2 * N * 8];

typedef struct share { cnorm_dtype dtype; int first, threads; cnorm_status status; } share;

/* every `threads`-th block, so that adjacent blocks are computed by different threads */
static void *blocks(void *argument)
{
    share *const s = argument;
    for (ptrdiff_t begin = s->first * CNORM_BLOCK_ROWS; begin < ROWS && s->status == CNORM_OK; begin += s->threads * CNORM_BLOCK_ROWS) {
        const ptrdiff_t end = begin + CNORM_BLOCK_ROWS < ROWS ? begin + CNORM_BLOCK_ROWS : ROWS;
        s->status = cnorm_layer_norm_backward_blocks(s->dtype, &(cnorm_norm_backward){.rows = ROWS, .n = N, .dy = dy, .x = x,
            .gain = gain, .stats = stats, .dx = dx, .partials = partials}, begin, end);
    }
    return NULL;
}

static void backward(cnorm_dtype dtype)
{
    uint64_t state = 1;
    for (ptrdiff_t i = 0; i < ROWS * N; ++i) put(dtype, x, i, 1 + bell(&state)), put(dtype, dy, i, bell(&state));
    for (ptrdiff_t i = 0; i < N; ++i) put(compute_type(dtype), gain, i, bell(&state));
    CHECK(cnorm_backward_partials(dtype, ROWS, N) <= (ptrdiff_t)sizeof partials, "room for the partials");
    CHECK(cnorm_layer_norm(dtype, &(cnorm_norm){.rows = ROWS, .n = N, .x = x, .gain = gain, .eps = 1e-5, .y = dx,
        .stats = stats}) == CNORM_OK, "%s", dtype_names[dtype]);
    CHECK(cnorm_layer_norm_backward(dtype, &(cnorm_norm_backward){.rows = ROWS, .n = N, .dy = dy, .x = x, .gain = gain,
        .stats = stats, .dx = wanted_dx, .dgain = wanted_dgain, .dbias = wanted_dbias,
        .partials = partials}) == CNORM_OK, "%s", dtype_names[dtype]);
    for (int threads = 1; threads <= MOST_THREADS; threads += threads < 3 ? 1 : 4) {
        pthread_t thread[MOST_THREADS];
        share shares[MOST_THREADS];
        memset(dx, 0xff, sizeof dx), memset(partials, 0xff, sizeof partials);
        for (int i = 0; i < threads; ++i) {
            shares[i] = (share){dtype, i, threads, CNORM_OK};
            thread[i] = start(blocks, &shares[i]);
        }
        for (int i = 0; i < threads; ++i) {
            pthread_join(thread[i], NULL);
            CHECK(shares[i].status == CNORM_OK, "thread %d of %d", i, threads);
        }
        CHECK(cnorm_backward_reduce(dtype, ROWS, N, partials, dgain, dbias) == CNORM_OK, "%d threads", threads);
        const size_t item = (size_t)size_of(dtype), sum = (size_t)size_of(compute_type(dtype));
        CHECK(memcmp(dx, wanted_dx, ROWS * N * item) == 0, "dx, %d threads, %s", threads, dtype_names[dtype]);
        CHECK(memcmp(dgain, wanted_dgain, N * sum) == 0, "dgain, %d threads, %s", threads, dtype_names[dtype]);
        CHECK(memcmp(dbias, wanted_dbias, N * sum) == 0, "dbias, %d threads, %s", threads, dtype_names[dtype]);
    }
}

/* rows long enough for the kept-row path, which holds row, gain and bias on the stack */
enum { LONG_ROWS = 3, LONG = 2000 };
static _Alignas(CNORM_ALIGN) char y[2][LONG_ROWS * LONG * 8], sum[2][LONG_ROWS * LONG * 8];
static char long_gain[LONG * 8], long_bias[LONG * 8];

static void *add_and_normalise(void *argument)
{
    share *const s = argument;
    s->status = cnorm_add_layer_norm(s->dtype, &(cnorm_norm){.rows = LONG_ROWS, .n = LONG, .x = x, .residual = dy,
        .gain = long_gain, .bias = long_bias, .eps = 1e-5, .y = y[s->first], .sum = sum[s->first]});
    return NULL;
}

/* of the x and dy of the backward pass */
static void forward(cnorm_dtype dtype)
{
    uint64_t state = 2;
    for (ptrdiff_t i = 0; i < LONG; ++i) put(compute_type(dtype), long_gain, i, bell(&state)), put(compute_type(dtype), long_bias, i, 1);
    share here = {dtype, 0, 1, CNORM_OK}, there = {dtype, 1, 1, CNORM_OK};
    add_and_normalise(&here);
    pthread_join(start(add_and_normalise, &there), NULL);
    CHECK(here.status == CNORM_OK && there.status == CNORM_OK, "%s", dtype_names[dtype]);
    CHECK(memcmp(y[0], y[1], sizeof y[0]) == 0 && memcmp(sum[0], sum[1], sizeof sum[0]) == 0, "forward, %s", dtype_names[dtype]);
}

enum { STEPS = 200, INPUTS = 12, UNITS = 40, OUTPUTS = 9 };

typedef struct stream { network net; const float *x; float y[STEPS * OUTPUTS]; } stream;

static void *step_by_step(void *argument)
{
    stream *const s = argument;
    for (ptrdiff_t t = 0; t < STEPS; ++t) network_run(&s->net, 1, s->x + t * INPUTS, s->y + t * OUTPUTS);
    return NULL;
}

static void streams(void)
{
    network net = network_random_of(INPUTS, UNITS, OUTPUTS, allocate);
    static stream stream_of[MOST_THREADS];
    float *input[MOST_THREADS];
    pthread_t thread[MOST_THREADS];
    for (int i = 0; i < MOST_THREADS; ++i) {
        uint64_t state = (uint64_t)i;
        stream_of[i].net = net; /* the layers are shared, state and scratch are not */
        stream_of[i].net.state = allocate(cnorm_state_floats(net.layers, NETWORK_LAYERS) * 4);
        stream_of[i].net.scratch = allocate(cnorm_scratch_floats(net.layers, NETWORK_LAYERS, net.rows) * 4);
        stream_of[i].x = input[i] = allocate(STEPS * INPUTS * 4);
        for (int j = 0; j < STEPS * INPUTS; ++j) input[i][j] = (float)bell(&state);
    }
    for (int i = 0; i < MOST_THREADS; ++i)
        thread[i] = start(step_by_step, &stream_of[i]);
    for (int i = 0; i < MOST_THREADS; ++i) pthread_join(thread[i], NULL);
    for (int i = 0; i < MOST_THREADS; ++i) {
        static float alone[STEPS * OUTPUTS];
        network_reset(&net);
        network_run(&net, STEPS, stream_of[i].x, alone);
        CHECK(memcmp(alone, stream_of[i].y, sizeof alone) == 0, "stream %d", i);
        release(stream_of[i].net.state), release(stream_of[i].net.scratch), release(input[i]);
    }
    network_free(&net);
}

int main(void)
{
    streams(); /* first, so that its threads race to select the instruction set */
    FOR_EACH_ISA(isa)
        for (int i = 0; i < DTYPES; ++i) backward(dtypes[i]), forward(dtypes[i]);
    return check_result();
}
