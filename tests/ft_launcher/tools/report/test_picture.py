"""The picture: it is drawn whatever the texts of ranks and the settings of matplotlib are."""

from __future__ import annotations

import pytest

from ft_launcher.tools.report.job_findings import JobFindings
from tests.ft_launcher.tools.report.lines import NODE_A, NODE_B, begins, end, fault, found, part, start

pytest.importorskip("matplotlib", reason="needs matplotlib, of the extra observe")

HOSTILE = "$\\frac{1}{$ \ud800\x1b[2J<b>%s{0}_^ \u4e2d"


def of_hostile_names() -> JobFindings:
    return found(
        [
            start(0, HOSTILE, HOSTILE),
            begins(1, 0),
            fault(5, 0, kind=HOSTILE, what=HOSTILE),
            part(0, 0, 20, seconds={f"custom:{HOSTILE}{number}": 0.5 for number in range(20)} | {HOSTILE: 4.0}),
            end(20, 80),
        ]
    )


@pytest.mark.parametrize(
    "findings",
    [found(NODE_A, NODE_B), found([start(0)]), found([start(0), part(0, 0, 9)]), of_hostile_names()],
    ids=["two nodes", "no time", "no cycle", "hostile names"],
)
def test_it_is_a_picture(findings: JobFindings, capsys: pytest.CaptureFixture[str]) -> None:
    from ft_launcher.tools.report.picture import as_png

    assert as_png(findings).startswith(b"\x89PNG\r\n")
    assert capsys.readouterr() == ("", "")


def test_settings_of_the_user_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    import matplotlib

    from ft_launcher.tools.report.picture import as_png

    monkeypatch.setitem(matplotlib.rcParams, "text.usetex", True)
    assert as_png(found(NODE_A, NODE_B)).startswith(b"\x89PNG\r\n")


def test_cycles_have_their_moments() -> None:
    cycles = found(NODE_B, NODE_A).cycles
    assert [(known.attempt, known.cycle, known.began, known.ended) for known in cycles] == [
        (1, 0, 105, 130),
        (1, 1, 135, 161),
        (2, 0, 205, 231),
    ]
