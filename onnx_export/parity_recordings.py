"""The calls that `check_parity` judges: recordings, given or random, and hard calls that ordinary ones do not reach."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from cnorm.arguments import whole_number
from cnorm.layers.embedding import in_tokens
from onnx_export.builders import states_of
from onnx_export.float64 import widen
from onnx_export.nodes import model_graphs, model_nodes
from onnx_export.parity_engines import Interface
from onnx_export.quantizer import DOMAIN

__all__ = ["Domain", "HardCall", "hard_calls", "recordings", "weights_varied", "whole_calls"]


NEGATIVE = -30.0  # beside numbers from 1 to 2 negative enough to show, and no overflow of exp
LEAST = 2.0**-24  # of what must be positive
FAR = 200.0  # where float32's exp, sigmoid, tanh and softmax have underflowed
PARTIAL = {"log", "sqrt"}  # functions without a value for some numbers


class Domain:
    """The frames for which a model has outputs: token ids are ids, and what logs and roots read is positive.

    Parameters
    ----------
    model : cnorm.Model

    Attributes
    ----------
    positive : tuple of int
        Elements of a frame whose negative values give no numbers.
    bounded : bool
        Whether frames of this domain give no numbers at FAR, where a function before a log underflows.
    """

    def __init__(self, model) -> None:
        self._model, self.positive, self.bounded = model, (), False
        functions = {getattr(leaf, "function", "") for layer in model.layers for _, leaf in layer.leaves("")}
        if not functions & PARTIAL:
            return
        size = model.input_size
        usual = in_tokens(np.linspace(1, 2, size, dtype=np.float32), model.tokens)
        tried = [i for i in range(size) if i not in model.tokens]
        self.positive = tuple(
            i for i in tried if not self._has_numbers(np.where(np.arange(size) == i, NEGATIVE, usual))
        )
        if not all(self._has_numbers(self(x)) for x in np.random.default_rng(0).standard_normal((8, size))):
            self.positive = tuple(tried)  # only several together are too small
        self.bounded = not all(self._has_numbers(self(np.full(size, far))) for far in (FAR, -FAR))

    def __call__(self, x: np.ndarray, least: float = LEAST) -> np.ndarray:
        """A copy of random frames [..., inputs], within the domain."""
        x, at = in_tokens(x, self._model.tokens), list(self.positive)
        x[..., at] = np.maximum(np.abs(x[..., at]), least)
        return x

    def outside(self, x: np.ndarray) -> np.ndarray:
        """A copy of random frames whose elements that must be positive are negative."""
        x, at = in_tokens(x, self._model.tokens), list(self.positive)
        x[..., at] = NEGATIVE
        return x

    def _has_numbers(self, frame: np.ndarray) -> bool:
        """Whether two such frames give numbers, the second from the state behind the first."""
        return bool(np.isfinite(self._model.run(np.stack([frame, frame]).astype(np.float32))).all())


@dataclass(frozen=True)
class HardCall:
    """A call from states that no recording may reach.

    Attributes
    ----------
    name : str
        The value of `Row.recording`.
    x : ndarray [T, 1, inputs]
    states : dict of str to ndarray [1, units]
    """

    name: str
    x: np.ndarray
    states: dict[str, np.ndarray]


def hard_calls(given: Interface, inputs: int, layers, rng: np.random.Generator) -> Iterator[HardCall]:
    """Calls on which files fail that are right on standard normal inputs.

    A missing eps gives NaN on zeros, where nothing varies, and another eps shows where the variance is of its size. A
    clip shows on large values; so does a one-pass variance on repeated ones. Cell states beyond their clip are never
    reached by ordinary inputs.
    """
    shape = (given.frames or 1, 1, inputs)
    zeros = {name: np.zeros((1, units)) for name, units in given.states.items()}

    def noise(scale: float) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        return scale * rng.standard_normal(shape), {n: scale * rng.standard_normal(a.shape) for n, a in zeros.items()}

    yield HardCall("zeros", np.zeros(shape), zeros)
    yield HardCall("scale 100", 100 * rng.standard_normal(shape), zeros)
    yield HardCall("repeated values", np.full(shape, 0.75), {name: a + 0.5 for name, a in zeros.items()})
    # float16 has no digits to spare below 6e-5
    for scale in (1e-3,) if given.dtype == np.float16 else (1e-4, 1e-6):
        yield HardCall(f"scale {scale:.0e}", *noise(scale))
    clips = _cell_clips(layers)
    if clips:
        states = dict(zeros)
        for name, limit in clips.items():
            states[name] = np.where(np.arange(states[name].size) % 2, -4.0, 4.0)[None] * limit
        yield HardCall("cells beyond their clip", rng.standard_normal(shape), states)


def _cell_clips(layers) -> dict[str, float]:
    """The state of each clipped cell, and its limit."""
    clips, recurrent = {}, 0
    for layer in (leaf for one in layers for _, leaf in one.leaves("")):
        if states_of(layer):
            if layer.recurrent and layer.spec.cell_clip is not None:
                clips[f"c{recurrent}"] = layer.spec.cell_clip
            recurrent += 1
    return clips


def weights_varied(model: onnx.ModelProto, noise: float, unit: float, rng: np.random.Generator) -> onnx.ModelProto:
    """A widened copy whose stored arrays are changed relatively by `noise`; single numbers, such as eps, are kept.

    So are, by `unit`, the results of Log: these may be nearly equal numbers far from 0 whose rounding a norm enlarges.
    """
    wide = widen(model)
    for graph in model_graphs(wide):
        for node in [node for node in graph.node if node.op_type == "Log" and not node.domain]:
            name, node.output[0] = node.output[0], f"{node.output[0]}/exact"
            seed = int(rng.integers(1 << 30))
            varied = helper.make_node("Varied", node.output, [name], domain=DOMAIN, noise=unit, seed=seed)
            graph.node.insert(list(graph.node).index(node) + 1, varied)
    if all(entry.domain != DOMAIN for entry in wide.opset_import):
        wide.opset_import.append(helper.make_opsetid(DOMAIN, 1))
    tensors = [tensor for graph in model_graphs(wide) for tensor in graph.initializer]
    constants = (node for node in model_nodes(wide) if node.op_type == "Constant")
    tensors += [a.t for node in constants for a in node.attribute if a.name == "value"]
    for tensor in tensors:
        if tensor.data_type == TensorProto.DOUBLE and np.prod(tensor.dims) > 1:
            array = numpy_helper.to_array(tensor)
            varied = array * (1 + noise * rng.standard_normal(array.shape))
            tensor.CopyFrom(numpy_helper.from_array(varied, tensor.name))
    return wide


def whole_calls(given: list[np.ndarray], frames: int, random: bool) -> list[np.ndarray]:
    """Recordings whose length is a multiple of the steps in a call; random ones are lengthened to one."""
    if random:
        return [np.resize(x, (-(-len(x) // frames) * frames, x.shape[1])) for x in given]
    for i, recording in enumerate(given):
        if len(recording) % frames:
            raise ValueError(
                f"onnx_model takes {frames} steps in each call: recordings must have a multiple of that many steps, "
                f"got {len(recording)} in recording {i}"
            )
    return given


def recordings(model, domain: Domain, inputs, steps, seed) -> list[np.ndarray]:
    """The argument `inputs` of `check_parity` as checked arrays; standard normal numbers for None."""
    if inputs is None:
        shape = whole_number(steps, "steps", 1), model.input_size
        x = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
        return [domain(x)]
    if isinstance(inputs, np.ndarray):
        inputs = [inputs]
    if not isinstance(inputs, Iterable) or isinstance(inputs, (str, bytes, dict)):
        raise TypeError(f"inputs must be an array or a list of arrays, got {type(inputs).__name__}")
    inputs = list(inputs)
    for i, recording in enumerate(inputs):
        if not isinstance(recording, np.ndarray) or recording.dtype != np.float32:
            got = getattr(recording, "dtype", type(recording).__name__)
            raise TypeError(f"inputs[{i}] must be a float32 array, got {got}")
        if recording.ndim != 2 or recording.shape[1] != model.input_size:
            raise ValueError(f"inputs[{i}] must have shape (steps, {model.input_size}), got {recording.shape}")
        if not np.isfinite(recording).all():  # engines that all give NaN would seem to agree
            step = int(np.argmin(np.isfinite(recording).all(axis=1)))
            raise ValueError(f"inputs[{i}] must be finite, got NaN or infinity at step {step}")
    if not sum(map(len, inputs)):
        raise ValueError("inputs must have at least one step, got none")
    return [np.ascontiguousarray(recording) for recording in inputs]
