"""Read a recurrent cell from what its elements compute.

The maximal affine groups of elements, and layer norms of them, that feed the new states are the cell's pre-activations.
Whatever is between them and the new states is a function of a few vectors; it is evaluated in float64 on random
vectors and compared with the steps that `CellSpec` can say, for each assignment of the gates. What agrees is the cell,
however it is written.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np

from cnorm.cells.functions import OF_CELLS, function_of_cell
from onnx_export.importer.affine import Affine, affine
from onnx_export.importer.cell_parts import Found, Leaf, NoCellError, assembled
from onnx_export.importer.cell_probes import Probes, bent_probes, random_probes
from onnx_export.importer.frames import ancestors, depending
from onnx_export.importer.normed_rows import Normed, normed
from onnx_export.importer.values import Unknown, evaluate
from onnx_export.laws.cells import function_of, step
from onnx_export.laws.functions import GRID, found

__all__ = ["Found", "written_cell"]

MAX_VECTORS = 96  # between the pre-activations and the new states
MAX_LEAVES = 4
MAX_NEAR = 32  # elements between the argument of a function and its value
MAX_TRIALS = 4_000
PROBES, MOST_PROBES = 6, 128  # few to find a cell, many to confirm it
MOST_PROBED = 1 << 15  # elements of the many for each vector
SATURATING = 30.0  # of every function without a limit that is stored
UNLIMITED = 1e30  # a larger limit is none
TOLERANCE = 1e-7  # relative, of float64 steps whose weights and eps are those of the file
EXACT = {"tanh", "sigmoid", "relu", "softplus", "silu", "exp", "square", "abs"}  # without numbers that are fitted
ROUNDED = 1e-12  # of steps with these alone


def written_cell(trace, h: np.ndarray, old: Mapping[int, int]) -> Found | None:
    """The cell whose output is `h` (numbers); `old` has for each element of a new state that of the old one."""
    h = np.ravel(h)
    if any(number not in old for number in h.tolist()):
        return None
    behind = ancestors(trace, h)
    key = h.tobytes(), frozenset(pair for pair in old.items() if behind[list(pair)].any())
    if key not in trace.cells:
        try:
            trace.cells[key] = _Reading(trace, h, old).cell()
        except NoCellError as error:
            trace.cells[key] = None
            trace.no_cells += [str(error)] if str(error) else []
    return trace.cells[key]


class _Reading:
    """One search for the cell of some elements."""

    def __init__(self, trace, h, old):
        self.trace, self.h = trace, h
        self.before = np.array([old[number] for number in h.tolist()], np.int64)
        self.new_of = {before: new for new, before in old.items()}
        self.old_h = set(self.before.tolist())
        self.depends = depending(trace, self.before)
        own = [o for o, new in self.new_of.items() if new < len(self.depends) and self.depends[new]]
        self.depends = depending(trace, np.array(own, np.int64))
        self.vectors: list[np.ndarray] = []
        self.leaves: list[Leaf] = []
        self.negatives: list[tuple[np.ndarray, np.ndarray]] = []  # vectors that are a leaf times -1, and this leaf
        self.norms: list[tuple[np.ndarray, Normed]] = []
        self.states: list[np.ndarray] = []
        self.clips: set[float] = set()  # upper limits
        self.limits: set[float] = set()  # beyond all of which the probes must reach

    # ------------------------------------------------------------------ the vectors of the cell

    def cell(self) -> Found | None:
        core, outer = self._unwrapped(self.h)
        self.core, self.units = core, len(core)
        self._walk(core)
        c = [vector for vector in self.states if not np.array_equal(vector, self.before)]
        if len(c) > 1 or not self.leaves or any(len(leaf.numbers) != self.units for leaf in self.leaves):
            return None
        old, new = {"h": self.before}, {"h": self.h}
        if c:
            old["c"], new["c"] = c[0], np.array([self.new_of[number] for number in c[0].tolist()], np.int64)
            if not all(number in self.depends_set(new["c"]) for number in new["c"].tolist()):
                return None
            self._walk(new["c"])
        if len(self.leaves) not in ((4,) if c else (1, 3, 4)):
            return None
        scope = self._scope()
        trial = next(_trials(self, old, new), None)
        if trial is None:
            count = f"the step of {self.units} units with {len(self.leaves)} pre-activations"
            raise NoCellError(f"{count} is none of those that a CellSpec describes")
        return assembled(self, trial, scope, outer, old, new)

    def depends_set(self, numbers) -> set[int]:
        return {number for number in numbers.tolist() if self.depends[number]}

    def _unwrapped(self, h):
        """The vector o tanh(c), or the like, inside zoneout and a projection, and these as fields and parts."""
        outer: dict = {}
        for _ in range(4):
            owners = self.trace.owners(h)
            if len(owners) == 1 and owners[0].op == "clip" and owners[0].constants["lo"] == -owners[0].constants["hi"]:
                inner = owners[0].operands[0][h - owners[0].first, 0]
                form = affine(self.trace, inner, atoms=True)
                if not _is_dense(form):
                    break
                outer["projection_clip"], h = float(owners[0].constants["hi"]), inner
                continue
            form = affine(self.trace, h, atoms=True)
            if form is None or not len(form.terms):
                break
            of_h = np.array([number in self.old_h for number in form.terms.tolist()])
            if of_h.any() and "zoneout" not in outer and not of_h.all():
                kept = form.columns(self.before)
                if len(kept) != len(self.before) or not np.allclose(kept, kept[0, 0] * np.eye(len(kept)), rtol=1e-9):
                    break
                if not 0 < kept[0, 0] < 1:
                    break
                outer["zoneout"] = float(str(np.float32(kept[0, 0])))
                share = 1 - float(kept[0, 0])
                form = Affine(form.terms[~of_h], form.weight[:, ~of_h] / share, form.bias / share)
            elif of_h.any():
                break
            if not all(self.depends[number] for number in form.terms.tolist()):
                break
            if _is_dense(form):
                if self.trace.owners(form.terms)[0].op != "multiply" or len(self.trace.owners(form.terms)) > 1:
                    break
                outer["weight_p"], outer["bias_p"] = form.weight, form.bias
                return form.terms, outer
            rounded = 2.0**-23 if "zoneout" in outer else 0  # of two factors in float32 whose sum is 1
            if len(form.terms) != len(h) or form.bias.any() or (np.abs(form.weight.max(1) - 1) > rounded).any():
                break
            if np.array_equal(form.terms, h):
                break
            h = form.terms[form.weight.argmax(1)]
        return h, outer

    def _walk(self, start) -> None:
        """Collect the vectors behind a new state, up to the pre-activations and the old states."""
        waiting = [np.ravel(start)]
        seen = {vector.tobytes() for vector in (*self.vectors, *(leaf.numbers for leaf in self.leaves))}
        while waiting:
            vector = waiting.pop()
            if vector.tobytes() in seen or not len(vector):
                continue
            seen.add(vector.tobytes())
            if all(number in self.new_of and self.depends[number] for number in vector.tolist()):
                if not any(np.array_equal(vector, state) for state in self.states):
                    self.states.append(vector)
                continue
            if (leaf := self._leaf(vector)) is not None:
                if (other := self._negative(leaf)) is not None:
                    self.negatives.append((leaf.numbers, other.numbers))
                    continue
                self.leaves.append(leaf)
                if len(self.leaves) > MAX_LEAVES:
                    raise NoCellError
                waiting += [] if leaf.reset is None else [leaf.reset]
                continue
            self.vectors.append(vector)
            if len(self.vectors) > MAX_VECTORS:
                raise NoCellError
            waiting += reversed(self._operands(vector))

    def _operands(self, vector) -> list[np.ndarray]:
        result = []
        for block in self.trace.owners(vector):
            at = vector[(vector >= block.first) & (vector < block.first + block.size)] - block.first
            if block.op == "constant" or not block.operands:
                continue
            if block.op == "clip":
                self.clips.add(float(block.constants["hi"]))
                self.limits.update(float(block.constants[end]) for end in ("lo", "hi"))
            rows = at // (block.size // len(block.operands[0]))
            for operand in block.operands:
                if operand.shape[1] == 1:
                    result.append(operand[rows, 0])
                else:
                    result += [operand[row] for row in np.unique(rows)[:8]]
        return result

    def _leaf(self, vector) -> Leaf | None:
        if len(vector) != self.units:
            return None
        form = affine(self.trace, vector, atoms=True)
        if form is None or not len(form.terms):
            return None
        offset = self._offset(vector)
        terms = form.terms.tolist()
        inner = np.array([number for number in terms if self.depends[number] and number not in self.old_h], np.int64)
        if not len(inner):
            of_h = [number for number in terms if number in self.old_h]
            if len(of_h) == len(terms) and not _is_dense(form):
                return None  # the old state itself, scaled
            return Leaf(vector, form, offset)
        if any(number in self.old_h for number in terms):
            return None
        weight = form.columns(inner)
        if one := normed(self.trace, inner, weight):
            row = affine(self.trace, one.row, atoms=True)
            if row and all(number in self.old_h or not self.depends[number] for number in row.terms.tolist()):
                return Leaf(vector, form, offset, of_h=one)
            self.norms.append((vector, replace(one, bias=one.bias + form.bias)))
            return None
        if _is_dense(Affine(inner, weight, form.bias)) and len(inner) == len(self.before):
            return self._reset_leaf(vector, form, offset, inner)
        return None

    def _negative(self, leaf: Leaf) -> Leaf | None:
        """The leaf that another is the negative of: sigmoid(-z) is 1 - sigmoid(z)."""
        for other in self.leaves:
            a, b = leaf.form, other.form
            plain = not leaf.offset and not other.offset and leaf.reset is None and other.reset is None
            same = plain and len(a.terms) == len(b.terms) and np.array_equal(a.bias, -b.bias)
            if same and np.array_equal(a.weight, -b.columns(a.terms)):
                return other
        return None

    def _offset(self, vector) -> float:
        owners = self.trace.owners(vector)
        if len(owners) != 1 or owners[0].op != "shift":
            return 0.0
        offset = owners[0].constants["offset"][vector - owners[0].first]
        inside = affine(self.trace, owners[0].operands[0][vector - owners[0].first, 0], atoms=True)
        return float(offset[0]) if (offset == offset[0]).all() and inside is not None else 0.0

    def _reset_leaf(self, vector, form, offset, inner) -> Leaf | None:
        owners = self.trace.owners(inner)
        if len(owners) != 1 or owners[0].op != "multiply":
            return None
        place = {number: at for at, number in enumerate(self.before.tolist())}
        for operand in owners[0].operands:
            old = operand[inner - owners[0].first, 0].tolist()
            if set(old) == set(place):
                ordered = inner[np.argsort([place[number] for number in old])]
                self._reset = ordered
                return Leaf(vector, form, offset, reset=ordered)
        return None

    def _scope(self) -> str:
        """none, split or sum; the norms of what depends on x alone are found, as h decides whether there are any."""
        rows = [leaf.of_h and affine(self.trace, leaf.of_h.row, atoms=True) for leaf in self.leaves]
        kinds = {"sum" if any(n not in self.old_h for n in row.terms.tolist()) else "split" for row in rows if row}
        if not kinds:
            return "none"
        if len(kinds) > 1:
            raise NoCellError(
                "the norms of some gates have the product of h alone, those of others the sum with that of x"
            )
        result = kinds.pop()
        for at, leaf in enumerate(self.leaves):
            free = np.array([n for n in leaf.form.terms.tolist() if not self.depends[n]], np.int64)
            bare = any(number in self.old_h for number in leaf.form.terms.tolist())
            if bare or (result == "sum" and (len(free) or leaf.of_h is None)):
                raise NoCellError("the products of some gates are normalised, those of others not, or not all of a sum")
            if result == "split" and len(free):
                one = normed(self.trace, free, leaf.form.columns(free))
                if one is None:
                    raise NoCellError("the product of h is normalised and that of x is not")
                self.leaves[at] = Leaf(leaf.numbers, leaf.form, leaf.offset, leaf.of_h, one)
        return result

    # ------------------------------------------------------------------ the functions between

    def functions(self) -> list[str | tuple]:
        """The functions of one element that are anywhere between the pre-activations and the new states."""
        vectors = [vector for vector in self.vectors if len(vector) == self.units]
        known = {int(each[0]) for each in (*(leaf.numbers for leaf in self.leaves), *vectors)}
        named: list = []
        for vector in vectors:
            for inner in known.intersection(self._only_inputs(int(vector[0]))):
                try:
                    values = evaluate(self.trace, vector[:1], [(np.array([inner]), GRID[:, None])])[:, 0]
                except Unknown:
                    continue
                function = found(values)
                if function and function[0] in OF_CELLS and np.isfinite(function[1]).all():
                    one = function_of_cell((function[0], *function[1]), "function")
                    if one not in named:
                        named.append(one)
        return named

    def _only_inputs(self, number: int) -> list[int]:
        """The elements near one of which alone it is a function, each of the next."""
        heap, result = [-number], []
        for _ in range(MAX_NEAR):
            if not heap or len(heap) > MAX_NEAR:
                break
            top = -heapq.heappop(heap)
            if not heap and top != number:
                result.append(top)
            block = self.trace.owner(top)
            if not block.operands:  # of the frame or a state
                break
            row = (top - block.first) // (block.size // len(block.operands[0]))
            inner = {int(n) for operand in block.operands for n in operand[row] if -n not in heap}
            for each in inner:
                if self.trace.owner(each).op != "constant":
                    heapq.heappush(heap, -each)
        return result


def _is_dense(form: Affine | None) -> bool:
    """Whether an output reads several terms, as that of a product does."""
    return form is not None and len(form.terms) > 0 and bool(((form.weight != 0).sum(1) > 1).any())


def _trials(reading: _Reading, old, new) -> Iterator[tuple[str, dict, dict, Normed | None]]:
    """Kind, the leaves by gate, fields and the norm of c, of each cell that agrees."""
    leaves, functions = reading.leaves, reading.functions()
    clips = [None, *sorted(reading.clips)]
    scales = [2.0, SATURATING, *(3 * abs(limit) for limit in reading.limits if 0 < abs(limit) < UNLIMITED)]
    rows = min(MOST_PROBES, max(PROBES, MOST_PROBED // reading.units))
    try:
        few, many = (random_probes(reading, old, new, *each) for each in ((PROBES, [2.0]), (rows, scales)))
    except Unknown:
        return
    tried = [few, many] if reading.limits else [few]  # parameters are fitted: far from 0 their rounding shows
    count, bends = 0, None
    for kind, gates, fields, norm in _candidates(reading, clips, "c" in old):
        for state, gate in itertools.product(functions, functions if kind != "RNN" else ["sigmoid"]):
            if kind != "RNN" and gate == "tanh":
                continue
            for order in itertools.permutations(range(len(leaves)), len(gates)):
                count += 1
                if count > MAX_TRIALS:
                    return
                chosen = dict(zip(gates, order, strict=True))
                named = fields | {"activation": state} | ({} if kind == "RNN" else {"recurrent_activation": gate})
                if not all(_agrees(reading, probes, kind, chosen, named, norm) for probes in tried):
                    continue
                bends = bends or bent_probes(reading, old, new, few)
                if _agrees(reading, bends, kind, chosen, named, norm):
                    yield kind, {name: leaves[at] for name, at in chosen.items()}, named, norm


def _agrees(reading: _Reading, probes: Probes, kind: str, chosen: dict[str, int], fields, norm) -> bool:
    """Whether a cell makes of the probes what the file does."""
    p = {name: probes.p[at] for name, at in chosen.items()}
    made = step(kind, p, probes.h, probes.c, fields, norm and norm.of)
    pairs = zip(made, (probes.h_new, probes.c_new), strict=False)
    exact = norm is None and {fields["activation"], fields.get("recurrent_activation", "sigmoid")} <= EXACT
    size = np.max([np.abs(each).max(1) for each in (*probes.p, probes.h, probes.c)], axis=0)[:, None]
    if not all(_same(*pair, ROUNDED if exact else TOLERANCE, np.minimum(1, size)) for pair in pairs):
        return False
    leaves = {name: reading.leaves[at] for name, at in chosen.items()}
    return kind != "GRU" or _resets(reading, leaves, fields, p, probes.h, probes.given)


def _same(a, b, tolerance: float = TOLERANCE, size=1.0) -> bool:
    bound = ROUNDED + tolerance * size
    return a.shape == b.shape and bool(np.isclose(a, b, rtol=tolerance, atol=bound, equal_nan=True).all())


def _resets(reading, chosen, fields, p, h, known) -> bool:
    """Whether the vector before the product of a reset before is r h, and there is none in other cells."""
    leaf = chosen["n"]
    if (leaf.reset is not None) != (fields["reset"] == "before") or any(
        one.reset is not None for name, one in chosen.items() if name != "n"
    ):
        return False
    if leaf.reset is None:
        return True
    others = [pair for pair in known if pair[0] is not leaf.numbers]
    try:
        values = evaluate(reading.trace, leaf.reset, others)
    except Unknown:
        return False
    return _same(values, function_of(fields["recurrent_activation"], fields.get("clip"))(p["r"]) * h)


def _candidates(reading: _Reading, clips, has_c: bool):
    """Kind, gates, fields and norm of the cells that may have this many pre-activations."""
    leaves = len(reading.leaves)
    for clip in clips:
        clipped = {} if clip is None else {"clip": clip}
        if has_c and leaves == 4:
            for cell_clip in clips:
                of_c = {} if cell_clip is None else {"cell_clip": cell_clip}
                for norm, place in [
                    (None, "none"),
                    *itertools.product((n for _, n in reading.norms), ("output", "carry")),
                ]:
                    if norm is None or len(norm.row) == reading.units:
                        yield "LSTM", "fiog", clipped | of_c | {"cell_norm": place}, norm
        elif not has_c and leaves in (3, 4):
            for reset, update in itertools.product(
                ["candidate", "before"] if leaves == 3 else ["after"], ("keep", "new")
            ):
                yield "GRU", "zrn" if leaves == 3 else "zrnm", clipped | {"reset": reset, "update": update}, None
        elif not has_c and leaves == 1:
            yield "RNN", "a", clipped, None
