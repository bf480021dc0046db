"""Finds the culprit of a hang: the rank that the other ranks wait for, by what each has entered and finished. Pure.

In a hang nearly all ranks are innocent: they wait in a collective for a rank that did not come, and exceed their limits
within milliseconds of each other. Which limit passed first therefore says nothing. `find_culprits` looks at all ranks
at once. Callers: `first_failure.py` and `all_nodes.py` after a cycle, `hang_clocks.py` while ranks stand still,
`agent/hang_warnings.py` for a warning, the status page for one line.

The waits form a graph over the ranks (`wait_graph.py`): an edge from a rank to each rank that it waits for. A rank that
others wait for, and that waits for nobody itself, holds up the job. The rules are tried in this order, and the first
that gives a finding decides:

1. `_gone`: a rank is stopped, or has ended while others wait for it.
2. `_behind`: a rank never entered the collective that others wait in. It waits for nobody: a source of the graph.
3. `_deadlock`: the graph has a cycle and no such source.
4. `_mismatch`: the ranks are in one collective by number, but not by operation or size.
5. `_transport`: all members are in one collective, and it does not end.
6. `_without_recorder`: torch's flight recorder shows none of these, so iterations and stacks decide.

A rank is named only where the evidence leaves no other: a wrong name sends somebody to the wrong machine, which costs
more than no name. In doubt the finding is UNKNOWN, and its text says which evidence is missing.
docs/hangs.md is the user's description, with the known limits.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from ft_launcher.decide.attribution.fault import NETWORK_OR_DEVICE, HangFinding, HangKind
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
"""Waits of a circle that the text spells out. The text is one line on the console."""

_MAX_TRIED = 16
"""The longest circle for which each rank is left out in turn, to see whether another circle remains. A try takes 10 ms
for a job of 2,048 ranks, and the restart waits for the answer."""

_SAME_SIZES = ("reduce", "broadcast", "_all_gather_base", "all_gather_into_tensor")
"""Parts of names of operations in which every rank must pass the same number of elements. For a scatter, a gather, an
all-to-all and an all-gather of a list of tensors ranks may pass different numbers, so sizes are not compared."""
_SIZES = re.compile(r"\[([\d, ]{0,120})\]")
"""The sizes of one tensor in the recorder's text, for instance `[8, 1024]`."""


def sentence(finding: HangFinding, scene: Scene) -> str:
    """Returns what a culprit does and how many ranks wait for it, without the subject: `never entered ..., and 3 ranks
    wait for it`. The caller puts `it` or the rank before it.

    Args:
        scene: where the culprit is; its activity is the text where the finding has none.
    """
    text = finding.text or scene.activity.value
    if len(finding.culprits) > 1:
        return text
    return f"{text}{waiting_text(len(finding.waiting))}"


def summary(finding: HangFinding, views: Sequence[RankView]) -> str:
    """Returns one line for the status page: whom the ranks wait for. Empty: that is not known.

    Args:
        views: the ranks that `find_culprits` was asked about; the culprits must be among them.
    """
    if not finding.culprits:
        return finding.text
    what = finding.text
    scene = next((view.scene for view in views if view.rank == finding.culprits[0]), Scene(finding.culprits[0]))
    if scene.activity is Activity.STOPPED:
        what = "is stopped"
    elif not what:
        what = scene.activity.value
    if len(finding.culprits) > 1:
        return f"each of {numbered(finding.culprits)} {what}"
    if len(finding.waiting) == 1:
        return f"rank {finding.culprits[0]} {what}, 1 rank waits for it"
    if finding.waiting:
        return f"rank {finding.culprits[0]} {what}, {len(finding.waiting)} ranks wait for it"
    return f"rank {finding.culprits[0]} {what}"


def waiting_text(waiting: int) -> str:
    """Returns how many ranks wait for a culprit, as the end of `sentence`."""
    if waiting == 1:
        return ", and 1 rank waits for it"
    return f", and {waiting} ranks wait for it"


def find_culprits(ranks: Sequence[RankView], all_ranks: bool = True) -> HangFinding:
    """Returns who holds up the other ranks. Takes about 0.05 s for 2,048 ranks.

    Args:
        ranks: all ranks whose state is known, in any order.
        all_ranks: `ranks` are all ranks of the job. Otherwise the culprit may be a rank that is not given, so only
            findings are returned that hold whatever the other ranks do.
    """
    # A rank that waits in the in-process wrapper is a spare or between two rounds: nobody can be waiting for it.
    taking_part = [view for view in ranks if view.scene.activity is not Activity.WRAPPER]
    views = {view.rank: view for view in sorted(taking_part, key=lambda view: view.rank)}
    waits = waits_of(views, all_ranks)
    for wait in waits:
        # The recorder shows that this rank waits, even where its stack is in the program (`loss.item()` on a GPU). The
        # mark makes `is_waiting` true for all rules below; the caller's views stay as they are.
        views[wait.rank] = replace(views[wait.rank], gave_up=True)
    # The module's docstring lists the rules in their order.
    rules = (_gone, partial(_behind, all_ranks=all_ranks), _deadlock, _mismatch, _transport)
    finding = next((found for found in (rule(views, waits) for rule in rules) if found is not None), None)
    if finding is None:
        finding = _without_recorder(views, all_ranks)
    # GONE, BEHIND and MISMATCH hold whatever the ranks of other nodes do. A circle may have its source on another node,
    # and a group that looks complete here may have members there.
    elif not all_ranks and finding.kind not in (HangKind.GONE, HangKind.BEHIND, HangKind.MISMATCH):
        finding = HangFinding(HangKind.UNKNOWN, text="the ranks of other nodes are not known here")
    if finding.kind is HangKind.UNKNOWN and all_ranks:
        finding = _only_one_outside(views) or finding
    is_alone = all_ranks and len(views) == 1
    waiting = [view.rank for view in views.values() if view.is_waiting or (view.may_wait and not is_alone)]
    return replace(finding, waiting=tuple(rank for rank in waiting if rank not in finding.culprits))


def all_inside(ranks: Sequence[RankView]) -> HangFinding | None:
    """Returns TRANSPORT where all ranks of the job are in the same collective of a group of all ranks; else None.

    With NCCL a collective runs on the GPU, and each rank may wait for it in its own code. The rank whose limit passes
    first is then not the cause, although its stack shows no collective. `first_failure.py` asks this only after a rank
    exceeded its limit: a collective that all ranks have entered usually runs in the background and ends by itself.
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
            return HangFinding(HangKind.TRANSPORT, (), text, tuple(sorted(views)))
    return None


def _gone(views: Mapping[int, RankView], waits: Sequence[Wait]) -> HangFinding | None:
    """Rule 1: a rank is stopped, or has ended while others wait for it.

    Where the recorder shows for whom the ranks wait, only stopped ranks among these are named. Where the recorder shows
    nothing, a stopped rank is named only if no other rank can be the culprit: none has ended, and none is seen outside
    of a collective.
    """
    waited_for = {rank for wait in waits for rank in wait.missing}
    stopped = [view for view in views.values() if view.scene.activity is Activity.STOPPED and not view.ended]
    if any(view.rank in waited_for for view in stopped):
        stopped = [view for view in stopped if view.rank in waited_for]
    elif any(_is_outside(view) or view.ended for view in views.values()):
        stopped = []
    if stopped:
        return HangFinding(HangKind.GONE, _ranks(stopped), "is stopped (SIGSTOP or a debugger)")
    culprits = [view for view in views.values() if view.ended and view.rank in waited_for]
    if culprits:
        wait = next(wait for wait in waits if culprits[0].rank in wait.missing)
        if len(culprits) > len({wait.rank for wait in waits}):
            return _one_too_many([wait for wait in waits if culprits[0].rank in wait.missing], culprits, views)
        return HangFinding(HangKind.GONE, _ranks(culprits), f"has returned, and {never_entered(wait, views)}")
    return None


def _is_outside(view: RankView) -> bool:
    """Returns whether a rank is seen outside of any collective: such a rank may be the one that others wait for."""
    is_seen = view.scene.activity not in (Activity.STOPPED, Activity.UNKNOWN)
    return is_seen and not (view.is_waiting or view.may_wait or view.ended)


def _one_too_many(ahead: Sequence[Wait], others: Sequence[RankView], views: Mapping[int, RankView]) -> HangFinding:
    """Returns the finding where fewer ranks wait in a collective than never entered it.

    Two causes look alike: the ranks outside are late, or the ranks inside run a collective that the program of the
    others does not have. Only one case is certain: a single rank is inside, and all others have already passed that
    point of the program (`_further`). Then the rank inside is the culprit.
    """
    waiting = sorted({wait.rank for wait in ahead})
    collective = collective_text(ahead[0], views)
    if len(waiting) == 1 and _further(others, [views[rank] for rank in waiting]):
        return HangFinding(HangKind.BEHIND, tuple(waiting), f"is alone in {collective}")
    text = f"{numbered(waiting)} in {collective}, which most ranks never entered: they are late, or it is one too many"
    return HangFinding(HangKind.UNKNOWN, text=text)


def _behind(views: Mapping[int, RankView], waits: Sequence[Wait], all_ranks: bool) -> HangFinding | None:
    """Rule 2: ranks that others wait for and that wait for nobody themselves are the culprits.

    Where another rank outside of the collectives is in doubt (`_apart`), the doubtful rank may be the culprit: a rank
    that sleeps in its program may look again and again for a file that the doubtful rank should write. So beside a rank
    in doubt culprits are named only if they certainly wait for nobody. None: no rank can be named, and the next rules
    are asked.
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
                return HangFinding(HangKind.UNKNOWN, text=text)
            return HangFinding(HangKind.UNKNOWN, text=_in_unseen_call(in_unknown))
        return None
    waiting = [view for view in views.values() if view.is_waiting or view.rank in may_wait]
    culprits = {view.rank for view in sources}
    if len(sources) > len(waiting) and not _reach_less(sources, waiting):
        return _one_too_many([wait for wait in waits if culprits & set(wait.missing)], sources, views)
    wait = next(wait for wait in waits if sources[0].rank in wait.missing)
    return HangFinding(HangKind.BEHIND, _ranks(sources), never_entered(wait, views))


def _apart(
    found: Sequence[RankView], views: Mapping[int, RankView], all_ranks: bool
) -> tuple[list[RankView], list[RankView]]:
    """Splits ranks that are seen in no collective: those that certainly wait for no other rank, and those in doubt.

    A rank is in doubt in three cases:

    - It sleeps in C code, which may be `work.wait()` of a send or a receive (`RankView.may_wait`).
    - It waits for a thread, a queue or a process of its own, which may in turn wait for another rank. This is no doubt
      if the rank is the only one outside: then no rank is left that it could wait for.
    - It has entered an operation that is not finished. It may wait for its GPU, whose queue may hold that operation
      behind one that waits for another rank.
    """
    is_alone, finished = all_ranks and len(found) == 1, last_finished(views.values())
    in_doubt = [
        view
        for view in found
        if view.may_wait or (view.scene.waits_in_python and not is_alone) or has_unfinished(view, finished)
    ]
    return [view for view in found if view not in in_doubt], in_doubt


def _are_in_one_call(views: Mapping[int, RankView], in_doubt: Sequence[RankView]) -> bool:
    """Returns whether every rank that may wait is at a source line at which a second such rank is.

    A rank that sleeps in C code waits either for a lock of its own program or, in torch's `work.wait()`, for a rank.
    One cause brings only one rank into a lock of its own. So where two ranks sleep at the same line, that line waits
    for ranks, and all ranks at that line are innocent.

    Args:
        in_doubt: the ranks in doubt, by `_apart`; all of them must be such sleeping ranks.
    """
    found = [view for view in views.values() if view.may_wait]
    lines = Counter(view.scene.frames[0] for view in found)
    return all(view.may_wait for view in in_doubt) and all(lines[view.scene.frames[0]] > 1 for view in found)


def _in_unseen_call(ranks: Sequence[int]) -> str:
    where = "a call that torch's flight recorder does not know (a send, a receive), or for a thread"
    return f"{numbered(ranks)} may wait in {where}"


def _only_one_outside(views: Mapping[int, RankView]) -> HangFinding | None:
    """Returns BEHIND for the single rank of the job that certainly waits for nobody; None where there is no such rank.

    The last resort, where no rule has named a rank: all other ranks wait or may wait, so that they can only wait for
    this one, whether the recorder knows their call or not. All of these must hold:

    - No rank has ended: the others might wait for that rank as well.
    - The rank reports an iteration that is not later than those of the others. A rank ahead of them has already made
      its part of what they wait for.
    - The rank has no unfinished operation of its own, and it is certain that it waits for nobody.
    """
    if any(view.ended for view in views.values()):
        return None
    outside = [view for view in views.values() if not (view.is_waiting or view.may_wait or view.ended)]
    others = [view for view in views.values() if view.is_waiting or view.may_wait]
    # Where no rank is known to have a process group, ranks that sleep wait for locks of their own programs.
    if not any(view.is_waiting or view.groups for view in others):
        return None
    if len(outside) != 1 or outside[0].scene.activity is Activity.UNKNOWN or not _reach_no_more(outside, others):
        return None
    if has_unfinished(outside[0], last_finished(views.values())):
        return None
    # With a recorder the same doubt made `_behind` give no name. Without one there is no better evidence than a rank
    # that is seen in its own program, so a sleep there is no doubt.
    scene = outside[0].scene
    is_in_doubt = scene.waits_in_python or any(view.groups for view in views.values())
    is_sure = scene.waits_for_no_rank or (not scene.waits_in_python and _are_in_one_call(views, ()))
    if any(view.may_wait for view in others) and is_in_doubt and not is_sure:
        return None
    return HangFinding(HangKind.BEHIND, _ranks(outside), "")


def _reach_no_more(sources: Sequence[RankView], waiting: Sequence[RankView]) -> bool:
    """Returns whether all ranks report an iteration, and no source is at a later one than any rank that waits."""
    late = [view.iteration for view in sources]
    others = [view.iteration for view in waiting]
    return bool(late and others) and NO_ITERATION not in (*late, *others) and max(late) <= min(others)


def _reach_less(sources: Sequence[RankView], waiting: Sequence[RankView]) -> bool:
    """Returns whether the sources are at an earlier iteration than all ranks that wait, as far as they report one."""
    late = [view.iteration for view in sources if view.iteration != NO_ITERATION]
    others = [view.iteration for view in waiting if view.iteration != NO_ITERATION]
    return bool(late and others) and max(late) < min(others)


def _further(sources: Sequence[RankView], ahead: Sequence[RankView]) -> bool:
    """Returns whether the sources have passed the point of the program at which the ranks `ahead` wait: all sources
    have ended, or each is at a later iteration."""
    if all(view.ended for view in sources):
        return True
    known = all(view.iteration != NO_ITERATION for view in (*sources, *ahead))
    return known and min(view.iteration for view in sources) > max(view.iteration for view in ahead)


def _deadlock(views: Mapping[int, RankView], waits: Sequence[Wait]) -> HangFinding | None:
    """Rule 3: ranks wait for each other in a circle of groups, since they enter groups in different orders or leave a
    collective out.

    Ranks that run their collectives in the same order cannot form a cycle in the graph. So a rank that is out of step
    is part of every cycle: the culprits are the ranks without which no cycle is left. If there is no such rank, all
    ranks of one cycle are named.
    """
    cycle = cycle_of(waits, None)
    if not cycle:
        return None
    culprits = sorted(cycle)
    if len(cycle) <= _MAX_TRIED:
        culprits = [rank for rank in culprits if not cycle_of(waits, rank)] or culprits
    following = zip(cycle, [*cycle[1:], cycle[0]], strict=True)
    edges = [next(wait for wait in waits if wait.rank == rank and other in wait.missing) for rank, other in following]
    circle = ", ".join(f"rank {wait.rank} in {collective_text(wait, views)}" for wait in edges[:_MAX_NAMED])
    if any(wait.message for wait in edges):
        # A program may post a receive (`irecv`) long before it waits for the data, and be busy with something else
        # until then. So a circle with a message in it does not prove that the ranks of the circle wait.
        return HangFinding(HangKind.UNKNOWN, text=f"ranks wait for each other: {circle}")
    reason = "an order of collectives differs, or one is left out or called once more"
    if len(culprits) == 1:
        text = f"is out of step ({reason}), and ranks wait for each other: {circle}"
    else:
        text = f"waits in a circle, {circle}: one of {numbered(culprits)} is out of step ({reason})"
    return HangFinding(HangKind.DEADLOCK, tuple(culprits), text)


def _mismatch(views: Mapping[int, RankView], waits: Sequence[Wait]) -> HangFinding | None:
    """Rule 4: members of a group are in its n-th collective, but in different operations or with different sizes.

    The culprits are the minority; where no side has a majority, both sides. Ranks that have already finished the
    collective, as their last one of the group, are compared too: with gloo the root of a broadcast sends and goes on,
    and so does a rank that passed fewer elements.
    """
    for (group, number), waiting in by_collective(waits).items():
        states = {rank: view.groups[group] for rank, view in views.items() if group in view.groups}
        through = [rank for rank, state in states.items() if state.finished == state.entered == number]
        known = [rank for rank in sorted({*waiting, *through}) if states[rank].operation]
        # The monitor cuts the text of many tensors (`rank_monitor/flight_recorder.py`). A cut text has an open bracket
        # and is not compared.
        has_sizes = all(states[rank].shape.count("[") == states[rank].shape.count("]") for rank in known)
        kinds = {rank: _kind(states[rank], has_sizes) for rank in known}
        shown = {kinds[rank]: _shown(states[rank]) for rank in reversed(known)}
        counts = Counter(kinds.values())
        if len(counts) < 2:
            continue
        (usual, most), *_ = counts.most_common()
        odd = [rank for rank in known if kinds[rank] != usual]
        if most > len(odd):
            culprits = odd
        else:
            culprits = known
        sides = [f"{shown[kind]} ({numbered([rank for rank in known if kinds[rank] == kind])})" for kind in counts]
        where = f"collective {number} of {group_text(group, views[waiting[0]])}"
        verb = "is" if set(culprits) <= set(waiting) else "is or was"
        text = f"{verb} in {where}, in which the ranks differ: {', '.join(sides)}"
        return HangFinding(HangKind.MISMATCH, tuple(culprits), text)
    return None


def _transport(views: Mapping[int, RankView], waits: Sequence[Wait]) -> HangFinding | None:
    """Rule 5: all members of a group have entered a collective, and none has finished it, wherever their stacks are.

    No rank is named: the ranks did their part, and the network or a device did not. `nccl_view.py` may name one.
    """
    for wait in waits:
        if wait.is_complete and not wait.missing:
            states = [view.groups[wait.group] for view in views.values() if wait.group in view.groups]
            # Gloo may fail to note the end of a collective on a rank, although all ranks have finished it. A rank that
            # has entered the next one is certainly not inside this one.
            inside = [state for state in states if state.finished < wait.number <= state.entered]
            if len(inside) == len(states) > 1:
                text = f"all {len(inside)} ranks are in {collective_text(wait, views)}"
                return HangFinding(HangKind.TRANSPORT, (), f"{text}{NETWORK_OR_DEVICE}")
    return None


def _without_recorder(views: Mapping[int, RankView], all_ranks: bool) -> HangFinding:
    """Rule 6: decides by iterations and stacks, where the recorder gives no finding.

    Names ranks outside of any collective in three cases, and in each other case the text says which evidence is
    missing:

    - All ranks that wait have made a call that all ranks must make, and those outside are not more than these. Then
      those outside have certainly not made it.
    - It is a single rank, at no later iteration than the ranks that wait, or with all ranks of the job known.
    - All ranks outside are at no later iteration, and they are not more than the ranks that wait.
    """
    waiting = [view for view in views.values() if view.is_waiting]
    not_waiting = [view for view in views.values() if not (view.is_waiting or view.ended)]
    seen = [view for view in not_waiting if view.scene.activity is not Activity.UNKNOWN]
    outside, in_doubt = _apart(seen, views, all_ranks)
    may_wait = [view.rank for view in in_doubt]
    unseen = [view.rank for view in not_waiting if view.scene.activity is Activity.UNKNOWN]
    ended = [view.rank for view in views.values() if view.ended]
    if not waiting and not may_wait:
        return HangFinding(HangKind.UNKNOWN, text="no rank waits in a collective")
    if unseen:
        return HangFinding(HangKind.UNKNOWN, text=f"{numbered(unseen)} gave no stack")
    if ended:
        return HangFinding(HangKind.UNKNOWN, text=f"{numbered(ended)} {_has(ended)} ended, and may be waited for")
    if may_wait:
        return HangFinding(HangKind.UNKNOWN, text=_in_unseen_call(may_wait))
    if not outside:
        return HangFinding(HangKind.UNKNOWN, text="all ranks wait in collectives, and nothing says in which")
    if all_ranks and len(outside) <= len(waiting) and all(view.scene.is_in_roll_call for view in waiting):
        return HangFinding(HangKind.BEHIND, _ranks(outside), "has not made a call that all ranks must make")
    reached = [view.iteration for view in waiting if view.iteration != NO_ITERATION]
    late = [view for view in outside if reached and NO_ITERATION != view.iteration <= min(reached)]
    is_ahead = bool(reached) and outside[0].iteration > min(reached)
    if len(outside) == 1 and (late or (all_ranks and not is_ahead)):
        return HangFinding(HangKind.BEHIND, _ranks(outside), "")
    if late and len(late) == len(outside) and len(outside) <= len(waiting):
        return HangFinding(HangKind.BEHIND, _ranks(outside), "")
    return HangFinding(HangKind.UNKNOWN, text=f"{numbered([view.rank for view in outside])} are in no collective")


def _kind(state: GroupState, has_sizes: bool) -> tuple[str, str]:
    """Returns what must be equal on all members of a collective: the operation, and for operations of `_SAME_SIZES` the
    number of elements and the type of each tensor.

    Args:
        has_sizes: the text of the sizes is whole on all ranks that are compared.
    """
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
