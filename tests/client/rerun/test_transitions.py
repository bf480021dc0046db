"""Every vote in every state and mode; no way through the states is endless, and none is lost."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ft_client.rerun.judgement import RerunDiagnostic, first_rerun, second_rerun
from ft_client.rerun.transitions import (
    COMPUTING,
    IN_DOUBT,
    RerunAction,
    RerunMode,
    RerunState,
    Votes,
    ending,
    transition,
    votes_count,
)

A, S = RerunAction, RerunState
VALIDATE, STATS, DISABLED = RerunMode.VALIDATE_RESULTS, RerunMode.REPORT_STATS, RerunMode.DISABLED
NO, BACK = Votes(), (A.RESTORE, A.REWIND)
ALL_VOTES = [Votes(*flags) for flags in itertools.product([False, True], repeat=4)]


@pytest.mark.parametrize(
    ("state", "mode", "votes", "after", "run", "actions"),
    [
        (S.NOT_RUNNING_YET, VALIDATE, NO, S.INITIAL_RUN, True, (A.RESUME, A.BEGIN, A.SAVE)),
        (S.NOT_RUNNING_YET, STATS, NO, S.INITIAL_RUN, True, (A.RESUME, A.BEGIN, A.SAVE)),
        (S.NOT_RUNNING_YET, DISABLED, NO, S.INITIAL_RUN, True, (A.RESUME, A.BEGIN)),
        (S.INITIAL_RUN, VALIDATE, NO, S.NOT_RUNNING_YET, False, (A.ADVANCE,)),
        (S.INITIAL_RUN, DISABLED, NO, S.NOT_RUNNING_YET, False, (A.ADVANCE,)),
        (S.INITIAL_RUN, VALIDATE, Votes(rerun=True), S.RERUNNING_IN_PLACE, True, BACK),
        (S.INITIAL_RUN, STATS, NO, S.RERUNNING_IN_PLACE, True, BACK),
        (S.RERUNNING_IN_PLACE, VALIDATE, NO, S.NOT_RUNNING_YET, False, (A.ADVANCE,)),
        (S.RERUNNING_IN_PLACE, STATS, NO, S.NOT_RUNNING_YET, False, (A.ADVANCE, A.REPORT)),
        (S.RERUNNING_IN_PLACE, VALIDATE, Votes(checkpoint=True), S.WILL_RERUN_FROM_CHECKPOINT, False, BACK),
        (S.WILL_RERUN_FROM_CHECKPOINT, VALIDATE, NO, S.RERUNNING_FROM_CHECKPOINT, True, (A.RESUME, A.SAVE)),
        (S.RERUNNING_FROM_CHECKPOINT, VALIDATE, NO, S.NOT_RUNNING_YET, False, (A.ADVANCE,)),
        (S.RERUNNING_FROM_CHECKPOINT, VALIDATE, Votes(restart_again=True), S.RESTARTING_AGAIN, False, ()),
        (S.RERUNNING_FROM_CHECKPOINT, VALIDATE, Votes(failed=True), S.RERUNNING_FROM_CHECKPOINT, False, BACK),
        (S.RERUNNING_FROM_CHECKPOINT, VALIDATE, Votes(False, False, True, True), S.RESTARTING_AGAIN, False, ()),
        (S.RESTARTING_AGAIN, VALIDATE, NO, S.RESTARTING_AGAIN, False, ()),
    ],
)
def test_the_table(
    state: RerunState, mode: RerunMode, votes: Votes, after: RerunState, run: bool, actions: tuple[RerunAction, ...]
) -> None:
    then = transition(state, mode, votes)
    assert (then.state, then.run, then.actions) == (after, run, actions)


@pytest.mark.parametrize(
    ("state", "end"),
    [
        (S.NOT_RUNNING_YET, (False, False, 0)),
        (S.INITIAL_RUN, (False, False, 0)),
        (S.RERUNNING_IN_PLACE, (False, False, 0)),
        (S.WILL_RERUN_FROM_CHECKPOINT, (True, True, 16)),
        (S.RERUNNING_FROM_CHECKPOINT, (True, True, 17)),
        (S.RESTARTING_AGAIN, (False, True, 16)),
    ],
)
def test_how_a_step_ends(state: RerunState, end: tuple[bool, bool, int]) -> None:
    assert ending(state) == end


def test_every_event_in_every_state() -> None:
    for state, mode, votes in itertools.product(S, RerunMode, ALL_VOTES):
        then = transition(state, mode, votes)
        assert not then.run or then.state in COMPUTING
        assert (A.REWIND in then.actions) == (A.RESTORE in then.actions), "data and random numbers go back together"
        assert (A.ADVANCE in then.actions) == (then.state is S.NOT_RUNNING_YET), "data go when a step is done"


def test_a_disabled_machine_computes_a_step_once() -> None:
    for votes in ALL_VOTES:
        assert transition(S.INITIAL_RUN, DISABLED, votes) == transition(S.INITIAL_RUN, DISABLED, NO)


@given(st.lists(st.sampled_from(ALL_VOTES), min_size=3, max_size=3), st.sampled_from(RerunMode))
def test_a_step_is_computed_at_most_twice_in_a_job(votes: list[Votes], mode: RerunMode) -> None:
    for start in (S.NOT_RUNNING_YET, S.WILL_RERUN_FROM_CHECKPOINT):
        state, runs = start, 0
        for vote in votes:
            then = transition(state, mode, vote)
            state, runs = then.state, runs + then.run
            if not then.run:
                break
        assert not then.run, "the loop of a step comes to its end"
        assert runs <= (2 if start is S.NOT_RUNNING_YET else 1)
        assert state in {S.NOT_RUNNING_YET, S.RERUNNING_FROM_CHECKPOINT} | IN_DOUBT


def test_when_the_ranks_vote() -> None:
    assert {(state, mode) for state in S for mode in RerunMode if votes_count(state, mode)} == {
        (state, VALIDATE) for state in COMPUTING
    }


def test_modes_by_name() -> None:
    assert RerunMode("report_determinism_stats") is RerunMode("report_stats") is STATS
    assert RerunMode.REPORT_DETERMINISM_STATS is STATS
    with pytest.raises(ValueError, match="unknown"):
        RerunMode("unknown")


@pytest.mark.parametrize(
    ("judgement", "diagnostic", "votes"),
    [
        (first_rerun(reproduced=False, fatal=True), RerunDiagnostic.TRANSIENT_ERROR, NO),
        (first_rerun(reproduced=False, fatal=False), RerunDiagnostic.TRANSIENT_ERROR, NO),
        (first_rerun(reproduced=True, fatal=True), None, Votes(checkpoint=True)),
        (first_rerun(reproduced=True, fatal=False), None, NO),
        (second_rerun(reproduced=False, same_device=False), RerunDiagnostic.PERSISTENT_ERROR, Votes(failed=True)),
        (second_rerun(reproduced=True, same_device=False), RerunDiagnostic.CORRECT_RESULT, NO),
        (second_rerun(reproduced=True, same_device=True), None, Votes(restart_again=True)),
        (second_rerun(reproduced=False, same_device=True), None, Votes(restart_again=True)),
    ],
)
def test_judgements(judgement: object, diagnostic: RerunDiagnostic | None, votes: Votes) -> None:
    assert (judgement.diagnostic, judgement.votes) == (diagnostic, votes)  # type: ignore[attr-defined]
