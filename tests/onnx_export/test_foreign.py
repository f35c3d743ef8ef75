"""check_parity and OrtStream on files written by PyTorch's exporter: a step shows which preset a checkpoint needs."""

import warnings

import pytest
from ort_stream import OrtStream

import cnorm
import onnx_export

torch = pytest.importorskip("torch")
INPUTS, UNITS, STEPS = 5, 16, 4


class Step(torch.nn.Module):
    def __init__(self, cell):
        super().__init__()
        self.cell = cell

    def forward(self, x, h, c):
        h, c = self.cell(x, (h, c))
        return h + 0, h, c


class Written(Step):
    """A loop that the exporter unrolls."""

    def forward(self, x, h, c):
        ys = []
        for t in range(STEPS):
            h, c = self.cell(x[t], (h, c))
            ys.append(h)
        return torch.stack(ys), h + 0, c + 0


class Scripted(Step):
    """A scripted loop, which the exporter keeps as a loop: the size of y becomes symbolic."""

    def forward(self, x, h, c):
        ys = torch.zeros(0, 1, 16)
        for t in range(x.size(0)):
            h, c = self.cell(x[t], (h, c))
            ys = torch.cat([ys, h.unsqueeze(0)], 0)
        return ys, h, c


class Native(torch.nn.Module):
    def __init__(self, lstm):
        super().__init__()
        self.lstm = lstm

    def forward(self, x, h, c):
        y, (h, c) = self.lstm(x, (h, c))
        return y, h, c


@pytest.fixture(scope="module")
def cell():
    torch.manual_seed(0)
    return torch.nn.LSTMCell(INPUTS, UNITS)


def of_torch(module, preset="torch", **weights):
    tensors = {f"{k.removesuffix('_l0')}_l0": v.detach().numpy() for k, v in module.state_dict().items()}
    return cnorm.Model([cnorm.LSTM(tensors | weights, preset=preset)])


def written(module, path, steps=(), states=(), **options):
    shapes = [(*steps, 1, INPUTS), (*states, 1, UNITS), (*states, 1, UNITS)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter's own warnings
        torch.onnx.export(
            module.eval(),
            tuple(torch.zeros(shape) for shape in shapes),
            path,
            input_names=["x", "h0_in", "c0_in"],
            output_names=["y", "h0_out", "c0_out"],
            dynamo=False,
            **options,
        )
    return path


def test_one_step_confirms_the_preset(cell, tmp_path):
    path = written(Step(cell), tmp_path / "step.onnx")
    assert onnx_export.check_parity(of_torch(cell), path, steps=8).ok
    swapped = cell.weight_hh.detach().numpy()[::-1].copy()
    report = onnx_export.check_parity(of_torch(cell, weight_hh_l0=swapped), path, steps=8)
    assert "not equal: cnorm and float64 go apart first in" in report.verdict
    assert [layer.kind for layer in onnx_export.load(path).layers] == ["LSTM"]  # y and h are the same elements


def test_parity_of_an_unrolled_loop(cell, tmp_path):
    path = written(Written(cell), tmp_path / "written.onnx", steps=(STEPS,))
    report = onnx_export.check_parity(of_torch(cell), path, steps=6)
    assert report.ok, str(report)
    assert report.steps == 8
    with pytest.raises(ValueError, match="must take single steps"):
        OrtStream(path)


def test_parity_of_a_scripted_loop(cell, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted = torch.jit.script(Scripted(cell))
    axes = {"x": {0: "T"}, "y": {0: "T"}}
    path = written(scripted, tmp_path / "scripted.onnx", steps=(STEPS,), dynamic_axes=axes)
    report = onnx_export.check_parity(of_torch(cell), path, steps=6)
    assert report.ok, str(report)
    with pytest.raises(ValueError, match="must have y of a fixed size"):
        OrtStream(path)


def test_states_of_three_axes_are_refused(tmp_path):
    lstm = torch.nn.LSTM(INPUTS, UNITS)
    path = written(Native(lstm), tmp_path / "native.onnx", steps=(STEPS,), states=(1,))
    with pytest.raises(ValueError, match=r"must have h0_in \[batch, 16\], got \[1, 1, 16\]"):
        onnx_export.check_parity(of_torch(lstm), path, steps=6)
    with pytest.raises(ValueError, match="must take single steps"):
        OrtStream(path)
