"""What `_core.Network` packs of each layer, and its errors about sizes."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from cnorm.cells.functions import FUNCTIONS, named_parameters
from cnorm.cells.specs import CellSpec

# 1 GiB; panels have 32 rows, so a file of many matrices of one row could fill the memory
PANEL_FLOATS = 1 << 28

# the enumerations of cnorm_rnn.h
CELL_KIND = ("LSTM", "GRU", "RNN")
SCOPE = ("none", "split", "sum")
CELL_NORM = ("none", "output", "carry")
RESET = ("after", "candidate", "before")


@dataclass(frozen=True)
class Parts:
    """What a layer is packed from, by the names of src/rnn/layers.

    Attributes
    ----------
    kind : str
    options : dict of str to number
        All of the kind's.
    fields : dict of str to tuple or ndarray
        A matrix as `Matrix.given` of `rounded.py` has it; a vector [units] or [gates, units], in any shape of that
        size. Without those that the layer does not have.
    starts : dict of str to ndarray
        The initial value of each array of its state; 0 for None or one that is not there.
    """

    kind: str
    options: dict[str, float]
    fields: dict[str, tuple | np.ndarray] = field(default_factory=dict)
    starts: dict[str, np.ndarray | None] = field(default_factory=dict)


def cell_options(spec: CellSpec, eps: float | None) -> dict[str, float]:
    """The options of a cell."""
    (activation, of_state), (gates, of_gates) = map(_function, (spec.activation, spec.recurrent_activation))
    return {
        "kind": CELL_KIND.index(spec.kind),
        "scope": SCOPE.index(spec.scope),
        "cell_norm": CELL_NORM.index(spec.cell_norm),
        "reset": RESET.index(spec.reset),
        "activation": activation,
        "keep": spec.update == "keep",
        "eps": 0 if eps is None else eps,
        "cell_clip": math.inf if spec.cell_clip is None else spec.cell_clip,
        "projection_clip": math.inf if spec.projection_clip is None else spec.projection_clip,
        "zoneout": spec.zoneout,
        "recurrent_activation": 0 if spec.recurrent_activation == "sigmoid" else gates,
        "alpha": of_state[0],
        "beta": of_state[1],
        "recurrent_alpha": of_gates[0],
        "recurrent_beta": of_gates[1],
        "clip": 0 if spec.clip is None else spec.clip,
    }


def _function(function: str | tuple) -> tuple[int, list[float]]:
    """Its number, alpha and beta."""
    name, parameters = named_parameters(function)
    return list(FUNCTIONS).index(name), [*parameters.values(), 0.0, 0.0][:2]


def refuse_outputs(size: int, weights: int) -> None:
    raise ValueError(
        f"layers take {size} bytes for the outputs of one step: more than 64 MiB, and more "
        f"than 8 times the {weights} bytes of their weights"
    )


def refuse_computed_tokens(layer: int) -> None:
    raise ValueError(
        f"layer {layer} of the runtime is an Embedding whose token ids are computed: they must be elements of the "
        "frame, so that they can be checked before a step; put it first, or behind a Slice of 'input'"
    )


def refuse_panels(size: int, weights: int) -> None:
    raise ValueError(
        f"layers take {size} bytes packed in panels of 32 rows: more than {4 * PANEL_FLOATS}, and "
        f"more than 8 times the {weights} bytes of their weights"
    )


def check_panels(networks) -> None:
    """Refuse networks whose packed panels take far more memory than their weights; `Network` checks only itself."""
    packed, weights = sum(one.nbytes for one in networks), sum(one.macs for one in networks)
    if packed > 4 * max(PANEL_FLOATS, 8 * weights):
        refuse_panels(packed, 4 * weights)


def refuse_packed(reason: str, network: int, layer: int, name: str | None) -> None:
    """Raise for a packed file with an error, and say where it is; -1 and None stand for nowhere in particular."""
    places = [f"network {network}"] if network > 0 else []
    places += [f"layer {layer}"] if layer >= 0 else []
    places += [name] if name is not None else []
    raise ValueError(f"{reason} ({', '.join(places)})" if places else reason)


def set_starts(initial: np.ndarray, arrays: tuple, starts: list) -> None:
    """Set the recurrent arrays (name, units, offset) of a state to their initial values; None is 0."""
    for (_, units, offset), start in zip(arrays, starts, strict=True):
        if start is not None:
            initial[offset : offset + units] = start


def grid(flat: np.ndarray, shape: tuple) -> np.ndarray:
    """A view of this shape of an array whose rows are padded."""
    return flat.reshape(*shape[:-1], -1)[..., : shape[-1]]
