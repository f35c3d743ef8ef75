/* The baseline instruction set against a plain loop in long double, and every other bit for bit against the baseline.
 * The tolerances are those of the numerics contract; tests/support/tolerances.py derives them. */
#include "dispatch.h"
#include "rows.h"

#include <tgmath.h>

/* wider than float64 where hardware has such a type: 128 bits in software take minutes on an emulated ARM */
#if defined(__x86_64__)
typedef long double wide;
#else
typedef double wide;
#endif

enum { ROWS = 3, LONGEST = 8195, SHIFT = 64 };
enum { MATRIX = ROWS * LONGEST * 8, VECTOR = LONGEST * 8 };

/* Elsewhere, and under valgrind, float64 rows are only compared between instruction sets. */
static int wide_is_wide(void)
{
    volatile wide one = 1;
    return one + (wide)0x1p-60 != one;
}

typedef enum operation { LAYER_NORM, RMS_NORM, OPERATIONS } operation;

typedef struct results {
    char y[MATRIX], stats[3 * ROWS * 8], dx[MATRIX], dgain[VECTOR], dbias[VECTOR], sum[MATRIX], y_of_sum[MATRIX];
} results;

static _Alignas(CNORM_ALIGN) results plainest, got; /* results of baseline; of the instruction set in use */
static _Alignas(CNORM_ALIGN) char x[MATRIX], dy[MATRIX], gain[VECTOR], bias[VECTOR], partials[2 * VECTOR];
static wide xhat[ROWS][LONGEST], rstd[ROWS];

/* the case under test, for messages */
static struct { operation op; cnorm_dtype dtype, computed; row_kind kind; ptrdiff_t n; double eps; int with_gain, with_bias; } now;
#define CASE "%s norm, %s, %s, n = %td, eps = %g, gain %d, bias %d, on %s"
#define CASE_ARGUMENTS now.op == RMS_NORM ? "RMS" : "layer", dtype_names[now.dtype], row_names[now.kind], now.n, now.eps, \
    now.with_gain, now.with_bias, cnorm_isa_active()

static wide at(const void *buffer, ptrdiff_t i) { return (wide)get(now.dtype, buffer, i); }
static wide gain_at(ptrdiff_t j) { return now.with_gain ? (wide)get(now.computed, gain, j) : 1; }

/* |error of xhat| <= this * max(1, |xhat|) */
static wide contract(void) { return (wide)1e-6 * (wide)roundoff(now.computed) / (wide)0x1p-24; }

/* element i is within `allowed` of `want`; a storage type is rounded once more, and infinite beyond its range */
static void within(const char *what, cnorm_dtype dtype, const void *buffer, ptrdiff_t i, wide want, wide allowed)
{
    const double value = get(dtype, buffer, i);
    allowed += 2 * (wide)smallest(now.computed);
    if (dtype != now.computed) allowed += (wide)roundoff(dtype) * (fabs(want) + allowed) + (wide)smallest(dtype);
    if (isinf(value) && fabs(want) + allowed > ldexp(2 - 2 * (wide)roundoff(dtype), exponent_bias(dtype))) return;
    CHECK(fabs((wide)value - want) <= allowed, CASE ": %s[%td] = %.17g, wanted %.17g, off by %.2g, allowed %.2g",
          CASE_ARGUMENTS, what, i, value, (double)want, (double)fabs((wide)value - want), (double)allowed);
}

static void reference_statistics(void)
{
    const wide n = (wide)now.n, eps = now.computed == CNORM_F32 ? (wide)(float)now.eps : (wide)now.eps;
    for (ptrdiff_t row = 0; row < ROWS; ++row) {
        const ptrdiff_t first = row * now.n;
        const wide origin = now.op == RMS_NORM ? 0 : at(x, first);
        wide mean = 0, var = 0;
        for (ptrdiff_t j = 0; j < now.n && now.op != RMS_NORM; ++j) mean += (at(x, first + j) - origin) / n;
        for (ptrdiff_t j = 0; j < now.n; ++j) {
            xhat[row][j] = at(x, first + j) - origin - mean;
            var += xhat[row][j] * xhat[row][j] / n;
        }
        rstd[row] = var + eps > 0 ? 1 / sqrt(var + eps) : 0;
        for (ptrdiff_t j = 0; j < now.n; ++j) xhat[row][j] *= rstd[row];
    }
}

static void forward_is_right(void)
{
    const wide u = (wide)roundoff(now.computed);
    for (ptrdiff_t row = 0; row < ROWS; ++row)
        for (ptrdiff_t j = 0; j < now.n; ++j) {
            const wide product = xhat[row][j] * gain_at(j), want = product + (now.with_bias ? (wide)get(now.computed, bias, j) : 0);
            within("y", now.dtype, plainest.y, row * now.n + j, want,
                   contract() * fmax(1, fabs(xhat[row][j])) * fabs(gain_at(j)) + u * (fabs(product) + fabs(want)));
        }
}

/* dx = rstd ((g - mean g) - xhat mean(g xhat)), for RMS norm without mean g; dgain = sum dy xhat; dbias = sum dy */
static void backward_is_right(void)
{
    const wide u = (wide)roundoff(now.computed), n = (wide)now.n, lanes = now.computed == CNORM_F64 ? 16 : 32;
    const wide sums = (ceil(fmin(n, 8192) / lanes) + 5) * u; /* the chain of a lane and the halving tree */
    static wide dgain[LONGEST], dgain_allowed[LONGEST], dbias[LONGEST], dbias_allowed[LONGEST];
    for (ptrdiff_t j = 0; j < now.n; ++j) dgain[j] = dgain_allowed[j] = dbias[j] = dbias_allowed[j] = 0;
    for (ptrdiff_t row = 0; row < ROWS; ++row) {
        wide G = 0, H = 0, size_g = 0, size_gx = 0, inherited = 0;
        for (ptrdiff_t j = 0; j < now.n; ++j) {
            const wide d = at(dy, row * now.n + j), g = d * gain_at(j), h = xhat[row][j], error = contract() * fmax(1, fabs(h));
            if (now.op == LAYER_NORM) G += g / n, size_g += fabs(g) / n;
            H += g * h / n, size_gx += fabs(g * h) / n, inherited += fabs(g) * error / n;
            dgain[j] += d * h, dbias[j] += d;
            dgain_allowed[j] += fabs(d) * error + (ROWS + 1) * u * fabs(d * h) + (wide)smallest(now.computed);
            dbias_allowed[j] += ROWS * u * fabs(d);
        }
        for (ptrdiff_t j = 0; j < now.n; ++j) {
            const wide g = at(dy, row * now.n + j) * gain_at(j), h = xhat[row][j], error = contract() * fmax(1, fabs(h));
            const wide inside = (sums + u) * size_g + fabs(h) * ((sums + 2 * u) * size_gx + inherited) + error * size_gx;
            const wide terms = fabs(g) + size_g + fabs(h) * size_gx;
            within("dx", now.dtype, plainest.dx, row * now.n + j, rstd[row] * ((g - G) - h * H),
                   rstd[row] * (inside + (contract() + 4 * u) * terms));
        }
    }
    for (ptrdiff_t j = 0; j < now.n; ++j) {
        within("dgain", now.computed, plainest.dgain, j, dgain[j], dgain_allowed[j]);
        if (now.op == LAYER_NORM) within("dbias", now.computed, plainest.dbias, j, dbias[j], dbias_allowed[j]);
    }
}

static void same_bits(const char *what, cnorm_dtype dtype, void *a, void *b, ptrdiff_t count)
{
    const ptrdiff_t item = size_of(dtype);
    canonicalise(dtype, a, count), canonicalise(dtype, b, count);
    if (memcmp(a, b, (size_t)(count * item)) == 0) return;
    for (ptrdiff_t i = 0; i < count; ++i)
        CHECK(memcmp((char *)a + i * item, (char *)b + i * item, (size_t)item) == 0, CASE ": %s[%td] = %.17g, wanted %.17g",
              CASE_ARGUMENTS, what, i, get(dtype, a, i), get(dtype, b, i));
}

/* With non-temporal stores, which api.c chooses for large outputs; here they are requested. Alignments: as allocated,
 * and another for every n. */
static void same_when_streaming(results *r, const void *g, const void *b)
{
    static _Alignas(CNORM_ALIGN) char y[MATRIX + SHIFT], sum[MATRIX + SHIFT];
    const cnorm_kernels *kernels = cnorm_active();
    const ptrdiff_t item = size_of(now.dtype), bytes = ROWS * now.n * item + SHIFT, other = now.n * item % SHIFT;
    for (ptrdiff_t shift = 0; shift <= other; shift += other ? other : SHIFT) {
        cnorm_norm call = {.rows = ROWS, .n = now.n, .x = x, .x_stride = now.n, .gain = g, .bias = b, .y = y + shift, .y_stride = now.n,
                           .eps = now.computed == CNORM_F32 ? (double)(float)now.eps : now.eps, .hints = NT_STORES};
        memset(y, 0x55, (size_t)bytes);
        (now.op == RMS_NORM ? kernels->rms_norm : kernels->layer_norm)[now.dtype](&call);
        same_bits("streamed y", now.dtype, y + shift, r->y, ROWS * now.n);
        cnorm_norm_backward back = {.rows = ROWS, .n = now.n, .dy = dy, .dy_stride = now.n, .x = x, .x_stride = now.n, .gain = g,
                                    .stats = r->stats, .dx = y + shift, .dx_stride = now.n, .partials = partials, .hints = NT_STORES};
        memset(y, 0x55, (size_t)bytes), memset(partials, 0x55, sizeof partials);
        (now.op == RMS_NORM ? kernels->rms_norm_backward : kernels->layer_norm_backward)[now.dtype](&back);
        same_bits("dgain beside streamed dx", now.computed, partials, r->dgain, now.n);
        same_bits("streamed dx", now.dtype, y + shift, r->dx, ROWS * now.n);
        if (now.op == LAYER_NORM) same_bits("dbias beside streamed dx", now.computed,
                                             partials + now.n * size_of(now.computed), r->dbias, now.n);
        if (now.op == RMS_NORM) continue;
        call.residual = dy, call.residual_stride = now.n, call.sum = sum + now.n % 2 * shift, call.sum_stride = now.n;
        memset(y, 0x55, (size_t)bytes), memset(sum, 0x55, (size_t)bytes);
        kernels->add_layer_norm[now.dtype](&call);
        same_bits("streamed y of a sum", now.dtype, y + shift, r->y_of_sum, ROWS * now.n);
        same_bits("streamed sum", now.dtype, call.sum, r->sum, ROWS * now.n);
    }
}

static void run(results *r, const void *g, const void *b)
{
    static char want[MATRIX];
    const ptrdiff_t n = now.n;
    if (now.op == RMS_NORM) {
        CHECK(cnorm_rms_norm(now.dtype, &(cnorm_norm){.rows = ROWS, .n = n, .x = x, .gain = g, .eps = now.eps, .y = r->y,
            .stats = r->stats}) == CNORM_OK, CASE, CASE_ARGUMENTS);
        CHECK(cnorm_rms_norm_backward(now.dtype, &(cnorm_norm_backward){.rows = ROWS, .n = n, .dy = dy, .x = x, .gain = g,
            .stats = r->stats, .dx = r->dx, .dgain = r->dgain, .partials = partials}) == CNORM_OK,
              CASE, CASE_ARGUMENTS);
    } else {
        CHECK(cnorm_layer_norm(now.dtype, &(cnorm_norm){.rows = ROWS, .n = n, .x = x, .gain = g, .bias = b, .eps = now.eps,
            .y = r->y, .stats = r->stats}) == CNORM_OK, CASE, CASE_ARGUMENTS);
        CHECK(cnorm_layer_norm_backward(now.dtype, &(cnorm_norm_backward){.rows = ROWS, .n = n, .dy = dy, .x = x, .gain = g,
            .stats = r->stats, .dx = r->dx, .dgain = r->dgain, .dbias = r->dbias, .partials = partials}) ==
                  CNORM_OK, CASE, CASE_ARGUMENTS);
        CHECK(cnorm_add_layer_norm(now.dtype, &(cnorm_norm){.rows = ROWS, .n = n, .x = x, .residual = dy, .gain = g, .bias = b,
            .eps = now.eps, .y = r->y_of_sum, .sum = r->sum}) == CNORM_OK,
              CASE, CASE_ARGUMENTS);
        for (ptrdiff_t i = 0; i < ROWS * n; ++i) put(now.dtype, want, i, get(now.dtype, x, i) + get(now.dtype, dy, i));
        same_bits("sum", now.dtype, r->sum, want, ROWS * n);
        CHECK(cnorm_layer_norm(now.dtype, &(cnorm_norm){.rows = ROWS, .n = n, .x = r->sum, .gain = g, .bias = b, .eps = now.eps,
            .y = want}) == CNORM_OK, CASE, CASE_ARGUMENTS);
        same_bits("y of a sum", now.dtype, r->y_of_sum, want, ROWS * n);
    }
    if (n >= 64 && now.with_gain) same_when_streaming(r, g, b);
}

static void run_case(void)
{
    const ptrdiff_t n = now.n, elements = ROWS * n;
    FOR_EACH_ISA(isa) {
        results *const r = isa == 0 ? &plainest : &got;
        run(r, now.with_gain ? gain : NULL, now.with_bias ? bias : NULL);
        if (isa > 0) {
            same_bits("y", now.dtype, got.y, plainest.y, elements);
            same_bits("stats", now.computed, got.stats, plainest.stats, 3 * ROWS);
            same_bits("dx", now.dtype, got.dx, plainest.dx, elements);
            same_bits("dgain", now.computed, got.dgain, plainest.dgain, n);
            if (now.op == LAYER_NORM) same_bits("dbias", now.computed, got.dbias, plainest.dbias, n);
            if (now.op == LAYER_NORM) same_bits("y of a sum", now.dtype, got.y_of_sum, plainest.y_of_sum, elements);
        } else if (now.kind < FINITE_KINDS && (now.dtype != CNORM_F64 || wide_is_wide())) {
            reference_statistics();
            forward_is_right();
            if (now.kind != SUBNORMAL) backward_is_right(); /* 1/std can overflow there */
        }
    }
}

static void norms(ptrdiff_t n)
{
    for (int d = 0; d < DTYPES; ++d)
        for (row_kind kind = 0; kind < ROW_KINDS; kind += n > 1000 ? 4 : 1) {
            uint64_t state = (uint64_t)(n * ROW_KINDS) + kind;
            now.dtype = dtypes[d], now.computed = compute_type(dtypes[d]), now.kind = kind, now.n = n;
            fill_row(kind, now.dtype, ROWS * n, x, &state);
            fill_row(MEAN_0, now.dtype, ROWS * n, dy, &state);
            fill_affine(now.dtype, n, gain, bias, &state);
            for (int full = 0; full < 2; ++full) { /* with gain and bias, and with a subset that depends on n */
                const int choice = full ? 3 : (int)(n % 3);
                now.with_gain = choice & 1, now.with_bias = choice >> 1, now.eps = (n / 3 + (int)kind + full) % 2 ? 1e-5 : 0;
                now.op = LAYER_NORM;
                run_case();
                now.op = RMS_NORM, now.with_bias = 0;
                run_case();
            }
        }
}

/* y is within one spacing of float32 numbers of the exact value */
static int within_one_ulp(float y, double exact)
{
    const double magnitude = fmax(fabs(exact), 0x1p-126);
    return fabs((double)y - exact) <= ldexp(1, ilogb(magnitude) - 23) && !signbit(y) == !signbit(exact);
}

static void activations(ptrdiff_t n)
{
    static float in[LONGEST], out[2][LONGEST], first[2][LONGEST];
    uint64_t state = (uint64_t)n;
    fill_row(n % 3 ? MEAN_0 : ANY_BITS, CNORM_F32, n, in, &state);
    FOR_EACH_ISA(isa) {
        CHECK(cnorm_sigmoid_f32(n, in, out[0]) == CNORM_OK && cnorm_tanh_f32(n, in, out[1]) == CNORM_OK, "n = %td", n);
        for (int f = 0; f < 2; ++f) {
            canonicalise(CNORM_F32, out[f], n);
            if (isa == 0) memcpy(first[f], out[f], (size_t)n * 4);
            CHECK(memcmp(first[f], out[f], (size_t)n * 4) == 0, "activation %d, n = %td on %s", f, n, cnorm_isa_name(isa));
            for (ptrdiff_t i = 0; i < n; ++i) {
                const double v = (double)in[i], exact = f ? tanh(v) : 1 / (1 + exp(-v));
                CHECK(isnan(in[i]) ? isnan(out[f][i]) : within_one_ulp(out[f][i], exact), "%s(%a) = %a, wanted %a on %s",
                      f ? "tanh" : "sigmoid", v, (double)out[f][i], exact, cnorm_isa_name(isa));
            }
        }
        float again[2][LONGEST]; /* in place */
        memcpy(again[0], in, (size_t)n * 4), memcpy(again[1], in, (size_t)n * 4);
        CHECK(cnorm_sigmoid_f32(n, again[0], again[0]) == CNORM_OK && cnorm_tanh_f32(n, again[1], again[1]) == CNORM_OK, "n = %td", n);
        canonicalise(CNORM_F32, again[0], n), canonicalise(CNORM_F32, again[1], n);
        CHECK(memcmp(again[0], out[0], (size_t)n * 4) == 0 && memcmp(again[1], out[1], (size_t)n * 4) == 0, "in place, n = %td", n);
    }
}

int main(void)
{
    if (!wide_is_wide()) printf("nothing is wider than float64 here: its results are compared between instruction sets alone\n");
    for (ptrdiff_t n = 1; n <= 130; ++n) norms(n), activations(n);
    static const ptrdiff_t folds[] = {1024, 8191, 8195};
    for (size_t i = 0; i < sizeof folds / sizeof *folds; ++i) norms(folds[i]), activations(folds[i]);
    return check_result();
}
