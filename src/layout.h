/* Scratch memory: the same function computes its size and its layout, so that the two cannot differ.
 *
 *     layout s = {memory};                 memory NULL: only count bytes
 *     float *a = layout_take(&s, bytes);   the next `bytes` bytes, or NULL while counting
 *     s.used                               bytes taken so far
 */
#ifndef CNORM_LAYOUT_H
#define CNORM_LAYOUT_H

#include <stddef.h>

typedef struct layout {
    char *memory;
    ptrdiff_t used;
} layout;

static inline void *layout_take(layout *s, ptrdiff_t bytes)
{
    void *p = s->memory ? s->memory + s->used : NULL;
    s->used += bytes;
    return p;
}

#endif
