#if !(defined(__AVX2__) && defined(__F16C__) && defined(__FMA__))
#error "the flags of this file are in src/meson.build"
#endif
#define CNORM_ISA avx2
#include "isa.inl.h"
