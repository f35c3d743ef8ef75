"""`load` of files whose steps are the body of a Scan or a Loop: read as the step of layers, or refused."""

import numpy as np
import pytest
from graphs import imported, node, normal, saved
from onnx import TensorProto, helper

INPUTS, UNITS = 5, 6
STEP = (
    node("MatMul", "x_t W", "a"),
    node("MatMul", "h R", "b"),
    node("Add", "a b", "s"),
    node("Tanh", "s", "h2"),
    node("Identity", "h2", "y_t"),
)


def values(**shapes):
    kinds = {"i": TensorProto.INT64, "go": TensorProto.BOOL, "on": TensorProto.BOOL}
    return [helper.make_tensor_value_info(name, kinds.get(name, 1), shape) for name, shape in shapes.items()]


def scan(nodes=STEP, first="h0", x="x", last="h1", **attributes):
    body = helper.make_graph(nodes, "b", values(h=[1, UNITS], x_t=[1, INPUTS]), values(h2=[1, UNITS], y_t=[1, UNITS]))
    return node("Scan", f"{first} {x}", f"{last} y", name="steps", body=body, num_scan_inputs=1, **attributes)


def loop(*more, index="i", step=STEP):
    """A Loop over all frames, with other nodes before the step."""
    nodes = [node("Gather", f"x {index}", "x_t"), node("Identity", "go", "on"), *more, *step]
    ends = values(on=[], h2=[1, UNITS], y_t=[1, UNITS])
    body = helper.make_graph(nodes, "b", values(i=[], go=[], h=[1, UNITS]), ends)
    count = [node("Shape", "x", "size"), node("Gather", "size zero", "steps")]
    return [*count, node("Loop", "steps yes h0", "h1 y", name="steps", body=body)]


def file(path, rng, nodes, x=("T", 1, INPUTS), **more):
    stored = {
        "W": normal(rng, INPUTS, UNITS),
        "R": normal(rng, UNITS, UNITS),
        "zero": np.array(0),
        "yes": np.array(True),
    }
    x, h = list(x), [1, UNITS]
    return saved(path, nodes, {"x": x, "h0": h}, {"y": [x[0], 1, UNITS], "h1": h}, stored | more)


@pytest.mark.parametrize("frames", ["T", 4])
@pytest.mark.parametrize("kind", ["Scan", "Loop"])
def test_the_body_of_a_loop_is_a_step(kind, frames, tmp_path, rng):
    path = file(tmp_path / "m.onnx", rng, [scan()] if kind == "Scan" else loop(), (frames, 1, INPUTS))
    found = imported(path)
    assert [layer.kind for layer in found.model.layers] == ["RNN"]
    assert (found.time_axis, found.states) == (0, {"h0": "h1"})
    assert found.report.ok


REFUSED = {
    "a state is read outside": (
        [node("MatMul", "h0 V", "v"), node("Add", "x v", "z"), scan(x="z")],
        "reads the first state of a loop",
    ),
    "a state is given back changed": (
        [scan((*STEP[:4], node("Mul", "h2 two", "y_t")), last="h"), node("Neg", "h", "h1")],
        "gives a state of a loop back changed",
    ),
    "a state begins with a frame": (
        [node("Gather", "x zero", "x0"), node("MatMul", "x0 W", "w"), node("Add", "w h0", "f"), scan(first="f")],
        "a state begins with what is stored or computed",
    ),
    "a state is stored": ([scan(first="start")], "a state begins with what is stored or computed"),
    "the steps are read from the end": ([scan(scan_input_directions=[1])], "reads its steps from the end"),
    "a step reads all frames": (
        [
            scan(
                (
                    node("ReduceMean", "x", "m", axes=[0]),
                    node("Sub", "x_t m", "d"),
                    node("MatMul", "d W", "a"),
                    *STEP[1:],
                )
            )
        ],
        "its result depends on several frames",
    ),
    "a step computes with its number": (
        loop(
            node("Cast", "i", "n", to=1),
            node("Mul", "b n", "bn"),
            step=(*STEP[:2], node("Add", "a bn", "s"), *STEP[3:]),
        ),
        "it computes with the number of the step",
    ),
    "a step reads the frame behind": (
        loop(node("Sub", "zero i", "j"), index="j"),
        "computes with the number of the step",
    ),
    "the loop ends early": (
        [*loop()[:1], node("Gather", "size zero", "all"), node("Min", "all most", "steps"), loop()[2]],
        "decides by something computed from the number of frames",
    ),
}


@pytest.mark.exhaustive(one_in=3)
@pytest.mark.parametrize("why", REFUSED)
def test_what_is_not_the_same_step_for_every_frame_is_refused(why, tmp_path, rng):
    nodes, message = REFUSED[why]
    more = {
        "V": normal(rng, UNITS, INPUTS),
        "start": np.zeros((1, UNITS), np.float32),
        "most": np.array(30),
        "two": np.float32(2),
    }
    with pytest.raises(ValueError, match=message):
        imported(file(tmp_path / "m.onnx", rng, nodes, **more))
