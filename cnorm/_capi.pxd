# Mirror of src/include/cnorm.h and cnorm_rnn.h; no logic. float64 pointers pass as void *.
cdef extern from "cnorm_rnn.h" nogil:
    ctypedef enum cnorm_status:
        CNORM_OK
        CNORM_ERROR_ISA
    const char *cnorm_strerror(cnorm_status status)

    ctypedef enum cnorm_dtype:
        CNORM_F32
        CNORM_F64
        CNORM_F16
        CNORM_BF16

    cnorm_status cnorm_layer_norm(cnorm_dtype dtype, ptrdiff_t rows, ptrdiff_t n, const void *x, ptrdiff_t x_stride,
                                  const void *gain, const void *bias, double eps, void *y, ptrdiff_t y_stride,
                                  void *stats)
    cnorm_status cnorm_add_layer_norm(cnorm_dtype dtype, ptrdiff_t rows, ptrdiff_t n, const void *x, ptrdiff_t x_stride,
                                      const void *residual, ptrdiff_t residual_stride, const void *gain,
                                      const void *bias, double eps, void *y, ptrdiff_t y_stride, void *sum,
                                      ptrdiff_t sum_stride, void *stats)
    cnorm_status cnorm_rms_norm(cnorm_dtype dtype, ptrdiff_t rows, ptrdiff_t n, const void *x, ptrdiff_t x_stride,
                                const void *gain, double eps, void *y, ptrdiff_t y_stride, void *stats)
    ptrdiff_t cnorm_backward_partials(cnorm_dtype dtype, ptrdiff_t rows, ptrdiff_t n)
    cnorm_status cnorm_layer_norm_backward(cnorm_dtype dtype, ptrdiff_t rows, ptrdiff_t n, const void *dy,
                                           ptrdiff_t dy_stride, const void *x, ptrdiff_t x_stride, const void *gain,
                                           const void *stats, void *dx, ptrdiff_t dx_stride, void *dgain,
                                           void *dbias, void *partials)
    cnorm_status cnorm_rms_norm_backward(cnorm_dtype dtype, ptrdiff_t rows, ptrdiff_t n, const void *dy,
                                         ptrdiff_t dy_stride, const void *x, ptrdiff_t x_stride, const void *gain,
                                         const void *stats, void *dx, ptrdiff_t dx_stride, void *dgain, void *partials)
    cnorm_status cnorm_widen(cnorm_dtype dtype, ptrdiff_t n, const void *x, float *y)
    cnorm_status cnorm_sigmoid_f32(ptrdiff_t n, const float *x, float *y)
    cnorm_status cnorm_tanh_f32(ptrdiff_t n, const float *x, float *y)

    int cnorm_isa_count()
    const char *cnorm_isa_name(int index)
    const char *cnorm_isa_active()
    cnorm_status cnorm_isa_use(const char *name)

    enum:
        CNORM_ALIGN
        CNORM_ROWS
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

    ctypedef struct cnorm_linear:
        cnorm_matrix weight
        const float *bias

    ctypedef struct cnorm_row_norm:
        ptrdiff_t n
        const float *gain
        const float *bias
        float eps

    ctypedef enum cnorm_activation:
        pass
    ctypedef enum cnorm_cell_kind:
        pass
    ctypedef enum cnorm_scope:
        pass
    ctypedef enum cnorm_cell_norm:
        pass
    ctypedef enum cnorm_reset:
        pass

    int CNORM_ACTIVATION_TANH, CNORM_ACTIVATION_RELU, CNORM_ACTIVATION_SIGMOID
    int CNORM_CELL_LSTM, CNORM_CELL_GRU, CNORM_CELL_RNN
    int CNORM_SCOPE_NONE, CNORM_SCOPE_SPLIT, CNORM_SCOPE_SUM
    int CNORM_CELL_NORM_NONE, CNORM_CELL_NORM_OUTPUT, CNORM_CELL_NORM_CARRY
    int CNORM_RESET_AFTER, CNORM_RESET_CANDIDATE, CNORM_RESET_BEFORE

    ctypedef struct cnorm_cell:
        cnorm_cell_kind kind
        cnorm_scope scope
        cnorm_cell_norm cell_norm
        cnorm_reset reset
        cnorm_activation activation
        int keep
        float eps, cell_clip, projection_clip, zoneout
        cnorm_matrix weight_x, weight_h, weight_n, weight_p
        const float *inside_x
        const float *inside_h
        const float *gain_x
        const float *gain_h
        const float *bias
        const float *bias_n
        const float *gain_c
        const float *bias_c
        const float *bias_p

    ctypedef enum cnorm_layer_kind:
        CNORM_LAYER_LINEAR
        CNORM_LAYER_CELL
        CNORM_LAYER_NORM
        CNORM_LAYER_ACTIVATION
        CNORM_LAYER_RESIDUAL

    ctypedef struct cnorm_elementwise:
        ptrdiff_t n
        cnorm_activation f
    ctypedef struct cnorm_addition:
        ptrdiff_t n
        int back

    ctypedef union cnorm_layer_as:
        cnorm_linear linear
        cnorm_cell cell
        cnorm_row_norm norm
        cnorm_elementwise activation
        cnorm_addition residual

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
    ptrdiff_t cnorm_scratch_floats(const cnorm_layer *layers, int count, ptrdiff_t rows)
    cnorm_status cnorm_run(const cnorm_layer *layers, int count, ptrdiff_t steps, const float *x, ptrdiff_t x_stride,
                           float *state, float *scratch, ptrdiff_t rows, float *y, ptrdiff_t y_stride)
    cnorm_status cnorm_run_many(const cnorm_layer *layers, int count, ptrdiff_t streams, const float *x,
                                ptrdiff_t x_stride, float *const *states, float *scratch, ptrdiff_t rows, float *y,
                                ptrdiff_t y_stride)


# Mirror of src/include/cnorm_model.h
cdef extern from "cnorm_model.h" nogil:
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

    ptrdiff_t cnorm_model_memory(const void *file, ptrdiff_t file_bytes)
    cnorm_status cnorm_model_open(const void *file, ptrdiff_t file_bytes, void *memory, ptrdiff_t memory_bytes,
                                  cnorm_model *model)
    cnorm_status cnorm_model_verify(const cnorm_model *model)
    ptrdiff_t cnorm_model_file_bytes(const cnorm_model *model)
    cnorm_status cnorm_model_write(const cnorm_model *model, void *file)
