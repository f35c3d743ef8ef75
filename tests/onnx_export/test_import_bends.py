"""Written cells that are another cell but far from 0, in a narrow part, or by a drift: random probes miss it."""

import numpy as np
import pytest
from graphs import imported, node, normal, saved

INPUTS, UNITS = 3, 4  # a norm of 4 is at most sqrt(3)
NUMBERS = {
    "one": 1.0, "far": 400.0, "wide": 800.0, "at": 0.3701, "step": 2.0**-11, "steep": 512.0, "k4096": 4096.0,
    "quarter": 0.25, "two": 2.0, "eps": 1e-5, "almost": 1 - 8e-7, "little": 9e-8, "limit": 1.7318,
}  # fmt: skip


def bump(v):
    """0 but within `step` of `at`, where it is up to 1/4."""
    return [node("Sub", f"{v} at", "b"), node("Sub", "b step", "b+"), node("Add", "b step", "b-"),
            *[node("Mul", f"{each} steep", f"{each}s") for each in ("b", "b+", "b-")],
            *[node("Relu", f"{each}s", f"{each}r") for each in ("b", "b+", "b-")],
            node("Mul", "br two", "br2"), node("Add", "b+r b-r", "b+-"), node("Sub", "b+- br2", "bump")]  # fmt: skip


def beyond(v, function, at="far"):
    return [node("Sub", f"{v} {at}", "d"), node(function, "d", "e")]


def steep(v):
    """1/4 where v is between `at` and one step more, to which tanh is as good as a sign."""
    return [node("Sub", f"{v} at", "b"), node("Sub", "b step", "b+"),
            *[node("Mul", f"{each} k4096", f"{each}s") for each in ("b", "b+")],
            *[node("Tanh", f"{each}s", f"{each}t") for each in ("b", "b+")],
            node("Sub", "bt b+t", "s"), node("Mul", "s quarter", "bump")]  # fmt: skip


def sums(gates):
    pairs = [((f"x W{g}", f"x{g}"), (f"h R{g}", f"h{g}"), (f"x{g} h{g}", f"z{g}")) for g in gates]
    return [node(op, *pair) for each in pairs for op, pair in zip(("MatMul", "MatMul", "Add"), each, strict=True)]


def lstm(of_sum=(), of_c=(), shown="c_out", result="t"):
    """`of_sum` computes c_out of cs, `of_c` the value `shown` that tanh is of, and `result` of t, this tanh."""
    return [*sums("fiog"), *[node("Sigmoid", f"z{g}", g) for g in "fio"], node("Tanh", "zg", "g"),
            node("Mul", "f c", "fc"), node("Mul", "i g", "ig"), node("Add", "fc ig", "cs" if of_sum else "c_out"),
            *of_sum, node("Tanh", shown, "t"), *of_c, node("Mul", f"o {result}", "h_out")]  # fmt: skip


def gru(of_n=(), candidate="t"):
    """`of_n` computes `candidate`, of its argument zn and t, the tanh of it."""
    return [*sums("fi"), node("Sigmoid", "zf", "r"), node("Sigmoid", "zi", "z"), node("MatMul", "x Wo", "xo"),
            node("MatMul", "h Ro", "ho"), node("Mul", "r ho", "rh"), node("Add", "xo rh", "zn"),
            node("Tanh", "zn", "t"), *of_n, node("Sub", "one z", "z-"), node("Mul", f"z- {candidate}", "new"),
            node("Mul", "z h", "kept"), node("Add", "new kept", "h_out")]  # fmt: skip


def norm(*of_q, q="q"):
    """A layer norm of zf, of whose quotient `of_q` computes `q`."""
    return [*sums("f"), node("ReduceMean", "zf", "m", axes=[1]), node("Sub", "zf m", "z-m"),
            node("Mul", "z-m z-m", "sq"), node("ReduceMean", "sq", "v", axes=[1]), node("Add", "v eps", "v+"),
            node("Sqrt", "v+", "sd"), node("Div", "z-m sd", "q"), *of_q, node("Mul", f"{q} gain", "qg"),
            node("Add", "qg bias", "n"), node("Tanh", "n", "h_out")]  # fmt: skip


def reset_first(of_r=(), reset="r"):
    """`of_r` computes `reset`, which is multiplied by h before the product; r is the sigmoid."""
    return [*sums("fi"), node("Sigmoid", "zf", "r"), node("Sigmoid", "zi", "z"), *of_r, node("Mul", f"{reset} h", "rh"),
            node("MatMul", "x Wo", "xo"), node("MatMul", "rh Ro", "ho"), node("Add", "xo ho", "zn"),
            node("Tanh", "zn", "t"), node("Sub", "one z", "z-"), node("Mul", "z- t", "new"), node("Mul", "z h", "kept"),
            node("Add", "new kept", "h_out")]  # fmt: skip


RELU = [*sums("f"), node("Relu", "zf", "u")]
LEAKY = [*sums("f"), node("LeakyRelu", "zf", "u", alpha=0.3)]
ADDED = node("Add", "t bump", "t2")
OTHERS = {
    "h that turns where c is 400": lstm((), [*beyond("c_out", "Sigmoid"), node("Sub", "t e", "t2")], result="t2"),
    "c cut off at 400": lstm([*beyond("cs", "Relu"), node("Sub", "cs e", "c_out")]),
    "a bump of c": lstm((), [*bump("c_out"), ADDED], result="t2"),
    "a bump of the candidate": gru([*bump("zn"), ADDED], "t2"),
    "a bump of the tanh": gru([*bump("t"), ADDED], "t2"),
    "a bump of the reset gate": reset_first([*bump("r"), node("Add", "r bump", "r2")], "r2"),
    "a steep tanh": gru([*steep("zn"), ADDED], "t2"),
    "a relu of the candidate beyond 800": gru([*beyond("zn", "Relu", "wide"), node("Add", "t e", "t2")], "t2"),
    "a factor beside 1": [*RELU, node("Mul", "u almost", "h_out")],
    "a small offset of a leaky relu": [*LEAKY, node("Add", "u little", "h_out")],
    "a bump of a softmax": gru([node("Softmax", "zn", "p", axis=1), *bump("p"), ADDED], "t2"),
    "a bump of a product": gru([node("MatMul", "t Rg", "p"), *bump("p"), ADDED], "t2"),
    "a small offset": [*RELU, node("Add", "u little", "h_out")],
    "a bump of a norm": norm(*bump("q"), node("Add", "q bump", "q2"), q="q2"),
    "a norm that is cut off": norm(*beyond("q", "Relu", "limit"), node("Sub", "q e", "q2"), q="q2"),
}  # fmt: skip
PLAIN = {
    "lstm": lstm(),
    "gru": gru(),
    "reset first": reset_first(),
    "rnn": [*sums("f"), node("Relu", "zf", "h_out")],
    "leaky": [*LEAKY, node("Identity", "u", "h_out")],
    "norm": norm(),
}
REASON = r"none of those that a CellSpec describes|in no cell|reads it as a state"


def written(path, rng, nodes):
    weights = {name: np.float32(value) for name, value in NUMBERS.items()}
    weights |= {f"{kind}{g}": normal(rng, n, UNITS) for kind, n in (("W", INPUTS), ("R", UNITS)) for g in "fiog"}
    weights |= {name: normal(rng, UNITS) for name in ("gain", "bias")}
    read = {name for each in nodes for name in each.input}
    states = [name for name in "hc" if name in read]
    kept = {name: value for name, value in weights.items() if name in read}
    inputs = {"x": [1, INPUTS]} | {name: [1, UNITS] for name in states}
    return saved(path, nodes, inputs, {f"{name}_out": [1, UNITS] for name in states}, kept)


@pytest.mark.parametrize("kind", OTHERS)
@pytest.mark.exhaustive(one_in=6)
def test_cells_that_differ_where_no_random_probe_is_are_refused(kind, tmp_path, rng):
    with pytest.raises(ValueError, match=REASON):
        imported(written(tmp_path / "m.onnx", rng, OTHERS[kind]))


@pytest.mark.parametrize("kind", PLAIN)
def test_the_same_cells_without_it_are_read(kind, tmp_path, rng):
    assert imported(written(tmp_path / "m.onnx", rng, PLAIN[kind])).report.ok
