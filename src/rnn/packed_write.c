/* Writing packed models. */
#include "packed.h"

#include <string.h>

#include "../crc32.h"
#include "layers.h"

/* The offset of a copy of an array, 0 for none; while `to` has no memory only its bytes are counted. */
static uint64_t put(layout *to, const void *from, ptrdiff_t bytes)
{
    const ptrdiff_t offset = to->used, aligned = (bytes + CNORM_ALIGN - 1) / CNORM_ALIGN * CNORM_ALIGN;
    if (!from || bytes == 0) return 0;
    void *copy = layout_take(to, aligned);
    if (copy) memcpy(copy, from, (size_t)bytes);
    return (uint64_t)offset;
}

/* The record of a layer at `at`, and its arrays in `data`; while `at` is NULL only their sizes. */
typedef struct record_writer {
    unsigned char *at;
    layout *data;
    packed_layer head;
} record_writer;

static void put_bytes(record_writer *to, const void *from, size_t bytes)
{
    if (to->at) memcpy(to->at + to->head.bytes, from, bytes);
    to->head.bytes += (uint32_t)bytes;
}

static void put_options(record_writer *to, const cnorm_layer *layer, const layer_ops *ops)
{
    for (const layer_option *option = ops->options; option->name; ++option, ++to->head.options) {
        const double value = cnorm_layer_number(layer, option);
        const float number = (float)value;
        uint32_t bits = option->type == OPTION_FLOAT ? 0 : (uint32_t)value;
        if (option->type == OPTION_FLOAT) memcpy(&bits, &number, sizeof bits);
        put_bytes(to, &bits, sizeof bits);
    }
    const uint64_t zero = 0;
    put_bytes(to, &zero, packed_options_bytes(to->head.options) - 4 * (size_t)to->head.options);
}

static void put_field(record_writer *to, uint32_t number, vector_shape shape, const float *v)
{
    if (!v || shape.floats == 0) return;
    const packed_field field = {.field = number,
                                .type = PACKED_VECTOR,
                                .gates = (uint32_t)shape.gates,
                                .units = (uint32_t)shape.units,
                                .at = put(to->data, v, shape.floats * (ptrdiff_t)sizeof *v)};
    put_bytes(to, &field, sizeof field);
    to->head.fields += 1;
}

static void put_matrix(record_writer *to, uint32_t number, const cnorm_matrix *m)
{
    if (!m->panels) return;
    const packed_field field = {.field = number,
                                .type = (uint32_t)m->type,
                                .gates = (uint32_t)m->gates,
                                .units = (uint32_t)m->units,
                                .cols = (uint32_t)m->cols,
                                .group = (uint32_t)m->group,
                                .levels = (uint32_t)m->levels,
                                .at = put(to->data, m->panels, cnorm_matrix_bytes(m))};
    put_bytes(to, &field, sizeof field);
    to->head.fields += 1;
}

static ptrdiff_t put_layer(layout *data, cnorm_layer layer, const float *start, unsigned char *at)
{
    const layer_ops *ops = cnorm_layer_ops_of(layer.kind);
    record_writer to = {at, data, {.kind = (uint32_t)layer.kind, .bytes = sizeof(packed_layer)}};
    put_options(&to, &layer, ops);
    for (uint32_t i = 0; ops->fields[i].name; ++i) {
        const layer_field *field = &ops->fields[i];
        if (field->shape) put_field(&to, i, field->shape(&layer), *field_vector(&layer, field));
        else put_matrix(&to, i, field_matrix(&layer, field));
    }
    const ptrdiff_t state = cnorm_layer_state_floats(&layer);
    put_field(&to, PACKED_START, (vector_shape){0, state, state}, start);
    if (at) memcpy(at, &to.head, sizeof to.head);
    return (ptrdiff_t)to.head.bytes;
}

/* The records of all layers at `at`, and their arrays in `data`; returns the bytes of the records. */
static ptrdiff_t put_layers(const cnorm_model *model, layout *data, unsigned char *at)
{
    ptrdiff_t used = 0;
    for (int i = 0; i < model->count; ++i) {
        const cnorm_network *network = &model->networks[i];
        for (int k = 0; k < network->count; ++k)
            used +=
                put_layer(data, network->layers[k], network->starts ? network->starts[k] : NULL, at ? at + used : NULL);
    }
    return used;
}

/* The file in memory, or with memory NULL only its size. */
static ptrdiff_t lay_out(const cnorm_model *model, unsigned char *memory)
{
    packed_head head;
    layout counted = {NULL, 0};
    memset(&head, 0, sizeof head);
    head.networks = (uint32_t)model->count;
    for (int i = 0; i < model->count; ++i) head.layers += (uint32_t)model->networks[i].count;
    head.configuration_bytes = (uint32_t)model->configuration_bytes;
    head.version = PACKED_VERSION, head.order = PACKED_ORDER;
    head.record_bytes = (uint32_t)put_layers(model, &counted, NULL);
    head.data = (packed_table_bytes(&head) + head.configuration_bytes + CNORM_ALIGN - 1) / CNORM_ALIGN * CNORM_ALIGN;
    head.bytes = head.data + (uint64_t)counted.used;
    if (!memory) return (ptrdiff_t)head.bytes;
    unsigned char *at = memory + sizeof head;
    for (int i = 0; i < model->count; ++i, at += sizeof(packed_network)) {
        const packed_network to = {(uint32_t)model->networks[i].count, (uint32_t)model->networks[i].direction};
        memcpy(at, &to, sizeof to);
    }
    layout data = {(char *)memory, (ptrdiff_t)head.data};
    (void)put_layers(model, &data, at);
    if (model->configuration_bytes)
        memcpy(memory + packed_table_bytes(&head), model->configuration, (size_t)model->configuration_bytes);
    memcpy(head.magic, packed_magic, sizeof packed_magic);
    memcpy(head.identity, model->identity, CNORM_IDENTITY);
    head.data_crc = crc32_of(memory + head.data, (ptrdiff_t)(head.bytes - head.data));
    memcpy(memory, &head, sizeof head);
    const ptrdiff_t checked = (ptrdiff_t)offsetof(packed_head, version);
    head.head_crc = crc32_of(memory + checked, (ptrdiff_t)head.data - checked);
    memcpy(memory, &head, sizeof head);
    return (ptrdiff_t)head.bytes;
}

static cnorm_status check_model(const cnorm_model *model)
{
    ptrdiff_t outputs;
    int64_t layers = 0;
    cnorm_fault fault;
    if (!model || !model->networks || !model->identity) return CNORM_ERROR_NULL;
    if (model->configuration_bytes > 0 && !model->configuration) return CNORM_ERROR_NULL;
    if (model->count < 1 || model->configuration_bytes < 0 || model->configuration_bytes > WIDEST)
        return CNORM_ERROR_SIZE;
    for (int i = 0; i < model->count; ++i) {
        if (!model->networks[i].layers) return CNORM_ERROR_NULL;
        if (model->networks[i].count < 1) return CNORM_ERROR_SIZE;
        layers += model->networks[i].count;
    }
    return layers > PACKED_LAYERS ? CNORM_ERROR_SIZE
                                  : cnorm_packed_check_networks(model->networks, model->count, &outputs, &fault);
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
