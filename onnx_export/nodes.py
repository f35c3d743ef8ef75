"""Iterate over the graphs and nodes of a model, and sort nodes topologically."""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator
from itertools import chain, count

import onnx
from onnx import inliner

from cnorm.text import clip, printable, quoted
from onnx_export.errors import Unreadable

_MOST_CALLS_DEEP = 8  # functions that pass on an attribute, in a row


def describe(node: onnx.NodeProto) -> str:
    """The operator of a node and its name, or its first output that has one, for messages."""
    place = node.name or next(filter(None, node.output), "")
    return f"{node.domain + '.' if node.domain else ''}{node.op_type} {quoted(place)}"


def subgraphs(node: onnx.NodeProto) -> Iterator[tuple[str, onnx.GraphProto]]:
    """The subgraphs of a node, each with the name of its attribute."""
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.name, attribute.g
        for index, graph in enumerate(attribute.graphs):
            yield f"{attribute.name}[{index}]", graph


def names_read(graph: onnx.GraphProto) -> set[str]:
    """Every name that a graph reads, its subgraphs included."""
    names = {value.name for value in graph.output}
    for node in graph.node:
        names.update(node.input)
        for _, inner in subgraphs(node):
            names |= names_read(inner)
    return names


def all_graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """`graph` and all its subgraphs, recursively."""
    pending = [graph]
    while pending:
        graph = pending.pop()
        yield graph
        pending += [inner for node in graph.node for _, inner in subgraphs(node)]


def model_graphs(model: onnx.ModelProto) -> Iterator[onnx.GraphProto]:
    """The main graph and every subgraph, those inside local functions included."""
    yield from all_graphs(model.graph)
    for function in model.functions:
        for node in function.node:
            for _, inner in subgraphs(node):
                yield from all_graphs(inner)


def model_nodes(model: onnx.ModelProto) -> Iterator[onnx.NodeProto]:
    """Every node of the model, subgraphs and local functions included."""
    for graph in model_graphs(model):
        yield from graph.node
    for function in model.functions:
        yield from function.node


def free_prefix(model: onnx.ModelProto, stem: str) -> str:
    """A prefix that is new to the model: `stem` or `stem` and a number, such that no name begins with it and "_"."""
    taken = {match[1] for match in map(re.compile(rf"{stem}(\d*)_").match, _names(model)) if match}
    return stem + next(number for number in chain([""], map(str, count(2))) if number not in taken)


def _names(model: onnx.ModelProto) -> Iterator[str]:
    """The name of every value in all graphs and functions of the model."""
    for graph in model_graphs(model):
        for field in (graph.input, graph.output, graph.initializer, graph.value_info):
            yield from (each.name for each in field)
        yield from (sparse.values.name for sparse in graph.sparse_initializer)
    for owner in chain(model_nodes(model), model.functions):
        yield from (*owner.input, *owner.output)


def settle_references(model: onnx.ModelProto) -> None:
    """Give attributes that local functions take from their calls the value that these agree on.

    An attribute that a call leaves out has the function's default, or is left out.
    """
    for _ in range(_MOST_CALLS_DEEP):
        calls: dict[tuple, list[onnx.NodeProto]] = {}
        for node in model_nodes(model):
            calls.setdefault((node.domain, node.op_type, node.overload), []).append(node)
        changed = [
            _settle(function, calls.get((function.domain, function.name, function.overload), []))
            for function in model.functions
        ]
        if not any(changed):
            return


def _settle(function: onnx.FunctionProto, calls: list[onnx.NodeProto]) -> bool:
    """`settle_references` in one function; returns whether an attribute was replaced."""
    default = {each.name: each for each in function.attribute_proto}
    settled: dict[str, onnx.AttributeProto | None] = {}
    for name in {*function.attribute, *default} if calls else ():
        given = [next((each for each in call.attribute if each.name == name), default.get(name)) for call in calls]
        same = all(each == given[0] for each in given)
        if same and not (given[0] is not None and given[0].ref_attr_name):
            settled[name] = given[0]
    changed, pending = False, list(function.node)
    while pending:
        node = pending.pop()
        pending += [inner for _, graph in subgraphs(node) for inner in graph.node]
        for each in [each for each in node.attribute if each.ref_attr_name in settled]:
            value, name, changed = settled[each.ref_attr_name], each.name, True
            if value is None:
                node.attribute.remove(each)
            else:
                each.CopyFrom(value)
                each.name = name
    return changed


def inlined(model: onnx.ModelProto) -> onnx.ModelProto:
    """A model with its local functions inlined, but those of another opset than the model's.

    onnxruntime inlines them before it optimises, too, so it runs the same graph. onnx's inliner drops the defaults of
    their attributes. So each call is given those that it leaves out, and the functions that none calls are inlined
    first: only then is known what the calls in them leave out.
    """
    if not model.functions:
        return model
    whole = onnx.ModelProto()
    whole.CopyFrom(model)
    _give_defaults(whole)
    versions = {each.domain: each.version for each in whole.opset_import}
    functions = onnx.ModelProto(functions=whole.functions).functions
    own, staying = [], []
    for each in functions:
        same = all(versions.get(one.domain, one.version) == one.version for one in each.opset_import)
        (own if same else staying).append(each)
    staying = _with_called(staying, functions)
    del whole.functions[:]  # onnx's inliner takes no model with functions of another opset
    whole.functions.extend(own)
    while outer := {_name(each) for each in whole.functions} - _called(whole.functions):
        whole = inliner.inline_selected_functions(whole, sorted(outer))
        _give_defaults(whole)
    whole.functions.extend(staying)
    return whole


def _name(function: onnx.FunctionProto) -> tuple[str, str]:
    return function.domain, function.name


def _called(functions: Iterable[onnx.FunctionProto]) -> set[tuple[str, str]]:
    """Domains and names of what functions call, operators included."""
    return {(node.domain, node.op_type) for node in model_nodes(onnx.ModelProto(functions=functions))}


def _with_called(some: list[onnx.FunctionProto], functions) -> list[onnx.FunctionProto]:
    """Some functions and those that they call."""
    names = {_name(each) for each in some}
    while more := _called(each for each in functions if _name(each) in names) - names:
        names |= more
    return [each for each in functions if _name(each) in names]


def _give_defaults(model: onnx.ModelProto) -> None:
    """Give calls of local functions the attributes that they leave out."""
    defaults = {(*_name(each), each.overload): each.attribute_proto for each in model.functions}
    for node in model_nodes(model):
        given = {each.name for each in node.attribute}
        left_out = defaults.get((node.domain, node.op_type, node.overload), ())
        node.attribute.extend(each for each in left_out if each.name not in given)


def drop_omitted(model: onnx.ModelProto, kinds: Collection[str] | None = None) -> list[str]:
    """Drop the last inputs of nodes, of these operators or all, that have the empty name; returns the nodes' names."""
    found = []
    for node in model_nodes(model):
        if node.input and not node.input[-1] and (kinds is None or node.op_type in kinds):
            while node.input and not node.input[-1]:
                del node.input[-1]
            found.append(node.name or next(filter(None, node.output), ""))
    return found


def sort_nodes(model: onnx.ModelProto) -> bool:
    """Sort the nodes of every graph topologically, subgraphs and local functions included.

    The standard requires topological order, but onnxruntime sorts the main graph by itself, so files without it exist.

    Returns
    -------
    bool
        Whether a node had to move.

    Raises
    ------
    Unreadable
        If a name is used but never defined, or defined twice, or if nodes form a cycle.
    """
    missing, moved = _sort(model.graph, {value.name for value in model.graph.input})
    if missing:
        raise Unreadable(_undefined(missing))
    for function in model.functions:
        try:
            missing, inner_moved = _sort(function, set(function.input))
        except Unreadable as error:
            raise Unreadable(f"in function {quoted(function.name)}: {error}") from None
        if missing:
            raise Unreadable(f"in function {quoted(function.name)}: {_undefined(missing)}")
        moved |= inner_moved
    return moved


def _undefined(missing: dict[str, str]) -> str:
    name, user = next(iter(missing.items()))
    if not user:
        return f"output {quoted(name)} is never computed"
    return f"{clip(printable(user), 80)} uses {quoted(name)}, which nothing defines"


def _sort(graph: onnx.GraphProto | onnx.FunctionProto, defined: set[str]) -> tuple[dict[str, str], bool]:
    """Sort one graph and its subgraphs.

    Returns
    -------
    dict of str to str
        The names that it takes from enclosing graphs, each with the operator that uses it; empty for an output of the
        graph.
    bool
        Whether a node had to move.
    """
    outputs: dict[str, str] = {}
    if isinstance(graph, onnx.GraphProto):
        stored = [tensor.name for tensor in graph.initializer]
        stored += [sparse.values.name for sparse in graph.sparse_initializer]
        if len(set(stored)) != len(stored):
            twice = next(name for name, count in Counter(stored).items() if count > 1)
            raise Unreadable(f"the initialiser {quoted(twice)} is defined twice")
        defined = defined | set(stored)
        outputs = {value.name: "" for value in graph.output}
    maker: dict[str, int] = {}
    uses: list[dict[str, str]] = []
    moved = False
    for index, node in enumerate(graph.node):
        uses.append(dict.fromkeys(filter(None, node.input), node.op_type))
        for _, inner in subgraphs(node):
            taken, inner_moved = _sort(inner, {value.name for value in inner.input})
            uses[-1] |= taken
            moved |= inner_moved
        for name in filter(None, node.output):
            if name in defined or name in maker:
                raise Unreadable(f"{quoted(name)} is defined twice")
            maker[name] = index

    needs = [{maker[name] for name in used if name in maker} for used in uses]
    if any(max(before, default=-1) >= index for index, before in enumerate(needs)):
        ranks = _topological_order(needs)
        if -1 in ranks:
            stuck = quoted(graph.node[ranks.index(-1)].op_type)
            raise Unreadable(f"nodes use each other's results in a circle ({stuck})")
        rank = iter(ranks)
        graph.node.sort(key=lambda _: next(rank))
        moved = True
    inside = defined | maker.keys()
    free = {name: user for used in (*uses, outputs) for name, user in used.items() if name not in inside}
    return free, moved


def _topological_order(needs: list[set[int]]) -> list[int]:
    """Topological order (Kahn's algorithm): the position of each node; -1 for nodes on or behind a cycle."""
    users: list[list[int]] = [[] for _ in needs]
    for index, before in enumerate(needs):
        for other in before:
            users[other].append(index)
    waiting = [len(before) for before in needs]
    ready = deque(index for index, others in enumerate(waiting) if not others)
    ranks, place = [-1] * len(needs), count()
    while ready:
        done = ready.popleft()
        ranks[done] = next(place)
        for user in users[done]:
            waiting[user] -= 1
            if not waiting[user]:
                ready.append(user)
    return ranks
