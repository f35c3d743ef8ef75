"""`cnorm validate MODEL.onnx`."""

from __future__ import annotations

import errno
import math
import sys
from pathlib import Path

import click

from cnorm.text import printable
from onnx_export.validation import replaces
from onnx_export.validation import validate as run_validation
from onnx_export.validation.report import CANNOT, SOUND, show

_POSITIVE = click.FloatRange(0, min_open=True)
_MOST_MEMORY = 2.0**30  # GiB: any more is the same


def _sizes(_context, _option, values: tuple[str, ...]) -> dict[str, int]:
    sizes = {}
    for value in values:
        name, _, size = value.rpartition("=")
        if not name or not size.isascii() or not size.isdecimal() or not 0 < int(size) < 2**31:
            raise click.BadParameter(f"{value!r} given, NAME=SIZE wanted")
        sizes[name] = int(size)
    return sizes


def _finite(_context, _option, value: float) -> float:
    if not math.isfinite(value):
        raise click.BadParameter(f"{value} given, a finite number wanted")
    return value


@click.command(name="validate")
@click.argument("model", type=click.Path(path_type=Path))
@click.option("--input", type=click.Path(path_type=Path), help="Inputs: an .npz by name, or an .npy for the only one.")
@click.option("--batch", type=click.IntRange(1), default=1, show_default=True, help="Size of a free first dimension.")
@click.option("--dim", type=click.IntRange(1), default=8, show_default=True, help="Size of other free dimensions.")
@click.option("--size", multiple=True, callback=_sizes, metavar="NAME=SIZE", help="Size of a free dimension by name.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Seed of generated inputs.")
@click.option("--external-data", is_flag=True, help="Allow tensors in other files in the model's folder.")
@click.option("--data-root", type=click.Path(path_type=Path), help="The folder external files must lie in instead.")
@click.option("--strict", is_flag=True, help="Fail (1) on risky norms and warnings, and (2) on norms not exercised.")
@click.option("--require-norm", is_flag=True, help="Fail (2) where no norm was judged.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON instead of a table.")
@click.option("--html", type=click.Path(path_type=Path), help="Write the report as one HTML file.")
@click.option("--fix", type=click.Path(path_type=Path), help="Write a copy with LayerNormalization operators.")
@click.option("--timeout", type=_POSITIVE, callback=_finite, default=600.0, show_default=True, help="Seconds.")
@click.option("--memory", type=click.FloatRange(0.5), callback=_finite, default=8.0, show_default=True, help="GiB.")
@click.pass_context
def validate(context, model, size, strict, require_norm, as_json, html, memory, **options) -> None:
    """Check that an ONNX file computes the layer norms it claims to.

    \b
    Exit codes: 0 all that was exercised is sound; 1 a wrong or inaccurate norm,
    or an error lint; 2 cannot validate, or no norm was exercised; 3 refused for safety.
    """
    from rich.console import Console

    if options["data_root"] is not None and not options["external_data"]:
        raise click.UsageError("--data-root says where the files of --external-data lie: give both")
    _keep_apart({"--fix": options["fix"], "--html": html}, {"MODEL": model, "--input": options["input"]})
    memory = int(min(memory, _MOST_MEMORY) * 2**30)
    try:
        with _Progress(sys.stderr) as progress:
            report = run_validation(model, sizes=size, memory=memory, progress=progress.update, **options)
    except KeyboardInterrupt:
        click.echo("interrupted", err=True)
        context.exit(CANNOT)
    code = report.exit_code(strict=strict, require_norm=require_norm)
    if as_json:
        click.echo(report.to_json())
    else:
        show(report, Console(file=sys.stdout, soft_wrap=False))
    if html is not None:
        from cnorm.files import write_whole
        from onnx_export.validation.html import page

        try:
            if any(replaces(html, file) for file in report.external_data):
                raise FileExistsError(errno.EEXIST, "it holds tensors of MODEL")
            write_whole(html, page(report).encode())
        except OSError as error:
            click.echo(f"--html: cannot write {printable(str(html))}: {error.strerror}", err=True)
            code = code if code != SOUND else CANNOT
    context.exit(code)


def _keep_apart(outputs: dict[str, Path | None], others: dict[str, Path | None]) -> None:
    """A usage error where an output would take the place of a file that is an input, or of the other output."""
    for option, path in outputs.items():
        if path is None:
            continue
        if str(path) == "-":
            raise click.UsageError(f"{option} must name a file, got '-'")
        for name, other in others.items():
            if other is not None and replaces(path, other):
                raise click.UsageError(f"{option} must name another file than {name}, which it would replace")
        others = others | {option: path}


class _Progress:
    """A bar on a terminal, silence elsewhere."""

    def __init__(self, stream) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        self._bar = Progress(*columns, console=Console(file=stream), transient=True, disable=not stream.isatty())
        self._task = self._bar.add_task("start", total=None)

    def __enter__(self) -> _Progress:
        self._bar.start()
        return self

    def __exit__(self, *_) -> None:
        self._bar.stop()

    def update(self, stage: str, done: int, total: int) -> None:
        self._bar.update(self._task, description=stage, completed=done, total=total or None)
