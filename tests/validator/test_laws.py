"""Norms recognised by what they compute agree with those recognised by how they are written."""

import runpy
from pathlib import Path
from types import SimpleNamespace

import gallery
import numpy as np
import pytest

from onnx_export import laws, operators
from onnx_export.nodes import settle_references, sort_nodes
from onnx_export.validation.graph import inline, scopes, with_shapes
from onnx_export.validation.patterns import find

forms = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("test_recognition.py"))))

# Agreed differences of norms in primitive operators. May only shrink. A reason with "perhaps" is not confirmed.
AGREED = {
    "variance of another tensor": "a law has one source",
    # norms that the patterns miss
    "centred_some_nodes_after_the_division": "all of them are sound",
    "centred_some_nodes_after_the_division_by_claim": "all of them are sound",
    "subtracted_the_other_way_round": "perhaps a norm with a negative factor",
    # near misses of no law yet, or under another name
    "claim_without_a_root_or_an_eps": "perhaps a near miss of no pattern",
    "one_over_n_minus_1_in_float16": "perhaps the rounding of float16 covers the wrong count",
    "one_pass_over_half_of_n": "perhaps no law of a wrong count of the mean alone",
    "clipped_deviation": "perhaps the floor is below the smallest probe, or has a bias",
    "not_centred_with_a_negative_eps": "perhaps roots of negative numbers are not finite",
    "mismatched_axes": "perhaps no law of a variance over other axes",
    "exponent_3": "perhaps roots of negative numbers are not finite",
    "keepdims_on_a_rectangle_by_mul": "perhaps no law of a statistic along another axis",
    "trap_keepdims": "perhaps no law of a statistic along another axis",
    # norms not seen yet
    "inside_a_local_function": "perhaps a function that is not inlined has no shapes",
    "variance_minus_eps": "perhaps a negative eps",
    "axes_that_are_floats": "perhaps onnx's evaluator refuses the attribute",
    "trap_in_the_second_of_two_norms": "perhaps later norms are taken for steps of the first",
    "domain_by_its_long_name": "perhaps onnx's evaluator does not know the domain ai.onnx",
    "domain_by_its_long_name_in_a_branch_and_in_a_function": "perhaps the same",
    "stored_count_of_another_width": "perhaps the count fits no probe",
}


def by_law(model):
    found = [each.fit for scope in scopes(with_shapes(inline(model))) for each in laws.norms(scope)]
    return sorted((bool(each.words), each.law.formula) for each in found)


def by_pattern(model):
    return sorted(
        (bool(norm.near_miss), norm.formula.name) for norm in find(with_shapes(inline(model))) if not norm.operator
    )


FORMS = {name: nodes for table in (forms.NORMS, forms.NEAR) for name, (*_, nodes) in table.items()} | forms.NONE


@pytest.mark.parametrize("shape", forms.SHAPES, ids=["fixed", "free"])
@pytest.mark.parametrize("form", FORMS)
def test_laws_and_patterns_agree(form, shape):
    model = forms.built(FORMS[form], shape)
    assert (by_law(model) == by_pattern(model)) != (form in AGREED), (by_law(model), by_pattern(model))


@pytest.mark.parametrize("build", gallery.SPECIMENS, ids=lambda build: build.__name__)
def test_laws_and_patterns_agree_on_the_gallery(build):
    model = build().model
    sort_nodes(model)
    model = inline(model)
    settle_references(model)
    assert (by_law(model) == by_pattern(model)) != (build.__name__ in AGREED), (by_law(model), by_pattern(model))


def by_rows(function, shape=(4, 16)):
    return laws.what_norm(lambda xs: list(map(function, xs)), shape)


@pytest.mark.parametrize("eps", [0.0, 1e-12, 1e-6, 1e-5, 1e-3])
def test_parameters_are_measured(eps):
    rng = np.random.default_rng(0)
    scale, bias = rng.normal(size=(2, 16))
    for parameters in ((1.0, 0.0), (scale, 0.0), (scale, bias)):
        found = by_rows(lambda x, s=parameters[0], b=parameters[1]: operators.standardise(x, (1,), eps)[0] * s + b)
        assert found.words == ""
        assert (found.law.formula, found.axes) == ("layer", (1,))
        np.testing.assert_allclose(found.eps, eps, rtol=1e-3 if eps < 1e-9 else 1e-6, atol=1e-14)
        np.testing.assert_allclose(np.broadcast_to(found.scale, (1, 16))[0], parameters[0], rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(np.broadcast_to(found.bias, (1, 16))[0], parameters[1], rtol=1e-9, atol=1e-9)


def test_place_of_eps_floor_and_axes():
    def divided(x, axes, divisor):
        return (x - x.mean(axes, keepdims=True)) / divisor(x.std(axes, keepdims=True))

    added = by_rows(lambda x: divided(x, 1, lambda s: s + 1e-3))
    assert added.place
    np.testing.assert_allclose(added.eps, 1e-3, rtol=1e-6)
    for floor in (1e-2, 1e-12):
        clamped = by_rows(lambda x, floor=floor: divided(x, 1, lambda s: np.maximum(s, floor)))
        np.testing.assert_allclose(clamped.floor, floor, rtol=1e-6)
    assert by_rows(lambda x: divided(x, (0, 2), lambda s: s), (3, 4, 5)).axes == (0, 2)


@pytest.mark.parametrize("function", [np.tanh, np.copy, lambda x: 0 * x, lambda x: x / 0, lambda x: x.sum()])
def test_other_functions_are_no_norms(function):
    with np.errstate(all="ignore"):
        assert by_rows(function) is None
