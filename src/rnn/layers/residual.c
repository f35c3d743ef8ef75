/* CNORM_LAYER_RESIDUAL: y = x + the input of an earlier layer. */
#include <string.h>

#include "../layers.h"

static ptrdiff_t residual_size(const cnorm_layer *layer) { return layer->as.residual.n; }

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

/* the gradient of both inputs is dy, which residual_backward leaves in the place of x */
static layer_read residual_read(const cnorm_layer *layer, int k)
{
    return (layer_read){k == 0 ? layer->as.residual.back : 0, layer->as.residual.n, 0};
}

static void residual_run(const layer_run *call)
{
    const const_rows other = call->read[0];
    for (ptrdiff_t s = 0; s < call->n; ++s)
        for (ptrdiff_t j = 0; j < call->layer->as.residual.n; ++j)
            call->y.at[s * call->y.stride + j] = other.at[s * other.stride + j] + call->x.at[s * call->x.stride + j];
}

static void residual_backward(const layer_backward *call)
{
    for (ptrdiff_t s = 0; s < call->steps * call->batch; ++s)
        memmove(call->dx.at + s * call->dx.stride, call->dy.at + s * call->dy.stride,
                (size_t)call->layer->as.residual.n * sizeof(float));
}

const layer_ops residual_ops = {
    .name = "residual",
    .options = residual_options,
    .fields = residual_fields,
    .inputs = residual_size,
    .outputs = residual_size,
    .check = residual_check,
    .read = residual_read,
    .run = residual_run,
    .backward = residual_backward,
};
