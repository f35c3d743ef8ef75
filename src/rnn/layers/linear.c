/* CNORM_LAYER_LINEAR: y = W x + bias. */
#include <string.h>

#include "../../kernels/backward.h"
#include "../layers.h"

static vector_shape linear_units(const cnorm_layer *layer)
{
    const ptrdiff_t units = layer->as.linear.weight.units;
    return (vector_shape){0, units, units};
}

static const layer_option linear_options[] = {{0}};
static const layer_field linear_fields[] = {
    LAYER_FIELD(linear, weight, NULL),
    LAYER_FIELD(linear, bias, linear_units),
    {0},
};

static const char *linear_check(const cnorm_layer *layer)
{
    const cnorm_matrix *w = &layer->as.linear.weight;
    return cnorm_usable_matrix(w, 1, w->units, w->cols) && w->group == 0 ? NULL : "weight";
}

static ptrdiff_t linear_scratch(const cnorm_layer *layer, ptrdiff_t rows)
{
    const cnorm_matrix *w = &layer->as.linear.weight;
    const ptrdiff_t together = rows < CNORM_ROWS ? rows : CNORM_ROWS;
    return together * packed_rows(w) + product_scratch_floats(w, together);
}

static void linear_run(const layer_run *call)
{
    for (ptrdiff_t s = 0; s < call->n; s += CNORM_ROWS)
        call->kernels->linear_step(&call->layer->as.linear, call->n - s < CNORM_ROWS ? call->n - s : CNORM_ROWS,
                                   call->x.at + s * call->x.stride, call->x.stride, call->y.at + s * call->y.stride,
                                   call->y.stride, call->scratch);
}

static int linear_trains(const cnorm_layer *layer) { return layer->as.linear.weight.type == CNORM_WEIGHT_F32; }

/* The scratch of the backward pass. With memory NULL only its size. */
typedef struct linear_backward_scratch {
    float *total, *block; /* [padded units]: dbias, and that of SUM_ROWS rows */
    float *rest;          /* of the kernels, which are called in turn */
    ptrdiff_t floats;
} linear_backward_scratch;

static linear_backward_scratch linear_backward_scratch_of(const cnorm_matrix *w, float *memory)
{
    const ptrdiff_t item = (ptrdiff_t)sizeof(float), vector = padded_units(w->units) * item;
    layout l = {(char *)memory, 0};
    linear_backward_scratch s;
    s.total = layout_take(&l, vector);
    s.block = layout_take(&l, vector);
    s.rest = layout_take(&l, larger(outer_floats(w), CNORM_ROWS * packed_rows(w)) * item);
    s.floats = l.used / item;
    return s;
}

static ptrdiff_t linear_backward_floats(const cnorm_layer *layer, ptrdiff_t rows)
{
    (void)rows;
    return linear_backward_scratch_of(&layer->as.linear.weight, NULL).floats;
}

static void linear_inputs_backward(const layer_backward *call, float *padded)
{
    const cnorm_matrix *w = &call->layer->as.linear.weight;
    const ptrdiff_t rows = call->steps * call->batch, length = packed_rows(w);
    memset(padded, 0, (size_t)(CNORM_ROWS * length) * sizeof *padded);
    for (ptrdiff_t s = 0; s < rows; s += CNORM_ROWS) {
        const ptrdiff_t n = rows - s < CNORM_ROWS ? rows - s : CNORM_ROWS;
        for (ptrdiff_t i = 0; i < n; ++i)
            memcpy(padded + i * length, call->dy.at + (s + i) * call->dy.stride, (size_t)w->units * sizeof *padded);
        call->kernels->products_backward(w, n, padded, length, call->dx.at + s * call->dx.stride, call->dx.stride, 0);
    }
}

static void linear_weight_backward(const layer_backward *call, float *scratch)
{
    const float *dz[OUTER_ROWS], *x[OUTER_ROWS];
    const ptrdiff_t rows = call->steps * call->batch;
    for (ptrdiff_t s = 0, n; s < rows; s += n) {
        n = rows - s < OUTER_ROWS ? rows - s : OUTER_ROWS;
        for (ptrdiff_t i = 0; i < n; ++i) {
            dz[i] = call->dy.at + (s + i) * call->dy.stride;
            x[i] = call->tape.at + (s + i) * call->tape.row;
        }
        call->kernels->outer_products(&(cnorm_outer){.w = &call->layer->as.linear.weight,
                                                     .n = n,
                                                     .dz = dz,
                                                     .x = x,
                                                     .dw = call->gradient->linear.weight,
                                                     .onto = s > 0,
                                                     .scratch = scratch});
    }
}

static void linear_backward(const layer_backward *call)
{
    const cnorm_matrix *w = &call->layer->as.linear.weight;
    const ptrdiff_t rows = call->steps * call->batch, units = w->units;
    const linear_backward_scratch scratch = linear_backward_scratch_of(w, call->scratch);
    memset(scratch.total, 0, (size_t)units * sizeof *scratch.total);
    memset(scratch.block, 0, (size_t)units * sizeof *scratch.block);
    for (ptrdiff_t s = 0; s < rows; ++s) {
        call->kernels->add_f32(units, scratch.block, call->dy.at + s * call->dy.stride);
        if ((s + 1) % SUM_ROWS == 0 || s + 1 == rows)
            cnorm_add_block(call->kernels, units, scratch.total, scratch.block);
    }
    cnorm_copy_gradient(call->gradient->linear.bias, scratch.total, units);
    if (call->gradient->linear.weight) linear_weight_backward(call, scratch.rest);
    if (call->dx.at) linear_inputs_backward(call, scratch.rest);
}

const layer_ops cnorm_linear_ops = {
    .name = "linear",
    .options = linear_options,
    .fields = linear_fields,
    .inputs = LAYER_SIZE(linear, weight.cols),
    .outputs = LAYER_SIZE(linear, weight.units),
    .check = linear_check,
    .scratch = linear_scratch,
    .run = linear_run,
    .trains = linear_trains,
    .backward_floats = linear_backward_floats,
    .backward = linear_backward,
};
