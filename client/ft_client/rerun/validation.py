"""The checks of a step: which result was rejected first, what a rerun says of it, and what the rank votes for.

`state_machine.py` calls a `Validation` for each result of a step, in the order in which the step's body comes to its
checks. What a rerun shows is decided in `judgement.py`, and what the votes lead to in `transitions.py`. This file knows
nothing of data and random numbers.

One step, one failure: the first fatal unexpected result of a rank, or else its first one, is the one that reruns judge.
All others are only logged. A check is known again in a rerun by its location in the program, and by how often the run
has come there before.
"""

from __future__ import annotations

import logging
from collections import Counter

from ft_client.rank.agreement import group
from ft_client.rerun import injector, judgement, unexpected_result
from ft_client.rerun.injector import RerunErrorInjector
from ft_client.rerun.judgement import RerunDiagnostic
from ft_client.rerun.result import Check, Result, host_copy
from ft_client.rerun.result_statistics import Variability
from ft_client.rerun.transitions import NO_VOTES, Votes
from ft_client.rerun.unexpected_result import UnexpectedResult, ValidationCall, current_device

logger = logging.getLogger(__name__)


class Validation:
    """What a rank found in the present step.

    Args:
        error_injector: says which checks get an error on purpose.
        tracker_file: the file to which unexpected results are appended; None: none.
        node_name: the name of this node; None: the host's name.

    Attributes:
        votes: what this rank asks for at the end of the present run.
        failure: the unexpected result that reruns judge; None: this rank had none.
        diagnostic: what a rerun said of it; None: nothing yet.
        variability: how far reruns are from first runs, in mode `report_stats`.
    """

    def __init__(self, error_injector: RerunErrorInjector, tracker_file: str | None, node_name: str | None) -> None:
        self.votes = NO_VOTES
        self.failure: UnexpectedResult | None = None
        self.diagnostic: RerunDiagnostic | None = None
        self.variability = Variability()
        self._injector = error_injector
        self._tracker_file = tracker_file
        self._node_name = node_name
        self._passed: Counter[str] = Counter()
        self._rejected: set[ValidationCall] = set()
        self._first_results: dict[ValidationCall, Result] = {}
        self._was_judged = False

    def begin_step(self) -> None:
        """Drops the results of the last step."""
        self.failure = None
        self.diagnostic = None
        self._rejected.clear()
        self._first_results.clear()

    def begin_run(self) -> None:
        """Prepares for the checks of one run of the step: all are counted from the first again."""
        self.votes = NO_VOTES
        self._was_judged = False
        self._passed.clear()

    def end_rerun(self) -> None:
        """Logs that nothing is known, where the rerun took another way and never came to the check that failed."""
        if self.failure is not None and not self._was_judged:
            logger.error("The rerun did not come to this check again, so nothing is known of it: %s", self.failure)

    def call_at(self, place: str) -> ValidationCall:
        """Counts and returns the present call of a check.

        Args:
            place: file and line of the call, as `train.py:7`.
        """
        self._passed[place] += 1
        return ValidationCall(place, self._passed[place])

    def only_run(self, call: ValidationCall, check: Check, iteration: int) -> UnexpectedResult | None:
        """Checks a result of a disabled machine, which computes nothing again. Returns a rejected result.

        A rejected result is logged and recorded; None: the result is as expected.
        """
        check = injector.spoiled(check)
        if not check.rejects():
            return None
        failure = self._failure(call, check, iteration)
        logger.error("%s", failure)
        self._track(judgement.DISABLED, failure)
        return failure

    def first_run(self, call: ValidationCall, check: Check, iteration: int) -> None:
        """Checks a result in the first run of a step. A rejected result is logged and recorded, and asks for a rerun.

        A fatal failure replaces an earlier one that is not fatal: the step can have one failure only.
        """
        check = injector.spoiled(check)
        injected = None
        if not check.rejects():
            if not self._injector.should_inject():
                return
            injected = self._injector.error_injection_type
        failure = self._failure(call, check, iteration, injected)
        if injected:
            logger.error("%s, rejected on purpose as %s", failure, injected.value)
        else:
            logger.error("%s", failure)
        self._track(judgement.UNEXPECTED, failure)
        self._rejected.add(call)
        self.votes = Votes(rerun=True)
        if self.failure is None or (check.fatal and not self.failure.fatal):
            self.failure = failure

    def rerun(self, call: ValidationCall, check: Check, iteration: int, other_hardware: bool) -> None:
        """Judges the result that failed in the first run. Any other result that is newly rejected is only logged.

        The finding goes to the log, to the tracker file, and to the launcher, which moves the job for it.

        Args:
            call: which call of a check this is.
            check: the check, with its result in this run.
            iteration: the step.
            other_hardware: whether a resumed job computes the step, as a rule on other hardware; if not, this is the
                rerun in place.
        """
        failure = self.failure
        if failure is None or call != failure.call:
            if call not in self._rejected and check.rejects():
                logger.error("%s, in a rerun", self._failure(call, check, iteration))
            return
        if failure.injected:
            reproduced = injector.reproduces(failure.injected, other_hardware)
        else:
            reproduced = check.reproduces(failure.result)
        if other_hardware:
            found = judgement.second_rerun(reproduced, current_device(self._node_name).is_same(failure.computed_at))
        else:
            found = judgement.first_rerun(reproduced, failure.fatal)
        self._was_judged = True
        self.diagnostic = found.diagnostic
        self.votes = found.votes
        for line in found.lines:
            at = f"rank {failure.rank}, iteration #{failure.iteration}, {failure.computed_at}"
            logger.error("%s (%s, message='%s')", line, at, failure.message)
        unexpected_result.report_to_launcher(found.status, failure)
        self._track(found.status, failure)

    def note(self, call: ValidationCall, check: Check, is_rerun: bool) -> None:
        """Stores the result of a first run, or notes how far a rerun's result is from that of the first run."""
        if not is_rerun:
            self._first_results[call] = host_copy(check.result)
        elif call in self._first_results:
            apart = check.difference(self._first_results.pop(call))
            self.variability.add(f"{call.place} '{check.message}'", apart)

    def _failure(
        self, call: ValidationCall, check: Check, iteration: int, injected: RerunDiagnostic | None = None
    ) -> UnexpectedResult:
        kept = host_copy(check.result)
        at = current_device(self._node_name)
        return UnexpectedResult(call, group.rank(), iteration, check.message, kept, check.fatal, at, injected)

    def _track(self, status: str, failure: UnexpectedResult) -> None:
        if self._tracker_file is not None:
            unexpected_result.record(self._tracker_file, status, failure)
