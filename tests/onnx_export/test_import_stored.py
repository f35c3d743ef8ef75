"""`load` of norms without a mean, and of matrices that a file stores sparse or as integers with scales."""

from itertools import pairwise

import numpy as np
import onnx
import pytest
from graphs import imported, kinds, node, normal, saved
from onnx import TensorProto, helper, numpy_helper

from onnx_export.errors import NotImported

SIZE, UNITS = 8, 6


def rms(x, y, quotient):
    """x / sqrt(mean(x^2) + eps), the last node as `quotient` says."""
    nodes = [node("Mul", f"{x} {x}", "squares"), node("ReduceMean", "squares", "mean", axes=[-1])]
    nodes += [node("Add", "mean eps", "shifted"), node("Sqrt", "shifted", "root")]
    if quotient == "Div":
        return [*nodes, node("Div", f"{x} root", y)]
    inverse = node("Reciprocal", "root", "inverse") if quotient == "Reciprocal" else node("Div", "one root", "inverse")
    return [*nodes, inverse, node("Mul", f"{x} inverse", y)]


CONSTANTS = {"eps": np.float32(1e-6), "one": np.float32(1), "two": np.float32(2)}


@pytest.mark.parametrize("quotient", ["Div", "Reciprocal", "one over"])
def test_a_written_rms_norm_is_a_layer_norm_of_the_row_and_its_negative(quotient, tmp_path, rng):
    nodes = [node("MatMul", "x M", "v"), *rms("v", "w", quotient), node("Mul", "w gain", "u")]
    nodes += [node("GRU", "u W R", "Y", hidden_size=UNITS), node("Squeeze", "Y axis", "y")]
    tensors = {"M": normal(rng, 4, SIZE), "gain": normal(rng, SIZE), "W": normal(rng, 1, 3 * UNITS, SIZE),
               "R": normal(rng, 1, 3 * UNITS, UNITS), "axis": np.array([1])}  # fmt: skip
    path = saved(tmp_path / "m.onnx", nodes, {"x": ["T", 1, 4]}, {"y": ["T", 1, UNITS]}, tensors | CONSTANTS)
    assert kinds(imported(path)) == ["Linear", "LayerNorm", "Slice", "GRU"]


def tensorflow_norm(x, y, factor="s"):
    """x s + (b - mean s), s = gain / sqrt(variance + eps), as Keras writes it."""
    return [
        node("ReduceMean", x, "mean", axes=[-1]), node("Neg", "mean", "less"), node("Sub", f"{x} mean", "d"),
        node("Mul", "d d", "squares"), node("ReduceMean", "squares", "variance", axes=[-1]),
        node("Add", "variance eps", "shifted"), node("Sqrt", "shifted", "root"), node("Reciprocal", "root", "inverse"),
        node("Mul", "inverse gain", "s"), node("Mul", "inverse other", "r"), node("Mul", f"{x} s", "a"),
        node("Mul", f"less {factor}", "c"), node("Add", "c bias", "e"), node("Add", "a e", y),
    ]  # fmt: skip


@pytest.mark.parametrize("frames", [1, "T"])
@pytest.mark.exhaustive(one_in=2)
def test_a_norm_whose_factor_is_distributed(frames, tmp_path, rng):
    nodes = [node("GRU", "x W R", "Y", hidden_size=UNITS), node("Squeeze", "Y axis", "z"), *tensorflow_norm("z", "w")]
    tensors = {"W": normal(rng, 1, 3 * UNITS, 4), "R": normal(rng, 1, 3 * UNITS, UNITS), "axis": np.array([1])}
    tensors |= {"eps": np.float32(1e-3), "K": normal(rng, UNITS, 2)}
    tensors |= {name: 1 + normal(rng, UNITS) for name in ("gain", "bias", "other")}
    ends = {"x": [frames, 1, 4]}, {"y": [frames, 1, 2]}
    found = imported(saved(tmp_path / "m.onnx", [*nodes, node("MatMul", "w K", "y")], *ends, tensors))
    assert kinds(found) == ["GRU", "LayerNorm", "Linear"]
    norm = found.model.layers[1]
    assert norm.eps == np.float32(1e-3)
    assert np.array_equal(norm.weights["weight"], tensors["gain"])
    assert np.array_equal(norm.weights["bias"], tensors["bias"])
    nodes = [*nodes[:2], *tensorflow_norm("z", "w", "r")]  # the mean has another factor
    with pytest.raises(NotImported, match="Reciprocal 'inverse': no layer computes reciprocal"):
        imported(saved(tmp_path / "m.onnx", [*nodes, node("MatMul", "w K", "y")], *ends, tensors))


@pytest.mark.parametrize(
    ("op", "domain", "opset"),
    [("RMSNormalization", "", 23), ("SimplifiedLayerNormalization", "", 17), ("SkipLayerNormalization", "ms", 17),
     ("SkipSimplifiedLayerNormalization", "ms", 17), ("LayerNormalization", "", 17)],
)  # fmt: skip
def test_operators_of_norms(op, domain, opset, tmp_path, rng):
    domain = {"ms": "com.microsoft"}.get(domain, domain)
    inputs = ["v", "x", "gain"] if op.startswith("Skip") else ["v", "gain"]
    nodes = [node("MatMul", "x M", "v"), helper.make_node(op, inputs, ["w"], domain=domain, epsilon=1e-5)]
    path = saved(
        tmp_path / "m.onnx",
        [*nodes, node("Tanh", "w", "y")],
        {"x": [1, 1, SIZE]},
        {"y": [1, 1, SIZE]},
        {"M": normal(rng, SIZE, SIZE), "gain": normal(rng, SIZE)},
        opset,
    )
    file = onnx.load(path)
    file.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    onnx.save(file, path)
    found = imported(path)
    assert "LayerNorm" in kinds(found)
    assert ("Add" in kinds(found)) == op.startswith("Skip")


@pytest.mark.parametrize("fault", ["sum", "other", "eps outside", "statistics"])
def test_what_is_no_rms_norm_is_refused(fault, tmp_path, rng):
    nodes, tensors = rms("x", "y", "Div"), CONSTANTS | {"axes": np.array([-1])}
    if fault == "sum":
        nodes[1] = node("ReduceSum", "squares axes", "mean")
    elif fault == "other":
        nodes = [node("Tanh", "x", "t"), *rms("t", "u", "Div")[:-1], node("Div", "x root", "y")]
    elif fault == "eps outside":
        nodes[2:4] = [node("Sqrt", "mean", "r"), node("Add", "r eps", "root")]
    else:
        nodes = [node("SimplifiedLayerNormalization", "x gain", "v inverse"), node("Mul", "v inverse", "y")]
        tensors["gain"] = normal(rng, SIZE)
    path = saved(tmp_path / "m.onnx", nodes, {"x": [1, SIZE]}, {"y": [1, SIZE]}, tensors)
    with pytest.raises(NotImported):
        imported(path)


# ------------------------------------------------------------------------------------------------ stored tensors


def product(path, *nodes, tensors, outputs=UNITS):
    nodes = [*nodes, node("MatMul", "x M", "v"), node("Tanh", "v", "y")]
    return saved(path, nodes, {"x": ["T", 1, SIZE]}, {"y": ["T", 1, outputs]}, tensors, opset=21)


def sparse(name, at, shape=(SIZE, UNITS)):
    values = numpy_helper.from_array(np.arange(1, len(at) + 1, dtype=np.float32), name)
    return helper.make_sparse_tensor(values, numpy_helper.from_array(np.array(at), f"{name}/at"), shape)


@pytest.mark.parametrize("at", [[1, 13, 47], [[0, 1], [2, 1], [7, 5]]])
@pytest.mark.parametrize("stored", [True, False])
def test_a_sparse_matrix_is_dense(stored, at, tmp_path):
    if stored:
        path = product(tmp_path / "m.onnx", tensors={})
        file = onnx.load(path)
        file.graph.sparse_initializer.append(sparse("M", at))
        onnx.save(file, path)
    else:
        path = product(
            tmp_path / "m.onnx", helper.make_node("Constant", [], ["M"], sparse_value=sparse("", at)), tensors={}
        )
    (layer, _) = imported(path).model.layers
    assert np.count_nonzero(layer.weights["weight"]) == 3
    assert layer.weights["weight"][[1, 1, 5], [0, 2, 7]].tolist() == [1, 2, 3]


@pytest.mark.parametrize("at", [[1, 1, 47], [1, 2, 48], [-1, 2, 3]])
def test_a_sparse_matrix_with_other_places_is_refused(at, tmp_path):
    path = product(tmp_path / "m.onnx", tensors={})
    file = onnx.load(path)
    file.graph.sparse_initializer.append(sparse("M", at))
    onnx.save(file, path)
    with pytest.raises(NotImported, match=r"sparse|stored tensors"):
        imported(path)


@pytest.mark.parametrize("axis", [None, 0, 1])
def test_a_matrix_of_int8_with_scales(axis, tmp_path, rng):
    q = rng.integers(-127, 128, (SIZE, UNITS)).astype(np.int8)
    scales = np.float32(0.01) if axis is None else np.abs(normal(rng, q.shape[axis]))
    offset = np.zeros_like(scales, dtype=np.int8) + np.int8(3)
    given = {} if axis is None else {"axis": axis}
    nodes = [node("DequantizeLinear", "Q scales offset", "M", **given)]
    found = imported(product(tmp_path / "m.onnx", *nodes, tensors={"Q": q, "scales": scales, "offset": offset}))
    wanted = (q.astype(np.float32) - 3) * (scales if axis != 0 else scales[:, None])
    assert np.array_equal(found.model.layers[0].weights["weight"], wanted.T)
    assert any("matrices of integers" in note for note in found.notes)


def test_a_frame_of_int8_is_refused(tmp_path, rng):
    """Its rounding is in no layer."""
    nodes = [node("DequantizeLinear", "Q scale", "M"), node("QuantizeLinear", "x scale zero", "q")]
    nodes += [node("DequantizeLinear", "q scale zero", "d"), node("MatMul", "d M", "y")]
    tensors = {"Q": np.eye(SIZE, UNITS, dtype=np.int8), "scale": np.float32(0.01), "zero": np.int8(0)}
    path = saved(tmp_path / "m.onnx", nodes, {"x": ["T", 1, SIZE]}, {"y": ["T", 1, UNITS]}, tensors)
    with pytest.raises(NotImported, match="QuantizeLinear"):
        imported(path)


# ------------------------------------------------------------------------------------------------ 16 bits


def halved(path):
    """The file with floats of 16 bits."""
    file = onnx.load(path)
    for value in (*file.graph.input, *file.graph.output):
        value.type.tensor_type.elem_type = TensorProto.FLOAT16
    for tensor in file.graph.initializer:
        if tensor.data_type == TensorProto.FLOAT:
            array = numpy_helper.to_array(tensor).astype(np.float16)
            tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
    onnx.save(file, path)
    return path


@pytest.mark.exhaustive(one_in=4)
@pytest.mark.parametrize("states", [True, False])
@pytest.mark.parametrize("frames", [1, "T"])
def test_a_file_of_16_bits_is_compared_in_32_and_in_16(frames, states, tmp_path, rng):
    nodes = [
        helper.make_node("GRU", ["x", "W", "R", *(["", "", "h"] if states else [])], ["Y", "h1"], hidden_size=UNITS)
    ]
    tensors = {"W": normal(rng, 1, 3 * UNITS, 4), "R": normal(rng, 1, 3 * UNITS, UNITS), "axis": np.array([1])}
    inputs, outputs = {"x": [frames, 1, 4]}, {"y": [frames, 1, UNITS], "h1": [1, 1, UNITS]}
    inputs |= {"h": [1, 1, UNITS]} if states else {}
    path = saved(tmp_path / "m.onnx", [*nodes, node("Squeeze", "Y axis", "y")], inputs, outputs, tensors)
    found = imported(halved(path))
    assert kinds(found) == ["GRU"]
    assert any("16 bits" in note for note in found.notes)
    assert found.report.dtype == "float32"


@pytest.mark.parametrize("offset", [1024, 16384])
def test_what_only_16_bits_round_is_refused(offset, tmp_path, rng):
    """(v + 1024) - 1024 is v in exact numbers, and a rounded one in 16 bits."""
    nodes = [node("MatMul", "x M", "v"), node("Add", "v large", "u"), node("Sub", "u large", "y")]
    tensors = {"M": normal(rng, SIZE, UNITS), "large": np.float32(offset)}
    path = saved(tmp_path / "m.onnx", nodes, {"x": ["T", SIZE]}, {"y": ["T", UNITS]}, tensors)
    with pytest.raises(NotImported, match=r"beyond the bound|do not compute"):
        imported(halved(path))


def test_a_norm_with_a_mean_stays_one(tmp_path, rng):
    nodes = [node("ReduceMean", "x", "m", axes=[-1]), node("Sub", "x m", "d"), *rms("d", "y", "Reciprocal")]
    found = imported(saved(tmp_path / "m.onnx", nodes, {"x": [1, SIZE]}, {"y": [1, SIZE]}, CONSTANTS))
    assert kinds(found) == ["LayerNorm"]


@pytest.mark.parametrize(("shape", "named"), [((1, UNITS), True), ((UNITS,), False)])
def test_inputs_with_a_stored_value_that_may_be_states_are_named(shape, named, tmp_path, rng):
    nodes = [
        node("MatMul", "x M", "u"),
        node("MatMul", "h R", "v"),
        node("Add", "u v", "w"),
        node("Tanh", "w", "h_out"),
    ]
    tensors = {"M": normal(rng, SIZE, UNITS), "R": normal(rng, UNITS, UNITS), "h": normal(rng, *shape)}
    ends = {"x": [1, SIZE], "h": list(shape)}, {"h_out": [1, UNITS]}
    notes = imported(saved(tmp_path / "m.onnx", nodes, *ends, tensors)).notes
    assert [note for note in notes if note.endswith("could be states: 'h'")] == list(notes)
    assert bool(notes) == named


def powers(x, count):
    """x ** (2 ** count), as squares of squares, the last called `count`."""
    names = [x, *(f"{x}{i}" for i in range(1, count + 1))]
    return [node("Mul", f"{a} {a}", b) for a, b in pairwise(names)]


# c u^4 / (1 + u^8) of u = 10,000 times the variance, or as much under a root: large between the sizes that are tried.
RATIO = [node("Mul", "variance large", "u"), *powers("u", 3), node("Add", "u3 unit", "below")]
BUMPS = {
    "a quotient": [*RATIO, node("Div", "u2 below", "bump")],
    "a quotient by a root": [*RATIO, node("Sqrt", "below", "rooted"), node("Div", "u2 rooted", "bump")],
    "a quotient without powers": [node("Add", "variance small", "below"), node("Div", "small below", "bump")],
}
WHERE = {
    "to eps": ("shifted", "variance", [node("Mul", "bump variance", "v2"), node("Add", "variance v2", "more")]),
    "below the mean": ("shifted", "variance",
                       [node("Mul", "squares bump", "s2"), node("ReduceMean", "s2", "v2", axes=[-1]),
                        node("Add", "variance v2", "more")]),
    "to the factor": ("s", "inverse", [node("Mul", "inverse bump", "i2"), node("Add", "inverse i2", "more")]),
}  # fmt: skip


@pytest.mark.parametrize("bump", BUMPS)
@pytest.mark.parametrize("where", WHERE)
def test_a_quotient_beside_those_of_a_norm_is_none(where, bump, tmp_path, rng):
    nodes = tensorflow_norm("x", "w")
    result, read, more = WHERE[where]
    at = next(i for i, one in enumerate(nodes) if one.output[0] == result)
    changed = nodes[at]
    changed.input[list(changed.input).index(read)] = "more"
    nodes[at:at] = [*BUMPS[bump], *more]
    tensors = {"eps": np.float32(1e-12), "unit": np.float32(1), "large": np.float32(1e4), "small": np.float32(1e-3)}
    tensors |= {"gain": 1 + normal(rng, 8), "bias": normal(rng, 8), "other": normal(rng, 8), "K": normal(rng, 8, 2)}
    read = {name for one in nodes for name in one.input} | {"K"}
    stored = {name: value for name, value in tensors.items() if name in read}
    path = saved(tmp_path / "m.onnx", [*nodes, node("MatMul", "w K", "y")], {"x": [1, 8]}, {"y": [1, 2]}, stored)
    with pytest.raises(NotImported, match="no layer computes reciprocal"):
        imported(path)


VARIANTS = {
    "the mean counts a little": [node("Mul", "mean mean", "m2"), node("Mul", "m2 tiny", "m3"),
                                 node("Add", "shifted m3", "radicand")],
    "an element counts a little": [node("Mul", "x x", "x2"), node("Mul", "x2 few", "x3"),
                                   node("ReduceMean", "x3", "m3", axes=[-1]), node("Add", "shifted m3", "radicand")],
}  # fmt: skip


@pytest.mark.parametrize("case", VARIANTS)
def test_what_is_beside_the_variance_in_rows_with_a_mean_is_found(case, tmp_path, rng):
    """1e-8 of the squared mean is 1 % of a variance of 1 at a mean of 1,000."""
    nodes = tensorflow_norm("x", "y")
    at = next(i for i, one in enumerate(nodes) if one.output[0] == "root")
    nodes[at].input[0] = "radicand"
    nodes[at:at] = VARIANTS[case]
    tensors = {"eps": np.float32(1e-5), "tiny": np.float32(1e-8), "few": np.float32([1e-7, *[0] * 7])}
    tensors |= {"gain": 1 + normal(rng, 8), "bias": normal(rng, 8), "other": normal(rng, 8)}
    read = {name for one in nodes for name in one.input}
    stored = {name: value for name, value in tensors.items() if name in read}
    path = saved(tmp_path / "m.onnx", nodes, {"x": [1, 8]}, {"y": [1, 8]}, stored)
    with pytest.raises(NotImported, match="no layer computes reciprocal"):
        imported(path)


@pytest.mark.parametrize("second", [1e-3, 2.0])
def test_quotients_by_two_roots_are_no_norm(second, tmp_path, rng):
    """A sum of many may be a norm's at all sizes that are tried, and none between."""
    nodes = tensorflow_norm("x", "y")
    at = next(i for i, one in enumerate(nodes) if one.output[0] == "s")
    nodes[at].input[0] = "both"
    nodes[at:at] = [node("Add", "variance second", "v2"), node("Sqrt", "v2", "r2"), node("Reciprocal", "r2", "i2"),
                    node("Mul", "i2 few", "i3"), node("Add", "inverse i3", "both")]  # fmt: skip
    tensors = {"eps": np.float32(1e-3), "second": np.float32(second), "few": np.float32(1e-9)}
    tensors |= {"gain": 1 + normal(rng, 8), "bias": normal(rng, 8), "other": normal(rng, 8)}
    path = saved(tmp_path / "m.onnx", nodes, {"x": [1, 8]}, {"y": [1, 8]}, tensors)
    with pytest.raises(NotImported, match="no layer computes reciprocal"):
        imported(path)
