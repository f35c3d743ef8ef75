"""Layers of functions of each element: of one operator, or written as x times a function of x."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

import cnorm
from onnx_export.importer.elements import Block, Cannot

__all__ = ["activation", "bent"]

SAME = {"relu", "tanh", "sigmoid", "elu", "silu", "gelu", "gelu_tanh", "leaky_relu", "softplus", "hard_sigmoid"}
SAME |= {"hard_swish", "exp", "square", "abs", "clip", "sin", "cos"}
NAMES = {"root": "sqrt"} | {name: name for name in SAME}
PARAMETERS = {"leaky_relu": {"alpha": "slope"}}  # names of ONNX to those of cnorm.Activation
GELU_TANH = math.sqrt(2 / math.pi) * np.array([0, 1, 0, 0.044715])  # u: coefficients of 1, x, x^2, x^3
MAX_SLOPE = 2.0**10  # of a sum below 0: so much earlier float32 overflows
SELU = {"alpha": np.float32(1.6732632), "gamma": np.float32(1.0507010)}


def activation(block_of: Callable, block: Block) -> tuple[cnorm.Activation, float, np.ndarray] | None:
    """A layer, the factor of its outputs, and the numbers of the elements that it reads; None for other blocks.

    Parameters
    ----------
    block_of : callable
        The block that computes some elements, or None.
    block : Block
    """
    x, op = block.operands[0].ravel(), block.op
    if op in NAMES:
        renamed = PARAMETERS.get(op, {})
        return cnorm.Activation(NAMES[op], **{renamed.get(k, k): v for k, v in block.constants.items()}), 1.0, x
    if op == "multiply":
        return _gated(block_of, x, block.operands[1].ravel())
    if op == "selu":
        if any(np.float32(block.constants[name]) != value for name, value in SELU.items()):
            raise Cannot(f"{block.node}: selu with another alpha or gamma", behind=x)
        return cnorm.Activation("selu"), 1.0, x
    if op == "log":
        return _log(block_of, x)
    if op == "prelu":
        slope = block.constants["slope"]
        if (slope == slope[0]).all():
            return cnorm.Activation("leaky_relu", slope=float(slope[0])), 1.0, x
        return cnorm.Activation("prelu", slope=slope), 1.0, x
    if op == "softmax":
        if len(block.operands[0]) != 1:
            raise Cannot(f"{block.node}: softmax of {len(block.operands[0])} parts of the frame", behind=x)
        return cnorm.Activation("softmax"), 1.0, x
    return None


def bent(block_of: Callable, block: Block) -> tuple[cnorm.Activation, np.ndarray, np.ndarray, np.ndarray] | None:
    """x above 0 and x times slopes below, plus x scaled and shifted: a layer, its factor and offset, and x.

    None for other sums.
    """
    a, b = (operand.ravel() for operand in block.operands)
    for side, other in ((a, b), (b, a)):
        kinked, factor, offset = block_of(side), np.ones(len(other)), np.zeros(len(other))
        if block.op != "add" or not kinked or kinked.op not in ("relu", "prelu"):
            continue
        x, straight = kinked.operands[0].ravel(), block_of(other)
        while straight and straight.op in ("scale", "shift") and not np.array_equal(other, x):
            scaled = straight.op == "scale"
            offset = offset if scaled else offset + factor * straight.constants["offset"]
            factor = factor * straight.constants["factor"] if scaled else factor
            other = straight.operands[0].ravel()
            straight = block_of(other)
        above, below = 1 + factor, kinked.constants.get("slope", 0.0) + factor
        if np.array_equal(other, x) and (np.abs(below) <= MAX_SLOPE * np.abs(above)).all() and above.all():
            return cnorm.Activation("prelu", slope=(below / above).astype(np.float32)), above, offset, x
    return None


def _log(block_of: Callable, x: np.ndarray):
    """log(x + eps): a shift before it that is the same for all elements."""
    before = block_of(x)
    if before and before.op == "shift" and (before.constants["offset"] == before.constants["offset"][0]).all():
        return cnorm.Activation("log", eps=float(before.constants["offset"][0])), 1.0, before.operands[0].ravel()
    return cnorm.Activation("log"), 1.0, x


def _gated(block_of: Callable, a: np.ndarray, b: np.ndarray):
    """x x, x sigmoid(x), x hard_sigmoid(x), or one of the two forms of gelu, x (1 + erf(x / sqrt(2))) / 2 and
    x (1 + tanh(u)) / 2, in any order of the factors."""
    if np.array_equal(a, b):
        return cnorm.Activation("square"), 1.0, a
    for side, other in ((a, b), (b, a)):
        (factor, x), (gate_factor, gate) = _unscaled(block_of, side), _unscaled(block_of, other)
        name = _gate(block_of, gate, x)
        if name and factor is not None and gate_factor is not None:
            return cnorm.Activation(name), factor * gate_factor * (2 if name in ("gelu", "gelu_tanh") else 1), x
    return None


def _unscaled(block_of: Callable, numbers: np.ndarray) -> tuple[float | None, np.ndarray]:
    """The one factor of some elements and the elements without it; None if there are several factors."""
    block = block_of(numbers)
    if not block or block.op != "scale":
        return 1.0, numbers
    factors = block.constants["factor"]
    return float(factors[0]) if (factors == factors[0]).all() else None, block.operands[0].ravel()


def _gate(block_of: Callable, gate: np.ndarray, x: np.ndarray) -> str | None:
    block = block_of(gate)
    if not block or not block.operands:
        return None
    inner = block.operands[0].ravel()
    if block.op == "sigmoid" and np.array_equal(inner, x):
        return "silu"
    if block.op == "hard_sigmoid" and np.array_equal(inner, x):
        alpha, beta = block.constants["alpha"], block.constants["beta"]
        return "hard_swish" if math.isclose(alpha, 1 / 6, rel_tol=1e-6) and beta == 0.5 else None
    erf = block_of(inner) if block.op == "shift" and (block.constants["offset"] == 1).all() else None
    if erf and erf.op == "tanh":
        found = _polynomial(block_of, erf.operands[0].ravel(), x)
        return "gelu_tanh" if found is not None and np.allclose(found, GELU_TANH, rtol=1e-6, atol=0) else None
    if not erf or erf.op != "erf":
        return None
    factor, root = _unscaled(block_of, erf.operands[0].ravel())
    same = factor is not None and math.isclose(factor, math.sqrt(0.5), rel_tol=1e-6)
    return "gelu" if same and np.array_equal(root, x) else None


def _polynomial(block_of: Callable, numbers: np.ndarray, x: np.ndarray, depth: int = 8) -> np.ndarray | None:
    """The coefficients [4] of some elements as one polynomial of x of at most degree 3; None for others."""
    if np.array_equal(numbers, x):
        return np.array([0.0, 1.0, 0.0, 0.0])
    block = block_of(numbers)
    if not block or depth == 0 or block.op not in ("scale", "shift", "add", "subtract", "multiply", "square"):
        return None
    constant = next(iter(block.constants.values()), None)  # a factor or an offset
    if constant is not None and not (constant == constant[0]).all():
        return None
    parts = [_polynomial(block_of, operand.ravel(), x, depth - 1) for operand in block.operands]
    if any(part is None for part in parts):
        return None
    a, b = parts[0], parts[-1]
    if block.op in ("scale", "shift"):
        return a * constant[0] if block.op == "scale" else a + np.array([constant[0], 0, 0, 0])
    if block.op in ("add", "subtract"):
        return a + b if block.op == "add" else a - b
    product = np.convolve(a, b)
    return None if product[4:].any() else product[:4]
