"""Finds the rank that the others wait for in a hang, by the collectives that each rank has entered and finished. Pure.

`first_failure.py` asks it for the ranks of a cycle that hangs. It names a rank only where the evidence leaves no other:
in doubt it says what is missing, since a wrong name costs more than none.

The waits form a graph over the ranks (`wait_graph.py`). A rank that others wait for, and that itself waits for nobody,
holds them up.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from ft_launcher.decide.attribution.fault import NETWORK_OR_DEVICE, Blame, HangKind
from ft_launcher.decide.attribution.rank_view import GroupState, RankView, group_text
from ft_launcher.decide.attribution.scene import Activity, Scene, numbered
from ft_launcher.decide.attribution.wait_graph import (
    Wait,
    by_collective,
    collective_text,
    cycle_of,
    has_unfinished,
    last_finished,
    never_entered,
    waits_of,
)
from rank_monitor.contract.wire.messages import NO_ITERATION

_MAX_NAMED = 4
"""The text is one line on the console; further ranks are counted."""

_MAX_TRIED = 16
"""Ranks of a circle of which each is left out in turn, to see whether one remains: 10 ms each for 2,048 ranks."""

_SAME_SIZES = ("reduce", "broadcast", "_all_gather_base", "all_gather_into_tensor")
"""In collectives with one of these in their names all ranks pass as many elements. In a scatter, a gather and an
all-to-all they may differ, and in an all-gather of a list of tensors."""
_SIZES = re.compile(r"\[([\d, ]{0,120})\]")
"""Of one tensor, in the text of the recorder."""


def sentence(blame: Blame, scene: Scene) -> str:
    """Returns what a rank that is to blame does, at this scene, and how many wait for it, without the subject."""
    text = blame.text or scene.activity.value
    if len(blame.ranks) > 1:
        return text
    return f"{text}{waiting_text(len(blame.waiting))}"


def summary(blame: Blame, views: Sequence[RankView]) -> str:
    """Returns in one line for a status whom the ranks wait for; empty: that is not known.

    Args:
        views: of the ranks, those to blame among them.
    """
    if not blame.ranks:
        return blame.text
    what = blame.text
    scene = next((view.scene for view in views if view.rank == blame.ranks[0]), Scene(blame.ranks[0]))
    if scene.activity is Activity.STOPPED:
        what = "is stopped"
    elif not what:
        what = scene.activity.value
    if len(blame.ranks) > 1:
        return f"each of {numbered(blame.ranks)} {what}"
    if len(blame.waiting) == 1:
        return f"rank {blame.ranks[0]} {what}, 1 rank waits for it"
    if blame.waiting:
        return f"rank {blame.ranks[0]} {what}, {len(blame.waiting)} ranks wait for it"
    return f"rank {blame.ranks[0]} {what}"


def waiting_text(waiting: int) -> str:
    """Returns the end of what `sentence` says of one rank."""
    if waiting == 1:
        return ", and 1 rank waits for it"
    return f", and {waiting} ranks wait for it"


def find(ranks: Sequence[RankView], all_ranks: bool = True) -> Blame:
    """Returns who holds up the others.

    Args:
        ranks: all that are known, in any order.
        all_ranks: these are all ranks of the job; else the one that is missing may be among those not given.
    """
    # A spare, or a rank between two iterations, has no part in what the others wait for.
    taking_part = [view for view in ranks if view.scene.activity is not Activity.WRAPPER]
    views = {view.rank: view for view in sorted(taking_part, key=lambda view: view.rank)}
    waits = waits_of(views, all_ranks)
    for wait in waits:  # by the recorder, whatever its stack says
        views[wait.rank] = replace(views[wait.rank], gave_up=True)
    blame = _first_that_applies(views, waits, all_ranks)
    is_alone = all_ranks and len(views) == 1
    waiting = [view.rank for view in views.values() if view.is_waiting or (view.may_wait and not is_alone)]
    return replace(blame, waiting=tuple(rank for rank in waiting if rank not in blame.ranks))


def all_inside(ranks: Sequence[RankView]) -> Blame | None:
    """Returns TRANSPORT where all ranks of the job are in one collective of a group of all of them, wherever their
    stacks are; None: they are not.

    Such a collective usually runs in the background and ends by itself: ask only where a rank exceeded its limit. With
    NCCL all ranks may wait for it in their own code, on a GPU, and then it is no fault of the one whose limit is first.
    """
    if len(ranks) < 2 or any(view.ended or view.scene.activity is Activity.STOPPED for view in ranks):
        return None
    of_all = set.intersection(*(set(view.groups) for view in ranks))
    for group in sorted(of_all):
        numbers = {view.groups[group].waits_in for view in ranks}
        number = numbers.pop()
        if number is not None and not numbers:
            views = {view.rank: view for view in ranks}
            wait = Wait(min(views), group, number, (), True)
            text = f"all {len(views)} ranks are in {collective_text(wait, views)}{NETWORK_OR_DEVICE}"
            return Blame(HangKind.TRANSPORT, (), text, tuple(sorted(views)))
    return None


def _first_that_applies(views: Mapping[int, RankView], waits: Sequence[Wait], all_ranks: bool) -> Blame:
    rules = (_gone, partial(_behind, all_ranks=all_ranks), _deadlock, _mismatch, _transport)
    blame = next((found for found in (rule(views, waits) for rule in rules) if found is not None), None)
    if blame is None:
        blame = _without_recorder(views, all_ranks)
    # These three hold whatever the ranks of other nodes do; a circle or a whole group may end there.
    elif not all_ranks and blame.finding not in (HangKind.GONE, HangKind.BEHIND, HangKind.MISMATCH):
        return Blame(HangKind.UNKNOWN, text="the ranks of other nodes are not known here")
    if blame.finding is HangKind.UNKNOWN and all_ranks:
        return _only_one_outside(views) or blame
    return blame


def _gone(views: Mapping[int, RankView], waits: Sequence[Wait]) -> Blame | None:
    """Rule 1: a rank that is stopped, or has ended while others wait for it.

    Where nothing shows that one waits for a stopped rank, it is named only if no other rank can be what they wait for.
    """
    waited_for = {rank for wait in waits for rank in wait.missing}
    stopped = [view for view in views.values() if view.scene.activity is Activity.STOPPED and not view.ended]
    if any(view.rank in waited_for for view in stopped):
        stopped = [view for view in stopped if view.rank in waited_for]
    elif any(_is_elsewhere(view) or view.ended for view in views.values()):
        stopped = []
    if stopped:
        return Blame(HangKind.GONE, _ranks(stopped), "is stopped (SIGSTOP or a debugger)")
    blamed = [view for view in views.values() if view.ended and view.rank in waited_for]
    if blamed:
        wait = next(wait for wait in waits if blamed[0].rank in wait.missing)
        if len(blamed) > len({wait.rank for wait in waits}):
            return _one_too_many([wait for wait in waits if blamed[0].rank in wait.missing], blamed, views)
        return Blame(HangKind.GONE, _ranks(blamed), f"has returned, and {never_entered(wait, views)}")
    return None


def _is_elsewhere(view: RankView) -> bool:
    """Whether it is seen outside of any collective, where it may hold up others."""
    is_seen = view.scene.activity not in (Activity.STOPPED, Activity.UNKNOWN)
    return is_seen and not (view.is_waiting or view.may_wait or view.ended)


def _one_too_many(ahead: Sequence[Wait], others: Sequence[RankView], views: Mapping[int, RankView]) -> Blame:
    """Handles a collective that few ranks wait in, and most never entered.

    One that is alone in it, while all others have passed that place, has a collective that the others do not have.
    Otherwise the others may be late together.
    """
    waiting = sorted({wait.rank for wait in ahead})
    collective = collective_text(ahead[0], views)
    if len(waiting) == 1 and _further(others, [views[rank] for rank in waiting]):
        return Blame(HangKind.BEHIND, tuple(waiting), f"is alone in {collective}")
    text = f"{numbered(waiting)} in {collective}, which most ranks never entered: they are late, or it is one too many"
    return Blame(HangKind.UNKNOWN, text=text)


def _behind(views: Mapping[int, RankView], waits: Sequence[Wait], all_ranks: bool) -> Blame | None:
    """Rule 2: the ranks that others wait for, and that wait in no collective themselves.

    Beside a rank of which nobody knows whether it waits, only those are named that surely do not: it may be the cause,
    and one that sleeps may look again and again for what that one should write.
    """
    waited_for = {rank for wait in waits for rank in wait.missing if rank in views}
    found = [views[rank] for rank in sorted(waited_for) if not views[rank].is_waiting]
    sources, in_doubt = _apart(found, views, all_ranks)
    may_wait = {view.rank for view in in_doubt}
    by_recorder = {wait.rank for wait in waits}
    in_unknown = sorted(rank for rank in waited_for - by_recorder if views[rank].is_waiting or rank in may_wait)
    is_sure = all(view.scene.waits_for_no_rank for view in sources)
    is_sure = is_sure or (len(sources) == 1 and _are_in_one_call(views, in_doubt))
    if not sources or (may_wait and not is_sure):
        if in_unknown:
            finished = last_finished(views.values())
            unfinished = [rank for rank in in_unknown if has_unfinished(views[rank], finished)]
            if unfinished:
                text = (
                    f"{numbered(unfinished)} {_has(unfinished)} entered what is not finished, and may wait for others"
                )
                return Blame(HangKind.UNKNOWN, text=text)
            return Blame(HangKind.UNKNOWN, text=_in_unseen_call(in_unknown))
        return None
    waiting = [view for view in views.values() if view.is_waiting or view.rank in may_wait]
    blamed = {view.rank for view in sources}
    if len(sources) > len(waiting) and not _reach_less(sources, waiting):
        return _one_too_many([wait for wait in waits if blamed & set(wait.missing)], sources, views)
    wait = next(wait for wait in waits if sources[0].rank in wait.missing)
    return Blame(HangKind.BEHIND, _ranks(sources), never_entered(wait, views))


def _apart(
    found: Sequence[RankView], views: Mapping[int, RankView], all_ranks: bool
) -> tuple[list[RankView], list[RankView]]:
    """Returns those ranks, of some that are seen in no collective, that wait for no other rank, and those that may.

    One that waits for a thread of its own may wait for what a rank does with that thread, so it is among the first only
    where it is alone: then there is no other rank in the job that it could wait for. One with an operation that is not
    finished may wait for the GPU, and that for a rank for which this operation stands behind another.
    """
    is_alone, finished = all_ranks and len(found) == 1, last_finished(views.values())
    in_doubt = [
        view
        for view in found
        if view.may_wait or (view.scene.waits_in_python and not is_alone) or has_unfinished(view, finished)
    ]
    return [view for view in found if view not in in_doubt], in_doubt


def _are_in_one_call(views: Mapping[int, RankView], in_doubt: Sequence[RankView]) -> bool:
    """Whether each rank that may wait, those `in_doubt` among them, is at a line at which another one is, too.

    One cause brings one rank into a lock of its own, and the second waits for a rank there. So this line waits for
    ranks, as torch's `work.wait()` of a send or a receive does, and every rank that is at it waits for one.
    """
    found = [view for view in views.values() if view.may_wait]
    lines = Counter(view.scene.frames[0] for view in found)
    return all(view.may_wait for view in in_doubt) and all(lines[view.scene.frames[0]] > 1 for view in found)


def _in_unseen_call(ranks: Sequence[int]) -> str:
    where = "a call that torch's flight recorder does not know (a send, a receive), or for a thread"
    return f"{numbered(ranks)} may wait in {where}"


def _only_one_outside(views: Mapping[int, RankView]) -> Blame | None:
    """The one rank of the job that surely waits for nobody, where all others wait or may wait, and it is not ahead of
    them: what they wait for can be it alone, whether the recorder knows the call or not. One that has ended can be
    it, too."""
    if any(view.ended for view in views.values()):
        return None
    outside = [view for view in views.values() if not (view.is_waiting or view.may_wait or view.ended)]
    others = [view for view in views.values() if view.is_waiting or view.may_wait]
    # A program that has no process group, as far as is known, waits in a lock of its own.
    if not any(view.is_waiting or view.groups for view in others):
        return None
    if len(outside) != 1 or outside[0].scene.activity is Activity.UNKNOWN or not _reach_no_more(outside, others):
        return None
    if has_unfinished(outside[0], last_finished(views.values())):
        return None
    # With a recorder `_behind` has seen this doubt; without one a rank that sleeps in its program is all there is.
    scene = outside[0].scene
    is_in_doubt = scene.waits_in_python or any(view.groups for view in views.values())
    is_sure = scene.waits_for_no_rank or (not scene.waits_in_python and _are_in_one_call(views, ()))
    if any(view.may_wait for view in others) and is_in_doubt and not is_sure:
        return None
    return Blame(HangKind.BEHIND, _ranks(outside), "")


def _reach_no_more(sources: Sequence[RankView], waiting: Sequence[RankView]) -> bool:
    """Whether all report iterations, and the sources are at none that is later than the first of those that wait."""
    late = [view.iteration for view in sources]
    others = [view.iteration for view in waiting]
    return bool(late and others) and NO_ITERATION not in (*late, *others) and max(late) <= min(others)


def _reach_less(sources: Sequence[RankView], waiting: Sequence[RankView]) -> bool:
    """Whether the sources are at an earlier iteration than those that wait."""
    late = [view.iteration for view in sources if view.iteration != NO_ITERATION]
    others = [view.iteration for view in waiting if view.iteration != NO_ITERATION]
    return bool(late and others) and max(late) < min(others)


def _further(sources: Sequence[RankView], ahead: Sequence[RankView]) -> bool:
    """Whether the sources are at a later iteration, or have ended: they have passed the place of the others."""
    if all(view.ended for view in sources):
        return True
    known = all(view.iteration != NO_ITERATION for view in (*sources, *ahead))
    return known and min(view.iteration for view in sources) > max(view.iteration for view in ahead)


def _deadlock(views: Mapping[int, RankView], waits: Sequence[Wait]) -> Blame | None:
    """Rule 2, continued: a cycle in the graph, where ranks enter groups in different orders, or leave one out.

    Ranks that run their collectives in the same order cannot form a cycle, so a rank that is out of step is part of
    every cycle. Blames the ranks that are in all cycles; if there are none, those of one cycle.
    """
    cycle = cycle_of(waits, None)
    if not cycle:
        return None
    faulty = sorted(cycle)
    if len(cycle) <= _MAX_TRIED:
        faulty = [rank for rank in faulty if not cycle_of(waits, rank)] or faulty
    following = zip(cycle, [*cycle[1:], cycle[0]], strict=True)
    edges = [next(wait for wait in waits if wait.rank == rank and other in wait.missing) for rank, other in following]
    circle = ", ".join(f"rank {wait.rank} in {collective_text(wait, views)}" for wait in edges[:_MAX_NAMED])
    if any(wait.message for wait in edges):
        # A receive may have been begun long before anybody waits for it, by a rank that is busy with something else.
        return Blame(HangKind.UNKNOWN, text=f"ranks wait for each other: {circle}")
    why = "an order of collectives differs, or one is left out or called once more"
    if len(faulty) == 1:
        text = f"is out of step ({why}), and ranks wait for each other: {circle}"
    else:
        text = f"waits in a circle, {circle}: one of {numbered(faulty)} is out of step ({why})"
    return Blame(HangKind.DEADLOCK, tuple(faulty), text)


def _mismatch(views: Mapping[int, RankView], waits: Sequence[Wait]) -> Blame | None:
    """Rule 3: same number, another operation or shape. Blames the minority; without one, both sides.

    Those that have finished it, as their last one of the group, count as well: with gloo the root of a broadcast sends
    and goes on, and so does a rank that passed fewer elements.
    """
    for (group, number), waiting in by_collective(waits).items():
        states = {rank: view.groups[group] for rank, view in views.items() if group in view.groups}
        through = [rank for rank, state in states.items() if state.finished == state.entered == number]
        known = [rank for rank in sorted({*waiting, *through}) if states[rank].operation]
        # The text of many tensors is cut at a limit: then it is not compared.
        has_sizes = all(states[rank].shape.count("[") == states[rank].shape.count("]") for rank in known)
        kinds = {rank: _kind(states[rank], has_sizes) for rank in known}
        shown = {kinds[rank]: _shown(states[rank]) for rank in reversed(known)}
        counts = Counter(kinds.values())
        if len(counts) < 2:
            continue
        (usual, most), *_ = counts.most_common()
        odd = [rank for rank in known if kinds[rank] != usual]
        if most > len(odd):
            faulty = odd
        else:
            faulty = known
        sides = [f"{shown[kind]} ({numbered([rank for rank in known if kinds[rank] == kind])})" for kind in counts]
        place = f"collective {number} of {group_text(group, views[waiting[0]])}"
        verb = "is" if set(faulty) <= set(waiting) else "is or was"
        text = f"{verb} in {place}, in which the ranks differ: {', '.join(sides)}"
        return Blame(HangKind.MISMATCH, tuple(faulty), text)
    return None


def _transport(views: Mapping[int, RankView], waits: Sequence[Wait]) -> Blame | None:
    """Rule 4: all members have entered a collective, and none has finished it, wherever their stacks are."""
    for wait in waits:
        if wait.is_complete and not wait.missing:
            states = [view.groups[wait.group] for view in views.values() if wait.group in view.groups]
            # Gloo may fail to note the end of one that all others have finished; who has entered the next is in that.
            inside = [state for state in states if state.finished < wait.number <= state.entered]
            if len(inside) == len(states) > 1:
                text = f"all {len(inside)} ranks are in {collective_text(wait, views)}"
                return Blame(HangKind.TRANSPORT, (), f"{text}{NETWORK_OR_DEVICE}")
    return None


def _without_recorder(views: Mapping[int, RankView], all_ranks: bool) -> Blame:
    """Rule 5: by iterations and stacks. Names a rank only if it is the only one outside of any collective."""
    waiting = [view for view in views.values() if view.is_waiting]
    elsewhere = [view for view in views.values() if not (view.is_waiting or view.ended)]
    seen = [view for view in elsewhere if view.scene.activity is not Activity.UNKNOWN]
    outside, in_doubt = _apart(seen, views, all_ranks)
    may_wait = [view.rank for view in in_doubt]
    unseen = [view.rank for view in elsewhere if view.scene.activity is Activity.UNKNOWN]
    ended = [view.rank for view in views.values() if view.ended]
    if not waiting and not may_wait:
        return Blame(HangKind.UNKNOWN, text="no rank waits in a collective")
    if unseen:
        return Blame(HangKind.UNKNOWN, text=f"{numbered(unseen)} gave no stack")
    if ended:
        return Blame(HangKind.UNKNOWN, text=f"{numbered(ended)} {_has(ended)} ended, and may be waited for")
    if may_wait:
        return Blame(HangKind.UNKNOWN, text=_in_unseen_call(may_wait))
    if not outside:
        return Blame(HangKind.UNKNOWN, text="all ranks wait in collectives, and nothing says in which")
    reached = [view.iteration for view in waiting if view.iteration != NO_ITERATION]
    late = [view for view in outside if reached and NO_ITERATION != view.iteration <= min(reached)]
    is_ahead = bool(reached) and outside[0].iteration > min(reached)
    if len(outside) == 1 and (late or (all_ranks and not is_ahead)):
        return Blame(HangKind.BEHIND, _ranks(outside), "")
    if late and len(late) == len(outside) and len(outside) <= len(waiting):
        return Blame(HangKind.BEHIND, _ranks(outside), "")
    return Blame(HangKind.UNKNOWN, text=f"{numbered([view.rank for view in outside])} are in no collective")


def _kind(state: GroupState, has_sizes: bool) -> tuple[str, str]:
    """Returns what must be the same for all members of a collective: its operation, and the number of elements of each
    tensor with its type where that matters."""
    if not (has_sizes and _has_same_sizes(state)):
        return state.operation, ""
    return state.operation, _SIZES.sub(_elements, state.shape)


def _elements(sizes: re.Match[str]) -> str:
    return str(math.prod(int(size) for size in re.findall(r"\d+", sizes[1])))


def _has_same_sizes(state: GroupState) -> bool:
    return any(name in state.operation for name in _SAME_SIZES)


def _has(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return "has"
    return "have"


def _ranks(views: Sequence[RankView]) -> tuple[int, ...]:
    return tuple(sorted(view.rank for view in views))


def _shown(state: GroupState) -> str:
    if state.shape and _has_same_sizes(state):
        return f"{state.operation} of {state.shape}"
    return state.operation
