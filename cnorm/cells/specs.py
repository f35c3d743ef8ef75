"""`CellSpec`: the equations of a recurrent cell as data. `cnorm.cells.presets` has the cells of known frameworks."""

from __future__ import annotations

import functools
import math
import numbers
import re
from dataclasses import asdict, dataclass, fields

from cnorm.cells.functions import function_of_cell
from cnorm.cells.tensors import PLACEHOLDER, UNGATED, Tensor, Use, has_projection, parse

__all__ = ["CellSpec"]

GATES = {"LSTM": "fiog", "GRU": "zrn", "RNN": "a"}  # in the order of the kernels
# the initial state, which any checkpoint may have
_H0, _C0 = parse("h0", "P", "h0?", ""), parse("c0", "H", "c0?", "")
INITIAL = {"LSTM": (_H0, _C0), "GRU": (_H0,), "RNN": (_H0,)}
OWNERS = {  # fields that apply to one kind of cell only
    "cell_norm": "LSTM",
    "forget_bias": "LSTM",
    "cell_clip": "LSTM",
    "projection_clip": "LSTM",
    "reset": "GRU",
    "update": "GRU",
    "update_bias": "GRU",
}
CHOICES = {
    "kind": tuple(GATES),
    "scope": ("none", "split", "sum"),
    "grouping": ("joint", "per_gate", "gates_and_candidate"),
    "cell_norm": ("none", "output", "carry"),
    "reset": ("after", "candidate", "before"),
    "update": ("new", "keep"),
}


@dataclass(frozen=True)
class CellSpec:
    """The equations of a recurrent cell, and the tensors of its checkpoints.

    Two checkpoints can have the same names and shapes and still be for different equations, so a spec holds everything
    that the result depends on, except the weights. `dataclasses.replace` makes a variant of a preset:
    ``replace(PRESETS["LSTM", "haste"], zoneout=0.1)``.

    Attributes
    ----------
    kind : str
        "LSTM", "GRU" or "RNN".
    name : str
        The preset's name, as in the model file.
    source : str
        Where the equations are from.
    gates : str
        The order of the gates in the weights, one letter for each: f, i, o, g (candidate) of an LSTM, z, r, n
        (candidate) of a GRU, a of an RNN.
    weights : tuple of (name, shape, meaning)
        The tensors of the checkpoint. A shape is made of H (units), I (inputs), P (outputs: as many as units, or fewer
        after a projection) and numbers: "4H I", or "I+H 3H" for one matrix over the concatenated [x, h]. A meaning is
        weight_x, weight_h, weight_p (projection); inside_x, inside_h (bias added before a layer norm); gain_x, gain_h,
        gain (of the norm of the sum); bias_x, bias_h, bias (added after the norm; a GRU's bias_h is multiplied by the
        reset gate if the recurrent product is); gain_c, bias_c (cell norm); bias_p (projection). .T says that the
        inputs are the first axis, [..] names the gates if not all, + joins two uses of one tensor, a space separates
        the parts of a stacked tensor, ? at the end says that the tensor is optional. Every cell may also have the
        initial state, h0 "P" and for an LSTM c0 "H".
    scope : str
        "none": a = W_x x + W_h h + b. "split": LN(W_x x) + LN(W_h h) + b. "sum": LN(W_x x + W_h h) + b.
    grouping : str
        The gates that one layer norm covers: "joint", all gates; "per_gate", one gate; "gates_and_candidate", z and r
        together, n alone.
    cell_norm : str
        "none"; "output": h = o tanh(LN(c)), and the next step sees c; "carry": c becomes LN(c).
    eps : float or None
        The eps if the user gives none. None: the user must give one, or nothing is normalised.
    reset : str
        Where a GRU's reset gate acts: "after" the recurrent product, on the whole "candidate", or "before" the product.
    update : str
        The term that a GRU's update gate z multiplies: "new", h = (1 - z) h + z n, or "keep", h = z h + (1 - z) n.
    forget_bias, update_bias : float
        Constants added to f, or to z, after the norms and biases, before the sigmoid.
    activation, recurrent_activation : str or tuple
        The function in the place of tanh (of candidate and output, or of an RNN) and of sigmoid (of the gates): a name
        of `Activation`, or (name, parameter, ...). ("hard_sigmoid", 0.2, 0.5) is that of Keras 2 and ONNX,
        "hard_sigmoid" that of Keras 3 and PyTorch, x / 6 + 0.5; ("leaky_relu", 1.0) is the identity ("linear").
    clip : float or None
        The arguments of all these functions are clipped to plus and minus this value, as by ONNX' attribute clip.
    cell_clip, projection_clip : float or None
        Limits on an LSTM's c, and on its projected h: they are clipped to plus and minus this value.
    zoneout : float
        Probability of zoneout, in its form for inference: h = zoneout h_before + (1 - zoneout) h_new.
    """

    kind: str
    name: str
    source: str
    gates: str
    weights: tuple[tuple[str, str, str], ...]
    scope: str = "none"
    grouping: str = "joint"
    cell_norm: str = "none"
    eps: float | None = None
    reset: str = "after"
    update: str = "new"
    forget_bias: float = 0.0
    update_bias: float = 0.0
    activation: str | tuple = "tanh"
    cell_clip: float | None = None
    projection_clip: float | None = None
    zoneout: float = 0.0
    recurrent_activation: str | tuple = "sigmoid"
    clip: float | None = None

    def __post_init__(self):
        for name, allowed in CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {getattr(self, name)!r}")
        if not isinstance(self.name, str) or not isinstance(self.source, str) or not isinstance(self.gates, str):
            raise TypeError("name, source and gates must be strings")
        if sorted(self.gates) != sorted(GATES[self.kind]):
            raise ValueError(f"gates must be {GATES[self.kind]!r} in some order, got {self.gates!r}")
        try:
            triples = tuple(tuple(entry) for entry in self.weights)
        except TypeError:  # not a sequence of sequences
            triples = ((),)
        if not all(len(entry) == 3 and all(isinstance(part, str) for part in entry) for entry in triples):
            raise TypeError(f"weights must be (name, shape, meaning) triples of strings, got {self.weights!r:.80}")
        object.__setattr__(self, "weights", triples)
        for name, _, _ in self.weights:
            if set(PLACEHOLDER.sub("", name)) & {"{", "}"}:
                raise ValueError(
                    f"weights: a name has no braces but {{layer}}, {{even}}, {{odd}}, {{reverse}}, got {name!r}"
                )
        for name in ("forget_bias", "update_bias", "zoneout"):
            if not _is_number(getattr(self, name)):
                raise ValueError(f"{name} must be a finite number, got {getattr(self, name)!r}")
        for name in ("activation", "recurrent_activation"):
            object.__setattr__(self, name, function_of_cell(getattr(self, name), name))
        for name in ("cell_clip", "projection_clip", "clip"):
            value = getattr(self, name)
            if value is not None and not (_is_number(value) and value > 0):
                raise ValueError(f"{name} must be a positive number or None, got {value!r}")
        if self.eps is not None and not (_is_number(self.eps) and self.eps >= 0):
            raise ValueError(f"eps must be a finite number, not negative, or None, got {self.eps!r}")
        for name in ("forget_bias", "update_bias", "zoneout", "cell_clip", "projection_clip", "clip", "eps"):
            if getattr(self, name) is not None:  # JSON can't represent NumPy's number types
                object.__setattr__(self, name, float(getattr(self, name)))
        if not 0 <= self.zoneout < 1:
            raise ValueError(f"zoneout must be in [0, 1), got {self.zoneout!r}")

    @functools.cached_property
    def tensors(self) -> tuple[Tensor, ...]:
        """The `weights`, parsed; names still have their placeholders."""
        return tuple(parse(*triple, self.gates) for triple in self.weights)

    @property
    def normalises(self) -> bool:
        """Whether there is any layer norm, and so an eps."""
        return self.scope != "none" or self.cell_norm != "none"

    def refusal(self) -> str | None:
        """Why the runtime does not compute this cell, or None if it does; there is no approximate computation."""
        if self.kind == "GRU" and self.scope == "sum" and self.reset == "after":
            return "the reset gate acts between two products whose sum is normalised"
        if self.kind == "GRU" and self.scope != "none" and self.reset == "before":
            return "the reset gate acts before the product, and the runtime has that without layer norm only"
        if self.kind != "GRU" and self.grouping == "gates_and_candidate":
            return "only a GRU normalises its candidate apart"
        for name, owner in OWNERS.items():
            if self.kind != owner and getattr(self, name) != getattr(CellSpec, name):
                return f"{name} belongs to the {owner}, got {getattr(self, name)!r}"
        if self.kind == "RNN" and self.recurrent_activation != CellSpec.recurrent_activation:
            return f"recurrent_activation belongs to LSTM and GRU, got {self.recurrent_activation!r}"
        if self.recurrent_activation == "tanh":
            return "the runtime has no gates of tanh"
        if self.projection_clip is not None and not has_projection(self.tensors):
            return "projection_clip belongs to a projection, and none of its weights is one"
        useful = {"weight_x", "weight_h", "bias", "bias_x", "bias_h"}
        useful |= {"none": set(), "split": {"gain_x", "gain_h"}, "sum": {"gain"}}[self.scope]
        useful |= {"inside_x", "inside_h"} if self.scope != "none" else set()
        useful |= {"weight_p", "bias_p"} if self.kind == "LSTM" else set()
        useful |= {"gain_c", "bias_c"} if self.cell_norm != "none" else set()
        for tensor in self.tensors:
            for use in tensor.uses():
                gates = "" if use.part in UNGATED else self.gates
                if use.part not in useful or not set(use.gates) <= set(gates):
                    order = re.fullmatch(r"(\w+)(\[\w+\])\.T", use.part)
                    hint = f": .T comes first, {order[1]}.T{order[2]}" if order else ""
                    return f"the weight {tensor.name} means {str(use)!r}, which this cell has no use for{hint}"
        return self._misfit()

    def _misfit(self) -> str | None:
        """Why the tensors can't be packed for the kernels, or None: a wrong shape, a part missing or there twice."""
        names = [tensor.named().name for tensor in (*self.tensors, *INITIAL[self.kind])]
        if len(set(names)) < len(names):
            return "two of its weights have the same name"
        projected = has_projection(self.tensors)
        places, orders = [], set()
        for tensor, (_, shape, meaning) in zip(self.tensors, self.weights, strict=True):
            for piece in (tensor if projected else tensor.without_projection()).pieces:
                for use in piece.uses:
                    mandatory = use.part in ("weight_x", "weight_h")
                    axes = piece.axes[::-1] if use.transposed else piece.axes
                    if (tensor.optional and mandatory) or axes != _axes(use, projected):
                        return f"the weight {tensor.name} of shape {shape!r} can't be {meaning!r}"
                    places += [(use.part, gate) for gate in use.gates or [""]]
                    orders.add((use.part, use.transposed))
        if len(set(places)) < len(places):
            return "two of its weights are the same part of it"
        if missing := {(part, gate) for part in ("weight_x", "weight_h") for gate in self.gates} - set(places):
            return f"none of its weights is {' or '.join(sorted(f'{part}[{gate}]' for part, gate in missing))}"
        if len({part for part, _ in orders}) < len(orders):
            return "one part of it has its inputs first in one weight and last in another"
        return None


def _axes(use: Use, projected: bool) -> tuple[str, ...]:
    """The axes that a part must have, outputs first."""
    gates = len(use.gates)
    rows, outputs = f"{gates}H" if gates > 1 else "H", "P" if projected else "H"
    axes = {"weight_x": (rows, "I"), "weight_h": (rows, outputs), "weight_p": (outputs, "H"), "bias_p": (outputs,)}
    return axes.get(use.part, ("H",) if use.part in UNGATED else (rows,))


def _is_number(value) -> bool:
    """Whether the value is a number, finite as a float; JSON may have integers that are too large for a float."""
    try:
        return isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:
        return False


_OF_EVERY_NORM = {"eps_place": "variance", "ddof": 0}  # behind eps in the format, and so in a model's identity


def spec_to_json(spec: CellSpec) -> dict:
    """A spec as in a file, without the fields that are later than the format, where they have their defaults."""
    later = [name for name in ("recurrent_activation", "clip") if getattr(spec, name) == getattr(CellSpec, name)]
    told: dict = {}
    for name, value in asdict(spec).items():
        told |= {} if name in later else {name: value}
        told |= _OF_EVERY_NORM if name == "eps" else {}
    return told


def spec_from_json(entry: dict) -> CellSpec:
    """The inverse of `spec_to_json`, for untrusted data."""
    if isinstance(entry, dict):
        told = {name for name, value in _OF_EVERY_NORM.items() if entry.get(name) == value}
        entry = {name: value for name, value in entry.items() if name not in told}
    known = {field.name for field in fields(CellSpec)}
    if not isinstance(entry, dict) or not entry.keys() <= known:
        raise ValueError(f"a spec must be an object with some of {', '.join(sorted(known))}")
    try:
        return CellSpec(**entry)
    except TypeError as error:
        raise ValueError(f"not a cell: {error}") from None
