/* Packed models in C: written, opened, streamed and restored to the same bits; wrong arguments are refused. */
#include <errno.h>

#include "cnorm_map.h"
#include "cnorm_model.h"
#include "crc32.h"
#include "network.h"

enum { INPUTS = 5, UNITS = 19, OUTPUTS = 3, STEPS = 11 };

static unsigned char identity[CNORM_IDENTITY];
static const char configuration[] = "{}";

typedef struct packed {
    void *file, *memory;
    ptrdiff_t bytes;
    cnorm_model model;
} packed;

static void reopen(packed *p)
{
    const ptrdiff_t bytes = cnorm_model_memory(p->file, p->bytes);
    p->memory = allocate(bytes);
    CHECK(bytes > 0 && cnorm_model_open(p->file, p->bytes, p->memory, bytes, &p->model, NULL) == CNORM_OK, "%td bytes", p->bytes);
}

static packed pack(const cnorm_network *networks, int count)
{
    packed p = {NULL, NULL, 0, {0}};
    const cnorm_model model = {.networks = networks, .count = count, .identity = identity, .configuration = configuration,
                               .configuration_bytes = sizeof configuration - 1};
    p.bytes = cnorm_model_file_bytes(&model);
    CHECK(p.bytes > 0, "%d networks", count);
    p.file = allocate(p.bytes);
    CHECK(cnorm_model_write(&model, p.file) == CNORM_OK, "%td bytes", p.bytes);
    reopen(&p);
    CHECK(memcmp(p.model.configuration, configuration, (size_t)p.model.configuration_bytes) == 0, "configuration");
    CHECK(cnorm_model_verify(&p.model) == CNORM_OK, "verify");
    return p;
}

static void discard(packed *p)
{
    release(p->memory);
    release(p->file);
}

static void frames(float *x, ptrdiff_t count)
{
    uint64_t state = 7;
    for (ptrdiff_t i = 0; i < count; ++i) x[i] = (float)bell(&state);
}

static void test_a_packed_model_has_the_bits_of_its_layers(cnorm_weight_type type)
{
    network net = network_random_with(type, INPUTS, UNITS, OUTPUTS, allocate);
    float start[64] = {0}, x[STEPS * INPUTS], expected[STEPS * OUTPUTS], y[STEPS * OUTPUTS], whole[STEPS * OUTPUTS];
    start[0] = 0.5f;
    start[32] = -0.25f; /* c begins at 32 */
    const float *starts[NETWORK_LAYERS] = {start, NULL};
    const cnorm_network as_network = {net.layers, starts, NETWORK_LAYERS, CNORM_STREAMED};
    packed p = pack(&as_network, 1);
    frames(x, STEPS * INPUTS);
    CHECK(p.model.inputs == INPUTS && p.model.outputs == OUTPUTS, "%td -> %td", p.model.inputs, p.model.outputs);
    FOR_EACH_ISA(isa) {
        network_reset(&net);
        memcpy(net.state, start, (size_t)cnorm_state_floats(net.layers, NETWORK_LAYERS) * sizeof(float));
        network_run(&net, STEPS, x, expected);
        cnorm_stream stream;
        float *floats = allocate(cnorm_stream_floats(&p.model, 1) * 4), *more = allocate(cnorm_model_floats(&p.model, STEPS) * 4);
        CHECK(cnorm_stream_start(&stream, &p.model, floats, 1) == CNORM_OK, "start");
        CHECK(cnorm_stream_run(&stream, STEPS, x, y) == CNORM_OK && stream.frames == STEPS, "run");
        CHECK(memcmp(y, expected, sizeof y) == 0, "type %d, instruction set %d", (int)type, isa);
        CHECK(cnorm_model_run(&p.model, STEPS, x, whole, more) == CNORM_OK, "whole sequence");
        CHECK(memcmp(whole, expected, sizeof y) == 0, "type %d, instruction set %d", (int)type, isa);
        release(more);
        release(floats);
    }
    discard(&p);
    network_free(&net);
}

/* the hash of the saved bytes: the same in every byte order */
static const uint64_t saved_hash = 0xcce1fa301b4e6396u;

static void test_a_saved_stream_continues(void)
{
    network net = network_random_of(INPUTS, UNITS, OUTPUTS, allocate);
    const cnorm_network as_network = {net.layers, NULL, NETWORK_LAYERS, CNORM_STREAMED};
    packed p = pack(&as_network, 1);
    float x[STEPS * INPUTS], y[STEPS * OUTPUTS], again[STEPS * OUTPUTS];
    frames(x, STEPS * INPUTS);
    float *floats = allocate(cnorm_stream_floats(&p.model, MANY_ROWS) * 4);
    cnorm_stream stream;
    CHECK(cnorm_stream_start(&stream, &p.model, floats, MANY_ROWS) == CNORM_OK, "start");
    cnorm_stream_run(&stream, STEPS, x, y);
    const ptrdiff_t bytes = cnorm_stream_saved_bytes(&p.model);
    CHECK(bytes == 60 + 4 * 2 * UNITS + 4, "%td bytes", bytes);
    unsigned char *saved = allocate(bytes);
    CHECK(cnorm_stream_save(&stream, saved) == CNORM_OK, "save");
    const uint64_t hash = hash_values(HASH_START, saved, bytes, 1);
    CHECK(hash == saved_hash, "the saved stream's hash is 0x%016llx", (unsigned long long)hash);
    cnorm_stream_run(&stream, STEPS, x, y);
    cnorm_stream_reset(&stream);
    CHECK(stream.frames == 0, "reset");
    CHECK(cnorm_stream_restore(&stream, saved, bytes) == CNORM_OK && stream.frames == STEPS, "restore");
    cnorm_stream_run(&stream, STEPS, x, again);
    CHECK(memcmp(y, again, sizeof y) == 0, "the restored stream has other bits");
    const uint64_t frames_then = stream.frames;
    for (ptrdiff_t i = 0; i < bytes; ++i) {
        saved[i] ^= 4;
        const cnorm_status wanted = i < 16 ? CNORM_ERROR_FORMAT : CNORM_ERROR_DAMAGED;
        CHECK(cnorm_stream_restore(&stream, saved, bytes) == wanted, "byte %td", i);
        saved[i] ^= 4;
        CHECK(cnorm_stream_restore(&stream, saved, i) != CNORM_OK, "%td bytes", i);
    }
    CHECK(stream.frames == frames_then, "a refused state changed the stream");
    saved[56] ^= 1; /* another generation of the arithmetic */
    for (ptrdiff_t i = 0; i < 4; ++i) saved[bytes - 4 + i] = (unsigned char)(crc32_of(saved, bytes - 4) >> 8 * i);
    CHECK(cnorm_stream_restore(&stream, saved, bytes) == CNORM_ERROR_ARITHMETIC, "arithmetic");
    saved[56] ^= 1;
    for (ptrdiff_t i = 0; i < 4; ++i) saved[bytes - 4 + i] = (unsigned char)(crc32_of(saved, bytes - 4) >> 8 * i);
    ((unsigned char *)p.file)[64] ^= 1; /* the identity of another model */
    CHECK(cnorm_stream_restore(&stream, saved, bytes) == CNORM_ERROR_IDENTITY, "identity");
    release(saved);
    release(floats);
    discard(&p);
    network_free(&net);
}

/* two equal cells side by side: the second half of the outputs is the first half of the reversed frames, reversed */
static void test_a_bidirectional_layer_reads_both_ways(void)
{
    network net = network_random_of(INPUTS, UNITS, OUTPUTS, allocate);
    const cnorm_network both[2] = {{net.layers, NULL, 1, CNORM_FORWARD}, {net.layers, NULL, 1, CNORM_BACKWARD}};
    packed p = pack(both, 2);
    float x[STEPS * INPUTS], reversed[STEPS * INPUTS], y[STEPS * 2 * UNITS], z[STEPS * 2 * UNITS];
    frames(x, STEPS * INPUTS);
    for (int t = 0; t < STEPS; ++t) memcpy(reversed + t * INPUTS, x + (STEPS - 1 - t) * INPUTS, INPUTS * sizeof *x);
    float *memory = allocate(cnorm_model_floats(&p.model, STEPS) * 4);
    CHECK(p.model.outputs == 2 * UNITS, "%td outputs", p.model.outputs);
    CHECK(cnorm_model_run(&p.model, STEPS, x, y, memory) == CNORM_OK, "run");
    CHECK(cnorm_model_run(&p.model, STEPS, reversed, z, memory) == CNORM_OK, "run");
    for (int t = 0; t < STEPS; ++t)
        CHECK(memcmp(y + t * 2 * UNITS, z + (STEPS - 1 - t) * 2 * UNITS + UNITS, UNITS * sizeof *y) == 0, "frame %d", t);
    cnorm_stream stream;
    CHECK(cnorm_stream_floats(&p.model, 1) == 0 && cnorm_stream_saved_bytes(&p.model) == 0, "a stream of a whole sequence");
    CHECK(cnorm_stream_start(&stream, &p.model, memory, 1) == CNORM_ERROR_LAYER, "a stream of a whole sequence");
    release(memory);
    discard(&p);
    network_free(&net);
}

static void test_wrong_arguments_are_refused(void)
{
    network net = network_random_of(INPUTS, UNITS, OUTPUTS, allocate);
    const cnorm_network as_network = {net.layers, NULL, NETWORK_LAYERS, CNORM_STREAMED};
    packed p = pack(&as_network, 1);
    const ptrdiff_t bytes = cnorm_model_memory(p.file, p.bytes);
    cnorm_model model;
    CHECK(cnorm_model_open(NULL, p.bytes, p.memory, bytes, &model, NULL) == CNORM_ERROR_NULL, "no file");
    CHECK(cnorm_model_open(p.file, p.bytes, NULL, bytes, &model, NULL) == CNORM_ERROR_NULL, "no memory");
    CHECK(cnorm_model_open(p.file, p.bytes, p.memory, bytes - 1, &model, NULL) == CNORM_ERROR_SIZE, "too little memory");
    CHECK(cnorm_model_open(p.file, p.bytes - 1, p.memory, bytes, &model, NULL) == CNORM_ERROR_DAMAGED, "one byte short");
    char *moved = allocate(p.bytes + 8);
    memcpy(moved + 8, p.file, (size_t)p.bytes);
    CHECK(cnorm_model_open(moved + 8, p.bytes, p.memory, bytes, &model, NULL) == CNORM_ERROR_ALIGN, "not aligned");
    CHECK(cnorm_model_memory(moved, p.bytes) == 0, "not a packed model");
    memcpy(moved, p.file, (size_t)p.bytes);
    for (int i = 0; i < 4; ++i) moved[16 + i] = ((const char *)p.file)[19 - i];
    CHECK(cnorm_model_open(moved, p.bytes, p.memory, bytes, &model, NULL) == CNORM_ERROR_FORMAT, "the other byte order");
    cnorm_stream zeroed = {0};
    float x[INPUTS] = {0}, y[OUTPUTS];
    cnorm_stream_reset(&zeroed);
    CHECK(cnorm_stream_run(&zeroed, 1, x, y) == CNORM_ERROR_NULL, "run a zeroed stream");
    CHECK(cnorm_stream_save(&zeroed, moved) == CNORM_ERROR_NULL, "save a zeroed stream");
    CHECK(cnorm_stream_restore(&zeroed, p.file, p.bytes) == CNORM_ERROR_NULL, "restore a zeroed stream");
    float *floats = allocate(4 * cnorm_stream_floats(&p.model, 1));
    CHECK(cnorm_stream_start(&zeroed, &p.model, floats, 1) == CNORM_OK, "start");
    const ptrdiff_t most = PTRDIFF_MAX / 4 / INPUTS;
    CHECK(cnorm_stream_run(&zeroed, most + 1, x, y) == CNORM_ERROR_SIZE, "x does not fit ptrdiff_t");
    CHECK(cnorm_model_run(&p.model, most + 1, x, y, floats) == CNORM_ERROR_SIZE, "x does not fit ptrdiff_t");
    release(floats);
    ((char *)p.file)[p.bytes - 1] ^= 1;
    CHECK(cnorm_model_verify(&p.model) == CNORM_ERROR_DAMAGED, "a changed weight");
    release(moved);
    discard(&p);
    network_free(&net);
}

/* neither state nor scratch */
static void test_a_model_of_an_activation_has_streams(void)
{
    const cnorm_layer relu = {.kind = CNORM_LAYER_ACTIVATION, .as = {.activation = {.n = 3, .f = CNORM_ACTIVATION_RELU}}};
    const cnorm_network as_network = {&relu, NULL, 1, CNORM_STREAMED};
    packed p = pack(&as_network, 1);
    const float x[3] = {-1, 0, 2};
    float y[3] = {7, 7, 7}, z[3] = {7, 7, 7};
    float *floats = allocate(cnorm_stream_floats(&p.model, 1) * 4), *more = allocate(cnorm_model_floats(&p.model, 1) * 4);
    cnorm_stream stream;
    CHECK(cnorm_stream_floats(&p.model, 1) > 0 && cnorm_model_floats(&p.model, 1) > 0, "no memory stands for an error");
    CHECK(cnorm_stream_start(&stream, &p.model, floats, 1) == CNORM_OK, "start");
    CHECK(cnorm_stream_run(&stream, 1, x, y) == CNORM_OK && y[0] == 0 && y[2] == 2, "%g %g", (double)y[0], (double)y[2]);
    CHECK(cnorm_model_run(&p.model, 1, x, z, more) == CNORM_OK && z[0] == 0 && z[2] == 2, "%g %g", (double)z[0], (double)z[2]);
    release(more);
    release(floats);
    discard(&p);
}

/* Activations take no bytes in a file, but each has an array of outputs: 30 of 2^24 elements would take 2 GB. */
static void test_layers_that_would_fill_the_memory_are_refused(void)
{
    enum { COUNT = 30 };
    cnorm_layer wide[COUNT];
    const cnorm_network as_network = {wide, NULL, COUNT, CNORM_STREAMED};
    const cnorm_model model = {.networks = &as_network, .count = 1, .identity = identity};
    const int sizes[] = {1 << 10, 1 << 24};
    for (int k = 0; k < 2; ++k) {
        const int n = sizes[k];
        for (int i = 0; i < COUNT; ++i)
            wide[i] = (cnorm_layer){.kind = CNORM_LAYER_ACTIVATION, .as = {.activation = {.n = n, .f = CNORM_ACTIVATION_RELU}}};
        const ptrdiff_t bytes = cnorm_model_file_bytes(&model);
        void *file = allocate(bytes);
        CHECK(bytes < 2000 && cnorm_model_write(&model, file) == CNORM_OK, "%td bytes", bytes);
        const ptrdiff_t needed = cnorm_model_memory(file, bytes);
        void *memory = allocate(needed);
        cnorm_model opened;
        const cnorm_status status = cnorm_model_open(file, bytes, memory, needed, &opened, NULL);
        CHECK(status == (n < 1 << 24 ? CNORM_OK : CNORM_ERROR_SIZE), "%d elements: %d", n, (int)status);
        release(memory);
        release(file);
    }
    /* of one wide layer fewer rows are computed together */
    for (int i = 0; i < 2; ++i) wide[i].as.activation.n = 1 << 23;
    CHECK(cnorm_scratch_floats(wide, 2, MANY_ROWS) <= 1 << 24, "%td floats", cnorm_scratch_floats(wide, 2, MANY_ROWS));
}

static void test_an_error_says_where_it_is(void)
{
    network net = network_random_of(INPUTS, UNITS, OUTPUTS, allocate);
    const cnorm_network as_network = {net.layers, NULL, NETWORK_LAYERS, CNORM_STREAMED};
    packed p = pack(&as_network, 1);
    cnorm_fault fault;
    const float *vectors[] = {p.model.networks[0].layers[0].as.cell.gain_h, p.model.networks[0].layers[1].as.linear.bias};
    const char *names[] = {"gain_h", "bias"};
    for (int i = 0; i < 2; ++i) {
        float *v = (float *)vectors[i], before = v[2];
        v[2] = INFINITY;
        const ptrdiff_t bytes = cnorm_model_memory(p.file, p.bytes);
        CHECK(cnorm_model_open(p.file, p.bytes, p.memory, bytes, &p.model, &fault) == CNORM_ERROR_VALUE, "infinite");
        CHECK(fault.network == 0 && fault.layer == i && strcmp(fault.field, names[i]) == 0, "layer %d, %s", fault.layer, fault.field);
        v[2] = before;
    }
    discard(&p);
    network_free(&net);
}

static void test_a_stream_knows_whether_it_is_finite(void)
{
    network net = network_random_of(INPUTS, UNITS, OUTPUTS, allocate);
    const cnorm_network as_network = {net.layers, NULL, NETWORK_LAYERS, CNORM_STREAMED};
    packed p = pack(&as_network, 1);
    float *floats = allocate(cnorm_stream_floats(&p.model, 1) * 4), x[INPUTS] = {1, 2, 3, 4, 5}, y[OUTPUTS];
    cnorm_stream stream = {0};
    CHECK(!cnorm_stream_finite(&stream), "not started");
    CHECK(cnorm_stream_start(&stream, &p.model, floats, 1) == CNORM_OK, "start");
    CHECK(cnorm_stream_run(&stream, 1, x, y) == CNORM_OK && cnorm_stream_finite(&stream), "finite");
    x[1] = NAN;
    CHECK(cnorm_stream_run(&stream, 1, x, y) == CNORM_OK && !cnorm_stream_finite(&stream), "NaN");
    cnorm_stream_reset(&stream);
    CHECK(cnorm_stream_finite(&stream), "reset");
    release(floats);
    discard(&p);
    network_free(&net);
}

static void test_map(void)
{
    ptrdiff_t bytes = 0;
    CHECK(cnorm_map("/no such file", &bytes) == NULL, "no file");
    CHECK(cnorm_map("/", &bytes) == NULL, "a folder");
#if defined(__linux__) /* WASI may refuse the path itself, with another errno */
    bytes = 7;
    CHECK(cnorm_map("/", &bytes) == NULL && errno == EISDIR && bytes == 0, "a folder: %d", errno);
    bytes = 7;
    CHECK(cnorm_map("/dev/null", &bytes) == NULL && errno == EINVAL && bytes == 0, "a device: %d", errno);
    const void *memory = cnorm_map("/proc/self/exe", &bytes);
    CHECK(memory != NULL && bytes > 1000, "%td bytes", bytes);
    cnorm_unmap(memory, bytes);
#endif
}

int main(void)
{
    test_a_packed_model_has_the_bits_of_its_layers(CNORM_WEIGHT_F32);
    test_a_packed_model_has_the_bits_of_its_layers(CNORM_WEIGHT_F16);
    test_a_packed_model_has_the_bits_of_its_layers(CNORM_WEIGHT_I8);
    test_a_saved_stream_continues();
    test_a_bidirectional_layer_reads_both_ways();
    test_wrong_arguments_are_refused();
    test_a_model_of_an_activation_has_streams();
    test_layers_that_would_fill_the_memory_are_refused();
    test_an_error_says_where_it_is();
    test_a_stream_knows_whether_it_is_finite();
    test_map();
    return check_result();
}
