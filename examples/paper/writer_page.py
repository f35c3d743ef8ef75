"""A page on which `writer.py` writes text by hand, live.

    python examples/paper/writer_page.py

Needs the extra `serve`. A browser sends one line of text over a WebSocket; each pen point is computed when it is due,
at batch 1, and sent at once. Messages are JSON: `{"text", "seed", "caution", "speed"}` to the server, then
`[dx, dy, end of stroke]` for each point, and `{"done", "microseconds"}` or `{"error"}`. Listens on loopback only.
"""

import argparse
import asyncio
import contextlib
import json
import re
import statistics
import time
from http import HTTPStatus
from pathlib import Path

from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response
from writer import Writer

from cnorm.tools.serve.pages import response

HERE = Path(__file__).resolve().parent
FILES = {
    "/": ("writer_page.html", "text/html; charset=utf-8"),
    "/writer_page.js": ("writer_page.js", "text/javascript; charset=utf-8"),
}
WRITE = "/write"  # the path of the WebSocket
CHARACTERS = 40  # the network was trained with 5 to 9
RANGES = {"seed": (0, 999_999), "caution": (0.0, 5.0), "speed": (10.0, 500.0)}  # speed in points a second
DEFAULTS = {"seed": 1, "caution": 2.0, "speed": 60.0}
PENS = 16  # lines that are written at a time
MESSAGE_BYTES, REQUEST_SECONDS = 1024, 10.0
OWN = re.compile(r"http://(127\.0\.0\.1|localhost)(:\d+)?")


def wish(message: str | bytes) -> dict:
    """What an untrusted client wants written; a ValueError says what is wrong with its message."""
    try:
        given = json.loads(message)
    except (ValueError, RecursionError):
        raise ValueError("the message must be JSON") from None
    if not isinstance(given, dict) or not isinstance(given.get("text"), str):
        raise ValueError('the message must be an object with a string "text"')
    text, found = given.pop("text"), DEFAULTS | given
    if unknown := sorted(found.keys() - RANGES.keys()):
        raise ValueError(f"the message must have text, {', '.join(RANGES)} only, got {unknown[0][:20]!r}")
    if len(text) > CHARACTERS:
        raise ValueError(f"text must have at most {CHARACTERS} characters, got {len(text)}")
    for name, (low, high) in RANGES.items():
        value, kinds = found[name], (int,) if name == "seed" else (int, float)
        if type(value) not in kinds or not low <= value <= high:
            kind = "an integer" if name == "seed" else "a number"
            raise ValueError(f"{name} must be {kind} from {low:g} to {high:g}")
    return found | {"text": text}


async def write(connection: ServerConnection, writer: Writer, text: str, speed: float, **how) -> None:
    """Send the points of a line, `speed` of them a second, and at the end their number and median time."""
    points, times, start = writer.write(text, **how), [], time.monotonic()
    while True:
        begin = time.perf_counter()
        point = next(points, None)
        times.append(time.perf_counter() - begin)
        if point is None:
            break
        await connection.send(json.dumps([round(float(value), 4) for value in point]))
        await asyncio.sleep(max(start + len(times) / speed - time.monotonic(), 0))
    done = {"done": len(times) - 1, "microseconds": round(1e6 * statistics.median(times))}
    await connection.send(json.dumps(done))


async def handle(connection: ServerConnection, writer: Writer) -> None:
    """One connection writes one line."""
    with contextlib.suppress(ConnectionClosed, TimeoutError):
        message = await asyncio.wait_for(connection.recv(), REQUEST_SECONDS)
        try:
            await write(connection, writer, **wish(message))
        except ValueError as error:
            await connection.send(json.dumps({"error": str(error)}))


def page(connection: ServerConnection, request: Request) -> Response | None:
    """The answer to a plain HTTP request; None for the WebSocket, unless too many lines are being written."""
    path = request.path.partition("?")[0]
    if path == WRITE:
        full = len(connection.server.connections) >= PENS
        return response(HTTPStatus.SERVICE_UNAVAILABLE, "all pens are writing\n") if full else None
    if path not in FILES:
        return response(HTTPStatus.NOT_FOUND, "there is no such page\n")
    name, kind = FILES[path]
    return response(HTTPStatus.OK, (HERE / name).read_bytes(), kind)


async def run(port: int) -> None:
    writer = Writer.load()
    options = {"process_request": page, "origins": [None, OWN], "max_size": MESSAGE_BYTES, "compression": None}
    async with serve(lambda connection: handle(connection, writer), "127.0.0.1", port, **options) as server:
        print(f"open http://127.0.0.1:{server.sockets[0].getsockname()[1]}/", flush=True)
        await server.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser(description="Serve a page on which text is written by hand, live.")
    parser.add_argument("--port", type=int, default=8766, help="0: any free port (default 8766)")
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(run(parser.parse_args().port))


if __name__ == "__main__":
    main()
