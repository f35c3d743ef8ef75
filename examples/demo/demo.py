"""`make demo`: the packaged network recognises the speakers of real recordings, frame by frame.

`run` prints one section for each of these, and each section is a function below: the network's accuracy after some
frames, the error of its ONNX file, the time of a step in each runtime, the bits of a stream that is moved to another
process and instruction set, the bits on every instruction set, the error of layer_norm at any mean, and how the network
learns another channel while it streams. It writes `demo.onnx` and `demo.png`.

python examples/demo/demo.py [FOLDER]
"""

import hashlib
import io
import os
import subprocess
import sys
from importlib import util
from pathlib import Path
from time import perf_counter

import numpy as np

import cnorm
from cnorm.storage.files import write_whole
from cnorm.tools.info import processor, versions

HERE = Path(__file__).parent
sys.path += [str(HERE), str(HERE.parents[1] / "benchmarks")]

from recordings import recordings  # noqa: E402

from cnorm_bench import runners  # noqa: E402

FRAME_MS = 6.4  # shift from one frame to the next in these recordings
BLUE, ORANGE, GREY = "#0b6e99", "#c2571a", "#b8bec4"


def run(out_dir="demo_out"):
    """Run the whole demo and print it.

    Parameters
    ----------
    out_dir : str or path-like
        Folder for `demo.onnx` and `demo.png`; created if it does not exist.

    Returns
    -------
    bool
        Whether every check passed: the ONNX file's parity, the same bits in every run, layer_norm's error bound.
    """
    from rich.console import Console

    start = perf_counter()
    console = Console(highlight=False)
    out_dir = Path(out_dir)
    out_dir.mkdir(parents=True, exist_ok=True)
    model, (utterances, labels) = cnorm.demo_model(), recordings()

    header(console, model)
    answers = name_speakers(console, model, utterances, labels)
    onnx_model, equal = export(console, model, utterances, out_dir / "demo.onnx")
    times = latency(console, model, onnx_model, utterances)
    held = equal & hand_over(console, model, utterances) & isa_hashes(console, model, utterances, answers)
    held &= precision(console)
    held &= adapt(console, model, utterances, labels)
    picture(console, times, utterances, labels, answers, out_dir / "demo.png")
    console.print(f"\n{verdict(held, 'everything held')} [dim]({perf_counter() - start:.0f} s)[/]")
    return held


def stream_all(model, utterances, after=lambda: None):
    """y [T, 9] of every utterance, each streamed one frame at a time."""
    stream, answers = model.stream(), []
    for utterance in utterances:
        stream.reset()
        answer = np.empty((len(utterance), model.output_size), np.float32)
        for x, y in zip(utterance, answer, strict=True):
            stream.step(x, out=y)
        answers.append(answer)
        after()
    return answers


def header(console, model):
    console.print(f"[bold]cnorm {cnorm.__version__}[/]  layer normalisation on CPUs")
    console.print(f"[dim]{processor()}, running {cnorm.active_isa()} of {', '.join(cnorm.available_isas())}[/]")
    console.print(f"[dim]{model!r}[/]")


def name_speakers(console, model, utterances, labels):
    """Stream the recordings and print the accuracy after some frames. Returns y [T, 9] of every utterance."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.table import Table

    title(console, "Who is speaking?", "nine speakers, one frame every 6.4 ms")
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("utterances")
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("streaming", total=len(utterances))
        start = perf_counter()
        answers = stream_all(model, utterances, lambda: progress.advance(task))
        seconds = perf_counter() - start
    frames = sum(map(len, utterances))
    console.print(f"{frames} frames, {frames * FRAME_MS / 1e3:.0f} s of speech, heard in {seconds:.2f} s")
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("frames heard")
    right = ["named rightly"]
    for heard in 1, 3, 5, 10, None:
        table.add_column(f"{heard or 'all'}", justify="right")
        now = [answer[:heard][-1].argmax() for answer in answers]
        right.append(f"{np.mean(now == labels):.1%}")
    right[-1] = f"[bold]{right[-1]}[/]"
    table.add_row(*right)
    console.print(table)
    return answers


def export(console, model, utterances, path):
    """Export the step model to `path` and check its parity.

    Returns the bytes of the ONNX file, None if onnx or onnxruntime is missing, and whether the check passed.
    """
    from rich.table import Table

    title(console, "The same model as ONNX", "max error of one step against float64")
    if not installed(console, "onnx", "onnxruntime"):
        return None, True
    import onnx_export

    onnx_model = onnx_export.export(model, path)
    reports = [
        onnx_export.check_parity(model, onnx_model),
        onnx_export.check_parity(model, onnx_model, inputs=utterances[::6]),
    ]
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("engine", min_width=17)
    for report in reports:
        table.add_column(f"{report.steps} {report.inputs} steps", justify="right")
    table.add_column("free runs, recorded", justify="right")
    against_float64 = [[r for r in report.rows if r.against == "float64"] for report in reports]
    for engine in dict.fromkeys(row.engine for row in against_float64[0]):
        errors = [max(r.max_abs for r in rows if r.engine == engine) for rows in against_float64]
        drift = [d.max_abs for d in reports[1].drift if (d.engine, d.against) == (engine, "float64")]
        row = [f"{error:.1e}" for error in (*errors, max(drift))]
        table.add_row(engine, *row, style="bold" if engine == "cnorm" else "")
    console.print(table)
    for report in reports:
        console.print(f"[bold {'green' if report.ok else 'red'}]{report.verdict}[/]")
    console.print(f"{path}, {path.stat().st_size / 1000:.0f} kB")
    return onnx_model.SerializeToString(), all(report.ok for report in reports)


def latency(console, model, onnx_model, utterances):
    """Time a step in every installed runtime; print p50, p99, max. Returns label -> microseconds [steps]."""
    from rich.progress import BarColumn, Progress, TextColumn
    from rich.table import Table

    title(console, "How long does a step take?", "all frames, every runtime in turn, one thread")
    with Progress(TextColumn("timing"), BarColumn(), console=console, transient=True) as progress:
        task = progress.add_task("", total=None)
        engines = [runners.Cnorm(model)]
        if onnx_model is not None:
            engines += [runners.OrtRun(onnx_model), runners.OrtBinding(onnx_model)]
        if util.find_spec("torch"):
            from cnorm_bench.contenders import torch_

            engines += torch_.steps(model, None)
        progress.update(task, total=-(-len(utterances) // 10))
        times, _ = runners.latencies(engines, utterances, at_a_time=10, after=lambda: progress.advance(task))

    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("µs a step")
    for name in "p50", "p99", "max", "p50 / cnorm's":
        table.add_column(name, justify="right")
    base = np.median(times["cnorm"])
    for label, t in times.items():
        p50, p99 = np.percentile(t, [50, 99])
        ratio = f"{p50 / base:.1f}x" if label != "cnorm" else ""
        row = label, f"{p50:.1f}", f"{p99:.1f}", f"{t.max():.0f}", ratio
        table.add_row(*row, style="bold" if label == "cnorm" else "")
    console.print(table)
    found = [f"{name} {version}" for name, version in versions("numpy", "onnxruntime", "torch").items()]
    console.print(f"[dim]{', '.join(found)}[/]")
    return times


def hand_over(console, model, utterances):
    """Save a stream half-way, finish it in another process on another instruction set; compare the bits."""
    title(console, "One utterance, two processes", "Stream.save, Model.restore")
    index = max(range(len(utterances)), key=lambda i: len(utterances[i]))
    half = len(utterances[index]) // 2
    (whole,) = stream_all(model, [utterances[index]])
    stream = model.stream()
    stream.process(utterances[index][:half])
    saved = stream.save()

    isa = next((name for name in cnorm.available_isas() if name != cnorm.active_isa()), cnorm.active_isa())
    child = subprocess.run(
        [sys.executable, __file__, "take-over", str(index), str(half)],
        input=saved,
        env={**os.environ, "CNORM_ISA": isa},
        capture_output=True,
        check=False,
    )
    if child.returncode:
        raise RuntimeError(f"the other process failed:\n{child.stderr.decode(errors='replace')}")
    same = child.stdout == whole[half:].tobytes()
    console.print(f"this process, {cnorm.active_isa()}: frames 1 to {half}, saved in {len(saved)} bytes")
    console.print(f"another process, {isa}: restored, frames {half + 1} to {len(whole)}")
    console.print(verdict(same, "the same bits as without a break"))
    return same


def take_over(index, half):
    """Run in the other process: restore the stream from standard input, write the outputs for the remaining frames."""
    stream = cnorm.demo_model().restore(sys.stdin.buffer.read())
    utterances, _ = recordings()
    sys.stdout.buffer.write(stream.process(utterances[index][half:]).tobytes())


def isa_hashes(console, model, utterances, answers):
    """Stream the recordings on every instruction set of this CPU and print the SHA-256 of the outputs of each."""
    title(console, "The same bits on every instruction set", "SHA-256 of all answers to all frames")
    hashes, active = {}, cnorm.active_isa()
    try:
        for isa in cnorm.available_isas():
            cnorm.use_isa(isa)
            hashes[isa] = sha256(stream_all(model, utterances))
    finally:
        cnorm.use_isa(active)
    for isa, digest in hashes.items():
        console.print(f"{isa:10}{digest[:32]}")
    same = set(hashes.values()) == {sha256(answers)}
    console.print(verdict(same, "all agree, and with the first run"))
    return same


def precision(console):
    """Print the largest error of layer norms of mean + N(0, 1) against float64; check cnorm's against its bound."""
    from rich.table import Table

    rows, n, eps = 512, 1024, 1e-5
    title(console, "Right at any mean", f"max absolute error, layer norm of mean + N(0, 1), float32, n = {n}")

    def two_pass(x):
        centred = x - x.mean(-1, keepdims=True)
        return centred / np.sqrt((centred * centred).mean(-1, keepdims=True) + x.dtype.type(eps))

    functions = {"cnorm": lambda x: cnorm.layer_norm(x, eps=eps), "NumPy, two passes": two_pass}
    if util.find_spec("onnx") and util.find_spec("onnxruntime"):
        functions["onnxruntime"] = ort_layer_norm(n, eps)
    means = 0, 1e2, 1e4, 1e6
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("mean")
    for mean in means:
        table.add_column(f"{mean:g}", justify="right")
    noise = np.random.default_rng(0).standard_normal((rows, n))
    inputs = [(mean + noise).astype(np.float32) for mean in means]
    truths = [two_pass(x.astype(np.float64)) for x in inputs]
    good = True
    for label, function in functions.items():
        errors = [np.abs(function(x) - truth) for x, truth in zip(inputs, truths, strict=True)]
        table.add_row(label, *(f"{e.max():.1e}" for e in errors), style="bold" if label == "cnorm" else "")
        if label == "cnorm":
            good = all((e <= 1e-6 * np.maximum(1, np.abs(y))).all() for e, y in zip(errors, truths, strict=True))
    console.print(table)
    console.print(verdict(good, "cnorm within 1e-6 max(1, |y|)"))
    return good


def ort_layer_norm(n, eps):
    """onnxruntime's LayerNormalization of rows of n, without bias, as a function of x."""
    from onnx import TensorProto, helper, numpy_helper

    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["rows", n]) for name in "xy")
    node = helper.make_node("LayerNormalization", ["x", "scale"], ["y"], axis=-1, epsilon=eps, stash_type=1)
    scale = numpy_helper.from_array(np.ones(n, np.float32), "scale")
    graph = helper.make_graph([node], "layer_norm", [x], [y], [scale])
    onnx_model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    session = runners.ort_session(onnx_model.SerializeToString())
    return lambda x: session.run(["y"], {"x": x})[0]


def adapt(console, model, utterances, labels):
    """Learn a channel with other gains and offsets from half of the utterances; print the accuracy on the other half.

    Returns whether it rose.
    """
    title(console, "Another microphone", "cnorm.Learner adapts while it streams, a label after each utterance")
    rng = np.random.default_rng(7)
    gain, offset = rng.uniform(0.6, 1.6, model.input_size), rng.uniform(-0.4, 0.4, model.input_size)
    order = rng.permutation(len(labels))
    arriving, unseen = (
        ([(utterances[i] * gain + offset).astype(np.float32) for i in half], labels[half])
        for half in np.split(order, [len(order) // 2])
    )
    learner, steps, start = cnorm.Learner(model, cnorm.Adam(1e-3, clip=1.0), truncate=32), 0, perf_counter()
    for _ in range(3):
        for frames, label in zip(*arriving, strict=True):
            learner.reset()
            for frame in frames:
                learner.step(frame)
            learner.learn(loss="cross_entropy", target=int(label))
            steps += len(frames)
    micros = (perf_counter() - start) / steps * 1e6
    before, after = (
        np.mean([answer[-1].argmax() for answer in stream_all(one, unseen[0])] == unseen[1])
        for one in (model, learner.model())
    )
    console.print(
        f"named rightly {before:.1%}, after three passes over other utterances [bold]{after:.1%}[/]; "
        f"{micros:.0f} us a step, learning included"
    )
    return bool(after > before)


def picture(console, times, utterances, labels, answers, path):
    """Write the picture: the latency of each runtime, and the posterior of one utterance, frame by frame."""
    title(console, "Picture")
    if not installed(console, "matplotlib"):
        return
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    style = {"axes.spines.top": False, "axes.spines.right": False, "axes.titleweight": "bold"}
    with plt.rc_context(style):
        figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.2), layout="constrained")
        draw_latency(left, times)
        draw_posterior(right, utterances, labels, answers)
        drawing = io.BytesIO()
        figure.savefig(drawing, dpi=110, format="png")
        write_whole(path, drawing.getvalue())
        plt.close(figure)
    console.print(f"{path}: latency, and one utterance frame by frame")


def draw_latency(axes, times):
    """Dots for p50 and rings for p99, of label -> microseconds [steps]."""
    for row, (label, t) in enumerate(reversed(times.items())):
        p50, p99 = np.percentile(t, [50, 99])
        colour = BLUE if label == "cnorm" else "dimgrey"
        axes.plot([p50, p99], [row, row], color=colour, lw=1.2, zorder=1)
        axes.plot(p50, row, "o", color=colour, ms=10)
        axes.plot(p99, row, "o", color=colour, mfc="white", ms=8)
        axes.annotate(f"{p50:.1f}", (p50, row), (0, 9), textcoords="offset points", ha="center", weight="bold")
    axes.set_yticks(range(len(times)), list(times)[::-1])
    axes.set(title="Latency of one step, batch 1, one thread", xlabel="µs (logarithmic): dot p50, ring p99")
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter("")  # labels of minor ticks would overlap
    axes.margins(0.07, 0.15)
    axes.grid(axis="x", alpha=0.3)


def draw_posterior(axes, utterances, labels, answers):
    """Draw the posterior of every speaker after each frame of one utterance.

    It is the longest utterance that the network classifies wrongly at the fifth frame and correctly at the last.
    """
    hard = [i for i, y in enumerate(answers) if y[4].argmax() != labels[i] == y[-1].argmax()]
    index = max(hard, key=lambda i: len(utterances[i]))
    posterior, true = softmax(answers[index]), labels[index]
    frames = np.arange(1, len(posterior) + 1)
    rival = np.delete(posterior, true, axis=1).max(0).argmax()
    rival += rival >= true
    axes.plot(frames, posterior, color=GREY, lw=1)
    axes.plot(frames, posterior[:, rival], color=ORANGE, lw=1.8)
    axes.plot(frames, posterior[:, true], color=BLUE, lw=3)
    above = {"textcoords": "offset points", "weight": "bold"}
    peak = posterior[:, rival].argmax()
    at = frames[peak], posterior[peak, rival]
    axes.annotate(f"speaker {rival + 1}", at, (0, 6), ha="center", color=ORANGE, **above)
    at = frames[-1], posterior[-1, true]
    axes.annotate(f"speaker {true + 1}, who is speaking", at, (0, 6), ha="right", color=BLUE, **above)
    axes.set(title=f"Recording {index + 1}: wrong at first, right in the end")
    axes.set(xlabel="frames heard, one every 6.4 ms", ylabel="posterior of each speaker")
    axes.set(xlim=(1, frames[-1]), ylim=(0, 1.1), yticks=np.linspace(0, 1, 6))
    axes.set_xticks([1, *range(5, len(frames) + 1, 5)])


def softmax(y):
    """Posterior [T, 9] of the outputs y [T, 9]."""
    p = np.exp(y - y.max(1, keepdims=True))
    return p / p.sum(1, keepdims=True)


def title(console, text, explanation=""):
    console.print(f"\n[bold]{text}[/]  [dim]{explanation}[/]")


def verdict(good, text):
    return f"[bold green]{text}[/]" if good else f"[bold red]NOT {text}[/]"


def installed(console, *packages):
    """Whether all packages are installed; if not, print what to install."""
    missing = [package for package in packages if util.find_spec(package) is None]
    if missing:
        console.print(f"[yellow]left out: pip install {' '.join(missing)}[/]")
    return not missing


def sha256(arrays):
    return hashlib.sha256(np.concatenate(arrays).astype("<f4").tobytes()).hexdigest()


if __name__ == "__main__":
    if sys.argv[1:2] == ["take-over"]:
        take_over(*map(int, sys.argv[2:]))
    else:
        sys.exit(0 if run(*sys.argv[1:2]) else 1)
