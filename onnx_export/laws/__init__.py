"""Norms recognised by what they compute, however they are written."""

from onnx_export.laws.fit import Fit, Source, what_norm
from onnx_export.laws.sources import Found, Work, norms, reduces

__all__ = ["Fit", "Found", "Source", "Work", "norms", "reduces", "what_norm"]
