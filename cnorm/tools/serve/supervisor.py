"""The parent of the worker processes: starts them behind one port, restarts those that are lost, stops them all."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import os
import signal
import sys
from collections.abc import Callable

from cnorm.tools.serve import Options
from cnorm.tools.serve.connection import CLOSE_SECONDS
from cnorm.tools.serve.listener import reserved

__all__ = ["supervise"]

LOG = logging.getLogger("cnorm.serve")
RESTART_SECONDS = 1.0  # before a worker that did not become ready is started again


async def supervise(options: Options, started: Callable[[str], None]) -> int:
    """Run the workers until SIGTERM or SIGINT; return the exit code.

    Parameters
    ----------
    options : Options
    started : callable
        Called with the address of the WebSocket when all workers are ready.
    """
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    # bound but not listening: holds the port, also where the system chose it, while workers are restarted
    with reserved(options.host, options.port, options.reuse_port) as sock:
        options = dataclasses.replace(options, port=sock.getsockname()[1])
        ready = [loop.create_future() for _ in range(options.workers)]
        keepers = [loop.create_task(keep(options, index, ready[index], stop)) for index in range(options.workers)]
        codes = await asyncio.gather(*ready)
        if any(codes):
            stop.set()
        else:
            scheme = "wss" if options.certificate else "ws"
            host = f"[{options.host}]" if ":" in options.host else options.host
            started(f"{scheme}://{host}:{options.port}/stream")
        await asyncio.gather(*keepers)
    return max(codes)


async def keep(options: Options, index: int, ready: asyncio.Future, stop: asyncio.Event) -> None:
    """Run one worker, again and again until `stop`; `ready` is set to 0, or to the exit code if it can't start."""
    stopped = asyncio.ensure_future(stop.wait())
    while not stop.is_set():
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-P", "-m", "cnorm.tools.serve",
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        process.stdin.write(json.dumps({"index": index, "options": dataclasses.asdict(options)}).encode() + b"\n")
        came_up = await process.stdout.readline() == b"ready\n"
        ended = asyncio.ensure_future(process.wait())
        if came_up and not ready.done():
            ready.set_result(0)
        await asyncio.wait({stopped, ended} if came_up else {ended}, return_when=asyncio.FIRST_COMPLETED)
        if not ended.done():
            await end(process, ended)
        elif not ready.done():
            ready.set_result(process.returncode or 1)
            await stop.wait()
        elif not stop.is_set():
            LOG.warning("worker %d ended with code %d and is started again", index, process.returncode)
            if not came_up:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(asyncio.shield(stopped), RESTART_SECONDS)
    stopped.cancel()


async def end(process: asyncio.subprocess.Process, ended: asyncio.Future) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    done, _ = await asyncio.wait({ended}, timeout=CLOSE_SECONDS + 5.0)
    if not done:
        os.kill(process.pid, signal.SIGKILL)
        await ended
