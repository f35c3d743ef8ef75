"""Export cnorm models to ONNX, prove the export equal, and validate the layer norms of any ONNX file."""

from .validation import validate

__all__ = ["validate"]
