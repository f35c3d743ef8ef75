"""Scan the protobuf wire format of an ONNX file without building messages.

An empty message takes two bytes in a file, and a few hundred in memory once parsed. A file is untrusted input, so its
messages are counted here before protobuf parses it. onnx's own descriptors tell which fields are messages. The
format: https://protobuf.dev/programming-guides/encoding
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

_METADATA, _NAMES = 14, (1, 2)  # of onnx.proto: ModelProto.metadata_props, and key and value of its entries
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5  # wire types; ONNX files do not use groups, 3 and 4
_MESSAGE, _STRING, _BINARY = 11, 9, 12  # field types of a descriptor
_MOST_FIELDS = 1 << 20  # of the model itself, and of an entry of its metadata
_SCALARS_PER_MESSAGE = 8  # a field that is no message and no repeated string counts 1/8 of a message


class Malformed(ValueError):
    """The bytes are not in the wire format."""


def exceeds(data: bytes, most: int) -> bool:
    """Whether a serialised ModelProto holds more than `most` messages and repeated strings, wherever they are nested.

    Every other field counts an eighth, because lists of unpacked numbers take memory and time as well. The scan stops
    when `most` is exceeded, so `most` bounds its time, not the size of the file.

    Raises
    ------
    Malformed
        If the bytes that were read are not in the wire format.
    """
    try:
        return _scan(data, most * _SCALARS_PER_MESSAGE)
    except IndexError:
        raise Malformed("it ends inside a field") from None


def _scan(data: bytes, budget: int) -> bool:
    import onnx  # not above: `metadata` alone, of a file that a child process reads, does not need it

    position, end, fields = 0, len(data), _fields(onnx.ModelProto.DESCRIPTOR)
    outer: list[tuple[int, dict]] = []
    while True:
        if position == end:
            if not outer:
                return False
            end, fields = outer.pop()
            continue
        budget -= 1
        if budget < 0:
            return True
        tag = data[position]
        position += 1
        if tag > 127:
            if data[position] > 127:
                tag, position = _varint(data, position - 1)
            else:  # a tag of two bytes, as for all field numbers from 16 on
                tag += (data[position] << 7) - 128
                position += 1
        if tag & 7 != _BYTES:
            position = _after_number(data, position, tag & 7)
        else:
            size = data[position]
            position += 1
            if size > 127:
                size, position = _varint(data, position - 1)
            counted = fields.get(tag)
            if counted is not None:
                budget -= _SCALARS_PER_MESSAGE - 1
            if position + size > end:
                raise Malformed("a field reaches beyond the message it lies in")
            if counted:  # a message with fields: descend
                outer.append((end, fields))
                end, fields = position + size, counted
            else:
                position += size
        if position > end:
            raise Malformed("a field reaches beyond the message it lies in")


def metadata(data: bytes) -> Iterator[tuple[str, str]]:
    """The keys and values of a serialised ModelProto's metadata, in order; the graph is skipped.

    Raises
    ------
    Malformed
        If the bytes are not in the wire format, or a key or value is not UTF-8.
    """
    try:
        for number, content in _chunks(data):
            if number == _METADATA:
                last = dict(_chunks(content))  # of repeated occurrences of a field the last one counts
                key, value = (last.get(name, b"").decode() for name in _NAMES)
                yield key, value
    except IndexError:
        raise Malformed("it ends inside a field") from None
    except UnicodeDecodeError:
        raise Malformed("a name that is not UTF-8") from None


def _chunks(data: bytes):
    """(field number, content) of each length-delimited field."""
    position, fields = 0, 0
    while position < len(data):
        fields += 1
        if fields > _MOST_FIELDS:
            raise Malformed(f"a message has more than {_MOST_FIELDS} fields, its graph not counted")
        tag, position = _varint(data, position)
        if tag & 7 != _BYTES:
            position = _after_number(data, position, tag & 7)
            continue
        size, position = _varint(data, position)
        if position + size > len(data):
            raise Malformed("a field reaches beyond the message it lies in")
        yield tag >> 3, data[position : position + size]
        position += size


def _after_number(data: bytes, position: int, wire_type: int) -> int:
    """The position after a field that is a number."""
    if wire_type == _VARINT:
        while data[position] > 127:
            position += 1
        return position + 1
    if wire_type in (_FIXED32, _FIXED64):
        return position + (4 if wire_type == _FIXED32 else 8)
    raise Malformed(f"a field has the wire type {wire_type}")


def _varint(data: bytes, position: int) -> tuple[int, int]:
    """(value, position after it)."""
    value = shift = 0
    while True:
        byte = data[position]
        position += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, position
        shift += 7
        if shift > 63:
            raise Malformed("a number has more than ten bytes")


@cache
def _fields(descriptor) -> dict[int, dict]:
    """The fields of a message that are counted, by tag: a message's own fields, or {} for a repeated string."""
    table: dict[int, dict] = {}
    _TABLES[descriptor.full_name] = table
    for field in descriptor.fields:
        tag = field.number << 3 | _BYTES
        if field.type == _MESSAGE:
            inner = field.message_type
            table[tag] = _TABLES[inner.full_name] if inner.full_name in _TABLES else _fields(inner)
        elif field.type in (_STRING, _BINARY) and field.is_repeated:
            table[tag] = {}
    return table


_TABLES: dict[str, dict[int, dict]] = {}
