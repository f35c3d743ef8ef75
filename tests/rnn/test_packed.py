"""Packed models: the same bits and identity as the model they were packed from; hostile files are refused."""

import json
import pickle
import struct
import subprocess
import sys
import zlib

import numpy as np
import pytest
from cells import random_cell
from models import deep_model, streamed_layers

import cnorm
from cnorm.storage import packed
from cnorm.storage.model_files import configuration

KEYS = sorted(cnorm.PRESETS)
# magic, head_crc, version, order, data_crc, bytes, data, layers, networks, configuration, records, zero, identity
HEAD = struct.Struct("<8sIIIIQQIIII8s32s")
CRC_FROM = 12
# of the first layer of the demo's file: its options, its fields, and the field gain_h
OPTIONS = HEAD.size + 8 + 24
FIELDS = OPTIONS + 64
GAIN_H = FIELDS + 3 * 40


def repacked(model, path):
    model.save_packed(path)
    return cnorm.load(path)


def check_same(model, other, rng):
    """The two models compute the same bits, and their saved streams are interchangeable."""
    x = rng.standard_normal((21, model.input_size)).astype(np.float32)
    assert other.identity == model.identity
    assert (other.input_size, other.output_size, other.weights) == (model.input_size, model.output_size, model.weights)
    assert other.nbytes == model.nbytes
    assert other.run(x).tobytes() == model.run(x).tobytes()
    if len(model._parts) > 1 or len(model._parts[0]) > 1:
        return
    ours, theirs = model.stream(), other.stream()
    assert theirs.save() == ours.save()  # also of an initial state that was learned
    assert theirs.step(x[0]).tobytes() == ours.step(x[0]).tobytes()
    moved = model.restore(theirs.save())
    both = [other.restore(ours.save()), theirs]
    assert other.step_many(both, x[1:3]).tobytes() == model.step_many([ours, moved], x[1:3]).tobytes()
    assert {name: v.tobytes() for name, v in both[0].state().items()} == {
        name: v.tobytes() for name, v in ours.state().items()
    }


@pytest.mark.parametrize("key", KEYS, ids="-".join)
@pytest.mark.parametrize("optional", [True, False], ids=["all", "required"])
def test_every_preset_has_the_same_bits(key, optional, tmp_path, rng):
    layer, _ = random_cell(key, rng, 5, 19, optional=optional)
    check_same(cnorm.Model([layer]), repacked(cnorm.Model([layer]), tmp_path / "a.cnorm"), rng)


@pytest.mark.parametrize("weights", ["int8", "float16"])
@pytest.mark.parametrize(
    "key", [("LSTM", "ba2016"), ("LSTM", "lingvo"), ("GRU", "keras_reset_before"), ("RNN", "torch")]
)
def test_rounded_weights_have_the_same_bits(key, weights, tmp_path, rng):
    layer, _ = random_cell(key, rng, 5, 19, outputs=7 if key[1] == "lingvo" else None)
    model = cnorm.Model([layer, cnorm.Linear(rng.standard_normal((3, layer.output_size)).astype(np.float32))])
    model = model.with_weights(weights, smallest=1)
    other = repacked(model, tmp_path / "a.cnorm")
    check_same(model, other, rng)
    assert other.with_weights(weights) is other
    with pytest.raises(ValueError, match="weights must be float32 to be rounded"):
        other.with_weights("float32")


def models(rng):
    forward, _ = random_cell(("GRU", "torch"), rng, 5, 3)
    backward, _ = random_cell(("LSTM", "torchaudio"), rng, 5, 2)
    again, _ = random_cell(("RNN", "torch"), rng, 5, 4)
    start = {"h0": np.array([0.5, -0.0, 0.25], np.float32)}
    learned = cnorm.GRU(dict(forward.weights) | start, preset="torch")
    yield deep_model(rng)
    for weights in ("float32", "int8", "float16"):
        yield cnorm.Model(streamed_layers(rng), ("scaled", "last")).with_weights(weights, smallest=1)
    yield cnorm.Model([learned, cnorm.Residual([cnorm.LayerNorm(np.ones(3, np.float32)), cnorm.Activation("sigmoid")])])
    yield cnorm.Model([cnorm.Bidirectional(learned, backward), cnorm.Activation("sigmoid")])
    yield cnorm.Model([cnorm.Linear(np.ones((5, 5), np.float32)), cnorm.Bidirectional(again, forward)])
    yield cnorm.Model([cnorm.Bidirectional(forward, backward), cnorm.Bidirectional(again, again)])
    learned = cnorm.Activation("prelu", slope=np.arange(4, dtype=np.float32))
    yield cnorm.Model([again, learned, cnorm.Activation("clip", hi=2)])


def test_every_kind_of_layer_has_the_same_bits(tmp_path, rng):
    for model in models(rng):
        check_same(model, repacked(model, tmp_path / "a.cnorm"), rng)


def test_a_packed_model_is_a_model(tmp_path, rng):
    model = repacked(cnorm.demo_model(), tmp_path / "a.cnorm")
    assert repr(model) == "Model(packed, 12 -> 9: LSTM ba2016, Linear)"
    assert "packed" in model._repr_html_()
    check_same(cnorm.demo_model(), pickle.loads(pickle.dumps(model)), rng)
    check_same(model, repacked(model, tmp_path / "b.cnorm"), rng)
    assert (tmp_path / "a.cnorm").read_bytes() == (tmp_path / "b.cnorm").read_bytes()
    for needs_layers in (lambda: model.layers, lambda: model.save(tmp_path / "c"), lambda: model.with_weights("int8")):
        with pytest.raises(ValueError, match="from a packed file, which has no layers"):
            needs_layers()
    assert not (tmp_path / "c").exists()


def test_a_packed_model_is_checked(tmp_path, rng):
    """Within the same bound but for a longest sum that is padded, and wrong outputs are seen."""
    for model in [cnorm.demo_model(), *models(rng)]:
        packed, x = repacked(model, tmp_path / "a.cnorm"), rng.standard_normal((9, model.input_size), np.float32)
        if model.tokens:
            x[:, list(model.tokens)] = 1
        y = model.run(x)
        ours, theirs = packed.check(x, y), model.check(x, y)
        assert ours.ok == theirs.ok
        assert (ours.bounds <= 4 * theirs.bounds).all()
        assert not packed.check(x, y + np.float32(0.1) * np.abs(y).max()).ok


def test_rounded_weights_are_named_where_outputs_differ(tmp_path, rng):
    model, x = cnorm.demo_model(), rng.standard_normal((9, 12), np.float32)
    rounded = model.with_weights("int8", smallest=0)
    for one in (rounded, repacked(rounded, tmp_path / "a.cnorm")):
        assert "weights are rounded to int8" in str(one.check(x, model.run(x)))
        assert "rounded" not in str(one.check(x, rounded.run(x)))
    assert "rounded" not in str(model.check(x, model.run(x) + 1))


def test_replacing_a_mapped_file_does_not_disturb_its_model(tmp_path, rng):
    path = tmp_path / "a.cnorm"
    first = repacked(cnorm.demo_model(), path)
    next(models(rng)).save_packed(path)
    check_same(cnorm.demo_model(), first, rng)


# ---- hostile files ---------------------------------------------------------------------------------------------------


def test_a_file_that_was_written_over_is_not_saved_again(tmp_path, rng):
    """Its head, its data, or all of it: another model of the same size."""
    path, copy = tmp_path / "model.cnorm", tmp_path / "copy.cnorm"
    first, second = (cnorm.Model([random_cell(("GRU", "torch"), rng, 5, 8)[0]]) for _ in range(2))
    for start, written in ((0, bytes(64)), (-40, b"other weights"), (0, second.packed_bytes())):
        first.save_packed(path)
        model = cnorm.load(path)
        with open(path, "r+b") as file:
            file.seek(start, 2 if start < 0 else 0)
            file.write(written)
        with pytest.raises(
            ValueError, match=r"^the packed file was changed after it was loaded, and its model with it: "
        ):
            model.save_packed(copy)
        assert not copy.exists()


def refused(path, data, message):
    path.write_bytes(data)
    with pytest.raises(ValueError, match=message) as error:
        cnorm.load(path)
    assert str(path) in str(error.value)


def with_crc(data):
    """The file with the checksum of its head made right, as a hostile author would."""
    end = HEAD.unpack_from(data)[6]
    return data[:8] + struct.pack("<I", zlib.crc32(data[CRC_FROM:end])) + data[CRC_FROM:]


@pytest.fixture
def file(tmp_path):
    cnorm.demo_model().save_packed(tmp_path / "good.cnorm")
    return bytearray((tmp_path / "good.cnorm").read_bytes())


def test_the_head_is_as_documented(file):
    _, head_crc, version, order, data_crc, size, data, layers, networks, configuration, records, zero, identity = (
        HEAD.unpack_from(file)
    )
    assert (version, order, size, layers, networks) == (2, 0x01020304, len(file), 2, 1)
    assert data % 64 == 0
    assert zlib.crc32(file[CRC_FROM:data]) == head_crc
    assert zlib.crc32(file[data:]) == data_crc
    assert identity == cnorm.demo_model().identity
    start = HEAD.size + networks * 8 + records
    assert json.loads(file[start : start + configuration])["layers"][1] == {"type": "Linear"}
    assert not any(zero)


def test_every_truncation_and_extension_is_refused(file, tmp_path):
    for size in [*range(8, 1200, 7), *range(1200, len(file), 4099), len(file) - 1]:
        refused(tmp_path / "a", file[:size], "not a packed model that can be used")
    refused(tmp_path / "a", file + b"\0", "damaged")
    for size in range(8):  # no longer the magic: neither of the two formats
        refused(tmp_path / "a", file[:size], "safetensors")


def test_every_changed_byte_before_the_data_is_refused(file, tmp_path):
    data = HEAD.unpack_from(file)[6]
    for place in range(8, data, 3):
        changed = bytearray(file)
        changed[place] ^= 1 << place % 8
        refused(tmp_path / "a", changed, "not a packed model that can be used")


def test_verify_finds_a_changed_byte_of_the_data(file, tmp_path):
    path = tmp_path / "a.cnorm"
    path.write_bytes(file)
    cnorm.load(path, verify=True)
    path.write_bytes(file[:-1] + bytes([file[-1] ^ 1]))
    cnorm.load(path)
    with pytest.raises(ValueError, match=r"a\.cnorm: damaged"):
        cnorm.load(path, verify=True)


@pytest.mark.parametrize(
    ("offset", "value", "message"),
    [
        (12, 3, "version"),
        (16, 0x04030201, "byte order"),
        (28, 1, "damaged"),
        (40, 0, "damaged"),
        (40, 3, "layer|damaged"),
        (40, 0xFFFFFFFF, "damaged"),
        (44, 2, "layer|damaged"),
        (48, 0xFFFFFFFF, "damaged"),
        (96, 3, "layer"),  # layers of the first network
        (100, 1, "layer"),  # its direction: half of a bidirectional layer
        (104, 9, "layer"),  # the first layer's kind
        (108, 0, "layer"),  # bytes of its record
        (108, 1 << 20, "layer"),
        (112, 11, "layer"),  # options
        (112, 0xFFFFFFFF, "layer"),
        (116, 30, "layer"),  # fields
        (120, 1, "layer"),  # room for more
        (OPTIONS, 7, r"\(layer 0, kind\)"),  # its kind of cell
        (OPTIONS + 24, 0x7FC00000, r"\(layer 0, eps\)"),  # NaN
        (FIELDS + 4, 3, "layer 0, weight_x"),  # type
        (FIELDS + 8, 3, "layer 0, weight_x"),  # gates
        (FIELDS + 12, 1 << 28, "layer 0, weight_x"),  # units
        (FIELDS + 12, 0xFFFFFFFF, "layer 0, weight_x"),
        (FIELDS + 16, 1 << 28, "layer 0, weight_x"),  # cols
        (FIELDS + 20, 5, "layer 0, weight_x"),  # group
        (FIELDS + 28, 1, "layer 0, weight_x"),  # room for more
        (FIELDS + 32, 64, "layer 0, weight_x"),  # panels in the head
        (FIELDS + 32, 1, "layer 0, weight_x"),  # not aligned
        (FIELDS + 36, 1, "layer 0, weight_x"),  # beyond the end
        (FIELDS + 36, 0xFFFFFFFF, "layer 0, weight_x"),
        (FIELDS + 40, 0, "layer"),  # a field twice
        (GAIN_H, 12, "layer"),  # another vector: no gain_h
        (GAIN_H, 99, "layer"),  # no field
        (GAIN_H + 8, 3, "layer 0, gain_h"),  # gates
        (GAIN_H + 12, 3, "layer 0, gain_h"),  # units
        (GAIN_H + 36, 0x80000000, "layer 0, gain_h"),  # beyond the end
    ],
)
def test_a_head_that_is_not_consistent_is_refused(offset, value, message, file, tmp_path):
    struct.pack_into("<I", file, offset, value)
    refused(tmp_path / "a", with_crc(bytes(file)), message)


def test_a_vector_that_is_not_finite_is_refused(file, tmp_path):
    gain = struct.unpack_from("<Q", file, GAIN_H + 32)[0]
    struct.pack_into("<I", file, gain + 4 * 17, 0x7F800000)
    refused(tmp_path / "a", file, r"not finite.* \(layer 0, gain_h\)")


def test_activations_that_would_fill_the_memory_are_refused(tmp_path):
    """A file of few bytes can name layers of 2^28 elements, each with an array of outputs."""

    def of_activations(count, n):
        record = struct.pack("<IIIIII", 3, 32, 2, 0, 0, 0) + struct.pack("<II", n, 1)  # relu
        tables = struct.pack("<II", count, 0) + record * count
        size = (HEAD.size + len(tables) + 63) // 64 * 64
        head = HEAD.pack(
            b"\x89cnorm\r\n", 0, 2, 0x01020304, 0, size, size, count, 1, 0, 32 * count, bytes(8), bytes(32)
        )
        return with_crc((head + tables).ljust(size, b"\0"))

    (tmp_path / "small").write_bytes(of_activations(50, 1 << 10))
    assert cnorm.load(tmp_path / "small").run(np.ones((1, 1 << 10), np.float32)).sum() == 1 << 10
    for count, n in ((30, 1 << 24), (100, 1 << 28), (10_000, 1 << 28)):
        refused(tmp_path / "a", of_activations(count, n), "far more memory than its file")


@pytest.mark.parametrize("text", [b"", b"[" * 5000, b'{"layers": 3}', b'{"layers": [{"type": "\\u001b[2J"}]}', b"\xff"])
def test_the_configuration_is_untrusted_too(text, file, tmp_path):
    assert packed.summary(text) in ("?", "")


# ---- the command -----------------------------------------------------------------------------------------------------


def command(*arguments):
    return subprocess.run([sys.executable, "-P", "-m", "cnorm", *map(str, arguments)], capture_output=True, text=True)


def test_the_command_packs(tmp_path, rng):
    cnorm.demo_model().save(tmp_path / "m.safetensors")
    done = command("pack", tmp_path / "m.safetensors", tmp_path / "m.cnorm")
    assert done.returncode == 0, done.stderr
    assert f"identity {cnorm.demo_model().identity.hex()[:12]}" in done.stdout
    check_same(cnorm.demo_model(), cnorm.load(tmp_path / "m.cnorm"), rng)
    assert command("pack", tmp_path / "m.cnorm", tmp_path / "m.cnorm").returncode == 2
    refusal = command("export", tmp_path / "m.cnorm", tmp_path / "m.onnx")
    assert refusal.returncode == 2
    assert "from a packed file, which has no layers" in refusal.stderr


def test_the_command_writes_a_c_array(tmp_path):
    cnorm.demo_model().save(tmp_path / "m.safetensors")
    done = command("pack", tmp_path / "m.safetensors", tmp_path / "speaker-1.h", "--c-array")
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "speaker-1.h").read_text()
    data = packed.packed_file(
        configuration(cnorm.demo_model().layers), cnorm.demo_model()._parts, cnorm.demo_model().identity
    )
    assert f"static const unsigned char speaker_1[{len(data)}] = {{" in text
    assert bytes(map(int, text[text.index("= {") + 3 : text.index("};")].split(","))) == data
