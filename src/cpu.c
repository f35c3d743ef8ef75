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

enum { ASKED = 1, AVX2 = 2, AVX512 = 4 };

static unsigned ask(void)
{
    const unsigned wanted = bit_AVX512F | bit_AVX512VL | bit_AVX512BW | bit_AVX512DQ, saved = saved_state();
    unsigned a, b, c, d;
    if ((saved & XMM_YMM) != XMM_YMM) return ASKED;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_AVX) || !(c & bit_F16C)) return ASKED;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(b & bit_AVX2)) return ASKED;
    return ASKED | AVX2 | ((saved & OPMASK_ZMM) == OPMASK_ZMM && (b & wanted) == wanted ? AVX512 : 0);
}

/* asked once: cpuid traps in a virtual machine, and costs tens of microseconds there */
static unsigned features(void)
{
    static _Atomic unsigned answer;
    if (!answer) answer = ask();
    return answer;
}

int cnorm_cpu_has_avx2(void) { return (features() & AVX2) != 0; }
int cnorm_cpu_has_avx512(void) { return (features() & AVX512) != 0; }

#else

int cnorm_cpu_has_avx2(void) { return 0; }
int cnorm_cpu_has_avx512(void) { return 0; }

#endif
