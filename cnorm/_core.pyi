from collections.abc import Mapping, Sequence
from typing import Any, Literal, overload

import numpy as np
from numpy.typing import NDArray

from cnorm.model import Model

Array = NDArray[Any]

def available_isas() -> tuple[str, ...]: ...
def active_isa() -> str: ...
def use_isa(name: str) -> None: ...

class Stats:
    def __init__(self, mean: Array, inv_std_dev: Array) -> None: ...
    @property
    def mean(self) -> Array: ...
    @property
    def inv_std_dev(self) -> Array: ...
    def __getitem__(self, rows: Any) -> Stats: ...

@overload
def layer_norm(
    x: Array,
    weight: Array | None = None,
    bias: Array | None = None,
    *,
    eps: float = 1e-5,
    axis: int = -1,
    out: Array | None = None,
    return_stats: Literal[False] = False,
) -> Array: ...
@overload
def layer_norm(
    x: Array,
    weight: Array | None = None,
    bias: Array | None = None,
    *,
    eps: float = 1e-5,
    axis: int = -1,
    out: Array | None = None,
    return_stats: Literal[True],
) -> tuple[Array, Stats]: ...
def layer_norm_backward(
    dy: Array,
    x: Array,
    weight: Array | None,
    stats: Stats,
    *,
    axis: int = -1,
    out: tuple[Array | None, Array | None, Array | None] | None = None,
) -> tuple[Array, Array | None, Array]: ...
def sigmoid(x: Array, out: Array | None = None) -> Array: ...
def tanh(x: Array, out: Array | None = None) -> Array: ...

class Network:
    input_size: int
    output_size: int
    identity: bytes
    state_arrays: tuple[tuple[str, int, int], ...]
    def __init__(self, layers: Any, identity: bytes) -> None: ...

class Stream:
    model: Model
    def __init__(self, model: Model, network: Network | None = None) -> None: ...
    def step(self, x: Array, out: Array | None = None) -> NDArray[np.float32]: ...
    def process(self, x: Array, out: Array | None = None) -> NDArray[np.float32]: ...
    def state(self) -> dict[str, NDArray[np.float32]]: ...
    def set_state(self, state: Mapping[str, Array]) -> None: ...
    def reset(self, state: Mapping[str, Array] | None = None) -> None: ...
    def save(self) -> bytes: ...

def step_many(
    model: Model, streams: Sequence[Stream], x: Array, out: Array | None = None, reset: Array | None = None
) -> NDArray[np.float32]: ...
