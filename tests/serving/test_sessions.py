"""Sessions: after loss, eviction or hand-over the outputs are bit-identical to an uninterrupted run."""

import sys
import threading
import time
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

import cnorm
from cnorm.serving import Checkpoint, Misplaced, SessionLimit, Sessions, UnknownSession

KEY = bytes(range(32))
NAMES = ("a", "b", "c")


@pytest.fixture(scope="module")
def model():
    return cnorm.demo_model()


def frames_of(name, first, count):
    """Frames of a session, a function of its name and their number, so that resent frames are the same."""
    rows = [np.random.default_rng([ord(name), k]).standard_normal(12, np.float32) for k in range(first, first + count)]
    return np.array(rows, np.float32).reshape(count, 12)


class Failover(RuleBasedStateMachine):
    """Two workers, and a sender that keeps each session's last checkpoint and knows how many outputs it has."""

    def __init__(self):
        super().__init__()
        self.model = cnorm.demo_model()
        self.now = 0.0
        self.workers = [self.worker(), self.worker()]
        self.place, self.kept, self.outputs = {}, {}, {}
        self.straight = {}

    def worker(self):
        return Sessions(self.model, limit=len(NAMES), idle=10.0, clock=lambda: self.now)

    @rule(name=st.sampled_from(NAMES), worker=st.integers(0, 1))
    def open(self, name, worker):
        if name in self.outputs:
            return
        self.workers[worker].open(name)
        self.place[name], self.outputs[name] = worker, []
        self.kept[name] = self.workers[worker].checkpoint(name)
        self.straight[name] = self.model.stream()

    def there(self, name):
        """The worker of a session; if it has lost the session, it adopts the last checkpoint and replays the frames."""
        worker = self.workers[self.place[name]]
        if name not in worker:
            worker.adopt(Checkpoint.unsealed(self.kept[name].sealed(KEY), KEY))
            first = self.kept[name].frames
            again = worker.process(name, first, frames_of(name, first, len(self.outputs[name]) - first))
            assert again.tobytes() == b"".join(self.outputs[name][first:])
        return worker

    def took(self, name, y):
        first = len(self.outputs[name])
        expected = self.straight[name].process(frames_of(name, first, len(y)))
        assert y.tobytes() == expected.tobytes()
        self.outputs[name].extend(row.tobytes() for row in y)

    @precondition(lambda self: self.outputs)
    @rule(data=st.data(), count=st.integers(0, 5))
    def process(self, data, count):
        name = data.draw(st.sampled_from(sorted(self.outputs)))
        first = len(self.outputs[name])
        self.took(name, self.there(name).process(name, first, frames_of(name, first, count)))

    @precondition(lambda self: self.outputs)
    @rule(counts=st.lists(st.integers(1, 3), min_size=len(NAMES), max_size=len(NAMES)))
    def process_many(self, counts):
        for place, worker in enumerate(self.workers):
            names = [name for name in self.outputs if self.place[name] == place]
            for name in names:
                self.there(name)
            firsts = [len(self.outputs[name]) for name in names]
            requests = [
                (name, first, frames_of(name, first, count))
                for name, first, count in zip(names, firsts, counts, strict=False)
            ]
            for name, y in zip(names, worker.process_many(requests), strict=True):
                self.took(name, y)

    @precondition(lambda self: self.outputs)
    @rule(data=st.data())
    def checkpoint(self, data):
        name = data.draw(st.sampled_from(sorted(self.outputs)))
        self.kept[name] = self.there(name).checkpoint(name)

    @precondition(lambda self: self.outputs)
    @rule(data=st.data())
    def hand_over(self, data):
        name = data.draw(st.sampled_from(sorted(self.outputs)))
        self.kept[name] = self.there(name).export(name)
        self.place[name] = 1 - self.place[name]

    @rule(worker=st.integers(0, 1))
    def kill(self, worker):
        self.workers[worker] = self.worker()

    @rule(worker=st.integers(0, 1))
    def drain_and_restart(self, worker):
        for checkpoint in self.workers[worker].drain():
            self.kept[checkpoint.session] = checkpoint
        with pytest.raises(SessionLimit, match="drained"):
            self.workers[worker].open("d")
        self.workers[worker] = self.worker()

    @rule(seconds=st.sampled_from([1.0, 11.0]))
    def wait(self, seconds):
        self.now += seconds
        for worker in self.workers:
            for checkpoint in worker.evict():
                self.kept[checkpoint.session] = checkpoint

    @invariant()
    def a_session_is_nowhere_twice(self):
        for name in self.outputs:
            assert name not in self.workers[1 - self.place[name]]


def test_any_interleaving_has_the_bits_of_one_run():
    run_state_machine_as_test(Failover, settings=settings(max_examples=60, stateful_step_count=40, deadline=None))


def test_sessions_ready_together_have_the_bits_of_each_alone(model):
    sessions = Sessions(model)
    names = "abcdef"
    for name in names:
        sessions.open(name)
    lengths = [3, 3, 1, 3, 2, 0]
    requests = [(name, 0, frames_of(name, 0, n)) for name, n in zip(names, lengths, strict=True)]
    requests.append(("a", 3, frames_of("a", 3, 2)))  # a session's second request
    for (name, first, x), y in zip(requests, sessions.process_many(requests), strict=True):
        stream = model.stream()
        stream.process(frames_of(name, 0, first))
        assert y.tobytes() == stream.process(x).tobytes()


def test_a_bad_request_affects_only_its_own_session(model):
    sessions = Sessions(model)
    for name in "abc":
        sessions.open(name)
    bad = frames_of("b", 0, 2)
    bad[1, 3] = np.nan
    good = frames_of("a", 0, 2)
    results = sessions.process_many(
        [("a", 0, good), ("b", 0, bad), ("c", 7, good), ("x", 0, good), ("a", 2, good[:, :5])]
    )
    assert results[0].shape == (2, 9)
    assert [type(r) for r in results[1:]] == [ValueError, Misplaced, UnknownSession, ValueError]
    assert "finite" in str(results[1])
    assert results[2].frames == 0
    assert [sessions.checkpoint(name).frames for name in "abc"] == [2, 0, 0]


class Unreadable:
    """Frames whose conversion to an array fails with an exception that no result stands for."""

    def __array__(self, dtype=None, copy=None):
        raise RuntimeError("requires grad")


def test_an_unexpected_error_leaves_no_session_locked(model):
    sessions = Sessions(model)
    for name in "ab":
        sessions.open(name)
    with pytest.raises(RuntimeError, match="requires grad"):
        sessions.process_many([("a", 0, frames_of("a", 0, 1)), ("b", 0, Unreadable())])
    outputs = []
    other = threading.Thread(target=lambda: outputs.append(sessions.process("a", 0, frames_of("a", 0, 1))), daemon=True)
    other.start()
    other.join(30)
    assert len(outputs) == 1


def test_rejects_frames_out_of_sequence(model):
    sessions = Sessions(model)
    sessions.open("a")
    sessions.process("a", 0, frames_of("a", 0, 4))
    for first in (0, 3, 5, -1):
        with pytest.raises(Misplaced, match="is at frame 4") as caught:
            sessions.process("a", first, frames_of("a", 0, 1))
        assert caught.value.frames == 4
    assert sessions.checkpoint("a").frames == 4


def test_limits_and_names(model):
    sessions = Sessions(model, limit=2)
    sessions.open("a")
    sessions.open("b")
    with pytest.raises(SessionLimit, match="2 sessions"):
        sessions.open("c")
    with pytest.raises(ValueError, match="'a' is open"):
        sessions.open("a")
    with pytest.raises(ValueError, match="1 to 256 bytes"):
        sessions.open("")
    with pytest.raises(TypeError, match="session must be a str"):
        sessions.open(5)
    with pytest.raises(UnknownSession, match="'c'"):
        sessions.export("c")
    assert len(sessions) == 2
    for wrong in ({"limit": 0}, {"idle": 0}, {"idle": float("nan")}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            Sessions(model, **wrong)


def test_an_open_session_is_rewound_only_on_request(model):
    sessions = Sessions(model)
    sessions.open("a")
    early = sessions.checkpoint("a")
    first = sessions.process("a", 0, frames_of("a", 0, 3))
    with pytest.raises(ValueError, match="is open"):
        sessions.adopt(early)
    sessions.adopt(early, replace=True)
    assert sessions.process("a", 0, frames_of("a", 0, 3)).tobytes() == first.tobytes()


def test_altered_checkpoints_are_refused(model):
    sessions = Sessions(model)
    sessions.open("a")
    sessions.process("a", 0, frames_of("a", 0, 3))
    checkpoint = sessions.export("a")
    sealed = checkpoint.sealed(KEY)
    assert Checkpoint.unsealed(sealed, KEY) == checkpoint
    for i in range(len(sealed)):
        with pytest.raises(ValueError, match="sealed"):
            Checkpoint.unsealed(sealed[:i] + bytes([sealed[i] ^ 1]) + sealed[i + 1 :], KEY)
        with pytest.raises(ValueError, match="sealed"):
            Checkpoint.unsealed(sealed[:i], KEY)
    with pytest.raises(ValueError, match="another key"):
        Checkpoint.unsealed(sealed, bytes(32))
    with pytest.raises(ValueError, match="at least 16"):
        checkpoint.sealed(b"short")
    with pytest.raises(ValueError, match="7 frames, its state 3"):
        sessions.adopt(Checkpoint("a", 7, checkpoint.state))
    assert "a" not in sessions


@pytest.fixture
def many_switches():
    """Make the interpreter switch threads very often, so that races show."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-7)
    yield
    sys.setswitchinterval(before)


def test_idle_sessions_are_evicted(model):
    now = [0.0]
    sessions = Sessions(model, idle=10.0, clock=lambda: now[0])
    for name in "ab":
        sessions.open(name)
    now[0] = 6.0
    sessions.process("a", 0, frames_of("a", 0, 2))
    now[0] = 11.0
    assert [(c.session, c.frames) for c in sessions.evict()] == [("b", 0)]
    assert "a" in sessions
    assert "b" not in sessions


@pytest.mark.usefixtures("many_switches")
def test_exported_sessions_reject_waiting_frames(model):
    sessions = Sessions(model)
    x = frames_of("a", 0, 1)
    for _ in range(300):
        sessions.open("a")
        taken = [0]

        def send(taken=taken):
            with suppress(UnknownSession):
                while True:
                    sessions.process("a", taken[0], x)
                    taken[0] += 1

        thread = threading.Thread(target=send)
        thread.start()
        while not taken[0]:
            time.sleep(0)
        checkpoint = sessions.export("a")
        thread.join()
        assert checkpoint.frames == taken[0]


@pytest.mark.usefixtures("many_switches")
def test_threads_on_the_same_sessions(model):
    """Each frame is processed exactly once, whichever of four sending threads delivers it first."""
    sessions = Sessions(model)
    sessions.open("a")
    x = frames_of("a", 0, 200)
    outputs = {}

    def send():
        at = 0
        while at < len(x):
            try:
                y = sessions.process("a", at, x[at : at + 1])
            except Misplaced as error:
                at = error.frames
            else:
                assert at not in outputs
                outputs[at] = y
                at += 1

    threads = [threading.Thread(target=send) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert np.concatenate([outputs[k] for k in range(len(x))]).tobytes() == model.stream().process(x).tobytes()


def test_a_bad_request_among_many_is_its_own_error(model):
    """Names that are no str, also unhashable ones, are errors of their requests only."""
    sessions = Sessions(model)
    sessions.open("a")
    x = np.zeros((2, 12), np.float32)
    results = sessions.process_many([(5, 0, x), ("a", 0, x), ([], 0, x), (None, 0, x), ("b", 0, x)])
    assert [type(one) for one in results] == [TypeError, np.ndarray, TypeError, TypeError, UnknownSession]


def test_bad_arguments_are_named(model):
    sessions = Sessions(model)
    with pytest.raises(TypeError, match="checkpoint must be a Checkpoint, got int"):
        sessions.adopt(5)
    key, state = bytes(range(32)), model.stream().save()
    for session, frames, kind in (("a", -1, ValueError), ("a", 1 << 64, ValueError), ("a" * 257, 0, ValueError),
                                  ("", 0, ValueError), (5, 0, TypeError)):  # fmt: skip
        with pytest.raises(kind, match=r"frames|session"):
            Checkpoint(session, frames, state).sealed(key)
    with pytest.raises(TypeError):
        Checkpoint("a", 0, "state").sealed(key)
    for limit in (float("nan"), 0, 1.5, "8"):
        with pytest.raises(ValueError, match="limit"):
            Sessions(model, limit=limit)
