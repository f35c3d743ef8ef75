/* The packed model file, read and written by packed.c, in the byte order of the machine that wrote it: another one
 * refuses it.
 *
 *     packed_head
 *     packed_network [networks]
 *     packed_layer [layers]         of all networks, in order
 *     configuration, then zeros up to `data`, a multiple of CNORM_ALIGN
 *     panels and vectors, each at a multiple of CNORM_ALIGN; their sizes follow from the layer
 *
 * An offset counts bytes from the beginning of the file; 0 stands for an array that the layer does not have. */
#ifndef CNORM_PACKED_H
#define CNORM_PACKED_H

#include "cnorm_model.h"

static const unsigned char packed_magic[8] = {0x89, 'c', 'n', 'o', 'r', 'm', '\r', '\n'};
enum { PACKED_VERSION = 1, PACKED_ORDER = 0x01020304, PACKED_LAYERS = 10000 /* at most */ };

typedef struct packed_head {
    unsigned char magic[8];
    uint32_t head_crc; /* CRC-32 of the bytes from `version` to `data` */
    uint32_t version, order;
    uint32_t data_crc; /* CRC-32 of the bytes from `data` to the end: checked by cnorm_model_verify only */
    uint64_t bytes, data;
    uint32_t layers, networks, configuration_bytes, zero[3];
    unsigned char identity[CNORM_IDENTITY];
} packed_head;

typedef struct packed_network {
    uint32_t layers, direction;
} packed_network;

typedef struct packed_matrix {
    uint32_t type, gates, units, cols, group, levels;
    uint64_t panels;
} packed_matrix;

enum { PACKED_MATRICES = 4, PACKED_VECTORS = 9 };

/* A cell has all matrices and vectors in the order of cnorm_cell; a linear layer its matrix and its bias in the places
 * of weight_x and bias, a norm gain and bias in those of gain_h and bias. */
typedef struct packed_layer {
    uint32_t kind, n, back; /* n: elements of a norm, an activation or a residual layer */
    uint32_t cell, scope, cell_norm, reset, activation, keep, zero;
    float eps, cell_clip, projection_clip, zoneout;
    packed_matrix matrices[PACKED_MATRICES];
    uint64_t vectors[PACKED_VECTORS];
    uint64_t start; /* the initial state of a cell */
} packed_layer;

_Static_assert(sizeof(packed_head) == 96 && sizeof(packed_network) == 8 && sizeof(packed_layer) == 264, "no padding");

#endif
