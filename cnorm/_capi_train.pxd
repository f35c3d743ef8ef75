# Mirror of src/include/cnorm_train.h; no logic.
from cnorm._capi cimport cnorm_layer, cnorm_status


cdef extern from "cnorm_train.h" nogil:
    ctypedef struct cnorm_tape:
        const cnorm_layer *layers
        int count
        ptrdiff_t steps, batch
        float *memory

    ptrdiff_t cnorm_tape_floats(const cnorm_tape *tape)
    cnorm_status cnorm_run_tape(const cnorm_tape *tape, ptrdiff_t first, ptrdiff_t steps, const float *x, float *state,
                                float *scratch, float *y)
    cnorm_status cnorm_tape_drop(const cnorm_tape *tape, ptrdiff_t first, ptrdiff_t end)

    ctypedef struct cnorm_gradient:
        float *weight_x
        float *weight_h
        float *weight_n
        float *weight_p
        float *inside_x
        float *inside_h
        float *gain_x
        float *gain_h
        float *bias
        float *bias_n
        float *gain_c
        float *bias_c
        float *bias_p

    ctypedef struct cnorm_backward:
        ptrdiff_t first, steps
        const float *dy
        float *dx
        float *dstate
        const cnorm_gradient *gradients
        float *scratch

    ptrdiff_t cnorm_backward_floats(const cnorm_tape *tape)
    cnorm_status cnorm_run_backward(const cnorm_tape *tape, const cnorm_backward *call)

    ctypedef struct cnorm_adam:
        double rate, beta1, beta2, eps, correction1, correction2

    cnorm_status cnorm_adam_update(const cnorm_adam *adam, ptrdiff_t n, const float *gradient, double scale,
                                   float *weight, float *m, float *v)
    cnorm_status cnorm_sgd_update(double rate, double momentum, ptrdiff_t n, const float *gradient, double scale,
                                  float *weight, float *velocity)
    double cnorm_square_sum(ptrdiff_t n, const float *g)
