"""Check the names, shapes and dtypes of a checkpoint's tensors, and convert a cell's to the layout of the kernels."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

from cnorm.cells.hints import also, of_names, of_shape, of_type
from cnorm.cells.specs import GATES, CellSpec
from cnorm.cells.tensors import Tensor, has_projection, present, terms
from cnorm.text import listed


def checked(weights, tensors, layer: str) -> tuple[Mapping[str, np.ndarray], dict[str, int]]:
    """Read-only float32 copies of the arrays, and the sizes (H, I, P, ...) that follow from their shapes.

    Parameters
    ----------
    weights : mapping of str to array
    tensors : sequence of Tensor
    layer : str
        Name of the layer in messages.
    """
    if not isinstance(weights, Mapping):
        hint = ": pass module.state_dict()" if hasattr(weights, "state_dict") else ""
        raise TypeError(f"weights of {layer} must be a mapping of names to arrays, got {type(weights).__name__}{hint}")
    missing = [tensor.name for tensor in tensors if tensor.name not in weights and not tensor.optional]
    known = {tensor.name for tensor in tensors}
    extra = [str(name) for name in weights if name not in known]
    if missing or extra:
        wanted = ", ".join(map(_with_shape, tensors))
        message = f"weights of {layer} must be {wanted}; missing: {listed(missing, 20)}; unknown: {listed(extra)}"
        raise ValueError(also(message, of_names(extra)))
    given = present(tensors, weights)
    arrays = {tensor.name: float32_copy(weights[tensor.name], tensor.name, layer) for tensor in given}
    if not has_projection(given):
        given = [tensor.without_projection() for tensor in given]
    sizes = _sizes(arrays, {tensor.name: tensor.axes for tensor in given}, layer)
    if "H" in sizes:
        sizes.setdefault("P", sizes["H"])
    return MappingProxyType(arrays), sizes


def as_array(tensor) -> np.ndarray:
    """A PyTorch tensor as a NumPy array, bfloat16 widened to float32 because NumPy lacks it; other types unchanged."""
    if not hasattr(tensor, "detach"):
        return np.asanyarray(tensor)  # keeps a MaskedArray, which is refused later with the layer's name
    tensor = tensor.detach().cpu()
    return (tensor.float() if str(tensor.dtype) == "torch.bfloat16" else tensor).numpy()


def of_layer_norm(norm) -> tuple:
    """weight, bias and eps of a torch.nn.LayerNorm."""
    if not hasattr(norm, "bias"):
        raise TypeError(f"the module must be a torch.nn.LayerNorm, got {type(norm).__name__}")
    if len(norm.normalized_shape) != 1:
        raise ValueError(f"the module must normalise one dimension, got normalized_shape {norm.normalized_shape}")
    ones = np.ones(tuple(norm.normalized_shape), np.float32)
    return ones if norm.weight is None else norm.weight, norm.bias, norm.eps


def _with_shape(tensor: Tensor) -> str:
    return f"{tensor.name} [{', '.join(tensor.axes)}]{' (optional)' if tensor.optional else ''}"


def float32_copy(given, name: str, layer: str) -> np.ndarray:
    """A read-only copy of a tensor, checked to be a finite array of float32 or of a type that is widened to it."""
    if isinstance(given, np.ma.MaskedArray):
        raise TypeError(
            f"weights[{name!r}] of {layer} must be a plain array, got a MaskedArray, whose mask would be ignored; "
            f"pass weights[{name!r}].filled(value)"
        )
    try:
        array = np.asarray(as_array(given))
    except Exception as error:  # the other library's error, for a tensor without data
        raise TypeError(
            f"weights[{name!r}] of {layer} must be an array that NumPy can read, got {type(given).__name__}: {error}"
        ) from error
    if array.dtype == np.float64:
        raise TypeError(
            f"weights[{name!r}] of {layer} is float64 and the runtime computes in float32: cast it yourself, "
            f"weights[{name!r}].astype('float32')"
        )
    if array.dtype not in (np.float32, np.float16) and array.dtype.name != "bfloat16":
        got = type(given).__name__ if array.dtype == object else array.dtype
        message = f"weights[{name!r}] of {layer} must be float32, float16 or bfloat16, got {got}"
        raise TypeError(also(message, of_type(given)))
    copy = np.array(array, dtype=np.float32, order="C", copy=True)
    if not np.isfinite(copy).all():
        raise ValueError(f"weights[{name!r}] of {layer} must be finite, got NaN or infinity")
    # the memory is that of a bytes object, so that the array can't be made writable again
    return np.ndarray(copy.shape, np.float32, copy.tobytes())


def _sizes(arrays, axes, layer: str) -> dict[str, int]:
    """The value of each letter, from one equation for each axis."""
    equations = []
    for name, array in arrays.items():
        if array.ndim != len(axes[name]):
            message = f"weights[{name!r}] of {layer} must have shape [{', '.join(axes[name])}], got {array.shape}"
            raise ValueError(also(message, of_shape(name, axes[name], array.shape, arrays)))
        equations += [(name, terms(axis), length) for axis, length in zip(axes[name], array.shape, strict=True)]
    sizes = {"": 1}
    for _ in equations:  # each round solves at least one letter, or no more can be solved
        for _, summands, length in equations:
            unknown = [(factor, letter) for factor, letter in summands if letter not in sizes]
            if len(unknown) == 1:
                factor, letter = unknown[0]
                rest = length - sum(f * sizes[known] for f, known in summands if known in sizes)
                if rest >= factor:
                    sizes[letter] = rest // factor
    for name, summands, length in equations:
        solved = all(letter in sizes for _, letter in summands)
        if not solved or length != sum(factor * sizes[letter] for factor, letter in summands):
            known = ", ".join(f"{letter} = {size}" for letter, size in sizes.items() if letter) or "sizes of at least 1"
            wanted = f"[{', '.join(axes[name])}] with {known}"
            message = f"weights[{name!r}] of {layer} must have shape {wanted}, got {arrays[name].shape}"
            raise ValueError(also(message, of_shape(name, axes[name], arrays[name].shape, arrays)))
    return sizes


def packed(spec: CellSpec, tensors, weights: Mapping[str, np.ndarray], sizes: dict[str, int]) -> dict:
    """A cell's weights in the layout of the kernels: their order of gates, biases of the same sum merged into one.

    Everything is computed in float64 and rounded to float32 once.

    Returns
    -------
    dict
        group (gates that one layer norm covers, 0 for none); weight_x [gates * H, I], weight_h [gates * H, P],
        weight_n [H, H] or None, weight_p [P, H] or None; inside_x, inside_h, gain_x, gain_h, bias [gates * H],
        bias_n, gain_c, bias_c [H], bias_p, h0 [P], c0 [H], each None if there is none.
    """
    parts = parts_of(tensors, _wide(tensors, weights), sizes)
    order, units = GATES[spec.kind], sizes["H"]
    group = {"joint": len(order), "per_gate": 1, "gates_and_candidate": 2}[spec.grouping] if spec.scope != "none" else 0

    def gates(part, otherwise=0.0):
        """A part as [gates, H, ...], missing gates filled with `otherwise`; None if the part has no gates at all."""
        found = {gate: parts[part, gate] for gate in order if (part, gate) in parts}
        blank = np.full(units, otherwise)
        return np.stack([found.get(gate, blank) for gate in order]) if found else None

    def gain(part):
        given = gates(part, 1.0)
        return np.ones((len(order), units)) if given is None else given

    inside_x, inside_h = gates("inside_x"), gates("inside_h")
    if spec.scope == "sum" and inside_h is not None:
        inside_x, inside_h = inside_h + (0 if inside_x is None else inside_x), None
    weight_h, weight_n = gates("weight_h"), None
    if spec.kind == "GRU" and spec.reset == "before":
        weight_h, weight_n = weight_h[:2], weight_h[2]
    bias, bias_n = _outside_bias(spec, parts, gates)
    result = {
        "weight_x": gates("weight_x"), "weight_h": weight_h, "weight_n": weight_n,
        "weight_p": parts.get(("weight_p", "")),
        "inside_x": _centred(inside_x, group), "inside_h": _centred(inside_h, group),
        "gain_x": gain("gain_x"), "gain_h": gain("gain" if spec.scope == "sum" else "gain_h"),
        "bias": bias, "bias_n": bias_n,
    }  # fmt: skip
    result |= {name: parts.get((name, "")) for name in ("gain_c", "bias_c", "bias_p", "h0", "c0")}
    for name, array in result.items():
        if array is not None:
            if array.dtype == np.float64 and np.abs(array).max() > np.finfo(np.float32).max:  # a constant or a sum
                raise ValueError(f"weights of {spec.kind} {spec.name} leave the range of float32 where they add up")
            array = array.reshape(-1, array.shape[-1]) if name.startswith("weight_") else array.reshape(-1)
            result[name] = np.ascontiguousarray(array, np.float32)
    return result | {"group": group}


def _wide(tensors, weights) -> dict[str, np.ndarray]:
    """The arrays in float64, because they may be added up; matrices are only reordered and stay as they are."""
    matrices = {t.name for t in tensors if all(use.part.startswith("weight_") for use in t.uses())}
    return {name: array if name in matrices else np.float64(array) for name, array in weights.items()}


SUMMED_BIASES = "bias", "bias_x", "bias_h"  # after the norms, in this order


def _outside_bias(spec: CellSpec, parts, gates) -> tuple[np.ndarray, np.ndarray | None]:
    """bias [gates, H], the sum of biases after the norms; bias_n [H], the bias that a GRU's reset gate multiplies."""
    order = GATES[spec.kind]
    bias = np.zeros((len(order), len(parts["weight_x", order[0]])))
    for part in SUMMED_BIASES:
        given = gates(part)
        bias += 0 if given is None else given
    bias_n = parts.get(("bias_h", "n")) if spec.reset == "after" else None
    if bias_n is not None:
        bias[order.index("n")] = sum(parts.get((part, "n"), 0) for part in ("bias", "bias_x"))
    gate, constant = {"LSTM": ("f", spec.forget_bias), "GRU": ("z", spec.update_bias), "RNN": ("a", 0.0)}[spec.kind]
    bias[order.index(gate)] += constant
    return bias, bias_n


def _centred(bias: np.ndarray | None, group: int) -> np.ndarray | None:
    """A bias [gates, H] that is added before a norm, less its mean over each group of gates."""
    if bias is None:
        return None
    firsts = range(group, len(bias), group)
    return np.concatenate([span - span.mean() for span in np.split(bias, firsts)])


def parts_of(tensors, weights, sizes) -> dict[tuple[str, str], np.ndarray]:
    """Views of the arrays by (part, gate), matrices with the outputs first; gate is "" for parts without gates."""
    parts = {}
    for tensor in present(tensors, weights):
        array = weights[tensor.name]
        array = array[0] if tensor.leading else array
        if tensor.split_axis is None:
            slices = [array]
        else:
            slices = np.split(array, np.cumsum(tensor.lengths(sizes))[:-1], tensor.split_axis)
        for piece, its in zip(tensor.pieces, slices, strict=True):
            for use in piece.uses:
                matrix = its[0] if tensor.stacked else its
                outputs_first = matrix.T if use.transposed else matrix
                rows = np.split(outputs_first, len(use.gates)) if use.gates else [outputs_first]
                parts |= {(use.part, gate): row for gate, row in zip(use.gates or [""], rows, strict=True)}
    return parts


def gradient_views(spec: CellSpec, tensors, into: Mapping[str, np.ndarray], sizes: dict[str, int]) -> list:
    """Where to add the gradients of the arrays of `packed`: views of arrays shaped as the checkpoint's tensors.

    Parameters
    ----------
    into : mapping of str to ndarray
        An array for each tensor, of its shape.

    Returns
    -------
    list of (view, name, gate)
        Each says: add to `view`, a view of an array of `into`, the gradient of the array `name` of `packed`,
        [gates, H, ...], at index `gate`, or all of it if `gate` is None. A tensor that is used twice has two views.
        Biases of one sum are in the order in which `packed` adds them.
    """
    order = GATES[spec.kind]
    views = []
    parts = parts_of(tensors, into, sizes)
    for part, gate in sorted(parts, key=lambda key: SUMMED_BIASES.index(key[0]) if key[0] in SUMMED_BIASES else 0):
        view = parts[part, gate]
        name, index = part, order.index(gate) if gate else None
        if part == "weight_h" and spec.kind == "GRU" and spec.reset == "before" and gate == "n":
            name, index = "weight_n", 0
        elif part == "weight_p":
            index = 0
        elif part == "bias_h" and spec.reset == "after" and gate == "n":
            name, index = "bias_n", None
        elif part in ("bias_x", "bias_h"):
            name = "bias"
        elif part == "inside_h" and spec.scope == "sum":
            name = "inside_x"
        elif part == "gain":
            name = "gain_h"
        views.append((view, name, index))
    return views
