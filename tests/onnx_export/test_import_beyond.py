"""Valid files whose outputs change beyond what one stored number says: `load` reads them rightly, or refuses them."""

import numpy as np
import onnxruntime
import pytest
from graphs import imported, node, normal, saved
from onnx import TensorProto, helper

import cnorm
import onnx_export
from onnx_export.errors import NotImported
from onnx_export.importer import proof

SIZE, UNITS, EACH, TIMES = 3, 4, 30, 8  # a delay of 240 frames is written as eight of 30
FAR = EACH * TIMES
NUMBERS = {
    "a0": np.array([0]), "a1": np.array([1]), "a2": np.array([2]), "k20": np.array([20]), "one": np.array(1),
    "end": np.array([2**40]), "flat": np.array([-1]), "zero": np.array(0), "nulls": np.zeros(4, np.int64),
    "front": np.array([0, EACH, 0, 0, 0, 0]), "behind": np.array([0, 0, 0, 0, EACH, 0]), "each": np.array([EACH]),
    "less": np.array([-EACH]), "table": np.repeat([1, 2], [90, 10]), "pairs": np.array([1, -1, 2, SIZE]),
    "frames": np.array([1, -1, SIZE]),
    "k9": np.array([9]), "tens": np.array([1, -1, 10 * SIZE]), "line": np.array([1, -1, 1]),
    "ranked": np.array([1, -1, SIZE, *[1] * 31]), "pads34": np.eye(1, 68, 1, dtype=np.int64)[0] * FAR,
}  # fmt: skip
COUNT = [node("Shape", "x", "sizes"), node("Gather", "sizes a1", "t", axis=0)]
PRODUCTS = [node("MatMul", "x A", "u"), node("MatMul", "x B", "v")]


def written(path, rng, nodes, size=SIZE):
    weights = NUMBERS | {name: normal(rng, SIZE, SIZE) for name in "AB"}
    weights |= {"W": normal(rng, 1, 3 * UNITS, SIZE), "R": normal(rng, 1, 3 * UNITS, UNITS)}
    read = {name for each in nodes for name in each.input}
    read |= {name for each in nodes for a in each.attribute for inner in a.g.node for name in inner.input}
    kept = {name: value for name, value in weights.items() if name in read}
    return saved(path, nodes, {"x": [1, "T", SIZE]}, {"y": [1, "T", size]}, kept)


def moved(x, ahead=False):
    """x `FAR` frames later, or earlier."""
    nodes, pads, cut = [], *(("behind", "each end") if ahead else ("front", "a0 less"))
    for i in range(TIMES):
        nodes += [
            node("Pad", f"{x} {pads}", f"{x}{ahead:d}p"),
            node("Slice", f"{x}{ahead:d}p {cut} a1", f"{x}{ahead:d}_{i}"),
        ]
        x = f"{x}{ahead:d}_{i}"
    return nodes, x


def cell(x):
    return [node("Transpose", x, "xt", perm=[1, 0, 2]), node("GRU", "xt W R", "Y", hidden_size=UNITS),
            node("Squeeze", "Y a1", "y1"), node("Transpose", "y1", "h", perm=[1, 0, 2])]  # fmt: skip


@pytest.mark.parametrize("where", ["beside a product", "before a cell", "behind a cell", "over many axes"])
def test_delays_beyond_one_number_are_read(where, tmp_path, rng):
    if where == "over many axes":  # whose pads are a long list
        nodes = added(node("Reshape", "v ranked", "r"), node("Pad", "r pads34", "p"), node("Reshape", "p frames", "w"))
    elif where == "behind a cell":
        nodes, late = moved("h")
        nodes = [*cell("x"), *nodes, node("Add", f"h {late}", "y")]
    else:
        nodes, late = moved("v")
        nodes = [*PRODUCTS, *nodes, node("Add", f"u {late}", "z")]
        nodes += [*cell("z"), node("Identity", "h", "y")] if where == "before a cell" else [node("Identity", "z", "y")]
    path = written(tmp_path / "m.onnx", rng, nodes, UNITS if "cell" in where else SIZE)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    x = rng.standard_normal((2 * FAR, SIZE)).astype(np.float32)
    assert imported(path).model.check(x, session.run(None, {"x": x[None]})[0][0]).ok


def power(*nodes):
    """All frames but those before (T - 1) (T - 400), of which no number stored or computed of one frame tells."""
    return [*COUNT, *PRODUCTS[:1], *nodes, node("Sub", "t a1", "d"),
            node("Mul", "d k20", "d20"), node("Mul", "d20 k20", "d400"),
            node("Sub", "q a1", "q1"), node("Sub", "q1 d400", "q2"), node("Sub", "q2 d", "from"),
            node("Slice", "u from end a1", "part"), node("Shape", "part", "p"), node("Gather", "p a1", "n", axis=0),
            node("Sub", "t n", "more"), node("Concat", "a0 more nulls", "pads", axis=0),
            node("Pad", "part pads", "y")]  # fmt: skip


def table(*nodes):
    """A factor for each frame, which is 1 for the first 90."""
    return [
        *COUNT,
        *PRODUCTS[:1],
        *nodes,
        node("Cast", "i", "f", to=1),
        node("Unsqueeze", "f a1", "g"),
        node("Mul", "u g", "y"),
    ]


def added(*nodes):
    """A delay by w, of which v are the frames."""
    return [*COUNT, *PRODUCTS, *nodes, node("Slice", "w a0 t a1", "l"), node("Add", "u l", "y")]


def ahead():
    nodes, early = moved("v", ahead=True)
    return [*PRODUCTS, *nodes, node("Add", f"u {early}", "y")]


def there_and_back():
    nodes, early = moved("v", ahead=True)
    more, late = moved(early)
    return [*PRODUCTS, *nodes, *more, node("Add", f"u {late}", "y")]


def in_pairs():
    """One frame as it is, an even number summed over pairs."""
    kind = {name: helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in ("o1", "o2")}
    once = helper.make_graph([node("Identity", "u", "o1")], "once", [], [kind["o1"]])
    many = [node("Reshape", "u pairs", "p"), node("CumSum", "p one", "s"), node("Reshape", "s frames", "o2")]
    branches = {"then_branch": once, "else_branch": helper.make_graph(many, "many", [], [kind["o2"]])}
    return [*COUNT, *PRODUCTS[:1], node("Squeeze", "t a0", "n"), node("Equal", "n one", "is_one"),
            helper.make_node("If", ["is_one"], ["y"], **branches)]  # fmt: skip


WRONG = {
    "frames ahead": (ahead, "several frames"),
    "frames ahead and back": (there_and_back, "same rule"),
    "a product of numbers of frames": (lambda: power(node("Concat", "t t", "tt", axis=0),
        node("ReduceProd", "tt", "q", axes=[0])), "ReduceProd"),
    "the size of a square": (lambda: power(node("Concat", "t t", "tt", axis=0), node("ConstantOfShape", "tt", "c"),
        node("Size", "c", "q0"), node("Reshape", "q0 a1", "q")), "ConstantOfShape"),
    "a tile of a tile": (lambda: power(node("Expand", "a1 t", "e"), node("Tile", "e t", "c"), node("Shape", "c", "q")),
        "Tile"),
    "frames times frames": (lambda: power(node("Slice", "x a0 a1 a2", "c"), node("Concat", "a1 a1 t", "r", axis=0),
        node("Tile", "c r", "xx"), node("Reshape", "xx flat", "w"), node("Shape", "w", "q")), "Tile"),
    "a table for each frame": (lambda: table(node("Tile", "table t", "long"), node("Slice", "long a0 t a0", "i")),
        "places"),
    "a table in front": (lambda: table(node("Expand", "a1 t", "e"), node("Concat", "table e", "long", axis=0),
        node("Slice", "long a0 t a0", "i")), "places"),
    "ten frames in a row": (lambda: added(node("Mul", "t k9", "t9"), node("Concat", "nulls t9 a0", "back", axis=0),
        node("Pad", "v back", "p"), node("Reshape", "p tens", "r"), node("Pad", "r front", "q"),
        node("Reshape", "q frames", "w")), "several frames in a row"),
    "channels in a row": (lambda: added(node("Transpose", "v", "c", perm=[0, 2, 1]), node("Reshape", "c frames", "r"),
        node("Pad", "r front", "q"), node("Reshape", "q line", "w")), "several frames in a row"),
    "an even number of frames": (in_pairs, "takes 2 elements"),
}  # fmt: skip


@pytest.mark.parametrize("kind", WRONG)
@pytest.mark.exhaustive(one_in=3)
def test_what_one_number_does_not_show_is_refused(kind, tmp_path, rng):
    nodes, reason = WRONG[kind]
    path = written(tmp_path / "m.onnx", rng, nodes())
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    for frames in (1, 2, 64, 500):  # it is a file for these
        session.run(None, {"x": np.zeros((1, frames, SIZE), np.float32)})
    with pytest.raises(ValueError, match=reason):
        imported(path)


@pytest.mark.parametrize("old", ["x", "s"])
def test_names_that_do_not_say_which_is_the_frame_before_are_refused(old, tmp_path, rng):
    """y = x, or the s of before: what s_out is of both, has a layer only if s is no state, which states= says."""
    nodes = [*[node("MatMul", f"{a} {b}", f"{a}{b}") for a, b in ("xA", "sB")], node("Add", "xA sB", "z"),
             node("Tanh", "z", "s_out"), node("Identity", old, "y")]  # fmt: skip
    weights = {name: normal(rng, SIZE, SIZE) for name in "AB"}
    ends = {"x": [1, SIZE], "s": [1, SIZE]}, {"y": [1, SIZE], "s_out": [1, SIZE]}
    path = saved(tmp_path / "m.onnx", nodes, *ends, weights)
    with pytest.raises(ValueError, match=f"'y' is the input '{old}' unchanged: if"):
        imported(path)
    other = "xs".replace(old, "")
    assert dict(imported(path, states={other: "y"}).states) == {other: "y"}


def test_elements_of_a_large_file_are_judged_beside_their_own_size(rng):
    """A file of many nodes is run over few steps, but over enough for that: 1 % of y is less than the bound of 1e5."""
    weight = normal(rng, 8, 6) * np.repeat(np.float32([1, 1e5]), 4)[:, None]
    model = cnorm.Model([cnorm.Linear(weight)])
    other = cnorm.Model([cnorm.Linear(weight * np.repeat(np.float32([1.01, 1]), 4)[:, None])])
    exported = onnx_export.export(other)
    del exported.metadata_props[:]
    (last,) = [one for one in exported.graph.node if "y" in one.output]
    last.output[0] = "y0"
    more = [node("Identity", f"y{i}", f"y{i + 1}") for i in range(450)]
    more[-1].output[0] = "y"
    exported.graph.node.extend(more)
    with pytest.raises(NotImported, match="at an element, beside its own largest value"):
        proof._compared(model, exported)
