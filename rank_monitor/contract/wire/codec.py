"""Encodes messages as bytes and decodes them: small binary records for frequent ones, versioned JSON for the rest.

Launcher, monitor and client use it, with the sockets of `channel.py`. No socket and no clock is used here. A message
that `decode` returns has been checked: its version, its size, depth and number of keys of its JSON, and the type of
each field. Everything else raises ProtocolError, whatever the bytes are: a rank may send any.

    header (16 bytes, little endian): version u8, kind u8, two zero bytes, sequence u32, sent u64
    heartbeat    header
    iteration    header, iteration i64
    progress     header, stamp u64
    sections     header, iteration i64, count u8, then per open section: since u64, length u8, name (UTF-8)
    all others   header, JSON object
"""

from __future__ import annotations

import json
import struct
import typing
from dataclasses import dataclass

from rank_monitor.contract.errors import ProtocolError
from rank_monitor.contract.wire import launcher_messages  # noqa: F401 - its messages are in KINDS once it is imported
from rank_monitor.contract.wire.foreign import check_depth
from rank_monitor.contract.wire.json_record import from_json
from rank_monitor.contract.wire.messages import KINDS, Heartbeat, IterationReached, Message, Progress, Sections

VERSION = 2
"""The version of the header and of the meaning of all messages. A process refuses messages of another version: it may
come from another release, in a container for example."""
MAX_MESSAGE = 60_000
"""Bytes of one message. A message of SOCK_SEQPACKET goes out whole or not at all, and one above the send buffer
(212,992 bytes by default) never does."""
MAX_OPEN_SECTIONS = 64
"""Sections that one report may name. With the longest names a report of so many takes 17 KB."""
MAX_NAME_BYTES = 255
"""Of the name of a section: its length is one byte in a report."""
MAX_DEPTH = 16
"""Nesting of a message's JSON. Our messages have at most four levels; what reads a message may recurse into it."""
MAX_KEYS = 256
"""Keys of any one object in a message: four times the sections that one report may name."""

_HEADER = struct.Struct("<BBHIQ")
_HEADER_AND_INT = struct.Struct("<BBHIQq")
_SECTIONS_HEAD = struct.Struct("<qB")
_SECTION_HEAD = struct.Struct("<QB")
_HEARTBEAT = Heartbeat.kind

# The short form of JSON; a message within a message becomes an object. Encoder and decoder are made once, since
# `json.dumps` and `json.loads` look at their options at each call.
_ENCODE = json.JSONEncoder(separators=(",", ":"), default=vars).encode
_DECODE = json.JSONDecoder().decode


@dataclass(frozen=True)
class Received:
    """A decoded message with what its header says: the sender's number of the message, and when it was sent (the
    sender's CLOCK_MONOTONIC in nanoseconds)."""

    message: Message
    sequence: int
    sent_ns: int


def heartbeat(sequence: int, sent_ns: int) -> bytes:
    """Returns the 16 bytes of a `Heartbeat`. Called by the training itself, at each heartbeat."""
    # The field for the sequence has 32 bits, so the number wraps.
    return _HEADER.pack(VERSION, _HEARTBEAT, 0, sequence & 0xFFFFFFFF, sent_ns)


def sections(sequence: int, sent_ns: int, iteration: int, open_sections: typing.Mapping[str, int]) -> bytes:
    """Returns the bytes of a `Sections`. Called by the training itself, whenever a section begins or ends.

    Args:
        sequence: the sender's number of the message.
        sent_ns: when it is sent.
        iteration: of the training; NO_ITERATION: not known.
        open_sections: name -> when the section was opened.

    Raises:
        ValueError: more than 64 open sections, or a name of more than 255 bytes.
    """
    if len(open_sections) > MAX_OPEN_SECTIONS:
        raise ValueError(f"{len(open_sections)} sections are open; at most {MAX_OPEN_SECTIONS} can be")
    parts = [
        _HEADER.pack(VERSION, Sections.kind, 0, sequence & 0xFFFFFFFF, sent_ns),
        _SECTIONS_HEAD.pack(iteration, len(open_sections)),
    ]
    for name, since_ns in open_sections.items():
        encoded = name.encode()
        if len(encoded) > MAX_NAME_BYTES:
            raise ValueError(f"section name of {len(encoded)} bytes; at most {MAX_NAME_BYTES}")
        parts.append(_SECTION_HEAD.pack(since_ns, len(encoded)))
        parts.append(encoded)
    return b"".join(parts)


def encode(message: Message, sequence: int, sent_ns: int) -> bytes:
    """Returns the bytes of any message.

    Raises:
        ValueError: the message is larger than `MAX_MESSAGE`.
    """
    match message:
        case Heartbeat():
            return heartbeat(sequence, sent_ns)
        case Sections():
            return sections(sequence, sent_ns, message.iteration, dict(message.open))
        case IterationReached(value) | Progress(value):
            return _HEADER_AND_INT.pack(VERSION, message.kind, 0, sequence & 0xFFFFFFFF, sent_ns, value)
    header = _HEADER.pack(VERSION, message.kind, 0, sequence & 0xFFFFFFFF, sent_ns)
    data = header + _ENCODE(vars(message)).encode()
    if len(data) > MAX_MESSAGE:
        raise ValueError(f"{type(message).__name__} of {len(data)} bytes; at most {MAX_MESSAGE}")
    return data


def heartbeat_sent_ns(data: bytes | bytearray, length: int) -> int | None:
    """Returns when the heartbeat in the first `length` bytes was sent; None if these bytes are no heartbeat.

    Cheaper than `decode`: most of what a monitor reads are heartbeats.
    """
    if length != _HEADER.size or data[0] != VERSION or data[1] != _HEARTBEAT:
        return None
    return int(_HEADER.unpack_from(data)[4])


def decode(data: bytes) -> Received:
    """Returns the message in `data`.

    Raises:
        ProtocolError: `data` is no message of ours, has another version, or is too large; or a field does not fit.
    """
    if len(data) < _HEADER.size:
        raise ProtocolError(f"message of {len(data)} bytes is shorter than a header")
    if len(data) > MAX_MESSAGE:
        raise ProtocolError(f"message of {len(data)} bytes is above {MAX_MESSAGE}")
    version, kind, _, sequence, sent_ns = _HEADER.unpack_from(data)
    if version != VERSION:
        raise ProtocolError(f"protocol version {version}; this process speaks {VERSION}")
    return Received(_decode_body(kind, data), sequence, sent_ns)


def _decode_body(kind: int, data: bytes) -> Message:
    if kind == _HEARTBEAT:
        return Heartbeat()
    if kind == Sections.kind:
        return _decode_sections(data)
    if kind in (IterationReached.kind, Progress.kind):
        if len(data) != _HEADER_AND_INT.size:
            raise ProtocolError(f"kind {kind} with {len(data)} bytes")
        value = _HEADER_AND_INT.unpack(data)[-1]
        if kind == IterationReached.kind:
            return IterationReached(value)
        return Progress(value)
    if kind not in KINDS:
        raise ProtocolError(f"unknown kind {kind}")
    return _decode_json(KINDS[kind], data)


def _decode_sections(data: bytes) -> Sections:
    try:
        iteration, count = _SECTIONS_HEAD.unpack_from(data, _HEADER.size)
        at = _HEADER.size + _SECTIONS_HEAD.size
        found = []
        for _ in range(count):
            since_ns, length = _SECTION_HEAD.unpack_from(data, at)
            at += _SECTION_HEAD.size
            if at + length > len(data):
                raise ProtocolError("section name runs past the end")
            found.append((data[at : at + length].decode(), since_ns))
            at += length
    except (struct.error, UnicodeDecodeError) as error:
        raise ProtocolError(f"malformed sections: {error}") from None
    if at != len(data) or count > MAX_OPEN_SECTIONS:
        raise ProtocolError(f"sections: {count} entries, {len(data) - at} bytes left over")
    return Sections(tuple(found), iteration)


def _decode_json(expected: type, data: bytes) -> Message:
    try:
        text = str(data[_HEADER.size :], "utf-8")
        check_depth(text, MAX_DEPTH)
        values = _DECODE(text)
    except ValueError as error:
        raise ProtocolError(f"{expected.__name__}: no JSON: {error}") from None
    if data.count(b":") > MAX_KEYS and _most_keys(values) > MAX_KEYS:
        raise ProtocolError(f"{expected.__name__}: an object of more than {MAX_KEYS} keys")
    message: Message = from_json(expected, values)
    return message


def _most_keys(value: object) -> int:
    """Returns the number of keys of the largest object in a JSON value. Recurses: check the depth before."""
    if isinstance(value, dict):
        return max(len(value), *map(_most_keys, value.values()), 0)
    if isinstance(value, list):
        return max(map(_most_keys, value), default=0)
    return 0
