"""Make the layers of a model from the blocks between a frame and the outputs.

The blocks are walked from the outputs back to the frame, as steps, each of which says what it reads; `joining.py` makes
layers of the steps.
"""

from __future__ import annotations

import numpy as np

import cnorm
from onnx_export.importer.activations import activation, bent
from onnx_export.importer.affine import affine
from onnx_export.importer.cell_layers import of_operator, of_written
from onnx_export.importer.cells import Found, written_cell
from onnx_export.importer.convolutions import Lags, in_frame, over_time, unfolding
from onnx_export.importer.delays import Delays
from onnx_export.importer.elements import Block, Cannot, Elements
from onnx_export.importer.joining import FRAME, Cell, Joined, Link, Step
from onnx_export.importer.linear_cells import linear_recurrence
from onnx_export.importer.norms import written_norm
from onnx_export.importer.operators_of_cells import Scan
from onnx_export.importer.positions import Orders, linear, rows_apart, scans_of, turned, written_cells
from onnx_export.importer.reducing import among_constants, largest, summed
from onnx_export.importer.shifts import Shifts

__all__ = ["Chain"]

MAX_STEPS = 10_000
STRANGE = "is not what an output gives back"
STEPS = "it does several steps of a frame, from a state that is no zeros: export calls in which it does one"


class Chain:
    """The layers between the frame and the outputs.

    Parameters
    ----------
    trace : Trace
    frame : ndarray of int64
        Numbers of the frame's elements, in their order.
    old : dict of int to int
        For each element of a state's output that of its input.
    outputs : dict of str to ndarray
        Numbers of each output's elements, in their order.
    shifts : Shifts, optional
        What elements were in frames before.
    brief : bool
        Whether one fault is enough.
    inside : bool
        Whether cells run over the frames of a call, so that they may begin at zeros without a state of the file.

    Attributes
    ----------
    layers : list of cnorm layers
    frame : ndarray of int64
    names : dict of str to str
        The name of the layer whose outputs an output is; empty if there is one output, that of the last layer.
    cells : list of Cell
        In the order of the layers.
    faults : list of str
        What has no layer.
    depth : int
        Steps found on the way from the outputs.
    """

    def __init__(
        self,
        trace,
        frame: np.ndarray,
        old: dict[int, int],
        outputs: dict[str, np.ndarray],
        shifts: Shifts | None = None,
        *,
        brief: bool = False,
        inside: bool = False,
    ):
        self._brief, self._inside = brief, inside
        self.trace, self.old = trace, old
        self._lags = Lags(old, shifts)
        self._delays = Delays(trace, self._lags)
        own = None if shifts or any(number in old for number in trace.unrolled) else scans_of(trace, old, inside)
        needed = [*outputs.values(), np.array(list(old), np.int64)]
        self._orders = Orders(trace, own or [], needed if own is not None else [], list(old.values()))
        self._shapes: dict[bytes, tuple[int, int]] = {}  # [channels, positions] of what layers of frames read
        self.frame = frame
        self._filters: dict[bytes, tuple[set[int], np.ndarray]] = {}  # convolutions over time: frame and outputs
        self._shared: dict[bytes, np.ndarray] = {}  # for the outputs of one of several with the same cache those of all
        ends = self._walk(outputs)
        if self._share() or self._delays.share():
            ends = self._walk(outputs)
        self.depth = len(self._steps)
        self.layers: list = []
        self.cells: list[Cell] = []
        self.names: dict[str, str] = {}
        if not self.faults:
            try:
                joined = Joined(len(frame), self._steps, ends)
                if not joined.tell_size:  # once more, as layers have names now
                    ends = self._walk(outputs)
                    joined = Joined(len(frame), self._steps, ends, sized=True)
                self.layers, self.cells, self.names = joined.layers, joined.cells, joined.names
            except Cannot as error:
                self.faults.append(str(error))

    def _walk(self, outputs: dict[str, np.ndarray]) -> dict[str, int]:
        """The steps, from the outputs back to the frame; where each output is among them."""
        self.faults = []
        self._made = {self.frame.tobytes(): FRAME}
        self._steps: list[Step] = []
        self._negated: set[int] = set()  # blocks of a difference's second term, which is not computed twice
        return {name: self._end(numbers) for name, numbers in outputs.items()}

    def _share(self) -> bool:
        """Whether convolutions over time have a cache in common, so that one layer has to compute them."""
        groups: list[tuple[set[int], list[np.ndarray]]] = []
        for heads, numbers in self._filters.values():
            own = [group for group in groups if group[0] & heads]
            groups = [group for group in groups if not group[0] & heads]
            groups.append((heads.union(*(one for one, _ in own)), [*(n for _, each in own for n in each), numbers]))
        for _, parts in groups:
            if len(parts) > 1:
                whole = np.array(list(dict.fromkeys(np.concatenate(parts).tolist())))
                self._shared |= {part.tobytes(): whole for part in parts if not np.array_equal(part, whole)}
        return bool(self._shared)

    def _end(self, numbers: np.ndarray) -> int:
        """The step that computes some elements, behind those that it needs; faults are noted."""
        links: dict[bytes, tuple[Link | None, list[np.ndarray]]] = {}
        waiting = [numbers]
        while waiting:
            if self._brief and self.faults:
                return FRAME
            key = waiting[-1].tobytes()
            if key in self._made:
                waiting.pop()
                continue
            if key not in links:
                links[key] = self._found(waiting[-1])
            link, reads = links[key]
            missing = [one for one in reads if one.tobytes() not in self._made]
            if any(one.tobytes() in links for one in missing):  # it is on the way here from the output
                node = self.trace.owners(waiting[-1])[0].node
                self.faults.append(f"{node}: its result depends on itself, and it is in no cell that cnorm reads")
                self.faults += self.trace.no_cells
                links[key] = None, []
                continue
            if missing:
                waiting.extend(reversed(missing))
                continue
            self._made[key] = len(self._steps)
            self._steps.append(Step(link, [self._made[one.tobytes()] for one in reads], len(waiting[-1])))
            if len(self._steps) > MAX_STEPS:
                raise Cannot(f"its outputs take more than {MAX_STEPS} steps")
        return self._made[numbers.tobytes()]

    def _found(self, numbers: np.ndarray) -> tuple[Link | None, list[np.ndarray]]:
        """The step that computes some elements, and what it reads; a fault is noted."""
        try:
            return self._last(numbers)
        except Cannot as error:
            self.faults.append(str(error))
            return None, [] if error.behind is None else [error.behind]  # there may be more faults

    def _last(self, numbers: np.ndarray) -> tuple[Link, list[np.ndarray]]:
        """The last step before some elements, and what it reads, each in order."""
        if len(numbers) == 0:
            raise Cannot("what a layer reads is constant")
        if numbers.tobytes() in self._shapes and (
            found := self._copied(numbers.reshape(self._shapes[numbers.tobytes()]))
        ):
            return found
        owners = self.trace.owners(numbers)
        if any(owner.op == "constant" for owner in owners):
            return among_constants(numbers, owners)
        if len(each := dict.fromkeys(numbers.tolist())) < len(numbers):
            return self._picked(numbers, np.array(list(each)))
        if (whole := self._shared.get(numbers.tobytes())) is not None:
            return self._picked(numbers, whole)
        if len(owners) == 1 and len(numbers) < owners[0].size and self._is_whole(owners[0]):
            return self._taken(numbers, owners[0])
        if (whole := self._orders.whole(owners, numbers)) is not None:
            return self._picked(numbers, whole)
        if found := self._delayed(numbers) or self._cell(numbers, owners) or self._at_positions(numbers):
            return found
        if apart := rows_apart(self.trace, numbers):
            return self._apart(numbers, *apart)
        block = self._block(numbers)
        if found := in_frame(self._block, self._lags, block, self._zeros):
            return self._of_frame(*found)
        linear = None if block and block.first in self._negated else affine(self.trace, numbers)
        if linear and not self._lags.begins_alike(self.trace, numbers, linear):
            linear = None
        if linear and (found := over_time(self._lags, linear)):
            if self._lags.cached:
                self._filters[numbers.tobytes()] = set(found[2].tolist()), numbers
            return (lambda to: to.filtered(*found[:2])), [found[2]]
        if linear and not self._sums(block, linear.terms):
            return (lambda to: to.product(linear.weight, linear.bias)), [linear.terms]
        if len(owners) > 1:
            return self._together(numbers, owners)
        return self._single(block) if block and block.op != "input" else self._taken(numbers, owners[0])

    def _delayed(self, numbers: np.ndarray) -> tuple[Link, list[np.ndarray]] | None:
        """Elements of earlier steps."""
        if not (found := self._delays.find(numbers)):
            parts = self._delays.parts(numbers)
            return self._of_parts(numbers, parts) if parts else None
        layer, state, frame, whole = found
        same = np.array_equal(whole, numbers)
        return ((lambda to: to.filtered(layer, state)), [frame]) if same else self._picked(numbers, whole)

    def _is_whole(self, block: Block) -> bool:
        """Whether a part of it can't be computed without the rest: a state, or a norm that is written out."""
        state = block.numbers[0] in self.old and block.numbers[-1] in self.old
        return state or self._written_norm(block) is not None

    def _sums(self, block: Block | None, terms: np.ndarray) -> bool:
        """Whether it adds what several layers compute, or x itself, so that it is no product of one layer's outputs."""
        if block is None or block.op not in ("add", "subtract"):
            return False
        several = len(self.trace.owners(terms)) > 1
        return several or any(np.array_equal(operand.ravel(), terms) for operand in block.operands)

    def _together(self, numbers: np.ndarray, owners: list[Block]) -> tuple[Link, list[np.ndarray]]:
        """Elements of several blocks."""
        if set(numbers.tolist()) <= set(self.frame.tolist()):
            return self._picked(numbers, self.frame)
        parts = self._orders.parts.get(numbers.tobytes()) or self._orders.grouped(owners, numbers)
        if shape := self._shapes.get(numbers.tobytes()):
            turned = numbers.reshape(shape).T.ravel()  # where parts may stand behind one another along the positions
            if min(shape) > 1 and np.array_equal(np.concatenate(self._orders.grouped(owners, turned)), turned):
                return self._picked(numbers, turned)
        return self._of_parts(numbers, parts)

    def _apart(self, numbers: np.ndarray, row: np.ndarray, rows: np.ndarray) -> tuple[Link, list[np.ndarray]]:
        """Elements of several rows, which read parts of the same."""
        self._shared |= {each.tobytes(): rows.ravel() for each in rows}
        return self._of_parts(numbers, [numbers[row == one] for one in dict.fromkeys(row.tolist())])

    def _of_parts(self, numbers: np.ndarray, parts: list[np.ndarray]) -> tuple[Link, list[np.ndarray]]:
        together = self._orders.join(numbers, parts)
        if np.array_equal(together, numbers):
            return (lambda to: to.concat()), parts
        return self._picked(numbers, together)

    def _picked(self, numbers: np.ndarray, whole: np.ndarray) -> tuple[Link, list[np.ndarray]]:
        """Elements of others, selected, repeated or in another order."""
        place = {number: index for index, number in enumerate(whole.tolist())}
        at = np.array([place[number] for number in numbers.tolist()])
        return (lambda to: to.take(at)), [whole]

    def _block(self, numbers: np.ndarray) -> Block | None:
        """The block, or the part of one, that computes just these elements in this order."""
        owners = self.trace.owners(numbers)
        if len(owners) != 1:
            return None
        whole = np.array_equal(numbers, owners[0].numbers)
        return owners[0] if whole else owners[0].part(numbers - owners[0].first)

    def _taken(self, numbers: np.ndarray, block: Block) -> tuple[Link, list[np.ndarray]]:
        """Some elements of a block, or all in another order."""
        whole = block.numbers
        if block.op == "input":
            whole = self.frame
            if not set(numbers.tolist()) <= set(whole.tolist()):
                raise Cannot(f"the input {block.node!r} is no frame, and no cell or convolution reads it as a state")
        return self._picked(numbers, whole)

    def _single(self, block: Block) -> tuple[Link, list[np.ndarray]]:
        op, constants = block.op, block.constants
        if op == "embedding":
            return self._embedding(block)
        if op in ("scale", "shift"):
            values = constants["factor" if op == "scale" else "offset"]
            return (lambda to: getattr(to, op)(values)), [block.operands[0].ravel()]
        if op in ("mean", "sum"):
            return summed(block)
        if op == "max":
            return largest(block)
        if op == "norm":
            return self._norm(block.node, block.operands[0], constants["eps"])
        if found := self._written_norm(block):
            return found
        if found := activation(self._block, block):
            layer, factor, x = found
            return (lambda to: to.activation(layer, factor)), [x]
        if op in ("multiply", "add", "subtract"):
            return self._joined(block)
        reason = f"no layer computes {op.replace('_', ' ')}"
        if op == "integer":
            reason = "it makes integers of elements of the frame"
        elif op in ("carried", "repeated"):
            reason = "it carries from step to step what no cell does"
        elif op == "state":
            reason = "its c is read without its h, and a layer gives h"
        elif op == "divide":
            reason = "it divides two results that depend on the frame"
        elif op == "product":
            constants = any(owner.op == "constant" for owner in self.trace.owners(block.operands[0].ravel()))
            reason = f"it multiplies {len(block.operands[0])} parts of the frame by one matrix"
            reason = "it multiplies constants beside elements of the frame by a matrix" if constants else reason
        raise Cannot(f"{block.node}: {reason}", behind=block.operands[0].ravel())

    def _embedding(self, block: Block) -> tuple[Link, list[np.ndarray]]:
        """It reads an element of the frame itself, wherever it stands."""
        (at,) = np.flatnonzero(self.frame == block.operands[0]).tolist() or (None,)
        if at is None:
            raise Cannot(f"{block.node}: its token id is no element of the frame")
        return (lambda to: to.embedding(block.constants["table"], at)), []

    def _joined(self, block: Block) -> tuple[Link, list[np.ndarray]]:
        """Two results that depend on the frame, element by element."""
        if found := bent(self._block, block):
            layer, factor, offset, x = found
            return (lambda to: to.bent(layer, factor, offset)), [x]
        a, b = (operand.ravel() for operand in block.operands)
        if block.op == "subtract":
            b = self.trace.add("scale", block.node, b.shape, [b[:, None]], factor=np.full(len(b), -1.0)).numbers
            self._negated.add(int(b[0]))
        kind = cnorm.Multiply if block.op == "multiply" else cnorm.Add
        return (lambda to: to.joined(kind)), [a, b]

    def _norm(self, node: str, rows: np.ndarray, eps: float) -> tuple[Link, list[np.ndarray]]:
        if len(rows) != 1:
            raise Cannot(f"{node}: it normalises {len(rows)} parts of the frame")
        return (lambda to: to.norm(eps)), [rows[0]]

    def _written_norm(self, block: Block) -> tuple[Link, list[np.ndarray]] | None:
        if not (found := written_norm(self.trace, self._block, block)):
            return None
        x, eps = found
        return (
            self._norm(block.node, x[None], eps)
            if eps is not None
            else self._picked(x, self.trace.owners(x)[0].numbers)
        )

    # ------------------------------------------------------------------ cells

    def _zeros(self, numbers: np.ndarray) -> np.ndarray:
        """Which elements are constants of 0."""
        zeros = np.zeros(numbers.shape, bool)
        for block in self.trace.owners(numbers):
            if block.op == "constant":
                at = numbers - block.first
                inside = (at >= 0) & (at < block.size)
                zeros[inside] = np.asarray(block.constants["value"])[at[inside]] == 0
        return zeros

    def _at_positions(self, numbers: np.ndarray) -> tuple[Link, list[np.ndarray]] | None:
        """A product for each position."""
        if found := linear(self.trace, numbers):
            return (lambda to: to.add(found[0])), [found[1]]
        whole = None if self._lags.cached else turned(self.trace, numbers)
        return None if whole is None else self._picked(numbers, whole)

    def _copied(self, numbers: np.ndarray) -> tuple[Link, list[np.ndarray]] | None:
        """Rows of a frame, moved by some positions with zeros behind them."""
        shape = self._shapes.get(numbers.tobytes())
        x = numbers.reshape(shape) if shape else numbers
        found = unfolding(x, self._zeros(x)) if shape and self._zeros(x).any() else None
        return found and self._of_frame(*found)

    def _of_frame(self, layer, x: np.ndarray) -> tuple[Link, list[np.ndarray]]:
        """A layer that reads a frame of [channels, positions]."""
        self._shapes[x.tobytes()] = x.shape
        return (lambda to: to.add(layer)), [x.ravel()]

    def _cell(self, numbers, owners) -> tuple[Link, list[np.ndarray]] | None:
        if scan := self._orders.scan_of.get(owners[0].first):
            return self._scanned(scan) if np.array_equal(scan.whole().ravel(), numbers) else None
        nodes = [block for block in owners if block.op in ("LSTM", "GRU", "RNN")]
        one = len(nodes) == 1 or _both_ways(nodes)
        if one and np.array_equal(numbers, np.concatenate([block.numbers for block in nodes])):
            return self._node_cell(nodes)
        if len(owners) == 1 and (found := written_cell(self.trace, numbers, self.old)):
            layer, cell = of_written(found), Cell(found.new, found.old)
            return (lambda to: to.cell(layer, cell)), [found.x]
        if len(owners) == 1 and (at_positions := written_cells(self.trace, numbers, self.old)):
            return self._written_at_positions(numbers, *at_positions)
        if len(owners) == 1 and (made := linear_recurrence(self.trace, numbers, self.old)):
            return (lambda to: to.cell(*made[:2])), [made[2]]
        return None

    def _written_at_positions(self, numbers, found: Found, positions: int) -> tuple[Link, list[np.ndarray]]:
        place = {number: at for at, number in enumerate(found.new["h"].tolist())}
        order = np.array([place[number] for number in numbers.tolist()])
        layer, cell = of_written(found), Cell(found.new, found.old)
        return (lambda to: to.per_position(layer, positions, cell, order)), [found.x]

    def _node_cell(self, nodes: list[Block]) -> tuple[Link, list[np.ndarray]]:
        x = nodes[0].operands[0].ravel()
        made = [self._from_node(block) for block in nodes]
        if len(nodes) == 2:
            return (lambda to: to.both([layer for layer, _ in made])), [x]
        if nodes[0].constants["backward"]:
            raise Cannot(f"{nodes[0].node}: a cell that reads the sequence from its end only")
        return (lambda to: to.cell(*made[0])), [x]

    def _scanned(self, scan: Scan) -> tuple[Link, list[np.ndarray]]:
        """A cell over the positions of a frame, or one for each of them."""
        reads, positions = [scan.read().ravel()], scan.read().shape[1]
        made = [of_operator(scan.kind, cell) for cell in scan.cells]
        back = [cell["backward"] for cell in scan.cells]
        if scan.over:
            if any(not self._zeros(start).all() for start in scan.start):
                raise Cannot(f"{scan.node}: its {positions} steps are positions of a frame, and begin with no zeros")
            return (lambda to: to.over_positions(made, positions, back[0])), reads
        if back != [False]:
            raise Cannot(f"{scan.node}: a cell of {positions} rows that reads two directions, or from the end")
        new = {"h": scan.whole().ravel()} | ({"c": scan.ways[0][1].T.ravel()} if scan.kind == "LSTM" else {})
        old = {name: start[0].T.ravel() for name, start in zip(new, scan.start, strict=False)}
        if self._inside and all(self._zeros(start).all() for start in scan.start):
            return (lambda to: to.per_position(made[0], positions, Cell(new, {}))), reads
        for name, numbers in new.items():
            if [self.old.get(number, -1) for number in numbers.tolist()] != old[name].tolist():
                raise Cannot(f"{scan.node}: its initial {name} of {positions} rows is not what an output gives back")
        return (lambda to: to.per_position(made[0], positions, Cell(new, old))), reads

    def _from_node(self, block: Block):
        names = ["h", "c"][: len(block.operands) - 1]
        new = {"h": block.numbers}
        if "c" in names:
            new["c"] = self.trace.blocks[self.trace.blocks.index(block) + 1].numbers
        old, weights = {}, {name: np.asarray(w, np.float32) for name, w in block.constants["weights"].items()}
        for name, operand, start in zip(names, block.operands[1:], block.constants["start"], strict=False):
            before = operand.ravel()
            if np.array_equal(before, [self.old.get(number, -1) for number in new[name].tolist()]):
                old[name] = before
            elif any(owner.op != "constant" for owner in self.trace.owners(before)):
                several = not {*before.tolist(), *new[name].tolist()}.isdisjoint(self.trace.unrolled.values())
                raise Cannot(f"{block.node}: {STEPS if several else f'its initial {name} {STRANGE}'}")
            values = self.trace.lowered(Elements(start))
            if isinstance(values, np.ndarray) and values.any():
                weights[f"{name}0"] = values.astype(np.float32)
        return of_operator(block.op, block.constants | {"weights": weights}), Cell(new, old)


def _both_ways(nodes: list[Block]) -> bool:
    """Whether they are two that read the same sequence, the first from its beginning, the second from its end."""
    x = [block.operands[0].ravel() for block in nodes]
    return [block.constants["backward"] for block in nodes] == [False, True] and np.array_equal(*x)
