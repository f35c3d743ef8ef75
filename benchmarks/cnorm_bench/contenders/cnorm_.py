"""cnorm itself."""

from contextlib import contextmanager

import numpy as np

import cnorm
from cnorm_bench.contenders.timing import Contender, empty_like
from cnorm_bench.runners import Cnorm

LABEL = "cnorm"
PACKAGES = ()


def layer_norm(x, weight, bias):
    names = {"layer_norm": cnorm.layer_norm, "x": x, "weight": weight, "bias": bias, "y": empty_like(x)}
    return [
        *_on_each_isa("layer_norm(x, weight, bias, out=y)", names),
        Contender("cnorm, new array", "layer_norm(x, weight, bias)", names),
    ]


def layer_norm_backward(dy, x, weight, bias):
    _, stats = cnorm.layer_norm(x, weight, bias, return_stats=True)
    out = empty_like(x), np.empty_like(weight), np.empty_like(bias)
    names = {"dy": dy, "x": x, "weight": weight, "stats": stats, "out": out}
    names["layer_norm_backward"] = cnorm.layer_norm_backward
    return _on_each_isa("layer_norm_backward(dy, x, weight, stats, out=out)", names)


def rms_norm(x, weight):
    names = {"rms_norm": cnorm.rms_norm, "x": x, "weight": weight, "y": empty_like(x)}
    return _on_each_isa("rms_norm(x, weight, out=y)", names)


def add_layer_norm(x, residual, weight, bias):
    names = {"x": x, "residual": residual, "weight": weight, "bias": bias, "y": empty_like(x), "total": empty_like(x)}
    names |= {"add_layer_norm": cnorm.add_layer_norm, "layer_norm": cnorm.layer_norm, "add": np.add}
    apart = "layer_norm(add(x, residual, out=total), weight, bias, out=y), total"
    return [
        *_on_each_isa("add_layer_norm(x, residual, weight, bias, out=y, sum_out=total)", names),
        Contender("cnorm, after np.add", apart, names),
    ]


def steps(model, onnx_model):
    return [Cnorm(model)]


def rounded_steps(model):
    return [Cnorm(model.with_weights(weights), f"cnorm, {weights}") for weights in ("int8", "float16")]


def _on_each_isa(statement, names):
    """The statement on the active instruction set, and on each other one except the baseline."""
    others = [isa for isa in cnorm.available_isas() if isa not in ("baseline", cnorm.active_isa())]
    forced = [Contender(f"cnorm, {isa}", statement, names, mode=lambda isa=isa: _forced(isa)) for isa in others]
    return [Contender("cnorm", statement, names), *forced]


@contextmanager
def _forced(isa):
    before = cnorm.active_isa()
    cnorm.use_isa(isa)
    try:
        yield
    finally:
        cnorm.use_isa(before)
