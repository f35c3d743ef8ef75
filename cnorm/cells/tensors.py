"""Parse the (name, shape, meaning) triples of `CellSpec.weights`, which tell what a checkpoint's tensor holds.

`cnorm.CellSpec` describes their syntax. A *part* is one of the arrays of the cell's equations, such as weight_x or
gain_c. A tensor of a checkpoint holds one part, several parts that are stacked or concatenated, or one part that the
equations use twice.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

__all__ = ["Piece", "Tensor", "Use", "axis_length", "has_projection", "optional_tensors", "parse", "present"]

USE = re.compile(r"(?P<part>\w+?)(?P<transposed>\.T)?(\[(?P<gates>\w+)\])?")
PLACEHOLDER = re.compile(r"\{(layer|even|odd|reverse)\}")  # in a tensor's name, which is a format string
UNGATED = ("weight_p", "gain_c", "bias_c", "bias_p", "h0", "c0")  # parts that are not divided among the gates


@dataclass(frozen=True)
class Use:
    """The part of a cell that a tensor, or a piece of it, holds.

    Attributes
    ----------
    part : str
        Such as "weight_x"; a text that can't be parsed is kept as it is, for error messages.
    gates : str
        A letter for each gate, in the order of the rows; "" for a part that is not divided among the gates.
    transposed : bool
        Whether a matrix is [inputs, outputs].
    """

    part: str
    gates: str = ""
    transposed: bool = False

    def __str__(self):
        return self.part + ".T" * self.transposed + (f"[{self.gates}]" if self.gates else "")


@dataclass(frozen=True)
class Piece:
    """A tensor, or a slice of one: its axes, and the parts that it holds."""

    axes: tuple[str, ...]
    uses: tuple[Use, ...]


@dataclass(frozen=True)
class Tensor:
    """A tensor of a checkpoint.

    Attributes
    ----------
    name : str
        With placeholders for layer and direction if checkpoints number them, see `named`.
    axes : tuple of str
        Lengths of the axes of the whole tensor: "4H", "I", "I+H", "2".
    pieces : tuple of Piece
        The slices that it is split into; one, the tensor itself, if it is not split.
    optional : bool
    leading : bool
        Whether the first axis is "1", which is dropped before splitting.
    split_axis : int or None
        The axis along which the tensor is split; None if it is not.
    stacked : bool
        True: `split_axis` has one entry for each piece, and pieces do not have this axis. False: the pieces are
        concatenated along it.
    """

    name: str
    axes: tuple[str, ...]
    pieces: tuple[Piece, ...] = ()
    optional: bool = False
    leading: bool = False
    split_axis: int | None = None
    stacked: bool = False

    def named(self, layer: int = 0, reverse: bool = False) -> Tensor:
        """The same tensor, its name filled in for one layer and direction of a stack.

        A name without a place for the direction ends in "_reverse" in the reverse one, as those of PyTorch do.
        """
        numbers, way = {"layer": layer, "even": 2 * layer, "odd": 2 * layer + 1}, "_reverse" if reverse else ""
        end = "" if "{reverse}" in self.name else way
        return replace(self, name=self.name.format(**numbers, reverse=way) + end)

    def uses(self) -> Iterator[Use]:
        return (use for piece in self.pieces for use in piece.uses)

    def is_part(self, *parts: str) -> bool:
        """Whether its first part is one of these."""
        return bool(self.pieces) and self.pieces[0].uses[0].part in parts

    def is_bias(self) -> bool:
        return bool(self.pieces) and self.pieces[0].uses[0].part.startswith("bias")

    def without_projection(self) -> Tensor:
        """The same tensor for a cell without projection, in which P = H."""
        pieces = tuple(replace(piece, axes=_p_is_h(piece.axes)) for piece in self.pieces)
        return replace(self, axes=_p_is_h(self.axes), pieces=pieces)

    def lengths(self, sizes: Mapping[str, int]) -> list[int]:
        """The length of each piece along `split_axis`."""
        if self.stacked:
            return [1] * len(self.pieces)
        return [axis_length(piece.axes[self.split_axis], sizes) for piece in self.pieces]


def _p_is_h(axes: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(axis.replace("P", "H") for axis in axes)


def parse(name: str, shape: str, meaning: str, gates: str) -> Tensor:
    """The tensor of a triple. Mistakes are not reported here, but kept in its pieces: `CellSpec.refusal` finds them.

    Parameters
    ----------
    name, shape, meaning : str
        As in `CellSpec.weights`.
    gates : str
        The gates of the cell, in the order of the checkpoint.
    """
    axes, optional = tuple(shape.split()), meaning.endswith("?")
    uses = [tuple(_use(text, gates) for text in part.split("+")) for part in meaning.removesuffix("?").split(" ")]
    leading = axes[:1] == ("1",)
    split_axis, stacked, cut = _cut(axes[leading:], len(uses))
    pieces = tuple(Piece(*piece) for piece in zip(cut, uses, strict=True))
    return Tensor(name, axes, pieces, optional, leading, split_axis, stacked)


def _use(text: str, gates: str) -> Use:
    match = USE.fullmatch(text)
    if not match:
        return Use(text)
    everywhere = "" if match["part"] in UNGATED else gates
    return Use(match["part"], match["gates"] or everywhere, bool(match["transposed"]))


def _cut(axes: tuple[str, ...], count: int) -> tuple[int | None, bool, list[tuple[str, ...]]]:
    """`split_axis`, `stacked` and the axes of each of `count` pieces; the axes are empty if the shape does not fit."""
    if count == 1:
        return None, False, [axes]
    for i, axis in enumerate(axes):
        if axis.count("+") == count - 1:
            return i, False, [(*axes[:i], term, *axes[i + 1 :]) for term in axis.split("+")]
    if axes[:1] == (str(count),):
        return 0, True, [axes[1:]] * count
    vector = re.fullmatch(r"([0-9]{1,2})H", " ".join(axes))
    rows = int(vector[1]) // count if vector and int(vector[1]) % count == 0 else 0
    return 0, False, [((f"{rows}H" if rows > 1 else "H",) if rows else ())] * count


def terms(axis: str) -> list[tuple[int, str]]:
    """Parse an axis: "I+4H" -> [(1, "I"), (4, "H")]; a plain number is a factor of the letter ""."""
    return [(int(re.match(r"\d*", term)[0] or 1), term.lstrip("0123456789")) for term in axis.split("+")]


def axis_length(axis: str, sizes: Mapping[str, int]) -> int:
    """The length of an axis: "4H" is 4 times H. `sizes` has "": 1 for plain numbers."""
    return sum(factor * sizes[letter] for factor, letter in terms(axis))


def has_projection(tensors: Iterable[Tensor]) -> bool:
    """Whether one of the tensors holds a projection."""
    return any(use.part == "weight_p" for tensor in tensors for use in tensor.uses())


def present(tensors: Iterable[Tensor], weights) -> list[Tensor]:
    """The tensors whose names are in `weights`."""
    return [tensor for tensor in tensors if tensor.name in weights]


def optional_tensors(tensors: Iterable[Tensor], weights) -> list[Tensor]:
    """The optional tensors whose absence must be stated: by ``bias=False``, or by "without" in a model file.

    The bias of a projection is among them only if there is a projection. The projection itself and the initial state
    are not, because most layers have none.
    """
    usual = ["weight_p", "h0", "c0"] + ["bias_p"] * (not has_projection(present(tensors, weights)))
    return [tensor for tensor in tensors if tensor.optional and not tensor.is_part(*usual)]
