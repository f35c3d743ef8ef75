"""The slow paths of argument checks: an argument that fails a quick test of the extension is converted or refused here.

They are in Python to keep the extension small.
"""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Sequence

import numpy as np

FLOAT32_MAX = float(np.finfo(np.float32).max)


def quoted(value) -> str:
    """repr of a value that may come from an untrusted source: at most 80 characters, none of them a control character.

    repr escapes control characters in strings, but not in the name of a type.
    """
    text = str(value) if isinstance(value, np.dtype) else repr(value)
    text = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text[:81])
    return text if len(text) <= 80 else text[:77] + "..."


# ---- types and dtypes ------------------------------------------------------------------------------------------


def as_array(a, name: str, call: str | None = None) -> np.ndarray:
    """Any array-like as an ndarray; Python's numbers and sequences are refused.

    call: the right way to write the call, for messages; given for arguments in whose place other libraries have
    normalized_shape.
    """
    if type(a) is np.ndarray:
        return a
    if call is not None and isinstance(a, (tuple, list, int)):
        raise TypeError(
            f"{name} must be an array or None, got {a!r:.40}: there is no normalized_shape; the shape of "
            f"{name} says it, or axis=-k for the last k dimensions: {call}"
        )
    if isinstance(a, np.ma.MaskedArray):
        raise TypeError(
            f"{name} must be a plain array, got a MaskedArray, whose mask would be ignored; pass x.filled(value)"
        )
    readable = (
        isinstance(a, (np.ndarray, memoryview, bytearray))
        or hasattr(a, "__array__")
        or hasattr(a, "__array_interface__")
        or type(a).__name__ == "array"
    )
    if not readable and not hasattr(a, "__dlpack__"):
        hint = f", which has no dtype: pass np.float32({name})" if type(a) is list else ""
        raise TypeError(f"{name} must be an array, NumPy's or another library's, got {type(a).__name__}{hint}")
    if getattr(a, "requires_grad", False) is True:  # a tensor of PyTorch: the result would have no gradient
        raise TypeError(
            f"{name} must be an array without recorded gradients, got a {type(a).__name__} that requires grad: "
            "cnorm.torch has functions and modules with gradients; without them, pass .detach()"
        )
    try:
        return np.asarray(a) if readable else np.from_dlpack(a)
    except Exception as error:  # the other library's error, for an array on a GPU
        half = str(getattr(a, "dtype", "")) == "torch.bfloat16"
        hint = f"; pass {name}.view(torch.uint16).numpy().view(ml_dtypes.bfloat16)" if half else ""
        raise TypeError(
            f"{name} must be an array that NumPy can read, got {type(a).__name__}: {quoted(str(error))}{hint}"
        ) from error


def is_bfloat16(a: np.ndarray) -> bool:
    """Whether the elements are ml_dtypes.bfloat16 in native byte order."""
    return a.dtype.isnative and a.dtype.name == "bfloat16" and a.dtype.type.__module__ == "ml_dtypes"


def refuse_dtype(a: np.ndarray, name: str, wanted: str) -> None:
    raise TypeError(f"{name} must have dtype {wanted} in native byte order, got {quoted(a.dtype)}")


def has_dtype(a: np.ndarray, dtype: np.dtype) -> bool:
    """Whether `a` has this dtype, in native byte order."""
    return a.dtype.num == dtype.num and a.dtype.isnative


def compute_dtype(x: np.ndarray) -> np.dtype:
    """The dtype of computation for x: float32 for all types but float64."""
    return np.dtype(np.float64 if x.dtype == np.float64 else np.float32)


def refuse_unlike(a: np.ndarray, name: str, x: np.ndarray, x_name: str) -> None:
    """An array that has another dtype or shape than x."""
    if not has_dtype(a, x.dtype):
        raise TypeError(f"{name} must have the dtype of {x_name}, {x.dtype}, got {quoted(a.dtype)}")
    raise ValueError(f"{name} must have the shape of {x_name}, {x.shape}, got {a.shape}")


def refuse_samples(x: np.ndarray, least: int) -> None:
    """An array that is not [samples, channels, *space] of `least` dimensions or more, with elements in each sample."""
    if x.ndim < least:
        raise ValueError(
            f"x must have at least {least} dimensions, (samples, channels{', space, ...' * (least - 2)}), "
            f"got shape {x.shape}"
        )
    raise ValueError(f"x must have at least one element in each sample, got shape {x.shape}")


def refuse_single_numbers(count: int) -> None:
    """A batch of `count` numbers per channel, 0 or 1."""
    raise ValueError(
        f"x must have more than one number per channel in training, got {count}: the mean would be the number itself, "
        "its deviation 0 and every output the bias, whatever x is; batch_norm_inference takes any number"
    )


def refuse_matrix(weight: np.ndarray) -> None:
    """An array that is not [outputs, inputs, ...] with at least one input."""
    if weight.ndim < 2:
        raise ValueError(f"weight must have at least 2 dimensions, (outputs, inputs, ...), got shape {weight.shape}")
    raise ValueError(f"weight must have at least one input for each output, got shape {weight.shape}")


def refuse_bound(x: np.ndarray, gain: np.ndarray | None) -> None:
    """An input of `LayerNorm` of another size or dtype, or a call before its constructor."""
    if gain is None:
        raise RuntimeError("LayerNorm.__init__ was not called")
    if not (x.dtype.isnative and x.dtype.char in "efd") and not is_bfloat16(x):
        refuse_dtype(x, "x", "float32, float64, float16 or bfloat16")
    if x.dtype == np.float64:
        raise TypeError("x must have dtype float32, float16 or bfloat16, as weight is float32, got float64")
    raise ValueError(f"x must have shape (..., {len(gain)}), got {x.shape}")


# ---- parameters ------------------------------------------------------------------------------------------------


def _check_parameter_dtype(a: np.ndarray, name: str, x: np.ndarray) -> None:
    if not has_dtype(a, x.dtype) and not has_dtype(a, compute_dtype(x)):
        also = "" if compute_dtype(x) == x.dtype else f" or {compute_dtype(x)}"
        raise TypeError(f"{name} must have the dtype of x, {x.dtype}{also}, got {quoted(a.dtype)}")


def refuse_per_element(a: np.ndarray, name: str, x: np.ndarray, axis: int) -> None:
    """A weight or bias that is not of the normalised shape, or of another dtype."""
    _check_parameter_dtype(a, name, x)
    raise ValueError(
        f"{name} must have the normalised shape {x.shape[axis:]} (x has shape {x.shape}, and axis={axis} is the first "
        f"normalised dimension), got {a.shape}"
    )


def refuse_per_channel(a: np.ndarray, name: str, x: np.ndarray, length: int, each: str) -> None:
    """A parameter that is not one number for `each`, or of another dtype."""
    _check_parameter_dtype(a, name, x)
    raise ValueError(f"{name} must have shape ({length},), one number for each {each}, got {a.shape}")


def refuse_no_moment(name: str, x: np.ndarray) -> None:
    raise TypeError(f"{name} must be an array of shape ({x.shape[1]},), got None")


def check_var(var: np.ndarray, each: str) -> None:
    """Refuse negative variances, subnormal ones too; NaN is allowed. `each`: what has one variance, for messages.

    By their bits: whether a subnormal number is less than 0 depends on the caller's floating-point mode.
    """
    bits = var.view(f"u{var.itemsize}")
    negative = (bits > bits.dtype.type(1 << (8 * var.itemsize - 1))) & (var == var)
    if negative.any():
        raise ValueError(f"var must not be negative, got {var[negative][0]} in {each} {negative.argmax()}")


def refuse_empty_rows(x: np.ndarray, axis: int) -> None:
    raise ValueError(
        f"x must have at least one element in each row: axis={axis} leaves rows of shape {x.shape[axis:]} "
        f"(x has shape {x.shape})"
    )


# ---- statistics ------------------------------------------------------------------------------------------------


def stats_data(mean, inv_std_dev) -> np.ndarray:
    """The array of a `Stats` [..., 3] of given statistics: mean, 0 and inv_std_dev."""
    m, r = as_array(mean, "mean"), as_array(inv_std_dev, "inv_std_dev")
    if not has_dtype(m, np.dtype(np.float32)) and not has_dtype(m, np.dtype(np.float64)):
        raise TypeError(f"mean must have dtype float32 or float64, got {quoted(m.dtype)}")
    if not has_dtype(r, m.dtype):
        raise TypeError(f"inv_std_dev must have the dtype of mean, {m.dtype}, got {quoted(r.dtype)}")
    if m.shape != r.shape:
        raise ValueError(f"inv_std_dev must have the shape of mean, {m.shape}, got {r.shape}")
    return np.ascontiguousarray(np.stack([m, np.zeros_like(m), r], axis=-1))  # stack may return Fortran order


def stats_rows(data: np.ndarray, rows) -> np.ndarray:
    """The statistics of rows along the leading dimensions."""
    parts = [number[rows] for number in np.moveaxis(data, -1, 0)]
    if np.ndim(parts[0]) == 0:
        raise IndexError(f"rows must select along the leading dimensions of stats, got {quoted(rows)}")
    return np.stack(parts, axis=-1)


def restored_stats(data) -> np.ndarray:
    """The array of a `Stats`, checked; it may come from a pickle with another byte order."""
    data = np.ndarray.view(data, np.ndarray) if isinstance(data, np.ndarray) else data  # not a subclass
    if not isinstance(data, np.ndarray) or data.dtype.kind != "f" or data.dtype.itemsize not in (4, 8):
        raise TypeError(f"stats must hold an array of dtype float32 or float64, got {quoted(data)}")
    if data.shape[-1:] != (3,):
        raise ValueError(f"stats must hold an array of shape (..., 3), got {data.shape}")
    return np.require(data, data.dtype.newbyteorder("="), ("C_CONTIGUOUS", "ALIGNED"))


def refuse_stats(data: np.ndarray | None, shape: tuple, x: np.ndarray, meaning: str) -> None:
    """Statistics [*shape, 3] of another shape or dtype; `meaning` explains the shape."""
    if data is None:
        raise RuntimeError("Stats.__init__ was not called")
    wanted = compute_dtype(x)
    if not has_dtype(data, wanted):
        raise TypeError(f"stats must be {wanted} for x of dtype {x.dtype}, got {data.dtype}")
    raise ValueError(f"stats must have the shape {shape}, {meaning}, got {data.shape[:-1]}")


# ---- numbers ---------------------------------------------------------------------------------------------------


def _integer(value) -> int | None:
    """A value as an integer; None for a bool and for what is no integer."""
    try:
        return None if isinstance(value, (bool, np.bool_)) else operator.index(value)
    except TypeError:
        return None


def as_axis(axis, ndim: int) -> int:
    """The first normalised dimension, from an integer or from a tuple of the last of `ndim` dimensions."""
    numbers = [_integer(number) for number in (axis if type(axis) is tuple else (axis,))]
    if None in numbers or not numbers:
        raise TypeError(
            "axis must be an integer, the first normalised dimension, or a tuple of the last dimensions, "
            f"got {quoted(axis)}"
        )
    if type(axis) is not tuple:
        if abs(numbers[0]) > 1 << 60:
            raise ValueError(f"axis must be the number of a dimension of x, got {quoted(axis)}")
        return numbers[0]
    if any(not -ndim <= number < ndim for number in numbers) or len({n % ndim for n in numbers}) < len(numbers):
        raise ValueError(f"axis must be dimensions of x, which has {ndim}, each once, got {quoted(axis)}")
    last = tuple(range(-len(numbers), 0))
    if {number % ndim for number in numbers} != {number % ndim for number in last}:
        raise ValueError(
            f"axis must be the last dimensions of x, {last}, got {quoted(axis)} for {ndim} dimensions: "
            f"np.moveaxis(x, {quoted(axis)}, {last}) puts those last"
        )
    return last[0]


def refuse_axis(axis: int, x: np.ndarray) -> None:
    if x.ndim == 0:
        raise ValueError("x must have at least one dimension, got a 0-dimensional array")
    raise ValueError(f"axis must be in [{-x.ndim}, {x.ndim}) for x of shape {x.shape}, got {axis}")


def real_number(value, name: str) -> float:
    """A number, checked not to be negative and to be finite."""
    if type(value) is float and 0 <= value <= FLOAT32_MAX:  # the common case, ten times faster
        return value
    if not isinstance(value, (numbers.Real, np.ndarray)) or isinstance(value, bool):
        raise TypeError(f"{name} must be a real number, got {quoted(value)}")
    if isinstance(value, np.ndarray) and (value.ndim or value.dtype.kind not in "fiu"):
        raise TypeError(f"{name} must be a real number, got {quoted(value)}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not number >= 0 or math.isinf(number):
        raise ValueError(f"{name} must be finite and not negative, got {quoted(value)}")
    return number


def refuse_not_single(number: float, name: str) -> None:
    raise ValueError(f"{name} must be finite in float32, got {number}")


def whole_number(value, name: str, least: int) -> int:
    """An integer, checked to be at least `least`; one of more than 2**60 becomes 2**60."""
    number = _integer(value)
    if number is None:
        raise TypeError(f"{name} must be an integer, got {quoted(value)}")
    if number < least:
        raise ValueError(f"{name} must be at least {least}, got {quoted(number)}")
    return min(number, 1 << 60)


def refuse_groups(groups, channels: int) -> None:
    raise ValueError(f"groups must divide the number of channels, {channels}, got {quoted(groups)}")


def refuse_momentum(momentum) -> None:
    raise ValueError(f"momentum must be in [0, 1], got {quoted(momentum)}")


def refuse_running_variance(name) -> None:
    raise ValueError(f'running_variance must be "unbiased" or "biased", got {quoted(name)}')


def check_averages(mean, var) -> None:
    """Refuse one of running_mean and running_var without the other."""
    if (mean is None) != (var is None):
        given, absent = ("running_var", "running_mean") if mean is None else ("running_mean", "running_var")
        raise ValueError(f"{absent} must be given too where {given} is, got None")


def check_isa(name, available: Sequence[str]) -> None:
    if not isinstance(name, str):
        raise TypeError(f"name must be a str, got {type(name).__name__}")
    if name not in available:
        raise ValueError(
            f"name must be an instruction set that this machine can run, one of {available}, got {quoted(name)}"
        )


# ---- outputs and overlap ---------------------------------------------------------------------------------------


def as_place(out, name: str) -> np.ndarray:
    """A view of the caller's array for a result, as a plain ndarray: a subclass may override its attributes.

    Results written to a converted copy, or under a mask, would be lost, so nothing else is accepted.
    """
    if not issubclass(type(out), np.ndarray) or issubclass(type(out), np.ma.MaskedArray):
        raise TypeError(f"{name} must be a NumPy array or None, got {type(out).__name__}")
    return np.ndarray.view(out, np.ndarray)


def refuse_changed() -> None:
    raise RuntimeError("an array among the arguments was changed while the arguments were checked")


def check_output(out: np.ndarray, name: str, like: np.ndarray) -> None:
    """out must be writable, of the shape and dtype of `like`, and no two of its elements may share memory."""
    if not has_dtype(out, like.dtype):
        raise TypeError(f"{name} must have dtype {like.dtype}, got {quoted(out.dtype)}")
    if out.shape != like.shape:
        raise ValueError(f"{name} must have shape {like.shape}, got {out.shape}")
    if not out.flags.writeable:
        raise ValueError(f"{name} must be writable, got a read-only array")
    if not out.flags.c_contiguous:
        span = out.itemsize  # bytes that the dimensions so far extend over, smallest stride first
        for stride, length in sorted((abs(s), n) for s, n in zip(out.strides, out.shape, strict=True) if n > 1):
            if stride < span:
                raise ValueError(
                    f"{name} must have a place for each element, got a view with strides {out.strides} for shape "
                    f"{out.shape}"
                )
            span += stride * (length - 1)


def refuse_overlap(name: str, other: str, in_place: bool) -> None:
    hint = " (exactly the same array is in place and allowed)" if in_place else ""
    raise ValueError(f"{name} must not overlap {other}{hint}")


def check_results(out, names: Sequence[str], has_parameter: bool) -> tuple:
    """out as a plain tuple, checked to have a place for each of `names`, dx, the gradient of a parameter, ...

    There is no gradient of a parameter that is None (`has_parameter`).
    """
    if not issubclass(type(out), tuple):
        raise TypeError(f"out must be a tuple ({', '.join(names)}) or None, got {type(out).__name__}")
    out = tuple.__getitem__(out, slice(None))
    if len(out) != len(names):
        raise ValueError(f"out must be a tuple of {len(names)}, ({', '.join(names)}), got {len(out)}")
    if out[1] is not None and not has_parameter:
        raise ValueError(f"out[1] must be None where {names[1][1:]} is None")
    return out


# ---- frames of streams -----------------------------------------------------------------------------------------


def refuse_frames(x: np.ndarray, name: str, ndim: int, width: int) -> None:
    """Frames that are not float32 [width], or [steps, width]."""
    if not has_dtype(x, np.dtype(np.float32)):
        raise TypeError(f"{name} must have dtype float32, got {quoted(x.dtype)}")
    wanted = f"({width},)" if ndim == 1 else f"(steps, {width})"
    raise ValueError(f"{name} must have shape {wanted}, got {x.shape}")


def refuse_tape_array(a, name: str, shape: tuple) -> None:
    """An array for a tape that is not float32, contiguous, aligned and of this shape, or not writable."""
    a = as_place(a, name)
    if not has_dtype(a, np.dtype(np.float32)):
        raise TypeError(f"{name} must have dtype float32, got {quoted(a.dtype)}")
    if (1,) * (len(shape) - a.ndim) + a.shape != shape:
        raise ValueError(f"{name} must have shape {shape}, got {a.shape}")
    raise ValueError(f"{name} must be an ndarray, C-contiguous, aligned and, for results, writable")


def refuse_output_frames(out, shape: tuple) -> None:
    """An array of outputs that is not float32, contiguous, aligned and writable, of this shape."""
    if not has_dtype(out, np.dtype(np.float32)):
        raise TypeError(f"out must have dtype float32, got {quoted(out.dtype)}")
    if out.shape != shape:
        raise ValueError(f"out must have shape {shape}, got {out.shape}")
    raise ValueError(
        f"out must be C-contiguous, aligned and writable, got shape {out.shape} with strides {out.strides}, "
        f"aligned {out.flags.aligned}, writable {out.flags.writeable}"
    )


def refuse_infinite(x: np.ndarray, name: str) -> None:
    """The message names the first element that is NaN or infinite."""
    index = tuple(map(int, np.argwhere(~np.isfinite(x))[0]))
    raise ValueError(f"{name} must be finite, got {float(x[index])} in {name}[{', '.join(map(str, index))}]")


def refuse_token(x: np.ndarray, name: str, row: int, element: int, tokens: int) -> None:
    """Frames [..., inputs] of which the `row`-th in order has a number that is no token id."""
    index = (*map(int, np.unravel_index(row, x.shape[:-1])), element) if x.ndim > 1 else (element,)
    place = f"{name}[{', '.join(map(str, index))}]"
    raise ValueError(f"{place} must be a token id, an integer from 0 to {tokens - 1}, got {float(x[index])!r}")


def refuse_streams(streams, kind: type) -> None:
    """Anything but a sequence of different streams."""
    if not hasattr(streams, "__iter__"):
        raise TypeError(f"streams must be a sequence of Stream, got {type(streams).__name__}")
    places = {}
    for i, stream in enumerate(streams):
        if not issubclass(type(stream), kind):
            raise TypeError(f"streams[{i}] must be a Stream, got {type(stream).__name__}")
        if places.setdefault(id(stream), i) != i:
            raise ValueError(
                f"streams must not have the same stream twice, got streams[{places[id(stream)]}] again as streams[{i}]"
            )


def refuse_foreign_stream(index: int) -> None:
    raise ValueError(f"streams[{index}] is a stream of another model")


def refuse_rows(x: np.ndarray, streams: int) -> None:
    raise ValueError(f"x must have a row for each of the {streams} streams, got shape {x.shape}")


def refuse_mask(mask: np.ndarray, streams: int) -> None:
    """A mask that is not one bool for each stream."""
    if mask.dtype != np.bool_:
        raise TypeError(f"reset must have dtype bool, got {quoted(mask.dtype)}")
    raise ValueError(f"reset must have shape ({streams},), got {mask.shape}")
