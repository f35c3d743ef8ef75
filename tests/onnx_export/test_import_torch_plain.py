"""nn.LSTM, nn.GRU and nn.RNN exported as they are, by both exporters of PyTorch: outputs y, h_n and c_n."""

import itertools
import logging
import os
import warnings

import numpy as np
import pytest
from graphs import imported

torch = pytest.importorskip("torch", reason="!!! SKIPPED: files of PyTorch's exporters, because torch is not installed")
pytest.importorskip("onnxscript", reason="!!! SKIPPED: files of PyTorch's exporters, because onnxscript is missing")
INPUTS, UNITS, FRAMES = 5, 8, 6
CASES = list(itertools.product(("LSTM", "GRU", "RNN"), (1, 2), ("1", "6", "T")))
HOW = list(itertools.product((True, False), repeat=3))  # states are given, batch first, the newer exporter
CHOSEN = [  # one way a case, or all of them
    pytest.param(*case, *how, id="-".join(map(str, (*case, *how))))
    for at, case in enumerate(CASES)
    for place, how in enumerate(HOW)
    if place == 3 * at % len(HOW) or os.environ.get("CNORM_ALL_PRESETS")
]


def exported(kind, layers, frames, states, rows, dynamo, path):
    """The module, whose file takes one frame, six, or any number, with its states in and out, or out alone."""
    torch.manual_seed(0)
    module = getattr(torch.nn, kind)(INPUTS, UNITS, layers, batch_first=rows).eval().requires_grad_(False)
    lstm, steps = kind == "LSTM", 1 if frames == "1" else FRAMES
    x, letters = torch.zeros(1, steps, INPUTS) if rows else torch.zeros(steps, 1, INPUTS), "hc" if lstm else "h"
    zeros = tuple(torch.zeros(layers, 1, UNITS) for _ in letters)
    inputs = ["x", *[f"{letter}0" for letter in letters if states]]
    given = {"input_names": inputs, "output_names": ["y", *[f"{letter}n" for letter in letters]]}
    if frames == "T" and not dynamo:
        given["dynamic_axes"] = {name: {int(rows): "T"} for name in "xy"}
    elif frames == "T":
        given["dynamic_shapes"] = ({int(rows): torch.export.Dim.AUTO}, *([(None, None) if lstm else None] * states))
    given |= {"dynamo": True, "verbose": False} if dynamo else {"dynamo": False, "opset_version": 17}
    logging.disable(logging.WARNING)  # torchvision is not installed
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.onnx.export(module, (x, *([zeros if lstm else zeros[0]] * states)), path, **given)
    finally:
        logging.disable(logging.NOTSET)
    return module


@pytest.mark.parametrize(("kind", "layers", "frames", "states", "rows", "dynamo"), CHOSEN)
def test_a_module_as_it_is(kind, layers, frames, states, rows, dynamo, tmp_path):
    module = exported(kind, layers, frames, states, rows, dynamo, tmp_path / "m.onnx")
    if kind == "RNN" and dynamo and frames != "1":  # written out for the example's six frames, even if declared open
        with pytest.raises(ValueError, match=r"an unrolled RNN; export one step|SplitToSequence"):
            imported(tmp_path / "m.onnx")
        return
    found = imported(tmp_path / "m.onnx")
    if kind == "RNN" and dynamo and not states:  # the product of a stored state of zeros is folded away
        assert found.model.layers[0].kind == "Linear"
        return
    assert [layer.kind for layer in found.model.layers] == [kind] * layers
    assert found.report.ok
    x = np.random.default_rng(0).standard_normal((20, INPUTS)).astype(np.float32)
    y = module(torch.from_numpy(x)[None] if rows else torch.from_numpy(x)[:, None])[0]
    assert found.model.check(x, y.numpy().reshape(20, UNITS)).ok
