"""`cnorm import`: make a model of somebody's streaming ONNX file, prove it, and write it."""

from statistics import median
from time import perf_counter

import numpy as np

from cnorm.layers.embedding import in_tokens
from cnorm.storage.files import write_whole
from cnorm.text import clip, printable
from onnx_export.importer import Imported
from onnx_export.loader import imported
from onnx_export.ort import CannotRun

__all__ = ["import_file"]

CALLS = 300  # timed steps


def import_file(
    console, path: str, out: str, *, weights: str | None, smallest: int | None, npz: str | None, **given
) -> bool:
    """Read `path`, print what was found, write `out`; whether the recordings of `npz` agree, too.

    Parameters
    ----------
    console : rich.console.Console
    path, out : str
        `out` ends in .cnorm for a packed model; else it is a safetensors file.
    weights, smallest
        As of `Model.with_weights`, if the matrices are to be rounded.
    npz : str, optional
        A file of recordings [frames, inputs], run through the file and the model.
    given
        Arguments of `onnx_export.load`.
    """
    found = imported(path, **given)
    if not isinstance(found, Imported):
        raise ValueError(f"{path}: it was written by `export`; cnorm pack and cnorm quantize take cnorm.load's files")
    _show(console, found)
    same = npz is None or _compare(console, found, npz)
    model = found.model
    if weights:
        model = model.with_weights(weights, smallest=smallest)
    _show_times(console, found, model)
    if out.lower().endswith(".cnorm"):
        write_whole(out, model.packed_bytes())
    else:
        model.save(out)
    console.print(f"{out}: {model.weights} weights, {model.nbytes} bytes of them", markup=False)
    return same


def _show(console, found: Imported) -> None:
    """The layers, the states and the parity table."""
    x, y = (printable(", ".join(names)) for names in (found.frames, found.outputs))
    console.print(f"x is {x}, y is {y}", markup=False)
    for state, result in found.states.items():
        console.print(f"state {printable(state)}, given back by {printable(result)}", markup=False)
    if found.time_axis is not None:
        console.print(f"steps are axis {found.time_axis} of {x}", markup=False)
    for index, layer in enumerate(found.model.layers):
        console.print(f"  {index}: {clip(repr(layer), 200)}", markup=False)
    if found.report is not None:
        console.print(found.report)


def _compare(console, found: Imported, npz: str) -> bool:
    """Run the recordings through the file and the model."""
    from cnorm.tools.quantize import recordings  # the commands' reader of .npz files

    same = True
    for index, x in enumerate(recordings(npz, found.model)):
        steps = found.file.steps
        if found.time_axis is not None and steps is not None and len(x) != steps:
            raise ValueError(f"{npz}: recording {index} has {len(x)} frames, the file takes {steps}")
        try:
            theirs = found.file.run(np.ascontiguousarray(x, np.float32))
        except CannotRun as error:
            raise ValueError(f"onnxruntime does not run the file on recording {index}: {error}") from None
        ours = found.model.run(x)
        comparison = found.model.check(x, np.concatenate([ours[: -len(theirs)], theirs]))
        console.print(f"recording {index}: {comparison}", markup=False)
        same &= comparison.ok
    return same


def _show_times(console, found: Imported, model) -> None:
    """The median of a step of the model, and of the file in onnxruntime where a call is a step."""
    x = np.random.default_rng(0).standard_normal((CALLS, found.model.input_size)).astype(np.float32)
    x = in_tokens(x, model.tokens)
    if any(layer.kind == "Bidirectional" for layer in found.model.layers):
        return
    stream, y = model.stream(), np.empty(model.output_size, np.float32)
    ours = _median(lambda frame: stream.step(frame, out=y), x)
    text = f"a step: {ours:.1f} us in cnorm"
    if found.time_axis is None:
        states = found.file.zeros(found.states)
        theirs = _median(lambda frame: found.file.call(frame, states), x)
        text += f", {theirs:.1f} us in onnxruntime, {theirs / ours:.1f} times as long"
    console.print(f"{text} (medians of {CALLS}, one thread)", markup=False)


def _median(call, frames) -> float:
    times = []
    for frame in frames:
        start = perf_counter()
        call(frame)
        times.append(perf_counter() - start)
    return median(times) * 1e6
