"""Latency of `cnorm serve` under an open-loop load, and how many sessions one core serves in time."""

import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from importlib import util
from pathlib import Path

import numpy as np

from cnorm_bench.environment import settled_environment, surroundings
from cnorm_bench.serving_engines import ENGINES, Nothing, loaded

__all__ = ["SERVING", "serving", "serving_picture", "serving_tables"]

# (milliseconds of a message, frames in it, sessions): frames of 10 and 20 ms, and chunks of 100 ms of either
SERVING = (
    (10, 1, (50, 100, 200, 250, 300, 350)),
    (20, 1, (100, 200, 400, 500, 600, 700)),
    (100, 5, (500, 1000, 2000, 2500, 3000, 3500)),
    (100, 10, (500, 1000, 1500, 2000, 2500, 3000)),
)
SAMPLE_SECONDS = 0.2  # between looks at the server's memory
SLICE_SECONDS, CLOSED_SESSIONS = 0.25, 500  # of `message_times`
TOGETHER = (1, 4, 16, 64, 256)  # sessions of `engine_times`


def serving(sizes=None, *, model="", seconds=5.0, advance=lambda description, total: None):
    """Measure each engine at each number of sessions, server and load on a core each.

    Parameters
    ----------
    sizes : sequence of (milliseconds, frames, sequence of sessions), optional
    model : str
        Path of a model; empty for the packaged one.
    seconds : float
        For each run.
    advance : callable
        As in `norms`.

    Returns
    -------
    dict
        "records": one for each engine, period and number of sessions, in ascending order up to the first one with a
        99th percentile beyond three periods: milliseconds from when a message was due until its outputs had
        arrived, messages unanswered or wrong, the server's CPU time per second, its memory after half of the time
        and at the end.
        "messages": for each engine and number of frames the CPU time of a message, see `message_times`.
        "alone": for each engine, number of frames and of sessions the time of a session, see `engine_times`.
    """
    engines = [name for name in ENGINES if name != "onnxruntime" or util.find_spec("onnxruntime")]
    sizes = sizes or SERVING
    frames = sorted({steps for _, steps, _ in sizes})
    total = len(engines) * sum(len(counts) for _, _, counts in sizes) + 2 * len(frames)
    messages, alone, records = [], [], []
    for steps in frames:
        advance(f"CPU time of a message of {steps} frames", total)
        messages += message_times(model, engines, steps, seconds)
        advance(f"the engines alone, {steps} frames", total)
        alone += engine_times(loaded(model), [name for name in engines if ENGINES[name] is not Nothing], steps)
    for period, steps, counts in sizes:
        for sessions in counts:  # engines in turn, so that all see the same machine
            for engine in engines:
                advance(f"{engine}: {sessions} sessions, {period} ms", total)
                mine = [r for r in records if of(r, engine, period, steps)]
                if not mine or mine[-1]["p99"] < 3 * period:
                    records.append(one_run(model, engine, sessions, (period, steps), seconds))
    found = {"model": model or "packaged", "messages": messages, "alone": alone, "records": records}
    return {"format": 1, "kind": "serving"} | surroundings() | found


@contextlib.contextmanager
def server(engine, model):
    """A new server of an engine on the first core; yields its process id and address."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    module = [sys.executable, "-P", "-m", "cnorm_bench.serving_engines", engine, str(port), model]
    with subprocess.Popen(module, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=settled_environment()) as process:
        os.sched_setaffinity(process.pid, {min(os.sched_getaffinity(0))})
        if process.stdout.readline() != b"ready\n":
            raise RuntimeError(f"the server of {engine} did not start")
        yield process.pid, f"ws://127.0.0.1:{port}/stream"
        process.stdin.close()
        process.wait(30)


def loading(job):
    """The load of a job in a process on the last core."""
    command = [sys.executable, "-P", "-m", "cnorm_bench.load", json.dumps(job)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env=settled_environment())
    os.sched_setaffinity(process.pid, {max(os.sched_getaffinity(0))})
    return process


def result(process, what):
    """The document that a load has printed."""
    text = process.stdout.read()
    if process.wait():
        raise RuntimeError(f"the load on {what} failed, see above")
    return json.loads(text)


def one_run(model, engine, sessions, message, seconds):
    """A record of one engine in a new server, under an open-loop load; `message` has milliseconds and frames."""
    period, steps = message
    job = {"model": model, "sessions": sessions, "period": period / 1e3, "steps": steps, "seconds": seconds}
    with server(engine, model) as (pid, url):
        cpu, started, memory = used(pid)[0], time.perf_counter(), []
        with loading(job | {"url": url, "compare": engine == "cnorm"}) as process:
            while process.poll() is None:
                memory.append(used(pid)[1] / 2**20)
                time.sleep(SAMPLE_SECONDS)
            record = result(process, engine)
        cpu = (used(pid)[0] - cpu) / (time.perf_counter() - started)
    at_half = memory[-max(round(seconds / 2 / SAMPLE_SECONDS), 1) :][0]
    return {"engine": engine, "server_cpu": cpu, "mib_at_half": at_half, "mib": memory[-1]} | record


def message_times(model, engines, steps, seconds, sessions=CLOSED_SESSIONS):
    """CPU time of a message in microseconds, for each engine: the median and the least of slices of time.

    A session sends as soon as it has its answer, so each server is always busy; the servers take turns, so that all see
    the same machine. The period of a message divided by this time is the number of sessions that fill a core.
    """
    with contextlib.ExitStack() as running:
        servers = {engine: running.enter_context(server(engine, model))[::-1] for engine in engines}
        job = {"model": model, "servers": servers, "sessions": sessions, "steps": steps}
        with loading(job | {"seconds": seconds, "slice_seconds": SLICE_SECONDS}) as process:
            found = result(process, "all engines")
    return [
        {"engine": engine, "steps": steps, "microseconds": statistics.median(times), "least": min(times)}
        for engine, times in found.items()
    ]


def engine_times(model, engines, steps, together=TOGETHER, repeats=30):
    """Microseconds of a session in `process_many`, without a server, for each engine and number of sessions."""
    found, rng = [], np.random.default_rng(0)
    for engine in engines:
        sessions = ENGINES[engine](model, limit=max(together), idle=300.0)
        for i in range(max(together)):
            sessions.open(str(i))
        done = dict.fromkeys(range(max(together)), 0)
        for count in together:
            x, times = rng.standard_normal((count, steps, model.input_size), np.float32), []
            for _ in range(repeats):
                requests = [(str(i), done[i], x[i]) for i in range(count)]
                start = time.perf_counter()
                sessions.process_many(requests)
                times.append(time.perf_counter() - start)
                done |= {i: done[i] + steps for i in range(count)}
            microseconds = statistics.median(times) / count * 1e6
            found.append({"engine": engine, "steps": steps, "sessions": count, "microseconds": microseconds})
    return found


def used(pid):
    """CPU seconds and resident bytes of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    cpu = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return cpu, int(fields[21]) * os.sysconf("SC_PAGE_SIZE")


def of(record, engine, period, steps):
    return (record["engine"], record["period_ms"], record["steps"]) == (engine, period, steps)


def most(document, engine, period, steps):
    """The most sessions of an engine whose 99th percentile was within the period and that lost nothing; 0 if none."""
    mine = [r for r in document["records"] if of(r, engine, period, steps)]
    return max((r["sessions"] for r in mine if r["p99"] <= period and not r["unanswered"]), default=0)


def loads(document):
    """(milliseconds of a message, frames in it) of each load that was measured."""
    return list(dict.fromkeys((r["period_ms"], r["steps"]) for r in document["records"]))


def serving_tables(console, document):
    """CPU time of a message and of the engines alone; for each load p50, p99 and p99.9 by the number of sessions."""
    from rich.table import Table

    engines = list(dict.fromkeys(r["engine"] for r in document["records"]))
    for key, title, row in (
        ("messages", "CPU time of a message in us: median (least)", ("frames",)),
        ("alone", "the engine without a server, us a session", ("frames", "sessions together")),
    ):
        table = Table(title=title)
        for name in (*row, *engines):
            table.add_column(name, justify="right")
        for place in dict.fromkeys((r["steps"], r.get("sessions")) for r in document[key]):
            found = {r["engine"]: r for r in document[key] if (r["steps"], r.get("sessions")) == place}
            table.add_row(*map(str, place[: len(row)]), *(spent(found.get(engine)) for engine in engines))
        console.print(table)
    for period, steps in loads(document):
        table = Table(title=f"a message of {steps} frames each {period:g} ms: p50, p99, p99.9 in ms")
        for name in ("sessions", *engines):
            table.add_column(name, justify="right")
        of_load = [r for r in document["records"] if (r["period_ms"], r["steps"]) == (period, steps)]
        for sessions in dict.fromkeys(r["sessions"] for r in of_load):
            found = {r["engine"]: r for r in of_load if r["sessions"] == sessions}
            table.add_row(str(sessions), *(cell(found.get(engine)) for engine in engines))
        table.add_row("in time", *(str(most(document, engine, period, steps)) for engine in engines))
        console.print(table)
    wrong = sum(r["wrong"] for r in document["records"])
    console.print(f"outputs compared with an uninterrupted run: {wrong} wrong; client at most "
                  f"{max(r['client_late_p99'] for r in document['records']):.1f} ms late (p99)")  # fmt: skip


def spent(record):
    least = f" ({record['least']:.1f})" if record and "least" in record else ""
    return "-" if record is None else f"{record['microseconds']:.1f}{least}"


def cell(record):
    if record is None:
        return "-"
    lost = f", {record['unanswered']} lost" if record["unanswered"] else ""
    return f"{record['p50']:.1f}  {record['p99']:.1f}  {record['p99.9']:.1f}{lost}"


def serving_picture(document, path):
    """p99 against the number of sessions, a panel for each period."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    each = loads(document)
    figure, panels = plt.subplots(1, len(each), figsize=(4.5 * len(each), 4), layout="constrained", squeeze=False)
    for axes, (period, steps) in zip(panels[0], each, strict=True):
        for engine in dict.fromkeys(r["engine"] for r in document["records"]):
            points = [r for r in document["records"] if of(r, engine, period, steps)]
            x = [r["sessions"] for r in points]
            axes.plot(x, [r["p99"] for r in points], marker="o", label=engine)
        axes.axhline(period, color="black", lw=1, ls=":")
        title = f"{steps} frames each {period:g} ms" if steps > 1 else f"a frame each {period:g} ms"
        axes.set(title=title, xlabel="sessions on one core", ylabel="p99, ms", yscale="log")
        axes.grid(alpha=0.3)
    panels[0][0].legend()
    figure.savefig(path, format="png", dpi=110)
    plt.close(figure)
