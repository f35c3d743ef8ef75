"""Walking policies of robots in a loop of 1 kHz: B2W (an ONNX file), Unitree G1 and H1 (TorchScript).

b2w.onnx: b2w_sim/b2w_controllers/src/policy/policy_force_new.onnx of github.com/leggedrobotics/sru-robot-deployment
(MIT). unitree_g1.pt, unitree_h1.pt: deploy/pre_train/g1/motion.pt and h1/motion.pt of
github.com/unitreerobotics/unitree_rl_gym (BSD-3-Clause). TorchScript holds code, so open only files that you trust.

    python examples/models/policy.py FILE [--seconds 5] [--weights int8] [--out LATENCY.png]

With TorchScript it also prints how many times as long `torch.jit` takes for a step, on one thread, in turns with cnorm.
The observations are random here; a robot's are joint angles, velocities and the command.
"""

import argparse
from time import perf_counter, sleep

import numpy as np

import cnorm
import onnx_export

PERIOD = 1e-3  # seconds


def policy(path):
    """The model of a policy: LSTM, then linear layers with ELU between them."""
    if not str(path).endswith(".pt"):
        return onnx_export.load(path)
    import torch

    state = torch.jit.load(path).state_dict()
    lstm = cnorm.from_torch(state, "torch", kind="LSTM", prefix="memory.")
    numbers = sorted(int(name.split(".")[1]) for name in state if name.startswith("actor.") and name.endswith("weight"))
    layers = list(lstm)
    for number in numbers:
        layers.append(cnorm.Linear(state[f"actor.{number}.weight"], state[f"actor.{number}.bias"]))
        layers.append(cnorm.Activation("elu"))
    return cnorm.Model(layers[:-1])  # the last layer's outputs are the actions


def run(model, seconds):
    """Step once a period; microseconds of each step, and of each start behind its due time."""
    stream, action = model.stream(), np.empty(model.output_size, np.float32)
    observations = np.random.default_rng(0).standard_normal((1000, model.input_size), np.float32)
    steps = int(seconds / PERIOD)
    times, late = np.empty(steps), np.empty(steps)
    begin = perf_counter() + 0.01
    for number in range(steps):
        due = begin + number * PERIOD
        while (left := due - perf_counter()) > 0:
            if left > 2e-4:
                sleep(left - 2e-4)
        start = perf_counter()
        stream.step(observations[number % 1000], out=action)
        times[number], late[number] = (perf_counter() - start) * 1e6, (start - due) * 1e6
    return times, late


def beside_torchscript(model, path, turns=40):
    """Median microseconds of a step of the model and of the file in PyTorch, 50 steps of each in turn."""
    import torch

    script, stream, action = torch.jit.load(path), model.stream(), np.empty(model.output_size, np.float32)
    frames = np.random.default_rng(0).standard_normal((50, model.input_size), np.float32)
    rows = [torch.from_numpy(frame[np.newaxis]) for frame in frames]
    threads, times = torch.get_num_threads(), ([], [])
    torch.set_num_threads(1)
    with torch.inference_mode():
        for _ in range(turns):
            for frame in frames:
                start = perf_counter()
                stream.step(frame, out=action)
                times[0].append((perf_counter() - start) * 1e6)
            for row in rows:
                start = perf_counter()
                script(row)
                times[1].append((perf_counter() - start) * 1e6)
    torch.set_num_threads(threads)
    return tuple(float(np.median(of)) for of in times)


def draw(times, late, path):
    """Histogram of the steps and of the late starts, which are the operating system's, against the period."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
    bins = np.geomspace(0.1, 1e6 * PERIOD, 100)
    axes.hist(times, bins=bins, color="#0072B2", label="a step")
    axes.hist(np.maximum(late, 0.1), bins=bins, histtype="step", color="black", label="start behind its due time")
    axes.axvline(1e6 * PERIOD, color="#D55E00", label="the period")
    axes.set(xscale="log", yscale="log", xlabel="microseconds", ylabel="steps")
    axes.legend(frameon=False)
    figure.savefig(path)
    plt.close(figure)


def main(arguments=None):
    parser = argparse.ArgumentParser(description="Step a robot's policy 1000 times a second.")
    parser.add_argument("file", help="b2w.onnx, unitree_g1.pt or unitree_h1.pt")
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--weights", default="float32", choices=["float32", "int8", "float16"])
    parser.add_argument("--out", default="latency.png")
    given = parser.parse_args(arguments)
    model = policy(given.file).with_weights(given.weights)
    print(f"{model.input_size} observations, {model.output_size} actions, {model.nbytes} bytes of weights")
    times, late = run(model, given.seconds)
    p50, p999 = np.quantile(times, [0.5, 0.999])
    print(f"{len(times)} steps: median {p50:.1f} us, 99.9 % below {p999:.1f} us, slowest {times.max():.1f} us")
    print(f"starts behind their due time: 99.9 % below {np.quantile(late, 0.999):.0f} us (operating system)")
    if given.file.endswith(".pt"):
        ours, theirs = beside_torchscript(model, given.file)
        print(f"without a pause between steps {ours:.2f} us, torch.jit {theirs / ours:.0f} times as long")
    draw(times, late, given.out)
    print(given.out)


if __name__ == "__main__":
    main()
