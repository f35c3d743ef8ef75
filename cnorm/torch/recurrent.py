"""Recurrent modules by preset, for sequences and for single steps."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import PackedSequence

from cnorm.cells.specs import CellSpec
from cnorm.cells.tensors import axis_length, has_projection, present
from cnorm.layers import Bidirectional
from cnorm.layers.base import Layer
from cnorm.layers.cells import cell_spec, checked_eps
from cnorm.torch.operators import described, layer_of
from cnorm.torch.steps import Weights, call

__all__ = ["GRU", "LSTM", "RNN", "GRUCell", "LSTMCell", "RNNCell"]


class _Module(nn.Module):
    """The parameters of cells, named as their preset's checkpoints."""

    kind: str

    def __init__(
        self, input_size: int, units: int | None = None, *, preset: str | CellSpec, hidden_size: int | None = None,
        eps: float | None = None, proj_size: int = 0, bias: bool = True,
    ) -> None:  # fmt: skip
        super().__init__()
        if (units is None) == (hidden_size is None):
            raise TypeError("units, or hidden_size as torch.nn calls it, must be given, and not both")
        units = hidden_size if units is None else units
        self.spec = cell_spec(self.kind, preset)
        self.eps = checked_eps(eps, self.spec)
        for name, value, least in (("input_size", input_size, 1), ("units", units, 1), ("proj_size", proj_size, 0)):
            _check_integer(name, value, least)
        self.input_size, self.units, self.output_size, self._biased = input_size, units, proj_size or units, bias
        self._projected = proj_size > 0

    @property
    def hidden_size(self) -> int:
        return self.units

    def _weights_of(self, number: int, reverse: bool, inputs: int, prefix: str = "") -> Weights:
        """Register the parameters of one layer and direction."""
        sizes = {"I": inputs, "H": self.units, "P": self.output_size, "": 1}
        names = {}
        for t in self.spec.tensors:
            if t.is_part("weight_p", "bias_p") and not self._projected:
                continue
            if t.optional and t.is_bias() and not self._biased:
                continue
            shape = [axis_length(axis, sizes) for axis in t.axes]
            name = prefix + t.named(number, reverse).name
            names[t.named().name] = name
            *path, last = name.split(".")
            module = self
            for part in path:
                if not hasattr(module, part):
                    module.add_module(part, nn.Module())
                module = getattr(module, part)
            module.register_parameter(last, nn.Parameter(self._initial(t, shape)))
        if self._projected and not has_projection(present([t.named() for t in self.spec.tensors], names)):
            raise ValueError(f"preset {self.spec.name!r} has no projection, got proj_size={self.output_size}")
        return Weights(names, described(self.spec, self.eps if self.spec.normalises else None, tuple(names)))

    def _initial(self, t, shape) -> Tensor:
        """Initial values: gains 1, biases of normalised cells 0, all others uniform as in torch.nn.LSTM."""
        if all(use.part.startswith("gain") for use in t.uses()):
            return torch.ones(shape)
        if self.spec.normalises and not any(use.part.startswith("weight") for use in t.uses()):
            return torch.zeros(shape)
        bound = 1 / math.sqrt(self.units)
        return torch.empty(shape).uniform_(-bound, bound)

    def _layer(self, weights: Weights) -> Layer:
        return layer_of(weights.text, weights.tensors(self))

    def _parts(self, state) -> tuple[Tensor | None, Tensor | None]:
        """h and c of a given state; None for those that are not given or that the cell does not have."""
        if state is None:
            return None, None
        if self.kind != "LSTM":
            return state, None
        if not isinstance(state, (tuple, list)) or len(state) != 2:
            raise TypeError(f"the state must be a pair of tensors (h, c), got {type(state).__name__}")
        return state[0], state[1]

    @property
    def _widths(self) -> tuple[int, ...]:
        return (self.output_size, self.units) if self.kind == "LSTM" else (self.output_size,)

    def extra_repr(self) -> str:
        return f"{self.input_size}, {self.units}, preset={self.spec.name!r}"


def _check_integer(name: str, value, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")


def _wrong(x, shapes: str) -> TypeError | ValueError:
    """The error of an x that is no tensor of these shapes."""
    if not isinstance(x, Tensor):
        return TypeError(f"x must be a tensor, got {type(x).__name__}")
    return ValueError(f"x must have shape {shapes}, got {tuple(x.shape)}")


class _Cell(_Module):
    """Base of the cells; see `LSTMCell`."""

    def __init__(self, input_size: int, units: int | None = None, **options) -> None:
        super().__init__(input_size, units, **options)
        self._weights = self._weights_of(0, False, input_size)

    def to_layers(self) -> tuple[Layer, ...]:
        """The layer with the present weights, for `cnorm.Model`."""
        return (self._layer(self._weights),)

    def forward(self, x: Tensor, state=None):
        shape = x.shape if isinstance(x, Tensor) else ()
        if len(shape) not in (1, 2) or shape[-1] != self.input_size or shape[0] == 0:
            raise _wrong(x, f"(batch, {self.input_size}) or ({self.input_size},)")
        h, c = self._parts(state)
        if len(shape) == 1:
            h, c = (None if part is None else part[None] for part in (h, c))
            found = tuple(part[0] for part in call(self._weights, self, x[None], h, c, True))
        else:
            found = call(self._weights, self, x, h, c, True)
        return found if self.kind == "LSTM" else found[0]


class LSTMCell(_Cell):
    """One step of a long short-term memory by preset, called as torch.nn.LSTMCell: ``h, c = cell(x, (h, c))``.

    Parameters
    ----------
    input_size, units : int
        `hidden_size` is another name of `units`.
    preset : str or CellSpec
        Which cell: see docs/cells.md. Parameters have the names of the preset's checkpoints, as those of `LSTM`, so
        that the state dict of one loads into the other.
    eps : float, optional
        The preset's own if not given.
    proj_size : int
        Outputs of a projection, 0 for none; only for presets that have one.
    bias : bool
        False: leave out the biases that are optional in the preset.

    Notes
    -----
    x is float32 on the CPU, (batch, input_size) or (input_size,); without a state it starts from zeros. The bits are
    those of `LSTM` and of `cnorm.Stream`, and so are the gradients: those of the weights are summed over the steps in
    C, in the order of the calls. There are no second and no forward-mode derivatives.

    Raises
    ------
    TypeError, ValueError
        For another dtype, device or shape.
    """

    kind = "LSTM"


class GRUCell(_Cell):
    """One step of a gated recurrent unit by preset: ``h = cell(x, h)``; parameters as `LSTMCell`."""

    kind = "GRU"


class RNNCell(_Cell):
    """One step of a simple recurrent network by preset: ``h = cell(x, h)``; parameters as `LSTMCell`."""

    kind = "RNN"


class _Sequence(_Module):
    """Base of the modules for sequences; see `LSTM`."""

    def __init__(
        self, input_size: int, units: int | None = None, *, num_layers: int = 1, bidirectional: bool = False,
        batch_first: bool = False, dropout: float = 0.0, **options,
    ) -> None:  # fmt: skip
        super().__init__(input_size, units, **options)
        _check_integer("num_layers", num_layers, 1)
        if isinstance(dropout, bool) or not isinstance(dropout, (int, float)) or not 0 <= dropout <= 1:
            raise ValueError(f"dropout must be a probability, got {dropout!r}")
        self.num_layers, self.bidirectional, self.batch_first = num_layers, bidirectional, batch_first
        self.dropout = float(dropout)
        numbered = all("{" in t.name for t in self.spec.tensors)
        ways = (False, True)[: 1 + bidirectional]
        if bidirectional and not all("{reverse}" in t.name for t in self.spec.tensors):
            raise ValueError(f"preset {self.spec.name!r} has no names for a reverse direction: use two modules")
        self.ways = []  # [layers][directions]
        for i in range(num_layers):
            inputs = input_size if i == 0 else self.output_size * len(ways)
            prefix = "" if num_layers == 1 or numbered else f"layers.{i}."
            self.ways.append([self._weights_of(0 if prefix else i, way, inputs, prefix) for way in ways])

    def to_layers(self) -> tuple[Layer, ...]:
        """Layers with the present weights, for `cnorm.Model`."""
        cells = [[self._layer(weights) for weights in ways] for ways in self.ways]
        return tuple(ways[0] if len(ways) == 1 else Bidirectional(*ways) for ways in cells)

    def _run(self, x: Tensor, state: tuple, sizes: list[int] | None) -> tuple[Tensor, list[tuple]]:
        """All layers: x [steps, batch, inputs], or rows of a PackedSequence with these sizes -> y, the last states."""
        last = []
        for i, ways in enumerate(self.ways):
            results = []
            if i > 0 and self.dropout > 0 and self.training:
                x = functional.dropout(x, self.dropout)
            for j, weights in enumerate(ways):
                k = i * len(ways) + j
                start = [part if part is None or len(part) == 1 else part[k : k + 1] for part in state]
                if sizes is not None:
                    y, *end = self._segments(weights, x, start, sizes, j == 1)
                else:
                    given = x.flip(0) if j else x
                    y, *end = call(weights, self, given, *(*start, None)[:2], False)
                    y = y.flip(0) if j else y
                results.append(y)
                last.append(end)
            x = results[0] if len(results) == 1 else torch.cat(results, -1)
        if len(last) == 1:
            return x, last[0]
        return x, [torch.cat(parts) for parts in zip(*last, strict=True)]

    def _segments(self, weights: Weights, x: Tensor, state: list, sizes: list[int], reverse: bool) -> tuple:
        """One direction over a PackedSequence: a call for each run of steps with the same number of rows."""
        ends = [t for t in range(1, len(sizes) + 1) if t == len(sizes) or sizes[t] != sizes[t - 1]]
        spans = list(zip([0, *ends[:-1]], ends, strict=True))
        first = [
            x.new_zeros(1, sizes[0], n) if part is None else part for part, n in zip(state, self._widths, strict=True)
        ]
        now, results, done = [part[:, :0] for part in first], [], []
        for start, end in reversed(spans) if reverse else spans:
            batch, before = sizes[start], now[0].shape[1]
            if reverse or start == 0:  # rows that begin
                now = [torch.cat([part, new[:, before:batch]], 1) for part, new in zip(now, first, strict=True)]
            else:  # rows that have ended
                done.append([part[:, batch:] for part in now])
                now = [part[:, :batch] for part in now]
            given = x[sum(sizes[:start]) : sum(sizes[:end])].view(end - start, batch, -1)
            y, *now = call(weights, self, given.flip(0) if reverse else given, *(*now, None)[:2], False)
            results.append((y.flip(0) if reverse else y).flatten(0, 1))
        last = [torch.cat(parts, 1) for parts in zip(now, *reversed(done), strict=True)]
        return torch.cat(results[::-1] if reverse else results), *last

    def _frames(self, x: Tensor) -> Tensor:
        if not isinstance(x, Tensor) or x.ndim not in (2, 3) or x.shape[-1] != self.input_size:
            raise _wrong(x, f"(steps, batch, {self.input_size}) or (steps, {self.input_size})")
        x = x[:, None] if x.ndim == 2 else x.transpose(0, 1) if self.batch_first else x
        if x.shape[0] == 0 or x.shape[1] == 0:
            raise ValueError(f"x must have at least one step and one row, got {tuple(x.shape)}")
        return x

    def _checked(self, state, batch: int, single: bool) -> tuple:
        """The parts of the state, [layers * directions, batch, ...] each, or None."""
        if state is None:
            return (None,) * len(self._widths)
        count, found = self.num_layers * (1 + self.bidirectional), []
        for part, width in zip(self._parts(state), self._widths, strict=False):
            if part is not None and not isinstance(part, Tensor):
                raise TypeError(f"a state must be a tensor, got {type(part).__name__}")
            part = part[:, None] if single and part is not None else part
            if part is not None and part.shape != (count, batch, width):
                raise ValueError(f"a state must have shape {(count, batch, width)}, got {tuple(part.shape)}")
            found.append(part)
        return tuple(found)

    def forward(self, x: Tensor | PackedSequence, state=None):
        if isinstance(x, PackedSequence):
            return self._forward_packed(x, state)
        frames, single = self._frames(x), isinstance(x, Tensor) and x.ndim == 2
        y, last = self._run(frames, self._checked(state, frames.shape[1], single), None)
        if single:
            y, last = y[:, 0], [part[:, 0] for part in last]
        elif self.batch_first:
            y = y.transpose(0, 1)
        return y, tuple(last) if self.kind == "LSTM" else last[0]

    def _forward_packed(self, x: PackedSequence, state):
        sizes = x.batch_sizes.tolist()
        if x.data.ndim != 2 or x.data.shape[-1] != self.input_size:
            raise ValueError(f"x.data must have shape (rows, {self.input_size}), got {tuple(x.data.shape)}")
        parts = self._checked(state, sizes[0], False)
        if x.sorted_indices is not None:
            parts = tuple(None if part is None else part.index_select(1, x.sorted_indices) for part in parts)
        y, last = self._run(x.data, parts, sizes)
        if x.unsorted_indices is not None:
            last = [part.index_select(1, x.unsorted_indices) for part in last]
        y = PackedSequence(y, x.batch_sizes, x.sorted_indices, x.unsorted_indices)
        return y, tuple(last) if self.kind == "LSTM" else last[0]

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, num_layers={self.num_layers}"


class LSTM(_Sequence):
    """A long short-term memory by preset, called as torch.nn.LSTM: ``y, (h, c) = lstm(x)`` or ``lstm(x, (h, c))``.

    Parameters
    ----------
    input_size, units : int
        `hidden_size` is another name of `units`.
    preset : str or CellSpec
        Which cell: see docs/cells.md. Parameters have the names of the preset's checkpoints, so that state dicts can be
        exchanged in both directions; in a stack of cells whose names do not all have a number, they begin with
        ``layers.0.``, ``layers.1.``, ...
    num_layers : int
    bidirectional : bool
        Only for presets that have names for the reverse direction, such as "torch".
    batch_first : bool
    dropout : float
        Between the layers, in training mode, as torch.nn.LSTM.
    eps : float, optional
        The preset's own if not given.
    proj_size : int
        Outputs of a projection, 0 for none; only for presets that have one.
    bias : bool
        False: leave out the biases that are optional in the preset.

    Notes
    -----
    x is float32 on the CPU, (steps, batch, input_size), or (steps, input_size) for one sequence, or a PackedSequence.
    Gradients are those of cnorm_train.h: the same bits on every machine. There are no second and no forward-mode
    derivatives.
    """

    kind = "LSTM"


class GRU(_Sequence):
    """A gated recurrent unit by preset, called as torch.nn.GRU; parameters as `LSTM`."""

    kind = "GRU"


class RNN(_Sequence):
    """A simple recurrent network by preset, called as torch.nn.RNN; parameters as `LSTM`."""

    kind = "RNN"
