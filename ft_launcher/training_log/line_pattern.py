"""Searches lines for a regular expression in time that is linear in the line's length. Pure.

Python's `re` goes back and tries other ways: `(\\d+).*(\\d+).*x` takes 4096 to the power of five steps on a line of
digits, during which nothing else of the launcher runs. Here each place of a line is tried once with each part of the
expression, as by RE2's BitState matcher; what is found is what `re.search` finds. It takes 0.3 ms for a line of 100
characters, of Python code that other threads interrupt. Lines without the longest literal text are left at once.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from rank_monitor.contract.settings.log_pattern import parse, sre

_CATEGORIES = {
    sre.CATEGORY_DIGIT: r"\d",
    sre.CATEGORY_NOT_DIGIT: r"\D",
    sre.CATEGORY_SPACE: r"\s",
    sre.CATEGORY_NOT_SPACE: r"\S",
    sre.CATEGORY_WORD: r"\w",
    sre.CATEGORY_NOT_WORD: r"\W",
}
_PLACES = {
    sre.AT_BEGINNING: "^",
    sre.AT_BEGINNING_STRING: r"\A",
    sre.AT_END: "$",
    sre.AT_END_STRING: r"\Z",
    sre.AT_BOUNDARY: r"\b",
    sre.AT_NON_BOUNDARY: r"\B",
}


class _Kind(Enum):
    PATTERN = auto()
    """`pattern` matches here: one character, or none at a place like `^`."""
    SPLIT = auto()
    """Goes on at `first`; where that fails, at `second`."""
    SAVE = auto()
    """Notes the place as number `first`."""
    MATCH = auto()


@dataclass
class _Part:
    kind: _Kind
    pattern: re.Pattern[str] = re.compile("")
    first: int = 0
    second: int = 0


class LinePattern:
    """An expression that `--ft-watch-log` allows."""

    def __init__(self, text: str) -> None:
        tree = parse(text)
        # Without `re.VERBOSE`: in the tree all that it leaves out is gone.
        self._flags = tree.state.flags & (re.IGNORECASE | re.ASCII | re.DOTALL | re.MULTILINE)
        self._groups: Mapping[str, int] = tree.state.groupdict
        self._parts: list[_Part] = []
        self._add(tree)
        self._parts.append(_Part(_Kind.MATCH))
        self._literal = ""
        if not self._flags & re.IGNORECASE:
            self._literal = _longest_literal(tree)

    def search(self, line: str) -> dict[str, str | None] | None:
        """Returns the named groups of the first match, None for one that took no part; None where nothing matches."""
        if self._literal not in line:
            return None
        seen: set[tuple[int, int]] = set()
        for start in range(len(line) + 1):
            saved = self._match(line, start, seen)
            if saved is not None:
                return {name: _between(line, saved, number) for name, number in self._groups.items()}
        return None

    def _match(self, line: str, start: int, seen: set[tuple[int, int]]) -> dict[int, int] | None:
        """Returns the places that a match at `start` noted. `seen`: what was tried in vain; it is added to."""
        waiting: list[tuple[int, int, dict[int, int]]] = [(0, start, {})]
        while waiting:
            number, at, saved = waiting.pop()
            if (number, at) in seen:
                continue
            seen.add((number, at))
            part = self._parts[number]
            match part.kind:
                case _Kind.PATTERN:
                    found = part.pattern.match(line, at)
                    if found is not None:
                        waiting.append((number + 1, found.end(), saved))
                case _Kind.SPLIT:
                    waiting.append((part.second, at, saved))
                    waiting.append((part.first, at, saved))
                case _Kind.SAVE:
                    waiting.append((number + 1, at, saved | {part.first: at}))
                case _Kind.MATCH:
                    return saved
        return None

    # From the tree to parts.

    def _add(self, items: Any) -> None:
        for operation, value in items:
            if operation is sre.SUBPATTERN:
                group, _, _, body = value
                if group is not None:
                    self._parts.append(_Part(_Kind.SAVE, first=2 * group))
                self._add(body)
                if group is not None:
                    self._parts.append(_Part(_Kind.SAVE, first=2 * group + 1))
            elif operation is sre.BRANCH:
                self._add_branches(value[1])
            elif operation in (sre.MAX_REPEAT, sre.MIN_REPEAT):
                low, high, body = value
                self._add_repeat(low, high, body, operation is sre.MIN_REPEAT)
            else:
                pattern = re.compile(_simple(operation, value), self._flags)
                self._parts.append(_Part(_Kind.PATTERN, pattern))

    def _add_branches(self, branches: list[Any]) -> None:
        ends = []
        for branch in branches[:-1]:
            split = self._add_split()
            self._add(branch)
            ends.append(self._add_split())
            split.second = len(self._parts)
        self._add(branches[-1])
        for end in ends:
            end.first = end.second = len(self._parts)

    def _add_repeat(self, low: int, high: int, body: Any, is_lazy: bool) -> None:
        for _ in range(low):
            self._add(body)
        if high is sre.MAXREPEAT:
            begin = len(self._parts)
            split = self._add_split()
            self._add(body)
            again = self._add_split()
            again.first = again.second = begin
            self._end_option(split, is_lazy)
            return
        options = []
        for _ in range(high - low):
            options.append(self._add_split())
            self._add(body)
        for split in options:
            self._end_option(split, is_lazy)

    def _add_split(self) -> _Part:
        """Adds a split that prefers the part after it."""
        split = _Part(_Kind.SPLIT, first=len(self._parts) + 1)
        self._parts.append(split)
        return split

    def _end_option(self, split: _Part, is_lazy: bool) -> None:
        split.second = len(self._parts)
        if is_lazy:
            split.first, split.second = split.second, split.first


def _between(line: str, saved: Mapping[int, int], group: int) -> str | None:
    if 2 * group + 1 not in saved:
        return None
    return line[saved[2 * group] : saved[2 * group + 1]]


def _simple(operation: Any, value: Any) -> str:
    """Returns the expression for the one character or the place that this part of the tree stands for."""
    if operation is sre.AT:
        return _PLACES[value]
    if operation is sre.ANY:
        return "."
    if operation is sre.LITERAL:
        return re.escape(chr(value))
    if operation is sre.NOT_LITERAL:
        return f"[^{re.escape(chr(value))}]"
    assert operation is sre.IN, operation
    found = ""
    for kind, item in value:
        if kind is sre.NEGATE:
            found += "^"
        elif kind is sre.LITERAL:
            found += re.escape(chr(item))
        elif kind is sre.RANGE:
            found += f"{re.escape(chr(item[0]))}-{re.escape(chr(item[1]))}"
        else:
            found += _CATEGORIES[item]
    return f"[{found}]"


def _longest_literal(items: Any) -> str:
    """Returns the longest text that each match contains, as far as no group divides it."""
    texts = [""]
    for operation, value in items:
        if operation is sre.LITERAL:
            texts[-1] += chr(value)
        else:
            texts.append("")
    return max(texts, key=len)
