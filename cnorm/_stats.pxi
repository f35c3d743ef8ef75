"""The statistics of a forward pass, an input of the backward pass."""

cdef class Stats:
    """Statistics of a forward pass that its backward pass needs: each row's mean and 1/sqrt(var + eps).

    A norm returns them with ``return_stats=True``; it keeps the mean as an unevaluated sum of two numbers, which is
    more accurate than one. ``stats[i:j]`` selects rows along the leading dimensions.

    Parameters
    ----------
    mean, inv_std_dev : ndarray, float32, or float64 where x is float64
        Statistics from another library, such as the two extra outputs of ONNX LayerNormalization. Their shape is
        x.shape[:axis] + (1, ...) for layer and RMS norm, (samples, groups) for group norm, (samples, channels) for
        instance norm and (channels,) for batch norm.

    Raises
    ------
    TypeError
        For another dtype, or two different ones.
    ValueError
        If the shapes differ.
    """
    cdef readonly cnp.ndarray data  # [*x.shape[:axis], 1, ..., 3]: K, delta, rstd; the mean is K + delta

    def __init__(self, mean, inv_std_dev):
        self.data = stats_data(mean, inv_std_dev)

    @property
    def mean(self):
        """The means, an ndarray of the shape described at the class."""
        return stats_mean(self.data, default_float_env())

    @property
    def inv_std_dev(self):
        """1/sqrt(var + eps), or 0 where var + eps = 0; an ndarray of the shape described at the class."""
        return self.data[..., 2].copy()

    def __getitem__(self, rows):
        return Stats.from_data(stats_rows(self.data, rows))

    def __repr__(self):
        return f"Stats(mean={self.mean!r}, inv_std_dev={self.inv_std_dev!r})"

    def __reduce__(self):
        return Stats.from_data, (self.data,)

    @staticmethod
    def from_data(data):
        """Stats from `data` of another one; it may come from a pickle with another byte order."""
        cdef Stats stats = Stats.__new__(Stats)
        stats.data = restored_stats(data)
        return stats


# Statistics have the shape `shape` [ndim], followed by `ones` times 1.

cdef Stats empty_stats(const cnp.npy_intp *shape, int ndim, int ones, cnorm_dtype dtype):
    cdef cnp.npy_intp whole[cnp.NPY_MAXDIMS + 1]
    if ndim + ones >= cnp.NPY_MAXDIMS:
        raise ValueError(f"x must have at most {cnp.NPY_MAXDIMS - 1} dimensions for return_stats, got {ndim + ones}: "
                         "the statistics have one more")
    fill_shape(whole, shape, ndim, ones)  # before the next line, which may start a collection of garbage
    cdef Stats stats = Stats.__new__(Stats)
    stats.data = cnp.PyArray_EMPTY(ndim + ones + 1, whole, compute_number(dtype), 0)
    return stats


cdef void fill_shape(cnp.npy_intp *whole, const cnp.npy_intp *shape, int ndim, int ones) noexcept:
    """The shape of the array of `Stats`: three numbers at the end."""
    cdef int i
    for i in range(ndim + ones):
        whole[i] = shape[i] if i < ndim else 1
    whole[ndim + ones] = 3


cdef int check_stats(Stats stats, const cnp.npy_intp *shape, int ndim, int ones, cnp.ndarray x, cnorm_dtype dtype,
                     str meaning) except -1:
    """Check that stats have this shape, and the compute type of `dtype`; `meaning` explains the shape in messages."""
    cdef cnp.npy_intp whole[cnp.NPY_MAXDIMS + 1]
    cdef int i
    fill_shape(whole, shape, ndim, ones)
    if (stats.data is None or cnp.PyArray_TYPE(stats.data) != compute_number(dtype)
            or cnp.PyArray_NDIM(stats.data) != ndim + ones + 1
            or not cnp.PyArray_CompareLists(cnp.PyArray_DIMS(stats.data), whole, ndim + ones + 1)):
        refuse_stats(stats.data, tuple([whole[i] for i in range(ndim + ones)]), x, meaning)
    return 0


cdef int check_row_stats(Stats stats, Shape *shape, cnp.ndarray x) except -1:
    return check_stats(stats, cnp.PyArray_DIMS(x), shape.axis, cnp.PyArray_NDIM(x) - shape.axis, x, shape.dtype,
                       "x.shape[:axis] + (1, ...)")
