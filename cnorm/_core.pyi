from collections.abc import Callable, Mapping, Sequence
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
    @property
    def data(self) -> Array: ...
    @staticmethod
    def from_data(data: Array) -> Stats: ...
    def __getitem__(self, rows: Any) -> Stats: ...

@overload
def layer_norm(
    x: Array,
    weight: Array | None = None,
    bias: Array | None = None,
    *,
    eps: float = 1e-5,
    axis: int | tuple[int, ...] = -1,
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
    axis: int | tuple[int, ...] = -1,
    out: Array | None = None,
    return_stats: Literal[True],
) -> tuple[Array, Stats]: ...
def layer_norm_backward(
    dy: Array,
    x: Array,
    weight: Array | None,
    stats: Stats,
    *,
    axis: int | tuple[int, ...] = -1,
    out: tuple[Array | None, Array | None, Array | None] | None = None,
) -> tuple[Array, Array | None, Array]: ...
@overload
def add_layer_norm(
    x: Array,
    residual: Array,
    weight: Array | None = None,
    bias: Array | None = None,
    *,
    eps: float = 1e-5,
    axis: int | tuple[int, ...] = -1,
    out: Array | None = None,
    sum_out: Array | None = None,
    return_stats: Literal[False] = False,
) -> tuple[Array, Array]: ...
@overload
def add_layer_norm(
    x: Array,
    residual: Array,
    weight: Array | None = None,
    bias: Array | None = None,
    *,
    eps: float = 1e-5,
    axis: int | tuple[int, ...] = -1,
    out: Array | None = None,
    sum_out: Array | None = None,
    return_stats: Literal[True],
) -> tuple[Array, Array, Stats]: ...
@overload
def rms_norm(
    x: Array,
    weight: Array | None = None,
    *,
    eps: float = 1e-5,
    axis: int | tuple[int, ...] = -1,
    out: Array | None = None,
    return_stats: Literal[False] = False,
) -> Array: ...
@overload
def rms_norm(
    x: Array,
    weight: Array | None = None,
    *,
    eps: float = 1e-5,
    axis: int | tuple[int, ...] = -1,
    out: Array | None = None,
    return_stats: Literal[True],
) -> tuple[Array, Stats]: ...
def rms_norm_backward(
    dy: Array,
    x: Array,
    weight: Array | None,
    stats: Stats,
    *,
    axis: int | tuple[int, ...] = -1,
    out: tuple[Array | None, Array | None] | None = None,
) -> tuple[Array, Array | None]: ...

class BoundLayerNorm:
    def __call__(self, x: Array, out: Array | None = None) -> Array: ...

Gradients = tuple[Array, Array | None, Array]  # dx, dweight, dbias
GradientsOut = tuple[Array | None, Array | None, Array | None]

@overload
def group_norm(
    x: Array,
    groups: int,
    weight: Array | None = None,
    bias: Array | None = None,
    *,
    eps: float = 1e-5,
    out: Array | None = None,
    return_stats: Literal[False] = False,
) -> Array: ...
@overload
def group_norm(
    x: Array,
    groups: int,
    weight: Array | None = None,
    bias: Array | None = None,
    *,
    eps: float = 1e-5,
    out: Array | None = None,
    return_stats: Literal[True],
) -> tuple[Array, Stats]: ...
def group_norm_backward(
    dy: Array,
    x: Array,
    groups: int,
    weight: Array | None,
    stats: Stats,
    *,
    out: GradientsOut | None = None,
) -> Gradients: ...
@overload
def instance_norm(
    x: Array,
    weight: Array | None = None,
    bias: Array | None = None,
    *,
    eps: float = 1e-5,
    out: Array | None = None,
    return_stats: Literal[False] = False,
) -> Array: ...
@overload
def instance_norm(
    x: Array,
    weight: Array | None = None,
    bias: Array | None = None,
    *,
    eps: float = 1e-5,
    out: Array | None = None,
    return_stats: Literal[True],
) -> tuple[Array, Stats]: ...
def instance_norm_backward(
    dy: Array,
    x: Array,
    weight: Array | None,
    stats: Stats,
    *,
    out: GradientsOut | None = None,
) -> Gradients: ...
@overload
def batch_norm(
    x: Array,
    weight: Array | None = None,
    bias: Array | None = None,
    *,
    running_mean: Array | None = None,
    running_var: Array | None = None,
    momentum: float = 0.1,
    running_variance: Literal["unbiased", "biased"] = "unbiased",
    eps: float = 1e-5,
    out: Array | None = None,
    return_stats: Literal[False] = False,
) -> Array: ...
@overload
def batch_norm(
    x: Array,
    weight: Array | None = None,
    bias: Array | None = None,
    *,
    running_mean: Array | None = None,
    running_var: Array | None = None,
    momentum: float = 0.1,
    running_variance: Literal["unbiased", "biased"] = "unbiased",
    eps: float = 1e-5,
    out: Array | None = None,
    return_stats: Literal[True],
) -> tuple[Array, Stats]: ...
def batch_norm_backward(
    dy: Array,
    x: Array,
    weight: Array | None,
    stats: Stats,
    *,
    out: GradientsOut | None = None,
) -> Gradients: ...
def batch_norm_inference(
    x: Array,
    mean: Array,
    var: Array,
    weight: Array | None = None,
    bias: Array | None = None,
    *,
    eps: float = 1e-5,
    out: Array | None = None,
) -> Array: ...
def batch_norm_inference_backward(
    dy: Array,
    x: Array,
    mean: Array,
    var: Array,
    weight: Array | None = None,
    *,
    eps: float = 1e-5,
    out: GradientsOut | None = None,
) -> Gradients: ...
def weight_norm(weight: Array, gain: Array | None = None, *, out: Array | None = None) -> Array: ...
def weight_norm_backward(
    dv: Array,
    weight: Array,
    gain: Array | None = None,
    *,
    out: tuple[Array | None, Array | None] | None = None,
) -> tuple[Array, Array | None]: ...
def divisive_norm(
    x: Array,
    weight: Array | None = None,
    bias: Array | None = None,
    *,
    sigma: float = 1.0,
    mean_radius: int | None = None,
    radius: int | None = None,
    out: Array | None = None,
) -> Array: ...
def divisive_norm_backward(
    dy: Array,
    x: Array,
    weight: Array | None = None,
    *,
    sigma: float = 1.0,
    mean_radius: int | None = None,
    radius: int | None = None,
    out: GradientsOut | None = None,
) -> tuple[Array, Array | None, Array, float]: ...
def smoothing_gradient(
    dy: Array,
    x: Array,
    weight: Array | None,
    stats: Stats,
    smoothing: float,
    *,
    axis: int | tuple[int, ...] = -1,
) -> float: ...

class default_float_env:
    def __enter__(self) -> None: ...
    def __exit__(self, *error: object) -> None: ...

def rounded(value: Any, name: str, dtype: Any = ...) -> float: ...
def sigmoid(x: Array, out: Array | None = None) -> Array: ...
def tanh(x: Array, out: Array | None = None) -> Array: ...

INT8_COLS: int

def round_matrix(w: Array, gates: int, group: int, dtype: Any) -> tuple[Array, Array | None]: ...

class Network:
    input_size: int
    output_size: int
    identity: bytes
    cells: int
    macs: int
    nbytes: int
    longest: int
    tokens: Mapping[int, int]
    @property
    def weights(self) -> str: ...
    def check_frames(self, x: Array, finite: bool = False) -> None: ...
    def __init__(self, layers: Any, identity: bytes, first: int = 0, part: int = 0) -> None: ...

class PackedModel:
    file: Array
    identity: bytes
    configuration: bytes
    directions: tuple[str, ...]
    def __init__(self, file: Array) -> None: ...
    def verify(self) -> None: ...

def pack_model(
    networks: Sequence[Network], directions: Sequence[str], identity: bytes, configuration: bytes
) -> bytes: ...

class Stream:
    model: Model
    network: Network
    frames: int
    @property
    def is_finite(self) -> bool: ...
    def __init__(self, model: Model, network: Network | None = None, check: bool = False) -> None: ...
    def step(self, x: Array, out: Array | None = None) -> NDArray[np.float32]: ...
    def process(self, x: Array, out: Array | None = None) -> NDArray[np.float32]: ...
    def state(self) -> dict[str, NDArray[np.float32]]: ...
    def set_state(self, state: Mapping[str, Array]) -> None: ...
    def reset(self, state: Mapping[str, Array] | None = None) -> None: ...
    def save(self) -> bytes: ...
    def restore(self, saved: bytes) -> None: ...

def step_many(
    network: Network, streams: Sequence[Stream], x: Array, out: Array | None = None, reset: Array | None = None
) -> NDArray[np.float32]: ...

class Tape:
    network: Network
    gradients: tuple[dict[str, NDArray[np.float32]], ...]
    state_arrays: tuple[tuple[str, int, int], ...]
    state: NDArray[np.float32]
    dstate: NDArray[np.float32]
    memory: NDArray[np.float32]
    def __init__(
        self, layers: Any, steps: int, batch: int, network: Network | None = None, memory: Array | None = None
    ) -> None: ...
    def start(self) -> None: ...
    def load(self, i: int, packed: Mapping[str, Any]) -> None: ...
    def run(self, first: int, steps: int, x: Array, y: Array) -> None: ...
    def backward(self, first: int, steps: int, dy: Array, dx: Array | None = None) -> None: ...
    def drop(self, first: int, end: int) -> None: ...

def use_tensors(types: tuple[type, type], dtype: Any, functions: tuple[Any, Any, Any], capsule: Any) -> None: ...
def tensors_at(module: Any, paths: list[tuple[str, ...]]) -> list[Any]: ...

class TrainedCell:
    network: Network
    layer: Any
    plan: NDArray[np.int64]
    whole: dict[int, int]
    def __init__(
        self,
        layer: Any,
        plan: NDArray[np.int64],
        whole: dict[int, int],
        older: TrainedCell | None = None,
        values: list[Array] | None = None,
    ) -> None: ...
    values: list[Array]
    repacks: bool
    def try_repacking(self, zero: Any, trial: Any) -> None: ...
    def again(self, tensors: list[Any]) -> TrainedCell | None: ...
    def run(self, x: Any, h: Any, c: Any, single: bool) -> tuple[tuple[Any, ...], Recording]: ...
    def sums(self) -> Sums: ...

class Recording:
    number: int
    def backward(self, sums: Sums, gradients: tuple[Any, ...], needs: tuple[bool, ...]) -> tuple[Any, Any, Any]: ...

class Sums:
    def gradients(self, blanks: list[tuple[Callable[[Any], Any], Any] | None]) -> list[Any]: ...

def same_network(a: Network, b: Network) -> bool: ...

class Watched:
    tensors: list[Any]
    needs: tuple[bool, ...]
    def __init__(self, tensors: list[Any], arrays: list[Array]) -> None: ...
    def sums(self, task: int) -> Sums | None: ...
    def keep(self, sums: Sums, task: int) -> None: ...
    def changed_version(self) -> tuple[int, int] | None: ...
    def unchanged(self, tensors: list[Any], graph: bool) -> bool: ...

def call_number(recording: Recording) -> int: ...
def same_bits(a: Array, b: Array) -> bool: ...
def adam_update(
    optimiser: Any, powers: Sequence[float], gradient: Array, scale: float, weight: Array, m: Array, v: Array
) -> None: ...
def sgd_update(
    rate: float, momentum: float, gradient: Array, scale: float, weight: Array, velocity: Array | None
) -> None: ...
def square_sum(g: Array) -> float: ...
