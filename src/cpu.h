/* Features of this processor whose registers the operating system saves on a context switch, and its cache size. */
#ifndef CNORM_CPU_H
#define CNORM_CPU_H

#include <stddef.h>

#pragma GCC visibility push(hidden)

#if defined(__x86_64__)
int cnorm_cpu_has_avx2(void);       /* AVX2, F16C and FMA */
int cnorm_cpu_has_avx512(void);     /* the same and F, VL, BW and DQ */
int cnorm_cpu_has_avxvnni(void);    /* AVX2 and AVX-VNNI */
int cnorm_cpu_has_avx512vnni(void); /* AVX-512 as above and VNNI */
#elif defined(__aarch64__)
int cnorm_cpu_has_dotprod(void);
#endif

int cnorm_cpu_is_amd(void);
int cnorm_cpu_broadcasts_in_fma(void); /* a broadcast from memory, but as an operand, costs as much as an fma: Zen 4 */

/* bytes of the largest cache; 32 MiB if the processor does not report it */
ptrdiff_t cnorm_cpu_cache_bytes(void);

#pragma GCC visibility pop

#endif
