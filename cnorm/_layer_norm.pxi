"""Layer and RMS normalisation, with a residual or without, and their backward passes."""

cdef enum Kind:
    LAYER
    ADD_LAYER
    RMS


cdef tuple CALLS = ("layer_norm(x, weight, bias, axis=-k)", "add_layer_norm(x, residual, weight, bias, axis=-k)",
                    "rms_norm(x, weight, axis=-k)")


cdef forward(Kind kind, x, residual, weight, bias, eps, axis, out, sum_out, bint return_stats):
    """What the three forward functions share: (y, sum or None, stats or None)."""
    cdef cnp.ndarray a = as_array(x, "x"), r = None, y, total = None, w = None, b = None, gain = None, shift = None
    cdef cnp.ndarray y_to, total_to = None
    cdef Stats stats = None
    cdef cnorm_dtype dtype = dtype_of(a, "x")
    cdef int first = first_normalised(axis, cnp.PyArray_NDIM(a), a)
    cdef double e = real_number(eps, "eps", dtype)
    cdef ptrdiff_t rows, n
    cdef Rows source, other, sink, sum_sink
    cdef const void *pg = NULL
    cdef const void *pb = NULL
    cdef void *ps = NULL
    cdef cnorm_status status
    count_rows(a, first, &rows, &n)
    if weight is not None:
        w = as_array(weight, "weight", CALLS[<int>kind])
        gain = parameter(w, a, dtype, first, "weight")
        pg = cnp.PyArray_DATA(gain)
    if bias is not None:
        b = as_array(bias, "bias")
        shift = parameter(b, a, dtype, first, "bias")
        pb = cnp.PyArray_DATA(shift)
    y = output(out, "out", a)
    if kind == ADD_LAYER:
        r = array_like(residual, "residual", a, "x")
        total = output(sum_out, "sum_out", a)
    if out is not None:
        check_apart(y, "out", a, "x", True)
        check_apart(y, "out", r, "residual", True)
        check_apart(y, "out", w, "weight", False)
        check_apart(y, "out", b, "bias", False)
        check_apart(y, "out", total, "sum_out", False)
    if sum_out is not None:
        check_apart(total, "sum_out", a, "x", True)
        check_apart(total, "sum_out", r, "residual", True)
        check_apart(total, "sum_out", w, "weight", False)
        check_apart(total, "sum_out", b, "bias", False)
    if return_stats:
        stats = empty_stats(one_per_row(a, first), dtype)
        ps = cnp.PyArray_DATA(stats._data)
    a = rows_of(a, first, &source)
    y_to = rows_to(y, first, &sink)
    if kind == ADD_LAYER:
        r = rows_of(r, first, &other)
        total_to = rows_to(total, first, &sum_sink)
    if rows * n > RELEASE_GIL_ABOVE:
        with nogil:
            status = call_forward(kind, dtype, rows, n, source, other, pg, pb, e, sink, sum_sink, ps)
    else:
        status = call_forward(kind, dtype, rows, n, source, other, pg, pb, e, sink, sum_sink, ps)
    check(status)
    if y_to is not y:
        y[...] = y_to
    if total_to is not total:
        total[...] = total_to
    return y, total, stats


cdef cnorm_status call_forward(Kind kind, cnorm_dtype dtype, ptrdiff_t rows, ptrdiff_t n, Rows x, Rows r,
                               const void *gain, const void *bias, double eps, Rows y, Rows total,
                               void *stats) noexcept nogil:
    if kind == LAYER:
        return cnorm_layer_norm(dtype, rows, n, x.data, x.stride, gain, bias, eps, y.data, y.stride, stats)
    if kind == RMS:
        return cnorm_rms_norm(dtype, rows, n, x.data, x.stride, gain, eps, y.data, y.stride, stats)
    return cnorm_add_layer_norm(dtype, rows, n, x.data, x.stride, r.data, r.stride, gain, bias, eps, y.data, y.stride,
                                total.data, total.stride, stats)


def layer_norm(x, weight=None, bias=None, *, eps=1e-5, axis=-1, out=None, bint return_stats=False):
    """Layer normalisation: ``(x - mean) / sqrt(var + eps) * weight + bias``, each row for itself.

    Ba, Kiros, Hinton, "Layer Normalization", arXiv:1607.06450, Eq. 3; ``var`` is the mean of ``(x - mean)**2``.

    Parameters
    ----------
    x : ndarray, shape (..., n), float32, float64, float16 or bfloat16
        Any leading dimensions, any strides (rows whose elements do not lie together are copied first).
    weight, bias : ndarray, shape x.shape[axis:], dtype of x, optional
        Gain and bias of each element; 1 and 0 if not given. float32 is allowed with float16 and bfloat16.
    eps : float
        Added to the variance, rounded to the type computed in: float32, or float64 for float64 x. 0 is allowed: a
        constant row then normalises to 0.
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
    and alignment: docs/numerics.md. A NaN or infinity makes its own row NaN and no other. float16 and bfloat16 are
    storage: computed in float32 and rounded once.

    Examples
    --------
    >>> import cnorm, numpy as np
    >>> cnorm.layer_norm(np.float32([[1e6, 1e6 + 1, 1e6 + 2]])).round(4)
    array([[-1.2247,  0.    ,  1.2247]], dtype=float32)
    """
    cdef cnp.ndarray quick
    if not return_stats and type(axis) is int and axis == -1 and type(eps) is float and 0 <= <double>eps < 1e38:
        quick = plain_norm(LAYER, x, weight, bias, eps, out)
        if quick is not None:
            return quick
    y, _, stats = forward(LAYER, x, None, weight, bias, eps, axis, out, None, return_stats)
    return (y, stats) if return_stats else y


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
        Where the two results go; each may be exactly x or residual, in place.
    return_stats : bool
        Also return the `Stats` that `layer_norm_backward` needs, for the sum.

    Returns
    -------
    y : ndarray
        The bits of ``layer_norm(x + residual, weight, bias)``.
    total : ndarray
        ``x + residual``.
    stats : Stats
        Only if `return_stats`.

    Raises
    ------
    TypeError, ValueError
        As `layer_norm`. Outputs are then unchanged.
    """
    y, total, stats = forward(ADD_LAYER, x, residual, weight, bias, eps, axis, out, sum_out, return_stats)
    return (y, total, stats) if return_stats else (y, total)


def rms_norm(x, weight=None, *, eps=1e-5, axis=-1, out=None, bint return_stats=False):
    """RMS normalisation: ``x / sqrt(mean(x**2) + eps) * weight``, each row for itself.

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
    cdef cnp.ndarray quick
    if not return_stats and type(axis) is int and axis == -1 and type(eps) is float and 0 <= <double>eps < 1e38:
        quick = plain_norm(RMS, x, weight, None, eps, out)
        if quick is not None:
            return quick
    y, _, stats = forward(RMS, x, None, weight, None, eps, axis, out, None, return_stats)
    return (y, stats) if return_stats else y


cdef backward(bint centred, dy, x, weight, Stats stats, axis, out):
    """What the two backward functions share: (dx, dweight or None, dbias or None)."""
    cdef cnp.ndarray a = as_array(x, "x"), d, given = None, gain = None, like, target, dx, dweight, dbias = None
    cdef cnp.ndarray dgain_to, dbias_to = None, partials
    cdef cnorm_dtype dtype = dtype_of(a, "x")
    cdef int first = first_normalised(axis, cnp.PyArray_NDIM(a), a)
    cdef ptrdiff_t rows, n
    cdef cnp.npy_intp bytes_of_partials
    cdef Rows source, gradient, sink
    cdef const void *pg = NULL
    cdef cnorm_status status
    count_rows(a, first, &rows, &n)
    d = array_like(dy, "dy", a, "x")
    if weight is not None:
        given = as_array(weight, "weight")
        gain = parameter(given, a, dtype, first, "weight")
        pg = cnp.PyArray_DATA(gain)
    check_stats(stats, one_per_row(a, first), a, dtype, "x.shape[:axis] + (1, ...)")
    to_dx = to_dweight = to_dbias = None
    if out is not None:
        wanted = ("dx", "dweight", "dbias") if centred else ("dx", "dweight")
        if not isinstance(out, tuple):
            raise TypeError(f"out must be a tuple ({', '.join(wanted)}) or None, got {type(out).__name__}")
        if len(out) != len(wanted):
            raise ValueError(f"out must be a tuple of {len(wanted)}, ({', '.join(wanted)}), got {len(out)}")
        to_dx, to_dweight = out[0], out[1]
        to_dbias = out[2] if centred else None
    if weight is None and to_dweight is not None:
        raise ValueError("out[1] must be None where weight is None")
    like = cnp.PyArray_EMPTY(cnp.PyArray_NDIM(a) - first, cnp.PyArray_DIMS(a) + first,
                             cnp.PyArray_TYPE(a if given is None else given), 0)
    dx = output(to_dx, "out[0]", a)
    dweight = output(to_dweight, "out[1]", like)
    if centred:
        dbias = output(to_dbias, "out[2]", like)
    if out is not None:
        check_apart_from_inputs(dx, "out[0]", d, a, given, stats._data, True)
        check_apart_from_inputs(dweight, "out[1]", d, a, given, stats._data, False)
        check_apart(dweight, "out[1]", dx, "out[0]", False)
        if centred:
            check_apart_from_inputs(dbias, "out[2]", d, a, given, stats._data, False)
            check_apart(dbias, "out[2]", dx, "out[0]", False)
            check_apart(dbias, "out[2]", dweight, "out[1]", False)
    d = rows_of(d, first, &gradient)
    a = rows_of(a, first, &source)
    target = rows_to(dx, first, &sink)
    dgain_to = computed(dweight, dtype)
    if centred:
        dbias_to = computed(dbias, dtype)
    bytes_of_partials = cnorm_backward_partials(dtype, rows, n)
    partials = cnp.PyArray_EMPTY(1, &bytes_of_partials, cnp.NPY_UINT8, 0)
    if rows * n > RELEASE_GIL_ABOVE:
        with nogil:
            status = call_backward(centred, dtype, rows, n, gradient, source, pg, cnp.PyArray_DATA(stats._data), sink,
                                   dgain_to, dbias_to, cnp.PyArray_DATA(partials))
    else:
        status = call_backward(centred, dtype, rows, n, gradient, source, pg, cnp.PyArray_DATA(stats._data), sink,
                               dgain_to, dbias_to, cnp.PyArray_DATA(partials))
    check(status)
    deliver((dx, dweight, dbias), (target, dgain_to, dbias_to))
    return dx, None if weight is None else dweight, dbias


cdef int check_apart_from_inputs(cnp.ndarray out, str name, cnp.ndarray dy, cnp.ndarray x, weight, cnp.ndarray stats,
                                 bint in_place) except -1:
    check_apart(out, name, dy, "dy", in_place)
    check_apart(out, name, x, "x", in_place)
    check_apart(out, name, weight, "weight", False)
    return check_apart(out, name, stats, "stats", False)


cdef cnorm_status call_backward(bint centred, cnorm_dtype dtype, ptrdiff_t rows, ptrdiff_t n, Rows dy, Rows x,
                                const void *gain, const void *stats, Rows dx, cnp.ndarray dgain, cnp.ndarray dbias,
                                void *partials) noexcept nogil:
    if centred:
        return cnorm_layer_norm_backward(dtype, rows, n, dy.data, dy.stride, x.data, x.stride, gain, stats, dx.data,
                                         dx.stride, cnp.PyArray_DATA(dgain), cnp.PyArray_DATA(dbias), partials)
    return cnorm_rms_norm_backward(dtype, rows, n, dy.data, dy.stride, x.data, x.stride, gain, stats, dx.data,
                                   dx.stride, cnp.PyArray_DATA(dgain), partials)


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
    axis : int
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
    dweight and dbias are summed over blocks of 64 rows and a fixed tree over the blocks: the same bits everywhere.
    """
    return backward(True, dy, x, weight, stats, axis, out)


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
    dx, dweight, _ = backward(False, dy, x, weight, stats, axis, out)
    return dx, dweight


# ---- the plain call: nothing to copy, and nothing to convert but weights in half precision ---------------------------

cdef inline bint plain(object x, int number, ptrdiff_t n) noexcept:
    """A C-contiguous, aligned array of rows of n, of the dtype with this type number."""
    return (type(x) is cnp.ndarray and cnp.PyArray_TYPE(<cnp.ndarray>x) == number
            and cnp.PyArray_NDIM(<cnp.ndarray>x) > 0 and cnp.PyArray_IS_C_CONTIGUOUS(<cnp.ndarray>x)
            and cnp.PyArray_ISALIGNED(<cnp.ndarray>x) and cnp.PyArray_ISNOTSWAPPED(<cnp.ndarray>x)
            and cnp.PyArray_DIMS(<cnp.ndarray>x)[cnp.PyArray_NDIM(<cnp.ndarray>x) - 1] == n)


cdef inline bint plain_parameter(object p, int number, ptrdiff_t n, cnp.ndarray y):
    return p is None or (plain(p, number, n) and cnp.PyArray_NDIM(<cnp.ndarray>p) == 1 and apart(y, <cnp.ndarray>p))


cdef cnp.ndarray plain_norm(Kind kind, object x, object weight, object bias, double eps, object out,
                            ptrdiff_t bound=0):
    """layer_norm or rms_norm over the last dimension where all arrays are plain; else None, and nothing is done.

    bound: the length of the float32 weight and bias of a BoundLayerNorm, which were checked once and can't be written
    to; or 0.
    """
    cdef cnp.ndarray a, y
    cdef ptrdiff_t n, rows
    cdef int number
    cdef cnorm_dtype dtype
    cdef const void *pg = NULL
    cdef const void *pb = NULL
    cdef cnorm_status status
    if type(x) is not cnp.ndarray or cnp.PyArray_NDIM(<cnp.ndarray>x) == 0:
        return None
    a = <cnp.ndarray>x
    number = cnp.PyArray_TYPE(a)
    if number == cnp.NPY_FLOAT32:
        dtype = CNORM_F32
    elif number == cnp.NPY_FLOAT16:
        dtype = CNORM_F16
    elif number == bfloat16_number:
        dtype = CNORM_BF16
    elif number == cnp.NPY_FLOAT64:
        dtype = CNORM_F64
    else:
        return None
    n = cnp.PyArray_DIMS(a)[cnp.PyArray_NDIM(a) - 1]
    if n == 0 or not plain(a, number, n):
        return None
    if out is None:
        y = cnp.PyArray_EMPTY(cnp.PyArray_NDIM(a), cnp.PyArray_DIMS(a), number, 0)
    elif (plain(out, number, n) and cnp.PyArray_SAMESHAPE(a, <cnp.ndarray>out)
          and cnp.PyArray_ISWRITEABLE(<cnp.ndarray>out)
          and (cnp.PyArray_DATA(a) == cnp.PyArray_DATA(<cnp.ndarray>out) or apart(a, <cnp.ndarray>out))):
        y = <cnp.ndarray>out
    else:
        return None
    if dtype == CNORM_F16 or dtype == CNORM_BF16:
        if weight is not None and plain_parameter(weight, number, n, y):
            weight = widened(<cnp.ndarray>weight, dtype)
        if bias is not None and plain_parameter(bias, number, n, y):
            bias = widened(<cnp.ndarray>bias, dtype)
    if bound:
        if n != bound or dtype == CNORM_F64:
            return None
    elif not (plain_parameter(weight, compute_number(dtype), n, y)
              and plain_parameter(bias, compute_number(dtype), n, y)):
        return None
    if weight is not None:
        pg = cnp.PyArray_DATA(<cnp.ndarray>weight)
    if bias is not None:
        pb = cnp.PyArray_DATA(<cnp.ndarray>bias)
    rows = cnp.PyArray_SIZE(a) // n
    if rows * n > RELEASE_GIL_ABOVE:
        with nogil:
            status = call_plain(kind, dtype, rows, n, cnp.PyArray_DATA(a), pg, pb, eps, cnp.PyArray_DATA(y))
    else:
        status = call_plain(kind, dtype, rows, n, cnp.PyArray_DATA(a), pg, pb, eps, cnp.PyArray_DATA(y))
    check(status)
    return y


cdef inline cnorm_status call_plain(Kind kind, cnorm_dtype dtype, ptrdiff_t rows, ptrdiff_t n, const void *x,
                                    const void *gain, const void *bias, double eps, void *y) noexcept nogil:
    if kind == RMS:
        return cnorm_rms_norm(dtype, rows, n, x, n, gain, eps, y, n, NULL)
    return cnorm_layer_norm(dtype, rows, n, x, n, gain, bias, eps, y, n, NULL)


cdef class BoundLayerNorm:
    """The call of `cnorm.LayerNorm`: parameters are checked once, so a call costs little more than its arithmetic."""
    cdef cnp.ndarray gain, shift
    cdef double eps_

    def _bind(self, gain, shift, double eps):
        """gain, shift [n]: C-contiguous, read-only float32 arrays, checked by the caller; shift may be None."""
        self.gain, self.shift, self.eps_ = gain, shift, eps

    def __call__(self, x, out=None):
        """Layer norm of x over its last dimension; the bits of ``layer_norm(x, weight, bias, eps=eps, out=out)``.

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
        cdef ptrdiff_t n
        cdef cnp.ndarray y, a
        if self.gain is None:
            raise RuntimeError("LayerNorm.__init__ was not called")
        n = cnp.PyArray_DIMS(self.gain)[0]
        y = plain_norm(LAYER, x, self.gain, self.shift, self.eps_, out, n)
        if y is not None:
            return y
        a = as_array(x, "x")  # the parameters are right: what does not fit them is x
        if dtype_of(a, "x") == CNORM_F64:
            raise TypeError("x must have dtype float32, float16 or bfloat16, as weight is float32, got float64")
        if cnp.PyArray_NDIM(a) == 0 or cnp.PyArray_DIMS(a)[cnp.PyArray_NDIM(a) - 1] != n:
            raise ValueError(f"x must have shape (..., {n}), got {(<object>a).shape}")
        return layer_norm(x, self.gain, self.shift, eps=self.eps_, out=out)
