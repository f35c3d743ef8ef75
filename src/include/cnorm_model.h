/* cnorm: packed models and their streams. Read cnorm.h first; cnorm_rnn.h has the layers that a model is made of.
 *
 * A packed model is one flat file in the layout of the kernels, so it is used where it lies: mapped into memory, or
 * compiled into the program. Python writes it: model.save_packed(path), or `cnorm pack MODEL OUT.cnorm`. It may come
 * from an untrusted source: cnorm_model_open checks every size, offset and option before it is used.
 *
 *     cnorm_model model;
 *     void *memory = malloc(cnorm_model_memory(file, bytes));
 *     if (cnorm_model_open(file, bytes, memory, cnorm_model_memory(file, bytes), &model, NULL) != CNORM_OK) ...
 *     cnorm_stream stream;
 *     float *floats = aligned_alloc(CNORM_ALIGN, 4 * cnorm_stream_floats(&model, 1));
 *     if (cnorm_stream_start(&stream, &model, floats, 1) != CNORM_OK) ...
 *     cnorm_stream_run(&stream, 1, x, y);
 *
 * As in the rest of the library nothing here allocates, and the caller frees its memory when the streams are no longer
 * used. A model is only read, by any number of streams and threads; a stream belongs to one thread at a time.
 * cnorm_map.h maps a file.
 */
#ifndef CNORM_MODEL_H
#define CNORM_MODEL_H

#include <stdint.h>

#include "cnorm_rnn.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum cnorm_direction {
    CNORM_STREAMED, /* any layers, from the first frame on */
    CNORM_FORWARD,  /* one cell: the first half of the outputs of a bidirectional layer, CNORM_BACKWARD follows */
    CNORM_BACKWARD, /* one cell, from the last frame back */
} cnorm_direction;

/* layers that cnorm_run can run together */
typedef struct cnorm_network {
    const cnorm_layer *layers;
    const float *const *starts; /* [count]: the initial state of each cell [cnorm_layer_state_floats] or NULL, zero */
    int count;
    cnorm_direction direction;
} cnorm_network;

enum {
    CNORM_IDENTITY = 32,  /* bytes */
    CNORM_ARITHMETIC = 2, /* generation of the arithmetic, in identities and saved streams: another has other bits */
};

/* A model without a bidirectional layer is one network, and only such a model has streams. */
typedef struct cnorm_model {
    const cnorm_network *networks;
    int count;
    ptrdiff_t inputs, outputs;
    const unsigned char *identity; /* [CNORM_IDENTITY], as Model.identity of Python; a saved stream holds it */
    const char *configuration;     /* JSON, for Python; not terminated by a zero */
    ptrdiff_t configuration_bytes;
    const void *file; /* the packed file, or NULL */
    ptrdiff_t file_bytes;
} cnorm_model;

/* Bytes of memory that cnorm_model_open needs, aligned like a pointer; 0 if the file does not begin as a packed model
 * of this version and size. */
ptrdiff_t cnorm_model_memory(const void *file, ptrdiff_t file_bytes);

enum { CNORM_MODEL_FLOATS = 1 << 24 }; /* 64 MiB, see CNORM_ERROR_SIZE of cnorm_model_open */

/* Opens a packed file, aligned to CNORM_ALIGN, which the model refers to and which must not change. Reads the head and
 * the vectors but not the matrices, so that the time does not depend on their size. Returns
 *     CNORM_ERROR_FORMAT   not a packed model, or one of another version or byte order
 *     CNORM_ERROR_DAMAGED  its head is damaged, or the file is shorter or longer than that says
 *     CNORM_ERROR_LAYER    a layer that cnorm_layers_check refuses, an array outside the file, or layers that don't fit
 *     CNORM_ERROR_VALUE    a vector with a NaN or infinity
 *     CNORM_ERROR_SIZE     memory_bytes is too small, or a step takes more scratch than CNORM_MODEL_FLOATS and the
 *                          file's own size 4 times: wide layers without weights take no bytes in a file, so a small
 *                          one could fill the memory
 *     CNORM_ERROR_ALIGN    the file is not aligned to CNORM_ALIGN, or memory not as malloc does
 * and, unless fault is NULL, sets *fault to the network, layer and field that is at fault. */
cnorm_status cnorm_model_open(const void *file, ptrdiff_t file_bytes, void *memory, ptrdiff_t memory_bytes,
                              cnorm_model *model, cnorm_fault *fault);

/* Reads the whole file of an open model: CNORM_ERROR_DAMAGED unless panels and vectors have the checksum of the
 * head. */
cnorm_status cnorm_model_verify(const cnorm_model *model);

/* The packed file of a model, whose member `file` is not read: its size, 0 if the layers are invalid, and its bytes. */
ptrdiff_t cnorm_model_file_bytes(const cnorm_model *model);
cnorm_status cnorm_model_write(const cnorm_model *model, void *file);

/* A whole sequence from the initial state: x [steps, inputs] -> y [steps, outputs], which do not overlap. The only
 * way to run a bidirectional layer. memory [cnorm_model_floats] is aligned to CNORM_ALIGN; cnorm_model_floats is 0
 * if the bytes do not fit ptrdiff_t. */
ptrdiff_t cnorm_model_floats(const cnorm_model *model, ptrdiff_t steps);
cnorm_status cnorm_model_run(const cnorm_model *model, ptrdiff_t steps, const float *x, float *y, float *memory);

/* One sequence, step by step. Its members are for reading. While it is used, the model, the model's memory, the file
 * and the stream's memory must stay where they are; a copy of the struct shares the state of the original. */
typedef struct cnorm_stream {
    const cnorm_model *model;
    float *state, *scratch;
    ptrdiff_t rows;
    uint64_t frames; /* steps since the start or the last reset */
} cnorm_stream;

/* `rows`, at least 1, as in cnorm_scratch_floats: 1 for frames that arrive one by one. memory [cnorm_stream_floats],
 * aligned to CNORM_ALIGN. cnorm_stream_floats is 0, and cnorm_stream_start returns CNORM_ERROR_LAYER, for a model
 * with a bidirectional layer, which has no streams, and for layers that cnorm_layers_check refuses: runs of a stream do
 * not check them again. */
ptrdiff_t cnorm_stream_floats(const cnorm_model *model, ptrdiff_t rows);
cnorm_status cnorm_stream_start(cnorm_stream *stream, const cnorm_model *model, float *memory, ptrdiff_t rows);

/* x [steps, inputs] -> y [steps, outputs]; y may be x if a frame has as many outputs as inputs */
cnorm_status cnorm_stream_run(cnorm_stream *stream, ptrdiff_t steps, const float *x, float *y);

/* whether no value of the state is a NaN or an infinity, as one in x leaves behind; 0 for a stream that was not
 * started */
int cnorm_stream_finite(const cnorm_stream *stream);

/* the initial state, zero or the one that the cells have learned; frames becomes 0 */
void cnorm_stream_reset(cnorm_stream *stream);

/* The bytes that Python's Stream.save and Model.restore exchange, docs/cells.md. restore takes bytes from an untrusted
 * source: on any error the stream is unchanged. It returns
 *     CNORM_ERROR_FORMAT    not a saved stream of this version
 *     CNORM_ERROR_DAMAGED   a byte was changed, lost or added
 *     CNORM_ERROR_ARITHMETIC  the stream of another generation of the arithmetic
 *     CNORM_ERROR_IDENTITY  the stream of a model with another configuration or other weights
 *     CNORM_ERROR_VALUE     the state has a NaN or infinity */
ptrdiff_t cnorm_stream_saved_bytes(const cnorm_model *model);
cnorm_status cnorm_stream_save(const cnorm_stream *stream, void *bytes);
cnorm_status cnorm_stream_restore(cnorm_stream *stream, const void *bytes, ptrdiff_t count);

#ifdef __cplusplus
}
#endif
#endif
