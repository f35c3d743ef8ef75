/* Scratch memory: one function both sizes and lays out, so that the two cannot differ.
 *
 *     layout s = {memory};                  with memory NULL it only counts
 *     float *a = layout_take(&s, bytes);   NULL while counting
 *     s.used                                the bytes of both
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
