"""Model files: saved models are read back bit for bit; malformed untrusted files are errors, never crashes."""

import contextlib
import dataclasses
import errno
import json
import os
import stat
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from cells import LAYERS, random_cell, random_weights
from hypothesis import given, settings
from hypothesis import strategies as st
from models import deep_model

import cnorm

KEYS = sorted(cnorm.PRESETS)


def small_model(rng):
    layer, _ = random_cell(("LSTM", "ba2016"), rng, 3, 4)
    return cnorm.Model([layer, cnorm.Linear(np.ones((2, 4), np.float32))])


@pytest.fixture
def path(tmp_path, rng):
    small_model(rng).save(tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


def contents(path):
    data = path.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def write(path, header, body, length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + body)


def write_configuration(path, configuration):
    """Replace the configuration of a file, keeping its tensors."""
    header, body = contents(path)
    text = configuration if isinstance(configuration, str) else json.dumps(configuration)
    header["__metadata__"]["cnorm.model"] = text
    write(path, header, body)


def configuration(path):
    return json.loads(contents(path)[0]["__metadata__"]["cnorm.model"])


# ---- save and load ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", KEYS, ids="-".join)
def test_every_preset_survives_save_and_load(key, tmp_path, rng):
    layer, _ = random_cell(key, rng, 3, 6)
    model = cnorm.Model([layer])
    model.save(tmp_path / "one")
    other = cnorm.load(tmp_path / "one")
    assert other.layers[0].spec == layer.spec
    assert other.layers[0].eps == layer.eps
    x = rng.standard_normal((5, 3)).astype(np.float32)
    assert other.run(x).tobytes() == model.run(x).tobytes()
    other.restore(model.stream().save())  # the same configuration and weights: the same hash


def test_every_kind_of_layer_survives_save_and_load(tmp_path, rng):
    forward, _ = random_cell(("GRU", "torch"), rng, 5, 3)
    backward, _ = random_cell(("LSTM", "torchaudio"), rng, 5, 2)
    for model in (deep_model(rng), cnorm.Model([cnorm.Bidirectional(forward, backward), cnorm.Activation("sigmoid")])):
        model.save(tmp_path / "one")
        x = rng.standard_normal((5, 5)).astype(np.float32)
        assert cnorm.load(tmp_path / "one").run(x).tobytes() == model.run(x).tobytes()


def test_custom_specs_survive_save_and_load(tmp_path, rng):
    spec = dataclasses.replace(cnorm.PRESETS["LSTM", "haste"], name="mine", zoneout=0.125, cell_clip=3.0)
    layer = LAYERS["LSTM"](random_weights(spec, rng, 3, 6), preset=spec)
    cnorm.Model([layer]).save(tmp_path / "one")
    assert cnorm.load(tmp_path / "one").layers[0].spec == spec


def test_saving_is_atomic(path, rng, monkeypatch):
    before = path.read_bytes()

    def fail(*_):
        raise OSError("no")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="no"):
        small_model(rng).save(path)
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == [path.name]


def test_data_is_on_the_disk_before_it_replaces_older_data(path, rng, monkeypatch):
    """fsync of the new file, then rename, then fsync of the folder."""
    done, fsync, replace = [], os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda handle: (done.append(os.fstat(handle).st_ino), fsync(handle)))
    monkeypatch.setattr(os, "replace", lambda one, other: (done.append("replace"), replace(one, other)))
    small_model(rng).save(path)
    assert done == [path.stat().st_ino, "replace", path.parent.stat().st_ino]


def test_file_systems_without_folder_fsync(path, rng, monkeypatch):
    def fail(handle):
        raise OSError(errno.EINVAL, "no")

    monkeypatch.setattr(os, "fsync", fail)
    small_model(rng).save(path)
    cnorm.load(path)


KILLED = """
import os, signal, sys, time
from cnorm.storage.files import replacing

with replacing(sys.argv[1]) as file:
    file.write_bytes(b"half")
    print("writing", flush=True)
    time.sleep(600)
"""


def test_a_killed_writer_leaves_the_old_file_and_its_temporary_folder_is_removed(path, rng):
    """The next save of that file removes the dead writer's folder and keeps that of a running writer."""
    before = path.read_bytes()
    writers = []
    for _ in range(2):
        command = [sys.executable, "-P", "-c", KILLED, str(path)]
        writers.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        assert writers[-1].stdout.readline() == "writing\n"
    killed, living = writers
    (folder,) = (f for f in path.parent.iterdir() if f.is_dir() and folder_of(f, killed))
    killed.kill()
    killed.wait()
    assert path.read_bytes() == before
    for hidden in path.parent.glob(".*"):
        os.utime(hidden, (0, 0))
    small_model(rng).save(path)
    assert not folder.exists()
    assert len(os.listdir(path.parent)) == 2  # the file, and the folder of the other
    living.kill()
    living.wait()
    small_model(rng).save(path)
    assert os.listdir(path.parent) == [path.name]
    for writer in writers:
        writer.stdout.close()


def folder_of(folder, process):
    """Whether a process has a folder open."""
    handles = Path(f"/proc/{process.pid}/fd").iterdir()
    return any(os.path.realpath(handle) == str(folder) for handle in handles)


def test_a_path_that_can_not_be_written_is_named(tmp_path, rng):
    with pytest.raises(FileNotFoundError) as caught:
        small_model(rng).save(tmp_path / "absent" / "model")
    assert caught.value.filename == str(tmp_path / "absent" / "model")


def test_only_regular_files_are_replaced(tmp_path, rng):
    """Replacing a device or a pipe would turn it into a file, and readers of the pipe would wait for ever."""
    os.mkfifo(tmp_path / "pipe")
    os.symlink("pipe", tmp_path / "link")
    os.mkdir(tmp_path / "folder")
    for name in ("pipe", "link", "folder"):
        with pytest.raises(OSError, match=rf"not a regular file: '{tmp_path / name}'$"):
            small_model(rng).save(tmp_path / name)
    assert stat.S_ISFIFO(os.stat(tmp_path / "link").st_mode)
    assert os.path.islink(tmp_path / "link")
    os.symlink("loop", tmp_path / "loop")
    for name in (str(tmp_path / "loop"), ""):
        with pytest.raises(OSError, match=rf": '{name}'$"):
            small_model(rng).save(name)
    assert sorted(os.listdir(tmp_path)) == ["folder", "link", "loop", "pipe"]


@pytest.mark.parametrize(
    ("start", "kind"),
    [
        (b"", "it is empty"),
        (b"PK\3\4\x14\0" + bytes(40), "it is a zip archive, such as torch.save, numpy.savez and Keras write"),
        (
            b"\x89HDF\r\n\x1a\n" + bytes(40),
            "it is an HDF5 file: read it with Keras, and give cnorm.from_keras the model",
        ),
        (b"\x93NUMPY\1\0" + bytes(40), "it is a file of numpy.save"),
        (b"\x80\4\x95\n\0\0\0\0\0\0\0}.", "it is a pickle, which is not read, as it can run code"),
        (b'{"layers": []}', "it is JSON"),
        (b"PK\3\4 policy/code/__torch__/a.py", "it is TorchScript: examples/models/policy.py"),
        (b"PK\3\4 archive/data.pkl", "it is a file of torch.save: load it with torch"),
        (b"PK\3\4 config.json model.weights.h5", "it is a Keras model: give cnorm.from_keras"),
        (b'{"version": "0.5.4", "architecture": "LSTM"}', "it is JSON as of a .nam file: examples/models/amplifier.py"),
        (b"{\0\0\0\0\0\0\0{", "Error while deserializing"),  # a header of 123 bytes
    ],
)
def test_a_file_of_another_kind_is_named(start, kind, tmp_path):
    (tmp_path / "model").write_bytes(start)
    with pytest.raises(ValueError, match=f"model is not a safetensors file that can be read: {kind}"):
        cnorm.load(tmp_path / "model")


def test_load_opens_onnx(tmp_path, rng):
    """A file of `export`, by its content or by its name, and one of others, in the same bits as `onnx_export.load`."""
    onnx_export = pytest.importorskip("onnx_export")
    model, x = small_model(rng), rng.standard_normal((3, small_model(rng).input_size)).astype(np.float32)
    onnx_export.export(model, tmp_path / "model")
    assert cnorm.load(tmp_path / "model").run(x).tobytes() == model.run(x).tobytes()
    (tmp_path / "b.onnx").write_bytes(b"nothing of the kind")
    with pytest.raises(ValueError, match="not an ONNX file"):
        cnorm.load(tmp_path / "b.onnx")
    code = f"import sys; sys.modules['onnx'] = None; import cnorm; cnorm.load({str(tmp_path / 'model')!r})"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
    assert "onnx_export.load needs onnx: the extra onnx, pip install" in done.stderr


def test_load_says_what_is_no_model(tmp_path):
    with pytest.raises(ValueError, match=r"is a folder, not a regular file$"):
        cnorm.load(tmp_path)
    safetensors.numpy.save_file({"weight_ih_l0": np.ones(3, np.float32)}, tmp_path / "checkpoint")
    with pytest.raises(ValueError, match=r"cnorm\.from_safetensors reads checkpoints of other frameworks$"):
        cnorm.load(tmp_path / "checkpoint")


def test_rejects_folder_names_as_save_paths(tmp_path, rng):
    for name in ("new/", "new/.", "new/.."):
        with pytest.raises(OSError, match=rf"the path is that of a folder: '{tmp_path}/{name}'$"):
            small_model(rng).save(f"{tmp_path}/{name}")
    with pytest.raises(TypeError, match="path must be a str or path-like, got int"):
        small_model(rng).save(3)
    assert os.listdir(tmp_path) == []


def test_saves_under_the_longest_file_name(tmp_path, rng):
    small_model(rng).save(tmp_path / ("a" * 255))
    assert cnorm.load(tmp_path / ("a" * 255)).output_size == 2
    assert os.listdir(tmp_path) == ["a" * 255]


def test_saving_to_a_link_replaces_its_target(tmp_path, rng):
    os.mkdir(tmp_path / "folder")
    os.symlink("folder/model", tmp_path / "link")
    for _ in range(2):  # first a dangling link, then a link to a file
        small_model(rng).save(tmp_path / "link")
        assert os.readlink(tmp_path / "link") == "folder/model"
        assert cnorm.load(tmp_path / "folder" / "model").output_size == 2
    assert os.listdir(tmp_path / "folder") == ["model"]


def test_files_have_the_mode_of_the_umask_or_of_what_they_replace(tmp_path, rng):
    before = os.umask(0o027)
    try:
        small_model(rng).save(tmp_path / "new")
        assert stat.S_IMODE(os.stat(tmp_path / "new").st_mode) == 0o640
        os.chmod(tmp_path / "new", 0o606)
        small_model(rng).save(tmp_path / "new")
        assert stat.S_IMODE(os.stat(tmp_path / "new").st_mode) == 0o606
    finally:
        os.umask(before)


# ---- untrusted files -------------------------------------------------------------------------------------------------


def refused(path, match=None):
    with pytest.raises(ValueError, match=match) as caught:
        cnorm.load(path)
    assert str(path) in str(caught.value)


def test_rejects_every_truncation(path):
    data = path.read_bytes()
    for length in [*range(64), *range(64, len(data), 37), len(data) - 1]:
        path.write_bytes(data[:length])
        refused(path)
    path.write_bytes(data + b"\0")
    refused(path)


@pytest.mark.parametrize("length", [0, 1, 2**31, 2**63, 2**64 - 1])
def test_rejects_false_header_lengths(path, length):
    header, body = contents(path)
    write(path, header, body, length)
    refused(path)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b" " * 100_000,
        b"\xff\xfe",
        b"[]",
        b"null",
        b"{",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"a": NaN}',
        b'{"a": 1}',
        b'{"a": {"dtype": "F32", "shape": [1' + b"0" * 400 + b'], "data_offsets": [0, 64]}}',
        b'{"a": {"dtype": "F32", "shape": [16], "data_offsets": [0, 1' + b"0" * 400 + b"]}}",
        b'{"a": {"dtype": "F32", "shape": [true], "data_offsets": [0, 4]}}',
    ],
    ids=[
        "empty",
        "spaces",
        "no UTF-8",
        "list",
        "null",
        "open",
        "deep list",
        "deep object",
        "NaN",
        "number",
        "huge size",
        "huge offset",
        "true",
    ],
)
def test_rejects_malformed_headers(path, text):
    write(path, text, b"\0" * 64)
    refused(path)


@pytest.mark.parametrize(
    "change",
    [
        {"shape": [-1, 3]},
        {"shape": [1.5, 3]},
        {"shape": [2**40, 2**40]},
        {"shape": [16] * 65},
        {"shape": [16, 4]},
        {"shape": "16"},
        {"dtype": "F31"},
        {"dtype": None},
        {"data_offsets": [192, 0]},
        {"data_offsets": [-192, 0]},
        {"data_offsets": [0, 2**62]},
        {"data_offsets": [8, 200]},
        {"data_offsets": [0]},
    ],
    ids=str,
)
def test_rejects_false_tensor_entries(path, change):
    header, body = contents(path)
    header["layers.0.weight_x"] |= change
    write(path, header, body)
    refused(path)


def test_rejects_overlapping_tensors_and_gaps(path):
    header, body = contents(path)
    header["layers.0.gain_x"]["data_offsets"] = header["layers.0.gain_h"]["data_offsets"]
    write(path, header, body)
    refused(path)


def test_rejects_duplicate_tensor_names(path):
    """Two tensors of one name are ambiguous, so the file is refused."""
    header, body = contents(path)
    entry = json.dumps(header["layers.0.gain_x"])
    text = json.dumps(header)
    write(path, text.replace('{"__metadata__"', f'{{"layers.0.gain_x": {entry}, "__metadata__"', 1).encode(), body)
    refused(path)


def test_rejects_empty_tensors(tmp_path, rng):
    """Several empty tensors may share an offset, but no layer accepts one."""
    path = tmp_path / "model"
    small_model(rng).save(path)
    tensors, metadata = safetensors.numpy.load_file(path), contents(path)[0]["__metadata__"]
    empty = {"layers.0.bias": np.empty(0, np.float32), "layers.1.bias": np.empty(0, np.float32)}
    safetensors.numpy.save_file(tensors | empty, path, metadata=metadata)
    refused(path, "bias")


def test_rejects_a_header_of_100_megabytes(path):
    header, body = contents(path)
    write(path, json.dumps(header).encode() + b" " * (100 << 20), body)
    refused(path)


def test_half_precision_in_a_file(path):
    """float16 and bfloat16 tensors of a file are widened exactly, like arrays in memory."""
    import ml_dtypes

    tensors, metadata = safetensors.numpy.load_file(path), contents(path)[0]["__metadata__"]
    for dtype in (np.float16, ml_dtypes.bfloat16):
        half = {name: array.astype(dtype) for name, array in tensors.items()}
        safetensors.numpy.save_file(half, path, metadata=metadata)
        for name, array in cnorm.load(path).layers[0].weights.items():
            np.testing.assert_array_equal(array, half[f"layers.0.{name}"].astype(np.float32))


def test_accepts_file_names_that_are_not_utf_8(tmp_path, rng):
    path = os.path.join(os.fsencode(tmp_path), b"\xff\xfe.safetensors")
    small_model(rng).save(os.fsdecode(path))
    for name in (path, os.fsdecode(path)):
        assert cnorm.load(name).output_size == 2


@pytest.mark.parametrize("metadata", [1, [], {"cnorm.model": 1}, {"cnorm.model": None}, {}, None])
def test_rejects_malformed_metadata(path, metadata):
    header, body = contents(path)
    header["__metadata__"] = metadata
    write(path, header, body)
    refused(path)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", "[" * 5000, '{"format": 1, "format": 1, "layers": [{"type": "Linear"}]}',
     '{"format": 1}', '{"format": 1, "layers": 3}', '{"format": 2, "layers": []}',
     '{"format": 1, "layers": []}', '{"format": 1, "layers": [null]}', '{"format": 1, "layers": [{"type": []}]}'],
)  # fmt: skip
def test_rejects_malformed_configurations(path, text):
    write_configuration(path, text)
    refused(path)


@pytest.mark.parametrize(
    "change",
    [
        {"type": "GRU"},
        {"type": "Pickle"},
        {"preset": "draw"},
        {"preset": "torch_custom"},
        {"preset": 3},
        {"preset": None},
        {"eps": -1},
        {"eps": "small"},
        {"eps": None, "preset": "torch"},
        {"eps": float("nan")},
        {"eps": 10**400},
        {"eps": 1e300},
        {"surprise": 1},
        {"spec": {}},
    ],
    ids=lambda change: str(change)[:40],
)
def test_rejects_malformed_layers(path, change):
    described = configuration(path)
    described["layers"][0] |= change
    write_configuration(path, described)
    refused(path)


@pytest.mark.parametrize("change", [{}, {"spec": None}, {"spec": {}}, {"preset": 3}, {"preset": []}])
def test_rejects_a_rounded_cell_without_a_cell(tmp_path, rng, change):
    path = tmp_path / "model"
    deep_model(rng).with_weights("float16", smallest=1).save(path)
    described = configuration(path)
    entry = described["layers"][0]
    del entry["preset"]
    entry |= change
    write_configuration(path, described)
    refused(path)


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "GRU"},
        {"scope": "both"},
        {"gates": 3},
        {"weights": [["a"]]},
        {"surprise": 1},
        {"zoneout": "x"},
        {"zoneout": 10**400},
        {"cell_clip": 10**400},
        {"forget_bias": 10**400},
        {"forget_bias": 1e300},
        {"eps": 10**400},
        {"eps_place": "std"},
        {"ddof": 1},
        {"weights": [["x", "4H I", "eval"]]},
        {"weights": [["x", "4Z I", "weight_x"], ["h", "4H H", "weight_h"]]},
        {"weights": [["x", "H I", "weight_x"], ["h", "H H", "weight_h"]]},
        {"weights": [["{layer:>300000000}", "4H I", "weight_x"], ["h", "4H H", "weight_h"]]},
    ],
    ids=lambda change: str(change)[:40],
)
def test_rejects_malformed_specs(path, change):
    described = configuration(path)
    del described["layers"][0]["preset"]
    described["layers"][0]["spec"] = dataclasses.asdict(cnorm.PRESETS["LSTM", "ba2016"]) | change
    write_configuration(path, described)
    refused(path)


def test_rejects_matrices_that_packing_would_enlarge_beyond_the_limit():
    """One row is padded to a panel of 32: 64 MiB would take 2 GiB."""
    with pytest.raises(ValueError, match="layers take 2147483648 bytes packed in panels"):
        cnorm.Model([cnorm.Linear(np.zeros((1, 1 << 24), np.float32))])


def test_rejects_deep_nesting(path):
    inner = {"type": "Activation", "function": "relu"}
    for _ in range(300):
        inner = {"type": "Residual", "layers": [inner]}
    write_configuration(path, {"format": 1, "layers": [inner]})
    refused(path)


def test_accepts_at_most_ten_thousand_layers(path):
    described = configuration(path)
    described["layers"] += [{"type": "Activation", "function": "relu"}] * (10_000 - len(described["layers"]))
    write_configuration(path, described)
    assert len(cnorm.load(path).layers) == 10_000
    described["layers"] += described["layers"][-1:]
    write_configuration(path, described)
    refused(path, "at most 10000")
    described["layers"][2:] = [{"type": "Residual", "layers": described["layers"][2:]}]  # 2, this one and 9999 in it
    write_configuration(path, described)
    refused(path, "at most 10000 entries, nested ones included, got 10002")


def test_reading_takes_time_linear_in_the_number_of_layers(path, work):
    """Each layer once searched all tensors, which took minutes for ten thousand layers. Counted in calls."""
    cell = {"weight_x": (1, 1), "weight_h": (1, 1), "gain": 1, "bias": 1}
    entry = {"type": "RNN", "preset": "ba2016", "eps": 1e-5}

    def calls(count):
        tensors = {f"layers.0.{i}.{name}": np.ones(s, np.float32) for i in range(count) for name, s in cell.items()}
        described = {"format": 1, "layers": [{"type": "Residual", "layers": [entry] * count}]}
        safetensors.numpy.save_file(tensors, path, metadata={"cnorm.model": json.dumps(described)})
        assert list(cnorm.load(path).stream().state()) == [f"h{i}" for i in range(count)]
        return work(lambda: cnorm.load(path))

    assert calls(200) < 2.2 * calls(100)


def test_rejects_models_whose_outputs_exceed_the_limit(tmp_path):
    """Each layer's output has its own buffer, while an activation adds next to nothing to the file's size."""
    layers = [cnorm.LayerNorm(np.ones(200_000, np.float32)), *[cnorm.Activation("relu")] * 200]
    with pytest.raises(ValueError, match=r"layers take 160003200 bytes for the outputs of one step: more than 64 MiB"):
        cnorm.Model(layers)
    assert cnorm.Model(layers[:50]).output_size == 200_000


def test_rejects_missing_and_unused_tensors(tmp_path, rng):
    path = tmp_path / "model"
    small_model(rng).save(path)
    tensors = safetensors.numpy.load_file(path)
    metadata = contents(path)[0]["__metadata__"]
    for name in tensors:
        without = {other: array for other, array in tensors.items() if other != name}
        safetensors.numpy.save_file(without, path, metadata=metadata)
        refused(path, name.split(".")[-1])
    more = tensors | {"layers.2.weight": tensors["layers.1.weight"]}
    safetensors.numpy.save_file(more, path, metadata=metadata)
    refused(path, r"no layer takes: layers\.2\.weight")
    bad = tensors | {"layers.0.bias": np.full(16, np.inf, np.float32)}
    safetensors.numpy.save_file(bad, path, metadata=metadata)
    refused(path, "finite")
    for dtype in (np.float64, np.int32):
        safetensors.numpy.save_file(tensors | {"layers.0.bias": np.ones(16, dtype)}, path, metadata=metadata)
        refused(path, "bias")


def test_rejects_a_missing_bias(tmp_path, rng):
    """The configuration lists the absent biases of a layer; any other missing bias is an error."""

    def layers(bias):
        biases = [np.ones(n, np.float32) if bias else None for n in (4, 4)]
        cell = random_weights(cnorm.PRESETS["GRU", "torch"], rng, 3, 4, optional=bias)
        inner = cnorm.Residual([cnorm.Linear(np.ones((4, 4), np.float32), biases[0])])
        return [cnorm.GRU(cell, preset="torch"), inner, cnorm.LayerNorm(np.ones(4, np.float32), biases[1])]

    path = tmp_path / "model"
    for bias in (True, False):
        cnorm.Model(layers(bias)).save(path)
        assert [one.absent_biases == () for one in cnorm.load(path).layers] == [bias, True, bias]
    bare = contents(path)[0]["__metadata__"]
    cnorm.Model(layers(True)).save(path)
    tensors, metadata = safetensors.numpy.load_file(path), contents(path)[0]["__metadata__"]
    lost = ("layers.1.0.bias", "layers.2.bias", "layers.0.bias_ih_l0")
    for name in lost:
        without = {other: array for other, array in tensors.items() if other != name}
        safetensors.numpy.save_file(without, path, metadata=metadata)
        refused(path, r"without must be .*\[\], got \['bias'\]|missing: bias_ih_l0")
    without = {other: array for other, array in tensors.items() if "bias_" not in other}
    safetensors.numpy.save_file(without, path, metadata=metadata)
    refused(path, r"\[\], got \['bias_ih_l0', 'bias_hh_l0'\]")
    safetensors.numpy.save_file(tensors, path, metadata=bare)
    refused(path, r"\['bias_ih_l0', 'bias_hh_l0'\], got \[\]")


def test_rejects_a_missing_optional_tensor(tmp_path, rng):
    """An initial state, a gain or a bias within a norm: without it the file would load as another model."""
    matrices = (("x", "4H I", "weight_x"), ("y", "4H P", "weight_h"), ("p", "P H", "weight_p?"))
    vectors = (("b", "4H", "inside_x+bias?"), ("g", "2 4H", "gain_x gain_h?"))
    spec = dataclasses.replace(cnorm.PRESETS["LSTM", "ba2016"], name="mine", weights=matrices + vectors)
    weights = random_weights(spec, rng, 4, 4, 4) | {name: np.ones(4, np.float32) for name in ("h0", "c0")}
    cell, path = cnorm.LSTM(weights, preset=spec), tmp_path / "model"
    cnorm.Model([cell, cnorm.Residual([cell])]).save(path)
    tensors, metadata = safetensors.numpy.load_file(path), contents(path)[0]["__metadata__"]
    assert [layer["with"] for layer in configuration(path)["layers"][:1]] == [["p", "b", "g", "h0", "c0"]]
    for lost in [name for name in tensors if name.split(".")[-1] in ("p", "b", "g", "h0", "c0")]:
        without = {name: array for name, array in tensors.items() if name != lost}
        safetensors.numpy.save_file(without, path, metadata=metadata)
        refused(path, r"must be those that the configuration names, \['p', 'b', 'g', 'h0', 'c0'\], got ")
        if lost in ("layers.0.p", "layers.0.h0"):
            with pytest.raises(ValueError, match="must be those that the configuration names"):
                cnorm.from_safetensors(path, spec, prefix="layers.0.")
    safetensors.numpy.save_file(tensors, path, metadata=metadata)
    assert cnorm.load(path).layers[0].weights.keys() == weights.keys()


def test_a_list_of_optional_tensors_that_contradicts_them_is_refused(tmp_path, rng):
    weights = random_weights(cnorm.PRESETS["GRU", "torch"], rng, 3, 4) | {"h0": np.ones(4, np.float32)}
    path = tmp_path / "model"
    cnorm.Model([cnorm.GRU(weights, preset="torch"), cnorm.Linear(np.ones((2, 4), np.float32))]).save(path)
    described = configuration(path)
    assert cnorm.load(path).stream().state()["h0"].tolist() == [1.0] * 4
    assert described["layers"][0].pop("with") == ["h0"]
    write_configuration(path, described)
    refused(path, "optional tensors of GRU")
    for place, said in ((0, []), (0, None), (0, ["c0"]), (0, "h0"), (1, [])):
        wrong = json.loads(json.dumps(described))
        wrong["layers"][place]["with"] = said
        write_configuration(path, wrong)
        refused(path, "optional tensors of GRU|unknown layer")


@settings(max_examples=150)
@given(data=st.data())
def test_flipped_bytes_never_crash(data, path):
    """A file with a few changed bytes loads or is refused: a change within the weights cannot be detected."""
    whole = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    other = path.with_name("flipped")
    other.write_bytes(whole)
    with contextlib.suppress(ValueError):
        cnorm.load(other)


def test_rejects_paths_that_are_not_regular_files(tmp_path):
    with pytest.raises(FileNotFoundError):
        cnorm.load(tmp_path / "absent")
    with pytest.raises(TypeError, match="path must be a str or path-like, got int"):
        cnorm.load(3)
    descriptors = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else None
    refused(tmp_path, "regular")
    if descriptors is not None:
        assert len(os.listdir("/proc/self/fd")) == descriptors
    os.symlink(tmp_path / "loop", tmp_path / "loop")
    with pytest.raises(OSError, match="loop"):
        cnorm.load(tmp_path / "loop")
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(ValueError, match="regular"):
        cnorm.load(tmp_path / "fifo")
    with pytest.raises(ValueError, match="regular"):
        cnorm.load("/dev/zero")
    with open(tmp_path / "large", "wb") as file:
        file.truncate((4 << 30) + 1)  # sparse
    with pytest.raises(ValueError, match="4294967297 bytes, more than"):
        cnorm.load(tmp_path / "large")


def test_load_rejects_a_checkpoint_of_another_framework(tmp_path, rng):
    weights = random_weights(cnorm.PRESETS["GRU", "torch"], rng, 3, 4)
    safetensors.numpy.save_file(weights, tmp_path / "gru")
    refused(tmp_path / "gru", "not a cnorm model")
    (layer,) = cnorm.from_safetensors(tmp_path / "gru", "torch", kind="GRU")
    np.testing.assert_array_equal(layer.weights["weight_ih_l0"], weights["weight_ih_l0"])
    with pytest.raises(ValueError, match="gru"):
        cnorm.from_safetensors(tmp_path / "gru", "torch", kind="LSTM")
    (tmp_path / "gru").write_bytes((tmp_path / "gru").read_bytes()[:-1])
    with pytest.raises(ValueError, match="not a safetensors file"):
        cnorm.from_safetensors(tmp_path / "gru", "torch", kind="GRU")


def test_loaders_never_unpickle(tmp_path):
    """A pickle under any file name is refused without being executed."""
    run = tmp_path / "run"
    (tmp_path / "evil").write_bytes(b"cos\nsystem\n(S'touch " + str(run).encode() + b"'\ntR.")
    refused(tmp_path / "evil")
    with pytest.raises(ValueError, match="safetensors"):
        cnorm.from_safetensors(tmp_path / "evil", "torch", kind="GRU")
    assert not run.exists()
    code = "import sys, cnorm; cnorm.demo_model(); print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"


def test_refuses_duplicate_keys_of_a_configuration(path):
    """Refused by both functions that read files: JSON readers disagree on which of two values counts."""
    text = contents(path)[0]["__metadata__"]["cnorm.model"]
    write_configuration(path, text.replace('"type": "LSTM"', '"type": "GRU", "type": "LSTM"'))
    with pytest.raises(ValueError, match="not JSON with a format and layers"):
        cnorm.load(path)
    with pytest.raises(ValueError, match="duplicate key"):
        cnorm.from_safetensors(path, "ba2016", kind="LSTM", prefix="layers.0.")


def test_limits_the_panels_of_a_model_not_of_a_network(monkeypatch, rng):
    """Bidirectional layers split a model into networks, each of which may be below the limit."""
    cell, _ = random_cell(("GRU", "torch"), rng, 1, 1)
    layers = [cnorm.Bidirectional(cell, cell), cnorm.Linear(np.ones((1, 2), np.float32))] * 20
    cnorm.Model(layers)
    monkeypatch.setattr("cnorm.cells.packing.PANEL_FLOATS", 4096)
    cnorm.Model(layers[:2])
    with pytest.raises(ValueError, match=r"layers take \d+ bytes packed in panels of 32 rows: more than 16384"):
        cnorm.Model(layers)


HOSTILE = "\x1b[2J\u202e" + "x" * 1_000_000


@pytest.mark.parametrize("read", [cnorm.load, lambda path: cnorm.from_safetensors(path, "torch", kind="LSTM")])
def test_quoted_names_are_bounded_and_printable(read, tmp_path):
    one = np.ones((4, 4), np.float32)
    metadata = {"cnorm.model": json.dumps({"format": 1, "layers": [{"type": "Linear", HOSTILE: 1}]})}
    for name, described in ((f"layers.0.{HOSTILE}", metadata), (HOSTILE, None), (f"weight_ih_l0{HOSTILE}", None)):
        safetensors.numpy.save_file({name: one}, tmp_path / "file", metadata=described)
        with pytest.raises(ValueError, match="file") as error:
            read(tmp_path / "file")
        assert len(str(error.value)) < 3000
        assert str(error.value).isprintable()
    safetensors.numpy.save_file({"a": one}, tmp_path / "file", metadata={"cnorm.model": json.dumps({HOSTILE: 1})})
    with pytest.raises(ValueError, match="file") as error:
        read(tmp_path / "file")
    assert len(str(error.value)) < 3000


def test_quoted_names_of_a_state_dict_are_bounded_and_printable():
    for take in (lambda w: cnorm.LSTM(w, preset="torch"), lambda w: cnorm.from_torch(w, "torch", kind="LSTM")):
        with pytest.raises(ValueError, match=r"xxx \.\.\. xxx") as error:
            take({f"{i}{HOSTILE}": np.ones(1, np.float32) for i in range(50)})
        assert len(str(error.value)) < 3000
        assert str(error.value).isprintable()


def test_repr_of_a_large_model_is_short():
    layers = [cnorm.Linear(np.ones((2, 2), np.float32))] * 10_000
    text = "Linear(2 -> 2)"
    assert repr(cnorm.Model(layers)) == f"Model([{text}, {text}, {text}, ... 9995 more ..., {text}, {text}])"
    assert repr(cnorm.Model(layers[:6])).count(text) == 6
    assert len(repr(cnorm.Model([cnorm.Residual(layers[:1000])]))) < 300
