"""Compare the cells of other frameworks with cnorm's, 30 steps each against float64: `make frameworks`.

Each framework gets an environment of its own, with pinned packages, in build/frameworks; docs/frameworks.md is
rewritten with what was seen. `python check.py [FRAMEWORK ...]` runs some, and writes nothing.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
from cells import step_tolerance
from framework_page import PAGE, page
from steps import CELLS, PINS

import cnorm

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build" / "frameworks"
sys.path.insert(0, str(ROOT / "examples" / "frameworks"))

import recipes  # noqa: E402


def preset(kind, name) -> Callable:
    """A cell by preset, its tensors as they are."""
    return partial(kind, preset=name)


def torch(kind) -> Callable:
    return lambda tensors: cnorm.from_torch(tensors, "torch", kind=kind)[0]


def audio(tensors):
    return cnorm.from_torch(tensors, "torchaudio", eps=1e-5)[0]


def tail(recipe) -> Callable:
    """A recipe for tensors by the names behind the module's."""
    return lambda tensors: recipe({name.rpartition("/")[2].partition(".")[2]: a for name, a in tensors.items()})


def whole(recipe) -> Callable:
    """The same where several modules have the same names."""
    return lambda tensors: recipe({name.rpartition("/")[2]: array for name, array in tensors.items()})


# framework -> cell -> how it is read, and the words of docs/frameworks.md
READERS: dict[str, dict[str, tuple[Callable, str]]] = {
    "flax": {
        "linen-LSTMCell": (recipes.flax_lstm, "recipe `flax_lstm`"),
        "linen-OptimizedLSTMCell": (recipes.flax_lstm, "recipe `flax_lstm`"),
        "linen-GRUCell": (recipes.flax_gru, "recipe `flax_gru`"),
        "linen-SimpleCell": (recipes.flax_rnn, "recipe `flax_rnn`"),
        "nnx-LSTMCell": (recipes.flax_lstm, "recipe `flax_lstm`"),
        "nnx-OptimizedLSTMCell": (recipes.nnx_lstm, "recipe `nnx_lstm`"),
        "nnx-GRUCell": (recipes.nnx_gru, "recipe `nnx_gru`"),
        "nnx-SimpleCell": (recipes.nnx_rnn, "recipe `nnx_rnn`"),
    },
    "equinox": {
        "eqx-LSTMCell": (recipes.equinox_lstm, "recipe `equinox_lstm`"),
        "eqx-GRUCell": (recipes.equinox_gru, "recipe `equinox_gru`"),
    },
    "haiku": {
        "hk-LSTM": (tail(recipes.haiku_lstm), "recipe `haiku_lstm`"),
        "hk-GRU": (tail(recipes.haiku_gru), "recipe `haiku_gru`"),
        "hk-VanillaRNN": (whole(recipes.haiku_rnn), "recipe `haiku_rnn`"),
    },
    "keras": {
        "LSTM": (preset(cnorm.LSTM, "keras"), "preset `keras`"),
        "GRU": (preset(cnorm.GRU, "keras"), "preset `keras`"),
        "GRU-reset-before": (preset(cnorm.GRU, "keras_reset_before"), "preset `keras_reset_before`"),
        "SimpleRNN": (preset(cnorm.RNN, "keras"), "preset `keras`"),
    },
    "mlx": {
        "nn-LSTM": (recipes.mlx_lstm, "recipe `mlx_lstm`"),
        "nn-GRU": (recipes.mlx_gru, "recipe `mlx_gru`"),
        "nn-RNN": (recipes.mlx_rnn, "recipe `mlx_rnn`"),
    },
    "paddle": {
        "paddle-LSTM": (partial(recipes.paddle, kind="LSTM"), "recipe `paddle`"),
        "paddle-GRU": (partial(recipes.paddle, kind="GRU"), "recipe `paddle`"),
        "paddle-SimpleRNN": (partial(recipes.paddle, kind="RNN"), "recipe `paddle`"),
    },
    "torch": {f"{kind}Cell": (torch(kind), "preset `torch`") for kind in ("LSTM", "GRU", "RNN")},
    "written": {
        "haste-LayerNormLSTM": (preset(cnorm.LSTM, "haste"), "preset `haste`"),
        "haste-LayerNormGRU": (preset(cnorm.GRU, "haste"), "preset `haste`"),
        "tfa-LayerNormLSTMCell": (preset(cnorm.LSTM, "tfa"), "preset `tfa`"),
        "torchaudio-CustomLSTM": (audio, "preset `torchaudio`, eps 1e-5"),
    },
}


def environment(framework: str) -> Path:
    """The Python of a framework's environment, which is made where it is not there."""
    folder = BUILD / framework
    python, done = folder / "bin" / "python", folder / "pins"
    if not (done.exists() and done.read_text() == "\n".join(PINS[framework])):
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        pip = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        subprocess.run([*pip, *PINS[framework]], check=True)
        done.write_text("\n".join(PINS[framework]))
    return python


def bound(layer, x, before, exact) -> np.ndarray:
    """What a result of a step may err by rounding."""
    if layer.spec.activation != "relu":
        return step_tolerance(layer, exact)
    # without a limit on its states, those of a sum cancel: a rounding of all terms for each of them
    w, r, *biases = (np.abs(each.astype(np.float64)) for each in layer.weights.values())
    terms = w.shape[1] + r.shape[1] + len(biases)
    return terms * 2.0**-24 * (w @ np.abs(x) + r @ np.abs(before[0]) + sum(biases))


def worst(layer, path: Path) -> float:
    """The largest error of a step, in units of its bound."""
    found = np.load(path)
    stream, largest = cnorm.Model([layer]).stream(), 0.0
    for x, before, after in zip(found["x"], found["before"], found["after"], strict=True):
        names = ("h0", "c0")[: len(before)]
        stream.set_state(dict(zip(names, before.astype(np.float32), strict=True)))
        stream.step(x)
        for name, exact in zip(names, after, strict=True):
            error = np.abs(stream.state()[name] - exact) / bound(layer, x, before, exact)
            largest = max(largest, float(np.where(np.isnan(error), np.inf, error).max()))
    return largest


def check(framework: str) -> dict[str, float]:
    """The largest error of each cell."""
    folder = BUILD / "steps" / framework
    folder.mkdir(parents=True, exist_ok=True)
    quiet = os.environ | {"JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3"}
    script = Path(__file__).with_name("steps.py")
    subprocess.run([environment(framework), "-P", script, framework, folder], check=True, env=quiet)
    found = {}
    for name, (read, _) in READERS[framework].items():
        path = folder / f"{name}.npz"
        with np.load(path) as stored:
            tensors = {key.removeprefix("w:"): stored[key] for key in stored.files if key.startswith("w:")}
        found[name] = worst(read(tensors), path)
        print(f"{framework} {name}: {found[name]:.2f} of the bound of a step")
    return found


def main(names: list[str]) -> None:
    """Check, and write the page where all were checked."""
    assert {framework: list(cells) for framework, cells in CELLS.items()} == {f: list(c) for f, c in READERS.items()}
    seen = {framework: check(framework) for framework in names or PINS}
    wrong = [name for found in seen.values() for name, error in found.items() if error > 1]
    if wrong:
        sys.exit(f"beyond the bound of a step: {', '.join(wrong)}")
    if not names:
        PAGE.write_text(page(seen, READERS))


if __name__ == "__main__":
    main(sys.argv[1:])
