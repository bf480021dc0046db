"""Ranks that run through collectives until nothing moves: what each has entered and finished then."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ft_launcher.decide.attribution.rank_view import GroupState, RankView
from ft_launcher.decide.attribution.scene import Scene
from rank_monitor.contract.wire.messages import NO_ITERATION

IN_COLLECTIVE = ("torch/distributed/distributed_c10d.py:2896 in all_reduce", "train.py:20 in step")
OUTSIDE = ("train.py:9 in load",)
BLOCKED = {"state": "S (sleeping)", "wchan": "futex_do_wait"}


@dataclass(frozen=True)
class Op:
    """One collective of a group.

    Attributes:
        unseen: torch's flight recorder does not know it (a receive of gloo).
        no_frame: the stack of a rank in it shows the program alone (`work.wait()`).
    """

    group: str
    name: str = "all_reduce"
    shape: str = "[[4]] Float"
    unseen: bool = False
    no_frame: bool = False


class Stuck:
    """The rank stays here, outside of any collective."""


class Stopped(Stuck):
    """The rank is stopped here."""


class Locked(Stuck):
    """The rank is in a lock of its program here."""


class SurelyLocked(Locked):
    """The rank is in a lock of its program here, by the text of that."""


@dataclass
class Rank:
    """The state of one rank: its program counter, and for each group what it has entered and finished."""

    program: Sequence[Op | Stuck | int]
    at: int = 0
    iteration: int = NO_ITERATION
    entered: dict[str, list[Op]] = field(default_factory=dict)
    inside: Op | None = None

    def advance(self) -> bool:
        """Goes on to the next collective. Returns whether it moved."""
        moved = False
        while self.inside is None and self.at < len(self.program):
            step = self.program[self.at]
            if isinstance(step, Stuck):
                return moved
            self.at, moved = self.at + 1, True
            if isinstance(step, int):
                self.iteration = step
            else:
                self.inside = step
                self.entered.setdefault(step.group, []).append(step)
        return moved


def hang(
    programs: Mapping[int, Sequence[Op | Stuck | int]],
    groups: Mapping[str, Sequence[int]],
    recorder: bool = True,
    iterations: bool = True,
) -> list[RankView]:
    """Runs the programs until nothing moves, and returns where each rank is.

    Args:
        programs: of each rank: collectives, iterations that it reports, and where it is stuck.
        groups: the members of each group.
        recorder: torch's flight recorder is there.
        iterations: the ranks report them.
    """
    ranks = {rank: Rank(program) for rank, program in programs.items()}
    while any([rank.advance() for rank in ranks.values()]) or _finish(ranks, groups):
        pass
    return [_view(number, rank, recorder, iterations) for number, rank in ranks.items()]


def _finish(ranks: Mapping[int, Rank], groups: Mapping[str, Sequence[int]]) -> bool:
    """Lets the members leave each collective that all of them have entered alike."""
    moved = False
    for name, members in groups.items():
        inside = [ranks[rank] for rank in members if ranks[rank].inside and ranks[rank].inside.group == name]
        alike = len({(len(rank.entered[name]), rank.inside) for rank in inside}) == 1
        if len(inside) == len(members) and alike:
            for rank in inside:
                rank.inside = None
            moved = True
    return moved


def _view(number: int, rank: Rank, recorder: bool, iterations: bool) -> RankView:
    states = {}
    for name, ops in rank.entered.items():
        seen = [op for op in ops if not op.unseen]
        if seen and recorder:
            waiting = rank.inside is not None and rank.inside.group == name and not rank.inside.unseen
            finished = len(seen) - int(waiting)
            op = seen[min(finished, len(seen) - 1)]
            states[name] = GroupState(len(seen), finished, op.name, op.shape, name)
    process, frames, in_own_lock = {"state": "R (running)"}, OUTSIDE, False
    if rank.inside and rank.inside.no_frame:
        process, frames = BLOCKED, (f"train.py:20 in {rank.inside.group}",)
    elif rank.inside:
        frames = IN_COLLECTIVE
    elif rank.at < len(rank.program) and isinstance(rank.program[rank.at], Stopped):
        process = {"state": "T (stopped)"}
    elif rank.at < len(rank.program) and isinstance(rank.program[rank.at], Locked):
        process, frames = BLOCKED, ("train.py:30 in acquire",)
        in_own_lock = isinstance(rank.program[rank.at], SurelyLocked)
    ended = rank.inside is None and rank.at == len(rank.program)
    scene = Scene(number, frames, process, in_own_lock)
    return RankView(scene, states, {}, rank.iteration if iterations else NO_ITERATION, ended)
