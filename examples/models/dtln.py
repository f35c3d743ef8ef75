"""DTLN, noise suppression of speech: WAV in, WAV out, a hop of 8 ms at a time.

The weights are dtln_1.onnx and dtln_2.onnx: pretrained_model/model_1.onnx and model_2.onnx of github.com/breizhn/DTLN
(MIT). The first network gives a mask for the magnitudes of the spectrum of 512 samples, the second filters the samples
themselves. (Westhausen and Meyer, "Dual-Signal Transformation LSTM Network for Real-Time Noise Suppression",
arXiv:2005.07551.)

    python examples/models/dtln.py FOLDER [NOISY.wav] [--weights int8] [--out DENOISED.wav]

Without a WAV file espeak-ng speaks and white noise is added. DENOISED.png shows both spectrograms and the latency.
"""

import argparse
from pathlib import Path
from time import perf_counter

import numpy as np
from audio import read_wav, spoken, write_wav

import onnx_export

RATE, BLOCK, HOP = 16000, 512, 128
TEXT = "The same bits on every machine, eight milliseconds at a time."


class Denoiser:
    """The two networks and the overlapping blocks between them.

    Parameters
    ----------
    folder : path-like
        With dtln_1.onnx and dtln_2.onnx.
    weights : {"float32", "int8", "float16"}
    """

    def __init__(self, folder, weights="float32"):
        models = [onnx_export.load(Path(folder, f"dtln_{number}.onnx")) for number in (1, 2)]
        self.mask, self.filter = (model.with_weights(weights).stream() for model in models)
        self.block, self.sum = np.zeros(BLOCK, np.float32), np.zeros(BLOCK, np.float32)

    def hop(self, samples):
        """The next 128 samples without noise, for the next 128 with it; 384 samples late."""
        self.block = np.concatenate([self.block[HOP:], samples])
        spectrum = np.fft.rfft(self.block)
        mask = self.mask.step(np.abs(spectrum).astype(np.float32))
        estimate = np.fft.irfft(spectrum * mask).astype(np.float32)
        self.sum = np.concatenate([self.sum[HOP:], np.zeros(HOP, np.float32)]) + self.filter.step(estimate)
        return self.sum[:HOP].copy()


def denoise(denoiser, noisy):
    """Microseconds of each hop, and the samples without noise, moved back by the delay."""
    hops = noisy[: len(noisy) // HOP * HOP].reshape(-1, HOP)
    clean, times = np.empty_like(hops), []
    for out, samples in zip(clean, hops, strict=True):
        start = perf_counter()
        out[:] = denoiser.hop(samples)
        times.append((perf_counter() - start) * 1e6)
    return np.array(times), clean.ravel()[BLOCK - HOP :]


def draw(noisy, clean, times, path):
    """Both spectrograms, and the time of a hop against the 8 ms that it has."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (before, after, latency) = plt.subplots(3, 1, figsize=(9, 9), layout="constrained")
    for axes, samples, title in (before, noisy, "in"), (after, clean, "out"):
        axes.specgram(samples + 1e-9, NFFT=BLOCK, Fs=RATE, noverlap=BLOCK - HOP, vmin=-120, vmax=-30)
        axes.set(title=title, ylabel="Hz", xlabel="s")
    latency.hist(times, bins=np.geomspace(times.min(), 8000, 120), color="#0072B2")
    latency.axvline(8000, color="black", label="8 ms: the next hop")
    latency.set(xscale="log", xlabel="microseconds a hop, both networks and the transforms", ylabel="hops")
    latency.legend(frameon=False)
    figure.savefig(path)
    plt.close(figure)


def main(arguments=None):
    parser = argparse.ArgumentParser(description="Suppress noise by DTLN.")
    parser.add_argument("folder", help="of dtln_1.onnx and dtln_2.onnx")
    parser.add_argument("wav", nargs="?", help="16 kHz, 16 bits; without it espeak-ng speaks")
    parser.add_argument("--weights", default="float32", choices=["float32", "int8", "float16"])
    parser.add_argument("--out", default="denoised.wav")
    given = parser.parse_args(arguments)
    if given.wav:
        noisy = read_wav(given.wav, RATE)
    else:
        speech = spoken(TEXT)
        noise = np.random.default_rng(0).standard_normal(len(speech), np.float32)
        noisy = speech + 0.02 * noise
    times, clean = denoise(Denoiser(given.folder, given.weights), noisy)
    write_wav(given.out, clean, RATE)
    draw(noisy, clean, times, Path(given.out).with_suffix(".png"))
    p50, p999 = np.quantile(times, [0.5, 0.999])
    print(f"{len(times)} hops of 8 ms: median {p50:.0f} us, 99.9 % below {p999:.0f} us")
    print(f"{given.out} and {Path(given.out).with_suffix('.png')}")


if __name__ == "__main__":
    main()
