"""One step, or several, of many streams of a model; the weights are read once for all of them."""


def step_many(Network network not None, streams, x, out=None, reset=None):
    """See Model.step_many."""
    cdef list taken = streams_of(network, streams)
    cdef cnp.npy_intp n = len(taken), i
    cdef cnp.npy_intp shape[3]
    cdef cnp.ndarray a = array_of(x, "x"), place = place_of(out, "out"), mask = parameter_of(reset, "reset")
    cdef cnp.ndarray y, pointers
    cdef int ndim = 3 if cnp.PyArray_NDIM(a) == 3 else 2
    a = input_frames(a, "x", ndim, network.input_size)
    if cnp.PyArray_DIMS(a)[0] != n:
        refuse_rows(a, n)
    for i in range(n):
        if (<Stream>PyList_GetItem(taken, i)).checks:
            check_finite(a[i], f"x[{i}]")
    shape[0], shape[1], shape[ndim - 1] = n, cnp.PyArray_DIMS(a)[1], network.output_size
    if out is None:
        y = cnp.PyArray_EMPTY(ndim, shape, cnp.NPY_FLOAT32, 0)
    else:
        y = output_frames(place, ndim, shape)
        if not disjoint(y, a):
            a = cnp.PyArray_NewCopy(a, cnp.NPY_CORDER)
    if mask is not None:
        mask = checked_mask(mask, n)
    pointers = cnp.PyArray_EMPTY(1, &n, cnp.NPY_INTP, 0)
    run_many(network, taken, <float **>cnp.PyArray_DATA(pointers), a, y, shape[1] if ndim == 3 else 1, mask)
    return y if out is None else out


cdef list streams_of(Network network, object streams):
    """The streams as a list, checked to be of this network and to have no stream twice."""
    cdef list found
    if not hasattr(streams, "__iter__"):
        refuse_streams(streams, Stream)
    found = list(streams)
    for i, one in enumerate(found):
        if not isinstance(one, Stream):  # its real type, whatever its __class__ says
            refuse_streams(found, Stream)
        if (<Stream>one).network is not network:
            refuse_foreign_stream(i)
    if len({<size_t><void *>one for one in found}) < len(found):
        refuse_streams(found, Stream)
    return found


cdef cnp.ndarray checked_mask(cnp.ndarray mask, ptrdiff_t n):
    if cnp.PyArray_TYPE(mask) != cnp.NPY_BOOL or cnp.PyArray_NDIM(mask) != 1 or cnp.PyArray_DIMS(mask)[0] != n:
        refuse_mask(mask, n)
    return np.ascontiguousarray(mask)


cdef int run_many(Network net, list streams, float **states, cnp.ndarray x, cnp.ndarray y, ptrdiff_t steps,
                  cnp.ndarray mask) except -1:
    """Step streams; all arguments have been checked. `states`: memory for a pointer for each stream."""
    cdef ptrdiff_t n = len(streams), i
    cdef cnp.ndarray scratch = net.scratch(max(1, n))
    cdef const float *px
    cdef float *py
    cdef float *memory = <float *>cnp.PyArray_DATA(scratch)
    cdef bint release = net.macs * n * steps > RELEASE_GIL_ABOVE_MACS
    cdef long process = PROCESS if release else 0
    cdef Stream stream
    cdef cnorm_status status
    if net.has_tokens:
        net.check_frames(x)
    check_frames(x, y, n * steps * net.input_size, n * steps * net.output_size)
    if mask is not None and cnp.PyArray_NBYTES(mask) != n:
        refuse_changed()
    px, py = <const float *>cnp.PyArray_DATA(x), <float *>cnp.PyArray_DATA(y)
    enter_all(streams)  # nothing between this and `leave_all` may raise
    for i in range(n):
        stream = <Stream>PyList_GetItem(streams, i)
        states[i], stream.owner = stream.stream.state, process
        if mask is not None and (<const unsigned char *>cnp.PyArray_DATA(mask))[i]:
            memcpy(states[i], cnp.PyArray_DATA(net.initial), net.state_floats * sizeof(float))
            stream.stream.frames = 0
        stream.stream.frames += steps
    if release:
        with nogil:
            status = steps_of_many(net, n, px, states, memory, py, steps)
    else:
        status = steps_of_many(net, n, px, states, memory, py, steps)
    leave_all(streams, n)
    return check(status)


cdef int enter_all(list streams) except -1:
    """Take the locks of all streams, or of none if one is held."""
    cdef ptrdiff_t i
    for i in range(len(streams)):
        try:
            (<Stream>PyList_GetItem(streams, i)).enter()
        except BaseException:
            leave_all(streams, i)
            raise
    return 0


cdef void leave_all(list streams, ptrdiff_t n) noexcept:
    """Release the locks of the first n streams."""
    cdef ptrdiff_t i
    for i in range(n):
        (<Stream>PyList_GetItem(streams, i)).leave()


cdef cnorm_status steps_of_many(
    Network net, ptrdiff_t n, const float *x, float **states, float *scratch, float *y, ptrdiff_t steps
) noexcept nogil:
    """x [n, steps, inputs] -> y [n, steps, outputs]; scratch is for max(1, n) rows"""
    cdef ptrdiff_t t
    cdef cnorm_status status = CNORM_OK
    cdef cnorm_frames call
    memset(&call, 0, sizeof(call))
    call.layers, call.count, call.checked, call.frames, call.rows = net.layers, net.count, 1, n, n
    call.x_stride, call.y_stride = steps * net.input_size, steps * net.output_size
    call.states, call.scratch = states, scratch
    for t in range(steps):
        call.x, call.y = x + t * net.input_size, y + t * net.output_size
        status = cnorm_run_many(&call)
        if status != CNORM_OK:
            break
    return status
