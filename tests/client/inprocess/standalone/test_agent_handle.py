"""The standalone agent of a rank, with real processes and a real store: the test is the other rank, or looks on."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import FileStore, PrefixStore

from ft_client.inprocess.attribution import Interruption, InterruptionRecord
from ft_client.inprocess.standalone.watched_call import CallMembers
from rank_monitor.contract.rounds.barrier import Entry
from rank_monitor.contract.rounds.round import Round
from tests.client.inprocess.conftest import WAIT, connection
from tests.client.inprocess.nursery import Nursery, RankOfTest
from tests.patience import until


def address(server: Any) -> list[Any]:
    return ["127.0.0.1", server.port]


def records(store: Any, number: int = 0) -> list[str]:
    return Round(store, number).records()


def goes_without(store: Any, member: int, why: Interruption) -> None:
    """The other of two ranks is interrupted, and goes on without the member."""
    iteration = Round(store, 0)
    store.wait([iteration.outcome], WAIT)
    assert records(store) == [InterruptionRecord(member, why).to_json()]
    other = 1 - member
    iteration.account(Entry(other, other, 2))
    store.wait([iteration.closed], WAIT)
    closed = iteration.closing()
    assert closed is not None and closed.has(other) and not closed.has(member)


def guarded(ranks: Nursery, server: Any, **arguments: Any) -> tuple[RankOfTest, int, Path]:
    """Rank 1 of 2, with its agent's pid and folder."""
    rank = ranks.rank()
    agent, folder = rank.do("start", **{"member": 1, "world_size": 2, "address": address(server), **arguments})
    return rank, agent, Path(folder)


def test_a_rank_that_is_killed_is_spoken_for(ranks: Nursery, server: Any, tmp_path: Path) -> None:
    pidfile, logfile = tmp_path / "pid-{rank}", tmp_path / "log-{rank}"
    rank, agent, folder = guarded(ranks, server, pidfile=str(pidfile), logfile=str(logfile))
    assert (tmp_path / "pid-1").read_text() == f"{agent}\n"
    assert folder.stat().st_mode & 0o777 == 0o700
    until(lambda: {"ft_companion", "ft_monitor0", "ft_template"} <= {*ranks.processes().values()}, "all are there")
    assert os.getsid(agent) not in (os.getsid(0), os.getsid(rank.pid))
    assert {str(Path(f"/proc/{agent}/fd/{number}").readlink()) for number in (0, 1)} == {"/dev/null"}
    rank.kill()
    goes_without(PrefixStore("call", server), 1, Interruption.TERMINATED)
    ranks.nothing_left()
    assert "did not leave by itself: TERMINATED" in (tmp_path / "log-1").read_text()


def test_a_rank_whose_call_is_over_is_not(ranks: Nursery, server: Any) -> None:
    rank, _, _ = guarded(ranks, server)
    rank.do("close")
    rank.leave()
    ranks.nothing_left()
    assert not records(PrefixStore("call", server))
    assert CallMembers(PrefixStore("call/agents", server), 2).has_ended(1)


@pytest.mark.parametrize("phase", ["done", "left", "gave_up"])
def test_a_rank_that_has_said_so_is_not(ranks: Nursery, server: Any, phase: str) -> None:
    rank, _, _ = guarded(ranks, server)
    assert rank.do("connected")
    rank.do("say", phase="assigning")
    rank.do("say", phase=phase)
    rank.kill()
    ranks.nothing_left()
    assert not records(PrefixStore("call", server))


def test_a_rank_that_its_monitor_kills(ranks: Nursery, server: Any) -> None:
    rank, _, _ = guarded(ranks, server)
    rank.say("hang")
    goes_without(PrefixStore("call", server), 1, Interruption.HARD_TIMEOUT)


def test_the_last_one_that_dies_waits_for_nobody(ranks: Nursery, server: Any) -> None:
    """All ranks are killed: no agent waits for a barrier that nobody comes to."""
    both = [guarded(ranks, server, member=member)[0] for member in (0, 1)]
    for rank in both:
        rank.kill()
    ranks.nothing_left()


def test_a_lost_agent_is_replaced(ranks: Nursery, server: Any, tmp_path: Path) -> None:
    pidfile = tmp_path / "pid"
    rank, agent, _ = guarded(ranks, server, pidfile=str(pidfile))
    assert rank.do("connected")
    os.kill(agent, signal.SIGKILL)
    until(lambda: pidfile.read_text() != f"{agent}\n", "another agent")
    new, is_lost, warnings = rank.do("state")
    assert pidfile.read_text() == f"{new}\n" and not is_lost
    assert len(warnings) == 1 and "another takes its place" in warnings[0]
    assert ranks.processes()[new] == "ft_companion"
    until(lambda: rank.do("connected"), "the rank is watched again")
    until(lambda: rank.do("threads") == ["MainThread"], "the script sees no thread of ours")
    rank.say("hang")
    goes_without(PrefixStore("call", server), 1, Interruption.HARD_TIMEOUT)


def test_a_pidfile_that_cannot_be_written_any_more(ranks: Nursery, server: Any, tmp_path: Path) -> None:
    """It is told once, and each agent watches all the same."""
    pidfile = tmp_path / "pid"
    rank, agent, _ = guarded(ranks, server, pidfile=str(pidfile))
    pidfile.unlink()
    pidfile.mkdir()
    for lost in (1, 2):
        assert rank.do("connected")
        os.kill(agent, signal.SIGKILL)
        until(lambda number=lost: len(rank.do("state")[2]) > number, "the warnings")
        until(lambda before=agent: rank.do("state")[0] != before, "another agent")
        agent = rank.do("state")[0]
        until(lambda: rank.do("connected"), "the rank is watched again")
    warnings = rank.do("state")[2]
    assert sum("another takes its place" in warning for warning in warnings) == 2, warnings
    (refused,) = [warning for warning in warnings if "cannot be written" in warning]
    assert f"cannot be written to {pidfile} (Is a directory); the process watches all the same" in refused
    assert not list(tmp_path.glob(".pid*"))
    rank.say("hang")
    goes_without(PrefixStore("call", server), 1, Interruption.HARD_TIMEOUT)


def test_an_agent_that_takes_the_store_along_is_not(ranks: Nursery, port: int) -> None:
    rank = ranks.rank()
    agent, _ = rank.do("start", member=0, world_size=1, address=["127.0.0.1", port], hosts_store=True)
    connection(port).set("key", "")
    os.kill(agent, signal.SIGKILL)
    until(lambda: rank.do("state")[1], "it is lost")
    (warning,) = rank.do("state")[2]
    assert "the call ends on all" in warning
    until(lambda: list(ranks.processes()) == [rank.pid], "the rank goes on alone")
    rank.leave()


@pytest.mark.parametrize("lost_by", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_lost_monitor_is_replaced(ranks: Nursery, server: Any, lost_by: signal.Signals) -> None:
    rank, _, _ = guarded(ranks, server)
    assert rank.do("connected")
    (monitor,) = [pid for pid, name in ranks.processes().items() if name == "ft_monitor0"]
    os.kill(monitor, lost_by)
    until(lambda: [pid for pid, name in ranks.processes().items() if name == "ft_monitor0" and pid != monitor], "a new")
    until(lambda: rank.do("connected"), "the rank is watched again")
    rank.say("hang")
    goes_without(PrefixStore("call", server), 1, Interruption.HARD_TIMEOUT)


def test_a_rank_with_threads_gets_one_by_exec(ranks: Nursery, server: Any) -> None:
    rank = ranks.rank()
    rank.do("thread")
    agent, _ = rank.do("start", member=1, world_size=2, address=address(server))
    command = Path(f"/proc/{agent}/cmdline").read_bytes()
    assert b"agent_process" in command
    assert rank.do("connected")
    rank.kill()
    goes_without(PrefixStore("call", server), 1, Interruption.TERMINATED)


def test_a_second_call_has_the_same_agent(ranks: Nursery, server: Any) -> None:
    rank, agent, _ = guarded(ranks, server, prefix="first")
    rank.do("say", phase="done")
    rank.do("close")
    again, _ = rank.do("start", member=1, world_size=2, address=address(server), prefix="second")
    assert again == agent
    rank.do("say", phase="assigning")  # as every call does: the last word of the call before may be under way
    rank.kill()
    goes_without(PrefixStore("second", server), 1, Interruption.TERMINATED)
    assert not records(PrefixStore("first", server))


def test_a_store_of_the_users_own_factory(ranks: Nursery, tmp_path: Path) -> None:
    file = str(tmp_path / "store")
    rank = ranks.rank()
    rank.do("thread")  # only a fork can have it
    rank.do("start", member=1, world_size=2, file=file)
    rank.kill()
    goes_without(PrefixStore("call", FileStore(file, -1)), 1, Interruption.TERMINATED)


@pytest.mark.parametrize("what", ["logfile", "pidfile"])
def test_a_file_that_cannot_be_written(ranks: Nursery, server: Any, tmp_path: Path, what: str) -> None:
    rank, path = ranks.rank(), tmp_path / "nowhere" / "{rank}"
    error = rank.refuses("start", member=1, world_size=2, address=address(server), **{what: str(path)})
    assert error.startswith("FileNotFoundError") and f"{tmp_path}/nowhere/1" in error
    rank.leave()


def test_a_silent_node_is_lost(ranks: Nursery, server: Any) -> None:
    """The test is another node: its agent beats, then no more."""
    rank = ranks.rank()
    timeouts = {"heartbeat_interval": 0.05, "heartbeat_timeout": 0.5}
    rank.do("start", member=0, world_size=2, address=address(server), timeouts=timeouts)
    call_members = CallMembers(PrefixStore("call/agents", server), 2)
    call_members.join(1, "other-node")
    call_members.beat("other-node")
    goes_without(PrefixStore("call", server), 1, Interruption.UNRESPONSIVE)
    rank.do("close")
    rank.leave()
