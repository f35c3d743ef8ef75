"""x less something that behaves like a mean and is none is a near miss; x less anything else is an RMS norm of that."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from onnx_export.validation import formats
from onnx_export.validation.examine import examine
from onnx_export.validation.options import Options

N = 16
SHAPE = (3, 7, N)
node = helper.make_node
mean = node("ReduceMean", ["x"], ["mm"], axes=[-1])
CONSTANTS = {
    "e": np.float32(1e-5),
    "g": np.linspace(0.5, 2, N, dtype="f"),
    "zero": np.array([0]),
    "one": np.array([1]),
    "last": np.array([-1]),
    "most": np.array([N - 1]),
    "end": np.array([2**40]),
    "n": np.float32(N),
    "half": np.array([N // 2]),
    "axis": np.array(-1),
    "W": np.random.default_rng(0).normal(0, 0.3, (N, N)).astype("f"),
    "row": np.random.default_rng(1).normal(0, 0.3, N).astype("f"),
}
# what x loses, m, by what it is
LIKE = {
    "all but one element": [
        node("Slice", ["x", "zero", "most", "last"], ["part"]),
        node("ReduceMean", ["part"], ["m"], axes=[-1]),
    ],
    "the next row": [
        mean,
        node("Slice", ["mm", "one", "end", "one"], ["a"]),
        node("Slice", ["mm", "zero", "one", "one"], ["b"]),
        node("Concat", ["a", "b"], ["m"], axis=1),
    ],
    "relu": [node("Relu", ["x"], ["r"]), node("ReduceMean", ["r"], ["m"], axes=[-1])],
    "magnitudes": [node("Abs", ["x"], ["r"]), node("ReduceMean", ["r"], ["m"], axes=[-1])],
    "cumulated": [node("CumSum", ["x", "axis"], ["s"]), node("Div", ["s", "n"], ["m"])],
    "the largest": [node("ReduceMax", ["x"], ["m"], axes=[-1])],
    "the larger half": [node("TopK", ["x", "half"], ["t", "i"]), node("ReduceMean", ["t"], ["m"], axes=[-1])],
}
UNLIKE = {
    "a projection": [node("MatMul", ["x", "W"], ["m"])],
    "the element before": [
        node("Slice", ["x", "last", "end", "last"], ["a"]),
        node("Slice", ["x", "zero", "most", "last"], ["b"]),
        node("Concat", ["a", "b"], ["m"], axis=-1),
    ],
    "a gate": [node("Sigmoid", ["x"], ["s"]), node("Mul", ["x", "s"], ["m"])],
    "a residual of tanh": [node("Tanh", ["x"], ["m"])],
}


def examined(lost, path, subtracted="Sub", operator=False):
    d = {"Sub": [node("Sub", ["x", "m"], ["d"])], "Add": [node("Neg", ["m"], ["l"]), node("Add", ["l", "x"], ["d"])]}
    nodes = [*lost, *d[subtracted]]
    if operator:
        nodes += [node("SimplifiedLayerNormalization", ["d", "g"], ["y"], axis=-1)]
    else:
        nodes += [node("Mul", ["d", "d"], ["q"]), node("ReduceMean", ["q"], ["v"], axes=[-1])]
        nodes += [node("Add", ["v", "e"], ["ve"]), node("Sqrt", ["ve"], ["root"]), node("Div", ["d", "root"], ["z"])]
        nodes += [node("Mul", ["z", "g"], ["y"])]
    used = {name for each in nodes for name in each.input}
    stored = [numpy_helper.from_array(np.asarray(v), k) for k, v in CONSTANTS.items() if k in used]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, SHAPE) for name in "xy"]
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:], stored)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    report = examine(str(path), Options(), lambda *_: None)
    report.settle()
    return report


@pytest.mark.parametrize(("subtracted", "operator"), [("Sub", False), ("Add", False), ("Sub", True)])
@pytest.mark.parametrize("what", LIKE)
def test_what_behaves_like_a_mean_is_a_near_miss(what, subtracted, operator, tmp_path):
    report = examined(LIKE[what], tmp_path / "m.onnx", subtracted, operator)
    (norm,) = report.norms
    assert "not its mean" in norm.near_miss
    assert report.exit_code(strict=True) == 1
    assert report.exit_code() == (0 if what == "the largest" else 1)  # it may be a shift that somebody intends


@pytest.mark.parametrize("operator", [False, True])
@pytest.mark.parametrize("what", UNLIKE)
def test_x_less_anything_else_is_an_rms_norm_of_the_difference(what, operator, tmp_path):
    report = examined(UNLIKE[what], tmp_path / "m.onnx", operator=operator)
    (norm,) = report.norms
    assert (norm.formula, norm.of, norm.near_miss, report.exit_code(strict=True)) == ("rms", "x - f(x)", "", 0)
    assert formats.facts(norm).startswith("rms of x - f(x), axes 2, ")
    assert "centred" not in str(report)


def test_x_less_a_constant_is_an_rms_norm(tmp_path):
    report = examined([node("Identity", ["row"], ["m"])], tmp_path / "m.onnx")
    assert ([n.of for n in report.norms], report.exit_code(strict=True)) == ([""], 0)
