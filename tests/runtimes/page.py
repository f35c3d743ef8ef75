"""docs/runtimes.md, from the tables."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from onnx_export import runtimes
from onnx_export.runtimes import RIGHT
from onnx_export.runtimes.ways import DEFAULT, WAYS

PAGE = Path(__file__).parents[2] / "docs" / "runtimes.md"
HEAD = """# What runtimes do with norms and recurrent operators

{forms} small files, all valid by the standard, were run in {runtimes} runtimes and compared with float64.
`make runtimes` (`tests/runtimes/measure.py`) runs them again, each runtime in an environment of its own with pinned
packages, each file in a child process, and rewrites this page and `onnx_export/runtimes/tables.toml`.
`cnorm validate --runtime NAME` [reads them](validator.md#other-runtimes).

A form is an operator with all defaults, in float32, with stored weights and a batch of 1, but for the traits that its
row names: attributes that are not their defaults, optional inputs and outputs that are given (or "no B", which most
nodes have), types, sizes, and magnitudes of the data. "decomposed" are norms in elementary operators, "export" the
files that `onnx_export.export(..., portable=True)` writes of small models of each preset: a step, and a sequence with
an open or a fixed number of steps by each `loop`; a "default sequence" is written without `portable`. From these lines
`export(..., runtime=NAME)` chooses.

- **·** right, within a bound from the rounding errors of the type;
- **no** refused with an error, or left unconverted by the runtime's own converter;
- **ignores** the values are those of the file without these traits, or of the plain form;
- **off** the largest error, where results are about 1;
- **shape** the results have another shape;
- **NaN** they are not finite.

What a runtime did is no judgement of it: some of these forms are rare, and a refusal is an honest answer.
{words}"""
SHARES = """Of the presets that were run, those that were right as `export` writes them by default, and those for which
`runtime=NAME` finds a way that was right:"""
WORDS = {
    "refuses": "no",
    "right": "·",
    "other shape": "shape",
    "not finite": "NaN",
}


def page(sentences: dict[str, str]) -> str:
    """The page; `sentences` say by runtime what no cell does."""
    tables = [runtimes.table(name) for name in runtimes.names()]
    seen = [{(each.operator, each.traits): each.outcome for each in table.observations} for table in tables]
    forms = list(dict.fromkeys(form for outcomes in sorted(seen, key=len, reverse=True) for form in outcomes))
    sentences = {name: text for name, text in sentences.items() if name in runtimes.names()}
    words = "".join(f"\n{name} {text}\n" for name, text in sorted(sentences.items()))
    lines = [HEAD.format(forms=len(forms), runtimes=len(tables), words=words).rstrip("\n")]
    heads = [f"{table.runtime} {table.version}" for table in tables]
    for operator in dict.fromkeys(operator for operator, _ in forms):
        lines += ["", f"## {operator}", "", f"| form | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
        rows = {
            form[1]: [_cell(outcomes.get(form, ""), form[1]) for outcomes in seen]
            for form in forms
            if form[0] == operator
        }
        rows = (
            _exports(rows)
            if operator == "export"
            else {
                name or "plain": cells
                for name, cells in sorted((", ".join(sorted(traits)), cells) for traits, cells in rows.items())
            }
        )
        lines += [f"| {form} | {' | '.join(cells)} |" for form, cells in rows.items()]
    lines += ["", *_shares(tables)]
    return "\n".join(lines) + "\n"


def _exports(rows: dict[frozenset[str], list[str]]) -> dict[str, list[str]]:
    """The ways with their cells; presets are named where not all in a way have the same."""
    found = {}
    for way in WAYS:
        own = {min(traits - {way}): cells for traits, cells in rows.items() if way in traits}
        kinds = {}
        for preset, cells in own.items():
            kinds.setdefault(tuple(cells), []).append(preset)
        most = max(kinds, key=lambda cells: len(kinds[cells]), default=None)
        for cells, presets in kinds.items():
            of = f"{len(presets)} presets" if cells == most else ", ".join(presets)
            found[f"{way}: {of}"] = list(cells)
    return found


def _shares(tables: list[runtimes.Table]) -> Iterator[str]:
    """How many presets a runtime computed right as sequences, by default and with `runtime=`."""
    yield from ["## Presets as sequences", "", SHARES, ""]
    yield from ["| runtime | T open | with `runtime=` | T fixed | with `runtime=` |", "|---" * 5 + "|"]
    for table in tables:
        seen = [each for each in table.observations if each.operator == "export"]
        if not seen:
            continue
        counts = []
        for steps in (False, True):
            ways = [way for way in WAYS if WAYS[way]["form"] == "sequence" and ("steps" in WAYS[way]) == steps]
            default = [way for way in ways if way.startswith(DEFAULT)]
            counts += [_share(seen, default), _share(seen, ways)]
        yield f"| {table.runtime} {table.version} | {' | '.join(counts)} |"


def _share(seen: list[runtimes.Observation], ways: list[str]) -> str:
    """Of the presets that were run in one of these ways, those that were right in one."""
    run = [each for each in seen if not each.traits.isdisjoint(ways)]
    right = {each.traits.difference(ways) for each in run if each.outcome == RIGHT}
    return f"{len(right)} of {len({each.traits.difference(ways) for each in run})}" if run else ""


def _cell(outcome: str, traits: frozenset[str]) -> str:
    everything = f"ignores {', '.join(sorted(traits))}"
    return "ignores" if outcome == everything else WORDS.get(outcome, outcome.replace("off by", "off"))
