"""The subcommands of ``cnorm``. Each imports what it needs when it runs."""

import contextlib
import os
import re
import sys
from importlib import util

import click

import cnorm
from cnorm.storage.files import replaces, write_whole
from cnorm.tools import fail, needs
from cnorm.tools.info import of_checkout

__all__ = ["commands", "named_values"]

NO_CHECKOUT = "cnorm bench runs from a checkout of cnorm's source: pip install -e '.[cli]' there"


class NewFile(click.Path):
    """A path that a file can be written to, with one of the endings where any are given."""

    def __init__(self, *endings: str) -> None:
        super().__init__(dir_okay=False)
        self.endings = endings

    def convert(self, value, param, ctx):
        path = super().convert(value, param, ctx)
        if not os.path.isdir(os.path.dirname(path) or "."):
            self.fail(f"folder {os.path.dirname(path)!r} does not exist.", param, ctx)
        if self.endings and not path.lower().endswith(self.endings):
            self.fail(f"must end in {' or '.join(self.endings)}, got {path!r}.", param, ctx)
        return path


FILE, NEW_FILE = click.Path(exists=True, dir_okay=False), NewFile()


class Commands(click.Group):
    """Adds the commands of other packages; those that need onnx say so where it is not installed."""

    def list_commands(self, ctx):
        return sorted([*super().list_commands(ctx), "bench", "explain", "validate"])

    def get_command(self, ctx, name):
        missing = [package for package in ("onnx", "onnxruntime") if util.find_spec(package) is None]
        if missing and name in ("explain", "export", "import", "quantize", "validate"):
            return unusable(name, needs("onnx", missing))
        if name == "bench":
            found = of_checkout("command")
            return found.bench if found else unusable(name, NO_CHECKOUT)
        if name not in ("explain", "validate"):
            return super().get_command(ctx, name)
        from onnx_export.validation import command

        return getattr(command, name)


def unusable(name: str, text: str):
    """A click command that only says why it can't be used."""
    anything = {"ignore_unknown_options": True, "allow_extra_args": True}
    return click.Command(name, anything, help=text, callback=lambda: fail(text))


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="cnorm-runtime")
def commands():
    """Layer normalisation on CPUs: SIMD kernels, a batch-1 recurrent runtime, ONNX export and validation."""


def named_values(kind=str) -> dict:
    """The settings of an option that is given as NAME=VALUE, repeatedly, with values of a kind."""

    def read(context, parameter, values) -> dict:
        found = {}
        for name, equals, value in (given.partition("=") for given in values):
            if not equals:
                raise click.BadParameter(f"wanted {parameter.metavar}, got {name!r}")
            try:
                found[name] = kind(value)
            except ValueError:
                wanted = "an integer" if kind is int else "a number"
                raise click.BadParameter(f"{name} must be {wanted}, got {value!r}") from None
        return found

    return {"multiple": True, "callback": read}


SMALLEST = click.option(
    "--smallest", type=click.IntRange(0), metavar="N",
    help="With --weights: matrices of fewer weights stay float32; else all are rounded.",
)  # fmt: skip


def refuse_smallest(smallest: int | None, weights: str | None) -> None:
    if smallest is not None and weights in (None, "float32"):
        raise click.UsageError("--smallest is an option of --weights int8 and --weights float16")


def refuse_replacing(path: str, name: str, read: str, read_name: str) -> None:
    """Refuse to write over the file that is read; the names are those of the help text."""
    if replaces(path, read):
        raise click.UsageError(f"{name} must be another file than {read_name}, which it would replace")


@contextlib.contextmanager
def one_line():
    """Make errors of files and models the one line of a command that could not do its work."""
    try:
        yield
    except (ImportError, OSError, TypeError, ValueError) as error:
        fail(f"Error: {error}")


@contextlib.contextmanager
def stages(name: str):
    """A line on the terminal's stderr while something long runs: yields what is told its stages, and counts seconds."""
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        line = progress.add_task(name, total=None)
        yield lambda stage: progress.update(line, description=f"{name}: {stage}")


@commands.command()
def info():
    """Versions, instruction sets and what is installed."""
    from cnorm.tools.info import show

    show()


@commands.command(short_help="Write a model as ONNX.")
@click.argument("model", type=FILE)
@click.argument("out", type=NEW_FILE)
@click.option("--form", type=click.Choice(["step", "sequence"]), default="step", show_default=True)
@click.option("--opset", type=int, default=17, show_default=True)
@click.option("--batch", default=None, metavar="NAME", help="Leave the batch open under this name; else it is 1.")
@click.option("--native-ops", is_flag=True, help="Write plain cells as the operators LSTM, GRU and RNN.")
@click.option("--dtype", type=click.Choice(["float32", "float16"]), default="float32", show_default=True)
@click.option("--portable", is_flag=True, help="For other runtimes: constants folded, MatMul and Add instead of Gemm.")
@click.option("--loop", type=click.Choice(["scan", "loop", "unrolled"]), default="scan", show_default=True)
@click.option("--steps", type=int, default=None, metavar="N", help="Fix the steps of a sequence.")
@click.option("--sidecar", is_flag=True, help="Write OUT.json too, with the metadata and the interface.")
@click.option("--check", is_flag=True, help="Compare with onnxruntime and float64; exit with 1 if they differ.")
@click.option("--json", "as_json", is_flag=True, help="With --check: print the report as JSON.")
def export(model, out, batch, check, as_json, **options):
    """Write MODEL (a file that cnorm.load reads) to OUT as ONNX."""
    if as_json and not check:
        raise click.UsageError("--json prints the report of --check: give both")
    refuse_replacing(out, "OUT", model, "MODEL")
    import onnx_export

    with one_line():
        loaded = cnorm.load(model)
        onnx_export.export(loaded, out, batch=1 if batch is None else batch, **options)
    if not as_json:
        click.echo(f"{out}: {options['form']} form, opset {options['opset']}, {options['dtype']}")
    if check:
        from rich.console import Console

        report = onnx_export.check_parity(loaded, out)
        if as_json:
            click.echo(report.to_json())
        else:
            Console().print(report)
        sys.exit(0 if report.ok else 1)


@commands.command("import", short_help="Make a model of a streaming ONNX file.")
@click.argument("file", type=FILE)
@click.argument("out", type=NewFile(".safetensors", ".cnorm"))
@click.option("--weights", type=click.Choice(["float16", "int8"]), help="Round the matrices.")
@SMALLEST
@click.option("--check", "npz", type=FILE, metavar="FRAMES.npz",
              help="Run these recordings, arrays [frames, inputs], too; y has the expected outputs of x. "
                   "OUT is written only if they agree.")  # fmt: skip
@click.option("--table", is_flag=True, help="Print every row of the comparison.")
@click.option("--input", "inputs", metavar="NAME=VALUE", help="An input that is the same for all frames.",
              **named_values(float))  # fmt: skip
@click.option("--state", "states", metavar="IN=OUT", help="Pair a state by hand.", **named_values())
@click.option("--dim", "dims", metavar="NAME=SIZE", help="The size of a symbolic dimension.", **named_values(int))
@click.option("--frame", "frames", metavar="NAME", help="An input that is a part of x.", multiple=True)
@click.option("--output", "outputs", metavar="NAME", help="A value that is y, without what is behind.", multiple=True)
@click.option("--external-data", is_flag=True, help="Also read other data files than FILE.data, in the model's folder.")
@click.option("--timeout", type=click.FloatRange(0, 86400, min_open=True), metavar="SECONDS",
              help="End the child process that reads FILE after this time; else by the file's size.")  # fmt: skip
@click.option("--memory", type=click.FloatRange(0, 1 << 20, min_open=True), metavar="GIB",
              help="The address space of that process; else by the file's size.")  # fmt: skip
def import_(file, out, npz, memory, **given):
    """Make a model of FILE.onnx, prove it against onnxruntime and float64, write OUT (.safetensors or .cnorm)."""
    refuse_smallest(given["smallest"], given["weights"])
    refuse_replacing(out, "OUT", file, "FILE")
    from rich.console import Console

    from onnx_export.importer.command import import_file

    given["memory"] = memory and int(memory * 2**30)
    with one_line(), stages(file) as given["progress"]:
        same = import_file(Console(highlight=False), file, out, npz=npz, **given)
    sys.exit(0 if same else 1)


@commands.command("time", short_help="Time the steps of a model: percentiles and a histogram.")
@click.argument("model", type=FILE)
@click.option("--rate", type=click.FloatRange(0, 1e6, min_open=True), metavar="HZ",
              help="Frames a second; else one after another.")  # fmt: skip
@click.option("--seconds", type=click.FloatRange(0, 86400, min_open=True), default=10.0, show_default=True,
              help="How long.")  # fmt: skip
@click.option("--picture", type=NewFile(".png"), metavar="FILE.png", help="Draw the histogram; needs matplotlib.")
def time(model, rate, seconds, picture):
    """Time each step of a stream of MODEL (safetensors, packed or ONNX): p50, p99, p99.9, max and a histogram."""
    if picture:
        refuse_replacing(picture, "--picture", model, "MODEL")
    from rich.console import Console

    from cnorm.tools import latency

    with one_line():
        loaded = cnorm.load(model)
        with stages(model) as stage:
            stage("timing its steps")
            times = latency.measured(loaded, rate, seconds)
        latency.show(Console(highlight=False), loaded, times, rate)
        if picture:
            latency.picture(times, picture)


@commands.command(short_help="Write a model with int8 or float16 weights.")
@click.argument("model", type=FILE)
@click.argument("out", type=NEW_FILE)
@click.option("--weights", type=click.Choice(["int8", "float16"]), default="int8", show_default=True)
@click.option("--input", "frames", type=FILE, metavar="FRAMES.npz",
              help="Recordings: each array [frames, inputs] is one; else 64 random frames.")  # fmt: skip
@click.option("--smallest", type=click.IntRange(0), metavar="N",
              help="Matrices of fewer weights stay float32; else all are rounded.")  # fmt: skip
@click.option("--picture", type=NewFile(".png"), metavar="FILE.png", help="Draw the error of each frame.")
def quantize(model, out, weights, frames, smallest, picture):
    """Write MODEL (safetensors) to OUT with int8 or float16 weights; show bytes, and errors against float64."""
    for path in filter(None, (out, picture)):
        refuse_replacing(path, path, model, "MODEL")
    from rich.console import Console

    from cnorm.tools import quantize as tool

    with one_line():
        loaded = cnorm.load(model)
        if loaded.weights != "float32":
            fail(f"Error: {model}: its weights are {loaded.weights}, give the float32 model")
        rounded = loaded.with_weights(weights, smallest=smallest)
        report = tool.measured(loaded, rounded, tool.recordings(frames, loaded))
        rounded.save(out)
        if picture:
            tool.picture(report, picture)
    source = frames or "64 random ones; --input FRAMES.npz takes yours"
    tool.show(Console(highlight=False), report, loaded, rounded, source)
    click.echo(f"{out}: {weights} weights, {os.path.getsize(model)} -> {os.path.getsize(out)} bytes")


@commands.command(short_help="Serve sessions of a model over WebSockets.")
@click.argument("model", required=False, type=FILE)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=8765, show_default=True, help="0: any free port.")
@click.option("--workers", type=click.IntRange(1, 256), default=1, show_default=True, help="Processes.")
@click.option("--limit", type=click.IntRange(1), default=1024, show_default=True, help="Sessions of a worker.")
@click.option(
    "--idle",
    type=float,
    default=300.0,
    show_default=True,
    help="Seconds without a frame after which a session is closed.",
)
@click.option(
    "--credit",
    type=click.IntRange(1),
    default=256,
    show_default=True,
    help="Frames that a session may have unanswered.",
)
@click.option("--rate", type=float, default=5000.0, show_default=True, help="Most frames a second of a session.")
@click.option(
    "--lag",
    type=float,
    default=2.0,
    show_default=True,
    help="Seconds to an answer, beyond which a worker is overloaded.",
)
@click.option(
    "--turn-sessions", type=click.IntRange(1), default=64, show_default=True, help="Most sessions stepped together."
)
@click.option("--store", type=click.Path(file_okay=False), help="Folder of the key that seals checkpoints.")
@click.option("--origin", "origins", multiple=True, metavar="URL", help="Web pages that may connect, too.")
@click.option("--token-file", type=click.File(), help="Clients must present the first line of this file.")
@click.option("--certificate", type=FILE, help="For TLS, PEM.")
@click.option("--private-key", type=FILE, help="For TLS, PEM.")
@click.option("--metrics-port", type=click.IntRange(0, 65000), default=0, help="Metrics of worker i at this + i.")
@click.option("--reuse-port", is_flag=True, help="Start although another server has the port.")
@click.option("--demo", is_flag=True, help="Let clients end their worker; without MODEL, the packaged model.")
@click.option("--page", type=click.Path(exists=True, file_okay=False), help="Folder of a web page to serve at /.")
def serve(store, token_file, **given):
    """Serve sessions of MODEL over WebSockets; docs/serving.md describes the protocol."""
    missing = [package for package in ("websockets", "prometheus_client") if util.find_spec(package) is None]
    if missing:
        fail(needs("serve", missing))
    if given["model"] is None and not given["demo"]:
        raise click.UsageError("give MODEL, or --demo for the packaged one")
    import asyncio

    from cnorm.tools.serve import Options, key_of
    from cnorm.tools.serve.logs import log_to_stderr
    from cnorm.tools.serve.supervisor import supervise

    log_to_stderr("server")
    token = "" if token_file is None else token_file.readline().strip()
    if token_file is not None and not token:
        raise click.UsageError("the first line of --token-file is empty")
    try:
        given = {name: value for name, value in given.items() if value is not None}
        options = Options(token=token, key=key_of(store), **given | {"origins": list(given["origins"])})
        code = asyncio.run(supervise(options, lambda url: print(f"serving {url}", flush=True)))
    except (OSError, ValueError) as error:
        fail(f"Error: {error}")
    sys.exit(code)


@commands.command(short_help="Write a packed model, for cnorm.load and for C.")
@click.argument("model", type=FILE)
@click.argument("out", type=NEW_FILE)
@click.option("--weights", type=click.Choice(["float32", "float16", "int8"]), help="Round the matrices first.")
@SMALLEST
@click.option("--c-array", is_flag=True, help="Write OUT as C source, a constant array named after the file.")
def pack(model, out, weights, smallest, c_array):
    """Write MODEL (a file that cnorm.load reads) to OUT as a packed model, for cnorm.load and for C."""
    refuse_smallest(smallest, weights)
    refuse_replacing(out, "OUT", model, "MODEL")
    from cnorm.storage import packed

    with one_line():
        loaded = cnorm.load(model)
        if weights is not None:
            loaded = loaded.with_weights(weights, smallest=smallest)
        data = loaded.packed_bytes()
        if c_array:
            name = re.sub(r"\W", "_", os.path.basename(out).split(".")[0], flags=re.ASCII)
            name = f"model_{name}" if not name or name[0].isdigit() else name
            write_whole(out, packed.c_array(data, name).encode())
        else:
            write_whole(out, data)
    click.echo(f"{out}: {len(data)} bytes, {loaded.weights} weights, identity {loaded.identity.hex()[:12]}")
