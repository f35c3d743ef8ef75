"""Voice activity of a recording by Silero VAD, 32 ms at a time.

silero_16k_op15.onnx: src/silero_vad/data/silero_vad_16k_op15.onnx of github.com/snakers4/silero-vad (MIT). A call takes
512 samples of 16 kHz behind the last 64 of the call before: that context is the caller's, the state of the LSTM the
stream's.

    python examples/models/voice.py silero_16k_op15.onnx [SPEECH.wav] [--out voice.png]

Without a WAV file espeak-ng speaks two sentences.
"""

import argparse
from time import perf_counter

import numpy as np
from audio import read_wav, spoken

import onnx_export

RATE, WINDOW, CONTEXT = 16000, 512, 64


def probabilities(model, samples):
    """The probability of speech in each window of 512 samples, and microseconds of each step."""
    stream, frame = model.stream(), np.zeros(CONTEXT + WINDOW, np.float32)
    found, times = [], []
    for window in samples[: len(samples) // WINDOW * WINDOW].reshape(-1, WINDOW):
        frame[:CONTEXT] = frame[-CONTEXT:]
        frame[CONTEXT:] = window
        start = perf_counter()
        found.append(float(stream.step(frame)[0]))
        times.append((perf_counter() - start) * 1e6)
    return np.array(found), np.array(times)


def draw(samples, found, path, window=WINDOW):
    """The samples and the probability of speech over time."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 3.5), layout="constrained")
    axes.plot(np.arange(len(samples)) / RATE, samples / max(np.abs(samples).max(), 1e-9), lw=0.4, color="#b8bec4")
    axes.step((np.arange(len(found)) + 1) * window / RATE, found, color="#0072B2")
    axes.set(xlabel="s", ylabel="probability of speech", ylim=(-1.05, 1.05))
    figure.savefig(path)
    plt.close(figure)


def main(arguments=None):
    parser = argparse.ArgumentParser(description="Find speech by Silero VAD.")
    parser.add_argument("file", help="silero_16k_op15.onnx")
    parser.add_argument("wav", nargs="?", help="16 kHz, 16 bits; without it espeak-ng speaks")
    parser.add_argument("--out", default="voice.png")
    given = parser.parse_args(arguments)
    if given.wav:
        samples = read_wav(given.wav, RATE)
    else:
        samples = np.concatenate([spoken("Is anybody there?"), spoken("Nobody answers.")])
    model = onnx_export.load(given.file, inputs={"sr": RATE}, dims={"sequence": CONTEXT + WINDOW})
    found, times = probabilities(model, samples)
    draw(samples, found, given.out)
    print(f"{len(found)} windows of 32 ms, speech in {np.mean(found > 0.5):.0%}; a step {np.median(times):.0f} us")
    print(given.out)


if __name__ == "__main__":
    main()
