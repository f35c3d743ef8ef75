"""Fuzz a connection of `cnorm serve` with whatever a client may send: before, in and after the handshake and the hello.

    python tests/fuzz/fuzz_serve_connection.py -runs=20000

Needs atheris. Nothing may be raised or logged as an error, the connection must leave no session, what waits for its
client is bounded, and a session beside it goes on with the right bits. A finding is written as crash-* to the working
folder and belongs into tests/serving/test_hostile.py.
"""

import asyncio
import logging
import sys
import tempfile
from pathlib import Path

import atheris
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
with atheris.instrument_imports(include=["websockets", "cnorm.tools.serve", "cnorm.conversation"]):
    from wires import HELLO, UPGRADE, client_frame, connected, factory_of, feed, lost, settled

    import cnorm
    from cnorm.conversation import NUMBER
    from cnorm.tools.serve import Options, key_of
    from cnorm.tools.serve.connection import WRITE_LIMIT
    from cnorm.tools.serve.worker import Worker

MODEL = cnorm.demo_model()
X = np.random.default_rng(0).standard_normal((64, 12), np.float32)
Y = MODEL.stream().process(X)
OPCODES = (0, 1, 2, 2, 2, 8, 9, 10)
RESET = b'{"type": "reset"}'


class Fuzzed:
    """A worker with a good session and, for each input, a connection that receives it."""

    async def start(self):
        self.worker = Worker(MODEL, Options(key=key_of(None), credit=8, rate=1e9))
        self.factory, self.server = await factory_of(self.worker)
        self.good, self.sent, self.failures = connected(self.factory), 0, []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: self.failures.append(context))
        feed(self.good, UPGRADE)
        await settled()
        await self.told(HELLO)

    async def told(self, data):
        self.good.transport.written.clear()
        feed(self.good, data)
        await settled()
        return bytes(self.good.transport.written)

    async def play(self, data):
        bad = connected(self.factory)
        for piece in pieces(data):
            feed(bad, piece)
            await settled()
        if data and data[-1] & 1 and not bad.transport.closed:
            bad.eof_received()
        assert len(bad.transport.written) < WRITE_LIMIT + self.worker.max_bytes + 40 * len(data)
        await lost(bad)
        assert len(self.worker.sessions) == 1
        if self.sent == len(X):
            await self.told(client_frame(1, RESET))
            self.sent = 0
        one = slice(self.sent, self.sent + 1)
        written = await self.told(client_frame(2, NUMBER.pack(self.sent) + X[one].tobytes()))
        assert Y[one].tobytes() in written
        self.sent += 1
        assert not self.failures, self.failures


def pieces(data):
    """What is received in turn: the input as it is, or as the payloads of frames after handshake and hello."""
    phase, data = data[0] % 4 if data else 0, data[1:]
    if phase == 0:
        return [data]
    if phase == 1:
        return [UPGRADE[:-2] + data]
    found = [UPGRADE] if phase == 2 else [UPGRADE, HELLO]
    while len(data) > 2:
        kind, size, data = data[0], data[1], data[2:]
        payload, data = data[:size], data[size:]
        frame = client_frame(OPCODES[kind % 8], payload, fin=not kind & 8)
        found.append(frame[: -1 - size % 7] if kind & 16 else frame)
    return found


def frames_input(*frames):
    """An input of phase 3 that has these frames: (index in `OPCODES`, payload)."""
    return b"\3" + b"".join(bytes([kind, len(payload)]) + payload for kind, payload in frames)


CORPUS = (
    b"\0" + UPGRADE + HELLO,
    b"\1Origin: http://localhost\r\nAuthorization: Bearer a\r\n\r\n",
    b"\0GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n",
    frames_input((2, NUMBER.pack(0) + X[:3].tobytes()), (1, RESET), (2, NUMBER.pack(0) + X[:1].tobytes())),
    frames_input((1, b'{"type": "end"}'), (6, b"ping"), (7, b""), (5, b"\3\xe8")),
    b"\2\1\x20" + b'{"type": "hello", "protocol": 1}',
)


class Raising(logging.Handler):
    def emit(self, record):
        raise AssertionError(record.getMessage())


def main() -> None:
    logging.getLogger("cnorm.serve").addHandler(Raising(logging.ERROR))
    loop = asyncio.new_event_loop()
    fuzzed = Fuzzed()
    loop.run_until_complete(fuzzed.start())
    with tempfile.TemporaryDirectory() as corpus:
        for i, data in enumerate(CORPUS):
            Path(corpus, str(i)).write_bytes(data)
        flags = sys.argv[1:]
        if not any(flag.startswith("-runs") for flag in flags):
            flags.append("-runs=20000")
        one_input = lambda data: loop.run_until_complete(fuzzed.play(data))  # noqa: E731
        atheris.Setup([sys.argv[0], *flags, "-max_len=4096", "-timeout=20", "-rss_limit_mb=2048", corpus], one_input)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
