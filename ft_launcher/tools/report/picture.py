"""The report as a picture (PNG): the time by category as a bar, and the cycles and faults on a line of time.

`tools/commands/report.py` calls it. The only file that needs matplotlib, of the extra `observe`. Names that a training
chose are drawn as they are: nothing in them is a formula, and the settings of matplotlib that a user has do not matter.
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
"""Of the time: a smaller category would be in the legend with 0.0 %, and could not be seen."""
_WIDTH_OF_DIGIT = 0.01
"""Of the line of time, with a margin: numbers of cycles that are shorter would overlap, and are left out."""
_MAX_NAME = 36
"""Characters: three columns of the legend are as wide as the bar."""


def as_png(findings: JobFindings) -> bytes:
    """Returns the picture."""
    # Not the user's settings: `text.usetex` would run programs, and a `$` in a name would begin a formula.
    with style.context(["default", {"text.parse_math": False}]), warnings.catch_warnings():
        # Of letters that the font does not have.
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
    """A text without control characters and halves of surrogate pairs, which no font has, and not too long."""
    return printable(text).encode("utf-8", "backslashreplace").decode()[:longest]
