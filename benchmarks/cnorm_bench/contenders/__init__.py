"""The runtimes that are timed beside cnorm, one module each.

A contender is one way to compute an operation in one runtime. Every module defines these names, except for the
operations that its runtime does not have:

``LABEL``, ``PACKAGES``
    The runtime's name, and the packages that it needs.
``layer_norm(x, weight, bias)`` and the other names and arguments of `operations.OPERATIONS`
    The `Contender`\\ s for these arrays, x [rows, n], eps 1e-5.
``steps(model, onnx_model)``
    The runners, as of `cnorm_bench.runners`, for one step of a recurrent model.
``rounded_steps(model)``
    The same with int8 or float16 weights, which the runtime rounds itself.

Each module imports its runtime only when a contender is made.
"""

from importlib import import_module, util

from cnorm_bench.contenders.timing import Contender, times

__all__ = ["MODULES", "Contender", "importable", "times"]

MODULES = ("cnorm_", "memcpy_", "ncnn_", "numba_", "numpy_", "onnxruntime_", "torch_")


def importable():
    """The modules whose packages are installed, and a sentence for each of the others."""
    modules, left_out = [], []
    for name in MODULES:
        module = import_module(f"cnorm_bench.contenders.{name}")
        missing = [package for package in module.PACKAGES if util.find_spec(package) is None]
        if missing:
            left_out.append(f"{module.LABEL} is left out: {' and '.join(missing)} can't be imported")
        else:
            modules.append(module)
    return modules, left_out
