"""Packed models: one flat file in the layout of the kernels, used where it lies. src/rnn/packed.h has the table."""

from cnorm.cells.packing import refuse_packed

DIRECTION = {"streamed": CNORM_STREAMED, "forward": CNORM_FORWARD, "backward": CNORM_BACKWARD}
DIRECTIONS = {number: name for name, number in DIRECTION.items()}


cdef cnp.ndarray floats_at(const float *start, cnp.npy_intp count, ptrdiff_t offset=0):
    """A copy of `count` floats, None for NULL."""
    if start == NULL:
        return None
    return cnp.PyArray_SimpleNewFromData(1, &count, cnp.NPY_FLOAT32, <void *>(start + offset)).copy()


@cython.no_gc  # networks use its memory; no cycle goes through it
cdef class PackedModel:
    """The checked tables of a packed model.

    Parameters
    ----------
    file : ndarray, uint8, one-dimensional
        The bytes, which may be mapped and come from an untrusted source. They are not copied if they are aligned.

    Attributes
    ----------
    identity : bytes, 32
    configuration : bytes
        JSON, not parsed.
    directions : tuple of str
        For each network "streamed", or "forward" and "backward" for the halves of a bidirectional layer.
    """
    cdef cnorm_model model
    cdef readonly cnp.ndarray file
    cdef cnp.ndarray memory
    cdef readonly bytes identity, configuration
    cdef readonly tuple directions

    def __cinit__(self, cnp.ndarray file not None):
        cdef ptrdiff_t size = cnp.PyArray_SIZE(file)
        cdef cnorm_fault fault
        cdef cnorm_status status
        if file.dtype != np.uint8 or file.ndim != 1 or not cnp.PyArray_IS_C_CONTIGUOUS(file):
            raise TypeError("file must be a contiguous array of uint8")
        if <size_t>cnp.PyArray_DATA(file) % CNORM_ALIGN:
            copy = aligned_zeros((size + 3) // 4).view(np.uint8)[:size]
            copy[:] = file
            file = copy
        self.file = file
        self.memory = aligned_zeros((cnorm_model_memory(cnp.PyArray_DATA(file), size) + 3) // 4)
        status = cnorm_model_open(cnp.PyArray_DATA(file), size, cnp.PyArray_DATA(self.memory),
                                  4 * cnp.PyArray_SIZE(self.memory), &self.model, &fault)
        if status != CNORM_OK:
            refuse_packed(cnorm_strerror(status).decode(), fault.network, fault.layer,
                          None if fault.field == NULL else name_of(fault.field))
        self.identity = (<const char *>self.model.identity)[:CNORM_IDENTITY]
        self.configuration = self.model.configuration[:self.model.configuration_bytes]
        self.directions = tuple([DIRECTIONS[<int>self.model.networks[i].direction] for i in range(self.model.count)])

    def verify(self):
        """ValueError unless panels and vectors have the checksum of the head; reads the whole file."""
        check(cnorm_model_verify(&self.model))


def pack_model(networks, directions, bytes identity not None, bytes configuration not None):
    """The packed file of networks.

    Parameters
    ----------
    networks : sequence of Network
    directions : sequence of str
        As in `PackedModel`.
    identity : bytes, 32
    configuration : bytes

    Returns
    -------
    bytes
    """
    cdef int i, k, at = 0
    cdef int layers = sum([(<Network?>network).count for network in networks])
    cdef cnorm_network *parts = <cnorm_network *>PyMem_Calloc(len(networks) + 1, sizeof(cnorm_network))
    cdef const float **starts = <const float **>PyMem_Calloc(layers + 1, sizeof(float *))
    cdef Network network
    cdef cnorm_model model
    cdef bytes file
    cdef ptrdiff_t size
    try:
        if parts == NULL or starts == NULL:
            raise MemoryError()
        for i in range(len(networks)):
            network = networks[i]
            parts[i].layers, parts[i].count, parts[i].starts = network.layers, network.count, &starts[at]
            parts[i].direction = <cnorm_direction><int>DIRECTION[directions[i]]
            network.find_starts(&starts[at], True)
            at += network.count
        model.networks, model.count = parts, len(networks)
        model.identity = <const unsigned char *>PyBytes_AsString(identity)
        model.configuration, model.configuration_bytes = PyBytes_AsString(configuration), len(configuration)
        size = cnorm_model_file_bytes(&model)
        if size == 0:
            raise ValueError("the model has more layers than a packed file can hold")
        file = PyBytes_FromStringAndSize(NULL, size)
        check(cnorm_model_write(&model, PyBytes_AsString(file)))
        return file
    finally:
        PyMem_Free(parts)
        PyMem_Free(starts)
