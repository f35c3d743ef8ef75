"""One norm of a graph: its nodes, its parameters and its name, and whether the file calls it a layer norm."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, field, replace

import onnx

from onnx_export.graph.scope import FUNCTION_KEY, Scope, every, function_key
from onnx_export.nodes import model_nodes
from onnx_export.operators import RMS, Formula, Operator
from onnx_export.validation.values import ancestors

_LONGEST_NAME = 250
_FEWEST_STEPS = 3  # two norms that share a scale may be a mistake
_PARAMETER = re.compile(r"[./_](weight|scale|gamma)$")
_SCOPES, _LONGEST_SCOPES = "pkg.torch.onnx.name_scopes", 10_000


@dataclass(frozen=True)
class NearMiss:
    """Why nodes that resemble a norm do not compute one.

    Attributes
    ----------
    reason : str
        Empty for a norm.
    error : bool
        Whether it is certainly a mistake.
    trap : str
        The key in `traps.TRAPS` of the pattern that the near miss is, empty for none.
    """

    reason: str = ""
    error: bool = False
    trap: str = ""

    def then(self, later: NearMiss) -> NearMiss:
        """Both reasons, certainly a mistake if either is."""
        if not self.reason or not later.reason:
            return self if self.reason else later
        reason = self.reason if later.reason in self.reason else f"{self.reason}; and {later.reason}"
        return replace(self, reason=reason, error=self.error or later.error)


NONE = NearMiss()


@dataclass(eq=False, kw_only=True)
class Norm:
    """One norm, or a near miss: arithmetic that resembles a norm.

    Attributes
    ----------
    scope : Scope
        The graph that contains it.
    nodes : list of onnx.NodeProto
        The nodes it consists of.
    operator : Operator or None
        None for a norm in primitive operators.
    formula : Formula
    variance : {"centred", "one-pass", "operator"}
        How the file computes the variance; "operator" leaves it to the runtime.
    x, y : str
        Names of the normalised value and of the result. For a Skip or Embed operator `x` is its first input.
    axes : tuple of int or None
        Normalised axes, non-negative where the rank is known; None stands for all.
    eps : float
        As stored, in the dtype `eps_dtype`.
    compute_dtype : int
        ONNX element type of the statistics.
    scale, bias : str
        Value names, empty where absent.
    near : NearMiss
    eps_first : bool
        Whether eps is the first operand of the Add. The sum is the same, but some fusions then use another eps.
    stored_reciprocal : bool
        Whether a mean is a sum times a stored 1/n, or a root is divided by a stored sqrt(n): both constants are
        rounded.
    floor : float
        Lower limit (clamp) of the variance or deviation; 0 for none.
    folded : bool
        Whether it is computed as x * f + (bias - mean * f), where f is rstd or rstd * scale.
    shrink : float
        The result is this much smaller than the formula's; the scale makes up for it.
    shared : int
        How many of the first nodes it may share with other norms: those of the variance.
    moved : bool
        Whether its rows enter it in two layouts, so that none can be made up.
    """

    scope: Scope
    nodes: list[onnx.NodeProto]
    formula: Formula
    x: str
    y: str
    axes: tuple[int, ...] | None
    eps: float
    eps_dtype: int
    compute_dtype: int
    operator: Operator | None = None
    variance: str = "operator"
    scale: str = ""
    bias: str = ""
    near: NearMiss = NONE
    eps_first: bool = False
    stored_reciprocal: bool = False
    floor: float = 0.0
    folded: bool = False
    shrink: float = 1.0
    shared: int = 0
    moved: bool = False
    name: str = field(default="", init=False)

    def __post_init__(self) -> None:
        self.name = _name(self)[:_LONGEST_NAME]

    @property
    def near_miss(self) -> str:
        """Why it is not a layer norm although it resembles one; empty for a norm."""
        return self.near.reason

    @property
    def quantised(self) -> bool:
        """Whether integers lie between its input and its result, so that float64 has nothing to compare with."""
        return not self.operator and any(node.op_type == "QuantizeLinear" for node in self.nodes)

    @property
    def of(self) -> str:
        """What an RMS norm is of where that is a difference, lest it is taken for a layer norm; else empty."""
        node = self.scope.producer(self.x) if self.formula is RMS else None
        if node is None or node.op_type != "Sub" or self.scope.constant(node.input[1]) is not None:
            return ""
        return "x - f(x)" if node.input[0] in ancestors(self.scope, node.input[1]) else ""

    @property
    def form(self) -> str:
        """The operator's name, or "decomposed"."""
        return self.operator.name if self.operator else "decomposed"

    @property
    def terms(self) -> list[str]:
        """The values whose sum is normalised."""
        return self.operator.terms(self.nodes[0]) if self.operator else [self.x]

    @property
    def function(self) -> str:
        """Name of the local function that its nodes were inlined from, empty for none."""
        for prop in self.nodes[0].metadata_props:
            if prop.key == FUNCTION_KEY:
                return prop.value.partition("\n")[0]
        return self.scope.graph.name if self.scope.is_function else ""

    @property
    def claimed(self) -> bool:
        """Whether the file names it a layer norm: by the operator, or by the name of the local function."""
        return self.operator is not None or claims(self.function)


def claims(name: str) -> bool:
    """Whether the name of a function contains "LayerNorm", in any spelling."""
    return "layernorm" in name.lower().replace("_", "")


def unproved_claims(model: onnx.ModelProto, norms: list[Norm]) -> list[str]:
    """Names of functions that are called, are named LayerNorm, and in which no norm or near miss was found.

    Parameters
    ----------
    model : onnx.ModelProto
        Before inlining, after `mark_functions`.
    norms : list of Norm
        Found in the inlined model.
    """
    names = {function_key(f.name, f.domain): f.name for f in model.functions}
    callers: dict[str, set[str]] = defaultdict(set)
    for function in model.functions:
        for node in every(function.node):
            callers[function_key(node.op_type, node.domain)].add(function_key(function.name, function.domain))
    holding = {p.value for norm in norms for node in norm.nodes for p in node.metadata_props if p.key == FUNCTION_KEY}
    graphs = [norm.scope.graph for norm in norms if norm.scope.is_function]
    holding |= {function_key(graph.name, graph.domain) for graph in graphs}
    pending = list(holding)
    while pending:
        more = callers.get(pending.pop(), set()) - holding
        holding |= more
        pending += more
    used = callers.keys() | {function_key(node.op_type, node.domain) for node in model_nodes(model)}
    return [name for key, name in names.items() if claims(name) and key in used and key not in holding]


def _module(nodes: list[onnx.NodeProto]) -> str:
    """The path of the innermost module of all nodes, by the metadata of PyTorch's current exporter; else empty.

    The metadata lists the modules around a node, as Python writes a list of strings, and last its operation.
    """
    texts = [p.value[:_LONGEST_SCOPES] for node in nodes for p in node.metadata_props if p.key == _SCOPES]
    common: list[str] = []
    for level in zip(*(re.findall("'([^']*)'", text)[:-1] for text in texts), strict=False):
        if len(set(level)) != 1:
            break
        common.append(level[0])
    return common[-1] if common else ""


def _name(norm: Norm) -> str:
    """The module path common to its nodes, from the names or metadata of exporters; else the name of a node or y."""
    module = _module(norm.nodes)
    # a body names the Loop or Scan, lest norms of two bodies have one name
    place = f"{norm.scope.label}/" if norm.scope.outer is not None and not module else ""
    if norm.operator:
        own = norm.nodes[0].name or norm.y
        return f"{module}/{own}" if module else place + own
    if module:
        return module
    names = [n.name for n in norm.nodes if n.name and "/" in n.name.strip("/")]
    parts = [name.split("/")[:-1] for name in names]
    common = []
    for level in zip(*parts, strict=False):
        if len(set(level)) != 1:
            break
        common.append(level[0])
    return "/".join(common) if any(common) else place + norm.y


def name_steps(norms: list[Norm]) -> None:
    """Name norms that share a stored scale after it, and by number: the steps of a cell that is written out.

    Those that an exporter has named otherwise keep their names.
    """
    groups: dict[tuple[int, str], list[Norm]] = defaultdict(list)
    for norm in norms:
        if norm.scale and norm.scope.tensor(norm.scale) is not None:
            groups[id(norm.scope), norm.scale].append(norm)
    for (_, scale), group in groups.items():
        names = {norm.name for norm in group}
        own = any(norm.name != norm.y for norm in group)
        if len(group) < _FEWEST_STEPS or (len(names) == len(group) and own):
            continue
        stem = names.pop() if len(names) == 1 else _PARAMETER.sub("", scale)
        for step, norm in enumerate(group):
            norm.name = f"{stem}[{step}]"[:_LONGEST_NAME]
