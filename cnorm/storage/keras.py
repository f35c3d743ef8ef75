"""Layers of a Keras 3 model.

Nothing here imports Keras: a layer is known by its class, which must be Keras' own, its configuration and the paths of
its variables.
"""

from __future__ import annotations

import dataclasses
import sys
import warnings
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from cnorm.cells.presets import PRESETS
from cnorm.cells.weights import as_array
from cnorm.layers import CELLS, Activation, Bidirectional, CausalConv1d, Embedding, LayerNorm, Linear
from cnorm.layers.base import Layer, refuse_hooks
from cnorm.model import Model
from cnorm.storage.modules import append_batch_norm

__all__ = ["from_keras"]

IGNORED = {"InputLayer", "Identity", "Dropout", "SpatialDropout1D", "AlphaDropout", "GaussianDropout", "GaussianNoise"}
IGNORED |= {"ActivityRegularization"}  # at inference they do nothing
# Keras' activations as functions of `Activation` and of cells
FUNCTIONS: Mapping[str, str | tuple] = MappingProxyType(
    {name: name for name in ("tanh", "relu", "sigmoid", "elu", "selu", "silu", "gelu", "softplus", "hard_sigmoid")}
    | {
        "linear": ("leaky_relu", 1.0),
        "leaky_relu": ("leaky_relu", 0.2),
        "relu6": ("clip", 0.0, 6.0),
        "swish": "silu",
        "hard_silu": "hard_swish",
        "hard_swish": "hard_swish",
        "exponential": "exp",
    }
)
BY_HAND = {
    "Add": "write cnorm.Add(name) behind a layer with this name",
    "Multiply": "write cnorm.Multiply(name) behind a layer with this name",
    "Concatenate": "write cnorm.Concat([name, ...]) of layers with these names",
    "RNN": "write cnorm.LSTM(weights, preset='keras') with the tensors of its cell",
    "RMSNormalization": "there is no such layer, cnorm.rms_norm normalises arrays",
}


def from_keras(model: Any) -> Model:
    """A model with the layers of a Keras 3 model.

    Parameters
    ----------
    model : keras.Sequential, or keras.Model of the functional API whose layers are a chain
        Of LSTM, GRU (with reset_after or without), SimpleRNN, Bidirectional, Dense, Conv1D with causal padding,
        Embedding, LayerNormalization, BatchNormalization, TimeDistributed and activations; Dropout does nothing.

    Returns
    -------
    Model
        It takes the frames of one sequence, and its outputs are those of ``model(x[None])[0]``. Where a recurrent layer
        has return_sequences=False, Keras' output is that of the last frame.

    Raises
    ------
    TypeError
        If `model` is no model of Keras 3, or a subclass, whose `call` is not in its weights.
    ValueError
        For a layer or an option that cnorm does not compute. The message names it and says what to write by hand.
    """
    layers: list[Layer] = []
    for layer in _chain(model):
        _append(layers, layer)
    if not layers:
        raise ValueError("model must have a layer that computes something, got none")
    return Model(layers)


def _chain(model: Any) -> list[Any]:
    """The layers of a model in the order of the computation; ValueError unless each reads the one before it."""
    kind, module = type(model).__name__, type(model).__module__
    if not module.startswith("keras.src.models.") or kind not in ("Sequential", "Functional"):
        raise TypeError(
            f"model must be a Sequential or functional model of Keras 3, got {module}.{kind}: what the call of a "
            "subclass computes is not in its weights. Give cnorm.Model a list of layers, such as "
            "cnorm.Linear(kernel.T, bias) and cnorm.LSTM(tensors, preset='keras')"
        )
    try:
        _check_own(model)
    except ValueError as error:
        raise ValueError(f"model {model.name!r}: {error}") from None
    if not model.built:
        raise ValueError(f"model {model.name!r} must be built: it has no weights before keras.Input or a first call")
    if kind == "Sequential":
        return list(model.layers)
    chain, reads = [], _only(model.outputs, "the outputs of the model", ", with outputs=(name, ...)")
    frame = _only(model.inputs, "the inputs of the model")
    while reads is not frame:
        layer, call, output = reads._keras_history
        place = f"layer {layer.name!r}, {type(layer).__name__},"
        arguments = layer._inbound_nodes[call].arguments
        if output:
            raise ValueError(f"{place} must be read by its first output, got a reader of its output {output}: {_LIST}")
        if len(arguments.keras_tensors) != 1:
            advice = BY_HAND.get(type(layer).__name__, _LIST)
            raise ValueError(f"{place} reads {len(arguments.keras_tensors)} layers: {advice}")
        given = {name: value for name, value in arguments.kwargs.items() if value is not None and value is not False}
        if given:
            raise ValueError(
                f"{place} must be called with its input alone, got {', '.join(map(str, given))} too: {_LIST}"
            )
        chain.append(layer)
        (reads,) = arguments.keras_tensors
    return chain[::-1]


_LIST = "write the layers by hand, in a list for cnorm.Model"


def _only(of: list, what: str, more: str = "") -> Any:
    if len(of) != 1:
        raise ValueError(f"{what} must be one, got {len(of)}: {_LIST}{more}")
    return of[0]


def _append(layers: list[Layer], layer: Any) -> None:
    """Append the layers of one of Keras'."""
    kind, module = type(layer).__name__, type(layer).__module__
    if module.startswith("keras.src.models."):
        for inner in _chain(layer):
            _append(layers, inner)
        return
    place = f"layer {layer.name!r}, {kind}"
    if not module.startswith("keras.src.layers.") or kind not in (*_LAYERS, *IGNORED):
        known = ", ".join(_LAYERS)
        raise ValueError(f"{place}, must be one of {known}: {BY_HAND.get(kind, _LIST)}")
    try:
        _check_own(layer)
        if kind in IGNORED:
            return
        _LAYERS[kind](layers, layer, layer.get_config())
    except (TypeError, ValueError) as error:
        raise ValueError(f"{place}: {error}") from None
    if layer.weights and layer.compute_dtype != "float32":
        warnings.warn(f"{place}, computes in {layer.compute_dtype} in Keras, in float32 here", stacklevel=2)


# ---------------------------------------------------------------------------------------------- kinds


def _tensors(layer: Any) -> dict[str, np.ndarray]:
    """A layer's variables by the last part of their paths."""
    return {variable.path.rsplit("/", 1)[-1]: as_array(variable.value) for variable in layer.weights}


def _must(config: Mapping, **wanted: Any) -> None:
    """Refuse options with other values."""
    for name, value in wanted.items():
        if name in config and config[name] != value:
            raise ValueError(f"{name} must be {value!r}, got {config[name]!r}")


def _check_own(layer: Any) -> None:
    """Refuse a layer that computes something else than its class."""
    if not type(layer).__module__.startswith(("keras.src.layers.", "keras.src.models.")):
        raise ValueError(
            f"it must be Keras' own, got {_said(type(layer))}: what its call computes is not in its weights"
        )
    if changed := sorted({"call", "__call__"} & vars(layer).keys()):
        raise ValueError(f"it must have the {changed[0]} of its class, got {_said(vars(layer)[changed[0]])}")
    refuse_hooks(layer, "it")  # of Keras' backend PyTorch
    if mode := getattr(layer, "quantization_mode", None):
        raise ValueError(f"its dtype policy must not be quantised, got {mode}")
    if getattr(layer, "variable_dtype", "float32") in ("float16", "bfloat16") and layer.weights:
        raise ValueError(f"its weights must be float32, got {layer.variable_dtype}: build it with dtype='float32'")


def _said(what: Any) -> str:
    return f"{getattr(what, '__module__', '?')}.{getattr(what, '__qualname__', type(what).__name__)}"


def _name_of(function: Any, option: str) -> str:
    """The name of a function that is Keras' own: a function of the user's may have the same."""
    name = getattr(function, "__name__", None)
    if name is None or getattr(sys.modules["keras"].activations, name, None) is not function:
        raise ValueError(f"{option} must be one of keras.activations, got {_said(function):.100}")
    return name


def _function(function: Any, option: str) -> str | tuple:
    name = _name_of(function, option)
    if name not in FUNCTIONS:
        raise ValueError(f"{option} must be one of {', '.join(FUNCTIONS)}, got {name}")
    return FUNCTIONS[name]


def _append_function(layers: list[Layer], layer: Any) -> None:
    """Append the activation of a layer; none where it is linear."""
    name = _name_of(layer.activation, "activation")
    if name == "softmax":
        layers.append(Activation("softmax"))
    elif name != "linear":
        of = _function(layer.activation, "activation")
        function, *given = (of,) if isinstance(of, str) else of
        names = {"leaky_relu": ("slope",), "clip": ("lo", "hi")}.get(function, ())
        layers.append(Activation(function, **dict(zip(names, given, strict=True))))


def _cell(layer: Any, config: Mapping, backward: bool = False) -> Layer:
    _check_own(layer)
    _check_own(layer.cell)
    _must(config, go_backwards=backward)
    kind = {"SimpleRNN": "RNN"}.get(type(layer).__name__, type(layer).__name__)
    preset = "keras" if config.get("reset_after", True) else "keras_reset_before"
    names = [name for name in ("activation", "recurrent_activation") if name in config]
    fields = {name: _function(getattr(layer.cell, name), name) for name in names}
    return CELLS[kind](_tensors(layer), preset=dataclasses.replace(PRESETS[kind, preset], **fields))


def _bidirectional(layers: list[Layer], layer: Any, config: Mapping) -> None:
    _must(config, merge_mode="concat")
    ways = layer.forward_layer, layer.backward_layer
    for way in ways:
        if type(way).__name__ not in ("LSTM", "GRU", "SimpleRNN"):
            raise ValueError(f"its layers must be LSTM, GRU or SimpleRNN, got {type(way).__name__}")
        _must(way.get_config(), return_sequences=True)
    forward, backward = (_cell(way, way.get_config(), back) for way, back in zip(ways, (False, True), strict=True))
    layers.append(Bidirectional(forward, backward))


def _time_distributed(layers: list[Layer], layer: Any, config: Mapping) -> None:
    start = len(layers)
    _append(layers, layer.layer)
    if any(one.stateful or one.whole_sequence for one in layers[start:]):
        raise ValueError(f"its layer must have no memory, got {type(layer.layer).__name__}, which runs inside a frame")


def _dense(layers: list[Layer], layer: Any, config: Mapping) -> None:
    _must(config, lora_rank=None, quantization_config=None)
    tensors = _tensors(layer)
    layers.append(Linear(tensors["kernel"].T, tensors.get("bias")))
    _append_function(layers, layer)


def _conv(layers: list[Layer], layer: Any, config: Mapping) -> None:
    _must(config, strides=(1,), data_format="channels_last", lora_rank=None)
    if config["padding"] != "causal" and tuple(config["kernel_size"]) != (1,):
        raise ValueError(
            f"padding must be 'causal', got {config['padding']!r}, which reads later frames or drops the first; "
            "cnorm.CausalConv1d(kernel.transpose(2, 1, 0), bias) reads earlier frames, cnorm.Conv1d runs inside a frame"
        )
    tensors = _tensors(layer)
    weight, (dilation,) = tensors["kernel"].transpose(2, 1, 0), config["dilation_rate"]
    layers.append(CausalConv1d(weight, tensors.get("bias"), dilation=dilation, groups=config["groups"]))
    _append_function(layers, layer)


def _embedding(layers: list[Layer], layer: Any, config: Mapping) -> None:
    _must(config, mask_zero=False, lora_rank=None)
    layers.append(Embedding(_tensors(layer)["embeddings"]))


def _shape(layer: Any) -> tuple:
    """The shape that it was built for; a layer inside another, or shared by two places, has no `input`."""
    return tuple((layer.get_build_config() or {}).get("input_shape") or ())


def _over_the_last_axis(layer: Any, axis: Any) -> None:
    axes = list(axis) if isinstance(axis, list | tuple) else [axis]
    if axes not in ([-1], [len(_shape(layer)) - 1]):
        raise ValueError(f"axis must be -1, the features of a frame, got {axis!r}")


def _layer_norm(layers: list[Layer], layer: Any, config: Mapping) -> None:
    _must(config, rms_scaling=False)
    _over_the_last_axis(layer, config["axis"])
    tensors = _tensors(layer)
    gain = tensors["gamma"] if "gamma" in tensors else np.ones(_shape(layer)[-1], np.float32)
    layers.append(LayerNorm(gain, tensors.get("beta"), eps=config["epsilon"]))


def _batch_norm(layers: list[Layer], layer: Any, config: Mapping) -> None:
    _over_the_last_axis(layer, config["axis"])
    named = _tensors(layer)
    arrays = [named.get(name) for name in ("moving_mean", "moving_variance", "gamma", "beta")]
    append_batch_norm(layers, arrays, config["epsilon"], None)


def _relu(layers: list[Layer], layer: Any, config: Mapping) -> None:
    _must(config, threshold=0.0)
    top, slope = config.get("max_value"), config.get("negative_slope") or 0.0
    if top is not None and slope:
        raise ValueError(f"max_value must be None beside a negative_slope, got {top!r}")
    if top is not None:
        layers.append(Activation("clip", lo=0.0, hi=top))
    else:
        layers.append(Activation("leaky_relu", slope=slope) if slope else Activation("relu"))


def _prelu(layers: list[Layer], layer: Any, config: Mapping) -> None:
    alpha = _tensors(layer)["alpha"]
    if alpha.size != alpha.shape[-1]:
        raise ValueError(f"its slopes must be the same for all frames, shared_axes=[1], got shape {alpha.shape}")
    layers.append(Activation("prelu", slope=alpha.reshape(-1)))


def _softmax(layers: list[Layer], layer: Any, config: Mapping) -> None:
    _over_the_last_axis(layer, config["axis"])
    layers.append(Activation("softmax"))


_LAYERS: Mapping[str, Callable[[list[Layer], Any, Mapping], None]] = MappingProxyType(
    {
        **dict.fromkeys(
            ("LSTM", "GRU", "SimpleRNN"), lambda layers, layer, config: layers.append(_cell(layer, config))
        ),
        "Bidirectional": _bidirectional,
        "Dense": _dense,
        "Conv1D": _conv,
        "Embedding": _embedding,
        "LayerNormalization": _layer_norm,
        "BatchNormalization": _batch_norm,
        "TimeDistributed": _time_distributed,
        "Activation": lambda layers, layer, config: _append_function(layers, layer),
        "ReLU": _relu,
        "LeakyReLU": lambda layers, layer, config: layers.append(
            Activation("leaky_relu", slope=config["negative_slope"])
        ),
        "PReLU": _prelu,
        "ELU": lambda layers, layer, config: layers.append(Activation("elu", alpha=config["alpha"])),
        "Softmax": _softmax,
    }
)
