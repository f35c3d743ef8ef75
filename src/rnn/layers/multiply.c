/* CNORM_LAYER_MULTIPLY: y = x times the input of an earlier layer. */
#include "../../simd/vector.h" /* turns off contraction to FMA */
#include "../layers.h"

static const layer_option multiply_options[] = {
    LAYER_OPTION(multiply, n, OPTION_SIZE),
    LAYER_OPTION(multiply, back, OPTION_INT),
    {0},
};
static const layer_field multiply_fields[] = {{0}};

static const char *multiply_check(const cnorm_layer *layer)
{
    if (layer->as.multiply.n <= 0) return "n";
    return layer->as.multiply.back > 0 ? NULL : "back";
}

/* its gradient is dy x, which multiply_backward leaves behind the place of x */
static layer_read multiply_read(const cnorm_layer *layer, int k)
{
    (void)k;
    const ptrdiff_t n = layer->as.multiply.n;
    return (layer_read){.back = layer->as.multiply.back, .n = n, .count = n, .gradient = padded_units(n), .kept = 1};
}

static ptrdiff_t multiply_tape_row(const cnorm_layer *layer) { return 2 * padded_units(layer->as.multiply.n); }

static void multiply_run(const layer_run *call)
{
    const ptrdiff_t n = call->layer->as.multiply.n;
    for (ptrdiff_t s = 0; s < call->n; ++s) {
        const float *x = call->x.at + s * call->x.stride, *other = call->read[0].at + s * call->read[0].stride;
        float *y = call->y.at + s * call->y.stride;
        for (ptrdiff_t j = 0; j < n; ++j) y[j] = x[j] * other[j];
    }
}

static void multiply_backward(const layer_backward *call)
{
    const ptrdiff_t n = call->layer->as.multiply.n;
    for (ptrdiff_t s = 0; s < call->steps * call->batch; ++s) {
        float *x = call->tape.at + s * call->tape.row, *dother = x + padded_units(n);
        const float *other = call->read[0].at + s * call->read[0].stride, *dy = call->dy.at + s * call->dy.stride;
        float *dx = call->dx.at + s * call->dx.stride; /* may be x */
        for (ptrdiff_t j = 0; j < n; ++j) {
            dother[j] = dy[j] * x[j];
            dx[j] = dy[j] * other[j];
        }
    }
}

const layer_ops cnorm_multiply_ops = {
    .name = "multiply",
    .options = multiply_options,
    .fields = multiply_fields,
    .inputs = LAYER_SIZE(multiply, n),
    .outputs = LAYER_SIZE(multiply, n),
    .check = multiply_check,
    .reads = 1,
    .read = multiply_read,
    .run = multiply_run,
    .tape_row = multiply_tape_row,
    .backward = multiply_backward,
};
