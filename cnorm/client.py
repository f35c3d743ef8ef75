"""Clients of `cnorm serve`: sessions that survive the loss of a connection, of a worker, and of a host.

A client keeps the last checkpoint that the server sent and the frames after it. When the connection is lost it connects
again, to any worker that has the key, continues from the checkpoint and sends these frames again. Outputs that it
already has are dropped by their number, so the caller sees each output once, with the bits of an uninterrupted run.
docs/serving.md documents the protocol.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import ssl as tls
import time
from urllib.parse import urlsplit, urlunsplit

import numpy as np

from cnorm.conversation import Conversation, Lost, ServerError

__all__ = ["AsyncSession", "ServerError", "Session"]

LOG = logging.getLogger("cnorm.client")
FIRST_DELAY, LONGEST_DELAY = 0.05, 2.0  # seconds between attempts to connect; doubled each time, with jitter
UNAVAILABLE = (502, 503, 504)  # answers of a server, or of a proxy before it, that may have a worker again soon
NO_UPGRADE = (200, 400, 426, 505)  # what a server answers if a proxy before it does not pass the request to upgrade
NO_OUTPUT = "no output"
UNTRUSTED = ("CERTIFICATE_VERIFY_FAILED", "WRONG_VERSION_NUMBER")  # reasons of TLS that another attempt does not change
REFUSED = (1002, 1003, 1007, 1009)  # close codes of a message that the server's WebSocket library refuses


def address(url: str) -> str:
    """The address of the WebSocket: a server without a path gets that of `cnorm serve`."""
    parts = urlsplit(url)
    if parts.scheme not in ("ws", "wss") or not parts.netloc:
        raise ValueError(f"url must be that of a WebSocket, as in ws://127.0.0.1:8765/stream, got {url!r}")
    return urlunsplit(parts._replace(path="/stream")) if parts.path in ("", "/") else url


class _Session:
    """The options and the retry policy that `Session` and `AsyncSession` share."""

    def __init__(
        self, url: str, *, token: str = "", patience: float = 30.0, timeout: float = 10.0, ssl=None, checkpoint=""
    ) -> None:
        try:
            import websockets.exceptions
        except ImportError:
            raise ImportError(
                "cnorm.client needs websockets: the extra serve, pip install '.[serve]' in cnorm's source folder"
            ) from None
        self.url, self.patience, self.timeout = address(url), patience, timeout
        self._errors = websockets.exceptions
        self._options = {"compression": None, "max_queue": None, "close_timeout": 1.0}
        if token:
            self._options["additional_headers"] = {"Authorization": f"Bearer {token}"}
        if ssl is not None:
            self._options["ssl"] = ssl
        self._conversation = Conversation()
        self._conversation.checkpoint = checkpoint or None
        self._socket = None
        self._restart_retries()

    @property
    def checkpoint(self) -> str:
        """The last checkpoint, in Base64: `checkpoint=` of another session continues from there."""
        return self._conversation.checkpoint or ""

    @property
    def frames(self) -> int:
        """Frames since the beginning or the last reset whose outputs have arrived."""
        return self._conversation.delivered

    @property
    def input_size(self) -> int:
        return self._conversation.input_size

    @property
    def output_size(self) -> int:
        return self._conversation.output_size

    def _restart_retries(self) -> None:
        """Count attempts and measure `patience` from now on."""
        self._attempts, self._delivered, self._progress = 0, self._conversation.delivered, time.monotonic()
        self._reason = NO_OUTPUT  # why the last attempt failed

    def _wait_seconds(self) -> float:
        """How long to wait for the next message; raises if patience is at its end, whatever else the server sends."""
        if self._conversation.delivered != self._delivered:
            self._restart_retries()
        left = self.patience - (time.monotonic() - self._progress)
        if left <= 0:
            raise TimeoutError(self._reason)
        return min(self.timeout, left)

    def _delay(self, error: Exception) -> float:
        """Seconds until the next attempt after a loss; raises if there is to be none."""
        if isinstance(error, self._errors.InvalidStatus):
            self._check_status(error)
        if isinstance(error, tls.SSLError) and error.reason in UNTRUSTED:
            raise ConnectionError(f"{self.url} can't be reached by TLS: {error}") from error
        if isinstance(error, self._errors.ConnectionClosed) and error.rcvd and error.rcvd.code in REFUSED:
            raise ServerError("closed", f"{error.rcvd.code} {error.rcvd.reason}") from error
        if self._conversation.delivered != self._delivered:
            self._restart_retries()
        if not isinstance(error, TimeoutError):
            self._reason = str(error) or type(error).__name__
        left = self.patience - (time.monotonic() - self._progress)
        if left <= 0:
            tried = f"{self.patience:g} seconds and {self._attempts} attempts"
            raise ConnectionError(f"{self.url} has answered no frame for {tried}: {self._reason}") from error
        self._conversation.forget()
        self._attempts += 1
        delay = min(FIRST_DELAY * 2 ** min(self._attempts, 10), LONGEST_DELAY) * random.uniform(0.5, 1.0)
        LOG.info("%s: connection lost (%s), attempt %d in %.2f s", self.url, error, self._attempts, delay)
        return min(delay, left)

    def _check_status(self, error) -> None:
        status = error.response.status_code
        if status in (401, 403):
            raise PermissionError(f"{self.url} refused the connection with status {status}") from error
        if status in UNAVAILABLE:
            return
        text = f"{self.url} answered with status {status}"
        if status in NO_UPGRADE:
            text += ": does a reverse proxy in between pass the headers Upgrade and Connection, in HTTP/1.1?"
        elif status == 404:
            text += ": the path of cnorm serve is /stream"
        raise ServerError("http", text) from error

    def _lost(self) -> tuple[type[Exception], ...]:
        """Errors after which a new connection is made."""
        return (OSError, TimeoutError, Lost, self._errors.ConnectionClosed, self._errors.InvalidHandshake)

    def _joined(self) -> np.ndarray:
        outputs = self._conversation.outputs
        y = np.concatenate(outputs) if outputs else np.empty((0, self.output_size), np.float32)
        outputs.clear()
        return y


class Session(_Session):
    """A session of `cnorm serve`, which reconnects by itself; used by one thread at a time.

    Parameters
    ----------
    url : str
        As in ``ws://127.0.0.1:8765/stream``, or ``wss:`` for TLS.
    token : str
        The server's secret, if it was started with one.
    patience : float
        Seconds without an output while one is awaited, after which the attempts to reconnect end.
    timeout : float
        Seconds without any message of the server while one is awaited, after which the connection counts as lost.
    ssl : ssl.SSLContext, optional
    checkpoint : str
        Of an earlier session, which is continued.

    Raises
    ------
    ImportError
        If websockets is not installed.
    ConnectionError
        If the server can't be reached, or answers no frame, for `patience` seconds; at once if its certificate is not
        accepted.
    PermissionError
        If the server wants a token or does not accept the origin.
    ServerError
        If the server refuses a message, such as a checkpoint of another model.

    Examples
    --------
    >>> with Session("ws://127.0.0.1:8765/stream") as session:  # doctest: +SKIP
    ...     y = session.process(np.zeros((5, 12), np.float32))
    """

    def __enter__(self) -> Session:
        self._run(lambda: self._socket is not None)
        return self

    def __exit__(self, *error) -> None:
        self.close()

    def process(self, x: np.ndarray) -> np.ndarray:
        """Send frames and wait for their outputs.

        Parameters
        ----------
        x : ndarray, shape (steps, input_size), float32, finite

        Returns
        -------
        y : ndarray, shape (steps, output_size), float32
            With outputs before them that were not received yet.
        """
        self.send(x)
        self._run(lambda: self._conversation.delivered == self._conversation.total)
        return self._joined()

    def send(self, x: np.ndarray) -> None:
        """Send frames [steps, input_size] without waiting for outputs, but where the server's credit is used up."""
        if self._socket is None:
            self.__enter__()
        self._conversation.add(x)
        self._run(lambda: self._conversation.sent == self._conversation.total)

    def receive(self) -> np.ndarray:
        """Wait for the next outputs [steps, output_size] of frames that were sent."""
        self._conversation.check_pending()
        self._run(lambda: self._conversation.outputs)
        return self._conversation.outputs.popleft()

    def reset(self) -> None:
        """Set the initial state, as at the beginning of the session."""
        text = self._conversation.reset()
        if self._socket is not None:
            self._run(lambda: not self._conversation.resetting, text)
        self._conversation.forget()

    def close(self) -> None:
        """End the session; the server forgets it."""
        if self._socket is not None:
            with contextlib.suppress(OSError, self._errors.ConnectionClosed):
                self._socket.send('{"type": "end"}')
                self._socket.close()
            self._socket = None

    def _run(self, done, text: str = "") -> None:
        """Send the frames that the credit allows, and receive, until `done()`; reconnect after a loss."""
        conversation = self._conversation
        self._restart_retries()
        while True:
            try:
                if self._socket is None:
                    self._connect()
                elif text:
                    self._socket.send(text)
                text = ""
                while message := conversation.next_message():
                    self._socket.send(message)
                if done():
                    return
                conversation.receive(self._socket.recv(timeout=self._wait_seconds()))
            except self._lost() as error:
                self._drop()
                time.sleep(self._delay(error))

    def _connect(self) -> None:
        from websockets.sync.client import connect

        seconds = self._wait_seconds()
        self._socket = connect(self.url, open_timeout=seconds, **self._options).__enter__()  # `_drop`, `close` close it
        self._socket.send(self._conversation.hello())
        self._conversation.receive(self._socket.recv(timeout=seconds))
        self._reason = NO_OUTPUT

    def _drop(self) -> None:
        if self._socket is not None:
            self._socket.close_timeout = 0.1
            self._socket.close()
            self._socket = None


class AsyncSession(_Session):
    """`Session` for asyncio, with coroutines `process`, `send`, `receive`, `reset` and `close`.

    It is used by one task at a time. Parameters and errors are those of `Session`.

    Examples
    --------
    >>> async def main():
    ...     async with AsyncSession("ws://127.0.0.1:8765/stream") as session:
    ...         return await session.process(np.zeros((5, 12), np.float32))
    """

    async def __aenter__(self) -> AsyncSession:
        await self._run(lambda: self._socket is not None)
        return self

    async def __aexit__(self, *error) -> None:
        await self.close()

    async def process(self, x: np.ndarray) -> np.ndarray:
        """See `Session.process`."""
        await self.send(x)
        await self._run(lambda: self._conversation.delivered == self._conversation.total)
        return self._joined()

    async def send(self, x: np.ndarray) -> None:
        """See `Session.send`."""
        if self._socket is None:
            await self.__aenter__()
        self._conversation.add(x)
        await self._run(lambda: self._conversation.sent == self._conversation.total)

    async def receive(self) -> np.ndarray:
        """See `Session.receive`."""
        self._conversation.check_pending()
        await self._run(lambda: self._conversation.outputs)
        return self._conversation.outputs.popleft()

    async def reset(self) -> None:
        """See `Session.reset`."""
        text = self._conversation.reset()
        if self._socket is not None:
            await self._run(lambda: not self._conversation.resetting, text)
        self._conversation.forget()

    async def close(self) -> None:
        """See `Session.close`."""
        if self._socket is not None:
            with contextlib.suppress(OSError, self._errors.ConnectionClosed):
                await self._socket.send('{"type": "end"}')
                await self._socket.close()
            self._socket = None

    async def _run(self, done, text: str = "") -> None:
        """As `Session._run`."""
        conversation = self._conversation
        self._restart_retries()
        while True:
            try:
                if self._socket is None:
                    await self._connect()
                elif text:
                    await self._socket.send(text)
                text = ""
                while message := conversation.next_message():
                    await self._socket.send(message)
                if done():
                    return
                seconds = self._wait_seconds()  # first: if it raises, no call of recv is left behind
                conversation.receive(await asyncio.wait_for(self._socket.recv(), seconds))
            except self._lost() as error:
                await self._drop()
                await asyncio.sleep(self._delay(error))

    async def _connect(self) -> None:
        from websockets.asyncio.client import connect

        seconds = self._wait_seconds()
        self._socket = await connect(self.url, open_timeout=seconds, **self._options)
        await self._socket.send(self._conversation.hello())
        self._conversation.receive(await asyncio.wait_for(self._socket.recv(), seconds))
        self._reason = NO_OUTPUT

    async def _drop(self) -> None:
        if self._socket is not None:
            self._socket.close_timeout = 0.1
            await self._socket.close()
            self._socket = None
