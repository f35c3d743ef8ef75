"""The C library for extension modules, Numba and ctypes: capsules of its functions and the layout of its structs.

C and C++ include ``cnorm_python.h`` from the folder `cnorm.get_include`, Cython says ``from cnorm.capi cimport *``, and
Numba takes ``numba.extending.get_cython_function_address("cnorm.capi", name)``. All of them call the functions that are
loaded with this package, so that there is one active instruction set. docs/embedding.md has examples.

Attributes
----------
__pyx_capi__ : dict of str to PyCapsule
    The address of each function of the headers, by its name.
MODEL, STREAM : dtype
    The structs ``cnorm_model`` and ``cnorm_stream``, for memory that NumPy allocates.
"""

import numpy as np

from cnorm._core import capsules as __pyx_capi__

__all__ = ["MODEL", "STREAM", "__pyx_capi__"]

_POINTER, _SIZE = np.uintp, np.intp

MODEL = np.dtype(
    [
        ("networks", _POINTER),
        ("count", np.intc),
        ("inputs", _SIZE),
        ("outputs", _SIZE),
        ("identity", _POINTER),
        ("configuration", _POINTER),
        ("configuration_bytes", _SIZE),
        ("file", _POINTER),
        ("file_bytes", _SIZE),
    ],
    align=True,
)
STREAM = np.dtype(
    [("model", _POINTER), ("state", _POINTER), ("scratch", _POINTER), ("rows", _SIZE), ("frames", np.uint64)],
    align=True,
)
