"""Norms recognised by what they compute, however they are written."""

from onnx_export.laws.fit import Fit, fit, what_norm
from onnx_export.laws.sources import Found, norms

__all__ = ["Fit", "Found", "fit", "norms", "what_norm"]
