"""What may be passed on, by examples of each mark, of stacks and of a status: no secret is among it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, cast

import pytest

from ft_launcher.decide.attribution import Fault, FaultKind
from ft_launcher.decide.attribution.known_errors import BAD_LOSS
from ft_launcher.decide.policy.restart_policy import Question, answer, inputs_of
from ft_launcher.record import surroundings
from ft_launcher.record.events import EVENTS
from ft_launcher.record.events.sharing import InPart, Shared, Sharing, sharing_of
from ft_launcher.tools.bundle.allowed import of_event, of_stacks, of_status
from rank_monitor.contract.restart_history import History
from rank_monitor.contract.settings.config import RestartSettings

SECRET = "hunter2"
URL = f"postgres://user:{SECRET}@db/x"


@pytest.mark.parametrize(
    ("event", "facts", "passed_on"),
    [
        ("job_start", {"command": ["train.py", SECRET], "nprocs": 2}, {"nprocs": 2}),
        ("lingers", {"cycle": 1, "processes": {"7": f"sleep {SECRET}"}}, {"cycle": 1}),
        ("verdict", {"rank": 1, "line": URL, "stacks": f"/home/{SECRET}/1.txt"}, {"rank": 1}),
        ("interruption", {"rank": 1, "line": URL, "stacks": f"/home/{SECRET}/1.txt"}, {"rank": 1}),
        ("limits", {"initial": 60.0, "state": {"x": URL}}, {"initial": 60.0}),
        ("evidence", {"otherwise": {"what": URL}, "nccl": {"x": URL}, "all_ranks": True}, {"all_ranks": True}),
        ("evidence", {"suspect_results": {"0": {"node": URL}}, "on_purpose": {"0": URL}}, {}),
    ],
)
def test_what_is_never_passed_on(event: str, facts: dict[str, Any], passed_on: dict[str, Any]) -> None:
    assert of_event(event, facts) == passed_on
    assert of_event(event, facts, with_texts=True) == passed_on


@pytest.mark.parametrize(
    ("event", "facts", "passed_on"),
    [
        ("cycle_end", {"how": "failed elsewhere", "why": URL, "next": URL}, {"how": "failed elsewhere"}),
        ("job_end", {"exit_code": 93, "reason": f"asked: {SECRET}"}, {"exit_code": 93}),
        ("health_change", {"check": "nic", "reason": URL}, {"check": "nic"}),
        ("health", {"readings": [{"check": "nic", "reason": URL}]}, {"readings": [{"check": "nic"}]}),
        ("in_process_restart", {"why": [{"rank": 1, "message": URL}]}, {"why": [{"rank": 1}]}),
        (
            "memory_loaded",
            {"step": 1, "refused": [{"step": 2, "rank": 1, "reason": URL}]},
            {"step": 1, "refused": [{"step": 2, "rank": 1}]},
        ),
        ("memory_refused", {"reason": URL}, {}),
        ("modules_preloaded", {"modules": 3, "packages": [SECRET], "left_out": {SECRET: "x"}}, {"modules": 3}),
    ],
)
def test_what_is_passed_on_whole_only_with_texts(event: str, facts: dict[str, Any], passed_on: dict[str, Any]) -> None:
    assert of_event(event, facts) == passed_on
    assert of_event(event, facts, with_texts=True) == facts


@pytest.mark.parametrize("event", EVENTS.values(), ids=EVENTS)
def test_each_field_that_is_passed_on_in_part_has_a_rule(event: Any) -> None:
    marks = sharing_of(event)
    in_part = [name for name, mark in marks.items() if mark in (Sharing.PART, Sharing.PART_OR_TEXT)]
    for name in in_part:
        assert name in (of_event(event.event, {"inputs": {}, name: None}) or {})


@dataclass(frozen=True)
class Unready:
    """An event whose author forgot a mark and a rule."""

    cycle: Shared[int]
    forgotten: str
    no_rule: InPart[str]


def test_what_the_launcher_says_of_a_rank_that_never_ends_is_passed_on() -> None:
    facts = {"cycle": 0, "rank": 1, "why": "its process did nothing for 60 s (--ft-exit-grace)"}
    assert of_event("never_ends", facts) == facts


def test_a_field_without_a_mark_or_a_rule_is_not_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(EVENTS, "unready", cast(Any, Unready))
    facts = {"cycle": 1, "forgotten": SECRET, "no_rule": SECRET}
    assert of_event("unready", facts) == of_event("unready", facts, with_texts=True) == {"cycle": 1}


def test_the_environment() -> None:
    environ = {
        "NCCL_DEBUG": "INFO",
        "CUDA_VISIBLE_DEVICES": "0,1",
        "WANDB_API_KEY": SECRET,
        "HTTPS_PROXY": URL,
        "NCCL_IB_HCA": URL,
        "OMP_NUM_THREADS": f"8 {SECRET}",
    }
    expected = {"CUDA_VISIBLE_DEVICES": "0,1", "NCCL_DEBUG": "INFO"}
    assert surroundings.environment(environ) == expected
    assert of_event("job_start", {"environment": environ}) == {"environment": expected}


def test_versions() -> None:
    found = surroundings.versions()
    assert {"launcher", "python", "torch", "system"} <= found.keys()
    assert of_event("job_start", {"versions": found | {"x": URL}}) == {"versions": found}


TRACEBACK = f'Traceback:\n  File "/x/train.py", line 3, in step\n    connect("{URL}")\nValueError: {URL}\n'


def test_an_exception_is_passed_on_as_its_type_and_its_places() -> None:
    facts = {"rank": 1, "type": "ValueError", "message": URL, "traceback": TRACEBACK}
    assert of_event("exception", facts) == {"rank": 1, "type": "ValueError", "traceback": ["/x/train.py:3 in step"]}
    assert of_event("exception", facts, with_texts=True) == facts


@pytest.mark.parametrize(
    ("facts", "what"),
    [
        (
            {"kind": "exception", "what": f"raised ValueError: {URL}", "error": "ValueError at train.py:3"},
            "exception: ValueError at train.py:3",
        ),
        ({"kind": "exception", "what": f"raised ValueError: {URL}", "error": ""}, "exception, exit code 1"),
        ({"kind": "exception", "what": "raised X", "error": f"X at {URL}"}, "exception, exit code 1"),
        ({"kind": "signal", "what": f"died of SIGSEGV, after it raised X: {URL}"}, "signal, exit code 1"),
        ({"kind": "signal", "what": "died of SIGKILL"}, "died of SIGKILL"),
        ({"kind": "hang", "what": "hangs: no sign of life"}, "hangs: no sign of life"),
        ({"kind": "hang", "limit": "in_process", "what": f"hangs: gave up: {URL}"}, "hang, exit code 1"),
    ],
)
def test_what_a_fault_says_is_ours(facts: dict[str, Any], what: str) -> None:
    found = of_event("fault", {"exit_code": 1} | facts)
    assert found is not None and found["what"] == what and SECRET not in json.dumps(found)


def test_a_request_and_the_decision_about_it() -> None:
    request = {"rank": 1, "action": "restart", "description": SECRET}
    found = of_event("decision", {"action": "restart", "reason": f"asked: {SECRET}", "inputs": {"request": request}})
    assert found == {"action": "restart", "inputs": {"request": {"rank": 1, "action": "restart"}}}
    assert of_event("decision", {"reason": f"asked: {SECRET}", "inputs": None}) == {"inputs": None}
    assert of_event("control_request", request) == {"rank": 1, "action": "restart"}


@pytest.mark.parametrize(
    ("error", "passed_on"),
    [("job.Failed at /x/train.py:3", True), (BAD_LOSS, True), (f"E\n{SECRET} at x.py:3", False), (URL, False)],
)
def test_a_decision_quotes_an_error_as_type_and_place_only(error: str, passed_on: bool) -> None:
    fault = Fault(FaultKind.EXCEPTION, 0, 0, 1, 1, "raised", "", "", iteration=4, error=error)
    question = Question(RestartSettings(same_error_limit=2), 3, History(error=error, error_iteration=4, same_errors=1))
    decision, _ = answer(fault, question, 0.0)
    assert error in decision.reason
    found = of_event("decision", {"reason": decision.reason, "inputs": inputs_of(fault, question, 0.0)})
    assert found is not None and found["inputs"]["history"]["same_errors"] == 1
    assert found.get("reason") == (decision.reason if passed_on else None)
    assert found["inputs"]["history"]["error"] == (error if passed_on else "")
    assert SECRET not in json.dumps(found)


def test_frames_are_places_in_programs() -> None:
    frames = ["train.py:3 in step", f"train.py:4 in {URL}", SECRET, 7, "torch/nn/modules/module.py:5 in _call_impl"]
    rank = {"rank": 0, "place": "outside", "frames": frames, "process": {"state": "S", "stacks": URL}, "stacks": URL}
    expected = {"rank": 0, "place": "outside", "frames": [frames[0], frames[4]], "process": {"state": "S"}}
    assert of_event("stacks", {"cycle": 1, "ranks": [rank, SECRET]}) == {"cycle": 1, "ranks": [expected]}
    rows = {"age_s": 1, "rows": [{"group": "dp", "ranks": [0], "entered": 4, "why": URL}, SECRET]}
    answer = {"groups": [{"ranks": [0, SECRET], "frames": frames, "process": {"x": URL}}, SECRET], "collectives": rows}
    stacks, collectives = of_stacks(answer)
    assert stacks == [{"ranks": [0], "frames": expected["frames"]}]
    assert collectives == [{"group": "dp", "ranks": [0], "entered": 4}]


def test_evidence_is_passed_on_without_words_of_ranks() -> None:
    rank = {"rank": 0, "local_rank": 0, "pid": 7, "exit_code": 1, "exception": {"message": URL}, "snapshot": {"x": URL}}
    found = of_event("evidence", {"cycle": 1, "ranks": [rank], "on_purpose": {"0": SECRET}})
    assert found == {"cycle": 1, "ranks": [{"rank": 0, "local_rank": 0, "pid": 7, "exit_code": 1}]}


def test_a_decision_about_a_restart_in_process_is_passed_on_without_words_of_ranks() -> None:
    message = {"state": "aborted", "member": 1, "iteration": 0, "prefix": "in_process/0", "limit_s": 1.0}
    words = message | {"reason": SECRET}
    facts = {
        "cycle": 0,
        "happened": {"what": "heard", "local_rank": 0, "message": words},
        "known": {"ranks": [1], "wrappers": [{"local_ranks": [0], **words, "prefix": URL}]},
        "follows": [{"step": "take_over", "local_rank": 0, "reason": SECRET}],
    }
    del message["prefix"]
    assert of_event("in_process_decision", facts) == {
        "cycle": 0,
        "happened": {"what": "heard", "local_rank": 0, "message": message | {"prefix": "in_process/0"}},
        "known": {"ranks": [1], "wrappers": [{"local_ranks": [0], **message}]},
        "follows": [{"step": "take_over", "local_rank": 0}],
    }
    assert of_event("in_process_decision", facts, with_texts=True) == facts


def test_the_status_of_a_job() -> None:
    fault = {"t": 1, "cycle": 0, "kind": "exception", "exit_code": 1, "what": f"raised X: {URL}", "others": [URL]}
    found = of_status({"state": "running", "sentence": SECRET, "trouble": SECRET, "later": URL, "faults": [fault]})
    assert found["state"] == "running" and SECRET not in json.dumps(found)
    of_wrapper = {"cycle": 0, "kind": "hang", "what": f"hangs: gave up: {URL}"}  # no limit: the status has none
    assert of_status({"faults": [of_wrapper]})["faults"] == [{"cycle": 0, "kind": "hang", "what": "hang"}]


def test_an_event_of_a_later_release_is_left_out() -> None:
    assert of_event("of_next_year", {"cycle": 1}) is None
    assert of_event("rank_exit", {"cycle": 1, "of_next_year": URL}) == {"cycle": 1}
