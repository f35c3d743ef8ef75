"""Conversions and checks that all functions share: type, dtype, shape and overlap of arrays, and numbers.

The quick tests are here; what they do not accept goes to a function of cnorm/arguments.py.

A conversion may run the caller's code (`__array__`, `__index__`, `__float__`), which may change other arguments. So a
function first converts all its arguments, by `array_of`, `place_of`, `integer_of`, `real_of`, ...; then it checks what
they became, which runs no code of the caller's. The functions that set the pointers of a call of C (`_call.pxi`) test
once more, without Python, that each array has the elements that the call reads or writes.
"""
from cnorm.arguments import (
    as_array, as_axis, as_place, check_averages, check_isa, check_output, check_results, check_var, is_bfloat16,
    real_number, refuse_axis, refuse_bound, refuse_changed, refuse_dtype, refuse_empty_rows, refuse_foreign_stream,
    refuse_frames, refuse_groups, refuse_infinite, refuse_mask, refuse_matrix, refuse_momentum, refuse_no_moment,
    refuse_not_single, refuse_output_frames, refuse_overlap, refuse_per_channel, refuse_per_element, refuse_rows,
    refuse_running_variance, refuse_samples, refuse_single_numbers, refuse_stats, refuse_streams,
    refuse_tape_array, refuse_token, refuse_unlike, restored_stats, stats_data, stats_rows, whole_number,
)


# ---- conversions -----------------------------------------------------------------------------------------------

cdef inline cnp.ndarray array_of(object a, str name):
    """Any array-like as an ndarray; Python's numbers and sequences are refused."""
    return <cnp.ndarray>a if type(a) is cnp.ndarray else as_array(a, name)


cdef inline cnp.ndarray parameter_of(object p, str name, str usage=None):
    """An optional array; None stays None. `usage`: `call` of `as_array`."""
    return <cnp.ndarray>p if p is None or type(p) is cnp.ndarray else as_array(p, name, usage)


cdef inline cnp.ndarray place_of(object out, str name):
    """The caller's array for a result, as an array that is not of a subclass; None stays None."""
    return <cnp.ndarray>out if out is None or type(out) is cnp.ndarray else as_place(out, name)


cdef tuple places_of(object out, tuple names, bint has_parameter):
    """The caller's arrays for the results of a backward pass, `out` itself if it has nothing else, or None.

    `has_parameter`: the second has a gradient.
    """
    if out is None:
        return None
    if type(out) is not tuple or len(<tuple>out) != len(names) or not has_parameter:
        out = check_results(out, names, has_parameter)
    for place in <tuple>out:
        if type(place) is not cnp.ndarray:
            return tuple([place_of(place, name) for place, name in zip(out, PLACES)])
    return <tuple>out


cdef tuple PLACES = ("out[0]", "out[1]", "out[2]")


cdef inline ptrdiff_t axis_of(object axis, cnp.ndarray x) except? -100:  # not -1, the usual axis
    """The first normalised dimension of x, from an integer or a tuple; not checked to be a dimension."""
    cdef int overflow = 0
    cdef long number
    if type(axis) is int:  # without Python's comparisons, which take 30 ns
        number = PyLong_AsLongAndOverflow(axis, &overflow)
        if not overflow:
            return number
    return as_axis(axis, cnp.PyArray_NDIM(x))


cdef inline double real_of(object value, str name) except -1.0:
    """A number, checked not to be negative and to be finite."""
    return <double>value if type(value) is float and 0 <= <double>value <= FLT_MAX else real_number(value, name)


cdef inline ptrdiff_t integer_of(object value, str name, ptrdiff_t least) except -1:
    """An integer, checked to be at least `least`; one of more than 2**60 becomes 2**60."""
    cdef int overflow = 0
    cdef long number
    if type(value) is int:
        number = PyLong_AsLongAndOverflow(value, &overflow)
        if not overflow and least <= number <= 1 << 30:
            return number
    return whole_number(value, name, least)


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
    if not cnp.PyTypeNum_ISUSERDEF(number) or not is_bfloat16(a):  # a type that C code has registered
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

cdef inline cnp.npy_intp size_of(cnp.ndarray a) noexcept:
    """PyArray_SIZE without a call."""
    cdef cnp.npy_intp size = 1
    cdef int i
    for i in range(cnp.PyArray_NDIM(a)):
        size *= cnp.PyArray_DIMS(a)[i]
    return size


cdef inline cnp.npy_intp bytes_of(cnp.ndarray a) noexcept:
    return size_of(a) * cnp.PyArray_ITEMSIZE(a)


cdef inline bint same_lengths(cnp.npy_intp *a, cnp.npy_intp *b, int ndim) noexcept:
    cdef int i
    for i in range(ndim):
        if a[i] != b[i]:
            return False
    return True


cdef int check_like(cnp.ndarray a, str name, cnp.ndarray x, str x_name) except -1:
    """Check that `a` has the shape and dtype of x; messages call them `name` and `x_name`."""
    if not has_dtype(a, cnp.PyArray_TYPE(x)) or not cnp.PyArray_SAMESHAPE(a, x):
        refuse_unlike(a, name, x, x_name)
    return 0


cdef inline int first_normalised(ptrdiff_t axis, cnp.ndarray x) except -1:
    """axis as an index that is not negative, checked."""
    cdef int ndim = cnp.PyArray_NDIM(x)
    if not -ndim <= axis < ndim:
        refuse_axis(axis, x)
    return <int>axis + ndim if axis < 0 else <int>axis


cdef int check_per_channel(cnp.ndarray p, cnp.ndarray x, ptrdiff_t length, str name, str each) except -1:
    """Check p [length], of x's dtype or the compute type, or None. `each`: what has one number, for messages."""
    if p is None:
        return 0
    cdef int compute = cnp.NPY_FLOAT32 if cnp.PyArray_ITEMSIZE(x) == 2 else cnp.PyArray_TYPE(x)
    if (not (has_dtype(p, cnp.PyArray_TYPE(x)) or has_dtype(p, compute))
            or cnp.PyArray_NDIM(p) != 1 or cnp.PyArray_DIMS(p)[0] != length):
        refuse_per_channel(p, name, x, length, each)
    return 0


# ---- numbers ---------------------------------------------------------------------------------------------------

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
    cdef double number = real_number(value, name)
    if single and number > FLT_MAX:
        refuse_not_single(number, name)
    return to_float(number) if single else number


# ---- outputs and overlap ---------------------------------------------------------------------------------------

cdef cnp.ndarray output(cnp.ndarray place, str name, cnp.ndarray like):
    """A place for a result, checked to have the shape and dtype of `like`, or a new array for None."""
    if place is None:
        return cnp.PyArray_EMPTY(cnp.PyArray_NDIM(like), cnp.PyArray_DIMS(like), cnp.PyArray_TYPE(like), 0)
    if not is_plain_output(place, like):
        check_output(place, name, like)
    return place


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
    return p + bytes_of(a) <= q if p < q else q + bytes_of(b) <= p


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


cdef cnp.ndarray result_of(cnp.ndarray place, cnp.ndarray x, cnp.ndarray weight, cnp.ndarray bias,
                           cnp.ndarray mean=None, cnp.ndarray var=None):
    """The array y of a forward pass: `place`, checked to overlap no input but x, or a new one."""
    cdef cnp.ndarray y = output(place, "out", x)
    if place is not None:
        check_disjoint(y, "out", x, "x", True)
        check_disjoint(y, "out", weight, "weight", weight is x)
        check_disjoint(y, "out", bias, "bias", bias is x)
        check_disjoint(y, "out", mean, "mean", False)
        check_disjoint(y, "out", var, "var", False)
    return y


cdef list gradients_of(tuple places, tuple likes, tuple input_names, tuple inputs):
    """The results of a backward pass: `places`, checked against the inputs and one another, or new arrays.

    likes: arrays of the results' shapes and dtypes.
    input_names, inputs: arrays or None; the first two are the output's gradient and x, and dx may be written in place
    of either.
    """
    cdef int i, j
    cdef cnp.ndarray result
    cdef list results = []
    if places is None:
        return [output(None, "", like) for like in likes]
    for i in range(len(likes)):
        result = output(places[i], <str>PLACES[i], <cnp.ndarray>likes[i])
        results.append(result)
        if places[i] is None:
            continue
        for j in range(len(inputs)):
            check_disjoint(result, <str>PLACES[i], <cnp.ndarray>inputs[j], <str>input_names[j], i == 0 and j < 2)
        for j in range(i):
            check_disjoint(result, <str>PLACES[i], <cnp.ndarray>results[j], <str>PLACES[j], False)
    return results


cdef tuple returned(object out, tuple places, list results, bint has_parameter):
    """What a backward pass returns: the caller's own objects of `out` for `results`; None for an absent parameter."""
    cdef int i
    if out is not None:
        if places is out:
            return places
        for i in range(len(results)):
            if (<tuple>out)[i] is not None:
                results[i] = (<tuple>out)[i]
    if not has_parameter:
        results[1] = None
    return tuple(results)
