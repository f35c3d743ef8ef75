"""Voice activity of a recording by FireRedVAD, a frame of 10 ms at a time.

firered.onnx: pretrained_models/onnx_models/fireredvad_stream_vad_with_cache.onnx of github.com/FireRedTeam/FireRedVAD
(Apache-2.0). Its eight causal convolutions of 20 frames have their caches in the stream's state. The frame is Kaldi's:
the logarithms of 80 mel energies, less a mean and divided by a deviation that lie in cmvn.ark beside the model; without
that file they are those of the recording.

    python examples/models/voice_frames.py firered.onnx [SPEECH.wav] [--cmvn cmvn.ark] [--out voice_frames.png]

Without a WAV file espeak-ng speaks two sentences.
"""

import argparse
from pathlib import Path
from time import perf_counter

import numpy as np
from audio import read_wav, spoken
from voice import draw

import onnx_export

RATE, LENGTH, HOP, FFT, BINS = 16000, 400, 160, 512, 80


def mel(hertz):
    return 1127 * np.log1p(np.asarray(hertz) / 700)


def filters():
    """Triangles of equal width in mel from 20 Hz to 8 kHz, [BINS, FFT / 2]."""
    edges = np.linspace(mel(20), mel(RATE / 2), BINS + 2)
    at = mel(np.arange(FFT // 2) * RATE / FFT)
    left, centre, right = edges[:-2, np.newaxis], edges[1:-1, np.newaxis], edges[2:, np.newaxis]
    return np.maximum(0, np.minimum((at - left) / (centre - left), (right - at) / (right - centre)))


def features(samples):
    """Kaldi's filter bank without dither: [frames, BINS] float32, of samples in -1 to 1."""
    frames = np.lib.stride_tricks.sliding_window_view(samples.astype(np.float64) * 32768, LENGTH)[::HOP]
    frames = frames - frames.mean(1, keepdims=True)
    before = np.concatenate([frames[:, :1], frames[:, :-1]], 1)
    window = (0.5 - 0.5 * np.cos(2 * np.pi * np.arange(LENGTH) / (LENGTH - 1))) ** 0.85  # Kaldi's "povey"
    power = np.abs(np.fft.rfft((frames - 0.97 * before) * window, FFT)[:, :-1]) ** 2
    return np.log(np.maximum(power @ filters().T, np.finfo(np.float32).eps)).astype(np.float32)


def read_cmvn(path):
    """Mean and deviation [BINS] of a binary Kaldi matrix [2, BINS + 1] of doubles: sums and the count, sums of squares.

    Raises
    ------
    ValueError
        If the file is something else.
    """
    head = b"\0BDM \4\2\0\0\0\4" + np.array(BINS + 1, "<i4").tobytes()
    _, found, numbers = Path(path).read_bytes().partition(head)  # a name may come before
    if not found or len(numbers) != 16 * (BINS + 1):
        raise ValueError(f"{path}: a binary Kaldi matrix of 2 x {BINS + 1} doubles is wanted")
    sums, squares = np.frombuffer(numbers, "<f8").reshape(2, BINS + 1)
    mean = sums[:-1] / sums[-1]
    return mean, np.sqrt(np.maximum(squares[:-1] / sums[-1] - mean**2, 1e-20))


def main(arguments=None):
    parser = argparse.ArgumentParser(description="Find speech by FireRedVAD.")
    parser.add_argument("file", help="firered.onnx")
    parser.add_argument("wav", nargs="?", help="16 kHz, 16 bits; without it espeak-ng speaks")
    parser.add_argument("--cmvn", help="cmvn.ark; without it the recording's own mean and deviation")
    parser.add_argument("--out", default="voice_frames.png")
    given = parser.parse_args(arguments)
    if given.wav:
        samples = read_wav(given.wav, RATE)
    else:
        samples = np.concatenate([spoken("Is anybody there?"), spoken("Nobody answers.")])
    frames = features(samples)
    mean, deviation = read_cmvn(given.cmvn) if given.cmvn else (frames.mean(0), frames.std(0) + 1e-3)
    frames = ((frames - mean) / deviation).astype(np.float32)
    stream = onnx_export.load(given.file).stream()
    found, times = [], []
    for frame in frames:
        start = perf_counter()
        found.append(float(stream.step(frame)[0]))
        times.append((perf_counter() - start) * 1e6)
    draw(samples, np.array(found), given.out, HOP)
    speech = np.mean(np.array(found) > 0.5)
    print(f"{len(found)} frames of 10 ms, speech in {speech:.0%}; a step {np.median(times):.0f} us")
    print(given.out)


if __name__ == "__main__":
    main()
