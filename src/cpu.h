/* What this processor has and its operating system saves: nothing else. */
#ifndef CNORM_CPU_H
#define CNORM_CPU_H

#include <stddef.h>

#pragma GCC visibility push(hidden)

#if defined(__x86_64__)
int cnorm_cpu_has_avx2(void);   /* AVX2 and F16C */
int cnorm_cpu_has_avx512(void); /* F, VL, BW and DQ */
int cnorm_cpu_has_avxvnni(void);    /* beside AVX2 */
int cnorm_cpu_has_avx512vnni(void); /* beside AVX-512 */
#elif defined(__aarch64__)
int cnorm_cpu_has_dotprod(void);
#endif

/* bytes of the largest cache; a guess of 32 MiB where the processor does not tell */
ptrdiff_t cnorm_cpu_cache_bytes(void);

#pragma GCC visibility pop

#endif
