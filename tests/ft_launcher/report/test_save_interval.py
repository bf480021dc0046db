"""How often to save, by the findings on a job so far."""

from __future__ import annotations

import pytest

from ft_launcher.report.job_findings import JobFindings, Saves
from ft_launcher.report.save_interval import choose
from tests.ft_launcher.report.test_advice import findings


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
def test_how_often_to_save(known: JobFindings | None, interval_s: float, said: str) -> None:
    chosen = choose(known)
    assert round(chosen.interval_s, 1) == interval_s, chosen
    assert said in chosen.reason
