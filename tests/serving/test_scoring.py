"""`cnorm.scoring`: order, bad recordings, memory and interruption, on threads and processes."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor, ThreadPoolExecutor

import numpy as np
import pytest

import cnorm
from cnorm.scoring import in_order, score


@pytest.fixture(scope="module")
def model():
    return cnorm.demo_model()


@pytest.fixture(scope="module")
def processes():
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as executor:
        yield executor


def recordings(count):
    rng = np.random.default_rng(0)
    return [rng.standard_normal((int(rng.integers(0, 30)), 12), np.float32) for _ in range(count)]


@pytest.mark.parametrize("kind", ["none", "threads", "processes", "path in processes"])
def test_order_and_bits(model, kind, tmp_path, request):
    x = recordings(50)
    x[7] = np.zeros((3, 11), np.float32)
    x[20] = np.zeros((3, 12))
    x[33] = "a name"
    executor = request.getfixturevalue("processes") if "processes" in kind else None
    executor = ThreadPoolExecutor(3) if kind == "threads" else executor
    given = model
    if kind == "path in processes":
        given = tmp_path / "model.safetensors"
        model.save(given)
    rows = list(score(given, x, executor, chunk=4))
    assert [row.index for row in rows] == list(range(50))
    assert [row.index for row in rows if row.error] == [7, 20, 33]
    assert "(steps, 12)" in rows[7].error
    assert "float32" in rows[20].error
    assert rows[33].y is None
    for row, one in zip(rows, x, strict=True):
        if not row.error:
            assert row.y.tobytes() == model.run(one).tobytes()


def test_a_model_that_cannot_be_loaded_is_an_error_of_each_row(tmp_path):
    rows = list(score(tmp_path / "none.safetensors", recordings(3), chunk=2))
    assert [row.index for row in rows] == [0, 1, 2]
    assert all("none.safetensors" in row.error for row in rows)


class Losing(ThreadPoolExecutor):
    """An executor that loses the result of every second task, as Dask's can when a worker is killed."""

    submitted = 0

    def submit(self, call, chunk):
        self.submitted += 1
        return super().submit(call if self.submitted % 2 else int, chunk)


def test_the_rows_of_a_task_that_was_lost_are_calculated_again(model):
    x = recordings(30)
    with Losing(2) as executor:
        rows = list(score(model, x, executor, chunk=4, pending=1))
    assert executor.submitted > 8
    assert [row.index for row in rows if row.error] == []
    for row, one in zip(rows, x, strict=True):
        assert row.y.tobytes() == model.run(one).tobytes()


@pytest.mark.parametrize("result", [[], ["one"], [1] * 4, "four", None])
def test_an_executor_that_returns_something_else_is_an_error(model, result):
    class Other(ThreadPoolExecutor):
        def submit(self, call, chunk):
            return super().submit(lambda: result)

    with Other(1) as executor, pytest.raises(ValueError, match="a list of 4 arrays or texts, got"):
        list(score(model, recordings(8), executor, chunk=4))


def test_recordings_are_read_only_as_far_as_needed(model):
    taken = [0]

    def endless():
        while True:
            taken[0] += 1
            yield np.zeros((2, 12), np.float32)

    with ThreadPoolExecutor(2) as executor:
        rows = score(model, endless(), executor, chunk=5, pending=3)
        for done in range(1, 41):
            next(rows)
            assert taken[0] <= done + 3 * 5 + 5
        rows.close()
    with pytest.raises(ValueError, match="at least 1"):
        score(model, [], chunk=0)


def test_what_is_pending_is_cancelled_when_the_caller_stops():
    started, go = [], threading.Event()

    def call(item):
        started.append(item)
        if item:
            go.wait(10)

    with ThreadPoolExecutor(1) as executor:
        outcomes = in_order(call, range(100), executor, pending=10)
        next(outcomes)
        outcomes.close()
        go.set()
    assert len(started) <= 3


def test_a_lost_worker_ends_the_loop_with_the_outcomes_before_it():
    done = []

    def run(executor):
        for outcome in in_order(exec, ["0", "1", "import os; os._exit(1)", "3"], executor, pending=1):
            done.append(outcome.error)

    with (
        ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as executor,
        pytest.raises(BrokenExecutor),
    ):
        run(executor)
    assert done == [None, None]


INTERRUPTED = """
import signal, sys, time, numpy as np, cnorm
from concurrent.futures import ProcessPoolExecutor
from cnorm.scoring import score

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may start background jobs without it

def recordings():
    for k in range(100_000):
        yield np.full((3, 12), k, np.float32)

if __name__ == "__main__":
    rows = []
    with ProcessPoolExecutor(2) as executor:
        try:
            for row in score(cnorm.demo_model(), recordings(), executor, chunk=2):
                rows.append(row.index)
                if len(rows) == 20:
                    print("ready", flush=True)
                time.sleep(0.01)
        except KeyboardInterrupt:
            executor.shutdown(cancel_futures=True)
    print(rows == list(range(len(rows))), len(rows) >= 20, len(rows) < 100_000)
"""


def test_ctrl_c_keeps_what_is_done(tmp_path):
    (tmp_path / "script.py").write_text(INTERRUPTED)
    with subprocess.Popen(
        [sys.executable, "-P", tmp_path / "script.py"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        start_new_session=True,
    ) as process:  # fmt: skip
        assert process.stdout.readline() == "ready\n"
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the processes of the pool, too
        end = time.monotonic() + 60
        assert process.stdout.read() == "True True True\n"
        assert time.monotonic() < end


@pytest.mark.parametrize("threads", [0, 2])
def test_rows_before_an_error_of_the_generator_are_not_lost(threads):
    def recordings():
        for _ in range(7):
            yield np.ones((5, 12), np.float32)
        raise OSError("the disk is gone")

    rows = []
    with ThreadPoolExecutor(threads or 1) as executor:
        scored = score(cnorm.demo_model(), recordings(), executor if threads else None, chunk=2, pending=8)
        with pytest.raises(OSError, match="the disk is gone"):
            rows.extend(scored)
    assert [row.index for row in rows] == list(range(7))
    assert not any(row.error for row in rows)
