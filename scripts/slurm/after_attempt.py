"""Reads how an attempt ended, appends one line to the history, and prints what follows, for the batch scripts.

    after_attempt.py RUN_DIR ATTEMPT_DIR --code=CODE [--told] [--ended-by=REASON] [--max-failures=N] [--flag-required]

RUN_DIR holds `history.jsonl`, ATTEMPT_DIR a folder per node with the journal of its launcher. Prints one line: action,
exit code, nodes to exclude (a list with commas, or -), reason. Decides nothing; `next_step.py` does.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from next_step import Attempt, NodeEnd, Outcome, Step, Terms, decide

from ft_launcher.decide.attribution.fault import FaultClass
from ft_launcher.record.events import DecisionEvent, FaultEvent, JobEndEvent
from ft_launcher.record.journal_reader import Problems, read_journals
from rank_monitor.contract import env
from rank_monitor.contract.exit_codes import ExitCode
from rank_monitor.contract.wire.foreign import parse_json, read_file

VERSION = 1
_MAX_HISTORY = 16 << 20
"""Bytes read of the history, its end: an attempt has a line of a few hundred."""
_READ = (DecisionEvent.event, FaultEvent.event, JobEndEvent.event)


def main(words: Sequence[str]) -> int:
    """Does what the module says; 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, metavar="RUN_DIR")
    parser.add_argument("attempt", type=Path, metavar="ATTEMPT_DIR")
    parser.add_argument("--code", type=int, required=True, help="srun's exit code")
    parser.add_argument("--told", action="store_true", help="the training was told to end before the time limit")
    parser.add_argument("--ended-by", default="", help="Slurm's reason, when it ends the job")
    parser.add_argument(
        "--max-failures", type=int, default=3, help="failures in a row that end the training (%(default)s)"
    )
    parser.add_argument(
        "--flag-required", action="store_true", help="exit code 0 alone does not say that it is complete"
    )
    options = parser.parse_args(words)
    flag = os.environ.get(env.FINISHED_FLAG_FILE, "")
    ends = tuple(node_end(folder) for folder in sorted(options.attempt.glob("*/")))
    attempt = Attempt(ends, options.code, bool(flag) and Path(flag).exists(), options.told, options.ended_by)
    history = options.run / "history.jsonl"
    known = {outcome.value for outcome in Outcome}
    earlier = [Outcome(str(line["outcome"])) for line in lines_of(history) if str(line.get("outcome")) in known]
    step = decide(attempt, earlier, Terms(options.max_failures, options.flag_required))
    keep(history, options.attempt.name, attempt, step)
    print(step.action.value, step.exit_code, ",".join(dict.fromkeys(step.exclude)) or "-", step.reason)
    return 0


def node_end(folder: Path) -> NodeEnd:
    """How the launcher of a node ended, by its journal; the folder has the node's name."""
    last: dict[str, Mapping[str, Any]] = {}
    for entry in read_journals(folder.glob("journal.*.jsonl"), Problems()):
        if entry.event in _READ:
            last[entry.event] = entry.facts
    end = last.get(JobEndEvent.event)
    if end is None:
        return NodeEnd(folder.name, None)
    fault = last.get(FaultEvent.event)
    reason = str(end.get("reason", ""))
    if fault is not None:
        reason = f"rank {fault.get('rank')} {fault.get('what')}; {reason}"
    in_doubt = fault is not None and (
        fault.get("exit_code") == ExitCode.RESUME_TO_DISAMBIGUATE or fault.get("fault_class") == FaultClass.HARDWARE
    )
    decision = last.get(DecisionEvent.event, {})
    code = end.get("exit_code")
    return NodeEnd(
        folder.name,
        code if isinstance(code, int) else None,
        " ".join(reason.split()),
        in_doubt,
        not_restartable=decision.get("not_restartable") is True,
    )


def lines_of(file: Path) -> Iterator[dict[str, Any]]:
    """The JSON objects of a file, one a line; others are left out: ranks can write there, too."""
    with suppress(OSError):
        for line in read_file(file, _MAX_HISTORY, follow_link=True, tail=True).splitlines():
            with suppress(ValueError):
                if isinstance(facts := parse_json(line), dict):
                    yield facts


def keep(history: Path, name: str, attempt: Attempt, step: Step) -> None:
    """Appends the attempt's line."""
    line = {
        "v": VERSION,
        "t": round(time.time(), 3),
        "attempt": name,
        "outcome": step.outcome.value,
        "action": step.action.value,
        "code": attempt.code,
        "nodes": {end.node: end.code for end in attempt.ends},
        "exclude": step.exclude,
        "reason": step.reason,
    }
    with history.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
