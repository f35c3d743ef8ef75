"""The ways to write a model that were tried in every runtime, and the choice among them: ``export(..., runtime=)``."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace

import cnorm
from onnx_export import runtimes
from onnx_export.options import Options
from onnx_export.runtimes import RIGHT, Table

__all__ = ["DEFAULT", "STEPS", "WAYS", "written_for"]

STEPS = 6  # of the ways with a fixed T
# way -> options; where several have a form, an earlier one is preferred
WAYS = {"step": {"form": "step"}}
WAYS |= {loop: {"form": "sequence", "loop": loop} for loop in ("scan", "loop")}
WAYS |= {f"{loop} of 6": {"form": "sequence", "loop": loop, "steps": STEPS} for loop in ("scan", "loop", "unrolled")}
WAYS = {way: {"portable": True, **options} for way, options in WAYS.items()}
DEFAULT = "default sequence"
WAYS |= {DEFAULT: {"form": "sequence"}, f"{DEFAULT} of {STEPS}": {"form": "sequence", "steps": STEPS}}
_TRIED = ("Linear",)  # the layer behind the cell


def written_for(runtime: str, model: cnorm.Model, given: Options, defaults: Mapping[str, object]) -> Options:
    """The options with which a runtime was seen to compute a model's presets right.

    Parameters
    ----------
    runtime : str
        One of `runtimes.names`.
    model : cnorm.Model
    given : Options
        Of which form, steps, batch and dtype are kept; the others are chosen here.
    defaults : mapping
        Of the options.

    Raises
    ------
    ValueError
        For another name, an option that is chosen here, or where no way of this form was right; it says which was.
    """
    if runtime not in runtimes.names():
        raise ValueError(f"runtime must be one of {', '.join(map(repr, runtimes.names()))}, got {runtime!r}")
    names = {each.name for each in fields(given)} - {"form", "steps", "batch", "dtype"}
    chosen = sorted(name for name in names if getattr(given, name) != defaults[name])
    if chosen:
        raise ValueError(f"{', '.join(chosen)} must be left out with runtime, which chooses how the file is written")
    table = runtimes.table(runtime)
    presets, untried = _parts(model, given)
    right = list(_right(table, presets))
    wanted = [way for way in right if _form(WAYS[way]) == (given.form, given.steps is not None)]
    if not wanted:
        others = sorted({_said(*_form(WAYS[way])) for way in right}) or ["no form"]
        raise ValueError(
            f"runtime: {runtime} {table.version} was not seen to compute {_said(given.form, given.steps is not None)} "
            f"of {', '.join(presets) or 'every preset'} right, but {', '.join(others)} "
            f"({runtimes.SCRIPT}, {table.seen})"
        )
    if untried:
        warnings.warn(
            f"{runtime} {table.version} was not tried with {', '.join(untried)}: "
            f"check_parity(model, file, runtime={runtime!r}) compares it where it is installed",
            stacklevel=3,
        )
    options = WAYS[wanted[0]]
    return replace(given, **{"portable": False, **options, "steps": given.steps})


def _parts(model: cnorm.Model, given: Options) -> tuple[list[str], list[str]]:
    """The presets of a model, by their names in the tables, and what else of it no table knows."""
    presets, untried = {}, {}
    for layer in (leaf for each in model.layers for _, leaf in each.leaves("")):
        spec = getattr(layer, "spec", None)
        if spec is not None and cnorm.PRESETS.get((layer.kind, spec.name)) == spec and not layer.rows:
            presets[f"{layer.kind} {spec.name}"] = True
        elif layer.kind not in _TRIED or layer.rows:
            untried[layer.kind if spec is None else f"{layer.kind} {spec.name}"] = True
    if given.dtype != "float32":
        untried[f"dtype {given.dtype!r}"] = True
    if given.batch != 1:
        untried[f"batch {given.batch!r}"] = True
    return list(presets), list(untried)


def _right(table: Table, presets: list[str]) -> Iterator[str]:
    """The ways in which all these presets were right, without any all that were tried."""
    for way in WAYS:
        seen = {each.traits: each.outcome for each in table.observations if each.operator == "export"}
        wanted = [frozenset({preset, way}) for preset in presets] or [traits for traits in seen if way in traits]
        if wanted and all(seen.get(traits) == RIGHT for traits in wanted):
            yield way


def _form(options: dict) -> tuple[str, bool]:
    return options["form"], "steps" in options


def _said(form: str, fixed: bool) -> str:
    return f"form {form!r} with steps" if fixed else f"form {form!r}"
