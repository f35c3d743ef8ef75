"""Prove that a model computes what the file does: give the file the interface of `export`, and check parity.

The file's own nodes stay as they are. Nodes in front of them lay out the states as its inputs have them, nodes behind
them take y and the new states from its outputs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import combinations, islice

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from cnorm.storage.model_files import METADATA_KEY, configuration
from onnx_export.description import state_table
from onnx_export.errors import NotImported
from onnx_export.graph.branches import without_branches
from onnx_export.importer.interface import Plan
from onnx_export.nodes import subgraphs
from onnx_export.ort import CannotRun, Session
from onnx_export.parity import check_parity
from onnx_export.parity_recordings import Domain

__all__ = ["FileRun", "prove"]

SATURATED, SATURATING = 20.0, ("tanh", "sigmoid")  # beyond, they are 1 in float32, whatever is clipped
LEAST = 0.25  # of what must be positive in whole calls, whose bound varies x by its rounding beside 1
STEPS, LEAST_STEPS = 64, 16  # that are compared: all states at each, so few show what is wired wrong
NODES = 100  # of a file up to which it is so many: each takes float64's evaluator about 0.3 ms a step
MOST_ROWS = 1024  # that are run together
MOST_BESIDE = 16  # choices of so many dimensions
WIDER = range(2, 17)  # elements of a dimension of which a file may refuse some numbers, as odd ones
FILE = "file/"  # prefix of the file's names in the copy that is checked


def prove(model, onnx_model: onnx.ModelProto, found: Plan, narrow: onnx.ModelProto | None = None):
    """Compare a model with the file it was read from, and single steps with the same file in 16 bits, `narrow`.

    Returns
    -------
    ParityReport

    Raises
    ------
    NotImported
        If they differ by more than the bound of `check_parity`.
    """
    for block in found.trace.blocks:
        functions = block.constants["functions"] if block.op == "LSTM" else {}
        if "clip" in functions and (functions["clip"] < SATURATED or functions["activation"] not in SATURATING):
            raise NotImported(
                f"{block.node}: its clip holds for c before its function by the standard, but not in onnxruntime 1.32, "
                "so nothing can be proved"
            )
    report = None
    if found.inputs.steps == 1 and not any(layer.kind == "Bidirectional" for layer in model.layers):
        report = _compared(model, standard(model, onnx_model, found))
        if narrow:
            _compared(model, standard(model, narrow, found, TensorProto.FLOAT16))
    if found.time_axis is not None:
        _check_run(model, onnx_model, found)
    _check_open(model, onnx_model, found)
    return report


def _compared(model, onnx_model: onnx.ModelProto):
    steps = max(LEAST_STEPS, min(STEPS, STEPS * NODES // len(onnx_model.graph.node)))
    try:
        report = check_parity(model, onnx_model, steps=steps)
    except ValueError as error:
        raise NotImported(f"a single step of it does not run, so nothing can be proved: {error}") from None
    if not report.ok:
        what = "the layers do not compute what the file does"
        engines = {row.engine for row in report.rows if not row.ok and row.against == "float64"}
        if engines and "cnorm" not in engines:
            what = "the layers agree with float64, but onnxruntime is beyond the bound, so nothing is proved"
        raise NotImported(f"{what}: {report.verdict}")
    return report


def standard(model, onnx_model: onnx.ModelProto, found: Plan, kind: int = TensorProto.FLOAT) -> onnx.ModelProto:
    """A copy of the file that computes one step with the inputs x, h0_in, ... and the outputs y, h0_out, ..., of a type
    that its floats have."""
    # onnxruntime 1.32 can't inline an If whose branches read names that were changed
    copy = _prefixed(without_branches(onnx_model, found.trace.taken))
    graph = copy.graph
    table = state_table(model)
    units = {row["name"]: row["units"] for row in table}
    names = list(units)
    cells = iter(found.chain.cells)
    places = [(cell, key) for cell in cells for key in cell.new]  # in the order of the table: h0, c0, h1, ...
    numbers = dict(zip(names, places, strict=True))
    types = {value.name: value.type.tensor_type.elem_type for value in graph.output}
    front, behind = _front(found, units, numbers), _behind(found, units, numbers, types, kind)
    kept = [tensor for tensor in graph.input if tensor.name in {t.name for t in graph.initializer}]
    nodes = [*front, *graph.node]
    _open_states(nodes, found, numbers, kind)
    del graph.input[:], graph.output[:], graph.node[:], graph.value_info[:]
    graph.input.extend(kept)
    size = model.input_size
    graph.input.append(helper.make_tensor_value_info("x", kind, [1, size]))
    graph.input.extend(helper.make_tensor_value_info(f"{name}_in", kind, [1, n]) for name, n in units.items())
    graph.output.append(helper.make_tensor_value_info("y", kind, [1, model.output_size]))
    graph.output.extend(helper.make_tensor_value_info(f"{name}_out", kind, [1, n]) for name, n in units.items())
    graph.node.extend([*nodes, *behind])
    constants = {name: np.array(array) for name, array in found.inputs.constants.items()}
    for name, array in constants.items():
        narrow = kind != TensorProto.FLOAT and array.dtype == np.float32
        array = array.astype(helper.tensor_dtype_to_np_dtype(kind)) if narrow else array
        graph.initializer.append(numpy_helper.from_array(array, FILE + name))
    described = json.loads(configuration(model.layers, model.outputs)) | {"states": table}  # with initial states
    helper.set_model_props(copy, {METADATA_KEY: json.dumps(described)})
    return copy


def _prefixed(onnx_model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy whose values have other names, in subgraphs as well: onnx.compose leaves what these read of the graph."""
    copy = onnx.ModelProto()
    copy.CopyFrom(onnx_model)
    graphs = [copy.graph]
    while graphs:
        graph = graphs.pop()
        for value in (*graph.input, *graph.output, *graph.value_info, *graph.initializer):
            value.name = FILE + value.name
        for node in graph.node:
            node.name = FILE + node.name if node.name else ""
            for names in (node.input, node.output):
                names[:] = [FILE + name if name else "" for name in names]
            graphs += [inner for _, inner in subgraphs(node)]
    return copy


def _constant(name: str, array) -> onnx.NodeProto:
    return helper.make_node("Constant", [], [name], value=numpy_helper.from_array(np.asarray(array, np.int64)))


def _cast(source: str, result: str, kind) -> onnx.NodeProto:
    return helper.make_node("Cast", [source], [result], to=helper.np_dtype_to_tensor_dtype(np.dtype(kind)))


def _picked(source: str, result: str, at, shape, kind=np.float32) -> list[onnx.NodeProto]:
    """Nodes that take the elements `at` of a tensor of float32, flattened, in a shape and of a type."""
    if kind is not np.float32:
        return [*_picked(source, f"{result}/float32", at, shape), _cast(f"{result}/float32", result, kind)]
    return [
        _constant(f"{result}/at", at),
        _constant(f"{result}/flat_shape", [-1]),
        _constant(f"{result}/shape", shape),
        helper.make_node("Reshape", [source, f"{result}/flat_shape"], [f"{result}/flat"]),
        helper.make_node("Gather", [f"{result}/flat", f"{result}/at"], [f"{result}/picked"], axis=0),
        helper.make_node("Reshape", [f"{result}/picked", f"{result}/shape"], [result]),
    ]


def _front(found: Plan, units, numbers) -> list[onnx.NodeProto]:
    """The file's frames and state inputs, from x and the states by name."""
    nodes, start = [], 0
    for name in found.frames:
        shape, kind = found.inputs.shapes[name], found.inputs.types[name]
        stop = start + int(np.prod(shape))
        nodes += _picked("x", FILE + name, np.arange(start, stop), shape, kind)
        start = stop
    if found.states:
        together = [f"{name}_in" for name in units]
        order = np.concatenate([cell.old[key] for cell, key in numbers.values()]).tolist()
        place = {number: at for at, number in enumerate(order)}
        nodes.append(helper.make_node("Concat", together, ["states"], axis=1))
        for name in found.states:
            at = [place[number] for number in found.trace.values[name].numbers.ravel().tolist()]
            nodes += _picked("states", FILE + name, at, found.inputs.shapes[name], found.inputs.types[name])
    return nodes


def _behind(found: Plan, units, numbers, types: dict[str, int], kind: int) -> list[onnx.NodeProto]:
    """y and the new states by name, from the file's outputs, which have these types."""
    nodes, parts = [], [f"y/{index}" for index in range(len(found.outputs))]
    given = {output: FILE + output for output in (*found.outputs, *found.states.values())}
    for output in [output for output in given if types[given[output]] != kind]:
        nodes.append(_cast(given[output], f"{given[output]}/cast", helper.tensor_dtype_to_np_dtype(kind)))
        given[output] += "/cast"
    for output, part in zip(found.outputs, parts, strict=True):
        flat = found.trace.values[output].numbers.size
        nodes += _picked(given[output], part, np.arange(flat), [1, flat])
    nodes.append(helper.make_node("Concat", parts, ["y"], axis=1))
    for name, (cell, key) in numbers.items():
        if not cell.old:
            continue  # `_open_states` names it
        for result in found.states.values():
            place = {number: at for at, number in enumerate(found.trace.values[result].numbers.ravel().tolist())}
            if int(cell.new[key][0]) in place:
                at = [place[number] for number in cell.new[key].tolist()]
                nodes += _picked(given[result], f"{name}_out", at, [1, units[name]])
                break
    return nodes


def _open_states(nodes: list[onnx.NodeProto], found: Plan, numbers, kind: int) -> None:
    """Connect recurrent operators whose initial state is a constant to inputs and outputs of some type."""
    outside, inside = helper.tensor_dtype_to_np_dtype(kind), found.inputs.types[found.frames[0]]
    # token ids are no floats, and a file of 16 bits was read in 32
    inside = outside if kind != TensorProto.FLOAT or not issubclass(inside, np.floating) else inside
    open_cells = iter([(name, key) for name, (cell, key) in numbers.items() if not cell.old])
    for index, node in enumerate(list(nodes)):
        if node.op_type not in ("LSTM", "GRU", "RNN"):
            continue
        states = ["h", "c"] if node.op_type == "LSTM" else ["h"]
        node.input.extend([""] * (5 + len(states) - len(node.input)))
        node.output.extend([""] * (1 + len(states) - len(node.output)))
        for offset, key in enumerate(states):
            name = next(open_cells, (None, None))[0]
            if name is None or not name.startswith(key):
                return
            cell, key = numbers[name]
            order = np.argsort(cell.new[key])  # the operator's, row by row
            shape = [1, -1, next((a.i for a in node.attribute if a.name == "hidden_size"), order.size)]
            halves = 2 if any(a.name == "direction" and a.s == b"bidirectional" for a in node.attribute) else 1
            nodes[index:index] = [
                *_picked(f"{name}_in", f"{name}/outside", order, shape),
                _cast(f"{name}/outside", f"{name}/half", inside),
                # a second half, which no cell of the model is, starts there, too
                helper.make_node("Concat", [f"{name}/half"] * halves, [f"{name}/start"], axis=0),
            ]
            node.input[5 + offset] = f"{name}/start"
            given = node.output[1 + offset] or f"{name}/last"
            node.output[1 + offset] = given
            nodes.append(_cast(given, f"{name}/given", outside))
            nodes += _picked(f"{name}/given", f"{name}_out", np.argsort(order), [1, order.size])


class FileRun:
    """The file as it is in onnxruntime, from states of zero.

    Parameters
    ----------
    onnx_model : onnx.ModelProto
    found : Plan

    Attributes
    ----------
    steps : int or None
        Steps of one call; None if a call takes any number.
    """

    def __init__(self, onnx_model: onnx.ModelProto, found: Plan) -> None:
        self._found, self._session, self.steps = found, Session(onnx_model, "all"), 1
        if found.time_axis is not None:
            declared = next(value for value in onnx_model.graph.input if value.name == found.frames[0])
            fixed = declared.type.tensor_type.shape.dim[found.time_axis].dim_value
            traced = 1 if found.inputs.shifts and not found.inputs.shifts.fixed else found.inputs.steps
            self.steps = traced if traced > 1 else fixed or None

    def run(self, x: np.ndarray, calls: int = 1) -> np.ndarray:
        """The outputs [steps, outputs], or [1, outputs] where a call of several steps gives the last one only."""
        return self.run_rows(x[None], {}, calls)[0]

    def run_rows(self, xs: np.ndarray, axes, calls: int = 1) -> np.ndarray:
        """The outputs [rows, steps, outputs] of rows in the same calls, which lie along some axes of the inputs.

        `calls` is the number of calls that a file over a time axis takes the steps in.
        """
        calls = calls if self._found.time_axis is not None else xs.shape[1]
        states = _joined([self.zeros(self._found.states)] * len(xs), axes)
        parts = []
        for x in np.split(xs, calls, axis=1):
            frames = _joined([self._frames(row) for row in x], axes)
            names = [*self._found.outputs, *self._found.states.values()]
            results = self._session.run(names, self.constants() | states | frames)
            own = len(self._found.outputs)
            states = dict(zip(states, results[own:], strict=True))
            ys = [self._split(*pair, *x.shape[:2]) for pair in zip(self._found.outputs, results[:own], strict=True)]
            parts.append(np.concatenate(ys, axis=2))
        return parts[-1] if parts[-1].shape[1] < x.shape[1] else np.concatenate(parts, axis=1)

    def run_wider(self, axes, size: int) -> None:
        """One call with several elements along some axes, to see whether the file takes them."""
        feeds = {
            name: np.repeat(array, size, axes[name]) if name in axes else array
            for name, array in self.zeros(self._found.inputs.shapes).items()
        }
        self._session.run(list(self._found.outputs), self.constants() | feeds)

    def zeros(self, names) -> dict[str, np.ndarray]:
        """Arrays for some inputs, at one step of one row."""
        inputs = self._found.inputs
        return {name: np.zeros(inputs.shapes[name], inputs.types[name]) for name in names}

    def call(self, frame: np.ndarray, states) -> list[np.ndarray]:
        """One call of one step: the outputs and the new states."""
        names = [*self._found.outputs, *self._found.states.values()]
        return self._session.run(names, self.constants() | states | self._frames(frame[None]))

    def constants(self) -> dict[str, np.ndarray]:
        """The inputs that are the same for each frame."""
        return {name: np.array(array) for name, array in self._found.inputs.constants.items()}

    def _frames(self, x: np.ndarray) -> dict[str, np.ndarray]:
        """The frames [steps, inputs] of one call, by input."""
        feeds, start, axes = {}, 0, self._found.inputs.time_axes
        for name, zero in self.zeros(self._found.frames).items():
            if self._found.time_axis is None:
                feeds[name] = x[0, start : start + zero.size].reshape(zero.shape).astype(zero.dtype, copy=False)
                start += zero.size
                continue
            sizes = np.delete(zero.shape, axes[name])
            stop = start + int(np.prod(sizes))
            feeds[name] = np.moveaxis(x[:, start:stop].reshape(-1, *sizes), 0, axes[name]).astype(zero.dtype)
            start = stop
        return feeds

    def _split(self, name: str, y: np.ndarray, rows: int, steps: int) -> np.ndarray:
        """An output of a call as [rows, steps, elements], or [rows, 1, elements] if it is of the last step only."""
        if rows == 1:
            return self._rows(name, y, steps)[None]
        one, axis = list(self._found.trace.values[name].shape), self._found.inputs.output_axes.get(name)
        if axis is not None:
            one[axis] = steps
        along = [i for i, (size, n) in enumerate(zip(y.shape, one, strict=True)) if size != n]
        if len(along) != 1 or y.shape[along[0]] != rows * one[along[0]]:
            raise NotImported(f"{rows} rows at once give the output {name!r} the shape {list(y.shape)}, one has {one}")
        return np.stack([self._rows(name, each, steps) for each in np.split(y, rows, along[0])])

    def _rows(self, name: str, y: np.ndarray, steps: int) -> np.ndarray:
        """An output of one row as [steps, elements], or [1, elements] if it is of the last step only."""
        one = self._found.trace.values[name].numbers
        alone = self._found.inputs.shifts and self._found.inputs.output_axes.get(name, 0) is None
        if not alone and y.size == one.size // self._found.inputs.steps * steps:
            axis = self._found.inputs.output_axes.get(name)
            if axis is None:
                sizes = zip(y.shape, one.shape, strict=False)
                axis = next((axis for axis, (size, single) in enumerate(sizes) if size != single), 0)
            return np.moveaxis(y, axis, 0).reshape(steps, -1)
        return y.reshape(1, -1)


def _joined(rows: list[dict[str, np.ndarray]], axes) -> dict[str, np.ndarray]:
    """The inputs of several rows, behind one another along their axes."""
    first = rows[0]
    return {
        name: np.concatenate([row[name] for row in rows], axes[name]) if name in axes else first[name] for name in first
    }


def _check_run(model, onnx_model: onnx.ModelProto, found: Plan) -> None:
    """Compare runs of the file over its time axis with the model's, of every length that the file may tell apart."""
    file = FileRun(onnx_model, found)
    rng = np.random.default_rng(0)
    calls = 2 if found.states else 1  # the second from the states that the first gave back
    for steps in [file.steps] if file.steps else found.inputs.lengths:
        x = _random(model, rng, calls * steps)
        try:
            theirs = file.run(x, calls)
        except CannotRun as error:
            if steps != file.steps and steps != found.inputs.lengths[-1]:
                continue  # the file refuses the length, so it computes nothing else
            raise NotImported(
                f"onnxruntime does not run the file over {steps} steps. If it was written for another number, give the "
                f"open dimension by dims={{...}}: {error}"
            ) from None
        _compare(model, x, theirs, f"over {steps} steps in {'one call' if calls == 1 else 'each of two calls'}")


def _random(model, rng, *shape: int) -> np.ndarray:
    """Frames of which none is like another."""
    x = rng.standard_normal((*shape, model.input_size)) * rng.uniform(0.1, 4, (*shape, 1))
    return Domain(model)(x.astype(np.float32), LEAST)


def _check_rows(model, onnx_model: onnx.ModelProto, found: Plan, axes) -> None:
    """Compare rows that the file takes in the same calls with the model: first, last, and beside each stored number."""
    file = FileRun(onnx_model, found)
    lengths = [length for length in found.inputs.lengths if length <= MOST_ROWS]
    rows, steps = lengths[-1], (file.steps or 4) if found.time_axis is not None else 4
    xs = _random(model, np.random.default_rng(1), rows, steps)
    try:
        theirs = file.run_rows(xs, axes)
    except CannotRun:
        return  # the file refuses several rows, so it computes nothing else
    for row in sorted({0, 1, rows - 1, *(n + k for n in lengths for k in (-1, 0, 1) if n + k < rows)}):
        _compare(model, xs[row], theirs[row], f"in row {row} of {rows} in one call")


def _compare(model, x: np.ndarray, theirs: np.ndarray, when: str) -> None:
    ours = model.run(x)
    if theirs.shape[1] != ours.shape[1]:
        raise NotImported(f"{when} the file has {theirs.shape[1]} outputs, the layers {ours.shape[1]}")
    expected = np.concatenate([ours[: -len(theirs)], theirs])  # the steps that the file does not show count as equal
    comparison = model.check(x, expected)
    if not comparison.ok:
        raise NotImported(f"{when} the layers do not compute what the file does: {comparison}")


def _along(found: Plan, axes) -> Plan:
    """The plan of a file whose steps are along other axes."""
    own = {name: axis for name, axis in axes.items() if name in found.frames}
    return (
        found
        if own == found.inputs.time_axes
        else replace(found, inputs=replace(found.inputs, time_axes=own, output_axes={}))
    )


def _check_open(model, onnx_model: onnx.ModelProto, found: Plan) -> None:
    """Compare calls with several elements of an open dimension with the layers: each must be a frame by itself."""
    for axes in found.inputs.open_axes:
        if found.chain.cells or found.time_axis is not None or axes.keys() != set(found.frames) or len(axes) > 1:
            if axes.keys() >= set(found.frames) and not any(axes == each for each, _ in found.inputs.mixed):
                _check_rows(model, onnx_model, found, axes)
            continue
        _check_run(model, onnx_model, _along(found, axes))
    for axes, faults in found.inputs.mixed:  # caches carry them, or else several frames in a call are no steps
        try:
            _check_run(model, onnx_model, _along(found, axes))
        except NotImported as error:
            raise NotImported(f"frames are mixed: {error}", [*faults, *error.reasons]) from None
    for axes in _beside(found.inputs.open_axes):  # each broadcast along the others may be what it is not with them
        if _widest(onnx_model, found, axes, (2,)) and axes.keys() >= set(found.frames):
            if found.chain.cells or found.time_axis is not None:
                _check_rows(model, onnx_model, found, axes)
            else:
                _check_run(model, onnx_model, _along(found, axes))
    for axes, faults in found.inputs.unfollowed:
        for more in ({}, *(other for other, _ in found.inputs.unfollowed if not other.keys() & axes.keys())):
            if size := _widest(onnx_model, found, axes | more, sorted({*WIDER, *found.inputs.lengths})):
                text = f"the file also takes {size} elements of a dimension, where it can't be read:"
                raise NotImported(text, faults)


def _beside(dimensions: list[dict[str, int]]) -> Iterator[dict[str, int]]:
    """Axes of different inputs, of two dimensions or more, as those of one."""
    for count in range(2, len(dimensions) + 1):
        for part in islice(combinations(dimensions, count), MOST_BESIDE):
            axes = {name: axis for each in part for name, axis in each.items()}
            if len(axes) == sum(map(len, part)):
                yield axes


def _widest(onnx_model: onnx.ModelProto, found: Plan, axes, sizes) -> int:
    """The first of some numbers of elements along some axes that the file takes; 0 if it takes none."""
    file = FileRun(onnx_model, found)
    for size in (size for size in sizes if size <= MOST_ROWS):
        with suppress(CannotRun):
            file.run_wider(axes, size)
            return size
    return 0
