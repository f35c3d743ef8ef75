"""Streams: a recurrent state of a model, with functions to step, save and restore it."""

# Format 2 of Stream.save, little-endian; docs/cells.md has the table, src/rnn/stream.c the same for C:
#     16 bytes  SAVED
#     32 bytes  identity of the model
#      8 bytes  frames, unsigned
#      4 bytes  for each float of the state: the arrays of `Stream.state` in their order, without padding
#      4 bytes  CRC-32 (zlib's) of all bytes before it
cdef bytes SAVED = b"cnorm stream 2\n\0"
cdef bytes SAVED_1 = b"cnorm stream 1\n"  # no checksum, no frames: refused
cdef int HEAD = 56


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
    cdef readonly unsigned long long frames
    cdef Network network
    cdef cnp.ndarray state_memory, scratch_memory
    cdef float *state_
    cdef bint checks  # whether x must be finite
    cdef int busy  # the lock: 1 while a thread uses the stream
    cdef long owner  # process id of that thread while it runs without the GIL; else 0

    def __cinit__(self, model, network=None, bint check=False):
        if network is None:
            if not hasattr(model, "stream"):
                raise TypeError(f"model must be a cnorm.Model, got {type(model).__name__}")
            network = (<Stream?>model.stream()).network
        self.model, self.network, self.checks = model, network, check
        self.state_memory = aligned_zeros(self.network.state_floats)
        self.state_memory[:] = self.network.initial
        self.scratch_memory = self.network.scratch(1)
        self.state_ = <float *>cnp.PyArray_DATA(self.state_memory)

    cdef int enter(self, bint replaces_state=False) except -1:
        """Take the lock.

        If the process was forked while another thread held it, that thread does not exist in the child and the state
        may be half-written: then only calls that replace the whole state may take over the lock.
        """
        cdef long process
        if try_lock(&self.busy):
            return 0
        process = os.getpid()
        if self.owner == 0 or self.owner == process:  # from here to the end the GIL is held
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

    cdef int run(self, cnp.ndarray x, cnp.ndarray y, ptrdiff_t steps, cnp.ndarray scratch, ptrdiff_t rows) except -1:
        cdef Network net = self.network
        cdef float *memory = <float *>cnp.PyArray_DATA(scratch)
        cdef const float *px = <const float *>cnp.PyArray_DATA(x)
        cdef float *py = <float *>cnp.PyArray_DATA(y)
        cdef bint release = net.macs * steps > RELEASE_GIL_ABOVE_MACS
        cdef long process = os.getpid() if release else 0
        cdef cnorm_status status
        self.enter()  # nothing between this and `leave` may raise
        self.owner = process
        if release:
            with nogil:
                status = cnorm_run(net.layers, net.count, steps, px, net.input_size, self.state_, memory, rows, py,
                                   net.output_size)
        else:
            status = cnorm_run(net.layers, net.count, steps, px, net.input_size, self.state_, memory, rows, py,
                               net.output_size)
        self.frames += steps
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
        cdef cnp.ndarray a = input_frames(x, "x", 1, self.network.input_size), y
        if self.checks:
            check_finite(a, "x")
        if out is None:
            y = cnp.PyArray_EMPTY(1, <cnp.npy_intp *>&self.network.output_size, cnp.NPY_FLOAT32, 0)
        else:
            y = output_frames(out, 1, <cnp.npy_intp *>&self.network.output_size)
            # if they overlap partly, y could overwrite elements of x before they are read
            if cnp.PyArray_DATA(y) != cnp.PyArray_DATA(a) and not disjoint(y, a):
                a = np.array(a, order="C", copy=True)
        self.run(a, y, 1, self.scratch_memory, 1)
        return y

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
        cdef cnp.ndarray a = input_frames(x, "x", 2, self.network.input_size), y
        cdef cnp.npy_intp shape[2]
        if self.checks:
            check_finite(a, "x")
        shape[0], shape[1] = cnp.PyArray_DIMS(a)[0], self.network.output_size
        if out is None:
            y = cnp.PyArray_EMPTY(2, shape, cnp.NPY_FLOAT32, 0)
        else:
            y = output_frames(out, 2, shape)
            if not disjoint(y, a):  # a later row of x could be overwritten before it is read
                a = np.array(a, order="C", copy=True)
        if shape[0] > 1:  # the product with the inputs is done for several steps at a time, in larger scratch
            self.run(a, y, shape[0], self.network.scratch(min(shape[0], CNORM_ROWS)), min(shape[0], CNORM_ROWS))
        else:
            self.run(a, y, shape[0], self.scratch_memory, 1)
        return y

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
        self.enter()
        try:
            return {name: self.state_memory[offset:offset + units].copy()
                    for name, units, offset in self.network.state_arrays}
        finally:
            self.leave()

    @property
    def is_finite(self):
        """Whether the state has no NaN and no infinity; RuntimeError if another thread is using this stream."""
        return all([np.isfinite(a).all() for a in self.state().values()])

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
        self.replace(self.checked(state), self.frames)

    cdef cnp.ndarray checked(self, state):
        """A given state, checked, in the layout of `state_memory`."""
        expected = {name: units for name, units, _ in self.network.state_arrays}
        if not hasattr(state, "keys"):
            raise TypeError(f"state must be a mapping of names to arrays, got {type(state).__name__}")
        if set(state.keys()) != expected.keys():
            raise ValueError(f"state must have the names {sorted(expected)}, got {quoted(sorted(map(str, state)))}")
        cdef cnp.ndarray whole = self.network.initial.copy()
        for name, units, offset in self.network.state_arrays:
            array = input_frames(state[name], f"state[{name!r}]", 1, units)
            if not np.isfinite(array).all():
                raise ValueError(f"state[{name!r}] must be finite, got NaN or infinity")
            whole[offset:offset + units] = array
        return whole

    cdef int replace(self, cnp.ndarray whole, unsigned long long frames) except -1:
        self.enter(True)  # nothing between this and `leave` may raise
        memcpy(self.state_, cnp.PyArray_DATA(whole), self.network.state_floats * sizeof(float))
        self.frames = frames
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
        arrays, start = self.network.state_arrays, HEAD
        saved = bytearray(HEAD + 4 * sum([units for _, units, _ in arrays]))
        self.enter()
        try:
            saved[:HEAD] = SAVED + self.network.identity + self.frames.to_bytes(8, "little")
            for _, units, offset in arrays:
                np.frombuffer(saved, "<f4", units, start)[:] = self.state_memory[offset:offset + units]
                start += 4 * units
        finally:
            self.leave()
        return bytes(saved) + zlib.crc32(saved).to_bytes(4, "little")

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
        if not isinstance(saved, (bytes, bytearray, memoryview)):
            raise TypeError(f"saved must be bytes, got {type(saved).__name__}")
        saved = memoryview(saved).cast("B")
        arrays = self.network.state_arrays
        size = 4 * sum([units for _, units, _ in arrays])
        if saved[:len(SAVED_1)] == SAVED_1:
            raise ValueError("saved is of format 1, which has no checksum and is not read any more: load it with the "
                             "version that wrote it, and hand over the stream's state()")
        if saved[:len(SAVED)] != SAVED:
            raise ValueError(f"saved must be what Stream.save returned, beginning {SAVED!r}, "
                             f"got {bytes(saved[:len(SAVED)])!r}")
        if len(saved) < HEAD + 4 or zlib.crc32(saved[:-4]) != int.from_bytes(saved[-4:], "little"):
            raise ValueError("saved is not as Stream.save returned it: its checksum does not match")
        if saved[len(SAVED):HEAD - 8] != self.network.identity:
            raise ValueError("saved is the stream of another model: the hash of configuration and weights differs")
        if len(saved) != HEAD + size + 4:
            raise ValueError(f"saved must hold {size} bytes of state, got {len(saved) - HEAD - 4}")
        whole, start = self.network.initial.copy(), HEAD
        for name, units, offset in arrays:
            whole[offset:offset + units] = np.frombuffer(saved, "<f4", units, start)
            if not np.isfinite(whole[offset:offset + units]).all():
                raise ValueError(f"saved must hold a finite state, got NaN or infinity in {name}")
            start += 4 * units
        self.replace(whole, int.from_bytes(saved[HEAD - 8:HEAD], "little"))

    def __repr__(self):
        return f"Stream({self.model!r}, frames={self.frames})"

    def __copy__(self):
        return _stream_from(self.model, self.save(), self.checks)

    def __deepcopy__(self, memo):
        return self.__copy__()

    def __reduce__(self):
        return _stream_from, (self.model, self.save(), bool(self.checks))


def _stream_from(model, saved, check=False):
    stream = model.stream(check=check)
    stream.restore(saved)
    return stream


cdef int check_finite(cnp.ndarray x, str name) except -1:
    """Refuse NaN and infinity in x, which is C-contiguous float32; the message names the first such element."""
    cdef const float *p = <const float *>cnp.PyArray_DATA(x)
    cdef ptrdiff_t i
    for i in range(cnp.PyArray_SIZE(x)):
        if not isfinite(p[i]):
            refuse_infinite(x, name)
    return 0


cdef cnp.ndarray input_frames(object x, str name, int ndim, ptrdiff_t width):
    """x as a C-contiguous, aligned float32 array [..., width] of ndim dimensions."""
    cdef cnp.ndarray a = array_of(x, name)
    if (not has_dtype(a, cnp.NPY_FLOAT32) or cnp.PyArray_NDIM(a) != ndim
            or cnp.PyArray_DIMS(a)[ndim - 1] != width):
        refuse_frames(a, name, ndim, width)
    if not (cnp.PyArray_IS_C_CONTIGUOUS(a) and cnp.PyArray_ISALIGNED(a)):
        a = np.array(a, order="C", copy=True)
    return a


cdef cnp.ndarray output_frames(object out, int ndim, const cnp.npy_intp *shape):
    """The caller's output array, checked: float32, contiguous, writable, of this shape [ndim]."""
    cdef cnp.ndarray y
    if isinstance(out, cnp.ndarray):
        y = out
        if (is_plain(y, cnp.NPY_FLOAT32) and cnp.PyArray_ISNOTSWAPPED(y) and cnp.PyArray_ISWRITEABLE(y)
                and cnp.PyArray_NDIM(y) == ndim and cnp.PyArray_CompareLists(cnp.PyArray_DIMS(y), shape, ndim)
                and (type(out) is cnp.ndarray or not isinstance(out, np.ma.MaskedArray))):
            return y
    refuse_output_frames(out, tuple([shape[i] for i in range(ndim)]))
