"""examples/models: with the public weight files where they are, each model computes what its own runtime does."""

import importlib
import json
import sys
from pathlib import Path

import numpy as np
import pytest

import onnx_export

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # the files are TorchScript
EXAMPLES = Path(__file__).parents[2] / "examples" / "models"
WEIGHTS = Path(__file__).parents[3] / "shared" / "data" / "models"


@pytest.fixture
def example(monkeypatch):
    """The module of an example by name."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    return importlib.import_module


def weights(name):
    path = WEIGHTS / name
    if not path.exists():
        pytest.skip(f"SKIPPED LOUDLY: {name} is not in {WEIGHTS}")
    return path


def lstm64(rows, x):
    """The outputs of a .nam file of one layer over x [T], in float64, written out from its weights."""
    config, numbers = rows["config"], np.array(rows["weights"], np.float64)
    n = config["hidden_size"]
    w, rest = numbers[: 4 * n * (n + 1)].reshape(4 * n, n + 1), numbers[4 * n * (n + 1) :]
    b, h, c, head, offset = np.split(rest, np.cumsum([4 * n, n, n, n]))
    y = []
    for sample in x:
        i, f, g, o = np.split(w @ np.concatenate([[sample], h]) + b, 4)
        c = c / (1 + np.exp(-f)) + np.tanh(g) / (1 + np.exp(-i))
        h = np.tanh(c) / (1 + np.exp(-o))
        y.append(head @ h + offset[0])
    return np.array(y)


@pytest.mark.parametrize("name", ["lstm.nam", "boss16.nam"])
def test_an_amplifier(name, example, tmp_path, capsys):
    amplifier = example("amplifier")
    path = weights(name)
    x = amplifier.tone(0.05)
    expected = lstm64(json.loads(path.read_text()), x)
    assert amplifier.amplifier(path).check(x[:, np.newaxis], expected[:, np.newaxis].astype(np.float32))
    amplifier.main([str(path), "--out", str(tmp_path / "out.wav")])
    assert "faster than real time" in capsys.readouterr().out
    from audio import read_wav

    assert len(read_wav(tmp_path / "out.wav", 48000)) == 96000


@pytest.mark.parametrize(
    ("changes", "message"), [({"weights": [0.0] * 69}, "need more"), ({"architecture": "WaveNet"}, "WaveNet")]
)
def test_a_wrong_amplifier_file_is_refused(changes, message, example, tmp_path):
    right = {
        "architecture": "LSTM",
        "config": {"input_size": 1, "hidden_size": 3, "num_layers": 1},
        "weights": [0.0] * 70,
    }
    path = tmp_path / "wrong.nam"
    path.write_text(json.dumps(right | changes))
    with pytest.raises(ValueError, match=message):
        example("amplifier").amplifier(path)


@pytest.mark.parametrize("name", ["unitree_g1.pt", "unitree_h1.pt"])
def test_a_policy_computes_what_torchscript_does(name, example):
    torch = pytest.importorskip("torch")
    path = weights(name)
    model = example("policy").policy(path)
    frames = np.random.default_rng(0).standard_normal((50, model.input_size)).astype(np.float32)
    with torch.no_grad():
        script = torch.jit.load(str(path))
        theirs = np.concatenate([script(torch.from_numpy(frame[np.newaxis])).numpy() for frame in frames])
    assert model.check(frames, theirs)


def test_a_policy_in_its_loop(example, tmp_path, capsys):
    pytest.importorskip("torch")
    out = tmp_path / "latency.png"
    example("policy").main([str(weights("unitree_g1.pt")), "--seconds", "0.2", "--out", str(out)])
    printed = capsys.readouterr().out
    assert "200 steps: median" in printed
    assert "torch.jit" in printed
    assert out.stat().st_size > 1000


@pytest.mark.exhaustive
def test_noise_is_suppressed(example, tmp_path, capsys):
    """White noise without speech becomes at least 10 dB quieter; the WAV file and the picture are written."""
    weights("dtln_2.onnx")
    dtln, audio = example("dtln"), example("audio")
    noise = 0.05 * np.random.default_rng(0).standard_normal(32000).astype(np.float32)
    audio.write_wav(tmp_path / "noise.wav", noise, dtln.RATE)
    dtln.main([str(WEIGHTS), str(tmp_path / "noise.wav"), "--weights", "int8", "--out", str(tmp_path / "out.wav")])
    assert "250 hops of 8 ms" in capsys.readouterr().out
    clean = audio.read_wav(tmp_path / "out.wav", dtln.RATE)
    assert np.mean(clean[8000:] ** 2) < 0.1 * np.mean(noise**2)
    assert (tmp_path / "out.png").stat().st_size > 1000


@pytest.mark.exhaustive
def test_noise_is_suppressed_by_a_spectrum(example, tmp_path, capsys):
    path, denoise, audio = weights("gtcrn_simple.onnx"), example("denoise"), example("audio")
    onnx_export.load(path, check=False).save_packed(tmp_path / "m.cnorm")
    noise = 0.05 * np.random.default_rng(0).standard_normal(32000).astype(np.float32)
    audio.write_wav(tmp_path / "noise.wav", noise, denoise.RATE)
    denoise.main([str(tmp_path / "m.cnorm"), str(tmp_path / "noise.wav"), "--out", str(tmp_path / "out.wav")])
    assert "125 hops of 16 ms" in capsys.readouterr().out
    clean = audio.read_wav(tmp_path / "out.wav", denoise.RATE)
    assert np.mean(clean[8000:] ** 2) < 0.1 * np.mean(noise**2)
    assert (tmp_path / "out.png").stat().st_size > 1000


def test_silence_is_no_speech(example, tmp_path, capsys):
    path, voice, audio = weights("silero_16k_op15.onnx"), example("voice"), example("audio")
    audio.write_wav(tmp_path / "silence.wav", np.zeros(16000), voice.RATE)
    voice.main([str(path), str(tmp_path / "silence.wav"), "--out", str(tmp_path / "voice.png")])
    assert "31 windows of 32 ms, speech in 0%" in capsys.readouterr().out
    assert (tmp_path / "voice.png").stat().st_size > 1000


def test_a_tone_is_in_its_bin(example):
    """The largest of the mel energies of a sine is the triangle around its frequency, and its level is Parseval's."""
    frames = example("voice_frames")
    for hertz in 200.0, 1000.0, 5000.0:
        tone = 0.5 * np.sin(2 * np.pi * hertz * np.arange(8000) / frames.RATE)
        found = frames.features(tone)
        assert found.shape == (48, 80)
        bins = np.linspace(frames.mel(20), frames.mel(8000), 82)[1:-1]
        assert set(found.argmax(1)) <= {int(np.abs(bins - frames.mel(hertz)).argmin()) + k for k in (-1, 0, 1)}
    assert np.allclose(frames.features(np.zeros(800)), np.log(np.finfo(np.float32).eps))


def cmvn_file(folder, rows):
    """Kaldi's sums of `rows` [frames, 80] and of their squares, in its binary format."""
    sums = np.array([[*rows.sum(0), len(rows)], [*(rows**2).sum(0), 0]])
    path = folder / "cmvn.ark"
    path.write_bytes(b"global \0BDM \4\2\0\0\0\4\x51\0\0\0" + sums.astype("<f8").tobytes())
    return path


def test_kaldis_mean_and_deviation_are_read(example, tmp_path):
    frames, rows = example("voice_frames"), np.random.default_rng(0).standard_normal((50, 80))
    path = cmvn_file(tmp_path, rows)
    mean, deviation = frames.read_cmvn(path)
    assert np.allclose(mean, rows.mean(0))
    assert np.allclose(deviation, rows.std(0))
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match="2 x 81 doubles"):
        frames.read_cmvn(path)


@pytest.mark.exhaustive
def test_speech_is_found_frame_by_frame(example, tmp_path, capsys):
    path, audio = weights("firered.onnx"), example("audio")
    audio.write_wav(tmp_path / "silence.wav", np.zeros(16000), 16000)
    speech = cmvn_file(tmp_path, np.random.default_rng(0).normal(13, 4, (50, 80)))  # energies of samples in 16 bits
    given = [path, tmp_path / "silence.wav", "--cmvn", speech, "--out", tmp_path / "voice.png"]
    example("voice_frames").main(list(map(str, given)))
    assert "98 frames of 10 ms, speech in 0%" in capsys.readouterr().out
    assert (tmp_path / "voice.png").stat().st_size > 1000


def test_a_world_model_rolls_forward(example, capsys):
    example("world_model").main(["--steps", "20"])
    assert "MB of weights: a step" in capsys.readouterr().out


def test_an_exported_policy_agrees_with_pytorch(example, tmp_path, capsys):
    pytest.importorskip("torch")
    example("exported_policy").main(["--out", str(tmp_path / "policy.onnx")])
    assert "the outputs agree" in capsys.readouterr().out


def test_a_wav_file_of_another_rate_is_refused(example, tmp_path):
    audio = example("audio")
    audio.write_wav(tmp_path / "tone.wav", np.zeros(10), 44100)
    with pytest.raises(ValueError, match="16000 Hz and 16 bits are wanted, it has 44100 Hz"):
        audio.read_wav(tmp_path / "tone.wav", 16000)


def test_every_example_is_tested_here():
    tested = Path(__file__).read_text()
    for path in EXAMPLES.glob("*.py"):
        assert f'example("{path.stem}")' in tested, path
