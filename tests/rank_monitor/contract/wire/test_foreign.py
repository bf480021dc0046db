"""Files and JSON that somebody else wrote: read within bounds, whatever stands there."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from rank_monitor.contract.wire.foreign import MAX_DEPTH, MAX_FILE_BYTES, check_depth, parse_json, read_file, read_json


def test_a_regular_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text('{"a": [1, 2.5, "[[["]}')
    assert read_json(tmp_path / "file") == {"a": [1, 2.5, "[[["]}


def _link(path: Path) -> None:
    path.symlink_to("/dev/zero")


def _folder(path: Path) -> None:
    path.mkdir()


def _large(path: Path) -> None:
    path.write_bytes(bytes(MAX_FILE_BYTES + 1))


@pytest.mark.parametrize("make", [os.mkfifo, _link, _folder, _large, lambda path: None])
@pytest.mark.parametrize("follow_link", [False, True])
def test_what_is_not_read(tmp_path: Path, make: Callable[[Path], None], follow_link: bool) -> None:
    make(tmp_path / "file")
    with pytest.raises(OSError):
        read_file(tmp_path / "file", follow_link=follow_link)


def test_a_link_to_a_regular_file_is_read_only_where_the_user_named_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("7")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    with pytest.raises(OSError):
        read_file(tmp_path / "link")
    assert read_file(tmp_path / "link", follow_link=True) == b"7"


def test_the_tail_of_a_large_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"a" * 100 + b"b" * 10)
    assert read_file(tmp_path / "file", 10, tail=True) == b"b" * 10
    assert read_file(tmp_path / "file", 200, tail=True) == b"a" * 100 + b"b" * 10


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "NaN",
        "[-Infinity]",
        "1e999",
        "1" * 33,
        "0." + "1" * 40,
        "[" * 100_000 + "]" * 100_000,
        '{"a":' * (MAX_DEPTH + 1) + "1" + "}" * (MAX_DEPTH + 1),
        '[{"[":' * MAX_DEPTH + "1" + "}]" * MAX_DEPTH,
        '["1e5", 1E+400]',
        f'{{"a": -{"1" * 30}.5e5}}',
        b"\xff\xfe",
    ],
)
def test_json_that_is_refused(text: str | bytes) -> None:
    with pytest.raises(ValueError):
        parse_json(text)


@pytest.mark.parametrize(
    "value",
    [
        "[" * 1000,
        '\\"[{' * 1000,
        {"[{": "]}" * 500},
        [[]] * 1000,
        [{"a": ["[", "", '"[', "\\["]}] * 50,
        ["1" * 40, "e1000", {"1e+999": "-" * 40}],
        -1,
        2**64,
        1.7976931348623157e308,
        json.loads("[" * MAX_DEPTH + "]" * MAX_DEPTH),
    ],
)
def test_brackets_in_strings_and_beside_each_other_are_not_depth(value: object) -> None:
    assert parse_json(json.dumps(value)) == value


@pytest.mark.parametrize("text", ['"' + "[" * 100, '"\\' + "[" * 100, "]" * 50 + "[" * 20])
def test_a_broken_text_is_left_to_the_parser(text: str) -> None:
    check_depth(text, 32)
    with pytest.raises(ValueError):
        parse_json(text)
