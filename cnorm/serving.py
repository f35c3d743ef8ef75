"""Sessions: the streams of many clients in one worker, which another worker can continue with the same bits.

A step gives the same bits on every machine, so a lost state can be recomputed. The sender of the frames keeps the last
`Checkpoint` and the frames after it; if a worker is lost, another one adopts the checkpoint, is sent these frames
again, and then has the same state. Nothing is written to disk, and workers do not communicate with each other.
"""

from __future__ import annotations

import hmac
import numbers
import struct
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from cnorm._core import Stream
from cnorm.model import Model

__all__ = ["Checkpoint", "Misplaced", "SessionLimit", "Sessions", "UnknownSession"]

MAGIC = b"cnorm checkpoint 1\n"
HEAD = struct.Struct("<HQI")  # bytes of the session's name, frames, bytes of the state
SEAL_BYTES = 32  # HMAC-SHA256
KEY_BYTES = 16  # at least
NAME_BYTES = 256  # at most
FLOAT32 = np.dtype(np.float32)
STEPPED_TOGETHER = 4  # from so many sessions on, `step_many` takes less time than `process` for each


class UnknownSession(LookupError):
    """This worker has no such session: it was not opened here, was evicted or exported, or the worker was restarted."""


class SessionLimit(RuntimeError):
    """This worker accepts no further session: it is at its limit, or is being drained."""


class Misplaced(ValueError):
    """The frames do not continue the session: the first one's number is not that of the next expected frame.

    Attributes
    ----------
    frames : int
        How many frames the session has processed, which is the number of the next frame that it accepts.
    """

    def __init__(self, session: str, frames: int, got: int) -> None:
        super().__init__(f"session {session!r} is at frame {frames}, got frames beginning at {got}")
        self.frames = frames


@dataclass(frozen=True)
class Checkpoint:
    """Everything that another worker needs to continue a session.

    Attributes
    ----------
    session : str
    frames : int
        Frames processed so far.
    state : bytes
        The bytes that `Stream.save` returned, which hold the model's identity and a checksum.
    """

    session: str
    frames: int
    state: bytes

    def sealed(self, key: bytes) -> bytes:
        """The checkpoint as authenticated bytes: a client may store them, and any change is detected.

        Layout, little-endian: the line ``cnorm checkpoint 1``, length of the name (uint16), frames (uint64), length of
        the state (uint32), name (UTF-8), state, HMAC-SHA256 of all that precedes it.

        Parameters
        ----------
        key : bytes
            The secret that the workers share, at least 16 bytes.

        Raises
        ------
        TypeError, ValueError
            If `key` is not bytes or too short, or the checkpoint's session, frames or state can't be sealed.
        """
        name = checked_name(self.session).encode()
        if not 0 <= self.frames < 1 << 64:
            raise ValueError(f"frames must be a number of frames below 2^64, got {self.frames}")
        body = MAGIC + HEAD.pack(len(name), self.frames, len(self.state)) + name + self.state
        return body + hmac.digest(checked_key(key), body, "sha256")

    @classmethod
    def unsealed(cls, sealed: bytes, key: bytes) -> Checkpoint:
        """The checkpoint in bytes that `sealed` returned; they may come from an untrusted sender.

        Parameters
        ----------
        sealed : bytes
        key : bytes
            The workers' secret.

        Raises
        ------
        TypeError
            If an argument is not bytes.
        ValueError
            If the bytes were truncated, altered, or sealed with another key.
        """
        checked_key(key)
        if not isinstance(sealed, (bytes, bytearray)):
            raise TypeError(f"sealed must be bytes, got {type(sealed).__name__}")
        body, seal = bytes(sealed[:-SEAL_BYTES]), bytes(sealed[-SEAL_BYTES:])
        if not body.startswith(MAGIC):
            raise ValueError("sealed must be a checkpoint of this version, as Checkpoint.sealed returns it")
        if not hmac.compare_digest(hmac.digest(key, body, "sha256"), seal):
            raise ValueError("sealed was altered, or sealed with another key")
        name_bytes, frames, state_bytes = HEAD.unpack_from(body, len(MAGIC))
        start = len(MAGIC) + HEAD.size
        if len(body) != start + name_bytes + state_bytes:
            raise ValueError("sealed must have the length that its head states")
        return cls(body[start : start + name_bytes].decode(), frames, body[start + name_bytes :])


class _Session:
    """A stream with its lock. `gone` is set when it leaves the table, for threads that were waiting for the lock."""

    __slots__ = ("gone", "lock", "name", "stream", "used")

    def __init__(self, name: str, stream: Stream, now: float) -> None:
        self.name, self.stream, self.used = name, stream, now
        self.lock = threading.Lock()
        self.gone = False


class Sessions:
    """The sessions of one worker, each a named stream of one model; safe to use from several threads.

    Parameters
    ----------
    model : Model
        Without bidirectional layers.
    limit : int
        The most sessions at a time.
    idle : float
        Seconds without a frame after which `evict` exports a session.
    clock : callable, optional
        Returns seconds; only differences are used.

    Raises
    ------
    TypeError, ValueError
        If `model` is not a Model that can be streamed, `limit` less than 1 or `idle` not positive.

    Examples
    --------
    >>> import cnorm, numpy as np
    >>> from cnorm.serving import Sessions
    >>> model, x = cnorm.demo_model(), np.ones((5, 12), np.float32)
    >>> one, other = Sessions(model), Sessions(model)  # two workers
    >>> one.open("a")
    >>> y = one.process("a", 0, x)
    >>> checkpoint = one.checkpoint("a")
    >>> other.adopt(checkpoint)  # the first worker is lost
    >>> bool((other.process("a", 5, x) == one.process("a", 5, x)).all())
    True
    """

    def __init__(
        self, model: Model, limit: int = 1024, idle: float = 300.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        if not isinstance(model, Model):
            raise TypeError(f"model must be a cnorm.Model, got {type(model).__name__}")
        if not isinstance(limit, numbers.Integral) or limit < 1:
            raise ValueError(f"limit must be an integer, at least 1 session, got {limit}")
        if not idle > 0:
            raise ValueError(f"idle must be a positive number of seconds, got {idle}")
        self._network = model.stream().network  # raises if the model is bidirectional
        self.model, self.limit, self.idle = model, limit, idle
        self._clock, self._input_size = clock, model.input_size
        self._sessions: dict[str, _Session] = {}
        self._lock = threading.Lock()  # protects the table; never acquired while a session's lock is held
        self._draining = False

    def __len__(self) -> int:
        return len(self._sessions)

    def __contains__(self, session: str) -> bool:
        return session in self._sessions

    def open(self, session: str) -> None:
        """Begin a session with a new stream.

        Parameters
        ----------
        session : str
            A name of at most 256 bytes in UTF-8.

        Raises
        ------
        SessionLimit
            If the worker has `limit` sessions, or is being drained.
        TypeError, ValueError
            If the name is not such a string, or the session is already open.
        """
        self._add(session, self.model.stream())

    def adopt(self, checkpoint: Checkpoint, replace: bool = False) -> None:
        """Continue a session of another worker, or one of this worker that was evicted or lost in a restart.

        Parameters
        ----------
        checkpoint : Checkpoint
        replace : bool
            Whether an open session of this name is replaced by the checkpoint.

        Raises
        ------
        SessionLimit
            As in `open`.
        TypeError
            If `checkpoint` is not a Checkpoint, the session's name not a str or the state not bytes.
        ValueError
            If the state is damaged, is of another model, or has another number of frames than the checkpoint, or if the
            session is open and `replace` is false.
        """
        if not isinstance(checkpoint, Checkpoint):
            raise TypeError(f"checkpoint must be a Checkpoint, got {type(checkpoint).__name__}")
        stream = self.model.restore(checkpoint.state)
        if stream.frames != checkpoint.frames:
            raise ValueError(f"checkpoint says {checkpoint.frames} frames, its state {stream.frames}")
        self._add(checkpoint.session, stream, replace)

    def process(self, session: str, frames: int, x: np.ndarray) -> np.ndarray:
        """Process frames and return their outputs; on any error the session is unchanged.

        Parameters
        ----------
        session : str
        frames : int
            Number of the first frame, counted from 0; it must be the number of frames processed so far.
        x : ndarray, shape (steps, input_size), float32, finite

        Returns
        -------
        y : ndarray, shape (steps, output_size), float32

        Raises
        ------
        UnknownSession
            If this worker does not have it.
        Misplaced
            If the session has processed another number of frames.
        TypeError, ValueError
            For another dtype or shape, or a frame that is not finite or has a number that is no token id.
        """
        x = self._checked(x)
        self._network.check_frames(x, finite=True)
        one = self._find(session)
        with one.lock:
            self._check_position(one, frames)
            return one.stream.process(x)

    def process_many(self, requests: Sequence[tuple[str, int, np.ndarray]]) -> list[np.ndarray | Exception]:
        """`process` for several sessions: for each request the bits that `process` gives, or the exception it raises.

        Requests with the same number of frames are stepped together, so that the weights are read once for all.

        Parameters
        ----------
        requests : sequence of (session, frames, x)
            As for `process`.

        Returns
        -------
        list of ndarray or Exception
            In the order of the requests.
        """
        results: list[np.ndarray | Exception | None] = [None] * len(requests)
        first: dict[str, int] = {}  # index of each session's first request
        for i, (session, _, _) in enumerate(requests):
            if isinstance(session, str):
                first.setdefault(session, i)
            else:
                results[i] = TypeError(f"session must be a str, got {type(session).__name__}")
        together: dict[int, list[tuple[int, _Session, int, np.ndarray]]] = {}
        locked: list[_Session] = []
        try:
            for session in sorted(first):  # a fixed order of locking prevents deadlock
                i = first[session]
                try:
                    x = self._checked(requests[i][2])
                    one = self._find(session)
                except (LookupError, TypeError, ValueError) as error:
                    results[i] = error
                    continue
                one.lock.acquire()
                locked.append(one)
                together.setdefault(len(x), []).append((i, one, requests[i][1], x))
            for group in together.values():
                self._process_group(group, results)
        finally:
            for one in locked:
                one.lock.release()
        for i, (session, frames, x) in enumerate(requests):
            if results[i] is None:  # a session's second request
                try:
                    results[i] = self.process(session, frames, x)
                except (LookupError, TypeError, ValueError) as error:
                    results[i] = error
        return results

    def checkpoint(self, session: str) -> Checkpoint:
        """The session's `Checkpoint`, from which another worker can continue.

        Raises
        ------
        UnknownSession
            If this worker does not have the session.
        """
        one = self._find(session)
        with one.lock:
            return self._checkpoint(one)

    def export(self, session: str) -> Checkpoint:
        """Close the session here and return its checkpoint.

        Raises
        ------
        UnknownSession
            If this worker does not have the session.
        """
        exported = self._export([self._find(session)])
        if not exported:  # another thread has exported it in the meantime
            raise UnknownSession(f"this worker has no session {session!r}")
        return exported[0]

    def evict(self) -> list[Checkpoint]:
        """Export the sessions that have been idle for longer than `idle` seconds."""
        now = self._clock()
        return self._export([one for one in list(self._sessions.values()) if now - one.used > self.idle])

    def drain(self) -> list[Checkpoint]:
        """Export all sessions and refuse new ones, before the worker is stopped."""
        with self._lock:
            self._draining = True
            everything = list(self._sessions.values())
        return self._export(everything)

    def _add(self, session: str, stream: Stream, replace: bool = False) -> None:
        checked_name(session)
        with self._lock:
            before = self._sessions.get(session)
            if before is not None and not replace:
                raise ValueError(f"session {session!r} is open")
            if self._draining:
                raise SessionLimit("this worker is being drained")
            if before is None and len(self._sessions) >= self.limit:
                raise SessionLimit(f"this worker has {self.limit} sessions, as many as it may have")
            self._sessions[session] = _Session(session, stream, self._clock())
        if before is not None:
            with before.lock:
                before.gone = True

    def _find(self, session: str) -> _Session:
        try:
            return self._sessions[session]
        except KeyError:
            raise UnknownSession(f"this worker has no session {session!r}") from None

    def _checked(self, x: np.ndarray) -> np.ndarray:
        x = np.asarray(x)
        if x.dtype is not FLOAT32 and x.dtype != FLOAT32:
            raise TypeError(f"x must have dtype float32, got {x.dtype}")
        if x.ndim != 2 or x.shape[1] != self._input_size:
            raise ValueError(f"x must have shape (steps, {self.model.input_size}), got {x.shape}")
        return x

    def _check_position(self, one: _Session, frames: int) -> None:
        """Check, with the session's lock held, that it is in the table and at this frame; record the time."""
        if one.gone:
            raise UnknownSession(f"this worker has no session {one.name!r}")
        if one.stream.frames != frames:
            raise Misplaced(one.name, one.stream.frames, frames)
        one.used = self._clock()

    def _process_group(self, group: Iterable[tuple[int, _Session, int, np.ndarray]], results: list) -> None:
        """Process requests of equal length, whose locks are held, by one `step_many`."""
        ready = []
        for i, one, frames, x in group:
            try:
                self._check_position(one, frames)
                self._network.check_frames(x, finite=True)  # here, so that it is an error of this session only
                ready.append((i, one.stream, x))
            except (LookupError, ValueError) as error:
                results[i] = error
        if len(ready) < STEPPED_TOGETHER:
            for i, stream, x in ready:
                results[i] = stream.process(x)
            return
        x = np.concatenate([x for _, _, x in ready]).reshape(len(ready), -1, self._input_size)
        y = self.model.step_many([stream for _, stream, _ in ready], x)  # [sessions, steps, output_size]
        for (i, _, _), outputs in zip(ready, y, strict=True):
            results[i] = outputs

    def _checkpoint(self, one: _Session) -> Checkpoint:
        if one.gone:
            raise UnknownSession(f"this worker has no session {one.name!r}")
        return Checkpoint(one.name, one.stream.frames, one.stream.save())

    def _export(self, those: Iterable[_Session]) -> list[Checkpoint]:
        checkpoints = []
        for one in those:
            with one.lock:
                if one.gone:
                    continue
                checkpoints.append(self._checkpoint(one))
                one.gone = True
            with self._lock:
                if self._sessions.get(one.name) is one:
                    del self._sessions[one.name]
        return checkpoints


def checked_key(key: bytes) -> bytes:
    if not isinstance(key, (bytes, bytearray)):
        raise TypeError(f"key must be bytes, got {type(key).__name__}")
    if len(key) < KEY_BYTES:
        raise ValueError(f"key must have at least {KEY_BYTES} bytes, got {len(key)}")
    return bytes(key)


def checked_name(session: str) -> str:
    if not isinstance(session, str):
        raise TypeError(f"session must be a str, got {type(session).__name__}")
    if not 0 < len(session.encode()) <= NAME_BYTES:
        raise ValueError(f"session must be a name of 1 to {NAME_BYTES} bytes, got {len(session.encode())}")
    return session
