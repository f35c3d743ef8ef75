"""Norms recognised by what they compute, however they are written."""

from onnx_export.laws.fit import Fit, Source, what_norm
from onnx_export.laws.sources import Found, norms, reduces

__all__ = ["Fit", "Found", "Source", "norms", "reduces", "what_norm"]
