/* sigmoid, tanh and the layer `activation` over all 2^32 float32 inputs: at most 1 ULP from the exact value, monotone where
 * the function is, NaN for NaN. With arguments: these functions only.
 *
 * Inputs are visited in increasing order, from -inf to +inf, so that each result is compared with the one before.
 * The exact value is libm's float64, good to 2^-27 ULP of float32; an ULP is the distance of float32 numbers around it. */
#include "check.h"

#include <pthread.h>
#include <time.h>

enum { CHUNK = 1 << 16, THREADS = 2 };

typedef struct function {
    const char *name;
    cnorm_status (*f)(ptrdiff_t, const float *, float *);
    double (*exact)(double);
    int monotone;
} function;

static double exact_sigmoid(double x) { return x < 0 ? exp(x) / (1 + exp(x)) : 1 / (1 + exp(-x)); }

#define ACTIVATION(name, NAME)                                                                                          \
    static cnorm_status name(ptrdiff_t n, const float *x, float *y)                                                     \
    {                                                                                                                   \
        static _Thread_local _Alignas(64) float scratch[16];                                                            \
        const cnorm_layer layer = {.kind = CNORM_LAYER_ACTIVATION,                                                      \
                                   .as = {.activation = {n, CNORM_ACTIVATION_##NAME, 1, 0, NULL}}};                     \
        return cnorm_run(&(cnorm_frames){.layers = &layer, .count = 1, .frames = 1, .x = x, \
            .scratch = scratch, .y = y});                                                   \
    }
ACTIVATION(elu, ELU)
ACTIVATION(selu, SELU)
ACTIVATION(silu, SILU)
ACTIVATION(gelu, GELU)
ACTIVATION(gelu_tanh, GELU_TANH)
ACTIVATION(softplus, SOFTPLUS)
ACTIVATION(hard_swish, HARD_SWISH)
ACTIVATION(log_1, LOG)
ACTIVATION(exponential, EXP)
ACTIVATION(square_root, SQRT)
ACTIVATION(sine, SIN)
ACTIVATION(cosine, COS)

static double exact_elu(double x) { return x < 0 ? expm1(x) : x; }
static double exact_selu(double x) { return (double)1.0507010f * (x < 0 ? (double)1.6732632f * expm1(x) : x); }
static double exact_silu(double x) { return x / (1 + exp(-x)); }
static double exact_gelu(double x) { return x / 2 * erfc(-x * 0.7071067811865476); }
static double exact_gelu_tanh(double x) { return x / (1 + exp(-1.5957691216057308 * (x + 0.044715 * x * x * x))); }
static double exact_softplus(double x) { return (x > 0 ? x : 0) + log1p(exp(-fabs(x))); }
static double exact_hard_swish(double x) { return x * (x < -3 ? 0 : x > 3 ? 1 : (x + 3) / 6); }
static double exact_log_1(double x) { return log(x + 1); }

static const function functions[] = {
    {"sigmoid", cnorm_sigmoid_f32, exact_sigmoid, 1}, {"tanh", cnorm_tanh_f32, tanh, 1},
    {"elu", elu, exact_elu, 1}, {"selu", selu, exact_selu, 1}, {"silu", silu, exact_silu, 0}, {"gelu", gelu, exact_gelu, 0},
    {"gelu_tanh", gelu_tanh, exact_gelu_tanh, 0}, {"softplus", softplus, exact_softplus, 1},
    {"hard_swish", hard_swish, exact_hard_swish, 0}, {"log", log_1, exact_log_1, 1}, {"exp", exponential, exp, 1},
    {"sqrt", square_root, sqrt, 1}, {"sin", sine, sin, 0}, {"cos", cosine, cos, 0},
};

typedef struct findings {
    double max_ulp;
    float worst;
    uint64_t misrounded, out_of_bound, descents, wrong_nan;
} findings;

/* the k-th float when all 2^32 bit patterns are sorted by value; NaNs at both ends */
static float at_place(uint32_t k)
{
    const uint32_t bits = k & 0x80000000u ? k ^ 0x80000000u : ~k;
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* the spacing of float32 numbers around |v|; 2^-149 for subnormals */
static double ulp(double v)
{
    uint64_t bits;
    memcpy(&bits, &v, sizeof bits);
    const uint64_t exponent = bits >> 52 & 0x7ff, floor = 1023 - 126;
    bits = ((exponent > floor ? exponent : floor) - 23) << 52;
    memcpy(&v, &bits, sizeof v);
    return v;
}

typedef struct job { const function *f; int number; findings found; } job;

static void *run(void *argument)
{
    job *const j = argument;
    findings found = {0};
    static _Thread_local float x[CHUNK + 1], y[CHUNK + 1];
    for (uint64_t chunk = (uint64_t)j->number; chunk < (UINT64_C(1) << 32) / CHUNK; chunk += THREADS) {
        const uint64_t first = chunk * CHUNK, before = first ? first - 1 : first;
        x[0] = at_place((uint32_t)before); /* the last of the previous chunk, to check the order */
        for (uint32_t i = 0; i < CHUNK; ++i) x[i + 1] = at_place((uint32_t)(first + i));
        if (j->f->f(CHUNK + 1, x, y) != CNORM_OK) abort();
        for (int i = 1; i <= CHUNK; ++i) {
            if (isnan(x[i])) {
                found.wrong_nan += isnan(y[i]) ? 0 : 1;
                continue;
            }
            const double exact = j->f->exact((double)x[i]);
            if (isnan(exact)) continue; /* beyond the range of the function, or the limit at infinity */
            const int same = (double)y[i] == exact || (isinf(y[i]) && fabs(exact) >= 0x1.ffffffp127);
            const double error = same ? 0 : fabs((double)y[i] - exact) / ulp(exact);
            if (error > found.max_ulp) found.max_ulp = error, found.worst = x[i];
            found.misrounded += y[i] != (float)exact;
            found.out_of_bound += error <= 1 ? 0 : 1;
            found.descents += j->f->monotone && y[i] < y[i - 1];
        }
    }
    j->found = found;
    return NULL;
}

static int wanted(const char *name, int argc, char **argv)
{
    for (int i = 1; i < argc; ++i)
        if (strcmp(argv[i], name) == 0) return 1;
    return argc < 2;
}

int main(int argc, char **argv)
{
    for (size_t f = 0; f < sizeof functions / sizeof *functions; ++f) {
        if (!wanted(functions[f].name, argc, argv)) continue;
        struct timespec start, stop;
        pthread_t thread[THREADS];
        job jobs[THREADS];
        findings all = {0};
        clock_gettime(CLOCK_MONOTONIC, &start);
        for (int i = 0; i < THREADS; ++i) {
            jobs[i] = (job){.f = &functions[f], .number = i};
            if (pthread_create(&thread[i], NULL, run, &jobs[i]) != 0) abort();
        }
        for (int i = 0; i < THREADS; ++i) {
            pthread_join(thread[i], NULL);
            const findings *const one = &jobs[i].found;
            if (one->max_ulp > all.max_ulp) all.max_ulp = one->max_ulp, all.worst = one->worst;
            all.misrounded += one->misrounded, all.out_of_bound += one->out_of_bound;
            all.descents += one->descents, all.wrong_nan += one->wrong_nan;
        }
        clock_gettime(CLOCK_MONOTONIC, &stop);
        printf("%s on %s, all 2^32 inputs: max %.4f ULP at %a, not correctly rounded %llu (%.3g %%), %.0f s\n", functions[f].name,
               cnorm_isa_active(), all.max_ulp, (double)all.worst, (unsigned long long)all.misrounded,
               100 * (double)all.misrounded / 0x1p32, difftime(stop.tv_sec, start.tv_sec));
        fflush(stdout);
        CHECK(all.out_of_bound == 0, "%llu results more than 1 ULP off", (unsigned long long)all.out_of_bound);
        CHECK(all.descents == 0, "%llu results lower than at the number before", (unsigned long long)all.descents);
        CHECK(all.wrong_nan == 0, "%llu NaNs lost", (unsigned long long)all.wrong_nan);
    }
    return check_result();
}
