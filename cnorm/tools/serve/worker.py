"""One worker process: its sessions, the micro-batch of each event-loop turn, time limits, and the way it stops."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
import gc
import logging
import os
import re
import secrets
import signal
import sys
import time
import zlib

from websockets.asyncio.server import serve

from cnorm.conversation import NUMBER, PROTOCOL
from cnorm.model import Model
from cnorm.serving import Checkpoint, Sessions
from cnorm.storage.stream_state import ARITHMETIC
from cnorm.tools.serve import Options, pages
from cnorm.tools.serve.connection import CLOSE_SECONDS, HELLO_SECONDS, READ_BYTES, WRITE_LIMIT, Connection
from cnorm.tools.serve.listener import ACCEPTS, Listener, need_descriptors, tls
from cnorm.tools.serve.metrics import Metrics

__all__ = ["Worker", "run_worker"]

LOG = logging.getLogger("cnorm.serve")
WEBSOCKETS = logging.getLogger("cnorm.serve.websockets")  # of failures only
WEBSOCKETS.setLevel(logging.ERROR)
SWEEP_SECONDS, TICK_SECONDS = 1.0, 0.1
TEXT_FRAMES = 16  # that a text message costs: a reset seals a checkpoint
TLS_GARBAGE = 64  # connections after which their garbage is collected: asyncio leaves cycles with buffers of 256 KiB
SHED_AFTER, SHED_SHARE = 5, 8  # after so many overloaded sweeps in a row, each closes one in so many sessions


class Worker:
    """The sessions of one process, and the connections that feed them.

    Parameters
    ----------
    model : Model
    options : Options
    index : int
        Number of this worker among those behind the port.
    sessions : type
        `Sessions`, or a subclass that steps by other means, for comparisons.
    """

    def __init__(self, model: Model, options: Options, index: int = 0, sessions: type[Sessions] = Sessions) -> None:
        self.model, self.options, self.index = model, options, index
        self.input_size = model.input_size
        self.sessions = sessions(model, limit=options.limit, idle=options.idle)
        self.key = bytes.fromhex(options.key)
        self.metrics = Metrics(index, lambda: len(self.sessions), self.lag)
        self.buffer = memoryview(bytearray(READ_BYTES))  # of all connections: each copies what it has read
        self.connections: set[Connection] = set()
        self.owners: dict[str, Connection] = {}
        self.draining = False
        self.listener: Listener | None = None
        self._ready: list[Connection] = []
        self._since = 0.0  # when the first frame of the next turn was received
        self._lags = [0.0, 0.0]  # longest time from reading a frame to its answer: before the last sweep, since then
        self._overloaded = 0  # sweeps in a row that found the worker overloaded
        self._collected = 0  # connections accepted before garbage was last collected
        self._fresh = model.stream().save()
        sealed = len(Checkpoint("0" * 32, 0, self._fresh).sealed(self.key))
        self.max_bytes = max(NUMBER.size + 4 * options.credit * model.input_size, 1024 + 2 * sealed)
        self._frame_bytes = 4 * model.input_size
        self._unit = wire_bytes(NUMBER.size + self._frame_bytes)  # of a message of one frame
        self.surcharge = functools.lru_cache(256)(self._surcharge)
        self.byte_rate, self.burst = options.rate * self._unit, float(options.credit * self._unit)
        own = ("127.0.0.1", "localhost", "::1", options.host)
        names = "|".join(re.escape(f"[{host}]" if ":" in host else host) for host in own)
        # None: a client that is no web page sends no origin
        self.origins = [None, re.compile(rf"https?://({names})(:\d+)?"), *options.origins]

    # a session's life

    def begin(self, connection: Connection, sealed: bytes | None) -> dict:
        """Open a session, or continue the one of a sealed checkpoint; return the message that says so."""
        if sealed is None:
            name, frames = secrets.token_hex(16), 0
            self.sessions.open(name)
        else:
            checkpoint = Checkpoint.unsealed(sealed, self.key)
            name, frames = checkpoint.session, checkpoint.frames
            self.sessions.adopt(checkpoint, replace=True)
            self.metrics.resumed.inc()
        before = self.owners.pop(name, None)
        self.owners[name] = connection
        connection.session, connection.frames = name, frames
        self.listener.admit(connection.sock)
        how = "opened" if sealed is None else "continued"
        LOG.info("session %s %s at frame %d by %s", name, how, frames, connection.peer)
        if before is not None:
            before.stop("replaced", "the session continues on another connection", 1008)
        interval = self.options.checkpoint_frames
        # at different frames in different sessions, so that not all checkpoints are made in the same turn
        connection.checkpoint_at = frames + 1 + (zlib.crc32(name.encode()) % interval)
        return {
            "type": "welcome",
            "protocol": PROTOCOL,
            "arithmetic": ARITHMETIC,
            "session": name,
            "frames": frames,
            "input_size": self.model.input_size,
            "output_size": self.model.output_size,
            "credit": self.options.credit,
            "checkpoint": self.sealed(self.sessions.checkpoint(name)),
        }

    def reset(self, connection: Connection) -> dict:
        """Set the session's state to the initial one; its frames are counted from 0 again."""
        checkpoint = Checkpoint(connection.session, 0, self._fresh)
        self.sessions.adopt(checkpoint, replace=True)
        connection.frames, connection.checkpoint_at = 0, self.options.checkpoint_frames
        return {"type": "reset", "frames": 0, "checkpoint": self.sealed(checkpoint)}

    def leave(self, connection: Connection, code: str = "lost", text: str = "") -> None:
        """Forget the session of a connection that is closed, unless another connection has taken it over."""
        if connection.session is None or connection.left:
            return
        connection.left = True
        if self.owners.get(connection.session) is connection:
            del self.owners[connection.session]
            with contextlib.suppress(LookupError):
                self.sessions.export(connection.session)
        self.listener.estrange(connection.sock)
        seconds = time.monotonic() - connection.opened
        why = f"{code}: {text}" if text else code
        LOG.info("session %s closed at frame %d after %.1f s: %s", connection.session, connection.frames, seconds, why)

    def sealed(self, checkpoint: Checkpoint) -> str:
        """A checkpoint sealed with the workers' secret, in Base64, as the messages of the protocol have it."""
        return base64.b64encode(checkpoint.sealed(self.key)).decode()

    def _surcharge(self, size: int, text: bool) -> int:
        """Bytes that a WebSocket frame costs beyond its own: at least a message of one frame, and so many a frame."""
        frames = max((size - NUMBER.size) // self._frame_bytes, TEXT_FRAMES if text else 1)
        return max(self._unit * frames - wire_bytes(size), 0)

    def lag(self) -> float:
        """The longest time from reading a frame to its answer, in the last second or two."""
        return max(self._lags)

    def unready(self) -> str:
        """Why no session can be opened; empty if one can."""
        if self.draining:
            return "stopping: this worker is being stopped"
        if self.lag() > self.options.lag:
            return "overloaded: this worker answers late"
        return (
            "full: this worker has as many sessions as it may have" if len(self.sessions) >= self.options.limit else ""
        )

    # the micro-batch

    def ready(self, connection: Connection) -> None:
        """Step a session in the next turn, together with all that are ready by then."""
        if not self._ready:
            self._since = time.perf_counter()
            asyncio.get_running_loop().call_soon(self._turn)
        self._ready.append(connection)

    def _turn(self) -> None:
        most = self.options.turn_sessions
        ready, self._ready = self._ready[:most], self._ready[most:]
        if self._ready:
            asyncio.get_running_loop().call_soon(self._turn)
        taken = [(connection, request) for connection in ready if (request := connection.take()) is not None]
        results = self.sessions.process_many([request for _, request in taken])
        messages = frames = 0
        for (connection, (_, first, _)), y in zip(taken, results, strict=True):
            if isinstance(y, Exception):
                connection.refuse(y)
                continue
            messages += len(connection.counts)
            frames += len(y)
            last = first + len(y)
            checkpoint = b""
            if last >= connection.checkpoint_at:
                connection.checkpoint_at = last + self.options.checkpoint_frames
                checkpoint = self.checkpoint_message(self.sessions.checkpoint(connection.session))
            connection.answer(first, y, checkpoint)
        if taken:
            now = time.monotonic()
            waited = [now - connection.received for connection, _ in taken]
            self.metrics.turn(len(taken), messages, frames, time.perf_counter() - self._since, waited)
            self._lags[1] = max(self._lags[1], *waited)

    def checkpoint_message(self, checkpoint: Checkpoint) -> bytes:
        # as json.dumps would write it, in a tenth of the time
        text = f'{{"type": "checkpoint", "frames": {checkpoint.frames}, "checkpoint": "{self.sealed(checkpoint)}"}}'
        return text.encode()

    # time limits and the end

    def sweep(self) -> None:
        """Close idle sessions with their checkpoint, shed load, and end connections that exceed a time limit."""
        for checkpoint in self.sessions.evict():
            self.metrics.evicted.inc()
            self._dismiss(checkpoint, "idle", f"no frame for {self.options.idle:g} seconds", 1001)
        self._overloaded = self._overloaded + 1 if self.lag() > self.options.lag else 0
        if self._overloaded > SHED_AFTER and len(self.owners) > 1:
            self._shed()
        self._lags = [self._lags[1], 0.0]
        if self.options.certificate and self.listener.accepted - self._collected >= TLS_GARBAGE:
            self._collected = self.listener.accepted
            gc.collect()

    async def _tick(self) -> None:
        """Count the time that the event loop is late as lag: bytes wait so long in sockets, unseen."""
        while True:
            start = time.monotonic()
            await asyncio.sleep(TICK_SECONDS)
            self._lags[1] = max(self._lags[1], time.monotonic() - start - TICK_SECONDS)

    def _shed(self) -> None:
        """Close the newest sessions with their checkpoint, so that they continue elsewhere or later."""
        for session in list(self.owners)[-max(len(self.owners) // SHED_SHARE, 1) :]:
            with contextlib.suppress(LookupError):
                self._dismiss(self.sessions.export(session), "overload", "this worker answers late", 1013)
                self.metrics.shed.inc()

    def _dismiss(self, checkpoint: Checkpoint, code: str, text: str, close_code: int) -> None:
        connection = self.owners.pop(checkpoint.session, None)
        if connection is not None:
            connection.send_text(self.checkpoint_message(checkpoint))
            connection.stop(code, text, close_code)

    async def drain(self) -> None:
        """Refuse new sessions, send each session its checkpoint, and wait until the clients have closed."""
        self.draining = True
        while self._ready:
            self._turn()
        for checkpoint in self.sessions.drain():
            self._dismiss(checkpoint, "restart", "the worker is being stopped: continue on another one", 1012)
        for connection in list(self.connections):
            if connection.session is None:
                connection.stop("restart", "the worker is being stopped", 1012)
        end = time.monotonic() + CLOSE_SECONDS
        while self.connections and time.monotonic() < end:
            await asyncio.sleep(0.01)
        for connection in list(self.connections):
            connection.transport.abort()

    def serving(self, listener: Listener, answer):
        """A server on a bound socket; `answer(connection, request)` is None for a request that opens a WebSocket."""
        # no keep-alive: TCP finds lost peers, and idle sessions are closed; no limit of the queue, which would resume
        # reading without regard to the rate: `Connection` empties it after each read
        return serve(
            Connection.serve, sock=listener, ssl=tls(self.options.certificate, self.options.private_key),
            create_connection=functools.partial(Connection, worker=self), origins=self.origins, process_request=answer,
            process_response=functools.partial(pages.log_refusal, self), compression=None, server_header=None,
            open_timeout=HELLO_SECONDS, close_timeout=CLOSE_SECONDS, ping_interval=None, max_size=self.max_bytes,
            max_queue=None, write_limit=WRITE_LIMIT, logger=WEBSOCKETS, backlog=ACCEPTS,
        )  # fmt: skip

    async def run(self, listener: Listener, stop: asyncio.Event, started=lambda: None) -> None:
        """Serve until `stop` is set, then drain."""
        self.listener = listener
        servers = [await self.serving(listener, functools.partial(pages.answer, self))]
        if self.options.metrics_port:
            other = Listener(self.options.host, self.options.metrics_port + self.index, shared=False)
            servers.append(await self.serving(other, functools.partial(pages.operators, self)))
        ticking = asyncio.create_task(self._tick())
        started()
        gc.collect()
        gc.freeze()  # the model and the modules need not be traversed again
        gc.set_threshold(50_000, 20, 100)  # messages make no cycles: collections only pause all sessions
        while not stop.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), SWEEP_SECONDS)
            self.sweep()
        ticking.cancel()
        for server in servers:
            server.close(close_connections=False)
        await self.drain()


def wire_bytes(size: int) -> int:
    """Bytes of a client's WebSocket frame with `size` bytes of payload."""
    return size + (6 if size < 126 else 8 if size < 1 << 16 else 14)


def run_worker(model: Model, options: Options, index: int, sessions: type[Sessions] = Sessions) -> None:
    """Serve until SIGTERM, or until the supervisor, which holds the other end of standard input, is gone."""
    need_descriptors(options.limit)

    async def main() -> None:
        loop, stop = asyncio.get_running_loop(), asyncio.Event()
        loop.add_signal_handler(signal.SIGTERM, stop.set)
        loop.add_signal_handler(signal.SIGINT, lambda: None)  # the supervisor's business
        loop.add_reader(sys.stdin.fileno(), stop.set)  # readable at its end only: the job has been read
        worker = Worker(model, options, index, sessions)
        listener = Listener(options.host, options.port, places=options.limit)
        await worker.run(listener, stop, lambda: os.write(1, b"ready\n"))

    asyncio.run(main())
