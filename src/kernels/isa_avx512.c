#if !(defined(__AVX512F__) && defined(__AVX512VL__) && defined(__AVX512BW__) && defined(__AVX512DQ__))
#error "the flags of this file are in src/meson.build"
#endif
#define CNORM_ISA avx512
#include "isa.inl.h"
