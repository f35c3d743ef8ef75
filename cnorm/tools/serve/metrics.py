"""The Prometheus metrics of a worker."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["Metrics"]

SECONDS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
SESSIONS = (1, 3, 10, 30, 100, 300, 1000)


class Metrics:
    """The metrics of one worker, in a registry of their own.

    Parameters
    ----------
    worker : int
        A label of each metric, to tell the workers behind one port apart.
    sessions, lag : callable
        Return the number of open sessions, and the longest time from reading a frame to its answer.
    """

    def __init__(self, worker: int, sessions: Callable[[], int], lag: Callable[[], float]) -> None:
        from prometheus_client import (
            CollectorRegistry,
            Counter,
            Gauge,
            Histogram,
            ProcessCollector,
            disable_created_metrics,
        )

        disable_created_metrics()  # a series more for each counter, of no use to a worker's restarts
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)

        def made(kind, name, text, labels=(), **options):
            metric = kind(f"cnorm_{name}", text, ("worker", *labels), registry=self.registry, **options)
            return metric if labels else metric.labels(worker)

        self._worker = worker
        made(Gauge, "sessions", "Open sessions.").set_function(sessions)
        made(Gauge, "lag_seconds", "Longest time from reading a frame to its answer, lately.").set_function(lag)
        self.resumed = made(Counter, "resumed", "Sessions continued from a checkpoint.")
        self.evicted = made(Counter, "evicted", "Sessions closed because they were idle.")
        self.shed = made(Counter, "shed", "Sessions closed because the worker was overloaded.")
        self._frames = made(Counter, "frames", "Frames processed.")
        self._messages = made(Counter, "messages", "Messages with frames that were answered.")
        self._seconds = made(
            Histogram, "turn_seconds", "From the first frame received in a turn to the last answer.", buckets=SECONDS
        )
        self._latency = made(
            Histogram, "message_seconds", "From reading a message with frames to its answer.", buckets=SECONDS
        )
        self._together = made(Histogram, "turn_sessions", "Sessions stepped in one turn.", buckets=SESSIONS)
        self._refused = made(Counter, "refused", "Errors sent, by code.", ("code",))

    def turn(self, sessions: int, messages: int, frames: int, seconds: float, waited: list[float]) -> None:
        """Count a turn, in which `sessions` sessions had `messages` messages with `frames` frames in total.

        `waited` has for each session the time from reading its oldest message to its answer.
        """
        self._messages.inc(messages)
        self._frames.inc(frames)
        self._seconds.observe(seconds)
        self._together.observe(sessions)
        for one in waited:
            self._latency.observe(one)

    def refused(self, code: str) -> None:
        self._refused.labels(self._worker, code).inc()

    def text(self) -> bytes:
        from prometheus_client import generate_latest

        return generate_latest(self.registry)
