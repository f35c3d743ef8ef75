"""Export cnorm models to ONNX, prove the export equal, and validate the layer norms of any ONNX file."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from onnx_export.exporter import export as export
    from onnx_export.loader import load as load
    from onnx_export.parity import check_parity as check_parity
    from onnx_export.validation import validate as validate
    from onnx_export.validation import validate_many as validate_many

__all__ = ["check_parity", "export", "load", "validate", "validate_many"]

_HOME = {
    "export": "exporter",
    "load": "loader",
    "check_parity": "parity",
    "validate": "validation",
    "validate_many": "validation",
}


def __getattr__(name: str) -> object:
    # importing onnx and onnxruntime takes half a second: delayed until one of the names is used
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(f"onnx_export.{_HOME[name]}"), name)
    except ModuleNotFoundError as error:
        if error.name not in ("onnx", "onnxruntime"):
            raise
        needs = f"onnx_export.{name} needs {error.name}: the extra onnx, pip install '.[onnx]' in cnorm's source folder"
        raise ModuleNotFoundError(needs, name=error.name) from None


def __dir__() -> list[str]:
    return sorted(__all__)
