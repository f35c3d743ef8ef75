"""The nodes that recurrent cells have in common: products, norms and gates, and a cell's tensors by their parts.

A cell's tensors keep the layout of the checkpoint in the file. Where the cell needs them split, concatenated or in
another order, nodes do that to the initialisers. onnxruntime evaluates such nodes once, when it loads the file;
`folding` does so when the file is written.
"""

from __future__ import annotations

import numpy as np

from cnorm.cells.functions import named_parameters
from cnorm.cells.specs import GATES
from cnorm.cells.tensors import Tensor, present
from onnx_export.builders import rounded
from onnx_export.builders.elementwise import function
from onnx_export.builders.norms import layer_norm, mean, rms_norm


class Cell:
    """A cell's tensors as values of a graph, and the nodes that all kinds of cells use.

    Parameters
    ----------
    graph : GraphBuilder
    layer : cnorm.LSTM, cnorm.GRU or cnorm.RNN
    weights : mapping of str to str
        Names of the layer's weights to the names of their values.
    """

    def __init__(self, graph, layer, weights):
        self.graph, self.spec, self.eps, self.units = graph, layer.spec, layer.eps, layer.units
        self._pieces: dict[str, list[tuple[str, str, bool]]] = {}  # part: (gates, value, inputs come first)
        self._single: dict[tuple[str, str], str] = {}
        for tensor in present(layer.tensors, weights):
            self._sort(weights[tensor.name], tensor, layer)
        self._rows = {}  # (part, gates): a rounded matrix
        for name, rows in layer.rows.items():
            self._sort_rows(name, rows, weights)

    def _sort_rows(self, name: str, rows, weights) -> None:
        """Enter a rounded matrix, whose rows are in the order of `GATES`, and its scales as parts."""
        order, part = GATES[self.spec.kind], name
        if "weight_n" in weights or "rows.weight_n" in weights:  # the candidate's rows of weight_h are apart
            order = {"weight_n": "n", "weight_h": order.replace("n", "")}.get(name, order)
            part = "weight_h" if name == "weight_n" else name
        order = "" if name == "weight_p" else order
        self._rows[part, order] = rows
        for suffix in ("", ".scales"):
            if f"rows.{name}{suffix}" in weights:
                self._pieces.setdefault(part + suffix, []).append((order, weights[f"rows.{name}{suffix}"], False))

    def _sort(self, value: str, tensor: Tensor, layer) -> None:
        """Split one tensor into the parts of the cell that it holds."""
        graph, name = self.graph, tensor.name
        if tensor.leading:
            value = self._squeeze(value, name)
        values = [value]
        if tensor.split_axis is not None:
            sizes = {"I": layer.input_size, "H": layer.units, "P": layer.output_size, "": 1}
            names = [f"{name}_{i}" for i in range(len(tensor.pieces))]
            values = graph.split(value, tensor.lengths(sizes), names, tensor.split_axis)
            values = [self._squeeze(v, name) for v in values] if tensor.stacked else values
        for value, piece in zip(values, tensor.pieces, strict=True):
            for use in piece.uses:
                self._pieces.setdefault(use.part, []).append((use.gates, value, use.transposed))

    def _squeeze(self, value, name):
        axes = self.graph.constant([0], f"{name}_axes", np.int64)
        return self.graph.add("Squeeze", value, axes, name=f"{name}_flat")

    def __contains__(self, part: str) -> bool:
        return part in self._pieces

    def vector(self, part: str, gates: str = "", otherwise: float | None = None) -> str | None:
        """A part for some gates, in this order; if there is none, a constant vector or None."""
        found = "".join(letters for letters, _, _ in self._pieces.get(part, [])) if gates else ""
        if set(found) & set(gates) or (not gates and part in self):
            return self._ordered(part, gates, 0, otherwise or 0.0)
        if otherwise is None:
            return None
        length = (len(gates) or 1) * self.units
        return self.graph.constant(np.full(length, otherwise), f"{part}_{otherwise:g}")

    def product(self, part: str, x: str, name: str, gates: str = "", bias: str | None = None) -> str:
        """x [B, inputs] by a matrix part of some gates -> [B, gates * units]."""
        if self._rows:
            rows = next(rows for (of, letters), rows in self._rows.items() if of == part and set(gates) <= set(letters))
            scales = None if rows.scales is None else self._ordered(f"{part}.scales", gates, 0)
            return rounded.product(self.graph, x, rows, self._ordered(part, gates, 0), scales, name, bias)
        _, _, inputs_first = self._pieces[part][0]
        matrix = self._ordered(part, gates, int(inputs_first))
        return self.graph.product(x, matrix, bias, name, inputs_first)

    def matrix(self, part: str, gates: str) -> str:
        """A matrix part [gates * units, inputs] for some gates, in this order."""
        _, _, inputs_first = self._pieces[part][0]
        value = self._ordered(part, gates, int(inputs_first))
        return self.graph.add("Transpose", value, name=f"{part}_transposed", perm=[1, 0]) if inputs_first else value

    def _ordered(self, part: str, gates: str, axis: int, otherwise: float = 0.0) -> str:
        for letters, value, _ in self._pieces.get(part, []):
            if letters == gates:
                return value
        for letters, value, _ in self._pieces.get(part, []):
            if len(letters) > 1 and set(letters) & set(gates):
                lengths, names = [self.units] * len(letters), [f"{part}_{letter}" for letter in letters]
                if (part, letters[0]) not in self._single:
                    cut = self.graph.split(value, lengths, names, axis)
                    self._single |= {(part, letter): v for letter, v in zip(letters, cut, strict=True)}
            elif letters:
                self._single[part, letters] = value
        values = []
        for gate in gates:
            if (part, gate) not in self._single:
                blank = np.full(self.units, otherwise)
                self._single[part, gate] = self.graph.constant(blank, f"{part}_{gate}")
            values.append(self._single[part, gate])
        if len(values) == 1:
            return values[0]
        return self.graph.add("Concat", *values, name=f"{part}_{gates}", axis=axis)

    def sum(self, values, name: str) -> str | None:
        """The sum of those values that are not None."""
        values = [value for value in values if value is not None]
        if not values:
            return None
        total = values[0]
        for value in values[1:]:
            total = self.graph.add("Add", total, value, name=name)
        return total

    def groups(self, order: str) -> list[str]:
        """Gates that share one layer norm, in `order`."""
        if self.spec.scope == "none" or self.spec.grouping == "joint":
            return [order]
        if self.spec.grouping == "per_gate":
            return list(order)
        return [order.replace("n", ""), "n"]

    def norm(self, value: str, order: str, gain: str, bias: str, name: str) -> dict[str, str]:
        """Layer norm by groups of gates: {gates: [B, gates * units]}; `gain` and `bias` are parts."""
        groups = self.groups(order)
        given = self.cut({order: value}, groups, name)
        normalised = {}
        for letters in groups:
            own = name if len(groups) == 1 else f"{name}_{letters}"
            scale, shift = self.vector(gain, letters, 1.0), self.vector(bias, letters)
            if not self._rows:
                normalised[letters] = layer_norm(self.graph, given[letters], scale, shift, self.eps, own)
                continue
            # matrices are centred before they are rounded: no mean is subtracted, see `cnorm.cells.rounded`
            y = rms_norm(self.graph, given[letters], scale, self.eps, own)
            normalised[letters] = y if shift is None else self.graph.add("Add", y, shift, name=f"{own}_with_bias")
        return normalised

    def inside(self, parts: tuple[str, ...], order: str) -> str | None:
        """The sum of the biases before a norm; with rounded matrices it is centred, as these are."""
        bias = self.sum((self.vector(part, order) for part in parts), "inside")
        if bias is None or not self._rows:
            return bias
        groups = self.groups(order)
        cut = self.cut({order: bias}, groups, parts[0])
        centred = []
        for letters in groups:
            average = mean(self.graph, cut[letters], f"{parts[0]}_{letters}_mean", 1)
            centred.append(self.graph.add("Sub", cut[letters], average, name=f"{parts[0]}_{letters}_centred"))
        return centred[0] if len(groups) == 1 else self.graph.add("Concat", *centred, name=parts[0], axis=0)

    def cut(self, values: dict[str, str], wanted: list[str], name: str) -> dict[str, str]:
        """Split the gates into other groups: {"zrn": ...} into {"zr": ..., "n": ...}."""
        result = {}
        for letters, value in values.items():
            inside = [group for group in wanted if group in letters]
            if inside == [letters]:
                result[letters] = value
            elif inside:
                lengths = [len(group) * self.units for group in inside]
                names = [f"{name}_{group}" for group in inside]
                result |= dict(zip(inside, self.graph.split(value, lengths, names, -1), strict=True))
        return result

    def gates(self, x: str, h: str, order: str) -> dict[str, str]:
        """Pre-activations of all gates, one value each."""
        spec, graph = self.spec, self.graph
        if spec.scope == "none":
            bias = self.sum((self.vector(p, order) for p in ("bias", "bias_x", "bias_h")), "bias")
            from_x = self.product("weight_x", x, "from_x", order, bias)
            total = {order: graph.add("Add", self.product("weight_h", h, "from_h", order), from_x, name="gates")}
        elif spec.scope == "sum":
            from_x = self.product("weight_x", x, "from_x", order, self.inside(("inside_x", "inside_h"), order))
            both = graph.add("Add", self.product("weight_h", h, "from_h", order), from_x, name="from_both")
            total = self.norm(both, order, "gain", "bias", "norm")
            rest = [self.vector(p, order) for p in ("bias_x", "bias_h")]
            total = self.with_bias(total, self.sum(rest, "bias"), order)
        else:
            from_x, from_h = self.split_norms(x, h, order)
            total = {k: graph.add("Add", from_h[k], from_x[k], name=f"gates_{k}") for k in from_x}
            total = self.with_bias(total, self.vector("bias", order), order)
        return self.cut(total, list(order), "gate")

    def split_norms(self, x: str, h: str, order: str) -> tuple[dict[str, str], dict[str, str]]:
        """LN(W_x x) and LN(W_h h) by groups."""
        from_x = self.product("weight_x", x, "from_x", order, self.inside(("inside_x",), order))
        from_h = self.product("weight_h", h, "from_h", order, self.inside(("inside_h",), order))
        return (
            self.norm(from_x, order, "gain_x", "bias_x", "norm_x"),
            self.norm(from_h, order, "gain_h", "bias_h", "norm_h"),
        )

    def with_bias(self, values: dict[str, str], bias: str | None, order: str) -> dict[str, str]:
        """A bias [gates * units] added to the groups of gates."""
        if bias is None:
            return values
        cut = self.cut({order: bias}, list(values), "bias")
        return {k: self.graph.add("Add", v, cut[k], name=f"biased_{k}") for k, v in values.items()}

    def gate(self, value: str, name: str, offset: float = 0.0) -> str:
        """Sigmoid, or the spec's other function, of a gate and the constant that its spec adds to it."""
        if offset:
            constant = self.graph.constant(offset, f"{name}_offset")
            value = self.graph.add("Add", value, constant, name=f"{name}_with_offset")
        return self._activated(self.spec.recurrent_activation, value, name)

    def candidate(self, value: str, name: str) -> str:
        """Tanh, or the spec's other function, of a candidate or a cell's output."""
        return self._activated(self.spec.activation, value, name)

    def _activated(self, of: str | tuple, value: str, name: str) -> str:
        value = self.clipped(value, self.spec.clip, f"{name}_clipped")
        return function(self.graph, value, *named_parameters(of), name)

    def clipped(self, value: str, limit: float | None, name: str) -> str:
        if limit is None:
            return value
        limits = self.graph.constant(-limit, f"{name}_low"), self.graph.constant(limit, f"{name}_high")
        return self.graph.add("Clip", value, *limits, name=name)

    def zoneout(self, before: str, h: str) -> str:
        """zoneout h_before + (1 - zoneout) h."""
        if not self.spec.zoneout:
            return h
        graph, kept = self.graph, self.graph.constant(self.spec.zoneout, "zoneout")
        rest = graph.constant(1 - np.float32(self.spec.zoneout), "zoneout_rest")
        kept, new = graph.add("Mul", kept, before, name="h_kept"), graph.add("Mul", rest, h, name="h_new")
        return graph.add("Add", kept, new, name="h_mixed")
