"""Stream frames, float32 numbers on standard input, through a packed model; print its scores and their hash.

python scores_numba.py demo.cnorm < frames.f32
"""

import sys
from ctypes import CFUNCTYPE, c_char_p, c_int, c_ssize_t, c_void_p

import numba
import numpy as np
from numba.extending import get_cython_function_address

from cnorm import capi


def function(name, result, *arguments):
    return CFUNCTYPE(result, *arguments)(get_cython_function_address("cnorm.capi", name))


strerror = function("cnorm_strerror", c_char_p, c_int)
model_memory = function("cnorm_model_memory", c_ssize_t, c_void_p, c_ssize_t)
model_open = function("cnorm_model_open", c_int, c_void_p, c_ssize_t, c_void_p, c_ssize_t, c_void_p, c_void_p)
stream_floats = function("cnorm_stream_floats", c_ssize_t, c_void_p, c_ssize_t)
stream_start = function("cnorm_stream_start", c_int, c_void_p, c_void_p, c_void_p, c_ssize_t)
stream_run = function("cnorm_stream_run", c_int, c_void_p, c_ssize_t, c_void_p, c_void_p)


def check(status):
    if status != 0:
        raise ValueError(strerror(status).decode())


def aligned_zeros(size):
    """Bytes, aligned to CNORM_ALIGN."""
    memory = np.zeros(size + 64, np.uint8)
    return memory[-memory.ctypes.data % 64 :][:size]


@numba.njit
def process(stream, frames, scores):
    """Step the stream once for each frame; the hash of the bits of the scores (FNV-1a)."""
    digest = np.uint64(0xCBF29CE484222325)
    for t in range(len(frames)):
        if stream_run(stream.ctypes, 1, frames[t].ctypes, scores[t].ctypes) != 0:
            raise ValueError("a step failed")
        for byte in scores[t].view(np.uint8):  # of a little-endian machine
            digest = (digest ^ np.uint64(byte)) * np.uint64(0x100000001B3)
    return digest


file = np.memmap(sys.argv[1], np.uint8, "r")
model = np.zeros(1, capi.MODEL)
memory = aligned_zeros(model_memory(file.ctypes.data, file.size))
check(model_open(file.ctypes.data, file.size, memory.ctypes.data, memory.size, model.ctypes.data, None))
stream = np.zeros(1, capi.STREAM)
floats = aligned_zeros(4 * stream_floats(model.ctypes.data, 1))
check(stream_start(stream.ctypes.data, model.ctypes.data, floats.ctypes.data, 1))
inputs, outputs = int(model["inputs"][0]), int(model["outputs"][0])

frames = np.frombuffer(sys.stdin.buffer.read(), "<f4").reshape(-1, inputs)
scores = np.empty((len(frames), outputs), np.float32)
digest = process(stream.view(np.uint8), frames, scores)
for row in scores:
    print(" ".join(f"{value:.4f}" for value in row))
print(f"hash {digest:016x}")
