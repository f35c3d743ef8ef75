"""Batch normalisation in training, and for inference with a given mean and variance."""

cdef cnorm_status call_batch_norm(Call *c) noexcept nogil:
    return cnorm_batch_norm(c.dtype, c.rows, c.channels, c.space, c.x.data, c.x.stride, c.gain, c.bias, c.eps, c.y.data,
                            c.y.stride, c.stats, c.moments, c.scratch)


cdef cnorm_status call_batch_norm_backward(Call *c) noexcept nogil:
    return cnorm_batch_norm_backward(c.dtype, c.rows, c.channels, c.space, c.dy.data, c.dy.stride, c.x.data,
                                     c.x.stride, c.gain, c.stats, c.y.data, c.y.stride, c.dgain, c.dbias, c.scratch)


cdef cnorm_status call_batch_norm_inference(Call *c) noexcept nogil:
    return cnorm_batch_norm_inference(c.dtype, c.rows, c.channels, c.space, c.x.data, c.x.stride, c.mean, c.var, c.gain,
                                      c.bias, c.eps, c.y.data, c.y.stride, c.scratch)


cdef cnorm_status call_batch_norm_inference_backward(Call *c) noexcept nogil:
    return cnorm_batch_norm_inference_backward(c.dtype, c.rows, c.channels, c.space, c.dy.data, c.dy.stride, c.x.data,
                                               c.x.stride, c.mean, c.var, c.gain, c.eps, c.y.data, c.y.stride, c.dgain,
                                               c.dbias, c.scratch)


cdef int set_batch(Call *call, cnp.ndarray x) except -1:
    """`set_samples` for training, which needs more than one number per channel."""
    set_samples(call, x, 2)
    if call.rows * call.space < 2:
        raise ValueError("x must have more than one number per channel in training, got "
                         f"{call.rows * call.space}: the mean would be the number itself, its deviation 0 and "
                         "every output the bias, whatever x is; batch_norm_inference takes any number")
    return 0


cdef cnp.ndarray reserve_batch(Call *call):
    return reserve(call, cnorm_batch_norm_scratch(call.dtype, call.rows, call.channels, call.space))


cdef tuple running_averages(object mean, object var, cnp.ndarray x, tuple others):
    """running_mean and running_var [channels], checked as outputs that overlap none of `others`; None if not given."""
    cdef cnp.ndarray like, m, v
    if (mean is None) != (var is None):
        given, absent = ("running_var", "running_mean") if mean is None else ("running_mean", "running_var")
        raise ValueError(f"{absent} must be given too where {given} is, got None")
    if mean is None:
        return None, None
    like = np.empty(cnp.PyArray_DIMS(x)[1], np.float64 if cnp.PyArray_TYPE(x) == cnp.NPY_FLOAT64 else np.float32)
    m, v = output(mean, "running_mean", like), output(var, "running_var", like)
    for name, array in others:
        check_disjoint(m, "running_mean", array, name, False)
        check_disjoint(v, "running_var", array, name, False)
    check_disjoint(m, "running_mean", v, "running_var", False)
    return m, v


cdef int update(average, batch, double factor, double momentum) except -1:
    """average = (1 - momentum) average + momentum (factor batch), in float64 and rounded once."""
    with default_float_env():
        average[...] = (1 - momentum) * average.astype(np.float64) + momentum * (factor * batch)
    return 0


def batch_norm(x, weight=None, bias=None, *, running_mean=None, running_var=None, momentum=0.1,
               running_variance="unbiased", eps=1e-5, out=None, bint return_stats=False):
    """Batch normalisation in training: each channel with its mean and variance over the whole batch.

    Ioffe, Szegedy, "Batch Normalization", arXiv:1502.03167, Algorithm 1:
    ``y = (x - mean) / sqrt(var + eps) * weight + bias``, mean and variance of each channel over samples and space,
    ``var`` being the mean of ``(x - mean)**2``.

    Parameters
    ----------
    x : ndarray, shape (samples, channels, ...), float32, float64, float16 or ml_dtypes.bfloat16
        More than one number per channel.
    weight, bias : ndarray, shape (channels,), dtype of x or float32, optional
        Gain and bias of each channel; 1 and 0 if not given.
    running_mean, running_var : ndarray, shape (channels,), dtype of x or, for half types, float32, optional
        Averages for inference, both or neither; updated in place to ``(1 - momentum) * running + momentum * batch``.
    momentum : float
        The weight of this batch in the averages, as in PyTorch; ONNX's momentum is 1 minus this.
    running_variance : {"unbiased", "biased"}
        Whether running_var averages variances divided by N - 1 (PyTorch) or by N (ONNX); N is samples times space. y is
        always computed with the biased variance.
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
    cdef Call call
    cdef cnp.ndarray a = array_of(x, "x"), moments, y
    cdef double share
    set_batch(&call, a)
    call.eps = number_of(eps, "eps", call.dtype)
    cdef cnp.ndarray gain = per_channel(weight, a, call.channels, "weight", "channel")
    cdef cnp.ndarray shift = per_channel(bias, a, call.channels, "bias", "channel")
    y = result_of(out, a, (("x", a), ("weight", gain), ("bias", shift)))
    if not isinstance(running_variance, str) or running_variance not in ("unbiased", "biased"):
        raise ValueError(f'running_variance must be "unbiased" or "biased", got {quoted(running_variance)}')
    share = number_of(momentum, "momentum", CNORM_F64)
    if share > 1:
        raise ValueError(f"momentum must be in [0, 1], got {quoted(momentum)}")
    mean, var = running_averages(running_mean, running_var, a,
                                 (("x", a), ("weight", gain), ("bias", shift), ("out", y)))
    cdef Stats stats = empty_stats((call.channels,), call.dtype)
    moments = np.empty((2, call.channels))
    a = read_rows(&call, &call.x, a)
    gain = read_parameter(&call, &call.gain, gain)
    shift = read_parameter(&call, &call.bias, shift)
    cdef cnp.ndarray written = write_rows(&call, &call.y, y)
    call.stats = cnp.PyArray_DATA(stats._data)
    call.moments = <double *>cnp.PyArray_DATA(moments)
    scratch = reserve_batch(&call)
    launch(&call, call_batch_norm)
    copy_back(y, written)
    if mean is not None:
        number = float(call.rows * call.space)
        update(mean, moments[0], 1, share)
        update(var, moments[1], number / (number - 1) if running_variance == "unbiased" else 1, share)
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
    dweight : ndarray, shape (channels,), dtype of weight, or None where weight is None
    dbias : ndarray, shape (channels,), dtype of weight, or of x where weight is None

    Raises
    ------
    TypeError
        For an argument of another type or dtype.
    ValueError
        For a shape or overlap that can't be used. The outputs are then unchanged.
    """
    cdef Call call
    cdef cnp.ndarray a = array_of(x, "x")
    set_batch(&call, a)
    check_stats(stats, (call.channels,), a, call.dtype, "(channels,)")
    call.stats = cnp.PyArray_DATA(stats._data)
    return batch_gradients(&call, call_batch_norm_backward, dy, a, weight, (("stats", stats._data),), out)


cdef tuple batch_gradients(Call *call, Entry entry, object dy, cnp.ndarray x, object weight, tuple statistics,
                           object out):
    """Gradients of x, weight and bias; `statistics` (name, array) are in the call already."""
    cdef cnp.ndarray d = array_like(dy, "dy", x, "x")
    cdef cnp.ndarray gain = per_channel(weight, x, call.channels, "weight", "channel")
    like = parameter_like(call, gain, x)
    results = gradients_of(out, ("dx", "dweight", "dbias"), (x, like, like),
                           (("dy", d), ("x", x), ("weight", gain), *statistics))
    d = read_rows(call, &call.dy, d)
    x = read_rows(call, &call.x, x)
    gain = read_parameter(call, &call.gain, gain)
    scratch = reserve_batch(call)
    run_backward(call, entry, results)
    return results[0], None if gain is None else results[1], results[2]


cdef cnp.ndarray given_moment(object p, cnp.ndarray x, str name):
    """mean or var [channels]; None is refused."""
    cdef cnp.ndarray a = per_channel(p, x, cnp.PyArray_DIMS(x)[1], name, "channel")
    if a is None:
        refuse_no_moment(name, x)
    if name == "var":
        check_var(a, "channel")
    return a


def batch_norm_inference(x, mean, var, weight=None, bias=None, *, eps=1e-5, out=None):
    """Batch normalisation with a given mean and variance: ``(x - mean) / sqrt(var + eps) * weight + bias``.

    Ioffe, Szegedy, "Batch Normalization", arXiv:1502.03167, Algorithm 2, step 11.

    Parameters
    ----------
    x : ndarray, shape (samples, channels, ...), float32, float64, float16 or ml_dtypes.bfloat16
        Any number of samples.
    mean, var : ndarray, shape (channels,), dtype of x or float32
        Such as the running averages of `batch_norm`; var is not negative.
    weight, bias : ndarray, shape (channels,), dtype of x or float32, optional
        Gain and bias of each channel; 1 and 0 if not given.
    eps : float
        Added to the variance, rounded to the dtype of x.
    out : ndarray, shape and dtype of x, optional
        Where the result goes; ``out=x`` is in place. Any other overlap with an input is an error.

    Returns
    -------
    y : ndarray, shape and dtype of x
        A channel with var + eps = 0 becomes its bias.

    Raises
    ------
    TypeError
        For an argument of another type or dtype.
    ValueError
        For a shape, variance, eps or overlap that can't be used. `out` is then unchanged.
    """
    cdef Call call
    cdef cnp.ndarray a = array_of(x, "x")
    set_samples(&call, a, 2)
    call.eps = number_of(eps, "eps", call.dtype)
    cdef cnp.ndarray gain = per_channel(weight, a, call.channels, "weight", "channel")
    cdef cnp.ndarray shift = per_channel(bias, a, call.channels, "bias", "channel")
    cdef cnp.ndarray m = given_moment(mean, a, "mean"), v = given_moment(var, a, "var")
    cdef cnp.ndarray y = result_of(out, a, (("x", a), ("weight", gain), ("bias", shift), ("mean", m), ("var", v)))
    a = read_rows(&call, &call.x, a)
    m = read_parameter(&call, &call.mean, m)
    v = read_parameter(&call, &call.var, v)
    gain = read_parameter(&call, &call.gain, gain)
    shift = read_parameter(&call, &call.bias, shift)
    cdef cnp.ndarray written = write_rows(&call, &call.y, y)
    scratch = reserve_batch(&call)
    launch(&call, call_batch_norm_inference)
    copy_back(y, written)
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
    dweight : ndarray, shape (channels,), dtype of weight, or None where weight is None
    dbias : ndarray, shape (channels,), dtype of weight, or of x where weight is None

    Raises
    ------
    TypeError
        For an argument of another type or dtype.
    ValueError
        For a shape, variance, eps or overlap that can't be used. The outputs are then unchanged.
    """
    cdef Call call
    cdef cnp.ndarray a = array_of(x, "x")
    set_samples(&call, a, 2)
    call.eps = number_of(eps, "eps", call.dtype)
    cdef cnp.ndarray m = given_moment(mean, a, "mean"), v = given_moment(var, a, "var")
    given = (("mean", m), ("var", v))
    m = read_parameter(&call, &call.mean, m)
    v = read_parameter(&call, &call.var, v)
    return batch_gradients(&call, call_batch_norm_inference_backward, dy, a, weight, given, out)
