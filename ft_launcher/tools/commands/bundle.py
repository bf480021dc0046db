"""`ft_launcher bundle`: writes one file with what other people need to look at an incident, and only what may be passed
on.

`cli.py` runs it. It reads journals as streams, asks a running job where its ranks are, and writes a zip file that
appears under its name only when it is complete. `tools/bundle/` decides what may be in it.

1. RUN is a path, or the name of a running job. A running job is asked for its status, its stacks and its journal.
2. Each line of each journal passes `tools/bundle/allowed.py`, which drops what must not leave the user's site. What is
   left goes into a slice in the zip file, and is added up in an `Incident`.
3. The page and the stacks are made of the `Incident`, last, when all events are known.

The journal of a long job is larger than a mail takes. So a slice has the begin of the journal, with versions and
settings, and its end, with the incident; the middle is left out, and the page says how many events that are.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import time
import zipfile
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from ft_launcher import __version__
from ft_launcher.record.console.console_text import answer, printable
from ft_launcher.record.journal_reader import Problems, journals_in, read_journal
from ft_launcher.settings.options import UsageError
from ft_launcher.tools.bundle import allowed
from ft_launcher.tools.bundle.incident import Incident, page, stacks
from ft_launcher.tools.commands.running_jobs import NoAnswerError, RunningJob, running_job

_MAX_BYTES = 64 << 20
"""Bytes of all journals in a bundle before they are compressed. They become some 5 MB, which a mail takes."""
_MAX_JOURNALS = 1024
"""Journals of which a slice is in the bundle."""
_SHARE_OF_HEAD = 8
"""Of a slice, one part in so many is for the begin of a journal: the start of the job and of its first cycles."""
_PAGE = "incident.md"
"""The page that its reader opens first."""
_NO_TEXTS = "without texts of ranks, users and commands (--with-texts)"
_TEXTS = "WITH texts of ranks, users and commands, which may hold anything: read them before passing this on"


@click.command(
    help="Writes one file with what others need to look at an incident: a page to read first, stacks, collectives, "
    "health, versions, and a slice of the journals. RUN is a file, a folder that is searched for journal.*.jsonl, or "
    "the name or run id of a job of this user on this host, or its beginning. Only what may be passed on is in it."
)
@click.argument("run", metavar="RUN")
@click.option("-o", "output", required=True, metavar="FILE.zip", type=click.Path(path_type=Path), help="The file.")
@click.option("--force", is_flag=True, help="Replaces the file if it exists.")
@click.option(
    "--with-texts", is_flag=True,
    help="Adds messages of exceptions and other texts in free words. They may hold secrets: read them first.",
)  # fmt: skip
def bundle(run: str, output: Path, force: bool, with_texts: bool) -> None:
    """Writes the file and prints its name.

    Raises:
        UsageError: the file exists or cannot be written, RUN has no journal, or RUN means several running jobs.
        SystemExit: with 4 where RUN is neither a file nor a running job, with 5 where it may be a job whose launcher
            does not answer.
    """
    if output.exists() and not force:
        raise _exists(output)
    incident, findings, paths, run_id = Incident(), Problems(), [Path(run)], None
    if not Path(run).exists():
        nobody = f"{run} is no file, and no job of this user with such a name or run id runs on this host"
        paths, run_id = _ask(running_job(run, nobody), incident)
    with _written_at_once(output, force) as file, zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        contents = list(_journals(archive, paths, run_id, incident, findings, with_texts))
        if run_id is None and not contents:
            raise UsageError(f"{run} has no journal", "Give a file or folder with journal.*.jsonl")
        if incident.status:
            archive.writestr("status.json", json.dumps(incident.status, indent=1))
            contents.append(("status.json", "what the job said of itself"))
        found = stacks(incident)
        if found:
            archive.writestr("stacks.txt", found)
            contents.append(("stacks.txt", "where ranks were: main threads, the innermost frame first"))
        archive.writestr(_PAGE, page(incident, time.time(), __version__, contents))
    for line in findings.warnings():
        answer(line)
    print(printable(f"{output}: {output.stat().st_size / 1e6:.1f} MB, {_TEXTS if with_texts else _NO_TEXTS}"))


def _ask(job: RunningJob, incident: Incident) -> tuple[list[Path], str]:
    """Asks a running job where its ranks are. Returns the folder of its journal, if the journal has a file, and its run
    id.

    A job that ends meanwhile answers nothing more, which is no error. Of a launcher that stops meanwhile a line on
    stderr says what the file lacks.

    Args:
        job: that answers at its socket.
        incident: gets the answers, as far as they may be passed on.
    """
    incident.status = allowed.of_status(job.status)
    paths: list[Path] = []
    with _missing("where the ranks are"):
        incident.live, incident.collectives = allowed.of_stacks(job.ask("/stacks"))
    with _missing("the journal"):
        path = job.ask("/journal").get("path")
        if isinstance(path, str):
            paths.append(Path(path).parent)
    return paths, str(job.status.get("run_id", ""))


@contextlib.contextmanager
def _missing(what: str) -> Iterator[None]:
    """Returns a context in which a job may have ended, or has no rank that runs. If its launcher does not answer, a
    line on stderr says that the bundle lacks `what`."""
    try:
        yield
    except NoAnswerError as error:
        answer(f"{error}: the bundle lacks {what}")
    except OSError:
        pass


def _journals(
    archive: zipfile.ZipFile,
    paths: list[Path],
    run_id: str | None,
    incident: Incident,
    findings: Problems,
    with_texts: bool,
) -> Iterator[tuple[str, str]]:
    """Writes a slice of each journal into the archive. Yields the name of each slice, and what is in it.

    Args:
        archive: where slices are written.
        paths: files, and folders that are searched.
        run_id: only events of this job are taken; None: of all jobs.
        incident: gets every event that passes.
        findings: collects what is wrong with the files.
        with_texts: whether texts in free words may pass.
    """
    journals = journals_in(paths)
    left_out = journals[_MAX_JOURNALS:]
    if left_out:
        yield f"{len(left_out)} more journals", "left out"
    kept = journals[:_MAX_JOURNALS]
    for number, pieces in enumerate(kept):
        lines = Slice(_MAX_BYTES // len(kept))
        count = 0
        for entry in read_journal(pieces, findings):
            if run_id is not None and entry.run_id != run_id:
                continue
            facts = allowed.of_event(entry.event, entry.facts, with_texts)
            if facts is None:
                continue
            count += 1
            incident.add(entry.event, entry.t, entry.run_id, entry.node, facts)
            lines.add(_line(entry.event, entry.v, entry.t, facts))
        if count == 0:
            continue
        # Numbered, since nodes in containers may have one name, and names of files may hold anything.
        name = f"journals/{number}.jsonl"
        archive.writestr(name, b"".join(lines.lines()))
        missing = f", without {lines.left_out} in the middle" if lines.left_out else ""
        yield name, f"{count} events{missing}"


def _line(event: str, v: int, t: float, facts: dict[str, Any]) -> bytes:
    """Returns a line of a journal, in the form that a launcher writes: so `report` and `replay` can read a slice."""
    return json.dumps({"v": v, "t": t, "event": event} | facts).encode() + b"\n"


@contextlib.contextmanager
def _written_at_once(output: Path, force: bool) -> Iterator[Any]:
    """Returns a context with a file that gets its name when it is complete. After an error there is no file.

    Args:
        output: the name.
        force: whether a file of this name is replaced.

    Raises:
        UsageError: it cannot be written, or another file took the name meanwhile.
    """
    try:
        descriptor, name = tempfile.mkstemp(prefix=".ft-bundle-", dir=output.parent)
    except OSError as error:
        raise UsageError(f"{output} cannot be written: {error.strerror}", "Give another file") from None
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
        if not force:
            # Takes the name, so that the rename replaces no file of somebody else. A hard link would do both in one
            # step, but not every file system has these.
            output.touch(exist_ok=False)
        Path(name).replace(output)
    except FileExistsError:
        raise _exists(output) from None
    except OSError as error:
        raise UsageError(f"{output} cannot be written: {error.strerror}", "Give another file") from None
    finally:
        with contextlib.suppress(FileNotFoundError):
            Path(name).unlink()


def _exists(output: Path) -> UsageError:
    """Returns the error about a file that exists already."""
    return UsageError(f"{output} exists", "Give another name, or --force to replace it")


class Slice:
    """Keeps the first and the latest lines of a journal, and drops lines in the middle.

    The lines come as a stream of unknown length, so the latest lines are in a queue that is cut at its front.

    Args:
        most: bytes that are kept at most.

    Attributes:
        left_out: how many lines were dropped.
    """

    def __init__(self, most: int) -> None:
        self.left_out = 0
        self._head: list[bytes] = []
        self._tail: deque[bytes] = deque()
        self._head_room = most // _SHARE_OF_HEAD
        self._tail_room = most - self._head_room

    def add(self, line: bytes) -> None:
        """Adds the next line."""
        if not self._tail and len(line) <= self._head_room:
            self._head_room -= len(line)
            self._head.append(line)
            return
        self._tail.append(line)
        self._tail_room -= len(line)
        while self._tail_room < 0:
            self._tail_room += len(self._tail.popleft())
            self.left_out += 1

    def lines(self) -> list[bytes]:
        """Returns the lines that were kept, in their order."""
        return [*self._head, *self._tail]
