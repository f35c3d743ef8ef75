"""Cells: their equations as data, the presets, what each tensor holds, and how weights are rounded and packed."""
