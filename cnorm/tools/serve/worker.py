"""One worker process: its sessions, the micro-batch of each event-loop turn, time limits, and the way it stops."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import gc
import logging
import os
import re
import secrets
import select
import signal
import socket
import ssl
import sys
import time
import zlib

from cnorm.client import NUMBER, PROTOCOL
from cnorm.model import Model
from cnorm.serving import Checkpoint, Sessions
from cnorm.tools.serve import Options
from cnorm.tools.serve.connection import Connection
from cnorm.tools.serve.metrics import Metrics

__all__ = ["Worker", "run_worker"]

LOG = logging.getLogger("cnorm.serve")
CLOSE_SECONDS = 10.0  # for the closing handshake, and for the writes that are left when the worker stops
SWEEP_SECONDS = 1.0
# from so many messages a second on, a worker waits so long after a turn of fewer sessions, which costs more for each
BUSY_MESSAGES, PAUSE_SECONDS, PAUSE_SESSIONS = 4000, 0.001, 16
SHED_AFTER, SHED_SHARE = 5, 8  # after so many overloaded sweeps in a row, each closes one in so many sessions
SPARE_CONNECTIONS = 64  # beside the sessions: HTTP requests, connections that are closing


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
        self.buffer = bytearray(1 << 16)  # every connection reads into it and copies before the next one reads
        self.connections: set[Connection] = set()
        self.owners: dict[str, Connection] = {}
        self.draining = False
        # of the sockets that the worker reads itself; without epoll their transports do
        self.epoll = select.epoll() if hasattr(select, "epoll") else None
        self._watched: dict[int, Connection] = {}
        self._ready: list[Connection] = []
        self._reading = False  # whether a turn follows at once
        self._since = 0.0  # when the first frame of the next turn was received
        self._answered = 0  # messages, since the last sweep
        self._busy = False  # whether `BUSY_MESSAGES` came in the second before the last sweep
        self._lags = [0.0, 0.0]  # longest time from reading a frame to its answer: before the last sweep, since then
        self._overloaded = 0  # sweeps in a row that found the worker overloaded
        self._fresh = model.stream().save()
        sealed = len(Checkpoint("0" * 32, 0, self._fresh).sealed(self.key))
        self.max_bytes = max(NUMBER.size + 4 * options.credit * model.input_size, 1024 + 2 * sealed)
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
        connection.session = name
        if before is not None:
            before.stop("replaced", "the session continues on another connection", 1008)
        interval = self.options.checkpoint_frames
        # at different frames in different sessions, so that not all checkpoints are made in the same turn
        connection.checkpoint_at = frames + 1 + (zlib.crc32(name.encode()) % interval)
        return {
            "type": "welcome",
            "protocol": PROTOCOL,
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
        connection.checkpoint_at = self.options.checkpoint_frames
        return {"type": "reset", "frames": 0, "checkpoint": self.sealed(checkpoint)}

    def leave(self, connection: Connection) -> None:
        """Forget the session of a connection that is closed, unless another connection has taken it over."""
        if connection.session is not None and self.owners.get(connection.session) is connection:
            del self.owners[connection.session]
            with contextlib.suppress(LookupError):
                self.sessions.export(connection.session)

    def sealed(self, checkpoint: Checkpoint) -> str:
        """A checkpoint sealed with the workers' secret, in Base64, as the messages of the protocol have it."""
        return base64.b64encode(checkpoint.sealed(self.key)).decode()

    def crowded(self) -> bool:
        return len(self.connections) > self.options.limit + SPARE_CONNECTIONS

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

    def watch(self, connection: Connection) -> None:
        """Read the connection's socket here, with one call of the event loop for all that are readable."""
        if connection.descriptor not in self._watched:
            self._watched[connection.descriptor] = connection
            self.epoll.register(connection.descriptor, select.EPOLLIN)

    def unwatch(self, connection: Connection) -> None:
        if self._watched.pop(connection.descriptor, None) is not None:
            self.epoll.unregister(connection.descriptor)

    def _schedule(self) -> None:
        """Read when a socket is readable, or, if the worker is busy, at intervals."""
        loop = asyncio.get_running_loop()
        if self._busy:
            loop.remove_reader(self.epoll.fileno())
            loop.call_soon(self._read)
        else:
            loop.add_reader(self.epoll.fileno(), self._read)

    def _read(self) -> None:
        if self.epoll.closed:
            return
        self._reading, self._since = True, time.perf_counter()
        events = self.epoll.poll(0, len(self._watched) or 1)
        for descriptor, _ in events:
            connection = self._watched.get(descriptor)
            if connection is None:  # its session was continued on a connection that was read just before
                continue
            try:
                connection.read()
            except Exception:  # as a transport does: an error of one connection must not end the others
                LOG.exception("a connection failed")
                connection.transport.abort()
            if len(self._ready) >= self.options.turn_sessions:
                self._turn()
        self._reading = False
        self._turn()
        if self._busy:
            pause = PAUSE_SECONDS if len(events) < PAUSE_SESSIONS else 0.0
            asyncio.get_running_loop().call_later(pause, self._read)

    def ready(self, connection: Connection) -> None:
        """Step a session in the next turn, together with all that are ready by then."""
        if not self._ready and not self._reading:
            self._since = time.perf_counter()
            asyncio.get_running_loop().call_soon(self._turn)
        self._ready.append(connection)

    def _turn(self) -> None:
        ready, self._ready = self._ready, []
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
            self._answered += messages
            self.metrics.turn(len(taken), messages, frames, time.perf_counter() - self._since)
            oldest = min(connection.received for connection, _ in taken)
            self._lags[1] = max(self._lags[1], time.monotonic() - oldest)

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
        busy, self._answered = self._answered > BUSY_MESSAGES * SWEEP_SECONDS, 0
        if busy is not self._busy and self.epoll is not None:
            self._busy = busy
            self._schedule()
        now = time.monotonic()
        for connection in list(self.connections):
            if connection.deadline is not None and now > connection.deadline:
                connection.transport.abort()

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
        if self._ready:
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

    async def run(self, sock: socket.socket, stop: asyncio.Event, started=lambda: None) -> None:
        """Serve until `stop` is set, then drain."""
        loop = asyncio.get_running_loop()
        context = tls(self.options)
        servers = [await loop.create_server(lambda: Connection(self), sock=sock, ssl=context, backlog=1024)]
        if self.options.metrics_port:
            port = self.options.metrics_port + self.index
            servers.append(await loop.create_server(lambda: Connection(self), self.options.host, port))
        if self.epoll is not None:
            self._schedule()
        started()
        gc.collect()
        gc.freeze()  # the model and the modules need not be traversed again
        gc.set_threshold(50_000, 20, 100)  # messages make no cycles: collections only pause all sessions
        while not stop.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), SWEEP_SECONDS)
            self.sweep()
        for server in servers:
            server.close()
        await self.drain()
        if self.epoll is not None:
            loop.remove_reader(self.epoll.fileno())
            self.epoll.close()


def tls(options: Options) -> ssl.SSLContext | None:
    if not options.certificate:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(options.certificate, options.private_key)
    return context


def listening(host: str, port: int) -> socket.socket:
    """A socket bound to an address that several processes may bind; connections are spread over those that listen."""
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    sock = socket.socket(family, kind)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    sock.bind(address)
    return sock


def run_worker(model: Model, options: Options, index: int, sessions: type[Sessions] = Sessions) -> None:
    """Serve until SIGTERM, or until the supervisor, which holds the other end of standard input, is gone."""

    async def main() -> None:
        loop, stop = asyncio.get_running_loop(), asyncio.Event()
        loop.add_signal_handler(signal.SIGTERM, stop.set)
        loop.add_signal_handler(signal.SIGINT, lambda: None)  # the supervisor's business
        loop.add_reader(sys.stdin.fileno(), stop.set)  # readable at its end only: the job has been read
        worker = Worker(model, options, index, sessions)
        await worker.run(listening(options.host, options.port), stop, lambda: os.write(1, b"ready\n"))

    asyncio.run(main())
