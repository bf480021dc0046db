"""NCCL's variables and the longest hang, by tables; Flyte's names of the settings."""

from __future__ import annotations

from typing import Any

import pytest

from ft_launcher.node.ranks import nccl
from ft_launcher.settings import options
from rank_monitor.contract.errors import ConfigError
from rank_monitor.contract.settings.config import NcclSettings
from rank_monitor.contract.settings.declaration import parse

COLLECTIVE, HEARTBEAT = "FLYTE_NCCL_COLLECTIVE_TIMEOUT_SEC", "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"
MONITORING, ERRORS = "TORCH_NCCL_ENABLE_MONITORING", "TORCH_NCCL_ASYNC_ERROR_HANDLING"
ALL = {"nccl_collective_timeout": 60.0, "nccl_heartbeat_timeout": 90.5, "nccl_async_error_handling": 2}


@pytest.mark.parametrize(
    ("given", "environ", "expected"),
    [
        ({}, {}, {HEARTBEAT: "300", MONITORING: "1"}),
        ({"nccl_heartbeat_timeout": None, "nccl_enable_monitoring": False}, {}, {MONITORING: "0"}),
        (ALL, {}, {COLLECTIVE: "60", HEARTBEAT: "91", MONITORING: "1", ERRORS: "2"}),
        ({"nccl_collective_timeout": 0.5, "nccl_heartbeat_timeout": 1e7}, {},
         {COLLECTIVE: "0.5", HEARTBEAT: "10000000", MONITORING: "1"}),
        (ALL, {COLLECTIVE: "7", HEARTBEAT: "8", MONITORING: "0", ERRORS: "0"}, {}),
        ({"nccl_async_error_handling": 0}, {HEARTBEAT: "8", MONITORING: "1"}, {ERRORS: "0"}),
    ],
)  # fmt: skip
def test_variables(given: dict[str, Any], environ: dict[str, str], expected: dict[str, str]) -> None:
    found = nccl.variables(NcclSettings(**given), environ)
    assert found == expected
    assert nccl.of({**found, "OTHER": "x"}) == expected


@pytest.mark.parametrize("text", ["soon", "0", "-3", "nan"])
def test_a_wrong_variable_of_the_user_is_named(text: str) -> None:
    with pytest.raises(ConfigError, match=f"{COLLECTIVE}='{text}'"):
        nccl.variables(NcclSettings(), {COLLECTIVE: text})


@pytest.mark.parametrize(
    ("ranks", "restarts", "words"),
    [
        ({COLLECTIVE: "600", HEARTBEAT: "300"}, 3, "at most 900 s (collective 600 s + heartbeat 300 s); with"),
        ({COLLECTIVE: "600", HEARTBEAT: "300"}, 3, "with --max-restarts=3 3600 s in all"),
        ({COLLECTIVE: "60", HEARTBEAT: "60"}, 0, "at most 120 s (collective 60 s + heartbeat 60 s)"),
        ({}, 0, "at most 1080 s (collective 600 s, torch's default + heartbeat 480 s, torch's default)"),
        ({COLLECTIVE: "none", HEARTBEAT: "x"}, 0, "at most 1080 s"),
        ({COLLECTIVE: "5", MONITORING: "False"}, 1, "after collective 5 s; nothing ends an abort that hangs"),
        ({ERRORS: "0"}, 1, "NCCL ends no rank"),
    ],
)  # fmt: skip
def test_the_longest_hang_in_words(ranks: dict[str, str], restarts: int, words: str) -> None:
    assert words in nccl.detection(ranks, restarts)


@pytest.mark.parametrize(
    ("name", "raw", "value"),
    [
        ("nccl_collective_timeout_sec", 60, 60.0),
        ("nccl_heartbeat_timeout_sec", None, None),
        ("nccl_async_error_handling", True, 1),
        ("nccl_async_error_handling", False, None),
        ("nccl_async_error_handling", "3", 3),
        ("nccl_async_error_handling", "none", None),
        ("nccl_enable_monitoring", False, False),
    ],
)
def test_fields_of_flyte(name: str, raw: object, value: object) -> None:
    key = options.canonical(name)
    assert key is not None and not options.declaration_of(key).instead
    assert parse(options.GROUP_OF[key], key, raw, "test") == value


@pytest.mark.parametrize("raw", [4, "maybe", 1.5, -1])
def test_a_mode_that_torch_has_not(raw: object) -> None:
    with pytest.raises(ConfigError, match="nccl_async_error_handling"):
        parse(NcclSettings, "nccl_async_error_handling", raw, "test")
