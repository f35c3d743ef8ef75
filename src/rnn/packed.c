/* Opening packed models. Everything that is read from a file is copied once and checked before it is
 * used. */
#include "packed.h"

#include <math.h>
#include <string.h>

#include "../crc32.h"
#include "layers.h"

/* ---- checks of a model ---------------------------------------------------------------------------------------- */

/* Sizes of neighbours, and directions: CNORM_BACKWARD follows CNORM_FORWARD and reads the same frames. `outputs`: of
 * the networks before; the name of what is at fault, or NULL. */
static const char *network_fault(const cnorm_network *networks, int i, int count, ptrdiff_t outputs)
{
    const cnorm_network *network = &networks[i];
    const int cell = network->count == 1 && cnorm_layer_state_floats(&network->layers[0]) > 0;
    const int second = i > 0 && networks[i - 1].direction == CNORM_FORWARD;
    if (network->direction < CNORM_STREAMED || network->direction > CNORM_BACKWARD) return "direction";
    if (network->direction != CNORM_STREAMED && !cell) return "direction";
    if (second != (network->direction == CNORM_BACKWARD)) return "direction";
    if (network->direction == CNORM_FORWARD && i + 1 == count) return "direction";
    const ptrdiff_t expected = second ? cnorm_layer_inputs(&networks[i - 1].layers[0]) : outputs;
    return i > 0 && cnorm_layer_inputs(&network->layers[0]) != expected ? "inputs" : NULL;
}

/* Whether a step's state and scratch fit CNORM_MODEL_FLOATS and 4 times the file. */
static int affordable(const cnorm_network *network, uint64_t file_bytes)
{
    const ptrdiff_t floats =
        cnorm_scratch_floats(network->layers, network->count, 1) + cnorm_state_floats(network->layers, network->count);
    return (uint64_t)floats <= CNORM_MODEL_FLOATS + file_bytes;
}

cnorm_status cnorm_packed_check_networks(const cnorm_network *networks, int count, ptrdiff_t *outputs,
                                         cnorm_fault *fault)
{
    ptrdiff_t width = 0; /* outputs of the networks before */
    for (int i = 0; i < count; ++i) {
        const cnorm_network *network = &networks[i];
        const cnorm_status status = cnorm_layers_check(network->layers, network->count, fault);
        fault->network = i;
        if (status != CNORM_OK) return status;
        fault->field = network_fault(networks, i, count, width);
        if (fault->field) return CNORM_ERROR_LAYER;
        const ptrdiff_t outputs_of_last = cnorm_layer_outputs(&network->layers[network->count - 1]);
        width = network->direction == CNORM_BACKWARD ? width + outputs_of_last : outputs_of_last;
    }
    *outputs = width;
    *fault = (cnorm_fault){-1, -1, NULL};
    return CNORM_OK;
}

/* ---- reading -------------------------------------------------------------------------------------------------- */

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
    if (packed_table_bytes(head) + head->configuration_bytes > head->data) return CNORM_ERROR_DAMAGED;
    return head->zero[0] || head->zero[1] ? CNORM_ERROR_DAMAGED : CNORM_OK;
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
    const unsigned char *bytes, *record, *records_end; /* record: the next one */
    packed_head head;
    uint64_t widths; /* inputs, outputs and gates of all layers so far */
    cnorm_fault fault;
} packed_file;

/* the array at an offset, NULL unless it lies in the file after the tables, aligned */
static const void *array_at(const packed_file *file, uint64_t offset, ptrdiff_t bytes)
{
    if (offset < file->head.data || offset > file->head.bytes || offset % CNORM_ALIGN) return NULL;
    return (uint64_t)bytes <= file->head.bytes - offset ? file->bytes + offset : NULL;
}

static cnorm_status read_matrix(packed_file *file, const packed_field *from, cnorm_matrix *to)
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
    to->panels = bytes > 0 ? array_at(file, from->at, bytes) : NULL;
    file->widths += from->gates * ((uint64_t)from->units + CNORM_GATE_PAD) + from->cols;
    return to->panels ? CNORM_OK : CNORM_ERROR_LAYER;
}

static cnorm_status read_vector(const packed_file *file, uint64_t offset, ptrdiff_t floats, const float **to)
{
    const float *v = floats > 0 ? array_at(file, offset, floats * (ptrdiff_t)sizeof *v) : NULL;
    if (!v) return CNORM_ERROR_LAYER;
    for (ptrdiff_t i = 0; i < floats; ++i)
        if (!isfinite(v[i])) return CNORM_ERROR_VALUE;
    *to = v;
    return CNORM_OK;
}

/* An option; false if it is out of any range. cnorm_layers_check knows the rest. */
static int read_option(packed_file *file, const layer_option *option, uint32_t bits, cnorm_layer *to)
{
    float number;
    memcpy(&number, &bits, sizeof number);
    if (option->type == OPTION_SIZE) file->widths += bits;
    if (option->type != OPTION_FLOAT && bits > WIDEST) return 0;
    cnorm_layer_set_number(to, option, option->type == OPTION_FLOAT ? (double)number : (double)bits);
    return 1;
}

/* The options of a record, from `at` on. A later version may have more, whose 0 is today's meaning. */
static cnorm_status read_options(packed_file *file, const layer_ops *ops, const packed_layer *from,
                                 const unsigned char *at, cnorm_layer *to)
{
    const layer_option *option = ops->options;
    for (uint32_t i = 0; i < from->options; ++i, at += sizeof(uint32_t)) {
        uint32_t bits;
        memcpy(&bits, at, sizeof bits);
        file->fault.field = option->name;
        if (!option->name && bits) return CNORM_ERROR_LAYER;
        if (option->name && !read_option(file, option++, bits, to)) return CNORM_ERROR_LAYER;
    }
    return CNORM_OK;
}

static cnorm_status read_field(packed_file *file, const layer_ops *ops, const packed_field *from, cnorm_layer *to,
                               const float **start)
{
    const layer_field *field = ops->fields;
    if (from->field == PACKED_START) {
        file->fault.field = "start";
        return read_vector(file, from->at, cnorm_layer_state_floats(to), start);
    }
    for (uint32_t i = 0; field->name && i < from->field; ++i) ++field;
    file->fault.field = field->name;
    if (!field->name || from->zero) return CNORM_ERROR_LAYER;
    if (!field->shape) return read_matrix(file, from, field_matrix(to, field));
    const vector_shape shape = field->shape(to);
    if (shape.floats == 0) return CNORM_OK; /* the options use no such vector */
    const int described = from->gates == (uint64_t)shape.gates && from->units == (uint64_t)shape.units;
    if (from->type != PACKED_VECTOR || !described) return CNORM_ERROR_LAYER;
    return read_vector(file, from->at, shape.floats, field_vector(to, field));
}

/* A layer from a record that has at most `most` bytes. */
static cnorm_status read_record(packed_file *file, const unsigned char *at, uint64_t most, cnorm_layer *to,
                                const float **start)
{
    packed_layer from;
    memset(to, 0, sizeof *to);
    *start = NULL;
    memcpy(&from, at, sizeof from);
    const uint64_t options = packed_options_bytes(from.options), fields = from.fields * (uint64_t)sizeof(packed_field);
    if (from.bytes > most || sizeof from + options + fields != from.bytes) return CNORM_ERROR_LAYER;
    if (from.zero[0] || from.zero[1]) return CNORM_ERROR_LAYER;
    to->kind = (cnorm_layer_kind)from.kind;
    const layer_ops *ops = cnorm_layer_ops_of(to->kind);
    file->fault.field = "kind";
    if (!ops) return CNORM_ERROR_LAYER;
    file->widths += (uint64_t)2 * CNORM_GATE_PAD;
    cnorm_status status = read_options(file, ops, &from, at + sizeof from, to);
    if (status != CNORM_OK) return status;
    at += sizeof from + options;
    for (uint32_t i = 0, last = 0; i < from.fields; ++i, at += sizeof(packed_field)) {
        packed_field field;
        memcpy(&field, at, sizeof field);
        file->fault.field = NULL;
        if (i > 0 && field.field <= last) return CNORM_ERROR_LAYER;
        status = read_field(file, ops, &field, to, start);
        if (status != CNORM_OK) return status;
        last = field.field;
    }
    return CNORM_OK;
}

/* The next layer of the file. */
static cnorm_status read_layer(packed_file *file, cnorm_layer *to, const float **start)
{
    const unsigned char *at = file->record;
    const uint64_t most = (uint64_t)(file->records_end - at);
    packed_layer head;
    if (most < sizeof head) return CNORM_ERROR_LAYER;
    memcpy(&head, at, sizeof head);
    const cnorm_status status = read_record(file, at, most, to, start);
    if (status == CNORM_OK) file->record += head.bytes;
    return status;
}

/* All networks and layers of the file into memory [memory_of(head)]. */
static cnorm_status read_networks(packed_file *file, void *memory, cnorm_model *model)
{
    const int count = (int)file->head.networks;
    cnorm_layer *layer = memory, *const end = layer + file->head.layers;
    cnorm_network *networks = (cnorm_network *)(void *)end;
    const float **start = (const float **)(void *)(networks + count);
    const unsigned char *from = file->bytes + sizeof file->head;
    file->record = from + (size_t)count * sizeof(packed_network);
    file->records_end = file->bytes + packed_table_bytes(&file->head);
    for (int i = 0; i < count; ++i) {
        packed_network network;
        memcpy(&network, from + (size_t)i * sizeof network, sizeof network);
        file->fault = (cnorm_fault){i, -1, NULL};
        if (network.layers < 1 || network.layers > (uint32_t)(end - layer)) return CNORM_ERROR_LAYER;
        networks[i] = (cnorm_network){layer, start, (int)network.layers, (cnorm_direction)network.direction};
        for (int k = 0; k < networks[i].count; ++k, ++layer, ++start) {
            file->fault = (cnorm_fault){i, k, NULL};
            const cnorm_status status = read_layer(file, layer, start);
            if (status != CNORM_OK) return status;
        }
    }
    file->fault = (cnorm_fault){-1, -1, NULL};
    if (layer != end || file->record != file->records_end) return CNORM_ERROR_LAYER;
    /* so that the bytes of state and scratch fit ptrdiff_t, also where that has 32 bits */
    if (file->widths > PTRDIFF_MAX / 4096) return CNORM_ERROR_SIZE;
    model->networks = networks;
    model->count = count;
    model->inputs = cnorm_layer_inputs(&networks[0].layers[0]);
    return cnorm_packed_check_networks(networks, count, &model->outputs, &file->fault);
}

static cnorm_status open_file(packed_file *file, ptrdiff_t file_bytes, void *memory, ptrdiff_t memory_bytes,
                              cnorm_model *model)
{
    cnorm_status status = read_head(file->bytes, file_bytes, &file->head);
    if (status != CNORM_OK) return status;
    if (!memory || !model) return CNORM_ERROR_NULL;
    if ((uintptr_t)file->bytes % CNORM_ALIGN || (uintptr_t)memory % _Alignof(cnorm_layer)) return CNORM_ERROR_ALIGN;
    if (memory_bytes < memory_of(&file->head)) return CNORM_ERROR_SIZE;
    const ptrdiff_t checked = (ptrdiff_t)offsetof(packed_head, version);
    if (crc32_of(file->bytes + checked, (ptrdiff_t)file->head.data - checked) != file->head.head_crc)
        return CNORM_ERROR_DAMAGED;
    cnorm_model opened = {.identity = file->bytes + offsetof(packed_head, identity),
                          .configuration = (const char *)file->bytes + packed_table_bytes(&file->head),
                          .configuration_bytes = (ptrdiff_t)file->head.configuration_bytes,
                          .file = file->bytes,
                          .file_bytes = file_bytes};
    status = read_networks(file, memory, &opened);
    for (int i = 0; status == CNORM_OK && i < opened.count; ++i) {
        if (affordable(&opened.networks[i], file->head.bytes)) continue;
        file->fault.network = i;
        status = CNORM_ERROR_SIZE;
    }
    if (status == CNORM_OK) *model = opened;
    return status;
}

cnorm_status cnorm_model_open(const void *bytes, ptrdiff_t file_bytes, void *memory, ptrdiff_t memory_bytes,
                              cnorm_model *model, cnorm_fault *fault)
{
    packed_file file = {.bytes = bytes, .fault = {-1, -1, NULL}};
    const cnorm_status status = open_file(&file, file_bytes, memory, memory_bytes, model);
    if (fault) *fault = file.fault;
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
