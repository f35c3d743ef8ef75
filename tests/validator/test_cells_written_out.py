"""Layer-normalised cells in a Scan, in a Loop and unrolled: each norm is found, and a finding names its cell."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from writings import Writing, saved

from onnx_export.validation import formats
from onnx_export.validation.examine import examine
from onnx_export.validation.options import Options

INPUTS, UNITS, ROWS, STEPS = 6, 16, 2, 4


def norm(w, x, gain, fault=""):
    """x normalised over its last axis, in nodes."""
    d = w.centred(x, (0,) if fault == "axis" else (-1,))
    v = w.variance(x if fault == "raw" else d)
    if fault == "unbiased":
        v = w.op("Mul", v, UNITS / (UNITS - 1))
    std = w.op("Sqrt", w.op("Add", v, 0.0 if fault == "eps" else 1e-3))
    return w.op("Mul", w.op("Div", d, std), gain)


def lstm(w, x, h, c, p, fault):
    total = w.op("Add", norm(w, w.op("MatMul", x, p["W"]), p["ln_x"]), norm(w, w.op("MatMul", h, p["R"]), p["ln_h"]))
    i, f, g, o = w.op("Split", total, outputs=4, axis=1)
    c = w.op("Add", w.op("Mul", w.op("Sigmoid", f), c), w.op("Mul", w.op("Sigmoid", i), w.op("Tanh", g)))
    return w.op("Mul", w.op("Sigmoid", o), w.op("Tanh", norm(w, c, p["ln_c"], fault))), c


def gru(w, x, h, c, p, fault):
    """The carry c is passed on unused."""
    r, z, n = w.op("Split", norm(w, w.op("MatMul", x, p["W"]), p["ln_x"]), outputs=4, axis=1)[:3]
    hr, hz, hn = w.op("Split", norm(w, w.op("MatMul", h, p["R"]), p["ln_h"]), outputs=4, axis=1)[:3]
    r, z = w.op("Sigmoid", w.op("Add", r, hr)), w.op("Sigmoid", w.op("Add", z, hz))
    n = norm(w, w.op("Tanh", w.op("Add", n, w.op("Mul", r, hn))), p["ln_c"], fault)
    return w.op("Add", n, w.op("Mul", z, w.op("Sub", h, n))), w.op("Identity", c)


def parameters(w):
    shapes = {"W": (INPUTS, 4 * UNITS), "R": (UNITS, 4 * UNITS)}
    shapes |= {"ln_x": 4 * UNITS, "ln_h": 4 * UNITS, "ln_c": UNITS}
    made = {}
    for seed, (name, shape) in enumerate(shapes.items()):
        w.constant(w.gain(shape, seed))
        w.stored[-1].name = made[name] = f"cell.{name}.weight"
    return made


def value(name, shape, kind=TensorProto.FLOAT):
    return helper.make_tensor_value_info(name, kind, shape)


def unrolled(w, cell, fault):
    x, h, c, p = *start(w), parameters(w)
    ys = []
    for t in range(STEPS):
        h, c = cell(w, w.op("Gather", x, np.int64(t), axis=0), h, c, p, fault)
        ys.append(w.over("Unsqueeze", h, (0,)))
    return w.op("Concat", *ys, axis=0)


def start(w):
    return w.input("x", (STEPS, ROWS, INPUTS)), w.input("h", (ROWS, UNITS)), w.input("c", (ROWS, UNITS))


def body(w, cell, fault, loop):
    """The graph of one step, with the constants of the outer one."""
    x, h, c, p = *start(w), parameters(w)
    inner = Writing(w.dtype, w.opset)
    inner.constant = w.constant
    inner.nodes = [helper.make_node("Gather", [x, "t"], ["x_t"], axis=0)] if loop else []
    h2, c2 = cell(inner, "x_t", "h_t", "c_t", p, fault)
    nodes = [*inner.nodes, helper.make_node("Identity", [h2], ["y_t"])]
    states = [value("h_t", (ROWS, UNITS), w.kind), value("c_t", (ROWS, UNITS), w.kind)]
    results = [value(name, None, w.kind) for name in (h2, c2, "y_t")]
    if loop:
        nodes.append(helper.make_node("Identity", ["go"], ["on"]))
        inputs = [value("t", (), TensorProto.INT64), value("go", (), TensorProto.BOOL), *states]
        return (h, c), helper.make_graph(nodes, "body", inputs, [value("on", (), TensorProto.BOOL), *results])
    return (h, c, x), helper.make_graph(nodes, "body", [*states, value("x_t", (ROWS, INPUTS), w.kind)], results)


def scan(w, cell, fault):
    inputs, graph = body(w, cell, fault, False)
    w.nodes.append(helper.make_node("Scan", inputs, ["hn", "cn", "y"], "rnn", num_scan_inputs=1, body=graph))
    return "y"


def loop(w, cell, fault):
    inputs, graph = body(w, cell, fault, True)
    times = [w.constant(np.int64(STEPS)), w.constant(np.bool_(True))]
    w.nodes.append(helper.make_node("Loop", [*times, *inputs], ["hn", "cn", "y"], "rnn", body=graph))
    return "y"


FORMS = {"unrolled": unrolled, "Scan": scan, "Loop": loop}
CELLS = [lstm, gru]


def examined(form, cell, folder, fault="", level="none", dtype=np.float32, opset=17):
    w = Writing(dtype, opset)
    onnx.save(saved(w.model(FORMS[form](w, cell, fault)), level, folder), folder / "model.onnx")
    return examine(str(folder / "model.onnx"), Options(), lambda *_: None)


def shown(report):
    findings = [f"{f.level} {f.code} {f.norm}: {f.message}" for f in report.findings]
    return report.problem, findings, [(n.name, n.near_miss, n.verdict, n.detail) for n in report.norms]


@pytest.mark.exhaustive(one_in=10)
@pytest.mark.parametrize("level", ["none", "basic", "all"])
@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.__name__)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("opset", [13, 17])
def test_each_norm_of_a_cell_is_found_and_judged(form, cell, level, opset, tmp_path):
    report = examined(form, cell, tmp_path, level=level, opset=opset)
    assert {f.code for f in report.findings if f.level != "note"} <= {"unused-input"}, shown(report)  # the carry of gru
    assert (report.exit_code(), [f.code for f in report.findings].count("recurrence")) == (0, 1), shown(report)
    assert [norm.verdict for norm in report.norms] == ["ok"] * (3 * STEPS if form == "unrolled" else 3), shown(report)
    assert len({norm.name for norm in report.norms}) == len(report.norms)


@pytest.mark.exhaustive(one_in=2)
@pytest.mark.parametrize("dtype", [np.float16, np.float64])
@pytest.mark.parametrize("form", FORMS)
def test_cells_in_other_types_are_judged(form, dtype, tmp_path):
    report = examined(form, lstm, tmp_path, dtype=dtype)
    assert report.exit_code() == 0, shown(report)
    assert len(report.norms) == (3 * STEPS if form == "unrolled" else 3)


FAULTS = {"axis": "near-miss", "raw": "near-miss", "unbiased": "near-miss", "eps": "eps-zero"}


@pytest.mark.exhaustive(one_in=13)
@pytest.mark.parametrize("level", ["none", "all"])
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.__name__)
@pytest.mark.parametrize("form", FORMS)
def test_a_fault_in_a_cell_is_found_and_the_cell_is_named(form, cell, fault, level, tmp_path):
    report = examined(form, cell, tmp_path, fault, level)
    assert report.exit_code(strict=True) == 1, shown(report)
    named = {finding.norm for finding in report.findings if finding.code == FAULTS[fault]}
    if form == "unrolled":
        assert named == {f"cell.ln_c[{step}]" for step in range(STEPS)}, shown(report)
    else:
        assert len(named) == 1, shown(report)
        assert all(name.startswith("rnn.body/") for name in named), shown(report)
    printed = [line for line in formats.lines(report) if f"[{FAULTS[fault]}]" in line]
    assert any(("rnn.body/" if form != "unrolled" else "cell.ln_c[0]") in line for line in printed)


def test_norms_of_two_bodies_have_two_names(tmp_path):
    w = Writing()
    x = w.input("x", (ROWS, UNITS))
    for name in ("first", "second"):
        inner = Writing()
        inner.constant = w.constant
        y = norm(inner, "x_t", inner.gain(UNITS))
        graph = helper.make_graph(inner.nodes, name, [value("x_t", (UNITS,))], [value(y, None)])
        w.nodes.append(helper.make_node("Scan", [x], [name], name, num_scan_inputs=1, body=graph))
    onnx.save(w.model("first", "second"), tmp_path / "model.onnx")
    report = examine(str(tmp_path / "model.onnx"), Options(), lambda *_: None)
    assert len({norm.name for norm in report.norms}) == 2, shown(report)
