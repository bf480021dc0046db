"""Searches lines for the expression of `--ft-watch-log`, in a time that is linear in the length of the line. Pure.

Python's `re` goes back and tries other ways: `(\\d+).*(\\d+).*x` takes 4096 to the power of three steps on a line of
digits, and nothing else of the launcher runs meanwhile. RE2 (the package google-re2, the extra `watch`) has no such
lines. But its syntax is not Python's: RE2 has no flag `x`, no comments and no `\\Z`, and its `\\d`, `\\w` and `\\s` are
ASCII.

So an expression is translated. `rank_monitor/contract/settings/log_pattern.py` has Python's own parser make a tree of
it and checks the tree; here the tree is written down again in RE2's syntax. Then RE2 finds what `re.search` would find,
with one difference: to RE2's `\\b` and `\\B` only ASCII letters, digits and the underscore are parts of a word.

`job_settings.py` and `python_api.py` check the expression before anything starts; `tools/training_log/presets.py`
searches for it in each line. The presets have expressions of their own, which are linear in Python's `re` and need no
RE2.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rank_monitor.contract.errors import ConfigError, one_line
from rank_monitor.contract.settings.config import RecordSettings
from rank_monitor.contract.settings.log_pattern import PRESETS, parse, sre

_EXTRA = "pip install 'ft-launcher[watch]', or name a preset"
"""What to do where RE2 is missing."""
_MAX_BYTES = 32 << 20
"""Memory that RE2 may take for an expression, whose compiled form all ranks of a node share. The largest allowed
expression has 500 classes like `[^\\w]`: 8 MiB, RE2's default, are too little for it, and 16 are enough. Most
expressions take 100 KiB."""
# Flag -> its letter in RE2. `re.VERBOSE` has none: the tree no longer has what that flag leaves out.
_FLAGS = {re.IGNORECASE: "i", re.MULTILINE: "m", re.DOTALL: "s"}
_PLACES = {
    sre.AT_BEGINNING: "^",
    sre.AT_BEGINNING_STRING: r"\A",
    sre.AT_END: "$",
    sre.AT_END_STRING: r"\z",
    sre.AT_BOUNDARY: r"\b",
    sre.AT_NON_BOUNDARY: r"\B",
}
"""Positions in a line -> RE2's syntax."""
_UNICODE = {
    sre.CATEGORY_DIGIT: r"\p{Nd}",
    sre.CATEGORY_NOT_DIGIT: r"\P{Nd}",
    sre.CATEGORY_SPACE: r"\x09-\x0d\x1c-\x20\x{85}\pZ",
    # RE2 has no class for everything that is no space: these are the ranges between the spaces.
    sre.CATEGORY_NOT_SPACE: (
        r"\x00-\x08\x0e-\x1b!-\x{84}\x{86}-\x{9f}\x{a1}-\x{167f}\x{1681}-\x{1fff}\x{200b}-\x{2027}"
        r"\x{202a}-\x{202e}\x{2030}-\x{205e}\x{2060}-\x{2fff}\x{3001}-\x{10ffff}"
    ),
    sre.CATEGORY_WORD: r"\pL\pN_",
    # The underscore is one of the connecting punctuation marks, of which the others are no part of a word.
    sre.CATEGORY_NOT_WORD: (
        r"\pM\pS\pZ\pC\p{Pd}\p{Ps}\p{Pe}\p{Pi}\p{Pf}\p{Po}"
        r"\x{203f}\x{2040}\x{2054}\x{fe33}\x{fe34}\x{fe4d}-\x{fe4f}\x{ff3f}"
    ),
}
"""Python's classes, as the contents of a class of RE2."""
_ASCII = {
    sre.CATEGORY_DIGIT: r"\d",
    sre.CATEGORY_NOT_DIGIT: r"\D",
    sre.CATEGORY_SPACE: r"\x09-\x0d ",
    sre.CATEGORY_NOT_SPACE: r"\x00-\x08\x0e-\x1f!-\x{10ffff}",
    sre.CATEGORY_WORD: r"\w",
    sre.CATEGORY_NOT_WORD: r"\W",
}
"""The same under the flag `(?a)`."""


class LinePattern:
    """A compiled expression of `--ft-watch-log`.

    Args:
        text: the expression, in Python's syntax, which `log_pattern.py` allows.

    Attributes:
        names: its named groups.

    Raises:
        ImportError: google-re2 is not installed.
        ValueError: RE2 refuses the expression.
    """

    def __init__(self, text: str) -> None:
        import re2  # here: a launch without an expression needs no RE2

        tree = parse(text)
        self.names = frozenset(tree.state.groupdict)
        options = re2.Options()
        options.log_errors = False
        options.max_mem = _MAX_BYTES
        try:
            self._pattern = re2.compile(_in_re2_syntax(tree), options)
        except re2.error as problem:
            raise ValueError(f"RE2 refuses it: {problem.args[0].decode(errors='replace')}") from None
        self._literal = ""
        if not tree.state.flags & re.IGNORECASE:
            self._literal = _longest_literal(tree)

    def search(self, line: str) -> dict[str, str | None] | None:
        """Returns named group -> text in the first match, or None for a group that took no part. None: nothing
        matches."""
        # Most lines have no step. This test rules them out in 0.2 us; a call of RE2 takes 3 us.
        if self._literal not in line:
            return None
        match = self._pattern.search(line)
        if match is None:
            return None
        found: dict[str, str | None] = match.groupdict()
        return found


def check_expression(record: RecordSettings, sources: Mapping[str, str]) -> None:
    """Checks that the expression of `--ft-watch-log` can be used: google-re2 is there, and takes it. A preset always
    can.

    Raises:
        ConfigError: it cannot be used.
    """
    if record.watch_log is None or record.watch_log in PRESETS:
        return
    source = sources.get("watch_log", "settings")
    try:
        LinePattern(record.watch_log)
    # Another package may have a module named `re2`, without the names that are used here.
    except (ImportError, AttributeError) as problem:
        problem_text = f"an expression needs the package google-re2, which cannot be used: {one_line(problem)}"
        raise ConfigError("watch_log", record.watch_log, source, problem_text, _EXTRA) from None
    except ValueError as problem:
        raise ConfigError("watch_log", record.watch_log, source, str(problem)) from None


# From Python's tree to RE2's syntax.


def _in_re2_syntax(tree: Any) -> str:
    """Returns the expression of a tree in RE2's syntax, in ASCII characters."""
    flags = tree.state.flags
    classes = _UNICODE
    if flags & re.ASCII:
        classes = _ASCII
    names = {number: name for name, number in tree.state.groupdict.items()}
    letters = "".join(letter for flag, letter in _FLAGS.items() if flags & flag)
    text = _Syntax(names, classes).sequence(tree)
    if letters:
        return f"(?{letters}){text}"
    return text


@dataclass(frozen=True)
class _Syntax:
    """Writes the parts of a tree in RE2's syntax.

    Attributes:
        names: number of a group -> its name.
        classes: category -> its characters, as the contents of a class.
    """

    names: Mapping[int, str]
    classes: Mapping[Any, str]

    def sequence(self, items: Any) -> str:
        """Returns parts that follow each other."""
        return "".join([self._part(operation, value) for operation, value in items])

    def _part(self, operation: Any, value: Any) -> str:
        """Returns one part. `log_pattern.py` has refused all operations that are not here."""
        if operation is sre.SUBPATTERN:
            group, _, _, body = value
            return f"({self._kind_of(group)}{self.sequence(body)})"
        if operation is sre.BRANCH:
            return f"(?:{'|'.join([self.sequence(branch) for branch in value[1]])})"
        if operation in (sre.MAX_REPEAT, sre.MIN_REPEAT):
            low, high, body = value
            text = f"(?:{self.sequence(body)}){_times(low, high)}"
            if operation is sre.MIN_REPEAT:
                return f"{text}?"
            return text
        if operation is sre.AT:
            return _PLACES[value]
        if operation is sre.ANY:
            return "."
        if operation is sre.LITERAL:
            return _character(value)
        if operation is sre.NOT_LITERAL:
            return f"[^{_character(value)}]"
        assert operation is sre.IN, operation
        return f"[{''.join([self._member(kind, item) for kind, item in value])}]"

    def _kind_of(self, group: int | None) -> str:
        """Returns how a group begins. Only named groups are read, so RE2 need not note where the others match."""
        name = self.names.get(group or 0)  # number 0 is the whole match, which has no name
        if name is None:
            return "?:"
        return f"?P<{name}>"

    def _member(self, kind: Any, item: Any) -> str:
        """Returns a member of a class. A mark of negation comes before all other members."""
        if kind is sre.NEGATE:
            return "^"
        if kind is sre.LITERAL:
            return _character(item)
        if kind is sre.RANGE:
            return f"{_character(item[0])}-{_character(item[1])}"
        return self.classes[item]


def _times(low: int, high: Any) -> str:
    """Returns how often a part may be repeated."""
    if high is sre.MAXREPEAT:
        return f"{{{low},}}"
    return f"{{{low},{high}}}"


def _character(code: int) -> str:
    """Returns one character, as a number unless it is an ASCII letter or digit: so it has no special meaning."""
    if chr(code).isascii() and chr(code).isalnum():
        return chr(code)
    return f"\\x{{{code:x}}}"


def _longest_literal(items: Any) -> str:
    """Returns the longest text that each match must contain, as far as no group or choice divides it."""
    texts = [""]
    for operation, value in items:
        if operation is sre.LITERAL:
            texts[-1] += chr(value)
        else:
            texts.append("")
    return max(texts, key=len)
