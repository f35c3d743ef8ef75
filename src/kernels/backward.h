/* The layout of one row of a layer on the tape, and the argument structs of the backward kernels. */
#ifndef CNORM_BACKWARD_H
#define CNORM_BACKWARD_H

#include "kernels.h"

enum {
    OUTER_ROWS = 128, /* rows that one call of outer_products adds up, a multiple of its blocks of 16 */
    SUM_ROWS = 16,    /* rows in a block of the vectors' sums */
};

/* Offsets, in floats, into one row of a cell on the tape: its input x, the state before the step
 * (state), its products with their rstd (zx, zh), for a second product its result (z2) and its input (in2), and the
 * gates of an LSTM. The backward pass overwrites the input, the products and the second product with their gradients.
 * The gates of a cell whose gradient needs no products lie in the place of both, and then the gradient of both: half of
 * the floats. */
typedef struct tape_row {
    ptrdiff_t x, state, zx, zh, z2, in2, gates, floats;
} tape_row;

static inline tape_row tape_row_of(const cnorm_cell *cell)
{
    tape_row row = {0};
    const cnorm_matrix *second = second_product(cell);
    row.state = padded_units(cell->weight_x.cols);
    row.zx = row.state + cell_state_floats(cell);
    const int one = cell->kind == CNORM_CELL_LSTM && cell->scope == CNORM_SCOPE_NONE && usual_functions(cell);
    row.zh = row.zx + (one ? 0 : input_row_floats(cell));
    row.z2 = row.zh + (one ? lstm_gates_floats(cell) : state_row_floats(cell));
    row.in2 = row.z2 + (second ? packed_rows(second) : 0);
    row.floats = row.in2 + (second ? padded_units(cell->weight_x.units) : 0);
    row.gates = one ? row.zx : row.floats;
    row.floats += one ? 0 : lstm_gates_floats(cell);
    return row;
}

/* Offsets, in floats, of the gradients of a cell's parameter vectors */
typedef struct vector_sums {
    ptrdiff_t bias, gain_x, gain_h, inside_x, inside_h, bias_n, gain_c, bias_c, bias_p, floats;
} vector_sums;

static inline vector_sums vector_sums_of(const cnorm_cell *cell)
{
    const ptrdiff_t width = padded_units(cell->weight_x.units), gates = cell->weight_x.gates * width;
    const ptrdiff_t units = 5 * gates, outputs = units + 3 * width;
    return (vector_sums){
        0,     gates,         2 * gates,         3 * gates, 4 * gates,
        units, units + width, units + 2 * width, outputs,   outputs + padded_units(cell->weight_h.cols)};
}

/* The backward pass of one step of a cell, for n <= SUM_ROWS rows */
typedef struct cnorm_cell_backward {
    const cnorm_cell *cell;
    ptrdiff_t n;
    float *tape; /* of the first row; the next is `stride` floats on */
    ptrdiff_t stride;
    tape_row row;
    float *dh, *dc; /* [n, padded outputs] and [n, padded units], `dstate_stride` apart: gradients of the state
                        after the step, replaced by those of the state before it; dh without W_h' dzh, which the
                        caller adds */
    ptrdiff_t dstate_stride;
    float *sums;    /* vector_sums: each row is added to it */
    float *scratch; /* cell_backward_scratch */
} cnorm_cell_backward;

/* The arrays of cell_backward. With memory NULL only their size. */
typedef struct cell_backward_scratch {
    float *da;  /* [SUM_ROWS, gates, padded units]: where (9) reads the products, too */
    float *dm;  /* [SUM_ROWS, padded units] */
    float *row; /* [6, padded units]: of one row at a time */
    ptrdiff_t floats;
} cell_backward_scratch;

static inline cell_backward_scratch cell_backward_scratch_of(const cnorm_cell *cell, float *memory)
{
    const ptrdiff_t width = padded_units(cell->weight_x.units), item = (ptrdiff_t)sizeof(float);
    layout l = {(char *)memory, 0};
    cell_backward_scratch s;
    s.da = layout_take(&l, SUM_ROWS * cell->weight_x.gates * width * item);
    s.dm = layout_take(&l, SUM_ROWS * width * item);
    s.row = layout_take(&l, 6 * width * item);
    s.floats = l.used / item;
    return s;
}

typedef struct cnorm_outer {
    const cnorm_matrix *w;  /* only its shape is used */
    ptrdiff_t n;            /* rows, at most OUTER_ROWS */
    const float *const *dz; /* n rows [gates * padded units]; the padding is not read */
    const float *const *x;  /* n rows [cols] */
    float *dw;              /* [gates * units, cols] */
    int onto;               /* add to dw */
    float *scratch;         /* outer_floats */
} cnorm_outer;

/* 16 units of dz, and x in strips of up to 32 columns, the last of which may end 16 columns after a panel */
static inline ptrdiff_t outer_floats(const cnorm_matrix *w)
{
    return OUTER_ROWS * (PANEL + (w->cols + PANEL - 1) / PANEL * PANEL);
}

#endif
