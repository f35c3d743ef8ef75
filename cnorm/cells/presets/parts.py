"""Definitions that several presets share."""

PAPER = "Ba, Kiros, Hinton 2016, arXiv:1607.06450"


def affine(*names, size):
    """The gain and bias tensors of layer norms; each is given as (name of gain, name of bias, site)."""
    entries = []
    for gain, bias, site in names:
        site = f"_{site}" if site[:1].isalpha() else site
        entries += [(gain, size, f"gain{site}"), (bias, size, f"bias{site}")]
    return entries
