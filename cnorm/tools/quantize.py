"""`cnorm quantize`: write a model with rounded weights, and measure its errors against float64.

A layer is judged by single steps: each starts from the state of the float64 trajectory, because normalised recurrences
amplify errors. The model's outputs are those of a free run. The float64 trajectory is that of the layer's ONNX graph.
"""

import io
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

import cnorm
from cnorm._core import INT8_COLS
from cnorm.cells.rounded import LEVELS
from cnorm.cells.specs import GATES
from cnorm.layers.chain import followed, with_outputs
from cnorm.layers.embedding import in_tokens
from cnorm.storage.files import read_regular, write_whole
from cnorm.text import clip, message_of

__all__ = ["Report", "layers_of", "measured", "recordings", "show"]

FRAMES = 64  # random frames if none are given
MAX_BYTES = 1 << 30  # of all arrays of an .npz file together
# A rounded row with an error beyond this share of its norm is named. int8 gives 0.4 % for uniform weights, 0.7 % for
# normal ones, and this where the row's largest weight is 9 times its root mean square.
COARSE = 0.02
DROWNS = 100.0  # an input is named that reaches so many times the median of what the others reach
FAR = 8.0  # a step is named that has an output whose error is beyond this many times the layer's root mean square


@dataclass
class LayerReport:
    """Errors that rounding causes in one layer.

    Attributes
    ----------
    name : str
        Its place in the model, as in the file: "layers.0".
    layer : cnorm layer
    types : dict of str to str
        Type of each matrix by name.
    bytes_before, bytes_after : int
        Of its matrices, scales included.
    errors : ndarray [recordings] of ndarray [frames, outputs], float64
        Output of the rounded layer less that of float64, each step from the state of the float64 trajectory.
    remarks : list of str
    """

    name: str
    layer: object
    types: dict[str, str]
    bytes_before: int
    bytes_after: int
    errors: list[np.ndarray] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)


@dataclass
class Report:
    """Errors that rounding causes in a model; arrays have one element per recording, [frames, outputs], float64."""

    layers: list[LayerReport]
    exact: list[np.ndarray]
    float32: list[np.ndarray]
    rounded: list[np.ndarray]


def recordings(path, model) -> list[np.ndarray]:
    """The arrays [frames, input_size] of an untrusted .npz file as float32, or one of random frames if path is None."""
    if path is None:
        frames = np.random.default_rng(0).standard_normal((FRAMES, model.input_size)).astype(np.float32)
        return [in_tokens(frames, model.tokens)]
    return [frames_of(path, name, array, model.input_size) for name, array in arrays_of(path).items()]


def arrays_of(path) -> dict[str, np.ndarray]:
    """The arrays of an untrusted .npz file, at least one."""
    data = io.BytesIO(read_regular(path))
    try:
        with zipfile.ZipFile(data) as archive:
            size = sum(member.file_size for member in archive.infolist())
        if size > MAX_BYTES:
            raise ValueError(f"it unpacks to {size} bytes, the limit is {MAX_BYTES}")
        data.seek(0)
        with np.load(data, allow_pickle=False) as archive:
            found = {name: archive[name] for name in archive.files}
    except Exception as error:  # NumPy and zipfile raise exceptions of many types for a malformed file
        raise ValueError(f"{path} is not an .npz file of numbers that can be read: {message_of(error)}") from None
    if not found:
        raise ValueError(f"{path} must have at least one array of frames, got none")
    return found


def frames_of(path, name: str, array: np.ndarray, size: int) -> np.ndarray:
    """An array [frames, size] of an .npz file as float32; ValueError for any other array."""
    shown = f"{path}: the array {clip(repr(name), 100)}"
    if array.dtype.kind not in "fiu" or array.ndim != 2 or array.shape[1] != size or not len(array):
        raise ValueError(f"{shown} must be [frames, {size}] numbers, got {array.dtype} {array.shape}")
    with np.errstate(over="ignore"):
        array = array.astype(np.float32)
    if not np.isfinite(array).all():
        raise ValueError(f"{shown} must be finite in float32, got NaN or infinity")
    return array


def layers_of(model, rounded) -> Iterator[LayerReport]:
    """A report, without errors yet, of each layer that has matrices."""
    for name, layer, new in leaves(model, rounded):
        found = layer.matrices()
        if not found:
            continue
        rows = {key: new.rows.get(key) for key in found}
        types = {key: "float32" if one is None else one.rows.dtype.name for key, one in rows.items()}
        before = {key: 4 * matrix.values.size for key, matrix in found.items()}
        after = sum(before[key] if one is None else one.nbytes for key, one in rows.items())
        report = LayerReport(name, layer, types, sum(before.values()), after)
        for key, one in rows.items():
            if one is not None and types[key] != "float32":
                report.remarks += coarse_rows(layer, key, found[key], one)
        yield report


def leaves(model, rounded) -> Iterator[tuple[str, object, object]]:
    """Each layer that holds no others, as (name, layer, rounded layer)."""
    for i, pair in enumerate(zip(model.layers, rounded.layers, strict=True)):
        for (name, layer), (_, new) in zip(*(one.leaves(f"layers.{i}") for one in pair), strict=True):
            yield name, layer, new


def coarse_rows(layer, name, matrix, rows) -> list[str]:
    """One sentence for each gate of a matrix that has rows which the type represents coarsely; the worst row's."""
    exact = np.float64(matrix.rounded(np.float32).rows)
    size = np.sqrt(np.mean(exact**2, axis=1))
    error = np.sqrt(np.mean((rows.values() - exact) ** 2, axis=1))
    share = np.divide(error, size, out=np.zeros_like(size), where=size > 0)
    letters = GATES.get(layer.kind, "")
    found = []
    for gate, rows_of in enumerate(np.split(np.arange(len(share)), matrix.gates)):
        worst = rows_of[share[rows_of].argmax()]
        if share[worst] > COARSE:
            count = int((share[rows_of] > COARSE).sum())
            where = f"gate {letters[gate]}, unit {worst - rows_of[0]}" if matrix.gates > 1 else f"output {worst}"
            largest = np.abs(exact[worst]).max() / size[worst]
            found.append(
                f"{name} is sensitive: {count} of {len(rows_of)} rows are rounded by more than {COARSE:.0%}, most in "
                f"{where}, by {share[worst]:.1%}: its largest weight is {largest:.0f} times the row's root mean square"
            )
    return found


def measured(model, rounded, inputs) -> Report:
    """The errors of all layers and of the outputs for each recording of `inputs`."""
    report = Report(list(layers_of(model, rounded)), [], [], [])
    by_name = {layer.name: layer for layer in report.layers}
    trajectories = {name: Trajectory(layer, new) for name, layer, new in leaves(model, rounded)}

    def run(name, layer, x):
        if layer.inner():
            return layer.through(name, x, run)
        y, errors = trajectories[name].run(x)
        if name in by_name:
            by_name[name].remarks += drowning_input(by_name[name], x) if not by_name[name].errors else []
            # a backward layer reads the recording from its end
            by_name[name].errors.append(errors[::-1] if name.endswith(".backward") else errors)
        return y

    layers = {str(i): layer for i, layer in enumerate(with_outputs(model.layers, tuple(model.outputs)))}
    for x in inputs:
        report.exact.append(followed("layers", layers, np.float64(x), run))
        report.float32.append(np.float64(model.run(x)))
        report.rounded.append(np.float64(rounded.run(x)))
    for layer in report.layers:
        layer.remarks += far_steps(layer)
    return report


def drowning_input(layer, x) -> list[str]:
    """A sentence if one input of a layer with int8 weights is so much larger than the others that these are lost."""
    reach = np.abs(x).max(axis=0)
    worst, others = int(reach.argmax()), np.median(reach)
    if "int8" not in layer.types.values() or not reach[worst] > DROWNS * others > 0:
        return []
    return [
        f"input {worst} reaches {reach[worst]:.2g}, {reach[worst] / others:.0f} times the median of the others: int8 "
        f"products round the inputs of a step to 1/{LEVELS} of the largest, so that the others lose their digits; "
        "scale it down and its column of the weights up, before training or in the checkpoint"
    ]


class Trajectory:
    """A layer in float64, and single steps of the rounded layer from its states."""

    def __init__(self, layer, rounded):
        self.layers, self.rounded = [layer], [rounded]

    def run(self, x) -> tuple[np.ndarray, np.ndarray]:
        """Outputs [frames, outputs] in float64 for x [frames, inputs], and the errors of the rounded layer."""
        import onnx_export
        from onnx_export.float64 import Float64

        ones = [] if self.layers[0].input_size else [cnorm.Scale(np.ones(x.shape[1], np.float32))]  # gives a size
        graph = Float64(onnx_export.export(cnorm.Model([*ones, *self.layers]), portable=True))
        stream = cnorm.Model([*ones, *self.rounded]).stream()
        state = {name: np.float64(value) for name, value in stream.state().items()}
        y, errors = [], []
        for frame in x:
            stream.set_state({name: value.astype(np.float32) for name, value in state.items()})
            step = stream.step(frame.astype(np.float32))
            found = graph.run({"x": frame[None]} | {f"{name}_in": value[None] for name, value in state.items()})
            state = {name: found[f"{name}_out"][0] for name in state}
            y.append(found["y"][0])
            errors.append(step - y[-1])
        return np.array(y), np.array(errors)


def far_steps(layer) -> list[str]:
    """A sentence if the worst step of a layer is far from the others."""
    rms = root_mean_square(layer.errors)
    recording, frame, worst = worst_frame(layer.errors)
    if not worst > FAR * rms > 0:
        return []
    where = f"frame {frame}" + (f" of recording {recording}" if len(layer.errors) > 1 else "")
    text = f"sensitive at {where}: the error of an output is {worst / rms:.0f} times the root mean square of all"
    spec = getattr(layer.layer, "spec", None)
    return [text + "; a norm there may divide by a small deviation" if spec and spec.normalises else text]


def root_mean_square(errors) -> float:
    return float(np.sqrt(np.mean(np.concatenate(errors) ** 2)))


def worst_frame(errors) -> tuple[int, int, float]:
    """Recording and frame with the largest error of an element, and this error."""
    largest = [np.abs(one).max(axis=1) for one in errors]
    recording = int(np.argmax([one.max() for one in largest]))
    frame = int(largest[recording].argmax())
    return recording, frame, float(largest[recording][frame])


def place(errors) -> list[str]:
    """The cells of a table for the frame with the largest error, after the recording if there are several."""
    recording, frame, _ = worst_frame(errors)
    return [str(recording), str(frame)] if len(errors) > 1 else [str(frame)]


# ------------------------------------------------------------------------------------------------- printed text


def show(console, report, model, rounded, source) -> None:
    """Print the tables and remarks; `source` says which frames were run."""
    console.print("[bold]Layers: error of single steps from the float64 trajectory[/]")
    console.print(layer_table(report))
    for layer in report.layers:
        kept = [name for name, kind in layer.types.items() if kind == "float32"]
        if kept:
            console.print(f"{layer.name}: {why_kept(layer, kept)}", style="dim")
        for remark in layer.remarks:
            console.print(f"{layer.name}: {remark}", style="yellow")
    console.print("[bold]Outputs: error of a free run against float64[/]")
    console.print(output_table(report))
    answers = [exact.argmax(1) != new.argmax(1) for exact, new in zip(report.exact, report.rounded, strict=True)]
    if model.output_size > 1:
        changed = sum(map(np.sum, answers))
        console.print(f"the index of the largest output differs in {changed} of {sum(map(len, answers))} frames")
    console.print(f"a step reads {kilo(model.nbytes)} kB of packed matrices, now {kilo(rounded.nbytes)} kB")
    console.print(f"frames: {source}", style="dim")


def layer_table(report):
    """One row for each layer with matrices."""
    table = table_of("layer", "weights", "kB", "now kB", "rms", "worst", *places(report))
    for layer in report.layers:
        _, _, worst = worst_frame(layer.errors)
        kinds = "/".join(dict.fromkeys(layer.types.values()))
        table.add_row(
            f"{layer.name} {layer.layer.kind}", kinds, kilo(layer.bytes_before), kilo(layer.bytes_after),
            f"{root_mean_square(layer.errors):.1e}", f"{worst:.1e}", *place(layer.errors),
        )  # fmt: skip
    return table


def output_table(report):
    """The outputs' errors in a free run, of the float32 model and of the rounded one."""
    table = table_of("model", "rms", "worst", *places(report))
    for name, found in (("float32", report.float32), ("rounded", report.rounded)):
        errors = output_errors(report, found)
        _, _, worst = worst_frame(errors)
        table.add_row(name, f"{root_mean_square(errors):.1e}", f"{worst:.1e}", *place(errors))
    return table


def output_errors(report, outputs) -> list[np.ndarray]:
    return [found - exact for found, exact in zip(outputs, report.exact, strict=True)]


def places(report) -> list[str]:
    """The columns that `place` fills."""
    return ["recording", "frame"] if len(report.exact) > 1 else ["frame"]


def table_of(*columns):
    """A table whose numbers are right-aligned."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in columns:
        table.add_column(name, justify="left" if name in ("layer", "model", "weights") else "right")
    return table


def why_kept(layer, names) -> str:
    """Which matrices stay float32, and for which reason."""
    parts = []
    for name in names:
        rows, cols = layer.layer.matrices()[name].values.shape
        few = "fewer weights than --smallest"
        why = few if cols <= INT8_COLS else f"rows of more than {INT8_COLS} inputs have no exact sums"
        parts.append(f"{name} stays float32: {rows}x{cols}, {why}")
    return "; ".join(parts)


def kilo(size) -> str:
    return f"{size / 1000:,.1f}"


def picture(report, path) -> None:
    """Draw the error of every frame, on a logarithmic axis: each layer's single steps, and the outputs' free run."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    with plt.rc_context({"axes.spines.top": False, "axes.spines.right": False, "axes.titleweight": "bold"}):
        figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.2), layout="constrained", sharey=True)
        for layer in report.layers:
            draw(left, layer.errors, f"{layer.name} {layer.layer.kind}")
        draw(right, output_errors(report, report.float32), "float32")
        draw(right, output_errors(report, report.rounded), "rounded")
        left.set(title="Single steps of each layer", ylabel="root mean square error against float64")
        right.set(title="Outputs of a free run")
        for axes in (left, right):
            axes.set(yscale="log", xlabel="frame, all recordings one after the other")
            axes.grid(axis="y", alpha=0.3)
            axes.legend(frameon=False, fontsize=9)
        drawing = io.BytesIO()
        figure.savefig(drawing, dpi=110, format="png")
        write_whole(path, drawing.getvalue())
        plt.close(figure)


def draw(axes, errors, label) -> None:
    axes.plot(np.sqrt(np.mean(np.concatenate(errors) ** 2, axis=1)), lw=1.2, label=label)
