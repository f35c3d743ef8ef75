/* The choice of the instruction set, the one global variable of the library. */
#ifndef CNORM_DISPATCH_H
#define CNORM_DISPATCH_H

#include "kernels/kernels.h"

#pragma GCC visibility push(hidden)

/* The active table, or NULL if the environment variable CNORM_ISA names one that can't run here. */
const cnorm_kernels *cnorm_active(void);

#pragma GCC visibility pop

#endif
