"""Check tensors and convert them to arrays, and back, without a copy where possible."""

from __future__ import annotations

import numpy as np
import torch
from torch.autograd import forward_ad

FIRST_ORDER = "cnorm.torch has first-order gradients only: its backward pass can't be differentiated"


def array(tensor: torch.Tensor, name: str, *dtypes: torch.dtype) -> np.ndarray:
    """The tensor as a C-contiguous array that shares its memory; a copy only if it is not contiguous."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
    if tensor.device.type != "cpu":
        raise ValueError(f"{name} must be a CPU tensor, got one on {tensor.device}: cnorm computes on the CPU")
    if tensor.dtype not in dtypes:
        wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        got = str(tensor.dtype).removeprefix("torch.")
        raise TypeError(f"{name} must have dtype {wanted}, got {got}: use float(), as torch.autocast does with inputs")
    if tensor.layout is not torch.strided:
        raise TypeError(f"{name} must be a dense tensor, got one of layout {tensor.layout}: use to_dense()")
    plain = tensor.detach()  # of a tensor that outlives a transformation of torch.func the one inside
    if plain.numel() and not plain.untyped_storage().data_ptr():
        raise RuntimeError(f"{name} has {plain.numel()} elements, but its data is not allocated: the storage was freed")
    return plain.resolve_neg().contiguous().numpy()


def check_made(device, dtype: torch.dtype | None, *dtypes: torch.dtype) -> None:
    """Check the `device` and `dtype` that a module's parameters are asked for with; None is the usual one."""
    if device is not None and torch.device(device).type not in ("cpu", "meta"):
        raise ValueError(f"device must be the CPU, got {str(device)!r}: cnorm computes on the CPU")
    if dtype is not None and dtype not in dtypes:
        raise ValueError(f"dtype must be {' or '.join(map(str, dtypes))}, got {dtype}")


def tensor(a: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(a))


def refuse_transforms(*tensors: torch.Tensor | None) -> None:
    """Raise in torch.func and in forward-mode differentiation, for which a custom operator has the derivative 0."""
    forward, transformed = forward_ad._current_level >= 0, torch._C._are_functorch_transforms_active()
    for t in tensors if forward or transformed else ():
        if t is not None and (
            (forward and forward_ad.unpack_dual(t).tangent is not None)
            or (transformed and torch._C._functorch.is_gradtrackingtensor(t))
        ):
            raise NotImplementedError(
                "cnorm.torch has no forward-mode derivatives (jvp, jacfwd, linearize, forward_ad) and none by "
                "torch.func (grad, vjp, jacrev): use torch.autograd.grad or backward"
            )


def refuse_vmap(*tensors: torch.Tensor | None) -> None:
    """Raise in torch.func.vmap: a cell has a batch of its own."""
    if torch._C._are_functorch_transforms_active() and any(
        t is not None and torch._C._functorch.is_batchedtensor(t) for t in tensors
    ):
        raise NotImplementedError("a cell of cnorm.torch does not work under torch.func.vmap: give it a batch")
