/* The backward pass: layers from the last to the first; layers/ has what each does. The gradient of a layer's input
 * overwrites that input on the tape; it is the dy of the layer before. */
#include "../dispatch.h"
#include "../float_mode.h"
#include "tape.h"

ptrdiff_t cnorm_backward_floats(const cnorm_tape *tape)
{
    ptrdiff_t largest = 0;
    for (int i = 0; i < tape->count; ++i) {
        const layer_ops *ops = cnorm_layer_ops_of(tape->layers[i].kind);
        if (!ops || !ops->backward_floats) continue;
        largest = larger(largest, ops->backward_floats(&tape->layers[i], tape->steps * tape->batch));
    }
    return largest;
}

/* the gradient of the outputs of layer `index`: that of the next layer's input, on the tape, or the caller's */
static const_rows gradient_of_outputs(const cnorm_tape *tape, int index, const cnorm_backward *call)
{
    if (index + 1 == tape->count) return (const_rows){call->dy, cnorm_layer_outputs(&tape->layers[index])};
    const tape_layer next = tape_layer_of(tape, index + 1, call->first);
    return (const_rows){next.at, next.row};
}

/* dx += the gradients of the input of layer `index` of the later layers that read it, too, in their order */
static void add_reads(const layer_backward *one, const cnorm_tape *tape, int index, const cnorm_backward *call)
{
    for (int i = index + 1; one->dx.at && i < tape->count; ++i) {
        const cnorm_layer *layer = &tape->layers[i];
        const layer_ops *ops = cnorm_layer_ops_of(layer->kind);
        for (int k = 0; k < ops->reads; ++k) {
            const layer_read read = ops->read(layer, k);
            if (read.back == 0) break;
            if (i - read.back != index) continue;
            const tape_layer kept = tape_layer_of(tape, i, call->first);
            const const_rows from = read.kept ? (const_rows){kept.at, kept.row} : gradient_of_outputs(tape, i, call);
            for (ptrdiff_t s = 0; s < one->steps * one->batch; ++s)
                one->kernels->add_f32(read.count, one->dx.at + s * one->dx.stride + read.start,
                                      from.at + s * from.stride + read.gradient);
        }
    }
}

cnorm_status cnorm_run_backward(const cnorm_tape *tape, const cnorm_backward *call)
{
    const cnorm_kernels *kernels = cnorm_active();
    if (!kernels) return CNORM_ERROR_ISA;
    if (!call || !call->dy || (!call->gradients && !call->sums) || !call->scratch) return CNORM_ERROR_NULL;
    const cnorm_status status = tape_check(tape, call->first, call->steps);
    if (status != CNORM_OK) return status;
    const ptrdiff_t state_floats = cnorm_state_floats(tape->layers, tape->count);
    if (state_floats > 0 && !call->dstate) return CNORM_ERROR_NULL;
    if (call->sums && cnorm_sums_floats(tape->layers, tape->count) == 0) return CNORM_ERROR_LAYER;
    const float_mode mode = float_mode_enter();
    ptrdiff_t offset = state_floats;
    for (int i = tape->count - 1; i >= 0; --i) {
        const cnorm_layer *layer = &tape->layers[i];
        const tape_layer here = tape_layer_of(tape, i, call->first);
        offset -= cnorm_layer_state_floats(layer);
        layer_backward one = {.kernels = kernels,
                              .layer = layer,
                              .tape = here,
                              .steps = call->steps,
                              .batch = tape->batch,
                              .dy = gradient_of_outputs(tape, i, call),
                              .dx = i > 0 ? (float_rows){here.at, here.row}
                                          : (float_rows){call->dx, cnorm_layer_inputs(layer)},
                              .gradient = call->sums ? NULL : &call->gradients[i],
                              .dstate = call->dstate ? call->dstate + offset : NULL,
                              .dstate_stride = state_floats,
                              .sums = call->sums,
                              .scratch = call->scratch};
        tape_reads(tape, i, call->first, one.read);
        cnorm_layer_ops_of(layer->kind)->backward(&one);
        add_reads(&one, tape, i, call);
    }
    float_mode_leave(mode);
    return CNORM_OK;
}

ptrdiff_t cnorm_sums_floats(const cnorm_layer *layers, int count)
{
    const layer_ops *ops = count == 1 ? cnorm_layer_ops_of(layers[0].kind) : NULL;
    return ops && ops->sums_floats ? ops->sums_floats(&layers[0]) : 0;
}

cnorm_status cnorm_sum_gradients(const cnorm_tape *const *tapes, ptrdiff_t count, cnorm_sums *sums,
                                 const cnorm_gradient *gradient, float *scratch)
{
    const cnorm_kernels *kernels = cnorm_active();
    if (!kernels) return CNORM_ERROR_ISA;
    if (!tapes || !sums || !sums->memory || !gradient || !scratch) return CNORM_ERROR_NULL;
    if (count < 1) return CNORM_ERROR_SIZE;
    for (ptrdiff_t i = 0; i < count; ++i) {
        const cnorm_status status = tape_check(tapes[i], 0, 1);
        if (status != CNORM_OK) return status;
        if (tapes[i]->layers != tapes[0]->layers || cnorm_sums_floats(tapes[i]->layers, tapes[i]->count) == 0)
            return CNORM_ERROR_LAYER;
    }
    const cnorm_layer *layer = tapes[0]->layers;
    const tape_rows rows = {NULL, cnorm_layer_tape_row(layer), 0, count, tapes};
    const float_mode mode = float_mode_enter();
    cnorm_layer_ops_of(layer->kind)->sum(kernels, layer, rows, sums, gradient, scratch);
    float_mode_leave(mode);
    return CNORM_OK;
}
