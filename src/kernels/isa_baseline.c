#define CNORM_ISA baseline
#include "isa.inl.h"
