"""Cells in eager mode: packed weights as one node of autograd, and the calls of a cell as nodes behind it.

Each call adds to the sums of its backward pass, in C. The node of the weights, which autograd runs after the calls,
takes the gradients from there: hooks, `autograd.grad` and DistributedDataParallel see one gradient per backward pass.
"""

from __future__ import annotations

import functools
import weakref

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd import Function, forward_ad

from cnorm import _core
from cnorm.layers import Layer, with_values
from cnorm.torch.arrays import array, refuse_transforms, refuse_vmap
from cnorm.torch.operators import layer_of

__all__ = ["Weights", "call"]


PLAIN = (Tensor, nn.Parameter)
CPU = torch.device("cpu")


def _empty(shape: tuple, like: Tensor | None = None) -> Tensor:
    """A new tensor; `like`, what `_data` has returned for this shape, saves 2 us of 3."""
    return torch.empty(shape, dtype=torch.float32, device=CPU) if like is None else torch.empty_like(like)


class Packed:
    """A version of a cell's weights, packed, with its node in the graph."""

    def __init__(self, watched: _core.Watched, cell: _core.TrainedCell, blanks: list) -> None:
        self.watched, self.cell, self.blanks = watched, cell, blanks  # blanks: see `_plan`
        self.node = None  # the output of `_Pack`, while any weight requires a gradient
        self.passes = weakref.WeakValueDictionary()  # the `Sums` of each backward pass that has reached a call

    def need_node(self) -> Tensor | None:
        if self.node is None and any(self.watched.needs):
            self.node = _Pack.apply(self, *self.watched.tensors)
        return self.node

    def check_versions(self) -> None:
        i = self.watched.changed_version()
        if i >= 0:
            t, name = self.watched.tensors[i], list(self.cell.layer.weights)[i]
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"{name} {list(t.shape)} is at version {t._version}; expected version {self.watched.versions[i]}"
            )


class Weights:
    """The tensors of one cell of a module, by name, and what was packed from them last."""

    def __init__(self, names: dict[str, str], text: str) -> None:
        self.names, self.text = names, text  # names: of the cell -> in the module; text: `operators.described`
        self._paths = [(name.split(".")[:-1], name.rsplit(".", 1)[-1]) for name in names.values()]
        self._packed: Packed | None = None

    def __getstate__(self):
        return self.__dict__ | {"_packed": None}

    def tensors(self, module: nn.Module) -> list[Tensor]:
        """The present tensors: parameters, or what pruning, parametrization or `functional_call` have put there."""
        found = []
        for path, last in self._paths:
            owner = module
            for part in path:
                owner = owner._modules[part]
            tensor = owner._parameters.get(last)
            found.append(getattr(owner, last) if tensor is None else tensor)
        return found

    def packed(self, module: nn.Module) -> Packed:
        """The packed weights; the last ones are used again while no tensor has changed."""
        tensors, last = self.tensors(module), self._packed
        if last is None or not last.watched.unchanged(tensors):
            self._packed = last = _repacked(self.text, dict(zip(self.names, tensors, strict=True)), last)
        return last


def _repacked(text: str, tensors: dict[str, Tensor], last: Packed | None) -> Packed:
    """Pack again, as far as values or shapes differ from those of `last`."""
    arrays = {name: array(t, f"weights[{name!r}]", torch.float32) for name, t in tensors.items()}
    if last is not None and any(a.shape != last.cell.layer.weights[name].shape for name, a in arrays.items()):
        last = None
    if last is None:
        layer = layer_of(text, list(tensors.values()))
        plan, blanks = _plan(layer)
        cell = _core.TrainedCell(layer, plan)
    elif all(_core.same_bits(a, last.cell.layer.weights[name]) for name, a in arrays.items()):
        cell, blanks = last.cell, last.blanks
    else:
        cell = _core.TrainedCell(with_values(last.cell.layer, arrays), last.cell.plan, last.cell)
        blanks = last.blanks
    values = [cell.layer.weights[name] for name in tensors]
    plain = all(type(t) in PLAIN for t in tensors.values())
    return Packed(_core.Watched(list(tensors.values()), values, plain), cell, blanks)


def _plan(layer: Layer) -> tuple[np.ndarray, list]:
    """Where the pieces of the packed gradients go, for `_core.TrainedCell`; and how the tensors for them are made.

    That is (function, its argument) for each tensor: the pieces fill not all of those that begin as zeros.
    """
    into = {name: np.zeros_like(w) for name, w in layer.weights.items()}
    packed = _core.Tape([(layer, layer.output_size)], 1, 1).gradients[0]
    rows, seen = [], set()
    for view, name, gate in layer.gradient_targets(into):
        if name not in packed:
            continue
        field = packed[name]
        source = field if gate is None else field[gate]
        number = next(i for i, whole in enumerate(into.values()) if np.shares_memory(view, whole))
        to = (number, (_address(view) - _address(list(into.values())[number])) // 4)
        view, source = np.atleast_2d(view), np.atleast_2d(source)
        strides = [stride // 4 for stride in (*view.strides, source.strides[0])]
        offset = (_address(source) - _address(field)) // 4
        rows.append([*to, _core.FIELDS_OF_CELLS.index(name), offset, *view.shape, *strides, to in seen])
        seen.add(to)
        view[...] = 1
    one = _empty(())
    makes = [torch.empty_like if whole.all() else torch.zeros_like for whole in into.values()]
    return np.array(rows, np.int64), [
        (make, one.expand(whole.shape)) for make, whole in zip(makes, into.values(), strict=True)
    ]


def _address(a: np.ndarray) -> int:
    return a.__array_interface__["data"][0]


class _Pack(Function):
    """The weights of a `Packed`: its output stands for them in the graph, its gradient carries the `Sums` of a pass."""

    @staticmethod
    def forward(ctx, packed: Packed, *weights: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.needs, ctx.blanks = packed.watched.needs, packed.blanks
        return torch.zeros((), dtype=torch.float32, device=CPU)

    @staticmethod
    def backward(ctx, carrier):
        if carrier is None:
            return (None, *[None] * len(ctx.needs))
        results = [make(like) if need else None for (make, like), need in zip(ctx.blanks, ctx.needs, strict=True)]
        carrier.sums.gradients(tuple([0 if r is None else r.data_ptr() for r in results]))
        return (None, *(_first_order(results) if torch.is_grad_enabled() else results))


class _Run(Function):
    """A call: x [steps, batch, inputs] and the state -> (y, the last state), or of a single step the state alone."""

    @staticmethod
    def forward(ctx, packed: Packed, x: Tensor, h: Tensor | None, c: Tensor | None, single: bool, node: Tensor | None):
        ctx.set_materialize_grads(False)
        results, recording = _forward(packed, x, h, c, single)
        ctx.packed, ctx.single, ctx.shape = packed, single, x.shape
        if torch._C._autograd._top_saved_tensors_default_hooks(True) is None:
            ctx.recording = recording
        else:  # checkpointing or offloading: what is kept goes through the hooks, and the tape is recorded again
            ctx.recording, ctx.number = None, recording.number
            ctx.save_for_backward(x, h, c)
        return results

    @staticmethod
    def backward(ctx, *gradients):
        packed, recording, shape, layer = ctx.packed, ctx.recording, ctx.shape, ctx.packed.cell.layer
        if recording is None:
            recording = _forward(packed, *ctx.saved_tensors, ctx.single)[1]
            recording.number = ctx.number
        sums, carrier = _sums_of_this_pass(packed)
        of_h, of_c = (shape[-2], layer.output_size), (shape[-2], layer.units)
        dc = gradients[-1] if layer.kind == "LSTM" else None
        dy, dh = (gradients[0], None) if ctx.single else gradients[:2]
        dy = _data(dy, "dy", (*shape[:-1], layer.output_size))
        dh, dc = _data(dh, "dh", of_h), _data(dc, "dc", of_c)
        _, of_x, *of_state, _, _ = ctx.needs_input_grad
        dx = _empty(shape) if of_x else None
        first_dh, first_dc = (
            _empty(s, like) if need else None
            for s, like, need in zip((of_h, of_c), (dy if ctx.single else dh, dc), of_state, strict=True)
        )
        recording.backward(sums, *[0 if t is None else t.data_ptr() for t in (dy, dh, dc, dx, first_dh, first_dc)])
        if torch.is_grad_enabled():
            dx, first_dh, first_dc = _first_order([dx, first_dh, first_dc])
        return None, dx, first_dh, first_dc, None, carrier


def _sums_of_this_pass(packed: Packed) -> tuple[_core.Sums, Tensor | None]:
    """The `Sums` that the calls of this backward pass share; for the first call also the gradient that carries them."""
    task = torch._C._current_graph_task_id()
    sums = packed.passes.get(task)
    if sums is not None:
        return sums, None
    packed.check_versions()
    sums = packed.cell.sums()
    if packed.node is None:
        return sums, None
    carrier = torch.zeros((), dtype=torch.float32, device=CPU)
    carrier.sums = packed.passes[task] = sums
    return sums, carrier


class _FirstOrder(Function):
    """The gradients themselves; an error if they are differentiated."""

    @staticmethod
    def forward(ctx, *gradients: Tensor):
        return gradients

    @staticmethod
    def backward(ctx, *_):
        raise RuntimeError("cnorm.torch has first-order gradients only: its backward pass can't be differentiated")


def _first_order(gradients: list[Tensor | None]) -> list[Tensor | None]:
    """Gradients that say so when they are differentiated, for create_graph=True."""
    found = iter(_FirstOrder.apply(*[g.requires_grad_() for g in gradients if g is not None]))
    return [None if g is None else next(found) for g in gradients]


def _data(t: Tensor | None, name: str, shape: tuple) -> Tensor | None:
    """The tensor, checked, contiguous and of a type whose methods are PyTorch's own."""
    if t is None:
        return None
    if type(t) not in PLAIN or t.dtype is not torch.float32 or not t.is_cpu or t.is_neg() or not t.data_ptr():
        t = torch.from_numpy(array(t, name, torch.float32))
    if t.shape != shape:
        raise ValueError(f"{name} must have shape {tuple(shape)} for these weights, got {tuple(t.shape)}")
    return t if t.is_contiguous() else t.contiguous()


def _forward(packed: Packed, x: Tensor, h: Tensor | None, c: Tensor | None, single: bool):
    """The results of `_Run` and the recording."""
    layer = packed.cell.layer
    steps, batch = (1, x.shape[0]) if single else x.shape[:2]
    x = _data(x, "x", (batch, layer.input_size) if single else (steps, batch, layer.input_size))
    of_h, of_c = (batch, layer.output_size), (batch, layer.units)
    h, c = _data(h, "h", of_h), _data(c, "c", of_c)
    last = _empty(of_h, h)
    last_c = _empty(of_c, c) if layer.kind == "LSTM" else None
    y = last if single else _empty((steps, *of_h))
    given = tuple([0 if t is None else t.data_ptr() for t in (x, h, c)])
    to = tuple([0 if t is None else t.data_ptr() for t in (y, None if single else last, last_c)])
    recording = packed.cell.run(steps, batch, given, to)
    results = (last,) if single else (y, last)
    return results if last_c is None else (*results, last_c), recording


def call(
    weights: Weights, module: nn.Module, x: Tensor, h: Tensor | None, c: Tensor | None, single: bool
) -> tuple[Tensor, ...]:
    """A call of a module's cell, as `_Run`; it is a node of the graph only if a gradient can be asked for."""
    if torch.compiler.is_compiling():
        return _traced(weights, module, x, h, c, single)
    if forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active():
        given = (x, h, c, *weights.tensors(module))
        refuse_transforms(*given)
        refuse_vmap(*given)
    if torch._C._len_torch_dispatch_stack() or torch._C._get_tracing_state():
        return _traced(weights, module, x, h, c, single)
    if x.dtype is not torch.float32 and torch.is_autocast_enabled("cpu"):
        x, h, c = (None if t is None else t.float() for t in (x, h, c))
    packed = weights.packed(module)
    if torch.is_grad_enabled():
        node = packed.need_node()
        if node is not None or any(t is not None and t.requires_grad for t in (x, h, c)):
            return _Run.apply(packed, x, h, c, single, node)
    return _forward(packed, x, h, c, single)[0]


def _traced(weights: Weights, module, x: Tensor, h: Tensor | None, c: Tensor | None, single: bool):
    """The same by the operator, which tracers can represent."""
    tensors = [functools.reduce(getattr, name.split("."), module) for name in weights.names.values()]
    widths = (module.output_size, module.units) if module.kind == "LSTM" else (module.output_size,)
    x = x[None] if single else x
    parts = [x.new_zeros(x.shape[1], n) if t is None else t for t, n in zip((h, c), widths, strict=False)]
    y, last, _ = torch.ops.cnorm.recurrent(x, torch.cat(parts, -1), tensors, weights.text)
    last = torch.split(last, widths, -1)
    return last if single else (y, *last)
