"""What runtimes were seen to do with norms and recurrent operators: a table a runtime, written by `make runtimes`.

A table of tables.toml has the version, the date, and for each operator lists by what the runtime did ("right",
"refuses", "ignores TRAIT", "off by E", "not finite", "other shape") of the *forms* with that outcome: the traits of a
node (`traits.traits_of`) in alphabetical order. A form without traits is the operator with its defaults, in float32.
Of our own exports it lists the presets, by the way in which they were written (`ways.WAYS`). docs/runtimes.md has all.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import resources

__all__ = ["DATA", "FAR", "RIGHT", "SCRIPT", "TABLES", "Observation", "Table", "Traits", "names", "table", "texts"]

Traits = frozenset[str]

# Traits of the data: what a file alone does not show
DATA = {
    "a length of 0": "an item of the batch has the length 0",
    "mean 1e4": "the mean of a row is 10^4 times its deviation",
    "deviation 400": "a row has the deviation 400, so that squares leave the range of float16",
    "a row of 0": "a row holds zeros only",
}
FAR = 1e3  # the conditioning of a row, max|x| / deviation, from which on "mean 1e4" is taken to hold

RIGHT = "right"
SCRIPT = "tests/runtimes/measure.py"  # `make runtimes`
TABLES = "tables.toml"
_HEAD = re.compile(r"^\[([\w-]+)\]\n", re.MULTILINE)  # of a runtime's table


@dataclass(frozen=True)
class Observation:
    """What a runtime did with one form of an operator.

    Attributes
    ----------
    operator : str
        Its name, or "decomposed" for a norm in elementary operators, or "export" for a file of this package.
    traits : frozenset of str
    outcome : str
    """

    operator: str
    traits: Traits
    outcome: str

    @property
    def fixed(self) -> Traits:
        """The traits that stand in the file; the others are of the data."""
        return self.traits - DATA.keys()


@dataclass(frozen=True)
class Table:
    """What one version of a runtime did."""

    runtime: str
    version: str
    seen: str
    observations: tuple[Observation, ...]

    def tried(self, operator: str) -> bool:
        """Whether a form of this operator was."""
        return any(each.operator == operator for each in self.observations)

    def faults(self, operator: str, traits: Traits) -> list[Observation]:
        """What is known to go wrong in a node of these traits, each reason by its form of the fewest traits.

        The fault of a form does not hold where a form of more of the node's traits was seen to be right.
        """
        own = [each for each in self.observations if each.operator == operator and each.fixed <= traits]
        right = [each.traits for each in own if each.outcome == RIGHT and each.traits <= traits]
        wrong = [each for each in own if each.outcome != RIGHT]
        wrong = [each for each in wrong if not any(each.traits < other for other in right)]
        return [each for each in wrong if not any(other.traits < each.traits for other in wrong)]

    def covers(self, operator: str, traits: Traits) -> bool:
        """Whether a form that has all these traits was right."""
        own = (each for each in self.observations if each.operator == operator and each.outcome == RIGHT)
        return any(traits <= each.traits for each in own)


@cache
def texts() -> dict[str, str]:
    """The text of each runtime's table, without its first line."""
    _, *parts = _HEAD.split((resources.files(__name__) / TABLES).read_text(encoding="utf-8"))
    return dict(zip(parts[::2], parts[1::2], strict=True))


@cache
def table(name: str) -> Table:
    """The table of a runtime of `names`."""
    data = tomllib.loads(f"[{name}]\n{texts()[name]}")[name]
    return Table(name, data["version"], data["seen"], tuple(_observations(data)))


@cache
def names() -> tuple[str, ...]:
    """The runtimes that have a table."""
    return tuple(sorted(texts()))


def _observations(data: dict[str, dict]) -> Iterator[Observation]:
    for operator, outcomes in data["forms"].items():
        for outcome, forms in outcomes.items():
            yield from (Observation(operator, frozenset(filter(None, form.split(", "))), outcome) for form in forms)
    for way, outcomes in data.get("exports", {}).items():
        for outcome, presets in outcomes.items():
            yield from (Observation("export", frozenset({preset, way}), outcome) for preset in presets)
