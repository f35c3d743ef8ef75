/* CNORM_LAYER_MAX_POOL: the largest of each window of a frame [channels, positions]. */
#include <string.h>

#include "../layers.h"

static const layer_option pool_options[] = {
    LAYER_OPTION(max_pool, channels, OPTION_SIZE),
    LAYER_OPTION(max_pool, positions, OPTION_SIZE),
    LAYER_OPTION(max_pool, taps, OPTION_SIZE),
    LAYER_OPTION(max_pool, stride, OPTION_SIZE),
    LAYER_OPTION(max_pool, dilation, OPTION_SIZE),
    LAYER_OPTION(max_pool, before, OPTION_SIZE),
    LAYER_OPTION(max_pool, inputs, OPTION_SIZE),
    LAYER_OPTION(max_pool, results, OPTION_SIZE),
    {0},
};
static const layer_field pool_fields[] = {{0}};

static ptrdiff_t places(const cnorm_pool *pool) { return pool->results / pool->channels; }

/* Each window has a position of the frame: the first ends in it, the last begins in it, and none steps over it. */
static const char *pool_check(const cnorm_layer *layer)
{
    const cnorm_pool *pool = &layer->as.max_pool;
    const ptrdiff_t most = WIDEST;
    if (pool->channels < 1 || pool->channels > most) return "channels";
    if (pool->positions < 1 || pool->positions > most / pool->channels) return "positions";
    if (pool->taps < 1 || pool->taps > most) return "taps";
    if (pool->dilation < 1 || pool->dilation > most / pool->taps) return "dilation";
    if (pool->before < 0 || pool->before > (pool->taps - 1) * pool->dilation) return "before";
    if (pool->before > 0 && pool->dilation > pool->positions) return "dilation";
    if (pool->inputs != pool->channels * pool->positions) return "inputs";
    if (pool->results < 1 || pool->results > most || pool->results % pool->channels) return "results";
    if (pool->stride < 1 || pool->stride > most) return "stride";
    const ptrdiff_t last = places(pool) - 1;
    return last > (pool->positions - 1 + pool->before) / pool->stride ? "results" : NULL;
}

/* The place in x [positions] of the first of the largest numbers under place q; that of a NaN if there is one. */
static ptrdiff_t largest(const cnorm_pool *pool, const float *x, ptrdiff_t q)
{
    ptrdiff_t found = -1;
    for (ptrdiff_t t = 0; t < pool->taps; ++t) {
        const ptrdiff_t at = q * pool->stride + t * pool->dilation - pool->before;
        if (at < 0) continue;
        if (at >= pool->positions) break;
        if (found < 0 || x[at] > x[found] || (x[at] != x[at] && x[found] == x[found])) found = at;
    }
    return found;
}

static ptrdiff_t pool_scratch(const cnorm_layer *layer, ptrdiff_t rows)
{
    (void)rows;
    return padded_units(layer->as.max_pool.results);
}

/* A row is collected in scratch, because y may be x. */
static void pool_run(const layer_run *call)
{
    const cnorm_pool *pool = &call->layer->as.max_pool;
    const ptrdiff_t count = places(pool);
    for (ptrdiff_t s = 0; s < call->n; ++s) {
        for (ptrdiff_t c = 0; c < pool->channels; ++c) {
            const float *x = call->x.at + s * call->x.stride + c * pool->positions;
            for (ptrdiff_t q = 0; q < count; ++q) call->scratch[c * count + q] = x[largest(pool, x, q)];
        }
        memcpy(call->y.at + s * call->y.stride, call->scratch, (size_t)pool->results * sizeof(float));
    }
}

static ptrdiff_t pool_backward_floats(const cnorm_layer *layer, ptrdiff_t rows)
{
    (void)rows;
    return padded_units(layer->as.max_pool.inputs);
}

static void pool_backward(const layer_backward *call)
{
    const cnorm_pool *pool = &call->layer->as.max_pool;
    const ptrdiff_t count = places(pool), positions = pool->positions;
    for (ptrdiff_t s = 0; call->dx.at && s < call->steps * call->batch; ++s) {
        const float *x = call->tape.at + s * call->tape.row, *dy = call->dy.at + s * call->dy.stride;
        memset(call->scratch, 0, (size_t)pool->inputs * sizeof(float));
        for (ptrdiff_t c = 0; c < pool->channels; ++c)
            for (ptrdiff_t q = 0; q < count; ++q)
                call->scratch[c * positions + largest(pool, x + c * positions, q)] += dy[c * count + q];
        memcpy(call->dx.at + s * call->dx.stride, call->scratch, (size_t)pool->inputs * sizeof(float)); /* may be x */
    }
}

const layer_ops cnorm_max_pool_ops = {
    .name = "max_pool",
    .options = pool_options,
    .fields = pool_fields,
    .inputs = LAYER_SIZE(max_pool, inputs),
    .outputs = LAYER_SIZE(max_pool, results),
    .check = pool_check,
    .scratch = pool_scratch,
    .run = pool_run,
    .backward_floats = pool_backward_floats,
    .backward = pool_backward,
};
