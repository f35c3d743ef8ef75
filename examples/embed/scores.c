/* Stream frames, float32 numbers on standard input, through a packed model; print its scores and the hash of their bits.
 *
 *     cc -O2 scores.c cnorm.c -lm -o scores && ./scores demo.cnorm < frames.f32 */
#define CNORM_MAP
#include "cnorm.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void *allocate(ptrdiff_t bytes)
{
    void *memory = aligned_alloc(CNORM_ALIGN, ((size_t)bytes + CNORM_ALIGN - 1) / CNORM_ALIGN * CNORM_ALIGN);
    if (!memory) exit(3);
    return memory;
}

static void check(cnorm_status status, const char *what)
{
    if (status == CNORM_OK) return;
    fprintf(stderr, "%s: %s\n", what, cnorm_strerror(status));
    exit(2);
}

int main(int argc, char **argv)
{
    if (argc != 2) return fprintf(stderr, "usage: scores MODEL.cnorm < FRAMES\n"), 2;
    ptrdiff_t bytes;
    const void *file = cnorm_map(argv[1], &bytes);
    if (!file) return perror(argv[1]), 2;
    const ptrdiff_t needed = cnorm_model_memory(file, bytes);
    void *memory = allocate(needed + 1);
    cnorm_model model;
    check(cnorm_model_open(file, bytes, memory, needed, &model, NULL), argv[1]);
    cnorm_stream stream;
    float *floats = allocate(cnorm_stream_floats(&model, 1) * (ptrdiff_t)sizeof(float));
    check(cnorm_stream_start(&stream, &model, floats, 1), argv[1]);
    float *x = allocate(model.inputs * (ptrdiff_t)sizeof(float)), *y = allocate(model.outputs * (ptrdiff_t)sizeof(float));
    uint64_t hash = 0xcbf29ce484222325u; /* FNV-1a */
    while (fread(x, sizeof *x, (size_t)model.inputs, stdin) == (size_t)model.inputs) {
        check(cnorm_stream_run(&stream, 1, x, y), "step");
        for (ptrdiff_t i = 0; i < model.outputs; ++i) {
            uint32_t bits;
            memcpy(&bits, &y[i], sizeof bits);
            for (int k = 0; k < 32; k += 8) hash = (hash ^ (bits >> k & 255)) * 0x100000001b3u;
            printf("%.4f%c", (double)y[i], i + 1 == model.outputs ? '\n' : ' ');
        }
    }
    printf("hash %016" PRIx64 "\n", hash);
    free(y), free(x), free(floats), free(memory);
    cnorm_unmap(file, bytes);
    return 0;
}
