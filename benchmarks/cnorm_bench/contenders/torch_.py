"""PyTorch, in inference mode and on one thread. Its functions return new tensors: they take no output argument."""

import numpy as np

from cnorm_bench.contenders.timing import Contender
from cnorm_bench.contenders.torch_steps import TorchEager, TorchJit

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
