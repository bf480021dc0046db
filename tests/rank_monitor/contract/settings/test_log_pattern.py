"""What `--ft-watch-log` may be: presets, and expressions that Python's engine matches without trying all ways."""

from __future__ import annotations

import pytest

from rank_monitor.contract.errors import ConfigError
from rank_monitor.contract.settings.config import RecordSettings, Settings
from rank_monitor.contract.settings.declaration import from_json, parse


def read(raw: object) -> object:
    return parse(RecordSettings, "watch_log", raw, "--ft-watch-log")


@pytest.mark.parametrize(
    ("raw", "value"),
    [
        ("megatron", "megatron"),
        (" NanoGPT ", "nanogpt"),
        ("none", None),
        (None, None),
        (r"step (?P<iteration>\d+).*loss[:=] *(?P<loss>\S+)", r"step (?P<iteration>\d+).*loss[:=] *(?P<loss>\S+)"),
        (r"^(?:\[rank\d+\]: )?it (?P<iteration>\d{1,9}) ", r"^(?:\[rank\d+\]: )?it (?P<iteration>\d{1,9}) "),
        (r"(?:step|iter) (?P<iteration>\d+)", r"(?:step|iter) (?P<iteration>\d+)"),
        (r"(?i)took (?P<step_time>[\d.]+)s?", r"(?i)took (?P<step_time>[\d.]+)s?"),
        (r"(?:ab)+ (?P<loss>x)", r"(?:ab)+ (?P<loss>x)"),
    ],
)
def test_accepted(raw: object, value: object) -> None:
    assert read(raw) == value


@pytest.mark.parametrize(
    ("raw", "problem"),
    [
        ("megatrn", "is not a preset; there are megatron, torchtitan, lightning, huggingface, tqdm, nanogpt"),
        (r"(?P<iteration>\d+", "is not a regular expression: missing \\), unterminated subpattern"),
        (r"step (\d+)", r"named groups iteration, step_time, loss, and no other \(it has: none\)"),
        (r"(?P<step>\d+) (?P<loss>\S+)", r"\(it has: step\)"),
        (r"(?P<iteration>(?:\d+)+)x", "has a repeat within a repeat, which could take exponential time"),
        (r"(?P<iteration>\d+) (?:a*)*b", "has a repeat within a repeat"),
        (r"(?P<iteration>\d+) (?:a?b){9}", "has a repeat within a repeat"),
        (r"(?P<iteration>\d+) (?:(?:a+)b)+", "has a repeat within a repeat"),
        (r"(?P<iteration>\d+) (?:a+?)+", "has a repeat within a repeat"),
        (r"(?P<iteration>\d+) (?:aa|aab)+", "has alternatives within a repeat"),
        (r"(?P<iteration>\d+) (?P=iteration)", "has a reference to a group"),
        (r"(?P<iteration>\d+)(?=.*x)", "has a look-ahead or look-behind"),
        (r"(?<!a)(?P<iteration>\d+)", "has a look-ahead or look-behind"),
        (r"(?P<iteration>\d+)(?!)", "has a look-ahead or look-behind"),
        (r"(a)?(?P<iteration>(?(1)b|c))", "has a condition"),
        (r"(?P<iteration>\d).{0,500}", "has more than 500 parts"),
        (r"(?P<iteration>\d)(?:ab){300}", "has more than 500 parts"),
        (r"(?i:step) (?P<iteration>\d)", "has flags for a part of it"),
        (r"(?P<iteration>\d)" + "a" * 1000, "has 1017 characters; at most 1000 are read"),
        (r"(?P<iteration>\d)" + "(" * 300 + ")" * 300, "."),
    ],
)
def test_refused(raw: str, problem: str) -> None:
    """Each refusal names the option, and says what would be allowed."""
    if problem == ".":  # deep nesting is no repeat: whatever happens, it is an answer
        assert read(raw) == raw
        return
    with pytest.raises(ConfigError, match=problem) as refused:
        read(raw)
    assert "from --ft-watch-log" in str(refused.value)
    assert "exponential" not in problem or "allowed are characters" in str(refused.value)


def test_a_limit_needs_to_know_what_a_step_is() -> None:
    with pytest.raises(ConfigError, match=r"watch_log_timeout.*needs watch_log"):
        Settings(monitor=from_json(type(Settings().monitor), {"watch_log_timeout": 5}, "test"))
