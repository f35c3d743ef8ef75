"""`cnorm serve`: its protocol, limits and checks, and the two clients, with a worker in this process."""

import asyncio
import base64
import contextlib
import json
import re
import shutil
import socket
import ssl
import subprocess
import sys
import time

import cells
import numpy as np
import pytest
import servers

import cnorm
from cnorm.serving import Checkpoint

websockets = pytest.importorskip("websockets")
pytest.importorskip("prometheus_client")

from websockets.sync.client import connect  # noqa: E402

from cnorm.client import AsyncSession, ServerError, Session  # noqa: E402
from cnorm.conversation import NUMBER  # noqa: E402
from cnorm.tools.serve import worker as worker_module  # noqa: E402


@pytest.fixture(scope="module")
def model():
    return cnorm.demo_model()


@pytest.fixture(scope="module")
def running():
    with servers.worker() as worker:
        yield worker


def frames(count, seed=0):
    return np.random.default_rng(seed).standard_normal((count, 12), np.float32)


def talk(worker, hello=None, **options):
    """A WebSocket after the hello, and the server's first message."""
    websocket = connect(worker.url, compression=None, max_queue=None, **options).__enter__()
    websocket.send(json.dumps(hello or {"type": "hello", "protocol": 1}))
    return websocket, json.loads(websocket.recv(timeout=10))


def binary(first, x):
    return NUMBER.pack(first) + x.tobytes()


def received(websocket):
    """The next message that is no checkpoint; those may come after any output."""
    while True:
        message = websocket.recv(timeout=10)
        if isinstance(message, bytes) or json.loads(message)["type"] != "checkpoint":
            return message


def error_of(websocket):
    """The code of the next error, the messages before it skipped, and the code of the close after it."""
    while True:
        message = websocket.recv(timeout=10)
        if isinstance(message, str) and json.loads(message)["type"] == "error":
            break
    with pytest.raises(websockets.ConnectionClosed) as closed:
        websocket.recv(timeout=10)
    return json.loads(message)["code"], closed.value.rcvd.code


def test_both_clients_have_the_bits_of_one_run(running, model):
    x = frames(900)
    expected = model.stream().process(x)
    with Session(running.url) as session:
        assert (session.input_size, session.output_size) == (12, 9)
        pieces = [session.process(piece) for piece in np.split(x, [1, 6, 300, 600])]
        assert np.concatenate(pieces).tobytes() == expected.tobytes()
        assert session.frames == 900
        session.reset()
        assert session.process(x).tobytes() == expected.tobytes()

    async def main():
        async with AsyncSession(running.url) as session:
            for first in range(0, 900, 90):
                await session.send(x[first : first + 90])
            received = [await session.receive() for _ in range(2)]
            assert np.concatenate([*received, await session.process(x[:0])]).tobytes() == expected.tobytes()
            await session.reset()
            assert (await session.process(x[:5])).tobytes() == expected[:5].tobytes()

    asyncio.run(main())


def test_the_messages_as_documented(running, model):
    x = frames(7)
    websocket, welcome = talk(running)
    assert len(welcome.pop("session")) == 32
    assert base64.b64decode(welcome.pop("checkpoint")).startswith(b"cnorm checkpoint 1\n")
    assert welcome == {
        "type": "welcome", "protocol": 1, "arithmetic": 2,
        "frames": 0, "input_size": 12, "output_size": 9, "credit": 256,
    }  # fmt: skip
    websocket.send(binary(0, x[:3]))
    websocket.send(binary(3, x[3:]))
    first, second = received(websocket), received(websocket)
    expected = model.stream().process(x)
    assert first == binary(0, expected[:3])
    assert second == binary(3, expected[3:])
    websocket.send('{"type": "reset"}')
    assert json.loads(received(websocket))["frames"] == 0
    websocket.send(binary(0, x))
    assert received(websocket) == binary(0, expected)
    websocket.send('{"type": "end"}')
    assert json.loads(received(websocket)) == {"type": "end"}
    with pytest.raises(websockets.ConnectionClosedOK):
        websocket.recv(timeout=10)


def test_checkpoints_arrive_at_the_interval(model):
    with servers.worker(checkpoint_frames=8) as worker:
        websocket, _ = talk(worker)
        x, counts = frames(40), []
        for first in range(40):
            websocket.send(binary(first, x[first : first + 1]))
            message = websocket.recv(timeout=10)
            if isinstance(message, str):
                counts.append(json.loads(message)["frames"])
                message = websocket.recv(timeout=10)
            assert message == binary(first, model.stream().process(x[: first + 1])[-1:])
        assert len(counts) >= 4
        assert set(np.diff(counts)) == {8}


BAD = {
    "not a hello": ['{"type": "reset"}'],
    "another protocol": ['{"type": "hello", "protocol": 2}'],
    "binary first": [binary(0, frames(1))],
    "no JSON": [True, "{"],
    "no object": [True, "[1]"],
    "deep": [True, "[" * 900 + "]" * 900],
    "unknown type": [True, '{"type": "kill"}'],  # only with --demo
    "no frame": [True, NUMBER.pack(0)],
    "no number": [True, b"1234"],
    "a part of a frame": [True, NUMBER.pack(0) + bytes(47)],
    "no Base64": ['{"type": "hello", "protocol": 1, "checkpoint": "*"}'],
    "checkpoint of another type": ['{"type": "hello", "protocol": 1, "checkpoint": 5}'],
}


@pytest.mark.parametrize("name", BAD)
def test_bad_messages_are_refused(running, name):
    with connect(running.url, compression=None) as websocket:
        for message in BAD[name]:
            websocket.send('{"type": "hello", "protocol": 1}' if message is True else message)
        code, close = error_of(websocket)
        assert code == ("checkpoint" if name == "no Base64" else "message")
        assert close == 1008


def masked(payload):
    """A binary WebSocket frame of a client, with the masking key 0."""
    return b"\x82\xfe" + len(payload).to_bytes(2, "big") + bytes(4) + payload


def test_frames_beyond_the_credit_are_refused():
    with servers.worker(credit=8) as worker:
        websocket, welcome = talk(worker)
        assert welcome["credit"] == 8
        websocket.socket.sendall(b"".join(masked(binary(k, frames(4))) for k in range(0, 20, 4)))
        assert error_of(websocket) == ("message", 1008)
        websocket, _ = talk(worker)
        websocket.send(binary(0, frames(9)))
        assert error_of(websocket) == ("message", 1008)


@pytest.mark.parametrize(("x", "code"), [(np.full((2, 12), np.inf, np.float32), "frames"), (frames(2), "misplaced")])
def test_frames_that_cannot_be_processed(running, x, code):
    websocket, _ = talk(running)
    websocket.send(binary(0 if code == "frames" else 5, x))
    assert error_of(websocket) == (code, 1008)


def test_a_wrong_token_id_is_an_error_of_its_session(rng):
    """The client is told, no frame of the message is stepped, and another session goes on."""
    layers = [
        cnorm.Embedding(rng.standard_normal((5, 4), np.float32)),
        cells.random_cell(("GRU", "torch"), rng, 4, 3)[0],
    ]
    model = cnorm.Model(layers)
    x = np.arange(5, dtype=np.float32)[:, None]
    with servers.worker(model) as worker, Session(worker.url) as other:
        first = other.process(x[:2])
        with pytest.raises(ServerError, match="token"), Session(worker.url) as session:
            session.process(np.array([[1], [5]], np.float32))
        np.testing.assert_array_equal(np.concatenate([first, other.process(x[2:])]), model.run(x))


def test_a_message_beyond_the_limit_is_refused(running):
    websocket, _ = talk(running)
    websocket.send(bytes(running.max_bytes + 1))
    with pytest.raises(websockets.ConnectionClosedError) as closed:
        websocket.recv(timeout=10)
    assert closed.value.rcvd.code == 1009


def test_fragments_are_put_together(running, model):
    websocket, _ = talk(running)
    x = frames(3)
    data = binary(0, x)
    websocket.send([data[:5], data[5:50], data[50:]])
    assert received(websocket) == binary(0, model.stream().process(x))
    with contextlib.suppress(websockets.ConnectionClosed):  # the server may refuse them before the last is sent
        websocket.send([bytes(1)] * 100)
    assert error_of(websocket) == ("message", 1008)


def test_frames_that_arrive_together_or_in_parts(running, model):
    """TCP keeps no boundaries: two WebSocket frames may be read at once, and one in several reads."""
    websocket, _ = talk(running)
    x = frames(6)
    expected = model.stream().process(x)
    data = [masked(binary(k, x[k : k + 2])) for k in (0, 2, 4)]
    websocket.socket.sendall(data[0] + data[1] + data[2][:30])
    assert received(websocket) == binary(0, expected[:2])
    assert received(websocket) == binary(2, expected[2:4])
    websocket.socket.sendall(data[2][30:])
    assert received(websocket) == binary(4, expected[4:])


def test_a_turn_has_at_most_the_sessions_of_the_option(model, monkeypatch):
    x = frames(20)
    with servers.worker(turn_sessions=3) as worker, contextlib.ExitStack() as closing:
        clients = [talk(worker)[0] for _ in range(10)]
        for client in clients:
            closing.callback(client.close)
        together, process_many = [], worker.sessions.process_many

        def counted(requests):
            if requests:
                together.append(len(requests))
                time.sleep(0.02)  # meanwhile the other clients send
            return process_many(requests)

        monkeypatch.setattr(worker.sessions, "process_many", counted)
        for k in range(len(x)):
            for client in clients:
                client.send(binary(k, x[k : k + 1]))
        expected = model.stream().process(x)
        for client in clients:
            assert b"".join(received(client)[NUMBER.size :] for _ in x) == expected.tobytes()
    assert max(together) == 3


def test_messages_that_wait_are_processed_together(model):
    """Each has an answer of its own; the credit is beyond the frames that are joined."""
    with servers.worker(rate=1e6) as worker:
        websocket, _ = talk(worker)
        x, firsts = frames(250), list(range(0, 250, 5))
        expected = model.stream().process(x)
        websocket.socket.sendall(b"".join(masked(binary(k, x[k : k + 5])) for k in firsts))
        assert all(received(websocket) == binary(k, expected[k : k + 5]) for k in firsts)
        assert 'cnorm_messages_total{worker="0"} 50.0' in servers.get(worker.url, "/metrics")[1]


@pytest.mark.parametrize(("bad", "code"), [("infinite", "frames"), ("a gap", "misplaced")])
def test_messages_before_a_bad_one_are_answered(running, model, bad, code):
    websocket, _ = talk(running)
    x = frames(20)
    expected = model.stream().process(x)
    if bad == "infinite":
        x[12, 3] = np.inf
    firsts = [0, 5, 10, 15] if bad == "infinite" else [0, 5, 11]
    websocket.socket.sendall(b"".join(masked(binary(k, x[k : k + 5])) for k in firsts))
    assert [received(websocket) for _ in range(2)] == [binary(k, expected[k : k + 5]) for k in (0, 5)]
    assert error_of(websocket) == (code, 1008)


def test_clients_that_close_with_frames_waiting_disturb_no_other(model):
    """Their frames are dropped: an output can't be written after the end of the connection."""
    with servers.worker(rate=1e6) as worker:
        gone, (websocket, _) = [talk(worker)[0] for _ in range(20)], talk(worker)
        x = frames(200)
        for one in gone:
            one.socket.sendall(b"".join(masked(binary(k, x[k : k + 1])) for k in range(100)))
            one.socket.shutdown(socket.SHUT_WR)
        websocket.socket.sendall(b"".join(masked(binary(k, x[k : k + 1])) for k in range(200)))
        expected = model.stream().process(x)
        assert all(received(websocket) == binary(k, expected[k]) for k in range(200))


def test_another_session_continues_from_the_checkpoint_of_one(running, model):
    x = frames(50)
    expected = model.stream().process(x)
    with Session(running.url) as first:
        y = first.process(x[:20])
        checkpoint = running.sealed(running.sessions.checkpoint(first._conversation.session))
        with Session(running.url, checkpoint=checkpoint) as second:
            assert second.frames == 20
            y = np.concatenate([y, second.process(x[20:30])])
            second._socket.socket.shutdown(socket.SHUT_RDWR)
            assert np.concatenate([y, second.process(x[30:])]).tobytes() == expected.tobytes()


def test_forged_checkpoints_are_refused(running, model):
    stream = model.stream()
    forged = Checkpoint("a", 0, stream.save()).sealed(bytes(32))
    _, welcome = talk(running)
    genuine = bytearray(base64.b64decode(welcome["checkpoint"]))
    genuine[40] ^= 1
    for sealed in (forged, bytes(genuine), b""):
        websocket, answer = talk(
            running, {"type": "hello", "protocol": 1, "checkpoint": base64.b64encode(sealed).decode()}
        )
        assert (answer["type"], answer["code"]) == ("error", "checkpoint")
        websocket.close()
    with pytest.raises(ServerError, match="checkpoint"):
        Session(running.url, checkpoint=base64.b64encode(forged).decode()).process(frames(1))


def test_a_stale_checkpoint_continues_from_its_own_frame(running, model):
    """It takes the session over from the connection that still has it, which is closed."""
    x = frames(20)
    expected = model.stream().process(x)
    old, welcome = talk(running)
    old.send(binary(0, x[:6]))
    old.recv(timeout=10)
    stale = running.sealed(running.sessions.checkpoint(welcome["session"]))
    old.send(binary(6, x[6:]))
    assert received(old) == binary(6, expected[6:])
    new, welcome = talk(running, {"type": "hello", "protocol": 1, "checkpoint": stale})
    assert welcome["frames"] == 6
    assert error_of(old) == ("replaced", 1008)
    new.send(binary(6, x[6:]))
    assert received(new) == binary(6, expected[6:])
    new.send(binary(6, x[6:]))
    assert error_of(new) == ("misplaced", 1008)


def test_a_client_continues_after_each_kind_of_loss(running, model):
    x = frames(300)
    expected = model.stream().process(x)
    with Session(running.url, timeout=5) as session:
        y = [session.process(x[:10])]
        session._socket.socket.shutdown(socket.SHUT_RDWR)
        y.append(session.process(x[10:40]))
        session.send(x[40:50])
        session._socket.socket.shutdown(socket.SHUT_RDWR)
        y.append(session.process(x[50:60]))
        running.sessions.export(session._conversation.session)  # as if the worker had forgotten it
        y.append(session.process(x[60:]))
        assert np.concatenate(y).tobytes() == expected.tobytes()


def test_idle_sessions_are_closed_and_continue(model):
    with servers.worker(idle=0.2) as worker:
        x = frames(9)
        with Session(worker.url) as session:
            y = [session.process(x[:4])]
            end = time.monotonic() + 20
            while len(worker.sessions):
                assert time.monotonic() < end
                time.sleep(0.05)
            y.append(session.process(x[4:]))
        assert np.concatenate(y).tobytes() == model.stream().process(x).tobytes()
        assert 'cnorm_evicted_total{worker="0"}' in servers.get(worker.url, "/metrics")[1]


def test_status_503_at_the_limit():
    with servers.worker(limit=2) as worker:
        assert servers.get(worker.url, "/readyz") == (200, "ok\n")
        held = [talk(worker)[0] for _ in range(2)]
        with pytest.raises(websockets.InvalidStatus) as refused:
            connect(worker.url).__enter__()
        assert refused.value.response.status_code == 503
        assert refused.value.response.headers["Retry-After"] == "1"
        assert servers.get(worker.url, "/readyz")[0] == 503
        assert servers.get(worker.url, "/healthz") == (200, "ok\n")
        held[0].close()
        with Session(worker.url) as session:
            assert len(session.process(frames(1))) == 1


def test_an_overloaded_worker_refuses_and_then_sheds_sessions(model, monkeypatch):
    """The newest session is closed with its checkpoint; its client continues once the worker keeps up again."""
    monkeypatch.setattr(worker_module, "SWEEP_SECONDS", 0.2)
    monkeypatch.setattr(worker_module, "SHED_AFTER", 2)
    with servers.worker(lag=0.1, rate=1e6) as worker, Session(worker.url) as oldest, Session(worker.url) as session:
        x, process_many = frames(400), worker.sessions.process_many
        expected = model.stream().process(x)
        y = [session.process(x[:20])]
        assert servers.get(worker.url, "/readyz") == (200, "ok\n")
        monkeypatch.setattr(worker.sessions, "process_many", lambda r: time.sleep(0.15) or process_many(r))
        oldest.process(x[:1])
        assert servers.get(worker.url, "/readyz")[1].startswith("overloaded")
        with pytest.raises(websockets.InvalidStatus) as refused:
            connect(worker.url).__enter__()
        assert refused.value.response.status_code == 503
        end, sent = time.monotonic() + 20, 1
        while shed(worker) == 0:
            assert time.monotonic() < end
            oldest.process(x[sent : sent + 1])
            sent += 1
        monkeypatch.setattr(worker.sessions, "process_many", process_many)
        y.append(session.process(x[20:40]))
        assert np.concatenate(y).tobytes() == expected[:40].tobytes()
        assert oldest.process(x[sent:]).tobytes() == expected[sent:].tobytes()
        assert shed(worker) == 1


def shed(worker):
    text = servers.get(worker.url, "/metrics")[1]
    return float(re.search(r'cnorm_shed_total\{worker="0"\} (\S+)', text)[1])


def test_the_rate_of_a_session_is_limited():
    with servers.worker(rate=200.0, credit=20) as worker, Session(worker.url) as session:
        start = time.monotonic()
        session.process(frames(120))  # 20 at once, then 200 a second
        assert time.monotonic() - start > 0.4


@pytest.mark.exhaustive
def test_single_frames_in_a_window_keep_to_the_rate():
    """Each output is answered by a frame at once: no more than the rate, and one timer however many frames came."""
    rate, credit = 400.0, 64
    with servers.worker(rate=rate, credit=credit) as worker:
        websocket, _ = talk(worker)
        start, answered, timers = time.monotonic(), 0, 0
        for k in range(credit):
            websocket.send(binary(k, frames(1)))
        while time.monotonic() < start + 2:
            received(websocket)
            websocket.send(binary(answered + credit, frames(1)))
            answered += 1
            timers = max(timers, len(worker.loop._scheduled))
        # what the bucket and one read hold is answered at once, the rest at the rate
        assert answered < 1.05 * rate * (time.monotonic() - start) + 2 * credit
        assert timers < 10


def blocked(worker):
    return any(one.paused for one in list(worker.connections))


def test_a_slow_reader_stops_only_itself(model):
    """What waits for it is bounded, and it gets all its outputs once it reads."""
    with servers.worker(credit=100_000, rate=1e9, lag=1.0) as worker:
        x = frames(100_000)
        slow = socket.create_connection(("127.0.0.1", worker.options.port))
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        with connect(worker.url, compression=None, sock=slow, max_queue=1) as websocket:
            websocket.send('{"type": "hello", "protocol": 1}')
            expected, sent = model.stream().process(x), 0
            session = json.loads(websocket.recv(timeout=10))["session"]
            while not blocked(worker):
                more = range(sent, sent + 1000, 100)
                slow.sendall(b"".join(masked(binary(k, x[k : k + 100])) for k in more))
                sent += 1000
                while not blocked(worker) and worker.sessions.checkpoint(session).frames < sent:
                    time.sleep(0.001)
            with Session(worker.url) as session:
                assert session.process(x[:50]).tobytes() == expected[:50].tobytes()
            time.sleep(1.2)
            waiting = [one.transport.get_write_buffer_size() for one in list(worker.connections)]
            assert max(waiting) < (1 << 16) + 100 * 9 * 4 + 2000
            arrived = 0
            while arrived < sent:
                message = websocket.recv(timeout=10)
                if isinstance(message, bytes):
                    y = np.frombuffer(message, np.float32, offset=8).reshape(-1, 9)
                    assert y.tobytes() == expected[arrived : arrived + len(y)].tobytes()
                    arrived += len(y)
            assert worker.lag() < 1.0  # frames that wait for their own client's reading are no overload


def test_origins(running):
    for origin in (f"http://127.0.0.1:{running.options.port}", "http://localhost:1", "https://[::1]"):
        talk(running, origin=origin)[0].close()
    for origin in ("http://example.org", "http://127.0.0.1.example.org", "null"):
        with pytest.raises(websockets.InvalidStatus) as refused:
            connect(running.url, origin=origin).__enter__()
        assert refused.value.response.status_code == 403
    with servers.worker(origins=["https://example.org"]) as worker:
        talk(worker, origin="https://example.org")[0].close()


def test_tokens():
    with servers.worker(token="a b") as worker:
        with Session(worker.url, token="a b") as session:
            session.process(frames(1))
        with connect(worker.url + "?token=a%20b"):
            pass
        for options in ({}, {"token": "wrong"}, {"token": "ä"}):
            with pytest.raises((PermissionError, UnicodeEncodeError)):
                Session(worker.url, **options).process(frames(1))
        assert servers.get(worker.url, "/metrics")[0] == 401
        assert servers.get(worker.url, "/metrics", {"Authorization": "Bearer a b"})[0] == 200
        assert servers.get(worker.url, "/healthz")[0] == 200


@pytest.mark.skipif(not shutil.which("openssl"), reason="makes a certificate with openssl")
def test_tls(tmp_path, model):
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost", "-addext",
         "subjectAltName=IP:127.0.0.1", "-keyout", tmp_path / "key.pem", "-out", tmp_path / "cert.pem"],
        check=True, capture_output=True,
    )  # fmt: skip
    context = ssl.create_default_context(cafile=tmp_path / "cert.pem")
    files = {"certificate": str(tmp_path / "cert.pem"), "private_key": str(tmp_path / "key.pem")}
    x = frames(40)
    with servers.worker(**files) as worker:
        with Session(worker.url, ssl=context) as session:
            assert session.process(x).tobytes() == model.stream().process(x).tobytes()
        assert servers.get(worker.url, "/healthz", context=context) == (200, "ok\n")
        with pytest.raises(ConnectionError, match=r"can't be reached by TLS.*certificate"):
            Session(worker.url, patience=2).process(x)  # no patience makes it trusted


def test_pages(running):
    assert servers.get(running.url, "/nothing")[0] == 404
    assert servers.get(running.url, "/")[0] == 404
    status, text = servers.get(running.url, "/metrics")
    assert status == 200
    for name in ("sessions", "frames_total", "messages_total", "turn_seconds_bucket", "turn_sessions_bucket"):
        assert f"cnorm_{name}" in text
    with socket.create_connection(("127.0.0.1", running.options.port)) as sock:
        sock.sendall(b"POST / HTTP/1.1\r\nHost: a\r\n\r\n")
        assert sock.recv(1000).startswith(b"HTTP/1.1 405")


def test_closed_sessions_leave_nothing():
    with servers.worker() as worker:
        for _ in range(5):
            with Session(worker.url) as session:
                session.process(frames(3))
            talk(worker)[0].socket.close()
        end = time.monotonic() + 10
        while worker.connections and time.monotonic() < end:
            time.sleep(0.01)
        assert not worker.connections
        assert not worker.owners
        assert not len(worker.sessions)


def test_bad_calls_of_a_client(running):
    with Session(running.url) as session:
        with pytest.raises(TypeError, match="float32"):
            session.process(np.zeros((1, 12)))
        with pytest.raises(ValueError, match=r"\(steps, 12\)"):
            session.process(np.zeros((1, 11), np.float32))
        with pytest.raises(ValueError, match="finite"):
            session.process(np.full((1, 12), np.nan, np.float32))
        with pytest.raises(RuntimeError, match="send some first"):
            session.receive()
        session.send(frames(2))
        with pytest.raises(RuntimeError, match="receive the outputs"):
            session.reset()
    with pytest.raises(ServerError, match="404"):
        Session(running.url + "s").process(frames(1))


def test_patience_ends():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))  # not listening
        with pytest.raises(ConnectionError, match=r"answered no frame for 0.*refused"):
            Session(f"ws://127.0.0.1:{sock.getsockname()[1]}/stream", patience=0.2).process(frames(1))


def test_the_client_names_the_missing_extra():
    code = "import sys; sys.modules['websockets'] = None\nimport cnorm.client\ncnorm.client.Session('ws://a')"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
    assert "the extra serve" in done.stderr
