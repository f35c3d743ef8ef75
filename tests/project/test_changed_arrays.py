"""Arrays that are replaced, freed or given another shape behind the back of what uses them: no crash, no wrong numbers.

Each script is a process of its own, because the failure can be a crash.
"""

import pytest
from perturbed import succeed

START = """
    import gc, threading
    import numpy as np
    import cnorm

    rng = np.random.default_rng(0)

    def random(*shape):
        return rng.standard_normal(shape, np.float32)

    def refused(call, error, words):
        try:
            call()
        except error as found:
            assert words in str(found), found
        else:
            raise AssertionError("was not refused")

    class Finaliser:
        def __init__(self, act):
            self.me, self.act = self, act

        def __del__(self):
            self.act()

    def interrupted(make, act, call):
        \"\"\"The results of call(x) for arrays x, to which a finaliser does act(x) when the first object is made in the
        call, or the second, ...; None for an error.\"\"\"
        for more in range(8):
            x, now, hit = make(), [], []
            gc.collect()
            gc.disable()
            Finaliser(lambda x=x, now=now, hit=hit: now and hit.append(act(x)))
            gc.set_threshold(gc.get_count()[0] + more)
            now.append(True)
            gc.enable()
            try:
                result = call(x)
            except (ValueError, RuntimeError):
                result = None
            gc.disable()
            now.clear()
            if hit:
                yield result
"""

STATISTICS = """
    x = random(1 << 15, 32)
    stats = cnorm.layer_norm(x, return_stats=True)[1]
    given, done = (stats.mean, stats.inv_std_dev), threading.Event()
    stats.__init__(*given)
    wanted = cnorm.layer_norm_backward(x, x, None, stats)[0].tobytes()

    def replace():
        while not done.is_set():
            stats.__init__(*given)

    thread = threading.Thread(target=replace)
    thread.start()
    results = [cnorm.layer_norm_backward(x, x, None, stats)[0].tobytes() for _ in range(100)]
    done.set()
    thread.join()
    assert all(result == wanted for result in results)
"""

FRAME = """
    size = 1 << 16
    learner = cnorm.Learner(cnorm.Model([cnorm.Linear(random(4, size))]), cnorm.Adam(), truncate=64)
    wanted = learner.step(np.ones(size, np.float32)).tobytes()
    make = lambda: np.ones(size, np.float32)
    found = list(interrupted(make, lambda x: x.resize(0, refcheck=False), lambda x: learner.step(x).tobytes()))
    assert found and all(result in (None, wanted) for result in found)
"""

# NumPy gives the memory of the old shape to that of the new array.
SHAPE = """
    kept = []

    def act(x):
        x.shape = (48,)
        kept.append(np.empty((3, 2, 1)))

    call = lambda x: cnorm.layer_norm(x, return_stats=True)[1].data.shape
    found = list(interrupted(lambda: random(2, 3, 8), act, call))
    assert found and all(shape in (None, (2, 3, 1, 3)) for shape in found), found
"""

GAIN = """
    norm = cnorm.LayerNorm(np.ones(1, np.float32), np.ones(1, np.float32))
    norm.weights["weight"].shape = ()
    assert (norm(random(3, 1)) == 1).all()
"""

MATRIX = """
    for name, value in {"shape": (64 * 64,), "dtype": np.float16, "strides": (0, 0)}.items():
        layer = cnorm.Linear(random(64, 64))
        setattr(layer.weights["weight"], name, value)
        refused(lambda: cnorm.Model([layer]), ValueError, "when the layer was made")
"""

ROUNDED = """
    layer = cnorm.Model([cnorm.Linear(random(64, 1024))]).with_weights("int8").layers[0]
    layer.rows["weight"].rows.dtype = np.uint8
    refused(lambda: cnorm.Model([layer]), ValueError, "when the layer was made")
"""

PARAMETERS = """
    def learner(optimizer):
        made = cnorm.Learner(cnorm.Model([cnorm.Linear(random(64, 64))]), optimizer, truncate=2)
        made.step(random(64))
        return made

    for optimizer in (cnorm.Adam(), cnorm.SGD(momentum=0.9)):
        for name, array in {
            "gradient": np.zeros(4, np.float32),
            "values": np.zeros(1 << 24, np.float32),
        }.items():
            one = learner(optimizer)
            setattr(one.parameters, name, array)
            refused(lambda: one.learn(random(64)), ValueError, "must be float32 of")
    one.parameters.gradient = np.zeros(64 * 64, np.float16)
    one.step(random(64))
    refused(lambda: one.learn(random(64)), ValueError, "must be float32 of")
"""

SCRIPTS = {
    "statistics replaced by a thread": STATISTICS,
    "a frame freed by a finaliser": FRAME,
    "a shape set by a finaliser": SHAPE,
    "a gain without axes": GAIN,
    "another shape of a matrix": MATRIX,
    "another shape of a rounded matrix": ROUNDED,
    "other parameters of a learner": PARAMETERS,
}


@pytest.mark.exhaustive(one_in=8)
@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
def test_changed_arrays(script):
    succeed(START + script)
