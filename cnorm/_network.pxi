"""Networks of packed weights, and the activations sigmoid and tanh (private; exposed for tests)."""
from cnorm.packing import (
    FIELDS, PANEL_FLOATS, grid, layer_parts, refuse_outputs, refuse_panels, set_cell_starts, set_starts,
)


cdef elementwise(cnorm_status (*f)(ptrdiff_t, const float *, float *) noexcept nogil, x, out):
    cdef cnp.ndarray a = array_of(x, "x"), place = place_of(out, "out"), y
    if dtype_of(a, "x") != CNORM_F32:
        raise TypeError(f"x must have dtype float32, got {a.dtype}")
    if not cnp.PyArray_IS_C_CONTIGUOUS(a) or cnp.PyArray_NDIM(a) == 0:
        a = np.ascontiguousarray(a)
    y = output(place, "out", a)
    if not cnp.PyArray_IS_C_CONTIGUOUS(y):
        raise ValueError("out must be C-contiguous")
    check_frames(a, y, cnp.PyArray_SIZE(y), cnp.PyArray_SIZE(y))
    check(f(cnp.PyArray_SIZE(a), <const float *>cnp.PyArray_DATA(a), <float *>cnp.PyArray_DATA(y)))
    return y


def sigmoid(x, out=None):
    """1/(1 + exp(-x)) of a float32 array; monotone, with an error of at most 1 ULP."""
    return elementwise(cnorm_sigmoid_f32, x, out)


def tanh(x, out=None):
    """tanh(x) of a float32 array; monotone, with an error of at most 1 ULP."""
    return elementwise(cnorm_tanh_f32, x, out)


cdef ptrdiff_t HUGE_PAGE = 2 << 20  # bytes, on x86-64 and AArch64 with pages of 4 KiB

cdef cnp.ndarray aligned_zeros(ptrdiff_t floats):
    return aligned_floats(floats, True)


cdef cnp.ndarray aligned_floats(ptrdiff_t floats, bint zeros):
    """An array of float32, aligned to CNORM_ALIGN bytes, or to huge pages if it is large; set to zero or not.

    NumPy asks for huge pages (madvise) for arrays of 4 MiB or more, but Linux gives them for whole aligned pages only.
    """
    cdef ptrdiff_t size = floats * 4, align = CNORM_ALIGN
    cdef cnp.npy_intp count = floats, total
    cdef cnp.ndarray raw, aligned
    if size >= 2 * HUGE_PAGE:
        align = HUGE_PAGE
    total = (size + align - 1) // align * align + align
    raw = cnp.PyArray_ZEROS(1, &total, cnp.NPY_UINT8, 0) if zeros else cnp.PyArray_EMPTY(1, &total, cnp.NPY_UINT8, 0)
    total = -<ptrdiff_t>cnp.PyArray_DATA(raw) & (align - 1)  # to the next aligned address
    aligned = cnp.PyArray_SimpleNewFromData(1, &count, cnp.NPY_FLOAT32, <char *>cnp.PyArray_DATA(raw) + total)
    cnp.set_array_base(aligned, raw)
    return aligned


INT8_COLS = CNORM_INT8_COLS  # length of the longest row of int8 weights


cdef cnorm_weight_type weight_type_of(cnp.ndarray rows) noexcept:
    if has_dtype(rows, cnp.NPY_INT8):
        return CNORM_WEIGHT_I8
    return CNORM_WEIGHT_F16 if has_dtype(rows, cnp.NPY_FLOAT16) else CNORM_WEIGHT_F32


def round_matrix(cnp.ndarray w, ptrdiff_t gates, ptrdiff_t group, dtype):
    """A matrix less the mean over each group of gates, rounded to a type.

    Parameters
    ----------
    w : ndarray [gates * units, inputs], float32, C-contiguous
    gates, group : int
        As in `cnorm_matrix`.
    dtype : int8, float16 or float32

    Returns
    -------
    rows : ndarray [gates * units, inputs], dtype
    scales : ndarray [gates * units], float32
        None unless dtype is int8.
    """
    cdef cnorm_matrix m
    cdef cnp.ndarray rows = np.zeros((<object>w).shape, dtype), scales = np.zeros(len(w), np.float32)
    if w.dtype != np.float32 or not cnp.PyArray_IS_C_CONTIGUOUS(w) or cnp.PyArray_NDIM(w) != 2 or gates < 1:
        raise ValueError("w must be a C-contiguous float32 matrix")
    m.gates, m.units, m.cols, m.group = gates, cnp.PyArray_DIMS(w)[0] // gates, cnp.PyArray_DIMS(w)[1], group
    m.panels, m.type, m.levels = NULL, weight_type_of(rows), 0
    check(cnorm_matrix_round(&m, <const float *>cnp.PyArray_DATA(w), cnp.PyArray_DATA(rows),
                             <float *>cnp.PyArray_DATA(scales)))
    return rows, scales if m.type == CNORM_WEIGHT_I8 else None


cdef enum:
    MATRICES = 4
    VECTORS = 9
    GAIN_X = 2  # indices of vectors; those up to BIAS are divided among the gates of a cell
    GAIN_H = 3
    BIAS = 4
    BIAS_P = 8


cdef struct Places:  # of the fields of a layer, in the order of FIELDS; NULL for those that its kind does not have
    cnorm_matrix *matrices[MATRICES]
    const float **vectors[VECTORS]


cdef void find_places(cnorm_layer *layer, Places *places) noexcept:
    cdef cnorm_cell *cell = &layer.as_.cell
    memset(places, 0, sizeof(Places))
    if layer.kind == CNORM_LAYER_CELL:
        places.matrices[:] = [&cell.weight_x, &cell.weight_h, &cell.weight_n, &cell.weight_p]
        places.vectors[:] = [&cell.inside_x, &cell.inside_h, &cell.gain_x, &cell.gain_h, &cell.bias, &cell.bias_n,
                             &cell.gain_c, &cell.bias_c, &cell.bias_p]
    elif layer.kind == CNORM_LAYER_LINEAR:
        places.matrices[0], places.vectors[BIAS] = &layer.as_.linear.weight, &layer.as_.linear.bias
    elif layer.kind == CNORM_LAYER_NORM:
        places.vectors[GAIN_H], places.vectors[BIAS] = &layer.as_.norm.gain, &layer.as_.norm.bias


cdef void set_numbers(cnorm_layer *layer, const double *numbers) noexcept:
    """Set what a layer's struct has besides matrices and vectors."""
    cdef cnorm_cell *cell = &layer.as_.cell
    if layer.kind == CNORM_LAYER_CELL:
        cell.kind = <cnorm_cell_kind><int>numbers[0]
        cell.scope = <cnorm_scope><int>numbers[1]
        cell.cell_norm = <cnorm_cell_norm><int>numbers[2]
        cell.reset = <cnorm_reset><int>numbers[3]
        cell.activation = <cnorm_activation><int>numbers[4]
        cell.keep = <int>numbers[5]
        cell.eps, cell.cell_clip = <float>numbers[6], <float>numbers[7]
        cell.projection_clip, cell.zoneout = <float>numbers[8], <float>numbers[9]
    elif layer.kind == CNORM_LAYER_NORM:
        layer.as_.norm.n, layer.as_.norm.eps = <ptrdiff_t>numbers[0], <float>numbers[1]
    elif layer.kind == CNORM_LAYER_ACTIVATION:
        layer.as_.activation.n = <ptrdiff_t>numbers[0]
        layer.as_.activation.f = <cnorm_activation><int>numbers[1]
    elif layer.kind == CNORM_LAYER_RESIDUAL:
        layer.as_.residual.n, layer.as_.residual.back = <ptrdiff_t>numbers[0], <int>numbers[1]


@cython.no_gc_clear  # a finaliser may still step a stream that uses the packed arrays, so they are not cleared before
cdef class Network:
    """Packed weights of a stack of layers, with which `cnorm.Model` computes. Not written after construction.

    Parameters
    ----------
    layers : sequence of (kind, layer, size), or PackedModel
        As returned by `cnorm.layers.flat`; the sizes of neighbours must fit.
    identity : bytes, 32
        Hash of configuration and weights; a saved stream holds it and is restored by the same model only.
    first : int
        The number of its first recurrent layer in the names of states, h0, c0, ...
    part : int
        Which network of a PackedModel.
    """
    cdef cnorm_layer *layers
    cdef cnorm_layer *owned  # the layers, unless they are those of a PackedModel
    cdef int count
    cdef readonly int cells  # recurrent layers
    cdef readonly ptrdiff_t input_size, output_size
    cdef readonly bytes identity
    cdef tuple state_arrays  # (name, units, offset in the state) of each recurrent array
    cdef cnp.ndarray initial  # the initial state
    cdef ptrdiff_t state_floats
    cdef readonly ptrdiff_t macs, nbytes  # macs: multiply-adds of one step; nbytes: of all panels
    cdef int types  # bit t is set if there is a matrix of type t
    cdef list memory  # keeps the packed arrays alive

    def __cinit__(self, layers, bytes identity, int first=0, int part=0):
        cdef ptrdiff_t outputs
        cdef list starts = []  # the initial value of each recurrent array
        self.identity, self.memory, self.state_arrays = identity, [], ()
        if isinstance(layers, PackedModel):
            self.refer(layers, part, first, starts)
        else:
            self.build(layers, first, starts)
        outputs = cnorm_scratch_floats(self.layers, self.count, 1)
        # each layer has its own array of outputs: a file of many activations could fill the memory
        if outputs > max(1 << 24, 8 * self.macs):
            refuse_outputs(4 * outputs, 4 * self.macs)
        self.input_size = cnorm_layer_inputs(&self.layers[0])
        self.output_size = cnorm_layer_outputs(&self.layers[self.count - 1])
        self.initial = aligned_zeros(self.state_floats)
        set_starts(self.initial, self.state_arrays, starts)

    cdef int build(self, layers, int first, list starts) except -1:
        """Pack the layers."""
        cdef int i
        self.count = len(layers)
        self.owned = self.layers = <cnorm_layer *>PyMem_Calloc(self.count, sizeof(cnorm_layer))
        if self.layers == NULL:
            raise MemoryError()
        for i in range(self.count):
            self.add_layer(&self.layers[i], layer_parts(*layers[i]), first, starts)
        return 0

    def __dealloc__(self):
        PyMem_Free(self.owned)

    @property
    def weights(self):
        """The narrowest type of a matrix: "int8", "float16" or "float32"."""
        if self.types >> <int>CNORM_WEIGHT_I8 & 1:
            return "int8"
        return "float16" if self.types >> <int>CNORM_WEIGHT_F16 & 1 else "float32"

    cdef int add_layer(self, cnorm_layer *to, tuple parts, int first, list starts) except -1:
        """Pack the `layer_parts` of a layer."""
        cdef dict fields = parts[2]
        cdef Places places
        cdef int i
        to.kind = <cnorm_layer_kind><int>parts[0]
        set_numbers(to, <const double *>cnp.PyArray_DATA(parts[1]))
        find_places(to, &places)
        for i in range(MATRICES):
            given = fields.get(FIELDS[i])
            if given is not None:
                self.pack(places.matrices[i], given)
        for i in range(VECTORS):
            given = fields.get(FIELDS[MATRICES + i])
            if given is not None:
                # arrays that are added to a product must be as long as the packed product
                places.vectors[i][0] = self.padded(given, CNORM_GATE_PAD if i < GAIN_X else 0)
        self.add_state(to, first, fields.get("h0"), fields.get("c0"), starts)
        return 0

    cdef int add_state(self, const cnorm_layer *layer, int first, h0, c0, list starts) except -1:
        """Append the state of a layer to that of the layers before it."""
        cdef ptrdiff_t outputs = layer.as_.cell.weight_h.cols
        if layer.kind == CNORM_LAYER_CELL:
            arrays = ((f"h{first + self.cells}", outputs, self.state_floats),)
            starts.append(h0)
            if layer.as_.cell.kind == <cnorm_cell_kind>CNORM_CELL_LSTM:
                arrays += ((f"c{first + self.cells}", layer.as_.cell.weight_x.units,
                            self.state_floats + cnorm_padded_units(outputs)),)
                starts.append(c0)
            self.state_arrays += arrays
            self.cells += 1
        self.state_floats += cnorm_layer_state_floats(layer)
        return 0

    cdef int pack(self, cnorm_matrix *m, tuple given) except -1:
        """Pack a matrix, given as the (w, rows, scales, gates, group) of `layer_parts`."""
        cdef cnp.ndarray w = given[0], rows = given[1], scales = given[2], panels
        cdef const float *scale = NULL
        m.gates, m.group = given[3], given[4]
        m.units, m.cols = cnp.PyArray_DIMS(w)[0] // m.gates, cnp.PyArray_DIMS(w)[1]
        m.type, m.levels = CNORM_WEIGHT_F32 if rows is None else weight_type_of(rows), 0
        self.add_sizes(m)
        if self.nbytes > 4 * max(<ptrdiff_t>PANEL_FLOATS, 8 * self.macs):
            refuse_panels(self.nbytes, 4 * self.macs)
        panels = aligned_zeros((cnorm_matrix_bytes(m) + 3) // 4)
        self.memory.append(panels)
        m.panels = cnp.PyArray_DATA(panels)
        if rows is None:
            return check(cnorm_matrix_pack(m.gates, m.units, m.cols, m.group, <const float *>cnp.PyArray_DATA(w),
                                           <float *>cnp.PyArray_DATA(panels)))
        if scales is not None:
            scale = <const float *>cnp.PyArray_DATA(scales)
        return check(cnorm_matrix_pack_rows(m, cnp.PyArray_DATA(rows), scale, cnp.PyArray_DATA(panels)))

    cdef const float *padded(self, cnp.ndarray v, ptrdiff_t more) except NULL:
        """v [gates, units] padded to [gates, padded units], followed by `more` zeros."""
        cdef ptrdiff_t gates = cnp.PyArray_DIMS(v)[0]
        cdef cnp.ndarray wide = aligned_zeros(gates * cnorm_padded_units(cnp.PyArray_DIMS(v)[1]) + more)
        self.memory.append(wide)
        refill(<const float *>cnp.PyArray_DATA(wide), v, gates, cnp.PyArray_DIMS(v)[1])
        return <const float *>cnp.PyArray_DATA(wide)

    cdef int refer(self, PackedModel packed, int part, int first, list starts) except -1:
        """Use the layers of a packed model, whose panels stay where they are."""
        cdef const cnorm_network *network = &packed.model.networks[part]
        cdef cnorm_layer *layer
        cdef Places places
        cdef int i, k
        self.layers, self.count = <cnorm_layer *>network.layers, network.count
        self.memory.append(packed)
        for i in range(self.count):
            layer = &self.layers[i]
            find_places(layer, &places)
            for k in range(MATRICES):
                if places.matrices[k] != NULL and places.matrices[k].panels != NULL:
                    self.add_sizes(places.matrices[k])
            h0 = c0 = None
            if layer.kind == CNORM_LAYER_CELL:
                h0 = floats_at(network.starts[i], layer.as_.cell.weight_h.cols)
                if layer.as_.cell.kind == <cnorm_cell_kind>CNORM_CELL_LSTM:
                    c0 = floats_at(network.starts[i], layer.as_.cell.weight_x.units,
                                   cnorm_padded_units(layer.as_.cell.weight_h.cols))
            self.add_state(layer, first, h0, c0, starts)
        return 0

    cdef int find_starts(self, const float **starts) except -1:
        """The initial state of each layer that has one other than zero."""
        cdef int i
        cdef ptrdiff_t offset = 0, floats
        for i in range(self.count):
            floats = cnorm_layer_state_floats(&self.layers[i])
            if self.initial[offset:offset + floats].view(np.uint32).any():  # -0.0 counts
                starts[i] = <const float *>cnp.PyArray_DATA(self.initial) + offset
            offset += floats
        return 0

    cdef int add_sizes(self, const cnorm_matrix *m) except -1:
        self.macs += m.gates * m.units * m.cols
        self.nbytes += cnorm_matrix_bytes(m)
        self.types |= 1 << <int>m.type
        return 0

    cdef cnp.ndarray scratch(self, ptrdiff_t rows):
        return aligned_zeros(cnorm_scratch_floats(self.layers, self.count, rows))
