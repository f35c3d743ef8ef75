"""`cnorm import`: make a model of somebody's streaming ONNX file, prove it, and write it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from statistics import median
from time import perf_counter

import numpy as np

from cnorm.layers.embedding import in_tokens
from cnorm.storage.files import write_whole
from cnorm.text import clip, printable
from onnx_export.errors import NotImported
from onnx_export.importer import Imported
from onnx_export.importer.recorded import recorded
from onnx_export.importer.worker import CALLS, Received
from onnx_export.loader import received

__all__ = ["as_options", "import_file"]

_FRAMES = 200

# The options of the command by the argument of `onnx_export.load` that each gives, and what it takes.
OPTIONS = {
    "inputs": ("--input", "NAME=VALUE"),
    "states": ("--state", "IN=OUT"),
    "dims": ("--dim", "NAME=SIZE"),
    "frames": ("--frame", "NAME"),
    "outputs": ("--output", "NAME"),
    "timeout": ("--timeout", "SECONDS"),
    "memory": ("--memory", "GIB"),
}
_GIVEN = r"=[{\[][^{}\[\]]*[}\]]|=[A-Z]+\b|\['[^'\]]*'\]"  # dims={'T': 6}, frames=[...], timeout=SECONDS, dims['T']
_ARGUMENT = re.compile(rf"\b({'|'.join(OPTIONS)})({_GIVEN})")
_SUBJECT = re.compile(rf"^({'|'.join(OPTIONS)})(?=:)")
_WITH = re.compile(r"with (--.*?)(?:, which| it has layers)")
_PAIR = re.compile(r"'([^']*)'(?:: *'?([^',}]+)'?)?")


def import_file(
    console, path: str, out: str, *, weights: str | None, smallest: int | None, npz: str | None, table: bool, **given
) -> bool:
    """Read `path`, print what was found, and write `out` if the recordings of `npz` agree; whether they do.

    Parameters
    ----------
    console : rich.console.Console
    path, out : str
        `out` ends in .cnorm for a packed model; else it is a safetensors file.
    weights, smallest
        As of `Model.with_weights`, if the matrices are to be rounded.
    npz : str, optional
        A file of recordings, see `recorded`, run through the file and the model.
    table : bool
        Print every row of the comparison.
    given
        Arguments of `onnx_export.loader.received`.
    """
    try:
        result = received(path, recordings=npz, timed=True, **given)
    except NotImported as error:
        reasons = [*map(as_options, error.reasons)]
        reasons[-1:-1] = _to_type(path, out, reasons, given)
        raise NotImported(as_options(error.summary), reasons) from None
    except (TypeError, ValueError) as error:
        raise type(error)(as_options(str(error))) from None
    if not isinstance(result, Received):
        raise ValueError(f"{path}: it was written by `export`; cnorm pack and cnorm quantize take cnorm.load's files")
    found = result.found
    _show(console, found, table)
    model = found.model.with_weights(weights, smallest=smallest) if weights else found.model
    if weights:
        _show_rounding(console, found.model, model)
    if npz is not None and not _compare(console, result, model, npz):
        console.print(f"{out} is not written: the recordings of {npz} disagree", markup=False, soft_wrap=True)
        return False
    _show_times(console, result, model)
    if out.lower().endswith(".cnorm"):
        write_whole(out, model.packed_bytes())
    else:
        model.save(out)
    console.print(f"{out}: {model.weights} weights, {model.nbytes} bytes of them", markup=False, soft_wrap=True)
    return True


def as_options(text: str) -> str:
    """A message of `onnx_export.load` with its arguments as options of the command: dims={'T': 6} is --dim T=6."""
    return _ARGUMENT.sub(_as_option, _SUBJECT.sub(lambda match: OPTIONS[match[1]][0], text))


def _to_type(path: str, out: str, reasons: Sequence[str], given: Mapping) -> list[str]:
    """The command with the first options that a refusal says give layers, to be pasted."""
    for reason in reasons:
        if found := _WITH.match(reason):
            words = ["cnorm", "import", path, out]
            for name in ("inputs", "states", "dims", "frames", "outputs"):
                pairs = given.get(name) or {}
                values = [f"{k}={_text(v)}" for k, v in pairs.items()] if isinstance(pairs, Mapping) else pairs
                words += [word for value in values for word in (OPTIONS[name][0], value)]
            return [f"to type: {shlex.join(words)} {found[1].replace(', --', ' --')}"]
    return []


def _text(value) -> str:
    """A value of an option as it was typed: 16000.0 is 16000."""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def _as_option(match: re.Match) -> str:
    option, wanted = OPTIONS[match[1]]
    pairs = [f"{name}={other}" if other else name for name, other in _PAIR.findall(match[2])]
    return " ".join(f"{option} {given if given == wanted else shlex.quote(given)}" for given in pairs or [wanted])


def _show(console, found: Imported, table: bool) -> None:
    """The layers, the states and the comparison."""
    x, y = (printable(", ".join(names)) for names in (found.frames, found.outputs))
    console.print(f"x is {x}, y is {y}", markup=False, soft_wrap=True)
    for state, result in found.states.items():
        text = f"state {printable(state)}, given back by {printable(result)}: the stream carries it"
        console.print(text, markup=False, soft_wrap=True)
    if found.time_axis is not None:
        text = f"steps are axis {found.time_axis} of {x}; the stream carries the states from step to step"
        console.print(text, markup=False, soft_wrap=True)
    for note in found.notes:
        console.print(f"note: {as_options(note)}", markup=False, soft_wrap=True)
    for index, layer in enumerate(found.model.layers):
        console.print(f"  {index}: {clip(repr(layer), 200)}", markup=False, soft_wrap=True)
    if found.report is not None:
        console.print(found.report.table() if table else str(found.report), markup=False, soft_wrap=True)


def _show_rounding(console, proven, model) -> None:
    """What the rounded weights cost over _FRAMES random frames: the proof is of those of the file."""
    from onnx_export.parity_recordings import Domain

    x = Domain(proven)(np.random.default_rng(0).standard_normal((_FRAMES, proven.input_size), np.float32))
    y = proven.run(x)
    error, size = float(np.abs(model.run(x) - y).max()), float(np.abs(y).max())
    text = (
        f"with {model.weights} weights: off by at most {error:.2g} in {_FRAMES} random frames, outputs up to {size:.2g}"
    )
    if error > size / 100:
        text += "; --check with real frames tells whether that is too much, and float16 is nearer"
    console.print(text, markup=False, soft_wrap=True)


def _compare(console, result: Received, model, npz: str) -> bool:
    """Compare the outputs of recordings with the file's and a framework's; say how far off rounded weights are."""
    found, same = result.found, True
    for (name, x, expected), theirs in zip(recorded(npz, found.model), result.runs, strict=True):
        ours = found.model.run(x)
        for what, y in (("the file", theirs), (f"y of {npz}", expected)):
            if y is None:
                continue
            comparison = found.model.check(x, np.concatenate([ours[: -len(y)], y]))
            console.print(
                f"recording {clip(printable(name), 80)} against {what}: {comparison}", markup=False, soft_wrap=True
            )
            same &= comparison.ok
        if model is not found.model:
            error = float(np.abs(model.run(x) - ours).max())
            size = float(np.abs(ours).max())
            console.print(
                f"  with {model.weights} weights: off by at most {error:.2g}, outputs up to {size:.2g}", markup=False
            )
    return same


def _show_times(console, result: Received, model) -> None:
    """The median of a step of the model, and of the file in onnxruntime where a call is a step."""
    if any(layer.kind == "Bidirectional" for layer in result.found.model.layers):
        return
    x = np.random.default_rng(0).standard_normal((CALLS, model.input_size)).astype(np.float32)
    stream, y, times = model.stream(), np.empty(model.output_size, np.float32), []
    for frame in in_tokens(x, model.tokens):
        start = perf_counter()
        stream.step(frame, out=y)
        times.append(perf_counter() - start)
    ours = median(times) * 1e6
    text = f"a step: {ours:.1f} us in cnorm"
    if result.step is not None:
        text += f", {result.step:.1f} us in onnxruntime, {result.step / ours:.1f} times as long"
    console.print(f"{text} (medians of {CALLS}, one thread)", markup=False, soft_wrap=True)
