"""The models of one command, and the files that belong to each: inputs, references, and what is written."""

from __future__ import annotations

import glob
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import click

from cnorm.storage.files import replaces
from cnorm.text import printable
from onnx_export.validation.options import Options

# The suffixes by which a file of a folder is found, or with which it is written.
_READ = {"--input": (".npz", ".npy"), "--outputs": (".npz",), "--like": (".onnx", ".json")}
_WRITTEN = {"--fix": ".onnx", "--html": ".html", "--lock": ".json"}


@dataclass(frozen=True)
class Job:
    """One model, its options, its reference, and where its page and its lock file are written."""

    path: Path
    options: Options
    like: Path | None = None
    html: Path | None = None
    lock: Path | None = None


def jobs_of(models: tuple[Path, ...], files: Mapping[str, Path | None], options: Options) -> list[Job]:
    """The jobs of all models.

    Parameters
    ----------
    models : tuple of Path
        Files, folders and patterns.
    files : dict of str to Path or None
        What --input, --outputs, --like, --fix, --html and --lock name: a file, or for several models a folder in which
        each has a file of its name.
    options : Options
        Common to all.

    Raises
    ------
    click.UsageError
        If no model is found, a file of a folder is missing, or a file would replace another.
    """
    found = dict(_found(models))
    given = {option: path for option, path in files.items() if path is not None}
    twice = [name for name, count in Counter(found.values()).items() if count > 1]
    if given and twice:
        raise click.UsageError(f"two models are named {twice[0]}, which {next(iter(given))} can't tell apart")
    many = len(found) > 1 or not all(model.is_file() for model in models)
    jobs = []
    for model, name in found.items():
        own = {
            option: _of_model(option, path, name, many and not _one_file(option, path, len(found)))
            for option, path in given.items()
        }
        _keep_apart(model, own)
        texts = {option[2:]: str(own[option]) for option in ("--input", "--outputs", "--fix") if option in own}
        jobs.append(Job(model, replace(options, **texts), *(own.get(each) for each in ("--like", "--html", "--lock"))))
    return jobs


def _found(models: tuple[Path, ...]) -> Iterator[tuple[Path, Path]]:
    """Each model, and its name: its path below the folder that was given, or the file's name."""
    for given in models:
        pattern = not given.exists() and any(each in str(given) for each in "*?[")
        paths = [Path(each) for each in sorted(glob.glob(str(given), recursive=True))] if pattern else [given]
        if not paths:
            raise click.UsageError(f"no file is named like {given}")
        for path in map(_model_of, paths):
            inside = _inside(path) if path.is_dir() else [path]
            if not inside:
                raise click.UsageError(f"no .onnx file in {path}")
            yield from ((each, each.relative_to(path) if path.is_dir() else Path(each.name)) for each in inside)


def _model_of(path: Path) -> Path:
    """NAME.onnx for its external weights, NAME.onnx.data, which a commit may change alone; else the path itself."""
    if not path.name.endswith(".onnx.data"):
        return path
    model = path.with_suffix("")
    return model if model.is_file() else path


def _inside(folder: Path) -> list[Path]:
    """All .onnx files in a folder and below, but for hidden folders, such as .venv.

    A folder that can't be read is an error, as its files would be missed.
    """

    def refuse(error: OSError):
        raise click.UsageError(f"cannot read the folder {printable(str(error.filename))}: {error.strerror}")

    found = []
    for at, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [Path(at, name) for name in names if name.endswith(".onnx")]
    return sorted(found)


def _one_file(option: str, path: Path, count: int) -> bool:
    """Whether an option names the file of the only model: it exists, or has the suffix of what is written."""
    return count == 1 and (path.is_file() or path.suffix == _WRITTEN.get(option))


def _of_model(option: str, path: Path, name: Path, many: bool) -> Path:
    """The file that an option names for a model: the path itself, or of `many` models the one in this folder."""
    if str(path) == "-" and option in _WRITTEN:
        raise click.UsageError(f"{option} must name a file, got '-'")
    if not many and not path.is_dir():
        return path
    if not path.is_dir() and (path.exists() or path.suffix == _WRITTEN.get(option)):
        raise click.UsageError(f"{option} must name a folder, with a file for each of several models, got {path}")
    if option in _WRITTEN:
        target = path / name.with_suffix(_WRITTEN[option])
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise click.UsageError(f"{option}: cannot make {target.parent}: {error.strerror}") from None
        return target
    choices = [path / name.with_suffix(suffix) for suffix in _READ[option]]
    found = next((choice for choice in choices if choice.is_file()), None)
    if found is None:
        raise click.UsageError(f"{option}: there is no {' or '.join(map(str, choices))}")
    return found


def _keep_apart(model: Path, files: Mapping[str, Path]) -> None:
    """Raise a usage error if an output would replace an input file or another output."""
    others = {"MODEL": model} | {option: path for option, path in files.items() if option not in _WRITTEN}
    for option, path in files.items():
        if option in _WRITTEN:
            for name, other in others.items():
                if replaces(path, other):
                    raise click.UsageError(f"{option} must name another file than {name}, which it would replace")
            others = others | {option: path}
