"""docs/frameworks.md, from what `check.py` saw."""

from __future__ import annotations

from pathlib import Path

from steps import PINS

PAGE = Path(__file__).parents[2] / "docs" / "frameworks.md"
HEAD = """# Cells of other frameworks

`make frameworks` (`tests/frameworks/check.py`) installs each framework with pinned packages, runs 30 steps of each cell
in float64, and compares them with cnorm's: the tensors go through the preset or recipe of the row, and each step starts
from the framework's state rounded to float32. The last column is the largest error in units of what a step may err by
rounding (`step_tolerance` of `tests/support/cells.py`, 2e-6 for small layers; for relu a rounding of the magnitudes of
a sum for each of its terms). It rewrites this page; once a year is enough.

A *preset* ([cells.md](cells.md)) takes the framework's own names and shapes. A *recipe* is a function of
[examples/frameworks/recipes.py](../examples/frameworks/recipes.py), which puts the tensors into the names of a preset.
"written" are equations in NumPy, of packages that do not install beside the others: haste 0.5, which needs CUDA, and
TensorFlow Addons 0.23, as [cells.md](cells.md) has them, so no second opinion on these; torchaudio's as its wheel of
2.11 has them, whose library does not load beside PyTorch 2.13.

What is easily taken for the same and is not:

- `flax.nnx.GRUCell` has no bias behind the reset gate, linen's has: such a checkpoint of linen has no form in nnx.
- `haiku.LSTM` adds 1 to the forget gate in each step, so its stored bias is not the cell's; its gates are i, g, f, o.
- `haiku.GRU` resets before the product, and its z is the share of the new value; `haiku.VanillaRNN` is relu.
- Equinox and MLX keep the bias behind the reset gate apart (`bias_n`, `bhn`).
- A state dict of Paddle holds each tensor under two names.
- The cells of xLSTM have exponential gates, which no `CellSpec` says: they are not read.

| framework | cell | read by | largest error / bound |
|---|---|---|---|
"""


def version(framework: str) -> str:
    """A framework with its version, as in the table."""
    return "written" if framework == "written" else " ".join(PINS[framework][0].split("=="))


def page(seen, readers) -> str:
    """The page; `seen` are errors by framework and cell."""
    rows = [
        f"| {version(framework)} | {cell} | {readers[framework][cell][1]} | {error:.2f} |"
        for framework, errors in seen.items()
        for cell, error in errors.items()
    ]
    return HEAD + "\n".join(rows) + "\n"
