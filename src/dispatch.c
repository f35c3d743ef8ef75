#include "dispatch.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "cpu.h"
#include "float_mode.h"

static _Atomic(const cnorm_kernels *) active; /* NULL until the first use */

static int is_exact(const cnorm_kernels *table)
{
    const float_mode mode = float_mode_enter();
    const int held = table->exact();
    float_mode_leave(mode);
    return held;
}

/* the index-th table that can run here, from the baseline up */
static const cnorm_kernels *runnable(int index)
{
#define CNORM_PICK(isa, condition)                                                                                     \
    if ((condition) && is_exact(&cnorm_kernels_##isa) && index-- == 0) return &cnorm_kernels_##isa;
    CNORM_ISAS(CNORM_PICK)
#undef CNORM_PICK
    return NULL;
}

static const cnorm_kernels *named(const char *name)
{
    const cnorm_kernels *table = NULL;
    for (int i = 0; (table = runnable(i)) != NULL && strcmp(table->name, name) != 0;) ++i;
    return table;
}

int cnorm_isa_count(void)
{
    int count = 0;
    while (runnable(count)) ++count;
    return count;
}

const char *cnorm_isa_name(int index)
{
    const cnorm_kernels *table = index < 0 ? NULL : runnable(index);
    return table ? table->name : NULL;
}

/* not inlined, as cnorm_active would then save registers in every call */
static __attribute__((noinline)) const cnorm_kernels *choose(void)
{
    const char *const forced = getenv("CNORM_ISA");
    const cnorm_kernels *const table = forced ? named(forced) : runnable(cnorm_isa_count() - 1);
    /* if another thread has chosen one meanwhile, that choice stays */
    const cnorm_kernels *chosen = NULL;
    if (table && !atomic_compare_exchange_strong(&active, &chosen, table)) return chosen;
    return table;
}

const cnorm_kernels *cnorm_active(void)
{
    const cnorm_kernels *const table = atomic_load_explicit(&active, memory_order_acquire);
    return table ? table : choose();
}

const char *cnorm_isa_active(void)
{
    const cnorm_kernels *table = cnorm_active();
    return table ? table->name : NULL;
}

cnorm_status cnorm_isa_use(const char *name)
{
    const cnorm_kernels *table = name ? named(name) : NULL;
    if (!table) return CNORM_ERROR_ISA;
    atomic_store_explicit(&active, table, memory_order_release);
    return CNORM_OK;
}
