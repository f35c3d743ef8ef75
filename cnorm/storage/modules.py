"""Layers of torch modules: what `cnorm.Model` makes of a torch.nn.Sequential, or of a list with modules in it.

Nothing here imports torch: a module is known by its class, which must be torch's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from cnorm.cells.weights import as_array
from cnorm.folds import fold_batch_norm
from cnorm.layers import Activation, Embedding, LayerNorm, Linear
from cnorm.layers.activation import MODULES
from cnorm.layers.base import Layer, refuse_hooks, with_name
from cnorm.layers.conv import WindowConv
from cnorm.storage.frameworks import from_torch

__all__ = ["layers_of"]

IGNORED = {"Identity", "Dropout", "Dropout1d", "AlphaDropout", "FeatureAlphaDropout"}  # at inference they do nothing
WIDEST_NORM = 256  # elements of a batch norm that has no product before it


def layers_of(given: Any) -> Any:
    """`given`, with layers in the place of modules and of pairs (name, module)."""
    if any(base.__module__.startswith("keras.") for base in type(given).__mro__):
        raise TypeError("layers must be layers or modules of torch.nn: cnorm.from_keras takes a model of Keras")
    if _is_module(given):
        given = [given]
    if isinstance(given, str | bytes) or not isinstance(given, Iterable):
        return given
    given = list(given)
    if len(given) == 1 and _is_sequential(given[0]):
        refuse_hooks(given[0], "layers[0]")
        given = [child if key.isdigit() else (key, child) for key, child in _children(given[0])]
    if not any(_is_module(one) or isinstance(one, tuple) for one in given):
        return given
    layers: list[Any] = []
    for i, one in enumerate(given):
        name, one = _pair(f"layers[{i}]", one)
        _append(layers, f"layers[{i}]", name, one)
    return layers


def _is_module(one: Any) -> bool:
    return hasattr(one, "state_dict") and hasattr(one, "named_children") and not isinstance(one, type)


def _is_sequential(one: Any) -> bool:
    of = type(one)  # a subclass may compute something else
    return _is_module(one) and of.__name__ == "Sequential" and of.__module__ == "torch.nn.modules.container"


def _children(module: Any) -> Iterable[tuple[str, Any]]:
    """Names and modules, each as often as it stands there: named_children() leaves repetitions out."""
    return module._modules.items()


def _says_its_layers(module: Any) -> bool:
    """Whether its class, one of cnorm.torch, has `to_layers`, and no subclass another forward."""
    defined = (vars(of) for of in type(module).__mro__ if {"forward", "to_layers"} & vars(of).keys())
    return "to_layers" in next(defined, ())


def _no_layer(place: str, module: Any) -> str:
    kind = type(module).__name__
    if type(module).__module__.startswith("torch.nn.modules."):
        known = ", ".join([*_MODULES, "BatchNorm1d"])
        return f"{place} must be of a class of torch.nn that has a layer ({known}), got {kind}"
    return (
        f"{place} must be a module of torch.nn that has a layer, got {kind}: what its forward computes is not in its "
        "tensors. Give its parts in a list, cnorm.Model([module.rnn, module.head]), or the layers themselves, "
        "cnorm.Linear(weight, bias); cnorm.Add and cnorm.Multiply read by name"
    )


def _pair(place: str, one: Any) -> tuple[str | None, Any]:
    """The name and the module of an element, which may be a pair."""
    if not isinstance(one, tuple):
        return None, one
    if len(one) != 2 or not isinstance(one[0], str):
        raise TypeError(f"{place} must be a layer, a module or a pair (name, module), got {one!s:.200}")
    return one


def _append(layers: list, place: str, name: str | None, module: Any) -> None:
    """Append a layer, or those of a module; the last one gets the name."""
    if not _is_module(module):
        if name is not None and getattr(module, "name", None) is not None:
            raise ValueError(f"{place} has the name {module.name!r}, got {name!r} beside it")
        layers.append(with_name(module, name) if isinstance(module, Layer) else module)
        return
    refuse_hooks(module, f"{place}, {type(module).__name__},")
    if _is_sequential(module):
        before = list(layers)
        for key, child in _children(module):
            _append(layers, f"{place}.{key}", None, child)
        if layers != before:
            with_name(layers[-1], name)
        return
    if _says_its_layers(module):
        layers += module.to_layers()
        with_name(layers[-1], name)
        return
    of = type(module).__bases__[0] if hasattr(module, "parametrizations") else type(module)
    kind, own = of.__name__, of.__module__.startswith("torch.nn.modules.")
    if own and kind in IGNORED:
        return
    if own and kind in _OF_FRAMES:
        raise ValueError(f"{place}, {kind}: write {_OF_FRAMES[kind]}")
    batch_norm = (own and kind == "BatchNorm1d") or (of.__module__, kind) == ("cnorm.torch.norms", "BatchNorm")
    if not batch_norm and not (own and kind in _MODULES):
        raise ValueError(_no_layer(place, module))
    try:
        if batch_norm:
            _batch_norm(layers, name, module)
            return
        made = _MODULES[kind](module)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{place}, {kind}: {error}") from None
    with_name(made[-1], name)
    layers += made


# ---------------------------------------------------------------------------------------------- kinds


def _recurrent(module: Any) -> list[Layer]:
    preset = "torch_relu" if getattr(module, "nonlinearity", "tanh") == "relu" else "torch"
    return list(from_torch(module, preset, kind=type(module).__name__))


def _cell(module: Any) -> list[Layer]:
    """A cell has the tensors of a stack of one layer, without its number."""
    tensors = {f"{name}_l0": tensor for name, tensor in module.state_dict().items()}
    preset = "torch_relu" if getattr(module, "nonlinearity", "tanh") == "relu" else "torch"
    kind = type(module).__name__.removesuffix("Cell")
    return list(from_torch(tensors, preset, kind=kind, bias=module.bias))


def _batch_norm(layers: list, name: str | None, module: Any) -> None:
    if module.running_mean is None:
        raise ValueError("it must have running statistics, got none: a batch's are no layer")
    arrays = [as_array(module.running_mean), as_array(module.running_var)]
    arrays += [None if one is None else as_array(one) for one in (module.weight, module.bias)]
    append_batch_norm(layers, arrays, module.eps, name)


def append_batch_norm(layers: list, arrays: list, eps: float, name: str | None) -> None:
    """Fold a batch norm (mean, variance, weight and bias) into the product before it, or make it a product."""
    before = layers[-1] if layers else None
    if isinstance(before, Linear | WindowConv) and before.name is None and not before.rows:
        layers.pop()
    elif len(arrays[0]) <= WIDEST_NORM:
        before = Linear(np.eye(len(arrays[0]), dtype=np.float32))
    else:
        raise ValueError("it must stand behind a Linear or convolution without a name, to be folded into it")
    weight, bias = fold_batch_norm(before.weights["weight"], before.weights.get("bias"), *arrays, eps=eps)
    layers.append(with_name(before.with_product(weight, bias), name))


_OF_FRAMES = {  # modules that do not say how many positions a frame has
    "Conv1d": "cnorm.CausalConv1d(module) where it runs over time, cnorm.Conv1d(module, positions=...) where it runs "
    "inside a frame",
    "ConvTranspose1d": "cnorm.ConvTranspose1d(module, positions=...), which runs inside a frame",
    "MaxPool1d": "cnorm.MaxPool1d(module, channels=..., positions=...), which runs inside a frame",
}
_MODULES: Mapping[str, Callable[[Any], list[Layer]]] = MappingProxyType(
    {
        **dict.fromkeys(("LSTM", "GRU", "RNN"), _recurrent),
        **dict.fromkeys(("LSTMCell", "GRUCell", "RNNCell"), _cell),
        "Linear": lambda module: [Linear(module)],
        "Embedding": lambda module: [Embedding(module)],
        "LayerNorm": lambda module: [LayerNorm(module)],
        **dict.fromkeys(MODULES, lambda module: [Activation(module)]),
    }
)
