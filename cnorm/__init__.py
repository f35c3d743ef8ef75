"""Layer normalisation on CPUs: SIMD kernels, a batch-1 recurrent runtime, ONNX export and validation."""

try:
    from cnorm import _core  # a source folder that was not built lacks this extension module
except ImportError as error:
    if "CNORM_ISA" in str(error):
        import os
        import sys

        if not {"cnorm", "cnorm.exe"} & {os.path.basename(argument) for argument in sys.orig_argv[1:4]}:
            raise
        print(f"cnorm: {error}", file=sys.stderr)  # the command `cnorm` or `python -m cnorm`: no traceback
        sys.exit(2)
    if "interpreter" in str(error):
        raise ImportError(
            "cnorm can be imported by one interpreter of a process only, as NumPy: use threads, which run its "
            f"kernels in parallel, or processes, not subinterpreters ({error})"
        ) from error
    raise ImportError(
        f"the extension module cnorm._core is not in {__path__[0]} ({error}). If that is cnorm's source folder, it "
        "comes before an installed package: run Python from another folder, or with -P. `pip install .` installs, "
        "`make test` makes .venv with an editable installation"
    ) from error

from cnorm import layers
from cnorm._core import (
    Stats,
    Stream,
    active_isa,
    add_layer_norm,
    available_isas,
    batch_norm,
    batch_norm_backward,
    batch_norm_inference,
    batch_norm_inference_backward,
    divisive_norm,
    divisive_norm_backward,
    group_norm,
    group_norm_backward,
    instance_norm,
    instance_norm_backward,
    layer_norm,
    layer_norm_backward,
    rms_norm,
    rms_norm_backward,
    smoothing_gradient,
    use_isa,
    weight_norm,
    weight_norm_backward,
)
from cnorm.cells.presets import PRESETS
from cnorm.cells.specs import CellSpec
from cnorm.folds import fold_batch_norm, fold_weight_norm
from cnorm.layers import *  # noqa: F403
from cnorm.learner import SGD, Adam, Learner
from cnorm.model import Model
from cnorm.storage.frameworks import from_safetensors, from_torch
from cnorm.storage.keras import from_keras
from cnorm.storage.loading import demo_model, load

__version__ = "0.1.0"


def get_include() -> str:
    """The folder of the C headers, for extension modules that call cnorm.

    Returns
    -------
    str
        An absolute path. See docs/embedding.md.
    """
    import os

    return os.path.join(os.path.dirname(os.path.abspath(_core.__file__)), "include")


__all__ = [
    "PRESETS",
    "SGD",
    "Adam",
    "CellSpec",
    "Learner",
    "Model",
    "Stats",
    "Stream",
    "active_isa",
    "add_layer_norm",
    "available_isas",
    "batch_norm",
    "batch_norm_backward",
    "batch_norm_inference",
    "batch_norm_inference_backward",
    "demo_model",
    "divisive_norm",
    "divisive_norm_backward",
    "fold_batch_norm",
    "fold_weight_norm",
    "from_keras",
    "from_safetensors",
    "from_torch",
    "get_include",
    "group_norm",
    "group_norm_backward",
    "instance_norm",
    "instance_norm_backward",
    "layer_norm",
    "layer_norm_backward",
    "load",
    "rms_norm",
    "rms_norm_backward",
    "smoothing_gradient",
    "use_isa",
    "weight_norm",
    "weight_norm_backward",
]
__all__ += layers.__all__
