"""One call of the C library: a struct of sizes, inputs, outputs and scratch, and `launch`, which all norms use."""
from cnorm.results import running_average, stats_mean, write_result


cdef struct Rows:
    char *data
    ptrdiff_t stride  # elements from row to row


cdef struct Call:
    # sizes
    cnorm_dtype dtype  # of x
    int number  # NumPy's number of that type
    int axis  # the dimension of x with which a row begins
    ptrdiff_t rows, n  # x is [rows, n]
    ptrdiff_t length  # of gain and bias
    ptrdiff_t channels, space, groups  # where a row is a sample, n = channels * space
    ptrdiff_t mean_radius, radius
    double eps  # or sigma, or smoothing
    # inputs
    Rows x, residual, dy  # [rows, n]
    const void *gain
    const void *bias
    const void *mean
    const void *var
    # input of a backward pass, output of a forward pass
    void *stats
    # outputs
    Rows y, total  # [rows, n]; in a backward pass y is dx
    void *dgain
    void *dbias
    double dsmoothing
    double *moments
    # scratch
    void *scratch


ctypedef cnorm_status (*Entry)(Call *) noexcept nogil


cdef inline int launch(Call *call, Entry entry) except -1:
    cdef cnorm_status status
    if call.rows * call.n > RELEASE_GIL_ABOVE:
        with nogil:
            status = entry(call)
    else:
        status = entry(call)
    return check(status)


# Each of these functions sets a pointer of the call to an array, or to a copy if C can't use the array's layout. It
# returns that array or copy, which the caller must keep alive until `launch` has returned. It refuses an array that
# does not have the elements that the call will access: then it was changed after it was checked, by code that ran in
# between, such as a finaliser. So that no code can, a function sets all pointers after everything else.

cdef inline int check_rows(Call *call, cnp.ndarray a) except -1:
    if cnp.PyArray_TYPE(a) != call.number or size_of(a) != call.rows * call.n:
        refuse_changed()
    return 0


cdef inline int check_parameter(Call *call, cnp.ndarray a) except -1:
    cdef int number = cnp.PyArray_TYPE(a)
    if number != call.number and number != compute_number(call.dtype) or size_of(a) != call.length:
        refuse_changed()
    return 0


cdef int set_stats(Call *call, Stats stats, ptrdiff_t count) except -1:
    """Set the statistics of `count` rows."""
    if not is_plain(stats.data, compute_number(call.dtype)) or size_of(stats.data) != 3 * count:
        refuse_changed()
    call.stats = cnp.PyArray_DATA(stats.data)
    return 0


cdef inline cnp.ndarray read_rows(Call *call, Rows *rows, cnp.ndarray a):
    """Set an input [rows, n]."""
    check_rows(call, a)
    if not as_rows(a, call, rows):
        a = cnp.PyArray_NewCopy(a, cnp.NPY_CORDER)
        as_rows(a, call, rows)
    return a


cdef inline cnp.ndarray write_rows(Call *call, Rows *rows, cnp.ndarray result):
    """Set an output [rows, n]; `copy_back` must follow the call."""
    check_rows(call, result)
    if not cnp.PyArray_ISWRITEABLE(result):
        refuse_changed()
    if not as_rows(result, call, rows):
        result = cnp.PyArray_EMPTY(cnp.PyArray_NDIM(result), cnp.PyArray_DIMS(result), cnp.PyArray_TYPE(result), 0)
        as_rows(result, call, rows)
    return result


cdef inline cnp.ndarray read_parameter(Call *call, const void **pointer, cnp.ndarray a):
    """Set a parameter, as contiguous elements of the compute type; None leaves the pointer NULL."""
    if a is not None:
        check_parameter(call, a)
        if not is_plain(a, compute_number(call.dtype)):
            a = converted(a, call.dtype)
        pointer[0] = cnp.PyArray_DATA(a)
    return a


cdef cnp.ndarray write_gradient(Call *call, void **pointer, cnp.ndarray result):
    """Set a parameter's gradient, contiguous elements of the compute type; `copy_back` must follow the call."""
    check_parameter(call, result)
    if not is_plain(result, compute_number(call.dtype)) or not cnp.PyArray_ISWRITEABLE(result):
        result = cnp.PyArray_EMPTY(cnp.PyArray_NDIM(result), cnp.PyArray_DIMS(result), compute_number(call.dtype), 0)
    pointer[0] = cnp.PyArray_DATA(result)
    return result


cdef cnp.ndarray parameter_like(Call *call, cnp.ndarray weight, cnp.ndarray x):
    """An array of the shape and dtype of a channel parameter's gradient: dtype of weight, or of x if it is None."""
    return empty_vector(call.channels, cnp.PyArray_TYPE(x if weight is None else weight))


cdef cnp.ndarray empty_vector(cnp.npy_intp n, int number):
    """An array [n] of the type with this number."""
    return cnp.PyArray_EMPTY(1, &n, number, 0)


cdef cnp.ndarray reserve(Call *call, cnp.npy_intp size):
    """Set scratch of `size` bytes."""
    cdef cnp.ndarray scratch = cnp.PyArray_EMPTY(1, &size, cnp.NPY_UINT8, 0)
    call.scratch = cnp.PyArray_DATA(scratch)
    return scratch


cdef inline int copy_back(cnp.ndarray result, cnp.ndarray written) except -1:
    """Copy `written` to `result` unless they are one array; a float32 too large for float16 becomes infinite."""
    if written is not result:
        write_result(result, written, default_float_env())
    return 0


cdef int run_backward(Call *call, Entry entry, list results) except -1:
    """Launch a backward pass whose inputs are set; `results` are the gradients of x, gain and, for some norms, bias."""
    cdef cnp.ndarray dx = write_rows(call, &call.y, results[0])
    cdef cnp.ndarray dgain = write_gradient(call, &call.dgain, results[1]), dbias = None
    if len(results) > 2:
        dbias = write_gradient(call, &call.dbias, results[2])
    launch(call, entry)
    copy_back(results[0], dx)
    copy_back(results[1], dgain)
    if dbias is not None:
        copy_back(results[2], dbias)
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


cdef inline bint as_rows(cnp.ndarray a, Call *call, Rows *rows) noexcept:
    """Set `rows` and return True if `a` needs no copy: contiguous elements in a row, one stride between rows."""
    if cnp.PyArray_ISCARRAY_RO(a):
        rows.data, rows.stride = <char *>cnp.PyArray_DATA(a), call.n
        return True
    return as_strided_rows(a, call, rows)


cdef bint as_strided_rows(cnp.ndarray a, Call *call, Rows *rows) noexcept:
    cdef int ndim = cnp.PyArray_NDIM(a), axis = call.axis, i
    cdef cnp.npy_intp item = cnp.PyArray_ITEMSIZE(a), expected = item, step
    cdef cnp.npy_intp *shape = cnp.PyArray_DIMS(a)
    cdef cnp.npy_intp *strides = cnp.PyArray_STRIDES(a)
    rows.data = <char *>cnp.PyArray_DATA(a)
    rows.stride = 0
    if not cnp.PyArray_ISALIGNED(a) or ndim <= axis:
        return False
    for i in range(ndim - 1, axis - 1, -1):
        if shape[i] != 1 and strides[i] != expected:
            return False
        expected *= shape[i]
    if expected != item * call.n:
        return False
    step = 0
    for i in range(axis - 1, -1, -1):  # the leading dimensions must collapse into one
        if shape[i] == 1:
            continue
        if step == 0:
            if strides[i] % item:
                return False
            rows.stride = strides[i] // item
            step = strides[i]
            expected = step * shape[i]
            if step == 0:  # a broadcast row: all other leading dimensions must be 1
                return all_one(shape, i)
        elif strides[i] != expected:
            return False
        else:
            expected *= shape[i]
    if step == 0:  # one row
        rows.stride = expected // item
    return True


cdef bint all_one(cnp.npy_intp *shape, int before) noexcept:
    cdef int i
    for i in range(before):
        if shape[i] != 1:
            return False
    return True
