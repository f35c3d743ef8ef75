"""The C library for extension modules, Numba and ctypes: capsules of its functions and the layout of its structs.

C and C++ include ``cnorm_python.h`` from the folder `cnorm.get_include`, Cython says ``from cnorm.capi cimport *``, and
Numba takes ``numba.extending.get_cython_function_address("cnorm.capi", name)``. All of them call the functions that are
loaded with this package, so that there is one active instruction set. docs/embedding.md has examples.

Attributes
----------
__pyx_capi__ : dict of str to PyCapsule
    The address of each function of the headers, by its name.
NORM, NORM_BACKWARD, VOLUME_NORM, VOLUME_NORM_BACKWARD, WEIGHT, DIVISIVE, FRAMES, MODEL, STREAM : dtype
    The structs ``cnorm_norm``, ..., ``cnorm_stream``, for memory that NumPy allocates: ``np.zeros((), capi.NORM)``.
"""

import numpy as np

from cnorm._core import capsules as __pyx_capi__

__all__ = [
    "DIVISIVE",
    "FRAMES",
    "MODEL",
    "NORM",
    "NORM_BACKWARD",
    "STREAM",
    "VOLUME_NORM",
    "VOLUME_NORM_BACKWARD",
    "WEIGHT",
    "__pyx_capi__",
]

_POINTER, _SIZE = np.uintp, np.intp


def _struct(*members):
    """The dtype of a struct: types, each with the names of the members that follow one another."""
    return np.dtype([(name, kind) for kind, names in members for name in names.split()], align=True)


NORM = _struct(
    (_SIZE, "rows n"),
    (_POINTER, "x residual"),
    (_SIZE, "x_stride residual_stride"),
    (_POINTER, "gain bias"),
    (np.float64, "eps"),
    (_POINTER, "y sum"),
    (_SIZE, "y_stride sum_stride"),
    (_POINTER, "stats"),
    (np.intc, "hints"),
)
NORM_BACKWARD = _struct(
    (_SIZE, "rows n"),
    (_POINTER, "dy x"),
    (_SIZE, "dy_stride x_stride"),
    (_POINTER, "gain stats dx"),
    (_SIZE, "dx_stride"),
    (_POINTER, "dgain dbias partials"),
    (np.intc, "hints"),
)
VOLUME_NORM = _struct(
    (_SIZE, "samples channels space groups"),
    (_POINTER, "x"),
    (_SIZE, "x_stride"),
    (_POINTER, "gain bias mean var"),
    (np.float64, "eps"),
    (_POINTER, "y"),
    (_SIZE, "y_stride"),
    (_POINTER, "stats moments scratch"),
    (np.intc, "hints"),
)
VOLUME_NORM_BACKWARD = _struct(
    (_SIZE, "samples channels space groups"),
    (_POINTER, "dy x"),
    (_SIZE, "dy_stride x_stride"),
    (_POINTER, "gain stats mean var"),
    (np.float64, "eps"),
    (_POINTER, "dx"),
    (_SIZE, "dx_stride"),
    (_POINTER, "dgain dbias scratch"),
    (np.intc, "hints"),
)
WEIGHT = _struct(
    (_SIZE, "rows n"),
    (_POINTER, "dv w"),
    (_SIZE, "dv_stride w_stride"),
    (_POINTER, "gain out"),
    (_SIZE, "out_stride"),
    (_POINTER, "dgain"),
)
DIVISIVE = _struct(
    (_SIZE, "rows n mean_radius radius"),
    (_POINTER, "dy x"),
    (_SIZE, "dy_stride x_stride"),
    (_POINTER, "gain bias"),
    (np.float64, "sigma"),
    (_POINTER, "out"),
    (_SIZE, "out_stride"),
    (_POINTER, "dgain dbias dsigma scratch"),
)
FRAMES = _struct(
    (_POINTER, "layers"),
    (np.intc, "count"),
    (_SIZE, "frames"),
    (_POINTER, "x"),
    (_SIZE, "x_stride"),
    (_POINTER, "state states scratch"),
    (_SIZE, "rows"),
    (_POINTER, "y"),
    (_SIZE, "y_stride"),
    (np.intc, "checked"),
)
MODEL = _struct(
    (_POINTER, "networks"),
    (np.intc, "count"),
    (_SIZE, "inputs outputs"),
    (_POINTER, "identity configuration"),
    (_SIZE, "configuration_bytes"),
    (_POINTER, "file"),
    (_SIZE, "file_bytes"),
)
STREAM = _struct((_POINTER, "model state scratch"), (_SIZE, "rows"), (np.uint64, "frames"))
