"""Fuzz `cnorm.load` with mutated model files: the header, the configuration in it, and the tensors.

    python tests/fuzz/fuzz_model_file.py -runs=20000

Needs atheris. Only a ValueError may come out; a model that is accepted is saved, read again and stepped. A finding is
written as crash-* to the working folder and belongs into tests/rnn/test_model_files.py.
"""

import sys
import tempfile
from pathlib import Path

import atheris
import numpy as np

with atheris.instrument_imports(include=["cnorm"]):
    import cnorm

FOLDER = tempfile.TemporaryDirectory()
PATH = Path(FOLDER.name, "model.safetensors")


def models():
    """Small models of every kind of layer."""
    ones = np.ones
    rnn = {"weight_x": (2, 2), "weight_h": (2, 2), "gain": 2, "bias": 2}
    gru = {"weight_ih_l0": (6, 2), "weight_hh_l0": (6, 2), "bias_ih_l0": 6, "bias_hh_l0": 6}
    rnn, gru = ({name: ones(shape, np.float32) for name, shape in cell.items()} for cell in (rnn, gru))
    cell, gates = cnorm.RNN(rnn, preset="ba2016", eps=1e-5), cnorm.GRU(gru, preset="torch")
    yield [cnorm.Linear(ones((2, 3), np.float32)), cell, cnorm.Activation("relu")]
    yield [cnorm.Residual([gates, cnorm.LayerNorm(ones(2, np.float32), ones(2, np.float32))])]
    yield [cnorm.Bidirectional(gates, gates), cnorm.Linear(ones((1, 4), np.float32))]


def one_input(data: bytes) -> None:
    PATH.write_bytes(data)
    try:
        model = cnorm.load(PATH)
    except ValueError:
        return
    model.save(PATH)
    assert cnorm.load(PATH).identity == model.identity
    model.run(np.zeros((2, model.input_size), np.float32))


def main() -> None:
    with FOLDER, tempfile.TemporaryDirectory() as corpus:
        for i, layers in enumerate(models()):
            cnorm.Model(layers).save(Path(corpus, str(i)))
        flags = sys.argv[1:]
        if not any(flag.startswith("-runs") for flag in flags):
            flags.append("-runs=20000")
        atheris.Setup([sys.argv[0], *flags, "-max_len=4096", "-timeout=20", "-rss_limit_mb=4096", corpus], one_input)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
