"""cnorm itself."""

from contextlib import contextmanager, nullcontext

import numpy as np

import cnorm
from cnorm.contenders.timing import Contender

LABEL = "cnorm"
PACKAGES = ()


def layer_norm(x, weight, bias):
    names = {"layer_norm": cnorm.layer_norm, "x": x, "weight": weight, "bias": bias, "y": np.empty_like(x)}
    into = "layer_norm(x, weight, bias, out=y)"
    return [
        Contender("cnorm", into, names),
        *(Contender(f"cnorm, {isa}", into, names, mode=lambda isa=isa: _forced(isa)) for isa in _other_isas()),
        Contender("cnorm, new array", "layer_norm(x, weight, bias)", names),
    ]


def layer_norm_backward(dy, x, weight, bias):
    _, stats = cnorm.layer_norm(x, weight, bias, return_stats=True)
    out = np.empty_like(x), np.empty_like(weight), np.empty_like(bias)
    names = {"layer_norm_backward": cnorm.layer_norm_backward} | {
        "dy": dy,
        "x": x,
        "weight": weight,
        "stats": stats,
        "out": out,
    }
    into = "layer_norm_backward(dy, x, weight, stats, out=out)"
    return [
        Contender("cnorm", into, names),
        *(Contender(f"cnorm, {isa}", into, names, mode=lambda isa=isa: _forced(isa)) for isa in _other_isas()),
    ]


def steps(model, onnx_model):
    return [Cnorm(model)]


class Cnorm:
    """`Stream.step` with an output array of its own."""

    label = "cnorm"
    mode = nullcontext

    def __init__(self, model):
        self.stream = model.stream()
        self.y = np.empty(model.output_size, np.float32)

    def reset(self):
        self.stream.reset()

    def step(self, x):
        return self.stream.step(x, out=self.y)


def _other_isas():
    return [isa for isa in cnorm.available_isas() if isa not in ("baseline", cnorm.active_isa())]


@contextmanager
def _forced(isa):
    before = cnorm.active_isa()
    cnorm.use_isa(isa)
    try:
        yield
    finally:
        cnorm.use_isa(before)
