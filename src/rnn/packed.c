/* Opening and writing packed models. Everything that is read from a file is copied once and checked before it is
 * used. */
#include "packed.h"

#include <math.h>
#include <string.h>

#include "../crc32.h"
#include "../kernels/kernels.h"

/* ---- the matrices and vectors of a layer, in the order of the file -------------------------------------------- */

static int matrix_fields(cnorm_layer *layer, cnorm_matrix *fields[PACKED_MATRICES])
{
    if (layer->kind == CNORM_LAYER_LINEAR) {
        fields[0] = &layer->as.linear.weight;
        return 1;
    }
    if (layer->kind != CNORM_LAYER_CELL) return 0;
    cnorm_cell *cell = &layer->as.cell;
    cnorm_matrix *all[PACKED_MATRICES] = {&cell->weight_x, &cell->weight_h, &cell->weight_n, &cell->weight_p};
    memcpy(fields, all, sizeof all);
    return PACKED_MATRICES;
}

typedef struct vector_field {
    const float **at;
    ptrdiff_t floats; /* 0: the layer has no such vector */
} vector_field;

enum { GAIN_H = 3, BIAS = 4 };

static void vector_fields(cnorm_layer *layer, vector_field fields[PACKED_VECTORS])
{
    memset(fields, 0, PACKED_VECTORS * sizeof *fields);
    if (layer->kind == CNORM_LAYER_LINEAR) {
        fields[BIAS] = (vector_field){&layer->as.linear.bias, layer->as.linear.weight.units};
    } else if (layer->kind == CNORM_LAYER_NORM) {
        fields[GAIN_H] = (vector_field){&layer->as.norm.gain, layer->as.norm.n};
        fields[BIAS] = (vector_field){&layer->as.norm.bias, layer->as.norm.n};
    } else if (layer->kind == CNORM_LAYER_CELL) {
        cnorm_cell *cell = &layer->as.cell;
        const ptrdiff_t units = cell->weight_x.units, padded = padded_units(units),
                        gates = cell->weight_x.gates * padded;
        const vector_field all[PACKED_VECTORS] = {
            {&cell->inside_x, gates + CNORM_GATE_PAD},
            {&cell->inside_h, gates + CNORM_GATE_PAD},
            {&cell->gain_x, gates},
            {&cell->gain_h, gates},
            {&cell->bias, gates},
            {&cell->bias_n, padded},
            {&cell->gain_c, units},
            {&cell->bias_c, units},
            {&cell->bias_p, padded_units(cell->weight_h.cols)},
        };
        memcpy(fields, all, sizeof all);
    }
}

/* ---- reading -------------------------------------------------------------------------------------------------- */

static uint64_t table_bytes(const packed_head *head)
{
    return sizeof *head + head->networks * (uint64_t)sizeof(packed_network) +
           head->layers * (uint64_t)sizeof(packed_layer);
}

static cnorm_status read_head(const void *file, ptrdiff_t file_bytes, packed_head *head)
{
    if (!file) return CNORM_ERROR_NULL;
    if (file_bytes < (ptrdiff_t)sizeof *head) return CNORM_ERROR_FORMAT;
    memcpy(head, file, sizeof *head);
    if (memcmp(head->magic, packed_magic, sizeof packed_magic) != 0) return CNORM_ERROR_FORMAT;
    if (head->order != PACKED_ORDER || head->version != PACKED_VERSION) return CNORM_ERROR_FORMAT;
    if (head->bytes != (uint64_t)file_bytes || head->data > head->bytes || head->data % CNORM_ALIGN)
        return CNORM_ERROR_DAMAGED;
    if (head->layers < 1 || head->layers > PACKED_LAYERS || head->networks < 1 || head->networks > head->layers)
        return CNORM_ERROR_DAMAGED;
    if (table_bytes(head) + head->configuration_bytes > head->data) return CNORM_ERROR_DAMAGED;
    return head->zero[0] || head->zero[1] || head->zero[2] ? CNORM_ERROR_DAMAGED : CNORM_OK;
}

static ptrdiff_t memory_of(const packed_head *head)
{
    return (ptrdiff_t)(head->layers * (sizeof(cnorm_layer) + sizeof(float *)) + head->networks * sizeof(cnorm_network));
}

ptrdiff_t cnorm_model_memory(const void *file, ptrdiff_t file_bytes)
{
    packed_head head;
    return read_head(file, file_bytes, &head) == CNORM_OK ? memory_of(&head) : 0;
}

typedef struct packed_file {
    const unsigned char *bytes;
    packed_head head;
    uint64_t widths; /* inputs, outputs and gates of all layers so far */
} packed_file;

/* the array at an offset, NULL unless it lies in the file after the tables, aligned */
static const void *array_at(const packed_file *file, uint64_t offset, ptrdiff_t bytes)
{
    if (offset < file->head.data || offset > file->head.bytes || offset % CNORM_ALIGN) return NULL;
    return (uint64_t)bytes <= file->head.bytes - offset ? file->bytes + offset : NULL;
}

enum { WIDEST = 1 << 28 }; /* units, inputs, elements of a layer */

static cnorm_status read_matrix(const packed_file *file, const packed_matrix *from, cnorm_matrix *to)
{
    if (from->gates < 1 || from->gates > 64 || from->units < 1 || from->units > WIDEST || from->cols < 1 ||
        from->cols > WIDEST || from->group > from->gates || from->levels > INT16_MAX)
        return CNORM_ERROR_LAYER;
    /* a weight takes at least one byte, and its panels at most (packed rows) (columns + 4) 4 */
    if ((uint64_t)from->gates * from->units * from->cols > file->head.bytes) return CNORM_ERROR_LAYER;
    const uint64_t rows = from->gates * ((uint64_t)from->units + CNORM_GATE_PAD) + PANEL;
    if (rows * (from->cols + (uint64_t)4) > PTRDIFF_MAX / sizeof(float)) return CNORM_ERROR_LAYER;
    *to = (cnorm_matrix){.gates = from->gates,
                         .units = from->units,
                         .cols = from->cols,
                         .group = from->group,
                         .type = (cnorm_weight_type)from->type,
                         .levels = (int)from->levels};
    const ptrdiff_t bytes = cnorm_matrix_bytes(to);
    to->panels = bytes > 0 ? array_at(file, from->panels, bytes) : NULL;
    return to->panels ? CNORM_OK : CNORM_ERROR_LAYER;
}

static cnorm_status read_vector(const packed_file *file, uint64_t offset, ptrdiff_t floats, const float **to)
{
    *to = NULL;
    if (offset == 0) return CNORM_OK;
    const float *v = floats > 0 ? array_at(file, offset, floats * (ptrdiff_t)sizeof *v) : NULL;
    if (!v) return CNORM_ERROR_LAYER;
    for (ptrdiff_t i = 0; i < floats; ++i)
        if (!isfinite(v[i])) return CNORM_ERROR_VALUE;
    *to = v;
    return CNORM_OK;
}

/* kind, options and numbers; cnorm_layers_check checks them. CNORM_ERROR_LAYER for an unknown kind */
static cnorm_status read_options(const packed_layer *from, cnorm_layer *to)
{
    if (from->n > WIDEST || from->back > PACKED_LAYERS || from->keep > 1) return CNORM_ERROR_LAYER;
    memset(to, 0, sizeof *to);
    to->kind = (cnorm_layer_kind)from->kind;
    switch (to->kind) {
    case CNORM_LAYER_LINEAR: return CNORM_OK;
    case CNORM_LAYER_NORM: to->as.norm = (cnorm_row_norm){.n = from->n, .eps = from->eps}; return CNORM_OK;
    case CNORM_LAYER_ACTIVATION:
        to->as.activation = (cnorm_elementwise){from->n, (cnorm_activation)from->activation};
        return CNORM_OK;
    case CNORM_LAYER_RESIDUAL: to->as.residual = (cnorm_addition){from->n, (int)from->back}; return CNORM_OK;
    case CNORM_LAYER_CELL:
        to->as.cell = (cnorm_cell){.kind = (cnorm_cell_kind)from->cell,
                                   .scope = (cnorm_scope)from->scope,
                                   .keep = (int)from->keep,
                                   .cell_norm = (cnorm_cell_norm)from->cell_norm,
                                   .reset = (cnorm_reset)from->reset,
                                   .activation = (cnorm_activation)from->activation,
                                   .eps = from->eps,
                                   .cell_clip = from->cell_clip,
                                   .projection_clip = from->projection_clip,
                                   .zoneout = from->zoneout};
        return CNORM_OK;
    }
    return CNORM_ERROR_LAYER;
}

static cnorm_status read_layer(packed_file *file, const packed_layer *from, cnorm_layer *to, const float **start)
{
    cnorm_matrix *matrices[PACKED_MATRICES];
    vector_field vectors[PACKED_VECTORS];
    cnorm_status status = read_options(from, to);
    if (status != CNORM_OK) return status;
    const int count = matrix_fields(to, matrices);
    for (int i = 0; i < count; ++i) {
        if (from->matrices[i].gates == 0) continue; /* an optional one */
        status = read_matrix(file, &from->matrices[i], matrices[i]);
        if (status != CNORM_OK) return status;
        file->widths +=
            from->matrices[i].gates * ((uint64_t)from->matrices[i].units + CNORM_GATE_PAD) + from->matrices[i].cols;
    }
    file->widths += from->n + (uint64_t)2 * CNORM_GATE_PAD;
    vector_fields(to, vectors);
    for (int i = 0; i < PACKED_VECTORS; ++i) {
        if (!vectors[i].at) continue;
        status = read_vector(file, from->vectors[i], vectors[i].floats, vectors[i].at);
        if (status != CNORM_OK) return status;
    }
    return read_vector(file, from->start, cnorm_layer_state_floats(to), start);
}

/* Sizes of neighbours, and directions: CNORM_BACKWARD follows CNORM_FORWARD and reads the same frames. */
static cnorm_status check_networks(const cnorm_network *networks, int count, ptrdiff_t *outputs)
{
    ptrdiff_t width = 0; /* outputs of the networks before */
    for (int i = 0; i < count; ++i) {
        const cnorm_network *network = &networks[i];
        const int cell = network->count == 1 && network->layers[0].kind == CNORM_LAYER_CELL;
        const int second = i > 0 && networks[i - 1].direction == CNORM_FORWARD;
        const cnorm_status status = cnorm_layers_check(network->layers, network->count);
        if (status != CNORM_OK) return status;
        if (network->direction < CNORM_STREAMED || network->direction > CNORM_BACKWARD) return CNORM_ERROR_LAYER;
        if (network->direction != CNORM_STREAMED && !cell) return CNORM_ERROR_LAYER;
        if (second != (network->direction == CNORM_BACKWARD)) return CNORM_ERROR_LAYER;
        if (network->direction == CNORM_FORWARD && i + 1 == count) return CNORM_ERROR_LAYER;
        const ptrdiff_t expected = second ? cnorm_layer_inputs(&networks[i - 1].layers[0]) : width;
        if (i > 0 && cnorm_layer_inputs(&network->layers[0]) != expected) return CNORM_ERROR_LAYER;
        const ptrdiff_t outputs_of_last = cnorm_layer_outputs(&network->layers[network->count - 1]);
        width = second ? width + outputs_of_last : outputs_of_last;
    }
    *outputs = width;
    return CNORM_OK;
}

/* All networks and layers of the file into memory [memory_of(head)]. */
static cnorm_status read_networks(packed_file *file, void *memory, cnorm_model *model)
{
    const int count = (int)file->head.networks;
    cnorm_layer *layer = memory, *const end = layer + file->head.layers;
    cnorm_network *networks = (cnorm_network *)(void *)end;
    const float **start = (const float **)(void *)(networks + count);
    const unsigned char *from = file->bytes + sizeof file->head,
                        *from_layer = from + (size_t)count * sizeof(packed_network);
    for (int i = 0; i < count; ++i) {
        packed_network network;
        memcpy(&network, from + (size_t)i * sizeof network, sizeof network);
        if (network.layers < 1 || network.layers > (uint32_t)(end - layer)) return CNORM_ERROR_LAYER;
        networks[i] = (cnorm_network){layer, start, (int)network.layers, (cnorm_direction)network.direction};
        for (uint32_t k = 0; k < network.layers; ++k, ++layer, ++start, from_layer += sizeof(packed_layer)) {
            packed_layer packed;
            memcpy(&packed, from_layer, sizeof packed);
            const cnorm_status status = read_layer(file, &packed, layer, start);
            if (status != CNORM_OK) return status;
        }
    }
    if (layer != end) return CNORM_ERROR_LAYER;
    /* so that the bytes of state and scratch fit ptrdiff_t, also where that has 32 bits */
    if (file->widths > PTRDIFF_MAX / 4096) return CNORM_ERROR_SIZE;
    model->networks = networks;
    model->count = count;
    model->inputs = cnorm_layer_inputs(&networks[0].layers[0]);
    return check_networks(networks, count, &model->outputs);
}

cnorm_status cnorm_model_open(const void *bytes, ptrdiff_t file_bytes, void *memory, ptrdiff_t memory_bytes,
                              cnorm_model *model)
{
    packed_file file = {.bytes = bytes};
    cnorm_status status = read_head(bytes, file_bytes, &file.head);
    if (status != CNORM_OK) return status;
    if (!memory || !model) return CNORM_ERROR_NULL;
    if ((uintptr_t)bytes % CNORM_ALIGN || (uintptr_t)memory % _Alignof(cnorm_layer)) return CNORM_ERROR_ALIGN;
    if (memory_bytes < memory_of(&file.head)) return CNORM_ERROR_SIZE;
    const ptrdiff_t checked = (ptrdiff_t)offsetof(packed_head, version);
    if (crc32_of(file.bytes + checked, (ptrdiff_t)file.head.data - checked) != file.head.head_crc)
        return CNORM_ERROR_DAMAGED;
    cnorm_model opened = {.identity = file.bytes + offsetof(packed_head, identity),
                          .configuration = (const char *)file.bytes + table_bytes(&file.head),
                          .configuration_bytes = (ptrdiff_t)file.head.configuration_bytes,
                          .file = bytes,
                          .file_bytes = file_bytes};
    status = read_networks(&file, memory, &opened);
    if (status == CNORM_OK) *model = opened;
    return status;
}

cnorm_status cnorm_model_verify(const cnorm_model *model)
{
    packed_head head;
    if (!model) return CNORM_ERROR_NULL;
    const cnorm_status status = read_head(model->file, model->file_bytes, &head);
    if (status != CNORM_OK) return status;
    const unsigned char *data = (const unsigned char *)model->file + head.data;
    return crc32_of(data, (ptrdiff_t)(head.bytes - head.data)) == head.data_crc ? CNORM_OK : CNORM_ERROR_DAMAGED;
}

/* ---- writing -------------------------------------------------------------------------------------------------- */

/* The offset of a copy of an array, 0 for none; while `to` has no memory only its bytes are counted. */
static uint64_t put(layout *to, const void *from, ptrdiff_t bytes)
{
    const ptrdiff_t offset = to->used, aligned = (bytes + CNORM_ALIGN - 1) / CNORM_ALIGN * CNORM_ALIGN;
    if (!from || bytes == 0) return 0;
    void *copy = layout_take(to, aligned);
    if (copy) memcpy(copy, from, (size_t)bytes);
    return (uint64_t)offset;
}

static packed_layer options_of(const cnorm_layer *layer)
{
    packed_layer to;
    memset(&to, 0, sizeof to);
    to.kind = (uint32_t)layer->kind;
    if (layer->kind == CNORM_LAYER_NORM) {
        to.n = (uint32_t)layer->as.norm.n, to.eps = layer->as.norm.eps;
    } else if (layer->kind == CNORM_LAYER_ACTIVATION) {
        to.n = (uint32_t)layer->as.activation.n, to.activation = (uint32_t)layer->as.activation.f;
    } else if (layer->kind == CNORM_LAYER_RESIDUAL) {
        to.n = (uint32_t)layer->as.residual.n, to.back = (uint32_t)layer->as.residual.back;
    } else if (layer->kind == CNORM_LAYER_CELL) {
        const cnorm_cell *cell = &layer->as.cell;
        to.cell = (uint32_t)cell->kind, to.scope = (uint32_t)cell->scope, to.cell_norm = (uint32_t)cell->cell_norm;
        to.reset = (uint32_t)cell->reset, to.activation = (uint32_t)cell->activation, to.keep = cell->keep != 0;
        to.eps = cell->eps, to.cell_clip = cell->cell_clip;
        to.projection_clip = cell->projection_clip, to.zoneout = cell->zoneout;
    }
    return to;
}

static void put_layer(layout *data, cnorm_layer layer, const float *start, unsigned char *at)
{
    cnorm_matrix *matrices[PACKED_MATRICES];
    vector_field vectors[PACKED_VECTORS];
    packed_layer to = options_of(&layer);
    const int count = matrix_fields(&layer, matrices);
    for (int i = 0; i < count; ++i) {
        const cnorm_matrix *m = matrices[i];
        if (!m->panels) continue;
        to.matrices[i] = (packed_matrix){(uint32_t)m->type,
                                         (uint32_t)m->gates,
                                         (uint32_t)m->units,
                                         (uint32_t)m->cols,
                                         (uint32_t)m->group,
                                         (uint32_t)m->levels,
                                         put(data, m->panels, cnorm_matrix_bytes(m))};
    }
    vector_fields(&layer, vectors);
    for (int i = 0; i < PACKED_VECTORS; ++i)
        if (vectors[i].at) to.vectors[i] = put(data, *vectors[i].at, vectors[i].floats * (ptrdiff_t)sizeof(float));
    to.start = put(data, start, cnorm_layer_state_floats(&layer) * (ptrdiff_t)sizeof(float));
    if (at) memcpy(at, &to, sizeof to);
}

/* The file in memory, or with memory NULL only its size. */
static ptrdiff_t lay_out(const cnorm_model *model, unsigned char *memory)
{
    packed_head head;
    memset(&head, 0, sizeof head);
    head.networks = (uint32_t)model->count;
    for (int i = 0; i < model->count; ++i) head.layers += (uint32_t)model->networks[i].count;
    head.configuration_bytes = (uint32_t)model->configuration_bytes;
    const uint64_t tables = table_bytes(&head) + head.configuration_bytes;
    head.data = (tables + CNORM_ALIGN - 1) / CNORM_ALIGN * CNORM_ALIGN;
    layout data = {(char *)memory, (ptrdiff_t)head.data};
    unsigned char *network_at = memory ? memory + sizeof head : NULL;
    unsigned char *layer_at = memory ? network_at + head.networks * sizeof(packed_network) : NULL;
    for (int i = 0; i < model->count; ++i) {
        const cnorm_network *network = &model->networks[i];
        const packed_network to = {(uint32_t)network->count, (uint32_t)network->direction};
        if (memory) memcpy(network_at + (size_t)i * sizeof to, &to, sizeof to);
        for (int k = 0; k < network->count; ++k) {
            put_layer(&data, network->layers[k], network->starts ? network->starts[k] : NULL, layer_at);
            if (layer_at) layer_at += sizeof(packed_layer);
        }
    }
    if (!memory) return data.used;
    if (model->configuration_bytes) memcpy(layer_at, model->configuration, (size_t)model->configuration_bytes);
    memcpy(head.magic, packed_magic, sizeof packed_magic);
    memcpy(head.identity, model->identity, CNORM_IDENTITY);
    head.version = PACKED_VERSION, head.order = PACKED_ORDER, head.bytes = (uint64_t)data.used;
    head.data_crc = crc32_of(memory + head.data, (ptrdiff_t)(head.bytes - head.data));
    memcpy(memory, &head, sizeof head);
    const ptrdiff_t checked = (ptrdiff_t)offsetof(packed_head, version);
    head.head_crc = crc32_of(memory + checked, (ptrdiff_t)head.data - checked);
    memcpy(memory, &head, sizeof head);
    return data.used;
}

static cnorm_status check_model(const cnorm_model *model)
{
    ptrdiff_t outputs;
    int64_t layers = 0;
    if (!model || !model->networks || !model->identity) return CNORM_ERROR_NULL;
    if (model->configuration_bytes > 0 && !model->configuration) return CNORM_ERROR_NULL;
    if (model->count < 1 || model->configuration_bytes < 0 || model->configuration_bytes > WIDEST)
        return CNORM_ERROR_SIZE;
    for (int i = 0; i < model->count; ++i) {
        if (!model->networks[i].layers) return CNORM_ERROR_NULL;
        if (model->networks[i].count < 1) return CNORM_ERROR_SIZE;
        layers += model->networks[i].count;
    }
    return layers > PACKED_LAYERS ? CNORM_ERROR_SIZE : check_networks(model->networks, model->count, &outputs);
}

ptrdiff_t cnorm_model_file_bytes(const cnorm_model *model)
{
    return check_model(model) == CNORM_OK ? lay_out(model, NULL) : 0;
}

cnorm_status cnorm_model_write(const cnorm_model *model, void *file)
{
    const cnorm_status status = check_model(model);
    if (status != CNORM_OK) return status;
    if (!file) return CNORM_ERROR_NULL;
    memset(file, 0, (size_t)lay_out(model, NULL));
    (void)lay_out(model, file);
    return CNORM_OK;
}
