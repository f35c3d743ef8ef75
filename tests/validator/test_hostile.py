"""Untrusted files: each gives its exit code and a message; no crash, no hang, nothing written outside."""

import contextlib
import os
import struct
import tracemalloc

import gallery
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from onnx_export import validate
from onnx_export.graph.scope import scopes
from onnx_export.model_io import Limits, Refused, Unreadable, load, parse
from onnx_export.nodes import sort_nodes
from onnx_export.validation.lint import lint_norm
from onnx_export.validation.patterns import find

UNREADABLE, REFUSED = 2, 3


@pytest.fixture
def folder(tmp_path):
    """A folder for the model, inside a folder whose contents must not change."""
    (tmp_path / "outside.bin").write_bytes(bytes(64))
    inside = tmp_path / "model"
    inside.mkdir()
    yield inside
    assert {p.name for p in tmp_path.iterdir()} == {"outside.bin", "model"}


def norm_model(**options):
    return gallery.model([gallery.native()], constants=gallery.weights(), **options)


def raw(build):
    """The bytes of a hostile file."""
    return build if isinstance(build, bytes) else build.SerializeToString()


def varint(value):
    out = b""
    while value > 127:
        out += bytes([value & 127 | 128])
        value >>= 7
    return out + bytes([value])


def with_tensor(**fields):
    model = norm_model()
    tensor = model.graph.initializer[0]
    for name, value in fields.items():
        if name == "dims":
            tensor.ClearField("dims")
            tensor.dims.extend(value)
        else:
            setattr(tensor, name, value)
    return model


def nested(depth):
    graph = helper.make_graph([gallery.node("Neg", "x", "t0")], "g", [], [gallery.value("t0")])
    for level in range(1, depth + 1):
        choose = gallery.node("If", "c", f"t{level}", then_branch=graph, else_branch=graph)
        graph = helper.make_graph([choose], "g", [], [gallery.value(f"t{level}")])
    inputs = [gallery.value("x"), gallery.value("c", [], TensorProto.BOOL)]
    graph.input.extend(inputs)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def narrow_nest(depth):
    """A chain of subgraphs, one branch per level, so that the file stays small."""
    graph = helper.make_graph([gallery.node("Neg", "x", "t0")], "g", [], [gallery.value("t0")])
    leaf = helper.make_graph([gallery.node("Neg", "x", "e")], "g", [], [gallery.value("e")])
    for level in range(1, depth + 1):
        choose = gallery.node("If", "c", f"t{level}", then_branch=graph, else_branch=leaf)
        graph = helper.make_graph([choose], "g", [], [gallery.value(f"t{level}")])
    graph.input.extend([gallery.value("x"), gallery.value("c", [], TensorProto.BOOL)])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def function_bomb(levels):
    """Each function calls the next twice: 2^levels nodes when inlined."""
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("f", 1)]
    functions = [helper.make_function("f", "F0", ["x"], ["y"], [gallery.node("Neg", "x", "y")], opsets)]
    for level in range(1, levels + 1):
        calls = [
            gallery.node(f"F{level - 1}", "x", "h", domain="f"),
            gallery.node(f"F{level - 1}", "h", "y", domain="f"),
        ]
        functions.append(helper.make_function("f", f"F{level}", ["x"], ["y"], calls, opsets))
    return gallery.model([gallery.node(f"F{levels}", "x", "y", domain="f")], functions=functions)


def recursive_function():
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("f", 1)]
    body = [gallery.node("F", "x", "y", domain="f")]
    function = helper.make_function("f", "F", ["x"], ["y"], body, opsets)
    return gallery.model([gallery.node("F", "x", "y", domain="f")], functions=[function])


def cyclic():
    nodes = [gallery.node("Add", "x b", "a"), gallery.node("Neg", "a", "b"), gallery.native("b")]
    return gallery.model(nodes, constants=gallery.weights())


def backwards(count):
    """A chain in reverse topological order."""
    nodes = [gallery.node("Neg", f"v{i}", f"v{i + 1}") for i in range(count)]
    nodes = [gallery.native(f"v{count}"), *reversed(nodes), gallery.node("Abs", "x", "v0")]
    return gallery.model(nodes, constants=gallery.weights())


def branches_backwards(count):
    """Many branches, each using a value defined later; the outer graph's names must not be copied for each."""
    nodes = []
    for i in range(count):
        branch = helper.make_graph([gallery.node("Neg", f"v{i}", "t")], "g", [], [gallery.value("t")])
        nodes.append(gallery.node("If", "c", f"v{i + 1}", then_branch=branch, else_branch=branch))
    inputs = [gallery.value("x"), gallery.value("c", [], TensorProto.BOOL)]
    nodes = [gallery.node("Identity", f"v{count}", "y"), *reversed(nodes), gallery.node("Abs", "x", "v0")]
    return gallery.model(nodes, inputs=inputs)


def cycle_through_a_branch():
    """A cycle: the branch uses the output of the node that contains it."""
    branch = helper.make_graph([gallery.node("Neg", "y", "t")], "g", [], [gallery.value("t")])
    nodes = [gallery.node("If", "c", "y", then_branch=branch, else_branch=branch)]
    return gallery.model(nodes, inputs=[gallery.value("c", [], TensorProto.BOOL)])


def two_opsets():
    model = norm_model()
    model.opset_import.add(domain="ai.onnx", version=13)
    return model


def missing_initialiser():
    model = norm_model()
    del model.graph.initializer[1]
    return model


def defined_twice():
    nodes = [gallery.node("Neg", "x", "h"), gallery.node("Abs", "x", "h"), gallery.native("h")]
    return gallery.model(nodes, constants=gallery.weights())


def sparse_bomb():
    model = norm_model()
    values = helper.make_tensor("bomb", TensorProto.FLOAT, [1], [1.0])
    indices = helper.make_tensor("at", TensorProto.INT64, [1], [0])
    model.graph.sparse_initializer.append(helper.make_sparse_tensor(values, indices, [2**40]))
    return model


def infinite_axes():
    return gallery.model(*gallery.parts(gallery.decomposed(axes=(2**62,))))


def attribute_of_another_type():
    model = norm_model()
    model.graph.node[0].attribute.append(helper.make_attribute("axis", b"-1"))
    return model


def node_without_outputs():
    nodes, constants = gallery.decomposed()
    del nodes[-1].output[:]
    return gallery.model(nodes, constants=constants, outputs=[gallery.value("scaled")])


def long_chain(op, count):
    """Thousands of nodes between a variance and its square root; each Mul doubles the number of paths."""
    double = op in ("Mul", "Add")
    chain = [gallery.node(op, f"v{i} v{i}" if double else f"v{i}", f"v{i + 1}") for i in range(count)]
    nodes, constants = gallery.decomposed(square="Mul")
    at = next(i for i, n in enumerate(nodes) if n.op_type == "Add")
    nodes[at : at + 1] = [
        gallery.node("Identity", "x" if double else "var", "v0"),
        *chain,
        gallery.node("Abs", f"v{count}", "total"),
    ]
    nodes.insert(-3, gallery.node("Sqrt", f"v{count}", "unused"))
    return gallery.model(nodes, constants=constants)


def axes_on_a_scalar():
    return gallery.model(*gallery.parts(gallery.decomposed(), ()))


FILES = {
    "empty": (b"", UNREADABLE),
    "text": (b"this is no model, whatever its name says\n" * 10, UNREADABLE),
    "truncated": (raw(norm_model())[:-40], UNREADABLE),
    "length_beyond_the_end": (b"\x3a" + varint(2**40) + b"x", UNREADABLE),
    "graph_without_opset": (b"\x08\x08\x3a\x00", UNREADABLE),
    "only_an_opset": (norm_model().SerializeToString()[-4:], UNREADABLE),
    "protobuf_groups_without_end": (b"\x0b" * 5000, UNREADABLE),
    "nested_20": (narrow_nest(20), REFUSED),
    "branching_nest": (nested(10), 0),
    "function_bomb": (function_bomb(7), 0),
    "recursive_function": (recursive_function(), REFUSED),
    "cycle": (cyclic(), UNREADABLE),
    "cycle_through_a_branch": (cycle_through_a_branch(), UNREADABLE),
    "two_opsets_of_one_domain": (two_opsets(), UNREADABLE),
    "missing_initialiser": (missing_initialiser(), UNREADABLE),
    "defined_twice": (defined_twice(), UNREADABLE),
    "unknown_operator": (gallery.model([gallery.node("Nonsense", "x", "y")]), UNREADABLE),
    "unknown_operator_and_a_norm": (
        gallery.model([gallery.node("Nonsense", "x", "h"), gallery.native("h")], constants=gallery.weights()),
        UNREADABLE,
    ),
    "opset_of_the_future": (norm_model(opset=10_000), UNREADABLE),
    "opset_minus_one": (norm_model(opset=-1), UNREADABLE),
    "ir_of_the_future": (norm_model(ir=2**31), UNREADABLE),
    "raw_data_too_short": (with_tensor(raw_data=b"123"), UNREADABLE),
    "raw_data_too_long": (with_tensor(raw_data=bytes(4096)), UNREADABLE),
    "dims_negative": (with_tensor(dims=[-1]), UNREADABLE),
    "dims_huge": (with_tensor(dims=[2**40]), REFUSED),
    "dims_wrap_64_bits": (with_tensor(dims=[4194305, 4194305, 211106198978564]), REFUSED),
    "dims_huge_and_empty": (with_tensor(dims=[0, 2**61, 4], raw_data=b""), REFUSED),
    "dims_without_end": (with_tensor(dims=[1] * 100_000), UNREADABLE),
    "unknown_type": (with_tensor(data_type=999), UNREADABLE),
    "sparse_bomb": (sparse_bomb(), REFUSED),
    "attribute_of_another_type": (attribute_of_another_type(), UNREADABLE),
    "node_without_outputs": (node_without_outputs(), UNREADABLE),
    "long_chain_of_relu": (long_chain("Relu", 5000), 0),
    "long_chain_of_identity": (long_chain("Identity", 5000), 0),
    "doubling_chain": (long_chain("Mul", 100), 0),
    "axes_on_a_scalar": (axes_on_a_scalar(), UNREADABLE),
    "axes_out_of_range": (infinite_axes(), UNREADABLE),
}


@pytest.mark.exhaustive(one_in=48)
@pytest.mark.parametrize("name", FILES)
def test_hostile_file(name, folder):
    content, code = FILES[name]
    path = folder / "m.onnx"
    path.write_bytes(raw(content))
    report = validate(path, timeout=300)
    assert report.exit_code() == code, report.problem
    assert bool(report.problem) == (code != 0)
    assert "unexpected" not in report.problem
    assert len(report.problem) < 600


@pytest.mark.exhaustive
@pytest.mark.parametrize("build", [backwards, branches_backwards], ids=lambda build: build.__name__)
def test_topological_sort_takes_linear_time(build, work):
    few, more = build(200), build(400)
    assert work(lambda: sort_nodes(more)) < 2.2 * work(lambda: sort_nodes(few))
    model = build(30_000)
    assert sort_nodes(model)
    assert not sort_nodes(model)
    made = {"x", "c", "scale", "bias"}
    for node in model.graph.node:
        assert made.issuperset(node.input)
        made.update(node.output)


def test_types_are_not_copied_per_branch():
    branch = helper.make_graph([gallery.node("Neg", "v7", "t")], "g", [], [gallery.value("t")])
    nodes = [gallery.node("If", "c", f"b{i}", then_branch=branch, else_branch=branch) for i in range(200)]
    model = gallery.model(nodes, inputs=[gallery.value("c", [], TensorProto.BOOL)])
    model.graph.value_info.extend(gallery.value(f"v{i}", [i]) for i in range(20_000))
    tracemalloc.start()
    try:
        found = list(scopes(model))
        assert tracemalloc.get_traced_memory()[1] < 3e7  # about 2e8 if the names were copied
    finally:
        tracemalloc.stop()
    assert {(scope.shape("v7"), scope.dtype("v7")) for scope in found} == {((7,), TensorProto.FLOAT)}


def test_cycle_is_reported_by_name():
    with pytest.raises(Unreadable, match=r"in a circle \('Add'\)"):
        sort_nodes(cyclic())


def test_rejects_nesting_deeper_than_protobuf_allows(folder):
    data = raw(norm_model().graph)
    for _ in range(300):  # graph -> node (1) -> attribute (5) -> graph (6)
        attribute = b"\x32" + varint(len(data)) + data
        node = b"\x2a" + varint(len(attribute)) + attribute
        data = b"\x0a" + varint(len(node)) + node
    (folder / "m.onnx").write_bytes(b"\x08\x08\x42\x02\x10\x11\x3a" + varint(len(data)) + data)
    report = validate(folder / "m.onnx")
    assert report.exit_code() in (UNREADABLE, REFUSED)
    assert "unexpected" not in report.problem


def test_every_truncation_gives_a_report(folder):
    """Run in this process: the loader must raise only its own exceptions."""
    data = raw(norm_model())
    for end in range(0, len(data), 3):
        (folder / "m.onnx").write_bytes(data[:end])
        with pytest.raises((Unreadable, Refused)):
            load(folder / "m.onnx")


def test_every_flipped_byte_gives_a_report(folder):
    data = bytearray(raw(norm_model()))
    for index in range(len(data)):
        data[index] ^= 0xFF
        (folder / "m.onnx").write_bytes(data)
        with contextlib.suppress(Unreadable, Refused):
            load(folder / "m.onnx")
        data[index] ^= 0xFF


@pytest.mark.exhaustive(one_in=67)
@pytest.mark.parametrize("kind", sorted({schema.name for schema in onnx.defs.get_all_schemas() if not schema.domain}))
def test_node_with_missing_inputs_is_ignored(kind):
    """Every operator at every place of a norm, with no inputs, one, an unnamed one, too many."""
    model = gallery.decomposed_without_affine().model
    for node in model.graph.node:
        operator, inputs = node.op_type, list(node.input)
        node.op_type = kind
        for changed in ([], inputs[:1], ["", *inputs[1:]], [*inputs, "x", "x"]):
            node.input[:] = changed
            for norm in find(model):
                list(lint_norm(norm))
        node.op_type, node.input[:] = operator, inputs


def test_limits_on_the_file(folder):
    path = folder / "m.onnx"
    onnx.save(norm_model(), path)
    for limits in (Limits(file_bytes=10), Limits(tensor_bytes=10), Limits(nodes=0)):
        assert validate(path, limits=limits).exit_code() == REFUSED
    onnx.save(function_bomb(7), path)  # 128 nodes when inlined, counted without inlining
    assert validate(path, limits=Limits(nodes=100)).exit_code() == REFUSED


@pytest.mark.exhaustive(one_in=8)
@pytest.mark.parametrize("kind", ["folder", "fifo", "device", "missing", "nul", "unreadable", "loop"])
def test_rejects_models_that_are_not_regular_files(kind, folder):
    path = folder / "m.onnx"
    if kind == "folder":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "device":
        path = "/dev/zero"
    elif kind == "nul":
        path = "a\0b"
    elif kind == "loop":
        path.symlink_to(path)
    elif kind == "unreadable":
        path.write_bytes(b"")
        path.chmod(0)
    report = validate(path, timeout=120)
    assert report.exit_code() == UNREADABLE
    assert "unexpected" not in report.problem


# -- names


TEXT = {
    "opset": lambda model: model.opset_import.add(domain="MARK", version=1),
    "function": lambda model: model.functions.add(name="f", domain="MARK"),
    "node": lambda model: setattr(model.graph.node[0], "name", "MARK"),
    "operator": lambda model: setattr(model.graph.node[0], "op_type", "MARK"),
    "input": lambda model: model.graph.node[0].input.append("MARK"),
    "attribute": lambda model: model.graph.node[0].attribute.add(name="MARK"),
    "subgraph": lambda model: model.graph.node[0].attribute.add(name="g").g.node.add(name="MARK"),
    "value": lambda model: model.graph.value_info.add(name="MARK"),
    "dimension": lambda model: model.graph.input[0].type.tensor_type.shape.dim.add(dim_param="MARK"),
    "tensor": lambda model: setattr(model.graph.initializer[0], "name", "MARK"),
    "location": lambda model: model.graph.initializer[0].external_data.add(key="location", value="MARK"),
    "metadata": lambda model: model.graph.node[0].metadata_props.add(key="cnorm.function", value="MARK"),
}


@pytest.mark.parametrize("place", TEXT)
def test_rejects_names_that_are_not_utf_8(place):
    model = norm_model()
    TEXT[place](model)
    with pytest.raises(Unreadable, match="a name that is not UTF-8"):
        parse(raw(model).replace(b"MARK", b"MA\xff\xfe"), Limits())


def test_doc_strings_need_not_be_utf_8(folder):
    model = norm_model()
    model.doc_string = "MARK"
    (folder / "m.onnx").write_bytes(raw(model).replace(b"MARK", b"MA\xff\xfe"))
    report = validate(folder / "m.onnx")
    assert report.exit_code() == 0, report.problem


def test_control_characters_in_names_reach_no_report(folder):
    evil = "\x1b]0;owned\x07\x1b[2J<img src=x>\u202e"
    model = gallery.model(
        [gallery.native(y="y", epsilon=0.0)], constants=gallery.weights(), outputs=[gallery.value("y")]
    )
    model.graph.node[0].name = evil
    onnx.save(model, folder / "m.onnx")
    from click.testing import CliRunner

    from onnx_export.validation.command import validate as command

    html = folder / "r.html"
    result = CliRunner().invoke(command, [str(folder / "m.onnx"), "--html", str(html)])
    assert result.exit_code == 1
    for text in (result.output, html.read_text()):
        assert not set("\x1b\x07\u202e") & set(text)
    assert "<img" not in html.read_text()


def test_accepts_paths_that_are_not_utf_8(folder):
    path = os.fsencode(folder) + b"/\xff\x1b.onnx"
    with open(path, "wb") as file:
        file.write(norm_model().SerializeToString())
    report = validate(os.fsdecode(path))
    assert report.exit_code() == 0, report.problem
    from click.testing import CliRunner

    from onnx_export.validation.command import validate as command

    for flags in ([], ["--json"]):
        result = CliRunner().invoke(command, [os.fsdecode(path), *flags])
        assert result.exit_code == 0, result.output
        assert "\x1b" not in result.output


def test_a_name_of_a_megabyte_does_not_fill_the_report(folder):
    model = norm_model()
    model.graph.node[0].name = "n" * 2**20
    onnx.save(model, folder / "m.onnx")
    report = validate(folder / "m.onnx")
    assert len(report.norms[0].name) < 300
    assert max(map(len, report.to_json().splitlines())) < 1000


# -- external data


def external(folder, location="weights.bin", data=None, **entries):
    model = norm_model()
    tensor = model.graph.initializer[0]
    content = tensor.raw_data
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in {"location": location, **entries}.items():
        tensor.external_data.add(key=key, value=str(value))
    onnx_path = folder / "m.onnx"
    onnx_path.write_bytes(model.SerializeToString())
    if data is not False:
        (folder / "weights.bin").write_bytes(content if data is None else data)
    return onnx_path


def test_external_data_is_refused_unless_allowed(folder):
    path = external(folder)
    report = validate(path)
    assert report.exit_code() == REFUSED
    assert "--external-data" in report.problem
    assert [n.verdict for n in report.norms] == ["not exercised"]  # linted nevertheless
    allowed = validate(path, external_data=True)
    assert allowed.exit_code() == 0, allowed.problem
    np.testing.assert_array_equal(
        numpy_helper.to_array(load(path, external_data=True).graph.initializer[0]), gallery.weights()["scale"]
    )


@pytest.mark.exhaustive(one_in=6)
@pytest.mark.parametrize(
    ("entries", "code"),
    [
        ({"location": "../outside.bin"}, REFUSED),
        ({"location": "x/../../outside.bin"}, REFUSED),
        ({"location": "/etc/passwd"}, REFUSED),
        ({"location": ""}, REFUSED),
        ({"location": "."}, REFUSED),
        ({"location": "a\0b"}, REFUSED),
        ({"location": "..\\outside.bin"}, REFUSED),
        ({"location": "none.bin"}, UNREADABLE),
        ({"length": 63}, REFUSED),
        ({"length": 65}, REFUSED),
        ({"length": -64}, REFUSED),
        ({"offset": 1}, REFUSED),
        ({"offset": 2**63, "length": 64}, REFUSED),
        ({"offset": -1, "length": 64}, REFUSED),
        ({"offset": "1e3"}, REFUSED),
        ({"offset": "9" * 10_000}, REFUSED),
        ({"offset": "\u0661"}, REFUSED),
        ({"__class__": "x"}, REFUSED),
    ],
    ids=str,
)
def test_external_data_out_of_bounds(entries, code, folder):
    report = validate(external(folder, **entries), external_data=True)
    assert report.exit_code() == code, report.problem
    assert "external data of 'scale'" in report.problem


def test_external_file_too_short_and_too_long(folder):
    assert validate(external(folder, data=bytes(63)), external_data=True).exit_code() == REFUSED
    assert validate(external(folder, data=bytes(65)), external_data=True).exit_code() == REFUSED
    assert validate(external(folder, data=bytes(80), offset=16, length=64), external_data=True).exit_code() == 0


@pytest.mark.exhaustive(one_in=5)
@pytest.mark.parametrize("kind", ["symlink", "folder_symlink", "hardlink", "fifo", "folder"])
def test_rejects_external_files_that_are_links_or_not_regular(kind, folder):
    outside, target = folder.parent / "outside.bin", folder / "weights.bin"
    location = "weights.bin"
    if kind == "symlink":
        target.symlink_to(outside)
    elif kind == "folder_symlink":
        (folder / "sub").symlink_to(folder.parent)
        location = "sub/outside.bin"
    elif kind == "hardlink":
        os.link(outside, target)
    elif kind == "fifo":
        os.mkfifo(target)
    else:
        target.mkdir()
    report = validate(external(folder, location, data=False), external_data=True, timeout=120)
    assert report.exit_code() == REFUSED, report.problem
    if kind == "hardlink":
        target.unlink()


def test_symlinked_download_caches_need_data_root(folder):
    """Model and weights are symbolic links into a folder of blobs, the layout of download caches."""
    blobs = folder / "blobs"
    blobs.mkdir()
    external(blobs)
    snapshot = folder / "snapshot"
    snapshot.mkdir()
    (snapshot / "m.onnx").symlink_to("../blobs/m.onnx")
    (snapshot / "weights.bin").symlink_to("../blobs/weights.bin")
    (blobs / "weights.bin").rename(blobs / "0123abcd")
    (snapshot / "weights.bin").unlink()
    (snapshot / "weights.bin").symlink_to("../blobs/0123abcd")
    assert validate(snapshot / "m.onnx", external_data=True).exit_code() != 0
    report = validate(snapshot / "m.onnx", external_data=True, data_root=folder)
    assert report.exit_code() == 0, report.problem


# -- inputs


@pytest.mark.exhaustive
def test_inputs_are_read_without_pickle_and_within_limits(folder):
    path = folder / "m.onnx"
    onnx.save(norm_model(), path)
    np.save(folder / "evil.npy", np.array([{}], dtype=object), allow_pickle=True)
    assert "pickle" in validate(path, input=folder / "evil.npy").problem
    (folder / "zip.npz").write_bytes(b"PK\x05\x06" + struct.pack("<HHHHIIH", 0, 0, 0, 0, 0, 0, 0))
    (folder / "huge.npy").write_bytes(
        b"\x93NUMPY\x01\x00"
        + struct.pack("<H", 118)
        + b"{'descr': '<f4', 'fortran_order': False, 'shape': (1099511627776,), }".ljust(68)
        + b"\n"
    )
    np.savez(folder / "other.npz", z=np.zeros(3))
    for name in ("huge.npy", "other.npz", "none.npz", "m.onnx"):
        report = validate(path, input=folder / name)
        assert report.exit_code() == UNREADABLE, name
        assert "inputs" in report.problem, name
    (folder / "long.npy").touch()
    os.truncate(folder / "long.npy", 2**31 + 1)
    os.mkfifo(folder / "pipe.npy")
    for name, reason in {
        "/dev/zero": "not a regular file",
        folder / "pipe.npy": "not a regular file",
        folder / "long.npy": "the limit is",
        folder / "none.npy": "No such file",
    }.items():
        report = validate(path, input=name, timeout=20)
        assert report.exit_code() == UNREADABLE
        assert reason in report.problem
    np.save(folder / "good.npy", np.ones((3, gallery.N)))
    assert validate(path, input=folder / "good.npy").exit_code() == 0
    assert validate(path, input=folder / "zip.npz").exit_code() == 0  # an empty archive: every input is generated


@pytest.mark.exhaustive(one_in=8)
@pytest.mark.parametrize("dtype", ["complex64", "complex128", "U4", "S4", "M8[s]", "V2"])
def test_rejects_inputs_of_non_numeric_dtype(dtype, folder):
    onnx.save(norm_model(), folder / "m.onnx")
    np.savez(folder / "in.npz", x=np.zeros((3, gallery.N), dtype))
    report = validate(folder / "m.onnx", input=folder / "in.npz")
    assert report.exit_code() == UNREADABLE
    wanted = f"inputs: 'x' must hold real numbers or truth values, got dtype {np.dtype(dtype)}"
    assert report.problem == wanted


@pytest.mark.parametrize("shape", [(3, gallery.N + 1), (gallery.N,)])
def test_rejects_inputs_of_another_shape(shape, folder):
    onnx.save(norm_model(), folder / "m.onnx")
    np.savez(folder / "in.npz", x=np.zeros(shape, np.float32))
    report = validate(folder / "m.onnx", input=folder / "in.npz")
    assert report.exit_code() == UNREADABLE
    assert report.problem.startswith("inputs: 'x' must have shape [")
    assert report.problem.endswith(f", {gallery.N}], got {list(shape)}")


def test_a_recursive_function_is_named():
    with pytest.raises(Refused, match="function 'F' calls itself"):
        parse(raw(recursive_function()), Limits())


def test_a_long_chain_of_neutral_nodes_is_walked_in_linear_time():
    """Each x + 0 is passed with a bounded number of steps."""
    nodes = [gallery.node("Add", f"x{i} zero" if i else "x zero", f"x{i + 1}") for i in range(2000)]
    body, constants = gallery.decomposed(x="x2000")
    model = gallery.model([*nodes, *body], constants=constants | {"zero": np.float32(0)})
    assert [norm.formula.name for norm in find(model)] == ["layer"]
