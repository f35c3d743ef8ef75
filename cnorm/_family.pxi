"""Group, instance, batch, weight and divisive normalisation, and the gradient for the smoothing term."""

cdef cnorm_dtype whole_dtype(cnp.ndarray a, str name) except *:
    """float32 or float64: the family has no half types."""
    cdef int number = cnp.PyArray_TYPE(a)
    if number not in (cnp.NPY_FLOAT32, cnp.NPY_FLOAT64) or not cnp.PyArray_ISNOTSWAPPED(a):
        raise TypeError(f"{name} must have dtype float32 or float64 in native byte order, got {a.dtype}")
    return CNORM_F32 if number == cnp.NPY_FLOAT32 else CNORM_F64


cdef struct Volume:
    ptrdiff_t samples, channels, space


cdef int volume_of(cnp.ndarray x, int least, Volume *volume) except -1:
    """x [samples, channels, *space]."""
    cdef int i
    if cnp.PyArray_NDIM(x) < least:
        raise ValueError(f"x must have at least {least} dimensions, (samples, channels{', space, ...' * (least - 2)}), "
                         f"got shape {(<object>x).shape}")
    volume.samples, volume.channels, volume.space = cnp.PyArray_DIMS(x)[0], cnp.PyArray_DIMS(x)[1], 1
    for i in range(2, cnp.PyArray_NDIM(x)):
        volume.space *= cnp.PyArray_DIMS(x)[i]
    if volume.channels * volume.space == 0:
        raise ValueError(f"x must have at least one element in each sample, got shape {(<object>x).shape}")
    return 0


cdef cnp.ndarray vector(object p, cnp.ndarray x, ptrdiff_t length, str name, str what):
    """p [length] of x's dtype; None stays None. `what` says what there is one number for."""
    if p is None:
        return None
    cdef cnp.ndarray a = as_array(p, name)
    if cnp.PyArray_TYPE(a) != cnp.PyArray_TYPE(x) or not cnp.PyArray_ISNOTSWAPPED(a):
        raise TypeError(f"{name} must have the dtype of x, {x.dtype}, got {a.dtype}")
    if cnp.PyArray_NDIM(a) != 1 or cnp.PyArray_DIMS(a)[0] != length:
        raise ValueError(f"{name} must have shape ({length},), one number for each {what}, got {(<object>a).shape}")
    return a


cdef void *data_of(cnp.ndarray a) noexcept:
    return NULL if a is None else cnp.PyArray_DATA(a)


cdef cnp.ndarray result_of(object out, cnp.ndarray x, inputs):
    """The array y that a forward call fills: `out`, checked against the inputs (name, array), or a new one."""
    cdef cnp.ndarray y = output(out, "out", x)
    if out is not None:
        for name, array in inputs:
            check_apart(y, "out", array, name, array is x)
    return y


cdef list gradients_of(object out, str names, likes, in_place, inputs):
    """The arrays that a backward call fills: `out`, a tuple, checked against the inputs (name, array) and itself."""
    cdef int i, j
    if out is None:
        out = (None,) * len(likes)
    elif not isinstance(out, tuple):
        raise TypeError(f"out must be a tuple {names} or None, got {type(out).__name__}")
    elif len(out) != len(likes):
        raise ValueError(f"out must be a tuple of {len(likes)}, {names}, got {len(out)}")
    parameter = names.strip("()").split(", ")[1].removeprefix("d")
    if out[1] is not None and dict(inputs)[parameter] is None:
        raise ValueError(f"out[1] must be None where {parameter} is None")
    results = [output(given, f"out[{i}]", like) for i, (given, like) in enumerate(zip(out, likes))]
    for i in range(len(results)):
        if out[i] is None:
            continue
        for name, array in inputs:
            check_apart(results[i], f"out[{i}]", array, name, i == 0 and name in in_place)
        for j in range(len(results)):
            if j != i:
                check_apart(results[i], f"out[{i}]", results[j], f"out[{j}]", False)
    return results


cdef ptrdiff_t whole_number(object value, str name, ptrdiff_t least) except -1:
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None:
        raise TypeError(f"{name} must be an integer, got {value!r}")
    if number < least:
        raise ValueError(f"{name} must be at least {least}, got {number}")
    return min(number, 1 << 60)


# ---- group and instance normalisation ------------------------------------------------------------------------------

cdef ptrdiff_t checked_groups(object groups, Volume *v) except -1:
    cdef ptrdiff_t number = whole_number(groups, "groups", 1)
    if v.channels % number:
        raise ValueError(f"groups must divide the number of channels, {v.channels}, got {groups}")
    return number


cdef object group_forward(cnp.ndarray a, Volume *v, ptrdiff_t groups, object weight, object bias, object eps,
                          object out, bint return_stats):
    cdef cnorm_dtype dtype = whole_dtype(a, "x")
    cdef double e = real_number(eps, "eps", dtype)
    cdef cnp.ndarray gain = vector(weight, a, v.channels, "weight", "channel"), target
    cdef cnp.ndarray shift = vector(bias, a, v.channels, "bias", "channel")
    cdef cnp.ndarray y = result_of(out, a, (("x", a), ("weight", gain), ("bias", shift)))
    cdef Stats stats = empty_stats((v.samples, groups), dtype) if return_stats else None
    cdef Rows source, sink
    gain = contiguous(gain)
    cdef void *pg = data_of(gain)
    shift = contiguous(shift)
    cdef void *pb = data_of(shift)
    cdef void *ps = data_of(stats._data) if return_stats else NULL
    cdef ptrdiff_t m = v.samples, c = v.channels, s = v.space
    cdef cnorm_status status
    a = rows_of(a, 1, &source)
    target = rows_to(y, 1, &sink)
    with nogil:
        status = cnorm_group_norm(dtype, m, c, s, groups, source.data, source.stride, pg, pb, e, sink.data,
                                  sink.stride, ps)
    check(status)
    deliver((y,), (target,))
    return (y, stats) if return_stats else y


cdef object group_backward(object dy, cnp.ndarray a, Volume *v, ptrdiff_t groups, object weight, Stats stats,
                           str units, object out):
    cdef cnorm_dtype dtype = whole_dtype(a, "x")
    cdef cnp.ndarray d = array_like(dy, "dy", a, "x"), gain = vector(weight, a, v.channels, "weight", "channel")
    cdef cnp.ndarray like = np.empty(v.channels, a.dtype), target, dgain, dbias, partials
    cdef Rows gradient, source, sink
    cdef ptrdiff_t m = v.samples, c = v.channels, s = v.space
    cdef cnorm_status status
    check_stats(stats, (v.samples, groups), a, dtype, units)
    results = gradients_of(out, "(dx, dweight, dbias)", (a, like, like), ("dy", "x"),
                           (("dy", d), ("x", a), ("weight", gain), ("stats", stats._data)))
    d = rows_of(d, 1, &gradient)
    a = rows_of(a, 1, &source)
    target = rows_to(results[0], 1, &sink)
    dgain, dbias = computed(results[1], dtype), computed(results[2], dtype)
    partials = np.empty(cnorm_backward_partials(dtype, m, c), np.uint8)
    gain = contiguous(gain)
    cdef void *pg = data_of(gain)
    cdef void *ps = data_of(stats._data)
    cdef void *pdg = data_of(dgain)
    cdef void *pdb = data_of(dbias)
    cdef void *pp = data_of(partials)
    with nogil:
        status = cnorm_group_norm_backward(dtype, m, c, s, groups, gradient.data, gradient.stride, source.data,
                                           source.stride, pg, ps, sink.data, sink.stride, pdg, pdb, pp)
    check(status)
    deliver(results, (target, dgain, dbias))
    return results[0], None if weight is None else results[1], results[2]


def group_norm(x, groups, weight=None, bias=None, *, eps=1e-5, out=None, bint return_stats=False):
    """Group normalisation: the channels of each sample in `groups` groups, each with its own mean and variance.

    Wu, He, "Group Normalization", arXiv:1803.08494. ``y = (x - mean) / sqrt(var + eps) * weight + bias``, mean and
    variance over the channels of the group and their space. One group is layer normalisation with a gain and bias per
    channel; as many groups as channels is instance normalisation.

    Parameters
    ----------
    x : ndarray, shape (samples, channels, ...), float32 or float64
        Two dimensions or more.
    groups : int
        How many; it divides the number of channels. Neighbouring channels make a group.
    weight, bias : ndarray, shape (channels,), dtype of x, optional
        Gain and bias of each channel; 1 and 0 if not given.
    eps : float
        Added to the variance, rounded to the dtype of x.
    out : ndarray, shape and dtype of x, optional
        Where the result goes; ``out=x`` is in place. Any other overlap with an input is an error.
    return_stats : bool
        Also return the `Stats`, of shape (samples, groups), that `group_norm_backward` needs.

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
        For a shape, number of groups, eps or overlap that can't be used. `out` is then unchanged.

    Examples
    --------
    >>> import cnorm, numpy as np
    >>> cnorm.group_norm(np.float32([[0, 2, 10, 30]]), 2, eps=0)
    array([[-1.,  1., -1.,  1.]], dtype=float32)
    """
    cdef cnp.ndarray a = as_array(x, "x")
    cdef Volume v
    whole_dtype(a, "x")
    volume_of(a, 2, &v)
    return group_forward(a, &v, checked_groups(groups, &v), weight, bias, eps, out, return_stats)


def group_norm_backward(dy, x, groups, weight, Stats stats not None, *, out=None):
    """Gradients of `group_norm`.

    With ``xhat = (x - mean) * inv_std_dev`` and ``g = dy * weight``:
    ``dx = inv_std_dev * (g - mean(g) - xhat * mean(g * xhat))``, the means over a group, and summed over samples and
    space ``dweight = sum(dy * xhat)``, ``dbias = sum(dy)`` (the chain rule).

    Parameters
    ----------
    dy : ndarray, shape and dtype of x
        Gradient of the loss for the output.
    x, groups, weight
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
        For a shape, number of groups or overlap that can't be used. The outputs are then unchanged.
    """
    cdef cnp.ndarray a = as_array(x, "x")
    cdef Volume v
    whole_dtype(a, "x")
    volume_of(a, 2, &v)
    return group_backward(dy, a, &v, checked_groups(groups, &v), weight, stats, "(samples, groups)", out)


def instance_norm(x, weight=None, bias=None, *, eps=1e-5, out=None, bint return_stats=False):
    """Instance normalisation: every channel of every sample over its own space.

    Ulyanov, Vedaldi, Lempitsky, "Instance Normalization", arXiv:1607.08022: `group_norm` with as many groups as
    channels.

    Parameters
    ----------
    x : ndarray, shape (samples, channels, space, ...), float32 or float64
        Three dimensions or more.
    weight, bias : ndarray, shape (channels,), dtype of x, optional
        Gain and bias of each channel; 1 and 0 if not given.
    eps, out, return_stats
        As in `group_norm`; the `Stats` have shape (samples, channels).

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
        For a shape, eps or overlap that can't be used. `out` is then unchanged.
    """
    cdef cnp.ndarray a = as_array(x, "x")
    cdef Volume v
    whole_dtype(a, "x")
    volume_of(a, 3, &v)
    return group_forward(a, &v, v.channels, weight, bias, eps, out, return_stats)


def instance_norm_backward(dy, x, weight, Stats stats not None, *, out=None):
    """Gradients of `instance_norm`: those of `group_norm_backward` with as many groups as channels.

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
    cdef cnp.ndarray a = as_array(x, "x")
    cdef Volume v
    whole_dtype(a, "x")
    volume_of(a, 3, &v)
    return group_backward(dy, a, &v, v.channels, weight, stats, "(samples, channels)", out)


# ---- batch normalisation -------------------------------------------------------------------------------------------

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


# ---- weight normalisation ------------------------------------------------------------------------------------------

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


# ---- divisive normalisation ----------------------------------------------------------------------------------------

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
