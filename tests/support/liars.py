"""Calls of cnorm whose arguments lie or change each other while they are converted, with guard pages behind arrays.

`attempt(seed)` makes one call: valid arguments, of which some are replaced by objects that claim another type, dtype,
shape or value each time they are asked, and that change the dtype, shape, strides or flags of the call's other arrays
whenever their code runs. It may raise anything. It must not access memory beyond an array: a page behind each array
can't be accessed, and the bytes before it and those of inputs must not change.
"""

import contextlib
import ctypes
import gc
import mmap
import warnings

import numpy as np

import cnorm

PAGE = mmap.PAGESIZE
DTYPES = [*[np.float32, np.float64, np.float16] * 3, np.int8, np.dtype(">f4"), np.complex128]
SLACK = 0xA5  # of the bytes before an array

_libc = ctypes.CDLL(None, use_errno=True)


class Guarded:
    """An array that ends where a page begins that can't be accessed."""

    def __init__(self, values: np.ndarray):
        size = -(-max(values.nbytes, 1) // PAGE) * PAGE
        self._map = mmap.mmap(-1, size + PAGE)
        self._memory = np.frombuffer(self._map, np.uint8)[:size]
        if _libc.mprotect(ctypes.c_void_p(self._memory.ctypes.data + size), ctypes.c_size_t(PAGE), 0):
            raise OSError(ctypes.get_errno(), "mprotect")
        self._memory[:] = SLACK
        self.array = np.ndarray(values.shape, values.dtype, memoryview(self._map)[size - values.nbytes : size])
        self.array[...] = values
        self._before = self._memory.tobytes()
        self._size = values.nbytes

    def check(self, written: bool) -> None:
        """AssertionError if bytes before the array changed, or, unless it was to be written, those of the array."""
        end = len(self._before) - self._size if written else None
        assert self._memory.tobytes()[:end] == self._before[:end]


class Call:
    """A function and its arguments; `guarded` has the arrays by the names of arguments, `places` names the outputs."""

    def __init__(self, rng, function, arguments: dict, places: tuple = ()):
        self.rng, self.function, self.places = rng, function, places
        self.guarded, self.arguments = {}, {}
        for name, value in arguments.items():
            self.arguments[name] = self._guard(name, value)
        self.stats = arguments.get("stats")

    def _guard(self, name, value):
        if isinstance(value, tuple):
            return tuple(self._guard(f"{name}{i}", one) for i, one in enumerate(value))
        if not isinstance(value, np.ndarray):
            return value
        self.guarded[name] = Guarded(value)
        return self.guarded[name].array

    def act(self) -> None:
        """Change one of the call's arrays."""
        arrays = [one.array for one in self.guarded.values()]
        if self.stats is not None:
            arrays.append(self.stats.data)
        array, rng = arrays[rng_index(self.rng, arrays)], self.rng
        try:
            match rng.integers(8):
                case 1:
                    array.shape = (-1,) if rng.integers(2) else (*array.shape[::-1],)
                case 2:
                    array.shape = (array.size // 2, 2)
                case 3:
                    strides = rng.permutation(array.strides) * rng.integers(0, 2, array.ndim)
                    if np.dot(strides, np.array(array.shape) - 1) < array.nbytes:  # NumPy would allow more
                        array.strides = tuple(strides)
                case 4:
                    array.flags.writeable = False
                case _:
                    array.dtype = DTYPES[rng_index(rng, DTYPES)]
        except (ValueError, TypeError, AttributeError):
            pass

    def run(self) -> None:
        with contextlib.suppress(Exception):  # any error is right
            self.function(**self.arguments)
        written = any(name.startswith(place) for place in self.places for name in self.guarded)
        for name, guarded in self.guarded.items():
            guarded.check(written and name.startswith(self.places))


def rng_index(rng, sequence) -> int:
    return int(rng.integers(len(sequence)))


# ---- liars -----------------------------------------------------------------------------------------------------


def liar(call: Call, value):
    """An object in the place of an argument, which acts and lies when it is converted."""
    if isinstance(value, np.ndarray):
        return ARRAYS[rng_index(call.rng, ARRAYS)](call, value)
    if isinstance(value, bool):
        return _truth(call, value)
    if isinstance(value, int):
        return _index(call, value)
    if isinstance(value, float):
        return _number(call, value)
    if isinstance(value, str):
        return _text(call, value)
    if isinstance(value, dict):
        return _mapping(call, value)
    if isinstance(value, tuple | list):
        return _sequence(call, value)
    return _claimant(call, value)


def _by_array(call, array):
    class ByArray:
        ndim = property(lambda self: (call.act(), 3)[1])

        def __array__(self, dtype=None, copy=None):
            call.act()
            return array if call.rng.integers(3) else array[:1]

    return ByArray()


def _by_interface(call, array):
    class ByInterface:
        @property
        def __array_interface__(self):
            honest = array.__array_interface__
            call.act()
            return honest

    return ByInterface()


def _by_dlpack(call, array):
    class ByDlpack:
        def __dlpack__(self, **options):
            call.act()
            return array.__dlpack__(**options)

        def __dlpack_device__(self):
            call.act()
            return array.__dlpack_device__()

    return ByDlpack()


def _finaliser(call, array):
    """Acts when the garbage collector runs, which it does at the next object that it follows."""

    class Finaliser:
        def __init__(self):
            self.me = self

        def __del__(self):
            call.act()

    class Littering:
        def __array__(self, dtype=None, copy=None):
            for _ in range(8):
                Finaliser()
            gc.set_threshold(1)
            return array

    return Littering()


def _subclass(call, array):
    def lie(honest):
        def get(self):
            call.act()
            return honest if call.rng.integers(2) else DTYPES[rng_index(call.rng, DTYPES)]

        return property(get)

    def dispatched(self, function, types, arguments, options):
        call.act()
        return bool(call.rng.integers(2))

    members = {name: lie(getattr(array, name)) for name in ("dtype", "shape", "strides", "ndim", "size", "flags")}
    members |= {"__array_function__": dispatched, "__array_finalize__": lambda self, other: call.act()}
    members |= {"__len__": lambda self: (call.act(), 1)[1], "view": lambda self, *_: (call.act(), array[:0])[1]}
    if call.rng.integers(2):
        members["__class__"] = property(lambda self: (call.act(), np.ma.MaskedArray)[1])
    return np.ndarray.view(array, type("Subclass", (np.ndarray,), members))


def _claimant(call, value):
    """An object that claims the type of `value` and has none of it."""

    class Claimant:
        __slots__ = tuple(f"word{i}" for i in range(24))

        @property
        def __class__(self):
            call.act()
            return type(value)

        def __getattr__(self, name):
            call.act()
            if name.startswith("__"):
                raise AttributeError(name)
            return getattr(value, name)

    made = Claimant()
    for name in Claimant.__slots__:
        setattr(made, name, _model._network())  # where a Stream has its network, so that it looks like one of the model
    return made


ARRAYS = [_by_array, _by_array, _by_interface, _by_dlpack, _finaliser, _subclass, _claimant]


def _index(call, value):
    class Index:
        def __index__(self):
            call.act()
            return value + [0, 0, 0, 1, -1][call.rng.integers(5)]

    return Index()


def _number(call, value):
    class Number(float):
        def __float__(self):
            call.act()
            return [value, value, value, -1.0, float("nan"), 1e300][call.rng.integers(6)]

        __ge__ = __gt__ = __le__ = __lt__ = __eq__ = lambda self, other: (call.act(), True)[1]
        __hash__ = float.__hash__

    return Number(value)


def _truth(call, value):
    class Truth:
        def __bool__(self):
            call.act()
            return value

    return Truth()


def _text(call, value):
    class Text(str):
        def __eq__(self, other):
            call.act()
            return bool(call.rng.integers(2))

        def __hash__(self):
            call.act()
            return str.__hash__(self)

    return Text(value)


def _mapping(call, value):
    class Mapping(dict):
        def keys(self):
            call.act()
            return dict.keys(self)

        def __getitem__(self, name):
            call.act()
            return liar(call, dict.__getitem__(self, name))

    return Mapping(value)


def _sequence(call, value):
    items = [liar(call, one) if one is not None and call.rng.integers(2) else one for one in value]

    class Sequence(type(value)):
        def __iter__(self):
            call.act()
            return iter(items if call.rng.integers(2) else items[:1])

        def __len__(self):
            call.act()
            return int(call.rng.integers(4))

        def __getitem__(self, i):
            call.act()
            return items[0]

    return Sequence(items) if call.rng.integers(2) else type(value)(items)


# ---- calls -----------------------------------------------------------------------------------------------------

_model = cnorm.demo_model()
_bound = cnorm.LayerNorm(np.float32([1, 2, 3, 4]), np.float32([4, 3, 2, 1]))


def _rows_call(rng, random, dtype) -> Call:
    """A norm of rows, or its backward pass."""
    shape = (int(rng.integers(1, 6)), int(rng.integers(1, 70)))
    x, weight = random(shape, dtype), random(shape[1:], dtype)
    common = {"x": x, "weight": weight, "axis": -1, "eps": 1e-5}
    out = {"out": np.zeros_like(x)} if rng.integers(2) else {}
    stats = cnorm.layer_norm(x, return_stats=True)[1]
    both = {"dy": random(shape, dtype), "x": x, "weight": weight, "stats": stats, "axis": -1}
    grads = (np.zeros_like(x), np.zeros_like(weight), np.zeros_like(weight))
    some = {"x": x, "weight": weight, "bias": weight + 1, **out}
    match rng.integers(8):
        case 0 | 1:
            return Call(rng, cnorm.layer_norm, common | {"bias": weight + 1, "return_stats": True} | out, ("out",))
        case 2:
            sums = {"residual": x + 1, "bias": weight, "sum_out": np.zeros_like(x)}
            return Call(rng, cnorm.add_layer_norm, common | sums | out, ("out", "sum_out"))
        case 3:
            return Call(rng, cnorm.rms_norm, common | out, ("out",))
        case 4:
            return Call(rng, cnorm.layer_norm_backward, both | {"out": grads}, ("out",))
        case 5:
            return Call(rng, cnorm.rms_norm_backward, both | {"out": grads[:2]}, ("out",))
        case 6 if dtype != np.float16:
            fields = {"sigma": 1.0, "radius": 2, "mean_radius": 1}
            if rng.integers(2):
                return Call(rng, cnorm.divisive_norm, some | fields, ("out",))
            given = {name: both[name] for name in ("dy", "x", "weight")} | fields
            return Call(rng, cnorm.divisive_norm_backward, given | {"out": grads}, ("out",))
        case 7 if dtype != np.float16:
            return Call(rng, cnorm.smoothing_gradient, both | {"smoothing": 0.1})
    four = {"x": random((3, 4), np.float32), "out": np.zeros((3, 4), np.float32)}
    return Call(rng, lambda x, out: _bound(x, out), four, ("out",))


def _channels_call(rng, random, dtype) -> Call:
    """Group, instance, batch or weight norm, or a backward pass."""
    shape = (int(rng.integers(2, 5)), int(rng.integers(1, 5)) * 2, int(rng.integers(2, 9)))
    x, weight = random(shape, dtype), random(shape[1:2], dtype)
    common = {"x": x, "weight": weight, "bias": weight + 1, "eps": 1e-5}
    out = {"out": np.zeros_like(x)} if rng.integers(2) else {}
    averages = {"running_mean": np.zeros_like(weight), "running_var": np.ones_like(weight)}
    both = {"dy": random(shape, dtype), "x": x, "weight": weight}
    grads = {"out": (np.zeros_like(x), np.zeros_like(weight), np.zeros_like(weight))}
    moments = {"mean": weight, "var": abs(weight)}
    of_groups = cnorm.group_norm(x, 2, return_stats=True)[1]
    of_channels = cnorm.instance_norm(x, return_stats=True)[1]
    of_batch = cnorm.batch_norm(x, return_stats=True)[1]
    match rng.integers(10):
        case 0:
            return Call(rng, cnorm.group_norm, common | {"groups": 2, "return_stats": True} | out, ("out",))
        case 1:
            return Call(rng, cnorm.group_norm_backward, both | {"groups": 2, "stats": of_groups} | grads, ("out",))
        case 2:
            return Call(rng, cnorm.instance_norm, common | out, ("out",))
        case 3:
            return Call(rng, cnorm.instance_norm_backward, both | {"stats": of_channels} | grads, ("out",))
        case 4 | 5:
            given = averages | {"momentum": 0.1, "running_variance": "unbiased"} | out
            return Call(rng, cnorm.batch_norm, common | given, ("out", "running_mean", "running_var"))
        case 6:
            return Call(rng, cnorm.batch_norm_backward, both | {"stats": of_batch} | grads, ("out",))
        case 7:
            return Call(rng, cnorm.batch_norm_inference, common | moments | out, ("out",))
        case 8:
            given = both | moments | {"eps": 1e-5} | grads
            return Call(rng, cnorm.batch_norm_inference_backward, given, ("out",))
    matrix = random(shape[:2], np.float32)
    given = {"weight": matrix, "gain": random(shape[:1], np.float32)}
    if rng.integers(2):
        return Call(rng, cnorm.weight_norm, given | {"out": np.zeros_like(matrix)}, ("out",))
    places = {"out": (np.zeros_like(matrix), np.zeros_like(given["gain"]))}
    return Call(rng, cnorm.weight_norm_backward, given | {"dv": matrix + 1} | places, ("out",))


def _stream_call(rng, random, dtype) -> Call:
    inputs, outputs = _model.input_size, _model.output_size
    streams = [_model.stream(check=bool(rng.integers(2))) for _ in range(3)]
    steps = int(rng.integers(1, 20))
    match rng.integers(6):
        case 0:
            given = {"x": random((inputs,), np.float32), "out": np.zeros(outputs, np.float32)}
            return Call(rng, streams[0].step, given, ("out",))
        case 1:
            given = {"x": random((steps, inputs), np.float32), "out": np.zeros((steps, outputs), np.float32)}
            return Call(rng, streams[0].process, given, ("out",))
        case 2:
            return Call(rng, streams[0].reset, {"state": streams[1].state()})
        case 3:
            return Call(rng, _model.run, {"x": random((steps, inputs), np.float32), "state": streams[1].state()})
        case 4:
            given = {"x": random((3, inputs), np.float32), "out": np.zeros((3, outputs), np.float32)}
        case 5:
            shape = (3, steps)
            given = {"x": random((*shape, inputs), np.float32), "out": np.zeros((*shape, outputs), np.float32)}
    given |= {"streams": streams, "reset": np.array([True, False, True])}
    return Call(rng, _model.step_many, given, ("out",))


def attempt(seed: int) -> None:
    """Make one call, with one to three lying arguments."""
    rng = np.random.default_rng(seed)
    dtype = [np.float32, np.float32, np.float64, np.float16][rng.integers(4)]
    make = [_rows_call, _channels_call, _stream_call][rng.integers(3)]
    call = make(rng, lambda shape, dtype: rng.standard_normal(shape).astype(dtype), dtype)
    names = [name for name in call.arguments if name != "stats"]
    before = gc.get_threshold()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in rng.choice(names, min(len(names), int(rng.integers(1, 4))), replace=False):
            call.arguments[name] = liar(call, call.arguments[name])
        try:
            call.run()
        finally:
            gc.set_threshold(*before)
