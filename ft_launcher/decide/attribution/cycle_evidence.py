"""The evidence of a failed cycle on one node: what is known of each rank, as values and as JSON. Pure.

`RankEvidence` holds what monitor, process and rank showed of one rank, and answers questions about that rank alone: did
it fail by itself, how, is its failure the consequence of another one. It compares no ranks: `first_failure.py` does,
and finds the fault. `agent/cycle/evidence.py`, `agent/fault_finding.py` and `agent/in_process/in_process.py` gather
the evidence. The journal keeps it (event `evidence`), so that `ft_launcher replay` can find the fault again.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass, replace
from typing import Any

from ft_launcher.decide.attribution import known_errors, nccl_view
from ft_launcher.decide.attribution.fault import Fault, FaultKind
from ft_launcher.decide.attribution.hints import NodeEvidence
from ft_launcher.decide.attribution.nccl_view import NcclView
from ft_launcher.decide.attribution.scene import Activity, Scene
from rank_monitor.contract.wire.json_record import from_json, to_json
from rank_monitor.contract.wire.launcher_messages import Snapshot, Verdict
from rank_monitor.contract.wire.messages import NO_ITERATION, RankException, ResultInDoubt

# A rank that died of one of these signals after the stop began was ended by the stop.
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_OF_A_DUMP = (signal.SIGSEGV, signal.SIGBUS)
"""A rank that executes Python may die of one of these when it is asked for its stacks by a signal
(`rank_monitor/stack_signal.py`)."""
_LOOKS_LIKE_A_WAIT = {Activity.COLLECTIVE: 1.0, Activity.BLOCKED: 0.5}
"""`RankEvidence.consequence_score` of a rank that exceeded a limit, by its activity. In C code (BLOCKED) torch's
`work.wait()` and a lock of the program look alike: hence one half."""


@dataclass(frozen=True)
class RankEvidence:
    """What is known of one rank after, or during, a failure. All times are seconds of this node's monotonic clock.

    Attributes:
        rank: its global rank.
        exit_code: as in `subprocess`: minus the number of the signal that ended it; None: it has not ended.
        died_at: when the agent saw the end of the process.
        verdict: what its monitor found, if it exceeded a limit; `verdict_at` is when the agent received it.
        exception: the uncaught exception that the rank reported; `exception_at` is when the agent received it.
        snapshot: the last state that its monitor took before the ranks were stopped.
        was_stopped: the launcher found the process stopped (SIGSTOP) before it ended the ranks.
        killed_by_us: the launcher's own SIGKILL ended it.
        in_own_lock: as in `Scene`.
        returned_at: when the rank said that its program had returned, which is before the end of its process.
    """

    rank: int
    local_rank: int
    pid: int
    exit_code: int | None = None
    died_at: float | None = None
    verdict: Verdict | None = None
    verdict_at: float | None = None
    exception: RankException | None = None
    exception_at: float | None = None
    snapshot: Snapshot | None = None
    was_stopped: bool = False
    killed_by_us: bool = False
    in_own_lock: bool = False
    returned_at: float | None = None

    @property
    def left_at(self) -> float | None:
        """When the rank returned from its program; None: it did not, as far as is known."""
        if self.exit_code == 0 and self.returned_at is None:
            return self.died_at  # a rank without `ft_client` reports no return; its exit code 0 says the same
        return self.returned_at

    @property
    def failed_at(self) -> float | None:
        """When the first sign of a failure was seen: an exception, a bad end, or a verdict. None: there was none."""
        signs = [self.exception_at]
        if self.exit_code not in (0, None):
            signs.append(self.died_at)
        if self.condemned:
            signs.append(self.verdict_at)
        return min((at for at in signs if at is not None), default=None)

    @property
    def condemned(self) -> bool:
        """Whether the monitor decided that the rank hangs and is ended. A verdict that only warns does not count."""
        return self.verdict is not None and self.verdict.condemned

    @property
    def scene(self) -> Scene:
        """Stack and process state: of the verdict that condemned the rank, else of the last snapshot before the stop.

        The verdict's stack is taken before the limit passed. A later one may show how the rank reacts to its end.
        """
        if self.condemned and self.verdict is not None:
            return Scene(self.rank, self.verdict.frames, self.verdict.process, self.in_own_lock)
        if self.snapshot is not None:
            return Scene(self.rank, self.snapshot.frames, self.snapshot.process, self.in_own_lock)
        return Scene(self.rank)

    @property
    def groups(self) -> Mapping[str, Any]:
        """How far the rank was in each process group, by the group's name (`rank_monitor/flight_recorder.py`)."""
        if self.snapshot is None:
            return {}
        return self.snapshot.groups

    @property
    def signal_number(self) -> int:
        """The number of the signal that ended the rank; 0: no signal did."""
        return max(0, -(self.exit_code or 0))

    @property
    def fault_kind(self) -> FaultKind:
        """How the rank failed, if it failed. A hang counts before what its end looked like: the monitor's kill ends a
        hanging rank by a signal."""
        if self.was_stopped or self.condemned:
            return FaultKind.HANG
        if self.signal_number:
            return FaultKind.SIGNAL
        if self.exception:
            return FaultKind.EXCEPTION
        return FaultKind.EXIT

    @property
    def consequence_score(self) -> float:
        """Whether the rank's failure is the consequence of another rank's: 1 certainly, 0.5 possibly, 0 not.

        The order of times does not tell: a rank that dies closes its connections some 20 ms before its end is seen, so
        the exception of a peer comes first.
        """
        if self.condemned:
            return _LOOKS_LIKE_A_WAIT.get(self.scene.activity, 0.0)
        if self.exception:
            return known_errors.is_about_peers(self.exception)
        return 0.0

    def by_itself(self, stop_began: float | None) -> RankEvidence:
        """Returns this evidence without the traces of the stop that began at `stop_began`.

        Python exits with 1 after an uncaught exception, but clean-up may take seconds. Where the stop's signal ended
        the rank during that clean-up, the result has exit code 1. In each other case the evidence is unchanged.
        """
        if self.exception is None or self.condemned or stop_began is None or (self.died_at or 0.0) <= stop_began:
            return self
        stopped = self.signal_number in _STOP_SIGNALS or self.killed_by_us
        if stopped:
            return replace(self, exit_code=1)
        return self

    def failed_by_itself(self, stop_began: float | None) -> bool:
        """Returns whether the rank failed, and not because of the stop.

        Args:
            stop_began: when the launcher began to stop the ranks (monotonic seconds); None: it has not.
        """
        if self.failed_at is None:
            return False
        return stop_began is None or self.failed_at <= stop_began or self._died_of_no_stop

    @property
    def _died_of_no_stop(self) -> bool:
        """Whether a signal ended the rank that neither the stop nor its monitor sends (SIGSEGV, the kernel's SIGKILL).
        Such a rank died by itself, even where the agent saw its end only after the stop had begun.

        A rank that got the signal for its stacks may have died of that: faulthandler may have read freed memory."""
        may_be_of_dump = self._was_signalled and self.signal_number in _OF_A_DUMP
        ended_by_us = self.killed_by_us or self.condemned or may_be_of_dump
        return self.signal_number > 0 and self.signal_number not in _STOP_SIGNALS and not ended_by_us

    @property
    def _was_signalled(self) -> bool:
        """Whether the rank got the signal for its stacks when its monitor was last asked (`rank_process.py`)."""
        return self.snapshot is not None and self.snapshot.process.get("signalled") is True


@dataclass(frozen=True)
class CycleEvidence:
    """All evidence of a node after the end of a cycle, or about one rank that ended while the others go on in process.

    Attributes:
        ranks: the evidence of each local rank that counts.
        node: the evidence of the node itself.
        stop_began: when the launcher began to stop the ranks (monotonic seconds); None: it has not.
        all_ranks: `ranks` are all ranks of the job; False on one of several nodes.
        otherwise: the fault to return where no rank failed by itself: a restart in process failed, or all ranks were
            zombies.
        suspect_results: local rank -> the unexpected result that it reported (docs/rerun.md).
        on_purpose: local rank -> the fault that was injected into it in this cycle, in words.
        nccl: what NCCL's RAS said of the ranks of the job after a hang; None: it was not asked, or did not answer in
            time.
    """

    ranks: Sequence[RankEvidence]
    node: NodeEvidence = field(default_factory=NodeEvidence)
    stop_began: float | None = None
    all_ranks: bool = True
    otherwise: Fault | None = None
    suspect_results: Mapping[int, ResultInDoubt] = field(default_factory=dict)
    on_purpose: Mapping[int, str] = field(default_factory=dict)
    nccl: NcclView | None = None

    def without_texts(self) -> CycleEvidence:
        """Returns the evidence without everything that ranks wrote: exit codes and verdicts remain. For a second try
        where a text of a rank makes the first one fail."""
        ends = [replace(rank, exception=None, exception_at=None, snapshot=None) for rank in self.ranks]
        return replace(self, ranks=ends, suspect_results={}, nccl=None)


# The evidence in words, for headlines and lines about other ranks.


def where(rank: RankEvidence) -> str:
    """Returns in which sections and at which iteration the rank was: `in section step (8.0 s) at iteration 3`. Empty:
    nothing is known."""
    source, parts = rank.verdict or rank.snapshot, []
    if source and source.sections:
        parts.append("in section " + ", ".join(f"{name} ({age:.1f} s)" for name, age in source.sections.items()))
    if iteration(rank) != NO_ITERATION:
        parts.append(f"at iteration {iteration(rank)}")
    return " ".join(parts)


def iteration(rank: RankEvidence) -> int:
    """Returns the last iteration that the rank reported in this cycle; NO_ITERATION when it reported none."""
    if rank.verdict and rank.verdict.iteration != NO_ITERATION:
        return rank.verdict.iteration
    if rank.snapshot:
        return rank.snapshot.iteration
    return NO_ITERATION


def state(rank: RankEvidence) -> str:
    """Returns in one line how the rank ended, and where it was."""
    if rank.exit_code is None:
        became = "was running"
    elif rank.exit_code == 0:
        became = "had finished"
    elif rank.exit_code < 0:
        became = f"ended by {signal_name(rank.signal_number)}"
    else:
        became = f"ended with code {rank.exit_code}"
    text = f"rank {rank.rank} {became} {where(rank)}".rstrip()
    if rank.scene.own_frame and not rank.exception:
        text += f", at {rank.scene.own_frame}"
    return text


def signal_name(number: int) -> str:
    """Returns the name of a signal: `SIGKILL` for 9; `signal 41` for one without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


# The evidence as JSON, for the journal.

_ALWAYS = ("rank", "local_rank", "pid")
"""Fields that the record of a rank always has. Each other field is left out where it has its default, so that the line
of a node with many ranks stays short."""
_DEFAULTS = vars(RankEvidence(0, 0, 0))


def to_record(evidence: CycleEvidence) -> dict[str, Any]:
    """Returns the evidence as JSON values, as the event `evidence` has them."""
    otherwise = None
    if evidence.otherwise is not None:
        otherwise = fault_as_json(evidence.otherwise)
    nccl = None
    if evidence.nccl is not None:
        nccl = nccl_view.to_record(evidence.nccl)
    return {
        "ranks": [_rank_record(rank) for rank in evidence.ranks],
        "node_evidence": asdict(evidence.node),
        "stop_began": evidence.stop_began,
        "all_ranks": evidence.all_ranks,
        "otherwise": otherwise,
        "suspect_results": {str(rank): asdict(result) for rank, result in evidence.suspect_results.items()},
        "on_purpose": {str(rank): text for rank, text in evidence.on_purpose.items()},
        "nccl": nccl,
    }


def of_record(record: Mapping[str, Any]) -> CycleEvidence:
    """Returns the evidence in a record of `to_record`, or in the facts of an event `evidence` of a journal.

    Unknown keys are ignored: a later release may have written the journal.

    Raises:
        ProtocolError: `record` is no such record.
    """
    return from_json(CycleEvidence, {**record, "node": record.get("node_evidence")}, ignore_unknown=True)


def fault_as_json(fault: Fault) -> dict[str, Any]:
    """Returns a fault as JSON values."""
    return to_json(fault)


def fault_of_json(record: Any) -> Fault:
    """Returns the fault in a record of `fault_as_json`, or in the facts of an event `fault` of a journal. Unknown keys
    are ignored.

    Raises:
        ProtocolError: `record` is no such record.
    """
    return from_json(Fault, record, ignore_unknown=True)


def _rank_record(rank: RankEvidence) -> dict[str, Any]:
    found = {}
    for name, value in vars(rank).items():
        if is_dataclass(value):
            found[name] = dict(vars(value))  # JSON values only; `asdict` copies them, which takes three times as long
        elif name in _ALWAYS or value != _DEFAULTS[name]:
            found[name] = value
    return found
