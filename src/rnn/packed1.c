/* Layers of packed files of version 1, which have one struct for all kinds. This format is closed: a new kind of layer
 * or field is none of it. */
#include <string.h>

#include "packed.h"

enum { MATRICES = 4, VECTORS = 9, GAIN_H = 3, BIAS = 4 };

typedef struct packed1_matrix {
    uint32_t type, gates, units, cols, group, levels;
    uint64_t panels;
} packed1_matrix;

/* A cell has all matrices and vectors in the order of cnorm_cell; a linear layer its matrix and its bias in the places
 * of weight_x and bias, a norm gain and bias in those of gain_h and bias. */
typedef struct packed1_layer {
    uint32_t kind, n, back; /* n: elements of a norm, an activation or a residual layer */
    uint32_t cell, scope, cell_norm, reset, activation, keep, zero;
    float eps, cell_clip, projection_clip, zoneout;
    packed1_matrix matrices[MATRICES];
    uint64_t vectors[VECTORS];
    uint64_t start; /* the initial state of a cell */
} packed1_layer;

_Static_assert(sizeof(packed1_layer) == PACKED1_LAYER, "no padding");

/* the options in the order of version 2; returns their number */
static uint32_t options_of(const packed1_layer *from, uint32_t *to)
{
    enum { NAMED = 6, NUMBERS = 4 }; /* of a cell: from `cell` and from `eps` on */
    const unsigned char *bytes = (const unsigned char *)from;
    const unsigned char *named = bytes + offsetof(packed1_layer, cell), *numbers = bytes + offsetof(packed1_layer, eps);
    to[0] = from->n;
    switch (from->kind) {
    case CNORM_LAYER_CELL:
        memcpy(to, named, NAMED * sizeof *to);
        memcpy(to + NAMED, numbers, NUMBERS * sizeof *to);
        return NAMED + NUMBERS;
    case CNORM_LAYER_NORM: memcpy(to + 1, numbers, sizeof *to); return 2;
    case CNORM_LAYER_ACTIVATION: to[1] = from->activation; return 2;
    case CNORM_LAYER_RESIDUAL: to[1] = from->back; return 2;
    default: return 0;
    }
}

typedef struct record {
    packed_layer *head;
    unsigned char *at;
} record;

static void add_field(record *to, packed_field is)
{
    memcpy(to->at, &is, sizeof is);
    to->at += sizeof is, to->head->fields += 1;
}

static void add_matrix(record *to, uint32_t field, const packed1_matrix *m)
{
    if (m->gates == 0) return; /* an optional one */
    add_field(to, (packed_field){field, m->type, m->gates, m->units, m->cols, m->group, m->levels, 0, m->panels});
}

static void add_vector(record *to, uint32_t field, uint64_t at)
{
    if (at == 0) return;
    add_field(to, (packed_field){.field = field, .type = PACKED_VECTOR, .at = at}); /* version 1 has no shapes */
}

void cnorm_packed1_record(const void *layer, void *bytes)
{
    packed1_layer from;
    uint32_t options[16] = {0};
    memcpy(&from, layer, sizeof from);
    packed_layer head = {.kind = from.kind <= CNORM_LAYER_RESIDUAL ? from.kind : UINT32_MAX};
    head.options = options_of(&from, options);
    record to = {&head, (unsigned char *)bytes + sizeof head};
    memcpy(to.at, options, packed_options_bytes(head.options));
    to.at += packed_options_bytes(head.options);
    if (from.kind == CNORM_LAYER_CELL) {
        for (uint32_t i = 0; i < MATRICES; ++i) add_matrix(&to, i, &from.matrices[i]);
        for (uint32_t i = 0; i < VECTORS; ++i) add_vector(&to, MATRICES + i, from.vectors[i]);
        add_vector(&to, PACKED_START, from.start);
    } else if (from.kind == CNORM_LAYER_LINEAR) {
        add_matrix(&to, 0, &from.matrices[0]);
        add_vector(&to, 1, from.vectors[BIAS]);
    } else if (from.kind == CNORM_LAYER_NORM) {
        add_vector(&to, 0, from.vectors[GAIN_H]);
        add_vector(&to, 1, from.vectors[BIAS]);
    }
    head.bytes = (uint32_t)(to.at - (unsigned char *)bytes);
    memcpy(bytes, &head, sizeof head);
}
