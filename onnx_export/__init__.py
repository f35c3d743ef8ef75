"""Export cnorm models to ONNX, prove the export equal, and validate the layer norms of any ONNX file."""

from importlib import import_module

__all__ = ["OrtStream", "check_parity", "export", "export_family_norm", "export_norm", "load", "validate"]

_HOME = {
    "export": "exporter",
    "export_family_norm": "family_export",
    "export_norm": "norm_export",
    "load": "loader",
    "check_parity": "parity",
    "OrtStream": "ort_stream",
    "validate": "validation",
}


def __getattr__(name):
    # onnx and onnxruntime take half a second to import: only when one of the names is used
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(f"onnx_export.{_HOME[name]}"), name)
    except ModuleNotFoundError as error:
        if error.name not in ("onnx", "onnxruntime"):
            raise
        needs = f"onnx_export.{name} needs {error.name}: pip install 'cnorm-runtime[onnx]'"
        raise ModuleNotFoundError(needs, name=error.name) from None


def __dir__():
    return sorted(__all__)
