"""Checks that all functions share: type, dtype, shape and overlap of arrays, and numbers.

The quick tests are here; what they do not accept goes to a function of cnorm/arguments.py.
"""
from cnorm.arguments import (
    as_array, axis_of, check_averages, check_isa, check_output, check_results, check_var, is_bfloat16, real_number,
    refuse_bound, refuse_dtype, refuse_empty_rows, refuse_foreign_stream, refuse_frames, refuse_groups,
    refuse_infinite, refuse_mask, refuse_matrix, refuse_momentum, refuse_no_moment, refuse_output_frames,
    refuse_overlap, refuse_per_channel, refuse_per_element, refuse_rows, refuse_running_variance, refuse_samples,
    refuse_single_numbers, refuse_stats, refuse_streams, refuse_tape_array, refuse_unlike, restored_stats,
    stats_data, stats_rows, whole_number,
)


cdef inline cnp.ndarray array_of(object a, str name):
    """Any array-like as an ndarray; Python's numbers and sequences are refused."""
    return <cnp.ndarray>a if type(a) is cnp.ndarray else as_array(a, name)


# ---- dtypes ----------------------------------------------------------------------------------------------------

cdef int bfloat16_number = -1  # the type number that NumPy gave ml_dtypes.bfloat16; it differs from run to run


cdef inline int dtype_of(cnp.ndarray a, str name) except -1:
    """The cnorm_dtype of `a`."""
    global bfloat16_number
    cdef int number = cnp.PyArray_TYPE(a)
    if cnp.PyArray_ISNOTSWAPPED(a):
        if number == cnp.NPY_FLOAT32:
            return CNORM_F32
        if number == cnp.NPY_FLOAT64:
            return CNORM_F64
        if number == cnp.NPY_FLOAT16:
            return CNORM_F16
        if number == bfloat16_number:
            return CNORM_BF16
    if not is_bfloat16(a):
        refuse_dtype(a, name, "float32, float64, float16 or bfloat16")
    bfloat16_number = number
    return CNORM_BF16


cdef int full_dtype_of(cnp.ndarray a, str name) except -1:
    """The cnorm_dtype of an array for a norm that supports float32 and float64 only."""
    if not has_dtype(a, cnp.NPY_FLOAT32) and not has_dtype(a, cnp.NPY_FLOAT64):
        refuse_dtype(a, name, "float32 or float64")
    return CNORM_F32 if cnp.PyArray_TYPE(a) == cnp.NPY_FLOAT32 else CNORM_F64


cdef inline int compute_number(cnorm_dtype dtype) noexcept:
    """NumPy's type number of the compute type, which statistics have, and parameters when they are passed to C."""
    return cnp.NPY_FLOAT64 if dtype == CNORM_F64 else cnp.NPY_FLOAT32


cdef inline bint has_dtype(cnp.ndarray a, int number) noexcept:
    return cnp.PyArray_TYPE(a) == number and cnp.PyArray_ISNOTSWAPPED(a)


# ---- shapes ----------------------------------------------------------------------------------------------------

cdef inline bint same_lengths(cnp.npy_intp *a, cnp.npy_intp *b, int ndim) noexcept:
    cdef int i
    for i in range(ndim):
        if a[i] != b[i]:
            return False
    return True


cdef cnp.ndarray array_like(object given, str name, cnp.ndarray x, str x_name):
    """`given` as an array, checked to have the shape and dtype of x; messages call them `name` and `x_name`."""
    cdef cnp.ndarray a = array_of(given, name)
    if not has_dtype(a, cnp.PyArray_TYPE(x)) or not cnp.PyArray_SAMESHAPE(a, x):
        refuse_unlike(a, name, x, x_name)
    return a


cdef inline int first_normalised(object axis, cnp.ndarray x) except -1:
    """axis as an index that is not negative, checked."""
    cdef int ndim = cnp.PyArray_NDIM(x), overflow
    cdef long number
    if type(axis) is int:  # without Python's comparisons, which take 30 ns
        number = PyLong_AsLongAndOverflow(axis, &overflow)
        if -ndim <= number < ndim and not overflow:
            return <int>number + ndim if number < 0 else <int>number
    return axis_of(axis, x)


cdef cnp.ndarray per_channel(object p, cnp.ndarray x, ptrdiff_t length, str name, str each):
    """p [length], of x's dtype or the compute type; None stays None. `each`: what has one number, for messages."""
    if p is None:
        return None
    cdef cnp.ndarray a = array_of(p, name)
    cdef int compute = cnp.NPY_FLOAT32 if cnp.PyArray_ITEMSIZE(x) == 2 else cnp.PyArray_TYPE(x)
    if (not (has_dtype(a, cnp.PyArray_TYPE(x)) or has_dtype(a, compute))
            or cnp.PyArray_NDIM(a) != 1 or cnp.PyArray_DIMS(a)[0] != length):
        refuse_per_channel(a, name, x, length, each)
    return a


# ---- numbers ---------------------------------------------------------------------------------------------------

cdef inline double number_of(object value, str name, cnorm_dtype dtype) except -1.0:
    """A number, checked not to be negative, and to be finite in the compute type of `dtype`."""
    if type(value) is float and 0 <= <double>value <= FLT_MAX:
        return <double>value
    return real_number(value, name, dtype != CNORM_F64)


cdef inline ptrdiff_t integer_of(object value, str name, ptrdiff_t least) except -1:
    """An integer, checked to be at least `least`; one of more than 2**60 becomes 2**60."""
    cdef int overflow = 0
    cdef long number
    if type(value) is int:
        number = PyLong_AsLongAndOverflow(value, &overflow)
        if not overflow and least <= number <= 1 << 30:
            return number
    return whole_number(value, name, least)


cdef extern from *:
    """
    /* volatile: both conversions stay between the changes of mode */
    static double to_float(double number)
    {
        volatile double from = number;
        const float_mode mode = float_mode_enter();
        volatile double to = (float)from;
        float_mode_leave(mode);
        return to;
    }
    """
    double to_float(double number)


def rounded(value, str name, dtype="float32"):
    """An eps or sigma as a norm of this dtype uses it: checked, and rounded to float32 or float64 as in the kernels."""
    cdef bint single = np.dtype(dtype) != np.float64
    cdef double number = real_number(value, name, single)
    return to_float(number) if single else number


# ---- outputs and overlap ---------------------------------------------------------------------------------------

cdef cnp.ndarray output(object out, str name, cnp.ndarray like):
    """The caller's array, checked to have the shape and dtype of `like`, or a new one."""
    if out is None:
        return cnp.PyArray_EMPTY(cnp.PyArray_NDIM(like), cnp.PyArray_DIMS(like), cnp.PyArray_TYPE(like), 0)
    if type(out) is not cnp.ndarray or not is_plain_output(<cnp.ndarray>out, like):
        check_output(out, name, like)
    return out


cdef inline bint is_plain_output(cnp.ndarray out, cnp.ndarray like) noexcept:
    return (cnp.PyArray_TYPE(out) == cnp.PyArray_TYPE(like) and cnp.PyArray_ISCARRAY(out)
            and cnp.PyArray_NDIM(out) == cnp.PyArray_NDIM(like)
            and same_lengths(cnp.PyArray_DIMS(out), cnp.PyArray_DIMS(like), cnp.PyArray_NDIM(out)))


cdef bint same_view(cnp.ndarray a, cnp.ndarray b) noexcept:
    """Whether element i of `a` is element i of `b`, for arrays of one shape and dtype."""
    cdef int i
    if cnp.PyArray_DATA(a) != cnp.PyArray_DATA(b) or cnp.PyArray_NDIM(a) != cnp.PyArray_NDIM(b):
        return False
    for i in range(cnp.PyArray_NDIM(a)):
        if cnp.PyArray_STRIDES(a)[i] != cnp.PyArray_STRIDES(b)[i] and cnp.PyArray_DIMS(a)[i] > 1:
            return False
    return True


cdef inline bint apart(cnp.ndarray a, cnp.ndarray b) noexcept:
    """Whether both arrays are contiguous and share no byte."""
    cdef char *p = <char *>cnp.PyArray_DATA(a)
    cdef char *q = <char *>cnp.PyArray_DATA(b)
    if not (cnp.PyArray_IS_C_CONTIGUOUS(a) and cnp.PyArray_IS_C_CONTIGUOUS(b)):
        return False
    return p + cnp.PyArray_NBYTES(a) <= q if p < q else q + cnp.PyArray_NBYTES(b) <= p


cdef inline bint disjoint(cnp.ndarray a, cnp.ndarray b) except -1:
    """Whether the arrays share no byte: by address, or else by NumPy's exact test."""
    return apart(a, b) or not np.shares_memory(a, b)


cdef inline int check_disjoint(cnp.ndarray out, str name, cnp.ndarray other, str other_name, bint in_place) except -1:
    """out must not overlap `other`, unless `in_place` and it is the same view; None overlaps nothing."""
    if other is None or apart(out, other):
        return 0
    return check_overlap(out, name, other, other_name, in_place)


cdef int check_overlap(cnp.ndarray out, str name, cnp.ndarray other, str other_name, bint in_place) except -1:
    if not (in_place and same_view(out, other)) and not disjoint(out, other):
        refuse_overlap(name, other_name, in_place)
    return 0


cdef cnp.ndarray result_of(object out, cnp.ndarray x, cnp.ndarray weight, cnp.ndarray bias, cnp.ndarray mean=None,
                           cnp.ndarray var=None):
    """The array y of a forward pass: `out`, checked to overlap no input but x, or a new one."""
    cdef cnp.ndarray y = output(out, "out", x)
    if out is not None:
        check_disjoint(y, "out", x, "x", True)
        check_disjoint(y, "out", weight, "weight", weight is x)
        check_disjoint(y, "out", bias, "bias", bias is x)
        check_disjoint(y, "out", mean, "mean", False)
        check_disjoint(y, "out", var, "var", False)
    return y


cdef list gradients_of(object out, tuple names, tuple likes, tuple input_names, tuple inputs):
    """The results of a backward pass: the arrays in `out`, checked against the inputs and one another, or new ones.

    names, likes: of the results, and arrays of their shapes and dtypes; the second is the gradient of an input.
    input_names, inputs: arrays or None; the first two are the output's gradient and x, and dx may be written in place
    of either.
    """
    cdef int i, j, count = len(names)
    cdef tuple places = ("out[0]", "out[1]", "out[2]")
    cdef cnp.ndarray result
    cdef list results = []
    if out is None:
        return [output(None, "", like) for like in likes]
    cdef bint usual = type(out) is tuple and len(<tuple>out) == count
    for array in inputs:
        usual = usual and array is not None
    if not usual:
        check_results(out, names, dict(zip(input_names, inputs)))
        out = tuple(out)
    for i in range(count):
        given = (<tuple>out)[i]
        result = output(given, <str>places[i], <cnp.ndarray>likes[i])
        results.append(result)
        if given is None:
            continue
        for j in range(len(inputs)):
            check_disjoint(result, <str>places[i], <cnp.ndarray>inputs[j], <str>input_names[j], i == 0 and j < 2)
        for j in range(i):
            check_disjoint(result, <str>places[i], <cnp.ndarray>results[j], <str>places[j], False)
    return results
