"""Lets through what of a journal's events, and of a job's own answers, may be passed on to other people. Pure.

`tools/commands/bundle.py` sends every event and answer through here before anything is written. A bundle leaves the
user's site, so the rule is an allow-list: a field that is not marked is not passed on, and an event of a kind that this
release does not know is left out whole. The marks are beside the fields (`record/events/sharing.py`).

A text passes where this program wrote it, or where it has the form of a name, a number or a location in a program. Free
words of ranks, users and commands (messages of exceptions, arguments, requests) pass only where the user asks for them
(`--with-texts`): they may hold secrets.

What the marks mean here:

    WHOLE          the field passes as it is
    PART           the field passes through its function in `_PARTS`, which keeps numbers, names and locations
    TEXT           the field passes only with `--with-texts`
    PART_OR_TEXT   as PART; with `--with-texts` as WHOLE
    NEVER          the field does not pass, and neither does one without a mark

A new field with values inside needs a function in `_PARTS`, which names the keys that pass. Anyone may have written a
journal, so each function takes any value and returns an empty one where the value does not fit.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ft_launcher.record import surroundings
from ft_launcher.record.events import EVENTS
from ft_launcher.record.events.sharing import Sharing, sharing_of

Facts = Mapping[str, Any]
"""The fields of an event, or an object in one."""

# The forms that a text must have in full to pass: a frame of a stack, an error with its location, a name.
_FRAME = re.compile(r"[\w./<>+-]{1,300}:\d{1,9} in [\w.<>]{1,200}")
_ERROR = re.compile(r"([\w.]{1,100}|loss is not finite)( at [\w./<>+ -]{1,300}:\d{1,9})?")
_SAME_ERROR = "the same error "
"""The restart policy begins a reason with these words where it quotes an error."""
_OF_SAME_ERROR = re.compile(rf"{_SAME_ERROR}[\w ,]{{1,100}}: {_ERROR.pattern}( at iteration -?\d{{1,20}})?")
_TRACEBACK_LINE = re.compile(r'\s*File "([\w./<>+ -]{1,300})", line (\d{1,9}), in ([\w.<>]{1,200})')
_NAME = re.compile(r"[\w.:/<>\[\] +~()-]{1,100}")


def _words(text: str) -> frozenset[str]:
    """Returns the words of a text, as a set."""
    return frozenset(text.split())


# The keys that pass of a value with further values in it. All others are dropped, those of a later release too.
_OF_RANK = _words(
    "rank local_rank pid place exit_code died_at verdict_at exception_at was_stopped killed_by_us frames process "
    "groups state iteration sections sign_age_s reading_age_s"
)
_OF_PROCESS = _words("signalled silent state stopped threads wchan")
_OF_GROUP = _words("entered finished started operation shape description sends receives")
_OF_ROW = _OF_GROUP - {"description"} | {"group", "ranks"}
_OF_READING = _words("check state took_s")
_OF_HAPPENED = _words("what local_rank exit_code")
_OF_MESSAGE = _words("member state iteration prefix limit_s")
_OF_KNOWN = _words("ranks rejoin final_codes since_s failed")
_OF_WRAPPER = _OF_MESSAGE | _words("local_ranks exit_code is_new is_lost starts is_next due_s is_ended")
_OF_STEP = _words("step local_rank member prefix limit_s joins iteration took_s failed")
_OF_STATUS = _words(
    "v t started launcher run_id node node_rank nodes state cycle max_restarts restarts_left restarts steps_lost "
    "memory health fault_count ranks times exit_code"
)


def of_event(event: str, facts: Facts, with_texts: bool = False) -> dict[str, Any] | None:
    """Returns what of an event may be passed on; None: this release does not know the event, so nothing may.

    Args:
        event: its name.
        facts: its fields, as a journal has them.
        with_texts: whether the user asks for texts in free words, too.
    """
    kind = EVENTS.get(event)
    if kind is None:
        return None
    marks = sharing_of(kind)  # type: ignore[arg-type]  # a class is hashable, whatever mypy holds of it
    found: dict[str, Any] = {}
    for name, value in facts.items():
        match marks.get(name):
            case Sharing.WHOLE:
                found[name] = value
            case Sharing.PART | Sharing.PART_OR_TEXT:
                found |= _part(name, facts)
    if with_texts:
        texts = (Sharing.TEXT, Sharing.PART_OR_TEXT)
        found |= {name: value for name, value in facts.items() if marks.get(name) in texts}
    return found


def _part(name: str, facts: Facts) -> dict[str, Any]:
    """Returns the field `name`, which may be passed on in part; empty where nothing of it passes."""
    if name == "reason":
        return _reason(facts)
    if name == "what":
        return {name: _what(facts)}
    if name not in _PARTS:
        return {}
    return {name: _PARTS[name](facts[name])}


def of_status(status: Facts) -> dict[str, Any]:
    """Returns what of `/status.json` may be passed on.

    The job's name and its sentence do not pass: the user chose the first, and the second may quote ranks.
    """
    found = _in_part({name: value for name, value in status.items() if name in _OF_STATUS})
    faults = [fault for fault in _list(status.get("faults")) if isinstance(fault, Mapping)]
    # A fault in the status does not say which limit was exceeded, as the event does. So its words may be those of a
    # wrapped rank, and only its kind passes.
    found["faults"] = [(of_event("fault", fault) or {}) | {"what": _kind_in_words(fault)} for fault in faults]
    return found


def of_stacks(answer: Facts) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Returns what of an answer to `/stacks` may be passed on: groups of ranks at the same location, and how far ranks
    are in each process group."""
    groups = [group for group in _list(answer.get("groups")) if isinstance(group, Mapping)]
    table = answer.get("collectives")
    if not isinstance(table, Mapping):
        table = {}
    stacks = [{"ranks": _numbers(group.get("ranks")), "frames": _frames(group.get("frames"))} for group in groups]
    return stacks, [_only(row, _OF_ROW) for row in _list(table.get("rows")) if isinstance(row, Mapping)]


def _in_part(facts: Facts) -> dict[str, Any]:
    """Returns facts, reduced to numbers, names and locations where they may hold words of others. Facts of a name that
    `_PARTS` does not have pass whole: the caller has chosen them."""
    return {name: _PARTS[name](value) if name in _PARTS else value for name, value in facts.items()}


def _reason(facts: Facts) -> dict[str, Any]:
    """Returns the reason of a decision, unless it may hold words of a rank or of a program."""
    if _is_asked_for(facts) or _quotes_an_error(facts):
        return {}
    return {"reason": facts["reason"]}


def _is_asked_for(facts: Facts) -> bool:
    """Returns whether a decision is, or may be, about a request of a rank. Its reason then quotes the rank."""
    inputs = facts.get("inputs")
    return not isinstance(inputs, Mapping) or "request" in inputs


def _quotes_an_error(facts: Facts) -> bool:
    """Returns whether a decision's reason quotes more of an error than its type and location: a program wrote those
    words."""
    reason = str(facts.get("reason", ""))
    return reason.startswith(_SAME_ERROR) and not _OF_SAME_ERROR.fullmatch(reason)


def _is_ours(fault: Facts) -> bool:
    """Returns whether this program wrote all of a fault's text.

    Not ours: the text of an exception, and a reason that an in-process wrapper gave.
    """
    what = str(fault.get("what", ""))
    return fault.get("kind") != "exception" and fault.get("limit") != "in_process" and "raised" not in what


def _what(fault: Facts) -> Any:
    """Returns the text of a fault where this program wrote it, else its kind."""
    if _is_ours(fault):
        return fault["what"]
    return _kind_in_words(fault)


def _kind_in_words(fault: Facts) -> str:
    """Returns the kind of a fault with its error or exit code, without words of others."""
    error = str(fault.get("error", ""))
    if fault.get("kind") == "exception" and error and _ERROR.fullmatch(error):
        return f"exception: {error}"
    if "exit_code" in fault:
        return f"{fault.get('kind')}, exit code {fault['exit_code']}"
    return str(fault.get("kind"))


def _traceback(value: Any) -> list[str]:
    """Returns the locations in a traceback, without its source lines and its message."""
    return _in_traceback(str(value).splitlines())


def _detail(value: Any) -> list[str]:
    """Returns the locations among the lines that the console shows of a fault: frames of a hang, or of a traceback."""
    return _frames(value) or _in_traceback(line for line in _list(value) if isinstance(line, str))


def _in_traceback(lines: Iterable[str]) -> list[str]:
    """Returns the locations in the lines of a traceback, in the form of a frame."""
    found = [_TRACEBACK_LINE.match(line) for line in lines]
    return [f"{place[1]}:{place[2]} in {place[3]}" for place in found if place is not None]


def _frames(value: Any) -> list[str]:
    """Returns the texts of a list that have the form of a frame."""
    return [frame for frame in _list(value) if isinstance(frame, str) and _FRAME.fullmatch(frame)]


def _numbers(value: Any) -> list[int]:
    """Returns the whole numbers of a list."""
    return [number for number in _list(value) if type(number) is int]


def _ranks(value: Any) -> list[Any]:
    """Returns ranks as numbers, or each with the fields that may be passed on."""
    if not any(isinstance(rank, Mapping) for rank in _list(value)):
        return _numbers(value)
    return [_in_part(_only(rank, _OF_RANK)) for rank in _list(value) if isinstance(rank, Mapping)]


def _groups(value: Any) -> dict[str, Any]:
    """Returns process groups with the fields that may be passed on."""
    return {name: _only(group, _OF_GROUP) for name, group in _facts(value).items() if isinstance(group, Mapping)}


def _inputs(value: Any) -> Any:
    """Returns what a decision was made from, without words of a request or of an error."""
    if not isinstance(value, Mapping):
        return None
    found = dict(value)
    if isinstance(value.get("request"), Mapping):
        found["request"] = _only(value["request"], frozenset({"rank", "action"}))
    if isinstance(value.get("history"), Mapping):
        found["history"] = _in_part(value["history"])
    return found


def _happened(value: Any) -> dict[str, Any]:
    """Returns what a decision about a restart in process followed from, without words of a rank."""
    value = _facts(value)
    found = _named(value, _OF_HAPPENED)
    if isinstance(value.get("message"), Mapping):
        found["message"] = _named(value["message"], _OF_MESSAGE)
    return found


def _known(value: Any) -> dict[str, Any]:
    """Returns what was known before such a decision, without words of ranks."""
    if not isinstance(value, Mapping):
        return {}
    wrappers = [part for part in _list(value.get("wrappers")) if isinstance(part, Mapping)]
    return _only(value, _OF_KNOWN) | {"wrappers": [_named(wrapper, _OF_WRAPPER) for wrapper in wrappers]}


def _follows(value: Any) -> list[dict[str, Any]]:
    """Returns the steps of such a decision, without their reasons."""
    return [_named(step, _OF_STEP) for step in _list(value) if isinstance(step, Mapping)]


def _each(names: frozenset[str]) -> Callable[[Any], list[dict[str, Any]]]:
    """Returns a function that keeps only the keys `names` of each mapping in a list."""
    return lambda value: [_only(part, names) for part in _list(value) if isinstance(part, Mapping)]


def _only(facts: Facts, names: frozenset[str]) -> dict[str, Any]:
    """Returns the facts with these names."""
    return {name: value for name, value in facts.items() if name in names}


def _named(facts: Facts, names: frozenset[str]) -> dict[str, Any]:
    """Returns the facts with these names, without texts that do not have the form of a name."""
    return {name: value for name, value in _only(facts, names).items() if not isinstance(value, str) or _name(value)}


def _process(value: Any) -> dict[str, Any]:
    """Returns the state of a process in /proc."""
    return _only(_facts(value), _OF_PROCESS)


def _name(value: Any) -> str | None:
    """Returns a text that has the form of a name; None for anything else."""
    return value if isinstance(value, str) and _NAME.fullmatch(value) else None


def _names(value: Any) -> dict[str, str]:
    """Returns the entries of a mapping of which key and value have the form of names."""
    return {name: text for name, text in _facts(value).items() if _name(name) and _name(text)}


def _environment(value: Any) -> dict[str, str]:
    """Returns the variables that may be passed on, as `record/surroundings.py` chooses them."""
    return surroundings.environment({name: text for name, text in _facts(value).items() if isinstance(text, str)})


def _error(value: Any) -> str:
    """Returns an error that is only type and location; empty for anything else."""
    return value if isinstance(value, str) and _ERROR.fullmatch(value) else ""


def _list(value: Any) -> Iterable[Any]:
    """Returns `value` if it is a list, else an empty one: anyone may have written a journal."""
    return value if isinstance(value, list) else []


def _facts(value: Any) -> Facts:
    """Returns `value` if it is a mapping, else an empty one."""
    return value if isinstance(value, Mapping) else {}


_PARTS: dict[str, Callable[[Any], Any]] = {
    "detail": _detail,
    "environment": _environment,
    "error": _error,
    "follows": _follows,
    "frames": _frames,
    "groups": _groups,
    "happened": _happened,
    "inputs": _inputs,
    "known": _known,
    "process": _process,
    "ranks": _ranks,
    "readings": _each(_OF_READING),
    "refused": _each(frozenset({"step", "rank"})),
    "traceback": _traceback,
    "type": _name,
    "versions": _names,
    "why": _each(frozenset({"rank", "member", "interruption"})),
}
"""Field -> the part of its value that is passed on. `reason` and `what` depend on other fields and have functions of
their own."""
