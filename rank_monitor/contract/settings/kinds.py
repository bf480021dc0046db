"""How the value of a setting is read from text, YAML or Python, and which values are valid.

`config.py` gives each setting one of the kinds at the end of this file. A kind knows its own form and unit. It does not
know to which setting it belongs, nor where a value is from.

**Values come in three forms**: text, from a command line or a variable of the environment; what YAML makes of a file,
such as numbers, booleans and lists; and Python's own values. Each reader takes all three, and reads what it has
returned once more to the same value: settings travel as JSON to template and monitors.

**Errors.** A reader raises ValueError with what is wrong and what would be right, as the rest of a sentence about the
value; `declaration.parse` adds the key and the source.

Example: `COUNT.read("3")` returns 3; `COUNT.read("x")` raises ValueError("is not a number").
"""

from __future__ import annotations

import math
import re
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

NONE_TEXTS = frozenset({"", "none", "null"})
"""Texts that mean "no limit" or "nothing" where a setting may be that."""
AUTO = "auto"
NONE = "none"
_TRUE = frozenset({"true", "yes", "1"})
_FALSE = frozenset({"false", "no", "0"})
BOOLEAN_TEXTS = _TRUE | _FALSE
# The numbers of `logging`; the short names are in use as well.
_LEVELS = {
    **{"10": "DEBUG", "20": "INFO", "30": "WARNING", "40": "ERROR", "50": "CRITICAL"},
    **{"DBG": "DEBUG", "WARN": "WARNING"},
}
# A number, then K, M, G or T, and the rest of its unit's name.
_SIZE = re.compile(r"([0-9.]+)\s*([kmgt]?)(?:i?b)?")
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


_N = TypeVar("_N", int, float)


@dataclass(frozen=True)
class Kind:
    """The form of a value.

    Attributes:
        form: the form in words, for `--help` and for error messages.
        read: converts text, a YAML value or a value of its own; raises ValueError.
    """

    form: str
    read: Callable[[object], object]


def means_none(raw: object) -> bool:
    """Whether `raw` means "no limit": None, empty, or the text none or null."""
    return raw is None or (isinstance(raw, str) and raw.strip().lower() in NONE_TEXTS)


def _number(raw: object) -> float:
    """Reads a finite number. `yes` is refused: YAML makes a bool of it, which is an int in Python, and 1.0 would be a
    surprise."""
    if isinstance(raw, bool) or not isinstance(raw, (int, float, str)):
        raise ValueError("is not a number")
    try:
        value = float(raw)
    except (ValueError, OverflowError):
        raise ValueError("is not a number") from None
    if math.isnan(value) or math.isinf(value):
        raise ValueError("is not a finite number; write none for no limit")
    return value


def _count(raw: object) -> int:
    """Reads a whole number of at least 0; `3.0` is one."""
    value = _number(raw)
    if value < 0 or value != int(value):
        raise ValueError("must be a whole number, zero or more")
    return int(value)


def _within(read: Callable[[object], _N], least: float, most: float, problem: str) -> Callable[[object], _N]:
    """Returns a reader that refuses what is not from `least` to `most`."""

    def read_within(raw: object) -> _N:
        value = read(raw)
        if not least <= value <= most:
            raise ValueError(problem)
        return value

    return read_within


# `math.ulp(0.0)` is the least number above zero.
_limit = _within(_number, math.ulp(0.0), math.inf, "a limit must be above zero; write none for no limit")
_seconds = _within(_number, 0, math.inf, "must not be negative")
_factor = _within(_number, 1, math.inf, "must be at least 1")
_exit_code = _within(_count, 0, 255, "exit codes lie between 0 and 255")
_count_above_zero = _within(_count, 1, math.inf, "must be at least 1")
_port = _within(_count, 1, 65535, "ports lie between 1 and 65535")


def _save_interval(raw: object) -> float | str:
    """Reads seconds, or `auto`."""
    if isinstance(raw, str) and raw.strip().lower() == AUTO:
        return AUTO
    return _limit(raw)


def _memory_interval(raw: object) -> int | str:
    """Reads a number of steps, or `auto`."""
    if isinstance(raw, str) and raw.strip().lower() == AUTO:
        return AUTO
    return _count_above_zero(raw)


def _bytes(raw: object) -> int:
    """Reads a number of bytes above 0, or one with a unit: `512MiB`, `1.5 G`. Every unit is a power of 1024, as for
    `mount -o size=` and in Kubernetes' `Mi`."""
    match = _SIZE.fullmatch(str(raw).strip().lower())
    if match is None:
        raise ValueError("is not a number of bytes like 512MiB or 8GiB")
    count = int(_limit(match[1]) * _UNITS[match[2]])
    if count < 1:
        raise ValueError("must be at least one byte")
    return count


def _nccl_mode(raw: object) -> int | None:
    """Reads a mode of torch's TORCH_NCCL_ASYNC_ERROR_HANDLING, 0 to 3. true stands for 1, and false for none: so does
    Flyte's option of that name."""
    text = str(raw).strip().lower()
    if means_none(raw) or text == "false":
        return None
    if text == "true":
        return 1
    mode = _count(raw)
    if mode > 3:
        raise ValueError("is not a mode of torch")
    return mode


def _boolean(raw: object) -> bool:
    """Reads true or false; yes, no, 1 and 0 as text too."""
    if isinstance(raw, bool):
        return raw
    text = str(raw).strip().lower()
    if text in _TRUE:
        return True
    if text in _FALSE:
        return False
    raise ValueError("must be true or false (yes/no, 1/0)")


def _rejoin(raw: object) -> str:
    """Reads `true`, `false` or `now`, and returns the text: the three are one choice."""
    if str(raw).strip().lower() == "now":
        return "now"
    try:
        if _boolean(raw):
            return "true"
        return "false"
    except ValueError:
        raise ValueError("must be true, false or now") from None


def _text(raw: object) -> str:
    """Reads text; a number of YAML becomes text again."""
    if not isinstance(raw, (str, int, float)) or isinstance(raw, bool):
        raise ValueError("must be text")
    return str(raw).strip()


def _path(raw: object) -> str:
    """Reads a path, for a setting that must have one."""
    text = _text(raw)
    if means_none(text):
        raise ValueError("must be a path")
    return text


def _texts(raw: object) -> tuple[str, ...]:
    """Reads a list of texts: one text with commas, or a list of YAML."""
    if isinstance(raw, (list, tuple)):
        return tuple(_text(item) for item in raw)
    return tuple(text for text in (part.strip() for part in _text(raw).split(",")) if text)


def _preload(raw: object) -> tuple[str, ...]:
    """Reads names of modules. `auto` among them says that further modules are learned; `none` stands for no name."""
    if means_none(raw):
        return (NONE,)
    return tuple(text.lower() if text.lower() in (AUTO, NONE) else text for text in _texts(raw))


def _codes(raw: object) -> tuple[int, ...]:
    """Reads exit codes of failed ranks: one, or several."""
    if isinstance(raw, int):
        raw = [raw]
    try:
        codes = tuple(int(text) for text in _texts(raw))
    except ValueError:
        raise ValueError("must be exit codes like 3,17") from None
    if any(not 1 <= code <= 255 for code in codes):
        raise ValueError("exit codes lie between 1 and 255")
    return codes


def _sections(raw: object) -> dict[str, float | None]:
    """Reads the limits of sections: `setup:600,step:180`, or a mapping of YAML; `name:none` for a section without a
    limit. A name may have colons: the last one ends it."""
    if isinstance(raw, Mapping):
        pairs = [(str(name).strip(), value) for name, value in raw.items()]
    else:
        pairs = []
        for part in (part for part in str(raw).split(",") if part.strip()):
            name, colon, value = part.rpartition(":")
            if not colon or not name.strip():
                raise ValueError(f"{part.strip()!r} is not NAME:SECONDS")
            pairs.append((name.strip(), value.strip()))
    result: dict[str, float | None] = {}
    for name, value in pairs:
        try:
            if means_none(value):
                result[name] = None
            else:
                result[name] = _limit(value)
        except ValueError as problem:
            raise ValueError(f"section {name!r}: {problem}") from None
    return result


def _range(raw: object, *, form: str) -> tuple[float, float]:
    """Reads two numbers, the lower one first: `1:30` or a list. In YAML the text needs quotes: YAML 1.1 reads 1:30 as
    the number 90 (base 60)."""
    if isinstance(raw, (list, tuple)):
        bounds = list(raw)
    else:
        bounds = [part.strip() for part in str(raw).split(":")]
    if len(bounds) != 2:
        raise ValueError(f"must be {form} (in YAML in quotes)")
    low, high = bounds
    pair = (_seconds(low), _seconds(high))
    if pair[0] > pair[1]:
        raise ValueError(f"{low} is above {high}; write {form}")
    return pair


def _ports(raw: object) -> tuple[int, int]:
    low, high = _range(raw, form="LOW:HIGH")
    return _port(low), _port(high)


def _backoff(raw: object) -> tuple[float, float]:
    """Reads the shortest and the longest wait before a restart; 0 or none: no wait."""
    if means_none(raw) or str(raw).strip() in {"0", "0.0"}:
        return (0.0, 0.0)
    return _range(raw, form="MIN:MAX")


def _port_or_off(raw: object) -> int | None:
    """Reads a port; off, none or YAML's false: None."""
    if raw is False or means_none(raw) or str(raw).strip().lower() == "off":
        return None
    return _port(raw)


def _log_level(raw: object) -> str:
    """Reads a level by its name, or by its number as in `logging`; also `WARN` and `DBG`. Returns the name."""
    text = str(raw).strip().upper()
    level = _LEVELS.get(text, text)
    if level not in _LEVELS.values():
        raise ValueError(f"must be one of {', '.join(dict.fromkeys(_LEVELS.values()))}")
    return level


def _signal(raw: object) -> int:
    """Reads a signal of this system: `SIGTERM`, `TERM`, 15, or `SIGRTMIN+7`. Returns the number."""
    text = str(raw).strip().upper()
    if text.isdigit():
        number = int(text)
    else:
        name, _, offset = text.partition("+")
        if name.strip().startswith("SIG"):
            name = name.strip()
        else:
            name = f"SIG{name.strip()}"
        if not hasattr(signal, name) or (offset and not offset.strip().isdigit()):
            raise ValueError("is not a signal of this system")
        number = int(getattr(signal, name)) + int(offset or 0)
    try:
        return signal.Signals(number)
    except ValueError:
        if signal.SIGRTMIN <= number <= signal.SIGRTMAX:
            return number
        raise ValueError("is not a signal of this system") from None


def signal_name(number: int) -> str:
    """Returns a signal as `SIGNAL` reads it: `SIGTERM`, `SIGRTMIN+7`."""
    if signal.SIGRTMIN < number < signal.SIGRTMAX:
        return f"SIGRTMIN+{number - signal.SIGRTMIN}"
    return signal.Signals(number).name


def _or_empty(form: str, read_some: Callable[[object], object], empty: Callable[[], object]) -> Kind:
    """Returns a kind that makes `empty()` of what means none, and reads everything else by `read_some`."""

    def read(raw: object) -> object:
        if means_none(raw):
            return empty()
        return read_some(raw)

    return Kind(form, read)


def _or_none(kind: Kind) -> Kind:
    """Returns a kind whose value may also be none."""
    return _or_empty(f"{kind.form} or none", kind.read, lambda: None)


def choice(*choices: str) -> Kind:
    """Returns the kind of one of `choices`. Upper and lower case make no difference."""

    def read(raw: object) -> str:
        # YAML 1.1 reads on and off as booleans.
        if isinstance(raw, bool):
            text = {True: "on", False: "off"}.get(raw, str(raw))
        else:
            text = str(raw)
        for known in choices:
            if text.strip().lower() == known.lower():
                return known
        raise ValueError(f"must be one of {', '.join(choices)}")

    return Kind("|".join(choices), read)


SECONDS_ABOVE_ZERO = Kind("seconds above 0", _limit)
LIMIT = _or_none(SECONDS_ABOVE_ZERO)
SAVE_INTERVAL = _or_none(Kind("seconds above 0, auto", _save_interval))
MEMORY_INTERVAL = _or_none(Kind("steps, auto", _memory_interval))
BYTES = Kind("bytes, as in 8GiB", _bytes)
BYTES_OR_NONE = _or_none(BYTES)
LIMIT_MB = _or_none(Kind("MiB above 0", _limit))
SECONDS = Kind("seconds", _seconds)
SECONDS_OR_NONE = _or_none(SECONDS)
AMOUNT = Kind("number, zero or more", _seconds)
FACTOR = Kind("number of at least 1", _factor)
COUNT = Kind("whole number", _count)
COUNT_OR_NONE = _or_none(COUNT)
COUNT_ABOVE_ZERO = Kind("whole number of at least 1", _count_above_zero)
NCCL_MODE = Kind("0|1|2|3|true|none", _nccl_mode)
BOOLEAN = Kind("true|false", _boolean)
REJOIN = Kind("true|false|now", _rejoin)
TEXT_OR_NONE = _or_none(Kind("text", _text))
PATH = Kind("path", _path)
PATH_OR_NONE = _or_none(Kind("path", _text))
PRELOAD = Kind("auto|none|a,b,...", _preload)
TEXTS = _or_empty("a,b,...", _texts, tuple)
EXIT_CODE = Kind("exit code", _exit_code)
CODES = _or_empty("exit codes", _codes, tuple)
SECTIONS = _or_empty("NAME:SECONDS,...", _sections, dict)
BACKOFF = Kind("MIN:MAX seconds, or 0", _backoff)
PORTS = _or_none(Kind("LOW:HIGH", _ports))
PORT_OR_OFF = Kind("port or off", _port_or_off)
LOG_LEVEL = Kind("DEBUG|INFO|WARNING|ERROR|CRITICAL", _log_level)
SIGNAL = Kind("signal", _signal)
