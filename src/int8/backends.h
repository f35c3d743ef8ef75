/* Exact products of int8 weights with 14-bit inputs. One small translation unit per instruction set; all compute
 * the same integers, so the fastest is chosen.
 *
 *     sums[s, r] = sum over k of (w[r, k] + 128) q[s, k]   modulo 2^32, |w| <= 127, |q| <= CNORM_INT8_LEVELS
 *
 * Weights are stored as unsigned bytes w + 128: zero extension is cheaper than sign extension, and vpdpbusd wants one
 * unsigned operand. The caller subtracts 128 times the sum of q. Partial sums may wrap modulo 2^32, since the final
 * result fits int32.
 *
 * Four inputs are a quad. One layout for all instruction sets: weights uint8 [rows/PANEL][quads][PANEL][4]. Inputs
 * beyond the last are q = 0; padded rows are w = 0, stored as 128.
 */
#ifndef CNORM_INT8_BACKENDS_H
#define CNORM_INT8_BACKENDS_H

#include <stddef.h>
#include <stdint.h>

enum {
    CNORM_INT8_LEVELS = 8191, /* the largest |q| */
    CNORM_INT8_PANEL = 32,    /* outputs of a panel: PANEL of kernels.h */
    CNORM_INT8_BIAS = 128,    /* added to a weight where it is stored */
};

typedef struct cnorm_int8_backend {
    const char *name;
    /* q [4 quads] -> x [quads, n], the first of n columns: eight bytes per quad, as the backend multiplies them */
    void (*arrange)(ptrdiff_t quads, const int16_t *q, ptrdiff_t n, int32_t (*x)[2]);
    /* x [quads, n] -> sums [n, rows], rows a multiple of the panel; vectors of sums lie `stride` apart */
    void (*multiply)(ptrdiff_t rows, ptrdiff_t quads, const uint8_t *weights, ptrdiff_t n, const int32_t (*x)[2],
                     int32_t *sums, ptrdiff_t stride);
} cnorm_int8_backend;

/* X(name, the condition under which this machine can run it), from plain C up. scalar is the reference of the tests. */
#if defined(__x86_64__)
#define CNORM_INT8_BACKENDS(X)                                                                                         \
    X(scalar, 1)                                                                                                       \
    X(sse2, 1)                                                                                                         \
    X(avx2, cnorm_cpu_has_avx2())                                                                                      \
    X(avxvnni, cnorm_cpu_has_avxvnni())                                                                                \
    X(avx512vnni, cnorm_cpu_has_avx512vnni())
#elif defined(__aarch64__)
#define CNORM_INT8_BACKENDS(X) X(scalar, 1) X(neon, 1) X(dotprod, cnorm_cpu_has_dotprod())
#else
#define CNORM_INT8_BACKENDS(X) X(scalar, 1)
#endif

#define CNORM_DECLARE_BACKEND(name, condition) extern const cnorm_int8_backend cnorm_int8_##name;
CNORM_INT8_BACKENDS(CNORM_DECLARE_BACKEND)
#undef CNORM_DECLARE_BACKEND

/* the fastest backend whose vectors are no wider than those of the instruction set in use */
const cnorm_int8_backend *cnorm_int8_backend_of(int vector_bytes);

#endif
