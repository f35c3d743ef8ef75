"""The C library's functions for other extension modules, see include/cnorm_python.h."""
from cpython.pycapsule cimport PyCapsule_New

cdef extern from *:
    """
    static const struct { const char *name; void *address; } cnorm_exports[] = {
    #define ENTRY(name) {#name, (void *)name},
    #include "cnorm_functions.inc"
    };
    static const size_t cnorm_export_count = sizeof cnorm_exports / sizeof *cnorm_exports;
    """
    cdef struct cnorm_export:
        const char *name
        void *address
    const cnorm_export cnorm_exports[]
    const size_t cnorm_export_count
    const char *CNORM_CAPSULE


cdef dict capsules_by_name():
    cdef size_t i
    return {cnorm_exports[i].name.decode(): PyCapsule_New(cnorm_exports[i].address, CNORM_CAPSULE, NULL)
            for i in range(cnorm_export_count)}


capsules = capsules_by_name()
