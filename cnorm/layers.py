"""Layers: immutable descriptions that hold the original weights. `Model` packs and runs them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np

from cnorm._core import BoundLayerNorm, default_float_env, rounded
from cnorm.presets import PRESETS
from cnorm.specs import INITIAL, CellSpec
from cnorm.tensors import Tensor, has_projection, optional_tensors, present
from cnorm.weights import checked, float32_copy, of_layer_norm, packed

__all__ = ["GRU", "LSTM", "RNN", "Activation", "Bidirectional", "LayerNorm", "Linear", "Residual"]

ACTIVATIONS = ("tanh", "relu", "sigmoid")
MODULES = {"Tanh": "tanh", "ReLU": "relu", "Sigmoid": "sigmoid"}  # of torch.nn
LINEAR = Tensor("weight", ("O", "I")), Tensor("bias", ("O",), optional=True)
LAYER_NORM = Tensor("weight", ("N",)), Tensor("bias", ("N",), optional=True)


class Layer:
    """Base of all layers: immutable, with a kind, weights and sizes."""

    kind: ClassVar[str]
    weights: Mapping[str, np.ndarray]
    rows: Mapping[str, Any] = MappingProxyType({})  # matrices rounded to int8 or float16, by name: `cnorm.rounded.Rows`
    absent_biases: tuple[str, ...] = ()  # names of the optional biases that the layer does not have
    input_size: int
    output_size: int

    def all_rows(self) -> list:
        """The `rows` of this layer and of the layers in it."""
        return list(self.rows.values())

    def __setattr__(self, name, value):
        if name in self.__dict__:
            raise AttributeError(f"a layer is immutable: {name} can't be set")
        self.__dict__[name] = value


class _Cell(Layer):
    """A recurrent layer: a spec, its eps, the tensors that a checkpoint has for one layer, and their arrays."""

    def __init__(self, weights: Mapping[str, Any], *, preset: str | CellSpec, eps: float | None = None) -> None:
        self.spec = cell_spec(self.kind, preset)
        self.eps = checked_eps(eps, self.spec)
        name = f"{self.kind} {self.spec.name}"
        self.tensors = tuple(tensor.named() for tensor in (*self.spec.tensors, *INITIAL[self.kind]))
        self.weights, sizes = checked(weights, self.tensors, name)
        self.input_size, self.units, self.output_size = sizes["I"], sizes["H"], sizes["P"]
        self.sizes = sizes
        optional = [tensor.name for tensor in optional_tensors(self.tensors, self.weights) if tensor.is_bias()]
        self.absent_biases = tuple(name for name in optional if name not in self.weights)
        if 0 < len(self.absent_biases) < len(optional):
            raise ValueError(
                f"weights of {name} must have all of {', '.join(optional)} or none of them; "
                f"missing: {', '.join(self.absent_biases)}"
            )
        given = present(self.tensors, self.weights)
        of_projection = [tensor.name for tensor in given if any(use.part == "bias_p" for use in tensor.uses())]
        of_projection += ["projection_clip"] if self.spec.projection_clip is not None else []
        if of_projection and not has_projection(given):
            raise ValueError(f"weights of {name} must have a projection for {' and '.join(of_projection)}")

    def packed(self) -> dict:
        """The weights in the layout of the kernels, see `cnorm.weights.packed`."""
        with default_float_env():
            return packed(self.spec, self.tensors, self.weights, self.sizes) | {"rows": self.rows}

    def __repr__(self):
        eps = "" if self.eps is None else f", eps={self.eps:g}"
        return f"{self.kind}({self.input_size} -> {self.output_size}, preset={self.spec.name!r}{eps})"

    def __reduce__(self):
        return _cell, (type(self), dict(self.weights), self.spec, self.eps, dict(self.rows))


def _cell(layer, weights, spec, eps, rows):
    return _with_rows(layer(weights, preset=spec, eps=eps), rows)


def _with_rows(layer, rows):
    layer.rows = MappingProxyType(rows)
    return layer


class LSTM(_Cell):
    """A long short-term memory layer, layer-normalised or plain.

    Preset ``ba2016`` (arXiv:1607.06450, Eq. 20-22), gates f, i, o, g::

        (f, i, o, g) = LN(weight_h h; gain_h, bias_h) + LN(weight_x x; gain_x, bias_x) + bias
        c = sigmoid(f) c + sigmoid(i) tanh(g)
        h = sigmoid(o) tanh(LN(c; gain_c, bias_c))

    docs/cells.md has the equations of all presets.

    Parameters
    ----------
    weights : mapping of str to ndarray, float32 (float16 and bfloat16 are widened)
        The tensors of the preset's checkpoints, with their names and layout: ``PRESETS["LSTM", preset].weights`` lists
        them. ``h0`` [output_size] and, for an LSTM, ``c0`` [units] may be added: the initial state, zero if not given.
        The arrays are copied.
    preset : str or CellSpec
        The cell that the weights are for. It must be given, as different cells can have the same names and shapes.
    eps : float, optional
        Added to each variance, rounded to float32; the preset's own if not given.

    Attributes
    ----------
    spec : CellSpec
    eps : float or None
        None if the cell has no layer norm.
    weights : mapping of str to ndarray, read-only
    input_size, units, output_size : int
        output_size is smaller than units if there is a projection.

    Raises
    ------
    TypeError
        For another type or dtype; float64 weights are refused, cast them.
    ValueError
        For an unknown preset, a cell that the runtime does not compute, weights that are missing, unknown, not finite
        or of another shape, or an eps that is negative, missing, or given although nothing is normalised.
    """

    kind = "LSTM"


class GRU(_Cell):
    """A gated recurrent unit layer, layer-normalised or plain.

    Preset ``ba2016`` (arXiv:1607.06450, Eq. 26-28), gates z, r, n::

        (z, r) = LN(weight_h h; gain_h, bias_h) + LN(weight_x x; gain_x, bias_x)
        n = tanh(LN(weight_xn x; gain_xn, bias_xn) + sigmoid(r) LN(weight_hn h; gain_hn, bias_hn))
        h = (1 - sigmoid(z)) h + sigmoid(z) n

    docs/cells.md has the equations of all presets. Parameters, attributes and errors as `LSTM`.
    """

    kind = "GRU"


class RNN(_Cell):
    """A simple recurrent layer, layer-normalised.

    Preset ``ba2016`` (arXiv:1607.06450, Eq. 4)::

        h = tanh(LN(weight_h h + weight_x x; gain, bias))

    and ``ba2016_relu`` with relu. docs/cells.md has the equations of all presets. Parameters, attributes and errors as
    `LSTM`.
    """

    kind = "RNN"


class Linear(Layer):
    """y = weight x + bias.

    Parameters
    ----------
    weight : ndarray, shape (output_size, input_size), float32 (float16 and bfloat16 are widened)
        Or a torch.nn.Linear, whose bias is then taken too. A kernel [inputs, outputs] of Keras is given as kernel.T.
    bias : ndarray, shape (output_size,), optional

    Raises
    ------
    TypeError, ValueError
        As `LSTM`.
    """

    kind = "Linear"

    def __init__(self, weight: Any, bias: Any = None) -> None:
        if hasattr(weight, "in_features") and hasattr(weight, "weight"):  # a torch.nn.Linear
            if bias is not None:
                raise TypeError("bias must not be given beside a module, which brings its own")
            weight, bias = weight.weight, weight.bias
        given = {"weight": weight} if bias is None else {"weight": weight, "bias": bias}
        self.weights, sizes = checked(given, LINEAR, "Linear")
        self.absent_biases = ("bias",) if bias is None else ()
        self.output_size, self.input_size = sizes["O"], sizes["I"]

    def __repr__(self):
        return f"Linear({self.input_size} -> {self.output_size})"

    def __reduce__(self):
        return _linear, (self.weights["weight"], self.weights.get("bias"), dict(self.rows))


def _linear(weight, bias, rows):
    return _with_rows(Linear(weight, bias), rows)


class LayerNorm(Layer, BoundLayerNorm):
    """y = LN(x) weight + bias over the last dimension (arXiv:1607.06450, Eq. 3).

    As a layer of a `Model` it normalises a frame. It can also be called: ``norm = cnorm.LayerNorm(weight, bias)``, then
    ``norm(x)`` or ``norm(x, out)``, is `layer_norm` with parameters that are checked once, not at every call.

    Parameters
    ----------
    weight : ndarray, shape (input_size,), float32 (float16 and bfloat16 are widened)
        Or a torch.nn.LayerNorm of one dimension, whose bias and eps are then taken too.
    bias : ndarray, shape (input_size,), optional
    eps : float, optional
        Added to the variance, rounded to float32; 1e-5 if not given.

    Raises
    ------
    TypeError, ValueError
        As `LSTM`.
    """

    kind = "LayerNorm"

    def __init__(self, weight: Any, bias: Any = None, *, eps: float | None = None) -> None:
        if hasattr(weight, "normalized_shape"):  # a torch.nn.LayerNorm
            if bias is not None or eps is not None:
                raise TypeError("bias and eps must not be given beside a module, which brings its own")
            weight, bias, eps = of_layer_norm(weight)
        if isinstance(weight, (int, tuple)):
            raise TypeError(
                f"weight must be an array, got {type(weight).__name__}: there is no normalized_shape; for {weight} "
                f"without a gain write np.ones({weight}, np.float32)"
            )
        given = {"weight": weight} if bias is None else {"weight": weight, "bias": bias}
        self.weights, sizes = checked(given, LAYER_NORM, "LayerNorm")
        self.absent_biases = ("bias",) if bias is None else ()
        self.eps = rounded(1e-5 if eps is None else eps, "eps")
        self.input_size = self.output_size = sizes["N"]
        self._bind(self.weights["weight"], self.weights.get("bias"), self.eps)

    def __repr__(self):
        return f"LayerNorm({self.input_size}, eps={self.eps:g})"

    def __reduce__(self):
        return _layer_norm, (self.weights["weight"], self.weights.get("bias"), self.eps)


def _layer_norm(weight, bias, eps):
    return LayerNorm(weight, bias, eps=eps)


class Activation(Layer):
    """A function of each element: "relu", "tanh" or "sigmoid".

    Parameters
    ----------
    function : str
        Or a torch.nn.ReLU, Tanh or Sigmoid.

    Attributes
    ----------
    input_size, output_size : None
        It takes any size; both are those of the layer before.

    Raises
    ------
    TypeError
        If `function` is not a str.
    ValueError
        For another name.
    """

    kind = "Activation"

    def __init__(self, function: str) -> None:
        if hasattr(function, "forward"):
            function = MODULES.get(type(function).__name__, function)
        if not isinstance(function, str):
            raise TypeError(f"function must be a str, got {type(function).__name__}")
        if function not in ACTIVATIONS:
            raise ValueError(f"function must be one of {', '.join(ACTIVATIONS)}, got {function!r}")
        self.function = function
        self.weights = {}
        self.input_size = self.output_size = None

    def __repr__(self):
        return f"Activation({self.function!r})"

    def __reduce__(self):
        return Activation, (self.function,)


class Residual(Layer):
    """y = x + layers(x).

    Parameters
    ----------
    layers : sequence of layers
        Applied in order; the last has as many outputs as the first has inputs. `Bidirectional` is not allowed.

    Raises
    ------
    TypeError, ValueError
        As `cnorm.Model`.
    """

    kind = "Residual"

    def __init__(self, layers: Iterable[Layer]) -> None:
        self.layers = chained(layers)
        if any(isinstance(layer, Bidirectional) for layer in self.layers):
            raise ValueError("layers of Residual must not have a Bidirectional layer: put it on its own")
        self.weights = {}
        self.input_size, self.output_size = ends(self.layers)
        if self.input_size != self.output_size:
            raise ValueError(
                f"layers of Residual must have as many outputs as inputs, got {self.input_size} -> {self.output_size}"
            )

    def all_rows(self) -> list:
        return [rows for layer in self.layers for rows in layer.all_rows()]

    def __repr__(self):
        return f"Residual([{', '.join(map(repr, self.layers))}])"

    def __reduce__(self):
        return Residual, (self.layers,)


class Bidirectional(Layer):
    """y[t] = (forward's output at t, backward's output at t); backward reads the sequence from its end.

    It needs the whole sequence, so a model with such a layer has `Model.run` but no streams.

    Parameters
    ----------
    forward, backward : LSTM, GRU or RNN
        Both with the same input_size.

    Raises
    ------
    TypeError
        If one is not a recurrent layer.
    ValueError
        If their input sizes differ.
    """

    kind = "Bidirectional"

    def __init__(self, forward: _Cell, backward: _Cell) -> None:
        for name, layer in (("forward", forward), ("backward", backward)):
            if not isinstance(layer, _Cell):
                raise TypeError(f"{name} must be a recurrent layer such as cnorm.LSTM, got {type(layer).__name__}")
        if forward.input_size != backward.input_size:
            raise ValueError(
                f"backward must take the {forward.input_size} inputs that forward takes, got {backward.input_size}"
            )
        self.forward, self.backward = forward, backward
        self.weights = {}
        self.input_size, self.output_size = forward.input_size, forward.output_size + backward.output_size

    def all_rows(self) -> list:
        return self.forward.all_rows() + self.backward.all_rows()

    def __repr__(self):
        return f"Bidirectional({self.forward!r}, {self.backward!r})"

    def __reduce__(self):
        return Bidirectional, (self.forward, self.backward)


def chained(layers) -> tuple[Layer, ...]:
    """The layers as a tuple; each must take as many inputs as the layer before has outputs."""
    if not isinstance(layers, Iterable):
        raise TypeError(f"layers must be a sequence of layers, got {type(layers).__name__}")
    layers = tuple(layers)
    if not layers:
        raise ValueError("layers must have at least one layer, got none")
    size = None
    for i, layer in enumerate(layers):
        if not isinstance(layer, Layer):
            raise TypeError(
                f"layers[{i}] must be a layer such as cnorm.LSTM or cnorm.Linear, got {type(layer).__name__}"
            )
        if layer.input_size is not None and size is not None and layer.input_size != size:
            raise ValueError(
                f"layers[{i}] must take the {size} outputs of the layers before it, got {layer!r}, "
                f"which takes {layer.input_size}"
            )
        size = layer.output_size or size
    if size is None:
        raise ValueError("layers must have a layer with a size, got activations only")
    return layers


def ends(layers) -> tuple[int, int]:
    """Input size of the first and output size of the last layer that has a size; activations have none."""
    sizes = [layer for layer in layers if layer.input_size is not None]
    return sizes[0].input_size, sizes[-1].output_size


def flat(layers, size: int) -> list[tuple[str, object, int]]:
    """The layers as the runtime takes them, a list of (kind, layer, size).

    A `Residual` becomes its inner layers and then ("Residual", back, size), an addition: `back` is the number of inner
    entries, and the input of the first of them is added. `size` is the number of outputs.
    """
    flattened = []
    for layer in layers:
        if isinstance(layer, Residual):
            inner = flat(layer.layers, size)
            flattened += [*inner, ("Residual", len(inner), size)]
        else:
            size = layer.output_size or size
            flattened.append((layer.kind, layer, size))
    return flattened


def with_values(cell: _Cell, arrays: Mapping[str, np.ndarray]) -> _Cell:
    """The cell with other values: float32 arrays of the same names and shapes, which are checked to be finite."""
    name = f"{cell.kind} {cell.spec.name}"
    other = object.__new__(type(cell))
    copies = {key: float32_copy(array, key, name) for key, array in arrays.items()}
    other.__dict__.update(cell.__dict__ | {"weights": MappingProxyType(copies)})
    return other


def cell_spec(kind: str, preset) -> CellSpec:
    """The spec of a preset's name, or the given spec, which is checked to be one that the runtime computes."""
    if isinstance(preset, CellSpec):
        if preset.kind != kind:
            raise ValueError(f"preset must be a spec of kind {kind}, got one of kind {preset.kind}")
        if reason := preset.refusal():
            raise ValueError(f"the runtime does not compute this {kind}: {reason}")
        return preset
    if not isinstance(preset, str):
        raise TypeError(f"preset must be a name or a CellSpec, got {type(preset).__name__}")
    if (kind, preset) not in PRESETS:
        names = ", ".join(sorted(name for k, name in PRESETS if k == kind))
        raise ValueError(f"preset must be one of the {kind} presets {names}, got {preset!r}")
    return PRESETS[kind, preset]


def checked_eps(eps, spec: CellSpec) -> float | None:
    if not spec.normalises:
        if eps is not None:
            raise ValueError(f"eps must not be given for preset {spec.name!r}, which normalises nothing")
        return None
    if eps is None and spec.eps is None:
        raise ValueError(f"eps must be given for preset {spec.name!r}: its checkpoints do not carry one")
    return rounded(spec.eps if eps is None else eps, "eps")
