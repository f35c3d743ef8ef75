"""The command ``cnorm bench``."""

import os

import click

from cnorm.tools import fail
from cnorm.tools.commands import named_values
from cnorm_bench import run


@click.command(short_help="Measure cnorm and the other installed runtimes.")
@click.option("--out", "out_dir", default="bench_out", show_default=True, help="Folder for the JSON and the picture.")
@click.option("--rnn", is_flag=True, help="Steps of recurrent networks instead of norms of rows.")
@click.option("--train", is_flag=True, help="Forward and backward passes of a recurrent cell, beside PyTorch.")
@click.option("--serve", is_flag=True, help="`cnorm serve` under load, stepping cnorm, onnxruntime, or nothing.")
@click.option("--model", type=click.Path(exists=True, dir_okay=False), help="Of --serve, instead of the packaged one.")
@click.option("--models", type=click.Path(exists=True, file_okay=False), help="Steps of the ONNX files of a folder.")
@click.option("--input", "inputs", metavar="NAME=VALUE", help="Of --models, as in cnorm import.",
              **named_values(float))  # fmt: skip
@click.option("--dim", "dims", metavar="NAME=SIZE", help="Of --models, as in cnorm import.",
              **named_values(int))  # fmt: skip
def bench(out_dir, rnn, train, serve, **given):
    """Measure cnorm and the other installed runtimes on this machine, beside lower bounds; takes some minutes."""
    model, models = given["model"], given["models"]
    if rnn + train + serve + (models is not None) > 1:
        raise click.UsageError("give at most one of --rnn, --train, --serve and --models")
    if model is not None and not serve:
        raise click.UsageError("--model is an option of --serve")
    kind = "serving" if serve else "training" if train else "rnn" if rnn else "norms"
    options = {} if model is None else {"model": os.path.abspath(model)}
    if models is not None:
        kind = "models"
        options = {"folder": os.path.abspath(models), "inputs": given["inputs"], "dims": given["dims"]}
    try:
        run(kind, out_dir=out_dir, **options)
    except RuntimeError as error:
        fail(f"Error: {error}")
