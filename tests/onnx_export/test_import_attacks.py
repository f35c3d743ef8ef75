"""Valid files that look like streams and do something else: `load` refuses them, or loads what they compute.

Each was made to pass a proof that tries: beyond the lengths that it ran, in a second call, in another row, where no
input of it is, or in an output that it did not look at.
"""

import numpy as np
import onnx
import onnxruntime
import pytest
from graphs import imported, node, normal, saved
from onnx import TensorProto, helper

INPUTS, UNITS = 3, 4
NUMBERS = {"a0": np.array([0]), "a1": np.array([1]), "a01": np.array([0, 1]), "zero": np.array(0), "one": np.array(1),
           "two": np.array([2]), "end": np.array([2**63 - 1]),
           "k15": np.array(15), "k20": np.array(20), "k300": np.array([300]), "f300": np.float32(300.5),
           "gain": np.float32(1.5), "yes": np.array(True),
           "thousandth": np.float32(1e-3), "huge": np.float32(2.0**33)}  # fmt: skip
COUNT = [node("Shape", "x", "sizes"), node("Gather", "sizes zero", "t", axis=0)]


def gru(h="", last="", y="y"):
    inputs = ["x", "W", "R", *(["", "", h] if h else [])]
    return [
        helper.make_node("GRU", inputs, ["Y", last] if last else ["Y"], hidden_size=UNITS),
        node("Squeeze", "Y a1", y),
    ]


def step(h="h0", last="h1", y="y", x="x"):
    """One step of a GRU, of x [1, inputs]."""
    return [
        node("Unsqueeze", f"{x} a0", "x3"),
        helper.make_node("GRU", ["x3", "W", "R", "", "", h], ["Y", last], hidden_size=UNITS),
        node("Squeeze", "Y a01", y),
    ]


def over(*nodes):
    """A gain of 1.5 where the bool `o` is true."""
    branch = [
        helper.make_graph(
            [helper.make_node("Constant", [], [f"g{value}"], value_float=value)],
            "branch",
            [],
            [helper.make_tensor_value_info(f"g{value}", TensorProto.FLOAT, [])],
        )
        for value in (1.5, 1.0)
    ]
    chosen = helper.make_node("If", ["o"], ["g"], then_branch=branch[0], else_branch=branch[1])
    return [*gru(y="y3"), *COUNT, *nodes, chosen, node("Mul", "y3 g", "y")]


def cast(source, result, to):
    return node("Cast", source, result, to=to)


def many(nodes, states=False):
    """A file over a free number of frames, and rows."""
    inputs, outputs = {"x": ["T", 1, INPUTS]}, {"y": ["T", 1, UNITS]}
    state = [1, 1, UNITS]
    return nodes, inputs | ({"h0": state} if states else {}), outputs | ({"h1": state} if states else {})


def rows(*nodes):
    return [*gru(y="y3"), *nodes], {"x": ["T", "N", INPUTS]}, {"y": ["T", "N", UNITS]}


def one(nodes, outputs=UNITS, more=None, given=None):
    inputs, results = {"x": [1, INPUTS], "h0": [1, 1, UNITS]}, {"y": [1, outputs], "h1": [1, 1, UNITS]}
    return nodes, inputs | (more or {}), results | (given or {})


INT64, BOOL, UINT8, UINT64, FLOAT16 = 7, 9, 2, 13, 10
FIRST = [node("Slice", "Y a0 a1 a0", "h4"), node("Squeeze", "h4 a1", "h1")]
ONCE = [*COUNT, node("Equal", "t one", "e"), cast("e", "f", 1)]
LATE = [node("Slice", "sizes a0 a1", "n"), node("Concat", "front y3", "l", axis=0), node("Slice", "l a0 n a0", "d")]
EXCHANGED = [node("Squeeze", "x a0", "x2"), node("MatMul", "x2 A", "p"), node("MatMul", "h0 B", "q"),
             node("Add", "p q", "u"), node("Tanh", "u", "h2"), node("MatMul", "h2 A", "y"),
             node("Unsqueeze", "h2 a0", "h1")]  # fmt: skip
TWO = [node("Gather", "x zero", "x0", axis=1), node("Gather", "x one", "x1", axis=1), node("MatMul", "x0 L", "q0"),
       node("Tanh", "q0", "h"), node("MatMul", "x1 L", "q1")]  # fmt: skip
WRONG = {
    "a limit that is a product": lambda: many(over(node("Mul", "k15 k20", "k"), node("Greater", "t k", "o"))),
    "a limit that was a float": lambda: many(over(cast("f300", "k", INT64), node("Greater", "t k", "o"))),
    "a float that is cut off": lambda: many(
        over(cast("t", "tf", 1), node("Div", "tf f300", "q"), cast("q", "n", INT64), cast("n", "o", BOOL))
    ),
    "a small float that is cut off": lambda: many(
        over(cast("t", "tf", 1), node("Mul", "tf thousandth", "q"), cast("q", "n", INT64), cast("n", "o", BOOL))
    ),
    "a float that is absorbed": lambda: many(
        over(cast("t", "tf", 1), node("Add", "tf huge", "p"), node("Sub", "p huge", "q"), cast("q", "o", BOOL))
    ),
    "a least of a Concat": lambda: many(
        over(node("Unsqueeze", "t a0", "t1"), node("Concat", "t1 k300", "b", axis=0),
             node("ReduceMin", "b", "m", keepdims=0), node("Sub", "t m", "d"), cast("d", "o", BOOL))
    ),
    "an ArgMax": lambda: many(
        over(node("Unsqueeze", "t a0", "t1"), node("Concat", "k300 t1", "b", axis=0),
             node("ArgMax", "b", "d", axis=0, keepdims=0), cast("d", "o", BOOL))
    ),
    "a number that wraps": lambda: many(
        over(cast("t", "u", UINT8), cast("u", "v", INT64), node("Equal", "t v", "e"), node("Not", "e", "o"))
    ),
    "the size of a table": lambda: many(
        over(node("Shape", "front", "s"), node("Gather", "s zero", "k", axis=0), node("Greater", "t k", "o"))
    ),
    "a table of integers": lambda: many(over(node("Gather", "flags t", "i", axis=0), cast("i", "o", BOOL))),
    "a limit, with states": lambda: many(
        [*gru("h0", "h1", "y3"), *COUNT, cast("t", "tf", 1), node("Sub", "tf f300", "d"), node("Relu", "d", "e"),
         node("Add", "y3 e", "y")], True
    ),
    "lengths": lambda: many(
        [*COUNT, node("Mul", "k15 k20", "k"), node("Min", "t k", "m"), node("Reshape", "m a1", "n"), cast("n", "l", 6),
         helper.make_node("GRU", ["x", "W", "R", "", "l"], ["Y"], hidden_size=UNITS), node("Squeeze", "Y a1", "y")]
    ),
    "a delay, with states": lambda: many([*COUNT, *gru("h0", "h1", "y3"), *LATE, node("Add", "y3 d", "y")], True),
    "the state is of the first frame": lambda: many([*gru("h0"), *FIRST], True),
    "the state holds for one frame": lambda: many([*ONCE, *gru("h0", "hn"), node("Mul", "hn f", "h1")], True),
    "the state is read for one frame": lambda: many([*ONCE, node("Mul", "h0 f", "hi"), *gru("hi", "h1")], True),
    "a gain for several rows": lambda: rows(
        node("Shape", "x", "s"), node("Gather", "s one", "n", axis=0), node("Greater", "n one", "o"),
        node("Where", "o gain one_f", "f"), node("Mul", "y3 f", "y")
    ),
    "a gain from the second row on": lambda: rows(
        node("Slice", "y3 a0 a1 a1", "first"), node("Slice", "y3 a1 end a1", "rest"), node("Mul", "rest gain", "more"),
        node("Concat", "first more", "y", axis=1)
    ),
    "an input that comes out": lambda: one(
        [node("MatMul", "x A", "p"), node("MatMul", "s B", "q"), node("Add", "p q", "u"), *step(x="u"),
         node("Identity", "s", "s_out")], more={"s": [1, INPUTS]}, given={"s_out": [1, INPUTS]}
    ),
    "a cast to float16": lambda: one(
        [*step(y="y2"), cast("x", "i", FLOAT16), cast("i", "j", 1), node("MatMul", "j L", "l"),
         node("Add", "y2 l", "y")]
    ),
    "a cast like int8": lambda: one(
        [*step(y="y2"), node("CastLike", "x i8", "i"), cast("i", "j", 1), node("MatMul", "j L", "l"),
         node("Add", "y2 l", "y")]
    ),
    "a Dropout that drops": lambda: one([*step(y="y2"), node("Dropout", "y2 gain_half yes", "y", seed=1)]),
    "random numbers": lambda: one(
        [*step(y="y2"), helper.make_node("RandomUniform", [], ["u"], shape=[1], seed=1.0),
         node("Greater", "u nearly", "g"), cast("g", "f", 1), node("Add", "y2 f", "y")]
    ),
    "a limit of a cell that no ordinary step reaches": lambda: (
        [node("MatMul", "x L", "p"), node("MatMul", "h0 C", "q"), node("Add", "p q", "z"), node("LeakyRelu", "z", "f"),
         node("Min", "f twothousand", "h1"), node("Identity", "h1", "y")],
        {"x": [1, INPUTS], "h0": [1, UNITS]}, {"y": [1, UNITS], "h1": [1, UNITS]},
    ),
    "a number of frames that overflows": lambda: many(
        over(node("Unsqueeze", "t a0", "n1"), node("Mul", "n1 p33", "m"), node("Sub", "p40 m", "e"),
             node("Expand", "one_f n1", "ones"), node("Slice", "ones e end a0", "s"), node("Size", "s", "k"),
             node("Equal", "k zero", "o"))
    ),
    "a power of the number of frames": lambda: many(
        over(node("Mul", "t t", "t2"), node("Mul", "t2 t2", "t4"), node("Div", "t4 t4", "d"), cast("d", "o", BOOL))
    ),
    "what several frames do not show": lambda: many(
        [*gru(y="y3"), node("Reshape", "y3 plane", "p"), node("Conv", "p K", "q", pads=[0, 1, 0, 1]),
         node("Reshape", "q back", "r"), *COUNT, cast("t", "tf", 1), node("Sub", "tf f300", "d"),
         node("Relu", "d", "e"), node("Add", "r e", "y")]
    ),
    "another function from the second frame on": lambda: many(
        [node("Slice", "x a0 a1 a0", "f"), node("Slice", "x a1 end a0", "r"), node("Min", "r f300", "m"),
         node("Concat", "f m", "v", axis=0),
         helper.make_node("GRU", ["v", "W", "R"], ["Y"], hidden_size=UNITS), node("Squeeze", "Y a1", "y")]
    ),
    "a bias beside a leak": lambda: (
        [node("MatMul", "x L", "p"), node("MatMul", "h0 C", "q"), node("Add", "p q", "z"), node("Tanh", "z", "n"),
         node("Mul", "n tenth", "gn"), node("Mul", "h0 nine", "kh"), node("Add", "kh gn", "s"),
         node("Add", "s millionth", "h1"), node("Identity", "h1", "y")],
        {"x": [1, INPUTS], "h0": [1, UNITS]}, {"y": [1, UNITS], "h1": [1, UNITS]},
    ),
    "two steps written out": lambda: (
        [*TWO, node("MatMul", "h C", "f"), node("Add", "q1 f", "s"), node("Tanh", "s", "y")],
        {"x": [1, 2, INPUTS]}, {"y": [1, UNITS]},
    ),
    "a sum that is absorbed beside a large output": lambda: (
        [node("MatMul", "x A", "v"), node("Add", "v far", "w"), node("Sub", "w far", "u"), node("MatMul", "x L", "p"),
         node("Mul", "p far2", "q"), node("Concat", "u q", "y", axis=1)],
        {"x": [1, INPUTS]}, {"y": [1, INPUTS + UNITS]},
    ),
    "a factor that overflows": lambda: one(
        [*step(y="y2"), node("Mul", "y2 large", "l"), node("Mul", "l small", "y")]
    ),
    "x and a state that could be exchanged": lambda: (
        EXCHANGED, {"x": [1, 1, INPUTS], "h0": [1, INPUTS]}, {"y": [1, INPUTS], "h1": [1, 1, INPUTS]}
    ),
}  # fmt: skip
MORE = {"front": np.zeros((100, 1, UNITS), np.float32), "flags": np.repeat([0, 1], [300, 4000]), "i8": np.int8(0),
        "zeros": np.zeros((1, 1, UNITS), np.float32),
        "millionth": np.float32(1e-6), "nine": np.float32(0.9), "tenth": np.float32(1) - np.float32(0.9),
        "twothousand": np.float32(2e3), "p33": np.array([2**33]), "p40": np.array([2**40]),
        "plane": np.array([1, 1, -1, UNITS]), "back": np.array([-1, 1, UNITS]),
        "far": np.float32(1e5), "far2": np.float32(1e7), "large": np.float32(1e35), "small": np.float32(1e-35),
        "one_f": np.float32(1), "gain_half": np.float32(0.5), "nearly": np.float32(0.999)}  # fmt: skip


REASONS = (
    "number of the frames|number of frames|do not compute|none of those|overflow|decides by something|"
    "with several frames|by the same rule|an unrolled RNN|an element, beside|random numbers|16 bits|small integers|"
    "unchanged|more than one reading|depends on several frames"
)


def written(path, rng, nodes, inputs, outputs):
    shapes = {
        "W": (1, 3 * UNITS, INPUTS),
        "R": (1, 3 * UNITS, UNITS),
        "L": (INPUTS, UNITS),
        "P": (UNITS, 2),
        "V": (2 * UNITS, 2),
    }
    shapes |= {
        "K": (1, 1, 1, 3),
        "C": (UNITS, UNITS),
        "L4": (UNITS, INPUTS),
        "A": (INPUTS, INPUTS),
        "B": (INPUTS, INPUTS),
    }
    read = {name for each in nodes for name in each.input}
    weights = {name: normal(rng, *shape) for name, shape in shapes.items()} | NUMBERS | MORE
    return saved(path, nodes, inputs, outputs, {name: value for name, value in weights.items() if name in read}, 18)


@pytest.mark.exhaustive(one_in=6)
@pytest.mark.parametrize("kind", WRONG)
def test_what_is_no_stream_of_its_layers_is_refused(kind, tmp_path, rng):
    path = written(tmp_path / "m.onnx", rng, *WRONG[kind]())
    onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    with pytest.raises(ValueError, match=REASONS):
        imported(path)


def test_a_clip_that_is_out_of_reach_is_refused_where_runtimes_differ(tmp_path, rng):
    weights = {"W": normal(rng, 1, 4 * UNITS, INPUTS), "R": normal(rng, 1, 4 * UNITS, UNITS)} | NUMBERS
    cell = {"hidden_size": UNITS, "clip": 1e4, "activations": ["Sigmoid", "Relu", "Relu"]}
    nodes = [
        helper.make_node("LSTM", ["x", "W", "R", "", "", "h0", "c0"], ["Y", "h1", "c1"], **cell),
        node("Squeeze", "Y a1", "y"),
    ]
    state = [1, 1, UNITS]
    shapes = {"x": [1, 1, INPUTS], "h0": state, "c0": state}, {"y": [1, 1, UNITS], "h1": state, "c1": state}
    with pytest.raises(ValueError, match="its clip"):
        imported(saved(tmp_path / "m.onnx", nodes, *shapes, weights))


def test_one_layer_for_two_frames_of_a_window_loads(tmp_path, rng):
    nodes = [*TWO, node("Tanh", "q1", "h1"), node("Concat", "h h1", "c", axis=1), node("MatMul", "c V", "y")]
    found = imported(written(tmp_path / "m.onnx", rng, nodes, {"x": [1, 2, INPUTS]}, {"y": [1, 2]}))
    assert (found.model.input_size, found.states) == (2 * INPUTS, {})


@pytest.mark.parametrize(("domain", "name"), [("", "Selu"), ("ai.onnx", "HardSwish"), ("com.microsoft", "Gelu")])
def test_a_function_with_the_name_of_an_operator_is_refused(domain, name, tmp_path, rng):
    """onnxruntime runs its own operator, not the function."""
    opsets = [helper.make_opsetid("", 18)]
    function = helper.make_function(domain, name, ["a"], ["b"], [node("Sigmoid", "a", "b")], opsets)
    path = written(
        tmp_path / "m.onnx", rng, *one([*step(y="y2"), helper.make_node(name, ["y2"], ["y"], domain=domain)])
    )
    model = onnx.load(path)
    model.functions.append(function)
    model.opset_import.extend([helper.make_opsetid(domain, 1)] if domain == "com.microsoft" else [])
    onnx.save(model, path)
    with pytest.raises(ValueError, match=f"its function '{name}' is in the domain"):
        imported(path)


def referring(op, name, outer, domain=""):
    """A node of a function, whose attribute `name` is the function's attribute `outer`."""
    made = node(op, "a", "b", **{name: 0.0}, domain=domain)
    made.attribute[0].ClearField("f")
    made.attribute[0].ref_attr_name = outer
    return made


@pytest.mark.parametrize("given", [None, 0.6])
@pytest.mark.parametrize("passed_on", [False, True])
def test_attributes_that_a_call_leaves_out_have_the_default_of_the_function(passed_on, given, tmp_path, rng):
    """onnx's inliner drops it, so that the operator has its own; two calls, of which one gives it, if any."""
    opsets, slope = [helper.make_opsetid("", 18), helper.make_opsetid("my", 1)], helper.make_attribute("slope", 0.3)
    functions = [helper.make_function("my", "F", ["a"], ["b"], [referring("LeakyRelu", "alpha", "slope")], opsets,
                                      attribute_protos=[slope])]  # fmt: skip
    if passed_on:
        functions += [helper.make_function("my", "G", ["a"], ["b"], [referring("F", "slope", "inner", "my")], opsets,
                                           ["inner"])]  # fmt: skip
    name = {"inner": given} if passed_on else {"slope": given}
    first, last = (helper.make_node("FG"[passed_on], *ends, domain="my", **more) for ends, more in
                   (((["u"], ["v"]), name if given else {}), ((["w"], ["z"]), {})))  # fmt: skip
    nodes = [node("MatMul", "x A", "u"), first, node("MatMul", "v B", "w"), last, node("MatMul", "z B", "y")]
    path = written(tmp_path / "m.onnx", rng, nodes, {"x": [1, INPUTS]}, {"y": [1, UNITS]})
    model = onnx.load(path)
    model.functions.extend(functions)
    model.opset_import.append(opsets[1])
    onnx.save(model, path)
    layers = imported(path).model.layers
    assert [layer.parameters["slope"] for layer in layers if layer.kind == "Activation"] == [
        pytest.approx(each or 0.3) for each in (given, None)
    ]


def test_states_whose_names_are_crossed_are_told(tmp_path, rng):
    nodes = [*step("s0", "s1_out", "y1"), node("MatMul", "y1 L4", "u"), node("Unsqueeze", "u a0", "u3"),
             helper.make_node("GRU", ["u3", "W", "R", "", "", "s1"], ["Y2", "s0_out"], hidden_size=UNITS),
             node("Squeeze", "Y2 a01", "y")]  # fmt: skip
    state = [1, 1, UNITS]
    inputs, outputs = {"x": [1, INPUTS], "s0": state, "s1": state}, {"y": [1, UNITS], "s0_out": state, "s1_out": state}
    found = imported(written(tmp_path / "m.onnx", rng, nodes, inputs, outputs))
    assert found.states == {"s0": "s1_out", "s1": "s0_out"}
    assert any("'s0' is given back by 's1_out'" in note for note in found.notes)


@pytest.mark.parametrize("given", [{}, {"frames": ["s0"]}])
def test_a_frame_that_looks_like_a_state_is_told(given, tmp_path, rng):
    """y = x + s0[5] / 2, s0 the y of six calls: as a recurrence over x it has layers, as a comb filter none."""
    nodes = [node("Slice", "s0 five six a0", "old"), node("Mul", "old half", "late"), node("Add", "x late", "y"),
             node("Slice", "s0 a0 five a0", "kept"), node("Concat", "y kept", "s0_out", axis=0)]  # fmt: skip
    inputs, outputs = {"x": [1, INPUTS], "s0": [6, INPUTS]}, {"y": [1, INPUTS], "s0_out": [6, INPUTS]}
    tensors = {"a0": np.array([0]), "five": np.array([5]), "six": np.array([6]), "half": np.float32(0.5)}
    found = imported(saved(tmp_path / "m.onnx", nodes, inputs, outputs, tensors), **given)
    assert found.frames == ("s0",)
    assert any("'s0' is read as x and 's0_out' as y" in note for note in found.notes) == (not given)


def test_no_output_is_lost(tmp_path, rng):
    product = node("MatMul", "hs P", "y")
    nodes = [*gru(y="hs"), product]
    outputs = {"y": ["T", 1, 2], "hs": ["T", 1, UNITS]}
    found = imported(written(tmp_path / "m.onnx", rng, nodes, {"x": ["T", 1, INPUTS]}, outputs))
    assert found.outputs == ("y", "hs")
    tap = node("Slice", "hs a0 two two", "tap")
    state = [1, 1, UNITS]
    nodes = [*gru("h0", "h1", "hs"), product, tap]
    inputs, outputs = {"x": ["T", 1, INPUTS], "h0": state}, {"y": ["T", 1, 2], "tap": ["T", 1, 2], "h1": state}
    path = written(tmp_path / "tap.onnx", rng, nodes, inputs, outputs)
    assert imported(path).outputs == ("y", "tap")


def test_outputs_that_are_left_out_are_named(tmp_path, rng):
    nodes = [*step(h="zeros", last="", y="hs"), node("MatMul", "hs P", "y")]
    path = written(tmp_path / "m.onnx", rng, nodes, {"x": [1, INPUTS]}, {"y": [1, 2], "hs": [1, UNITS]})
    assert any("'hs'" in note for note in imported(path).notes)


def test_states_of_one_size_in_reverse_order_are_paired(tmp_path, rng):
    """By what the outputs depend on: not every order of six can be tried."""
    nodes, weights = [node("Unsqueeze", "x a0", "v0")], {"a0": np.array([0]), "a1": np.array([1])}
    for i in range(6):
        weights |= {f"W{i}": normal(rng, 1, 3 * UNITS, UNITS), f"R{i}": normal(rng, 1, 3 * UNITS, UNITS)}
        cell = [f"v{i}", f"W{i}", f"R{i}", "", "", f"h{i}"], [f"Y{i}", f"n{i}"]
        nodes += [helper.make_node("GRU", *cell, hidden_size=UNITS), node("Squeeze", f"Y{i} a1", f"v{i + 1}")]
    nodes.append(node("Squeeze", "v6 a0", "y"))
    inputs = {"x": [1, UNITS]} | {f"h{i}": [1, 1, UNITS] for i in range(6)}
    outputs = {"y": [1, UNITS]} | {f"n{i}": [1, 1, UNITS] for i in reversed(range(6))}
    found = imported(saved(tmp_path / "m.onnx", nodes, inputs, outputs, weights))
    assert found.states == {f"h{i}": f"n{i}" for i in range(6)}


def test_a_file_without_a_layer_says_so(tmp_path, rng):
    path = written(tmp_path / "m.onnx", rng, [node("Identity", "x", "y")], {"x": [1, INPUTS]}, {"y": [1, INPUTS]})
    with pytest.raises(ValueError, match="there is no layer"):
        imported(path)


def test_token_ids_whose_number_is_read_load(tmp_path, rng):
    nodes = [node("Shape", "x", "s"), node("Gather", "A x", "e", axis=0), node("Concat", "s size", "t", axis=0),
             node("Reshape", "e t", "f"), node("MatMul", "f L", "y")]  # fmt: skip
    weights = {"A": normal(rng, INPUTS, INPUTS), "L": normal(rng, INPUTS, UNITS), "size": np.array([INPUTS])}
    found = imported(saved(tmp_path / "m.onnx", nodes, {"x": [1]}, {"y": [1, UNITS]}, weights, ids=("x",)))
    assert dict(found.model.tokens) == {0: INPUTS}
