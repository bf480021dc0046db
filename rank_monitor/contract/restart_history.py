"""The history of failed runs, as one value, by which a decider says whether another run would help. Pure.

A *run* is a cycle of the launcher, or a round of an in-process restart. The restart policy keeps one `History` for the
job. It passes with the coordinator from node to node: its record (`to_record`) contains ages instead of times, since
the clocks of two nodes differ. The in-process wrapper keeps another `History` in the ranks' store, and charges no
restarts to it.

`History.ended` returns the history with one more failed run. What follows from its counts is decided elsewhere
(`ft_launcher/decide/policy/restart_policy.py`, `contract/rounds/escalation.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from rank_monitor.contract.errors import ProtocolError
from rank_monitor.contract.same_error import comparable
from rank_monitor.contract.wire.json_record import from_json
from rank_monitor.contract.wire.messages import NO_ITERATION


@dataclass(frozen=True)
class EndedRun:
    """What the history needs to know of a run that failed. The caller makes it of its own evidence.

    Attributes:
        error: type and location of the exception that ended the run; empty: there was none, or none that counts.
        error_text: the digest of the text of the exception.
        iteration: the training's iteration in which the exception was raised; NO_ITERATION: none was reported.
        compares_text: an error is the same one only if its text agrees too, and if the mark has not moved to another
            iteration in between (a ping alone does not move it). Set where no iteration is reported.
        is_early: the run ended so early that the same error needs fewer repetitions.
        fault_class: the class of what ended the run; the history counts runs in a row with the same class.
        lived_s: how many seconds the ranks ran.
        reached: the iteration of the training that was reported last; NO_ITERATION: none was; None: not known.
        pinged: the program showed progress without an iteration.
        relocates: the run ended because its ranks asked for other hardware.
        excuses_no_progress: a lack of progress in this run does not count.
    """

    error: str = ""
    error_text: str = ""
    iteration: int = NO_ITERATION
    compares_text: bool = False
    is_early: bool = False
    fault_class: str = ""
    lived_s: float = 0.0
    reached: int | None = NO_ITERATION
    pinged: bool = False
    relocates: bool = False
    excuses_no_progress: bool = False


@dataclass(frozen=True)
class StateTrial:
    """How often the job failed from one state in memory, in a way that a bad state may cause. By the launcher alone
    (`ft_launcher/decide/policy/bad_state.py`): an in-process wrapper tries no state.

    Attributes:
        step: of the state; 0: none is on trial.
        series: of the state, which step and series name.
        suspicion: what happened, in words that are the same each time.
        failures: how often.
    """

    step: int = 0
    series: str = ""
    suspicion: str = ""
    failures: int = 0


def _in_a_row(count: int, again: bool) -> int:
    """Returns a count of runs in a row with one more; 0 where the row ends."""
    if again:
        return count + 1
    return 0


@dataclass(frozen=True)
class History:
    """The failed runs so far. The counts "in a row" begin anew with the first run that differs.

    Attributes:
        charged: times (monotonic seconds) of the restarts that the budget of the launcher still counts.
        mark: the iteration that the last run with progress reached; NO_ITERATION: the program showed progress without
            an iteration; None until it shows progress in either way.
        no_progress: failed runs in a row that did not get beyond the mark.
        error: the error of the last run, with `error_text` and `error_iteration`, as in `EndedRun`.
        same_errors: how many runs in a row had that error.
        early_errors: how many runs in a row had that error and were early.
        moves: how many runs in a row ended because the ranks asked for other hardware.
        young: how many runs in a row were short.
        fault_class: the fault class of the last run; empty before the first.
        same_class: how many runs in a row had that class.
        trial: how often the job failed from the state in memory that it went on from last.
        no_save_until: the step that the training must pass before it saves its state in memory; 0: none.
    """

    charged: tuple[float, ...] = ()
    mark: int | None = None
    no_progress: int = 0
    error: str = ""
    error_text: str = ""
    error_iteration: int = NO_ITERATION
    same_errors: int = 0
    early_errors: int = 0
    moves: int = 0
    young: int = 0
    fault_class: str = ""
    same_class: int = 0
    trial: StateTrial = StateTrial()
    no_save_until: int = 0

    def ended(
        self, run: EndedRun, least_progress: int, now: float = 0.0, window_s: float | None = None, young_s: float = 0.0
    ) -> History:
        """Returns the history with one more failed run, before the decision about it.

        Args:
            run: the run that failed.
            least_progress: how many iterations beyond the mark are progress.
            now: monotonic seconds.
            window_s: for how long a restart is charged; None: for ever.
            young_s: a run that lived less than this was short.
        """
        measured = self._measured(run, max(1, least_progress))
        return replace(
            measured._with_error(run, has_progressed=measured.mark not in (self.mark, NO_ITERATION)),
            charged=measured.within(window_s, now),
            moves=_in_a_row(self.moves, run.relocates),
            young=_in_a_row(self.young, run.lived_s < young_s),
            fault_class=run.fault_class,
            same_class=max(1, _in_a_row(self.same_class, run.fault_class == self.fault_class)),
        )

    def _with_error(self, run: EndedRun, has_progressed: bool) -> History:
        """Returns the history with the error of a run counted.

        `has_progressed`: the mark is another iteration than after the last run. With `compares_text` an error after
        progress is another one: nobody knows that it came at the same step.
        """
        if not run.error:
            return replace(self, error="", error_text="", error_iteration=NO_ITERATION, same_errors=0, early_errors=0)
        same = comparable(run.error) == comparable(self.error) and run.iteration == self.error_iteration
        if run.compares_text:
            same = same and run.error_text == self.error_text and not has_progressed
        early = 0
        if run.is_early:
            early = max(1, _in_a_row(self.early_errors, same))
        return replace(
            self,
            error=run.error,
            error_text=run.error_text,
            error_iteration=run.iteration,
            same_errors=max(1, _in_a_row(self.same_errors, same)),
            early_errors=early,
        )

    def _measured(self, run: EndedRun, least: int) -> History:
        """Returns the history with the progress of a run counted. Progress restores the budget of restarts.

        A run without progress counts only once the program has shown progress at all: many programs never report any.
        `least`: how many iterations beyond the mark are progress.
        """
        if run.reached is None:
            return self
        if run.reached != NO_ITERATION:
            if self.mark is None or self.mark == NO_ITERATION or run.reached >= self.mark + least:
                return replace(self, mark=run.reached, no_progress=0, charged=())
        elif run.pinged:
            mark = NO_ITERATION
            if self.mark is not None:
                mark = self.mark
            return replace(self, mark=mark, no_progress=0, charged=())
        if self.mark is None or run.excuses_no_progress:
            return self
        return replace(self, no_progress=self.no_progress + 1)

    def from_older_state(self) -> History:
        """Returns the history after the state that the last runs went on from was set aside: from an older state the
        same error and the lack of progress are counted anew. The mark and what was charged stay."""
        return replace(
            self,
            error="",
            error_text="",
            error_iteration=NO_ITERATION,
            same_errors=0,
            early_errors=0,
            no_progress=0,
            trial=StateTrial(),
        )

    def within(self, window_s: float | None, now: float) -> tuple[float, ...]:
        """Returns the charged restarts of the last `window_s` seconds; with None, all of them."""
        return tuple(at for at in self.charged if window_s is None or at > now - window_s)

    def to_record(self, now: float) -> dict[str, Any]:
        """Returns JSON values, with ages in seconds instead of times."""
        return asdict(self) | {"charged": [now - at for at in self.charged]}

    @classmethod
    def from_record(cls, record: Mapping[str, Any], now: float) -> History:
        """Reads a record of `to_record`; a missing field gets its default.

        Raises:
            ProtocolError: `record` is no such record.
        """
        fields = dict(record)
        ages = fields.pop("charged", [])
        # Python's JSON reads NaN and Infinity; the two comparisons refuse both. `type` refuses true and false.
        if not isinstance(ages, list) or not all(type(age) in (int, float) and 0 <= age < 1e12 for age in ages):
            raise ProtocolError("History: field 'charged' does not fit")
        return replace(from_json(cls, fields), charged=tuple(now - age for age in ages))
