"""Cells as PyTorch operators, for torch.compile, torch.export and other tracers; `steps` has the same in eager mode."""

from __future__ import annotations

import functools
import json
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from cnorm import _core
from cnorm.cells.parameters import add_gradients
from cnorm.cells.presets import PRESETS
from cnorm.cells.specs import CellSpec, spec_from_json, spec_to_json
from cnorm.layers import CELLS
from cnorm.layers.base import Layer
from cnorm.layers.cells import with_values
from cnorm.layers.chain import flat
from cnorm.torch.arrays import array, tensor

__all__ = ["cell_of", "described", "layer_of", "packed_cell", "refuse_onnx_export"]

KEPT_BYTES = 64 << 20  # of weights that the operators keep packed


def described(spec: CellSpec, eps: float | None, names: tuple[str, ...]) -> str:
    """A cell as JSON, which a PyTorch operator can take: its spec, eps and the names of its weights in their order."""
    known = PRESETS.get((spec.kind, spec.name)) == spec
    cell = {"preset": spec.name} if known else {"spec": spec_to_json(spec)}
    return json.dumps({"kind": spec.kind, **cell, "eps": eps, "names": names})


@functools.lru_cache
def cell_of(text: str):
    """The class of a described cell, its spec, eps and the names of its weights."""
    entry = json.loads(text)
    spec = PRESETS[entry["kind"], entry["preset"]] if "preset" in entry else spec_from_json(entry["spec"])
    return CELLS[entry["kind"]], spec, entry["eps"], tuple(entry["names"])


def _arrays(text: str, weights: list[Tensor]) -> dict[str, np.ndarray]:
    names = cell_of(text)[3]
    return {name: array(w, f"weights[{name!r}]", torch.float32) for name, w in zip(names, weights, strict=True)}


def layer_of(text: str, weights: list[Tensor]) -> Layer:
    """The described cell with the present values of these tensors."""
    kind, spec, eps, _ = cell_of(text)
    return kind(_arrays(text, weights), preset=spec, eps=eps)


class Packed(NamedTuple):
    """A cell and its packed weights; neither is changed."""

    layer: Layer
    network: _core.Network

    def tape(self, steps: int, batch: int, memory: np.ndarray | None = None) -> _core.Tape:
        return _core.Tape(flat([self.layer], self.layer.input_size), steps, batch, self.network, memory)


_kept: dict[tuple, Packed] = {}  # by the cell, addresses and shapes of the weights; those used last are at the end


def packed_cell(cell: str, weights: list[Tensor]) -> Packed:
    """The cell with these weights, packed; the last result is used again while all weights have the same bits.

    The versions of tensors (`Tensor._version`) would not tell: writes through `Tensor.data` or `numpy()` do not count.
    """
    place = cell, *((w.data_ptr(), *w.shape) for w in weights)
    last, arrays = _kept.pop(place, None), _arrays(cell, weights)
    if last is None:
        layer = layer_of(cell, weights)
    elif all(_core.same_bits(array, last.layer.weights[name]) for name, array in arrays.items()):
        _kept[place] = last
        return last
    else:
        layer = with_values(last.layer, arrays)
    _kept[place] = packed = Packed(layer, _core.Network(flat([layer], layer.input_size), b""))
    # of lists, which other threads, that call this too, do not change
    while len(kept := list(_kept)) > 1 and sum(2 * p.network.nbytes for p in list(_kept.values())) > KEPT_BYTES:
        _kept.pop(kept[0], None)
    return packed


def _slices(tape: _core.Tape) -> list[tuple[slice, slice]]:
    """Slices of h and c: in a row of the tape's state, which is padded, and in one of the operator's, which is not."""
    places, at = [], 0
    for _, units, start in tape.state_arrays:
        places.append((slice(start, start + units), slice(at, at + units)))
        at += units
    return places


def refuse_onnx_export(cell: str) -> None:
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
    refuse_onnx_export(cell)
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
    kind, spec, eps, names = cell_of(cell)
    blank = {name: np.zeros(shape, np.float32) for name, shape in zip(names, shapes, strict=True)}
    layer = kind(blank, preset=spec, eps=eps)
    tape = _core.Tape(flat([layer], layer.input_size), 1, 1)
    return layer.input_size, layer.output_size, tape.memory.size


def _sizes_of(cell: str, weights: list[Tensor]) -> tuple[int, int, int]:
    return _sizes(cell, tuple(tuple(int(n) for n in w.shape) for w in weights))


@_recurrent.register_fake
def _(x, state, weights, cell):
    refuse_onnx_export(cell)
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
    add_gradients(layer.gradient_targets(into), tape.gradients[0])
    first = np.concatenate([tape.dstate[:, own] for own, _ in _slices(tape)], 1)
    return tensor(dx), tensor(first), [tensor(into[name]) for name in cell_of(cell)[3]]


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
