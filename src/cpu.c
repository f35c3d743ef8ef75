#include "cpu.h"

#if defined(__x86_64__)

#include <cpuid.h>

/* XCR0 bits: the register state that the operating system saves on a context switch */
enum { XMM_YMM = 0x06, OPMASK_ZMM = 0xe0 };

static unsigned saved_state(void)
{
    unsigned a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_OSXSAVE)) return 0; /* xgetbv would fault */
    __asm__ volatile("xgetbv" : "=a"(a), "=d"(d) : "c"(0));
    return a;
}

int cnorm_cpu_has_avx2(void)
{
    unsigned a, b, c, d;
    if ((saved_state() & XMM_YMM) != XMM_YMM) return 0;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_AVX) || !(c & bit_F16C)) return 0;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & bit_AVX2);
}

int cnorm_cpu_has_avx512(void)
{
    const unsigned wanted = bit_AVX512F | bit_AVX512VL | bit_AVX512BW | bit_AVX512DQ;
    unsigned a, b, c, d;
    if (!cnorm_cpu_has_avx2() || (saved_state() & OPMASK_ZMM) != OPMASK_ZMM) return 0;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & wanted) == wanted;
}

#else

int cnorm_cpu_has_avx2(void) { return 0; }
int cnorm_cpu_has_avx512(void) { return 0; }

#endif
