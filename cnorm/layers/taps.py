"""Taps: layers that read the frame, or the outputs of an earlier layer, by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any, ClassVar

import numpy as np

from cnorm.cells.packing import Parts
from cnorm.layers.base import Bound, Layer, Scope, name_of, with_name

PARTS = 8  # CNORM_PARTS of cnorm_rnn.h


class Joined(Layer):
    """The layer before and one that is read by name, element by element."""

    part: ClassVar[str]

    def __init__(self, of: str, *, name: str | None = None) -> None:
        self.of = name_of(of, "of")
        self.reads = (self.of,)
        self.input_size = self.output_size = None
        with_name(self, name)

    def outputs(self, size: int, sizes: Mapping[str, int]) -> int:
        if sizes[self.of] != size:
            raise ValueError(f"must read {size} elements, as many as it takes, got the {sizes[self.of]} of {self.of!r}")
        return size

    def flat(self, size: int, scope: Scope) -> list[tuple[Any, int]]:
        return [(Bound(Parts(self.part, {"n": size, "back": scope.back(self.of)})), size)]

    def entry(self) -> dict:
        return {"of": self.of}

    @classmethod
    def from_entry(cls, entry: dict, weights: Mapping[str, np.ndarray], read: Callable) -> Layer | None:
        return cls(entry["of"]) if entry.keys() == {"of"} else None

    def __repr__(self):
        return f"{self.kind}({self.of!r})"


class Add(Joined):
    """y = x + the outputs of an earlier layer, or the frame.

    Parameters
    ----------
    of : str
        The name of a layer before it in the same list, ``"input"`` for the frame. It has as many outputs as x.
    name : str, optional
        By which later layers read this one.

    Raises
    ------
    TypeError
        If `of` is not a str.

    Examples
    --------
    >>> import cnorm, numpy as np
    >>> w = np.eye(4, dtype=np.float32)
    >>> model = cnorm.Model([cnorm.Linear(w, name="first"), cnorm.Activation("tanh"), cnorm.Add("first")])
    """

    kind = "Add"
    part = "residual"

    def joined(self, x: np.ndarray, known: Mapping[str, np.ndarray]) -> np.ndarray:
        return known[self.of] + x


class Multiply(Joined):
    """y = x times the outputs of an earlier layer, or the frame, element by element: a mask or a gate.

    Parameters and errors as `Add`.

    Examples
    --------
    >>> import cnorm, numpy as np
    >>> w = np.eye(4, dtype=np.float32)
    >>> mask = [cnorm.Linear(w), cnorm.Activation("sigmoid"), cnorm.Multiply("input")]
    >>> cnorm.Model(mask).stream().step(np.ones(4, np.float32)).shape
    (4,)
    """

    kind = "Multiply"
    part = "multiply"

    def joined(self, x: np.ndarray, known: Mapping[str, np.ndarray]) -> np.ndarray:
        return x * known[self.of]


def concatenation(size: int, parts: Sequence[tuple[int, int, int, int]]) -> Parts:
    """What is packed for parts (back, n, start, stop) of cnorm_concat behind a layer with `size` outputs."""
    options = {f"parts[{i}].{key}": 0 for i in range(PARTS) for key in ("back", "n", "start", "count")}
    for i, (back, n, start, stop) in enumerate(parts):
        part = {"back": back, "n": n, "start": start, "count": stop - start}
        options |= {f"parts[{i}].{key}": value for key, value in part.items()}
    outputs = sum(stop - start for _, _, start, stop in parts)
    return Parts("concat", options | {"n": size, "outputs": outputs})


class Taken(Layer):
    """Parts of the frame or of earlier layers' outputs, concatenated; the layer before is read only by name."""

    continues = False
    input_size = None
    output_size: int | None

    def _parts(self, sizes: Mapping[str | None, int]) -> list[tuple[str, int, int]]:
        """(name, start, stop) of each part."""
        raise NotImplementedError

    def outputs(self, size: int, sizes: Mapping[str, int]) -> int:
        return sum(stop - start for _, start, stop in self._parts(sizes))

    def flat(self, size: int, scope: Scope) -> list[tuple[Any, int]]:
        parts = [(scope.back(name), scope.sizes[name], start, stop) for name, start, stop in self._parts(scope.sizes)]
        return [(Bound(concatenation(size, parts)), self.outputs(size, scope.sizes))]

    def joined(self, x: np.ndarray, known: Mapping[str, np.ndarray]) -> np.ndarray:
        sizes = {name: array.shape[1] for name, array in known.items()}
        return np.concatenate([known[name][:, start:stop] for name, start, stop in self._parts(sizes)], axis=1)


class Slice(Taken):
    """y = elements ``start`` to ``stop`` of the outputs of an earlier layer, or of the frame.

    What stands before it is not read, unless it has this name: a list of layers can begin a second branch with it.

    Parameters
    ----------
    of : str
        The name of a layer before it in the same list, ``"input"`` for the frame.
    start, stop : int
        As of Python's slices, 0 <= start < stop.
    name : str, optional
        As of `Add`.

    Raises
    ------
    TypeError, ValueError
        For another type, or numbers out of order.
    """

    kind = "Slice"

    def __init__(self, of: str, start: int, stop: int, *, name: str | None = None) -> None:
        self.of = name_of(of, "of")
        self.reads = (self.of,)
        for argument, value in (("start", start), ("stop", stop)):
            if isinstance(value, bool) or not isinstance(value, Integral):
                raise TypeError(f"{argument} must be an integer, got {type(value).__name__}")
        if not 0 <= start < stop:
            raise ValueError(f"start must be at least 0 and below stop, got {start} and {stop}")
        self.start, self.stop = int(start), int(stop)
        self.output_size = self.stop - self.start
        with_name(self, name)

    def _parts(self, sizes: Mapping[str | None, int]) -> list[tuple[str, int, int]]:
        if self.stop > sizes[self.of]:
            raise ValueError(f"must end within the {sizes[self.of]} elements of {self.of!r}")
        return [(self.of, self.start, self.stop)]

    def entry(self) -> dict:
        return {"of": self.of, "start": self.start, "stop": self.stop}

    @classmethod
    def from_entry(cls, entry: dict, weights: Mapping[str, np.ndarray], read: Callable) -> Layer | None:
        return cls(**entry) if entry.keys() == {"of", "start", "stop"} else None

    def __repr__(self):
        return f"Slice({self.of!r}, {self.start}, {self.stop})"


class Concat(Taken):
    """y = the outputs of earlier layers, or the frame, concatenated.

    Parameters
    ----------
    of : sequence of str
        Names of up to 8 layers before it in the same list, ``"input"`` for the frame.
    name : str, optional
        As of `Add`.

    Raises
    ------
    TypeError, ValueError
        If `of` is not a sequence of names, or has none or more than 8.
    """

    kind = "Concat"

    def __init__(self, of: Sequence[str], *, name: str | None = None) -> None:
        if isinstance(of, str) or not isinstance(of, Iterable):
            raise TypeError(f"of must be a sequence of names, got {type(of).__name__}")
        self.reads = tuple(name_of(one, f"of[{i}]") for i, one in enumerate(of))
        if not 0 < len(self.reads) <= PARTS:
            raise ValueError(f"of must have 1 to {PARTS} names, got {len(self.reads)}")
        self.output_size = None
        with_name(self, name)

    def _parts(self, sizes: Mapping[str | None, int]) -> list[tuple[str, int, int]]:
        return [(name, 0, sizes[name]) for name in self.reads]

    def entry(self) -> dict:
        return {"of": list(self.reads)}

    @classmethod
    def from_entry(cls, entry: dict, weights: Mapping[str, np.ndarray], read: Callable) -> Layer | None:
        return cls(entry["of"]) if entry.keys() == {"of"} else None

    def __repr__(self):
        return f"Concat({list(self.reads)})"
