"""Group and instance normalisation."""

cdef int set_samples(Shape *shape, cnp.ndarray x, int least) except -1:
    """Set dtype, axis and sizes of the shape, for x [samples, channels, *space] of at least `least` dimensions."""
    cdef int i
    shape.dtype = <cnorm_dtype>dtype_of(x, "x")
    shape.number = cnp.PyArray_TYPE(x)
    if cnp.PyArray_NDIM(x) < least:
        refuse_samples(x, least)
    shape.axis, shape.rows, shape.channels, shape.space = 1, cnp.PyArray_DIMS(x)[0], cnp.PyArray_DIMS(x)[1], 1
    for i in range(2, cnp.PyArray_NDIM(x)):
        shape.space *= cnp.PyArray_DIMS(x)[i]
    shape.n, shape.groups = shape.channels * shape.space, 0
    shape.length = shape.channels
    if shape.n == 0:
        refuse_samples(x, least)
    return 0


cdef int set_groups(Shape *shape, ptrdiff_t count, object groups) except -1:
    """Set the number of groups, `count`, which was given as `groups`; 0: as many as channels, for instance norm."""
    shape.groups = count if count else shape.channels
    if shape.channels % shape.groups:
        refuse_groups(groups, shape.channels)
    return 0


cdef void prepare_samples(Shape *shape, cnorm_volume_norm *call, double eps) noexcept:
    memset(call, 0, sizeof(cnorm_volume_norm))
    call.samples, call.channels, call.space, call.groups = shape.rows, shape.channels, shape.space, shape.groups
    call.eps = eps


cdef void prepare_samples_backward(Shape *shape, cnorm_volume_norm_backward *call, double eps) noexcept:
    memset(call, 0, sizeof(cnorm_volume_norm_backward))
    call.samples, call.channels, call.space, call.groups = shape.rows, shape.channels, shape.space, shape.groups
    call.eps = eps


cdef object CHANNELS = object()  # in the place of a number of groups: each channel is one, as in instance norm


cdef inline ptrdiff_t count_of(object groups) except -1:
    return 0 if groups is CHANNELS else integer_of(groups, "groups", 1)


cdef object group_forward(object x, object groups, object weight, object bias, object eps, object out,
                          bint return_stats):
    """Group norm, or instance norm where `groups` is CHANNELS."""
    cdef Shape shape
    cdef cnorm_volume_norm call
    cdef cnp.ndarray a = array_of(x, "x"), place = place_of(out, "out"), y, written
    cdef cnp.ndarray gain = parameter_of(weight, "weight"), b = parameter_of(bias, "bias")
    cdef double smoothing = real_of(eps, "eps")
    cdef ptrdiff_t count = count_of(groups)
    set_samples(&shape, a, 2 if count else 3)
    set_groups(&shape, count, groups)
    check_eps(&shape, smoothing)
    check_per_channel(gain, a, shape.channels, "weight", "channel")
    check_per_channel(b, a, shape.channels, "bias", "channel")
    y = result_of(place, a, gain, b)
    cdef Stats stats = None
    prepare_samples(&shape, &call, smoothing)
    if return_stats:
        stats = empty_stats([shape.rows, shape.groups], 2, 0, shape.dtype)
        set_stats(&shape, <const void **>&call.stats, stats, shape.rows * shape.groups)
    a = read_rows(&shape, &call.x, &call.x_stride, a)
    gain = read_parameter(&shape, &call.gain, gain)
    b = read_parameter(&shape, &call.bias, b)
    written = write_rows(&shape, &call.y, &call.y_stride, y)
    begin(&shape)
    finish(&shape, cnorm_group_norm(shape.dtype, &call))
    copy_back(y, written)
    if out is None:
        out = y
    return (out, stats) if return_stats else out


cdef tuple group_gradients(object dy, object x, object groups, object weight, Stats stats, object out):
    """Gradients of x, weight and bias; of instance norm where `groups` is CHANNELS."""
    cdef Shape shape
    cdef cnorm_volume_norm_backward call
    cdef cnp.ndarray a = array_of(x, "x"), d = array_of(dy, "dy"), gain = parameter_of(weight, "weight")
    cdef tuple places = places_of(out, ("dx", "dweight", "dbias"), gain is not None)
    cdef list results, written
    cdef ptrdiff_t count = count_of(groups)
    set_samples(&shape, a, 2 if count else 3)
    set_groups(&shape, count, groups)
    check_like(d, "dy", a, "x")
    check_per_channel(gain, a, shape.channels, "weight", "channel")
    check_stats(stats, [shape.rows, shape.groups], 2, 0, a, shape.dtype,
                "(samples, groups)" if count else "(samples, channels)")
    like = parameter_like(&shape, gain, a)
    results = gradients_of(places, (a, like, like), ("dy", "x", "weight", "stats"), (d, a, gain, stats.data))
    written = list(results)
    prepare_samples_backward(&shape, &call, 0)
    d = read_rows(&shape, &call.dy, &call.dy_stride, d)
    a = read_rows(&shape, &call.x, &call.x_stride, a)
    gain = read_parameter(&shape, &call.gain, gain)
    data = set_stats(&shape, &call.stats, stats, shape.rows * shape.groups)
    scratch = reserve(&call.scratch, cnorm_backward_partials(shape.dtype, shape.rows, shape.channels))
    write_gradients(&shape, written, &call.dx, &call.dx_stride, &call.dgain, &call.dbias)
    begin(&shape)
    finish(&shape, cnorm_group_norm_backward(shape.dtype, &call))
    copy_all_back(results, written)
    return returned(out, places, results, gain is not None)


def group_norm(x, groups, weight=None, bias=None, *, eps=1e-5, out=None, bint return_stats=False):
    """Group normalisation: each sample's channels are divided into groups, each with its own mean and variance.

    Wu, He, "Group Normalization", arXiv:1803.08494. ``y = (x - mean) / sqrt(var + eps) * weight + bias``, mean and
    variance over the channels of the group and all positions in space. One group is layer normalisation with a gain and
    bias per channel; as many groups as channels is instance normalisation.

    Parameters
    ----------
    x : ndarray, shape (samples, channels, ...), float32, float64, float16 or ml_dtypes.bfloat16
        Two dimensions or more.
    groups : int
        Number of groups; it must divide the number of channels. Adjacent channels form a group.
    weight, bias : ndarray, shape (channels,), dtype of x, optional
        Gain and bias of each channel; 1 and 0 if not given. float32 is allowed with float16 and bfloat16.
    eps : float
        Added to the variance, rounded to float32, or float64 for float64 x.
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
    return group_forward(x, groups, weight, bias, eps, out, return_stats)


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
    dweight : ndarray, shape (channels,), dtype of weight, or None where weight is None
    dbias : ndarray, shape (channels,), dtype of weight, or of x where weight is None

    Raises
    ------
    TypeError
        For an argument of another type or dtype.
    ValueError
        For a shape, number of groups or overlap that can't be used. The outputs are then unchanged.
    """
    return group_gradients(dy, x, groups, weight, stats, out)


def instance_norm(x, weight=None, bias=None, *, eps=1e-5, out=None, bint return_stats=False):
    """Instance normalisation: each channel of each sample, with mean and variance over space.

    Ulyanov, Vedaldi, Lempitsky, "Instance Normalization", arXiv:1607.08022: `group_norm` with as many groups as
    channels.

    Parameters
    ----------
    x : ndarray, shape (samples, channels, space, ...), float32, float64, float16 or ml_dtypes.bfloat16
        Three dimensions or more.
    weight, bias : ndarray, shape (channels,), dtype of x, optional
        Gain and bias of each channel; 1 and 0 if not given. float32 is allowed with float16 and bfloat16.
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
    return group_forward(x, CHANNELS, weight, bias, eps, out, return_stats)


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
    dweight : ndarray, shape (channels,), dtype of weight, or None where weight is None
    dbias : ndarray, shape (channels,), dtype of weight, or of x where weight is None

    Raises
    ------
    TypeError
        For an argument of another type or dtype.
    ValueError
        For a shape or overlap that can't be used. The outputs are then unchanged.
    """
    return group_gradients(dy, x, CHANNELS, weight, stats, out)
