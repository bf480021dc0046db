"""Evidence to fault, by tables."""

from dataclasses import replace
from typing import Any

import pytest

from ft_launcher.attribution import FaultKind, RankEvidence, attribute
from ft_launcher.hints import NodeEvidence
from rank_monitor.contract.messages import RankException, Snapshot, Verdict


def rank(number: int, **facts: Any) -> RankEvidence:
    return RankEvidence(rank=number, local_rank=number, pid=100 + number, **facts)


def verdict(number: int, frames: list[str] | None = None, state: str = "S", limit: str = "section:step") -> Verdict:
    return Verdict(
        0, number, 100 + number, limit, 5.0, 5.1, False, 7, {"step": 5.1}, f"in {limit} for 5.1 s", "", frames or [],
        {"state": state}, True,
    )  # fmt: skip


def raised(message: str, kind: str = "RuntimeError") -> RankException:
    return RankException(kind, message, f"Traceback\n  line\n{kind}: {message}", 0.0)


NODE = NodeEvidence()


def test_nobody_failed() -> None:
    assert attribute([rank(0), rank(1, exit_code=0, died_at=1.0)], NODE) is None


@pytest.mark.parametrize(
    ("evidence", "kind", "what", "code"),
    [
        ({"exit_code": 3}, FaultKind.EXIT, "exited with code 3", 3),
        ({"exit_code": -9}, FaultKind.SIGNAL, "died of SIGKILL", -9),
        ({"exit_code": -41}, FaultKind.SIGNAL, "died of signal 41", -41),
        ({"exit_code": 1, "exception": raised("bad\nlines"), "exception_at": 1.0}, FaultKind.EXCEPTION,
         "raised RuntimeError: bad", 1),
        ({"exit_code": -9, "verdict": verdict(1), "verdict_at": 1.0}, FaultKind.HANG,
         "hangs: in section:step for 5.1 s", -9),
        ({"exit_code": 0, "verdict": verdict(1), "verdict_at": 1.0}, FaultKind.HANG,
         "hangs: in section:step for 5.1 s", 0),
    ],
)  # fmt: skip
def test_what_one_rank_did(evidence: dict[str, Any], kind: FaultKind, what: str, code: int) -> None:
    fault = attribute([rank(0), rank(1, died_at=2.0, **evidence)], NODE)
    assert fault is not None
    assert (fault.kind, fault.what, fault.exit_code, fault.rank) == (kind, what, code, 1)


TRACE = 'Traceback\n  File "run.py", line 3, in <module>\n  File "/a b/train.py", line 7, in step\nValueError: {}'


@pytest.mark.parametrize(
    ("exception", "error"),
    [
        (RankException("ValueError", "bad 1", TRACE.format("bad 1"), 0.0), "ValueError at /a b/train.py:7"),
        (RankException("ValueError", "bad 2", TRACE.format("bad 2"), 9.0), "ValueError at /a b/train.py:7"),
        (raised("no frames"), "RuntimeError"),
        (raised("Connection reset by peer"), ""),
        (None, ""),
    ],
)
def test_type_and_place_of_an_error(exception: RankException | None, error: str) -> None:
    fault = attribute([rank(0, exit_code=1, died_at=2.0, exception=exception, exception_at=1.0)], NODE)
    assert fault is not None and fault.error == error


def test_a_death_by_signal_is_no_error_of_the_user() -> None:
    told = RankException("ValueError", "bad", TRACE, 0.0)
    fault = attribute([rank(0, exit_code=-9, died_at=2.0, exception=told, exception_at=1.0)], NODE)
    assert fault is not None and fault.error == ""


def test_the_first_death_is_the_cause() -> None:
    fault = attribute([rank(0, exit_code=1, died_at=2.0), rank(1, exit_code=-11, died_at=1.0)], NODE)
    assert fault is not None and fault.rank == 1


def test_what_came_after_the_stop_is_no_cause() -> None:
    ranks = [rank(0, exit_code=-15, died_at=5.0), rank(1, exit_code=3, died_at=4.0)]
    fault = attribute(ranks, NODE, stop_began=4.5)
    assert fault is not None and fault.rank == 1 and fault.agreed_exit_code == 3
    assert fault.others == ("rank 0 ended by SIGTERM",)


def test_an_exception_about_a_lost_peer_is_collateral_though_it_comes_first() -> None:
    lost = raised("[../gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:4242")
    ranks = [rank(0, exit_code=1, died_at=9.0, exception=lost, exception_at=1.0), rank(1, exit_code=-9, died_at=1.02)]
    fault = attribute(ranks, NODE, stop_began=1.03)
    assert fault is not None and fault.rank == 1 and fault.kind is FaultKind.SIGNAL
    assert fault.agreed_exit_code == -9


def test_a_rank_that_waits_in_a_collective_is_not_the_hanging_one() -> None:
    waiting = verdict(0, frames=["distributed_c10d.py:2962 in all_reduce", "train.py:3 in step"])
    sleeping = verdict(1, frames=["train.py:9 in load"])
    ranks = [rank(0, verdict=waiting, verdict_at=1.0), rank(1, verdict=sleeping, verdict_at=1.01)]
    fault = attribute(ranks, NODE)
    assert fault is not None and fault.rank == 1


def test_a_stopped_rank_is_the_hanging_one_without_a_verdict_of_its_own() -> None:
    ranks = [rank(0, exit_code=-9, died_at=1.0, verdict=verdict(0), verdict_at=0.9), rank(1, was_stopped=True)]
    fault = attribute(ranks, NODE)
    assert fault is not None
    assert (fault.rank, fault.kind) == (1, FaultKind.HANG)
    assert "stopped" in fault.hint


def test_where_it_was_comes_from_the_verdict_else_the_snapshot() -> None:
    snapshot = Snapshot(1, True, True, 12, {"checkpointing": 0.5}, 0.1)
    fault = attribute([rank(0, exit_code=1, died_at=1.0, snapshot=snapshot)], NODE)
    assert fault is not None and fault.where == "in section checkpointing (0.5 s) at iteration 12"
    fault = attribute([rank(0, verdict=verdict(0), verdict_at=1.0, snapshot=snapshot)], NODE)
    assert fault is not None and fault.where == "in section step (5.1 s) at iteration 7"


@pytest.mark.parametrize(
    ("exit_code", "node", "hint"),
    [
        (-9, NodeEvidence(oom_kills=1), "out of memory"),
        (-9, NODE, "no kill counted"),
        (-9, NodeEvidence(oom_kills=None), "cannot be read"),
        (137, NodeEvidence(oom_kills=1), "died of SIGKILL: out of memory"),
        (-7, NodeEvidence(shm_free=0), "/dev/shm is full"),
        (-7, NODE, "shared memory"),
        (-6, NODE, "collective"),
        (-11, NODE, "native"),
        (5, NODE, ""),
    ],
)
def test_hint(exit_code: int, node: NodeEvidence, hint: str) -> None:
    fault = attribute([rank(0, exit_code=exit_code, died_at=1.0)], node)
    assert fault is not None
    assert hint in fault.hint and bool(hint) == bool(fault.hint)


def test_a_verdict_that_does_not_condemn_is_no_failure() -> None:
    stall = replace(verdict(0, limit="stall"), condemned=False)
    assert attribute([rank(0, verdict=stall, verdict_at=1.0)], NODE) is None


def test_ranks_that_differ_agree_on_no_code() -> None:
    fault = attribute([rank(0, exit_code=3, died_at=1.0), rank(1, exit_code=4, died_at=1.0)], NODE)
    assert fault is not None and fault.agreed_exit_code is None


@pytest.mark.parametrize(
    ("late", "blamed"),
    [({"exit_code": -9}, 1), ({"exit_code": -15}, 0), ({"exit_code": -9, "killed_by_us": True}, 0)],
)
def test_a_death_seen_after_the_stop_began_may_be_the_cause(late: dict[str, Any], blamed: int) -> None:
    lost = raised("Connection closed by peer")
    ranks = [rank(0, exit_code=1, died_at=1.0, exception=lost, exception_at=0.9), rank(1, died_at=1.02, **late)]
    fault = attribute(ranks, NODE, stop_began=1.01)
    assert fault is not None and fault.rank == blamed
