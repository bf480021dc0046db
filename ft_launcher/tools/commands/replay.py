"""`ft_launcher replay`: makes the decisions in a job's journals again, and says which would be others now.

`cli.py` runs it. It reads journals as streams and prints; `tools/replay/` decides.

The events of decisions have what was known at the time beside what was decided. The same code of this release is given
the same facts. So a user sees what an upgrade would change, and a developer whether a change of the policy does what it
should, on journals of real jobs.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import click

from ft_launcher.record.console.console_text import answer, printable
from ft_launcher.record.journal_reader import JournalEntry, Problems, journals_in, read_journal
from ft_launcher.tools.commands.report import JOURNALS, RUN_ID, found_journals
from ft_launcher.tools.replay.replay import Replay

DIFFERENT = 1
"""The exit code where a decision would be another one, as for `diff`."""


@click.command(
    help="Makes the decisions in journals again: what failed, what follows, how a restart counts, what ranks that "
    "restart in process do, changes of health. JOURNAL is a file, or a folder that is searched for journal.*.jsonl. "
    "Exits with 1 if one would be another now."
)
@JOURNALS
@RUN_ID
def replay(journals: tuple[Path, ...], run_id: str | None) -> None:
    """Prints the findings to stdout and warnings to stderr.

    Raises:
        UsageError: there is no journal.
        SystemExit: with 1 where a decision would be another one now.
    """
    found_journals(journals)
    found, findings = decide_again(journals, run_id)
    for line in findings.warnings():
        answer(line)
    for line in as_lines(found, findings):
        print(printable(line))
    if found.differences:
        sys.exit(DIFFERENT)


def decide_again(paths: Iterable[Path], run_id: str | None = None) -> tuple[Replay, Problems]:
    """Returns the replay of all journals in files and folders, and what was wrong with the files. Each journal is
    replayed by itself.

    Args:
        paths: of files, and of folders that are searched.
        run_id: only events of this job; None: of all jobs.
    """
    found, findings = Replay(), Problems()
    for pieces in journals_in(paths):
        # Read file by file, so that source and line of an event name where it is.
        entries = itertools.chain.from_iterable(read_journal([piece], findings) for piece in pieces)
        found.add_journal(_of_job(entries, run_id), str(pieces[-1]))
    found.finish()
    return found, findings


def as_lines(found: Replay, findings: Problems) -> list[str]:
    """Returns the findings in words: first the differences, then what was the same, then what was not decided again."""
    lines = [line for difference in found.differences for line in difference.lines()]
    if found.same:
        lines.append(f"decided as then: {_counted(found.same.items())}")
    elif not found.differences:
        lines.append("nothing was decided again")
    for (what, reason), count in sorted(found.left_out.items()):
        lines.append(f"not decided again: {_counted([(what, count)])}: {reason}")
    if findings.cut:
        lines.append(f"cut off at the end of a file: {_counted([('line', findings.cut)])}")
    return lines


def _of_job(entries: Iterable[JournalEntry], run_id: str | None) -> Iterator[JournalEntry]:
    """Returns the events of one job; all events where `run_id` is None."""
    return (entry for entry in entries if run_id is None or entry.run_id == run_id)


def _counted(found: Iterable[tuple[str, int]]) -> str:
    """Returns names with their counts, in words."""
    return ", ".join(f"{count} x {what}" for what, count in sorted(found))
