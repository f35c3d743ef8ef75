"""Divisive normalisation, and the gradient of layer normalisation with respect to its smoothing term."""

cdef cnorm_status call_divisive_norm(Call *c) noexcept nogil:
    return cnorm_divisive_norm(c.dtype, c.rows, c.n, c.mean_radius, c.radius, c.x.data, c.x.stride, c.gain, c.bias,
                               c.eps, c.y.data, c.y.stride, c.scratch)


cdef cnorm_status call_divisive_norm_backward(Call *c) noexcept nogil:
    return cnorm_divisive_norm_backward(c.dtype, c.rows, c.n, c.mean_radius, c.radius, c.dy.data, c.dy.stride, c.x.data,
                                        c.x.stride, c.gain, c.eps, c.y.data, c.y.stride, c.dgain, c.dbias,
                                        &c.dsmoothing, c.scratch)


cdef cnorm_status call_smoothing_gradient(Call *c) noexcept nogil:
    return cnorm_smoothing_gradient(c.dtype, c.rows, c.n, c.dy.data, c.dy.stride, c.x.data, c.x.stride, c.gain, c.stats,
                                    c.eps, &c.dsmoothing)


cdef ptrdiff_t WHOLE_ROW = 1 << 60  # a radius beyond any row


cdef inline ptrdiff_t radius_of(object radius, str name) except -1:
    return WHOLE_ROW if radius is None else integer_of(radius, name, 0)


cdef int set_fields(Call *call, cnp.ndarray x, double sigma, ptrdiff_t mean_radius, ptrdiff_t radius) except -1:
    """Set the sizes of the call, for rows along the last axis, the two radii and sigma."""
    full_dtype_of(x, "x")
    set_rows(call, x, -1)
    call.mean_radius, call.radius = min(mean_radius, call.n), min(radius, call.n)
    return set_eps(call, sigma, "sigma")


def divisive_norm(x, weight=None, bias=None, *, sigma=1.0, mean_radius=None, radius=None, out=None):
    """Divisive normalisation: each element by statistics of its neighbours along the last axis.

    Ren, Liao, Urtasun, Sinz, Zemel, "Normalizing the Normalizers", arXiv:1611.04520:
    ``v = x - mean of x over the summation field``,
    ``y = v / sqrt(sigma**2 + mean of v**2 over the suppression field) * weight + bias``. A field is the element and its
    neighbours within a radius, cut off at the ends of the row.

    Parameters
    ----------
    x : ndarray, shape (..., n), float32 or float64
        Each row along the last axis is normalised separately.
    weight, bias : ndarray, shape (n,), dtype of x, optional
        Gain and bias of each element; 1 and 0 if not given.
    sigma : float
        The smoothing term, not negative, rounded to the dtype of x. Where the denominator is 0, the quotient is 0.
    mean_radius, radius : int, optional
        Radius of the summation field and of the suppression field; None is the whole row. With both None and
        ``sigma**2 = eps`` this is layer normalisation.
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
    cdef Call call
    cdef cnp.ndarray a = array_of(x, "x"), place = place_of(out, "out"), y, written
    cdef cnp.ndarray gain = parameter_of(weight, "weight"), b = parameter_of(bias, "bias")
    cdef double smoothing = real_of(sigma, "sigma")
    cdef ptrdiff_t inner = radius_of(mean_radius, "mean_radius"), outer = radius_of(radius, "radius")
    set_fields(&call, a, smoothing, inner, outer)
    check_per_channel(gain, a, call.n, "weight", "element of a row")
    check_per_channel(b, a, call.n, "bias", "element of a row")
    y = result_of(place, a, gain, b)
    a = read_rows(&call, &call.x, a)
    gain = read_parameter(&call, &call.gain, gain)
    b = read_parameter(&call, &call.bias, b)
    written = write_rows(&call, &call.y, y)
    scratch = reserve(&call, cnorm_divisive_norm_scratch(call.n))
    launch(&call, call_divisive_norm)
    copy_back(y, written)
    return y if out is None else out


def divisive_norm_backward(dy, x, weight=None, *, sigma=1.0, mean_radius=None, radius=None, out=None):
    """Gradients of `divisive_norm`; the forward pass is recomputed.

    With ``s`` the denominator, ``z = v / s``, ``g = dy * weight`` and ``|A|``, ``|B|`` the sizes of the two fields:
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
        The gradient of sigma, summed over all elements.

    Raises
    ------
    TypeError
        For an argument of another type or dtype.
    ValueError
        For a shape, sigma, radius or overlap that can't be used. The outputs are then unchanged.
    """
    cdef Call call
    cdef cnp.ndarray a = array_of(x, "x"), d = array_of(dy, "dy"), gain = parameter_of(weight, "weight")
    cdef double smoothing = real_of(sigma, "sigma")
    cdef ptrdiff_t inner = radius_of(mean_radius, "mean_radius"), outer = radius_of(radius, "radius")
    cdef tuple places = places_of(out, ("dx", "dweight", "dbias"), gain is not None)
    cdef list results
    set_fields(&call, a, smoothing, inner, outer)
    check_per_channel(gain, a, call.n, "weight", "element of a row")
    check_like(d, "dy", a, "x")
    like = empty_vector(call.n, cnp.PyArray_TYPE(a))
    results = gradients_of(places, (a, like, like), ("dy", "x", "weight"), (d, a, gain))
    d = read_rows(&call, &call.dy, d)
    a = read_rows(&call, &call.x, a)
    gain = read_parameter(&call, &call.gain, gain)
    scratch = reserve(&call, cnorm_divisive_norm_scratch(call.n))
    run_backward(&call, call_divisive_norm_backward, results)
    return *returned(out, places, results, gain is not None), call.dsmoothing


def smoothing_gradient(dy, x, weight, Stats stats not None, smoothing, *, axis=-1):
    """Gradient of `layer_norm` with respect to its smoothing term s, where ``eps = s**2``, so that s can be learnt.

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
    cdef Call call
    cdef cnp.ndarray a = array_of(x, "x"), d = array_of(dy, "dy"), w = parameter_of(weight, "weight")
    cdef ptrdiff_t first = index_of(axis)
    cdef double number = real_of(smoothing, "smoothing")
    full_dtype_of(a, "x")
    set_rows(&call, a, first)
    set_eps(&call, number, "smoothing")
    check_like(d, "dy", a, "x")
    check_per_element(w, &call, a, "weight")
    check_row_stats(stats, &call, a)
    d = read_rows(&call, &call.dy, d)
    a = read_rows(&call, &call.x, a)
    w = read_parameter(&call, &call.gain, w)
    set_stats(&call, stats, call.rows)
    launch(&call, call_smoothing_gradient)
    return call.dsmoothing
