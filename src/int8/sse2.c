/* pairs.inl.h with SSE2: 16-byte vectors. */
#include <emmintrin.h>

typedef int ints __attribute__((vector_size(16)));
#define INTS ints
#define SPLAT(a) _mm_set1_epi32(a)
#define EVEN(bytes) _mm_and_si128((__m128i)(bytes), _mm_set1_epi16(255))
#define ODD(bytes) _mm_srli_epi16((__m128i)(bytes), 8)
#define MADD(words, pair) ((ints)_mm_madd_epi16(words, pair))
#include "pairs.inl.h"
BACKEND_OF(sse2);
