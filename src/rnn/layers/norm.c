/* CNORM_LAYER_NORM: y = LN(x) gain + bias. */
#include "../layers.h"

static vector_shape norm_vector(const cnorm_layer *layer)
{
    return (vector_shape){0, layer->as.norm.n, layer->as.norm.n};
}

static const layer_option norm_options[] = {
    LAYER_OPTION(norm, n, OPTION_SIZE),
    LAYER_OPTION(norm, eps, OPTION_FLOAT),
    {0},
};
static const layer_field norm_fields[] = {
    LAYER_FIELD(norm, gain, norm_vector),
    LAYER_FIELD(norm, bias, norm_vector),
    {0},
};

static const char *norm_check(const cnorm_layer *layer)
{
    if (layer->as.norm.n <= 0) return "n";
    return cnorm_usable_eps(layer->as.norm.eps) ? NULL : "eps";
}

static void norm_run(const layer_run *call)
{
    const cnorm_row_norm *norm = &call->layer->as.norm;
    call->kernels->layer_norm[CNORM_F32](&(cnorm_norm){.rows = call->n,
                                                       .n = norm->n,
                                                       .x = call->x.at,
                                                       .x_stride = call->x.stride,
                                                       .gain = norm->gain,
                                                       .bias = norm->bias,
                                                       .eps = (double)norm->eps,
                                                       .y = call->y.at,
                                                       .y_stride = call->y.stride,
                                                       .stats = call->stats});
}

/* The scratch of the backward pass. With memory NULL only its size. */
typedef struct norm_backward_scratch {
    float *dgain, *dbias; /* [padded n] */
    void *partials;
    ptrdiff_t floats;
} norm_backward_scratch;

static norm_backward_scratch norm_backward_scratch_of(ptrdiff_t rows, ptrdiff_t n, float *memory)
{
    const ptrdiff_t item = (ptrdiff_t)sizeof(float);
    layout l = {(char *)memory, 0};
    norm_backward_scratch s;
    s.dgain = layout_take(&l, padded_units(n) * item);
    s.dbias = layout_take(&l, padded_units(n) * item);
    s.partials = layout_take(&l, cnorm_backward_partials(CNORM_F32, rows, n));
    s.floats = l.used / item;
    return s;
}

static ptrdiff_t norm_backward_floats(const cnorm_layer *layer, ptrdiff_t rows)
{
    return norm_backward_scratch_of(rows, layer->as.norm.n, NULL).floats;
}

static void norm_backward(const layer_backward *call)
{
    const cnorm_row_norm *norm = &call->layer->as.norm;
    const ptrdiff_t n = norm->n, rows = call->steps * call->batch;
    const norm_backward_scratch scratch = norm_backward_scratch_of(rows, n, call->scratch);
    const float_rows dx = call->dx.at ? call->dx : (float_rows){call->tape.at, call->tape.row};
    (void)cnorm_layer_norm_backward(CNORM_F32, &(cnorm_norm_backward){.rows = rows,
                                                                      .n = n,
                                                                      .dy = call->dy.at,
                                                                      .dy_stride = call->dy.stride,
                                                                      .x = call->tape.at,
                                                                      .x_stride = call->tape.row,
                                                                      .gain = norm->gain,
                                                                      .stats = call->tape.stats,
                                                                      .dx = dx.at,
                                                                      .dx_stride = dx.stride,
                                                                      .dgain = scratch.dgain,
                                                                      .dbias = scratch.dbias,
                                                                      .partials = scratch.partials});
    cnorm_copy_gradient(call->gradient->norm.gain, scratch.dgain, n);
    cnorm_copy_gradient(call->gradient->norm.bias, scratch.dbias, n);
}

static ptrdiff_t norm_stats(const cnorm_layer *layer)
{
    (void)layer;
    return 3;
}

const layer_ops cnorm_norm_ops = {
    .name = "norm",
    .options = norm_options,
    .fields = norm_fields,
    .inputs = LAYER_SIZE(norm, n),
    .outputs = LAYER_SIZE(norm, n),
    .check = norm_check,
    .run = norm_run,
    .stats = norm_stats,
    .backward_floats = norm_backward_floats,
    .backward = norm_backward,
};
