"""Connections of a `Worker` without sockets, so that many byte sequences of clients can be tried in one event loop."""

import asyncio
import functools

from cnorm.tools.serve import pages
from cnorm.tools.serve.listener import Listener

UPGRADE = (
    b"GET /stream HTTP/1.1\r\nHost: a\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)


def client_frame(opcode, payload, fin=True):
    """A WebSocket frame of a client, with the masking key 0."""
    size = len(payload)
    length = bytes([128 | size]) if size < 126 else b"\xfe" + size.to_bytes(2, "big")
    return bytes([128 * fin | opcode]) + length + bytes(4) + payload


HELLO = client_frame(1, b'{"type": "hello", "protocol": 1}')


class Pipe(asyncio.Transport):
    """A transport that keeps what was written; it is its own socket."""

    def __init__(self, connection):
        super().__init__()
        self.connection = connection
        self.written, self.closed, self.paused = bytearray(), False, False

    def get_extra_info(self, name, default=None):
        return {"socket": self, "peername": ("pipe", 0)}.get(name, default)

    def fileno(self):
        return -1

    def setsockopt(self, *arguments):
        pass

    def set_write_buffer_limits(self, high=None, low=None):
        pass

    def write(self, data):
        self.written += data

    def can_write_eof(self):
        return False

    def close(self):
        if not self.closed:
            asyncio.get_running_loop().call_soon(self.connection.connection_lost, None)
        self.closed = True

    def is_closing(self):
        return self.closed

    def pause_reading(self):
        self.paused = True

    def resume_reading(self):
        self.paused = False

    abort = close


async def factory_of(worker):
    """What `websockets` makes a connection of `worker` with, and the server, which is never connected to."""
    loop, made = asyncio.get_running_loop(), []
    create_server = loop.create_server

    async def caught(factory, *arguments, **options):
        made.append(factory)
        return await create_server(factory, *arguments, **options)

    loop.create_server = caught
    worker.listener = Listener("127.0.0.1", 0)
    server = await worker.serving(worker.listener, functools.partial(pages.answer, worker))
    return made[0], server


def connected(factory):
    connection = factory()
    connection.connection_made(Pipe(connection))
    return connection


async def lost(connection):
    """End a connection from the client's side."""
    connection.transport.abort()
    await settled()


async def settled():
    """Let handlers and turns do what they have to."""
    for _ in range(8):
        await asyncio.sleep(0)


def feed(connection, data):
    """Receive bytes, without regard to the rate, until the connection is closed."""
    while data and not connection.transport.closed:
        buffer = connection.get_buffer(-1)
        piece = data[: len(buffer)]
        buffer[: len(piece)] = piece
        connection.buffer_updated(len(piece))
        data = data[len(piece) :]
