"""Writes docs/journal.md: `journal_top.md`, then the classes of `ft_launcher/record/events/`.

`make docs` runs `python -m scripts.docs.journal_events`; `tests/ft_launcher/record/test_events.py` fails where the page
is not what this would write.
"""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from dataclasses import fields
from pathlib import Path
from types import ModuleType

from ft_launcher.record.events import Event, cycle, in_process, job, memory, rank

PAGE = Path(__file__).resolve().parents[2] / "docs" / "journal.md"

_GROUPS: tuple[tuple[str, ModuleType], ...] = (
    ("The job and its nodes", job),
    ("A cycle", cycle),
    ("One rank", rank),
    ("State in memory", memory),
    ("Restarts in process", in_process),
)

_WORDS = {
    "str": "text",
    "int": "integer",
    "float": "number",
    "bool": "true or false",
    "Any": "any value",
    "None": "null",
    "Absent": "may be missing",
}
"""Names of Python's types -> words for JSON's."""

_MARKS = ("Shared", "InPart", "InPartOrText", "FreeText", "Private")
"""The marks of `ft_launcher/record/events/sharing.py`: the type of a field stands in one of them."""

_TOP = Path(__file__).with_name("journal_top.md")
"""What the page says before the events."""


def main() -> int:
    """Writes the page; returns the exit code."""
    PAGE.write_text(page())
    return 0


def page() -> str:
    """Returns the whole page."""
    parts = [_TOP.read_text()]
    for title, module in _GROUPS:
        parts.append(f"\n## {title}\n")
        parts += [_section(event) for event in _events_in(module)]
    return "".join(parts)


def _events_in(module: ModuleType) -> list[type[Event]]:
    """Returns the events that a module defines, in its order."""
    found = [value for value in vars(module).values() if isinstance(value, type) and issubclass(value, Event)]
    return [event for event in found if event.__module__ == module.__name__]


def _section(event: type[Event]) -> str:
    meanings = meanings_of(event)
    version = ""
    if event.v > 1:
        version = f" Version {event.v}."
    lines = [
        f"\n### {event.event}\n",
        f"{_joined(event.__doc__ or '')}{version}\n",
        "| key | type | meaning |",
        "|---|---|---|",
    ]
    for field in fields(event):
        lines.append(f"| `{field.name}` | {_json_type(str(field.type))} | {_joined(meanings[field.name])} |")
    return "\n".join(lines) + "\n"


def meanings_of(event: type[Event]) -> dict[str, str]:
    """Returns the docstring of each field, also of those of its base classes. A field without one is missing."""
    found: dict[str, str] = {}
    for owner in reversed(event.__mro__[:-1]):
        (syntax,) = ast.parse(textwrap.dedent(inspect.getsource(owner))).body
        assert isinstance(syntax, ast.ClassDef)
        for line, following in zip(syntax.body, syntax.body[1:], strict=False):
            if not isinstance(line, ast.AnnAssign) or not isinstance(following, ast.Expr):
                continue
            if isinstance(following.value, ast.Constant) and isinstance(following.value.value, str):
                found[ast.unparse(line.target)] = following.value.value
    return found


def _json_type(annotation: str) -> str:
    """Returns a Python annotation in words for JSON: `int | None` is "integer or null"."""
    return _of_syntax(ast.parse(annotation, mode="eval").body)


def _of_syntax(node: ast.expr) -> str:
    if isinstance(node, ast.BinOp):
        joined_by = " or "
        if isinstance(node.right, ast.Name) and node.right.id == "Absent":
            joined_by = ", "
        return f"{_of_syntax(node.left)}{joined_by}{_of_syntax(node.right)}"
    if isinstance(node, ast.Subscript) and ast.unparse(node.value) in _MARKS:
        return _of_syntax(node.slice)
    if isinstance(node, ast.Subscript) and ast.unparse(node.value) in ("list", "Sequence"):
        return f"list of {_of_syntax(node.slice)}"
    if isinstance(node, ast.Subscript):
        return "object"
    return _WORDS[ast.unparse(node)]


def _joined(text: str) -> str:
    return " ".join(text.split())


if __name__ == "__main__":
    sys.exit(main())
