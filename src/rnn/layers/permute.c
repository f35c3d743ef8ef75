/* CNORM_LAYER_PERMUTE: the axes of a frame in another order. */
#include <string.h>

#include "frames.h"

#define AXIS(i) LAYER_OPTION(permute, lengths[i], OPTION_SIZE), LAYER_OPTION(permute, axes[i], OPTION_INT)

static const layer_option permute_options[] = {
    LAYER_OPTION(permute, n, OPTION_SIZE), AXIS(0), AXIS(1), AXIS(2), AXIS(3), AXIS(4), AXIS(5), {0},
};
_Static_assert(CNORM_AXES == 6, "an option for each axis");
static const layer_field permute_fields[] = {{0}};

static const char *permute_check(const cnorm_layer *layer)
{
    const cnorm_permute *is = &layer->as.permute;
    const ptrdiff_t most = WIDEST;
    ptrdiff_t total = 1;
    int seen = 0;
    if (is->n < 1 || is->n > most) return "n";
    for (int i = 0; i < CNORM_AXES; ++i) {
        if (is->lengths[i] < 1 || is->lengths[i] > most / total) return "lengths";
        total *= is->lengths[i];
        if (!between(is->axes[i], CNORM_AXES - 1) || seen >> is->axes[i] & 1) return "axes";
        seen |= 1 << is->axes[i];
    }
    return total == is->n ? NULL : "n";
}

/* y's axes: their lengths, and the elements of x from one index to the next */
typedef struct order {
    ptrdiff_t lengths[CNORM_AXES], strides[CNORM_AXES];
} order;

static order order_of(const cnorm_permute *is)
{
    order y;
    ptrdiff_t strides[CNORM_AXES], stride = 1;
    for (int i = CNORM_AXES - 1; i >= 0; --i) strides[i] = stride, stride *= is->lengths[i];
    for (int i = 0; i < CNORM_AXES; ++i) y.lengths[i] = is->lengths[is->axes[i]], y.strides[i] = strides[is->axes[i]];
    return y;
}

/* the element of x that is element `at` of y */
static ptrdiff_t element(const order *y, ptrdiff_t at)
{
    ptrdiff_t from = 0;
    for (int i = CNORM_AXES - 1; i >= 0; --i) {
        from += at % y->lengths[i] * y->strides[i];
        at /= y->lengths[i];
    }
    return from;
}

static layer_read permute_origin(const cnorm_layer *layer, ptrdiff_t at)
{
    const order y = order_of(&layer->as.permute);
    return (layer_read){.back = 0, .start = element(&y, at)};
}

static ptrdiff_t permute_scratch(const cnorm_layer *layer, ptrdiff_t rows)
{
    (void)rows;
    return padded_units(layer->as.permute.n);
}

/* to = from in y's order or, `back`, from y's order into x's: the last two axes at once, which may be a transpose */
static void permuted(const order *y, ptrdiff_t n, int back, const float *from, float *to)
{
    const ptrdiff_t *const lengths = y->lengths + CNORM_AXES - 2, *const strides = y->strides + CNORM_AXES - 2;
    ptrdiff_t start = 0, index[CNORM_AXES] = {0}; /* element(y, at) without divisions */
    for (ptrdiff_t at = 0; at < n; at += lengths[0] * lengths[1]) {
        if (strides[0] == 1 && strides[1] > 1) {
            const const_rows in = back ? (const_rows){from + at, lengths[1]} : (const_rows){from + start, strides[1]};
            const float_rows out = back ? (float_rows){to + start, strides[1]} : (float_rows){to + at, lengths[1]};
            cnorm_transpose(lengths[!back], lengths[back], in, out);
        } else
            for (ptrdiff_t i = 0; i < lengths[0]; ++i) {
                const ptrdiff_t x = start + i * strides[0], row = at + i * lengths[1];
                if (back)
                    for (ptrdiff_t j = 0; j < lengths[1]; ++j) to[x + j * strides[1]] = from[row + j];
                else if (strides[1] == 1) memcpy(to + row, from + x, (size_t)lengths[1] * sizeof *to);
                else
                    for (ptrdiff_t j = 0; j < lengths[1]; ++j) to[row + j] = from[x + j * strides[1]];
            }
        for (int i = CNORM_AXES - 3; i >= 0; --i) {
            start += y->strides[i];
            if (++index[i] < y->lengths[i]) break;
            start -= y->lengths[i] * y->strides[i];
            index[i] = 0;
        }
    }
}

/* A row is collected in scratch if y overlaps x. */
static void permute_run(const layer_run *call)
{
    const ptrdiff_t n = call->layer->as.permute.n;
    const order of = order_of(&call->layer->as.permute);
    for (ptrdiff_t s = 0; s < call->n; ++s) {
        const float *x = call->x.at + s * call->x.stride;
        float *y = call->y.at + s * call->y.stride;
        const int direct = apart(y, n, x, n);
        permuted(&of, n, 0, x, direct ? y : call->scratch);
        if (!direct) memcpy(y, call->scratch, (size_t)n * sizeof *y);
    }
}

static void permute_backward(const layer_backward *call)
{
    const order y = order_of(&call->layer->as.permute);
    for (ptrdiff_t s = 0; call->dx.at && s < call->steps * call->batch; ++s)
        permuted(&y, call->layer->as.permute.n, 1, call->dy.at + s * call->dy.stride,
                 call->dx.at + s * call->dx.stride);
}

const layer_ops cnorm_permute_ops = {
    .name = "permute",
    .options = permute_options,
    .fields = permute_fields,
    .inputs = LAYER_SIZE(permute, n),
    .outputs = LAYER_SIZE(permute, n),
    .check = permute_check,
    .origin = permute_origin,
    .scratch = permute_scratch,
    .run = permute_run,
    .backward = permute_backward,
};
