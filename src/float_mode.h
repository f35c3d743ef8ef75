/* Results must not depend on the caller's rounding mode, trap mask or flush-to-zero mode. Every
 * entry that computes calls float_mode_enter first and float_mode_leave last; if the mode is the
 * default, they only read a register. */
#ifndef CNORM_FLOAT_MODE_H
#define CNORM_FLOAT_MODE_H

#if defined(__SSE2__)

#include <xmmintrin.h>

typedef unsigned float_mode;
#define MXCSR_DEFAULT 0x1f80u /* round to nearest, all traps masked, subnormals kept */
#define MXCSR_FLAGS 0x3fu     /* sticky flags: not a mode */

static inline float_mode float_mode_enter(void)
{
    const unsigned mode = _mm_getcsr();
    if ((mode & ~MXCSR_FLAGS) != MXCSR_DEFAULT) _mm_setcsr(MXCSR_DEFAULT);
    return mode;
}
static inline void float_mode_leave(float_mode mode)
{
    if ((mode & ~MXCSR_FLAGS) != MXCSR_DEFAULT) _mm_setcsr(mode);
}

#elif defined(__aarch64__)

#include <stdint.h>

typedef uint64_t float_mode; /* FPCR has 64 bits; `unsigned long` has 32 on Windows */

static inline float_mode float_mode_enter(void)
{
    float_mode mode;
    __asm__ volatile("mrs %0, fpcr" : "=r"(mode));
    if (mode != 0) __asm__ volatile("msr fpcr, %0" ::"r"((uint64_t)0));
    return mode;
}
static inline void float_mode_leave(float_mode mode)
{
    if (mode != 0) __asm__ volatile("msr fpcr, %0" ::"r"(mode));
}

#else

#include <fenv.h>

typedef fenv_t float_mode;

static inline float_mode float_mode_enter(void)
{
    fenv_t mode;
    fegetenv(&mode);
    fesetenv(FE_DFL_ENV);
    return mode;
}
static inline void float_mode_leave(float_mode mode) { fesetenv(&mode); }

#endif
#endif
