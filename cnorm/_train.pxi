"""Training: a network whose weights can change, its tape and gradients; the updates of the optimisers (private)."""


@cython.no_gc  # its arrays stay while a finaliser can use it; no cycle goes through it
cdef class Tape:
    """A packed network whose weights can change, a tape of `steps` steps of `batch` streams, and the gradients.

    The tape records what the backward pass needs of each step of the forward pass.

    Parameters
    ----------
    layers : sequence of (layer, size)
        As for `Network`.
    steps, batch : int
    network : Network, optional
        Of these layers, packed already; it is then not to be changed by `load`.
    memory : ndarray, optional
        The memory of a tape of the same size, which is copied.

    Attributes
    ----------
    gradients : tuple of dict of str to ndarray
        For each layer, by the names of its fields (src/rnn/layers): [gates, units, cols] for a matrix, [gates, units]
        for a vector that is divided among the gates, else [units]. Overwritten by `backward`.
    state : ndarray, shape (batch, state floats), float32
        Padded; updated by `run`. `dstate` is its gradient.
    state_arrays : tuple of (name, units, start)
        The offset of h and c of each cell in a row of `state`.
    memory : ndarray, float32
        The memory of the tape.
    """
    cdef readonly Network network
    cdef readonly tuple gradients, state_arrays
    cdef readonly cnp.ndarray state, dstate, memory
    cdef cnp.ndarray scratch, backward_scratch
    cdef cnorm_gradient *to
    cdef cnorm_tape tape
    cdef list owned

    def __cinit__(self, layers, ptrdiff_t steps, ptrdiff_t batch, Network network=None, cnp.ndarray memory=None):
        cdef Network net = Network(layers, b"") if network is None else network
        cdef cnp.npy_intp floats
        cdef const float *kept
        self.network, self.owned, self.state_arrays = net, [], net.state_arrays
        self.tape.layers, self.tape.count = net.layers, net.count
        self.tape.steps, self.tape.batch = steps, batch
        floats = cnorm_tape_floats(&self.tape)
        if floats == 0:
            raise ValueError(f"steps and batch must be at least 1 and not too large, got {steps} and {batch}")
        if memory is not None:  # before it is allocated: a file may ask for more than there is
            tape_data(memory, "memory", &floats, 1, False)
        self.memory = aligned_floats(floats, memory is None)
        if memory is not None:
            kept = tape_data(memory, "memory", &floats, 1, False)
            memcpy(cnp.PyArray_DATA(self.memory), kept, floats * sizeof(float))
        self.tape.memory = <float *>cnp.PyArray_DATA(self.memory)
        self.scratch = aligned_zeros(cnorm_run_tape_floats(&self.tape))
        self.backward_scratch = aligned_zeros(cnorm_backward_floats(&self.tape))
        self.state = aligned_zeros(batch * net.state_floats).reshape(batch, net.state_floats)
        self.dstate = aligned_zeros(batch * net.state_floats).reshape(batch, net.state_floats)
        self.to = <cnorm_gradient *>PyMem_Calloc(net.count, sizeof(cnorm_gradient))
        if self.to == NULL:
            raise MemoryError()
        self.gradients = tuple([self.arrays(i) for i in range(net.count)])
        self.start()

    def __dealloc__(self):
        PyMem_Free(self.to)

    cdef dict arrays(self, int i):
        """Allocate the gradients of a layer; vectors are padded."""
        cdef cnorm_layer *layer = &self.network.layers[i]
        cdef const layer_field *field = cnorm_layer_ops_of(layer.kind).fields
        cdef const cnorm_matrix *m
        cdef vector_shape shape
        cdef cnp.ndarray flat
        cdef dict named = {}
        while field.name != NULL:
            if has_field(layer, field):
                if field.shape == NULL:
                    m = field_matrix(layer, field)
                    sizes, floats = [m.gates, m.units, m.cols], m.gates * m.units * m.cols
                else:
                    shape = field.shape(layer)
                    sizes = [shape.gates, shape.units] if shape.gates > 0 else [shape.units]
                    floats = max(shape.gates, 1) * cnorm_padded_units(shape.units)
                flat = aligned_zeros(floats)
                self.owned.append(flat)
                named[name_of(field.name)] = grid(flat, tuple(sizes))
                (<float **>(<char *>&self.to[i] + field.gradient))[0] = <float *>cnp.PyArray_DATA(flat)
            field += 1
        return named

    def start(self):
        """Set every stream to the initial state."""
        self.state[...] = self.network.initial

    def load(self, int i, dict packed):
        """Replace the weights of layer i, and the initial values of its state, by the names of its fields."""
        cdef cnorm_layer *layer = &self.network.layers[i]
        cdef const layer_ops *ops = cnorm_layer_ops_of(layer.kind)
        cdef const layer_field *field = ops.fields
        cdef ptrdiff_t offset = cnorm_state_floats(self.network.layers, i)
        cdef vector_shape shape
        cdef int k
        while field.name != NULL:
            if has_field(layer, field):
                if field.shape == NULL:
                    repack(field_matrix(layer, field), packed[name_of(field.name)])
                else:
                    shape = field.shape(layer)
                    refill(field_vector(layer, field)[0], packed[name_of(field.name)], max(shape.gates, 1), shape.units)
            field += 1
        for k in range(LAYER_STATES if ops.state != NULL else 0):
            if ops.state(layer, k) > 0:
                start = packed.get(name_of(ops.state_names[k]) + "0")
                if start is not None:
                    self.network.initial[offset:offset + len(start)] = start
                offset += cnorm_padded_units(ops.state(layer, k))

    cdef float *rows(self, ptrdiff_t first, ptrdiff_t steps, a, str name, ptrdiff_t width, bint written) except NULL:
        """The data of an array [steps, batch, width] that belongs to these steps of the tape."""
        if first < 0 or steps < 1 or first > self.tape.steps - steps:
            check(CNORM_ERROR_SIZE)
        return tape_data(a, name, [steps, self.tape.batch, width], 3, written)

    def run(self, ptrdiff_t first, ptrdiff_t steps, cnp.ndarray x, cnp.ndarray y):
        """Run and record steps, the first at `first`: x [steps, batch, inputs] -> y [steps, batch, outputs]."""
        cdef float *state = <float *>cnp.PyArray_DATA(self.state)
        cdef float *scratch = <float *>cnp.PyArray_DATA(self.scratch)
        cdef cnorm_status status
        if self.network.has_tokens:
            self.network.check_frames(x)
        cdef const float *px = self.rows(first, steps, x, "x", self.network.input_size, False)
        cdef float *py = self.rows(first, steps, y, "y", self.network.output_size, True)
        if self.network.macs * steps * self.tape.batch > RELEASE_GIL_ABOVE_MACS:
            with nogil:
                status = cnorm_run_tape(&self.tape, first, steps, px, state, scratch, py)
        else:
            status = cnorm_run_tape(&self.tape, first, steps, px, state, scratch, py)
        check(status)

    def backward(self, ptrdiff_t first, ptrdiff_t steps, cnp.ndarray dy, dx=None):
        """dy [steps, batch, outputs] -> gradients, dstate and, if given, dx, shaped as x; overwrites the tape."""
        cdef cnorm_backward call
        cdef cnorm_status status
        call.first, call.steps = first, steps
        call.dy = self.rows(first, steps, dy, "dy", self.network.output_size, False)
        call.dx = NULL
        if dx is not None:
            call.dx = self.rows(first, steps, dx, "dx", self.network.input_size, True)
        call.dstate = <float *>cnp.PyArray_DATA(self.dstate)
        call.gradients, call.sums = self.to, NULL
        call.scratch = <float *>cnp.PyArray_DATA(self.backward_scratch)
        if self.network.macs * call.steps * self.tape.batch > RELEASE_GIL_ABOVE_MACS:
            with nogil:
                status = cnorm_run_backward(&self.tape, &call)
        else:
            status = cnorm_run_backward(&self.tape, &call)
        check(status)

    def drop(self, ptrdiff_t first, ptrdiff_t end):
        """Drop the steps before `first`, and move those from `first` to `end` to the start of the tape."""
        check(cnorm_tape_drop(&self.tape, first, end))


cdef float *tape_data(a, str name, const cnp.npy_intp *shape, int ndim, bint written) except NULL:
    """The data of a C-contiguous float32 array of this shape, or of one whose missing axes have the length 1.

    It makes no object, as a collection of garbage could change the arrays of a call whose data are known already.
    """
    cdef cnp.ndarray given
    if type(a) is cnp.ndarray:
        given = <cnp.ndarray>a
        if (is_plain(given, cnp.NPY_FLOAT32) and (not written or cnp.PyArray_ISWRITEABLE(given))
                and ends_with(given, shape, ndim)):
            return <float *>cnp.PyArray_DATA(given)
    refuse_tape_array(a, name, tuple([shape[i] for i in range(ndim)]))


cdef bint ends_with(cnp.ndarray a, const cnp.npy_intp *shape, int ndim) noexcept:
    """Whether `a` has this shape, but for first axes of the length 1."""
    cdef int missing = ndim - cnp.PyArray_NDIM(a), i
    for i in range(missing):
        if shape[i] != 1:
            return False
    return missing >= 0 and same_lengths(cnp.PyArray_DIMS(a), <cnp.npy_intp *>shape + missing, ndim - missing)


cdef int repack(const cnorm_matrix *m, w) except -1:
    cdef cnp.ndarray a = np.ascontiguousarray(w, np.float32)
    if cnp.PyArray_SIZE(a) != m.gates * m.units * m.cols:
        raise ValueError(f"a matrix must have {m.gates * m.units * m.cols} elements, got {a.size}")
    return check(cnorm_matrix_pack(m.gates, m.units, m.cols, m.group, <const float *>cnp.PyArray_DATA(a),
                                   <float *>m.panels))


cdef int refill(const float *padded, v, ptrdiff_t gates, ptrdiff_t units) except -1:
    """Copy v [gates * units] into `padded` [gates, padded units]."""
    cdef cnp.ndarray a = np.ascontiguousarray(v, np.float32)
    cdef ptrdiff_t width = cnorm_padded_units(units), g
    if cnp.PyArray_SIZE(a) != gates * units:
        raise ValueError(f"a vector must have {gates * units} elements, got {a.size}")
    for g in range(gates):
        memcpy(<float *>padded + g * width, <const float *>cnp.PyArray_DATA(a) + g * units, units * sizeof(float))
    return 0


def same_bits(cnp.ndarray a, cnp.ndarray b):
    """Whether two C-contiguous arrays have the same type, shape and bits; False for others."""
    if ((<object>a).shape != (<object>b).shape or a.dtype != b.dtype
            or not cnp.PyArray_IS_C_CONTIGUOUS(a) or not cnp.PyArray_IS_C_CONTIGUOUS(b)):
        return False
    return memcmp(cnp.PyArray_DATA(a), cnp.PyArray_DATA(b), cnp.PyArray_NBYTES(a)) == 0


cdef float *numbers_of(cnp.ndarray a, cnp.npy_intp size) except? NULL:
    """The data of a flat array: `Learner.parameters`, whose arrays a caller can replace, has others of this size."""
    if not is_plain(a, cnp.NPY_FLOAT32) or cnp.PyArray_SIZE(a) != size:
        raise ValueError(f"an array of parameters or gradients must be float32 of {size} numbers, got {a.dtype} "
                         f"of {a.size}")
    return <float *>cnp.PyArray_DATA(a)


def adam_update(optimiser, powers, cnp.ndarray gradient not None, double scale, cnp.ndarray weight not None,
                cnp.ndarray m not None, cnp.ndarray v not None):
    """One update of flat float32 arrays by an Adam, see cnorm_train.h; `powers` are those of the betas, this update
    included."""
    cdef cnorm_adam adam
    adam.rate, adam.eps = optimiser.lr, optimiser.eps
    adam.beta1, adam.beta2 = optimiser.betas
    adam.correction1, adam.correction2 = 1 - <double>powers[0], 1 - <double>powers[1]
    cdef cnp.npy_intp size = cnp.PyArray_SIZE(weight)
    check(cnorm_adam_update(&adam, size, numbers_of(gradient, size), scale, numbers_of(weight, size),
                            numbers_of(m, size), numbers_of(v, size)))


def sgd_update(double rate, double momentum, cnp.ndarray gradient not None, double scale,
               cnp.ndarray weight not None, velocity):
    """One update of flat float32 arrays, see cnorm_train.h."""
    cdef cnp.npy_intp size = cnp.PyArray_SIZE(weight)
    cdef float *kept = NULL if velocity is None else numbers_of(velocity, size)
    check(cnorm_sgd_update(rate, momentum, size, numbers_of(gradient, size), scale, numbers_of(weight, size), kept))


def square_sum(cnp.ndarray g not None):
    """Sum of the squares of a flat float32 array, in float64 and in a fixed order."""
    return cnorm_square_sum(cnp.PyArray_SIZE(g), numbers_of(g, cnp.PyArray_SIZE(g)))
