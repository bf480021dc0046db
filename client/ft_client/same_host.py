"""Ranks that run on one host agree over Unix sockets: rank 0 hears all of them, and answers all alike.

A message there is some ten times cheaper than a reduction of gloo, and asks nothing of a GPU's queue. A rank that ends
closes its connections, so nobody waits for it. Knows nothing of torch, of how the connections came about (`meeting`),
nor of what is agreed.
"""

from __future__ import annotations

import select
import socket
import struct
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

_LENGTH = struct.Struct("=I")
_TIMEVAL = struct.Struct("@ll")
_AT_ONCE = 65536
_LONGEST_S = 1e6  # poll(2) counts milliseconds by an int
_OUT_OF_STEP = "Detected mismatch between collectives, or what stands for them"
_AFTER_RANK_0_S = 5.0
"""So much longer others wait than rank 0, which knows who is late."""
_SPIN_S = 50e-6
"""What waking a sleeping thread takes: who looks for that long before it sleeps waits twice the best at most."""


class PeerGone(ConnectionError):
    """Another rank has closed its connection, or this one has before."""


class PeerLate(TimeoutError):
    """Another rank did not ask in time."""


class SameHost:
    """The connections of one rank: rank 0's to all others, another's to rank 0. One thread asks at a time.

    Args:
        peers: by rank.
        wait_s: what nobody says to rank 0 within this time fails.
        spins: look for a moment before going to sleep: for ranks that have a core each.
    """

    def __init__(self, peers: Mapping[int, socket.socket], wait_s: float, spins: bool) -> None:
        self._peers = dict(sorted(peers.items()))
        self._wait_s = min(wait_s, _LONGEST_S) + (_AFTER_RANK_0_S if 0 in peers else 0.0)
        self._spin_s = _SPIN_S if spins else 0.0
        whole, part = divmod(max(self._wait_s, 1e-6), 1.0)
        for peer in self._peers.values():
            peer.settimeout(None)
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TIMEVAL.pack(int(whole), int(part * 1e6)))

    def exchange(self, question: str, own: bytes, answer: Callable[[list[bytes]], bytes]) -> bytes:
        """What `answer` makes, on rank 0, of what all ranks give, by rank; the same on every rank.

        Every rank calls it alike. After an error all connections are cut, so that the others fail too.

        Args:
            question: what is asked; the same on all ranks, or they are out of step.

        Raises:
            PeerGone, PeerLate: nobody waits any more for a rank that has ended, or did not ask within `wait_s`.
            RuntimeError: another rank asks something else.
            BaseException: whatever `answer`, or the handler of a signal, raises.
        """
        head = question.encode() + b"\0"
        try:
            if 0 in self._peers:
                self._send(head + own)
                return self._receive(head)[0]
            answered = answer([own, *self._receive(head)])
            self._send(head + answered)
            return answered
        except BaseException:
            self.cut()
            raise

    def cut(self) -> None:
        """Fails whoever waits, here and in the peers, and every later exchange. From any thread."""
        for peer in self._peers.values():
            with suppress(OSError):
                peer.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Gives the descriptors back; after a fork, the parent's connections stay."""
        for peer in self._peers.values():
            peer.close()

    def _send(self, message: bytes) -> None:
        """One message to each peer."""
        for rank, peer in self._peers.items():
            try:
                peer.sendall(_LENGTH.pack(len(message)) + message, socket.MSG_NOSIGNAL)
            except BlockingIOError:
                raise self._waited("send", [rank]) from None
            except ConnectionError as error:
                raise _lost(rank) from error

    def _receive(self, head: bytes) -> list[bytes]:
        """From each peer, by rank, the rest of the one message that is on its way."""
        read = {rank: bytearray() for rank in self._peers}
        awaited = list(read)
        since = time.perf_counter()
        while awaited:
            waited_s = time.perf_counter() - since
            for rank in awaited if waited_s < self._spin_s else self._ready(awaited, self._wait_s - waited_s):
                read[rank] += self._now(rank)
            awaited = [rank for rank in awaited if not _is_whole(rank, read[rank])]
        return [_rest(rank, bytes(message[_LENGTH.size :]), head) for rank, message in read.items()]

    def _ready(self, awaited: list[int], wait_s: float) -> list[int]:
        """Those who have said something, or are gone, once there are any; of who has asked already, only its end."""
        poll = select.poll()
        by_descriptor = {peer.fileno(): rank for rank, peer in self._peers.items()}
        for descriptor, rank in by_descriptor.items():
            poll.register(descriptor, select.POLLIN if rank in awaited else 0)
        if ready := poll.poll(max(wait_s, 0.0) * 1000):
            return [by_descriptor[descriptor] for descriptor, _ in ready]
        raise self._waited("recv", awaited)

    def _now(self, rank: int) -> bytes:
        """What a rank has said so far; empty: nothing."""
        try:
            data = self._peers[rank].recv(_AT_ONCE, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return b""
        except ConnectionError as error:
            raise _lost(rank) from error
        if not data:
            raise _lost(rank)
        return data

    def _waited(self, way: str, ranks: list[int]) -> PeerLate:
        whom = ", ".join(f"rank {rank}" for rank in ranks)
        return PeerLate(f"Timed out waiting {self._wait_s * 1000:.0f}ms for {way} operation with {whom}")


def _is_whole(rank: int, message: bytearray) -> bool:
    if len(message) < _LENGTH.size:
        return False
    missing = _LENGTH.size + int(_LENGTH.unpack_from(message)[0]) - len(message)
    if missing < 0:
        raise RuntimeError(f"{_OUT_OF_STEP}: rank {rank} says more than it was asked for")
    return missing == 0


def _rest(rank: int, message: bytes, head: bytes) -> bytes:
    if message.startswith(head):
        return message[len(head) :]
    theirs, here = (text.partition(b"\0")[0].decode(errors="replace") for text in (message, head))
    raise RuntimeError(f"{_OUT_OF_STEP}: rank {rank} asks for {theirs}, this rank for {here}")


def _lost(rank: int) -> PeerGone:
    return PeerGone(f"Connection closed by peer: rank {rank} has ended, or given up what the ranks agree on")
