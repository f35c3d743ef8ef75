"""Whether tensors that a cell was packed from have changed since; the sums of backward passes by their numbers."""

cdef struct watched_tensor:
    tensor_shape shape
    float *memory
    const float *kept
    size_t bytes
    Py_ssize_t version
    bint need  # requires_grad


@cython.no_gc_clear  # the sums of a backward pass that is collected with it delete themselves from `passes`
cdef class Watched:
    """Tensors as they were when a cell was packed from them.

    Parameters
    ----------
    tensors : list of torch.Tensor
    arrays : list of ndarray
        Copies of their values, of the same shapes.
    """
    cdef readonly tuple tensors
    cdef tuple arrays  # tuples, which the collector does not empty
    cdef dict passes  # the address of the `Sums` of each backward pass, which do not live longer by that
    cdef bint plain
    cdef watched_tensor *each

    def __cinit__(self, list tensors, list arrays):
        cdef cnp.ndarray kept
        cdef watched_tensor *it
        cdef Py_ssize_t i
        self.tensors, self.arrays, self.passes = tuple(tensors), tuple(arrays), {}
        self.each = <watched_tensor *>PyMem_Calloc(len(tensors), sizeof(watched_tensor))
        if self.each == NULL:
            raise MemoryError()
        self.plain = True
        for i in range(len(tensors)):
            it, kept = &self.each[i], <cnp.ndarray>arrays[i]
            if shaped_as(kept, &it.shape):
                it.memory = memory_of(tensors[i], &it.shape)
            it.kept, it.bytes = <const float *>cnp.PyArray_DATA(kept), cnp.PyArray_NBYTES(kept)
            it.version, it.need = version_of(tensors[i]), tensors[i].requires_grad
            self.plain = self.plain and it.memory != NULL and not tensors[i].is_neg()

    def __dealloc__(self):
        PyMem_Free(self.each)

    def sums(self, task):
        """The `Sums` kept for this backward pass while they live, else None."""
        cdef object address = self.passes.get(task)
        return None if address is None else <Sums><PyObject *><size_t>address

    def keep(self, Sums sums, task):
        sums.watched, sums.task = self, task
        self.passes[task] = <size_t><PyObject *>sums

    @property
    def needs(self):
        """Which tensors require a gradient."""
        return tuple([self.each[i].need for i in range(len(self.tensors))])

    def changed_version(self):
        """The first tensor with another version than at the beginning, as (number, that version), or None."""
        cdef Py_ssize_t i
        for i in range(len(self.tensors)):
            if version_of(self.tensors[i]) != self.each[i].version:
                return i, self.each[i].version
        return None

    def unchanged(self, list tensors, bint graph):
        """Whether these are the same tensors in the same place with the same bits.

        For a graph they must have the same version, too, which does not tell on its own: writes through `Tensor.data`
        or `numpy()` do not count.
        """
        cdef watched_tensor *it
        cdef Py_ssize_t i
        if not self.plain:
            return False
        for i in range(len(self.tensors)):
            t, it = tensors[i], &self.each[i]
            if t is not self.tensors[i] or memory_of(t, &it.shape) != it.memory or t.is_neg():
                return False
            if graph and (version_of(t) != it.version or <bint>t.requires_grad != it.need):
                return False
        for i in range(len(self.tensors)):
            if memcmp(self.each[i].memory, self.each[i].kept, self.each[i].bytes) != 0:
                return False
        return True
