"""A file of a few megabytes that would take gigabytes or minutes to parse is refused before it is parsed."""

import json
import subprocess
import sys

import gallery
import onnx
import pytest
from onnx import helper, numpy_helper

import cnorm
import onnx_export
from onnx_export import model_io, wire

COUNT = 120_000  # more than the loader's limit; the validator's is a million


def varint(number):
    out = b""
    while number > 127:
        out += bytes([number & 127 | 128])
        number >>= 7
    return out + bytes([number])


def field(number, content):
    """A length-delimited field."""
    return varint(number << 3 | 2) + varint(len(content)) + content


def flooded(kind, count=COUNT):
    """A serialised model with `count` empty messages of one kind."""
    head = varint(1 << 3) + varint(8) + field(8, varint(2 << 3) + varint(17))  # IR version and opset
    entry = field(14, field(1, b"cnorm.model") + field(2, b"{}"))
    number = {"nodes": 1, "initialisers": 5, "value_info": 13, "metadata": 14, "functions": 25}.get(kind)
    if kind in ("metadata", "functions"):
        return head + field(7, b"") + entry + field(number, b"") * count
    inner = {"attributes": field(1, field(5, b"") * count), "inputs": field(1, field(1, b"") * count)}
    return head + entry + field(7, inner[kind] if kind in inner else field(number, b"") * count)


KINDS = ["nodes", "attributes", "inputs", "initialisers", "value_info", "metadata", "functions"]


@pytest.mark.parametrize("kind", KINDS)
def test_rejects_too_many_empty_messages_before_parsing(kind, monkeypatch):
    monkeypatch.setattr(onnx, "ModelProto", Unbuilt)
    with pytest.raises(model_io.Refused, match="holds more than"):
        model_io.parse(flooded(kind), model_io.Limits(messages=100_000))


class Unbuilt:
    """Stands in for the message class: has its descriptor, but cannot be instantiated."""

    DESCRIPTOR = onnx.ModelProto.DESCRIPTOR

    def __init__(self):
        raise AssertionError("the message was built")


# VmHWM is the process's own peak memory; ru_maxrss starts with the peak of the process it was forked from
LOAD = """
import re, sys
import onnx_export.loader, onnxruntime
try:
    onnx_export.load(sys.argv[1])
except ValueError as error:
    print(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1], str(error))
"""


@pytest.mark.parametrize("kind", ["attributes", "metadata", "functions"])
def test_loader_rejects_empty_messages_in_bounded_memory(kind, tmp_path):
    """The limit includes 120 MB for the imports of onnx and onnxruntime."""
    path = tmp_path / "flood.onnx"
    path.write_bytes(flooded(kind))
    ran = subprocess.run([sys.executable, "-P", "-c", LOAD, path], capture_output=True, text=True, check=True)
    peak, *words = ran.stdout.split()
    assert "holds more than" in " ".join(words)
    assert int(peak) < 200 * 2**10


def test_unpacked_numbers_count_one_eighth():
    """Unpacked lists of numbers: each element takes one byte of tag and one of value."""
    data = flooded("nodes", 1) + field(7, field(1, field(5, (varint(8 << 3) + b"\0") * 80_000)))
    assert wire.exceeds(data, 10_000)
    assert not wire.exceeds(data, 11_000)


def test_message_counts_of_the_gallery_match_protobuf():
    for build in gallery.SPECIMENS:
        model = build().model
        data = model.SerializeToString()
        count = messages(model)
        assert not wire.exceeds(data, count + len(data))
        assert wire.exceeds(data, count - 1), build.__name__


def messages(message):
    """The number of messages and repeated strings inside a message."""
    total = 0
    for field_, value in message.ListFields():
        values = list(value) if field_.is_repeated else [value]
        if field_.type == field_.TYPE_MESSAGE:
            total += sum(1 + messages(each) for each in values)
        elif field_.is_repeated and field_.type in (field_.TYPE_STRING, field_.TYPE_BYTES):
            total += len(values)
    return total


@pytest.mark.parametrize(
    "data",
    [b"\x3a\x05\x0a", b"\x3a", b"\x0b", b"\x80" * 11, b"\x3a\x02\x0a\x05" + bytes(9), b"\x0d\0"],
    ids=["beyond the end", "no length", "a group", "an endless number", "beyond its message", "half a number"],
)
def test_rejects_bytes_that_are_not_protobuf(data):
    with pytest.raises(model_io.Unreadable, match="not an ONNX file"):
        model_io.parse(data, model_io.Limits())


def test_a_file_without_the_metadata_is_not_parsed(tmp_path, monkeypatch):
    path = tmp_path / "other.onnx"
    onnx.save(gallery.native_layer_norm().model, path)
    monkeypatch.setattr(onnx, "ModelProto", Unbuilt)
    with pytest.raises(ValueError, match=r"other\.onnx: the metadata has no 'cnorm\.model'"):
        model_io.load(path, metadata_key="cnorm.model")


# ------------------------------------------------------------------------------------- duplicate names


def test_rejects_duplicate_initialisers():
    model = gallery.native_layer_norm().model
    model.graph.initializer.append(model.graph.initializer[0])
    with pytest.raises(model_io.Unreadable, match="the initialiser 'scale' is defined twice"):
        model_io.sort_nodes(model)


def test_rejects_duplicate_metadata_keys():
    model = gallery.native_layer_norm().model
    for text in ("one", "other"):
        model.metadata_props.add(key="about", value=text)
    with pytest.raises(model_io.Unreadable, match="the metadata has the key 'about' 2 times"):
        model_io.parse(model.SerializeToString(), model_io.Limits())


def exported(tmp_path, edit):
    """The exported demo model with edited metadata."""
    path = tmp_path / "demo.onnx"
    onnx_export.export(cnorm.demo_model(), path)
    model = onnx.load(path)
    entry = next(e for e in model.metadata_props if e.key == "cnorm.model")
    entry.value = edit(model, entry.value)
    onnx.save(model, path)
    return path


def test_rejects_a_state_whose_tensor_is_a_weight(tmp_path):
    def edit(model, text):
        described = json.loads(text)
        name = model.graph.initializer[0].name
        described["states"][0].update(tensor=name, initial=numpy_helper.to_array(model.graph.initializer[0]).tolist())
        return json.dumps(described)

    with pytest.raises(ValueError, match=r"the state table gives values to .* which is a weight"):
        onnx_export.load(exported(tmp_path, edit))


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", '{"format": 1}', '{"format": 1, "layers": 3}', "\0", '"' * 10**6, "[" * 10**5]
)
def test_rejects_malformed_metadata_of_the_exporter(tmp_path, text):
    with pytest.raises(ValueError, match=r"demo\.onnx") as error:
        onnx_export.load(exported(tmp_path, lambda *_: text))
    assert len(str(error.value)) < 1000 + len(str(tmp_path))


# -------------------------------------------------------------------------------------------- names in messages


@pytest.mark.parametrize("name", ["\x1b[31m\r\n" + "a" * 10**6, "\u202e" * 10**6, "\x9b" * 1000])
def test_names_in_messages_are_bounded_and_printable(name):
    made = gallery.native_layer_norm().model
    missing = gallery.native_layer_norm().model
    missing.graph.node[0].input[0] = name
    made.graph.initializer[0].name = made.graph.initializer[1].name = name
    long_op = gallery.model([gallery.node("Neg", "z", "y")])
    long_op.graph.node[0].op_type = name
    wrong = gallery.native_layer_norm().model
    wrong.graph.initializer[0].name = name
    wrong.graph.initializer[0].dims[0] = 3
    for model in (made, missing, long_op, wrong):
        with pytest.raises((model_io.Refused, model_io.Unreadable)) as error:
            model_io.sort_nodes(model_io.parse(model.SerializeToString(), model_io.Limits()))
        assert len(str(error.value)) <= 500
        assert str(error.value).isprintable()


def test_reading_takes_time_linear_in_the_attributes_of_a_node(work):
    """Twice the attributes in one node take at most twice the calls."""

    def calls(count):
        attributes = [helper.make_attribute(f"a{i}", i) for i in range(count)]
        model = gallery.native_layer_norm().model
        model.graph.node[0].attribute.extend(attributes)
        data = model.SerializeToString()
        return work(lambda: model_io.sort_nodes(model_io.parse(data, model_io.Limits())))

    calls(1)
    assert calls(4000) < 2.2 * calls(2000)
