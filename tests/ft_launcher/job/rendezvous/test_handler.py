"""Nodes as threads over a real TCPStore: one of them hosts it, or it is apart from them."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from torch.distributed.elastic.rendezvous import RendezvousConnectionError

from ft_launcher.job.coordinator.fault_decision import MAX_FAILED_STARTS
from ft_launcher.job.coordinator.node_messages import EndReason
from ft_launcher.job.rendezvous.handler import NoPlace
from rank_monitor.contract.exit_codes import ExitCode
from tests.ft_launcher.job.nodes_of_a_test import failed
from tests.ft_launcher.job.site import PATIENT_S, Site, site
from tests.patience import until

both = pytest.mark.parametrize("hosted", [True, False], ids=["hosted", "apart"])


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    """The threads of a node end with it."""
    before = set(threading.enumerate())
    yield
    until(
        lambda: not [t for t in threading.enumerate() if t not in before and t.name.startswith(("ft_node", "ft_coord"))]
    )


def over(made: Site, name: str, begin: bool = False) -> tuple[int, str]:
    with pytest.raises(NoPlace) as info:
        (made.begin(name) if begin else made.join(name)).result(PATIENT_S)
    return info.value.over.exit_code, info.value.over.reason


@both
def test_a_cycle_forms_in_order_and_has_a_store(hosted: bool) -> None:
    with site(3, 3, hosted) as made:
        futures = {name: made.begin(name) for name in "cab"}
        infos = {name: future.result(PATIENT_S) for name, future in futures.items()}
        assert {name: info.rank for name, info in infos.items()} == {"a": 0, "b": 1, "c": 2}
        places = [made.nodes[name].place for name in "abc"]
        assert [(one.first_rank, one.world_size) for one in places if one] == [(0, 6), (2, 6), (4, 6)]
        assert {info.bootstrap_store_info.master_port for info in infos.values()} == {made.nodes["b"].cycle_store.port}  # type: ignore[union-attr]


@both
def test_the_same_members_form_again_after_each_failure(hosted: bool) -> None:
    with site(3, 3, hosted) as made:
        made.form("abc", begin=True)
        for cycle in range(5):
            failing = "abc"[cycle % 3]
            made.nodes[failing].report_end(EndReason.FAILED, "boom")
            assert made.end("abc") == {(cycle, "failed", None)}
            made.nodes[failing].attach(failed())
            assert made.form("bca") == {"a": 0, "b": 1, "c": 2}
            places = [one.place for one in made.nodes.values()]
            told = {(one.cycle, one.judgement.node, one.reason) for one in places if one and one.judgement}
            assert told == {(cycle + 1, failing, f"restart {cycle + 1}")}


@both
def test_a_spare_takes_the_place_of_a_silent_node(hosted: bool) -> None:
    with site(2, 2, hosted) as made:
        made.form("ab", begin=True)
        spare = made.begin("s")
        made.fall_silent("b")
        assert made.end("a") == {(0, "lost", None)}
        assert made.form("a") == {"a": 0}
        assert spare.result(PATIENT_S).rank == 1


@both
def test_the_job_is_over_for_members_spares_and_the_late(hosted: bool) -> None:
    with site(2, 2, hosted) as made:
        made.form("ab", begin=True)
        spare = made.begin("s")
        made.until_known(3)
        for name in "ab":
            made.nodes[name].report_end(EndReason.SUCCEEDED, "")
        assert made.end("ab") == {(0, "succeeded", 0)}
        with pytest.raises(NoPlace):
            spare.result(PATIENT_S)
        if hosted:  # on a store apart a node that comes now cannot be told from a new launch: see the next test
            assert over(made, "late", begin=True) == (0, "all ranks succeeded")


def test_who_comes_when_the_job_is_over_on_a_store_apart_opens_the_next_attempt() -> None:
    with site(1, 1, hosted=False) as made:
        made.form("a", begin=True)
        made.nodes["a"].report_end(EndReason.SUCCEEDED, "")
        made.end("a")
        made.nodes["a"].leave("done")
        assert made.form("b", begin=True) == {"b": 0}


def test_the_coordinator_is_lost_and_another_takes_over() -> None:
    with site(2, 2, hosted=False) as made:
        futures = {name: made.begin(name) for name in "abs"}
        first = until(
            lambda: (
                {name for name, future in futures.items() if future.done()}
                if sum(f.done() for f in futures.values()) == 2
                else None
            )
        )
        lost = made.coordinator()
        made.fall_silent(lost)
        left = [name for name in first if name != lost]
        if lost in first:
            assert {one[1] for one in made.end("".join(left))} <= {"lost", "failed"}
            made.form("".join(left))
        rest = {name: futures[name].result(PATIENT_S) for name in "abs" if name != lost}
        assert len(rest) == 2
        assert made.coordinator() != lost


def test_a_coordinator_that_slept_comes_back_as_another_node() -> None:
    with site(2, 2, hosted=False) as made:
        made.form("ab", begin=True)
        slept = made.coordinator()
        other = "b" if slept == "a" else "a"
        link = made.link(slept)
        assert link.coordination is not None
        asleep = link.coordination
        with asleep._lock:
            assert made.end(other) == {(0, "lost", None)}
        until(lambda: not asleep.at_work)
        assert made.coordinator() == other
        assert "took over" in asleep.why_ended
        made.end(slept)
        assert sorted(made.form("ab").values()) == [0, 1]
        assert made.nodes[slept].node == f"{slept}+"


def test_the_job_ends_when_the_host_of_the_store_leaves() -> None:
    with site(2, 2, hosted=True) as made:
        made.form("ab", begin=True)
        leaving = threading.Thread(target=made.nodes["a"].leave, args=("told to end", PATIENT_S))
        leaving.start()
        assert made.end("b") == {(0, "left", int(ExitCode.STORE_HOST_LOST))}
        made.nodes["b"].leave("so it ends")
        leaving.join(PATIENT_S)
        assert not leaving.is_alive(), "the host waits no longer than for the last of the others"


@both
def test_where_all_are_preempted_the_coordinators_node_leaves_last(hosted: bool) -> None:
    with site(2, 2, hosted) as made:
        made.close_s = PATIENT_S
        made.form("ab", begin=True)
        last, machine = made.coordinator(), made.machine()
        other = "b" if last == "a" else "a"
        made.nodes[other].report_end(EndReason.PREEMPTED, "told to end", number=15)
        until(lambda: len(machine.members().gone) == 1)
        made.nodes[last].report_end(EndReason.PREEMPTED, "told to end", number=15)
        until(lambda: len(machine.members().gone) == 2)
        leaving = threading.Thread(target=made.nodes[last].leave, args=("told to end", PATIENT_S, 15))
        leaving.start()
        until(lambda: machine.has_left, "the last message of the coordinator's node")
        assert machine.to_leave == {other} and leaving.is_alive()
        made.nodes[other].leave("told to end", PATIENT_S, 15)
        leaving.join(PATIENT_S)
        assert not leaving.is_alive() and machine.to_leave == set()


def test_a_store_of_the_cycle_that_nobody_reaches_ends_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others cannot reach the address of the node of rank 0: not again and again without an end."""
    monkeypatch.setattr("ft_launcher.job.rendezvous.handler._CONNECT_S", 0.1)
    with site(2, 2, hosted=True) as made:
        first = made.begin("a", address="127.0.0.1:none")
        other = made.begin("b")
        for cycle in range(MAX_FAILED_STARTS):
            assert first.result(PATIENT_S).rank == 0
            assert made.end("a") == {(cycle, "failed", None)}
            first = made.join("a")
        for future in (first, other):
            with pytest.raises(
                NoPlace, match=r"3 cycles in a row could not begin: node b: .* cannot be reached"
            ) as info:
                future.result(PATIENT_S)
            assert info.value.over.exit_code == ExitCode.RENDEZVOUS_FAILED


def test_a_node_that_leaves_does_not_end_the_job() -> None:
    with site(1, 2, hosted=True) as made:
        made.form("ab", begin=True)
        made.nodes["b"].leave("its node is unhealthy")
        assert made.end("a") == {(0, "left", None)}
        assert made.form("a") == {"a": 0}


def test_a_store_that_is_gone_cuts_a_node_off() -> None:
    with site(2, 2, hosted=False) as made:
        future = made.begin("a")
        made.coordinator()
        made.server = None
        with pytest.raises(RendezvousConnectionError):
            future.result(PATIENT_S)


def test_a_coordinator_that_fails_on_the_host_ends_the_job_and_does_not_hang() -> None:
    with site(2, 2, hosted=True) as made:
        future = made.begin("a")
        made.coordinator()
        link = made.link("a")
        assert link.coordination is not None
        link.coordination._machine.on = None  # type: ignore[method-assign,assignment]
        made.begin("b")
        with pytest.raises(RendezvousConnectionError, match="the coordinator of the nodes failed"):
            future.result(PATIENT_S)
        made.nodes["b"].leave("the test is over", 0.2)
