"""Learning while streaming: truncated backpropagation through time over a model, at batch size 1."""

from __future__ import annotations

import json
import math
import zlib
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy

from cnorm import _core
from cnorm.arguments import as_array
from cnorm.cells.parameters import Parameters
from cnorm.layers.chain import with_outputs
from cnorm.model import Model
from cnorm.storage.loading import model_from
from cnorm.storage.model_files import configuration
from cnorm.text import message_of

__all__ = ["SGD", "Adam", "Learner"]

# Format 3 of Learner.save: HEAD, a safetensors file whose metadata have the settings as JSON, CRC-32 (zlib's, 4 bytes,
# little-endian) of all bytes before it.
HEAD = b"cnorm learner 3\n"
SAVED = "cnorm.learner"  # key of the metadata
FORMAT = 3


@dataclass(frozen=True)
class Adam:
    """Adam (Kingma and Ba, arXiv:1412.6980, Algorithm 1), float32; the gradient's norm can be clipped first.

    Parameters
    ----------
    lr : float
    betas : tuple of float
        In [0, 1).
    eps : float
    clip : float, optional
        The largest Euclidean norm of all gradients together; larger ones are scaled down to it.
    """

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    clip: float | None = None

    def __post_init__(self):
        _check_positive("lr", self.lr)
        _check_positive("eps", self.eps)
        _check_clip(self.clip)
        object.__setattr__(self, "betas", tuple(self.betas))
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas must be two numbers in [0, 1), got {self.betas!r}")

    moments = 2

    def _update(self, gradient, scale, weight, moments, powers):
        powers = [power * beta for power, beta in zip(powers, self.betas, strict=True)]
        _core.adam_update(self, powers, gradient, scale, weight, *moments)
        return powers


@dataclass(frozen=True)
class SGD:
    """Gradient descent, float32, with momentum as in PyTorch: v = momentum v + g, w -= lr v.

    Parameters
    ----------
    lr : float
    momentum : float
        In [0, 1).
    clip : float, optional
        As in `Adam`.
    """

    lr: float = 1e-2
    momentum: float = 0.0
    clip: float | None = None

    def __post_init__(self):
        _check_positive("lr", self.lr)
        _check_clip(self.clip)
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum must be in [0, 1), got {self.momentum!r}")

    moments = 1

    def _update(self, gradient, scale, weight, moments, powers):
        _core.sgd_update(self.lr, self.momentum, gradient, scale, weight, moments[0])
        return powers


def _check_positive(name, value):
    if not (isinstance(value, (int, float)) and 0 < value < math.inf):
        raise ValueError(f"{name} must be a positive finite number, got {value!r}")


def _check_clip(value):
    if value is not None:
        _check_positive("clip", value)


def _check_model(model: Model) -> None:
    model.stream()  # raises if the model can't be streamed
    if model.weights != "float32":
        raise ValueError(f"model must have float32 weights to learn, got {model.weights}")


class Learner:
    """A stream that can be trained: it stores its last steps and backpropagates through them. One thread at a time.

    Parameters
    ----------
    model : Model
        The initial weights; the model itself is not changed. It must have no bidirectional layers.
    optimizer : Adam or SGD
    truncate : int
        The most steps through which a gradient is propagated; also the most that are stored between two calls of
        `learn`.

    Attributes
    ----------
    remembered : int
        Steps since the last `learn`, at most `truncate`.
    parameters : cnorm.cells.parameters.Parameters
        The weights and the gradient of the last `learn`, each as one flat array.

    Examples
    --------
    >>> import cnorm, numpy as np
    >>> learner = cnorm.Learner(cnorm.demo_model(), cnorm.Adam(1e-3, clip=1.0))
    >>> for frame in np.zeros((20, 12), np.float32):
    ...     scores = learner.step(frame)
    >>> loss = learner.learn(loss="cross_entropy", target=3)  # of the last step, back through all 20
    """

    def __init__(self, model: Model, optimizer: Adam | SGD | None = None, *, truncate: int = 32) -> None:
        if not isinstance(model, Model):
            raise TypeError(f"model must be a cnorm.Model, got {type(model).__name__}")
        _check_model(model)
        optimizer = Adam() if optimizer is None else optimizer
        if not isinstance(optimizer, (Adam, SGD)):
            raise TypeError(f"optimizer must be cnorm.Adam or cnorm.SGD, got {type(optimizer).__name__}")
        if isinstance(truncate, bool) or not isinstance(truncate, int) or truncate < 1:
            raise ValueError(f"truncate must be an integer of at least 1, got {truncate!r}")
        self._prepare(model, optimizer, truncate, None)

    def _prepare(self, model: Model, optimizer: Adam | SGD, truncate: int, tape: np.ndarray | None) -> None:
        """Allocate everything for checked arguments; `tape`: the memory of the tape, copied if it has its size."""
        self.optimizer, self.truncate = optimizer, truncate
        self.input_size, self.output_size = model.input_size, model.output_size
        self._configuration = configuration(model.layers, model.outputs)
        self.parameters = Parameters(with_outputs(model.layers, tuple(model.outputs)), model.input_size)
        self._tape = _core.Tape(self.parameters.flat, 2 * truncate, 1, memory=tape)
        self._outputs = np.zeros((2 * truncate, model.output_size), np.float32)
        self._dy = np.zeros((truncate, model.output_size), np.float32)
        self._moments = [np.zeros_like(self.parameters.values) for _ in range(optimizer.moments)]
        self._kept = np.zeros_like(self.parameters.values)  # sum of the gradients that wait for the next update
        self._waiting = False  # whether there are any
        self._powers = [1.0, 1.0]
        self._end = self.remembered = 0
        self._from_start = True  # whether the first remembered step started from the initial state

    def __repr__(self) -> str:
        size = f"{self.input_size} -> {self.output_size}"
        return f"Learner({size}, {self.optimizer}, truncate={self.truncate}, remembered={self.remembered})"

    def step(self, x: np.ndarray) -> np.ndarray:
        """One step, with the same bits as `Stream.step` of `model()`; it is stored for `learn`.

        Parameters
        ----------
        x : ndarray, shape (input_size,), float32

        Returns
        -------
        y : ndarray, shape (output_size,), float32

        Raises
        ------
        TypeError, ValueError
            For another dtype or shape; the learner is then unchanged.
        """
        x = _checked(x, "x", (self.input_size,))
        self._tape.network.check_frames(x)  # before the tape is moved
        if self._end == 2 * self.truncate:
            self._tape.drop(self._end - self.truncate, self._end)
            self._outputs[: self.truncate] = self._outputs[self.truncate :]
            self._end = self.truncate
        y = np.empty(self.output_size, np.float32)
        self._tape.run(self._end, 1, x, y)
        self._outputs[self._end] = y
        self._end += 1
        if self.remembered == self.truncate:
            self._from_start = False
        else:
            self.remembered += 1
        return y

    def learn(
        self, dy: np.ndarray | None = None, *, loss: str | None = None, target: Any = None, update: bool = True
    ) -> float | None:
        """Backpropagate through the remembered steps and update the weights.

        The state stays as it is; the steps are forgotten.

        Parameters
        ----------
        dy : ndarray, shape (output_size,) or (k, output_size), float32
            The gradient of the loss with respect to the last output, or to the last k.
        loss : "cross_entropy" or "squared_error"
            Given instead of `dy`: the softmax cross-entropy of the last k outputs, or half their squared error, as the
            mean over the k steps that `target` is for.
        target : int, sequence of k ints, or ndarray of shape (output_size,) or (k, output_size), float32
            The classes, or the wanted outputs.
        update : bool
            False: leave the weights and keep the gradient; the next update uses the sum. So a batch of sequences is
            learned one after the other, in this order.

        Returns
        -------
        float or None
            The loss, if `loss` is given.

        Raises
        ------
        TypeError, ValueError
            For wrong arguments; the learner is then unchanged.
        FloatingPointError
            For a gradient that is not finite; the message names the tensor. Weights, optimiser and state are unchanged,
            but the remembered steps are forgotten.
        """
        if (dy is None) == (loss is None):
            raise TypeError("learn takes either dy or loss and target")
        if self.remembered == 0:
            raise ValueError("learn needs at least one step since the last call of learn")
        value = None
        if loss is not None:
            value, dy = self._loss(loss, target)
        dy = self._last(dy, "dy")
        steps = self.remembered
        self._dy[: steps - len(dy)] = 0
        self._dy[steps - len(dy) : steps] = dy
        self._tape.dstate[...] = 0
        self._tape.backward(self._end - steps, steps, self._dy[:steps, None])
        self.parameters.collect(self._tape, self._from_start)
        self.forget()
        self._check_gradient()
        if self._waiting:
            self.parameters.gradient += self._kept
            self._check_gradient()
        if update:
            self._update()
        else:
            self._kept[:] = self.parameters.gradient
        self._waiting = not update
        return value

    def forget(self) -> None:
        """Forget the remembered steps but not the state: the next gradient reaches back to here."""
        self._end = self.remembered = 0
        self._from_start = False

    def _check_gradient(self):
        if not math.isfinite(_core.square_sum(self.parameters.gradient)):
            name = self.parameters.first_not_finite()
            raise FloatingPointError(f"the gradient of {name} is not finite; weights and optimiser are as before")

    def _update(self):
        parameters, clip = self.parameters, self.optimizer.clip
        norm = math.sqrt(_core.square_sum(parameters.gradient))
        scale = clip / norm if clip is not None and norm > clip else 1.0
        weights, moments = parameters.values.copy(), [moment.copy() for moment in self._moments]
        powers = self.optimizer._update(parameters.gradient, scale, weights, moments, self._powers)
        if not math.isfinite(_core.square_sum(weights)):
            raise FloatingPointError("the update leaves the range of float32; weights and optimiser are as before")
        parameters.values[:], self._moments, self._powers = weights, moments, powers
        parameters.load_into(self._tape)

    def _last(self, dy, name: str) -> np.ndarray:
        """dy, or target, as an array [k, outputs], checked."""
        rows = as_array(dy, name)
        rows = rows[None] if rows.ndim == 1 else rows
        k = len(rows) if rows.ndim == 2 else 0
        if rows.dtype != np.float32:
            raise TypeError(f"{name} must have dtype float32, got {rows.dtype}")
        if rows.ndim != 2 or rows.shape[1] != self.output_size or not 0 < k <= self.remembered:
            raise ValueError(
                f"{name} must have shape ({self.output_size},) or (k, {self.output_size}) with k from 1 to the "
                f"{self.remembered} steps that are remembered, got {np.shape(dy)}"
            )
        return rows

    def _loss(self, loss: str, target) -> tuple[float, np.ndarray]:
        if loss == "squared_error":
            wanted = self._last(target, "target")
            difference = self._outputs[self._end - len(wanted) : self._end] - wanted
            dy = difference / np.float32(len(wanted))
            return 0.5 * float(np.sum(np.float64(difference) ** 2)) / len(wanted), dy
        if loss != "cross_entropy":
            raise ValueError(f"loss must be 'cross_entropy' or 'squared_error', got {loss!r}")
        classes = np.atleast_1d(np.asarray(target))
        k = len(classes) if classes.ndim == 1 else 0
        if classes.dtype.kind not in "iu" or not 0 < k <= self.remembered:
            raise ValueError(
                f"target must be an integer, or one for each of the last k of the {self.remembered} steps that are "
                f"remembered, got {target!s:.80}"
            )
        if not ((classes >= 0) & (classes < self.output_size)).all():
            raise ValueError(f"target must be from 0 to {self.output_size - 1}, got {target!r:.80}")
        y = self._outputs[self._end - k : self._end]
        share = softmax(y)
        value = -sum(math.log(max(float(share[i, c]), 5e-324)) for i, c in enumerate(classes)) / k
        share[np.arange(k), classes] -= 1
        return value, share / np.float32(k)

    def model(self) -> Model:
        """A model with the present weights; it does not change when the learner goes on."""
        return model_from(self._configuration, self.parameters.arrays)

    def reset(self) -> None:
        """Set the state to the initial state and forget the remembered steps."""
        self._tape.start()
        self.forget()
        self._from_start = True

    def save(self) -> bytes:
        """Weights, optimiser, state and remembered steps, as bytes with a checksum.

        Returns
        -------
        bytes
            For `restore`: 16 bytes of head, a safetensors file, and the CRC-32 of both.
        """
        settings = {
            "format": FORMAT,
            "model": self._configuration,
            "optimizer": type(self.optimizer).__name__,
            "settings": asdict(self.optimizer),
            "truncate": self.truncate,
            "end": self._end,
            "remembered": self.remembered,
            "from_start": self._from_start,
            "waiting": self._waiting,
            "powers": [power.hex() for power in self._powers],
        }
        tensors = {f"model.{name}": array for name, array in self.parameters.arrays.items()}
        tensors |= {f"moment.{i}": moment for i, moment in enumerate(self._moments)}
        tensors |= {"state": self._tape.state, "tape": self._tape.memory, "outputs": self._outputs, "kept": self._kept}
        tensors = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
        body = HEAD + safetensors.numpy.save(tensors, {SAVED: json.dumps(settings)})  # more keys have no fixed order
        return body + zlib.crc32(body).to_bytes(4, "little")

    @classmethod
    def restore(cls, saved: bytes) -> Learner:
        """The learner that `save` wrote; it continues with the same bits.

        Parameters
        ----------
        saved : bytes
            Any byte of it that has changed is found by the checksum; it may come from an untrusted source.

        Raises
        ------
        TypeError
            If `saved` is not bytes.
        ValueError
            If it is not what `save` wrote. Nothing that is larger than `saved` itself is allocated before its sizes are
            checked.
        """
        if not isinstance(saved, bytes):
            raise TypeError(f"saved must be bytes, got {type(saved).__name__}")
        if saved[: len(HEAD)] != HEAD:
            raise ValueError(f"saved is not what Learner.save wrote: it begins {saved[: len(HEAD)]!r}, not {HEAD!r}")
        if zlib.crc32(saved[:-4]) != int.from_bytes(saved[-4:], "little"):
            raise ValueError("saved is not what Learner.save wrote: its checksum does not match")
        saved = saved[len(HEAD) : -4]
        try:
            tensors = safetensors.numpy.load(saved)
            metadata = json.loads(saved[8 : 8 + int.from_bytes(saved[:8], "little")])["__metadata__"]
            settings = json.loads(metadata[SAVED])
            if settings["format"] != FORMAT:
                raise ValueError(f"the format is {settings['format']!r}, this version reads {FORMAT}")
            return cls._restored(tensors, settings)
        except (safetensors.SafetensorError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise ValueError(f"saved is not what Learner.save wrote: {message_of(error)}") from None

    @classmethod
    def _restored(cls, tensors, settings) -> Learner:
        """The learner of untrusted tensors and settings."""
        own = {name.removeprefix("model."): a for name, a in tensors.items() if name.startswith("model.")}
        optimizer = {"Adam": Adam, "SGD": SGD}[settings["optimizer"]](**settings["settings"])
        model, truncate = model_from(settings["model"], own), settings["truncate"]
        _check_model(model)
        if type(truncate) is not int or truncate < 1 or tensors["outputs"].shape != (2 * truncate, model.output_size):
            raise ValueError(f"truncate and outputs must fit, got {truncate!r} and {tensors['outputs'].shape}")
        learner = cls.__new__(cls)
        learner._prepare(model, optimizer, truncate, tensors["tape"])
        learner._take(tensors, settings)
        return learner

    def _take(self, tensors, settings):
        """Set everything except weights and tape from untrusted tensors and settings."""
        into = {"state": self._tape.state, "outputs": self._outputs, "kept": self._kept}
        into |= {f"moment.{i}": moment for i, moment in enumerate(self._moments)}
        for name, array in into.items():
            if tensors[name].shape != array.shape or tensors[name].dtype != np.float32:
                raise ValueError(f"{name} must be float32 of shape {array.shape}")
            array[...] = tensors[name]
        if not all(np.isfinite(part).all() for part in (self._tape.state, self._kept, *self._moments)):
            raise ValueError("state, moments and kept gradients must be finite")
        end, remembered = settings["end"], settings["remembered"]
        if not all(type(n) is int for n in (end, remembered)) or not 0 <= remembered <= min(end, self.truncate):
            raise ValueError(f"end and remembered must fit truncate, got {end!r} and {remembered!r}")
        if end > 2 * self.truncate:
            raise ValueError(f"end must be at most {2 * self.truncate}, got {end}")
        self._end, self.remembered, self._from_start = end, remembered, settings["from_start"] is True
        self._waiting = settings["waiting"] is True
        powers = [float.fromhex(power) for power in settings["powers"]]
        if len(powers) != len(self._powers) or not all(0 <= power <= 1 for power in powers):
            raise ValueError(f"powers must be {len(self._powers)} numbers from 0 to 1, got {powers}")
        self._powers = powers


def softmax(y: np.ndarray) -> np.ndarray:
    """softmax of each row, float32, the same bits everywhere: exp(t) = s / (1 - s) with s = sigmoid(t), t <= 0."""
    s = _core.sigmoid(y - y.max(-1, keepdims=True))
    e = s / (1 - s)
    total = np.zeros(e.shape[:-1], np.float32)
    for column in np.moveaxis(e, -1, 0):  # in a fixed order: the order of NumPy's sum depends on the processor
        total = total + column
    return e / total[..., None]


def _checked(x, name: str, shape: tuple[int, ...]) -> np.ndarray:
    x = as_array(x, name)
    if x.dtype != np.float32:
        raise TypeError(f"{name} must be a float32 array, got {x.dtype}")
    if x.shape != shape:
        raise ValueError(f"{name} must have shape {shape}, got {x.shape}")
    return np.ascontiguousarray(x)
