"""`load` of files where sizes do not say which inputs are x, and of zeros in front of a frame."""

import numpy as np
import pytest
from graphs import imported, node, normal, saved

from onnx_export.errors import NotImported

UNITS = 4
ROW = [1, UNITS]


def test_a_matrix_reads_a_slice_of_a_wide_frame(tmp_path, rng):
    nodes = [node("MatMul", "a K", "p"), node("Relu", "b", "q"), node("Concat", "p q", "y", axis=1)]
    path = saved(tmp_path / "m.onnx", nodes, {"b": [1, 90], "a": ROW}, {"y": [1, 93]}, {"K": normal(rng, UNITS, 3)})
    found = imported(path)
    (matrix,) = [layer for layer in found.model.layers if layer.kind == "Linear"]
    assert matrix.weights["weight"].shape == (3, UNITS)


# ---------------------------------------------------------------------------------------------- zeros in front

BINS, CHANNELS, TAPS = 6, 4, 3


def convolution(groups=1, value=0.0, front=TAPS - 1):
    """Over frames and bins of b [1, CHANNELS, T, BINS], with frames in front of the first."""
    tensors = {"front": np.array([0, 0, front, 0] + [0] * 4), "value": np.float32(value)}
    return [
        node("Pad", "b front value", "bp"),
        node("Conv", "bp F", "c", pads=[0, 1, 0, 1], group=groups),
        node("Relu", "c", "r"),
    ], tensors


def filters(rng, groups):
    return normal(rng, 2 * groups, CHANNELS // groups, TAPS, 3)


@pytest.mark.parametrize("groups", [1, 2, CHANNELS])
def test_zeros_in_front_of_a_frame_are_no_channels(groups, tmp_path, rng):
    nodes, more = convolution(groups)
    shapes = {"b": [1, CHANNELS, 1, BINS]}, {"r": [1, 2 * groups, 1, BINS]}
    found = imported(saved(tmp_path / "m.onnx", nodes, *shapes, more | {"F": filters(rng, groups)}))
    assert [layer.kind for layer in found.model.layers] == ["Conv1d", "Activation"]
    assert found.model.layers[0].weights["weight"].shape == (2 * groups, CHANNELS // groups, 3)
    assert found.report.ok


def test_ones_in_front_of_a_frame_are_refused(tmp_path, rng):
    nodes, more = convolution(value=1.0)
    shapes = {"b": [1, CHANNELS, 1, BINS]}, {"r": [1, 2, 1, BINS]}
    with pytest.raises(NotImported, match="the constant \"Pad 'bp'\" is read where only the frame is"):
        imported(saved(tmp_path / "m.onnx", nodes, *shapes, more | {"F": filters(rng, 1)}))
