"""Draws what `ft_launcher top` shows, in a terminal, by rich (the extra `observe`).

`top.py` calls it on its main thread with the object of `/status.json`, at each answer, at each key, and once a second.
The whole screen is made anew each time, from top to bottom:

    the job and its state
    its state in memory, if it keeps any
    a note, or the keys
    a row for each node: its name, its ranks as a strip, the rank that is silent for longest
    the legend of the strip
    stacks, where a key has asked for them; else the faults, the latest first

Words of ranks are put in as text without markup, with control characters escaped: a rank must not be able to write to
the user's terminal. The only file that imports rich, which `top.py` reports as missing where it is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ft_launcher.record.console.console_text import printable
from ft_launcher.tools.status.memory_status import line_of
from ft_launcher.tools.status.summary import JobState, RankState

_LATE = 2
"""Steps behind the foremost rank from which a rank is marked as late. One is usual, since ranks are asked one after the
other."""
_MAX_FAULTS = 8
"""Faults that are shown, of two lines each."""
_OTHER_LINES = 6
"""Lines of a screen that are neither nodes nor faults: three above the rows of nodes, their header, and two below. One
more is of state in memory."""
# Values of `/status.json` -> how they are drawn. A state that is not here, of a later launcher, is drawn plainly.
_STYLE_OF = {
    JobState.RUNNING.value: "bold green",
    JobState.TROUBLED.value: "bold red",
    JobState.RESTARTING.value: "bold red",
    JobState.STALLED.value: "bold yellow",
}
_CHARACTER_OF = {
    RankState.HUNG.value: ("H", "bold reverse red"),
    RankState.STALLED.value: ("=", "yellow"),
    RankState.STARTING.value: ("s", "blue"),
    RankState.UNWATCHED.value: ("u", "dim"),
    RankState.EXITED.value: ("x", "dim"),
}
_LEGEND = ". training   2-9 + so many steps behind   = makes no steps   H hung   s starting   u not watched   x exited"
_KEYS = "s stacks of all ranks now, a of all nodes, Esc without them, q leaves"


Show = Callable[[Mapping[str, Any], str, Sequence[str]], None]
"""Shows the object of `/status.json`, a note about the present moment, and lines about stacks, which take the place of
the faults. Note and lines may be empty."""


@contextmanager
def live_view() -> Iterator[Show]:
    """Returns a context that shows the terminal's alternate screen, and gives the function that draws it.

    What the terminal had before comes back at the end. Drawn only when the function is called: rich starts no thread.
    """
    with Live(screen=True, auto_refresh=False) as live:
        yield lambda found, note, stacks: live.update(
            Group(*parts(found, note, stacks, live.console.size.height)), refresh=True
        )


def strip(ranks: Sequence[Mapping[str, Any]]) -> Text:
    """Returns the ranks of one node as a strip: a coloured character for each.

    Steps are compared within the node only: what other nodes have reported was true at other moments.
    """
    foremost = max((rank["iteration"] or 0 for rank in ranks), default=0)
    text = Text()
    for rank in ranks:
        character, style = _CHARACTER_OF.get(rank["state"], (".", "green"))
        if rank["state"] == RankState.TRAINING.value and rank["iteration"] is not None:
            behind = foremost - rank["iteration"]
            if behind >= _LATE:
                character = str(behind) if behind < 10 else "+"
                style = "yellow"
        elif rank["exit_code"]:
            style = "bold red"
        text.append(character, style)
    return text


def parts(found: Mapping[str, Any], note: str, stacks: Sequence[str], height: int) -> Iterator[Text | Table]:
    """Yields the parts of a screen of `height` lines. Rows of nodes leave room for what is below them.

    Args:
        found: the object of `/status.json`.
        note: about the present moment; empty: the keys are shown in its place.
        stacks: lines about stacks; empty: the faults are shown.
        height: lines of the terminal.
    """
    yield Text(printable(f"{found['job_name']}: {found['sentence']}"), _STYLE_OF.get(found["state"], "bold"))
    of_memory = []
    if found.get("memory"):
        of_memory = [line_of(found["memory"])]
    yield from (Text(printable(line)) for line in of_memory)
    yield Text(printable(note) or _KEYS, "bold red" if note else "dim")
    yield Text()
    below = len(stacks) or 2 * min(len(found["faults"]), _MAX_FAULTS) or 1
    room = height - _OTHER_LINES - len(of_memory)
    yield from _nodes(found, max(1, room - min(below, room // 2)))
    yield Text(_LEGEND, "dim")
    yield Text()
    if stacks:
        yield from (Text(printable(line)) for line in stacks)
        return
    faults = found["faults"]
    if not faults:
        yield Text(f"no fault so far; {found['restarts_left']} of {found['max_restarts']} restarts left")
    for fault in reversed(faults[-_MAX_FAULTS:]):
        when = time.strftime("%H:%M:%S", time.localtime(fault["t"]))
        yield Text(printable(f"{when} cycle {fault['cycle']}: rank {fault['rank']} {fault['what']}"), "red")
        if fault["next"]:
            lost = ""
            if fault.get("steps_lost") is not None:
                lost = f"; {fault['steps_lost']:,} step{'' if fault['steps_lost'] == 1 else 's'} lost"
            yield Text(printable(f"         next: {fault['next']}{lost}"), "dim")


def _nodes(found: Mapping[str, Any], most: int) -> Iterator[Table | Text]:
    """Yields the table with a row for each node, and a line about the nodes that have no room.

    Only the coordinator knows other nodes: elsewhere `found` has this node alone. Where there are more than `most`,
    nodes that are not well are shown, and of the well ones as many as have room.
    """
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("node", overflow="fold", max_width=32)
    table.add_column("ranks", overflow="fold")
    table.add_column("most silent", overflow="fold")
    nodes = [{**found, "age_s": 0.0, "is_old": False}, *(found.get("other_nodes") or [])]
    shown = nodes
    if len(nodes) > most:
        shown = sorted(nodes, key=_is_well)[: max(1, most - 1)]
    for node in sorted(shown, key=lambda node: int(node["node_rank"])):
        table.add_row(Text(printable(str(node["node"]))), strip(node["ranks"]), Text(_about(node)))
    yield table
    if len(shown) < len(nodes):
        well = all(_is_well(node) for node in nodes if node not in shown)
        yield Text(f"and {len(nodes) - len(shown)} nodes more{', all of them well' if well else ''}", "dim")


def _is_well(node: Mapping[str, Any]) -> bool:
    """Returns whether a node has reported lately, and all its ranks train or are about to."""
    well = (RankState.TRAINING, RankState.UNWATCHED, RankState.STARTING)
    has_reported = node["age_s"] is not None and not node["is_old"]
    return has_reported and all(rank["state"] in well for rank in node["ranks"])


def _about(node: Mapping[str, Any]) -> str:
    """Returns which rank of a node has been silent for longest, or for how long there is no report of the node."""
    if node["age_s"] is None:
        return "no report yet"
    if node["is_old"]:
        return f"no report for {node['age_s']:.0f} s"
    silent = max(node["ranks"], key=lambda rank: rank["sign_age_s"] or 0.0, default=None)
    if silent is None or silent["sign_age_s"] is None:
        return ""
    return f"rank {silent['rank']}, {silent['sign_age_s']:.1f} s"
