"""Load streaming models from ONNX files of other programs, as a list of layers that is proven against the file.

`trace.py` follows each element of a frame through the graph (`elements.py`, `computing.py`, `operators_of_cells.py`),
`dimensions.py` finds which axis counts frames, `frames.py` what mixes them, `counting.py` what their number decides
and `shifts.py` what a stream can carry, `repeated.py` follows loops, `windows.py`, `transposed.py`, `delays.py`,
`positions.py`, `reducing.py` and `selecting.py` find layers of frames of [channels, positions], `activations.py` and
`cells.py` (by `affine.py`, `normed_rows.py`, `cell_parts.py`, `cell_probes.py`, `bends.py` and the float64 values of
`values.py`) find what is written out, `chain.py` finds the steps and `joining.py` makes layers of them, `interface.py`
finds which inputs are states (`given.py` those that are neither), `heads.py` what can be left out at the end,
`proof.py` compares with runs of the file (`file_run.py`). All this happens in a child process (`worker.py`), so this
module imports neither onnx nor onnxruntime. `command.py` is `cnorm import`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from traceback import walk_tb
from typing import TYPE_CHECKING

from cnorm.model import Model
from cnorm.text import clip, quoted
from onnx_export.errors import NotImported
from onnx_export.parity_report import ParityReport

if TYPE_CHECKING:
    import onnx

    from onnx_export.importer.file_run import FileRun
    from onnx_export.importer.interface import Plan

__all__ = ["Imported", "import_model"]

# What quantize_dynamic makes of MatMul, Gemm, Conv, LSTM and Attention.
ROUNDED = {"DynamicQuantizeLinear", "MatMulInteger", "ConvInteger", "DynamicQuantizeLSTM", "DynamicQuantizeMatMul"}

RUNTIME_DOMAINS = ("ai.onnx.", "com.microsoft", "com.ms.")


@dataclass(frozen=True)
class Imported:
    """A model, and how the file was read.

    Attributes
    ----------
    model : cnorm.Model
    frames : tuple of str
        The inputs that are x, concatenated.
    outputs : tuple of str
        The outputs that are y, concatenated.
    states : dict of str to str
        The inputs that are states, each with the output that gives it back. Empty for a file over a time axis.
    time_axis : int or None
        The axis of the frame that counts steps.
    report : ParityReport or None
        The comparison of single steps; None without one (`check=False`, or a model that reads both directions).
    notes : tuple of str
        What a stream does otherwise than calls of the file.
    window : int or None
        Frames of each call, if the file takes a fixed number of them from its initial state.
    warned : tuple of str
        Those of the notes that `load` gives as warnings of any file: frames without y, outputs of each frame left out.
    file : FileRun or None
        The file itself, to run beside the model; None where it was read in another process.
    """

    model: Model
    frames: tuple[str, ...]
    outputs: tuple[str, ...]
    states: dict[str, str]
    time_axis: int | None
    report: ParityReport | None
    notes: tuple[str, ...] = ()
    window: int | None = None
    warned: tuple[str, ...] = ()
    file: FileRun | None = None


def import_model(
    onnx_model: onnx.ModelProto,
    *,
    check: bool,
    outputs: Sequence[str] = (),
    stage: Callable[[str], None] = lambda name: None,
    **given,
) -> Imported:
    """Find the layers of a file, and prove that they compute what it does; arguments as of `onnx_export.load`.

    `stage` is told what is done next.
    """
    from onnx_export.importer.dimensions import LASTING, REMEDY
    from onnx_export.importer.file_run import FileRun
    from onnx_export.importer.heads import ending_at, first_alone, heads
    from onnx_export.importer.proof import prove
    from onnx_export.importer.proposals import one_step, proposals
    from onnx_export.ort import CannotRun

    def read(outputs: Sequence[str] = (), **more) -> Plan:
        whole = ending_at(onnx_model, outputs, given) if outputs else onnx_model
        found, model = _layers(whole, given | more)
        if check:
            prove(model, whole, found)
        return found

    stage("finding the layers")
    onnx_model = ending_at(onnx_model, outputs, given) if outputs else onnx_model
    onnx_model, narrow, rounding = _prepared(onnx_model)
    try:
        found, model = _layers(onnx_model, given)
    except NotImported as error:
        texts = error.summary, *error.reasons
        said = any("give it by dims=" in text or text.endswith(LASTING) for text in texts)
        mixed = error.followed and any(text.endswith(REMEDY) for text in texts)
        more = heads(onnx_model, given, error.reasons, read) or ([] if said else one_step(onnx_model, given, read))
        more = more or first_alone(onnx_model, error.reasons, read)
        more = more or ([] if said or mixed else proposals(onnx_model, given, read))
        raise NotImported(error.summary, [*error.reasons, *more]) from None
    stage("comparing the layers with the file")
    try:
        report = prove(model, onnx_model, found, narrow) if check else None
        file = FileRun(onnx_model, found)
    except CannotRun as error:
        raise NotImported(f"onnxruntime does not load the file: {error}") from None
    notes = (*rounding, *_notes(model, found, file), *_crossed(found, given), *_left_out(onnx_model, found))
    notes += (*_stored_inputs(onnx_model), *(warned := (*_domain(model), *_frames_left_out(found))))
    window = file.steps if found.time_axis is not None and not found.states else None
    read = found.frames, found.outputs, found.states, found.time_axis
    return Imported(model, *read, report, notes, window, warned, file)


def _layers(onnx_model: onnx.ModelProto, given) -> tuple[Plan, Model]:
    """What is found in a file, and the model of it; whatever is wrong is `NotImported`."""
    from onnx_export.importer.elements import Cannot
    from onnx_export.importer.interface import plan

    try:
        found = plan(onnx_model, **given)
        if not found.chain.layers:
            raise NotImported("its output is its input as it is: there is no layer")
        model = Model(found.chain.layers, tuple(found.chain.names.values()))
    except (NotImported, MemoryError):
        raise
    except RecursionError:
        raise NotImported("its nodes are nested too deep") from None
    except Exception as error:  # the file is untrusted: what it says may fit nothing that is expected
        if isinstance(error, Cannot) or _of_layers(error):
            raise NotImported(f"no model can be made of it: {error}") from None
        raise NotImported("it is not as the standard says, or cnorm misreads it") from None
    if model.input_size != len(found.chain.frame):
        raise NotImported(f"no layer reads the last of the {len(found.chain.frame)} elements of x")
    if any(cell.old and cell.old.keys() != cell.new.keys() for cell in found.chain.cells):
        raise NotImported("an LSTM has one of h and c as an input and the other stored: make both inputs, or none")
    return found, model


def _of_layers(error: Exception) -> bool:
    """Whether cnorm's layers raised an error, which check what they are given, and not NumPy or Python."""
    places = [frame.f_globals.get("__name__", "") for frame, _ in walk_tb(error.__traceback__)]
    return isinstance(error, (TypeError, ValueError)) and places[-1].startswith("cnorm.")


def _prepared(onnx_model: onnx.ModelProto) -> tuple[onnx.ModelProto, onnx.ModelProto | None, tuple[str, ...]]:
    """A file in the forms that are read, the same in 16 bits if it has them, and what the layers do otherwise."""
    from onnx_export.importer.dimensions import open_negative
    from onnx_export.importer.layouts import any_steps, steps_first
    from onnx_export.importer.stored import ROUNDED, SCALED, in_float32, plain
    from onnx_export.nodes import drop_omitted, inlined

    _refuse_taken_names(onnx_model)
    onnx_model = inlined(onnx_model)
    _refuse_rounded(onnx_model)
    open_negative(onnx_model)
    steps_first(onnx_model)
    try:
        notes = (SCALED,) if plain(onnx_model) else ()
        any_steps(onnx_model)
    except NotImported:
        raise
    except Exception as error:  # onnx's kernels and NumPy raise anything for tensors that do not fit each other
        raise NotImported(f"its stored tensors can't be read: {error}") from None
    drop_omitted(onnx_model)  # onnxruntime 1.32 does not run every file with such inputs
    wide = in_float32(onnx_model)
    return wide or onnx_model, onnx_model if wide else None, (*notes, ROUNDED) if wide else notes


def _refuse_taken_names(onnx_model: onnx.ModelProto) -> None:
    """Refuse local functions in a domain of a runtime's own operators, which it may run instead of the function."""
    for function in onnx_model.functions:
        if function.domain in ("", "ai.onnx") or function.domain.startswith(RUNTIME_DOMAINS):
            raise NotImported(
                f"its function {quoted(function.name)} is in the domain {quoted(function.domain or 'ai.onnx')}, where "
                "a runtime may have an operator of this name and run that: give the function a domain of its own"
            )


def _refuse_rounded(onnx_model: onnx.ModelProto) -> None:
    """Refuse a file whose products are rounded by what each frame holds."""
    from onnx_export.nodes import all_graphs, describe

    nodes = [node for graph in all_graphs(onnx_model.graph) for node in graph.node if node.op_type in ROUNDED]
    if nodes:
        raise NotImported(
            "it is a file of onnxruntime's quantize_dynamic, whose integer products have no layer here:",
            [f"{describe(nodes[0])} and {len(nodes) - 1} more nodes of its kind",
             "import the file that it was made of; with --weights int8 (Model.with_weights) its matrices are rounded"],
        )  # fmt: skip


def _domain(model: Model) -> tuple[str, ...]:
    """What frames the model has no outputs for."""
    from onnx_export.parity_recordings import FAR, Domain

    domain = Domain(model)
    at = domain.positive
    ends = [i for i in at if i - 1 not in at], [i for i in at if i + 1 not in at]
    spans = ", ".join(f"{a}" if a == b else f"{a} to {b}" for a, b in zip(*ends, strict=True))
    notes = []
    if spans:
        notes.append(f"elements {clip(spans, 200)} of x must be positive, as Log or Sqrt has no value for others")
    if domain.bounded:
        notes.append(f"elements of {FAR:g} or -{FAR:g} give infinities or NaN: what a Log reads has underflowed there")
    return tuple(notes)


def _crossed(found, given) -> tuple[str, ...]:
    """States, and frames beside states, that structure tells apart against what their names say."""
    from onnx_export.importer.pairings import alike, belong

    given_back = (*found.states.values(), *found.outputs)
    sizes = {name: found.trace.values[name].numbers.size for name in given_back}
    for name, result in found.states.items():
        others = [other for other in sizes if sizes[other] == sizes[result]]
        liked = max(others, key=lambda other: (alike(name, other), other == result))
        if liked != result and name not in given["states"] and belong(name, liked):
            text = f"the state {name!r} is given back by {result!r}, by what the graph computes, and not by {liked!r}"
            return (f"{text}: states={{{name!r}: {result!r}}} confirms it",)
    least = min((alike(*pair) for pair in found.states.items()), default=1.0)
    for name, result in () if given["frames"] or given["states"] else product(found.frames, found.outputs):
        size, of_result = (found.trace.values[each].numbers.size for each in (name, result))
        if size == of_result and belong(name, result) and alike(name, result) > least:
            text = f"{name!r} is read as x and {result!r} as y, by what the graph computes, but they look like a state"
            return (f"{text}: frames=[{name!r}] confirms it",)
    return ()


def _left_out(onnx_model, found) -> tuple[str, ...]:
    """The outputs that are neither y nor given back: their elements are those of y or of a state."""
    kept = {*found.outputs, *found.states.values()}
    names = ", ".join(repr(value.name) for value in onnx_model.graph.output if value.name not in kept)
    return (f"outputs whose elements are y's or a state's are left out: {names}",) if names else ()


def _frames_left_out(found) -> tuple[str, ...]:
    """Outputs of each frame that are no part of y, which is of the last frame alone."""
    axes = found.inputs.output_axes
    names = ", ".join(repr(name) for name, axis in axes.items() if axis is not None and name not in found.outputs)
    if not names or any(axes.get(name) is not None for name in found.outputs):
        return ()
    y = ", ".join(map(repr, found.outputs))
    return (f"y is {y}, of the last frame; outputs of each frame are left out: {names}; outputs=[...] chooses these",)


def _stored_inputs(onnx_model) -> tuple[str, ...]:
    """The inputs with a stored value that a runner may feed an output back to: their shape is that of the output."""
    stored = {tensor.name for tensor in onnx_model.graph.initializer}
    results = [value.type.tensor_type.shape.SerializeToString() for value in onnx_model.graph.output]
    inputs = [value for value in onnx_model.graph.input if value.name in stored]
    states = [value.name for value in inputs if value.type.tensor_type.shape.SerializeToString() in results]
    names = clip(", ".join(map(repr, states)), 200)
    text = "inputs with a stored value are read as constants, without it they could be states"
    return (f"{text}: {names}",) if states else ()


def _notes(model: Model, found, file) -> tuple[str, ...]:
    """What the owner of the file may not expect of a stream."""
    if found.time_axis is not None:
        if found.inputs.shifts and not file.steps and set(map(found.inputs.output_axes.get, found.outputs)) == {None}:
            return ("a call of the file gives its last frame; a step gives what a call with all frames so far would",)
        begin = f"a call of the file takes {file.steps} frames from its initial state"
        return (f"{begin}: reset the stream every {file.steps} frames",) if file.steps and not found.states else ()
    if all(cell.old for cell in found.chain.cells):
        return ()
    largest = max(
        (abs(w).max() for one in model.layers for n, w in one.weights.items() if n in ("h0", "c0")), default=0
    )
    start = f", from a stored initial state of up to {largest:.3g}" if largest else ""
    return (f"the file keeps no state between calls, so each begins anew{start}; the stream carries the state",)
