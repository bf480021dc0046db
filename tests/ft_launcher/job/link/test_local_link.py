"""The coordinator in the process of the only node: answers, ends, a backoff."""

from __future__ import annotations

import time

import pytest

from ft_launcher.decide.attribution import Fault, FaultKind
from ft_launcher.decide.policy.case import FaultReport
from ft_launcher.decide.policy.job_policy import JobPolicy
from ft_launcher.decide.policy.restart_policy import Action
from ft_launcher.job.coordinator.formation import Rules, Size
from ft_launcher.job.coordinator.node_messages import Ended, EndReason, JobOver, Left, RankAssigned
from ft_launcher.job.link.attempt import NodeSettings
from ft_launcher.job.link.local_link import LocalLink
from rank_monitor.contract.exit_codes import ExitCode
from rank_monitor.contract.settings.config import RestartSettings
from tests.ft_launcher.job.nodes_of_a_test import node, request

EXITED = FaultReport(Fault(FaultKind.EXIT, 0, 0, 1, 1, "exited", "", ""))


def linked(max_restarts: int = 3, settings: RestartSettings | None = None) -> LocalLink:
    policy = JobPolicy(settings or RestartSettings(), max_restarts)
    return LocalLink("a", NodeSettings(Rules(Size(1, 1)), policy, 1.0, 15.0))


def failed(link: LocalLink, seq: int, cycle: int = 0) -> None:
    link.send(Ended("a", cycle, EndReason.FAILED, "a rank failed"))
    link.ask(node("a", seq, cycle, report=EXITED))


def test_a_cycle_forms_at_once() -> None:
    link = linked()
    link.ask(node("a"))
    place = link.answer(1, 0.0)
    assert isinstance(place, RankAssigned) and (place.cycle, place.rank, place.nodes) == (0, 0, 1)
    assert place.active == ["a"] and link.judgement is None


def test_a_fault_is_decided_in_the_same_call() -> None:
    link = linked()
    link.ask(node("a"))
    failed(link, 2)
    place = link.answer(2, 0.0)
    assert isinstance(place, RankAssigned) and place.cycle == 1
    assert place.judgement is not None and place.judgement.node == "a"
    assert place.judgement.decision.restarts_left == 2
    assert place.judgement.decision.charged


def test_the_last_restart_is_spent() -> None:
    link = linked(max_restarts=0)
    link.ask(node("a"))
    failed(link, 2)
    over = link.answer(2, 0.0)
    assert isinstance(over, JobOver) and over.exit_code == ExitCode.RANKS_FAILED
    assert over.judgement is not None and over.judgement.decision.action is Action.GIVE_UP


def test_a_backoff_is_known_before_it_is_over() -> None:
    link = linked(settings=RestartSettings(backoff=(0.3, 0.3)))
    link.ask(node("a"))
    failed(link, 2)
    assert link.answer(2, 0.0) is None
    assert link.judgement is not None and link.judgement.decision.wait_s == 0.3
    due = link.next_deadline()
    assert due is not None and due > time.monotonic()
    assert isinstance(link.answer(2, 60.0), RankAssigned)


def test_success_ends_the_job_and_is_taken_once() -> None:
    link = linked()
    link.ask(node("a"))
    link.send(Ended("a", 0, EndReason.SUCCEEDED, ""))
    end = link.pop_end(0)
    assert end is not None and end.exit_code == ExitCode.OK and link.pop_end(0) is None
    link.close(Left("a", "done"), 0.0)


def test_a_restart_that_a_rank_asked_for_is_not_charged() -> None:
    link = linked()
    link.ask(node("a"))
    link.send(Ended("a", 0, EndReason.ASKED, "please", request("restart")))
    link.ask(node("a", 2, 0))
    place = link.answer(2, 0.0)
    assert isinstance(place, RankAssigned) and place.cycle == 1
    assert place.judgement is not None and place.judgement.answers_request and place.judgement.node == "a"
    assert not place.judgement.decision.charged and place.judgement.inputs["history"]["charged"] == 0


@pytest.mark.parametrize(("action", "code"), [("stop_job", 95), ("exclude_this_node", 94)])
def test_a_rank_ends_the_launcher(action: str, code: int) -> None:
    link = linked()
    link.ask(node("a"))
    link.send(Ended("a", 0, EndReason.ASKED, "please", request(action)))
    link.ask(node("a", 2, 0))
    over = link.answer(2, 0.0)
    assert isinstance(over, JobOver) and over.exit_code == code
    assert over.judgement is not None and over.judgement.answers_request


def test_a_node_that_was_never_a_member_leaves() -> None:
    link = linked()
    link.close(Left("a", "it is unhealthy"), 0.0)
    assert link.pop_end(0) is None
