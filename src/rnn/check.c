/* cnorm_layers_check: kinds, sizes and vectors of layers as cnorm_rnn.h defines them. Every run repeats these few dozen
 * comparisons, so that a missing vector or a zeroed struct is an error and not a crash or a wrong result. */
#include "cnorm_rnn.h"

#include <math.h>

#include "../int8/units.h"

static int matrix_of(const cnorm_matrix *w, ptrdiff_t gates, ptrdiff_t units, ptrdiff_t cols)
{
    return w->panels && w->gates == gates && w->units == units && w->cols == cols && w->group >= 0 &&
           w->group <= gates && cnorm_matrix_bytes(w) > 0 &&
           (w->type != CNORM_WEIGHT_I8 || (w->levels > 0 && w->levels <= CNORM_INT8_LEVELS));
}

static int between(int value, int last) { return value >= 0 && value <= last; }
static int usable_eps(float eps) { return eps >= 0 && eps < INFINITY; }

/* whether the cell has the vectors, eps and groups that its scope needs, and no groups if it has no norm */
static int scope_fits(const cnorm_cell *cell)
{
    const int normalised = cell->scope != CNORM_SCOPE_NONE;
    if (cell->scope == CNORM_SCOPE_SPLIT && !cell->gain_x) return 0;
    if (normalised && (!cell->gain_h || !usable_eps(cell->eps))) return 0;
    if (normalised != (cell->weight_h.group > 0) || normalised != (cell->weight_x.group > 0)) return 0;
    return cell->scope != CNORM_SCOPE_SUM || (!cell->inside_h && cell->weight_x.group == cell->weight_h.group);
}

static int lstm_fits(const cnorm_cell *cell)
{
    const ptrdiff_t units = cell->weight_x.units, outputs = cell->weight_h.cols;
    if (!between((int)cell->cell_norm, CNORM_CELL_NORM_CARRY) || !(cell->cell_clip > 0)) return 0;
    if (cell->cell_norm != CNORM_CELL_NORM_NONE && !usable_eps(cell->eps)) return 0;
    if (!cell->weight_p.panels) return outputs == units;
    return matrix_of(&cell->weight_p, 1, outputs, units) && cell->weight_p.group == 0 && cell->projection_clip > 0;
}

static int gru_fits(const cnorm_cell *cell)
{
    const ptrdiff_t units = cell->weight_x.units;
    if (!between((int)cell->reset, CNORM_RESET_BEFORE) || cell->weight_p.panels) return 0;
    if (cell->reset == CNORM_RESET_AFTER && cell->scope == CNORM_SCOPE_SUM) return 0;
    if (cell->reset != CNORM_RESET_BEFORE) return !cell->weight_n.panels;
    return cell->scope == CNORM_SCOPE_NONE && matrix_of(&cell->weight_n, 1, units, units) && cell->weight_n.group == 0;
}

static int cell_fits(const cnorm_cell *cell)
{
    if (!between((int)cell->kind, CNORM_CELL_RNN) || !between((int)cell->scope, CNORM_SCOPE_SUM)) return 0;
    const ptrdiff_t units = cell->weight_x.units, inputs = cell->weight_x.cols;
    const ptrdiff_t gates = cell->kind == CNORM_CELL_LSTM ? 4 : cell->kind == CNORM_CELL_GRU ? 3 : 1;
    const int reset_before = cell->kind == CNORM_CELL_GRU && cell->reset == CNORM_RESET_BEFORE;
    const ptrdiff_t outputs = cell->kind == CNORM_CELL_LSTM ? cell->weight_h.cols : units;
    if (!matrix_of(&cell->weight_x, gates, units, inputs)) return 0;
    if (!matrix_of(&cell->weight_h, reset_before ? 2 : gates, units, outputs)) return 0;
    if (!cell->bias || !scope_fits(cell) || !(cell->zoneout >= 0 && cell->zoneout <= 1)) return 0;
    if (cell->kind == CNORM_CELL_LSTM) return lstm_fits(cell) && !cell->weight_n.panels;
    if (cell->kind == CNORM_CELL_GRU) return gru_fits(cell);
    return between((int)cell->activation, CNORM_ACTIVATION_SIGMOID) && !cell->weight_n.panels && !cell->weight_p.panels;
}

static int layer_fits(const cnorm_layer *layer)
{
    switch (layer->kind) {
    case CNORM_LAYER_LINEAR: {
        const cnorm_matrix *w = &layer->as.linear.weight;
        return matrix_of(w, 1, w->units, w->cols) && w->group == 0;
    }
    case CNORM_LAYER_CELL: return cell_fits(&layer->as.cell);
    case CNORM_LAYER_NORM: return layer->as.norm.n > 0 && usable_eps(layer->as.norm.eps);
    case CNORM_LAYER_ACTIVATION:
        return layer->as.activation.n > 0 && between((int)layer->as.activation.f, CNORM_ACTIVATION_SIGMOID);
    case CNORM_LAYER_RESIDUAL: return layer->as.residual.n > 0 && layer->as.residual.back > 0;
    }
    return 0;
}

cnorm_status cnorm_layers_check(const cnorm_layer *layers, int count)
{
    if (count <= 0) return CNORM_ERROR_SIZE;
    if (!layers) return CNORM_ERROR_NULL;
    for (int i = 0; i < count; ++i) {
        if (!layer_fits(&layers[i])) return CNORM_ERROR_LAYER;
        if (i > 0 && cnorm_layer_inputs(&layers[i]) != cnorm_layer_outputs(&layers[i - 1])) return CNORM_ERROR_LAYER;
        if (layers[i].kind != CNORM_LAYER_RESIDUAL) continue;
        const int from = i - layers[i].as.residual.back; /* the layer whose input is added */
        if (from < 0 || cnorm_layer_inputs(&layers[from]) != layers[i].as.residual.n) return CNORM_ERROR_LAYER;
    }
    return CNORM_OK;
}
