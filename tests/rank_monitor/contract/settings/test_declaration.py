"""How settings are read: every kind with good and bad values, and the way to a monitor and back."""

from __future__ import annotations

import json
import signal

import pytest

from rank_monitor.contract.errors import ConfigError
from rank_monitor.contract.settings import config, declaration, kinds
from rank_monitor.contract.settings.config import MonitorSettings
from rank_monitor.contract.settings.kinds import Kind
from tests.rank_monitor.timeline import limited

REALTIME = signal.SIGRTMIN + 7


@pytest.mark.parametrize(
    ("kind", "raw", "value"),
    [
        (kinds.SAVE_INTERVAL, "900", 900.0),
        (kinds.SAVE_INTERVAL, " Auto ", "auto"),
        (kinds.SAVE_INTERVAL, "none", None),
        (kinds.MEMORY_INTERVAL, "100", 100),
        (kinds.MEMORY_INTERVAL, "AUTO", "auto"),
        (kinds.MEMORY_INTERVAL, "none", None),
        (kinds.BYTES_OR_NONE, "4096", 4096),
        (kinds.BYTES_OR_NONE, 4096, 4096),
        (kinds.BYTES_OR_NONE, "64m", 64 << 20),
        (kinds.BYTES_OR_NONE, "1.5 GiB", 3 << 29),
        (kinds.BYTES_OR_NONE, "2TB", 2 << 40),
        (kinds.BYTES_OR_NONE, "none", None),
        (kinds.PATH, " /dev/shm ", "/dev/shm"),
        (kinds.LIMIT, "2700", 2700.0),
        (kinds.LIMIT, 0.5, 0.5),
        (kinds.LIMIT, " 5 ", 5.0),
        (kinds.LIMIT, "1e3", 1000.0),
        *((kinds.LIMIT, word, None) for word in (None, "", "none", "None", "NULL", " null ")),
        (kinds.SECONDS, 0, 0.0),
        (kinds.FACTOR, "1.0", 1.0),
        (kinds.COUNT, "0", 0),
        (kinds.COUNT, 3.0, 3),
        *((kinds.BOOLEAN, word, True) for word in (True, "true", "Yes", 1, "1")),
        *((kinds.BOOLEAN, word, False) for word in (False, "FALSE", "no", 0)),
        (kinds.SECTIONS, "setup:600,step:180", {"setup": 600.0, "step": 180.0}),
        (kinds.SECTIONS, "a:b:5, free:none,", {"a:b": 5.0, "free": None}),
        (kinds.SECTIONS, {"step": 5, "free": None}, {"step": 5.0, "free": None}),
        (kinds.SECTIONS, "none", {}),
        (kinds.SECTIONS, "step:", {"step": None}),
        (kinds.TEXTS, "a, b,,c", ("a", "b", "c")),
        (kinds.TEXTS, ["a", 1], ("a", "1")),
        (kinds.TEXTS, None, ()),
        (kinds.CODES, "3,17", (3, 17)),
        (kinds.CODES, 3, (3,)),
        (kinds.BACKOFF, "0", (0.0, 0.0)),
        (kinds.BACKOFF, "1:30", (1.0, 30.0)),
        (kinds.PORTS, "1024:65535", (1024, 65535)),
        (kinds.SIGNAL, "SIGTERM", signal.SIGTERM),
        (kinds.SIGNAL, "term", signal.SIGTERM),
        (kinds.SIGNAL, 15, signal.SIGTERM),
        (kinds.SIGNAL, "SIGRTMIN+7", REALTIME),
        (kinds.SIGNAL, str(REALTIME), REALTIME),
        (kinds.choice("auto", "on", "off"), "ON", "on"),
        (kinds.choice("auto", "on", "off"), True, "on"),
        (kinds.TEXT_OR_NONE, " x ", "x"),
    ],
)
def test_good_values(kind: Kind, raw: object, value: object) -> None:
    assert kind.read(raw) == value


@pytest.mark.parametrize(
    ("kind", "raw"),
    [
        *((kinds.SAVE_INTERVAL, raw) for raw in (0, "often", "nan", True)),
        *((kinds.LIMIT, raw) for raw in (0, "0", -1, "-5", "nan", "inf", "soon", True, [5], float("nan"), 10**400)),
        *((kinds.MEMORY_INTERVAL, raw) for raw in (0, 1.5, "often", True)),
        *((kinds.BYTES_OR_NONE, raw) for raw in (0, "0.1", "-1", "8 GB free", "G", "1.2.3G", True, [1])),
        *((kinds.PATH, raw) for raw in ("", "none", None, [])),
        *((kinds.COUNT_ABOVE_ZERO, raw) for raw in (0, -1, "x")),
        *((kinds.SECONDS, raw) for raw in (-0.1, "nan", "x", None, [1])),
        (kinds.FACTOR, 0.9),
        *((kinds.COUNT, raw) for raw in (-1, 1.5, "x", "1e400")),
        *((kinds.BOOLEAN, raw) for raw in ("maybe", 2, None)),
        *((kinds.SECTIONS, raw) for raw in ("step", ":5", "step:0", "step:-1", "step:x", 5, ["step:5"])),
        *((kinds.CODES, raw) for raw in ("0", "256", "x")),
        *((kinds.BACKOFF, raw) for raw in ("5", "5:1", "x:y")),
        *((kinds.PORTS, raw) for raw in ("0:5", "1:65536", "5")),
        *((kinds.SIGNAL, raw) for raw in ("SIGNOPE", "0", "99", "SIGTERM+x", "", "SIG_DFL", "SIGRTMIN+60")),
        (kinds.choice("auto", "on"), "off"),
        (kinds.TEXT_OR_NONE, []),
    ],
    ids=lambda value: value.form if isinstance(value, Kind) else repr(value),
)
def test_bad_values(kind: Kind, raw: object) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        kind.read(raw)


def test_an_error_names_key_value_source_and_what_is_expected() -> None:
    with pytest.raises(ConfigError) as caught:
        declaration.parse(MonitorSettings, "rank_heartbeat_timeout", "-5", "--ft-rank-heartbeat-timeout")
    said = str(caught.value)
    for part in ("rank_heartbeat_timeout", "'-5'", "--ft-rank-heartbeat-timeout", "above zero", "Expected: seconds"):
        assert part in said


@pytest.mark.parametrize(
    "sent",
    [
        MonitorSettings(),
        limited(),
        limited(rank_section_timeouts={"a:b": 5.0, "free": None}, rank_termination_signal=REALTIME, log_level="DEBUG"),
        limited(connect_timeout=1e9, num_warmup_iterations=0, dump_stacks=False, termination_grace_time=0.0),
    ],
)
def test_settings_reach_the_monitor_as_they_were(sent: MonitorSettings) -> None:
    assert declaration.from_json(MonitorSettings, json.loads(json.dumps(declaration.to_json(sent))), "a test") == sent


def test_a_setting_of_another_version_is_ignored_and_a_missing_one_takes_its_default() -> None:
    assert declaration.from_json(MonitorSettings, {"of_tomorrow": 1}, "a test") == MonitorSettings()


def test_every_default_fits_its_kind_and_keys_are_unique() -> None:
    seen: set[str] = set()
    for group in config.GROUPS.values():
        known = declaration.declarations(group)
        assert not seen & known.keys()
        seen |= known.keys()
        values = declaration.to_json(group())
        for key, declared in known.items():
            assert declared.help
            if isinstance(declaration.default_of(group, key), tuple):
                continue  # written as text, `1:30` or `a,b`, by whoever sets it
            assert declaration.parse(group, key, values[key], "default") == declaration.default_of(group, key)


def test_settings_that_contradict_each_other() -> None:
    with pytest.raises(ConfigError, match="node_timeout"):
        config.Settings(members=config.MemberSettings(node_beat=20.0))
