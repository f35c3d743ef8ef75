/* The C API as its header documents it: every status, nothing written on an error, zero rows, in place, strides. */
#include "network.h"
#include "cnorm_model.h"
#include "cnorm_norms.h"

enum { ROWS = 3, N = 21, STRIDE = 24 };

static double x[ROWS * STRIDE], y[ROWS * STRIDE], dy[ROWS * STRIDE], gain[N], bias[N], stats[3 * ROWS];
static double dx[ROWS * STRIDE], dgain[N], dbias[N], partials[2 * N];

/* every output holds this byte until a call succeeds */
enum { UNTOUCHED = 0xa5 };
static void mark(void)
{
    memset(y, UNTOUCHED, sizeof y), memset(dx, UNTOUCHED, sizeof dx), memset(dgain, UNTOUCHED, sizeof dgain);
    memset(dbias, UNTOUCHED, sizeof dbias), memset(stats, UNTOUCHED, sizeof stats), memset(partials, UNTOUCHED, sizeof partials);
}
static int all_bytes(const void *p, size_t bytes, int value)
{
    for (size_t i = 0; i < bytes; ++i)
        if (((const unsigned char *)p)[i] != value) return 0;
    return 1;
}
static int untouched(void)
{
    return all_bytes(y, sizeof y, UNTOUCHED) && all_bytes(dx, sizeof dx, UNTOUCHED) && all_bytes(dgain, sizeof dgain, UNTOUCHED) &&
           all_bytes(dbias, sizeof dbias, UNTOUCHED) && all_bytes(stats, sizeof stats, UNTOUCHED) &&
           all_bytes(partials, sizeof partials, UNTOUCHED);
}

/* a call that must fail with this status and write nothing */
#define REFUSED(status, call)                                                                      \
    do {                                                                                           \
        mark();                                                                                    \
        const cnorm_status got = (call);                                                           \
        CHECK(got == (status), "%s gave: %s", #call, cnorm_strerror(got));                         \
        CHECK(untouched(), "%s wrote", #call);                                                     \
    } while (0)

static cnorm_status forward(cnorm_dtype dtype, ptrdiff_t rows, ptrdiff_t n, double eps, ptrdiff_t y_stride)
{
    return cnorm_layer_norm(dtype, &(cnorm_norm){.rows = rows, .n = n, .x = x, .x_stride = STRIDE, .gain = gain, .bias = bias,
        .eps = eps, .y = y, .y_stride = y_stride, .stats = stats});
}
static cnorm_status rms(cnorm_dtype dtype, ptrdiff_t rows, ptrdiff_t n, double eps, ptrdiff_t y_stride)
{
    return cnorm_rms_norm(dtype, &(cnorm_norm){.rows = rows, .n = n, .x = x, .x_stride = STRIDE, .gain = gain, .eps = eps,
        .y = y, .y_stride = y_stride, .stats = stats});
}
static cnorm_status add(cnorm_dtype dtype, ptrdiff_t rows, ptrdiff_t n, double eps, ptrdiff_t y_stride)
{
    return cnorm_add_layer_norm(dtype, &(cnorm_norm){.rows = rows, .n = n, .x = x, .x_stride = STRIDE, .residual = dy,
        .residual_stride = STRIDE, .gain = gain, .bias = bias, .eps = eps, .y = y, .y_stride = y_stride, .sum = dx,
        .sum_stride = STRIDE, .stats = stats});
}
typedef cnorm_status forward_call(cnorm_dtype dtype, ptrdiff_t rows, ptrdiff_t n, double eps, ptrdiff_t y_stride);

static cnorm_status backward(cnorm_dtype dtype, ptrdiff_t rows, ptrdiff_t n, ptrdiff_t dx_stride)
{
    return cnorm_layer_norm_backward(dtype, &(cnorm_norm_backward){.rows = rows, .n = n, .dy = dy, .dy_stride = STRIDE, .x = x,
        .x_stride = STRIDE, .gain = gain, .stats = stats, .dx = dx, .dx_stride = dx_stride, .dgain = dgain, .dbias = dbias,
        .partials = partials});
}
static cnorm_status rms_backward(cnorm_dtype dtype, ptrdiff_t rows, ptrdiff_t n, ptrdiff_t dx_stride)
{
    return cnorm_rms_norm_backward(dtype, &(cnorm_norm_backward){.rows = rows, .n = n, .dy = dy, .dy_stride = STRIDE, .x = x,
        .x_stride = STRIDE, .gain = gain, .stats = stats, .dx = dx, .dx_stride = dx_stride, .dgain = dgain,
        .partials = partials});
}
typedef cnorm_status backward_call(cnorm_dtype dtype, ptrdiff_t rows, ptrdiff_t n, ptrdiff_t dx_stride);

static cnorm_status blocks(ptrdiff_t rows, ptrdiff_t begin, ptrdiff_t end)
{
    return cnorm_layer_norm_backward_blocks(CNORM_F64, &(cnorm_norm_backward){.rows = rows, .n = N, .dy = dy,
        .dy_stride = STRIDE, .x = x, .x_stride = STRIDE, .gain = gain, .stats = stats, .dx = dx, .dx_stride = STRIDE,
        .partials = partials}, begin, end);
}

static void set_environment(const char *isa)
{
#ifdef _WIN32
    _putenv_s("CNORM_ISA", isa);
#else
    setenv("CNORM_ISA", isa, 1);
#endif
}

static void environment_names_an_unknown_isa(void)
{
    set_environment("abacus"); /* read on first use, so this test comes first */
    CHECK(cnorm_isa_active() == NULL, "an unknown CNORM_ISA");
    REFUSED(CNORM_ERROR_ISA, forward(CNORM_F64, ROWS, N, 1e-5, STRIDE));
    REFUSED(CNORM_ERROR_ISA, backward(CNORM_F64, ROWS, N, STRIDE));
    REFUSED(CNORM_ERROR_ISA, rms(CNORM_F64, ROWS, N, 1e-5, STRIDE));
    REFUSED(CNORM_ERROR_ISA, add(CNORM_F64, ROWS, N, 1e-5, STRIDE));
    REFUSED(CNORM_ERROR_ISA, rms_backward(CNORM_F64, ROWS, N, STRIDE));
    REFUSED(CNORM_ERROR_ISA, blocks(ROWS, 0, ROWS));
    REFUSED(CNORM_ERROR_ISA, cnorm_backward_reduce(CNORM_F64, ROWS, N, partials, dgain, dbias));
    REFUSED(CNORM_ERROR_ISA, cnorm_widen(CNORM_F16, 1, x, (float *)y));
    REFUSED(CNORM_ERROR_ISA, cnorm_sigmoid_f32(1, (float *)x, (float *)y));
    REFUSED(CNORM_ERROR_ISA, cnorm_tanh_f32(1, (float *)x, (float *)y));
#ifndef _WIN32 /* which has no empty variables */
    set_environment("");
    CHECK(cnorm_isa_active() == NULL, "an empty CNORM_ISA");
#endif
    set_environment("baseline");
    CHECK(cnorm_isa_active() && strcmp(cnorm_isa_active(), "baseline") == 0, "CNORM_ISA=baseline");
}

static void isas(void)
{
    const int count = cnorm_isa_count();
    CHECK(count >= 1 && strcmp(cnorm_isa_name(0), "baseline") == 0, "%d instruction sets", count);
    CHECK(!cnorm_isa_name(-1) && !cnorm_isa_name(count) && !cnorm_isa_name(1000), "a name out of range");
    for (int i = 0; i < count; ++i) {
        CHECK(cnorm_isa_use(cnorm_isa_name(i)) == CNORM_OK, "%s", cnorm_isa_name(i));
        CHECK(cnorm_isa_active() == cnorm_isa_name(i), "%s", cnorm_isa_name(i));
    }
    CHECK(cnorm_isa_use("abacus") == CNORM_ERROR_ISA && cnorm_isa_use("") == CNORM_ERROR_ISA, "unknown");
    CHECK(cnorm_isa_use(NULL) == CNORM_ERROR_ISA, "NULL");
    CHECK(cnorm_isa_active() == cnorm_isa_name(count - 1), "a refused choice changed the active one");
}

static void strings(void)
{
    CHECK(cnorm_abi_version() == CNORM_ABI_VERSION, "%d", cnorm_abi_version());
    for (int i = CNORM_OK; i <= CNORM_ERROR_ISA + 1; ++i)
        for (int j = CNORM_OK; j < i; ++j)
            CHECK(strcmp(cnorm_strerror((cnorm_status)i), cnorm_strerror((cnorm_status)j)) != 0, "%d and %d", i, j);
    CHECK(cnorm_strerror((cnorm_status)-1) && cnorm_strerror((cnorm_status)1000), "out of range");
}

static void forward_nulls(void)
{
    REFUSED(CNORM_ERROR_NULL, cnorm_layer_norm(CNORM_F64, &(cnorm_norm){.rows = ROWS, .n = N, .x_stride = STRIDE, .gain = gain,
        .bias = bias, .y = y, .y_stride = STRIDE, .stats = stats}));
    REFUSED(CNORM_ERROR_NULL, cnorm_layer_norm(CNORM_F64, &(cnorm_norm){.rows = ROWS, .n = N, .x = x, .x_stride = STRIDE,
        .gain = gain, .bias = bias, .y_stride = STRIDE, .stats = stats}));
    REFUSED(CNORM_ERROR_NULL, cnorm_rms_norm(CNORM_F64, &(cnorm_norm){.rows = ROWS, .n = N, .x_stride = STRIDE, .gain = gain,
        .y = y, .y_stride = STRIDE, .stats = stats}));
    REFUSED(CNORM_ERROR_NULL, cnorm_rms_norm(CNORM_F64, &(cnorm_norm){.rows = ROWS, .n = N, .x = x, .x_stride = STRIDE,
        .gain = gain, .y_stride = STRIDE, .stats = stats}));
    for (int missing = 0; missing < 4; ++missing)
        REFUSED(CNORM_ERROR_NULL,
                cnorm_add_layer_norm(CNORM_F64, &(cnorm_norm){.rows = ROWS, .n = N, .x = missing == 0 ? NULL : x,
                    .x_stride = STRIDE, .residual = missing == 1 ? NULL : dy, .residual_stride = STRIDE, .gain = gain,
                    .bias = bias, .y = missing == 2 ? NULL : y, .y_stride = STRIDE, .sum = missing == 3 ? NULL : dx,
                    .sum_stride = STRIDE, .stats = stats}));
    REFUSED(CNORM_ERROR_STRIDE,
            cnorm_add_layer_norm(CNORM_F64, &(cnorm_norm){.rows = ROWS, .n = N, .x = x, .x_stride = STRIDE, .residual = dy,
                .residual_stride = STRIDE, .gain = gain, .bias = bias, .y = y, .y_stride = STRIDE, .sum = dx,
                .sum_stride = N - 1, .stats = stats}));
    REFUSED(CNORM_OK, cnorm_layer_norm(CNORM_F64, &(cnorm_norm){.n = N}));
    REFUSED(CNORM_OK, cnorm_rms_norm(CNORM_F64, &(cnorm_norm){.n = N}));
    REFUSED(CNORM_OK, cnorm_add_layer_norm(CNORM_F64, &(cnorm_norm){.n = N}));
}

static void forward_errors(forward_call *call)
{
    const ptrdiff_t huge = PTRDIFF_MAX / 8;
    REFUSED(CNORM_ERROR_SIZE, call(CNORM_F64, -1, N, 0, STRIDE));
    REFUSED(CNORM_ERROR_SIZE, call(CNORM_F64, ROWS, 0, 0, STRIDE));
    REFUSED(CNORM_ERROR_SIZE, call(CNORM_F64, 0, 0, 0, STRIDE));
    REFUSED(CNORM_ERROR_SIZE, call(CNORM_F64, ROWS, -N, 0, STRIDE));
    REFUSED(CNORM_ERROR_SIZE, call(CNORM_F64, 2, huge, 0, huge));
    REFUSED(CNORM_ERROR_SIZE, call(CNORM_F64, PTRDIFF_MAX, PTRDIFF_MAX, 0, STRIDE));
    REFUSED(CNORM_ERROR_SIZE, call(CNORM_F64, PTRDIFF_MIN, PTRDIFF_MIN, 0, STRIDE));
    REFUSED(CNORM_ERROR_EPS, call(CNORM_F64, ROWS, N, -1e-300, STRIDE));
    REFUSED(CNORM_ERROR_EPS, call(CNORM_F64, ROWS, N, (double)NAN, STRIDE));
    REFUSED(CNORM_ERROR_EPS, call(CNORM_F64, ROWS, N, (double)INFINITY, STRIDE));
    REFUSED(CNORM_ERROR_EPS, call(CNORM_F64, ROWS, N, -(double)INFINITY, STRIDE));
    REFUSED(CNORM_ERROR_EPS, call(CNORM_F32, ROWS, N, 1e39, STRIDE)); /* infinite after rounding to the dtype */
    REFUSED(CNORM_ERROR_EPS, call(CNORM_BF16, ROWS, N, 1e39, STRIDE));
    REFUSED(CNORM_ERROR_STRIDE, call(CNORM_F64, ROWS, N, 0, N - 1));
    REFUSED(CNORM_ERROR_STRIDE, call(CNORM_F64, ROWS, N, 0, 1 - N));
    REFUSED(CNORM_ERROR_STRIDE, call(CNORM_F64, ROWS, N, 0, CNORM_ONE_ROW));
    REFUSED(CNORM_ERROR_DTYPE, call(CNORM_DTYPES, ROWS, N, 0, STRIDE));
    REFUSED(CNORM_ERROR_DTYPE, call((cnorm_dtype)1000, ROWS, N, 0, STRIDE));
}

static void backward_errors(backward_call *call)
{
    REFUSED(CNORM_ERROR_SIZE, call(CNORM_F64, -1, N, STRIDE));
    REFUSED(CNORM_ERROR_SIZE, call(CNORM_F64, ROWS, 0, STRIDE));
    REFUSED(CNORM_ERROR_SIZE, call(CNORM_F64, PTRDIFF_MAX, PTRDIFF_MAX, STRIDE));
    REFUSED(CNORM_ERROR_STRIDE, call(CNORM_F64, ROWS, N, N - 1));
    REFUSED(CNORM_ERROR_STRIDE, call(CNORM_F64, ROWS, N, CNORM_ONE_ROW));
    REFUSED(CNORM_ERROR_DTYPE, call(CNORM_DTYPES, ROWS, N, STRIDE));
}

static void backward_nulls_and_blocks(void)
{
    const void *const null = NULL;
    for (int missing = 0; missing < 7; ++missing)
        REFUSED(CNORM_ERROR_NULL,
                cnorm_layer_norm_backward(CNORM_F64, &(cnorm_norm_backward){.rows = ROWS, .n = N,
                    .dy = missing == 0 ? null : dy, .dy_stride = STRIDE, .x = missing == 1 ? null : x, .x_stride = STRIDE,
                    .gain = gain, .stats = missing == 2 ? null : stats, .dx = missing == 3 ? NULL : dx, .dx_stride = STRIDE,
                    .dgain = missing == 4 ? NULL : dgain, .dbias = missing == 5 ? NULL : dbias,
                    .partials = missing == 6 ? NULL : partials}));
    for (int missing = 0; missing < 6; ++missing)
        REFUSED(CNORM_ERROR_NULL,
                cnorm_rms_norm_backward(CNORM_F64, &(cnorm_norm_backward){.rows = ROWS, .n = N, .dy = missing == 0 ? null : dy,
                    .dy_stride = STRIDE, .x = missing == 1 ? null : x, .x_stride = STRIDE, .gain = gain,
                    .stats = missing == 2 ? null : stats, .dx = missing == 3 ? NULL : dx, .dx_stride = STRIDE,
                    .dgain = missing == 4 ? NULL : dgain, .partials = missing == 5 ? NULL : partials}));
    REFUSED(CNORM_ERROR_SIZE, blocks(ROWS, -CNORM_BLOCK_ROWS, ROWS));
    REFUSED(CNORM_ERROR_SIZE, blocks(ROWS, 1, ROWS));
    REFUSED(CNORM_ERROR_SIZE, blocks(ROWS, 0, ROWS - 1));
    REFUSED(CNORM_ERROR_SIZE, blocks(ROWS, 0, CNORM_BLOCK_ROWS));
    REFUSED(CNORM_ERROR_SIZE, blocks(ROWS, CNORM_BLOCK_ROWS, 0));
    REFUSED(CNORM_OK, blocks(ROWS, 0, 0));
    REFUSED(CNORM_ERROR_NULL, cnorm_backward_reduce(CNORM_F64, ROWS, N, NULL, dgain, dbias));
    REFUSED(CNORM_ERROR_NULL, cnorm_backward_reduce(CNORM_F64, ROWS, N, partials, NULL, dbias));
    REFUSED(CNORM_ERROR_SIZE, cnorm_backward_reduce(CNORM_F64, ROWS, -1, partials, dgain, dbias));
    REFUSED(CNORM_ERROR_DTYPE, cnorm_backward_reduce(CNORM_DTYPES, ROWS, N, partials, dgain, dbias));
    CHECK(cnorm_backward_partials(CNORM_DTYPES, ROWS, N) == 0, "unknown dtype");
    CHECK(cnorm_backward_partials(CNORM_F32, -1, N) == 0, "negative rows");
    CHECK(cnorm_backward_partials(CNORM_F32, ROWS, PTRDIFF_MAX) == 0, "bytes that can't be counted");
    CHECK(cnorm_backward_partials(CNORM_F64, ROWS, N) == (ptrdiff_t)sizeof partials, "one block");
    CHECK(cnorm_backward_partials(CNORM_F32, CNORM_BLOCK_ROWS + 1, N) == 2 * 2 * N * 4, "two blocks");
    CHECK(cnorm_backward_partials(CNORM_F16, ROWS, N) == 2 * N * 4, "partials are of the compute type");
    /* no rows: the sums over zero rows are 0 */
    mark();
    CHECK(cnorm_layer_norm_backward(CNORM_F64, &(cnorm_norm_backward){.n = N, .dgain = dgain, .dbias = dbias}) == CNORM_OK,
          "no rows");
    CHECK(all_bytes(dgain, sizeof dgain, 0) && all_bytes(dbias, sizeof dbias, 0), "no rows");
    mark();
    CHECK(cnorm_rms_norm_backward(CNORM_F64, &(cnorm_norm_backward){.n = N, .dgain = dgain}) == CNORM_OK, "no rows");
    CHECK(all_bytes(dgain, sizeof dgain, 0), "no rows");
}

static void other_norm_errors(void)
{
    const void *const null = NULL;
    for (int missing = 0; missing < 7; ++missing)
        REFUSED(CNORM_ERROR_NULL,
                cnorm_group_norm_backward(CNORM_F64, &(cnorm_volume_norm_backward){.samples = ROWS, .channels = N, .space = 1,
                    .groups = 3, .dy = missing == 0 ? null : dy, .dy_stride = STRIDE, .x = missing == 1 ? null : x,
                    .x_stride = STRIDE, .gain = gain, .stats = missing == 2 ? null : stats, .dx = missing == 3 ? NULL : dx,
                    .dx_stride = STRIDE, .dgain = missing == 4 ? NULL : dgain, .dbias = missing == 5 ? NULL : dbias,
                    .scratch = missing == 6 ? NULL : partials}));
    REFUSED(CNORM_ERROR_SIZE, cnorm_group_norm(CNORM_F64, &(cnorm_volume_norm){.samples = ROWS, .channels = N, .space = 1,
        .groups = 2, .x = x, .x_stride = STRIDE, .gain = gain, .bias = bias, .y = y, .y_stride = STRIDE}));
    REFUSED(CNORM_ERROR_SIZE, cnorm_group_norm(CNORM_F64, &(cnorm_volume_norm){.samples = ROWS, .channels = N, .groups = 3,
        .x = x, .x_stride = STRIDE, .gain = gain, .bias = bias, .y = y, .y_stride = STRIDE}));
    REFUSED(CNORM_ERROR_STRIDE, cnorm_group_norm(CNORM_F64, &(cnorm_volume_norm){.samples = ROWS, .channels = N, .space = 1,
        .groups = 3, .x = x, .x_stride = STRIDE, .gain = gain, .bias = bias, .y = y, .y_stride = N - 1}));
    REFUSED(CNORM_ERROR_DTYPE, cnorm_group_norm((cnorm_dtype)4, &(cnorm_volume_norm){.samples = ROWS, .channels = N, .space = 1,
        .groups = 3, .x = x, .x_stride = STRIDE, .gain = gain, .bias = bias, .y = y, .y_stride = STRIDE}));
    REFUSED(CNORM_ERROR_SIZE, cnorm_batch_norm(CNORM_F64, &(cnorm_volume_norm){.samples = 1, .channels = N, .space = 1, .x = x,
        .x_stride = STRIDE, .gain = gain, .bias = bias, .y = y, .y_stride = STRIDE, .scratch = partials}));
    REFUSED(CNORM_ERROR_NULL, cnorm_batch_norm(CNORM_F64, &(cnorm_volume_norm){.samples = ROWS, .channels = N, .space = 1,
        .x = x, .x_stride = STRIDE, .gain = gain, .bias = bias, .y = y, .y_stride = STRIDE}));
    REFUSED(CNORM_ERROR_DTYPE, cnorm_weight_norm(CNORM_F16, &(cnorm_weight){.rows = ROWS, .n = N, .w = x, .w_stride = STRIDE,
        .gain = gain, .out = y, .out_stride = STRIDE}));
    REFUSED(CNORM_ERROR_NULL, cnorm_weight_norm(CNORM_F64, &(cnorm_weight){.rows = ROWS, .n = N, .w_stride = STRIDE,
        .gain = gain, .out = y, .out_stride = STRIDE}));
    REFUSED(CNORM_ERROR_EPS, cnorm_smoothing_gradient(CNORM_F64, &(cnorm_norm_backward){.rows = ROWS, .n = N, .dy = dy,
        .dy_stride = STRIDE, .x = x, .x_stride = STRIDE, .gain = gain, .stats = stats}, -1, dgain));
}

/* no call at all; and each entry with nothing but zeros in its struct, which is what a member that was left out is */
static void empty_calls(void)
{
    double ds;
#define EMPTY(function, type)                                                                      \
    REFUSED(CNORM_ERROR_NULL, function(CNORM_F64, NULL));                                          \
    REFUSED(CNORM_ERROR_SIZE, function(CNORM_F64, &(type){.rows = ROWS, .dgain = dgain, .dbias = dbias}))
#define EMPTY_FORWARD(function, type)                                                              \
    REFUSED(CNORM_ERROR_NULL, function(CNORM_F64, NULL));                                          \
    REFUSED(CNORM_ERROR_SIZE, function(CNORM_F64, &(type){.hints = 0}))
    EMPTY_FORWARD(cnorm_layer_norm, cnorm_norm);
    EMPTY_FORWARD(cnorm_add_layer_norm, cnorm_norm);
    EMPTY_FORWARD(cnorm_rms_norm, cnorm_norm);
    EMPTY(cnorm_layer_norm_backward, cnorm_norm_backward);
    EMPTY(cnorm_rms_norm_backward, cnorm_norm_backward);
    EMPTY_FORWARD(cnorm_group_norm, cnorm_volume_norm);
    EMPTY_FORWARD(cnorm_group_norm_backward, cnorm_volume_norm_backward);
    EMPTY_FORWARD(cnorm_batch_norm, cnorm_volume_norm);
    EMPTY_FORWARD(cnorm_batch_norm_backward, cnorm_volume_norm_backward);
    EMPTY_FORWARD(cnorm_batch_norm_inference, cnorm_volume_norm);
    EMPTY_FORWARD(cnorm_batch_norm_inference_backward, cnorm_volume_norm_backward);
    REFUSED(CNORM_ERROR_NULL, cnorm_weight_norm(CNORM_F64, NULL));
    REFUSED(CNORM_ERROR_NULL, cnorm_weight_norm_backward(CNORM_F64, NULL));
    REFUSED(CNORM_ERROR_NULL, cnorm_divisive_norm(CNORM_F64, NULL));
    REFUSED(CNORM_ERROR_NULL, cnorm_divisive_norm_backward(CNORM_F64, NULL));
    REFUSED(CNORM_ERROR_NULL, cnorm_smoothing_gradient(CNORM_F64, NULL, 1, &ds));
    REFUSED(CNORM_ERROR_NULL, cnorm_layer_norm_backward_blocks(CNORM_F64, NULL, 0, 0));
    REFUSED(CNORM_ERROR_NULL, cnorm_rms_norm_backward_blocks(CNORM_F64, NULL, 0, 0));
}

/* members that a function does not name may hold anything */
static void unread_members(void)
{
    float in[2][3] = {{1, 2, 4}, {3, 1, 1}}, out[2][3], want[2][3], mean[3] = {0}, var[3] = {1, 1, 1}, none[1] = {7};
    double moments[1] = {7};
    _Alignas(8) static char scratch[1 << 16];
    CHECK(cnorm_batch_norm_scratch(CNORM_F32, 2, 3, 1) <= (ptrdiff_t)sizeof scratch, "scratch");
    cnorm_norm rows = {.rows = 2, .n = 3, .x = in, .y = want};
    CHECK(cnorm_rms_norm(CNORM_F32, &rows) == CNORM_OK, "plain");
    rows.y = out, rows.bias = mean, rows.residual = none, rows.sum = none, rows.sum_stride = 1, rows.hints = -1;
    CHECK(cnorm_rms_norm(CNORM_F32, &rows) == CNORM_OK && memcmp(out, want, sizeof out) == 0 && none[0] == 7, "rms_norm");
    rows.y = want, rows.residual = rows.sum = NULL, rows.hints = 0;
    CHECK(cnorm_layer_norm(CNORM_F32, &rows) == CNORM_OK, "plain");
    rows.y = out, rows.residual = none, rows.sum = none, rows.sum_stride = 1, rows.hints = -1;
    CHECK(cnorm_layer_norm(CNORM_F32, &rows) == CNORM_OK && memcmp(out, want, sizeof out) == 0 && none[0] == 7, "layer_norm");
    cnorm_volume_norm volume = {.samples = 2, .channels = 3, .space = 1, .x = in, .mean = mean, .var = var, .y = want, .scratch = scratch};
    CHECK(cnorm_batch_norm_inference(CNORM_F32, &volume) == CNORM_OK, "plain");
    volume.y = out, volume.stats = none, volume.moments = moments, volume.groups = 2, volume.hints = -1;
    CHECK(cnorm_batch_norm_inference(CNORM_F32, &volume) == CNORM_OK && memcmp(out, want, sizeof out) == 0, "inference");
    CHECK(none[0] == 7 && moments[0] == 7, "inference wrote statistics");
    uint16_t half[2][3] = {{0}};
    volume.x = volume.y = half;
    CHECK(cnorm_batch_norm_inference(CNORM_F16, &volume) == CNORM_OK && moments[0] == 7, "inference of float16 wrote moments");
    volume.x = in, volume.y = out;
    volume.groups = 1, volume.stats = NULL;
    CHECK(cnorm_group_norm(CNORM_F32, &volume) == CNORM_OK && moments[0] == 7, "group_norm wrote moments");
}

static void elementwise_errors(void)
{
    float *const in = (float *)x, *const out = (float *)y;
    cnorm_status (*const functions[])(ptrdiff_t, const float *, float *) = {cnorm_sigmoid_f32, cnorm_tanh_f32};
    for (int i = 0; i < 2; ++i) {
        REFUSED(CNORM_ERROR_SIZE, functions[i](-1, in, out));
        REFUSED(CNORM_ERROR_NULL, functions[i](1, NULL, out));
        REFUSED(CNORM_ERROR_NULL, functions[i](1, in, NULL));
        REFUSED(CNORM_OK, functions[i](0, NULL, NULL));
    }
}

/* every number of both types, against the definition of its format */
static void widening(void)
{
    enum { ALL = 1 << 16 };
    static uint16_t stored[ALL];
    static float wide[ALL];
    const cnorm_dtype types[] = {CNORM_F16, CNORM_BF16};
    for (int i = 0; i < ALL; ++i) stored[i] = (uint16_t)i;
    for (int k = 0; k < 2; ++k) {
        const int fraction = k ? 7 : 10, largest = k ? 255 : 31, excess = k ? 127 : 15;
        CHECK(cnorm_widen(types[k], ALL, stored, wide) == CNORM_OK, "all of them");
        for (int i = 0; i < ALL; ++i) {
            const int exponent = (i & 0x7fff) >> fraction, part = i & ((1 << fraction) - 1);
            const double size = ldexp((double)part + (exponent ? 1 << fraction : 0), (exponent ? exponent : 1) - excess - fraction);
            if (exponent == largest && part) CHECK(isnan(wide[i]), "%#x is NaN", i);
            else CHECK((double)wide[i] == (i & 0x8000 ? -1 : 1) * (exponent == largest ? (double)INFINITY : size), "%#x is %g", i, (double)wide[i]);
        }
        for (ptrdiff_t n = 0; n < 40; ++n) { /* lengths around the vector widths; nothing after the end */
            float part[41];
            for (int i = 0; i <= 40; ++i) part[i] = -1;
            CHECK(cnorm_widen(types[k], n, stored + 0x3bf0, part) == CNORM_OK && part[n] == -1, "%td more than asked for", n);
            CHECK(memcmp(part, wide + 0x3bf0, (size_t)n * sizeof *part) == 0, "the first %td", n);
        }
    }
    REFUSED(CNORM_ERROR_DTYPE, cnorm_widen(CNORM_F32, 1, stored, wide));
    REFUSED(CNORM_ERROR_SIZE, cnorm_widen(CNORM_F16, -1, stored, wide));
    REFUSED(CNORM_ERROR_NULL, cnorm_widen(CNORM_F16, 1, NULL, wide));
    REFUSED(CNORM_ERROR_NULL, cnorm_widen(CNORM_BF16, 1, stored, NULL));
    REFUSED(CNORM_OK, cnorm_widen(CNORM_BF16, 0, NULL, NULL));
}

static void network_errors(void)
{
    const float *const w = (const float *)x;
    REFUSED(CNORM_ERROR_SIZE, cnorm_matrix_pack(0, 1, 1, 0, w, (float *)y));
    REFUSED(CNORM_ERROR_SIZE, cnorm_matrix_pack(1, 0, 1, 0, w, (float *)y));
    REFUSED(CNORM_ERROR_SIZE, cnorm_matrix_pack(1, 1, -1, 0, w, (float *)y));
    REFUSED(CNORM_ERROR_SIZE, cnorm_matrix_pack(4, PTRDIFF_MAX / 2, 1, 0, w, (float *)y));
    REFUSED(CNORM_ERROR_SIZE, cnorm_matrix_pack(2, 1, 1, 3, w, (float *)y));
    REFUSED(CNORM_ERROR_SIZE, cnorm_matrix_pack(2, 1, 1, -1, w, (float *)y));
    REFUSED(CNORM_ERROR_NULL, cnorm_matrix_pack(1, 1, 1, 0, NULL, (float *)y));
    REFUSED(CNORM_ERROR_NULL, cnorm_matrix_pack(1, 1, 1, 0, w, NULL));
    CHECK(cnorm_matrix_floats(1, 1, PTRDIFF_MAX) == 0 && cnorm_matrix_floats(-4, 1, 1) == 0, "sizes that can't be");
    static _Alignas(CNORM_ALIGN) float panels[64], scratch[512];
    CHECK(cnorm_matrix_floats(1, 1, 1) <= 64, "room for the panel");
    CHECK(cnorm_matrix_pack(1, 1, 1, 0, w, panels) == CNORM_OK, "1 x 1");
    const cnorm_matrix one_by_one = {.gates = 1, .units = 1, .cols = 1, .panels = panels};
    const cnorm_layer layer = {.kind = CNORM_LAYER_LINEAR, .as = {.linear = {one_by_one, NULL}}};
    CHECK(cnorm_scratch_floats(&layer, 1, 1) <= 256 && cnorm_state_floats(&layer, 1) == 0, "room for the scratch");
    float *const out = (float *)y;
    REFUSED(CNORM_ERROR_SIZE, cnorm_run(&(cnorm_frames){.layers = &layer, .frames = 1, .x = w, .scratch = scratch, .y = out}));
    REFUSED(CNORM_ERROR_SIZE, cnorm_run(&(cnorm_frames){.layers = &layer, .count = 1, .frames = -1, .x = w, .scratch = scratch,
        .y = out}));
    REFUSED(CNORM_ERROR_NULL, cnorm_run(&(cnorm_frames){.count = 1, .frames = 1, .x = w, .scratch = scratch, .y = out}));
    REFUSED(CNORM_ERROR_NULL, cnorm_run(&(cnorm_frames){.layers = &layer, .count = 1, .frames = 1, .scratch = scratch,
        .y = out}));
    REFUSED(CNORM_ERROR_NULL, cnorm_run(&(cnorm_frames){.layers = &layer, .count = 1, .frames = 1, .x = w, .y = out}));
    REFUSED(CNORM_ERROR_NULL, cnorm_run(&(cnorm_frames){.layers = &layer, .count = 1, .frames = 1, .x = w,
        .scratch = scratch}));
    REFUSED(CNORM_ERROR_SIZE, cnorm_run(&(cnorm_frames){.layers = &layer, .count = 1, .frames = 1, .x = w, .scratch = scratch,
        .rows = -1, .y = out}));
    REFUSED(CNORM_OK, cnorm_run(&(cnorm_frames){.layers = &layer, .count = 1}));
    const cnorm_cell rnn = {.kind = CNORM_CELL_RNN, .weight_x = one_by_one, .weight_h = one_by_one, .bias = panels};
    const cnorm_layer cell = {.kind = CNORM_LAYER_CELL, .as = {.cell = rnn}};
    static _Alignas(CNORM_ALIGN) float state[16];
    float *const both[] = {state, state}, *const one[] = {state, NULL};
    CHECK(cnorm_state_floats(&cell, 1) <= 16, "room for the state");
    REFUSED(CNORM_ERROR_NULL, cnorm_run(&(cnorm_frames){.layers = &cell, .count = 1, .frames = 1, .x = w, .scratch = scratch,
        .y = out}));
    REFUSED(CNORM_ERROR_NULL, cnorm_run_many(&(cnorm_frames){.layers = &cell, .count = 1, .frames = 2, .x = w,
        .scratch = scratch, .y = out}));
    REFUSED(CNORM_ERROR_NULL, cnorm_run_many(&(cnorm_frames){.layers = &cell, .count = 1, .frames = 2, .x = w, .states = one,
        .scratch = scratch, .y = out}));
    REFUSED(CNORM_ERROR_NULL, cnorm_run_many(&(cnorm_frames){.count = 1, .frames = 2, .x = w, .states = both,
        .scratch = scratch, .y = out}));
    REFUSED(CNORM_ERROR_NULL, cnorm_run_many(&(cnorm_frames){.layers = &cell, .count = 1, .frames = 2, .states = both,
        .scratch = scratch, .y = out}));
    REFUSED(CNORM_ERROR_NULL, cnorm_run_many(&(cnorm_frames){.layers = &cell, .count = 1, .frames = 2, .x = w, .states = both,
        .y = out}));
    REFUSED(CNORM_ERROR_NULL, cnorm_run_many(&(cnorm_frames){.layers = &cell, .count = 1, .frames = 2, .x = w, .states = both,
        .scratch = scratch}));
    REFUSED(CNORM_ERROR_SIZE, cnorm_run_many(&(cnorm_frames){.layers = &cell, .frames = 2, .x = w, .states = both,
        .scratch = scratch, .y = out}));
    REFUSED(CNORM_ERROR_SIZE, cnorm_run_many(&(cnorm_frames){.layers = &cell, .count = 1, .frames = -2, .x = w, .states = both,
        .scratch = scratch, .y = out}));
    REFUSED(CNORM_ERROR_SIZE, cnorm_run_many(&(cnorm_frames){.layers = &cell, .count = 1, .frames = 2, .x = w, .states = both,
        .scratch = scratch, .rows = -1, .y = out}));
    REFUSED(CNORM_OK, cnorm_run_many(&(cnorm_frames){.layers = &cell, .count = 1}));
    CHECK(state[0] == 0, "a state moved");
}

/* a GRU with the matrices and vectors of an LSTM, which has one gate more */
static cnorm_cell gru_of(cnorm_cell cell, cnorm_scope scope, cnorm_reset reset)
{
    cell.kind = CNORM_CELL_GRU, cell.scope = scope, cell.reset = reset;
    cell.weight_x.gates = cell.weight_h.gates = cell.weight_x.group = cell.weight_h.group = 3;
    return cell;
}

/* a null vector, a zeroed struct, mismatched sizes: one fault at a time in an otherwise valid network */
static void layer_errors(void)
{
    network net = network_random_of(3, 5, 2, allocate);
    cnorm_layer *const cell = &net.layers[0], *const linear = &net.layers[1];
    const cnorm_layer good_cell = *cell, good_linear = *linear;
    const cnorm_network as_network = {net.layers, NULL, 2, CNORM_STREAMED};
    const cnorm_model model = {.networks = &as_network, .count = 1, .inputs = 3, .outputs = 2};
    cnorm_stream stream;
    float in[3] = {1, 2, 3}, out[2];
#define SPOILED(change)                                                                                               \
    do {                                                                                                              \
        *cell = good_cell, *linear = good_linear;                                                                     \
        network_run(&net, 1, in, out);                                                                                \
        change;                                                                                                       \
        CHECK(cnorm_layers_check(net.layers, 2, &fault) == CNORM_ERROR_LAYER, "%s", #change);                         \
        CHECK(fault.layer >= 0 && fault.field, "%s: layer %d", #change, fault.layer);                                 \
        CHECK(cnorm_run(&(cnorm_frames){.layers = net.layers, .count = 2, .frames = 1, .x = in, \
            .state = net.state, .scratch = net.scratch, .y = out}) == CNORM_ERROR_LAYER, "%s", #change); \
        CHECK(cnorm_stream_start(&stream, &model, net.state, 1) == CNORM_ERROR_LAYER, "%s", #change); \
    } while (0)
    cnorm_fault fault;
    SPOILED(cell->kind = (cnorm_layer_kind)17);
    SPOILED(cell->kind = (cnorm_layer_kind)-1);
    SPOILED(memset(&cell->as, 0, sizeof cell->as));
    SPOILED(memset(&linear->as, 0, sizeof linear->as));
    SPOILED(cell->as.cell.kind = (cnorm_cell_kind)3);
    SPOILED(cell->as.cell.kind = CNORM_CELL_GRU);
    SPOILED(cell->as.cell.scope = (cnorm_scope)3);
    SPOILED(cell->as.cell.scope = CNORM_SCOPE_NONE);
    SPOILED(cell->as.cell.cell_norm = (cnorm_cell_norm)3);
    SPOILED(cell->as.cell.gain_x = NULL);
    SPOILED(cell->as.cell.gain_h = NULL);
    SPOILED(cell->as.cell.bias = NULL);
    SPOILED(cell->as.cell.cell_clip = 0);
    SPOILED(cell->as.cell.cell_clip = NAN);
    SPOILED(cell->as.cell.activation = CNORM_ACTIVATION_PRELU);
    SPOILED(cell->as.cell.activation = (cnorm_activation)99);
    SPOILED(cell->as.cell.recurrent_activation = CNORM_ACTIVATION_SOFTMAX);
    SPOILED(cell->as.cell.recurrent_activation = CNORM_ACTIVATION_LOG);
    SPOILED(cell->as.cell.alpha = NAN);
    SPOILED(cell->as.cell.recurrent_beta = INFINITY);
    SPOILED(cell->as.cell.clip = -1);
    SPOILED(cell->as.cell.clip = NAN);
    SPOILED(cell->as.cell.eps = -1);
    SPOILED(cell->as.cell.eps = INFINITY);
    SPOILED(cell->as.cell.zoneout = 2);
    SPOILED(cell->as.cell.weight_x.panels = NULL);
    SPOILED(cell->as.cell.weight_h.units = 6);
    SPOILED(cell->as.cell.weight_h.cols = 6);
    SPOILED(cell->as.cell.weight_x.group = 0);
    SPOILED((cell->as.cell.weight_p = linear->as.linear.weight, cell->as.cell.projection_clip = INFINITY));
    SPOILED(linear->as.linear.weight.panels = NULL);
    SPOILED(linear->as.linear.weight.cols = 4);
    SPOILED((linear->kind = CNORM_LAYER_NORM, linear->as.norm = (cnorm_row_norm){4, NULL, NULL, 1e-5f}));
    SPOILED((linear->kind = CNORM_LAYER_NORM, linear->as.norm = (cnorm_row_norm){5, NULL, NULL, NAN}));
    SPOILED((linear->kind = CNORM_LAYER_ACTIVATION, linear->as.activation = (cnorm_elementwise){5, (cnorm_activation)99, 0, 0, NULL}));
    SPOILED((linear->kind = CNORM_LAYER_ACTIVATION, linear->as.activation = (cnorm_elementwise){5, CNORM_ACTIVATION_ELU, NAN, 0, NULL}));
    SPOILED((linear->kind = CNORM_LAYER_ACTIVATION, linear->as.activation = (cnorm_elementwise){5, CNORM_ACTIVATION_CLIP, 1, 0, NULL}));
    SPOILED((linear->kind = CNORM_LAYER_ACTIVATION, linear->as.activation = (cnorm_elementwise){5, CNORM_ACTIVATION_PRELU, 0, 0, NULL}));
    SPOILED((linear->kind = CNORM_LAYER_RESIDUAL, linear->as.residual = (cnorm_addition){5, 2}));
    SPOILED((linear->kind = CNORM_LAYER_RESIDUAL, linear->as.residual = (cnorm_addition){5, 1}));
    SPOILED((linear->kind = CNORM_LAYER_RESIDUAL, linear->as.residual = (cnorm_addition){5, 0}));
    SPOILED((linear->kind = CNORM_LAYER_MULTIPLY, linear->as.multiply = (cnorm_addition){5, 1}));
    SPOILED((linear->kind = CNORM_LAYER_CONCAT, linear->as.concat = (cnorm_concat){5, 0, {{0, 0, 0, 0}}}));
    SPOILED((linear->kind = CNORM_LAYER_CONCAT, linear->as.concat = (cnorm_concat){5, 3, {{0, 5, 3, 3}}}));
    SPOILED((linear->kind = CNORM_LAYER_CONCAT, linear->as.concat = (cnorm_concat){5, 3, {{0, 5, 0, 2}}}));
    SPOILED((linear->kind = CNORM_LAYER_CONCAT, linear->as.concat = (cnorm_concat){5, 3, {{0, 4, 0, 3}}}));
    SPOILED((linear->kind = CNORM_LAYER_CONCAT, linear->as.concat = (cnorm_concat){5, 3, {{-1, 4, 0, 3}}}));
    SPOILED((linear->kind = CNORM_LAYER_CONCAT, linear->as.concat = (cnorm_concat){5, 3, {{2, 3, 0, 3}}}));
    SPOILED((linear->kind = CNORM_LAYER_CONCAT, linear->as.concat = (cnorm_concat){5, 3, {{0, 5, PTRDIFF_MAX, 3}}}));
    SPOILED((linear->kind = CNORM_LAYER_CONCAT, linear->as.concat = (cnorm_concat){5, 3, {{0, 5, 0, -3}, {0, 5, 0, 3}}}));
    SPOILED((cell->as.cell.scope = CNORM_SCOPE_SUM, cell->as.cell.inside_h = cell->as.cell.bias));
    SPOILED(cell->as.cell = gru_of(good_cell.as.cell, CNORM_SCOPE_SUM, CNORM_RESET_AFTER));
    for (int reset = 0; reset < 2; ++reset) { /* the other combinations of scope and reset are valid */
        cell->as.cell = gru_of(good_cell.as.cell, reset ? CNORM_SCOPE_SUM : CNORM_SCOPE_SPLIT, (cnorm_reset)reset);
        CHECK(cnorm_layers_check(net.layers, 1, NULL) == CNORM_OK, "a GRU, reset %d", reset);
    }
    CHECK(cnorm_layers_check(NULL, 1, NULL) == CNORM_ERROR_NULL && cnorm_layers_check(net.layers, 0, NULL) == CNORM_ERROR_SIZE, "no layers");
    network_free(&net);
}

/* n * item overflows although there are no rows */
static void sizes_without_rows(void)
{
    REFUSED(CNORM_ERROR_SIZE, cnorm_backward_reduce(CNORM_F32, 0, PTRDIFF_MAX, partials, dgain, dbias));
    REFUSED(CNORM_ERROR_SIZE, cnorm_layer_norm_backward(CNORM_F32, &(cnorm_norm_backward){.n = PTRDIFF_MAX, .dy = dy,
        .dy_stride = CNORM_ONE_ROW, .x = x, .x_stride = CNORM_ONE_ROW, .stats = stats, .dx = dx, .dx_stride = CNORM_ONE_ROW,
        .dgain = dgain, .dbias = dbias, .partials = partials}));
    REFUSED(CNORM_ERROR_SIZE, cnorm_group_norm_backward(CNORM_F64, &(cnorm_volume_norm_backward){.channels = PTRDIFF_MAX,
        .space = 1, .groups = 1, .dy = dy, .dy_stride = CNORM_ONE_ROW, .x = x, .x_stride = CNORM_ONE_ROW, .stats = stats,
        .dx = dx, .dx_stride = CNORM_ONE_ROW, .dgain = dgain, .dbias = dbias, .scratch = partials}));
}

/* strides: padding between rows is not written, negative strides and one row work; and in place */
static void layouts(cnorm_dtype dtype, const char *isa)
{
    uint64_t state = 1;
    const ptrdiff_t item = size_of(dtype);
    for (ptrdiff_t i = 0; i < ROWS * STRIDE; ++i) put(dtype, x, i, bell(&state)), put(dtype, dy, i, bell(&state));
    const cnorm_dtype computed = compute_type(dtype);
    for (ptrdiff_t i = 0; i < N; ++i) put(computed, gain, i, bell(&state)), put(computed, bias, i, bell(&state));

    mark();
    CHECK(forward(dtype, ROWS, N, 1e-5, STRIDE) == CNORM_OK, "%s", isa);
    double want[ROWS * STRIDE], again[ROWS * STRIDE];
    memcpy(want, y, sizeof want);
    for (int row = 0; row < ROWS; ++row)
        CHECK(all_bytes((char *)y + (row * STRIDE + N) * item, (size_t)((STRIDE - N) * item), UNTOUCHED), "%s: padding of y", isa);

    memcpy(again, x, sizeof again); /* in place */
    CHECK(cnorm_layer_norm(dtype, &(cnorm_norm){.rows = ROWS, .n = N, .x = again, .x_stride = STRIDE, .gain = gain,
        .bias = bias, .eps = 1e-5, .y = again, .y_stride = STRIDE}) == CNORM_OK, "%s", isa);
    for (int row = 0; row < ROWS; ++row) {
        const ptrdiff_t at = row * STRIDE * item;
        CHECK(memcmp((char *)again + at, (char *)want + at, (size_t)(N * item)) == 0, "%s: y is x", isa);
    }
    const ptrdiff_t last = (ROWS - 1) * STRIDE * item; /* backwards from the last row, into rows without padding */
    CHECK(cnorm_layer_norm(dtype, &(cnorm_norm){.rows = ROWS, .n = N, .x = (char *)x + last, .x_stride = -STRIDE, .gain = gain,
        .bias = bias, .eps = 1e-5, .y = again}) == CNORM_OK, "%s", isa);
    for (int row = 0; row < ROWS; ++row)
        CHECK(memcmp((char *)again + row * N * item, (char *)want + last - row * STRIDE * item, (size_t)(N * item)) == 0,
              "%s: negative stride of x, row %d", isa, row);
    CHECK(cnorm_layer_norm(dtype, &(cnorm_norm){.rows = ROWS, .n = N, .x = x, .x_stride = CNORM_ONE_ROW, .gain = gain,
        .bias = bias, .eps = 1e-5, .y = (char *)again + last, .y_stride = -STRIDE}) == CNORM_OK, "%s", isa);
    for (int row = 0; row < ROWS; ++row)
        CHECK(memcmp((char *)again + row * STRIDE * item, want, (size_t)(N * item)) == 0, "%s: one row, row %d", isa, row);

    CHECK(add(dtype, ROWS, N, 1e-5, STRIDE) == CNORM_OK, "%s", isa); /* y over x, the sum over the residual; and the reverse */
    for (int reverse = 0; reverse < 2; ++reverse) {
        double first[ROWS * STRIDE], second[ROWS * STRIDE];
        memcpy(first, x, sizeof first), memcpy(second, dy, sizeof second);
        double *const over_x = reverse ? second : first, *const over_residual = reverse ? first : second;
        CHECK(cnorm_add_layer_norm(dtype, &(cnorm_norm){.rows = ROWS, .n = N, .x = first, .x_stride = STRIDE,
            .residual = second, .residual_stride = STRIDE, .gain = gain, .bias = bias, .eps = 1e-5, .y = over_x,
            .y_stride = STRIDE, .sum = over_residual, .sum_stride = STRIDE}) == CNORM_OK, "%s", isa);
        for (int row = 0; row < ROWS; ++row) {
            const ptrdiff_t at = row * STRIDE * item;
            CHECK(memcmp((char *)over_x + at, (char *)y + at, (size_t)(N * item)) == 0, "%s: y in place, reverse %d", isa, reverse);
            CHECK(memcmp((char *)over_residual + at, (char *)dx + at, (size_t)(N * item)) == 0, "%s: sum in place, reverse %d", isa,
                  reverse);
        }
    }

    mark();
    CHECK(forward(dtype, ROWS, N, 1e-5, STRIDE) == CNORM_OK && backward(dtype, ROWS, N, STRIDE) == CNORM_OK, "%s", isa);
    memcpy(want, dx, sizeof want);
    for (int row = 0; row < ROWS; ++row)
        CHECK(all_bytes((char *)dx + (row * STRIDE + N) * item, (size_t)((STRIDE - N) * item), UNTOUCHED), "%s: padding of dx", isa);
    for (int over_x = 0; over_x < 2; ++over_x) { /* dx over dy, or over x */
        double other_dgain[N], other_dbias[N];
        memcpy(again, over_x ? x : dy, sizeof again);
        CHECK(cnorm_layer_norm_backward(dtype, &(cnorm_norm_backward){.rows = ROWS, .n = N, .dy = over_x ? dy : again,
            .dy_stride = STRIDE, .x = over_x ? again : x, .x_stride = STRIDE, .gain = gain, .stats = stats, .dx = again,
            .dx_stride = STRIDE, .dgain = other_dgain, .dbias = other_dbias, .partials = partials}) == CNORM_OK, "%s", isa);
        for (int row = 0; row < ROWS; ++row)
            CHECK(memcmp((char *)again + row * STRIDE * item, (char *)want + row * STRIDE * item, (size_t)(N * item)) == 0,
                  "%s: dx is %s", isa, over_x ? "x" : "dy");
        CHECK(memcmp(other_dgain, dgain, (size_t)(N * size_of(computed))) == 0 &&
                  memcmp(other_dbias, dbias, (size_t)(N * size_of(computed))) == 0,
              "%s: dgain and dbias in place", isa);
    }
}

int main(void)
{
    environment_names_an_unknown_isa();
    isas();
    strings();
    forward_nulls();
    forward_call *const forwards[] = {forward, rms, add};
    for (int i = 0; i < 3; ++i) forward_errors(forwards[i]);
    backward_errors(backward);
    backward_errors(rms_backward);
    backward_nulls_and_blocks();
    other_norm_errors();
    empty_calls();
    unread_members();
    elementwise_errors();
    network_errors();
    layer_errors();
    sizes_without_rows();
    FOR_EACH_ISA(isa) {
        widening();
        for (int i = 0; i < DTYPES; ++i) layouts(dtypes[i], cnorm_isa_name(isa));
    }
    return check_result();
}
