#include "cpu.h"

#include <stdatomic.h>

enum { GUESSED_CACHE = 32 << 20 };

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

enum { ASKED = 1, AVX2 = 2, AVX512 = 4, AVXVNNI = 8, AVX512VNNI = 16, AMD = 32 };

static unsigned ask(void)
{
    const unsigned wanted = bit_AVX512F | bit_AVX512VL | bit_AVX512BW | bit_AVX512DQ, saved = saved_state();
    unsigned a, b, c, d, vendor = 0;
    if ((saved & XMM_YMM) != XMM_YMM || !__get_cpuid(0, &a, &vendor, &c, &d)) return ASKED;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_AVX) || !(c & bit_F16C) || !(c & bit_FMA)) return ASKED;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(b & bit_AVX2)) return ASKED;
    unsigned found = ASKED | AVX2 | (vendor == signature_AMD_ebx ? AMD : 0);
    if ((saved & OPMASK_ZMM) == OPMASK_ZMM && (b & wanted) == wanted) found |= AVX512 | (c & 1u << 11 ? AVX512VNNI : 0);
    if (a >= 1 && __get_cpuid_count(7, 1, &a, &b, &c, &d) && a & 1u << 4) found |= AVXVNNI;
    return found;
}

/* cached: in a virtual machine cpuid traps, and costs tens of microseconds */
static unsigned features(void)
{
    static _Atomic unsigned answer;
    if (!answer) answer = ask();
    return answer;
}

int cnorm_cpu_has_avx2(void) { return (features() & AVX2) != 0; }
int cnorm_cpu_has_avx512(void) { return (features() & AVX512) != 0; }
int cnorm_cpu_has_avxvnni(void) { return (features() & AVXVNNI) != 0; }
int cnorm_cpu_is_amd(void) { return (features() & AMD) != 0; }
int cnorm_cpu_broadcasts_in_fma(void) { return (features() & (AMD | AVXVNNI)) == AMD; }
int cnorm_cpu_has_avx512vnni(void) { return (features() & AVX512VNNI) != 0; }

/* CPUID leaf 4 (Intel) and 0x8000001d (AMD): one data or unified cache per subleaf */
static __attribute__((noinline)) ptrdiff_t largest_cache(void)
{
    ptrdiff_t largest = 0;
    const unsigned leaves[] = {0x8000001d, 4};
    for (int i = 0; i < 2 && !largest; ++i) {
        unsigned a, b, c, d;
        for (unsigned sub = 0; sub < 16 && __get_cpuid_count(leaves[i], sub, &a, &b, &c, &d) && (a & 31); ++sub) {
            const ptrdiff_t ways = (b >> 22) + 1, partitions = (b >> 12 & 0x3ff) + 1, line = (b & 0xfff) + 1;
            const ptrdiff_t bytes = ways * partitions * line * ((ptrdiff_t)c + 1);
            if ((a & 31) != 2 && bytes > largest) largest = bytes; /* 2: an instruction cache */
        }
    }
    return largest ? largest : GUESSED_CACHE;
}

ptrdiff_t cnorm_cpu_cache_bytes(void)
{
    static _Atomic ptrdiff_t known; /* cached, as in features */
    ptrdiff_t bytes = atomic_load_explicit(&known, memory_order_relaxed);
    if (!bytes) atomic_store_explicit(&known, bytes = largest_cache(), memory_order_relaxed);
    return bytes;
}

#else

int cnorm_cpu_is_amd(void) { return 0; }
int cnorm_cpu_broadcasts_in_fma(void) { return 0; }

#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
int cnorm_cpu_has_dotprod(void) { return (getauxval(AT_HWCAP) & 1ul << 20) != 0; } /* HWCAP_ASIMDDP */
#elif defined(__aarch64__)
int cnorm_cpu_has_dotprod(void)
{
#if defined(__APPLE__)
    return 1; /* every Apple processor that runs macOS */
#else
    return 0;
#endif
}
#endif

ptrdiff_t cnorm_cpu_cache_bytes(void) { return GUESSED_CACHE; }

#endif
