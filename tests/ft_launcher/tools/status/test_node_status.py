"""What the events of a journal add up to, and what is said of it in a word, a sentence and JSON."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest

from ft_launcher.record import events
from ft_launcher.record.ledger.account import Account, CycleTimes
from ft_launcher.record.ledger.job_ledger import JobTime
from ft_launcher.record.ledger.stall import Stall
from ft_launcher.tools.commands.status import collective_lines
from ft_launcher.tools.status import summary
from ft_launcher.tools.status.memory_status import line_of
from ft_launcher.tools.status.node_status import Facts, NodeStatus, RankReading
from ft_launcher.tools.status.summary import JobState, RankState

START = events.JobStartEvent("train-7", "host-a", ["train.py"], 3, 2, {})
RANKS = [{"rank": 0, "local_rank": 0, "pid": 10}, {"rank": 1, "local_rank": 1, "pid": 11}]
CYCLE = events.CycleStartEvent(0, 1, 2, "host-a:29500", RANKS)
READINGS = (
    RankReading(0, 0, 10, 100.0, True, True, 41, {"step": 0.5}, 0.5),
    RankReading(1, 1, 11, 100.0, True, True, 40, {"data": 12.0}, 12.0),
)


LOADED = events.StateLoadedEvent(
    1, "memory", 21, "aaaaaaaa", 10, 45, 24, [{"step": 44, "rank": 1, "reason": "damaged"}]
)
SAVED = events.StatesSavedEvent(0, 40, 45, 4, 1, 1024, 0.5, 0.25, 0.009, 3072, 9216)


def fault(cycle: int = 0, **more: Any) -> events.FaultEvent:
    facts: dict[str, Any] = {"kind": "hang", "rank": 1, "local_rank": 1, "pid": 11, "exit_code": -9, "what": "hangs"}
    facts |= {"where": "in step", "hint": "", "iteration": 40, "limit": "", "learned_limit": False, "detail": ["a"]}
    facts |= {"others": [], "agreed_exit_code": None, "error": "", "collateral": False, "fault_class": "hang"}
    facts |= {"doubt": None, "failed": [1], "finding": "", "blamed": [], "waiting": 0}
    facts |= {"error_text": "", "before_group": False, "exceeded": ""}
    return events.FaultEvent(cycle=cycle, **facts | more)


def decision(cycle: int = 0, action: str = "restart", left: int = 2) -> events.DecisionEvent:
    return events.DecisionEvent(cycle, action, "restart 1 of 3", True, left, None, 0.0, False)


def ledger(cycle: int, resumed: int | None, iteration: int | None, **recovery: float) -> events.LedgerEvent:
    part = (cycle, True, 0.0, 1.0, {}, 3, iteration, resumed, [], None, None, 0)
    return events.LedgerEvent(*part, recovery, {}, {}, 0.5, 0.4)


def stall() -> events.StallEvent:
    return events.StallEvent(0, "2 ranks stand still for 60 s", [])


def after(*seen: events.Event) -> NodeStatus:
    status = NodeStatus()
    for number, event in enumerate(seen):
        status.on_event(event, 1000.0 + number)
    return status


TIMES = JobTime("", CycleTimes(0, 0, 1, {}, iteration=41, saved=40), Account({"step": 0.9}, 1.0, 0.9, 0.8, 41), {})


@pytest.mark.parametrize(
    ("seen", "state", "said"),
    [
        ([START], JobState.STARTING, "starting"),
        ([START, CYCLE], JobState.RUNNING, "running, cycle 0"),
        ([START, CYCLE, stall()], JobState.TROUBLED, "hung in cycle 0: 2 ranks stand still for 60 s"),
        ([START, CYCLE, fault()], JobState.RESTARTING, "restarting after cycle 0, 1 fault: rank 1 hangs"),
        (
            [START, CYCLE, fault(), decision(), events.CycleEndEvent(0, "failed")],
            JobState.RESTARTING,
            "restarting after cycle 0, 1 fault: rank 1 hangs",
        ),
        (
            [START, CYCLE, fault(), decision(), events.CycleEndEvent(0, "failed"), replace(CYCLE, cycle=1)],
            JobState.RUNNING,
            "running, cycle 1, 1 fault",
        ),
        (
            [START, CYCLE, events.CycleEndEvent(0, "failed elsewhere", why="rank 9 on host-b died", next="restart")],
            JobState.RESTARTING,
            "restarting after cycle 0: rank 9 on host-b died",
        ),
        (
            [START, CYCLE, events.InProcessFaultEvent(0, 1, 11, -9, "died of SIGKILL", "", "", "")],
            JobState.TROUBLED,
            "hung in cycle 0, 1 fault: rank 1 died of SIGKILL",
        ),
        (
            [
                *(START, CYCLE, events.InProcessFaultEvent(0, 1, 11, -9, "died of SIGKILL", "", "", "")),
                events.InProcessRestartEvent(0, 1, 0.25, []),
            ],
            JobState.RUNNING,
            "running, cycle 0, 1 fault",
        ),
        (
            [START, CYCLE, events.JobEndEvent(0, "all ranks succeeded", 0, 0, 0)],
            JobState.ENDED,
            "ended with exit code 0 (all ranks succeeded)",
        ),
    ],
)
def test_states(seen: list[events.Event], state: JobState, said: str) -> None:
    facts = after(*seen).facts()
    assert (summary.job_state(facts, None), summary.sentence(facts, None)) == (state, said)


@pytest.mark.parametrize(
    ("age_s", "said"),
    [(None, "saved at"), (12.4, "saved 12 s ago at"), (185.0, "saved 3 min ago at"), (9000.0, "saved 2 h ago at")],
)
def test_how_long_ago_the_training_saved(age_s: float | None, said: str) -> None:
    text = summary.sentence(after(START, CYCLE).facts(), replace(TIMES, saved_age_s=age_s))
    assert text == f"running, cycle 0, step 41, {said} step 40, goodput 90.0%"


def test_state_in_memory_is_said_and_the_fault_knows_what_it_has_cost() -> None:
    status = after(START, CYCLE, SAVED, fault(), decision(), replace(CYCLE, cycle=1))
    assert status.facts().faults[-1].steps_lost is None
    status.on_event(LOADED, 2000.0)
    (seen,) = status.facts().faults
    assert seen.steps_lost == 24
    status.on_event(replace(LOADED, cycle=1, steps_lost=5), 2001.0)
    assert status.facts().faults[-1].steps_lost == 24, "a later look is about another fault"
    status.read(READINGS, "", replace(SAVED, cycle=1, newest=60, reached=63, saves=2, copied=55))
    facts = status.facts()
    assert summary.sentence(facts, None) == "running, cycle 1, step 63, step 60 in memory (3 behind), 1 fault"
    assert "step 41, saved at step 40, step 60 in memory (3 behind), goodput" in summary.sentence(facts, TIMES)
    found = summary.as_json(facts, READINGS, None, 102.0, 2000.0, "1.2")["memory"]
    assert found == {
        "tier": "memory",
        "step": 21,
        "newer_than": 10,
        "steps_lost": 5,
        "refused": 1,
        "newest": 60,
        "reached": 63,
        "behind": 3,
        "copied": 55,
        "share": 0.009,
        "size": 1024,
        "in_use": 3072,
        "limit": 9216,
        "saves": 6,
        "failed": 2,
        "cost_s": 1.0,
        "steps_lost_total": 29,
    }


def test_a_job_that_keeps_no_state_in_memory_says_nothing_of_it() -> None:
    status = after(START, CYCLE)
    status.read(READINGS, "", None)
    assert summary.as_json(status.facts(), READINGS, None, 102.0, 2000.0, "1.2")["memory"] is None


SPENT = "6 saves took 0.9% of the time; 3.0 KiB of 9.0 KiB"
NOTHING = {"step": 0, "steps_lost": 0, "newest": None, "behind": None, "saves": 1, "share": None, "in_use": None}


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({}, f"in memory: step 60 (3 behind); went on from step 21, 24 steps lost; {SPENT}"),
        ({"behind": 0, "steps_lost": 1}, f"in memory: step 60; went on from step 21, 1 step lost; {SPENT}"),
        ({"behind": 0, "steps_lost": None}, f"in memory: step 60; went on from step 21; {SPENT}"),
        (
            {"behind": 0, "copied": 1055},
            f"in memory: step 60; step 1,055 on other nodes, too; went on from step 21, 24 steps lost; {SPENT}",
        ),
        ({"step": 0}, f"in memory: step 60 (3 behind); no state was used, 24 steps lost; {SPENT}"),
        ({**NOTHING, "failed": 3}, "in memory: no step yet; 1 save, 3 failed"),
    ],
)
def test_state_in_memory_in_a_line(changed: dict[str, Any], says: str) -> None:
    known = {"step": 21, "steps_lost": 24, "newest": 60, "behind": 3, "saves": 6, "failed": 0, "share": 0.009}
    assert line_of({**known, "in_use": 3072, "limit": 9216, **changed}) == says


def test_a_stall_is_over_when_the_ranks_go_on() -> None:
    status = after(START, CYCLE, stall())
    status.read(READINGS)  # the first after the stall: what came before may be of long ago
    assert summary.job_state(status.facts(), None) is JobState.TROUBLED
    status.read(READINGS)
    assert summary.job_state(status.facts(), None) is JobState.TROUBLED
    status.read([replace(reading, iteration=42) for reading in READINGS])
    assert summary.job_state(status.facts(), None) is JobState.RUNNING


def test_counters() -> None:
    seen = [
        *(START, CYCLE, fault(), decision(), events.CycleEndEvent(0, "failed"), ledger(0, -1, 40)),
        *(
            replace(CYCLE, cycle=1),
            fault(1, kind="signal"),
            decision(1, "give up", 2),
            events.CycleEndEvent(1, "failed"),
        ),
        ledger(1, 36, 44, detection=4.0, stop=0.5),
        *(events.MonitorReplacedEvent(1, 0, "it died"), events.LinesDroppedEvent(3)),
        events.HealthChangeEvent(1, "nic", "ok", "unhealthy", "the link is down"),
    ]
    facts = after(*seen).facts()
    assert facts.faults_by == {("hang", "hang"): 1, ("hang", "signal"): 1}
    assert facts.restarts == {("relaunch", True): 1} and facts.restarts_left == 2
    assert facts.cycle_ends == {"failed": 2}
    assert {phase: (spent.count, spent.sum_s) for phase, spent in facts.recoveries.items()} == {
        "detection": (1, 4.0),
        "stop": (1, 0.5),
    }
    assert (facts.monitors_replaced, facts.lines_dropped, facts.health) == (1, 3, {"nic": "unhealthy"})
    assert [one.next for one in facts.faults] == ["restart: restart 1 of 3", "give up: restart 1 of 3"]


def test_what_follows_says_when_the_budget_is_whole_again() -> None:
    whole = "the budget is whole again once the training is beyond iteration 41"
    facts = after(START, CYCLE, fault(), replace(decision(), budget=whole)).facts()
    assert facts.faults[0].next == f"restart: restart 1 of 3, 2 left; {whole}"


def test_a_job_with_many_faults_stays_small() -> None:
    status = after(START, CYCLE)
    for number in range(500):
        status.on_event(fault(number, what="x" * 100_000, fault_class=f"class {number}"), 1.0)
    status.on_event(fault(500, fault_class="class 0"), 1.0)
    facts = status.facts()
    assert facts.faults_by["class 0", "hang"] == 2, "what is known is counted on"
    assert len(facts.faults) == 20 and len(facts.faults_by) == 64 and len(facts.faults[0].what) == 2000


@pytest.mark.parametrize(
    ("changes", "facts", "state"),
    [
        ({}, {}, RankState.TRAINING),
        ({"attached": False}, {}, RankState.UNWATCHED),
        ({"connected": False}, {}, RankState.STARTING),
        ({"condemned": True}, {}, RankState.HUNG),
        ({}, {"exit_codes": {0: 1}}, RankState.EXITED),
        ({}, {"runs": False}, RankState.EXITED),
    ],
)
def test_states_of_a_rank(changes: dict[str, Any], facts: dict[str, Any], state: RankState) -> None:
    of_job = replace(Facts(runs=True), **facts)
    assert summary.rank_state(replace(READINGS[0], **changes), of_job, TIMES) is state


STALLED = replace(TIMES, stall=Stall(steps=41, waited_s=24.2, usual_s=0.178, since_ns=0))


@pytest.mark.parametrize(
    ("seen", "cause", "state", "said"),
    [
        ([], "", "stalled", "stalled in cycle 0, step 41, saved at step 40, goodput 90.0%: NO_STEP"),
        (
            *([], "rank 2 is stopped, 3 ranks wait for it", "stalled"),
            "stalled in cycle 0, step 41, saved at step 40, goodput 90.0%: NO_STEP; rank 2 is stopped, 3 ranks "
            "wait for it",
        ),
        (
            *([stall()], "", "hung"),
            "hung in cycle 0, step 41, saved at step 40, goodput 90.0%: 2 ranks stand still for 60 s",
        ),
    ],
)
def test_a_training_that_makes_no_steps(seen: list[events.Event], cause: str, state: str, said: str) -> None:
    """A finding of a limit says more."""
    status = after(START, CYCLE, *seen)
    status.read(READINGS, cause)
    found = summary.as_json(status.facts(), status.readings, STALLED, 102.0, 2000.0, "1.2")
    said = said.replace("NO_STEP", "no step for 24 s, 136 times the usual one")
    assert (found["state"], found["sentence"]) == (state, said)
    assert found["ranks"][0]["state"] == "stalled"


def test_json() -> None:
    status = after(START, CYCLE)
    status.read(READINGS)
    found = summary.as_json(status.facts(), status.readings, TIMES, 102.0, 2000.0, "1.2")
    assert json.loads(summary.encoded(found)) == found
    assert (found["v"], found["run_id"], found["node_rank"], found["nodes"]) == (1, "train-7", 1, 2)
    assert found["sentence"] == "running, cycle 0, step 41, saved at step 40, goodput 90.0%"
    assert found["ranks"][1] == {
        **{"rank": 1, "local_rank": 1, "pid": 11, "state": "training", "exit_code": None, "iteration": 40},
        **{"sections": {"data": 12.0}, "sign_age_s": 14.0, "reading_age_s": 2.0, "frames": []},
    }
    assert found["times"]["goodput"] == 0.9


def test_what_json_does_not_have_is_null() -> None:
    assert (
        summary.encoded({"a": math.nan, "b": [math.inf], "c": "\ud800"}) == b'{"a": null, "b": [null], "c": "\\ud800"}'
    )


def test_cycles() -> None:
    past = CycleTimes(0, 10.0, 40.0, {"step": 29.0, "detection": 1.0, "backoff": 0.0}, 12)
    folded = CycleTimes(None, 0.0, 10.0, {"step": 10.0})
    present = CycleTimes(1, 40.0, 52.5, {"step": 12.5}, 5, recovery={"detection": 1.0, "stop": 0.25})
    status = after(START, CYCLE, events.CycleEndEvent(0, "failed"), replace(CYCLE, cycle=1))
    times = replace(TIMES, present=present, past=(folded, past))
    found = summary.as_json(status.facts(), status.readings, times, 102.0, 2000.0, "1.2")["cycles"]
    assert found == [
        {
            **{"cycle": 0, "since": 10.0, "until": 40.0, "how": "failed", "steps": 12, "recovery": {}},
            **{"seconds": {"step": 29.0, "detection": 1.0}},
        },
        {
            **{"cycle": 1, "since": 40.0, "until": 52.5, "how": "", "steps": 5, "seconds": {"step": 12.5}},
            **{"recovery": {"detection": 1.0, "stop": 0.25}},
        },
    ]


def test_frames_of_a_finding_until_it_is_over() -> None:
    ranks = [{"rank": 1, "frames": ["x" * 500] * 50}]
    status = after(START, CYCLE, events.StallEvent(0, "1 rank stands still for 60 s", ranks))
    status.read(READINGS)

    def frames() -> list[list[str]]:
        found = summary.as_json(status.facts(), status.readings, TIMES, 102.0, 2000.0, "1.2")
        return [rank["frames"] for rank in found["ranks"]]

    assert frames() == [[], ["x" * 200] * 8]
    status.read([replace(READINGS[0], frames=("now",)), READINGS[1]])
    assert frames()[0] == ["now"]
    status.on_event(replace(CYCLE, cycle=1), 1.0)
    assert frames()[1] == []


def test_a_fault_has_the_stacks_of_its_cycle() -> None:
    def stacks(cycle: int) -> events.StacksEvent:
        return events.StacksEvent(
            cycle, [{"rank": 1, "place": "outside", "frames": ["read"], "process": {}, "groups": {}}]
        )

    status = after(START, CYCLE, stacks(0), fault(), stacks(1), replace(CYCLE, cycle=2), fault(2))
    found = summary.as_json(status.facts(), (), TIMES, 102.0, 2000.0, "1.2")["faults"]
    assert [(one["number"], one["has_stacks"]) for one in found] == [(1, True), (2, False)]
    first, second = (summary.fault_as_json(one) for one in status.facts().faults)
    assert first["stacks"] == [{"ranks": [1], "place": "outside", "frames": ["read"], "process": {"stacks": ""}}]
    assert second == {"v": 1, "number": 2, "stacks": [], "collectives": [], "silent": []}


def test_collectives_are_those_that_somebody_asked_for() -> None:
    """With the age of the oldest answer; a rank that gave none is told of, too, unless it has exited."""
    assert summary.collectives(READINGS, 103.0) is None
    groups = {"0": {"entered": 5, "started": 5, "finished": 4, "operation": "all_reduce", "shape": "[[4]]"}}
    asked = (replace(READINGS[0], groups=groups, groups_at=101.0), replace(READINGS[1], groups_at=100.5))
    table = summary.collectives(asked, 103.0)
    row = {"group": "0", "ranks": [0], "entered": 5, "finished": 4, "operation": "all_reduce", "shape": "[[4]]"}
    silent = [{"ranks": [1], "why": "no answer"}]
    assert table == {"age_s": 2.5, "rows": [row | {"started": 5}], "silent": silent}
    found = summary.as_json(Facts(), asked, None, 103.0, 1000.0, "1")
    assert found["collectives"] == table
    found = summary.as_json(Facts(exit_codes={1: 0}), asked, None, 103.0, 1000.0, "1")
    assert found["collectives"] == table | {"silent": []}


def test_collectives_in_the_terminal() -> None:
    keys = ("group", "ranks", "entered", "finished", "operation", "shape", "started")
    rows = [("dp0", [3], 4, 4, "all_reduce", "[[4]]", 0), ("dp0", [0, 1, 2], 6, 4, "", "[[4]]", 5)]
    table = {"age_s": 0.0, "rows": [dict(zip(keys, row, strict=True)) for row in rows]}
    table["silent"] = [{"ranks": [5], "why": "no answer, stopped"}, {"ranks": [6, 7], "why": "no answer"}]
    assert list(collective_lines(table)) == [
        "collectives by process group:",
        "  dp0: rank 3 finished all_reduce 4",
        "  dp0: ranks 0-2 in collective 5 of [[4]], entered up to 6, started up to 5",
        "  rank 5: no answer, stopped",
        "  ranks 6-7: no answer",
    ]
    assert list(collective_lines(None)) == list(collective_lines({"age_s": 0.0, "rows": []})) == []


def test_a_rank_that_is_being_ended_is_told_until_it_has_ended() -> None:
    """Those that wait for it stand still meanwhile, of which monitors warn."""
    hung = events.VerdictEvent(
        0, 1, 11, "section:save", 6.0, 6.0, False, 40, {}, "in save for 6 s", "", [], {}, True, ""
    )
    waits = replace(hung, rank=0, limit="stall", reason="ran no Python for 60 s", condemned=False)
    told = "rank 1 hangs: in save for 6 s"
    assert after(START, CYCLE, hung, waits, stall()).facts().trouble == told
    assert after(START, CYCLE, waits, hung).facts().trouble == told
    assert after(START, CYCLE, hung, CYCLE, stall()).facts().trouble == stall().what
