"""Layer norm, RMS norm and batch norm as operators with gradients, and as modules."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from cnorm import _core, layers
from cnorm.torch.arrays import FIRST_ORDER, array, refuse_transforms, tensor

FULL_PRECISION = (torch.float32, torch.float64)
HALF = (torch.float16, torch.bfloat16)


def _weights(*given: Tensor | None):
    return [
        None if w is None else array(w, name, *FULL_PRECISION)
        for w, name in zip(given, ("weight", "bias"), strict=False)
    ]


def _widened(x: Tensor) -> Tensor:
    """x in float32 if it is of a half type under autocast."""
    half = isinstance(x, Tensor) and x.dtype in HALF
    return x.float() if half and torch.is_autocast_enabled("cpu") else x


def _refuse(ctx, *_):
    raise RuntimeError(FIRST_ORDER)


def _stats(packed: Tensor):
    return _core.Stats.from_data(packed.detach().numpy())


def _or_empty(a, like: Tensor) -> Tensor:
    return torch.empty(0, dtype=like.dtype) if a is None else tensor(a)


@torch.library.custom_op("cnorm::normalise", mutates_args=())
def _normalise(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, centred: bool
) -> tuple[Tensor, Tensor]:
    """y and the statistics: of layer norm if `centred`, else of RMS norm."""
    a, (w, b) = array(x, "x", *FULL_PRECISION), _weights(weight, bias)
    if centred:
        y, stats = _core.layer_norm(a, w, b, eps=eps, return_stats=True)
    else:
        y, stats = _core.rms_norm(a, w, eps=eps, return_stats=True)
    return tensor(y), tensor(stats.data)


@_normalise.register_fake
def _(x, weight, bias, eps, centred):
    return torch.empty_like(x, memory_format=torch.contiguous_format), x.new_empty((*x.shape[:-1], 1, 3))


@torch.library.custom_op("cnorm::normalise_backward", mutates_args=())
def _normalise_backward(
    dy: Tensor, x: Tensor, weight: Tensor | None, stats: Tensor, centred: bool
) -> tuple[Tensor, Tensor, Tensor]:
    a, d, (w,) = array(x, "x", *FULL_PRECISION), array(dy, "dy", *FULL_PRECISION), _weights(weight)
    function = _core.layer_norm_backward if centred else _core.rms_norm_backward
    dx, dweight, *dbias = function(d, a, w, _stats(stats))
    return tensor(dx), _or_empty(dweight, x), _or_empty(dbias[0] if dbias else None, x)


@_normalise_backward.register_fake
def _(dy, x, weight, stats, centred):
    n = x.shape[-1]
    like = torch.empty_like(x, memory_format=torch.contiguous_format)
    return like, x.new_empty(0 if weight is None else n), x.new_empty(n if centred else 0)


def _save(ctx, inputs, output):
    x, weight, bias, _, ctx.centred = inputs
    ctx.has_bias = bias is not None
    ctx.save_for_backward(x, weight, output[1])


def _gradients(ctx, dy, _):
    x, weight, stats = ctx.saved_tensors
    dx, dweight, dbias = torch.ops.cnorm.normalise_backward(dy, x, weight, stats, ctx.centred)
    return dx, None if weight is None else dweight, dbias if ctx.has_bias else None, None, None


_normalise.register_autograd(_gradients, setup_context=_save)
_normalise_backward.register_autograd(_refuse)


def _normalised(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, centred: bool) -> Tensor:
    for given, name in ((x, "x"), (weight, "weight"), (bias, "bias")):
        if not isinstance(given, Tensor) and (given is not None or name == "x"):
            shape = "; its shape is the normalised one" if name == "weight" else ""
            raise TypeError(f"{name} must be a tensor, got {type(given).__name__}{shape}")
    return torch.ops.cnorm.normalise(_widened(x), weight, bias, eps, centred)[0]


def layer_norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, eps: float = 1e-5) -> Tensor:
    """LN(x) weight + bias over the last dimension; same bits as `cnorm.layer_norm` (arXiv:1607.06450, Eq. 3).

    Parameters
    ----------
    x : Tensor, shape (..., n), float32 or float64, on the CPU
    weight, bias : Tensor, shape (n,), optional
    eps : float

    Returns
    -------
    y : Tensor, shape and dtype of x

    Raises
    ------
    TypeError, ValueError
        For another dtype, device or shape.
    NotImplementedError
        In forward-mode differentiation and in torch.func.grad.
    """
    if torch.onnx.is_in_onnx_export():  # becomes the operator LayerNormalization
        return nn.functional.layer_norm(x, x.shape[-1:], weight, bias, eps)
    refuse_transforms(x, weight, bias)
    return _normalised(x, weight, bias, eps, True)


def rms_norm(x: Tensor, weight: Tensor | None = None, *, eps: float = 1e-5) -> Tensor:
    """x / sqrt(mean x^2 + eps) weight over the last dimension; same bits as `cnorm.rms_norm` (arXiv:1910.07467, Eq. 4).

    Parameters
    ----------
    x, weight, eps
        As in `layer_norm`.

    Returns
    -------
    y : Tensor, shape and dtype of x

    Raises
    ------
    TypeError, ValueError
        As `layer_norm`.
    """
    if torch.onnx.is_in_onnx_export():
        y = x / torch.sqrt(x.square().mean(-1, keepdim=True) + eps)
        return y if weight is None else y * weight
    refuse_transforms(x, weight)
    return _normalised(x, weight, None, eps, False)


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, eps: float = 1e-5
) -> tuple[Tensor, Tensor]:
    """Layer norm of ``x + residual``, and the sum; the same bits as `cnorm.add_layer_norm`.

    Parameters
    ----------
    x, residual : Tensor, shape (..., n), float32 or float64, on the CPU
    weight, bias, eps
        As in `layer_norm`.

    Returns
    -------
    y, total : Tensor, shape and dtype of x

    Raises
    ------
    TypeError, ValueError
        As `layer_norm`.
    """
    total = x + residual
    return layer_norm(total, weight, bias, eps=eps), total


class _Norm(nn.Module):
    def __init__(self, n: int, eps: float, *, bias: bool) -> None:
        super().__init__()
        if isinstance(n, Sequence):
            raise TypeError(f"n must be the length of the last dimension, got {n!r}")
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(n))
        self.register_parameter("bias", nn.Parameter(torch.zeros(n)) if bias else None)

    def extra_repr(self) -> str:
        return f"{len(self.weight)}, eps={self.eps:g}"


class LayerNorm(_Norm):
    """`layer_norm` as a module; its parameters are called `weight` and `bias`, as in torch.nn.LayerNorm.

    Parameters
    ----------
    n : int
        The length of the last dimension.
    eps : float
    bias : bool
        Whether there is a bias.
    """

    def __init__(self, n: int, eps: float = 1e-5, *, bias: bool = True) -> None:
        super().__init__(n, eps, bias=bias)

    def to_layers(self) -> tuple[layers.LayerNorm, ...]:
        """The layer with the present weights, for `cnorm.Model`."""
        weight, bias = (None if p is None else p.detach().numpy() for p in (self.weight, self.bias))
        return (layers.LayerNorm(weight, bias, eps=self.eps),)

    def forward(self, x: Tensor) -> Tensor:
        return layer_norm(x, self.weight, self.bias, eps=self.eps)


class RMSNorm(_Norm):
    """`rms_norm` as a module with the parameter `weight`.

    Parameters
    ----------
    n : int
        The length of the last dimension.
    eps : float
    """

    def __init__(self, n: int, eps: float = 1e-5) -> None:
        super().__init__(n, eps, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, eps=self.eps)


@torch.library.custom_op("cnorm::batch_norm", mutates_args=())
def _batch_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    a, (w, b) = array(x, "x", *FULL_PRECISION), _weights(weight, bias)
    mean, var = np.zeros(a.shape[1], a.dtype), np.zeros(a.shape[1], a.dtype)
    averages = {"running_mean": mean, "running_var": var, "momentum": 1.0}  # of this batch alone
    y, stats = _core.batch_norm(a, w, b, **averages, running_variance="biased", eps=eps, return_stats=True)
    return tensor(y), tensor(stats.data), tensor(mean), tensor(var)


@_batch_norm.register_fake
def _(x, weight, bias, eps):
    channels = x.new_empty(x.shape[1])
    like = torch.empty_like(x, memory_format=torch.contiguous_format)
    return like, x.new_empty((x.shape[1], 3)), channels, torch.empty_like(channels)


@torch.library.custom_op("cnorm::batch_norm_backward", mutates_args=())
def _batch_norm_backward(dy: Tensor, x: Tensor, weight: Tensor, stats: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    a, d, (w,) = array(x, "x", *FULL_PRECISION), array(dy, "dy", *FULL_PRECISION), _weights(weight)
    return tuple(map(tensor, _core.batch_norm_backward(d, a, w, _stats(stats))))


@_batch_norm_backward.register_fake
def _(dy, x, weight, stats):
    like = torch.empty_like(x, memory_format=torch.contiguous_format)
    return like, torch.empty_like(weight), torch.empty_like(weight)


def _save_batch(ctx, inputs, output):
    ctx.save_for_backward(inputs[0], inputs[1], output[1])


def _batch_gradients(ctx, dy, *_):
    return *torch.ops.cnorm.batch_norm_backward(dy, *ctx.saved_tensors), None


_batch_norm.register_autograd(_batch_gradients, setup_context=_save_batch)
_batch_norm_backward.register_autograd(_refuse)


class BatchNorm(nn.Module):
    """Batch norm with running statistics; names, momentum and modes as torch.nn.BatchNorm1d (arXiv:1502.03167, Alg. 1).

    In training mode the bits of `cnorm.batch_norm`; x is (samples, channels, ...), float32 or float64.

    Parameters
    ----------
    channels : int
    eps : float
    momentum : float
        The weight of a batch in the running statistics.
    """

    def __init__(self, channels: int, eps: float = 1e-5, momentum: float = 0.1) -> None:
        super().__init__()
        self.eps, self.momentum = eps, momentum
        self.weight, self.bias = nn.Parameter(torch.ones(channels)), nn.Parameter(torch.zeros(channels))
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_var", torch.ones(channels))
        self.register_buffer("num_batches_tracked", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        channels = len(self.weight)
        if not isinstance(x, Tensor) or x.ndim < 2 or x.shape[1] != channels:
            got = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(f"x must have shape (samples, {channels}, ...), got {got}")
        x = _widened(x)
        if not self.training:
            if x.dtype not in FULL_PRECISION:
                raise TypeError(f"x must have dtype float32 or float64, got {str(x.dtype).removeprefix('torch.')}")
            shape = (-1, *[1] * (x.ndim - 2))
            scale = self.weight / torch.sqrt(self.running_var + self.eps)
            return (x - self.running_mean.reshape(shape)) * scale.reshape(shape) + self.bias.reshape(shape)
        refuse_transforms(x, self.weight, self.bias)
        y, _, mean, var = torch.ops.cnorm.batch_norm(x, self.weight, self.bias, self.eps)
        count = x.numel() // x.shape[1]
        with torch.no_grad():
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(var * (count / max(count - 1, 1)), self.momentum)
            self.num_batches_tracked += 1
        return y
