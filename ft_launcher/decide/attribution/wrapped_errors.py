"""Finds the errors inside the text of another error: a traceback in a message, or the members of a group. Pure.

The type and message of an exception may only wrap the real error:

- A data loader, `torch.multiprocessing.spawn` and Ray raise an error in the parent whose message ends with the
  traceback of the child. The real error is the last line of that traceback.
- An exception group (PEP 654) only counts its members in its message, and prints each of them behind margins.

Called by `error_text.py`, `known_errors.py` and `first_failure.py`. A rank chooses these texts, so they are cut first.
"""

from __future__ import annotations

import re

from rank_monitor.contract.errors import LEFT_OUT, both_ends

GROUP = "  + Exception Group Traceback (most recent call last):"
"""The first line that Python prints of an exception group. The first line of a nested group is further to the right."""
# The margin before each line of a member. It is two characters wider in each nested group.
_MARGIN = re.compile(r"^ +(?:\| ?|\+ (?=Exception Group ))")
_SEPARATOR = re.compile(r"^ *(?:\+-)?\+?-{4,}(?: (?:\d+|\.\.\.) -{4,})?$")
_MAX_READ = 32768
"""Characters of a text. Twice what is read of a rank's output, which one group with its members can fill."""
_FRAME = '  File "'
_BETWEEN = (
    "Traceback (",
    "Original Traceback (",
    "Exception Group Traceback (",
    "The above exception was ",
    "During handling of ",
    LEFT_OUT,
)
"""Beginnings of lines that are part of no message: the headings of tracebacks, the lines between the tracebacks of a
chain, and the mark where a text was cut."""
_GROUP_ITSELF = re.compile(r"^[\w.]*ExceptionGroup: .{0,1000}\(\d{1,9} sub-exceptions?\)")


def is_group(traceback: str) -> bool:
    """Returns whether a printed traceback is that of an exception group."""
    return GROUP in traceback


def without_margins(traceback: str) -> str:
    """Returns the traceback of an exception group with each member as if it had been printed alone. A traceback of any
    other exception is returned unchanged."""
    if not is_group(traceback):
        return traceback
    return "\n".join(_MARGIN.sub("", line) for line in traceback.splitlines())


def errors_inside(text: str) -> list[str]:
    """Returns type and message (`ValueError: bad`) of each error whose traceback stands in a text, in that order.

    The message of an error begins with the first line after its indented frames and ends before the next traceback.

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
