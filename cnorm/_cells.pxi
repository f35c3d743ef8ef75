"""Cells that train call by call, for `cnorm.torch`: a recording of each call, gradients of weights summed over them.

Memory of tensors is passed as an address, 0 for none; the caller has checked shapes and dtypes.
"""

cdef enum:
    BLOCK_BYTES = 1 << 20  # larger blocks are not kept: their first use costs more than their allocation
    KEPT_BYTES = 16 << 20  # of one cell


@cython.no_gc
cdef class Blocks:
    """Aligned memory of calls that are over, for later ones."""
    cdef dict free
    cdef ptrdiff_t kept

    def __cinit__(self):
        self.free = {}

    cdef cnp.ndarray take(self, ptrdiff_t floats):
        cdef list found = self.free.get(floats)
        if not found:
            return aligned_floats(floats, False)
        self.kept -= 4 * floats
        return found.pop()

    cdef void give(self, cnp.ndarray block):
        cdef ptrdiff_t floats = cnp.PyArray_SIZE(block)
        if 4 * floats <= BLOCK_BYTES and self.kept + 4 * floats <= KEPT_BYTES:
            self.kept += 4 * floats
            self.free.setdefault(floats, []).append(block)


@cython.no_gc
cdef class TrainedCell:
    """A packed cell, and where the gradients of its weights go; not written after construction, but for its memory.

    Parameters
    ----------
    layer : LSTM, GRU or RNN
    plan : ndarray of int64, shape (pieces, 10)
        Each row says where a piece of the packed gradients goes, a matrix or a row: the number and the offset of the
        tensor, the field and the offset in it, rows, columns, the tensor's strides of both, the field's stride of rows,
        whether the piece is added.
    older : TrainedCell, optional
        One with other values of the same weights, whose memory is used further on.
    """
    cdef readonly Network network
    cdef readonly object layer
    cdef readonly cnp.ndarray plan
    cdef tuple flat
    cdef list tapes  # not in use: their scratch and gradients are those of a call
    cdef Blocks blocks
    cdef Py_ssize_t calls

    def __cinit__(self, layer, cnp.ndarray plan, TrainedCell older=None):
        self.layer, self.plan = layer, plan
        self.flat = ((layer, layer.output_size),)
        self.network = Network(self.flat, b"")
        if older is None:
            self.tapes, self.blocks = [], Blocks()
        else:
            self.tapes, self.blocks = older.tapes, older.blocks

    cdef Tape work(self):
        """A tape whose scratch and gradients nobody uses; `tapes` takes it back."""
        return self.tapes.pop() if self.tapes else Tape(self.flat, 1, 1, self.network)

    cdef Recording recording(self, ptrdiff_t steps, ptrdiff_t batch):
        cdef Recording new = Recording.__new__(Recording)
        cdef ptrdiff_t floats
        new.cell = self
        new.tape.layers, new.tape.count = self.network.layers, 1
        new.tape.steps, new.tape.batch = steps, batch
        floats = cnorm_tape_floats(&new.tape)
        if floats == 0:
            check(CNORM_ERROR_SIZE)
        new.block = self.blocks.take(floats + batch * self.network.state_floats)
        new.tape.memory = <float *>cnp.PyArray_DATA(new.block)
        new.state = new.tape.memory + floats
        return new

    def run(self, ptrdiff_t steps, ptrdiff_t batch, tuple given, tuple results):
        """(x [steps, batch, inputs], h, c [batch, ...]) -> (y [steps, batch, outputs], the last h and c).

        Returns
        -------
        Recording
        """
        cdef Recording new = self.recording(steps, batch)
        cdef size_t x = given[0], y = results[0]
        new.number = self.calls
        self.calls += 1
        new.copy_state(new.state, given[1], given[2])
        new.forward(<const float *>x, <float *>y)
        new.give_state(new.state, results[1], results[2])
        return new

    def sums(self):
        """The `Sums` of a backward pass."""
        cdef Sums new = Sums.__new__(Sums)
        cdef ptrdiff_t floats = cnorm_sums_floats(self.network.layers, 1)
        new.cell, new.calls = self, []
        new.memory = self.blocks.take(floats)
        new.sums.memory, new.sums.rows = <float *>cnp.PyArray_DATA(new.memory), 0
        memset(new.sums.memory, 0, floats * sizeof(float))
        return new


@cython.no_gc
cdef class Recording:
    """One call of a cell on a tape of its own, see `TrainedCell.run`."""
    cdef TrainedCell cell
    cdef cnp.ndarray block  # the memory of the tape, then the state
    cdef cnorm_tape tape
    cdef float *state
    cdef public Py_ssize_t number  # in the order of calls
    cdef bint used  # a backward pass has overwritten the tape

    def __dealloc__(self):
        if self.block is not None:
            self.cell.blocks.give(self.block)

    cdef void copy_state(self, float *to, size_t h, size_t c) noexcept:
        """Pad h and c [batch, ...]; those that are 0 become zeros."""
        cdef const cnorm_cell *cell = &self.tape.layers[0].as_.cell
        cdef ptrdiff_t width = self.cell.network.state_floats, b
        cdef ptrdiff_t outputs = cell.weight_h.cols, units = cell.weight_x.units
        memset(to, 0, self.tape.batch * width * sizeof(float))
        for b in range(self.tape.batch):
            if h:
                memcpy(to + b * width, <const float *>h + b * outputs, outputs * sizeof(float))
            if c:
                memcpy(to + b * width + cnorm_padded_units(outputs), <const float *>c + b * units,
                       units * sizeof(float))

    cdef void give_state(self, const float *state, size_t h, size_t c) noexcept:
        cdef const cnorm_cell *cell = &self.tape.layers[0].as_.cell
        cdef ptrdiff_t width = self.cell.network.state_floats, b
        cdef ptrdiff_t outputs = cell.weight_h.cols, units = cell.weight_x.units
        for b in range(self.tape.batch):
            if h:
                memcpy(<float *>h + b * outputs, state + b * width, outputs * sizeof(float))
            if c:
                memcpy(<float *>c + b * units, state + b * width + cnorm_padded_units(outputs),
                       units * sizeof(float))

    cdef bint is_long(self) noexcept:
        return self.cell.network.macs * self.tape.steps * self.tape.batch > RELEASE_GIL_ABOVE_MACS

    cdef int forward(self, const float *x, float *y) except -1:
        cdef Tape work = self.cell.work()
        cdef float *scratch = <float *>cnp.PyArray_DATA(work.scratch)
        cdef cnorm_status status
        if self.is_long():
            with nogil:
                status = cnorm_run_tape(&self.tape, 0, self.tape.steps, x, self.state, scratch, y)
        else:
            status = cnorm_run_tape(&self.tape, 0, self.tape.steps, x, self.state, scratch, y)
        self.cell.tapes.append(work)
        return check(status)

    cdef Recording again(self):
        """The same call once more: x and the state before it are still on the tape, in their rows."""
        cdef Recording new = self.cell.recording(self.tape.steps, self.tape.batch)
        cdef ptrdiff_t rows = self.tape.steps * self.tape.batch, inputs = self.cell.network.input_size, i
        cdef ptrdiff_t row = (self.state - self.tape.memory) // rows
        cdef ptrdiff_t width = self.cell.network.state_floats
        cdef cnp.ndarray x = self.cell.blocks.take(rows * inputs)
        cdef cnp.ndarray y = self.cell.blocks.take(rows * self.cell.network.output_size)
        cdef float *to = <float *>cnp.PyArray_DATA(x)
        for i in range(rows):
            memcpy(to + i * inputs, self.tape.memory + i * row, inputs * sizeof(float))
        for i in range(self.tape.batch):
            memcpy(new.state + i * width, self.tape.memory + i * row + cnorm_padded_units(inputs),
                   width * sizeof(float))
        new.number = self.number
        new.forward(to, <float *>cnp.PyArray_DATA(y))
        self.cell.blocks.give(x)
        self.cell.blocks.give(y)
        return new

    def backward(self, Sums sums, size_t dy, size_t dh, size_t dc, size_t dx, size_t first_dh, size_t first_dc):
        """Add to `sums`; gradients of y and of the last state, each 0 for none -> those of x and the first state.

        May be called again: the call is then recorded anew.
        """
        cdef Recording it = self.again() if self.used else self
        cdef ptrdiff_t floats = self.tape.batch * self.cell.network.state_floats
        cdef ptrdiff_t outputs = self.tape.steps * self.tape.batch * self.cell.network.output_size
        cdef cnp.ndarray dstate = self.cell.blocks.take(floats), zeros = None
        cdef Tape work = self.cell.work()
        cdef cnorm_backward call
        cdef cnorm_status status
        if not dy:
            zeros = self.cell.blocks.take(outputs)
            memset(cnp.PyArray_DATA(zeros), 0, outputs * sizeof(float))
            dy = <size_t>cnp.PyArray_DATA(zeros)
        call.first, call.steps, call.gradients, call.sums = 0, self.tape.steps, NULL, &sums.sums
        call.dy, call.dx = <const float *>dy, <float *>dx
        call.dstate, call.scratch = <float *>cnp.PyArray_DATA(dstate), <float *>cnp.PyArray_DATA(work.backward_scratch)
        self.copy_state(call.dstate, dh, dc)
        it.used = True
        sums.calls.append(it)
        if self.is_long():
            with nogil:
                status = cnorm_run_backward(&it.tape, &call)
        else:
            status = cnorm_run_backward(&it.tape, &call)
        self.give_state(call.dstate, first_dh, first_dc)
        self.cell.tapes.append(work)
        self.cell.blocks.give(dstate)
        if zeros is not None:
            self.cell.blocks.give(zeros)
        check(status)


def call_number(Recording recording):
    return recording.number


cdef class Sums:
    """Gradients of a cell's weights in one backward pass: those of vectors, and the calls for those of matrices."""
    cdef TrainedCell cell
    cdef cnp.ndarray memory
    cdef cnorm_sums sums
    cdef list calls
    cdef object __weakref__

    def gradients(self, tuple to):
        """Write the gradients to tensors in the order of the layer's weights, given by their addresses; 0: not wanted.

        Calls are added in their order, so that the bits do not depend on where the tapes lie.
        """
        cdef Py_ssize_t count = len(self.calls), i
        cdef const cnorm_tape **tapes = <const cnorm_tape **>PyMem_Calloc(count + 1, sizeof(cnorm_tape *))
        cdef Tape work = self.cell.work()
        cdef float *scratch = <float *>cnp.PyArray_DATA(work.backward_scratch)
        cdef cnorm_status status
        if tapes == NULL:
            raise MemoryError()
        self.calls.sort(key=call_number)
        for i in range(count):
            tapes[i] = &(<Recording>self.calls[i]).tape
        with nogil:
            status = cnorm_sum_gradients(tapes, count, &self.sums, work.to, scratch)
        PyMem_Free(tapes)
        check(status)
        scatter(self.cell.plan, work.to, to)
        self.cell.tapes.append(work)
        self.cell.blocks.give(self.memory)
        self.memory, self.calls = None, []


cdef int scatter(cnp.ndarray plan, const cnorm_gradient *gradient, tuple tensors) except -1:
    """Copy the pieces of packed gradients to the tensors, see `TrainedCell`."""
    cdef const long long *piece = <const long long *>cnp.PyArray_DATA(plan)
    cdef const layer_field *fields = cnorm_layer_ops_of(CNORM_LAYER_CELL).fields
    cdef Py_ssize_t i
    cdef long long row, col
    cdef float *to
    cdef const float *of
    cdef const float *of_field
    for i in range(cnp.PyArray_DIMS(plan)[0]):
        if <size_t>tensors[piece[0]]:
            of_field = (<float **>(<char *>gradient + fields[piece[2]].gradient))[0]
            for row in range(piece[4]):
                to = <float *><size_t>tensors[piece[0]] + piece[1] + row * piece[6]
                of = of_field + piece[3] + row * piece[8]
                if piece[9]:
                    for col in range(piece[5]):
                        to[col * piece[7]] += of[col]
                elif piece[7] == 1:
                    memcpy(to, of, piece[5] * sizeof(float))
                else:
                    for col in range(piece[5]):
                        to[col * piece[7]] = of[col]
        piece += 10
    return 0


cdef class Watched:
    """Tensors as they were when a cell was packed from them.

    Parameters
    ----------
    tensors : list of torch.Tensor
    arrays : list of ndarray
        Copies of their values.
    plain : bool
        Whether all are of PyTorch's own types, whose methods can be believed.
    """
    cdef readonly list tensors
    cdef readonly tuple versions, needs
    cdef tuple places, shapes
    cdef list arrays
    cdef bint plain

    def __cinit__(self, list tensors, list arrays, bint plain):
        self.tensors, self.arrays, self.plain = tensors, arrays, plain
        self.versions = tuple([t._version for t in tensors])
        self.needs = tuple([t.requires_grad for t in tensors])
        self.places = tuple([t.data_ptr() for t in tensors]) if plain else ()
        self.shapes = tuple([t.shape for t in tensors])

    def changed_version(self):
        """The number of the first tensor with another version than at the beginning, or -1."""
        cdef Py_ssize_t i
        for i in range(len(self.tensors)):
            if self.tensors[i]._version != self.versions[i]:
                return i
        return -1

    def unchanged(self, list tensors):
        """Whether these are the same tensors in the same place, with the same version and the same bits.

        The version alone does not tell: writes through `Tensor.data` or `numpy()` do not count.
        """
        cdef Py_ssize_t i
        cdef cnp.ndarray kept
        if not self.plain:
            return False
        for i in range(len(self.tensors)):
            t = tensors[i]
            if (t is not self.tensors[i] or t._version != self.versions[i] or t.data_ptr() != self.places[i]
                    or t.requires_grad is not self.needs[i] or t.shape != self.shapes[i] or not t.is_contiguous()):
                return False
        for i in range(len(self.tensors)):
            kept = <cnp.ndarray>self.arrays[i]
            if memcmp(<const void *><size_t>self.places[i], cnp.PyArray_DATA(kept), cnp.PyArray_NBYTES(kept)) != 0:
                return False
        return True
