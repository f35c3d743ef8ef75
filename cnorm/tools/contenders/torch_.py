"""PyTorch, in inference mode and on one thread. Its functions return new tensors: they take no output argument."""

import warnings

import numpy as np

from cnorm.tools.contenders.timing import Contender

LABEL = "PyTorch"
PACKAGES = ("torch",)


def layer_norm(x, weight, bias):
    torch, names = _tensors(x=x, weight=weight, bias=bias)
    names |= {"layer_norm": torch.nn.functional.layer_norm, "shape": x.shape[-1:]}
    return [_contender("layer_norm(x, shape, weight, bias)", names)]


def layer_norm_backward(dy, x, weight, bias):
    torch, names = _tensors(dy=dy, x=x, weight=weight, bias=bias)
    names["shape"] = list(x.shape[-1:])
    _, names["mean"], names["rstd"] = torch.native_layer_norm(names["x"], names["shape"], None, None, 1e-5)
    names |= {"backward": torch.ops.aten.native_layer_norm_backward, "all_three": [True, True, True]}
    return [_contender("backward(dy, x, shape, mean, rstd, weight, bias, all_three)", names)]


def rms_norm(x, weight):
    torch, names = _tensors(x=x, weight=weight)
    names |= {"rms_norm": torch.nn.functional.rms_norm, "shape": x.shape[-1:]}
    return [_contender("rms_norm(x, shape, weight, 1e-5)", names)]


def add_layer_norm(x, residual, weight, bias):
    torch, names = _tensors(x=x, residual=residual, weight=weight, bias=bias)
    layer_norm = torch.nn.functional.layer_norm

    def add_layer_norm(x, residual, shape, weight, bias):
        total = x + residual
        return layer_norm(total, shape, weight, bias), total

    names |= {"add_layer_norm": add_layer_norm, "shape": x.shape[-1:]}
    return [_contender("add_layer_norm(x, residual, shape, weight, bias)", names)]


def steps(model, onnx_model):
    return [TorchEager(model), TorchJit(model)]


def _tensors(**arrays):
    """The module torch, and the arrays as tensors that share their memory."""
    import torch

    torch.set_num_threads(1)
    tensors = {}
    for name, array in arrays.items():
        if array.dtype.name == "bfloat16":
            tensors[name] = torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        else:
            tensors[name] = torch.from_numpy(array)
    return torch, tensors


def _contender(statement, names):
    import torch

    def arrays(value):
        tensors = value if isinstance(value, tuple) else (value,)
        return tuple(_array(tensor) for tensor in tensors)

    return Contender("PyTorch", statement, names, outputs=arrays, mode=torch.inference_mode)


def _array(tensor):
    if str(tensor.dtype) != "torch.bfloat16":
        return tensor.numpy()
    import ml_dtypes

    return tensor.float().numpy().astype(ml_dtypes.bfloat16)


def _torch_network(model):
    """A torch module (x, h, c) -> (y, h, c): a step of a cell of `operations.CELLS` and the linear layers after it."""
    import torch
    from torch.nn import functional as F

    cell, *linear = model.layers
    hidden, eps = cell.output_size, cell.eps

    class LayerNormLstm(torch.nn.Module):
        def __init__(self):
            super().__init__()
            for name, value in cell.weights.items():
                self.register_buffer(name, torch.from_numpy(value.copy()))
            self.readout = torch.nn.Sequential(*map(_torch_linear, linear))

        def forward(self, x, h, c):
            a_h = F.layer_norm(F.linear(h, self.weight_h), [4 * hidden], self.gain_h, self.bias_h, eps)
            a_x = F.layer_norm(F.linear(x, self.weight_x), [4 * hidden], self.gain_x, self.bias_x, eps)
            f, i, o, g = (a_h + a_x + self.bias).chunk(4, dim=-1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * F.layer_norm(c, [hidden], self.gain_c, self.bias_c, eps).tanh()
            return self.readout(h), h, c

    class Plain(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = getattr(torch.nn, f"{cell.kind}Cell")(cell.input_size, hidden).requires_grad_(False)
            state = {name.removesuffix("_l0"): torch.from_numpy(array.copy()) for name, array in cell.weights.items()}
            self.cell.load_state_dict(state)
            self.readout = torch.nn.Sequential(*map(_torch_linear, linear))

        def forward(self, x, h, c):
            if cell.kind == "LSTM":
                h, c = self.cell(x, (h, c))
            else:
                h = self.cell(x, h)
            return self.readout(h), h, c

    return {"ba2016": LayerNormLstm, "torch": Plain}[cell.spec.name]().eval()


def _torch_linear(layer):
    import torch

    linear = torch.nn.Linear(layer.input_size, layer.output_size).requires_grad_(False)
    linear.weight[:] = torch.from_numpy(layer.weights["weight"].copy())
    linear.bias[:] = torch.from_numpy(np.array(layer.weights.get("bias", 0), np.float32))
    return linear


class TorchEager:
    """The cell written with PyTorch's operators, in inference mode, one thread."""

    label = "PyTorch, eager"

    def __init__(self, model):
        import torch

        torch.set_num_threads(1)
        self.mode = torch.inference_mode
        self.network = _torch_network(model)
        self.x = torch.zeros(1, model.input_size)
        self.x_array = self.x.numpy()[0]
        self.zero = torch.zeros(1, model.layers[0].output_size)
        self.reset()

    def reset(self):
        self.h = self.c = self.zero

    def step(self, x):
        self.x_array[:] = x
        y, self.h, self.c = self.network(self.x, self.h, self.c)
        return y.numpy()[0]


class TorchJit(TorchEager):
    """The same cell traced by torch.jit and optimised for inference, the fastest form of it that we found."""

    label = "PyTorch, torch.jit"

    def __init__(self, model):
        import torch

        super().__init__(model)
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")  # newer versions call torch.jit deprecated
            traced = torch.jit.trace(self.network, (self.x, self.zero, self.zero))
            self.network = torch.jit.optimize_for_inference(traced)
