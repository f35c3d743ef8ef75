"""Processor time of the validator: the files of the corpus, and their copies by optimisers and converters.

    .venv/bin/python -P benchmarks/copies.py [--every 5]

One examination of each file in this process, sources and copies in turns. `of the sources`: the copies' time over that
of the files that they are copies of; a copy has about as many nodes as its source.
"""

import argparse
import collections
import sys
import tempfile
import time
from pathlib import Path

import onnx
from onnxruntime.transformers.float16 import convert_float_to_float16

from onnx_export.model_io import Limits, parse
from onnx_export.validation.examine import examine
from onnx_export.validation.options import Options

sys.path[:0] = [str(Path(__file__).parents[1] / "tests" / name) for name in ("support", "onnx_export", "validator")]

from corpus import archive  # noqa: E402  (after the path is set)
from writings import LEVELS, saved  # noqa: E402

EXPORTERS = ("pytorch", "keras", "jax", "paddle", "transformers")


def copies(data, folder):
    """(kind, model) for each copy that can be made."""
    for level in LEVELS:
        if level != "none":
            yield f"onnxruntime, {level}", saved(parse(data, Limits()), level, folder)
    yield "float16", convert_float_to_float16(parse(data, Limits()), keep_io_types=True)
    try:
        import onnxsim
    except ImportError:
        return
    yield "simplified", onnxsim.simplify(parse(data, Limits()))[0]


def seconds(model, path):
    onnx.save(model, path)
    start = time.process_time()
    examine(str(path), Options(), lambda *_: None)
    return time.process_time() - start


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--every", type=int, default=5, help="one of so many files")
    every = parser.parse_args().every
    total, sources, files, slowest = (collections.Counter() for _ in range(4))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        for exporter in EXPORTERS:
            for data in list(archive.read(exporter).values())[::every]:
                of_source = seconds(parse(data, Limits()), path)
                for kind, model in copies(data, Path(folder)):
                    taken = seconds(model, path)
                    total[kind] += taken
                    sources[kind] += of_source
                    files[kind] += 1
                    slowest[kind] = max(slowest[kind], taken)
    print(f"{'copies':24}{'files':>7}{'s':>9}{'of the sources':>16}{'slowest, s':>12}")
    for kind, taken in total.items():
        print(f"{kind:24}{files[kind]:7}{taken:9.2f}{taken / sources[kind]:16.2f}{slowest[kind]:12.2f}")


if __name__ == "__main__":
    main()
