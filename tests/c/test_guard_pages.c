/* No kernel reads or writes outside its buffers: every buffer lies directly after, then directly before, a page that
 * has no access rights, for every length from 1 to 130, on every instruction set. An access faults and is reported.
 *
 *     test_guard_pages [STEP]    every STEP-th length: under valgrind, which takes 40 times as long
 */
#include "cnorm_norms.h"
#include "dispatch.h"
#include "rows.h"
#include "frames.h"
#include "stack.h"

#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

enum { LONGEST = 130, ROWS = 3, WHOLE_ROWS = 65 };

static int at_end; /* where buffers lie in their pages */
static char doing[256];

static void fault(int number)
{
    static const char told[] = "touched a guard page: ";
    (void)number;
    (void)!write(2, told, sizeof told - 1);
    (void)!write(2, doing, strlen(doing));
    (void)!write(2, "\n", 1);
    _exit(1);
}

/* a buffer of whole pages, filled with 0xff (NaN), between two guard pages */
typedef struct guarded { char *pages; size_t bytes; } guarded;

static guarded guarded_pages(ptrdiff_t bytes)
{
    const size_t page = (size_t)sysconf(_SC_PAGESIZE), whole = ((size_t)bytes + page - 1) / page * page;
    char *p = mmap(NULL, whole + 2 * page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED || mprotect(p + page, whole, PROT_READ | PROT_WRITE) != 0) abort();
    return (guarded){memset(p + page, 0xff, whole), whole};
}

/* its first or last `bytes` bytes; the rest is filled with 0xff again, so that a wrong read shows in the result */
static void *place(guarded g, ptrdiff_t bytes)
{
    memset(g.pages, 0xff, g.bytes);
    return at_end ? g.pages + g.bytes - bytes : g.pages;
}

/* the kernels that have been run, by storage type; compared with the list of kernels at the end */
static struct { const char *kernel; int dtypes; } tried[64];
static void note(const char *kernel, cnorm_dtype dtype)
{
    int i = 0;
    while (tried[i].kernel && strcmp(tried[i].kernel, kernel) != 0) ++i;
    tried[i].kernel = kernel;
    tried[i].dtypes |= 1 << dtype;
}

static void check_that_tried(const char *kernel)
{
    int seen = 0;
    for (int i = 0; tried[i].kernel; ++i)
        if (strcmp(tried[i].kernel, kernel) == 0) seen = tried[i].dtypes;
    for (int i = 0; i < DTYPES; ++i)
        CHECK(!kernel_takes(kernel, (cnorm_dtype)i) || seen >> i & 1, "%s of %s is not tried", kernel, dtype_names[i]);
}

static int all_finite(cnorm_dtype dtype, const void *buffer, ptrdiff_t count)
{
    for (ptrdiff_t i = 0; i < count; ++i)
        if (!isfinite(get(dtype, buffer, i))) return 0;
    return 1;
}

static void norms(cnorm_dtype dtype, ptrdiff_t rows, ptrdiff_t n)
{
    static guarded x, dy, gain, bias, y, sum, stats, dx, dgain, dbias, partials;
    if (!x.pages) {
        guarded *const matrices[] = {&x, &dy, &y, &sum, &dx}, *const vectors[] = {&gain, &bias, &stats, &dgain, &dbias, &partials};
        for (int i = 0; i < 5; ++i) *matrices[i] = guarded_pages(WHOLE_ROWS * LONGEST * 8);
        for (int i = 0; i < 6; ++i) *vectors[i] = guarded_pages(4 * LONGEST * 8);
    }
    const cnorm_dtype computed = compute_type(dtype);
    const ptrdiff_t count = rows * n, matrix = count * size_of(dtype), vector = n * size_of(computed);
    void *const px = place(x, matrix), *const pdy = place(dy, matrix), *const py = place(y, matrix);
    void *const psum = place(sum, matrix), *const pdx = place(dx, matrix), *const pgain = place(gain, vector);
    void *const pbias = place(bias, vector), *const pstats = place(stats, 3 * rows * size_of(computed));
    void *const pdgain = place(dgain, vector), *const pdbias = place(dbias, vector);
    void *const ppartials = place(partials, cnorm_backward_partials(dtype, rows, n));
    uint64_t state = (uint64_t)n;
    fill_affine(dtype, n, pgain, pbias, &state);
    static const row_kind kinds[] = {MEAN_0, MEAN_1E4, NEAR_OVERFLOW}; /* one sweep, two sweeps, the float64 path */
    for (int kind = 0; kind < 3; ++kind) {
        fill_row(kinds[kind], dtype, count, px, &state);
        for (ptrdiff_t i = 0; i < count; ++i) put(dtype, pdy, i, uniform(&state) / 8);
        for (int affine = 0; affine < 4; ++affine) {
            void *const g = affine & 1 ? pgain : NULL, *const b = affine & 2 ? pbias : NULL, *const s = affine ? pstats : NULL;
#define STEP(what, call, output)                                                                                             \
    note(what, dtype);                                                                                                       \
    snprintf(doing, sizeof doing, "%s, %s, %s, %td rows, n = %td, affine %d, at the %s, on %s", what, dtype_names[dtype], \
             row_names[kinds[kind]], rows, n, affine, at_end ? "end" : "start", cnorm_isa_active());                         \
    CHECK(call == CNORM_OK && all_finite(dtype, output, count), "%s", doing)
            STEP("add_layer_norm", cnorm_add_layer_norm(dtype, &(cnorm_norm){.rows = rows, .n = n, .x = px, .residual = pdy,
                .gain = g, .bias = b, .eps = 1e-5, .y = py, .sum = psum, .stats = s}), py);
            STEP("rms_norm", cnorm_rms_norm(dtype, &(cnorm_norm){.rows = rows, .n = n, .x = px, .gain = g, .eps = 1e-5, .y = py,
                .stats = pstats}), py);
            STEP("rms_norm_backward",
                 cnorm_rms_norm_backward(dtype, &(cnorm_norm_backward){.rows = rows, .n = n, .dy = pdy, .x = px, .gain = g,
                     .stats = pstats, .dx = pdx, .dgain = pdgain, .partials = ppartials}), pdx);
            STEP("layer_norm", cnorm_layer_norm(dtype, &(cnorm_norm){.rows = rows, .n = n, .x = px, .gain = g, .bias = b,
                .eps = 1e-5, .y = py, .stats = s}), py);
            if (!s) continue;
            STEP("layer_norm_backward",
                 cnorm_layer_norm_backward(dtype, &(cnorm_norm_backward){.rows = rows, .n = n, .dy = pdy, .x = px, .gain = g,
                     .stats = pstats, .dx = pdx, .dgain = pdgain, .dbias = pdbias, .partials = ppartials}), pdx);
            CHECK(all_finite(computed, pdgain, n) && all_finite(computed, pdbias, n), "%s: dgain or dbias", doing);
            cnorm_norm call = {.rows = rows, .n = n, .x = px, .residual = pdy, .x_stride = n, .residual_stride = n, .gain = g,
                               .bias = b, .eps = 1e-5, .y = py, .sum = psum, .y_stride = n, .sum_stride = n, .stats = s, .hints = NT_STORES};
            STEP("add_layer_norm, streamed", (cnorm_active()->add_layer_norm[dtype](&call), CNORM_OK), py);
            call.residual = NULL, call.sum = NULL;
            STEP("layer_norm, streamed", (cnorm_active()->layer_norm[dtype](&call), CNORM_OK), py);
            cnorm_norm_backward back = {.rows = rows, .n = n, .dy = pdy, .x = px, .dy_stride = n, .x_stride = n, .gain = g,
                                        .stats = s, .dx = pdx, .dx_stride = n, .partials = ppartials, .hints = NT_STORES};
            STEP("layer_norm_backward, streamed", (cnorm_active()->layer_norm_backward[dtype](&back), CNORM_OK), pdx);
        }
    }
}

/* batch, group, weight and divisive norm of a volume; a matrix has one channel per column */
static void other_norms(cnorm_dtype dtype, ptrdiff_t samples, ptrdiff_t channels, ptrdiff_t space)
{
    static guarded x, dy, y, dx, gain, bias, var, stats, dgain, dbias, partials, scratch, numbers;
    if (!x.pages) {
        guarded *const all[] = {&x, &dy, &y, &dx, &gain, &bias, &var, &stats, &dgain, &dbias, &partials, &numbers};
        for (int i = 0; i < 12; ++i) *all[i] = guarded_pages(3 * WHOLE_ROWS * LONGEST * 8);
        scratch = guarded_pages(40 * WHOLE_ROWS * LONGEST * 8);
    }
    const cnorm_dtype computed = compute_type(dtype);
    const ptrdiff_t n = channels * space, count = samples * n, item = size_of(dtype), wide = size_of(computed), vector = channels * wide;
    void *const px = place(x, count * item), *const pdy = place(dy, count * item), *const py = place(y, count * item);
    void *const pdx = place(dx, count * item), *const pgain = place(gain, vector), *const pbias = place(bias, vector);
    void *const pvar = place(var, vector), *const pdgain = place(dgain, vector), *const pdbias = place(dbias, vector);
    void *const ppartials = place(partials, cnorm_backward_partials(dtype, samples, channels));
    double *const moments = place(numbers, 2 * channels * 8);
    uint64_t state = (uint64_t)n;
    fill_affine(dtype, channels, pgain, pbias, &state);
    for (ptrdiff_t c = 0; c < channels; ++c) put(computed, pvar, c, 1 + uniform(&state));
    static const row_kind kinds[] = {MEAN_0, MEAN_1E4, NEAR_OVERFLOW};
    for (int kind = 0; kind < 3; ++kind) {
        fill_row(kinds[kind], dtype, count, px, &state);
        for (ptrdiff_t i = 0; i < count; ++i) put(dtype, pdy, i, uniform(&state) / 8);
#define TRY(what, call, output, length)                                                                                   \
    note(what, dtype);                                                                                                    \
    snprintf(doing, sizeof doing, "%s, %s, %s, [%td, %td, %td], at the %s, on %s", what, dtype_names[dtype],             \
             row_names[kinds[kind]], samples, channels, space, at_end ? "end" : "start", cnorm_isa_active());             \
    CHECK(call == CNORM_OK && all_finite(dtype, output, length), "%s", doing)
        for (ptrdiff_t groups = 1; groups <= channels; groups += channels > 1 ? channels - 1 : 1) {
            void *const st = place(stats, 3 * samples * groups * wide);
            TRY("group_norm", cnorm_group_norm(dtype, &(cnorm_volume_norm){.samples = samples, .channels = channels,
                .space = space, .groups = groups, .x = px, .gain = pgain, .bias = pbias, .eps = 1e-5, .y = py,
                .stats = st}), py, count);
            TRY("group_norm_backward", cnorm_group_norm_backward(dtype, &(cnorm_volume_norm_backward){.samples = samples,
                .channels = channels, .space = space, .groups = groups, .dy = pdy, .x = px, .gain = pgain, .stats = st,
                .dx = pdx, .dgain = pdgain, .dbias = pdbias, .scratch = ppartials}), pdx, count);
            cnorm_volume_norm call = {samples, channels, space, groups, .x = px, .x_stride = n, .gain = pgain, .bias = pbias,
                                      .eps = 1e-5, .y = py, .y_stride = n, .hints = NT_STORES};
            TRY("group_norm, streamed", (cnorm_active()->group_norm[dtype](&call), CNORM_OK), py, count);
        }
        void *const work = place(scratch, cnorm_batch_norm_scratch(dtype, samples, channels, space));
        void *const st = place(stats, 3 * vector);
        cnorm_volume_norm call = {samples, channels, space, .x = px, .x_stride = n, .gain = pgain, .bias = pbias, .mean = pbias,
                                  .var = pvar, .eps = 1e-5, .y = py, .y_stride = n, .scratch = work, .hints = NT_STORES};
        TRY("batch_norm_inference", cnorm_batch_norm_inference(dtype, &(cnorm_volume_norm){.samples = samples,
            .channels = channels, .space = space, .x = px, .mean = pbias, .var = pvar, .gain = pgain, .bias = pbias,
            .eps = 1e-5, .y = py, .scratch = work}), py, 0);
        TRY("batch_norm_inference, streamed", (cnorm_active()->batch_norm_inference[dtype](&call), CNORM_OK), py, 0);
        if (samples * space > 1) {
            TRY("batch_norm", cnorm_batch_norm(dtype, &(cnorm_volume_norm){.samples = samples, .channels = channels,
                .space = space, .x = px, .gain = pgain, .bias = pbias, .eps = 1e-5, .y = py, .stats = st, .moments = moments,
                .scratch = work}),
                py, count);
            TRY("batch_norm, streamed", (cnorm_active()->batch_norm[dtype](&call), CNORM_OK), py, count);
            TRY("batch_norm_backward", cnorm_batch_norm_backward(dtype, &(cnorm_volume_norm_backward){.samples = samples,
                .channels = channels, .space = space, .dy = pdy, .x = px, .gain = pgain, .stats = st, .dx = pdx,
                .dgain = pdgain, .dbias = pdbias, .scratch = work}), pdx, count);
        }
        TRY("batch_norm_inference_backward",
            cnorm_batch_norm_inference_backward(dtype, &(cnorm_volume_norm_backward){.samples = samples, .channels = channels,
                .space = space, .dy = pdy, .x = pdy, .mean = pbias, .var = pvar, .gain = pgain, .eps = 1e-5, .dx = pdx,
                .dgain = pdgain, .dbias = pdbias, .scratch = work}), pdx, count);
        if (!kernel_takes("weight_norm", dtype)) continue;
        double *const ds = place(numbers, 8);
        TRY("layer_norm", cnorm_layer_norm(dtype, &(cnorm_norm){.rows = samples, .n = n, .x = px, .eps = 1e-5, .y = py,
            .stats = place(stats, 3 * samples * item)}), py, count);
        TRY("smoothing_gradient", cnorm_smoothing_gradient(dtype, &(cnorm_norm_backward){.rows = samples, .n = n, .dy = pdy,
            .x = px, .stats = at_end ? stats.pages + stats.bytes - 3 * samples * item : stats.pages}, 0.1, ds), ds, 0);
        void *const pg = place(numbers, samples * item);
        for (ptrdiff_t i = 0; i < samples; ++i) put(dtype, pg, i, 1 + uniform(&state));
        TRY("weight_norm", cnorm_weight_norm(dtype, &(cnorm_weight){.rows = samples, .n = n, .w = px, .gain = pg,
            .out = py}), py, count);
        TRY("weight_norm_backward", cnorm_weight_norm_backward(dtype, &(cnorm_weight){.rows = samples, .n = n, .dv = pdy,
            .w = px, .gain = pg, .out = pdx, .dgain = pg}), pdx, count);
        if (space > 1) continue;
        double *const fields = place(scratch, cnorm_divisive_norm_scratch(n)), *const dsigma = place(numbers, 8);
        for (ptrdiff_t radius = 0; radius < 2 * n; radius = 3 * radius + 1) {
            TRY("divisive_norm", cnorm_divisive_norm(dtype, &(cnorm_divisive){.rows = samples, .n = n, .mean_radius = radius,
                .radius = radius / 2, .x = px, .gain = pgain, .bias = pbias, .sigma = 0.5, .out = py, .scratch = fields}),
                py, count);
            TRY("divisive_norm_backward",
                cnorm_divisive_norm_backward(dtype, &(cnorm_divisive){.rows = samples, .n = n, .mean_radius = radius,
                    .radius = radius / 2, .dy = pdy, .x = px, .gain = pgain, .sigma = 0.5, .out = pdx, .dgain = pdgain,
                    .dbias = pdbias, .dsigma = dsigma, .scratch = fields}), pdx, count);
        }
    }
}

static void conversions(cnorm_dtype dtype, ptrdiff_t n)
{
    static guarded x, y;
    if (!x.pages) x = guarded_pages(LONGEST * 2), y = guarded_pages(LONGEST * 4);
    snprintf(doing, sizeof doing, "to_float, n = %td, at the %s, on %s", n, at_end ? "end" : "start", cnorm_isa_active());
    note("to_float", dtype);
    CHECK(cnorm_widen(dtype, n, place(x, n * 2), place(y, n * 4)) == CNORM_OK, "%s", doing);
}

static void activations(ptrdiff_t n)
{
    static guarded x, y, s, p;
    if (!x.pages) {
        x = guarded_pages(LONGEST * 4), y = guarded_pages(LONGEST * 4);
        s = guarded_pages(64), p = guarded_pages(LONGEST * 4);
    }
    snprintf(doing, sizeof doing, "activations, n = %td, at the %s, on %s", n, at_end ? "end" : "start", cnorm_isa_active());
    float *const in = place(x, n * 4), *const out = place(y, n * 4);
    uint64_t state = (uint64_t)n;
    for (ptrdiff_t i = 0; i < n; ++i) in[i] = (float)bell(&state);
    CHECK(cnorm_sigmoid_f32(n, in, out) == CNORM_OK && cnorm_tanh_f32(n, in, out) == CNORM_OK, "%s", doing);
    CHECK(cnorm_sigmoid_f32(n, in, in) == CNORM_OK, "%s", doing);
    float *const scratch = place(s, 64), *const slope = place(p, n * 4);
    memset(slope, 0, (size_t)n * 4);
    for (int f = CNORM_ACTIVATION_ELU; f < CNORM_ACTIVATIONS; ++f) {
        const cnorm_elementwise is = {n, (cnorm_activation)f, 0.25f, 0.5f, slope};
        const cnorm_layer layer = {.kind = CNORM_LAYER_ACTIVATION, .as = {.activation = is}};
        CHECK(cnorm_scratch_floats(&layer, 1, 1) <= 16, "%s", doing);
        CHECK(cnorm_run(&(cnorm_frames){.layers = &layer, .count = 1, .frames = 1, .x = in, .scratch = scratch,
            .y = out}) == CNORM_OK, "%s, function %d", doing, f);
    }
}

/* [rows, cols] transposed */
static void transposes(ptrdiff_t rows, ptrdiff_t cols)
{
    static guarded x, y, s;
    const ptrdiff_t most = 10 * LONGEST * 4;
    if (!x.pages) x = guarded_pages(most), y = guarded_pages(most), s = guarded_pages(most);
    snprintf(doing, sizeof doing, "a transpose of [%td, %td], at the %s", rows, cols, at_end ? "end" : "start");
    const ptrdiff_t n = rows * cols;
    float *const in = place(x, n * 4), *const out = place(y, n * 4);
    for (ptrdiff_t i = 0; i < n; ++i) in[i] = (float)i;
    const cnorm_permute is = {n, {1, 1, 1, 1, rows, cols}, {0, 1, 2, 3, 5, 4}};
    const cnorm_layer layer = {.kind = CNORM_LAYER_PERMUTE, .as = {.permute = is}};
    float *const scratch = place(s, cnorm_scratch_floats(&layer, 1, 1) * 4);
    CHECK(cnorm_run(&(cnorm_frames){.layers = &layer, .count = 1, .frames = 1, .x = in, .scratch = scratch, .y = out}) ==
          CNORM_OK, "%s", doing);
    for (ptrdiff_t i = 0; i < n; ++i) CHECK(out[i] == in[i % rows * cols + i / rows], "%s: y[%td]", doing, i);
}

/* each buffer of a network between guard pages of its own; all are freed together */
static guarded network_pages[64];
static int network_pages_used;
static void *network_memory(ptrdiff_t bytes)
{
    const guarded g = network_pages[network_pages_used++] = guarded_pages(bytes);
    char *const p = at_end ? g.pages + g.bytes - bytes : g.pages;
    return memset(p, 0, (size_t)bytes);
}

static void free_network_pages(void)
{
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    while (network_pages_used > 0) {
        const guarded g = network_pages[--network_pages_used];
        munmap(g.pages - page, g.bytes + 2 * page);
    }
}

static void networks(ptrdiff_t inputs, ptrdiff_t units, ptrdiff_t outputs)
{
    enum { STEPS = 3 };
    snprintf(doing, sizeof doing, "%td inputs, %td units, %td outputs, at the %s, on %s", inputs, units, outputs,
             at_end ? "end" : "start", cnorm_isa_active());
    network net = network_random_of(inputs, units, outputs, network_memory);
    float *const x = network_random(&net, network_memory, STEPS * inputs, 0, 1, &(uint64_t){1});
    x[inputs] = 1e-40f; /* the second frame is multiplied in other units */
    float *const y = network_floats(&net, network_memory, STEPS * outputs);
    network_run(&net, STEPS, x, y);
    for (ptrdiff_t i = 0; i < STEPS * outputs; ++i) CHECK(isfinite(y[i]), "%s: y[%td]", doing, i);
    free_network_pages();
}

static void stacks(cnorm_weight_type type, ptrdiff_t inputs, ptrdiff_t m)
{
    enum { STEPS = 9 }; /* more than are computed together */
    snprintf(doing, sizeof doing, "layers of %td inputs, m = %td, weights %d, at the %s, on %s", inputs, m, (int)type,
             at_end ? "end" : "start", cnorm_isa_active());
    stack s = stack_random(type, inputs, m, network_memory);
    float *const x = network_random(&s.pool, network_memory, STEPS * inputs, 0, 1, &(uint64_t){1});
    x[inputs] = 1e-40f; /* the second frame is multiplied in other units */
    float *const y = network_floats(&s.pool, network_memory, STEPS * s.outputs);
    stack_run(&s, STEPS, x, y);
    for (ptrdiff_t i = 0; i < STEPS * s.outputs; ++i) CHECK(isfinite(y[i]), "%s: y[%td]", doing, i);
    free_network_pages();
}

static void frames(cnorm_weight_type type, ptrdiff_t m, int scans)
{
    enum { STEPS = 7 }; /* more than are computed together */
    snprintf(doing, sizeof doing, "frames of %td positions, scans %d, weights %d, at the %s, on %s", m, scans, (int)type,
             at_end ? "end" : "start", cnorm_isa_active());
    frame_stack s = scans ? scans_random(type, m, network_memory) : frames_random(type, m, network_memory);
    float *const x = network_random(&s.pool, network_memory, STEPS * s.inputs, 0, 1, &(uint64_t){1});
    float *const y = network_floats(&s.pool, network_memory, STEPS * s.outputs);
    frames_run(&s, STEPS, x, y);
    for (ptrdiff_t i = 0; i < STEPS * s.outputs; ++i) CHECK(isfinite(y[i]), "%s: y[%td]", doing, i);
    free_network_pages();
}

/* the first and the last token of a table */
static void embeddings(cnorm_weight_type type, ptrdiff_t tokens, ptrdiff_t units)
{
    snprintf(doing, sizeof doing, "%td tokens, %td units, weights %d, at the %s, on %s", tokens, units, (int)type,
             at_end ? "end" : "start", cnorm_isa_active());
    network pool = {.type = type};
    cnorm_layer net[2];
    stack_embedding(&pool, tokens, units, network_memory, net);
    float *const x = network_floats(&pool, network_memory, 6), *const y = network_floats(&pool, network_memory, 2 * units);
    float *const scratch = network_floats(&pool, network_memory, cnorm_scratch_floats(net, 2, 2));
    x[4] = (float)(tokens - 1);
    CHECK(cnorm_run(&(cnorm_frames){.layers = net, .count = 2, .frames = 2, .x = x, .scratch = scratch, .rows = 2,
        .y = y}) == CNORM_OK, "%s", doing);
    x[4] = (float)tokens;
    CHECK(cnorm_run(&(cnorm_frames){.layers = net, .count = 2, .frames = 2, .x = x, .scratch = scratch, .rows = 2,
        .y = y}) == CNORM_ERROR_TOKEN, "%s", doing);
    free_network_pages();
}

int main(int argc, char **argv)
{
    const ptrdiff_t step = argc > 1 ? atoi(argv[1]) : 1;
    if (step < 1) return 2;
    signal(SIGSEGV, fault);
    signal(SIGBUS, fault);
    FOR_EACH_ISA(isa)
        for (at_end = 0; at_end < 2; ++at_end)
            for (ptrdiff_t n = 1; n <= LONGEST; n += step) {
                for (int i = 0; i < DTYPES; ++i) norms(dtypes[i], ROWS, n);
                for (int i = 0; i < DTYPES; ++i) {
                    other_norms(dtypes[i], ROWS, n, 1);
                    other_norms(dtypes[i], 2, 3, n);
                }
                activations(n);
                conversions(CNORM_F16, n);
                conversions(CNORM_BF16, n);
                networks(n, n % 40 + 1, n % 7 + 1);
                embeddings((cnorm_weight_type)(n % 3), n % 7 + 1, n);
                for (ptrdiff_t few = 1; few <= 9; ++few) transposes(few, n), transposes(n, few);
                stacks((cnorm_weight_type)(n % 3), n, n % 40 + 1);
                for (int scans = 0; scans < 2; ++scans) frames((cnorm_weight_type)(n % 3), n, scans);
                if (n % 5 == 0) networks(n % 9 + 1, n, n);
            }
    FOR_EACH_ISA(isa)
        for (at_end = 0; at_end < 2; ++at_end)
            for (int i = 0; i < DTYPES; ++i) {
                norms(dtypes[i], WHOLE_ROWS, 37);
                other_norms(dtypes[i], WHOLE_ROWS, 37, 1);
            }
#define KERNEL(name, call, dtypes) check_that_tried(#name);
#define FUNCTION(name, arguments)
#include "kernels/kernels.inc"
    return check_result();
}
