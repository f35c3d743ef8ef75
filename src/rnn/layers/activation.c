/* CNORM_LAYER_ACTIVATION: y = f(x), element by element. */
#include "../layers.h"

static const layer_option activation_options[] = {
    LAYER_OPTION(activation, n, OPTION_SIZE),
    LAYER_OPTION(activation, f, OPTION_INT),
    {0},
};
static const layer_field activation_fields[] = {{0}};

static const char *activation_check(const cnorm_layer *layer)
{
    if (layer->as.activation.n <= 0) return "n";
    return between((int)layer->as.activation.f, CNORM_ACTIVATION_SIGMOID) ? NULL : "f";
}

static void activation_run(const layer_run *call)
{
    const cnorm_elementwise *is = &call->layer->as.activation;
    for (ptrdiff_t s = 0; s < call->n; ++s)
        call->kernels->activation_f32(is->f, is->n, call->x.at + s * call->x.stride, call->y.at + s * call->y.stride);
}

static void activation_backward_rows(const layer_backward *call)
{
    const cnorm_elementwise *is = &call->layer->as.activation;
    for (ptrdiff_t s = 0; call->dx.at && s < call->steps * call->batch; ++s)
        call->kernels->activation_backward_f32(is->f, is->n, call->tape.at + s * call->tape.row,
                                               call->dy.at + s * call->dy.stride, call->dx.at + s * call->dx.stride);
}

const layer_ops cnorm_activation_ops = {
    .name = "activation",
    .options = activation_options,
    .fields = activation_fields,
    .inputs = LAYER_SIZE(activation, n),
    .outputs = LAYER_SIZE(activation, n),
    .check = activation_check,
    .run = activation_run,
    .backward = activation_backward_rows,
};
