/* The layout of a tape, shared by the forward pass that records it and the backward pass. */
#ifndef CNORM_TAPE_H
#define CNORM_TAPE_H

#include "../kernels/backward.h"
#include "cnorm_train.h"

/* One layer: rows [steps, batch, row.floats], and for a CNORM_LAYER_NORM stats [steps, batch, 3] */
typedef struct tape_layer {
    tape_row row;
    float *at, *stats;
} tape_layer;

static inline ptrdiff_t tape_stats_floats(const cnorm_layer *layer, ptrdiff_t rows)
{
    return layer->kind == CNORM_LAYER_NORM ? padded_units(3 * rows) : 0;
}

/* layer `index`, from step `first` on */
static inline tape_layer tape_layer_of(const cnorm_tape *tape, int index, ptrdiff_t first)
{
    const ptrdiff_t rows = tape->steps * tape->batch;
    float *at = tape->memory;
    for (int i = 0; i < index; ++i)
        at += rows * tape_row_of(&tape->layers[i]).floats + tape_stats_floats(&tape->layers[i], rows);
    const tape_row row = tape_row_of(&tape->layers[index]);
    const ptrdiff_t skipped = first * tape->batch;
    return (tape_layer){row, at + skipped * row.floats, at + rows * row.floats + 3 * skipped};
}

/* whether the layer can be trained: only float32 weights have a gradient */
static inline int tape_trains(const cnorm_layer *layer)
{
    if (layer->kind == CNORM_LAYER_LINEAR) return layer->as.linear.weight.type == CNORM_WEIGHT_F32;
    if (layer->kind != CNORM_LAYER_CELL) return 1;
    const cnorm_cell *cell = &layer->as.cell;
    return cell->weight_x.type == CNORM_WEIGHT_F32 && cell->weight_h.type == CNORM_WEIGHT_F32 &&
           cell->weight_n.type == CNORM_WEIGHT_F32 && cell->weight_p.type == CNORM_WEIGHT_F32;
}

/* CNORM_OK if the tape is valid and has these steps */
static inline cnorm_status tape_check(const cnorm_tape *tape, ptrdiff_t first, ptrdiff_t steps)
{
    if (!tape || !tape->layers || !tape->memory) return CNORM_ERROR_NULL;
    const cnorm_status layers = cnorm_layers_check(tape->layers, tape->count);
    if (layers != CNORM_OK) return layers;
    for (int i = 0; i < tape->count; ++i)
        if (!tape_trains(&tape->layers[i])) return CNORM_ERROR_LAYER;
    if (cnorm_tape_floats(tape) == 0) return CNORM_ERROR_SIZE;
    return first < 0 || steps < 1 || steps > tape->steps || first > tape->steps - steps ? CNORM_ERROR_SIZE : CNORM_OK;
}

#endif
