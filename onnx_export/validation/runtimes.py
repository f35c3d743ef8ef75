"""Findings on what other runtimes were seen to do with the operators of a file (`onnx_export.runtimes`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import TensorProto

from onnx_export import runtimes
from onnx_export.graph.scope import scopes
from onnx_export.runtimes import DATA, Observation, Table, Traits
from onnx_export.runtimes.traits import traits_of
from onnx_export.validation.findings import Finding
from onnx_export.validation.norm import RMS, Norm
from onnx_export.validation.recurrent import Recurrent

_HALVES = (TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE)


@dataclass(frozen=True)
class Subject:
    """A node, or a norm in elementary operators, as the tables name it."""

    name: str
    operator: str
    traits: Traits
    judged: bool = False  # a norm or a recurrent node, not one beside them

    def __str__(self) -> str:
        return " with ".join(filter(None, [self.operator, ", ".join(sorted(self.traits))]))


def compare(
    model: onnx.ModelProto,
    weights: dict[str, np.ndarray],
    norms: Sequence[Norm],
    cells: Sequence[Recurrent],
    wanted: Sequence[str],
) -> Iterator[Finding]:
    """What is known of a file in the runtimes `wanted`, "NAME" or "NAME@VERSION"; without any, one line on all.

    Findings on magnitudes that the file alone does not show are notes with the code `runtime-data`; the report turns
    them into errors where such rows were seen.
    """
    subjects = list(dict.fromkeys(_subjects(model, weights, norms, cells)))
    if not wanted:
        yield from _in_one_line(subjects)
    for each in wanted:
        name, _, version = each.partition("@")
        table = runtimes.table(name)
        elsewhere = version not in ("", table.version)
        if elsewhere:
            message = f"{name} {version} was not tried; what is said of it was seen in {table.version}"
            yield Finding("note", "runtime-untried", message)
        for subject in subjects:
            yield from _known(table, subject, "warning" if elsewhere else "error")


def _subjects(model, weights, norms, cells) -> Iterator[Subject]:
    names = {id(norm.nodes[-1]): norm.name for norm in norms if norm.operator}
    names |= {id(cell.node): cell.name for cell in cells}
    operators = {each.operator for name in runtimes.names() for each in runtimes.table(name).observations}
    for scope in scopes(model, weights):
        for node in scope.nodes:
            if node.domain in ("", "ai.onnx") and node.op_type in operators:
                name = names.get(id(node)) or node.name or next(filter(None, node.output), "")
                try:
                    traits = traits_of(node, scope)
                except Exception:  # it is not as the standard says, which other findings name
                    continue
                yield Subject(name, node.op_type, traits, id(node) in names)
    for norm in norms:
        if not norm.operator:
            kind = TensorProto.DataType.Name(norm.compute_dtype).lower()
            traits = {"one-pass": norm.variance == "one-pass", "rms": norm.formula is RMS}
            traits[kind] = norm.compute_dtype in _HALVES
            yield Subject(norm.name, norm.form, frozenset(each for each, holds in traits.items() if holds), True)


def _known(table: Table, subject: Subject, level: str) -> Iterator[Finding]:
    faults = table.faults(subject.operator, subject.traits)
    for fault in faults:
        message = f"{_did(table, fault)} ({runtimes.SCRIPT}, {table.seen})"
        if not fault.traits <= subject.traits:
            yield Finding("note", "runtime-data", message, subject.name)
        else:
            refused = fault.outcome == "refuses"
            yield Finding(level, "runtime-refuses" if refused else "runtime-differs", message, subject.name)
    if not faults and not table.covers(subject.operator, subject.traits):
        message = f"{table.runtime} {table.version} was not tried with {subject}"
        yield Finding("warning" if subject.judged else "note", "runtime-untried", message, subject.name)


def _did(table: Table, fault: Observation) -> str:
    """What a runtime did, as a clause."""
    data = "".join(f", where {DATA[trait]}" for trait in sorted(fault.traits & DATA.keys()))
    form = str(Subject("", fault.operator, fault.fixed))
    did = {"not finite": "gives NaN or infinities for", "other shape": "gives another shape for"}
    did |= {"refuses": "refuses"}
    if fault.outcome in did:
        return f"{table.runtime} {table.version} {did[fault.outcome]} {form}{data}"
    was = "is " if fault.outcome.startswith("off") else ""
    return f"{table.runtime} {table.version} {was}{fault.outcome}: {form}{data}"


def _in_one_line(subjects: Sequence[Subject]) -> Iterator[Finding]:
    """The runtimes that were seen to compute one of the nodes otherwise, without a word."""
    found = {}
    for name in runtimes.names():
        table = runtimes.table(name)
        for subject in subjects:
            for fault in table.faults(subject.operator, subject.traits):
                if fault.outcome != "refuses" and fault.traits <= subject.traits:
                    found[name] = f"{name} {table.version}"
    if found:
        message = f"computed otherwise by {', '.join(found.values())}; --runtime NAME says how"
        yield Finding("note", "runtimes", message)
