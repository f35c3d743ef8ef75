"""Group and instance normalisation."""

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
