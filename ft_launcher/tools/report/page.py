"""Writes the report as one page of HTML that needs no other file and asks no other host. Pure.

`tools/commands/report.py` writes it for `-o FILE.html`. Sentences come from `terminal_text.py`, so page and terminal
never tell different stories; here are tables, the bar and the line of time.

The page is made for mails and tickets: one file, in a light and a dark theme. Every text is escaped, those of ranks
too, unless it is a `_Markup` that a function here has made. In addition the policy in the page's head forbids scripts,
pictures and connections.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from html import escape

from ft_launcher.record.ledger.palette import DARK, LIGHT, WEAK, look_of
from ft_launcher.tools.report import terminal_text
from ft_launcher.tools.report.advice import Advice
from ft_launcher.tools.report.job_findings import FaultFindings, JobFindings, as_text, counted

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
"""The content security policy of the page: only its own style sheet. Even if a text of a rank were not escaped, a
browser would run nothing and send nothing."""

# One style sheet, in the page itself. Words wrap anywhere: a frame of a stack or a path has no blanks.
_STYLE = """
:root { color-scheme: light dark; --text: #1b1b1b; --back: #ffffff; --faint: #d0d0d0; }
@media (prefers-color-scheme: dark) { :root { --text: #e8e8e8; --back: #161616; --faint: #444444; } }
body { color: var(--text); background: var(--back); font: 16px/1.5 system-ui, sans-serif; max-width: 60rem;
  margin: 2rem auto; padding: 0 1rem; }
.table { overflow-x: auto; }
table { border-collapse: collapse; min-width: 50%; }
th, td { text-align: left; vertical-align: top; padding: 0.2rem 0.6rem; border-bottom: 1px solid var(--faint); }
th { vertical-align: bottom; }
pre { white-space: pre-wrap; }
h1, p, td { overflow-wrap: anywhere; }
.number { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
svg { width: 100%; height: 2.5rem; margin-bottom: 0.5rem; }
.bar { display: flex; height: 2.5rem; margin-bottom: 0.5rem; }
.key { display: inline-block; width: 0.8em; height: 0.8em; margin-right: 0.5em; }
.slanted { background-image: repeating-linear-gradient(135deg, transparent 0 3px, var(--back) 3px 4px); }
"""


def as_html(findings: JobFindings, advice: Sequence[Advice]) -> str:
    """Returns the page. It has the same parts as the text, and the cycles as a picture.

    Parts about which nothing is known are left out, with their headings.
    """
    title = f"Report on {', '.join(findings.run_ids) or 'a job'}"
    parts = [
        "<!DOCTYPE html>",
        '<html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{escape(_POLICY)}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)}</title><style>{_STYLE}{_hues()}</style></head><body>",
        f"<h1>{escape(title)}</h1><p>{escape(terminal_text.verdict(findings))}</p>",
        "<h2>Time by category</h2>",
        _bar(findings),
        _categories(findings),
        *_cycles(findings),
        *_faults(findings),
    ]
    if findings.sections:
        sections = (terminal_text.of_section(section) for section in findings.sections[: terminal_text.MAX_SECTIONS])
        parts += [
            "<h2>Sections and their limits</h2>",
            _table(("section", "times", "99.9% at most", "longest", "limit", "how it fits"), sections, {1, 2, 3}),
        ]
    if findings.memory is not None:
        parts += ["<h2>State in memory</h2>"]
        parts += [f"<p>{escape(line)}.</p>" for line in terminal_text.of_memory(findings.memory)]
    if findings.slowest:
        rows = ((str(slow.rank), f"{slow.score:.2f}", str(slow.reports)) for slow in findings.slowest)
        parts += ["<h2>Slowest ranks</h2>", _table(("rank", "score", "reports"), rows, {0, 1, 2})]
    if advice:
        parts += ["<h2>Advice</h2>", _table(("about", "advice"), ((one.topic, one.text) for one in advice))]
    return "\n".join([*parts, "</body></html>"]) + "\n"


def _hues() -> str:
    """Returns the part of the style sheet with the colours of the categories, for a light and a dark theme.

    A hue is a variable of the style sheet, with another value in the dark theme, and a class of that name uses it.
    """
    light, dark = (" ".join(f"--{hue}: {colour};" for hue, colour in of.items()) for of in (LIGHT, DARK))
    lines = [f":root {{ {light} }}", f"@media (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}"]
    lines += [f".{hue} {{ fill: var(--{hue}); background-color: var(--{hue}); }}" for hue in LIGHT]
    return "\n".join([*lines, f".weak {{ opacity: {WEAK}; }}"])


def _bar(findings: JobFindings) -> str:
    """Returns the time by category as one bar: steps that count, steps in vain, and all else. A pointer on a piece
    shows its name and time."""
    pieces = []
    for name, spent_s, share in findings.shares():
        title = escape(f"{name}: {as_text(spent_s)}, {share:.1%}")
        width = f'style="width: {share:.4%}"'
        pieces.append(f'<span class="{look_of(name).classes}" {width} title="{title}"></span>')
    return f'<div class="bar" role="img" aria-label="time by category">{"".join(pieces)}</div>'


def _categories(findings: JobFindings) -> str:
    """Returns the table of the time by category. Each row has its colour in the bar."""
    rows = []
    for name, spent_s, share in findings.shares():
        key = f'<span class="key {look_of(name).classes}"></span>'
        rows.append((_Markup(key + escape(name)), as_text(spent_s), f"{share:.1%}"))
    return _table(("category", "time", "share"), rows, {1, 2})


def _cycles(findings: JobFindings) -> list[str]:
    """Returns the cycles on one line of time, with the moments of faults as red lines.

    Drawn as SVG, 1000 units wide from the first event to the last, and stretched to the page. Empty where the job has
    no length.
    """
    length_s = findings.ended - findings.began
    if length_s <= 0:
        return []
    pieces = []
    for cycle in findings.cycles:
        left, width = (
            (moment / length_s) * 1000 for moment in (cycle.began - findings.began, cycle.ended - cycle.began)
        )
        words = f"attempt {cycle.attempt}, cycle {cycle.cycle}: {as_text(cycle.ended - cycle.began)}"
        if cycle.end_reason:
            words += f", {cycle.end_reason}"
        place = f'x="{left:.2f}" y="0" width="{width:.2f}" height="40"'
        pieces.append(f'<rect class="start" {place}><title>{escape(words)}</title></rect>')
    for fault in findings.faults:
        place = f'x="{(fault.t - findings.began) / length_s * 1000 - 1:.2f}" y="0" width="2" height="40"'
        title = escape(f"{terminal_text.headline(fault)}: {as_text(fault.cost_s)}")
        pieces.append(f'<rect class="bad" {place}><title>{title}</title></rect>')
    words = f"{counted(len(findings.cycles), 'cycle')} in {as_text(length_s)}"
    if findings.faults:
        words += f", and {counted(len(findings.faults), 'fault')} (red lines)"
    label = 'role="img" aria-label="cycles and faults"'
    return [
        "<h2>Cycles</h2>",
        f'<svg viewBox="0 0 1000 40" preserveAspectRatio="none" {label}>{"".join(pieces)}</svg>',
        f"<p>{words}.</p>",
    ]


def _faults(findings: JobFindings) -> list[str]:
    """Returns the tables of the costliest faults, of faults by class, and of faults by node; empty without faults."""
    if not findings.faults:
        return []
    rows = (
        (terminal_text.headline(fault), terminal_text.costs(fault), _what(fault))
        for fault in terminal_text.costliest(findings)
    )
    classes = (
        (of_class.name, str(of_class.faults), as_text(of_class.mtbf_s), as_text(of_class.mttr_s))
        for of_class in findings.classes
    )
    nodes = ((node, str(count)) for node, count in findings.node_faults.items())
    return [
        "<h2>Costliest faults</h2>",
        _table(("fault", "cost", "what happened"), rows),
        "<h2>Faults by class</h2>",
        _table(("class", "faults", "one in", "mean recovery"), classes, {1, 2, 3}),
        "<h2>Nodes by faults</h2>",
        _table(("node", "faults"), nodes, {1}),
    ]


def _what(fault: FaultFindings) -> str:
    """Returns what happened, its likely cause where one is known, and a fold with where the ranks were."""
    what = fault.what
    if fault.hint:
        what += f"; likely: {fault.hint}"
    scene = terminal_text.scene(fault)
    if not scene:
        return what
    lines = escape("\n".join(scene))
    folded = f"<details><summary>stacks and collectives</summary><pre>{lines}</pre></details>"
    return _Markup(escape(what) + folded)


class _Markup(str):
    """A text that is HTML already. All other texts in a table are escaped.

    Only functions of this file make one, of words that they have escaped.
    """


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]], numbers: Container[int] = ()) -> str:
    """Returns a table.

    Args:
        heads: the names of the columns.
        rows: texts, which are escaped unless they are `_Markup`.
        numbers: the columns, from 0, that are aligned as numbers are.
    """
    head = "".join(_cell("th", escape(name), column in numbers) for column, name in enumerate(heads))
    body = []
    for row in rows:
        texts = (text if isinstance(text, _Markup) else escape(text) for text in row)
        cells = "".join(_cell("td", text, column in numbers) for column, text in enumerate(texts))
        body.append(f"<tr>{cells}</tr>")
    return f'<div class="table"><table><tr>{head}</tr>{"".join(body)}</table></div>'


def _cell(tag: str, markup: str, is_number: bool) -> str:
    """Returns a cell of a table; `markup` is HTML already."""
    if is_number:
        return f'<{tag} class="number">{markup}</{tag}>'
    return f"<{tag}>{markup}</{tag}>"
