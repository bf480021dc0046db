"""One rank at the moment of a hang: how far it is in each process group, and where its stack is. Pure.

`collective.py` compares these views and names the culprit. `views` makes them from the evidence of this node's ranks.
Views of other nodes arrive as JSON: a node sends `to_record` with its arrival at the coordinator, or to the node that
asks (`agent/hang_exchange.py`, `agent/in_process/culprit_exchange.py`), and the receiver reads `of_record`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ft_launcher.decide.attribution import known_errors
from ft_launcher.decide.attribution.cycle_evidence import RankEvidence, iteration
from ft_launcher.decide.attribution.scene import Activity, Scene, numbered
from rank_monitor.contract.errors import ProtocolError
from rank_monitor.contract.rounds.barrier import ranges_of
from rank_monitor.contract.wire.messages import NO_ITERATION

_MAX_FRAMES = 8
"""Frames of a rank in a record for another node. Eight reach from a collective through torch's wrappers to the line of
the program, and keep the record of a rank near 1 KB."""

_WAITED = "waited in a collective until that failed"
_MAX_LOCATIONS = 16
"""Different locations of ranks that a fault lists, the ones with most ranks first. The console shows two of them."""

_MAY_BE_INSIDE = (Activity.UNKNOWN, Activity.IN_KERNEL, Activity.BLOCKED, Activity.LOCKED)
"""Activities in which an unfinished collective is taken as a wait: the stack does not show that the rank is elsewhere
in its program."""


@dataclass(frozen=True)
class GroupState:
    """How far one rank is in one process group.

    Attributes:
        entered: number of the last collective that the rank has entered, from 1; 0: none.
        finished: number of the last collective that the rank has finished.
        operation: name of the first unfinished collective; where all are finished, of the last one.
        shape: sizes and types of the tensors of that collective, as text.
        description: the name that the program gave the group; may be empty.
    """

    entered: int
    finished: int
    operation: str = ""
    shape: str = ""
    description: str = ""

    @property
    def waits_in(self) -> int | None:
        """Number of the collective that the rank waits in; None if it has finished all that it entered."""
        if self.entered > self.finished:
            return self.finished + 1
        return None


@dataclass(frozen=True)
class RankView:
    """One rank at the moment of a hang.

    Attributes:
        scene: stack and process state.
        groups: state by group; the key is torch's name of the group, the same on all members. Empty without a flight
            recorder.
        members: global ranks of the groups whose members are known. A group without an entry has at least the ranks
            whose `groups` name it.
        iteration: the last step that the rank reported; NO_ITERATION: none.
        ended: the rank has returned from its program, or from the function of an in-process wrapper.
        gave_up: the rank waits in a collective, whatever its stack shows. `views` marks a rank that waited until the
            collective timed out, and now raises the error; `collective.find_culprits` marks, in copies of its own, each
            rank of which the flight recorder shows a wait.
        sends: ranks to which the rank is sending, as far as the recorder knows (NCCL only); None: it is sending, but
            the recorder does not say to whom.
        receives: ranks from which the rank is receiving, in the same way.
    """

    scene: Scene
    groups: Mapping[str, GroupState] = field(default_factory=dict)
    members: Mapping[str, Collection[int]] = field(default_factory=dict)
    iteration: int = NO_ITERATION
    ended: bool = False
    gave_up: bool = False
    sends: frozenset[int] | None = frozenset()
    receives: frozenset[int] | None = frozenset()

    @property
    def rank(self) -> int:
        """Its global rank."""
        return self.scene.rank

    @property
    def is_waiting(self) -> bool:
        """Whether the rank is in a collective, a send or a receive, by the recorder or by its stack.

        The recorder knows no send and no receive of gloo, and nothing of what torch does while it makes a group: these
        show in the stack alone.
        """
        pending = any(state.waits_in is not None for state in self.groups.values())
        pending |= bool(self.sends or self.receives)
        inside = self.gave_up or self.scene.activity is Activity.COLLECTIVE
        # Gloo notes the end of a collective a moment after it. A rank that is stopped in between seems to be inside for
        # ever. So the recorder counts only where the stack does not contradict it.
        return inside or (pending and self.scene.activity in _MAY_BE_INSIDE)

    @property
    def may_wait(self) -> bool:
        """Whether the rank is in doubt: it sleeps in C code, which is either `work.wait()` of a send or a receive, or a
        lock of the program. Nothing shows which."""
        return self.scene.activity is Activity.BLOCKED and not self.is_waiting and not self.ended


def views(ranks: Sequence[RankEvidence], stop_began: float | None) -> list[RankView]:
    """Returns a view of each rank of a node, in the order of `ranks`, as the monitors saw them at the hang.

    Ranks that the launcher found stopped (SIGSTOP) since then count as stopped.

    Args:
        stop_began: when the launcher began to stop the ranks (monotonic seconds); None: it has not.
    """
    found, as_it_was = [], _end_of_hang(ranks, stop_began)
    for each in ranks:
        rank = each.by_itself(stop_began)
        gave_up = rank.failed_by_itself(stop_began) and rank.consequence_score == 1
        scene = rank.scene
        # The rank lost a peer when the hang was ended, before its monitor took a stack. So it waited for that peer
        # until then.
        has_no_stack = scene.activity is Activity.UNKNOWN and as_it_was is not None
        if has_no_stack and rank.exception is not None and (rank.exception_at or 0.0) >= (as_it_was or 0.0):
            gave_up |= known_errors.is_about_peers(rank.exception) == 1
        groups, members = states_of(rank.groups)
        # A return counts only if it came before the end of the hang. Later returns are consequences: the hang was over,
        # or a handler of SIGTERM saved a checkpoint and exited with 0. A rank that its monitor ended was inside until
        # then.
        has_returned = rank.left_at is not None and (as_it_was is None or rank.left_at <= as_it_was)
        has_returned |= scene.has_returned
        if rank.was_stopped:
            scene = replace(scene, process={"state": "T (stopped)"})
        sends, receives = peers_of(rank.groups, "sends"), peers_of(rank.groups, "receives")
        found.append(RankView(scene, groups, members, iteration(rank), has_returned, gave_up, sends, receives))
    return found


def first_verdict(ranks: Sequence[RankEvidence]) -> float | None:
    """Returns when the first rank was condemned (monotonic seconds); None: no monitor has condemned a rank."""
    moments = [rank.verdict_at for rank in ranks if rank.condemned and rank.verdict_at is not None]
    return min(moments, default=None)


def _end_of_hang(ranks: Sequence[RankEvidence], stop_began: float | None) -> float | None:
    """Returns the first moment at which anything was done about the hang (monotonic seconds); None: it still lasts.

    What ranks did after that moment is no evidence. A monitor sends SIGCONT to a stopped rank before it ends the rank:
    then all other ranks may go on within milliseconds and return from the program, long before the launcher looks.
    """
    return min((moment for moment in (first_verdict(ranks), stop_began) if moment is not None), default=None)


def others(views: Iterable[RankView], named: int) -> tuple[str, ...]:
    """Describes where all ranks but `named` are: one line for all ranks at the same location, most ranks first.

    Ranks whose wait failed come last: they have left the location at which they waited.
    """
    locations: dict[str, list[int]] = {}
    for view in views:
        if view.rank != named:
            locations.setdefault(_location(view), []).append(view.rank)
    found = sorted(locations.items(), key=lambda row: (row[0] == _WAITED, -len(row[1]), min(row[1])))
    return tuple(f"rank{'s' * (len(ranks) > 1)} {ranges_of(ranks)}: {text}" for text, ranks in found[:_MAX_LOCATIONS])


def _location(view: RankView) -> str:
    """Returns what a rank does and where, for example `in all_reduce 4 of group dp, at train.py:40 in step`."""
    pending = [name for name, state in view.groups.items() if state.waits_in is not None]
    if view.ended:
        return "has returned"
    if view.gave_up and not pending and not view.scene.frames:
        return _WAITED
    if pending and view.scene.activity is not Activity.STOPPED:
        state = view.groups[pending[0]]
        text = f"in {state.operation or 'collective'} {state.waits_in} of {group_text(pending[0], view)}"
    elif (view.sends or view.receives) and view.is_waiting:
        text = f"in {message_text(view)}"
    else:
        text = view.scene.activity.value
    if view.scene.own_frame:
        text += f", at {view.scene.own_frame}"
    if view.iteration != NO_ITERATION:
        text += f" (iteration {view.iteration})"
    return text


def group_text(group: str, view: RankView) -> str:
    """Returns a group in words: `group dp` by the name that the program gave it, else by torch's name."""
    description = view.groups[group].description
    if description:
        return f"group {description}"
    return f"group {group}"


def message_text(view: RankView) -> str:
    """Returns the sends and receives that a rank is in, in words: `a send to rank 3 and a receive from rank 1`."""
    parts = [f"a send to {numbered(sorted(view.sends or ()))}"] * bool(view.sends)
    parts += [f"a receive from {numbered(sorted(view.receives or ()))}"] * bool(view.receives)
    return " and ".join(parts)


def peers_of(groups: Mapping[str, Any], direction: str) -> frozenset[int] | None:
    """Returns the ranks to which a rank is sending, or from which it is receiving; None: the recorder does not say.

    Args:
        groups: as for `states_of`.
        direction: `sends` or `receives`.

    Raises:
        TypeError, ValueError: a peer is no number.
    """
    found: set[int] = set()
    for group in groups.values():
        peers = group.get(direction, [])
        if not isinstance(peers, list):
            return None
        found.update(map(int, peers))
    return frozenset(found)


def states_of(
    groups: Mapping[str, Any],
) -> tuple[dict[str, GroupState], dict[str, list[int]]]:
    """Returns the states of a rank in its groups, and their members where these are known.

    Args:
        groups: as `rank_monitor/flight_recorder.py: groups_of` returns them.
    """
    states, members = {}, {}
    for name, group in groups.items():
        shown = [str(group.get(key, "")) for key in ("operation", "shape", "description")]
        states[name] = GroupState(int(group.get("entered", 0)), int(group.get("finished", 0)), *shown)
        if group.get("members"):
            members[name] = list(group["members"])
    return states, members


def to_record(view: RankView) -> dict[str, Any]:
    """Returns a rank as JSON values for another node, about 1 KB.

    The members of groups are left out: in a large job each group of all ranks would name every rank.
    """
    state = str((view.scene.process or {}).get("state", ""))
    groups = {
        name: [group.entered, group.finished, group.operation, group.shape, group.description]
        for name, group in view.groups.items()
    }
    return {
        "rank": view.rank,
        "frames": list(view.scene.frames[:_MAX_FRAMES]),
        "state": state,
        "wchan": str((view.scene.process or {}).get("wchan", "")),
        "in_own_lock": view.scene.in_own_lock,
        "silent": view.scene.is_silent,
        "groups": groups,
        "sends": _listed(view.sends),
        "receives": _listed(view.receives),
        "iteration": view.iteration,
        "ended": view.ended,
        "gave_up": view.gave_up,
    }


def _listed(ranks: frozenset[int] | None) -> list[int] | None:
    if ranks is None:
        return None
    return sorted(ranks)


def of_record(record: Any) -> RankView:
    """Returns the rank in a record of another node.

    Raises:
        ProtocolError: `to_record` did not make the record. The caller goes on without the ranks of that node.
    """
    try:
        groups = {
            str(name): GroupState(int(entered), int(finished), str(operation), str(shape), str(description))
            for name, (entered, finished, operation, shape, description) in record["groups"].items()
        }
        process: dict[str, Any] = {"state": str(record["state"]), "wchan": str(record["wchan"])}
        if record.get("silent") is True:
            process["silent"] = True
        frames = [str(frame) for frame in record["frames"]]
        scene = Scene(int(record["rank"]), frames, process, record.get("in_own_lock") is True)
        sends, receives = peers_of({"": record}, "sends"), peers_of({"": record}, "receives")
        iteration, ended, gave_up = int(record["iteration"]), bool(record["ended"]), bool(record["gave_up"])
        return RankView(scene, groups, {}, iteration, ended, gave_up, sends, receives)
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise ProtocolError(f"the scene of a rank does not fit: {error!r}") from None
