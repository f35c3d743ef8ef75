"""Small valid files of norms, recurrent and control-flow operators, with their results in float64.

A form is named by its operator and traits (`onnx_export.runtimes.traits`). None may be in here that ends or hangs a
runtime: see `SENTENCES` in measure.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from onnx_export.float64 import Float64
from onnx_export.graph.scope import scopes
from onnx_export.runtimes import Traits
from onnx_export.runtimes.traits import traits_of

STEPS, INPUTS, UNITS = 6, 3, 4
OPSETS = {"LSTM": 14, "GRU": 14, "RNN": 14, "RMSNormalization": 23}
USUAL_OPSET, IR = 21, 10
UNIT = {"float32": 2.0**-24, "float64": 2.0**-53, "float16": 2.0**-11, "bfloat16": 2.0**-8}


@dataclass(frozen=True)
class Form:
    """One file, what to feed it, and what comes out.

    Attributes
    ----------
    operator, traits
        Its name.
    model : onnx.ModelProto
    feeds : dict of str to ndarray
    expected : list of ndarray
        The outputs in float64.
    bound : float
        The largest error of a sound computation in the form's own type.
    """

    operator: str
    traits: Traits
    model: onnx.ModelProto
    feeds: dict[str, np.ndarray]
    expected: list[np.ndarray]
    bound: float

    @property
    def name(self) -> str:
        """Traits in alphabetical order, as in the tables."""
        return ", ".join(sorted(self.traits))


def forms() -> list[Form]:
    """All of one node or a few."""
    return [*recurrent(), *norms(), *decomposed(), *control()]


def model_of(nodes, feeds, outputs, stored, opset, opened=()) -> onnx.ModelProto:
    """A checked model; `opened` are the axes of X and Y whose size it leaves open."""

    def info(name, value):
        shape = [f"n{axis}" if name in ("X", "Y") and axis in opened else size for axis, size in enumerate(value.shape)]
        return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(value.dtype), shape)

    kind = helper.np_dtype_to_tensor_dtype(next(iter(feeds.values())).dtype)
    graph = helper.make_graph(
        nodes,
        "form",
        [info(name, value) for name, value in feeds.items()],
        [
            helper.make_tensor_value_info(name, kind, None)
            if like is None
            else info(name, like.astype(feeds["X"].dtype))
            for name, like in outputs.items()
        ],
        [numpy_helper.from_array(value, name) for name, value in stored.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=IR)
    model = onnx.shape_inference.infer_shapes(model)
    onnx.checker.check_model(model, full_check=True)
    return model


def form_of_node(node, feeds, stored, expected=None, bound=None, data=(), opened=()) -> Form:
    """The form of one node, whose traits are its own and those of the data."""
    opset = OPSETS.get(node.op_type, USUAL_OPSET)
    outputs = dict.fromkeys(filter(None, node.output)) if expected is None else {"Y": expected[0]}
    nodes = [node]
    if any(value.dtype.name == "bfloat16" for value in stored.values()):  # which NumPy does not know
        nodes = [helper.make_node("Cast", ["X"], ["x"], to=TensorProto.BFLOAT16), node]
        nodes.append(helper.make_node("Cast", ["y"], ["Y"], to=TensorProto.FLOAT))
        node.input[0], node.output[0] = "x", "y"
    model = model_of(nodes, feeds, outputs, stored, opset, opened)
    scope = next(iter(scopes(model)))
    traits = traits_of(next(each for each in model.graph.node if each.op_type == node.op_type), scope) | frozenset(data)
    if expected is None:
        expected = list(Float64(model).run(feeds).values())
    kind = next(iter(feeds.values())).dtype.name
    return Form(
        node.op_type, traits, model, feeds, expected, recurrent_bound(expected, kind) if bound is None else bound
    )


# ------------------------------------------------------------------------------------------ recurrent operators

GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
USUAL = {"LSTM": ["Sigmoid", "Tanh", "Tanh"], "GRU": ["Sigmoid", "Tanh"], "RNN": ["Tanh"]}
PLAIN = ("Relu", "Softsign", "Softplus", "HardSigmoid")
WITH_ALPHA = {"LeakyRelu": (0.3, 0), "ThresholdedRelu": (0.5, 0), "Elu": (0.4, 0), "HardSigmoid": (0.3, 0.4)}
WITH_ALPHA |= {"ScaledTanh": (1.5, 0.5), "Affine": (0.5, 0.1)}


def recurrent_bound(expected, kind: str) -> float:
    """A rounding error of 16 units in each of the steps, which the step after it may double."""
    return 16 * STEPS * UNIT[kind] * max(1.0, *(np.abs(each).max() for each in expected))


def cell(
    kind,
    *given,
    bias=True,
    lengths=None,
    stored_lengths=False,
    batch=None,
    outputs=("Y",),
    dtype="f4",
    opened=(),
    computed=False,
    steps=STEPS,
    **attributes,
) -> Form:
    """One node; `given` are its optional inputs beyond the bias."""
    rng = np.random.default_rng(5)
    batch = batch or (2 if lengths else 1)
    sides, gates = 2 if attributes.get("direction") == "bidirectional" else 1, GATES[kind] * UNITS
    shapes = {"W": (sides, gates, INPUTS), "R": (sides, gates, UNITS), "B": (sides, 2 * gates), "P": (sides, 3 * UNITS)}
    weights = {name: (0.9 * rng.normal(size=shape)).astype(dtype) for name, shape in shapes.items()}
    values = {"X": (2 * rng.normal(size=(steps, batch, INPUTS))).astype(dtype)}
    values |= {name: rng.normal(size=(sides, batch, UNITS)).astype(dtype) for name in ("initial_h", "initial_c")}
    if attributes.get("layout"):
        values = {name: value.swapaxes(0, 1).copy() for name, value in values.items()}
    values["sequence_lens"] = np.array(lengths or (), np.int32)
    used = {"W", "R", *given} | ({"B"} if bias else set()) | ({"sequence_lens"} if lengths else set())
    order = ["W", "R", "B", "sequence_lens", "initial_h", "initial_c", "P"]
    names = ["X", *(name if name in used else "" for name in order)]
    while not names[-1]:
        names.pop()
    stored = {name: value for name, value in weights.items() if name in names}
    if stored_lengths:
        stored["sequence_lens"] = values["sequence_lens"]
    feeds = {name: value for name, value in values.items() if name in names and name not in stored}
    if computed:
        feeds["W"] = stored.pop("W")
    node = helper.make_node(kind, names, list(outputs), hidden_size=UNITS, **attributes)
    data = ["a length of 0"] if lengths and 0 in lengths else []
    return form_of_node(node, feeds, stored, data=data, opened=opened)


def activated(kind, name, alpha=None, beta=None, place=None) -> Form:
    """A node one of whose activations is another one: that of the candidate, or the one at `place`."""
    names = list(USUAL[kind])
    place = (kind != "RNN") * 1 if place is None else place
    names[place] = name
    attributes = {"activations": names}
    if alpha is not None:
        values = [[value if at == place else 0.0 for at in range(len(names))] for value in (alpha, beta)]
        attributes |= {"activation_alpha": values[0]} | ({"activation_beta": values[1]} if beta else {})
    return cell(kind, **attributes)


def recurrent() -> list[Form]:
    """LSTM, GRU and RNN with each attribute, optional input and output."""
    found = []
    for kind in GATES:
        last = ("Y", "Y_h", "Y_c") if kind == "LSTM" else ("Y", "Y_h")
        states = ("initial_h", "initial_c") if kind == "LSTM" else ("initial_h",)
        found += [
            cell(kind),
            cell(kind, bias=False),
            cell(kind, batch=2),
            cell(kind, opened=(0,)),
            cell(kind, *states, opened=(0,), outputs=last),
            cell(kind, *states, outputs=last),
            cell(kind, *states, outputs=last, batch=2),
            cell(kind, *states, outputs=last, batch=2, direction="bidirectional"),
            cell(kind, "initial_h"),
            cell(kind, outputs=("Y", "Y_h")),
            cell(kind, outputs=("", "Y_h")),
            cell(kind, direction="reverse"),
            cell(kind, direction="bidirectional"),
            cell(kind, layout=1),
            cell(kind, layout=1, batch=2),
            cell(kind, clip=0.5),
            cell(kind, computed=True),
            cell(kind, dtype="f2"),
            cell(kind, dtype="f8"),
            cell(kind, lengths=[STEPS] * 2, stored_lengths=True),
            cell(kind, lengths=[3, STEPS]),
            cell(kind, lengths=[3, STEPS], stored_lengths=True, outputs=("", "Y_h")),
            cell(kind, lengths=[3, STEPS], direction="reverse"),
            cell(kind, *states, lengths=[3, STEPS], direction="bidirectional", outputs=last),
            cell(kind, *states, lengths=[0, STEPS], outputs=last),
            cell(kind, activations=[name.lower() for name in USUAL[kind]]),
            *(activated(kind, name) for name in PLAIN),
            *(activated(kind, name, *values) for name, values in WITH_ALPHA.items()),
        ]
    return [
        *found,
        cell("GRU", linear_before_reset=1),
        cell("GRU", bias=False, linear_before_reset=1),
        cell("GRU", linear_before_reset=1, direction="bidirectional"),
        cell("GRU", "initial_h", linear_before_reset=1, outputs=("Y", "Y_h")),
        cell("GRU", "initial_h", linear_before_reset=1, outputs=("Y", "Y_h"), batch=2, direction="bidirectional"),
        cell("GRU", "initial_h", linear_before_reset=1, lengths=[3, STEPS], outputs=("Y", "Y_h")),
        cell("LSTM", "initial_c"),
        cell("LSTM", "P"),
        cell("LSTM", "P", "initial_h", "initial_c", outputs=("Y", "Y_h", "Y_c")),
        cell("LSTM", input_forget=1),
        cell("LSTM", outputs=("", "", "Y_c")),
    ]


# -------------------------------------------------------------------------------------------------------- norms


def standardised(x, axes, eps):
    """(x - mean) / sqrt(var + eps) over axes."""
    return (x - x.mean(axes, keepdims=True)) / np.sqrt(x.var(axes, keepdims=True) + eps)


def per_channel(value, x):
    return value.reshape(-1, *[1] * (x.ndim - 2))


def layer_norm(x, s, c=0.0, axis=-1, epsilon=1e-5, **_):
    return standardised(x, tuple(range(axis % x.ndim, x.ndim)), epsilon) * s + c


def rms_norm(x, s, axis=-1, epsilon=1e-5, **_):
    return x / np.sqrt((x * x).mean(tuple(range(axis % x.ndim, x.ndim)), keepdims=True) + epsilon) * s


def instance_norm(x, s, c, epsilon=1e-5):
    return standardised(x, tuple(range(2, x.ndim)), epsilon) * per_channel(s, x) + per_channel(c, x)


def group_norm(x, s, c, num_groups=1, epsilon=1e-5, **_):
    grouped = x.reshape(len(x), num_groups, -1)
    return standardised(grouped, (2,), epsilon).reshape(x.shape) * per_channel(s, x) + per_channel(c, x)


def batch_norm(x, s, c, mean, var, epsilon=1e-5):
    return (x - per_channel(mean, x)) / np.sqrt(per_channel(var, x) + epsilon) * per_channel(s, x) + per_channel(c, x)


def lp_norm(x, axis=-1, p=2):
    size = np.abs(x).sum(axis, keepdims=True) if p == 1 else np.sqrt((x * x).sum(axis, keepdims=True))
    return np.divide(x, size, out=np.zeros_like(x), where=size > 0)


def mean_variance_norm(x, axes=(0, 2, 3)):
    return standardised(x, tuple(axes), 0.0)


FORMULAS: dict[str, Callable] = {
    "LayerNormalization": layer_norm,
    "RMSNormalization": rms_norm,
    "InstanceNormalization": instance_norm,
    "GroupNormalization": group_norm,
    "BatchNormalization": batch_norm,
    "LpNormalization": lp_norm,
    "MeanVarianceNormalization": mean_variance_norm,
}


def norm(
    operator,
    shape,
    *parameters,
    shift=0.0,
    scale=1.0,
    zero_row=False,
    dtype="float32",
    opened=(),
    computed=False,
    **attributes,
) -> Form:
    """One node over x of this shape, with parameters of these shapes, whose values are positive."""
    rng = np.random.default_rng(2)
    kind = helper.tensor_dtype_to_np_dtype(getattr(TensorProto, {"float32": "FLOAT"}.get(dtype, dtype.upper())))
    x = (rng.normal(size=shape) * scale + shift).astype(kind)
    if zero_row:
        x[:, 1] = 0
    stored = {f"P{i}": (np.abs(rng.normal(size=size)) + 0.5).astype(kind) for i, size in enumerate(parameters)}
    wide = x.astype(np.float64)
    exact = {name: np.float64(np.float32(v)) if name == "epsilon" else v for name, v in attributes.items()}
    y = FORMULAS[operator](wide, *(value.astype(np.float64) for value in stored.values()), **exact)
    node = helper.make_node(operator, ["X", *stored], ["Y"], **attributes)
    feeds = {"X": x.astype(np.float32) if dtype == "bfloat16" else x} | ({"P0": stored.pop("P0")} if computed else {})
    data = [
        name
        for name, holds in (("mean 1e4", shift), ("deviation 400", scale == 400), ("a row of 0", zero_row))
        if holds
    ]
    deviation = 1e-5**0.5 if shape[-1] == 1 else scale  # of rows of 1 only eps is left
    bound = 8 * UNIT[dtype] * (np.sqrt(x.size) + np.abs(wide).max() / deviation) * max(1, np.abs(y).max() / 2)
    return form_of_node(node, feeds, stored, [y], bound, data, opened)


def norms() -> list[Form]:
    """The operators of norms with each attribute, type, rank and some magnitudes."""
    row, rows = (8,), (1, 3, 8)
    found = [
        norm("LayerNormalization", rows, row, row),
        norm("LayerNormalization", rows, row),
        norm("LayerNormalization", rows, row, row, opened=(1,)),
        norm("LayerNormalization", rows, row, row, computed=True),
        norm("LayerNormalization", rows, (3, 8), (3, 8), axis=-2),
        norm("LayerNormalization", (2, 3, 8), (2, 3, 8), (2, 3, 8), axis=0),
        norm("LayerNormalization", rows, row, row, axis=-2),
        norm("LayerNormalization", rows, (1,), (1,)),
        norm("LayerNormalization", rows, row, row, epsilon=0.3),
        norm("LayerNormalization", rows, row, row, shift=1e4),
        norm("LayerNormalization", (1, 3, 1), (1,), (1,)),
        norm("LayerNormalization", rows, row, row, zero_row=True),
        norm("LayerNormalization", rows, row, row, dtype="float16"),
        norm("LayerNormalization", rows, row, row, dtype="float16", scale=400),
        norm("LayerNormalization", rows, row, row, dtype="bfloat16"),
        norm("LayerNormalization", rows, row, row, dtype="float16", stash_type=10),
        norm("RMSNormalization", rows, row),
        norm("RMSNormalization", rows, row, opened=(1,)),
        norm("RMSNormalization", rows, (3, 8), axis=-2),
        norm("RMSNormalization", rows, (1,)),
        norm("RMSNormalization", rows, row, epsilon=0.3),
        norm("RMSNormalization", rows, row, zero_row=True),
        norm("RMSNormalization", rows, row, dtype="float16"),
        norm("RMSNormalization", rows, row, dtype="float16", scale=400),
        norm("GroupNormalization", (1, 6, 5, 4), (6,), (6,), num_groups=3),
        norm("GroupNormalization", (2, 6, 5, 4), (6,), (6,), num_groups=3),
        norm("GroupNormalization", (1, 6, 5), (6,), (6,), num_groups=3),
        norm("GroupNormalization", (1, 6, 5, 4), (6,), (6,), num_groups=3, epsilon=0.3),
        norm("GroupNormalization", (1, 6, 5, 4), (6,), (6,), num_groups=3, shift=1e4),
        norm("GroupNormalization", (1, 6, 5, 4), (6,), (6,), num_groups=3, dtype="float16"),
        norm("MeanVarianceNormalization", (2, 3, 5, 4), axes=[0, 2, 3]),  # without axes, onnx 1.23 infers no shape
        norm("MeanVarianceNormalization", (1, 3, 5, 4), axes=[2, 3]),
    ]
    for operator, others in (("InstanceNormalization", 0), ("BatchNormalization", 2)):
        parameters = [(3,)] * (2 + others)
        found += [
            norm(operator, (1, 3, 5, 4), *parameters),
            norm(operator, (2, 3, 5, 4), *parameters),
            norm(operator, (1, 3, 5), *parameters),
            norm(operator, (1, 3, 5, 4), *parameters, epsilon=0.3),
            norm(operator, (1, 3, 5, 4), *parameters, opened=(2,)),
            norm(operator, (1, 3, 5, 4), *parameters, dtype="float16"),
        ]
    found += [
        norm("InstanceNormalization", (1, 3, 1), (3,), (3,)),
        norm("InstanceNormalization", (1, 3, 5, 4), (3,), (3,), shift=1e4),
        norm("InstanceNormalization", (1, 3, 5, 4), (3,), (3,), dtype="float16", scale=400),
        norm("BatchNormalization", (2, 3), *[(3,)] * 4),
    ]
    for p in (1, 2):
        found += [
            norm("LpNormalization", rows, p=p),
            norm("LpNormalization", rows, p=p, axis=-2),
            norm("LpNormalization", rows, p=p, zero_row=True),
        ]
    return found


# ------------------------------------------------------------------------------- norms in elementary operators


def decomposed() -> list[Form]:
    """Layer and RMS norms written out, as exporters do."""
    found = []
    for traits, shift, dtype in (
        ((), 0.0, "f4"),
        (("mean 1e4",), 1e4, "f4"),
        (("one-pass",), 0.0, "f4"),
        (("rms",), 0.0, "f4"),
        (("float16",), 0.0, "f2"),
    ):
        rng = np.random.default_rng(2)
        x = (rng.normal(size=(1, 3, 8)) + shift).astype(dtype)
        stored = {"eps": np.array(1e-5 if dtype == "f4" else 1e-3, dtype), "two": np.array(2, dtype)}
        stored |= {"axes": np.array([-1], np.int64)}
        stored |= {name: (np.abs(rng.normal(size=8)) + 0.5).astype(dtype) for name in ("scale", "bias")}
        wide = {name: value.astype(np.float64) for name, value in stored.items()}
        if "rms" in traits:
            d, variance = x.astype(np.float64), (x.astype(np.float64) ** 2).mean(-1, keepdims=True)
        else:
            d = x - x.mean(-1, keepdims=True, dtype=np.float64)
            variance = (d * d).mean(-1, keepdims=True)
        y = d / np.sqrt(variance + wide["eps"]) * wide["scale"] + wide["bias"]
        nodes = _written_out("one-pass" in traits, "rms" in traits)
        used = {name for node in nodes for name in node.input}
        model = model_of(nodes, {"X": x}, {"Y": y}, {k: v for k, v in stored.items() if k in used}, USUAL_OPSET)
        bound = 32 * UNIT[x.dtype.name] * (np.sqrt(8) + np.abs(x).max())
        found.append(Form("decomposed", frozenset(traits), model, {"X": x}, [y], bound))
    return found


def _written_out(one_pass, rms):
    node, centred = helper.make_node, "X" if rms else "d"
    nodes = [] if rms else [node("ReduceMean", ["X", "axes"], ["mean"]), node("Sub", ["X", "mean"], ["d"])]
    nodes += [node("Pow", ["X" if one_pass else centred, "two"], ["q"]), node("ReduceMean", ["q", "axes"], ["m2"])]
    if one_pass:
        nodes += [node("Mul", ["mean", "mean"], ["mm"]), node("Sub", ["m2", "mm"], ["var"])]
    return [
        *nodes,
        node("Add", ["var" if one_pass else "m2", "eps"], ["v"]),
        node("Sqrt", ["v"], ["std"]),
        node("Div", [centred, "std"], ["xhat"]),
        node("Mul", ["xhat", "scale"], ["scaled"]),
        node("Add", ["scaled", "bias"], ["Y"]),
    ]


# ------------------------------------------------------------------------------------------------ control flow


def control() -> list[Form]:
    """Loop, Scan and If with the body of a leaky sum."""
    rng = np.random.default_rng(3)
    x, h = rng.normal(size=(STEPS, 1, UNITS)).astype("f4"), rng.normal(size=(1, UNITS)).astype("f4")
    node, info = helper.make_node, helper.make_tensor_value_info
    half = numpy_helper.from_array(np.array(0.5, "f4"), "half")
    body = [node("Mul", ["state", "half"], ["part"]), node("Add", ["part", "frame"], ["after"])]
    body += [node("Identity", ["after"], ["seen"])]
    states, frames = info("state", 1, h.shape), info("frame", 1, h.shape)
    results = [info("after", 1, h.shape), info("seen", 1, h.shape)]
    scan = helper.make_graph(body, "scan", [states, frames], results, [half])
    loop = helper.make_graph(
        [node("Gather", ["X", "i"], ["frame"], axis=0), *body, node("Identity", ["going"], ["go_on"])],
        "loop",
        [info("i", 7, []), info("going", 9, []), states],
        [info("go_on", 9, []), *results],
        [half],
    )
    branches = {
        name: helper.make_graph([node(kind, ["X", "half"], ["made"])], name, [], [info("made", 1, x.shape)], [half])
        for name, kind in (("then_branch", "Mul"), ("else_branch", "Add"))
    }
    feeds = {"X": x, "H": h}
    steps = {"n": np.array(STEPS, np.int64), "true": np.array(True)}
    forward, backward = ([_leaky(frames, h)[-1], np.stack(_leaky(frames, h))] for frames in (x, x[::-1]))
    found = []
    for opened in ((), (0,)):
        for attributes, expected in (({}, forward), ({"scan_input_directions": [1]}, backward)):
            made = node("Scan", ["H", "X"], ["last", "Y"], body=scan, num_scan_inputs=1, **attributes)
            found.append(_control(made, feeds, {}, expected, opened))
    found.append(_control(node("Loop", ["n", "true", "H"], ["last", "Y"], body=loop), feeds, steps, forward))
    steps |= {"last shape": np.array(h.shape), "Y shape": np.array(x.shape)}
    shaped = [node("Reshape", [f"{name} before", f"{name} shape"], [name]) for name in ("last", "Y")]
    made = node("Loop", ["n", "true", "H"], ["last before", "Y before"], body=loop)
    found.append(_control(made, feeds, steps, forward, behind=shaped))
    yes = {"X": x, "yes": np.array(True)}
    return [*found, _control(node("If", ["yes"], ["Y"], **branches), yes, {}, [x * 0.5])]


def _leaky(frames, state):
    """The states after each frame."""
    found = []
    for frame in frames:
        state = 0.5 * state.astype(np.float64) + frame
        found.append(state)
    return found


def _control(node, feeds, stored, expected, opened=(), behind=()) -> Form:
    names = [name for each in (node, *behind) for name in each.output if name in ("last", "Y")]
    model = model_of([node, *behind], feeds, dict(zip(names, expected, strict=True)), stored, USUAL_OPSET, opened)
    traits = traits_of(model.graph.node[0], next(iter(scopes(model))))
    return Form(node.op_type, traits, model, feeds, expected, recurrent_bound(expected, "float32"))
