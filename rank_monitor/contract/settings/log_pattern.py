"""What `--ft-watch-log` may be: a preset's name, or a regular expression, which is checked here. Pure.

The launcher searches what ranks print for an expression (`ft_launcher/settings/line_pattern.py`), by RE2, in linear
time. Two things are refused: a repeat within another, for which an engine that tries every way takes exponential time,
and what refers to other text (back references, look-ahead), which RE2 does not have. So an expression costs little
wherever it is tried. The tree of an expression is made by Python's own parser.
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

__all__ = ["COUNTED_FROM_1", "GROUPS", "PRESETS", "SETTING", "parse", "sre"]

PRESETS = ("megatron", "torchtitan", "lightning", "huggingface", "tqdm", "nanogpt")
COUNTED_FROM_1 = frozenset({"megatron", "torchtitan", "lightning", "huggingface"})
"""Presets of logs whose first iteration is number 1: a line has the number of iterations that are done. nanoGPT's is
number 0. Of an expression nobody knows it, and the bars of tqdm have no iterations."""
GROUPS = ("iteration", "step_time", "loss")
"""The named groups that an expression may have: a whole number, seconds, and a number."""

_MAX_CHARACTERS = 1000
_MAX_PARTS = 500
"""Characters and classes of an expression, where `{m,n}` counts n times: each is tried at each position of a line."""
_ALLOWED = "allowed are characters, classes, ., ^, $, *, +, ?, {m,n}, | and groups, none repeated within another"
_REFUSED = {
    sre.GROUPREF: "a reference to a group",
    sre.GROUPREF_EXISTS: "a condition",
    sre.ASSERT: "a look-ahead or look-behind",
    sre.ASSERT_NOT: "a look-ahead or look-behind",
    sre.FAILURE: "a look-ahead or look-behind",  # `(?!)`, which later releases of Python parse so
    getattr(sre, "ATOMIC_GROUP", None): "an atomic group",
    getattr(sre, "POSSESSIVE_REPEAT", None): "a possessive repeat",
}


def _read(raw: object) -> str | None:
    """Reads the name of a preset or an expression; none: None. A single word that is no preset is a typing error."""
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
    """Raises ValueError unless a text is an expression that costs little, with named groups of `GROUPS` alone."""
    if len(text) > _MAX_CHARACTERS:
        raise ValueError(f"has {len(text)} characters; at most {_MAX_CHARACTERS} are read")
    try:
        names = re.compile(text).groupindex.keys()
        tree = parse(text)
    except (re.error, OverflowError, RecursionError) as problem:
        raise ValueError(f"is not a regular expression: {problem}") from None
    if not names or not names <= set(GROUPS):
        unknown = ", ".join(sorted(names - set(GROUPS))) or "none"
        raise ValueError(f"needs one or more of the named groups {', '.join(GROUPS)}, and no other (it has: {unknown})")
    if _parts(tree, repeated=False) > _MAX_PARTS:
        raise ValueError(f"has more than {_MAX_PARTS} parts, where a repeat {{m,n}} counts n times")


def parse(text: str) -> Any:
    """Returns the tree of an expression, as Python's parser makes it.

    Raises:
        re.error: the text is no expression.
    """
    return parser.parse(text)


def _parts(items: Any, repeated: bool) -> int:
    """Returns how many characters and classes an expression has.

    Args:
        items: the tree of the expression, or of a part of it.
        repeated: the part is inside a repeat.

    Raises:
        ValueError: the expression could take exponential time, or refers to other text.
    """
    found = 0
    for operation, value in items:
        if operation in _REFUSED:
            raise ValueError(f"has {_REFUSED[operation]}, which could take exponential time; {_ALLOWED}")
        if operation in (sre.MAX_REPEAT, sre.MIN_REPEAT):
            low, high, body = value
            if repeated and low != high:
                raise ValueError(f"has a repeat within a repeat, which could take exponential time; {_ALLOWED}")
            times = low + 1 if high is sre.MAXREPEAT else high
            found += _parts(body, repeated or high > 1) * times
        elif operation is sre.BRANCH:
            if repeated:
                raise ValueError(f"has alternatives within a repeat, which could take exponential time; {_ALLOWED}")
            found += sum(_parts(branch, repeated) for branch in value[1])
        elif operation is sre.SUBPATTERN:
            _, added, removed, body = value
            if added or removed:
                raise ValueError("has flags for a part of it; write them for all of it, as in (?i) at its beginning")
            found += _parts(body, repeated)
        else:
            found += 1
    return found


SETTING = kinds.Kind("PRESET|REGEX or none", _read)
"""The kind of the setting."""
