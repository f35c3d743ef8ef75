# The C library for Cython modules: they call the functions of the loaded package, see include/cnorm_python.h. Only
# declarations; the headers in the folder cnorm.get_include() are the manual.
#
#     from cnorm.capi cimport *
#     cnorm_import()            once in each module, before any other function
#
# Pointers to arrays of any cnorm_dtype are void *.
from libc.stdint cimport uint64_t

cdef extern from "cnorm_python.h":
    int cnorm_import() except -1


cdef extern from "cnorm_python.h" nogil:
    # cnorm.h
    ctypedef enum cnorm_status:
        CNORM_OK
        CNORM_ERROR_NULL
        CNORM_ERROR_SIZE
        CNORM_ERROR_EPS
        CNORM_ERROR_STRIDE
        CNORM_ERROR_DTYPE
        CNORM_ERROR_ISA
        CNORM_ERROR_LAYER
        CNORM_ERROR_VALUE
        CNORM_ERROR_FORMAT
        CNORM_ERROR_DAMAGED
        CNORM_ERROR_IDENTITY
        CNORM_ERROR_ALIGN
        CNORM_ERROR_ARITHMETIC
        CNORM_ERROR_TOKEN
    const char *cnorm_strerror(cnorm_status status)
    int cnorm_abi_version()

    ctypedef enum cnorm_dtype:
        CNORM_F32
        CNORM_F64
        CNORM_F16
        CNORM_BF16

    ptrdiff_t CNORM_ONE_ROW

    ctypedef struct cnorm_norm:
        ptrdiff_t rows, n, x_stride, residual_stride, y_stride, sum_stride
        const void *x
        const void *residual
        const void *gain
        const void *bias
        double eps
        void *y
        void *sum
        void *stats

    cnorm_status cnorm_layer_norm(cnorm_dtype dtype, const cnorm_norm *call)
    cnorm_status cnorm_add_layer_norm(cnorm_dtype dtype, const cnorm_norm *call)
    cnorm_status cnorm_rms_norm(cnorm_dtype dtype, const cnorm_norm *call)

    ctypedef struct cnorm_norm_backward:
        ptrdiff_t rows, n, dy_stride, x_stride, dx_stride
        const void *dy
        const void *x
        const void *gain
        const void *stats
        void *dx
        void *dgain
        void *dbias
        void *partials

    ptrdiff_t cnorm_backward_partials(cnorm_dtype dtype, ptrdiff_t rows, ptrdiff_t n)
    cnorm_status cnorm_layer_norm_backward(cnorm_dtype dtype, const cnorm_norm_backward *call)
    cnorm_status cnorm_rms_norm_backward(cnorm_dtype dtype, const cnorm_norm_backward *call)
    cnorm_status cnorm_layer_norm_backward_blocks(cnorm_dtype dtype, const cnorm_norm_backward *call, ptrdiff_t begin,
                                                  ptrdiff_t end)
    cnorm_status cnorm_rms_norm_backward_blocks(cnorm_dtype dtype, const cnorm_norm_backward *call, ptrdiff_t begin,
                                                ptrdiff_t end)
    cnorm_status cnorm_backward_reduce(cnorm_dtype dtype, ptrdiff_t rows, ptrdiff_t n, void *partials, void *dgain,
                                       void *dbias)
    cnorm_status cnorm_widen(cnorm_dtype dtype, ptrdiff_t n, const void *x, float *y)
    cnorm_status cnorm_sigmoid_f32(ptrdiff_t n, const float *x, float *y)
    cnorm_status cnorm_tanh_f32(ptrdiff_t n, const float *x, float *y)

    int cnorm_isa_count()
    const char *cnorm_isa_name(int index)
    const char *cnorm_isa_active()
    cnorm_status cnorm_isa_use(const char *name)

    # cnorm_rnn.h
    enum:
        CNORM_ALIGN
        CNORM_GATE_PAD

    ctypedef enum cnorm_weight_type:
        CNORM_WEIGHT_F32
        CNORM_WEIGHT_F16
        CNORM_WEIGHT_I8

    enum:
        CNORM_INT8_COLS

    ctypedef struct cnorm_matrix:
        ptrdiff_t gates, units, cols, group
        const void *panels
        cnorm_weight_type type
        int levels

    # Of the structs of layers what cnorm._core reads. Models are read from files; a module that fills in layers itself
    # declares what it uses of cnorm_rnn.h.
    ctypedef enum cnorm_cell_kind:
        CNORM_CELL_LSTM
    ctypedef struct cnorm_cell:
        cnorm_cell_kind kind
        cnorm_matrix weight_x, weight_h
    ctypedef enum cnorm_layer_kind:
        CNORM_LAYER_CELL
    ctypedef union cnorm_layer_as:
        cnorm_cell cell
    ctypedef struct cnorm_layer:
        cnorm_layer_kind kind
        cnorm_layer_as as_ "as"

    ptrdiff_t cnorm_padded_units(ptrdiff_t units)
    ptrdiff_t cnorm_matrix_floats(ptrdiff_t gates, ptrdiff_t units, ptrdiff_t cols)
    cnorm_status cnorm_matrix_pack(ptrdiff_t gates, ptrdiff_t units, ptrdiff_t cols, ptrdiff_t group, const float *w,
                                   float *panels)
    ptrdiff_t cnorm_matrix_bytes(const cnorm_matrix *matrix)
    cnorm_status cnorm_matrix_round(const cnorm_matrix *matrix, const float *w, void *rows, float *scales)
    cnorm_status cnorm_matrix_pack_rows(cnorm_matrix *matrix, const void *rows, const float *scales, void *panels)
    ptrdiff_t cnorm_layer_inputs(const cnorm_layer *layer)
    ptrdiff_t cnorm_layer_outputs(const cnorm_layer *layer)
    ptrdiff_t cnorm_layer_state_floats(const cnorm_layer *layer)
    ptrdiff_t cnorm_state_floats(const cnorm_layer *layers, int count)
    ctypedef struct cnorm_fault:
        int network, layer
        const char *field

    cnorm_status cnorm_layers_check(const cnorm_layer *layers, int count, cnorm_fault *fault)
    ptrdiff_t cnorm_refused_token(const cnorm_layer *layers, int count, ptrdiff_t rows, const float *x,
                                  ptrdiff_t x_stride, ptrdiff_t *element)
    ptrdiff_t cnorm_scratch_floats(const cnorm_layer *layers, int count, ptrdiff_t rows)

    ctypedef struct cnorm_frames:
        const cnorm_layer *layers
        int count
        ptrdiff_t frames, x_stride, rows, y_stride
        const float *x
        float *state
        float *const *states
        float *scratch
        float *y
        int checked

    cnorm_status cnorm_run(const cnorm_frames *call)
    cnorm_status cnorm_run_many(const cnorm_frames *call)

    # cnorm_norms.h
    ctypedef struct cnorm_volume_norm:
        ptrdiff_t samples, channels, space, groups, x_stride, y_stride
        const void *x
        const void *gain
        const void *bias
        const void *mean
        const void *var
        double eps
        void *y
        void *stats
        double *moments
        void *scratch

    ctypedef struct cnorm_volume_norm_backward:
        ptrdiff_t samples, channels, space, groups, dy_stride, x_stride, dx_stride
        const void *dy
        const void *x
        const void *gain
        const void *stats
        const void *mean
        const void *var
        double eps
        void *dx
        void *dgain
        void *dbias
        void *scratch

    cnorm_status cnorm_group_norm(cnorm_dtype dtype, const cnorm_volume_norm *call)
    cnorm_status cnorm_group_norm_backward(cnorm_dtype dtype, const cnorm_volume_norm_backward *call)
    ptrdiff_t cnorm_batch_norm_scratch(cnorm_dtype dtype, ptrdiff_t samples, ptrdiff_t channels, ptrdiff_t space)
    cnorm_status cnorm_batch_norm(cnorm_dtype dtype, const cnorm_volume_norm *call)
    cnorm_status cnorm_batch_norm_backward(cnorm_dtype dtype, const cnorm_volume_norm_backward *call)
    cnorm_status cnorm_batch_norm_inference(cnorm_dtype dtype, const cnorm_volume_norm *call)
    cnorm_status cnorm_batch_norm_inference_backward(cnorm_dtype dtype, const cnorm_volume_norm_backward *call)

    ctypedef struct cnorm_weight:
        ptrdiff_t rows, n, dv_stride, w_stride, out_stride
        const void *dv
        const void *w
        const void *gain
        void *out
        void *dgain

    cnorm_status cnorm_weight_norm(cnorm_dtype dtype, const cnorm_weight *call)
    cnorm_status cnorm_weight_norm_backward(cnorm_dtype dtype, const cnorm_weight *call)

    ctypedef struct cnorm_divisive:
        ptrdiff_t rows, n, mean_radius, radius, dy_stride, x_stride, out_stride
        const void *dy
        const void *x
        const void *gain
        const void *bias
        double sigma
        void *out
        void *dgain
        void *dbias
        double *dsigma
        void *scratch

    ptrdiff_t cnorm_divisive_norm_scratch(ptrdiff_t n)
    cnorm_status cnorm_divisive_norm(cnorm_dtype dtype, const cnorm_divisive *call)
    cnorm_status cnorm_divisive_norm_backward(cnorm_dtype dtype, const cnorm_divisive *call)
    cnorm_status cnorm_smoothing_gradient(cnorm_dtype dtype, const cnorm_norm_backward *call, double s, double *ds)

    # cnorm_train.h
    ctypedef struct cnorm_tape:
        const cnorm_layer *layers
        int count
        ptrdiff_t steps, batch
        float *memory

    ptrdiff_t cnorm_tape_floats(const cnorm_tape *tape)
    ptrdiff_t cnorm_run_tape_floats(const cnorm_tape *tape)
    cnorm_status cnorm_run_tape(const cnorm_tape *tape, ptrdiff_t first, ptrdiff_t steps, const float *x, float *state,
                                float *scratch, float *y)
    cnorm_status cnorm_tape_drop(const cnorm_tape *tape, ptrdiff_t first, ptrdiff_t end)

    ctypedef struct cnorm_gradient:  # one struct for each kind of layer
        pass

    ctypedef struct cnorm_sums:
        float *memory
        ptrdiff_t rows

    ctypedef struct cnorm_backward:
        ptrdiff_t first, steps
        const float *dy
        float *dx
        float *dstate
        const cnorm_gradient *gradients
        float *scratch
        cnorm_sums *sums

    ptrdiff_t cnorm_backward_floats(const cnorm_tape *tape)
    cnorm_status cnorm_run_backward(const cnorm_tape *tape, const cnorm_backward *call)
    ptrdiff_t cnorm_sums_floats(const cnorm_layer *layers, int count)
    cnorm_status cnorm_sum_gradients(const cnorm_tape *const *tapes, ptrdiff_t count, cnorm_sums *sums,
                                     const cnorm_gradient *gradient, float *scratch)

    ctypedef struct cnorm_adam:
        double rate, beta1, beta2, eps, correction1, correction2

    cnorm_status cnorm_adam_update(const cnorm_adam *adam, ptrdiff_t n, const float *gradient, double scale,
                                   float *weight, float *m, float *v)
    cnorm_status cnorm_sgd_update(double rate, double momentum, ptrdiff_t n, const float *gradient, double scale,
                                  float *weight, float *velocity)
    double cnorm_square_sum(ptrdiff_t n, const float *g)

    # cnorm_model.h
    ctypedef enum cnorm_direction:
        CNORM_STREAMED
        CNORM_FORWARD
        CNORM_BACKWARD

    enum:
        CNORM_IDENTITY

    ctypedef struct cnorm_network:
        const cnorm_layer *layers
        const float **starts
        int count
        cnorm_direction direction

    ctypedef struct cnorm_model:
        const cnorm_network *networks
        int count
        ptrdiff_t inputs, outputs
        const unsigned char *identity
        const char *configuration
        ptrdiff_t configuration_bytes
        const void *file
        ptrdiff_t file_bytes

    ptrdiff_t cnorm_model_memory(const void *file, ptrdiff_t file_bytes)
    cnorm_status cnorm_model_open(const void *file, ptrdiff_t file_bytes, void *memory, ptrdiff_t memory_bytes,
                                  cnorm_model *model, cnorm_fault *fault)
    cnorm_status cnorm_model_verify(const cnorm_model *model)
    ptrdiff_t cnorm_model_file_bytes(const cnorm_model *model)
    cnorm_status cnorm_model_write(const cnorm_model *model, void *file)
    ptrdiff_t cnorm_model_floats(const cnorm_model *model, ptrdiff_t steps)
    cnorm_status cnorm_model_run(const cnorm_model *model, ptrdiff_t steps, const float *x, float *y, float *memory)

    ctypedef struct cnorm_stream:
        const cnorm_model *model
        float *state
        float *scratch
        ptrdiff_t rows
        uint64_t frames

    ptrdiff_t cnorm_stream_floats(const cnorm_model *model, ptrdiff_t rows)
    cnorm_status cnorm_stream_start(cnorm_stream *stream, const cnorm_model *model, float *memory, ptrdiff_t rows)
    cnorm_status cnorm_stream_run(cnorm_stream *stream, ptrdiff_t steps, const float *x, float *y)
    int cnorm_stream_finite(const cnorm_stream *stream)
    void cnorm_stream_reset(cnorm_stream *stream)
    ptrdiff_t cnorm_stream_saved_bytes(const cnorm_model *model)
    cnorm_status cnorm_stream_save(const cnorm_stream *stream, void *bytes)
    cnorm_status cnorm_stream_restore(cnorm_stream *stream, const void *bytes, ptrdiff_t count)
