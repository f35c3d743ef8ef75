"""Small ONNX files that ask for much through `onnx_export.load` in its child, each with its time and memory.

    python -P tests/fuzz/hostile_onnx.py 300 [first]

The files are those of tests/support/hostile.py. Failures are an exception that is no documented one, more than 20 s of
processor time in a child, and more than 2 GB of memory in this process or a child.
"""

import os
import resource
import sys
import tempfile
import time
from pathlib import Path

import onnx_export

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import hostile

SECONDS, MEGABYTES = 20, 2000


def peak(who):
    return resource.getrusage(who).ru_maxrss / 1024


def tried(number, folder):
    """Load a file; its kind, the outcome, the seconds. An exception that is not documented leaves this function."""
    path = Path(folder) / f"{number}.onnx"
    name, start = hostile.written(number, path), time.monotonic()
    try:
        outcome = repr(onnx_export.load(path))
    except ValueError as error:
        outcome = str(error)
    size = os.path.getsize(path)
    path.unlink()
    return name, size, " ".join(outcome.split()), time.monotonic() - start


def main():
    count, first = map(int, [*sys.argv[1:], *("300", "0")[len(sys.argv) - 1 :]])
    failures, most = 0, 0.0
    with tempfile.TemporaryDirectory() as folder:
        for number in range(first, first + count):
            before = processor_time()
            name, size, outcome, seconds = tried(number, folder)
            used, memory = processor_time() - before, peak(resource.RUSAGE_CHILDREN)
            bad = used > SECONDS or max(memory, peak(resource.RUSAGE_SELF)) > MEGABYTES
            failures, most = failures + bad, max(most, used)
            outcome = outcome.removeprefix(f"{folder}/{number}.onnx: ")[:150]
            cost = f"{seconds:5.1f} s, {used:5.1f} of a processor, so far {memory:4.0f} MB"
            print(f"{number:4} {name:10} {size:8} bytes {cost}: {outcome}", flush=True)
    print(f"{count} files, {failures} failures; a child at most {most:.1f} s and {memory:.0f} MB, ", end="")
    print(f"this process {peak(resource.RUSAGE_SELF):.0f} MB")
    sys.exit(bool(failures))


def processor_time():
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
