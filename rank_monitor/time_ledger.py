"""The time ledger of a rank in one cycle: each moment belongs to the innermost open section, or to none. Pure.

`watch.py` passes on what the monitor receives anyway: the rank sends nothing for the ledger. `server.py` sends the
result to the launcher (`Times`), whose job ledger (`record/ledger/job_ledger.py`) has one rank stand for all. The
ledger judges no limit: `watch.py` and `hang_detector.py` do. Whatever a rank reports, in whatever order, the ledger
raises nothing.

**The account.** At each change that the rank reports, the time since the change before goes to where the rank was: to
the innermost open section, or, with no section open, to one of the kinds of `Outside`. So the parts always add up to
the whole. Outside of all sections a rank passes through these:

    STARTING --attached--> PREPARING --first step--> BETWEEN
                               ^                        | interrupted: the time since the last progress is STALLED
                               | called again           v
                           RESTARTING <--restarts-- FINALIZING
                               |                        |
                               +--------returned--------+--> BETWEEN

A report of sections carries each open section with the moment of its opening, so times are exact however late a report
is read. Where reports were lost, with a full socket or with a monitor, the time stays complete, and only durations
whose end nobody saw are left out.

**Steps** are those of section `step`. Where the training has no such section, the time from one reported iteration to
the next stands for a step; where it reports nothing, the steps that it prints do.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping

from rank_monitor.contract.wire.messages import NO_ITERATION
from rank_monitor.contract.wire.rank_times import (
    MAX_NAMES,
    NO_STEP,
    OTHERS,
    SAVE_SECTIONS,
    STEP,
    UNKNOWN,
    Durations,
    Outside,
    RankTimes,
    time_until,
)

_MAX_PAUSES = 64
"""Pauses that are kept, the latest ones: each duration sums over all of them."""


class TimeLedger:
    """The times of one rank. All moments are nanoseconds of CLOCK_MONOTONIC, and not in the future.

    Args:
        before: the ledger of a lost monitor of the same rank, with which this ledger goes on; None: the rank is new.
    """

    def __init__(self, before: RankTimes | None = None) -> None:
        known = RankTimes()
        if before is not None:
            known = before
        self._known = known
        self._began = before is not None and before.since_ns > 0
        """Whether the rank has sent anything yet: the account begins with its first message."""
        self._at_ns = known.at_ns
        """Until when the time is given to its parts."""
        self._open = dict(known.open)
        """The open sections, each with the moment of its opening."""
        self._inner: str | None = None
        """The open section that was opened last: it gets the time. None: no section is open."""
        self._inner_ns = -1
        self._find_inner()
        self._outside = known.place
        """What the time is that belongs to no section."""
        self._spent = {place: known.outside.get(place.value, 0) for place in Outside}
        self._uses_steps = STEP in known.open or (known.step.count > 0 and not known.by_iterations)
        self._pause = known.pause
        """The last pause, from and until, as long as the rank has not reported a change after it; zeros: none."""
        self._pauses: list[tuple[int, int]] = []
        self._done_ns = self._step_ns()
        """Time of steps until the end of the last one, as far as this monitor knows."""
        self._saw_all = not self._began
        """Whether the open sections are known: not at first, where reports went to a monitor that was lost."""
        self._ended_ns: int | None = None
        self._prepares_ns = known.at_ns
        """When the preparation began, before the first step of the process or of a call."""
        self._is_called = False
        """Whether a wrapper runs the training's function."""
        self._restarted = False
        """Whether the iteration is not known yet at which the training resumed after a restart in process."""
        self._interrupted_ns = 0
        """The time of steps before that restart."""
        self._steps_of_call = known.step.count
        self._expects_steps = known.waited_ns != NO_STEP
        """Whether the rank is watched now, so that a step is to come."""
        self._stepped_ns = self._between_ns() - max(0, known.waited_ns)
        """What `_between_ns` was when the last step was done, or when the wait for the first one began."""
        self._is_first = known.step.count == 0
        """Whether the step that is awaited is the first one of the process or of a call."""

    # What the rank reports.

    def begin(self, at_ns: int) -> None:
        """Notes a message of the rank. The first one begins the ledger.

        A message after the end of the rank's process is that of another process of the rank: it is STARTING again.
        """
        if not self._began:
            self._began = True
            self._known.since_ns = self._at_ns = at_ns
        elif self._ended_ns is not None:
            self._advance(self._ended_ns)
            self._forget_sections()
            self._outside = Outside.STARTING
        self._ended_ns = None

    def attached(self, at_ns: int, anew: bool = False) -> None:
        """Notes that the watch of the training began.

        Args:
            at_ns: when the watch began.
            anew: the rank was watched before: the sections of that watch are open no more.
        """
        self.begin(at_ns)
        self._advance(at_ns)
        self._known.attached = True
        if anew:
            self._forget_sections()
        if self._outside is Outside.STARTING:
            self._outside = Outside.PREPARING
            self._prepares_ns = at_ns
        self._await_step()

    def detached(self, at_ns: int) -> None:
        """Notes that the watch ended: the rank has closed all its sections, and no step is expected any more."""
        self.begin(at_ns)
        self._close(list(self._open), at_ns, was_seen=True)
        self._expects_steps = False

    def exited(self, at_ns: int) -> None:
        """Notes that the rank's process ended. Sections that were open then never ended: they keep their time, and no
        duration of them is counted."""
        self._ended_ns = at_ns

    def sections(self, now_open: Mapping[str, int], at_ns: int, iteration: int) -> None:
        """Notes the open sections as the rank reported them.

        Args:
            now_open: by name, the moment of the opening.
            at_ns: when the rank sent the report.
            iteration: as the report has it; NO_ITERATION: it has none.
        """
        self.begin(at_ns)
        before = self._open
        opened = [(since_ns, name) for name, since_ns in now_open.items() if before.get(name) != since_ns]
        closed = [name for name, since_ns in before.items() if now_open.get(name) != since_ns]
        if opened:
            opened.sort()
            if closed:
                # Reports in between were lost. A section that has closed unseen is taken to have closed when the next
                # one was opened.
                self._close(closed, opened[0][0], was_seen=False)
            for since_ns, name in opened:
                self._open_section(name, since_ns)
        elif closed:
            self._close(closed, at_ns, was_seen=self._saw_all)
        if iteration not in (NO_ITERATION, self._known.iteration):
            self._reach(iteration, at_ns, reported=False)
        self._saw_all = True

    def iteration(self, iteration: int, at_ns: int) -> None:
        """Notes an iteration that the training reports. After a restart the same one again says where it resumed."""
        self.begin(at_ns)
        if iteration == self._known.iteration and not self._restarted:
            return
        self._reach(iteration, at_ns, reported=True)

    def printed(self, iteration: int, steps: int, step_ns: int, at_ns: int, started_ns: int) -> None:
        """Notes a step that the rank printed. Does nothing for a rank that reports steps by sections.

        The first printed step begins the steps. How many were done before is not known, and the time until then counts
        as setup.

        Args:
            iteration: as printed; NO_ITERATION where the line names none: `steps` then says how many were done.
            steps: how many steps were done since the line before; 0: not known.
            step_ns: how long a step takes, as printed; 0: not printed.
            at_ns: when the launcher read the line.
            started_ns: when the rank was started. A rank that is no Python program reports nothing else, and its
                account begins here.
        """
        if not self._began:
            self.begin(started_ns)
        if self._ended_ns is not None:
            # The line was read after the end of the process that had printed it.
            at_ns = min(at_ns, self._ended_ns)
        if self._uses_steps or (iteration == NO_ITERATION and not steps):
            return
        if self._outside in (Outside.STARTING, Outside.PREPARING) and not self._restarted:
            self._begin_printed(iteration, at_ns)
        elif iteration not in (NO_ITERATION, self._known.iteration):
            self._reach(iteration, at_ns, reported=True, printed_ns=step_ns)
        elif iteration == NO_ITERATION and steps > 0:
            self._advance(at_ns)
            self._end_interval(steps, step_ns, at_ns)

    def _begin_printed(self, iteration: int, at_ns: int) -> None:
        """Begins the steps with the first one that was printed."""
        self._advance(at_ns)
        known = self._known
        known.attached = True
        # Without a printed step in it, no part of this time is known to be one of a step.
        self._spent[Outside.STARTING] += self._spent[Outside.PREPARING]
        self._spent[Outside.PREPARING] = 0
        self._outside = Outside.BETWEEN
        known.progress_ns = known.first_done_ns = at_ns
        if iteration != NO_ITERATION:
            known.iteration = known.resumed = iteration
            self._known.add_point(iteration, 0)
        self._await_step()

    def interrupted(self, at_ns: int) -> None:
        """Notes that the wrapper interrupted the training. Time since the last sign of progress goes to `STALLED`.

        The time of a step that was not finished is lost: it is done again.
        """
        self.begin(at_ns)
        if not self._is_called:
            return
        self._is_called = self._expects_steps = False
        self._known.lost_ns += max(0, self._step_ns() - self._done_ns)
        self._done_ns = self._interrupted_ns = self._step_ns()
        self._forget_sections()
        self._outside = Outside.STALLED
        self._advance(at_ns)
        self._outside = Outside.FINALIZING
        self._restarted = True

    def restarts(self, at_ns: int) -> None:
        """Notes that the wrapper waits for other ranks: `finalize` and the health check are done."""
        self.interrupted(at_ns)
        # A wrapper waits for the others before its first call too, which is no restart.
        if self._outside is Outside.FINALIZING:
            self._advance(at_ns)
            self._outside = Outside.RESTARTING

    def called(self, at_ns: int) -> None:
        """Notes that the wrapper calls the training's function: for the first time, or again after a restart."""
        self.begin(at_ns)
        self._is_called = True
        if self._outside in (Outside.FINALIZING, Outside.RESTARTING):
            self._advance(at_ns)
            self._outside = Outside.PREPARING
            self._prepares_ns = at_ns
            self._steps_of_call = 0
            self._await_step()

    def returned(self, at_ns: int) -> None:
        """Notes that the wrapper has returned: no further call follows."""
        self.begin(at_ns)
        self._is_called = False
        if self._outside in (Outside.FINALIZING, Outside.RESTARTING):
            self._advance(at_ns)
            self._outside = Outside.BETWEEN

    def pause(self, from_ns: int, until_ns: int) -> None:
        """Notes a stretch in which the monitor or the machine stood still.

        The stretch is not excluded yet. What the rank sent meanwhile may be read later; it then shows that the monitor
        alone stood still, and that the rank ran.
        """
        if not self._began:
            return
        if self._pause[1]:
            self._exclude(self._pause[1])
        self._pause = (max(from_ns, self._at_ns), until_ns)

    # What is known of it.

    def times(self, now_ns: int) -> RankTimes:
        """Returns the ledger: exact until the rank's last change, with a note of what the time since then belongs to.

        The value is a copy; later messages do not change its numbers.

        Args:
            now_ns: the monitor's present, up to which the rank is taken to be where it was.
        """
        known = copy.copy(self._known)
        known.at_ns = self._at_ns
        if self._ended_ns is not None:
            now_ns = min(now_ns, self._ended_ns)
        known.now_ns = max(now_ns, self._at_ns)
        known.tail, known.tail_is_section = self._outside.value, False
        if self._inner is not None:
            known.tail, known.tail_is_section = self._known.counts_as(self._inner), True
        known.waited_ns = NO_STEP
        if self._expects_steps:
            known.waited_ns = self._between_ns() - self._stepped_ns
        known.pause = self._pause if self._pause[1] > self._at_ns else (0, 0)
        known.outside = {place.value: spent_ns for place, spent_ns in self._spent.items() if spent_ns}
        known.by_iterations = not self._uses_steps and known.step.count > 0
        named = {name: since_ns for name, since_ns in self._open.items() if self._known.counts_as(name) != OTHERS}
        known.open = dict(list(named.items())[-MAX_NAMES:])
        return known

    # Time.

    def _advance(self, until_ns: int) -> None:
        """Gives the time until `until_ns` to where the rank was: to the innermost section, or to `_outside`.

        Does nothing for a moment before the last change: a printed step may be read late.
        """
        if until_ns <= self._at_ns:
            return
        if self._pause[1]:
            self._pause_at(until_ns)
        spent_ns = until_ns - self._at_ns
        if spent_ns <= 0:
            return
        self._at_ns = until_ns
        if self._inner is None:
            self._spent[self._outside] += spent_ns
        else:
            self._known.section(self._inner).exclusive_ns += spent_ns

    def _pause_at(self, until_ns: int) -> None:
        """Excludes the pause that was noted, if the rank's next change, at `until_ns`, came after it."""
        from_ns, to_ns = self._pause
        if until_ns < to_ns:
            # The rank ran within the pause, and its monitor had not read that. At most the rest was a pause.
            self._pause = (max(from_ns, until_ns), to_ns)
            return
        self._exclude(to_ns)

    def _exclude(self, to_ns: int) -> None:
        """Gives the time of the noted pause, up to `to_ns`, to EXCLUDED."""
        from_ns, _ = self._pause
        self._pause = (0, 0)
        self._advance(from_ns)
        if to_ns > self._at_ns:
            self._spent[Outside.EXCLUDED] += to_ns - self._at_ns
            self._pauses.append((self._at_ns, to_ns))
            del self._pauses[:-_MAX_PAUSES]
            self._at_ns = to_ns

    def _step_ns(self) -> int:
        """Returns the time of all steps so far, including those that were lost at a restart."""
        if self._uses_steps:
            return self._known.step.exclusive_ns
        return self._spent[Outside.PREPARING] + self._spent[Outside.BETWEEN]

    def _between_ns(self) -> int:
        """Returns the time in which a step was the innermost section, or no section was open. By it the wait for the
        next step is measured: an evaluation or a checkpoint in a section of its own is no part of the wait."""
        return self._known.step.exclusive_ns + self._spent[Outside.PREPARING] + self._spent[Outside.BETWEEN]

    def _await_step(self) -> None:
        """Counts from now on how long a step is waited for. The next step is the first of its kind."""
        self._expects_steps = self._is_first = True
        self._stepped_ns = self._between_ns()

    # Sections.

    def _find_inner(self) -> None:
        """Finds the open section that was opened last."""
        if self._open:
            self._inner = max(self._open, key=self._open.__getitem__)
            self._inner_ns = self._open[self._inner]
        else:
            self._inner, self._inner_ns = None, -1

    def _forget_sections(self) -> None:
        self._open.clear()
        self._find_inner()

    def _open_section(self, name: str, since_ns: int) -> None:
        """Notes that a section was opened. One that was opened earlier than the innermost stays outside of it."""
        self._advance(since_ns)
        if name == STEP:
            self._begin_step(since_ns)
        self._open[name] = since_ns
        if since_ns >= self._inner_ns:
            self._inner, self._inner_ns = name, since_ns

    def _begin_step(self, since_ns: int) -> None:
        """Notes that a step begins. With the first section `step`, what iterations had counted as steps is dropped."""
        if not self._uses_steps:
            # Until now reported iterations stood for steps. The last one was reported before the first step began.
            self._uses_steps = True
            known = self._known
            known.step = Durations()
            known.points, known.lost_ns, known.saved_ns, self._done_ns = [], 0, min(0, known.saved_ns), 0
            known.progress_ns = known.first_done_ns = known.first_step_ns = 0
            known.gap_ns = known.gap_before_ns = known.gap_window = 0
            known.resumed = UNKNOWN
            if known.iteration != NO_ITERATION:
                known.resumed = known.iteration
                known.add_point(known.iteration, 0)
        if self._outside is not Outside.BETWEEN:
            self._await_step()
        self._outside = Outside.BETWEEN

    def _close(self, names: list[str], at_ns: int, was_seen: bool) -> None:
        """Closes sections at `at_ns`. `was_seen`: the rank reported this end. Otherwise the end is a guess, and the
        durations are not counted, though the time is."""
        self._advance(at_ns)
        saves = False
        for name in names:
            since_ns = self._open.pop(name)
            section = self._known.section(name)
            if was_seen:
                section.add(max(0, at_ns - since_ns - self._paused(since_ns, at_ns)))
            if name == STEP:
                self._end_step(at_ns)
            saves = saves or name in SAVE_SECTIONS
        self._find_inner()
        if saves:
            self._known.saved = self._known.iteration
            self._known.saved_ns = self._step_ns() - self._known.lost_ns

    def _paused(self, since_ns: int, until_ns: int) -> int:
        """Returns how many nanoseconds of a stretch were pauses."""
        return sum(max(0, min(to, until_ns) - max(start, since_ns)) for start, to in self._pauses)

    def _end_step(self, at_ns: int) -> None:
        """Notes that a step is done: for the loss at a fault, and for the gap from one step to the next."""
        self._known.progress_ns = at_ns
        self._done_ns = self._step_ns()
        if not self._known.first_done_ns:
            self._known.first_done_ns = at_ns
            self._known.first_step_ns = self._done_ns
        self._steps_of_call += 1
        between_ns = self._between_ns()
        if not self._is_first:
            self._known.add_gap(between_ns - self._stepped_ns)
        self._stepped_ns, self._is_first = between_ns, False

    # Iterations.

    def _reach(self, iteration: int, at_ns: int, reported: bool, printed_ns: int = 0) -> None:
        """Notes another iteration than the last one.

        Args:
            iteration: the iteration.
            at_ns: when it was reported.
            reported: the training reported it after the step; otherwise a report of sections carried it.
            printed_ns: how long a step takes, as the training printed it; 0: not known.
        """
        self._advance(at_ns)
        known = self._known
        before, known.iteration = known.iteration, iteration
        if reported and not self._uses_steps:
            steps = 1
            if iteration > before != NO_ITERATION and not self._restarted:
                steps = iteration - before
            self._end_interval(steps, printed_ns, at_ns)
        elif not self._saw_all and iteration > before != NO_ITERATION:
            # Nobody saw the ends of these steps.
            known.step.count += iteration - before
        counted_ns = self._step_ns() - known.lost_ns
        if known.resumed == UNKNOWN or self._restarted:
            # An iteration that is reported after a step is the step that was done. One that is known before the first
            # step of this process or call was done earlier.
            resumed = iteration
            if self._steps_of_call and reported:
                resumed -= 1
            counted_ns = self._resume(resumed, counted_ns)
        elif known.points and iteration <= known.points[-1][0]:
            # The training counts anew, with each epoch for example. A later cycle is taken to resume within this count.
            known.points = [(iteration - 1, known.points[-1][1])]
        self._known.add_point(iteration, counted_ns)

    def _resume(self, resumed: int, counted_ns: int) -> int:
        """Notes at which iteration the training resumed. Returns the time of steps that still counts then.

        After a restart in process the steps from the resumed iteration on are done again, so the time that they took
        before is lost.

        Args:
            resumed: the iteration that was complete when the training resumed.
            counted_ns: the time of steps that counted until now.
        """
        known = self._known
        if not self._restarted:
            known.resumed = resumed
            self._known.add_point(resumed, 0)
            return counted_ns
        self._restarted = False
        if not known.points:
            return counted_ns
        of_call_ns = max(0, self._step_ns() - self._interrupted_ns)
        kept_ns = min(int(time_until(known.points, resumed)), max(0, counted_ns - of_call_ns))
        known.lost_ns += max(0, counted_ns - of_call_ns - kept_ns)
        known.saved_ns = min(known.saved_ns, kept_ns)
        known.points = [point for point in known.points if point[0] < resumed]
        self._known.add_point(resumed, kept_ns)
        return kept_ns + of_call_ns

    def _end_interval(self, steps: int, step_ns: int, at_ns: int) -> None:
        """Counts the time since the last reported iteration as that of `steps` steps.

        Args:
            steps: at least 1.
            step_ns: how long each took; 0: they are taken to have been equally long.
            at_ns: when the last of them was done.
        """
        known = self._known
        since_ns = known.progress_ns
        if self._outside is Outside.PREPARING:
            since_ns = self._prepares_ns
        self._outside = Outside.BETWEEN
        length_ns = max(0, at_ns - since_ns - self._paused(since_ns, at_ns))
        known.step.add(step_ns or length_ns // steps, steps)
        self._end_step(at_ns)
