"""The measuring process, started by `cnorm_bench.run`: ``python -m cnorm_bench JOB``, a job in JSON."""

import io
import json
import sys
from importlib import util
from pathlib import Path

from cnorm.storage.files import write_whole
from cnorm_bench import report
from cnorm_bench.measure_models import models, models_picture, models_tables
from cnorm_bench.measure_norms import fresh, norms
from cnorm_bench.measure_serving import serving, serving_picture, serving_tables
from cnorm_bench.measure_steps import recurrent_steps
from cnorm_bench.measure_training import training, training_tables

# kind of job -> the functions that measure, print tables and draw; training has no picture
KINDS = {
    "norms": (norms, report.norms_tables, report.norms_picture),
    "rnn": (recurrent_steps, report.rnn_tables, report.rnn_picture),
    "serving": (serving, serving_tables, serving_picture),
    "models": (models, models_tables, models_picture),
    "training": (training, training_tables, None),
}


def main(job):
    """Run the measurements of a job, write the files, print the tables."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    if "fresh" in job:
        print(json.dumps(fresh(*job["fresh"])))
        return
    console = Console(highlight=False)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=None)

        def advance(description, total):
            progress.update(task, description=description, total=total, advance=1)

        measure, tables, picture = KINDS[job["kind"]]
        options = job["options"]
        sizes = options.pop("sizes", None)
        document = measure(sizes and [tuple(size) for size in sizes], advance=advance, **options)
    text = json.dumps(document, indent=1)
    stem = Path(job["out_dir"]) / job["kind"]
    write_whole(stem.with_suffix(".json"), text.encode())
    drawn = util.find_spec("matplotlib") is not None
    if drawn and picture:
        drawing = io.BytesIO()
        picture(document, drawing)
        write_whole(stem.with_suffix(".png"), drawing.getvalue())
    if job["json"]:
        print(text)
        return
    report.header(console, document)
    tables(console, document)
    console.print(f"{stem}.json: every figure")
    if picture:
        console.print(f"{stem}.png: the picture" if drawn else "no picture: pip install matplotlib")


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
