"""Clients of `cnorm serve` that mean harm: what they send costs them, and others keep their places."""

import asyncio
import contextlib
import functools
import gc
import json
import logging
import os
import re
import signal
import socket
import ssl
import struct
import subprocess
import sys
import time

import numpy as np
import pytest
import servers

import cnorm

websockets = pytest.importorskip("websockets")
pytest.importorskip("prometheus_client")

from websockets.sync.client import connect  # noqa: E402
from wires import HELLO, UPGRADE, client_frame, connected, factory_of, feed, lost, settled  # noqa: E402

from cnorm.client import Session  # noqa: E402
from cnorm.conversation import NUMBER  # noqa: E402
from cnorm.tools.serve import Options, key_of, listener, pages  # noqa: E402
from cnorm.tools.serve.connection import LEAST_BYTES, READ_BYTES  # noqa: E402
from cnorm.tools.serve.worker import TEXT_FRAMES, TLS_GARBAGE, Worker  # noqa: E402

FRAME = NUMBER.pack(0) + bytes(48)


def wired(play, **options):
    """Run the coroutine `play(worker, connection, feed)` with a connection that has no socket."""

    async def main():
        worker = Worker(cnorm.demo_model(), Options(key=key_of(None), **options))
        factory, server = await factory_of(worker)
        connection = connected(factory)
        try:
            await play(worker, connection)
        finally:
            await lost(connection)
            server.close(close_connections=False)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("opcode", "payload"),
    [(10, b""), (9, b""), (1, b'{"type": "reset"}'), (2, FRAME)],
    ids=["pong", "ping", "reset", "frame"],
)
def test_every_message_costs_a_frame_at_least(opcode, payload):
    async def play(worker, connection):
        feed(connection, UPGRADE)
        await settled()
        feed(connection, HELLO)
        await settled()
        before = connection._allowance
        frame = client_frame(opcode, payload)
        feed(connection, frame)
        cost = worker.burst / worker.options.credit * (TEXT_FRAMES if opcode == 1 else 1)
        # the allowance grows again by 10 frames a second
        assert 0.99 * cost <= before - connection._allowance <= cost
        assert connection.transport.paused == (cost > worker.burst)
        feed(connection, frame * 8)
        assert connection.transport.paused

    wired(play, rate=10.0, credit=8)


def test_frames_of_a_message_cost_as_many():
    async def play(worker, connection):
        feed(connection, UPGRADE)
        await settled()
        feed(connection, HELLO)
        await settled()
        before = connection._allowance
        feed(connection, client_frame(2, NUMBER.pack(0) + bytes(48 * 5)))
        assert before - connection._allowance == pytest.approx(5 * worker.burst / 8, rel=0.01)

    wired(play, rate=1.0, credit=8)


def test_a_request_without_end_is_cut_off():
    async def play(worker, connection):
        feed(connection, UPGRADE[:-2])
        for k in range(8):
            feed(connection, b"a: " + bytes([97 + k]) * 2000 + b"\r\n")
        assert not connection.transport.closed
        feed(connection, b"b: " + b"c" * 3000)
        assert connection.transport.closed

    wired(play)


def test_bytes_before_the_hello_are_bounded():
    async def play(worker, connection):
        feed(connection, UPGRADE)
        await settled()
        feed(connection, client_frame(10, b"") * (worker.max_bytes // 6 + 5000))
        assert connection.transport.closed

    wired(play)


def certificate(folder):
    """The options for TLS with a new certificate, and the context of a client that trusts it."""
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost", "-addext",
         "subjectAltName=IP:127.0.0.1", "-keyout", folder / "key.pem", "-out", folder / "cert.pem"],
        check=True, capture_output=True,
    )  # fmt: skip
    options = {"certificate": str(folder / "cert.pem"), "private_key": str(folder / "key.pem")}
    return options, ssl.create_default_context(cafile=folder / "cert.pem")


def test_connections_with_tls_leave_no_memory_behind(tmp_path):
    """asyncio keeps each that ends before the handshake in a cycle, with buffers of 256 KiB."""
    options, _ = certificate(tmp_path)
    with servers.worker(**options) as worker:
        for _ in range(3 * TLS_GARBAGE):
            socket.create_connection(("127.0.0.1", worker.options.port)).close()
        end, left = time.monotonic() + 20, TLS_GARBAGE
        while left >= TLS_GARBAGE and time.monotonic() < end:
            time.sleep(0.5)
            if worker.listener.accepted == 3 * TLS_GARBAGE:
                left = sum(isinstance(one, asyncio.sslproto.SSLProtocol) for one in gc.get_objects())
        assert left < TLS_GARBAGE


@pytest.mark.parametrize("secure", [False, True], ids=["plain", "TLS"])
def test_a_client_that_vanishes_is_one_line_of_the_log(secure, tmp_path, caplog):
    options, context = certificate(tmp_path) if secure else ({}, None)
    caplog.set_level(logging.INFO)
    with servers.worker(**options) as worker:
        with connect(worker.url, ssl=context) as client:
            client.send('{"type": "hello", "protocol": 1}')
            assert "welcome" in client.recv()
            client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # resets
            client.socket.close()
        end = time.monotonic() + 20
        while " closed at frame 0 " not in caplog.text and time.monotonic() < end:
            time.sleep(0.05)
    assert " closed at frame 0 " in caplog.text
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


@pytest.mark.exhaustive(one_in=2)
@pytest.mark.parametrize("secure", [False, True], ids=["plain", "TLS"])
def test_silent_connections_keep_nobody_out(secure, tmp_path):
    """The oldest one is closed for a new one; sessions have places of their own."""
    options, context = certificate(tmp_path) if secure else ({}, None)
    with contextlib.ExitStack() as closing, servers.worker(limit=20, **options) as worker:
        session = closing.enter_context(Session(worker.url, ssl=context))
        silent = [socket.create_connection(("127.0.0.1", worker.options.port)) for _ in range(300)]
        assert servers.get(worker.url, "/healthz", context=context) == (200, "ok\n")
        with Session(worker.url, ssl=context) as other:
            assert len(other.process(np.zeros((3, 12), np.float32))) == 3
        assert len(session.process(np.zeros((3, 12), np.float32))) == 3
        still = 0
        for one in silent:
            one.settimeout(0.001)
            try:
                still += one.recv(1) != b""
            except TimeoutError:
                still += 1
            except OSError:
                pass
            one.close()
        assert still <= listener.STRANGERS


def test_the_metrics_port_has_no_sessions_and_the_certificate(tmp_path):
    options, context = certificate(tmp_path)
    (port,) = servers.free_ports(1)
    with servers.worker(metrics_port=port, token="secret", **options) as worker:
        other = worker.url.replace(str(worker.options.port), str(port))
        assert servers.get(other, "/healthz", context=context) == (200, "ok\n")
        assert servers.get(other, "/metrics", context=context)[0] == 401
        assert servers.get(other, "/metrics", {"Authorization": "Bearer secret"}, context)[0] == 200
        for path in ("/", "/stream?token=secret", "/recordings.json"):
            assert servers.get(other, path, context=context)[0] == 404
        with (
            pytest.raises(websockets.InvalidStatus),
            connect(other + "?token=secret", ssl=context),
        ):
            pass


def serve(*arguments):
    command = [sys.executable, "-P", "-m", "cnorm", "serve", "--demo", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_a_second_server_on_the_port_is_refused():
    with servers.served() as (_, url):
        port = int(re.search(r":(\d+)/", url)[1])
        done = serve("--port", port)
        assert done.returncode == 2
        assert f"port {port}: Address already in use" in done.stderr
        with servers.served("--reuse-port", port=port) as (_, other):
            assert other == url


def raw(worker, request):
    with socket.create_connection(("127.0.0.1", worker.options.port), timeout=10) as sock:
        sock.sendall(request)
        data = b""
        while more := sock.recv(65536):
            data += more
    return data.split(b"\r\n", 1)[0]


def test_odd_targets_and_hosts_get_an_answer(caplog):
    with servers.worker(page=str(servers.PAGE)) as worker:
        own = f"Host: 127.0.0.1:{worker.options.port}".encode()
        for target in (b"//[", b"//x/metrics", b"http://x/metrics", b"/metrics/", b"/%6detrics", b"/../nginx.conf"):
            assert b" 404 " in raw(worker, b"GET " + target + b" HTTP/1.1\r\n" + own + b"\r\n\r\n"), target
        for path in (b"/metrics", b"/recordings.json", b"/"):
            request = b"GET " + path + b" HTTP/1.1\r\n"
            assert b" 200 " in raw(worker, request + own + b"\r\n\r\n")
            assert b" 200 " in raw(worker, request + b"Host: localhost\r\n\r\n")
            assert b" 403 " in raw(worker, request + b"Host: rebound.example\r\n\r\n")
        assert b" 200 " in raw(worker, b"GET /healthz HTTP/1.1\r\nHost: rebound.example\r\n\r\n")
    with servers.worker(origins=["https://speech.example"], page=str(servers.PAGE)) as worker:
        assert b" 200 " in raw(worker, b"GET / HTTP/1.1\r\nHost: speech.example\r\n\r\n")
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_a_token_without_bearer_and_protocol_true_are_refused():
    with servers.worker(token="secret") as worker:
        assert servers.get(worker.url, "/metrics", {"Authorization": "secret"})[0] == 401
        assert servers.get(worker.url, "/metrics", {"Authorization": "Bearer secret"})[0] == 200
    with servers.worker() as worker, connect(worker.url) as websocket:
        websocket.send('{"type": "hello", "protocol": true}')
        assert json.loads(websocket.recv(timeout=10))["code"] == "message"


def test_the_log_has_a_line_for_each_session_refusal_and_loss():
    with servers.served(stderr=subprocess.PIPE) as (process, url):
        with Session(url) as session:
            session.process(np.zeros((7, 12), np.float32))
        with pytest.raises(websockets.InvalidStatus):
            connect(url, origin="http://speech.example").__enter__()
        websocket = connect(url).__enter__()
        websocket.send('{"type": "hello", "protocol": 1}')
        websocket.recv(timeout=10)
        first = servers.workers_of(process)[0]
        os.kill(first, signal.SIGKILL)
        end = time.monotonic() + 30
        while servers.workers_of(process) in ([], [first]) and time.monotonic() < end:
            time.sleep(0.05)
        process.terminate()
        log = process.stderr.read()
    when = r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3} "
    for line in (
        r"worker 0 session [0-9a-f]{32} opened at frame 0 by 127\.0\.0\.1:\d+$",
        r"worker 0 session [0-9a-f]{32} closed at frame 7 after [0-9.]+ s: end$",
        r"worker 0 refused '/stream' to 127\.0\.0\.1:\d+ with status 403: .*--origin 'http://speech.example'",
        r"server worker 0 ended with code -9 and is started again$",
    ):
        assert re.search(when + line, log, re.MULTILINE), (line, log)


@pytest.mark.exhaustive
def test_a_client_that_does_not_close_leaves_no_traceback():
    with servers.served(stderr=subprocess.PIPE) as (process, url):
        with socket.create_connection(("127.0.0.1", int(re.search(r":(\d+)/", url)[1]))) as stuck:
            stuck.sendall(UPGRADE + HELLO)
            stuck.recv(1 << 16)
            process.terminate()
            assert process.wait(30) == 0
        assert "Traceback" not in process.stderr.read()


BAD_KEYS = {
    "others read it": (b"0123456789abcdef" * 4, 0o644, "chmod 600"),
    "others write it": (b"0123456789abcdef" * 4, 0o666, "chmod 600"),
    "empty": (b"", 0o600, "at least 16 random bytes"),
    "zeros": (b"0" * 64, 0o600, "at least 16 random bytes"),
    "not text": (b"\xff\xfe" * 32, 0o600, "at least 16 random bytes"),
    "short": (b"0123456789", 0o600, "at least 16 random bytes"),
}


@pytest.mark.parametrize("name", BAD_KEYS)
def test_bad_key_files_are_refused_by_name(tmp_path, name):
    content, mode, text = BAD_KEYS[name]
    path = tmp_path / "key"
    path.write_bytes(content)
    path.chmod(mode)
    with pytest.raises(ValueError, match=text) as refused:
        key_of(tmp_path)
    assert str(path) in str(refused.value)


def test_a_key_that_is_a_pipe_or_in_an_open_folder_is_refused(tmp_path):
    os.mkfifo(tmp_path / "key")
    with pytest.raises(ValueError, match="regular file"):
        key_of(tmp_path)
    (tmp_path / "key").unlink()
    tmp_path.chmod(0o777)
    with pytest.raises(ValueError, match="chmod go-w"):
        key_of(tmp_path)


def test_a_store_that_is_no_folder_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").touch()
    (tmp_path / "nowhere").symlink_to(tmp_path / "missing")
    for name in ("pipe", "file", "nowhere"):
        with pytest.raises(ValueError, match=f"the store must be a folder, got .*/{name}"):
            key_of(tmp_path / name)


def test_a_key_is_made_whole_or_not_at_all(tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space"):
            key_of(tmp_path)
    assert not list(tmp_path.iterdir())
    key = key_of(tmp_path)
    assert key_of(tmp_path) == key
    assert (tmp_path / "key").stat().st_mode & 0o777 == 0o600
    assert len(list(tmp_path.iterdir())) == 1


def test_a_limit_beyond_the_descriptors_is_refused(monkeypatch):
    import resource

    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 4096))
    raised = []
    monkeypatch.setattr(resource, "setrlimit", lambda _, pair: raised.append(pair))
    listener.need_descriptors(1024)
    assert raised
    assert 2 * 1024 + listener.STRANGERS < raised[0][0] <= 4096
    with pytest.raises(ValueError, match="--limit 4000 needs"):
        listener.need_descriptors(4000)


def test_a_read_has_few_frames():
    """Those of a read are parsed together, and meanwhile nobody else is served."""

    async def play(worker, connection):
        feed(connection, UPGRADE)
        await settled()
        feed(connection, HELLO)
        await settled()
        assert len(connection.get_buffer(-1)) == READ_BYTES
        feed(connection, client_frame(10, b"") * 1000)
        assert len(connection.get_buffer(-1)) == LEAST_BYTES
        feed(connection, client_frame(2, FRAME + bytes(48 * 6)) * 9)
        assert len(connection.get_buffer(-1)) == READ_BYTES

    wired(play, rate=1e9, credit=64)


def test_many_who_connect_at_once_take_turns():
    """Sessions are served after every few of them; and what is sent to a client does not wait for acknowledgements."""
    turn, accepted = 0, []

    class Counted(listener.Listener):
        def accept(self):
            connection = super().accept()
            accepted.append(turn)
            return connection

    async def main():
        nonlocal turn
        worker = Worker(cnorm.demo_model(), Options(key=key_of(None)))
        sock = worker.listener = Counted("127.0.0.1", 0)
        sock.listen()
        with contextlib.ExitStack() as closing:
            for _ in range(40):
                closing.enter_context(socket.create_connection(sock.getsockname()))
            server = await worker.serving(sock, functools.partial(pages.answer, worker))
            while len(worker.connections) < 40:
                turn += 1
                await asyncio.sleep(0)
            for one in worker.connections:
                assert one.transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        server.close()
        await server.wait_closed()

    asyncio.run(main())
    assert max(accepted.count(one) for one in range(turn + 1)) == listener.ACCEPTS


def test_resets_take_turns():
    """One in a turn: the sessions beside it are served in between."""

    async def play(worker, connection):
        feed(connection, UPGRADE)
        await settled()
        feed(connection, HELLO)
        await settled()
        resets, reset = [], worker.reset
        worker.reset = lambda one: resets.append(one) or reset(one)
        for _ in range(5):
            connection._message('{"type": "reset"}')
        for done in range(5):
            assert len(resets) == done
            worker._turn()

    wired(play, rate=1e9)


def test_metrics_of_a_message():
    with servers.worker() as worker, Session(worker.url) as session:
        session.process(np.zeros((1, 12), np.float32))
        text = servers.get(worker.url, "/metrics")[1]
        assert 'cnorm_message_seconds_count{worker="0"} 1.0' in text
        assert "_created" not in text
