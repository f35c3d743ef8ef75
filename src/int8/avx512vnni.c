/* vnni.inl.h with AVX-512 VNNI: 64-byte vectors. */
#include <immintrin.h>

typedef int ints __attribute__((vector_size(64)));
#define INTS ints
#define SPLAT(a) _mm512_set1_epi32(a)
#define DPBUSD(sum, weights, digits) ((ints)_mm512_dpbusd_epi32((__m512i)(sum), (__m512i)(weights), digits))
#include "vnni.inl.h"
BACKEND_OF(avx512vnni);
