"""cnorm.analysis: the paper's table measured, and its Fisher information against scores of sampled outputs."""

import numpy as np
import pytest

import cnorm
from cnorm import analysis

# Table 1 of arXiv:1607.06450, transformations in its order of columns
PUBLISHED = {
    "batch": ["yes", "no", "yes", "yes", "yes", "no"],
    "weight": ["yes", "no", "yes", "no", "no", "no"],
    "layer": ["yes", "yes", "no", "yes", "no", "yes"],
}


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("seed", range(5))
def test_measured_invariances_match_the_published_table(seed):
    table = analysis.invariance_table(seed=seed)
    for norm, row, effects in zip(analysis.NORMS, table.invariant, table.effects, strict=True):
        assert ["yes" if yes else "no" for yes in row] == PUBLISHED[norm], norm
        # either rounding error or an effect of order 1, nothing between
        assert ((effects < 1e-12) | (effects > 0.05)).all()


def test_table_reports_a_norm_without_centring(monkeypatch):
    def uncentred(x, weight, bias, eps):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight + bias

    monkeypatch.setattr(analysis, "layer_norm", uncentred)
    row = analysis.invariance_table().invariant[analysis.NORMS.index("layer")]
    assert row.tolist() == [True, False, False, True, False, True]  # RMS norm's


def test_the_table_prints():
    text = str(analysis.invariance_table())
    assert len(text.splitlines()) == 1 + len(analysis.TRANSFORMATIONS)
    for name in (*analysis.NORMS, *analysis.TRANSFORMATIONS):
        assert name in text


def natural_parameters(norm, w, b, g, x, eps):
    """z [cases, units] by cnorm's own norms."""
    if norm == "batch":
        return cnorm.batch_norm(x @ w.T, g, b, eps=eps)
    if norm == "layer":
        return cnorm.layer_norm(x @ w.T, g, b, eps=eps)
    if norm == "weight":
        return x @ cnorm.weight_norm(w, g).T + b
    return x @ (g[:, None] * w).T + b


def parameters_of(w, b, g):
    return np.concatenate([w, b[:, None], g[:, None]], axis=1)


def jacobian(norm, w, b, g, x, eps):
    """dz/dtheta [cases, units, units * (inputs + 2)] by central differences."""
    theta = parameters_of(w, b, g)
    columns = []
    for at in np.ndindex(theta.shape):
        ends = []
        for step in 2.0**-17, -(2.0**-17):
            t = theta.copy()
            t[at] += step
            w_t, b_t, g_t = (np.ascontiguousarray(part) for part in (t[:, :-2], t[:, -2], t[:, -1]))
            ends.append(natural_parameters(norm, w_t, b_t, g_t, x, eps))
        columns.append((ends[0] - ends[1]) * 2.0**16)
    return np.stack(columns, axis=-1)


def random_model(rng, units=3, inputs=4, cases=12):
    w, x = rng.standard_normal((units, inputs)), rng.standard_normal((cases, inputs)) + 0.3
    return w, 0.5 * rng.standard_normal(units), 1 + 0.3 * rng.standard_normal(units), x


@pytest.mark.parametrize("norm", ["batch", "weight", "layer", None])
@pytest.mark.parametrize("output", ["gaussian", "correlated", "bernoulli"])
@pytest.mark.parametrize("eps", [0, 0.1])
def test_fisher_information_is_the_mean_of_score_outer_products(rng, norm, output, eps):
    """Outputs sampled from the model, scores by differences of the log-likelihood's argument.

    The mean of S outer products is within six standard errors, estimated from the same sample, of its
    expectation: with 441 entries a right one fails with probability 1e-6.
    """
    samples = 4000
    w, b, g, x = random_model(rng)
    z = natural_parameters(norm, w, b, g, x, eps)
    j = jacobian(norm, w, b, g, x, eps)
    phi = 0.7
    if output == "bernoulli":
        p = 1 / (1 + np.exp(-z))
        residual = (rng.random((samples, *z.shape)) < p) - p
        phi = 1.0
    elif output == "correlated":
        root = rng.standard_normal((3, 3))
        phi = root @ root.T + np.eye(3)
        noise = rng.standard_normal((samples, *z.shape)) @ np.linalg.cholesky(phi).T
        residual = noise @ np.linalg.inv(phi)
    else:
        residual = rng.standard_normal((samples, *z.shape)) * np.sqrt(phi) / phi
    score = np.einsum("sni,nip->snp", residual, j)
    outer = np.einsum("snp,snq->spq", score, score) / len(x)
    error = outer.std(0) / np.sqrt(samples)
    kind = "gaussian" if output == "correlated" else output
    fisher = analysis.fisher_glm(w, g, b, x, norm=norm, output=kind, phi=phi, eps=eps)
    size = w.shape[0] * (w.shape[1] + 2)
    assert fisher.shape == (3, 6, 3, 6)
    difference = np.abs(fisher.reshape(size, size) - outer.mean(0))
    assert (difference <= 6 * error + 1e-8).all()
    # the test detects missing terms: without cross derivatives layer norm is far off, the others are unchanged
    own = analysis.fisher_glm(w, g, b, x, norm=norm, output=kind, phi=phi, eps=eps, cross=False)
    if norm == "layer":
        assert (np.abs(own.reshape(size, size) - outer.mean(0)) > 12 * error + 1e-8).any()
    else:
        np.testing.assert_array_equal(own, fisher)


@pytest.mark.parametrize("norm", ["batch", "weight", "layer", None])
@pytest.mark.parametrize("output", ["gaussian", "bernoulli"])
def test_divergence_of_a_small_change_is_the_quadratic_form_of_the_fisher_information(rng, norm, output):
    """Eq. 8 of the paper: D_KL[P(y|x; theta) || P(y|x; theta + d)] is d' F d / 2 to the second order in d."""
    w, b, g, x = random_model(rng)
    phi = 0.7 if output == "gaussian" else 1.0
    fisher = analysis.fisher_glm(w, g, b, x, norm=norm, output=output, phi=phi)
    direction = rng.standard_normal(fisher.shape[:2])
    quadratic = np.einsum("ip,ipjq,jq", direction, fisher, direction) / 2

    def divergence(step):
        ends = [natural_parameters(norm, w, b, g, x, 0)]
        d = step * direction
        ends.append(natural_parameters(norm, w + d[:, :-2], b + d[:, -2], g + d[:, -1], x, 0))
        if output == "gaussian":
            return ((ends[1] - ends[0]) ** 2).sum(-1).mean() / (2 * phi)
        p = 1 / (1 + np.exp(-ends[0]))
        costs = [np.logaddexp(0, z) - p * z for z in ends]  # -E log P about z, where y is from p
        return (costs[1] - costs[0]).sum(-1).mean()

    # the terms of the third order cancel in the mean of both signs, those of the fourth are quartered with step / 2
    found = [(divergence(step) + divergence(-step)) / (2 * step * step) for step in (2.0**-9, 2.0**-10)]
    errors = np.abs(np.array(found) / quadratic - 1)
    assert errors[0] < 1e-3
    assert errors[1] < 0.3 * errors[0]


@pytest.mark.parametrize("norm", ["batch", "weight", "layer", None])
def test_fisher_information_is_symmetric_and_not_negative(rng, norm):
    w, b, g, x = random_model(rng)
    fisher = analysis.fisher_glm(w, g, b, x, norm=norm).reshape(18, 18)
    np.testing.assert_allclose(fisher, fisher.T, rtol=0, atol=1e-12)
    assert np.linalg.eigvalsh(fisher).min() > -1e-10


def factors(before, after):
    """The single factor between two blocks."""
    kept = np.abs(before) > 1e-6 * np.abs(before).max()
    ratio = after[kept] / before[kept]
    assert np.ptp(ratio) < 1e-6
    return round(float(ratio.mean()), 6)


@pytest.mark.parametrize("norm", ["batch", "weight"])
def test_doubling_a_weight_vector_scales_its_fisher_blocks(rng, norm):
    """The paper gives a factor of 1/2. It is 1/4 in the block of w_i with itself and 1/2 in its other blocks."""
    w, b, g, x = random_model(rng)
    root = rng.standard_normal((3, 3))
    options = {"norm": norm, "phi": root @ root.T + np.eye(3)}  # correlated, so that no block is zero
    doubled = w.copy()
    doubled[0] *= 2
    before, after = (analysis.fisher_glm(v, g, b, x, **options) for v in (w, doubled))
    weights, rest = slice(0, 4), slice(4, 6)
    assert factors(before[0, weights, 0, weights], after[0, weights, 0, weights]) == 0.25
    assert factors(before[0, weights, 1, weights], after[0, weights, 1, weights]) == 0.5
    assert factors(before[0, weights, 1:, rest], after[0, weights, 1:, rest]) == 0.5
    if norm == "weight":  # batch norm: exactly zero
        assert factors(before[0, weights, 0, 4], after[0, weights, 0, 4]) == 0.5
    assert factors(before[0, rest, 0, rest], after[0, rest, 0, rest]) == 1
    assert factors(before[1:, :, 1:, :], after[1:, :, 1:, :]) == 1


@pytest.mark.parametrize("norm", ["batch", "weight"])
def test_fisher_information_is_zero_along_the_weight_vector(rng, norm):
    """The output does not depend on |w_i|, so the information about it is zero, before and after."""
    w, b, g, x = random_model(rng)
    block = analysis.fisher_glm(w, g, b, x, norm=norm)[0, :4, 0, :4]
    assert abs(w[0] @ block @ w[0]) < 1e-12 * np.abs(block).max()


def test_layer_norm_blocks_scale_only_with_the_whole_matrix(rng):
    """One vector alone changes the output and no block by one factor; the matrix gives 1/4 and 1/2."""
    w, b, g, x = random_model(rng)
    doubled = w.copy()
    doubled[0] *= 2
    before, one, all_ = (analysis.fisher_glm(v, g, b, x, norm="layer") for v in (w, doubled, 2 * w))
    weights = slice(0, 4)
    assert factors(before[:, weights, :, weights], all_[:, weights, :, weights]) == 0.25
    assert factors(before[:, weights, :, 4:], all_[:, weights, :, 4:]) == 0.5
    assert factors(before[:, 4:, :, 4:], all_[:, 4:, :, 4:]) == 1
    ratio = one[0, weights, 0, weights] / before[0, weights, 0, weights]
    assert np.ptp(ratio) > 0.1
    direction = np.einsum("ik,ikjl,jl->", w, before[:, weights, :, weights], w)
    assert abs(direction) < 1e-12 * np.abs(before).max()


def test_fisher_errors(rng):
    w, b, g, x = random_model(rng)
    for call, words in [
        (lambda: analysis.fisher_glm(w, g, b, x[:, :2], norm="layer"), "weight and x must have shapes"),
        (lambda: analysis.fisher_glm(w, g[:2], b, x, norm="layer"), "gain must have shape"),
        (lambda: analysis.fisher_glm(w, g, b, x, norm="group"), "norm must be one of"),
        (lambda: analysis.fisher_glm(w, g, b, x, norm="layer", output="poisson"), "output must be"),
        (lambda: analysis.fisher_glm(w, g, b, x, norm="layer", output="bernoulli", phi=2), "phi must be 1"),
        (lambda: analysis.fisher_glm(w, g, b, x, norm="layer", phi=np.ones(3)), "phi must be one number"),
    ]:
        with pytest.raises(ValueError, match=words):
            call()
