"""`Float64` evaluates every node in float64, wherever in a model float32 can occur."""

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from onnx_export.float64 import NARROW, Float64, widen

RNG = np.random.default_rng(6)


def value(name, shape=None, dtype=TensorProto.FLOAT):
    return helper.make_tensor_value_info(name, dtype, shape)


def model(nodes, inputs, outputs, initialisers=(), functions=(), opset=17):
    graph = helper.make_graph(nodes, "g", inputs, outputs, list(initialisers))
    opsets = [helper.make_opsetid(domain, v) for domain, v in (("", opset), ("com.microsoft", 1), ("f", 1))]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8, functions=functions)


def run(nodes, feeds, initialisers=(), outputs=("y",), **options):
    inputs = [value(name, array.shape) for name, array in feeds.items()]
    return Float64(model(nodes, inputs, [value(o) for o in outputs], initialisers, **options)).run(feeds)


def layer_norm(x, eps, axis=-1):
    axes = tuple(range(axis % x.ndim, x.ndim))
    d = x.astype(float) - x.astype(float).mean(axes, keepdims=True)
    return d / np.sqrt((d * d).mean(axes, keepdims=True) + eps)


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.parametrize("stash_type", [1, 16])
@pytest.mark.parametrize("axis", [-1, 1, 0])
def test_layer_normalization_is_float64_with_the_stored_epsilon(dtype, stash_type, axis):
    x = (1000 + 100 * RNG.normal(size=(3, 4, 5))).astype(dtype)
    scale = numpy_helper.from_array(np.full(x.shape[axis:], 3, dtype), "s")
    node = helper.make_node("LayerNormalization", ["x", "s"], ["y"], axis=axis, epsilon=0.1, stash_type=stash_type)
    y = run([node], {"x": x}, [scale])["y"]
    assert y.dtype == np.float64
    # the tolerance is far below the distance between 0.1 and its float32 value (1.5e-9 relative to var)
    np.testing.assert_allclose(y, 3 * layer_norm(x, float(np.float32(0.1)), axis), rtol=0, atol=1e-13)


def test_every_source_of_float32_is_widened():
    nodes = [
        helper.make_node("Constant", [], ["third"], value_float=1 / 3),
        helper.make_node("Cast", ["x"], ["half"], to=TensorProto.FLOAT16),
        helper.make_node("Cast", ["half"], ["back"], to=TensorProto.FLOAT),
        helper.make_node("ConstantOfShape", ["shape"], ["zero"]),
        helper.make_node("EyeLike", ["square"], ["eye"]),
        helper.make_node("HannWindow", ["four"], ["window"]),
        helper.make_node("Sum", ["back", "third", "zero"], ["y"]),
    ]
    stored = [
        numpy_helper.from_array(np.array([4]), "shape"),
        numpy_helper.from_array(np.zeros((2, 2), np.int64), "square"),
        numpy_helper.from_array(np.array(4), "four"),
    ]
    x = np.linspace(0, 1, 4, dtype=np.float32)
    got = run(nodes, {"x": x}, stored, outputs=("y", "eye", "window"))
    assert {name: array.dtype for name, array in got.items()} == dict.fromkeys(got, np.dtype(float))
    np.testing.assert_array_equal(got["y"], x.astype(float) + float(np.float32(1 / 3)))


@pytest.mark.parametrize("opset", [17, 18], ids=["inlined", "kept"])
def test_local_functions_and_subgraphs(opset):
    """A function of another opset than the model's cannot be inlined: it must be widened in place."""
    body = [
        helper.make_node("Constant", [], ["s"], value_floats=[2.0]),
        helper.make_node("LayerNormalization", ["x", "s"], ["y"], stash_type=1),
    ]
    function = helper.make_function("f", "Norm", ["x"], ["y"], body, [helper.make_opsetid("", opset)])
    then = helper.make_graph([helper.make_node("Norm", ["x"], ["t"], domain="f")], "then", [], [value("t")])
    other = helper.make_graph([helper.make_node("Cast", ["x"], ["e"], to=TensorProto.FLOAT)], "else", [], [value("e")])
    x = (1e4 + RNG.normal(size=(2, 6))).astype(np.float32)
    node = helper.make_node("If", ["c"], ["y"], then_branch=then, else_branch=other)
    judge = Float64(model([node], [value("x"), value("c", [], TensorProto.BOOL)], [value("y")], functions=[function]))
    taken = judge.run({"x": x, "c": np.array(True)})["y"]
    np.testing.assert_allclose(taken, 2 * layer_norm(x, float(np.float32(1e-5))), rtol=0, atol=1e-9)
    passed = judge.run({"x": x, "c": np.array(False)})["y"]
    assert passed.dtype == np.float64
    np.testing.assert_array_equal(passed, x)


def test_scan_body():
    body = helper.make_graph(
        [
            helper.make_node("Add", ["h", "x"], ["sum"]),
            helper.make_node("RMSNormalization", ["sum", "s"], ["h_next"], epsilon=0.5),
            helper.make_node("Identity", ["h_next"], ["out"]),
        ],
        "body",
        [value("h", [4]), value("x", [4])],
        [value("h_next", [4]), value("out", [4])],
    )
    node = helper.make_node("Scan", ["h0", "xs"], ["h", "y"], body=body, num_scan_inputs=1)
    xs = RNG.normal(size=(3, 4)).astype(np.float32)
    stored = [numpy_helper.from_array(np.ones(4, np.float32), "s")]
    got = run([node], {"h0": xs[0], "xs": xs}, stored, outputs=("h", "y"), opset=23)
    h = xs[0].astype(float)
    for x in xs.astype(float):
        h = h + x
        h = h / np.sqrt((h * h).mean() + 0.5)
    np.testing.assert_allclose(got["h"], h, rtol=1e-14)
    assert got["y"].shape == (3, 4)


def test_group_instance_and_skip_norms():
    x = (50 + RNG.normal(size=(2, 6, 5))).astype(np.float32)
    scale, bias = RNG.normal(size=(2, 6)).astype(np.float32)
    stored = [numpy_helper.from_array(scale, "s"), numpy_helper.from_array(bias, "b")]
    eps = float(np.float32(1e-5))

    group = helper.make_node("GroupNormalization", ["x", "s", "b"], ["y"], num_groups=3)
    wanted = layer_norm(x.reshape(2, 3, 10), eps).reshape(x.shape) * scale[:, None] + bias[:, None]
    np.testing.assert_allclose(run([group], {"x": x}, stored, opset=21)["y"], wanted, rtol=0, atol=1e-11)

    instance = helper.make_node("InstanceNormalization", ["x", "s", "b"], ["y"])
    wanted = layer_norm(x, eps) * scale[:, None] + bias[:, None]
    np.testing.assert_allclose(run([instance], {"x": x}, stored)["y"], wanted, rtol=0, atol=1e-11)

    rows, skip = np.swapaxes(x, 1, 2).copy(), RNG.normal(size=(2, 5, 6)).astype(np.float32)
    node = helper.make_node("SkipLayerNormalization", ["x", "k", "s", "b"], ["y"], domain="com.microsoft")
    wanted = layer_norm(rows + skip.astype(float), float(np.float32(1e-12))) * scale + bias
    got = run([node], {"x": rows, "k": skip}, stored)["y"]
    np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-11)


def test_widen_leaves_no_narrow_type_and_does_not_modify_its_argument():
    stored = [numpy_helper.from_array(np.ones(4, np.float16), "s")]
    half = TensorProto.FLOAT16
    node = helper.make_node("LayerNormalization", ["x", "s"], ["y"], stash_type=1)
    before = model([node], [value("x", [2, 4], half)], [value("y", [2, 4], half)], stored)
    copy = before.SerializeToString()
    wide = widen(before)
    assert before.SerializeToString() == copy
    types = [v.type.tensor_type.elem_type for v in (*wide.graph.input, *wide.graph.output)]
    assert not NARROW & {*types, wide.graph.initializer[0].data_type}


def calling(operator, domain="", outer=None, **attributes):
    """A function's node b = operator(a); `outer`: its attribute is the function's attribute of that name."""
    node = helper.make_node(operator, ["a"], ["b"], domain=domain, **attributes)
    if outer:
        node.attribute[0].ClearField("f")
        node.attribute[0].ref_attr_name = outer
    return node


def function(name, node, opset, defaults=(), attributes=()):
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("f", 1)]
    return helper.make_function("f", name, ["a"], ["b"], [node], opsets, attributes, attribute_protos=list(defaults))


@pytest.mark.parametrize("beside", [None, "Other", "Caller"])
@pytest.mark.parametrize("passed_on", [False, True])
def test_functions_keep_the_defaults_of_their_attributes(beside, passed_on):
    """Also beside a function of another opset, which stays one, and where that calls the others."""
    leaky = function("Leaky", calling("LeakyRelu", outer="slope", alpha=0.0), 17, [helper.make_attribute("slope", 0.3)])
    given = {"outer": "inner", "slope": 0.0} if passed_on else {}
    functions = [leaky, function("Nested", calling("Leaky", "f", **given), 17, attributes=["inner"][:passed_on])]
    others = {"Other": calling("Identity"), "Caller": calling("Leaky", "f")}
    functions += [function(beside, others[beside], 16)] if beside else []
    nodes = [helper.make_node("Nested", ["x"], ["y"], domain="f")]
    nodes += [helper.make_node("Other", ["x"], ["z"], domain="f")] if beside == "Other" else []
    results = run(nodes, {"x": np.float32([-1, 2])}, functions=functions)
    np.testing.assert_allclose(results["y"], [-0.3, 2], rtol=1e-7)


def test_errors_name_what_is_missing():
    tensor = numpy_helper.from_array(np.ones(4, np.float32), "weights")
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    node = helper.make_node("Add", ["x", "weights"], ["y"])
    with pytest.raises(ValueError, match="weights"):
        widen(model([node], [value("x")], [value("y")], [tensor]))
    judge = Float64(model([helper.make_node("Abs", ["x"], ["y"])], [value("x")], [value("y")]))
    with pytest.raises(ValueError, match=r"missing \['x'\]"):
        judge.run({})
