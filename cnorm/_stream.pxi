"""Streams: a recurrent state of a model, with functions to step, save and restore it."""

from cnorm.storage.stream_state import checked_state, refuse_infinite_state

cdef extern from "Python.h":
    void PyObject_GC_UnTrack(object)
    void PyObject_GC_Track(object)


cdef long PROCESS = 0  # the id of this process: `os.getpid` is a system call, 0.6 us in a virtual machine


def _set_process():
    global PROCESS
    PROCESS = os.getpid()


_set_process()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_set_process)


@cython.no_gc_clear  # a finaliser may still use a stream, so its members are not cleared before
cdef class Stream:
    """One sequence that a `Model` processes step by step: a recurrent state, used by one thread at a time.

    Made by ``model.stream()``, in the initial state: zero, or the state that the cells have learned. A stream is small:
    the state and scratch for one step. A NaN or infinity in x spreads into the state and stays there until `reset`: see
    `is_finite`, and ``model.stream(check=True)``, which refuses such an x.

    Parameters
    ----------
    model : Model
        Without bidirectional layers.
    check : bool
        Whether a step refuses an x with a NaN or infinity, before the state changes.

    Attributes
    ----------
    model : Model
    frames : int
        Number of steps since the stream was made or last reset.
    is_finite : bool
        Whether the state has no NaN and no infinity.
    """
    cdef object __weakref__
    cdef readonly object model
    cdef readonly Network network
    cdef cnp.ndarray memory  # of the state and the scratch for one step
    cdef cnorm_stream stream
    cdef bint checks  # whether x must be finite
    cdef int busy  # the lock: 1 while a thread uses the stream
    cdef long owner  # process id of that thread while it runs without the GIL; else 0

    def __cinit__(self, model, network=None, bint check=False):
        PyObject_GC_UnTrack(self)  # so that gc.get_objects does not show it before it can be used
        if network is None:
            if not hasattr(model, "stream"):
                raise TypeError(f"model must be a cnorm.Model, got {type(model).__name__}")
            network = (<Stream?>model.stream()).network
        self.model, self.network, self.checks = model, network, check
        if len(self.network.identity) != CNORM_IDENTITY:
            raise ValueError("network must have the identity of its model")
        self.memory = aligned_floats(cnorm_stream_floats(&self.network.model, 1), False)
        if cnorm_stream_start(&self.stream, &self.network.model, <float *>cnp.PyArray_DATA(self.memory), 1) != CNORM_OK:
            raise ValueError("network must have layers that can be stepped")
        PyObject_GC_Track(self)

    @property
    def frames(self):
        return self.stream.frames

    cdef int enter(self, bint replaces_state=False) except -1:
        """Take the lock.

        If the process was forked while another thread held it, that thread does not exist in the child and the state
        may be half-written: then only calls that replace the whole state may take over the lock.
        """
        if try_lock(&self.busy):
            return 0
        if self.owner == 0 or self.owner == PROCESS:  # from here to the end the GIL is held
            raise RuntimeError("this stream is in use by another thread; give each thread a stream of its own")
        if not replaces_state:
            raise RuntimeError("this stream was in use by another thread when the process forked, and its state may be "
                               "that of half a step: call reset, set_state or restore first")
        self.owner = 0
        return 0

    cdef int leave(self) noexcept:
        self.owner = 0
        unlock(&self.busy)
        return 0

    cdef int run(self, cnp.ndarray x, cnp.ndarray y, ptrdiff_t steps, cnp.ndarray scratch=None) except -1:
        """Step; `scratch`, if it is given, has rows for all steps."""
        cdef Network net = self.network
        cdef cnorm_stream stream
        cdef const float *px
        cdef float *py
        cdef bint release = net.macs * steps > RELEASE_GIL_ABOVE_MACS
        cdef cnorm_status status
        if net.has_tokens:
            net.check_frames(x)
        check_frames(x, y, steps * net.input_size, steps * net.output_size)
        px, py = <const float *>cnp.PyArray_DATA(x), <float *>cnp.PyArray_DATA(y)
        self.enter()  # nothing between this and `leave` may raise
        self.owner = PROCESS if release else 0
        stream = self.stream
        if scratch is not None:
            stream.scratch, stream.rows = <float *>cnp.PyArray_DATA(scratch), steps
        if release:
            with nogil:
                status = cnorm_stream_run(&stream, steps, px, py)
        else:
            status = cnorm_stream_run(&stream, steps, px, py)
        self.stream.frames = stream.frames
        self.leave()
        return check(status)

    def step(self, x, out=None):
        """One step.

        Parameters
        ----------
        x : ndarray, shape (input_size,), float32
        out : ndarray, shape (output_size,), float32, contiguous, optional

        Returns
        -------
        y : ndarray, shape (output_size,), float32

        Raises
        ------
        TypeError
            If x or out is not a float32 array.
        ValueError
            For another shape; for a NaN or infinity in x, if the stream was made with ``check=True``. State and `out`
            are then unchanged.
        RuntimeError
            If another thread is using this stream.
        """
        cdef cnp.ndarray a = array_of(x, "x"), place = place_of(out, "out"), y
        a = input_frames(a, "x", 1, self.network.input_size)
        if self.checks:
            check_finite(a, "x")
        if out is None:
            y = cnp.PyArray_EMPTY(1, <cnp.npy_intp *>&self.network.output_size, cnp.NPY_FLOAT32, 0)
        else:
            y = output_frames(place, 1, <cnp.npy_intp *>&self.network.output_size)
            # if they overlap partly, y could overwrite elements of x before they are read
            if cnp.PyArray_DATA(y) != cnp.PyArray_DATA(a) and not disjoint(y, a):
                a = cnp.PyArray_NewCopy(a, cnp.NPY_CORDER)
        self.run(a, y, 1)
        return y if out is None else out

    def process(self, x, out=None):
        """Many steps, one after the other, with the same bits as `step` on each row.

        Parameters
        ----------
        x : ndarray, shape (steps, input_size), float32
        out : ndarray, shape (steps, output_size), float32, contiguous, optional

        Returns
        -------
        y : ndarray, shape (steps, output_size), float32

        Raises
        ------
        TypeError, ValueError, RuntimeError
            As `step`.
        """
        cdef cnp.ndarray a = array_of(x, "x"), place = place_of(out, "out"), y
        cdef cnp.npy_intp shape[2]
        a = input_frames(a, "x", 2, self.network.input_size)
        if self.checks:
            check_finite(a, "x")
        shape[0], shape[1] = cnp.PyArray_DIMS(a)[0], self.network.output_size
        if out is None:
            y = cnp.PyArray_EMPTY(2, shape, cnp.NPY_FLOAT32, 0)
        else:
            y = output_frames(place, 2, shape)
            if not disjoint(y, a):  # a later row of x could be overwritten before it is read
                a = cnp.PyArray_NewCopy(a, cnp.NPY_CORDER)
        if shape[0] > 1:  # the product with the inputs is done for several steps at a time, in larger scratch
            self.run(a, y, shape[0], self.network.scratch(shape[0]))
        else:
            self.run(a, y, shape[0])
        return y if out is None else out

    def state(self):
        """A copy of the recurrent state.

        Returns
        -------
        dict of str to ndarray, shape (units,), float32
            ``h0``, ``c0``, ``h1``, ...; the number counts recurrent layers.

        Raises
        ------
        RuntimeError
            If another thread is using this stream.
        """
        cdef cnp.ndarray memory = cnp.PyArray_EMPTY(1, <cnp.npy_intp *>&self.network.state_floats, cnp.NPY_FLOAT32, 0)
        cdef cnp.ndarray part
        cdef cnp.npy_intp units
        cdef ptrdiff_t offset
        cdef dict named = {}
        self.enter()
        memcpy(cnp.PyArray_DATA(memory), self.stream.state, self.network.state_floats * sizeof(float))
        self.leave()
        for array in self.network.state_arrays:
            units, offset = (<tuple>array)[1], (<tuple>array)[2]
            part = cnp.PyArray_EMPTY(1, &units, cnp.NPY_FLOAT32, 0)
            memcpy(cnp.PyArray_DATA(part), <float *>cnp.PyArray_DATA(memory) + offset, units * sizeof(float))
            named[(<tuple>array)[0]] = part
        return named

    @property
    def is_finite(self):
        """Whether the state has no NaN and no infinity; RuntimeError if another thread is using this stream."""
        self.enter()
        cdef bint finite = cnorm_stream_finite(&self.stream)
        self.leave()
        return finite

    def set_state(self, state):
        """Replace the whole recurrent state; `frames` does not change.

        Parameters
        ----------
        state : mapping of str to ndarray, shape (units,), float32
            All arrays that `state` returns, with the same names and shapes; finite.

        Raises
        ------
        TypeError
            If an array is not float32.
        ValueError
            For a missing or unknown name, another shape, NaN or infinity. The state is then unchanged.
        RuntimeError
            If another thread is using this stream.
        """
        self.replace(self.checked(state), self.stream.frames)

    cdef cnp.ndarray checked(self, state):
        cdef cnp.ndarray memory = checked_state(state, self.network.initial, self.network.state_arrays)
        if not is_finite(<float *>cnp.PyArray_DATA(memory), self.network.state_floats):
            refuse_infinite_state(memory, self.network.state_arrays)
        return memory

    cdef int replace(self, cnp.ndarray whole, unsigned long long frames) except -1:
        self.enter(True)  # nothing between this and `leave` may raise
        memcpy(self.stream.state, cnp.PyArray_DATA(whole), self.network.state_floats * sizeof(float))
        self.stream.frames = frames
        self.leave()
        return 0

    def reset(self, state=None):
        """Set the initial state, zero or the one that the cells have learned, or a given state; `frames` becomes 0.

        In a child process it also unlocks a stream that another thread was stepping when the parent forked.

        Parameters
        ----------
        state : mapping, optional
            As for `set_state`.

        Raises
        ------
        TypeError, ValueError, RuntimeError
            As `set_state`.
        """
        self.replace(self.network.initial if state is None else self.checked(state), 0)

    def save(self):
        """The state as bytes for ``model.restore``, in this or another process, on this or another machine.

        Returns
        -------
        bytes
            Model.identity, `frames` and the state, with a checksum; docs/cells.md has the layout. A state that has a
            NaN or infinity can be saved, but not restored, so that such a stream can't be copied or unpickled.

        Raises
        ------
        RuntimeError
            If another thread is using this stream.
        """
        cdef bytes saved = PyBytes_FromStringAndSize(NULL, cnorm_stream_saved_bytes(&self.network.model))
        cdef char *place = PyBytes_AsString(saved)
        self.enter()
        cnorm_stream_save(&self.stream, place)
        self.leave()
        return saved

    def restore(self, saved):
        """Replace the state and `frames` by those in bytes that `save` returned.

        Parameters
        ----------
        saved : bytes
            It may come from an untrusted source.

        Raises
        ------
        TypeError
            If `saved` is not bytes.
        ValueError
            If any byte was changed, lost or added, for another format, for a model with another configuration or other
            weights, or if the state is not finite. The stream is then unchanged.
        RuntimeError
            If another thread is using this stream.
        """
        cdef cnp.ndarray memory = self.network.initial.copy()
        cdef cnorm_stream other = self.stream
        cdef cnorm_status status
        cdef bytes given
        if not isinstance(saved, (bytes, bytearray, memoryview)):
            raise TypeError(f"saved must be bytes, got {type(saved).__name__}")
        given = bytes(saved)
        other.state = <float *>cnp.PyArray_DATA(memory)
        status = cnorm_stream_restore(&other, PyBytes_AsString(given), len(given))
        if status != CNORM_OK:
            refuse_saved(status, given, self.network.state_arrays)
        self.replace(memory, other.frames)

    def __repr__(self):
        return f"Stream({self.model!r}, frames={self.stream.frames})"

    def __copy__(self):
        return _stream_from(self.model, self.save(), self.checks)

    def __deepcopy__(self, memo):
        return self.__copy__()

    def __reduce__(self):
        return _stream_from, (self.model, self.save(), bool(self.checks))


cdef refuse_saved(cnorm_status status, bytes saved, tuple arrays):
    """Say why `cnorm_stream_restore` refused saved bytes, whose layout docs/cells.md has."""
    cdef ptrdiff_t at = len(saved) - 4
    if status == CNORM_ERROR_FORMAT:
        raise ValueError(f"saved must be what Stream.save returned, of this version, got {saved[:16]!r}")
    if status == CNORM_ERROR_ARITHMETIC:
        raise ValueError(f"saved is of generation {int.from_bytes(saved[56:60], 'little')} of the arithmetic, whose "
                         f"bits differ from those of generation {CNORM_ARITHMETIC}, which this version computes: load "
                         "it with the version that wrote it, and hand over the stream's state()")
    if status == CNORM_ERROR_IDENTITY:
        raise ValueError("saved is the stream of another model: the hash of configuration and weights differs")
    if status == CNORM_ERROR_VALUE:
        for name, units, _ in reversed(arrays):
            at -= 4 * units
            if not np.isfinite(np.frombuffer(saved, "<f4", units, at)).all():
                raise ValueError(f"saved must hold a finite state, got NaN or infinity in {name}")
    raise ValueError("saved is not as Stream.save returned it: bytes were changed, lost or added")


def _stream_from(model, saved, check=False):
    stream = model.stream(check=check)
    stream.restore(saved)
    return stream


cdef int check_finite(cnp.ndarray x, str name) except -1:
    """Refuse NaN and infinity in x, which is C-contiguous float32; the message names the first such element."""
    if not is_finite(<const float *>cnp.PyArray_DATA(x), cnp.PyArray_SIZE(x)):
        refuse_infinite(x, name)
    return 0


cdef bint is_finite(const float *p, ptrdiff_t n) noexcept:
    """Whether n numbers have no NaN and no infinity."""
    cdef ptrdiff_t i
    for i in range(n):
        if not isfinite(p[i]):
            return False
    return True


cdef cnp.ndarray input_frames(cnp.ndarray a, str name, int ndim, ptrdiff_t width):
    """`a`, checked to be float32 [..., width] of ndim dimensions; copied if it is not C-contiguous and aligned."""
    if (not has_dtype(a, cnp.NPY_FLOAT32) or cnp.PyArray_NDIM(a) != ndim
            or cnp.PyArray_DIMS(a)[ndim - 1] != width):
        refuse_frames(a, name, ndim, width)
    if not (cnp.PyArray_IS_C_CONTIGUOUS(a) and cnp.PyArray_ISALIGNED(a)):
        a = cnp.PyArray_NewCopy(a, cnp.NPY_CORDER)
    return a


cdef cnp.ndarray output_frames(cnp.ndarray y, int ndim, const cnp.npy_intp *shape):
    """The place for outputs, checked: float32, contiguous, writable, of this shape [ndim]."""
    if (not is_plain(y, cnp.NPY_FLOAT32) or not cnp.PyArray_ISWRITEABLE(y) or cnp.PyArray_NDIM(y) != ndim
            or not cnp.PyArray_CompareLists(cnp.PyArray_DIMS(y), shape, ndim)):
        refuse_output_frames(y, tuple([shape[i] for i in range(ndim)]))
    return y


cdef inline int check_frames(cnp.ndarray x, cnp.ndarray y, ptrdiff_t inputs, ptrdiff_t outputs) except -1:
    """Refuse arrays that were changed after they were checked: x must have `inputs` numbers, y `outputs`."""
    if (not is_plain(x, cnp.NPY_FLOAT32) or not is_plain(y, cnp.NPY_FLOAT32) or not cnp.PyArray_ISWRITEABLE(y)
            or cnp.PyArray_SIZE(x) != inputs or cnp.PyArray_SIZE(y) != outputs):
        refuse_changed()
    return 0
