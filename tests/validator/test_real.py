"""Files from elsewhere: the models of two installed packages, and exports of PyTorch.

The count of norms found must be the count that the model's own scope names show.
"""

import re
import warnings
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import onnx
import pytest

from onnx_export import validate
from onnx_export.nodes import model_nodes

EPS = float(np.float32(1e-6))


def models_of(package):
    """The ONNX files of an installed package, found without importing it, because imports may need other packages."""
    spec = find_spec(package)
    if spec is None:
        pytest.skip(f"{package} is not installed")
    return sorted(Path(spec.origin).parent.rglob("*.onnx"))


def scopes_named(path, pattern):
    return {match for n in model_nodes(onnx.load(path)) for o in n.output for match in re.findall(pattern, o)}


def magika_input(data, folder):
    """The input of its classifier: the first and last 1024 bytes, padded with 256."""
    features = np.full((1, 2048), 256, np.int32)
    values = np.frombuffer(data, np.uint8)
    head, tail = values[:1024], values[-1024:]
    features[0, : len(head)] = head
    features[0, 2048 - len(tail) :] = tail
    np.savez(folder / "bytes.npz", bytes=features)
    return folder / "bytes.npz"


def test_magika(tmp_path):
    """Two one-pass norms exported by jax2tf; the first normalises axis 1 of [B, 512, 256].

    Their float32 formula loses digits on the features of a real file, and how many is a fact about the file:
    float64 evaluation of the same nodes has none of it.
    """
    (path,) = models_of("magika")
    report = validate(path, input=magika_input(Path(__file__).read_bytes(), tmp_path))
    assert not report.problem
    assert {n.name.rsplit("/", 1)[-1] for n in report.norms} == scopes_named(path, r"LayerNorm_\d+")
    first, second = report.norms
    assert (first.axes, second.axes) == ([1], [1])
    for norm in report.norms:
        assert (norm.form, norm.formula, norm.variance) == ("decomposed", "layer", "one-pass")
        assert (norm.eps, norm.eps_dtype, norm.compute_dtype) == (EPS, "float32", "float32")
        assert norm.scale.endswith("Reshape_2:0")
        assert norm.bias.endswith("Reshape_3:0")
        assert (norm.near_miss, norm.became) in {("", ""), ("", "no fused operator")}
        assert (norm.verdict, norm.blame) in {("inaccurate", "file"), ("wrong", "file")}


def test_silero_vad(tmp_path):
    """It has no norm, but an STFT that squares, adds and takes a square root; its LSTM is judged.

    The file of both sampling rates does not run with made-up inputs, of which its state fits none.
    """
    given = tmp_path / "frame.npz"
    zeros = {"input": np.zeros((1, 576), np.float32), "state": np.zeros((2, 1, 128), np.float32)}
    np.savez(given, sr=np.int64(16000), **zeros)
    paths = models_of("silero_vad")
    assert len(paths) >= 4
    for path in paths:
        report = validate(path, input=given) if path.name == "silero_vad.onnx" else validate(path)
        assert (report.norms, report.problem, report.exit_code()) == ([], "", 0), path
        assert any(cell.verdict == "ok" for cell in report.cells) or "ifless" in path.name


# -- PyTorch


def exported(module, folder, *, opset, current, shape=(2, 5, 64)):
    torch = pytest.importorskip("torch")
    if current:
        pytest.importorskip("onnxscript")
    path = folder / "model.onnx"
    options = {"external_data": False} if current else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's warnings about its old exporter and its dependencies
        torch.onnx.export(
            module.eval(),
            (torch.randn(shape),),
            path,
            opset_version=opset,
            dynamo=current,
            verbose=False,
            **options,
        )
    return path


def modules():
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)

    class Written(torch.nn.Module):
        """The norm as one writes it by hand: the scale is applied before the division."""

        def __init__(self, unbiased=None):
            super().__init__()
            self.gain = torch.nn.Parameter(torch.rand(64) + 0.5)
            self.bias = torch.nn.Parameter(torch.rand(64))
            self.unbiased = unbiased

        def forward(self, x):
            d = x - x.mean(-1, keepdim=True)
            if self.unbiased:
                return self.gain * d / (x.std(-1, keepdim=True) + 1e-6) + self.bias
            return self.gain * d / torch.sqrt(d.pow(2).mean(-1, keepdim=True) + 1e-6) + self.bias

    return torch, Written


EXPORTERS = [(14, False), (17, False), (18, True)]


@pytest.mark.parametrize(("opset", "current"), EXPORTERS)
def test_pytorch_layer_norm(opset, current, tmp_path):
    torch, _ = modules()
    module = torch.nn.LayerNorm(64)
    report = validate(exported(module, tmp_path, opset=opset, current=current))
    (norm,) = report.norms
    assert norm.form == ("decomposed" if opset < 17 else "LayerNormalization")
    assert (norm.axes, norm.eps) == ([2], float(np.float32(1e-5)))
    assert (norm.verdict, report.exit_code()) == ("ok", 0), norm.detail


@pytest.mark.exhaustive(one_in=2)
@pytest.mark.parametrize(("opset", "current"), EXPORTERS)
@pytest.mark.parametrize("unbiased", [False, True])
def test_pytorch_written_by_hand(opset, current, unbiased, tmp_path):
    _, written = modules()
    report = validate(exported(written(unbiased), tmp_path, opset=opset, current=current))
    (norm,) = report.norms
    assert (norm.form, norm.axes, norm.variance) == ("decomposed", [2], "centred")
    assert norm.eps == pytest.approx(1e-6)
    assert norm.scale
    assert norm.bias
    assert ("unbiased" in norm.near_miss) == unbiased
    assert (norm.verdict, report.exit_code()) == ("near miss" if unbiased else "ok", 0), norm.detail


@pytest.mark.parametrize(("opset", "current"), EXPORTERS)
def test_pytorch_transformer(opset, current, tmp_path):
    """Two layers, two norms each. The old exporter accepts them only inside TransformerEncoder.

    onnxruntime fuses a residual addition and its norm to SkipLayerNormalization, and sums its rows less precisely
    (test_judge.py): such a norm may be risky at a large mean, by a little at this width.
    """
    torch, _ = modules()
    layer = torch.nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    module = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    path = exported(module, tmp_path, opset=opset, current=current)
    report = validate(path)
    names = "node_layer_norm(?:_[0-9]+)?" if current else r"/layers\.\d+/norm\d"
    nodes = {match for n in onnx.load(path).graph.node for match in re.findall(names, n.name)}
    assert len(report.norms) == len(nodes) == 4
    assert {re.search(names, n.name).group() for n in report.norms} == nodes
    for n in report.norms:
        skip = n.became.startswith("SkipLayerNormalization") and "large mean" in n.risks
        assert n.verdict == ("risky" if skip else "ok"), n.detail
    assert report.exit_code() == 0


def test_pytorch_transformer_layer_alone(tmp_path):
    torch, _ = modules()
    module = torch.nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    report = validate(exported(module, tmp_path, opset=18, current=True))
    assert [n.verdict for n in report.norms] == ["ok", "ok"]


def test_pytorch_group_norm(tmp_path):
    """Exported as InstanceNormalization over reshaped channels, whichever exporter."""
    torch, _ = modules()
    report = validate(exported(torch.nn.GroupNorm(4, 8), tmp_path, opset=14, current=False, shape=(2, 8, 6)))
    assert [(n.formula, n.verdict) for n in report.norms] == [("instance", "ok")]
