/* cnorm for extension modules in C, C++ or Cython: the functions of the loaded package cnorm. Nothing is linked.
 *
 *     #include "cnorm_python.h"     in the folder cnorm.get_include(), with the headers that are the manual
 *     if (cnorm_import() < 0) return NULL;      in the module's initialisation, once for each source file
 *
 * Each function is a pointer that cnorm_import reads from a capsule in `__pyx_capi__` of cnorm.capi. A package with
 * another CNORM_ABI_VERSION, or without one of the functions, is an ImportError.
 */
#ifndef CNORM_PYTHON_H
#define CNORM_PYTHON_H

#include <Python.h>

#include "cnorm.h"
#include "cnorm_model.h"
#include "cnorm_norms.h"
#include "cnorm_rnn.h"
#include "cnorm_train.h"

/* every function of the headers */
#define CNORM_FUNCTIONS(F) \
    F(cnorm_strerror) F(cnorm_abi_version) F(cnorm_widen) F(cnorm_layer_norm) F(cnorm_add_layer_norm) \
    F(cnorm_rms_norm) F(cnorm_backward_partials) F(cnorm_layer_norm_backward) F(cnorm_rms_norm_backward) \
    F(cnorm_layer_norm_backward_blocks) F(cnorm_rms_norm_backward_blocks) F(cnorm_backward_reduce) \
    F(cnorm_sigmoid_f32) F(cnorm_tanh_f32) F(cnorm_isa_count) F(cnorm_isa_name) F(cnorm_isa_active) F(cnorm_isa_use) \
    F(cnorm_group_norm) F(cnorm_group_norm_backward) F(cnorm_batch_norm_scratch) F(cnorm_batch_norm) \
    F(cnorm_batch_norm_backward) F(cnorm_batch_norm_inference) F(cnorm_batch_norm_inference_backward) \
    F(cnorm_weight_norm) F(cnorm_weight_norm_backward) F(cnorm_divisive_norm_scratch) F(cnorm_divisive_norm) \
    F(cnorm_divisive_norm_backward) F(cnorm_smoothing_gradient) F(cnorm_padded_units) F(cnorm_matrix_floats) \
    F(cnorm_matrix_pack) F(cnorm_matrix_bytes) F(cnorm_matrix_round) F(cnorm_matrix_pack_rows) F(cnorm_layer_inputs) \
    F(cnorm_layer_outputs) F(cnorm_layer_state_floats) F(cnorm_state_floats) F(cnorm_layers_check) \
    F(cnorm_refused_token) \
    F(cnorm_scratch_floats) F(cnorm_run) F(cnorm_run_many) F(cnorm_tape_floats) F(cnorm_run_tape_floats) \
    F(cnorm_run_tape) F(cnorm_tape_drop) F(cnorm_backward_floats) F(cnorm_run_backward) F(cnorm_sums_floats) \
    F(cnorm_sum_gradients) F(cnorm_adam_update) F(cnorm_sgd_update) F(cnorm_square_sum) \
    F(cnorm_model_memory) F(cnorm_model_open) F(cnorm_model_verify) F(cnorm_model_file_bytes) F(cnorm_model_write) \
    F(cnorm_model_floats) F(cnorm_model_run) F(cnorm_stream_floats) F(cnorm_stream_start) F(cnorm_stream_run) \
    F(cnorm_stream_finite) F(cnorm_stream_reset) F(cnorm_stream_saved_bytes) F(cnorm_stream_save) \
    F(cnorm_stream_restore)

#define CNORM_CAPSULE "cnorm"

#ifndef CNORM_CORE /* cnorm._core itself, which contains the functions */

#ifdef __cplusplus
#define CNORM_POINTER(name) decltype(&::name) name;
#else
#define CNORM_POINTER(name) __typeof__(&name) name;
#endif
static struct {
    CNORM_FUNCTIONS(CNORM_POINTER)
} cnorm_loaded;
#undef CNORM_POINTER

/* 0, or -1 with an ImportError */
static int cnorm_import(void)
{
    static const char *const names[] = {
#define CNORM_NAME(name) #name,
        CNORM_FUNCTIONS(CNORM_NAME)
#undef CNORM_NAME
    };
    PyObject *package = PyImport_ImportModule("cnorm.capi");
    PyObject *capsules = package ? PyObject_GetAttrString(package, "__pyx_capi__") : NULL;
    int status = capsules ? 0 : -1;
    for (size_t i = 0; status == 0 && i < sizeof names / sizeof *names; ++i) {
        PyObject *capsule = PyMapping_GetItemString(capsules, names[i]);
        void *function = capsule ? PyCapsule_GetPointer(capsule, CNORM_CAPSULE) : NULL;
        Py_XDECREF(capsule); /* the dictionary keeps it */
        memcpy((char *)&cnorm_loaded + i * sizeof function, &function, sizeof function);
        if (function) continue;
        PyErr_Format(PyExc_ImportError, "the loaded package cnorm has no function %s: it is older than the headers",
                     names[i]);
        status = -1;
    }
    Py_XDECREF(capsules);
    Py_XDECREF(package);
    if (status == 0 && cnorm_loaded.cnorm_abi_version() != CNORM_ABI_VERSION) {
        PyErr_Format(PyExc_ImportError, "the loaded package cnorm has ABI version %d, the headers %d: compile again",
                     cnorm_loaded.cnorm_abi_version(), CNORM_ABI_VERSION);
        status = -1;
    }
    return status;
}

#define cnorm_strerror (*cnorm_loaded.cnorm_strerror)
#define cnorm_abi_version (*cnorm_loaded.cnorm_abi_version)
#define cnorm_widen (*cnorm_loaded.cnorm_widen)
#define cnorm_layer_norm (*cnorm_loaded.cnorm_layer_norm)
#define cnorm_add_layer_norm (*cnorm_loaded.cnorm_add_layer_norm)
#define cnorm_rms_norm (*cnorm_loaded.cnorm_rms_norm)
#define cnorm_backward_partials (*cnorm_loaded.cnorm_backward_partials)
#define cnorm_layer_norm_backward (*cnorm_loaded.cnorm_layer_norm_backward)
#define cnorm_rms_norm_backward (*cnorm_loaded.cnorm_rms_norm_backward)
#define cnorm_layer_norm_backward_blocks (*cnorm_loaded.cnorm_layer_norm_backward_blocks)
#define cnorm_rms_norm_backward_blocks (*cnorm_loaded.cnorm_rms_norm_backward_blocks)
#define cnorm_backward_reduce (*cnorm_loaded.cnorm_backward_reduce)
#define cnorm_sigmoid_f32 (*cnorm_loaded.cnorm_sigmoid_f32)
#define cnorm_tanh_f32 (*cnorm_loaded.cnorm_tanh_f32)
#define cnorm_isa_count (*cnorm_loaded.cnorm_isa_count)
#define cnorm_isa_name (*cnorm_loaded.cnorm_isa_name)
#define cnorm_isa_active (*cnorm_loaded.cnorm_isa_active)
#define cnorm_isa_use (*cnorm_loaded.cnorm_isa_use)
#define cnorm_group_norm (*cnorm_loaded.cnorm_group_norm)
#define cnorm_group_norm_backward (*cnorm_loaded.cnorm_group_norm_backward)
#define cnorm_batch_norm_scratch (*cnorm_loaded.cnorm_batch_norm_scratch)
#define cnorm_batch_norm (*cnorm_loaded.cnorm_batch_norm)
#define cnorm_batch_norm_backward (*cnorm_loaded.cnorm_batch_norm_backward)
#define cnorm_batch_norm_inference (*cnorm_loaded.cnorm_batch_norm_inference)
#define cnorm_batch_norm_inference_backward (*cnorm_loaded.cnorm_batch_norm_inference_backward)
#define cnorm_weight_norm (*cnorm_loaded.cnorm_weight_norm)
#define cnorm_weight_norm_backward (*cnorm_loaded.cnorm_weight_norm_backward)
#define cnorm_divisive_norm_scratch (*cnorm_loaded.cnorm_divisive_norm_scratch)
#define cnorm_divisive_norm (*cnorm_loaded.cnorm_divisive_norm)
#define cnorm_divisive_norm_backward (*cnorm_loaded.cnorm_divisive_norm_backward)
#define cnorm_smoothing_gradient (*cnorm_loaded.cnorm_smoothing_gradient)
#define cnorm_padded_units (*cnorm_loaded.cnorm_padded_units)
#define cnorm_matrix_floats (*cnorm_loaded.cnorm_matrix_floats)
#define cnorm_matrix_pack (*cnorm_loaded.cnorm_matrix_pack)
#define cnorm_matrix_bytes (*cnorm_loaded.cnorm_matrix_bytes)
#define cnorm_matrix_round (*cnorm_loaded.cnorm_matrix_round)
#define cnorm_matrix_pack_rows (*cnorm_loaded.cnorm_matrix_pack_rows)
#define cnorm_layer_inputs (*cnorm_loaded.cnorm_layer_inputs)
#define cnorm_layer_outputs (*cnorm_loaded.cnorm_layer_outputs)
#define cnorm_layer_state_floats (*cnorm_loaded.cnorm_layer_state_floats)
#define cnorm_state_floats (*cnorm_loaded.cnorm_state_floats)
#define cnorm_layers_check (*cnorm_loaded.cnorm_layers_check)
#define cnorm_refused_token (*cnorm_loaded.cnorm_refused_token)
#define cnorm_scratch_floats (*cnorm_loaded.cnorm_scratch_floats)
#define cnorm_run (*cnorm_loaded.cnorm_run)
#define cnorm_run_many (*cnorm_loaded.cnorm_run_many)
#define cnorm_tape_floats (*cnorm_loaded.cnorm_tape_floats)
#define cnorm_run_tape_floats (*cnorm_loaded.cnorm_run_tape_floats)
#define cnorm_run_tape (*cnorm_loaded.cnorm_run_tape)
#define cnorm_tape_drop (*cnorm_loaded.cnorm_tape_drop)
#define cnorm_backward_floats (*cnorm_loaded.cnorm_backward_floats)
#define cnorm_run_backward (*cnorm_loaded.cnorm_run_backward)
#define cnorm_sums_floats (*cnorm_loaded.cnorm_sums_floats)
#define cnorm_sum_gradients (*cnorm_loaded.cnorm_sum_gradients)
#define cnorm_adam_update (*cnorm_loaded.cnorm_adam_update)
#define cnorm_sgd_update (*cnorm_loaded.cnorm_sgd_update)
#define cnorm_square_sum (*cnorm_loaded.cnorm_square_sum)
#define cnorm_model_memory (*cnorm_loaded.cnorm_model_memory)
#define cnorm_model_open (*cnorm_loaded.cnorm_model_open)
#define cnorm_model_verify (*cnorm_loaded.cnorm_model_verify)
#define cnorm_model_file_bytes (*cnorm_loaded.cnorm_model_file_bytes)
#define cnorm_model_write (*cnorm_loaded.cnorm_model_write)
#define cnorm_model_floats (*cnorm_loaded.cnorm_model_floats)
#define cnorm_model_run (*cnorm_loaded.cnorm_model_run)
#define cnorm_stream_floats (*cnorm_loaded.cnorm_stream_floats)
#define cnorm_stream_start (*cnorm_loaded.cnorm_stream_start)
#define cnorm_stream_run (*cnorm_loaded.cnorm_stream_run)
#define cnorm_stream_finite (*cnorm_loaded.cnorm_stream_finite)
#define cnorm_stream_reset (*cnorm_loaded.cnorm_stream_reset)
#define cnorm_stream_saved_bytes (*cnorm_loaded.cnorm_stream_saved_bytes)
#define cnorm_stream_save (*cnorm_loaded.cnorm_stream_save)
#define cnorm_stream_restore (*cnorm_loaded.cnorm_stream_restore)

#endif
#endif
