"""The checks of a step: which result was rejected first, what a rerun says of it, and what the rank votes for.

`state_machine.py` asks it for each result. Knows nothing of data and random numbers. What the votes lead to is decided
in `transitions`.
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
    """What a rank found in the present step. `failure` is its first unexpected result, or its first fatal one.

    A call of a check is known again in a rerun by its place in the program and by how often that was passed before.
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
        """Forgets the results of the last step."""
        self.failure = None
        self.diagnostic = None
        self._rejected.clear()
        self._first_results.clear()

    def begin_run(self) -> None:
        """Prepares for the checks of one run of the step, from the first."""
        self.votes = NO_VOTES
        self._was_judged = False
        self._passed.clear()

    def end_rerun(self) -> None:
        """Logs it when the rerun took another way and never came to the check that failed."""
        if self.failure is not None and not self._was_judged:
            logger.error("The rerun did not come to this check again, so nothing is known of it: %s", self.failure)

    def call_at(self, place: str) -> ValidationCall:
        """Counts and returns the present call of a check at `place`."""
        self._passed[place] += 1
        return ValidationCall(place, self._passed[place])

    def only_run(self, call: ValidationCall, check: Check, iteration: int) -> UnexpectedResult | None:
        """Checks a result that nobody will compute again; a rejected one is logged, recorded and returned."""
        check = injector.spoiled(check)
        if not check.rejects():
            return None
        failure = self._failure(call, check, iteration)
        logger.error("%s", failure)
        self._track(judgement.DISABLED, failure)
        return failure

    def first_run(self, call: ValidationCall, check: Check, iteration: int) -> None:
        """Checks a result; a rejected one is logged, recorded and voted on."""
        check = injector.spoiled(check)
        injected = None
        if not check.rejects():
            if not self._injector.strikes():
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

    def rerun(self, call: ValidationCall, check: Check, iteration: int, elsewhere: bool) -> None:
        """Judges the result that failed; another one that is rejected now and was not before is only logged.

        Args:
            elsewhere: a resumed job computes the step.
        """
        failure = self.failure
        if failure is None or call != failure.call:
            if call not in self._rejected and check.rejects():
                logger.error("%s, in a rerun", self._failure(call, check, iteration))
            return
        if failure.injected:
            reproduced = injector.reproduces(failure.injected, elsewhere)
        else:
            reproduced = check.reproduces(failure.result)
        if elsewhere:
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
        """Keeps a first result, or notes how far its rerun is from it."""
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
