/* CNORM_LAYER_EMBEDDING: y = column x of W [outputs, tokens], which is the product of W with a vector that is 1 at
 * element x and 0 elsewhere. x [1] is checked before a step, and once more where it is used, because the caller's
 * array may have changed in between: then y is zero. */
#include <string.h>

#include "../../int8/backends.h"
#include "../../kernels/backward.h"
#include "../../simd/vector.h" /* turns off contraction to FMA */
#include "../layers.h"

static const layer_option embedding_options[] = {
    LAYER_OPTION(embedding, inputs, OPTION_SIZE),
    {0},
};
static const layer_field embedding_fields[] = {
    LAYER_FIELD(embedding, weight, NULL),
    {0},
};

static const char *embedding_check(const cnorm_layer *layer)
{
    const cnorm_matrix *w = &layer->as.embedding.weight;
    if (layer->as.embedding.inputs != 1) return "inputs";
    return w->cols <= CNORM_TOKENS && w->group == 0 && cnorm_usable_matrix(w, 1, w->units, w->cols) ? NULL : "weight";
}

static ptrdiff_t embedding_tokens(const cnorm_layer *layer) { return layer->as.embedding.weight.cols; }

/* elements [r, r + n) of column k, which lie in one panel */
static void part_of_column_int8(const cnorm_matrix *w, ptrdiff_t r, ptrdiff_t n, ptrdiff_t k, float *y)
{
    const float *scale = w->panels;
    const ptrdiff_t padded = (w->cols + 3) / 4 * 4;
    const uint8_t *from = (const uint8_t *)(scale + packed_rows(w)) + r * padded + k / 4 * 4 * PANEL + k % 4;
    for (ptrdiff_t i = 0; i < n; ++i) y[i] = scale[r + i] * (float)(from[4 * i] - CNORM_INT8_BIAS);
}
static void part_of_column(const cnorm_kernels *kernels, const cnorm_matrix *w, ptrdiff_t r, ptrdiff_t n, ptrdiff_t k,
                           float *y)
{
    const ptrdiff_t at = r * w->cols + k * PANEL;
    switch (w->type) {
    case CNORM_WEIGHT_F32: memcpy(y, (const float *)w->panels + at, (size_t)n * sizeof *y); break;
    case CNORM_WEIGHT_F16:
        kernels->to_float[CNORM_F16](&(cnorm_conversion){n, (const uint16_t *)w->panels + at, y});
        break;
    case CNORM_WEIGHT_I8: part_of_column_int8(w, r, n, k, y); break;
    }
}

static void embedding_run(const layer_run *call)
{
    const cnorm_matrix *w = &call->layer->as.embedding.weight;
    for (ptrdiff_t s = 0; s < call->n; ++s) {
        const ptrdiff_t k = token_of(call->x.at[s * call->x.stride], w->cols);
        float *y = call->y.at + s * call->y.stride;
        if (k < 0) memset(y, 0, (size_t)w->units * sizeof *y);
        for (ptrdiff_t r = 0; k >= 0 && r < w->units; r += PANEL)
            part_of_column(call->kernels, w, r, w->units - r < PANEL ? w->units - r : PANEL, k, y + r);
    }
}

static int embedding_trains(const cnorm_layer *layer) { return layer->as.embedding.weight.type == CNORM_WEIGHT_F32; }

/* dw += the gradients of rows [first, first + n): those of one token are added first, in order */
static void rows_backward(const layer_backward *call, ptrdiff_t first, ptrdiff_t n, float *dw)
{
    const cnorm_matrix *w = &call->layer->as.embedding.weight;
    ptrdiff_t tokens[SUM_ROWS];
    for (ptrdiff_t i = 0; i < n; ++i) tokens[i] = token_of(call->tape.at[(first + i) * call->tape.row], w->cols);
    for (ptrdiff_t i = 0; i < n; ++i) {
        const ptrdiff_t k = tokens[i];
        for (ptrdiff_t r = 0; k >= 0 && r < w->units; ++r) {
            float sum = 0;
            for (ptrdiff_t j = i; j < n; ++j)
                if (tokens[j] == k) sum += call->dy.at[(first + j) * call->dy.stride + r];
            dw[r * w->cols + k] += sum;
        }
        for (ptrdiff_t j = i + 1; k >= 0 && j < n; ++j)
            if (tokens[j] == k) tokens[j] = -1;
    }
}

static void embedding_backward(const layer_backward *call)
{
    const cnorm_matrix *w = &call->layer->as.embedding.weight;
    const ptrdiff_t rows = call->steps * call->batch;
    float *dw = call->gradient->embedding.weight;
    if (dw) memset(dw, 0, (size_t)(w->units * w->cols) * sizeof *dw);
    for (ptrdiff_t s = 0; dw && s < rows; s += SUM_ROWS)
        rows_backward(call, s, rows - s < SUM_ROWS ? rows - s : SUM_ROWS, dw);
    for (ptrdiff_t s = 0; call->dx.at && s < rows; ++s) call->dx.at[s * call->dx.stride] = 0;
}

const layer_ops cnorm_embedding_ops = {
    .name = "embedding",
    .options = embedding_options,
    .fields = embedding_fields,
    .inputs = LAYER_SIZE(embedding, inputs),
    .outputs = LAYER_SIZE(embedding, weight.units),
    .check = embedding_check,
    .tokens = embedding_tokens,
    .run = embedding_run,
    .trains = embedding_trains,
    .backward = embedding_backward,
};
