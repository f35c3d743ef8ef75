"""Faults that standard normal inputs do not show: each preset's eps changed, a clip of its input, a lost state."""

import numpy as np
import onnx
import pytest
from cells import random_cell

import cnorm
import onnx_export

PRESETS = sorted(cnorm.PRESETS)


def changed(exported, change):
    copy = onnx.ModelProto()
    copy.CopyFrom(exported)
    return copy if change(copy.graph) else None


def epsilons(graph):
    for node in graph.node:
        yield from (a for a in node.attribute if a.name == "epsilon")


def scale_eps(factor):
    def change(graph):
        found = list(epsilons(graph))
        for attribute in found:
            attribute.f *= factor
        return found

    return change


def clip_input(graph):
    """x outside -6..6 is cut."""
    for node in graph.node:
        node.input[:] = ["clipped" if name == "x" else name for name in node.input]
    limits = [onnx.numpy_helper.from_array(np.float32(v), n) for n, v in (("lowest", -6), ("highest", 6))]
    graph.initializer.extend(limits)
    graph.node.insert(0, onnx.helper.make_node("Clip", ["x", "lowest", "highest"], ["clipped"]))
    return True


def lose_state(name):
    def change(graph):
        """The state is read as zeros, but its input is still there."""
        for node in graph.node:
            node.input[:] = ["lost" if given == name else given for given in node.input]
        graph.initializer.append(onnx.numpy_helper.from_array(np.zeros(2, "f")[:1], "nothing"))
        graph.node.insert(0, onnx.helper.make_node("Mul", [name, "nothing"], ["lost"]))
        return True

    return change


def model_of(key, inputs=8, units=24):
    eps = 1e-5 if key[1] == "kann" else None  # its eps of 0 is not exported
    return cnorm.Model([random_cell(key, np.random.default_rng(1), inputs, units, eps=eps)[0]])


@pytest.mark.exhaustive(one_in=8)
@pytest.mark.parametrize("key", PRESETS, ids="-".join)
def test_every_preset_and_its_faults(key):
    model = model_of(key)
    exported = onnx_export.export(model)
    assert onnx_export.check_parity(model, exported, steps=2)
    faults = {"eps 0": scale_eps(0), "eps * 8": scale_eps(8), "clip": clip_input}
    states = [value.name for value in exported.graph.input if value.name != "x"]
    faults |= {f"lost {name}": lose_state(name) for name in states}
    missed = []
    for name, change in faults.items():
        wrong = changed(exported, change)
        if wrong is not None and onnx_export.check_parity(model, wrong, steps=2).ok:
            missed.append(name)
    assert not missed


def test_states_of_different_widths_that_are_swapped_are_refused_with_a_reason():
    model = cnorm.Model([random_cell(("LSTM", "lingvo"), np.random.default_rng(0), 5, 8, outputs=6)[0]])

    def swap(graph):
        names = {"h0_out": "c0_out", "c0_out": "h0_out"}
        for node in graph.node:
            node.input[:] = [names.get(name, name) for name in node.input]
            node.output[:] = [names.get(name, name) for name in node.output]
        for value in graph.output:
            if value.name in names:
                value.type.tensor_type.shape.dim[-1].dim_value = {"h0_out": 8, "c0_out": 6}[value.name]
        return True

    with pytest.raises(ValueError, match=r"must give h0_out \[1, 6\], got shape \(1, 8\)"):
        onnx_export.check_parity(model, changed(onnx_export.export(model), swap), steps=2)
