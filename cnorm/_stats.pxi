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
    cdef readonly cnp.ndarray _data  # [*x.shape[:axis], 1, ..., 3]: shift, delta, rstd

    def __init__(self, mean, inv_std_dev):
        cdef cnp.ndarray m = as_array(mean, "mean"), r = as_array(inv_std_dev, "inv_std_dev")
        if dtype_of(m, "mean") not in (CNORM_F32, CNORM_F64):
            raise TypeError(f"mean must have dtype float32 or float64, got {m.dtype}")
        if dtype_of(r, "inv_std_dev") != dtype_of(m, "mean"):
            raise TypeError(f"inv_std_dev must have the dtype of mean, {m.dtype}, got {r.dtype}")
        if not cnp.PyArray_SAMESHAPE(m, r):
            raise ValueError(f"inv_std_dev must have the shape of mean, {(<object>m).shape}, got {(<object>r).shape}")
        self._data = np.ascontiguousarray(np.stack([m, np.zeros_like(m), r], axis=-1))  # stack may return Fortran order

    @property
    def mean(self):
        """The means, an ndarray of the shape described at the class."""
        with default_float_env():
            return self._data[..., 0] + self._data[..., 1]

    @property
    def inv_std_dev(self):
        """1/sqrt(var + eps), or 0 where var + eps = 0; an ndarray of the shape described at the class."""
        return self._data[..., 2].copy()

    def __getitem__(self, rows):
        parts = [number[rows] for number in np.moveaxis(self._data, -1, 0)]
        if np.ndim(parts[0]) == 0:
            raise IndexError(f"rows must select along the leading dimensions of stats, got {quoted(rows)}")
        return _stats_from(np.stack(parts, axis=-1))

    def __repr__(self):
        return f"Stats(mean={self.mean!r}, inv_std_dev={self.inv_std_dev!r})"

    def __reduce__(self):
        return _stats_from, (self._data,)


def _stats_from(data):
    """Stats from an array [..., 3] as `Stats` stores it; it may come from a pickle with another byte order."""
    cdef Stats stats = Stats.__new__(Stats)
    if not isinstance(data, np.ndarray) or data.dtype.kind != "f" or data.dtype.itemsize not in (4, 8):
        raise TypeError(f"stats must hold an array of dtype float32 or float64, got {quoted(data)}")
    if data.shape[-1:] != (3,):
        raise ValueError(f"stats must hold an array of shape (..., 3), got {data.shape}")
    stats._data = np.ascontiguousarray(data, data.dtype.newbyteorder("="))
    return stats


cdef tuple one_per_row(cnp.ndarray x, int axis):
    """x.shape with 1 for each normalised dimension."""
    return (<object>x).shape[:axis] + (1,) * (cnp.PyArray_NDIM(x) - axis)


cdef Stats empty_stats(tuple shape, cnorm_dtype dtype):
    cdef Stats stats = Stats.__new__(Stats)
    stats._data = np.empty(shape + (3,), np.float64 if dtype == CNORM_F64 else np.float32)
    return stats


cdef int check_stats(Stats stats, tuple shape, cnp.ndarray x, cnorm_dtype dtype, str meaning) except -1:
    """Check that stats have this shape, and the compute type of `dtype`; `meaning` explains the shape in messages."""
    if stats._data is None:
        raise RuntimeError("Stats.__init__ was not called")
    if cnp.PyArray_TYPE(stats._data) != compute_number(dtype):
        wanted = "float64" if dtype == CNORM_F64 else "float32"
        raise TypeError(f"stats must be {wanted} for x of dtype {x.dtype}, got {stats._data.dtype}")
    given = (<object>stats._data).shape
    if given != shape + (3,):
        raise ValueError(f"stats must have the shape {shape}, {meaning}, got {given[:-1]}")
    return 0
