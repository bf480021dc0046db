"""What follows after an attempt: each way it can end in, with what came before."""

from __future__ import annotations

import pytest

from scripts.slurm.next_step import Action, Attempt, NodeEnd, Outcome, Step, Terms, decide

DONE, NEXT, STOP, LEAVE = Action.DONE, Action.NEXT, Action.STOP, Action.LEAVE
FAILED, MOVED, PREEMPTED = Outcome.FAILED, Outcome.MOVED, Outcome.PREEMPTED


def attempt(*codes: int | None, code: int | None = None, flag: bool = False, **more: object) -> Attempt:
    """Nodes n1, n2, ... with these codes."""
    ends = tuple(NodeEnd(f"n{n}", one) for n, one in enumerate(codes, 1))
    highest = max((one for one in codes if one is not None), default=0)
    return Attempt(ends, highest if code is None else code, flag, **more)  # type: ignore[arg-type]


def after(ended: Attempt, *history: Outcome, most: int = 3, flag_required: bool = False) -> Step:
    return decide(ended, history, Terms(most, flag_required))


@pytest.mark.parametrize(
    ("ended", "action", "outcome", "exclude"),
    [
        (attempt(0, 0), DONE, Outcome.DONE, ()),
        (attempt(0, 0, 83), DONE, Outcome.DONE, ()),  # a node left, and the others came to the end
        (attempt(1, 1, flag=True), DONE, Outcome.DONE, ()),
        (attempt(flag=True, code=137), DONE, Outcome.DONE, ()),
        (attempt(code=0), DONE, Outcome.DONE, ()),
        (attempt(0, 1), NEXT, FAILED, ()),
        (attempt(code=1), NEXT, FAILED, ()),
        (attempt(85, 85), NEXT, FAILED, ()),
        (attempt(137, 137), NEXT, FAILED, ()),
        (attempt(None, 82, code=82), NEXT, FAILED, ()),
        (attempt(83, 81), NEXT, FAILED, ("n1",)),
        (attempt(84, 94), NEXT, FAILED, ("n2",)),
        (attempt(86, 86), NEXT, PREEMPTED, ()),
        (attempt(86, 87, 83), NEXT, PREEMPTED, ("n3",)),
        (attempt(16, 16), NEXT, MOVED, ()),
        (attempt(17, 17), STOP, Outcome.NOT_MENDED, ()),
        (attempt(86, 17), STOP, Outcome.NOT_MENDED, ()),
        (attempt(93, 93), STOP, Outcome.NOT_MENDED, ()),
        (attempt(95, 95), STOP, Outcome.NOT_MENDED, ()),
        (attempt(None, None, code=2), STOP, Outcome.NOT_MENDED, ()),
        (attempt(code=127), STOP, Outcome.NOT_MENDED, ()),
        (attempt(1, told=True), NEXT, PREEMPTED, ()),
        (attempt(86, ended_by="TimeLimit"), NEXT, PREEMPTED, ()),
        (attempt(86, ended_by="None"), LEAVE, Outcome.ENDED_BY_SLURM, ()),
        (attempt(1, told=True, ended_by="None"), LEAVE, Outcome.ENDED_BY_SLURM, ()),
        (attempt(0, flag=True, ended_by="None"), DONE, Outcome.DONE, ()),
    ],
)
def test_each_end(ended: Attempt, action: Action, outcome: Outcome, exclude: tuple[str, ...]) -> None:
    step = after(ended)
    assert (step.action, step.outcome, step.exclude) == (action, outcome, exclude)
    assert step.reason and bool(step.exit_code) == (action is STOP)


@pytest.mark.parametrize(("told", "outcome"), [(False, Outcome.UNFINISHED), (True, PREEMPTED)])
def test_where_the_flag_is_required_0_alone_is_not_the_end(told: bool, outcome: Outcome) -> None:
    step = after(attempt(0, 0, told=told), flag_required=True)
    assert (step.action, step.outcome) == (NEXT, outcome)


def test_the_node_whose_result_is_in_doubt_is_left_out() -> None:
    ends = (NodeEnd("n1", 16), NodeEnd("n2", 16, "rank 3", in_doubt=True))
    assert after(Attempt(ends, 16, False)).exclude == ("n2",)


@pytest.mark.parametrize(
    ("history", "action"),
    [
        ([], NEXT),
        ([FAILED], NEXT),
        ([FAILED, FAILED], STOP),
        ([FAILED, MOVED, FAILED], STOP),
        ([FAILED, FAILED, PREEMPTED], NEXT),
        ([FAILED, PREEMPTED, FAILED], NEXT),
    ],
)
def test_failures_count_in_a_row(history: list[Outcome], action: Action) -> None:
    step = after(attempt(1, 1), *history)
    assert (step.action, step.outcome) == (action, FAILED)
    assert step.exit_code == (1 if action is STOP else 0)


def test_the_fourth_move_in_a_row_is_a_failure() -> None:
    assert after(attempt(16), MOVED, MOVED, most=1).outcome is MOVED
    assert after(attempt(16), MOVED, MOVED, MOVED, most=1).action is STOP
    assert after(attempt(16), MOVED, MOVED, MOVED, FAILED).outcome is MOVED


def test_the_reason_says_which_node_said_what() -> None:
    ends = (NodeEnd("n1", 0), NodeEnd("n2", 17, "rank 1 exited with code 17"))
    step = after(Attempt(ends, 17, False))
    assert "n2: rank 1 exited with code 17" in step.reason and step.exit_code == 17
