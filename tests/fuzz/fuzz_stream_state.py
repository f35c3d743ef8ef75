"""Fuzz `Stream.restore` with mutated saved streams, with and without a checksum that matches.

    python tests/fuzz/fuzz_stream_state.py -runs=300000

Needs atheris. Only a ValueError may come out, and the stream is then as it was; bytes that are accepted must be those
that `save` returns. A finding is written as crash-* to the working folder and belongs into
tests/rnn/test_stream_state.py.
"""

import random
import sys
import zlib

import atheris
import numpy as np

import cnorm

HEAD = 60  # bytes before the state

MODEL = cnorm.demo_model()
STREAM = MODEL.stream()
STREAM.process(np.ones((3, 12), np.float32))
SAVED = STREAM.save()


def try_to_restore(stream, data: bytes) -> None:
    before = stream.save()
    try:
        stream.restore(data)
    except ValueError:
        assert stream.save() == before
    else:
        assert stream.save() == data
        assert stream.is_finite


def one_input(data: bytes) -> None:
    """The input is a seed of random changes: the extension reports no coverage to guide libFuzzer's mutations."""
    choose = random.Random(data)
    saved = bytearray(SAVED)
    for _ in range(choose.randint(1, 4)):
        start = choose.randint(0, len(saved))
        removed = choose.choice([0, 1, 4, choose.randint(0, len(saved) - start)])
        saved[start : start + removed] = choose.randbytes(choose.choice([0, removed, choose.randint(0, 64)]))
    stream = MODEL.stream()
    try_to_restore(stream, bytes(saved))
    try_to_restore(stream, saved[:-4] + zlib.crc32(saved[:-4]).to_bytes(4, "little"))
    state = saved[HEAD:-4].ljust(len(SAVED) - HEAD - 4, b"\0")[: len(SAVED) - HEAD - 4]
    frames = bytes(saved[48:56]).ljust(8, b"\0")
    body = SAVED[:48] + frames + SAVED[56:60] + state  # all is right but frames and numbers
    try_to_restore(stream, body + zlib.crc32(body).to_bytes(4, "little"))


def main() -> None:
    flags = sys.argv[1:]
    if not any(flag.startswith("-runs") for flag in flags):
        flags.append("-runs=300000")
    atheris.Setup([sys.argv[0], *flags, "-max_len=512", "-len_control=0", "-timeout=20"], one_input)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
