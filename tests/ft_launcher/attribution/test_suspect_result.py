"""Faults of ranks that agreed to exit: about which rank, and which device they name."""

from __future__ import annotations

from dataclasses import replace

from ft_launcher.attribution import NodeEvidence, RankEvidence, attribute
from ft_launcher.attribution.suspect_result import about_suspect_result
from ft_launcher.nodes.fault_decision import Case
from ft_launcher.policy.job_policy import fault_record, make_policy, suspect_result_in
from ft_launcher.policy.restart_history import CycleLife
from rank_monitor.contract.settings.config import RestartSettings
from rank_monitor.contract.wire.messages import ResultInDoubt

DOUBT = ResultInDoubt("reproducible", 5, 7, "a", "cuda:GPU-1")
FOUND = replace(DOUBT, finding="persistent_error")


def evidence(code: int, late: int) -> list[RankEvidence]:
    """Rank 4 ended first, with this code; then rank 5, whom the stop still met."""
    return [RankEvidence(4, 0, 40, code, 10.0), RankEvidence(5, 1, 50, late, 10.2)]


def test_the_fault_is_about_the_rank_in_doubt() -> None:
    for late in (16, -15):
        ranks = evidence(16, late)
        fault = attribute(ranks, NodeEvidence(), 10.1)
        assert fault is not None and fault.rank == 4
        found = about_suspect_result(fault, ranks, {1: DOUBT})
        assert (found.rank, found.local_rank, found.pid, found.exit_code, found.iteration) == (5, 1, 50, 16, 7)
        assert found.what == (
            "exited with code 16: iteration 7 of rank 5 came out unexpected again on node a, device cuda:GPU-1; "
            "another device has to compute it"
        )


def test_other_exits_and_exits_without_a_word_are_left_as_they_are() -> None:
    for code, suspect_results in ((3, {1: DOUBT}), (16, {})):
        ranks = evidence(code, code)
        fault = attribute(ranks, NodeEvidence())
        assert fault is not None and about_suspect_result(fault, ranks, suspect_results) is fault


def test_over_several_nodes_the_next_ranks_hear_of_it_and_17_names_the_device() -> None:
    def judged(code: int, doubt: ResultInDoubt):  # type: ignore[no-untyped-def]
        ranks = evidence(code, code)
        fault = attribute(ranks, NodeEvidence())
        assert fault is not None
        case = Case(fault_record(about_suspect_result(fault, ranks, {1: doubt}), CycleLife()), {}, 0.0, elsewhere=True)
        return make_policy(RestartSettings(), 0)(case, 0.0)

    moves = judged(16, DOUBT)
    assert moves.relocates and moves.exit_code is None and suspect_result_in(moves.decision) == DOUBT
    ends = judged(17, FOUND)
    assert ends.exit_code == 17 and suspect_result_in(ends.decision) is None
    assert "node a, device cuda:GPU-1 computed iteration 7 of rank 5 wrongly; another device did not" in ends.reason
