/* pairs.inl.h with AVX2: 32-byte vectors. */
#include <immintrin.h>

typedef int ints __attribute__((vector_size(32)));
#define INTS ints
#define SPLAT(a) _mm256_set1_epi32(a)
#define EVEN(bytes) _mm256_and_si256((__m256i)(bytes), _mm256_set1_epi16(255))
#define ODD(bytes) _mm256_srli_epi16((__m256i)(bytes), 8)
#define MADD(words, pair) ((ints)_mm256_madd_epi16(words, pair))
#include "pairs.inl.h"
BACKEND_OF(avx2);
