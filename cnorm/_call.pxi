"""One call of the C library: the sizes of its arrays, and the functions that set the pointers of its struct."""
from cnorm.results import running_average, stats_mean, write_result
from cpython.pystate cimport PyThreadState

cdef extern from "Python.h":
    PyThreadState *PyEval_SaveThread() noexcept nogil
    void PyEval_RestoreThread(PyThreadState *thread) noexcept nogil


cdef struct Shape:
    cnorm_dtype dtype  # of x
    int number  # NumPy's number of that type
    int axis  # the dimension of x with which a row begins
    ptrdiff_t rows, n  # x is [rows, n]
    ptrdiff_t length  # of gain and bias
    ptrdiff_t channels, space, groups  # where a row is a sample, n = channels * space
    PyThreadState *thread  # between `begin` and `finish`: NULL if this thread has kept the GIL


# A call of C stands between these two, as in
#     begin(&shape)
#     finish(&shape, cnorm_layer_norm(shape.dtype, &call))
# `with nogil` would need one branch with and one without it for each function of C.

cdef inline void begin(Shape *shape) noexcept:
    """Release the GIL if the call is a long one."""
    shape.thread = PyEval_SaveThread() if shape.rows * shape.n > RELEASE_GIL_ABOVE else NULL


cdef inline int finish(Shape *shape, cnorm_status status) except -1:
    if shape.thread != NULL:
        PyEval_RestoreThread(shape.thread)
    return check(status)


# Each of these functions sets a pointer of the struct to an array, or to a copy if C can't use the array's layout. It
# returns that array or copy, which the caller must keep alive until `finish` has returned. It refuses an array that
# does not have the elements that the call will access: then it was changed after it was checked, by code that ran in
# between. Set pointers last and allocate nothing after them: an allocation may run the garbage collector, and a
# finaliser may resize an array.

cdef inline int check_rows(Shape *shape, cnp.ndarray a) except -1:
    if cnp.PyArray_TYPE(a) != shape.number or size_of(a) != shape.rows * shape.n:
        refuse_changed()
    return 0


cdef inline int check_parameter(Shape *shape, cnp.ndarray a) except -1:
    cdef int number = cnp.PyArray_TYPE(a)
    if number != shape.number and number != compute_number(shape.dtype) or size_of(a) != shape.length:
        refuse_changed()
    return 0


cdef cnp.ndarray set_stats(Shape *shape, const void **pointer, Stats stats, ptrdiff_t count):
    """Set the statistics of `count` rows."""
    cdef cnp.ndarray data = stats.data
    if data is None or not is_plain(data, compute_number(shape.dtype)) or size_of(data) != 3 * count:
        refuse_changed()
    pointer[0] = cnp.PyArray_DATA(data)
    return data


cdef inline cnp.ndarray read_rows(Shape *shape, const void **pointer, ptrdiff_t *stride, cnp.ndarray a):
    """Set an input [rows, n]."""
    check_rows(shape, a)
    if not as_rows(a, shape, stride):
        a = cnp.PyArray_NewCopy(a, cnp.NPY_CORDER)
        stride[0] = 0
    pointer[0] = cnp.PyArray_DATA(a)
    return a


cdef inline cnp.ndarray write_rows(Shape *shape, void **pointer, ptrdiff_t *stride, cnp.ndarray result):
    """Set an output [rows, n]; `copy_back` must follow the call."""
    check_rows(shape, result)
    if not cnp.PyArray_ISWRITEABLE(result):
        refuse_changed()
    if not as_rows(result, shape, stride):
        result = cnp.PyArray_EMPTY(cnp.PyArray_NDIM(result), cnp.PyArray_DIMS(result), cnp.PyArray_TYPE(result), 0)
        stride[0] = 0
    pointer[0] = cnp.PyArray_DATA(result)
    return result


cdef inline cnp.ndarray read_parameter(Shape *shape, const void **pointer, cnp.ndarray a):
    """Set a parameter, as contiguous elements of the compute type; None leaves the pointer NULL."""
    if a is not None:
        check_parameter(shape, a)
        if not is_plain(a, compute_number(shape.dtype)):
            a = converted(a, shape.dtype)
        pointer[0] = cnp.PyArray_DATA(a)
    return a


cdef cnp.ndarray write_gradient(Shape *shape, void **pointer, cnp.ndarray result):
    """Set a parameter's gradient, contiguous elements of the compute type; `copy_back` must follow the call."""
    check_parameter(shape, result)
    if not is_plain(result, compute_number(shape.dtype)) or not cnp.PyArray_ISWRITEABLE(result):
        result = cnp.PyArray_EMPTY(cnp.PyArray_NDIM(result), cnp.PyArray_DIMS(result), compute_number(shape.dtype), 0)
    pointer[0] = cnp.PyArray_DATA(result)
    return result


cdef cnp.ndarray parameter_like(Shape *shape, cnp.ndarray weight, cnp.ndarray x):
    """An array of the shape and dtype of a channel parameter's gradient: dtype of weight, or of x if it is None."""
    return empty_vector(shape.channels, cnp.PyArray_TYPE(x if weight is None else weight))


cdef cnp.ndarray empty_vector(cnp.npy_intp n, int number):
    """An array [n] of the type with this number."""
    return cnp.PyArray_EMPTY(1, &n, number, 0)


cdef cnp.ndarray reserve(void **pointer, cnp.npy_intp size):
    """Set scratch of `size` bytes."""
    cdef cnp.ndarray scratch = cnp.PyArray_EMPTY(1, &size, cnp.NPY_UINT8, 0)
    pointer[0] = cnp.PyArray_DATA(scratch)
    return scratch


cdef inline int copy_back(cnp.ndarray result, cnp.ndarray written) except -1:
    """Copy `written` to `result` unless they are one array; a float32 too large for float16 becomes infinite."""
    if written is not result:
        write_result(result, written, default_float_env())
    return 0


cdef int write_gradients(Shape *shape, list written, void **dx, ptrdiff_t *dx_stride, void **dgain,
                         void **dbias) except -1:
    """Set the gradients of x, gain and, if there are three results, bias; `copy_all_back` must follow the call.

    `written`, a copy of the list of results, becomes the arrays that C writes.
    """
    written[0] = write_rows(shape, dx, dx_stride, written[0])
    written[1] = write_gradient(shape, dgain, written[1])
    if len(written) > 2:
        written[2] = write_gradient(shape, dbias, written[2])
    return 0


cdef int copy_all_back(list results, list written) except -1:
    cdef int i
    for i in range(len(results)):
        copy_back(results[i], written[i])
    return 0


cdef inline bint is_plain(cnp.ndarray a, int number) noexcept:
    """Whether C can use the array's memory: contiguous, aligned elements of the type with this number."""
    return cnp.PyArray_TYPE(a) == number and cnp.PyArray_ISCARRAY_RO(a)


cdef cnp.ndarray converted(cnp.ndarray a, cnorm_dtype dtype):
    """A parameter, whose dtype is `dtype` or its compute type, as contiguous elements of the compute type."""
    cdef cnp.ndarray wide
    if not (cnp.PyArray_IS_C_CONTIGUOUS(a) and cnp.PyArray_ISALIGNED(a)):
        a = cnp.PyArray_NewCopy(a, cnp.NPY_CORDER)
    if cnp.PyArray_TYPE(a) == compute_number(dtype):
        return a
    wide = cnp.PyArray_EMPTY(cnp.PyArray_NDIM(a), cnp.PyArray_DIMS(a), cnp.NPY_FLOAT32, 0)
    check(cnorm_widen(dtype, cnp.PyArray_SIZE(a), cnp.PyArray_DATA(a), <float *>cnp.PyArray_DATA(wide)))
    return wide


cdef inline bint as_rows(cnp.ndarray a, Shape *shape, ptrdiff_t *stride) noexcept:
    """Set the stride and return True if `a` needs no copy: contiguous elements in a row, one stride between rows."""
    if cnp.PyArray_ISCARRAY_RO(a):
        stride[0] = 0
        return True
    return as_strided_rows(a, shape, stride)


cdef bint as_strided_rows(cnp.ndarray a, Shape *shape, ptrdiff_t *stride) noexcept:
    cdef int ndim = cnp.PyArray_NDIM(a), axis = shape.axis, i
    cdef cnp.npy_intp item = cnp.PyArray_ITEMSIZE(a), expected = item, step
    cdef cnp.npy_intp *lengths = cnp.PyArray_DIMS(a)
    cdef cnp.npy_intp *strides = cnp.PyArray_STRIDES(a)
    stride[0] = 0  # one row
    if not cnp.PyArray_ISALIGNED(a) or ndim <= axis:
        return False
    for i in range(ndim - 1, axis - 1, -1):
        if lengths[i] != 1 and strides[i] != expected:
            return False
        expected *= lengths[i]
    if expected != item * shape.n:
        return False
    step = 0
    for i in range(axis - 1, -1, -1):  # the leading dimensions must collapse into one
        if lengths[i] == 1:
            continue
        if step == 0:
            if strides[i] % item:
                return False
            step = strides[i]
            expected = step * lengths[i]
            if step == 0:  # a broadcast row: all other leading dimensions must be 1
                stride[0] = CNORM_ONE_ROW
                return all_one(lengths, i)
            stride[0] = step // item
        elif strides[i] != expected:
            return False
        else:
            expected *= lengths[i]
    return True


cdef bint all_one(cnp.npy_intp *shape, int before) noexcept:
    cdef int i
    for i in range(before):
        if shape[i] != 1:
            return False
    return True
