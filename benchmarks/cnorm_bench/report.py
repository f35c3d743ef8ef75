"""Tables and pictures of the documents that `norms` and `recurrent_steps` return; nothing is measured here."""

import math

from cnorm_bench.cases import FORWARD, case_of, ratio

__all__ = ["header", "norms_picture", "norms_tables", "rnn_picture", "rnn_tables"]

# The palette of Okabe and Ito, which is safe for colour-blind readers; the markers differ too.
STYLES = {
    "cnorm": {"color": "#0072B2", "marker": "o", "lw": 2.8, "zorder": 5},
    "np.copyto": {"color": "#000000", "marker": "", "lw": 1.3, "ls": "--"},
    "limit": {"color": "#000000", "marker": "", "lw": 1.3, "ls": "--"},
    "step_many": {"color": "#0072B2", "marker": "o", "lw": 2.8, "zorder": 5},
    "cnorm, int8": {"color": "#0072B2", "marker": "o", "ls": ":", "mfc": "white"},
    "onnxruntime, int8 per tensor": {"color": "#E69F00", "marker": "X", "ls": "--"},
    "step": {"color": "#56B4E9", "marker": "s"},
    "numba": {"color": "#009E73", "marker": "s"},
    "NumPy": {"color": "#CC79A7", "marker": "v"},
    "onnxruntime, IO binding": {"color": "#E69F00", "marker": "D"},
    "onnxruntime, run()": {"color": "#E69F00", "marker": "D", "ls": ":", "mfc": "white"},
    "PyTorch": {"color": "#D55E00", "marker": "^"},
    "PyTorch, eager": {"color": "#D55E00", "marker": "^"},
    "PyTorch, torch.jit": {"color": "#D55E00", "marker": "^", "ls": ":", "mfc": "white"},
}


def header(console, document):
    """Print the processor, the versions and the runtimes that were left out."""
    found = ", ".join(f"{name} {version}" for name, version in document["versions"].items())
    kept = "contenders keep their memory" if document["memory_kept"] else "[red]contenders do not keep their memory[/]"
    console.print(f"[bold]{document['processor']}[/], cnorm runs {document['isa']}, one thread, {kept}")
    console.print(f"[dim]{found}[/]")
    for sentence in document["left_out"]:
        console.print(f"[yellow]{sentence}[/]")


def norms_tables(console, document):
    """One table for each operation: microseconds a call, and the ratio of that time to cnorm's."""
    from rich.table import Table

    for case in dict.fromkeys(map(case_of, document["records"])):
        records = [r for r in document["records"] if case_of(r) == case]
        labels = list(dict.fromkeys(r["contender"] for r in records))
        shapes = list(dict.fromkeys((r["rows"], r["n"]) for r in records))
        times = {(r["contender"], r["rows"], r["n"]): r["microseconds"] for r in records}
        table = Table(
            title=f"\n{case}",
            title_justify="left",
            title_style="bold",
            caption="microseconds a call; x: that many times cnorm's",
            caption_justify="left",
            box=None,
            pad_edge=False,
            padding=(0, 1, 0, 0),
            header_style="dim",
        )
        table.add_column("rows x n")
        for label in labels:
            heading = (
                label.replace("np.", "np.\n").replace("onnx", "onnx-\n").replace(", ", "\n").replace("IO ", "IO\n")
            )
            table.add_column(heading, justify="right", style="bold" if label == "cnorm" else "")
        for rows, n in shapes:
            cells = []
            for label in labels:
                time = times.get((label, rows, n), math.nan)
                against = ratio(document, label, case=case, sizes=[(rows, n)])
                cells.append(_short(time) + ("\n " if label == "cnorm" else f"\n[dim]{_times(against)}[/]"))
            table.add_row(f"{rows}x{n}", *cells)
        over = [shape for shape in shapes if shape[0] > 1] or shapes
        means = [ratio(document, label, case=case, sizes=over) for label in labels]
        table.add_section()
        cells = ["" if label == "cnorm" else _times(m) for label, m in zip(labels, means, strict=True)]
        table.add_row("geometric\nmean" + (",\nrows > 1" if len(over) < len(shapes) else ""), *cells)
        console.print(table)
    if "fresh_memory" in document:
        fresh = document["fresh_memory"]
        found = ", ".join(f"{label} {_short(time)} us" for label, time in fresh["microseconds"].items())
        console.print(
            f"\n{fresh['rows']}x{fresh['n']} into a new array with the allocator as users have it, page faults "
            f"included: {found}"
        )


def rnn_tables(console, document):
    """For each cell and size: percentiles of a step in each contender, its error, the time to read the weights.

    Then the cost of the norms, of a call from Python, and of stepping streams one by one.
    """
    medians = {}
    for limit in document["limits"]:
        shared = {name: limit[name] for name in ("cell", "input", "hidden")}
        records = [r for r in document["records"] if r.items() >= shared.items()]
        medians[tuple(shared.values())] = next(r["p50"] for r in records if r["contender"] == "cnorm")
        console.print(_step_table(limit, records))
    ways = " or ".join(dict.fromkeys(limit["read_by"] for limit in document["limits"]))
    console.print(f"\n[dim]streaming reads measured with {ways}; for plain cells onnxruntime has its own operators[/]")
    both = [(i, h) for cell, i, h in medians if cell == "LN-LSTM" and ("LSTM", i, h) in medians]
    if both:
        cost = ", ".join(f"{i} -> {h} {_times(medians['LN-LSTM', i, h] / medians['LSTM', i, h])}" for i, h in both)
        console.print(f"cnorm's LN-LSTM against its plain LSTM: {cost}")
    shares = ", ".join(
        f"{limit['input']} -> {limit['hidden']} {limit['microseconds'] / limit['product_microseconds']:.0%}"
        for limit in _of_ln_lstm(document["limits"])
    )
    if shares:
        console.print(f"rate at which the products read the weights, of that of the streaming read: {shares}")
    call = document["call"]
    console.print(
        f"a GRU 1 -> 1: {_short(call['step'])} us a step from Python, {_short(call['inside'])} us within process: "
        f"the call costs {_short(call['step'] - call['inside'])} us"
    )
    console.print(_many_table(document["many"]))
    console.print(_lines_table(document["lines"]))


def _step_table(limit, records):
    """One cell at one size: a row for each contender, then for the products alone and the limit."""
    sizes = f"{limit['input']} -> {limit['hidden']}"
    columns = ("", "p50", "p99", "p99.9", "max", "p50 against cnorm", "error")
    table = _table(f"{limit['cell']} step, {sizes}, microseconds over {records[0]['samples']} steps", columns)
    own = next(r["p50"] for r in records if r["contender"] == "cnorm")
    for r in records:
        is_own = r["contender"] == "cnorm"
        cells = [_short(r[name]) for name in ("p50", "p99", "p99.9", "max")]
        cells += ["" if is_own else _times(r["p50"] / own), f"{r['error']:.1e}"]
        table.add_row(r["contender"], *cells, style="bold" if is_own else "")
    for one, kind in ((limit, ""), (limit.get("int8"), "int8 ")):
        if one is None:
            continue
        read = f"limit: {_bytes(one['weight_bytes'])} read at {one['read_gb_per_s']:.0f} GB/s"
        for what, time in ((f"cnorm's {kind}products alone", one["product_microseconds"]), (read, one["microseconds"])):
            table.add_row(what, _short(time), "", "", "", _times(time / own), style="dim")
    return table


def _many_table(rows):
    """Microseconds a stream of `step_many`, and of stepping the streams one by one."""
    title = f"Many streams of an LN-LSTM {rows[0]['input']} -> {rows[0]['hidden']}, microseconds a stream"
    table = _table(title, ("streams", "step_many", "one by one", "faster", "steps a second"), first="right")
    for row in rows:
        many, one = row["step_many"], row["step"]
        table.add_row(str(row["streams"]), _short(many), _short(one), _times(one / many), f"{1e6 / many:,.0f}")
    return table


def _lines_table(found):
    """Plain LSTMs with many streams, over a sequence and in training: of each limit the time, and its share."""
    columns = ("", "a step", "a ns", "FMA peak", f"{found['product_by']}'s product", "weights read")
    table = _table("Plain LSTMs: microseconds a step, multiply-adds a ns, and what limits would take", columns)
    for row in found["rows"]:
        time = row["microseconds"]
        cells = [_short(time), f"{row['multiply_adds'] / time / 1e3:.1f}"]
        for name in ("fma", "product", "read"):
            cells.append("-" if row[name] is None else f"{_short(row[name])} {row[name] / time:4.0%}")
        table.add_row(f"{row['input']} -> {row['hidden']} {row['line']}", *cells)
    return table


def _table(title, columns, first="left"):
    """A table with a bold title and right-aligned figures; `first` aligns the first column."""
    from rich.table import Table

    style = {"title_justify": "left", "title_style": "bold", "header_style": "dim"}
    table = Table(title=f"\n{title}", box=None, pad_edge=False, **style)
    for i, name in enumerate(columns):
        table.add_column(name, justify="right" if i else first)
    return table


def norms_picture(document, file):
    """Latency and memory traffic of `layer_norm` against the size of x, log-log."""
    records = [r for r in document["records"] if case_of(r) == FORWARD]
    records.sort(key=lambda r: r["moved_bytes"])
    time, rate = {}, {}
    for r in records:
        size = r["moved_bytes"]
        time.setdefault(r["contender"], []).append((size, r["microseconds"]))
        rate.setdefault(r["contender"], []).append((size, size / r["microseconds"] / 1e3))
    marks = {f"{level}\n{_bytes(size)}": size for level, size in document["caches"].items()}
    shared = {"xlabel": "x and y together, float32", "marks": marks}
    panels = [
        {"title": "Time of one layer_norm", "ylabel": "microseconds", "lines": time, **shared},
        {"title": "Memory it moves in that time", "ylabel": "GB/s", "lines": rate, **shared},
    ]
    _picture(document, file, panels)


def rnn_picture(document, file):
    """Median and p99.9 of a step against the hidden size, log-log; time a stream against the number of streams."""
    median, slow = {}, {}
    for r in _of_ln_lstm(document["records"]):
        median.setdefault(r["contender"], []).append((r["hidden"], r["p50"]))
        slow.setdefault(r["contender"], []).append((r["hidden"], r["p99.9"]))
    limits = [(r["hidden"], r["microseconds"]) for r in _of_ln_lstm(document["limits"])]
    many = document["many"]
    lines = {name: [(row["streams"], row[name]) for row in many] for name in ("step_many", "step")}
    of = f"LN-LSTM {many[0]['input']} -> {many[0]['hidden']}"
    panels = [
        {"title": "One LN-LSTM step: the median", "xlabel": "hidden units", "ylabel": "microseconds",
         "lines": median | {"limit": limits}},
        {"title": "The slowest thousandth (p99.9)", "xlabel": "hidden units", "ylabel": "microseconds", "lines": slow},
        {"title": "step_many", "xlabel": f"streams of an {of}", "ylabel": "microseconds a stream", "lines": lines,
         "from_zero": True},
    ]  # fmt: skip
    _picture(document, file, panels, shared=2)


def _of_ln_lstm(records):
    return [r for r in records if r["cell"] == "LN-LSTM"]


SHOWN = {
    "limit": "limit: reading the weights once",
    "step": "cnorm, streams one by one",
    "step_many": "cnorm, step_many",
}


def _picture(document, file, panels, *, shared=0):
    """Panels side by side; the first `shared` of them have the same y axis."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    style = {"font.size": 10.5, "axes.spines.top": False, "axes.spines.right": False, "axes.titleweight": "bold"}
    with plt.rc_context(style):
        figure, row = plt.subplots(1, len(panels), figsize=(3 + 4.5 * len(panels), 5.2), layout="constrained")
        named = {}
        for panel, axes in zip(panels, row, strict=True):
            lines, marks = panel["lines"], panel.get("marks", {})
            for label in sorted(lines, key=lambda one: list(STYLES).index(one) if one in STYLES else len(STYLES)):
                (line,) = axes.plot(*zip(*lines[label], strict=True), ms=5, **STYLES.get(label, {"marker": "P"}))
                named.setdefault(SHOWN.get(label, label), line)
            axes.set(xscale="log", yscale="log", title=panel["title"], xlabel=panel["xlabel"], ylabel=panel["ylabel"])
            sizes = sorted({x for points in lines.values() for x, _ in points})
            for text, size in marks.items():
                if sizes[0] < size < sizes[-1]:
                    axes.axvline(size, color="#b8bec4", lw=0.8, zorder=0)
                    axes.annotate(text, (size, 0), (3, 3), xycoords=("data", "axes fraction"), va="bottom",
                                  textcoords="offset points", color="#70767c", fontsize=9)  # fmt: skip
            if panel.get("from_zero"):
                axes.set_yscale("linear")
                axes.set_ylim(bottom=0)
            else:
                axes.yaxis.set_major_locator(LogLocator(subs=(1, 3)))
                axes.yaxis.set_minor_locator(NullLocator())
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axes.grid(axis="y", color="#e4e7ea", lw=0.6)
            axes.xaxis.set_minor_locator(NullLocator())
            ticks = [16**k for k in range(1, 10) if sizes[0] <= 16**k <= sizes[-1]] if marks else sizes
            axes.set_xticks(ticks, [_bytes(t) if marks else f"{t:g}" for t in ticks])
        for axes in row[1:shared]:
            axes.sharey(row[0])
            row[0].autoscale(axis="y")
        figure.legend(named.values(), named.keys(), loc="outside lower center", ncols=4, frameon=False)
        found = ", ".join(f"{name} {version}" for name, version in document["versions"].items() if name != "python")
        figure.suptitle(
            f"{document['processor']}, cnorm runs {document['isa']}, one thread; {found}", fontsize=9, color="#70767c"
        )
        figure.savefig(file, dpi=110, format="png")
        plt.close(figure)


def _short(microseconds):
    digits = 2 if microseconds < 10 else 1 if microseconds < 100 else 0
    return "-" if math.isnan(microseconds) else f"{microseconds:.{digits}f}"


def _times(value):
    return "-" if math.isnan(value) else f"{value:.2f}x"


def _bytes(size):
    unit = max(0, min(3, int(math.log2(size) // 10)))
    return f"{size / 1024**unit:.3g} {('B', 'KiB', 'MiB', 'GiB')[unit]}"
