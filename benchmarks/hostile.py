"""What clients of `cnorm serve` that mean harm can take: the table in docs/serving.md, "What a client can take".

    python benchmarks/hostile.py [--tls] [--seconds 30] [--runs 5]
    python benchmarks/hostile.py --flood 1000 [--seconds 60]

The first starts a server on one core and eight clients on another: two each send resets, send pongs, open 100 silent
connections every 2 s, and open 100 requests without an end every second. A ninth, the victim, sends a frame each 20 ms;
printed are its latencies, those of 20 requests of /healthz, and the memory of the server's worker. The second sends
single frames as fast as the credit allows, at `--rate`, and prints how many were answered a second.
"""

import argparse
import contextlib
import multiprocessing
import os
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
import servers
from wires import HELLO, UPGRADE, client_frame

import cnorm
from cnorm.client import Session

PERIOD = 0.02  # seconds between the victim's frames
RESET, PONG = client_frame(1, b'{"type": "reset"}'), client_frame(10, b"")


def connection(port: int, context: ssl.SSLContext | None) -> socket.socket:
    """A socket to the server, with TLS if there is a context; operations end after a second."""
    sock = socket.create_connection(("127.0.0.1", port), timeout=1)
    return sock if context is None else context.wrap_socket(sock)


def flooder(port: int, context, end: float, frame: bytes) -> None:
    """Open a session and send the same frame as fast as the server reads; again when it is closed."""
    while time.monotonic() < end:
        with contextlib.suppress(OSError), connection(port, context) as sock:
            sock.sendall(UPGRADE + HELLO)
            sock.settimeout(0.01)
            while time.monotonic() < end:
                with contextlib.suppress(TimeoutError):
                    sock.sendall(frame)
                with contextlib.suppress(TimeoutError):
                    if not sock.recv(65536):
                        break
        time.sleep(0.01)


def opener(port: int, context, end: float, period: float, sent: bytes) -> None:
    """Open 100 connections in each period, send the beginning of something, and keep them until the next."""
    while time.monotonic() < end:
        due = time.monotonic() + period
        with contextlib.ExitStack() as closing:
            for _ in range(100):
                with contextlib.suppress(OSError):
                    sock = closing.enter_context(socket.create_connection(("127.0.0.1", port), timeout=1))
                    if sent:
                        sock = closing.enter_context(context.wrap_socket(sock)) if context else sock
                        sock.sendall(sent)
            time.sleep(max(0.0, due - time.monotonic()))


def attackers(port: int, context, end: float) -> list[tuple]:
    """The eight clients, each a function with its arguments."""
    return 2 * [
        (flooder, port, context, end, 50 * RESET),
        (flooder, port, context, end, 500 * PONG),
        (opener, port, context, end, 2.0, b""),
        (opener, port, context, end, 1.0, UPGRADE[:-2] + b"a: " + bytes(range(97, 122)) * 80),
    ]


def started(play, core: int, *arguments) -> multiprocessing.Process:
    """Run a function in a process that stays on a core, behind the victim, whose own waiting is not to be measured."""

    def main():
        os.sched_setaffinity(0, {core})
        os.nice(10)
        play(*arguments)

    process = multiprocessing.get_context("fork").Process(target=main)
    process.start()
    return process


def latencies(url: str, context, end: float) -> np.ndarray:
    """Seconds from when each of the victim's frames was due until its output had arrived."""
    found, x = [], np.zeros((1, cnorm.demo_model().input_size), np.float32)
    with Session(url, ssl=context) as session:
        session.process(x)
        due = time.monotonic()
        while due < end:
            time.sleep(max(0.0, due - time.monotonic()))
            session.process(x)
            found.append(time.monotonic() - due)
            due += PERIOD
    return np.array(found)


def memory(pid: int) -> float:
    """Resident memory of a process in MiB."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def healthy(url: str, trusted: str, end: float) -> list[float]:
    """Seconds that each of 20 requests of /healthz took, spread over the time; those that failed are missing."""
    context = ssl.create_default_context(cafile=trusted) if trusted else None
    found, pause = [], (end - time.monotonic()) / 21
    for _ in range(20):
        time.sleep(pause)
        start = time.monotonic()
        with contextlib.suppress(OSError):
            assert servers.get(url, "/healthz", context=context) == (200, "ok\n")
            found.append(time.monotonic() - start)
    return found


def certificate(folder: str) -> tuple[list[str], ssl.SSLContext]:
    """Options of a server with a new certificate, and the context of a client that trusts it."""
    key, cert = f"{folder}/key.pem", f"{folder}/cert.pem"
    request = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    request += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", cert]
    subprocess.run(request, check=True, capture_output=True)
    return ["--certificate", cert, "--private-key", key], ssl.create_default_context(cafile=cert)


def attack(seconds: float, tls: bool) -> None:
    """One run with eight hostile clients; prints a line."""
    with contextlib.ExitStack() as closing:
        options, context = certificate(closing.enter_context(tempfile.TemporaryDirectory())) if tls else ([], None)
        process, url = closing.enter_context(
            servers.served(*options, before=("taskset", "-c", "0"), stderr=subprocess.DEVNULL)
        )
        (worker,) = servers.workers_of(process)
        os.sched_setaffinity(0, {1})
        before, end = memory(worker), time.monotonic() + seconds
        unverified = ssl._create_unverified_context() if tls else None
        port = int(url.rsplit(":", 1)[1].split("/")[0])
        running = [started(play, 1, *rest) for play, *rest in attackers(port, unverified, end)]
        asked = closing.enter_context(multiprocessing.Pool(1)).apply_async(healthy, (url, "".join(options[1:2]), end))
        took, most = latencies(url, context, end), memory(worker)
        health = asked.get(30)
        for one in running:
            one.join()
    p50, p99, worst = 1e3 * np.quantile(took, [0.5, 0.99, 1])
    print(
        f"{len(took)} frames: p50 {p50:.1f}, p99 {p99:.1f}, most {worst:.1f} ms; /healthz {len(health)} of 20, at most "
        f"{1e3 * max(health, default=np.nan):.0f} ms; worker {before:.1f} -> {most:.1f} MiB; "
        f"load {os.getloadavg()[0]:.1f}",
        flush=True,
    )


def flood(rate: int, seconds: float) -> None:
    """Single frames as fast as the credit allows; prints the rate of answers and the worker's memory."""
    x = np.zeros((1, cnorm.demo_model().input_size), np.float32)
    with servers.served("--rate", rate, before=("taskset", "-c", "0")) as (process, url), Session(url) as session:
        (worker,) = servers.workers_of(process)
        os.sched_setaffinity(0, {1})
        session.process(x)
        start, before, answered = time.monotonic(), memory(worker), session.frames
        while time.monotonic() < start + seconds:
            session.send(x)
        session.process(x)
        took, answered, after = time.monotonic() - start, session.frames - answered, memory(worker)
    part = answered / took / rate
    print(f"--rate {rate}: {part:.4f} of it over {took:.1f} s; worker {before:.1f} -> {after:.1f} MiB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tls", action="store_true")
    parser.add_argument("--flood", type=int, metavar="RATE", help="single frames at this --rate instead")
    parser.add_argument("--seconds", type=float, default=None, help="of a run: 30, with --flood 60")
    parser.add_argument("--runs", type=int, default=5)
    given = parser.parse_args()
    if given.flood:
        flood(given.flood, given.seconds or 60.0)
        return
    for _ in range(given.runs):
        attack(given.seconds or 30.0, given.tls)


if __name__ == "__main__":
    main()
