"""Recurrent modules by preset: forward and backward passes of cells by cnorm_train.h, the rest by autograd."""

from __future__ import annotations

import functools
import json
import math
from dataclasses import asdict
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from cnorm import _core
from cnorm.layers import Bidirectional, Layer, cell_spec, checked_eps, flat, with_values
from cnorm.model_files import CELLS
from cnorm.parameters import add_gradients, gradient_targets
from cnorm.presets import PRESETS
from cnorm.specs import CellSpec, spec_from_json
from cnorm.tensors import axis_length, has_projection, present
from cnorm.torch.arrays import array, refuse_transforms, tensor

__all__ = ["GRU", "LSTM", "RNN"]


def described(spec: CellSpec, eps: float | None, names: tuple[str, ...]) -> str:
    """A cell as JSON, which a PyTorch operator can take: its spec, eps and the names of its weights in their order."""
    known = PRESETS.get((spec.kind, spec.name)) == spec
    cell = {"preset": spec.name} if known else {"spec": asdict(spec)}
    return json.dumps({"kind": spec.kind, **cell, "eps": eps, "names": names})


@functools.lru_cache
def _cell(text: str):
    entry = json.loads(text)
    spec = PRESETS[entry["kind"], entry["preset"]] if "preset" in entry else spec_from_json(entry["spec"])
    return CELLS[entry["kind"]], spec, entry["eps"], tuple(entry["names"])


def _arrays(text: str, weights: list[Tensor]) -> dict[str, np.ndarray]:
    names = _cell(text)[3]
    return {name: array(w, f"weights[{name!r}]", torch.float32) for name, w in zip(names, weights, strict=True)}


def _layer(text: str, weights: list[Tensor]) -> Layer:
    kind, spec, eps, _ = _cell(text)
    return kind(_arrays(text, weights), preset=spec, eps=eps)


class Packed(NamedTuple):
    """A cell and its packed weights; neither is changed."""

    layer: Layer
    network: _core.Network

    def tape(self, steps: int, batch: int, memory: np.ndarray | None = None) -> _core.Tape:
        return _core.Tape(flat([self.layer], self.layer.input_size), steps, batch, self.network, memory)


@functools.lru_cache(32)
def _last_packed(cell: str, weights: tuple) -> list[Packed | None]:
    """Holds what was packed last from the weights with these addresses and shapes."""
    return [None]


def packed_cell(cell: str, weights: list[Tensor]) -> Packed:
    """The cell with these weights, packed; the last result is used again while all weights have the same bits.

    The versions of tensors (`Tensor._version`) would not tell: writes through `Tensor.data` or `numpy()` do not count.
    """
    place = _last_packed(cell, tuple((w.data_ptr(), *w.shape) for w in weights))
    last, arrays = place[0], _arrays(cell, weights)
    if last is None:
        layer = _layer(cell, weights)
    elif all(_core.same_bits(array, last.layer.weights[name]) for name, array in arrays.items()):
        return last
    else:
        layer = with_values(last.layer, arrays)
    place[0] = packed = Packed(layer, _core.Network(flat([layer], layer.input_size), b""))
    return packed


def _slices(tape: _core.Tape) -> list[tuple[slice, slice]]:
    """Slices of h and c: in a row of the tape's state, which is padded, and in one of the operator's, which is not."""
    places, at = [], 0
    for _, units, start in tape.state_arrays:
        places.append((slice(start, start + units), slice(at, at + units)))
        at += units
    return places


def _refuse_onnx_export(cell: str) -> None:
    """torch.onnx.export calls either the operator or its fake kernel, depending on how it traces a module."""
    if torch.onnx.is_in_onnx_export():
        raise NotImplementedError(
            f"torch.onnx.export can't translate a cnorm.torch.{json.loads(cell)['kind']}: use "
            "onnx_export.export(cnorm.Model(module.to_layers()), path), which writes standard operators"
        )


def _width(layer: Layer) -> int:
    """The length of h and c together."""
    return layer.output_size + (layer.units if layer.kind == "LSTM" else 0)


def _shaped(a: np.ndarray, name: str, shape: tuple) -> np.ndarray:
    if a.shape != tuple(shape):
        raise ValueError(f"{name} must have shape {tuple(shape)} for these weights, got {a.shape}")
    return a


@torch.library.custom_op("cnorm::recurrent", mutates_args=())
def _recurrent(x: Tensor, state: Tensor, weights: list[Tensor], cell: str) -> tuple[Tensor, Tensor, Tensor]:
    """x [steps, batch, inputs], state [batch, h then c] -> y [steps, batch, outputs], the last state, the tape."""
    _refuse_onnx_export(cell)
    packed = packed_cell(cell, weights)
    layer = packed.layer
    a = _shaped(array(x, "x", torch.float32), "x", (*x.shape[:2], layer.input_size))
    start = _shaped(array(state, "the state", torch.float32), "the state", (x.shape[1], _width(layer)))
    tape = packed.tape(*a.shape[:2])
    for own, given in _slices(tape):
        tape.state[:, own] = start[:, given]
    y = np.empty((*a.shape[:2], packed.layer.output_size), np.float32)
    tape.run(0, len(a), a, y)
    last = np.concatenate([tape.state[:, own] for own, _ in _slices(tape)], 1)
    return tensor(y), tensor(last), tensor(tape.memory)


@functools.lru_cache
def _sizes(cell: str, shapes: tuple) -> tuple[int, int, int]:
    """For a cell with weights of these shapes: inputs, outputs, and floats of the tape for each step and row."""
    kind, spec, eps, names = _cell(cell)
    blank = {name: np.zeros(shape, np.float32) for name, shape in zip(names, shapes, strict=True)}
    layer = kind(blank, preset=spec, eps=eps)
    tape = _core.Tape(flat([layer], layer.input_size), 1, 1)
    return layer.input_size, layer.output_size, tape.memory.size


def _sizes_of(cell: str, weights: list[Tensor]) -> tuple[int, int, int]:
    return _sizes(cell, tuple(tuple(int(n) for n in w.shape) for w in weights))


@_recurrent.register_fake
def _(x, state, weights, cell):
    _refuse_onnx_export(cell)
    _, outputs, row = _sizes_of(cell, weights)
    y = x.new_empty((x.shape[0], x.shape[1], outputs))
    return y, torch.empty_like(state), x.new_empty(x.shape[0] * x.shape[1] * row)


@torch.library.custom_op("cnorm::recurrent_backward", mutates_args=())
def _recurrent_backward(
    dy: Tensor, dlast: Tensor, tape_memory: Tensor, weights: list[Tensor], cell: str, of_x: bool
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """The gradients of x, empty unless `of_x`, of the first state and of the weights.

    The tape is copied, as this may be called twice.
    """
    packed = packed_cell(cell, weights)
    layer = packed.layer
    d = _shaped(array(dy, "dy", torch.float32), "dy", (*dy.shape[:2], layer.output_size))
    dend = _shaped(array(dlast, "dlast", torch.float32), "dlast", (dy.shape[1], _width(layer)))
    tape = packed.tape(*d.shape[:2], array(tape_memory, "the tape", torch.float32))
    for own, given in _slices(tape):
        tape.dstate[:, own] = dend[:, given]
    dx = np.empty((*d.shape[:2], layer.input_size) if of_x else 0, np.float32)
    tape.backward(0, len(d), d, dx if of_x else None)
    into = {name: np.zeros_like(w) for name, w in layer.weights.items()}
    add_gradients(gradient_targets(layer, into), tape.gradients[0])
    first = np.concatenate([tape.dstate[:, own] for own, _ in _slices(tape)], 1)
    return tensor(dx), tensor(first), [tensor(into[name]) for name in _cell(cell)[3]]


@_recurrent_backward.register_fake
def _(dy, dlast, tape_memory, weights, cell, of_x):
    dx = dy.new_empty((dy.shape[0], dy.shape[1], _sizes_of(cell, weights)[0]) if of_x else 0)
    return dx, torch.empty_like(dlast), [torch.empty_like(w) for w in weights]


def _save(ctx, inputs, output):
    _, _, weights, ctx.cell = inputs
    ctx.save_for_backward(output[2], *weights)


def _gradients(ctx, dy, dlast, _):
    memory, *weights = ctx.saved_tensors
    of_x = ctx.needs_input_grad[0]
    dx, first, dweights = torch.ops.cnorm.recurrent_backward(dy, dlast, memory, weights, ctx.cell, of_x)
    return dx if of_x else None, first, dweights, None


_recurrent.register_autograd(_gradients, setup_context=_save)


class _Recurrent(nn.Module):
    """Base of the three kinds; see `LSTM`."""

    kind: str

    def __init__(
        self, input_size: int, units: int, *, preset: str | CellSpec, num_layers: int = 1, bidirectional: bool = False,
        batch_first: bool = False, eps: float | None = None, proj_size: int = 0, bias: bool = True,
    ) -> None:  # fmt: skip
        super().__init__()
        for name, value in (("input_size", input_size), ("units", units), ("num_layers", num_layers)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")
        self.spec = cell_spec(self.kind, preset)
        self.eps = checked_eps(eps, self.spec)
        self.input_size, self.units, self.num_layers = input_size, units, num_layers
        self.bidirectional, self.batch_first, self._biased = bidirectional, batch_first, bias
        self.output_size = proj_size or units
        numbered = all("{" in t.name for t in self.spec.tensors if not t.leading) and num_layers > 1
        ways = (False, True)[: 1 + bidirectional]
        if bidirectional and not all("{reverse}" in t.name for t in self.spec.tensors):
            raise ValueError(f"preset {self.spec.name!r} has no names for a reverse direction: use two modules")
        self._prefix = "" if num_layers == 1 or numbered else "layers.{layer}."
        self.ways = []
        for i in range(num_layers):
            inputs = input_size if i == 0 else self.output_size * len(ways)
            names = [self._parameters_of(i, way, inputs, proj_size) for way in ways]
            self.ways.append([(own, self._text(own)) for own in names])

    def _parameters_of(self, number: int, reverse: bool, inputs: int, proj_size: int) -> dict[str, str]:
        """Register the parameters of one layer and direction; returns name in a single layer -> name in the module."""
        sizes = {"I": inputs, "H": self.units, "P": proj_size or self.units, "": 1}
        names = {}
        for t in self.spec.tensors:
            if t.is_part("weight_p", "bias_p") and not proj_size:
                continue
            if t.optional and t.is_bias() and not self._biased:
                continue
            shape = [axis_length(axis, sizes) for axis in t.axes]
            name = self._prefix.replace("{layer}", str(number)) + t.named(number, reverse).name
            names[t.named().name] = name
            *path, last = name.split(".")
            module = self
            for part in path:
                if not hasattr(module, part):
                    module.add_module(part, nn.Module())
                module = getattr(module, part)
            module.register_parameter(last, nn.Parameter(self._initial(t, shape)))
        if proj_size and not has_projection(present([t.named() for t in self.spec.tensors], names)):
            raise ValueError(f"preset {self.spec.name!r} has no projection, got proj_size={proj_size}")
        return names

    def _initial(self, t, shape) -> Tensor:
        """Initial values: gains 1, biases of normalised cells 0, all others uniform as in torch.nn.LSTM."""
        if all(use.part.startswith("gain") for use in t.uses()):
            return torch.ones(shape)
        if self.spec.normalises and not any(use.part.startswith("weight") for use in t.uses()):
            return torch.zeros(shape)
        bound = 1 / math.sqrt(self.units)
        return torch.empty(shape).uniform_(-bound, bound)

    def to_layers(self) -> tuple[Layer, ...]:
        """Layers with the present weights, for `cnorm.Model`."""
        found = []
        for ways in self.ways:
            cells = [_layer(text, self.tensors(names)) for names, text in ways]
            found.append(cells[0] if len(cells) == 1 else Bidirectional(*cells))
        return tuple(found)

    def _text(self, names: dict[str, str]) -> str:
        return described(self.spec, self.eps if self.spec.normalises else None, tuple(names))

    def tensors(self, names: dict[str, str]) -> list[Tensor]:
        return [self.get_parameter(name) for name in names.values()]

    def _run(self, x: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """Run all layers: x [steps, batch, inputs], states [layers * directions, batch, h then c] -> y, last states."""
        last = []
        for i, ways in enumerate(self.ways):
            results = []
            for j, (names, text) in enumerate(ways):
                given = x.flip(0) if j else x
                state = states[i * len(ways) + j]
                weights = self.tensors(names)
                refuse_transforms(given, state, *weights)
                y, end, _ = torch.ops.cnorm.recurrent(given, state, weights, text)
                results.append(y.flip(0) if j else y)
                last.append(end)
            x = results[0] if len(results) == 1 else torch.cat(results, -1)
        return x, torch.stack(last)

    def _frames(self, x: Tensor) -> Tensor:
        if not isinstance(x, Tensor) or x.ndim not in (2, 3) or x.shape[-1] != self.input_size:
            got = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(
                f"x must have shape (steps, batch, {self.input_size}) or (steps, {self.input_size}), got {got}"
            )
        x = x[:, None] if x.ndim == 2 else x.transpose(0, 1) if self.batch_first else x
        if x.shape[0] == 0 or x.shape[1] == 0:
            raise ValueError(f"x must have at least one step and one row, got {tuple(x.shape)}")
        return x

    def _call(self, x: Tensor, given: tuple[Tensor, ...] | None, widths: tuple[int, ...]):
        frames = self._frames(x)
        count = self.num_layers * (1 + self.bidirectional)
        if given is None:
            given = tuple(frames.new_zeros((count, frames.shape[1], width)) for width in widths)
        elif x.ndim == 2:
            given = tuple(part[:, None] for part in given)
        for part, width in zip(given, widths, strict=True):
            if part.shape != (count, frames.shape[1], width):
                raise ValueError(f"a state must have shape {(count, frames.shape[1], width)}, got {tuple(part.shape)}")
        y, last = self._run(frames, torch.cat(given, -1))
        parts = torch.split(last, widths, -1)
        if x.ndim == 2:
            return y[:, 0], tuple(part[:, 0] for part in parts)
        return y.transpose(0, 1) if self.batch_first else y, parts

    def forward(self, x: Tensor, h: Tensor | None = None) -> tuple[Tensor, Tensor]:
        y, (last,) = self._call(x, None if h is None else (h,), (self.output_size,))
        return y, last

    def extra_repr(self) -> str:
        return f"{self.input_size}, {self.units}, preset={self.spec.name!r}, num_layers={self.num_layers}"


class LSTM(_Recurrent):
    """A long short-term memory by preset, called as torch.nn.LSTM: ``y, (h, c) = lstm(x)`` or ``lstm(x, (h, c))``.

    Parameters
    ----------
    input_size, units : int
    preset : str or CellSpec
        Which cell: see docs/cells.md. Parameters have the names of the preset's checkpoints, so that state dicts can be
        exchanged in both directions; in a stack of cells whose names have no number, they begin with ``layers.0.``.
    num_layers : int
    bidirectional : bool
        Only for presets that have names for the reverse direction, such as "torch".
    batch_first : bool
    eps : float, optional
        The preset's own if not given.
    proj_size : int
        Outputs of a projection, 0 for none; only for presets that have one.
    bias : bool
        False: leave out the biases that are optional in the preset.

    Notes
    -----
    x is float32 on the CPU, (steps, batch, input_size), or (steps, input_size) for one sequence. Gradients are those of
    cnorm_train.h: the same bits on every machine. There are no second derivatives.
    """

    kind = "LSTM"

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        return self._call(x, state, (self.output_size, self.units))


class GRU(_Recurrent):
    """A gated recurrent unit by preset, called as torch.nn.GRU; parameters as `LSTM`."""

    kind = "GRU"


class RNN(_Recurrent):
    """A simple recurrent network by preset, called as torch.nn.RNN; parameters as `LSTM`."""

    kind = "RNN"
