"""Networks of packed weights, and the activations sigmoid and tanh (private; exposed for tests)."""
from types import MappingProxyType

from cnorm.cells.packing import PANEL_FLOATS, grid, refuse_computed_tokens, refuse_outputs, refuse_panels, set_starts


cdef extern from "rnn/layers.h" nogil:  # what a kind of layer has, by name
    enum:
        LAYER_STATES

    ctypedef struct vector_shape:
        ptrdiff_t gates, units, floats

    ctypedef struct layer_option:
        const char *name

    ctypedef struct layer_field:
        const char *name
        ptrdiff_t at, gradient
        vector_shape (*shape)(const cnorm_layer *)

    ctypedef struct layer_ops:
        const char *name
        const layer_option *options
        const layer_field *fields
        ptrdiff_t (*tokens)(const cnorm_layer *)
        ptrdiff_t (*state)(const cnorm_layer *, int)
        const char *state_names[2]

    const layer_ops *cnorm_layer_ops_of(cnorm_layer_kind kind)
    ptrdiff_t cnorm_token_element(const cnorm_layer *layers, ptrdiff_t index)
    void cnorm_layer_set_number(cnorm_layer *layer, const layer_option *option, double value)
    cnorm_matrix *field_matrix(cnorm_layer *layer, const layer_field *field)
    const float **field_vector(cnorm_layer *layer, const layer_field *field)


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


cdef bint fit_matrix(cnp.ndarray rows, cnp.ndarray scales, cnp.ndarray w) noexcept:
    """Whether rounded rows have the shape of w and a type of weights, and those of int8 have scales."""
    if not cnp.PyArray_ISCARRAY_RO(rows) or not cnp.PyArray_SAMESHAPE(rows, w):
        return False
    if has_dtype(rows, cnp.NPY_INT8):
        return (scales is not None and is_plain(scales, cnp.NPY_FLOAT32)
                and cnp.PyArray_SIZE(scales) == cnp.PyArray_DIMS(w)[0])
    return has_dtype(rows, cnp.NPY_FLOAT16) or has_dtype(rows, cnp.NPY_FLOAT32)


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
    cdef cnp.ndarray rows = np.zeros((<object>w).shape, dtype), scales
    if not is_plain(w, cnp.NPY_FLOAT32) or cnp.PyArray_NDIM(w) != 2 or not cnp.PyArray_SAMESHAPE(w, rows) or gates < 1:
        raise ValueError("w must be a C-contiguous float32 matrix")
    scales = cnp.PyArray_ZEROS(1, cnp.PyArray_DIMS(w), cnp.NPY_FLOAT32, 0)
    m.gates, m.units, m.cols, m.group = gates, cnp.PyArray_DIMS(w)[0] // gates, cnp.PyArray_DIMS(w)[1], group
    m.panels, m.type, m.levels = NULL, weight_type_of(rows), 0
    check(cnorm_matrix_round(&m, <const float *>cnp.PyArray_DATA(w), cnp.PyArray_DATA(rows),
                             <float *>cnp.PyArray_DATA(scales)))
    return rows, scales if m.type == CNORM_WEIGHT_I8 else None


cdef str name_of(const char *name):
    return (<bytes>name).decode()


cdef int kind_of(str name) except -1:
    """The cnorm_layer_kind of a name in src/rnn/layers."""
    cdef int kind = 0
    while cnorm_layer_ops_of(<cnorm_layer_kind>kind) != NULL:
        if name_of(cnorm_layer_ops_of(<cnorm_layer_kind>kind).name) == name:
            return kind
        kind += 1
    raise ValueError(f"there is no kind of layer named {name!r}")


cdef tuple field_names(cnorm_layer_kind kind):
    """The names of a kind's fields, in the order of its table."""
    cdef const layer_field *field = cnorm_layer_ops_of(kind).fields
    names = []
    while field.name != NULL:
        names.append(name_of(field.name))
        field += 1
    return tuple(names)


FIELDS_OF_CELLS = field_names(CNORM_LAYER_CELL)


cdef bint has_field(cnorm_layer *layer, const layer_field *field) noexcept:
    """Whether a layer has a matrix or a vector that its options use."""
    if field.shape == NULL:
        return field_matrix(layer, field).panels != NULL
    return field.shape(layer).floats > 0 and field_vector(layer, field)[0] != NULL


@cython.no_gc  # else the collector would empty `memory` before a finaliser steps a stream; no cycle goes through it
cdef class Network:
    """Packed weights of a stack of layers, with which `cnorm.Model` computes. Not written after construction.

    Parameters
    ----------
    layers : sequence of (layer, size), PackedModel or Network
        As returned by `cnorm.layers.chain.flat`; the sizes of neighbours must fit. Another network that was built: the
        same layers, whose weights the caller writes.
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
    cdef const float **starts  # [count]: the initial state of each layer that has a state
    cdef cnorm_network whole
    cdef cnorm_model model  # of this network alone, for streams
    cdef readonly int cells  # recurrent layers
    cdef readonly ptrdiff_t input_size, output_size
    cdef readonly bytes identity
    cdef tuple state_arrays  # (name, units, offset in the state) of each recurrent array
    cdef cnp.ndarray initial  # the initial state
    cdef ptrdiff_t state_floats
    cdef readonly ptrdiff_t macs, nbytes  # macs: multiply-adds of one step; nbytes: of all panels
    cdef readonly ptrdiff_t longest  # the longest side of a matrix, which no sum of a step exceeds
    cdef readonly object tokens  # the number of tokens, by the element of a frame that is a token id
    cdef bint has_tokens  # whether there are any: a truth value of Python takes 25 ns
    cdef int types  # bit t is set if there is a matrix of type t
    cdef list memory  # keeps the packed arrays alive

    def __cinit__(self, layers, bytes identity, int first=0, int part=0):
        cdef ptrdiff_t outputs
        cdef list starts = []  # the initial value of each recurrent array
        self.identity, self.memory, self.state_arrays = identity, [], ()
        if isinstance(layers, PackedModel):
            self.refer(layers, part, first, starts)
        elif isinstance(layers, Network):
            self.repeat(layers, starts)
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
        self.tokens = self.find_tokens(first)
        self.has_tokens = len(self.tokens) > 0
        check(cnorm_layers_check(self.layers, self.count, NULL))  # runs do not repeat it
        self.starts = <const float **>PyMem_Calloc(self.count, sizeof(float *))
        if self.starts == NULL:
            raise MemoryError()
        self.find_starts(self.starts, False)
        self.whole.layers, self.whole.count, self.whole.starts = self.layers, self.count, self.starts
        self.whole.direction = CNORM_STREAMED
        self.model.networks, self.model.count = &self.whole, 1
        self.model.inputs, self.model.outputs = self.input_size, self.output_size
        self.model.identity = <const unsigned char *>PyBytes_AsString(identity)

    cdef int build(self, layers, int first, list starts) except -1:
        """Pack the layers."""
        cdef int i
        self.count = len(layers)
        self.owned = self.layers = <cnorm_layer *>PyMem_Calloc(self.count, sizeof(cnorm_layer))
        if self.layers == NULL:
            raise MemoryError()
        for i in range(self.count):
            layer, size = layers[i]
            self.add_layer(&self.layers[i], layer.parts(size), first, starts)
        return 0

    def __dealloc__(self):
        PyMem_Free(self.owned)
        PyMem_Free(self.starts)

    @property
    def weights(self):
        """The narrowest type of a matrix: "int8", "float16" or "float32"."""
        if self.types >> <int>CNORM_WEIGHT_I8 & 1:
            return "int8"
        return "float16" if self.types >> <int>CNORM_WEIGHT_F16 & 1 else "float32"

    cdef int add_layer(self, cnorm_layer *to, parts, int first, list starts) except -1:
        """Pack the `cnorm.cells.packing.Parts` of a layer."""
        cdef const layer_ops *ops
        cdef const layer_option *option
        cdef const layer_field *field
        to.kind = <cnorm_layer_kind>kind_of(parts.kind)
        ops = cnorm_layer_ops_of(to.kind)
        option = ops.options
        while option.name != NULL:
            cnorm_layer_set_number(to, option, parts.options[name_of(option.name)])
            option += 1
        field = ops.fields
        while field.name != NULL:
            given = parts.fields.get(name_of(field.name))
            if given is not None:
                if field.shape == NULL:
                    self.pack(field_matrix(to, field), given)
                elif field.shape(to).floats > 0:
                    field_vector(to, field)[0] = self.padded(given, field.shape(to), name_of(field.name))
            field += 1
        self.add_state(to, first, parts.starts, starts)
        return 0

    cdef int add_state(self, const cnorm_layer *layer, int first, dict given, list starts) except -1:
        """Append the state of a layer, whose initial arrays are `given` by name, to that of the layers before it."""
        cdef const layer_ops *ops = cnorm_layer_ops_of(layer.kind)
        cdef ptrdiff_t units, offset = self.state_floats
        cdef int k
        if cnorm_layer_state_floats(layer) == 0:
            return 0
        for k in range(LAYER_STATES):
            units = ops.state(layer, k)
            if units > 0:
                name = name_of(ops.state_names[k])
                self.state_arrays += ((f"{name}{first + self.cells}", units, offset),)
                starts.append(given.get(name))
                offset += cnorm_padded_units(units)
        self.cells += 1
        self.state_floats = offset
        return 0

    cdef int pack(self, cnorm_matrix *m, tuple given) except -1:
        """Pack a matrix, given as (w, rows, scales, gates, group), as `Matrix.given` of cnorm/cells/rounded.py."""
        cdef cnp.ndarray w = given[0], rows = given[1], scales = given[2], panels
        cdef const float *scale = NULL
        m.gates, m.group = given[3], given[4]
        if (not is_plain(w, cnp.NPY_FLOAT32) or cnp.PyArray_NDIM(w) != 2 or m.gates < 1
                or rows is not None and not fit_matrix(rows, scales, w)):
            raise ValueError("an array of a layer has another shape, dtype or strides than when the layer was made")
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

    cdef const float *padded(self, cnp.ndarray v, vector_shape shape, str name) except NULL:
        """v [units] or [gates, units], each gate padded, in an array of at least shape.floats."""
        cdef ptrdiff_t gates = max(shape.gates, 1), length = gates * cnorm_padded_units(shape.units)
        cdef cnp.ndarray wide = aligned_zeros(max(length, shape.floats))
        if cnp.PyArray_SIZE(v) != gates * shape.units:
            raise ValueError(f"{name} must have {gates * shape.units} elements, got {v.size}")
        self.memory.append(wide)
        refill(<const float *>cnp.PyArray_DATA(wide), v, gates, shape.units)
        return <const float *>cnp.PyArray_DATA(wide)

    cdef int refer(self, PackedModel packed, int part, int first, list starts) except -1:
        """Use the layers of a packed model, whose panels stay where they are."""
        cdef const cnorm_network *network = &packed.model.networks[part]
        cdef cnorm_layer *layer
        cdef const layer_ops *ops
        cdef const layer_field *field
        cdef ptrdiff_t offset
        cdef int i, k
        self.layers, self.count = <cnorm_layer *>network.layers, network.count
        self.memory.append(packed)
        for i in range(self.count):
            layer = &self.layers[i]
            ops = cnorm_layer_ops_of(layer.kind)
            field = ops.fields
            while field.name != NULL:
                if field.shape == NULL and has_field(layer, field):
                    self.add_sizes(field_matrix(layer, field))
                field += 1
            given, offset = {}, 0
            for k in range(LAYER_STATES if ops.state != NULL else 0):
                if ops.state(layer, k) > 0:
                    given[name_of(ops.state_names[k])] = floats_at(network.starts[i], ops.state(layer, k), offset)
                    offset += cnorm_padded_units(ops.state(layer, k))
            self.add_state(layer, first, given, starts)
        return 0

    cdef object find_tokens(self, int first):
        cdef ptrdiff_t place
        cdef int i
        cdef dict found = {}
        for i in range(self.count):
            tokens = cnorm_layer_ops_of(self.layers[i].kind).tokens
            if tokens != NULL:
                place = cnorm_token_element(self.layers, i)
                if place < 0 or first > 0:
                    refuse_computed_tokens(i)
                found[place] = min(tokens(&self.layers[i]), found.get(place, tokens(&self.layers[i])))
        return MappingProxyType(found)

    def check_frames(self, x, bint finite=False):
        """Refuse frames [..., inputs], float32, with a number that is no token id, or not finite; names the first."""
        cdef cnp.ndarray a = np.ascontiguousarray(x, np.float32)
        cdef ptrdiff_t rows = cnp.PyArray_SIZE(a) // self.input_size, element = 0, row
        if finite:
            check_finite(a, "x")
        row = cnorm_refused_token(self.layers, self.count, rows, <const float *>cnp.PyArray_DATA(a), self.input_size,
                                  &element)
        if row < rows:
            refuse_token(a, "x", row, element, self.tokens[element])

    cdef int repeat(self, Network other, list starts) except -1:
        """The layers of another network, with memory of their own for weights."""
        cdef const layer_field *field
        cdef cnp.ndarray block
        cdef int i
        self.count = other.count
        self.owned = self.layers = <cnorm_layer *>PyMem_Calloc(self.count, sizeof(cnorm_layer))
        if self.layers == NULL:
            raise MemoryError()
        memcpy(self.layers, other.layers, self.count * sizeof(cnorm_layer))
        blocks = iter(other.memory)
        for i in range(self.count):
            field = cnorm_layer_ops_of(self.layers[i].kind).fields
            while field.name != NULL:
                if has_field(&self.layers[i], field):
                    block = aligned_floats(cnp.PyArray_SIZE(next(blocks)), False)
                    self.memory.append(block)
                    if field.shape == NULL:
                        field_matrix(&self.layers[i], field).panels = cnp.PyArray_DATA(block)
                    else:
                        field_vector(&self.layers[i], field)[0] = <const float *>cnp.PyArray_DATA(block)
                field += 1
        self.cells, self.state_arrays, self.state_floats = other.cells, other.state_arrays, other.state_floats
        self.macs, self.nbytes, self.types, self.longest = other.macs, other.nbytes, other.types, other.longest
        starts.extend([other.initial[at:at + units] for _, units, at in other.state_arrays])
        return 0

    cdef int find_starts(self, const float **starts, bint nonzero) except -1:
        """The initial state of each layer that has one, or one other than zero (-0.0 is one)."""
        cdef int i
        cdef ptrdiff_t offset = 0, floats
        for i in range(self.count):
            floats = cnorm_layer_state_floats(&self.layers[i])
            if floats > 0 and (not nonzero or self.initial[offset:offset + floats].view(np.uint32).any()):
                starts[i] = <const float *>cnp.PyArray_DATA(self.initial) + offset
            offset += floats
        return 0

    cdef int add_sizes(self, const cnorm_matrix *m) except -1:
        self.macs += m.gates * m.units * m.cols
        self.nbytes += cnorm_matrix_bytes(m)
        self.longest = max(self.longest, m.gates * m.units, m.cols)
        self.types |= 1 << <int>m.type
        return 0

    cdef cnp.ndarray scratch(self, ptrdiff_t rows):
        return aligned_floats(cnorm_scratch_floats(self.layers, self.count, rows), False)
