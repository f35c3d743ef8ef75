"""Weight normalisation."""

cdef cnp.ndarray matrix_of(object weight, cnorm_dtype *dtype, ptrdiff_t *rows, ptrdiff_t *n):
    cdef cnp.ndarray a = as_array(weight, "weight")
    dtype[0] = whole_dtype(a, "weight")
    if cnp.PyArray_NDIM(a) < 2:
        raise ValueError(f"weight must have at least 2 dimensions, (outputs, inputs, ...), got shape "
                         f"{(<object>a).shape}")
    if cnp.PyArray_SIZE(a) == 0 and cnp.PyArray_DIMS(a)[0]:
        raise ValueError(f"weight must have at least one input for each output, got shape {(<object>a).shape}")
    count_rows(a, 1, rows, n)
    return a


def weight_norm(weight, gain=None, *, out=None):
    """Weight normalisation: the weight matrix ``gain_i * w_i / |w_i|`` of a linear layer, row by row.

    Salimans, Kingma, "Weight Normalization", arXiv:1602.07868, Eq. 2. With it the layer is
    ``h_i = f(gain_i / |w_i| * (w_i . x) + b_i)``: a plain `Linear` does the rest.

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
        A row of zeros, which has no direction, stays zeros.

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
    cdef ptrdiff_t rows, n
    cdef cnorm_dtype dtype
    cdef cnp.ndarray a = matrix_of(weight, &dtype, &rows, &n), target
    cdef cnp.ndarray g = vector(gain, a, rows, "gain", "output")
    cdef cnp.ndarray v = result_of(out, a, (("weight", a), ("gain", g)))
    cdef Rows source, sink
    g = contiguous(g)
    cdef void *pg = data_of(g)
    cdef cnorm_status status
    a = rows_of(a, 1, &source)
    target = rows_to(v, 1, &sink)
    with nogil:
        status = cnorm_weight_norm(dtype, rows, n, source.data, source.stride, pg, sink.data, sink.stride)
    check(status)
    deliver((v,), (target,))
    return v


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
    cdef ptrdiff_t rows, n
    cdef cnorm_dtype dtype
    cdef cnp.ndarray a = matrix_of(weight, &dtype, &rows, &n), target, dgain
    cdef cnp.ndarray d = array_like(dv, "dv", a, "weight"), g = vector(gain, a, rows, "gain", "output")
    cdef Rows gradient, source, sink
    cdef cnorm_status status
    results = gradients_of(out, "(dweight, dgain)", (a, np.empty(rows, a.dtype)), ("dv", "weight"),
                           (("dv", d), ("weight", a), ("gain", g)))
    d = rows_of(d, 1, &gradient)
    a = rows_of(a, 1, &source)
    target = rows_to(results[0], 1, &sink)
    dgain = computed(results[1], dtype)
    g = contiguous(g)
    cdef void *pg = data_of(g)
    cdef void *pdg = data_of(dgain)
    with nogil:
        status = cnorm_weight_norm_backward(dtype, rows, n, gradient.data, gradient.stride, source.data, source.stride,
                                            pg, sink.data, sink.stride, pdg)
    check(status)
    deliver(results, (target, dgain))
    return results[0], None if gain is None else results[1]
