"""Inputs shared by several test files."""

import numpy as np

# Every remainder of every vector width, powers of two and their neighbours, and the folds at 8192 elements.
LENGTHS = [*range(1, 71), 95, 96, 97, 127, 128, 129, 255, 256, 257, 511, 512, 513, 1000, 1023, 1024, 1025]
LENGTHS += [4095, 4096, 4097, 8191, 8192, 8193, 16383, 16384, 16385]


def random_affine(rng, n, dtype):
    """Gain and bias [n] as training leaves them."""
    return (1 + 0.3 * rng.standard_normal(n)).astype(dtype), (0.5 * rng.standard_normal(n)).astype(dtype)


def difficult_rows(rng, n, dtype):
    """Finite rows [24, n] that together take every path: shifted, huge, tiny, constant, skewed."""
    info = np.finfo(dtype)
    z = rng.standard_normal((24, n))
    ramp = np.arange(1, n + 1) / n
    outlier_first, outlier_last = z[9].copy(), z[10].copy()
    outlier_first[0], outlier_last[-1] = 1e3, -1e5
    huge, tiny = (1e20, 1e-30) if dtype == np.float32 else (1e200, 1e-250)
    rows = [
        z[0],
        z[1] + 0.9,
        z[2] + 1.1,
        z[3] + 3.9,
        z[4] - 4.1,
        z[5] + 1e2,
        z[6] - 1e4,
        z[7] + 1e6,
        1e-3 * z[8],
        outlier_first,
        outlier_last,
        huge * ramp,
        huge * z[11],
        tiny * ramp,
        np.round(z[12] * 1e3) * float(info.smallest_subnormal),
        np.where(z[13] < 0, -1, 1) * (0.9 * float(info.max)),
        np.full(n, 3.3),
        np.full(n, -float(info.max)),
        np.full(n, float(info.smallest_subnormal)),
        np.zeros(n),
        np.sort(z[14]),
        np.where(np.arange(n) < n / 2, 1e3, 0) + z[15],
        np.exp(3 * z[16]),
        1e4 + 1e-2 * z[17],
    ]
    return np.stack(rows).astype(dtype)


def canonical_bytes(array):
    """The bytes of an array with every NaN canonicalised: payload and sign of NaN are not promised."""
    array = np.array(array)
    array[np.isnan(array)] = np.nan
    return array.tobytes()


def at_byte_offset(array, offset):
    """A C-contiguous copy that starts `offset` bytes after a 64-byte boundary, so it may be misaligned for its type."""
    room = np.empty(array.nbytes + 128, np.uint8)
    start = -room.ctypes.data % 64 + offset
    copy = np.ndarray(array.shape, array.dtype, buffer=room, offset=start)
    copy[...] = array
    return copy
