"""`load` of files whose steps are the body of a Scan or a Loop: read as the step of layers, or refused."""

import numpy as np
import pytest
from graphs import imported, node, normal, saved
from onnx import TensorProto, helper

from onnx_export.errors import NotImported

INPUTS, UNITS = 5, 6
FRAMES = 2000  # compared
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
    "a state is stored, and not the one that is given": ([scan(first="start")], "it is in no cell that cnorm reads"),
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


@pytest.mark.exhaustive
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


# ---------------------------------------------------------------------------------------------- from stored zeros


def from_zeros(path, rng, nodes, x=("T", 1, INPUTS), y=("T", 1, UNITS), **more):
    stored = {"W": normal(rng, INPUTS, UNITS), "R": normal(rng, UNITS, UNITS), "h0": np.zeros((1, UNITS), np.float32)}
    stored |= {"zero": np.array(0), "yes": np.array(True)} | more
    read = {name for one in nodes for name in one.input}
    read |= {name for one in nodes for a in one.attribute for inner in a.g.node for name in inner.input}
    stored = {name: value for name, value in stored.items() if name in read}
    return saved(path, nodes, {"x": list(x)}, {"y": list(y)}, stored)


def same(found, rng):
    x = (rng.standard_normal((FRAMES, INPUTS)) * (1 + np.arange(FRAMES)[:, None] % 7) + 0.3).astype(np.float32)
    return found.model.check(x, found.file.run(x)).ok


@pytest.mark.parametrize("kind", ["Scan", "Loop"])
def test_a_body_from_zeros_is_a_step(kind, tmp_path, rng):
    found = imported(from_zeros(tmp_path / "m.onnx", rng, [scan()] if kind == "Scan" else loop()))
    assert [layer.kind for layer in found.model.layers] == ["RNN"]
    assert (found.time_axis, found.states, found.window) == (0, {}, None)
    assert same(found, rng)


@pytest.mark.parametrize("kind", ["Scan", "Loop"])
def test_layers_before_and_behind(kind, tmp_path, rng):
    step = (node("MatMul", "x_t W", "a"), node("Tanh", "a", "t"), node("MatMul", "t R", "u"),
            node("MatMul", "h R", "b"), node("Add", "u b", "s"), node("Sigmoid", "s", "h2"),
            node("Mul", "h2 two", "y_t"))  # fmt: skip
    body = [scan(step)] if kind == "Scan" else loop(step=step)
    for one in body:
        one.output[:] = ["z" if name == "y" else name for name in one.output]
    found = imported(from_zeros(tmp_path / "m.onnx", rng, [*body, node("Relu", "z", "y")], two=np.float32(2)))
    assert "RNN" in [layer.kind for layer in found.model.layers]
    assert same(found, rng)


def test_the_last_state_alone(tmp_path, rng):
    nodes = [scan(last="y1"), node("Identity", "y1", "out")]
    nodes[0].output[1] = "all"
    nodes[1].output[0] = "y"
    found = imported(from_zeros(tmp_path / "m.onnx", rng, nodes, y=(1, UNITS)))
    assert [layer.kind for layer in found.model.layers] == ["RNN"]
    x = rng.standard_normal((50, INPUTS)).astype(np.float32)
    assert found.model.check(x, np.concatenate([found.model.run(x)[:-1], found.file.run(x)[-1:]]))


def counting():
    """A Loop that counts its steps by what it carries, which may be compared with anything."""
    nodes = [node("Gather", "x n", "x_t"), node("Identity", "go", "on"), node("Add", "n one", "n2"), *STEP]
    ends = values(on=[], h2=[1, UNITS], n2=[], y_t=[1, UNITS])
    starts = values(i=[], go=[], h=[1, UNITS], n=[])
    for value in (starts[3], ends[2]):
        value.type.tensor_type.elem_type = 7
    body = helper.make_graph(nodes, "b", starts, ends)
    count = [node("Shape", "x", "size"), node("Gather", "size zero", "steps")]
    return [*count, node("Loop", "steps yes h0 zero", "h1 n1 y", name="steps", body=body)]


NUMBERED = (node("Cast", "i", "n", to=1), node("Mul", "b n", "bn"))
UNLIKE = {
    "it begins with ones": (lambda: [scan(first="ones")], "not all the same, or do not begin with zeros"),
    "a Loop begins with ones": (
        lambda: [one if one.op_type != "Loop" else loop_from("ones") for one in loop()], "do not begin with zeros"
    ),
    "the frames are read from the end": (lambda: [scan(scan_input_directions=[1])], "reads its steps from the end"),
    "frames in front of the steps": (
        lambda: [node("Concat", "front x", "z", axis=0), scan(x="z")], "several frames|not the|another frame"
    ),
    "a step reads all frames": (
        lambda: [node("ReduceMean", "x", "m", axes=[0], keepdims=1), node("Sub", "x m", "z"), scan(x="z")],
        "several frames",
    ),
    "a step computes with its number": (
        lambda: loop(*NUMBERED[:1], step=(*STEP[:2], NUMBERED[1], node("Add", "a bn", "s"), *STEP[3:])),
        "depends on the places or the number of the frames",
    ),
    "the first steps alone": (
        lambda: [*loop()[:1], node("Gather", "size zero", "all"), node("Min", "all most", "steps"), loop()[2]],
        "decides by something computed from the number of frames",
    ),
    "steps that are counted": (counting, "counts its steps by what it carries"),
}  # fmt: skip


def loop_from(name):
    one = loop()[2]
    one.input[2] = name
    return one


@pytest.mark.parametrize("case", UNLIKE)
def test_what_does_not_begin_with_zeros_or_go_on_alike_is_refused(case, tmp_path, rng):
    made, message = UNLIKE[case]
    more = {"ones": np.ones((1, UNITS), np.float32), "front": np.zeros((2, 1, INPUTS), np.float32)}
    more |= {"most": np.array(30), "one": np.array(1), "many": np.array(100)}
    with pytest.raises(NotImported, match=message):
        imported(from_zeros(tmp_path / "m.onnx", rng, made(), **more))
