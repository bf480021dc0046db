"""Decides what a rerun shows about a result: its diagnosis, the rank's vote, and the lines of the log. Pure.

`validation.py` asks when a rerun has come to the check that failed. The wording of the lines is Megatron-LM's, for
which people search in logs. This file knows no state and no numbers.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from ft_client.rerun.transitions import Votes


class RerunDiagnostic(str, enum.Enum):
    """What an unexpected result turned out to be."""

    CORRECT_RESULT = "correct_result"
    """Two devices computed the same: it comes from the data or the program."""
    TRANSIENT_ERROR = "transient_error"
    """The same device computed another result the second time: a fault that passed."""
    PERSISTENT_ERROR = "persistent_error"
    """One device computed the result twice, another device did not: the first is broken."""


@dataclass(frozen=True)
class Judgement:
    """What a rerun found.

    Attributes:
        status: the word for it in the tracker file.
        diagnostic: what the result turned out to be; None while another device has to tell.
        votes: what the rank asks for.
        lines: what is logged.
    """

    status: str
    diagnostic: RerunDiagnostic | None
    votes: Votes
    lines: tuple[str, ...]


DISABLED = "rerun_disabled"
"""The machine is disabled: nothing is computed again."""
UNEXPECTED = "unexpected"
"""The result was rejected in the first run."""
TRANSIENT = "first_rerun_not_reproducible"
REPRODUCED = "first_rerun_reproducible"
TOLERATED = "first_rerun_reproducible_not_fatal"
SAME_DEVICE = "second_rerun_on_the_same_device"
PERSISTENT = "second_rerun_not_reproducible"
CORRECT = "second_rerun_reproducible"
"""The words of the tracker file (docs/rerun.md)."""


def first_rerun(reproduced: bool, fatal: bool) -> Judgement:
    """Judges a result that the same device has computed again.

    Args:
        reproduced: whether the result is the same, within the check's tolerance.
        fatal: whether the check is worth a move of the job.
    """
    if not reproduced:
        lines = (
            "First rerun: unexpected result is not reproducible within the tolerance",
            "Possible transient error!",
        )
        return Judgement(TRANSIENT, RerunDiagnostic.TRANSIENT_ERROR, Votes(), lines)
    line = "First rerun: unexpected result is reproducible within the tolerance"
    if not fatal:
        return Judgement(TOLERATED, None, Votes(), (line, "The check is not fatal: training goes on"))
    need = "Need to rerun on a different GPU to verify correctness"
    return Judgement(REPRODUCED, None, Votes(checkpoint=True), (line, need))


def second_rerun(reproduced: bool, same_device: bool) -> Judgement:
    """Judges a result that a resumed job has computed again, on another device or, by chance, on the same.

    Args:
        reproduced: whether the result is the same, within the check's tolerance.
        same_device: whether it is the device that computed the result in doubt: then nothing is known.
    """
    if same_device:
        lines = ("Second rerun: on the same device as before, which says nothing", "Need to rerun on a different GPU")
        return Judgement(SAME_DEVICE, None, Votes(restart_again=True), lines)
    if not reproduced:
        lines = (
            "Second rerun: unexpected result is not reproducible on a different GPU, therefore was likely incorrect",
            "Possible persistent error!",
        )
        return Judgement(PERSISTENT, RerunDiagnostic.PERSISTENT_ERROR, Votes(failed=True), lines)
    lines = (
        "Second rerun: unexpected result is reproducible on a different GPU, therefore it was likely correct",
        "Correct result (but possible Application error)",
    )
    return Judgement(CORRECT, RerunDiagnostic.CORRECT_RESULT, Votes(), lines)
