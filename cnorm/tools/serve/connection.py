"""One TCP connection: an HTTP request, or a WebSocket that carries one session.

`websockets` speaks the protocol. Added here: received bytes are charged to the connection before they are parsed, so
that whatever a client sends delays its next bytes; and messages wait in `Connection` until the worker's next turn,
which processes those of all sessions together and answers them.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
import os
import signal
import socket
import time
from collections import deque

import numpy as np
from websockets.asyncio.server import ServerConnection, broadcast
from websockets.exceptions import ConnectionClosed
from websockets.frames import BINARY, CONT, TEXT, Frame

from cnorm.conversation import NUMBER, PROTOCOL
from cnorm.serving import Misplaced, SessionLimit, UnknownSession

__all__ = ["CLOSE_SECONDS", "HELLO_SECONDS", "READ_BYTES", "WRITE_LIMIT", "Connection"]

WRITE_LIMIT = 1 << 16  # bytes that wait for a slow reader before its own frames wait
UNACKNOWLEDGED_MS = 30_000  # how long TCP sends without an acknowledgement before it gives the connection up
HELLO_SECONDS, CLOSE_SECONDS = 10.0, 10.0
# at a time; less if the last frames were short: a read of 700 pongs takes 7 ms, in which nobody else is served
READ_BYTES, READ_FRAMES, LEAST_BYTES = 4096, 64, 512
HEADER_BYTES = 1 << 14  # of an HTTP request at most
FRAGMENTS = 64  # of a message at most
FLOAT32 = np.dtype("<f4")
TAKEN_FRAMES = 64  # of the messages that wait in one session, so many frames are processed together


class BadMessage(ValueError):
    """A message that the protocol does not allow."""


class Connection(ServerConnection, asyncio.BufferedProtocol):
    """A client's connection; `worker` is the `Worker` that has its session."""

    def __init__(self, *arguments, worker, **options) -> None:
        super().__init__(*arguments, **options)
        self.worker = worker
        self.session: str | None = None
        self.opened = time.monotonic()
        self.frames = 0  # the number of the session's next frame
        self.checkpoint_at = 0  # the number of frames after which the next checkpoint is sent
        # messages in order of arrival; of frames, the first one's number, the frames, the time when they were read
        self._queue: deque[dict | tuple[int, np.ndarray, float]] = deque()
        self.received = 0.0  # when the oldest frames that are being processed were read
        self.counts: list[int] = []  # frames of each message that is being processed
        self._owed = 0  # frames received and not answered
        self._waiting = False  # whether the worker has this connection in its next turn
        self.left = False  # whether the worker has forgotten the session
        self.stopped = False  # after an error or the end: what the client still sends is ignored
        self.closing: asyncio.Task | None = None
        self._fragments = 0  # after the first one of the message that is being received
        self._unblocked = 0.0  # when the write buffer was last full
        self._strange_bytes = 0  # received before the session began
        self._cost = self._frames_read = 0  # of what was read last
        self._read_bytes = READ_BYTES  # at most, the next time
        self._allowance, self._refilled = worker.burst, self.opened
        self._throttle: asyncio.TimerHandle | None = None  # set while nothing is read because the allowance is used up

    @property
    def peer(self) -> str:
        """Address and port of the client, for the log."""
        address = self.remote_address
        return f"{address[0]}:{address[1]}" if address else "a client that is gone"

    # received bytes

    def connection_made(self, transport) -> None:
        # kept, because a TLS transport forgets it when the client is gone
        sock = self.sock = transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, WRITE_LIMIT)  # else a slow reader could take megabytes
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNACKNOWLEDGED_MS)
        super().connection_made(transport)
        self.worker.connections.add(self)

    def connection_lost(self, error) -> None:
        if self._throttle is not None:
            self._throttle.cancel()
        self.worker.connections.discard(self)
        super().connection_lost(error)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self.worker.buffer[: self._read_bytes]

    def buffer_updated(self, count: int) -> None:
        self._cost, self._frames_read = count, 0
        self.data_received(bytes(self.worker.buffer[:count]))
        if self._frames_read > 1 or self._read_bytes < READ_BYTES:
            self._read_bytes = min(max(READ_FRAMES * count // max(self._frames_read, 1), LEAST_BYTES), READ_BYTES)
        if self.session is not None:
            self._charge(self._cost)
            return
        self._strange_bytes += count
        if self._strange_bytes > HEADER_BYTES + (0 if self.request is None else self.worker.max_bytes):
            self.transport.abort()

    def process_event(self, event) -> None:
        if isinstance(event, Frame):
            self._cost += self.worker.surcharge(len(event.data), event.opcode is TEXT)
            self._frames_read += 1
            if event.opcode is CONT:
                self._fragments += 1
                if self._fragments == FRAGMENTS:
                    self.stop("message", f"a message must have at most {FRAGMENTS} fragments", 1008)
            elif event.opcode is BINARY or event.opcode is TEXT:
                self._fragments = 0
        super().process_event(event)

    def _charge(self, cost: float) -> None:
        """Read no further until the token bucket, which holds `worker.burst` bytes, is not empty."""
        now, rate = time.monotonic(), self.worker.byte_rate
        self._allowance = min(self._allowance + (now - self._refilled) * rate, self.worker.burst) - cost
        self._refilled = now
        if self._allowance < 0 and self._throttle is None:
            self._throttle = self.loop.call_later(-self._allowance / rate, self._end_throttle)
            self._regulate()

    def _end_throttle(self) -> None:
        self._throttle = None
        self._charge(0)
        self._regulate()

    def _regulate(self) -> None:
        """Read only while the client may send more, and takes what is sent to it."""
        if self._throttle is not None or self.paused:
            self.transport.pause_reading()
        elif not self.transport.is_closing():
            self.transport.resume_reading()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._regulate()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._unblocked = time.monotonic()
        self._regulate()
        self._wait()

    # received messages

    async def serve(self) -> None:
        """Take the client's messages until the connection is closed."""
        try:
            async with asyncio.timeout(HELLO_SECONDS):
                hello = await self.recv()
            self._attempt(self._hello, hello)
            while True:
                self._attempt(self._message, await self.recv())
        except ConnectionClosed:
            pass
        except TimeoutError:
            self.transport.abort()
        finally:
            self.stopped = True
            self._queue.clear()
            self.worker.leave(self)

    def _attempt(self, call, message: str | bytes) -> None:
        """Handle a message, or close the connection if the protocol does not have it."""
        if self.stopped:
            return
        try:
            call(message)
        except BadMessage as error:
            self.stop("message", str(error), 1008)

    def _hello(self, message: str | bytes) -> None:
        message = parsed(message) if isinstance(message, str) else {}
        protocol = message.get("protocol")
        if message.get("type") != "hello" or type(protocol) is not int or protocol != PROTOCOL:
            raise BadMessage(f'the first message must be {{"type": "hello", "protocol": {PROTOCOL}}}')
        sealed = message.get("checkpoint")
        if not isinstance(sealed, (str, type(None))):
            raise BadMessage("checkpoint must be a string in Base64")
        try:
            sealed = None if sealed is None else base64.b64decode(sealed, validate=True)
            welcome = self.worker.begin(self, sealed)
        except SessionLimit as error:
            self.stop("limit", str(error), 1013)
        except (ValueError, binascii.Error) as error:
            hint = "; with --store a server keeps its key when it restarts" if "another key" in str(error) else ""
            self.stop("checkpoint", f"{error}{hint}", 1008)
        else:
            self.send_text(json.dumps(welcome).encode())

    def _message(self, message: str | bytes) -> None:
        self._queue.append(parsed(message) if isinstance(message, str) else self._frames(message))
        if len(self._queue) > self.worker.options.credit:
            raise BadMessage("more messages are waiting than the session has credit")
        self._wait()

    def _frames(self, data: bytes) -> tuple[int, np.ndarray, float]:
        """The number of the first frame of a message, its frames [count, input_size], and the time."""
        width, credit = self.worker.input_size, self.worker.options.credit
        count, rest = divmod(len(data) - NUMBER.size, 4 * width)
        if rest or count < 1:
            text = f"a binary message must have 8 bytes and then frames of {4 * width} bytes, got {len(data)}"
            raise BadMessage(text)
        self._owed += count
        if self._owed > credit:
            raise BadMessage(f"{self._owed} frames are without output, the session has credit for {credit}")
        # half the time of np.frombuffer and reshape
        return NUMBER.unpack_from(data)[0], np.ndarray((count, width), FLOAT32, data, NUMBER.size), time.monotonic()

    # the worker's turn

    def _wait(self) -> None:
        if self._queue and not (self._waiting or self.paused or self.stopped):
            self._waiting = True
            self.worker.ready(self)

    def take(self) -> tuple[str, int, np.ndarray] | None:
        """The next request of this session, after the control messages before it were handled.

        It has the frames of `counts` messages: those that wait are processed together.
        """
        self._waiting = False
        while self._queue and not (self.stopped or self.paused):
            message = self._queue.popleft()
            if isinstance(message, tuple):
                first, x, received = message
                self.received = max(received, self._unblocked)  # not the time that a slow reader has caused
                self.counts = [len(x)]
                return self.session, first, self._joined(first, x) if self._queue else x
            self._attempt(self._control, message)
            break  # one in a turn: a reset takes as long as the frames of some sessions
        self._wait()
        return None

    def _joined(self, first: int, x: np.ndarray) -> np.ndarray:
        """`x` with the frames of the messages that continue it; a frame that is not finite is left for its own turn."""
        parts, total = [x], len(x)
        while self._queue and total < TAKEN_FRAMES and isinstance(self._queue[0], tuple):
            number, more, _ = self._queue[0]
            if number != first + total or total + len(more) > TAKEN_FRAMES or not np.isfinite(more).all():
                break
            self._queue.popleft()
            parts.append(more)
            self.counts.append(len(more))
            total += len(more)
        return x if len(parts) == 1 else np.concatenate(parts)

    def _control(self, message: dict) -> None:
        kind = message.get("type")
        if kind == "reset":
            self.send_text(json.dumps(self.worker.reset(self)).encode())
        elif kind == "end":
            self.stop("end", "", 1000)
        elif kind == "kill" and self.worker.options.demo:
            os.kill(os.getpid(), signal.SIGKILL)
        else:
            raise BadMessage(f"no message has the type {str(kind)[:40]!r} here")

    def answer(self, first: int, y: np.ndarray, checkpoint: bytes) -> None:
        """Send outputs [count, output_size], the first with the number `first`, and a checkpoint after them."""
        self._owed -= len(y)
        self.frames = first + len(y)
        start = 0
        for count in self.counts:
            broadcast((self,), NUMBER.pack(first + start) + y[start : start + count].tobytes())
            start += count
        if checkpoint:
            self.send_text(checkpoint)
        if self._queue:
            self._wait()

    def refuse(self, error: Exception) -> None:
        """Close the connection because the session could not process a request."""
        kinds = {Misplaced: "misplaced", UnknownSession: "unknown", SessionLimit: "limit"}
        self.stop(kinds.get(type(error), "frames"), str(error), 1008)

    # sent messages

    def send_text(self, text: bytes) -> None:
        """Send at once: `pause_writing` holds back the session's next turn, so no coroutine has to wait here."""
        broadcast((self,), text, text=True)

    def stop(self, code: str, text: str, close_code: int) -> None:
        """Say why, begin the closing handshake, and ignore what the client still sends."""
        if self.stopped:
            return
        self.stopped = True
        self._queue.clear()
        if code == "end":
            self.send_text(b'{"type": "end"}')
        else:
            self.worker.metrics.refused(code)
            self.send_text(json.dumps({"type": "error", "code": code, "message": text}).encode())
        self.worker.leave(self, code, text)
        self.closing = self.loop.create_task(self._close(close_code, code))

    async def _close(self, close_code: int, code: str) -> None:
        try:
            async with asyncio.timeout(CLOSE_SECONDS):  # the library's own begins when all is written
                await self.close(close_code, code)
        except TimeoutError:
            self.transport.abort()


def parsed(text: str) -> dict:
    """A JSON object from the text of an untrusted client."""
    try:
        message = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadMessage(f"a text message must be JSON: {str(error)[:80]}") from None
    if not isinstance(message, dict):
        raise BadMessage(f"a text message must be a JSON object, got {type(message).__name__}")
    return message
