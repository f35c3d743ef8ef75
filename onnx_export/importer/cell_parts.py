"""The fields and weights of a cell, from the affine forms and norms of its pre-activations."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from cnorm.cells.specs import GATES
from onnx_export.importer.affine import Affine, affine
from onnx_export.importer.normed_rows import Normed

__all__ = ["Found", "Leaf", "NoCellError", "assembled"]


class NoCellError(Exception):
    """What was searched is none of the cells that a spec describes."""


@dataclass(frozen=True, eq=False)
class Leaf:
    """A pre-activation [units]: its affine form, the norm of what depends on h if there is one, and the vector r h if
    its product follows a reset gate."""

    numbers: np.ndarray
    form: Affine
    offset: float = 0.0  # one constant that is added to all units last
    of_h: Normed | None = None
    of_x: Normed | None = None
    reset: np.ndarray | None = None


@dataclass(frozen=True, eq=False)
class Found:
    """A cell: numbers of its input, of its old and new states by letter, its fields of a spec, eps, and parts.

    `parts` has arrays [gates, units, ...] in the order of `GATES`, by the meanings of `CellSpec.weights`.
    """

    kind: str
    x: np.ndarray
    old: dict[str, np.ndarray]
    new: dict[str, np.ndarray]
    fields: dict
    eps: float | None
    parts: dict[str, np.ndarray] = field(default_factory=dict)


def assembled(reading, trial, scope: str, outer, old, new) -> Found:
    """The cell that agreed in a trial."""
    kind, chosen, fields, norm = trial
    after = "m" in chosen
    leaves = {"x": [chosen[gate] for gate in GATES[kind]]}
    leaves["h"] = [chosen["m"] if after and leaf is chosen["n"] else leaf for leaf in leaves["x"]]
    fields = fields | {"scope": scope} | {name: outer[name] for name in ("zoneout", "projection_clip") if name in outer}
    parts = {"bias": np.stack([leaf.form.bias for leaf in leaves["x"]])}
    if after:
        _check_after(reading, chosen)
        parts["bias_n"] = chosen["m"].form.bias.copy()
    _offsets(kind, leaves["x"], fields, parts)
    if scope == "none":
        x, epses = _plain(reading, chosen, leaves, fields, parts), set()
    else:
        x, epses = _normalised(reading, leaves, fields, parts)
    if not parts["weight_h"].any():
        raise NoCellError
    if norm is not None:
        if not np.array_equal(norm.index, np.arange(len(norm.index))):
            raise NoCellError
        epses.add(norm.eps)
        parts |= {"gain_c": norm.gain, "bias_c": norm.bias}
    parts |= {name: outer[name] for name in ("weight_p", "bias_p") if name in outer and outer[name].any()}
    if len(epses) > 1:
        raise NoCellError
    return Found(kind, x, old, new, fields, epses.pop() if epses else None, parts)


def _check_after(reading, chosen) -> None:
    """What the reset gate multiplies is of h alone, what is added to it of x."""
    terms = [chosen[gate].form.terms.tolist() for gate in "nm"]
    if set(terms[0]) & reading.old_h or any(n not in reading.old_h and not reading.depends[n] for n in terms[1]):
        raise NoCellError


def _offsets(kind: str, leaves, fields, parts) -> None:
    """A constant that is added to the forget or update gate last, apart from its bias."""
    gate, name = {"LSTM": ("f", "forget_bias"), "GRU": ("z", "update_bias")}.get(kind, ("", ""))
    if gate:
        at = GATES[kind].index(gate)
        offset, bias = leaves[at].offset, parts["bias"][at]
        if offset and (fields["scope"] != "none" or np.ptp(bias)):
            fields[name] = float(str(np.float32(offset)))
            parts["bias"][at] = bias - offset


def _plain(reading, chosen, leaves, fields, parts) -> np.ndarray:
    """Weights of pre-activations without norms, into `parts`; the numbers of x."""
    x = _inputs(reading, [leaf.form for leaf in leaves["x"]])
    parts["weight_x"] = np.stack([leaf.form.columns(x) for leaf in leaves["x"]])
    parts["weight_h"] = np.stack([leaf.form.columns(reading.before) for leaf in leaves["h"]])
    if fields.get("reset") == "before":
        parts["weight_h"][2] = chosen["n"].form.columns(chosen["n"].reset)
    return x


def _normalised(reading, leaves, fields, parts) -> tuple[np.ndarray, set[float]]:
    """Weights inside norms, their gains and biases, into `parts`; the numbers of x and the eps that there are."""
    split = fields["scope"] == "split"
    norms = {"h": [leaf.of_h for leaf in leaves["h"]]} | ({"x": [leaf.of_x for leaf in leaves["x"]]} if split else {})
    if any(one is None for each in norms.values() for one in each):
        raise NoCellError
    groupings = {_grouping(each) for each in norms.values()}
    if len(groupings) != 1 or None in groupings:
        raise NoCellError
    fields["grouping"] = groupings.pop()
    forms = {key: [_rows(reading.trace, one) for one in each] for key, each in norms.items()}
    of_x = forms["x" if split else "h"]
    if split and any(number in reading.old_h for form in of_x for number in form.terms.tolist()):
        raise NoCellError
    x = _inputs(reading, of_x)
    parts["weight_x"] = np.stack([form.columns(x) for form in of_x])
    parts["weight_h"] = np.stack([form.columns(reading.before) for form in forms["h"]])
    for key, each in norms.items():
        parts[f"gain_{key}" if split else "gain"] = np.stack([one.gain for one in each])
        for at, one in enumerate(each):
            if "bias_n" in parts and key == "h" and at == 2:
                parts["bias_n"] += one.bias
            else:
                parts["bias"][at] += one.bias
        inside = np.stack([form.bias for form in forms[key]])
        if inside.any():
            parts[f"inside_{key if split else 'x'}"] = inside
    return x, {one.eps for each in norms.values() for one in each}


def _inputs(reading, forms) -> np.ndarray:
    """The elements of x, in the order of their first use."""
    skipped = reading.old_h | {n for leaf in reading.leaves if leaf.reset is not None for n in leaf.reset.tolist()}
    terms = (number for form in forms for number in form.terms.tolist() if number not in skipped)
    return np.array(list(dict.fromkeys(terms)), np.int64)


def _rows(trace, one: Normed) -> Affine:
    """The affine form of what a norm has in the places of one gate."""
    whole = affine(trace, one.row, atoms=True)
    return Affine(whole.terms, whole.weight[one.index], whole.bias[one.index])


def _grouping(norms: list[Normed]) -> str | None:
    """Which gates one norm covers."""
    covers: dict[bytes, list[int]] = {}
    for at, one in enumerate(norms):
        covers.setdefault(one.row.tobytes(), []).append(at)
    for members in covers.values():
        used = np.concatenate([norms[at].index for at in members])
        if len(used) != len(norms[members[0]].row) or len(set(used.tolist())) < len(used):
            return None
    groups = sorted(covers.values())
    if len(groups) == 1:
        return "joint"
    if len(groups) == len(norms):
        return "per_gate"
    return "gates_and_candidate" if groups == [[0, 1], [2]] else None
