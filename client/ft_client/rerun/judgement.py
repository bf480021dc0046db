"""Decides what a rerun shows about a result: its diagnosis, the rank's vote, and the lines of the log. Pure.

The wording of the lines is what people look for in logs. Knows no state and no numbers.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from ft_client.rerun.transitions import Votes


class RerunDiagnostic(str, enum.Enum):
    """What an unexpected result turned out to be."""

    CORRECT_RESULT = "correct_result"
    TRANSIENT_ERROR = "transient_error"
    PERSISTENT_ERROR = "persistent_error"


@dataclass(frozen=True)
class Judgement:
    """What a rerun found. `diagnostic` is None while another device has to say."""

    status: str
    diagnostic: RerunDiagnostic | None
    votes: Votes
    lines: tuple[str, ...]


DISABLED = "rerun_disabled"
UNEXPECTED = "unexpected"
TRANSIENT = "first_rerun_not_reproducible"
REPRODUCED = "first_rerun_reproducible"
TOLERATED = "first_rerun_reproducible_not_fatal"
SAME_DEVICE = "second_rerun_on_the_same_device"
PERSISTENT = "second_rerun_not_reproducible"
CORRECT = "second_rerun_reproducible"


def first_rerun(reproduced: bool, fatal: bool) -> Judgement:
    """Judges a result that the same device has computed again."""
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
    """Judges a result that a resumed job has computed again, on another device or, by chance, on the same."""
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
