"""The checks of a step: which result was rejected first, what a rerun says of it, and what the rank votes for.

Knows nothing of data and random numbers; which run this is, is told, and what the votes lead to, decided elsewhere.
"""

from __future__ import annotations

import logging
from collections import Counter

from ft_client import group
from ft_client.rerun import injector, judgement, result, told, tracker
from ft_client.rerun.arguments import Check
from ft_client.rerun.failure import Call, Failure
from ft_client.rerun.injector import RerunErrorInjector
from ft_client.rerun.judgement import RerunDiagnostic
from ft_client.rerun.machine import NO_VOTES, Votes
from ft_client.rerun.place import here
from ft_client.rerun.statistics import Variability

logger = logging.getLogger(__name__)


class Validation:
    """What a rank found in the present step. `failure` is its first unexpected result, or its first fatal one.

    A call of a check is known again in a rerun by its place in the program and by how often that was passed before.
    """

    def __init__(self, error_injector: RerunErrorInjector, tracker_file: str | None, node_name: str | None) -> None:
        self.votes = NO_VOTES
        self.failure: Failure | None = None
        self.diagnostic: RerunDiagnostic | None = None
        self.variability = Variability()
        self._injector, self._tracker_file, self._node_name = error_injector, tracker_file, node_name
        self._passed: Counter[str] = Counter()
        self._rejected: set[Call] = set()
        self._first_results: dict[Call, result.Result] = {}
        self._was_judged = False

    def begin_step(self) -> None:
        """Forgets what the last step had."""
        self.failure = self.diagnostic = None
        self._rejected.clear()
        self._first_results.clear()

    def begin_run(self) -> None:
        """The checks of the step come from the beginning."""
        self.votes, self._was_judged = NO_VOTES, False
        self._passed.clear()

    def end_rerun(self) -> None:
        """Says so when the rerun took another way and never came to the check that failed."""
        if self.failure is not None and not self._was_judged:
            logger.error("The rerun did not come to this check again, so nothing is known of it: %s", self.failure)

    def call_at(self, place: str) -> Call:
        """The present call of a check there."""
        self._passed[place] += 1
        return Call(place, self._passed[place])

    def only_run(self, call: Call, check: Check, iteration: int) -> Failure | None:
        """Checks a result that nobody will compute again; a rejected one is said, written down and returned."""
        check = injector.spoiled(check)
        if not check.rejects():
            return None
        failure = self._failure(call, check, iteration)
        logger.error("%s", failure)
        self._track(judgement.DISABLED, failure)
        return failure

    def first_run(self, call: Call, check: Check, iteration: int) -> None:
        """Checks a result; a rejected one is said, written down and voted on."""
        check, injected = injector.spoiled(check), None
        if not check.rejects():
            if not self._injector.strikes():
                return
            injected = self._injector.error_injection_type
        failure = self._failure(call, check, iteration, injected)
        logger.error("%s%s", failure, f", rejected on purpose as {injected.value}" if injected else "")
        self._track(judgement.UNEXPECTED, failure)
        self._rejected.add(call)
        self.votes = Votes(rerun=True)
        if self.failure is None or (check.fatal and not self.failure.fatal):
            self.failure = failure

    def rerun(self, call: Call, check: Check, iteration: int, elsewhere: bool) -> None:
        """Judges the result that failed; another one that is rejected now and was not before is only said.

        Args:
            elsewhere: a job that resumed computes the step.
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
            found = judgement.second_rerun(reproduced, here(self._node_name).is_same(failure.computed_at))
        else:
            found = judgement.first_rerun(reproduced, failure.fatal)
        self._was_judged, self.diagnostic, self.votes = True, found.diagnostic, found.votes
        for line in found.lines:
            at = f"rank {failure.rank}, iteration #{failure.iteration}, {failure.computed_at}"
            logger.error("%s (%s, message='%s')", line, at, failure.message)
        told.tell(found.status, failure)
        self._track(found.status, failure)

    def note(self, call: Call, check: Check, is_rerun: bool) -> None:
        """Keeps a first result, or notes how far its rerun is from it."""
        if not is_rerun:
            self._first_results[call] = result.keep(check.result)
        elif call in self._first_results:
            apart = check.difference(self._first_results.pop(call))
            self.variability.add(f"{call.place} '{check.message}'", apart)

    def _failure(self, call: Call, check: Check, iteration: int, injected: RerunDiagnostic | None = None) -> Failure:
        kept, at = result.keep(check.result), here(self._node_name)
        return Failure(call, group.rank(), iteration, check.message, kept, check.fatal, at, injected)

    def _track(self, status: str, failure: Failure) -> None:
        if self._tracker_file is not None:
            tracker.record(self._tracker_file, status, failure)
