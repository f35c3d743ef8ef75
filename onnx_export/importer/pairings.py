"""Which inputs may be the frame and which outputs may give states back: every assignment that the sizes allow.

What the outputs depend on says which are tried first.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from difflib import SequenceMatcher
from itertools import combinations, islice, product, zip_longest

import numpy as np

from cnorm.text import quoted
from onnx_export.importer.elements import Elements
from onnx_export.importer.frames import depending

__all__ = ["alike", "assignments", "belong", "unpaired"]

LIKE = 0.5  # of the letters of two names
MAX_TRIED = 10_000  # outputs for an input, in one search
MAX_CHOICES = 64  # of the inputs that are x


def assignments(trace, inputs, outputs, states, frames):
    """Frames, outputs and pairs of states: all that the sizes allow, the given pairs kept, those in order first."""
    sizes = {name: value.numbers.size for name, value in outputs.items()}
    sizes |= {name: trace.values[name].numbers.size for name in inputs.shapes}
    if any(sizes[name] != sizes.get(result) for name, result in states.items()):
        return
    free = [name for name in outputs if name not in states.values()]
    depending_on = {name: _behind(trace, trace.values[name].numbers, outputs) for name in inputs.shapes}
    behind = {name: _likely_first(trace, name, outputs, depending_on) for name in inputs.shapes}
    elements = {name: outputs[name].numbers.tobytes() for name in free}
    distinct = {each: name for name, each in elements.items()}
    shapes = {name: value.shape for name, value in outputs.items()}
    like = {
        name: max(((shapes[result] == trace.values[name].shape, alike(name, result)) for result in results), default=())
        for name, results in behind.items()
    }
    names = sorted((name for name in inputs.shapes if name not in states), key=lambda name: like[name])
    chosen = _choices(inputs, Counter(sizes[name] for name in distinct.values()), sizes, names, frames)
    by_choice = [_of_choice(each, inputs, elements, sizes, states, behind) for each in chosen]
    for turn in zip_longest(*by_choice):
        yield from filter(None, turn)


def unpaired(trace, inputs) -> str:
    """Why the sizes allow no assignment at all."""
    given, back = (
        ", ".join(f"{quoted(name)} of {np.size(trace.values[name].numbers)}" for name in names) or "none"
        for names in (inputs.shapes, [n for n in trace.outputs if isinstance(trace.values.get(n), Elements)])
    )
    needs = "an input that is no part of x needs an output of its own, of as many elements, to give it back"
    return f"{needs}: inputs {given}; outputs that depend on x {back}"


def alike(name: str, result: str) -> float:
    """How much of two names is the same, from 0 to 1."""
    return SequenceMatcher(None, name.lower(), result.lower(), autojunk=False).ratio()


def belong(name: str, result: str) -> bool:
    """Whether two names seem to belong together: they are much alike, or one is a word of the other, as h of h_out."""
    words, others = (set(re.split(r"[^a-z0-9]+", each.lower())) for each in (name, result))
    return alike(name, result) >= LIKE or words <= others or others <= words


def _of_choice(chosen, inputs, elements: dict[str, bytes], sizes, states, behind):
    """The assignments where some inputs are the frame; of the free outputs, by their elements, y has each but once."""
    rest = [name for name in inputs.shapes if name not in chosen and name not in states]
    for own in _in_order(rest, list(elements), sizes, behind):
        pairs = dict(states) | {name: own[name] for name in rest}
        first: dict[bytes, str] = {}
        for name in [name for name in elements if name not in pairs.values()]:
            first.setdefault(elements[name], name)
        others = list(first.values())
        if not others:  # a cell by itself: a state is the result as well
            yield from ((chosen, (name,), pairs) for name in pairs.values())
        for names in [(name,) for name in others] + ([tuple(others)] if len(others) > 1 else []):
            yield chosen, names, pairs


def _choices(inputs, results: Counter[int], sizes, free: list[str], frames) -> list[tuple[str, ...]]:
    """The inputs that can be x: those given, and those that can't be states, as outputs of their size lack; else one.

    `results` counts outputs by their size, `free` has the inputs that may be x, first those least like a state.
    """
    over = {} if inputs.fixed else inputs.time_axes  # a state has no open number of steps
    sure = {name for name in free if name in {*frames, *over} or issubclass(inputs.types[name], np.integer)}
    of_size: dict[int, list[str]] = {}
    for name in (name for name in free if name not in sure):
        of_size.setdefault(sizes[name], []).append(name)
    more = [
        islice(combinations(names, max(0, len(names) - results[size])), MAX_CHOICES) for size, names in of_size.items()
    ]
    chosen = [sure.union(*parts) for parts in islice(product(*more), MAX_CHOICES)]
    if not chosen[0]:
        chosen = [{name} for name in inputs.shapes if name in free]
    return [tuple(name for name in inputs.shapes if name in each) for each in chosen]


def _behind(trace, numbers: np.ndarray, outputs) -> set[str]:
    """The outputs that depend on some elements."""
    depends = depending(trace, numbers.ravel())
    return {name for name, value in outputs.items() if depends[value.numbers].any()}


def _likely_first(trace, name: str, outputs, behind: Mapping[str, set[str]]) -> list[str]:
    """The outputs that depend on an input, those of its shape, of few other inputs, and of a like name in front."""
    counts = {result: sum(result in each for each in behind.values()) for result in behind[name]}
    shape = trace.values[name].shape
    return sorted(
        counts, key=lambda result: (outputs[result].shape != shape, counts[result], -alike(name, result), result)
    )


def _in_order(names: list[str], free: list[str], sizes, behind):
    """Every way to give each of some inputs an output of its size, first those where each depends on its input."""
    of_size = {name: [result for result in free if sizes[result] == sizes[name]] for name in names}
    likely = {name: [result for result in behind[name] if result in of_size[name]] for name in names}
    first = sorted(names, key=lambda name: len(likely[name]))  # the state of the last layer has the fewest
    yield from _pairings(first, likely, iter(range(MAX_TRIED)))
    for pairs in _pairings(names, of_size, iter(range(MAX_TRIED))):
        if any(result not in likely[name] for name, result in pairs.items()):
            yield pairs


def _pairings(names: list[str], possible: Mapping[str, list[str]], budget: Iterator[int], taken: tuple[str, ...] = ()):
    """Every way to give each of some inputs another of the outputs that are possible for it, within a budget."""
    if not names:
        yield {}
        return
    for result in possible[names[0]]:
        if result not in taken and next(budget, None) is not None:
            for pairs in _pairings(names[1:], possible, budget, (*taken, result)):
                yield {names[0]: result} | pairs
