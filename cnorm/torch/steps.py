"""Cells in eager mode: packed weights as one node of autograd, and the calls of a cell as nodes behind it.

Each call adds to the sums of its backward pass, in C. The node of the weights, which autograd runs after the calls,
takes the gradients from there: hooks, `autograd.grad` and DistributedDataParallel see one gradient per backward pass.
"""

from __future__ import annotations

import functools

import numpy as np
import torch
from torch import Tensor, nn
from torch._C import _are_functorch_transforms_active, _current_graph_task_id, _get_tracing_state
from torch._C._autograd import _get_current_graph_task_keep_graph as _keeps_graph
from torch.autograd import Function, forward_ad
from torch.compiler import is_compiling

from cnorm import _core
from cnorm.layers.base import Layer
from cnorm.layers.cells import with_values
from cnorm.torch.arrays import FIRST_ORDER, array, refuse_transforms, refuse_vmap
from cnorm.torch.operators import layer_of

__all__ = ["Weights", "call"]


FREED = (
    "trying to backward through the graph a second time: give backward retain_graph=True the first time, "
    "or detach the state that a cell begins with"
)
FLOAT = torch.float32
ZERO = torch.zeros((), dtype=FLOAT, device=torch.device("cpu"))


def _readable(t: Tensor, name: str, shape: tuple) -> Tensor:
    """A tensor that the kernels can't read as it is: a copy that they can, or an error."""
    t = torch.from_numpy(array(t, name, torch.float32))
    if t.shape != shape:
        raise ValueError(f"{name} must have shape {shape} for these weights, got {tuple(t.shape)}")
    return t


TENSORS = (Tensor, nn.Parameter), torch.float32, (ZERO.expand, torch.empty_like, _readable)
EXCHANGE = getattr(Tensor, "__dlpack_c_exchange_api__", None)  # since PyTorch 2.10
_core.use_tensors(*TENSORS, EXCHANGE)


class Packed:
    """A version of a cell's weights, packed, with its node in the graph."""

    def __init__(self, watched: _core.Watched, cell: _core.TrainedCell, blanks: list) -> None:
        self.watched, self.cell, self.blanks = watched, cell, blanks  # blanks: see `_plan`
        self.node = None  # the output of `_Pack`, while any weight requires a gradient

    def need_node(self) -> Tensor | None:
        if self.node is None and any(self.watched.needs):
            self.node = _Pack.apply(self, *self.watched.tensors)
        return self.node

    def check_versions(self) -> None:
        changed = self.watched.changed_version()
        if changed is not None:
            i, version = changed
            t, name = self.watched.tensors[i], list(self.cell.layer.weights)[i]
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"{name} {list(t.shape)} is at version {t._version}; expected version {version}"
            )


class Weights:
    """The tensors of one cell of a module, by name, and what was packed from them last."""

    def __init__(self, names: dict[str, str], text: str) -> None:
        self.names, self.text = names, text  # names: of the cell -> in the module; text: `operators.described`
        self._paths = [tuple(name.split(".")) for name in names.values()]
        self._packed: Packed | None = None

    def __getstate__(self):
        return self.__dict__ | {"_packed": None}

    def tensors(self, module: nn.Module) -> list[Tensor]:
        return _core.tensors_at(module, self._paths)

    def packed(self, module: nn.Module, graph: bool) -> Packed:
        """The packed weights; the last ones are used again while no tensor has changed."""
        tensors, last = self.tensors(module), self._packed
        if last is None or not last.watched.unchanged(tensors, graph):
            self._packed = last = _repacked(self.text, dict(zip(self.names, tensors, strict=True)), last)
        return last


def _repacked(text: str, tensors: dict[str, Tensor], last: Packed | None) -> Packed:
    """Pack again, as far as values or shapes differ from those of `last`."""
    found = list(tensors.values())
    cell = None if last is None else last.cell.again(found)
    blanks = None if last is None else last.blanks
    if cell is None:
        arrays = {name: array(t, f"weights[{name!r}]", torch.float32) for name, t in tensors.items()}
        if last is not None and all(a.shape == last.cell.layer.weights[name].shape for name, a in arrays.items()):
            cell = _core.TrainedCell(with_values(last.cell.layer, arrays), last.cell.plan, last.cell.whole, last.cell)
        else:
            layer = layer_of(text, found)
            plan, blanks = _plan(layer)
            cell = _core.TrainedCell(layer, *plan)
            cell.try_repacking(*_trial_layers(layer))
    return Packed(_core.Watched(found, cell.values), cell, blanks)


def _trial_layers(layer: Layer) -> tuple[Layer, Layer]:
    """The layer with weights 0, and with random weights, some of which are -0."""
    rng = np.random.default_rng(0)
    zeros = {name: np.zeros(w.shape, np.float32) for name, w in layer.weights.items()}
    trial = {
        name: np.where(rng.random(w.shape) < 0.1, np.float32(-0.0), rng.standard_normal(w.shape, np.float32))
        for name, w in zeros.items()
    }
    return with_values(layer, zeros), with_values(layer, trial)


def _plan(layer: Layer) -> tuple[tuple[np.ndarray, dict], list]:
    """Where packed weights and gradients go, `plan` and `whole` of `_core.TrainedCell`; how tensors are made for them.

    The latter is (function, its argument) for each tensor: the pieces fill not all of those that begin as zeros.
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
    makes = [torch.empty_like if filled.all() else torch.zeros_like for filled in into.values()]
    blanks = [(make, ZERO.expand(filled.shape)) for make, filled in zip(makes, into.values(), strict=True)]
    plan = np.array(rows, np.int64)
    return (plan, _whole(plan, list(into.values()), packed)), blanks


def _whole(plan: np.ndarray, tensors: list[np.ndarray], packed: dict[str, np.ndarray]) -> dict[int, int]:
    """The numbers of tensors that are a field as it is, by the rows of a plan, and of their fields."""
    found = {}
    for field, name in enumerate(_core.FIELDS_OF_CELLS):
        pieces = plan[plan[:, 2] == field]
        number, at, _, offset, rows, cols, row, col, of_row, added = pieces.T
        as_it_is = (
            (number == number[:1]) & (at == offset) & (row == cols) & (of_row == cols) & (col == 1) & (added == 0)
        )
        if len(pieces) and as_it_is.all() and (rows * cols).sum() == packed[name].size == tensors[number[0]].size:
            found[int(number[0])] = field
    return found


def _address(a: np.ndarray) -> int:
    return a.__array_interface__["data"][0]


class _Pack(Function):
    """The weights of a `Packed`: its output stands for them in the graph, its gradient carries the `Sums` of a pass."""

    @staticmethod
    def forward(ctx, packed: Packed, *weights: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.weights = weights
        ctx.blanks = [blank if need else None for blank, need in zip(packed.blanks, packed.watched.needs, strict=True)]
        return ZERO.clone()

    @staticmethod
    def backward(ctx, carrier):
        if carrier is None:
            return (None, *[None] * len(ctx.blanks))
        sums = carrier.sums
        results, given = sums.gradients(ctx.blanks), sums.given
        return (None, *(_first_order(results, *given, *ctx.weights) if torch.is_grad_enabled() else results))


class _Run(Function):
    """A call, see `_core.TrainedCell.run`: x and the state -> (y, the last state), of a single step the state alone."""

    @staticmethod
    def forward(ctx, packed: Packed, x: Tensor, h: Tensor | None, c: Tensor | None, single: bool, node: Tensor | None):
        ctx.set_materialize_grads(False)
        results, recording = packed.cell.run(x, h, c, single)
        ctx.packed, ctx.recording = packed, recording
        if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
            # checkpointing or offloading: what is kept goes through the hooks, and the tape is recorded again
            ctx.recording, ctx.number, ctx.single = None, recording.number, single
            ctx.save_for_backward(x, h, c)
        else:
            ctx.given = x, h, c  # for `_first_order`, which has no use for their values
        return results

    @staticmethod
    def backward(ctx, *gradients):
        packed, recording = ctx.packed, ctx.recording
        if packed is None:
            raise RuntimeError(FREED)
        if not _keeps_graph():
            ctx.packed = ctx.recording = None
        given = ctx.saved_tensors if recording is None else ctx.given
        if not _keeps_graph():
            ctx.given = None
        if recording is None:
            recording = packed.cell.run(*given, ctx.single)[1]
            recording.number = ctx.number
        sums, carrier = _sums_of_this_pass(packed)
        results = recording.backward(sums, gradients, ctx.needs_input_grad[1:4])
        if torch.is_grad_enabled():
            given = *given, *gradients
            sums.given.extend(given)
            results = _first_order(results, *given, packed.node)
        return None, *results, None, carrier


_apply = super(Function, _Run).apply  # without what `Function.apply` does for torch.func, which `call` refuses


def _sums_of_this_pass(packed: Packed) -> tuple[_core.Sums, Tensor | None]:
    """The `Sums` that the calls of this backward pass share; for the first call also the gradient that carries them."""
    task = _current_graph_task_id()
    sums = packed.watched.sums(task)
    if sums is not None:
        return sums, None
    packed.check_versions()
    sums = packed.cell.sums()
    if packed.node is None:
        return sums, None
    packed.watched.keep(sums, task)
    carrier = ZERO.detach()
    carrier.sums = sums
    return sums, carrier


class _FirstOrder(Function):
    """The gradients themselves; an error if they are differentiated by any of `given`, see `_first_order`."""

    @staticmethod
    def forward(ctx, gradients: list[Tensor], *given: Tensor | None):
        return tuple(gradients)

    @staticmethod
    def backward(ctx, *_):
        raise RuntimeError(FIRST_ORDER)


def _first_order(gradients, *given: Tensor | None) -> list[Tensor | None]:
    """Gradients that say so when they are differentiated, for create_graph=True.

    They depend on all that is `given`: autograd asks only nodes that lead to what it differentiates by.
    """
    found = iter(_FirstOrder.apply([g for g in gradients if g is not None], *given))
    return [None if g is None else next(found) for g in gradients]


def call(
    weights: Weights, module: nn.Module, x: Tensor, h: Tensor | None, c: Tensor | None, single: bool
) -> tuple[Tensor, ...]:
    """A call of a module's cell, as `_Run`; it is a node of the graph only if a gradient can be asked for."""
    other = x.dtype is not FLOAT or getattr(h, "dtype", FLOAT) is not FLOAT or getattr(c, "dtype", FLOAT) is not FLOAT
    if other and torch.is_autocast_enabled("cpu"):
        x, h, c = (t.float() if isinstance(t, Tensor) else t for t in (x, h, c))
    if x.shape[-2] == 0:  # no rows: those of one row, without it
        x, h, c = (None if t is None else nn.functional.pad(t, (0, 0, 0, 1)) for t in (x, h, c))
        return tuple(t[..., :0, :] for t in call(weights, module, x, h, c, single))
    if is_compiling():
        return _traced(weights, module, x, h, c, single)
    if forward_ad._current_level >= 0 or _are_functorch_transforms_active():
        given = (x, h, c, *weights.tensors(module))
        refuse_transforms(*given)
        refuse_vmap(*given)
    if torch._C._len_torch_dispatch_stack() or _get_tracing_state():
        return _traced(weights, module, x, h, c, single)
    graph = torch.is_grad_enabled()
    packed = weights.packed(module, graph)
    if graph:
        node = packed.need_node()
        if node is not None or any(t is not None and t.requires_grad for t in (x, h, c)):
            return _apply(packed, x, h, c, single, node)
    return packed.cell.run(x, h, c, single)[0]


def _traced(weights: Weights, module, x: Tensor, h: Tensor | None, c: Tensor | None, single: bool):
    """The same by the operator, which tracers can represent."""
    tensors = [functools.reduce(getattr, name.split("."), module) for name in weights.names.values()]
    widths = (module.output_size, module.units) if module.kind == "LSTM" else (module.output_size,)
    x, rows = (x[None], x.shape[:1]) if single else (x, (1, x.shape[1]))
    parts = [x.new_zeros(*rows, n) if t is None else t for t, n in zip((h, c), widths, strict=False)]
    state = torch.cat(parts, -1).view(x.shape[1], -1)
    y, last, _ = torch.ops.cnorm.recurrent(x, state, tensors, weights.text)
    last = torch.split(last.view(*rows, -1), widths, -1)
    return last if single else (y, *last)
