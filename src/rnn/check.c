/* cnorm_layers_check: each layer by its table, and the sizes of neighbours. Every run repeats these few dozen
 * comparisons, so that a missing vector or a zeroed struct is an error and not a crash or a wrong result. */
#include "layers.h"

/* the name of what is at fault in layer `index`, or NULL */
static const char *layer_fault(const cnorm_layer *layers, int index)
{
    const cnorm_layer *layer = &layers[index];
    const layer_ops *ops = layer_ops_of(layer->kind);
    if (!ops) return "kind";
    const char *field = ops->check(layer);
    if (field) return field;
    if (index > 0 && ops->inputs(layer) != cnorm_layer_outputs(&layers[index - 1])) return "inputs";
    for (int k = 0; ops->read && k < LAYER_READS; ++k) {
        const layer_read read = ops->read(layer, k);
        if (read.back == 0) break;
        if (read.back > index || cnorm_layer_inputs(&layers[index - read.back]) != read.n) return "back";
    }
    return NULL;
}

cnorm_status cnorm_layers_check(const cnorm_layer *layers, int count, cnorm_fault *fault)
{
    if (fault) *fault = (cnorm_fault){-1, -1, NULL};
    if (count <= 0) return CNORM_ERROR_SIZE;
    if (!layers) return CNORM_ERROR_NULL;
    for (int i = 0; i < count; ++i) {
        const char *field = layer_fault(layers, i);
        if (!field) continue;
        if (fault) fault->layer = i, fault->field = field;
        return CNORM_ERROR_LAYER;
    }
    return CNORM_OK;
}
