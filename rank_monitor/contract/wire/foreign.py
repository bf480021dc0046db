"""Reads files, JSON and numbers that another process wrote, within bounds. Does not interpret them.

A rank chooses the bytes of its error file, of its messages and of its reports, and may be wrong or hostile. A FIFO must
not block the reader. A link to `/dev/zero` must not fill the reader's memory. JSON that is nested 100,000 deep must not
end the reader with RecursionError, and a number of a million digits must not keep it busy. So all such files and texts
pass through here. One reader is elsewhere: that of a rank's stack file, which is read from an offset
(`rank_process.py`).
"""

from __future__ import annotations

import json
import os
import re
import stat
from typing import IO, Any, NoReturn

MAX_FILE_BYTES = 64 * 1024
"""A traceback of 500 frames has about 50 KB; no record that ranks write for us is larger."""
MAX_USER_FILE_BYTES = 16 << 20
"""Of a file that the user names: YAML, which may hold the settings of other programs too, or a map of devices."""
MAX_DEPTH = 32
"""Our own records are nested at most six deep; torch's error files three."""
_MAX_NUMBER = 32
"""Characters of one number. A float's shortest exact form has at most 24, a 64-bit integer 20."""

_OF_NUMBERS = bytes.maketrans(b"123456789.E", b"0000000000e")
"""Makes every digit and point a 0, so that a long number is a run of them (`_may_be_out_of_range`)."""
_MAX_BESIDE = len("-e+00")
"""Characters of a number beside its digits and point, where its exponent has at most two digits."""
_STRING = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"?', re.DOTALL)
_BRACKET = re.compile(r"[\[{\]}]")
_OF_NO_STRUCTURE = bytes(set(range(256)) - set(b'[{]}"\\'))
_ONE_KIND = bytes.maketrans(b"{}", b"[]")


def open_regular(path: str | os.PathLike[str], follow_link: bool, buffering: int = -1) -> IO[bytes]:
    """Opens a regular file for reading. Does not block: a rank may have put a FIFO or a link to a device there.

    Args:
        path: of the file.
        follow_link: whether the last part of `path` may be a symbolic link.
        buffering: as for `open`.

    Raises:
        OSError: the file cannot be opened, or is not a regular file.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
    if not follow_link:
        flags |= os.O_NOFOLLOW
    descriptor = os.open(path, flags)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{path} is not a regular file")
    return os.fdopen(descriptor, "rb", buffering)


def read_file(
    path: str | os.PathLike[str], most: int = MAX_FILE_BYTES, follow_link: bool = False, tail: bool = False
) -> bytes:
    """Returns the content of a regular file. Opening it does not block, whatever is at `path`.

    Args:
        path: of the file.
        most: bytes; a larger file is refused.
        follow_link: whether the last part of `path` may be a symbolic link: for a path that the user chose, not a rank.
        tail: return the last `most` bytes of a larger file, instead of refusing it.

    Raises:
        OSError: the file cannot be opened, is not a regular file, or is larger than `most`.
    """
    with open_regular(path, follow_link) as file:
        size = os.fstat(file.fileno()).st_size
        if tail and size > most:
            file.seek(size - most)
        content = file.read(most + 1)
    if len(content) > most and not tail:
        raise OSError(f"{path} is larger than {most} bytes")
    return content[:most]


def read_json(path: str | os.PathLike[str], follow_link: bool = False) -> Any:
    """Returns the JSON value in a regular file; arguments as for `read_file`.

    Raises:
        OSError: as for `read_file`.
        ValueError: the content is not JSON, or not within the bounds of `parse_json`.
    """
    return parse_json(read_file(path, follow_link=follow_link))


def parse_json(text: str | bytes) -> Any:
    """Returns the value of a JSON text. Takes time linear in its length.

    Raises:
        ValueError: the text is not JSON, is nested deeper than `MAX_DEPTH`, or holds NaN, an infinity, or a number of
            more than 32 characters.
    """
    if isinstance(text, bytes):
        text = text.decode("utf-8", errors="replace")
    check_depth(text, MAX_DEPTH)
    if _may_be_out_of_range(text):
        return _STRICT.decode(text)
    return _PLAIN.decode(text)


def parse_object(text: str | bytes) -> dict[str, Any]:
    """Returns the object of a JSON text; an empty one where the text is no object, or not within the bounds of
    `parse_json`. For a reader to whom a wrong text says the same as none."""
    try:
        found = parse_json(text)
    except ValueError:
        return {}
    if isinstance(found, dict):
        return found
    return {}


def _may_be_out_of_range(text: str) -> bool:
    """Whether a number in a text may be too long, or have an exponent of three digits, so that no float holds it.

    Only then each number is checked, which takes three times as long. A rank's words may look like such a number; the
    name of a host, `node017`, does not.
    """
    raw = text.encode(errors="replace").translate(_OF_NUMBERS, b"+-")
    return b"0" * (_MAX_NUMBER + 1 - _MAX_BESIDE) in raw or b"0e000" in raw


def check_depth(text: str, max_depth: int) -> None:
    """Refuses JSON that is nested too deep, before a parser recurses into it. Linear in the text's length.

    All but brackets is removed from the text, then innermost pairs are removed `max_depth` times: what is left then was
    nested deeper.

    Raises:
        ValueError: the text is nested deeper than `max_depth`.
    """
    if text.count("[") + text.count("{") <= max_depth:
        return
    brackets = text.encode(errors="replace").translate(_ONE_KIND, _OF_NO_STRUCTURE).replace(b'""', b"")
    # A bracket in a string has an odd number of quotes before it, of which one is left.
    if b'"' in brackets or b"\\" in brackets:
        brackets = "".join(_BRACKET.findall(_STRING.sub("", text))).encode().translate(_ONE_KIND)
    for _ in range(max_depth):
        brackets = brackets.replace(b"[]", b"")
    if brackets:
        raise ValueError(f"JSON is nested more than {max_depth} deep, or its brackets do not match")


def whole_number(text: bytes | str, most: int) -> int | None:
    """Returns the whole number in a text; None if the text is no number, or one that is not from 0 to `most`."""
    # `int` takes quadratic time for many digits.
    if len(text) > _MAX_NUMBER:
        return None
    try:
        number = int(text)
    except ValueError:
        return None
    if 0 <= number <= most:
        return number
    return None


def _whole(digits: str) -> int:
    if len(digits) > _MAX_NUMBER:
        raise ValueError(f"JSON holds a number of {len(digits)} characters")
    return int(digits)


def _real(digits: str) -> float:
    if len(digits) > _MAX_NUMBER:
        raise ValueError(f"JSON holds a number of {len(digits)} characters")
    value = float(digits)
    if value in (float("inf"), float("-inf")):
        raise ValueError("JSON holds a number that no float can hold")
    return value


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"JSON holds {name}")


_PLAIN = json.JSONDecoder(parse_constant=_no_number)
_STRICT = json.JSONDecoder(parse_int=_whole, parse_float=_real, parse_constant=_no_number)
