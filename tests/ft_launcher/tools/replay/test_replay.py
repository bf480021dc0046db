"""What a journal says was decided is decided again: the same, another thing, or not at all."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ft_launcher.decide.attribution import Fault, RankEvidence, nccl_view, rank_view
from ft_launcher.decide.attribution.all_nodes import NodeScene
from ft_launcher.decide.attribution.cycle_evidence import CycleEvidence, to_record
from ft_launcher.decide.attribution.first_failure import lost_a_peer, with_lost
from ft_launcher.decide.attribution.nccl_view import NcclProcess, NcclView
from ft_launcher.decide.attribution.rank_view import RankView, views
from ft_launcher.decide.policy.case import Case, FaultReport, NodeViews, PolicyJudgement
from ft_launcher.decide.policy.ended_cycle import CycleLife
from ft_launcher.decide.policy.job_policy import JobPolicy
from ft_launcher.record import events
from ft_launcher.tools.replay.again import scene_in
from ft_launcher.tools.replay.replay import (
    DECISION,
    FAULT,
    FAULT_OF_ALL,
    HEALTH,
    HISTORY,
    IN_PROCESS,
    IN_PROCESS_FAULT,
    REQUEST,
    Difference,
)
from rank_monitor.contract.settings.config import RestartSettings
from rank_monitor.contract.wire.launcher_messages import Snapshot, Verdict
from rank_monitor.contract.wire.messages import RankException
from tests.ft_launcher.tools.replay.decisions import (
    START,
    Job,
    Line,
    begins,
    crashed,
    fault_in,
    in_process,
    line,
    replayed,
    the,
)


def only(lines: list[Line]) -> Difference:
    """The only difference of a journal."""
    (found,) = replayed(lines).differences
    return found


def test_all_is_decided_as_then() -> None:
    found = replayed(Job(2, backoff=(1.0, 8.0), restart_window=60.0).fails().is_asked().fails().fails().lines)
    assert found.differences == [] and not found.left_out
    assert found.same == {FAULT: 3, DECISION: 3, HISTORY: 3, REQUEST: 1}


def test_another_decision_is_named_with_both_reasons() -> None:
    lines = Job().fails().fails().lines
    decision = the(lines, "decision", 1)
    decision["reason"], decision["charged"] = "restart 1 of 9", False
    found = only(lines)
    assert (found.source, found.line, found.cycle, found.event, found.what) == ("0", 10, 1, "decision", DECISION)
    assert found.fields == {"reason": ("restart 1 of 9", "restart 2 of 2"), "charged": (False, True)}
    assert found.lines() == [
        "0:10: cycle 1: event decision: the decision comes out otherwise",
        '  reason: then "restart 1 of 9", now "restart 2 of 2"',
        "  charged: then false, now true",
    ]


@pytest.mark.parametrize("name", ["kind", "rank", "what", "hint", "fault_class", "error", "others", "collateral"])
def test_another_fault_is_named(name: str) -> None:
    lines = Job().fails().lines
    the(lines, "fault")[name] = {"kind": "exit", "rank": 1, "others": []}.get(name, "another")
    fields = [found.fields for found in replayed(lines).differences if found.event == "fault"]
    assert [set(found) for found in fields] == [{name}]


def test_evidence_that_shows_no_fault() -> None:
    lines = Job().fails().lines
    the(lines, "evidence")["ranks"][0]["exit_code"] = 0
    del the(lines, "evidence")["ranks"][0]["exception_at"]
    assert only(lines).fields == {FAULT: ("this one", "none")}


def test_a_count_that_was_lost_between_two_decisions() -> None:
    lines = Job(3).fails().fails().lines
    inputs = the(lines, "decision", 1)["inputs"]
    inputs["history"]["same_errors"], inputs["history"]["charged"] = 0, []
    differences = [found for found in replayed(lines).differences if found.what == HISTORY]
    assert [found.fields for found in differences] == [{"charged": (1, 0), "same_errors": (1, 0)}]


def test_an_age_of_a_restart_is_no_difference() -> None:
    lines = Job(3).fails().fails().lines
    the(lines, "decision", 1)["inputs"]["history"]["charged"] = [12.5]
    assert replayed(lines).differences == []


def test_the_window_of_restarts_is_kept() -> None:
    lines = Job(1, restart_window=60.0).fails().fails().lines
    assert the(lines, "decision", 1)["action"] == "give up"
    the(lines, "decision", 1)["inputs"]["history"]["charged"] = [61.0]
    assert only(lines).fields["action"] == ("give up", "restart")


def without(lines: list[Line], event: str) -> list[Line]:
    return [found for found in lines if found["event"] != event]


def test_what_an_earlier_release_wrote_is_counted() -> None:
    lines = without(Job().fails().fails().lines, "evidence")
    for number in (0, 1):
        del the(lines, "decision", number)["inputs"]
    found = replayed(lines)
    assert not found.differences and not found.same
    assert {what: count for (what, _), count in found.left_out.items()} == {FAULT: 2, DECISION: 2}
    assert any("an earlier release" in why for _, why in found.left_out)


def test_what_a_later_release_wrote_is_counted() -> None:
    lines = Job().fails().lines
    the(lines, "decision")["v"] = 2
    found = replayed(lines)
    assert not found.differences and [what for what, _ in found.left_out] == [DECISION, FAULT]


def test_a_setting_that_is_not_known_is_ignored() -> None:
    lines = Job().fails().lines
    the(lines, "decision")["inputs"]["settings"] |= {"of_next_year": 7}
    del the(lines, "decision")["inputs"]["settings"]["exit_code"]
    assert replayed(lines).same[DECISION] == 1


def test_a_decision_without_the_policy() -> None:
    lines = Job().fails().lines
    the(lines, "decision")["inputs"] = None
    found = replayed(lines)
    assert not found.differences and found.same == {FAULT: 1} and len(found.left_out) == 1


@pytest.mark.parametrize("cut", range(1, 12))
def test_a_journal_that_breaks_off(cut: int) -> None:
    found = replayed(Job().fails().fails().lines[:cut])
    assert found.differences == []


@pytest.mark.parametrize("missing", ["job_start", "cycle_start", "evidence", "fault", "decision", "cycle_end"])
def test_lines_that_are_missing(missing: str) -> None:
    assert replayed(without(Job().fails().fails().lines, missing)).differences == []


def test_decisions_of_other_nodes_may_lie_between_two() -> None:
    lines = Job(3).fails().fails().lines
    for number in (0, 1):
        the(lines, "cycle_start", number)["nodes"] = 2
    the(lines, "decision", 1)["inputs"]["history"]["same_class"] = 0
    assert HISTORY not in replayed(lines).same and not replayed(lines).differences


def test_each_attempt_counts_from_the_start() -> None:
    assert replayed([*Job().fails().lines, *Job().fails().lines]).same[HISTORY] == 2


# In process.


def lost_rank(injected: bool = False) -> list[Line]:
    evidence = replace(crashed(0), ranks=crashed(0).ranks[:1], stop_began=None)
    fault = fault_in(evidence)
    known = {"what": fault.what, "where": fault.where, "hint": fault.hint, "fault_class": fault.fault_class.value}
    return [
        START,
        begins(0),
        line(events.EvidenceEvent(0, 0, **to_record(evidence))),
        line(events.InProcessFaultEvent(0, 0, 100, 1, **known)),
    ]


def test_a_fault_that_was_handled_in_process() -> None:
    assert replayed(lost_rank()).same == {IN_PROCESS_FAULT: 1}
    lines = lost_rank()
    the(lines, "in_process_fault")["fault_class"] = "hang"
    assert only(lines).fields == {"fault_class": ("hang", "user error")}


def test_a_rank_that_the_launcher_killed_has_no_fault() -> None:
    lines = without(lost_rank(), "evidence")
    the(lines, "in_process_fault")["fault_class"] = ""
    found = replayed(lines)
    assert not found.same and not found.left_out and not found.differences


def test_what_follows_for_ranks_that_restart_in_process() -> None:
    found = replayed(in_process())
    assert found.same == {IN_PROCESS: 2} and not found.differences and not found.left_out


@pytest.mark.parametrize(
    ("number", "change", "steps"),
    [
        (0, lambda line: line["happened"].update(exit_code=16), None),
        (0, lambda line: line["known"]["wrappers"][0].update(state="finalized"), None),
        (0, lambda line: line["follows"].clear(), ["notify_loss"]),
        (0, lambda line: line["known"]["wrappers"][0].update(prefix=""), ["take_over"]),
        (1, lambda line: line["known"].update(rejoin=False), ["restarted"]),
        (1, lambda line: line["follows"][0].update(took_s=0.1), ["restarted", "start_again"]),
        (1, lambda line: line["known"]["wrappers"][-1].pop("is_next"), ["restarted"]),
    ],
    ids=["code", "state", "step", "store", "setting", "time", "rank"],
)
def test_something_else_follows_for_ranks_that_restart_in_process(
    number: int, change: Callable[[Line], None], steps: list[str] | None
) -> None:
    lines = in_process()
    decision = the(lines, "in_process_decision", number)
    change(decision)
    difference = only(lines)
    assert (difference.event, difference.what) == ("in_process_decision", IN_PROCESS)
    _, now = difference.fields["follows"]
    assert (now and [step["step"] for step in now]) == steps


def test_a_restart_in_process_that_an_earlier_release_wrote_is_counted() -> None:
    found = replayed(without(in_process(), "in_process_decision"))
    assert not found.differences and not found.same
    assert [(what, count) for (what, _), count in found.left_out.items()] == [(IN_PROCESS, 2)]


# Health.


def health(check: str, before: str, state: str, reason: str = "why") -> Line:
    return line(events.HealthChangeEvent(0, check, before, state, reason))


@pytest.mark.parametrize(
    ("lines", "fields"),
    [
        ([health("nic", "ok", "unhealthy"), health("nic", "unhealthy", "ok")], []),
        ([health("nic", "ok", "unhealthy"), health("storage", "ok", "unhealthy")], []),
        ([health("nic", "not present", "unhealthy"), health("nic", "unhealthy", "ok")], []),
        ([health("nic", "ok", "unknown"), health("nic", "unknown", "ok"), health("nic", "not present", "warning")], []),
        ([health("nic", "ok", "not present")], [{HEALTH: ("this one", "none")}]),
        ([health("nic", "ok", "unhealthy"), health("nic", "warning", "ok")], [{"before": ("warning", "unhealthy")}]),
        ([health("nic", "ok", "unhealthy"), health("nic", "ok", "unhealthy")], [{HEALTH: ("this one", "none")}]),
    ],
)  # fmt: skip
def test_changes_of_health(lines: list[Line], fields: list[Any]) -> None:
    assert [found.fields for found in replayed([START, *lines]).differences] == fields


# State in memory.


def in_memory(step: int | None, reason: str, **left: Any) -> Line:
    known = {"steps": [10, 20], "age_s": 3.0, "is_of_this_boot": True, "linger_s": 600.0}
    return line(events.StateFoundEvent(step, reason, known | left))


@pytest.mark.parametrize(
    ("found", "fields"),
    [
        (in_memory(20, "its launcher died 3.0 s ago"), []),
        (in_memory(None, "no step was complete in it", steps=[]), []),
        (in_memory(10, "its launcher died 3.0 s ago"), [{"step": (10, 20)}]),
        (
            in_memory(20, "its launcher died 3.0 s ago", linger_s=0),
            [
                {
                    "step": (20, None),
                    "reason": ("its launcher died 3.0 s ago", "--ft-memory-linger 0 begins afresh"),
                }
            ],
        ),
    ],
)
def test_what_an_earlier_start_left_in_memory(found: Line, fields: list[Any]) -> None:
    assert [difference.fields for difference in replayed([START, found]).differences] == fields


# Several nodes.

WAITS = ["torch/distributed/distributed_c10d.py:3252 in all_reduce", "train.py:20 in step"]
IDLE = ["train.py:9 in load"]


def hung(rank: int, entered: int, frames: list[str], condemned: bool) -> CycleEvidence:
    groups = {
        "0": {"entered": entered, "finished": 3, "operation": "all_reduce", "shape": "[[4]]", "description": "dp"}
    }
    snapshot = Snapshot(1, True, True, 7, {}, 1.0, frames=frames, process={"state": "R"}, groups=groups)
    verdict = None
    if condemned:
        facts = (0, rank, 50, "step", 5.0, 5.1, False, 7, {}, "no sign of life", "line", frames, {}, True)
        verdict = Verdict(*facts)
    ended_at = 9.0 if condemned else 12.0
    of_rank = RankEvidence(rank, 0, 50 + rank, -9, ended_at, verdict, 8.0, snapshot=snapshot, killed_by_us=True)
    return CycleEvidence([of_rank], stop_began=10.0, all_ranks=False)


def judged(case: Case) -> tuple[Fault, PolicyJudgement]:
    """Returns the fault of the rank that held up those of all nodes, and the judgement, as the nodes receive it."""
    answer = JobPolicy(RestartSettings(), 3)(case, 5.0)
    assert answer.judgement is not None and answer.judgement.culprit is not None
    return answer.judgement.culprit.fault, answer.judgement


def over_three_nodes() -> list[list[Line]]:
    """The ranks of two nodes wait for that of the third, which the coordinator finds."""
    found = [hung(0, 4, WAITS, True), hung(1, 3, IDLE, False), hung(2, 4, WAITS, True)]
    seen = {str(node): [rank_view.to_record(view) for view in views(one.ranks, 10.0)] for node, one in enumerate(found)}
    fault, life = fault_in(found[0]), CycleLife(60.0, 7)
    by_node = NodeViews(seen, {node: f"host{node}" for node in seen}, True)
    case = Case(FaultReport(fault, life), {}, 0.0, False, views=by_node)
    guilty, judgement = judged(case)
    assert guilty.rank == 1
    journals = [
        [
            START | {"node": f"host{node}"},
            begins(0, nodes=3),
            line(events.EvidenceEvent(0, None, **to_record(one))),
        ]
        for node, one in enumerate(found)
    ]
    journals[0].append(line(events.CycleEndEvent(0, "failed elsewhere")))
    journals[1].append(line(events.FaultEvent.of(replace(guilty, pid=51), cycle=0)))
    journals[1].append(line(events.DecisionEvent.of(judgement.decision, cycle=0, inputs=judgement.inputs)))
    return journals


def test_the_rank_that_held_up_those_of_all_nodes() -> None:
    found = replayed(*over_three_nodes())
    assert found.differences == [] and not found.left_out
    assert found.same == {FAULT_OF_ALL: 1, DECISION: 1}


def test_ranks_of_all_nodes_that_are_in_one_collective() -> None:
    """NCCL has given up the rank of the third node; the limit of the first passed first."""
    lost = NcclView(3, (NcclProcess("10.0.0.3", 52, 2, 3, True),), 1)
    seen = [replace(hung(rank, 4, WAITS, True), nccl=nccl) for rank, nccl in enumerate([lost, lost, None])]
    ranks = {
        str(node): [rank_view.to_record(view) | {"pid": 50 + node} for view in views(one.ranks, 10.0)]
        for node, one in enumerate(seen)
    }
    answers = {str(node): nccl_view.to_record(one.nccl) for node, one in enumerate(seen) if one.nccl is not None}
    by_node = NodeViews(ranks, {node: f"host{node}" for node in ranks}, True, answers)
    case = Case(FaultReport(fault_in(seen[0]), CycleLife(60.0, 7)), {}, 0.0, False, views=by_node)
    guilty, judgement = judged(case)
    assert (guilty.rank, guilty.finding) == (2, "transport")
    journals = [
        [START | {"node": f"host{node}"}, begins(0, nodes=3), line(events.EvidenceEvent(0, None, **to_record(one)))]
        for node, one in enumerate(seen)
    ]
    journals[2].append(line(events.FaultEvent.of(replace(guilty, pid=52), cycle=0)))
    journals[2].append(line(events.DecisionEvent.of(judgement.decision, cycle=0, inputs=judgement.inputs)))
    found = replayed(*journals)
    assert found.differences == [] and not found.left_out
    the(journals[0], "evidence")["nccl"] = None
    the(journals[1], "evidence")["nccl"] = None
    (difference,) = replayed(*journals).differences
    assert difference.fields["blamed"] == ([2], [])


def test_a_rank_of_another_node_had_returned() -> None:
    """The journal of the node whose rank lost the other has all that it was decided by."""
    lost = RankException("RuntimeError", "Connection closed by peer", "", 0.0)
    raised = [RankEvidence(rank, rank, 50 + rank, 1, 9.0, exception=lost, exception_at=8.0 + rank) for rank in range(2)]
    seen = CycleEvidence(raised, stop_began=10.0, all_ranks=False)
    case = Case(FaultReport(fault_in(seen), CycleLife(60.0, 7)), {}, 0.0, False, views=NodeViews(returned={2: 0.5}))
    guilty, judgement = judged(case)
    assert guilty.finding == "returned"
    journal = [START, begins(0, nodes=2), line(events.EvidenceEvent(0, None, **to_record(seen)))]
    of_node = with_lost(guilty, lost_a_peer(raised))
    assert of_node.others[0].startswith("rank 1 failed in consequence")
    journal.append(line(events.FaultEvent.of(of_node, cycle=0)))
    journal.append(line(events.DecisionEvent.of(judgement.decision, cycle=0, inputs=judgement.inputs)))
    found = replayed(journal)
    assert found.differences == [] and found.same == {FAULT: 1, DECISION: 1}
    the(journal, "decision")["inputs"]["returned"] = {"3": 0.5}
    assert only(journal).fields["blamed"] == ([2], [3])


def test_another_rank_holds_up_those_of_all_nodes() -> None:
    journals = over_three_nodes()
    the(journals[1], "fault")["rank"] = 2
    (found,) = replayed(*journals).differences
    assert (found.source, found.what, found.fields) == ("1", FAULT_OF_ALL, {"rank": (2, 1)})


def test_of_several_that_hold_up_all_nodes_the_first_that_its_node_found_stands() -> None:
    """Ranks 1 and 3 of two nodes did not come; the limit of rank 3 passed first."""
    first, second = hung(0, 4, WAITS, True), hung(3, 3, IDLE, True)
    seconds = hung(2, 4, WAITS, False)
    nodes = [
        replace(first, ranks=[*first.ranks, *hung(1, 3, IDLE, False).ranks]),
        replace(second, ranks=[*seconds.ranks, *second.ranks]),
    ]
    seen = {str(node): [rank_view.to_record(view) for view in views(one.ranks, 10.0)] for node, one in enumerate(nodes)}
    fault, life = fault_in(nodes[1]), CycleLife(60.0, 7)
    by_node = NodeViews(seen, {node: f"host{node}" for node in seen}, True)
    case = Case(FaultReport(fault, life), {}, 0.0, False, views=by_node)
    guilty, judgement = judged(case)
    assert (guilty.rank, guilty.blamed) == (3, (1, 3)) and "no sign of life" in guilty.what
    journals = [
        [START | {"node": f"host{node}"}, begins(0, nodes=2), line(events.EvidenceEvent(0, None, **to_record(one)))]
        for node, one in enumerate(nodes)
    ]
    journals[0].append(line(events.CycleEndEvent(0, "failed elsewhere")))
    journals[1].append(line(events.FaultEvent.of(guilty, cycle=0)))
    journals[1].append(line(events.DecisionEvent.of(judgement.decision, cycle=0, inputs=judgement.inputs)))
    found = replayed(*journals)
    assert found.differences == [] and not found.left_out
    assert found.same == {FAULT_OF_ALL: 1, DECISION: 1}
    the(journals[1], "fault")["rank"] = 2
    (difference,) = replayed(*journals).differences
    assert difference.what == FAULT_OF_ALL and difference.fields["rank"] == (2, 1)


def test_without_the_journals_of_all_nodes_it_is_left_out() -> None:
    found = replayed(*over_three_nodes()[:2])
    assert found.differences == [] and [what for what, _ in found.left_out] == [FAULT_OF_ALL]


def test_views_survive_the_journal() -> None:
    """As an agent sends them, and as they are made of its journal again."""
    one = hung(0, 4, WAITS, True)
    facts = json.loads(json.dumps(to_record(one)))
    expected: list[RankView] = [rank_view.of_record(rank_view.to_record(view)) for view in views(one.ranks, 10.0)]
    assert scene_in(facts, "node0") == NodeScene("node0", expected, {0: 50})


# Anyone may have written a journal.

LINES = (
    Job().fails().is_asked().lines
    + lost_rank()[2:]
    + in_process()[2:]
    + [health("nic", "ok", "warning"), in_memory(20, "its launcher died 3.0 s ago")]
    + over_three_nodes()[1]
)

json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(st.integers(0, len(LINES) - 1), st.data())
def test_no_journal_ends_the_replay(number: int, data: st.DataObject) -> None:
    lines = copy.deepcopy(LINES)
    place: Any = lines[number]
    for _ in range(data.draw(st.integers(1, 3))):
        keys = sorted(key for key in place if key not in ("event", "v", "t"))
        if not keys:
            break
        key = data.draw(st.sampled_from(keys))
        inner = place[key]
        if isinstance(inner, dict) and data.draw(st.booleans()):
            place = inner
            continue
        place[key] = data.draw(json_values)
        break
    found = replayed(lines)
    assert all(difference.lines() for difference in found.differences)
