"""Load streaming models from ONNX files of other programs, as a list of layers that is proven against the file.

`trace.py` follows each element of a frame through the graph (`elements.py`, `computing.py`, `operators_of_cells.py`),
`activations.py` and `cells.py` (by `affine.py`, `normed_rows.py` and the float64 values of `values.py`) find what is
written out, `chain.py` finds the steps and `joining.py` makes layers of them, `interface.py` finds which inputs are
states, `proof.py` compares with the file. `command.py` is `cnorm import`.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx
from onnx import inliner

from cnorm.model import Model
from onnx_export.errors import NotImported
from onnx_export.importer.interface import plan
from onnx_export.importer.proof import FileRun, prove
from onnx_export.nodes import model_nodes
from onnx_export.ort import CannotRun
from onnx_export.parity_report import ParityReport

__all__ = ["Imported", "import_model"]


@dataclass(frozen=True)
class Imported:
    """A model, and how the file was read.

    Attributes
    ----------
    model : cnorm.Model
    frames : tuple of str
        The inputs that are x, one behind another.
    outputs : tuple of str
        The outputs that are y, one behind another.
    states : dict of str to str
        The inputs that are states, each with the output that gives it back. Empty for a file over a time axis.
    time_axis : int or None
        The axis of the frame that counts steps.
    file : FileRun
        The file itself, to run beside the model.
    report : ParityReport or None
        The comparison of single steps; None without one (`check=False`, or a model that reads both directions).
    """

    model: Model
    frames: tuple[str, ...]
    outputs: tuple[str, ...]
    states: dict[str, str]
    time_axis: int | None
    file: FileRun
    report: ParityReport | None


def import_model(onnx_model: onnx.ModelProto, *, check: bool, **given) -> Imported:
    """Find the layers of a file, and prove that they compute what it does; arguments as of `onnx_export.load`."""
    if onnx_model.functions:
        onnx_model = inliner.inline_local_functions(onnx_model)
    for node in model_nodes(onnx_model):  # onnxruntime 1.32 crashes where the last input of a LayerNormalization is ""
        while node.input and not node.input[-1]:
            del node.input[-1]
    try:
        found = plan(onnx_model, **given)
        model = Model(found.chain.layers, tuple(found.chain.names.values()))
        if model.input_size != len(found.chain.frame):
            raise NotImported(f"no layer reads the last of the {len(found.chain.frame)} elements of x")
    except NotImported:
        raise
    except Exception as error:  # the file is untrusted: what it says may fit nothing that is expected
        raise NotImported(f"no model can be made of it: {type(error).__name__}: {error}") from None
    report = prove(model, onnx_model, found) if check else None
    try:
        file = FileRun(onnx_model, found)
    except CannotRun as error:
        raise NotImported(f"onnxruntime does not load the file: {error}") from None
    return Imported(model, found.frames, found.outputs, found.states, found.time_axis, file, report)
