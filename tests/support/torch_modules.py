"""Modules of PyTorch for tests of what `cnorm.Model` makes of them; skips where torch is missing."""

import pytest

torch = pytest.importorskip("torch")
nn = torch.nn


def normed(size):
    norm = nn.BatchNorm1d(size).eval()
    with torch.no_grad():
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.5, 2)
        norm.weight.normal_()
        norm.bias.normal_()
    return norm


def through(modules, x):
    """The outputs of modules in order for one sequence [frames, inputs]."""
    with torch.no_grad():
        for module in modules:
            if isinstance(module, nn.RNNCellBase):
                state, ys = None, []
                for frame in x:
                    state = module(frame[None], state)
                    ys.append(state[0] if isinstance(state, tuple) else state)
                x = torch.cat(ys)
            else:
                x = module.eval()(x)
                x = x[0] if isinstance(x, tuple) else x
    return x.numpy()


def doubled(of):
    """A subclass of a class of torch.nn that computes twice as much."""

    class Doubled(of):
        def forward(self, *given):
            y = super().forward(*given)
            return (2 * y[0], y[1]) if isinstance(y, tuple) else 2 * y

    Doubled.__name__ = of.__name__
    return Doubled
