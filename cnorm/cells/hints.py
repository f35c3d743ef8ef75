"""What to do about tensors that do not fit: sentences for the messages of common checkpoints, "" for others."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import numpy as np

__all__ = ["also", "of_names", "of_shape", "of_type"]

QUANTISED = "it is quantised: give the checkpoint of the float module"


def of_names(names: Iterable[str]) -> str:
    """For the names of a checkpoint in which the tensors of a cell were not found."""
    names = [str(name) for name in names]
    if any(re.search(r"(^|[._])_?packed_|_packed_params|_all_weight_values", name) for name in names):
        return QUANTISED
    if any(name.endswith(("_g", "_v")) or "parametrizations." in name for name in names):
        return (
            "it has weight norms: call remove_weight_norm or remove_parametrizations of torch.nn.utils on the module, "
            "or give cnorm.fold_weight_norm(v, g)[0] under the name without _v"
        )
    if raw := [name for name in names if name.endswith(("_raw", "_orig"))]:
        end = "_raw" if raw[0].endswith("_raw") else "_orig"
        return f"rename {raw[0]} to {raw[0].removesuffix(end)}, multiplied by its mask if it has one"
    if "P" in names:
        return "P holds peepholes, which the cell does not have; where it is all zeros, leave it out"
    return ""


def of_shape(name: str, axes: tuple[str, ...], shape: tuple[int, ...], arrays: Mapping[str, np.ndarray]) -> str:
    """For a tensor of another shape than its axes; `arrays` has the others of its layer."""
    if axes[:1] == ("1",) and len(shape) == len(axes) and shape[0] == 2:
        return f"it is of two directions: give {name}[:1] to one cell and {name}[1:] to the other of a Bidirectional"
    if name == "bias" and axes in (("4H",), ("2", "3H")) and len(shape) == 1 and "recurrent_kernel" in arrays:
        units = len(arrays["recurrent_kernel"])
        if shape == (3 * units,):
            return 'a Keras GRU with reset_after=False is preset "keras_reset_before"'
        if shape == (8 * units,):
            return "that of a CuDNNLSTM is two halves to add: bias[:4H] + bias[4H:]; its kernels need Keras' conversion"
        if shape == (6 * units,):
            return "that of a CuDNNGRU is bias.reshape(2, -1); its kernels need Keras' conversion"
    if name == "bias" and axes == ("O",) and "weight" in arrays and shape == arrays["weight"].shape[1:]:
        return "a kernel [inputs, outputs], as Keras has it, is given as its transpose: Linear(kernel.T, bias)"
    return ""


def of_type(given) -> str:
    """For a value that is not an array of numbers."""
    if isinstance(given, Mapping):
        return "a mapping, not an array: give its arrays, such as Linear(tensors['weight'], tensors['bias'])"
    if "quant" in type(given).__module__ or "packed" in type(given).__name__.lower():
        return QUANTISED
    if hasattr(given, "state_dict"):
        return "a module of another kind: give its tensors"
    return QUANTISED if callable(given) else ""  # the method weight() of a quantised module


def also(message: str, hint: str) -> str:
    """A message, with its hint."""
    return f"{message}; {hint}" if hint else message
