/* The choice of the code that multiplies int8 weights, by vector width and processor. */
#include "../cpu.h"
#include "backends.h"

const cnorm_int8_backend *cnorm_int8_backend_of(int vector_bytes)
{
#if defined(__x86_64__)
    if (vector_bytes == 64 && cnorm_cpu_has_avx512vnni()) return &cnorm_int8_avx512vnni;
    if (vector_bytes == 32 && cnorm_cpu_has_avxvnni()) return &cnorm_int8_avxvnni;
    return vector_bytes == 16 ? &cnorm_int8_sse2 : &cnorm_int8_avx2;
#elif defined(__aarch64__)
    (void)vector_bytes;
    return cnorm_cpu_has_dotprod() ? &cnorm_int8_dotprod : &cnorm_int8_neon;
#else
    (void)vector_bytes;
    return &cnorm_int8_scalar;
#endif
}
