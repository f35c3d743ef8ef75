/* The options and fields of a cell, for layers whose struct begins with one. */
#ifndef CNORM_CELL_H
#define CNORM_CELL_H

#include "../layers.h"

#define CELL_OPTIONS                                                                                                   \
    LAYER_OPTION(cell, kind, OPTION_INT), LAYER_OPTION(cell, scope, OPTION_INT),                                       \
        LAYER_OPTION(cell, cell_norm, OPTION_INT), LAYER_OPTION(cell, reset, OPTION_INT),                              \
        LAYER_OPTION(cell, activation, OPTION_INT), LAYER_OPTION(cell, keep, OPTION_INT),                              \
        LAYER_OPTION(cell, eps, OPTION_FLOAT), LAYER_OPTION(cell, cell_clip, OPTION_FLOAT),                            \
        LAYER_OPTION(cell, projection_clip, OPTION_FLOAT), LAYER_OPTION(cell, zoneout, OPTION_FLOAT),                  \
        LAYER_OPTION(cell, recurrent_activation, OPTION_INT), LAYER_OPTION(cell, alpha, OPTION_FLOAT),                 \
        LAYER_OPTION(cell, beta, OPTION_FLOAT), LAYER_OPTION(cell, recurrent_alpha, OPTION_FLOAT),                     \
        LAYER_OPTION(cell, recurrent_beta, OPTION_FLOAT), LAYER_OPTION(cell, clip, OPTION_FLOAT)

#pragma GCC visibility push(hidden)

extern const layer_field cnorm_cell_fields[];

#pragma GCC visibility pop

#endif
