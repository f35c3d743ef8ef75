"""Latency of `cnorm serve` under an open-loop load, and how many sessions one core serves in time."""

import json
import os
import socket
import subprocess
import sys
import time
from importlib import util
from pathlib import Path

from cnorm.tools.bench.environment import surroundings
from cnorm.tools.bench.serving_engines import ENGINES

__all__ = ["SERVING", "serving", "serving_picture", "serving_tables"]

# (milliseconds of a message, frames in it, sessions): frames of 10 and 20 ms, and chunks of 100 ms with 5 frames
SERVING = (
    (10, 1, (50, 100, 200, 250, 300, 350)),
    (20, 1, (100, 200, 400, 500, 600, 700)),
    (100, 5, (500, 1000, 2000, 2500, 3000, 3500)),
)
SAMPLE_SECONDS = 0.2  # between looks at the server's memory


def serving(sizes=None, *, seconds=5.0, advance=lambda description, total: None):
    """Measure each engine at each number of sessions, server and load on a core each.

    Parameters
    ----------
    sizes : sequence of (milliseconds, frames, sequence of sessions), optional
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
    """
    engines = [name for name in ENGINES if name != "onnxruntime" or util.find_spec("onnxruntime")]
    sizes = sizes or SERVING
    total = len(engines) * sum(len(counts) for _, _, counts in sizes)
    records = []
    for period, steps, counts in sizes:
        for sessions in counts:  # engines in turn, so that all see the same machine
            for engine in engines:
                advance(f"{engine}: {sessions} sessions, {period} ms", total)
                mine = [r for r in records if (r["engine"], r["period_ms"]) == (engine, period)]
                if not mine or mine[-1]["p99"] < 3 * period:
                    records.append(one_run(engine, sessions, period, steps, seconds))
    return {"format": 1, "kind": "serving"} | surroundings() | {"records": records}


def one_run(engine, sessions, period, steps, seconds):
    """A record of one engine in a new server on the first core; the load is on the second, if there is one."""
    cores = sorted(os.sched_getaffinity(0))
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    module = [sys.executable, "-P", "-m", "cnorm.tools.bench.serving_engines", engine, str(port)]
    with subprocess.Popen(module, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        os.sched_setaffinity(server.pid, {cores[0]})
        if server.stdout.readline() != b"ready\n":
            raise RuntimeError(f"the server of {engine} did not start")
        job = {"url": f"ws://127.0.0.1:{port}/stream", "sessions": sessions, "period": period / 1e3, "steps": steps}
        job |= {"seconds": seconds, "compare": engine == "cnorm"}
        load = [sys.executable, "-P", "-m", "cnorm.tools.bench.load", json.dumps(job)]
        cpu, started, memory = used(server.pid)[0], time.perf_counter(), []
        with subprocess.Popen(load, stdout=subprocess.PIPE) as process:
            os.sched_setaffinity(process.pid, {cores[-1]})
            while process.poll() is None:
                memory.append(used(server.pid)[1] / 2**20)
                time.sleep(SAMPLE_SECONDS)
            text = process.stdout.read()
        cpu = (used(server.pid)[0] - cpu) / (time.perf_counter() - started)
        server.stdin.close()
        server.wait(30)
    if process.returncode:
        raise RuntimeError(f"the load on {engine} failed, see above")
    at_half = memory[max(len(memory) - round(seconds / 2 / SAMPLE_SECONDS), 0)]
    return {"engine": engine, "server_cpu": cpu, "mib_at_half": at_half, "mib": memory[-1]} | json.loads(text)


def used(pid):
    """CPU seconds and resident bytes of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    cpu = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return cpu, int(fields[21]) * os.sysconf("SC_PAGE_SIZE")


def most(document, engine, period):
    """The most sessions of an engine whose 99th percentile was within the period and that lost nothing; 0 if none."""
    good = [
        r["sessions"]
        for r in document["records"]
        if (r["engine"], r["period_ms"]) == (engine, period) and r["p99"] <= period and not r["unanswered"]
    ]
    return max(good, default=0)


def serving_tables(console, document):
    """A table for each period: a row for each number of sessions, p50, p99 and p99.9 of each engine."""
    from rich.table import Table

    engines = list(dict.fromkeys(r["engine"] for r in document["records"]))
    for period in dict.fromkeys(r["period_ms"] for r in document["records"]):
        of_period = [r for r in document["records"] if r["period_ms"] == period]
        table = Table(title=f"a message of {of_period[0]['steps']} frames each {period:g} ms: p50, p99, p99.9 in ms")
        table.add_column("sessions", justify="right")
        for engine in engines:
            table.add_column(engine, justify="right")
        for sessions in dict.fromkeys(r["sessions"] for r in of_period):
            found = {r["engine"]: r for r in of_period if r["sessions"] == sessions}
            table.add_row(str(sessions), *(cell(found.get(engine)) for engine in engines))
        table.add_row("in time", *(str(most(document, engine, period)) for engine in engines))
        console.print(table)
    wrong = sum(r["wrong"] for r in document["records"])
    console.print(f"outputs compared with an uninterrupted run: {wrong} wrong; client at most "
                  f"{max(r['client_late_p99'] for r in document['records']):.1f} ms late (p99)")  # fmt: skip


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

    periods = list(dict.fromkeys(r["period_ms"] for r in document["records"]))
    figure, panels = plt.subplots(1, len(periods), figsize=(4.5 * len(periods), 4), layout="constrained", squeeze=False)
    for axes, period in zip(panels[0], periods, strict=True):
        for engine in dict.fromkeys(r["engine"] for r in document["records"]):
            points = [r for r in document["records"] if (r["engine"], r["period_ms"]) == (engine, period)]
            x = [r["sessions"] for r in points]
            axes.plot(x, [r["p99"] for r in points], marker="o", label=engine)
        axes.axhline(period, color="black", lw=1, ls=":")
        axes.set(title=f"a message each {period:g} ms", xlabel="sessions on one core", ylabel="p99, ms", yscale="log")
        axes.grid(alpha=0.3)
    panels[0][0].legend()
    figure.savefig(path, format="png", dpi=110)
    plt.close(figure)
