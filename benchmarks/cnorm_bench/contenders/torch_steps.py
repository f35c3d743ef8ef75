"""A step of a recurrent cell in PyTorch; see `cnorm_bench.runners`."""

import warnings

import numpy as np


def _torch_network(model):
    """A torch module (x, h, c) -> (y, h, c): a step of a cell `ba2016` or `torch` and the linear layers after it."""
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
