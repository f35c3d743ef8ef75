"""Many recordings through a model, on any `concurrent.futures.Executor`."""

from __future__ import annotations

import functools
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import BrokenExecutor, Executor
from dataclasses import dataclass
from typing import Any

import numpy as np

from cnorm.model import Model
from cnorm.storage.loading import load
from cnorm.text import clip, message_of

__all__ = ["Outcome", "Scored", "in_order", "score"]


@dataclass(frozen=True)
class Outcome:
    """The outcome of one call: its result, or the exception that it raised."""

    result: Any = None
    error: Exception | None = None


@dataclass(frozen=True)
class Scored:
    """The outputs of one recording.

    Attributes
    ----------
    index : int
        Of the recording, from 0.
    y : ndarray, shape (steps, output_size), float32, or None
        None if the recording could not be processed.
    error : str
        Why not; empty if it could.
    """

    index: int
    y: np.ndarray | None
    error: str = ""


def in_order(
    call: Callable[[Any], Any], items: Iterable[Any], executor: Executor | None = None, pending: int = 32
) -> Iterator[Outcome]:
    """Call a function for each item and yield the outcomes in the order of the items, as soon as they are available.

    Parameters
    ----------
    call : callable
        Of one argument. For processes it must be picklable, as must the items and the results.
    items : iterable
        Read only as far as `pending` items ahead, so that it can be a generator of any length.
    executor : concurrent.futures.Executor, optional
        The calls are made in this thread if it is not given. The caller closes it.
    pending : int
        The most items that are submitted and not yielded.

    Yields
    ------
    Outcome

    Raises
    ------
    concurrent.futures.BrokenExecutor
        If the executor has lost a worker, as a ``ProcessPoolExecutor`` does when a process is killed, and accepts no
        more work; what was yielded before stays valid, what was submitted is lost.
    Exception
        What `items` raises, after the outcomes of the items before it.
    """
    if executor is None:
        for item in items:
            yield _attempt(call, item)
        return
    futures: deque = deque()
    items, failure, ended = iter(items), None, False
    try:
        while futures or not ended:
            if not ended:
                try:
                    futures.append(executor.submit(call, next(items)))
                except StopIteration:
                    ended = True
                except BrokenExecutor:
                    raise
                except Exception as error:  # the caller gets what was submitted before
                    failure, ended = error, True
            if futures and (ended or len(futures) >= pending):
                yield _attempt(type(futures[0]).result, futures.popleft())
        if failure is not None:
            raise failure
    finally:  # also when the caller stops early, as after Ctrl-C
        for future in futures:
            future.cancel()


def score(
    model: Model | str | os.PathLike,
    recordings: Iterable[np.ndarray],
    executor: Executor | None = None,
    chunk: int = 16,
    pending: int = 32,
) -> Iterator[Scored]:
    """Run a model over many recordings and yield their outputs in order, as they are done.

    A recording that can't be processed yields a row with its error; the others are not affected. A task that fails as a
    whole, such as one whose worker is killed, is submitted once more. The caller has every row that was yielded,
    whatever ends the loop, and can wrap the iterator to show progress.

    Parameters
    ----------
    model : Model, or path of a model
        A `Model` is pickled with each chunk if the executor runs processes; a path is loaded once in each of them.
    recordings : iterable of ndarray, shape (steps, input_size), float32
        At most ``chunk * pending`` of them are in memory beside those that the caller keeps.
    executor : concurrent.futures.Executor, optional
        Such as a ``ThreadPoolExecutor`` (a run releases the GIL), a ``ProcessPoolExecutor``, or ``get_executor()`` of a
        Dask client. The caller closes it.
    chunk : int
        Recordings of one task.
    pending : int
        As for `in_order`, in tasks.

    Yields
    ------
    Scored

    Raises
    ------
    ValueError
        If `chunk` or `pending` is less than 1, or if the executor returns something else than its tasks did.
    concurrent.futures.BrokenExecutor
        As `in_order`.

    Examples
    --------
    >>> import cnorm, numpy as np
    >>> from cnorm.scoring import score
    >>> for row in score(cnorm.demo_model(), [np.zeros((5, 12), np.float32), np.zeros((5, 11), np.float32)]):
    ...     print(row.index, row.error or row.y.shape)
    0 (5, 9)
    1 ValueError: x must have shape (steps, 12), got (5, 11)
    """
    if chunk < 1 or pending < 1:
        raise ValueError(f"chunk and pending must be at least 1, got {chunk} and {pending}")
    return _rows(functools.partial(_score_chunk, model), _chunks(recordings, chunk), executor, pending)


def _rows(call, chunks, executor, pending) -> Iterator[Scored]:
    submitted: deque[list[np.ndarray]] = deque()

    def remembered():
        for some in chunks:
            submitted.append(some)
            yield some

    index = 0
    for outcome in in_order(call, remembered(), executor, pending):
        some = submitted.popleft()
        if outcome.error is not None and executor is not None:  # Dask loses results whose worker dies too early
            (outcome,) = in_order(call, [some], executor)
        rows = outcome.result if outcome.error is None else [message_of(outcome.error)] * len(some)
        if not isinstance(rows, list) or [isinstance(y, (np.ndarray, str)) for y in rows] != [True] * len(some):
            wanted = f"a list of {len(some)} arrays or texts"
            raise ValueError(f"the executor must return what its task did, {wanted}, got {clip(repr(rows), 80)}")
        for y in rows:
            yield Scored(index, None, y) if isinstance(y, str) else Scored(index, y)
            index += 1


def _chunks(recordings, chunk):
    some = []
    try:
        for x in recordings:
            some.append(x)
            if len(some) == chunk:
                yield some
                some = []
    except Exception:
        if some:
            yield some  # what came before the error is done, too
        raise
    if some:
        yield some


def _score_chunk(model, recordings) -> list[np.ndarray | str]:
    """The outputs of each recording, or why there are none; runs in the executor."""
    model = model if isinstance(model, Model) else _loaded(os.fspath(model))
    outcomes = [_attempt(model.run, x) for x in recordings]
    return [one.result if one.error is None else f"{type(one.error).__name__}: {one.error}" for one in outcomes]


@functools.lru_cache(maxsize=1)
def _loaded(path: str) -> Model:
    return load(path)


def _attempt(call, argument) -> Outcome:
    try:
        return Outcome(call(argument))
    except BrokenExecutor:
        raise
    except Exception as error:
        return Outcome(error=error)
