"""The onnx package's own node tests, through an import of their models into our layers."""

import warnings

import numpy as np
import onnx
import pytest
from onnx.backend.test.loader import load_model_tests

import cnorm
import reference


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
        # the oracle is the judge of everything else: it has to pass, too
        assert_close(reference.layer_norm(x, weight, bias, axis=axis, eps=eps)[0], outputs["Y"], name)
