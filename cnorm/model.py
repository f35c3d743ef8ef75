"""Models: stacks of layers."""

from __future__ import annotations

import html
import itertools
import os
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from cnorm import _core
from cnorm.arguments import as_array
from cnorm.cells.packing import check_panels
from cnorm.cells.rounded import check_weights, rounded_layers, weight_type
from cnorm.comparison import Comparison, compare
from cnorm.layers.base import INPUT, Layer
from cnorm.layers.chain import chained, flat, named_outputs, shown, sizes_of, slices
from cnorm.storage.files import write_whole
from cnorm.storage.model_files import configuration, identity, named_tensors, saved
from cnorm.storage.modules import layers_of
from cnorm.storage.packed import from_bytes, outputs_of, packed_file, summary, unchanged_bytes
from cnorm.storage.stream_state import set_states
from cnorm.text import clip

__all__ = ["Model"]

SHOWN_LAYERS = 6


class Model:
    """A stack of layers, immutable and shared by any number of streams and threads.

    Parameters
    ----------
    layers : sequence of layers, or a torch.nn.Sequential
        Applied in order; each layer's input_size is the output_size of the one before. By a layer's name `Add` and
        others read its outputs. Modules of torch.nn and pairs (name, module) are converted, see docs/cells.md.
    outputs : sequence of str
        Names of the layers whose outputs the model gives, concatenated; the last layer's if there is none.

    Attributes
    ----------
    layers : tuple
    outputs : mapping of str to slice
        Where each of the outputs is in y; empty if none is named.
    input_size, output_size : int
    tokens : mapping of int to int
        The number of tokens, by the element of a frame that is a token id; empty without an `Embedding`.

    Raises
    ------
    TypeError
        If an element is not a layer, or outputs are no names.
    ValueError
        If there is no layer, the sizes do not fit, a name is there twice or not at all, or nobody reads a layer.

    Examples
    --------
    >>> import cnorm, numpy as np
    >>> model = cnorm.demo_model()
    >>> stream = model.stream()
    >>> stream.step(np.zeros(12, np.float32)).shape
    (9,)
    """

    unproven = False  # read from a file of another program, and not compared with it
    window: int | None = None  # frames after which a stream is reset, of a file that takes as many in each call

    def __init__(self, layers: object, outputs: Sequence[str] = ()) -> None:
        self._layers = layers = chained(layers_of(layers))
        layers, self._outputs = named_outputs(layers, outputs)
        self._input_size, *_, self._output_size = sizes = sizes_of(layers)
        self._identity = identity(self._layers, self._outputs)
        self._parts = []  # lists run in order: one network, or the two directions of a bidirectional layer
        self._original: Model | None = None  # the float32 model that this one was rounded from
        self._packed: _core.PackedModel | None = None  # the file, if the model is one of a packed file
        cells, at, frame = 0, 0, INPUT  # recurrent layers and layers so far, and the name of what the next one reads
        for bidirectional, group in itertools.groupby(layers, lambda layer: layer.whole_sequence):
            for part in ([layer] for layer in group) if bidirectional else [list(group)]:
                self._parts.append([])
                for way in [[way] for way in part[0].inner().values()] if bidirectional else [part]:
                    network = _core.Network(flat(way, sizes[at], frame), self._identity, cells)
                    cells += network.cells
                    self._parts[-1].append(network)
                at, frame = at + len(part), part[-1].name
                check_panels([network for networks in self._parts for network in networks])

    @classmethod
    def _of_packed(cls, packed: _core.PackedModel) -> Model:
        """The model of a packed file: networks without the layers that they were packed from."""
        self = cls.__new__(cls)
        self._layers, self._original, self._packed, self._identity = (), None, packed, packed.identity
        self._parts, cells = [], 0
        for i, direction in enumerate(packed.directions):
            network = _core.Network(packed, packed.identity, cells, i)
            cells += network.cells
            if direction == "backward":
                self._parts[-1].append(network)
            else:
                self._parts.append([network])
        self._input_size = self._parts[0][0].input_size
        self._output_size = sum(network.output_size for network in self._parts[-1])
        sizes, self.window = outputs_of(packed, self._output_size)
        self._outputs = slices(sizes)
        return self

    @property
    def layers(self) -> tuple[Layer, ...]:
        if self._packed is not None:
            raise ValueError(
                "the model is from a packed file, which has no layers with the weights of the checkpoint: load the "
                "safetensors file that it was packed from"
            )
        return self._layers

    @property
    def input_size(self) -> int:
        return self._input_size

    @property
    def output_size(self) -> int:
        return self._output_size

    @property
    def outputs(self) -> Mapping[str, slice]:
        return self._outputs

    @property
    def tokens(self) -> Mapping[int, int]:
        return self._parts[0][0].tokens

    def views(self, y: np.ndarray) -> dict[str, np.ndarray]:
        """The outputs by name.

        Parameters
        ----------
        y : ndarray, shape (..., output_size)
            What `run`, `step_many` or a stream returned.

        Returns
        -------
        dict of str to ndarray
            Views of y, shape (..., size); empty if no output has a name. ValueError for another shape.
        """
        if np.ndim(y) < 1 or np.shape(y)[-1] != self.output_size:
            raise ValueError(f"y must have shape (..., {self.output_size}), got {np.shape(y)}")
        return {name: y[..., at] for name, at in self._outputs.items()}

    @property
    def identity(self) -> bytes:
        """SHA-256 of the arithmetic's generation, configuration and weights: 32 bytes; a saved stream holds it."""
        return self._identity

    @property
    def weights(self) -> str:
        """The type of the large matrices: "float32", or "float16" or "int8" if they were rounded."""
        if self._packed is None:
            return weight_type(self._layers)
        types = {network.weights for part in self._parts for network in part}
        return next(name for name in ("int8", "float16", "float32") if name in types)

    @property
    def nbytes(self) -> int:
        """Bytes of the packed matrices, all of which a step reads."""
        return sum(network.nbytes for part in self._parts for network in part)

    def with_weights(self, weights: str, *, keep_original: bool = False, smallest: int | None = None) -> Model:
        """The same model with its matrices rounded, so that a step at batch size 1 reads fewer bytes.

        "int8": one scale per output, inputs rounded to 14 bits at each step, exact integer sums; the same bits on every
        machine. "float16": float32 sums. Gains, biases, gates, states and norms stay float32. docs/numerics.md has the
        errors, and the command ``cnorm quantize`` measures those of a model.

        Parameters
        ----------
        weights : {"int8", "float16", "float32"}
        keep_original : bool
            Keep a reference to this model, so that the result can be converted to any type by ``with_weights``.
        smallest : int, optional
            Matrices of fewer weights stay float32. If not given, all are rounded, but it is an error if the matrices of
            the model have fewer than 32768 weights together: reading fewer bytes saves little time there.

        Returns
        -------
        Model
            This model if its weights are of this type. A saved stream of one can't be restored by the other; copy its
            state instead: ``other.set_state(stream.state())``.

        Raises
        ------
        ValueError
            For another type, a negative smallest, weights beyond 65504 for float16, a rounded model whose original
            was not kept, or where nothing would be rounded.
        """
        check_weights(weights, smallest)
        if weights == self.weights:
            return self
        if self._original is not None:
            return self._original.with_weights(weights, keep_original=keep_original, smallest=smallest)
        if self.weights != "float32":
            raise ValueError(
                f"weights must be float32 to be rounded to {weights}, got a model rounded to {self.weights}: round the "
                "float32 model, or keep it with with_weights(..., keep_original=True)"
            )
        model = Model(rounded_layers(self.layers, weights, smallest), tuple(self.outputs))
        model._original, model.window = self if keep_original else None, self.window
        return model

    def stream(self, *, check: bool = False) -> _core.Stream:
        """A new `Stream` in the initial state: zero, or the state that the cells have learned.

        Parameters
        ----------
        check : bool
            Refuse a NaN or infinity in x, with a ValueError that names its index, before the state changes. Otherwise
            such a number spreads into the state and stays until `Stream.reset`; see `Stream.is_finite`.

        Returns
        -------
        Stream

        Raises
        ------
        ValueError
            If a layer is bidirectional: it needs the whole sequence, see `run`.
        """
        return _core.Stream(self, self._network(), check)

    def _network(self) -> _core.Network:
        """The one network of a model without bidirectional layers."""
        if len(self._parts) != 1 or len(self._parts[0]) != 1:
            raise ValueError(
                "a model with a bidirectional layer has no streams: it needs the whole sequence, see Model.run"
            )
        return self._parts[0][0]

    def step_many(
        self,
        streams: Sequence[_core.Stream],
        x: np.ndarray,
        out: np.ndarray | None = None,
        reset: np.ndarray | None = None,
    ) -> np.ndarray:
        """One step, or several, of each of several streams of this model; the weights are read once for all of them.

        Parameters
        ----------
        streams : sequence of Stream
            Streams of this model, each at most once, in any order.
        x : ndarray, shape (len(streams), input_size) or (len(streams), steps, input_size), float32
        out : ndarray, shape (len(streams), output_size) or (len(streams), steps, output_size), contiguous, optional
        reset : ndarray, shape (len(streams),), bool, optional
            Streams to reset before the first step.

        Returns
        -------
        y : ndarray, shape (len(streams), output_size) or (len(streams), steps, output_size), float32
            ``y[i]`` has the same bits as that stream's own `step`, or `process`.

        Raises
        ------
        TypeError
            If an element is not a stream, or an array has another dtype.
        ValueError
            For a stream that is there twice or is of another model, or another shape.
        RuntimeError
            If another thread is using one of the streams. On any error all streams are unchanged.
        """
        return _core.step_many(self._network(), streams, x, out, reset)

    def run(self, x: np.ndarray, state: Mapping[str, np.ndarray] | None = None) -> np.ndarray:
        """Run a whole sequence from the initial state or a given one; the only way to run bidirectional layers.

        Parameters
        ----------
        x : ndarray, shape (steps, input_size), float32
        state : mapping of str to ndarray, shape (units,), float32, optional
            ``h0``, ``c0``, ``h1``, ...; the number counts recurrent layers, in a bidirectional layer the forward one
            first. The state of a backward layer is that before the last frame, which it reads first.

        Returns
        -------
        y : ndarray, shape (steps, output_size), float32

        Raises
        ------
        TypeError, ValueError
            For another dtype or shape, or a state that has other names or is not finite.
        """
        parts = [[_core.Stream(self, network) for network in part] for part in self._parts]
        if state is not None:
            set_states([stream for part in parts for stream in part], state)
        for part in parts:
            if len(part) == 2:
                forward, backward = part
                x = np.concatenate([forward.process(x), backward.process(as_array(x, "x")[::-1])[::-1]], axis=1)
            else:
                x = part[0].process(x)
        return x

    def check(self, x: np.ndarray, expected: np.ndarray) -> Comparison:
        """Compare the model's outputs with those of another runtime, to find a wrong preset or wrong weights.

        At least two frames are needed, because cells that differ only in the state they carry agree in the first; some
        tens of frames of ordinary size are better. Layer-normalised recurrences amplify rounding errors, so the bound
        grows with the frames, and frames whose bound has become too large to tell are not judged.

        Parameters
        ----------
        x : ndarray, shape (steps, input_size), float32
            One sequence, from the initial state.
        expected : ndarray, shape (steps, output_size), floating
            The outputs for x of the framework that trained the model.

        Returns
        -------
        Comparison
            ``ok``, ``worst_frame``, its ``error`` and ``bound``, and ``errors`` and ``bounds`` of all frames; ``str``
            of it is one sentence. The bound is an estimate for float32 in any order of summation, derived at
            `cnorm.comparison.compare`; it is too small for TF32, float16 or bfloat16 products.

        Raises
        ------
        TypeError, ValueError
            For another dtype or shape.

        Examples
        --------
        >>> import cnorm, numpy as np
        >>> model = cnorm.demo_model()
        >>> x = np.random.default_rng(0).standard_normal((20, 12), dtype=np.float32)
        >>> model.check(x, model.run(x)).ok
        True
        """
        return compare(self, x, expected)

    def restore(self, saved: bytes, *, check: bool = False) -> _core.Stream:
        """The stream that ``Stream.save`` wrote to bytes.

        Parameters
        ----------
        saved : bytes
            It may come from an untrusted source.
        check : bool
            As for `stream`.

        Returns
        -------
        Stream

        Raises
        ------
        TypeError
            If `saved` is not bytes.
        ValueError
            If any byte was changed, lost or added, for another format, for a model with another configuration or other
            weights, or if the state is not finite.
        """
        stream = self.stream(check=check)
        stream.restore(saved)
        return stream

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the model to a safetensors file: weights by name, configuration as JSON in the metadata.

        The file is replaced atomically: it appears whole or not at all. A file that is replaced keeps its mode.

        Parameters
        ----------
        path : str or path-like

        Raises
        ------
        OSError
            If the file can't be written, or `path` is that of a folder or of another thing that is not a regular file.
        TypeError
            If `path` is not a str or path-like.
        """
        write_whole(path, saved(self.layers, self.outputs, self.window))

    def save_packed(self, path: str | os.PathLike[str]) -> None:
        """Write the model to one flat file in the layout of the kernels, for `cnorm.load` and for C.

        It is mapped into memory, not read: the time to load does not depend on its size, and processes that map it
        share its weights. It has the identity and the bits of this model, but not the weights of the checkpoint, so
        keep the file of `save`, too. docs/embedding.md has the format. Replaced atomically, as by `save`.

        Parameters
        ----------
        path : str or path-like

        Raises
        ------
        OSError, TypeError
            As `save`.
        ValueError
            As `packed_bytes`.
        """
        write_whole(path, self.packed_bytes())

    def packed_bytes(self) -> bytes:
        """The bytes that `save_packed` writes.

        Returns
        -------
        bytes

        Raises
        ------
        ValueError
            If this is the model of a packed file that was written over since it was loaded.
        """
        if self._packed is not None:
            return unchanged_bytes(self._packed)
        return packed_file(configuration(self._layers, self._outputs, self.window), self._parts, self._identity)

    def arrays(self) -> Iterator[np.ndarray]:
        """All weights, read-only, in the order of the layers."""
        return iter(named_tensors(self.layers).values())

    def __repr__(self):
        kind = "" if self.weights == "float32" else f", weights={self.weights!r}"
        if (packed := self._packed) is not None:
            return f"Model(packed, {self.input_size} -> {self.output_size}: {summary(packed.configuration)}{kind})"
        layers = [shown(layer) for layer in self._layers]
        if len(layers) > SHOWN_LAYERS:
            layers[SHOWN_LAYERS // 2 : 1 - SHOWN_LAYERS // 2] = [f"... {len(layers) - SHOWN_LAYERS + 1} more ..."]
        outputs = f", outputs={tuple(self._outputs)}" if self._outputs else ""
        note = ", not compared with its file" if self.unproven else ""
        return f"Model([{', '.join(clip(one, 200) for one in layers)}]{outputs}{kind}{note})"

    def _repr_html_(self):
        layers = [repr(self)] if self._packed is not None else map(shown, self._layers)
        rows = "".join(f"<tr><td>{i}</td><td>{html.escape(layer)}</td></tr>" for i, layer in enumerate(layers))
        return (
            f"<table><caption>Model, {self.input_size} -&gt; {self.output_size}, identity {self.identity.hex()[:12]}"
            f"</caption>{rows}</table>"
        )

    def __reduce__(self):
        if self._packed is not None:
            return _from_packed_bytes, (self.packed_bytes(),)
        return Model, (self._layers, tuple(self._outputs)), {"window": self.window}


def _from_packed_bytes(data: bytes) -> Model:
    return Model._of_packed(from_bytes(data))
