"""Layer norm, RMS norm and batch norm as operators with gradients, and as modules."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from cnorm import _core, layers
from cnorm.torch.arrays import FIRST_ORDER, array, check_made, refuse_transforms, tensor

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


def _check_shape(normalized_shape) -> None:
    sizes = [normalized_shape] if isinstance(normalized_shape, int) else normalized_shape
    if not isinstance(sizes, Sequence) or not sizes or not all(isinstance(n, int) and n > 0 for n in sizes):
        raise ValueError(f"normalized_shape must be integers of at least 1, got {normalized_shape!r}")


def _as_rows(module: LayerNorm | RMSNorm, x: Tensor, *weights: Tensor | None) -> list[Tensor | None]:
    """x and the weights of a module with the normalised dimensions as one."""
    shape = module.normalized_shape
    if not isinstance(x, Tensor):
        raise TypeError(f"x must be a tensor, got {type(x).__name__}")
    if x.shape[-len(shape) :] != shape:
        raise ValueError(f"x must have shape (..., {', '.join(map(str, shape))}), got {tuple(x.shape)}")
    if len(shape) == 1:
        return [x, *weights]
    return [x.flatten(-len(shape)), *(None if w is None else w.flatten() for w in weights)]


class LayerNorm(nn.LayerNorm):
    """torch.nn.LayerNorm with the kernels of `layer_norm`; the same arguments, parameters and state dict.

    Parameters
    ----------
    normalized_shape : int or sequence of int
        The sizes of the last dimensions, over which x is normalised.
    eps : float
    elementwise_affine : bool
        Whether there is a weight, and a bias if `bias`.
    bias : bool
    device, dtype : optional
        The CPU (or "meta", for weights that come later); torch.float32 or torch.float64.

    Raises
    ------
    TypeError, ValueError
        For other arguments; in a call for another dtype, device or shape.
    """

    def __init__(
        self, normalized_shape: int | Sequence[int], eps: float = 1e-5, elementwise_affine: bool = True,
        bias: bool = True, device=None, dtype=None,
    ) -> None:  # fmt: skip
        _check_shape(normalized_shape)
        check_made(device, dtype, *FULL_PRECISION)
        super().__init__(normalized_shape, eps, elementwise_affine, bias, device, dtype)

    def to_layers(self) -> tuple[layers.LayerNorm, ...]:
        """The layer with the present weights, for `cnorm.Model`; of one normalised dimension."""
        return (layers.LayerNorm(self),)

    def forward(self, input: Tensor) -> Tensor:
        y = layer_norm(*_as_rows(self, input, self.weight, self.bias), eps=self.eps)
        return y if y.shape == input.shape else y.reshape(input.shape)


class RMSNorm(nn.RMSNorm):
    """torch.nn.RMSNorm with the kernels of `rms_norm`; the same arguments, parameter and state dict.

    Parameters
    ----------
    normalized_shape, elementwise_affine, device, dtype
        As of `LayerNorm`.
    eps : float, optional
        That of the dtype in which x is normalised, torch.finfo(dtype).eps, if not given, as in PyTorch.
    """

    def __init__(
        self, normalized_shape: int | Sequence[int], eps: float | None = None, elementwise_affine: bool = True,
        device=None, dtype=None,
    ) -> None:  # fmt: skip
        _check_shape(normalized_shape)
        check_made(device, dtype, *FULL_PRECISION)
        super().__init__(normalized_shape, eps, elementwise_affine, device, dtype)

    def forward(self, x: Tensor) -> Tensor:
        rows, weight = _as_rows(self, x, self.weight)
        eps = self.eps
        if eps is None:
            eps = torch.finfo(torch.promote_types(x.dtype, torch.float32)).eps
        y = rms_norm(rows, weight, eps=eps)
        return y if y.shape == x.shape else y.reshape(x.shape)


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


class BatchNorm(nn.modules.batchnorm._BatchNorm):
    """torch.nn.BatchNorm1d, 2d and 3d with the kernels of `cnorm.batch_norm` (arXiv:1502.03167, Alg. 1).

    The same arguments, parameters, buffers and state dict. Where the statistics are those of x, in training mode or
    without running ones, it has the bits of `cnorm.batch_norm`; x is (samples, channels, ...), float32 or float64.

    Parameters
    ----------
    num_features : int
        The number of channels.
    eps : float
    momentum : float or None
        The weight of a batch in the running statistics; None: they are the mean over all batches.
    affine : bool
        Whether there is a weight, and a bias if `bias`.
    track_running_stats : bool
        False: no running statistics; those of x are used in both modes.
    device, dtype, bias
        As of `LayerNorm`.
    """

    def __init__(
        self, num_features: int, eps: float = 1e-5, momentum: float | None = 0.1, affine: bool = True,
        track_running_stats: bool = True, device=None, dtype=None, *, bias: bool = True,
    ) -> None:  # fmt: skip
        check_made(device, dtype, *FULL_PRECISION)
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype)
        if not bias:  # PyTorch has this argument since 2.13
            self.bias = None

    def forward(self, input: Tensor) -> Tensor:
        channels = self.num_features
        if not isinstance(input, Tensor) or input.ndim < 2 or input.shape[1] != channels:
            got = tuple(input.shape) if isinstance(input, Tensor) else type(input).__name__
            raise ValueError(f"x must have shape (samples, {channels}, ...), got {got}")
        x = _widened(input)
        if x.dtype not in FULL_PRECISION:
            raise TypeError(f"x must have dtype float32 or float64, got {str(x.dtype).removeprefix('torch.')}")
        weight = x.new_ones(channels) if self.weight is None else self.weight
        bias = x.new_zeros(channels) if self.bias is None else self.bias
        shape, count = (-1, *[1] * (x.ndim - 2)), x.numel() // channels
        if not self.training and self.running_mean is not None:
            scale = weight / torch.sqrt(self.running_var + self.eps)
            return (x - self.running_mean.reshape(shape)) * scale.reshape(shape) + bias.reshape(shape)
        refuse_transforms(x, weight, bias)
        if count:
            y, _, mean, var = torch.ops.cnorm.batch_norm(x, weight, bias, self.eps)
        else:  # no statistics, but in PyTorch a batch
            y = x * weight.reshape(shape) + bias.reshape(shape)
        if self.training and self.track_running_stats:
            with torch.no_grad():
                self.num_batches_tracked += 1
                momentum = 1 / self.num_batches_tracked if self.momentum is None else self.momentum
                if count:
                    self.running_mean.lerp_(mean, momentum)
                    self.running_var.lerp_(var * (count / max(count - 1, 1)), momentum)
        return y
