/* CNORM_LAYER_CONCAT: parts of its input and of those of earlier layers, concatenated. */
#include <string.h>

#include "../layers.h"

#define PART(i)                                                                                                        \
    LAYER_OPTION(concat, parts[i].back, OPTION_INT), LAYER_OPTION(concat, parts[i].n, OPTION_SIZE),                    \
        LAYER_OPTION(concat, parts[i].start, OPTION_SIZE), LAYER_OPTION(concat, parts[i].count, OPTION_SIZE)

static const layer_option concat_options[] = {
    LAYER_OPTION(concat, n, OPTION_SIZE),
    LAYER_OPTION(concat, outputs, OPTION_SIZE),
    PART(0),
    PART(1),
    PART(2),
    PART(3),
    PART(4),
    PART(5),
    PART(6),
    PART(7),
    {0},
};
_Static_assert(CNORM_PARTS == 8, "an option for each part");
static const layer_field concat_fields[] = {{0}};

static int parts_of(const cnorm_concat *is)
{
    int count = 0;
    while (count < CNORM_PARTS && is->parts[count].count != 0) ++count;
    return count;
}

static const char *concat_check(const cnorm_layer *layer)
{
    const cnorm_concat *is = &layer->as.concat;
    ptrdiff_t left = is->outputs;
    if (is->n <= 0) return "n";
    if (is->outputs <= 0) return "outputs";
    for (int i = 0; i < parts_of(is); ++i) {
        const struct cnorm_part *part = &is->parts[i];
        if (part->back < 0 || part->start < 0 || part->count < 0 || part->count > left) return "parts";
        if (part->start > part->n || part->count > part->n - part->start) return "parts";
        if (part->back == 0 && part->n != is->n) return "parts";
        left -= part->count;
    }
    return left == 0 ? NULL : "outputs";
}

/* the k-th part of an earlier input */
static layer_read concat_read(const cnorm_layer *layer, int k)
{
    const cnorm_concat *is = &layer->as.concat;
    ptrdiff_t offset = 0;
    for (int i = 0; i < parts_of(is); offset += is->parts[i++].count) {
        const struct cnorm_part *part = &is->parts[i];
        if (part->back > 0 && k-- == 0) return (layer_read){part->back, part->n, part->start, part->count, offset, 0};
    }
    return (layer_read){0};
}

static layer_read concat_origin(const cnorm_layer *layer, ptrdiff_t element)
{
    const cnorm_concat *is = &layer->as.concat;
    int i = 0;
    while (element >= is->parts[i].count) element -= is->parts[i++].count;
    return (layer_read){.back = is->parts[i].back, .start = is->parts[i].start + element};
}

static layer_read concat_part(const cnorm_layer *layer)
{
    const struct cnorm_part *part = layer->as.concat.parts;
    if (parts_of(&layer->as.concat) > 1) return (layer_read){0};
    return (layer_read){part->back, part->n, part->start, part->count, 0, 0};
}

static ptrdiff_t concat_scratch(const cnorm_layer *layer, ptrdiff_t rows)
{
    (void)rows;
    return padded_units(layer->as.concat.outputs);
}

/* A row is collected in scratch if y overlaps a part of it, which may be of the input of the first layer. */
static void concat_run(const layer_run *call)
{
    const cnorm_concat *is = &call->layer->as.concat;
    const int count = parts_of(is);
    for (ptrdiff_t s = 0; s < call->n; ++s) {
        const float *from[CNORM_PARTS];
        float *const y = call->y.at + s * call->y.stride;
        int direct = 1;
        for (int i = 0, k = 0; i < count; ++i) {
            const const_rows rows = is->parts[i].back > 0 ? call->read[k++] : call->x;
            from[i] = rows.at + s * rows.stride + is->parts[i].start;
            direct = direct && apart(y, is->outputs, from[i], is->parts[i].count);
        }
        float *to = direct ? y : call->scratch;
        for (int i = 0; i < count; to += is->parts[i++].count)
            memcpy(to, from[i], (size_t)is->parts[i].count * sizeof *to);
        if (!direct) memcpy(y, call->scratch, (size_t)is->outputs * sizeof *to);
    }
}

/* the gradient of a part of an earlier input is in dy; the others are those of x */
static void concat_backward(const layer_backward *call)
{
    const cnorm_concat *is = &call->layer->as.concat;
    const int count = parts_of(is);
    for (ptrdiff_t s = 0; call->dx.at && s < call->steps * call->batch; ++s) {
        const float *dy = call->dy.at + s * call->dy.stride;
        float *dx = call->dx.at + s * call->dx.stride;
        memset(dx, 0, (size_t)is->n * sizeof *dx);
        for (int i = 0; i < count; dy += is->parts[i++].count)
            if (is->parts[i].back == 0) call->kernels->add_f32(is->parts[i].count, dx + is->parts[i].start, dy);
    }
}

const layer_ops cnorm_concat_ops = {
    .name = "concat",
    .options = concat_options,
    .fields = concat_fields,
    .inputs = LAYER_SIZE(concat, n),
    .outputs = LAYER_SIZE(concat, outputs),
    .check = concat_check,
    .origin = concat_origin,
    .reads = LAYER_READS,
    .read = concat_read,
    .part = concat_part,
    .scratch = concat_scratch,
    .run = concat_run,
    .backward = concat_backward,
};
