/* Models and streams of cnorm_model.h: memory, runs, and the bytes of a saved stream. */
#include "cnorm_model.h"

#include <math.h>
#include <string.h>

#include "../crc32.h"
#include "layers.h"

/* The state that a network starts from. Padding is zero whatever a file says. */
static void set_start(const cnorm_network *network, float *state)
{
    memset(state, 0, (size_t)cnorm_state_floats(network->layers, network->count) * sizeof *state);
    for (int i = 0; i < network->count; ++i) {
        const cnorm_layer *layer = &network->layers[i];
        const layer_ops *ops = cnorm_layer_ops_of(layer->kind);
        const float *start = network->starts ? network->starts[i] : NULL;
        for (int k = 0; ops && ops->state && k < LAYER_STATES; ++k) {
            const ptrdiff_t floats = ops->state(layer, k), padded = padded_units(floats);
            if (start) memcpy(state, start, (size_t)floats * sizeof *state), start += padded;
            state += padded;
        }
    }
}

/* a multiple of CNORM_ALIGN bytes, not 0, which stands for an error */
static ptrdiff_t aligned_floats(ptrdiff_t floats) { return floats > 0 ? (floats + 15) / 16 * 16 : 16; }
static int misaligned(const void *memory) { return (uintptr_t)memory % CNORM_ALIGN != 0; }

/* ---- whole sequences ------------------------------------------------------------------------------------------ */

static ptrdiff_t outputs_of(const cnorm_network *network)
{
    return cnorm_layer_outputs(&network->layers[network->count - 1]);
}

/* state and scratch of the network that needs most; the frames between two networks, of which two buffers are needed */
typedef struct run_sizes {
    ptrdiff_t state, scratch, between;
} run_sizes;

static run_sizes sizes_of(const cnorm_model *model)
{
    run_sizes sizes = {0, 0, 0};
    for (int i = 0; i < model->count; ++i) {
        const cnorm_network *network = &model->networks[i];
        sizes.state = larger(sizes.state, aligned_floats(cnorm_state_floats(network->layers, network->count)));
        sizes.scratch =
            larger(sizes.scratch, aligned_floats(cnorm_scratch_floats(network->layers, network->count, PTRDIFF_MAX)));
        const int bidirectional = network->direction == CNORM_FORWARD;
        const ptrdiff_t width = outputs_of(network) + (bidirectional ? outputs_of(network + 1) : 0);
        if (i + 1 + bidirectional < model->count) sizes.between = larger(sizes.between, width);
    }
    return sizes;
}

ptrdiff_t cnorm_model_floats(const cnorm_model *model, ptrdiff_t steps)
{
    if (!model || steps < 0) return 0;
    const run_sizes sizes = sizes_of(model);
    const ptrdiff_t fixed = sizes.state + sizes.scratch, most = (PTRDIFF_MAX / (ptrdiff_t)sizeof(float) - fixed) / 2;
    if (sizes.between > 0 && steps > most / sizes.between) return 0;
    return fixed + 2 * steps * sizes.between;
}

/* frames whose inputs and outputs fit ptrdiff_t in bytes */
static ptrdiff_t most_frames(const cnorm_model *model)
{
    return PTRDIFF_MAX / (ptrdiff_t)sizeof(float) / larger(larger(model->inputs, model->outputs), 1);
}

typedef struct frame_rows {
    float *at;
    ptrdiff_t width;
} frame_rows;

/* One network over x, from frame `begin` on in steps of `way`, into columns of y that begin at `column`. */
static cnorm_status run_network(const cnorm_network *network, ptrdiff_t steps, const float *x, ptrdiff_t inputs,
                                frame_rows y, ptrdiff_t column, float *memory)
{
    const int back = network->direction == CNORM_BACKWARD;
    const ptrdiff_t last = back ? steps - 1 : 0, way = back ? -1 : 1;
    float *scratch = memory + aligned_floats(cnorm_state_floats(network->layers, network->count));
    set_start(network, memory);
    return cnorm_run(&(cnorm_frames){.layers = network->layers,
                                     .count = network->count,
                                     .frames = steps,
                                     .x = x + last * inputs,
                                     .x_stride = way * inputs,
                                     .state = memory,
                                     .scratch = scratch,
                                     .rows = PTRDIFF_MAX,
                                     .y = y.at + last * y.width + column,
                                     .y_stride = way * y.width});
}

cnorm_status cnorm_model_run(const cnorm_model *model, ptrdiff_t steps, const float *x, float *y, float *memory)
{
    if (!model) return CNORM_ERROR_NULL;
    if (steps < 0 || steps > most_frames(model)) return CNORM_ERROR_SIZE;
    if (steps > 0 && cnorm_model_floats(model, steps) == 0) return CNORM_ERROR_SIZE;
    if (steps == 0) return CNORM_OK;
    if (!x || !y || !memory) return CNORM_ERROR_NULL;
    if (misaligned(memory)) return CNORM_ERROR_ALIGN;
    const run_sizes sizes = sizes_of(model);
    float *output = memory + sizes.state + sizes.scratch, *spare = output + steps * sizes.between;
    ptrdiff_t inputs = model->inputs;
    for (int i = 0; i < model->count; ++i) {
        const cnorm_network *network = &model->networks[i];
        const int bidirectional = network->direction == CNORM_FORWARD;
        const ptrdiff_t column = outputs_of(network), width = column + (bidirectional ? outputs_of(network + 1) : 0);
        const frame_rows to = {i + 1 + bidirectional == model->count ? y : output, width};
        cnorm_status status = run_network(network, steps, x, inputs, to, 0, memory);
        if (status == CNORM_OK && bidirectional)
            status = run_network(network + 1, steps, x, inputs, to, column, memory);
        if (status != CNORM_OK) return status;
        i += bidirectional;
        x = to.at, inputs = width, output = spare, spare = to.at;
    }
    return CNORM_OK;
}

/* ---- streams -------------------------------------------------------------------------------------------------- */

/* false for a stream that cnorm_stream_start has not set, such as a zeroed one */
static int started(const cnorm_stream *stream) { return stream && stream->model; }

static int streamed(const cnorm_model *model)
{
    return model->count == 1 && model->networks[0].direction == CNORM_STREAMED;
}

ptrdiff_t cnorm_stream_floats(const cnorm_model *model, ptrdiff_t rows)
{
    if (!model || !streamed(model) || rows < 1) return 0;
    const cnorm_network *network = &model->networks[0];
    return aligned_floats(cnorm_state_floats(network->layers, network->count)) +
           cnorm_scratch_floats(network->layers, network->count, rows);
}

cnorm_status cnorm_stream_start(cnorm_stream *stream, const cnorm_model *model, float *memory, ptrdiff_t rows)
{
    if (!stream || !model || !memory) return CNORM_ERROR_NULL;
    if (rows < 1) return CNORM_ERROR_SIZE;
    if (misaligned(memory)) return CNORM_ERROR_ALIGN;
    if (!streamed(model)) return CNORM_ERROR_LAYER;
    const cnorm_network *network = &model->networks[0];
    const cnorm_status status = cnorm_layers_check(network->layers, network->count, NULL);
    if (status != CNORM_OK) return status;
    *stream = (cnorm_stream){.model = model,
                             .state = memory,
                             .rows = rows,
                             .scratch = memory + aligned_floats(cnorm_state_floats(network->layers, network->count))};
    cnorm_stream_reset(stream);
    return CNORM_OK;
}

void cnorm_stream_reset(cnorm_stream *stream)
{
    if (!started(stream)) return;
    set_start(&stream->model->networks[0], stream->state);
    stream->frames = 0;
}

cnorm_status cnorm_stream_run(cnorm_stream *stream, ptrdiff_t steps, const float *x, float *y)
{
    if (!started(stream)) return CNORM_ERROR_NULL;
    const cnorm_model *model = stream->model;
    if (steps > 1 && steps > most_frames(model)) return CNORM_ERROR_SIZE; /* two divisions */
    const cnorm_status status = cnorm_run(&(cnorm_frames){.layers = model->networks[0].layers,
                                                          .count = model->networks[0].count,
                                                          .frames = steps,
                                                          .x = x,
                                                          .state = stream->state,
                                                          .scratch = stream->scratch,
                                                          .rows = stream->rows,
                                                          .y = y,
                                                          .checked = 1});
    if (status == CNORM_OK) stream->frames += (uint64_t)steps;
    return status;
}

/* ---- saved streams, format 3 of docs/cells.md, little-endian ---------------------------------------------------- */

enum { SAVED_FRAMES = 48, SAVED_ARITHMETIC = 56, SAVED_STATE = 60 };
static const char saved_magic[] = "cnorm stream 3\n"; /* 16 bytes with the zero */

static void put_little(unsigned char *to, int bytes, uint64_t value)
{
    for (int i = 0; i < bytes; ++i) to[i] = (unsigned char)(value >> 8 * i);
}

static uint64_t get_little(const unsigned char *from, int bytes)
{
    uint64_t value = 0;
    for (int i = 0; i < bytes; ++i) value |= (uint64_t)from[i] << 8 * i;
    return value;
}

/* The arrays of a state without their padding: calls f for each with the place in the state and in the saved bytes;
 * returns the bytes of all. */
typedef int (*array_function)(void *state, void *saved, ptrdiff_t floats);

static ptrdiff_t each_array(const cnorm_model *model, float *state, unsigned char *saved, array_function f, int *held)
{
    ptrdiff_t offset = 0, used = 0;
    for (int i = 0; i < model->networks[0].count; ++i) {
        const cnorm_layer *layer = &model->networks[0].layers[i];
        const layer_ops *ops = cnorm_layer_ops_of(layer->kind);
        for (int k = 0; ops->state && k < LAYER_STATES; ++k) {
            const ptrdiff_t floats = ops->state(layer, k);
            if (f) *held &= f(state ? state + offset : NULL, saved ? saved + used : NULL, floats);
            offset += padded_units(floats);
            used += 4 * floats;
        }
    }
    return used;
}

static int save_array(void *state, void *saved, ptrdiff_t floats)
{
    for (ptrdiff_t i = 0; i < floats; ++i) {
        uint32_t bits;
        memcpy(&bits, (float *)state + i, sizeof bits);
        put_little((unsigned char *)saved + 4 * i, 4, bits);
    }
    return 1;
}

static int finite_array(void *state, void *saved, ptrdiff_t floats)
{
    (void)state;
    for (ptrdiff_t i = 0; i < floats; ++i)
        if ((get_little((unsigned char *)saved + 4 * i, 4) & 0x7f800000u) == 0x7f800000u) return 0;
    return 1;
}

static int restore_array(void *state, void *saved, ptrdiff_t floats)
{
    for (ptrdiff_t i = 0; i < floats; ++i) {
        const uint32_t bits = (uint32_t)get_little((unsigned char *)saved + 4 * i, 4);
        memcpy((float *)state + i, &bits, sizeof bits);
    }
    return 1;
}

static int finite_state(void *state, void *saved, ptrdiff_t floats)
{
    (void)saved;
    for (ptrdiff_t i = 0; i < floats; ++i)
        if (!isfinite(((float *)state)[i])) return 0;
    return 1;
}

int cnorm_stream_finite(const cnorm_stream *stream)
{
    int held = started(stream);
    if (held) each_array(stream->model, stream->state, NULL, finite_state, &held);
    return held;
}

ptrdiff_t cnorm_stream_saved_bytes(const cnorm_model *model)
{
    if (!model || !streamed(model)) return 0;
    return SAVED_STATE + each_array(model, NULL, NULL, NULL, NULL) + 4;
}

cnorm_status cnorm_stream_save(const cnorm_stream *stream, void *bytes)
{
    int held = 1;
    if (!started(stream) || !bytes) return CNORM_ERROR_NULL;
    unsigned char *to = bytes;
    memcpy(to, saved_magic, sizeof saved_magic);
    memcpy(to + sizeof saved_magic, stream->model->identity, CNORM_IDENTITY);
    put_little(to + SAVED_FRAMES, 8, stream->frames);
    put_little(to + SAVED_ARITHMETIC, 4, CNORM_ARITHMETIC);
    const ptrdiff_t used = SAVED_STATE + each_array(stream->model, stream->state, to + SAVED_STATE, save_array, &held);
    put_little(to + used, 4, crc32_of(to, used));
    return CNORM_OK;
}

cnorm_status cnorm_stream_restore(cnorm_stream *stream, const void *bytes, ptrdiff_t count)
{
    int held = 1;
    if (!started(stream) || !bytes) return CNORM_ERROR_NULL;
    const unsigned char *from = bytes;
    if (count < (ptrdiff_t)sizeof saved_magic || memcmp(from, saved_magic, sizeof saved_magic) != 0)
        return CNORM_ERROR_FORMAT;
    if (count < SAVED_STATE + 4 || crc32_of(from, count - 4) != get_little(from + count - 4, 4))
        return CNORM_ERROR_DAMAGED;
    if (get_little(from + SAVED_ARITHMETIC, 4) != CNORM_ARITHMETIC) return CNORM_ERROR_ARITHMETIC;
    if (memcmp(from + sizeof saved_magic, stream->model->identity, CNORM_IDENTITY) != 0) return CNORM_ERROR_IDENTITY;
    if (count != cnorm_stream_saved_bytes(stream->model)) return CNORM_ERROR_DAMAGED;
    unsigned char *state = (unsigned char *)(uintptr_t)(from + SAVED_STATE); /* only read */
    each_array(stream->model, stream->state, state, finite_array, &held);
    if (!held) return CNORM_ERROR_VALUE;
    each_array(stream->model, stream->state, state, restore_array, &held);
    stream->frames = get_little(from + SAVED_FRAMES, 8);
    return CNORM_OK;
}
