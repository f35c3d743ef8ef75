"""The command ``cnorm``. Every subcommand imports what it needs when it runs."""

import os
import sys
from importlib import util


def main():
    """Entry point of the ``cnorm`` command."""
    try:
        import click
        import rich  # noqa: F401
    except ImportError as error:
        print(f"the command line needs {error.name}: pip install 'cnorm-runtime[cli]'", file=sys.stderr)
        sys.exit(2)  # 1 says that a norm is wrong

    class Commands(click.Group):
        """Adds ``validate``, from where it is at home; those that need onnx say so where it is not installed."""

        def list_commands(self, ctx):
            return sorted([*super().list_commands(ctx), "explain", "validate"])

        def get_command(self, ctx, name):
            missing = [package for package in ("onnx", "onnxruntime") if util.find_spec(package) is None]
            if missing and name in ("explain", "export", "validate"):
                text = f"Needs {' and '.join(missing)}: pip install 'cnorm-runtime[onnx]'."
                anything = {"ignore_unknown_options": True, "allow_extra_args": True}
                return click.Command(name, anything, help=text, callback=lambda: refuse(text))
            if name not in ("explain", "validate"):
                return super().get_command(ctx, name)
            from onnx_export.validation import command

            return getattr(command, name)

    def refuse(text):
        click.echo(text, err=True)
        sys.exit(2)

    @click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
    @click.version_option(package_name="cnorm-runtime")
    def cnorm():
        """Layer normalisation on CPUs: right, the same everywhere, fast, small."""

    @cnorm.command()
    @click.option("--out", "out_dir", default="demo_out", show_default=True, help="Folder for demo.onnx and demo.png.")
    def demo(out_dir):
        """Stream real speech through a trained layer-normalised LSTM, frame by frame; then export and prove it."""
        from cnorm.tools.demo import run

        try:
            held = run(out_dir)
        except OSError as error:
            raise click.ClickException(str(error)) from None
        sys.exit(0 if held else 1)

    @cnorm.command()
    @click.option(
        "--out", "out_dir", default="bench_out", show_default=True, help="Folder for the JSON and the picture."
    )
    @click.option("--rnn", is_flag=True, help="Steps of recurrent networks instead of norms of rows.")
    def bench(out_dir, rnn):
        """Measure on this machine, for some minutes: cnorm, what else is importable, and the limits."""
        from cnorm.tools.bench import run

        try:
            run(out_dir=out_dir, rnn=rnn)
        except (OSError, RuntimeError) as error:
            raise click.ClickException(str(error)) from None

    @cnorm.command()
    def info():
        """Versions, instruction sets and what is installed."""
        from cnorm.tools.info import show

        show()

    @cnorm.command()
    @click.argument("model", type=click.Path(exists=True, dir_okay=False))
    @click.argument("out", type=click.Path(dir_okay=False))
    @click.option("--form", type=click.Choice(["step", "sequence"]), default="step", show_default=True)
    @click.option("--opset", type=int, default=17, show_default=True)
    @click.option("--batch", default=None, metavar="NAME", help="Leave the batch open under this name; else it is 1.")
    @click.option("--functions", is_flag=True, help="Make each cell a local function.")
    @click.option("--native-ops", is_flag=True, help="Write plain cells as the operators LSTM, GRU and RNN.")
    @click.option("--dtype", type=click.Choice(["float32", "float16"]), default="float32", show_default=True)
    @click.option("--portable", is_flag=True, help="For other runtimes: weights folded, MatMul and Add, outputs apart.")
    @click.option("--loop", type=click.Choice(["scan", "loop", "unrolled"]), default="scan", show_default=True)
    @click.option("--steps", type=int, default=None, metavar="N", help="Fix the steps of a sequence.")
    @click.option("--sidecar", is_flag=True, help="Write OUT.json too, with the metadata and the interface.")
    @click.option("--check", is_flag=True, help="Compare with onnxruntime and float64; exit 1 if they part.")
    @click.option("--json", "as_json", is_flag=True, help="With --check: print the report as JSON.")
    def export(model, out, batch, check, as_json, **options):
        """Write MODEL (safetensors, from Model.save) to OUT as ONNX."""
        if as_json and not check:
            raise click.UsageError("--json prints the report of --check: give both")
        if os.path.exists(out) and os.path.samefile(model, out):
            raise click.UsageError("OUT must be another file than MODEL, which it would replace")
        import cnorm
        import onnx_export

        try:
            loaded = cnorm.load(model)
            onnx_export.export(loaded, out, batch=1 if batch is None else batch, **options)
        except (OSError, TypeError, ValueError) as error:
            raise click.ClickException(str(error)) from None
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

    try:
        try:
            cnorm()
        finally:
            print(end="", flush=True)  # a full disk is seen here at the latest
    except (OSError, UnicodeEncodeError) as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or what is left is written once more at exit
        print(f"cnorm: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)
