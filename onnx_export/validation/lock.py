"""Compare the norms of a file with a reference: those of its original, or of an earlier run."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from difflib import SequenceMatcher
from typing import Any

import numpy as np

from cnorm.text import clip
from onnx_export.validation.findings import RECURRENCE, Finding
from onnx_export.validation.report import ValidationReport

LOCK_SCHEMA = 2
_FIELDS = ("formula", "variance", "eps", "eps_dtype", "near_miss", "normal")
_SAME_EPS = 1e-6  # relative: the same number stored as a float32 or float64 attribute, or added as float64
# Relative rounding of a number that is stored in a type; int8: half a step of the largest of 127.
_UNITS = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "int8": 1 / 254}


def value_hash(value: np.ndarray | None) -> str:
    """Hash of a scale or bias: of its values in float64 and its shape without axes of length 1; empty for none."""
    if value is None:
        return ""
    flat = np.squeeze(np.asarray(value).astype("<f8"))
    return hashlib.sha256(str(flat.shape).encode() + np.ascontiguousarray(flat).tobytes()).hexdigest()[:16]


_WEIGHTS = {"W": "input weights (W)", "R": "recurrent weights (R)", "B": "biases (B)", "P": "peepholes (P)"}
Facts = dict[str, list[dict[str, Any]]]


def facts(report: ValidationReport) -> Facts:
    """The facts about the norms and the recurrent nodes that a lock file stores."""
    return {
        "norms": [{"name": norm.name} | {name: getattr(norm, name) for name in _FIELDS} for norm in report.norms],
        "cells": [
            {"name": cell.name, "kind": cell.kind, "facts": cell.facts, "hashes": cell.hashes}
            for cell in report.cells
            if cell.kind != RECURRENCE
        ],
    }


def lock(report: ValidationReport) -> str:
    """A lock file."""
    return json.dumps({"lock": LOCK_SCHEMA} | facts(report), indent=1) + "\n"


def read_lock(text: str) -> Facts:
    """The facts of a lock file, or of a report as JSON.

    Raises
    ------
    ValueError
        If it is neither.
    """
    try:
        data = json.loads(text)
        norms = [_read_norm(each) for each in data["norms"]]
        cells = [
            {
                "name": str(e["name"]),
                "kind": str(e["kind"]),
                "facts": _texts(e["facts"]),
                "hashes": _texts(e["hashes"]),
            }
            for e in data["cells"]
        ]
        return {"norms": norms, "cells": cells}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ValueError("not a lock file or a report of this version of cnorm; --lock writes one") from None


def _read_norm(given: dict[str, Any]) -> dict[str, Any]:
    normal = given["normal"]
    axes = normal["axes"]
    return {name: str(given[name]) for name in ("name", *_FIELDS) if name not in ("eps", "normal")} | {
        "eps": float(given["eps"]),
        "normal": {
            "axes": None if axes is None else [int(axis) for axis in axes],
            "narrow": bool(normal["narrow"]),
        }
        | {name: _read_parameter(normal[name]) for name in ("scale", "bias")},
    }


def _read_parameter(given: dict[str, Any]) -> dict[str, Any]:
    texts = {name: str(given[name]) for name in ("hash", "type")}
    return texts | {"sketch": [float(each) for each in given["sketch"]]}


def _texts(given: dict[str, Any]) -> dict[str, str]:
    return {str(name): str(value) for name, value in given.items()}


def compare(found: Facts, reference: Facts) -> Iterator[Finding]:
    """A finding for each norm and recurrent node that is missing, extra or different from the reference."""
    yield from _compare_norms(found["norms"], reference["norms"])
    yield from _compare_cells(found["cells"], reference["cells"])


def _compare_cells(cells: list[dict[str, Any]], reference: list[dict[str, Any]]) -> Iterator[Finding]:
    """Recurrent nodes are matched in order."""
    if len(cells) != len(reference):
        message = f"{len(cells)} recurrent nodes, the reference has {len(reference)}"
        yield Finding("error", "like-count", message)
    for new, old in zip(cells, reference, strict=False):
        one_kind = new["kind"].endswith(old["kind"]) or old["kind"].endswith(new["kind"])  # but for its quantisation
        changes = [] if one_kind else [_change("kind", old["kind"], new["kind"])]
        for name in dict.fromkeys([*old["facts"], *new["facts"]]):
            was, now = old["facts"].get(name, "none"), new["facts"].get(name, "none")
            changes += [] if was == now else [_change(name.replace("_", " "), was, now)]
        weights = [name for name in old["hashes"] if _other_weights(old["hashes"][name], new["hashes"].get(name, ""))]
        if old["facts"].get("reset") != new["facts"].get("reset"):  # which adds the halves of the bias elsewhere
            weights = [name for name in weights if name != "B"]
        moved = {name: _moved(old["hashes"][name], new["hashes"].get(name, "")) for name in weights}
        orders = list(dict.fromkeys(filter(None, moved.values())))
        changes += [f"its gates are those of the reference in the order {orders[0]}"] if orders else []
        changes += [f"other {_WEIGHTS[name]} than the reference" for name in weights if not moved[name]]
        if changes:
            yield Finding("error", "like-differs", "; ".join(changes), new["name"])


def _other_weights(old: str, new: str) -> bool:
    """Whether hashes differ; those of computed weights are not known."""
    return old != new and "computed" not in (old, new)


def _moved(old: str, new: str) -> str:
    """The places of the gates of `new` in `old`, if it has the same gates in another order; else empty."""
    before, after = old.split(), new.split()
    if sorted(before) != sorted(after) or len(set(before)) != len(before):
        return ""
    return " ".join(str(before.index(gate)) for gate in after)


def _compare_norms(norms: list[dict[str, Any]], reference: list[dict[str, Any]]) -> Iterator[Finding]:
    """A finding for each norm that is missing, extra or different from the reference.

    Norms are matched in order: by name if most names occur in both, else by their other facts.
    """
    if len(norms) != len(reference):
        yield Finding("error", "like-count", f"{len(norms)} norms, the reference has {len(reference)}")
    shared = {n["name"] for n in norms} & {r["name"] for r in reference}
    by_name = 2 * len(shared) > len(reference)
    one, other = ([_key(each, by_name) for each in side] for side in (reference, norms))
    for kind, a, b, c, d in SequenceMatcher(None, one, other, autojunk=False).get_opcodes():
        pairs = min(b - a, d - c)
        for old, new in zip(reference[a : a + pairs], norms[c : c + pairs], strict=True):
            changes = [_change(*change) for change in _changed(old, new)]
            if changes:
                yield Finding("error", "like-differs", "; ".join(changes), new["name"])
            for name in ("scale", "bias"):
                if _quantised(old["normal"][name], new["normal"][name]):
                    message = f"the {name} is that of the reference up to the rounding to int8"
                    yield Finding("note", "like-differs", message, new["name"])
        if kind != "equal":
            for old in reference[a + pairs : b]:
                yield Finding("error", "like-differs", "not there any more", clip(old["name"], 250))
            for new in norms[c + pairs : d]:
                yield Finding("error", "like-differs", "not in the reference", new["name"])


def _key(norm: dict[str, Any], by_name: bool) -> tuple[str, ...]:
    if by_name:
        return (norm["name"],)
    normal = norm["normal"]
    hashes = (normal["scale"]["hash"], normal["bias"]["hash"])
    return (norm["formula"], norm["near_miss"], str(normal["axes"]), *hashes)


def _changed(old: dict[str, Any], new: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """What differs between two norms, in the reference and here."""
    before, after = old["normal"], new["normal"]
    for name in ("formula", "near_miss"):
        if old[name] != new[name]:
            yield name, old[name], new[name]
    # how an operator computes its variance is the runtime's choice, and no difference
    if old["variance"] != new["variance"] and "operator" not in (old["variance"], new["variance"]):
        yield "variance", old["variance"], new["variance"]
    if not _same_axes(before["axes"], after["axes"]):
        yield "axes", before["axes"], after["axes"]
    rounding = max(_SAME_EPS, *(2 * _UNITS.get(each["eps_dtype"], 0.0) for each in (old, new)))
    smallest = 2.0**-24 if "float16" in (old["eps_dtype"], new["eps_dtype"]) else 0.0
    same = math.isclose(old["eps"], new["eps"], rel_tol=rounding, abs_tol=smallest)
    if not same and not (math.isnan(old["eps"]) and math.isnan(new["eps"])):
        yield "eps", float(old["eps"]), float(new["eps"])
    one_form = (old["variance"] == "operator") == (new["variance"] == "operator")
    if before["narrow"] != after["narrow"] and one_form:
        yield "statistics", *("narrower than x" if each["narrow"] else "as x or wider" for each in (before, after))
    for name in ("scale", "bias"):
        if not _same_parameter(before[name], after[name]):
            yield name, before[name]["hash"], after[name]["hash"]


def _same_axes(old: list[int] | None, new: list[int] | None) -> bool:
    """Whether axes are alike; one list that is not counted from the last, of unknown rank, only by its length."""
    if old == new or old is None or new is None:
        return old == new
    counted = [all(axis < 0 for axis in each) for each in (old, new)]
    return counted[0] != counted[1] and len(old) == len(new)


def _quantised(old: dict[str, Any], new: dict[str, Any]) -> bool:
    """Whether one of two alike scales or biases is stored in int8, and they are not the same numbers."""
    unequal = old["hash"] != new["hash"] and (old["type"] == "int8") != (new["type"] == "int8")
    return unequal and _same_parameter(old, new)


def _same_parameter(old: dict[str, Any], new: dict[str, Any]) -> bool:
    """Whether two scales or biases are the same numbers, up to the rounding of the type that they are stored in."""
    if old["hash"] == new["hash"]:
        return True
    if (old["type"] == new["type"] and old["type"] not in _UNITS) or len(old["sketch"]) != len(new["sketch"]):
        return False
    unit = max(_UNITS.get(each["type"], 2.0**-24) for each in (old, new))
    if not old["sketch"]:
        return False
    # roundings of n elements, independent: their projection is off by unit / sqrt(3) times the largest; 6 deviations
    allowed = 4 * unit * max(old["sketch"][-1], new["sketch"][-1])
    return all(abs(a - b) <= allowed for a, b in zip(old["sketch"], new["sketch"], strict=True))


def _change(name: str, old: Any, new: Any) -> str:
    return f"{name}: reference {_shown(old)}, here {_shown(new)}"


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return clip(", ".join(map(str, value)) or "none", 80)
    return clip(f"{value:.7g}" if isinstance(value, float) else "all" if value is None else str(value) or "none", 80)
