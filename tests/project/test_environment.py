"""The caller's floating-point environment changes no result, and cnorm restores it after each call."""

import ctypes
import os
import platform
import subprocess
import sys
import textwrap

import inputs
import numpy as np
import pytest

import cnorm
from cnorm import _core

HELPER = """
#if defined(__x86_64__)
unsigned long read_control(void) { unsigned v; __asm__ volatile("stmxcsr %0" : "=m"(v)); return v; }
void write_control(unsigned long w) { unsigned v = (unsigned)w; __asm__ volatile("ldmxcsr %0" : : "m"(v)); }
#elif defined(__aarch64__)
unsigned long read_control(void) { unsigned long v; __asm__ volatile("mrs %0, fpcr" : "=r"(v)); return v; }
void write_control(unsigned long v) { __asm__ volatile("msr fpcr, %0" : : "r"(v)); }
#else
#error "say here how this processor's floating-point control register is read and written"
#endif
"""
X86 = platform.machine() == "x86_64"
DEFAULT = 0x1F80 if X86 else 0
STICKY = 0x3F if X86 else 0  # flags that every operation may set
MODES = (
    {"flush-to-zero": 0x9FC0, "upward": 0x5F80, "downward": 0x3F80, "toward-zero": 0x7F80}
    if X86
    else {"flush-to-zero": 1 << 24, "upward": 1 << 22, "downward": 2 << 22, "toward-zero": 3 << 22}
)


@pytest.fixture(scope="session")
def control_library(tmp_path_factory):
    """A shared library, compiled here, that reads and writes the floating-point control register."""
    folder = tmp_path_factory.mktemp("control")
    (folder / "control.c").write_text(HELPER)
    library = folder / "control.so"
    compiler = os.environ.get("CC", "cc")
    subprocess.run([*compiler.split(), "-shared", "-fPIC", "-o", library, folder / "control.c"], check=True)
    return library


@pytest.fixture
def control(control_library):
    library = ctypes.CDLL(str(control_library))
    library.read_control.restype = ctypes.c_ulong
    library.write_control.argtypes = [ctypes.c_ulong]
    library.write_control.restype = None
    yield library
    library.write_control(DEFAULT)


def operations(rng, dtype):
    """Calls with every kind of row; each returns an array, a tuple of them, or statistics."""
    x = inputs.difficult_rows(rng, 53, dtype)
    nan = x[:2].copy()
    nan[0, 3], nan[1, 5] = np.nan, np.inf
    dy = rng.standard_normal(x.shape).astype(dtype)
    weight, bias = inputs.random_affine(rng, 53, dtype)
    weight[7] = np.finfo(dtype).smallest_subnormal
    x_tiny = x * dtype(np.finfo(dtype).tiny)
    _, stats = cnorm.layer_norm(x, return_stats=True)
    calls = {
        "forward": lambda: cnorm.layer_norm(x, weight, bias, eps=1e-5),
        "forward, eps 0": lambda: cnorm.layer_norm(x, weight, eps=0),
        "forward, subnormal eps": lambda: cnorm.layer_norm(x_tiny, eps=1e-41),
        "forward, NaN": lambda: cnorm.layer_norm(nan),
        "forward, out": lambda: cnorm.layer_norm(x, weight, bias, eps=0.1, out=np.empty_like(x)),
        "backward": lambda: cnorm.layer_norm_backward(dy, x, weight, stats),
        "statistics": lambda: cnorm.layer_norm(x, eps=0.7, return_stats=True)[1],
    }
    shapes = {"weight_ih_l0": (20, 3), "weight_hh_l0": (20, 5), "bias_ih_l0": (20,), "bias_hh_l0": (20,)}
    cell = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    frames = rng.standard_normal((4, 3)).astype(np.float32)
    volume, gradient = x.reshape(12, 2, 53), dy.reshape(12, 2, 53)
    variance = weight * weight
    _, of_groups = cnorm.group_norm(volume, 2, return_stats=True)
    _, of_batch = cnorm.batch_norm(x, weight, return_stats=True)
    calls |= {
        "batch": lambda: cnorm.batch_norm(x, weight, bias),
        "batch, backward": lambda: cnorm.batch_norm_backward(dy, x, weight, of_batch),
        "batch, averages": lambda: averages(x),
        "inference": lambda: cnorm.batch_norm_inference(x_tiny, bias, variance, weight),
        "group": lambda: cnorm.group_norm(volume, 1, weight[:2], eps=0),
        "group, backward": lambda: cnorm.group_norm_backward(gradient, volume, 2, weight[:2], of_groups),
        "weight": lambda: cnorm.weight_norm(x),
        "weight, backward": lambda: cnorm.weight_norm_backward(dy, x, bias[:24]),
        "divisive": lambda: cnorm.divisive_norm(x, weight, mean_radius=2, radius=3),
        "divisive, backward": lambda: cnorm.divisive_norm_backward(dy, x, weight, radius=3)[:3],
        "smoothing": lambda: np.float64(cnorm.smoothing_gradient(dy, x, weight, stats, 0.1)),
        "fold": lambda: cnorm.fold_batch_norm(x, None, x[:, 0], np.abs(x[:, 1]), dy[:, 0], eps=1e-7),
        "fold of weight norm": lambda: cnorm.fold_weight_norm(x, dy[:, 0])[0],
        "an eps": lambda: np.float64([cnorm.LayerNorm(np.ones(3, np.float32), eps=e).eps for e in (1e-5, 1e-40)]),
        "a cell": lambda: cnorm.Model([cnorm.LSTM(cell, preset="torch")]).run(frames),
    }
    if dtype == np.float32:
        wild = rng.integers(0, 2**32, 4099, np.uint32).view(np.float32)
        calls["sigmoid"] = lambda: _core.sigmoid(wild)
        calls["tanh"] = lambda: _core.tanh(wild)
    return calls


def averages(x):
    running = np.zeros_like(x[0]), np.ones_like(x[0])
    cnorm.batch_norm(x, running_mean=running[0], running_var=running[1])
    return running


def as_bytes(result):
    if isinstance(result, cnorm.Stats):
        result = result.mean, result.inv_std_dev
    results = result if isinstance(result, tuple) else (result,)
    return [inputs.canonical_bytes(array) for array in results]


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_float_modes_of_the_caller_change_no_bits_and_are_kept(rng, control, dtype, mode):
    for name, call in operations(rng, dtype).items():
        expected = as_bytes(call())
        control.write_control(mode)
        result = call()
        after = control.read_control()
        control.write_control(DEFAULT)
        assert after & ~STICKY == mode, f"{name} left another mode behind"
        assert as_bytes(result) == expected, name


def test_exit_without_enter_raises_and_changes_nothing(control):
    with pytest.raises(AttributeError):
        _core.default_float_env().__exit__()
    assert control.read_control() & ~STICKY == DEFAULT


@pytest.mark.usefixtures("isa")
def test_the_default_mode_stays_the_default(rng, control):
    for name, call in operations(rng, np.float32).items():
        control.write_control(DEFAULT)
        call()
        assert control.read_control() & ~STICKY == DEFAULT, name


def python(code):
    return subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60)


@pytest.mark.skipif(not X86, reason="AArch64 processors need not be able to trap at all")
@pytest.mark.parametrize("name", cnorm.available_isas())
def test_unmasked_floating_point_traps_do_not_fire(control_library, name):
    """In a process of its own, because a trap that fires ends it with SIGFPE."""
    run = python(f"""
        import ctypes, cnorm, numpy as np
        cnorm.use_isa({name!r})
        control = ctypes.CDLL({str(control_library)!r})
        x = np.float32([[1, 2, 3], [3e38, -3e38, 1], [1e-45, 0, 0], [4, 4, 4], [np.nan, 1, 0], [1e20, 0, 2]])
        weight = np.float32([3, 0.1, 1e-40])
        masked = cnorm.layer_norm(x, weight, weight, eps=1e-5, return_stats=True)
        masked_gradients = cnorm.layer_norm_backward(x, x, weight, masked[1])
        control.write_control(0)
        unmasked = cnorm.layer_norm(x, weight, weight, eps=1e-5, return_stats=True)
        gradients = cnorm.layer_norm_backward(x, x, weight, unmasked[1])
        control.write_control(0x1F80)
        np.testing.assert_array_equal(unmasked[0], masked[0])
        for got, wanted in zip(gradients, masked_gradients):
            np.testing.assert_array_equal(got, wanted)
        print("alive")
        """)
    assert run.returncode == 0, f"exit {run.returncode}: {run.stderr}"
    assert run.stdout == "alive\n"


def test_subnormals_survive_the_import():
    """A shared object linked with -ffast-math would switch them off for the whole process."""
    run = python("""
        import sys
        import cnorm, numpy as np
        smallest = [float("5e-324"), np.float32(1e-45), np.float64(5e-324)]
        array = np.full(99, 1e-45, np.float32)
        print(all(value * type(value)(1) > 0 for value in smallest), (array * np.float32(1) > 0).all())
        """)
    assert run.stdout.split() == ["True", "True"], run.stdout + run.stderr


def test_results_survive_a_fork():
    """Norms and one stream, used before the fork and then in both processes."""
    run = python("""
        import os, cnorm, numpy as np
        x = np.random.default_rng(0).standard_normal((64, 300), np.float32)
        model = cnorm.demo_model()
        frames = np.random.default_rng(1).standard_normal((9, model.input_size), np.float32)
        expected, scores = cnorm.layer_norm(x).tobytes(), model.stream().process(frames)
        stream = model.stream()
        stream.process(frames[:4])
        child = os.fork()
        right = cnorm.layer_norm(x).tobytes() == expected
        right = right and stream.process(frames[4:]).tobytes() == scores[4:].tobytes()
        if child == 0:
            os._exit(0 if right else 1)
        print(right, os.waitpid(child, 0)[1])
        """)
    assert run.stdout == "True 0\n", run.stdout + run.stderr


def test_interrupt_leaves_output_and_state_complete():
    """Ctrl-C during a long call: the call ends, then KeyboardInterrupt is raised; output and state are complete.

    A second thread sees the output begin to change, so the call is under way, and sends the signal.
    """
    run = python("""
        import os, signal, threading, cnorm, numpy as np
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may start background jobs without it

        def interrupted(call, out):
            first = out[:1]
            def send():
                while np.isnan(first).all():
                    pass
                os.kill(os.getpid(), signal.SIGINT)
            out[...] = np.nan
            sender = threading.Thread(target=send)
            sender.start()
            try:
                call(out)
                sender.join()
            except KeyboardInterrupt:
                sender.join()
                return True
            return False

        rng = np.random.default_rng(0)
        x = rng.standard_normal((8192, 1024), np.float32)
        y = np.empty_like(x)
        print(interrupted(lambda out: cnorm.layer_norm(x, out=out), y), np.array_equal(y, cnorm.layer_norm(x)))
        model = cnorm.demo_model()
        frames = rng.standard_normal((20000, model.input_size), np.float32)
        stream, other = model.stream(), model.stream()
        scores = np.empty((20000, model.output_size), np.float32)
        print(interrupted(lambda out: stream.process(frames, out=out), scores))
        print(np.array_equal(scores, other.process(frames)), stream.save() == other.save())
        print(stream.step(frames[0]).tobytes() == other.step(frames[0]).tobytes())
        """)
    assert run.stdout.split() == ["True"] * 6, run.stdout + run.stderr
