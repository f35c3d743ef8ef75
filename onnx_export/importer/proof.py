"""Prove that a model computes what the file does: give the file the interface of `export`, and check parity.

The file's own nodes stay as they are. Nodes in front of them lay out the states as its inputs have them, nodes behind
them take y and the new states from its outputs.
"""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import islice

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from cnorm.storage.model_files import METADATA_KEY, configuration
from onnx_export.description import state_table
from onnx_export.errors import NotImported
from onnx_export.graph.branches import without_branches
from onnx_export.importer.dimensions import MANY, choices
from onnx_export.importer.file_run import FileRun
from onnx_export.importer.interface import Plan
from onnx_export.nodes import subgraphs
from onnx_export.ort import CannotRun
from onnx_export.parity import check_parity
from onnx_export.parity_recordings import Domain

__all__ = ["prove"]

SATURATED, SATURATING = 20.0, ("tanh", "sigmoid")  # beyond, they are 1 in float32, whatever is clipped
LEAST = 0.25  # of what must be positive in whole calls, whose bound varies x by its rounding beside 1
STEPS, LEAST_STEPS = 64, 16  # that are compared: all states at each, so few show what is wired wrong
NODES = 100  # of a file up to which it is so many: each takes float64's evaluator about 0.3 ms a step
MOST_ROWS = 1024  # that are run together
MOST_CHOICES, MOST_RUNS = 1 << 16, 1 << 14  # of open dimensions, and calls that show which of them a file takes
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
    orders = [False, True] if file.is_flat(axes) else [False]
    try:
        found_rows = [file.run_rows(xs, axes, alternate=alternate) for alternate in orders]
    except CannotRun:
        return  # the file refuses several rows, so it computes nothing else
    theirs = next((each for each in found_rows[1:] if model.check(xs[0], each[0]).ok), found_rows[0])
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


def _along(onnx_model: onnx.ModelProto, found: Plan, axes) -> Plan:
    """The plan of a file whose steps are along other axes."""
    own = {name: axis for name, axis in axes.items() if name in found.frames}
    if own == found.inputs.time_axes:
        return found
    grown = FileRun(onnx_model, found).grown(axes) or {}
    along = {name: grown[name][0] for name in found.outputs if grown.get(name)}
    return replace(found, inputs=replace(found.inputs, time_axes=own, output_axes=along))


def _check_open(model, onnx_model: onnx.ModelProto, found: Plan) -> None:
    """Compare calls with several elements of open dimensions with the layers: each must be a frame by itself."""
    stateless, whole = not found.chain.cells and found.time_axis is None, []
    for axes in found.inputs.open_axes:
        if not axes.keys() >= set(found.frames) or any(axes == each for each, _ in found.inputs.mixed):
            continue
        if not stateless or axes.keys() != set(found.frames):
            _check_rows(model, onnx_model, found, axes)
            continue
        along = _along(onnx_model, found, axes)
        _check_run(model, onnx_model, along)
        for rows in whole:
            if all(rows[name] != axis for name, axis in axes.items()):
                _check_rows(model, onnx_model, along, rows)
        whole.append(axes)
    for axes, faults in found.inputs.mixed:  # caches carry them, or else several frames in a call are no steps
        if found.frames[0] in axes and not axes.keys() >= set(found.frames):
            raise NotImported("frames are mixed, which are not of all inputs that are x:", faults)
        try:
            _check_run(model, onnx_model, _along(onnx_model, found, axes))
        except NotImported as error:
            raise NotImported(f"frames are mixed: {error}", [*faults, *error.reasons]) from None
    _check_unread(onnx_model, found)


def _check_unread(onnx_model: onnx.ModelProto, found: Plan) -> None:
    """Refuse a file that takes several elements of a dimension that can't be followed, alone or beside others."""
    dimensions = dict(enumerate(axes for axes, _ in found.inputs.unfollowed))
    why = dict(enumerate(faults for _, faults in found.inputs.unfollowed))
    dimensions |= enumerate(found.inputs.open_axes, len(dimensions))
    parts = list(islice(choices(dimensions), MOST_CHOICES + 1)) if why else []
    cut = len(parts) > MOST_CHOICES
    parts = [part for part in parts if why.keys() & set(part)]
    if cut or len(parts) > MOST_RUNS:
        raise NotImported(MANY.format(len(dimensions)))
    sizes = [size for size in sorted({*WIDER, *found.inputs.lengths}) if size <= MOST_ROWS]
    file = FileRun(onnx_model, found)
    for part in parts:
        axes = {name: axis for each in part for name, axis in dimensions[each].items()}
        for size in sizes[: MOST_RUNS // len(parts)]:
            if file.shapes(axes, size):
                text = f"the file also takes {size} elements of a dimension, where it can't be read:"
                raise NotImported(text, [fault for each in part for fault in why.get(each, [])])
