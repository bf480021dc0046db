"""The search in linear time, by RE2: it finds what `re.search` finds, also where that would take years."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
import unicodedata
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ft_launcher.settings.line_pattern import LinePattern, check_expression
from ft_launcher.tools.training_log.presets import reader
from ft_launcher.tools.training_log.rank_log import MAX_LINE
from rank_monitor.contract.errors import ConfigError
from rank_monitor.contract.settings.config import RecordSettings
from rank_monitor.contract.settings.declaration import parse
from rank_monitor.contract.settings.log_pattern import PRESETS

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("re2") is None and not os.environ.get("CI"), reason="google-re2 is not installed"
)

LITERALS = st.sampled_from(["a", "b", "1", " ", ".", r"\d", r"\w", r"\S", "[ab]", "[^a]", "[a-b1]", "[^\\s1]", r"\."])
TIMES = st.sampled_from(["", "", "*", "+", "?", "*?", "+?", "??", "{2}", "{1,3}", "{0,2}?", "{2,}"])
PIECE = st.builds(lambda what, times: what + times, LITERALS, TIMES)
FLAT = st.lists(PIECE, max_size=4).map("".join)
CHOICE = st.lists(FLAT, min_size=2, max_size=3).map("|".join)
GROUP = st.builds(
    lambda name, inner: f"(?P<{name}>{inner})", st.sampled_from(["loss", "step_time"]), st.one_of(FLAT, CHOICE)
)
OTHER = st.one_of(
    st.sampled_from(["^", "$", r"\b", r"\B", "(?:ab)+", "(?:a1)*?"]), st.builds(lambda c: f"(?:{c})", CHOICE)
)
# No line of a rank is empty. For the end of a word RE2 knows ASCII letters alone, so no other letter is in these lines.
LINES = st.text("ab1 .█", min_size=1, max_size=12)


@given(st.lists(st.one_of(FLAT, OTHER), max_size=3), GROUP, st.lists(st.one_of(FLAT, OTHER), max_size=3), LINES)
def test_finds_what_re_finds(before: list[str], group: str, after: list[str], line: str) -> None:
    text = "".join([*before, group, *after])
    match = re.search(text, line)
    assert LinePattern(text).search(line) == (None if match is None else match.groupdict())


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (r"(?i)LOSS (?P<loss>\w+)", "the loss NaN"),
        (r"(?i)straße (?P<loss>\w+)", "STRAßE NaN"),
        (r"(?x) loss \s (?P<loss> \d+ )  # the loss", "loss 12"),
        (r"(?s)a.(?P<loss>b)", "a\nb"),
        (r"(?m)^(?P<loss>b)$", "a\nb\nc"),
        (r"(?a)(?P<loss>\w+)", "éa_1é"),
        (r"(?ai)(?P<loss>\S+) \D", "x\xa0é\x1d é"),
        (r"\A(?P<loss>a)(?#the end)\Z", "a"),
        (r"(?P<iteration>\d+)|(?P<loss>x)", "ax1"),
        (r"a(?P<loss>b)?(?P<iteration>1)?", "a1"),
        (r"(?P<loss>a)+(b)(?:c)", "aaabc"),
        (r"[]\^-](?P<loss>[\d\-]+)", "]-12"),
        (r"[[:alpha:](?P<loss>[:digt]+)]", "p:]"),
        (r"(?P<loss>[^\W\d_]+)", "1_é1"),
        (r"(?P<loss>[\W1]+)", "é1 █é"),
        (r"(?P<loss>[\S\t]+)", " a\tb c"),
        (r"\u2588\x20\N{EM DASH}\060(?P<loss>█)", "█ —0█"),
        (r"\{(?P<loss>\$\.\*)\}", "{$.*}"),
        (r"a{,2}(?P<loss>a{3,}?)a{0}", "aaaaa"),
        (r"a{x}(?P<loss>\w)", "a{x}b"),
        (r"(?P<loss>abc|abd|)x", "abdx"),
        (r"(?P<loss>a|ab)(?:b)?", "ab"),
        (r"(?P<loss>\ud800?)\0", "\0"),
        (r"(?P<loss>\w{400})", "é" * 400),
    ],
)
@pytest.mark.filterwarnings("ignore:Possible nested set:FutureWarning")
def test_forms(text: str, line: str) -> None:
    """Each is one that the check of the setting allows, in a form that RE2 lacks or means otherwise."""
    assert parse(RecordSettings, "watch_log", text, "--ft-watch-log") == text
    match = re.search(text, line)
    assert match is not None and LinePattern(text).search(line) == match.groupdict()


@pytest.mark.parametrize("flag", ["", "(?a)"])
@pytest.mark.parametrize("name", [r"\d", r"\D", r"\s", r"\S", r"\w", r"\W"])
def test_classes_are_pythons(name: str, flag: str) -> None:
    """Of the first 12,544 characters: those after them are ideographs and later additions to Unicode."""
    pattern, python = LinePattern(f"{flag}(?P<loss>{name})"), re.compile(f"{flag}{name}")
    characters = [chr(code) for code in range(0x3100) if unicodedata.category(chr(code)) != "Cn"]
    other = [hex(ord(one)) for one in characters if (pattern.search(one) is None) != (python.search(one) is None)]
    assert other == []


def test_a_word_ends_at_the_last_ascii_letter() -> None:
    """The one difference to `re`."""
    assert re.search(r"x\b", "xé") is None
    assert LinePattern(r"(?P<loss>x)\b").search("xé") == {"loss": "x"}


def test_a_line_that_would_stop_the_launcher() -> None:
    """`re` takes the fifth power of the length: for this line longer than any job runs."""
    pattern = LinePattern(r"(?P<iteration>\d+).*(?P<loss>\d+).*(?P<step_time>\d+)x")
    assert pattern.search("1" * MAX_LINE) is None
    assert pattern.search("1" * (MAX_LINE - 1) + "x") == {
        "iteration": "1" * (MAX_LINE - 3),
        "loss": "1",
        "step_time": "1",
    }


def _check(watch_log: str) -> None:
    check_expression(RecordSettings(watch_log=watch_log), {"watch_log": "--ft-watch-log"})


@pytest.mark.parametrize("stranger", [None, ModuleType("re2")], ids=["none", "of another package"])
def test_without_google_re2_presets_work_and_an_expression_says_what_to_install(
    stranger: ModuleType | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "re2", stranger)
    for preset in PRESETS:
        _check(preset)
        assert reader(preset)("nothing of a training") is None
    with pytest.raises(ConfigError, match=r"google-re2.*pip install 'ft-launcher\[watch\]'") as refused:
        _check(r"(?P<iteration>\d+)")
    assert "from --ft-watch-log" in str(refused.value)


def test_an_expression_that_re2_refuses_is_an_error_of_the_setting(capfd: pytest.CaptureFixture[str]) -> None:
    """Such as a repeat of nothing: none that finds anything is known."""
    with pytest.raises(ConfigError, match="RE2 refuses it"):
        _check(r"(?P<iteration>\d+)(?:){2000}")
    assert capfd.readouterr().err == "", "RE2 writes its own errors there unless it is told not to"
