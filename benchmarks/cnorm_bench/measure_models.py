"""Times of single steps of streaming models in ONNX files, batch 1, in cnorm and in onnxruntime."""

from contextlib import suppress
from pathlib import Path

import numpy as np

from cnorm.layers.embedding import in_tokens
from cnorm_bench import contenders
from cnorm_bench.contenders.memcpy_ import streaming_read
from cnorm_bench.environment import surroundings
from cnorm_bench.measure_steps import percentiles
from cnorm_bench.runners import Cnorm, Interface, OrtBinding, OrtRun, latencies

__all__ = ["models", "models_picture", "models_tables"]

FRAMES = 50  # of one turn of a contender


def models(sizes=None, *, folder, inputs=None, dims=None, seconds=2.0, advance=lambda description, total: None):
    """Time single steps of each model of a folder that `onnx_export.load` takes, the contenders interleaved.

    Parameters
    ----------
    sizes : None
        Unused: the files have sizes.
    folder : str or path-like
        With .onnx files.
    inputs : dict of str to number, optional
        Values of inputs that are the same for each frame, for the files that have an input of that name.
    dims : dict of str to int, optional
        Sizes of symbolic dimensions, for the files that have one of that name.
    seconds : float
        For each contender and file.
    advance : callable
        As in `norms`.

    Returns
    -------
    dict
        "records": one for each file and contender, with percentiles in microseconds over at least 1000 steps, and the
        largest error of y of a single step against float64 (inputs of scale 100 included), from the comparison that
        `load` makes; none for int8;
        "limits": for each file the bytes of its weights and the time of a streaming read of as many.

    Raises
    ------
    ValueError
        If the folder has no .onnx file.
    """
    paths = sorted(Path(folder).glob("*.onnx"))
    if not paths:
        raise ValueError(f"folder: {folder} has no .onnx file")
    records, limits, left_out = [], [], []
    for path in paths:
        advance(path.name, len(paths))
        found = _found(path, inputs or {}, dims or {}, left_out)
        if found is None:
            continue
        made = _contenders(path, found)
        frames = np.random.default_rng(0).standard_normal((FRAMES, found.model.input_size), dtype=np.float32)
        frames = in_tokens(frames, found.model.tokens)
        trial, _ = latencies(made, [frames], at_a_time=1)
        a_step = sum(float(np.median(t)) for t in trial.values()) / 1e6
        repeats = int(np.clip(seconds * len(made) / (a_step * FRAMES), 20, 400))
        measured, _ = latencies(made, [frames] * repeats, at_a_time=1, uncounted=2)
        errors = _errors(found.report)
        for label, t in measured.items():
            record = {"file": path.name, "contender": label, "error": errors.get(label)}
            records.append(record | percentiles(t))
        limits.append(
            {"file": path.name, "weight_bytes": found.model.nbytes, "microseconds": _read(found.model.nbytes)}
        )
    document = {"format": 1, "kind": "models"} | surroundings() | {"left_out": left_out}
    return document | {"records": records, "limits": limits}


def _found(path, inputs, dims, left_out):
    """The imported model, None if it is none, with the reason in `left_out`."""
    from onnx_export import model_io
    from onnx_export.importer import import_model
    from onnx_export.importer.dimensions import open_dimensions

    try:
        model = model_io.load(path, external_data=True)
        names = {value.name: value for value in model.graph.input}
        symbols = open_dimensions(names, {})
        found = import_model(
            model,
            check=True,
            states={},
            frames=(),
            inputs={name: value for name, value in inputs.items() if name in names},
            dims={name: size for name, size in dims.items() if name in symbols},
        )
    except Exception as error:  # a file of a stranger: any of onnx's and protobuf's errors
        reasons = " ".join(line.strip() for line in str(error).removeprefix(f"{path}: ").splitlines()[:2])
        left_out.append(f"{path.name} is left out: {reasons[:300]}")
        return None
    if found.time_axis is not None:
        left_out.append(f"{path.name} is left out: it is no step of a model of another program")
        return None
    return found


def _contenders(path, found):
    face = Interface(
        frames=found.file.zeros(found.frames),
        outputs=tuple(found.outputs),
        pairs=found.states,
        zeros=found.file.zeros(found.states),
        constants=found.file.constants(),
    )
    made = [Cnorm(found.model)]
    with suppress(ValueError):  # all its matrices are too small to be rounded
        made.append(Cnorm(found.model.with_weights("int8"), "cnorm, int8"))
    content = path.read_bytes()
    return [*made, OrtRun(content, face), OrtBinding(content, face=face)]


def _errors(report):
    """The largest difference of y from float64 over the compared steps, by contender."""
    errors = {}
    for row in report.rows if report else ():
        if row.against == "float64" and row.tensor == "y":
            label = {"cnorm": "cnorm", "onnxruntime all": "onnxruntime, run()"}.get(row.engine)
            errors[label] = max(errors.get(label, 0.0), row.max_abs)
    return errors


def _read(size):
    """Microseconds to read as many bytes once, by the fastest streaming read."""
    x = np.ones(max(size, 1 << 12) // 4, np.float32)
    measured = contenders.times(streaming_read(x), seconds=0.3)
    return min(float(np.median(t)) for t in measured.values())


def models_tables(console, document):
    """One table for each file: percentiles, the multiple of cnorm's median, the error."""
    from rich.table import Table

    for limit in document["limits"]:
        records = [r for r in document["records"] if r["file"] == limit["file"]]
        ours = next(r["p50"] for r in records if r["contender"] == "cnorm")
        title = f"\n{limit['file']}: a step in microseconds"
        style = {"title_justify": "left", "title_style": "bold", "header_style": "dim"}
        table = Table(title=title, box=None, pad_edge=False, **style)
        for i, name in enumerate(("", "p50", "p99", "p99.9", "against cnorm", "error")):
            table.add_column(name, justify="right" if i else "left")
        for r in records:
            error = "" if r["error"] is None else f"{r['error']:.1e}"
            times = [f"{r[p]:.4g}" for p in ("p50", "p99", "p99.9")]
            table.add_row(r["contender"], *times, f"{r['p50'] / ours:.2f}x", error)
        table.add_row(f"reading {limit['weight_bytes'] / 1e6:.3g} MB once", f"{limit['microseconds']:.4g}")
        console.print(table)


def models_picture(document, file):
    """Bars of the median step of each file and contender."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    from cnorm_bench.report import STYLES

    files = [limit["file"] for limit in document["limits"]]
    labels = list(dict.fromkeys(r["contender"] for r in document["records"]))
    figure, axes = plt.subplots(figsize=(9, 1.2 + 0.9 * max(1, len(files))), layout="constrained")
    height = 0.8 / max(1, len(labels))
    for k, label in enumerate(labels):
        rows = [r for r in document["records"] if r["contender"] == label]
        at = [files.index(r["file"]) + (k - (len(labels) - 1) / 2) * height for r in rows]
        hollow = STYLES.get(label, {}).get("mfc") == "white"
        colour = STYLES.get(label, {}).get("color", "#70767c")
        face = {"facecolor": "white" if hollow else colour, "edgecolor": colour}
        axes.barh(at, [r["p50"] for r in rows], height * 0.9, label=label, **face)
    axes.set(xscale="log", xlabel="microseconds a step, the median")
    axes.set_xlim(left=min((r["p50"] for r in document["records"]), default=1.0) / 2)
    axes.set_yticks(range(len(files)), files)
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=4)
    axes.set_title(
        f"{document['processor']}, {document['isa']}, one thread", fontsize=9, color="#70767c", loc="right", y=1.12
    )
    figure.savefig(file, dpi=110, format="png")
    plt.close(figure)
