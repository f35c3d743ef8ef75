# cython: language_level=3, cdivision=True, binding=True
"""The extension module: NumPy arrays to pointers, and every check that needs Python.

What a C caller can get wrong is checked in src/api.c and comes back as a status; `check` turns it into an exception.
Arrays go through the NumPy C-API: typed memoryviews cost ten times as much per call.
"""
cimport numpy as cnp
from cpython.mem cimport PyMem_Calloc, PyMem_Free
from libc.math cimport isinf

from cnorm._capi cimport (
    CNORM_ALIGN, CNORM_ERROR_ISA, CNORM_F32, CNORM_F64, CNORM_LINEAR, CNORM_LSTM, CNORM_OK, cnorm_dtype,
    cnorm_isa_active, cnorm_isa_count, cnorm_isa_name, cnorm_isa_use, cnorm_layer, cnorm_layer_norm,
    cnorm_layer_inputs, cnorm_layer_norm_backward, cnorm_layer_norm_backward_partials, cnorm_layer_outputs,
    cnorm_layer_state_floats, cnorm_matrix,
    cnorm_matrix_floats, cnorm_matrix_pack, cnorm_padded_units, cnorm_run, cnorm_scratch_floats, cnorm_sigmoid_f32,
    cnorm_state_floats, cnorm_status, cnorm_strerror, cnorm_tanh_f32,
)

import operator
import os

import numpy as np

cnp.import_array()

cdef enum:
    RELEASE_GIL_ABOVE = 16384       # elements of a norm; giving the GIL away costs about 20 ns
    RELEASE_GIL_ABOVE_MACS = 262144 # multiply-adds of a network, about 20 us: a shorter step keeps it, because
                                    # taking it back can cost 5 ms when another thread is busy

cdef extern from *:
    """
    static int take(int *flag) { return __atomic_exchange_n(flag, 1, __ATOMIC_ACQUIRE) == 0; }
    static void give_back(int *flag) { __atomic_store_n(flag, 0, __ATOMIC_RELEASE); }
    """
    bint take(int *flag) nogil
    void give_back(int *flag) nogil


cdef int check(cnorm_status status) except -1:
    if status != CNORM_OK:
        raise ValueError(cnorm_strerror(status).decode())
    return 0


# ---- instruction sets ------------------------------------------------------------------------------------------

def available_isas():
    """Instruction sets this machine can run, plainest first.

    Returns
    -------
    tuple of str
        Some of ``"baseline"``, ``"avx2"``, ``"avx512"``, ``"neon"``. All give the same bits.
    """
    return tuple(cnorm_isa_name(i).decode() for i in range(cnorm_isa_count()))


def active_isa():
    """The instruction set in use.

    Returns
    -------
    str
        The widest available one, unless `use_isa` or the environment variable ``CNORM_ISA`` chose another.
    """
    return cnorm_isa_active().decode()


def use_isa(name):
    """Use another instruction set from now on, in all threads. Results do not change, only their speed.

    Parameters
    ----------
    name : str
        One of `available_isas`.

    Raises
    ------
    TypeError
        If `name` is not a string.
    ValueError
        If it is unknown or this machine lacks it.
    """
    if not isinstance(name, str):
        raise TypeError(f"name must be a str, got {type(name).__name__}")
    if cnorm_isa_use(name.encode()) == CNORM_ERROR_ISA:
        raise ValueError(f"name must be an instruction set that this machine can run, one of {available_isas()}, "
                         f"got {name!r}")


if cnorm_isa_active() == NULL:
    raise ImportError(f"the environment variable CNORM_ISA is {os.environ.get('CNORM_ISA')!r}; this machine can run "
                      f"{', '.join(available_isas())}")


# ---- arrays ----------------------------------------------------------------------------------------------------

cdef cnp.ndarray as_array(object a, str name):
    """Any array-like that is not a plain Python number or sequence, as an ndarray."""
    if type(a) is cnp.ndarray:
        return <cnp.ndarray>a
    if isinstance(a, tuple) and name == "weight":
        raise TypeError("weight must be an array or None, got a tuple: there is no normalized_shape; the shape of "
                        "weight says it, or axis=-k for the last k dimensions: layer_norm(x, weight, bias, axis=-k)")
    if isinstance(a, np.ma.MaskedArray):
        raise TypeError(f"{name} must be a plain array, got a MaskedArray, whose mask would be ignored; "
                        "pass x.filled(value)")
    if not (isinstance(a, np.ndarray) or hasattr(a, "__array__") or hasattr(a, "__array_interface__")
            or hasattr(a, "__dlpack__") or isinstance(a, (memoryview, bytearray)) or type(a).__name__ == "array"):
        raise TypeError(f"{name} must be an array of float32 or float64, got {type(a).__name__}")
    return np.asarray(a)


cdef cnorm_dtype dtype_of(cnp.ndarray a, str name) except *:
    cdef int number = cnp.PyArray_TYPE(a)
    if cnp.PyArray_ISNOTSWAPPED(a):
        if number == cnp.NPY_FLOAT32:
            return CNORM_F32
        if number == cnp.NPY_FLOAT64:
            return CNORM_F64
    raise TypeError(f"{name} must have dtype float32 or float64 in native byte order, got {a.dtype}")


cdef int first_normalised(object axis, int ndim, tuple_of_shape) except -1:
    """axis as an index from the front."""
    cdef Py_ssize_t i
    if isinstance(axis, bool) or not hasattr(axis, "__index__"):
        raise TypeError(f"axis must be an integer, the first normalised dimension, got {axis!r}")
    i = operator.index(axis)
    if ndim == 0:
        raise ValueError("x must have at least one dimension, got a 0-dimensional array")
    if not -ndim <= i < ndim:
        raise ValueError(f"axis must be in [{-ndim}, {ndim}) for x of shape {tuple_of_shape}, got {axis}")
    return <int>(i + ndim if i < 0 else i)


cdef double checked_eps(object eps) except -1.0:
    cdef double value
    if isinstance(eps, (str, bytes, bool)) or not hasattr(eps, "__float__"):
        raise TypeError(f"eps must be a real number, got {eps!r}")
    value = float(eps)
    if not value >= 0 or isinf(value):
        raise ValueError(f"eps must be finite and not negative, got {eps!r}")
    return value


cdef struct Rows:
    char *data
    ptrdiff_t stride # elements from row to row


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
    for i in range(axis - 1, -1, -1): # the leading dimensions must collapse into one
        if shape[i] == 1:
            continue
        if step == 0:
            if strides[i] % item:
                return False
            rows.stride = strides[i] // item
            step = strides[i]
            expected = step * shape[i]
            if step == 0: # a broadcast row: only one leading dimension can be so
                return all_one(shape, i)
        elif strides[i] != expected:
            return False
        else:
            expected *= shape[i]
    if step == 0: # one row
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


cdef cnp.ndarray parameter(object p, cnp.ndarray x, int axis, str name):
    """weight or bias: of x's dtype and of the normalised shape, C-contiguous."""
    cdef cnp.ndarray a = as_array(p, name)
    cdef int i, ndim = cnp.PyArray_NDIM(x) - axis
    cdef bint fits = cnp.PyArray_NDIM(a) == ndim
    if cnp.PyArray_TYPE(a) != cnp.PyArray_TYPE(x) or not cnp.PyArray_ISNOTSWAPPED(a):
        raise TypeError(f"{name} must have the dtype of x, {x.dtype}, got {a.dtype}")
    if fits:
        for i in range(ndim):
            fits = fits and cnp.PyArray_DIMS(a)[i] == cnp.PyArray_DIMS(x)[axis + i]
    if not fits:
        raise ValueError(f"{name} must have the normalised shape {(<object>x).shape[axis:]} (x has shape "
                         f"{(<object>x).shape}, axis={axis}), got {(<object>a).shape}")
    if not (cnp.PyArray_IS_C_CONTIGUOUS(a) and cnp.PyArray_ISALIGNED(a)):
        a = np.array(a, order="C", copy=True)
    return a


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
    cdef int i
    if cnp.PyArray_TYPE(out) != cnp.PyArray_TYPE(like) or not cnp.PyArray_ISNOTSWAPPED(out):
        raise TypeError(f"{name} must have dtype {like.dtype}, got {out.dtype}")
    if not cnp.PyArray_SAMESHAPE(out, like):
        raise ValueError(f"{name} must have shape {(<object>like).shape}, got {(<object>out).shape}")
    if not cnp.PyArray_ISWRITEABLE(out):
        raise ValueError(f"{name} must be writable, got a read-only array")
    for i in range(cnp.PyArray_NDIM(out)):
        if cnp.PyArray_STRIDES(out)[i] == 0 and cnp.PyArray_DIMS(out)[i] > 1:
            raise ValueError(f"{name} must have a place for each element, got a broadcast view")
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


# ---- layer normalisation -----------------------------------------------------------------------------------------

cdef class Stats:
    """What the backward pass needs of the forward one: each row's mean and 1/sqrt(var + eps).

    Returned by ``layer_norm(..., return_stats=True)``; there the mean is kept exactly, as an unevaluated sum of two
    numbers. ``stats[i:j]`` selects rows along the leading dimensions.

    Parameters
    ----------
    mean, inv_std_dev : ndarray, shape x.shape[:axis] + (1, ...), float32 or float64
        Plain statistics from elsewhere, such as the two extra outputs of ONNX LayerNormalization.

    Raises
    ------
    TypeError
        For another dtype, or two different ones.
    ValueError
        If the shapes differ.
    """
    cdef readonly cnp.ndarray _data # [*x.shape[:axis], 1, ..., 3]: shift, delta, rstd

    def __init__(self, mean, inv_std_dev):
        cdef cnp.ndarray m = as_array(mean, "mean"), r = as_array(inv_std_dev, "inv_std_dev")
        if dtype_of(m, "mean") != dtype_of(r, "inv_std_dev"):
            raise TypeError(f"inv_std_dev must have the dtype of mean, {m.dtype}, got {r.dtype}")
        if not cnp.PyArray_SAMESHAPE(m, r):
            raise ValueError(f"inv_std_dev must have the shape of mean, {(<object>m).shape}, got {(<object>r).shape}")
        self._data = np.stack([m, np.zeros_like(m), r], axis=-1)

    @property
    def mean(self):
        """Mean of each row, ndarray of shape x.shape[:axis] + (1, ...)."""
        return self._data[..., 0] + self._data[..., 1]

    @property
    def inv_std_dev(self):
        """1/sqrt(var + eps) of each row, or 0 where var + eps = 0; ndarray of shape x.shape[:axis] + (1, ...)."""
        return self._data[..., 2].copy()

    def __getitem__(self, rows):
        cdef Stats part = Stats.__new__(Stats)
        part._data = np.ascontiguousarray(self._data[rows])
        if part._data.ndim < 2 or part._data.shape[part._data.ndim - 1] != 3:
            raise IndexError(f"rows must select along the leading dimensions of stats, got {rows!r}")
        return part

    def __repr__(self):
        return f"Stats(mean={self.mean!r}, inv_std_dev={self.inv_std_dev!r})"

    def __reduce__(self):
        return _stats_from, (self._data,)


def _stats_from(data):
    cdef Stats stats = Stats.__new__(Stats)
    stats._data = data
    return stats


cdef Stats empty_stats(cnp.ndarray x, int axis):
    cdef Stats stats = Stats.__new__(Stats)
    stats._data = np.empty((<object>x).shape[:axis] + (1,) * (cnp.PyArray_NDIM(x) - axis) + (3,), x.dtype)
    return stats


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


def layer_norm(x, weight=None, bias=None, *, eps=1e-5, axis=-1, out=None, bint return_stats=False):
    """Layer normalisation: ``(x - mean) / sqrt(var + eps) * weight + bias``, each row for itself.

    Ba, Kiros, Hinton, "Layer Normalization", arXiv:1607.06450, Eq. 3; ``var`` is the mean of ``(x - mean)**2``.

    Parameters
    ----------
    x : ndarray, shape (..., n), float32 or float64
        Any leading dimensions, any strides (rows whose elements do not lie together are copied first).
    weight, bias : ndarray, shape x.shape[axis:], dtype of x, optional
        Gain and bias of each element; 1 and 0 if not given.
    eps : float
        Added to the variance, rounded to the dtype of x. 0 is allowed: a constant row then normalises to 0.
    axis : int
        The first normalised dimension, as in ONNX: everything from there to the end is one row. ``axis=0`` makes the
        whole array one row.
    out : ndarray, shape and dtype of x, optional
        Where the result goes; ``out=x`` is in place. Any other overlap with x, weight or bias is an error.
    return_stats : bool
        Also return the `Stats` that `layer_norm_backward` needs.

    Returns
    -------
    y : ndarray, shape and dtype of x
    stats : Stats
        Only if `return_stats`.

    Raises
    ------
    TypeError
        For an argument of another type or dtype.
    ValueError
        For a shape, axis, eps or overlap that can't be used. `out` is then unchanged.

    Notes
    -----
    Right for every finite row, whatever its mean and scale, and the same bits on every instruction set, batch size
    and alignment: docs/numerics.md. A NaN or infinity makes its own row NaN and no other.

    Examples
    --------
    >>> import cnorm, numpy as np
    >>> cnorm.layer_norm(np.float32([[1e6, 1e6 + 1, 1e6 + 2]])).round(4)
    array([[-1.2247,  0.    ,  1.2247]], dtype=float32)
    """
    cdef cnp.ndarray a = as_array(x, "x"), y, gain = None, shift = None, target
    cdef Stats stats = None
    cdef cnorm_dtype dtype = dtype_of(a, "x")
    cdef int first = first_normalised(axis, cnp.PyArray_NDIM(a), (<object>a).shape)
    cdef double e = checked_eps(eps)
    cdef ptrdiff_t rows, n
    cdef Rows source, sink
    cdef const void *pg = NULL
    cdef const void *pb = NULL
    cdef void *ps = NULL
    cdef cnorm_status status
    count_rows(a, first, &rows, &n)
    if weight is not None:
        gain = parameter(weight, a, first, "weight")
        pg = cnp.PyArray_DATA(gain)
    if bias is not None:
        shift = parameter(bias, a, first, "bias")
        pb = cnp.PyArray_DATA(shift)
    y = output(out, "out", a)
    if out is not None:
        check_apart(y, "out", a, "x", True)
        check_apart(y, "out", gain, "weight", False)
        check_apart(y, "out", shift, "bias", False)
    if return_stats:
        stats = empty_stats(a, first)
        ps = cnp.PyArray_DATA(stats._data)
    a = rows_of(a, first, &source)
    target = y
    if not as_rows(y, first, &sink):
        target = rows_of(np.empty((<object>y).shape, y.dtype), first, &sink)
    if rows * n > RELEASE_GIL_ABOVE:
        with nogil:
            status = cnorm_layer_norm(dtype, rows, n, source.data, source.stride, pg, pb, e, sink.data, sink.stride, ps)
    else:
        status = cnorm_layer_norm(dtype, rows, n, source.data, source.stride, pg, pb, e, sink.data, sink.stride, ps)
    check(status)
    if target is not y:
        y[...] = target
    return (y, stats) if return_stats else y


def layer_norm_backward(dy, x, weight, Stats stats not None, *, axis=-1, out=None):
    """Gradients of `layer_norm`.

    With ``xhat = (x - mean) * inv_std_dev`` and ``g = dy * weight``:
    ``dx = inv_std_dev * (g - mean(g) - xhat * mean(g * xhat))``, and summed over the rows
    ``dweight = sum(dy * xhat)``, ``dbias = sum(dy)`` (the chain rule through Eq. 3 of arXiv:1607.06450).

    Parameters
    ----------
    dy : ndarray, shape and dtype of x
        Gradient of the loss for the output.
    x : ndarray, shape (..., n), float32 or float64
        The input of the forward call.
    weight : ndarray, shape x.shape[axis:], dtype of x, or None
        The weight of the forward call.
    stats : Stats
        Of the forward call.
    axis : int
        As in the forward call.
    out : tuple of three ndarrays or None, optional
        Where (dx, dweight, dbias) go. dx may be dy or x: in place.

    Returns
    -------
    dx : ndarray, shape and dtype of x
    dweight : ndarray, shape x.shape[axis:], or None where weight is None
    dbias : ndarray, shape x.shape[axis:]

    Raises
    ------
    TypeError
        For an argument of another type or dtype.
    ValueError
        For a shape, axis or overlap that can't be used. The outputs are then unchanged.

    Notes
    -----
    dweight and dbias are summed over blocks of 64 rows and a fixed tree over the blocks: the same bits everywhere.
    """
    cdef cnp.ndarray a = as_array(x, "x"), d = as_array(dy, "dy"), gain = None, dx, dgain, dbias, target, partials, like
    cdef cnorm_dtype dtype = dtype_of(a, "x")
    cdef int first = first_normalised(axis, cnp.PyArray_NDIM(a), (<object>a).shape), i
    cdef ptrdiff_t rows, n
    cdef Rows source, gradient, sink
    cdef const void *pg = NULL
    cdef void *ps
    cdef void *pdgain
    cdef void *pdbias
    cdef void *pp
    cdef cnorm_status status
    count_rows(a, first, &rows, &n)
    if cnp.PyArray_TYPE(d) != cnp.PyArray_TYPE(a) or not cnp.PyArray_ISNOTSWAPPED(d):
        raise TypeError(f"dy must have the dtype of x, {a.dtype}, got {d.dtype}")
    if not cnp.PyArray_SAMESHAPE(d, a):
        raise ValueError(f"dy must have the shape of x, {(<object>a).shape}, got {(<object>d).shape}")
    if weight is not None:
        gain = parameter(weight, a, first, "weight")
        pg = cnp.PyArray_DATA(gain)
    expected = (<object>a).shape[:first] + (1,) * (cnp.PyArray_NDIM(a) - first)
    if stats._data.dtype != a.dtype:
        raise TypeError(f"stats must have the dtype of x, {a.dtype}, got {stats._data.dtype}")
    if (<object>stats._data).shape[:-1] != expected:
        raise ValueError(f"stats must have the shape {expected}, that of x.shape[:axis] + (1, ...), got "
                         f"{(<object>stats._data).shape[:-1]}")
    if out is None:
        out = (None, None, None)
    elif not isinstance(out, tuple) or len(out) != 3:
        raise TypeError("out must be a tuple (dx, dweight, dbias), or None")
    if weight is None and out[1] is not None:
        raise ValueError("out[1] must be None where weight is None")
    like = np.empty((<object>a).shape[first:], a.dtype)
    dx = output(out[0], "out[0]", a)
    dgain = output(out[1], "out[1]", like)
    dbias = output(out[2], "out[2]", like)
    check_apart(dx, "out[0]", d, "dy", True)
    check_apart(dx, "out[0]", a, "x", True)
    check_apart(dx, "out[0]", gain, "weight", False)
    check_apart(dx, "out[0]", stats._data, "stats", False)
    for small, name in ((dgain, "out[1]"), (dbias, "out[2]")):
        if not cnp.PyArray_IS_C_CONTIGUOUS(small) or not cnp.PyArray_ISALIGNED(small):
            raise ValueError(f"{name} must be C-contiguous and aligned")
        check_apart(small, name, d, "dy", False)
        check_apart(small, name, a, "x", False)
        check_apart(small, name, dx, "out[0]", False)
    check_apart(dgain, "out[1]", dbias, "out[2]", False)
    d = rows_of(d, first, &gradient)
    a = rows_of(a, first, &source)
    target = dx
    if not as_rows(dx, first, &sink):
        target = rows_of(np.empty((<object>dx).shape, dx.dtype), first, &sink)
    partials = np.empty(cnorm_layer_norm_backward_partials(dtype, rows, n), np.uint8)
    ps, pp = cnp.PyArray_DATA(stats._data), cnp.PyArray_DATA(partials)
    pdgain, pdbias = cnp.PyArray_DATA(dgain), cnp.PyArray_DATA(dbias)
    with nogil:
        status = cnorm_layer_norm_backward(dtype, rows, n, gradient.data, gradient.stride, source.data, source.stride,
                                           pg, ps, sink.data, sink.stride, pdgain, pdbias, pp)
    check(status)
    if target is not dx:
        dx[...] = target
    return dx, None if weight is None else dgain, dbias


# ---- activations: private, the runtime's own sigmoid and tanh ------------------------------------------------------

cdef elementwise(cnorm_status (*f)(ptrdiff_t, const float *, float *) noexcept nogil, x, out):
    cdef cnp.ndarray a = as_array(x, "x"), y
    if dtype_of(a, "x") != CNORM_F32:
        raise TypeError(f"x must have dtype float32, got {a.dtype}")
    a = np.ascontiguousarray(a)
    y = output(out, "out", a)
    if not cnp.PyArray_IS_C_CONTIGUOUS(y):
        raise ValueError("out must be C-contiguous")
    check(f(cnp.PyArray_SIZE(a), <const float *>cnp.PyArray_DATA(a), <float *>cnp.PyArray_DATA(y)))
    return y


def sigmoid(x, out=None):
    """1/(1 + exp(-x)) of a float32 array, at most 1 ULP, monotone."""
    return elementwise(cnorm_sigmoid_f32, x, out)


def tanh(x, out=None):
    """tanh(x) of a float32 array, at most 1 ULP, monotone."""
    return elementwise(cnorm_tanh_f32, x, out)


# ---- the streaming runtime -------------------------------------------------------------------------------------------

cdef cnp.ndarray aligned_zeros(ptrdiff_t floats):
    """float32 zeros on a CNORM_ALIGN boundary."""
    cdef cnp.ndarray raw = np.zeros(floats * 4 + CNORM_ALIGN, np.uint8)
    cdef ptrdiff_t start = -(<ptrdiff_t>cnp.PyArray_DATA(raw)) % CNORM_ALIGN
    return raw[start + (CNORM_ALIGN if start < 0 else 0):][:floats * 4].view(np.float32)


cdef class Network:
    """Packed weights of a stack of layers: what `cnorm.Model` computes with. Never written after construction.

    Parameters
    ----------
    layers : sequence
        Objects with `kind` ("LSTM" or "Linear"), `weights` (C-contiguous float32 arrays by name) and, for cells,
        `eps`; their sizes fit one another.
    identity : bytes
        Hash of configuration and weights; ties a saved stream to its model.
    """
    cdef cnorm_layer *layers
    cdef int count
    cdef readonly ptrdiff_t input_size, output_size
    cdef readonly bytes identity
    cdef readonly tuple state_arrays # (name, units, offset in the state) of each recurrent array
    cdef ptrdiff_t state_floats, scratch_floats, macs # macs: multiply-adds of one step
    cdef list memory # keeps the packed arrays alive

    def __cinit__(self, layers, bytes identity):
        cdef cnorm_layer *at
        cdef ptrdiff_t offset = 0, units
        cdef int i
        self.count = len(layers)
        self.memory = []
        self.identity = identity
        self.layers = <cnorm_layer *>PyMem_Calloc(self.count, sizeof(cnorm_layer))
        if self.layers == NULL:
            raise MemoryError()
        names = []
        for i, layer in enumerate(layers):
            at = &self.layers[i]
            w = layer.weights
            if layer.kind == "LSTM":
                at.kind = CNORM_LSTM
                units = w["weight_h"].shape[1]
                at.as_.lstm.weight_x = self.pack(w["weight_x"], 4, True)
                at.as_.lstm.weight_h = self.pack(w["weight_h"], 4, True)
                at.as_.lstm.gain_x = self.pad(w["gain_x"], 4)
                at.as_.lstm.gain_h = self.pad(w["gain_h"], 4)
                total = w["bias"].astype(np.float64) + w["bias_x"] + w["bias_h"]
                at.as_.lstm.bias = self.pad(total.astype(np.float32), 4)
                at.as_.lstm.gain_c = self.pad(w["gain_c"], 1)
                at.as_.lstm.bias_c = self.pad(w["bias_c"], 1)
                at.as_.lstm.eps = layer.eps
                recurrent = len(names) // 2
                names += [(f"h{recurrent}", units, offset), (f"c{recurrent}", units, offset + cnorm_padded_units(units))]
            elif layer.kind == "Linear":
                at.kind = CNORM_LINEAR
                at.as_.linear.weight = self.pack(w["weight"], 1, False)
                if "bias" in w:
                    at.as_.linear.bias = self.pad(w["bias"], 1)
            else:
                raise TypeError(f"layers[{i}] must be a layer of cnorm, got {type(layer).__name__}")
            offset += cnorm_layer_state_floats(at)
        self.state_arrays = tuple(names)
        self.input_size = cnorm_layer_inputs(&self.layers[0])
        self.output_size = cnorm_layer_outputs(&self.layers[self.count - 1])
        self.state_floats = cnorm_state_floats(self.layers, self.count)
        self.scratch_floats = cnorm_scratch_floats(self.layers, self.count)

    def __dealloc__(self):
        PyMem_Free(self.layers)

    cdef cnorm_matrix pack(self, cnp.ndarray w, ptrdiff_t gates, bint centred) except *:
        cdef cnorm_matrix m
        cdef cnp.ndarray panels
        m.gates, m.units, m.cols = gates, cnp.PyArray_DIMS(w)[0] // gates, cnp.PyArray_DIMS(w)[1]
        panels = aligned_zeros(cnorm_matrix_floats(m.gates, m.units, m.cols))
        m.panels = <const float *>cnp.PyArray_DATA(panels)
        check(cnorm_matrix_pack(m.gates, m.units, m.cols, <const float *>cnp.PyArray_DATA(w), centred,
                                <float *>cnp.PyArray_DATA(panels)))
        self.memory.append(panels)
        self.macs += cnp.PyArray_SIZE(w)
        return m

    cdef const float *pad(self, cnp.ndarray v, ptrdiff_t gates) except NULL:
        """v [gates * units] as [gates, padded units]."""
        cdef ptrdiff_t units = cnp.PyArray_SIZE(v) // gates, width = cnorm_padded_units(units)
        cdef cnp.ndarray padded = aligned_zeros(gates * width)
        padded.reshape(gates, width)[:, :units] = v.reshape(gates, units)
        self.memory.append(padded)
        return <const float *>cnp.PyArray_DATA(padded)


cdef bytes SAVED = b"cnorm stream 1\n" # format of Stream.save: this, the model's identity, the arrays without padding


cdef class Stream:
    """One conversation with a `Model`: its own recurrent state, stepped by one thread at a time.

    Made by ``model.stream()``; the state starts at zero. A stream is small: the state and one step's scratch. A NaN or
    infinity in x goes into the state and stays there until `reset`.
    """
    cdef readonly object model
    cdef Network network
    cdef cnp.ndarray state_memory, scratch_memory
    cdef float *state_
    cdef float *scratch
    cdef int busy

    def __init__(self, model):
        self.model = model
        self.network = model._network
        self.state_memory = aligned_zeros(self.network.state_floats)
        self.scratch_memory = aligned_zeros(self.network.scratch_floats)
        self.state_ = <float *>cnp.PyArray_DATA(self.state_memory)
        self.scratch = <float *>cnp.PyArray_DATA(self.scratch_memory)

    cdef int enter(self) except -1:
        if not take(&self.busy):
            raise RuntimeError("this stream is in use by another thread; give each thread a stream of its own")
        return 0

    cdef int run(self, cnp.ndarray x, cnp.ndarray y, ptrdiff_t steps) except -1:
        cdef Network net = self.network
        cdef const float *px = <const float *>cnp.PyArray_DATA(x)
        cdef float *py = <float *>cnp.PyArray_DATA(y)
        cdef cnorm_status status
        self.enter()
        if net.macs * steps > RELEASE_GIL_ABOVE_MACS:
            with nogil:
                status = cnorm_run(net.layers, net.count, steps, px, net.input_size, self.state_, self.scratch, py,
                                   net.output_size)
        else:
            status = cnorm_run(net.layers, net.count, steps, px, net.input_size, self.state_, self.scratch, py,
                               net.output_size)
        give_back(&self.busy)
        return check(status)

    def step(self, x, out=None):
        """One step.

        Parameters
        ----------
        x : ndarray, shape (input_size,), float32
        out : ndarray, shape (output_size,), float32, contiguous, optional

        Returns
        -------
        y : ndarray, shape (output_size,), float32

        Raises
        ------
        TypeError
            If x or out is not a float32 array.
        ValueError
            For another shape. State and `out` are then unchanged.
        RuntimeError
            If another thread is using this stream.
        """
        cdef cnp.ndarray a = frames(x, "x", 1, self.network.input_size), y
        if out is None:
            y = cnp.PyArray_EMPTY(1, <cnp.npy_intp *>&self.network.output_size, cnp.NPY_FLOAT32, 0)
        else:
            y = frames_out(out, 1, 0, self.network.output_size)
        self.run(a, y, 1)
        return y

    def process(self, x, out=None):
        """Many steps, one after the other: the same bits as `step` on each row.

        Parameters
        ----------
        x : ndarray, shape (steps, input_size), float32
        out : ndarray, shape (steps, output_size), float32, contiguous, optional

        Returns
        -------
        y : ndarray, shape (steps, output_size), float32

        Raises
        ------
        TypeError, ValueError, RuntimeError
            As `step`.
        """
        cdef cnp.ndarray a = frames(x, "x", 2, self.network.input_size), y
        cdef cnp.npy_intp shape[2]
        shape[0], shape[1] = cnp.PyArray_DIMS(a)[0], self.network.output_size
        if out is None:
            y = cnp.PyArray_EMPTY(2, shape, cnp.NPY_FLOAT32, 0)
        else:
            y = frames_out(out, 2, shape[0], shape[1])
            if not apart(y, a): # a later row of x could be overwritten before it is read
                a = np.array(a, order="C", copy=True)
        self.run(a, y, shape[0])
        return y

    def state(self):
        """A copy of the recurrent state.

        Returns
        -------
        dict of str to ndarray, shape (units,), float32
            ``h0``, ``c0``, ``h1``, ...; the number counts recurrent layers.
        """
        self.enter()
        try:
            return {name: self.state_memory[offset:offset + units].copy()
                    for name, units, offset in self.network.state_arrays}
        finally:
            give_back(&self.busy)

    def set_state(self, state):
        """Replace the whole recurrent state.

        Parameters
        ----------
        state : mapping of str to ndarray, shape (units,), float32
            The names and shapes of `state`, all of them, finite.

        Raises
        ------
        TypeError
            If an array is not float32.
        ValueError
            For a missing or unknown name, another shape, NaN or infinity. The state is then unchanged.
        """
        expected = {name: units for name, units, _ in self.network.state_arrays}
        if not hasattr(state, "keys"):
            raise TypeError(f"state must be a mapping of names to arrays, got {type(state).__name__}")
        if set(state.keys()) != expected.keys():
            raise ValueError(f"state must have the names {sorted(expected)}, got {sorted(map(str, state.keys()))}")
        checked = {}
        for name, units in expected.items():
            checked[name] = frames(state[name], f"state[{name!r}]", 1, units)
            if not np.isfinite(checked[name]).all():
                raise ValueError(f"state[{name!r}] must be finite, got NaN or infinity")
        self.enter()
        for name, units, offset in self.network.state_arrays:
            self.state_memory[offset:offset + units] = checked[name]
        give_back(&self.busy)

    def reset(self, state=None):
        """Back to the initial state, zero, or to a given one.

        Parameters
        ----------
        state : mapping, optional
            As for `set_state`.
        """
        if state is not None:
            self.set_state(state)
            return
        self.enter()
        self.state_memory.fill(0)
        give_back(&self.busy)

    def save(self):
        """The state as bytes, for ``model.restore``, here or in another process or machine.

        Returns
        -------
        bytes
            Tied to the model by a hash of its configuration and weights.
        """
        arrays = self.state()
        return SAVED + self.network.identity + b"".join(a.astype("<f4").tobytes() for a in arrays.values())

    def _restore(self, saved):
        """Set the state from what `save` returned; see Model.restore."""
        if not isinstance(saved, (bytes, bytearray, memoryview)):
            raise TypeError(f"saved must be bytes, got {type(saved).__name__}")
        saved = bytes(saved)
        head = len(SAVED)
        body = head + len(self.network.identity)
        if saved[:head] != SAVED:
            raise ValueError(f"saved must be what Stream.save returned, beginning {SAVED!r}, got {saved[:head]!r}")
        if saved[head:body] != self.network.identity:
            raise ValueError("saved is the stream of another model: the hash of configuration and weights differs")
        sizes = [units for _, units, _ in self.network.state_arrays]
        if len(saved) - body != 4 * sum(sizes):
            raise ValueError(f"saved must hold {4 * sum(sizes)} bytes of state, got {len(saved) - body}")
        values = np.split(np.frombuffer(saved, "<f4", offset=body).astype(np.float32), np.cumsum(sizes)[:-1])
        self.set_state({name: v for (name, _, _), v in zip(self.network.state_arrays, values)})

    def __copy__(self):
        return self.model.restore(self.save())

    def __deepcopy__(self, memo):
        return self.__copy__()

    def __reduce__(self):
        return _stream_from, (self.model, self.save())


def _stream_from(model, saved):
    return model.restore(saved)


cdef cnp.ndarray frames(object x, str name, int ndim, ptrdiff_t width):
    """x as a C-contiguous, aligned float32 array [width] or [steps, width]."""
    cdef cnp.ndarray a = as_array(x, name)
    if cnp.PyArray_TYPE(a) != cnp.NPY_FLOAT32 or not cnp.PyArray_ISNOTSWAPPED(a):
        raise TypeError(f"{name} must have dtype float32, got {a.dtype}")
    if cnp.PyArray_NDIM(a) != ndim or cnp.PyArray_DIMS(a)[ndim - 1] != width:
        raise ValueError(f"{name} must have shape {f'({width},)' if ndim == 1 else f'(steps, {width})'}, "
                         f"got {(<object>a).shape}")
    if not (cnp.PyArray_IS_C_CONTIGUOUS(a) and cnp.PyArray_ISALIGNED(a)):
        a = np.array(a, order="C", copy=True)
    return a


cdef cnp.ndarray frames_out(object out, int ndim, ptrdiff_t steps, ptrdiff_t width):
    """The caller's output array, checked."""
    cdef cnp.ndarray y
    if not isinstance(out, np.ndarray) or isinstance(out, np.ma.MaskedArray):
        raise TypeError(f"out must be a NumPy array or None, got {type(out).__name__}")
    y = out
    if cnp.PyArray_TYPE(y) != cnp.NPY_FLOAT32 or not cnp.PyArray_ISNOTSWAPPED(y):
        raise TypeError(f"out must have dtype float32, got {y.dtype}")
    if (cnp.PyArray_NDIM(y) != ndim or cnp.PyArray_DIMS(y)[ndim - 1] != width
            or (ndim == 2 and cnp.PyArray_DIMS(y)[0] != steps)):
        wanted = f"({width},)" if ndim == 1 else f"({steps}, {width})"
        raise ValueError(f"out must have shape {wanted}, got {(<object>y).shape}")
    if not (cnp.PyArray_IS_C_CONTIGUOUS(y) and cnp.PyArray_ISALIGNED(y) and cnp.PyArray_ISWRITEABLE(y)):
        raise ValueError("out must be C-contiguous, aligned and writable")
    return y
