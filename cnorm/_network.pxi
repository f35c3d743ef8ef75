"""Packed networks, and the two activations that they are built on (private, tested)."""

cdef elementwise(cnorm_status (*f)(ptrdiff_t, const float *, float *) noexcept nogil, x, out):
    cdef cnp.ndarray a = as_array(x, "x"), y
    if dtype_of(a, "x") != CNORM_F32:
        raise TypeError(f"x must have dtype float32, got {a.dtype}")
    a = np.ascontiguousarray(a)
    y = output(out, "out", a)
    if not cnp.PyArray_IS_C_CONTIGUOUS(y):
        raise ValueError("out must be C-contiguous")
    check(f(cnp.PyArray_SIZE(a), <const float *>cnp.PyArray_DATA(a), <float *>cnp.PyArray_DATA(y)))
    return y


def sigmoid(x, out=None):
    """1/(1 + exp(-x)) of a float32 array, at most 1 ULP, monotone."""
    return elementwise(cnorm_sigmoid_f32, x, out)


def tanh(x, out=None):
    """tanh(x) of a float32 array, at most 1 ULP, monotone."""
    return elementwise(cnorm_tanh_f32, x, out)


cdef cnp.ndarray aligned_zeros(ptrdiff_t floats):
    """float32 zeros on a CNORM_ALIGN boundary."""
    cdef cnp.ndarray raw = np.zeros(floats * 4 + CNORM_ALIGN, np.uint8)
    cdef ptrdiff_t start = -(<ptrdiff_t>cnp.PyArray_DATA(raw)) % CNORM_ALIGN
    return raw[start + (CNORM_ALIGN if start < 0 else 0):][:floats * 4].view(np.float32)


ACTIVATION = {"tanh": CNORM_ACTIVATION_TANH, "relu": CNORM_ACTIVATION_RELU, "sigmoid": CNORM_ACTIVATION_SIGMOID}
CELL_KIND = {"LSTM": CNORM_CELL_LSTM, "GRU": CNORM_CELL_GRU, "RNN": CNORM_CELL_RNN}
SCOPE = {"none": CNORM_SCOPE_NONE, "split": CNORM_SCOPE_SPLIT, "sum": CNORM_SCOPE_SUM}
CELL_NORM = {"none": CNORM_CELL_NORM_NONE, "output": CNORM_CELL_NORM_OUTPUT, "carry": CNORM_CELL_NORM_CARRY}
RESET = {"after": CNORM_RESET_AFTER, "candidate": CNORM_RESET_CANDIDATE, "before": CNORM_RESET_BEFORE}


cdef class Network:
    """Packed weights of a stack of layers: what `cnorm.Model` computes with. Never written after construction.

    Parameters
    ----------
    layers : sequence of (kind, layer, size)
        What `cnorm.layers.flat` returns; their sizes fit one another.
    identity : bytes
        Hash of configuration and weights; ties a saved stream to its model.
    """
    cdef cnorm_layer *layers
    cdef int count
    cdef readonly ptrdiff_t input_size, output_size
    cdef readonly bytes identity
    cdef readonly tuple state_arrays  # (name, units, offset in the state) of each recurrent array
    cdef cnp.ndarray initial  # the state at the start
    cdef ptrdiff_t state_floats
    cdef readonly ptrdiff_t macs, packed  # macs: multiply-adds of one step; packed: floats of all panels
    cdef list memory  # keeps the packed arrays alive

    def __cinit__(self, layers, bytes identity):
        cdef cnorm_layer *at
        cdef ptrdiff_t offset = 0, room
        cdef int i, number = 0
        self.count = len(layers)
        self.memory = []
        self.identity = identity
        self.layers = <cnorm_layer *>PyMem_Calloc(self.count, sizeof(cnorm_layer))
        if self.layers == NULL:
            raise MemoryError()
        names, starts = [], []
        for i, (kind, layer, size) in enumerate(layers):
            at = &self.layers[i]
            if kind == "Linear":
                at.kind = CNORM_LAYER_LINEAR
                at.as_.linear.weight = self.pack(layer.weights["weight"], 1, 0)
                at.as_.linear.bias = self.pad(layer.weights.get("bias"), 1, size, 0)
            elif kind == "LayerNorm":
                at.kind = CNORM_LAYER_NORM
                at.as_.norm.n, at.as_.norm.eps = size, layer.eps
                at.as_.norm.gain = self.pad(layer.weights["weight"], 1, size, 0)
                at.as_.norm.bias = self.pad(layer.weights.get("bias"), 1, size, 0)
            elif kind == "Activation":
                at.kind = CNORM_LAYER_ACTIVATION
                at.as_.activation.n = size
                at.as_.activation.f = <cnorm_activation><int>ACTIVATION[layer.function]
            elif kind == "Residual":
                at.kind = CNORM_LAYER_RESIDUAL
                at.as_.residual.n, at.as_.residual.back = size, layer
            else:
                at.kind = CNORM_LAYER_CELL
                packed = layer.packed()
                self.pack_cell(&at.as_.cell, layer, packed)
                names.append((f"h{number}", layer.output_size, offset))
                starts.append(packed["h0"])
                if kind == "LSTM":
                    names.append((f"c{number}", layer.units, offset + cnorm_padded_units(layer.output_size)))
                    starts.append(packed["c0"])
                number += 1
            offset += cnorm_layer_state_floats(at)
        room = cnorm_scratch_floats(self.layers, self.count, 1)
        if room > max(1 << 24, 8 * self.macs):  # each output has its own: a file of activations could fill memory
            raise ValueError(f"layers take {4 * room} bytes for the outputs of one step: more than 64 MiB, and more "
                             f"than 8 times the {4 * self.macs} bytes of their weights")
        self.state_arrays = tuple(names)
        self.input_size = cnorm_layer_inputs(&self.layers[0])
        self.output_size = cnorm_layer_outputs(&self.layers[self.count - 1])
        self.state_floats = cnorm_state_floats(self.layers, self.count)
        self.initial = aligned_zeros(self.state_floats)
        for (_, units, offset), start in zip(names, starts):
            if start is not None:
                self.initial[offset:offset + units] = start

    def __dealloc__(self):
        PyMem_Free(self.layers)

    cdef int pack_cell(self, cnorm_cell *cell, layer, packed) except -1:
        cdef ptrdiff_t units = layer.units, gates = len(layer.spec.gates), group = packed["group"]
        spec = layer.spec
        shapes = {"weight_x": (gates * units, layer.input_size), "weight_n": (units, units),
                  "weight_h": ((gates - (packed["weight_n"] is not None)) * units, layer.output_size),
                  "weight_p": (layer.output_size, units)}
        for name, shape in shapes.items():  # what the kernels read: nothing may be shorter
            if packed[name] is not None and packed[name].shape != shape:
                raise ValueError(f"{name} of {layer!r} must be packed as {shape}, got {packed[name].shape}")
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
        cell.weight_x = self.pack(packed["weight_x"], gates, group)
        cell.weight_h = self.pack(packed["weight_h"], packed["weight_h"].shape[0] // units, group)
        if packed["weight_n"] is not None:
            cell.weight_n = self.pack(packed["weight_n"], 1, 0)
        if packed["weight_p"] is not None:
            cell.weight_p = self.pack(packed["weight_p"], 1, 0)
        # what is added to a product is as long as the packed product
        cell.inside_x = self.pad(packed["inside_x"], gates, units, CNORM_GATE_PAD)
        cell.inside_h = self.pad(packed["inside_h"], gates, units, CNORM_GATE_PAD)
        cell.gain_x = self.pad(packed["gain_x"], gates, units, 0)
        cell.gain_h = self.pad(packed["gain_h"], gates, units, 0)
        cell.bias, cell.bias_n = self.pad(packed["bias"], gates, units, 0), self.pad(packed["bias_n"], 1, units, 0)
        cell.gain_c, cell.bias_c = self.pad(packed["gain_c"], 1, units, 0), self.pad(packed["bias_c"], 1, units, 0)
        cell.bias_p = self.pad(packed["bias_p"], 1, layer.output_size, 0)
        return 0

    cdef cnorm_matrix pack(self, cnp.ndarray w, ptrdiff_t gates, ptrdiff_t group) except *:
        cdef cnorm_matrix m
        cdef cnp.ndarray panels
        if gates < 1:
            raise ValueError(f"gates must be at least 1, got {gates}")
        m.gates, m.units, m.cols, m.group = gates, cnp.PyArray_DIMS(w)[0] // gates, cnp.PyArray_DIMS(w)[1], group
        self.macs += cnp.PyArray_SIZE(w)
        self.packed += cnorm_matrix_floats(m.gates, m.units, m.cols)
        if self.packed > max(1 << 28, 8 * self.macs):  # panels have 32 rows: a file of single ones could fill memory
            raise ValueError(f"layers take {4 * self.packed} bytes packed in panels of 32 rows: more than 1 GiB, and "
                             f"more than 8 times the {4 * self.macs} bytes of their weights")
        panels = aligned_zeros(cnorm_matrix_floats(m.gates, m.units, m.cols))
        m.panels = <const float *>cnp.PyArray_DATA(panels)
        check(cnorm_matrix_pack(m.gates, m.units, m.cols, m.group, <const float *>cnp.PyArray_DATA(w),
                                <float *>cnp.PyArray_DATA(panels)))
        self.memory.append(panels)
        return m

    cdef const float *pad(self, v, ptrdiff_t gates, ptrdiff_t units, ptrdiff_t more) except? NULL:
        """v [gates * units] as [gates, padded units], and `more` zeros; NULL for None."""
        cdef ptrdiff_t width = cnorm_padded_units(units)
        cdef cnp.ndarray padded
        if v is None:
            return NULL
        padded = aligned_zeros(gates * width + more)
        padded[:gates * width].reshape(gates, width)[:, :units] = v.reshape(gates, units)
        self.memory.append(padded)
        return <const float *>cnp.PyArray_DATA(padded)

    cdef cnp.ndarray scratch(self, ptrdiff_t rows):
        return aligned_zeros(cnorm_scratch_floats(self.layers, self.count, rows))
