"""`cnorm validate MODEL.onnx`."""

from __future__ import annotations

import errno
import json
import math
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import click

from cnorm.scoring import in_order
from cnorm.storage.files import replaces, write_whole
from cnorm.text import printable
from onnx_export.validation import examined, formats
from onnx_export.validation import lock as locks
from onnx_export.validation.codes import CODES
from onnx_export.validation.jobs import Job, jobs_of
from onnx_export.validation.options import Options, known_runtime
from onnx_export.validation.report import CANNOT, REFUSED, SCHEMA, SOUND, UNSOUND, ValidationReport

_PATH = click.Path(path_type=Path)
_POSITIVE = click.FloatRange(0, min_open=True)
_MOST_MEMORY = 2.0**30  # GiB; larger values are cut to this


def _sizes(_context, _option, values: tuple[str, ...]) -> dict[str, int]:
    sizes = {}
    for value in values:
        name, _, size = value.rpartition("=")
        if not name or not size.isascii() or not size.isdecimal() or not 0 < int(size) < 2**31:
            raise click.BadParameter(f"{value!r} given, NAME=SIZE wanted")
        sizes[name] = int(size)
    return sizes


def _runtimes(_context, _option, values: tuple[str, ...]) -> tuple[str, ...]:
    try:
        return tuple(map(known_runtime, values))
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


def _finite(_context, _option, value: float) -> float:
    if not math.isfinite(value):
        raise click.BadParameter(f"{value} given, a finite number wanted")
    return value


@click.command(name="validate", short_help="Check the norms of ONNX files.")
@click.argument("models", type=_PATH, nargs=-1, required=True)
@click.option("--input", type=_PATH, help="Inputs: an .npz by name, or an .npy for the only one.")
@click.option("--outputs", type=_PATH, help="An .npz with the outputs a framework gives for them.")
@click.option("--like", type=_PATH, help="Hold the norms to those of another model or lock file.")
@click.option("--lock", type=_PATH, help="Write a lock file for --like of later runs.")
@click.option(
    "--runtime",
    multiple=True,
    callback=_runtimes,
    metavar="NAME[@VERSION]",
    help="Say what this runtime was seen to refuse or to compute otherwise (docs/runtimes.md).",
)
@click.option("--batch", type=click.IntRange(1), default=1, show_default=True, help="Size of a free first dimension.")
@click.option("--dim", type=click.IntRange(1), default=8, show_default=True, help="Size of other free dimensions.")
@click.option("--size", multiple=True, callback=_sizes, metavar="NAME=SIZE", help="Size of a free dimension by name.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Seed of generated inputs.")
@click.option("--external-data", is_flag=True, help="Allow tensors in any other files in the model's folder.")
@click.option("--data-root", type=_PATH, help="The folder external files must lie in instead.")
@click.option("--strict", is_flag=True, help="Fail (1) on risky norms and warnings, and (2) on norms not exercised.")
@click.option("--require-norm", is_flag=True, help="Fail (2) where no norm was judged.")
@click.option("--format", "shape", type=click.Choice(["text", "json", "github", "sarif", "junit"]), default="text")
@click.option("--json", "shape", flag_value="json", help="The same as --format json.")
@click.option("--notes", is_flag=True, help="Print notes, too, instead of their number.")
@click.option("--html", type=_PATH, help="Write the report as one HTML file.")
@click.option("--fix", type=_PATH, help="Write a copy with LayerNormalization operators.")
@click.option("--opset", type=click.IntRange(1), help="With --fix: convert to this opset first; the operator needs 17.")
@click.option("--workers", type=click.IntRange(1, 64), default=1, show_default=True, help="Models at the same time.")
@click.option("--timeout", type=_POSITIVE, callback=_finite, default=600.0, show_default=True, help="Seconds a model.")
@click.option(
    "--memory",
    type=click.FloatRange(0.5),
    callback=_finite,
    default=8.0,
    show_default=True,
    help="Limit on the child's address space, in GiB.",
)
@click.pass_context
def validate(context, models, size, runtime, notes, shape, html, like, lock, workers, memory, **options) -> None:
    """Check that ONNX files, or all of a folder, compute the layer norms they claim to.

    MODELS are files, folders and patterns such as "models/*.onnx". For several, an option that names a file takes a
    folder, in which each model has a file of its own name: models/a/b.onnx has FOLDER/a/b.npz.

    \b
    Exit codes: 0 all that was exercised is sound; 1 a wrong or inaccurate norm,
    or an error finding; 2 cannot validate, or no norm was exercised; 3 refused for safety.
    """
    if options["data_root"] is not None and not options["external_data"]:
        raise click.UsageError("--data-root says where the files of --external-data lie: give both")
    if options["opset"] is not None and options["fix"] is None:
        raise click.UsageError("--opset is the opset of the copy that --fix writes: give both")
    how = {name: options.pop(name) for name in ("strict", "require_norm")}
    files = {"--input": options.pop("input"), "--outputs": options.pop("outputs"), "--fix": options.pop("fix")}
    files |= {"--like": like, "--html": html, "--lock": lock}
    memory = int(min(memory, _MOST_MEMORY) * 2**30)
    options = Options.checked(**options, sizes=size, memory=memory, runtimes=runtime)
    jobs = jobs_of(models, files, options)
    reports: list[ValidationReport] = []
    try:
        with _Progress(sys.stderr) as progress:
            _validate_all(jobs, workers, progress, reports)
            for job, report in zip(jobs, reports, strict=True):
                if job.like is not None:
                    _hold(report, job.like, job.options)
    except KeyboardInterrupt:
        click.echo(f"interrupted after {len(reports)} of {len(jobs)} models", err=True)
        if reports:
            _print(reports, shape, notes, how)
        if len(jobs) > 1:
            sys.stdout.flush()
            os._exit(CANNOT)  # do not wait for the other threads: their children end with this process
        context.exit(CANNOT)
    codes = [report.exit_code(**how) for report in reports]
    _print(reports, shape, notes, how)
    for job, report in zip(jobs, reports, strict=True):
        if job.html is not None and not _written("--html", job.html, _page(report, how), report):
            codes.append(CANNOT)
        if job.lock is not None and not _written("--lock", job.lock, locks.lock(report), report):
            codes.append(CANNOT)
    context.exit(next((code for code in (REFUSED, UNSOUND, CANNOT) if code in codes), SOUND))


@click.command(short_help="Say what the code of a finding means.")
@click.argument("code", required=False)
def explain(code: str | None) -> None:
    """Say what the CODE of a finding means and what to do about it; without one, list all."""
    if code is None:
        for name in sorted(CODES):
            click.echo(f"{name}: {CODES[name]}")
    elif code in CODES:
        click.echo(CODES[code])
    else:
        raise click.UsageError(f"no finding has the code {code!r}; there are {', '.join(sorted(CODES))}")


def _validate_all(jobs: list[Job], workers: int, progress: _Progress, reports: list) -> None:
    """Append the reports in the order of the jobs; after Ctrl-C those that were done are there."""

    def one(job: Job) -> ValidationReport:
        try:
            return examined(str(job.path), job.options, progress.of(job.path))
        finally:
            progress.finished()

    progress.total = len(jobs)
    executor = ThreadPoolExecutor(workers) if len(jobs) > 1 else None
    for outcome in in_order(one, jobs, executor, pending=2 * workers):
        if outcome.error is not None:
            raise outcome.error
        reports.append(outcome.result)


def _hold(report: ValidationReport, like: Path, options: Options) -> None:
    """Compare the norms with those of the reference and add the differences to the findings."""
    try:
        if like.suffix == ".json":
            reference = locks.read_lock(like.read_text(encoding="utf-8"))
        else:
            other = examined(str(like), replace(options, find_only=True, input="", outputs="", fix="", opset=0))
            if other.problem:
                raise ValueError(other.problem)
            reference = locks.facts(other)
    except (OSError, ValueError) as error:
        report.problem = report.problem or f"--like: cannot read {like}: {error}"
        return
    report.findings += locks.compare(locks.facts(report), reference)


def _print(reports: list[ValidationReport], shape: str, notes: bool, how: dict[str, bool]) -> None:
    stdout = sys.stdout
    if hasattr(stdout, "reconfigure"):
        stdout.reconfigure(errors="replace")  # for terminals that support ASCII only
    if shape == "json":
        texts = [report.to_json(require_norm=how["require_norm"]) for report in reports]
        many = {"schema": SCHEMA, "reports": [json.loads(text) for text in texts]}
        click.echo(texts[0] if len(texts) == 1 else json.dumps(many, indent=1))
    elif shape == "sarif":
        click.echo(formats.sarif(reports, **how))
    elif shape == "junit":
        click.echo(formats.junit(reports, **how))
    elif shape == "text" and stdout.isatty():
        from rich.console import Console

        for report in reports:
            formats.show(report, Console(file=stdout, soft_wrap=False), notes=notes, **how)
    else:
        write = formats.github if shape == "github" else formats.lines
        for report in reports:
            click.echo("\n".join(write(report, notes=notes, **how)))
    if len(reports) > 1 and shape in ("text", "github"):
        click.echo(formats.overview(reports, **how))


def _page(report: ValidationReport, how: dict[str, bool]) -> str:
    from onnx_export.validation.html import page

    return page(report, **how)


def _written(option: str, path: Path, text: str, report: ValidationReport) -> bool:
    """Write a file, unless it is external data of the model; returns whether it was written."""
    try:
        if any(replaces(path, file) for file in report.external_data):
            raise FileExistsError(errno.EEXIST, "it holds tensors of MODEL")
        write_whole(path, text.encode())
    except OSError as error:
        click.echo(f"{option}: cannot write {printable(str(path))}: {error.strerror}", err=True)
        return False
    return True


class _Progress:
    """A progress bar on a terminal; nothing if the output is no terminal."""

    def __init__(self, stream) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        self._bar = Progress(*columns, console=Console(file=stream), transient=True, disable=not stream.isatty())
        self._task = self._bar.add_task("start", total=None)
        self._done, self.total = 0, 1

    def __enter__(self) -> _Progress:
        self._bar.start()
        return self

    def __exit__(self, *_) -> None:
        self._bar.stop()

    def of(self, path: Path) -> Callable[[str, int, int], None]:
        """The progress callback of `validate` for one model."""
        name = f"{printable(path.name)} " if self.total > 1 else ""

        def update(stage: str, done: int, total: int) -> None:
            count = f" {done}/{total}" if total else ""
            self._bar.update(self._task, description=f"{name}{stage}{count}", completed=done, total=total or None)

        return update

    def finished(self) -> None:
        """Count one model as done."""
        self._done += 1
        if self.total > 1:
            self._bar.update(self._task, description=f"{self._done} of {self.total} models")
