"""Run every form in every runtime; rewrite onnx_export/runtimes/tables.toml and docs/runtimes.md: `make runtimes`.

`python measure.py [NAME ...]` measures these runtimes only. Each gets an environment in build/runtimes/ of its own.
A runtime that a form ends or hangs is not written: take the form out of forms.py, and say it in `SENTENCES`.
"""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from datetime import date
from pathlib import Path

import numpy as np
from exports import exports
from forms import Form, forms
from page import PAGE, page
from traps import traps

from onnx_export import runtimes
from onnx_export.runtimes import RIGHT
from onnx_export.runtimes.runners import PINS, RUNTIMES, version
from onnx_export.runtimes.ways import WAYS

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build" / "runtimes"
TABLES = ROOT / "onnx_export" / "runtimes"
# What no cell says, by runtime
SENTENCES = {
    "mnn": "takes an absent epsilon of InstanceNormalization and BatchNormalization for 0 (rows of deviation 1e-3 come "
    "out 4 times too large). It was not run on LSTM, GRU, RNN and If, nor on scales of another shape than the "
    "normalised one: it does not survive all of these files, or its results are not those of the file alone.",
    "tinygrad": "compiles with the system's clang; version 14, with which it was run, does not know bfloat16.",
    "ncnn": "runs what its converter pnnx makes of a file; it was not run on recurrent operators, If and exports: one "
    "of the two does not survive all of these files.",
}


def environment(name: str) -> Path:
    """The Python of a runtime's environment, which is made where it is not there."""
    folder = BUILD / name
    python, done = folder / "bin" / "python", folder / "pins"
    pins = "\n".join(PINS[name])
    if not (done.exists() and done.read_text() == pins):
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        options = [pin for pin in PINS[name] if pin.startswith("--")]
        packages = [pin for pin in PINS[name] if ":" not in pin and not pin.startswith("--")]
        subprocess.run(
            [python, "-m", "pip", "install", "-q", "--disable-pip-version-check", *options, *packages], check=True
        )
        for pin in PINS[name]:
            if pin.startswith("npm:"):
                package = pin.removeprefix("npm:").replace("==", "@")
                subprocess.run(["npm", "install", "--silent", "--prefix", folder, package], check=True)
        done.write_text(pins)
    return python


def write_forms(found: list[Form], name: str = "forms") -> Path:
    """The files, inputs and names of outputs, numbered in the order of the forms."""
    folder = BUILD / name
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.iterdir():
        old.unlink()
    for number, form in enumerate(found):
        (folder / f"{number:03}.onnx").write_bytes(form.model.SerializeToString())
        np.savez(folder / f"{number:03}.npz", **form.feeds)
        outputs = [value.name for value in form.model.graph.output]
        (folder / f"{number:03}.json").write_text(
            json.dumps({"traits": [form.operator, *form.traits], "outputs": outputs})
        )
    return folder


def outcome(form: Form, results: list[np.ndarray], others: list[Form]) -> str:
    """What a runtime did with a form, in the words of the tables; `others` are forms of the same operator."""
    if len(results) != len(form.expected) or any(
        a.shape != b.shape for a, b in zip(results, form.expected, strict=True)
    ):
        return "other shape"
    if off(results, form.expected) <= form.bound:
        return "right"
    less = [each for each in others if each.traits < form.traits and like(each.expected, form.expected)]
    for other in sorted(less, key=lambda each: -len(each.traits)):
        if off(results, other.expected) <= form.bound and off(form.expected, other.expected) > 4 * form.bound:
            return f"ignores {', '.join(sorted(form.traits - other.traits))}"
    error = off(results, form.expected)
    return "not finite" if np.isinf(error) else f"off by {error:.1g}"


def like(some, others) -> bool:
    return [each.shape for each in some] == [each.shape for each in others]


def off(results, expected) -> float:
    """The largest error, infinite where one is NaN."""
    worst = 0.0
    for found, exact in zip(results, expected, strict=True):
        error = np.abs(found.astype(np.float64) - exact)
        worst = max(worst, float(np.where(np.isnan(error), np.inf, error).max(initial=0)))
    return worst


def measure(name: str, found: list[Form], folder: Path) -> dict[str, dict[str, str]]:
    """The outcomes of a runtime by operator and name of form."""
    subprocess.run([environment(name), "-P", Path(__file__).with_name("folder.py"), name, folder], check=True)
    told = json.loads((folder / f"{name}.json").read_text())
    seen: dict[str, dict[str, str]] = {}
    log = []
    for number, form in enumerate(found):
        said = told.get(f"{number:03}")
        if said is None:
            continue
        others = [each for each in found if each.operator == form.operator]
        if said:
            what = "refuses"
            if said.startswith(("killed", "took")):
                what = said
                print(f"!!! {name}: {form.operator} | {form.name}: {said}")
        else:
            with np.load(folder / f"{number:03}.{name}.npz") as results:
                what = outcome(form, [results[key] for key in results.files], others)
        seen.setdefault(form.operator, {})[form.name] = what
        log.append(f"{form.operator} | {form.name} | {what} | {said}")
    (folder / f"{name}.log").write_text("\n".join(log))
    return seen


def sprung(name: str) -> list[str]:
    """The traps of a runtime that it computes right by now."""
    found = list(traps(name))
    seen = measure(name, found, write_forms(found, "traps")) if found else {}
    return [f"{name}: {form}" for form, what in seen.get(name, {}).items() if what == RIGHT]


def write(name: str, seen: dict[str, dict[str, str]]) -> None:
    """Write a runtime's table anew, among those of the others."""
    lines = [f'version = "{version(name)}"', f'seen = "{date.today():%Y-%m-%d}"']
    exported = seen.pop("export", {})
    for operator, outcomes in seen.items():
        lines += _by_outcome(f"{name}.forms.{operator}", outcomes)
    for way in WAYS if exported else ():
        ending = f", {way}"
        own = {form.removesuffix(ending): what for form, what in exported.items() if form.endswith(ending)}
        lines += _by_outcome(f'{name}.exports."{way}"', own)
    found = runtimes.texts() | {name: "\n".join(lines)}
    (TABLES / runtimes.TABLES).write_text(
        "\n\n".join(f"[{each}]\n{found[each].strip()}" for each in sorted(found)) + "\n"
    )
    for each in (runtimes.texts, runtimes.table, runtimes.names):
        each.cache_clear()


def _by_outcome(heading: str, outcomes: dict[str, str]) -> Iterator[str]:
    """The forms, or presets, of each outcome, by lines."""
    found: dict[str, list[str]] = {}
    for form, what in outcomes.items():
        found.setdefault(what, []).append(form)
    yield from ["", f"[{heading}]"]
    for what, own in found.items():
        names = ", ".join(f'"{form.replace(" ", "~")}"' for form in own)  # ~: a name is not to be broken
        line = f'"{what.replace(" ", "~")}"~=~[{names}]'
        wrapped = textwrap.wrap(line, 118, break_long_words=False, break_on_hyphens=False)
        yield from (part.replace("~", " ") for part in wrapped)


def main(names: list[str]) -> None:
    """Measure, and write what may be written."""
    found = [*forms(), *exports()]
    folder, bad, right = write_forms(found), [], []
    for name in names or RUNTIMES:
        right += sprung(name)
        seen = measure(name, found, folder)
        ended = any(what.startswith(("killed", "took")) for outcomes in seen.values() for what in outcomes.values())
        if ended:
            bad.append(name)
        else:
            write(name, seen)
    PAGE.write_text(page(SENTENCES))
    if bad:
        sys.exit(f"not written: {', '.join(bad)}, which a form ended")
    if right:
        sys.exit(f"right by now, so no traps of traps.py: {', '.join(right)}")


if __name__ == "__main__":
    main(sys.argv[1:])
