"""The restart policy as the coordinator asks it: reports of nodes in, a judgement for all nodes out."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ft_launcher.decide.attribution import Fault, FaultClass, FaultKind, nccl_view, rank_view
from ft_launcher.decide.attribution.nccl_view import NcclProcess, NcclView
from ft_launcher.decide.attribution.rank_view import GroupState, RankView
from ft_launcher.decide.attribution.scene import Scene
from ft_launcher.decide.policy.case import (
    Case,
    FaultReport,
    NodeViews,
    PolicyAnswer,
    PolicyJudgement,
    RankRequest,
    RequestCase,
)
from ft_launcher.decide.policy.ended_cycle import CycleLife
from ft_launcher.decide.policy.job_policy import JobPolicy
from ft_launcher.decide.policy.restart_policy import Action
from rank_monitor.contract.errors import ProtocolError
from rank_monitor.contract.settings.config import RestartSettings
from rank_monitor.contract.wire.json_record import from_json, read_record, to_json, write_record
from rank_monitor.contract.wire.messages import ControlRequest, ResultInDoubt

FAULT = Fault(FaultKind.EXIT, 3, 1, 4711, 7, "rank 3 exited", "node b", "", detail=("a",), agreed_exit_code=7)


def through_json(record: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(json.dumps(record))
    return found


def crossed(report: FaultReport) -> FaultReport:
    """The report as the coordinator receives it."""
    return read_record(FaultReport, write_record(report))


def received(answer: PolicyAnswer) -> PolicyJudgement:
    """The judgement as the nodes receive it."""
    assert answer.judgement is not None
    return read_record(PolicyJudgement, write_record(answer.judgement))


def culprit_in(answer: PolicyAnswer) -> Fault | None:
    """The fault of the rank that held up those of all nodes; None: the views show none."""
    culprit = received(answer).culprit
    if culprit is None:
        return None
    return culprit.fault


def judged(fault: Fault, history: dict[str, Any], max_restarts: int, life: CycleLife, **settings: Any) -> PolicyAnswer:
    case = Case(crossed(FaultReport(fault, life)), history, 10.0, False)
    return JobPolicy(replace(RestartSettings(), **settings), max_restarts)(case, 100.0)


def test_a_request_is_answered_with_what_the_decision_was_made_of_and_charges_nothing() -> None:
    history = judged(FAULT, {}, 3, CycleLife(20.0, 5)).history
    case = RequestCase(RankRequest(3, ControlRequest("restart", "please")), through_json(history), 10.0)
    answer = JobPolicy(RestartSettings(), 3)(case, 100.0)
    judgement = received(answer)
    assert judgement.answers_request and judgement.inputs["history"]["charged"] == 1
    assert judgement.inputs["request"] == {"rank": 3, "action": "restart", "description": "please"}
    assert (judgement.decision.action, judgement.decision.restarts_left) == (Action.RESTART, 2)
    assert len(answer.history["charged"]) == 1 and not judgement.decision.charged


def test_a_budget_is_spent_over_judgements_that_cross_as_json() -> None:
    history: dict[str, Any] = {}
    for left in (1, 0):
        answer = judged(FAULT, history, 2, CycleLife(60.0))
        decision = received(answer).decision
        assert answer.exit_code is None
        assert (decision.action, decision.charged, decision.restarts_left) == (Action.RESTART, True, left)
        history = through_json(answer.history)
    answer = judged(FAULT, history, 2, CycleLife(60.0))
    decision = received(answer).decision
    assert (answer.exit_code, decision.action, decision.reason) == (7, Action.GIVE_UP, answer.reason)


def test_the_next_ranks_hear_of_a_suspect_result_and_17_names_the_device() -> None:
    for code, finding in ((16, "reproducible"), (17, "persistent_error")):
        doubt = ResultInDoubt(finding, 5, 7, "a", "cuda:GPU-1")
        agreed = replace(FAULT, exit_code=code, doubt=doubt)
        case = Case(crossed(FaultReport(agreed)), {}, 0.0, other_hardware=True)
        answer = JobPolicy(RestartSettings(), 0)(case, 0.0)
        if code == 16:
            assert answer.relocates and answer.exit_code is None
            assert received(answer).suspect_result == doubt
        else:
            assert answer.exit_code == 17 and received(answer).suspect_result is None
            why = "node a, device cuda:GPU-1 computed iteration 7 of rank 5 wrongly; another device did not"
            assert why in answer.reason


def test_the_age_of_a_restart_crosses_the_clocks_of_two_nodes() -> None:
    first = judged(FAULT, {}, 1, CycleLife(60.0), restart_window=15.0)
    assert first.exit_code is None
    again = judged(FAULT, through_json(first.history), 1, CycleLife(60.0), restart_window=15.0)
    assert again.exit_code == 7, "the restart is 10 s old, whatever the clock of this node says"
    later = judged(FAULT, through_json(first.history), 1, CycleLife(60.0), restart_window=5.0)
    assert later.exit_code is None


def test_a_wait_and_a_relaxed_limit_come_along() -> None:
    answer = judged(replace(FAULT, limit="step", learned_limit=True), {}, 3, CycleLife(0.1), backoff=(4.0, 60.0))
    assert answer.wait_s == 4.0
    assert received(answer).relaxed_limit == "step"
    assert received(judged(FAULT, {}, 3, CycleLife(0.1))).relaxed_limit == ""


@pytest.mark.parametrize("fault_class", FaultClass)
def test_the_class_crosses_and_only_a_suspected_node_is_left(fault_class: FaultClass) -> None:
    judgement = judged(replace(FAULT, fault_class=fault_class), {}, 1, CycleLife(60.0))
    assert judgement.history["fault_class"] == fault_class.value
    assert judgement.relocates is (fault_class is FaultClass.HARDWARE)


words, numbers = st.text(max_size=10), st.integers(-(2**40), 2**40)


@given(
    st.builds(
        Fault,
        st.sampled_from(FaultKind),
        *[numbers] * 4,
        *[words] * 3,
        numbers,
        words,
        st.booleans(),
        st.lists(words).map(tuple),
        st.lists(words).map(tuple),
        st.none() | numbers,
        words,
        st.booleans(),
        st.sampled_from(FaultClass),
        st.none() | st.builds(ResultInDoubt),
    ),
    st.builds(CycleLife, st.floats(0, 1e6), st.none() | numbers),
)
def test_any_fault_crosses(fault: Fault, life: CycleLife) -> None:
    judgement = judged(fault, {}, 3, life)
    assert received(judgement).decision.reason == judgement.reason


json_values = st.recursive(
    st.none() | st.booleans() | numbers | words, lambda inner: st.lists(inner) | st.dictionaries(words, inner)
)


RECORD = to_json(FaultReport(FAULT))


@given(st.dictionaries(st.sampled_from(sorted(RECORD["fault"])), json_values, max_size=3))
def test_any_record_is_judged_or_does_not_fit(changes: dict[str, Any]) -> None:
    try:
        report = from_json(FaultReport, RECORD | {"fault": RECORD["fault"] | changes})
    except ProtocolError:
        return
    assert JobPolicy(RestartSettings(), 3)(Case(report, {}, 0.0, False), 0.0).judgement is not None


@pytest.mark.parametrize(
    "changes",
    [
        {"kind": "dance"},
        {"fault_class": "dance"},
        {"fault_class": []},
        {"exit_code": "x"},
        {"agreed_exit_code": "x"},
        {"detail": 5},
        {"failed": ["0"]},
        {"doubt": {}},
        {"more": 1},
    ],
)
def test_a_fault_that_does_not_fit(changes: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError):
        from_json(FaultReport, RECORD | {"fault": RECORD["fault"] | changes})


@pytest.mark.parametrize("life", [{"lived_s": "x"}, {"iteration": 1.5}, {"more": 1}, 5, None])
def test_the_life_of_a_cycle_that_does_not_fit(life: Any) -> None:
    with pytest.raises(ProtocolError):
        from_json(FaultReport, RECORD | {"life": life})


@pytest.mark.parametrize(
    "record", [{}, {"action": "dance", "reason": ""}, {"reason": "x"}, {"action": "restart", "more": 1, "reason": ""}]
)
def test_a_decision_that_does_not_fit(record: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError):
        from_json(PolicyJudgement, {"decision": record})


LOADS = ["train.py:9 in load"]
WAITS = ["torch/distributed/distributed_c10d.py:3252 in all_reduce", "train.py:20 in step"]
HANG = Fault(
    FaultKind.HANG,
    0,
    0,
    4711,
    -9,
    "hangs: no sign of life for 5 s",
    "",
    "",
    fault_class=FaultClass.HANG,
    collateral=True,
    exceeded="; no sign of life for 5 s",
)


def ranks_of(rank: int, entered: int, frames: list[str]) -> list[Any]:
    """What a node with one rank brings after a hang in the fourth collective."""
    view = RankView(Scene(rank, frames), {"0": GroupState(entered, 3, "all_reduce", "[[4]]", "dp")}, iteration=7)
    records: list[Any] = through_json({"ranks": [rank_view.to_record(view)]})["ranks"]
    return records


def after_hang(views: dict[str, list[Any]], fault: Fault = HANG, nccl: Mapping[str, Any] | None = None) -> PolicyAnswer:
    report = crossed(FaultReport(fault, CycleLife(60.0), "rank 0 on a hangs"))
    names = {node: f"host of {node}" for node in views}
    seen = NodeViews(views, names, True, nccl or {})
    return JobPolicy(RestartSettings(), 3)(Case(report, {}, 0.0, False, seen), 0.0)


def test_the_rank_that_ranks_of_all_nodes_wait_for() -> None:
    views = {"a": ranks_of(0, 4, WAITS), "b": ranks_of(1, 3, ["train.py:9 in load"]), "c": ranks_of(2, 4, WAITS)}
    answer = after_hang(views)
    guilty = culprit_in(answer)
    assert guilty is not None
    assert (answer.faulty_node, guilty.rank, guilty.blamed, guilty.waiting) == ("b", 1, (1,), 2)
    text = "rank 1 on host of b hangs: it never entered all_reduce 4 of group dp, and 2 ranks wait for it"
    assert received(answer).headline == text


def test_what_a_node_has_found_in_the_text_of_a_line_counts_for_all_nodes() -> None:
    lock = {"state": "S (sleeping)", "wchan": "futex_do_wait"}

    def at(rank: int, line: int, in_own_lock: bool) -> list[Any]:
        scene = Scene(rank, [f"train.py:{line} in step"], lock, in_own_lock)
        view = RankView(scene, {"0": GroupState(3, 3, "all_reduce", "[[4]]", "dp")}, iteration=7)
        records: list[Any] = through_json({"ranks": [rank_view.to_record(view)]})["ranks"]
        return records

    views = {"a": ranks_of(0, 4, WAITS), "b": at(1, 30, True), "c": at(2, 63, False)}
    guilty = culprit_in(after_hang(views))
    assert guilty is not None and guilty.blamed == (1,)
    del views["b"][0]["in_own_lock"]  # as an earlier release writes it
    assert culprit_in(after_hang(views)) is None


@pytest.mark.parametrize("collateral", [True, False])
def test_a_node_did_not_see_who_waits_for_its_rank(collateral: bool) -> None:
    views = {
        "a": ranks_of(0, 3, ["train.py:9 in load"]),
        **{name: ranks_of(n, 4, WAITS) for n, name in [(1, "b"), (2, "c")]},
    }
    answer = after_hang(views, replace(HANG, collateral=collateral, hint="hint", detail=("train.py:9 in load",)))
    guilty = culprit_in(answer)
    assert guilty is not None
    found = guilty
    assert (answer.faulty_node, found.rank, found.pid, found.finding) == ("a", 0, 4711, "behind")
    assert found.what == (
        "hangs: it never entered all_reduce 4 of group dp, and 2 ranks wait for it; no sign of life for 5 s"
    )
    assert (found.collateral, found.detail, found.hint) == (
        False,
        ("train.py:9 in load",),
        "" if collateral else "hint",
    )
    assert found.others == ("ranks 1-2: in all_reduce 4 of group dp, at train.py:20 in step (iteration 7)",)


def test_a_stopped_rank_explains_the_limit_of_another() -> None:
    stopped = ranks_of(1, 3, [])[0] | {"state": "T (stopped)"}
    views = {"a": ranks_of(0, 3, LOADS), "b": [stopped], "c": ranks_of(2, 4, WAITS)}
    answer = after_hang(views, replace(HANG, collateral=False))
    guilty = culprit_in(answer)
    assert guilty is not None
    assert (answer.faulty_node, guilty.rank, guilty.finding) == ("b", 1, "gone")


def test_a_node_saw_some_of_the_ranks_that_wait_for_its_rank() -> None:
    views = {"a": ranks_of(0, 3, LOADS), **{name: ranks_of(rank, 4, WAITS) for rank, name in [(1, "b"), (2, "c")]}}
    seen = "hangs: it never entered all_reduce 4 of group dp, and 1 rank waits for it; no sign of life for 5 s"
    guilty = culprit_in(after_hang(views, replace(HANG, what=seen, blamed=(0,), waiting=1, finding="behind")))
    assert guilty is not None
    assert guilty.what == seen.replace("1 rank waits", "2 ranks wait")
    assert guilty.waiting == 2


STILL = ", for 6.03 s; the limit is 6 s (hang_timeout)"


@pytest.mark.parametrize(
    ("seen", "state", "cause"),
    [
        (f"2 ranks wait for it in a collective{STILL[1:]}", "R (running)", "it never entered all_reduce 4 of group dp"),
        (f"it is stopped{STILL}", "T (stopped)", "it is stopped (SIGSTOP or a debugger)"),
        (f"it is stopped, and 1 rank waits for it{STILL}", "T (stopped)", "it is stopped (SIGSTOP or a debugger)"),
    ],
    ids=["sleeps", "stopped", "its node saw one that waits"],
)
def test_the_cause_of_a_hang_is_told_once(seen: str, state: str, cause: str) -> None:
    """At the limit of a hang its own node has told the cause as well, as far as it saw that."""
    views = {"a": ranks_of(0, 3, LOADS), **{name: ranks_of(rank, 4, WAITS) for rank, name in [(1, "b"), (2, "c")]}}
    views["a"][0]["state"] = state
    hang = replace(HANG, what=f"hangs: {seen}", exceeded=STILL, limit="hang", collateral=False, blamed=(0,), waiting=1)
    guilty = culprit_in(after_hang(views, hang))
    assert guilty is not None and guilty.what == f"hangs: {cause}, and 2 ranks wait for it{STILL}"


@pytest.mark.parametrize(
    ("views", "fault"),
    [
        ({"a": ranks_of(0, 4, WAITS), "b": ranks_of(1, 3, WAITS)}, HANG),
        ({"a": ranks_of(0, 4, WAITS), "b": ranks_of(1, 4, WAITS)}, replace(HANG, collateral=False)),
        ({"a": ranks_of(0, 4, WAITS), "b": ranks_of(1, 3, ["train.py:9 in load"])}, FAULT),
        ({"a": ranks_of(0, 4, WAITS), "b": [{"rank": "x"}]}, HANG),
        ({"a": ranks_of(0, 4, WAITS), "b": [5, None]}, HANG),
        (
            {
                "a": ranks_of(0, 4, WAITS),
                "b": [ranks_of(1, 3, ["train.py:9 in load"])[0] | {"iteration": float("inf")}],
            },
            HANG,
        ),
        ({"a": ranks_of(0, 4, WAITS), "b": ranks_of(1, 3, ["train.py:9 in load"])}, replace(HANG, collateral=False)),
        ({"b": ranks_of(1, 3, ["train.py:9 in load"])}, HANG),
        ({}, HANG),
    ],
    ids=[
        "nobody",
        "the network, and its own limit",
        "no hang",
        "wrong field",
        "no records",
        "infinite",
        "its own limit",
        "one node",
        "no views",
    ],
)
def test_the_fault_of_the_node_stands(views: dict[str, list[Any]], fault: Fault) -> None:
    answer = after_hang(views, fault)
    assert (answer.faulty_node, culprit_in(answer)) == ("", None)
    assert received(answer).headline == "rank 0 on a hangs"


LOST = Fault(
    FaultKind.EXCEPTION,
    0,
    0,
    4711,
    1,
    "raised RuntimeError: Connection closed",
    "",
    "",
    collateral=True,
    failed=(0,),
)


@pytest.mark.parametrize(
    ("fault", "returned", "blamed"),
    [
        (LOST, {3: 0.02}, (3,)),
        (LOST, {3: 70.0}, ()),
        (LOST, {3: 0.02, 5: 0.02}, ()),
        (replace(LOST, collateral=False), {3: 0.02}, ()),
        (replace(LOST, what="raised ConnectionResetError: Connection reset by peer"), {3: 0.02}, ()),
        (replace(LOST, fault_class=FaultClass.HANG), {3: 0.02}, ()),
        (HANG, {3: 0.02}, ()),
    ],
    ids=["returned", "long ago", "two", "its own error", "a service", "timed out", "hang"],
)
def test_a_rank_of_another_node_had_returned(fault: Fault, returned: dict[int, float], blamed: tuple[int, ...]) -> None:
    report = crossed(FaultReport(fault, CycleLife(60.0), "rank 0 on a failed"))
    case = Case(report, {}, 0.0, False, NodeViews(returned=returned))
    answer = JobPolicy(RestartSettings(), 3)(case, 0.0)
    found = culprit_in(answer)
    assert (answer.faulty_node, received(answer).headline) == ("", "rank 0 on a failed")
    if not blamed:
        assert found is None
    else:
        assert found is not None
        assert (found.rank, found.finding, found.blamed, found.pid) == (0, "returned", blamed, 4711)
        assert found.hint == "rank 3 had returned from its program, while others still needed it"


def in_the_same_collective() -> dict[str, list[Any]]:
    """All ranks of three nodes; in their containers they have the same pid."""
    return {name: [ranks_of(rank, 4, WAITS)[0] | {"pid": 50}] for rank, name in enumerate("abc")}


NETWORK = "all 3 ranks are in all_reduce 4 of group dp, and it does not end: the network, or a device"
CUT_OFF = NcclView(3, tuple(NcclProcess(f"10.0.0.{rank}", 50, rank, 3, True) for rank in (0, 1)), 2)
LOST_C = NcclView(3, (NcclProcess("10.0.0.2", 50, 2, 3, True),), 1)
SILENT_C = NcclView(3, (NcclProcess("10.0.0.2", 50, 2, 3),), 1)


@pytest.mark.parametrize(
    ("answers", "hint"),
    [
        ({}, NETWORK),
        ({"a": NcclView(3)}, f"{NETWORK}; NCCL's RAS reaches all 3"),
        ({"a": NcclView(3), "b": SILENT_C}, f"{NETWORK}; NCCL's RAS reaches all 3"),
        ({"b": SILENT_C}, f"{NETWORK}; NCCL's RAS got no answer from rank 2 on host of c"),
        ({"c": CUT_OFF}, NETWORK),
    ],
    ids=["not asked", "reaches all", "ended meanwhile", "no answer", "cut off"],
)
def test_all_nodes_are_in_one_collective(answers: dict[str, NcclView], hint: str) -> None:
    nccl = {node: through_json(nccl_view.to_record(answer)) for node, answer in answers.items()}
    answer = after_hang(in_the_same_collective(), nccl=nccl)
    guilty = culprit_in(answer)
    assert guilty is not None and answer.faulty_node == "a"
    found = guilty
    assert (found.rank, found.pid, found.finding, found.blamed, found.collateral) == (0, 4711, "transport", (), True)
    assert (found.waiting, found.hint) == (3, hint)
    assert received(answer).headline == "rank 0 on host of a hangs: no sign of life for 5 s"


def test_a_node_that_nccl_has_given_up() -> None:
    answers = {"a": LOST_C, "b": LOST_C, "c": CUT_OFF}
    nccl = {node: through_json(nccl_view.to_record(answer)) for node, answer in answers.items()}
    answer = after_hang(in_the_same_collective(), nccl=nccl)
    guilty = culprit_in(answer)
    assert guilty is not None and answer.faulty_node == "c"
    found = guilty
    assert (found.rank, found.finding, found.blamed, found.waiting) == (2, "transport", (2,), 2)
    assert received(answer).headline == (
        "rank 2 on host of c hangs: it is given up by NCCL's RAS, which cannot reach it, while all 3 ranks are in "
        "all_reduce 4 of group dp, and 2 ranks wait for it"
    )


def test_a_fault_of_a_rank_that_no_node_saw_stands() -> None:
    answer = after_hang(in_the_same_collective(), replace(HANG, rank=9))
    assert (answer.faulty_node, culprit_in(answer)) == ("", None)


@pytest.mark.parametrize("nccl", [5, {}, {"processes": 3, "missing": [{}], "late": []}, "x" * 100_000])
def test_an_answer_of_nccl_that_does_not_fit_is_left_out(nccl: Any) -> None:
    guilty = culprit_in(after_hang(in_the_same_collective(), nccl={"a": nccl}))
    assert guilty is not None and guilty.hint == NETWORK
