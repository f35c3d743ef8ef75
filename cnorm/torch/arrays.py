"""Check tensors and convert them to arrays, and back, without a copy where possible."""

from __future__ import annotations

import numpy as np
import torch


def array(tensor: torch.Tensor, name: str, *dtypes: torch.dtype) -> np.ndarray:
    """The tensor as a C-contiguous array that shares its memory; a copy only if it is not contiguous."""
    if tensor.device.type != "cpu":
        raise ValueError(f"{name} must be a CPU tensor, got one on {tensor.device}: cnorm computes on the CPU")
    if tensor.dtype not in dtypes:
        wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise TypeError(f"{name} must have dtype {wanted}, got {str(tensor.dtype).removeprefix('torch.')}")
    return tensor.detach().contiguous().numpy()


def tensor(a: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(a))
