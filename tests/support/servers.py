"""Running servers for tests: a worker in a thread of this process, and `cnorm serve` as a user starts it."""

import asyncio
import contextlib
import dataclasses
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from pathlib import Path

import cnorm
from cnorm.tools.serve import Options, key_of
from cnorm.tools.serve.listener import Listener
from cnorm.tools.serve.worker import Worker

PAGE = Path(__file__).parents[2] / "examples/serve/page"


@contextlib.contextmanager
def worker(model=None, **options):
    """A `Worker` of a model, else the packaged one, in a thread; `url`: of its WebSocket, `loop`: its event loop."""
    options = Options(**{"port": 0, "key": key_of(None)} | options)
    started, box = threading.Event(), {}

    async def main():
        box["loop"], box["stop"] = asyncio.get_running_loop(), asyncio.Event()
        sock = Listener("127.0.0.1", 0, places=options.limit)
        bound = dataclasses.replace(options, port=sock.getsockname()[1])
        one = box["worker"] = Worker(model or cnorm.demo_model(), bound)
        one.loop = box["loop"]
        one.url = f"{'wss' if options.certificate else 'ws'}://127.0.0.1:{one.options.port}/stream"
        await one.run(sock, box["stop"], started.set)

    thread = threading.Thread(target=lambda: asyncio.run(main()))
    thread.start()
    try:
        assert started.wait(30)
        yield box["worker"]
    finally:
        box["loop"].call_soon_threadsafe(box["stop"].set)
        thread.join(30)
        assert not thread.is_alive()


@contextlib.contextmanager
def served(*arguments, before=(), port=0, stderr=None):
    """`cnorm serve --demo`, on a free port if none is given; yields the process and the address of its WebSocket.

    `before` are words before the command, such as ``ip netns exec NAME``.
    """
    command = [
        *before,
        sys.executable,
        "-P",
        "-m",
        "cnorm",
        "serve",
        "--demo",
        "--port",
        str(port),
        *map(str, arguments),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True) as process:
        try:
            line = process.stdout.readline()
            assert line.startswith("serving "), line
            yield process, line.split()[1]
        finally:
            process.terminate()
            process.wait(30)


def free_ports(count):
    """Ports that nothing listens to."""
    with contextlib.ExitStack() as closing:
        socks = [closing.enter_context(socket.socket()) for _ in range(count)]
        for one in socks:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in socks]


def workers_of(process):
    """Process ids of the workers that a `cnorm serve` has started."""
    return [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]


def get(url, path, headers=(), context=None):
    """Status and text of a page of the server whose WebSocket is at `url`."""
    request = urllib.request.Request("http" + url.removeprefix("ws").replace("/stream", path), headers=dict(headers))
    try:
        with urllib.request.urlopen(request, timeout=10, context=context) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
