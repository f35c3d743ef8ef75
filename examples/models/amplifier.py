"""A guitar amplifier of the Neural Amp Modeler: an LSTM that makes a step for each sample, 48,000 a second.

lstm.nam: example_models/lstm.nam of github.com/sdatkinson/NeuralAmpModelerCore (MIT). boss16.nam:
Utils/Models/BossLSTM-1x16.nam of github.com/mikeoliphant/NeuralAudio (MIT). A .nam file is JSON: for each LSTM layer
the rows [W_ih W_hh] of the gates i, f, g, o, one bias, h and c at the start; then weights and bias of the output.

    python examples/models/amplifier.py FILE.nam [GUITAR.wav] [--out AMPLIFIED.wav]

Without a WAV file (48 kHz, 16 bits) a decaying tone is amplified, 10 ms at a time, as a plug-in gets its samples. It
prints how many times faster than real time it is.
"""

import argparse
import json
from time import perf_counter

import numpy as np
from audio import read_wav, write_wav

import cnorm

RATE = 48000
BLOCK = RATE // 100


def amplifier(path):
    """The model of a .nam file.

    Raises
    ------
    ValueError
        If it holds no LSTM, or another number of weights than its sizes need.
    """
    with open(path) as file:
        content = json.load(file)
    if content.get("architecture") != "LSTM":
        raise ValueError(f"{path}: an LSTM is wanted, it has the architecture {content.get('architecture')!r}")
    config, numbers = content["config"], np.array(content["weights"], np.float32)
    inputs, units, layers, place = config["input_size"], config["hidden_size"], [], 0

    def take(*shape):
        nonlocal place
        size = int(np.prod(shape))
        if len(numbers) < place + size:
            raise ValueError(f"{path}: {len(numbers)} weights, its sizes need more")
        place += size
        return numbers[place - size : place].reshape(shape)

    for _ in range(config["num_layers"]):
        both, bias = take(4 * units, inputs + units), take(4 * units)
        tensors = {"weight_ih_l0": both[:, :inputs], "weight_hh_l0": both[:, inputs:], "bias_ih_l0": bias}
        tensors |= {"bias_hh_l0": np.zeros_like(bias), "h0": take(units), "c0": take(units)}
        layers.append(cnorm.LSTM(tensors, preset="torch"))
        inputs = units
    layers.append(cnorm.Linear(take(1, units), take(1)))
    if place != len(numbers):
        raise ValueError(f"{path}: {len(numbers)} weights, its sizes need {place}")
    return cnorm.Model(layers)


def tone(seconds=2.0):
    """A plucked string: decaying harmonics of 110 Hz."""
    t = np.arange(int(RATE * seconds)) / RATE
    return sum(0.2 / k * np.exp(-(1 + k) * t) * np.sin(2 * np.pi * 110 * k * t) for k in range(1, 8)).astype(np.float32)


def amplified(model, samples):
    """The amplified samples, and the microseconds of a sample in each block."""
    stream, y, times = model.stream(), np.empty_like(samples), []
    for begin in range(0, len(samples), BLOCK):
        block = samples[begin : begin + BLOCK, np.newaxis]
        start = perf_counter()
        y[begin : begin + BLOCK] = stream.process(block)[:, 0]
        times.append((perf_counter() - start) / len(block) * 1e6)
    return y, times


def main(arguments=None):
    parser = argparse.ArgumentParser(description="Amplify by an LSTM of the Neural Amp Modeler.")
    parser.add_argument("file", help="a .nam file of architecture LSTM")
    parser.add_argument("wav", nargs="?", help="48 kHz, 16 bits; without it a tone")
    parser.add_argument("--out", default="amplified.wav")
    given = parser.parse_args(arguments)
    samples = read_wav(given.wav, RATE) if given.wav else tone()
    y, times = amplified(amplifier(given.file), samples)
    took = float(np.median(times))
    write_wav(given.out, y, RATE)
    print(f"{took:.2f} us a sample, {1e6 / RATE / took:.0f} times faster than real time at 48 kHz")
    print(given.out)


if __name__ == "__main__":
    main()
