"""GTCRN, suppression of noise in speech: WAV in, WAV out, a hop of 16 ms at a time.

The weights are gtcrn_simple.onnx: stream/onnx_models of github.com/Xiaobin-Rong/gtcrn (MIT). The network reads the
spectrum of 512 samples and gives that of the speech in it. (Rong et al., "GTCRN: A Speech Enhancement Model Requiring
Ultralow Computational Resources", ICASSP 2024.)

    python examples/models/denoise.py gtcrn_simple.onnx [NOISY.wav] [--out DENOISED.wav]

Without a WAV file espeak-ng speaks and white noise is added. DENOISED.png shows both spectrograms and the latency.
"""

import argparse
from pathlib import Path
from time import perf_counter

import numpy as np
from audio import read_wav, spoken, write_wav

import cnorm

RATE, BLOCK, HOP = 16000, 512, 256
TEXT = "The same bits on every machine, sixteen milliseconds at a time."


class Denoiser:
    """The network between overlapping blocks of 512 samples.

    Parameters
    ----------
    path : path-like
        gtcrn_simple.onnx, or what `cnorm import` made of it.
    """

    def __init__(self, path):
        self.stream = cnorm.load(path).stream()
        self.window = np.sqrt(np.hanning(BLOCK + 1)[:-1]).astype(np.float32)
        self.block, self.sum = np.zeros(BLOCK, np.float32), np.zeros(BLOCK, np.float32)

    def hop(self, samples):
        """The next 256 samples without noise, for the next 256 with it; 256 samples late."""
        self.block = np.concatenate([self.block[HOP:], samples])
        spectrum = np.fft.rfft(self.block * self.window)
        frame = np.stack([spectrum.real, spectrum.imag], axis=1).astype(np.float32)  # [257, 2]
        real, imaginary = self.stream.step(frame.ravel()).reshape(-1, 2).T
        speech = np.fft.irfft(real + 1j * imaginary).astype(np.float32) * self.window
        self.sum = np.concatenate([self.sum[HOP:], np.zeros(HOP, np.float32)]) + speech
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
    """Both spectrograms, and the time of a hop against the 16 ms that it has."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (before, after, latency) = plt.subplots(3, 1, figsize=(9, 9), layout="constrained")
    for axes, samples, title in (before, noisy, "in"), (after, clean, "out"):
        axes.specgram(samples + 1e-9, NFFT=BLOCK, Fs=RATE, noverlap=BLOCK - HOP, vmin=-120, vmax=-30)
        axes.set(title=title, ylabel="Hz", xlabel="s")
    latency.hist(times, bins=np.geomspace(times.min(), 16000, 120), color="#0072B2")
    latency.axvline(16000, color="black", label="16 ms: the next hop")
    latency.set(xscale="log", xlabel="microseconds a hop, the network and both transforms", ylabel="hops")
    latency.legend(frameon=False)
    figure.savefig(path)
    plt.close(figure)


def main(arguments=None):
    parser = argparse.ArgumentParser(description="Suppress noise by GTCRN.")
    parser.add_argument("model", help="gtcrn_simple.onnx, or a .cnorm file of it")
    parser.add_argument("wav", nargs="?", help="16 kHz, 16 bits; without it espeak-ng speaks")
    parser.add_argument("--out", default="denoised.wav")
    given = parser.parse_args(arguments)
    if given.wav:
        noisy = read_wav(given.wav, RATE)
    else:
        speech = spoken(TEXT)
        noisy = speech + 0.02 * np.random.default_rng(0).standard_normal(len(speech), np.float32)
    times, clean = denoise(Denoiser(given.model), noisy)
    write_wav(given.out, clean, RATE)
    draw(noisy, clean, times, Path(given.out).with_suffix(".png"))
    p50, p999 = np.quantile(times, [0.5, 0.999])
    print(f"{len(times)} hops of 16 ms: median {p50:.0f} us, 99.9 % below {p999:.0f} us")
    print(f"{given.out} and {Path(given.out).with_suffix('.png')}")


if __name__ == "__main__":
    main()
