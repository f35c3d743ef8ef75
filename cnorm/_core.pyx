# cython: language_level=3, cdivision=True, binding=True, auto_pickle=False
"""The extension module: it converts NumPy arrays to pointers and does every check that needs Python.

The C functions check the arguments that a C caller can get wrong and return a status, which `check` turns into an
exception. Arrays are accessed by the NumPy C-API: typed memoryviews cost ten times as much per call. All parts are
included into one module, because two modules would each link a copy of the library, with its own active instruction
set.
"""
cimport cython
cimport numpy as cnp
from cpython.bytes cimport PyBytes_AsString, PyBytes_FromStringAndSize
from cpython.list cimport PyList_GetItem
from cpython.long cimport PyLong_AsLongAndOverflow
from cpython.exc cimport PyErr_Clear
from cpython.mem cimport PyMem_Calloc, PyMem_Free
from cpython.object cimport PyObject
from cpython.pycapsule cimport PyCapsule_GetPointer
from libc.float cimport FLT_MAX
from libc.math cimport isfinite
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t
from libc.string cimport memcmp, memcpy, memset

from cnorm.capi cimport *

import os

import numpy as np

cnp.import_array()

cdef enum:
    # elements of a norm, above which the GIL is released; releasing it costs about 20 ns
    RELEASE_GIL_ABOVE = 16384
    # multiply-adds of a network, about 20 us, above which the GIL is released: a shorter step keeps it, because
    # acquiring it again can take 5 ms if another thread is busy
    RELEASE_GIL_ABOVE_MACS = 262144

cdef extern from *:
    """
    static int try_lock(int *flag) { return __atomic_exchange_n(flag, 1, __ATOMIC_ACQUIRE) == 0; }
    static void unlock(int *flag) { __atomic_store_n(flag, 0, __ATOMIC_RELEASE); }
    """
    bint try_lock(int *flag) nogil
    void unlock(int *flag) nogil

cdef extern from "float_mode.h" nogil:
    ctypedef struct float_mode:
        pass
    float_mode float_mode_enter()
    void float_mode_leave(float_mode mode)


cdef class default_float_env:
    """Context manager in which NumPy uses the kernels' floating-point mode, whatever mode is set, and does not warn."""
    cdef float_mode mode
    cdef object errstate

    def __enter__(self):
        self.errstate = np.errstate(all="ignore")
        self.errstate.__enter__()
        self.mode = float_mode_enter()

    def __exit__(self, *error):
        self.errstate.__exit__(*error)  # first: it raises if __enter__ was not called, and then no mode was saved
        float_mode_leave(self.mode)


cdef int check(cnorm_status status) except -1:
    if status != CNORM_OK:
        raise ValueError(cnorm_strerror(status).decode())
    return 0


# ---- instruction sets ------------------------------------------------------------------------------------------

def available_isas():
    """Instruction sets that this machine can run, the baseline first.

    Returns
    -------
    tuple of str
        Some of ``"baseline"``, ``"avx2"``, ``"avx512"``, ``"neon"``. All give the same bits.
    """
    # a list, because a generator would bring 10 kB of code for coroutines
    return tuple([cnorm_isa_name(i).decode() for i in range(cnorm_isa_count())])


def active_isa():
    """The instruction set in use.

    Returns
    -------
    str
        The widest available one, unless `use_isa` or the environment variable ``CNORM_ISA`` chose another.
    """
    return cnorm_isa_active().decode()


def use_isa(name):
    """Use another instruction set from now on, in all threads. Results do not change, only their speed.

    Parameters
    ----------
    name : str
        One of `available_isas`.

    Raises
    ------
    TypeError
        If `name` is not a string.
    ValueError
        If it is unknown, or this machine does not have it.
    """
    check_isa(name, available_isas())  # as a Python string, because a C string would end at a NUL
    check(cnorm_isa_use(name.encode()))


if cnorm_isa_active() == NULL:
    raise ImportError(f"the environment variable CNORM_ISA is {os.environ.get('CNORM_ISA')!r}; this machine can run "
                      f"{', '.join(available_isas())}")


include "_arrays.pxi"
include "_call.pxi"
include "_stats.pxi"
include "_layer_norm.pxi"
include "_group_norm.pxi"
include "_batch_norm.pxi"
include "_weight_norm.pxi"
include "_divisive_norm.pxi"
include "_network.pxi"
include "_packed.pxi"
include "_stream.pxi"
include "_step_many.pxi"
include "_train.pxi"
include "_tensors.pxi"
include "_cells.pxi"
include "_watched.pxi"
include "_repack.pxi"
include "_capsules.pxi"
