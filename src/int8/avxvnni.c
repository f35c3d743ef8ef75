/* vnni.inl.h with AVX-VNNI: 32-byte vectors. */
#include <immintrin.h>

typedef int ints __attribute__((vector_size(32)));
#define INTS ints
#define SPLAT(a) _mm256_set1_epi32(a)
#if defined(__AVXVNNI__)
#define DPBUSD(sum, weights, digits) ((ints)_mm256_dpbusd_avx_epi32((__m256i)(sum), (__m256i)(weights), digits))
#else /* the tests run this on AVX-512 VNNI: the same instruction in another encoding */
#define DPBUSD(sum, weights, digits) ((ints)_mm256_dpbusd_epi32((__m256i)(sum), (__m256i)(weights), digits))
#endif
#include "vnni.inl.h"
BACKEND_OF(avxvnni);
