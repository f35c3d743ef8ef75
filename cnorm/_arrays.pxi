"""Arrays to pointers: dtype, shape, stride and overlap checks that all entries share."""

cpdef cnp.ndarray as_array(object a, str name, str call=None):
    """Any array-like that is not a plain Python number or sequence, as an ndarray.

    call: what to write where others have a normalized_shape in this argument's place.
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
        raise TypeError(f"{name} must be an array, NumPy's or one that NumPy can read, got {type(a).__name__}")
    try:
        return np.asarray(a) if readable else np.from_dlpack(a)
    except Exception as error:  # whatever the other library says about an array on a GPU, or one with a gradient
        raise TypeError(f"{name} must be an array that NumPy can read, got {type(a).__name__}: {error}") from error


cdef int bfloat16_number = -1  # the type number that NumPy gave ml_dtypes.bfloat16; it differs from run to run


cdef cnorm_dtype dtype_of(cnp.ndarray a, str name) except *:
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
    raise TypeError(f"{name} must have dtype float32, float64, float16 or bfloat16 in native byte order, got {a.dtype}")


cdef cnp.ndarray array_like(object given, str name, cnp.ndarray x, str of):
    """`given` as an array of the shape and dtype of x, which goes by the name `of`."""
    cdef cnp.ndarray a = as_array(given, name)
    if cnp.PyArray_TYPE(a) != cnp.PyArray_TYPE(x) or not cnp.PyArray_ISNOTSWAPPED(a):
        raise TypeError(f"{name} must have the dtype of {of}, {x.dtype}, got {a.dtype}")
    if not cnp.PyArray_SAMESHAPE(a, x):
        raise ValueError(f"{name} must have the shape of {of}, {(<object>x).shape}, got {(<object>a).shape}")
    return a


cdef int compute_number(cnorm_dtype dtype) noexcept:
    """NumPy's type number of the compute type: statistics, and weights inside."""
    return cnp.NPY_FLOAT64 if dtype == CNORM_F64 else cnp.NPY_FLOAT32


cdef int first_normalised(object axis, int ndim, cnp.ndarray x) except -1:
    """axis as an index from the front."""
    if type(axis) is int and ndim > 0 and -ndim <= axis < ndim:
        return axis + ndim if axis < 0 else axis
    try:
        i = None if isinstance(axis, bool) else operator.index(axis)
    except TypeError:
        i = None
    if i is None:
        raise TypeError(f"axis must be an integer, the first normalised dimension, got {axis!r}")
    if ndim == 0:
        raise ValueError("x must have at least one dimension, got a 0-dimensional array")
    if not -ndim <= i < ndim:
        raise ValueError(f"axis must be in [{-ndim}, {ndim}) for x of shape {(<object>x).shape}, got {axis}")
    return i + ndim if i < 0 else i


cdef double real_number(object value, str name, cnorm_dtype dtype=CNORM_F64) except -1.0:
    """A number, not negative, finite in what `dtype` is computed in."""
    cdef double number
    if type(value) is not float and not isinstance(value, (numbers.Real, np.ndarray)) or isinstance(value, bool):
        raise TypeError(f"{name} must be a real number, got {value!r}")
    if isinstance(value, np.ndarray) and (value.ndim or value.dtype.kind not in "fiu"):
        raise TypeError(f"{name} must be a real number, got {value!r}")
    try:
        number = float(value)
    except OverflowError:
        number = INFINITY
    if not number >= 0 or isinf(number):
        raise ValueError(f"{name} must be finite and not negative, got {value!r}")
    if number > FLT_MAX and dtype != CNORM_F64:
        raise ValueError(f"{name} must be finite in float32, got {value!r}")
    return number


cdef struct Rows:
    char *data
    ptrdiff_t stride  # elements from row to row


cdef bint as_rows(cnp.ndarray a, int axis, Rows *rows) noexcept:
    """True if `a` already is [rows, n] with the row's elements together and one stride between rows."""
    cdef int ndim = cnp.PyArray_NDIM(a), i
    cdef cnp.npy_intp item = cnp.PyArray_ITEMSIZE(a), expected = item, step
    cdef cnp.npy_intp *shape = cnp.PyArray_DIMS(a)
    cdef cnp.npy_intp *strides = cnp.PyArray_STRIDES(a)
    rows.data = <char *>cnp.PyArray_DATA(a)
    rows.stride = 0
    if not cnp.PyArray_ISALIGNED(a):
        return False
    for i in range(ndim - 1, axis - 1, -1):
        if shape[i] != 1 and strides[i] != expected:
            return False
        expected *= shape[i]
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
            if step == 0:  # a broadcast row: only one leading dimension can be so
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


cdef cnp.ndarray rows_of(cnp.ndarray a, int axis, Rows *rows):
    """`a` as rows; a copy where its strides do not allow that. The result keeps the memory alive."""
    if not as_rows(a, axis, rows):
        a = np.array(a, order="C", copy=True)
        as_rows(a, axis, rows)
    return a


cdef cnp.ndarray parameter(cnp.ndarray a, cnp.ndarray x, cnorm_dtype dtype, int axis, str name):
    """weight or bias `a`, checked to have the normalised shape; C-contiguous, in the compute type."""
    cdef int i, ndim = cnp.PyArray_NDIM(x) - axis, number = cnp.PyArray_TYPE(a), wanted = compute_number(dtype)
    cdef bint fits = cnp.PyArray_NDIM(a) == ndim
    if (number != wanted and number != cnp.PyArray_TYPE(x)) or not cnp.PyArray_ISNOTSWAPPED(a):
        also = " or float32" if wanted == cnp.NPY_FLOAT32 and dtype != CNORM_F32 else ""
        raise TypeError(f"{name} must have the dtype of x, {x.dtype}{also}, got {a.dtype}")
    if fits:
        for i in range(ndim):
            fits = fits and cnp.PyArray_DIMS(a)[i] == cnp.PyArray_DIMS(x)[axis + i]
    if not fits:
        raise ValueError(f"{name} must have the normalised shape {(<object>x).shape[axis:]} (x has shape "
                         f"{(<object>x).shape}, axis={axis}), got {(<object>a).shape}")
    a = contiguous(a)
    return a if number == wanted else widened(a, dtype)


cdef cnp.ndarray contiguous(cnp.ndarray a):
    """`a` where C can read it as it lies, else a copy; None stays None."""
    if a is None or (cnp.PyArray_IS_C_CONTIGUOUS(a) and cnp.PyArray_ISALIGNED(a)):
        return a
    return np.array(a, order="C", copy=True)


cdef cnp.ndarray widened(cnp.ndarray a, cnorm_dtype dtype):
    """A C-contiguous array of float16 or bfloat16 as float32."""
    cdef cnp.ndarray wide = cnp.PyArray_EMPTY(cnp.PyArray_NDIM(a), cnp.PyArray_DIMS(a), cnp.NPY_FLOAT32, 0)
    check(cnorm_widen(dtype, cnp.PyArray_SIZE(a), cnp.PyArray_DATA(a), <float *>cnp.PyArray_DATA(wide)))
    return wide


cdef cnp.ndarray rows_to(cnp.ndarray y, int axis, Rows *rows):
    """y itself where its strides let C write rows to it, else an array to copy from."""
    if as_rows(y, axis, rows):
        return y
    return rows_of(np.empty((<object>y).shape, y.dtype), axis, rows)


cdef bint same_place(cnp.ndarray a, cnp.ndarray b):
    cdef int i
    if cnp.PyArray_DATA(a) != cnp.PyArray_DATA(b) or cnp.PyArray_NDIM(a) != cnp.PyArray_NDIM(b):
        return False
    for i in range(cnp.PyArray_NDIM(a)):
        if cnp.PyArray_STRIDES(a)[i] != cnp.PyArray_STRIDES(b)[i] and cnp.PyArray_DIMS(a)[i] > 1:
            return False
    return True


cdef bint apart(cnp.ndarray a, cnp.ndarray b):
    """True at once for two contiguous arrays that do not touch; else NumPy decides exactly."""
    cdef char *p = <char *>cnp.PyArray_DATA(a)
    cdef char *q = <char *>cnp.PyArray_DATA(b)
    if cnp.PyArray_IS_C_CONTIGUOUS(a) and cnp.PyArray_IS_C_CONTIGUOUS(b):
        return p + cnp.PyArray_NBYTES(a) <= q or q + cnp.PyArray_NBYTES(b) <= p
    return not np.shares_memory(a, b)


cdef int check_out(cnp.ndarray out, str name, cnp.ndarray like) except -1:
    """out must be a writable array of the shape and dtype of `like`, each element in a place of its own."""
    if cnp.PyArray_TYPE(out) != cnp.PyArray_TYPE(like) or not cnp.PyArray_ISNOTSWAPPED(out):
        raise TypeError(f"{name} must have dtype {like.dtype}, got {out.dtype}")
    if not cnp.PyArray_SAMESHAPE(out, like):
        raise ValueError(f"{name} must have shape {(<object>like).shape}, got {(<object>out).shape}")
    if not cnp.PyArray_ISWRITEABLE(out):
        raise ValueError(f"{name} must be writable, got a read-only array")
    if not cnp.PyArray_IS_C_CONTIGUOUS(out):
        room = out.itemsize  # bytes that the dimensions seen so far span, smallest stride first
        for stride, length in sorted((abs(s), n) for s, n in zip((<object>out).strides, (<object>out).shape) if n > 1):
            if stride < room:
                raise ValueError(f"{name} must have a place for each element, got a view with strides "
                                 f"{(<object>out).strides} for shape {(<object>out).shape}")
            room += stride * (length - 1)
    return 0


cdef cnp.ndarray output(object out, str name, cnp.ndarray like):
    """The caller's array, checked, or a new one."""
    if out is None:
        return cnp.PyArray_EMPTY(cnp.PyArray_NDIM(like), cnp.PyArray_DIMS(like), cnp.PyArray_TYPE(like), 0)
    if not isinstance(out, np.ndarray) or isinstance(out, np.ma.MaskedArray):
        raise TypeError(f"{name} must be a NumPy array or None, got {type(out).__name__}")
    check_out(out, name, like)
    return out


cdef int check_apart(cnp.ndarray out, str name, object other, str other_name, bint in_place) except -1:
    """out may be exactly `other` if in_place, else must not touch it."""
    if other is not None and not apart(out, other) and not (in_place and same_place(out, other)):
        raise ValueError(f"{name} must not overlap {other_name}" +
                         (" (exactly the same array is in place and allowed)" if in_place else ""))
    return 0


cdef cnp.ndarray computed(cnp.ndarray result, cnorm_dtype dtype):
    """A gradient of weight or bias: `result` itself where C can write to it, else an array to copy from."""
    if (cnp.PyArray_TYPE(result) == compute_number(dtype) and cnp.PyArray_IS_C_CONTIGUOUS(result)
            and cnp.PyArray_ISALIGNED(result)):
        return result
    return np.empty((<object>result).shape, np.float64 if dtype == CNORM_F64 else np.float32)


cdef int deliver(results, sources) except -1:
    """Copy what C could not write where it is wanted; what does not fit float16 is infinite, as the dtype has it."""
    for result, source in zip(results, sources):
        if result is not source:
            with KernelArithmetic():
                result[...] = source
    return 0


cdef int count_rows(cnp.ndarray x, int axis, ptrdiff_t *rows, ptrdiff_t *n) except -1:
    cdef int i
    rows[0] = n[0] = 1
    for i in range(cnp.PyArray_NDIM(x)):
        if i < axis:
            rows[0] *= cnp.PyArray_DIMS(x)[i]
        else:
            n[0] *= cnp.PyArray_DIMS(x)[i]
    if n[0] == 0:
        raise ValueError(f"x must have at least one element in each row: axis={axis} leaves rows of shape "
                         f"{(<object>x).shape[axis:]} (x has shape {(<object>x).shape})")
    return 0


cdef cnorm_dtype whole_dtype(cnp.ndarray a, str name) except *:
    """float32 or float64: the family has no half types."""
    cdef int number = cnp.PyArray_TYPE(a)
    if number not in (cnp.NPY_FLOAT32, cnp.NPY_FLOAT64) or not cnp.PyArray_ISNOTSWAPPED(a):
        raise TypeError(f"{name} must have dtype float32 or float64 in native byte order, got {a.dtype}")
    return CNORM_F32 if number == cnp.NPY_FLOAT32 else CNORM_F64


cdef struct Volume:
    ptrdiff_t samples, channels, space


cdef int volume_of(cnp.ndarray x, int least, Volume *volume) except -1:
    """x [samples, channels, *space]."""
    cdef int i
    if cnp.PyArray_NDIM(x) < least:
        raise ValueError(f"x must have at least {least} dimensions, (samples, channels{', space, ...' * (least - 2)}), "
                         f"got shape {(<object>x).shape}")
    volume.samples, volume.channels, volume.space = cnp.PyArray_DIMS(x)[0], cnp.PyArray_DIMS(x)[1], 1
    for i in range(2, cnp.PyArray_NDIM(x)):
        volume.space *= cnp.PyArray_DIMS(x)[i]
    if volume.channels * volume.space == 0:
        raise ValueError(f"x must have at least one element in each sample, got shape {(<object>x).shape}")
    return 0


cdef cnp.ndarray vector(object p, cnp.ndarray x, ptrdiff_t length, str name, str what):
    """p [length] of x's dtype; None stays None. `what` says what there is one number for."""
    if p is None:
        return None
    cdef cnp.ndarray a = as_array(p, name)
    if cnp.PyArray_TYPE(a) != cnp.PyArray_TYPE(x) or not cnp.PyArray_ISNOTSWAPPED(a):
        raise TypeError(f"{name} must have the dtype of x, {x.dtype}, got {a.dtype}")
    if cnp.PyArray_NDIM(a) != 1 or cnp.PyArray_DIMS(a)[0] != length:
        raise ValueError(f"{name} must have shape ({length},), one number for each {what}, got {(<object>a).shape}")
    return a


cdef void *data_of(cnp.ndarray a) noexcept:
    return NULL if a is None else cnp.PyArray_DATA(a)


cdef cnp.ndarray result_of(object out, cnp.ndarray x, inputs):
    """The array y that a forward call fills: `out`, checked against the inputs (name, array), or a new one."""
    cdef cnp.ndarray y = output(out, "out", x)
    if out is not None:
        for name, array in inputs:
            check_apart(y, "out", array, name, array is x)
    return y


cdef list gradients_of(object out, str names, likes, in_place, inputs):
    """The arrays that a backward call fills: `out`, a tuple, checked against the inputs (name, array) and itself."""
    cdef int i, j
    if out is None:
        out = (None,) * len(likes)
    elif not isinstance(out, tuple):
        raise TypeError(f"out must be a tuple {names} or None, got {type(out).__name__}")
    elif len(out) != len(likes):
        raise ValueError(f"out must be a tuple of {len(likes)}, {names}, got {len(out)}")
    parameter = names.strip("()").split(", ")[1].removeprefix("d")
    if out[1] is not None and dict(inputs)[parameter] is None:
        raise ValueError(f"out[1] must be None where {parameter} is None")
    results = [output(given, f"out[{i}]", like) for i, (given, like) in enumerate(zip(out, likes))]
    for i in range(len(results)):
        if out[i] is None:
            continue
        for name, array in inputs:
            check_apart(results[i], f"out[{i}]", array, name, i == 0 and name in in_place)
        for j in range(len(results)):
            if j != i:
                check_apart(results[i], f"out[{i}]", results[j], f"out[{j}]", False)
    return results


cdef ptrdiff_t whole_number(object value, str name, ptrdiff_t least) except -1:
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None:
        raise TypeError(f"{name} must be an integer, got {value!r}")
    if number < least:
        raise ValueError(f"{name} must be at least {least}, got {number}")
    return min(number, 1 << 60)
