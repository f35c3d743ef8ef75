"""Norms, functions and cells, recognised by what they compute, however they are written."""
