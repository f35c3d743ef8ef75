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
from onnx_export.validation.report import Finding, ValidationReport

LOCK_SCHEMA = 1
_FIELDS = ("formula", "variance", "axes", "eps", "near_miss", "compute_dtype", "scale_hash", "bias_hash")
_SAME_EPS = 1e-6  # relative: the same number stored as float16, float32 or float64 attributes, or added as float64


def value_hash(value: np.ndarray | None) -> str:
    """Hash of a scale or bias: of its values in float64 and its shape without axes of length 1; empty for none."""
    if value is None:
        return ""
    flat = np.squeeze(np.asarray(value).astype("<f8"))
    return hashlib.sha256(str(flat.shape).encode() + np.ascontiguousarray(flat).tobytes()).hexdigest()[:16]


Facts = dict[str, list[dict[str, Any]]]


def facts(report: ValidationReport) -> Facts:
    """The facts about the norms and the recurrent nodes that a lock file stores."""
    return {
        "norms": [{"name": norm.name} | {name: getattr(norm, name) for name in _FIELDS} for norm in report.norms],
        "cells": [
            {"name": cell.name, "kind": cell.kind, "facts": cell.facts, "hashes": cell.hashes} for cell in report.cells
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
        older = {"variance": "operator"}  # absent from lock files of cnorm before the field was added
        norms = [{"name": str(e["name"])} | {name: (older | e)[name] for name in _FIELDS} for e in data["norms"]]
        found = {"norms": norms}
        if "cells" in data:
            found["cells"] = [
                {
                    "name": str(e["name"]),
                    "kind": str(e["kind"]),
                    "facts": _texts(e["facts"]),
                    "hashes": _texts(e["hashes"]),
                }
                for e in data["cells"]
            ]
        return found
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ValueError("not a lock file or a report of this version") from None


def _texts(given: dict[str, Any]) -> dict[str, str]:
    return {str(name): str(value) for name, value in given.items()}


def compare(found: Facts, reference: Facts) -> Iterator[Finding]:
    """A finding for each norm and recurrent node that is missing, extra or different from the reference."""
    yield from _compare_norms(found["norms"], reference["norms"])
    if "cells" in reference:  # absent from lock files of cnorm before they were added
        yield from _compare_cells(found["cells"], reference["cells"])


def _compare_cells(cells: list[dict[str, Any]], reference: list[dict[str, Any]]) -> Iterator[Finding]:
    """Recurrent nodes are matched in order."""
    if len(cells) != len(reference):
        message = f"{len(cells)} recurrent nodes, the reference has {len(reference)}"
        yield Finding("error", "like-count", message)
    for new, old in zip(cells, reference, strict=False):
        changes = [] if new["kind"] == old["kind"] else [_change("kind", old["kind"], new["kind"])]
        for name in dict.fromkeys([*old["facts"], *new["facts"]]):
            was, now = old["facts"].get(name, "none"), new["facts"].get(name, "none")
            changes += [] if was == now else [_change(name.replace("_", " "), was, now)]
        weights = [name for name in old["hashes"] if _other_weights(old["hashes"][name], new["hashes"].get(name, ""))]
        moved = {name: _moved(old["hashes"][name], new["hashes"].get(name, "")) for name in weights}
        orders = list(dict.fromkeys(filter(None, moved.values())))
        changes += [f"its gates are those of the reference in the order {orders[0]}"] if orders else []
        changes += [f"other {name}" for name in weights if not moved[name]]
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
            changes = [_change(name, old[name], new[name]) for name in _changed(old, new)]
            if changes:
                yield Finding("error", "like-differs", "; ".join(changes), new["name"])
        if kind != "equal":
            for old in reference[a + pairs : b]:
                yield Finding("error", "like-differs", "not there any more", clip(old["name"], 250))
            for new in norms[c + pairs : d]:
                yield Finding("error", "like-differs", "not in the reference", new["name"])


def _key(norm: dict[str, Any], by_name: bool) -> tuple[str, ...]:
    return (norm["name"],) if by_name else tuple(str(norm[name]) for name in _FIELDS if name not in ("eps", "variance"))


def _changed(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """The fields that differ. How an operator computes its variance is the runtime's choice, and no difference."""
    changed = [name for name in _FIELDS if not _alike(old[name], new[name])]
    by_runtime = "operator" in (old["variance"], new["variance"])
    return [name for name in changed if name != "variance" or not by_runtime]


def _alike(a: Any, b: Any) -> bool:
    if isinstance(a, float | int) and isinstance(b, float | int):
        return math.isclose(a, b, rel_tol=_SAME_EPS)
    return bool(a == b)


def _change(name: str, old: Any, new: Any) -> str:
    return f"{name}: reference {_shown(old)}, here {_shown(new)}"


def _shown(value: Any) -> str:
    return clip(f"{value:.7g}" if isinstance(value, float) else str(value) or "none", 80)
