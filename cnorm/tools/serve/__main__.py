"""A worker process, started by `supervisor`: ``python -m cnorm.tools.serve``, its job as a line of JSON on stdin."""

import json
import os
import sys

import cnorm
from cnorm.tools.serve import Options
from cnorm.tools.serve.logs import log_to_stderr
from cnorm.tools.serve.worker import run_worker


def main() -> None:
    line = bytearray()
    while not line.endswith(b"\n"):  # not through sys.stdin, which would read ahead
        line += os.read(0, 65536) or sys.exit(2)
    job = json.loads(line)
    options = Options(**job["options"])
    log_to_stderr(f"worker {job['index']}")
    try:
        model = cnorm.load(options.model) if options.model else cnorm.demo_model()
        run_worker(model, options, job["index"])
    except (OSError, TypeError, ValueError) as error:
        print(f"Error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
