/* The packed model file, written by packed_write.c and read by packed.c, in the byte order of the machine
 * that wrote it: another one refuses it. It describes itself: a reader needs no table of the library to walk through
 * it.
 *
 *     packed_head
 *     packed_network [networks]
 *     the records of the layers of all networks, in order, `record_bytes` in all, each
 *         packed_layer
 *         its options [options], 4 bytes each, in the order of the kind's table in layers/, zeros up to a multiple of 8
 *         packed_field [fields], with growing numbers
 *     configuration, then zeros up to `data`, a multiple of CNORM_ALIGN
 *     panels and vectors, each at a multiple of CNORM_ALIGN
 *
 * An offset counts bytes from the beginning of the file. A kind may get more options: a record with fewer has 0 for
 * the rest. What is zero here is room for a later version, and a reader refuses anything else there. */
#ifndef CNORM_PACKED_H
#define CNORM_PACKED_H

#include "cnorm_model.h"

static const unsigned char packed_magic[8] = {0x89, 'c', 'n', 'o', 'r', 'm', '\r', '\n'};
enum { PACKED_VERSION = 2, PACKED_ORDER = 0x01020304, PACKED_LAYERS = 10000 /* at most */ };

typedef struct packed_head {
    unsigned char magic[8];
    uint32_t head_crc; /* CRC-32 of the bytes from `version` to `data` */
    uint32_t version, order;
    uint32_t data_crc; /* CRC-32 of the bytes from `data` to the end: checked by cnorm_model_verify only */
    uint64_t bytes, data;
    uint32_t layers, networks, configuration_bytes, record_bytes, zero[2];
    unsigned char identity[CNORM_IDENTITY];
} packed_head;

typedef struct packed_network {
    uint32_t layers, direction;
} packed_network;

typedef struct packed_layer {
    uint32_t kind, bytes /* of the record */, options, fields, zero[2];
} packed_layer;

/* A number of the kind's table, or PACKED_START, the initial state. A vector has the type PACKED_VECTOR and is [units],
 * or [gates, units] if gates > 0, each gate padded to CNORM_GATE_PAD. */
enum { PACKED_START = 0xffff, PACKED_VECTOR = 0x100 };
typedef struct packed_field {
    uint32_t field, type, gates, units, cols, group, levels, zero;
    uint64_t at;
} packed_field;

_Static_assert(sizeof(packed_head) == 96 && sizeof(packed_network) == 8, "no padding");
_Static_assert(sizeof(packed_layer) == 24 && sizeof(packed_field) == 40, "no padding");

static inline uint64_t packed_options_bytes(uint32_t options) { return ((uint64_t)options * 4 + 7) / 8 * 8; }

/* the bytes before the configuration */
static inline uint64_t packed_table_bytes(const packed_head *head)
{
    return sizeof *head + head->networks * (uint64_t)sizeof(packed_network) + head->record_bytes;
}

#pragma GCC visibility push(hidden)

/* packed.c: all layers, their sizes and directions; sets the outputs of the last */
cnorm_status cnorm_packed_check_networks(const cnorm_network *networks, int count, ptrdiff_t *outputs,
                                         cnorm_fault *fault);

#pragma GCC visibility pop

#endif
