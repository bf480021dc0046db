"""What the agent's process does with the calls of its rank, where rank or store are gone."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
from collections.abc import Iterator
from typing import Any, ClassVar, cast

from torch.distributed import PrefixStore

from ft_client.inprocess.standalone import launcher_parts
from ft_client.inprocess.standalone.rank_calls import RankCalls
from ft_client.inprocess.standalone.watched_call import FINISHED, OVER, CallMembers, MakeStore, WatchedCall
from rank_monitor.contract.wire import channel
from rank_monitor.contract.wire.json_record import write_record
from tests.patience import patient, until


class AgentOfTest:
    """The agent, as far as a call without stores of its own needs it."""

    def begin(self, call: launcher_parts.StandaloneCall) -> None:
        """A call has begun."""


@contextlib.contextmanager
def rank_of(
    call: WatchedCall, make_store: MakeStore | None = None, own: AgentOfTest | None = None
) -> Iterator[tuple[socket.socket, RankCalls, list[str]]]:
    """The rank's end of the connection, over which the call was sent; the calls; and what was said of them.

    At the end all threads of the call have ended.
    """
    before, said = set(threading.enumerate()), list[str]()
    ours, theirs = channel.pair()
    theirs.settimeout(patient(30))
    agent = cast("launcher_parts.StandaloneAgent", own or AgentOfTest())
    calls = RankCalls(ours, agent, make_store, said.append)
    with ours, theirs:
        channel.send(theirs, write_record(call).encode())
        calls.poll()
        yield theirs, calls, said
        until(lambda: set(threading.enumerate()) <= before, "the threads of the call to end")


def call_of_two(host: str, port: int) -> WatchedCall:
    return WatchedCall(1, 2, "call", host, port, True, 0.1, 5.0, 5.0)


def test_the_end_of_a_call_is_sent_to_the_rank(server: Any) -> None:
    with rank_of(call_of_two("127.0.0.1", server.port)) as (rank, calls, said):
        channel.send(rank, OVER)
        calls.poll()
        CallMembers(PrefixStore("call/agents", server), 2).end(0)
        assert rank.recv(100) == FINISHED
    assert said == []


def test_a_rank_that_has_ended_is_told_nothing(server: Any) -> None:
    with rank_of(call_of_two("127.0.0.1", server.port)) as (rank, calls, said):
        channel.send(rank, OVER)
        calls.poll()
        rank.close()
        CallMembers(PrefixStore("call/agents", server), 2).end(0)
    assert said == []


def test_a_store_that_cannot_be_made_is_told_once() -> None:
    """The factory is the user's own, and needs a file or a socket."""

    def make_store() -> Any:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with rank_of(call_of_two("", 0), make_store) as (_, _, said):
        pass
    assert said == ["this agent does not beat for its node any more: [Errno 24] Too many open files"]


def test_a_loss_is_reported_where_the_end_of_the_member_cannot_be_written() -> None:
    """Each has a connection of its own, and the others wait for the report."""
    done: list[str] = []

    class Call:
        """The agent's part."""

        def report_loss(self, member: int, reason: str) -> None:
            done.append(f"rank {member}: {reason}")

        def wait_for_notice(self, wait_for_all: Any) -> None:
            done.append("waited")

    class Agent(AgentOfTest):
        call = Call()
        served: ClassVar[dict[int, object]] = {}

    def make_store() -> Any:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with rank_of(call_of_two("", 0), make_store, Agent()) as (_, calls, _):
        calls.finish(has_left=False, condemned="")
    assert done == ["rank 1: TERMINATED", "waited"]
