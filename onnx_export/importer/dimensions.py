"""The dimensions of a file's inputs: which are open, which counts steps, and what mixes the elements of one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from fractions import Fraction
from functools import partial
from itertools import chain, combinations, islice
from operator import ne
from typing import Any

import numpy as np

from onnx_export.errors import NotImported
from onnx_export.errors import together as grouped
from onnx_export.importer.counting import counted, thresholds, together
from onnx_export.importer.elements import Cannot, Elements
from onnx_export.importer.frames import MAX_REACH, Reach
from onnx_export.importer.shifts import Shifts
from onnx_export.importer.trace import Trace

__all__ = ["MANY", "choices", "frames_of", "open_dimensions", "open_negative", "shape_of"]

MAX_JOINED, MOST_JOINED = 64, 256  # choices of dimensions that are followed as one; the proof tries the others
MANY = (
    "{} dimensions of its inputs have no size, and too many choices of them may be the frames: give dims={{...}} of "
    "those that have one, or one name to those that are one"
)
LEAST_FRAMES, MOST_FRAMES = 5, 64  # of a trace that shows which frames an element depends on, at any cost
UNLIKE = "a loop's steps are not all the same, or do not begin with zeros"
MAX_TOGETHER = 2 * MAX_REACH  # of all nodes: a delay is a Pad and a Slice
LARGE = 1 << 18  # elements of a trace with one frame, from which others take long
REMEDY = " gives it"  # the end of what mixes frames
LASTING = "no layer computes this", "by what depends on the frame", "it makes random numbers"  # at any size
RATED = 48, 96  # frames of two traces that show how many frames come of them
MOST_ELEMENTS = 1 << 23  # of a longer one, which shows what reaches further back


def shape_of(value, dims: Mapping[str, int], unknown: int, time: int | None) -> tuple[int, ...]:
    """The shape of an input, with 1 in the place of the time axis."""
    shape = []
    for index, dim in enumerate(value.type.tensor_type.shape.dim):
        size = dim.dim_value if dim.HasField("dim_value") else int(dims.get(_label(value, index), unknown))
        shape.append(1 if index == time else size)
    return tuple(shape)


def open_negative(model) -> None:
    """Make sizes below 0 open ones, as onnxruntime reads them."""
    for value in (*model.graph.input, *model.graph.output, *model.graph.value_info):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_value < 0:
                dim.ClearField("dim_value")


def open_dimensions(varying, dims) -> dict[str, dict[str, int]]:
    """The open dimensions without a given size, by name or place, each with the inputs that have it and their axes."""
    found: dict[str, dict[str, int]] = {}
    for name, value in varying.items():
        for axis, dim in enumerate(value.type.tensor_type.shape.dim):
            if not dim.HasField("dim_value") and (label := _label(value, axis)) not in dims:
                found.setdefault(label, {})[name] = axis
    return found


def _label(value, axis: int) -> str:
    """What names an open dimension: its symbol, or the input and the axis."""
    return value.type.tensor_type.shape.dim[axis].dim_param or f"{value.name}:{axis}"


def frames_of(model, varying, constants, dims) -> dict:
    """Where the frames are, as fields of `Inputs`: an open dimension with several elements, or the steps of a cell."""
    shapes = {name: shape_of(value, dims, 1, None) for name, value in varying.items()}
    found = _Found(model, shapes, constants)
    labels = open_dimensions(varying, dims)
    for label, axes in (found.joined(labels) if len(labels) > 1 and not found.trace.faults else labels).items():
        found.add(axes, f"; if {label!r} has one size, dims={{{label!r}: SIZE}}{REMEDY}", label)
    found.add_together()
    fields = found.fields
    if not fields["time_axes"]:
        fixed = _fixed_steps(model, shapes, found.trace)
        fields |= fixed | {"mixed": [*fields["mixed"], *fixed.get("mixed", [])]}
    return fields


class _Found:
    """What several elements of dimensions show, as fields of `Inputs`."""

    def __init__(self, model, shapes, constants) -> None:
        self.model, self.trace = model, _of_one(model, shapes, constants)
        self.limits = thresholds(model, self.trace)
        self.follow, self.reach = partial(_reach, model, shapes, constants), max(self.limits, default=0)
        self.fields: dict = {"time_axes": {}, "output_axes": {}}
        self.fields |= {key: [] for key in ("open_axes", "unfollowed", "mixed", "faults")}
        counts = {2, 3, *(k for n in sorted(self.limits)[-8:] for k in (n, n + 1) if k > 3), self.reach + 20}
        self.fields["lengths"] = sorted(counts)

    def add(self, axes: dict[str, int], remedy: str, label: str) -> bool:
        """Follow one dimension; False if that can't be done."""
        model, trace, follow, fields = self.model, self.trace, self.follow, self.fields
        most = together(model, trace, found.trace) if (found := follow(axes, [LEAST_FRAMES])) else 0
        found = _reaching_back(follow, axes, max(self.reach, min(most, MAX_REACH)))
        if trace.faults and (found is None or found.trace.faults) and (rate := _rate(model, follow, axes, label)):
            fields["mixed"].append((axes, rate))
            return False
        if found is None:
            fields["unfollowed"].append((axes, [f"{label!r}: more than one element of it can't be followed"]))
            return False
        shifts = None
        if not (found.trace.faults or found.trace.repeated or fields["time_axes"]):
            found, shifts = _shifts(model, follow, axes, found, most)
        results = _outputs(model, found)
        if (found.moves or shifts) and not fields["time_axes"]:
            fields["time_axes"] = dict(axes)
            fields["output_axes"] = _axes(found, results, carried=shifts is not None)
        elif not found.moves and found.trace.faults:
            fields["unfollowed"].append((axes, found.trace.faults))
        elif not found.moves:
            fields["open_axes"].append(axes)
        if found.mixed or not found.trace.faults:
            faults = found.faults(results, carried=shifts is not None)
            rate = _rate(model, follow, axes, label) if faults else []
            faults = [*faults, *rate] if rate else [fault + remedy for fault in faults]
            fields["lengths"] = sorted({*fields["lengths"], min(most, MAX_TOGETHER) + 20, found.length + 20})
            fields |= {"shifts": shifts} if shifts else {}
            if found.trace.loops and found.moves:
                faults += [fault + remedy for fault in (found.trace.numbered if shifts else [UNLIKE])]
            fields["mixed"] += [(axes, faults)] if faults else []
            if not (faults or shifts or found.trace.faults):
                fields["faults"] += [fault + remedy for fault in _uneven(found, axes, results)]
            fields["faults"] += [fault + remedy for fault in _counted(model, follow, axes, found)]
        if found.moves and found.trace.faults and not trace.faults:
            fields["faults"] += [f"with several frames: {fault}" for fault in found.trace.faults]
        fields["faults"] += _too_far(self.limits, self.reach, most, remedy)
        return not found.trace.faults

    def add_together(self) -> None:
        """Follow dimensions of different inputs as one: each broadcast along the others may be mixed with them.

        Where outputs grow along two axes, as of rows of one beside frames of another, the elements are no frames.
        """
        alone = dict(enumerate(self.fields["open_axes"])) if not self.trace.faults else {}
        fits = {key: {other for other in alone if alone[key].keys().isdisjoint(alone[other])} for key in alone}
        right: list[frozenset] = []
        tried: set[frozenset] = set()
        parts: list[frozenset] = []

        def is_new(part: frozenset) -> bool:
            return len(part) > 1 and part not in tried and not any(part <= each for each in right)

        while part := next(filter(is_new, chain(parts, _maximal(fits, frozenset(), set(fits), set()))), None):
            tried.add(part)
            if len(tried) > MOST_JOINED:
                raise NotImported(MANY.format(len(alone)))
            axes = {name: axis for key in sorted(part) for name, axis in alone[key].items()}
            names = " and ".join(repr(f"{name}:{axis}") for name, axis in axes.items())
            if is_grid := self._is_grid(axes):
                pairs = [pair for pair in combinations(part, 2) if self._is_grid(alone[pair[0]] | alone[pair[1]])]
                for a, b in pairs:
                    fits[a].discard(b)
                    fits[b].discard(a)
            elif self.add(axes, f"; if {names} have one size, dims={{...}}{REMEDY}", names):
                right.append(part)
            if part not in right and not (is_grid and pairs):
                parts += [part - {key} for key in part]

    def _is_grid(self, axes: dict[str, int]) -> bool:
        """Whether outputs grow along two axes with some elements, and of the others each is its frames in order."""
        found = self.follow(axes, [LEAST_FRAMES])
        if found is None or found.trace.faults:
            return False
        values = _outputs(self.model, found)
        grids = [name for name in values if self._grows_twice(name, values[name])]
        return bool(grids) and all(_is_in_order(found, value) for name, value in values.items() if name not in grids)

    def _grows_twice(self, name: str, value) -> bool:
        one, more = np.shape(self.trace.values.get(name)), np.shape(value)
        return len(one) == len(more) and sum(map(ne, one, more)) > 1

    def joined(self, labels: dict[str, dict[str, int]]) -> dict[str, dict[str, int]]:
        """Open dimensions, as one where several elements of one alone can't be followed, but of them together can."""
        joined = {label: axes for label, axes in labels.items() if _is_followed(self.follow, axes)}
        waiting, tries = [label for label in labels if label not in joined], iter(range(MOST_JOINED))
        while waiting:
            first, *others = waiting
            parts = islice(choices({label: labels[label] for label in others}, beside=labels[first]), MAX_JOINED)
            parts = ([first, *part] for part, _ in zip(parts, tries, strict=False))
            one = next((part for part in parts if _is_one(part, labels, self.follow)), [first])
            joined[first] = {name: axis for label in one for name, axis in labels[label].items()}
            waiting = [label for label in waiting if label not in one]
        return {label: joined[label] for label in labels if label in joined}


def _is_in_order(found: Reach, value) -> bool:
    """Whether each element of an output reads no frame, or that of its place alone."""
    if not isinstance(value, Elements):
        return True
    first, last = found.first[value.numbers], found.last[value.numbers]
    return bool((last < 0).all() or ((first >= last).all() and found.axis(value) is not None))


def _maximal(fits: Mapping[Any, set], part: frozenset, more: set, done: set) -> Iterator[frozenset]:
    """The largest groups of which all fit each other: of those that contain `part`, some of `more`, and none of `done`.

    Bron and Kerbosch, Algorithm 457, Communications of the ACM 16 (1973), with a pivot.
    """
    if not more and not done:
        yield part
    pivot = max(sorted(more | done), key=lambda key: len(more & fits[key]), default=None)
    for key in sorted(more - fits.get(pivot, set())):
        yield from _maximal(fits, part | {key}, more & fits[key], done & fits[key])
        more, done = more - {key}, done | {key}


def choices(dimensions: Mapping[Any, Mapping[str, int]], beside: Collection[str] = ()) -> Iterator[tuple]:
    """The keys of dimensions that may be one: at most one of each input, none of `beside`; most first, never none."""
    keys = [key for key, axes in dimensions.items() if axes.keys().isdisjoint(beside)]
    for count in range(_inputs(dimensions, keys), 0, -1):
        yield from _chosen(dimensions, keys, count)


def _chosen(dimensions, keys: list, count: int) -> Iterator[tuple]:
    """`count` of some keys whose dimensions have no input in common."""
    if count == 0:
        yield ()
        return
    for at, key in enumerate(keys):
        rest = [other for other in keys[at + 1 :] if dimensions[key].keys().isdisjoint(dimensions[other])]
        if _inputs(dimensions, rest) >= count - 1:
            yield from ((key, *more) for more in _chosen(dimensions, rest, count - 1))


def _inputs(dimensions, keys: list) -> int:
    return len({name for key in keys for name in dimensions[key]})


def _of_one(model, shapes, constants) -> Trace:
    """The trace with one element of each open dimension."""
    try:
        trace = Trace(model, shapes, constants, {})
    except Cannot as error:
        raise NotImported(str(error)) from None
    if trace.size > LARGE and any(fault.endswith(LASTING) for fault in trace.faults):
        raise NotImported("it is not a list of layers that cnorm has:", grouped(trace.faults))  # whatever else there is
    return trace


def _is_one(part: list[str], labels: dict[str, dict[str, int]], follow: Callable) -> bool:
    """Whether several elements of some dimensions can be followed together."""
    return _is_followed(follow, {name: axis for label in part for name, axis in labels[label].items()})


def _is_followed(follow: Callable, axes: dict[str, int]) -> bool:
    return (found := follow(axes, [LEAST_FRAMES])) is not None and not found.trace.faults


def _too_far(limits, reach: int, most: int, remedy: str) -> list[str]:
    """Why not all frames that may matter can be compared; empty if they can."""
    if reach > MAX_REACH:
        return [f"{limits[reach]}: it has the number {reach}; {MAX_REACH} frames can be compared"]
    return [f"its nodes reach back {most} frames together; {MAX_TOGETHER} can be compared{remedy}"] * (
        most > MAX_TOGETHER
    )


def _counted(model, follow: Callable, axes, found: Reach) -> list[str]:
    """Why the number of frames matters; empty if it does not."""
    if found.trace.faults:
        return []
    more = follow(axes, [found.length + 1])
    return counted(model, found, more) if more else [f"{found.length + 1} frames can't be followed"]


def _rate(model, follow: Callable, axes, label: str) -> list[str]:
    """Why an output that has not one frame for each of a dimension's makes no stream, and what would; empty if none."""
    few, many = (follow(axes, [length]) for length in RATED)
    for name in _outputs(model, many) if few and many else ():
        one, two = (found.trace.values.get(name) for found in (few, many))
        if not isinstance(one, Elements) or not isinstance(two, Elements) or len(one.shape) != len(two.shape):
            continue
        for axis in [axis for axis, size in enumerate(one.shape) if size != two.shape[axis]]:
            rate = Fraction(two.shape[axis] - one.shape[axis], RATED[1] - RATED[0])
            if rate != 1:
                before = int((many.last - many.first)[two.numbers].max()) + 1 - rate.denominator
                wanted = f"give it by dims={{{label!r}: {rate.denominator}}}: a call is one frame of x and of y then"
                if before > 0 and not any(b.op == "input" and b.node not in axes for b in many.trace.blocks):
                    wanted = f"export it with the {before} frames before a call as a state, input and output; {wanted}"
                return [f"output {name!r} has {rate} frames for each of {label!r}: {wanted}"]
    return []


def _uneven(found: Reach, axes, results) -> list[str]:
    """Why not every frame is computed by the same rule, which one frame does not show; empty if it is."""
    if found.trace.sequences and not found.moves:
        return []  # rows of cells, of which the proof compares some
    shifts = Shifts(found, axes)
    uneven = [name for name, axis in _axes(found, results).items() if not shifts.carries(results, {name: axis})]
    return [f"output {name!r}: not every frame of it is computed by the same rule" for name in uneven]


def _axes(found: Reach, results, *, carried: bool = False) -> dict[str, int | None]:
    """The axis of each output that counts frames, as of `Reach.axis`."""
    return {name: found.axis(value, carried=carried) for name, value in results.items() if isinstance(value, Elements)}


def _shifts(model, follow: Callable, axes, found: Reach, most: int) -> tuple[Reach, Shifts | None]:
    """With more frames than any output reads, what each element was a frame before; None if outputs are not linked.

    Convolutions say how many these are. Where frames are moved in other ways, of at most `most` frames, more are tried.
    """
    length = found.longest() + 2
    if not (found.mixed or found.trace.loops) and length == 2 and not found.faults(_outputs(model, found)):
        return found, None
    while True:
        more = found if found.length >= length else follow(axes, [length])
        if more is None or more.trace.faults:
            break
        if (shifts := _linked(model, more, axes)) or not _reads_all(model, more):
            return more, shifts
        found, length = more, min(2 * more.length, most + 2)
        if found.length >= length or not _is_affordable(found, length):
            break
    return found, None


def _outputs(model, found: Reach) -> dict:
    return {value.name: found.trace.values.get(value.name) for value in model.graph.output}


def _reads_all(model, found: Reach) -> bool:
    """Whether an output reads as many frames as there are, so that with more of them it may read more."""
    return found.reads(_outputs(model, found)) + 1 >= found.length


def _linked(model, found: Reach, axes, *, fixed: bool = False) -> Shifts | None:
    results = _outputs(model, found)
    if found.longest() + 2 > found.length or found.reads(results) + 1 >= found.length:
        return None
    shifts = Shifts(found, axes, fixed=fixed)
    linked = shifts.carries(results, _axes(found, results, carried=True)) and shifts.steps_in_order()
    return shifts if linked else None


def _with(shape: tuple[int, ...], axis: int | None, size: int) -> tuple[int, ...]:
    return tuple(size if index == axis else n for index, n in enumerate(shape))


def _reaching_back(follow: Callable, axes, reach: int) -> Reach | None:
    """As `_reach`, with more frames than a node may reach back, if so many can be followed."""
    length = max(LEAST_FRAMES, reach + 2)
    found = follow(axes, dict.fromkeys((min(length, MOST_FRAMES), LEAST_FRAMES)))
    if found is None or not MOST_FRAMES < length <= MAX_REACH + 2 or not _is_affordable(found, length):
        return found
    more = follow(axes, [length])
    return found if more is None or more.trace.faults else more


def _is_affordable(found: Reach, length: int) -> bool:
    """Whether a trace with another number of frames is not too large."""
    return found.trace.size * length <= MOST_ELEMENTS * found.length


def _reach(model, shapes, constants, axes, lengths) -> Reach | None:
    """What the first of some numbers of frames shows with which each node can be followed, else the last."""
    found = None
    for length in lengths:
        several = {name: _with(shape, axes.get(name), length) for name, shape in shapes.items()}
        try:
            found = Reach(Trace(model, several, constants, axes), axes, length)
        except Cannot:
            continue
        if not found.trace.faults:
            break
    return found


def _fixed_steps(model, shapes, trace: Trace) -> dict:
    """The axis of fixed size along which a recurrent operator's steps are."""
    for name, shape in shapes.items():
        for axis, size in enumerate(shape):
            if size > 1 and (found := Reach(trace, {name: axis}, size)).moves:
                results = _outputs(model, found)
                shifts = None
                if not trace.faults and (found.mixed or trace.loops):
                    shifts = _linked(model, found, {name: axis}, fixed=True)
                faults = found.faults(results, carried=shifts is not None) if found.mixed or not trace.faults else []
                if trace.loops and not shifts:
                    faults.append(UNLIKE)
                mixed = [({name: axis}, faults)] if faults else []
                uneven = [] if faults or shifts or trace.faults else _uneven(found, {name: axis}, results)
                along = _axes(found, results, carried=shifts is not None)
                given = {"time_axes": {name: axis}, "output_axes": along, "mixed": mixed, "fixed": size}
                return given | {"shifts": shifts, "uneven": uneven}
    return {}
