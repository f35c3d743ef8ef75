"""Divisive normalisation, and the gradient of layer normalisation with respect to its smoothing term."""

cdef ptrdiff_t WHOLE_ROW = 1 << 60  # a radius beyond any row


cdef inline ptrdiff_t radius_of(object radius, str name) except -1:
    return WHOLE_ROW if radius is None else integer_of(radius, name, 0)


cdef int set_fields(Shape *shape, cnorm_divisive *call, cnp.ndarray x, double sigma) except -1:
    """Set the sizes of shape and call, for rows along the last axis, and sigma."""
    full_dtype_of(x, "x")
    set_rows(shape, x, -1)
    check_eps(shape, sigma, "sigma")
    memset(call, 0, sizeof(cnorm_divisive))
    call.rows, call.n, call.sigma = shape.rows, shape.n, sigma
    return 0


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
    cdef Shape shape
    cdef cnorm_divisive call
    cdef cnp.ndarray a = array_of(x, "x"), place = place_of(out, "out"), y, written
    cdef cnp.ndarray gain = parameter_of(weight, "weight"), b = parameter_of(bias, "bias")
    cdef double smoothing = real_of(sigma, "sigma")
    cdef ptrdiff_t inner = radius_of(mean_radius, "mean_radius"), outer = radius_of(radius, "radius")
    set_fields(&shape, &call, a, smoothing)
    call.mean_radius, call.radius = inner, outer
    check_per_channel(gain, a, shape.n, "weight", "element of a row")
    check_per_channel(b, a, shape.n, "bias", "element of a row")
    y = result_of(place, a, gain, b)
    a = read_rows(&shape, &call.x, &call.x_stride, a)
    gain = read_parameter(&shape, &call.gain, gain)
    b = read_parameter(&shape, &call.bias, b)
    written = write_rows(&shape, &call.out, &call.out_stride, y)
    scratch = reserve(&call.scratch, cnorm_divisive_norm_scratch(shape.n))
    begin(&shape)
    finish(&shape, cnorm_divisive_norm(shape.dtype, &call))
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
    cdef Shape shape
    cdef cnorm_divisive call
    cdef cnp.ndarray a = array_of(x, "x"), d = array_of(dy, "dy"), gain = parameter_of(weight, "weight")
    cdef double smoothing = real_of(sigma, "sigma")
    cdef ptrdiff_t inner = radius_of(mean_radius, "mean_radius"), outer = radius_of(radius, "radius")
    cdef tuple places = places_of(out, ("dx", "dweight", "dbias"), gain is not None)
    cdef list results, written
    cdef double dsigma
    set_fields(&shape, &call, a, smoothing)
    call.mean_radius, call.radius = inner, outer
    check_per_channel(gain, a, shape.n, "weight", "element of a row")
    check_like(d, "dy", a, "x")
    like = empty_vector(shape.n, cnp.PyArray_TYPE(a))
    results = gradients_of(places, (a, like, like), ("dy", "x", "weight"), (d, a, gain))
    written = list(results)
    call.dsigma = &dsigma
    d = read_rows(&shape, &call.dy, &call.dy_stride, d)
    a = read_rows(&shape, &call.x, &call.x_stride, a)
    gain = read_parameter(&shape, &call.gain, gain)
    scratch = reserve(&call.scratch, cnorm_divisive_norm_scratch(shape.n))
    write_gradients(&shape, written, &call.out, &call.out_stride, &call.dgain, &call.dbias)
    begin(&shape)
    finish(&shape, cnorm_divisive_norm_backward(shape.dtype, &call))
    copy_all_back(results, written)
    return *returned(out, places, results, gain is not None), dsigma


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
    axis : int or tuple of int
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
    cdef Shape shape
    cdef cnorm_norm_backward call
    cdef double ds
    cdef cnp.ndarray a = array_of(x, "x"), d = array_of(dy, "dy"), w = parameter_of(weight, "weight")
    cdef ptrdiff_t first = axis_of(axis, a)
    cdef double number = real_of(smoothing, "smoothing")
    full_dtype_of(a, "x")
    set_rows(&shape, a, first)
    check_eps(&shape, number, "smoothing")
    check_like(d, "dy", a, "x")
    check_per_element(w, &shape, a, "weight")
    check_row_stats(stats, &shape, a)
    memset(&call, 0, sizeof(call))
    call.rows, call.n = shape.rows, shape.n
    d = read_rows(&shape, &call.dy, &call.dy_stride, d)
    a = read_rows(&shape, &call.x, &call.x_stride, a)
    w = read_parameter(&shape, &call.gain, w)
    data = set_stats(&shape, &call.stats, stats, shape.rows)
    begin(&shape)
    finish(&shape, cnorm_smoothing_gradient(shape.dtype, &call, number, &ds))
    return ds
