"""Cells of known frameworks, by name. The user names the preset; docs/cells.md has the equations of each."""

from types import MappingProxyType

from cnorm.cells.presets import gru, lstm, rnn

__all__ = ["PRESETS"]

PRESETS = MappingProxyType({(spec.kind, spec.name): spec for spec in (*lstm.CELLS, *gru.CELLS, *rnn.CELLS)})
"""Presets by (kind, name), such as ``PRESETS["LSTM", "ba2016"]``."""
