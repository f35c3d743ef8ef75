"""The onnx package's own node tests, through an import of their models into our layers."""

import warnings

import numpy as np
import onnx
import pytest
import reference
from onnx.backend.test.loader import load_model_tests

import cnorm


@pytest.fixture(scope="session")
def node_tests():
    """All cases by operator: (node, inputs by name, outputs by name, case name)."""
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")  # some of the other cases overflow on purpose while they are made
        cases = load_model_tests(kind="node")
    found = {}
    for case in cases:
        if len(case.model.graph.node) == 1:
            (node,) = case.model.graph.node
            for inputs, outputs in case.data_sets:
                named = {v.name: a for v, a in zip(case.model.graph.input, inputs, strict=True)}
                wanted = {v.name: a for v, a in zip(case.model.graph.output, outputs, strict=True)}
                found.setdefault(node.op_type, []).append((node, named, wanted, case.name))
    return found


def attributes(node):
    return {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}


def assert_close(got, wanted, name):
    """The cases' numbers were computed in float32, some of them with E[x^2] - E[x]^2."""
    assert got.shape == wanted.shape, name
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6, err_msg=name)


def test_layer_normalization(node_tests):
    cases = node_tests["LayerNormalization"]
    assert len(cases) >= 19
    for node, inputs, outputs, name in cases:
        options = attributes(node)
        axis, eps = options.get("axis", -1), options.get("epsilon", 1e-5)
        x, weight, bias = (inputs[n] for n in node.input)
        y, stats = cnorm.layer_norm(x, weight, bias, axis=axis, eps=eps, return_stats=True)
        for got, output in zip((y, stats.mean, stats.inv_std_dev), node.output, strict=True):
            assert_close(got, outputs[output], name)
        # the oracle, against which everything else is tested, has to pass as well
        assert_close(reference.layer_norm(x, weight, bias, axis=axis, eps=eps)[0], outputs["Y"], name)


def test_rms_normalization(node_tests):
    cases = node_tests["RMSNormalization"]
    assert len(cases) >= 19
    for node, inputs, outputs, name in cases:
        options = attributes(node)
        axis, eps = options.get("axis", -1), options.get("epsilon", 1e-5)
        x, weight = (inputs[n] for n in node.input)
        assert_close(cnorm.rms_norm(x, weight, axis=axis, eps=eps), outputs[node.output[0]], name)
        assert_close(reference.rms_norm(x, weight, axis=axis, eps=eps)[0], outputs[node.output[0]], name)


RECURRENT = {"LSTM": (cnorm.LSTM, "onnx"), "GRU": (cnorm.GRU, "onnx"), "RNN": (cnorm.RNN, None)}
NOT_COVERED = {
    "peepholes": "no cell of the runtime has peepholes",
    "seq_length": "a stream runs as long as it is stepped; the case gives each sequence of a batch a length of its own",
    "batchwise": "layout 1 puts the batch first; the same numbers as layout 0",
}


def imported(kind, node, inputs, direction):
    """The cnorm layer for one direction of an operator; weights have the preset's names and layout."""
    named = dict(zip(("X", "W", "R", "B"), (inputs.get(name) for name in node.input), strict=False))
    weights = {name: named[name][direction : direction + 1] for name in ("W", "R", "B") if named.get(name) is not None}
    layer, preset = RECURRENT[kind]
    if preset is None:  # there is no preset for the plain RNN, so it is described by a spec
        weight = (("W", "1 H I", "weight_x"), ("R", "1 H H", "weight_h"), ("B", "1 2H", "bias_x bias_h?"))
        preset = cnorm.CellSpec("RNN", "onnx", "onnx.ai, operator RNN", "a", weight)
    return layer(weights, preset=preset)


@pytest.mark.parametrize("kind", RECURRENT)
def test_recurrent_operators(node_tests, kind):
    covered = 0
    for node, inputs, outputs, name in node_tests[kind]:
        if any(word in name for word in NOT_COVERED):
            continue
        direction = attributes(node).get("direction", b"forward")
        x = inputs[node.input[0]]  # [T, B, I]
        ways = [imported(kind, node, inputs, i) for i in range(2 if direction == b"bidirectional" else 1)]
        for batch in range(x.shape[1]):
            frames = np.ascontiguousarray(x[:, batch])
            backwards = {b"forward": [False], b"reverse": [True], b"bidirectional": [False, True]}[direction]
            for way, (layer, backward) in enumerate(zip(ways, backwards, strict=True)):
                y = cnorm.Model([layer]).stream().process(frames[::-1] if backward else frames)
                y = y[::-1] if backward else y
                for output, value in zip(("Y", "Y_h"), (y, y[0 if backward else -1]), strict=True):
                    if output in outputs:
                        wanted = outputs[output][:, way, batch] if output == "Y" else outputs[output][way, batch]
                        assert_close(value, wanted, name)
                        covered += 1
    assert covered >= 4
