"""`load` of operators that a constant matrix computes, and of functions that are written as a choice."""

import logging
import warnings

import numpy as np
import pytest
from graphs import imported, kinds, node, normal, saved

SIZE, UNITS = 8, 6


def same(found, rng):
    x = rng.standard_normal((9, found.model.input_size)).astype(np.float32)
    return found.model.check(x, found.file.run(x)).ok


EINSUMS = {
    "plain": ("bi,ih->bh", (1, SIZE), (SIZE, UNITS), (1, UNITS)),
    "turned": ("hi,bi->hb", (UNITS, SIZE), (1, SIZE), (UNITS, 1)),
    "of three axes": ("bti,hi->bth", (1, 1, SIZE), (UNITS, SIZE), (1, 1, UNITS)),
    "grouped": ("btgi,gih->btgh", (1, 1, 4, 2), (4, 2, 3), (1, 1, 4, 3)),
    "grouped, groups last": ("big,gih->bhg", (1, 2, 4), (4, 2, 3), (1, 3, 4)),
    "any axes": ("...i,ih->...h", (1, 1, SIZE), (SIZE, UNITS), (1, 1, UNITS)),
    "without a result": ("bi,ih", (1, SIZE), (SIZE, UNITS), (1, UNITS)),
    "two axes": ("bij,jih->bh", (1, 2, 4), (4, 2, UNITS), (1, UNITS)),
    "summed": ("bij,ih->bh", (1, 2, 4), (2, UNITS), (1, UNITS)),
    "a scale": ("bi,i->bi", (1, SIZE), (SIZE,), (1, SIZE)),
    "one constant summed": ("bi,ihk->bh", (1, SIZE), (SIZE, UNITS, 3), (1, UNITS)),
}


@pytest.mark.exhaustive(one_in=4)
@pytest.mark.parametrize("case", EINSUMS)
def test_an_einsum_with_a_constant_is_a_product(case, tmp_path, rng):
    equation, first, second, result = EINSUMS[case]
    x, weight = (second, first) if case == "turned" else (first, second)
    nodes = [node("Einsum", "K x" if case == "turned" else "x K", "a", equation=equation), node("Tanh", "a", "y")]
    found = imported(saved(tmp_path / "m.onnx", nodes, {"x": x}, {"y": result}, {"K": normal(rng, *weight)}))
    assert kinds(found) == ["Linear", "Activation"]
    assert found.report.ok
    assert same(found, rng)


@pytest.mark.parametrize(
    ("equation", "reason"),
    [
        ("bi,bi->b", "it multiplies what depends on the frame"),
        ("bi->ib", "it multiplies what depends on the frame|has 1 terms"),
        ("bii,ih->bh", "no product of two inputs axis by axis"),
    ],
)
def test_another_einsum_is_refused(equation, reason, tmp_path, rng):
    nodes = [node("MatMul", "x K", "a"), node("Einsum", "a x" if ",b" in equation else "a", "e", equation=equation)]
    if "bii" in equation:
        nodes = [node("Reshape", "x shape", "a"), node("Einsum", "a K", "e", equation=equation)]
    nodes.append(node("Tanh", "e", "y"))
    shape = {"shape": np.array([1, 2, 2])} if "bii" in equation else {}
    weights = {"K": normal(rng, 2, 3) if shape else normal(rng, 4, 4)} | shape
    path = saved(tmp_path / "m.onnx", nodes, {"x": [1, 4]}, {"y": [1, 3]}, weights)
    with pytest.raises(ValueError, match=reason):
        imported(path)


REDUCED = {
    "the mean of a frame": [node("ReduceMean", "a", "m", axes=[1]), node("Sub", "a m", "y")],
    "the sum of a frame": [node("ReduceSum", "a axis", "m"), node("Mul", "a m", "y")],
    "a mean of the squares": [node("Mul", "a a", "q"), node("ReduceMean", "q", "m", axes=[1]), node("Add", "m a", "y")],
    "halves": [
        node("Reshape", "a half", "b"),
        node("ReduceMean", "b", "m", axes=[2]),
        node("Sub", "b m", "c"),
        node("Reshape", "c row", "y"),
    ],
}


@pytest.mark.parametrize("case", REDUCED)
def test_a_mean_of_a_frame_is_a_matrix(case, tmp_path, rng):
    nodes = [node("MatMul", "x K", "z"), node("Tanh", "z", "a"), *REDUCED[case]]
    tensors = {"K": normal(rng, SIZE, UNITS), "axis": np.array([1]), "half": np.array([1, 2, -1])}
    tensors["row"] = np.array([1, UNITS])
    read = {name for each in nodes for name in each.input}
    tensors = {name: tensor for name, tensor in tensors.items() if name in read}
    found = imported(saved(tmp_path / "m.onnx", nodes, {"x": [1, SIZE]}, {"y": [1, UNITS]}, tensors))
    assert found.report.ok
    assert same(found, rng)


@pytest.mark.parametrize("pool", ["global", "average", "padded"])
def test_an_average_of_positions(pool, tmp_path, rng):
    nodes = [node("Conv", "x K", "a"), node("Relu", "a", "r")]
    if pool == "global":
        nodes += [node("GlobalAveragePool", "r", "p"), node("Flatten", "p", "f"), node("MatMul", "f V", "y")]
    else:
        pads = {"pads": [1, 1], "count_include_pad": 1} if pool == "padded" else {}
        nodes.append(node("AveragePool", "r", "y", kernel_shape=[3], strides=[2], **pads))
    tensors = {"K": normal(rng, 4, 3, 3)} | ({"V": normal(rng, 4, 2)} if pool == "global" else {})
    places = {"average": 4, "padded": 5}.get(pool)
    ends = {"x": [1, 3, 11]}, {"y": [1, 2] if pool == "global" else [1, 4, places]}
    found = imported(saved(tmp_path / "m.onnx", nodes, *ends, tensors))
    assert kinds(found) == ["Conv1d", "Activation", *(["Linear", "Linear"] if pool == "global" else ["Conv1d"])]
    assert found.report.ok
    assert same(found, rng)


def test_an_average_that_counts_fewer_positions_at_the_edge_is_refused(tmp_path):
    nodes = [node("Relu", "x", "r"), node("AveragePool", "r", "y", kernel_shape=[3], pads=[1, 1])]
    with pytest.raises(ValueError, match="divides by fewer positions where it is padded"):
        imported(saved(tmp_path / "m.onnx", nodes, {"x": [1, 2, 9]}, {"y": [1, 2, 9]}, {}))


@pytest.mark.parametrize("op", ["ReduceMean", "ReduceSum", "GlobalAveragePool", "Einsum"])
def test_a_mean_or_sum_over_time_is_refused(op, tmp_path, rng):
    more = {
        "ReduceMean": node("ReduceMean", "r", "m", axes=[2]),
        "ReduceSum": node("ReduceSum", "r axis", "m"),
        "GlobalAveragePool": node("GlobalAveragePool", "r", "m"),
        "Einsum": node("Einsum", "r one", "m", equation="bct,d->bcd"),
    }[op]
    nodes = [node("Relu", "x", "r"), more, node("Sub", "r m", "y")]
    tensors = {"ReduceSum": {"axis": np.array([2])}, "Einsum": {"one": np.ones(1, np.float32)}}.get(op, {})
    path = saved(tmp_path / "m.onnx", nodes, {"x": [1, 4, "T"]}, {"y": [1, 4, "T"]}, tensors)
    with pytest.raises(ValueError, match="its result depends on several frames"):
        imported(path)


SLOPES = np.linspace(0.1, 0.3, UNITS, dtype=np.float32)
CHOICES = {
    "leaky relu": (["Greater", "a zero"], ["a", "b"], 0.1, "leaky_relu"),
    "leaky relu, at least": (["GreaterOrEqual", "a zero"], ["a", "b"], 0.1, "leaky_relu"),
    "leaky relu, below": (["Less", "a zero"], ["b", "a"], 0.1, "leaky_relu"),
    "leaky relu, zero first": (["LessOrEqual", "zero a"], ["a", "b"], 0.1, "leaky_relu"),
    "a slope for each": (["Greater", "a zero"], ["a", "b"], SLOPES, "prelu"),
    "relu": (["Greater", "a zero"], ["a", "zero"], 0.1, "relu"),
}


@pytest.mark.parametrize("zeros", [(), (UNITS,), (1, UNITS)], ids=str)
@pytest.mark.parametrize("case", CHOICES)
def test_a_choice_that_is_a_function(case, zeros, tmp_path, rng):
    (op, operands), (one, other), slope, function = CHOICES[case]
    nodes = [node("MatMul", "x K", "a"), node(op, operands, "c"), node("Mul", "a s", "b")]
    nodes += [node("Where", f"c {one} {other}", "w"), node("MatMul", "w V", "y")]
    tensors = {"K": normal(rng, SIZE, UNITS), "V": normal(rng, UNITS, 2), "zero": np.zeros(zeros, np.float32)}
    tensors["s"] = np.asarray(slope, np.float32)
    found = imported(saved(tmp_path / "m.onnx", nodes, {"x": [1, SIZE]}, {"y": [1, 2]}, tensors))
    assert kinds(found) == ["Linear", "Activation", "Linear"]
    assert found.model.layers[1].function == function
    assert same(found, rng)


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("shape", [(), (UNITS,), (1, UNITS)], ids=str)
@pytest.mark.parametrize(("op", "limit"), [("Max", 0.0), ("Max", -0.5), ("Min", 0.25)])
def test_a_maximum_with_a_constant_is_a_clip(op, limit, shape, swapped, tmp_path, rng):
    nodes = [node("MatMul", "x K", "a"), node(op, "k a" if swapped else "a k", "y")]
    tensors = {"K": normal(rng, SIZE, UNITS), "k": np.full(shape, limit, np.float32)}
    found = imported(saved(tmp_path / "m.onnx", nodes, {"x": [1, SIZE]}, {"y": [1, UNITS]}, tensors))
    assert kinds(found) == ["Linear", "Activation"]
    assert same(found, rng)


@pytest.mark.parametrize("op", ["Max", "Min", "Greater"])
def test_limits_of_two_values_are_refused(op, tmp_path, rng):
    nodes = [node("MatMul", "x K", "a"), node(op, "a k", "y" if op != "Greater" else "c")]
    nodes += [node("Where", "c a k", "y")] if op == "Greater" else []
    tensors = {"K": normal(rng, SIZE, UNITS), "k": np.float32([0.5] * (UNITS - 1) + [0.25])}
    path = saved(tmp_path / "m.onnx", nodes, {"x": [1, SIZE]}, {"y": [1, UNITS]}, tensors)
    with pytest.raises(ValueError, match="it compares with more than one constant"):
        imported(path)


def test_a_maximum_with_its_multiple_is_a_leaky_relu(tmp_path, rng):
    nodes = [node("MatMul", "x K", "a"), node("Mul", "a s", "b"), node("Max", "a b", "y")]
    ends = {"x": [1, SIZE]}, {"y": [1, UNITS]}
    tensors = {"K": normal(rng, SIZE, UNITS), "s": np.float32(0.2)}
    found = imported(saved(tmp_path / "m.onnx", nodes, *ends, tensors))
    assert [layer.function for layer in found.model.layers[1:]] == ["leaky_relu"]
    assert same(found, rng)


NO_FUNCTION = {
    "another limit": ("Greater", 0.5, 0.1, "Where", "c a b"),
    "turned": ("Greater", 0.0, 0.1, "Where", "c b a"),
    "a slope above 1": ("Greater", 0.0, 2.0, "Max", "a b"),
    "the smaller": ("Greater", 0.0, 0.1, "Min", "a b"),
}


@pytest.mark.parametrize("case", NO_FUNCTION)
def test_another_choice_is_refused(case, tmp_path, rng):
    op, limit, slope, chooser, operands = NO_FUNCTION[case]
    nodes = [node("MatMul", "x K", "a"), node(op, "a k", "c"), node("Mul", "a s", "b"), node(chooser, operands, "y")]
    tensors = {"K": normal(rng, SIZE, UNITS), "k": np.float32(limit), "s": np.float32(slope)}
    path = saved(tmp_path / "m.onnx", nodes, {"x": [1, SIZE]}, {"y": [1, UNITS]}, tensors)
    with pytest.raises(ValueError, match="'y': it chooses between two results"):
        imported(path)


@pytest.mark.parametrize("dynamo", [False, True])
def test_the_same_of_torch(dynamo, tmp_path, rng):
    """A grouped linear layer by einsum, means of the frame, and choices, as both exporters write them."""
    torch = pytest.importorskip("torch", reason="!!! SKIPPED: files of PyTorch, because torch is not installed")
    pytest.importorskip("onnxscript", reason="!!! SKIPPED: files of PyTorch, because onnxscript is missing")

    class Network(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(4, 2, 3))
            self.convolution = torch.nn.Conv1d(2, 4, 3)

        def forward(self, x):
            a = torch.einsum("btgi,gih->btgh", x.reshape(1, 1, 4, 2), self.weight).flatten(2)[:, 0]
            a = torch.where(a > 0, a, 0.1 * a)
            a = a - a.mean(1, keepdim=True) + x.sum(1, keepdim=True)
            b = self.convolution(x.reshape(1, 2, 4))
            return torch.cat([torch.clamp(a, min=-0.5), torch.nn.functional.adaptive_avg_pool1d(b, 1)[:, :, 0]], 1)

    torch.manual_seed(0)
    network = Network().eval()
    given = {"input_names": ["x"], "output_names": ["y"], "dynamo": dynamo} | ({"verbose": False} if dynamo else {})
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.onnx.export(network, (torch.zeros(1, 8),), tmp_path / "m.onnx", **given)
    finally:
        logging.disable(logging.NOTSET)
    found = imported(tmp_path / "m.onnx")
    assert found.report.ok
    x = rng.standard_normal((9, 8)).astype(np.float32)
    with torch.no_grad():
        theirs = torch.cat([network(frame[None]) for frame in torch.from_numpy(x)]).numpy()
    assert found.model.check(x, theirs).ok
