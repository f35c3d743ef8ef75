"""LSTM, GRU and RNN in float64 against the oracle and onnxruntime; the bounds hold and are not slack."""

import numpy as np
import onnxruntime
import pytest
import reference
from onnx import TensorProto, helper

from onnx_export import recurrent
from onnx_export.float64 import Float64

INPUTS, UNITS, STEPS, ROWS = 5, 4, 6, 3
DEFAULTS = {"LSTM": ["Sigmoid", "Tanh", "Tanh"], "GRU": ["Sigmoid", "Tanh"], "RNN": ["Tanh"]}
# with alpha and beta, because onnxruntime's defaults of Affine, ScaledTanh and ThresholdedRelu are others
ACTIVATIONS = {
    "Relu": {},
    "Softsign": {},
    "Softplus": {},
    "Elu": {"alpha": 0.7},
    "LeakyRelu": {"alpha": 0.3},
    "ThresholdedRelu": {"alpha": 0.2},
    "Affine": {"alpha": 0.6, "beta": 0.1},
    "ScaledTanh": {"alpha": 0.8, "beta": 0.6},
    "HardSigmoid": {"alpha": 0.3, "beta": 0.4},
}


def model_of(rng, kind, direction="forward", bias=True, lengths=False, initial=True, peepholes=False, **attributes):
    """A model of one node, its inputs by name, and the node's inputs in order."""
    gates, sides = recurrent.GATES[kind], 2 if direction == "bidirectional" else 1

    def numbers(*shape, scale=0.5):
        return (scale * rng.standard_normal(shape)).astype(np.float32)

    steps = 2 if "activations" in attributes else STEPS  # most of them let the state grow
    given = {
        "X": numbers(steps, ROWS, INPUTS, scale=1),
        "W": numbers(sides, gates * UNITS, INPUTS),
        "R": numbers(sides, gates * UNITS, UNITS),
        "B": numbers(sides, 2 * gates * UNITS) if bias else None,
        "sequence_lens": np.array([6, 4, 1], np.int32) if lengths else None,
        "initial_h": numbers(sides, ROWS, UNITS) if initial else None,
    }
    if kind == "LSTM":
        given["initial_c"] = numbers(sides, ROWS, UNITS) if initial else None
        given["P"] = numbers(sides, 3 * UNITS) if peepholes else None
    names = [name if value is not None else "" for name, value in given.items()]
    outputs = ["Y", "Y_h", "Y_c"][: 3 if kind == "LSTM" else 2]
    node = helper.make_node(kind, names, outputs, hidden_size=UNITS, direction=direction, **attributes)
    feeds = {name: value for name, value in given.items() if value is not None}
    types = {name: TensorProto.INT32 if name == "sequence_lens" else TensorProto.FLOAT for name in feeds}
    graph = helper.make_graph(
        [node],
        "node",
        [helper.make_tensor_value_info(name, types[name], value.shape) for name, value in feeds.items()],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 14)], ir_version=8)
    return model, feeds, list(given.values())


def agree(model, feeds, tolerance=2e-6):
    ran = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, feeds)
    exact = Float64(model).run(feeds)
    for name, value in zip(exact, ran, strict=True):
        np.testing.assert_allclose(value, exact[name], rtol=0, atol=tolerance, err_msg=name)


@pytest.mark.parametrize("kind", recurrent.GATES)
@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize("lengths", [False, True])
def test_directions_and_lengths_as_in_onnxruntime(rng, kind, direction, lengths):
    agree(*model_of(rng, kind, direction, lengths=lengths)[:2])


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("LSTM", {"bias": False, "initial": False}),
        ("LSTM", {"peepholes": True}),
        ("LSTM", {"input_forget": 1, "peepholes": True}),
        ("GRU", {"bias": False, "initial": False}),
        ("GRU", {"linear_before_reset": 1}),
        ("GRU", {"linear_before_reset": 1, "clip": 0.5}),
        ("GRU", {"clip": 0.5}),
        ("RNN", {"clip": 0.5}),
        ("LSTM", {"activations": ["sigmoid", "tanh", "RELU"]}),
    ],
)
def test_attributes_as_in_onnxruntime(rng, kind, options):
    agree(*model_of(rng, kind, **options)[:2])


@pytest.mark.parametrize("kind", recurrent.GATES)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_as_in_onnxruntime(rng, kind, name):
    for place in range(len(DEFAULTS[kind])):
        names = [*DEFAULTS[kind][:place], name, *DEFAULTS[kind][place + 1 :]]
        values = {f"activation_{which}": [value] for which, value in ACTIVATIONS[name].items()}
        model, feeds, _ = model_of(rng, kind, activations=names, **values)
        agree(model, feeds, 2e-5)


def test_layout_1_is_layout_0_transposed(rng):
    model, _, inputs = model_of(rng, "LSTM", "bidirectional", lengths=True)
    cell = recurrent.Cell.of(model.graph.node[0])
    y, h, c = recurrent.run(cell, inputs)
    turned = recurrent.Cell(cell.kind, cell.directions, cell.activations, layout=1)
    swapped = [np.swapaxes(a, 0, 1) if i in (0, 5, 6) else a for i, a in enumerate(inputs)]
    y1, h1, c1 = recurrent.run(turned, swapped)
    np.testing.assert_array_equal(np.transpose(y1, (1, 2, 0, 3)), y)
    np.testing.assert_array_equal(np.swapaxes(h1, 0, 1), h)
    np.testing.assert_array_equal(np.swapaxes(c1, 0, 1), c)


def test_a_step_is_that_of_the_oracle(rng):
    """The oracle shares no code with the package."""
    model, feeds, inputs = model_of(rng, "GRU", linear_before_reset=1)
    expected = reference.gru_onnx(
        {name: feeds[name] for name in "WRB"}, feeds["X"][0], feeds["initial_h"][0], linear_before_reset=True
    )
    y = recurrent.run(recurrent.Cell.of(model.graph.node[0]), inputs)[0]
    np.testing.assert_allclose(y[0, 0], expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("kind", recurrent.GATES)
def test_the_bound_covers_float32_and_is_not_slack(rng, kind):
    """The same arithmetic in float32 stays within the bound of a step, and uses a hundredth of it at least."""
    model, _, inputs = model_of(rng, kind, bias=True, clip=3.0)
    cell = recurrent.Cell.of(model.graph.node[0])
    x, w, r, b, _, h, *rest = inputs
    c = rest[0] if kind == "LSTM" else None
    (direction,) = recurrent.directions(cell, w, r, b)
    wide = [None if a is None else a[0].astype(np.float64) for a in (h, c)]
    exact = direction.step(x[0].astype(np.float64), recurrent.State.exact(*wide, 2.0**-24))
    (narrow,) = recurrent.directions(cell, w, r, b)
    for name in ("w", "r", "wb", "rb", "peepholes"):
        object.__setattr__(narrow, name, getattr(narrow, name).astype(np.float32))
    found = narrow.step(x[0], recurrent.State.exact(h[0], None if c is None else c[0], 2.0**-24))
    used = np.max(np.abs(found.h.value - exact.h.value) / exact.h.error)
    assert found.h.value.dtype == np.float32
    assert 0.01 < used < 1


@pytest.mark.parametrize(
    "operation",
    [
        lambda a, b: a + b,
        lambda a, b: a * b,
        lambda a, b: 1 - a,
        lambda a, b: b[..., 1:],
        lambda a, b: recurrent._through(a, np.tanh),
    ],
    ids=["sum", "product", "complement", "part", "function"],
)
def test_a_bound_is_what_the_errors_of_the_arguments_move_the_result_by(rng, operation):
    values, errors = rng.standard_normal((2, 3, 4)), rng.uniform(1e-3, 2e-3, (2, 3, 4))
    found = operation(*(recurrent.Approximate(*pair, 2.0**-24) for pair in zip(values, errors, strict=True)))
    exact = operation(*values)
    ends = [operation(values[0] + i * errors[0], values[1] + j * errors[1]) for i in (1, -1) for j in (1, -1)]
    moved = np.max(np.abs(np.array(ends) - exact), axis=0)
    np.testing.assert_array_equal(found.value, exact)
    np.testing.assert_array_less(moved, found.error * (1 + 1e-12))
    np.testing.assert_array_less(found.error, moved + 1e-6)  # some roundings


def test_what_there_is_not_is_refused():
    for attributes, says in (
        ({"direction": "sideways"}, "no direction"),
        ({"activations": ["Swish", "Tanh"]}, "no activation"),
        ({"activations": ["Tanh"]}, "2 activations wanted, 1 given"),
    ):
        with pytest.raises(ValueError, match=says):
            recurrent.Cell.from_attributes("GRU", attributes)
