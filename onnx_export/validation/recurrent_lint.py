"""Findings about recurrent nodes: a reset gate in the wrong place, a state lost or given twice, a frozen length."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace

import numpy as np
import onnx
from onnx import helper

from cnorm.text import clip, quoted
from onnx_export.graph.scope import Scope, attribute, op
from onnx_export.graph.tables import LAYOUT, MOVING
from onnx_export.validation import outputs
from onnx_export.validation.findings import Finding
from onnx_export.validation.recurrent import SLOTS, Recurrent
from onnx_export.validation.values import stored

# Producers that train GRUs with the reset gate behind the product; keras with reset_after=False has no recurrent bias.
_RESET_AFTER = ("pytorch", "tf2onnx", "keras2onnx", "onnxmltools", "paddlepaddle", "paddle2onnx", "mxnet")
_MOST_NODES, _MOST_MOVES = 1000, 16


def lint(found: Sequence[Recurrent]) -> Iterator[Finding]:
    """Findings that need no run."""
    for each in found:
        yield from _not_finite(each)
        if each.cell is not None:
            yield from _stateless(each)
            yield from _frozen(each)
        elif not each.foreign:
            yield Finding("error", "unread", each.problem, each.name)
    yield from _shared_states(found)


def _not_finite(each: Recurrent) -> Iterator[Finding]:
    for place, name in enumerate(each.node.input):
        value = each.scope.constant(name) if name else None
        bad = 0 if value is None or value.dtype.kind != "f" else int(np.sum(~np.isfinite(value)))
        if bad:
            slot = SLOTS[place] if place < len(SLOTS) else clip(name, 80)
            message = f"{slot} holds NaN or Inf, {bad} of {value.size} values"
            yield Finding("error", "weights-nan", message, each.name)


def _shared_states(found: Sequence[Recurrent]) -> Iterator[Finding]:
    """One value from which two states of a node begin, or one input of the model from which two nodes do."""
    first: dict[tuple, str] = {}
    for each in found:
        sources = {slot: _state(each, slot) for slot in ("initial_h", "initial_c")}
        if sources["initial_h"] and sources["initial_h"] == sources["initial_c"]:
            message = f"initial_h and initial_c are the same value, {quoted(sources['initial_h'])}"
            yield Finding("warning", "shared-state", message, each.name)
            del sources["initial_c"]
        for slot, source in sources.items():
            other = first.setdefault((each.scope.path, source), each.name) if each.scope.is_input(source) else each.name
            if other != each.name:
                message = f"{slot} is the input {quoted(source)}, from which {clip(other, 80)} begins, too"
                yield Finding("warning", "shared-state", message, each.name)


def _state(each: Recurrent, slot: str) -> str:
    """The value that an initial state is, before changes of shape and type; empty for none and for a stored one."""
    name = each.input(slot) if slot != "initial_c" or (each.cell and each.cell.kind == "LSTM") else ""
    if not name or stored(each.scope, name) is not None:
        return ""
    for _ in range(_MOST_MOVES):
        node = each.scope.producer(name)
        if node is None or op(node) not in LAYOUT:
            break
        name = node.input[0]
    return name


def _steps(each: Recurrent) -> int | None:
    """Steps of a call, None if the file leaves them open."""
    shape = each.scope.shape(each.input("X"))
    return shape[each.cell.layout] if shape is not None and len(shape) == 3 and each.cell is not None else None


def _stateless(each: Recurrent) -> Iterator[Finding]:
    """A step whose state is stored, not given, and which no output returns."""
    if _steps(each) != 1 or each.scope.path or each.scope.is_function:
        return
    states = {"initial_h": "h"} | ({"initial_c": "c"} if each.cell.kind == "LSTM" else {})
    fixed = [
        state
        for slot, state in states.items()
        if not each.input(slot) or stored(each.scope, each.input(slot)) is not None
    ]
    made = [*each.node.output, "", "", ""]
    left = {"h": _leaves(each.scope, made[:2]), "c": _leaves(each.scope, made[2:3])}
    lost = [state for state in fixed if not left[state]]
    if lost:
        message = f"one step from a stored {' and '.join(lost)}, which no output returns: every call forgets the last"
        yield Finding("warning", "stateless-step", message, each.name)


def _leaves(scope: Scope, names: Sequence[str]) -> bool:
    """Whether one of these values is an output of the graph, as it is or moved."""
    pending, seen = list(filter(None, names)), set()
    while pending and len(seen) < _MOST_NODES:
        name = pending.pop()
        if name in scope.outputs:
            return True
        seen.add(name)
        moved = (node for node in scope.consumers(name) if op(node) in MOVING)
        pending += [result for node in moved for result in node.output if result and result not in seen]
    return False


def _frozen(each: Recurrent) -> Iterator[Finding]:
    """A length of the exported example that stands in the file."""
    steps, lengths = _steps(each), each.constant("sequence_lens")
    if lengths is not None and (steps is None or (lengths != steps).any()):
        told = ", ".join(map(str, np.ravel(lengths)[:8]))
        where = "of any number" if steps is None else f"of {steps}"
        message = f"sequence_lens is the constant [{told}]: so many steps {where} are computed"
        yield Finding("warning", "frozen-length", message, each.name)
    how = _reversed_by_constants(each.scope, each.input("X"))
    if how:
        yield Finding("warning", "frozen-length", f"x is reversed by {how}, while its length is open", each.name)


def _reversed_by_constants(scope: Scope, name: str) -> str:
    """How a value is reversed along an open axis by a stored length, empty if it is not."""
    for _ in range(8):
        node = scope.producer(name)
        if node is None or not node.input:
            return ""
        known = [scope.constant(given) if given else None for given in node.input]
        shape, kind = scope.shape(node.input[0]), op(node)
        if kind == "ReverseSequence" and len(known) > 1 and known[1] is not None:
            axis = attribute(node, "time_axis", 0)
            return "ReverseSequence with constant lengths" if _open(shape, axis) else ""
        if kind == "Slice" and len(known) > 4 and known[4] is not None and (known[4] < 0).any():
            return _sliced(known, shape)
        if kind == "Gather" and len(known) > 1 and known[1] is not None and _descends(known[1]):
            return "Gather with constant indices" if _open(shape, attribute(node, "axis", 0)) else ""
        if kind not in LAYOUT:
            return ""
        name = node.input[0]
    return ""


def _sliced(known: Sequence[np.ndarray | None], shape) -> str:
    """Whether a Slice with a negative step begins at a stored place of an open axis, not at the end."""
    starts, axes, steps = known[1], known[3], known[4]
    if starts is None or steps is None:
        return ""
    axes = np.arange(len(starts)) if axes is None else axes
    for start, axis, step in zip(np.ravel(starts), np.ravel(axes), np.ravel(steps), strict=False):
        if step < 0 and 0 <= start < 2**31 - 1 and _open(shape, int(axis)):
            return f"a Slice from {start} on"
    return ""


def _open(shape, axis: int) -> bool:
    return shape is None or (-len(shape) <= axis < len(shape) and shape[axis] is None)


def _descends(indices: np.ndarray) -> bool:
    return indices.ndim == 1 and indices.size > 1 and indices[0] > 0 and bool((np.diff(indices) == -1).all())


# ------------------------------------------------------------------------------------------------ the reset gate


def suspects(found: Sequence[Recurrent], calls: Sequence[Sequence[dict[str, np.ndarray]]]) -> list[Recurrent]:
    """GRUs that apply the reset gate before the product although they have a recurrent bias for the candidate.

    With the gate before the product, both biases of the candidate are added; no framework trains two.
    """
    result = []
    for each, values in zip(found, calls, strict=True):
        if each.foreign or each.cell is None or each.cell.kind != "GRU" or each.cell.linear_before_reset:
            continue
        bias = each.constant("B")
        bias = values[0].get("B") if bias is None and values else bias
        if bias is not None and bias.ndim == 2 and bias[:, 5 * bias.shape[1] // 6 :].any():
            result.append(each)
    return result


def judge_reset(run, doubted: Sequence[Recurrent], producer: str, file: str, seed: int) -> tuple[list[Finding], bool]:
    """Findings on suspects, and whether the outputs of `file` prove that the gate belongs behind the product.

    Parameters
    ----------
    run : run.Run
    doubted : list of Recurrent
    producer : str
        Of the file.
    file : str
        An .npz file of the outputs that a framework gives, empty for none.
    seed : int
    """

    def differs(model: onnx.ModelProto) -> bool:
        same = {name: getattr(run, name) for name in ("weights", "feeds", "session", "random")}
        found = outputs.compare(SimpleNamespace(model=model, plain={}, **same), file, seed)
        return any(finding.code == "outputs-differ" for finding in found)

    if file and not differs(run.model):
        return [], False  # they are right as they are
    if file:
        changed = onnx.ModelProto()
        changed.CopyFrom(run.model)
        set_reset(changed, doubted)
        if not differs(changed):
            message = "with linear_before_reset = 1 the outputs are those of --outputs, without it they differ"
            return [Finding("error", "gru-reset", message, each.name) for each in doubted], True
    if not producer.lower().startswith(_RESET_AFTER):
        return [], False
    message = (
        f"linear_before_reset is 0 although the candidate has a recurrent bias; GRUs of {producer} reset after the "
        "product; --input and --outputs prove which is right"
    )
    return [Finding("warning", "gru-reset", message, each.name) for each in doubted], False


def set_reset(model: onnx.ModelProto, doubted: Sequence[Recurrent]) -> int:
    """Set linear_before_reset = 1 in the nodes of these names in the main graph; returns how many there are."""
    wanted = {next(filter(None, each.node.output)) for each in doubted if not each.scope.path}
    count = 0
    for node in model.graph.node:
        if node.op_type == "GRU" and wanted & set(node.output):
            kept = [a for a in node.attribute if a.name != "linear_before_reset"]
            kept = [helper.make_attribute(a.name, helper.get_attribute_value(a)) for a in kept]
            del node.attribute[:]
            node.attribute.extend([*kept, helper.make_attribute("linear_before_reset", 1)])
            count += 1
    return count
