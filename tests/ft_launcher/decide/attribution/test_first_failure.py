"""Evidence to fault, by tables."""

import re
from dataclasses import replace
from typing import Any

import pytest

from ft_launcher.decide.attribution import Fault, FaultClass, FaultKind, NodeEvidence, RankEvidence, first_failure
from ft_launcher.decide.attribution.cycle_evidence import CycleEvidence
from ft_launcher.decide.attribution.nccl_view import NcclProcess, NcclView
from rank_monitor.contract.wire.launcher_messages import Snapshot, Verdict
from rank_monitor.contract.wire.messages import RankException, ResultInDoubt


def attribute(*evidence: Any, **known: Any) -> Fault | None:
    return first_failure.attribute(CycleEvidence(*evidence, **known))


def rank(number: int, **facts: Any) -> RankEvidence:
    return RankEvidence(rank=number, local_rank=number, pid=100 + number, **facts)


def verdict(number: int, frames: list[str] | None = None, state: str = "S", limit: str = "section:step") -> Verdict:
    return Verdict(
        0, number, 100 + number, limit, 5.0, 5.1, False, 7, {"step": 5.1}, f"in {limit} for 5.1 s", "", frames or [],
        {"state": state, "wchan": "hrtimer_nanosleep"}, True,
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


LOST = raised("[../gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:4242")


@pytest.mark.parametrize(
    ("ended", "lost", "all_ranks", "blamed"),
    [
        ({1: 0.99}, LOST, True, (1,)),
        ({1: -1.1}, LOST, True, ()),
        ({1: 1.01}, LOST, True, (1,)),
        ({1: 1.04}, LOST, True, ()),
        ({1: -60.0}, LOST, True, ()),
        ({1: 0.9, 2: 0.99}, LOST, True, ()),
        ({1: 0.99}, LOST, False, ()),
        ({1: 0.99}, raised("bad value", "ValueError"), True, ()),
        ({1: 0.99}, raised("[Errno 104] Connection reset by peer", "ConnectionResetError"), True, ()),
        ({1: 0.99}, raised("('Connection aborted.', ...)", "requests.exceptions.ConnectionError"), True, ()),
        ({1: 0.99}, raised("Connection reset by peer", "torch.distributed.DistNetworkError"), True, (1,)),
        ({}, LOST, True, ()),
    ],
    ids=[
        "before",
        "a while ago",
        "seen later",
        "by the stop",
        "long ago",
        "two",
        "more nodes",
        "an error of its own",
        "a service",
        "a server",
        "a store",
        "nobody",
    ],
)
def test_a_rank_that_returned_while_others_needed_it(
    ended: dict[int, float], lost: RankException, all_ranks: bool, blamed: tuple[int, ...]
) -> None:
    ranks = [rank(0, exit_code=1, died_at=1.02, exception=lost, exception_at=1.0)]
    ranks += [rank(number, exit_code=0, died_at=at) for number, at in ended.items()]
    ranks.append(rank(3, exit_code=-15, died_at=1.1))
    fault = attribute(ranks, NODE, stop_began=1.03, all_ranks=all_ranks)
    assert fault is not None
    assert (fault.rank, fault.kind, fault.blamed) == (0, FaultKind.EXCEPTION, blamed)
    assert (fault.finding, fault.waiting) == (("returned", 1) if blamed else ("", 0))
    assert ("rank 1 had returned from its program" in fault.hint) == bool(blamed)


def test_a_rank_that_returned_a_while_ago_may_be_why() -> None:
    """Another rank may have closed the connection: it is told of, and not blamed."""
    ranks = [rank(0, exit_code=1, died_at=11.02, exception=LOST, exception_at=11.0)]
    fault = attribute([*ranks, rank(1, exit_code=0, died_at=3.0)], NODE, stop_began=11.0)
    assert fault is not None and (fault.finding, fault.blamed) == ("", ())
    assert fault.hint == "rank 1 had returned 8 s before: others may have needed it still"


@pytest.mark.parametrize(
    ("end", "blamed"),
    [
        ({"exit_code": -15, "died_at": 1.05, "returned_at": 0.99}, (1,)),
        ({"exit_code": 0, "died_at": 1.05, "returned_at": 0.99}, (1,)),
        ({"returned_at": 0.99}, (1,)),
        ({"exit_code": 0, "died_at": 1.05, "returned_at": 1.04}, ()),
        ({"exit_code": -15, "died_at": 1.05}, ()),
    ],
    ids=["ended by the stop", "seen after the stop", "still ending", "by the stop", "running"],
)
def test_a_rank_that_had_said_that_it_returned(end: dict[str, Any], blamed: tuple[int, ...]) -> None:
    """The launcher may stop the ranks before it sees that the process of that one has ended."""
    ranks = [rank(0, exit_code=1, died_at=1.02, exception=LOST, exception_at=1.0), rank(1, **end)]
    fault = attribute(ranks, NODE, stop_began=1.03)
    assert fault is not None and (fault.rank, fault.blamed) == (0, blamed)


def test_a_rank_that_waits_in_a_collective_is_not_the_hanging_one() -> None:
    waits = "torch/distributed/distributed_c10d.py:2962 in all_reduce"
    waiting = verdict(0, frames=[waits, "train.py:3 in step"])
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


@pytest.mark.parametrize(("code", "blamed"), [(-11, 0), (-7, 0), (-9, 1)])
@pytest.mark.parametrize("died_at", [2.0, 1.0])
def test_a_rank_that_dies_of_being_asked_for_its_stacks_is_no_fault(code: int, blamed: int, died_at: float) -> None:
    """The launcher asked it by the signal right before the stop, which began at 1.5."""
    waiting = verdict(0, frames=["torch/distributed/distributed_c10d.py:2962 in all_reduce", "train.py:3 in step"])
    asked = Snapshot(1, True, True, 7, {}, 0.1, process={"state": "R (running)", "signalled": True})
    ranks = [rank(0, verdict=waiting, verdict_at=1.2), rank(1, exit_code=code, died_at=died_at, snapshot=asked)]
    fault = attribute(ranks, NODE, stop_began=1.5)
    if died_at < 1.5:
        blamed = 1
    assert fault is not None and fault.rank == blamed


# Class, by what is known of all ranks.

USER, HANG, HARDWARE, MEMORY = FaultClass.USER_ERROR, FaultClass.HANG, FaultClass.HARDWARE, FaultClass.MEMORY
TOLD, AROUND, UNSURE = FaultClass.PREEMPTION, FaultClass.INFRASTRUCTURE, FaultClass.UNKNOWN

PAIR = "[../third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4242"
WATCHDOG = "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=37, OpType=ALLREDUCE)"
C10D = "torch/distributed/distributed_c10d.py"
IN_ALL_REDUCE = [f"{C10D}:2962 in all_reduce", "torch/distributed/c10d_logger.py:83 in wrapper", "train.py:3 in step"]


def dies(code: int, at: float = 2.0, **more: Any) -> dict[str, Any]:
    return {"exit_code": code, "died_at": at, **more}


def raises(message: str, kind: str = "RuntimeError", at: float = 1.0, **more: Any) -> dict[str, Any]:
    return dies(1, at + 1.0, **{"exception": raised(message, kind), "exception_at": at, **more})


def hangs(number: int, at: float = 1.0, **more: Any) -> dict[str, Any]:
    return {"verdict": verdict(number, **more), "verdict_at": at}


@pytest.mark.parametrize(
    ("ranks", "node", "blamed", "fault_class", "hint"),
    [
        # A rank fails, and its peers lose it.
        ([raises(PAIR, at=0.9), dies(-9)], NodeEvidence(oom_kills=1), 1, MEMORY, "out of memory"),
        ([raises(PAIR, at=0.9), dies(-9)], NODE, 1, UNSURE, "no kill counted"),
        ([raises(PAIR, at=0.9), dies(-9)], NodeEvidence(oom_kills=None), 1, UNSURE, "cannot be read"),
        ([raises(PAIR, at=0.9), dies(-7)], NodeEvidence(shm_free=0), 1, MEMORY, "/dev/shm is full"),
        ([raises(PAIR, at=0.9), dies(-11)], NODE, 1, UNSURE, "native"),
        ([raises(PAIR, at=0.9), dies(-15)], NODE, 1, TOLD, "outside"),
        ([raises(PAIR, at=0.9), raises("bad", "ValueError", at=1.0)], NODE, 1, USER, ""),
        ([raises(PAIR, at=0.9), raises("CUDA out of memory.", at=1.0)], NODE, 1, MEMORY, "GPU"),
        ([raises(PAIR, at=0.9), raises("[Errno 116] Stale file handle", "OSError")], NODE, 1, AROUND, "storage"),
        ([raises(PAIR, at=0.9), raises("CUDA error: uncorrectable ECC error")], NODE, 1, HARDWARE, "fault of its own"),
        ([raises(PAIR, at=0.9), dies(16)], NODE, 1, HARDWARE, "other hardware"),
        ([raises(PAIR, at=0.9), dies(17)], NODE, 1, HARDWARE, "could not be validated"),
        ([raises(PAIR, at=0.9), dies(5)], NODE, 1, UNSURE, ""),
        # Nobody here failed by itself: the cause is on another node.
        ([raises(PAIR, at=0.9), raises(PAIR, at=0.8)], NODE, 1, AROUND, "other end is gone"),
        ([raises(WATCHDOG), raises(WATCHDOG, at=1.1)], NODE, 0, HANG, "did not take part"),
        # Some wait for one that hangs, or did not come.
        ([raises(WATCHDOG), hangs(1, at=1.2, frames=["train.py:9 in load"])], NODE, 1, HANG, ""),
        ([hangs(0, frames=IN_ALL_REDUCE), hangs(1, at=1.1, frames=["train.py:9 in load"])], NODE, 1, HANG, ""),
        ([hangs(0, frames=IN_ALL_REDUCE), hangs(1, frames=["queue.py:171 in get"])], NODE, 1, HANG, "data loader"),
        ([hangs(0, frames=IN_ALL_REDUCE), hangs(1, frames=["io.py:1 in read"], state="D")], NODE, 1, HANG, "kernel"),
        ([hangs(0, frames=IN_ALL_REDUCE), hangs(1, frames=IN_ALL_REDUCE)], NODE, 0, HANG, "out of step"),
        ([hangs(0, frames=IN_ALL_REDUCE), {"was_stopped": True}], NODE, 1, HANG, "stopped"),
        # All at once.
        ([dies(-6), dies(-6, 2.1)], NODE, 0, HANG, "all ranks aborted"),
        ([dies(-6), dies(-9, 2.1)], NODE, 0, UNSURE, "collective"),
        ([dies(-15), dies(-15, 2.1)], NODE, 0, TOLD, "outside"),
        ([dies(-9), dies(-9, 2.1)], NodeEvidence(oom_kills=2), 0, MEMORY, "killed 2"),
        ([raises("No module named 'a'", "ModuleNotFoundError"), dies(-15, 3.0)], NODE, 0, USER, ""),
        # What it raised says more than what ended it.
        ([raises("bad", "ValueError", exit_code=-6), raises(PAIR, at=1.1)], NODE, 0, USER, ""),
        ([raises("bad", "ValueError") | hangs(0, at=3.0), {}], NODE, 0, USER, ""),
        # A launcher inside a rank.
        ([dies(83)], NODE, 0, HARDWARE, "unhealthy"),
        ([dies(85)], NODE, 0, HANG, "hang"),
        ([dies(86)], NODE, 0, TOLD, "told to end"),
        ([dies(137)], NodeEvidence(oom_kills=1), 0, MEMORY, "died of SIGKILL: out of memory"),
    ],
)  # fmt: skip
def test_who_failed_first_and_of_what(
    ranks: list[dict[str, Any]], node: NodeEvidence, blamed: int, fault_class: FaultClass, hint: str
) -> None:
    fault = attribute([rank(number, **facts) for number, facts in enumerate(ranks)], node, stop_began=2.5)
    assert fault is not None
    assert (fault.rank, fault.fault_class) == (blamed, fault_class)
    assert hint in fault.hint and bool(hint) == bool(fault.hint)


@pytest.mark.parametrize(
    ("facts", "what"),
    [
        (raises("bad\nluck", "ValueError", exit_code=-6), "died of SIGABRT, after it raised ValueError: bad"),
        (raises("", "KeyError"), "raised KeyError: "),
        (raises("bad") | hangs(0, at=3.0), "hangs: in section:step for 5.1 s, after it raised RuntimeError: bad"),
    ],
)
def test_what_it_raised_before_is_told(facts: dict[str, Any], what: str) -> None:
    fault = attribute([rank(0, **facts)], NODE)
    assert fault is not None and fault.what == what


def test_an_error_after_a_lost_peer_comes_behind_a_clean_one_and_before_the_others() -> None:
    unclear = RankException("Failed", "no", f"RuntimeError: {PAIR}\n\n{MEANWHILE}\n\nFailed: no", 0.0)
    perhaps = dies(1, exception=unclear, exception_at=1.1)
    clean, lost = raises("bad", "ValueError", at=1.2), raises(PAIR, at=1.0)
    for ranks, blamed, collateral in [
        ([lost, perhaps, clean], 2, False),
        ([lost, perhaps], 1, False),
        ([lost], 0, True),
    ]:
        fault = attribute([rank(number, **facts) for number, facts in enumerate(ranks)], NODE)
        assert fault is not None and (fault.rank, fault.collateral) == (blamed, collateral)


MEANWHILE = "During handling of the above exception, another exception occurred:"


@pytest.mark.parametrize(
    ("message", "kind", "counts"),
    [
        ("bad", "ValueError", True),
        ("something else", "RuntimeError", True),
        ("CUDA out of memory.", "RuntimeError", True),
        ("[Errno 116] Stale file handle", "OSError", False),
        ("CUDA error: uncorrectable ECC error", "RuntimeError", False),
        (PAIR, "RuntimeError", False),
        (WATCHDOG, "RuntimeError", False),
    ],
)
def test_only_what_the_program_does_again_is_its_error(message: str, kind: str, counts: bool) -> None:
    fault = attribute([rank(0, **raises(message, kind))], NODE)
    assert fault is not None and bool(fault.error) is counts


@pytest.mark.parametrize(
    ("end", "kind", "code"),
    [
        ({"exit_code": -15, "died_at": 5.1}, FaultKind.EXCEPTION, 1),
        ({"exit_code": -9, "died_at": 5.1, "killed_by_us": True}, FaultKind.EXCEPTION, 1),
        ({"exit_code": -9, "died_at": 5.1}, FaultKind.SIGNAL, -9),
        ({"exit_code": -15, "died_at": 4.9}, FaultKind.SIGNAL, -15),
    ],
)
def test_the_stop_is_not_held_against_a_rank_on_its_way_out(end: dict[str, Any], kind: FaultKind, code: int) -> None:
    on_its_way_out = raises("bad", "ValueError", at=3.0) | end
    fault = attribute([rank(0, **raises(PAIR)), rank(1, **on_its_way_out)], NODE, stop_began=5.0)
    assert fault is not None
    assert (fault.rank, fault.kind, fault.exit_code, fault.agreed_exit_code) == (1, kind, code, code)
    assert bool(fault.error) is (kind is FaultKind.EXCEPTION)


def at_iteration(iteration: int) -> dict[str, Any]:
    return {"snapshot": Snapshot(1, True, True, iteration, {}, 0.1)}


LOADS = ["train.py:9 in load", "train.py:20 in <module>"]


def was_at(number: int, frames: list[str], state: str = "S (sleeping)") -> dict[str, Any]:
    """A rank without an error, as its monitor found it before the launcher stopped it."""
    snapshot = Snapshot(
        1, True, False, -1, {}, 0.1, frames=frames, process={"state": state, "wchan": "hrtimer_nanosleep"}
    )
    return dies(-15, 9.0, snapshot=snapshot)


@pytest.mark.parametrize(
    ("ranks", "blamed", "limit"),
    [
        ([raises(WATCHDOG), was_at(1, LOADS)], 1, ""),
        ([raises(WATCHDOG), was_at(1, []) | {"was_stopped": True}], 1, ""),
        ([raises(WATCHDOG), was_at(1, IN_ALL_REDUCE), was_at(2, LOADS)], 2, ""),
        ([hangs(0, frames=IN_ALL_REDUCE), was_at(1, LOADS)], 1, "section:step"),
        ([hangs(0, frames=IN_ALL_REDUCE), was_at(1, [], "D (disk sleep)")], 1, "section:step"),
        # In doubt the first that failed is told of: nobody, or more than one, is seen elsewhere.
        ([raises(WATCHDOG), was_at(1, IN_ALL_REDUCE)], 0, ""),
        ([raises(WATCHDOG), was_at(1, [])], 0, ""),
        ([raises(WATCHDOG), was_at(1, LOADS), was_at(2, LOADS)], 0, ""),
        # Others have failed by themselves.
        ([hangs(0, frames=LOADS), was_at(1, LOADS)], 0, "section:step"),
        ([raises(PAIR), was_at(1, LOADS)], 0, ""),
        ([raises("bad", "ValueError"), was_at(1, LOADS)], 0, ""),
        ([dies(-6), was_at(1, LOADS)], 0, ""),
    ],
)
def test_a_hang_is_that_of_the_rank_which_does_not_come(ranks: list[dict[str, Any]], blamed: int, limit: str) -> None:
    fault = attribute([rank(number, **facts) for number, facts in enumerate(ranks)], NODE, stop_began=5.0)
    assert fault is not None and (fault.rank, fault.limit) == (blamed, limit)
    if blamed:
        assert (fault.kind, fault.fault_class, fault.collateral) == (FaultKind.HANG, HANG, False)
        assert fault.agreed_exit_code in (1, None) and re.search(
            ", and (the others waited|1 rank waits|[0-9] ranks wait) for it", fault.what
        )


def test_where_other_nodes_have_ranks_too_nobody_is_blamed_for_being_elsewhere() -> None:
    ranks = [rank(0, **raises(WATCHDOG)), rank(1, **was_at(1, LOADS))]
    fault = attribute(ranks, NODE, stop_began=5.0, all_ranks=False)
    assert fault is not None and fault.rank == 0
    assert fault.others == ("rank 1 ended by SIGTERM, at train.py:9 in load",)
    stopped = replace(ranks[1], was_stopped=True)
    fault = attribute([ranks[0], stopped], NODE, stop_began=5.0, all_ranks=False)
    assert fault is not None and fault.rank == 1


def test_who_returns_since_a_stopped_rank_was_continued_is_not_to_blame() -> None:
    """Its monitor continues it to end it: all go on, and some have returned before the launcher looks at them."""

    def snapshot(entered: int, finished: int) -> Snapshot:
        groups = {"world": {"entered": entered, "finished": finished, "operation": "all_reduce"}}
        return Snapshot(1, False, False, 7, {}, 0.1, groups=groups)

    ranks = [
        rank(0, verdict=verdict(0, state="T (stopped)"), verdict_at=1.0, **dies(0, 1.3), snapshot=snapshot(9, 9)),
        rank(1, **dies(0, 1.2), snapshot=snapshot(9, 9)),
        rank(2, **dies(0, 1.4), snapshot=snapshot(24, 21)),
        rank(3, **dies(0, 1.2)),
    ]
    fault = attribute(ranks, NODE, stop_began=1.3)
    assert fault is not None
    assert (fault.rank, fault.finding, fault.blamed) == (0, "gone", (0,))
    assert "it is stopped" in fault.what


def test_who_loses_a_rank_that_its_monitor_ends_hung_as_well() -> None:
    """The exception of a peer is read before the verdict; without a hang in its place nobody would be looked for."""
    hung = {**hangs(1, at=1.001, frames=IN_ALL_REDUCE), **dies(-9)}
    ranks = [raises(PAIR, at=1.0), hung, was_at(2, LOADS)]
    fault = attribute([rank(number, **facts) for number, facts in enumerate(ranks)], NODE, stop_began=5.0)
    assert fault is not None and (fault.rank, fault.kind, fault.finding) == (2, FaultKind.HANG, "behind")
    lost_before = {**hangs(1, at=4.0, frames=IN_ALL_REDUCE), **dies(-9, 4.1)}
    fault = attribute([rank(0, **ranks[0]), rank(1, **lost_before)], NODE, stop_began=5.0)
    assert fault is not None and (fault.rank, fault.kind) == (0, FaultKind.EXCEPTION)


@pytest.mark.parametrize("has_recorder", [True, False])
@pytest.mark.parametrize(
    ("error", "fault_class"),
    [(("bad batch", "ValueError"), USER), (("CUDA out of memory.", "OutOfMemoryError"), MEMORY)],
)
def test_an_error_shortly_before_the_limit_of_one_that_waits_for_its_gpu_is_the_cause(
    has_recorder: bool, error: tuple[str, str], fault_class: FaultClass
) -> None:
    """The rank with the error needs a moment to exit, and the stack of the one that waits is in `loss.item()`."""
    waits = hangs(0, at=10.0, frames=["train.py:30 in step"]) | dies(-9, 10.4)
    if has_recorder:
        waits["snapshot"] = in_program(9, 8)
    ranks = [rank(0, **waits), rank(1, **raises(*error, at=9.4, died_at=9.9))]
    fault = attribute(ranks, NODE, stop_began=10.1)
    assert fault is not None
    assert (fault.rank, fault.kind, fault.fault_class) == (1, FaultKind.EXCEPTION, fault_class)


def test_where_others_were_is_told_of_equal_ranks_together() -> None:
    ranks = [raises(WATCHDOG), raises(WATCHDOG, at=1.1), was_at(2, LOADS), was_at(3, IN_ALL_REDUCE)]
    fault = attribute([rank(number, **facts) for number, facts in enumerate(ranks)], NODE, stop_began=5.0)
    assert fault is not None and fault.rank == 2
    assert fault.others == (
        "ranks 0, 1 failed in consequence: their tracebacks are not the cause",
        f"rank 3: waits in a collective, at {IN_ALL_REDUCE[-1]}",
        "ranks 0-1: waited in a collective until that failed",
    )


def test_where_others_were_is_told_of_those_without_an_error_first() -> None:
    ranks = [raises("bad", "ValueError"), raises(PAIR, at=1.1), was_at(2, LOADS), was_at(3, IN_ALL_REDUCE)]
    fault = attribute([rank(number, **facts) for number, facts in enumerate(ranks)], NODE, stop_began=5.0)
    assert fault is not None
    assert fault.others[0].startswith("rank 1 failed in consequence")
    assert fault.others[2] == f"rank 3 ended by SIGTERM, at {IN_ALL_REDUCE[-1]}"
    assert [line[:6] for line in fault.others] == ["rank 1", "rank 2", "rank 3"]


@pytest.mark.parametrize(
    ("ranks", "hint"),
    [
        (
            [raises(WATCHDOG) | at_iteration(4), at_iteration(3)],
            "out of step; behind the others: rank 1 at iteration 3",
        ),
        ([raises(WATCHDOG) | at_iteration(4), at_iteration(4)], "out of step; without an error: rank 1"),
        ([raises(WATCHDOG), {}, {}], "out of step"),
        ([raises(WATCHDOG), was_at(1, LOADS), was_at(2, LOADS)], "out of step"),
        ([raises(PAIR), raises(PAIR, at=1.1), dies(-15, 9.0)], "the network did; without an error: rank 2"),
        ([raises(PAIR), raises(PAIR, at=1.1)], "the network did"),
        ([raises("bad") | at_iteration(4), at_iteration(3)], ""),
    ],
)
def test_who_was_waited_for(ranks: list[dict[str, Any]], hint: str) -> None:
    fault = attribute([rank(number, **facts) for number, facts in enumerate(ranks)], NODE, stop_began=5.0)
    assert fault is not None and fault.rank == 0 and fault.hint.endswith(hint) and bool(fault.hint) == bool(hint)


def in_program(entered: int, finished: int) -> Snapshot:
    """A rank whose stack is in its program, and how far it is in a group; NCCL's collectives run on the GPU."""
    groups = {"0": {"entered": entered, "finished": finished, "operation": "all_reduce", "description": "dp"}}
    return Snapshot(1, True, True, 7, {}, 0.1, frames=["train.py:30 in step"], groups=groups)


@pytest.mark.parametrize(("message", "blamed"), [(PAIR, ()), ("bad value", (1,))], ids=["a lost peer", "another"])
def test_who_lost_a_peer_to_the_stop_waited_for_one(message: str, blamed: tuple[int, ...]) -> None:
    """It was in a receive, which the recorder does not know, and ended before it showed its stack."""

    def snapshot(entered: int) -> Snapshot:
        groups = {"0": {"entered": entered, "finished": 3, "operation": "all_reduce", "description": "dp"}}
        return Snapshot(1, True, True, 7, {}, 0.1, groups=groups)

    waits = verdict(0, frames=["torch/distributed/distributed_c10d.py:2962 in all_reduce"])
    ranks = [
        rank(0, exit_code=-9, died_at=1.1, verdict=waits, verdict_at=1.0, snapshot=snapshot(4)),
        rank(1, exit_code=1, died_at=1.3, exception=raised(message), exception_at=1.2, snapshot=snapshot(3)),
    ]
    fault = attribute(ranks, NODE, stop_began=1.05)
    assert fault is not None and fault.blamed == blamed


@pytest.mark.parametrize("all_ranks", [True, False])
def test_a_rank_that_waits_for_its_gpu_is_not_to_blame(all_ranks: bool) -> None:
    """Its limit passes first, and its stack is in `loss.item()`."""
    waits = rank(0, **hangs(0, frames=["train.py:30 in step"]) | {"snapshot": in_program(9, 8)})
    late = rank(1, **dies(-15, 9.0, snapshot=in_program(8, 8)))
    fault = attribute([waits, late], NODE, stop_began=5.0, all_ranks=all_ranks)
    assert fault is not None
    assert (fault.rank, fault.finding, fault.waiting, fault.collateral) == (1, "behind", 1, False)


def test_where_all_ranks_wait_for_their_gpus_it_is_the_network_or_a_device() -> None:
    """All are in one collective by the recorder, and their stacks are in `loss.item()`."""
    waits = [rank(one, **hangs(one, frames=["train.py:30 in step"]) | {"snapshot": in_program(9, 8)}) for one in (0, 1)]
    waits.append(rank(2, **dies(-15, 9.0, snapshot=in_program(9, 8))))
    network = "all 3 ranks are in all_reduce 9 of group dp, and it does not end: the network, or a device"
    fault = attribute(waits, NODE, stop_began=5.0)
    assert fault is not None
    assert (fault.finding, fault.blamed, fault.collateral, fault.hint) == ("transport", (), True, network)
    given_up = NcclView(3, (NcclProcess("10.0.0.1", 102, 2, 3, True),), 1)
    fault = attribute(waits, NODE, stop_began=5.0, nccl=given_up)
    assert fault is not None
    assert (fault.rank, fault.finding, fault.blamed, fault.collateral) == (2, "transport", (2,), False)


@pytest.mark.parametrize(
    "other",
    [
        in_program(9, 9),
        in_program(10, 9),
        replace(in_program(9, 8), groups={}),
        replace(in_program(9, 8), process={"state": "T (stopped)"}),
    ],
    ids=["it has finished", "it is in the next one", "it has no recorder", "it is stopped"],
)
def test_where_one_is_elsewhere_the_network_is_not_said_to_be_gone(other: Snapshot) -> None:
    waits = rank(0, **hangs(0, frames=["train.py:30 in step"]) | {"snapshot": in_program(9, 8)})
    fault = attribute([waits, rank(1, **dies(-15, 9.0, snapshot=other))], NODE, stop_began=5.0)
    assert fault is not None and fault.finding != "transport"


def test_where_all_of_a_node_wait_for_their_gpus_the_cause_is_elsewhere() -> None:
    waits = [rank(one, **hangs(one, frames=["train.py:30 in step"]) | {"snapshot": in_program(9, 8)}) for one in (0, 1)]
    fault = attribute(waits, NODE, stop_began=5.0, all_ranks=False)
    assert fault is not None
    assert (fault.rank, fault.collateral, fault.blamed, fault.waiting) == (0, True, (), 2)


def test_where_the_one_that_hangs_may_wait_for_others_this_is_said() -> None:
    """Torch's `work.wait()` leaves no frame: it may be this, or a lock of the program."""
    lock = {"state": "S (sleeping)", "wchan": "futex_do_wait"}
    blocked = replace(verdict(0, frames=LOADS), process=lock)
    fault = attribute([rank(0, verdict=blocked, verdict_at=1.0), rank(1, **was_at(1, IN_ALL_REDUCE))], NODE, 5.0)
    assert fault is not None
    assert (fault.rank, fault.finding, fault.collateral) == (0, "unknown", True)
    assert "work.wait()" in fault.hint
    sure = rank(1, **hangs(1, at=1.1, frames=LOADS))
    fault = attribute([rank(0, verdict=blocked, verdict_at=1.0), sure], NODE, 5.0)
    assert fault is not None and fault.rank == 1


def test_one_that_certainly_waits_for_a_lock_of_its_own_says_so() -> None:
    lock = {"state": "S (sleeping)", "wchan": "futex_do_wait"}
    blocked = replace(verdict(0, frames=LOADS), process=lock)
    waits = rank(1, **hangs(1, at=0.9, frames=IN_ALL_REDUCE))
    fault = attribute([rank(0, verdict=blocked, verdict_at=1.0, in_own_lock=True), waits], NODE, 5.0)
    assert fault is not None
    assert (fault.rank, fault.finding, fault.collateral) == (0, "behind", False)
    assert fault.hint == "it waits for a lock of its own program, and no other thread of it is at work"


def test_a_rank_that_its_monitor_ended_during_the_stop_did_not_fail_by_itself() -> None:
    """Its limit passed with those of the others, and the first of them had ended the cycle."""
    first = rank(0, **hangs(0, at=4.9, frames=IN_ALL_REDUCE), **was_at(0, IN_ALL_REDUCE))
    crossed = rank(1, **hangs(1, at=5.1, frames=IN_ALL_REDUCE), **dies(-9, 5.05))
    fault = attribute([first, crossed], NODE, stop_began=5.0)
    assert fault is not None
    assert (fault.rank, fault.kind, fault.failed) == (0, FaultKind.HANG, (0,))


DOUBT = ResultInDoubt("reproducible", 5, 7, "a", "cuda:GPU-1")


def agreed(code: int, late: int) -> list[RankEvidence]:
    """Rank 4 ended first, with this code; then rank 5, whom the stop still met."""
    return [RankEvidence(4, 0, 40, code, 10.0), RankEvidence(5, 1, 50, late, 10.2)]


def test_the_fault_of_ranks_that_agreed_to_exit_is_about_the_rank_in_doubt() -> None:
    for late in (16, -15):
        found = attribute(agreed(16, late), NODE, 10.1, suspect_results={1: DOUBT})
        assert found is not None
        assert (found.rank, found.local_rank, found.pid, found.exit_code, found.iteration) == (5, 1, 50, 16, 7)
        assert found.what == (
            "exited with code 16: iteration 7 of rank 5 came out unexpected again on node a, device cuda:GPU-1; "
            "another device has to compute it"
        )


def test_other_exits_and_exits_without_a_word_are_left_as_they_are() -> None:
    for code, suspect_results in ((3, {1: DOUBT}), (16, {})):
        found = attribute(agreed(code, code), NODE, suspect_results=suspect_results)
        assert found is not None and found.rank == 4 and found.what == f"exited with code {code}"


WAITS = ["torch/distributed/distributed_c10d.py:3252 in all_reduce", "train.py:20 in step"]


STOPPED, BEHIND = "it is stopped (SIGSTOP or a debugger)", "it never entered all_reduce 4 of group dp"


@pytest.mark.parametrize(
    ("limit", "numbers"),
    [
        ("section:step", "; in section:step for 5.1 s"),
        ("hang", ", for 5.10 s; the limit is 5 s (hang_timeout)"),
    ],
)
@pytest.mark.parametrize("cause", [STOPPED, BEHIND], ids=["stopped", "behind"])
def test_a_hang_is_told_with_its_cause_first(cause: str, limit: str, numbers: str) -> None:
    """The limit that was exceeded, with its numbers, comes behind."""
    group = {"entered": 4, "finished": 3, "operation": "all_reduce", "shape": "[[4]]", "description": "dp"}
    waits = Snapshot(1, True, True, 7, {}, 0.1, frames=WAITS, process={"state": "S"}, groups={"0": group})
    late = replace(waits, frames=["train.py:9 in load"], groups={"0": group | {"entered": 3}})
    seen = verdict(0, ["train.py:9 in load"], limit=limit)
    if cause == STOPPED:
        late = replace(late, frames=[], process={"state": "T (stopped)"})
        seen = replace(seen, frames=[], process={"state": "T (stopped)"})
    ranks = [rank(0, exit_code=-9, died_at=2.0, verdict=seen, verdict_at=1.0, snapshot=late)]
    fault = attribute([*ranks, rank(1, snapshot=waits), rank(2, snapshot=waits)], NODE, stop_began=1.5)
    assert fault is not None and fault.what == f"hangs: {cause}, and 2 ranks wait for it{numbers}"


def test_a_rank_that_was_stopped_is_told_so_before_its_limit() -> None:
    """Its monitor continued it to end it: what the launcher saw before counts."""
    stopped = rank(0, exit_code=-9, died_at=2.0, verdict=verdict(0), verdict_at=1.0, was_stopped=True)
    fault = attribute([stopped, rank(1, exit_code=-9, died_at=2.0)], NODE, stop_began=1.5)
    assert (
        fault is not None and fault.what == "hangs: it is stopped, and 1 rank waits for it; in section:step for 5.1 s"
    )


@pytest.mark.parametrize(
    ("lost", "line"),
    [
        ([], []),
        ([2], ["rank 2 failed in consequence: its traceback is not the cause"]),
        ([0, 2], ["ranks 0, 2 failed in consequence: their tracebacks are not the cause"]),
    ],
)
def test_errors_in_consequence_are_one_line_that_comes_first(lost: list[int], line: list[str]) -> None:
    """Their tracebacks may stand between that of the cause and the block."""
    ranks = [rank(1, **raises("bad", "ValueError", at=1.0)), rank(3), rank(4, **raises("bad", "ValueError", at=1.2))]
    ranks += [rank(number, **raises(PAIR, at=0.9)) for number in lost]
    fault = attribute(sorted(ranks, key=lambda rank: rank.rank), NODE, stop_began=1.5)
    assert fault is not None and fault.rank == 1
    assert list(fault.others) == [*line, "rank 3 was running", "rank 4 raised the same error"]


def test_a_loss_whose_cause_is_unknown_is_no_consequence() -> None:
    fault = attribute([rank(number, **raises(PAIR, at=0.9)) for number in range(2)], NODE, stop_began=1.5)
    assert fault is not None and fault.others == ("rank 1 raised the same error",)


@pytest.mark.parametrize("blamed", [True, False], ids=["the rank that held up the others", "a rank that waits"])
def test_errors_in_consequence_of_the_end_of_a_hang_are_told_first(blamed: bool) -> None:
    """The rank that hangs is ended, so that those that wait lose it: their tracebacks come before the block."""
    group = {"entered": 4, "finished": 3, "operation": "all_reduce", "shape": "[[4]]", "description": "dp"}
    waits = Snapshot(1, True, True, 7, {}, 0.1, frames=WAITS, process={"state": "S"}, groups={"0": group})
    frames, late = WAITS, waits
    if blamed:
        frames = ["train.py:9 in load"]
        late = replace(waits, frames=frames, groups={"0": group | {"entered": 3}})
    hung = rank(0, exit_code=-9, died_at=2.0, verdict=verdict(0, frames), verdict_at=1.0, snapshot=late)
    lost = [rank(number, snapshot=waits, **raises(PAIR, at=1.1)) for number in (1, 2)]
    fault = attribute([hung, *lost], NODE, stop_began=1.5)
    assert fault is not None and fault.rank == 0
    assert fault.others[0] == "ranks 1, 2 failed in consequence: their tracebacks are not the cause"
    assert "all_reduce 4 of group dp" in fault.others[1] or not blamed
    assert not any("failed in consequence" in line for line in fault.others[1:])


def test_ranks_with_the_same_error_are_one_line() -> None:
    same = raises("bad", "ValueError")
    ranks = [same, same, raises("other", "KeyError"), same, raises("bad", "TypeError")]
    fault = attribute([rank(number, **facts) for number, facts in enumerate(ranks)], NODE, stop_began=5.0)
    assert fault is not None and fault.others == (
        "ranks 1, 3 raised the same error",
        "rank 2 ended with code 1",
        "rank 4 ended with code 1",
    )


@pytest.mark.parametrize(
    ("ranks", "began"),
    [
        ([rank(0), rank(1, exit_code=-9, died_at=2.0)], 2.0),
        ([rank(0, exit_code=1, died_at=1.9), rank(1, exit_code=-9, died_at=2.0)], 1.9),
        ([rank(0, exception=raised("lost"), exception_at=1.5), rank(1, exit_code=-9, died_at=2.0)], 1.5),
        ([rank(0, exit_code=0, died_at=1.0), rank(1, exit_code=-9, died_at=2.0)], 2.0),
        ([rank(0), rank(1, exit_code=-9, died_at=7.0, verdict=verdict(1), verdict_at=6.1)], 1.0),
        ([rank(0)], None),
    ],
    ids=["its death", "another rank died first", "another rank raised first", "one had returned", "a hang", "no rank"],
)
def test_when_a_fault_began(ranks: list[RankEvidence], began: float | None) -> None:
    fault = attribute([rank(1, exit_code=-9, died_at=2.0)], NODE)
    assert fault is not None
    assert first_failure.began(fault, ranks) == began
