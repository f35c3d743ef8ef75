"""LSTM, GRU and RNN nodes of a file: what they are, findings that need no run, and verdicts by step against float64.

Recurrent operators of other domains, such as the DynamicQuantizeLSTM of com.microsoft, are described and not judged.

Normalised recurrences are chaotic and long ones drift, so each step is judged by itself: it starts from the state of
the float64 trajectory, rounded to the type of the node, and may be off by the bound of `onnx_export.recurrent`. Whole
runs are compared as well, for directions, lengths and initial states. There rounding may move the result by 4 times
what it moves the float64 run by, if every state of it is changed at random within the bound of its step.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx
from onnx import helper, numpy_helper

from cnorm.text import clip
from onnx_export import ort, recurrent
from onnx_export.graph.scope import Scope, scopes, unit_roundoff
from onnx_export.recurrent import Cell, State
from onnx_export.validation.findings import NOT_JUDGED, CellReport
from onnx_export.validation.lock import value_hash
from onnx_export.validation.taps import Tap, expose
from onnx_export.validation.values import stored

_BROKEN = 100.0  # as `verdict.BROKEN`
_MOST_STEPS, _MOST_ROWS, _MOST_CALLS = 256, 8, 4
_MOST_JUDGED = 64  # steps of a direction that are judged by themselves
_DRAWS, _MARGIN = 3, 4.0  # as in `outputs`
_LEVELS = ("off", "basic", "all")
SLOTS = ("X", "W", "R", "B", "sequence_lens", "initial_h", "initial_c", "P")
_FOREIGN = re.compile("(LSTM|GRU|RNN)$")


@dataclass(eq=False)
class Recurrent:
    """One LSTM, GRU or RNN node, or one of another domain that is named like these.

    Attributes
    ----------
    scope : Scope
    node : onnx.NodeProto
    name : str
    cell : recurrent.Cell or None
        None where an attribute is not one of the operator's; `problem` then says why.
    """

    scope: Scope
    node: onnx.NodeProto
    name: str
    cell: Cell | None
    problem: str = ""

    @property
    def foreign(self) -> bool:
        """Whether it is of another domain than ONNX's own, so that it is not judged."""
        return not recurrent.is_recurrent(self.node)

    def input(self, slot: str) -> str:
        """The name of an input, empty for none."""
        place = SLOTS.index(slot)
        return self.node.input[place] if place < len(self.node.input) else ""

    def constant(self, slot: str) -> np.ndarray | None:
        """The stored value of an input, None for none and for one that is computed."""
        name = self.input(slot)
        return self.scope.constant(name) if name else None


def find(model: onnx.ModelProto, weights: dict[str, np.ndarray] | None = None) -> list[Recurrent]:
    """All LSTM, GRU and RNN nodes of a model, and those of other domains."""
    local = {(function.domain, function.name) for function in model.functions}
    found = []
    for scope in scopes(model, weights):
        own = filter(recurrent.is_recurrent, scope.nodes)
        others = [n for n in scope.graph.node if n.domain not in ("", "ai.onnx") and _FOREIGN.search(n.op_type)]
        for node in (*own, *(each for each in others if (each.domain, each.op_type) not in local)):
            name = clip(node.name or next(filter(None, node.output), node.op_type), 250)
            kind = _FOREIGN.search(node.op_type)[0]
            attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
            try:
                found.append(Recurrent(scope, node, name, Cell.from_attributes(kind, attributes)))
            except (ValueError, TypeError) as error:
                found.append(Recurrent(scope, node, name, None, clip(str(error), 200)))
    return found


def describe(each: Recurrent) -> CellReport:
    """The report of a node that is not judged yet, or never will be."""
    w, r = each.scope.shape(each.input("W")), each.scope.shape(each.input("R"))
    size = 1 if each.foreign else 2  # the quantised operators of onnxruntime have their weights transposed
    report = CellReport(
        name=each.name,
        scope=clip(each.scope.label),
        kind=each.node.op_type,
        facts=facts(each),
        inputs=w[size] if w and len(w) == 3 else None,
        units=r[size] if r and len(r) == 3 else None,
        detail=each.problem,
        hashes={slot: _gate_hashes(each, slot) for slot in ("W", "R", "B", "P")},
    )
    if each.foreign:
        domain = clip(each.node.domain, 80)
        report.verdict, report.detail = NOT_JUDGED, f"what the operators of {domain} compute is not judged"
    return report


def _gate_hashes(each: Recurrent, slot: str) -> str:
    """Hashes of a weight, one for each gate and direction; "computed" if the graph computes it, empty for none.

    The bias is taken as it acts: the sum of both halves, but for the candidate of a GRU with the reset gate behind the
    product, whose halves act apart.
    """
    value, cell = each.constant(slot), each.cell
    if value is None or cell is None or each.foreign:
        return "computed" if each.input(slot) else ""
    gates = recurrent.GATES[cell.kind] * (2 if slot == "B" else 1) if slot != "P" else 3
    if value.ndim < 2 or value.shape[1] % gates:
        return value_hash(value)
    parts = [np.split(side.astype(np.float64), gates) for side in value]
    if slot == "B":
        half = gates // 2
        apart = half - 1 if cell.linear_before_reset else half
        parts = [
            [side[k] + side[k + half] for k in range(apart)] + side[apart:half] + side[apart + half :] for side in parts
        ]
    if slot in "BP" and not any(part.any() for side in parts for part in side):
        return ""
    return " ".join(value_hash(part) for side in parts for part in side)


def facts(each: Recurrent) -> dict[str, str]:
    """What the attributes and inputs say, in a normal form: defaults are left out."""
    cell, found = each.cell, {}
    if cell is None:
        return found
    plain = Cell.from_attributes(cell.kind, {"direction": "bidirectional" if len(cell.directions) > 1 else "forward"})
    found["direction"] = "+".join(cell.directions)
    if cell.activations != plain.activations:
        found["activations"] = ", ".join(_named(one) for side in cell.activations for one in side)
    if np.isfinite(cell.clip):
        found["clip"] = f"{cell.clip:g}"
    if cell.kind == "LSTM" and cell.input_forget:
        found["input_forget"] = "1"
    if cell.kind == "GRU":
        found["reset"] = "after the product" if cell.linear_before_reset else "before the product"
    for slot in ("initial_h", "initial_c", "sequence_lens"):
        found[slot] = _source(each, slot)
    return found


def _named(activation: tuple[str, float | None, float | None]) -> str:
    name, *numbers = activation
    given = ", ".join(f"{number:g}" for number in numbers if number is not None)
    return f"{name}({given})" if given else name


def _source(each: Recurrent, slot: str) -> str:
    """Where a state or the lengths come from: "zeros" or, for the lengths, "all"; "constant"; "given"."""
    if not each.input(slot):
        return "all" if slot == "sequence_lens" else "zeros"
    value = stored(each.scope, each.input(slot))
    if value is None:
        return "given"
    return "zeros" if slot != "sequence_lens" and not value.any() else "constant"


# ------------------------------------------------------------------------------------------------ the run


def values_of(run, found: Sequence[Recurrent]) -> list[list[dict[str, np.ndarray]]]:
    """The inputs and outputs of each node in the unoptimised run, by slot, one dict for each iteration around it."""
    from onnx_export.validation.run import _iterations, _sample_indices

    taps: dict[tuple[int, str], Tap] = {}
    for index, each in enumerate(found):
        for slot in () if each.foreign else SLOTS:
            name = each.input(slot)
            if name and each.constant(slot) is None:
                taps[index, slot] = Tap(each.scope, name, copied=True)
    blocked = {index for (index, _), tap in taps.items() if tap.obstacle}
    taps = {key: tap for key, tap in taps.items() if key[0] not in blocked}
    exposed, names = expose(run.model, list(taps.values()))
    ran = run.session(exposed, "off").run(names, run.feeds) if names else []
    stacked = {key: _iterations(value, tap.levels) for (key, tap), value in zip(taps.items(), ran, strict=True)}
    result = []
    for index, each in enumerate(found):
        mine = {slot: stacked[i, slot] for i, slot in stacked if i == index}
        calls = min(map(len, mine.values()), default=0)
        chosen = _sample_indices(calls)[:: max(1, calls // _MOST_CALLS)][:_MOST_CALLS]
        fixed = {slot: each.constant(slot) for slot in SLOTS if each.input(slot) and slot not in mine}
        result.append([fixed | {slot: values[i] for slot, values in mine.items()} for i in chosen])
    return result


class Judge:
    """Judges one node on the inputs of one call of it.

    Parameters
    ----------
    model : onnx.ModelProto
        Of which the opsets are taken.
    each : Recurrent
    values : dict of str to ndarray
        Its inputs by slot.
    """

    def __init__(self, model: onnx.ModelProto, each: Recurrent, values: dict[str, np.ndarray]) -> None:
        assert each.cell is not None
        self.cell, self.values = each.cell, _shortened(each.cell, values)
        self.dtype = self.values["X"].dtype
        self.unit = unit_roundoff(helper.np_dtype_to_tensor_dtype(self.dtype))
        self.sides = recurrent.directions(self.cell, *(self.values.get(slot) for slot in ("W", "R", "B", "P")))
        self.inputs = [self.values.get(slot) for slot in SLOTS]
        self._states = 2 if self.cell.kind == "LSTM" else 1
        self._part = _alone(model, each.node, self.values)
        self._sessions: dict[str, ort.Session] = {}

    def run(self, level: str, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Y, Y_h and Y_c of the node by itself at an optimisation level."""
        if level not in self._sessions:
            self._sessions[level] = ort.Session(self._part, level)
        names = [value.name for value in self._part.graph.output]
        return dict(zip(names, self._sessions[level].run(names, feeds), strict=True))

    # -- single steps

    def single_steps(self, level: str, scale: float = 1.0, seed: int = 0) -> Iterator[tuple[str, float, float]]:
        """(output, error, bound) of the worst element of Y_h and Y_c.

        With another `scale` than 1 the inputs are multiplied by it and the states are random numbers of its root.
        """
        x, before = self._starts(scale, seed)
        layout = self.cell.layout
        feeds = {"X": x[:, None] if layout else x[None]}
        if "sequence_lens" in self.values:
            feeds["sequence_lens"] = np.ones(len(x), np.int32)
        for slot, which in (("initial_h", "h"), ("initial_c", "c")):
            if getattr(before[0], which) is not None:
                state = np.stack([getattr(side, which).value for side in before]).astype(self.dtype)
                feeds[slot] = np.swapaxes(state, 0, 1) if layout else state
        found = self.run(level, feeds)
        after = [
            side.step(x.astype(np.float64), State.exact(*_rounded(state, self.dtype), self.unit))
            for side, state in zip(self.sides, before, strict=True)
        ]
        for slot, which in (("Y_h", "h"), ("Y_c", "c")):
            if slot in found:
                value = np.swapaxes(found[slot], 0, 1) if layout else found[slot]
                exact = np.stack([getattr(side, which).value for side in after])
                bound = np.stack([getattr(side, which).error for side in after]) + self._rounding(exact)
                yield (slot, *_worst(value, exact, bound))

    def _starts(self, scale: float, seed: int) -> tuple[np.ndarray, list[State]]:
        """x [rows, inputs] and the states before the judged steps, of each direction."""
        x = self.values["X"]
        x = np.swapaxes(x, 0, 1) if self.cell.layout else x
        lengths = self.values.get("sequence_lens")
        lengths = np.full(x.shape[1], len(x)) if lengths is None else np.asarray(lengths).reshape(-1)
        chosen = np.unique(np.linspace(0, len(x) - 1, min(len(x), _MOST_JUDGED)).round().astype(int))
        given = (self.values.get("initial_h"), self.values.get("initial_c"))
        before, rows = [], None
        for i, side in enumerate(self.sides):
            start = recurrent.initial(self.cell, side, i, x.shape[1], given, self.unit)
            taken = recurrent.steps(side, self.cell.directions[i] == "reverse", x.astype(np.float64), lengths, start)
            by_time = {step.time: step for step in taken}
            rows = np.concatenate([by_time[t].active[:, 0] for t in chosen])
            states = [
                np.concatenate([getattr(by_time[t].before, which).value for t in chosen])[rows]
                for which in ("h", "c")
                if getattr(start, which) is not None
            ]
            before.append(State.exact(*(*states, None)[:2], self.unit))
        picked = np.concatenate(list(x[chosen]))[rows]
        if scale != 1:
            rng = np.random.default_rng(seed)
            picked = (scale * picked).astype(self.dtype)
            before = [
                State.exact(
                    *(
                        None if value is None else np.sqrt(scale) * rng.standard_normal(value.value.shape)
                        for value in (state.h, state.c)
                    ),
                    self.unit,
                )
                for state in before
            ]
        return picked, before

    # -- the whole run

    def whole_run(self, level: str, seed: int = 0) -> Iterator[tuple[str, float, float]]:
        """(output, error, bound) of the worst element of Y, Y_h and Y_c over all steps."""
        x = self.values["X"]
        rows = x.shape[0 if self.cell.layout else 1]
        shape = (rows, len(self.sides)) if self.cell.layout else (len(self.sides), rows)
        start = np.zeros((*shape, self.sides[0].units), self.dtype)
        states = {slot: self.values.get(slot, start) for slot in ("initial_h", "initial_c")[: self._states]}
        lengths = {slot: self.values[slot] for slot in ("sequence_lens",) if slot in self.values}
        found = self.run(level, {"X": x} | lengths | states)
        exact = recurrent.run(self.cell, self.inputs)
        rng = np.random.default_rng(seed)
        moved = [recurrent.run(self.cell, self.inputs, unit=self.unit, move=_mover(rng)) for _ in range(_DRAWS)]
        for place, slot in enumerate(("Y", "Y_h", "Y_c")):
            if slot in found:
                spread = max(float(np.max(np.abs(each[place] - exact[place]), initial=0.0)) for each in moved)
                yield (slot, *_worst(found[slot], exact[place], _MARGIN * spread + self._rounding(exact[place])))

    def _rounding(self, exact: np.ndarray) -> np.ndarray:
        """Half an ulp of a result."""
        kind = self.dtype if self.dtype.kind == "f" else np.dtype(np.float32)
        with np.errstate(all="ignore"):
            return 0.5 * np.abs(np.spacing(np.abs(exact).astype(kind))).astype(np.float64)


def judge(model: onnx.ModelProto, each: Recurrent, report: CellReport, calls, seed: int) -> None:
    """Set the verdict on a node from the inputs of some calls of it (`values_of`)."""
    if each.foreign:
        return
    calls = [values for values in calls if "X" in values and values["X"].size]
    if each.cell is None or not calls:
        report.detail = report.detail or "no step reached it: a branch not taken, a loop not entered, an empty input"
        return
    judges = [Judge(model, each, values) for values in calls]
    report.verdict, report.detail = "ok", ""
    for level in _LEVELS:
        slot, error, bound = _of_all(judges, level, seed)
        if np.isnan(bound):
            report.verdict, report.detail = "not exercised", "no result is finite"
            return
        if level == "off":
            report.error, report.bound = error, bound
        ratio = error / max(bound, np.finfo(float).tiny)
        if ratio > 1:
            report.error, report.bound = error, bound
            report.verdict = "wrong" if ratio > _BROKEN or level != "off" else "inaccurate"
            report.blame = "kernel" if level == "off" else "optimiser"
            report.detail = f"onnxruntime, optimisation {level!r}: {slot} is {_amount(ratio)}{_unusual(report)}"
            return
    for scale in (0.01, 100.0):
        slot, error, bound = _largest(judges[0].single_steps("off", scale, seed))
        ratio = error / max(bound, np.finfo(float).tiny)
        if ratio > 1:
            report.verdict, report.blame = "risky", "kernel"
            report.detail = f"fails on inputs of scale {scale:g}: {slot} is {_amount(ratio)}{_unusual(report)}"
            return


def _of_all(judges: Sequence[Judge], level: str, seed: int) -> tuple[str, float, float]:
    measures = [m for each in judges for m in (*each.single_steps(level), *each.whole_run(level, seed))]
    return _largest(measures)


def _largest(measures) -> tuple[str, float, float]:
    """The measure whose ratio of error and bound is largest."""
    return max(measures, key=lambda m: m[1] / max(m[2], np.finfo(float).tiny), default=("", 0.0, 0.0))


def _amount(ratio: float) -> str:
    return "NaN for finite input" if np.isinf(ratio) else f"off by {ratio:.3g} times the bound"


def _unusual(report: CellReport) -> str:
    """The attributes that a runtime may compute otherwise, for a message."""
    names = ("activations", "clip", "input_forget")
    found = [f"{name} {report.facts[name]}" for name in names if name in report.facts]
    return f" (with {', '.join(found)})" if found else ""


def _mover(rng: np.random.Generator):
    """Changes a state at random within the bounds of its errors."""

    def moved(value):
        if value is None:
            return None
        return replace(value, value=value.value + value.error * rng.uniform(-1, 1, value.value.shape))

    return lambda state: State(moved(state.h), moved(state.c))


def _rounded(state: State, dtype: np.dtype) -> list[np.ndarray | None]:
    return [None if each is None else each.value.astype(dtype).astype(np.float64) for each in (state.h, state.c)]


def _worst(value: np.ndarray, exact: np.ndarray, bound: np.ndarray | float) -> tuple[float, float]:
    """(error, bound) where their ratio is largest; elements beyond the type's range are left out."""
    if value.shape != exact.shape:
        return np.inf, 0.0
    limit = np.finfo(value.dtype).max if value.dtype.kind == "f" else np.inf
    with np.errstate(all="ignore"):
        judged = np.isfinite(exact) & (np.abs(exact) <= limit)
        error = np.where(judged, np.abs(value.astype(np.float64) - exact), 0.0)
        error = np.where(np.isnan(error), np.inf, error)
        bound = np.broadcast_to(np.asarray(bound, np.float64), error.shape)
        ratio = error / np.maximum(bound, np.finfo(float).tiny)
    if not ratio.size:
        return 0.0, 0.0
    at = np.unravel_index(np.argmax(ratio), ratio.shape)
    return float(error[at]), float(bound[at])


def _shortened(cell: Cell, values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The values of a call of at most _MOST_STEPS steps and _MOST_ROWS rows."""
    x = values["X"]
    batch = 0 if cell.layout else 1
    cut = {"X": x[:_MOST_ROWS, :_MOST_STEPS] if cell.layout else x[:_MOST_STEPS, :_MOST_ROWS]}
    rows, steps = cut["X"].shape[batch], cut["X"].shape[1 - batch]
    for slot in ("initial_h", "initial_c"):
        if slot in values:
            cut[slot] = values[slot][:rows] if cell.layout else values[slot][:, :rows]
    if "sequence_lens" in values:
        cut["sequence_lens"] = np.minimum(values["sequence_lens"].reshape(-1)[:rows], steps)
    return values | cut


def _alone(model: onnx.ModelProto, node: onnx.NodeProto, values: dict[str, np.ndarray]) -> onnx.ModelProto:
    """A model of the node with its weights stored; the other inputs are named by slot, and their sizes are open."""
    fed = {"X", "initial_h", "sequence_lens"} | ({"initial_c"} if node.op_type == "LSTM" else set())
    names = [slot if slot in values or (slot in fed and slot != "sequence_lens") else "" for slot in SLOTS]
    names = names if node.op_type == "LSTM" else names[:6]
    alone = onnx.NodeProto()
    alone.CopyFrom(node)
    del alone.input[:], alone.output[:]
    alone.input.extend(names)
    alone.output.extend(("Y", "Y_h", "Y_c")[: 3 if node.op_type == "LSTM" else 2])
    kinds = {slot: helper.np_dtype_to_tensor_dtype(values[slot].dtype) for slot in values}
    kinds = {"initial_h": kinds["X"], "initial_c": kinds["X"]} | kinds
    inputs = [
        helper.make_tensor_value_info(slot, kinds[slot], [None] if slot == "sequence_lens" else [None] * 3)
        for slot in names
        if slot in fed
    ]
    stored = [numpy_helper.from_array(np.ascontiguousarray(values[s]), s) for s in names if s and s not in fed]
    outputs = [onnx.ValueInfoProto(name=name) for name in alone.output]
    graph = helper.make_graph([alone], "alone", inputs, outputs, stored)
    return helper.make_model(graph, ir_version=model.ir_version, opset_imports=model.opset_import)
