"""Unexpected results on purpose: which checks get an injected error, and what a rerun of them is made to say.

A result is not changed, but rejected although it is well: so the training's results stay right, and the whole way of a
rerun is tried, up to the move to other hardware. `validation.py` asks in the first run of a step. The random numbers
come from a generator of its own: the training's stay as they are. `spoil_next`, by the injected fault `nan`, does
change one result: to NaN.
"""

from __future__ import annotations

import dataclasses
import math
import random

from ft_client.rank.argument_checks import check_count
from ft_client.rerun.judgement import RerunDiagnostic
from ft_client.rerun.result import Check, choice


class RerunErrorInjector:
    """Rejects one in so many results on purpose.

    Example: `RerunStateMachine(mode="validate_results", error_injector=RerunErrorInjector(1000, "transient_error"))`

    Args:
        error_injection_rate: one in that many checks is rejected, on the average; 0: none; 1: every one.
        error_injection_type: what the reruns are to find: a `RerunDiagnostic` or its value.

    Raises:
        ValueError: naming the argument.
    """

    def __init__(
        self,
        error_injection_rate: int = 0,
        error_injection_type: RerunDiagnostic | str = RerunDiagnostic.TRANSIENT_ERROR,
    ) -> None:
        check_count("error_injection_rate", error_injection_rate)
        self.error_injection_rate = error_injection_rate
        self.error_injection_type = choice("error_injection_type", error_injection_type, RerunDiagnostic)
        self._dice = random.Random()

    def should_inject(self) -> bool:
        """Draws whether this check gets an injected error."""
        return self.error_injection_rate > 0 and self._dice.randrange(self.error_injection_rate) == 0


def reproduces(injected: RerunDiagnostic, on_another_device: bool) -> bool:
    """Returns whether the rerun of a check with an injected error gives the same result again.

    Args:
        injected: what the reruns are to find.
        on_another_device: whether this is the second rerun, of a resumed job.
    """
    if injected is RerunDiagnostic.PERSISTENT_ERROR:
        return not on_another_device
    return injected is RerunDiagnostic.CORRECT_RESULT


_to_spoil = 0
"""How many checks are still to find NaN."""


def spoil_next() -> None:
    """Makes the next check of this process, in the first run of a step, find NaN in place of its result."""
    global _to_spoil
    _to_spoil += 1


def spoiled(check: Check) -> Check:
    """Returns the check with its own result, or with NaN after `spoil_next`."""
    global _to_spoil
    if not _to_spoil:
        return check
    _to_spoil -= 1
    return dataclasses.replace(check, result=check.result * math.nan)
