"""A connection between two nodes of a job over TCP, on which both prove that they know the job's secret.

Anybody may connect to a port of a node. So nothing that a peer sends is used before the peer is known, and no record
after that which the peer did not send, in its place in the order. What this does not do: nothing is encrypted.

**Greeting.** Each end sends `_GREETING` bytes: `_MAGIC`, which names this protocol and its version; one byte, whether
the end has a secret; the SHA-256 of the job's name; 32 random bytes, made for this connection. An end goes on only
where the other one has the same protocol, the same job, and a secret if and only if itself has one.

**Proof**, where there is a secret. An end's proof is an HMAC-SHA256, by the secret, of the end's role and both
greetings. The end that connected sends its proof first: who only connects gets no proof from a node. As the role is in
it, no end can give a proof back that it was given; as both random numbers are, no proof of an earlier connection is of
use. With the same HMAC and another word in front, each end makes a key for each of the two directions.

**Frames.** Each has a head, a record, a seal, and a body that the record announces.

| part | bytes | |
|---|---|---|
| head | 12 | length of the record (4), length of the body (8), the largest byte first |
| record | at most `MAX_RECORD` | what the frame says; JSON to all callers |
| seal | 32 | HMAC-SHA256, by the key of the direction, of the frame's number, head and record |
| body | as many as the head says | bytes of a file, which the caller sends and takes itself |

Without a secret seals are 32 zero bytes. A body is not sealed: its checksum stands in a record, which is. A frame's
number is not sent: both ends count from 0, so that none can be repeated, left out, or moved to another place.

After a `LinkError` a connection is of no further use, and the caller closes it.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import socket
import struct
import time

_MAGIC = b"ftnode\x00\x01"
_RANDOM = 32
_GREETING = len(_MAGIC) + 1 + 32 + _RANDOM
_HEAD = struct.Struct(">IQ")
_NUMBER = struct.Struct(">Q")
_SEAL = 32
_NO_SEAL = bytes(_SEAL)
MAX_RECORD = 64 * 1024
"""Bytes of a record. Checked before room for it is reserved."""
_CONNECTS, _ACCEPTS = b"connects", b"accepts"
_ANOTHER_SECRET = "the other node has another secret in --ft-job-secret-file"


class LinkError(Exception):
    """The other end is not of this job, is gone, too slow, or has sent what cannot be. The text is for the user."""


class _Closed(LinkError):
    """The other end has closed the connection."""


class ProvenLink:
    """One end of a connection that was greeted. Not for two threads at once.

    Args:
        connection: a connected socket. It stays the caller's, who closes it.
        job: the name of the job, the same on all of its nodes.
        secret: what `read_job_secret` returned; None: the job has none.
        connects: whether this end has connected; False: it has accepted.
        deadline: until when the greeting may take (monotonic seconds).

    Raises:
        LinkError: the other end is not known as a node of this job.
    """

    def __init__(
        self, connection: socket.socket, job: str, secret: bytes | None, connects: bool, deadline: float
    ) -> None:
        self._connection = connection
        self._sent = self._received = 0
        own = _MAGIC + bytes([secret is not None]) + hashlib.sha256(job.encode()).digest() + os.urandom(_RANDOM)
        self._send(own, deadline)
        other = self._take(_GREETING, deadline)
        _check_greeting(other, own)
        self._send_key = self._receive_key = b""
        if secret is None:
            return
        if connects:
            greetings, role, role_of_other = own + other, _CONNECTS, _ACCEPTS
            self._send(_derived(secret, b"proof", role, greetings), deadline)
            try:
                self._take_proof(_derived(secret, b"proof", role_of_other, greetings), deadline)
            except _Closed:  # it has refused the proof of this end, and gives none to an unknown one
                raise LinkError(f"{_ANOTHER_SECRET}, or its process has died") from None
        else:
            greetings, role, role_of_other = other + own, _ACCEPTS, _CONNECTS
            self._take_proof(_derived(secret, b"proof", role_of_other, greetings), deadline)
            self._send(_derived(secret, b"proof", role, greetings), deadline)
        self._send_key = _derived(secret, b"key", role, greetings)
        self._receive_key = _derived(secret, b"key", role_of_other, greetings)

    def send(self, record: bytes, body: int, deadline: float) -> None:
        """Sends a frame but for its body, which the caller then sends on the socket.

        Args:
            record: at most `MAX_RECORD` bytes.
            body: how many bytes follow.
            deadline: until when this may take (monotonic seconds).

        Raises:
            LinkError: the other end is gone, or does not take the bytes in time.
        """
        assert len(record) <= MAX_RECORD
        head = _HEAD.pack(len(record), body)
        seal = _seal(self._send_key, self._sent, head + record)
        self._sent += 1
        self._send(head + record + seal, deadline)

    def receive(self, max_body: int, deadline: float) -> tuple[bytes, int]:
        """Returns the record of the next frame, and how many bytes of its body the caller is to take from the socket.

        Args:
            max_body: bytes that a body may have.
            deadline: until when this may take (monotonic seconds).

        Raises:
            LinkError: the other end is gone, or has not sent a whole head, record and seal in time; the frame is too
                large; its seal does not fit.
        """
        head = self._take(_HEAD.size, deadline)
        length, body = _HEAD.unpack(head)
        if length > MAX_RECORD:
            raise LinkError(f"the other node sent a record of {length} bytes, and {MAX_RECORD} is the most")
        record = self._take(length, deadline)
        seal = self._take(_SEAL, deadline)
        if not hmac.compare_digest(seal, _seal(self._receive_key, self._received, head + record)):
            raise LinkError("what the other node sent was changed on the way")
        # Only now: the number of bytes in a head that anybody may have sent means nothing.
        if body > max_body:
            raise LinkError(f"the other node sends {body} bytes, and {max_body} is the most")
        self._received += 1
        return record, body

    def _take_proof(self, expected: bytes, deadline: float) -> None:
        if not hmac.compare_digest(self._take(len(expected), deadline), expected):
            raise LinkError(_ANOTHER_SECRET)

    def _send(self, data: bytes, deadline: float) -> None:
        """Sends all bytes. Raises LinkError."""
        rest = memoryview(data)
        while rest:
            try:
                self._connection.settimeout(_left(deadline))
                rest = rest[self._connection.send(rest) :]
            except TimeoutError:
                raise LinkError("the other node takes nothing") from None
            except OSError as problem:
                raise LinkError(f"the connection broke: {problem.strerror or problem}") from None

    def _take(self, count: int, deadline: float) -> bytes:
        """Returns exactly so many bytes, of at most `MAX_RECORD`. Raises LinkError."""
        found = bytearray()
        while len(found) < count:
            try:
                self._connection.settimeout(_left(deadline))
                part = self._connection.recv(count - len(found))
            except TimeoutError:
                raise LinkError("the other node does not answer") from None
            except OSError as problem:
                raise LinkError(f"the connection broke: {problem.strerror or problem}") from None
            if not part:
                raise _Closed("the other node has closed the connection")
            found += part
        return bytes(found)


def _check_greeting(other: bytes, own: bytes) -> None:
    """Raises LinkError unless the greeting of the other end says that it is of the same kind as this one."""
    start, end = len(_MAGIC), len(_MAGIC) + 1
    if other[:start] != _MAGIC:
        raise LinkError("what answers there is no node of a job, or one of another release")
    if other[end:-_RANDOM] != own[end:-_RANDOM]:
        raise LinkError("the other node is of another job")
    if other[start:end] != own[start:end]:
        if own[start]:
            raise LinkError("this node has --ft-job-secret-file, and the other one has not")
        raise LinkError("the other node has --ft-job-secret-file, and this one has not")
    if other == own:
        raise LinkError("the other end gives back what it is sent")


def _derived(secret: bytes, use: bytes, role: bytes, greetings: bytes) -> bytes:
    """Returns the proof of an end, or the key with which it seals. Greetings: that of the end that connected first."""
    return hmac.digest(secret, use + b" " + role + b" " + greetings, "sha256")


def _seal(key: bytes, number: int, data: bytes) -> bytes:
    """Returns the seal of a frame. An empty key: there is no secret."""
    if not key:
        return _NO_SEAL
    return hmac.digest(key, _NUMBER.pack(number) + data, "sha256")


def _left(deadline: float) -> float:
    """Returns the seconds that are left. Raises TimeoutError: none is."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left
