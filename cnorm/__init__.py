"""Layer normalisation on CPUs: right, the same everywhere, fast, small."""

try:
    from cnorm import _core  # noqa: F401  (the part that is missing from a source folder)
except ImportError as error:
    if "CNORM_ISA" in str(error):
        raise
    raise ImportError(
        f"the extension module cnorm._core is not here ({error}). In a source folder run `make test` and use "
        ".venv/bin/python from another folder, or install with `pip install .`"
    ) from error

from cnorm._core import (
    Stats,
    Stream,
    active_isa,
    add_layer_norm,
    available_isas,
    layer_norm,
    layer_norm_backward,
    rms_norm,
    rms_norm_backward,
    use_isa,
)
from cnorm.layers import LSTM, Linear
from cnorm.model import Model, demo_model, load
from cnorm.specs import PRESETS, CellSpec

__version__ = "0.1.0"

__all__ = [
    "LSTM",
    "PRESETS",
    "CellSpec",
    "Linear",
    "Model",
    "Stats",
    "Stream",
    "active_isa",
    "add_layer_norm",
    "available_isas",
    "demo_model",
    "layer_norm",
    "layer_norm_backward",
    "load",
    "rms_norm",
    "rms_norm_backward",
    "use_isa",
]
