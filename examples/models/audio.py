"""WAV files of 16 bits, and speech to try a model with: used by the other scripts of this folder."""

import shutil
import subprocess
import tempfile
import wave
from pathlib import Path

import numpy as np


def read_wav(path, rate):
    """The first channel of a WAV file of 16 bits as float32 in -1 to 1.

    Raises
    ------
    ValueError
        If it has another sampling rate or sample size.
    """
    with wave.open(str(path)) as file:
        if file.getframerate() != rate or file.getsampwidth() != 2:
            raise ValueError(f"{path}: {rate} Hz and 16 bits are wanted, it has {file.getframerate()} Hz, "
                             f"{8 * file.getsampwidth()} bits")  # fmt: skip
        samples = np.frombuffer(file.readframes(file.getnframes()), "<i2").reshape(-1, file.getnchannels())
    return samples[:, 0].astype(np.float32) / 32768


def write_wav(path, samples, rate):
    """Write float samples in -1 to 1 as a WAV file of 16 bits and one channel."""
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes((np.clip(samples, -1, 1) * 32767).astype("<i2").tobytes())


def spoken(text, rate=16000):
    """Speech synthesised by the program espeak-ng, resampled linearly, with a second of silence around it.

    Raises
    ------
    RuntimeError
        If espeak-ng is not installed.
    """
    if shutil.which("espeak-ng") is None:
        raise RuntimeError("give a WAV file, or install espeak-ng, which would speak one")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "speech.wav")
        subprocess.run(["espeak-ng", "-w", path, text], check=True)
        with wave.open(str(path)) as file:
            given = file.getframerate()
            samples = np.frombuffer(file.readframes(file.getnframes()), "<i2").astype(np.float32) / 32768
    at = np.arange(int(len(samples) * rate / given)) * given / rate
    silence = np.zeros(rate // 2, np.float32)
    return np.concatenate([silence, np.interp(at, np.arange(len(samples)), samples).astype(np.float32), silence])
