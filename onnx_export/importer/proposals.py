"""Arguments with which a file can be read that is refused without: sizes of open dimensions, which are 1 then, sampling
rates, and inputs that are no states."""

from __future__ import annotations

import re
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import combinations
from math import prod
from time import process_time

import onnx

from onnx_export.graph.constants import constant_node, stored_value
from onnx_export.importer.dimensions import open_dimensions, shape_of
from onnx_export.importer.given import undecided
from onnx_export.importer.interface import Plan

__all__ = ["one_step", "proposals"]

# Frames of audio at common rates, with and without context; bands of spectra; windows. The likely ones first,
# and 512 with a context of 64 before 512 alone, which such a file takes, too.
SIZES = (576, 512, 160, 256, 320, 480, 80, 40, 64, 257, 128, 400, 640, 960, 1024, 513, 16, 10, 20, 30, 32, 50, 60, 100,
         8, 4, 2, 96, 192, 240, 384, 768, 800, 1280, 1536, 1600, 2048)  # fmt: skip
LENGTH = r"(?i)len(gth)?s?$"  # ends the name of an input that says how many frames of a call are no padding
RATES = 16000, 8000  # of speech
SECONDS = 6.0  # of processor time in which sizes are tried; the last may take as long again
MOST = 3
MAX_FRAMES = 8  # inputs that may be states or x, of which all choices are tried


def proposals(model: onnx.ModelProto, given: dict, read: Callable[..., Plan]) -> list[str]:
    """Lines for a refusal: arguments with which the file can be imported.

    They are inputs that have the size of an output and are x all the same, as few as possible; or sizes of one open
    dimension, the others being 1; the last line names those that were tried. A file that wants the value of an input
    gets one that the file compares it with, or a sampling rate if its name says so.

    Parameters
    ----------
    model : onnx.ModelProto
    given : dict
        How the file was read, as arguments of `read`.
    read : callable
        Raises an error if the file has no layers, or they do not compute what it does; else how it was read.
    """
    until = process_time() + SECONDS
    missing = [value.name for value in undecided(model, given["inputs"])]
    if not missing:
        return _frames(model, given, read, until) or _sizes(model, given, read, until)
    tried = []
    if len(missing) == 1 and re.search(LENGTH, missing[0]):
        ones = dict.fromkeys(open_dimensions(_varying(model, given | {"inputs": {missing[0]: 1}}), given["dims"]), 1)
        more = {"inputs": given["inputs"] | {missing[0]: 1}, "dims": given["dims"] | ones}
        if ones and _found(read, given | more, until):
            sizes = ", ".join(f"{label!r}: 1" for label in ones)
            return [f"with inputs={{{missing[0]!r}: 1}}, dims={{{sizes}}} it has layers, and a call is one frame"]
    for value in _values(model, missing[0]) if len(missing) == 1 else ():
        more = given | {"inputs": given["inputs"] | {missing[0]: value}}
        said = f"inputs={{{missing[0]!r}: {value}}}"
        if _found(read, more, until):
            return [f"with {said} it has layers"]
        *lines, tried = _sizes(model, more, read, until) or [""]
        if lines:
            return [*(line.replace("with ", f"with {said}, ", 1) for line in lines), tried]
    return [tried] if tried else []


def one_step(model: onnx.ModelProto, given: dict, read: Callable[..., Plan]) -> list[str]:
    """The line for calls of one frame, where the file has the states of these but is no stream in calls of several."""
    until = process_time() + SECONDS
    for label in _labels(model, given):
        if process_time() > until:
            break
        found = _found(read, given | {"dims": given["dims"] | {label: 1}}, until)
        if found and found.states:
            return [
                f"with dims={{{label!r}: 1}} it has layers: calls of one frame, which see zeros for those before it"
            ]
    return []


def _frames(model: onnx.ModelProto, given: dict, read: Callable[..., Plan], until: float) -> list[str]:
    """The fewest inputs that must be frames, so that the rest are states."""
    varying = _varying(model, given)
    if len(varying) < 2 or given["frames"]:
        return []
    sizes = {name: prod(shape_of(value, given["dims"], 1, None)) for name, value in varying.items()}
    results = Counter(prod(shape_of(value, given["dims"], 1, None)) for value in model.graph.output)
    either = [name for name in varying if name not in given["states"] and sizes[name] in results]
    for count in range(1, len(either) + 1) if len(either) <= MAX_FRAMES else ():
        lines = []
        for names in map(list, combinations(either, count)):
            if len(lines) == MOST or process_time() > until:
                return lines
            states = Counter(sizes[name] for name in varying if name in given["states"] or name in {*either} - {*names})
            if states <= results and _found(read, given | {"frames": names}, until):
                lines.append(f"with frames={names!r} it has layers; the caller gives these at each step")
        if lines:
            return lines
    return []


def _sizes(model: onnx.ModelProto, given: dict, read: Callable[..., Plan], until: float) -> list[str]:
    lines, tried = [], []
    labels = _labels(model, given)
    for label in labels:
        for size in SIZES:
            if len(lines) == MOST or process_time() > until:
                return [*lines, f"sizes tried: {', '.join(map(str, dict.fromkeys(tried)))}"]
            tried.append(size)
            if _found(read, given | {"dims": given["dims"] | {label: size}}, until):
                lines.append(f"with dims={{{label!r}: {size}}} it has layers")
    return [*lines, f"sizes tried: {', '.join(map(str, SIZES))}"] if labels else []


def _labels(model: onnx.ModelProto, given: dict) -> list[str]:
    """The open dimensions, last those of rows of a batch, which are in front."""
    labels = open_dimensions(_varying(model, given), given["dims"])
    return sorted(labels, key=lambda label: -min(labels[label].values()))


def _varying(model: onnx.ModelProto, given: dict) -> dict[str, onnx.ValueInfoProto]:
    """The inputs that are frames or states."""
    known = {tensor.name for tensor in model.graph.initializer}.union(given["inputs"])
    return {value.name: value for value in model.graph.input if value.name not in known}


def _found(read: Callable[..., Plan], given: dict, until: float) -> Plan | None:
    try:
        with _interrupted(until + SECONDS):
            return read(**given)
    except (Exception, _Late):  # whatever the file, which is untrusted, does with these, as without memory for them
        return None


@contextmanager
def _interrupted(until: float) -> Iterator[None]:
    """Raise `_Late` at some processor time, if signals can be handled: else the reasons could come too late."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGPROF, _late)
    try:
        signal.setitimer(signal.ITIMER_PROF, max(until - process_time(), 1e-3))
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


class _Late(BaseException):
    """No Exception, which would be taken for a fault of the node that is read just then."""


def _late(*_) -> None:
    raise _Late


def _values(model: onnx.ModelProto, name: str) -> list[int]:
    """What an input of one integer may be."""
    nodes = [node for node in model.graph.node if node.op_type == "Equal" and name in node.input]
    compared = {other for node in nodes for other in node.input}
    try:
        stored = [stored_value(tensor) for tensor in model.graph.initializer if tensor.name in compared]
        stored += [constant_node(node) for node in model.graph.node if compared.intersection(node.output)]
        found = [int(value.item()) for value in stored if value is not None and value.size == 1]
    except Exception:  # NumPy raises anything for tensors that are not as they say
        found = []
    return [*found, *(RATES if name == "sr" or "rate" in name.lower() else ())]
