"""Read an ONNX file that is untrusted input.

The file is parsed without its external data and checked against the limits. Then the external tensors are read, each
from a file that has been checked. Nothing here executes the model.
"""

from __future__ import annotations

import errno
import os
import stat
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from math import prod
from pathlib import Path, PurePosixPath
from typing import BinaryIO

import onnx
from google.protobuf.message import DecodeError, Message
from onnx import TensorProto, helper

from cnorm.storage.files import kind_of
from cnorm.text import quoted
from onnx_export import wire
from onnx_export.errors import NotExported, Refused, Unreadable
from onnx_export.nodes import model_graphs, model_nodes, sort_nodes, subgraphs

_VARIADIC = frozenset({"Concat", "Max", "Mean", "Min", "Sum"})  # none of their inputs is optional


@dataclass(frozen=True)
class Limits:
    """Limits on a file; a file that exceeds one is `Refused`.

    Attributes
    ----------
    file_bytes : int
        Size of the model file.
    tensor_bytes : int
        Declared size of all tensors together. The default is the largest protobuf message, because the runtime gets
        the whole model as one message.
    messages : int
        Protobuf messages and repeated strings of any kind, counted before the file is parsed (`wire.exceeds`).
    nodes : int
        Nodes in all graphs, counted as if every call of a local function were inlined.
    depth : int
        Nesting of subgraphs, and of function calls.
    """

    file_bytes: int = 2**31 - 1
    tensor_bytes: int = 2**31 - 2**20
    messages: int = 1_000_000
    nodes: int = 200_000
    depth: int = 16


def load(
    path: str | os.PathLike,
    *,
    external_data: bool = False,
    data_root: str | os.PathLike | None = None,
    metadata_key: str = "",
    limits: Limits | None = None,
) -> onnx.ModelProto:
    """Read, measure and check a model file.

    Parameters
    ----------
    path : path
        The file.
    external_data : bool
        Allow tensors in other files than the `data_files` of the model. Only regular files with one link, whose real
        path lies inside the model's folder, are read.
    data_root : path, optional
        The folder that external files must lie in, in place of the model's own: for caches built of
        symbolic links.
    metadata_key : str
        A key that the metadata must have; a file without it is not parsed.
    limits : Limits, optional
        Caps on sizes.

    Returns
    -------
    onnx.ModelProto
        The model with all its tensors in memory.

    Raises
    ------
    OSError
        If the file does not exist.
    TypeError
        If `path` is not a path.
    Refused
        If the file is too large or too deep, or asks for external data that is not allowed.
    NotExported
        If the metadata has no `metadata_key`.
    Unreadable
        If it cannot be read, is not ONNX, or contradicts itself.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"path must be a str or path-like, got {type(path).__name__}")
    os.stat(path)  # OSError if the file does not exist, like other readers
    limits = limits or Limits()
    try:
        model = parse(read(path, limits), limits, metadata_key)
        sort_nodes(model)
        folder = Path(path).parent
        attach_external_data(model, folder, (data_root or folder) if external_data else None, data_files(path))
    except (Refused, Unreadable) as error:
        raise type(error)(f"{os.fsdecode(path)}: {error}") from error
    return model


def read(path: str | os.PathLike, limits: Limits) -> bytes:
    """The bytes of a regular file within the limits."""
    try:
        file, status = open_untrusted(path)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise Unreadable(f"cannot open the model: {getattr(error, 'strerror', None) or error}") from error
    with file:
        if status.st_size > limits.file_bytes:
            raise Refused(f"the file has {status.st_size} bytes, the limit is {limits.file_bytes}")
        return file.read(status.st_size)  # read(n) allocates n bytes at once: ask for the size, not for the limit


def open_untrusted(path: str | os.PathLike, flags: int = 0) -> tuple[BinaryIO, os.stat_result]:
    """Open a regular file; OSError for anything else, such as a named pipe, for which it does not wait."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | flags)
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file")
    return open(descriptor, "rb"), status


def parse(data: bytes, limits: Limits, metadata_key: str = "") -> onnx.ModelProto:
    """Parse and check against the limits, without external data; the domain "ai.onnx" is renamed to ""."""
    if kind := kind_of(data):
        raise Unreadable(f"not an ONNX file: it is {kind}")
    _check_unparsed(data, limits, metadata_key)
    model = onnx.ModelProto()
    try:
        model.ParseFromString(data)
    except DecodeError as error:
        raise Unreadable("not an ONNX file: it does not parse as a protobuf message") from error
    if not model.HasField("graph") or not model.opset_import:
        raise Unreadable("not an ONNX model: it has no graph or names no opset")
    _check_text(model)
    _name_domains_alike(model)
    _check_size(model, limits)
    _check_tensors(model, limits)
    return model


def _check_unparsed(data: bytes, limits: Limits, metadata_key: str) -> None:
    """Refuse bytes that would cost too much memory and time to parse and to traverse, before protobuf parses them."""
    try:
        if wire.exceeds(data, limits.messages):
            raise Refused(f"the model holds more than {limits.messages} nodes, attributes, tensors, names and the like")
        keys = Counter(key for key, _ in wire.metadata(data))
    except wire.Malformed as error:
        raise Unreadable(f"not an ONNX file: it does not parse as a protobuf message ({error})") from None
    for key, times in keys.items():
        if times > 1:
            raise Unreadable(f"the metadata has the key {quoted(key)} {times} times")
    if metadata_key and metadata_key not in keys:
        raise NotExported(f"the metadata has no {metadata_key!r}")


# ------------------------------------------------------------------------------------- graphs and functions


def _check_size(model: onnx.ModelProto, limits: Limits) -> None:
    """Count nodes as if every function call were inlined: a few nested calls can expand to millions of nodes."""
    functions = {(f.domain, f.name): f for f in model.functions}
    sizes: dict[tuple[str, str], int] = {}
    open_calls: list[tuple[str, str]] = []

    def size(nodes, depth: int) -> int:
        if depth > limits.depth:
            raise Refused(f"graphs are nested more than {limits.depth} deep")
        total = len(nodes)
        for node in nodes:
            total += sum(size(graph.node, depth + 1) for _, graph in subgraphs(node))
            _check_node(node)
            called = (node.domain, node.op_type)
            if called in functions:
                total += function_size(called)
            if total > limits.nodes:
                raise Refused(f"the model has more than {limits.nodes} nodes")
        return total

    def function_size(name: tuple[str, str]) -> int:
        if name in open_calls:
            raise Refused(f"the local function {quoted(name[1])} calls itself")
        if len(open_calls) >= limits.depth:
            raise Refused(f"function calls are nested more than {limits.depth} deep")
        if name not in sizes:
            open_calls.append(name)
            sizes[name] = size(functions[name].node, 0)
            open_calls.pop()
        return sizes[name]

    size(model.graph.node, 0)
    for name in functions:
        function_size(name)


def _check_node(node: onnx.NodeProto) -> None:
    """Refuse a node that onnx or onnxruntime trips over, instead of saying that it is malformed."""
    if node.op_type in _VARIADIC and "" in node.input:
        raise Refused(f"an input of {quoted(node.name or node.op_type)} has no name, and none of them is optional")
    for attribute in node.attribute:
        if attribute.name == "num_outputs" and attribute.i > len(node.output):  # they make lists of that length
            raise Refused(f"num_outputs of {quoted(node.name)} is {attribute.i}, it has {len(node.output)} outputs")


def _check_text(model: onnx.ModelProto) -> None:
    """Reject text that is not UTF-8: protobuf returns it as bytes, which later code does not expect."""
    pending: list[Message] = [model]
    while pending:
        for field, value in pending.pop().ListFields():
            if field.type == field.TYPE_MESSAGE:
                pending += [value] if isinstance(value, Message) else value
            elif field.type == field.TYPE_STRING and field.name != "doc_string":  # doc strings are never read
                texts = [value] if isinstance(value, (str, bytes)) else value
                if any(isinstance(text, bytes) for text in texts):
                    raise Unreadable("a name that is not UTF-8")


def _name_domains_alike(model: onnx.ModelProto) -> None:
    """Rename the domain "ai.onnx" to its other name "", the only one that onnx's own tools know."""
    for named in chain(model_nodes(model), model.functions):
        if named.domain == "ai.onnx":
            named.domain = ""
    for owner in (model, *model.functions):
        versions: dict[str, int] = {}
        for opset in owner.opset_import:
            domain = "" if opset.domain == "ai.onnx" else opset.domain
            if versions.setdefault(domain, opset.version) != opset.version:
                both = f"opset {versions[domain]} and {opset.version}"
                raise Unreadable(f"{both} of the domain {quoted(domain)} are imported")
        if list(versions.items()) != [(opset.domain, opset.version) for opset in owner.opset_import]:
            owner.ClearField("opset_import")
            owner.opset_import.extend(helper.make_opsetid(*item) for item in versions.items())


# ------------------------------------------------------------------------------------------------- tensors


def _tensors(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    for graph in model_graphs(model):
        yield from graph.initializer
        for sparse in graph.sparse_initializer:
            yield from (sparse.values, sparse.indices)
    attributes = [a for node in model_nodes(model) for a in node.attribute]
    attributes += [a for function in model.functions for a in function.attribute_proto]
    for attribute in attributes:
        if attribute.HasField("t"):
            yield attribute.t
        yield from attribute.tensors
        sparse_tensors = list(attribute.sparse_tensors)
        if attribute.HasField("sparse_tensor"):
            sparse_tensors.append(attribute.sparse_tensor)
        for sparse in sparse_tensors:
            yield from (sparse.values, sparse.indices)


def _byte_size(tensor: onnx.TensorProto, count: int | None = None) -> int:
    """Size in bytes of a tensor by its shape and type, or of `count` of its elements."""
    count = prod(tensor.dims) if count is None else count
    if tensor.data_type == TensorProto.STRING:
        return count
    bits = {TensorProto.INT4: 4, TensorProto.UINT4: 4, TensorProto.FLOAT4E2M1: 4}
    bits |= {getattr(TensorProto, name): 2 for name in ("INT2", "UINT2") if hasattr(TensorProto, name)}
    if tensor.data_type in bits:
        return (count * bits[tensor.data_type] + 7) // 8
    try:
        return count * helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
    except KeyError:
        raise Unreadable(f"tensor {quoted(tensor.name)} has the unknown type {tensor.data_type}") from None


def _check_tensors(model: onnx.ModelProto, limits: Limits) -> None:
    total = 0
    for tensor in _tensors(model):
        if any(size < 0 for size in tensor.dims) or len(tensor.dims) > 64:
            raise Unreadable(f"tensor {quoted(tensor.name)} has the shape {list(tensor.dims)[:65]}")
        wanted = _byte_size(tensor)
        total += wanted
        extent = _byte_size(tensor, _extent(tensor.dims))
        if max(total, extent) > limits.tensor_bytes:
            raise Refused(f"the tensors declare more than {limits.tensor_bytes} bytes")
        if tensor.data_location != TensorProto.EXTERNAL and _stored_size(tensor) != wanted:
            raise Unreadable(
                f"tensor {quoted(tensor.name)}: shape {list(tensor.dims)} wants {wanted} bytes, "
                f"{_stored_size(tensor)} are stored"
            )
    for graph in model_graphs(model):
        for sparse in graph.sparse_initializer:
            if _extent(sparse.dims) * 8 > limits.tensor_bytes or any(size < 0 for size in sparse.dims):
                raise Refused(f"the sparse tensor {quoted(sparse.values.name)} is too large when written out")


def _extent(dims: Sequence[int]) -> int:
    """The size that NumPy checks: 0 counts as 1, so it rejects huge shapes even if they have no elements."""
    return prod(max(size, 1) for size in dims)


def _stored_size(tensor: onnx.TensorProto) -> int:
    if tensor.HasField("raw_data"):
        return len(tensor.raw_data)
    stored = len(getattr(tensor, helper.tensor_dtype_to_field(tensor.data_type)))
    if tensor.data_type in (TensorProto.COMPLEX64, TensorProto.COMPLEX128):
        stored //= 2
    count = prod(tensor.dims)
    # packed 2- and 4-bit types store several elements in one entry
    per_entry = {TensorProto.INT4: 2, TensorProto.UINT4: 2, TensorProto.FLOAT4E2M1: 2}.get(tensor.data_type, 1)
    expected = -(-count // per_entry)
    return _byte_size(tensor) if stored == expected else stored * _byte_size(tensor) // max(count, 1)


def external_files(model: onnx.ModelProto, folder: Path) -> list[str]:
    """The paths that a model's external tensors name, each once; nothing is checked."""
    entries = (e for t in _tensors(model) if t.data_location == TensorProto.EXTERNAL for e in t.external_data)
    return [os.path.join(folder, name) for name in dict.fromkeys(e.value for e in entries if e.key == "location")]


def data_files(path: str | os.PathLike) -> tuple[str, ...]:
    """The names of the data files that exporters write beside a model of this name."""
    return (f"{Path(path).name}.data", f"{Path(path).stem}.data")


def attach_external_data(
    model: onnx.ModelProto, folder: Path, root: str | os.PathLike | None, allowed: tuple[str, ...] = ()
) -> None:
    """Read the external tensors.

    Parameters
    ----------
    model : onnx.ModelProto
        Completed in place.
    folder : Path
        The folder that locations are relative to: that of the model.
    root : path or None
        The folder that must contain the files' real paths. None allows the files of `allowed` only.
    allowed : tuple of str
        Locations in the model's folder that are read even if `root` is None.
    """
    outside = [tensor for tensor in _tensors(model) if tensor.data_location == TensorProto.EXTERNAL]
    for tensor in outside if root is None else ():
        location = next((entry.value for entry in tensor.external_data if entry.key == "location"), "")
        if location not in allowed:
            raise Refused(
                f"{len(outside)} tensors lie in other files ({quoted(tensor.name)} in {quoted(location)} for one); "
                "--external-data allows that"
            )
    for tensor in outside:
        tensor.raw_data = _read_external(tensor, folder, os.path.realpath(folder if root is None else root))
        tensor.ClearField("external_data")
        tensor.data_location = TensorProto.DEFAULT


def _read_external(tensor: onnx.TensorProto, folder: Path, root: str) -> bytes:
    entries = {entry.key: entry.value for entry in tensor.external_data}
    location = entries.get("location", "")
    name = f"external data of {quoted(tensor.name)}"
    parts = PurePosixPath(location).parts
    if not location or location.startswith("/") or ".." in parts or "\\" in location or "\0" in location:
        raise Refused(f"{name}: the location {quoted(location)} is not a plain relative path")
    if set(entries) - {"location", "offset", "length", "checksum", "basepath"}:
        raise Refused(f"{name}: unknown keys {quoted(str(sorted(entries)))}")
    offset, length = _number(entries, "offset", name), _number(entries, "length", name)

    wanted = _byte_size(tensor)
    if length is not None and length != wanted:
        raise Refused(f"{name}: length {length}, but shape {list(tensor.dims)} wants {wanted} bytes")
    real = os.path.realpath(os.path.join(folder, location))
    if os.path.commonpath([root, real]) != root:
        raise Refused(f"{name}: {quoted(location)} leads out of the folder of the model (see --data-root)")
    try:
        file, status = open_untrusted(real, os.O_NOFOLLOW)
    except OSError as error:
        unsafe = error.errno in (errno.EINVAL, errno.ELOOP)  # not a regular file, or replaced by a link after the check
        kind = Refused if unsafe else Unreadable
        raise kind(f"{name}: cannot open {quoted(location)}: {error.strerror}") from error
    with file:
        if status.st_nlink != 1:  # a hard link: its other name may be in any folder
            raise Refused(f"{name}: {quoted(location)} is a hard link")
        if (offset or 0) + wanted > status.st_size or (length is None and (offset or 0) + wanted != status.st_size):
            raise Refused(
                f"{name}: {wanted} bytes from {offset or 0} do not fit the {status.st_size} bytes of {quoted(location)}"
            )
        file.seek(offset or 0)
        return file.read(wanted)


def _number(entries: dict[str, str], key: str, name: str) -> int | None:
    if key not in entries:
        return None
    # isdecimal alone admits digits of other scripts; the length bounds the time of int()
    if not (entries[key].isascii() and entries[key].isdecimal() and len(entries[key]) < 20):
        raise Refused(f"{name}: {key} {quoted(entries[key])} is not a whole number")
    return int(entries[key])
