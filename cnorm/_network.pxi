"""Networks of packed weights, and the activations sigmoid and tanh (private; exposed for tests)."""

cdef elementwise(cnorm_status (*f)(ptrdiff_t, const float *, float *) noexcept nogil, x, out):
    cdef cnp.ndarray a = array_of(x, "x"), y
    if dtype_of(a, "x") != CNORM_F32:
        raise TypeError(f"x must have dtype float32, got {a.dtype}")
    a = np.ascontiguousarray(a)
    y = output(out, "out", a)
    if not cnp.PyArray_IS_C_CONTIGUOUS(y):
        raise ValueError("out must be C-contiguous")
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
    if size >= 2 * HUGE_PAGE:
        align = HUGE_PAGE
    cdef cnp.ndarray raw = (np.zeros if zeros else np.empty)((size + align - 1) // align * align + align, np.uint8)
    cdef ptrdiff_t start = -(<ptrdiff_t>cnp.PyArray_DATA(raw)) % align
    return raw[start + (align if start < 0 else 0):][:size].view(np.float32)


ACTIVATION = {"tanh": CNORM_ACTIVATION_TANH, "relu": CNORM_ACTIVATION_RELU, "sigmoid": CNORM_ACTIVATION_SIGMOID}
CELL_KIND = {"LSTM": CNORM_CELL_LSTM, "GRU": CNORM_CELL_GRU, "RNN": CNORM_CELL_RNN}
SCOPE = {"none": CNORM_SCOPE_NONE, "split": CNORM_SCOPE_SPLIT, "sum": CNORM_SCOPE_SUM}
CELL_NORM = {"none": CNORM_CELL_NORM_NONE, "output": CNORM_CELL_NORM_OUTPUT, "carry": CNORM_CELL_NORM_CARRY}
RESET = {"after": CNORM_RESET_AFTER, "candidate": CNORM_RESET_CANDIDATE, "before": CNORM_RESET_BEFORE}


INT8_COLS = CNORM_INT8_COLS  # length of the longest row of int8 weights


cdef cnorm_weight_type weight_type_of(dtype) except *:
    if dtype == np.int8:
        return CNORM_WEIGHT_I8
    return CNORM_WEIGHT_F16 if dtype == np.float16 else CNORM_WEIGHT_F32


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
    m.panels, m.type, m.levels = NULL, weight_type_of(rows.dtype), 0
    check(cnorm_matrix_round(&m, <const float *>cnp.PyArray_DATA(w), cnp.PyArray_DATA(rows),
                             <float *>cnp.PyArray_DATA(scales)))
    return rows, scales if m.type == CNORM_WEIGHT_I8 else None


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
    cdef tuple memory  # keeps the packed arrays alive

    def __cinit__(self, layers, bytes identity, int first=0, int part=0):
        cdef ptrdiff_t outputs
        self.identity = identity
        starts = []
        if isinstance(layers, PackedModel):
            self.refer(layers, part, first, starts)
        else:
            self.build(layers, first, starts)
        outputs = cnorm_scratch_floats(self.layers, self.count, 1)
        # each layer has its own array of outputs: a file of many activations could fill the memory
        if outputs > max(1 << 24, 8 * self.macs):
            raise ValueError(f"layers take {4 * outputs} bytes for the outputs of one step: more than 64 MiB, and more "
                             f"than 8 times the {4 * self.macs} bytes of their weights")
        self.input_size = cnorm_layer_inputs(&self.layers[0])
        self.output_size = cnorm_layer_outputs(&self.layers[self.count - 1])
        self.initial = aligned_zeros(self.state_floats)
        for (_, units, offset), start in zip(self.state_arrays, starts):
            if start is not None:
                self.initial[offset:offset + units] = start

    cdef int build(self, layers, int first, list starts) except -1:
        """Pack the layers; `starts` gets the initial value of each recurrent array."""
        cdef int i
        self.count = len(layers)
        self.owned = self.layers = <cnorm_layer *>PyMem_Calloc(self.count, sizeof(cnorm_layer))
        if self.layers == NULL:
            raise MemoryError()
        memory, arrays = [], []
        for i, (kind, layer, size) in enumerate(layers):
            if kind in CELL_KIND:
                self.add_cell(&self.layers[i], layer, first + self.cells, memory, arrays, starts)
            else:
                self.add_layer(&self.layers[i], kind, layer, size, memory)
            self.state_floats += cnorm_layer_state_floats(&self.layers[i])
        self.memory, self.state_arrays = tuple(memory), tuple(arrays)
        return 0

    def __dealloc__(self):
        PyMem_Free(self.owned)

    @property
    def weights(self):
        """The narrowest type of a matrix: "int8", "float16" or "float32"."""
        if self.types >> <int>CNORM_WEIGHT_I8 & 1:
            return "int8"
        return "float16" if self.types >> <int>CNORM_WEIGHT_F16 & 1 else "float32"

    cdef int add_layer(self, cnorm_layer *to, str kind, layer, ptrdiff_t size, list memory) except -1:
        if kind == "Linear":
            to.kind = CNORM_LAYER_LINEAR
            to.as_.linear.weight = self.pack(layer.weights["weight"], layer.rows.get("weight"), 1, 0, memory)
            to.as_.linear.bias = padded(layer.weights.get("bias"), 1, size, 0, memory)
        elif kind == "LayerNorm":
            to.kind = CNORM_LAYER_NORM
            to.as_.norm.n, to.as_.norm.eps = size, layer.eps
            to.as_.norm.gain = padded(layer.weights["weight"], 1, size, 0, memory)
            to.as_.norm.bias = padded(layer.weights.get("bias"), 1, size, 0, memory)
        elif kind == "Activation":
            to.kind = CNORM_LAYER_ACTIVATION
            to.as_.activation.n = size
            to.as_.activation.f = <cnorm_activation><int>ACTIVATION[layer.function]
        elif kind == "Residual":
            to.kind = CNORM_LAYER_RESIDUAL
            to.as_.residual.n, to.as_.residual.back = size, layer
        else:
            raise ValueError(f"kind must be that of a layer, got {quoted(kind)}")
        return 0

    cdef int add_cell(self, cnorm_layer *to, layer, int number, list memory, list arrays, list starts) except -1:
        """Add a recurrent layer; its state follows the `state_floats` of the layers before it."""
        to.kind = CNORM_LAYER_CELL
        tensors = layer.packed()
        self.pack_cell(&to.as_.cell, layer, tensors, memory)
        arrays.append((f"h{number}", layer.output_size, self.state_floats))
        starts.append(tensors["h0"])
        if layer.kind == "LSTM":
            c_offset = self.state_floats + cnorm_padded_units(layer.output_size)
            arrays.append((f"c{number}", layer.units, c_offset))
            starts.append(tensors["c0"])
        self.cells += 1
        return 0

    cdef int pack_cell(self, cnorm_cell *cell, layer, tensors, list memory) except -1:
        cdef ptrdiff_t units = layer.units, gates = len(layer.spec.gates), group = tensors["group"]
        spec = layer.spec
        shapes = {"weight_x": (gates * units, layer.input_size), "weight_n": (units, units),
                  "weight_h": ((gates - (tensors["weight_n"] is not None)) * units, layer.output_size),
                  "weight_p": (layer.output_size, units)}
        for name, shape in shapes.items():  # the kernels read exactly this much
            if tensors[name] is not None and tensors[name].shape != shape:
                raise ValueError(f"{name} of {layer!r} must be packed as {shape}, got {tensors[name].shape}")
        cell.kind = <cnorm_cell_kind><int>CELL_KIND[spec.kind]
        cell.scope = <cnorm_scope><int>SCOPE[spec.scope]
        cell.cell_norm = <cnorm_cell_norm><int>CELL_NORM[spec.cell_norm]
        cell.reset = <cnorm_reset><int>RESET[spec.reset]
        cell.activation = <cnorm_activation><int>ACTIVATION[spec.activation]
        cell.keep = spec.update == "keep"
        cell.eps = 0 if layer.eps is None else layer.eps
        cell.cell_clip = INFINITY if spec.cell_clip is None else spec.cell_clip
        cell.projection_clip = INFINITY if spec.projection_clip is None else spec.projection_clip
        cell.zoneout = spec.zoneout
        of_h = tensors["weight_h"].shape[0] // units
        cell.weight_x = self.pack(tensors["weight_x"], layer.rows.get("weight_x"), gates, group, memory)
        cell.weight_h = self.pack(tensors["weight_h"], layer.rows.get("weight_h"), of_h, group, memory)
        if tensors["weight_n"] is not None:
            cell.weight_n = self.pack(tensors["weight_n"], layer.rows.get("weight_n"), 1, 0, memory)
        if tensors["weight_p"] is not None:
            cell.weight_p = self.pack(tensors["weight_p"], layer.rows.get("weight_p"), 1, 0, memory)
        # arrays that are added to a product must be as long as the packed product
        cell.inside_x = padded(tensors["inside_x"], gates, units, CNORM_GATE_PAD, memory)
        cell.inside_h = padded(tensors["inside_h"], gates, units, CNORM_GATE_PAD, memory)
        cell.gain_x = padded(tensors["gain_x"], gates, units, 0, memory)
        cell.gain_h = padded(tensors["gain_h"], gates, units, 0, memory)
        cell.bias = padded(tensors["bias"], gates, units, 0, memory)
        cell.bias_n = padded(tensors["bias_n"], 1, units, 0, memory)
        cell.gain_c = padded(tensors["gain_c"], 1, units, 0, memory)
        cell.bias_c = padded(tensors["bias_c"], 1, units, 0, memory)
        cell.bias_p = padded(tensors["bias_p"], 1, layer.output_size, 0, memory)
        return 0

    cdef cnorm_matrix pack(self, cnp.ndarray w, rounded, ptrdiff_t gates, ptrdiff_t group, list memory) except *:
        """Pack w [gates * units, inputs], or `rounded`, the `Rows` that it was rounded to, unless that is None."""
        cdef cnorm_matrix m
        cdef cnp.ndarray panels, rows = w, scales
        cdef const float *scale = NULL
        if gates < 1:
            raise ValueError(f"gates must be at least 1, got {gates}")
        m.gates, m.units, m.cols, m.group = gates, cnp.PyArray_DIMS(w)[0] // gates, cnp.PyArray_DIMS(w)[1], group
        m.type, m.levels = CNORM_WEIGHT_F32, 0
        if rounded is not None:
            rows = np.ascontiguousarray(rounded.rows)
            m.type = weight_type_of(rows.dtype)
            if (<object>rows).shape != (<object>w).shape:
                raise ValueError(f"rows must have the shape {(<object>w).shape}, got {(<object>rows).shape}")
            if m.type == CNORM_WEIGHT_I8:
                scales = np.ascontiguousarray(rounded.scales, np.float32)
                if (<object>scales).shape != (len(rows),):
                    raise ValueError(f"scales must have the shape ({len(rows)},), got {(<object>scales).shape}")
                scale = <const float *>cnp.PyArray_DATA(scales)
        self.add_sizes(&m)
        if self.nbytes > 4 * max(1 << 28, 8 * self.macs):  # a matrix of one row takes a panel of 32 rows
            raise ValueError(f"layers take {self.nbytes} bytes packed in panels of 32 rows: more than 1 GiB, and "
                             f"more than 8 times the {4 * self.macs} bytes of their weights")
        panels = aligned_zeros((cnorm_matrix_bytes(&m) + 3) // 4)
        m.panels = cnp.PyArray_DATA(panels)
        if rounded is not None:
            check(cnorm_matrix_pack_rows(&m, cnp.PyArray_DATA(rows), scale, cnp.PyArray_DATA(panels)))
        else:
            check(cnorm_matrix_pack(m.gates, m.units, m.cols, m.group, <const float *>cnp.PyArray_DATA(w),
                                    <float *>cnp.PyArray_DATA(panels)))
        memory.append(panels)
        return m

    cdef int refer(self, PackedModel packed, int part, int first, list starts) except -1:
        """Use the layers of a packed model, whose panels stay where they are."""
        cdef const cnorm_network *network = &packed.model.networks[part]
        cdef cnorm_layer *layer
        cdef const cnorm_matrix *matrices[4]
        cdef const cnorm_matrix *m
        cdef int i
        cdef ptrdiff_t outputs, units
        arrays = []
        self.layers, self.count, self.memory = <cnorm_layer *>network.layers, network.count, (packed,)
        for i in range(self.count):
            layer = &self.layers[i]
            if layer.kind == CNORM_LAYER_CELL:
                outputs, units = layer.as_.cell.weight_h.cols, layer.as_.cell.weight_x.units
                arrays.append((f"h{first + self.cells}", outputs, self.state_floats))
                starts.append(floats_at(network.starts[i], outputs))
                if layer.as_.cell.kind == <cnorm_cell_kind><int>CELL_KIND["LSTM"]:
                    arrays.append((f"c{first + self.cells}", units, self.state_floats + cnorm_padded_units(outputs)))
                    starts.append(floats_at(network.starts[i], units, cnorm_padded_units(outputs)))
                self.cells += 1
                matrices[:] = [&layer.as_.cell.weight_x, &layer.as_.cell.weight_h, &layer.as_.cell.weight_n,
                               &layer.as_.cell.weight_p]
                for m in matrices:
                    if m.panels != NULL:
                        self.add_sizes(m)
            elif layer.kind == CNORM_LAYER_LINEAR:
                self.add_sizes(&layer.as_.linear.weight)
            self.state_floats += cnorm_layer_state_floats(layer)
        self.state_arrays = tuple(arrays)
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


cdef const float *padded(object v, ptrdiff_t gates, ptrdiff_t units, ptrdiff_t more, list memory) except? NULL:
    """v [gates * units] padded to [gates, padded units], followed by `more` zeros; NULL for None."""
    cdef ptrdiff_t width = cnorm_padded_units(units)
    cdef cnp.ndarray wide
    if v is None:
        return NULL
    wide = aligned_zeros(gates * width + more)
    wide[:gates * width].reshape(gates, width)[:, :units] = v.reshape(gates, units)
    memory.append(wide)
    return <const float *>cnp.PyArray_DATA(wide)
