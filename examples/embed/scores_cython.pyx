# cython: language_level=3
"""Stream frames, float32 numbers on standard input, through a packed model; print its scores and their hash.

    CFLAGS="-I$(python -c 'import cnorm; print(cnorm.get_include())')" cythonize -i scores_cython.pyx
    python -c 'import scores_cython' demo.cnorm < frames.f32
"""
from cnorm.capi cimport *
from libc.stdint cimport uint8_t, uint64_t
from libc.stdio cimport fread, fflush, printf, stdin, stdout
from libc.stdlib cimport calloc

import mmap
import sys

cnorm_import()


cdef int check(cnorm_status status) except -1:
    if status != CNORM_OK:
        raise ValueError(cnorm_strerror(status).decode())
    return 0


cdef float *allocate(ptrdiff_t floats) except NULL:
    """Zeros, aligned to CNORM_ALIGN; they are kept until the process ends."""
    cdef char *memory = <char *>calloc(1, floats * sizeof(float) + CNORM_ALIGN)
    if memory == NULL:
        raise MemoryError()
    return <float *>(memory + (-<uint64_t>memory) % CNORM_ALIGN)


cdef int scores(const uint8_t[::1] file) except -1:
    cdef ptrdiff_t needed = cnorm_model_memory(&file[0], file.size)
    cdef void *memory = allocate(needed // sizeof(float) + 1)
    cdef cnorm_model model
    check(cnorm_model_open(&file[0], file.size, memory, needed, &model, NULL))
    cdef cnorm_stream stream
    check(cnorm_stream_start(&stream, &model, allocate(cnorm_stream_floats(&model, 1)), 1))
    cdef float *x = allocate(model.inputs)
    cdef float *y = allocate(model.outputs)
    cdef const uint8_t *bits = <const uint8_t *>y
    cdef uint64_t digest = 0xcbf29ce484222325ULL  # FNV-1a
    cdef ptrdiff_t i
    while fread(x, sizeof(float), model.inputs, stdin) == <size_t>model.inputs:
        check(cnorm_stream_run(&stream, 1, x, y))
        for i in range(4 * model.outputs):  # of a little-endian machine
            digest = (digest ^ bits[i]) * 0x100000001b3ULL
        for i in range(model.outputs):
            printf(b"%.4f%c", <double>y[i], c"\n" if i + 1 == model.outputs else c" ")
    printf(b"hash %016llx\n", <unsigned long long>digest)
    fflush(stdout)
    return 0


with open(sys.argv[1], "rb") as packed:
    scores(mmap.mmap(packed.fileno(), 0, access=mmap.ACCESS_READ))
