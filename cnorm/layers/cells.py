"""Recurrent layers: LSTM, GRU and RNN, by preset or spec."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from cnorm._core import default_float_env, rounded
from cnorm.cells.packing import Parts, cell_options
from cnorm.cells.presets import PRESETS
from cnorm.cells.rounded import Matrix, Rows, cell_weights, is_matrix
from cnorm.cells.specs import INITIAL, CellSpec, spec_from_json, spec_to_json
from cnorm.cells.tensors import has_projection, optional_tensors, present
from cnorm.cells.weights import checked, float32_copy, gradient_views, packed
from cnorm.layers.base import Layer, with_name


class Cell(Layer):
    """A recurrent layer: a spec, its eps, the tensors that a checkpoint has for one layer, and their arrays."""

    part = "cell"
    recurrent = stateful = True

    def __init__(
        self,
        weights: Mapping[str, Any],
        *,
        preset: str | CellSpec,
        eps: float | None = None,
        name: str | None = None,
    ) -> None:
        with_name(self, name)
        self.spec = cell_spec(self.kind, preset)
        self.eps = checked_eps(eps, self.spec)
        shown = f"{self.kind} {self.spec.name}"
        self.tensors = tuple(tensor.named() for tensor in (*self.spec.tensors, *INITIAL[self.kind]))
        self.weights, sizes = checked(weights, self.tensors, shown)
        self.input_size, self.units, self.output_size = sizes["I"], sizes["H"], sizes["P"]
        self.sizes = sizes
        optional = [tensor.name for tensor in optional_tensors(self.tensors, self.weights) if tensor.is_bias()]
        self.absent_biases = tuple(name for name in optional if name not in self.weights)
        if 0 < len(self.absent_biases) < len(optional):
            raise ValueError(
                f"weights of {shown} must have all of {', '.join(optional)} or none of them; "
                f"missing: {', '.join(self.absent_biases)}"
            )
        given = present(self.tensors, self.weights)
        of_projection = [tensor.name for tensor in given if any(use.part == "bias_p" for use in tensor.uses())]
        of_projection += ["projection_clip"] if self.spec.projection_clip is not None else []
        if of_projection and not has_projection(given):
            raise ValueError(f"weights of {shown} must have a projection for {' and '.join(of_projection)}")

    def packed(self, weights: Mapping[str, np.ndarray] | None = None) -> dict:
        """The weights in the layout of the kernels, see `cnorm.cells.weights.packed`."""
        with default_float_env():
            return packed(self.spec, self.tensors, self.weights if weights is None else weights, self.sizes)

    def options(self, size: int) -> dict[str, float]:
        return cell_options(self.spec, self.eps)

    def parts(self, size: int) -> Parts:
        fields = self.packed()
        starts = {name: fields.pop(f"{name}0") for name in "hc"}
        for name, matrix in self._matrices(fields).items():
            fields[name] = matrix.given(self.rows.get(name))
        del fields["group"]
        return Parts(self.part, self.options(size), {k: v for k, v in fields.items() if v is not None}, starts)

    def gradient_targets(self, into: Mapping[str, np.ndarray]) -> list[tuple[np.ndarray, str, int | None]]:
        return gradient_views(self.spec, self.tensors, into, self.sizes)

    def matrices(self) -> dict[str, Matrix]:
        return self._matrices(self.packed())

    def _matrices(self, fields: dict) -> dict[str, Matrix]:
        """The matrices among packed fields; those of gates first."""
        units, outputs, gates = self.units, self.output_size, len(self.spec.gates)
        of_h = gates - (fields["weight_n"] is not None)
        shapes = {  # the kernels read exactly this much
            "weight_x": (gates, units, self.input_size), "weight_h": (of_h, units, outputs),
            "weight_n": (1, units, units), "weight_p": (1, outputs, units),
        }  # fmt: skip
        found = {}
        for name, (count, rows, cols) in shapes.items():
            if (given := fields[name]) is None:
                continue
            if given.shape != (count * rows, cols):
                raise ValueError(f"{name} of {self!r} must be packed as {(count * rows, cols)}, got {given.shape}")
            found[name] = Matrix(given, count, fields["group"] if name in ("weight_x", "weight_h") else 0)
        return found

    @classmethod
    def filled(cls, entry: dict, rows: Mapping[str, Rows], others: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        spec = cell_spec(cls.kind, spec_of(entry))
        tensors = [tensor.named() for tensor in spec.tensors]
        if twice := [t.name for t in tensors if is_matrix(t) and t.name in others]:
            raise ValueError(f"tensors stored both whole and as rows: {', '.join(twice)}")
        return cell_weights(spec, tensors, rows, others)

    def replaced(self) -> tuple[str, ...]:
        return tuple(tensor.name for tensor in self.tensors if is_matrix(tensor))

    def entry(self) -> dict:
        preset = PRESETS.get((self.kind, self.spec.name)) == self.spec
        entry = {"preset": self.spec.name} if preset else {"spec": spec_to_json(self.spec)}
        if self.eps is not None:
            entry["eps"] = self.eps
        if optional := self.optional():
            entry["with"] = optional
        return entry

    def optional(self) -> list[str]:
        """Names of the optional tensors that it has, except biases."""
        return [t.name for t in self.tensors if t.optional and not t.is_bias() and t.name in self.weights]

    @classmethod
    def from_entry(cls, entry: dict, weights: Mapping[str, np.ndarray], read: Callable) -> Layer | None:
        if entry.keys() - {"eps", "with"} not in ({"preset"}, {"spec"}):
            return None
        layer = cls(weights, preset=spec_of(entry), eps=entry.get("eps"))
        check_with(layer, entry)
        return layer

    def __repr__(self):
        eps = "" if self.eps is None else f", eps={self.eps:g}"
        return f"{self.kind}({self.input_size} -> {self.output_size}, preset={self.spec.name!r}{eps})"


class LSTM(Cell):
    """A long short-term memory layer, layer-normalised or plain.

    Preset ``ba2016`` (arXiv:1607.06450, Eq. 20-22), gates f, i, o, g::

        (f, i, o, g) = LN(weight_h h; gain_h, bias_h) + LN(weight_x x; gain_x, bias_x) + bias
        c = sigmoid(f) c + sigmoid(i) tanh(g)
        h = sigmoid(o) tanh(LN(c; gain_c, bias_c))

    docs/cells.md has the equations of all presets.

    Parameters
    ----------
    weights : mapping of str to ndarray, float32 (float16 and bfloat16 are widened)
        The tensors of the preset's checkpoints, with their names and layout: ``PRESETS["LSTM", preset].weights`` lists
        them. ``h0`` [output_size] and, for an LSTM, ``c0`` [units] may be added: the initial state, zero if not given.
        The arrays are copied.
    preset : str or CellSpec
        The cell that the weights are for. It must be given, as different cells can have the same names and shapes.
    eps : float, optional
        Added to each variance, rounded to float32; the preset's own if not given.
    name : str, optional
        As of `Add`.

    Attributes
    ----------
    spec : CellSpec
    eps : float or None
        None if the cell has no layer norm.
    weights : mapping of str to ndarray, read-only
    input_size, units, output_size : int
        output_size is smaller than units if there is a projection.

    Raises
    ------
    TypeError
        For another type or dtype; float64 weights are refused, cast them.
    ValueError
        For an unknown preset, a cell that the runtime does not compute, weights that are missing, unknown, not finite
        or of another shape, or an eps that is negative, missing, or given although nothing is normalised.
    """

    kind = "LSTM"


class GRU(Cell):
    """A gated recurrent unit layer, layer-normalised or plain.

    Preset ``ba2016`` (arXiv:1607.06450, Eq. 26-28), gates z, r, n::

        (z, r) = LN(weight_h h; gain_h, bias_h) + LN(weight_x x; gain_x, bias_x)
        n = tanh(LN(weight_xn x; gain_xn, bias_xn) + sigmoid(r) LN(weight_hn h; gain_hn, bias_hn))
        h = (1 - sigmoid(z)) h + sigmoid(z) n

    docs/cells.md has the equations of all presets. Parameters, attributes and errors as `LSTM`.
    """

    kind = "GRU"


class RNN(Cell):
    """A simple recurrent layer, layer-normalised.

    Preset ``ba2016`` (arXiv:1607.06450, Eq. 4)::

        h = tanh(LN(weight_h h + weight_x x; gain, bias))

    and ``ba2016_relu`` with relu. docs/cells.md has the equations of all presets. Parameters, attributes and errors as
    `LSTM`.
    """

    kind = "RNN"


def with_values(cell: Cell, arrays: Mapping[str, np.ndarray]) -> Cell:
    """The cell with other values: float32 arrays of the same names and shapes, which are checked to be finite."""
    name = f"{cell.kind} {cell.spec.name}"
    other = object.__new__(type(cell))
    copies = {key: float32_copy(array, key, name) for key, array in arrays.items()}
    other.__dict__.update(cell.__dict__ | {"weights": MappingProxyType(copies)})
    return other


def cell_spec(kind: str, preset) -> CellSpec:
    """The spec of a preset's name, or the given spec, which is checked to be one that the runtime computes."""
    if isinstance(preset, CellSpec):
        if preset.kind != kind:
            raise ValueError(f"preset must be a spec of kind {kind}, got one of kind {preset.kind}")
        if reason := preset.refusal():
            raise ValueError(f"the runtime does not compute this {kind}: {reason}")
        return preset
    if isinstance(preset, str) and (kind, preset) in PRESETS:
        return PRESETS[kind, preset]
    wrong = ValueError if isinstance(preset, str) else TypeError
    names = ", ".join(sorted(name for k, name in PRESETS if k == kind))
    raise wrong(f"preset must be one of the {kind} presets {names} or a CellSpec, got {preset!r:.80}")


def checked_eps(eps, spec: CellSpec) -> float | None:
    if not spec.normalises:
        if eps is not None:
            raise ValueError(f"eps must not be given for preset {spec.name!r}, which normalises nothing")
        return None
    if eps is None and spec.eps is None:
        raise ValueError(f"eps must be given for preset {spec.name!r}: its checkpoints do not carry one")
    return rounded(spec.eps if eps is None else eps, "eps")


def spec_of(entry: dict) -> str | CellSpec:
    """Preset or spec of a recurrent layer's entry in a configuration."""
    if not entry.keys() & {"preset", "spec"}:
        raise ValueError(f"a recurrent layer must have a preset or a spec, got {str(entry)[:200]}")
    return entry["preset"] if "preset" in entry else spec_from_json(entry["spec"])


def check_with(layer: Cell, entry: dict) -> None:
    """Check that a layer has the optional tensors that its entry lists, none without a list."""
    if layer.optional() != (said := entry.get("with", [])):
        raise ValueError(
            f"the optional tensors of {layer!r} must be those that the configuration names, {str(said)[:200]}, "
            f"got {layer.optional()}"
        )
