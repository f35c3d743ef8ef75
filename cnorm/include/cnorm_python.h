/* cnorm for extension modules in C, C++ or Cython: the functions of the loaded package cnorm. Nothing is linked.
 *
 *     #include "cnorm_python.h"     in the folder cnorm.get_include(), with the headers that are the manual
 *     if (cnorm_import() < 0) return NULL;      in the module's initialisation, once for each source file
 *
 * Each function is a pointer that cnorm_import reads from a capsule in `__pyx_capi__` of cnorm.capi. A package with
 * another CNORM_ABI_VERSION, or without one of the functions, is an ImportError.
 */
#ifndef CNORM_PYTHON_H
#define CNORM_PYTHON_H

#include <Python.h>

#include "cnorm.h"
#include "cnorm_model.h"
#include "cnorm_norms.h"
#include "cnorm_rnn.h"
#include "cnorm_train.h"

#define CNORM_CAPSULE "cnorm"

#ifndef CNORM_CORE /* cnorm._core itself, which contains the functions */

static struct {
#ifdef __cplusplus
#define ENTRY(name) decltype(&::name) name;
#else
#define ENTRY(name) __typeof__(&name) name;
#endif
#include "cnorm_functions.inc"
} cnorm_loaded;

/* 0, or -1 with an ImportError */
static int cnorm_import(void)
{
    static const char *const names[] = {
#define ENTRY(name) #name,
#include "cnorm_functions.inc"
    };
    PyObject *package = PyImport_ImportModule("cnorm.capi");
    PyObject *capsules = package ? PyObject_GetAttrString(package, "__pyx_capi__") : NULL;
    int status = capsules ? 0 : -1;
    for (size_t i = 0; status == 0 && i < sizeof names / sizeof *names; ++i) {
        PyObject *capsule = PyMapping_GetItemString(capsules, names[i]);
        void *function = capsule ? PyCapsule_GetPointer(capsule, CNORM_CAPSULE) : NULL;
        Py_XDECREF(capsule); /* the dictionary keeps it */
        memcpy((char *)&cnorm_loaded + i * sizeof function, &function, sizeof function);
        if (function) continue;
        PyErr_Format(PyExc_ImportError, "the loaded package cnorm has no function %s: it is older than the headers",
                     names[i]);
        status = -1;
    }
    Py_XDECREF(capsules);
    Py_XDECREF(package);
    if (status == 0 && cnorm_loaded.cnorm_abi_version() != CNORM_ABI_VERSION) {
        PyErr_Format(PyExc_ImportError, "the loaded package cnorm has ABI version %d, the headers %d: compile again",
                     cnorm_loaded.cnorm_abi_version(), CNORM_ABI_VERSION);
        status = -1;
    }
    return status;
}

#include "cnorm_names.h" /* `#define NAME (*cnorm_loaded.NAME)` for each entry */

#endif
#endif
