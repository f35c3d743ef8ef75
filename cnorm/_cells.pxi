"""Cells that train call by call, for `cnorm.torch`: a recording of each call, gradients of weights summed over them."""

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
            self.free.setdefault(floats, []).append(block)
            self.kept += 4 * floats


@cython.no_gc
cdef class Shapes:
    """Of the tensors of a call, with a blank tensor of each for new ones; those of a single step have no first axis."""
    cdef ptrdiff_t steps, batch
    cdef bint single
    cdef tensor_shape x, y, h, c
    cdef object blank_x, blank_y, blank_h, blank_c

    @staticmethod
    cdef Shapes of(TrainedCell cell, ptrdiff_t steps, ptrdiff_t batch, bint single):
        cdef Shapes new = Shapes.__new__(Shapes)
        cdef ptrdiff_t first = 0 if single else 1
        new.steps, new.batch, new.single = steps, batch, single
        new.x = shape_of(first * steps, batch, cell.network.input_size)
        new.y = shape_of(first * steps, batch, cell.network.output_size)
        new.h = shape_of(first, batch, cell.network.output_size)
        new.c = shape_of(first, batch, cell.cell().weight_x.units)
        new.blank_x, new.blank_y = blank_tensor(sizes_of(&new.x)), blank_tensor(sizes_of(&new.y))
        new.blank_h, new.blank_c = blank_tensor(sizes_of(&new.h)), blank_tensor(sizes_of(&new.c))
        return new


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
    whole : dict of int to int
        The field that has the layout of the tensor of this number.
    older : TrainedCell, optional
        One with other values of the same weights, whose memory is used further on.
    values : list of ndarray, optional
        The weights, if not those of the layer, whose other properties count.
    """
    cdef readonly Network network
    cdef readonly object layer
    cdef readonly cnp.ndarray plan
    cdef readonly dict whole
    cdef readonly list values
    cdef readonly bint repacks  # whether `again` can pack
    cdef dict constants  # what a vector is before the weights are added, by the number of the field
    cdef tuple flat
    cdef list tapes  # not in use: their scratch and gradients are those of a call
    cdef Blocks blocks
    cdef Shapes last  # of the last call
    cdef Py_ssize_t calls

    def __cinit__(self, layer, cnp.ndarray plan, dict whole, TrainedCell older=None, list values=None):
        self.layer, self.plan, self.whole = layer, plan, whole
        self.flat = ((layer, layer.output_size),)
        self.values = list(layer.weights.values()) if values is None else values
        self.network = Network(self.flat, b"") if values is None else network_with(older, values)
        if older is None:
            self.tapes, self.blocks, self.constants = [], Blocks(), {}
        else:
            self.tapes, self.blocks = older.tapes, older.blocks
            self.constants, self.repacks = older.constants, older.repacks

    def try_repacking(self, zero, trial):
        """Find out whether `again` packs as Python does, from two layers like this one, the first with weights 0."""
        cdef Network constants = Network(((zero, zero.output_size),), b"")
        blocks = iter(constants.memory)
        for i in range(len(FIELDS_OF_CELLS)):
            if has_field(constants.layers, &cnorm_layer_ops_of(CNORM_LAYER_CELL).fields[i]):
                self.constants[i] = next(blocks)
        self.repacks = same_network(network_with(self, list(trial.weights.values())),
                                    Network(((trial, trial.output_size),), b""))

    def again(self, list tensors):
        """The cell packed from these tensors; None if they have other shapes or memory, or Python must pack them."""
        cdef tensor_shape shape
        cdef cnp.ndarray old, new
        cdef const float *memory
        cdef Py_ssize_t i
        cdef bint same = True
        values = []
        for i in range(len(tensors) if self.repacks else 0):
            old = self.values[i]
            new = np.empty((<object>old).shape, np.float32)
            memory = NULL if not shaped_as(old, &shape) else memory_of(tensors[i], &shape)
            if memory == NULL or tensors[i].is_neg() or not is_allocated(tensors[i], memory):
                return None
            if not copy_finite(memory, <float *>cnp.PyArray_DATA(new), cnp.PyArray_SIZE(new)):
                return None
            same = same and memcmp(cnp.PyArray_DATA(new), cnp.PyArray_DATA(old), cnp.PyArray_NBYTES(old)) == 0
            values.append(new)
        if not self.repacks:
            return None
        return self if same else TrainedCell(self.layer, self.plan, self.whole, self, values)

    cdef Tape work(self):
        """A tape whose scratch and gradients nobody uses; `tapes` takes it back."""
        return self.tapes.pop() if self.tapes else Tape(self.flat, 1, 1, self.network)

    cdef Shapes shapes(self, ptrdiff_t steps, ptrdiff_t batch, bint single):
        cdef Shapes last = self.last
        if last is None or last.steps != steps or last.batch != batch or last.single != single:
            self.last = last = Shapes.of(self, steps, batch, single)
        return last

    cdef Recording recording(self, Shapes shapes):
        cdef Recording new = Recording.__new__(Recording)
        cdef ptrdiff_t floats
        new.cell, new.shapes = self, shapes
        new.tape.layers, new.tape.count = self.network.layers, 1
        new.tape.steps, new.tape.batch = shapes.steps, shapes.batch
        floats = cnorm_tape_floats(&new.tape)
        if floats == 0:
            check(CNORM_ERROR_SIZE)
        new.block = self.blocks.take(floats + shapes.batch * self.network.state_floats)
        new.tape.memory = <float *>cnp.PyArray_DATA(new.block)
        new.state = new.tape.memory + floats
        return new

    cdef const cnorm_cell *cell(self) noexcept:
        return &self.network.layers[0].as_.cell

    def run(self, x, h, c, bint single):
        """A call from a state, of which None is zero: x [steps, batch, inputs] with h and c [1, batch, width], and of a
        single step each without its first axis.

        Returns
        -------
        results : tuple of Tensor
            y unless single, the last h, the last c of an LSTM.
        Recording
        """
        given = x.shape
        cdef Shapes shapes = self.shapes(1 if single else given[0], given[0 if single else 1], single)
        cdef Recording new = self.recording(shapes)
        cdef Tape work = self.work()
        x, h, c = readable(x, "x", &shapes.x), readable(h, "h", &shapes.h), readable(c, "c", &shapes.c)
        y, last = tensor_like(shapes.blank_y), None if single else tensor_like(shapes.blank_h)
        last_c = tensor_like(shapes.blank_c) if self.cell().kind == CNORM_CELL_LSTM else None
        new.number = self.calls
        self.calls += 1
        new.copy_state(new.state, data_of(h, &shapes.h), data_of(c, &shapes.c))
        new.forward(work, data_of(x, &shapes.x), data_of(y, &shapes.y))
        new.give_state(new.state, data_of(last, &shapes.h), data_of(last_c, &shapes.c))
        results = (y,) if single else (y, last)
        return results if last_c is None else results + (last_c,), new

    def sums(self):
        """The `Sums` of a backward pass."""
        cdef Sums new = Sums.__new__(Sums)
        cdef ptrdiff_t floats = cnorm_sums_floats(self.network.layers, 1)
        new.cell, new.calls, new.given = self, [], []
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
    cdef Shapes shapes
    cdef public Py_ssize_t number  # in the order of calls
    cdef bint used  # a backward pass overwrites the tape, or has done so

    def __dealloc__(self):
        if self.block is not None:
            self.cell.blocks.give(self.block)

    cdef void copy_state(self, float *to, const float *h, const float *c) noexcept:
        """Pad h and c [batch, ...]; those that are NULL become zeros."""
        cdef const cnorm_cell *cell = &self.tape.layers[0].as_.cell
        cdef ptrdiff_t width = self.cell.network.state_floats, b
        cdef ptrdiff_t outputs = cell.weight_h.cols, units = cell.weight_x.units
        memset(to, 0, self.tape.batch * width * sizeof(float))
        for b in range(self.tape.batch):
            if h:
                memcpy(to + b * width, h + b * outputs, outputs * sizeof(float))
            if c:
                memcpy(to + b * width + cnorm_padded_units(outputs), c + b * units, units * sizeof(float))

    cdef void give_state(self, const float *state, float *h, float *c) noexcept:
        cdef const cnorm_cell *cell = &self.tape.layers[0].as_.cell
        cdef ptrdiff_t width = self.cell.network.state_floats, b
        cdef ptrdiff_t outputs = cell.weight_h.cols, units = cell.weight_x.units
        for b in range(self.tape.batch):
            if h:
                memcpy(h + b * outputs, state + b * width, outputs * sizeof(float))
            if c:
                memcpy(c + b * units, state + b * width + cnorm_padded_units(outputs), units * sizeof(float))

    cdef bint is_long(self) noexcept:
        return self.cell.network.macs * self.tape.steps * self.tape.batch > RELEASE_GIL_ABOVE_MACS

    cdef int forward(self, Tape work, const float *x, float *y) except -1:
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
        cdef Recording new = self.cell.recording(self.shapes)
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
        new.forward(self.cell.work(), to, <float *>cnp.PyArray_DATA(y))
        self.cell.blocks.give(x)
        self.cell.blocks.give(y)
        return new

    def backward(self, Sums sums, tuple gradients, tuple needs):
        """Add to `sums`; the gradients of the results of `run`, None for zero -> of x, h and c, None if not needed.

        May be called again: the call is then recorded anew.
        """
        cdef bint used = self.used
        self.used = True  # at once: Python code, which runs below, lets other threads run
        cdef Recording it = self.again() if used else self
        cdef Tape work = self.cell.work()
        cdef Shapes shapes = self.shapes
        dc = gradients[-1] if self.cell.cell().kind == CNORM_CELL_LSTM else None
        dy, dh = readable(gradients[0], "dy", &shapes.y), None if shapes.single else gradients[1]
        dh, dc = readable(dh, "dh", &shapes.h), readable(dc, "dc", &shapes.c)
        dx = tensor_like(shapes.blank_x) if needs[0] else None
        dfirst = tensor_like(shapes.blank_h) if needs[1] else None
        dfirst_c = tensor_like(shapes.blank_c) if needs[2] else None
        cdef cnp.ndarray dstate = self.cell.blocks.take(shapes.batch * self.cell.network.state_floats)
        cdef float *state = <float *>cnp.PyArray_DATA(dstate)
        self.copy_state(state, data_of(dh, &shapes.h), data_of(dc, &shapes.c))
        it.steps_backward(sums, work, data_of(dy, &shapes.y), state, data_of(dx, &shapes.x))
        self.give_state(state, data_of(dfirst, &shapes.h), data_of(dfirst_c, &shapes.c))
        self.cell.blocks.give(dstate)
        return dx, dfirst, dfirst_c

    cdef int steps_backward(self, Sums sums, Tape work, const float *dy, float *dstate, float *dx) except -1:
        cdef ptrdiff_t outputs = self.tape.steps * self.tape.batch * self.cell.network.output_size
        cdef cnp.ndarray zeros = None
        cdef cnorm_backward call
        cdef cnorm_status status
        if dy == NULL:
            zeros = self.cell.blocks.take(outputs)
            memset(cnp.PyArray_DATA(zeros), 0, outputs * sizeof(float))
            dy = <const float *>cnp.PyArray_DATA(zeros)
        call.first, call.steps, call.gradients, call.sums = 0, self.tape.steps, NULL, &sums.sums
        call.dy, call.dx, call.dstate = dy, dx, dstate
        call.scratch = <float *>cnp.PyArray_DATA(work.backward_scratch)
        sums.calls.append(self)
        if self.is_long():
            with nogil:
                status = cnorm_run_backward(&self.tape, &call)
        else:
            status = cnorm_run_backward(&self.tape, &call)
        self.cell.tapes.append(work)
        if zeros is not None:
            self.cell.blocks.give(zeros)
        return check(status)


def call_number(Recording recording):
    return recording.number


@cython.no_gc
cdef class Sums:
    """Gradients of a cell's weights in one backward pass: those of vectors, and the calls for those of matrices."""
    cdef TrainedCell cell
    cdef Watched watched  # where it is known by the number of its pass, see `Watched.keep`
    cdef object task
    cdef cnp.ndarray memory
    cdef cnorm_sums sums
    cdef list calls
    cdef readonly list given  # what the gradients depend on besides the weights, if they may be differentiated

    def __dealloc__(self):
        if self.watched is not None:
            del self.watched.passes[self.task]

    def gradients(self, list blanks):
        """New tensors of gradients, in the order of the layer's weights: (function, its argument) makes one, or None.

        Calls are added in their order, so that the bits do not depend on where the tapes lie.
        """
        cdef Py_ssize_t count = len(blanks), i
        cdef float **places = <float **>PyMem_Calloc(count, sizeof(float *))
        cdef list found = [None] * count
        if places == NULL:
            raise MemoryError()
        try:
            for i in range(count):
                if blanks[i] is not None:
                    make, like = <tuple>blanks[i]
                    found[i] = make(like)
                    places[i] = <float *><size_t>found[i].data_ptr()
            self.write(places)
        finally:
            PyMem_Free(places)
        return found

    cdef int write(self, float **places) except -1:
        """Write the gradients to the memory of tensors, of which NULL is not wanted."""
        cdef list calls = self.calls
        cdef cnp.ndarray memory = self.memory
        if memory is None:
            raise RuntimeError("the gradients of this backward pass were taken already")
        self.memory, self.calls = None, []
        cdef Tape work = self.cell.work()
        cdef Py_ssize_t count = len(calls), i
        cdef const cnorm_tape **tapes = <const cnorm_tape **>PyMem_Calloc(count + 1, sizeof(cnorm_tape *))
        cdef float *scratch = <float *>cnp.PyArray_DATA(work.backward_scratch)
        cdef const layer_field *fields = cnorm_layer_ops_of(CNORM_LAYER_CELL).fields
        cdef cnorm_gradient gradient = work.to[0]
        cdef Py_ssize_t number
        cdef cnorm_status status
        if tapes == NULL:
            raise MemoryError()
        for number in self.cell.whole:
            if places[number]:
                (<float **>(<char *>&gradient + fields[<int>self.cell.whole[number]].gradient))[0] = places[number]
                places[number] = NULL
        if count > 1:
            calls.sort(key=call_number)
        for i in range(count):
            tapes[i] = &(<Recording>calls[i]).tape
        with nogil:
            status = cnorm_sum_gradients(tapes, count, &self.sums, &gradient, scratch)
        PyMem_Free(tapes)
        check(status)
        scatter(self.cell.plan, &gradient, places)
        self.cell.tapes.append(work)
        self.cell.blocks.give(memory)
        return 0


cdef void scatter(cnp.ndarray plan, const cnorm_gradient *gradient, float **tensors) noexcept:
    """Copy the pieces of packed gradients to the tensors, see `TrainedCell`."""
    cdef const long long *piece = <const long long *>cnp.PyArray_DATA(plan)
    cdef const layer_field *fields = cnorm_layer_ops_of(CNORM_LAYER_CELL).fields
    cdef Py_ssize_t i
    cdef long long row, col
    cdef float *to
    cdef const float *of
    cdef const float *of_field
    for i in range(cnp.PyArray_DIMS(plan)[0]):
        if tensors[piece[0]]:
            of_field = (<float **>(<char *>gradient + fields[piece[2]].gradient))[0]
            for row in range(piece[4]):
                to = tensors[piece[0]] + piece[1] + row * piece[6]
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
