"""Measure the speed-up of two Python threads, each on one half of a batch, over one thread on the whole batch.

cnorm releases the GIL above 16384 elements. There the speed-up is at most 2 while the data fits the caches; beyond, the
memory bandwidth limits it.
"""

import threading
import time
from functools import partial

import numpy as np

import cnorm
import cnorm_bench as bench
from cnorm_bench.contenders.timing import empty

ROUNDS, SECONDS = 25, 0.05


def seconds_a_batch(calls, count):
    """Wall time of `count` rounds in which each call runs in a thread of its own, divided by count."""
    ready = threading.Barrier(len(calls) + 1)

    def work(call):
        ready.wait()
        for _ in range(count):
            call()

    threads = [threading.Thread(target=work, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    ready.wait()
    start = time.perf_counter()
    for thread in threads:
        thread.join()
    return (time.perf_counter() - start) / count


def main():
    print(f"cnorm {cnorm.__version__}, {cnorm.active_isa()}: layer_norm, float32, the best of {ROUNDS} rounds in turns")
    for rows, n in bench.MEAN_SHAPES:
        x, y = empty((rows, n), np.dtype(np.float32)), empty((rows, n), np.dtype(np.float32))
        x[:] = np.random.default_rng(0).standard_normal((rows, n), np.float32)
        weight, bias = np.ones(n, np.float32), np.zeros(n, np.float32)
        parts = slice(None), slice(0, rows // 2), slice(rows // 2, None)
        whole, *halves = [partial(cnorm.layer_norm, x[part], weight, bias, out=y[part]) for part in parts]
        count = max(1, round(SECONDS / seconds_a_batch([whole], 1)))
        times = np.array([[seconds_a_batch(calls, count) for calls in ([whole], halves)] for _ in range(ROUNDS)])
        one, two = times.min(axis=0) * 1e6
        print(f"{rows:>6}x{n:<5} one thread {one:9.1f} us, two {two:9.1f} us, speed-up {one / two:.2f}", flush=True)


if __name__ == "__main__":
    main()
