"""Fuzz the validator's loader, structure checks, pattern finder and lints with mutated models.

    python tests/fuzz/fuzz_onnx_loader.py -runs=20000

Needs atheris. Only `Refused` and `Unreadable` may come out of the loader, and nothing out of the rest.
Without -runs it stops after 20000; libFuzzer's other flags work too. A finding is written as crash-* to the
working folder and belongs into tests/validator/test_hostile.py.
"""

import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import atheris

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1] / "support")]

with atheris.instrument_imports(include=["onnx_export"]):
    from onnx_export import model_io, nodes
    from onnx_export.validation import lint, patterns

import gallery  # noqa: E402  (after the path is set)

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
    for norm in patterns.find(model):
        list(lint.lint_norm(norm))


def main() -> None:
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
