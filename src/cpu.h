/* What this processor has and its operating system saves: nothing else. */
#ifndef CNORM_CPU_H
#define CNORM_CPU_H

int cnorm_cpu_has_avx2(void);   /* AVX2 and F16C */
int cnorm_cpu_has_avx512(void); /* F, VL, BW and DQ */

#endif
