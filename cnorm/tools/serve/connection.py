"""One TCP connection: an HTTP request, or a WebSocket that carries one session.

The WebSocket protocol is implemented by `websockets.server.ServerProtocol`, which does no input or output. Its bytes
are received and sent here by an asyncio protocol, not by coroutines: 25,000 messages a second leave 40 us for each.
Once a session is open without TLS, the worker reads its socket itself (`Worker.watch`), and calls `read`.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import functools
import json
import logging
import os
import signal
import socket
import time
from collections import deque

import numpy as np
from websockets.frames import Frame, Opcode, apply_mask
from websockets.http11 import Request
from websockets.protocol import SEND_EOF, State
from websockets.server import ServerProtocol

from cnorm.client import NUMBER, PROTOCOL
from cnorm.serving import Misplaced, SessionLimit, UnknownSession
from cnorm.tools.serve import pages

__all__ = ["Connection"]

LOG = logging.getLogger("cnorm.serve.websockets")
LOG.setLevel(logging.ERROR)
WRITE_LIMIT = 1 << 16  # bytes that wait for a slow reader before its own frames wait
UNACKNOWLEDGED_MS = 30_000  # how long TCP sends without an acknowledgement before it gives the connection up
HELLO_SECONDS, CLOSE_SECONDS = 10.0, 10.0
BINARY, TEXT = 0x82, 0x81  # first byte of an unfragmented WebSocket frame
FLOAT32 = np.dtype("<f4")
MASKED = 0x80  # in the second byte of a client's frame, beside the size
TAKEN_FRAMES = 64  # of the messages that wait in one session, so many frames are processed together


class BadMessage(ValueError):
    """A message that the protocol does not allow."""


class Connection(asyncio.BufferedProtocol):
    """A client's connection; `worker` is the `Worker` that has its session."""

    __slots__ = (
        "_allowance", "_blocked", "_ended", "_general", "_owed", "_parts", "_queue", "_refilled", "_stopped", "_text",
        "_throttled", "_through_transport", "_unblocked", "_waiting", "checkpoint_at", "counts", "deadline",
        "descriptor", "received", "session", "transport", "websocket", "worker",
    )  # fmt: skip

    def __init__(self, worker) -> None:
        self.worker = worker
        self.session: str | None = None
        self.checkpoint_at = 0  # the number of frames after which the next checkpoint is sent
        self.deadline: float | None = time.monotonic() + HELLO_SECONDS
        self.websocket = ServerProtocol(origins=worker.origins, max_size=worker.max_bytes, logger=LOG)
        self._parts: list[bytes] = []  # of a fragmented message
        self._text = False
        # messages in order of arrival; of frames, the first one's number, the frames, the time when they were read
        self._queue: deque[dict | tuple[int, np.ndarray, float]] = deque()
        self.received = 0.0  # when the oldest frames that are being processed were read
        self._unblocked = 0.0  # when the write buffer was last full
        self.counts: list[int] = []  # frames of each message that is being processed
        self._owed = 0  # frames received and not answered
        self._waiting = False  # whether the worker has this connection in its next turn
        self._blocked = False  # whether the write buffer is full
        self.descriptor: int | None = None  # of the socket, if the worker reads it, not the transport
        self._stopped = False  # after an error or the end: what the client still sends is ignored
        self._ended = False  # whether the end of the output was written
        self._general = True  # whether the next bytes are parsed by `websocket`
        self._through_transport = True  # whether the next bytes are written by the transport
        self._allowance, self._refilled = float(worker.options.credit), time.monotonic()
        self._throttled = False  # whether nothing is read because the session is ahead of its rate: one timer ends it

    # asyncio's callbacks

    def connection_made(self, transport) -> None:
        self.transport = transport
        transport.set_write_buffer_limits(high=WRITE_LIMIT)
        sock = transport.get_extra_info("socket")
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, WRITE_LIMIT)  # else a slow reader could take megabytes
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNACKNOWLEDGED_MS)
        self.worker.connections.add(self)
        if self.worker.crowded():
            transport.abort()

    def connection_lost(self, error) -> None:
        self._stopped = True
        self._queue.clear()
        if self.descriptor is not None:
            self.worker.unwatch(self)
            self.descriptor, self._through_transport = None, True
        self.worker.connections.discard(self)
        self.worker.leave(self)

    def pause_writing(self) -> None:
        self._blocked = True
        self._pause_reading()

    def resume_writing(self) -> None:
        self._blocked, self._unblocked = False, time.monotonic()
        self._resume_reading()
        self._wait()

    def get_buffer(self, sizehint: int) -> bytearray:
        return self.worker.buffer

    def buffer_updated(self, count: int) -> None:
        at = 0 if self._general else self._whole_frames(count)
        if at == count or self.websocket.reader.eof:
            return
        self.websocket.receive_data(memoryview(self.worker.buffer)[at:count])
        for event in self.websocket.events_received():
            if isinstance(event, Request):
                self._request(event)
            else:
                self._frame(event)
        if self.websocket.state is not State.OPEN and self.session is not None:
            self._stopped = True  # the client has closed, or sent something that is not WebSocket
        parsing = self.websocket.reader.buffer or self.websocket.current_size is not None  # a part of a message
        self._general = bool(parsing or self.session is None or self._stopped)
        self._flush()

    def read(self) -> None:
        """Receive from the socket, without the transport's callbacks for each read."""
        try:
            count = os.readv(self.descriptor, [self.worker.buffer])
        except BlockingIOError:
            return
        except OSError:
            self.worker.unwatch(self)
            self.transport.abort()
            return
        if count:
            self.buffer_updated(count)
        else:
            self.worker.unwatch(self)
            self.eof_received()
            self.transport.close()

    def eof_received(self) -> bool:
        self._stopped = True  # frames that still wait must not be answered: the flush ends the output
        self.websocket.receive_eof()
        self._flush()
        return False  # asyncio closes the transport

    def _whole_frames(self, count: int) -> int:
        """Handle binary frames as long as they are whole; return where in the buffer `websocket` has to go on.

        The general parser took a quarter of the server's CPU time (websockets 17.4, Zen 4, 2026-11-23).
        """
        buffer, limit, at = self.worker.buffer, self.worker.max_bytes, 0
        while at + 1 < count and buffer[at] == BINARY and not self._stopped:
            size, start = buffer[at + 1] - MASKED, at + 6
            if size == 126:
                size, start = int.from_bytes(buffer[at + 2 : at + 4], "big"), at + 8
            elif not 0 <= size < 126:
                break
            end = start + size
            if end > count or size > limit:
                break
            try:
                self._queue.append(self._frames(apply_mask(buffer[start:end], buffer[start - 4 : start])))
            except BadMessage as error:
                self.stop("message", str(error), 1008)
            at = end
        if self._queue and not self._waiting:
            self._wait()
        return at

    # received messages

    def _request(self, request: Request) -> None:
        if self.websocket.eof_sent:  # the bytes after the request were no WebSocket frame
            return
        if request.path.partition("?")[0] != pages.STREAM:
            self.websocket.send_response(pages.answer(self.worker, request))
        elif refused := pages.refusal(self.worker, request):
            self.websocket.send_response(refused)
        else:
            self.websocket.send_response(self.websocket.accept(request))
        if self.websocket.state is not State.OPEN:
            self._stopped = True

    def _frame(self, frame: Frame) -> None:
        """Handle a WebSocket frame; fragments of a message are put together, control frames have been answered."""
        if self._stopped or frame.opcode in (Opcode.PING, Opcode.PONG):
            return
        if frame.opcode is Opcode.CLOSE:
            self._stopped = True
            return
        if frame.opcode is not Opcode.CONT:
            self._text = frame.opcode is Opcode.TEXT
        data = frame.data
        if self._parts or not frame.fin:
            self._parts.append(data)
            if not frame.fin:
                if len(self._parts) > 64:
                    self.stop("message", "a message must have at most 64 fragments", 1008)
                return
            data, self._parts = b"".join(self._parts), []
        self._message(data)

    def _message(self, data: bytes) -> None:
        """Put a message into the queue, or close the connection if the protocol does not have it."""
        try:
            if self.session is None:
                self._hello(parsed(data) if self._text else {})
                return
            self._queue.append(parsed(data) if self._text else self._frames(data))
            if len(self._queue) > self.worker.options.credit:
                raise BadMessage("more messages are waiting than the session has credit")
        except BadMessage as error:
            self.stop("message", str(error), 1008)
        else:
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
        now = time.monotonic()
        self._limit_rate(count, now)
        # half the time of np.frombuffer and reshape
        return NUMBER.unpack_from(data)[0], np.ndarray((count, width), FLOAT32, data, NUMBER.size), now

    def _limit_rate(self, count: int, now: float) -> None:
        """Stop reading for as long as the session is ahead of its rate (token bucket of `credit` frames)."""
        rate = self.worker.options.rate
        self._allowance = min(self._allowance + (now - self._refilled) * rate, self.worker.options.credit) - count
        self._refilled = now
        if self._allowance < 0 and not self._throttled:
            self._throttled = True
            self._pause_reading()
            asyncio.get_running_loop().call_later(-self._allowance / rate, self._end_of_throttle)

    def _end_of_throttle(self) -> None:
        """Read again, or wait on: frames that had been read already may have used up more of the allowance."""
        self._throttled = False
        if not self._stopped:
            self._limit_rate(0, time.monotonic())
            self._resume_reading()

    def _pause_reading(self) -> None:
        if self.descriptor is not None:
            self.worker.unwatch(self)
        else:
            self.transport.pause_reading()

    def _resume_reading(self) -> None:
        if self._blocked or self._throttled or self.transport.is_closing():
            return
        if self.descriptor is not None:
            self.worker.watch(self)
        else:
            self.transport.resume_reading()

    def _hello(self, message: dict) -> None:
        if message.get("type") != "hello" or message.get("protocol") != PROTOCOL:
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
            self.stop("checkpoint", str(error), 1008)
        else:
            self.deadline = None
            self.send_text(json.dumps(welcome).encode())
            if self.worker.epoll is not None and self.transport.get_extra_info("sslcontext") is None:
                self.transport.pause_reading()
                self.descriptor = self.transport.get_extra_info("socket").fileno()
                self.worker.watch(self)

    # the worker's turn

    def _wait(self) -> None:
        if self._queue and not (self._waiting or self._blocked or self._stopped):
            self._waiting = True
            self.worker.ready(self)

    def take(self) -> tuple[str, int, np.ndarray] | None:
        """The next request of this session, after the control messages before it were handled.

        It has the frames of `counts` messages: those that wait are processed together.
        """
        self._waiting = False
        while self._queue and not (self._stopped or self._blocked):
            message = self._queue.popleft()
            if isinstance(message, tuple):
                first, x, received = message
                self.received = max(received, self._unblocked)  # not the time that a slow reader has caused
                self.counts = [len(x)]
                return self.session, first, self._joined(first, x) if self._queue else x
            try:
                self._control(message)
            except BadMessage as error:
                self.stop("message", str(error), 1008)
        return None

    def _joined(self, first: int, x: np.ndarray) -> np.ndarray:
        """Frames with those of the waiting messages that continue them: one step of all is the cheapest."""
        parts, last = [x], first + len(x)
        while self._queue and last - first < TAKEN_FRAMES and isinstance(self._queue[0], tuple):
            number, more, _ = self._queue[0]
            if number != last or not np.isfinite(more).all():
                break  # it is refused when its turn comes
            parts.append(more)
            last += len(more)
            self._queue.popleft()
        self.counts = [len(part) for part in parts]
        return np.concatenate(parts)

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
        messages = []
        for count in self.counts:
            part = y if count == len(y) else y[:count]
            messages += (frame_head(BINARY, NUMBER.size + part.nbytes), NUMBER.pack(first), part)
            first, y = first + count, y[count:] if part is not y else y
        if checkpoint:
            messages += (frame_head(TEXT, len(checkpoint)), checkpoint)
        # what `websocket.send_binary` and `send_text` would write, in a third of their time
        self._write(b"".join(messages))
        if self._queue:
            self._wait()

    def _write(self, data: bytes) -> None:
        """Write to the socket, unless the transport still has bytes that come first."""
        if self._through_transport:
            self._through_transport = self.descriptor is None or self.transport.get_write_buffer_size() > 0
        if self._through_transport:
            self.transport.write(data)
            return
        try:
            sent = os.write(self.descriptor, data)
        except BlockingIOError:
            sent = 0
        except OSError:
            self.worker.unwatch(self)
            self.transport.abort()
            return
        if sent < len(data):
            self._through_transport = True
            self.transport.write(data[sent:])

    def refuse(self, error: Exception) -> None:
        """Close the connection because the session could not process a request."""
        kinds = {Misplaced: "misplaced", UnknownSession: "unknown", SessionLimit: "limit"}
        self.stop(kinds.get(type(error), "frames"), str(error), 1008)

    # sent messages

    def send_text(self, text: bytes) -> None:
        if self.websocket.state is State.OPEN:
            self.websocket.send_text(text)
            self._flush()

    def stop(self, code: str, text: str, close_code: int) -> None:
        """Say why, begin the closing handshake, and ignore what the client still sends."""
        if self._stopped:
            return
        self._stopped = True
        self._queue.clear()
        self.deadline = time.monotonic() + CLOSE_SECONDS
        if self.websocket.state is State.OPEN:
            if code == "end":
                self.send_text(b'{"type": "end"}')
            else:
                self.worker.metrics.refused(code)
                self.send_text(json.dumps({"type": "error", "code": code, "message": text}).encode())
            self.websocket.send_close(close_code, code)
            self._flush()
        else:
            self.transport.abort()
        self.worker.leave(self)

    def _flush(self) -> None:
        """Write the bytes that the WebSocket protocol has queued."""
        for data in self.websocket.data_to_send():
            if self._ended or self.transport.is_closing():
                return
            if data != SEND_EOF:
                self._through_transport = True
                self.transport.write(data)
                continue
            self._ended = True
            self.deadline = time.monotonic() + CLOSE_SECONDS  # for the client to close its side
            if self.transport.can_write_eof():
                self.transport.write_eof()
            else:
                self.transport.close()


@functools.lru_cache(64)
def frame_head(opcode: int, size: int) -> bytes:
    """The head of an unfragmented WebSocket frame of a server (RFC 6455, section 5.2)."""
    if size < 126:
        return bytes((opcode, size))
    if size < 1 << 16:
        return bytes((opcode, 126)) + size.to_bytes(2, "big")
    return bytes((opcode, 127)) + size.to_bytes(8, "big")


def parsed(data: bytes) -> dict:
    """A JSON object from the text of an untrusted client."""
    try:
        message = json.loads(bytes(data).decode())
    except (ValueError, RecursionError) as error:
        raise BadMessage(f"a text message must be JSON: {str(error)[:80]}") from None
    if not isinstance(message, dict):
        raise BadMessage(f"a text message must be a JSON object, got {type(message).__name__}")
    return message
