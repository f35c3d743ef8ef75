"""Single nodes in `Float64`, in each version of their operator, against onnxruntime: evaluator and standard agree."""

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper, numpy_helper

from onnx_export.float64 import Float64

RNG = np.random.default_rng(4)
X3, X4 = RNG.standard_normal((2, 3, 4)).astype("f4"), RNG.standard_normal((2, 5, 9, 8)).astype("f4")
INT8 = np.array([[1, -2], [3, 4]], np.int8)
POOLS = ("AveragePool", "MaxPool", "LpPool")
ASYMMETRIC = {"kernel_shape": [2, 3], "pads": [0, 1, 1, 0]}


def normal(*shape):
    return RNG.standard_normal(shape).astype("f4")


def cases():
    """(operator, inputs, attributes, opsets)."""
    for operator in ("Softmax", "LogSoftmax", "Hardmax"):
        for axis in (None, 0, 1, -2, -1):
            yield operator, [X3], {} if axis is None else {"axis": axis}, (7, 11, 12, 13, 21)
    for size in (1, 3, 5):
        yield "LRN", [X4], {"size": size, "alpha": 0.5, "beta": 0.6, "bias": 1.5}, (7, 13)
    for p in (1, 2):
        yield "LpNormalization", [X3 * [[[0], [1], [2]]]], {"p": p, "axis": 2}, (7, 22)
        yield "LpNormalization", [X3], {"p": p, "axis": 0}, (7, 22)
    for pool in POOLS:
        for auto in ("SAME_UPPER", "SAME_LOWER", "VALID"):
            for stride in (1, 2, 3):
                yield pool, [X4], {"kernel_shape": [3, 2], "strides": [stride, stride], "auto_pad": auto}, (10, 22)
        for stride in ([1, 1], [2, 2], [2, 1]):
            for ceil in (0, 1):
                yield pool, [X4], ASYMMETRIC | {"strides": stride, "ceil_mode": ceil}, (10, 11, 18, 19, 22)
                dilated = ASYMMETRIC | {"strides": stride, "ceil_mode": ceil, "dilations": [2, 1]}
                yield pool, [X4], dilated, (10, 11, 18, 19, 22)
    for ceil in (0, 1):
        included = ASYMMETRIC | {"strides": [3, 3], "ceil_mode": ceil, "count_include_pad": 1}
        yield "AveragePool", [X4], included, (10, 19, 22)
    for group in (1, 2):
        weights = [normal(1, 4, 9), normal(4, 3, 3), normal(3 * group)]
        yield "ConvTranspose", weights, {"group": group, "strides": [2], "pads": [1, 0], "dilations": [2]}, (7, 11, 22)
        yield "ConvTranspose", weights, {"group": group, "auto_pad": "SAME_LOWER", "strides": [2]}, (11,)
    for mode in ("constant", "reflect", "edge"):
        yield "Pad", [X3], {"mode": mode, "pads": [0, 1, 2, 0, 1, 1]}, (7, 10)
        yield "Pad", [X3, np.array([0, 1, 2, 0, 1, 1])], {"mode": mode}, (11, 13, 18, 21)
    yield "Pad", [X3, np.array([0, -1, 2, 0, 1, -1])], {}, (11, 13, 18)
    yield "Pad", [X3, np.array([1, 2]), np.float32(3), np.array([-1])], {}, (18, 21)
    yield "DequantizeLinear", [INT8, np.float32(0.1), np.int8(1)], {}, (10, 13, 19, 21)
    yield "DequantizeLinear", [INT8, np.float32([0.1, 0.2]), np.int8([1, 0])], {"axis": 0}, (13, 19, 21)


@pytest.mark.exhaustive(one_in=5)
@pytest.mark.parametrize(("operator", "inputs", "attributes", "opsets"), [*cases()])
def test_a_node_is_evaluated_as_its_version_says(operator, inputs, attributes, opsets):
    inputs = [np.asarray(value, np.float32) if np.asarray(value).dtype == float else value for value in inputs]
    names = [f"i{index}" for index in range(len(inputs))]
    first = helper.make_tensor_value_info("i0", helper.np_dtype_to_tensor_dtype(inputs[0].dtype), inputs[0].shape)
    stored = [
        numpy_helper.from_array(np.asarray(value), name) for name, value in zip(names[1:], inputs[1:], strict=True)
    ]
    result = helper.make_tensor_value_info("y", 1, None)
    for opset in opsets:
        if not attributes.keys() <= onnx.defs.get_schema(operator, opset).attributes.keys():
            continue
        node = helper.make_node(operator, names, ["y"], **attributes)
        graph = helper.make_graph([node], "g", [first], [result], stored)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
        session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
        (want,) = session.run(None, {"i0": inputs[0]})
        got = Float64(model).run({"i0": inputs[0]})["y"]
        assert (got.shape, got.dtype) == (want.shape, np.float64)
        # float32 of onnxruntime: sums of at most 6 products, a power and a root
        np.testing.assert_allclose(got, want, rtol=32 * 2.0**-24, atol=32 * 2.0**-24, err_msg=f"opset {opset}")
