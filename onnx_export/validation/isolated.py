"""Run one norm isolated, as a model of its own, on tapped or generated rows at every optimisation level."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import onnx
from onnx import helper

from onnx_export import ort
from onnx_export.graph.scope import Scope, boundary, cut
from onnx_export.nodes import model_nodes
from onnx_export.validation import stress
from onnx_export.validation.judge import Measure, Oracle, worst
from onnx_export.validation.norm import Norm
from onnx_export.validation.patterns import find
from onnx_export.validation.values import Values


def subgraph_model(norm: Norm, nodes, feeds: dict[str, np.ndarray], extra=()) -> onnx.ModelProto:
    """A model of `nodes` alone, the last of which gives the norm's result; its inputs have the shapes of `feeds`.

    `extra` names values that become outputs as well. Stored values are inputs, too, where `feeds` has them.
    """
    kinds = {}
    read = [name for node in nodes for name in node.input if name in feeds and norm.scope.constant(name) is not None]
    for name in dict.fromkeys([*boundary(norm.scope, nodes), *read]):
        kinds[name] = (_element_type(norm.scope, name, feeds[name]), feeds[name].shape)
    return cut(norm.scope, nodes, [norm.y, *extra], kinds)


def cast_feeds(part: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The inputs of `part` from `feeds`, cast to the types it declares."""
    kinds = {value.name: value.type.tensor_type.elem_type for value in part.graph.input}
    return {name: feeds[name].astype(helper.tensor_dtype_to_np_dtype(kind)) for name, kind in kinds.items()}


def makers(model: onnx.ModelProto) -> dict[str, onnx.NodeProto]:
    """The producer of each value of an optimised graph, by name."""
    return {name: node for node in model_nodes(model) for name in node.output}


def fused_into(made: dict[str, onnx.NodeProto], norm: Norm) -> str:
    """The operator that a norm was fused into, with axis and epsilon, given `makers` of the optimised graph.

    "no fused operator" if it was not fused, empty if its result is not in the optimised graph.
    """
    node = made.get(norm.y)
    if node is None:
        return ""
    if not norm.operator and node.op_type in {own.op_type for own in norm.nodes}:
        return "no fused operator"
    facts = [f"{a.name} {helper.get_attribute_value(a):.6g}" for a in node.attribute if a.name in ("axis", "epsilon")]
    return f"{node.op_type} ({', '.join(facts)})" if facts else node.op_type


def _element_type(scope: Scope, name: str, value: np.ndarray) -> int:
    return scope.dtype(name) or helper.np_dtype_to_tensor_dtype(value.dtype)


class Isolated:
    """Models of the norm alone, with the additions before it, which optimisers fuse with it, and their sessions.

    Parameters
    ----------
    model, norm
    producers : list of onnx.NodeProto
        The additions that make the norm's input.
    oracle : Oracle
    feeds : list of dict
        Tapped values that enter the norm and the producers, one dict per iteration.
    made : dict of str to str
        For each optimisation level, the operator that the norm was fused into in the whole model (`fused_into`). A
        model of the norm alone is used at a level only if it is fused into the same operator there; a level
        without such a model is left out of `levels`.
    """

    def __init__(self, norm: Norm, producers, oracle: Oracle, feeds, made: dict[str, str]) -> None:
        self._norm, self._oracle, self._feeds = norm, oracle, feeds
        self._base = feeds[0]
        wide = [*producers, *norm.nodes]
        sums = tuple(dict.fromkeys(node.output[0] for node in producers))
        self._pieces = {"off": subgraph_model(norm, wide, self._base, sums)}
        alone = subgraph_model(norm, norm.nodes, self._base) if producers else None
        self._alone = alone and (alone, ort.Session(alone, "off"))
        candidates = [subgraph_model(norm, wide, self._base), *([self._pieces["off"], alone] if alone else [])]
        for level, wanted in made.items():
            for part in candidates:
                try:
                    if fused_into(makers(ort.optimised(part, level)), norm) == wanted:
                        self._pieces[level] = part
                        break
                except ort.CannotRun:
                    continue
        self._sessions = {level: ort.Session(part, level) for level, part in self._pieces.items()}
        self._made_x = norm.x in sums
        self._made = len(sums)
        self._plan_stress(producers)

    @property
    def levels(self) -> list[str]:
        """Optimisation levels at which the norm alone is fused into the same operator as in its model."""
        return list(self._pieces)

    def tapped(self, level: str, sequential: bool) -> Measure:
        """The error on the tapped values; an empty measure if `level` is not in `levels`.

        `sequential` allows for a kernel that sums sequentially (`JudgedRows.sequential`). Iterations whose shapes
        differ from those of the first are left out.
        """
        if level not in self._pieces:
            return Measure()
        return worst(
            self.measured(level, feeds, partial(self._oracle.runtime_error, feeds), sequential)
            for feeds in self._feeds
            if all(feeds[name].shape == value.shape for name, value in self._base.items())
        )

    def measured(
        self, level: str, feeds: dict[str, np.ndarray], against: Callable[..., Measure], sequential: bool = False
    ) -> Measure:
        """The error at one of `levels`. `against` takes the result and an addition to the bound."""
        y = self.run(level, feeds)
        allowed = self._oracle.sequential(self._oracle.rows(feeds)) if sequential else 0.0
        error = against(y, allowed)
        if error.ratio <= 1 or self._alone is None or against(self._run_alone(feeds), 0.0).ratio > 1:
            return error
        # The norm without the additions is right: their sums were not rounded to their half type. Allow for that.
        return against(y, allowed + self._made * self._oracle.carried(feeds))

    def run(self, level: str, feeds: dict[str, np.ndarray]) -> np.ndarray:
        """The norm's result at one of `levels`."""
        return self._sessions[level].run([self._norm.y], cast_feeds(self._pieces[level], feeds))[0]

    def _run_alone(self, feeds: dict[str, np.ndarray]) -> np.ndarray:
        """The unoptimised result of the norm without the additions, on inputs of the types that the file gives."""
        part, session = self._alone
        return session.run([self._norm.y], cast_feeds(part, feeds))[0]

    # -- generated rows

    def _plan_stress(self, producers) -> None:
        """Choose the input to hold the generated rows; the other terms of the sum before the norm become 0."""
        norm = self._norm
        self.can_stress = norm.x in self._base and not norm.moved and not (norm.operator and norm.operator.lookup)
        if not self.can_stress:
            return
        self._shape = self._base[norm.x].shape
        same = Values(norm.scope).same  # the same value computed twice, or dequantised for each of its uses
        alike = [name for name, value in self._base.items() if name != norm.x and value.shape == self._shape]
        self._copies = [] if producers else [name for name in alike if same(name, norm.x)]
        self.layout = norm.formula.layout(self._shape, norm.axes, norm.nodes[0])
        self._kind = _element_type(norm.scope, norm.x, self._base[norm.x])
        self.dtype = np.dtype(helper.tensor_dtype_to_np_dtype(self._kind))
        terms = norm.terms
        if producers:
            made = {node.output[0] for node in producers}
            used = dict.fromkeys(name for node in producers for name in node.input)
            terms = [name for name in used if name in self._base and name not in made]
        fed_terms = [name for name in terms if name in self._base]
        full = [name for name in fed_terms if self._base[name].shape == self._shape]
        self.can_stress = bool(full) and min(self.layout) > 0
        if self.can_stress:
            self._entry = full[0]
            self._zeros = [name for name in fed_terms if name != self._entry]

    def feed(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        """Inputs for which the norm normalises `rows` [rows, n], up to the rounding of the additions before it."""
        zeros = {name: np.zeros_like(self._base[name]) for name in self._zeros}
        feeds = {**self._base, **zeros, self._entry: self._norm.formula.arrange(rows, self._shape, self._norm.axes)}
        if self._made_x:
            part = self._pieces["off"]
            feeds[self._norm.x] = self._sessions["off"].run([self._norm.x], cast_feeds(part, feeds))[0]
        return feeds | dict.fromkeys(self._copies, feeds[self._norm.x])

    def bare_fails(self, rows: np.ndarray) -> bool:
        """Whether the runtime's plain operator (`stress.bare`) exceeds its bound on these rows too."""
        part = stress.bare(self._norm, *self.layout, self._kind)
        feeds = {"x": rows.astype(self.dtype)}
        y = ort.Session(part, "off").run(["y"], feeds)[0]
        oracle = Oracle(find(part)[0], part)
        return oracle.claim_error(oracle.rows(feeds), y).ratio > 1
