"""Finds the errors that are printed inside the text of another one: a traceback in a message, or a group. Pure.

A data loader, `torch.multiprocessing.spawn` and Ray raise an error in the parent whose message ends with the traceback
of their child: the real error is the last line. An exception group (PEP 654) prints its members behind margins.
Called by `error_text.py`, `known_errors.py` and `first_failure.py`. A rank chooses these texts, so they are cut first.
"""

from __future__ import annotations

import re

from rank_monitor.contract.errors import LEFT_OUT, both_ends

GROUP = "  + Exception Group Traceback (most recent call last):"
"""The first line of what Python prints of one; those of groups in it are further to the right."""
# Before each line of a member; the margin is two characters wider in each nested group.
_MARGIN = re.compile(r"^ +(?:\| ?|\+ (?=Exception Group ))")
_SEPARATOR = re.compile(r"^ *(?:\+-)?\+?-{4,}(?: (?:\d+|\.\.\.) -{4,})?$")
_MAX_READ = 32768
"""Characters: twice what is read of a rank's output, which a group with the tracebacks of its members can fill."""
_FRAME = '  File "'
_BETWEEN = (
    "Traceback (",
    "Original Traceback (",
    "Exception Group Traceback (",
    "The above exception was ",
    "During handling of ",
    LEFT_OUT,
)
"""How lines begin that belong to no message: of a traceback, and between those of a chain."""
_GROUP_ITSELF = re.compile(r"^[\w.]*ExceptionGroup: .{0,1000}\(\d{1,9} sub-exceptions?\)")


def is_group(traceback: str) -> bool:
    """Whether a printed traceback is that of an exception group."""
    return GROUP in traceback


def without_margins(traceback: str) -> str:
    """Returns the traceback of an exception group as if each member had been printed alone; another one as it is."""
    if not is_group(traceback):
        return traceback
    return "\n".join(_MARGIN.sub("", line) for line in traceback.splitlines())


def errors_inside(text: str) -> list[str]:
    """Returns type and message (`ValueError: bad`) of each error whose traceback is printed in a text, in its order.

    Args:
        text: the message of an exception, or a traceback without margins. Only `_MAX_READ` characters at its two
            ends are read.
    """
    found: list[list[str]] = []
    is_open, before = False, ""
    for line in both_ends(text, _MAX_READ).splitlines():
        is_message = bool(line) and not line.startswith(" ")
        if line.startswith((_FRAME, *_BETWEEN)) or _SEPARATOR.match(line):
            is_open = False
        elif is_message and before.startswith("  ") and not is_open:
            # The first line after the frames, each of which is indented.
            found.append([line])
            is_open = True
        elif is_open:
            found[-1].append(line)
        before = line
    errors = ["\n".join(lines).strip() for lines in found]
    return [error for error in errors if not _GROUP_ITSELF.match(error)]
