"""`cnorm time`: percentiles, a histogram as text and as a picture."""

import sys

import numpy as np
import pytest

import cnorm
from cnorm.tools import cli, latency


@pytest.fixture
def path(tmp_path):
    cnorm.demo_model().save(tmp_path / "m.safetensors")
    return str(tmp_path / "m.safetensors")


def test_one_step_after_another(path, tmp_path, capsys):
    picture = tmp_path / "m.png"
    assert cli.run(["time", path, "--seconds", "0.2", "--picture", str(picture)]) == 0
    first, second, *bars, _ = capsys.readouterr().out.splitlines()
    count = int(first.split()[0])
    assert count > 10
    assert first == f"{count} steps one after another, one thread, float32 weights"
    assert [word for word in second.split() if word[0] in "pm"] == ["p50", "p99", "p99.9", "max"]
    assert sum(int(bar.split()[4]) for bar in bars) == count
    assert all(len(bar) <= 80 for bar in bars)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_rate_is_kept(path, capsys):
    times = latency.measured(cnorm.load(path), 100.0, 0.5)
    assert 10 <= len(times) <= 51
    assert cli.run(["time", path, "--seconds", "0.1", "--rate", "100"]) == 0
    assert "steps at 100 a second" in capsys.readouterr().out


def test_the_histogram_has_every_step():
    times = np.array([0.0, 1.0, 1.0, 3.0, 1000.0, 1024.0])
    counts, edges = latency.histogram(times)
    assert counts.sum() == len(times)
    assert list(counts[-1:]) == [1]
    assert edges[-1] == 2048


def test_what_is_no_model_is_one_line(path, tmp_path, capsys, monkeypatch):
    (tmp_path / "m.onnx").write_bytes(b"\x08\x08")
    monkeypatch.setitem(sys.modules, "onnx", None)
    monkeypatch.delitem(sys.modules, "onnx_export.loader", raising=False)
    for name, says in (("m.onnx", "the extra onnx"), ("m.png", "does not exist")):
        with pytest.raises(SystemExit) as done:
            sys.exit(cli.run(["time", str(tmp_path / name)]))
        assert done.value.code == 2
        assert says in " ".join(capsys.readouterr().err.split())
