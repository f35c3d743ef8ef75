"""Examine the corpus's sound files with many seeds and sizes: each run must exit with 0. Minutes.

    PYTHONPATH=tests/support python -P -m corpus.sound_files [--runs 1000]

Transformers get realistic inputs, other files made-up ones. Prints runs that exit otherwise, and the number of all.
"""

import argparse
import itertools
import sys
import tempfile
from collections import Counter
from pathlib import Path

from corpus import archive, make_jax, make_keras, make_paddle, make_pytorch
from corpus.sound_transformers import SIZES, examined

from onnx_export.validation.examine import examine
from onnx_export.validation.options import Options

SCRIPTS = {"pytorch": make_pytorch, "keras": make_keras, "jax": make_jax, "paddle": make_paddle}
UNSOUND = {("paddle", "layer_two_axes")}  # a scale of one axis for a norm over two, as exported


def sound_files():
    """(exporter, name, bytes) of each file with a norm and without a near miss."""
    for name, data in archive.read("transformers").items():
        yield "transformers", name, data
    for exporter, script in SCRIPTS.items():
        for name, data in archive.read(exporter).items():
            form = name.partition("@")[0]
            found = script.FORMS[form]
            if found and not any(each.startswith("~") for each in found) and (exporter, form) not in UNSOUND:
                yield exporter, name, data


def runs(most):
    """(exporter, name, bytes, seed, size): the transformers with each seed and size, then every file by turns."""
    files = list(sound_files())
    first = [each for each in files if each[0] == "transformers"]
    some = [(*file, seed, size) for seed, size, file in itertools.product(range(21), SIZES, first)]
    others = [each for each in files if each[0] != "transformers"]
    tried = ((*file, seed, SIZES[seed % len(SIZES)]) for seed in itertools.count() for file in others)
    return [*some[: most // 2], *itertools.islice(tried, most - len(some[: most // 2]))]


def main(arguments=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=1000)
    codes = Counter()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        for exporter, name, data, seed, size in runs(parser.parse_args(arguments).runs):
            path.write_bytes(data)
            if exporter == "transformers":
                report = examined(path, name.partition("@")[0], seed, size, folder)
            else:
                report = examine(str(path), Options(seed=seed, batch=size[0], dim=size[1]), lambda *_: None)
            codes[report.exit_code()] += 1
            if not report.ok:
                print(exporter, name, seed, size, report.conclusion(), flush=True)
    print(f"{sum(codes.values())} runs, by exit code {dict(codes)}")
    return codes.keys() != {0}


if __name__ == "__main__":
    sys.exit(main())
