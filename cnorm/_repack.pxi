"""A cell for `cnorm.torch` packed again after a change of its tensors, without the layer that Python packs from.

The plan of its gradients, see `TrainedCell`, says from where each piece of the packed weights comes. It describes those
cells whose vectors are pieces of tensors, or constants plus such; `TrainedCell.repacks` is what a trial found.
"""

cdef Network network_with(TrainedCell cell, list values):
    """The network of a cell with other values of its tensors."""
    cdef Network new = Network(cell.network, b"")
    cdef cnorm_layer *layer = new.layers
    cdef const layer_field *fields = cnorm_layer_ops_of(CNORM_LAYER_CELL).fields
    cdef Py_ssize_t f
    cdef float_mode mode = float_mode_enter()
    try:
        for f in range(len(FIELDS_OF_CELLS)):
            if has_field(layer, &fields[f]):
                if fields[f].shape == NULL:
                    pack_matrix(field_matrix(layer, &fields[f]), cell, f, values)
                else:
                    fill_vector(cell, f, values, <float *>field_vector(layer, &fields[f])[0])
    finally:
        float_mode_leave(mode)
    return new


cdef int pack_matrix(const cnorm_matrix *m, TrainedCell cell, Py_ssize_t field, list values) except -1:
    cdef cnp.ndarray rows = None
    cdef Py_ssize_t number
    for number in cell.whole:
        if cell.whole[number] == field:
            rows = values[number]
    if rows is None:
        rows = cell.blocks.take(m.gates * m.units * m.cols)
        fill_field(cell, field, values, <float *>cnp.PyArray_DATA(rows))
    return check(cnorm_matrix_pack(m.gates, m.units, m.cols, m.group, <const float *>cnp.PyArray_DATA(rows),
                                   <float *>m.panels))


cdef int fill_field(TrainedCell cell, Py_ssize_t field, list values, float *to) except -1:
    """Copy the pieces of a field from the tensors."""
    cdef const long long *piece = <const long long *>cnp.PyArray_DATA(cell.plan)
    cdef const float *of
    cdef float *at
    cdef Py_ssize_t i
    cdef long long row, col
    for i in range(cnp.PyArray_DIMS(cell.plan)[0]):
        if piece[2] == field:
            for row in range(piece[4]):
                of = <const float *>cnp.PyArray_DATA(<cnp.ndarray>values[piece[0]]) + piece[1] + row * piece[6]
                at = to + piece[3] + row * piece[8]
                for col in range(piece[5]):
                    at[col] = of[col * piece[7]]
        piece += 10
    return 0


cdef int fill_vector(TrainedCell cell, Py_ssize_t field, list values, float *to) except -1:
    """A vector: pieces of tensors among constants; of biases the sum, in float64 and rounded once, constants last."""
    cdef cnp.ndarray constants = cell.constants[field]
    cdef const long long *piece = <const long long *>cnp.PyArray_DATA(cell.plan)
    cdef const float *constant = <const float *>cnp.PyArray_DATA(constants)
    cdef const float *of
    cdef Py_ssize_t count = cnp.PyArray_SIZE(constants), i
    cdef long long col
    cdef cnp.ndarray sums
    cdef double *total
    if FIELDS_OF_CELLS[field] != "bias":
        memcpy(to, constant, count * sizeof(float))
        return fill_field(cell, field, values, to)
    sums = np.zeros(count)
    total = <double *>cnp.PyArray_DATA(sums)
    for i in range(cnp.PyArray_DIMS(cell.plan)[0]):
        if piece[2] == field:  # a row
            of = <const float *>cnp.PyArray_DATA(<cnp.ndarray>values[piece[0]]) + piece[1]
            for col in range(piece[5]):
                total[piece[3] + col] += of[col * piece[7]]
        piece += 10
    for i in range(count):
        to[i] = <float>(total[i] + constant[i])
    return 0


cdef bint copy_finite(const float *given, float *to, Py_ssize_t count) noexcept:
    """Copy, and say whether all are finite."""
    cdef const uint32_t *bits = <const uint32_t *>given
    cdef uint32_t most = 0
    cdef Py_ssize_t i
    memcpy(to, given, count * sizeof(float))
    for i in range(count):
        most = max(most, bits[i] & 0x7fffffff)
    return most < 0x7f800000


def same_network(Network a, Network b):
    """Whether two networks of the same layers have packed the same bits."""
    return all([same_bits(x, y) for x, y in zip(a.memory, b.memory)])
