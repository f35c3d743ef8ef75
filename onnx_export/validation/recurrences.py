"""Recurrences that no operator names: Loops, steps that are written out one after another, and one step by itself.

They are seen, not judged. A state is taken for recurrent where it returns through a product with values that stay the
same: in a Loop or Scan from one iteration to the next, in steps that are written out by at least three products with
one matrix, each computed from the one before, and in a single step by a gate, a sigmoid, that weighs an input of the
model in an output of the same shape.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator

import numpy as np
import onnx

from cnorm.text import clip
from onnx_export.graph.scope import Scope, attribute, op, scopes, used
from onnx_export.graph.tables import MOVING, RESHAPING, SAME
from onnx_export.nodes import all_graphs, subgraphs
from onnx_export.validation.findings import NOT_JUDGED, RECURRENCE, CellReport, Finding
from onnx_export.validation.norm import Norm
from onnx_export.validation.recurrent import Recurrent
from onnx_export.validation.values import SUMS, Values

_PRODUCT = re.compile("MatMul|Gemm|Conv|Einsum")
_FEWEST_STEPS = 3  # products with one matrix; two may be tied weights
_MOST_MATRICES = 64  # that are looked at in one graph
_MOST_MOVES = 32
_SAMPLED = 1024
_GATES = frozenset({"Sigmoid", "HardSigmoid"})
_HELD = "the norms and recurrent nodes in it are judged, the rest of its step is not"
_DETAIL = "a recurrence that no operator names is not judged; --input and --outputs prove it, `cnorm import` a stream"


def find(
    model: onnx.ModelProto, weights: dict[str, np.ndarray], norms: list[Norm], cells: list[Recurrent]
) -> tuple[list[CellReport], list[Finding]]:
    """The recurrences of a model, not judged; those that hold a norm or recurrent node, which are, as notes."""
    reports, notes = [], []
    judged = [(norm.scope, [norm.y]) for norm in norms] + [(cell.scope, list(cell.node.output)) for cell in cells]
    for scope in scopes(model, weights):
        for name, form, values in _of(scope):
            place, name = clip(scope.label), clip(name, 250)
            if any(_holds(scope, values, *each) for each in judged):
                notes.append(Finding("note", "recurrence", f"a recurrence, {form}: {_HELD}", name))
            else:
                facts = {"form": form}
                reports.append(CellReport(name, place, RECURRENCE, facts, None, None, NOT_JUDGED, detail=_DETAIL))
    return reports, notes


def _of(scope: Scope) -> Iterator[tuple[str, str, set[str]]]:
    """(name, form, values of the step) of the recurrences that one graph is, or holds."""
    values = Values(scope)
    if scope.owner is not None and scope.owner.op_type in ("Loop", "Scan"):
        found = _repeated(scope, values)
        if found:
            yield scope.owner.name or scope.path[-1][0], f"in a {scope.owner.op_type}", found
    name, steps, found = _written_out(scope, values)
    if steps:
        yield name, f"{steps} steps written out", found
    elif scope.outer is None and not scope.is_function:
        for state, found in _single_steps(scope, values):
            yield state, "one step, its state an input", found


def _holds(scope: Scope, values: set[str], place: Scope, results: list[str]) -> bool:
    """Whether one of these results of the graph `place` is among the values of a step in `scope`, or inside it."""
    depth = len(scope.path)
    if place.path[:depth] != scope.path or (len(place.path) == depth and values.isdisjoint(results)):
        return False
    return len(place.path) == depth or place.path[depth][0] in values


def _reached(scope: Scope, starts: dict[str, int]) -> dict[str, int]:
    """For each value the bits of those that it is computed from."""
    found = defaultdict(int, starts)
    for node in scope.nodes:
        bits = 0
        for name in used(node):
            bits |= found.get(name, 0)
        for name in node.output if bits else ():
            found[name] |= bits
    return found


def _multiplies(node: onnx.NodeProto) -> bool:
    """Whether a node is a product of matrices, or holds one."""
    inner = (each for _, graph in subgraphs(node) for part in all_graphs(graph) for each in part.node)
    return bool(_PRODUCT.search(node.op_type)) or any(_PRODUCT.search(each.op_type) for each in inner)


def _repeated(scope: Scope, values: Values) -> set[str]:
    """The values that depend on a state which the body of a Loop or Scan returns through a product; none without."""
    owner, names = scope.owner, [value.name for value in scope.graph.input]
    results = [value.name for value in scope.graph.output]
    first, returned = (2, 1) if owner.op_type == "Loop" else (0, 0)
    scanned = attribute(owner, "num_scan_inputs", 0)
    pairs = zip(names[first : len(names) - scanned], results[returned:], strict=False)
    carried = {name: result for name, result in pairs if values.strip(result)[0] != name}
    bits = {name: 1 << place for place, name in enumerate(carried)}
    changing = [*names[:first], *names[len(names) - scanned :]] if scanned else names[:first]
    before = _reached(scope, bits | dict.fromkeys(changing, 1 << len(bits)))
    behind: dict[str, int] = defaultdict(int)
    for node in scope.nodes:
        read = [name for name in used(node) if name]
        passed = 0
        for name in read:
            passed |= behind[name]
        if _multiplies(node) and any(not before.get(name, 0) for name in read):
            for name in read:
                passed |= before.get(name, 0)
        for name in node.output:
            behind[name] |= passed
    if not any(behind[carried[name]] & bit for name, bit in bits.items()):
        return set()
    return {name for name, given in before.items() if given}


def _written_out(scope: Scope, values: Values) -> tuple[str, int, set[str]]:
    """(matrix, steps, values of the steps) of the longest chain of products with one matrix; 0 steps without one."""
    members: dict[object, list[onnx.NodeProto]] = defaultdict(list)
    names: dict[object, str] = {}
    for node in scope.nodes:
        for name in set(node.input) if _PRODUCT.search(node.op_type) else ():
            key = _matrix(scope, values, name)
            if key is not None:
                members[key].append(node)
                names.setdefault(key, name)
    best, longest, inside = "", 0, set()
    often = [key for key, nodes in members.items() if len(nodes) >= _FEWEST_STEPS]
    for key in often[:_MOST_MATRICES]:
        chosen, depth = set(map(id, members[key])), defaultdict(int)
        for node in scope.nodes:
            steps = max((depth.get(name, 0) for name in used(node)), default=0) + (id(node) in chosen)
            for name in node.output if steps else ():
                depth[name] = steps
        steps = max(depth.values(), default=0)
        if steps >= _FEWEST_STEPS:
            inside |= {name for name, at in depth.items() if at < steps}
        if steps > longest:
            best, longest = names[key], steps
    return (best, longest, inside) if longest >= _FEWEST_STEPS else ("", 0, set())


def _matrix(scope: Scope, values: Values, name: str) -> object:
    """What is the same for all copies of a stored matrix; None for other values."""
    if not name or not values.counted(name):
        return None
    root = values.strip(name, SAME | {"Transpose"})[0]
    value = scope.constant(root)
    if value is None:
        return root
    flat = value.reshape(-1)
    return (value.shape, flat[:: max(1, flat.size // _SAMPLED)].tobytes()) if value.ndim > 1 and flat.size > 1 else None


def _single_steps(scope: Scope, values: Values) -> Iterator[tuple[str, set[str]]]:
    """(state, values that depend on it) of the inputs that a gate weighs in an output of the same shape."""
    stored = {tensor.name for tensor in scope.graph.initializer}
    inputs = [value.name for value in scope.graph.input if value.name not in stored]
    if len(inputs) < 2:
        return
    bits = {name: 1 << place for place, name in enumerate(inputs)}
    reached = _reached(scope, bits)
    for state in inputs:
        shape = scope.shape(state)
        outputs = [name for name in scope.outputs if shape and scope.shape(name) == shape]
        if outputs and any(_leads(scope, name, outputs) for name in _weighed(scope, values, state, reached, bits)):
            yield state, {name for name, given in reached.items() if given & bits[state]}


def _moved(scope: Scope, name: str, kinds: Iterable[str] = MOVING) -> set[str]:
    """A value and what operators of these kinds make of it."""
    found, pending = {name}, [name]
    while pending and len(found) < _MOST_MOVES:
        for node in scope.consumers(pending.pop()):
            more = [each for each in node.output if each and each not in found] if op(node) in kinds else []
            found.update(more)
            pending += more
    return found


def _weighed(scope: Scope, values: Values, state: str, reached, bits) -> Iterator[str]:
    """The products of a state, or of its difference from another value, and a gate computed from another input."""
    for name in _moved(scope, state, MOVING | {"Sub"}):
        for node in scope.consumers(name):
            other = [each for each in node.input if each != name] if op(node) == "Mul" else []
            if other and reached.get(other[0], 0) & ~bits[state] and _gate(scope, values, other[0]):
                yield node.output[0]


def _gate(scope: Scope, values: Values, name: str) -> bool:
    """Whether a value is a sigmoid, or what it lacks of 1, as it is or moved."""
    for _ in range(_MOST_MOVES):
        name = values.strip(name, SAME | RESHAPING | {"Transpose"})[0]
        node = scope.producer(name)
        if node is None or op(node) in _GATES:
            return node is not None
        if op(node) in ("Split", "Slice", "Gather"):
            name = node.input[0]
        elif op(node) in SUMS and any(values.scalar(each) is not None for each in node.input):
            name = next((each for each in node.input if values.scalar(each) is None), "")
        else:
            return False
    return False


def _leads(scope: Scope, name: str, outputs: list[str]) -> bool:
    """Whether a value, as it is, moved or in a sum, is one of these outputs."""
    return not _moved(scope, name, MOVING | SUMS).isdisjoint(outputs)
