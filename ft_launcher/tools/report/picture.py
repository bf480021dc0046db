"""Draws the report as a picture (PNG): the time by category as a bar, and cycles and faults on a line of time.

`tools/commands/report.py` calls it for `-o FILE.png`. It is the only file that needs matplotlib (the extra `observe`),
and is imported only for that.

Names that a training chose are drawn as they are, and the user's own settings of matplotlib have no effect. Colours and
patterns are those of the page (`record/ledger/palette.py`). Drawn without a window system: a `Figure` of its own, and
not `pyplot`, which would choose one.
"""

from __future__ import annotations

import io
import warnings
from typing import Any

from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ft_launcher.record.console.console_text import printable
from ft_launcher.record.ledger.palette import LIGHT, WEAK, look_of
from ft_launcher.tools.report.job_findings import JobFindings, as_text, counted

_LEAST_SHARE = 0.0005
"""Share of the time below which a category is not in the legend: it would read 0.0 %, and could not be seen in the
bar."""
_WIDTH_OF_DIGIT = 0.01
"""Width of a digit as a share of the line of time, with a margin. A cycle that is narrower than its number gets no
number, since numbers would overlap."""
_MAX_NAME = 36
"""Characters of a name in the legend, whose three columns are as wide as the bar."""


def as_png(findings: JobFindings) -> bytes:
    """Returns the picture as the bytes of a PNG, 1200 by 540 pixels."""
    # The user's settings do not apply: `text.usetex` would run programs, and a `$` in a name would begin a formula.
    with style.context(["default", {"text.parse_math": False}]), warnings.catch_warnings():
        # Warnings about letters that the font does not have.
        warnings.simplefilter("ignore", UserWarning)
        figure = Figure(figsize=(10, 4.5), dpi=120, layout="constrained")
        bar, line = figure.subplots(2, 1, height_ratios=(3, 2))
        figure.suptitle(_plain(f"Report on {', '.join(findings.run_ids) or 'a job'}", 2 * _MAX_NAME), x=0.01, ha="left")
        _draw_categories(bar, findings)
        _draw_cycles(line, findings)
        picture = io.BytesIO()
        figure.savefig(picture, format="png")
    return picture.getvalue()


def _draw_categories(axes: Axes, findings: JobFindings) -> None:
    """Draws the time by category as one bar, with a legend below it.

    Goodput is in the title: the pieces of the bar say where the time went, and the title what it was worth.
    """
    shares = findings.shares()
    left = 0.0
    for name, spent_s, share in shares:
        look = look_of(name)
        # The edge, which the slanted lines are drawn with too, tells a category from the next one of its hue.
        drawn: dict[str, Any] = {"color": LIGHT[look.hue], "edgecolor": "white"}
        if look.is_weak:
            drawn["alpha"] = WEAK
        if look.is_slanted:
            drawn["hatch"] = "//"
        piece = axes.barh(0, share * 100, left=left, **drawn)
        if share >= _LEAST_SHARE:
            piece.set_label(f"{share:.1%} {_plain(name)}, {as_text(spent_s)}")
        left += share * 100
    goodput = f"{findings.goodput:.1%} steps that count, {findings.goodput_saved:.1%} until the last checkpoint"
    axes.set_title(f"{as_text(findings.wall_s)}: {goodput}", loc="left", fontsize="medium")
    axes.set_xlim(0, 100)
    axes.set_xlabel("% of the time")
    axes.set_yticks([])
    if shares:
        axes.legend(ncols=3, fontsize="small", frameon=False, loc="upper left", bbox_to_anchor=(0, -0.25))


def _draw_cycles(axes: Axes, findings: JobFindings) -> None:
    """Draws the cycles as bars on a line of time, in a unit that suits its length, and the faults as red lines."""
    length_s = max(1e-6, findings.ended - findings.began)
    unit_s, unit = next(
        (known for known in ((86400, "days"), (3600, "hours"), (60, "minutes")) if known[0] * 3 < length_s),
        (1, "seconds"),
    )
    for cycle in findings.cycles:
        left, width = (cycle.began - findings.began) / unit_s, (cycle.ended - cycle.began) / unit_s
        axes.barh(0, width, left=left, color=LIGHT["start"], edgecolor="white")
        if width * unit_s / length_s >= _WIDTH_OF_DIGIT * (len(str(cycle.cycle)) + 1):
            axes.text(left + width / 2, 0, str(cycle.cycle), ha="center", va="center", color="white")
    for fault in findings.faults:
        axes.axvline((fault.t - findings.began) / unit_s, color=LIGHT["bad"])
    counts = f"{counted(len(findings.cycles), 'cycle')}, {counted(len(findings.faults), 'fault')} (red)"
    axes.set_title(counts, loc="left", fontsize="medium")
    axes.set_xlim(0, length_s / unit_s)
    axes.set_xlabel(unit)
    axes.set_yticks([])


def _plain(text: str, longest: int = _MAX_NAME) -> str:
    """Returns a text without control characters and halves of surrogate pairs, which no font has, cut at `longest`."""
    return printable(text).encode("utf-8", "backslashreplace").decode()[:longest]
