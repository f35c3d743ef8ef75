/* cnorm_layers_check: each layer by its table, and the sizes of neighbours. A run of layers that are not known to have
 * passed these few dozen comparisons repeats them, so that a missing vector or a zeroed struct is an error and not a
 * crash or a wrong result. */
#include "layers.h"

ptrdiff_t cnorm_token_element(const cnorm_layer *layers, ptrdiff_t index)
{
    ptrdiff_t element = 0;
    while (index > 0) {
        const cnorm_layer *before = &layers[index - 1];
        const layer_ops *ops = cnorm_layer_ops_of(before->kind);
        if (!ops->origin) return -1;
        const layer_read from = ops->origin(before, element);
        element = from.start;
        index -= 1 + from.back;
    }
    return element;
}

ptrdiff_t cnorm_refused_token(const cnorm_layer *layers, int count, ptrdiff_t rows, const float *x, ptrdiff_t x_stride,
                              ptrdiff_t *element)
{
    for (int i = 0; i < count; ++i) {
        const layer_ops *ops = cnorm_layer_ops_of(layers[i].kind);
        if (!ops || !ops->tokens) continue;
        const ptrdiff_t tokens = ops->tokens(&layers[i]), at = cnorm_token_element(layers, i);
        for (ptrdiff_t s = 0; s < rows; ++s) {
            if (token_of(x[s * x_stride + at], tokens) >= 0) continue;
            if (element) *element = at;
            rows = s;
        }
    }
    return rows;
}

/* the option that is beyond `WIDEST`, with which sums of sizes could overflow, or NULL */
static const char *too_wide(const cnorm_layer *layer, const layer_option *options)
{
    for (const layer_option *option = options; option->name; ++option)
        if (option->type == OPTION_SIZE && layer_size(layer, option->at) > WIDEST) return option->name;
    return NULL;
}

/* The name of what is at fault in layer `index`, or NULL. *size: the outputs of the layer before, if there is one; it
 * becomes those of this one. */
static const char *layer_fault(const cnorm_layer *layers, int index, ptrdiff_t *size)
{
    const cnorm_layer *layer = &layers[index];
    const layer_ops *ops = cnorm_layer_ops_of(layer->kind);
    if (!ops) return "kind";
    const char *field = too_wide(layer, ops->options);
    if (!field) field = ops->check(layer);
    if (field) return field;
    const ptrdiff_t inputs = layer_size(layer, ops->inputs);
    if (index > 0 && inputs != *size) return "inputs";
    *size = layer_size(layer, ops->outputs);
    for (int k = 0; k < ops->reads; ++k) {
        const layer_read read = ops->read(layer, k);
        if (read.back == 0) break;
        if (read.back > index || cnorm_layer_inputs(&layers[index - read.back]) != read.n) return "back";
    }
    if (ops->tokens && cnorm_token_element(layers, index) < 0) return "inputs";
    return NULL;
}

cnorm_status cnorm_layers_check(const cnorm_layer *layers, int count, cnorm_fault *fault)
{
    if (fault) *fault = (cnorm_fault){-1, -1, NULL};
    if (count <= 0) return CNORM_ERROR_SIZE;
    if (!layers) return CNORM_ERROR_NULL;
    ptrdiff_t size = 0;
    for (int i = 0; i < count; ++i) {
        const char *field = layer_fault(layers, i, &size);
        if (!field) continue;
        if (fault) fault->layer = i, fault->field = field;
        return CNORM_ERROR_LAYER;
    }
    return CNORM_OK;
}
