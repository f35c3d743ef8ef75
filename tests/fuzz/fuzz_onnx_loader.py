"""Fuzz the validator's loader, structure checks, pattern finder and lints with mutated models.

    python tests/fuzz/fuzz_onnx_loader.py -runs=20000

Only `Refused` and `Unreadable` may come out of the loader, and nothing out of the rest. One input in _EXAMINED is
examined as a whole, with onnxruntime: a file that does not load must not have exit code 0. Without -runs it stops after
20000; libFuzzer's other flags work too. A finding is written as crash-* to the working folder and belongs into
tests/validator/test_hostile.py. Without atheris a plain mutator changes bytes at random, unguided.
"""

import random
import sys
import tempfile
import zlib
from contextlib import nullcontext, suppress
from pathlib import Path

try:
    import atheris
except ImportError:
    atheris = None

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1] / "support")]

with atheris.instrument_imports(include=["onnx_export"]) if atheris else nullcontext():
    from onnx_export import model_io, nodes, ort
    from onnx_export.validation import lint, patterns, validate
    from onnx_export.validation.expanded import expanded

import gallery  # noqa: E402  (after the path is set)

_EXAMINED = 50
LIMITS = model_io.Limits(file_bytes=2**20, tensor_bytes=2**20, nodes=2000)


def one_input(data: bytes) -> None:
    try:
        model = model_io.parse(data, LIMITS)
    except (model_io.Refused, model_io.Unreadable):
        return
    with suppress(model_io.Refused, model_io.Unreadable):
        model_io.attach_external_data(model, Path("/nonexistent"), "/nonexistent")
    with suppress(model_io.Unreadable):
        nodes.sort_nodes(model)
    floats = expanded(model)
    for norm in [*patterns.find(model), *(patterns.find(floats) if floats else [])]:
        list(lint.lint_norm(norm))
    list(lint.lint_model(model))
    if zlib.crc32(data) % _EXAMINED == 0:
        passes_only_if_it_loads(data, model)


def passes_only_if_it_loads(data: bytes, model) -> None:
    """A child process does this for users, because a mutated file may bring onnxruntime down."""
    with tempfile.NamedTemporaryFile(suffix=".onnx") as file:
        file.write(data)
        file.flush()
        code = validate(file.name, limits=LIMITS, timeout=60.0).exit_code()
    if code == 0:
        ort.Session(model, "off")


def mutated(data: bytes, rng: random.Random) -> bytes:
    """Up to eight bytes changed, removed, repeated or swapped for those of a name that nodes use."""
    changed = bytearray(data)
    for _ in range(rng.randint(1, 8)):
        at = rng.randrange(len(changed) or 1)
        kind = rng.randrange(4)
        if kind == 0:
            changed[at : at + 1] = bytes([rng.randrange(256)])
        elif kind == 1:
            del changed[at : at + rng.randint(1, 4)]
        elif kind == 2:
            changed[at:at] = changed[at : at + rng.randint(1, 16)]
        else:
            other = rng.randrange(len(changed) or 1)
            changed[at : at + 4], changed[other : other + 4] = changed[other : other + 4], changed[at : at + 4]
    return bytes(changed)


def unguided(runs: int) -> None:
    """Mutate the gallery at random; the input of a failure is written as crash-random."""
    seeds, rng = [build().model.SerializeToString() for build in gallery.SPECIMENS], random.Random(0)
    for _ in range(runs):
        data = mutated(rng.choice(seeds), rng)
        try:
            one_input(data)
        except Exception:
            Path("crash-random").write_bytes(data)
            raise
    print(f"{runs} inputs, no failure")


def main() -> None:
    if atheris is None:
        given = [flag.partition("=")[2] for flag in sys.argv[1:] if flag.startswith("-runs=")]
        unguided(int(given[0]) if given else 20000)
        return
    with tempfile.TemporaryDirectory() as corpus:
        for build in gallery.SPECIMENS:
            (Path(corpus) / build.__name__).write_bytes(build().model.SerializeToString())
        flags = sys.argv[1:]
        if not any(flag.startswith("-runs") for flag in flags):
            flags.append("-runs=20000")
        atheris.Setup([sys.argv[0], *flags, "-max_len=8192", "-timeout=20", corpus], one_input)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
