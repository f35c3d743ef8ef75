"""Fold norms that need no statistics of their input (inference batch norm, weight norm) into the linear layer."""

import numpy as np

from cnorm._core import default_float_env, rounded, weight_norm
from cnorm.arguments import as_array, check_var


def fold_batch_norm(
    linear_weight: np.ndarray,
    linear_bias: np.ndarray | None,
    mean: np.ndarray,
    var: np.ndarray,
    weight: np.ndarray | None = None,
    bias: np.ndarray | None = None,
    *,
    eps: float = 1e-5,
) -> tuple[np.ndarray, np.ndarray]:
    """The linear layer that is equivalent to a linear layer followed by an inference batch norm.

    ``batch_norm_inference(x @ W.T + b) = x @ W'.T + b'`` with ``scale = weight / sqrt(var + eps)``,
    ``W'_i = scale_i * W_i`` and ``b' = (b - mean) * scale + bias``; computed in float64 and rounded once. A norm before
    the linear layer, or before a cell, has a scale for each input: ``W' = W * scale`` and
    ``b' = b + W @ (bias - mean * scale)``.

    Parameters
    ----------
    linear_weight : ndarray, shape (outputs, inputs, ...), float32 or float64
        The weight of the linear layer, or of a convolution.
    linear_bias : ndarray, shape (outputs,), or None
    mean, var : ndarray, shape (outputs,)
        The statistics of the batch norm.
    weight, bias : ndarray, shape (outputs,), optional
        Gain and bias of the batch norm; 1 and 0 if not given.
    eps : float
        The eps of the batch norm, rounded to the dtype of linear_weight as `batch_norm_inference` does.

    Returns
    -------
    weight : ndarray, shape and dtype of linear_weight
    bias : ndarray, shape (outputs,), dtype of linear_weight

    Raises
    ------
    TypeError
        For an argument of another type or dtype.
    ValueError
        For a shape, variance or eps that can't be used.
    """
    w = _linear_weight(linear_weight, "linear_weight")
    outputs = len(w)
    with default_float_env():
        if w.shape[1:] == np.shape(mean) != (outputs,):
            raise ValueError(
                f"mean must have shape ({outputs},), one number for each output, got {np.shape(mean)}, one for each "
                "input: a norm before the layer is folded by W * scale and b + W @ (bias - mean * scale) with "
                "scale = weight / sqrt(var + eps)"
            )
        mean, var = _per_output(mean, outputs, "mean"), _per_output(var, outputs, "var")
        given = {"linear_bias": linear_bias, "weight": weight, "bias": bias}
        b, gain, norm_bias = (None if p is None else _per_output(p, outputs, name) for name, p in given.items())
        check_var(var, "output")
        var_eps = var + rounded(eps, "eps", w.dtype)
        scale = np.divide(1 if gain is None else gain, np.sqrt(var_eps), where=var_eps != 0, out=np.zeros(outputs))
        folded = w.astype(np.float64) * scale.reshape((-1,) + (1,) * (w.ndim - 1))
        folded_bias = ((0 if b is None else b) - mean) * scale + (0 if norm_bias is None else norm_bias)
        return folded.astype(w.dtype), folded_bias.astype(w.dtype)


def fold_weight_norm(
    weight: np.ndarray, gain: np.ndarray | None = None, bias: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray | None]:
    """The plain linear layer that is equivalent to a weight-normalised one.

    `weight_norm` is computed in float64 and rounded once; the bias is unchanged. For float32,
    ``Linear(*fold_weight_norm(weight, gain, bias))``.

    Parameters
    ----------
    weight : ndarray, shape (outputs, inputs, ...), float32 or float64
        The directions.
    gain : ndarray, shape (outputs,), optional
        The lengths; 1 if not given.
    bias : ndarray, shape (outputs,), optional

    Returns
    -------
    weight : ndarray, shape and dtype of weight
    bias : ndarray, shape (outputs,), dtype of weight, or None

    Raises
    ------
    TypeError
        For an argument of another type or dtype.
    ValueError
        For a shape that can't be used.
    """
    w = _linear_weight(weight, "weight")
    with default_float_env():
        g = None if gain is None else _per_output(gain, len(w), "gain")
        b = None if bias is None else _per_output(bias, len(w), "bias").astype(w.dtype)
        return weight_norm(w.astype(np.float64), g).astype(w.dtype), b


def _linear_weight(weight, name):
    weight = as_array(weight, name)
    if weight.dtype not in (np.float32, np.float64):
        raise TypeError(f"{name} must have dtype float32 or float64, got {weight.dtype}")
    if weight.ndim < 2:
        raise ValueError(f"{name} must have at least 2 dimensions, (outputs, inputs, ...), got shape {weight.shape}")
    return weight


def _per_output(array, outputs, name):
    """An array with one number for each output, checked and converted to float64."""
    array = as_array(array, name)
    if array.dtype not in (np.float32, np.float64):
        raise TypeError(f"{name} must have dtype float32 or float64, got {array.dtype}")
    if array.shape != (outputs,):
        raise ValueError(f"{name} must have shape ({outputs},), one number for each output, got {array.shape}")
    return array.astype(np.float64)
