"""A world model's recurrent state: the layer-normalised GRU of DreamerV3 in PyTorch, one step at a time.

The layers of networks.py of github.com/NM512/dreamerv3-torch: a linear layer, layer norm and SiLU for the action and
the stochastic state, the GRU, and the logits of the next stochastic state. No weights are published there, so they are
random here; with a checkpoint, pass its tensors under the same names. The next input is sampled from the outputs, so a
step can't wait for a batch.

    python examples/models/world_model.py [--steps 2000] [--weights int8]
"""

import argparse
from time import perf_counter

import numpy as np

import cnorm

CLASSES, CATEGORIES, ACTIONS, HIDDEN, UNITS = 32, 32, 6, 512, 512
STOCHASTIC = CLASSES * CATEGORIES


def world_model(rng):
    """[STOCHASTIC + ACTIONS] to the logits [STOCHASTIC]."""

    def matrix(rows, columns):
        return (rng.standard_normal((rows, columns)) / np.sqrt(columns)).astype(np.float32)

    def norm(units):
        return cnorm.LayerNorm(np.ones(units, np.float32), np.zeros(units, np.float32), eps=1e-3)

    gru = {
        "layers.GRU_linear.weight": matrix(3 * UNITS, HIDDEN + UNITS),
        "layers.GRU_norm.weight": np.ones(3 * UNITS, np.float32),
        "layers.GRU_norm.bias": np.zeros(3 * UNITS, np.float32),
    }
    return cnorm.Model(
        [
            cnorm.Linear(matrix(HIDDEN, STOCHASTIC + ACTIONS)),
            norm(HIDDEN),
            cnorm.Activation("silu"),
            cnorm.GRU(gru, preset="dreamer_torch"),
            cnorm.Linear(matrix(HIDDEN, UNITS)),
            norm(HIDDEN),
            cnorm.Activation("silu"),
            cnorm.Linear(matrix(STOCHASTIC, HIDDEN), np.zeros(STOCHASTIC, np.float32)),
        ]
    )


def imagine(stream, steps, rng):
    """Roll the model forward on samples of its own outputs; microseconds of each step of the networks."""
    x, logits = np.zeros(STOCHASTIC + ACTIONS, np.float32), np.empty(STOCHASTIC, np.float32)
    times = []
    for _ in range(steps):
        start = perf_counter()
        stream.step(x, out=logits)
        times.append((perf_counter() - start) * 1e6)
        noisy = logits.reshape(CLASSES, CATEGORIES) + rng.gumbel(size=(CLASSES, CATEGORIES))
        x[:] = 0
        x[np.arange(CLASSES) * CATEGORIES + noisy.argmax(axis=1)] = 1
        x[STOCHASTIC + rng.integers(ACTIONS)] = 1
    return np.array(times)


def main(arguments=None):
    parser = argparse.ArgumentParser(description="Roll a world model forward.")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--weights", default="float32", choices=["float32", "int8", "float16"])
    given = parser.parse_args(arguments)
    rng = np.random.default_rng(0)
    model = world_model(rng).with_weights(given.weights)
    times = imagine(model.stream(), given.steps, rng)
    p50, p999 = np.quantile(times, [0.5, 0.999])
    print(f"{model.nbytes / 1e6:.1f} MB of weights: a step {p50:.0f} us, 99.9 % below {p999:.0f} us")


if __name__ == "__main__":
    main()
