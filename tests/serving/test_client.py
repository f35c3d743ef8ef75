"""The client of `cnorm serve` against servers and proxies that misbehave."""

import asyncio
import contextlib
import json
import threading
import time

import numpy as np
import pytest
import servers

import cnorm

websockets = pytest.importorskip("websockets")
pytest.importorskip("prometheus_client")

from websockets.http11 import Response  # noqa: E402
from websockets.sync.client import connect  # noqa: E402
from websockets.sync.server import serve  # noqa: E402

from cnorm.client import AsyncSession, ServerError, Session  # noqa: E402
from cnorm.conversation import NUMBER, Conversation  # noqa: E402

X = np.ones((3, 12), np.float32)
WELCOME = {
    "type": "welcome", "protocol": 1, "session": "a", "frames": 0, "input_size": 12, "output_size": 9, "credit": 8,
    "checkpoint": "",
}  # fmt: skip


@contextlib.contextmanager
def server(handler, **options):
    """A server of one's own making; yields the address of its WebSocket."""

    def quiet(websocket):
        with contextlib.suppress(websockets.ConnectionClosed):
            handler(websocket)

    with serve(quiet, "127.0.0.1", 0, compression=None, **options) as one:
        thread = threading.Thread(target=one.serve_forever)
        thread.start()
        try:
            yield f"ws://127.0.0.1:{one.socket.getsockname()[1]}/stream"
        finally:
            one.shutdown()
            thread.join()


def told(*messages):
    """A handler that sends these messages after the hello, and then reads on."""

    def handler(websocket):
        websocket.recv()
        for message in messages:
            websocket.send(message if isinstance(message, (str, bytes)) else json.dumps(message))
        for _ in websocket:
            pass

    return handler


def outputs(first, count):
    return NUMBER.pack(first) + bytes(36 * count)


MALFORMED = {
    "no JSON": ["{"],
    "no object": ["[1]"],
    "no type": ["{}"],
    "an unknown type": [{"type": "what"}],
    "deep": ["[" * 100_000],
    "an arithmetic of another type": [WELCOME | {"arithmetic": "two"}],
    "a part of a welcome": [{"type": "welcome"}],
    "sizes of another type": [WELCOME | {"input_size": "12"}],
    "a size of 0": [WELCOME | {"output_size": 0}],
    "no credit": [WELCOME | {"credit": 0}],
    "a checkpoint of another type": [WELCOME | {"checkpoint": 5}],
    "a new session at frame 5": [WELCOME | {"frames": 5}],
    "outputs of a part of a frame": [WELCOME, outputs(0, 1) + b"abc"],
    "outputs without a number": [WELCOME, b"1234"],
    "outputs of no frame": [WELCOME, outputs(0, 0)],
    "outputs that begin too late": [WELCOME, outputs(1, 1)],
    "outputs beyond what was sent": [WELCOME, outputs(0, 4)],
    "a checkpoint beyond the outputs": [WELCOME, {"type": "checkpoint", "frames": 2, "checkpoint": ""}],
    "a checkpoint without frames": [WELCOME, {"type": "checkpoint", "checkpoint": ""}],
    "a reset that was not asked for": [WELCOME, {"type": "reset", "frames": 0, "checkpoint": ""}],
    "an error without a code": [WELCOME, {"type": "error"}],
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_messages_of_a_server_are_server_errors(name):
    with server(told(*MALFORMED[name])) as url, pytest.raises(ServerError):
        Session(url, patience=20).process(X)


def test_a_session_that_continues_elsewhere_than_asked_is_an_error():
    """Frames would be sent under wrong numbers."""
    answers = [[WELCOME, outputs(0, 3), "close"], [WELCOME | {"frames": 2}]]

    def handler(websocket):
        websocket.recv()
        for message in answers.pop(0):
            if message == "close":
                websocket.recv()
                websocket.close(1012)
                return
            websocket.send(message if isinstance(message, bytes) else json.dumps(message))
        for _ in websocket:
            pass

    with server(handler) as url:
        session = Session(url, patience=20)
        session.send(X)
        session.receive()
        with pytest.raises(ServerError, match="continues at frame 2"):
            session.process(X)


def test_patience_ends_although_the_server_talks():
    """Checkpoints without outputs are no progress."""

    def handler(websocket):
        websocket.recv()
        websocket.send(json.dumps(WELCOME))
        while True:
            websocket.send(json.dumps({"type": "checkpoint", "frames": 0, "checkpoint": ""}))
            time.sleep(0.01)

    with server(handler) as url:
        with pytest.raises(ConnectionError, match=r"answered no frame for 0\.5.*: no output"):
            Session(url, patience=0.5).process(X)

        async def wait():
            async with AsyncSession(url, patience=0.5) as session:
                await session.process(X)

        with pytest.raises(ConnectionError, match=r"answered no frame for 0\.5.*: no output"):
            asyncio.run(wait())


@pytest.mark.parametrize("status", [502, 503, 504])
def test_a_client_retries_while_a_proxy_has_no_server(status):
    """A proxy answers so while the server restarts."""
    model, refusals = cnorm.demo_model(), [status] * 3
    with servers.worker() as worker:

        def refuse(connection, request):
            return Response(refusals.pop(), "later", websockets.Headers(), b"") if refusals else None

        def forward(websocket):
            with connect(worker.url, compression=None) as inner:

                def back():
                    with contextlib.suppress(websockets.ConnectionClosed):
                        for message in inner:
                            websocket.send(message)

                thread = threading.Thread(target=back)
                thread.start()
                for message in websocket:
                    inner.send(message)
            thread.join()

        with server(forward, process_request=refuse) as url, Session(url) as session:
            assert session.process(X).tobytes() == model.stream().process(X).tobytes()
    assert not refusals


@pytest.mark.parametrize(("status", "hint"), [(505, "Upgrade"), (426, "Upgrade"), (404, "/stream"), (500, "500")])
def test_other_statuses_say_what_may_be_wrong(status, hint):
    def refuse(connection, request):
        return Response(status, "no", websockets.Headers(), b"")

    with server(told(), process_request=refuse) as url, pytest.raises(ServerError, match=hint):
        Session(url).process(X)


def test_an_address_without_path_gets_that_of_the_server():
    with servers.worker() as worker:
        for url in (worker.url.removesuffix("/stream"), worker.url.removesuffix("stream")):
            with Session(url) as session:
                assert len(session.process(X)) == 3
    for url in ("http://127.0.0.1:8765/stream", "127.0.0.1:8765", ""):
        with pytest.raises(ValueError, match="url must be"):
            Session(url)


def test_a_checkpoint_of_another_key_names_the_option():
    with servers.worker() as worker, Session(worker.url) as session:
        session.process(X)
        checkpoint = session.checkpoint
    with servers.worker() as worker, pytest.raises(ServerError, match="--store"):
        Session(worker.url, checkpoint=checkpoint).process(X)


def test_a_session_does_not_continue_with_another_arithmetic():
    conversation = Conversation()
    conversation.receive(json.dumps(WELCOME | {"arithmetic": 2}))
    with pytest.raises(ServerError, match="generation 3 of the arithmetic") as refused:
        conversation.receive(json.dumps(WELCOME | {"arithmetic": 3}))
    assert refused.value.code == "arithmetic"
