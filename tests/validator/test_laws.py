"""Norms recognised by what they compute agree with those recognised by how they are written."""

import runpy
from pathlib import Path
from types import SimpleNamespace

import gallery
import numpy as np
import pytest
from corpus import archive
from writings import Writing

from onnx_export import operators
from onnx_export.graph.scope import scopes, with_shapes
from onnx_export.laws.fit import Source
from onnx_export.laws.sources import norms
from onnx_export.model_io import Limits, parse
from onnx_export.nodes import inlined, settle_references, sort_nodes
from onnx_export.validation.patterns import find


def tables(name):
    return SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name(f"{name}.py"))))


forms, writings, test_corpus = map(tables, ("test_recognition", "test_writings_by_evaluation", "test_corpus"))
D = writings.D

# Agreed differences of norms in primitive operators. May only shrink.
AGREED = {
    "variance of another tensor": "a law has one source: what is divided depends on two",
    # laws are right
    "centred_some_nodes_after_the_division": "all four are sound norms, of which the patterns find none",
    "centred_some_nodes_after_the_division_by_claim": "the same",
    "subtracted_the_other_way_round": "a sound norm whose scale is the stored one negated; no pattern has it",
    "claim_without_a_root_or_an_eps": "a near miss, divided by the variance, which no pattern has",
    "clipped_deviation": "a sound norm: sqrt(var + 1e-3) is never below the limit of 1e-2",
    "stored_count_of_another_width": "no norm at any width: the scale has 16 elements, and sums are divided by 32",
}


def by_law(model):
    found = [each.fit for scope in scopes(with_shapes(inlined(model))) for each in norms(scope)]
    return sorted((bool(each.words), each.law.formula) for each in found)


def by_pattern(model):
    found = find(with_shapes(inlined(model)), laws=False)
    return sorted((bool(norm.near_miss), norm.formula.name) for norm in found if not norm.operator)


FORMS = {name: nodes for table in (forms.NORMS, forms.NEAR) for name, (*_, nodes) in table.items()} | forms.NONE


@pytest.mark.exhaustive(one_in=3)
@pytest.mark.parametrize("shape", forms.SHAPES, ids=["fixed", "free"])
@pytest.mark.parametrize("form", FORMS)
def test_laws_and_patterns_agree(form, shape):
    model = forms.built(FORMS[form], shape)
    assert (by_law(model) == by_pattern(model)) != (form in AGREED), (by_law(model), by_pattern(model))


@pytest.mark.exhaustive(one_in=6)
@pytest.mark.parametrize("build", gallery.SPECIMENS, ids=lambda build: build.__name__)
def test_laws_and_patterns_agree_on_the_gallery(build):
    model = read(build().model.SerializeToString())
    assert (by_law(model) == by_pattern(model)) != (build.__name__ in AGREED), (by_law(model), by_pattern(model))


@pytest.mark.exhaustive(one_in=4)
@pytest.mark.parametrize("how", [*writings.SQUARES, *writings.ABOUT_MEAN, *writings.ROOTS])
def test_laws_see_what_writings_compute(how):
    formulas = {True: "layer", False: "rms"}
    made = []
    if how in writings.SQUARES:
        both = [(n, centred) for n in (D, D - 1) for centred in (True, False)]
        made = [(writings.squared(how, n, centred), (n != D, formulas[centred])) for n, centred in both]
        made.append((writings.squared(how, D, root=""), (True, "layer")))
    elif how in writings.ABOUT_MEAN:
        w = Writing()
        x = w.input("x", (2, 5, D))
        model = w.model(w.op("Div", w.centred(x), w.op("Sqrt", w.op("Add", writings.ABOUT_MEAN[how](w, x), 1e-3))))
        made = [(model, (False, "layer"))]
    else:
        made = [(writings.rooted(how, -0.5, divided), (False, "layer")) for divided in (True, False)]
    for model, seen in made:
        assert by_law(model) == [seen]


@pytest.mark.exhaustive(one_in=5)
@pytest.mark.parametrize(("exporter", "name"), test_corpus.FILES[::6])
def test_laws_and_patterns_agree_on_the_corpus(exporter, name):
    model = read(archive.read(exporter)[name])
    assert by_law(model) == by_pattern(model)


def read(data):
    model = parse(data, Limits())
    sort_nodes(model)
    model = inlined(model)
    settle_references(model)
    return model


def by_rows(function, shape=(4, 16)):
    source = Source(shape)
    return source.fit(list(map(function, source.xs)))


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
