"""An unexpected result: which one, of which call of a check, on which device; and the forms in which it is passed on.

`validation.py` makes an `UnexpectedResult` when a check rejects a result; what follows is decided in `judgement.py`.
The result is passed on in three forms:

- In a checkpoint (`checkpoint.py`), so that a job on other hardware can compare.
- As a line of the tracker file, one JSON object that every rank appends, with what became of the result. From these
  lines follows which iterations to skip. A file that cannot be written is logged, and does not stop the training.
- As a message to the launcher, where the ranks exit for the result.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import time
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ft_client.rank.monitoring import process
from ft_client.rerun import judgement
from ft_client.rerun.judgement import RerunDiagnostic
from ft_client.rerun.result import Result, from_json, to_json
from rank_monitor.contract import env
from rank_monitor.contract.errors import ProtocolError
from rank_monitor.contract.wire.complaints import Complaints
from rank_monitor.contract.wire.foreign import open_regular
from rank_monitor.contract.wire.json_record import read_record
from rank_monitor.contract.wire.messages import ResultInDoubt
from rank_monitor.contract.wire.own_file import open_own

logger = logging.getLogger(__name__)

_SEND_TIMEOUT_S = 1.0
"""The job is about to end for this result: a monitor that does not read must not hold up the exit."""
_MAX_NAME = 200
"""Characters of a name in the message. Names of hosts and devices are shorter, and the log has the whole name."""
_FINDINGS = {
    judgement.REPRODUCED: "reproducible",
    judgement.SAME_DEVICE: "same_device",
    judgement.PERSISTENT: "persistent_error",
}
"""Status -> the finding of the message to the launcher."""
SKIPPED = frozenset({judgement.TOLERATED, judgement.CORRECT})
"""Outcomes that come from the data or the program, and so again wherever the iteration is computed."""


@dataclass(frozen=True)
class Device:
    """A device of a node. Both names stay the same when a job is started again.

    Attributes:
        node: the node's name.
        device: `cpu`, or `cuda:` and the GPU's UUID.
    """

    node: str
    device: str

    def is_same(self, other: Device) -> bool:
        """Returns whether both are the same device: a GPU by its UUID, whatever the name of its node is now."""
        return self.device == other.device and ("-" in self.device or self.node == other.node)

    def __str__(self) -> str:
        return f"node {self.node}, device {self.device}"


def current_device(node_name: str | None = None) -> Device:
    """Returns the device of this process. A GPU is named by its UUID: its index depends on which GPUs are visible.

    Args:
        node_name: None: the host's name.
    """
    device = "cpu"
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        index = torch.cuda.current_device()
        device = f"cuda:{getattr(torch.cuda.get_device_properties(index), 'uuid', index)}"
    return Device(node_name or socket.gethostname(), device)


@dataclass(frozen=True)
class ValidationCall:
    """One call of `validate_result` in a step.

    Attributes:
        place: file and line of the call.
        invocation: how often the run has come there, from 1.
    """

    place: str
    invocation: int


@dataclass(frozen=True)
class UnexpectedResult:
    """A result that a check rejected.

    Attributes:
        call: which call of a check.
        rank: the rank that computed it.
        iteration: the step.
        message: what the script says of such a result.
        result: a copy in host memory.
        fatal: whether it is worth a move of the job.
        computed_at: the device.
        injected: what reruns shall find, of a result that was rejected on purpose; None: it was not.
    """

    call: ValidationCall
    rank: int
    iteration: int
    message: str
    result: Result
    fatal: bool
    computed_at: Device
    injected: RerunDiagnostic | None = None

    def __str__(self) -> str:
        where = f"on rank {self.rank} at iteration #{self.iteration} invocation #{self.call.invocation}"
        return f"Unexpected result {self.result!r} {where} (message='{self.message}')"

    def to_json(self) -> dict[str, Any]:
        """Returns the form in a checkpoint, of numbers and text."""
        form = {"result": to_json(self.result), "injected": self.injected and self.injected.value}
        return asdict(self) | form

    @classmethod
    def from_json(cls, form: dict[str, Any]) -> UnexpectedResult:
        """Returns what `to_json` wrote."""
        parts = {
            "call": ValidationCall(**form["call"]),
            "result": from_json(form["result"]),
            "computed_at": Device(**form["computed_at"]),
            "injected": RerunDiagnostic(form["injected"]) if form["injected"] else None,
        }
        return cls(**(form | parts))


def record(file_name: str, status: str, failure: UnexpectedResult) -> None:
    """Appends a line to the tracker file: when, where, which result, and its status. Never raises an OSError.

    One line is one write, so that the lines of several ranks in one file do not mix.

    Args:
        file_name: the file.
        status: one of the words of `judgement.py`.
        failure: the result.
    """
    event = {
        "time": time.time(),
        "status": status,
        "node": failure.computed_at.node,
        "device": failure.computed_at.device,
        "rank": failure.rank,
        "iteration": failure.iteration,
        "result": repr(failure.result),
        "message": failure.message,
        "fatal": failure.fatal,
    }
    try:
        descriptor = open_own(file_name, os.O_WRONLY | os.O_APPEND, 0o644)
        try:
            os.write(descriptor, json.dumps(event).encode() + b"\n")
        finally:
            os.close(descriptor)
    except OSError as error:
        logger.warning("result_rejected_tracker_filename=%r cannot be written: %s", file_name, error)


def get_skipped_iterations_from_tracker_file(tracker_file_name: str) -> list[int]:
    """Returns the iterations, in order, whose unexpected result would come again on any device; none without a file.

    A training that skips the data of these iterations gets past them. A transient error, a device's fault and a result
    still in doubt are no reason to skip data. A disabled machine computes nothing again: of its lines, an iteration
    counts that stopped the same rank twice, and no other rank. Lines that cannot be read are left out, with a warning.
    """
    try:
        with open_regular(tracker_file_name, follow_link=True) as file:
            text = file.read().decode()
    except FileNotFoundError:
        return []
    skipped = set()
    complaints = Complaints(logger.warning)
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
            text = f"tracker_file_name={tracker_file_name!r} has a line that is not a record: {line[:200]!r}"
            complaints.about("line", text)
    return sorted(skipped | {at for at, ranks in stopped.items() if len(ranks) == 1 and max(ranks.values()) > 1})


def report_to_launcher(status: str, failure: UnexpectedResult) -> None:
    """Sends a finding to the launcher, if there is one: it moves the job. Waits a second at most, and never raises.

    Args:
        status: one of the words of `judgement.py`. Those for which no rank exits are not sent.
        failure: the result.
    """
    link = process.current()
    finding = _FINDINGS.get(status)
    if link is None or finding is None:
        return
    node, device = (text[:_MAX_NAME] for text in (failure.computed_at.node, failure.computed_at.device))
    message = ResultInDoubt(finding, failure.rank, failure.iteration, node, device)
    link.post(message, time.monotonic_ns(), _SEND_TIMEOUT_S)


def ran_before() -> tuple[int, Device] | None:
    """Returns the rank with the suspect result, and the device that computed it in the cycle before.

    The launcher says so to the ranks that it starts on other hardware. None where it did not move the job for such a
    result, or there is no launcher.
    """
    text = os.environ.get(env.RESULT_IN_DOUBT)
    if not text:
        return None
    try:
        suspect = read_record(ResultInDoubt, text)
    except ProtocolError as error:
        logger.warning("%s cannot be read: %s", env.RESULT_IN_DOUBT, error)
        return None
    return suspect.rank, Device(suspect.node, suspect.device)
