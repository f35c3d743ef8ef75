"""`load` of convolutions: over axes of one position, and causal ones over a time axis."""

import numpy as np
import pytest
from graphs import imported, node, normal, saved

CHANNELS = 6


def same(found, rng, frames=9):
    """Whether the model computes what the file does over some frames."""
    x = rng.standard_normal((frames, found.model.input_size)).astype(np.float32)
    return found.model.check(x, found.file.run(x)).ok


def kinds(found):
    return [layer.kind for layer in found.model.layers]


# ---------------------------------------------------------------------------------------------- axes of one position


@pytest.mark.parametrize("groups", [1, CHANNELS])
@pytest.mark.parametrize("last", [True, False])
def test_a_cache_of_frames_with_an_axis_of_one_position(groups, last, tmp_path, rng):
    """A kernel [4, 1] over frames [1, channels, time, 1], or turned."""

    def turned(*shape):
        return shape if last else (*shape[:2], *shape[:1:-1])

    axis = 2 if last else 3
    nodes = [
        node("Concat", "c x", "frames", axis=axis),
        node("Conv", "frames K b", "a", group=groups),
        node("Slice", "frames one end axis", "c_out"),
        node("Flatten", "a", "f"),
        node("Gemm", "f V", "y"),
    ]
    tensors = {"K": normal(rng, *turned(CHANNELS, CHANNELS // groups, 4, 1)), "b": normal(rng, CHANNELS)}
    tensors |= {"V": normal(rng, CHANNELS, 2), "one": [1], "end": [1 << 40], "axis": [axis]}
    cache = turned(1, CHANNELS, 3, 1)
    ends = {"x": [1, CHANNELS, 1, 1], "c": cache}, {"y": [1, 2], "c_out": cache}
    found = imported(saved(tmp_path / "m.onnx", nodes, *ends, tensors))
    assert kinds(found) == ["CausalConv1d", "Linear"]
    assert found.report.ok
    assert same(found, rng)


@pytest.mark.parametrize("pads", [(0, 1, 0, 2), (1, 1, 1, 2), (2, 1, 0, 2)], ids=str)
def test_a_kernel_over_the_padding_of_one_position(pads, tmp_path, rng):
    """Of a kernel [3, 5] over [channels, 1, positions] one row is over the frame, whichever the padding says."""
    rows = 1 + pads[0] + pads[2]
    nodes = [node("Conv", "x K b", "a", pads=pads, strides=[1, 2]), node("Relu", "a", "y")]
    tensors = {"K": normal(rng, 4, 2, rows, 5), "b": normal(rng, 4)}
    found = imported(saved(tmp_path / "m.onnx", nodes, {"x": [1, 2, 1, 9]}, {"y": [1, 4, 1, 4]}, tensors))
    assert kinds(found) == ["Conv1d", "Activation"]
    assert found.report.ok
    assert same(found, rng)


@pytest.mark.parametrize(
    ("kernel", "pads", "places", "reason"),
    [
        ((3, 3), (0, 1, 0, 1), (1, 9), "'a': its kernel reaches over 3 positions, its input has 1"),
        ((1, 3), (1, 1, 0, 1), (2, 9), "'a': axis 2 of its input has one position, of its result 2"),
        ((1, 3), (0, 1, 0, 1), (3, 9), "'a': a convolution over 2 axes"),
    ],
    ids=str,
)
def test_a_convolution_over_two_axes_is_refused(kernel, pads, places, reason, tmp_path, rng):
    rows = places[0] if "2 axes" in reason else 1
    nodes = [node("Conv", "x K", "a", pads=pads), node("Relu", "a", "y")]
    ends = {"x": [1, 2, rows, 9]}, {"y": [1, 4, *places]}
    with pytest.raises(ValueError, match=reason):
        imported(saved(tmp_path / "m.onnx", nodes, *ends, {"K": normal(rng, 4, 2, *kernel)}))
