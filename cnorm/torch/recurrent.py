"""Recurrent modules by preset, for sequences and for single steps."""

from __future__ import annotations

import warnings
from dataclasses import replace

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn import functional
from torch.nn.utils.rnn import PackedSequence

from cnorm.cells.specs import CellSpec
from cnorm.layers import Bidirectional
from cnorm.layers.base import Layer
from cnorm.torch.arrays import check_made
from cnorm.torch.parameters import NUMBER, Module, check_bool, check_integer, with_nonlinearity
from cnorm.torch.steps import Weights, call

__all__ = ["GRU", "LSTM", "RNN", "GRUCell", "LSTMCell", "RNNCell"]


def _wrong(x, shapes: str) -> TypeError | ValueError:
    """The error of an x that is no tensor of these shapes."""
    if not isinstance(x, Tensor):
        return TypeError(f"x must be a tensor, got {type(x).__name__}")
    return ValueError(f"x must have shape {shapes}, got {tuple(x.shape)}")


class _Cell(Module):
    """Base of the cells; see `LSTMCell`."""

    def __init__(
        self, input_size: int, hidden_size: int | None = None, bias: bool = True, device=None, dtype=None, *,
        preset: str | CellSpec | None = None, **options,
    ) -> None:  # fmt: skip
        super().__init__(input_size, hidden_size, bias, preset=preset, **options)
        check_made(device, dtype, torch.float32)
        self._weights = self._weights_of(input_size, device)
        self.ways = [[self._weights]]
        self._finish(bias)

    def _name(self, t, number: int, reverse: bool) -> str:
        return replace(t, name=t.name.removesuffix(NUMBER)).named(number, reverse).name

    def to_layers(self) -> tuple[Layer, ...]:
        """The layer with the present weights, for `cnorm.Model`."""
        return (self._layer(self._weights),)

    def forward(self, input: Tensor, hx=None):
        x, state = input, hx
        shape = x.shape if isinstance(x, Tensor) else ()
        if len(shape) not in (1, 2) or shape[-1] != self.input_size:
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
    input_size, hidden_size : int
    bias : bool
        False: leave out the biases that are optional in the preset.
    device, dtype : optional
        The CPU (or "meta", for weights that come later), and torch.float32.
    preset : str or CellSpec
        Which cell, see docs/cells.md; there is no default: "torch" is that of torch.nn. Parameters have the names of
        the preset's checkpoints, of "torch" those of torch.nn.LSTMCell. The state dict of a single layer of `LSTM` or
        torch.nn.LSTM loads into a cell, and back.
    eps : float, optional
        The preset's own if not given.
    units : int, optional
        Another name of `hidden_size`.
    proj_size : int
        Outputs of a projection, 0 for none; only for presets that have one.

    Notes
    -----
    The arguments of a call are input and hx, here x and the state. x is float32 on the CPU, (batch, input_size) or
    (input_size,); without a state it starts from zeros. The bits are those of `LSTM` and of `cnorm.Stream`, and so are
    the gradients: those of the weights are summed over the steps in C, in the order of the calls. There are no second
    and no forward-mode derivatives.

    Raises
    ------
    TypeError, ValueError
        For another dtype, device or shape, and for arguments that the preset has no use for.
    """

    kind = "LSTM"


class GRUCell(_Cell):
    """One step of a gated recurrent unit by preset: ``h = cell(x, h)``; parameters as `LSTMCell`."""

    kind = "GRU"


class RNNCell(_Cell):
    """One step of a simple recurrent network by preset: ``h = cell(x, h)``; parameters as `LSTMCell`, and one more.

    Parameters
    ----------
    nonlinearity : str, optional
        Behind `bias`, as in torch.nn.RNNCell: "relu" is `preset` with _relu behind its name, where there is one.
    """

    kind = "RNN"

    def __init__(
        self, input_size: int, hidden_size: int | None = None, bias: bool = True, nonlinearity: str | None = None,
        device=None, dtype=None, *, preset: str | CellSpec | None = None, **options,
    ) -> None:  # fmt: skip
        preset = with_nonlinearity(preset, nonlinearity)
        super().__init__(input_size, hidden_size, bias, device, dtype, preset=preset, **options)

    @property
    def nonlinearity(self) -> str | tuple:
        return self.spec.activation


class _Sequence(Module):
    """Base of the modules for sequences; see `LSTM`."""

    def __init__(
        self, input_size: int, hidden_size: int | None = None, num_layers: int = 1, bias: bool = True,
        batch_first: bool = False, dropout: float = 0.0, bidirectional: bool = False, proj_size: int = 0,
        device=None, dtype=None, *, preset: str | CellSpec | None = None, **options,
    ) -> None:  # fmt: skip
        super().__init__(input_size, hidden_size, bias, preset=preset, proj_size=proj_size, **options)
        check_made(device, dtype, torch.float32)
        check_integer("num_layers", num_layers, 1)
        check_bool("batch_first", batch_first)
        check_bool("bidirectional", bidirectional)
        if isinstance(dropout, bool) or not isinstance(dropout, (int, float)) or not 0 <= dropout <= 1:
            raise ValueError(f"dropout must be a probability, got {dropout!r}")
        if dropout > 0 and num_layers == 1:
            warnings.warn(f"dropout acts between layers, and num_layers is 1: got dropout={dropout}", stacklevel=2)
        self.num_layers, self.bidirectional, self.batch_first = num_layers, bidirectional, batch_first
        self.dropout = float(dropout)
        numbered = all("{" in t.name for t in self.spec.tensors)
        ways = (False, True)[: 1 + bidirectional]
        for i in range(num_layers):
            inputs = input_size if i == 0 else self.output_size * len(ways)
            prefix = "" if num_layers == 1 or numbered else f"layers.{i}."
            number = 0 if prefix else i
            self.ways.append([self._weights_of(inputs, device, number, way, prefix) for way in ways])
        self._finish(bias)

    @property
    def mode(self) -> str:
        """As of torch.nn's modules: "LSTM", "GRU", "RNN_TANH" or "RNN_RELU"."""
        return f"RNN_{str(self.spec.activation).upper()}" if self.kind == "RNN" else self.kind

    @property
    def all_weights(self) -> list[list[Tensor]]:
        """The parameters of each layer and direction."""
        return [weights.tensors(self) for ways in self.ways for weights in ways]

    def flatten_parameters(self) -> None:
        """Do nothing: the weights are packed at a call, see docs/training.md. As of torch.nn's modules."""

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
        if x.shape[0] == 0:
            raise ValueError(f"x must have at least one step, got {tuple(x.shape)}")
        return x

    def _checked(self, state, batch: int, single: bool) -> tuple:
        """The parts of the state, [layers * directions, batch, ...] each, or None."""
        if state is None:
            return (None,) * len(self._widths)
        count, found = self.num_layers * (1 + self.bidirectional), []
        for part, width in zip(self._parts(state), self._widths, strict=False):
            if part is not None and not isinstance(part, Tensor):
                raise TypeError(f"a state must be a tensor, got {type(part).__name__}")
            shape = (count, width) if single else (count, batch, width)
            if part is not None and part.shape != shape:
                raise ValueError(f"a state must have shape {shape}, got {tuple(part.shape)}")
            found.append(part[:, None] if single and part is not None else part)
        return tuple(found)

    def forward(self, input: Tensor | PackedSequence, hx=None):
        x, state = input, hx
        if isinstance(x, PackedSequence):
            return (self._untraced_packed if is_compiling() else self._forward_packed)(x, state)
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

    # Each batch has other lengths, so a graph of its calls would be compiled again for each: minutes for 19 steps.
    _untraced_packed = torch._disable_dynamo(_forward_packed)

    def extra_repr(self) -> str:
        given = {name: getattr(self, name) for name in ("batch_first", "dropout", "bidirectional")}
        given |= {"bias": False} if self.bias is False else {}
        others = "".join(f", {name}={value}" for name, value in given.items() if value or name == "bias")
        return f"{super().extra_repr()}, num_layers={self.num_layers}{others}"


class LSTM(_Sequence):
    """A long short-term memory by preset, called as torch.nn.LSTM: ``y, (h, c) = lstm(x)`` or ``lstm(x, (h, c))``.

    Parameters
    ----------
    input_size, hidden_size : int
    num_layers : int
    bias : bool
        False: leave out the biases that are optional in the preset.
    batch_first : bool
    dropout : float
        Between the layers, in training mode, as torch.nn.LSTM.
    bidirectional : bool
        The parameters of the reverse direction end in ``_reverse``.
    proj_size : int
        Outputs of a projection, 0 for none; only for presets that have one.
    device, dtype : optional
        The CPU (or "meta", for weights that come later), and torch.float32.
    preset : str or CellSpec
        Which cell, see docs/cells.md; there is no default: "torch" is that of torch.nn. Parameters have the names of
        the preset's checkpoints, so that state dicts can be exchanged in both directions; in a stack of cells whose
        names do not all have a number, they begin with ``layers.0.``, ``layers.1.``, ...
    eps : float, optional
        The preset's own if not given.
    units : int, optional
        Another name of `hidden_size`.

    Notes
    -----
    The arguments of a call are input and hx, here x and the state. x is float32 on the CPU, (steps, batch, input_size),
    or (steps, input_size) for one sequence, or a PackedSequence. Gradients are those of cnorm_train.h: the same bits on
    every machine. There are no second and no forward-mode derivatives.

    Raises
    ------
    TypeError, ValueError
        For another dtype, device or shape, and for arguments that the preset has no use for.
    """

    kind = "LSTM"


class GRU(_Sequence):
    """A gated recurrent unit by preset, called as torch.nn.GRU; parameters as `LSTM`."""

    kind = "GRU"


class RNN(_Sequence):
    """A simple recurrent network by preset, called as torch.nn.RNN; parameters as `LSTM`, and one more.

    Parameters
    ----------
    nonlinearity : str, optional
        Behind `num_layers`, as in torch.nn.RNN: "relu" is `preset` with _relu behind its name, where there is one.
    """

    kind = "RNN"

    def __init__(
        self, input_size: int, hidden_size: int | None = None, num_layers: int = 1, nonlinearity: str | None = None,
        bias: bool = True, batch_first: bool = False, dropout: float = 0.0, bidirectional: bool = False,
        proj_size: int = 0, device=None, dtype=None, *, preset: str | CellSpec | None = None, **options,
    ) -> None:  # fmt: skip
        super().__init__(
            input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional, proj_size, device, dtype,
            preset=with_nonlinearity(preset, nonlinearity), **options,
        )  # fmt: skip

    @property
    def nonlinearity(self) -> str | tuple:
        return self.spec.activation
