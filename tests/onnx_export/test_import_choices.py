"""`load` of files where sizes do not say which inputs are x, and of what is read of a wide frame."""

from graphs import imported, node, normal, saved


UNITS = 4
ROW = [1, UNITS]


def test_a_matrix_reads_a_slice_of_a_wide_frame(tmp_path, rng):
    nodes = [node("MatMul", "a K", "p"), node("Relu", "b", "q"), node("Concat", "p q", "y", axis=1)]
    path = saved(tmp_path / "m.onnx", nodes, {"b": [1, 90], "a": ROW}, {"y": [1, 93]}, {"K": normal(rng, UNITS, 3)})
    found = imported(path)
    (matrix,) = [layer for layer in found.model.layers if layer.kind == "Linear"]
    assert matrix.weights["weight"].shape == (3, UNITS)
