"""All that is known of a failed cycle on one node and of each of its ranks, as values, and what follows from one rank
alone; this and the fault that follows from it as JSON. Pure; compares no ranks.

`agent/cycle/evidence.py`, `agent/fault_finding.py` and `agent/in_process/in_process.py` gather it, and
`first_failure.py` finds the fault. The journal keeps it, so that `ft_launcher replay` finds the fault again.
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

# A rank that died of one of these after the stop began was ended by the stop.
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_LOOKS_LIKE_A_WAIT = {Activity.COLLECTIVE: 1.0, Activity.BLOCKED: 0.5}
"""For a rank that exceeded a limit, by its place. Torch's `work.wait()` and a lock of the program's look alike."""


@dataclass(frozen=True)
class RankEvidence:
    """Evidence of one rank. Times are seconds of this node's monotonic clock; `exit_code` is as in `subprocess`;
    `in_own_lock` as in `Scene`; `returned_at` is when it said that its program had returned, before its process ended.
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
        """When it returned from its program; None: as far as is known it did not."""
        if self.exit_code == 0 and self.returned_at is None:
            return self.died_at  # a rank without our client says nothing
        return self.returned_at

    @property
    def failed_at(self) -> float | None:
        """When the first sign of its failure was seen; None without one."""
        signs = [self.exception_at]
        if self.exit_code not in (0, None):
            signs.append(self.died_at)
        if self.condemned:
            signs.append(self.verdict_at)
        return min((at for at in signs if at is not None), default=None)

    @property
    def condemned(self) -> bool:
        """Whether its monitor found that it hangs."""
        return self.verdict is not None and self.verdict.condemned

    @property
    def scene(self) -> Scene:
        """Stack and process state from the verdict that condemned it, else from before the ranks were stopped."""
        if self.condemned and self.verdict is not None:
            return Scene(self.rank, self.verdict.frames, self.verdict.process, self.in_own_lock)
        if self.snapshot is not None:
            return Scene(self.rank, self.snapshot.frames, self.snapshot.process, self.in_own_lock)
        return Scene(self.rank)

    @property
    def groups(self) -> Mapping[str, Any]:
        """How far it was in each process group, by the group's name, as `flight_recorder.groups_of` has it."""
        if self.snapshot is None:
            return {}
        return self.snapshot.groups

    @property
    def signal_number(self) -> int:
        """The signal that it died of; 0 when it did not die of a signal."""
        return max(0, -(self.exit_code or 0))

    @property
    def fault_kind(self) -> FaultKind:
        """What happened to it, if it failed."""
        if self.was_stopped or self.condemned:
            return FaultKind.HANG
        if self.signal_number:
            return FaultKind.SIGNAL
        if self.exception:
            return FaultKind.EXCEPTION
        return FaultKind.EXIT

    @property
    def collateral(self) -> float:
        """How much what the rank did looks like the consequence of another's failure: 1 wholly, 0 not.

        A rank that dies closes its connections some 20 ms before its end is seen, so a peer's exception comes first.
        """
        if self.condemned:
            return _LOOKS_LIKE_A_WAIT.get(self.scene.activity, 0.0)
        if self.exception:
            return known_errors.is_about_peers(self.exception)
        return 0.0

    def by_itself(self, stop_began: float | None) -> RankEvidence:
        """Returns this rank with the code 1, which Python would have given it, where the stop that began then ended it
        while it was exiting with an exception; else unchanged."""
        if self.exception is None or self.condemned or stop_began is None or (self.died_at or 0.0) <= stop_began:
            return self
        stopped = self.signal_number in _STOP_SIGNALS or self.killed_by_us
        if stopped:
            return replace(self, exit_code=1)
        return self

    def failed_by_itself(self, stop_began: float | None) -> bool:
        """Returns whether it failed, and not because of the stop that began then."""
        if self.failed_at is None:
            return False
        return stop_began is None or self.failed_at <= stop_began or self._died_of_no_stop

    @property
    def _died_of_no_stop(self) -> bool:
        """Whether it died of a signal that neither stop nor monitor sent: then its end was only noticed late."""
        ended_by_us = self.killed_by_us or self.condemned
        return self.signal_number > 0 and self.signal_number not in _STOP_SIGNALS and not ended_by_us


@dataclass(frozen=True)
class CycleEvidence:
    """Evidence of a node's ranks after the end of their cycle, or of one rank that ended while the others go on.

    Attributes:
        ranks: of every local rank that counts.
        node: of the node.
        stop_began: when the launcher began to stop the ranks (monotonic seconds); None: it has not.
        all_ranks: these are all ranks of the job.
        otherwise: the fault where no rank failed by itself: a restart in process failed, or all ranks were zombies.
        suspect_results: by local rank.
        on_purpose: by local rank, the fault on purpose that struck it in this cycle, in words.
        nccl: what NCCL says of the ranks of the job, after a hang; None: it was not asked, or did not answer in time.
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
        """Returns what remains without anything that ranks wrote: exit codes and verdicts."""
        ends = [replace(rank, exception=None, exception_at=None, snapshot=None) for rank in self.ranks]
        return replace(self, ranks=ends, suspect_results={}, nccl=None)


# In words.


def where(rank: RankEvidence) -> str:
    """Describes in which sections and at which iteration the rank was; empty when nothing is known."""
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
    """Describes in one line how the rank ended, and where it was."""
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


# As JSON.

_ALWAYS = ("rank", "local_rank", "pid")
_DEFAULTS = vars(RankEvidence(0, 0, 0))


def to_record(evidence: CycleEvidence) -> dict[str, Any]:
    """Returns JSON values, without the fields of ranks that have their defaults."""
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
    """Reads a record of `to_record`, or the facts of an event `evidence`; keys that no evidence has are ignored.

    Raises:
        ProtocolError: it is no such record.
    """
    return from_json(CycleEvidence, {**record, "node": record.get("node_evidence")}, ignore_unknown=True)


def fault_as_json(fault: Fault) -> dict[str, Any]:
    """Returns a fault as JSON values."""
    return to_json(fault)


def fault_of_json(record: Any) -> Fault:
    """Reads a record of `fault_as_json`, or the facts of an event `fault`; keys that no fault has are ignored.

    Raises:
        ProtocolError: it does not fit.
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
