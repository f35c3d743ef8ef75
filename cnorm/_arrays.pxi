"""Checks that all functions share: type, dtype, shape and overlap of arrays, and numbers."""

cdef str quoted(object value):
    """repr of a value that may come from an untrusted source: at most 80 characters, none of them a control character.

    repr escapes control characters in strings, but not in the name of a type.
    """
    cdef str text = str(value) if isinstance(value, np.dtype) else repr(value)
    text = "".join([c if c.isprintable() else repr(c)[1:-1] for c in text[:81]])
    return text if len(text) <= 80 else text[:77] + "..."


cpdef cnp.ndarray as_array(object a, str name, str call=None):
    """Any array-like as an ndarray; Python's numbers and sequences are refused.

    call: the right way to write the call, for messages; given for arguments in whose place other libraries have
    normalized_shape.
    """
    if type(a) is cnp.ndarray:
        return <cnp.ndarray>a
    if call is not None and isinstance(a, (tuple, list, int)):
        raise TypeError(f"{name} must be an array or None, got {a!r:.40}: there is no normalized_shape; the shape of "
                        f"{name} says it, or axis=-k for the last k dimensions: {call}")
    if isinstance(a, np.ma.MaskedArray):
        raise TypeError(f"{name} must be a plain array, got a MaskedArray, whose mask would be ignored; "
                        "pass x.filled(value)")
    readable = (isinstance(a, (np.ndarray, memoryview, bytearray)) or hasattr(a, "__array__")
                or hasattr(a, "__array_interface__") or type(a).__name__ == "array")
    if not readable and not hasattr(a, "__dlpack__"):
        hint = f", which has no dtype: pass np.float32({name})" if type(a) is list else ""
        raise TypeError(f"{name} must be an array, NumPy's or another library's, got {type(a).__name__}{hint}")
    try:
        return np.asarray(a) if readable else np.from_dlpack(a)
    except Exception as error:  # the other library's error, for an array on a GPU or one with a gradient
        raise TypeError(f"{name} must be an array that NumPy can read, got {type(a).__name__}: "
                        f"{quoted(str(error))}") from error


# ---- dtypes ----------------------------------------------------------------------------------------------------

cdef int bfloat16_number = -1  # the type number that NumPy gave ml_dtypes.bfloat16; it differs from run to run


cdef int dtype_of(cnp.ndarray a, str name) except -1:
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
        if a.dtype.name == "bfloat16" and a.dtype.type.__module__ == "ml_dtypes":
            bfloat16_number = number
            return CNORM_BF16
    raise TypeError(f"{name} must have dtype float32, float64, float16 or bfloat16 in native byte order, "
                    f"got {quoted(a.dtype)}")


cdef int full_dtype_of(cnp.ndarray a, str name) except -1:
    """The cnorm_dtype of an array for a norm that supports float32 and float64 only."""
    cdef int number = cnp.PyArray_TYPE(a)
    if number not in (cnp.NPY_FLOAT32, cnp.NPY_FLOAT64) or not cnp.PyArray_ISNOTSWAPPED(a):
        raise TypeError(f"{name} must have dtype float32 or float64 in native byte order, got {quoted(a.dtype)}")
    return CNORM_F32 if number == cnp.NPY_FLOAT32 else CNORM_F64


cdef inline int compute_number(cnorm_dtype dtype) noexcept:
    """NumPy's type number of the compute type, which statistics have, and parameters when they are passed to C."""
    return cnp.NPY_FLOAT64 if dtype == CNORM_F64 else cnp.NPY_FLOAT32


cdef object compute_dtype(cnp.ndarray x):
    """NumPy's dtype of the compute type of x."""
    return np.dtype(np.float32) if cnp.PyArray_ITEMSIZE(x) == 2 else x.dtype


cdef inline bint has_dtype(cnp.ndarray a, int number) noexcept:
    return cnp.PyArray_TYPE(a) == number and cnp.PyArray_ISNOTSWAPPED(a)


# ---- shapes ----------------------------------------------------------------------------------------------------

cdef cnp.ndarray array_like(object given, str name, cnp.ndarray x, str x_name):
    """`given` as an array, checked to have the shape and dtype of x; messages call them `name` and `x_name`."""
    cdef cnp.ndarray a = as_array(given, name)
    if not has_dtype(a, cnp.PyArray_TYPE(x)):
        raise TypeError(f"{name} must have the dtype of {x_name}, {x.dtype}, got {quoted(a.dtype)}")
    if not cnp.PyArray_SAMESHAPE(a, x):
        raise ValueError(f"{name} must have the shape of {x_name}, {(<object>x).shape}, got {(<object>a).shape}")
    return a


cdef inline int first_normalised(object axis, cnp.ndarray x) except -1:
    """axis as an index that is not negative, checked."""
    cdef int ndim = cnp.PyArray_NDIM(x), overflow
    cdef long number
    if type(axis) is int:  # without Python's comparisons, which take 30 ns
        number = PyLong_AsLongAndOverflow(axis, &overflow)
        if -ndim <= number < ndim and not overflow:
            return <int>number + ndim if number < 0 else <int>number
    try:
        i = None if isinstance(axis, (bool, np.bool_)) else operator.index(axis)
    except TypeError:
        i = None
    if i is None:
        raise TypeError(f"axis must be an integer, the first normalised dimension, got {quoted(axis)}")
    if ndim == 0:
        raise ValueError("x must have at least one dimension, got a 0-dimensional array")
    if not -ndim <= i < ndim:
        raise ValueError(f"axis must be in [{-ndim}, {ndim}) for x of shape {(<object>x).shape}, got {quoted(axis)}")
    return i + ndim if i < 0 else i


cdef cnp.ndarray per_channel(object p, cnp.ndarray x, ptrdiff_t length, str name, str each):
    """p [length], of x's dtype or the compute type; None stays None. `each`: what has one number, for messages."""
    if p is None:
        return None
    cdef cnp.ndarray a = as_array(p, name)
    if not has_dtype(a, cnp.PyArray_TYPE(x)) and not has_dtype(a, compute_dtype(x).num):
        also = " or float32" if cnp.PyArray_ITEMSIZE(x) == 2 else ""
        raise TypeError(f"{name} must have the dtype of x, {x.dtype}{also}, got {quoted(a.dtype)}")
    if cnp.PyArray_NDIM(a) != 1 or cnp.PyArray_DIMS(a)[0] != length:
        raise ValueError(f"{name} must have shape ({length},), one number for each {each}, got {(<object>a).shape}")
    return a


# ---- numbers ---------------------------------------------------------------------------------------------------

cdef inline double real_number(object value, str name, cnorm_dtype dtype=CNORM_F64) except -1.0:
    """A number, checked not to be negative, and to be finite in the compute type of `dtype`."""
    cdef double number
    if type(value) is float:
        number = <double>value
    else:
        if not isinstance(value, (numbers.Real, np.ndarray)) or isinstance(value, bool):
            raise TypeError(f"{name} must be a real number, got {quoted(value)}")
        if isinstance(value, np.ndarray) and (value.ndim or value.dtype.kind not in "fiu"):
            raise TypeError(f"{name} must be a real number, got {quoted(value)}")
        try:
            number = float(value)
        except OverflowError:
            number = INFINITY
    if not number >= 0 or isinf(number):
        raise ValueError(f"{name} must be finite and not negative, got {quoted(value)}")
    if number > FLT_MAX and dtype != CNORM_F64:
        raise ValueError(f"{name} must be finite in float32, got {quoted(value)}")
    return number


def rounded(value, str name, dtype=np.float32):
    """An eps or sigma as a norm of this dtype uses it: checked, and rounded to float32 or float64 as in the kernels."""
    cdef double number = real_number(value, name, CNORM_F64 if np.dtype(dtype) == np.float64 else CNORM_F32)
    with default_float_env():
        return float(np.dtype(dtype).type(number))


cdef ptrdiff_t whole_number(object value, str name, ptrdiff_t least) except -1:
    try:
        number = None if isinstance(value, (bool, np.bool_)) else operator.index(value)
    except TypeError:
        number = None
    if number is None:
        raise TypeError(f"{name} must be an integer, got {quoted(value)}")
    if number < least:
        raise ValueError(f"{name} must be at least {least}, got {quoted(number)}")
    return min(number, 1 << 60)


# ---- outputs and overlap ---------------------------------------------------------------------------------------

cdef cnp.ndarray output(object out, str name, cnp.ndarray like):
    """The caller's array, checked to have the shape and dtype of `like`, or a new one."""
    if out is None:
        return cnp.PyArray_EMPTY(cnp.PyArray_NDIM(like), cnp.PyArray_DIMS(like), cnp.PyArray_TYPE(like), 0)
    check_array(out, name)
    check_output(out, name, like)
    return out


cdef int check_array(object out, str name) except -1:
    """out must be an ndarray: results written to a converted copy, or under a mask, would be lost."""
    if type(out) is not cnp.ndarray and (not isinstance(out, np.ndarray) or isinstance(out, np.ma.MaskedArray)):
        raise TypeError(f"{name} must be a NumPy array or None, got {type(out).__name__}")
    return 0


cdef int check_output(cnp.ndarray out, str name, cnp.ndarray like) except -1:
    """out must be writable, of the shape and dtype of `like`, and no two of its elements may share memory."""
    if not has_dtype(out, cnp.PyArray_TYPE(like)):
        raise TypeError(f"{name} must have dtype {like.dtype}, got {quoted(out.dtype)}")
    if not cnp.PyArray_SAMESHAPE(out, like):
        raise ValueError(f"{name} must have shape {(<object>like).shape}, got {(<object>out).shape}")
    if not cnp.PyArray_ISWRITEABLE(out):
        raise ValueError(f"{name} must be writable, got a read-only array")
    if not cnp.PyArray_IS_C_CONTIGUOUS(out):
        span = out.itemsize  # bytes that the dimensions so far extend over, smallest stride first
        for stride, length in sorted((abs(s), n) for s, n in zip((<object>out).strides, (<object>out).shape) if n > 1):
            if stride < span:
                raise ValueError(f"{name} must have a place for each element, got a view with strides "
                                 f"{(<object>out).strides} for shape {(<object>out).shape}")
            span += stride * (length - 1)
    return 0


cdef bint same_view(cnp.ndarray a, cnp.ndarray b) noexcept:
    """Whether element i of `a` is element i of `b`, for arrays of one shape and dtype."""
    cdef int i
    if cnp.PyArray_DATA(a) != cnp.PyArray_DATA(b) or cnp.PyArray_NDIM(a) != cnp.PyArray_NDIM(b):
        return False
    for i in range(cnp.PyArray_NDIM(a)):
        if cnp.PyArray_STRIDES(a)[i] != cnp.PyArray_STRIDES(b)[i] and cnp.PyArray_DIMS(a)[i] > 1:
            return False
    return True


cdef inline bint disjoint(cnp.ndarray a, cnp.ndarray b) except -1:
    """Whether the arrays share no byte: by address if both are contiguous, else by NumPy's exact test."""
    cdef char *p = <char *>cnp.PyArray_DATA(a)
    cdef char *q = <char *>cnp.PyArray_DATA(b)
    if cnp.PyArray_IS_C_CONTIGUOUS(a) and cnp.PyArray_IS_C_CONTIGUOUS(b):
        return p + cnp.PyArray_NBYTES(a) <= q or q + cnp.PyArray_NBYTES(b) <= p
    return not np.shares_memory(a, b)


cdef inline int check_disjoint(cnp.ndarray out, str name, cnp.ndarray other, str other_name, bint in_place) except -1:
    """out must not overlap `other`, unless `in_place` and it is the same view; None overlaps nothing."""
    if other is not None and not (in_place and same_view(out, other)) and not disjoint(out, other):
        raise ValueError(f"{name} must not overlap {other_name}" +
                         (" (exactly the same array is in place and allowed)" if in_place else ""))
    return 0


cdef cnp.ndarray result_of(object out, cnp.ndarray x, tuple inputs):
    """The array y of a forward pass: `out`, checked against the `inputs` (name, array), or a new one."""
    cdef cnp.ndarray y = output(out, "out", x)
    if out is not None:
        for name, array in inputs:
            check_disjoint(y, "out", array, name, array is x)
    return y


cdef tuple OUT = tuple(f"out[{i}]" for i in range(8))  # names of the results of a backward pass, for messages


cdef list gradients_of(object out, tuple names, tuple likes, tuple inputs):
    """The results of a backward pass: the arrays in `out`, checked against the inputs and one another, or new ones.

    likes: arrays of the shapes and dtypes of the results.
    inputs: pairs (name, array); the first two are the output's gradient and x, and dx may be written in place of
    either. The second of `names` is the gradient of one of the inputs.
    """
    cdef int i, j
    if out is None:
        return [output(None, "", like) for like in likes]
    if not isinstance(out, tuple):
        raise TypeError(f"out must be a tuple ({', '.join(names)}) or None, got {type(out).__name__}")
    if len(out) != len(names):
        raise ValueError(f"out must be a tuple of {len(names)}, ({', '.join(names)}), got {len(out)}")
    parameter = names[1][1:]
    for name, array in inputs:
        if out[1] is not None and array is None and name == parameter:
            raise ValueError(f"out[1] must be None where {parameter} is None")
    results = [output(given, OUT[i], like) for i, (given, like) in enumerate(zip(out, likes))]
    for i in range(len(results)):
        if out[i] is None:
            continue
        for j, (name, array) in enumerate(inputs):
            check_disjoint(results[i], OUT[i], array, name, i == 0 and j < 2)
        for j in range(i):
            check_disjoint(results[i], OUT[i], results[j], OUT[j], False)
    return results
