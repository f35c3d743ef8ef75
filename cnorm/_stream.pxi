"""Streams: the recurrent state of a model, stepped, saved and restored."""

cdef str NO_STREAMS = "a model with a bidirectional layer has no streams: it needs the whole sequence, see Model.run"
cdef bytes SAVED = b"cnorm stream 1\n"  # format of Stream.save: this, the model's identity, the arrays without padding


cdef class Stream:
    """One conversation with a `Model`: its own recurrent state, stepped by one thread at a time.

    Made by ``model.stream()``; the state starts at zero, or at what the cells have learned. A stream is small: the
    state and one step's scratch. A NaN or infinity in x goes into the state and stays there until `reset`.

    Parameters
    ----------
    model : Model
        Without bidirectional layers.
    """
    cdef object __weakref__
    cdef readonly object model
    cdef Network network
    cdef cnp.ndarray state_memory, scratch_memory
    cdef float *state_
    cdef int busy

    def __cinit__(self, model, network=None):
        self.model = model
        if network is None:
            network = getattr(model, "_network", False)
            if network is False:
                raise TypeError(f"model must be a cnorm.Model, got {type(model).__name__}")
        self.network = network
        if self.network is None:
            raise ValueError(NO_STREAMS)
        self.state_memory = aligned_zeros(self.network.state_floats)
        self.state_memory[:] = self.network.initial
        self.scratch_memory = self.network.scratch(1)
        self.state_ = <float *>cnp.PyArray_DATA(self.state_memory)

    cdef int enter(self) except -1:
        if not try_lock(&self.busy):
            raise RuntimeError("this stream is in use by another thread; give each thread a stream of its own")
        return 0

    cdef int run(self, cnp.ndarray x, cnp.ndarray y, ptrdiff_t steps, cnp.ndarray scratch, ptrdiff_t rows) except -1:
        cdef Network net = self.network
        cdef float *room = <float *>cnp.PyArray_DATA(scratch)
        cdef const float *px = <const float *>cnp.PyArray_DATA(x)
        cdef float *py = <float *>cnp.PyArray_DATA(y)
        cdef cnorm_status status
        self.enter()
        if net.macs * steps > RELEASE_GIL_ABOVE_MACS:
            with nogil:
                status = cnorm_run(net.layers, net.count, steps, px, net.input_size, self.state_, room, rows, py,
                                   net.output_size)
        else:
            status = cnorm_run(net.layers, net.count, steps, px, net.input_size, self.state_, room, rows, py,
                               net.output_size)
        unlock(&self.busy)
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
            For another shape. State and `out` are then unchanged.
        RuntimeError
            If another thread is using this stream.
        """
        cdef cnp.ndarray a = frames(x, "x", 1, self.network.input_size), y
        if out is None:
            y = cnp.PyArray_EMPTY(1, <cnp.npy_intp *>&self.network.output_size, cnp.NPY_FLOAT32, 0)
        else:
            y = frames_out(out, 1, 0, self.network.output_size)
            if cnp.PyArray_DATA(y) != cnp.PyArray_DATA(a) and not disjoint(y, a):  # else x is overwritten unread
                a = np.array(a, order="C", copy=True)
        self.run(a, y, 1, self.scratch_memory, 1)
        return y

    def process(self, x, out=None):
        """Many steps, one after the other: the same bits as `step` on each row.

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
        cdef cnp.ndarray a = frames(x, "x", 2, self.network.input_size), y
        cdef cnp.npy_intp shape[2]
        shape[0], shape[1] = cnp.PyArray_DIMS(a)[0], self.network.output_size
        if out is None:
            y = cnp.PyArray_EMPTY(2, shape, cnp.NPY_FLOAT32, 0)
        else:
            y = frames_out(out, 2, shape[0], shape[1])
            if not disjoint(y, a):  # a later row of x could be overwritten before it is read
                a = np.array(a, order="C", copy=True)
        if shape[0] > 1:  # several steps share one reading of the weights for the input, in a room of their own
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
            unlock(&self.busy)

    def set_state(self, state):
        """Replace the whole recurrent state.

        Parameters
        ----------
        state : mapping of str to ndarray, shape (units,), float32
            The names and shapes of `state`, all of them, finite.

        Raises
        ------
        TypeError
            If an array is not float32.
        ValueError
            For a missing or unknown name, another shape, NaN or infinity. The state is then unchanged.
        RuntimeError
            If another thread is using this stream.
        """
        expected = {name: units for name, units, _ in self.network.state_arrays}
        if not hasattr(state, "keys"):
            raise TypeError(f"state must be a mapping of names to arrays, got {type(state).__name__}")
        if set(state.keys()) != expected.keys():
            raise ValueError(f"state must have the names {sorted(expected)}, got {sorted(map(str, state.keys()))}")
        cdef cnp.ndarray whole = self.network.initial.copy()
        for name, units, offset in self.network.state_arrays:
            array = frames(state[name], f"state[{name!r}]", 1, units)
            if not np.isfinite(array).all():
                raise ValueError(f"state[{name!r}] must be finite, got NaN or infinity")
            whole[offset:offset + units] = array
        self.replace(whole)

    cdef int replace(self, cnp.ndarray whole) except -1:
        self.enter()  # and nothing fails after it
        memcpy(self.state_, cnp.PyArray_DATA(whole), self.network.state_floats * sizeof(float))
        unlock(&self.busy)
        return 0

    def reset(self, state=None):
        """Back to the state at the start, zero or what the cells have learned, or to a given one.

        Parameters
        ----------
        state : mapping, optional
            As for `set_state`.

        Raises
        ------
        TypeError, ValueError, RuntimeError
            As `set_state`.
        """
        if state is not None:
            self.set_state(state)
        else:
            self.replace(self.network.initial)

    def save(self):
        """The state as bytes, for ``model.restore``, here or in another process or machine.

        Returns
        -------
        bytes
            Tied to the model by a hash of its configuration and weights. A state that a NaN or infinity has spoiled is
            saved too, but ``model.restore``, and with it copying and unpickling, refuses it.

        Raises
        ------
        RuntimeError
            If another thread is using this stream.
        """
        arrays = self.state()
        return SAVED + self.network.identity + b"".join(a.astype("<f4").tobytes() for a in arrays.values())

    def _restore(self, saved):
        """Set the state from what `save` returned; see Model.restore."""
        if not isinstance(saved, (bytes, bytearray, memoryview)):
            raise TypeError(f"saved must be bytes, got {type(saved).__name__}")
        saved = bytes(saved)
        head = len(SAVED)
        body = head + len(self.network.identity)
        if saved[:head] != SAVED:
            raise ValueError(f"saved must be what Stream.save returned, beginning {SAVED!r}, got {saved[:head]!r}")
        if saved[head:body] != self.network.identity:
            raise ValueError("saved is the stream of another model: the hash of configuration and weights differs")
        sizes = [units for _, units, _ in self.network.state_arrays]
        if len(saved) - body != 4 * sum(sizes):
            raise ValueError(f"saved must hold {4 * sum(sizes)} bytes of state, got {len(saved) - body}")
        values = np.split(np.frombuffer(saved, "<f4", offset=body).astype(np.float32), np.cumsum(sizes)[:-1])
        self.set_state({name: v for (name, _, _), v in zip(self.network.state_arrays, values)})

    def __copy__(self):
        return self.model.restore(self.save())

    def __deepcopy__(self, memo):
        return self.__copy__()

    def __reduce__(self):
        return _stream_from, (self.model, self.save())


def _stream_from(model, saved):
    return model.restore(saved)


def step_many(model, streams, x, out=None, reset=None):
    """See Model.step_many."""
    cdef Network net = model._network
    cdef Stream stream
    cdef ptrdiff_t n, i, taken = 0, rows
    cdef cnp.ndarray a, y, room, mask = None
    cdef const float *px
    cdef float *py
    cdef float *scratch
    cdef float **states
    cdef cnorm_status status
    if net is None:
        raise ValueError(NO_STREAMS)
    if not hasattr(streams, "__iter__"):
        raise TypeError(f"streams must be a sequence of Stream, got {type(streams).__name__}")
    streams = list(streams)
    n = len(streams)
    places = {}
    for i, one in enumerate(streams):
        if not isinstance(one, Stream):
            raise TypeError(f"streams[{i}] must be a Stream, got {type(one).__name__}")
        if (<Stream>one).network is not net:
            raise ValueError(f"streams[{i}] is a stream of another model")
        if places.setdefault(id(one), i) != i:
            raise ValueError(f"streams must not have the same stream twice, got streams[{places[id(one)]}] again as "
                             f"streams[{i}]")
    a = frames(x, "x", 2, net.input_size)
    if cnp.PyArray_DIMS(a)[0] != n:
        raise ValueError(f"x must have a row for each of the {n} streams, got shape {(<object>a).shape}")
    if out is None:
        y = np.empty((n, net.output_size), np.float32)
    else:
        y = frames_out(out, 2, n, net.output_size)
        if not disjoint(y, a):
            a = np.array(a, order="C", copy=True)
    if reset is not None:
        reset = as_array(reset, "reset")
        if reset.dtype != np.bool_:
            raise TypeError(f"reset must have dtype bool, got {reset.dtype}")
        if reset.shape != (n,):
            raise ValueError(f"reset must have shape ({n},), got {reset.shape}")
        mask = np.ascontiguousarray(reset)
    rows = max(1, min(n, CNORM_ROWS))
    room = net.scratch(rows)
    states = <float **>PyMem_Calloc(max(n, 1), sizeof(float *))
    if states == NULL:
        raise MemoryError()
    try:
        for one in streams:
            stream = one
            stream.enter()
            states[taken] = stream.state_
            taken += 1
        for i in range(n if mask is not None else 0):  # from here on nothing fails
            if (<const unsigned char *>cnp.PyArray_DATA(mask))[i]:
                memcpy(states[i], cnp.PyArray_DATA(net.initial), net.state_floats * sizeof(float))
        px, py = <const float *>cnp.PyArray_DATA(a), <float *>cnp.PyArray_DATA(y)
        scratch = <float *>cnp.PyArray_DATA(room)
        if net.macs * n > RELEASE_GIL_ABOVE_MACS:
            with nogil:
                status = cnorm_run_many(net.layers, net.count, n, px, net.input_size, states, scratch, rows, py,
                                        net.output_size)
        else:
            status = cnorm_run_many(net.layers, net.count, n, px, net.input_size, states, scratch, rows, py,
                                    net.output_size)
        check(status)
    finally:
        PyMem_Free(states)
        for i in range(taken):
            unlock(&(<Stream>streams[i]).busy)
    return y


cdef cnp.ndarray frames(object x, str name, int ndim, ptrdiff_t width):
    """x as a C-contiguous, aligned float32 array [width] or [steps, width]."""
    cdef cnp.ndarray a = as_array(x, name)
    if cnp.PyArray_TYPE(a) != cnp.NPY_FLOAT32 or not cnp.PyArray_ISNOTSWAPPED(a):
        raise TypeError(f"{name} must have dtype float32, got {a.dtype}")
    if cnp.PyArray_NDIM(a) != ndim or cnp.PyArray_DIMS(a)[ndim - 1] != width:
        raise ValueError(f"{name} must have shape {f'({width},)' if ndim == 1 else f'(steps, {width})'}, "
                         f"got {(<object>a).shape}")
    if not (cnp.PyArray_IS_C_CONTIGUOUS(a) and cnp.PyArray_ISALIGNED(a)):
        a = np.array(a, order="C", copy=True)
    return a


cdef cnp.ndarray frames_out(object out, int ndim, ptrdiff_t steps, ptrdiff_t width):
    """The caller's output array, checked."""
    cdef cnp.ndarray y
    check_array(out, "out")
    y = out
    if cnp.PyArray_TYPE(y) != cnp.NPY_FLOAT32 or not cnp.PyArray_ISNOTSWAPPED(y):
        raise TypeError(f"out must have dtype float32, got {y.dtype}")
    if (cnp.PyArray_NDIM(y) != ndim or cnp.PyArray_DIMS(y)[ndim - 1] != width
            or (ndim == 2 and cnp.PyArray_DIMS(y)[0] != steps)):
        wanted = f"({width},)" if ndim == 1 else f"({steps}, {width})"
        raise ValueError(f"out must have shape {wanted}, got {(<object>y).shape}")
    if not (cnp.PyArray_IS_C_CONTIGUOUS(y) and cnp.PyArray_ISALIGNED(y) and cnp.PyArray_ISWRITEABLE(y)):
        raise ValueError(f"out must be C-contiguous, aligned and writable, got shape {(<object>y).shape} with strides "
                         f"{(<object>y).strides}, aligned {y.flags.aligned}, writable {y.flags.writeable}")
    return y
