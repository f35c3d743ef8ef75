/* The table of layers, and what follows from it for one layer and for a list of them. */
#include "layers.h"

#include <string.h>

#define LAYER(name, type, member) &cnorm_##member##_ops,
const layer_ops *const cnorm_layer_kinds[LAYER_KINDS] = {CNORM_LAYERS(LAYER)};
#undef LAYER

ptrdiff_t cnorm_layer_inputs(const cnorm_layer *layer)
{
    const layer_ops *ops = cnorm_layer_ops_of(layer->kind);
    return ops ? layer_size(layer, ops->inputs) : 0;
}

ptrdiff_t cnorm_layer_outputs(const cnorm_layer *layer)
{
    const layer_ops *ops = cnorm_layer_ops_of(layer->kind);
    return ops ? layer_size(layer, ops->outputs) : 0;
}

ptrdiff_t cnorm_layer_state_floats(const cnorm_layer *layer)
{
    const layer_ops *ops = cnorm_layer_ops_of(layer->kind);
    ptrdiff_t floats = 0;
    for (int k = 0; ops && ops->state && k < LAYER_STATES; ++k) floats += padded_units(ops->state(layer, k));
    return floats;
}

ptrdiff_t cnorm_state_floats(const cnorm_layer *layers, int count)
{
    ptrdiff_t total = 0;
    for (int i = 0; i < count; ++i) total += cnorm_layer_state_floats(&layers[i]);
    return total;
}

ptrdiff_t cnorm_layer_scratch(const cnorm_layer *layer, ptrdiff_t rows)
{
    const layer_ops *ops = cnorm_layer_ops_of(layer->kind);
    return ops && ops->scratch ? ops->scratch(layer, rows) : 0;
}

ptrdiff_t cnorm_layer_tape_row(const cnorm_layer *layer)
{
    const layer_ops *ops = cnorm_layer_ops_of(layer->kind);
    return ops && ops->tape_row ? ops->tape_row(layer) : padded_units(cnorm_layer_inputs(layer));
}

double cnorm_layer_number(const cnorm_layer *layer, const layer_option *option)
{
    const char *at = (const char *)layer + option->at;
    switch (option->type) {
    case OPTION_SIZE: return (double)*(const ptrdiff_t *)(const void *)at;
    case OPTION_FLOAT: return (double)*(const float *)(const void *)at;
    case OPTION_INT: break;
    }
    int value; /* or an enumeration, whose type may be unsigned */
    memcpy(&value, at, sizeof value);
    return value;
}

_Static_assert(sizeof(cnorm_scope) == sizeof(int), "an enumeration is an option of type int");

void cnorm_layer_set_number(cnorm_layer *layer, const layer_option *option, double value)
{
    char *at = (char *)layer + option->at;
    const int number = option->type == OPTION_INT ? (int)value : 0;
    switch (option->type) {
    case OPTION_SIZE: *(ptrdiff_t *)(void *)at = (ptrdiff_t)value; break;
    case OPTION_FLOAT: *(float *)(void *)at = (float)value; break;
    case OPTION_INT: memcpy(at, &number, sizeof number); break;
    }
}
