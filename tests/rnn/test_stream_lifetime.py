"""Streams used while the garbage collector clears them, and streams in use by a thread when the process forks."""

import os

import pytest
from perturbed import succeed

COLLECT = """
    import gc, itertools, sys, weakref
    import numpy as np
    import cnorm

    x = np.ones((3, 12), np.float32)
    USES = {
        "state": lambda s: s.state()["h0"].tobytes(),
        "process": lambda s: (s.process(x).tobytes(), s.reset()),
        "save": lambda s: s.save(),
        "step_many": lambda s: (s.model.step_many([s], x[:1]).tobytes(), s.reset()),
    }
    use, called, keep = USES[sys.argv[1]], [], []
    expected = use(cnorm.demo_model().stream())

    class Tracker:
        pass

    class Finaliser:
        def __del__(self):  # runs before anything is cleared; its callbacks run in between
            keep.append(weakref.ref(self.stream))

            def callback(_):
                stream = keep[0]() if keep else None
                if stream is not None:
                    called.append(use(stream))

            keep.extend(weakref.ref(tracker, callback) for tracker in self.trackers)

    def cycle(order):
        \"\"\"A cycle through a model, a stream, a finaliser and trackers, made in this order.\"\"\"
        trackers = []

        def track():
            trackers.append(Tracker())
            trackers[-1].me = trackers[-1]

        made = {}
        track()
        for name in order:
            if name == "model":
                made["model"] = cnorm.demo_model()
            elif name == "stream":
                made.setdefault("model", cnorm.demo_model())
                made["stream"] = made["model"].stream()
            else:
                made["finaliser"] = Finaliser()
            track()
        finaliser = made["finaliser"]
        finaliser.me, finaliser.trackers, finaliser.stream = finaliser, trackers, made["stream"]
        last = Tracker()
        last.stream, last.finaliser, last.me = made["stream"], finaliser, last
        made["model"].last = last

    gc.disable()
    for order in itertools.permutations(["model", "stream", "finaliser"]):
        for _ in range(3):
            keep.clear()
            cycle(order)
            gc.collect()
    assert all(result == expected for result in called), "freed weights were read"
    print(len(called))
"""

FORK = """
    import os, sys, threading, time
    import numpy as np
    import cnorm

    rng = np.random.default_rng(0)
    cell = {"weight_ih_l0": (2048, 512), "weight_hh_l0": (2048, 512), "bias_ih_l0": 2048, "bias_hh_l0": 2048}
    cell = {name: rng.uniform(-0.05, 0.05, shape).astype(np.float32) for name, shape in cell.items()}
    model = cnorm.Model([cnorm.LSTM(cell, preset="torch")])
    stream, x = model.stream(), np.ones((2000, 512), np.float32)


    def work():
        while True:
            try:
                stream.process(x)
            except RuntimeError:  # the main thread was looking at the state
                continue

    threading.Thread(target=work, daemon=True).start()
    while True:
        try:
            stream.state()
        except RuntimeError:
            break
        time.sleep(0.01)  # NumPy copies the state without the GIL: the thread needs a time when it is free
    child = os.fork()
    if child:
        os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    for use in (lambda: stream.step(x[0]), stream.state, stream.save, lambda: model.step_many([stream], x[:1])):
        try:
            use()
        except RuntimeError as error:
            assert "forked" in str(error), error
        else:
            raise AssertionError("a stream in the middle of a step was used")
    if sys.argv[1] == "reset":
        stream.reset()
    else:
        stream.restore(model.stream().save())
    assert stream.step(x[0]).tobytes() == model.stream().step(x[0]).tobytes()
    print("freed", flush=True)
    os._exit(0)
"""

HALF_MADE = """
    import gc
    import numpy as np
    import cnorm

    class Model:
        @property
        def stream(self):
            for found in [one for one in gc.get_objects() if type(one) is cnorm.Stream]:
                found.step(np.zeros(12, np.float32))
            return cnorm.demo_model().stream

    stream = cnorm.Stream(Model())
    assert any(one is stream for one in gc.get_objects())
    stream.step(np.zeros(12, np.float32))
"""


def test_the_garbage_collector_does_not_show_a_stream_that_is_being_made():
    succeed(HALF_MADE)


@pytest.mark.exhaustive
@pytest.mark.parametrize("use", ["state", "process", "save", "step_many"])
def test_a_stream_is_used_while_its_cycle_is_collected(use):
    """A stream gives the same results while the collector clears the cycle that it is in."""
    assert int(succeed(COLLECT, use)) > 15


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("freed_by", ["reset", "restore"])
def test_a_new_state_frees_a_stream_that_was_in_use_when_the_process_forked(freed_by):
    assert succeed(FORK, freed_by) == "freed\n"
