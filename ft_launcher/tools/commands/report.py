"""`ft_launcher report`: says what the time of a job went to, and what its faults cost, from its journals.

`cli.py` runs it. It reads journals as a stream, prints the report, and writes the files that it is asked for;
`tools/report/` judges, in this order:

    journals -> `Collection` (what is kept of them) -> `JobFindings` (what follows) -> `Advice`
             -> text, page, JSON, picture and trace, all of the same findings

Names of files and missing packages are checked before journals are read: reading may take long, and an error that was
certain before must not come after it.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import click

from ft_launcher.record.console.console_text import answer, printable
from ft_launcher.record.events import EvidenceEvent, StacksEvent
from ft_launcher.record.journal_reader import Problems, journals_in, read_in_turn
from ft_launcher.settings.options import UsageError
from ft_launcher.tools.report import terminal_text
from ft_launcher.tools.report.advice import advise
from ft_launcher.tools.report.collection import Collection
from ft_launcher.tools.report.findings import find
from ft_launcher.tools.report.job_findings import JobFindings
from ft_launcher.tools.report.page import as_html
from ft_launcher.tools.report.trace import as_trace

_SUFFIXES = (".html", ".json", ".png")
_UNREAD = (EvidenceEvent.event, StacksEvent.event)
"""Events with the location of each rank. A report uses nothing of them, and after hangs they are most of a long
journal."""
_HINT = "Give journals, or folders that have journal.*.jsonl"
JOURNALS = click.argument("journals", nargs=-1, required=True, metavar="JOURNAL...", type=click.Path(path_type=Path))
"""The argument of all commands that read journals."""
RUN_ID = click.option("--run-id", metavar="ID", help="Takes the events of this job only.")


@click.command(
    help="Says what the time of a job went to, what its faults cost, and what could be changed. JOURNAL is a file, or "
    "a folder that is searched for journal.*.jsonl. Give the journals of all nodes and attempts of one job."
)
@JOURNALS
@click.option(
    "-o", "outputs", multiple=True, metavar="FILE", type=click.Path(path_type=Path),
    help="Writes the report to FILE.html (one page without other files), FILE.json or FILE.png. May be given again.",
)  # fmt: skip
@click.option(
    "--trace", metavar="FILE", type=click.Path(path_type=Path),
    help="Writes cycles and faults as trace events, which https://ui.perfetto.dev shows.",
)  # fmt: skip
@RUN_ID
def report(journals: tuple[Path, ...], outputs: tuple[Path, ...], trace: Path | None, run_id: str | None) -> None:
    """Prints the report to stdout, and warnings to stderr.

    Raises:
        UsageError: there is no journal, or a file cannot be read or written.
    """
    for output in outputs:
        if output.suffix not in _SUFFIXES:
            raise UsageError(
                f"-o {output}: the name must end with {', '.join(_SUFFIXES[:-1])} or .png",
                "See ft_launcher report --help",
            )
    draw = None
    if any(output.suffix == ".png" for output in outputs):
        draw = _drawing()
    collection, findings = _read(journals, run_id)
    advice = advise(findings)
    for output in outputs:
        if output.suffix == ".json":
            facts = findings.as_json() | {"advice": [suggestion.as_json() for suggestion in advice]}
            _write(output, json.dumps(facts, indent=1, allow_nan=False) + "\n")
        elif output.suffix == ".png" and draw is not None:
            _write(output, draw(findings))
        else:
            _write(output, as_html(findings, advice))
    if trace is not None:
        _write(trace, json.dumps(as_trace(collection, findings), allow_nan=False) + "\n")
    _print(terminal_text.as_lines(findings, advice))


def found_journals(paths: Sequence[Path]) -> list[list[Path]]:
    """Returns the files of each journal in the files and folders that the user names, the pieces of a journal in their
    order.

    Raises:
        UsageError: there is no journal, or a path cannot be read.
    """
    for path in paths:
        try:
            path.stat()
        except OSError as error:
            raise UsageError(f"{path}: {error.strerror}", _HINT) from None
    journals = journals_in(paths)
    if not journals:
        raise UsageError(f"{_named(paths)}: no journal.*.jsonl", _HINT)
    return journals


def _read(paths: Sequence[Path], run_id: str | None) -> tuple[Collection, JobFindings]:
    """Reads all journals. Returns what was kept of them, and the findings. Prints warnings.

    One journal is read after the other, as a stream: only the `Collection` is kept.

    Args:
        paths: of files, and of folders that are searched.
        run_id: only events of this job; None: of all jobs.

    Raises:
        UsageError: no event was found.
    """
    files = [pieces[-1] for pieces in found_journals(paths)]
    reading, collection = Problems(), Collection()
    # What is kept has no reference cycles. Searching for them again and again takes a third of the time of a large
    # report. Once, at the end, it takes half a second, which `freeze` saves.
    gc.disable()
    try:
        for entry in read_in_turn(paths, reading, run_id, _UNREAD):
            collection.add(entry)
    finally:
        gc.freeze()
        gc.enable()
    findings = find(collection)
    if findings is None:
        raise _nothing(paths, reading, run_id)
    for line in [*reading.warnings(), *_warnings(files, collection, findings, run_id)]:
        answer(line)
    return collection, findings


def _nothing(paths: Iterable[Path], reading: Problems, run_id: str | None) -> UsageError:
    """Returns the error that says why no event was found."""
    if reading.unreadable:
        return UsageError(reading.warnings()[0], _HINT)
    if reading.not_events:
        return UsageError(f"{_named(paths)}: this is no journal, it has no line that is an event", _HINT)
    if run_id is not None:
        return UsageError(f"{_named(paths)}: no event of a job {run_id!r}", "Leave out --run-id to take all jobs")
    return UsageError(f"{_named(paths)}: no events", _HINT)


def _warnings(files: Iterable[Path], collection: Collection, findings: JobFindings, run_id: str | None) -> list[str]:
    """Returns warnings about files without events, several run ids, and a missing ledger."""
    lines = []
    known = {launch.source for launch in collection.launches}
    if run_id is None:
        lines = [f"{file} has no event" for file in files if str(file) not in known]
    if len(findings.run_ids) > 1:
        named = ", ".join(findings.run_ids[:5])
        lines.append(
            f"{len(findings.run_ids)} run ids ({named}) are taken as attempts of one job; --run-id ID takes one"
        )
    if not findings.seconds.keys() - {"unknown", "reschedule"}:
        lines.append("the journals have no event ledger, so nothing is known of the time")
    return lines


def _named(paths: Iterable[Path]) -> str:
    """Returns the paths in words."""
    return ", ".join(str(path) for path in paths)


def _drawing() -> Callable[[JobFindings], bytes]:
    """Returns the function that draws a report as a picture. Called before journals are read, so that a missing package
    is reported at once.

    Raises:
        UsageError: matplotlib is not installed.
    """
    try:
        from ft_launcher.tools.report.picture import as_png
    except ImportError as error:
        raise UsageError(
            f"a picture needs matplotlib, which cannot be imported: {error}", "pip install 'ft-launcher[observe]'"
        ) from None
    return as_png


def _write(file: Path, contents: str | bytes) -> None:
    """Writes a file.

    Raises:
        UsageError: it cannot be written.
    """
    if isinstance(contents, str):
        # Words of a rank may hold halves of surrogate pairs, which UTF-8 does not have.
        contents = contents.encode("utf-8", "backslashreplace")
    try:
        file.write_bytes(contents)
    except OSError as error:
        raise UsageError(f"{file} cannot be written: {error.strerror}", "Give another file") from None


def _print(lines: Iterable[str]) -> None:
    """Prints lines. A reader of the pipe that has enough, such as `head`, ends the printing without an error.

    Raises:
        UsageError: standard output cannot be written.
    """
    encoding = sys.stdout.encoding or "utf-8"
    try:
        for line in lines:
            # Some lines hold words of ranks, and the terminal may not have their letters.
            print(printable(line).encode(encoding, "backslashreplace").decode(encoding))
        sys.stdout.flush()
    except OSError as error:
        # Without this, what is left in the buffer would fail again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        # The reader of a pipe, `head` for one, may have enough.
        if not isinstance(error, BrokenPipeError):
            raise UsageError(f"standard output cannot be written: {error.strerror}", "Give another place") from None
