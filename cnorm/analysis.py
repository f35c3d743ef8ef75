"""Which transformations leave the output of each norm unchanged, and the Fisher information of normalised models.

These functions compute the statements of section 5 of Ba, Kiros, Hinton, "Layer Normalization", arXiv:1607.06450. Every
norm here has the form ``h = f(gain / sigma * (a - mu) + bias)`` with the summed inputs ``a = W x``. They differ in mu
and sigma: batch norm computes them for each unit over the cases, layer norm for each case over the units, and weight
norm has ``mu = 0`` and ``sigma_i = |w_i|``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cnorm._core import batch_norm, layer_norm, weight_norm

NORMS = ("batch", "weight", "layer")
TRANSFORMATIONS = (
    "weight matrix re-scaling",
    "weight matrix re-centring",
    "weight vector re-scaling",
    "dataset re-scaling",
    "dataset re-centring",
    "single training case re-scaling",
)


@dataclass(frozen=True)
class InvarianceTable:
    """The largest change of each norm's output by each transformation; `print` it, or use `invariant`.

    Attributes
    ----------
    effects : ndarray, shape (3, 6), float64
        The largest absolute change of any output, a row for each of `NORMS`, a column for each of `TRANSFORMATIONS`.
        Outputs are of order 1.
    """

    effects: np.ndarray

    @property
    def invariant(self) -> np.ndarray:
        """ndarray, shape (3, 6), bool: the change is below 1e-9, rounding alone; other changes are far larger."""
        return self.effects < 1e-9

    def __str__(self):
        width = max(map(len, TRANSFORMATIONS))
        lines = [" " * width + "".join(f"{norm:>16}" for norm in NORMS)]
        for j, transformation in enumerate(TRANSFORMATIONS):
            cells = [
                f"{'yes' if yes else 'no'} ({effect:.0e})"
                for yes, effect in zip(self.invariant[:, j], self.effects[:, j], strict=True)
            ]
            lines.append(f"{transformation:<{width}}" + "".join(f"{cell:>16}" for cell in cells))
        return "\n".join(lines)


def invariance_table(*, cases: int = 40, inputs: int = 7, units: int = 9, seed: int = 0) -> InvarianceTable:
    """Measure Table 1 of arXiv:1607.06450 with cnorm's norms, in float64 with eps 0.

    The output of a normalised random linear layer is compared before and after a transformation of its weights or its
    data: W to 1.7 W; W to ``W + 1 gamma'``, the same vector added to each row; one row of W to 1.7 times itself;
    x to 1.7 x; x to x + gamma; one case to 1.7 times itself.

    Parameters
    ----------
    cases, inputs, units : int
        Size of the data x [cases, inputs] and of W [units, inputs].
    seed : int
        Seed of the random numbers.

    Returns
    -------
    InvarianceTable

    Examples
    --------
    >>> import cnorm.analysis
    >>> cnorm.analysis.invariance_table().invariant.tolist()[2]
    [True, True, False, True, False, True]
    """
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((cases, inputs)) + 0.5
    w = rng.standard_normal((units, inputs))
    gain, bias = 1 + 0.2 * rng.standard_normal(units), rng.standard_normal(units)
    gamma, scale = rng.standard_normal(inputs), 1.7
    w_row, x_case = w.copy(), x.copy()
    w_row[0] *= scale
    x_case[0] *= scale
    transformed = [
        (scale * w, x),
        (w + gamma, x),
        (w_row, x),
        (w, scale * x),
        (w, x + gamma),
        (w, x_case),
    ]
    outputs = {
        "batch": lambda w, x: batch_norm(x @ w.T, gain, bias, eps=0),
        "weight": lambda w, x: x @ weight_norm(w, gain).T + bias,
        "layer": lambda w, x: layer_norm(x @ w.T, gain, bias, eps=0),
    }
    return InvarianceTable(
        np.array([[np.abs(outputs[norm](*both) - outputs[norm](w, x)).max() for both in transformed] for norm in NORMS])
    )


def fisher_glm(
    weight: np.ndarray,
    gain: np.ndarray,
    bias: np.ndarray,
    x: np.ndarray,
    *,
    norm: str | None,
    output: str = "gaussian",
    phi: float = 1.0,
    eps: float = 0.0,
    cross: bool = True,
) -> np.ndarray:
    """Fisher information of a normalised generalised linear model (arXiv:1607.06450, Eq. 12-14).

    Unit i has the parameters (w_i, b_i, g_i) and the natural parameter
    ``z_i = g_i / sigma_i * (a_i - mu_i) + b_i``, ``a_i = w_i . x``. With J [units, parameters] the derivative of
    z for one case, the result is the mean over the cases of ``J' C J``, where C is the Fisher information of the
    output distribution about z: 1 / phi for a Gaussian with mean z and variance phi, p (1 - p) for a Bernoulli
    distribution with ``p = sigmoid(z)``.

    Parameters
    ----------
    weight : ndarray, shape (units, inputs)
    gain, bias : ndarray, shape (units,)
    x : ndarray, shape (cases, inputs)
        The data over which the expectation is taken; batch norm also computes mu and sigma from them.
    norm : {"batch", "weight", "layer", None}
        None: mu = 0 and sigma = 1.
    output : {"gaussian", "bernoulli"}
        The distribution of the outputs.
    phi : float or ndarray, shape (units, units)
        Variance of Gaussian outputs, or their covariance; 1 for Bernoulli outputs.
    eps : float
        Added to the variance in batch and layer norm.
    cross : bool
        True: J has the derivatives of every z for every weight, which gives the information of the model. False: it
        has those of z_i for the weights of unit i only, as the blocks of Eq. 13 are written. The two differ for layer
        norm only, where each weight changes the mu and sigma of all units.

    Returns
    -------
    ndarray, shape (units, inputs + 2, units, inputs + 2), float64
        ``[i, :, j, :]`` is the block of units i and j, each in the order w, b, g.

    Raises
    ------
    ValueError
        For a norm, output, shape or phi that can't be used.
    """
    w, g, b, x = (np.asarray(a, np.float64) for a in (weight, gain, bias, x))
    if w.ndim != 2 or x.ndim != 2 or w.shape[1] != x.shape[1]:
        raise ValueError(
            f"weight and x must have shapes (units, inputs) and (cases, inputs), got {w.shape} and {x.shape}"
        )
    units = len(w)
    for array, name in ((g, "gain"), (b, "bias")):
        if array.shape != (units,):
            raise ValueError(f"{name} must have shape ({units},), got {array.shape}")
    centred, sigma, d_mu, d_sigma = _moments(w, x, norm, eps)  # [N, H], [N, H], [N, H, H, I], [N, H, H, I]
    own = np.eye(units)[:, :, None]
    chi = own * x[:, None, None, :] - d_mu - (centred / sigma)[:, :, None, None] * d_sigma
    if not cross:
        chi = chi * own
    jacobian = np.concatenate(
        [
            (g / sigma)[:, :, None, None] * chi,
            np.broadcast_to(own, (len(x), units, units, 1)),
            own * (centred / sigma)[:, :, None, None],
        ],
        axis=-1,
    )  # [N, H, H, I + 2]
    information = _information(g * centred / sigma + b, output, phi)  # [N, H, H]
    return np.einsum("naip,nab,nbjq->ipjq", jacobian, information, jacobian, optimize=True) / len(x)


def _moments(w, x, norm, eps):
    """a - mu and sigma [N, H], and the derivatives of mu_i and sigma_i with respect to w_j [N, H, H, I].

    N cases, H units, I inputs.
    """
    a = x @ w.T
    shape = (len(x), len(w), len(w), x.shape[1])
    own = np.eye(len(w))[:, :, None]
    if norm is None:
        return a, np.ones_like(a), np.zeros(shape), np.zeros(shape)
    if norm == "weight":
        sigma = np.sqrt((w * w).sum(1))
        return (
            a,
            np.broadcast_to(sigma, a.shape),
            np.zeros(shape),
            np.broadcast_to(own * (w / sigma[:, None]), shape),
        )
    if norm == "batch":
        centred, x_centred = a - a.mean(0), x - x.mean(0)
        sigma = np.sqrt((centred**2).mean(0) + eps)
        d_sigma = centred.T @ x_centred / len(x) / sigma[:, None]
        return (
            centred,
            np.broadcast_to(sigma, a.shape),
            np.broadcast_to(own * x.mean(0), shape),
            np.broadcast_to(own * d_sigma[:, None, :], shape),
        )
    if norm == "layer":
        centred = a - a.mean(1, keepdims=True)
        sigma = np.broadcast_to(np.sqrt((centred**2).mean(1, keepdims=True) + eps), a.shape)
        d_mu = np.broadcast_to(x[:, None, None, :] / len(w), shape)
        d_sigma = np.broadcast_to((centred / sigma)[:, None, :, None] * x[:, None, None, :] / len(w), shape)
        return centred, sigma, d_mu, d_sigma
    raise ValueError(f"norm must be one of {NORMS} or None, got {norm!r}")


def _information(z, output, phi):
    """The Fisher information of the outputs about z, [N, H, H]."""
    units = z.shape[1]
    phi = np.asarray(phi, np.float64)
    if output == "gaussian":
        if phi.shape not in ((), (units, units)):
            raise ValueError(f"phi must be one number or have shape ({units}, {units}), got {phi.shape}")
        covariance = phi if phi.ndim else phi * np.eye(units)
        return np.broadcast_to(np.linalg.inv(covariance), (len(z), units, units))
    if output == "bernoulli":
        if phi.shape or phi != 1:
            raise ValueError(f"phi must be 1 for Bernoulli outputs, got {phi}")
        p = 0.5 + 0.5 * np.tanh(z / 2)
        return np.eye(units) * (p * (1 - p))[:, :, None]
    raise ValueError(f'output must be "gaussian" or "bernoulli", got {output!r}')
