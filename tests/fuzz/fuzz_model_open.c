/* libFuzzer target for packed models: `make fuzz` builds it with clang, AddressSanitizer and UndefinedBehaviorSanitizer.
 *
 * The input is a file, in memory of exactly its size. Its size and the checksum of its head are made right first, as a
 * hostile author would, so that every mutation reaches the checks behind them. A model that opens is run, streamed,
 * saved and restored, and written to a file that opens again. */
#include "cnorm_model.h"

#include <stdlib.h>
#include <string.h>

#include "crc32.h"
#include "rnn/packed.h"

enum { STEPS = 3, MOST_FLOATS = 1 << 18, MOST_WIDTH = 4096 };

static void *aligned(size_t bytes)
{
    void *p = NULL;
    if (posix_memalign(&p, CNORM_ALIGN, bytes ? bytes : 1) != 0) abort();
    return memset(p, 0, bytes);
}

static void make_consistent(unsigned char *file, size_t size)
{
    packed_head head;
    if (size < sizeof head) return;
    memcpy(&head, file, sizeof head);
    const size_t checked = offsetof(packed_head, version);
    head.bytes = size;
    memcpy(file, &head, sizeof head);
    if (head.data < checked || head.data > size) return;
    head.head_crc = crc32_of(file + checked, (ptrdiff_t)(head.data - checked));
    memcpy(file, &head, sizeof head);
}

/* the frames are no token ids for every file */
static int ran(cnorm_status status) { return status == CNORM_OK || status == CNORM_ERROR_TOKEN; }

static void stream(const cnorm_model *model, const float *x, float *y)
{
    const ptrdiff_t floats = cnorm_stream_floats(model, 2), saved_bytes = cnorm_stream_saved_bytes(model);
    if (floats == 0) return;
    cnorm_stream one;
    float *memory = aligned((size_t)floats * sizeof(float));
    void *saved = aligned((size_t)saved_bytes);
    if (cnorm_stream_start(&one, model, memory, 2) != CNORM_OK) abort();
    if (!ran(cnorm_stream_run(&one, STEPS, x, y)) || cnorm_stream_save(&one, saved) != CNORM_OK) abort();
    const cnorm_status status = cnorm_stream_restore(&one, saved, saved_bytes);
    if (status != CNORM_OK && status != CNORM_ERROR_VALUE) abort(); /* hostile weights give infinities */
    free(saved);
    free(memory);
}

/* 64 MB and 4 times the file's size, in floats: what a stream or a run of one step may take */
static void check_memory(const cnorm_model *model)
{
    const ptrdiff_t most = ((ptrdiff_t)1 << 24) + model->file_bytes + 1024;
    if (cnorm_stream_floats(model, 1) > most || cnorm_model_floats(model, 1) > 2 * most) abort();
}

static void use(const cnorm_model *model)
{
    check_memory(model);
    const ptrdiff_t floats = cnorm_model_floats(model, STEPS), stream_floats = cnorm_stream_floats(model, 2);
    if (model->inputs > MOST_WIDTH || model->outputs > MOST_WIDTH || floats > MOST_FLOATS || stream_floats > MOST_FLOATS) return;
    float *x = aligned((size_t)(STEPS * model->inputs) * sizeof(float)), *y = aligned((size_t)(STEPS * model->outputs) * sizeof(float));
    float *memory = aligned((size_t)floats * sizeof(float));
    for (ptrdiff_t i = 0; i < STEPS * model->inputs; ++i) x[i] = (float)(i % 7) - 3;
    if (!ran(cnorm_model_run(model, STEPS, x, y, memory))) abort();
    stream(model, x, y);
    free(memory);
    free(y);
    free(x);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    unsigned char *file = aligned(size);
    if (size) memcpy(file, data, size);
    make_consistent(file, size);
    const ptrdiff_t bytes = cnorm_model_memory(file, (ptrdiff_t)size);
    void *memory = aligned((size_t)bytes);
    cnorm_model model;
    cnorm_fault fault;
    if (bytes > 0 && cnorm_model_open(file, (ptrdiff_t)size, memory, bytes, &model, &fault) == CNORM_OK) {
        (void)cnorm_model_verify(&model);
        use(&model);
        const ptrdiff_t written = cnorm_model_file_bytes(&model);
        if (written == 0) abort();
        if (written <= 1 << 20) {
            void *copy = aligned((size_t)written);
            cnorm_model again;
            if (cnorm_model_write(&model, copy) != CNORM_OK) abort();
            const cnorm_status opened = cnorm_model_open(copy, written, memory, bytes, &again, NULL);
            if (opened != CNORM_OK || cnorm_model_verify(&again) != CNORM_OK) abort();
            free(copy);
        }
    }
    free(memory);
    free(file);
    return 0;
}
