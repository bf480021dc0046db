"""A call as the agent of one rank knows it, on a real store: who takes note of a loss, and who serves rounds.

`tests/client/inprocess/standalone/` has the agent in its process, with a rank and a monitor.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from torch.distributed import PrefixStore, TCPStore

from ft_launcher.agent.in_process.store_threads import connect
from ft_launcher.agent.standalone import StandaloneCall
from ft_launcher.job.rendezvous.cycle_store import PortHolder
from rank_monitor.contract.rounds.barrier import Entry
from rank_monitor.contract.rounds.round import DONE, Round
from rank_monitor.contract.rounds.round_stores import variables_of
from tests.patience import patient, until

PREFIX = "call/0"
HOST = "127.0.0.1"
DEADLINE_S = patient(20.0)


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def call(server: TCPStore, said: list[str]) -> Iterator[StandaloneCall]:
    def connect_within(limit_s: float) -> Any:
        return connect(HOST, server.port)

    call = StandaloneCall(PREFIX, connect_within, DEADLINE_S, DEADLINE_S, said.append)
    yield call
    call.end()


def test_the_others_take_note_of_a_loss(call: StandaloneCall, server: TCPStore, said: list[str]) -> None:
    first = Round(PrefixStore(PREFIX, server), 0)
    call.report_loss(1, "UNRESPONSIVE")
    until(lambda: bool(first.records()))
    assert first.records() == ['{"rank": 1, "interruption": "UNRESPONSIVE"}']
    first.account(Entry(0, 0, 2))

    def is_known() -> bool:
        call.poll()
        return said == ["the others know that rank 1 is gone"]

    until(is_known)


def test_a_report_ends_when_all_members_have(call: StandaloneCall, server: TCPStore) -> None:
    """Nobody comes to the end of the round, since nobody is left."""
    call.report_loss(1, "TERMINATED")
    until(lambda: bool(Round(PrefixStore(PREFIX, server), 0).records()))
    server.set(f"{PREFIX}/all", "")
    call.wait_for_notice(lambda keys: keys.wait(["all"], timedelta(seconds=DEADLINE_S)))
    server.set(f"{PREFIX}/0/closed", "")  # ends the thread that waits


def test_a_report_goes_on_where_the_wait_for_all_members_fails(
    call: StandaloneCall, server: TCPStore, said: list[str]
) -> None:
    """The process ends after the wait: with it the report would, which the others wait for."""

    def fail(keys: Any) -> None:
        raise RuntimeError("the connection was refused")

    call.report_loss(1, "TERMINATED")
    waiting = threading.Thread(target=call.wait_for_notice, args=(fail,))
    waiting.start()
    until(lambda: any("the connection was refused" in line for line in said))
    first = Round(PrefixStore(PREFIX, server), 0)
    until(lambda: bool(first.records()))
    assert waiting.is_alive()
    first.account(Entry(0, 0, 2))
    waiting.join(DEADLINE_S)
    assert not waiting.is_alive() and said[-1] == "the others know that rank 1 is gone"


def test_a_report_that_never_ends_does_not_keep_the_agent(server: TCPStore, said: list[str]) -> None:
    """Its connection was made, and then the store's host was frozen."""
    frozen, connected = threading.Event(), threading.Event()

    def connect_and_freeze(limit_s: float) -> Any:
        if connected.is_set():
            return connect(HOST, server.port)
        connected.set()
        frozen.wait()
        raise RuntimeError("the test ends")

    def fail(keys: Any) -> None:
        raise RuntimeError("the connection was refused")

    call = StandaloneCall(PREFIX, connect_and_freeze, 0.1, 0.1, said.append)
    call.report_loss(1, "TERMINATED")
    try:
        until(connected.is_set)
        waiting = threading.Thread(target=call.wait_for_notice, args=(fail,), daemon=True)
        waiting.start()
        waiting.join(DEADLINE_S)
        assert not waiting.is_alive() and any("the connection was refused" in line for line in said)
    finally:
        frozen.set()
        call.end()


def test_each_round_has_a_store(call: StandaloneCall, server: TCPStore) -> None:
    call.serve_rounds(HOST)
    note = variables_of(server.get(f"{PREFIX}/0/store").decode())
    client = TCPStore(note["MASTER_ADDR"], int(note["MASTER_PORT"]), is_master=False, wait_for_workers=False)
    assert not client.check(["anything"])
    for name in (Round(server, 0).started, Round(server, 0).outcome):
        server.set(f"{PREFIX}/{name}", DONE)


def test_ranks_are_told_that_no_port_is_free(
    call: StandaloneCall, server: TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PortHolder, "serve_round", partial(_refuse, "no free port found"))
    call.serve_rounds(HOST)
    with pytest.raises(RuntimeError, match="no free port found"):
        variables_of(server.get(f"{PREFIX}/0/store").decode())
    for name in (Round(server, 0).started, Round(server, 0).outcome):
        server.set(f"{PREFIX}/{name}", DONE)


def _refuse(text: str) -> None:
    raise OSError(text)
