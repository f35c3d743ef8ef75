/* CNORM_LAYER_RESIDUAL: y = x + the input of an earlier layer. */
#include <string.h>

#include "../layers.h"

static const layer_option residual_options[] = {
    LAYER_OPTION(residual, n, OPTION_SIZE),
    LAYER_OPTION(residual, back, OPTION_INT),
    {0},
};
static const layer_field residual_fields[] = {{0}};

static const char *residual_check(const cnorm_layer *layer)
{
    if (layer->as.residual.n <= 0) return "n";
    return layer->as.residual.back > 0 ? NULL : "back";
}

/* the gradient of both inputs is dy */
static layer_read residual_read(const cnorm_layer *layer, int k)
{
    (void)k;
    const ptrdiff_t n = layer->as.residual.n;
    return (layer_read){.back = layer->as.residual.back, .n = n, .count = n};
}

static void residual_run(const layer_run *call)
{
    const ptrdiff_t n = call->layer->as.residual.n;
    for (ptrdiff_t s = 0; s < call->n; ++s) {
        const float *x = call->x.at + s * call->x.stride, *other = call->read[0].at + s * call->read[0].stride;
        float *y = call->y.at + s * call->y.stride;
        for (ptrdiff_t j = 0; j < n; ++j) y[j] = other[j] + x[j];
    }
}

static void residual_backward(const layer_backward *call)
{
    for (ptrdiff_t s = 0; s < call->steps * call->batch; ++s)
        memmove(call->dx.at + s * call->dx.stride, call->dy.at + s * call->dy.stride,
                (size_t)call->layer->as.residual.n * sizeof(float));
}

const layer_ops cnorm_residual_ops = {
    .name = "residual",
    .options = residual_options,
    .fields = residual_fields,
    .inputs = LAYER_SIZE(residual, n),
    .outputs = LAYER_SIZE(residual, n),
    .check = residual_check,
    .reads = 1,
    .read = residual_read,
    .run = residual_run,
    .backward = residual_backward,
};
