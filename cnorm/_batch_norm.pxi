"""Batch normalisation, in training and with given moments."""

cdef int check_batch(Volume *v) except -1:
    if v.samples * v.space < 2:
        raise ValueError("x must have more than one number per channel in training, got "
                         f"{v.samples * v.space}: the mean would be the number itself, its deviation 0 and "
                         "every output the bias, whatever x is; batch_norm_inference takes any number")
    return 0


def batch_norm(x, weight=None, bias=None, *, running_mean=None, running_var=None, momentum=0.1,
               running_variance="unbiased", eps=1e-5, out=None, bint return_stats=False):
    """Batch normalisation in training: each channel by its mean and variance over the whole batch.

    Ioffe, Szegedy, "Batch Normalization", arXiv:1502.03167, Algorithm 1:
    ``y = (x - mean) / sqrt(var + eps) * weight + bias``, mean and variance of each channel over samples and space,
    ``var`` being the mean of ``(x - mean)**2``.

    Parameters
    ----------
    x : ndarray, shape (samples, channels, ...), float32 or float64
        More than one number per channel.
    weight, bias : ndarray, shape (channels,), dtype of x, optional
        Gain and bias of each channel; 1 and 0 if not given.
    running_mean, running_var : ndarray, shape (channels,), dtype of x, optional
        Averages for inference, both or neither; updated in place to ``(1 - momentum) * running + momentum * batch``.
    momentum : float
        The share of this batch in the averages, as in PyTorch; ONNX's momentum is 1 minus this.
    running_variance : {"unbiased", "biased"}
        Whether the variance that running_var averages divides by N - 1 (PyTorch) or by N (ONNX); N is samples times
        space.
        y always takes the biased one.
    eps : float
        Added to the variance, rounded to the dtype of x.
    out : ndarray, shape and dtype of x, optional
        Where the result goes; ``out=x`` is in place. Any other overlap with an input is an error.
    return_stats : bool
        Also return the `Stats`, of shape (channels,), that `batch_norm_backward` needs.

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
        For a shape, a batch of one number per channel, eps, momentum or overlap that can't be used. `out` and the
        averages are then unchanged.

    Examples
    --------
    >>> import cnorm, numpy as np
    >>> cnorm.batch_norm(np.float32([[1, 10], [3, 30]]), eps=0)
    array([[-1., -1.],
           [ 1.,  1.]], dtype=float32)
    """
    cdef cnp.ndarray a = as_array(x, "x"), like, target, scratch, moments
    cdef cnorm_dtype dtype = whole_dtype(a, "x")
    cdef Volume v
    cdef Rows source, sink
    cdef double e = real_number(eps, "eps", dtype), share
    cdef double *pm
    cdef cnorm_status status
    volume_of(a, 2, &v)
    check_batch(&v)
    cdef cnp.ndarray gain = vector(weight, a, v.channels, "weight", "channel")
    cdef cnp.ndarray shift = vector(bias, a, v.channels, "bias", "channel"), mean = None, var = None
    cdef cnp.ndarray y = result_of(out, a, (("x", a), ("weight", gain), ("bias", shift)))
    cdef Stats stats = empty_stats((v.channels,), dtype)
    if not isinstance(running_variance, str) or running_variance not in ("unbiased", "biased"):
        raise ValueError(f'running_variance must be "unbiased" or "biased", got {running_variance!r}')
    if (running_mean is None) != (running_var is None):
        given, absent = ("running_var", "running_mean") if running_mean is None else ("running_mean", "running_var")
        raise ValueError(f"{absent} must be given too where {given} is, got None")
    share = real_number(momentum, "momentum")
    if share > 1:
        raise ValueError(f"momentum must be in [0, 1], got {momentum!r}")
    if running_mean is not None:
        like = np.empty(v.channels, a.dtype)
        mean = output(running_mean, "running_mean", like)
        var = output(running_var, "running_var", like)
        for average, name in ((mean, "running_mean"), (var, "running_var")):
            for other, other_name in ((a, "x"), (gain, "weight"), (shift, "bias"), (y, "out")):
                check_apart(average, name, other, other_name, False)
        check_apart(mean, "running_mean", var, "running_var", False)
    a = rows_of(a, 1, &source)
    target = rows_to(y, 1, &sink)
    moments = np.empty((2, v.channels))
    scratch = np.empty(cnorm_batch_norm_scratch(dtype, v.samples, v.channels, v.space), np.uint8)
    pm = <double *>cnp.PyArray_DATA(moments)
    gain = contiguous(gain)
    cdef void *pg = data_of(gain)
    shift = contiguous(shift)
    cdef void *pb = data_of(shift)
    cdef void *ps = data_of(stats._data)
    cdef void *pw = data_of(scratch)
    with nogil:
        status = cnorm_batch_norm(dtype, v.samples, v.channels, v.space, source.data, source.stride, pg, pb, e,
                                  sink.data, sink.stride, ps, pm, pw)
    check(status)
    deliver((y,), (target,))
    if mean is not None:
        with KernelArithmetic():
            number = float(v.samples * v.space)
            batch_var = moments[1] * (number / (number - 1)) if running_variance == "unbiased" else moments[1]
            mean[...] = (1 - share) * mean.astype(np.float64) + share * moments[0]
            var[...] = (1 - share) * var.astype(np.float64) + share * batch_var
    return (y, stats) if return_stats else y


def batch_norm_backward(dy, x, weight, Stats stats not None, *, out=None):
    """Gradients of `batch_norm`, which flow through the mean and variance of the batch too.

    With ``xhat = (x - mean) * inv_std_dev`` and sums and means over samples and space:
    ``dweight = sum(dy * xhat)``, ``dbias = sum(dy)``,
    ``dx = weight * inv_std_dev * (dy - mean(dy) - xhat * mean(dy * xhat))`` (the chain rule through Algorithm 1 of
    arXiv:1502.03167).

    Parameters
    ----------
    dy : ndarray, shape and dtype of x
        Gradient of the loss for the output.
    x, weight
        As in the forward call.
    stats : Stats
        Of the forward call.
    out : tuple of three ndarrays or None, optional
        Where (dx, dweight, dbias) go. dx may be dy or x: in place.

    Returns
    -------
    dx : ndarray, shape and dtype of x
    dweight : ndarray, shape (channels,), dtype of x, or None where weight is None
    dbias : ndarray, shape (channels,), dtype of x

    Raises
    ------
    TypeError
        For an argument of another type or dtype.
    ValueError
        For a shape or overlap that can't be used. The outputs are then unchanged.
    """
    cdef cnp.ndarray a = as_array(x, "x"), d, gain, like, target, dgain, dbias, scratch
    cdef cnorm_dtype dtype = whole_dtype(a, "x")
    cdef Volume v
    cdef Rows gradient, source, sink
    cdef cnorm_status status
    volume_of(a, 2, &v)
    check_batch(&v)
    d, gain = array_like(dy, "dy", a, "x"), vector(weight, a, v.channels, "weight", "channel")
    like = np.empty(v.channels, a.dtype)
    check_stats(stats, (v.channels,), a, dtype, "(channels,)")
    results = gradients_of(out, "(dx, dweight, dbias)", (a, like, like), ("dy", "x"),
                           (("dy", d), ("x", a), ("weight", gain), ("stats", stats._data)))
    d = rows_of(d, 1, &gradient)
    a = rows_of(a, 1, &source)
    target = rows_to(results[0], 1, &sink)
    dgain, dbias = computed(results[1], dtype), computed(results[2], dtype)
    scratch = np.empty(cnorm_batch_norm_scratch(dtype, v.samples, v.channels, v.space), np.uint8)
    gain = contiguous(gain)
    cdef void *pg = data_of(gain)
    cdef void *ps = data_of(stats._data)
    cdef void *pdg = data_of(dgain)
    cdef void *pdb = data_of(dbias)
    cdef void *pw = data_of(scratch)
    with nogil:
        status = cnorm_batch_norm_backward(dtype, v.samples, v.channels, v.space, gradient.data, gradient.stride,
                                           source.data, source.stride, pg, ps, sink.data, sink.stride, pdg, pdb, pw)
    check(status)
    deliver(results, (target, dgain, dbias))
    return results[0], None if weight is None else results[1], results[2]


def check_var(var, what):
    """No variance is negative, be it subnormal; NaN may be; `what` says what there is one for."""
    with KernelArithmetic():
        negative = np.less(var, 0)
    if negative.any():
        raise ValueError(f"var must not be negative, got {var[negative][0]} in {what} {negative.argmax()}")


cdef cnp.ndarray given_moment(object p, cnp.ndarray x, ptrdiff_t channels, str name):
    if p is None:
        raise TypeError(f"{name} must be an array of shape ({channels},), got None")
    cdef cnp.ndarray a = vector(p, x, channels, name, "channel")
    if name == "var":
        check_var(a, "channel")
    return a


def batch_norm_inference(x, mean, var, weight=None, bias=None, *, eps=1e-5, out=None):
    """Batch normalisation with a given mean and variance: ``(x - mean) / sqrt(var + eps) * weight + bias``.

    Ioffe, Szegedy, "Batch Normalization", arXiv:1502.03167, Algorithm 2, step 11.

    Parameters
    ----------
    x : ndarray, shape (samples, channels, ...), float32 or float64
        Any number of samples.
    mean, var : ndarray, shape (channels,), dtype of x
        Such as the running averages of `batch_norm`; var is not negative.
    weight, bias : ndarray, shape (channels,), dtype of x, optional
        Gain and bias of each channel; 1 and 0 if not given.
    eps : float
        Added to the variance, rounded to the dtype of x.
    out : ndarray, shape and dtype of x, optional
        Where the result goes; ``out=x`` is in place. Any other overlap with an input is an error.

    Returns
    -------
    y : ndarray, shape and dtype of x
        A channel with var + eps = 0 is its bias.

    Raises
    ------
    TypeError
        For an argument of another type or dtype.
    ValueError
        For a shape, variance, eps or overlap that can't be used. `out` is then unchanged.
    """
    cdef cnp.ndarray a = as_array(x, "x"), target, scratch
    cdef cnorm_dtype dtype = whole_dtype(a, "x")
    cdef Volume v
    cdef Rows source, sink
    cdef double e = real_number(eps, "eps", dtype)
    cdef cnorm_status status
    volume_of(a, 2, &v)
    cdef cnp.ndarray gain = vector(weight, a, v.channels, "weight", "channel")
    cdef cnp.ndarray shift = vector(bias, a, v.channels, "bias", "channel")
    cdef cnp.ndarray centre = given_moment(mean, a, v.channels, "mean")
    cdef cnp.ndarray spread = given_moment(var, a, v.channels, "var")
    cdef cnp.ndarray y = result_of(out, a, (("x", a), ("weight", gain), ("bias", shift), ("mean", centre),
                                            ("var", spread)))
    a = rows_of(a, 1, &source)
    target = rows_to(y, 1, &sink)
    scratch = np.empty(cnorm_batch_norm_scratch(dtype, v.samples, v.channels, v.space), np.uint8)
    centre = contiguous(centre)
    cdef void *pmean = data_of(centre)
    spread = contiguous(spread)
    cdef void *pvar = data_of(spread)
    gain = contiguous(gain)
    cdef void *pg = data_of(gain)
    shift = contiguous(shift)
    cdef void *pb = data_of(shift)
    cdef void *pw = data_of(scratch)
    with nogil:
        status = cnorm_batch_norm_inference(dtype, v.samples, v.channels, v.space, source.data, source.stride, pmean,
                                            pvar, pg, pb, e, sink.data, sink.stride, pw)
    check(status)
    deliver((y,), (target,))
    return y


def batch_norm_inference_backward(dy, x, mean, var, weight=None, *, eps=1e-5, out=None):
    """Gradients of `batch_norm_inference`; mean and variance are constants.

    ``dx = dy * weight / sqrt(var + eps)``; summed over samples and space,
    ``dweight = sum(dy * (x - mean)) / sqrt(var + eps)`` and ``dbias = sum(dy)`` (the chain rule through step 11 of
    Algorithm 2 of arXiv:1502.03167).

    Parameters
    ----------
    dy : ndarray, shape and dtype of x
        Gradient of the loss for the output.
    x, mean, var, weight, eps
        As in the forward call.
    out : tuple of three ndarrays or None, optional
        Where (dx, dweight, dbias) go. dx may be dy or x: in place.

    Returns
    -------
    dx : ndarray, shape and dtype of x
    dweight : ndarray, shape (channels,), dtype of x, or None where weight is None
    dbias : ndarray, shape (channels,), dtype of x

    Raises
    ------
    TypeError
        For an argument of another type or dtype.
    ValueError
        For a shape, variance, eps or overlap that can't be used. The outputs are then unchanged.
    """
    cdef cnp.ndarray a = as_array(x, "x"), d, like, target, dgain, dbias, scratch
    cdef cnorm_dtype dtype = whole_dtype(a, "x")
    cdef Volume v
    cdef Rows gradient, source, sink
    cdef double e = real_number(eps, "eps", dtype)
    cdef cnorm_status status
    volume_of(a, 2, &v)
    cdef cnp.ndarray gain = vector(weight, a, v.channels, "weight", "channel")
    cdef cnp.ndarray centre = given_moment(mean, a, v.channels, "mean")
    cdef cnp.ndarray spread = given_moment(var, a, v.channels, "var")
    d, like = array_like(dy, "dy", a, "x"), np.empty(v.channels, a.dtype)
    results = gradients_of(out, "(dx, dweight, dbias)", (a, like, like), ("dy", "x"),
                           (("dy", d), ("x", a), ("weight", gain), ("mean", centre), ("var", spread)))
    d = rows_of(d, 1, &gradient)
    a = rows_of(a, 1, &source)
    target = rows_to(results[0], 1, &sink)
    dgain, dbias = computed(results[1], dtype), computed(results[2], dtype)
    scratch = np.empty(cnorm_batch_norm_scratch(dtype, v.samples, v.channels, v.space), np.uint8)
    centre = contiguous(centre)
    cdef void *pmean = data_of(centre)
    spread = contiguous(spread)
    cdef void *pvar = data_of(spread)
    gain = contiguous(gain)
    cdef void *pg = data_of(gain)
    cdef void *pdg = data_of(dgain)
    cdef void *pdb = data_of(dbias)
    cdef void *pw = data_of(scratch)
    with nogil:
        status = cnorm_batch_norm_inference_backward(dtype, v.samples, v.channels, v.space, gradient.data,
                                                     gradient.stride, source.data, source.stride, pmean, pvar, pg, e,
                                                     sink.data, sink.stride, pdg, pdb, pw)
    check(status)
    deliver(results, (target, dgain, dbias))
    return results[0], None if weight is None else results[1], results[2]
