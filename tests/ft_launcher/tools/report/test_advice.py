"""Advice: its numbers by hand, and none without what it is made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from ft_launcher.tools.report.advice import Advice, advise, best_interval_s, choose_save_interval
from ft_launcher.tools.report.job_findings import FaultFindings, JobFindings, Saves
from ft_launcher.tools.report.section_durations import WatchedSection
from ft_launcher.tools.report.spares import Spares


def findings(
    faults: int, saves: Saves | None, sections: Sequence[WatchedSection] = (), **seconds: float
) -> JobFindings:
    seconds = seconds or {"step": 36000.0}
    wall_s = sum(seconds.values())
    one = FaultFindings("exit", "unknown", 0, "a", 0.0, 1, 0, False, -1, "", "", {}, 1.0, 0.0, 1, 1.0)
    mtbf: dict[str, Any] = {}
    if faults:
        mtbf = {"faults": [one] * faults, "mtbf_s": wall_s / faults}
    known = {
        "run_ids": ["job"],
        "nodes": ["a"],
        "node_count": 1,
        "attempts": 1,
        "ranks": 1,
        "began": 0.0,
        "ended": wall_s,
    }
    times = {"exit_code": 0, "reason": "", "wall_s": wall_s, "seconds": seconds, "goodput": 1.0, "goodput_saved": 1.0}
    return JobFindings(**known, **times, steps=1, saves=saves, sections=sections, **mtbf)


def only(of: JobFindings) -> Advice:
    (advice,) = advise(of)
    return advice


@pytest.mark.parametrize(
    ("save_s", "mtbf_s", "best_s"),
    [(2.0, 10000.0, 198.0), (50.0, 100.0, 50.0), (30.0, 86400.0, 2246.8), (200.0, 100.0, 0.0), (500.0, 100.0, 0.0)],
)
def test_young_and_daly(save_s: float, mtbf_s: float, best_s: float) -> None:
    assert best_interval_s(save_s, mtbf_s) == pytest.approx(best_s, abs=0.05)


@pytest.mark.parametrize(
    ("used_s", "judged"), [(50.0, "more often than"), (300.0, "in the range"), (900.0, "less often than")]
)
def test_how_often_to_save(used_s: float, judged: str) -> None:
    # M = 36000 / 4 = 9000; sqrt(2 * 5 * 9000) - 5 = 295; the error of four faults is one half.
    advice = only(findings(4, Saves(10, 5.0, used_s)))
    numbers = {name: round(number, 1) for name, number in advice.numbers.items()}
    assert (numbers["best_s"], numbers["low_s"], numbers["high_s"]) == (295.0, 207.1, 362.4)
    assert "save every 4 min 55 s" in advice.text and "error of 50%" in advice.text
    assert judged in advice.text


@pytest.mark.parametrize(("faults", "said"), [(1, "one fault is too few"), (2, "2 faults are too few")])
def test_few_faults_name_no_interval(faults: int, said: str) -> None:
    advice = only(findings(faults, Saves(10, 5.0, 300.0)))
    assert said in advice.text and "save every" not in advice.text
    assert "best_s" not in advice.numbers


def test_a_checkpoint_that_takes_longer_than_the_time_between_faults() -> None:
    advice = only(findings(360, Saves(10, 250.0, 300.0)))
    assert "takes too long" in advice.text


@pytest.mark.parametrize(
    "of", [findings(0, Saves(9, 5.0, 300.0)), findings(9, None), findings(9, Saves(9, 0.0, 300.0))]
)
def test_without_evidence_no_advice(of: JobFindings) -> None:
    assert advise(of) == []


@pytest.mark.parametrize(
    ("category", "said"),
    [("data", "waited for data"), ("custom:upload", "its section upload"), ("of_a_later_release", "does not know")],
)
def test_the_largest_loss(category: str, said: str) -> None:
    advice = only(findings(0, None, step=80.0, stop=5.0, **{category: 15.0}))
    assert advice.text.startswith(f"most of the time that was no step is {category}, 15.0 s (15.0%)")
    assert said in advice.text


def test_a_loss_that_is_small() -> None:
    assert advise(findings(0, None, step=99.5, data=0.5)) == []


def watched(limit_s: float | None, fired: int = 0, name: str = "step", times: int = 41000) -> Sequence[WatchedSection]:
    return [WatchedSection(name, times, 1.4, 2.4, limit_s, False, fired)]


@pytest.mark.parametrize(
    ("sections", "text"),
    [
        (
            watched(60.0),
            "the limit of 1 min is long; 12.0 s would never have fired in 41,000 steps, of which the longest took "
            "2.4 s: a hang would be seen 48.0 s sooner",
        ),
        (
            watched(60.0, fired=2, name="save", times=312),
            "the limit of 1 min is long; 12.0 s would never have fired in the 312 times that the section was open, of "
            "which the longest took 2.4 s: a hang would be seen 48.0 s sooner. The limit fired in 2 cycles",
        ),
        (
            watched(3.0, fired=1),
            "the limit of 3.0 s is tight: in 41,000 steps the longest took 2.4 s; 12.0 s is safer. The limit fired in "
            "1 cycle: look whether these were hangs",
        ),
        (
            watched(None),
            "no limit watches it; 12.0 s would never have fired in 41,000 steps, of which the longest took 2.4 s",
        ),
        (
            [*watched(60.0, name="printed step"), *watched(None)],
            "the limit of 1 min is long; 12.0 s would never have fired in 41,000 printed steps, of which the longest "
            "took 2.4 s: a hang would be seen 48.0 s sooner",
        ),
        (
            [*watched(None, name="printed step"), *watched(None)],
            "no limit watches it; 12.0 s would never have fired in 41,000 printed steps, of which the longest took "
            "2.4 s",
        ),
    ],
    ids=["long", "long and fired", "tight", "no limit", "printed", "printed and no limit"],
)
def test_limits(sections: Sequence[WatchedSection], text: str) -> None:
    advice = only(findings(0, None, sections))
    topic = f"limit of section {sections[0].name}"
    if sections[0].name == "printed step":
        topic = "limit from one printed step to the next (--ft-watch-log-timeout)"
    assert (advice.topic, advice.text) == (topic, text)
    assert (advice.numbers["max_s"], advice.numbers["proposed_s"]) == (2.4, 12.0)


@pytest.mark.parametrize(
    "sections",
    [watched(12.0), watched(60.0, times=99), watched(None, name="data"), ()],
    ids=["fits", "too few", "no limit and no step", "nothing seen"],
)
def test_no_advice_on_limits(sections: Sequence[WatchedSection]) -> None:
    assert advise(findings(0, None, sections)) == []


def with_spares(losses: int, saved_rank_h: float, by_spare: int = 0, idle_rank_h: float = 0.0) -> Advice | None:
    """What is said of ten days on 8 nodes of 8 ranks."""
    ran_s = 10 * 86400.0
    known = Spares(
        losses=losses,
        by_spare=by_spare,
        mtbf_s=ran_s / losses if losses else None,
        back_s=5400.0 if losses > by_spare else None,
        saved_rank_s=saved_rank_h * 3600,
        cost_rank_s=8 * ran_s,
        idle_rank_s=idle_rank_h * 3600,
        active=1 - idle_rank_h / 17280,
        ran_s=ran_s,
    )
    suggestions = advise(replace(findings(0, None), spares=known))
    if not suggestions:
        return None
    (advice,) = suggestions
    assert advice.topic == "spares"
    return advice


@pytest.mark.parametrize(
    ("losses", "saved_rank_h", "text"),
    [
        (
            1,
            96.0,
            "A node was lost 1 time in 10 d; without a spare as many nodes ran again after 1 h 30 min. One more spare "
            "would have saved 96 rank-hours, and cost 1,920 rank-hours: so few losses do not say whether it pays",
        ),
        (
            4,
            384.0,
            "A node was lost 4 times in 10 d, one in 2 d 12 h (0.4 a day); without a spare as many nodes ran again "
            "after 1 h 30 min. One more spare would have saved 384 rank-hours, and cost 1,920 rank-hours: it does not "
            "pay",
        ),
    ],
)
def test_a_spare_beside_its_cost(losses: int, saved_rank_h: float, text: str) -> None:
    advice = with_spares(losses, saved_rank_h)
    assert advice is not None and advice.text == text


@pytest.mark.parametrize(
    ("losses", "saved_rank_h", "judged"),
    [
        (2, 9999.0, "do not say whether it pays"),
        (16, 1500.0, "it does not pay"),  # at most 1875
        (16, 1600.0, "an error of 25%, it cannot be said whether it pays"),
        (16, 2500.0, "it cannot be said whether it pays"),
        (16, 2600.0, "it pays"),  # at least 1950
    ],
)
def test_whether_a_spare_pays(losses: int, saved_rank_h: float, judged: str) -> None:
    advice = with_spares(losses, saved_rank_h)
    assert advice is not None and advice.text.endswith(judged)


def test_spares_that_waited() -> None:
    advice = with_spares(1, 0.0, by_spare=1, idle_rank_h=1728.0)
    assert advice is not None
    assert "cost 1,728 rank-hours, and took 1 place" in advice.text
    assert "steps that count were 90.0% of the time of all ranks, instead of 100.0%" in advice.text
    assert advice.numbers["goodput_allocated"] == pytest.approx(0.9)
    unused = with_spares(0, 0.0, idle_rank_h=1728.0)
    assert unused is not None
    assert unused.text.endswith("No node was lost in 10 d, so less than one in 3 d 8 h")


def test_without_losses_and_spares_nothing_is_said_of_them() -> None:
    assert with_spares(0, 0.0) is None


# How often to save, by the findings on a job so far.


def after(faults: int, hours: float, save_s: float | None) -> JobFindings:
    saves = None
    if save_s is not None:
        saves = Saves(10, save_s, 600.0)
    return findings(faults, saves, step=hours * 3600)


@pytest.mark.parametrize(
    ("known", "interval_s", "said"),
    [
        (None, 1800.0, "30 min, the first value: nothing is known of the job yet"),
        (after(0, 10, None), 1800.0, "the first value: no save has been measured yet"),
        (after(9, 10, 0.0), 1800.0, "the first value: no save has been measured yet"),
        (
            after(2, 10, 5.0),
            1800.0,
            "the first value: 2 faults so far, too few to say how often to save; a save takes 5.0 s",
        ),
        (after(1, 10, 3000.0), 3000.0, "50 min, the first value: 1 fault so far"),
        # M = 36000 / 4; sqrt(2 * 5 * 9000) - 5 = 295
        (
            after(4, 10, 5.0),
            295.0,
            "4 min 55 s, by Young and Daly: a save takes 5.0 s, and 4 faults came one in 2 h 30 min, with an error of "
            "50%: 4 min 55 s",
        ),
        (after(100, 10, 0.1), 60.0, "8.4 s, and not below 1 min"),
        (after(100, 10, 200.0), 200.0, "2 min 59 s, and not below 3 min 20 s"),
        (after(3, 30000, 60.0), 14400.0, "18 h 14 min, and not above 4 h"),
        (after(3, 30000, 20000.0), 20000.0, "and not above 5 h 33 min"),
    ],
)
def test_the_interval_that_is_chosen(known: JobFindings | None, interval_s: float, said: str) -> None:
    chosen = choose_save_interval(0, known)
    assert round(chosen.interval_s, 1) == interval_s, chosen
    assert said in chosen.reason
