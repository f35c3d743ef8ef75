/* CNORM_LAYER_ACTIVATION: y = f(x), element by element; softmax over the frame. */
#include <math.h>
#include <string.h>

#include "../../kernels/backward.h"
#include "../../simd/vector.h" /* turns off contraction to FMA */
#include "../layers.h"

static vector_shape slope_vector(const cnorm_layer *layer)
{
    const cnorm_elementwise *is = &layer->as.activation;
    return (vector_shape){0, is->n, is->f == CNORM_ACTIVATION_PRELU ? is->n : 0};
}

static const layer_option activation_options[] = {
    LAYER_OPTION(activation, n, OPTION_SIZE),
    LAYER_OPTION(activation, f, OPTION_INT),
    LAYER_OPTION(activation, alpha, OPTION_FLOAT),
    LAYER_OPTION(activation, beta, OPTION_FLOAT),
    {0},
};
static const layer_field activation_fields[] = {
    LAYER_FIELD(activation, slope, slope_vector),
    {0},
};

static const char *activation_check(const cnorm_layer *layer)
{
    const cnorm_elementwise *is = &layer->as.activation;
    if (is->n <= 0) return "n";
    if (!between((int)is->f, CNORM_ACTIVATIONS - 1)) return "f";
    if (is->f == CNORM_ACTIVATION_PRELU) return is->slope ? NULL : "slope";
    if (is->f == CNORM_ACTIVATION_CLIP) return is->alpha <= is->beta ? NULL : "beta"; /* NaN is none */
    if (!isfinite(is->alpha)) return "alpha";
    return isfinite(is->beta) ? NULL : "beta";
}

static void activation_run(const layer_run *call)
{
    const cnorm_elementwise *is = &call->layer->as.activation;
    for (ptrdiff_t s = 0; s < call->n; ++s) {
        const float *x = call->x.at + s * call->x.stride;
        float *y = call->y.at + s * call->y.stride;
        if (is->f == CNORM_ACTIVATION_PRELU) call->kernels->prelu(is->n, is->slope, x, y);
        else call->kernels->activation_f32(is, x, y);
    }
}

/* prelu: dslope, and that of SUM_ROWS rows, each [padded n] */
static ptrdiff_t activation_backward_floats(const cnorm_layer *layer, ptrdiff_t rows)
{
    (void)rows;
    return layer->as.activation.f == CNORM_ACTIVATION_PRELU ? 2 * padded_units(layer->as.activation.n) : 0;
}

static void prelu_backward(const layer_backward *call)
{
    const cnorm_elementwise *is = &call->layer->as.activation;
    const ptrdiff_t n = is->n, rows = call->steps * call->batch;
    float *total = call->scratch, *block = total + padded_units(n);
    memset(total, 0, (size_t)activation_backward_floats(call->layer, rows) * sizeof *total);
    for (ptrdiff_t s = 0; s < rows; ++s) {
        const float *x = call->tape.at + s * call->tape.row, *dy = call->dy.at + s * call->dy.stride;
        float *dx = call->dx.at ? call->dx.at + s * call->dx.stride : NULL; /* may be x */
        for (ptrdiff_t j = 0; j < n; ++j) {
            const float slope = x[j] > 0 ? 1 : is->slope[j];
            block[j] += x[j] < 0 ? dy[j] * x[j] : 0;
            if (dx) dx[j] = dy[j] * slope;
        }
        if ((s + 1) % SUM_ROWS == 0 || s + 1 == rows) cnorm_add_block(call->kernels, n, total, block);
    }
    cnorm_copy_gradient(call->gradient->activation.slope, total, n);
}

static void activation_backward_rows(const layer_backward *call)
{
    const cnorm_elementwise *is = &call->layer->as.activation;
    if (is->f == CNORM_ACTIVATION_PRELU) {
        prelu_backward(call);
        return;
    }
    for (ptrdiff_t s = 0; call->dx.at && s < call->steps * call->batch; ++s)
        call->kernels->activation_backward_f32(is, call->tape.at + s * call->tape.row,
                                               call->dy.at + s * call->dy.stride, call->dx.at + s * call->dx.stride);
}

const layer_ops cnorm_activation_ops = {
    .name = "activation",
    .options = activation_options,
    .fields = activation_fields,
    .inputs = LAYER_SIZE(activation, n),
    .outputs = LAYER_SIZE(activation, n),
    .check = activation_check,
    .run = activation_run,
    .backward_floats = activation_backward_floats,
    .backward = activation_backward_rows,
};
