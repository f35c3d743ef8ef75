"""An open-loop load for `cnorm serve`: each session sends at due times, whether or not outputs have arrived.

With several servers it is a closed loop instead: a session sends as soon as it has its answer, to one server at a time,
which shows how much CPU time a message takes.

The latency of a message is the time from when it was due until its outputs were read, so a server that falls behind is
charged for messages that had to wait (no coordinated omission). The sockets are plain ones and one thread serves them
all, so that the load generator is not the bottleneck. Run as ``python -m cnorm_bench.load JOB``.
"""

import json
import resource
import selectors
import socket
import sys
import time
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np

from cnorm.conversation import NUMBER
from cnorm.layers.embedding import in_tokens
from cnorm_bench.serving_engines import loaded

__all__ = ["Load", "run", "run_slices"]

UPGRADE = (
    "GET /stream HTTP/1.1\r\nHost: {}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)
HELLO = b'\x81\xa0\0\0\0\0{"type": "hello", "protocol": 1}'
MASKED = 128


def frame_head(size):
    """The head of a binary WebSocket frame of a client; its masking key is 0, so that the payload stays as it is."""
    if size < 126:
        return bytes([0x82, MASKED | size]) + bytes(4)
    return bytes([0x82, MASKED | 126]) + size.to_bytes(2, "big") + bytes(4)


class Client:
    """One session: a socket, the received part of an unfinished frame, and the numbers of frames sent and answered."""

    __slots__ = ("answered", "buffer", "phase", "sent", "sock")

    def __init__(self, sock, phase):
        self.sock, self.phase, self.buffer = sock, phase, b""
        self.sent = self.answered = 0


class Load:
    """Sessions with one message due in each period, at phases spread evenly over it.

    Parameters
    ----------
    url : str
    sessions, steps : int
        Number of sessions, frames of a message.
    period : float
        Seconds.
    x : ndarray, shape (messages, steps, inputs), float32
        The messages that each session sends, cyclically.
    expected : list of bytes, optional
        The outputs of each message until they repeat; those of later messages are not compared.
    """

    def __init__(self, url, sessions, period, x, expected=()):
        address = urlsplit(url)
        self.period, self.steps, self.expected = period, x.shape[1], expected
        self.payloads = [one.tobytes() for one in x]
        self.head = frame_head(NUMBER.size + len(self.payloads[0]))
        self.selector = selectors.EpollSelector()
        self.clients = [self._connected(address, k / sessions) for k in range(sessions)]
        self.latencies, self.late, self.wrong = [], [], 0

    def _connected(self, address, phase):
        sock = socket.create_connection((address.hostname, address.port))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.sendall(UPGRADE.format(address.netloc).encode() + HELLO)
        data = b""
        while b'"type": "welcome"' not in data or not data.endswith(b"}"):
            more = sock.recv(65536)
            if not more:
                raise ConnectionError(f"the server refused a session: {data[:100]!r}")
            data += more
        sock.setblocking(False)
        client = Client(sock, phase)
        self.selector.register(sock, selectors.EVENT_READ, client)
        return client

    def run(self, seconds):
        """Send for `seconds`, then wait for the rest for two seconds; return sent and unanswered messages."""
        start = time.perf_counter() + 0.05
        messages = int(seconds / self.period)
        total = messages * len(self.clients)
        interval, sent, received = self.period / len(self.clients), 0, 0
        end = start + seconds + 2.0
        poll, clock = self.selector._selector.poll, time.perf_counter
        by_descriptor = {key.fd: key.data for key in self.selector.get_map().values()}
        while received < total:
            now = clock()
            while sent < total and start + sent * interval <= now:
                self._send(self.clients[sent % len(self.clients)])
                self.late.append(clock() - (start + sent * interval))
                sent += 1
            wait = start + sent * interval - clock() if sent < total else end - clock()
            if sent == total and wait <= 0:
                break
            for descriptor, _ in poll(max(wait, 0)):
                received += self._receive(by_descriptor[descriptor], start)
        return sent, sent - received

    def saturate(self, seconds):
        """Send each session's next message as soon as the last one is answered; return the number of answers."""
        received, end = 0, time.perf_counter() + seconds
        for client in self.clients:
            self._send(client)
        waiting = len(self.clients)
        while waiting:
            for key, _ in self.selector.select():
                answered = self._receive(key.data, 0.0)
                received += answered
                if answered and time.perf_counter() < end:
                    self._send(key.data)
                else:
                    waiting -= answered
        return received

    def _send(self, client):
        payload = self.payloads[client.sent % len(self.payloads)]
        data = self.head + NUMBER.pack(client.sent * self.steps) + payload
        client.sent += 1
        if client.sock.send(data) != len(data):
            raise RuntimeError("the server does not read: a message did not fit the socket's buffer")

    def _receive(self, client, start):
        """Read what has arrived; return how many messages were answered."""
        data = client.buffer + client.sock.recv(65536)
        now, at, count = time.perf_counter(), 0, 0
        while len(data) - at >= 2:
            size, body = data[at + 1], at + 2
            if size == 126:
                size, body = int.from_bytes(data[at + 2 : at + 4], "big"), at + 4
            if len(data) < body + size:
                break
            if data[at] == 0x82:
                message = client.answered
                if message < len(self.expected) and data[body + NUMBER.size : body + size] != self.expected[message]:
                    self.wrong += 1
                self.latencies.append(now - (start + (message + client.phase) * self.period))
                client.answered += 1
                count += 1
            elif data[at] != 0x81:
                raise RuntimeError(f"the server closed a session: {data[body : body + size]!r}")
            at = body + size
        client.buffer = data[at:]
        return count


def recordings(model, steps):
    """Random messages [64, steps, inputs], with token ids where the model takes some."""
    x = np.random.default_rng(0).standard_normal((64, steps, model.input_size), np.float32)
    return in_tokens(x, model.tokens)


def run_slices(servers, sessions, steps, seconds, slice_seconds, model=""):
    """CPU microseconds of a message in each server, one for each slice of `slice_seconds`; the servers take turns.

    `servers` has name -> (address, process id).
    """
    x = recordings(loaded(model), steps)
    loads = {name: Load(url, sessions, 1.0, x) for name, (url, _) in servers.items()}
    found = {name: [] for name in servers}
    for turn in range(1 + max(round(seconds / slice_seconds), 1)):
        for name, (_, pid) in servers.items():
            before = cpu_nanoseconds(pid)
            messages = loads[name].saturate(slice_seconds)
            loads[name].latencies.clear()
            if turn:  # the first one is to warm up
                found[name].append((cpu_nanoseconds(pid) - before) / 1e3 / messages)
    return found


def cpu_nanoseconds(pid):
    """CPU time of a process with one thread."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0])


def run(url, sessions, period, steps, seconds, compare, model=""):
    """A record of one run: percentiles in milliseconds, messages sent, unanswered and wrong."""
    model = loaded(model)
    x = recordings(model, steps)
    stream = model.stream()
    load = Load(url, sessions, period, x, [stream.process(one).tobytes() for one in x] if compare else ())
    cpu = time.process_time()
    sent, unanswered = load.run(seconds)
    cpu = (time.process_time() - cpu) / seconds
    p50, p99, p999 = np.percentile(load.latencies, [50, 99, 99.9]) * 1e3 if load.latencies else [None] * 3
    return {
        "sessions": sessions, "period_ms": period * 1e3, "steps": steps, "p50": p50, "p99": p99, "p99.9": p999,
        "sent": sent, "unanswered": unanswered, "wrong": load.wrong,
        "client_late_p99": float(np.percentile(load.late, 99) * 1e3), "client_cpu": cpu,
    }  # fmt: skip


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    job = json.loads(sys.argv[1])
    print(json.dumps(run_slices(**job) if "servers" in job else run(**job)))
