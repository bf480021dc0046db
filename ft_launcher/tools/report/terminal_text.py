"""Writes the report as text for a terminal: a verdict in plain words, the time by category, faults, advice. Pure.

`tools/commands/report.py` prints it, and `page.py` takes its sentences from here. Nothing is judged here: `findings.py`
and `advice.py` do that.

The order is that of a reader who may stop after any line: how it went, what to change, where the time went, the
costliest faults with their phases, faults by class and node, sections with their limits, slow ranks. A part about which
nothing is known is left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ft_launcher.tools.report.advice import Advice
from ft_launcher.tools.report.job_findings import (
    FaultFindings,
    JobFindings,
    MemoryFindings,
    as_text,
    counted,
    moment,
)
from ft_launcher.tools.report.section_durations import WatchedSection
from rank_monitor.contract.memory_room import size_in_words

COSTLIEST = 5
"""Faults that are listed with the phases of their recovery."""
MAX_SECTIONS = 16
"""Sections that are listed."""
_SHOWN_S = 0.0005
"""Seconds of a phase that is shown; a shorter one would read 0 ms."""
_RANK_HOURS_S = 36.0
"""Rank-seconds from which on rank-hours are written: less is below a hundredth of an hour."""


def as_lines(findings: JobFindings, advice: Sequence[Advice]) -> list[str]:
    """Returns the lines of the report. Texts of ranks are in them unchanged: the caller escapes control characters."""
    lines = [verdict(findings), *of_advice(advice), "", "Time by category"]
    lines += [f"  {name:<24} {as_text(spent_s):>14} {share:>7.1%}" for name, spent_s, share in findings.shares()]
    lines += _of_faults(findings)
    lines += _of_sections(findings)
    if findings.memory is not None:
        lines += ["", "State in memory", *(f"  {line}" for line in of_memory(findings.memory))]
    if findings.slowest:
        lines += ["", "Slowest ranks (1 is the fastest)"]
        lines += [
            f"  rank {slow.rank}: {slow.score:.2f} in {counted(slow.reports, 'report')}" for slow in findings.slowest
        ]
    return lines


def of_advice(advice: Sequence[Advice]) -> list[str]:
    """Returns the lines of the advice, each with its topic and what it may gain; empty without advice."""
    if not advice:
        return []
    lines = ["", "Advice"]
    for suggestion in advice:
        worth = ""
        if suggestion.worth:
            worth = f" ({suggestion.worth})"
        lines.append(f"  {suggestion.topic}{worth}: {suggestion.text}")
    return lines


def verdict(findings: JobFindings) -> str:
    """Returns three sentences on how the job went: its time and goodput, its faults, its end.

    The end is that of the last attempt. A journal that ends without one is of a job that still runs, or of a launcher
    that was killed: both look the same from here.
    """
    nodes = counted(findings.node_count, "node")
    attempts = counted(findings.attempts, "attempt")
    sentences = [
        f"Ran {as_text(findings.wall_s)} on {nodes} in {attempts}; {findings.goodput:.1%} of the time were steps that "
        f"count, {findings.goodput_saved:.1%} until the last checkpoint."
    ]
    if findings.faults:
        kinds = Counter(fault.kind for fault in findings.faults).most_common()
        named = ", ".join(f"{kind} {count}" for kind, count in kinds)
        sentences.append(f"{counted(len(findings.faults), 'fault')} cost {as_text(findings.cost_s)} ({named}).")
    else:
        sentences.append("No fault is known.")
    if findings.exit_code is None:
        sentences.append("The journal has no end: the job runs, or its launcher was killed.")
    elif findings.exit_code and not findings.reason:
        sentences.append(f"It ended with exit code {findings.exit_code}.")
    elif findings.exit_code:
        sentences.append(f"It ended with exit code {findings.exit_code}: {findings.reason.rstrip('.')}.")
    else:
        sentences.append("It succeeded.")
    return " ".join(sentences)


def costliest(findings: JobFindings) -> list[FaultFindings]:
    """Returns the faults that cost the most, the costliest first."""
    return sorted(findings.faults, key=lambda fault: (-fault.cost_s, fault.t))[:COSTLIEST]


def headline(fault: FaultFindings) -> str:
    """Returns when a fault was written down, who failed and how, in one line.

    An example: "2026-02-03 12:34:56 exception of rank 5 on node1, cycle 3, attempt 1 (unknown)".
    """
    who = fault.kind
    if who == "unknown":
        who = "a fault of unknown kind"
    if fault.rank is not None:
        who += f" of rank {fault.rank}"
    if fault.node:
        who += f" on {fault.node}"
    if fault.cycle is not None:
        who += f", cycle {fault.cycle}"
    return f"{moment(fault.t)} {who}, attempt {fault.attempt} ({fault.fault_class})"


def scene(fault: FaultFindings) -> list[str]:
    """Returns where the ranks were, in lines: the traceback or the stack of the failed rank, then the other ranks.

    Words of ranks, as the console showed them at the fault.
    """
    return [*(f"| {line}" for line in fault.detail), *(f"also: {line}" for line in fault.others)]


def of_all_ranks(rank_s: float) -> str:
    """Returns rank-seconds in the unit that gives a readable number."""
    if rank_s < _RANK_HOURS_S:
        return f"{rank_s:.3g} rank-seconds"
    return f"{rank_s / 3600:.3g} rank-hours"


def costs(fault: FaultFindings) -> str:
    """Returns what a fault cost, with the phases of its recovery, in one line.

    The cost is the recovery and the steps that were done in vain. All ranks wait meanwhile, so rank-seconds are beside
    it, where the number of ranks is known.
    """
    spent = [f"{phase} {as_text(spent_s)}" for phase, spent_s in fault.phases.items() if spent_s >= _SHOWN_S]
    if fault.lost_s >= _SHOWN_S:
        spent.append(f"lost progress {as_text(fault.lost_s)}")
    of_ranks = ""
    if fault.ranks:
        of_ranks = f", {of_all_ranks(fault.rank_s)}"
    if fault.steps_lost is not None:
        of_ranks += f", {counted(fault.steps_lost, 'step')} lost"
    return f"{as_text(fault.cost_s)}{of_ranks}: {', '.join(spent) or 'no phase is known'}"


def of_memory(memory: MemoryFindings) -> list[str]:
    """Returns the lines about state in memory: where cycles went on from and what that cost, then the saves."""
    starts = [f"{counted(count, 'cycle')} from {tier}" for tier, count in memory.loads.items() if tier != "none"]
    others = memory.loads.get("none", 0)
    if others:
        starts.append(f"{counted(others, 'cycle')} from no state in memory")
    lines = [f"went on: {', '.join(starts) or 'not known'}; {counted(memory.steps_lost, 'step')} lost"]
    if memory.refused:
        lines[0] += f"; {counted(memory.refused, 'generation')} not used"
    text = f"{counted(memory.saves, 'save')} took {as_text(memory.cost_s)}"
    if memory.share is not None:
        text += f", at most {memory.share:.1%} of the time of a cycle beside its first save"
    if memory.failed:
        text += f"; {memory.failed:,} failed"
    if memory.size:
        text += f"; the last has {size_in_words(memory.size)}"
    return [*lines, text]


def of_section(section: WatchedSection) -> tuple[str, str, str, str, str, str]:
    """Returns a section in words: name, occurrences, 99.9th percentile, longest, limit, and how the limit fits."""
    p999, limit, fit = "", "none", ""
    if section.p999_s is not None:
        p999 = as_text(section.p999_s)
    if section.limit_s is not None:
        fit = section.fit.value
        limit = as_text(section.limit_s)
        if section.learned:
            limit += " (learned)"
        if section.fired:
            limit += f", fired in {counted(section.fired, 'cycle')}"
    return section.name, f"{section.times:,}", p999, as_text(section.max_s), limit, fit


def _of_sections(findings: JobFindings) -> list[str]:
    """Returns the lines about sections; empty where none is known.

    A training may have hundreds; the list begins with those that have limits (`SectionLimits.watched`).
    """
    lines = []
    for section in findings.sections[:MAX_SECTIONS]:
        name, times, p999, longest, limit, fit = of_section(section)
        words = [f"{times} times", p999 and f"99.9% at most {p999}", f"longest {longest}", f"limit {limit}", fit]
        lines.append(f"  {name}: {', '.join(word for word in words if word)}")
    if lines:
        lines = ["", "Sections and their limits (of one rank of each node)", *lines]
    return lines


def _of_faults(findings: JobFindings) -> list[str]:
    """Returns the lines about faults: the costliest in full, then counts by class and by node; empty without faults."""
    if not findings.faults:
        return []
    lines = ["", "Costliest faults"]
    for fault in costliest(findings):
        lines += [f"  {headline(fault)}", f"    {costs(fault)}"]
        if fault.what:
            lines.append(f"    {fault.what}")
        if fault.hint:
            lines.append(f"    likely: {fault.hint}")
        lines += [f"    {line}" for line in scene(fault)]
    lines += ["", "Faults by class"]
    for of_class in findings.classes:
        lines.append(
            f"  {of_class.name}: {counted(of_class.faults, 'fault')}, one in {as_text(of_class.mtbf_s)}, "
            f"mean recovery {as_text(of_class.mttr_s)}"
        )
    if findings.node_faults:
        lines += ["", "Nodes by faults"]
        lines += [f"  {node}: {count}" for node, count in list(findings.node_faults.items())[:COSTLIEST]]
    return lines
