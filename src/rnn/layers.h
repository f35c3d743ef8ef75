/* What rnn/ knows of a kind of layer: a table of operations, defined in one file of layers/ for each kind. All other
 * files loop over the layers of a network and call the table; none knows a kind. */
#ifndef CNORM_LAYERS_H
#define CNORM_LAYERS_H

#include "../kernels/kernels.h"
#include "cnorm_model.h"
#include "cnorm_train.h"
#include "rows.h"

enum {
    LAYER_READS = CNORM_PARTS, /* inputs of earlier layers that a layer may read, besides its own input */
    LAYER_STATES = 2,          /* arrays of state */
    LAYERS_BESIDE = SCANS - 1, /* layers that a run does besides its own */
    WIDEST = 1 << 28,          /* the largest option that is a size; also of a packed file's matrices and bytes */
};

/* A number of a layer's struct. Packed files store options in the order of the table, each in 4 bytes. */
typedef enum option_type { OPTION_SIZE, OPTION_INT, OPTION_FLOAT } option_type; /* ptrdiff_t; int or enum; float */
typedef struct layer_option {
    const char *name;
    option_type type;
    ptrdiff_t at; /* offset in cnorm_layer */
} layer_option;

/* The shape of a vector: [units], or [gates, units] if gates > 0, each gate padded to CNORM_GATE_PAD units. It takes
 * `floats` floats in all; 0 if the layer's options use no such vector. */
typedef struct vector_shape {
    ptrdiff_t gates, units, floats;
} vector_shape;

/* A matrix or a vector of a layer's struct. The table's order is that of packed files; matrices come first, because the
 * shapes of vectors follow from them. */
typedef struct layer_field {
    const char *name;
    ptrdiff_t at, gradient;                     /* offsets in cnorm_layer and cnorm_gradient */
    vector_shape (*shape)(const cnorm_layer *); /* of a const float *; NULL for a cnorm_matrix */
} layer_field;

#define LAYER_SIZE(kind, member) offsetof(cnorm_layer, as.kind.member)
#define LAYER_OPTION(kind, member, type)                                                                               \
    {                                                                                                                  \
#member, type, offsetof(cnorm_layer, as.kind.member)                                                           \
    }
#define LAYER_FIELD(kind, member, shape)                                                                               \
    {                                                                                                                  \
#member, offsetof(cnorm_layer, as.kind.member), offsetof(cnorm_gradient, kind.member), shape                   \
    }

/* Elements [start, start + count) of the input, [n], of the layer `back` places before. Their gradient is `gradient`
 * floats into the layer's dy or, if it is `kept`, into its row of the tape. */
typedef struct layer_read {
    ptrdiff_t back, n, start, count, gradient;
    int kept;
} layer_read;

/* A layer that the run of an earlier one does, too, with the same number of rows. */
typedef struct layer_beside {
    const cnorm_layer *layer;
    const_rows x;
    float_rows y;
} layer_beside;

/* n rows of one layer. The state of row s begins `offset` floats into states[s], or into states[0], if the rows are
 * steps of one stream. */
typedef struct layer_run {
    const cnorm_kernels *kernels;
    const cnorm_layer *layer;
    ptrdiff_t n;
    const_rows x, read[LAYER_READS];
    float_rows y;
    int others;           /* layers that this run does, too */
    layer_beside *beside; /* [others] */
    float *const *states;
    ptrdiff_t offset;
    int steps;
    float *scratch; /* of the size for these rows */
    float *stats;   /* [n, stats of the table] or NULL: for the backward pass */
} layer_run;

/* A layer on the tape, from some step on: rows [steps, batch, row], the first element of each is the layer's input; and
 * stats [steps, batch, stats of the table] */
typedef struct tape_layer {
    ptrdiff_t row;
    float *at, *stats;
} tape_layer;

/* Steps of a layer with state, recorded on the tape: of each of `batch` streams. */
typedef struct layer_record {
    const cnorm_kernels *kernels;
    const cnorm_layer *layer;
    tape_layer tape;
    ptrdiff_t steps, batch;
    float *state; /* of this layer; the next stream's is `state_stride` further on */
    ptrdiff_t state_stride;
    float *scratch;
    float_rows y;
} layer_record;

/* Rows of a layer on tapes: `left` of them from `at` on, then those of `tapes` [count], which have this layer alone. */
typedef struct tape_rows {
    const float *at;
    ptrdiff_t stride, left, count;
    const cnorm_tape *const *tapes;
} tape_rows;

typedef struct layer_backward {
    const cnorm_kernels *kernels;
    const cnorm_layer *layer;
    tape_layer tape;
    ptrdiff_t steps, batch;
    const_rows dy, read[LAYER_READS];
    float_rows dx; /* at is NULL if the caller does not want it */
    const cnorm_gradient *gradient;
    cnorm_sums *sums; /* NULL, or where the sums go instead of to `gradient` */
    float *dstate;    /* as state of layer_record */
    ptrdiff_t dstate_stride;
    float *scratch; /* [backward_floats] */
} layer_backward;

/* NULL selects the default, where a function has one. Floats of scratch are multiples of CNORM_GATE_PAD. */
typedef struct layer_ops {
    const char *name;
    const layer_option *options;               /* ended by one without a name */
    const layer_field *fields;                 /* likewise */
    ptrdiff_t inputs, outputs;                 /* offsets in cnorm_layer of these sizes, each a ptrdiff_t */
    const char *(*check)(const cnorm_layer *); /* the name of an option or field that can't be used, or NULL */
    layer_read (*origin)(const cnorm_layer *, ptrdiff_t element); /* where an output is copied from; it is computed */
    layer_read (*part)(const cnorm_layer *);        /* the run of one input that y is; count is 0 if it is none */
    ptrdiff_t (*tokens)(const cnorm_layer *);       /* x [1] is a token id below this; x is any numbers */
    int reads;                                      /* the most inputs of earlier layers that it reads; 0 */
    layer_read (*read)(const cnorm_layer *, int k); /* k < reads; back is 0 after the last */
    ptrdiff_t (*state)(const cnorm_layer *, int k); /* floats of array k, which are padded; none */
    const char *state_names[LAYER_STATES];
    ptrdiff_t (*scratch)(const cnorm_layer *, ptrdiff_t rows); /* floats; 0 */
    void (*run)(const layer_run *); /* rows are at most CNORM_ROWS if the layer has state, else any number */
    int (*beside)(const cnorm_layer *, const cnorm_layer *other);      /* whether a run can also do that of `other` */
    ptrdiff_t (*stats)(const cnorm_layer *);                           /* floats of a row; 0 */
    ptrdiff_t (*tape_row)(const cnorm_layer *);                        /* floats; those of the input */
    int (*trains)(const cnorm_layer *);                                /* whether it has gradients; it has */
    void (*record)(const layer_record *);                              /* run on all rows */
    ptrdiff_t (*backward_floats)(const cnorm_layer *, ptrdiff_t rows); /* 0 */
    void (*backward)(const layer_backward *);
    ptrdiff_t (*sums_floats)(const cnorm_layer *); /* cnorm_sums: of kinds that can be trained call by call; none */
    void (*sum)(const cnorm_kernels *, const cnorm_layer *, tape_rows, cnorm_sums *, const cnorm_gradient *,
                float *scratch);
} layer_ops;

#pragma GCC visibility push(hidden)

#define LAYER(name, type, member) extern const layer_ops cnorm_##member##_ops;
CNORM_LAYERS(LAYER)
#undef LAYER

#define LAYER(name, type, member) +1
enum { LAYER_KINDS = CNORM_LAYERS(LAYER) };
#undef LAYER
extern const layer_ops *const cnorm_layer_kinds[LAYER_KINDS];

/* layers.c: sizes of a layer of a known kind, from its table */
ptrdiff_t cnorm_layer_tape_row(const cnorm_layer *layer);
ptrdiff_t cnorm_layer_scratch(const cnorm_layer *layer, ptrdiff_t rows);

/* check.c: the element of the frame that is x [1] of layer `index`; -1 if that is computed */
ptrdiff_t cnorm_token_element(const cnorm_layer *layers, ptrdiff_t index);

/* layers.c: a layer's options and fields, by the table */
double cnorm_layer_number(const cnorm_layer *layer, const layer_option *option);
void cnorm_layer_set_number(cnorm_layer *layer, const layer_option *option, double value);

/* fields.c: parts of the operations that several kinds share */
int cnorm_usable_matrix(const cnorm_matrix *w, ptrdiff_t gates, ptrdiff_t units, ptrdiff_t cols);
int cnorm_usable_eps(float eps);
void cnorm_weight_backward(const cnorm_kernels *kernels, const cnorm_matrix *w, tape_rows rows, ptrdiff_t dz,
                           ptrdiff_t x, float *scratch, float *dw);
void cnorm_add_block(const cnorm_kernels *kernels, ptrdiff_t n, float *to, float *from);
void cnorm_copy_gradient(float *to, const float *from, ptrdiff_t n);

#pragma GCC visibility pop

/* The operations of a kind; NULL for an unknown one. */
static inline const layer_ops *cnorm_layer_ops_of(cnorm_layer_kind kind)
{
    return (unsigned)kind < LAYER_KINDS ? cnorm_layer_kinds[kind] : NULL;
}

static inline ptrdiff_t layer_size(const cnorm_layer *layer, ptrdiff_t at)
{
    return *(const ptrdiff_t *)(const void *)((const char *)layer + at);
}

/* a token id; -1 if it is none */
static inline ptrdiff_t token_of(float x, ptrdiff_t tokens)
{
    if (!(x >= 0 && x < (float)tokens)) return -1;
    return (float)(ptrdiff_t)x == x ? (ptrdiff_t)x : -1;
}

static inline int between(int value, int last) { return value >= 0 && value <= last; }

/* field of a layer: the matrix, or the place of the pointer to the vector */
static inline cnorm_matrix *field_matrix(cnorm_layer *layer, const layer_field *field)
{
    return (cnorm_matrix *)(void *)((char *)layer + field->at);
}
static inline const float **field_vector(cnorm_layer *layer, const layer_field *field)
{
    return (const float **)(void *)((char *)layer + field->at);
}

#endif
