"""Tensors of PyTorch as memory, by DLPack's C exchange API, which PyTorch 2.10 and later have, else by their methods.

The functions of PyTorch that this needs come from `use_tensors`, because the core does not import it.
"""

cdef extern from *:
    """
    typedef struct { /* DLTensor of DLPack 1.3 */
        void *data;
        int32_t device, number, ndim;
        uint8_t code, bits;
        uint16_t lanes;
        const int64_t *shape, *strides;
        uint64_t offset;
    } borrowed_tensor;
    typedef struct { /* DLPackExchangeAPI */
        uint32_t major, minor;
        void *previous, *allocate, *give, *take;
        int (*borrow)(void *object, borrowed_tensor *to);
        void *stream;
    } exchange_api;
    """
    ctypedef struct borrowed_tensor:
        void *data
        int32_t device, ndim
        uint8_t code, bits
        uint16_t lanes
        const int64_t *shape
        const int64_t *strides
        uint64_t offset
    ctypedef struct exchange_api:
        uint32_t major
        int (*borrow)(void *object, borrowed_tensor *to)

cdef enum:
    MAX_AXES = 4
    DL_CPU = 1  # kDLCPU
    DL_FLOAT = 2  # kDLFloat

cdef size_t LOW_ADDRESSES = <size_t>1 << (36 if sizeof(void *) == 8 else 31)  # offsets of tensors stay below this

cdef struct tensor_shape:
    int ndim
    int64_t sizes[MAX_AXES]

cdef object tensor_type = None, parameter_type = None
cdef object float32, blank_tensor, tensor_like, readable_tensor
cdef const exchange_api *exchange = NULL


def use_tensors(tuple types, dtype, tuple functions, capsule):
    """Make PyTorch known.

    Parameters
    ----------
    types : tuple of type
        `torch.Tensor` and `torch.nn.Parameter`. Other subclasses may have methods of their own.
    dtype : torch.dtype
        float32.
    functions : tuple of callable
        shape -> a tensor that takes no memory; tensor -> a new, contiguous one of this shape; (tensor, name, shape) ->
        the same for the kernels to read.
    capsule : object
        `torch.Tensor.__dlpack_c_exchange_api__`, or None if it has none.
    """
    global tensor_type, parameter_type, float32, blank_tensor, tensor_like, readable_tensor, exchange
    (tensor_type, parameter_type), float32 = types, dtype
    blank_tensor, tensor_like, readable_tensor = functions
    exchange = NULL
    if capsule is not None:
        exchange = <const exchange_api *>PyCapsule_GetPointer(capsule, "dlpack_exchange_api")
        if exchange.major != 1 or exchange.borrow == NULL:
            exchange = NULL


cdef tensor_shape shape_of(ptrdiff_t steps, ptrdiff_t batch, ptrdiff_t width) noexcept:
    """[steps, batch, width], or without steps if they are 0."""
    cdef tensor_shape shape
    cdef int first = 1 if steps else 0
    shape.ndim = 2 + first
    shape.sizes[0] = steps
    shape.sizes[first], shape.sizes[first + 1] = batch, width
    return shape


cdef bint shaped_as(cnp.ndarray a, tensor_shape *shape) noexcept:
    """The shape of an array, unless it has too many axes."""
    cdef int axis
    shape.ndim = cnp.PyArray_NDIM(a)
    if shape.ndim > MAX_AXES:
        return False
    for axis in range(shape.ndim):
        shape.sizes[axis] = cnp.PyArray_DIMS(a)[axis]
    return True


cdef tuple sizes_of(const tensor_shape *shape):
    return tuple([shape.sizes[i] for i in range(shape.ndim)])


cdef float *memory_by_methods(t, const tensor_shape *shape) except? NULL:
    if t.dtype is not float32 or not t.is_cpu or t.shape != sizes_of(shape) or not t.is_contiguous():
        return NULL
    return <float *><size_t>t.data_ptr()


cdef float *memory_of(t, const tensor_shape *shape) except? NULL:
    """Of a contiguous float32 tensor of this shape on the CPU; NULL for any other."""
    cdef borrowed_tensor it
    cdef int64_t stride = 1
    cdef int i
    if type(t) is not tensor_type and type(t) is not parameter_type:
        return NULL
    if exchange == NULL:
        return memory_by_methods(t, shape)
    if exchange.borrow(<void *>t, &it) != 0:
        PyErr_Clear()
        return NULL
    if it.device != DL_CPU or it.code != DL_FLOAT or it.bits != 32 or it.lanes != 1 or it.ndim != shape.ndim:
        return NULL
    for i in range(shape.ndim - 1, -1, -1):
        if it.shape[i] != shape.sizes[i] or (it.strides[i] != stride and it.shape[i] != 1):
            return NULL
        stride *= it.shape[i]
    return <float *>(<char *>it.data + it.offset)


cdef bint is_allocated(t, const float *memory) except -1:
    """Whether a tensor's storage has memory: where it was freed, PyTorch's address is the tensor's offset alone."""
    return <size_t>memory >= LOW_ADDRESSES or t.untyped_storage().data_ptr() != 0


cdef object readable(t, str name, const tensor_shape *shape):
    """The tensor, or a copy if the kernels can't read it; None for None."""
    if t is None:
        return None
    cdef float *memory = memory_of(t, shape)
    if memory != NULL and is_allocated(t, memory) and not t.is_neg():
        return t
    return readable_tensor(t, name, sizes_of(shape))


cdef float *data_of(t, const tensor_shape *shape) except? NULL:
    """The memory of a tensor of `readable` or `tensor_like`, NULL for None.

    A call asks for it when all its tensors are there: a finaliser that runs before that may resize a tensor's storage.
    """
    cdef float *memory = NULL if t is None else memory_of(t, shape)
    if memory == NULL and t is not None:
        refuse_changed()
    return memory


cdef Py_ssize_t version_of(t):
    """A tensor's version; 0 of one made in inference mode, which has none."""
    return 0 if t.is_inference() else t._version


def tensors_at(module, list paths):
    """Parameters of a module, or what pruning, parametrization or `functional_call` have put there.

    A path is the names on the way, such as ("layers", "0", "weight").
    """
    cdef dict own = module._parameters, parameters
    cdef tuple path
    cdef Py_ssize_t last, i
    found = []
    for path in paths:
        owner, last = module, len(path) - 1
        for i in range(last):
            owner = owner._modules[path[i]]
        parameters = own if owner is module else owner._parameters
        t = parameters.get(path[last])
        found.append(getattr(owner, path[last]) if t is None else t)
    return found
