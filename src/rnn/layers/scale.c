/* CNORM_LAYER_SCALE: y = x weight, element by element. */
#include <string.h>

#include "../../kernels/backward.h"
#include "../../simd/vector.h" /* turns off contraction to FMA */
#include "../layers.h"

static vector_shape scale_vector(const cnorm_layer *layer)
{
    return (vector_shape){0, layer->as.scale.n, layer->as.scale.n};
}

static const layer_option scale_options[] = {
    LAYER_OPTION(scale, n, OPTION_SIZE),
    {0},
};
static const layer_field scale_fields[] = {
    LAYER_FIELD(scale, weight, scale_vector),
    {0},
};

static const char *scale_check(const cnorm_layer *layer)
{
    if (layer->as.scale.n <= 0) return "n";
    return layer->as.scale.weight ? NULL : "weight";
}

static void scale_run(const layer_run *call)
{
    const cnorm_scale *scale = &call->layer->as.scale;
    const float *weight = scale->weight;
    for (ptrdiff_t s = 0; s < call->n; ++s) {
        const float *x = call->x.at + s * call->x.stride;
        float *y = call->y.at + s * call->y.stride;
        for (ptrdiff_t j = 0; j < scale->n; ++j) y[j] = x[j] * weight[j];
    }
}

/* dweight, and that of SUM_ROWS rows, each [padded n] */
static ptrdiff_t scale_backward_floats(const cnorm_layer *layer, ptrdiff_t rows)
{
    (void)rows;
    return 2 * padded_units(layer->as.scale.n);
}

static void scale_backward(const layer_backward *call)
{
    const cnorm_scale *scale = &call->layer->as.scale;
    const ptrdiff_t n = scale->n, rows = call->steps * call->batch;
    float *total = call->scratch, *block = total + padded_units(n);
    memset(total, 0, (size_t)scale_backward_floats(call->layer, rows) * sizeof *total);
    for (ptrdiff_t s = 0; s < rows; ++s) {
        const float *x = call->tape.at + s * call->tape.row, *dy = call->dy.at + s * call->dy.stride;
        for (ptrdiff_t j = 0; j < n; ++j) block[j] += dy[j] * x[j];
        if ((s + 1) % SUM_ROWS == 0 || s + 1 == rows) cnorm_add_block(call->kernels, n, total, block);
        float *dx = call->dx.at ? call->dx.at + s * call->dx.stride : NULL; /* may be x */
        for (ptrdiff_t j = 0; dx && j < n; ++j) dx[j] = dy[j] * scale->weight[j];
    }
    cnorm_copy_gradient(call->gradient->scale.weight, total, n);
}

const layer_ops cnorm_scale_ops = {
    .name = "scale",
    .options = scale_options,
    .fields = scale_fields,
    .inputs = LAYER_SIZE(scale, n),
    .outputs = LAYER_SIZE(scale, n),
    .check = scale_check,
    .run = scale_run,
    .backward_floats = scale_backward_floats,
    .backward = scale_backward,
};
