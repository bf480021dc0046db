"""Our options: every spelling of every one, and what is said about one that does not exist."""

from __future__ import annotations

from argparse import ArgumentParser

import pytest

from ft_launcher.settings import options
from ft_launcher.settings.options import UsageError
from rank_monitor.contract.settings import config
from rank_monitor.contract.settings.declaration import declarations


def spellings(key: str) -> list[str]:
    dashed = key.replace("_", "-")
    return [f"{prefix}{form}" for prefix in ("--ft-", "--ft-param-", "--ft_", "--ft_param_") for form in (key, dashed)]


@pytest.mark.parametrize("key", [*options.GROUP_OF, *options.DONE_INSTEAD])
def test_every_spelling_means_the_key(key: str) -> None:
    assert {options.key_of(flag) for flag in spellings(key)} == {key}
    assert options.canonical(key.upper()) == options.canonical(key.replace("_", "-")) == key


@pytest.mark.parametrize(
    ("flag", "key"),
    [
        ("--fault-tol-cfg-path", "cfg_path"),
        ("--fault_tol_cfg_path", "cfg_path"),
        ("--ft-cfg_path", "cfg_path"),
        ("--ft_cfg_path", "cfg_path"),
        ("--ignore-missing-fault-tol-cfg", "ignore_missing_cfg"),
        ("--ft-ignore-missing-cfg", "ignore_missing_cfg"),
        ("--restart_policy", "restart_policy"),
        ("--workers-stop-timeout", "workers_stop_timeout"),
        ("--term_timeout", "preemption_grace"),
        ("--ft-term-timeout", "preemption_grace"),
        ("--ft-rank_heartbeat-timeout", "rank_heartbeat_timeout"),
        ("--nnodes", None),
        ("-m", None),
    ],
)
def test_spellings_in_use(flag: str, key: str | None) -> None:
    assert options.key_of(flag) == key


@pytest.mark.parametrize(
    ("flag", "near"),
    [
        ("--ft-rank-hartbeat-timeout", "--ft-rank-heartbeat-timeout"),
        ("--ft_param_rank_section_timeout", "--ft-rank-section-timeouts"),
        ("--fault-tol-cfg", "--fault-tol-cfg-path"),
        ("--ft-enable-log-servers", "--ft-enable-log-server"),
        ("--ft-zzzz", None),
    ],
)
def test_an_unknown_option_is_an_error_with_the_nearest(flag: str, near: str | None) -> None:
    with pytest.raises(UsageError) as error:
        options.key_of(flag)
    assert flag in str(error.value)
    assert (f"did you mean {near}?" in str(error.value)) if near else ("did you mean" not in str(error.value))


def test_help_shows_every_setting_with_its_default() -> None:
    parser = ArgumentParser()
    options.add_group(parser)
    text = " ".join(parser.format_help().split())
    shown = {key for key in options.GROUP_OF if f"{options.flag_of(key)} " in text}
    assert shown == {key for key in options.GROUP_OF if not options.declaration_of(key).instead}
    assert "default 3600" in text
    assert "default SIGRTMIN+7" in text


def test_keys_are_unique_over_all_groups() -> None:
    assert len(options.GROUP_OF) == sum(len(declarations(group)) for group in config.GROUPS.values())
    assert not set(options.GROUP_OF) & set(options.DONE_INSTEAD)
    assert not set(options.GROUP_OF) & set(options.ALIASES)
