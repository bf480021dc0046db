"""What is found in the lines of one rank, and when a limit counts: on an imaginary clock."""

from __future__ import annotations

import pytest

from ft_launcher.tools.training_log.rank_log import NS_PER_S, BadLoss, RankLog, StepsMissing
from rank_monitor.contract.wire.launcher_messages import LogOverdue, LogStep
from rank_monitor.contract.wire.messages import NO_ITERATION

S = NS_PER_S


def iters(log: RankLog, at_s: int, *numbers: int, loss: str = "1.0") -> None:
    log.note_lines([f"iter {number}: loss {loss}, time 500.00ms, mfu 1%" for number in numbers], "", at_s * S)


def bar(log: RankLog, at_s: int, done: int) -> None:
    log.note_lines([], f"{done}%|#| {done}/100 [00:01<00:32,  2.00it/s]", at_s * S)


def test_steps_are_joined_but_the_first() -> None:
    """The first one says where the training has resumed."""
    log = RankLog("nanogpt", None)
    iters(log, 5, 7, 8, 9)
    half = S // 2
    assert log.news() == [LogStep(7, 0, half, 5 * S), LogStep(9, 0, half, 5 * S)]
    assert log.news() == []
    iters(log, 6, 10)
    iters(log, 7, 11)
    assert log.news() == [LogStep(11, 0, half, 7 * S)]


def test_steps_of_bars_are_summed() -> None:
    log = RankLog("tqdm", None)
    for at_s, done in enumerate((0, 3, 7, 9)):
        bar(log, at_s, done)
    assert log.news() == [LogStep(NO_ITERATION, 3, S // 2, S), LogStep(NO_ITERATION, 6, S // 2, 3 * S)]


def test_a_bar_that_is_not_whole_waits_for_its_end() -> None:
    log = RankLog("tqdm", None)
    bar(log, 0, 1)
    log.note_lines([], "5%|#| 5/100 [00:0", S)
    assert not log.has_steps
    log.note_lines([], "5%|#| 5/100 [00:01<00:32]", S)
    assert log.has_steps


def test_intervals_are_those_that_the_limit_judges() -> None:
    """Not the one that it ended, not one with output that was not read, and no rest."""
    log = RankLog("tqdm", 10.0)
    for at_s, done in ((0, 1), (1, 2), (4, 3)):
        bar(log, at_s, done)
    log.judge(20 * S)
    bar(log, 30, 4)
    log.skipped(31 * S)
    bar(log, 32, 5)
    bar(log, 34, 100)
    bar(log, 90, 1)
    bar(log, 91, 2)
    assert (log.intervals.count, log.intervals.first_ns, log.intervals.most_ns) == (3, 3 * S, 2 * S)
    assert log.intervals.whole_ns == (3 + 2 + 1) * S


def test_a_line_without_an_end_is_no_line() -> None:
    log = RankLog("nanogpt", None)
    log.note_lines([], "iter 10: loss 1.0, time 5.00ms, mfu [1]", S)
    assert not log.has_steps


def test_the_limit_counts_from_the_first_step() -> None:
    log = RankLog("nanogpt", 10.0)
    log.note_lines(["step 0: train loss 1.0, val loss 1.0", "tokens per iteration will be: 1"], "", 1 * S)
    assert log.due_ns() is None
    iters(log, 100, 0)
    assert log.due_ns() == 110 * S
    log.note_lines(["step 0: train loss 1.0, val loss 1.0"], "", 105 * S)
    assert log.due_ns() == 115 * S
    log.judge(115 * S - 1)
    assert LogOverdue not in map(type, log.news())


def test_what_was_skipped_may_have_been_a_step() -> None:
    log = RankLog("nanogpt", 10.0)
    log.skipped(0)
    assert log.due_ns() is None
    iters(log, 0, 1)
    log.skipped(9 * S)
    assert log.due_ns() == 19 * S


def test_a_silence_is_reported_once_and_ends_with_a_step() -> None:
    log = RankLog("nanogpt", 10.0)
    iters(log, 0, 1)
    log.judge(12 * S)
    log.judge(30 * S)
    assert [item for item in log.news() if isinstance(item, LogOverdue)] == [LogOverdue(0)]
    assert log.due_ns() is None
    iters(log, 31, 2)
    assert [type(item) for item in log.news()] == [LogStep]
    assert log.due_ns() == 41 * S


@pytest.mark.parametrize("preset", ["tqdm", "huggingface"])
def test_it_rests_while_a_bar_is_complete(preset: str) -> None:
    log = RankLog(preset, 10.0)
    for at_s, done in enumerate((1, 99, 100)):
        bar(log, at_s, done)
    assert log.due_ns() is None
    log.judge(1000 * S)
    bar(log, 1000, 0)
    assert log.due_ns() == 1010 * S


def test_a_loss_is_reported_until_it_is_finite_again() -> None:
    log = RankLog("nanogpt", None)
    iters(log, 0, 1)
    iters(log, 1, 2, 3, loss="nan")
    iters(log, 2, 4)
    iters(log, 3, 5, loss="-inf")
    bad = [item for item in log.news() if isinstance(item, BadLoss)]
    assert bad == [BadLoss(2, "nan"), BadLoss(5, "-inf")]


def test_a_minute_of_lines_without_a_step_is_noticed_with_the_preset_that_reads_them() -> None:
    log = RankLog("torchtitan", 10.0)
    assert log.steps_missing() is None
    for at_s in (0, 30, 59):
        iters(log, at_s, at_s)
        assert not log.has_missed_steps
    iters(log, 60, 60)
    assert log.has_missed_steps
    assert log.steps_missing() == StepsMissing("iter 0: loss 1.0, time 500.00ms, mfu 1%", "nanogpt")


def test_silence_before_the_first_step_is_no_output_without_one() -> None:
    """A compilation prints nothing for minutes."""
    log = RankLog("nanogpt", None)
    log.note_lines(["compiling the model... (takes a ~minute)"], "", 0)
    assert not log.has_missed_steps
    iters(log, 300, 0)
    assert not log.has_missed_steps and log.steps_missing() is None


def test_lines_that_no_preset_reads_are_quoted_by_the_last_one() -> None:
    log = RankLog("nanogpt", None)
    for at_s in range(0, 70, 10):
        log.note_lines([f"epoch {at_s} is done"], "", at_s * S)
    assert log.has_missed_steps
    assert log.steps_missing() == StepsMissing("epoch 60 is done", "")


def test_an_expression_without_an_iteration_counts_its_lines() -> None:
    """Its limit counts, and its loss is judged."""
    log = RankLog(r"loss=(?P<loss>\S+)", 10.0)
    log.note_lines(["loss=0.5"], "", S)
    assert log.due_ns() == 11 * S
    log.note_lines(["loss=nan"], "", 2 * S)
    assert BadLoss(NO_ITERATION, "nan") in log.news()
