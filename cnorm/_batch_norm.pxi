"""Batch normalisation in training, and for inference with a given mean and variance."""
ctypedef cnorm_status (*BatchBackward)(cnorm_dtype dtype, const cnorm_volume_norm_backward *call) noexcept nogil


cdef int set_batch(Shape *shape, cnp.ndarray x) except -1:
    """`set_samples` for training, which needs more than one number per channel."""
    set_samples(shape, x, 2)
    if shape.rows * shape.space < 2:
        refuse_single_numbers(shape.rows * shape.space)
    return 0


cdef cnp.ndarray reserve_batch(Shape *shape, void **pointer):
    return reserve(pointer, cnorm_batch_norm_scratch(shape.dtype, shape.rows, shape.channels, shape.space))


cdef int check_average(cnp.ndarray average, str name, cnp.ndarray x, cnp.ndarray weight, cnp.ndarray bias,
                       cnp.ndarray y) except -1:
    check_disjoint(average, name, x, "x", False)
    check_disjoint(average, name, weight, "weight", False)
    check_disjoint(average, name, bias, "bias", False)
    return check_disjoint(average, name, y, "out", False)


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
    weight, bias : ndarray, shape (channels,), dtype of x, optional
        Gain and bias of each channel; 1 and 0 if not given. float32 is allowed with float16 and bfloat16.
    running_mean, running_var : ndarray, shape (channels,), dtype of x or, for half types, float32, optional
        Averages for inference, both or neither; updated in place to ``(1 - momentum) * running + momentum * batch``.
    momentum : float
        The weight of this batch in the averages, as in PyTorch; ONNX's momentum is 1 minus this.
    running_variance : {"unbiased", "biased"}
        Whether running_var averages variances divided by N - 1 (PyTorch) or by N (ONNX); N is samples times space. y is
        always computed with the biased variance.
    eps : float
        Added to the variance, rounded to float32, or float64 for float64 x.
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
    cdef Shape shape
    cdef cnorm_volume_norm call
    cdef cnp.ndarray a = array_of(x, "x"), place = place_of(out, "out"), moments, y, written, like
    cdef cnp.ndarray gain = parameter_of(weight, "weight"), b = parameter_of(bias, "bias")
    cdef cnp.ndarray mean = place_of(running_mean, "running_mean"), var = place_of(running_var, "running_var")
    cdef double smoothing = real_of(eps, "eps"), share = real_of(momentum, "momentum"), number
    if not isinstance(running_variance, str) or running_variance not in ("unbiased", "biased"):
        refuse_running_variance(running_variance)
    cdef bint unbiased = running_variance == "unbiased"
    if share > 1:
        refuse_momentum(share)
    set_batch(&shape, a)
    check_eps(&shape, smoothing)
    check_per_channel(gain, a, shape.channels, "weight", "channel")
    check_per_channel(b, a, shape.channels, "bias", "channel")
    y = result_of(place, a, gain, b)
    if mean is not None or var is not None:
        check_averages(mean, var)
        like = cnp.PyArray_EMPTY(1, <cnp.npy_intp *>&shape.channels, compute_number(shape.dtype), 0)
        mean, var = output(mean, "running_mean", like), output(var, "running_var", like)
        check_average(mean, "running_mean", a, gain, b, y)
        check_average(var, "running_var", a, gain, b, y)
        check_disjoint(mean, "running_mean", var, "running_var", False)
    cdef Stats stats = empty_stats(<cnp.npy_intp *>&shape.channels, 1, 0, shape.dtype)
    moments = cnp.PyArray_EMPTY(2, [2, shape.channels], cnp.NPY_FLOAT64, 0)
    prepare_samples(&shape, &call, smoothing)
    a = read_rows(&shape, &call.x, &call.x_stride, a)
    gain = read_parameter(&shape, &call.gain, gain)
    b = read_parameter(&shape, &call.bias, b)
    written = write_rows(&shape, &call.y, &call.y_stride, y)
    set_stats(&shape, <const void **>&call.stats, stats, shape.channels)
    call.moments = <double *>cnp.PyArray_DATA(moments)
    scratch = reserve_batch(&shape, &call.scratch)
    begin(&shape)
    finish(&shape, cnorm_batch_norm(shape.dtype, &call))
    copy_back(y, written)
    if mean is not None:
        number = <double>(shape.rows * shape.space)
        running_average(mean, moments[0], 1.0, share, default_float_env())
        running_average(var, moments[1], number / (number - 1) if unbiased else 1.0, share,
                        default_float_env())
    if out is None:
        out = y
    return (out, stats) if return_stats else out


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
    cdef Shape shape
    cdef cnorm_volume_norm_backward call
    cdef cnp.ndarray a = array_of(x, "x"), d = array_of(dy, "dy"), gain = parameter_of(weight, "weight")
    cdef tuple places = places_of(out, ("dx", "dweight", "dbias"), gain is not None)
    cdef list results, written
    set_batch(&shape, a)
    check_stats(stats, <cnp.npy_intp *>&shape.channels, 1, 0, a, shape.dtype, "(channels,)")
    results = batch_results(&shape, places, d, a, gain, {"stats": stats.data})
    written = list(results)
    prepare_samples_backward(&shape, &call, 0)
    data = set_stats(&shape, &call.stats, stats, shape.channels)
    run_batch_backward(&shape, &call, cnorm_batch_norm_backward, d, a, gain, written)
    copy_all_back(results, written)
    return returned(out, places, results, gain is not None)


cdef list batch_results(Shape *shape, tuple places, cnp.ndarray d, cnp.ndarray x, cnp.ndarray gain, dict statistics):
    """The arrays for the gradients of x, weight and bias; `statistics`: name to array."""
    check_like(d, "dy", x, "x")
    check_per_channel(gain, x, shape.channels, "weight", "channel")
    like = parameter_like(shape, gain, x)
    return gradients_of(places, (x, like, like), ("dy", "x", "weight", *statistics),
                        (d, x, gain, *statistics.values()))


cdef int run_batch_backward(Shape *shape, cnorm_volume_norm_backward *call, BatchBackward entry, cnp.ndarray d,
                            cnp.ndarray x, cnp.ndarray gain, list written) except -1:
    """The backward pass of a call in which the statistics are set; `written` is a copy of its results."""
    d = read_rows(shape, &call.dy, &call.dy_stride, d)
    x = read_rows(shape, &call.x, &call.x_stride, x)
    gain = read_parameter(shape, &call.gain, gain)
    scratch = reserve_batch(shape, &call.scratch)
    write_gradients(shape, written, &call.dx, &call.dx_stride, &call.dgain, &call.dbias)
    begin(shape)
    return finish(shape, entry(shape.dtype, call))


cdef int check_moments(cnp.ndarray mean, cnp.ndarray var, cnp.ndarray x) except -1:
    """Check mean and var [channels]."""
    if mean is None or var is None:
        refuse_no_moment("mean" if mean is None else "var", x)
    check_per_channel(mean, x, cnp.PyArray_DIMS(x)[1], "mean", "channel")
    check_per_channel(var, x, cnp.PyArray_DIMS(x)[1], "var", "channel")
    check_var(var, "channel")
    return 0


def batch_norm_inference(x, mean, var, weight=None, bias=None, *, eps=1e-5, out=None):
    """Batch normalisation with a given mean and variance: ``(x - mean) / sqrt(var + eps) * weight + bias``.

    Ioffe, Szegedy, "Batch Normalization", arXiv:1502.03167, Algorithm 2, step 11.

    Parameters
    ----------
    x : ndarray, shape (samples, channels, ...), float32, float64, float16 or ml_dtypes.bfloat16
        Any number of samples.
    mean, var : ndarray, shape (channels,), dtype of x, or float32 for float16 and bfloat16
        Such as the running averages of `batch_norm`; var is not negative.
    weight, bias : ndarray, shape (channels,), dtype of x, optional
        Gain and bias of each channel; 1 and 0 if not given. float32 is allowed with float16 and bfloat16.
    eps : float
        Added to the variance, rounded to float32, or float64 for float64 x.
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
    cdef Shape shape
    cdef cnorm_volume_norm call
    cdef cnp.ndarray a = array_of(x, "x"), place = place_of(out, "out"), y, written
    cdef cnp.ndarray m = parameter_of(mean, "mean"), v = parameter_of(var, "var")
    cdef cnp.ndarray gain = parameter_of(weight, "weight"), b = parameter_of(bias, "bias")
    cdef double smoothing = real_of(eps, "eps")
    set_samples(&shape, a, 2)
    check_eps(&shape, smoothing)
    check_per_channel(gain, a, shape.channels, "weight", "channel")
    check_per_channel(b, a, shape.channels, "bias", "channel")
    check_moments(m, v, a)
    y = result_of(place, a, gain, b, m, v)
    prepare_samples(&shape, &call, smoothing)
    a = read_rows(&shape, &call.x, &call.x_stride, a)
    m = read_parameter(&shape, &call.mean, m)
    v = read_parameter(&shape, &call.var, v)
    gain = read_parameter(&shape, &call.gain, gain)
    b = read_parameter(&shape, &call.bias, b)
    written = write_rows(&shape, &call.y, &call.y_stride, y)
    scratch = reserve_batch(&shape, &call.scratch)
    begin(&shape)
    finish(&shape, cnorm_batch_norm_inference(shape.dtype, &call))
    copy_back(y, written)
    return y if out is None else out


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
    cdef Shape shape
    cdef cnorm_volume_norm_backward call
    cdef cnp.ndarray a = array_of(x, "x"), d = array_of(dy, "dy"), gain = parameter_of(weight, "weight")
    cdef cnp.ndarray m = parameter_of(mean, "mean"), v = parameter_of(var, "var")
    cdef double smoothing = real_of(eps, "eps")
    cdef tuple places = places_of(out, ("dx", "dweight", "dbias"), gain is not None)
    cdef list results, written
    set_samples(&shape, a, 2)
    check_eps(&shape, smoothing)
    check_moments(m, v, a)
    results = batch_results(&shape, places, d, a, gain, {"mean": m, "var": v})
    written = list(results)
    prepare_samples_backward(&shape, &call, smoothing)
    m = read_parameter(&shape, &call.mean, m)
    v = read_parameter(&shape, &call.var, v)
    run_batch_backward(&shape, &call, cnorm_batch_norm_inference_backward, d, a, gain, written)
    copy_all_back(results, written)
    return returned(out, places, results, gain is not None)
