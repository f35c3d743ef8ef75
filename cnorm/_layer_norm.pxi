"""Layer normalisation, with or without a residual, RMS normalisation, and their backward passes."""
ctypedef cnorm_status (*Forward)(cnorm_dtype dtype, const cnorm_norm *call) noexcept nogil
ctypedef cnorm_status (*Backward)(cnorm_dtype dtype, const cnorm_norm_backward *call) noexcept nogil


cdef inline int set_rows(Shape *shape, cnp.ndarray x, ptrdiff_t axis) except -1:
    """Set dtype, axis and sizes of the shape: the dimensions of x from `axis` on form a row."""
    cdef int i
    shape.dtype = <cnorm_dtype>dtype_of(x, "x")
    shape.number = cnp.PyArray_TYPE(x)
    shape.axis = first_normalised(axis, x)
    shape.rows = shape.n = 1
    for i in range(cnp.PyArray_NDIM(x)):
        if i < shape.axis:
            shape.rows *= cnp.PyArray_DIMS(x)[i]
        else:
            shape.n *= cnp.PyArray_DIMS(x)[i]
    if shape.n == 0:
        refuse_empty_rows(x, shape.axis)
    shape.length = shape.n
    return 0


cdef inline int check_eps(Shape *shape, double eps, str name="eps") except -1:
    """Check that eps is finite in the compute type."""
    if eps > FLT_MAX and shape.dtype != CNORM_F64:
        refuse_not_single(eps, name)
    return 0


cdef inline int check_per_element(cnp.ndarray p, Shape *shape, cnp.ndarray x, str name) except -1:
    """Check that weight or bias has the normalised shape of x, or is None."""
    if p is None:
        return 0
    cdef int ndim = cnp.PyArray_NDIM(x) - shape.axis
    if (cnp.PyArray_NDIM(p) != ndim
            or not same_lengths(cnp.PyArray_DIMS(p), cnp.PyArray_DIMS(x) + shape.axis, ndim)
            or not (has_dtype(p, compute_number(shape.dtype)) or has_dtype(p, cnp.PyArray_TYPE(x)))):
        refuse_per_element(p, name, x, shape.axis)
    return 0


cdef int check_row_output(cnp.ndarray out, str name, cnp.ndarray x, cnp.ndarray residual, cnp.ndarray weight,
                          cnp.ndarray bias) except -1:
    check_disjoint(out, name, x, "x", True)
    check_disjoint(out, name, residual, "residual", True)
    check_disjoint(out, name, weight, "weight", False)
    return check_disjoint(out, name, bias, "bias", False)


cdef inline void prepare(Shape *shape, cnorm_norm *call, double eps) noexcept:
    memset(call, 0, sizeof(cnorm_norm))
    call.rows, call.n, call.eps = shape.rows, shape.n, eps


cdef inline Stats row_stats(Shape *shape, cnorm_norm *call, cnp.ndarray x, bint wanted):
    """Set new statistics, which are returned, if they are wanted; else None."""
    cdef Stats stats = None
    if wanted:
        stats = empty_stats(cnp.PyArray_DIMS(x), shape.axis, cnp.PyArray_NDIM(x) - shape.axis, shape.dtype)
        set_stats(shape, <const void **>&call.stats, stats, shape.rows)
    return stats


cdef inline int normalise(Shape *shape, cnorm_norm *call, Forward entry, cnp.ndarray x, cnp.ndarray weight,
                          cnp.ndarray bias, cnp.ndarray y) except -1:
    """Run a forward pass whose arguments have been checked."""
    x = read_rows(shape, &call.x, &call.x_stride, x)
    weight = read_parameter(shape, &call.gain, weight)
    bias = read_parameter(shape, &call.bias, bias)
    cdef cnp.ndarray written = write_rows(shape, &call.y, &call.y_stride, y)
    begin(shape)
    finish(shape, entry(shape.dtype, call))
    return copy_back(y, written)


def layer_norm(x, weight=None, bias=None, *, eps=1e-5, axis=-1, out=None, bint return_stats=False):
    """Layer normalisation: ``(x - mean) / sqrt(var + eps) * weight + bias``, with the mean and var of each row.

    Ba, Kiros, Hinton, "Layer Normalization", arXiv:1607.06450, Eq. 3; ``var`` is the mean of ``(x - mean)**2``.

    Parameters
    ----------
    x : ndarray, shape (..., n), float32, float64, float16 or bfloat16
        Any leading dimensions, any strides (rows whose elements are not contiguous are copied first).
    weight, bias : ndarray, shape x.shape[axis:], dtype of x, optional
        Gain and bias of each element; 1 and 0 if not given. float32 is allowed with float16 and bfloat16.
    eps : float
        Added to the variance, rounded to the type of the computation: float32, or float64 for float64 x. 0 is allowed:
        a constant row then normalises to 0.
    axis : int or tuple of int
        The first normalised dimension, as in ONNX: everything from there to the end is one row. Not NumPy's ``axis``:
        ``axis=0`` makes the whole array one row; for columns give ``x.T``. A tuple must be of the last dimensions,
        as ``(-2, -1)``, which is ``axis=-2``.
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
    The result is accurate for every finite row, whatever its mean and scale, and has the same bits on every instruction
    set, batch size and alignment: docs/numerics.md. A NaN or infinity makes its row NaN and no other. float16 and
    bfloat16 are storage types: computed in float32 and rounded once.

    Examples
    --------
    >>> import cnorm, numpy as np
    >>> cnorm.layer_norm(np.float32([[1e6, 1e6 + 1, 1e6 + 2]])).round(4)
    array([[-1.2247,  0.    ,  1.2247]], dtype=float32)
    """
    cdef Shape shape
    cdef cnorm_norm call
    cdef cnp.ndarray a = array_of(x, "x"), place = place_of(out, "out"), y
    cdef cnp.ndarray w = parameter_of(weight, "weight", "layer_norm(x, weight, bias, axis=-k)")
    cdef cnp.ndarray b = parameter_of(bias, "bias")
    cdef ptrdiff_t first = axis_of(axis, a)
    cdef double smoothing = real_of(eps, "eps")
    set_rows(&shape, a, first)
    check_eps(&shape, smoothing)
    check_per_element(w, &shape, a, "weight")
    check_per_element(b, &shape, a, "bias")
    y = output(place, "out", a)
    if out is None:
        out = y
    else:
        check_row_output(y, "out", a, None, w, b)
    prepare(&shape, &call, smoothing)
    stats = row_stats(&shape, &call, a, return_stats)
    normalise(&shape, &call, cnorm_layer_norm, a, w, b, y)
    return (out, stats) if return_stats else out


def add_layer_norm(x, residual, weight=None, bias=None, *, eps=1e-5, axis=-1, out=None, sum_out=None,
                   bint return_stats=False):
    """Residual sum and layer normalisation in one pass: `layer_norm` of ``x + residual``, and the sum.

    Parameters
    ----------
    x, residual : ndarray, shape (..., n), one dtype of `layer_norm`
        Their sum is rounded to that dtype before it is normalised.
    weight, bias, eps, axis
        As in `layer_norm`.
    out, sum_out : ndarray, shape and dtype of x, optional
        Where the two results go; each may be x or residual itself, in place.
    return_stats : bool
        Also return the `Stats` that `layer_norm_backward` needs, for the sum.

    Returns
    -------
    y : ndarray
        The same bits as ``layer_norm(x + residual, weight, bias)``.
    total : ndarray
        ``x + residual``.
    stats : Stats
        Only if `return_stats`.

    Raises
    ------
    TypeError, ValueError
        As `layer_norm`. Outputs are then unchanged.
    """
    cdef Shape shape
    cdef cnorm_norm call
    cdef cnp.ndarray a = array_of(x, "x"), r = array_of(residual, "residual"), y, total, total_written
    cdef cnp.ndarray place = place_of(out, "out"), sum_place = place_of(sum_out, "sum_out")
    cdef cnp.ndarray w = parameter_of(weight, "weight", "add_layer_norm(x, residual, weight, bias, axis=-k)")
    cdef cnp.ndarray b = parameter_of(bias, "bias")
    cdef ptrdiff_t first = axis_of(axis, a)
    cdef double smoothing = real_of(eps, "eps")
    set_rows(&shape, a, first)
    check_eps(&shape, smoothing)
    check_per_element(w, &shape, a, "weight")
    check_per_element(b, &shape, a, "bias")
    check_like(r, "residual", a, "x")
    y, total = output(place, "out", a), output(sum_place, "sum_out", a)
    if out is None:
        out = y
    else:
        check_row_output(y, "out", a, r, w, b)
        check_disjoint(y, "out", total, "sum_out", False)
    if sum_out is None:
        sum_out = total
    else:
        check_row_output(total, "sum_out", a, r, w, b)
    prepare(&shape, &call, smoothing)
    stats = row_stats(&shape, &call, a, return_stats)
    r = read_rows(&shape, &call.residual, &call.residual_stride, r)
    total_written = write_rows(&shape, &call.sum, &call.sum_stride, total)
    normalise(&shape, &call, cnorm_add_layer_norm, a, w, b, y)
    copy_back(total, total_written)
    return (out, sum_out, stats) if return_stats else (out, sum_out)


def rms_norm(x, weight=None, *, eps=1e-5, axis=-1, out=None, bint return_stats=False):
    """RMS normalisation: ``x / sqrt(mean(x**2) + eps) * weight``, with the mean over each row.

    Zhang, Sennrich, "Root Mean Square Layer Normalization", arXiv:1910.07467, Eq. 4, with eps inside the root.

    Parameters
    ----------
    x, weight, eps, axis, out, return_stats
        As in `layer_norm`. The mean in the `Stats` is 0 and inv_std_dev is ``1/sqrt(mean(x**2) + eps)``.

    Returns
    -------
    y : ndarray, shape and dtype of x
    stats : Stats
        Only if `return_stats`.

    Raises
    ------
    TypeError, ValueError
        As `layer_norm`.
    """
    cdef Shape shape
    cdef cnorm_norm call
    cdef cnp.ndarray a = array_of(x, "x"), place = place_of(out, "out"), y
    cdef cnp.ndarray w = parameter_of(weight, "weight", "rms_norm(x, weight, axis=-k)")
    cdef ptrdiff_t first = axis_of(axis, a)
    cdef double smoothing = real_of(eps, "eps")
    set_rows(&shape, a, first)
    check_eps(&shape, smoothing)
    check_per_element(w, &shape, a, "weight")
    y = output(place, "out", a)
    if out is None:
        out = y
    else:
        check_row_output(y, "out", a, None, w, None)
    prepare(&shape, &call, smoothing)
    stats = row_stats(&shape, &call, a, return_stats)
    normalise(&shape, &call, cnorm_rms_norm, a, w, None, y)
    return (out, stats) if return_stats else out


cdef tuple row_gradients(Backward entry, object dy, object x, object weight, Stats stats, object axis, object out):
    """The gradients of x, weight and, for layer norm, bias."""
    cdef Shape shape
    cdef cnorm_norm_backward call
    cdef tuple names = ("dx", "dweight") if entry == cnorm_rms_norm_backward else ("dx", "dweight", "dbias")
    cdef cnp.ndarray a = array_of(x, "x"), d = array_of(dy, "dy"), w = parameter_of(weight, "weight"), like = w
    cdef ptrdiff_t first = axis_of(axis, a)
    cdef tuple places = places_of(out, names, w is not None)
    cdef list results, written
    cdef int ndim
    set_rows(&shape, a, first)
    check_like(d, "dy", a, "x")
    check_per_element(w, &shape, a, "weight")
    check_row_stats(stats, &shape, a)
    if like is None:
        ndim = cnp.PyArray_NDIM(a) - shape.axis
        like = cnp.PyArray_EMPTY(ndim, cnp.PyArray_DIMS(a) + shape.axis, cnp.PyArray_TYPE(a), 0)
    results = gradients_of(places, (a, like, like)[:len(names)], ("dy", "x", "weight", "stats"),
                           (d, a, w, stats.data))
    written = list(results)
    memset(&call, 0, sizeof(call))
    call.rows, call.n = shape.rows, shape.n
    d = read_rows(&shape, &call.dy, &call.dy_stride, d)
    a = read_rows(&shape, &call.x, &call.x_stride, a)
    w = read_parameter(&shape, &call.gain, w)
    data = set_stats(&shape, &call.stats, stats, shape.rows)
    scratch = reserve(&call.partials, cnorm_backward_partials(shape.dtype, shape.rows, shape.n))
    write_gradients(&shape, written, &call.dx, &call.dx_stride, &call.dgain, &call.dbias)
    begin(&shape)
    finish(&shape, entry(shape.dtype, &call))
    copy_all_back(results, written)
    return returned(out, places, results, w is not None)


def layer_norm_backward(dy, x, weight, Stats stats not None, *, axis=-1, out=None):
    """Gradients of `layer_norm`.

    With ``xhat = (x - mean) * inv_std_dev`` and ``g = dy * weight``:
    ``dx = inv_std_dev * (g - mean(g) - xhat * mean(g * xhat))``, and summed over the rows
    ``dweight = sum(dy * xhat)``, ``dbias = sum(dy)`` (the chain rule through Eq. 3 of arXiv:1607.06450).

    Parameters
    ----------
    dy : ndarray, shape and dtype of x
        Gradient of the loss for the output.
    x : ndarray, shape (..., n), dtypes of `layer_norm`
        The input of the forward call (for `add_layer_norm` the sum).
    weight : ndarray, shape x.shape[axis:], or None
        The weight of the forward call.
    stats : Stats
        Of the forward call.
    axis : int or tuple of int
        As in the forward call.
    out : tuple of three ndarrays or None, optional
        Where (dx, dweight, dbias) go. dx may be dy or x: in place.

    Returns
    -------
    dx : ndarray, shape and dtype of x
    dweight : ndarray, shape x.shape[axis:], dtype of weight, or None where weight is None
    dbias : ndarray, shape x.shape[axis:], dtype of weight, or of x where weight is None

    Raises
    ------
    TypeError
        For an argument of another type or dtype.
    ValueError
        For a shape, axis or overlap that can't be used. The outputs are then unchanged.

    Notes
    -----
    dweight and dbias are summed over blocks of 64 rows, and the blocks in a fixed tree, which gives the same bits on
    every machine.
    """
    return row_gradients(cnorm_layer_norm_backward, dy, x, weight, stats, axis, out)


def rms_norm_backward(dy, x, weight, Stats stats not None, *, axis=-1, out=None):
    """Gradients of `rms_norm`.

    With ``xhat = x * inv_std_dev`` and ``g = dy * weight``: ``dx = inv_std_dev * (g - xhat * mean(g * xhat))`` and
    ``dweight = sum(dy * xhat)`` over the rows (the chain rule through Eq. 4 of arXiv:1910.07467).

    Parameters
    ----------
    dy, x, weight, stats, axis
        As in `layer_norm_backward`.
    out : tuple of two ndarrays or None, optional
        Where (dx, dweight) go. dx may be dy or x: in place.

    Returns
    -------
    dx : ndarray, shape and dtype of x
    dweight : ndarray, shape x.shape[axis:], dtype of weight, or None where weight is None

    Raises
    ------
    TypeError, ValueError
        As `layer_norm_backward`.
    """
    return row_gradients(cnorm_rms_norm_backward, dy, x, weight, stats, axis, out)


cdef class BoundLayerNorm:
    """Base of `cnorm.LayerNorm` that makes it callable: `layer_norm` with parameters that were checked once."""
    cdef cnp.ndarray gain, bias
    cdef double eps_

    def _bind(self, gain, bias, double eps):
        """gain, bias [n]: C-contiguous, read-only float32 arrays, checked by the caller; bias may be None."""
        self.gain, self.bias, self.eps_ = gain, bias, eps

    def __call__(self, x, out=None):
        """Layer norm of x over its last dimension; the same bits as ``layer_norm(x, weight, bias, eps=eps, out=out)``.

        Parameters
        ----------
        x : ndarray, shape (..., n), float32, float16 or bfloat16
        out : ndarray, shape and dtype of x, optional

        Returns
        -------
        y : ndarray, shape and dtype of x

        Raises
        ------
        TypeError, ValueError
            As `layer_norm`.
        """
        cdef Shape shape
        cdef cnorm_norm call
        cdef cnp.ndarray a = array_of(x, "x"), place = place_of(out, "out"), y
        if (self.gain is None or cnp.PyArray_NDIM(a) == 0
                or cnp.PyArray_DIMS(a)[cnp.PyArray_NDIM(a) - 1] != cnp.PyArray_SIZE(self.gain)):
            refuse_bound(a, self.gain)
        set_rows(&shape, a, -1)
        if shape.dtype == CNORM_F64:
            refuse_bound(a, self.gain)
        y = output(place, "out", a)
        if out is None:
            out = y
        else:
            check_disjoint(y, "out", a, "x", True)  # gain and bias are read-only copies: out can't overlap them
        prepare(&shape, &call, self.eps_)
        normalise(&shape, &call, cnorm_layer_norm, a, self.gain, self.bias, y)
        return out
