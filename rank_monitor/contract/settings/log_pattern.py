"""What `--ft-watch-log` may be: a preset's name, or a regular expression, which is checked here. Pure.

The expression reads what ranks print, in the launcher. Python's `re` tries every way to divide a line among repeats:
one repeat within another takes exponential time on a line that almost matches, and the launcher would stand still. So
an expression may have no such repeat; its tree is that of Python's own parser.
"""

from __future__ import annotations

import re
import sys
from typing import Any

from rank_monitor.contract.settings import kinds

if sys.version_info >= (3, 11):
    from re import _constants as sre  # type: ignore[attr-defined]
    from re import _parser as parser  # type: ignore[attr-defined]
else:
    import sre_constants as sre
    import sre_parse as parser

PRESETS = ("megatron", "torchtitan", "lightning", "huggingface", "tqdm", "nanogpt")
GROUPS = ("iteration", "step_time", "loss")
"""The named groups of an expression: a whole number, seconds, and a number."""

_MOST_CHARACTERS = 1000
_MOST_CHOICES = 24
"""Repeats and alternatives of one expression. Those of a line of Megatron, with all its fields, are 20."""
_ALLOWED = "allowed are characters, classes, ., ^, $, *, +, ?, {m,n}, | and groups, none repeated within another"
_REPEATS = {sre.MAX_REPEAT, sre.MIN_REPEAT, getattr(sre, "POSSESSIVE_REPEAT", None)}
_REFUSED = {
    sre.GROUPREF: "a reference to a group",
    sre.GROUPREF_EXISTS: "a condition",
    sre.ASSERT: "a look-ahead or look-behind",
    sre.ASSERT_NOT: "a look-ahead or look-behind",
}


def _read(raw: object) -> str | None:
    if kinds.means_none(raw):
        return None
    text = str(raw)
    if text.strip().lower() in PRESETS:
        return text.strip().lower()
    if re.fullmatch(r"[\w-]+", text.strip()):
        raise ValueError(f"is not a preset; there are {', '.join(PRESETS)}")
    _check(text)
    return text


def _check(text: str) -> None:
    if len(text) > _MOST_CHARACTERS:
        raise ValueError(f"has {len(text)} characters; at most {_MOST_CHARACTERS} are read")
    try:
        names = re.compile(text).groupindex.keys()
        tree = parser.parse(text)
    except (re.error, OverflowError, RecursionError) as problem:
        raise ValueError(f"is not a regular expression: {problem}") from None
    if not names or not names <= set(GROUPS):
        unknown = ", ".join(sorted(names - set(GROUPS))) or "none"
        raise ValueError(f"needs one or more of the named groups {', '.join(GROUPS)}, and no other (it has: {unknown})")
    if _choices(tree, repeated=False) > _MOST_CHOICES:
        raise ValueError(f"has more than {_MOST_CHOICES} repeats and alternatives, and could take very long")


def _choices(items: Any, repeated: bool) -> int:
    """Returns how many choices an expression leaves to the engine. `repeated`: it is inside a repeat.

    Raises:
        ValueError: it could take exponential time.
    """
    found = 0
    for operation, value in items:
        if operation in _REFUSED:
            raise ValueError(f"has {_REFUSED[operation]}, which could take exponential time; {_ALLOWED}")
        if operation in _REPEATS:
            low, high, body = value
            varies = low != high
            if repeated and varies:
                raise ValueError(f"has a repeat within a repeat, which could take exponential time; {_ALLOWED}")
            found += int(varies) + _choices(body, repeated or high > 1)
        elif operation is sre.BRANCH:
            if repeated:
                raise ValueError(f"has alternatives within a repeat, which could take exponential time; {_ALLOWED}")
            found += len(value[1]) - 1 + sum(_choices(branch, repeated) for branch in value[1])
        elif operation is sre.SUBPATTERN or operation is getattr(sre, "ATOMIC_GROUP", None):
            body = value[-1] if operation is sre.SUBPATTERN else value
            found += _choices(body, repeated)
    return found


SETTING = kinds.Kind("PRESET|REGEX or none", _read)
"""The kind of the setting."""
