"""Weight normalisation."""

cdef int set_matrix(Shape *shape, cnp.ndarray weight) except -1:
    """Set dtype, axis and sizes of the shape, for weight [outputs, inputs, ...]."""
    full_dtype_of(weight, "weight")
    if cnp.PyArray_NDIM(weight) < 2 or (cnp.PyArray_SIZE(weight) == 0 and cnp.PyArray_DIMS(weight)[0]):
        refuse_matrix(weight)
    set_rows(shape, weight, 1)
    shape.length = shape.rows
    return 0


cdef void prepare_matrix(Shape *shape, cnorm_weight *call) noexcept:
    memset(call, 0, sizeof(cnorm_weight))
    call.rows, call.n = shape.rows, shape.n


def weight_norm(weight, gain=None, *, out=None):
    """Weight normalisation: the weight matrix ``gain_i * w_i / |w_i|`` of a linear layer, row by row.

    Salimans, Kingma, "Weight Normalization", arXiv:1602.07868, Eq. 2. With it the layer is
    ``h_i = f(gain_i / |w_i| * (w_i . x) + b_i)``; use the result as the weight of a `Linear`.

    Parameters
    ----------
    weight : ndarray, shape (outputs, inputs, ...), float32 or float64
        The directions w_i; everything from axis 1 on is one row.
    gain : ndarray, shape (outputs,), dtype of weight, optional
        The lengths g_i; 1 if not given.
    out : ndarray, shape and dtype of weight, optional
        Where the result goes; ``out=weight`` is in place. Any other overlap with an input is an error.

    Returns
    -------
    v : ndarray, shape and dtype of weight
        A row of zeros, which has no direction, stays zero.

    Raises
    ------
    TypeError
        For an argument of another type or dtype.
    ValueError
        For a shape or overlap that can't be used. `out` is then unchanged.

    Examples
    --------
    >>> import cnorm, numpy as np
    >>> cnorm.weight_norm(np.float32([[3, 4]]), np.float32([10]))
    array([[6., 8.]], dtype=float32)
    """
    cdef Shape shape
    cdef cnorm_weight call
    cdef cnp.ndarray w = array_of(weight, "weight"), g = parameter_of(gain, "gain"), place = place_of(out, "out")
    cdef cnp.ndarray v, written
    set_matrix(&shape, w)
    check_per_channel(g, w, shape.rows, "gain", "output")
    v = output(place, "out", w)
    if out is not None:
        check_disjoint(v, "out", w, "weight", True)
        check_disjoint(v, "out", g, "gain", False)
    prepare_matrix(&shape, &call)
    w = read_rows(&shape, &call.w, &call.w_stride, w)
    g = read_parameter(&shape, &call.gain, g)
    written = write_rows(&shape, &call.out, &call.out_stride, v)
    begin(&shape)
    finish(&shape, cnorm_weight_norm(shape.dtype, &call))
    copy_back(v, written)
    return v if out is None else out


def weight_norm_backward(dv, weight, gain=None, *, out=None):
    """Gradients of `weight_norm`.

    With ``u_i = w_i / |w_i|``: ``dgain_i = dv_i . u_i`` and ``dweight_i = gain_i / |w_i| * (dv_i - u_i * dgain_i)``
    (arXiv:1602.07868, Eq. 3).

    Parameters
    ----------
    dv : ndarray, shape and dtype of weight
        Gradient of the loss for the normalised matrix.
    weight, gain
        As in the forward call.
    out : tuple of two ndarrays or None, optional
        Where (dweight, dgain) go. dweight may be dv or weight: in place.

    Returns
    -------
    dweight : ndarray, shape and dtype of weight
    dgain : ndarray, shape (outputs,), dtype of weight, or None where gain is None

    Raises
    ------
    TypeError
        For an argument of another type or dtype.
    ValueError
        For a shape or overlap that can't be used. The outputs are then unchanged.
    """
    cdef Shape shape
    cdef cnorm_weight call
    cdef cnp.ndarray w = array_of(weight, "weight"), d = array_of(dv, "dv"), g = parameter_of(gain, "gain")
    cdef tuple places = places_of(out, ("dweight", "dgain"), g is not None)
    cdef list results, written
    set_matrix(&shape, w)
    check_like(d, "dv", w, "weight")
    check_per_channel(g, w, shape.rows, "gain", "output")
    results = gradients_of(places, (w, empty_vector(shape.rows, cnp.PyArray_TYPE(w))), ("dv", "weight", "gain"),
                           (d, w, g))
    written = list(results)
    prepare_matrix(&shape, &call)
    d = read_rows(&shape, &call.dv, &call.dv_stride, d)
    w = read_rows(&shape, &call.w, &call.w_stride, w)
    g = read_parameter(&shape, &call.gain, g)
    write_gradients(&shape, written, &call.out, &call.out_stride, &call.dgain, NULL)
    begin(&shape)
    finish(&shape, cnorm_weight_norm_backward(shape.dtype, &call))
    copy_all_back(results, written)
    return returned(out, places, results, g is not None)
