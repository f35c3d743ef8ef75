#if !(defined(__aarch64__))
#error "the flags of this file are in src/meson.build"
#endif
#define CNORM_ISA neon
#include "isa.inl.h"
