"""The packaged recordings: the test split of Japanese Vowels (cnorm/data/README.md)."""

from importlib import resources

import numpy as np

__all__ = ["recordings"]


def recordings():
    """The utterances of the packaged test split and their speakers.

    Returns
    -------
    utterances : list of ndarray, shape (T, 12), float32
    speakers : ndarray, shape (370,), int32
    """
    with (
        (resources.files("cnorm") / "data" / "japanese_vowels_test.npz").open("rb") as file,
        np.load(file) as data,
    ):
        millionths = np.ascontiguousarray(np.moveaxis(data["millionths"], 0, -1)).view("<i4")[..., 0]
        frames = np.ascontiguousarray(millionths.T / 1e6, np.float32)
        return np.split(frames, np.cumsum(data["lengths"])[:-1]), data["labels"]
