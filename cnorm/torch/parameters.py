"""What the recurrent modules have in common: arguments, parameters by preset, initial values, state dicts."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from cnorm.cells.presets import PRESETS
from cnorm.cells.specs import CellSpec
from cnorm.cells.tensors import axis_length, has_projection
from cnorm.layers.base import Layer
from cnorm.layers.cells import cell_spec, checked_eps
from cnorm.torch.operators import described, layer_of
from cnorm.torch.steps import Weights

__all__ = ["NUMBER", "Module", "check_bool", "check_integer", "with_nonlinearity"]

NUMBER = "_l{layer}{reverse}"  # ends the names of torch.nn's sequence modules, and not those of its cells


class Module(nn.Module):
    """The parameters of cells, named as their preset's checkpoints.

    Its attribute `bias` is the argument, as in torch.nn, but where a parameter of the preset has that name.
    """

    kind: str

    def __init__(
        self, input_size: int, hidden_size: int | None, bias: bool, *, preset: str | CellSpec | None,
        eps: float | None = None, units: int | None = None, proj_size: int = 0,
    ) -> None:  # fmt: skip
        super().__init__()
        if (units is None) == (hidden_size is None):
            raise TypeError("hidden_size, or units as cnorm.LSTM calls it, must be given, and not both")
        check_integer("input_size", input_size, 1)
        name, units = ("units", units) if hidden_size is None else ("hidden_size", hidden_size)
        check_integer(name, units, 1)
        check_integer("proj_size", proj_size, 0)
        check_bool("bias", bias)
        self.spec = cell_spec(self.kind, preset)
        self.eps = checked_eps(eps, self.spec)
        self.input_size, self.units, self.output_size, self.proj_size = input_size, units, proj_size or units, proj_size
        self._tensors = self._present(bias)
        self.ways: list[list[Weights]] = []  # [layers][directions]

    @property
    def hidden_size(self) -> int:
        return self.units

    def _present(self, bias: bool) -> list:
        """The spec's tensors without those of a projection, or biases, that were not asked for."""
        found = [t for t in self.spec.tensors if self.proj_size or not t.is_part("weight_p", "bias_p")]
        if self.proj_size and not has_projection(found):
            raise ValueError(f"preset {self.spec.name!r} has no projection, got proj_size={self.proj_size}")
        unbiased = [t for t in found if not (t.optional and t.is_bias())]
        if not bias and len(unbiased) == len(found):
            raise ValueError(f"bias must be True for preset {self.spec.name!r}, which has no optional bias, got False")
        return found if bias else unbiased

    def _weights_of(self, inputs: int, device, number: int = 0, reverse: bool = False, prefix: str = "") -> Weights:
        """Register the parameters of one layer and direction."""
        sizes = {"I": inputs, "H": self.units, "P": self.output_size, "": 1}
        names = {}
        for t in self._tensors:
            shape = [axis_length(axis, sizes) for axis in t.axes]
            name = prefix + self._name(t, number, reverse)
            names[t.named().name] = name
            *path, last = name.split(".")
            module = self
            for part in path:
                if not hasattr(module, part):
                    module.add_module(part, nn.Module())
                module = getattr(module, part)
            blank = torch.empty(shape, device=device, dtype=torch.float32)
            module.register_parameter(last, nn.Parameter(blank))
        return Weights(names, described(self.spec, self.eps if self.spec.normalises else None, tuple(names)))

    def _name(self, t, number: int, reverse: bool) -> str:
        return t.named(number, reverse).name

    def _finish(self, bias: bool) -> None:
        """What is left when all parameters are registered."""
        if "bias" not in self._parameters:
            self.bias = bias
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the initial values: gains 1, biases of normalised cells 0, all others uniform as in torch.nn.LSTM."""
        bound = 1 / math.sqrt(self.units)
        for weights in (one for ways in self.ways for one in ways):
            for t, name in zip(self._tensors, weights.names.values(), strict=True):
                parameter, parts = self.get_parameter(name), [use.part for use in t.uses()]
                if all(part.startswith("gain") for part in parts):
                    nn.init.ones_(parameter)
                elif self.spec.normalises and not any(part.startswith("weight") for part in parts):
                    nn.init.zeros_(parameter)
                else:
                    nn.init.uniform_(parameter, -bound, bound)

    def _load_from_state_dict(self, state_dict, prefix: str, *others) -> None:
        """Take the names of a cell for a single layer, and those of a single layer for a cell."""
        if sum(map(len, self.ways)) == 1:
            for numbered, own in self.ways[0][0].names.items():
                for name in {numbered, numbered.removesuffix("_l0")} - {own}:
                    if prefix + name in state_dict and prefix + own not in state_dict:
                        state_dict[prefix + own] = state_dict.pop(prefix + name)
        super()._load_from_state_dict(state_dict, prefix, *others)

    def _layer(self, weights: Weights) -> Layer:
        return layer_of(weights.text, weights.tensors(self))

    def _parts(self, state) -> tuple[Tensor | None, Tensor | None]:
        """h and c of a given state; None for those that are not given or that the cell does not have."""
        if state is None:
            return None, None
        if self.kind != "LSTM":
            return state, None
        if not isinstance(state, (tuple, list)) or len(state) != 2:
            raise TypeError(f"the state must be a pair of tensors (h, c), got {type(state).__name__}")
        return state[0], state[1]

    @property
    def _widths(self) -> tuple[int, ...]:
        return (self.output_size, self.units) if self.kind == "LSTM" else (self.output_size,)

    def extra_repr(self) -> str:
        return f"{self.input_size}, {self.units}, preset={self.spec.name!r}"


def check_bool(name: str, value) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")


def check_integer(name: str, value, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")


def with_nonlinearity(preset, nonlinearity: str | None):
    """The preset of an RNN, or its form with another nonlinearity: "torch_relu" of "torch"."""
    if nonlinearity is None or preset is None:
        return preset
    spec = cell_spec("RNN", preset)
    forms = {spec.activation: preset}
    if isinstance(preset, str) and ("RNN", f"{preset}_relu") in PRESETS:
        forms["relu"] = f"{preset}_relu"
    if nonlinearity not in forms:
        wanted = " or ".join(map(repr, forms))
        raise ValueError(f"nonlinearity must be {wanted} for preset {spec.name!r}, got {nonlinearity!r}")
    return forms[nonlinearity]
