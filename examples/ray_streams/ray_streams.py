"""Streams on a Ray cluster: actors hold sessions, and the gateway can replace any of them without losing a bit.

    python examples/ray_streams/ray_streams.py --kill --picture gap.png

An actor that was killed is restarted by Ray, but its sessions are gone. The gateway has each session's last checkpoint
and the frames since: another actor adopts the checkpoint and processes these frames again. A step has the same bits
on every machine, so the outputs are those of an uninterrupted run; nothing is replicated, logged or agreed upon.
"""

import argparse
import functools
import hashlib
import itertools
import time

import numpy as np
import ray
from ray.exceptions import RayActorError

import cnorm
from cnorm.serving import Checkpoint, Misplaced, Sessions, UnknownSession

CHECKPOINT_FRAMES = 64
PATIENCE_SECONDS = 30.0
KEY = b"the secret of this cluster's actors"
LOST = (RayActorError, UnknownSession, Misplaced)


@ray.remote(max_restarts=-1, num_cpus=0)
class Shard:
    """The sessions of one actor."""

    def __init__(self):
        self.sessions = Sessions(cnorm.demo_model(), limit=10_000)

    def process(self, session, first, x, sealed=None):
        """Outputs of frames, and a sealed checkpoint where one is due; with `sealed` the session begins there."""
        if sealed is not None:
            self.sessions.adopt(Checkpoint.unsealed(sealed, KEY), replace=True)
        elif first == 0 and session not in self.sessions:
            self.sessions.open(session)
        y = self.sessions.process(session, first, x)
        due = first // CHECKPOINT_FRAMES != (first + len(x)) // CHECKPOINT_FRAMES
        return y, self.sessions.checkpoint(session).sealed(KEY) if due else None


class Gateway:
    """Sends the frames of many sessions to shards, and keeps what is needed to continue on another one."""

    def __init__(self, shards):
        self.shards = dict(enumerate(shards))
        self.place = {}  # session -> number of its shard
        self.kept = {}  # session -> (frames, sealed checkpoint or None)
        self.tail = {}  # session -> arrays of frames since the checkpoint
        self.replays = 0

    def ranked(self, session):
        """Shards by rendezvous hashing: if one is lost, only its own sessions move."""
        return sorted(self.shards, key=lambda n: hashlib.sha256(f"{n} {session}".encode()).digest(), reverse=True)

    def process(self, chunks):
        """Outputs of a chunk of frames [count, inputs] for each session, and the seconds until each was there."""
        start, outputs, seconds, sent = time.perf_counter(), {}, {}, {}
        for session, x in chunks.items():
            shard = self.place.setdefault(session, self.ranked(session)[0])
            frames, _ = self.kept.setdefault(session, (0, None))
            tail = self.tail.setdefault(session, [])
            first = frames + sum(map(len, tail))
            tail.append(x)
            sent[session] = first, self.shards[shard].process.remote(session, first, x)
        for session, (first, answer) in sent.items():
            try:
                y, sealed = ray.get(answer)
            except LOST:
                y, sealed = self._replayed(session, len(chunks[session]))
            outputs[session], seconds[session] = y, time.perf_counter() - start
            if sealed is not None:
                self.kept[session], self.tail[session] = (first + len(y), sealed), []
        return outputs, seconds

    def _replayed(self, session, count):
        """The last `count` outputs, from another shard that processes all frames since the checkpoint."""
        self.replays += 1
        frames, sealed = self.kept[session]
        x = np.concatenate(self.tail[session])
        ranked = self.ranked(session)
        end = time.monotonic() + PATIENCE_SECONDS
        for shard in itertools.cycle(ranked[ranked.index(self.place[session]) + 1 :] + ranked):
            try:
                y, new = ray.get(self.shards[shard].process.remote(session, frames, x, sealed))
            except LOST:
                if time.monotonic() > end:
                    raise
                time.sleep(0.05)  # Ray may be restarting it
                continue
            self.place[session] = shard
            return y[-count:], new
        raise AssertionError("there is no shard")


def run(shards, sessions=64, ticks=80, chunk=5, kill=None):
    """Frames and outputs of all sessions, seconds of each tick, replays; `kill` is called in the middle."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((sessions, ticks * chunk, 12), np.float32)
    gateway = Gateway(shards)
    outputs, latencies = [[] for _ in range(sessions)], []
    for tick in range(ticks):
        if kill is not None and tick == ticks // 2:
            kill()
        part = slice(tick * chunk, (tick + 1) * chunk)
        y, seconds = gateway.process({f"session {k}": x[k, part] for k in range(sessions)})
        latencies.append(max(seconds.values()))
        for k in range(sessions):
            outputs[k].append(y[f"session {k}"])
    return x, [np.concatenate(y) for y in outputs], latencies, gateway.replays


def draw(latencies, path):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 3), layout="constrained")
    axes.plot(1e3 * np.array(latencies), color="#0a58ca")
    axes.axvline(len(latencies) // 2, color="black", ls=":", label="actor killed")
    axes.set(xlabel="chunk", ylabel="ms until all sessions have outputs", yscale="log")
    axes.legend()
    figure.savefig(path, dpi=110)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sessions", type=int, default=64)
    parser.add_argument("--kill", action="store_true", help="kill an actor in the middle")
    parser.add_argument("--picture", help="draw the latency to this file")
    options = parser.parse_args()
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    shards = [Shard.remote() for _ in range(2)]
    kill = functools.partial(ray.kill, shards[0], no_restart=False) if options.kill else None
    x, outputs, latencies, replays = run(shards, options.sessions, kill=kill)
    model = cnorm.demo_model()
    same = all(y.tobytes() == model.stream().process(one).tobytes() for one, y in zip(x, outputs, strict=True))
    print(f"{len(outputs)} sessions, {replays} replays, outputs have the bits of uninterrupted runs: {same}")
    print(
        f"a chunk for all sessions: median {1e3 * np.median(latencies):.1f} ms, longest {1e3 * max(latencies):.0f} ms"
    )
    if options.picture:
        draw(latencies, options.picture)
    raise SystemExit(not same)


if __name__ == "__main__":
    main()
