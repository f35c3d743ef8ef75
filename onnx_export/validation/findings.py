"""What is found in a file: findings, norms and recurrent nodes with their verdicts, and how each is said."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

NOT_JUDGED = "not judged"
VERDICTS = ("ok", "near miss", "risky", "inaccurate", "wrong", "not exercised", NOT_JUDGED)
# The verdicts that are findings, too, and their levels
VERDICT_LEVELS = {"wrong": "error", "inaccurate": "error", "risky": "warning"}
VERDICT_LEVELS |= {"not exercised": "note", NOT_JUDGED: "note"}
RECURRENCE = "recurrence"  # the kind of one that no operator names
MOST_RATIO = 1e12  # largest error / bound in a plot, in place of larger values and infinity


@dataclass
class Finding:
    """An observation about the file, a norm or the runtime, apart from the verdicts.

    Attributes
    ----------
    level : {"error", "warning", "note"}
    code : str
        Short and stable, such as "eps-zero"; docs/validator.md lists them.
    message : str
    norm : str
        Name of the norm it is about, empty for the file or the runtime.
    """

    level: str
    code: str
    message: str
    norm: str = ""


@dataclass
class NormReport:
    """One norm and its verdict. Fields up to `near_miss` describe the `norm.Norm`.

    Attributes
    ----------
    verdict : {"ok", "near miss", "risky", "inaccurate", "wrong", "not exercised"}
        "near miss" where the runtime computes the nodes accurately, but they are no norm.
    blame : {"", "file", "kernel", "optimiser"}
    detail : str
        The reason for the verdict, in one sentence.
    error, bound : float or None
        Error against float64, and its bound, at the element where their ratio is largest.
    conditioning : float or None
        Largest max|x| / sqrt(var + eps) of a row seen in the run.
    became : str
        The operator that the optimiser made of it.
    risks : list of str
        Families of stress rows on which it failed.
    points : list of [float, float, str]
        (conditioning, error / bound, origin) of tapped and stress rows, for the plot.
    scale_hash, bias_hash : str
        Hashes of the stored values; "computed" if the graph computes them, empty if there are none.
    of : str
        "x - f(x)" for an RMS norm of such a difference, else empty.
    normal : dict
        What `lock.compare` compares (`normal.normal_form`).
    """

    name: str
    scope: str
    form: str
    formula: str
    variance: str
    axes: list[int] | None
    eps: float
    eps_dtype: str
    scale: str
    bias: str
    compute_dtype: str
    near_miss: str = ""
    verdict: str = "not exercised"
    blame: str = ""
    detail: str = ""
    error: float | None = None
    bound: float | None = None
    conditioning: float | None = None
    became: str = ""
    risks: list[str] = field(default_factory=list)
    points: list[list[Any]] = field(default_factory=list, repr=False)
    scale_hash: str = ""
    bias_hash: str = ""
    of: str = ""
    normal: dict[str, Any] = field(default_factory=dict, repr=False)


@dataclass
class CellReport:
    """One recurrent node and its verdict, or a recurrence that no operator names.

    Attributes
    ----------
    name, scope : str
    kind : str
        "LSTM", "GRU" or "RNN"; or, never judged, an operator of another domain such as "DynamicQuantizeLSTM", or
        "recurrence".
    facts : dict of str to str
        Its attributes and the sources of its states and lengths, in a normal form without defaults.
    inputs, units : int or None
        Length of x and of h, None where the file does not say.
    verdict, blame, detail, error, bound
        As of a `NormReport`, and "not judged"; the error is that of a step, or of a whole run.
    hashes : dict of str to str
        Of W, R and P, and of the bias as it acts: "computed" if the graph computes them, empty if there are none.
    """

    name: str
    scope: str
    kind: str
    facts: dict[str, str]
    inputs: int | None
    units: int | None
    verdict: str = "not exercised"
    blame: str = ""
    detail: str = ""
    error: float | None = None
    bound: float | None = None
    hashes: dict[str, str] = field(default_factory=dict)


def failing_levels(*, strict: bool = False, **_: bool) -> tuple[str, ...]:
    """The levels of findings that make a file unsound, with the options of `ValidationReport.exit_code`."""
    return ("error", "warning") if strict else ("error",)


def many(count: int, what: str, plural: str = "s") -> str:
    """A number and what it counts, in the plural for other numbers than 1."""
    return f"{count} {what}{plural * (count != 1)}"


def said(finding: Finding) -> str:
    """A finding with what it is about, in one line."""
    return f"{finding.norm}: {finding.message}" if finding.norm else finding.message


def facts(each: NormReport | CellReport) -> str:
    """What a norm or a recurrent node is, and its error, in one line."""
    error = "" if each.error is None or each.bound is None else ", error {} of {}".format(*numbers(each))
    if isinstance(each, CellReport):
        return f"{cell_facts(each)}{error}"
    axes = "all axes" if each.axes is None else f"axes {','.join(map(str, each.axes))}"
    return f"{formula(each)}, {axes}, eps {each.eps:.7g}, {_variance(each)}{each.compute_dtype}{error}"


def numbers(each: NormReport | CellReport) -> tuple[str, str]:
    """Error and bound with one digit, with three where they would look alike; empty where there are none."""
    known = each.error is not None and each.bound is not None
    digits = 2 if known and f"{each.error:.0e}" == f"{each.bound:.0e}" else 0
    error, bound = ("" if value is None else f"{value:.{digits}e}" for value in (each.error, each.bound))
    return error, bound


def formula(norm: NormReport) -> str:
    """What a norm is, and of which value."""
    return f"{norm.formula} of {norm.of}" if norm.of else norm.formula


def _variance(norm: NormReport) -> str:
    """How the variance is computed; the mean square of an RMS norm is not centred."""
    return "" if norm.formula == "rms" and norm.variance == "centred" else f"{norm.variance}, "


def cell_facts(cell: CellReport) -> str:
    """What a recurrent node is: its sizes, and the facts that are not what they usually are."""
    usual = {"direction": "forward", "initial_h": "zeros", "initial_c": "zeros", "sequence_lens": "all"}
    told = {name.replace("_", " "): fact for name, fact in cell.facts.items() if usual.get(name) != fact}
    if cell.kind == RECURRENCE:
        return f"{cell.kind}, {', '.join(told.values())}"
    sizes = f"{cell.inputs or '?'} -> {cell.units or '?'}"
    return ", ".join([f"{cell.kind} {sizes}", *(f"{name} {fact}" for name, fact in told.items())])


def columns(each: NormReport | CellReport) -> tuple[str, str, str]:
    """What a norm or a recurrent node is, its axes and its eps."""
    if isinstance(each, CellReport):
        return cell_facts(each), "", ""
    scale, bias = ("·scale" if each.scale else ""), ("+bias" if each.bias else "")
    what = f"{formula(each)}{scale}{bias}, {_variance(each)}{each.compute_dtype}"
    axes = "all" if each.axes is None else ",".join(map(str, each.axes))
    return what, axes, f"{each.eps:.7g}"
