"""Divisive normalisation, and the gradient of layer normalisation for its smoothing term."""

cdef ptrdiff_t checked_radius(object radius, str name, ptrdiff_t n) except -1:
    return n if radius is None else whole_number(radius, name, 0)


cdef cnp.ndarray lines_of(object x, cnorm_dtype *dtype, ptrdiff_t *rows, ptrdiff_t *n):
    cdef cnp.ndarray a = as_array(x, "x")
    dtype[0] = whole_dtype(a, "x")
    count_rows(a, first_normalised(-1, cnp.PyArray_NDIM(a), a), rows, n)
    return a


def divisive_norm(x, weight=None, bias=None, *, sigma=1.0, mean_radius=None, radius=None, out=None):
    """Divisive normalisation: each element by its neighbours along the last axis.

    Ren, Liao, Urtasun, Sinz, Zemel, "Normalizing the Normalizers", arXiv:1611.04520:
    ``v = x - mean of x over the summation field``,
    ``y = v / sqrt(sigma**2 + mean of v**2 over the suppression field) * weight + bias``. A field is the element and its
    neighbours within a radius, as far as the row goes.

    Parameters
    ----------
    x : ndarray, shape (..., n), float32 or float64
        Each row along the last axis for itself.
    weight, bias : ndarray, shape (n,), dtype of x, optional
        Gain and bias of each element; 1 and 0 if not given.
    sigma : float
        The smoothing term, not negative, rounded to the dtype of x. Where the whole denominator is 0, so is v / 0.
    mean_radius, radius : int, optional
        Of the summation and of the suppression field; None is the whole row. With both None and ``sigma**2 = eps`` this
        is layer normalisation.
    out : ndarray, shape and dtype of x, optional
        Where the result goes; ``out=x`` is in place. Any other overlap with an input is an error.

    Returns
    -------
    y : ndarray, shape and dtype of x

    Raises
    ------
    TypeError
        For an argument of another type or dtype.
    ValueError
        For a shape, sigma, radius or overlap that can't be used. `out` is then unchanged.

    Examples
    --------
    >>> import cnorm, numpy as np
    >>> cnorm.divisive_norm(np.float32([[0, 2, 10, 12]]), sigma=0, mean_radius=1, radius=0)
    array([[-1., -1.,  1.,  1.]], dtype=float32)
    """
    cdef ptrdiff_t rows, n
    cdef cnorm_dtype dtype
    cdef cnp.ndarray a = lines_of(x, &dtype, &rows, &n), target, scratch
    cdef int last = cnp.PyArray_NDIM(a) - 1
    cdef ptrdiff_t r_mean = checked_radius(mean_radius, "mean_radius", n), r = checked_radius(radius, "radius", n)
    cdef double s = real_number(sigma, "sigma", dtype)
    cdef cnp.ndarray gain = vector(weight, a, n, "weight", "element of a row")
    cdef cnp.ndarray shift = vector(bias, a, n, "bias", "element of a row")
    cdef cnp.ndarray y = result_of(out, a, (("x", a), ("weight", gain), ("bias", shift)))
    cdef Rows source, sink
    cdef cnorm_status status
    a = rows_of(a, last, &source)
    target = rows_to(y, last, &sink)
    scratch = np.empty(cnorm_divisive_norm_scratch(n), np.uint8)
    gain = contiguous(gain)
    cdef void *pg = data_of(gain)
    shift = contiguous(shift)
    cdef void *pb = data_of(shift)
    cdef void *pw = data_of(scratch)
    with nogil:
        status = cnorm_divisive_norm(dtype, rows, n, r_mean, r, source.data, source.stride, pg, pb, s, sink.data,
                                     sink.stride, pw)
    check(status)
    deliver((y,), (target,))
    return y


def divisive_norm_backward(dy, x, weight=None, *, sigma=1.0, mean_radius=None, radius=None, out=None):
    """Gradients of `divisive_norm`, which is computed again on the way.

    With ``s`` the denominator, ``z = v / s``, ``g = dy * weight`` and |A|, |B| the sizes of the two fields:
    ``dv = g / s - v * sum over B of g * z / (s**2 * |B|)``, ``dx = dv - sum over A of dv / |A|``, and summed over the
    rows ``dweight = sum(dy * z)``, ``dbias = sum(dy)``, ``dsigma = -sigma * sum(g * z / s**2)`` (the chain rule).

    Parameters
    ----------
    dy : ndarray, shape and dtype of x
        Gradient of the loss for the output.
    x, weight, sigma, mean_radius, radius
        As in the forward call.
    out : tuple of three ndarrays or None, optional
        Where (dx, dweight, dbias) go. dx may be dy or x: in place.

    Returns
    -------
    dx : ndarray, shape and dtype of x
    dweight : ndarray, shape (n,), dtype of x, or None where weight is None
    dbias : ndarray, shape (n,), dtype of x
    dsigma : float
        The gradient for sigma, summed over everything.

    Raises
    ------
    TypeError
        For an argument of another type or dtype.
    ValueError
        For a shape, sigma, radius or overlap that can't be used. The outputs are then unchanged.
    """
    cdef ptrdiff_t rows, n
    cdef cnorm_dtype dtype
    cdef cnp.ndarray a = lines_of(x, &dtype, &rows, &n), d, like, target, dgain, dbias, scratch
    cdef int last = cnp.PyArray_NDIM(a) - 1
    cdef ptrdiff_t r_mean = checked_radius(mean_radius, "mean_radius", n), r = checked_radius(radius, "radius", n)
    cdef double s = real_number(sigma, "sigma", dtype), dsigma = 0
    cdef cnp.ndarray gain = vector(weight, a, n, "weight", "element of a row")
    cdef Rows gradient, source, sink
    cdef cnorm_status status
    d, like = array_like(dy, "dy", a, "x"), np.empty(n, a.dtype)
    results = gradients_of(out, "(dx, dweight, dbias)", (a, like, like), ("dy", "x"),
                           (("dy", d), ("x", a), ("weight", gain)))
    d = rows_of(d, last, &gradient)
    a = rows_of(a, last, &source)
    target = rows_to(results[0], last, &sink)
    dgain, dbias = computed(results[1], dtype), computed(results[2], dtype)
    scratch = np.empty(cnorm_divisive_norm_scratch(n), np.uint8)
    gain = contiguous(gain)
    cdef void *pg = data_of(gain)
    cdef void *pdg = data_of(dgain)
    cdef void *pdb = data_of(dbias)
    cdef void *pw = data_of(scratch)
    with nogil:
        status = cnorm_divisive_norm_backward(dtype, rows, n, r_mean, r, gradient.data, gradient.stride, source.data,
                                              source.stride, pg, s, sink.data, sink.stride, pdg, pdb, &dsigma, pw)
    check(status)
    deliver(results, (target, dgain, dbias))
    return results[0], None if weight is None else results[1], results[2], dsigma


def smoothing_gradient(dy, x, weight, Stats stats not None, smoothing, *, axis=-1):
    """Gradient of `layer_norm` for its smoothing term s, where ``eps = s**2``: makes it a parameter to be learnt.

    With ``sigma = sqrt(s**2 + var)``: ``ds = sum of dy * weight * (x - mean) * (-s / sigma**3)`` over all elements
    (the chain rule; the smoothing term is that of arXiv:1611.04520).

    Parameters
    ----------
    dy : ndarray, shape and dtype of x
        Gradient of the loss for the output.
    x : ndarray, shape (..., n), float32 or float64
        The input of the forward call.
    weight : ndarray, shape x.shape[axis:], dtype of x, or None
        The weight of the forward call.
    axis : int
        As in the forward call.
    stats : Stats
        Of the forward call, ``layer_norm(x, weight, bias, eps=smoothing**2, return_stats=True)``.
    smoothing : float
        s, not negative.

    Returns
    -------
    ds : float
        In float64, summed over the rows in order; 0 where smoothing is 0, whatever x is.

    Raises
    ------
    TypeError
        For an argument of another type or dtype.
    ValueError
        For a shape, axis or smoothing that can't be used.
    """
    cdef cnp.ndarray a = as_array(x, "x"), gain = None, d
    cdef cnorm_dtype dtype = whole_dtype(a, "x")
    cdef int first = first_normalised(axis, cnp.PyArray_NDIM(a), a)
    cdef ptrdiff_t rows, n
    cdef Rows gradient, source
    cdef double s = real_number(smoothing, "smoothing", dtype), ds = 0
    cdef cnorm_status status
    count_rows(a, first, &rows, &n)
    d = array_like(dy, "dy", a, "x")
    if weight is not None:
        gain = parameter(as_array(weight, "weight"), a, dtype, first, "weight")
    check_stats(stats, one_per_row(a, first), a, dtype, "x.shape[:axis] + (1, ...)")
    d = rows_of(d, first, &gradient)
    a = rows_of(a, first, &source)
    cdef void *pg = data_of(gain)
    cdef void *ps = data_of(stats._data)
    with nogil:
        status = cnorm_smoothing_gradient(dtype, rows, n, gradient.data, gradient.stride, source.data, source.stride,
                                          pg, ps, s, &ds)
    check(status)
    return ds
