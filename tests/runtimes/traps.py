"""Valid files that a runtime computes otherwise or refuses, as they are met: none of them is one of the forms.

`make runtimes` runs them too, and fails where one is no trap any more; `tests/validator/test_runtimes.py` asks
`cnorm validate --runtime` about each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from forms import GATES, Form, model_of, recurrent_bound
from onnx import helper

from onnx_export.float64 import Float64

STEPS, BATCH, INPUTS, UNITS = 9, 3, 5, 16
# name -> a runtime, and the nodes with their stored tensors
TRAPS: dict[str, tuple[str, Callable]] = {}


def trap(runtime: str):
    """Register a file that `runtime` does not compute right."""

    def register(function):
        TRAPS[function.__name__] = runtime, function
        return function

    return register


def traps(runtime: str | None = None) -> Iterator[Form]:
    """The files of a runtime, or all, under the runtime and the function's name."""
    for name, (of, make) in TRAPS.items():
        if runtime in (None, of):
            feeds, nodes, stored = make(np.random.default_rng(4))
            model = model_of(nodes, feeds, {"Y": None}, stored, 21)
            expected = list(Float64(model).run(feeds).values())
            yield Form(of, frozenset({name}), model, feeds, expected, recurrent_bound(expected, "float32"))


def _frames(rng, *shape):
    return {"X": rng.normal(size=shape or (STEPS, BATCH, INPUTS)).astype("f4")}


def _cell(rng, kind, name, x="X", given=(), inputs=INPUTS, out=("Y",), **attributes):
    """A recurrent node and its tensors; `given` are further ones by the operator's names."""
    sides = 2 if attributes.get("direction") == "bidirectional" else 1
    gates = GATES[kind] * UNITS
    shapes = {"W": (sides, gates, inputs), "R": (sides, gates, UNITS), "B": (sides, 2 * gates), "P": (sides, 3 * UNITS)}
    stored = {f"{name}.{key}": (0.5 * rng.normal(size=shape)).astype("f4") for key, shape in shapes.items()}
    stored[f"{name}.sequence_lens"] = np.array([STEPS, 4, 6], np.int32)
    names = [f"{name}.{key}" if key in ("W", "R", "B", *given) else "" for key in ("W", "R", "B", "sequence_lens")]
    names += ["", "", f"{name}.P"] if "P" in given else []
    node = helper.make_node(kind, [x, *names], list(out), name=name, hidden_size=UNITS, **attributes)
    return node, {key: value for key, value in stored.items() if key in names}


def _joined(x, y="Y"):
    """[T, directions, B, H] as [T, B, directions * H], and its stored shape."""
    return [
        helper.make_node("Transpose", [x], [f"{x}.turned"], perm=[0, 2, 1, 3]),
        helper.make_node("Reshape", [f"{x}.turned", "shape"], [y]),
    ], {"shape": np.array([0, 0, -1])}


@trap("openvino")
def peepholes_in_both_directions(rng):
    node, stored = _cell(rng, "LSTM", "lstm", given=("P",), direction="bidirectional", out=["h"])
    behind, shape = _joined("h")
    return _frames(rng), [node, *behind], stored | shape


@trap("openvino")
def batch_first_gru_and_its_one_direction(rng):
    node, stored = _cell(rng, "GRU", "gru", layout=1, linear_before_reset=1, out=["h"])
    squeeze = helper.make_node("Squeeze", ["h", "two"], ["Y"])
    return _frames(rng, BATCH, STEPS, INPUTS), [node, squeeze], stored | {"two": np.array([2])}


@trap("onnxruntime")
def clipped_lstm_of_two_directions(rng):
    node, stored = _cell(rng, "LSTM", "lstm", direction="bidirectional", clip=0.3, out=["h"])
    behind, shape = _joined("h")
    return _frames(rng), [node, *behind], stored | shape


@trap("onnxruntime-web")
def clipped_second_layer(rng):
    first, stored = _cell(rng, "LSTM", "first", out=["h"])
    squeeze = helper.make_node("Squeeze", ["h", "one"], ["frames"])
    second, more = _cell(rng, "LSTM", "second", "frames", inputs=UNITS, clip=0.2)
    return _frames(rng), [first, squeeze, second], stored | more | {"one": np.array([1])}


@trap("tract")
def directions_as_two_nodes(rng):
    forward, stored = _cell(rng, "GRU", "forward", out=["a"], linear_before_reset=1)
    backward, more = _cell(rng, "GRU", "backward", out=["b"], linear_before_reset=1, direction="reverse")
    both = helper.make_node("Concat", ["a", "b"], ["Y"], axis=1)
    return _frames(rng), [forward, backward, both], stored | more


@trap("tract")
def relu_in_two_layers(rng):
    first, stored = _cell(rng, "RNN", "first", out=["h"], activations=["Relu"])
    squeeze = helper.make_node("Squeeze", ["h", "one"], ["frames"])
    second, more = _cell(rng, "RNN", "second", "frames", inputs=UNITS, activations=["Relu"])
    return _frames(rng), [first, squeeze, second], stored | more | {"one": np.array([1])}


@trap("onnx-reference")
def padded_batch_in_two_directions(rng):
    node, stored = _cell(rng, "LSTM", "lstm", given=("sequence_lens",), direction="bidirectional", out=["h"])
    behind, shape = _joined("h")
    return _frames(rng), [node, *behind], stored | shape


@trap("onnx-reference")
def distribution_by_sums_of_magnitudes(rng):
    linear = helper.make_node("MatMul", ["X", "weight"], ["logits"])
    norm = helper.make_node("LpNormalization", ["logits"], ["Y"], p=1, axis=1)
    return _frames(rng), [linear, norm], {"weight": rng.normal(size=(INPUTS, UNITS)).astype("f4")}


@trap("opencv")
def gru_between_products(rng):
    first = helper.make_node("MatMul", ["X", "weight"], ["frames"])
    node, stored = _cell(rng, "GRU", "gru", "frames", inputs=UNITS, linear_before_reset=1)
    return _frames(rng), [first, node], stored | {"weight": rng.normal(size=(INPUTS, UNITS)).astype("f4")}


@trap("mnn")
def norm_of_all_but_the_batch(rng):
    linear = helper.make_node("Add", ["X", "shift"], ["moved"])
    norm = helper.make_node("LayerNormalization", ["moved", "scale", "bias"], ["Y"], axis=0)
    shape = (2, STEPS, INPUTS)
    stored = {name: rng.normal(size=shape).astype("f4") for name in ("shift", "scale", "bias")}
    return _frames(rng, *shape), [linear, norm], stored


@trap("ncnn")
def norm_of_two_axes_behind_an_addition(rng):
    linear = helper.make_node("Add", ["X", "shift"], ["moved"])
    norm = helper.make_node("LayerNormalization", ["moved", "scale", "bias"], ["Y"], axis=-2)
    stored = {name: rng.normal(size=(STEPS, INPUTS)).astype("f4") for name in ("scale", "bias")}
    return _frames(rng, 1, STEPS, INPUTS), [linear, norm], stored | {"shift": np.float32([0.5])}


@trap("tinygrad")
def lstm_as_pytorch_writes_it(rng):
    node, stored = _cell(rng, "LSTM", "lstm", out=["h", "last_h", "last_c"])
    return _frames(rng), [node, helper.make_node("Squeeze", ["h", "one"], ["Y"])], stored | {"one": np.array([1])}


@trap("iree")
def peepholes_behind_a_norm(rng):
    norm = helper.make_node("LayerNormalization", ["X", "scale"], ["frames"])
    node, stored = _cell(rng, "LSTM", "lstm", "frames", given=("P",))
    return _frames(rng), [norm, node], stored | {"scale": np.ones(INPUTS, "f4")}
