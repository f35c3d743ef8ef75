"""The largest errors of single steps of streaming ONNX files against float64: cnorm's and onnxruntime's.

    .venv/bin/python -P benchmarks/step_errors.py FOLDER --input sr=16000 --dim sequence=576

Each engine starts each of 2,000 steps from the state of the float64 trajectory, rounded to float32, since recurrences
may enlarge rounding errors. Frames are standard normal, times --scale. For y and each state the table has

    cnorm, onnxruntime   the largest error over the run, of onnxruntime with all its optimisations
    basic, off           the same with those levels of optimisation
    ratio                cnorm's largest error divided by onnxruntime's, the figure in docs/models.md
    worst frame          the largest quotient of both errors in a single frame, and the frame: the frame in which
                         onnxruntime happens to be luckiest, so no measure of accuracy
"""

import argparse
from pathlib import Path

import numpy as np

import cnorm
from cnorm.layers.embedding import in_tokens
from onnx_export import model_io
from onnx_export.description import state_table
from onnx_export.importer.interface import plan
from onnx_export.importer.proof import standard
from onnx_export.parity_engines import CnormEngine, Float64Engine, OrtEngine, interface

LEVELS = {"onnxruntime": "all", "basic": "basic", "off": "off"}


def engines(path, inputs, dims):
    """The model of a file, the float64 engine, and the others by name."""
    file = model_io.load(path, external_data=True)
    declared = file.graph.input
    names = {value.name for value in declared}
    symbols = {dim.dim_param for value in declared for dim in value.type.tensor_type.shape.dim}
    inputs = {name: value for name, value in inputs.items() if name in names}
    dims = {name: size for name, size in dims.items() if name in symbols}
    found = plan(file, inputs=inputs, states={}, dims=dims, frames=())
    model = cnorm.Model(found.chain.layers, tuple(found.chain.names.values()))
    units = {row["name"]: row["units"] for row in state_table(model)}
    file = standard(model, file, found)
    given = interface(file, model.input_size, units, model.outputs)
    others = {label: OrtEngine(file, given, level) for label, level in LEVELS.items()}
    return model, Float64Engine(file, given), {"cnorm": CnormEngine(model)} | others


def errors(model, judge, others, frames):
    """The largest error of each frame, by tensor and engine."""
    state = {name: array.astype(np.float64) for name, array in others["cnorm"].initial().items()}
    found = {}
    for number, frame in enumerate(frames):
        x, start = frame[None, None], {name: array.astype(np.float32) for name, array in state.items()}
        exact = judge.call(x, start)
        for label, engine in others.items():
            for tensor, value in engine.call(x, start).items():
                rows = found.setdefault(tensor, {}).setdefault(label, np.zeros(len(frames)))
                rows[number] = np.abs(value.astype(np.float64) - exact[tensor]).max()
        following = judge.call(x, state)
        state = {name: following[f"{name}_out"] for name in state}
    return found


def show(name, found):
    """The lines of a file."""
    for tensor, of in found.items():
        largest = {label: rows.max() for label, rows in of.items()}
        with np.errstate(divide="ignore", invalid="ignore"):
            each = np.nan_to_num(of["cnorm"] / of["onnxruntime"], nan=0.0, posinf=np.inf)
        frame = int(each.argmax())
        columns = "".join(f"{value:12.2e}" for value in largest.values())
        ratio = largest["cnorm"] / largest["onnxruntime"]
        print(f"{name:24} {tensor:8}{columns}{ratio:8.2f}{each[frame]:8.2f} ({frame})", flush=True)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--input", dest="inputs", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--dim", dest="dims", action="append", default=[], metavar="NAME=SIZE")
    parser.add_argument("--frames", type=int, default=2000)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    inputs = {name: float(value) for name, value in (text.split("=") for text in given.inputs)}
    dims = {name: int(size) for name, size in (text.split("=") for text in given.dims)}
    print(f"{'':33}" + "".join(f"{label:>12}" for label in ("cnorm", *LEVELS)) + f"{'ratio':>8}  worst frame")
    for path in sorted(given.folder.glob("*.onnx")):
        model, judge, others = engines(path, inputs, dims)
        frames = np.random.default_rng(given.seed).standard_normal((given.frames, model.input_size))
        frames = in_tokens((given.scale * frames).astype(np.float32), model.tokens)
        show(path.name, errors(model, judge, others, frames))


if __name__ == "__main__":
    main()
