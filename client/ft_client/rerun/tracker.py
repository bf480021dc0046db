"""The file of unexpected results: one JSON object per line, appended by every rank, read to know what to skip.

A file that cannot be written is said once per line and does not stop the training.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections import Counter
from pathlib import Path

from ft_client.rerun import judgement
from ft_client.rerun.failure import Failure

logger = logging.getLogger(__name__)

SKIPPED = frozenset({judgement.TOLERATED, judgement.CORRECT})
"""Outcomes that come again wherever the iteration is computed: its data or the program made them, no device."""


def record(file_name: str, status: str, failure: Failure) -> None:
    """Appends a line by one write: when, where, which result, and what became of it (`judgement`'s words)."""
    at, told = failure.computed_at, {"result": repr(failure.result), "message": failure.message, "fatal": failure.fatal}
    where = {"node": at.node, "device": at.device, "rank": failure.rank, "iteration": failure.iteration}
    event = {"time": time.time(), "status": status, **where, **told}
    try:
        descriptor = os.open(file_name, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(descriptor, json.dumps(event).encode() + b"\n")
        finally:
            os.close(descriptor)
    except OSError as error:
        logger.warning("result_rejected_tracker_filename=%r cannot be written: %s", file_name, error)


def get_skipped_iterations_from_tracker_file(tracker_file_name: str) -> list[int]:
    """The iterations, in order, whose unexpected result would come again on any device; none when there is no file.

    A transient error, a device's fault and a result still in doubt are no reason to skip data. Of a disabled machine,
    which computes nothing again, an iteration counts that stopped the same rank twice, and no other rank.
    """
    try:
        text = Path(tracker_file_name).read_text()
    except FileNotFoundError:
        return []
    skipped = set()
    stopped: dict[int, Counter[int]] = {}
    for line in text.splitlines():
        try:
            event = json.loads(line)
            status, iteration = event["status"], int(event["iteration"])
            if status in SKIPPED:
                skipped.add(iteration)
            elif status == judgement.DISABLED and event["fatal"]:
                stopped.setdefault(iteration, Counter())[int(event["rank"])] += 1
        except (ValueError, KeyError, TypeError):
            logger.warning("tracker_file_name=%r has a line that is no record: %.200r", tracker_file_name, line)
    return sorted(skipped | {at for at, ranks in stopped.items() if len(ranks) == 1 and max(ranks.values()) > 1})
