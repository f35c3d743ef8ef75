"""One step, or several, of many streams of a model; the weights are read once for all of them."""


def step_many(Network network not None, streams, x, out=None, reset=None):
    """See Model.step_many."""
    cdef ptrdiff_t n, i, taken = 0
    cdef cnp.npy_intp shape[3]
    cdef int ndim = 3 if getattr(x, "ndim", 2) == 3 else 2
    cdef cnp.ndarray a, y, mask
    cdef Stream stream
    cdef float **states
    streams = streams_of(network, streams)
    n = len(streams)
    a = input_frames(x, "x", ndim, network.input_size)
    if cnp.PyArray_DIMS(a)[0] != n:
        raise ValueError(f"x must have a row for each of the {n} streams, got shape {(<object>a).shape}")
    for i in range(n):
        if (<Stream>streams[i]).checks:
            check_finite(a[i], f"x[{i}]")
    shape[0], shape[1], shape[ndim - 1] = n, cnp.PyArray_DIMS(a)[1], network.output_size
    if out is None:
        y = cnp.PyArray_EMPTY(ndim, shape, cnp.NPY_FLOAT32, 0)
    else:
        y = output_frames(out, ndim, shape)
        if not disjoint(y, a):
            a = np.array(a, order="C", copy=True)
    mask = None if reset is None else mask_of(reset, n)
    states = <float **>PyMem_Calloc(max(n, 1), sizeof(float *))
    if states == NULL:
        raise MemoryError()
    try:
        for stream in streams:
            stream.enter()
            states[taken] = stream.state_
            taken += 1
        run_many(network, streams, states, a, y, shape[1] if ndim == 3 else 1, mask)
    finally:
        PyMem_Free(states)
        for i in range(taken):
            (<Stream>streams[i]).leave()
    return y


cdef list streams_of(Network network, object streams):
    """The streams as a list, checked to be of this network and to have no stream twice."""
    cdef list found
    if not hasattr(streams, "__iter__"):
        refuse_streams(streams, Stream)
    found = list(streams)
    for one in found:
        if not isinstance(one, Stream):
            refuse_streams(found, Stream)
        if (<Stream>one).network is not network:
            raise ValueError(f"streams[{found.index(one)}] is a stream of another model")
    if len({id(one) for one in found}) < len(found):
        refuse_streams(found, Stream)
    return found


cdef cnp.ndarray mask_of(object reset, ptrdiff_t n):
    cdef cnp.ndarray mask = array_of(reset, "reset")
    if cnp.PyArray_TYPE(mask) != cnp.NPY_BOOL or cnp.PyArray_NDIM(mask) != 1 or cnp.PyArray_DIMS(mask)[0] != n:
        refuse_mask(mask, n)
    return np.ascontiguousarray(mask)


cdef int run_many(Network net, list streams, float **states, cnp.ndarray x, cnp.ndarray y, ptrdiff_t steps,
                  cnp.ndarray mask) except -1:
    """Step streams whose locks are held. All arguments have been checked, so this can't fail half-way."""
    cdef ptrdiff_t n = len(streams), i
    cdef cnp.ndarray scratch = net.scratch(rows_of_many(n))
    cdef const float *px = <const float *>cnp.PyArray_DATA(x)
    cdef float *py = <float *>cnp.PyArray_DATA(y)
    cdef float *memory = <float *>cnp.PyArray_DATA(scratch)
    cdef bint release = net.macs * n * steps > RELEASE_GIL_ABOVE_MACS
    cdef long process = os.getpid() if release else 0
    cdef Stream stream
    cdef cnorm_status status
    for i in range(n):
        stream = streams[i]
        stream.owner = process
        if mask is not None and (<const unsigned char *>cnp.PyArray_DATA(mask))[i]:
            memcpy(states[i], cnp.PyArray_DATA(net.initial), net.state_floats * sizeof(float))
            stream.frames = 0
        stream.frames += steps
    if release:
        with nogil:
            status = steps_of_many(net, n, px, states, memory, py, steps)
    else:
        status = steps_of_many(net, n, px, states, memory, py, steps)
    return check(status)


cdef inline ptrdiff_t rows_of_many(ptrdiff_t n) noexcept nogil:
    """The streams that are computed together."""
    return max(1, min(n, CNORM_ROWS))


cdef cnorm_status steps_of_many(
    Network net, ptrdiff_t n, const float *x, float **states, float *scratch, float *y, ptrdiff_t steps
) noexcept nogil:
    """x [n, steps, inputs] -> y [n, steps, outputs]; scratch is for rows_of_many(n) rows"""
    cdef ptrdiff_t t, inputs = net.input_size, outputs = net.output_size
    cdef cnorm_status status = CNORM_OK
    for t in range(steps):
        status = cnorm_run_many(net.layers, net.count, n, x + t * inputs, steps * inputs, states, scratch,
                                rows_of_many(n), y + t * outputs, steps * outputs)
        if status != CNORM_OK:
            break
    return status
