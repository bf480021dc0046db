"""One rank at the moment of a hang: how far it is in each of its groups, and where its stack is. Pure.

`collective.py` decides from these who holds up the others. Those of this node are made of its evidence; of other nodes
they come as records through the coordinator.
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
"""Of a rank's stack for the coordinator: enough to see the collective that it is in, below torch's wrappers."""

_WAITED = "waited in a collective until that failed"
_MAX_PLACES = 16
"""Different places of ranks in a fault, the ones with most ranks first; the console shows two of them."""

_MAY_BE_INSIDE = (Activity.UNKNOWN, Activity.IN_KERNEL, Activity.BLOCKED, Activity.LOCKED)
"""Places of a rank that does wait where it has not finished a collective."""


@dataclass(frozen=True)
class GroupState:
    """How far one rank is in one process group.

    Attributes:
        entered: number of the last collective that it has entered, from 1; 0: none.
        finished: number of the last one that it has finished.
        operation: name of the first one that it has not finished, else of the last one.
        shape: sizes and types of its tensors, as text.
        description: the name that the program gave the group; may be empty.
    """

    entered: int
    finished: int
    operation: str = ""
    shape: str = ""
    description: str = ""

    @property
    def waits_in(self) -> int | None:
        """Number of the collective that it waits in; None if it has finished all that it entered."""
        if self.entered > self.finished:
            return self.finished + 1
        return None


@dataclass(frozen=True)
class RankView:
    """One rank at the moment of a hang.

    Attributes:
        groups: by the group's name, which is the same on all its members; empty without a flight recorder.
        members: global ranks of these groups where they are known; a group that is not in it has at least the ranks
            whose `groups` name it.
        ended: it has returned from its program, or from the function of an in-process wrapper.
        gave_up: it waits in a collective, whatever its stack says: for instance it did until that timed out.
        sends: ranks to which it is sending, as far as the recorder knows it (NCCL); None: which ones is not known.
        receives: ranks from which it is receiving, in the same way.
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
        """Whether it is in a collective, a send or a receive, by the recorder or by its stack. The recorder knows no
        send and no receive of gloo, nor what torch does while it makes a group: these show in the stack alone."""
        pending = any(state.waits_in is not None for state in self.groups.values())
        pending |= bool(self.sends or self.receives)
        inside = self.gave_up or self.scene.activity is Activity.COLLECTIVE
        # Gloo notes the end of a collective a moment after it, so one that is stopped may seem to be in it for ever.
        return inside or (pending and self.scene.activity in _MAY_BE_INSIDE)

    @property
    def may_wait(self) -> bool:
        """Whether nothing says that it waits for another rank, and nothing that it does not: it may be in the `wait()`
        of a send or a receive."""
        return self.scene.activity is Activity.BLOCKED and not self.is_waiting and not self.ended


def views(ranks: Sequence[RankEvidence], stop_began: float | None) -> list[RankView]:
    """Returns the ranks of a node at a hang, as their monitors saw them, but for those that the launcher has found
    stopped since.

    Args:
        stop_began: when the launcher began to stop the ranks (monotonic seconds); None: it has not.
    """
    found, as_it_was = [], _end_of_hang(ranks, stop_began)
    for rank in ranks:
        by_itself = rank.by_itself(stop_began)
        found.append(_view(by_itself, by_itself.failed_by_itself(stop_began), as_it_was))
    return found


def first_verdict(ranks: Sequence[RankEvidence]) -> float | None:
    """Returns when the first rank was condemned; None: none was."""
    moments = [rank.verdict_at for rank in ranks if rank.condemned and rank.verdict_at is not None]
    return min(moments, default=None)


def _end_of_hang(ranks: Sequence[RankEvidence], stop_began: float | None) -> float | None:
    """Returns the first moment at which anything was done about the hang; None: it goes on.

    A monitor continues a rank that is stopped, before it ends it: then all others may go on within milliseconds and
    return from the program, long before the launcher looks at them.
    """
    return min((moment for moment in (first_verdict(ranks), stop_began) if moment is not None), default=None)


def _view(rank: RankEvidence, failed_by_itself: bool, as_it_was: float | None) -> RankView:
    gave_up = failed_by_itself and rank.collateral == 1
    scene = rank.scene
    # One that has lost a peer to the end of the hang, and had no time to show its stack, waited for it until then.
    has_no_stack = scene.activity is Activity.UNKNOWN and as_it_was is not None
    if has_no_stack and rank.exception is not None and (rank.exception_at or 0.0) >= (as_it_was or 0.0):
        gave_up |= known_errors.is_about_peers(rank.exception) == 1
    groups, members = states_of(rank.groups)
    # One that its monitor ended was inside until then; one that returned from its program has left, unless it did
    # because of the stop, whose signal a handler may take to save and exit with 0, or since the hang was over.
    has_returned = rank.left_at is not None and (as_it_was is None or rank.left_at <= as_it_was)
    has_returned |= scene.has_returned
    if rank.was_stopped:
        scene = replace(scene, process={"state": "T (stopped)"})
    sends, receives = peers_of(rank.groups, "sends"), peers_of(rank.groups, "receives")
    return RankView(scene, groups, members, iteration(rank), has_returned, gave_up, sends, receives)


def others(views: Iterable[RankView], named: int) -> tuple[str, ...]:
    """Describes where all ranks but the one that is `named` are: a line for those at the same place, most first, and
    last those whose wait failed: they are at no place any more."""
    places: dict[str, list[int]] = {}
    for view in views:
        if view.rank != named:
            places.setdefault(_place(view), []).append(view.rank)
    found = sorted(places.items(), key=lambda row: (row[0] == _WAITED, -len(row[1]), min(row[1])))
    return tuple(f"rank{'s' * (len(ranks) > 1)} {ranges_of(ranks)}: {text}" for text, ranks in found[:_MAX_PLACES])


def _place(view: RankView) -> str:
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
    """Returns a group in words: by the name that the program gave it, else by torch's."""
    description = view.groups[group].description
    if description:
        return f"group {description}"
    return f"group {group}"


def message_text(view: RankView) -> str:
    """Returns the sends and receives that a rank is in, in words."""
    parts = [f"a send to {numbered(sorted(view.sends or ()))}"] * bool(view.sends)
    parts += [f"a receive from {numbered(sorted(view.receives or ()))}"] * bool(view.receives)
    return " and ".join(parts)


def peers_of(groups: Mapping[str, Any], direction: str) -> frozenset[int] | None:
    """Returns the ranks to which a rank is sending, or from which it receives; None: which ones is not known.

    Args:
        groups: as for `states_of`.
        direction: `sends` or `receives`.
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
    """Returns a rank as JSON values for the coordinator, about 1 KB: without the members of groups, each of which would
    name every rank of the job."""
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
        ProtocolError: it does not fit.
    """
    try:
        groups = {
            str(name): GroupState(int(entered), int(finished), str(operation), str(shape), str(description))
            for name, (entered, finished, operation, shape, description) in record["groups"].items()
        }
        process = {"state": str(record["state"]), "wchan": str(record["wchan"])}
        frames = [str(frame) for frame in record["frames"]]
        scene = Scene(int(record["rank"]), frames, process, record.get("in_own_lock") is True)
        sends, receives = peers_of({"": record}, "sends"), peers_of({"": record}, "receives")
        iteration, ended, gave_up = int(record["iteration"]), bool(record["ended"]), bool(record["gave_up"])
        return RankView(scene, groups, {}, iteration, ended, gave_up, sends, receives)
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise ProtocolError(f"the scene of a rank does not fit: {error!r}") from None
