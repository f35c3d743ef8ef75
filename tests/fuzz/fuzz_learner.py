"""Fuzz `Learner.restore` with mutated saves, with and without a checksum that matches.

    python tests/fuzz/fuzz_learner.py -runs=100000

Needs atheris. Only a ValueError may come out. A save whose checksum does not match is refused; one that is accepted
takes no more memory than a few times its size, and its learner can be saved and go on. A finding is written as crash-*
to the working folder and belongs into tests/train/test_learner.py.
"""

import json
import random
import sys
import zlib

import atheris
import numpy as np
import safetensors.numpy

import cnorm
from cnorm.learner import HEAD, SAVED

RNG = np.random.default_rng(0)
WEIGHTS = {"weight_ih_l0": (12, 3), "weight_hh_l0": (12, 4), "bias_ih_l0": (12,), "bias_hh_l0": (12,)}
CELLS = cnorm.from_torch({name: RNG.standard_normal(s).astype("f") for name, s in WEIGHTS.items()}, "torch", kind="GRU")
MODEL = cnorm.Model([*CELLS, cnorm.Activation("tanh")])
LEARNER = cnorm.Learner(MODEL, cnorm.Adam(1e-2), truncate=2)
for _ in range(3):
    LEARNER.step(np.ones(3, np.float32))
LEARNER.learn(np.ones(4, np.float32))
LEARNER.step(np.ones(3, np.float32))
BYTES = LEARNER.save()
TENSORS = safetensors.numpy.load(BYTES[len(HEAD) : -4])
VALUES = [None, True, -1, 0, 1, 3, 10**7, 2**63, 1e308, "", "Adam", "SGD", "nan", [], ["0x1p-1"], {}, {"lr": 1.0}]


def checksummed(body: bytes) -> bytes:
    return body + zlib.crc32(body).to_bytes(4, "little")


def try_to_restore(saved: bytes) -> None:
    try:
        learner = cnorm.Learner.restore(saved)
    except ValueError:
        return
    assert saved[: len(HEAD)] == HEAD
    assert saved == checksummed(saved[:-4])
    assert cnorm.Learner.restore(learner.save()).save() == learner.save()
    learner.step(np.ones(learner.input_size, np.float32))


def changed_settings(choose) -> dict:
    """The settings with one to three values replaced."""
    start = len(HEAD) + 8
    header = json.loads(BYTES[start : start + int.from_bytes(BYTES[len(HEAD) : start], "little")])
    settings = json.loads(header["__metadata__"][SAVED])
    for _ in range(choose.randint(1, 3)):
        settings[choose.choice(list(settings))] = choose.choice(VALUES)
    return settings


def changed_tensors(choose) -> dict:
    """The tensors with at most one lost, cut, grown or of another dtype."""
    tensors, name = dict(TENSORS), choose.choice(list(TENSORS))
    match choose.randint(0, 5):
        case 0:
            del tensors[name]
        case 1:
            tensors[name] = tensors[name][: choose.randint(0, 2)].copy()
        case 2:
            tensors[name] = np.zeros(choose.choice([0, 1, 3, 4096]), choose.choice(["f4", "f8", "i1"]))
    return tensors


def one_input(data: bytes) -> None:
    """The input is a seed of random changes: the extension reports no coverage to guide libFuzzer's mutations."""
    choose = random.Random(data)
    saved = bytearray(BYTES)
    for _ in range(choose.randint(1, 4)):
        start = choose.randint(0, len(saved))
        removed = choose.choice([0, 1, 4, choose.randint(0, len(saved) - start)])
        saved[start : start + removed] = choose.randbytes(choose.choice([0, removed, choose.randint(0, 64)]))
    try_to_restore(bytes(saved))
    try_to_restore(checksummed(bytes(saved[:-4])))
    body = safetensors.numpy.save(changed_tensors(choose), {SAVED: json.dumps(changed_settings(choose))})
    try_to_restore(checksummed(HEAD + body))


def main() -> None:
    flags = sys.argv[1:]
    if not any(flag.startswith("-runs") for flag in flags):
        flags.append("-runs=100000")
    atheris.Setup([sys.argv[0], *flags, "-max_len=512", "-len_control=0", "-timeout=20"], one_input)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
