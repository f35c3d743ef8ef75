/* The layout of a tape, shared by the forward pass that records it and the backward pass. */
#ifndef CNORM_TAPE_H
#define CNORM_TAPE_H

#include "layers.h"

/* those of a row */
static inline ptrdiff_t tape_stats(const cnorm_layer *layer)
{
    const layer_ops *ops = cnorm_layer_ops_of(layer->kind);
    return ops && ops->stats ? ops->stats(layer) : 0;
}

static inline ptrdiff_t tape_stats_floats(const cnorm_layer *layer, ptrdiff_t rows)
{
    return padded_units(tape_stats(layer) * rows);
}

/* layer `index`, from step `first` on */
static inline tape_layer tape_layer_of(const cnorm_tape *tape, ptrdiff_t index, ptrdiff_t first)
{
    const ptrdiff_t rows = tape->steps * tape->batch, skipped = first * tape->batch;
    float *at = tape->memory;
    for (ptrdiff_t i = 0; i < index; ++i)
        at += rows * cnorm_layer_tape_row(&tape->layers[i]) + tape_stats_floats(&tape->layers[i], rows);
    const cnorm_layer *layer = &tape->layers[index];
    const ptrdiff_t row = cnorm_layer_tape_row(layer);
    return (tape_layer){row, at + skipped * row, at + rows * row + tape_stats(layer) * skipped};
}

/* The inputs of earlier layers that layer `index` reads, from step `first` on. */
static inline void tape_reads(const cnorm_tape *tape, int index, ptrdiff_t first, const_rows read[LAYER_READS])
{
    const layer_ops *ops = cnorm_layer_ops_of(tape->layers[index].kind);
    for (int k = 0; k < ops->reads; ++k) {
        const ptrdiff_t back = ops->read(&tape->layers[index], k).back;
        if (back == 0) break;
        const tape_layer from = tape_layer_of(tape, index - back, first);
        read[k] = (const_rows){from.at, from.row};
    }
}

/* whether the layer can be trained: only float32 weights have a gradient */
static inline int tape_trains(const cnorm_layer *layer)
{
    const layer_ops *ops = cnorm_layer_ops_of(layer->kind);
    return !ops->trains || ops->trains(layer);
}

/* CNORM_OK if the tape is valid and has these steps */
static inline cnorm_status tape_check(const cnorm_tape *tape, ptrdiff_t first, ptrdiff_t steps)
{
    if (!tape || !tape->layers || !tape->memory) return CNORM_ERROR_NULL;
    const cnorm_status layers = cnorm_layers_check(tape->layers, tape->count, NULL);
    if (layers != CNORM_OK) return layers;
    for (int i = 0; i < tape->count; ++i)
        if (!tape_trains(&tape->layers[i])) return CNORM_ERROR_LAYER;
    if (cnorm_tape_floats(tape) == 0) return CNORM_ERROR_SIZE;
    return first < 0 || steps < 1 || steps > tape->steps || first > tape->steps - steps ? CNORM_ERROR_SIZE : CNORM_OK;
}

#endif
