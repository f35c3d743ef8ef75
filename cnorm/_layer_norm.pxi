"""cnorm.layer_norm, its backward pass, and Stats."""

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
        cdef float_mode mode = float_mode_enter() # NumPy would add in whatever mode somebody has left set
        mean = self._data[..., 0] + self._data[..., 1]
        float_mode_leave(mode)
        return mean

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
        check_apart(y, "out", gain, "weight", False) # a copy of a strided weight is apart, and safe
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
    cdef cnp.ndarray a = as_array(x, "x"), d = as_array(dy, "dy"), given = None, gain = None, dx, dgain, dbias, target, partials, like
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
        given = as_array(weight, "weight")
        gain = parameter(given, a, first, "weight")
        pg = cnp.PyArray_DATA(gain)
    expected = (<object>a).shape[:first] + (1,) * (cnp.PyArray_NDIM(a) - first)
    if stats._data.dtype != a.dtype:
        raise TypeError(f"stats must have the dtype of x, {a.dtype}, got {stats._data.dtype}")
    if (<object>stats._data).shape[:-1] != expected:
        raise ValueError(f"stats must have the shape {expected}, that of x.shape[:axis] + (1, ...), got "
                         f"{(<object>stats._data).shape[:-1]}")
    if out is None:
        out = (None, None, None)
    elif not isinstance(out, tuple):
        raise TypeError(f"out must be a tuple (dx, dweight, dbias) or None, got {type(out).__name__}")
    elif len(out) != 3:
        raise ValueError(f"out must be a tuple of three, (dx, dweight, dbias), got {len(out)}")
    if weight is None and out[1] is not None:
        raise ValueError("out[1] must be None where weight is None")
    like = np.empty((<object>a).shape[first:], a.dtype)
    results = [output(out[0], "out[0]", a), output(out[1], "out[1]", like), output(out[2], "out[2]", like)]
    dx = results[0]
    for i in range(3):
        name = f"out[{i}]"
        check_apart(results[i], name, d, "dy", i == 0)
        check_apart(results[i], name, a, "x", i == 0)
        check_apart(results[i], name, given, "weight", False)
        check_apart(results[i], name, stats._data, "stats", False)
        for j in range(i):
            check_apart(results[i], name, results[j], f"out[{j}]", False)
    dgain, dbias = np.require(results[1], None, "CA"), np.require(results[2], None, "CA")
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
    for result, computed in zip(results, (target, dgain, dbias)):
        if result is not computed:
            result[...] = computed
    return dx, None if weight is None else results[1], results[2]
