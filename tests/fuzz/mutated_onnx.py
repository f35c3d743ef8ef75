"""Mutated ONNX files through the validator and the loader, in child processes, with counts.

    python tests/fuzz/mutated_onnx.py 100000 [first] [--models]

Each input is parsed, searched for norms and linted, and loaded as a model (`onnx_export.load`). A file that onnxruntime
does not load must not have exit code 0. Failures are an exception that is not a documented one, a child that dies, one
that takes longer than _PATIENCE for an input, and such an exit code; each is printed, and its input is kept in
build/mutated/. An input follows from its number alone, so `mutated_onnx.py 1 NUMBER` repeats it.

With --models the inputs are mutated streaming models, frames of [channels, positions] among them (those of PyTorch only
where it is installed, so a number stands for another input elsewhere). They are read and traced in the child itself,
which costs a fifth of a `load`; one in _PROVEN goes the whole way through `load`, and a model that differs from its
file is a failure. A file that ends the child is a failure if `load` does not refuse it.
"""

import collections
import copy
import multiprocessing
import os
import random
import resource
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import onnx
from google.protobuf.message import DecodeError

import cnorm
import onnx_export
from cnorm.layers.base import INPUT
from onnx_export import nodes, ort
from onnx_export.errors import NotImported
from onnx_export.importer import import_model
from onnx_export.importer.worker import LIMITS
from onnx_export.validation.examine import examine
from onnx_export.validation.options import Options

sys.path[:0] = [str(Path(__file__).parents[1] / name) for name in ("fuzz", "support", "onnx_export")]

import fuzz_onnx_loader as fuzz  # noqa: E402  (after the path is set)
import gallery  # noqa: E402
import graphs  # noqa: E402
import models  # noqa: E402
import test_import_positions as positions  # noqa: E402
import test_import_random  # noqa: E402
from corpus import archive  # noqa: E402

_PATIENCE = 60.0  # seconds of a processor for one input
_NUMBERS = (-(2**63), -2, -1, 0, 1, 2, 3, 7, 13, 17, 64, 2**31, 2**62)
_PIECE = 500  # inputs of one child
_MEMORY = 4 << 30  # bytes that it may map with --models
_PROVEN = 32  # one input in so many that load as a model is compared with the file, too, but none with changed bytes
_KEPT = Path("build/mutated")


def seeds() -> list[bytes]:
    """The tests' gallery, a model that we export, and the smallest files of every exporter's corpus."""
    found = [build().model.SerializeToString() for build in gallery.SPECIMENS]
    path = _KEPT / f"seed-{os.getpid()}.onnx"
    layers = [models.random_lstm(np.random.default_rng(0), 3, 4), models.random_linear(np.random.default_rng(0), 4, 2)]
    onnx_export.export(cnorm.Model(layers), path)
    found.append(path.read_bytes())
    for exporter in ("pytorch", "keras", "jax", "paddle", "recurrent", "keras_recurrent"):
        found += sorted(archive.read(exporter).values(), key=len)[:12]
    path.unlink(missing_ok=True)
    return found


def model_seeds() -> list[bytes]:
    """Files of a stranger that load as they are: random lists of layers, some behind token ids, and frames."""
    found, path = [], _KEPT / f"seed-{os.getpid()}.onnx"
    for seed in range(48):
        rng = np.random.default_rng(seed)
        model = test_import_random.random_model(rng)
        if seed % 4 == 0:
            table = cnorm.Embedding(graphs.normal(rng, 6, model.input_size))
            model = (
                cnorm.Model([table, *model.layers]) if all(INPUT not in one.reads for one in model.layers) else model
            )
        found.append(_stripped(model, opset=int(rng.choice([13, 17, 21]))))
    found += [*_frames(path), *_networks(path)]
    return [data for data in found if _is_proven(data, path)]


def _is_proven(data: bytes, path: Path) -> bool:
    """Whether a file loads; not if it amplifies rounding beyond what the proof allows, as files made of it would."""
    try:
        return loaded(data, path, proven=True)["loaded"] > 0
    except AssertionError as error:
        print(f"not among the seeds: {error}", flush=True)
        return False


def _stripped(model: cnorm.Model, **options) -> bytes:
    exported = onnx_export.export(model, **options)
    del exported.metadata_props[:]
    return exported.SerializeToString()


def _frames(path: Path) -> Iterator[bytes]:
    """Layers of frames [channels, positions], node by node and as we export them."""
    rng = np.random.default_rng(0)
    yield _stripped(cnorm.Model(models.frame_layers(rng)[:7]))  # the next is a cell over positions, written out
    for write, options in (
        (positions.cached, {"groups": 2, "dilation": 2}),
        (positions.cached, {"transposed": True}),
        (positions.stacked, {}),
        (positions.over_positions, {}),
        (positions.over_positions, {"kind": "LSTM", "way": "reverse"}),
        (positions.per_position, {}),
        (positions.per_position, {"kind": "LSTM"}),
        (positions.bands, {"start": 2}),
    ):
        yield write(path, rng, **options).read_bytes()


def _networks(path: Path) -> Iterator[bytes]:
    """Random networks of PyTorch's older exporter, frame by frame and over an open time, like GTCRN."""
    if not find_spec("torch") or not find_spec("onnxscript"):
        print("without PyTorch: no networks among the seeds", flush=True)
        return
    import test_import_torch_networks as networks

    for seed in range(0, 80, 2):
        network = networks.network_of(seed)[0]
        if len(list(network.parameters())) < 60:
            networks.exported(network, seed % 4 == 2, False, 17, path)
            yield path.read_bytes()


def loaded(data: bytes, path: Path, proven: bool) -> collections.Counter:
    """What one input came to as a model of a stranger; a model that differs from its file is an AssertionError."""
    path.write_bytes(data)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what a stream does otherwise than calls of the file
            (onnx_export.load if proven else _read)(path)
    except (ValueError, NotImported, MemoryError) as error:
        if "do not compute what the file does" in str(error):
            raise AssertionError(str(error)) from None
        if "a fault of cnorm" in str(error):
            raise
        return collections.Counter({"inputs": 1, "not loaded": 1})
    return collections.Counter({"inputs": 1, "loaded": 1, "of these compared and equal": proven})


def _read(path: Path) -> None:
    """Read a file into layers as the child of `load` does, in this process."""
    limits = fuzz.model_io.Limits(**LIMITS)
    given = {"inputs": {}, "states": {}, "dims": {}, "frames": ()}
    import_model(fuzz.model_io.load(path, external_data=False, limits=limits), check=False, **given)


def tried(data: bytes, path: Path, proven: bool) -> collections.Counter:
    """What one input came to; anything but the documented errors comes out as it is. `proven`: compare the model."""
    seen = collections.Counter(inputs=1)
    fuzz.one_input(data)
    path.write_bytes(data)
    try:
        onnx_export.load(path, check=proven)
        seen["loaded"] += 1
    except (ValueError, NotImported):
        seen["not loaded"] += 1
    try:
        model = fuzz.model_io.parse(data, fuzz.LIMITS)
        ort.Session(model, "off")
    except (ort.CannotRun, fuzz.model_io.Refused, fuzz.model_io.Unreadable):
        seen["not run by onnxruntime"] += 1
        code = examine(str(path), Options(limits=fuzz.LIMITS), lambda *_: None).exit_code()
        seen[f"exit code {code} of these"] += 1
        if code == 0:
            raise AssertionError("exit code 0 for a file that onnxruntime does not load") from None
    return seen


def piece(numbers: range, sources: list[bytes], judge, pipe) -> None:
    """Try inputs; sends the number of each before it, and what it came to after it."""
    path = _KEPT / f"input-{os.getpid()}.onnx"
    if judge is loaded:
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, resource.getrlimit(resource.RLIMIT_AS)[1]))
    for number in numbers:
        pipe.send(number)
        try:
            pipe.send(judge(input_of(number, sources), path, number % _PROVEN == 1))
        except Exception:
            pipe.send(traceback.format_exc())
    path.unlink(missing_ok=True)
    pipe.send(None)


def input_of(number: int, sources: list[bytes]) -> bytes:
    """The input of a number: of every fourth the bytes are changed (hardly one can be parsed), of others a message."""
    rng = random.Random(number)
    source = rng.choice(sources)
    try:
        return fuzz.mutated(source, rng) if number % 4 == 0 else _changed_message(source, rng)
    except DecodeError:  # of some files of the gallery
        return fuzz.mutated(source, rng)


def _changed_message(data: bytes, rng: random.Random) -> bytes:
    """A model with up to four changes to its nodes, attributes, tensors, types and names."""
    model = onnx.ModelProto.FromString(data)
    for _ in range(rng.randint(1, 4)):
        messages = [node for graph in nodes.model_graphs(model) for node in graph.node] or [onnx.NodeProto()]
        if rng.random() < 0.6:
            _change_node(rng.choice(messages), rng, messages)
            continue
        messages = [*model.graph.initializer, *model.graph.input, *model.graph.output, *model.graph.value_info]
        messages += [
            attribute.t
            for graph in nodes.model_graphs(model)
            for node in graph.node
            for attribute in node.attribute
            if attribute.HasField("t")
        ]
        message = rng.choice(messages or [model.graph])
        if isinstance(message, onnx.TensorProto):
            _change_tensor(message, rng)
        elif isinstance(message, onnx.ValueInfoProto):
            _change_type(message.type.tensor_type, rng)
    if rng.random() < 0.05:
        model.opset_import[0].version = rng.choice(_NUMBERS)
    return model.SerializeToString()


def _change_node(node: onnx.NodeProto, rng: random.Random, others: list[onnx.NodeProto]) -> None:
    other, kind = rng.choice(others), rng.randrange(7)
    if kind == 0:
        node.op_type = rng.choice([other.op_type, "LayerNormalization", "Loop", "Scan", "LSTM", "Cast", "If"])
    elif kind == 1 and node.input:
        names = [*other.output, *other.input, ""]
        node.input[rng.randrange(len(node.input))] = rng.choice(names)
    elif kind == 2 and node.output:
        node.output[rng.randrange(len(node.output))] = rng.choice([*other.output, ""])
    elif kind == 3:
        del node.input[rng.randrange(len(node.input) + 1) :]
    elif kind == 4:
        node.CopyFrom(copy.deepcopy(other))  # protobuf does not copy a part of a message onto the whole
    elif kind == 5 and node.attribute:
        attribute = rng.choice(node.attribute)
        attribute.i, attribute.f = rng.choice(_NUMBERS), float(rng.choice(_NUMBERS))
        attribute.ints[:] = [rng.choice(_NUMBERS) for _ in attribute.ints]
    elif kind == 6 and node.attribute:
        del node.attribute[rng.randrange(len(node.attribute))]


def _change_tensor(tensor: onnx.TensorProto, rng: random.Random) -> None:
    kind = rng.randrange(4)
    if kind == 0:
        tensor.data_type = rng.randrange(25)
    elif kind == 1:
        tensor.dims[:] = [rng.choice([size, *_NUMBERS]) for size in tensor.dims]
    elif kind == 2 and tensor.raw_data:
        raw = bytearray(tensor.raw_data)
        raw[rng.randrange(len(raw))] = rng.randrange(256)
        tensor.raw_data = bytes(raw)
    else:
        tensor.raw_data = tensor.raw_data[: rng.randrange(len(tensor.raw_data) + 1)]


def _change_type(tensor: onnx.TypeProto.Tensor, rng: random.Random) -> None:
    if rng.random() < 0.3:
        tensor.elem_type = rng.randrange(25)
    elif tensor.shape.dim:
        tensor.shape.dim[rng.randrange(len(tensor.shape.dim))].dim_value = rng.choice(_NUMBERS)
    else:
        tensor.ClearField("shape")


def followed(numbers: range, sources: list[bytes], judge, counts: collections.Counter) -> int:
    """Run a child over some inputs; returns the number after the last one that it tried."""
    ours, theirs = multiprocessing.Pipe(duplex=False)
    child = multiprocessing.Process(target=piece, args=(numbers, sources, judge, theirs))
    child.start()
    theirs.close()
    current = numbers.start
    while True:
        failure = None
        try:
            message = ours.recv() if _answers(ours, child.pid) else "hang"
        except EOFError:
            child.join()
            message = f"crash, exit code {child.exitcode}"
        if message is None:
            child.join()
            return numbers.stop
        if isinstance(message, int):
            current = message
        elif isinstance(message, str):
            failure = message
        else:
            counts.update(message)
        if failure is None:
            continue
        kind = failure.split(",")[0] if failure.startswith(("crash", "hang")) else "exceptions"
        if kind != "exceptions" and judge is loaded and _is_refused(input_of(current, sources)):
            counts["ended a child of load"] += 1
            child.kill()
            child.join()
            return current + 1
        counts[f"FAILED {kind}"] += 1
        (_KEPT / f"failed-{current}.onnx").write_bytes(input_of(current, sources))
        print(f"input {current}: {failure}", flush=True)
        if kind != "exceptions":
            child.kill()
            child.join()
            return current + 1


def _answers(ours, pid: int) -> bool:
    """Whether a child answers before it has used _PATIENCE, or has been waited for ten times as long."""
    until, start = time.monotonic() + 10 * _PATIENCE, _used(pid)
    while not (answered := ours.poll(1)) and time.monotonic() < until and _used(pid) - start < _PATIENCE:
        pass
    return answered


def _used(pid: int) -> float:
    """Seconds of a processor that a process and those that it waited for have used."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except FileNotFoundError:  # it has just ended
        return 0.0
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def _is_refused(data: bytes) -> bool:
    """Whether `load`, which has limits, refuses a file that ended the process that read it."""
    path = _KEPT / f"ended-{os.getpid()}.onnx"
    path.write_bytes(data)
    try:
        onnx_export.load(path)
    except (ValueError, NotImported):
        return True
    return False


def main() -> None:
    runs, first = (*(int(word) for word in sys.argv[1:] if word != "--models"), 0)[:2]
    _KEPT.mkdir(parents=True, exist_ok=True)
    make, judge = (model_seeds, loaded) if "--models" in sys.argv else (seeds, tried)
    sources, counts, position = make(), collections.Counter(seeds=0), first
    counts["seeds"] = len(sources)
    multiprocessing.set_start_method("fork")
    while position < first + runs:
        position = followed(range(position, min(position + _PIECE, first + runs)), sources, judge, counts)
        print(position, dict(counts), flush=True)
    sys.exit(any(key.startswith("FAILED") for key in counts))


if __name__ == "__main__":
    main()
