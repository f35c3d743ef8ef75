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
from onnx_export.validation.report import Finding, NormReport

LOCK_SCHEMA = 1
_FIELDS = ("formula", "variance", "axes", "eps", "near_miss", "compute_dtype", "scale_hash", "bias_hash")
_SAME_EPS = 1e-6  # relative: the same number stored as float16, float32 or float64 attributes, or added as float64


def value_hash(value: np.ndarray | None) -> str:
    """Hash of a scale or bias: of its values in float64 and its shape without axes of length 1; empty for none."""
    if value is None:
        return ""
    flat = np.squeeze(np.asarray(value).astype("<f8"))
    return hashlib.sha256(str(flat.shape).encode() + np.ascontiguousarray(flat).tobytes()).hexdigest()[:16]


def facts(norms: list[NormReport]) -> list[dict[str, Any]]:
    """The facts about a norm that a lock file stores."""
    return [{"name": norm.name} | {name: getattr(norm, name) for name in _FIELDS} for norm in norms]


def lock(norms: list[NormReport]) -> str:
    """A lock file."""
    return json.dumps({"lock": LOCK_SCHEMA, "norms": facts(norms)}, indent=1) + "\n"


def read_lock(text: str) -> list[dict[str, Any]]:
    """The norms of a lock file, or of a report as JSON.

    Raises
    ------
    ValueError
        If it is neither.
    """
    try:
        entries = json.loads(text)["norms"]
        older = {"variance": "operator"}  # absent from lock files of cnorm before the field was added
        return [{"name": str(e["name"])} | {name: (older | e)[name] for name in _FIELDS} for e in entries]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ValueError("not a lock file or a report of this version") from None


def compare(norms: list[dict[str, Any]], reference: list[dict[str, Any]]) -> Iterator[Finding]:
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
            changes = [f"{name} {_shown(old[name])} -> {_shown(new[name])}" for name in _changed(old, new)]
            if changes:
                yield Finding("error", "like-differs", ", ".join(changes), new["name"])
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


def _shown(value: Any) -> str:
    return clip(f"{value:.7g}" if isinstance(value, float) else str(value) or "none", 80)
