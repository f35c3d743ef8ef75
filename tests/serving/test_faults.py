"""Faults of workers, clients and messages: each session has the hash of an uninterrupted run."""

import asyncio
import hashlib
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import threading
import time

import numpy as np
import pytest
import servers

import cnorm

websockets = pytest.importorskip("websockets")
pytest.importorskip("prometheus_client")

from websockets.sync.client import connect  # noqa: E402
from wires import HELLO, UPGRADE, client_frame, connected, factory_of, feed, lost, settled  # noqa: E402

from cnorm.client import AsyncSession, Session  # noqa: E402
from cnorm.conversation import NUMBER  # noqa: E402
from cnorm.tools.serve import Options, key_of  # noqa: E402
from cnorm.tools.serve.worker import Worker  # noqa: E402

MALFORMED = int(os.environ.get("CNORM_MALFORMED", "3000"))
LIVE = 500


@pytest.fixture(scope="module")
def model():
    return cnorm.demo_model()


def frames_of(session, count):
    return np.random.default_rng(session).standard_normal((count, 12), np.float32)


def sha(arrays):
    return hashlib.sha256(b"".join(a.tobytes() for a in arrays)).hexdigest()


def straight(model, sessions, count):
    """The hash of the outputs of all sessions without interruption."""
    return sha([model.stream().process(frames_of(k, count)) for k in range(sessions)])


async def run_sessions(url, sessions, count, step, at_half):
    """Outputs of sessions that each send `count` frames, `step` at a time; `at_half()` is called in the middle.

    It runs in a thread while frames go on; no session sends its last ones before it has returned.
    """
    halfway, returned = asyncio.Barrier(sessions + 1), asyncio.Event()

    async def one(k):
        x, y = frames_of(k, count), []
        async with AsyncSession(url, patience=60) as session:
            for first in range(0, count, step):
                if first == count // 2:
                    await halfway.wait()
                if first + step >= count:
                    await returned.wait()
                y.append(await session.process(x[first : first + step]))
        return np.concatenate(y)

    async def middle():
        await halfway.wait()
        await asyncio.to_thread(at_half)
        returned.set()

    return (await asyncio.gather(middle(), *(one(k) for k in range(sessions))))[1:]


def end_worker(process, worker, number):
    """Send a worker of `cnorm serve` a signal, and wait until it is gone."""
    os.kill(worker, number)
    limit = time.monotonic() + 30
    while worker in servers.workers_of(process) and time.monotonic() < limit:
        time.sleep(0.01)
    assert worker not in servers.workers_of(process)


@pytest.mark.exhaustive(one_in=2)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_worker_is_lost_in_the_middle_of_64_sessions(model, number):
    with servers.served("--workers", 2) as (process, url):
        first, second = servers.workers_of(process)
        outputs = asyncio.run(run_sessions(url, 64, 400, 8, lambda: end_worker(process, first, number)))
        assert sha(outputs) == straight(model, 64, 400)
        assert second in servers.workers_of(process)


def test_all_workers_are_lost(model):
    """The one worker is killed; its successor has the same key."""
    with servers.served() as (process, url):
        (only,) = servers.workers_of(process)
        outputs = asyncio.run(run_sessions(url, 8, 80, 4, lambda: end_worker(process, only, signal.SIGKILL)))
        assert sha(outputs) == straight(model, 8, 80)


@pytest.mark.exhaustive
def test_a_rolling_restart(model, tmp_path):
    """The new server shares the port; the old one, which needs no option for it, hands its sessions over."""
    store = ("--store", tmp_path)
    with servers.served(*store, stderr=subprocess.PIPE) as (old, url):
        with servers.served(*store, "--reuse-port", port=url.split(":")[2].split("/")[0]) as (_, same):
            outputs = asyncio.run(run_sessions(url, 12, 200, 4, lambda: (old.terminate(), old.wait(30))))
            assert same == url
            assert old.returncode == 0
        log = old.stderr.read()
    assert sha(outputs) == straight(model, 12, 200)
    handed = re.findall(r"closed at frame \d+ after [0-9.]+ s: restart: the worker is being stopped", log)
    assert len(handed) == log.count(" opened at frame 0") > 0


async def live_sessions(url, x, hello):
    """Sessions after some frames each: (outputs, last checkpoint, close code) when the server has closed them."""
    ready = asyncio.Barrier(LIVE + 1)

    async def one(k):
        async with websockets.connect(url, compression=None, max_queue=None) as websocket:
            await websocket.send(json.dumps(hello(k)))
            frames = json.loads(await websocket.recv())["frames"]
            await websocket.send(NUMBER.pack(frames) + x[k, frames : frames + 5].tobytes())
            y, checkpoint = [], {}
            try:
                while True:
                    message = await websocket.recv()
                    if isinstance(message, bytes):
                        y.append(message[NUMBER.size :])
                        await ready.wait()
                    elif json.loads(message)["type"] == "checkpoint":
                        checkpoint = json.loads(message)
            except websockets.ConnectionClosed as closed:
                return b"".join(y), checkpoint, closed.rcvd.code

    async def stop(process):
        await ready.wait()
        process.terminate()

    return one, stop


@pytest.mark.exhaustive
def test_sigterm_with_500_live_sessions(model, tmp_path):
    """Each gets its checkpoint; a server with the same key, started later, continues all of them."""
    x = np.stack([frames_of(k, 10) for k in range(LIVE)])

    async def run(url, process, hello):
        one, stop = await live_sessions(url, x, hello)
        return (await asyncio.gather(stop(process), *(one(k) for k in range(LIVE))))[1:]

    with servers.served("--store", tmp_path) as (process, url):
        first = asyncio.run(run(url, process, lambda k: {"type": "hello", "protocol": 1}))
        assert process.wait(30) == 0
    assert {(len(y), c["frames"], code) for y, c, code in first} == {(5 * 9 * 4, 5, 1012)}
    with servers.served("--store", tmp_path) as (process, url):
        hello = {"type": "hello", "protocol": 1}
        second = asyncio.run(run(url, process, lambda k: hello | {"checkpoint": first[k][1]["checkpoint"]}))
    whole = b"".join(a[0] + b[0] for a, b in zip(first, second, strict=True))
    assert hashlib.sha256(whole).hexdigest() == straight(model, LIVE, 10)


def ip(*words):
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def namespace():
    """A network namespace whose link to this one can be taken down: its name and the name of the link."""
    name = f"cnorm{os.getpid()}"
    if not shutil.which("ip") or subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode:
        pytest.skip("needs the command ip and the right to make network namespaces")
    try:
        ip("link", "add", name, "type", "veth", "peer", "name", "inside", "netns", name)
        ip("addr", "add", "10.231.7.1/30", "dev", name)
        ip("-n", name, "addr", "add", "10.231.7.2/30", "dev", "inside")
        ip("link", "set", name, "up")
        ip("-n", name, "link", "set", "inside", "up")
        yield name
    finally:
        ip("netns", "del", name)


@pytest.mark.exhaustive
def test_a_network_partition(model, namespace):
    """The server's side stays half open; the client comes back on a new connection and takes the session over."""
    inside = ("ip", "netns", "exec", namespace)
    with servers.served("--host", "10.231.7.2", before=inside) as (_, url):
        x = frames_of(0, 300)
        with Session(url, timeout=0.5, patience=60) as session:
            y = [session.process(x[:100])]
            ip("link", "set", namespace, "down")
            mended = threading.Timer(2.0, ip, ("link", "set", namespace, "up"))
            mended.start()
            y.append(session.process(x[100:200]))
            mended.join()
            y.append(session.process(x[200:]))
        assert sha(y) == straight(model, 1, 300)


def test_a_client_that_is_gone_in_the_middle_of_a_frame(model):
    with servers.worker() as worker, Session(worker.url) as other:
        x = frames_of(0, 40)
        y = [other.process(x[:20])]
        for cut in (1, 3, 7, 20):
            websocket = connect(worker.url, compression=None).__enter__()
            websocket.send('{"type": "hello", "protocol": 1}')
            websocket.recv(timeout=10)
            data = NUMBER.pack(0) + x.tobytes()
            websocket.socket.sendall((b"\x82\xfe" + len(data).to_bytes(2, "big") + bytes(4) + data)[:cut])
            websocket.socket.shutdown(socket.SHUT_RDWR)
        y.append(other.process(x[20:]))
        end = time.monotonic() + 10
        while len(worker.sessions) > 1 and time.monotonic() < end:
            time.sleep(0.01)
        assert len(worker.sessions) == 1
        assert sha(y) == straight(model, 1, 40)


TEXTS = [b"{", b"[]", b"null", b'{"type": []}', b'{"type": "end"}', b'{"type": "reset"}', b"\xff", b'{"a":' * 300]
TEXTS += [
    b'{"type": "hello", "protocol": 1, "checkpoint": %s}' % c for c in (b"0", b'""', b'"AAAA"', b"null", b'"\\ud800"')
]


def malformed(r):
    """Random bytes of a client: broken handshakes, broken WebSocket frames, or broken messages in whole frames."""
    kind = r.randrange(4)
    if kind == 0:
        data = bytearray(UPGRADE + HELLO)
        for _ in range(r.randrange(1, 4)):
            data[r.randrange(len(data))] = r.randrange(256)
        return False, bytes(data)
    if kind == 1:
        return True, r.choice([b"", HELLO]) + r.randbytes(r.randrange(1, 200))
    frames = []
    for _ in range(r.randrange(1, 4)):
        good = NUMBER.pack(r.choice([0, 1, 2**63])) + r.randbytes(48 * r.randrange(1, 3))
        payload = r.choice([r.choice(TEXTS), r.randbytes(r.randrange(60)), good, good[: r.randrange(60)]])
        frames.append(client_frame(r.choice([0, 1, 2, 2, 8, 9, 10]), payload, r.random() < 0.8))
    return True, r.choice([b"", HELLO, HELLO]) + b"".join(frames)


def test_malformed_messages_affect_no_other_session(model):
    """Each on a connection of its own; in between, a well-behaved session must go on with the right bits."""
    asyncio.run(send_malformed(model))


async def send_malformed(model):
    worker = Worker(model, Options(key=key_of(None), credit=8, rate=1e9))
    factory, server = await factory_of(worker)
    good = connected(factory)
    feed(good, UPGRADE)
    await settled()
    feed(good, HELLO)
    await settled()
    try:
        await send_each_malformed(model, factory, good)
        assert worker.connections == {good}
        assert len(worker.sessions) == 1
    finally:
        await lost(good)
    server.close(close_connections=False)


async def send_each_malformed(model, factory, good):
    x, r = frames_of(0, MALFORMED // 10 + 1), random.Random(5)
    sent = 0
    for k in range(MALFORMED):
        upgraded, data = malformed(r)
        bad = connected(factory)
        if upgraded:
            feed(bad, UPGRADE)
            await settled()
        feed(bad, data)
        await settled()
        if r.random() < 0.5 and not bad.transport.closed:
            bad.eof_received()
        await lost(bad)
        if k % 10 == 0:
            good.transport.written.clear()
            feed(good, client_frame(2, NUMBER.pack(sent) + x[sent : sent + 1].tobytes()))
            await settled()
            sent += 1
            expected = model.stream().process(x[:sent])[-1:].tobytes() if sent < 50 else None
            frame = bytes(good.transport.written)
            assert frame[:2] == b"\x82\x2c"
            assert NUMBER.unpack(frame[2:10])[0] == sent - 1
            assert expected in (None, frame[10:46])
            last = frame[10:46]
    assert last == model.stream().process(x[:sent])[-1:].tobytes()
    await settled()
