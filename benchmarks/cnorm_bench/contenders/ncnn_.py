"""ncnn, one thread: its LSTM and GRU with float32 and with int8 weights, one scale per row."""

import struct
import tempfile
from contextlib import nullcontext
from pathlib import Path

import numpy as np

LABEL = "ncnn"
PACKAGES = ("ncnn",)
INT8_TAG = 0x000D4B38  # before int8 data in an ncnn model file; 0 is before float32
# a layer's gates in ncnn's order, by PyTorch's letters
ORDERS = {"LSTM": "ifog", "GRU": "rzn"}


def steps(model, onnx_model):
    return _contenders(model, False)


def rounded_steps(model):
    return _contenders(model, True)


def _contenders(model, int8):
    """ncnn has no layer-normalised cells, and no projection."""
    (layer,) = model.layers
    if layer.kind not in ORDERS or layer.spec.name != "torch" or layer.units != layer.output_size:
        return []
    return [Ncnn(layer, int8)]


class Ncnn:
    """One layer; states are passed and returned as ncnn's arrays."""

    mode = nullcontext

    def __init__(self, layer, int8):
        import ncnn

        self.ncnn, self.label = ncnn, "ncnn, int8" if int8 else "ncnn"
        self.units, self.states = layer.units, ("h", "c")[: 2 if layer.kind == "LSTM" else 1]
        self.net = ncnn.Net()
        self.net.opt.num_threads = 1
        # float32 throughout: other types round inputs and states
        self.net.opt.use_fp16_packed = self.net.opt.use_fp16_storage = self.net.opt.use_fp16_arithmetic = False
        self.net.opt.use_bf16_storage = False
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "param").write_text(_param(layer, int8))
            Path(folder, "bin").write_bytes(_weights(layer, int8))
            self.net.load_param(str(Path(folder, "param")))
            self.net.load_model(str(Path(folder, "bin")))
        self.reset()

    def reset(self):
        zero = np.zeros((1, self.units), np.float32)
        self.state = [self.ncnn.Mat(zero).clone() for _ in self.states]  # a Mat of an array does not keep it alive

    def step(self, x):
        extractor = self.net.create_extractor()
        extractor.input("x", self.ncnn.Mat(x[None]))
        for name, value in zip(self.states, self.state, strict=True):
            extractor.input(name, value)
        _, y = extractor.extract("y")
        self.state = [extractor.extract(f"{name}_next")[1] for name in self.states]
        return np.array(y)[0]


def _param(layer, int8):
    """The graph of one layer as ncnn's text."""
    states = ("h", "c")[: 2 if layer.kind == "LSTM" else 1]
    blobs = ["x", *states, "y", *(f"{name}_next" for name in states)]
    lines = ["7767517", f"{2 + len(states)} {len(blobs)}"]
    lines += [f"Input {name} 0 1 {name}" for name in ("x", *states)]
    size = layer.input_size * layer.units * len(ORDERS[layer.kind])
    units = f" 3={layer.units}" if layer.kind == "LSTM" else ""
    arity = 1 + len(states)
    lines.append(
        f"{layer.kind} cell {arity} {arity} {' '.join(blobs)} 0={layer.units} 1={size} 2=0{units} 8={int(int8)}"
    )
    return "\n".join(lines) + "\n"


def _weights(layer, int8):
    """Matrices, biases and scales in ncnn's order."""
    given = {name.removesuffix("_l0"): _in_order(layer, array) for name, array in layer.weights.items()}
    bias = given["bias_ih"] + given["bias_hh"]
    if layer.kind == "GRU":  # the bias that the reset gate multiplies is apart
        bias = np.stack([bias[0], bias[1], given["bias_ih"][2], given["bias_hh"][2]])
    from_x, from_h = (given[name].reshape(-1, given[name].shape[-1]) for name in ("weight_ih", "weight_hh"))
    matrices = [_matrix(matrix, int8) for matrix in (from_x, from_h)]
    parts = [matrices[0][0], struct.pack("<I", 0) + bias.astype("<f4").tobytes(), matrices[1][0]]
    return b"".join(parts) + (b"".join(scales for _, scales in matrices) if int8 else b"")


def _in_order(layer, array):
    """PyTorch's rows [gates * units, ...] as [gates, units, ...] in ncnn's order of gates."""
    own = layer.spec.gates
    cut = array.reshape(len(own), layer.units, *array.shape[1:])
    return np.stack([cut[own.index(gate)] for gate in ORDERS[layer.kind]])


def _matrix(matrix, int8):
    """The bytes of a matrix with its tag, and of its scales."""
    if not int8:
        return struct.pack("<I", 0) + matrix.astype("<f4").tobytes(), b""
    scales = 127 / np.abs(matrix).max(axis=1)
    rows = np.rint(matrix * scales[:, None]).astype(np.int8).tobytes()
    return struct.pack("<I", INT8_TAG) + rows + b"\0" * (-len(rows) % 4), scales.astype("<f4").tobytes()
