"""The command ``cnorm``: runs a subcommand of `commands`, which need the extra ``cli``, and sets the exit code.

Exit code 0: done; 1: a check failed, such as ``export --check``; 2: the command could not do its work (usage, a missing
package, a file, a full disk, a closed pipe, a terminal that can't show the text); 130: interrupted.
"""

import errno
import os
import sys
from importlib import util
from typing import NoReturn

from cnorm.tools import fail, needs


def main() -> None:
    """Entry point of the ``cnorm`` command."""
    missing = [package for package in ("click", "rich") if util.find_spec(package) is None]
    if missing:
        fail(needs("cli", missing))
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the caller
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
    try:
        try:
            code = run(sys.argv[1:])
        finally:
            print(end="", flush=True)  # raises OSError here if the disk is full, not at exit
    except (OSError, UnicodeEncodeError) as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python flushes again at exit
        fail(f"cnorm: {' '.join(str(error).split())}")
    except KeyboardInterrupt:
        print("cnorm: interrupted", file=sys.stderr)
        code = 130
    sys.exit(code)


def run(arguments: list[str]) -> int:
    """Run a command and return its exit code; click's own `main` would return 1 for a closed pipe."""
    import click
    from rich.console import Console

    from cnorm.tools.commands import commands

    Console.on_broken_pipe = broken_pipe
    try:
        with commands.make_context("cnorm", arguments) as context:
            commands.invoke(context)
    except click.exceptions.Exit as done:  # of --help and --version
        return done.exit_code
    except click.ClickException as error:
        error.show()
        return 2
    except click.Abort:
        return 130
    return 0


def broken_pipe(console) -> NoReturn:
    """Replaces the handler of rich, which exits with code 1."""
    raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))
