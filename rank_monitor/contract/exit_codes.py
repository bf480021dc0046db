"""Exit codes of the launcher. 80 to 99 are ours; the table in docs/exit_codes.md says what each means.

Schedulers and batch scripts decide by them. With which code a job ends is decided by the launcher, not here.
"""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """What the launcher's exit code says. A rank's own code is passed on where all first failures agree on it."""

    OK = 0
    RANKS_FAILED = 1
    # argparse and click exit with this code too where the command line is wrong.
    BAD_CONFIG = 2
    # Megatron-LM's codes for an unexpected result of a step: docs/rerun.md.
    RESUME_TO_DISAMBIGUATE = 16
    FAILED_ON_RESULT_VALIDATION = 17
    LAUNCHER_ERROR = 80
    RENDEZVOUS_FAILED = 81
    STORE_HOST_LOST = 82
    NODE_UNHEALTHY = 83
    BELOW_MINIMUM = 84
    HANG = 85
    PREEMPTED = 86
    PREEMPTED_KILLED = 87
    NOT_RESTARTABLE = 93
    NODE_EXCLUDED = 94
    JOB_STOPPED = 95


OURS = range(80, 100)
"""The launcher's own codes: above the codes of <sysexits.h> (64 to 78) and below those of a shell (126 and more)."""
AGREED = frozenset({ExitCode.RESUME_TO_DISAMBIGUATE, ExitCode.FAILED_ON_RESULT_VALIDATION})
"""With these codes all ranks leave together, after the same step, each when it has saved: none of them has failed."""
INTERRUPTED = 130
"""128 + SIGINT, as a shell reports Ctrl-C."""


def died_of(signal_number: int) -> int:
    """Returns the shell's code for a death by signal n: 128 + n."""
    return 128 + signal_number


def passed_on(rank_code: int) -> int:
    """Returns the exit code of the launcher for a rank's exit code.

    Args:
        rank_code: as `subprocess` gives it, negative for a signal.

    Returns:
        The code itself; 1 for a code that would say something else as the launcher's (2, 80 to 99); 128 + n for a
        death by signal n.
    """
    if rank_code < 0:
        return died_of(-rank_code)
    if rank_code == ExitCode.BAD_CONFIG or rank_code in OURS:
        return ExitCode.RANKS_FAILED
    return rank_code
