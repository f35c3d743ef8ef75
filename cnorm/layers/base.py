"""What every layer is: immutable, with weights and sizes, and what packing, files, training and rounding ask of it.

A kind of layer is a file of this package; the functions that it overrides are those of `Layer` whose default does not
hold for it. Nothing outside asks for a layer's class.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np

from cnorm.cells.packing import Parts
from cnorm.cells.rounded import Matrix, Rows
from cnorm.cells.tensors import Tensor
from cnorm.cells.weights import checked
from cnorm.text import listed, quoted

INPUT = "input"  # the name of the frame


class Layer:
    """Base of all layers: immutable, with a kind, weights and sizes."""

    kind: ClassVar[str]
    part: ClassVar[str]  # its kind in src/rnn/layers
    fields: ClassVar[Mapping[str, str]] = MappingProxyType({})  # tensors to fields of that kind
    recurrent: ClassVar[bool] = False  # whether it has an initial state among its weights
    stateful: bool = False  # whether it has a state, so that its number counts in the names of states
    whole_sequence: ClassVar[bool] = False  # whether it needs the end of a sequence, so that it has no streams
    continues: ClassVar[bool] = True  # whether it reads the layer before it
    reads: tuple[str, ...] = ()  # the names that it reads
    name: str | None = None  # by which later layers of the same list read its outputs
    weights: Mapping[str, np.ndarray] = MappingProxyType({})
    rows: Mapping[str, Rows] = MappingProxyType({})  # matrices rounded to int8 or float16, by name
    absent_biases: tuple[str, ...] = ()  # names of the optional biases that the layer does not have
    input_size: int | None
    output_size: int | None

    def __setattr__(self, name, value):
        if name in self.__dict__:
            raise AttributeError(f"a layer is immutable: {name} can't be set")
        self.__dict__[name] = value

    def __reduce_ex__(self, protocol):
        made = self.__reduce__()
        return made if self.name is None else (*made[:2], {"name": self.name})

    def __reduce__(self):
        return remade, (type(self), self.entry(), dict(self.weights), dict(self.rows))

    def _take_weights(self, tensors: Sequence[Tensor], weight: Any, bias: Any) -> dict[str, int]:
        """Check and keep weight and, if there is one, bias; the sizes that follow from their shapes."""
        given = {"weight": weight} if bias is None else {"weight": weight, "bias": bias}
        self.weights, sizes = checked(given, tensors, self.kind)
        self.absent_biases = ("bias",) if bias is None else ()
        return sizes

    # ---- what it reads

    def outputs(self, size: int, sizes: Mapping[str, int]) -> int:
        """The number of its outputs behind a layer with `size`; `sizes`: of what it can read by name."""
        return self.output_size or size

    def joined(self, x: np.ndarray, known: Mapping[str, np.ndarray]) -> np.ndarray:
        """Its outputs [frames, outputs], if it reads others by name: x is those of the layer before."""
        raise NotImplementedError

    # ---- layers of layers

    def inner(self) -> dict[str, Layer]:
        """The layers in this one, by the names that they have in those of tensors; most have none."""
        return {}

    def with_inner(self, layers: Mapping[str, Layer]) -> Layer:
        """This layer with others in it, of the same name."""
        return self

    def leaves(self, name: str) -> Iterator[tuple[str, Layer]]:
        """The layers that hold no others, this one or those in it, as (name, layer)."""
        inner = self.inner()
        if not inner:
            yield name, self
        for key, layer in inner.items():
            yield from layer.leaves(f"{name}.{key}")

    def through(self, name: str, x: np.ndarray, run: Callable[[str, Layer, np.ndarray], np.ndarray]) -> np.ndarray:
        """Its outputs [frames, outputs] for x, if it holds others; run(name, layer, x) gives those of one of them."""
        raise NotImplementedError

    def flat(self, size: int, scope: Scope) -> list[tuple[Any, int]]:
        """The runtime's layers, (packable, output size) each, for `size` inputs; `scope`: what it may read."""
        return [(self, self.output_size or size)]

    # ---- packing and training

    def options(self, size: int) -> dict[str, float]:
        """The options of its kind in src/rnn/layers; `size`: its outputs."""
        return {}

    def packed(self, weights: Mapping[str, np.ndarray] | None = None) -> dict:
        """The arrays of its fields, those of other `weights` if given."""
        weights = self.weights if weights is None else weights
        return {self.fields[name]: array for name, array in weights.items()}

    def parts(self, size: int) -> Parts:
        """What it is packed from; `size`: its outputs."""
        matrices = {self.fields[name]: matrix.given(self.rows.get(name)) for name, matrix in self.matrices().items()}
        return Parts(self.part, self.options(size), self.packed() | matrices)

    def gradient_targets(self, into: Mapping[str, np.ndarray]) -> list[tuple[np.ndarray, str, int | None]]:
        """Where gradients are added to arrays `into`, shaped as the weights: (view, field, gate), see
        `weights.gradient_views`."""
        matrices = self.matrices()
        return [(into[name], self.fields[name], 0 if name in matrices else None) for name in self.weights]

    # ---- rounding

    def matrices(self) -> dict[str, Matrix]:
        """Its matrices by the names of `rows`, in float32."""
        return {}

    def longest_sum(self) -> int:
        """The terms of its longest sum of products for one frame, with which rounding errors grow."""
        return max((matrix.values.shape[1] for matrix in self.matrices().values()), default=1)

    @classmethod
    def filled(cls, entry: dict, rows: Mapping[str, Rows], others: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The tensors of an untrusted entry: `others`, and those that hold matrices filled with the values of rows."""
        raise ValueError(f"{cls.kind} has no matrices that can be rounded, got {sorted(rows)}")

    def with_rows(self, rows: Mapping[str, Rows]) -> Layer:
        """The layer with rounded matrices, of the same name."""
        others = {name: array for name, array in self.weights.items() if name not in self.replaced()}
        return with_name(remade(type(self), self.entry(), self.filled(self.entry(), rows, others), rows), self.name)

    def replaced(self) -> tuple[str, ...]:
        """Names of the tensors that the rows of rounded matrices replace in a file."""
        return tuple(self.matrices())

    def all_rows(self) -> list[Rows]:
        """The `rows` of this layer and of the layers in it."""
        return [rows for layer in [self, *self.inner().values()] for rows in layer.rows.values()]

    # ---- files

    def entry(self) -> dict:
        """What a model file's configuration says of it besides type, rows and absent biases."""
        return {}

    @classmethod
    def from_entry(cls, entry: dict, weights: Mapping[str, np.ndarray], read: Callable | None) -> Layer | None:
        """The layer of an untrusted entry without type and rows; None if the entry has other keys than `entry` gives.

        read(entries, weights) reads the layers in it: both by the names of `inner`.
        """
        raise NotImplementedError


class Bound:
    """One of the runtime's layers, where a layer is made of several: the parts of one place in its list."""

    weights: Mapping[str, np.ndarray] = MappingProxyType({})
    stateful = False

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    def parts(self, size: int) -> Parts:
        return self._parts


@dataclass
class Scope:
    """What a layer can read by name.

    Attributes
    ----------
    sizes, places : dict of str to int
        Outputs by name, and the place in the runtime's list of the layer whose input they are.
    here : int
        The place of the layer.
    """

    sizes: dict[str | None, int]
    places: dict[str | None, int]
    here: int = 0

    def back(self, name: str) -> int:
        """How many places before this one is the layer whose input has a name."""
        return self.here - self.places[name]


def name_of(name: Any, argument: str) -> str:
    """A layer's name, which is also that of an output in files of other formats."""
    if not isinstance(name, str):
        raise TypeError(f"{argument} must be a str, got {type(name).__name__}")
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_.]{0,63}", name):
        raise ValueError(
            f"{argument} must be at most 64 letters, digits, _ and ., the first a letter, got {quoted(name)}"
        )
    return name


def at_least(least: int, value: Any, name: str) -> int:
    """An option of a layer that is an integer, checked to be in range."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} must be an int, got {type(value).__name__}")
    if not least <= value < 1 << 28:
        raise ValueError(f"{name} must be at least {least} and below 2^28, got {value}")
    return int(value)


def refuse_hooks(module: Any, what: str = "the module") -> None:
    """Refuse a module of PyTorch with a forward of its own, or hooks: weight_norm and prune compute a weight in one."""
    if "forward" in vars(module):
        raise ValueError(f"{what} must have the forward of its class, got another one set on the instance")
    hooks = [hook for name in ("_forward_pre_hooks", "_forward_hooks") for hook in getattr(module, name, {}).values()]
    if hooks:
        raise ValueError(
            f"{what} must have no forward hooks, which may change its weights and outputs, got "
            f"{getattr(hooks[0], '__name__', type(hooks[0]).__name__)}: remove them, as "
            "torch.nn.utils.remove_weight_norm does"
        )


def check_own_forward(module: Any) -> None:
    """Refuse a module that may compute something else than its class in torch.nn does: by a subclass, or as above."""
    refuse_hooks(module)
    for name in ("forward", "__call__"):
        of = next((of for of in type(module).__mro__ if name in vars(of)), None)
        if of is not None and not of.__module__.startswith(("torch.nn.modules.", "cnorm.torch.")):
            raise ValueError(
                f"the module must have the {name} of a class of torch.nn, got that of {of.__module__}."
                f"{of.__qualname__}: what it computes is not in its tensors"
            )


def with_name(layer: Layer, name: Any) -> Layer:
    """A new layer, which takes over a name if there is one."""
    if name is not None:
        if name == INPUT:
            raise ValueError(f"name must be another than {INPUT!r}, which is the frame")
        layer.name = name_of(name, "name")
    return layer


def with_type(layer: Layer) -> dict:
    """All that a model file's configuration says of a layer."""
    entry = {"type": layer.kind} | ({} if layer.name is None else {"name": layer.name})
    entry |= ({"rows": list(layer.rows)} if layer.rows else {}) | layer.entry()
    return entry | ({"without": list(layer.absent_biases)} if layer.absent_biases else {})


def remade(kind: type[Layer], entry: dict, weights: Mapping[str, np.ndarray], rows: Mapping[str, Rows]) -> Layer:
    """The layer of its `entry` and weights, those of rounded matrices filled with the values of `rows`."""
    layer = kind.from_entry(entry, weights, None)  # nothing to read: layers of layers have a `__reduce__` of their own
    layer.rows = MappingProxyType(dict(rows))
    return layer


def weight_and_bias(kind: str, weights: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
    """The tensors of a file's layer, which must be weight and perhaps bias."""
    if "weight" not in weights or not weights.keys() <= {"weight", "bias"}:
        raise ValueError(f"{kind} must have the tensors weight and bias, got {listed(sorted(weights))}")
    return weights
